"""L2: the log of a process's calls to torch.distributed, and those who read it while it is written.

Any thread may write. The log has no lock: a call gets its number from a counter and joins the ring in one step each.
"""
from __future__ import annotations

import itertools
import operator
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import torch

LENGTH = 1024  # calls that the ring keeps
NOBODY = -1  # the peer or the root of a call that names a rank which its group does not have

Place = tuple[str, int]  # file and line number


class Group(NamedTuple):
    """A process group: its name, its members' ranks in the world, its backends ("cpu:gloo,cuda:nccl"), the own rank."""
    name: str
    ranks: tuple[int, ...]
    backend: str
    rank: int  # in the world


class Described(NamedTuple):
    """A tensor without its values."""
    dtype: torch.dtype
    shape: torch.Size


@dataclass(slots=True, eq=False)
class Form:
    """What a line's calls have in common as long as their tensors are alike, so that it is found out only once.

    `kind` is "send", "recv" or a collective ("all_reduce", "all_gather_object", "new_group"), and `function` the
    outermost function of torch.distributed that Python called for it; None if C++ called the group itself, as DDP does.
    `lines` are the learner's that have led to it, innermost first; of a message, only the first of them is known.
    `owner` is the part of torch that made it for the program, such as "DDP" or "FSDP"; None if the program did itself.
    `peer` and `root` are ranks of the world. `tensors` are those that must be alike on all ranks. `inside` a collective
    of objects, a call is a part of that one. `splits` are the sizes of an all-to-all's parts, of its output and of its
    input; empty where all are equal. Who calls a function that `is_sync` has waited for it when it returns. Tensors are
    known to be contiguous if `is_plain`, and may have a graph for a backward if it `has_graph`.
    """
    kind: str
    function: str | None
    group: Group
    place: Place | None
    owner: str | None = None
    in_backward: bool = False
    lines: tuple[Place, ...] = ()
    peer: int | None = None
    tag: int = 0
    tensors: tuple[Described, ...] = ()
    num_bytes: int = 0  # of a collective, those of its larger side
    root: int | None = None
    reduces: str | None = None  # "SUM"
    splits: tuple[Sequence[int], Sequence[int]] = ((), ())
    members: tuple[int, ...] = ()
    inside: bool = False
    is_sync: bool = False
    is_plain: bool = False
    has_graph: bool = True
    told: Told = field(default_factory=lambda: _nobody())


def _of_form(name: str) -> Any:
    return property(operator.attrgetter(f"form.{name}"))


class Op:
    """One call: what its form says of it, and what is its own.

    `number` counts the collectives in the group, or its sends and receives, from 1, `serial` all calls of the process.
    `waited` says whether the program knows that it is done, `withdrawn` that torch has refused it: then it counts as
    never made. `polled_s` is when the program last asked whether it is done, by time.monotonic().
    """
    __slots__ = ("form", "number", "polled_s", "serial", "waited", "withdrawn")

    def __init__(self, form: Form, number: int) -> None:
        self.form, self.number, self.serial = form, number, 0
        self.waited, self.withdrawn, self.polled_s = False, False, 0.0

    kind: str = _of_form("kind")
    function: str | None = _of_form("function")
    group: Group = _of_form("group")
    place: Place | None = _of_form("place")
    owner: str | None = _of_form("owner")
    in_backward: bool = _of_form("in_backward")
    peer: int | None = _of_form("peer")
    tag: int = _of_form("tag")
    tensors: tuple[Described, ...] = _of_form("tensors")
    num_bytes: int = _of_form("num_bytes")
    root: int | None = _of_form("root")
    reduces: str | None = _of_form("reduces")
    splits: tuple[Sequence[int], Sequence[int]] = _of_form("splits")
    members: tuple[int, ...] = _of_form("members")
    inside: bool = _of_form("inside")

    @property
    def is_message(self) -> bool:
        """Whether it is a send or a receive."""
        return self.form.kind in ("send", "recv")

    @property
    def has_splits(self) -> bool:
        """Whether an all-to-all names the sizes of parts."""
        return any(self.form.splits)


