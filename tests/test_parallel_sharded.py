"""ZeRO by hand on real ranks with different seeds: equal to one process and to DDP; its traffic and its memory."""
from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from book.cost import StateBytes, bytes_by_axis, flows, sharded_sent_bytes, state_bytes
from book.launch import RankError, launch, rank_device
from book.mesh import Mesh
from book.parallel.model import GPT, GPTConfig
from book.parallel.sharded import Replicated, Unit, Zero1, Zero2, Zero3, units_of
from book.record import held_state, paused
from tests.by_value import sent_by_value

sent_by_value(__name__)

pytestmark = pytest.mark.slow

STAGES = (Replicated, Zero1, Zero2, Zero3)
CONFIG = GPTConfig(vocab_size=13, context=5, num_layers=2, num_heads=2, width=8, dtype=torch.float64)
ADAM_64 = StateBytes(8, 8, 16)
make_optimizer = partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.1)


def batch(num_sequences, step=0):
    tokens = torch.randint(CONFIG.vocab_size, (num_sequences, CONFIG.context + 1),
                           generator=torch.Generator().manual_seed(step))
    return [t.to(rank_device()) for t in (tokens[:, :-1], tokens[:, 1:])]


def model(seed):
    return GPT.seeded(CONFIG, seed).to(rank_device())


def backward(run, inputs, targets, num_backwards=1):
    """Forward and backward in equal parts, whose gradients add up to those of the whole batch."""
    losses = []
    for x, y in zip(inputs.chunk(num_backwards), targets.chunk(num_backwards)):
        loss = GPT.loss(run(x), y) / num_backwards
        loss.backward()
        losses.append(loss.detach())
    return sum(losses)


def difference(state, other):
    return max((state[name].cpu() - other[name].cpu()).abs().max().item() for name in other)


def train(num_backwards=1, num_steps=3):
    """For each stage, how far weights and losses are at most from those of one process and of DDP over all steps."""
    dist.init_process_group()
    return [train_one(stage, num_backwards, num_steps) for stage in STAGES]


def train_one(stage, num_backwards, num_steps):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    sharded = stage(model(rank), make_optimizer)
    alone, ddp = model(0), DistributedDataParallel(model(rank))
    optimizers = [make_optimizer(other.parameters()) for other in (alone, ddp)]
    worst = [difference(sharded.state_dict(), alone.state_dict())]
    for step in range(num_steps):
        inputs, targets = batch(2 * world_size, step)
        mine = [t.chunk(world_size)[rank] for t in (inputs, targets)]
        loss = backward(sharded, *mine, num_backwards)
        sharded.step()
        dist.all_reduce(loss)
        losses = [backward(alone, inputs, targets), backward(ddp, *mine)]
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        state = sharded.state_dict()
        worst += [abs(loss.item() / world_size - losses[0].item()), difference(state, alone.state_dict()),
                  difference(state, ddp.module.state_dict())]
    return max(worst)


@pytest.mark.parametrize("world_size, num_backwards", [
    *(pytest.param(*sizes, marks=pytest.mark.slow) for sizes in ((1, 1), (2, 1), (4, 1))), (3, 1), (2, 2)])
def test_training_equals_one_process_and_ddp(world_size, num_backwards):
    for worst in launch(train, world_size, num_backwards):
        assert len(worst) == len(STAGES) and max(worst) < 1e-12


def one_step(stage):
    """What a rank holds of its model between two steps, and, for a stage that frees, after forward and backward."""
    dist.init_process_group()
    rank, world_size = dist.get_rank(), dist.get_world_size()
    with paused():
        sharded = stage(model(rank), make_optimizer)
    inputs, targets = (t.chunk(world_size)[rank] for t in batch(2 * world_size))
    held = []

    def look():
        held.append(held_state([t for unit in sharded.units for t in (*unit.parameters, unit.shard)],
                               sharded.optimizer))

    loss = GPT.loss(sharded(inputs), targets)
    look()
    loss.backward()
    look()
    sharded.step()
    look()
    return held, [len(unit.flat) for unit in sharded.units]


@pytest.fixture(scope="module", params=[
    *((stage, 3) for stage in range(4)), pytest.param((3, 2), marks=pytest.mark.slow)],
    ids=lambda p: f"stage {p[0]}, {p[1]} ranks")
def recorded(request):
    number, world_size = request.param
    return number, world_size, launch(one_step, world_size, STAGES[number], record=True)


