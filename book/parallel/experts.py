"""L2: expert parallelism as chapter 09 builds it: a layer whose experts are on different ranks.

A router chooses experts for each token. An all-to-all takes each token's row to the ranks that have its experts, and
another brings back what they made of it. Megatron-Core's is `MoELayer`, with `moe_token_dispatcher_type="alltoall"`.

Shapes: N tokens of a rank, width D, hidden width M, E experts in all, K choices of each token, A rows that arrive at a
rank. A group of None means all ranks.
"""
from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from book.mesh import Mesh, MeshError
from book.parallel.checked import checked_by
from book.parallel.data import broadcast_state
from book.parallel.hybrid import average_gradients, axis_groups
from book.parallel.tensor.operators import Group

__all__ = ["ExpertParallel", "MoE", "Routing", "Trip", "average_expert_gradients", "balancing_loss", "bytes_sent",
           "capacity_of", "combine", "dispatch", "exchange_rows", "has_place", "loads", "moved_bias", "route", "work"]


# Routing

class Routing(NamedTuple):
    """The probabilities (N, E) of all experts, and of each token's choices (N, K), best first, the gates (N, K)."""

    probabilities: torch.Tensor
    gates: torch.Tensor
    choices: torch.Tensor


def route(tokens_ND: torch.Tensor, router_DE: torch.Tensor, top_k: int,
          bias_E: torch.Tensor | None = None) -> Routing:
    """Choose the `top_k` likeliest experts for each token; a choice's gate is its probability (fedus2022).

    A bias is added where experts are chosen, and not to the gates (deepseekv3).
    """
    probabilities = (tokens_ND @ router_DE).softmax(-1)
    ranked = probabilities if bias_E is None else probabilities + bias_E
    choices = ranked.topk(top_k, -1).indices
    return Routing(probabilities, probabilities.gather(-1, choices), choices)


def capacity_of(num_tokens: int, num_experts: int, top_k: int, factor: float) -> int:
    """The places of each expert for the choices of `num_tokens` tokens: `factor` times an equal share, rounded up."""
    return math.ceil(factor * num_tokens * top_k / num_experts)


def has_place(choices_NK: torch.Tensor, num_experts: int, capacity: int | None, over_batch: bool = False,
              group: Group = None) -> torch.Tensor:
    """Which choices (N, K) get one of their expert's `capacity` places: first choices before second ones, in order.

    The places are for this process's tokens, or with `over_batch` for those of all ranks of the group, in the order of
    ranks. Without a capacity all have one.
    """
    if capacity is None:
        return torch.ones_like(choices_NK, dtype=torch.bool)
    chosen_KNE = F.one_hot(choices_NK.T, num_experts)
    counts, rank = chosen_KNE.sum(1)[None], 0  # ranks, choices, experts
    if over_batch:
        own, counts = counts, counts.repeat(dist.get_world_size(group), 1, 1)
        dist.all_gather_into_tensor(counts, own, group=group)
        rank = dist.get_rank(group)
    of_all = counts.sum(0)
    taken = of_all.cumsum(0) - of_all + counts[:rank].sum(0)
    queue_KNE = chosen_KNE.cumsum(1) + taken[:, None]
    return (queue_KNE.gather(2, choices_NK.T[..., None])[..., 0] <= capacity).T


# Balance

def loads(choices_NK: torch.Tensor, num_experts: int) -> torch.Tensor:
    """How many choices (E,) fell on each expert. Those of a batch are the sum over its ranks."""
    return choices_NK.flatten().bincount(minlength=num_experts)


def balancing_loss(probabilities_NE: torch.Tensor, loads_E: torch.Tensor) -> torch.Tensor:
    """E times the sum over experts of their share of choices times their mean probability: 1 if all is even.

    With the loads of the whole batch, the mean of the ranks' losses is the batch's. (fedus2022)
    """
    return len(loads_E) * (loads_E * probabilities_NE.mean(0)).sum() / loads_E.sum()


def moved_bias(bias_E: torch.Tensor, loads_E: torch.Tensor, rate: float) -> torch.Tensor:
    """The bias, up by `rate` for experts with less than the mean load and down for those with more (deepseekv3)."""
    mean = loads_E.to(bias_E.dtype).mean()
    return bias_E + rate * (mean - loads_E).sign()


# To the experts and back

