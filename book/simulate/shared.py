"""L2: messages that share network cards, worked out event by event.

The rules are those of `collective`: a rank's port carries one message at a time each way, in the order of the schedule,
and a rank starts a step when its own earlier steps are done and its input has arrived. What differs is the pace of a
message. Those that pass through a card at the same time share it fairly: no message could be faster without making one
slower that is not faster than itself (max-min fairness, bertsekas1992). So the pace of all that is under way changes
whenever a message begins or ends. Arrays: M messages, C cards.
"""
from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from heapq import heappop, heappush

import numpy as np

from book.cost import Network
from book.cost.network import SWITCH
from book.schedule import Round
from book.simulate.messages import StepMessages

NEARLY = 1 + 1e-9  # times and paces that differ by less are equal


def run_shared(messages: Iterable[StepMessages], num_moves: int, network: Network, slowdown: np.ndarray) -> np.ndarray:
    """When each move leaves, has arrived, and has been added: seconds, shape (3, moves).

    `messages` are those of the schedule's steps; `slowdown` is each rank's factor on its times, shape (R,).
    """
    order = _Order()
    place = np.zeros(num_moves, dtype=int)
    for step in messages:
        place[step.moves] = len(order.messages) + step.message
        order.add(*step[:4], network.crossing(step.src, step.dst), np.ones(len(step.src), dtype=int))
    run = _Run(order.messages, network, slowdown)
    run.to_the_end()
    return run.times[:, place]


def run_shared_rounds(rounds: Iterable[tuple[Round, np.ndarray, np.ndarray]], chunk_bytes: float, network: Network,
                      slowdown: np.ndarray) -> np.ndarray:
    """When each rank has done its part of these rounds: seconds, shape (R,).

    With each round, (M,) each: which messages go to another node, and how many messages of other ranks each stands for,
    itself included, where one rank stands for several.
    """
    order = _Order()
    for one, crosses, num_alike in rounds:
        for _ in range(one.num_steps):
            order.add(one.src, one.dst, one.num_chunks * chunk_bytes, one.num_added * chunk_bytes, crosses, num_alike)
    run = _Run(order.messages, network, slowdown)
    run.to_the_end()
    done = np.zeros(len(slowdown))
    for row, ranks in ((1, [one.src for one in order.messages]), (2, [one.dst for one in order.messages])):
        np.maximum.at(done, ranks, run.times[row])
    return done


@dataclass
class _Message:
    """What one rank sends another in one step, and the numbers of the messages that wait for it."""

    src: int
    dst: int
    num_bytes: float
    added_bytes: float
    crosses: bool
    num_alike: int
    num_awaited: int = 0  # how many messages it still waits for
    then: list[int] = field(default_factory=list)  # these wait until it has arrived
    then_added: list[int] = field(default_factory=list)  # these wait until it has been added


class _Order:
    """All messages of a schedule, in its order, with what waits for what."""

    def __init__(self) -> None:
        self.messages: list[_Message] = []
        self._last: dict[tuple[str, int], int] = {}  # the last message through each rank's port, each way
        self._received: dict[int, list[int]] = defaultdict(list)  # what a rank was sent since it last sent something

    def add(self, *columns: np.ndarray) -> None:
        """Add the messages of the next step: the first six fields of each, (M,)."""
        first = len(self.messages)
        self.messages += [_Message(*fields) for fields in zip(*(column.tolist() for column in columns))]
        for number, message in enumerate(self.messages[first:], first):
            for port in (("out", message.src), ("in", message.dst)):
                if port in self._last:
                    self._wait(number, self.messages[self._last[port]].then)
                self._last[port] = number
            for earlier in self._received.pop(message.src, ()):
                self._wait(number, self.messages[earlier].then_added)
        for number, message in enumerate(self.messages[first:], first):
            self._received[message.dst].append(number)

    def _wait(self, number: int, waiting: list[int]) -> None:
        self.messages[number].num_awaited += 1
        waiting.append(number)


