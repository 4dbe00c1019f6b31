"""Schedules: the classic picture, the promise at every size, and wrong schedules refused by name."""
import itertools
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from book import collectives
from book.promise import promised_by
from book.schedule import Move, Schedule, ScheduleError

GOLDEN = Path(__file__).parent / "golden"
READS = ["tests/golden/*.csv"]
BY_WORLD_SIZE = [collectives.ring_all_reduce, collectives.ring_reduce_scatter, collectives.ring_all_gather,
                 collectives.parameter_server_all_reduce, collectives.tree_all_reduce,
                 collectives.halving_doubling_all_reduce, collectives.broadcast, collectives.scatter,
                 collectives.gather, collectives.reduce, collectives.all_to_all]


@pytest.mark.parametrize("make", [collectives.ring_reduce_scatter, collectives.ring_all_gather, collectives.broadcast,
                                  collectives.all_to_all])
def test_four_ranks_are_the_classic_picture(make):
    assert make(4).to_csv() == (GOLDEN / f"{make.__name__}_4.csv").read_text()


def test_ring_all_reduce_is_reduce_scatter_then_all_gather():
    whole = [(m.src, m.dst, m.chunk, m.op) for m in collectives.ring_all_reduce(5).moves]
    parts = [(m.src, m.dst, m.chunk, m.op) for make in (collectives.ring_reduce_scatter, collectives.ring_all_gather)
             for m in make(5).moves]
    assert whole == parts


@pytest.mark.parametrize("make", BY_WORLD_SIZE, ids=lambda make: make.__name__)
def test_promise_is_kept(make):
    faults = {}
    for world_size in (1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 17, 31, 32, 33, 63, 64):
        schedule = make(world_size)
        try:
            assert schedule.check() is schedule
        except ScheduleError as error:
            faults[world_size] = str(error)
        if _messages_per_port(schedule) > 1:
            faults[world_size] = f"a rank sends or receives more than one message a step; {faults.get(world_size, '')}"
    assert not faults


def test_names_promise_what_they_end_with():
    names = ["ring_all_gather", "linear_gather", "gather", "tree_all_reduce", "tree_reduce", "ring_reduce_scatter",
             "scatter", "pairwise_all_to_all", "allreduce", "anything"]
    assert [promised_by(name) for name in names] == [
        "all_gather", "gather", "gather", "all_reduce", "reduce", "reduce_scatter", "scatter", "all_to_all",
        "all_reduce", "all_reduce"]


def test_in_an_all_to_all_every_two_ranks_meet_once():
    for world_size in (1, 2, 3, 4, 5, 8, 13, 64):
        schedule = collectives.all_to_all(world_size)
        pairs = [(m.src, m.dst) for m in schedule.moves]
        assert sorted(pairs) == [(a, b) for a in range(world_size) for b in range(world_size) if a != b]
        step_of = {(m.src, m.dst): m.step for m in schedule.moves}
        assert all(step_of[a, b] == step_of[b, a] for a, b in pairs), world_size
        assert schedule.num_steps == (world_size - 1 + world_size % 2 if world_size > 1 else 0)


def test_data_of_the_right_rank_but_of_another_chunk_is_refused():
    to_own_number = [(0, src, dst, src, "copy") for src in (0, 1) for dst in (0, 1) if src != dst]
    with pytest.raises(ScheduleError, match="rank 0 chunk 1 holds chunk 1 of rank 1, not its chunk 0"):
        Schedule("all_to_all", 2, 2, to_own_number).check()
    crossed = [Move(0, 0, 1, 0, "copy", into=1), Move(0, 0, 1, 1, "copy", into=0)]
    with pytest.raises(ScheduleError, match="rank 1 chunk 0 holds chunk 1 of rank 0, not its chunk 0"):
        Schedule("broadcast", 2, 2, crossed).check()


def test_into_is_kept_only_where_it_is_another_chunk():
    same, other = (Schedule("broadcast", 2, 2, [Move(0, 0, 1, 0, "copy", into)]) for into in (0, 1))
    assert same == Schedule("broadcast", 2, 2, [(0, 0, 1, 0, "copy")]) != other
    assert same.moves[0].into is None and other.moves[0].into == 1
    assert same.into().tolist() == [0] and other.into().tolist() == [1] and "into" not in same.to_csv()


@settings(max_examples=40, deadline=None)
@given(num_nodes=st.integers(1, 8), ranks_per_node=st.integers(1, 8))
def test_hierarchical_keeps_its_promise_and_its_traffic(num_nodes, ranks_per_node):
    schedule = collectives.hierarchical_all_reduce(num_nodes, ranks_per_node).check()
    num_bytes = 840.0 * schedule.world_size
    node = np.arange(schedule.world_size) // ranks_per_node
    inside = np.zeros(schedule.world_size)
    across = np.zeros(schedule.world_size)
    for m in schedule.moves:
        (inside if node[m.src] == node[m.dst] else across)[m.src] += num_bytes / schedule.num_chunks
    assert np.allclose(inside, 2 * (ranks_per_node - 1) / ranks_per_node * num_bytes)
    assert np.allclose(across, 2 * (num_nodes - 1) / num_nodes * num_bytes / ranks_per_node)
    assert _messages_per_port(schedule) <= 1


def test_bytes_sent_are_the_closed_forms():
    for world_size in (2, 3, 8, 17, 64):
        num_bytes = 1000.0 * world_size
        ring = collectives.ring_all_reduce(world_size).sent_bytes(num_bytes)
        assert np.allclose(ring, 2 * (world_size - 1) / world_size * num_bytes), world_size
        root, *others = collectives.parameter_server_all_reduce(world_size).sent_bytes(num_bytes)
        assert root == (world_size - 1) * num_bytes and set(others) == {num_bytes}