class RowExchange(torch.autograd.Function):
    """The autograd function behind `exchange_rows`."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, give: Sequence[int], take: Sequence[int], group: Group) -> torch.Tensor:
        ctx.give, ctx.take, ctx.group = give, take, group
        arrived = rows.new_empty(sum(take), *rows.shape[1:])
        dist.all_to_all_single(arrived, rows.contiguous(), take, give, group=group)
        return arrived

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return RowExchange.apply(gradient, ctx.take, ctx.give, ctx.group), None, None, None


def exchange_rows(rows: torch.Tensor, give: Sequence[int], take: Sequence[int], group: Group = None) -> torch.Tensor:
    """Send the first give[0] rows to rank 0, the next give[1] to rank 1, ...; return what arrives, in ranks' order.

    take[r] rows come from rank r. Backward sends each row's gradient to where the row came from.
    """
    return RowExchange.apply(rows, give, take, group)


class Trip(NamedTuple):
    """What `combine` has to know of the rows that were sent, in their order: which token each is, and which choice.

    They are rows and columns of choices (N, K). `give` and `take` are how many rows go to and come from each rank.
    """

    tokens: torch.Tensor
    columns: torch.Tensor
    give: list[int]
    take: list[int]


def dispatch(tokens_ND: torch.Tensor, choices_NK: torch.Tensor, kept_NK: torch.Tensor, num_experts: int,
             group: Group = None) -> tuple[torch.Tensor, torch.Tensor, Trip]:
    """Send each token to the ranks of its chosen experts, for the choices that are kept; rank r has the r-th block.

    Returns the rows (A, D) that arrive, which of this rank's experts each is for (A,), and the way back.
    """
    num_ranks = dist.get_world_size(group)
    tokens, columns = kept_NK.nonzero(as_tuple=True)
    order = choices_NK[tokens, columns].argsort(stable=True)
    tokens, columns = tokens[order], columns[order]
    to_experts = loads(choices_NK[tokens, columns], num_experts)
    for_mine = torch.empty_like(to_experts)  # from rank 0 for each of this rank's experts, from rank 1, ...
    dist.all_to_all_single(for_mine, to_experts, group=group)
    give, take = (counts.view(num_ranks, -1).sum(1).tolist() for counts in (to_experts, for_mine))
    arrived = exchange_rows(tokens_ND[tokens], give, take, group)
    experts = torch.arange(num_experts // num_ranks, device=tokens_ND.device).repeat(num_ranks)
    return arrived, experts.repeat_interleave(for_mine), Trip(tokens, columns, give, take)


def work(rows_AD: torch.Tensor, experts_A: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    """What each row's expert makes of it (A, D); `up` is (experts, D, M) and `down` (experts, M, D)."""
    done = torch.zeros_like(rows_AD)
    for expert, (into, out_of) in enumerate(zip(up, down)):
        own = (experts_A == expert).nonzero()[:, 0]
        done = done.index_copy(0, own, F.gelu(rows_AD[own] @ into) @ out_of)
    return done


def combine(done_AD: torch.Tensor, gates_NK: torch.Tensor, trip: Trip, group: Group = None) -> torch.Tensor:
    """Send the experts' rows back to their tokens; returns the sum (N, D) of each token's rows, weighted by gates."""
    returned = exchange_rows(done_AD, trip.take, trip.give, group)
    weighted = returned * gates_NK[trip.tokens, trip.columns, None]
    return returned.new_zeros(len(gates_NK), returned.shape[1]).index_add(0, trip.tokens, weighted)


def bytes_sent(give: Sequence[int], take: Sequence[int], rank: int, row_bytes: int) -> tuple[int, int]:
    """Bytes of rows that a rank sends in `dispatch` and `combine`, forward and backward, of `row_bytes` each.

    Each way it sends once what it gives and once what it takes. What it gives itself is not sent. (derived)
    """
    rows = sum(give) + sum(take) - give[rank] - take[rank]
    return rows * row_bytes, rows * row_bytes


# Layers

