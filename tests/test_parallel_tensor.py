"""Tensor parallelism on real ranks with different seeds: equal to one process, and what it sends and keeps."""
from __future__ import annotations

import math
import weakref
from collections import Counter
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from book.cost import BUS_FACTORS, LayerShape, activation_bytes, gpt_activation_bytes, tensor_parallel_sent_bytes
from book.launch import launch, rank_device
from book.parallel import GPT, Characters, GPTConfig, load_text
from book.parallel.asynchronous import gathered_product, scattered_product
from book.parallel.model import Attention
from book.parallel.tensor import (ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding,
                                  all_gather_then_reduce_scatter, all_reduce_then_identity, first_of_shard,
                                  identity_then_all_reduce, mine, reduce_scatter_then_all_gather, shard, split_gpt,
                                  vocab_parallel_cross_entropy)
from book.parallel.tensor.regather import Regather
from book.record.activations import held_for_backward, saved_for_backward, still_held
from tests.by_value import sent_by_value

sent_by_value(__name__)

TEXT = load_text()
CONFIG = GPTConfig(Characters(TEXT).vocab_size, context=8, num_layers=2, num_heads=4, width=16, dtype=torch.float64)
WAYS = {"tensor parallel": dict(), "sequence parallel": dict(sequence_parallel=True),
        "regathered": dict(sequence_parallel=True, regather=True)}
# This one does everything that the others do: it gathers, scatters, and gathers again for backward.
ONE_WAY = [pytest.param(way, marks=() if way == "regathered" else pytest.mark.slow) for way in WAYS]
SIZES = [pytest.param(1, marks=pytest.mark.slow), 2, pytest.param(4, marks=pytest.mark.slow)]
NUM_SEQUENCES = 3


