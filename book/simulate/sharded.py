"""L2: what ranks hold of a model's state in a training step with ZeRO, worked out for units of any size.

A model is a unit called root (embeddings, last norm and head) around blocks, each a unit of its own, as in the labs and
in book.parallel.sharded. All ranks do the same, so one program stands for all; its times only number its events.
"""
from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from book.trace import Event, Trace

ROOT = "root"
NUMBER_BYTES, STATE_NUMBERS = 8, 2


def simulate_sharded(zero_stage: int, num_ranks: int, root: int, blocks: Sequence[int], head: int) -> Trace:
    """The trace of one step of a model in stage 1, 2 or 3, for `memory_player`: what is held, gathered and scattered.

    `root` and each of `blocks` are numbers of parameters; `head` says how many of root's have their gradient as
    backward begins, before the last block's. A parameter, its gradient and each of the optimizer's two numbers have 8
    bytes. A unit is filled up until the ranks share it out equally. Raises ValueError for another stage.
    """
    if zero_stage not in (1, 2, 3):
        raise ValueError(f"zero_stage is 1, 2 or 3, not {zero_stage!r}: without stages nothing is sharded")
    units = {ROOT: root, **{f"block {number}": size for number, size in enumerate(blocks)}}
    program = _Program(zero_stage, num_ranks, units, head)
    events = [replace(event, rank=rank, start_s=float(place), end_s=float(place))
              for place, event in enumerate(program.events()) for rank in range(num_ranks)]
    return Trace(events, num_ranks, "modelled", "simulated", name=f"zero_{zero_stage}")


@dataclass
class _Program:
    """What rank 0 does, in its order."""

    stage: int
    num_ranks: int
    units: dict[str, int]
    head: int

    def events(self) -> Iterator[Event]:
        for unit in self.units:
            yield self._holds("parameters", unit, self._whole(unit) if self.stage < 3 else self._shard(unit))
        yield from self._forward()
        yield from self._backward()
        for unit in self.units if self.stage == 1 else ():
            yield from self._scatter(unit)
        yield Event(0, "compute", "update", unit="all")
        for unit in self.units:
            yield self._holds("optimizer", unit, STATE_NUMBERS * self._shard(unit))
        for unit in self.units:
            yield self._holds("gradients", unit, 0)
        for unit in self.units if self.stage < 3 else ():
            yield self._collective("all_gather", unit)

    def _forward(self) -> Iterator[Event]:
        yield from self._gather(ROOT)
        yield Event(0, "compute", "forward", unit=ROOT)
        for unit in list(self.units)[1:]:
            yield from self._gather(unit)
            yield Event(0, "compute", "forward", unit=unit)
            yield from self._free(unit)
        yield from self._free(ROOT)

    def _backward(self) -> Iterator[Event]:
        yield from self._gather(ROOT)
        yield Event(0, "compute", "backward", unit=ROOT)
        of_head = [self._holds("gradients", ROOT, self.head * NUMBER_BYTES)]
        if self.stage == 3:
            yield of_head.pop()
        for unit in list(self.units)[:0:-1]:
            yield from self._gather(unit)
            yield Event(0, "compute", "backward", unit=unit)
            yield from of_head
            of_head.clear()
            yield from self._has_gradients(unit)
        yield from self._has_gradients(ROOT)

    def _has_gradients(self, unit: str) -> Iterator[Event]:
        yield self._holds("gradients", unit, self.units[unit] * NUMBER_BYTES)
        if self.stage > 1:
            yield from self._scatter(unit)
        yield from self._free(unit)

    def _gather(self, unit: str) -> Iterator[Event]:
        if self.stage == 3:
            yield self._collective("all_gather", unit)
            yield self._holds("parameters", unit, self._whole(unit) + self._shard(unit))

    def _free(self, unit: str) -> Iterator[Event]:
        if self.stage == 3:
            yield self._holds("parameters", unit, self._shard(unit))

    def _scatter(self, unit: str) -> Iterator[Event]:
        yield self._collective("reduce_scatter", unit)
        yield self._holds("gradients", unit, self._shard(unit))

    def _holds(self, what: str, unit: str, num_bytes: int) -> Event:
        return Event(0, "memory", what, unit=unit, num_bytes=float(num_bytes))

    def _collective(self, op: str, unit: str) -> Event:
        return Event(0, "collective", op, unit=unit, group=tuple(range(self.num_ranks)),
                     num_bytes=float(self._whole(unit)))

    def _shard(self, unit: str) -> int:
        return -(-self.units[unit] // self.num_ranks) * NUMBER_BYTES

    def _whole(self, unit: str) -> int:
        return self._shard(unit) * self.num_ranks
