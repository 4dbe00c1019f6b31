"""Checks on runs that go on after a kill, and on ranks over several hosts: each mistake gets its sentence."""
import numpy as np
import pytest

from book.checks import multi_host, recovery
from book.checks.verdict import CheckFailed
from book.trace import Event, Trace

STUCK = {0: [("0", 9, (0, 1, 2), True), ("a", 2, (0, 1), False)], 1: [("0", 9, (0, 1, 2), True)],
         2: [("0", 9, (0, 1, 2), True)]}
WANT = {0: 3.0, 1: 2.0, 2: 1.5}
SLIPS = {"never_updated": {0: 3.0, 1: 3.0, 2: 3.0}, "never_cleared": {0: 3.0, 1: 2.0, 2: 1.7}}


def test_the_guilty_rank_is_returned():
    assert recovery.guilty_ranks([1], STUCK, "stuck") == [1]


@pytest.mark.parametrize("found, reason", [
    ([], "you found nobody, but others also wait for rank 1, which waits for nobody"),
    ([1, 2], "nobody waits for rank 2, .* Don't compare how many calls the dumps hold")])
def test_a_wrong_guilty_rank_is_explained(found, reason):
    with pytest.raises(CheckFailed, match=reason):
        recovery.guilty_ranks(found, STUCK, "stuck")


def test_losses_of_one_process_pass():
    recovery.trained_as_one({step: loss + 1e-12 for step, loss in WANT.items()}, WANT, SLIPS)


@pytest.mark.parametrize("losses, reason", [
    (None, "a dict of its losses by step, not None"),
    ({0: 3.0, 1: 2.0}, "has losses for the steps 0, 1, but it should have them for the steps 0 to 2"),
    ({0: 2.9, 1: 2.0, 2: 1.5}, "loss of step 0 is 2.9, but that of the whole batch is 3: every rank must call mean"),
    (SLIPS["never_updated"], "weights that never change"),
    (SLIPS["never_cleared"], "gradients that add up over the steps"),
    ({0: 3.0, 1: 2.0, 2: 1.6}, "loss of step 2 differs from that of one process")])
def test_losses_of_another_training_are_explained(losses, reason):
    with pytest.raises(CheckFailed, match=reason):
        recovery.trained_as_one(losses, WANT, SLIPS)


def test_batches_that_are_drawn_differently_are_refused():
    recovery.batches_drawn({5: [1, 3]}, {5: [3, 1]})
    with pytest.raises(CheckFailed, match="step 5: .* not the first NUM_ROWS of"):
        recovery.batches_drawn({5: [1, 2]}, {5: [3, 1]})


def test_tensors_in_place_of_row_numbers_are_refused():
    with pytest.raises(CheckFailed, match="step 0 on 1 rank: rows have the type int64: return plain ints"):
        recovery.same_batches({1: [list(np.arange(2))]}, 2, 0, 9)


def traced(*calls):
    """A trace of calls of two ranks on each of two hosts, all across, as (op, bytes)."""
    return Trace([Event(rank, "collective", op, group=(rank % 2, rank % 2 + 2), num_bytes=num_bytes)
                  for op, num_bytes in calls for rank in range(4)], 4, "logical", "recorded")


@pytest.mark.parametrize("calls", [[("all_reduce", 40)], [("reduce_scatter", 40), ("all_gather", 40)]])
def test_one_buffer_of_each_host_may_cross(calls):
    assert multi_host.crossing_bytes(traced(*calls), 2, 80) == 160


@pytest.mark.parametrize("calls, reason", [
    ([("all_gather", 80)], "an all-gather across hosts sends every buffer to every host"),
    ([("reduce_scatter", 80), ("all_gather", 80)], "2 whole buffers"),
    ([("all_reduce", 40), ("all_reduce", 40), ("all_reduce", 20)], "2 whole buffers"),
    ([("all_reduce", 40), ("all_reduce", 20)], "what is sent twice")])
def test_more_than_one_buffer_is_refused(calls, reason):
    with pytest.raises(CheckFailed, match=reason):
        multi_host.crossing_bytes(traced(*calls), 2, 80)


def test_sums_that_are_not_handed_out_are_told_from_other_wrong_ones():
    before = np.arange(1.0, 17).reshape(4, 4) ** 2
    total, own = before.sum(axis=0), np.array([[1, 1, 0, 0], [0, 0, 1, 1]] * 2, dtype=bool)
    multi_host.handed_out(before, [total] * 4, 2)
    multi_host.handed_out(before, before, 2)  # another check refuses these
    with pytest.raises(CheckFailed, match="an all-gather inside brings the other shares"):
        multi_host.handed_out(before, np.where(own, total, before), 2)
    with pytest.raises(CheckFailed, match="the MAX of the hosts' sums, not their sum"):
        multi_host.handed_out(before, [before.reshape(2, 2, 4).sum(axis=1).max(axis=0)] * 4, 2)


def test_ranks_that_are_dealt_out_in_turn_are_told_from_a_wrong_sum():
    def variables(rank_of):
        return lambda host, local: {
            "RANK": str(rank_of(host, local)), "LOCAL_RANK": str(local), "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4",
            "GROUP_RANK": str(host), "MASTER_ADDR": "a", "MASTER_PORT": "1"}

    assert len(multi_host.environments(variables(lambda host, local: 4 * host + local), ["a", "b"], 4, 1)) == 8
    for rank_of, reason in ((lambda host, local: 2 * local + host, "you deal ranks out to the hosts in turn"),
                            (lambda host, local: host + local, r"'4': the ranks of this host start at 1 \* 4")):
        with pytest.raises(CheckFailed, match=reason):
            multi_host.environments(variables(rank_of), ["a", "b"], 4, 1)
