"""L2: forwards what ranks send one another, records who sent how much to whom, detects when nothing moves."""
from __future__ import annotations

import itertools
import json
import selectors
import socket
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from book.wire.frames import ANY, BARRIER, DONE, FAIL, READY, RECV, RESULT, SEND, TASK, Frame, Unpacker, packed

MAX_MESSAGES = 100_000
MAX_WAITING, MAX_WAITING_BYTES = 10_000, 256 << 20  # unmatched frames; bytes unmatched or not yet read by a rank
Pair = tuple[int, int]
Queues = dict[Pair, deque[tuple[int, Frame]]]


class WireError(RuntimeError):
    """A run over the broker that failed; the message is one sentence about what the ranks did."""


class WireTimeout(WireError):
    """Nothing moved, or not fast enough, or a rank's process ended: the machine may be to blame."""


@dataclass
class WireRun:
    """What the ranks returned, and all their messages (src, dst, bytes) in the order in which they were delivered."""
    results: dict[int, bytes] = field(default_factory=dict)
    messages: list[tuple[int, int, int]] = field(default_factory=list)


class _Rank:
    """The broker's end of one rank's socket."""

    def __init__(self, number: int, connection: socket.socket) -> None:
        self.number, self.connection = number, connection
        connection.setblocking(False)
        self.unpacker, self.outgoing, self.ready = Unpacker(), bytearray(), False

    def queue(self, frame: Frame) -> None:
        """Queues a frame; it goes out when the rank reads."""
        self.outgoing += packed(frame)

    def write(self) -> None:
        try:
            del self.outgoing[:self.connection.send(self.outgoing)]
        except BlockingIOError:
            pass


