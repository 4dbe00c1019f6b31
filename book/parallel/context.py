"""L2: context parallelism as chapter 08 builds it: each rank has some tokens of every sequence.

Only attention needs the other ranks' tokens: their keys and values. They come round in a ring (`ring_attention`), are
gathered all at once (`gathered_attention`), or heads are exchanged for tokens (`ulysses_attention`). Torch's own is
`torch.distributed.tensor.experimental.context_parallel`.

Shapes: B sequences in the batch, T tokens that a rank holds on each of N ranks, H heads of queries of width K, G heads
of keys and values (H is a multiple of G), S keys of a block. A group of None means all ranks.
"""
from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from book.cost.traffic import context_parallel_sent_bytes as bytes_sent
from book.parallel.checked import checked_by
from book.parallel.data import broadcast_state
from book.parallel.hybrid import average_gradients
from book.parallel.model import GPT, Attention
from book.parallel.sharded import MakeOptimizer
from book.parallel.tensor.operators import Group, all_gather_then_reduce_scatter

__all__ = ["ContextParallel", "Running", "blockwise_attention", "bytes_sent", "cut_by_tokens", "gathered_attention",
           "positions", "ring_attention", "scores_per_rank", "ulysses_attention"]

Attend: TypeAlias = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def check_tokens(num_ranks: int, num_tokens: int, zigzag: bool) -> None:
    """Raise ValueError for tokens that can't be cut into equal chunks, one for each rank, or two in zigzag order."""
    num_chunks = 2 * num_ranks if zigzag else num_ranks
    if num_tokens % num_chunks:
        order = "two chunks each in zigzag order" if zigzag else "one chunk each"
        raise ValueError(f"{num_tokens} tokens can't be shared by {num_ranks} ranks with {order}: use a multiple of "
                         f"{num_chunks}")


@checked_by(check_tokens)
def positions(rank: int, num_ranks: int, num_tokens: int, zigzag: bool = True) -> torch.Tensor:
    """The positions (T,) of a rank's tokens in sequences of `num_tokens` tokens.

    Contiguous: chunk r of N. In zigzag order: chunks r and 2N-1-r of 2N, an early and a late one, so that all ranks
    have as many keys to look at. Raises ValueError if the tokens can't be cut into such chunks.
    """
    if not zigzag:
        return torch.arange(num_tokens).chunk(num_ranks)[rank]
    chunks = torch.arange(num_tokens).chunk(2 * num_ranks)
    return torch.cat([chunks[rank], chunks[2 * num_ranks - 1 - rank]])


def scores_per_rank(num_ranks: int, num_tokens: int, zigzag: bool = True) -> list[int]:
    """How many scores of queries with the keys that they see each rank computes: position t sees t + 1 keys."""
    return [int((positions(rank, num_ranks, num_tokens, zigzag) + 1).sum()) for rank in range(num_ranks)]


