"""Recordings of training: the memory that tensors take, what is saved for backward, stages of a pipeline."""
from __future__ import annotations

import json
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import get_schedule_class

from book import record
from book.cost import StateBytes, state_bytes
from book.hosts import Hosts, NoHosts
from book.launch import HangError, RankError, launch, rank_device
from book.parallel.model import GPT, GPTConfig
from book.parallel.sharded import Replicated, Zero1, Zero2, Zero3
from book.pipelines import gpipe, interleaved, one_f_one_b, zero_bubble
from book.record import (follow_stages, follow_units, held_state, holds, paused, stage_action, storage_bytes,
                         unit_action, unit_done)
from book.replay import bubble, pipeline_order, replay_pipeline
from book.simulate import simulate_pipeline
from book.trace import Trace, TraceError
from tests.by_value import sent_by_value
from tests.test_parallel_pipeline import GOLDEN



sent_by_value(__name__)

CONFIG = GPTConfig(vocab_size=13, context=5, num_layers=2, num_heads=2, width=8, dtype=torch.float64)
STAGES = (Replicated, Zero1, Zero2, Zero3)


def test_shared_memory_counts_once_and_freed_memory_not_at_all():
    flat = torch.zeros(10)
    assert storage_bytes([flat, flat[:3], flat[3:].view(7, 1)]) == 40
    flat.untyped_storage().resize_(0)
    assert storage_bytes([flat]) == 0


def test_state_of_a_model_and_its_optimizer():
    model = nn.Linear(4, 3)
    optimizer = torch.optim.Adam(model.parameters())
    assert held_state(model.parameters(), optimizer) == StateBytes(60, 0, 0)
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    assert held_state(model.parameters(), optimizer) == StateBytes(60, 60, 120)  # no 4 bytes of the step number
    assert held_state([model.bias]) == StateBytes(12, 12, 0)


@pytest.mark.parametrize("call, words", [
    (lambda: holds("weights", "root", 1), "holds one of parameters"),
    (lambda: unit_done("eating", "root", 0.0), "work is one of forward")])
def test_an_unknown_word_is_refused(call, words):
    with pytest.raises(ValueError, match=words):
        call()


def test_an_unknown_word_is_refused_before_the_block_runs():
    ran = []
    with pytest.raises(ValueError, match="work is one of forward"), unit_action("eating", "root"):
        ran.append(True)
    assert not ran


def by_hand():
    dist.init_process_group()
    holds("activations", "block 0", 12)
    with unit_action("forward", "block 0"):
        holds("activations", "block 0", 0)
    try:
        with unit_action("backward", "block 0"):
            raise KeyError("not done")
    except KeyError:
        pass


@pytest.mark.slow
def test_events_of_a_program_that_says_what_it_holds():
    events = sorted(launch(by_hand, 1, record=True).trace.events, key=lambda event: event.start_s)
    assert [(e.kind, e.op, e.unit, e.num_bytes) for e in events] == [
        ("memory", "activations", "block 0", 12), ("compute", "forward", "block 0", None),
        ("memory", "activations", "block 0", 0)]
    assert events[1].end_s >= events[2].end_s


def followed(stage):
    dist.init_process_group()
    rank, world_size = dist.get_rank(), dist.get_world_size()
    with paused():
        sharded = stage(GPT.seeded(CONFIG, rank).to(rank_device()), partial(torch.optim.AdamW, lr=1e-2))
    follow_units(sharded.units, sharded.optimizer)
    tokens = torch.arange(2 * CONFIG.context, device=rank_device()).view(2, -1) % CONFIG.vocab_size
    GPT.loss(sharded(tokens), tokens.flip(0)).backward()
    sharded.step()
    return [len(unit.flat) for unit in sharded.units], world_size


@pytest.fixture(scope="module", params=[
    pytest.param(0, marks=pytest.mark.slow), pytest.param(1, marks=pytest.mark.slow), 2, 3],
    ids=lambda number: f"stage {number}")
def run(request):
    return request.param, launch(followed, 2, STAGES[request.param], record=True)


def on_rank_0(trace):
    return sorted(trace.of_rank(0), key=lambda event: event.start_s)


def after(events):
    """What rank 0 holds of each (kind of state, unit) at the end, and the most it held of all parameters at once."""
    held, most = {}, 0
    for event in events:
        if event.kind == "memory":
            held[event.op, event.unit] = event.num_bytes
            most = max(most, sum(size for (what, _), size in held.items() if what == "parameters"))
    return held, most


@pytest.mark.slow
def test_memory_left_after_the_step_matches_the_formula(run):
    number, launched = run
    lengths, world_size = launched[0]
    held, _ = after(on_rank_0(launched.trace))
    formula = state_bytes(sum(lengths), number, world_size, StateBytes(8, 8, 16))
    totals = {what: sum(size for (name, _), size in held.items() if name == what)
              for what in ("parameters", "gradients", "optimizer")}
    assert totals == {"parameters": formula.parameters, "gradients": 0, "optimizer": formula.optimizer}


@pytest.mark.slow
def test_only_stage_3_frees_parameters_and_holds_two_units_at_most(run):
    number, launched = run
    (root, *blocks), world_size = launched[0]
    _, most = after(on_rank_0(launched.trace))
    whole = 8 * (root + sum(blocks))
    assert most == (whole / world_size + 8 * (root + max(blocks)) if number == 3 else whole)


@pytest.mark.slow
def test_every_unit_runs_forward_and_backward_once_and_the_update_is_last(run):
    _, launched = run
    work = [(e.op, e.unit) for e in on_rank_0(launched.trace) if e.kind == "compute"]
    units = ["root", "block 0", "block 1"]
    passes = [(op, unit) for op in ("forward", "backward") for unit in units]
    assert sorted(work) == sorted([*passes, ("update", "all")])
    assert [unit for op, unit in work if op == "forward"] == units
    assert [unit for op, unit in work if op == "backward"] == ["root", "block 1", "block 0"]
    assert work[-1] == ("update", "all")


