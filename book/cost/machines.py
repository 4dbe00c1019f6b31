"""L1: common GPUs as data, and the constants fitted to measured steps on them.

A constant is the product of what its groups have: all, the GPU, the software, and both. So where a pair was never
measured, what its GPU and its software have stands in; a GPU that nobody measured has what all have. `scoreboard` fits
them and shows how well they predict.
"""
from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from importlib.resources import files
from pathlib import Path
from typing import Any

from book.cost.cluster import Cluster, Overheads
from book.cost.layouts import said_by_name
from book.cost.state import ADAM_FSDP2, ADAM_MIXED, ADAM_MIXED_GRADIENTS_32, StateBytes


@dataclass(frozen=True)
class Machine:
    """A GPU in its usual node: dense peaks in FLOP/s, bytes per second in one direction; `source` is in references.bib.

    `like` names the machine whose constants are used, for it is the same chip or its kin. Raises ValueError for numbers
    that can't be in these units.
    """

    memory_bytes: float
    bf16_flops_per_s: float
    fp8_flops_per_s: float
    memory_bytes_per_s: float
    inside_bytes_per_s: float
    across_bytes_per_s: float
    gpus_per_node: int
    source: str = ""
    like: str = ""

    def __post_init__(self) -> None:
        for name, (unit, least) in UNITS.items():
            value = getattr(self, name)
            if not (least <= value < float("inf") or (value == 0 and name == "fp8_flops_per_s")):
                raise ValueError(f"a GPU's {SHORT[name]} is in {unit}, and at least {least:.0e}: {value:g} is not")
        if not isinstance(self.gpus_per_node, int) or self.gpus_per_node < 1:
            raise ValueError(f"the number of GPUs in a node is an integer, not {self.gpus_per_node!r}")


# What the fields are called where people type them; their units, and what is smaller was given in other units.
SHORT = {"memory_bytes": "memory", "bf16_flops_per_s": "flops", "fp8_flops_per_s": "fp8",
         "memory_bytes_per_s": "bandwidth", "inside_bytes_per_s": "inside", "across_bytes_per_s": "across",
         "gpus_per_node": "node", "like": "like"}
UNITS = {"memory_bytes": ("bytes", 1e9), "bf16_flops_per_s": ("FLOP/s", 1e12), "fp8_flops_per_s": ("FLOP/s", 1e12),
         "memory_bytes_per_s": ("bytes per second", 1e9), "inside_bytes_per_s": ("bytes per second", 1e8),
         "across_bytes_per_s": ("bytes per second", 1e7)}
EXAMPLE = "memory=32e9,flops=125e12,bandwidth=900e9,inside=150e9,across=12.5e9,node=8"
# PCIe 4.0 with 16 lanes; 100 Gb/s for the eight cards of a node. No data sheet of a card says what leaves its node.
PCIE, SHARED = 32e9, 12.5e9 / 8

