"""L2: the log of a process's calls to torch.distributed, and those who read it while it is written.

Any thread may write. The log has no lock: a call gets its number from a counter and joins the ring in one step each.
"""
from __future__ import annotations

import functools
import itertools
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakSet

from book.waiting.hang import Group

if TYPE_CHECKING:
    import torch

LENGTH = 1024  # calls that the ring keeps
NOBODY = -1  # the peer or the root of a call that names a rank which its group does not have

Place = tuple[str, int]  # file and line number
_REDUCTIONS: dict[int, str] = {}  # names that torch has told: to ask it takes as long as half of a short collective


class OwnGroup(NamedTuple):
    """A process group: its name, its members' ranks in the world, its backends ("cpu:gloo,cuda:nccl"), the own rank."""
    name: str
    ranks: tuple[int, ...]
    backend: str
    rank: int  # in the world

    def __hash__(self) -> int:
        return hash(self.name)  # that of all members takes microseconds where there are a thousand

    @property
    @functools.cache  # noqa: B019, there are few groups
    def shared(self) -> Group:
        """What all its ranks know of it."""
        return Group(self.name, tuple(sorted(self.ranks)))


class Described(NamedTuple):
    """A tensor without its values."""
    dtype: torch.dtype
    shape: torch.Size


@dataclass(slots=True, eq=False)
class Op:
    """One call.

    `kind` is "send", "recv" or a collective ("all_reduce", "all_gather_object", "new_group"), and `function` the
    outermost function of torch.distributed that Python called for it; None if C++ called the group itself, as DDP does.
    `owner` is the part of torch that made it for the program, such as "DDP" or "FSDP"; None if the program did itself.
    `number` counts the collectives in the group, or its sends and receives, from 1, `serial` all calls of the process.
    `peer` and `root` are ranks of the world. `tensors` are those that must be alike on all ranks. `inside` a collective
    of objects, a call is a part of that one. `splits` are the sizes of an all-to-all's parts, of its output and of its
    input; empty where all are equal. `lines` are those of the program that have led to a collective, innermost first.
    `waited` says whether the program knows that it is done, `withdrawn` that torch has refused it: then it counts as
    never made.
    """
    kind: str
    function: str | None
    group: OwnGroup
    number: int
    place: Place | None
    owner: str | None = None
    in_backward: bool = False
    peer: int | None = None
    tag: int = 0
    tensors: tuple[Described, ...] = ()
    most_bytes: int = 0  # of a collective
    root: int | None = None
    reduced_with: Any = None  # torch's ReduceOp, whose name costs as much as the rest
    splits: tuple[Sequence[int], Sequence[int]] = ((), ())
    members: tuple[int, ...] = ()
    inside: bool = False
    lines: tuple[Place, ...] = ()
    waited: bool = False
    polled_s: float = 0.0  # when the program last asked whether it is done, by time.monotonic()
    withdrawn: bool = False
    serial: int = 0

    @property
    def is_message(self) -> bool:
        """Whether it is a send or a receive."""
        return self.kind in ("send", "recv")

    @property
    def has_splits(self) -> bool:
        """Whether an all-to-all names the sizes of parts."""
        return any(self.splits)

    @property
    def part_bytes(self) -> list[int]:
        """What an all-to-all that names the sizes of parts has for each rank of its group; else empty."""
        if not self.splits[1] or not self.tensors:
            return []
        given = self.tensors[0]
        return [size * given.shape[1:].numel() * given.dtype.itemsize for size in self.splits[1]]

    @property
    def num_bytes(self) -> int:
        """The size of its tensors; of a collective, that of its larger side."""
        return self.most_bytes or sum([each.shape.numel() * each.dtype.itemsize for each in self.tensors])

    @property
    def reduces(self) -> str | None:
        """The name of what it reduces with: "SUM"."""
        kind = getattr(self.reduced_with, "op", self.reduced_with)
        if kind is None:
            return None
        number = int(kind)
        name = _REDUCTIONS.get(number)
        return _REDUCTIONS.setdefault(number, str(kind).rpartition(".")[2]) if name is None else name


