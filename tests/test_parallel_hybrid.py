"""3-D parallelism on eight real ranks with different seeds: equal to one process, in every layout, and torch's too."""
from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from book.launch import RankError, launch, rank_device
from book.mesh import Mesh, MeshError
from book.parallel import GPT, broadcast_state
from book.parallel.hybrid import Hybrid, clip_gradients
from book.parallel.stage import GPTStage
from tests.by_value import sent_by_value
from tests.hybrid import (CONFIG, LAYOUTS, LEARNING_RATE, MIXED, NUM_MICRO_BATCHES, NUM_STEPS, adamw, alone, batch,
                          expected_piece, mean_losses, mesh_of, trained)

sent_by_value(__name__)

CUBE = (2, 2, 2)


def apart(layout, num_steps=NUM_STEPS, zero_stage=0, dtype=torch.float64):
    """The largest differences from one process, of a step's loss and of a final weight, and the number of weights."""
    run, (losses, weights) = trained(layout, num_steps, zero_stage, dtype), alone(num_steps, dtype)
    found, names = [], set()
    for rank, part in enumerate(run):
        place = mesh_of(layout).coordinates(rank)["tp"]
        for name, weight in part.weights.items():
            expected = expected_piece(weights, name, part.cut[name], place, layout[2])
            found.append((weight - expected).abs().max().item())
            names.add(name)
    off = [abs(got - expected) for got, expected in zip(mean_losses(run, layout), losses, strict=True)]
    assert len({part.drawn for part in run}) == 8, "each rank has drawn its own weights"
    assert losses[-1] < losses[0]
    return max(off), max(found, default=None), names


@pytest.mark.slow
@pytest.mark.parametrize("layout", MIXED)
def test_every_layout_of_eight_trains_like_one_process(layout):
    loss, weight, names = apart(layout)
    assert loss < 1e-12 and weight < 1e-12
    assert names == {name for name, _ in GPT(CONFIG).named_parameters()}


def test_there_are_ten_layouts_of_eight():
    assert len(set(LAYOUTS)) == len(LAYOUTS) == 10 and all(pp * dp * tp == 8 for pp, dp, tp in LAYOUTS)


@pytest.mark.slow
def test_twenty_steps_in_float32_match_one_process_within_two_gigabytes():
    loss, weight, _ = apart(CUBE, 20, dtype=torch.float32)
    # Sums are computed in a different order, and CPU types round them differently: 1.6e-5 on one of them.
    assert loss < 1e-4 and weight < 1e-4
    assert sum(part.pss_kb for part in trained(CUBE, 20, 0, torch.float32)) < 2e6


@pytest.mark.slow
@pytest.mark.parametrize("zero_stage", [*(pytest.param(stage, marks=pytest.mark.slow) for stage in (1, 2)), 3])
def test_state_sharded_over_dp_changes_nothing(zero_stage):
    loss, weight, _ = apart(CUBE, zero_stage=zero_stage)
    assert loss < 1e-12 and (zero_stage == 3 or weight < 1e-12)


MAX_NORMS = (100.0, 0.01)  # the first one changes nothing


def clipped(layout):
    """In a rank: the norms that it finds, its gradients after clipping to each of `MAX_NORMS`, and their cuts."""
    device = rank_device()
    dist.init_process_group()
    hybrid = Hybrid(GPT(CONFIG).to(device), mesh_of(layout), NUM_MICRO_BATCHES, adamw)
    hybrid.gradients(*(tensor.to(device) for tensor in batch(0)))
    parts, found = dict(hybrid.module.model.named_parameters()), []
    for max_norm in MAX_NORMS:
        norm = clip_gradients(hybrid.module.parameters(), hybrid.groups, max_norm).item()
        found.append((norm, {name: p.grad.clone().cpu() for name, p in parts.items()}))
    return found, {name: getattr(p, "shard_dim", None) for name, p in parts.items()}


@pytest.mark.slow
@pytest.mark.parametrize("layout", [CUBE, pytest.param((1, 2, 4), marks=pytest.mark.slow)], ids=str)
def test_clipping_counts_every_gradient_of_the_model_once(layout):
    gpt = launch(partial(GPT, CONFIG), 1)[0]
    GPT.loss(gpt(batch(0)[0]), batch(0)[1]).backward()
    run = launch(clipped, 8, layout)
    for number, max_norm in enumerate(MAX_NORMS):
        expected = torch.nn.utils.clip_grad_norm_(gpt.parameters(), max_norm).item()
        whole = {name: p.grad for name, p in gpt.named_parameters()}
        assert 0.01 < expected < 100
        for rank, (found, cut) in enumerate(run):
            norm, gradients = found[number]
            assert norm == pytest.approx(expected, rel=1e-12)
            place = mesh_of(layout).coordinates(rank)["tp"]
            for name, gradient in gradients.items():
                torch.testing.assert_close(gradient, expected_piece(whole, name, cut[name], place, layout[2]),
                                           rtol=1e-9, atol=1e-15)