MACHINES = {
    "a100": Machine(80e9, 312e12, 0, 2.039e12, 300e9, 25e9, 8, "a100"),
    "a100-40": Machine(40e9, 312e12, 0, 1.555e12, 300e9, 25e9, 8, "a100", like="a100"),
    "h100": Machine(80e9, 989e12, 1979e12, 3.35e12, 450e9, 50e9, 8, "h100"),
    "h200": Machine(141e9, 989e12, 1979e12, 4.8e12, 450e9, 50e9, 8, "h200", like="h100"),
    "b200": Machine(180e9, 2250e12, 4500e12, 8e12, 900e9, 50e9, 8, "dgxb200", like="gb200"),
    "gb200": Machine(186e9, 2500e12, 5000e12, 8e12, 900e9, 50e9, 72, "gb200"),
    "b300": Machine(270e9, 2250e12, 4500e12, 8e12, 900e9, 100e9, 8, "dgxb300", like="gb200"),
    "gb300": Machine(279e9, 2500e12, 5000e12, 8e12, 900e9, 100e9, 72, "gb300", like="gb200"),
    "h800": Machine(80e9, 989e12, 1979e12, 3.35e12, 200e9, 50e9, 8, "h800", like="h100"),
    "h20": Machine(96e9, 148e12, 296e12, 4e12, 450e9, 50e9, 8, "h20"),
    "mi300x": Machine(192e9, 1307.4e12, 2614.9e12, 5.3e12, 448e9, 50e9, 8, "mi300x"),
    "mi325x": Machine(256e9, 1307.4e12, 2614.9e12, 6e12, 448e9, 50e9, 8, "mi325x"),
    "l40s": Machine(48e9, 362.05e12, 733e12, 864e9, PCIE, SHARED, 8, "l40s"),
    "l4": Machine(24e9, 121e12, 242.5e12, 300e9, PCIE, SHARED, 8, "l4"),
    "a10g": Machine(24e9, 70e12, 0, 600e9, PCIE, SHARED, 8, "a10g"),
    "a6000": Machine(48e9, 154.8e12, 0, 768e9, PCIE, SHARED, 8, "ga102"),
    "rtx4090": Machine(24e9, 165.2e12, 330.3e12, 1008e9, PCIE, SHARED, 8, "ada"),
    "rtx3090": Machine(24e9, 71e12, 0, 936e9, PCIE, SHARED, 8, "ga102"),
}
USABLE = 0.8  # of the memory: of measured layouts that need more by the formulas, half ran out
USABLE_BY = {"megatron-deepspeed": 0.7}  # whose reports say what ran out: between these two one in seven did
MOST_ACROSS = 0.9  # of a network card's bandwidth; set, not fitted: a fit would take all, where messages hide in part
FITTED_FILE = ("data", "fitted.json")
CONSTANTS: dict[str, dict[str, float]] = json.loads(
    files("book.cost").joinpath(*FITTED_FILE).read_text("utf-8"))["constants"]
SOFTWARE = ("torchtitan", "megatron", "llm-foundry", "maxtext", "nanotron", "megatron-deepspeed")
# State of a parameter. nanotron accumulates gradients in 32 bits beside 16-bit ones (scripts/scaling_benchmarks.py).
EACH = {**dict.fromkeys(SOFTWARE, ADAM_MIXED), "torchtitan": ADAM_FSDP2, "megatron": ADAM_MIXED_GRADIENTS_32,
        "megatron-deepspeed": ADAM_MIXED_GRADIENTS_32,
        "nanotron": StateBytes(2, 6, 12)}


def machine_key(name: str) -> str:
    """The key in MACHINES of a name in any case, such as "RTX 4090"; raises ValueError, with all names, for no such."""
    plain = re.sub(r"[^a-z0-9]|nvidia|amd|rtx|(80gb|80|nvl72)$", "", name.lower())
    keys = [key for key in MACHINES if re.sub(r"[^a-z0-9]|rtx", "", key) == plain]
    if not keys:
        raise ValueError(f"no GPU is called {name!r}: use {', '.join(MACHINES)}, or numbers of your own, such as "
                         f"{EXAMPLE} (bytes, FLOP/s, bytes per second)")
    return keys[0]


def machine_of(text: str) -> Machine:
    """The machine of a name, of a TOML or JSON file, or of numbers such as "memory=48e9,flops=181e12,...".

    The words are those of SHORT; fp8 and like may be left out. Raises ValueError, with the words, where others are
    missing or strange, and OSError for a file that can't be read.
    """
    if "=" not in text and not text.endswith((".toml", ".json")):
        return MACHINES[machine_key(text)]
    said = _numbers(text)
    missing = [word for word in SHORT.values() if word not in said and word not in ("fp8", "like")]
    strange = sorted(said.keys() - set(SHORT.values()))
    if missing or strange:
        raise ValueError(f"a GPU of your own has {', '.join(SHORT.values())}: " + "; ".join(
            [f"{words} {', '.join(of)}" for words, of in (("missing:", missing), ("unknown:", strange)) if of]))
    kin = machine_key(str(said["like"])) if said.get("like") else ""
    try:
        found: dict[str, Any] = {name: float(said.get(word, 0)) for name, word in SHORT.items() if name in UNITS}
        node = float(said["node"])
        found["gpus_per_node"] = int(node) if node.is_integer() else node
    except (TypeError, ValueError):
        raise ValueError(f"a GPU of your own has a number for each word, such as memory=48e9: {said}") from None
    return Machine(**found, like=kin)


