"""Experts on different ranks: equal to one process in float64, with and without drops, and the bytes of the formula."""
from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from book.cost import (Experts, LayerShape, Layout, Transformer, bytes_by_axis, cluster_of, estimate, flows,
                       hybrid_sent_bytes)
from book.launch import launch, rank_device
from book.mesh import Mesh, MeshError
from book.parallel import GPT, GPTConfig
from book.parallel.axes import ExpertMLP, with_experts
from book.parallel.experts import (ExpertParallel, MoE, average_expert_gradients, balancing_loss, bytes_sent,
                                   capacity_of, has_place, loads, moved_bias, route)
from book.parallel.hybrid import axis_groups
from book.parallel.tensor import all_gather_then_reduce_scatter, reduce_scatter_then_all_gather, split_gpt
from book.record import paused
from tests.by_value import sent_by_value

sent_by_value(__name__)

NUM_TOKENS, WIDTH, HIDDEN, NUM_EXPERTS, TOP_K = 32, 6, 5, 8, 2


def layer(seed: int, capacity: int | None, num_groups: int = 1) -> MoE:
    """A layer with weights of this seed, and a bias that changes some choices."""
    torch.manual_seed(seed)
    moe = MoE(WIDTH, HIDDEN, NUM_EXPERTS, TOP_K, capacity, num_groups).double()
    moe.bias += torch.linspace(-0.1, 0.1, NUM_EXPERTS)
    return moe


