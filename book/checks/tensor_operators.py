"""L3, lab 5: the two operators between the cuts of a map, forward and backward: what comes out, and in which dtype."""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from book.checks.attribution import Attribution
from book.checks.tensor_parallel import PARTS
from book.checks.verdict import dense, held, identical, magnitude, require, same, short
from book.trace import Trace

UNKNOWN = "this can't be made from the ranks' {what}: was the result written to where it is read?"
OPERATORS = {
    "sum": PARTS | {"own": "this is only the rank's own part: here the all-reduce is missing, or its result is "
                           "lost", "unknown": UNKNOWN},
    "identity": {"sum": "this is the sum over the ranks, but on the way {way} this operator passes on what it is "
                        "given; its all-reduce belongs on the way {way_back}",
                 "unequal": "the ranks' {what} are in it {weights} times: pass on the rank's own, unchanged",
                 "unknown": UNKNOWN}}


def operator(name: str, runs: Sequence[Mapping[str, Any]], forward: str, backward: str) -> float:
    """An operator must do `forward` with the ranks' tensors and `backward` with their gradients: "identity" or "sum".

    `runs` has, for each rank, `x` and `upstream`, the gradient that comes back, as they were before; `x_after` and
    `upstream_after`; `output`, and `gradient`, which x gets. Returns the sum of the absolute values of both results on
    rank 0.
    """
    ways = (("forward", "x", "output", forward), ("backward", "upstream", "gradient", backward))
    for way, given, result, wanted in ways:
        before = np.stack([dense(run[given]) for run in runs])
        what, way_back = ("tensors", "back") if way == "forward" else ("gradients", "forward")
        for rank, run in enumerate(runs):
            got = held(rank, f"{name}, {way}: the {result}", run[result], before[rank].shape)
            due = np.arange(len(runs)) == rank if wanted == "identity" else np.ones(len(runs))
            found = Attribution(got, before, due, rank, counts={"num_ranks": len(runs)})
            same(f"{name}, {way}, rank {rank}", got, found.wanted @ found.rows, before,
                 partial(found.explain, OPERATORS[wanted], what=what, way=way, way_back=way_back))
        for rank, run in enumerate(runs):
            require(identical(run[f"{given}_after"], before[rank]), f"{name}, {way}: the result is right, but the "
                    f"input tensor has changed on rank {rank}, and others may still need it: all_reduce works in "
                    "place, so give it a clone")
    return magnitude(runs[0]["output"]) + magnitude(runs[0]["gradient"])


def keeps_dtype(runs_of: Mapping[str, Sequence[Mapping[str, Any]]], trace: Trace, num_bytes: int) -> None:
    """Operators must give tensors and gradients in the dtype that they get, and send tensors of `num_bytes`.

    `runs_of` has for each name the runs that `operator` takes, not in float64; `trace` is their recording.
    """
    for name, runs in runs_of.items():
        for rank, run in enumerate(runs):
            given, *made = (str(getattr(run[key], "dtype", None)).removeprefix("torch.")
                            for key in ("x", "output", "gradient"))
            for way, dtype in zip(("forward", "backward"), made):
                require(dtype == given, f"{name}, {way}, rank {rank}: {given} went in, but {dtype} came out: an "
                        "operator must compute in the dtype that it is given")
    for event in trace.events:
        shares = trace.world_size if event.op in ("all_gather", "gather") else 1  # they count what all ranks give
        much = (event.num_bytes or 0) / shares
        require(much <= num_bytes, f"rank {event.rank} gives {event.op} {short(much)} bytes for a tensor of "
                f"{num_bytes}: send it in its own dtype")