def name_of(text: str) -> str:
    """What the machine of `machine_of` is called; numbers of your own are a "GPU"."""
    if "=" in text:
        return "GPU"
    return Path(text).stem if text.endswith((".toml", ".json")) else machine_key(text).upper()


def _numbers(text: str) -> dict[str, Any]:
    """What a file or a list says, by word."""
    if not text.endswith((".toml", ".json")):
        return said_by_name(text)
    words = Path(text).read_text("utf-8")
    try:
        found = json.loads(words) if text.endswith(".json") else tomllib.loads(words)
    except ValueError as error:
        raise ValueError(f"{text} can't be read: {error}") from None
    if not isinstance(found, dict):
        raise ValueError(f"{text} is not a table of words and numbers")
    return found


def cluster_of(gpu: str | Machine, num_gpus: int, software: str = "megatron", precision: str = "bf16",
               constants: Mapping[str, Mapping[str, float]] = CONSTANTS) -> Cluster:
    """A cluster of `num_gpus` GPUs of a machine or its name, with the constants of the machine and of the software.

    Raises ValueError for an unknown name and for a precision that the machine lacks.
    """
    key = machine_key(gpu) if isinstance(gpu, str) else key_of(gpu)
    machine = MACHINES[key] if isinstance(gpu, str) else gpu
    if software not in SOFTWARE:
        raise ValueError(f"no software is called {software!r}: use {', '.join(SOFTWARE)}")
    if precision not in ("bf16", "fp8"):
        raise ValueError(f"precision is bf16 or fp8, not {precision!r}")
    if precision == "fp8" and not machine.fp8_flops_per_s:
        raise ValueError(f"{gpu if isinstance(gpu, str) else 'this GPU'} has no fp8: use bf16")
    known = factored(constants, groups_of(key, software))
    known["gather_bytes"] = 1 if precision == "fp8" else 2
    known["linear_speedup"] = known.pop("fp8_speedup", 1.0) if precision == "fp8" else 1.0
    cluster = Cluster(num_gpus, machine.memory_bytes, machine.bf16_flops_per_s, machine.memory_bytes_per_s,
                      machine.inside_bytes_per_s, machine.across_bytes_per_s, min(known["efficiency"], 1.0),
                      known["num_passes"], machine.gpus_per_node, USABLE_BY.get(software, USABLE))
    own = {f.name for f in fields(Overheads)}
    return replace(cluster, overheads=Overheads(**{name: of for name, of in known.items() if name in own}))


def key_of(machine: Machine) -> str:
    """The key in MACHINES of a machine or of the one that it is like; "" if there is none."""
    return next((key for key, known in MACHINES.items() if known == machine), machine.like)


def like(key: str) -> str:
    """The machine whose constants a machine shares; "" has none."""
    return MACHINES[key].like or key if key else ""


def groups_of(key: str, software: str) -> tuple[str, ...]:
    """The groups of constants that a machine and a software have."""
    return "all", like(key), *((key,) if like(key) != key else ()), software, f"{software} {like(key)}"


def factored(constants: Mapping[str, Mapping[str, float]], groups: Sequence[str]) -> dict[str, float]:
    """Each constant as the product of what the groups have of it; a share is at most 1, of the network MOST_ACROSS."""
    found: dict[str, float] = {}
    for group in groups:
        for name, factor in constants.get(group, {}).items():
            found[name] = found.get(name, 1.0) * factor
    most = {"across_share": MOST_ACROSS}
    return {name: min(of, most.get(name, 1.0)) if name.endswith("_share") else of for name, of in found.items()}
