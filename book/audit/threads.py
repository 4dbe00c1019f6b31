"""L2: collectives of one group that two threads of a program call: their order differs between ranks, or between runs.

Ranks match their calls by order alone. A rank notes which thread has made each call, from its second thread on; it is
a fault where the ranks' orders differ, or where one thread calls while another is still inside a call.
"""
from __future__ import annotations

import re
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from book.audit.notes import Notes, PlaceOf, noted
from book.tap import Op, Subscriber
from book.tap.log import OwnGroup, Place
from book.tap.place import API_FILES, outwards
from book.waiting.hang import Group
from book.words import named

MOST_TURNS = 200


class Turn(NamedTuple):
    """Calls that one thread has made in a row: the first one's number in the group, its name and its line."""
    thread: str
    place_in_line: int  # 0 of the main thread, or one of torch's own; then in the order of first calls
    first: int
    call: str
    place: Place | str | None


class Turns(NamedTuple):
    """Which threads of a rank have called collectives of a group, and whether one did while another was in a call."""
    group: Group
    turns: tuple[Turn, ...]
    meet: bool


class _Group:
    def __init__(self) -> None:
        self.num_calls = 0
        self.last: threading.Thread | None = None
        # Indices. Not by the threads' identifiers: the system gives that of a thread which has ended to another.
        self.threads: WeakKeyDictionary[threading.Thread, int] = WeakKeyDictionary()
        self.num_named = 0
        self.turns: list[Turn] = []
        self.inside: dict[int, threading.Thread] = {}  # by the serial number of a call that they are in
        self.meet = False

    def take_turn(self, thread: threading.Thread, op: Op) -> None:
        """Note that another thread goes on with the calls."""
        name = _name(thread)
        self.last = thread
        if thread not in self.threads:
            self.num_named += bool(name)
            self.threads[thread] = self.num_named if name else 0
        if len(self.turns) < MOST_TURNS:
            self.turns.append(Turn(name, self.threads[thread], self.num_calls, op.function or "", op.place))


class Threads(Subscriber):
    """Notes which threads call collectives from Python, in each group."""

    def __init__(self) -> None:
        self._groups: dict[OwnGroup, _Group] = {}

    def told(self, place_of: PlaceOf) -> tuple[Turns, ...]:
        """What was noted of groups that two threads or more have used, with readable places."""
        return tuple(Turns(key.shared, tuple(turn._replace(place=str(place_of(*turn.place)) if turn.place else "")
                                             for turn in group.turns), group.meet)
                     for key, group in list(self._groups.items())
                     if len({turn.place_in_line for turn in group.turns}) > 1)

    def before(self, op: Op) -> None:
        if op.is_message or op.function is None or op.inside or op.place is None:
            return
        group = self._groups.get(op.group)
        if group is None:
            group = self._groups[op.group] = _Group()
        thread = threading.current_thread()
        group.num_calls += 1
        if thread is not group.last:
            group.take_turn(thread, op)
        if group.num_named and not group.meet:
            others = {other for other in list(group.inside.values()) if group.threads[other] != group.threads[thread]}
            group.meet = any(map(_is_in_a_call, others))

    def issued(self, op: Op, tensors: Sequence[Any]) -> None:
        group = self._groups.get(op.group) if op.function and not op.is_message else None
        thread = threading.current_thread()
        if group is not None and thread in group.threads and not op.inside:
            group.inside[op.serial] = thread

    def waited(self, op: Op, source_rank: Callable[[], int] | None) -> None:
        self.withdrawn(op)

    def withdrawn(self, op: Op) -> None:
        if not op.is_message:
            group = self._groups.get(op.group)
            if group is not None:
                group.inside.pop(op.serial, None)

    left = withdrawn


def _name(thread: threading.Thread) -> str:
    """A thread's name without the number that Python has given it; "" of the main one, and of one of torch's own."""
    is_own = thread is threading.main_thread() or isinstance(thread, threading._DummyThread)
    return "" if is_own else re.sub(r"^Thread-\d+", "Thread", thread.name)


def _is_in_a_call(thread: threading.Thread) -> bool:
    """Whether a thread is in a call of torch.distributed, and has not gone on with an asynchronous one under way."""
    frame = sys._current_frames().get(thread.ident or 0) if thread.is_alive() else None
    return any(each.f_code.co_filename.endswith(API_FILES) for each in outwards(frame))


def look(ranks: Sequence[Notes | None]) -> Iterator[str]:
    """Groups that two threads use in an order that differs between ranks, or at the same time."""
    by_group: dict[Any, dict[int, Turns]] = {}
    for rank, turns in noted(ranks, "threads"):
        by_group.setdefault(turns.group, {})[rank] = turns
    for found in by_group.values():
        rank, turns = min(found.items())
        orders = {tuple((turn.place_in_line, turn.first) for turn in each.turns) for each in found.values()}
        meeting = [rank for rank, each in found.items() if each.meet]
        if len(orders) > 1 or meeting:
            rank = meeting[0] if meeting else rank
            yield _sentence(rank, found[rank])


def _sentence(rank: int, turns: Turns) -> str:
    other = next(turn for turn in turns.turns if turn.place_in_line)
    first = next(turn for turn in turns.turns if turn.place_in_line != other.place_in_line)
    rest = f"its thread '{first.thread}'" if first.thread else "its main thread"
    return (f"{named([rank])}'s thread '{other.thread}' calls {other.call} at {other.place} while {rest} calls "
            f"{first.call} in the same group at {first.place}: their order is left to chance: a second thread needs a "
            "group of its own (dist.new_group(), made by all ranks)")