class Subscriber:
    """What is told of calls, by any thread; it overrides what it wants to know, and the rest costs nothing.

        class Printed(Subscriber):
            def before(self, op):
                print(op.kind, op.group.name, op.place)

        tap.start()
        tap.subscribe(Printed())
    """

    def told_of(self, op: Op) -> Subscriber | None:
        """Who is told in its place of calls of this form; None if nobody needs to be. Asked before the first of them.
        """
        return self

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

    def wrapped(self, model: Any) -> None:
        """A model has been wrapped in DDP."""

    def unwrapped(self, model: Any) -> None:
        """A model wrapped in DDP is being deleted."""

    def forward(self, model: Any) -> None:
        """A model wrapped in DDP is about to run forward."""


def _methods(event: str, of: Sequence[Subscriber]) -> tuple[Any, ...]:
    """The methods of those that want to be told of an event."""
    return tuple([getattr(one, event) for one in of if getattr(type(one), event) is not getattr(Subscriber, event)])


class Told:
    """Who is told of the calls of one form, `by` the subscribers that there were when that was found out."""

    before: tuple[Callable[[Op], None], ...]
    issued: tuple[Callable[[Op, Sequence[torch.Tensor]], None], ...]
    withdrawn: tuple[Callable[[Op], None], ...]
    waits: tuple[Callable[[Op], None], ...]
    waited: tuple[Callable[[Op, Callable[[], int] | None], None], ...]
    dropped: tuple[Callable[[Op], None], ...]
    left: tuple[Callable[[Op], None], ...]
    follows: tuple[Callable[[Op], bool], ...]
    completes: tuple[Callable[[Op, torch.futures.Future[Any]], None], ...]
    __slots__ = (*__annotations__, "by")

    def __init__(self, by: tuple[Subscriber, ...] | None, of: Sequence[Subscriber]) -> None:
        self.by = by
        for event in Told.__annotations__:
            setattr(self, event, _methods(event, of))


_NOBODY = Told(None, ())


def _nobody() -> Told:
    return _NOBODY


class Log:
    """The last calls of this process, its subscribers, and the methods of those that want to be told of other things.
    """

    named: tuple[Callable[[int, int], None], ...]
    wrapped: tuple[Callable[[Any], None], ...]
    unwrapped: tuple[Callable[[Any], None], ...]
    forward: tuple[Callable[[Any], None], ...]

    def __init__(self) -> None:
        self.is_on = False
        self.has_models = False  # in DDP; once there was one
        self.ring: deque[Op] = deque(maxlen=LENGTH)
        self.subscribers: tuple[Subscriber, ...] = ()
        self._serial = itertools.count(1)
        self._sort(())

    def subscribe(self, subscriber: Subscriber) -> None:
        if subscriber not in self.subscribers:
            self._sort((*self.subscribers, subscriber))

    def unsubscribe(self, subscriber: Subscriber) -> None:
        self._sort(tuple(each for each in self.subscribers if each is not subscriber))

    def _sort(self, subscribers: tuple[Subscriber, ...]) -> None:
        self.subscribers = subscribers
        for event in Log.__annotations__:
            setattr(self, event, _methods(event, subscribers))

    def ask_again(self) -> None:
        """Find out anew who is told of which calls."""
        self._sort(tuple(self.subscribers))

    def told_of(self, op: Op) -> Told:
        """Who is told of a call."""
        told = op.form.told
        if told.by is not self.subscribers:
            by = self.subscribers
            of = [one.told_of(op) for one in by]
            told = op.form.told = Told(by, [one for one in of if one is not None])
        return told

    def write(self, op: Op, tensors: Sequence[torch.Tensor] | None = None) -> None:
        """Note a call, unless a subscriber refuses it; `tensors` is None if it is made of other calls."""
        told = self.told_of(op)
        for before in told.before:
            before(op)
        op.serial = next(self._serial)
        self.ring.append(op)
        if tensors is not None and told.issued:
            try:
                for issued in told.issued:
                    issued(op, tensors)
            except Exception:
                self.withdraw(op)
                raise

    def withdraw(self, op: Op) -> None:
        """Note that torch has refused a call."""
        op.withdrawn = True
        for withdrawn in self.told_of(op).withdrawn:
            withdrawn(op)


LOG = Log()
