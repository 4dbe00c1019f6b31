"""Schedules as a learner's code meets them: moves, actions, promises, their normal form, what happens before what."""
from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from nbformat.v4 import new_code_cell, new_notebook, new_output

from book import collectives, record
from book.authoring.lint import ignored_outputs
from book.authoring.normalise import normalise
from book.collectives import COLLECTIVES
from book.pipelines import gpipe, zero_bubble
from book.promise import PROMISES
from book.record.recording import Operation, Recording
from book.schedule import ChunkRange, Move, Phases, PipelineSchedule, Schedule, ScheduleError, phase

GOLDEN = Path(__file__).parent / "golden"


@pytest.mark.parametrize("make", [collectives.ring_reduce_scatter, collectives.ring_all_gather, collectives.broadcast,
                                  collectives.all_to_all])
def test_the_ring_of_four_ranks_is_the_textbook_one(make):
    assert make(4).to_csv() == (GOLDEN / f"{make.__name__}_4.csv").read_text()


def test_what_a_phase_cannot_mean_is_refused():
    @phase
    def mixed(span):
        yield 0, 0, 1, span, "copy"
        yield 0, 2, 3, ChunkRange(0, 1), "reduce"

    @phase
    def beyond():
        yield 0, 0, 1, ChunkRange(3, 2), "copy"

    @phase
    def apart():
        for chunk in (0, 1):
            yield 0, 2, 3, chunk, "copy"

    for wrong, fault in ((mixed(ChunkRange(0, 1)),
                          "has one op and one number of chunks, not 'copy' of 1 and 'reduce' of 1"),
                         (mixed(ChunkRange(0, 3)), "not 'copy' of 3 and 'reduce' of 1"), (beyond(), "must be 0 to 3"),
                         (apart(), "two messages from rank 2 to rank 3: yield their chunks in one, as a ChunkRange")):
        with pytest.raises(ScheduleError, match=fault):
            Schedule("wrong", 4, 4, Phases([wrong]), promise="broadcast").check()


def test_ring_all_reduce_is_reduce_scatter_then_all_gather():
    whole = [(m.src, m.dst, m.chunk, m.op) for m in collectives.ring_all_reduce(5).moves]
    parts = [(m.src, m.dst, m.chunk, m.op) for make in (collectives.ring_reduce_scatter, collectives.ring_all_gather)
             for m in make(5).moves]
    assert whole == parts