def whole() -> tuple[torch.Tensor, torch.Tensor]:
    """All ranks' tokens and the gradient of their outputs, in float64; the same on every rank."""
    draw = partial(torch.randn, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    return draw(NUM_TOKENS, WIDTH), draw(NUM_TOKENS, WIDTH)


def run(moe: Any, tokens: torch.Tensor, up: torch.Tensor) -> dict[str, torch.Tensor]:
    """Outputs of the layer and the gradients of a loss that is a mean over the tokens, with a loss for balance."""
    tokens = tokens.clone().requires_grad_()
    outputs = moe(tokens)
    counts = loads(moe.routing.choices, NUM_EXPERTS)
    if isinstance(moe, ExpertParallel):
        dist.all_reduce(counts)
    loss = (outputs * up).sum(-1).mean() + balancing_loss(moe.routing.probabilities, counts)
    loss.backward()
    if isinstance(moe, ExpertParallel):
        moe.average_gradients()
    return {"outputs": outputs.detach(), "tokens": tokens.grad, "loss": loss.detach(), "loads": counts} | {
        name: p.grad for name, p in moe.named_parameters()}


def in_rank(num_replicas: int, capacity: int | None, over_batch: bool) -> tuple[float, dict[str, int], list[int]]:
    """In a rank: how far it is at most from one process, what it sent by its own count, and by the formula."""
    device = rank_device()
    dist.init_process_group()
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    mesh = Mesh.of({"efsdp": num_replicas, "ep": num_ranks // num_replicas})
    mine = ExpertParallel(layer(rank, capacity).to(device), None if num_replicas == 1 else mesh, over_batch)
    with Counted() as counted:
        found = run(mine, *(x.chunk(num_ranks)[rank].to(device) for x in whole()))
    wanted = run(layer(0, capacity, 1 if over_batch else num_ranks).to(device), *(x.to(device) for x in whole()))
    place = mesh.coordinates(rank)["ep"]
    found["tokens"] = found["tokens"] / num_ranks  # of the mean of all ranks' losses
    dist.all_reduce(found["loss"])
    found["loss"] /= num_ranks
    for name in ("outputs", "tokens"):
        wanted[name] = wanted[name].chunk(num_ranks)[rank]
    for name in ("up", "down"):
        wanted[name] = wanted[name].chunk(mesh.size("ep"))[place]
    return max((found[name] - wanted[name]).abs().max().item() for name in wanted), counted.sent, counted.formula(place)


class Counted:
    """Bytes of rows that go to other ranks in all-to-alls of the block, call by call."""

    def __enter__(self) -> Counted:
        self.sent, self.splits, self.plain = [], [], dist.all_to_all_single
        dist.all_to_all_single = self.count
        return self

    def __exit__(self, *_: object) -> None:
        dist.all_to_all_single = self.plain

    def count(self, arrived: torch.Tensor, rows: torch.Tensor, take: Any = None, give: Any = None,
              group: Any = None) -> None:
        self.plain(arrived, rows, take, give, group=group)
        if give is not None:  # not the numbers of rows
            own = give[dist.get_rank(group)]
            self.sent.append((sum(give) - own) * rows[0:1].nbytes if len(rows) else 0)
            self.splits.append((give, take))

    def formula(self, place: int) -> list[int]:
        return list(bytes_sent(*self.splits[0], place, WIDTH * 8))


CASES = [(1, 1, 2, False), (2, 1, None, False), (2, 1, 3, False), (4, 1, None, False), (4, 1, 1, False),
         (4, 1, 5, True), (4, 2, None, False), (4, 2, 2, False), (4, 4, 3, True)]


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=str)
def test_experts_on_ranks_equal_one_process_and_send_the_bytes_of_the_formula(case: tuple) -> None:
    for worst, sent, formula in launch(in_rank, *case):
        assert worst < 1e-12
        assert len(sent) == 4 and [sum(sent[:2]), sum(sent[2:])] == formula


def test_a_layer_that_drops_nothing_is_the_same_in_one_group_or_many() -> None:
    tokens, _ = whole()
    assert torch.equal(layer(0, None)(tokens), layer(0, None, 4)(tokens))
    assert torch.equal(layer(0, NUM_TOKENS)(tokens), layer(0, None)(tokens))
    assert not torch.allclose(layer(0, 8)(tokens), layer(0, 2, 4)(tokens))


def test_a_bias_chooses_and_does_not_weigh() -> None:
    tokens, router = torch.eye(2, dtype=torch.float64), torch.tensor([[3.0, 1, 2], [0, 1, 2]], dtype=torch.float64)
    plain, biased = route(tokens, router, 2), route(tokens, router, 2, torch.tensor([0.0, 1, 0]))
    assert plain.choices.tolist() == [[0, 2], [2, 1]] and biased.choices.tolist() == [[1, 0], [1, 2]]
    assert torch.equal(biased.gates, router.softmax(-1).gather(1, biased.choices))


def test_first_choices_have_places_before_second_ones() -> None:
    choices = torch.tensor([[1, 0], [0, 1], [0, 1], [0, 2]])
    assert has_place(choices, 3, 2).tolist() == [[True, False], [True, True], [True, False], [False, True]]
    assert has_place(choices, 3, None).all() and not has_place(choices, 3, 0).any()
    assert capacity_of(32, 8, 2, 1.25) == 10 and capacity_of(3, 8, 1, 1.0) == 1


def test_balance_is_one_and_more_where_it_is_not() -> None:
    even = torch.full((4, 4), 0.25)
    assert balancing_loss(even, torch.tensor([2, 2, 2, 2])) == 1
    skewed = torch.tensor([[1.0, 0, 0, 0]] * 4)
    assert balancing_loss(skewed, torch.tensor([4, 0, 0, 0])) == 4


def test_the_bias_of_loaded_experts_falls_until_loads_are_even() -> None:
    assert moved_bias(torch.zeros(3), torch.tensor([4, 1, 1]), 0.5).tolist() == [-0.5, 0.5, 0.5]
    assert moved_bias(torch.ones(2), torch.tensor([3, 3]), 0.5).tolist() == [1, 1]
    moe, tokens = layer(0, None), torch.randn(512, WIDTH, generator=torch.Generator().manual_seed(1)).double() + 1
    spread = []
    for _ in range(400):
        moe(tokens)
        counts = loads(moe.routing.choices, NUM_EXPERTS)
        moe.bias = moved_bias(moe.bias, counts, 0.001)
        spread.append(counts.max().item() / counts.double().mean().item())
    assert spread[0] > 1.8 and spread[-1] < 1.1


def refused() -> list[str]:
    """In a rank: the errors for what can't be."""
    dist.init_process_group()
    said = []
    for moe, mesh in ((MoE(4, 4, 3, 1), None), (MoE(4, 4, 2, 1), Mesh.of({"dp": 1, "ep": 2})),
                      (MoE(4, 4, 2, 1), Mesh.of({"efsdp": 2, "ep": 2}))):
        try:
            ExpertParallel(moe, mesh)
        except (ValueError, MeshError) as error:
            said.append(str(error))
    return said


@pytest.mark.slow
def test_what_can_not_be_raises_a_clear_error() -> None:
    for said in launch(refused, 2):
        for words, expected in zip(said, ("3 experts can't be shared by 2 ranks equally: use a multiple of 2",
                                          "a mesh of efsdp and ep, not of dp, ep",
                                          "this mesh has 4 ranks and the world has 2"), strict=True):
            assert expected in words


def without_a_step_along_efsdp() -> list[float]:
    """In a rank: how far its experts' gradients are from its replica's, before they are averaged and after."""
    dist.init_process_group()
    mine = ExpertParallel(layer(0, None), Mesh.of({"efsdp": 2, "ep": 2}))
    tokens, up = (x.chunk(4)[dist.get_rank()] for x in whole())
    (mine(tokens) * up).sum().backward()
    apart = []
    for _ in range(2):
        both = [torch.empty_like(mine.up.grad) for _ in range(2)]
        dist.all_gather(both, mine.up.grad, group=mine.groups["efsdp"])
        apart.append((both[0] - both[1]).abs().max().item())
        average_expert_gradients(mine, mine.groups)
    return apart


@pytest.mark.slow
def test_replicas_of_experts_hold_one_gradient() -> None:
    for before, after in launch(without_a_step_along_efsdp, 4):
        assert before > 0.1 and after == 0


# Experts that borrow tp, against the planner's formula

SMALL = GPTConfig(vocab_size=16, context=8, num_layers=2, num_heads=4, width=8, dtype=torch.float64)
FOLDED, BOTH = Mesh.of({"dp": 2, "tp": 2}), "dp+tp"
EVERY = 4  # experts, one on a rank; a token chooses all of them, so loads are even


class GatheredExperts(nn.Module):
    """Experts as torchtitan has them: the ranks of tp gather all tokens, and each sends its own part to experts."""

    def __init__(self, experts: ExpertMLP, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.experts, self.group = experts, group

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        """A rank's part of the tokens, gathered before and scattered after."""
        whole = all_gather_then_reduce_scatter(x_BTD, 1, self.group)
        parts = [torch.zeros_like(x_BTD) for _ in range(dist.get_world_size(self.group))]
        place = dist.get_rank(self.group)
        parts[place] = self.experts(whole.chunk(len(parts), 1)[place])
        return reduce_scatter_then_all_gather(torch.cat(parts, 1), 1, self.group)


def folded_step(gathered: bool) -> tuple[float, float]:
    """In a rank: a GPT's forward and backward where ep is all of dp and tp; its loss, and the norm of a gradient."""
    dist.init_process_group()
    with paused():
        tp, at = axis_groups(FOLDED)["tp"], FOLDED.coordinates(dist.get_rank())
        gpt = with_experts(GPT.seeded(SMALL, 0), EVERY, EVERY, 0)
        layers = [ExpertMLP(ExpertParallel(block.mlp.layer)) for block in gpt.blocks]
        for block in gpt.blocks:
            block.mlp = nn.Identity()
        for name, parameter in gpt.named_parameters():  # what all ranks hold whole, and would sum the gradients of
            parameter.requires_grad_(not any(word in name for word in ("norm", "position", "out.bias")))
        split_gpt(gpt, tp, sequence_parallel=True)
        for block, layer in zip(gpt.blocks, layers):
            block.mlp = GatheredExperts(layer, tp) if gathered else layer
        tokens = torch.randint(16, (2, 2, 9), generator=torch.Generator().manual_seed(1))[at["dp"]]
    loss = gpt.loss(gpt(tokens[:, :-1]), tokens[:, 1:])
    loss.backward()
    return loss.item(), gpt.blocks[0].attention.q.weight.grad.norm().item()


def test_experts_that_borrow_tp_send_what_the_planner_says_or_half_of_it_along_tp() -> None:
    """The planner has torchtitan's way. Who hands a rank's own part to the experts gathers for attention alone."""
    model = Transformer(2, 8, 4, 8, 16, experts=Experts(EVERY, EVERY, 32))
    cluster = replace(cluster_of("h100", 4), num_gpus=4)
    found = estimate(model, cluster, Layout(1, 2, 2, micro_batch_size=2, ep=4), 4)
    ends = hybrid_sent_bytes(Mesh.of({"pp": 1, "dp": 2, "tp": 2}), 0, LayerShape(2, 8, 8, 4), 0, 1, 0.0,
                             bytes_per_number=8)["tp"]
    numbers_of_rows = 2 * EVERY * 8 * 3 / 4  # of each layer's forward, in 64 bits
    runs = [launch(folded_step, 4, gathered, record=True) for gathered in (True, False)]
    for run, share in zip(runs, (1.0, 0.5)):
        sent = bytes_by_axis(flows(run.trace, FOLDED), 4)
        assert set(sent) == {"tp", BOTH}
        assert sent["tp"] == pytest.approx(4 * share * found.tp_bytes + ends)  # 64 bits a number, where it has 16
        assert sent[BOTH] == pytest.approx(4 * found.ep_bytes + numbers_of_rows)
    assert torch.tensor(list(runs[0])).allclose(torch.tensor(list(runs[1])), atol=1e-12)
