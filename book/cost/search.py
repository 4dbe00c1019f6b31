"""L1: all layouts of a model on a cluster, those that fit by time, and the fastest one in words."""
from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from book.columns import Columns
from book.cost.cluster import Cluster
from book.cost.layouts import Layout, all_layouts
from book.cost.state import ADAM_MIXED, StateBytes
from book.cost.step import PARTS, Estimate, estimates, frozen_bytes
from book.cost.transformer import Transformer
from book.cost.tuning import FULL, Tuning

WORDS = dict(zip(PARTS, (
    "matrix products", "norms, softmax and other passes over memory", "launching small layers",
    "tensor-parallel messages", "context-parallel messages", "messages to experts", "messages between stages",
    "the pipeline's bubble", "data-parallel messages", "the update")))


@dataclass(frozen=True)
class Search:
    """Every layout (Columns of Layout) with its estimate (Columns of Estimate), and which fit: a boolean array.

    `frozen` are the bytes of each that are frozen parameters.
    """

    model: Transformer
    cluster: Cluster
    global_batch: int
    layouts: Columns
    estimates: Columns
    fits: np.ndarray
    frozen: np.ndarray

    def __len__(self) -> int:
        return len(self.layouts)

    @property
    def usable(self) -> np.ndarray:
        """Bytes that each layout may need."""
        return np.asarray(usable_bytes(self.cluster, self.frozen))

    @property
    def ranked(self) -> np.ndarray:
        """Positions of the layouts that fit, fastest first; of equal times, least memory first."""
        order = np.lexsort([self.estimates.array("memory_bytes"), self.estimates.array("step_s")])
        return order[self.fits[order]]

    @property
    def best(self) -> int:
        """The position of the fastest layout that fits; raises ValueError where none does."""
        ranked = self.ranked
        if not len(ranked):
            raise ValueError(self.nothing_fits())
        return int(ranked[0])

    def nothing_fits(self) -> str:
        """Why no layout fits: none divides what it cuts, or the smallest needs more memory than there is."""
        if not len(self):
            return (f"no layout of {self.cluster.num_gpus} GPUs divides the model's {self.model.num_layers} layers, "
                    f"its {self.model.num_heads} heads and {self.global_batch} sequences")
        memory = self.estimates.array("memory_bytes")
        least = memory.argmin()
        return (f"none of {len(self)} layouts fits: the smallest needs {memory[least] / 1e9:.1f} GB on each GPU, and "
                f"{self.usable[least] / 1e9:.1f} GB are usable")

    def front(self) -> np.ndarray:
        """Positions of the layouts that no other beats in memory and in time at once, fastest first."""
        memory, step_s = (self.estimates.array(name) for name in ("memory_bytes", "step_s"))
        order = np.lexsort([memory, step_s])
        least = np.minimum.accumulate(memory[order])
        return order[np.concatenate([[True], least[1:] < least[:-1]])] if len(order) else order


def usable_bytes(cluster: Cluster, frozen: Any = 0.0) -> Any:
    """Bytes of a GPU's memory that a layout may need, of which `frozen` don't vary: the free part is of the others."""
    return cluster.usable_bytes + (1 - cluster.usable_share) * np.minimum(frozen, cluster.memory_bytes)


def search(model: Transformer, cluster: Cluster, global_batch: int, each: StateBytes = ADAM_MIXED,
           overlap: bool = False, most_tp: int | None = None, most_cp: int = 1, most_ep: int = 1,
           smallest: bool = False, tuning: Tuning = FULL, replicated: bool = False) -> Search:
    """Estimate all layouts of a model on all GPUs of a cluster, for steps of `global_batch` sequences.

    `each`, `overlap` and `tuning` are as in `estimates`, the rest as in `all_layouts`; with `replicated`, replicas of
    shards that fill nodes are there too.
    """
    layouts = all_layouts(model, cluster.num_gpus, global_batch, most_tp, most_cp, most_ep,
                          cluster.gpus_per_node if replicated and not smallest else 0, smallest)
    found = estimates(model, cluster, layouts, global_batch, each, overlap, tuning=tuning)
    frozen = frozen_bytes(model, cluster, layouts, global_batch, tuning)
    every = Search(model, cluster, global_batch, layouts, found, np.ones(len(layouts), bool), frozen)
    return replace(every, fits=found.array("memory_bytes") <= every.usable)


def explain(found: Search, position: int | None = None) -> str:
    """A layout in words, a line for each thing: what it holds, where the time goes, what each other choice would cost.

    Default: the fastest that fits. Raises ValueError where there is no such position.
    """
    position = found.best if position is None else position
    if not 0 <= position < len(found):
        raise ValueError(f"there is no layout at position {position}: there are {len(found)}, counted from 0")
    return "\n".join([*_about(found, found.layouts[position], found.estimates[position]),
                      *_others(found, position)])


def _about(found: Search, layout: Layout, cost: Estimate) -> Iterator[str]:
    usable = usable_bytes(found.cluster)
    yield f"{layout}."
    yield (f"Memory: {cost.memory_bytes / 1e9:.1f} of {usable / 1e9:.1f} GB: {cost.state_bytes / 1e9:.1f} of state, "
           f"{cost.activation_bytes / 1e9:.1f} of activations, {cost.gathered_bytes / 1e9:.1f} of temporary buffers.")
    shares = sorted(((getattr(cost, part) / cost.step_s, WORDS[part]) for part in PARTS), reverse=True)
    yield (f"Step: {cost.step_s:.2f} s, {cost.mfu:.1%} of the peak. "
           + "; ".join(f"{words} {share:.1%}" for share, words in shares if share >= 0.001) + ".")
    node = found.cluster.gpus_per_node
    sent = {axis: getattr(cost, f"{axis}_bytes") for axis in ("tp", "cp", "ep", "pp", "dp")}
    where = {axis: "inside nodes" if layout.spans[axis] <= node else "across nodes" for axis in sent}
    yield "A GPU sends " + ", ".join(f"{num_bytes / 1e9:.1f} GB along {axis} ({where[axis]})"
                                     for axis, num_bytes in sent.items() if getattr(layout, axis) > 1) + "."


def _others(found: Search, position: int) -> Iterator[str]:
    """For each part of a layout, the fastest that fits with another choice there, everything else free."""
    step_s, ranked = found.estimates.array("step_s"), found.ranked
    for field in fields(Layout):
        column = found.layouts.array(field.name)
        other = ranked[column[ranked] != column[position]]
        if len(other):
            more = step_s[other[0]] / step_s[position] - 1
            yield f"With another {field.name}: {more:+.1%} ({found.layouts[int(other[0])]})."
        elif (column != column[position]).any():
            yield f"With another {field.name}: nothing fits."
