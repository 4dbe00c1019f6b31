"""Pipelines over RPC on real ranks with different seeds: equal to one process, one replica of them or two."""
import subprocess
import sys
from collections import Counter

import pytest
import torch
import torch.distributed as dist
import torch.distributed.autograd as dist_autograd
from torch.distributed.optim import DistributedOptimizer

from book.launch import RankError, launch, rank_device
from book.parallel.model import GPT, GPTConfig
from book.parallel.remote import RemotePipeline, rpc_worker
from book.parallel.stage import GPTStage
from book.replay import pipeline_order
from tests.website import ROOT

CONFIG = GPTConfig(vocab_size=11, context=8, num_layers=4, num_heads=2, width=8, dtype=torch.float64)
BATCH, STEPS, LR, TOLERANCE, LIMIT_S = 8, 3, 0.5, 1e-12, 120


def batch():
    generator = torch.Generator().manual_seed(5)
    return torch.randint(0, 11, (2, BATCH, 8), generator=generator)


def train(num_replicas, num_micro_batches):
    """On a driver: its pipeline's state before and after, the losses, the last gradients, by stage."""
    rank_device()
    dist.init_process_group()
    num_stages = dist.get_world_size() // num_replicas
    ranks = torch.arange(dist.get_world_size()).view(num_stages, num_replicas).tolist()
    with rpc_worker() as rank:
        if rank >= num_replicas:
            return None
        pipeline = RemotePipeline([f"worker{peers[rank]}" for peers in ranks], CONFIG,
                                  peers=ranks if num_replicas > 1 else None)
        before, losses = pipeline.state(), []
        optimizer = DistributedOptimizer(torch.optim.SGD, pipeline.parameter_rrefs(), lr=LR)
        inputs, targets = (t.chunk(num_replicas)[rank] for t in batch())
        for _ in range(STEPS):
            with dist_autograd.context() as context_id:
                loss = GPT.loss(pipeline(inputs, num_micro_batches), targets)
                pipeline.backward(context_id, loss)
                optimizer.step(context_id)
                gradients = pipeline.gradients(context_id)
            losses.append(loss.item())
        return before, losses, gradients, pipeline.state()


def alone(state):
    """Losses, last gradients and final parameters of one process that starts from the pipeline's state."""
    model = GPT(CONFIG)
    model.load_state_dict(state)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    inputs, targets = batch()
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = GPT.loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, {name: p.grad for name, p in model.named_parameters()}, model.state_dict()


def apart(tensors, others):
    assert tensors.keys() == others.keys()
    return max((tensors[name] - others[name]).abs().max().item() for name in others)


def matches(driven):
    """Whether a driver's last gradients and final parameters are those of one process."""
    before, _, gradients, state = driven
    _, expected_gradients, expected_state = alone(before)
    return max(apart(gradients, expected_gradients), apart(state, expected_state)) < TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize("world_size, num_replicas, num_micro_batches", [
    *(pytest.param(*sizes, marks=pytest.mark.full) for sizes in ((2, 1, 1), (2, 1, 8))), (3, 1, 3), (4, 2, 2)])
def test_training_equals_one_process(world_size, num_replicas, num_micro_batches):
    run = launch(train, world_size, num_replicas, num_micro_batches)
    drivers = [run[rank] for rank in range(num_replicas)]
    assert all(map(matches, drivers))
    assert all(apart(driven[0], drivers[0][0]) == 0 for driven in drivers)  # DDP has given every replica one state
    losses, *_ = alone(drivers[0][0])
    means = [sum(of_replicas) / num_replicas for of_replicas in zip(*(driven[1] for driven in drivers))]
    assert means == pytest.approx(losses, abs=TOLERANCE, rel=0)
    assert losses[-1] < losses[0]


@pytest.mark.slow
def test_a_run_is_recorded_action_by_action():
    """Threads run forwards and backwards in any order, but no backward before the last forward."""
    trace = launch(train, 3, 1, 4, record=True).trace
    actions = [event for event in trace.of_kind("compute") if event.stage is not None]
    assert Counter((e.rank, e.stage, e.op, e.micro_batch) for e in actions) == Counter(
        {(stage, stage, kind, micro_batch): STEPS for stage in range(3) for kind in "FB" for micro_batch in range(4)})
    order = pipeline_order(trace, step=STEPS - 1)
    for rank in range(3):
        assert [action.kind for action in order.actions if action.rank == rank] == ["F"] * 4 + ["B"] * 4


