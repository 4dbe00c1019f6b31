"""Which rank waits for which others in a run that hangs, and how its recording is played."""
from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from book.launch import HangError, launch
from book.launch.board import Call
from book.launch.graph import in_words, waits_for
from book.launch.rpc import Worker
from book.launch.standing import Standing
from book.record import lanes, watch
from book.trace import Trace
from book.widgets.player import run_payload

IN_BARRIER = Standing("waits in barrier")


def test_ranks_in_a_collective_wait_for_those_that_have_not_called_it() -> None:
    last = {rank: Call(1, b"barrier", "barrier()\ncode.py:3") for rank in (0, 2)}
    waits = waits_for([IN_BARRIER, Standing("finished"), IN_BARRIER, Standing("computes")], {"0 [0, 1, 2, 3]": last})
    assert waits == {0: (1, 3), 2: (1, 3)}
    assert in_words(waits) == "ranks 0, 2 wait for ranks 1, 3"


def test_ranks_in_messages_and_calls_wait_for_their_peers() -> None:
    ranks = [Standing("waits in send to rank 2"), Standing("waits in rpc_sync to worker0"),
             Standing("waits for its irecv from rank 1")]
    ranks[0] = ranks[0]._replace(worker=Worker("worker0", 16, ()))
    waits = waits_for(ranks, {})
    assert waits == {0: (2,), 1: (0,), 2: (1,)}
    assert in_words(waits) == "rank 0 waits for rank 2; rank 1 waits for rank 0; rank 2 waits for rank 1"


def ring_with_a_hang(hangs_in: str) -> None:
    """Two steps of a ring, of which the second hangs."""
    dist.init_process_group()
    rank, world_size = dist.get_rank(), dist.get_world_size()
    buffer = lanes(world_size)
    watch(buffer, world_size)
    chunks, got = buffer.chunk(world_size), torch.empty(world_size)
    left, right = (rank - 1) % world_size, (rank + 1) % world_size
    request = dist.isend(chunks[rank], right)
    dist.recv(got, left)
    request.wait()
    chunks[left].add_(got)
    if hangs_in == "send":
        dist.send(chunks[left], right)
    dist.recv(got, left)


@pytest.mark.slow
@pytest.mark.parametrize(("hangs_in", "unmet", "says"), [
    ("send", 3, ", and nobody receives it. All three links carry one chunk at once."),
    ("recv", 0, "Ranks 0, 1, 2 wait to receive, and nobody sends.")])
def test_the_recording_of_a_hung_run_is_played_up_to_its_last_step(hangs_in: str, unmet: int, says: str) -> None:
    with pytest.raises(HangError) as caught:
        launch(ring_with_a_hang, 3, hangs_in, record=True, hang_s=0.5)
    trace, step = caught.value.trace, 1 if hangs_in == "send" else -1
    assert caught.value.waits == {rank: ((rank + step) % 3,) for rank in range(3)}
    assert trace is not None and Trace.from_json(trace.to_json()) == trace
    played = run_payload(trace.logical())
    assert played["S"] == 2 and played["transfers"]["op"] == ["reduce"] * 3 + [None] * unmet
    assert played["transfers"]["arrives"] == [0] * 3 + [None] * unmet
    assert played["rests"][played["says"][-1]] == says
    assert played["verdict"] == f"Here the run hangs: {in_words(caught.value.waits)}."
    assert not played["ok"]


@pytest.mark.slow
def test_a_trace_has_no_hangs_if_the_run_did_not_hang() -> None:
    trace = launch(dist.init_process_group, 2, record=True).trace
    assert trace.hangs is None and "hangs" not in trace.to_json()
