"""What a player says of a run as a whole: the phases that its steps belong to."""
from __future__ import annotations

import pytest

from book import collectives
from book.schedule import Schedule
from book.trace import Event, Trace
from book.widgets.player_run import as_trace, read_run
from book.widgets.player import run_payload
from book.widgets.player_words import MOST_NAMES, phases

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
