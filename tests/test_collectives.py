"""Collectives: each is right and is tried where the others are; what is said of many chunks; streams of work."""
from __future__ import annotations

import inspect
import re
from dataclasses import replace

import pytest

from book import collectives
from book.collectives import COLLECTIVES, Collective
from book.cost import Link
from book.promise import PROMISES
from book.schedule import Move, Schedule, ScheduleError
from book.simulate.streams import Task, bucketed_backward, fill_buckets, gathered_bytes, sharded_step, stream_times
from book.trace import Event, Trace
from book.widgets.player import run_payload
from book.widgets.player_run import as_trace, read_run
from book.widgets.player_words import MOST_NAMES, phases
from tests import test_execute, test_schedule, test_simulate
from tests.website import ROOT



def recursive_doubling(world_size: int) -> Schedule:
    """An all-gather for powers of two alone: in step s ranks that differ in bit s exchange all that they have."""
    moves = [Move(step, rank, rank ^ 1 << step, (owner + 1) % world_size, "copy")
             for step in range(world_size.bit_length() - 1) for rank in range(world_size)
             for owner in range(world_size) if owner >> step == rank >> step]
    return Schedule("recursive_doubling", world_size, world_size, moves, "all_gather")


OWN = Collective(recursive_doubling, "all_gather", sizes=lambda size: [(size,)] if size.bit_count() == 1 else [])


def test_every_function_that_returns_a_schedule_has_a_record() -> None:
    public = {name for name, function in inspect.getmembers(collectives, inspect.isfunction)
              if function.__module__ == collectives.__name__ and not name.startswith("_")}
    assert public == COLLECTIVES.keys() and all(getattr(collectives, n) is c.schedule for n, c in COLLECTIVES.items())


@pytest.mark.parametrize("name", COLLECTIVES)
def test_a_record_states_facts(name: str) -> None:
    collective = COLLECTIVES[name]
    assert collective.name == name and {collective.promise, *collective.phases} <= PROMISES.keys()
    for world_size in (1, 2, 3, 4, 6, 8, 12):
        for arguments, schedule in zip(collective.sizes(world_size), collective.schedules(world_size), strict=True):
            assert (schedule.name, schedule.world_size, schedule.promise) == (name, world_size, collective.promise)
            if collective.sent_bytes:
                assert schedule.sent_bytes(9e6).max() == pytest.approx(collective.sent_bytes(*arguments, 9e6))
    assert any(collective.sizes(world_size) for world_size in (2, 4, 8))


def test_every_source_is_among_the_references() -> None:
    keys = set(re.findall(r"^@\w+\{(\w+),", (ROOT / "references.bib").read_text("utf-8"), re.M))
    assert {collective.source for collective in COLLECTIVES.values()} - {None} <= keys


