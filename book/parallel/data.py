"""L2: data parallelism as chapter 02 builds it: the same state on all ranks, gradients averaged in buckets.

Later chapters combine it with other kinds of parallelism. Torch's own is `torch.nn.parallel.DistributedDataParallel`.
"""
from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn


def broadcast_state(module: nn.Module) -> None:
    """Copy rank 0's parameters and buffers to every rank."""
    for tensor in [*module.parameters(), *module.buffers()]:
        dist.broadcast(tensor.detach(), src=0)


class BucketedDDP(nn.Module):
    """Average gradients in buckets, each as soon as it is full; call `finish()` after backward.

    A bucket is closed once its gradients reach `bucket_bytes`. Buckets go from the last parameter to the first, and are
    all-reduced in that order over all ranks of the world. Raises RuntimeError if a parameter got no gradient from
    backward, and for a second backward before `finish()`.
    """

    def __init__(self, module: nn.Module, bucket_bytes: int) -> None:
        super().__init__()
        self.module = module
        broadcast_state(module)
        self.buckets = [[]]
        trained = [p for p in module.parameters() if p.requires_grad]
        for p in reversed(trained):
            size = sum(q.nbytes for q in self.buckets[-1])
            if self.buckets[-1] and size >= bucket_bytes:
                self.buckets.append([])
            self.buckets[-1].append(p)
            p.register_post_accumulate_grad_hook(self.gradient_ready)
        self.ready, self.flying = set(), []

    def forward(self, *inputs: Any) -> Any:
        """The wrapped module's forward."""
        return self.module(*inputs)

    def gradient_ready(self, parameter: nn.Parameter) -> None:
        """All-reduce every bucket that is now full and whose predecessors have been sent."""
        if parameter in self.ready:
            raise RuntimeError("call finish() after each backward")
        self.ready.add(parameter)
        for bucket in self.buckets[len(self.flying):]:
            if not self.ready.issuperset(bucket):
                break
            flat = torch.cat([p.grad.flatten() for p in bucket])
            work = dist.all_reduce(flat, async_op=True)
            self.flying.append((bucket, flat, work))

    def finish(self) -> None:
        """Wait for all buckets and replace the gradients with the averages."""
        if len(self.flying) < len(self.buckets):
            raise RuntimeError("some parameters got no gradient, so their "
                               "buckets were never sent")
        for bucket, flat, work in self.flying:
            work.wait()
            flat /= dist.get_world_size()
            pieces = flat.split([p.numel() for p in bucket])
            for p, piece in zip(bucket, pieces):
                p.grad.copy_(piece.view_as(p))
        self.ready, self.flying = set(), []
