"""L3: a recorded training step on a mesh as stops: what ranks compute, send and reduce, in logical order.

Each rank keeps its own order. A forward or backward counts as one with the collectives inside it, so all ranks of these
run it together; a message is received after it was sent; a collective waits for its whole group. What can be done at
the same time is one stop: messages, then actions, then collectives between actions. Times decide only each rank's own
order, so the same program always has the same stops.
"""
from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from book.schedule import KINDS, Action
from book.trace import Event, Trace

RESULTS = {"F": ("output", 1), "B": ("gradient", -1), "I": ("gradient", -1)}  # what goes to which neighbouring stage
Channel = tuple[int | None, int | None]  # source and destination of a message, as far as the trace tells


@dataclass
class RankAct:
    """What one rank does next: "work", "send", "recv" or "collective".

    Work has its `action`, and in `inner` what is sent inside it: collectives, and messages to a rank that is at an
    action too. `made` is the action that a message comes from, if that is known.
    """

    kind: str
    event: Event
    inner: list[Event] = field(default_factory=list)
    action: Action | None = None
    made: Action | None = None


@dataclass
class Stop:
    """What is done at the same time: items of one kind; `ended` are ranks that compute nothing more."""

    kind: str
    items: list[RankAct]
    ended: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Step:
    """One training step: its stops, the ranks of each stage, and how many such steps the trace has."""

    stops: list[Stop]
    ranks_of_stage: dict[int, frozenset[int]]
    num_steps: int

    @property
    def span(self) -> str:
        """What the bytes of the trace are counted over; without actions the number of steps is unknown."""
        return "in a step" if self.ranks_of_stage else "in this run"


def read_step(trace: Trace) -> Step:
    """The stops of a trace's first training step; a new one begins where a rank does an action again.

    Raises ValueError for a trace without times, whose ranks' own orders are not known.
    """
    if trace.clock == "logical":
        raise ValueError("a mesh is shown from the trace that was recorded, launch(..., record=True).trace: a logical "
                         "one does not say what a rank did between its messages")
    inner = _between_actions(trace)
    programs = [_program(trace, rank, inner) for rank in range(trace.world_size)]
    stages: dict[int, set[int]] = {}
    actions = [item.action for program in programs for item in program if item.action]
    for action in actions:
        stages.setdefault(action.stage, set()).add(action.rank)
    num_steps = max(Counter(actions).values(), default=1)
    played = [_first_step(program) for program in programs]
    for item in (item for program in played for item in program):
        if item.made and item.event.peer not in stages.get(item.made.stage + RESULTS[item.made.kind][1], ()):
            item.made = None  # the receiver is not on the neighbouring stage, so this is not that action's result
    return Step(list(_Schedule(played, whole=num_steps == 1).stops()),
                {stage: frozenset(ranks) for stage, ranks in sorted(stages.items())}, num_steps)


def _action(event: Event) -> Action | None:
    """The pipeline action that an event is; None for anything else."""
    if event.kind != "compute" or event.op not in KINDS or event.stage is None or event.micro_batch is None:
        return None
    return Action(event.rank, event.stage, event.micro_batch, event.op)


def _group(event: Event) -> tuple[int, ...]:
    """The ranks of a collective, or the one that a message goes to; () if the trace does not say."""
    return event.group or (() if event.peer is None else (event.peer,))


def _is_shown(event: Event) -> bool:
    if event.start_s is None:
        return False
    if event.kind == "collective":  # alone, a rank has nobody to wait for and nothing to send
        return len(_group(event)) > 1
    return event.kind in ("send", "recv") or _action(event) is not None


def _begins(event: Event) -> float:
    """When a rank comes to an event: a message that was requested early is needed only when it is waited for."""
    if event.kind == "recv" and event.end_s is not None:
        return event.end_s
    return event.start_s or 0.0  # shown events have one


def _in_order(trace: Trace, rank: int) -> Iterator[tuple[Event, bool]]:
    """A rank's events in its order, and of each whether it is inside the last action before it."""
    ends = -1.0
    for event in sorted([event for event in trace.of_rank(rank) if _is_shown(event)], key=_begins):
        yield event, _begins(event) <= ends
        if event.kind == "compute":
            ends = -1.0 if event.end_s is None else event.end_s


def _between_actions(trace: Trace) -> set[Event]:
    """Messages between two ranks that are both inside an action, such as the hops of a ring in a layer.

    The n-th message from one rank to another is the n-th that is received.
    """
    sent: dict[Channel, list[tuple[Event, bool]]] = {}
    taken: dict[Channel, list[tuple[Event, bool]]] = {}
    for rank in range(trace.world_size):
        for event, is_inside in _in_order(trace, rank):
            if event.kind == "send":
                sent.setdefault((rank, event.peer), []).append((event, is_inside))
            elif event.kind == "recv":
                taken.setdefault((event.peer, rank), []).append((event, is_inside))
    pairs = (pair for channel in sent for pair in zip(sent[channel], taken.get(channel, ())))
    return {event for (one, one_inside), (other, other_inside) in pairs if one_inside and other_inside
            for event in (one, other)}


