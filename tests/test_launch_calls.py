"""Calls that DDP and its like make for a program are calls: compared, counted, and never refused in a right program."""
from __future__ import annotations

import contextlib
import copy
import threading
import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint
from torch import nn
from torch.distributed import _functional_collectives as functional
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel as DDP

from book import tap
from book.launch import HangError, LaunchError, RankError, launch
from tests.by_value import sent_by_value

sent_by_value(__name__)


def start() -> int:
    dist.init_process_group()
    return dist.get_rank()


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))


def x() -> torch.Tensor:
    return torch.ones(4, 6)


def train(model: nn.Module, num_steps: int = 3, optimizer: torch.optim.Optimizer | None = None) -> None:
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(num_steps):
        model(x()).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


# Right programs

def plain_ddp() -> None:
    start()
    model = DDP(net())
    train(model)
    with model.no_sync():
        train(model, 2)
    train(model, 1)
    model.eval()
    model(x())
    with torch.no_grad():
        model(x())


def ddp_with_options() -> None:
    start()
    for options in ({"find_unused_parameters": True}, {"static_graph": True}, {"gradient_as_bucket_view": True},
                    {"broadcast_buffers": False}, {"bucket_cap_mb": 1e-4}):
        train(DDP(net(), **options))


def two_models_in_turn() -> None:
    rank = start()
    first, second = DDP(net()), DDP(net(), process_group=dist.new_group())
    for _ in range(3):
        train(first, 1)
        train(second, 2)
        if rank == 0:
            first.module(x())
            second.module(x()).sum().item()


def joined() -> None:
    rank = start()
    model = DDP(net())
    with model.join():
        train(model, 2 + rank)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
    train(model, 2, optimizer)
    optimizer.consolidate_state_dict()


def hooked() -> None:
    start()
    model = DDP(net())
    model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    train(model)
    model = DDP(net())
    model.register_comm_hook(powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=2), powerSGD_hook.powerSGD_hook)
    train(model, 5)
    model = DDP(net())
    model.register_comm_hook(dist.group.WORLD, own_hook)
    train(model)


def own_hook(group, bucket):  # DDP refuses annotations that are strings
    """All-reduces a bucket, as a learner's own hook does."""
    work = dist.all_reduce(bucket.buffer(), group=group, async_op=True)
    assert work is not None
    return work.get_future().then(lambda future: future.value()[0] / group.size())


def sharded() -> None:
    start()
    model = net()
    fully_shard(model[0])
    train(fully_shard(model))
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    torch.manual_seed(0)  # the copies of a shard are not made alike by fully_shard
    train(fully_shard(nn.Linear(6, 1), mesh=mesh))
    train(FullyShardedDataParallel(nn.Linear(6, 1), device_id=torch.device("cpu")))


def cut_into_tensors(folder: str) -> None:
    start()
    mesh = init_device_mesh("cpu", (2,))
    distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)]).full_tensor()
    model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 1))
    parallelize_module(model, mesh, {"0": ColwiseParallel(), "1": RowwiseParallel()})
    for _ in range(2):
        model(x()).sum().backward()
    dist.checkpoint.save(model.state_dict(), checkpoint_id=folder)
    dist.checkpoint.load(model.state_dict(), checkpoint_id=folder)
    assert functional.all_reduce(torch.ones(3), "sum", mesh).tolist() == [2.0] * 3


def piped() -> None:
    rank = start()
    stage = PipelineStage(nn.Linear(6, 6), rank, 2, torch.device("cpu"))
    schedule = Schedule1F1B(stage, 4, loss_fn=nn.functional.mse_loss)
    schedule.step(*([] if rank else [torch.ones(8, 6)]), **({"target": torch.ones(8, 6)} if rank else {}))


def other_lines() -> None:
    """Ranks make the same calls at different lines, and catch errors."""
    rank = start()
    model = DDP(net())
    for step in range(3):
        if rank == 0:
            dist.broadcast(torch.ones(2), 0)
            model(x()).sum().backward()
        else:
            dist.broadcast(torch.empty(2), 0)
            model(x()).sum().backward()
        with contextlib.suppress(ValueError):
            if step == rank:
                raise ValueError


