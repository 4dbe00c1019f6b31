"""Ranks that call one another: parameters kept on a server, stages and parts reached by calls."""
from __future__ import annotations

import inspect
import os
import re
import subprocess
import sys
import threading
from collections import Counter
from math import pi, sin
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.autograd as dist_autograd
from torch.distributed import rpc
from torch.distributed.optim import DistributedOptimizer

from book.cost import Link, ring_sent_bytes
from book.launch import RankError, launch, rank_device
from book.parallel.model import GPT, GPTConfig
from book.parallel.remote import RemotePipeline, rpc_worker
from book.parallel.stage import GPTStage
from book.replay import pipeline_order
from book.simulate import simulate
from tests.test_chapters import cells
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
    *(pytest.param(*sizes, marks=pytest.mark.slow) for sizes in ((2, 1, 1), (2, 1, 8))), (3, 1, 3), (4, 2, 2)])
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


@pytest.mark.slow
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


PAGE, ARGUMENTS = "15_parameter_server", "88_rpc_in_pytorch"
CALLS = {"init_rpc": [rpc.init_rpc], "TensorPipeRpcBackendOptions": [rpc.TensorPipeRpcBackendOptions.__init__],
         "rpc_sync": [rpc.rpc_sync, rpc.rpc_async, rpc.remote], "shutdown": [rpc.shutdown]}


@pytest.fixture(scope="module")
def servers() -> Any:
    """The function of the first cell."""
    namespace: dict[str, Any] = {}
    exec(cells(PAGE, "code")[0].partition("network =")[0], namespace)
    return namespace["servers"]


@pytest.mark.parametrize("world_size, num_servers", [(2, 1), (4, 1), (4, 2), (4, 4), (6, 3), (12, 4), (9, 9)])
def test_servers_send_what_the_page_says(servers: Any, world_size: int, num_servers: int) -> None:
    schedule = servers(num_servers, world_size)
    schedule.check()
    num_bytes = 360.0
    sent = simulate(schedule, num_bytes, Link(0.0, 1.0)).sent_bytes()
    assert sent.max() == pytest.approx((world_size + num_servers - 2) / num_servers * num_bytes)
    if num_servers == world_size:
        assert sent == pytest.approx([ring_sent_bytes(world_size, num_bytes)] * world_size)


@pytest.mark.parametrize("staleness", range(9))
def test_the_limit_is_where_a_root_leaves_the_unit_circle(staleness: int) -> None:
    """w(t+1) = w(t) - eta w(t - staleness), so z^(staleness+1) - z^staleness + eta = 0."""
    limit = 2 * sin(pi / (2 * (2 * staleness + 1)))
    for factor, settles in ((0.99, True), (1.01, False)):
        polynomial = np.zeros(staleness + 2)
        polynomial[[0, 1]] = 1, -1
        polynomial[-1] += factor * limit
        assert (np.abs(np.roots(polynomial)).max() < 1) == settles


@pytest.mark.parametrize("staleness", range(1, 9))
def test_the_best_rate_is_where_two_roots_meet(staleness: int) -> None:
    """There the largest root is staleness / (staleness + 1), and a little beside it a larger one."""
    best = staleness**staleness / (staleness + 1) ** (staleness + 1)

    def largest(rate: float) -> float:
        return np.abs(np.roots([1, -1, *[0] * (staleness - 1), rate])).max()

    assert largest(best) == pytest.approx(staleness / (staleness + 1), abs=1e-6)
    assert min(largest(0.99 * best), largest(1.01 * best)) > largest(best) + 1e-4


def server(name: str) -> Any:
    """A server of the page, made as the page makes it."""
    namespace: dict[str, Any] = {"torch": torch, "rpc": rpc, "threading": threading}
    source = next(cell for cell in cells(PAGE, "code") if f"class {name}" in cell)
    exec(source.partition("looked_up, (bytes_in")[0], namespace)
    arguments = {"ParameterServer": (1,), "AsynchronousServer": (torch.ones(1), 0.1), "TableServer": (4, 2)}
    return namespace[name](*arguments[name])


@pytest.mark.parametrize("name", ["ParameterServer", "AsynchronousServer", "TableServer"])
def test_nobody_pulls_in_the_middle_of_a_step(name: str) -> None:
    held = server(name)
    arguments = (torch.tensor([1]),) if name == "TableServer" else ()
    pull = threading.Thread(target=held.pull, args=arguments, daemon=True)
    with held.lock:
        pull.start()
        pull.join(0.2)
        assert pull.is_alive()
    pull.join(20)
    assert not pull.is_alive()


@pytest.mark.slow
def test_init_rpc_does_not_read_the_rank_from_the_environment() -> None:
    def join() -> None:  # in here, so that a rank need not import this module
        rpc.init_rpc(f"worker{os.environ['RANK']}", world_size=2)

    with pytest.raises(RankError, match="worker_id"):
        launch(join, 2)


@pytest.mark.slow
def test_init_rpc_does_not_read_the_world_size_from_the_environment() -> None:
    def join() -> tuple[str, str] | None:
        if os.environ["RANK"] != "0":
            return None  # rank 1 never joins
        rpc.init_rpc("worker0", rank=0)
        here, missing = rpc.rpc_sync("worker0", rpc.get_worker_info).name, ""
        try:
            rpc.rpc_sync("worker1", rpc.get_worker_info)
        except RuntimeError as error:
            missing = str(error)
        rpc.shutdown()
        return here, missing

    here, missing = launch(join, 2)[0]
    assert here == "worker0"
    assert "could not find destination name worker1" in missing


@pytest.mark.parametrize("name", CALLS)
def test_every_argument_is_explained_with_its_default(name: str) -> None:
    page = "\n".join(cells(ARGUMENTS, "markdown"))
    entry = re.search(rf"^`{name}`.*\n: (.*)$", page, re.M)
    explained = dict(reversed(re.findall(r"`(\w+)(?:=([^`]+))?`", entry[1])))  # the first mention counts
    for call in CALLS[name]:
        for parameter in inspect.signature(call).parameters.values():
            if parameter.name == "self" or parameter.name.startswith("_"):
                continue
            default = "" if parameter.default is parameter.empty else repr(parameter.default)
            assert explained[parameter.name] == default