class Subscriber:
    """What is told of calls, by any thread; it overrides what it wants to know, and the rest costs nothing.

        class Printed(Subscriber):
            def before(self, op):
                print(op.kind, op.group.name, op.place)

        tap.start()
        tap.subscribe(Printed())
    """

    def before(self, op: Op) -> None:
        """A call is about to be made, or is refused by raising here.

        Each call comes here. What is made of other calls, such as `new_group` and collectives of objects, comes nowhere
        else; the calls that it is made of follow, and are `inside`.
        """

    def issued(self, op: Op, tensors: Sequence[torch.Tensor]) -> None:
        """An operation is about to pass to the backend, or is refused by raising here; `tensors` are all that it reads
        or writes, on any device."""

    def withdrawn(self, op: Op) -> None:
        """Torch has refused a call: it counts as never made."""

    def waits(self, op: Op) -> None:
        """The program begins to wait for an operation."""

    def waited(self, op: Op, source_rank: Callable[[], int] | None) -> None:
        """The program has waited for an operation; `source_rank()` gives a receive's sender, by its rank in the group.
        """

    def dropped(self, op: Op) -> None:
        """Python has deleted the request of an isend or irecv that nobody had waited for."""

    def left(self, op: Op) -> None:
        """The program has taken an operation's future, and may wait for that: nothing tells then that it has."""

    def follows(self, op: Op) -> bool:
        """Whether `completes` should be told of an operation even if the program never asks for its future."""
        return False

    def completes(self, op: Op, future: torch.futures.Future[Any]) -> None:
        """An operation is complete when `future` is. Some backends have no futures for some operations."""

    def named(self, rank: int, world_size: int) -> None:
        """A call is looking up the rank of the world that its caller has named, or is refused by raising here."""

    def destroyed(self, group: OwnGroup, place: Place | None) -> None:
        """The program destroys a group, at this line."""

    def wrapped(self, model: Any) -> None:
        """A model has been wrapped in DDP."""

    def unwrapped(self, model: Any) -> None:
        """A model wrapped in DDP is being deleted."""

    def forward(self, model: Any) -> None:
        """A model wrapped in DDP is about to run forward."""


class Log:
    """The last calls of this process, and for each event the methods of the subscribers that want to be told of it."""

    before: tuple[Callable[[Op], None], ...]
    issued: tuple[Callable[[Op, Sequence[torch.Tensor]], None], ...]
    withdrawn: tuple[Callable[[Op], None], ...]
    waits: tuple[Callable[[Op], None], ...]
    waited: tuple[Callable[[Op, Callable[[], int] | None], None], ...]
    dropped: tuple[Callable[[Op], None], ...]
    left: tuple[Callable[[Op], None], ...]
    follows: tuple[Callable[[Op], bool], ...]
    completes: tuple[Callable[[Op, torch.futures.Future[Any]], None], ...]
    named: tuple[Callable[[int, int], None], ...]
    destroyed: tuple[Callable[[OwnGroup, Place | None], None], ...]
    wrapped: tuple[Callable[[Any], None], ...]
    unwrapped: tuple[Callable[[Any], None], ...]
    forward: tuple[Callable[[Any], None], ...]

    def __init__(self) -> None:
        self.is_on = False
        self.models: WeakSet[Any] = WeakSet()  # in DDP
        self.ring: deque[Op] = deque(maxlen=LENGTH)
        self._serial = itertools.count(1)
        self._subscribers: list[Subscriber] = []
        self._sort()

    def subscribe(self, subscriber: Subscriber) -> None:
        if subscriber not in self._subscribers:
            self._subscribers.append(subscriber)
            self._sort()

    def unsubscribe(self, subscriber: Subscriber) -> None:
        self._subscribers.remove(subscriber)
        self._sort()

    def _sort(self) -> None:
        for event in Log.__annotations__:
            setattr(self, event, tuple(getattr(one, event) for one in self._subscribers
                                       if getattr(type(one), event) is not getattr(Subscriber, event)))

    def write(self, op: Op, tensors: Sequence[torch.Tensor] | None = None) -> None:
        """Note a call, unless a subscriber refuses it; `tensors` is None if it is made of other calls."""
        for before in self.before:
            before(op)
        op.serial = next(self._serial)
        self.ring.append(op)
        if tensors is not None and self.issued:
            try:
                for issued in self.issued:
                    issued(op, tensors)
            except Exception:
                self.withdraw(op)
                raise

    def withdraw(self, op: Op) -> None:
        """Note that torch has refused a call."""
        op.withdrawn = True
        for withdrawn in self.withdrawn:
            withdrawn(op)


LOG = Log()
