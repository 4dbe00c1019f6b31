"""Recording programs of plain torch.distributed code: order, contents, and what wrong code looks like."""
from __future__ import annotations

import os
import random
import threading
import time
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from book import record
from book.collectives import ring_all_reduce
from book.execute import execute
from book.launch import HangError, launch
from book.record import lanes, watch
from book.record.recorder import _Recorder
from book.record.recording import Hold, Operation, Recording
from book.tap.log import Op, OwnGroup
from book.trace import Event, Trace
from tests.by_value import sent_by_value

sent_by_value(__name__)


def join() -> tuple[int, int]:
    if not dist.is_initialized():
        dist.init_process_group()
    return dist.get_rank(), dist.get_world_size()


def watched(num_chunks: int | None = None, **form: object) -> tuple[torch.Tensor, list[torch.Tensor], int, int]:
    """Join, and watch a buffer of lanes: (buffer, its chunks, rank, world_size)."""
    rank, size = join()
    num_chunks = num_chunks or size
    buffer = lanes(num_chunks, **form)
    watch(buffer, num_chunks)
    return buffer, list(buffer.chunk(num_chunks)), rank, size


def moved(trace: Trace) -> list[tuple]:
    """Everything in a trace except times and sizes, in logical order."""
    return [(e.rank, e.kind, e.op, e.peer, e.chunk, e.step, e.contributions) for e in trace.logical().events]


def received(trace: Trace, rank: int) -> list[tuple]:
    """What one rank received: (step, chunk, op, contributions), ordered by step."""
    own = trace.logical().of_rank(rank)
    return [(e.step, e.chunk, e.op, e.contributions) for e in own if e.kind == "recv"]


# A ring by hand, written in the ways that people write it

def ring(style: str = "isend", naps: bool = False, **form: object) -> torch.Tensor:
    buffer, chunks, rank, size = watched(**form)
    right, left = (rank + 1) % size, (rank - 1) % size
    spare = torch.empty_like(chunks[0])
    generator = random.Random(os.getpid())
    for step in range(2 * (size - 1)):
        adds = step < size - 1
        out, into = chunks[(rank - step) % size], chunks[(rank - step - 1) % size]
        if naps:
            time.sleep(generator.random() * 0.02)
        exchange(style, out, spare, left, right)
        into.add_(spare) if adds else into.copy_(spare)
    return buffer


KEPT: list[dist.Work] = []


def exchange(style: str, out: torch.Tensor, spare: torch.Tensor, left: int, right: int) -> None:
    if style == "isend":
        requests = [dist.isend(out, right), dist.irecv(spare, left)]
        for request in requests:
            request.wait()
    elif style == "recv":
        request = dist.isend(out, right)
        dist.recv(spare, left)
        request.wait()
    elif style == "batch":
        calls = [dist.P2POp(dist.irecv, spare, left), dist.P2POp(dist.isend, out.clone(), right)]
        for request in dist.batch_isend_irecv(calls):
            request.wait()
    elif style == "blocking" and dist.get_rank() % 2:
        dist.recv(spare)
        dist.send(out, right)
    elif style == "blocking":
        own = out.clone()
        dist.send(own, right)
        dist.recv(spare, left)
    elif style == "unwaited send":
        KEPT.append(dist.isend(out, right))  # gloo cancels a send whose request nobody keeps
        dist.irecv(spare, left).wait()


@pytest.fixture(scope="module")
def executed() -> list[tuple]:
    return moved(launch(execute, 4, ring_all_reduce(4)).trace)


@pytest.mark.slow
@pytest.mark.parametrize("style", ["isend", "recv", "batch", "unwaited send"])
def test_a_ring_by_hand_leaves_the_trace_of_the_executed_ring(executed, style):
    run = launch(ring, 4, style, record=True)
    assert moved(run.trace) == executed
    assert run.trace.source == "recorded" and run.trace.clock == "measured" and run.trace.backend == run.backend
    assert run.trace.sent_bytes().tolist() == [6 * 16] * 4
    assert torch.equal(run[2], torch.ones(16))


