"""L3: a recorded training step on a mesh as stops: what ranks compute, send and reduce, in logical order.

Each rank does what it did in its own order. A forward or backward is one thing with the collectives inside it, so the
ranks of these run it together; a message is taken after it was sent; a collective waits for its whole group. What can
be done at once is one stop: messages, then actions, then collectives between actions. Times decide each rank's own
order and nothing else, so the same program has the same stops.
"""
from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from book.schedule import KINDS
from book.trace import Event, Trace

RESULTS = {"F": ("output", 1), "B": ("gradient", -1), "I": ("gradient", -1)}  # what goes to which neighbouring stage


@dataclass
class Item:
    """What one rank does next: a "work", "send", "recv" or "collective"; of work, `inner` are its collectives.

    Of a message that follows the action it comes from, `made` is that action.
    """

    kind: str
    event: Event
    inner: list[Event] = field(default_factory=list)
    made: Event | None = None

    @property
    def action(self) -> tuple:
        """What tells an action from others of its rank."""
        return self.event.op, self.event.stage, self.event.micro_batch


@dataclass
class Stop:
    """What is done at once: items of one kind; `ended` are ranks that compute nothing more, `stuck` says what waits."""

    kind: str
    items: list[Item]
    ended: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Step:
    """One training step: its stops, the ranks of each stage, and how many such steps the trace has."""

    stops: list[Stop]
    ranks_of_stage: dict[int, frozenset[int]]
    num_steps: int

    @property
    def span(self) -> str:
        """What the bytes of the trace are counted over; without actions nothing says how many steps it has."""
        return "in a step" if self.ranks_of_stage else "in this run"


def read_step(trace: Trace) -> Step:
    """The stops of a trace's first training step; a new one begins where a rank does an action again.

    Raises ValueError for a trace without times, whose ranks' own orders are not known.
    """
    if trace.clock == "logical":
        raise ValueError("a mesh is shown from the trace that was recorded, launch(..., record=True).trace: a logical "
                         "one does not say what a rank did between its messages")
    programs = [_program(trace, rank) for rank in range(trace.world_size)]
    stages: dict[int, set[int]] = {}
    for event in _actions(trace):
        stages.setdefault(event.stage, set()).add(event.rank)
    repeats = Counter((event.rank, event.op, event.stage, event.micro_batch) for event in _actions(trace))
    num_steps = max(repeats.values(), default=1)
    played = [_first_step(program) for program in programs]
    for item in (item for program in played for item in program if item.made):
        if item.event.peer not in stages.get(item.made.stage + RESULTS[item.made.op][1], ()):
            item.made = None  # it goes elsewhere, so it is something else
    return Step(list(_Schedule(played, whole=num_steps == 1).stops()),
                {stage: frozenset(ranks) for stage, ranks in sorted(stages.items())}, num_steps)


def _actions(trace: Trace) -> Iterator[Event]:
    return (event for event in trace.of_kind("compute") if _is_action(event))


def _is_action(event: Event) -> bool:
    return event.op in KINDS and None not in (event.stage, event.micro_batch)


def _is_shown(event: Event) -> bool:
    if event.start_s is None or event.kind not in ("send", "recv", "collective", "compute"):
        return False
    if event.kind == "collective" and len(event.group) == 1:  # nobody to wait for, nothing to send
        return False
    return event.kind != "compute" or _is_action(event)


def _begins(event: Event) -> float:
    """When a rank comes to it: a message that was asked for early is needed only when it is waited for."""
    return event.end_s if event.kind == "recv" and event.end_s is not None else event.start_s


def _program(trace: Trace, rank: int) -> list[Item]:
    """What a rank did, in its order; what it received inside an action, the action needs."""
    items: list[Item] = []
    action = None
    shown = [event for event in trace.of_rank(rank) if _is_shown(event)]
    for event in sorted(shown, key=_begins):
        inside = action is not None and action.event.end_s is not None and _begins(event) <= action.event.end_s
        if event.kind == "compute":
            action = Item("work", event)
            items.append(action)
        elif event.kind == "collective" and inside:
            action.inner.append(event)
        elif event.kind == "recv" and inside:
            items.insert(items.index(action), Item("recv", event))
        else:
            items.append(Item(event.kind, event))
    _find_made(items)
    return items


