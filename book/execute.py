"""L2: a schedule moved by real ranks, and the trace of what was really moved.

Each chunk is followed in memory by its lanes, one element per rank that counts how often that rank's data is in the
chunk. Chunk and lanes travel in one message and are added by one addition, whatever the tensor holds: so the
contributions in the trace are read off data that was moved, not off the schedule. Lanes do not count as bytes moved.

Shapes: N elements, C chunks (as `torch.tensor_split` cuts them), K lanes, one per rank.
"""
from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import groupby

from book.extras import needed_by
from book.launch import rank_device
from book.schedule import Move, Schedule, ScheduleError
from book.trace import Event, Trace

with needed_by("book.execute", "torch"):
    import torch
    import torch.distributed as dist

    from book import record
    from book.device import message_backends, message_device


def execute(schedule: Schedule, tensor: torch.Tensor | None = None) -> Trace:
    """Move `tensor` in place as `schedule` says, together with all other ranks, and return this rank's trace.

    Runs inside a rank; sets up the default process group if there is none. `tensor` may have any shape, length and
    dtype that can be added (None: only lanes travel); lanes have its dtype. One message per step, sender and receiver.
    A rank sends what it held when the step began; what arrives in a step is added or put in place in the schedule's
    order. Nothing is checked beforehand: a wrong schedule runs, and its trace shows what comes of it. The whole trace
    of a launch is `launch(execute, n, schedule, tensor).trace`.
    Raises ScheduleError when the schedule is for another number of ranks, or when a chunk is to land in one that is not
    as long.
    """
    device = _ready()
    world_size = dist.get_world_size()
    if schedule.world_size != world_size:
        raise ScheduleError(f"{schedule.name} is a schedule for {schedule.world_size} ranks, but {world_size} are "
                            f"running: launch {schedule.world_size}, or make the schedule for {world_size}")
    data = torch.empty(0) if tensor is None else tensor
    with torch.no_grad(), record.paused():
        executor = _Executor(schedule, data.reshape(-1), dist.get_rank(), device)
        executor.run()
        data.copy_(executor.data().view_as(data))
    events = executor.events()
    record.emit(*events, source="executed", name=schedule.name, num_steps=schedule.num_steps,
                promise=schedule.promise)
    return Trace(record.from_zero(events), world_size, "measured", "executed", name=schedule.name,
                 backend=message_backends().get(device.type), promise=schedule.promise)


def _ready() -> torch.device:
    """Set up the default process group if there is none; the device that its messages come from."""
    if not dist.is_initialized():
        rank_device()
        dist.init_process_group()
    return message_device()


@dataclass(frozen=True)
class _Message:
    """What one rank sends to another in one step: `parts` lie one behind the other in `memory`."""

    moves: list[Move]
    memory: torch.Tensor
    parts: tuple[torch.Tensor, ...]