class Running:
    """Attention of queries to keys that come block by block, by a softmax whose maximum and sum are kept up to date.

    After each `add`, `output` is the sum of the values seen so far, weighted by exp(score - maximum), and `sum` the sum
    of these weights. A new maximum rescales both. (milakov2018; dao2022 for attention)
    """

    def __init__(self, queries: torch.Tensor) -> None:
        self.maximum = torch.full_like(queries[..., 0], -math.inf)
        self.sum = torch.zeros_like(self.maximum)
        self.output = torch.zeros_like(queries)

    def add(self, scores: torch.Tensor, values: torch.Tensor) -> None:
        """Take in a block of keys: scores (..., T, S), -inf where a query does not see one, and values (..., S, K)."""
        maximum = torch.maximum(self.maximum, scores.amax(-1))
        shift = maximum.masked_fill(maximum == -math.inf, 0)  # a query that has seen no key yet: -inf less -inf is NaN
        weights = (scores - shift[..., None]).exp()
        rescale = (self.maximum - shift).exp()
        self.sum = rescale * self.sum + weights.sum(-1)
        self.output = rescale[..., None] * self.output + weights @ values
        self.maximum = maximum

    def result(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The outputs (..., T, K) and the log-sum-exp (..., T) of all scores; 0 and -inf for a query without keys."""
        divisor = self.sum.masked_fill(self.sum == 0, 1)
        return self.output / divisor[..., None], self.maximum + self.sum.log()


def scores_of(queries: torch.Tensor, keys: torch.Tensor, query_positions: torch.Tensor,
              key_positions: torch.Tensor) -> torch.Tensor:
    """Scaled scores (..., T, S) of queries with a block of keys, -inf for keys that come after the query."""
    scores = queries @ keys.mT / math.sqrt(queries.shape[-1])
    return scores.masked_fill(key_positions > query_positions[:, None], -math.inf)


def by_group(q_BHTK: torch.Tensor, num_groups: int) -> torch.Tensor:
    """Queries as (B, G, H/G, T, K), so that the heads that share a head of keys stand together."""
    return q_BHTK.unflatten(1, (num_groups, -1))


def check_heads(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """Raise ValueError for heads of queries that can't share those of keys, or other values than keys."""
    if k.shape != v.shape:
        raise ValueError(f"keys and values need one shape, and have {tuple(k.shape)} and {tuple(v.shape)}")
    if q.shape[1] % k.shape[1]:
        raise ValueError(f"{q.shape[1]} heads of queries can't share {k.shape[1]} heads of keys equally: make the "
                         "first a multiple of the second")


@checked_by(check_heads)
def blockwise_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, block: int) -> torch.Tensor:
    """Causal attention on one process, with `block` keys at a time: never more than T x `block` scores per head.

    Queries (B, H, T, K), keys and values (B, G, T, K) -> (B, H, T, K). Autograd keeps all blocks' scores for backward;
    `ring_attention` does not.
    """
    places = torch.arange(q.shape[2], device=q.device)
    queries = by_group(q, k.shape[1])
    running = Running(queries)
    for keys, values, where in zip(k.split(block, 2), v.split(block, 2), places.split(block)):
        running.add(scores_of(queries, keys[:, :, None], places, where), values[:, :, None])
    return running.result()[0].flatten(1, 2)


def pass_on(tensor: torch.Tensor, group: Group = None) -> Callable[[], torch.Tensor]:
    """Begin to send a tensor to the next rank of the ring; what is returned waits for the previous rank's."""
    rank, num_ranks = dist.get_rank(group), dist.get_world_size(group)
    sent, arrived = tensor.contiguous(), torch.empty_like(tensor, memory_format=torch.contiguous_format)
    works = dist.batch_isend_irecv([
        dist.P2POp(dist.isend, sent, group=group, group_peer=(rank + 1) % num_ranks),
        dist.P2POp(dist.irecv, arrived, group=group, group_peer=(rank - 1) % num_ranks)])

    def wait() -> torch.Tensor:
        for work in works:
            work.wait()
        return arrived
    return wait


class RingAttention(torch.autograd.Function):
    """The autograd function behind `ring_attention`: keys and values of a rank travel together, as one tensor."""

    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, places: list[torch.Tensor],
                group: Group) -> torch.Tensor:
        rank, num_ranks = dist.get_rank(group), dist.get_world_size(group)
        queries, travelling = by_group(q, k.shape[1]), torch.stack([k, v])
        running = Running(queries)
        for hop in range(num_ranks):
            keys, values = travelling[:, :, :, None]
            if hop < num_ranks - 1:
                next_ones = pass_on(travelling, group)  # while it works on these
            owner = (rank - hop) % num_ranks
            running.add(scores_of(queries, keys, places[rank], places[owner]), values)
            if hop < num_ranks - 1:
                travelling = next_ones()
        output, log_sum = running.result()
        ctx.places, ctx.group = places, group
        ctx.save_for_backward(q, k, v, output, log_sum)
        return output.flatten(1, 2)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k, v, output, log_sum = ctx.saved_tensors
        rank, num_ranks = dist.get_rank(ctx.group), dist.get_world_size(ctx.group)
        queries, gradient = by_group(q, k.shape[1]), by_group(gradient, k.shape[1])
        dots = (gradient * output).sum(-1, keepdim=True)
        travelling = torch.stack([k, v])
        q_gradient, arriving = torch.zeros_like(queries), None
        for hop in range(num_ranks):
            keys, values = travelling[:, :, :, None]
            if hop < num_ranks - 1:
                next_ones = pass_on(travelling, ctx.group)
            owner = (rank - hop) % num_ranks
            weights = (scores_of(queries, keys, ctx.places[rank], ctx.places[owner]) - log_sum[..., None]).exp()
            score_gradient = weights * (gradient @ values.mT - dots) / math.sqrt(q.shape[-1])
            q_gradient += score_gradient @ keys
            theirs = torch.stack([(score_gradient.mT @ queries).sum(2), (weights.mT @ gradient).sum(2)])
            if arriving:  # what the ranks before have added to this block's
                theirs += arriving()
            if num_ranks > 1:  # behind their block, and one hop more: home
                arriving = pass_on(theirs, ctx.group)
            if hop < num_ranks - 1:
                travelling = next_ones()
        return q_gradient.flatten(1, 2), *(arriving() if arriving else theirs), None, None


