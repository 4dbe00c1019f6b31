"""L3: a trace as the small JSON that the player draws.

A run is written step by step, a message per word:

    021+6      rank 0 sends to rank 2 chunk 1, which is added there; afterwards rank 2's chunk holds ranks 1 and 2
    021=       ... which replaces rank 2's chunk; afterwards that holds just what was in the message
    021?~3     ... received, nobody knows how; "~3": in the message were ranks 0 and 1, not what rank 0's chunk held
    021!       ... never received;      021+6@5  into chunk 5;      021+6^4  arriving in step 4, not in its own

Contributions are a bit mask in hexadecimal, least significant digit (ranks 0-3) first; counts other than 0 and 1 are
written out, "(1,2,0,0.25)"; "?" is unknown. Ranks and chunks are `width` digits in base 36. Nothing is left for the
player to work out: what a chunk holds is what the trace says, and a message is only left out of the text where it
equals what its sender's chunk held as the step began.
"""
from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from book.schedule import PROMISES, Schedule
from book.trace import Event, Trace

Contributions = tuple[float, ...] | None
DIGITS = "0123456789abcdefghijklmnopqrstuvwxyz"
TICKS = 10_000  # a modelled time is written in this many parts of the run's duration
LARGEST_WORLD = 64


@dataclass
class Transfer:
    """One chunk on its way: from the send to the receive, if there was one (positions among the played steps)."""

    src: int
    dst: int
    chunk: int | None
    into: int | None = None
    op: str | None = None
    leaves: int = 0
    arrives: int | None = None
    sent: Contributions = None
    after: Contributions = None
    num_bytes: float | None = None
    start_s: float | None = None
    end_s: float | None = None


@dataclass
class Run:
    """What the player needs of one trace: starting contents, transfers by step, and what ranks changed themselves."""

    world_size: int
    num_chunks: int
    num_steps: int
    transfers: list[Transfer]
    start: dict[tuple[int, int], Contributions] = field(default_factory=dict)
    holds: list[tuple[int, int, int, Contributions]] = field(default_factory=list)  # step, rank, chunk, contents


def as_trace(what: Trace | Schedule) -> Trace:
    """A trace that may be shown: a schedule is simulated without times, a measured trace loses its times.

    Raises TypeError for anything else and ValueError for more ranks than the player can show.
    """
    if isinstance(what, Schedule):
        what = _trace_of(what)
    if not isinstance(what, Trace):
        raise TypeError(f"play() takes a Trace or a Schedule, or a mapping of them, not {type(what).__name__}")
    if what.world_size > LARGEST_WORLD:
        raise ValueError(f"the player shows up to {LARGEST_WORLD} ranks, and this trace has {what.world_size}: "
                         f"plot it, or play fewer ranks")
    return what if what.clock == "modelled" else what.logical()


def payload(traces: Mapping[Any, Trace | Schedule], *, kind: str, title: str, view: str, predict: bool, clock: str,
            labels: Sequence[str] | None, promise: str | None, with_backend: bool) -> dict[str, Any]:
    """The player's JSON for one or more runs; keys of `traces` (or tuples of them) become the choices to select."""
    keys = [key if isinstance(key, tuple) else (key,) for key in traces]
    axes = [_axis([key[i] for key in keys], labels[i] if labels else None) for i in range(len(keys[0]))]
    runs = []
    for key, what in zip(keys, traces.values()):
        place = [axes[i]["values"].index(str(part)) for i, part in enumerate(key)]
        runs.append({"at": place, **run_payload(as_trace(what), promise, with_backend)})
    return {"v": 1, "kind": kind, "title": title, "view": view, "predict": predict, "clock": clock,
            "axes": [axis for axis in axes if kind == "race" or len(axis["values"]) > 1] and axes, "runs": runs}


def run_payload(trace: Trace, promise: str | None = None, with_backend: bool = False) -> dict[str, Any]:
    """One run as JSON data; the backend is left out where outputs must be the same on every machine."""
    run = read_run(trace)
    width = 1 if max(run.world_size, run.num_chunks) <= len(DIGITS) else 2
    promise = promise or _promise(trace, run)
    data: dict[str, Any] = {
        "name": trace.name or "", "from": trace.source, "n": run.world_size, "c": run.num_chunks, "width": width,
        "goal": promise, "names": _phase_names(trace.name, promise, run), **_sizes(run),
        "start": _write_start(run), "steps": _write_steps(run, width), **_write_times(run, trace),
    }
    if run.holds:
        data["holds"] = [[step, rank, chunk, write(held)] for step, rank, chunk, held in run.holds]
    if with_backend and trace.backend:
        data["backend"] = trace.backend
    return data


