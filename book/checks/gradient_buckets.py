"""L3, lab 2: gradients in buckets: what is in which bucket, and what was sent when."""
from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import product
from typing import Any

import numpy as np

from book.checks.verdict import CheckFailed, Gradients, agree, flat, refuse, require, short
from book.cost import Link
from book.replay import Replay, overlap
from book.trace import Event, Trace


def bucket_layout(buckets: Sequence[Sequence[str]], sizes: Mapping[str, int], bucket_bytes: float) -> int:
    """Buckets must hold all parameters, from the last to the first, as many in each as fit into `bucket_bytes`.

    `buckets` are lists of names, `sizes` the bytes of each parameter that gets a gradient, in the module's order.
    Returns the number of buckets.
    """
    held, wanted = [name for bucket in buckets for name in bucket], list(sizes)[::-1]
    for name in held:
        require(name in sizes, f"{name} is frozen: it never gets a gradient, so its bucket would never be full")
    for name in sizes:
        require(name in held, f"{name} is in no bucket: nobody will average its gradient")
    require(len(held) == len(wanted),
            f"{max(held, key=held.count)} is in your buckets more than once: each parameter belongs in one, once")
    refuse(held == wanted[::-1] != wanted, "your buckets go from the first parameter to the last. Backward makes the "
           "last parameter's gradient first, so your first bucket would be full only at the end")
    require(held == wanted, "the buckets don't hold the parameters in reverse order, from the last to the first")
    for place, bucket in enumerate(buckets):
        require(bucket, f"bucket {place} is empty")
        num_bytes, after = sum(sizes[name] for name in bucket), [*buckets[place + 1:place + 2], []][0]
        refuse(num_bytes > bucket_bytes and len(bucket) > 1, f"bucket {place} has {num_bytes} bytes, more than "
               f"{bucket_bytes}: close it before a gradient that no longer fits. (Torch's DDP closes a bucket only "
               "once it has reached its size)")
        refuse(after and num_bytes + sizes[after[0]] <= bucket_bytes, f"bucket {place} was closed at {num_bytes} "
               f"bytes, but the next gradient would have fitted into {bucket_bytes}")
    return len(buckets)


def bucket_traffic(own: Trace, reference: Trace, num_buckets: int) -> tuple[int, float]:
    """A followed backward must send the bytes that torch's DDP sends, bucket by bucket, while it runs.

    Both traces come from `follow_backward`. Every bucket but the last must have been issued before the last gradient
    was ready, and none may be waited for immediately: in a replay some of the communication must run beside backward.
    Returns how many all-reduces a rank issued, and their bytes.
    """
    sent, wanted = _all_reduces(own, 0), sum(event.num_bytes or 0 for event in _all_reduces(reference, 0))
    require(sent, "no all-reduce was issued after the first gradient was ready: is finish() your own?")
    num_bytes, num_gradients = sum(event.num_bytes or 0 for event in sent), len(_gradients(own, 0))
    require(num_bytes == wanted, f"{short(num_bytes)} bytes are all-reduced, but torch's DDP sends {short(wanted)}: "
            "each gradient must be sent once")
    refuse(len(sent) == num_gradients > num_buckets, f"there is one all-reduce for each of {num_gradients} gradients, "
           "and each pays the latency: send a bucket's gradients together, in one flat buffer")
    require(len(sent) == num_buckets, f"{len(sent)} all-reduces for {num_buckets} buckets: there should be one for "
            "each")
    for rank in range(own.world_size):
        _check_overlap(rank, _all_reduces(own, rank), _gradients(own, rank))
    _check_hidden(own)
    return len(sent), num_bytes


def started_in_backward(trace: Trace, num_buckets: int) -> int:
    """Each rank must have started all its buckets' all-reduces before its one barrier, which comes after backward.

    Returns `num_buckets`.
    """
    for rank in range(trace.world_size):
        own = [event for event in trace.of_rank(rank) if event.start_s is not None]
        end_s = min((event.start_s or 0.0 for event in own if event.op == "barrier"), default=float("inf"))
        early = sum(event.op == "all_reduce" and (event.start_s or 0.0) < end_s for event in own)
        require(early >= num_buckets, f"rank {rank} had all its gradients when backward ended, but had started only "
                f"{early} of {num_buckets} buckets, and finish() started the rest. The hooks must start every full "
                "bucket whose turn it is, including the last one; finish() only waits")
    return num_buckets


