"""A backward pass and its buckets as a trace: what `bucketed_backward` says, on every rank, and what plays it."""
import pytest

from book.cost import Link
from book.replay import overlap
from book.simulate import simulate_backward
from book.simulate.streams import bucketed_backward, fill_buckets, stream_times
from book.widgets import bucket_timeline

SIZES = {"2.bias": 8.0, "2.weight": 800.0, "0.bias": 8.0, "0.weight": 1600.0}
LINK = Link(1e-6, 1e9)


@pytest.mark.parametrize("cap_bytes", [1, 808, 1e6])
def test_all_ranks_do_what_the_streams_say(cap_bytes: float) -> None:
    trace = simulate_backward(SIZES, cap_bytes, 3, 2e-9, LINK)
    times = stream_times(bucketed_backward([*SIZES.values()], cap_bytes, 3, 2e-9, LINK))
    for rank in range(3):
        own = trace.of_rank(rank)
        assert [event.times_s for event in own] == times
        sent = [event for event in own if event.kind == "collective"]
        assert [event.num_bytes for event in sent] == [
            sum([*SIZES.values()][i] for i in bucket) for bucket in fill_buckets([*SIZES.values()], cap_bytes)]
        assert all(event.group == (0, 1, 2) for event in sent)
    assert overlap(trace).step_s == max(end_s for _, end_s in times)


def test_of_several_passes_only_the_last_one_sends() -> None:
    trace = simulate_backward(SIZES, 1e6, 2, 2e-9, LINK, num_passes=3)
    own = list(trace.of_rank(1))
    assert [event.op for event in own] == [*SIZES] * 3 + ["all_reduce"]
    assert [event.bucket for event in own] == [None] * 8 + [0] * 5
    ends = [event.times_s[1] for event in own]
    assert ends == sorted(ends) and own[-1].times_s[0] == ends[-2] == pytest.approx(3 * 2416 * 2e-9)


def test_the_timeline_says_that_it_is_simulated() -> None:
    shown = bucket_timeline(simulate_backward(SIZES, 808, 2, 2e-9, LINK))._repr_mimebundle_()[0]
    assert "order simulated" in shown["text/plain"] and "order simulated" in shown["text/html"]
    assert "recorded" not in shown["text/plain"] + shown["text/html"]