class MoE(nn.Module):
    """A layer of experts on one process, by its definition: every expert works on every token, most have the weight 0.

    The tokens are cut into `num_groups` groups, and in each of them every expert has `capacity` places (None: as many
    as are wanted). `routing` is the last batch's. `bias` is no parameter: set it to `moved_bias`.
    """

    def __init__(self, width: int, hidden: int, num_experts: int, top_k: int, capacity: int | None = None,
                 num_groups: int = 1) -> None:
        super().__init__()
        self.router = nn.Parameter(torch.randn(width, num_experts) / width ** 0.5)
        self.up = nn.Parameter(torch.randn(num_experts, width, hidden) / width ** 0.5)
        self.down = nn.Parameter(torch.randn(num_experts, hidden, width) / hidden ** 0.5)
        self.register_buffer("bias", torch.zeros(num_experts))
        self.top_k, self.capacity, self.num_groups = top_k, capacity, num_groups

    def forward(self, tokens_ND: torch.Tensor) -> torch.Tensor:
        """Tokens (N, D) -> the outputs of their experts, weighted by gates (N, D); 0 for a token without a place."""
        self.routing = routing = route(tokens_ND, self.router, self.top_k, self.bias)
        kept_NK = torch.cat([has_place(choices, len(self.bias), self.capacity)
                             for choices in routing.choices.chunk(self.num_groups)])
        weights_NE = torch.zeros_like(routing.probabilities).scatter(1, routing.choices, routing.gates * kept_NK)
        outputs = torch.stack([F.gelu(tokens_ND @ up) @ down for up, down in zip(self.up, self.down)])
        return torch.einsum("ne,end->nd", weights_NE, outputs)


def average_expert_gradients(layer: ExpertParallel, groups: Mapping[str, dist.ProcessGroup]) -> None:
    """Make the gradients of each rank's loss on its own tokens those of the mean of all ranks' losses.

    The router is on all ranks, so its gradient is averaged over all. An expert's gradient already holds what all ranks
    of its group "ep" have sent: it is averaged over its replicas ("efsdp"), and divided by the size of "ep".
    """
    average_gradients([layer.router], None)
    average_gradients([layer.up, layer.down], groups["efsdp"])
    for parameter in (layer.up, layer.down):
        parameter.grad /= dist.get_world_size(groups["ep"])


def check_experts(moe: MoE, mesh: Mesh | None) -> None:
    """Raise MeshError for a mesh with other axes, ValueError for experts that can't be shared equally."""
    if mesh and not {"efsdp", "ep"} <= set(mesh.axes):
        raise MeshError(f"experts need a mesh of efsdp and ep, not of {', '.join(mesh.axes)}: an axis that is not used "
                        "has the size 1")
    num_ranks = mesh.size("ep") if mesh else dist.get_world_size()
    if len(moe.bias) % num_ranks:
        raise ValueError(f"{len(moe.bias)} experts can't be shared by {num_ranks} ranks equally: use a multiple of "
                         f"{num_ranks}")


class ExpertParallel(nn.Module):
    """A layer of experts that are shared by the ranks of "ep" in a mesh, where each rank has tokens of its own.

    The mesh has the axes "efsdp" and "ep", and all ranks: those that differ along "efsdp" hold the same experts. None
    means "ep" alone. Along further axes the layer is another one or a copy: then average its gradients by `groups`
    yourself. All ranks get rank 0's weights and bias; `moe` is taken over and stays on its device. Its capacity is that
    for the tokens of one rank, or with `over_batch` for those of all. `groups` are `axis_groups(mesh)`, where several
    layers share them. Raises MeshError for a mesh without these axes or with a wrong number of ranks, ValueError for
    experts that can't be shared equally.
    """

    @checked_by(check_experts)
    def __init__(self, moe: MoE, mesh: Mesh | None = None, over_batch: bool = False,
                 groups: Mapping[str, dist.ProcessGroup] | None = None) -> None:
        super().__init__()
        broadcast_state(moe)
        mesh = mesh or Mesh.of({"efsdp": 1, "ep": dist.get_world_size()})
        self.groups, place = groups or axis_groups(mesh), mesh.coordinates(dist.get_rank())["ep"]
        self.router = moe.router
        self.register_buffer("bias", moe.bias)
        self.up, self.down = (nn.Parameter(whole.detach().chunk(mesh.size("ep"))[place].clone())
                              for whole in (moe.up, moe.down))
        self.top_k, self.capacity, self.over_batch = moe.top_k, moe.capacity, over_batch

    def forward(self, tokens_ND: torch.Tensor) -> torch.Tensor:
        """This rank's tokens (N, D) -> their outputs (N, D). All ranks have to call it, and its backward."""
        self.routing = routing = route(tokens_ND, self.router, self.top_k, self.bias)
        kept_NK = has_place(routing.choices, len(self.bias), self.capacity, self.over_batch)
        arrived, experts, trip = dispatch(tokens_ND, routing.choices, kept_NK, len(self.bias), self.groups["ep"])
        return combine(work(arrived, experts, self.up, self.down), routing.gates, trip, self.groups["ep"])

    def average_gradients(self) -> None:
        """Call it after backward: see `average_expert_gradients`."""
        average_expert_gradients(self, self.groups)
