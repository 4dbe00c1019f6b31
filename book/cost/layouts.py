"""L1: layouts: how a training step is cut over GPUs, and all the ways in which it can be."""
from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from math import isqrt

import numpy as np

from book.columns import Columns, count, word
from book.cost.activations import RECOMPUTE, check_recompute
from book.cost.state import check_zero_stage
from book.cost.transformer import Transformer
from book.mesh import Mesh


MOST_STAGES = 12  # of a rank: all but three of the layouts that were measured have no more


@dataclass(frozen=True)
class Layout:
    """The sizes of the axes pp, dp, tp and cp, and what else decides a step's memory and time.

    `cp` cuts each sequence; `ep` spreads experts over GPUs of dp and cp, and needs none of its own (lepikhin2020).

    `stages_per_rank` above 1 is interleaved 1F1B; `sequence_parallel` is 0 or 1, with inputs kept as pieces and
    gathered again; `recompute` is None, "selective" or "full" (korthikanti2022). ZeRO-2 and 3 shard over all of dp and
    cp, or in each of `replicas` equal groups of them (HSDP). Raises ValueError for a size below 1 and for what goes
    with no other part of the layout.
    """

    pp: int = count()
    dp: int = count()
    tp: int = count()
    micro_batch_size: int = count(default=1)
    stages_per_rank: int = count(default=1)
    zero_stage: int = count(default=0)
    sequence_parallel: int = count(default=0)
    recompute: str | None = word(default=None)
    cp: int = count(default=1)
    ep: int = count(default=1)
    replicas: int = count(default=1)

    def __post_init__(self) -> None:
        sizes = (self.pp, self.dp, self.tp, self.micro_batch_size, self.stages_per_rank, self.cp, self.ep,
                 self.replicas)
        if min(sizes) < 1:
            raise ValueError(f"each size of a layout is at least 1: {self}")
        check_zero_stage(self.zero_stage)
        check_recompute(self.recompute)
        if self.sequence_parallel not in (0, 1):
            raise ValueError(f"sequence_parallel is 0 or 1, not {self.sequence_parallel!r}")
        if self.stages_per_rank > 1 and self.pp == 1:
            raise ValueError("several stages on a rank need a pipeline: pp is 1")
        if self.replicas > 1 and (self.zero_stage < 2 or self.dp % self.replicas):
            raise ValueError(f"replicas of shards are equal parts of dp, in ZeRO-2 or 3: {self}")
        if self.num_gpus // self.pp % self.ep:
            raise ValueError(f"experts are on a stage's GPUs: ep {self.ep} does not divide {self.num_gpus // self.pp}")
        object.__setattr__(self, "sequence_parallel", int(self.sequence_parallel))

    @property
    def num_gpus(self) -> int:
        """How many GPUs it needs."""
        return self.pp * self.dp * self.tp * self.cp

    @property
    def spans(self) -> dict[str, int]:
        """For each axis, over how many consecutive GPUs a group of it reaches: within a node if these are one's.

        Experts are spread over the GPUs of tp too.
        """
        return {"tp": self.tp, "cp": self.tp * self.cp, "ep": self.ep, "pp": self.num_gpus,
                "dp": self.tp * self.cp * self.dp}

    def mesh(self) -> Mesh:
        """Its mesh, tp innermost; cp counts as dp, whose replicas' gradients are added too."""
        return Mesh.of({"pp": self.pp, "dp": self.dp * self.cp, "tp": self.tp})

    def __str__(self) -> str:
        """In short: "pp 8 × dp 16 × tp 8, micro-batch 1, 2 stages a rank, ZeRO-1, sequence parallel, no recompute"."""
        axes = f"pp {self.pp} × dp {self.dp} × tp {self.tp}" + f" × cp {self.cp}" * (self.cp > 1)
        parts = [axes + f", ep {self.ep}" * (self.ep > 1), f"micro-batch {self.micro_batch_size}"]
        parts += [f"{self.stages_per_rank} stages a rank"] if self.stages_per_rank > 1 else []
        within = f" in {self.replicas} replicas" * (self.replicas > 1)
        parts += [f"ZeRO-{self.zero_stage}{within}"] if self.zero_stage else []
        parts += ["sequence parallel"] if self.sequence_parallel else []
        return ", ".join([*parts, f"{self.recompute or 'no'} recompute"])


