"""Pipelines recorded on real ranks: torch's own schedules run the orders of book.pipelines, and of the golden files."""
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import get_schedule_class

from book.launch import HangError, launch
from book.pipelines import gpipe, interleaved, one_f_one_b, zero_bubble
from book.record import follow_stages, stage_action
from book.replay import bubble, pipeline_order, replay_pipeline
from book.simulate import simulate_pipeline
from tests.by_value import sent_by_value
from tests.test_pipelines import GOLDEN

sent_by_value(__name__)

READS = ["tests/golden/pipelines/*"]

TORCHS = {"GPipe": gpipe, "1F1B": one_f_one_b, "Interleaved1F1B": interleaved, "ZBVZeroBubble": zero_bubble}


def train(name, stages_of_rank, num_stages, num_micro_batches, num_steps):
    """`num_steps` steps of one of torch's schedules on stages that are a linear map each."""
    dist.init_process_group()
    own = stages_of_rank[dist.get_rank()]
    stages = [PipelineStage(nn.Linear(4, 4), stage, num_stages, torch.device("cpu")) for stage in own]
    schedule = get_schedule_class(name)(stages if len(own) > 1 else stages[0], num_micro_batches,
                                        loss_fn=nn.functional.mse_loss)
    batch = torch.randn(2 * num_micro_batches, 4)
    inputs = (batch,) if any(stage.is_first for stage in stages) else ()
    target = {"target": batch} if any(stage.is_last for stage in stages) else {}
    with follow_stages(*stages):
        for _ in range(num_steps):
            schedule.step(*inputs, **target)
    schedule.step(*inputs, **target)  # not followed any more


def stages_of(schedule):
    return [[stage for stage in range(schedule.num_stages) if schedule.rank_of(stage) == rank]
            for rank in range(schedule.world_size)]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "size", "golden"), [
    ("1F1B", (4, 6), "one_f_one_b_4_6"), ("Interleaved1F1B", (8, 8), "interleaved_8_8"),
    ("ZBVZeroBubble", (6, 2), "zero_bubble_6_2"),
    *(pytest.param(*one, marks=pytest.mark.full) for one in (
        ("GPipe", (4, 6), "gpipe_4_6"), ("ZBVZeroBubble", (8, 8), "zero_bubble_8_8"), ("1F1B", (3, 5), None),
        ("Interleaved1F1B", (6, 4), None)))])
def test_torch_executes_these_orders(name, size, golden):
    schedule = TORCHS[name](*size) if (name, size) != ("Interleaved1F1B", (6, 4)) else interleaved(6, 4, 3)
    run = launch(train, schedule.world_size, name, stages_of(schedule), schedule.num_stages,
                 schedule.num_micro_batches, 2, record=True)
    for step in (0, 1):
        order = pipeline_order(run.trace, step)
        assert order.actions == schedule.actions
        if golden:
            assert order.to_csv().split("\n", 1)[1] == (GOLDEN / f"{golden}.csv").read_text().split("\n", 1)[1]
    with pytest.raises(ValueError, match="no step 2 on ranks"):
        pipeline_order(run.trace, 2)
    replayed = replay_pipeline(run.trace, 1.0, 2.0, step=1)
    assert (replayed.clock, replayed.source, replayed.backend) == ("modelled", "recorded", "gloo")
    assert bubble(replayed) == bubble(simulate_pipeline(schedule, 1.0, 2.0))


def two_replicas():
    """Ranks 0 and 2 are one pipeline, 1 and 3 another, which runs in another order."""
    dist.init_process_group()
    stage, replica = divmod(dist.get_rank(), 2)
    for kind, m in (("F0", "F1", "B0", "B1"), ("F0", "B0", "F1", "B1"))[replica]:
        with stage_action(kind, stage, int(m)):
            pass
    dist.barrier()


@pytest.mark.slow
def test_replicas_are_distinguished_by_their_ranks():
    trace = launch(two_replicas, 4, record=True).trace
    assert pipeline_order(trace, ranks=(0, 2)).to_csv() == "# pipeline,2,2\n0F0,0F1,0B0,0B1\n1F0,1F1,1B0,1B1\n"
    assert pipeline_order(trace, ranks=(1, 3)).to_csv() == "# pipeline,2,2\n0F0,0B0,0F1,0B1\n1F0,1B0,1F1,1B1\n"


def too_few_ahead():
    """Rank 0 wants its first gradient back before it has sent what rank 1 takes first."""
    dist.init_process_group()
    rank, message = dist.get_rank(), torch.zeros(1)
    for kind, m in (("F", 0), ("B", 0)) if rank == 0 else (("F", 0), ("F", 1), ("B", 0)):
        if (kind == "F") == (rank == 1):
            dist.recv(message, src=1 - rank)
        with stage_action(kind, rank, m):
            pass
        if (kind == "F") == (rank == 0):
            dist.send(message, dst=1 - rank)


@pytest.mark.slow
def test_a_run_that_hung_shows_how_far_it_got():
    with pytest.raises(HangError) as caught:
        launch(too_few_ahead, 2, record=True, hang_s=1)
    order = pipeline_order(caught.value.trace)
    assert order.to_csv() == "# pipeline,2,1\n0F0\n1F0\n"
    assert replay_pipeline(caught.value.trace, 1, 2).duration_s == 2


def what_raises_was_not_done():
    dist.init_process_group()
    try:
        with stage_action("F", 0, 0):
            raise RuntimeError
    except RuntimeError:
        pass
    with stage_action("B", 0, 0):
        pass
    try:
        with stage_action("forward", 0, 0):
            pass
    except ValueError as error:
        return str(error)


@pytest.mark.slow
def test_an_action_that_raises_is_left_out():
    run = launch(what_raises_was_not_done, 1, record=True)
    assert pipeline_order(run.trace).to_csv() == "# pipeline,1,1\n0B0\n"
    assert run[0] == "kind must be one of F, B, I, W, not 'forward'"
