"""L1: what is known of a run that hangs: each rank, its last calls, and which rank waits for which others."""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from book.waiting.doing import INSIDE, Doing
from book.waiting.history import History, Model


GIVEN = "# given"  # ends the first line of a lab's cell that is not the learner's: its lines are not theirs either


class Group(NamedTuple):
    """A process group: its name in torch, and its ranks in the world, in ascending order."""
    name: str
    ranks: tuple[int, ...]

    def __hash__(self) -> int:
        return hash(self.name)  # that of all ranks takes microseconds where there are a thousand


class CollectiveCall(NamedTuple):
    """A call of a collective, the `number`-th in its group, and the line it is at.

    `arguments` are as a reader sees them, "float32 [4], SUM". `by` is the part of torch that
    made it, "DDP in backward".
    """
    number: int
    name: str  # "all_reduce"
    arguments: str = ""
    by: str = ""
    place: str = ""
    done: bool | None = None  # None where that is not known

    @property
    def what(self) -> str:
        """The call, and who made it: "all_reduce(float32 [4], SUM) of DDP in backward"."""
        return f"{self.name}({self.arguments})" + (f" of {self.by}" if self.by else "")

    @property
    def where(self) -> str:
        """The call with its line: "all_reduce(float32 [4], SUM) at cell line 3: dist.all_reduce(x)"."""
        return f"{self.what} at {self.place}" if self.place else self.what


class Dropped(NamedTuple):
    """A request that was deleted before the rank had waited for it: "isend" or "irecv", the peer, and the line."""
    call: str
    peer: int | None
    place: str


class Served(NamedTuple):
    """A call over RPC that a rank runs for a peer: what it is doing, and the line where it is."""
    doing: Doing
    place: str


class Worker(NamedTuple):
    """A rank as a worker of RPC: its name, how many calls it can run at once, and those that it runs."""
    name: str
    num_threads: int
    calls: tuple[Served, ...] = ()


class Thread(NamedTuple):
    """A thread that the learner's code has started: what it is doing, where, and whether with other ranks."""
    name: str
    doing: Doing
    place: str
    communicates: bool = False


class Child(NamedTuple):
    """A process that a rank has started: "worker process 0" of a DataLoader, what it is doing, and where."""
    name: str
    doing: Doing
    place: str


class Standing(NamedTuple):
    """What a rank is doing, and where; what it has left undone."""
    main: Doing  # what its main thread is doing, or how the rank has ended
    place: str = ""
    threads: Sequence[Thread] | None = None  # its others, if the main thread waits for none of the other ranks
    worker: Worker | None = None
    polled: bool = False  # whether a message has come for a request that this rank did not keep
    dropped: Sequence[Dropped] = ()
    sent: Sequence[tuple[int, str]] = ()  # isends that it has not waited for: the peer, and the line
    messages: Mapping[tuple[str, int], int] = {}  # how many it has sent to, or received from, each rank: ("send", 1)
    children: Sequence[Child] = ()
    left_out: Sequence[str] = ()  # parameters under DDP that have no gradient
    destroyed: Mapping[Group, str] = {}  # groups, and the line that has destroyed each
    calls: Mapping[Group, History] = {}  # those that it has made in each group
    models: Sequence[Model] = ()  # those in DDP, in the order in which they were wrapped

    @property
    def doing(self) -> Doing:
        """What matters to other ranks: what the one thread that communicates is doing, if the main thread does not."""
        with_others = [thread.doing for thread in self.threads or () if thread.communicates]
        return with_others[0] if len(with_others) == 1 else self.main


class Missing(NamedTuple):
    """A collective that some ranks of a group wait in, and others have not called."""
    group: Group
    waiting: list[int]
    behind: list[int]
    last: Mapping[int, CollectiveCall]  # the last call in the group of each of its ranks that has made one

    @property
    def what(self) -> str:
        """The call that has been missed."""
        return self.last[self.waiting[0]].what


@dataclass(frozen=True)
class Hang:
    """The ranks of a run that hangs, and for each group the last call of each of its ranks that has made one."""
    ranks: Sequence[Standing]
    calls: Mapping[Group, Mapping[int, CollectiveCall]]

    @cached_property
    def missing(self) -> list[Missing]:
        """The collectives that some ranks wait in and others have not called.

        Where it is not known which calls are done, ranks wait in the last one of their group.
        """
        found = []
        for group, last in self.calls.items():
            latest = max(call.number for call in last.values())
            open_calls = {rank: call.number for rank, call in last.items()
                          if (call.number == latest if call.done is None else not call.done)}
            stuck = {rank: number for rank, number in open_calls.items() if self._may_wait_in(rank, last[rank])}
            for number in sorted(set(stuck.values())):
                waiting = [rank for rank in group.ranks if stuck.get(rank) == number]
                behind = [rank for rank in group.ranks if rank not in last or last[rank].number < number]
                found += [Missing(group, waiting, behind, last)] if behind else []
        return found

    def _may_wait_in(self, rank: int, call: CollectiveCall) -> bool:
        """Whether a rank may wait in this call: it does not wait for a message, in its own process or in another call.
        """
        doing = self.ranks[rank].doing
        elsewhere = {other.name for last in self.calls.values() for other in [last.get(rank)] if other} - {call.name}
        return doing.waits and doing.message is None and doing.kind not in INSIDE and doing.operation not in elsewhere

    def callee(self, rank: int) -> int | None:
        """The rank whose worker a rank waits for; None if it waits for no call over RPC."""
        name = self.ranks[rank].doing.worker
        return next((other for other, standing in enumerate(self.ranks)
                     if name and standing.worker and standing.worker.name == name), None)

    @cached_property
    def waits(self) -> dict[int, tuple[int, ...]]:
        """For each rank that waits, the ranks that it waits for.

        A rank in a collective waits for those that have not called it, one in a send, a receive or a call for its peer.
        """
        found: dict[int, set[int]] = {}
        for one in self.missing:
            for rank in one.waiting:
                found.setdefault(rank, set()).update(one.behind)
        for rank, standing in enumerate(self.ranks):
            peer = standing.doing.message[1] if standing.doing.message else self.callee(rank)
            if peer is not None and 0 <= peer < len(self.ranks):
                found[rank] = {peer}
        return {rank: tuple(sorted(others)) for rank, others in sorted(found.items())}

    @property
    def awaited(self) -> set[int]:
        """The ranks that others wait for and that wait for nobody."""
        return {rank for others in self.waits.values() for rank in others if not self.ranks[rank].doing.waits}
