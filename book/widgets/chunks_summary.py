"""L3: what can be said of a run as a whole: where it comes from, its phases, what it sends, whether it ends right."""
from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from typing import Any

import numpy as np

from book.collectives import COLLECTIVES
from book.promise import PROMISES, Promise, variants
from book.schedule import contents_fault
from book.trace import Trace
from book.widgets.chunks_run import Contributions, Run
from book.widgets.terms import spelled
from book.widgets.units import in_bytes

MADE = {"simulated": "simulated", "executed": "executed on {} ranks", "recorded": "recorded from your run · {} ranks",
        "instrumented": "instrumented · {} ranks"}
MOST_NAMES = 7  # of collectives as phases: a phase is written as one digit
# What the busiest rank sends, in buffers, by what the run promises; (N-1)/N for any other.
SENT: dict[str, tuple[str, Callable[[int], float]]] = {
    "all_reduce": ("2(N−1)/N", lambda p: 2 * (p - 1) / p),
    "broadcast": ("⌈lg N⌉", lambda p: (p - 1).bit_length()),
    "gather": ("1/N", lambda p: 1 / p),
}


def promised_of(trace: Trace, run: Run, asked: str | None) -> tuple[Promise, np.ndarray]:
    """What the run should end in, and where it does, bool (R, C): as `asked`, or as the trace says, or as it looks.

    A schedule's promise is meant to the letter. One that is only asked for may be kept with another root or other
    owners than the book's schedules have. A recorded program has promised nothing: if it calls collectives, it may end
    in an all-reduce or as one of them does; if it only copies, as an all-gather or a broadcast.
    """
    if trace.promise and asked in (None, trace.promise):
        promise = PROMISES[trace.promise]
        return promise, _kept(run, promise)
    names = [asked] if asked else _likely(run)
    judged = [(promise, _kept(run, promise)) for promise in variants(names[0], run.world_size)]
    others = ((promise, _kept(run, promise)) for name in names[1:] for promise in variants(name, run.world_size))
    best = max(judged, key=lambda one: one[1][one[0].where(*one[1].shape)].mean())
    return next((one for one in chain(judged, others) if one[1].all()), best)


def _likely(run: Run) -> list[str]:
    if run.called:
        return list(dict.fromkeys(["all_reduce", *(op for op in PROMISES if op in run.called)]))
    only_copies = run.transfers and all(t.op == "copy" for t in run.transfers)
    return ["all_gather", "broadcast"] if only_copies else ["all_reduce"]


def phases(run: Run) -> tuple[str, list[str]]:
    """A digit per step: 0 where it mostly adds, 1 where it replaces, 2 where that is unknown, or what is called there.

    From 3 on, a digit is a place in the list of collectives that is returned with them.
    """
    digits: list[str] = []
    names: list[str] = []
    for step in range(run.num_steps):
        ops = [t.op for t in run.transfers if t.leaves == step]
        called = sorted({op for call in run.calls if call.step == step for op in call.ops.values()})
        if ops or len(called) > 1 or len({*names, *called}) > MOST_NAMES:
            digits.append("0" if 2 * ops.count("reduce") > len(ops) else "1" if "copy" in ops else "2")
            continue
        names += [op for op in called if op not in names]
        digits.append(str(3 + names.index(called[0])))
    return "".join(digits), [spelled(name) for name in names]


def phase_names(name: str | None, promise: str, shape: dict[str, Any]) -> list[str]:
    """What the phases that add and that replace are called, and the one of which neither is known."""
    if promise in ("broadcast", "scatter", "gather", "reduce", "all_to_all"):
        return [spelled(promise), spelled(promise), ""]
    if name in COLLECTIVES:
        return [*map(spelled, COLLECTIVES[name].phases), ""]
    # A schedule that is not the book's has no record: what it looks like, and what it is called, have to do.
    to_one = shape["kind"] == "tree" or any(word in (name or "") for word in ("server", "tree"))
    return ["reduce", "broadcast", ""] if to_one else ["reduce-scatter", "all-gather", ""]


def source_of(trace: Trace, run: Run, with_backend: bool) -> str:
    """Where the picture comes from; the backend only where the text need not be the same on every machine."""
    made = MADE[trace.source].format(trace.world_size)
    num_bytes = run.num_bytes()
    parts = [made, trace.backend if with_backend else None, f"n = {in_bytes(num_bytes)}" if num_bytes else None]
    return " · ".join(part for part in parts if part)


def totals(run: Run, promise: str) -> dict[str, Any]:
    """`total`: what the busiest rank sends, in buffers; `who` that is (-1: all the same); `formula` if one holds."""
    sent, shares, p = np.zeros(run.world_size), run.shares(), run.world_size
    for t in run.transfers:
        sent[t.src] += shares[t.chunk] if t.chunk is not None else 1 / run.num_chunks
    even, rules = sent.max() - sent.min() < 1e-6, []
    rule, value = SENT.get(promise, ("(N−1)/N", lambda p: (p - 1) / p))
    if (even or promise in ("broadcast", "scatter", "gather")) and abs(sent.max() - value(p)) < 1e-6:
        rules.append(rule)
    if not even and abs(sent.max() - (p - 1)) < 1e-6:
        rules.append("(N−1)")
    formula = f": {rules[0]}\u00a0·\u00a0n" if len(rules) == 1 else ""  # both: they agree on so few ranks
    return {"total": round(float(sent.max()), 6), "who": -1 if even else int(sent.argmax()), "formula": formula}


def verdict(run: Run, promise: Promise, kept: np.ndarray, promised: bool) -> dict[str, Any]:
    """`ok`, and in words how the run ends: which chunk is wrong, if one is.

    Nothing is said against a run that calls collectives and has `promised` nothing.
    """
    where = promise.where(run.world_size, run.num_chunks)
    if kept[where].all():
        return {"ok": True, "verdict": f"Done: {promise.says}."}
    if not promised and (run.called or not run.transfers):
        return {"ok": True, "verdict": ""}
    rank, chunk = (int(index) for index in np.argwhere(where & ~kept)[0])
    fault = _fault(run.final().get((rank, chunk)), promise.goal(run.world_size, run.num_chunks)[rank, chunk])
    done = f"{kept[where].sum()} of {where.sum()} chunks are complete"
    return {"ok": False, "verdict": f"Wrong at the end: {done}. Rank {rank}'s chunk {chunk} {fault}."}


def _kept(run: Run, promise: Promise) -> np.ndarray:
    """Which chunks end as promised, or as the mean of that, or where nothing is promised: bool (R, C)."""
    final, size = run.final(), (run.world_size, run.num_chunks)
    unknown = (np.nan,) * run.world_size
    held = np.array([[final.get((r, c)) or unknown for c in range(run.num_chunks)] for r in range(run.world_size)])
    goal = promise.goal(*size)
    right = (held == goal).all(axis=-1) | np.isclose(held * run.world_size, goal, atol=1e-3).all(axis=-1)
    return right | ~promise.where(*size)


def _fault(held: Contributions, wanted: np.ndarray) -> str:
    """What is wrong with a chunk that should hold `wanted`."""
    if held is None:
        return "holds something unknown"
    values = np.array(held)
    return contents_fault(values, wanted) if np.array_equal(values, np.rint(values)) else "is not a sum that is right"