# What the parts of a layout are called where people type them, and the words for those that are no numbers.
SPELLED = {"pp": "pp", "dp": "dp", "tp": "tp", "cp": "cp", "ep": "ep", "micro": "micro_batch_size",
           "stages": "stages_per_rank", "zero": "zero_stage", "replicas": "replicas", "sp": "sequence_parallel",
            "recompute": "recompute"}


def said_by_name(text: str) -> dict[str, str]:
    """The values of "a=1,b=2" by name; raises ValueError for a name that is said twice."""
    said = [(name.strip(), value.strip()) for name, _, value in (part.partition("=") for part in text.split(","))]
    names = [name for name, _ in said]
    twice = sorted({name for name in names if name and names.count(name) > 1})
    if twice:
        raise ValueError(f"{', '.join(twice)} is said twice in {text!r}: say it once")
    return dict(said)


def layout_of(text: str, num_gpus: int = 0) -> Layout:
    """The layout of words such as "pp=4,tp=8,zero=1,recompute=full", by the names of SPELLED.

    What is not said is 1, 0 for zero, no for recompute, 1 for sp where tp is above 1, for dp what `num_gpus` leaves.
    Raises ValueError, with an example, for other words, and for what is no layout.
    """
    said = said_by_name(text)
    strange = [f"{name}={value}" for name, value in said.items()
               if name not in SPELLED or not (value.isdigit() or name == "recompute")]
    if strange:
        raise ValueError(f"a layout is written pp=2,dp=4,tp=8,cp=1,ep=1,micro=1,stages=1,zero=1,sp=1,recompute=full; "
                         f"{', '.join(strange)} is not part of one")
    sizes = {name: int(value) for name, value in said.items() if name != "recompute"}
    rest = sizes.get("pp", 1) * sizes.get("tp", 1) * sizes.get("cp", 1)
    sizes = {"dp": max(num_gpus // max(rest, 1), 1), "pp": 1, "tp": 1, "sp": int(sizes.get("tp", 1) > 1), **sizes}
    recompute = said.get("recompute", "no")
    return Layout(**{SPELLED[name]: size for name, size in sizes.items()},
                  recompute=None if recompute in ("no", "none") else recompute)


def all_layouts(model: Transformer, num_gpus: int, global_batch: int, most_tp: int | None = None, most_cp: int = 1,
                most_ep: int = 1, node: int = 0, smallest: bool = False) -> Columns:
    """Every layout of a model on all of these GPUs that divides evenly, as Columns of Layout.

    tp divides heads, keys and width, dp times micro_batch_size the global batch of sequences, cp the tokens in two
    parts for each of its ranks, where a micro-batch is one sequence; ep divides the experts and the GPUs of a stage.
    Stages, at most MOST_STAGES a rank, are as equal as `divides` asks for.
    Recomputation is none, full, and between them "selective" where scores are kept, else "half". Interleaving needs a
    number of micro-batches that pp divides, as Megatron does; sequence parallelism tokens that tp divides; ZeRO two
    replicas or more. `most_tp`, `most_cp` and `most_ep` bound these. With `node`, the GPUs of a node, ZeRO-2 and 3 that
    have no pipeline are there in 2, 4, 8 replicas too, as long as each fills nodes. `smallest` leaves those of which
    one needs the least memory: micro-batches of one sequence, one stage a rank, full recomputation, no replicas.
    """
    shapes = np.array(list(_shapes(model, num_gpus, global_batch, (most_tp or num_gpus, most_cp, most_ep), smallest)),
                      dtype=np.int32).reshape(-1, 7)
    between = "selective" if model.attention == "scores" else "half"
    recompute = [-1, *(RECOMPUTE.index(how) - 1 for how in (between, "full"))][-1 if smallest else 0:]
    choices = np.array(list(product(range(4), (0, 1), recompute, [1])), dtype=np.int32)
    rows = np.hstack([np.repeat(shapes, len(choices), axis=0), np.tile(choices, (len(shapes), 1))])
    _, dp, tp, cp, _, _, _, zero_stage, sequence_parallel, *_ = rows.T
    possible = (dp * cp > 1) | (zero_stage == 0)
    possible &= (tp > 1) & (model.num_tokens // cp % tp == 0) | (sequence_parallel == 0)
    names = ("pp", "dp", "tp", "cp", "ep", "micro_batch_size", "stages_per_rank", "zero_stage", "sequence_parallel",
             "recompute", "replicas")
    rows = np.vstack([rows[possible], *_replicated(rows[possible], num_gpus, node)])
    return Columns(Layout, dict(zip(names, rows.T)), {"recompute": RECOMPUTE[1:]})


def _replicated(rows: np.ndarray, num_gpus: int, node: int) -> Iterator[np.ndarray]:
    """The rows that can be in 2, 4, 8 replicas of shards."""
    pp, dp, ep, zero_stage = rows[:, (0, 1, 4, 7)].T
    replicas = 2
    while node and num_gpus % (replicas * node) == 0:
        can = (pp == 1) & (zero_stage >= 2) & (dp % replicas == 0) & (num_gpus // replicas % ep == 0)
        yield np.hstack([rows[can][:, :-1], np.full((can.sum(), 1), replicas, np.int32)])
        replicas *= 2


def _shapes(model: Transformer, num_gpus: int, global_batch: int,
            most: tuple[int, int, int], smallest: bool) -> Iterator[tuple[int, ...]]:
    """pp, dp, tp, cp, ep, micro_batch_size and stages_per_rank of every layout."""
    for tp, cp in product(divisors(num_gpus), divisors(min(most[1], num_gpus))):
        if tp > most[0] or model.num_heads % tp or model.kv_heads % tp:
            continue
        if num_gpus // tp % cp or (cp > 1 and model.num_tokens % (2 * cp)):
            continue
        for pp in divisors(num_gpus // tp // cp):
            dp = num_gpus // tp // cp // pp
            if not divides(model.num_layers, pp) or global_batch % dp:
                continue
            sizes = divisors(global_batch // dp) if cp == 1 and not smallest else [1]
            for micro_batch_size, ep in product(sizes, _experts_over(model, dp * cp * tp, most[2])):
                yield pp, dp, tp, cp, ep, micro_batch_size, 1
                if pp > 1 and not smallest and global_batch // dp // micro_batch_size % pp == 0:
                    for stages_per_rank in range(2, min(model.num_layers // pp + 1, MOST_STAGES) + 1):
                        if divides(model.num_layers, pp * stages_per_rank):
                            yield pp, dp, tp, cp, ep, micro_batch_size, stages_per_rank


def known(layouts: Columns, software: str = "") -> np.ndarray:
    """Mask of the layouts that measured steps test and this software has.

    ZeRO-2 and 3 are in no pipeline. torchtitan's FSDP sends gradients after each micro-batch, which is ZeRO-2 or 3; in
    a pipeline once in a step, which is ZeRO-1. It shards over cp too, and has experts on a replica's GPUs.
    """
    stage, pp, dp, cp, tp, ep = (layouts.array(name) for name in ("zero_stage", "pp", "dp", "cp", "tp", "ep"))
    found = (stage < 2) | (pp == 1)
    if software == "torchtitan":
        once = (pp > 1) | (stage == 0) & (dp == 1)
        found &= (stage > 1) | once & ((stage == 1) | (cp == 1) & (tp % ep == 0))
    return np.asarray(found)


def divides(num_layers: int, num_stages: int) -> bool:
    """Whether equal stages are as many as the layers, the embedding and the head fill.

    What is missing is at most one layer more than a stage has: of stages of 4 layers 16 for 61, for 62 and for 59.
    """
    longest = -(-num_layers // num_stages)
    return num_stages * longest - num_layers <= longest + 1


def stage_layers(num_layers: int, num_stages: int) -> tuple[int, ...]:
    """Layers of each stage, as equal as can be: the last has one fewer first, for it has the head.

    Then the first, which has the embedding, then those before the last.
    """
    longest = -(-num_layers // num_stages)
    shorter = [num_stages - 1, 0, *range(num_stages - 2, 0, -1)][:num_stages * longest - num_layers]
    return tuple(longest - (stage in shorter) for stage in range(num_stages))


def stages_in_words(num_layers: int, num_stages: int) -> str:
    """How layers are shared out over stages that can't be equal: "61 layers in 16 stages: 13 of 4 and 3 of 3"."""
    found = stage_layers(num_layers, num_stages)
    counts = " and ".join(f"{found.count(size)} of {size}" for size in sorted({*found}, reverse=True))
    return f"{num_layers} layers in {num_stages} stages: {counts}"


def _experts_over(model: Transformer, num_ranks: int, most: int) -> list[int]:
    """The sizes that ep can have."""
    return [ep for ep in divisors(min(most, num_ranks)) if model.experts and not num_ranks % ep
            and not model.experts.num % ep] or [1]


def divisors(number: int) -> list[int]:
    """All divisors of a number, smallest first."""
    small = [k for k in range(1, isqrt(number) + 1) if number % k == 0]
    return small + [number // k for k in reversed(small) if k * k != number]
