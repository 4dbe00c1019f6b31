"""L3: what recordings must show in several labs: sends and receives only, all waited for, no more sums than needed."""
from __future__ import annotations

from collections.abc import Mapping, Sequence

from book.checks.verdict import CheckFailed, refuse, require, short
from book.trace import Event, Trace


def point_to_point(trace: Trace) -> int:
    """The run must have used sends and receives only. Returns how many messages were sent."""
    for op in sorted({event.op for event in trace.of_kind("collective")} - {"barrier"}):
        raise CheckFailed(f"your run called {op}, but here you build it yourself, from sends and receives")
    num_messages = len(trace.of_kind("send"))
    require(num_messages, "your run sent no message at all: is there any send in your function?")
    return num_messages


def awaited(trace: Trace, op: str | None = None) -> None:
    """Each rank must have waited for all its receives and collectives, and must have issued some called `op` if given.

    `trace` must be recorded without `follow_backward`, which would note the end even of collectives that nobody waited
    for. An operation whose future was asked for counts as waited for.
    """
    for rank in range(trace.world_size):
        issued = [event for event in trace.of_rank(rank) if event.kind == "collective" and op in (None, event.op)]
        refuse(op and not issued, f"rank {rank} issued no {(op or '').replace('_', '-')} at all: was your hook never "
               "called, or was no bucket ever complete?")
        received = [event for event in trace.of_rank(rank) if event.kind == "recv"]
        for what, own in ("collective", issued), ("receive", received):
            lost = [number for number, event in enumerate(own) if event.end_s is None]
            one = f"its {what}" if len(own) == 1 else (
                f"{len(lost)} of its {len(own)} {what}s, the first being number {min(lost, default=0)}, counted from 0")
            refuse(lost, f"rank {rank} never waited for {one}. A result may be used only once its own wait() has "
                   "returned")


def split_traffic(trace: Trace, wanted: Mapping[str, int | None], num_bytes: int) -> int:
    """Each rank must issue, in each phase, `wanted[phase]` all-reduces of `num_bytes`, and nothing else.

    Barriers end the phases; None stands for any traffic. Returns the bytes that a rank gave to all-reduces in the
    phases that are counted.
    """
    for rank in range(trace.world_size):
        phases: list[list[Event]] = [[]]
        for event in trace.of_rank(rank):
            if event.op == "barrier":
                phases.append([])
            elif event.kind in ("collective", "send", "recv"):
                phases[-1].append(event)
        require(len(phases) == len(wanted), f"rank {rank} came to {len(phases) - 1} barriers, but the check has "
                f"{len(wanted) - 1}: leave dist.barrier() out of your code, collectives need none")
        for (phase, num), events in zip(wanted.items(), phases):
            if num is not None:
                _check_phase(f"{phase}, rank {rank}", events, num, num_bytes)
    return num_bytes * sum(num or 0 for num in wanted.values())


def _check_phase(where: str, events: Sequence[Event], num: int, num_bytes: int) -> None:
    needless = ("but nothing needs to be sent here: each rank has all that its own part needs" if num == 0 else
                "but one all-reduce of what the ranks' parts give is enough: the input of a map cut by rows is cut "
                "already, so nothing needs to be gathered before it")
    for event in events:
        require(event.op == "all_reduce" and num, f"{where}: your code calls {event.op or event.kind}, {needless}")
    require(len(events) <= num, f"{where}: {len(events)} all-reduces where {num} is enough: add up what the ranks' "
            "parts give once, at the end, and pass x through its operator once, for all that use it")
    require(len(events) == num, f"{where}: {len(events)} all-reduces instead of {num}: what brings the ranks' parts "
            "together?")
    for event in events:
        require(event.num_bytes == num_bytes, f"{where}: an all-reduce of {short(event.num_bytes or 0)} bytes, but "
                f"{short(num_bytes)} are enough: send only the sum itself, in its own dtype")
