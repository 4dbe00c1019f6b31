"""Attention over a cut sequence, right and wrong, for tests that record it on real ranks."""
from __future__ import annotations

import math
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from book.launch import launch, rank_device
from book.record.scores import follow_scores
from book.trace import Trace
from tests.by_value import sent_by_value
from tests.once import once

sent_by_value(__name__)


def tokens_of(rank: int, num_ranks: int, num_tokens: int, zigzag: bool) -> Tensor:
    """The positions of a rank's tokens: a run of them, or one run from each end."""
    if not zigzag:
        return torch.arange(num_tokens).chunk(num_ranks)[rank]
    chunks = torch.arange(num_tokens).chunk(2 * num_ranks)
    return torch.cat([chunks[rank], chunks[-1 - rank]])


def passed_on(tensor: Tensor, by: int) -> Tensor:
    """What the rank `by` places before has."""
    rank, n = dist.get_rank(), dist.get_world_size()
    got = torch.empty_like(tensor)
    ops = [dist.P2POp(dist.isend, tensor, (rank + by) % n), dist.P2POp(dist.irecv, got, (rank - by) % n)]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    return got


def ring(q: Tensor, k: Tensor, v: Tensor, zigzag: bool, fault: str = "") -> Tensor:
    """Attention of this rank's queries: keys and values go around."""
    rank, n = dist.get_rank(), dist.get_world_size()
    where = [tokens_of(other, n, n * q.shape[-2], zigzag) for other in range(n)]
    sums, total, by = torch.zeros_like(q), torch.zeros_like(q[..., :1]), -1 if fault == "backwards" else 1
    for hop in range(n):
        keys = where[rank if fault == "own mask" else (rank - by * hop) % n]
        scores = q @ k.mT / math.sqrt(q.shape[-1])
        weights = scores.masked_fill(keys > where[rank][:, None], -math.inf).exp()
        sums, total = sums + weights @ v, total + weights.sum(-1, keepdim=True)
        if hop < n - 1:
            k, v = passed_on(k, by), passed_on(v, by)
    return sums / total


def _watched(num_tokens: int, zigzag: bool, fault: str) -> Tensor:
    rank_device()
    dist.init_process_group()
    mine = tokens_of(dist.get_rank(), dist.get_world_size(), num_tokens, zigzag)
    return follow_scores(partial(ring, zigzag=zigzag, fault=fault), mine.tolist(), num_tokens)


def recorded(num_ranks: int = 4, zigzag: bool = False, fault: str = "", num_tokens: int = 16) -> Trace:
    """The trace of a run."""
    name = f"scores-{num_ranks}-{zigzag}-{fault.replace(' ', '-')}-{num_tokens}"
    return once(name, lambda: launch(_watched, num_ranks, num_tokens, zigzag, fault, record=True)).trace
