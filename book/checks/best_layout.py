"""L3, lab 10: which layout is best: those that are allowed, those that fit, and how a worse one was chosen."""
from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

from book.checks.verdict import likeliest, refuse, require, short
from book.cost import Cluster, Layout, Transformer

Measure = Callable[[Layout], float]


def chosen_layout(got: Any, model: Transformer, cluster: Cluster, global_batch: int, memory: Measure, seconds: Measure,
                  slack: float = 0.0) -> tuple[Layout | None, float]:
    """`got` must be the smallest layout that takes at most 1 + `slack` times as long as the fastest that fits.

    It must be None if nothing fits. Returns the first of those that are as good, and its seconds, 0 for None: a check
    must print the same for all right answers, and several layouts may be equally fast.
    """
    where = f"{model.num_layers} layers on {cluster.num_gpus} GPUs"
    room = cluster.usable_share * cluster.memory_bytes
    every = list(_layouts(model, cluster.num_gpus, global_batch))
    fitting = [layout for layout in every if memory(layout) <= room]
    if not fitting:
        require(got is None, f"{where}: no layout fits, but you chose {got}: return None")
        return None, 0.0
    fastest = min(fitting, key=seconds)
    require(got is not None, f"{where}: you found no layout that fits, but there are {len(fitting)}, such as {fastest}"
            + "; all of them have dp 1" * all(layout.dp == 1 for layout in fitting)
            + "; all of them have a pp or tp that is no power of two" * (not any(map(_is_of_powers, fitting)))
            + "; all of them have fewer micro-batches than stages, which costs time but is allowed" * all(
                _is_short_of_work(layout, global_batch) for layout in fitting))
    require(isinstance(got, Layout), f"{where}: chosen_layout must return a Layout, not {got!r}")
    require(got in every, f"{where}: {got} is not allowed: {_why_not(got, model, cluster, global_batch)}")
    require(memory(got) <= room, f"{where}: {got} holds {memory(got) / 1e9:.1f} GB, but only {room / 1e9:.1f} GB are "
            f"usable: {cluster.usable_share:g} of {cluster.memory_bytes / 1e9:g} GB")
    limit_s = (1 + slack) * seconds(fastest) * (1 + 1e-9)
    best = min((layout for layout in fitting if seconds(layout) <= limit_s), key=memory) if slack else fastest
    refuse(seconds(got) > limit_s and memory(best) == room, f"{where}: {got} takes longer than {best}, which fills the "
           "usable memory to the last byte: a layout that fits exactly fits")
    refuse(seconds(got) > limit_s, f"{where}: {got} takes {short(seconds(got))} s, and {best}, which fits too, "
           f"{short(seconds(best))} s{_overlooked(got, best, fitting, memory, seconds, cluster.gpus_per_node)}")
    refuse(slack and memory(got) > memory(best) * (1 + 1e-9), f"{where}: {got} holds {memory(got) / 1e9:.2f} GB, and "
           f"{best}, which is also fast enough, only {memory(best) / 1e9:.2f} GB")
    return best, seconds(best)


def _layouts(model: Transformer, num_gpus: int, global_batch: int) -> Iterator[Layout]:
    """All layouts of the exercise."""
    for tp, pp in product(range(1, num_gpus + 1), repeat=2):
        if num_gpus % (tp * pp) or model.num_heads % tp or model.num_layers % pp:
            continue
        dp = num_gpus // (tp * pp)
        for size, stage, recompute in product((1, 2, 4), (0, 1), (None, "full")):
            if global_batch % (dp * size) == 0:
                yield Layout(pp, dp, tp, size, zero_stage=stage, recompute=recompute)


def _why_not(got: Layout, model: Transformer, cluster: Cluster, global_batch: int) -> str:
    return likeliest(
        (got.num_gpus != cluster.num_gpus, f"it has {got.num_gpus} GPUs"),
        (model.num_heads % got.tp, f"{model.num_heads} heads can't be shared out over tp {got.tp}"),
        (model.num_layers % got.pp, f"{model.num_layers} layers can't be shared out over pp {got.pp}"),
        (global_batch % (got.dp * got.micro_batch_size), f"{global_batch} sequences can't be divided into whole "
         f"micro-batches of {got.micro_batch_size} on {got.dp} replicas"),
        (True, "micro_batch_size is 1, 2 or 4, zero_stage 0 or 1, recompute None or \"full\""))


def _overlooked(got: Layout, best: Layout, fitting: list[Layout], memory: Measure, seconds: Measure, node: int) -> str:
    """A hint at how a layout that is too slow was chosen, or at sizes that were not tried."""
    differ = [name for name in ("pp", "dp", "tp", "micro_batch_size", "zero_stage", "recompute")
              if getattr(got, name) != getattr(best, name)]
    return likeliest(
        (len(differ) == 1, f": did you try every {' '.join(differ)}?"),
        (got == min(fitting, key=memory), ": yours is the one with the least memory"),
        (got == max(fitting, key=seconds), ": yours is the slowest"),
        (got.dp == max(layout.dp for layout in fitting) > best.dp, ": yours is one with the most replicas"),
        (got.tp <= node < best.tp, f": a group of tp need not fit on a node of {node}"),
        (_is_of_powers(got) and not _is_of_powers(best), ": sizes need not be powers of two"),
        (got.recompute is None and best.recompute, ": recomputing may pay even where it is not needed, since it makes "
         "room for larger micro-batches"))


def _is_short_of_work(layout: Layout, global_batch: int) -> bool:
    """Whether a replica has fewer micro-batches than stages."""
    return global_batch // (layout.dp * layout.micro_batch_size) < layout.pp


def _is_of_powers(layout: Layout) -> bool:
    return all(size & (size - 1) == 0 for size in (layout.pp, layout.tp))
