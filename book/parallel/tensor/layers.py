"""L2: layers split over the ranks of a group: linear layers, the embedding, the loss, dropout.

Shapes: B sequences in the batch, T tokens, D width, V vocabulary, of which a rank has v, about V/N on N ranks.
"""
from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from book.parallel.tensor.operators import Group, all_reduce_then_identity, identity_then_all_reduce

Operator = Callable[..., torch.Tensor]  # called as operator(x, group=group)


def shard(parameter: nn.Parameter, dim: int, group: Group = None) -> nn.Parameter:
    """This rank's piece, along `dim`, of a parameter that is the same on all ranks; its `shard_dim` is `dim`.

    If the length is not a multiple of the number of ranks, the first ranks hold one more; a DTensor's `Shard` cuts like
    `chunk`, which differs in that case. Raises ValueError if the length is less than the number of ranks.
    """
    num_ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    if parameter.shape[dim] < num_ranks:
        raise ValueError(f"a length of {parameter.shape[dim]} can't be shared by {num_ranks} ranks: use fewer ranks")
    piece = parameter.detach().tensor_split(num_ranks, dim)[rank]
    mine = nn.Parameter(piece.clone(memory_format=torch.contiguous_format), parameter.requires_grad)
    mine.shard_dim = dim
    return mine


def first_of_shard(length: int, group: Group = None) -> int:
    """Where this rank's piece of a dimension of this length starts, as `shard` cuts it."""
    num_ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    return rank * (length // num_ranks) + min(rank, length % num_ranks)


class ColumnParallelLinear(nn.Module):
    """Part of a linear layer's outputs, (..., in) -> (..., out/N), from a `linear` that is the same on every rank.

    `enter` is applied to the input; if several layers share an input, use `already_entered`.
    """

    def __init__(self, linear: nn.Linear, group: Group = None, enter: Operator = identity_then_all_reduce) -> None:
        super().__init__()
        self.weight = shard(linear.weight, 0, group)
        self.bias = None if linear.bias is None else shard(linear.bias, 0, group)
        self.enter, self.group = enter, group

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(..., in) -> (..., out/N)."""
        x = self.enter(x, group=self.group)
        return F.linear(x, self.weight, self.bias)


class RowParallelLinear(nn.Module):
    """A linear layer whose input is split, (..., in/N) -> (..., out), from a `linear` that is the same on every rank.

    `leave` sums the ranks' partial results; the bias, which every rank has whole, is added once, to the sum.
    """

    def __init__(self, linear: nn.Linear, group: Group = None, leave: Operator = all_reduce_then_identity) -> None:
        super().__init__()
        self.weight = shard(linear.weight, 1, group)
        self.bias = linear.bias
        self.leave, self.group = leave, group

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(..., in/N) -> (..., out)."""
        total = self.leave(F.linear(x, self.weight), group=self.group)
        return total if self.bias is None else total + self.bias


class VocabParallelEmbedding(nn.Module):
    """An embedding of which each rank has the rows of some tokens, from one that is the same on every rank."""

    def __init__(self, embedding: nn.Embedding, group: Group = None,
                 leave: Operator = all_reduce_then_identity) -> None:
        super().__init__()
        self.weight = shard(embedding.weight, 0, group)
        self.first = first_of_shard(embedding.num_embeddings, group)
        self.leave, self.group = leave, group

    def forward(self, tokens_BT: torch.Tensor) -> torch.Tensor:
        """Token numbers (B, T) -> (B, T, D): zeros where another rank has the row, then summed over the ranks."""
        place_BT = tokens_BT - self.first
        mine_BT = (place_BT >= 0) & (place_BT < len(self.weight))
        rows_BTD = F.embedding(torch.where(mine_BT, place_BT, 0), self.weight)
        return self.leave(torch.where(mine_BT[..., None], rows_BTD, 0), group=self.group)


def vocab_parallel_cross_entropy(logits_BTv: torch.Tensor, targets_BT: torch.Tensor, first: int,
                                 group: Group = None) -> torch.Tensor:
    """The mean cross-entropy of the predictions, in nats; this rank's logits start with those of token `first`.

    Three all-reduces of B T numbers each, whatever V is: of the largest logit, of the sum of exponentials, of the
    target's logit (shoeybi2019). 16-bit logits are converted to float32, and the loss is float32 too. As in
    `F.cross_entropy`, positions whose target is -100 do not count; other targets are not checked to be tokens.
    """
    logits_BTv = logits_BTv.to(torch.promote_types(logits_BTv.dtype, torch.float32))
    largest_BT = logits_BTv.detach().amax(-1)
    dist.all_reduce(largest_BT, dist.ReduceOp.MAX, group=group)
    logits_BTv = logits_BTv - largest_BT[..., None]
    total_BT = all_reduce_then_identity(logits_BTv.exp().sum(-1), group)

    place_BT = targets_BT - first
    mine_BT = (place_BT >= 0) & (place_BT < logits_BTv.shape[-1])
    index_BT1 = torch.where(mine_BT, place_BT, 0)[..., None]
    picked_BT = logits_BTv.gather(-1, index_BT1)[..., 0]
    target_BT = all_reduce_then_identity(torch.where(mine_BT, picked_BT, 0), group)
    counts_BT = targets_BT != -100
    losses_BT = torch.where(counts_BT, total_BT.log() - target_BT, 0)
    return losses_BT.sum() / counts_BT.sum()


class AlikeDropout(nn.Module):
    """Dropout with one mask for all ranks of a group, for activations that they all hold.

    Plain dropout draws from the rank's own generator, which must differ between ranks because elsewhere they hold
    different parts. So the group's first rank draws a seed for each mask and broadcasts it. It draws from torch's CPU
    generator, which `torch.utils.checkpoint` resets before it reruns a forward, so the mask is the same then.
    """

    def __init__(self, probability: float, group: Group = None) -> None:
        super().__init__()
        self.probability, self.group = probability, group

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Any shape -> the same shape."""
        if not self.training:
            return x
        seed = torch.randint(2**62, (1,), device="cpu").to(x.device)
        dist.broadcast(seed, dist.get_global_rank(self.group or dist.group.WORLD, 0), group=self.group)
        generator = torch.Generator(x.device).manual_seed(seed.item())
        keep = torch.empty_like(x).bernoulli_(1 - self.probability, generator=generator).bool()
        return torch.where(keep, x / (1 - self.probability), 0)
