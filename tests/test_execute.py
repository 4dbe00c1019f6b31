"""Code executed cell by cell."""
from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from book.collectives import (COLLECTIVES, all_to_all, ring_all_gather, ring_all_reduce, ring_reduce_scatter,
                              tree_all_reduce)
from book.cost import Link
from book.execute import execute
from book.launch import LaunchError, launch
from book.schedule import Move, Schedule
from book.simulate import simulate
from book.trace import Trace
from tests.by_value import sent_by_value


sent_by_value(__name__)

ITEM_BYTES = 8


def schedules(world_size: int) -> list[Schedule]:
    """Every collective of the book, on `world_size` ranks."""
    return [schedule for collective in COLLECTIVES.values() for schedule in collective.schedules(world_size)]


def values(rank: int, length: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """Whole numbers that differ from rank to rank and that every dtype here adds without rounding."""
    generator = torch.Generator().manual_seed(100 + rank)
    return torch.randint(0, 8, (length,), generator=generator).to(dtype)


def execute_all(to_run: list[Schedule], length: int) -> list[tuple[Trace, torch.Tensor]]:
    """In a rank: each schedule on fresh data; its trace of this rank and what the tensor then holds."""
    import torch.distributed as dist
    dist.init_process_group()
    done = []
    for schedule in to_run:
        tensor = values(dist.get_rank(), length)
        done.append((execute(schedule, tensor), tensor))
    return done


def joined(traces: list[Trace]) -> Trace:
    """One trace of all ranks from those of each."""
    events = [event for trace in traces for event in trace.events]
    return Trace(events, len(traces), "measured", "executed", name=traces[0].name)


@pytest.fixture(scope="module", params=[
    3, 6, *(pytest.param(world_size, marks=pytest.mark.slow) for world_size in (2, 4, 5))])
def runs(request: pytest.FixtureRequest) -> tuple[list[Schedule], int, list]:
    """All schedules on one number of ranks, with chunks of one size: (schedules, length, what the ranks returned)."""
    to_run, length = schedules(request.param), 60
    return to_run, length, list(launch(execute_all, request.param, to_run, length))


@pytest.mark.slow
def test_executed_traces_equal_simulated_ones_except_for_times(runs):
    to_run, length, ranks = runs
    for place, schedule in enumerate(to_run):
        simulated = simulate(schedule, length * ITEM_BYTES, Link(1e-5, 1e9))
        executed = joined([rank[place][0] for rank in ranks])
        assert executed.logical().events == simulated.logical().events, schedule.name
        assert executed.clock == "measured" and executed.source == "executed" and executed.name == schedule.name


@pytest.mark.slow
def test_tensors_hold_what_one_process_computes(runs):
    to_run, length, ranks = runs
    start = torch.stack([values(rank, length) for rank in range(len(ranks))])
    for place, schedule in enumerate(to_run):
        expected = replayed(schedule, start)
        for rank, done in enumerate(ranks):
            assert torch.equal(done[place][1], expected[rank]), (schedule.name, rank)
        if schedule.promise == "all_reduce":
            assert torch.equal(expected, start.sum(0).expand_as(start))


def replayed(schedule: Schedule, start: torch.Tensor) -> torch.Tensor:
    """The tensors (R, N) that a schedule leaves, moved by one process that knows nothing of messages."""
    held = start.clone()
    for rows in schedule.steps():
        before = [row.tensor_split(schedule.num_chunks) for row in held.clone()]
        for row in rows:
            move = schedule.moves[row]
            into = move.chunk if move.into is None else move.into
            chunk = held[move.dst].tensor_split(schedule.num_chunks)[into]
            chunk.copy_(before[move.src][move.chunk] + (chunk if move.op == "reduce" else 0))
    return held


def the_librarys(length: int) -> dict[str, tuple[torch.Tensor, slice]]:
    """In a rank: what torch's own collectives leave on the data of `execute_all`, and which part of it is theirs."""
    import torch.distributed as dist
    dist.init_process_group()
    rank, size = dist.get_rank(), dist.get_world_size()
    root, whole, part = rank == 0, slice(0, length), length // size
    sums, copies, transposed = values(rank, length), values(rank, length), torch.empty(length, dtype=torch.float64)
    own = values(rank, length).split(part)
    dist.reduce(sums, 0)
    dist.broadcast(copies, 0)
    dist.all_to_all_single(transposed, values(rank, length))
    scattered, gathered = torch.empty(part, dtype=torch.float64), [torch.empty_like(own[0]) for _ in own]
    dist.scatter(scattered, list(own) if root else None, 0)
    dist.gather(own[rank], gathered if root else None, 0)
    none = slice(0, 0)
    return {"broadcast": (copies, whole), "all_to_all": (transposed, whole),
            "scatter": (scattered, slice(rank * part, (rank + 1) * part)),
            "reduce": (sums, whole) if root else (sums[none], none),
            "gather": (torch.cat(gathered), whole) if root else (sums[none], none)}


@pytest.mark.slow
def test_tensors_hold_what_torchs_own_collectives_leave(runs):
    to_run, length, ranks = runs
    for done, library in zip(ranks, launch(the_librarys, len(ranks), length)):
        results = {schedule.name: tensor for schedule, (_, tensor) in zip(to_run, done)}
        for name, (expected, part) in library.items():
            assert torch.equal(results[name][part], expected), name


@pytest.mark.slow
def test_a_chunk_that_does_not_fit_its_destination_is_refused_in_one_sentence():
    with pytest.raises(LaunchError, match="puts chunk 1 of 1 elements into chunk 0 of 2: give a tensor whose"):
        launch(execute, 3, all_to_all(3), torch.ones(4))


@pytest.mark.slow
def test_times_are_those_of_one_clock(runs):
    _, _, ranks = runs
    trace = ranks[0][0][0]
    starts, ends = trace.events.array("start_s"), trace.events.array("end_s")
    assert starts.min() == 0 and (ends >= starts).all() and trace.duration_s < 60


def shapes(cases: list[tuple[int, torch.dtype]]) -> list[torch.Tensor]:
    import torch.distributed as dist
    dist.init_process_group()
    done = []
    for length, dtype in cases:
        done.append(values(dist.get_rank(), length, dtype))
        execute(ring_all_reduce(3), done[-1])
    square = torch.arange(9.).reshape(3, 3).t() + dist.get_rank()  # not contiguous
    execute(ring_all_reduce(3), square)
    parameter = torch.nn.Parameter(torch.ones(2, 2))
    execute(tree_all_reduce(3), parameter)
    return [*done, square, parameter.detach()]


@pytest.mark.slow
def test_any_length_shape_and_dtype():
    dtypes = (torch.float32, torch.float16, torch.bfloat16, torch.int32, torch.uint8, torch.complex64)
    cases = [(length, torch.float64) for length in (0, 1, 2, 3, 7, 100)] + [(7, dtype) for dtype in dtypes]
    for results in launch(shapes, 3, cases):
        for (length, dtype), result in zip(cases, results):
            expected = sum(values(rank, length, dtype) for rank in range(3))
            assert torch.equal(result, expected) and result.dtype == dtype, (length, dtype)
        assert torch.equal(results[-2], 3 * torch.arange(9.).reshape(3, 3).t() + 3)
        assert torch.equal(results[-1], torch.full((2, 2), 3.0))


@pytest.mark.slow
def test_without_a_tensor_only_lanes_are_sent():
    run = launch(execute, 3, ring_all_reduce(3))
    assert run.trace.sent_bytes().tolist() == [0, 0, 0]
    assert set(run.trace.held().values()) == {(1, 1, 1)}


@pytest.mark.slow
def test_a_launch_puts_the_ranks_traces_together():
    schedule = ring_all_reduce(4)
    run = launch(execute, 4, schedule, torch.arange(10.0))
    simulated = simulate(schedule, 40, Link(1e-5, 1e9)).logical()
    executed = run.trace.logical().events.replace(num_bytes=None)
    assert executed == simulated.events.replace(num_bytes=None)
    # Chunks of 3, 3, 2 and 2 elements of 4 bytes: rank r sends all twice, but r+1 and r+2 only once.
    assert run.trace.sent_bytes().tolist() == [60, 64, 60, 56]
    assert run.trace.source == "executed" and run.trace.name == "ring_all_reduce" and run.trace.backend == run.backend
    assert run.trace.promise == run[0].promise == "all_reduce"
    assert run[1].logical().events == run.trace.logical().of_rank(1)


def replace_move(schedule: Schedule, place: int, **changes: object) -> Schedule:
    """The schedule with one move changed."""
    moves = list(schedule.moves)
    moves[place] = replace(moves[place], **changes)
    return Schedule(schedule.name, schedule.world_size, schedule.num_chunks, moves, schedule.promise)


@pytest.mark.slow
def test_a_wrong_schedule_runs_and_its_trace_shows_the_result():
    right = ring_all_reduce(3)
    first = next(i for i, move in enumerate(right.moves) if move.step == 1 and move.dst == 2)
    wrong = replace_move(right, first, op="copy")
    trace = launch(execute, 3, wrong, torch.ones(3)).trace
    chunk = wrong.moves[first].chunk
    event = next(e for e in trace.of_rank(2) if e.kind == "recv" and e.step == 1)
    assert event.op == "copy" and event.contributions == (1, 1, 0)
    assert {trace.held()[rank, chunk] for rank in range(3)} == {(1, 1, 0)}
    assert trace.logical().events == simulate(wrong, 12, Link(1e-5, 1e9)).logical().events


@pytest.mark.slow
def test_a_contribution_received_twice_counts_twice():
    again = Move(1, 0, 1, 0, "reduce")
    twice = Schedule("twice", 2, 1, [Move(0, 0, 1, 0, "reduce"), again, again], "all_reduce")
    run = launch(execute_and_return, 2, twice, torch.tensor([1.0]), torch.tensor([10.0]))
    assert run.trace.held()[1, 0] == (3, 1) and run[1].tolist() == [13.0]


def execute_and_return(schedule: Schedule, *tensors: torch.Tensor) -> torch.Tensor:
    import torch.distributed as dist
    dist.init_process_group()
    tensor = tensors[dist.get_rank()]
    execute(schedule, tensor)
    return tensor


@pytest.mark.slow
def test_a_step_sends_what_was_held_when_it_began():
    moves = [Move(0, 0, 1, 0, "copy"), Move(0, 1, 0, 0, "copy"), Move(0, 1, 0, 1, "reduce")]
    swap = Schedule("swap", 2, 2, moves, "all_reduce")
    trace = launch(execute, 2, swap, torch.ones(2)).trace
    assert trace.held() == {(0, 0): (0, 1), (1, 0): (1, 0), (0, 1): (1, 1), (1, 1): (0, 1)}


@pytest.mark.slow
def test_a_sum_may_land_in_another_chunk():
    moves = [Move(0, 0, 1, 0, "reduce", into=1), Move(0, 0, 1, 1, "reduce", into=0)]
    crossed = Schedule("crossed", 2, 2, moves, "all_reduce")
    run = launch(execute_and_return, 2, crossed, torch.tensor([1.0, 2.0]), torch.tensor([10.0, 20.0]))
    assert run[1].tolist() == [12.0, 21.0]
    assert run.trace.held() == {(0, 0): (1, 0), (0, 1): (1, 0), (1, 0): (1, 1), (1, 1): (1, 1)}
    assert run.trace.logical().events == simulate(crossed, 8, Link(1e-5, 1e9)).logical().events


@pytest.mark.slow
def test_steps_of_consecutive_schedules_are_consecutive():
    trace = launch(reduce_then_gather, 3).trace
    assert trace.num_steps == 4 and set(trace.of_kind("recv").array("step").tolist()) == {0, 1, 2, 3}
    assert trace.source == "executed" and (trace.name, trace.promise) == (None, None)  # neither schedule's alone


@pytest.mark.slow
def test_a_trace_carries_what_its_schedule_promises():
    assert launch(execute, 3, ring_reduce_scatter(3)).trace.promise == "reduce_scatter"


def reduce_then_gather() -> None:
    tensor = torch.ones(3)
    execute(ring_reduce_scatter(3), tensor)
    execute(ring_all_gather(3), tensor)


@pytest.mark.slow
def test_recording_an_execution_does_not_count_it_twice():
    plain = launch(execute, 3, ring_all_reduce(3), torch.ones(6)).trace
    recorded = launch(execute, 3, ring_all_reduce(3), torch.ones(6), record=True).trace
    assert recorded.logical() == plain.logical()


@pytest.mark.slow
def test_a_schedule_for_another_number_of_ranks_is_refused_in_one_sentence():
    with pytest.raises(LaunchError, match="is a schedule for 4 ranks, but 3 are running: launch 4, or make"):
        launch(execute, 3, ring_all_reduce(4), torch.ones(4))


# Chunk 0 of rank 0 takes 1e16 and -1e16 from rank 1, and between the two 1 from rank 2, which 1e16 swallows.
BETWEEN = Schedule("between", 3, 2, [(0, 1, 0, 0, "reduce"), (0, 2, 0, 0, "reduce"), (0, 1, 0, 1, "reduce", 0)],
                   "all_reduce")
DATA = [[0.0, 0.0], [1e16, -1e16], [1.0, 0.0]]


def run() -> list[float]:
    dist.init_process_group()
    data = torch.tensor(DATA[dist.get_rank()], dtype=torch.float64)
    execute(BETWEEN, data)
    return data.tolist()


@pytest.mark.slow
def test_messages_from_several_ranks_are_added_in_schedule_order():
    assert launch(run, 3)[0] == [0.0, 0.0]
