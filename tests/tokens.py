"""A layer of experts on several ranks, right and wrong, for tests that record it on real ranks."""
from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from book.launch import launch, rank_device
from book.record.tokens import Work, follow_tokens
from book.trace import Trace
from tests.by_value import sent_by_value
from tests.once import once

sent_by_value(__name__)


def choices_of(rank: int, num_tokens: int, num_experts: int, top_k: int, skew: float) -> Tensor:
    """Which experts a rank's tokens want: the last one is the more popular, the more skew there is."""
    scores = torch.randn(num_tokens, num_experts, generator=torch.Generator().manual_seed(rank))
    scores[:, -1] += skew
    return scores.topk(top_k).indices


def _moved(rows: Tensor, give: list[int], take: list[int]) -> Tensor:
    arrived = rows.new_empty(sum(take), *rows.shape[1:])
    dist.all_to_all_single(arrived, rows.contiguous(), take, give)
    return arrived


def _watched(num_tokens: int, num_experts: int, top_k: int, skew: float, capacity: int, fault: str) -> Tensor:
    device = rank_device()
    dist.init_process_group()
    n = dist.get_world_size()
    choices = choices_of(dist.get_rank(), num_tokens, num_experts, top_k, skew).to(device)
    places = torch.nn.functional.one_hot(choices.T.flatten(), num_experts).cumsum(0)
    place = places.gather(1, choices.T.flatten()[:, None])[:, 0].view(top_k, -1).T

    def layer(tokens: Tensor, work: Work) -> Tensor:
        token, choice = (place <= (capacity or num_tokens)).nonzero(as_tuple=True)
        order = choices[token, choice].argsort(stable=True)
        per_expert = choices[token, choice].bincount(minlength=num_experts)
        theirs = _moved(per_expert, [num_experts // n] * n, [num_experts // n] * n)
        give, take = (counts.view(n, -1).sum(1).tolist() for counts in (per_expert, theirs))
        experts = torch.arange(num_experts // n, device=device).repeat(n).repeat_interleave(theirs)
        if fault == "sorted":
            experts = experts.sort().values
        back = _moved(work(_moved(tokens[token[order]], give, take), experts), take, give)
        to = token if fault == "not in order" else token[order]
        return torch.zeros_like(tokens).index_add(0, to, back)

    return follow_tokens(layer, choices, num_experts)


def recorded(num_ranks: int = 4, num_experts: int = 4, top_k: int = 1, skew: float = 0.0, capacity: int = 0,
             fault: str = "", num_tokens: int = 8) -> Trace:
    """The trace of a run; without a `capacity` no choice is dropped."""
    arguments = num_tokens, num_experts, top_k, skew, capacity, fault
    name = f"tokens-{num_ranks}-{'-'.join(str(one).replace(' ', '-') for one in arguments)}"
    return once(name, lambda: launch(_watched, num_ranks, *arguments, record=True)).trace