class _Run:
    """The clock, what is under way, and when each message left, has arrived and has been added, (3, M)."""

    def __init__(self, messages: list[_Message], network: Network, slowdown: np.ndarray) -> None:
        src, dst = np.array([[one.src, one.dst] for one in messages], dtype=int).reshape(-1, 2).T
        self.messages, self.now_s, self.times = messages, 0.0, np.zeros((3, len(messages)))
        crosses = np.array([one.crosses for one in messages], dtype=bool)
        self.links = [network.across if one.crosses else network.inside for one in messages]
        self.factor, self.factor_adding = np.maximum(slowdown[src], slowdown[dst]), slowdown[dst]
        self.most = np.array([link.bandwidth_bytes_per_s for link in self.links]) / self.factor
        self.routes, self.capacity = network.routes(src, dst, crosses)
        self.num_alike = np.array([one.num_alike for one in messages], dtype=int)
        self.left_bytes = np.array([one.num_bytes for one in messages])
        self.moving, self.pace = np.zeros(0, dtype=int), np.zeros(0)  # what is on its way, and its bytes per second
        self.due: list[tuple[float, int, bool]] = []  # when a latency is over, or (True) an addition
        self.free_s: dict[int, float] = defaultdict(float)  # when a rank will have added all that has arrived

    def to_the_end(self) -> None:
        """Advance until nothing is under way."""
        self._leave(number for number, one in enumerate(self.messages) if not one.num_awaited)
        while self.due or len(self.moving):
            self._go_on()

    def _go_on(self) -> None:
        """Advance to whatever ends next; messages that waited for nothing else then leave."""
        ends_s = self.now_s + self.left_bytes[self.moving] / self.pace
        next_s = min(self.due[0][0] if self.due else np.inf, ends_s.min(initial=np.inf))
        self.left_bytes[self.moving] -= self.pace * (next_s - self.now_s)
        there = ends_s <= next_s * NEARLY
        arrived, moving, ended = self.moving[there].tolist(), self.moving[~there].tolist(), []
        self.now_s = next_s
        while self.due and self.due[0][0] <= next_s * NEARLY:
            _, number, is_added = heappop(self.due)
            if is_added:
                ended += self.messages[number].then_added
            else:
                (moving if self.left_bytes[number] > 0 else arrived).append(number)
        for number in sorted(arrived):
            ended += self._arrive(number)
        if moving != self.moving.tolist():
            self.moving = np.array(moving, dtype=int)
            self.pace = fair(self.routes[self.moving], self.capacity, self.most[self.moving],
                             self.num_alike[self.moving])
        self._leave(number for number in ended if self._is_free(number))

    def _is_free(self, number: int) -> bool:
        """Whether this was the last message that another one has waited for."""
        self.messages[number].num_awaited -= 1
        return not self.messages[number].num_awaited

    def _leave(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            self.times[0, number] = self.now_s
            latency_s = self.links[number].latency_s * self.factor[number]
            heappush(self.due, (self.now_s + latency_s, number, False))

    def _arrive(self, number: int) -> list[int]:
        """Note that a message has arrived, and begin to add it; returns the messages that have waited for it."""
        one = self.messages[number]
        self.times[1:, number] = self.now_s
        if not one.added_bytes:
            return one.then + one.then_added
        adding_s = self.links[number].reduce_s(one.added_bytes) * self.factor_adding[number]
        self.free_s[one.dst] = self.times[2, number] = max(self.now_s, self.free_s[one.dst]) + adding_s
        heappush(self.due, (self.times[2, number], number, True))
        return one.then


def fair(routes: np.ndarray, capacity: np.ndarray, most: np.ndarray, num_alike: np.ndarray | int = 1) -> np.ndarray:
    """The bytes per second of messages, (M,), that pass `routes`, (M, 3), and can have `most` at best, (M,).

    `routes` are numbers into `capacity`, what each card can carry, (C,). Where a message stands for several of
    different nodes, `num_alike`, (M,), they meet in the switch only. Progressive filling: all messages get more until
    some have all they can, or share a card that is full; those stay there, the others go on (bertsekas1992).
    """
    pace, left, waiting = np.zeros(len(most)), capacity.copy(), np.ones(len(most), dtype=bool)
    weights = np.where(routes == SWITCH, np.reshape(num_alike, (-1, 1)), 1)
    while waiting.any():
        num_through = _load(routes[waiting], weights[waiting], len(capacity))
        share = np.divide(left, num_through, out=np.full(len(left), np.inf), where=num_through > 0)
        level = min(share.min(), most[waiting].min())
        stays = waiting & ((share[routes].min(axis=1) <= level * NEARLY) | (most <= level * NEARLY))
        pace[stays] = level
        left = left - level * _load(routes[stays], weights[stays], len(capacity))
        waiting &= ~stays
    return pace


def _load(routes: np.ndarray, weights: np.ndarray, num_cards: int) -> np.ndarray:
    """How many messages pass each card."""
    return np.bincount(routes.ravel(), weights.ravel(), minlength=num_cards)