@pytest.mark.parametrize("name", COLLECTIVES)
def test_every_schedule_keeps_its_promise(name):
    faults = {}
    for world_size in (1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 17, 31, 32, 33, 63, 64):
        made = COLLECTIVES[name].schedules(world_size)
        # Of many ranks one way to cut them into nodes is enough: checking takes longer the more ranks there are.
        for place, schedule in enumerate(made if world_size < 16 else made[len(made) // 2:][:1]):
            try:
                assert schedule.check() is schedule
            except ScheduleError as error:
                faults[world_size, place] = str(error)
            if _messages_per_port(schedule) > 1:
                faults[world_size, place] = f"two messages at once at a rank; {faults.get((world_size, place), '')}"
    assert not faults


def _bruck_all_gather(world_size):
    """Step by step, rank r sends to rank r-1, r-2, r-4 and so on all the chunks that it has and the other lacks."""
    moves, step = [], 0
    while (distance := 1 << step) < world_size:
        moves += [Move(step, rank, (rank - distance) % world_size, (rank + 1 + ahead) % world_size, "copy")
                  for rank in range(world_size) for ahead in range(min(distance, world_size - distance))]
        step += 1
    return moves


def _bruck_all_to_all():
    """On 4 ranks: in step 0 what goes 1 or 3 ranks to the right goes 1, in step 1 what has 2 left to go goes 2."""
    hops = [(0, 1, 1, 3), (0, 1, 3, 1), (1, 2, 2, 2), (1, 2, 1, 1)]  # step, distance, chunk - src, into - dst
    return [Move(step, rank, (rank + far) % 4, (rank + chunk) % 4, "copy", (rank + far + into) % 4)
            for step, far, chunk, into in hops for rank in range(4)]


def test_a_schedule_of_any_name_is_checked_against_its_stated_promise():
    for world_size in (2, 3, 4, 5, 8, 13):
        moves = _bruck_all_gather(world_size)
        assert Schedule("bruck", world_size, world_size, moves, "all_gather").check().promise == "all_gather"
        with pytest.raises(ScheduleError, match="at the end rank 0 chunk 0 "):
            Schedule("bruck_all_gather", world_size, world_size, moves, "all_reduce").check()
    assert Schedule("bruck", 4, 4, _bruck_all_to_all(), "all_to_all").check().num_steps == 2


def test_a_wrong_schedule_fails_its_stated_promise():
    lost = [m for m in _bruck_all_gather(4) if (m.step, m.src, m.chunk) != (1, 2, 0)]
    with pytest.raises(ScheduleError, match="bruck: at the end rank 0 chunk 0 lacks the contribution of rank 3"):
        Schedule("bruck", 4, 4, lost, "all_gather").check()
    unturned = [replace(m, into=None) for m in _bruck_all_to_all()]
    with pytest.raises(ScheduleError, match="bruck: at the end rank 0 chunk 0 lacks the contribution of rank 0"):
        Schedule("bruck", 4, 4, unturned, "all_to_all").check()


@pytest.mark.parametrize("name", ["bruck", "bruck_all_gather", "all_reduce"])
def test_a_schedule_has_to_state_what_it_promises(name):
    with pytest.raises(ScheduleError) as refusal:
        Schedule(name, 4, 4, _bruck_all_gather(4))
    assert str(refusal.value) == (
        f'{name}: state what this schedule promises, as in Schedule(..., promise="all_reduce"): one of all_reduce, '
        "reduce_scatter, all_gather, broadcast, scatter, gather, reduce, all_to_all")


def test_in_an_all_to_all_every_pair_of_ranks_exchanges_once():
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
        Schedule("all_to_all", 2, 2, to_own_number, "all_to_all").check()
    crossed = [Move(0, 0, 1, 0, "copy", into=1), Move(0, 0, 1, 1, "copy", into=0)]
    with pytest.raises(ScheduleError, match="rank 1 chunk 0 holds chunk 1 of rank 0, not its chunk 0"):
        Schedule("broadcast", 2, 2, crossed, "broadcast").check()


def test_into_is_stored_only_if_it_differs_from_the_chunk():
    same, other = (Schedule("one", 2, 2, [Move(0, 0, 1, 0, "copy", into)], "broadcast") for into in (0, 1))
    assert same == Schedule("one", 2, 2, [(0, 0, 1, 0, "copy")], "broadcast") != other
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
        Schedule("ring", world_size, world_size, moves, "all_reduce").check()


def test_a_missing_contribution_is_named():
    moves = [m for m in collectives.ring_reduce_scatter(4).moves if (m.step, m.src) != (0, 2)]
    with pytest.raises(ScheduleError, match="at the end rank 1 chunk 2 lacks the contribution of rank 2"):
        Schedule("ring", 4, 4, moves, "reduce_scatter").check()


def test_a_double_contribution_is_named():
    moves = [*collectives.ring_reduce_scatter(4).moves, Move(3, 0, 3, 0, "reduce")]
    with pytest.raises(ScheduleError, match=r"at the end rank 3 chunk 0 counts too often: rank 0 \(2 times\)"):
        Schedule("ring", 4, 4, moves, "reduce_scatter").check()


@pytest.mark.parametrize("move, complaint", [
    (Move(0, 0, 4, 0, "copy"), "has dst 4, it must be 0 to 3"), (Move(0, -2, 1, 0, "copy"), "has src -2"),
    (Move(0, 0, 1, 9, "copy"), "has chunk 9"), (Move(0, 0, 1, 1, "copy", 4), "has into 4, it must be 0 to 3"),
    ((0, 0, 1, 1, "copy", -1), "into must be the number of a chunk or None, not -1"),
    (Move(-3, 0, 1, 0, "copy"), "has step -3, it must be 0 or more"),
    (Move(0, 0, 1, 0, None), "op must be 'reduce' or 'copy', not 'None'"),
    ((0, 1), r"give \(step, src, dst, chunk, op"),
    (Move(0, 0.5, 1, 0, "copy"), "src must be a whole number, not 0.5"),
    (Move(2**40, 0, 1, 0, "copy"), "step must be a whole number, not 1099511627776"),
    (Move(0, 0, 1, 0, "add"), "op must be 'reduce' or 'copy', not 'add'"), (Move(0, 1, 1, 0, "copy"), "to itself"),
])
def test_an_invalid_move_is_refused(move, complaint):
    with pytest.raises(ScheduleError, match=complaint):
        Schedule("broken", 4, 4, [move], "all_reduce")


def test_a_copy_that_races_with_another_message_is_refused():
    moves = [*collectives.ring_all_reduce(3).moves, Move(3, 1, 0, 2, "reduce")]
    with pytest.raises(ScheduleError, match="in step 3 rank 0 chunk 2 gets a copy and another message"):
        Schedule("ring", 3, 3, moves, "all_reduce").check()
    moves = [Move(0, 0, 2, 0, "copy", into=1), Move(0, 1, 2, 1, "copy")]
    with pytest.raises(ScheduleError, match="in step 0 rank 2 chunk 1 gets a copy and another message"):
        Schedule("ring", 3, 3, moves, "all_reduce").check()


def test_an_invalid_world_size_is_refused():
    for collective, world_size in itertools.product(COLLECTIVES.values(), (0, -1, 2.5, "4", True)):
        num_arguments = len(collective.sizes(4)[0])
        with pytest.raises(ScheduleError, match=r"(world_size|num_nodes) must be a whole number of at least 1"):
            collective.schedule(*[world_size] * num_arguments)
        with pytest.raises(ScheduleError, match="world_size must be a whole number of at least 1"):
            collective.schedules(world_size)


def test_csv_round_trip():
    for collective in COLLECTIVES.values():
        for schedule in collective.schedules(6):
            assert Schedule.from_csv(schedule.to_csv()) == schedule
    with pytest.raises(ScheduleError, match="not a schedule's CSV"):
        Schedule.from_csv("step,src\n1,2\n")


def test_moves_are_ordered_by_step_and_rows_are_moves():
    schedule = Schedule("two", 3, 1, [(1, 1, 2, 0, "reduce"), (0, 0, 1, 0, "reduce")], "all_reduce")
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
def test_an_invalid_header_is_refused(arguments, complaint):
    with pytest.raises(ScheduleError, match=complaint):
        Schedule(*(*arguments, [])[:4], *arguments[4:])


def test_a_split_backward_frees_activations_after_its_weight_part():
    order = PipelineSchedule.from_csv("# own,1,2\n0F0,0F1,0I0,0I1,0W0,0W1")
    assert order.in_flight() == [[1, 2, 2, 2, 1, 0]] and order.peak_in_flight() == [2]


@pytest.mark.parametrize("make", [gpipe, zero_bubble])
def test_at_the_end_nothing_is_in_flight(make):
    assert [counts[-1] for counts in make(4, 3).in_flight()] == [0] * make(4, 3).world_size


def test_in_flight_is_what_has_run_forward_but_not_backward():
    """Counted anew at every place of an order with split backwards, on two stages of each rank."""
    schedule = zero_bubble(6, 7)
    for rank, counts in enumerate(schedule.in_flight()):
        own = schedule.of_rank(rank)
        for place, count in enumerate(counts):
            forward, back = ({(a.stage, a.micro_batch) for a in own[:place + 1] if a.kind == kind} for kind in "FW")
            assert count == len(forward - back)


def stream(text, name="stdout"):
    return new_output("stream", name=name, text=text)


def test_pieces_of_a_stream_are_joined_across_outputs_between_them():
    shown = new_output("display_data", data={"text/plain": "a player"})
    cell = new_code_cell("run()", execution_count=1,
                         outputs=[stream("1"), shown, stream("2"), stream("!", "stderr"), stream("3")])
    outputs = normalise(new_notebook(cells=[cell])).cells[0].outputs
    assert [output.get("text", output.output_type) for output in outputs] == ["123", "display_data", "!"]


@pytest.mark.parametrize("num_cells, num_ignored, is_told", [(3, 1, True), (4, 1, False), (6, 2, True), (7, 2, False)])
def test_fewer_than_a_third_of_the_cells_may_be_ignored(num_cells, num_ignored, is_told):
    ignored = [new_code_cell("clock()", metadata={"tags": ["nbval-ignore-output"]}) for _ in range(num_ignored)]
    cells = [*ignored, *(new_code_cell("1") for _ in range(num_cells - num_ignored))]
    messages = [problem.message for problem in ignored_outputs(new_notebook(cells=cells))]
    told = f"{num_ignored} of {num_cells} code cells are not compared; keep it under a third"
    assert (told in messages) == is_told


def exchanged(*pairs):
    """An all-to-all of two ranks, step by step: a chunk of rank 0 and a chunk of rank 1 change places."""
    return Schedule("exchanged", 2, 2 * len(pairs), [
        move for step, (ours, theirs) in enumerate(pairs)
        for move in ((step, 0, 1, ours, "copy", theirs), (step, 1, 0, theirs, "copy", ours))], "all_to_all")


def test_an_all_to_all_exchanges_each_block_separately():
    assert exchanged((1, 0), (3, 2), (5, 4)).check()
    with pytest.raises(ScheduleError, match="at the end rank 0 chunk 1 holds chunk 2 of rank 1, not its chunk 0"):
        exchanged((1, 2), (3, 0)).check()
    assert PROMISES["all_to_all"].source_chunk(2, 6).tolist() == [[0, 0, 2, 2, 4, 4], [1, 1, 3, 3, 5, 5]]


@pytest.mark.parametrize("name", ["reduce_scatter", "all_gather", "scatter", "gather", "all_to_all"])
def test_chunks_are_assigned_to_ranks_cyclically(name):
    """A second block of chunks belongs to the ranks as the first one does."""
    one, two = (PROMISES[name].where(3, num_chunks) for num_chunks in (3, 6))
    assert np.array_equal(two, np.hstack([one, one]))
    one, two = (PROMISES[name].goal(3, num_chunks) for num_chunks in (3, 6))
    assert np.array_equal(two, np.concatenate([one, one], axis=1))


def operation(kind, peer):
    return Operation(kind, None, "0", (0, 1), peer, 0, 8.0, start_ns=0, end_ns=1)


def recording(kind, peer, *log):
    """A rank that issues operations of one kind and waits for them as `log` says: "+0" issues the first, "-0" waits."""
    entries = [({"+": "issue", "-": "wait"}[entry[0]], int(entry[1:])) for entry in log]
    num_operations = sum(what == "issue" for what, _ in entries)
    return Recording([operation(kind, peer) for _ in range(num_operations)], entries)


def steps(*recordings):
    return [(event.rank, event.step) for event in record.assemble(recordings).events if event.kind == "send"]


def test_waiting_for_an_old_message_never_lowers_a_step():
    sender = recording("send", 1, "+0", "+1", "-1", "+2", "-2", "-0", "+3", "-3")
    receiver = recording("recv", 0, "+0", "+1", "+2", "+3", "-0", "-1", "-2", "-3")
    assert steps(sender, receiver) == [(0, 0), (0, 0), (0, 1), (0, 2)]


def test_what_is_issued_before_a_wait_may_be_in_the_same_step():
    sender = recording("send", 1, "+0", "+1", "+2", "-2", "-1", "-0", "+3", "-3")
    receiver = recording("recv", 0, "+0", "+1", "+2", "+3", "-3", "-2", "-1", "-0")
    assert steps(sender, receiver) == [(0, 0), (0, 0), (0, 0), (0, 1)]