def batch(num_sequences: int = NUM_SEQUENCES, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets (B, T) out of the book's text."""
    tokens = Characters(TEXT).encode(TEXT)
    starts = torch.randint(len(tokens) - 9, (num_sequences,), generator=torch.Generator().manual_seed(seed))
    windows = torch.stack([tokens[start:start + 9] for start in starts])
    return windows[:, :-1], windows[:, 1:]


def copied(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().cpu().clone() for name, tensor in tensors.items()}


def train(model: GPT, num_passes: int = 1, num_steps: int = 2) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses of some steps of SGD, and the gradients of the first; in a step some passes are accumulated."""
    optimizer, losses, first = torch.optim.SGD(model.parameters(), lr=0.5), [], {}
    device = model.head.weight.device
    for step in range(num_steps):
        optimizer.zero_grad()
        for number in range(num_passes):
            inputs, targets = (t.to(device) for t in batch(seed=10 * step + number))
            loss = model.loss(model(inputs), targets)
            loss.backward()
            losses.append(loss.item())
        first = first or copied({name: p.grad for name, p in model.named_parameters()})
        optimizer.step()
    return losses, first


def trained_split(config: GPTConfig, group_size: int, num_passes: int, ways: dict[str, bool]) -> dict[str, Any]:
    """In a rank: the result of training a model that ranks drew differently and split over groups of this size."""
    device = rank_device()
    dist.init_process_group()
    groups = [dist.new_group(range(first, first + group_size)) for first in range(0, dist.get_world_size(), group_size)]
    group = groups[dist.get_rank() // group_size] if len(groups) > 1 else None
    model = GPT(config).to(device)
    drawn = copied(model.state_dict())
    split_gpt(model, group, **ways)
    cut = {name: getattr(p, "shard_dim", None) for name, p in model.named_parameters()}
    losses, gradients = train(model, num_passes)
    return {"drawn": drawn, "cut": cut, "losses": losses,
            "gradients": gradients, "weights": copied(dict(model.named_parameters()))}


def put_together(ranks: list[dict[str, Any]], what: str) -> dict[str, torch.Tensor]:
    """Whole tensors from the ranks' pieces; tensors that are not split must be equal on all ranks."""
    whole = {}
    for name, dim in ranks[0]["cut"].items():
        pieces = [rank[what][name] for rank in ranks]
        if dim is None:
            assert all(torch.allclose(piece, pieces[0], rtol=0, atol=1e-14) for piece in pieces), name
        whole[name] = pieces[0] if dim is None else torch.cat(pieces, dim)
    return whole


def furthest(tensors: dict[str, torch.Tensor], others: dict[str, torch.Tensor]) -> float:
    assert tensors.keys() == others.keys() and all(tensors[name].shape == others[name].shape for name in tensors)
    return max((tensors[name] - others[name]).abs().max().item() for name in tensors)


def check_against_one_process(ranks: list[dict[str, Any]], config: GPTConfig, num_passes: int) -> None:
    alone = GPT(config)
    alone.load_state_dict(ranks[0]["drawn"])
    losses, gradients = train(alone, num_passes)
    for rank in ranks:
        assert rank["losses"] == pytest.approx(losses, abs=1e-12)
    assert furthest(put_together(ranks, "gradients"), gradients) < 1e-12
    assert furthest(put_together(ranks, "weights"), dict(alone.named_parameters())) < 1e-12


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("world_size", SIZES)
def test_training_equals_one_process(world_size: int, way: str) -> None:
    ranks = list(launch(trained_split, world_size, CONFIG, world_size, 1, WAYS[way]))
    assert len({rank["drawn"]["head.weight"].sum().item() for rank in ranks}) == world_size
    check_against_one_process(ranks, CONFIG, 1)


@pytest.mark.slow
@pytest.mark.parametrize("way", ONE_WAY)
def test_accumulated_passes_equal_one_process(way: str) -> None:
    check_against_one_process(list(launch(trained_split, 2, CONFIG, 2, 3, WAYS[way])), CONFIG, 3)


@pytest.mark.slow
@pytest.mark.parametrize("way", [pytest.param("tensor parallel", marks=pytest.mark.slow), "regathered"])
def test_each_group_splits_its_own_model(way: str) -> None:
    ranks = list(launch(trained_split, 4, CONFIG, 2, 1, WAYS[way]))
    assert ranks[0]["losses"] != ranks[2]["losses"]
    check_against_one_process(ranks[:2], CONFIG, 1)
    check_against_one_process(ranks[2:], CONFIG, 1)


@pytest.mark.slow
def test_an_mlp_of_any_width_is_split() -> None:
    odd = replace(CONFIG, mlp_width=9, num_layers=1)
    ranks = list(launch(trained_split, 2, odd, 2, 1, WAYS["sequence parallel"]))
    assert [rank["weights"]["blocks.0.mlp.up.weight"].shape[0] for rank in ranks] == [5, 4]
    check_against_one_process(ranks, odd, 1)


@pytest.mark.slow
def test_every_rank_holds_its_share() -> None:
    ranks = list(launch(trained_split, 4, CONFIG, 4, 1, {}))
    whole = {name for name, dim in ranks[0]["cut"].items() if dim is None}
    assert {name.split(".", 2)[-1] if name.startswith("blocks") else name for name in whole} == {
        "attention_norm.weight", "attention_norm.bias", "attention.out.bias", "mlp_norm.weight", "mlp_norm.bias",
        "mlp.down.bias", "position_embedding.weight", "norm.weight", "norm.bias"}
    total = sum(p.numel() for rank in ranks for name, p in rank["weights"].items() if name not in whole)
    assert total + sum(ranks[0]["weights"][name].numel() for name in whole) == CONFIG.num_parameters


def operator_both_ways(name: str) -> tuple[torch.Tensor, torch.Tensor]:
    """In a rank: an operator's output for rows of 1 + rank, and its backward for a gradient of 10 + rank."""
    device = rank_device()
    dist.init_process_group()
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    x = torch.full((2, num_ranks), 1.0 + rank, device=device, requires_grad=True)
    operator = {"f": identity_then_all_reduce, "g": all_reduce_then_identity,
                "gather": lambda x: all_gather_then_reduce_scatter(x, 1),
                "scatter": lambda x: reduce_scatter_then_all_gather(x, 1)}[name]
    y = operator(x)
    y.backward(torch.full_like(y, 10.0 + rank))
    return y.detach().cpu(), x.grad.cpu()


@pytest.mark.slow
@pytest.mark.parametrize("name, forward, backward", [
    ("f", [[1, 1], [2, 2]], [[21, 21], [21, 21]]), ("g", [[3, 3], [3, 3]], [[10, 10], [11, 11]]),
    ("gather", [[1, 1, 2, 2], [1, 1, 2, 2]], [[21, 21], [21, 21]]), ("scatter", [[3], [3]], [[10, 11], [10, 11]]),
])
def test_an_operator_does_what_its_name_says(name: str, forward: list, backward: list) -> None:
    for (y, gradient), y_row, gradient_row in zip(launch(operator_both_ways, 2, name), forward, backward):
        assert y.tolist() == [y_row] * 2 and gradient.tolist() == [gradient_row] * 2


def layers_of_odd_sizes() -> list[float]:
    """In a rank: how far two linear layers, an embedding and a loss are from whole ones, on 3 ranks and sizes of 7."""
    device = rank_device()
    dist.init_process_group()
    torch.manual_seed(0)
    up, down, table = nn.Linear(5, 7), nn.Linear(7, 5), nn.Embedding(7, 5)
    whole = nn.ModuleList([table, up, down]).double().to(device)
    tokens, targets = (torch.randint(7, (4, 6), device=device) for _ in range(2))

    def loss_of(table: nn.Module, up: nn.Module, down: nn.Module) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = down(up(table(tokens)).tanh())
        return hidden, up(hidden)  # as logits: 7 of them

    split = [VocabParallelEmbedding(table), ColumnParallelLinear(up), RowParallelLinear(down)]
    hidden, logits = loss_of(*whole)
    expected = F.cross_entropy(100 * logits.flatten(0, 1), targets.flatten())
    split_hidden, split_logits = loss_of(*split)
    loss = vocab_parallel_cross_entropy(100 * split_logits, targets, first_of_shard(7))
    grads = torch.autograd.grad(expected, [table.weight, up.weight, down.weight, down.bias])
    loss.backward()
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    wanted = [g.tensor_split(num_ranks, dim)[rank] for g, dim in zip(grads, (0, 0, 1))] + [grads[3]]
    got = [split[0].weight.grad, split[1].weight.grad, split[2].weight.grad, split[2].bias.grad]
    return [(a - b).abs().max().item() for a, b in zip([split_hidden, loss, *got], [hidden, expected, *wanted])]


@pytest.mark.slow
def test_layer_sizes_need_not_be_multiples_of_the_ranks() -> None:
    for differences in launch(layers_of_odd_sizes, 3):
        assert max(differences) < 1e-12


def blocks_of_nine() -> tuple[list[float], list[float]]:
    dist.init_process_group("gloo")
    numbers = torch.arange(9.0)
    return mine(numbers, 0).tolist(), shard(nn.Parameter(numbers), 0).tolist()


@pytest.mark.slow
def test_blocks_and_shards_are_cut_in_the_same_positions() -> None:
    assert list(launch(blocks_of_nine, 4)) == [(cut, cut) for cut in ([0, 1, 2], [3, 4], [5, 6], [7, 8])]


def large_logits(vocab_size: int) -> float:
    device = rank_device()
    dist.init_process_group()
    logits = torch.linspace(-2000, 2000, vocab_size, dtype=torch.float64, device=device).expand(2, 3, -1)
    mine = logits.tensor_split(dist.get_world_size(), -1)[dist.get_rank()]
    targets = torch.arange(6, device=device).view(2, 3)
    return vocab_parallel_cross_entropy(mine, targets, first_of_shard(vocab_size)).item()


@pytest.mark.slow
def test_the_loss_survives_large_logits_and_sends_the_same_for_any_vocabulary() -> None:
    runs = {size: launch(large_logits, 2, size, record=True) for size in (7, 1000)}
    for size, run in runs.items():
        logits = torch.linspace(-2000, 2000, size, dtype=torch.float64).expand(6, -1)
        assert list(run) == pytest.approx([F.cross_entropy(logits, torch.arange(6)).item()] * 2, rel=1e-12)
        assert sent(run.trace) == Counter({("all_reduce", 6 * 8): 3})


def loss_of_some(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.dtype]:
    """In a rank: a loss in which some positions do not count, and the gradient of this rank's logits."""
    device = rank_device()
    dist.init_process_group()
    whole, targets = logits_and_targets(dtype)
    logits = whole.to(device).tensor_split(dist.get_world_size(), -1)[dist.get_rank()].detach().requires_grad_()
    loss = vocab_parallel_cross_entropy(logits, targets.to(device), first_of_shard(7))
    loss.backward()
    return loss.detach().cpu(), logits.grad.cpu(), loss.dtype


def logits_and_targets(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    targets = torch.randint(7, (3, 8), generator=generator)
    targets[0, 2:5] = targets[2, 7] = -100
    return torch.randn(3, 8, 7, generator=generator, dtype=torch.float64).to(dtype), targets


@pytest.mark.slow
@pytest.mark.parametrize("dtype, taken_in", [(torch.float64, torch.float64), (torch.bfloat16, torch.float32)],
                         ids=["float64", "bfloat16"])
def test_the_loss_ignores_the_targets_that_torchs_ignores_and_is_not_computed_in_16_bits(
        dtype: torch.dtype, taken_in: torch.dtype) -> None:
    whole, targets = logits_and_targets(dtype)
    whole.requires_grad_()
    expected = F.cross_entropy(whole.to(taken_in).flatten(0, 1), targets.flatten())
    expected.backward()
    ranks = list(launch(loss_of_some, 2, dtype))
    for loss, _, loss_dtype in ranks:
        assert loss_dtype == taken_in and torch.allclose(loss, expected, rtol=1e-6, atol=0)
    gradient = torch.cat([gradient for _, gradient, _ in ranks], -1)
    assert gradient.dtype == dtype and torch.allclose(gradient, whole.grad, rtol=2e-2, atol=1e-12)


def sent(trace: Any) -> Counter[tuple[str, float]]:
    """The collectives of rank 0, which are those of every rank: operation and bytes."""
    counts = [Counter((e.op, e.num_bytes) for e in trace.of_rank(rank) if e.kind == "collective")
              for rank in range(trace.world_size)]
    assert all(count == counts[0] for count in counts)
    return counts[0]


def one_pass(ways: dict[str, bool], backward: bool = True) -> None:
    """In a rank: forward and backward of a model that was the same on all ranks; states are sent before, on purpose."""
    device = rank_device()
    dist.init_process_group()
    model = split_gpt(GPT.seeded(CONFIG, 0).to(device), **ways)
    inputs, targets = (t.to(device) for t in batch())
    loss = model.loss(model(inputs), targets)
    if backward:
        loss.backward()


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("world_size", SIZES[1:])
def test_traffic_matches_the_formula(world_size: int, way: str) -> None:
    counted = sent(launch(one_pass, world_size, WAYS[way], record=True).trace)
    config, n, num_layers = CONFIG, NUM_SEQUENCES * 8 * CONFIG.width * 8, CONFIG.num_layers
    token_bytes = NUM_SEQUENCES * 8 * 8
    model = GPT.seeded(config, 0)
    start = Counter(("broadcast", p.nbytes) for p in model.parameters())
    loss = Counter({("all_reduce", token_bytes): 3})
    whole = [p for name, p in model.named_parameters()
             if "norm" in name or "position" in name or name.endswith(("out.bias", "down.bias"))]
    summed = Counter(("all_reduce", p.nbytes) for p in whole) if WAYS[way] else Counter()
    between = counted - start - loss - summed
    assert between + start + loss + summed == counted
    assert {size for _, size in between} == {n}
    ring = sum(BUS_FACTORS[op](world_size) * size * times for (op, size), times in between.items())
    regather = way == "regathered"
    ends = tensor_parallel_sent_bytes(world_size, n, regather) / 2  # embedding forward, head backward: half a layer's
    assert ring == num_layers * tensor_parallel_sent_bytes(world_size, n, regather) + ends


def recomputed_pass(ways: dict[str, bool], early_stop: bool | None, num_layers: int) -> None:
    """In a rank: forward and backward through blocks, recomputed unless `early_stop` is None."""
    device = rank_device()
    dist.init_process_group()
    model = split_gpt(GPT.seeded(replace(CONFIG, num_layers=num_layers), 0).to(device), **ways)
    x = model.embed(batch()[0].to(device))
    with set_checkpoint_early_stop(bool(early_stop)):
        for block in model.blocks:
            x = block(x) if early_stop is None else checkpoint(block, x, use_reentrant=False)
        x.sum().backward()


@pytest.mark.slow
@pytest.mark.parametrize(("way", "halves"), [*zip(WAYS, ((8, 10, 12), (8, 11, 12), (10, 13, 14)))], ids=list(WAYS))
def test_recomputation_sends_what_chapter_5_counts(way: str, halves: tuple[int, ...]) -> None:
    """In halves of an all-reduce of the activations, what one more layer sends: kept, recomputed, to the end."""
    n = NUM_SEQUENCES * 8 * CONFIG.width * 8

    def counted(early_stop: bool | None, num_layers: int) -> int:
        found = sent(launch(recomputed_pass, 2, WAYS[way], early_stop, num_layers, record=True).trace)
        return sum(times * (2 if op == "all_reduce" else 1) for (op, size), times in found.items()
                   if size == n and op != "broadcast")

    assert tuple(counted(early, 2) - counted(early, 1) for early in (None, True, False)) == halves


def kept(config: GPTConfig, ways: dict[str, bool] | None) -> int:
    """In a rank: the bytes that one block keeps for backward; on the CPU, whose attention the formula is for."""
    dist.init_process_group("gloo")
    model = GPT(config)
    if ways is not None:
        split_gpt(model, **ways)
    if config.dropout:
        model.blocks[0].attention.__class__ = AttentionOfThePaper
        model.blocks[0].dropout = OneByteDropout()
    num_tokens = config.context // (dist.get_world_size() if ways and ways.get("sequence_parallel") else 1)
    x = torch.randn(NUM_SEQUENCES, num_tokens, config.width, dtype=config.dtype, requires_grad=True)
    with saved_for_backward(model.parameters()) as saved:
        model.blocks[0](x).sum()
    return saved.num_bytes


class OneByteDropout(nn.Module):
    """Dropout that keeps its mask as bytes, as the paper's did, on any device."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.native_dropout(x, 0.1, True)[0]


class AttentionOfThePaper(Attention):
    """Attention as it was before fused kernels: the scores are kept, before and after dropout."""

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        q_BHTK, k_BHTK, v_BHTK = (self._heads(project(x_BTD)) for project in (self.q, self.k, self.v))
        scores_BHTT = torch.softmax(q_BHTK @ k_BHTK.mT / math.sqrt(self.head_width), -1)
        y_BHTK = torch.native_dropout(scores_BHTT, 0.1, True)[0] @ v_BHTK
        return self.out(y_BHTK.transpose(1, 2).flatten(2))


def test_a_storage_counts_once_and_parameters_do_not() -> None:
    layers = nn.ModuleList(nn.Linear(4, 4, bias=False) for _ in range(3))
    x = torch.randn(5, 4, requires_grad=True)
    with saved_for_backward(layers.parameters()) as saved:
        total = sum(layer(x) for layer in layers)  # three layers keep one x
        total = total.view(4, 5).exp()  # keeps its result
        total.t().sin()  # keeps the same once more
    assert saved.num_bytes == 2 * 5 * 4 * 4
    with saved_for_backward() as also_parameters:
        layers[0](x)
    assert also_parameters.num_bytes == 5 * 4 * 4 + 4 * 4 * 4
    with torch.no_grad(), still_held(layers.parameters()) as held:
        total = layers[0](x).exp()  # what it is made of is freed
        turned = total.t()
    assert held.num_bytes == 5 * 4 * 4
    del total, turned
    assert held.num_bytes == 0


def kept_of_dtensors() -> tuple[int, ...]:
    """In a rank: bytes kept, bytes held after a forward, the most, and bytes held after backward."""
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    block = parallelize_module(nn.Linear(8, 6, bias=False), mesh, ColwiseParallel(use_local_output=False))
    with saved_for_backward(block.parameters()) as saved:
        block(torch.randn(3, 8, requires_grad=True)).exp()
    with held_for_backward(block.parameters()) as held:
        total = block(torch.randn(3, 8, requires_grad=True)).exp().to_local().sum()
    num_bytes = held.num_bytes
    total.backward()
    return saved.num_bytes, num_bytes, held.peak_bytes, held.num_bytes


@pytest.mark.slow
def test_only_the_ranks_part_of_a_dtensor_counts() -> None:
    wanted = 3 * 8 * 4 + 3 * 3 * 4
    assert list(launch(kept_of_dtensors, 2)) == [(wanted, wanted, wanted, 0)] * 2


SHAPE = LayerShape(NUM_SEQUENCES, CONFIG.context, CONFIG.width, CONFIG.num_heads)


@pytest.mark.slow
@pytest.mark.parametrize("world_size", SIZES)
def test_a_layer_keeps_the_bytes_of_the_formula(world_size: int) -> None:
    single = replace(CONFIG, dtype=torch.float32)
    for ways in WAYS.values():
        assert set(launch(kept, world_size, single, ways)) == {gpt_activation_bytes(SHAPE, world_size, **ways)}


@pytest.mark.slow
def test_a_layer_that_is_not_split_keeps_what_one_rank_keeps_and_twice_that_in_float64() -> None:
    assert launch(kept, 1, replace(CONFIG, dtype=torch.float32), None)[0] == gpt_activation_bytes(SHAPE)
    assert launch(kept, 1, CONFIG, None)[0] == gpt_activation_bytes(SHAPE, bytes_per_number=8)


@pytest.mark.slow
@pytest.mark.parametrize("world_size", SIZES)
@pytest.mark.parametrize("way", WAYS)
def test_a_layer_like_the_papers_keeps_the_bytes_of_its_formula(world_size: int, way: str) -> None:
    half = replace(CONFIG, dropout=0.1, dtype=torch.bfloat16)
    statistics = 4 * NUM_SEQUENCES * half.context * 2 // (world_size if WAYS[way] else 1)  # not in the formula
    wanted = activation_bytes(SHAPE, world_size, **WAYS[way]) + statistics
    assert set(launch(kept, world_size, half, WAYS[way])) == {wanted}


def test_formulas_agree_where_they_meet() -> None:
    scores = 5 * SHAPE.num_heads * SHAPE.num_tokens / SHAPE.width * SHAPE.num_activations
    assert activation_bytes(SHAPE) == 34 * SHAPE.num_activations + scores
    assert activation_bytes(SHAPE, 4, True, True) == activation_bytes(SHAPE) / 4
    assert activation_bytes(SHAPE, 4, True, True, "selective") == 34 * SHAPE.num_activations / 4
    assert activation_bytes(SHAPE, 4, True, recompute="selective") == (4 + 30 / 4) * SHAPE.num_activations
    assert activation_bytes(SHAPE, 4, recompute="full") == 2 * SHAPE.num_activations
    assert activation_bytes(SHAPE, 4, True, recompute="full") == 2 * SHAPE.num_activations / 4
    assert gpt_activation_bytes(SHAPE, 4, True, True) == gpt_activation_bytes(SHAPE) / 4
    assert gpt_activation_bytes(SHAPE, 4, True) < gpt_activation_bytes(SHAPE, 4)
    assert tensor_parallel_sent_bytes(1, 1e9) == 0
    with pytest.raises(ValueError, match="recompute can't be 'all'"):
        activation_bytes(SHAPE, recompute="all")


def gathered_for_two_layers() -> tuple[list[float], bool, bool]:
    """In a rank: what two layers get for backward, whether it is one tensor, and whether it is freed afterwards."""
    device = rank_device()
    dist.init_process_group()
    regather = Regather(torch.full((1, 2), 1.0 + dist.get_rank(), device=device), 1, None)
    regather.num_layers = 2
    one, other = regather.whole(), regather.whole()
    numbers, alike, watched = one.flatten().tolist(), one is other, weakref.ref(one)
    del one, other
    return numbers, alike, watched() is None


@pytest.mark.slow
def test_layers_that_share_an_input_gather_it_once_and_free_it() -> None:
    run = launch(gathered_for_two_layers, 2, record=True)
    assert list(run) == [([1, 1, 2, 2], True, True)] * 2
    assert sent(run.trace) == Counter({("all_gather", 16): 1})


def dropped(ways: dict[str, bool]) -> tuple[float, list[torch.Tensor], torch.Tensor]:
    """In a rank: loss and gradients of what is whole, and what the first block's attention dropped of equal heads."""
    device = rank_device()
    dist.init_process_group()
    model = split_gpt(GPT(replace(CONFIG, dropout=0.5)).to(device), **ways)
    inputs, targets = (t.to(device) for t in batch())
    loss = model.loss(model(inputs), targets)
    loss.backward()
    whole = [p.grad.cpu() for p in model.parameters() if not hasattr(p, "shard_dim")]
    ones = torch.ones(1, 2, 4, 4, device=device)
    return loss.item(), whole, F.scaled_dot_product_attention(ones, ones, ones, dropout_p=0.5).cpu()


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_dropout_is_the_same_exactly_where_activations_are(way: str) -> None:
    one, other = launch(dropped, 2, WAYS[way])
    assert one[0] == pytest.approx(other[0], abs=1e-14)
    assert all(torch.allclose(a, b, rtol=0, atol=1e-14) for a, b in zip(one[1], other[1]))
    assert not torch.equal(one[2], other[2])


def gradients_of_dropped(ways: dict[str, bool]) -> list[list[torch.Tensor]]:
    """In a rank: gradients of a model with dropout, from the same random state; the second time recomputed."""
    device = rank_device()
    dist.init_process_group()
    model = split_gpt(GPT(replace(CONFIG, dropout=0.5)).to(device), **ways)
    inputs, targets = (t.to(device) for t in batch())
    state, seen = torch.get_rng_state(), []
    for run in (lambda block, x: block(x), *(partial(checkpoint, use_reentrant=again) for again in (False, True))):
        torch.set_rng_state(state)
        model.zero_grad()
        x = model.embed(inputs)
        for block in model.blocks:
            x = run(block, x)
        model.loss(model.predict(x), targets).backward()
        seen.append([p.grad.cpu() for p in model.parameters()])
    return seen


@pytest.mark.slow
@pytest.mark.parametrize("way", ONE_WAY)
def test_a_recomputed_forward_drops_the_same(way: str) -> None:
    for plain, *recomputed in launch(gradients_of_dropped, 2, WAYS[way]):
        for again in recomputed:
            assert all(torch.allclose(a, b, rtol=0, atol=1e-14) for a, b in zip(plain, again))


def dropped_in_passes() -> list[torch.Tensor]:
    device = rank_device()
    dist.init_process_group()
    dropout = split_gpt(GPT(replace(CONFIG, dropout=0.25)).to(device)).blocks[1].dropout
    x = torch.ones(100, 100, device=device)
    return [dropout(x).cpu(), dropout(x).cpu(), dropout.eval()(x).cpu()]


@pytest.mark.slow
def test_shared_dropout_is_proper_dropout() -> None:
    one, other = launch(dropped_in_passes, 2)
    assert all(torch.equal(a, b) for a, b in zip(one, other))
    assert not torch.equal(one[0], one[1]) and torch.equal(one[2], torch.ones(100, 100))
    assert one[0].unique().tolist() == pytest.approx([0, 4 / 3]) and one[0].mean().item() == pytest.approx(1, abs=0.05)


REFUSALS = {
    "heads": "4 ranks can't share 2 heads", "vocabulary": "a length of 2 can't be shared by 4 ranks",
    "again": "already split", "pieces": "regather needs sequence_parallel=True",
    "tokens": "dim 1 has a length of 5, which 4 ranks can't share equally", "member": "not in the group",
    "tied": "head and token_embedding share one weight"}


def refused() -> dict[str, str]:
    """In a rank: the error in each case of `REFUSALS`."""
    device = rank_device()
    dist.init_process_group()
    others = dist.new_group([0])
    return {what: told(what, device, others) for what in REFUSALS}


def told(what: str, device: torch.device, others: Any) -> str:
    """The error for an impossible split; `others` is a group of rank 0 alone."""
    sizes = {"heads": dict(num_heads=2), "vocabulary": dict(vocab_size=2)}.get(what, {})
    model = GPT(replace(CONFIG, **sizes)).to(device)
    if what == "tied":
        model.head.weight = model.token_embedding.weight
    try:
        if what == "member" and dist.get_rank():
            split_gpt(model, others)
        elif what == "pieces":
            split_gpt(model, regather=True)
        elif what != "member":
            split_gpt(model, sequence_parallel=what == "tokens")
            if what == "tokens":
                model(batch()[0][:, :5].to(device))
            split_gpt(model)
    except ValueError as error:
        return str(error)
    return "nothing"


@pytest.mark.slow
def test_an_impossible_split_raises_a_clear_error() -> None:
    for rank, words in enumerate(launch(refused, 4)):
        assert [what for what, said in REFUSALS.items() if said not in words[what]] == ([] if rank else ["member"])


@pytest.mark.slow
def test_a_split_model_works_without_gradients_too() -> None:
    def answered(ways: dict[str, bool]) -> float:
        device = rank_device()
        dist.init_process_group()
        model = split_gpt(GPT.seeded(CONFIG, 0).to(device), **ways).requires_grad_(False)
        inputs, targets = (t.to(device) for t in batch())
        with torch.no_grad():
            return model.loss(model(inputs), targets).item()

    inputs, targets = batch()
    alone = GPT.loss(GPT.seeded(CONFIG, 0)(inputs), targets).item()
    for ways in WAYS.values():
        assert list(launch(answered, 2, ways)) == pytest.approx([alone] * 2, abs=1e-12)


def in_hops(rows: int) -> tuple[torch.Tensor, ...]:
    """In a rank: both products in hops, and what the library's gather and sum make of the same numbers.

    Whole numbers, so that every order of additions gives the same.
    """
    dist.init_process_group()
    rank, world_size, device = dist.get_rank(), dist.get_world_size(), rank_device()
    generator = torch.Generator().manual_seed(rank)
    x, a, h, b = (torch.randint(-9, 10, shape, generator=generator).double().to(device)
                  for shape in ((rows, 5), (5, 3), (rows * world_size, 3), (3, 5)))
    whole = [torch.empty_like(x) for _ in range(world_size)]
    found = gathered_product(x, a), scattered_product(h, b)
    dist.all_gather(whole, x)
    total = h @ b
    dist.all_reduce(total)
    return tuple(tensor.cpu() for tensor in (*found, torch.cat(whole) @ a, total.chunk(world_size)[rank]))


@pytest.mark.slow
@pytest.mark.parametrize(("world_size", "rows"), [(1, 2), (2, 3), (4, 2), (5, 1)])
def test_products_in_hops_are_those_of_a_gather_and_a_sum_and_send_as_much(world_size: int, rows: int) -> None:
    run = launch(in_hops, world_size, rows, record=True)
    for rank, (gathered, scattered, wanted_rows, wanted_sum) in enumerate(run):
        assert gathered.equal(wanted_rows) and scattered.equal(wanted_sum)
        sent = [event for event in run.trace.of_rank(rank) if event.kind == "send"]
        assert [event.num_bytes for event in sent] == [8 * rows * 5] * 2 * (world_size - 1)
        assert {event.peer for event in sent} <= {(rank + 1) % world_size}


class Late:
    """What stands for `pass_on` where nothing is sent: it notes what happens between the start and the wait."""

    def __init__(self, notes: list[str]) -> None:
        self.notes = notes

    def __call__(self, tensor: torch.Tensor, group: object = None) -> Any:
        self.notes.append("start")
        return lambda: (self.notes.append("wait"), tensor)[1]


class Noted:
    """A weight that notes when it is multiplied."""

    def __init__(self, notes: list[str]) -> None:
        self.notes = notes

    def __rmatmul__(self, x: torch.Tensor) -> torch.Tensor:
        self.notes.append("product")
        return x


@pytest.mark.parametrize(("product", "wanted"), [
    (gathered_product, ["start", "product", "wait"] * 2 + ["product"]),
    (scattered_product, ["product"] + ["start", "product", "wait"] * 2)])
def test_each_hop_is_under_way_while_a_product_is_computed(product: Any, wanted: list[str],
                                                           monkeypatch: pytest.MonkeyPatch) -> None:
    notes: list[str] = []
    monkeypatch.setattr("book.parallel.asynchronous.pass_on", Late(notes))
    monkeypatch.setattr(dist, "get_rank", lambda group=None: 1)
    monkeypatch.setattr(dist, "get_world_size", lambda group=None: 3)
    product(torch.ones(3, 2), Noted(notes))
    assert notes == wanted


def test_rows_that_ranks_can_not_share_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "get_rank", lambda group=None: 0)
    monkeypatch.setattr(dist, "get_world_size", lambda group=None: 4)
    with pytest.raises(ValueError, match="4 ranks can't share 6 rows equally"):
        scattered_product(torch.ones(6, 2), torch.ones(2, 2))
