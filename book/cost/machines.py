"""L1: common GPUs as data, and the constants fitted to measured steps on them.

A constant is the product of what its groups have: all, the GPU, the software, and both. So where a pair was never
measured, what its GPU and its software have stands in. `scoreboard` fits them and shows how well they predict.
"""
from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from importlib.resources import files

from book.cost.cluster import Cluster, Overheads
from book.cost.state import ADAM_MIXED, ADAM_MIXED_GRADIENTS_32, StateBytes


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
    "b200": Machine(180e9, 2250e12, 4500e12, 8e12, 900e9, 50e9, 8, "dgxb200", like="gb200"),
    "gb200": Machine(186e9, 2500e12, 5000e12, 8e12, 900e9, 50e9, 72, "gb200"),
    "b300": Machine(270e9, 2250e12, 4500e12, 8e12, 900e9, 100e9, 8, "dgxb300", like="gb200"),
    "gb300": Machine(279e9, 2500e12, 5000e12, 8e12, 900e9, 100e9, 72, "gb300", like="gb200"),
}
USABLE = 0.8  # of the memory: of measured layouts that need more by the formulas, half ran out
FITTED_FILE = ("data", "fitted.json")
CONSTANTS: dict[str, dict[str, float]] = json.loads(
    files("book.cost").joinpath(*FITTED_FILE).read_text("utf-8"))["constants"]
SOFTWARE = ("torchtitan", "megatron", "llm-foundry", "maxtext", "nanotron")
# State of a parameter. nanotron accumulates gradients in 32 bits beside 16-bit ones (scripts/scaling_benchmarks.py).
EACH = {**dict.fromkeys(SOFTWARE, ADAM_MIXED), "megatron": ADAM_MIXED_GRADIENTS_32,
        "nanotron": StateBytes(2, 6, 12)}


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
    if precision == "fp8" and not machine.fp8_flops_per_s:
        raise ValueError(f"{name} has no fp8: use bf16")
    known = factored(constants, _groups(key, software))
    known["gather_bytes"] = 1 if precision == "fp8" else 2
    known["linear_speedup"] = known.pop("fp8_speedup", 1.0) if precision == "fp8" else 1.0
    cluster = Cluster(num_gpus, machine.memory_bytes, machine.bf16_flops_per_s, machine.memory_bytes_per_s,
                      machine.inside_bytes_per_s, machine.across_bytes_per_s, min(known["efficiency"], 1.0),
                      known["num_passes"], machine.gpus_per_node, USABLE)
    own = {f.name for f in fields(Overheads)}
    return replace(cluster, overheads=Overheads(**{name: of for name, of in known.items() if name in own}))


def like(key: str) -> str:
    """The machine whose constants a machine shares."""
    return MACHINES[key].like or key


def _groups(key: str, software: str) -> tuple[str, ...]:
    """The groups of constants that a machine and a software have."""
    return "all", like(key), *((key,) if like(key) != key else ()), software, f"{software} {like(key)}"


def factored(constants: Mapping[str, Mapping[str, float]], groups: Sequence[str]) -> dict[str, float]:
    """Each constant as the product of what the groups have of it; a share is at most 1."""
    found: dict[str, float] = {}
    for group in groups:
        for name, factor in constants.get(group, {}).items():
            found[name] = found.get(name, 1.0) * factor
    return {name: min(of, 1.0) if name.endswith("_share") else of for name, of in found.items()}
