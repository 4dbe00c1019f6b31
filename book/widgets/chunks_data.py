"""L3: a trace as the small JSON that the player draws.

A run is written step by step, a message per word:

    021+6      rank 0 sends to rank 2 chunk 1, which is added there; afterwards rank 2's chunk holds ranks 1 and 2
    021=       ... which replaces rank 2's chunk; afterwards that holds just what was in the message
    021?~3     ... received, nobody knows how; "~3": in the message were ranks 0 and 1, not what rank 0's chunk held
    021!       ... never received;      021+6@5  into chunk 5;      021+6^4  arriving in step 4, not in its own

A step in which only the library moved data has no words: what it changed is among the `holds`, [step, rank, chunk,
contents] that hold from before that step on.

Contributions are a bit mask in hexadecimal, least significant digit (ranks 0-3) first; counts other than 0 and 1 are
written out, "(1,2,0,0.25)"; "?" is unknown. Ranks and chunks are `width` digits in base 36. Nothing is left for the
player to work out: what a chunk holds is what the trace says, and a message is only left out of the text where it
equals what its sender's chunk held as the step began.
"""
from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from book.promise import Promise
from book.trace import Trace
from book.widgets.choices import arranged
from book.widgets.chunks_run import Contributions, Run, Transfer, read_run
from book.widgets.chunks_shape import shape_of
from book.widgets.chunks_summary import phase_names, phases, promised_of, source_of, totals, verdict
from book.widgets.chunks_words import words_of

DIGITS = "0123456789abcdefghijklmnopqrstuvwxyz"
TICKS = 10_000  # a modelled time is written in this many parts of the run's duration


@dataclass(frozen=True)
class Options:
    """How traces are played: see `play` and `race` for what each option means."""

    kind: str = "play"
    view: str = "auto"
    predict: bool = False
    clock: str = "steps"
    labels: Sequence[str] | None = None
    select: Any = None
    promise: str | None = None


def payload(traces: Mapping[Any, Trace], title: str, options: Options, with_backend: bool) -> dict[str, Any]:
    """The player's JSON for one or more runs; keys of `traces` (or tuples of them) become the choices to select."""
    runs = {key: run_payload(trace, options.promise, with_backend) for key, trace in traces.items()}
    return {"v": 1, "kind": options.kind, "title": title, "view": options.view, "predict": options.predict,
            "clock": options.clock, **arranged(runs, options.labels, options.select)}


def run_payload(trace: Trace, promise: str | None = None, with_backend: bool = False) -> dict[str, Any]:
    """One run as JSON data; the backend is left out where outputs must be the same on every machine."""
    run = read_run(trace)
    width = 1 if max(run.world_size, run.num_chunks) <= len(DIGITS) else 2
    promised, kept = promised_of(trace, run, promise)
    shape = shape_of([(t.src, t.dst) for t in run.transfers], run.world_size)
    digits, called = phases(run)
    return {
        "n": run.world_size, "c": run.num_chunks, "width": width, "goal": promised.name, "shape": shape,
        "names": phase_names(trace.name, promised.name, shape) + called, "phases": digits,
        **verdict(run, promised, kept, bool(promise or trace.promise)), **words_of(run),
        "source": source_of(trace, run, with_backend), **totals(run, promised.name), **_sizes(run),
        "holds": [[step, rank, chunk, write(held)] for step, rank, chunk, held in run.holds],
        "start": _write_start(run), "steps": _write_steps(run, width), **_write_times(run, trace),
        **_write_goal(run, promised), **({"unseen": True} if run.called else {}),
    }


def write(held: Contributions) -> str:
    """Contributions as text: a hexadecimal bit mask, a list of counts, or "?"."""
    if held is None:
        return "?"
    if any(value not in (0, 1) for value in held):
        return "(" + ",".join(f"{value:.4g}" for value in held) + ")"
    digits = [sum(int(bit) << i for i, bit in enumerate(held[k:k + 4])) for k in range(0, len(held), 4)]
    return "".join(f"{digit:x}" for digit in digits).rstrip("0") or "0"


def _write_start(run: Run) -> list[str]:
    """A text per rank: what its chunks hold, written once if they all hold the same."""
    return [_line([write(run.start.get((r, c))) for c in range(run.num_chunks)]) for r in range(run.world_size)]


def _write_goal(run: Run, promise: Promise) -> dict[str, list[str]]:
    """`goals`: what each rank's chunks should hold at the end, "-" where that is left open, as `start` is written.

    One text if it is the same for all ranks, none if it is all contributions everywhere.
    """
    size = run.world_size, run.num_chunks
    goal, where = promise.goal(*size), promise.where(*size)
    if where.all() and goal.all():
        return {}
    lines = [_line([write(goal[r, c].tolist()) if where[r, c] else "-" for c in range(size[1])])
             for r in range(size[0])]
    return {"goals": lines if len(set(lines)) > 1 else lines[:1]}


def _line(texts: list[str]) -> str:
    return "/".join(texts if len(set(texts)) > 1 else texts[:1])


def _write_steps(run: Run, width: int) -> list[str]:
    by_step = defaultdict(list)
    for transfer in run.transfers:
        by_step[transfer.leaves].append(transfer)
    return [" ".join(_word(t, held, width) for t in by_step[step])
            for step, held in zip(range(run.num_steps), run.states())]


def _word(t: Transfer, held: Mapping[tuple[int, int], Contributions], width: int) -> str:
    text = _digits(t.src, width) + _digits(t.dst, width)
    text += _digits(t.chunk, width) if t.chunk is not None else "-" * width
    text += {"reduce": "+", "copy": "=", None: "!" if t.arrives is None else "?"}.get(t.op, "?")
    text += write(t.after) if t.arrives is not None and t.after != t.sent else ""
    text += "~" + write(t.sent) if t.chunk is None or t.sent != held[t.src, t.chunk] else ""
    text += "@" + _digits(t.into, width) if t.into is not None and t.into != t.chunk else ""
    return text + (f"^{t.arrives}" if t.arrives not in (None, t.leaves) else "")


def _digits(number: int, width: int) -> str:
    return DIGITS[number] if width == 1 else DIGITS[number // 36] + DIGITS[number % 36]


def _write_times(run: Run, trace: Trace) -> dict[str, Any]:
    """Per step [start, end] if all transfers share it, else a pair per transfer, in ticks of the run's duration."""
    times = [(t.start_s, t.end_s) for t in run.transfers if t.start_s is not None and t.end_s is not None]
    if trace.clock != "modelled" or not trace.duration_s or len(times) < len(run.transfers):
        return {}
    if {t.leaves for t in run.transfers} != set(range(run.num_steps)):
        return {}
    origin, duration = min(start_s for start_s, _ in times), trace.duration_s
    lines: list[list[tuple[int, ...]]] = [[] for _ in range(run.num_steps)]
    for t, span in zip(run.transfers, times):
        lines[t.leaves].append(tuple(round((s - origin) / duration * TICKS) for s in span))
    flat = [line[0] if len(set(line)) == 1 else [tick for pair in line for tick in pair] for line in lines]
    return {"duration_s": float(f"{duration:.6g}"), "times": [list(line) for line in flat]}


def _sizes(run: Run) -> dict[str, Any]:
    """The buffer's bytes, and each chunk's share where they are not all the same."""
    num_bytes, shares = run.num_bytes(), run.shares()
    if num_bytes is None:
        return {}
    uneven = shares.max() - shares.min() > 1e-9
    sizes = {"bytes": round(num_bytes)}
    return {**sizes, "shares": [round(x, 6) for x in shares.tolist()]} if uneven else sizes