@pytest.mark.slow
def test_blocking_calls_take_turns_and_double_the_steps(executed):
    trace = launch(ring, 4, "blocking", record=True).trace
    assert trace.num_steps == 12
    by_hand, schedule = ([row[:5] + row[6:] for row in sorted(rows, key=str)] for rows in (moved(trace), executed))
    assert sorted(by_hand, key=str) == sorted(schedule, key=str)


@pytest.mark.slow
@pytest.mark.parametrize("form", [{"dtype": torch.bfloat16}, {"dtype": torch.int64, "block": 5},
                                  pytest.param({"block": 1000}, marks=pytest.mark.slow)])
def test_lanes_of_any_dtype_and_size_give_the_same_trace(executed, form):
    run = launch(lambda: ring(**form), 4, record=True)
    assert moved(run.trace) == executed
    assert run.trace.sent_bytes()[0] == 6 * 4 * form.get("block", 1) * torch.empty(0, dtype=form.get("dtype")).itemsize


@pytest.mark.slow
def test_the_same_program_leaves_the_same_trace_whatever_the_timing(executed):
    for _ in range(2):
        assert moved(launch(ring, 4, "isend", True, record=True).trace) == executed


@pytest.mark.slow
def test_without_a_watch_order_and_sizes_are_still_recorded():
    def unwatched() -> None:
        rank, size = join()
        a, b = torch.ones(3), torch.empty(3)
        for request in (dist.isend(a, (rank + 1) % size), dist.irecv(b, (rank - 1) % size)):
            request.wait()

    assert moved(launch(unwatched, 2, record=True).trace) == [
        (0, "send", None, 1, None, 0, None), (0, "recv", None, 1, None, 0, None),
        (1, "send", None, 0, None, 0, None), (1, "recv", None, 0, None, 0, None)]


@pytest.mark.slow
def test_watch_without_a_recording_does_nothing():
    assert torch.equal(launch(ring, 2)[0], torch.ones(4))


@pytest.mark.slow
def test_watch_after_an_execution_that_is_not_recorded_does_nothing():
    def both() -> None:
        execute(ring_all_reduce(2))
        watched()

    assert launch(both, 2).trace.source == "executed"


# Wrong rings: the trace says what they do

def wrong_ring(bug: str) -> None:
    buffer, chunks, rank, size = watched()
    spare = torch.empty_like(chunks[0])
    for step in range(size - 1):
        out, into = (rank - step) % size, (rank - step - 1) % size
        exchange("isend", chunks[out], spare, (rank - 1) % size, (rank + 1) % size)
        if bug == "index":
            chunks[out] += spare  # into the chunk that was sent, not into the one that came
        elif bug == "copy":
            chunks[into].copy_(spare)
        elif bug == "twice":
            chunks[into] += spare
            chunks[into] += spare


@pytest.mark.slow
def test_a_ring_that_adds_to_the_wrong_chunk_shows_where_it_went():
    trace = launch(wrong_ring, 3, "index", record=True).trace
    assert received(trace, 0) == [(0, 0, "reduce", (1, 0, 1)), (1, 2, "reduce", (1, 0, 1))]
    assert received(trace, 1) == [(0, 1, "reduce", (1, 1, 0)), (1, 0, "reduce", (1, 1, 0))]
    assert received(trace, 2) == [(0, 2, "reduce", (0, 1, 1)), (1, 1, "reduce", (0, 1, 1))]
    sent = [(e.step, e.chunk, e.contributions) for e in trace.logical().of_rank(0) if e.kind == "send"]
    assert sent == [(0, 0, (1, 0, 0)), (1, 2, (1, 0, 0))]
    assert [trace.held()[0, chunk] for chunk in range(3)] == [(1, 0, 1), (1, 0, 0), (1, 0, 1)]


@pytest.mark.slow
def test_a_ring_that_copies_where_it_should_add_shows_what_is_lost():
    trace = launch(wrong_ring, 3, "copy", record=True).trace
    assert received(trace, 0) == [(0, 2, "copy", (0, 0, 1)), (1, 1, "copy", (0, 1, 0))]
    assert [trace.held()[2, chunk] for chunk in range(3)] == [(1, 0, 0), (0, 1, 0), (0, 0, 1)]