def test_sends_the_bytes_of_the_formula(recorded):
    number, world_size, run = recorded
    _, lengths = run[0]
    sent = bytes_by_axis(flows(run.trace, Mesh.of({"dp": world_size})), world_size)
    assert sent["dp"] == pytest.approx([sharded_sent_bytes(number, world_size, 8 * sum(lengths))] * world_size)
    assert sum(lengths) - CONFIG.num_parameters < (world_size * len(lengths) if number else 1)  # but for padding


def test_holds_the_bytes_of_the_formula(recorded):
    number, world_size, run = recorded
    for (forward, after_backward, after_step), lengths in run:
        formula = state_bytes(sum(lengths), number, world_size, ADAM_64)
        assert after_step == StateBytes(formula.parameters, 0, formula.optimizer)
        assert forward == StateBytes(formula.parameters, 0, 0)
        assert after_backward.parameters == formula.parameters
        unpadded = CONFIG.num_parameters * 8  # the gradients that autograd makes have no padding
        assert after_backward.gradients == (formula.gradients if number >= 2 else unpadded)


def test_a_replica_has_no_padding(recorded):
    number, world_size, run = recorded
    _, lengths = run[0]
    assert sum(lengths) >= CONFIG.num_parameters
    if number == 0:
        assert sum(lengths) == CONFIG.num_parameters
    else:
        assert all(length % world_size == 0 for length in lengths)


