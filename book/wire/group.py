"""L2: the torch.distributed backend "wire": send, recv, isend, irecv and barrier over a socket to the broker."""
from __future__ import annotations

import itertools
import socket
import threading
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from book.wire.frames import ANY, BARRIER, DONE, RECV, SEND, TASK, Frame, Unpacker, packed, receive


class Connection:
    """A rank's end of the socket: sends frames, and hands answers to the threads waiting for them."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection, self.lock = connection, threading.Lock()
        self.numbers = itertools.count(1)
        self.arrived = threading.Condition()
        self.answers: dict[int, Frame] = {}
        self.tasks: list[bytes] = []
        self.closed = False
        threading.Thread(target=self._listen, daemon=True).start()

    def send(self, kind: int, peer: int = 0, payload: bytes = b"", expects: int = 0) -> int:
        """Sends a frame to the broker and returns the number of its request."""
        number = next(self.numbers)
        with self.lock:
            self.connection.sendall(packed(Frame(kind, peer, number, payload, expects)))
        return number

    def wait(self, number: int) -> Frame:
        """Waits until the request is done and returns the answer. Raises EOFError if the connection is lost."""
        with self.arrived:
            self.arrived.wait_for(lambda: number in self.answers or self.closed)
            if number not in self.answers:
                raise EOFError("lost connection to the broker")
            return self.answers.pop(number)

    def done(self, number: int) -> bool:
        """Whether the request is done."""
        with self.arrived:
            return number in self.answers

    def next_task(self) -> bytes | None:
        """Waits for the next task; None if the connection closes first."""
        with self.arrived:
            self.arrived.wait_for(lambda: self.tasks or self.closed)
            return self.tasks.pop(0) if self.tasks else None

    def _listen(self) -> None:
        unpacker = Unpacker()
        try:
            while True:
                for frame in receive(self.connection, unpacker):
                    with self.arrived:
                        if frame.kind == DONE:
                            self.answers[frame.request] = frame
                        elif frame.kind == TASK:
                            self.tasks.append(frame.payload)
                        self.arrived.notify_all()
        except (OSError, EOFError):
            with self.arrived:
                self.closed = True
                self.arrived.notify_all()


class _Request(dist.Work):
    """A transfer under way."""

    def __init__(self, link: Connection, number: int, target: torch.Tensor | None) -> None:
        super().__init__()
        self.link, self.number, self.target = link, number, target
        self.answer: Frame | None = None

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        if self.answer is None:
            self.answer = self.link.wait(self.number)
            data = self.answer.payload
            if self.target is not None and data:
                came = torch.frombuffer(bytearray(data), dtype=self.target.dtype)
                with torch.no_grad():
                    self.target.copy_(came.view(self.target.shape))
        return True

    def is_completed(self) -> bool:
        return self.answer is not None or self.link.done(self.number)

    def _source_rank(self) -> int:
        """The rank that sent what was received; torch.distributed.recv asks for it."""
        self.wait()
        assert self.answer is not None
        return self.answer.peer


def _refused(name: str) -> Any:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError(f"{name} is not available: these ranks can only send and receive")
    return refuse


class WireGroup(dist.ProcessGroup):
    """A process group of ranks that can send, receive and wait at a barrier; its collectives raise RuntimeError.

    Messages between two ranks arrive in the order in which they were sent; tags are ignored. A receive from any rank
    takes the message that the broker got first.
    """

    def __init__(self, link: Connection, rank: int, world_size: int) -> None:
        super().__init__(rank, world_size)
        self.link = link

    def getBackendName(self) -> str:
        """The name of the backend."""
        return "wire"

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int = 0) -> _Request:
        """Starts sending one tensor to a rank."""
        data = tensors[0].detach().contiguous().cpu().flatten().view(torch.uint8).numpy().tobytes()
        return _Request(self.link, self.link.send(SEND, peer, data), None)

    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int = 0) -> _Request:
        """Starts receiving one tensor from a rank; it is filled when the request is waited for."""
        return _Request(self.link, self.link.send(RECV, peer, expects=tensors[0].nbytes), tensors[0])

    def recv_anysource(self, tensors: list[torch.Tensor], tag: int = 0) -> _Request:
        """Starts receiving one tensor from whichever rank sends one; its request knows which it was."""
        return self.recv(tensors, ANY, tag)

    def barrier(self, opts: Any = None) -> _Request:
        """Starts waiting until every rank has reached the barrier. It carries no data."""
        return _Request(self.link, self.link.send(BARRIER), None)


for _name in ("allgather", "allgather_coalesced", "_allgather_base", "allreduce", "allreduce_coalesced", "alltoall",
              "alltoall_base", "broadcast", "gather", "reduce", "reduce_scatter", "_reduce_scatter_base",
              "scatter"):
    setattr(WireGroup, _name, _refused(_name))


def join(link: Connection, rank: int, world_size: int) -> None:
    """Initializes torch.distributed with the ranks of the broker's task; an existing default group is destroyed first.

    A process has one link for all its tasks.
    """
    if dist.is_initialized():
        dist.destroy_process_group()
    if not hasattr(dist.Backend, "WIRE"):
        dist.Backend.register_backend("wire", lambda store, rank, size, timeout: WireGroup(link, rank, size),
                                      devices=["cpu"])
    dist.init_process_group("wire", rank=rank, world_size=world_size, store=dist.HashStore())