@pytest.mark.slow
def test_a_message_added_twice_counts_twice():
    trace = launch(wrong_ring, 3, "twice", record=True).trace
    assert received(trace, 0) == [(0, 2, "reduce", (1, 0, 2)), (1, 1, "reduce", (1, 4, 2))]


# What a rank does to its buffer between messages

def exchange_halves(change: str) -> None:
    buffer, chunks, rank, size = watched(1)
    spare = torch.empty_like(buffer)
    exchange("isend", buffer, spare, 1 - rank, 1 - rank)
    if change == "mean at once":
        buffer.add_(spare).div_(size)
    elif change == "mean later":
        buffer += spare
        dist.barrier()
        buffer /= size
    elif change == "noise":
        buffer += 0.3 * spare
    elif change == "nan":
        buffer.fill_(float("nan"))
    elif change == "nothing":
        pass


@pytest.mark.slow
@pytest.mark.parametrize("change, after", [
    ("mean at once", [("recv", "reduce", 0, (1, 1)), ("hold", None, 1, (0.5, 0.5))]),
    ("mean later", [("recv", "reduce", 0, (1, 1)), ("hold", None, 2, (0.5, 0.5))]),
    ("nan", [("recv", None, 0, None), ("hold", None, 1, None)]),
    ("nothing", [("recv", None, 0, None)]),
])
def test_a_local_change_is_a_hold(change, after):
    trace = launch(exchange_halves, 2, change, record=True).trace
    events = [(e.kind, e.op, e.step, e.contributions) for e in trace.logical().of_rank(0)]
    start = [("hold", None, 0, (1, 0)), ("send", None, 0, (1, 0))]
    assert [e for e in events if e[0] != "collective"] == start + after


@pytest.mark.slow
def test_an_unexplained_change_is_not_attributed_to_a_message():
    trace = launch(exchange_halves, 2, "noise", record=True).trace
    assert received(trace, 0) == [(0, None, None, None)]
    assert trace.held()[0, 0] == pytest.approx((1, 0.3), rel=1e-6)


def gather_at_root(how: str) -> None:
    buffer, chunks, rank, size = watched(2)
    if rank:
        dist.send(buffer, 0)
        return
    spares = [torch.empty_like(buffer) for _ in range(size - 1)]
    requests = [dist.irecv(spare, src) for src, spare in enumerate(spares, 1)]
    for request in requests:
        request.wait()
    if how == "one by one":
        for spare in spares:
            buffer += spare
    else:
        buffer.copy_(torch.stack(spares).sum(0))  # forgets its own


@pytest.mark.slow
def test_a_chunk_changed_while_it_is_sent_is_seen_to_change():
    def hasty() -> None:
        buffer, chunks, rank, size = watched(1)
        request = dist.isend(buffer, 1 - rank)
        dist.recv(spare := torch.empty_like(buffer), 1 - rank)
        if rank == 0:  # rank 1 gets one or the other, but what it sends is settled
            buffer += spare  # before the request says that the buffer may be changed
        request.wait()

    trace = launch(hasty, 2, record=True).trace
    assert received(trace, 0) == [(0, 0, "reduce", (1, 1))] and len(trace.of_kind("hold")) == 2


@pytest.mark.slow
def test_several_messages_added_between_two_snapshots_are_distinguished():
    trace = launch(gather_at_root, 4, "one by one", record=True).trace
    for chunk in (0, 1):
        own = [(e.peer, e.op, e.contributions) for e in trace.of_rank(0) if e.kind == "recv" and e.chunk == chunk]
        assert own == [(1, "reduce", (1, 1, 0, 0)), (2, "reduce", (1, 1, 1, 0)), (3, "reduce", (1, 1, 1, 1))]


@pytest.mark.slow
def test_a_root_that_forgets_its_own_data_is_seen_to_replace_it():
    trace = launch(gather_at_root, 3, "sum of the others", record=True).trace
    assert trace.held()[0, 0] == (0, 1, 1)
    assert {e.op for e in trace.of_rank(0) if e.kind == "recv" and e.peer == 1} == {"copy"}