def _find_made(items: list[Item]) -> None:
    """Say of each message from which action it comes, where it is the only one that can: the rest stay unnamed."""
    last, sends = None, {}
    for item in items:
        if item.kind == "work":
            last, sends = item.event, {}
        elif item.kind == "send" and last is not None and last.op in RESULTS:
            earlier = sends.setdefault(item.event.peer, item)
            item.made = last
            if earlier is not item:
                earlier.made = item.made = None


def _first_step(program: list[Item]) -> list[Item]:
    seen = set()
    for place, item in enumerate(program):
        if item.kind == "work":
            if item.action in seen:
                return program[:place]
            seen.add(item.action)
    return program


class _Schedule:
    """The ranks' programs side by side."""

    def __init__(self, programs: list[list[Item]], whole: bool):
        self._left = [deque(program) for program in programs]
        self._whole = whole
        self._on_way: Counter[tuple[int, int]] = Counter()

    def stops(self) -> Iterator[Stop]:
        """What is done at once, until nothing is left or nothing can go on."""
        num_left = None
        while num_left != (num_left := sum(map(len, self._left))):
            for kind, take in (("message", self._messages), ("work", self._work), ("collective", self._collectives)):
                if items := take():
                    yield Stop(kind, items, self._ended())
        stuck = [left[0] for left in self._left if left]
        if stuck and self._whole:  # of several steps the first is cut out, and messages of the next may be left
            yield Stop("stuck", stuck)

    def _messages(self) -> list[Item]:
        """Sends that ranks have come to; what is on its way is taken, but not sent on at once."""
        sent: list[Item] = []
        fresh: Counter[tuple[int, int]] = Counter()
        resting: set[int] = set()
        while any([self._message(rank, sent, fresh, resting) for rank in range(len(self._left))]):
            pass
        self._on_way += fresh
        return sent

    def _message(self, rank: int, sent: list[Item], fresh: Counter, resting: set[int]) -> bool:
        """Whether this rank could send or take its next message; one that took what came just now rests."""
        item = self._left[rank][0] if self._left[rank] else None
        if item is None or item.kind not in ("send", "recv") or (item.kind == "send" and rank in resting):
            return False
        pair = (rank, item.event.peer) if item.kind == "send" else (item.event.peer, rank)
        if item.kind == "send":
            sent.append(item)
            fresh[pair] += 1
        elif self._on_way[pair]:
            self._on_way[pair] -= 1
        elif fresh[pair]:
            fresh[pair] -= 1
            resting.add(rank)
        else:
            return False
        self._left[rank].popleft()
        return True

    def _work(self) -> list[Item]:
        """Actions whose collectives find all of their group at an action."""
        ready = self._next("work")
        while waiting := [rank for rank, item in ready.items()
                          if any(peer not in ready for event in item.inner for peer in event.group)]:
            for rank in waiting:
                del ready[rank]
        return [self._left[rank].popleft() for rank in ready]

    def _collectives(self) -> list[Item]:
        """Collectives that the whole group has come to, as many in a row as are alike; of one kind at a time."""
        found: list[Item] = []
        while True:
            ready = self._next("collective")
            able = [item for item in ready.values() if all(
                peer in ready and _call(ready[peer].event) == _call(item.event) for peer in item.event.group)]
            alike = [item for item in able if _pattern(item.event) == _pattern((found or able)[0].event)]
            if not alike:
                return found
            found += [self._left[item.event.rank].popleft() for item in alike]

    def _next(self, kind: str) -> dict[int, Item]:
        return {rank: left[0] for rank, left in enumerate(self._left) if left and left[0].kind == kind}

    def _ended(self) -> frozenset[int]:
        return frozenset(rank for rank, left in enumerate(self._left) if not any(i.kind == "work" for i in left))


def _call(event: Event) -> tuple:
    return event.op, tuple(sorted(event.group))


def _pattern(event: Event) -> tuple:
    """What collectives along one axis have in common."""
    return event.op, tuple(sorted(peer - min(event.group) for peer in event.group))
