"""What collectives promise of buffers with more chunks than ranks, which the book's own schedules do not have."""
import numpy as np
import pytest

from book.promise import PROMISES
from book.schedule import Schedule, ScheduleError


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