@pytest.mark.slow
def test_a_receive_is_not_read_before_its_wait():
    def early() -> None:
        buffer, chunks, rank, size = watched(2)
        if rank:
            dist.send(chunks[0], 0)
            dist.barrier()
        else:
            request = dist.irecv(chunks[0], 1)
            dist.barrier()  # by now the message is in the buffer
            time.sleep(0.1)
            request.wait()

    trace = launch(early, 2, record=True).trace
    assert received(trace, 0) == [(0, 0, "copy", (0, 1))]
    assert [e.contributions for e in trace.of_kind("hold") if e.rank == 0] == [(1, 0), (1, 0)]


@pytest.mark.slow
def test_a_receive_never_waited_for_is_unknown():
    def forgetful() -> None:
        buffer, chunks, rank, size = watched(2)
        requests = dist.isend(chunks[0].clone(), 1 - rank), dist.irecv(chunks[1], 1 - rank)
        time.sleep(0.1)
        requests[0].wait()

    trace = launch(forgetful, 2, record=True).trace
    assert [(e.chunk, e.end_s, e.contributions) for e in trace.of_kind("recv")] == [(1, None, None)] * 2
    assert trace.held()[0, 0] == (1, 0) and trace.held()[0, 1] is None


@pytest.mark.slow
def test_waiting_late_for_an_early_send_takes_no_rank_back_in_steps():
    def late() -> None:
        dist.init_process_group()
        rank, buffer = dist.get_rank(), torch.zeros(1)
        if rank:
            for _ in range(3 if rank == 1 else 1):
                dist.recv(buffer, 0)
            return
        early = dist.isend(buffer, 1)
        dist.send(buffer, 1)
        dist.send(buffer, 1)
        early.wait()
        dist.send(buffer, 2)

    trace = launch(late, 3, record=True).trace
    assert [(e.peer, e.step) for e in trace.of_rank(0) if e.kind == "send"] == [(1, 0), (1, 1), (1, 2), (2, 3)]


@pytest.mark.slow
def test_a_chunk_is_unknown_while_it_may_still_change():
    def early() -> None:
        buffer, chunks, rank, size = watched(2)
        if rank:
            dist.send(chunks[0], 0)
            dist.recv(chunks[1], 0)
        else:
            request = dist.irecv(chunks[0], 1)
            time.sleep(0.1)
            passed_on = dist.isend(chunks[0], 1)  # without waiting for it
            request.wait()
            passed_on.wait()

    trace = launch(early, 2, record=True).trace
    assert [(e.chunk, e.contributions) for e in trace.of_rank(0) if e.kind == "send"] == [(0, None)]


@pytest.mark.slow
def test_a_collective_waited_for_through_its_future_says_what_it_left():
    def reduce() -> None:
        buffer, chunks, rank, size = watched(2)
        dist.all_reduce(buffer, async_op=True).get_future().wait()

    trace = launch(reduce, 2, record=True).trace
    assert set(trace.held().values()) == {(1, 1)} and {e.step for e in trace.of_kind("hold")} == {0}


@pytest.mark.slow
def test_a_second_watch_continues_where_the_first_one_ended():
    def twice() -> None:
        buffer, chunks, rank, size = watched(1)
        dist.all_reduce(buffer)
        other = lanes(1)
        watch(other, 1)
        exchange("isend", other, spare := torch.empty_like(other), 1 - rank, 1 - rank)
        other += spare

    trace = launch(twice, 2, record=True).trace
    assert [(e.kind, e.step, e.contributions) for e in trace.logical().of_rank(0)] == [
        ("hold", 0, (1, 0)), ("hold", 0, (1, 1)), ("collective", 0, None),
        ("hold", 1, (1, 0)), ("send", 1, (1, 0)), ("recv", 1, (1, 1))]