def compiled() -> None:
    start()
    train(torch.compile(DDP(net()), backend="eager"), 2)


def in_a_thread() -> None:
    start()
    group = dist.new_group()
    thread = threading.Thread(target=lambda: [dist.all_reduce(torch.ones(1), group=group) for _ in range(20)])
    thread.start()
    train(DDP(net()))
    thread.join()


def copied_on_one_rank() -> None:
    rank = start()
    model = DDP(net())
    for _ in range(3):
        model(x()).sum().backward()
        if rank == 0:
            copy.deepcopy(model)  # its best so far, kept until there is a better one


def a_model_that_one_rank_has_alone() -> None:
    rank = start()
    group = dist.new_group([0])
    own = DDP(net(), process_group=group) if rank == 0 else net()
    whole = functional.all_gather_tensor_autograd(torch.ones(2, 2, requires_grad=True), 0, dist.group.WORLD)
    whole.sum().backward()
    own(x()).sum().backward()


RIGHT = (plain_ddp, ddp_with_options, two_models_in_turn, joined, hooked, sharded, piped, other_lines, compiled,
         in_a_thread, copied_on_one_rank, a_model_that_one_rank_has_alone)


@pytest.mark.slow
@pytest.mark.parametrize("program", RIGHT, ids=[program.__name__ for program in RIGHT])
def test_right_programs_pass_without_a_word(program: Callable[[], None], capsys: pytest.CaptureFixture[str]) -> None:
    assert launch(program, 2).findings == []
    assert "warning" not in capsys.readouterr().out


@pytest.mark.slow
def test_right_programs_on_meshes_pass(tmp_path: object) -> None:
    launch(cut_into_tensors, 2, str(tmp_path))


# Wrong ones: what must be said

def evaluates_in_a_function() -> None:
    rank = start()
    model = DDP(net())
    for _ in range(3):
        model(x()).sum().backward()
        if rank == 0:
            evaluate(model)


