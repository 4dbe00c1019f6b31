"""L2: a slow line that ranks send over, as chapter 15 trains on it: a process group for DDP's hooks and for `Rarely`.

The messages are real, and go over the default group. What is emulated is how long a line takes to carry them.
"""
from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist

from book.parallel.checked import checked_by


def _check(bytes_per_s: float, latency_s: float) -> None:
    if not bytes_per_s > 0:
        raise ValueError(f"bytes_per_s must be above 0, not {bytes_per_s!r}")
    if not latency_s >= 0:
        raise ValueError(f"latency_s must be at least 0, not {latency_s!r}")


class SlowLine(dist.ProcessGroup):
    """All ranks in a ring: each has a line to the next one that carries so many bytes a second, a message at a time.

    Made by all ranks together; give it as `group` or `process_group`. It knows two collectives, sums by all-reduce and
    all-gather to one tensor, both around the ring, and each call is done when it returns. `num_bytes` and
    `num_messages` are what this rank has sent, `busy_s` how long it was in collectives. A message is at the other end
    `latency_s` and its bytes over `bytes_per_s` after it was sent. Raises ValueError for a line that carries nothing
    and a negative latency.
    """

    @checked_by(_check)
    def __init__(self, bytes_per_s: float, latency_s: float = 0.0) -> None:
        super().__init__(dist.get_rank(), dist.get_world_size())
        self.bytes_per_s, self.latency_s = bytes_per_s, latency_s
        self.num_bytes = self.num_messages = 0
        self.busy_s = 0.0

    def getBackendName(self) -> str:
        """The name of the backend."""
        return "line"

    def allreduce(self, tensors: list[torch.Tensor], opts: Any = None) -> dist.Work:
        """Sum one tensor over the ranks in place; raises NotImplementedError for anything but a sum."""
        if opts is not None and opts.reduceOp != dist.ReduceOp.SUM:
            raise NotImplementedError(f"a slow line can only add up, not {opts.reduceOp}")
        [tensor], began = tensors, time.monotonic()
        rank, size = self.rank(), self.size()
        flat = torch.nn.functional.pad(tensor.flatten(), (0, -tensor.numel() % size))
        chunks = flat.chunk(size)
        for hop in range(size - 1):
            chunks[(rank - hop - 1) % size].add_(self._around(chunks[(rank - hop) % size]))
        for hop in range(size - 1):
            chunks[(rank - hop) % size].copy_(self._around(chunks[(rank - hop + 1) % size]))
        tensor.copy_(flat[:tensor.numel()].view_as(tensor))
        return self._done(began, tensors)

    def _allgather_base(self, gathered: torch.Tensor, own: torch.Tensor, opts: Any = None) -> dist.Work:
        """Put every rank's `own` (n) behind one another into `gathered` (N n)."""
        began, pieces = time.monotonic(), gathered.flatten().chunk(self.size())
        pieces[self.rank()].copy_(own.flatten())
        for hop in range(self.size() - 1):
            pieces[(self.rank() - hop - 1) % self.size()].copy_(
                self._around(pieces[(self.rank() - hop) % self.size()]))
        return self._done(began, [gathered])

    all_gather_single = _allgather_base  # its newer name

    def _around(self, sent: torch.Tensor) -> torch.Tensor:
        """What the rank before sends, while the line to the next one carries `sent`."""
        received = torch.empty_like(sent)
        coming = dist.irecv(received, (self.rank() - 1) % self.size())
        time.sleep(self.latency_s + sent.nbytes / self.bytes_per_s)
        dist.send(sent, (self.rank() + 1) % self.size())
        if coming is not None:
            coming.wait()
        self.num_bytes += sent.nbytes
        self.num_messages += 1
        return received

    def _done(self, began: float, tensors: list[torch.Tensor]) -> dist.Work:
        self.busy_s += time.monotonic() - began
        return _Done(tensors)


class _Done(dist.Work):
    """A collective that is over."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        super().__init__()
        self.future: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()
        self.future.set_result(tensors)

    def wait(self, timeout: Any = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        """A future of the tensors; torch's hooks go on from it."""
        return self.future