@pytest.mark.slow
def test_the_order_of_a_unit_in_stage_3():
    events = on_rank_0(launch(followed, 2, Zero3, record=True).trace)
    first = [(e.op, e.unit) for e in events if e.kind != "collective" and e.unit in (None, "block 0")]
    kinds = [e.op if e.kind == "collective" else f"{e.op} {'freed' if e.num_bytes == 0 else ''}".strip()
             for e in events if e.kind == "collective" or (e.unit == "block 0" and e.kind == "compute")]
    assert first[0] == ("parameters", "block 0")
    forward = kinds.index("forward")
    assert kinds[:forward + 1] == ["all_gather", "all_gather", "forward"]
    backward = kinds.index("backward")
    assert kinds[backward - 1:backward + 2] == ["all_gather", "backward", "reduce_scatter"]


SHIFT_S = 1000


def saving(folder, num_messages=2):
    import torch
    import torch.distributed as dist

    dist.init_process_group()
    other = 1 - dist.get_rank()
    for _ in range(num_messages):
        incoming = torch.empty(4)
        requests = [dist.irecv(incoming, other), dist.isend(torch.ones(4), other)]
        for request in requests:
            request.wait()
    record.save(f"{folder}/{dist.get_rank()}.json")


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Files of two ranks, and the trace of the launch that wrote them."""
    folder = tmp_path_factory.mktemp("saved")
    run = launch(saving, 2, str(folder), record=True)
    return sorted(folder.iterdir()), run.trace


def changed(path, folder, **changes):
    """A copy of a saved file with other values."""
    copy = folder / path.name
    copy.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    return copy


@pytest.mark.slow
def test_a_merged_trace_is_that_of_the_launch(saved):
    files, trace = saved
    merged = record.merge(reversed(files))
    assert merged.logical() == trace.logical() and merged.backend == "gloo"
    assert 0 < merged.clock_error_s < 0.1 and Trace.from_json(merged.to_json()).clock_error_s == merged.clock_error_s
    assert trace.clock_error_s is None


def fails_while_the_other_waits(folder):
    import torch
    import torch.distributed as dist

    record.start()
    dist.init_process_group()
    try:
        dist.all_reduce(torch.ones(4))
        if dist.get_rank() == 1:
            raise ValueError("bad batch")
        dist.all_reduce(torch.ones(4))
    finally:
        record.save(f"{folder}/{dist.get_rank()}.json")


@pytest.mark.slow
def test_a_rank_that_fails_saves_without_the_others(tmp_path):
    """It would ask rank 0 for its time, which waits for it in an all-reduce: the crash would become a hang."""
    with pytest.raises(RankError, match="bad batch"):
        launch(fails_while_the_other_waits, 2, str(tmp_path), timeout_s=60)
    assert json.loads((tmp_path / "1.json").read_text())["offset_ns"] == 0


@pytest.mark.slow
def test_a_message_that_arrives_before_it_is_sent_is_refused(saved, tmp_path):
    (first, second), _ = saved
    ahead = changed(second, tmp_path, offset_ns=json.loads(second.read_text())["offset_ns"] + SHIFT_S * 10**9)
    with pytest.raises(TraceError, match=r"arrives at rank 0 (999|1000)\.\d+ s before rank 1 sends it: .*record.merge"):
        record.merge([first, ahead])


@pytest.mark.slow
@pytest.mark.parametrize("which, message", [
    ((), "there is no file from rank 0"), ((0,), "there is no file from rank 1"),
    ((0, 0), "from rank 0, and so is another file")])
def test_every_rank_has_one_file(saved, which, message):
    with pytest.raises(TraceError, match=message):
        record.merge([saved[0][number] for number in which])


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{"format": "else"}, {"recording": None}, {"recording": {"operations": [1]}},
                                     {"emitted": {}}, {"more": 1}])
def test_a_file_that_is_not_a_recording_raises_a_clear_error(saved, tmp_path, changes):
    with pytest.raises(TraceError, match="is not a recording that record.save wrote"):
        record.merge([changed(saved[0][0], tmp_path, **changes), saved[0][1]])


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(TraceError, match="0.json can't be read: No such file"):
        record.merge([tmp_path / "0.json"])


@pytest.mark.slow
def test_hosts_whose_clocks_differ_are_aligned(tmp_path):
    """Two hosts, a thousand seconds apart, under torchrun alone."""
    try:
        with Hosts(2, 10**9, clock_shift_s=SHIFT_S) as hosts:
            hosts.torchrun(2, ["-m", "tests.programs.record_across_hosts", str(tmp_path)])
    except NoHosts as reason:
        pytest.skip(str(reason))
    files = sorted(tmp_path.iterdir())
    merged = record.merge(files)
    assert merged.world_size == 4 and merged.duration_s < 60 and merged.clock_error_s < 0.01
    assert {event.op for event in merged.of_kind("collective")} == {"all_reduce"}
    offsets = [json.loads(path.read_text())["offset_ns"] / 1e9 for path in files]
    assert offsets == pytest.approx([0, 0, -SHIFT_S, -SHIFT_S], abs=0.01)
    other = tmp_path / "not aligned"
    other.mkdir()
    with pytest.raises(TraceError, match="before rank . sends it: do their hosts' clocks differ"):
        record.merge([changed(path, other, offset_ns=0) for path in files])


sent_by_value(__name__)


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
    *(pytest.param(*one, marks=pytest.mark.slow) for one in (
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