def evaluate(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(x())


def evaluates_every_tenth_step() -> None:
    rank = start()
    model = DDP(net())
    for step in range(25):
        model(x()).sum().backward()
        if step % 10 == 0 and rank == 0:
            model(x())


def leaves_the_forward_out() -> None:
    rank = start()
    model = DDP(net())
    for _ in range(3):
        model(x()).sum().backward()
        if rank != 0:
            continue
        model(x())


def leaves_the_forward_out_in_one_step() -> None:
    """The condition around the loop holds on all ranks, and explains nothing."""
    late = start()
    model = DDP(net())
    if late in (0, 1):
        for step in range(3):
            if step == late + 2:
                continue
            model(x()).sum().backward()


def meets_in_a_barrier_behind_a_condition() -> None:
    rank = start()
    model = DDP(nn.Linear(6, 1))
    for step in range(3):
        if rank == 1 and step == 2: dist.barrier()  # noqa: E701 - as programs have it
        model(x()).sum().backward()


def sums_a_gradient_and_a_metric() -> None:
    rank = start()
    model = DDP(nn.Linear(1, 1, bias=False))
    for _ in range(3 + (rank == 0)):
        model(torch.ones(2, 1)).sum().backward()
    dist.all_reduce(torch.ones(1))


def is_refused_in_backward() -> None:
    rank = start()
    model = DDP(nn.Linear(6, 1))
    train(model, 2)  # DDP makes its buckets anew after the first
    if rank == 0:
        time.sleep(0.5)
        model(x()).sum().backward()
    else:
        dist.all_reduce(torch.ones(3))


def stops_early_by_itself() -> None:
    rank = start()
    model = DDP(nn.Linear(6, 1))
    for epoch in range(5):
        model(x()).sum().backward()
        if 1.0 + rank * epoch > 2.5:
            break
    dist.barrier()


def evaluates_on_one_rank_and_stops_early() -> None:
    """As karpathy/nanoGPT's train.py does; without buffers such an evaluation calls nobody, and is no cause."""
    rank, step = start(), 0
    model = DDP(nn.Linear(6, 1))
    while True:
        if step % 2 == 0 and rank == 0:
            evaluate(model)
        if step == 0 and not model.training:
            break
        model(x()).sum().backward()
        step += 1
        if step > 3 - rank:
            break
    dist.barrier()


def runs_out_of_memory() -> None:
    rank = start()
    model = DDP(nn.Linear(6, 1))
    for step in range(4):
        try:
            loss = model(x()).sum()
            if rank == 1 and step == 3:
                raise MemoryError
            loss.backward()
        except MemoryError:
            continue
    dist.all_reduce(torch.ones(1))


def reduces_the_norm_where_it_is_finite() -> None:
    rank = start()
    model = DDP(nn.Linear(6, 1))
    for step in range(4):
        model(x()).sum().backward()
        norm = torch.tensor(float("inf") if step == 2 and rank == 1 else 1.0)
        if norm.isfinite():
            dist.all_reduce(norm)


def is_out_of_step_long_before() -> None:
    rank = start()
    for step in range(3):
        dist.all_reduce(torch.tensor(1.0))
        if rank == 0 and step == 1:
            dist.all_reduce(torch.tensor(2.0))
    dist.barrier()


def trains_one_of_two_models_more() -> None:
    rank = start()
    first, second = DDP(net()), DDP(net())
    for step in range(3):
        first(x()).sum().backward()
        second(x()).sum().backward()
        if step == 1 and rank == 1:
            second(x()).sum().backward()


FORWARD = "rank {} has made 1 forward of {} more than rank {}: test_launch_calls.py line "
WRONG = [
    (evaluates_in_a_function, FORWARD.format(0, "the DDP model", 1), "return model(x()), under `if rank == 0`"),
    (evaluates_every_tenth_step, FORWARD.format(0, "the DDP model", 1), "under `if step % 10 == 0 and rank == 0`"),
    (leaves_the_forward_out, FORWARD.format(0, "the DDP model", 1), "model(x()), after `if rank != 0: continue`"),
    (leaves_the_forward_out_in_one_step, FORWARD.format(1, "the DDP model", 0),
     "after `if step == late + 2: continue`"),
    (meets_in_a_barrier_behind_a_condition, "rank 1 has come once to ",
     "under `if rank == 1 and step == 2`, rank 0 never"),
    (sums_a_gradient_and_a_metric, "rank 0 has run the DDP model on 4 batches, rank 1 on only 3", "model.join()"),
    (is_refused_in_backward, FORWARD.format(0, "the DDP model", 1), "under `if rank == 0`"),
    (stops_early_by_itself, "rank 0 has run the DDP model on 4 batches, rank 1 on only 3", "model.join()"),
    (evaluates_on_one_rank_and_stops_early, "rank 0 has run the DDP model on 4 batches, rank 1 on only 3",
     "model.join()"),
    (runs_out_of_memory, "rank 1 has come 4 times to ", "`except MemoryError` goes on at test_launch_calls.py line "),
    (reduces_the_norm_where_it_is_finite, "rank 0 has come 3 times to ", "under `if norm.isfinite()`, rank 1 only 2"),
    (is_out_of_step_long_before, "ranks 0 and 1 are out of step since call 3 of this group: rank 0 made it at ",
     "under `if rank == 0 and step == 1`, and rank 1 at "),
    (trains_one_of_two_models_more, FORWARD.format(1, "DDP model 2, in the order in which they were made,", 0),
     "under `if step == 1 and rank == 1`"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("program", "begins", "says"), WRONG, ids=[program.__name__ for program, *_ in WRONG])
def test_a_wrong_program_is_told_which_rank_fell_out_of_step_and_where(program: Callable[[], None], begins: str,
                                                                       says: str) -> None:
    with pytest.raises(LaunchError) as caught:
        launch(program, 2, hang_s=1)
    cause = [line.removeprefix("cause: ") for line in str(caught.value).splitlines() if line.startswith("cause: ")][-1]
    assert cause.startswith(begins) and says in cause
    assert "Received data size" not in str(caught.value) and "SIGABRT" not in str(caught.value)


@pytest.mark.slow
def test_a_call_that_is_refused_in_ddps_own_code_ends_the_rank_with_the_calls_of_both() -> None:
    with pytest.raises(RankError) as caught:
        launch(is_refused_in_backward, 2)
    _, first, second, *_ = str(caught.value).splitlines()
    assert first.startswith("  rank 0 calls all_reduce(float32 [7], SUM) of DDP in backward at test_launch_calls.py")
    assert second.startswith("  rank 1 calls all_reduce(float32 [3], SUM) at test_launch_calls.py")


# Threads and requests

def fails_in_a_thread() -> int:
    rank = start()

    def work() -> None:
        if rank == 1:
            raise ValueError("not this batch")

    thread = threading.Thread(target=work, name="logger")
    thread.start()
    thread.join()
    return rank


@pytest.mark.slow
def test_a_thread_that_an_error_has_ended_is_told_though_the_run_ends(capsys: pytest.CaptureFixture[str]) -> None:
    run = launch(fails_in_a_thread, 2)
    assert list(run) == [0, 1] and "warning: thread logger of rank 1 has ended" in capsys.readouterr().out
    said, = run.findings
    assert said.startswith("thread logger of rank 1 has ended with an error in test_launch_calls.py line ")
    assert said.endswith(": ValueError: not this batch")


def polls_in_vain() -> None:
    rank = start()
    request = dist.irecv(torch.ones(4), 1 - rank)
    assert request is not None
    while not request.is_completed():
        time.sleep(0.01)


@pytest.mark.slow
def test_ranks_that_poll_for_one_another_are_told_what_for() -> None:
    with pytest.raises(HangError) as caught:
        launch(polls_in_vain, 2, timeout_s=2)
    assert "possible cause: ranks 0, 1 wait for irecvs from one another" in str(caught.value)
    assert "  rank 0 polls its irecv from rank 1 at test_launch_calls.py line " in str(caught.value)


def has_fewer_micro_batches() -> None:
    rank = start()
    stage = PipelineStage(nn.Linear(4, 4), rank, 2, torch.device("cpu"))
    schedule = Schedule1F1B(stage, 2 if rank else 4, loss_fn=nn.functional.mse_loss)
    schedule.step(*([] if rank else [torch.ones(8, 4)]), **({"target": torch.ones(4, 4)} if rank else {}))


@pytest.mark.slow
def test_micro_batches_that_differ_in_number_are_counted() -> None:
    with pytest.raises(HangError, match="send for 6 messages to rank 1, which has called recv for 5: do they have"):
        launch(has_fewer_micro_batches, 2, hang_s=1)


def waits_elsewhere() -> None:
    rank = start()
    if rank == 0:
        work = dist.all_reduce(torch.ones(1), async_op=True)
        dist.recv(torch.ones(1), 1)
        assert work is not None
        work.wait()


@pytest.mark.slow
def test_a_rank_that_waits_for_a_message_is_not_said_to_wait_in_its_last_collective() -> None:
    with pytest.raises(HangError, match="cause: rank 0 waits in recv from rank 1, which has returned"):
        launch(waits_elsewhere, 2, hang_s=1)


# The log

def who_calls() -> list[tuple[str, str | None, bool]]:
    start()
    model = DDP(net())
    before = len(tap.ops())
    train(model, 2)
    return [(op.kind, op.owner, op.in_backward) for op in tap.ops()[before:]]


@pytest.mark.slow
def test_the_log_says_who_made_a_call_and_in_which_pass() -> None:
    for ops in launch(who_calls, 2):
        assert set(ops) == {("broadcast", "DDP", False), ("all_reduce", "DDP", True)}