@pytest.mark.slow
def test_a_message_of_many_chunks_is_one_event_per_chunk():
    def halves() -> None:
        buffer, chunks, rank, size = watched(4)
        own, other = (buffer[4:], buffer[:4]) if rank else (buffer[:4], buffer[4:])
        exchange("isend", other, spare := torch.empty(4), 1 - rank, 1 - rank)
        own += spare
        exchange("isend", own, other, 1 - rank, 1 - rank)

    trace = launch(halves, 2, record=True).trace
    assert received(trace, 0) == [(0, 0, "reduce", (1, 1)), (0, 1, "reduce", (1, 1)),
                                  (1, 2, "copy", (1, 1)), (1, 3, "copy", (1, 1))]
    assert [(e.step, e.chunk, e.num_bytes) for e in trace.of_rank(1) if e.kind == "send"] == [
        (0, 0, 8), (0, 1, 8), (1, 2, 8), (1, 3, 8)]


@pytest.mark.slow
def test_a_message_cut_in_the_wrong_place_is_unknown():
    def askew() -> None:
        buffer, chunks, rank, size = watched(2)
        if rank:
            dist.send(buffer[1:3], 0)
        else:
            dist.recv(buffer[1:3], 1)

    trace = launch(askew, 2, record=True).trace
    assert [(e.chunk, e.num_bytes, e.contributions) for e in trace.of_kind("send")] == [(0, 4, None), (1, 4, None)]
    # Lanes of one element can be read even so: rank 0 lost its own in chunk 1 and got rank 1's in chunk 0.
    assert received(trace, 0) == [(0, 0, "copy", (1, 1)), (0, 1, "copy", (0, 0))]


# Collectives, groups, and code that is not ours

@pytest.mark.slow
def test_a_collective_on_a_watched_buffer_says_what_it_left():
    def reduce() -> None:
        buffer, chunks, rank, size = watched(2)
        dist.all_reduce(buffer, op=dist.ReduceOp.AVG)

    trace = launch(reduce, 2, record=True).trace
    event = next(iter(trace.of_kind("collective")))
    assert (event.op, event.group, event.num_bytes, event.step) == ("all_reduce", (0, 1), 16, 0)
    assert [e.contributions for e in trace.of_rank(1) if e.kind == "hold"] == [(0, 1)] * 2 + [(0.5, 0.5)] * 2


COLLECTIVES = ["all_reduce", "all_gather", "all_gather", "reduce_scatter", "reduce_scatter", "all_to_all",
               "all_to_all", "broadcast", "reduce", "scatter", "gather", "barrier", "all_reduce", "barrier",
                "all_reduce"]


@pytest.mark.slow
def test_a_ranks_own_changes_and_a_collectives_are_distinguished():
    def both() -> None:
        buffer, *_ = watched(1)
        buffer *= 2
        dist.all_reduce(buffer)
        buffer /= 2

    own = launch(both, 2, record=True).trace.logical().of_rank(1)
    assert [(e.step, e.op, e.contributions) for e in own if e.kind == "hold"] == [
        (0, None, (0, 1)), (0, None, (0, 2)), (0, "all_reduce", (2, 2)), (1, None, (1, 1))]


def every_collective() -> None:
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    x, parts, whole = torch.ones(2), [torch.ones(2) for _ in range(size)], torch.empty(2 * size)
    dist.all_reduce(x)
    dist.all_gather(parts, x)
    dist.all_gather_into_tensor(whole, x)
    dist.reduce_scatter(x, parts)
    dist.reduce_scatter_tensor(x, whole)
    dist.all_to_all_single(whole, whole.clone())
    dist.all_to_all([torch.empty(2) for _ in range(size)], parts)
    dist.broadcast(x, 0)
    dist.reduce(x, 0)
    dist.scatter(x, parts if rank == 0 else None)
    dist.gather(x, parts if rank == 0 else None)
    dist.barrier()
    dist.all_reduce(x, async_op=True).get_future().wait()
    dist.monitored_barrier()
    with dist._coalescing_manager(async_ops=True) as both:
        dist.all_reduce(x)
        dist.all_reduce(whole)
    both.wait()