BLOCK = {**{f"attention.{name}": ColwiseParallel() for name in "qkv"}, "attention.out": RowwiseParallel(),
         "mlp.up": ColwiseParallel(), "mlp.down": RowwiseParallel()}


def by_torch(num_steps):
    """In a rank: fully_shard, Schedule1F1B and parallelize_module on one DeviceMesh; the last stage's losses."""
    device = rank_device()
    dist.init_process_group()
    mesh = init_device_mesh(device.type, CUBE, mesh_dim_names=("pp", "dp", "tp"))
    stage, replica = mesh["pp"].get_local_rank(), mesh["dp"].get_local_rank()
    gpt = GPT(CONFIG).to(device)
    broadcast_state(gpt)
    module = GPTStage(gpt, stage, 2)
    for block in gpt.blocks[module.first:module.last]:
        parallelize_module(block, mesh["tp"], BLOCK)
        fully_shard(block, mesh=mesh["dp"])
    fully_shard(module, mesh=mesh["dp"])
    pipeline = Schedule1F1B(PipelineStage(module, stage, 2, device, group=mesh["pp"].get_group()), NUM_MICRO_BATCHES,
                            loss_fn=GPT.loss)
    # One model has parameters on (dp, tp) and others on dp alone, which foreach can't mix.
    optimizer = torch.optim.AdamW(module.parameters(), lr=LEARNING_RATE, foreach=False)
    found = []
    for step in range(num_steps):
        inputs, targets = (tensor.to(device).chunk(2)[replica] for tensor in batch(step))
        losses = []
        pipeline.step(*([] if stage else [inputs]), target=targets if stage else None, losses=losses if stage else None)
        optimizer.step()
        optimizer.zero_grad()
        if stage:
            found.append(torch.stack(losses).mean().item())
    return found


@pytest.mark.slow
def test_torchs_own_combination_on_one_device_mesh_equals_one_process_too():
    run, (losses, _) = launch(by_torch, 8, NUM_STEPS), alone()
    mesh = mesh_of(CUBE)
    ranks = [mesh.rank_at(pp=1, dp=replica, tp=0) for replica in range(2)]
    found = torch.tensor([run[rank] for rank in ranks], dtype=torch.float64).mean(0).tolist()
    assert found == pytest.approx(losses, abs=1e-10)


def refused(layout, config):
    dist.init_process_group()
    hybrid = Hybrid(GPT(config), mesh_of(layout), NUM_MICRO_BATCHES, adamw)
    hybrid.step(*(tensor[:6] for tensor in batch(0)))


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "error", "words"), [
    ((1, 2, 1), ValueError, "6 sequences can't be divided among 2 replicas"), ((2, 2, 1), MeshError, "has 4 ranks")],
    ids=str)
def test_a_layout_that_does_not_divide_the_model_is_refused(layout, error, words):
    with pytest.raises(RankError, match=words) as caught:
        launch(refused, 2, layout, copy.deepcopy(CONFIG))
    assert isinstance(caught.value.__cause__, error)


def test_other_axes_and_invalid_zero_stages_are_refused_before_anything_is_sent():
    """There is no process group here, so anything that sends raises a different error."""
    for axes in (("pp", "dp"), ("pp", "dp", "cp"), ("pp", "dp", "tp", "cp")):
        with pytest.raises(MeshError, match="needs a mesh of pp, dp, tp"):
            Hybrid(GPT(CONFIG), Mesh(axes, (1,) * len(axes)), NUM_MICRO_BATCHES, make_optimizer=adamw)
    for zero_stage in (-1, 4):
        with pytest.raises(ValueError, match=f"no ZeRO stage {zero_stage}"):
            Hybrid(GPT(CONFIG), mesh_of((1, 1, 1)), NUM_MICRO_BATCHES, adamw, zero_stage)


def clipped_without_gradients(zero_stage):
    device = rank_device()
    dist.init_process_group()
    hybrid = Hybrid(GPT(CONFIG).to(device), mesh_of((1, 2, 1)), NUM_MICRO_BATCHES, adamw, zero_stage)
    if zero_stage:
        hybrid.gradients(*(tensor.to(device) for tensor in batch(0)))
    clip_gradients(hybrid.module.parameters(), hybrid.groups, 1.0)


@pytest.mark.slow
@pytest.mark.parametrize("zero_stage", [0, pytest.param(2, marks=pytest.mark.slow), 3])
def test_clipping_without_gradients_raises_an_error(zero_stage):
    with pytest.raises(RankError, match="no parameter has a gradient") as caught:
        launch(clipped_without_gradients, 2, zero_stage)
    assert isinstance(caught.value.__cause__, ValueError)