def all_positions(x: torch.Tensor, zigzag: bool, group: Group) -> list[torch.Tensor]:
    """The positions of each rank's tokens, where this rank's are dim 2 of x."""
    num_ranks = dist.get_world_size(group)
    num_tokens = num_ranks * x.shape[2]
    return [positions(rank, num_ranks, num_tokens, zigzag).to(x.device) for rank in range(num_ranks)]


@checked_by(check_heads)
def ring_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, zigzag: bool = True,
                   group: Group = None) -> torch.Tensor:
    """Causal attention where keys and values go round the ranks in a ring; this rank's queries stay (liu2023).

    Queries (B, H, T, K), keys and values (B, G, T, K), all of this rank's tokens, as `positions` has them -> this
    rank's outputs (B, H, T, K). Forward: N-1 hops, each while the rank works on the block that it has. Backward: the
    same hops again, and N hops for the gradients of keys and values, the last of which brings them home. Raises
    ValueError for heads that can't be shared, and for an odd number of tokens in zigzag order.
    """
    return RingAttention.apply(q, k, v, all_positions(q, zigzag, group), group)


def attend_by_position(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, query_positions: torch.Tensor,
                       key_positions: torch.Tensor) -> torch.Tensor:
    """Torch's attention of queries to the keys at their own and earlier positions."""
    sees = key_positions <= query_positions[:, None]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=sees, enable_gqa=True)


@checked_by(check_heads)
def gathered_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, zigzag: bool = True,
                       group: Group = None) -> torch.Tensor:
    """Causal attention to all ranks' keys and values, which are gathered first, as for Llama 3 (llama3).

    Shapes and errors as in `ring_attention`. Backward sums the gradients of keys and values by a reduce-scatter. The
    keys and values of all N T tokens are kept until then.
    """
    places = all_positions(q, zigzag, group)
    keys, values = (all_gather_then_reduce_scatter(x, 2, group) for x in (k, v))
    return attend_by_position(q, keys, values, places[dist.get_rank(group)], torch.cat(places))


class AllToAll(torch.autograd.Function):
    """Cut a tensor along one dim, send each rank its piece, and join the pieces that arrive along another dim."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, cut: int, join: int, group: Group) -> torch.Tensor:
        ctx.cut, ctx.join, ctx.group = cut, join, group
        pieces = torch.stack(x.chunk(dist.get_world_size(group), cut))
        arrived = torch.empty_like(pieces)
        dist.all_to_all_single(arrived, pieces, group=group)
        return torch.cat(arrived.unbind(), join)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return AllToAll.apply(gradient, ctx.join, ctx.cut, ctx.group), None, None, None


def check_ulysses(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, group: Group) -> None:
    """Raise ValueError for heads that can't be shared by each other, or by the ranks."""
    check_heads(q, k, v)
    num_ranks = dist.get_world_size(group)
    for what, x in (("queries", q), ("keys", k)):
        if x.shape[1] % num_ranks:
            raise ValueError(f"{x.shape[1]} heads of {what} can't be shared by {num_ranks} ranks: use a multiple of "
                             f"{num_ranks}, or ring_attention, which cuts no heads")


@checked_by(check_ulysses)
def ulysses_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, zigzag: bool = True,
                      group: Group = None) -> torch.Tensor:
    """Causal attention of all tokens in 1/N of the heads, between two exchanges of heads for tokens (jacobs2023).

    Shapes as in `ring_attention`. An all-to-all gives each rank all N T tokens of its heads, and another brings the
    outputs back; backward does the same with the gradients. Raises ValueError for heads that N ranks can't share.
    """
    whole = torch.cat(all_positions(q, zigzag, group))
    queries, keys, values = (AllToAll.apply(x, 1, 2, group) for x in (q, k, v))
    return AllToAll.apply(attend_by_position(queries, keys, values, whole, whole), 2, 1, group)