class _Executor:
    """One rank's part in a schedule; `data` is flat."""

    def __init__(self, schedule: Schedule, data: torch.Tensor, rank: int, device: torch.device):
        self._schedule, self._rank, self._num_lanes = schedule, rank, schedule.world_size
        parts = torch.tensor_split(data.to(device), schedule.num_chunks)
        self._sizes = [len(part) + self._num_lanes for part in parts]
        self._chunk_bytes = [part.numel() * part.element_size() for part in parts]
        _check_lengths(schedule, [part.numel() for part in parts])
        start = torch.from_numpy(schedule.start()[rank]).to(device, data.dtype)
        self._chunks = torch.cat([piece for pair in zip(parts, start) for piece in pair]).split(self._sizes)
        self._events: list[Event] = []
        self._lanes: list[torch.Tensor] = []  # what each event's chunk held, read when all is done

    def run(self) -> None:
        now_s = time.monotonic()
        for chunk, content in enumerate(self._chunks):
            num_bytes = self._chunk_bytes[chunk]
            self._note(Event(self._rank, "hold", chunk=chunk, step=0, num_bytes=num_bytes, start_s=now_s, end_s=now_s),
                       content)
        for moves in self._steps():
            self._step(moves)

    def data(self) -> torch.Tensor:
        """The chunks without their lanes, shape (N,)."""
        return torch.cat([chunk[:-self._num_lanes] for chunk in self._chunks])

    def events(self) -> list[Event]:
        """This rank's events, times in seconds of CLOCK_MONOTONIC."""
        lanes = torch.stack(self._lanes)
        counts = (lanes.real if lanes.is_complex() else lanes).double().tolist()
        return [replace(event, contributions=tuple(row)) for event, row in zip(self._events, counts)]

    def _steps(self) -> Iterator[list[Move]]:
        """The moves of each step that this rank takes part in, in the schedule's order."""
        moves = self._schedule.moves
        if not len(moves):
            return
        own = moves.take((moves.array("src") == self._rank) | (moves.array("dst") == self._rank))
        for _, group in groupby(own, key=lambda move: move.step):
            yield list(group)

    def _step(self, moves: list[Move]) -> None:
        sent = {dst: self._outgoing(group) for dst, group in _by_peer(moves, "dst", self._rank).items()}
        received = {src: self._incoming(group) for src, group in _by_peer(moves, "src", self._rank).items()}
        start_s = time.monotonic()
        end_s = self._exchange(sent, received)
        for message in sent.values():
            for move, part in zip(message.moves, message.parts):
                self._note(self._event(move, "send", move.dst, start_s, end_s), part)
        arrived = {src: iter(message.parts) for src, message in received.items()}
        for move in moves:  # across all senders in the schedule's order: rounding depends on it
            if move.dst == self._rank:
                self._apply(move, next(arrived[move.src]))
                event = self._event(move, "recv", move.src, start_s, time.monotonic())
                self._note(event, self._chunks[event.chunk])

    def _outgoing(self, moves: list[Move]) -> _Message:
        """Nothing is changed before all messages have left, so a single chunk needs no copy."""
        sizes = [self._sizes[move.chunk] for move in moves]
        chunks = [self._chunks[move.chunk] for move in moves]
        memory = chunks[0] if len(chunks) == 1 else torch.cat(chunks)
        return _Message(moves, memory, memory.split(sizes))

    def _incoming(self, moves: list[Move]) -> _Message:
        sizes = [self._sizes[move.chunk] for move in moves]
        memory = torch.empty(sum(sizes), dtype=self._chunks[0].dtype, device=self._chunks[0].device)
        return _Message(moves, memory, memory.split(sizes))

    def _exchange(self, sent: dict[int, _Message], received: dict[int, _Message]) -> float:
        """Send and receive all messages of a step; returns when, in seconds, the last of them was done."""
        # Receives first: gloo announces a receive to the sender in the stream in which it sends data to that rank.
        # Behind this data it would come late, and two ranks that exchange would send one after the other.
        calls = [dist.P2POp(dist.irecv, _bytes_of(message.memory), src) for src, message in received.items()]
        calls += [dist.P2POp(dist.isend, _bytes_of(message.memory), dst) for dst, message in sent.items()]
        for work in dist.batch_isend_irecv(calls):
            work.wait()
        if self._chunks[0].is_cuda:
            torch.cuda.current_stream(self._chunks[0].device).synchronize()
        return time.monotonic()

    def _apply(self, move: Move, arrived: torch.Tensor) -> None:
        """One operation on a chunk and its lanes together."""
        chunk = self._chunks[_into(move)]
        if move.op == "reduce":
            chunk.add_(arrived)
        else:
            chunk.copy_(arrived)

    def _event(self, move: Move, kind: str, peer: int, start_s: float, end_s: float) -> Event:
        op, chunk = (None, move.chunk) if kind == "send" else (move.op, _into(move))
        return Event(self._rank, kind, op, peer, chunk=chunk, step=move.step, num_bytes=self._chunk_bytes[chunk],
                     start_s=start_s, end_s=end_s)

    def _note(self, event: Event, content: torch.Tensor) -> None:
        self._events.append(event)
        self._lanes.append(content[-self._num_lanes:].clone())


def _check_lengths(schedule: Schedule, lengths: list[int]) -> None:
    if not schedule.moves.has("into") or len(set(lengths)) == 1:
        return
    for move in schedule.moves:
        if lengths[move.chunk] != lengths[_into(move)]:
            raise ScheduleError(f"{schedule.name} puts chunk {move.chunk} of {lengths[move.chunk]} elements into chunk "
                                f"{_into(move)} of {lengths[_into(move)]}: give a tensor whose length is a multiple of "
                                f"{schedule.num_chunks}")


def _into(move: Move) -> int:
    return move.chunk if move.into is None else move.into


def _by_peer(moves: list[Move], side: str, rank: int) -> dict[int, list[Move]]:
    """The moves from ("dst") or to ("src") this rank, by the rank at their `side`, in the schedule's order."""
    groups: dict[int, list[Move]] = {}
    for move in moves:
        peer = getattr(move, side)
        if peer != rank:
            groups.setdefault(peer, []).append(move)
    return groups


def _bytes_of(memory: torch.Tensor) -> torch.Tensor:
    """The same memory as bytes: a backend moves those of any dtype."""
    return memory.view(torch.uint8)