@settings(max_examples=60, deadline=None)
@given(world_size=st.integers(2, 9), data=st.data())
def test_any_single_mistake_in_a_ring_is_refused(world_size, data):
    moves = list(collectives.ring_all_reduce(world_size).moves)
    place = data.draw(st.integers(0, len(moves) - 1))
    m = moves[place]
    fault = data.draw(st.sampled_from(["drop", "other op", "other chunk"]))
    swapped = Move(m.step, m.src, m.dst, m.chunk, "copy" if m.op == "reduce" else "reduce")
    shifted = Move(m.step, m.src, m.dst, (m.chunk + 1) % world_size, m.op)
    moves[place:place + 1] = {"drop": [], "other op": [swapped], "other chunk": [shifted]}[fault]
    with pytest.raises(ScheduleError, match=r"rank \d+ chunk \d+"):
        Schedule("ring_all_reduce", world_size, world_size, moves).check()


def test_a_missing_contribution_is_named():
    moves = [m for m in collectives.ring_reduce_scatter(4).moves if (m.step, m.src) != (0, 2)]
    with pytest.raises(ScheduleError, match="at the end rank 1 chunk 2 lacks the contribution of rank 2"):
        Schedule("ring_reduce_scatter", 4, 4, moves).check()


def test_a_double_contribution_is_named():
    moves = [*collectives.ring_reduce_scatter(4).moves, Move(3, 0, 3, 0, "reduce")]
    with pytest.raises(ScheduleError, match=r"at the end rank 3 chunk 0 counts too often: rank 0 \(2 times\)"):
        Schedule("ring_reduce_scatter", 4, 4, moves).check()


@pytest.mark.parametrize("move, complaint", [
    (Move(0, 0, 4, 0, "copy"), "has dst 4, it must be 0 to 3"), (Move(0, -2, 1, 0, "copy"), "has src -2"),
    (Move(0, 0, 1, 9, "copy"), "has chunk 9"), (Move(0, 0, 1, 1, "copy", 4), "has into 4, it must be 0 to 3"),
    ((0, 0, 1, 1, "copy", -1), "into must be the number of a chunk or None, not -1"),
    (Move(-3, 0, 1, 0, "copy"), "has step -3, it must be 0 or more"),
    (Move(0, 0, 1, 0, None), "op must be 'reduce' or 'copy', not 'None'"), ((0, 1), r"give \(step, src, dst, chunk, op"),
    (Move(0, 0.5, 1, 0, "copy"), "src must be a whole number, not 0.5"),
    (Move(2**40, 0, 1, 0, "copy"), "step must be a whole number, not 1099511627776"),
    (Move(0, 0, 1, 0, "add"), "op must be 'reduce' or 'copy', not 'add'"), (Move(0, 1, 1, 0, "copy"), "to itself"),
])
def test_a_move_that_cannot_be_is_refused(move, complaint):
    with pytest.raises(ScheduleError, match=complaint):
        Schedule("broken", 4, 4, [move])


def test_a_copy_that_races_with_another_message_is_refused():
    moves = [*collectives.ring_all_reduce(3).moves, Move(3, 1, 0, 2, "reduce")]
    with pytest.raises(ScheduleError, match="in step 3 rank 0 chunk 2 gets a copy and another message"):
        Schedule("ring_all_reduce", 3, 3, moves).check()
    moves = [Move(0, 0, 2, 0, "copy", into=1), Move(0, 1, 2, 1, "copy")]
    with pytest.raises(ScheduleError, match="in step 0 rank 2 chunk 1 gets a copy and another message"):
        Schedule("ring_all_reduce", 3, 3, moves).check()


def test_a_world_size_that_cannot_be_is_refused():
    for make, world_size in itertools.product(BY_WORLD_SIZE, (0, -1, 2.5, "4", True)):
        with pytest.raises(ScheduleError, match="world_size must be a whole number of at least 1"):
            make(world_size)


def test_csv_goes_both_ways():
    for make in BY_WORLD_SIZE:
        schedule = make(6)
        assert Schedule.from_csv(schedule.to_csv()) == schedule
    with pytest.raises(ScheduleError, match="not a schedule's CSV"):
        Schedule.from_csv("step,src\n1,2\n")


def test_moves_are_ordered_by_step_and_rows_are_moves():
    schedule = Schedule("two", 3, 1, [(1, 1, 2, 0, "reduce"), (0, 0, 1, 0, "reduce")])
    assert list(schedule.moves) == [Move(0, 0, 1, 0, "reduce"), Move(1, 1, 2, 0, "reduce")]
    assert schedule.moves[-1].step == 1 and len(schedule.moves[:1]) == 1 and schedule.num_steps == 2


def _messages_per_port(schedule):
    """The largest number of messages that one rank sends, or receives, in one step."""
    busiest = 0
    for rows in schedule.steps():
        pairs = {(m.src, m.dst) for m in schedule.moves.take(rows)}
        for end in (0, 1):
            ports = [pair[end] for pair in pairs]
            busiest = max(busiest, max(ports.count(p) for p in ports))
    return busiest


@pytest.mark.parametrize("arguments, complaint", [
    (("a,b", 2, 2), "name is letters, digits and underscores"), ((None, 2, 2), "name is letters"),
    (("ring", "2", 2), "world_size must be a whole number"), (("ring", 2, 0), "num_chunks must be a whole number"),
    (("ring", 2, 2, [], "world_peace"), "unknown promise 'world_peace'")])
def test_a_head_that_cannot_be_is_refused(arguments, complaint):
    with pytest.raises(ScheduleError, match=complaint):
        Schedule(*(*arguments, [])[:4], *arguments[4:])
