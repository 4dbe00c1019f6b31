"""L1: what a layout costs on a cluster: bytes held, bytes sent, seconds of a step; for one layout or many at once.

Every stage is taken to be as long as the longest, the last one has the logits too; of memory, the first stage's rank
or the last one's counts, whichever keeps more.
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from book.columns import Columns, measure
from book.cost.cluster import Cluster
from book.cost.layouts import Layout, divisors
from book.cost.seconds import seconds
from book.cost.state import ADAM_MIXED, StateBytes
from book.cost.terms import Terms
from book.cost.transformer import Transformer
from book.cost.tuning import FULL, Tuning


@dataclass(frozen=True)
class Estimate:
    """What a GPU holds, sends and spends in a step.

    `gathered_bytes` are temporary: what ZeRO gathers, one layer's activations, workspaces. The seconds from `matmul_s`
    to `update_s` add up to `step_s`; `dp_s` counts only what does not overlap with computing. `mfu` is the model's own
    FLOPs, without recomputation and gradients of what is frozen, as a share of the cluster's `flops_per_s`: bf16's, in
    fp8 too.
    """

    state_bytes: float = measure()
    activation_bytes: float = measure()
    gathered_bytes: float = measure()
    memory_bytes: float = measure()
    tp_bytes: float = measure()
    cp_bytes: float = measure()
    ep_bytes: float = measure()
    pp_bytes: float = measure()
    dp_bytes: float = measure()
    matmul_s: float = measure()
    elementwise_s: float = measure()
    launch_s: float = measure()
    tp_s: float = measure()
    cp_s: float = measure()
    ep_s: float = measure()
    pp_s: float = measure()
    bubble_s: float = measure()
    dp_s: float = measure()
    update_s: float = measure()
    step_s: float = measure()
    mfu: float = measure()


PARTS = ("matmul_s", "elementwise_s", "launch_s", "tp_s", "cp_s", "ep_s", "pp_s", "bubble_s", "dp_s", "update_s")


def estimate(model: Transformer, cluster: Cluster, layout: Layout, global_batch: int, each: StateBytes = ADAM_MIXED,
             overlap: bool = False, tuning: Tuning = FULL) -> Estimate:
    """One layout's estimate; everything else is as in `estimates`."""
    return estimates(model, cluster, [layout], global_batch, each, overlap, tuning=tuning)[0]


def estimates(model: Transformer, cluster: Cluster, layouts: Sequence[Layout], global_batch: int,
              each: StateBytes = ADAM_MIXED, overlap: bool = False, uneven: bool = False,
              tuning: Tuning = FULL) -> Columns:
    """Estimates of layouts, as Columns in their order, for a step of `global_batch` sequences with (interleaved) 1F1B.

    `each` is the state of one parameter that is trained, and `tuning` says which are. Communication of tp and pp is
    waited for; so is dp's, unless the cluster's overheads give a share that overlaps, or `overlap` allows all of it to:
    with the last micro-batch's backward (ZeRO 0 and 1) or with all computing (2 and 3). Stages may lack as many layers
    as `divides` allows, any number if they may be `uneven`: the longest one sets the pace.
    Raises ValueError for an empty list, a batch below 1, a layout for another number of GPUs, or one whose degrees
    don't divide layers, heads, experts, tokens or batch.
    """
    if not len(layouts) and not isinstance(layouts, Columns):
        raise ValueError("there is nothing to estimate: the list has no layouts")
    terms = Terms(model.sizes, cluster, Columns.from_rows(Layout, layouts), global_batch, each, tuning)
    tuning.check(model)
    terms.check(model, uneven)
    found = costs(terms, overlap)
    peak = cluster.num_gpus * cluster.flops_per_s
    flops = model.step_flops(global_batch) - tuning.spared_flops(model, global_batch)
    return Columns(Estimate, {**found, "mfu": flops / (peak * found["step_s"])})


def largest_micro_batch(model: Transformer, cluster: Cluster, layout: Layout, global_batch: int, room_bytes: float,
                        each: StateBytes = ADAM_MIXED, tuning: Tuning = FULL) -> int:
    """Sequences of the largest micro-batch with which a GPU holds no more than `room_bytes`; 0 if none fits.

    Everything else of the layout stays as it is. Beside the layout's own size, interleaved stages take sizes whose
    micro-batches can be cut into rounds of pp or a few more, as torch's schedule asks. Raises ValueError as `estimates`
    does.
    """
    sequences = max(global_batch // layout.dp, 1)
    layouts = [replace(layout, micro_batch_size=size) for size in divisors(sequences)]
    held = estimates(model, cluster, layouts, global_batch, each, uneven=True, tuning=tuning).array("memory_bytes")

    def is_taken(size: int) -> bool:
        num_micro_batches = sequences // size
        return (layout.stages_per_rank == 1 or size == layout.micro_batch_size
                or num_micro_batches % max(num_micro_batches // layout.pp, 1) == 0)

    sizes = (one.micro_batch_size for one, num_bytes in zip(layouts, held) if num_bytes <= room_bytes)
    return max(filter(is_taken, sizes), default=0)


def frozen_bytes(model: Transformer, cluster: Cluster, layouts: Sequence[Layout], global_batch: int,
                 tuning: Tuning) -> np.ndarray:
    """Bytes of frozen parameters in a GPU's memory, of each layout."""
    terms = Terms(model.sizes, cluster, Columns.from_rows(Layout, layouts), global_batch, tuning.each, tuning)
    return terms.by("zero_stage", range(4), terms.fixed)


def costs(terms: Terms, overlap: bool = False) -> dict[str, np.ndarray]:
    """The columns of an Estimate, all but the MFU."""
    held, sent = terms.held(), terms.sent()
    spent = seconds(terms, sent, overlap)
    held["memory_bytes"] = held["state_bytes"] + held["activation_bytes"] + held["gathered_bytes"]
    return {**held, **sent, **spent, "step_s": np.sum([spent[part] for part in PARTS], axis=0)}
