"""L3: what can be said of a run as a whole: where it comes from, its phases, what it sends, whether it ends right."""
from __future__ import annotations

from typing import Any

import numpy as np

from book.promise import PROMISES
from book.schedule import contents_fault
from book.trace import Trace
from book.widgets.run import Contributions, Run

MADE = {"simulated": "simulated", "executed": "executed on {} ranks", "recorded": "recorded from your run · {} ranks",
        "instrumented": "instrumented · {} ranks"}


def promise_of(trace: Trace, run: Run) -> str:
    """What the run should end in: what the trace says, else "all_gather" if nothing is ever added, or "all_reduce"."""
    only_copies = all(t.op == "copy" for t in run.transfers)
    return trace.promise or ("all_gather" if only_copies else "all_reduce")


def phases(run: Run) -> str:
    """A digit per step: 0 where it mostly adds, 1 where it replaces, 2 where that is unknown."""
    ops = [[t.op for t in run.transfers if t.leaves == step] for step in range(run.num_steps)]
    return "".join("0" if 2 * step.count("reduce") > len(step) else "1" if "copy" in step else "2" for step in ops)


def phase_names(name: str | None, shape: dict[str, Any]) -> list[str]:
    """What the phases that add and that replace are called."""
    to_one = shape["kind"] == "tree" or any(word in (name or "") for word in ("server", "tree"))
    return ["reduce", "broadcast", ""] if to_one else ["reduce-scatter", "all-gather", ""]


def source_of(trace: Trace, run: Run, with_backend: bool) -> str:
    """Where the picture comes from; the backend only where the text need not be the same on every machine."""
    made = MADE[trace.source].format(trace.world_size)
    num_bytes = sum({t.chunk: t.num_bytes or 0 for t in run.transfers}.values())
    parts = [made, trace.backend if with_backend else None, f"n = {_bytes(num_bytes)}" if num_bytes else None]
    return " · ".join(part for part in parts if part)


def totals(run: Run, promise: str) -> dict[str, Any]:
    """`total`: what the busiest rank sends, in buffers; `who` that is (-1: all the same); `formula` if one holds."""
    sent, shares, p = np.zeros(run.world_size), run.shares(), run.world_size
    for t in run.transfers:
        sent[t.src] += shares[t.chunk] if t.chunk is not None else 1 / run.num_chunks
    even = sent.max() - sent.min() < 1e-6
    rule, value = ("2(N−1)/N", 2 * (p - 1) / p) if promise == "all_reduce" else ("(N−1)/N", (p - 1) / p)
    formula = f": {rule}\u00a0·\u00a0n" if even and abs(sent.max() - value) < 1e-6 else ""
    if not even and abs(sent.max() - (p - 1)) < 1e-6:
        formula = ": (N−1)\u00a0·\u00a0n"
    return {"total": round(float(sent.max()), 6), "who": -1 if even else int(sent.argmax()), "formula": formula}


def verdict(run: Run, promise: str) -> dict[str, Any]:
    """`ok`, and in words how the run ends: which chunk is wrong, if one is."""
    size, final = (run.world_size, run.num_chunks), run.final()
    goal = PROMISES[promise].goal(*size)
    wanted = [(int(rank), int(chunk)) for rank, chunk in np.argwhere(PROMISES[promise].where(*size))]
    bad = [(place, fault) for place in wanted if (fault := _fault(final.get(place), goal[place]))]
    if not bad:
        once = promise == "reduce_scatter"
        every = "chunk is complete on one rank" if once else "rank holds every chunk complete"
        return {"ok": True, "verdict": f"Done: every {every}."}
    (rank, chunk), fault = bad[0]
    done = f"{len(wanted) - len(bad)} of {len(wanted)} chunks are complete"
    return {"ok": False, "verdict": f"Wrong at the end: {done}. Rank {rank}'s chunk {chunk} {fault}."}


def _fault(held: Contributions, wanted: np.ndarray) -> str:
    """What is wrong with a chunk that should hold `wanted`, or its mean; "" when nothing is."""
    if held is None:
        return "holds something unknown"
    values = np.array(held)
    if np.array_equal(values, wanted) or np.allclose(values * len(held), wanted, atol=1e-3):
        return ""
    return contents_fault(values, wanted) if np.array_equal(values, np.rint(values)) else "is not a sum that is right"


def _bytes(x: float) -> str:
    units = ["B", "kB", "MB", "GB", "TB"]
    while x >= 999.5 and len(units) > 1:
        x /= 1000
        units.pop(0)
    return f"{x:.3g} {units[0]}"