class ContextAttention(nn.Module):
    """The attention of a GPT's block with its projections, where `attend` looks at the tokens of all ranks."""

    def __init__(self, attention: Attention, attend: Attend) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = attention.q, attention.k, attention.v, attention.out
        self.head_width, self.attend = attention.head_width, attend

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        """This rank's tokens (B, T, D) -> (B, T, D)."""
        q_BHTK, k_BHTK, v_BHTK = (project(x_BTD).unflatten(-1, (-1, self.head_width)).transpose(1, 2)
                                  for project in (self.q, self.k, self.v))
        return self.out(self.attend(q_BHTK, k_BHTK, v_BHTK).transpose(1, 2).flatten(2))


def check_dropout(gpt: GPT) -> None:
    """Raise ValueError for a model with dropout, which these ways of attention do not have."""
    if gpt.config.dropout:
        raise ValueError(f"this model has a dropout of {gpt.config.dropout}, and context-parallel attention drops "
                         "nothing: make the model with dropout=0")


@checked_by(check_dropout)
def cut_by_tokens(gpt: GPT, attention: Callable[..., torch.Tensor] = ring_attention, zigzag: bool = True,
                  group: Group = None) -> GPT:
    """Have a GPT work on the tokens of this rank, in place, and return it: it then takes those at its `positions`.

    Attention looks at the tokens of all ranks of the group, in one of this module's three ways. Weights stay as they
    are. Cut it by tokens before `split_gpt` cuts its layers. Raises ValueError for a model with dropout.
    """
    rank, num_ranks = dist.get_rank(group), dist.get_world_size(group)

    def own_positions(_: nn.Module, inputs: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
        places_T, = inputs
        return (positions(rank, num_ranks, num_ranks * len(places_T), zigzag).to(places_T.device),)

    for block in gpt.blocks:
        block.attention = ContextAttention(block.attention, partial(attention, zigzag=zigzag, group=group))
    gpt.position_embedding.register_forward_pre_hook(own_positions)
    return gpt


class ContextParallel:
    """A GPT whose sequences are cut over the ranks of a group, and a training step of the whole batch.

    All ranks get rank 0's weights. `attention` is one of this module's three ways. `gpt` is taken over and stays on its
    device. Raises ValueError for a model with dropout.
    """

    @checked_by(check_dropout)
    def __init__(self, gpt: GPT, make_optimizer: MakeOptimizer, attention: Callable[..., torch.Tensor] = ring_attention,
                 zigzag: bool = True, group: Group = None) -> None:
        broadcast_state(gpt)
        self.module, self.zigzag, self.group = cut_by_tokens(gpt, attention, zigzag, group), zigzag, group
        self.optimizer = make_optimizer(gpt.parameters())

    def share(self, batch: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """This rank's tokens of each of the tensors (B, N T), and last their positions (T,)."""
        tensors = list(batch)
        own = positions(dist.get_rank(self.group), dist.get_world_size(self.group), tensors[0].shape[1], self.zigzag)
        own = own.to(tensors[0].device)
        return [*(tensor[:, own] for tensor in tensors), own]

    def gradients(self, inputs_BT: torch.Tensor, targets_BT: torch.Tensor) -> torch.Tensor:
        """Run forward and backward of a batch whose whole sequences all ranks pass; each takes its tokens of it.

        Returns the mean loss of this rank's tokens: their mean over the ranks is the batch's. Gradients are then those
        of the whole batch. Raises ValueError for tokens that can't be cut into equal chunks.
        """
        inputs, targets, _ = self.share([inputs_BT, targets_BT])
        loss = self.module.loss(self.module(inputs), targets)
        loss.backward()
        average_gradients(self.module.parameters(), self.group)
        return loss.detach()

    def step(self, inputs_BT: torch.Tensor, targets_BT: torch.Tensor) -> torch.Tensor:
        """`gradients`, then the optimizer's step; returns the same loss."""
        loss = self.gradients(inputs_BT, targets_BT)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss
