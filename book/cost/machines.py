"""L1: common GPUs as data, and the constants fitted to measured steps on them.

`calibration` fits CONSTANTS from the rows marked for it; the scoreboard shows how well they predict the others.
"""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace

from book.cost.cluster import Cluster, Overheads
from book.cost.state import ADAM_MIXED, StateBytes


@dataclass(frozen=True)
class Machine:
    """A GPU in its usual node: dense peaks in FLOP/s, bytes per second in one direction; `source` is in references.bib.

    `like` names the machine whose efficiency is used where none was measured on this one.
    """

    memory_bytes: float
    bf16_flops_per_s: float
    fp8_flops_per_s: float
    memory_bytes_per_s: float
    inside_bytes_per_s: float
    across_bytes_per_s: float
    gpus_per_node: int
    source: str
    like: str = ""


MACHINES = {
    "a100": Machine(80e9, 312e12, 0, 2.039e12, 300e9, 25e9, 8, "a100"),
    "a100-40": Machine(40e9, 312e12, 0, 1.555e12, 300e9, 25e9, 8, "a100", like="a100"),
    "h100": Machine(80e9, 989e12, 1979e12, 3.35e12, 450e9, 50e9, 8, "h100"),
    "h200": Machine(141e9, 989e12, 1979e12, 4.8e12, 450e9, 50e9, 8, "h200", like="h100"),
    "b200": Machine(180e9, 2250e12, 4500e12, 8e12, 900e9, 50e9, 8, "dgxb200", like="h100"),
    "gb200": Machine(186e9, 2500e12, 5000e12, 8e12, 900e9, 50e9, 72, "gb200", like="h100"),
}
# Shared by all, then those of one machine or one software.
CONSTANTS: dict[str, dict[str, float]] = {
    "all": {"num_passes": 7.88, "product_depth": 1040, "launch_s": 0.000907, "across_share": 0.184,
            "hop_s": 0.000135, "ring_hop_s": 2.48e-06, "hidden_share": 0.969},
    "a100": {"efficiency": 0.866, "attention_share": 0.334},
    "h100": {"efficiency": 0.727, "attention_share": 0.179},
    "megatron": {},
    "llm-foundry": {"across_share": 0.99},
    "nanotron": {"launch_s": 0.00102, "send_node_s": 0.000915, "slowdown": 1.07,
                 "across_share": 0.0967, "kept_factor": 1.85, "fixed_bytes": 5e8},
}
SOFTWARE = ("megatron", "llm-foundry", "nanotron")
# State of a parameter. nanotron accumulates gradients in 32 bits beside 16-bit ones (scripts/scaling_benchmarks.py).
EACH = {"megatron": ADAM_MIXED, "llm-foundry": ADAM_MIXED, "nanotron": StateBytes(2, 6, 12)}


def machine_key(name: str) -> str:
    """The key in MACHINES of a name in upper or lower case; raises ValueError, with the known names, for any other."""
    key = name.lower().removesuffix("-80").removesuffix("-nvl72")
    if key not in MACHINES:
        raise ValueError(f"no GPU is called {name!r}: use {', '.join(MACHINES)}, or a Cluster of your own")
    return key


def cluster_of(name: str, num_gpus: int, software: str = "megatron", precision: str = "bf16",
               constants: Mapping[str, Mapping[str, float]] = CONSTANTS) -> Cluster:
    """A cluster of `num_gpus` GPUs of a machine, with the constants of the machine and of the software.

    Raises ValueError for an unknown name and for a precision that the machine lacks.
    """
    key = machine_key(name)
    machine = MACHINES[key]
    if software not in SOFTWARE:
        raise ValueError(f"no software is called {software!r}: use {', '.join(SOFTWARE)}")
    if precision not in ("bf16", "fp8"):
        raise ValueError(f"precision is bf16 or fp8, not {precision!r}")
    flops_per_s = machine.bf16_flops_per_s if precision == "bf16" else machine.fp8_flops_per_s
    if not flops_per_s:
        raise ValueError(f"{name} has no fp8: use bf16")
    known = {**constants["all"], **constants[machine.like or key], **constants[software]}
    own = {f.name for f in fields(Overheads)}
    cluster = Cluster(num_gpus, machine.memory_bytes, flops_per_s, machine.memory_bytes_per_s,
                      machine.inside_bytes_per_s, machine.across_bytes_per_s, known["efficiency"],
                      known["num_passes"], machine.gpus_per_node)
    return replace(cluster, overheads=Overheads(**{name: of for name, of in known.items() if name in own}))