class Broker:
    """Forwards messages between ranks, each on a connected socket; socket i belongs to rank i.

    A send completes when its receiver has received it, as with gloo: if all ranks send before they receive, they hang.
    """

    def __init__(self, connections: Sequence[socket.socket]) -> None:
        self.ranks = [_Rank(number, connection) for number, connection in enumerate(connections)]
        self.selector = selectors.DefaultSelector()
        for rank in self.ranks:
            self.selector.register(rank.connection, selectors.EVENT_READ, rank)

    def start(self, sources: Sequence[str], timeout_s: float) -> None:
        """Runs `sources` on every rank: they define what later tasks call. Raises WireError if a rank fails."""
        self._begin(len(self.ranks))
        for rank in self.ranks:
            rank.queue(Frame(TASK, payload=json.dumps({"sources": list(sources)}).encode() + b"\n"))
        self._serve(timeout_s, timeout_s, lambda: all(rank.ready for rank in self.ranks))

    def run(self, tasks: Sequence[Mapping[str, Any]], inputs: Sequence[bytes], timeout_s: float,
            hang_s: float) -> WireRun:
        """Gives each of the first ranks a task with its input, and forwards their messages until all have a result.

        Raises WireError if a rank fails, sizes don't match, nothing has moved for `hang_s` seconds, or `timeout_s`
        seconds have passed.
        """
        self._begin(len(tasks))
        for rank, task, data in zip(self.ranks, tasks, inputs):
            rank.queue(Frame(TASK, payload=json.dumps(dict(task)).encode() + b"\n" + data))
        self._serve(timeout_s, hang_s, lambda: len(self.done.results) == self.world_size)
        left = sum(map(len, [*self.sends.values(), *self.recvs.values()]))
        if left:
            raise WireError("a rank returned before its transfers were done: wait for every request")
        return self.done

    def _begin(self, world_size: int) -> None:
        self.world_size, self.done = world_size, WireRun()
        # By (source, destination), with the number in which they arrived. The source of a receive may be ANY.
        self.sends: Queues = {}
        self.recvs: Queues = {}
        self.arrivals = itertools.count()
        self.at_barrier: dict[int, Frame] = {}
        self.num_waiting = self.waiting_bytes = 0
        self.moved_at = time.monotonic()

    def _serve(self, timeout_s: float, hang_s: float, finished: Any) -> None:
        ends = time.monotonic() + timeout_s
        while not finished():
            for rank in self.ranks:
                events = selectors.EVENT_READ | (selectors.EVENT_WRITE if rank.outgoing else 0)
                self.selector.modify(rank.connection, events, rank)
            for key, events in self.selector.select(timeout=0.1):
                self._attend(key.data, events)
            now = time.monotonic()
            if now - self.moved_at > hang_s:
                raise WireTimeout(f"the ranks wait for one another: {self._waiting()}")
            if now > ends:
                raise WireTimeout("the ranks were not done in time")

    def _attend(self, rank: _Rank, events: int) -> None:
        try:
            if events & selectors.EVENT_WRITE:
                rank.write()
            data = rank.connection.recv(1 << 20) if events & selectors.EVENT_READ else None
        except OSError:  # broken pipe or connection reset
            data = b""
        if data is None:
            return
        if not data:
            raise WireTimeout(f"rank {rank.number} ended before it had a result")
        try:
            frames = rank.unpacker.feed(data)
        except ValueError as error:
            raise WireError(str(error)) from None
        for frame in frames:
            self.moved_at = time.monotonic()
            self._take(rank, frame)

    def _take(self, rank: _Rank, frame: Frame) -> None:
        if frame.kind == READY:
            rank.ready = True
        elif rank.number >= self.world_size:
            raise WireError(f"rank {rank.number} is not part of this run but sent a message")
        elif frame.kind == FAIL:
            raise WireError(f"rank {rank.number} failed: {frame.payload.decode('utf-8', 'replace')[:500]}")
        elif frame.kind == RESULT:
            self.done.results.setdefault(rank.number, frame.payload)
        elif frame.kind == BARRIER:
            self._reach_barrier(rank, frame)
        elif frame.kind == SEND and self._is_peer(rank, frame.peer):
            self._wait_in(self.sends, (rank.number, frame.peer), frame)
        elif frame.kind == RECV and (frame.peer == ANY or self._is_peer(rank, frame.peer)):
            self._wait_in(self.recvs, (frame.peer, rank.number), frame)
        else:
            raise WireError(f"rank {rank.number} can't send to or receive from rank {frame.peer}")

    def _is_peer(self, rank: _Rank, peer: int) -> bool:
        return peer < self.world_size and peer != rank.number

    def _wait_in(self, queues: Queues, pair: Pair, frame: Frame) -> None:
        """Queues a send or receive, and forwards a message to its destination if one can go now."""
        queues.setdefault(pair, deque()).append((next(self.arrivals), frame))
        self._count(1, len(frame.payload))
        self._forward(*pair)

    def _reach_barrier(self, rank: _Rank, frame: Frame) -> None:
        """Releases the barrier once all ranks have reached it."""
        if rank.number in self.at_barrier:
            raise WireError(f"rank {rank.number} reaches a barrier while it waits at one")
        self.at_barrier[rank.number] = frame
        if len(self.at_barrier) == self.world_size:
            for number, waiting in self.at_barrier.items():
                self.ranks[number].queue(Frame(DONE, request=waiting.request))
            self.at_barrier = {}

    def _count(self, num_frames: int, num_bytes: int) -> None:
        """Updates the totals of unmatched frames; raises WireError if too much is waiting, unread bytes included."""
        self.num_waiting += num_frames
        self.waiting_bytes += num_bytes
        unread = sum(len(rank.outgoing) for rank in self.ranks)
        if self.num_waiting > MAX_WAITING or self.waiting_bytes + unread > MAX_WAITING_BYTES:
            raise WireError("the ranks send far more than the task needs")

    def _forward(self, src: int, dst: int) -> None:
        """Matches a waiting send from `src` to `dst` with a waiting receive, if there are both: the first to arrive.

        `src` ANY stands for a receive from any rank that has just arrived.
        """
        pair = _first(self.sends, [(source, dst) for source in (range(self.world_size) if src == ANY else [src])])
        asked = _first(self.recvs, [(src, dst), (ANY, dst)])
        if pair is None or asked is None:
            return
        src, _ = pair
        send, recv = self.sends[pair].popleft()[1], self.recvs[asked].popleft()[1]
        self._count(-2, -len(send.payload))
        if len(send.payload) != recv.expects:
            raise WireError(f"rank {src} sends {len(send.payload)} bytes where rank {dst} receives {recv.expects}")
        self.done.messages.append((src, dst, len(send.payload)))
        if len(self.done.messages) > MAX_MESSAGES:
            raise WireError("the ranks send far more messages than the task needs")
        self.ranks[src].queue(Frame(DONE, request=send.request))
        self.ranks[dst].queue(Frame(DONE, src, recv.request, send.payload))

    def _waiting(self) -> str:
        told = [f"rank {src} sends to rank {dst}" for (src, dst), queue in self.sends.items() if queue]
        told += [f"rank {dst} receives from {'any rank' if src == ANY else f'rank {src}'}"
                 for (src, dst), queue in self.recvs.items() if queue]
        told += [f"rank {number} is at a barrier" for number in self.at_barrier]
        return ", ".join(told) or "no rank sends or receives"


def _first(queues: Queues, pairs: Iterable[Pair]) -> Pair | None:
    """The pair that has waited longest; None if nothing waits in these queues."""
    return min((pair for pair in pairs if queues.get(pair)), key=lambda pair: queues[pair][0][0], default=None)