@pytest.mark.slow
def test_every_collective_is_recorded_in_order():
    trace = launch(every_collective, 3, record=True).trace
    for rank in range(3):
        events = trace.logical().of_rank(rank)
        assert [e.op for e in events] == COLLECTIVES
        assert [e.step for e in events] == list(range(len(COLLECTIVES)))
        assert [e.num_bytes for e in events][:5] == [8, 24, 24, 24, 24]


@pytest.mark.slow
def test_groups_are_named_by_their_global_ranks():
    def pairs() -> None:
        rank, size = join()
        groups = [dist.new_group([0, 2]), dist.new_group([3, 1])]
        mine, x = groups[rank % 2], torch.ones(1)
        dist.all_reduce(x, group=mine)
        if rank == 2:
            dist.send(x, 0, group=mine)
        elif rank == 0:
            dist.recv(x, group=mine)  # from anyone

    trace = launch(pairs, 4, record=True).trace
    assert {(e.rank, e.group) for e in trace.of_kind("collective")} == {
        (0, (0, 2)), (2, (0, 2)), (1, (1, 3)), (3, (1, 3))}
    assert [(e.rank, e.kind, e.peer, e.step) for e in trace.events if e.peer is not None] == [
        (0, "recv", 2, 1), (2, "send", 0, 1)]


def train() -> list[float]:
    from torch.nn.parallel import DistributedDataParallel
    rank, _ = join()
    layers = [torch.nn.Linear(32, 32, bias=False) for _ in range(3)]
    model = DistributedDataParallel(torch.nn.Sequential(*layers), bucket_cap_mb=0.004)
    for _ in range(2):
        model(torch.randn(4, 32)).sum().backward()
    return [float(p.grad.sum()) for p in model.parameters()]


@pytest.mark.slow
def test_all_reduces_that_ddp_issues_from_c_are_recorded():
    run = launch(train, 2, record=True)
    assert run[0] == run[1]
    reduces = [e for e in run.trace.of_rank(0) if e.op == "all_reduce"]
    assert sum(e.num_bytes for e in reduces) == 2 * 3 * 32 * 32 * 4 and len(reduces) >= 3
    assert all(e.end_s is not None and e.end_s > e.start_s for e in reduces)
    steps = [e.step for e in run.trace.of_rank(1) if e.op == "all_reduce"]
    assert steps == sorted(set(steps))


@pytest.mark.slow
def test_fully_sharded_training_is_recorded():
    def shard() -> None:
        from torch.distributed.fsdp import fully_shard
        join()
        model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
        fully_shard(model, mesh=dist.init_device_mesh("cpu", (2,)))
        model(torch.randn(2, 8)).sum().backward()

    ops = [e.op for e in launch(shard, 2, record=True).trace.of_rank(0)]
    assert "all_gather" in ops and "reduce_scatter" in ops


@pytest.mark.slow
def test_get_backend_still_returns_the_backends_name():
    def name() -> str:
        dist.init_process_group("gloo")
        return dist.get_backend()

    assert list(launch(name, 2, record=True)) == ["gloo", "gloo"]


# Calls that are refused, and threads

def refused_once(watching: bool) -> list[str]:
    """Rank 0's first send and everyone's first all_gather are refused; the program catches that and goes on."""
    rank, size = join()
    buffer = lanes(2)
    if watching:
        watch(buffer, 2)
    said, x = [], torch.ones(2, 2)
    try:
        dist.send(x.t(), 1) if rank == 0 else dist.all_gather([torch.ones(3)] * size, x)
    except RuntimeError as error:
        said.append(str(error))
    dist.send(buffer, 1) if rank == 0 else dist.recv(buffer, 0)
    dist.all_reduce(x)
    return said


@pytest.mark.slow
@pytest.mark.parametrize("watching", [False, True])
def test_a_refused_call_counts_as_never_made(watching):
    run = launch(refused_once, 2, watching, record=True, check_calls=False)  # which would refuse it first
    assert "contiguous" in run[0][0] and "invalid tensor size" in run[1][0]
    moves = [(e.rank, e.kind, e.peer, e.step) for e in run.trace.logical().events if e.kind != "hold"]
    per_chunk = 2 if watching else 1
    assert moves == ([(0, "send", 1, 0)] * per_chunk + [(0, "collective", None, 1)]
                     + [(1, "recv", 0, 0)] * per_chunk + [(1, "collective", None, 1)])
    if watching:
        assert {e.contributions for e in run.trace.of_kind("recv")} == {(1, 0)}


