"""Pipeline schedules: golden orders, what they promise at every size, orders that can't run refused with the reason."""
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from book.cost import pipeline_bubble
from book.pipelines import gpipe, interleaved, one_f_one_b, zero_bubble
from book.replay import bubble
from book.schedule import Action, PipelineSchedule, ScheduleError
from book.simulate import simulate_pipeline

GOLDEN = Path(__file__).parent / "golden" / "pipelines"
MADE = {"gpipe_4_6": gpipe(4, 6), "one_f_one_b_4_6": one_f_one_b(4, 6), "interleaved_8_8": interleaved(8, 8),
        "zero_bubble_8_8": zero_bubble(8, 8), "zero_bubble_6_2": zero_bubble(6, 2)}
sizes = st.tuples(st.integers(1, 6), st.integers(1, 12))


def order(text, num_stages, num_micro_batches):
    return PipelineSchedule.from_csv(f"# own,{num_stages},{num_micro_batches}\n{text}")


@pytest.mark.parametrize("name", MADE)
def test_golden_orders(name):
    text = (GOLDEN / f"{name}.csv").read_text()
    assert MADE[name].to_csv() == text
    assert PipelineSchedule.from_csv(text) == MADE[name]


@given(sizes, st.integers(1, 4))
@settings(deadline=None, max_examples=60)
def test_every_schedule_runs_every_action(size, stages_per_rank):
    num_ranks, num_micro_batches = size
    made = [gpipe(*size), one_f_one_b(*size), zero_bubble(2 * num_ranks, num_micro_batches),
            interleaved(num_ranks * stages_per_rank, num_ranks * num_micro_batches, stages_per_rank)]
    for schedule in made:
        assert schedule.check() is schedule
        assert schedule.world_size == num_ranks


@given(sizes)
@settings(deadline=None, max_examples=60)
def test_in_flight_is_what_one_f_one_b_saves(size):
    num_stages, num_micro_batches = size
    assert gpipe(*size).peak_in_flight() == [num_micro_batches] * num_stages
    assert one_f_one_b(*size).peak_in_flight() == [min(num_micro_batches, num_stages - s) for s in range(num_stages)]
    assert max(zero_bubble(2 * num_stages, num_micro_batches).peak_in_flight()) <= 2 * num_stages


@given(sizes, st.floats(0.1, 3), st.floats(0.1, 3))
@settings(deadline=None, max_examples=60)
def test_the_bubble_is_the_closed_form(size, forward_s, backward_s):
    for make in (gpipe, one_f_one_b):
        found = bubble(simulate_pipeline(make(*size), forward_s, backward_s))
        assert found.share == pytest.approx(pipeline_bubble(*size), abs=1e-9)
        assert found.step_s == pytest.approx((sum(size) - 1) * (forward_s + backward_s))


@pytest.mark.parametrize(("num_ranks", "groups", "stages_per_rank"), [(2, 1, 2), (4, 2, 2), (4, 1, 3), (3, 4, 4)])
def test_interleaving_divides_the_bubble(num_ranks, groups, stages_per_rank):
    schedule = interleaved(num_ranks * stages_per_rank, num_ranks * groups, stages_per_rank)
    found = bubble(simulate_pipeline(schedule, 1.0, 2.0))
    assert found.share == pytest.approx(pipeline_bubble(num_ranks, num_ranks * groups, stages_per_rank))


@pytest.mark.parametrize("num_ranks", [2, 3, 4, 6])
def test_zero_bubble_wastes_less_than_interleaved(num_ranks):
    """Forward, input gradient and weight gradient equally long: the case that ZB-V is made for."""
    split = bubble(simulate_pipeline(zero_bubble(2 * num_ranks, 4 * num_ranks), 1.0, 2.0))
    whole = bubble(simulate_pipeline(interleaved(2 * num_ranks, 4 * num_ranks), 1.0, 2.0))
    assert split.share < whole.share


@pytest.mark.parametrize(("text", "size", "reason"), [
    ("0B0,0F0", (1, 1), "rank 0 waits at B0 of stage 0 for F0 of stage 0, which it runs later itself"),
    ("0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1", (2, 2), "rank 0 waits at B0 of stage 0 for the backward of micro-batch 0 on "
     "stage 1; rank 1 waits at F1 of stage 1 for F1 of stage 0"),
    ("0F0,0W0,0I0", (1, 1), "rank 0 waits at W0 of stage 0 for I0 of stage 0, which it runs later itself"),
    ("0F0\n1F0,1B0", (2, 1), "nobody runs B0 or I0 of stage 0"),
    ("0F0,0B0", (1, 2), "nobody runs F1 of stage 0"),
    ("0F0,0I0", (1, 1), "nobody runs W0 of stage 0"),
    ("0F0,0B0", (2, 1), "rank 0 waits at B0 of stage 0 for the backward of micro-batch 0 on stage 1"),
])
def test_an_order_that_cannot_run_is_explained(text, size, reason):
    with pytest.raises(ScheduleError) as caught:
        order(text, *size).check()
    assert reason in str(caught.value)


@pytest.mark.parametrize(("actions", "reason"), [
    ([Action(0, 0, 0, "F"), Action(0, 0, 0, "F")], "rank 0 runs F0 of stage 0 when that was done already"),
    ([Action(0, 0, 0, "B"), Action(0, 0, 0, "I")], "rank 0 runs I0 of stage 0 when that was done already"),
    ([Action(0, 0, 0, "F"), Action(1, 0, 1, "F")], "stage 0 is run by ranks 0 and 1"),
    ([Action(0, 2, 0, "F")], "stage 2, it must be 0 to 1"),
    ([Action(0, 0, 2, "F")], "micro_batch 2, it must be 0 to 1"),
    ([Action(-1, 0, 0, "F")], "rank -1, it must be"),
    ([Action(0, 0, 0, "X")], "kind must be one of F, B, I, W, not 'X'"),
    ([(0, 0)], "is not a Action: give"),
])
def test_an_invalid_action_is_refused(actions, reason):
    with pytest.raises(ScheduleError) as caught:
        PipelineSchedule("own", 2, 2, actions)
    assert reason in str(caught.value)


@pytest.mark.parametrize(("make", "reason"), [
    (lambda: gpipe(0, 4), "num_stages must be a whole number of at least 1"),
    (lambda: one_f_one_b(4, 0), "num_micro_batches must be"),
    (lambda: interleaved(6, 4, 4), "make num_stages a multiple of stages_per_rank"),
    (lambda: interleaved(8, 6, 2), "use a multiple of 4"),
    (lambda: zero_bubble(3, 4), "use an even number"),
    (lambda: PipelineSchedule.from_csv("0F0"), "write one with to_csv"),
    (lambda: PipelineSchedule.from_csv("# own,1,1\n0X0"), "'0X0' is no action such as 0F3"),
    (lambda: PipelineSchedule.from_csv(""), "write one with to_csv"),
    (lambda: PipelineSchedule("own name", 1, 1, []), "letters, digits and underscores"),
])
def test_invalid_sizes_are_refused(make, reason):
    with pytest.raises(ScheduleError) as caught:
        make()
    assert reason in str(caught.value)


def test_an_order_may_be_partial():
    """As a run that hung leaves it."""
    part = order("0F0,0F1\n1F0", 2, 2)
    assert [str(action) for action in part.runnable()] == ["F0 of stage 0", "F1 of stage 0", "F0 of stage 1"]
    assert part.in_flight() == [[1, 2], [1]] and part.peak_in_flight() == [2, 1]
    assert part.rank_of(1) == 1 and part.rank_of(7) is None