@pytest.mark.slow
def test_without_gradients_no_backward_runs():
    def evaluate():
        dist.init_process_group()
        with rpc_worker() as rank:
            if rank == 0:
                pipeline = RemotePipeline(["worker0", "worker1"], CONFIG, seed=3)
                with torch.no_grad():
                    return pipeline(batch()[0], 2)

    run = launch(evaluate, 2)
    with torch.no_grad():
        assert (run[0] - GPT.seeded(CONFIG, 3)(batch()[0])).abs().max() < TOLERANCE
    assert {event.op for event in run.trace.of_kind("compute")} == {"F"}


@pytest.mark.slow
def test_an_error_in_a_stage_is_reported_with_its_place():
    def too_long():
        dist.init_process_group()
        with rpc_worker() as rank:
            if rank == 0:
                pipeline = RemotePipeline(["worker0", "worker1"], CONFIG)
                pipeline(torch.zeros(2, 9, dtype=torch.long), 2)

    with pytest.raises(RankError, match="context is 8.*\nraised by worker0 in book/parallel/model.py") as caught:
        launch(too_long, 2)
    assert "rank 0 failed in test_parallel_remote.py" in str(caught.value)


@pytest.mark.slow
def test_micro_batches_without_a_sequence_are_refused():
    def too_many():
        dist.init_process_group()
        with rpc_worker() as rank:
            if rank == 0:
                RemotePipeline(["worker1"], CONFIG)(batch()[0], BATCH + 1)

    with pytest.raises(RankError, match="8 sequences can't make 9 micro-batches: each needs at least one"):
        launch(too_many, 2)


def test_a_worker_without_a_rank_is_refused():
    with pytest.raises(RuntimeError, match="call dist.init_process_group"), rpc_worker():
        pass


@pytest.mark.full
def test_the_same_function_runs_under_torchrun():
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4"]
    shown = subprocess.run([*torchrun, "-m", "tests.programs.rpc_replicas"], cwd=ROOT, capture_output=True, text=True,
                           timeout=LIMIT_S, check=True).stdout
    assert shown.splitlines() == ["matches one process: True"] * 2


@pytest.mark.parametrize("num_stages", [1, 2, 3, 4])
def test_stages_together_make_up_the_model(num_stages):
    inputs, _ = batch()
    stages = [GPTStage(GPT.seeded(CONFIG, 3), stage, num_stages) for stage in range(num_stages)]
    whole, x = GPT.seeded(CONFIG, 3), inputs
    for stage in stages:
        x = stage(x)
    assert torch.equal(x, whole(inputs))
    states = [stage.model.state_dict() for stage in stages]
    assert sum(map(len, states)) == len(whole.state_dict())  # no parameter is in two of them
    whole.load_state_dict({name: value for state in states for name, value in state.items()})


@pytest.mark.parametrize("stage, num_stages, words", [
    (0, 5, "4 blocks can't make 5 stages"), (0, 0, "4 blocks can't make 0 stages"),
    (2, 2, "no stage 2: stages are 0 to 1")])
def test_an_impossible_cut_is_refused(stage, num_stages, words):
    with pytest.raises(ValueError, match=words):
        GPTStage(GPT(CONFIG), stage, num_stages)


def half_a_loss():
    """A loss that does not depend on the pipeline."""
    rank_device()
    dist.init_process_group()
    with rpc_worker() as rank:
        if rank == 0:
            pipeline = RemotePipeline(["worker1"], CONFIG)
            with dist_autograd.context() as context_id:
                loss = torch.zeros(1, requires_grad=True).sum()
                dist_autograd.backward(context_id, [loss])
                pipeline.stages[0].rpc_sync().wait_for_gradients(context_id, 0.1)


@pytest.mark.slow
def test_missing_gradients_are_reported():
    with pytest.raises(RankError, match="stage 0 has gradients of 0 of its .* after 0.1 s: does the loss use all"):
        launch(half_a_loss, 2)
