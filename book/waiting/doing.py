"""L1: what a thread or a rank is doing, as a fact, and the words for it: "waits in recv from rank 1", "sleeps"."""
from __future__ import annotations

from enum import Enum, auto
from typing import NamedTuple

from book.words import agree, listed, plural

ANY = -1  # the peer of a receive that takes a message from any rank


class Kind(Enum):
    """The ways to be: waiting for other ranks, waiting inside the process, not waiting."""
    CALL = auto()  # waits in an operation that needs other ranks, or in backward, item() and the like
    POLLS = auto()  # asks again and again whether such a request is done
    REQUEST = auto()  # waits for what isend, irecv or an asynchronous collective returned
    KEYS = auto()  # waits for keys of the store
    LOCK = auto()
    ITEM = auto()  # waits for an item of a queue
    ROOM = auto()  # waits for room in a queue
    EVENT = auto()
    CONDITION = auto()
    BARRIER = auto()  # of threads
    FUTURE = auto()  # waits for what a pool computes
    TASKS = auto()  # waits in Queue.join()
    JOIN = auto()  # waits for a thread to end
    OTHER = auto()  # waits in some other call inside the process
    IN_C = auto()  # waits in C code that keeps the interpreter
    COMPUTES = auto()
    SLEEPS = auto()
    IDLE = auto()  # uses no CPU time, it is not known why
    UNKNOWN = auto()
    SILENT = auto()  # answers, but can't say where it is
    DEAF = auto()  # does not answer
    STOPPED = auto()
    RETURNED = auto()  # its function has; the result is not here yet
    FINISHED = auto()


# Verb and rest of what a kind without an operation is called.
_WORDS = {
    Kind.REQUEST: ("waits", "for a request"),
    Kind.POLLS: ("polls", "a request"),
    Kind.LOCK: ("waits", "for a lock"),
    Kind.IN_C: ("waits", "in C code that holds the interpreter lock"),
    Kind.COMPUTES: ("computes", ""),
    Kind.SLEEPS: ("sleeps", ""),
    Kind.IDLE: ("does", "not use any CPU time"),
    Kind.UNKNOWN: ("is", ""),
    Kind.SILENT: ("does", "not say where it is"),
    Kind.DEAF: ("does", "not answer"),
    Kind.STOPPED: ("is", "stopped by a signal (SIGSTOP)"),
    Kind.RETURNED: ("has", "returned, and its result is on its way"),
    Kind.FINISHED: ("finished", ""),
}
# Waits for something in the rank's own process, or in the store: not in a call that other ranks make too.
INSIDE = {Kind.KEYS, Kind.LOCK, Kind.ITEM, Kind.ROOM, Kind.EVENT, Kind.CONDITION, Kind.BARRIER, Kind.FUTURE, Kind.TASKS,
          Kind.JOIN}
_OF_SEVERAL = {Kind.SILENT: "not say where they are", Kind.RETURNED: "returned, and their results are on their way"}
_DO_NOT_WAIT = {Kind.COMPUTES, Kind.SLEEPS, Kind.IDLE, Kind.UNKNOWN, Kind.SILENT, Kind.DEAF, Kind.STOPPED,
                Kind.RETURNED, Kind.FINISHED}


class Doing(NamedTuple):
    """What a thread is doing: in which operation it waits, if it waits, and for whom."""
    kind: Kind
    operation: str = ""  # what it waits in, or what made its request: "recv", "Queue.get()", "DataLoader"
    peer: int | None = None  # the other side's rank in the world, or ANY; None if there is none or it is not known
    side: str = ""  # what the peer is: "src" or "dst"
    worker: str = ""  # the name of the worker that a call over RPC went to
    keys: tuple[str, ...] = ()  # of the store

    @property
    def waits(self) -> bool:
        """Whether it waits for somebody else."""
        return self.kind not in _DO_NOT_WAIT

    @property
    def returned(self) -> bool:
        """Whether the rank's function has returned."""
        return self.kind in (Kind.RETURNED, Kind.FINISHED)

    @property
    def message(self) -> tuple[str, int] | None:
        """The send or receive that it waits in, and with which rank: ("recv", 1); None if it waits in neither."""
        verb, peer = self.operation.removeprefix("i"), self.peer
        return (verb, peer) if verb in ("send", "recv") and peer is not None and peer != ANY else None

    @property
    def rest(self) -> str:
        """What comes after "waits", or after "waited 2 s": "in recv from rank 1"."""
        return self._verb_and_rest("its")[1]

    def words(self, num: int = 1) -> str:
        """What one rank does, or `num` ranks do: "waits in recv from rank 1", "wait in recv from rank 1"."""
        verb, rest = self._verb_and_rest("its" if num == 1 else "their")
        return " ".join(filter(None, (agree(verb, num), rest if num == 1 else _OF_SEVERAL.get(self.kind, rest))))

    def _verb_and_rest(self, whose: str) -> tuple[str, str]:
        if self.kind is Kind.KEYS:
            return "waits", f"for the {plural('key', len(self.keys))} {listed(map(repr, self.keys))} of the store"
        if not self.operation:
            return _WORDS[self.kind]
        if self.kind is Kind.POLLS:
            return "polls", f"{whose} {self.operation}{self._with_whom()}"
        how = f"for {whose}" if self.kind is Kind.REQUEST else "in"
        return "waits", f"{how} {self.operation}{self._with_whom()}"

    def _with_whom(self) -> str:
        """" from rank 1", " to worker0", " from any rank", or "" for an operation without a peer."""
        if self.worker:
            return f" to {self.worker}"
        if self.peer is None:
            return ""
        return " from any rank" if self.peer == ANY else f" {'from' if self.side == 'src' else 'to'} rank {self.peer}"
