"""A second simulator of collectives, as plain as can be: `book.simulate.simulate` is compared with it.

It keeps a heap of what will end when, and looks at every message anew after each of these ends.
"""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from heapq import heappop, heappush

from book.cost import Link
from book.schedule import Move

Message = tuple[int, int, int]  # step, src, dst: moves that have these in common travel together


class Played:
    """When each message of `moves`, which are in the order of their steps, leaves, has arrived and is done.

    A message that has something to add is done when that is added. `links` holds what differs from `link`.
    """

    def __init__(self, moves: Sequence[Move], chunk_bytes: float, link: Link, links: Mapping[tuple[int, int], Link],
                 slowdown: Mapping[int, float]) -> None:
        self.messages: dict[Message, list[Move]] = {}
        for move in moves:
            self.messages.setdefault((move.step, move.src, move.dst), []).append(move)
        self.chunk_bytes, self.link, self.links, self.slowdown = chunk_bytes, link, links, slowdown
        self.left_s: dict[Message, float] = {}
        self.arrived_s: dict[Message, float] = {}
        self.done_s: dict[Message, float] = {}
        self.added_by: dict[int, Message] = {}  # what a rank adds now
        self.ends: list[tuple[float, str, Message]] = []
        self.start(0.0)
        while self.ends:
            now_s, what, message = heappop(self.ends)
            self.end(now_s, what, message)
            self.start(now_s)

    def start(self, now_s: float) -> None:
        """Let every message leave that may, and every rank that adds nothing begin with what came first."""
        for message, moves in self.messages.items():
            _, src, dst = message
            link = self.links.get((src, dst), self.link)
            if message not in self.left_s and self.may_leave(message):
                self.left_s[message] = now_s
                alone_s = link.latency_s + len(moves) * self.chunk_bytes / link.bandwidth_bytes_per_s
                slower = max(self.slowdown.get(src, 1), self.slowdown.get(dst, 1))
                heappush(self.ends, (now_s + slower * alone_s, "arrives", message))
            elif message in self.arrived_s and message not in self.done_s and dst not in self.added_by:
                self.added_by[dst] = message
                added_bytes = sum(self.chunk_bytes for move in moves if move.op == "reduce")
                addition_s = added_bytes * link.reduce_s_per_byte * self.slowdown.get(dst, 1)
                heappush(self.ends, (now_s + addition_s, "is added", message))

    def end(self, now_s: float, what: str, message: Message) -> None:
        """Note that a message has arrived, or is added."""
        if what == "is added":
            del self.added_by[message[2]]
            self.done_s[message] = now_s
            return
        self.arrived_s[message] = now_s
        if all(move.op == "copy" for move in self.messages[message]):
            self.done_s[message] = now_s

    def may_leave(self, message: Message) -> bool:
        """Whether its sender has done its earlier steps, and all that comes first on both directions has arrived."""
        step, src, dst = message
        for other in self.messages:
            if other == message:
                return True
            other_step, other_src, other_dst = other
            if (other_src == src or other_dst == dst) and other not in self.arrived_s:
                return False
            if other_dst == src and other_step < step and other not in self.done_s:
                return False
        raise KeyError(message)