def laid_alike(before: Sequence[Gradients], after: Sequence[Gradients]) -> None:
    """All ranks must lay the gradients of a bucket, which are equally large, into its tensor in the same order."""
    for name, picks in product(before[0], product(before[0], repeat=len(before))):
        mixed = np.mean([flat(own[pick]) for own, pick in zip(before, picks)], axis=0)
        refuse(len(set(picks)) > 1 and agree(after[0][name], mixed), f"rank 0, {name}: this is the mean of rank 0's "
               f"gradient of {picks[0]}, rank 1's of {picks[1]}, and so on: the ranks lay the gradients of a bucket "
               "into its tensor in different orders. Take the order in the bucket, not that in which gradients are "
               "ready")


class _Handle:
    """What all_reduce(async_op=True) returns: its sum is made elsewhere, and copied into `tensor` at the wait."""

    def __init__(self, tensor: Any, total: Any, work: Any) -> None:
        self.tensor, self.total, self.work, self.sent = tensor, total, work, tensor.clone()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.work, name)

    def wait(self, *timeout: Any) -> Any:
        done = self.work.wait(*timeout)
        self._arrive()
        return done

    def is_completed(self) -> bool:
        done = bool(self.work.is_completed())
        if done:
            self._arrive()
        return done

    def get_future(self) -> Any:
        return self.work.get_future().then(lambda _: [self._arrive()])

    def _arrive(self) -> Any:
        if self.sent is not None:
            refuse((self.tensor != self.sent).any(), "a tensor changed between all_reduce(async_op=True) and its "
                   "wait(). Nothing may touch it while it is being sent, so divide after wait(). (If all ranks happen "
                   "to divide before anything is sent, the mean comes out right by luck)")
            self.tensor.copy_(self.total)
            self.sent = None
        return self.tensor


@contextmanager
def untouched_in_flight(dist: Any) -> Iterator[None]:
    """Have `dist.all_reduce(..., async_op=True)` give its sum at the wait, and raise if its tensor has changed.

    `dist` is torch.distributed. A tensor that is read without a wait is therefore the old one, on every rank and in
    every run.
    """
    all_reduce = dist.all_reduce

    def delayed(tensor: Any, *arguments: Any, async_op: bool = False, **options: Any) -> Any:
        if not async_op:
            return all_reduce(tensor, *arguments, **options)
        total = tensor.detach().clone()
        return _Handle(tensor.detach(), total, all_reduce(total, *arguments, async_op=True, **options))

    dist.all_reduce = delayed
    try:
        yield
    finally:
        dist.all_reduce = all_reduce


def num_sent_bytes(trace: Trace, want: float) -> float:
    """Each rank must have all-reduced `want` bytes in this run. Returns `want`."""
    for rank in range(trace.world_size):
        sent = sum(event.num_bytes or 0 for event in trace.of_rank(rank) if event.op == "all_reduce")
        require(sent == want, f"rank {rank} all-reduced {short(sent)} bytes, but should have sent {short(want)}: which "
                "dtype does the tensor that you send have?")
    return want


def _check_overlap(rank: int, sent: Sequence[Event], ready: Sequence[Event]) -> None:
    end_s, needed = max(event.times_s[1] for event in ready), len(sent) - 1
    early = sum(event.start_s is not None and event.start_s < end_s for event in sent)
    refuse(needed and not early, f"rank {rank} issued all its all-reduces after the last gradient was ready, so "
           "nothing overlaps with backward: start a bucket's all-reduce in the hook of its last gradient")
    require(early >= needed, f"rank {rank} issued {early} of {len(sent)} all-reduces before the last gradient was "
            f"ready, but {needed} can be: start each as soon as its bucket is full")


def _check_hidden(trace: Trace) -> None:
    """If there is something to hide, a replay whose all-reduces take time must hide some of it."""
    try:
        hidden_s = overlap(Replay(1e-9, Link(0, 1e9))(trace)).hidden_s
    except ValueError as error:
        raise CheckFailed(f"your backward can't be replayed: {error}") from None
    refuse(len(_all_reduces(trace, 0)) > 1 and not hidden_s, "each all-reduce is waited for in the hook, and backward "
           "stands still meanwhile: start it there with async_op=True, and wait in finish()")


def _gradients(trace: Trace, rank: int) -> list[Event]:
    return [event for event in trace.of_rank(rank) if event.kind == "compute" and event.num_bytes is not None]


def _all_reduces(trace: Trace, rank: int) -> list[Event]:
    """The all-reduces of one rank from its first followed gradient on."""
    first_s = min((event.times_s[1] for event in _gradients(trace, rank)), default=float("inf"))
    return [event for event in trace.of_rank(rank) if event.op == "all_reduce" and (event.start_s or 0.0) > first_s]