@pytest.mark.slow
def test_tensors_without_readable_memory_are_left_alone():
    def odd() -> list[float]:
        watched(2)
        whole = torch.eye(2).to_sparse()
        dist.all_reduce(whole)
        dist.send(torch.empty(4, device="meta"), 1 - dist.get_rank())  # torch moves nothing then
        return whole.to_dense().diag().tolist()

    run = launch(odd, 2, record=True)
    assert list(run) == [[2, 2], [2, 2]]
    assert [(e.kind, e.op) for e in run.trace.events if e.kind != "hold"] == [("collective", "all_reduce")] * 2


@pytest.mark.slow
def test_a_pause_affects_only_its_own_thread():
    def two_threads() -> None:
        join()
        x, y = torch.ones(1), torch.ones(2)
        other = threading.Thread(target=dist.all_reduce, args=(y,))
        with record.paused():
            dist.all_reduce(x)
            other.start()
            other.join()

    events = launch(two_threads, 2, record=True).trace.events
    assert [(e.rank, e.num_bytes) for e in events] == [(0, 8), (1, 8)]


def test_a_completion_waits_for_the_lock_and_may_come_at_once():
    recorder = _Recorder()
    ops = [Op("all_reduce", None, OwnGroup("0", (0, 1), "gloo", 0), number, None, serial=number) for number in (1, 2)]
    for op in ops:
        recorder.issued(op, [])
    futures = [torch.futures.Future(), torch.futures.Future()]
    futures[0].set_result(None)
    recorder.completes(ops[0], futures[0])  # calls back before it returns
    recorder.completes(ops[1], futures[1])
    backend = threading.Thread(target=futures[1].set_result, args=(None,))
    with recorder._lock:  # as while another thread replaces the recording with a copy
        backend.start()
        backend.join(0.1)
        assert recorder.recording.operations[1].end_ns is None
    backend.join()
    assert all(operation.end_ns is not None for operation in recorder.collect().operations)


# Putting the ranks' recordings together

def call(kind: str, peer: int | None = None, op: str | None = None, end_ns: int | None = 1) -> Operation:
    return Operation(kind, op, "0", (0, 1), peer, 0, 8.0, start_ns=0, end_ns=end_ns)


def in_turn(*operations: Operation) -> Recording:
    """A program that waits for each operation before it issues the next; one without an end is never waited for."""
    log = [entry for index, operation in enumerate(operations)
           for entry in ([("issue", index)] if operation.end_ns is None else [("issue", index), ("wait", index)])]
    return Recording(list(operations), log)


def steps(*recordings: Recording | None) -> list[tuple]:
    return [(e.rank, e.kind, e.step) for e in record.assemble(recordings, "gloo").logical().events]


def test_a_message_comes_after_all_that_either_end_had_waited_for():
    rank_0 = in_turn(call("send", 1), call("send", 1), call("recv", 1))
    rank_1 = in_turn(call("recv", 0), call("recv", 0), call("send", 0))
    assert steps(rank_0, rank_1) == [(0, "send", 0), (0, "send", 1), (0, "recv", 2),
                                     (1, "recv", 0), (1, "recv", 1), (1, "send", 2)]


def test_buffered_sends_that_cross_still_have_steps():
    both = [in_turn(call("send", 1 - rank), call("recv", 1 - rank)) for rank in range(2)]
    assert steps(*both) == [(0, "send", 0), (0, "recv", 0), (1, "send", 0), (1, "recv", 0)]


def test_mismatched_collectives_get_the_same_step():
    trace = record.assemble([in_turn(call("collective", op="all_reduce", end_ns=None)),
                             in_turn(call("collective", op="broadcast", end_ns=None))])
    assert [(e.op, e.step, e.end_s) for e in trace.events] == [("all_reduce", 0, None), ("broadcast", 0, None)]