def read_run(trace: Trace) -> Run:
    """A trace's transfers, matched send to receive, and holds; raises ValueError when it has none to play."""
    events = list(trace.events)
    sends, recvs = ([e for e in events if e.kind == kind and e.peer is not None] for kind in ("send", "recv"))
    if not sends and not recvs:
        raise ValueError("this trace has no chunk that is sent or received: there is nothing to play "
                         "(record=True follows sends and receives of a watched buffer)")
    if any(e.step is None for e in sends + recvs):
        raise ValueError("this trace's sends and receives have no steps: give each event its step")
    steps = sorted({e.step for e in sends + recvs})
    position = {step: i for i, step in enumerate(steps)}
    run = Run(trace.world_size, max(trace.num_chunks, 1), len(steps), [])
    run.transfers = [_transfer(send, recv, position) for send, recv in _pair(sends, recvs)]
    run.transfers.sort(key=lambda t: t.leaves)
    _read_holds(run, [e for e in events if e.kind == "hold" and e.chunk is not None], steps)
    return run


def write(held: Contributions) -> str:
    """Contributions as text: a hexadecimal bit mask, a list of counts, or "?"."""
    if held is None:
        return "?"
    if any(value not in (0, 1) for value in held):
        return "(" + ",".join(f"{value:.4g}" for value in held) + ")"
    digits = [sum(int(bit) << i for i, bit in enumerate(held[k:k + 4])) for k in range(0, len(held), 4)]
    return "".join(f"{digit:x}" for digit in digits).rstrip("0") or "0"


def _trace_of(schedule: Schedule) -> Trace:
    own = schedule.start()
    events = [Event(rank, "hold", chunk=chunk, step=0, contributions=tuple(own[rank, chunk].tolist()))
              for rank in range(schedule.world_size) for chunk in range(schedule.num_chunks)]
    for rows, sent, after in schedule.replay():
        for row, message, held in zip(rows, sent.tolist(), after.tolist()):
            m = schedule.moves[row]
            events.append(Event(m.src, "send", None, m.dst, chunk=m.chunk, step=m.step, contributions=tuple(message)))
            events.append(Event(m.dst, "recv", m.op, m.src, chunk=m.chunk, step=m.step, contributions=tuple(held)))
    return Trace(events, schedule.world_size, "logical", "simulated", name=schedule.name)


def _pair(sends: list[Event], recvs: list[Event]) -> Iterable[tuple[Event | None, Event | None]]:
    """Sends with their receives: first those that agree on chunk and step, then in order on each channel."""
    waiting = defaultdict(list)
    for recv in recvs:
        waiting[recv.peer, recv.rank].append(recv)
    pairs, late = [], []
    for send in sends:
        queue = waiting[send.rank, send.peer]
        same = next((r for r in queue if (r.step, r.chunk) == (send.step, send.chunk)), None)
        if same is None:
            late.append(send)
            continue
        queue.remove(same)
        pairs.append((send, same))
    for send in late:
        queue = waiting[send.rank, send.peer]
        pairs.append((send, queue.pop(0) if queue and queue[0].step >= send.step else None))
    return pairs + [(None, recv) for queue in waiting.values() for recv in queue]


def _transfer(send: Event | None, recv: Event | None, position: Mapping[int, int]) -> Transfer:
    if send is None:
        at = position[recv.step]
        return Transfer(recv.peer, recv.rank, recv.chunk, recv.chunk, recv.op, at, at, None, recv.contributions,
                        recv.num_bytes, recv.start_s, recv.end_s)
    t = Transfer(send.rank, send.peer, send.chunk, None, None, position[send.step], None, send.contributions, None,
                 send.num_bytes, send.start_s, send.end_s)
    if recv is not None:
        t.into, t.op, t.arrives, t.after = recv.chunk, recv.op, position[recv.step], recv.contributions
        t.end_s = recv.end_s
        t.chunk = t.into if t.chunk is None else t.chunk
    return t


def _read_holds(run: Run, holds: list[Event], steps: list[int]) -> None:
    for event in holds:
        at = sum(step < event.step for step in steps) if event.step is not None else 0
        where = event.rank, event.chunk
        if at == 0 and where not in run.start:
            run.start[where] = event.contributions
        else:
            run.holds.append((at, *where, event.contributions))
    run.holds.sort(key=lambda hold: hold[:3])


