"""The records of the book's collectives: none is missing, each is right, and each is tried where the others are."""
from __future__ import annotations

import inspect
import re
from dataclasses import replace

import pytest

from book import collectives
from book.collectives import COLLECTIVES, Collective
from book.promise import PROMISES
from book.schedule import Move, Schedule, ScheduleError
from tests import test_execute, test_schedule, test_simulate
from tests.website import ROOT

READS = ["references.bib"]


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
