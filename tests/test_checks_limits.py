"""Checks just inside and just outside of what they allow, and which of two reasons they give."""
import numpy as np
import pytest

from book.checks import gradient_buckets, pipeline_orders, rings
from book.checks.verdict import CheckFailed
from book.pipelines import one_f_one_b
from book.trace import Event, Trace

WHOLE = np.random.default_rng(0).integers(-1000, 1000, (4, 44)).astype(float)


@pytest.mark.parametrize("times, reason", [
    ((2, 1, 1, 1), "one step too many, or the wrong chunk sent"), ((2, 0, 1, 1), "one step too many"),
    ((1, 1, 0, 1), "was every step made, and the right chunk sent"), ((1, 1, 0, 0), "was every step made")])
def test_sums_too_large_and_too_small_have_different_reasons(times, reason):
    after = np.tile(WHOLE.sum(axis=0), (4, 1))
    after[1, 11:22] = (np.array(times) @ WHOLE)[11:22]
    with pytest.raises(CheckFailed, match=f"rank 1 chunk 1 .*: {reason}"):
        rings.all_reduce(WHOLE, after)


def test_one_more_micro_batch_kept_is_refused():
    order = one_f_one_b(3, 6)
    assert pipeline_orders.activations_kept([3.005, 2.0, 0.9], order) == pytest.approx(5.905)
    for peaks, complaint in (([3.02, 2.0, 1.0], "rank 0 .* of 3.02 micro-batches while only 3 are in flight"),
                             ([3.0, 2.0, 2.0], "rank 2 .* activations of 2 micro-batches while only 1 are in flight")):
        with pytest.raises(CheckFailed, match=complaint):
            pipeline_orders.activations_kept(peaks, order)


def backward(*sent_s):
    """A followed backward on two ranks: six gradients that end at 1, 2, ... 6 s, and all-reduces issued at `sent_s`."""
    ready = [Event(rank, "compute", op=str(i), num_bytes=4, start_s=i, end_s=i + 1.0)
             for rank in (0, 1) for i in range(6)]
    issued = [Event(rank, "collective", op="all_reduce", num_bytes=8, start_s=start_s, end_s=9.0)
              for rank in (0, 1) for start_s in sent_s]
    return Trace(ready + issued, 2, "measured", "recorded")


def test_only_the_last_bucket_may_be_sent_when_backward_is_over():
    assert gradient_buckets.bucket_traffic(backward(2.1, 4.1, 6.1), backward(2.1, 4.1, 6.1), 3) == (3, 24)
    with pytest.raises(CheckFailed, match="rank 0 issued 1 of 3 all-reduces before .* 2 can be"):
        gradient_buckets.bucket_traffic(backward(2.1, 6.1, 6.2), backward(2.1, 4.1, 6.1), 3)
