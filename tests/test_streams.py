"""A step on two streams: what waits for what, and what is held meanwhile."""
from __future__ import annotations

import pytest

from book.cost import Link
from book.simulate.streams import Task, bucketed_backward, fill_buckets, gathered_bytes, sharded_step, stream_times

FREE = Link(0.0, 1e30)  # sending takes no time
LINK = Link(0.0, 1.0)  # a byte a second


def step_s(tasks: list[Task]) -> float:
    """The end of the last task."""
    return max(end_s for _, end_s in stream_times(tasks))


def test_a_task_waits_for_its_stream_and_for_what_it_needs() -> None:
    tasks = [Task("compute", "a", 0, 2.0), Task("network", "b", 0, 1.0), Task("network", "c", 0, 3.0, (0,)),
             Task("compute", "d", 0, 1.0, (1, 2)), Task("compute", "e", 0, 1.0)]
    assert stream_times(tasks) == [(0, 2), (0, 1), (2, 5), (5, 6), (6, 7)]
    assert stream_times([]) == []


@pytest.mark.parametrize("cap, buckets", [(1, [[0], [1], [2]]), (3, [[0, 1], [2]]), (4, [[0, 1, 2]]),
                                          (99, [[0, 1, 2]])])
def test_a_bucket_closes_when_it_is_full(cap: float, buckets: list[list[int]]) -> None:
    assert fill_buckets([1, 2, 3], cap) == buckets


def test_buckets_are_sent_alongside_backward_one_after_the_other() -> None:
    tasks = bucketed_backward([2.0, 2.0], 2.0, 2, 1.0, LINK)
    assert stream_times(tasks) == [(0, 2), (2, 4), (2, 4), (4, 6)], "a ring of two sends each byte once in and once out"


@pytest.mark.parametrize("stage", range(4))
def test_where_sending_takes_no_time_a_step_is_its_computing(stage: int) -> None:
    assert step_s(sharded_step(stage, 4, 5, 8.0, 1.0, FREE)) == pytest.approx(15)


@pytest.mark.parametrize("stage, network_s", [(0, 2), (1, 2), (2, 2), (3, 3)])
def test_a_stage_sends_as_often_as_its_formula_says(stage: int, network_s: int) -> None:
    """2(N-1)/N n in stages 0 to 2, and 3(N-1)/N n in stage 3, as book.cost.sharded_sent_bytes has it."""
    tasks = sharded_step(stage, 4, 5, 8.0, 1.0, LINK)
    sent = sum(task.duration_s for task in tasks if task.stream == "network")
    assert sent == pytest.approx(network_s * 3 / 4 * 5 * 8.0)


def test_prefetching_hides_gathers_and_holds_a_unit_more() -> None:
    held, taken = {}, {}
    for prefetch in (True, False):
        tasks = sharded_step(3, 2, 6, 2.0, 1.0, LINK, prefetch)
        times = stream_times(tasks)
        held[prefetch], taken[prefetch] = gathered_bytes(tasks, times, 3, 2, 2.0), step_s(tasks)
        for task, (start_s, _) in zip(tasks, times):
            assert all(times[i][1] <= start_s for i in task.needs)
    assert taken[True] < taken[False] and held[True] > held[False]


def test_a_fast_network_gathers_no_further_ahead_than_the_next_unit() -> None:
    """A rank holds two units' parameters and one unit's gradients beside its shards, a byte for each here."""
    tasks = sharded_step(3, 2, 6, 2.0, 1.0, Link(0.0, 100.0))
    assert gathered_bytes(tasks, stream_times(tasks), 3, 2, 2.0) == 3


def test_plain_data_parallelism_gathers_nothing() -> None:
    tasks = sharded_step(0, 4, 5, 8.0, 1.0, LINK)
    assert gathered_bytes(tasks, stream_times(tasks), 0, 4, 8.0) == 0


def test_another_stage_is_refused() -> None:
    with pytest.raises(ValueError, match="ZeRO stage"):
        sharded_step(4, 2, 2, 1.0, 1.0, LINK)
