"""Attention over ranks that hold some tokens each: equal to one process in float64, and the bytes of the formulas."""
from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from book.cost.links import BUS_FACTORS
from book.launch import Run, launch, rank_device
from book.parallel import GPT, GPTConfig
from book.parallel.context import (ContextParallel, Running, blockwise_attention, bytes_sent, gathered_attention,
                                   positions, ring_attention, scores_per_rank, ulysses_attention)
from tests.by_value import sent_by_value

sent_by_value(__name__)

WAYS = {"ring": ring_attention, "gathered": gathered_attention, "ulysses": ulysses_attention}
NUM_SEQUENCES, NUM_HEADS, HEAD_WIDTH = 2, 4, 3
CONFIG = GPTConfig(vocab_size=13, context=16, num_layers=2, num_heads=4, width=16, dtype=torch.float64)


def whole(num_tokens: int, num_groups: int) -> list[torch.Tensor]:
    """Queries, keys, values and the gradient of the output, of all tokens; the same on every rank."""
    draw = partial(torch.randn, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    q, k, v, up = (draw(NUM_SEQUENCES, heads, num_tokens, HEAD_WIDTH)
                   for heads in (NUM_HEADS, num_groups, num_groups, NUM_HEADS))
    return [q.requires_grad_(), k.requires_grad_(), v.requires_grad_(), up]


def both_ways(attend: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, up: torch.Tensor) -> list[torch.Tensor]:
    """The output, and the gradients of queries, keys and values."""
    output = attend(q, k, v)
    output.backward(up)
    return [output.detach(), q.grad, k.grad, v.grad]


def alone(num_tokens: int, num_groups: int) -> list[torch.Tensor]:
    """What one process computes with torch's attention."""
    return both_ways(partial(F.scaled_dot_product_attention, is_causal=True, enable_gqa=True),
                     *whole(num_tokens, num_groups))


def in_rank(num_tokens: int, num_groups: int, zigzag: bool, num_replicas: int = 1) -> dict[str, float]:
    """In a rank: how far its part is at most from what one process computes, for each way that these heads allow."""
    dist.init_process_group()
    size = dist.get_world_size() // num_replicas
    groups = [dist.new_group(range(first, first + size)) for first in range(0, dist.get_world_size(), size)]
    group = groups[dist.get_rank() // size] if num_replicas > 1 else None
    own = positions(dist.get_rank(group), size, num_tokens, zigzag)
    wanted, worst = alone(num_tokens, num_groups), {}
    for way, attend in WAYS.items():
        if way != "ulysses" or num_groups % size == 0:
            mine = [x.detach()[:, :, own].requires_grad_(x.requires_grad) for x in whole(num_tokens, num_groups)]
            found = both_ways(partial(attend, zigzag=zigzag, group=group), *mine)
            worst[way] = max((a - b[:, :, own]).abs().max().item() for a, b in zip(found, wanted))
    return worst


CASES = [(2, 16, 4, True), (4, 16, 4, False), (2, 12, 2, True), (3, 12, 1, True), (1, 8, 4, True)]
BY = {"send": "ring", "all_gather": "gathered", "reduce_scatter": "gathered", "all_to_all": "ulysses"}


def counted(run: Run, rank: int) -> dict[str, float]:
    """Bytes that a rank sent in each way of attention, which its messages and collectives tell apart."""
    found = dict.fromkeys(run[rank], 0.0)
    for event in run.trace.of_rank(rank):
        if event.kind == "send":
            found["ring"] += event.num_bytes
        elif event.kind == "collective":
            found[BY[event.op]] += event.num_bytes * BUS_FACTORS[event.op](run.trace.world_size)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_way_equals_one_process_and_sends_the_bytes_of_its_formula(case: tuple) -> None:
    world_size, num_tokens, num_groups, _ = case
    run = launch(in_rank, *case, record=True)
    per_head = NUM_SEQUENCES * num_tokens // world_size * HEAD_WIDTH * 8
    for rank, worst in enumerate(run):
        assert max(worst.values()) < 1e-12 and len(worst) == 3 - (num_groups == 1)
        formula = {way: sum(bytes_sent(way, world_size, NUM_HEADS * per_head, num_groups * per_head)) for way in worst}
        assert counted(run, rank) == pytest.approx(formula)


@pytest.mark.slow
def test_each_group_attends_by_itself() -> None:
    assert max(max(worst.values()) for worst in launch(in_rank, 4, 8, 2, True, 2)) < 1e-12


def test_positions_and_the_scores_that_they_cost() -> None:
    assert positions(1, 4, 16, zigzag=False).tolist() == [4, 5, 6, 7]
    assert positions(1, 4, 16).tolist() == [2, 3, 12, 13]
    assert scores_per_rank(4, 16, zigzag=False) == [10, 26, 42, 58]
    assert scores_per_rank(4, 16) == [34] * 4
    for zigzag in (False, True):
        assert torch.cat([positions(rank, 3, 12, zigzag) for rank in range(3)]).sort()[0].tolist() == list(range(12))
        assert sum(scores_per_rank(3, 12, zigzag)) == 12 * 13 // 2
    with pytest.raises(ValueError, match="12 tokens can't be shared by 4 ranks with two chunks each in zigzag order: "
                                         "use a multiple of 8"):
        positions(0, 4, 12)
    with pytest.raises(ValueError, match="10 tokens can't be shared by 4 ranks with one chunk each"):
        scores_per_rank(4, 10, zigzag=False)


def test_a_running_softmax_is_the_softmax_whatever_comes_first() -> None:
    q, k, v, _ = (x.detach() for x in whole(8, 4))
    scores = (q @ k.mT).masked_fill(torch.ones(8, 8).triu(1).bool(), -math.inf)
    scores[..., 3] += 900  # exp of it alone is infinite
    for blocks in ([range(8)], [range(4, 8), range(4)], [[7], [0, 1, 2], [5, 6], [3, 4]]):
        running = Running(q)
        for block in map(list, blocks):
            running.add(scores[..., block], v[:, :, block])
        output, log_sum = running.result()
        assert torch.allclose(output, scores.softmax(-1) @ v, rtol=0, atol=1e-12)
        assert torch.allclose(log_sum, scores.logsumexp(-1), rtol=0, atol=1e-12)


def test_a_query_without_keys_is_no_nan() -> None:
    running = Running(torch.randn(2, 3))
    running.add(torch.tensor([[-math.inf, -math.inf], [1.0, -math.inf]]), torch.ones(2, 3))
    output, log_sum = running.result()
    assert output.tolist() == [[0, 0, 0], [1, 1, 1]] and log_sum.tolist() == [-math.inf, 1]


@pytest.mark.parametrize("block, num_groups", [(1, 4), (3, 2), (8, 1), (99, 4)])
def test_blockwise_attention_equals_torch_s(block: int, num_groups: int) -> None:
    found = both_ways(partial(blockwise_attention, block=block), *whole(8, num_groups))
    assert max((a - b).abs().max().item() for a, b in zip(found, alone(8, num_groups))) < 1e-12


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets, (B, T) each: a token's target is the next one, also where the sequence is cut."""
    tokens = torch.randint(CONFIG.vocab_size, (3, CONFIG.context + 1), generator=torch.Generator().manual_seed(step))
    return tokens[:, :-1], tokens[:, 1:]


def train(way: str, zigzag: bool) -> list[float]:
    """In a rank: how far its losses, gradients and weights are at most from those of one process, in two steps."""
    device = rank_device()
    gpts = [GPT.seeded(CONFIG, seed).to(device) for seed in (dist.get_rank(), 0)]
    make_optimizer = partial(torch.optim.SGD, lr=0.5)
    cut, model = ContextParallel(gpts[0], make_optimizer, WAYS[way], zigzag), gpts[1]
    optimizer, worst = make_optimizer(model.parameters()), []
    for step in range(2):
        inputs, targets = (x.to(device) for x in batch(step))
        wanted = model.loss(model(inputs), targets)
        wanted.backward()
        loss = cut.gradients(inputs, targets)
        dist.all_reduce(loss)
        worst += [abs(loss.item() / dist.get_world_size() - wanted.item())]
        worst += [(a.grad - b.grad).abs().max().item() for a, b in both(cut.module, model)]
        for one in (cut.optimizer, optimizer):
            one.step()
            one.zero_grad()
        worst += [(a - b).abs().max().item() for a, b in both(cut.module, model)]
    return worst


def both(cut: GPT, model: GPT) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The parameters of two models, by their names."""
    theirs = dict(model.named_parameters())
    return [(p, theirs[name]) for name, p in cut.named_parameters()]


def train_every_way() -> list[list[float]]:
    """In a rank: `train` for each way."""
    dist.init_process_group()
    return [train(*way) for way in (("ring", True), ("ring", False), ("gathered", True), ("ulysses", False))]


@pytest.mark.slow
def test_training_on_cut_sequences_equals_one_process() -> None:
    for ways in launch(train_every_way, 4):
        for worst in ways:
            assert len(worst) == 2 + 4 * 37 and max(worst) < 1e-12


def refused() -> list[str]:
    """In a rank: the errors for what can't be."""
    dist.init_process_group()
    q, k = torch.randn(1, 4, 6, 2), torch.randn(1, 3, 6, 2)
    said = []
    for attend in (lambda: ring_attention(q, k, k), lambda: gathered_attention(q, q, k),
                   lambda: ulysses_attention(k, k, k), lambda: ring_attention(q[:, :, :3], q[:, :, :3], q[:, :, :3]),
                   lambda: ContextParallel(GPT(replace(CONFIG, dropout=0.1)), torch.optim.SGD)):
        try:
            attend()
        except ValueError as error:
            said.append(str(error))
    return said


@pytest.mark.slow
def test_what_can_not_be_raises_a_clear_error() -> None:
    for said in launch(refused, 2):
        for words, expected in zip(said, (
                "4 heads of queries can't share 3 heads of keys equally", "keys and values need one shape",
                "3 heads of queries can't be shared by 2 ranks: use a multiple of 2", "6 tokens can't be shared",
                "has a dropout of 0.1"), strict=True):
            assert expected in words


def test_a_way_that_is_not_there_is_told() -> None:
    with pytest.raises(ValueError, match="attention can't be 'rings'"):
        bytes_sent("rings", 2, 8, 8)