def _write_start(run: Run) -> str | list[str]:
    own = {(r, c): tuple(int(k == r) for k in range(run.world_size))
           for r in range(run.world_size) for c in range(run.num_chunks)}
    if run.start == own:
        return "own"
    return [".".join(write(run.start.get((r, c))) for c in range(run.num_chunks)) for r in range(run.world_size)]


def _write_steps(run: Run, width: int) -> list[str]:
    held = {(r, c): run.start.get((r, c)) for r in range(run.world_size) for c in range(run.num_chunks)}
    holds, arriving, lines = defaultdict(list), defaultdict(list), []
    for step, rank, chunk, contents in run.holds:
        holds[step].append(((rank, chunk), contents))
    by_step = defaultdict(list)
    for transfer in run.transfers:
        by_step[transfer.leaves].append(transfer)
    for step in range(run.num_steps):
        held.update(arriving.pop(step, ()))
        held.update(holds[step])
        lines.append(" ".join(_word(t, held, width) for t in by_step[step]))
        for t in by_step[step]:
            if t.into is not None:
                arriving[t.arrives + 1].append(((t.dst, t.into), t.after))
    return lines


def _word(t: Transfer, held: Mapping[tuple[int, int], Contributions], width: int) -> str:
    text = _digits(t.src, width) + _digits(t.dst, width) + (_digits(t.chunk, width) if t.chunk is not None else "-" * width)
    text += {"reduce": "+", "copy": "=", None: "!" if t.arrives is None else "?"}.get(t.op, "?")
    text += write(t.after) if t.arrives is not None and t.after != t.sent else ""
    text += "~" + write(t.sent) if t.chunk is None or t.sent != held[t.src, t.chunk] else ""
    text += "@" + _digits(t.into, width) if t.into is not None and t.into != t.chunk else ""
    return text + (f"^{t.arrives}" if t.arrives not in (None, t.leaves) else "")


def _digits(number: int, width: int) -> str:
    return DIGITS[number] if width == 1 else DIGITS[number // 36] + DIGITS[number % 36]


def _write_times(run: Run, trace: Trace) -> dict[str, Any]:
    """Per step [start, end] if all transfers share it, else a pair per transfer, in ticks of the run's duration."""
    if trace.clock != "modelled" or not trace.duration_s or any(t.start_s is None for t in run.transfers):
        return {}
    origin, duration = min(t.start_s for t in run.transfers), trace.duration_s
    lines = [[] for _ in range(run.num_steps)]
    for t in run.transfers:
        lines[t.leaves].append(tuple(round((s - origin) / duration * TICKS) for s in (t.start_s, t.end_s)))
    flat = [line[0] if len(set(line)) == 1 else [tick for pair in line for tick in pair] for line in lines]
    return {"duration_s": float(f"{duration:.6g}"), "times": [list(line) for line in flat]}


def _sizes(run: Run) -> dict[str, Any]:
    """The buffer's bytes, and each chunk's share where they are not all the same."""
    sizes = [max((t.num_bytes or 0 for t in run.transfers if t.chunk == c), default=0) for c in range(run.num_chunks)]
    if not any(sizes):
        return {}
    if min(sizes) == max(sizes):
        return {"bytes": round(sum(sizes))}
    return {"bytes": round(sum(sizes)), "shares": [float(f"{size / sum(sizes):.6g}") for size in sizes]}


def _promise(trace: Trace, run: Run) -> str:
    named = next((p for p in PROMISES if (trace.name or "").endswith(p)), None)
    if named:
        return named
    return "all_reduce" if any(t.op != "copy" for t in run.transfers) else "all_gather"


def _phase_names(name: str | None, promise: str, run: Run) -> list[str]:
    """What the steps that add and the steps that replace are called."""
    hub = set.intersection(*({t.src, t.dst} for t in run.transfers))
    to_one = any(word in (name or "") for word in ("server", "tree")) or (hub and run.world_size > 2)
    return ["reduce", "broadcast"] if to_one else ["reduce-scatter", "all-gather"]


def _axis(values: list[Any], label: str | None) -> dict[str, Any]:
    distinct = list(dict.fromkeys(values))
    numeric = all(isinstance(value, int) for value in distinct)
    return {"label": label or ("ranks" if numeric else "run"), "values": [str(value) for value in distinct]}