def _program(trace: Trace, rank: int, inner: set[Event]) -> list[RankAct]:
    """What a rank did, in its order; what it received inside an action comes before the action, which needs it.

    Messages in `inner` are a part of the action.
    """
    items: list[RankAct] = []
    work: RankAct | None = None
    for event, is_inside in _in_order(trace, rank):
        around = work if is_inside else None
        if event.kind == "compute":
            work = RankAct("work", event, action=_action(event))
            items.append(work)
        elif around and event in inner:
            around.inner += [event] * (event.kind == "send")
        elif event.kind == "collective" and around:
            around.inner.append(event)
        elif event.kind == "recv" and around:
            items.insert(items.index(around), RankAct("recv", event))
        else:
            items.append(RankAct(event.kind, event))
    _find_made(items)
    return items


def _find_made(items: list[RankAct]) -> None:
    """Set `made` of each message sent after an action, unless two messages to one peer could be its result."""
    last: Action | None = None
    sends: dict[int | None, RankAct] = {}
    for item in items:
        if item.kind == "work":
            last, sends = item.action, {}
        elif item.kind == "send" and last is not None and last.kind in RESULTS:
            earlier = sends.setdefault(item.event.peer, item)
            item.made = last
            if earlier is not item:
                earlier.made = item.made = None


def _first_step(program: list[RankAct]) -> list[RankAct]:
    seen = set()
    for place, item in enumerate(program):
        if item.action in seen:
            return program[:place]
        if item.action:
            seen.add(item.action)
    return program


class _Schedule:
    """The ranks' programs side by side."""

    def __init__(self, programs: list[list[RankAct]], whole: bool):
        self._left = [deque(program) for program in programs]
        self._whole = whole
        self._on_way: Counter[Channel] = Counter()

    def stops(self) -> Iterator[Stop]:
        """What is done at once, until nothing is left or nothing can proceed."""
        num_left = None
        while num_left != (num_left := sum(map(len, self._left))):
            for kind, take in (("message", self._messages), ("work", self._work), ("collective", self._collectives)):
                if items := take():
                    yield Stop(kind, items, self._ended())
        stuck = [left[0] for left in self._left if left]
        if stuck and self._whole:  # a step cut out of several may leave messages of the next one
            yield Stop("stuck", stuck)

    def _messages(self) -> list[RankAct]:
        """Sends that ranks have reached; messages in flight are received, but not passed on in the same stop."""
        sent: list[RankAct] = []
        fresh: Counter[Channel] = Counter()
        resting: set[int] = set()
        while any([self._message(rank, sent, fresh, resting) for rank in range(len(self._left))]):
            pass
        self._on_way += fresh
        return sent

    def _message(self, rank: int, sent: list[RankAct], fresh: Counter[Channel], resting: set[int]) -> bool:
        """Whether this rank sent or received its next message; once it has received one of this stop, it sends none."""
        item = self._left[rank][0] if self._left[rank] else None
        if item is None or item.kind not in ("send", "recv") or (item.kind == "send" and rank in resting):
            return False
        channel = (rank, item.event.peer) if item.kind == "send" else (item.event.peer, rank)
        if item.kind == "send":
            sent.append(item)
            fresh[channel] += 1
        elif self._on_way[channel]:
            self._on_way[channel] -= 1
        elif fresh[channel]:
            fresh[channel] -= 1
            resting.add(rank)
        else:
            return False
        self._left[rank].popleft()
        return True

    def _work(self) -> list[RankAct]:
        """Actions that can run: all ranks in the groups of their collectives are at an action too."""
        ready = self._next("work")
        while waiting := [rank for rank, item in ready.items()
                          if any(peer not in ready for event in item.inner for peer in _group(event))]:
            for rank in waiting:
                del ready[rank]
        return [self._left[rank].popleft() for rank in ready]

    def _collectives(self) -> list[RankAct]:
        """Collectives that their whole group has reached, as long as consecutive ones are of the same kind."""
        found: list[RankAct] = []
        while True:
            ready = self._next("collective")
            able = [item for item in ready.values() if all(
                peer in ready and _call(ready[peer].event) == _call(item.event) for peer in _group(item.event))]
            alike = [item for item in able if _pattern(item.event) == _pattern((found or able)[0].event)]
            if not alike:
                return found
            found += [self._left[item.event.rank].popleft() for item in alike]

    def _next(self, kind: str) -> dict[int, RankAct]:
        return {rank: left[0] for rank, left in enumerate(self._left) if left and left[0].kind == kind}

    def _ended(self) -> frozenset[int]:
        return frozenset(rank for rank, left in enumerate(self._left) if not any(i.kind == "work" for i in left))


def _call(event: Event) -> tuple[str | None, list[int]]:
    return event.op, sorted(_group(event))


def _pattern(event: Event) -> tuple[str | None, list[int]]:
    """What collectives along one axis have in common."""
    group = sorted(_group(event))
    return event.op, [peer - group[0] for peer in group]