def in_groups():
    """Each half of the ranks trains a model of its own."""
    dist.init_process_group()
    rank = dist.get_rank()
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    sharded = Zero3(model(rank), make_optimizer, groups[rank // 2])
    alone = model(rank // 2 * 2)
    optimizer = make_optimizer(alone.parameters())
    inputs, targets = batch(4, step=rank // 2)
    backward(sharded, *(t.chunk(2)[rank % 2] for t in (inputs, targets)))
    sharded.step()
    backward(alone, inputs, targets)
    optimizer.step()
    return difference(sharded.state_dict(), alone.state_dict())


def test_shards_over_a_group_that_is_not_the_world():
    assert max(launch(in_groups, 4)) < 1e-12


class Partly(nn.Module):
    """A block, a part that only some forwards use, and a weight that two blocks share."""

    def __init__(self, seed):
        super().__init__()
        self.blocks = nn.ModuleList(GPT.seeded(CONFIG, seed).blocks)
        self.blocks[1].mlp.up.weight = self.blocks[0].mlp.up.weight
        self.spare = nn.Linear(CONFIG.width, CONFIG.width, dtype=CONFIG.dtype)
        nn.init.constant_(self.spare.weight, 0.1)
        nn.init.zeros_(self.spare.bias)

    def forward(self, x, use_spare):
        for block in self.blocks:
            x = block(x)
        return self.spare(x) if use_spare else x


def partly():
    dist.init_process_group()
    return [partly_one(stage) for stage in STAGES]


def partly_one(stage):
    rank = dist.get_rank()
    sharded = stage(Partly(rank).to(rank_device()), partial(torch.optim.SGD, lr=0.1))
    alone = Partly(0).to(rank_device())
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(4, 3, CONFIG.width, dtype=CONFIG.dtype, generator=generator).to(rank_device())
    for use_spare in (False, True, False):
        sharded(x.chunk(2)[rank], use_spare).square().mean().backward()
        sharded.step()
        alone(x, use_spare).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return difference(sharded.state_dict(), alone.state_dict()), sharded.module.blocks[1].mlp.up.weight is \
        sharded.module.blocks[0].mlp.up.weight, [unit.name for unit in sharded.units]


def test_parameters_without_gradient_and_shared_ones():
    for apart, still_tied, units in [found for rank in launch(partly, 2) for found in rank]:
        assert apart < 1e-12
        assert still_tied and units == ["root", "block 0", "block 1"]


def evaluate_then_train():
    """Zero3: a forward without gradients, then a step; the logits are those of one process, and all is freed."""
    dist.init_process_group()
    rank = dist.get_rank()
    sharded, alone = Zero3(model(rank), make_optimizer), model(0)
    inputs, targets = batch(2)
    with torch.no_grad():
        apart = (sharded(inputs) - alone(inputs)).abs().max().item()
        freed = not any(unit.is_whole for unit in sharded.units)
    backward(sharded, inputs, targets)
    optimizer = make_optimizer(alone.parameters())
    backward(alone, inputs, targets)
    sharded.step()
    optimizer.step()
    return max(apart, difference(sharded.state_dict(), alone.state_dict())), freed


def test_zero3_evaluates_without_gradients():
    for apart, freed in launch(evaluate_then_train, 2):
        assert apart < 1e-12 and freed


def recomputed():
    """Zero3 with every block's activations recomputed: how far from one process, and how often a unit is gathered."""
    dist.init_process_group()
    rank, world_size = dist.get_rank(), dist.get_world_size()
    with paused():
        sharded, alone = Zero3(model(rank), make_optimizer), model(0)
    for block in sharded.module.blocks:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    inputs, targets = batch(2 * world_size)
    backward(sharded, *(t.chunk(world_size)[rank] for t in (inputs, targets)))
    sharded.step()
    with paused():
        backward(alone, inputs, targets)
        make_optimizer(alone.parameters()).step()
        return difference(sharded.state_dict(), alone.state_dict())


def recomputed_outside():
    """As `recomputed`, with the recomputation around the block's hooks."""
    dist.init_process_group()
    rank = dist.get_rank()
    sharded, alone = Zero3(model(rank), make_optimizer), model(0)

    def apply_blocks(x, first=0, last=None):
        for block in sharded.module.blocks[first:last]:
            x = checkpoint(block, x, use_reentrant=False)
        return x

    sharded.module.apply_blocks = apply_blocks
    inputs, targets = batch(4)
    backward(sharded, *(t.chunk(2)[rank] for t in (inputs, targets)))
    backward(alone, inputs, targets)
    sharded.step()
    make_optimizer(alone.parameters()).step()
    return difference(sharded.state_dict(), alone.state_dict())


def test_zero3_with_recomputation_equals_one_process_and_gathers_no_more():
    run = launch(recomputed, 2, record=True)
    assert max(run) < 1e-12
    gathers = [event for event in run.trace.of_rank(0) if event.op == "all_gather"]
    assert len(gathers) == 2 * (1 + CONFIG.num_layers)


def test_zero3_with_recomputation_around_a_unit_equals_one_process():
    assert max(launch(recomputed_outside, 2)) < 1e-12


def said_by(what):
    dist.init_process_group()
    gpt = model(dist.get_rank())
    try:
        if what == "dtypes":
            gpt.norm.float()
            units_of(gpt)
        elif what == "frozen":
            gpt.blocks[0].mlp.up.weight.requires_grad_(False)
            Zero1(gpt, make_optimizer)
        elif what == "sharded state":
            Zero3(gpt, make_optimizer)
            gpt.state_dict()
    except (ValueError, RuntimeError) as error:
        return str(error)
    return "nothing"


@pytest.mark.parametrize("what, words", [
    ("dtypes", "root has parameters of several dtypes"), ("frozen", "block 0 has frozen parameters"),
    ("sharded state", "the parameters are in shards")])
def test_invalid_input_raises_a_clear_error(what, words):
    for said in launch(said_by, 2, what):
        assert words in said


def one_unit():
    dist.init_process_group()
    linear = nn.Linear(3, 1, dtype=torch.float64).to(rank_device())  # 4 numbers
    unit = Unit("all", linear, list(linear.parameters()))
    rank = dist.get_rank()
    linear.weight.grad = torch.full_like(linear.weight, float(rank))
    unit.reduce_scatter()
    first = unit.shard.grad.tolist()
    linear.weight.grad = torch.ones_like(linear.weight)
    unit.reduce_scatter()
    return len(unit.flat), first, unit.shard.grad.tolist(), linear.weight.grad is None


def test_a_shard_of_the_mean_gradient_is_padded_and_adds_up():
    run = launch(one_unit, 3)  # 4 numbers in 3 shards of 2, the last of them padding
    assert [length for length, *_ in run] == [6] * 3
    assert [first for _, first, *_ in run] == [[1.0, 1.0], [1.0, 0.0], [0.0, 0.0]]
    assert [both for _, _, both, _ in run] == [[2.0, 2.0], [2.0, 0.0], [0.0, 0.0]]
    assert all(dropped for *_, dropped in run)


def three_shards():
    dist.init_process_group()
    units_of(model(0), num_shards=3)


def test_a_rank_has_one_shard_or_all_of_them():
    with pytest.raises(RankError, match="can't have 3 shards: use 2, one for each rank, or 1") as caught:
        launch(three_shards, 2)
    assert isinstance(caught.value.__cause__, ValueError)
