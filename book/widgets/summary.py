"""L3: what can be said of a run as a whole: where it comes from, its phases, what it sends, whether it ends right."""
from __future__ import annotations

from typing import Any

import numpy as np

from book.schedule import PROMISES
from book.trace import Trace
from book.widgets.run import Contributions, Run

MADE = {"simulated": "simulated", "executed": "executed on {} ranks", "recorded": "recorded from your run · {} ranks",
        "instrumented": "instrumented · {} ranks"}


def promise_of(trace: Trace, run: Run) -> str:
    """What the run should end in: as its name says, else "all_gather" if nothing is ever added, else "all_reduce"."""
    named = next((promise for promise in PROMISES if (trace.name or "").endswith(promise)), None)
    only_copies = all(t.op == "copy" for t in run.transfers)
    return named or ("all_gather" if only_copies else "all_reduce")


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
    final = run.final()
    bad = [where for where in sorted(final) if not complete(run, promise, where[1], final[where])]
    if promise == "reduce_scatter":
        done = len({chunk for _, chunk in final} - _everywhere(bad, run.world_size))
        if done == run.num_chunks:
            return {"ok": True, "verdict": "Done: every chunk is complete on one rank."}
        return {"ok": False, "verdict": f"Wrong at the end: {done} of {run.num_chunks} chunks are complete on a rank."}
    if not bad:
        return {"ok": True, "verdict": "Done: every rank holds every chunk complete."}
    (rank, chunk), num_done = bad[0], len(final) - len(bad)
    return {"ok": False, "verdict": f"Wrong at the end: {num_done} of {len(final)} chunks are complete. "
                                    f"Rank {rank}'s chunk {chunk} {_fault(final[rank, chunk])}."}


def complete(run: Run, promise: str, chunk: int, held: Contributions) -> bool:
    """Whether a chunk's contents are all there, each once (or as a mean); for an all-gather, its owner's contents."""
    if held is None:
        return False
    if promise != "all_gather":
        return all(x == 1 for x in held) or all(abs(x * len(held) - 1) < 1e-3 for x in held)
    return held == gathered(run, chunk)


def gathered(run: Run, chunk: int) -> Contributions:
    """What an all-gather brings everywhere: what the one rank that has the chunk starts with."""
    starts = (run.start.get((rank, chunk)) for rank in range(run.world_size))
    return next((start for start in starts if start and any(start)), None)


def _everywhere(bad: list[tuple[int, int]], world_size: int) -> set[int]:
    chunks = [chunk for _, chunk in bad]
    return {chunk for chunk in chunks if chunks.count(chunk) == world_size}


def _fault(held: Contributions) -> str:
    if held is None:
        return "holds something unknown"
    missing = [str(rank) for rank, x in enumerate(held) if x == 0]
    double = [f"{rank} (×{x:.4g})" for rank, x in enumerate(held) if x > 1]
    lacks, counts = f"lacks {_ranks(missing)}", f"counts {_ranks(double)}"
    faults = [lacks] * bool(missing) + [counts] * bool(double)
    return " and ".join(faults) or "is not a sum that is right"


def _ranks(names: list[str]) -> str:
    return f"rank{'s' if len(names) > 1 else ''} {', '.join(names)}"


def _bytes(x: float) -> str:
    units = ["B", "kB", "MB", "GB", "TB"]
    while x >= 999.5 and len(units) > 1:
        x /= 1000
        units.pop(0)
    return f"{x:.3g} {units[0]}"