@pytest.mark.parametrize("name", COLLECTIVES)
def test_loops_over_ranks_one_by_one_give_the_same_moves(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    at_once = [[list(schedule.moves) for schedule in COLLECTIVES[name].schedules(size)] for size in range(1, 9)]
    monkeypatch.setattr(collectives, "every", range)
    assert [[list(schedule.moves) for schedule in COLLECTIVES[name].schedules(size)] for size in range(1, 9)] == at_once


def names_that(test: object) -> set[str]:
    """The collectives that a test is run with."""
    return {name for mark in test.pytestmark if mark.name == "parametrize" and mark.args[0] == "name"
            for name in mark.args[1]}


def test_every_collective_is_checked_timed_and_run() -> None:
    timed = {name for name, collective in COLLECTIVES.items() if collective.time_s}
    assert names_that(test_schedule.test_every_schedule_keeps_its_promise) == COLLECTIVES.keys()
    assert names_that(test_simulate.test_time_is_the_closed_form) == timed
    assert {schedule.name for schedule in test_simulate.all_schedules(4)} == COLLECTIVES.keys()
    assert {schedule.name for schedule in test_execute.schedules(4)} == COLLECTIVES.keys()


def test_a_collective_makes_no_schedule_for_sizes_that_it_excludes() -> None:
    assert [len(OWN.schedules(world_size)) for world_size in (1, 2, 3, 4, 6, 8)] == [1, 1, 0, 1, 0, 1]
    assert all(schedule.check() for world_size in (1, 2, 4, 8, 16) for schedule in OWN.schedules(world_size))


def test_nodes_are_divided_in_every_way() -> None:
    assert COLLECTIVES["hierarchical_all_reduce"].sizes(6) == [(1, 6), (2, 3), (3, 2), (6, 1)]


def test_a_record_and_a_schedule_that_promise_different_things_are_refused() -> None:
    with pytest.raises(ScheduleError) as refusal:
        replace(OWN, promise="all_reduce").schedules(4)
    assert str(refusal.value) == ("recursive_doubling: its record promises 'all_reduce' and its schedule 'all_gather': "
                                  "state the same promise in both")


RANKS = (0, 1)


def called(*ops_by_step: tuple[str, ...]) -> Trace:
    """A trace of two ranks that watch a buffer and, step by step, call collectives: one op each, or one for both."""
    calls = [Event(rank, "collective", ops[rank % len(ops)], group=RANKS, step=step)
             for step, ops in enumerate(ops_by_step) for rank in RANKS]
    holds = [Event(rank, "hold", chunk=0, step=0, contributions=(1, 0)) for rank in RANKS]
    return Trace([*holds, *calls], 2, "modelled", "recorded")


@pytest.mark.parametrize("ops, digit", [("rrc", "0"), ("rc", "1"), ("rcc", "1"), ("r?", "2"), ("rr?", "0"), ("?", "2"),
                                        ("c?", "1")])
def test_a_step_adds_only_if_most_of_its_chunks_are_added(ops, digit):
    words = {"r": "reduce", "c": "copy", "?": None}
    sends = [Event(rank, kind, words[op] if kind == "recv" else None, 1 - rank, chunk=chunk, step=0)
             for chunk, op in enumerate(ops) for rank, kind in ((0, "send"), (1, "recv"))]
    assert phases(read_run(Trace(sends, 2, "modelled", "recorded"))) == (digit, [])


def test_phases_of_schedules():
    assert phases(read_run(as_trace(collectives.ring_all_reduce(4)))) == ("000111", [])
    swap = Schedule("swap", 2, 2, [(0, 0, 1, 0, "reduce"), (0, 1, 0, 1, "copy"), (1, 1, 0, 0, "copy")], "all_reduce")
    assert phases(read_run(as_trace(swap))) == ("11", [])


@pytest.mark.parametrize("num_ranks", [2, 3, 8])
def test_an_all_reduce_of_the_book_has_the_phases_of_its_record(num_ranks):
    for make in (collectives.tree_all_reduce, collectives.parameter_server_all_reduce):
        assert run_payload(as_trace(make(num_ranks)))["names"] == ["reduce", "broadcast", ""]
    for make in (collectives.ring_all_reduce, collectives.halving_doubling_all_reduce):
        assert run_payload(as_trace(make(num_ranks)))["names"] == ["reduce-scatter", "all-gather", ""]


def test_phases_of_an_unknown_all_reduce_are_inferred_from_its_ranks():
    for make, names in ((collectives.tree_all_reduce, ["reduce", "broadcast", ""]),
                        (collectives.halving_doubling_all_reduce, ["reduce-scatter", "all-gather", ""])):
        other = Schedule("other", 8, 8, make(8).moves, "all_reduce")
        assert run_payload(as_trace(other))["names"] == names


def test_a_collective_is_a_phase_of_its_own():
    trace = called(("all_reduce",), ("broadcast",), ("all_reduce",), ("all_reduce", "broadcast"))
    assert phases(read_run(trace)) == ("3432", ["all-reduce", "broadcast"])


def test_a_phase_stays_one_digit_however_many_collectives_there_are():
    digits, names = phases(read_run(called(*((f"op_{letter}",) for letter in "abcdefghi"), ("op_a",))))
    assert MOST_NAMES == len(names) == 7 and digits == "3456789" + "22" + "3"


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
