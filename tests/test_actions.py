"""Orders of a pipeline's actions: what a forward keeps, and until when."""
import pytest

from book.pipelines import gpipe, zero_bubble
from book.schedule import PipelineSchedule


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