def test_a_withdrawn_operation_matches_nothing():
    refused = replace(call("send", 1, end_ns=None), withdrawn=True)
    trace = record.assemble([in_turn(refused, call("send", 1)), in_turn(call("recv", 0))])
    assert [(e.rank, e.kind, e.step) for e in trace.events] == [(0, "send", 0), (1, "recv", 0)]


class Counted(list):
    """A list that counts how often it is iterated over."""

    times = 0

    def __iter__(self):
        self.times += 1
        return super().__iter__()


def test_holds_are_iterated_over_once_however_long_the_log():
    recording = in_turn(*[call("collective", op="all_reduce") for _ in range(50)])
    recording.holds = Counted(Hold(0, (1.0, 1.0), index, 0, index) for index in range(50))
    trace = record.assemble([recording, None])
    assert len(trace.of_kind("hold")) == 50 and recording.holds.times == 1


def test_a_rank_that_died_leaves_its_peers_receive_open():
    trace = record.assemble([in_turn(call("recv", 1, end_ns=None)), None])
    assert [(e.rank, e.peer, e.step, e.end_s) for e in trace.events] == [(0, 1, 0, None)] and trace.world_size == 2


# Programs that do not end well

def hang() -> None:
    buffer, chunks, rank, size = watched()
    spare = torch.empty_like(chunks[0])
    if rank == 0:
        dist.recv(spare, 1)
        chunks[1] += spare
    dist.recv(spare, (rank + 1) % size)  # everyone waits, nobody sends


@pytest.mark.slow
def test_a_hang_shows_which_receives_never_got_anything():
    with pytest.raises(HangError) as caught:
        launch(hang, 2, record=True, hang_s=1)
    waiting = [e for e in caught.value.trace.events if e.kind == "recv"]
    assert [(e.rank, e.peer, e.end_s, e.contributions) for e in waiting] == [(0, 1, None, None), (1, 0, None, None)]


@pytest.mark.slow
def test_a_run_that_recorded_nothing_has_an_empty_trace():
    trace = launch(join, 2, record=True).trace
    assert len(trace.events) == 0 and trace.world_size == 2


@pytest.mark.slow
def test_events_that_a_program_emits_are_kept():
    def emit() -> None:
        now_s = time.monotonic()
        record.emit(Event(int(os.environ["RANK"]), "compute", "forward", start_s=now_s, end_s=now_s + 1.5))

    trace = launch(emit, 2).trace
    assert trace.source == "instrumented" and [e.op for e in trace.events] == ["forward"] * 2
    assert min(e.start_s for e in trace.events) == 0 and trace.duration_s >= 1.5


@pytest.mark.slow
def test_a_trace_of_several_origins_says_what_they_have_in_common():
    def mixed() -> None:
        execute(ring_all_reduce(2))
        record.emit(Event(dist.get_rank(), "compute", "forward", start_s=0.0, end_s=1.0))

    trace = launch(mixed, 2).trace
    assert (trace.source, trace.name, trace.promise) == ("instrumented", None, None)


# Buffers that can't be watched

NOT_LANES = {
    "each chunk must start with 1 in one rank's lane and 0 in the others": [torch.ones(8), torch.full((8,), torch.nan)],
    "can't watch a buffer of 7 elements as 2 chunks of 2 lanes: make it with lanes(2)": [torch.ones(7)],
    "can't watch a buffer of 8 elements": [torch.zeros(4, 2).t(), torch.zeros(8, dtype=torch.complex64)],
}


def refusals() -> dict[str, list[str]]:
    join()
    said: dict[str, list[str]] = {}
    for words, buffers in NOT_LANES.items():
        for buffer in buffers:
            with pytest.raises(record.WatchError) as caught:
                watch(buffer, 2)
            said.setdefault(words, []).append(str(caught.value))
    return said


@pytest.mark.slow
def test_a_buffer_without_lanes_is_refused():
    for words, said in launch(refusals, 2, record=True)[0].items():
        assert all(words in message for message in said), said


def test_lanes_need_a_process_group():
    with pytest.raises(record.WatchError, match="call dist.init_process_group"):
        lanes(4)
