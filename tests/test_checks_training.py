"""Checks on data parallelism, with inputs that the lab's answers don't reach: no wrong reduction passes."""
import threading
from contextlib import nullcontext

import numpy as np
import pytest
import torch

from book.checks import data_parallel, global_batch, gradient_buckets, recordings, thread_replicas
from book.checks.verdict import CheckFailed
from book.trace import Event, Trace

RNG = np.random.default_rng(0)
OWN = [{"weight": RNG.normal(size=(3, 4)), "bias": RNG.normal(size=3)} for _ in range(4)]


def mixed(weights):
    """What ranks hold if rank r takes `weights[r]` times the ranks' gradients; weights (4, 4)."""
    return [{name: np.tensordot(row, [own[name] for own in OWN], axes=1) for name in OWN[0]} for row in weights]


MEAN = np.full((4, 4), 0.25)


@pytest.mark.parametrize("convert", [lambda g: g, torch.tensor, lambda g: torch.tensor(g, requires_grad=True)])
def test_the_mean_passes_in_any_form_and_order_of_additions(convert):
    after = [{name: convert(g) for name, g in gradients.items()} for gradients in mixed(MEAN)]
    expected = sum(np.abs(g).sum() for g in mixed(MEAN)[0].values())
    assert data_parallel.averaged(OWN, after) == pytest.approx(expected)
    assert data_parallel.averaged(OWN, mixed(MEAN + 1e-14)) == pytest.approx(expected)


@pytest.mark.parametrize("seed", range(40))
def test_no_other_weights_pass(seed):
    """One weight of one rank off by as little as a millionth of it, or all of them drawn at random."""
    rng = np.random.default_rng(seed)
    weights = MEAN.copy()
    if seed % 2:
        weights[tuple(rng.integers(4, size=2))] *= 1 + 10.0 ** -rng.integers(1, 7)
    else:
        weights = rng.normal(size=(4, 4))
    with pytest.raises(CheckFailed):
        data_parallel.averaged(OWN, mixed(weights))


@pytest.mark.parametrize("weights, complaint", [
    (4 * MEAN, "your ranks hold the sum"),
    (MEAN / 4, "divided by the number of ranks once too often"),
    (MEAN * 3, "this is 3 times the mean"),
    (MEAN / 7, "the mean divided by 7"),
    (0 * MEAN, "this is 0: was the gradient cleared"),
    (np.eye(4), "every rank still has its own gradients"),
    (np.eye(4) / 4, "0.25 times the rank's own gradient, and the other ranks have no part in it"),
    (np.eye(4) + MEAN, "the mean is added to the rank's own gradient"),
    (MEAN * [1, 1, 0, 1], "it contains nothing from rank 2"),
    (MEAN * [1, 1, 0, 0], "it contains nothing from rank 2, 3"),
    (MEAN * [1, 2, 1, 1], "have the weights 0.25, 0.5, 0.25, 0.25, but each must have 0.25"),
    (np.where(np.arange(4)[:, None] == 0, MEAN, np.eye(4)), "only rank 0 holds the mean"),
])
def test_linear_mistakes_are_named(weights, complaint):
    with pytest.raises(CheckFailed, match=complaint):
        data_parallel.averaged(OWN, mixed(weights))


def test_another_world_size_and_a_hint_of_the_lab_are_reported():
    with pytest.raises(CheckFailed, match="there are 4 ranks, but 3 results"):
        data_parallel.averaged(OWN, OWN[:3])
    with pytest.raises(CheckFailed, match="rank 0, weight: divide by five"):
        data_parallel.averaged(OWN, mixed(MEAN * 5), hints={5: "divide by five"})


def test_a_gradient_of_another_length_or_unknown_origin_is_not_taken_for_the_mean():
    for wrong in (np.ones(5), RNG.normal(size=(3, 4))):
        after = mixed(MEAN)
        after[2]["weight"] = wrong
        with pytest.raises(CheckFailed, match="can't be made from the ranks' gradients"):
            data_parallel.averaged(OWN, after)


def test_none_counts_as_zeros_and_is_expected_where_no_rank_has_a_gradient():
    before = [{"used": np.arange(4.0), "unused": None}, {"used": None, "unused": None}]
    half = np.arange(4.0) / 2
    assert data_parallel.averaged(before, [{"used": half, "unused": None}] * 2) == 3
    with pytest.raises(CheckFailed, match="rank 1 has no gradient for used"):
        data_parallel.averaged(before, [{"used": half, "unused": None}, {"used": None, "unused": None}])
    with pytest.raises(CheckFailed, match="no rank has a gradient for used any more: is p.grad set to what"):
        data_parallel.averaged(before, [{"used": None, "unused": None}] * 2)
    with pytest.raises(CheckFailed, match="the mean over the 1 ranks that have a gradient"):
        data_parallel.averaged(before, [{"used": 2 * half, "unused": None}] * 2)
    with pytest.raises(CheckFailed, match="rank 0 now has a gradient for unused, which is frozen"):
        data_parallel.averaged(before, [{"used": half, "unused": 0 * half}] * 2, frozen=["unused"])
    with pytest.raises(ValueError, match="there is nothing to average"):
        data_parallel.averaged([{"unused": None}], [{"unused": None}])


SINGLE = [[{"weight": RNG.normal(size=(4, 5))} for _ in range(3)] for _ in range(2)]  # 2 ranks, 3 micro-batches
ONE = Trace([Event(r, "collective", op="all_reduce", start_s=0.0, end_s=1.0) for r in (0, 1)], 2, "measured",
            "recorded")


def summed(weights):
    """`weights` (2, 2, 3): for each rank the weights of all ranks' micro-batches."""
    return [{"weight": np.tensordot(w, [[g["weight"] for g in own] for own in SINGLE], axes=2)} for w in weights]


@pytest.mark.parametrize("weights, complaint", [
    (np.full((2, 2, 3), 1 / 2), "divide by the number of micro-batches"),
    (np.eye(2)[:, :, None] * np.ones(3) / 3, "the other ranks have no part in the gradients"),
    (np.maximum(np.eye(2)[:, :, None], [0, 0, 1]) / 6, "the other ranks' micro-batches 0, 1 have no part in it"),
    (np.full((2, 2, 3), 1 / 6) * [0, 0, 1], "only each rank's last micro-batch is in it"),
    (np.full((2, 2, 3), 1 / 2) * [0, 0, 1], "only the last micro-batch is in it: are gradients cleared"),
    (np.full((2, 2, 3), 1 / 6) * [1, 1, 3], "the last micro-batch weighs 3 times as much as the others"),
    (np.full((2, 2, 3), 1 / 6) * [1, 2, 1], "weigh between 0.166667 and 0.333333, but each should weigh 0.166667"),
])
def test_wrong_accumulations_are_named(weights, complaint):
    assert data_parallel.accumulated(SINGLE, summed(np.full((2, 2, 3), 1 / 6)), ONE) > 0
    with pytest.raises(CheckFailed, match=complaint):
        data_parallel.accumulated(SINGLE, summed(weights), ONE)


def test_an_accumulation_that_is_not_a_sum_of_micro_batches_is_refused():
    with pytest.raises(CheckFailed, match="this is not a sum of the micro-batches' gradients"):
        data_parallel.accumulated(SINGLE, [{"weight": np.ones((4, 5))}] * 2, ONE)


def meet(num_replicas, shares):
    """Forwards in threads of their own, all at once, each with weights of its own."""
    meeting = thread_replicas.Meeting(num_replicas, patience_s=0.2)
    threads = [threading.Thread(target=meeting.arrive, args=(i, i, share)) for i, share in enumerate(shares)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return meeting


@pytest.mark.parametrize("num_replicas, shares, complaint", [
    (2, [[0, 1, 2, 3]], "1 forwards ran for 2 replicas"),
    (2, [], "no forward ran"),
    (2, [[0, 1], [1, 2, 3]], "example 1 went to several replicas"),
    (2, [[0], [3]], "example 1, 2 of 0 to 3 went to no replica"),
])
def test_shares_that_are_not_a_partition_are_reported(num_replicas, shares, complaint):
    with pytest.raises(CheckFailed, match=complaint):
        meet(num_replicas, shares).check(4)


@pytest.mark.parametrize("weights, complaint", [
    ([1] * 4, "the gradient is 4 times that of the whole batch's mean loss"),
    ([0] * 4, "the module's gradients are zero"),
    ([np.nan] * 4, "the module holds nan in its gradients"),
    ([0.3, 0.2, 0.25, 0.25], "the examples have different weights"),
])
def test_a_gradient_with_other_weights_is_reported(weights, complaint):
    single = {"weight": RNG.normal(size=(4, 6))}
    losses, meeting = np.arange(4.0), meet(2, [[0, 1], [2, 3]])
    mean = {"weight": single["weight"].mean(axis=0)}
    assert thread_replicas.replica_gradients(meeting, 1.5, losses, mean, single) > 0
    with pytest.raises(CheckFailed, match=complaint):
        thread_replicas.replica_gradients(meeting, 1.5, losses, {"weight": weights @ single["weight"]}, single)
    with pytest.raises(CheckFailed, match="the loss that you return is 6"):
        thread_replicas.replica_gradients(meeting, 6.0, losses, {"weight": single["weight"].mean(axis=0)}, single)


SIZES = {"a": 100, "b": 10, "c": 100, "d": 10}


@pytest.mark.parametrize("buckets, complaint", [
    ([["d", "c"], ["b"], ["a"]], "bucket 1 was closed at 10 bytes"),
    ([["d", "c", "b"], ["a"]], "bucket 0 has 120 bytes, more than 110: close it before"),
    ([["d", "c"], ["b", "a"], []], "bucket 2 is empty"),
    ([["d", "c"], ["a", "b"]], "don't hold the parameters in reverse order"),
    ([["d", "c"], ["b", "a", "a"]], "a is in your buckets more than once"),
    ([["a", "b"], ["c", "d"]], "from the first parameter to the last"),
])
def test_wrong_buckets_are_named(buckets, complaint):
    assert gradient_buckets.bucket_layout([["d", "c"], ["b", "a"]], SIZES, 110) == 2
    assert gradient_buckets.bucket_layout([["d"], ["c"], ["b"], ["a"]], SIZES, 5) == 4
    with pytest.raises(CheckFailed, match=complaint):
        gradient_buckets.bucket_layout(buckets, SIZES, 110)


def backward(sent, num_gradients=4, num_bytes=8):
    """A followed backward on two ranks: gradients at 1, 2, 3, ... s, all-reduces of `num_bytes` at the times `sent`."""
    ready = [Event(r, "compute", op=str(i), num_bytes=4, start_s=i, end_s=i + 1.0)
             for r in (0, 1) for i in range(num_gradients)]
    issued = [Event(r, "collective", op="all_reduce", num_bytes=num_bytes, start_s=s, end_s=9.0)
              for r in (0, 1) for s in sent]
    return Trace(ready + issued, 2, "measured", "recorded")


@pytest.mark.parametrize("sent, complaint", [
    ([], "no all-reduce was issued after the first gradient"),
    ([4.1, 4.2], "issued all its all-reduces after the last gradient"),
    ([2.1], "8 bytes are all-reduced, but torch's DDP sends 16"),
    ([1.1, 2.1, 3.1, 4.1], "one all-reduce for each of 4 gradients"),
])
def test_wrong_traffic_is_named(sent, complaint):
    assert gradient_buckets.bucket_traffic(backward([2.1, 4.1]), backward([2.2, 4.2]), 2) == (2, 16)
    with pytest.raises(CheckFailed, match=complaint):
        gradient_buckets.bucket_traffic(backward(sent, num_bytes=4 if len(sent) == 4 else 8), backward([2.1, 4.1]), 2)


def test_a_message_count_that_differs_from_the_buckets_is_reported():
    with pytest.raises(CheckFailed, match="2 all-reduces for 1 buckets: there should be one"):
        gradient_buckets.bucket_traffic(backward([2.1, 4.1]), backward([2.1, 4.1]), 1)


WINDOWS = RNG.normal(size=(6, 50))


@pytest.mark.parametrize("weights, complaint", [
    (np.full(6, 1 / 3), "2 ranks is not that of one process: it is 2 times as long. The global batch is the same"),
    (np.full(6, 1 / 2), "it is 3 times as long"),
    (np.array([1, 1, 1, 1, 1, 0]) / 6, "window 5 of the batch's 6 has no part"),
    (np.array([2, 2, 1, 1, 1, 1]) / 8, "the windows weigh between 0.125 and 0.25, but each should weigh 0.166667"),
])
def test_wrong_steps_are_named(weights, complaint):
    assert global_batch.first_step([WINDOWS.mean(axis=0)] * 2, WINDOWS) > 0
    with pytest.raises(CheckFailed, match=complaint):
        global_batch.first_step([weights @ WINDOWS] * 2, WINDOWS)
    with pytest.raises(CheckFailed, match="ranks 0 and 1 make different first steps"):
        global_batch.first_step([WINDOWS.mean(axis=0), weights @ WINDOWS], WINDOWS)


def test_a_step_with_weight_decay_or_clipped_gradients_is_named():
    mean, start = WINDOWS.mean(axis=0), RNG.normal(size=50)
    length = np.linalg.norm(mean)
    for step, complaint in ((mean + 1e-6 * start, "1e-06 times the weights are added to the gradients"),
                            (mean + 0.1 * start, "0.1 times the weights are added"),
                            (mean * 0.25 / (length + 1e-6), "its length is 0.25: do you clip gradients"),
                            (mean * 0.123456 / length, "do you divide something twice, or multiply it"),
                            (mean + 1e-7 * start**2, "right to only six digits"),
                            (mean + 0.1 * start**2, "it is not a sum of the gradients")):
        with pytest.raises(CheckFailed, match=complaint):
            global_batch.first_step([step] * 2, WINDOWS, start=start)


def test_more_windows_than_the_batch_has_are_explained_by_the_number_of_ranks():
    mean = WINDOWS.mean(axis=0)
    with pytest.raises(CheckFailed, match="12 windows went through the model on 1 rank, but the batch has 6"):
        global_batch.first_step([mean], WINDOWS, [[6, 6]])
    with pytest.raises(CheckFailed, match="2 ranks put 12 windows through the model, but the batch has 6"):
        global_batch.first_step([mean] * 2, WINDOWS, [[6], [6]])


def test_losses_of_a_known_slip_are_named():
    expected, slips = [3.0, 2.5, 2.0], {"momentum 0.8": [3.0, 2.5, 1.9], "after": [2.5, 2.0, 1.5]}
    for losses, complaint in (([3.0, 2.5, 1.9], "a momentum of 0.8"), ([2.5, 2.0, 1.5], "after the step"),
                              ([3.0, 2.5, 1.8], "the first step is right but the second is not")):
        with pytest.raises(CheckFailed, match=complaint):
            global_batch.global_losses([losses] * 2, np.ones(3), expected, slips)


def test_zeros_that_two_gradients_share_are_named():
    rows = RNG.normal(size=(2, 3))
    before = [{"a": rows[0], "b": rows[1]}, {"a": None, "b": None}]
    first = rows[0] / 2
    second = (rows[1] + first) / 2
    after = [{"a": first, "b": second}, {"a": second, "b": second}]
    with pytest.raises(CheckFailed, match="rank 1 had no gradient for a and b, and now holds the same numbers"):
        data_parallel.averaged(before, after)
    assert data_parallel.averaged(before, [{"a": rows[0] / 2, "b": rows[1] / 2}] * 2) > 0


def test_buckets_that_wait_for_finish_are_reported():
    def recorded(early):
        starts = [0.5] * early + [2.0] * (2 - early)
        events = [Event(r, "collective", op="all_reduce", num_bytes=8, start_s=s, end_s=3.0) for r in (0, 1)
                  for s in starts]
        barriers = [Event(r, "collective", op="barrier", start_s=1.0, end_s=1.0) for r in (0, 1)]
        return Trace(events + barriers, 2, "measured", "recorded")

    assert gradient_buckets.started_in_backward(recorded(2), 2) == 2
    with pytest.raises(CheckFailed, match="rank 0 .* had started only 1 of 2 buckets"):
        gradient_buckets.started_in_backward(recorded(1), 2)


def test_a_bucket_that_ranks_lay_out_differently_is_reported():
    before = [{"a": np.array([1.0, 2.0]), "b": np.array([5.0, 9.0])}, {"a": np.array([4.0, 3.0]), "b": np.ones(2)}]
    gradient_buckets.laid_alike(before, [{name: (before[0][name] + before[1][name]) / 2 for name in "ab"}] * 2)
    mixed = {name: (before[0][name] + before[1][other]) / 2 for name, other in ("ab", "ba")}
    with pytest.raises(CheckFailed, match="rank 0's gradient of a, rank 1's of b, .* in different orders"):
        gradient_buckets.laid_alike(before, [mixed] * 2)


@pytest.mark.parametrize("shares, complaint", [([[6, 7], [6, 7]], "2 threads computed the same share, examples 6, 7"),
                                               ([[4, 5], [6, 7]], "division by zero")])
def test_threads_that_share_a_number_are_reported_when_the_step_fails(shares, complaint):
    meeting = thread_replicas.Meeting(2, patience_s=0.01)
    with pytest.raises((CheckFailed, ZeroDivisionError), match=complaint):
        with meeting.in_words():
            for number, share in enumerate(shares):
                meeting.arrive(number, number, share)
            1 / 0


def test_copies_that_autograd_does_not_follow_are_reported():
    with pytest.raises(CheckFailed, match="cut off from the module"), thread_replicas.Meeting(2).in_words():
        torch.zeros(()).backward()


def test_losses_of_the_wrong_kind_are_reported():
    windows, expected = np.array([1.0, 2.0, 6.0]), [3.0, 2.5]
    assert global_batch.global_losses([expected] * 2, windows, expected) == 2.5
    for losses, complaint in (
            ([[3.75, 2.5]] * 2, "mean of the ranks' means"), ([[6.0, 2.5]] * 2, "summed over the ranks"),
            ([[2.0, 2.5]] * 2, "the mean over all windows"), ([expected, None], "rank 1 reports 0 losses"),
            ([[3.0, 2.6]] * 2, "the loss of step 1 is 2.6"), ([[3.0, 2.5 + 1e-7]] * 2, "right to only six digits"),
            ([expected, [3.0, 2.4]], "report different")):
        with pytest.raises(CheckFailed, match=complaint):
            global_batch.global_losses(losses, windows, expected)


def test_swapped_tensors_are_reported():
    before = [{"0.weight": np.full(3, rank), "1.mean": np.full(3, 10 + rank)} for rank in range(2)]
    assert data_parallel.same_state(before, [before[0]] * 2, ["0.weight"]) == 30
    crossed = {"0.weight": before[0]["1.mean"], "1.mean": before[0]["0.weight"]}
    with pytest.raises(CheckFailed, match="do all ranks send their tensors in the same order"):
        data_parallel.same_state(before, [before[0], crossed], ["0.weight"])


def test_states_sent_in_float32_or_without_some_buffers_are_reported():
    before = [{"weight": RNG.normal(size=3), "mean": RNG.normal(size=2), "phase": np.full(2, rank)}
              for rank in range(2)]
    rounded = {name: array.astype(np.float32) for name, array in before[0].items()}
    for after, complaint in (([rounded] * 2, "rank 0's weight has changed from the seventh digit on"),
                             ([before[0], rounded], "rank 1's weight is rank 0's only to six digits"),
                             ([before[0], before[0] | {"phase": before[1]["phase"]}], "phase is still each rank's own"),
                             ([before[0], before[1] | {"weight": before[0]["weight"]}], "the buffers are still each")):
        with pytest.raises(CheckFailed, match=complaint):
            data_parallel.same_state(before, after, ["weight"], unsaved=["phase"])


def test_missing_examples_of_one_epoch_are_reported():
    assert data_parallel.epochs([[[2, 1], [0, 3]], [[3, 0], [2, 1]]], 4, 2) == [2, 0]
    with pytest.raises(CheckFailed, match="in epoch 1 example 3 of 0 to 3 is left out on every rank"):
        data_parallel.epochs([[[2, 1], [0]], [[3, 0], [2, 1]]], 4, 2)


def test_ranks_that_shuffle_only_their_own_examples_are_reported():
    first, second, third = [[2, 1], [0, 3]], [[1, 2], [3, 0]], [[2, 1], [3, 0]]
    orders = [list(own) for own in zip(first, second, third)]
    with pytest.raises(CheckFailed, match="each rank has the same examples in every epoch, only in another order"):
        data_parallel.epochs(orders, 4, 3)
    orders[0][2], orders[1][2] = [3, 1], [2, 0]
    data_parallel.epochs(orders, 4, 3)


@pytest.mark.parametrize("orders, complaint", [
    ([[], []], "rank 0 returned 0 epochs instead of 1"),
    ([[[2, 1]], []], "rank 1 returned 0 epochs"),
    ([None, [[2, 1]]], "rank 0 returned 0 epochs"),
    ([[[2, 1], [0, 3]], [[3, 0]]], "rank 0 returned 2 epochs"),
    ([[[]], [[3, 0, 2, 1]]], "rank 0 gets no example in epoch 0"),
    ([[[2, 1]], [[3, 4]]], "rank 1 gets example 4 in epoch 0, but there are only 0 to 3"),
    ([[[2, -1]], [[3, 0]]], "rank 0 gets example -1"),
    ([[[2, 1, 0, 3]], [[3, 0, 2, 1]]], "each rank takes all 4 examples"),
    ([[[2, 1]], [[2, 0]]], "example 2 comes 2 times and 1 of 4 don't come at all"),
])
def test_incomplete_epochs_are_reported(orders, complaint):
    with pytest.raises(CheckFailed, match=complaint):
        data_parallel.epochs(orders, 4, 1)


ODD = [float("nan"), float("inf")]


@pytest.mark.parametrize("odd", ODD)
def test_nan_and_infinity_are_reported_anywhere(odd):
    """Comparisons with nan are false, so a check that asks "too far apart?" would pass it."""
    good, bad = np.array([1.0, 3.0]), np.array([1.0, odd])
    for rank in range(2):
        hold = [bad if r == rank else good for r in range(2)]
        told = pytest.raises(CheckFailed, match=f"rank {rank} holds {odd} in ")
        with told:
            data_parallel.trained_alike([good] * 2, hold, good)
        with told:
            global_batch.global_losses(hold, good, good)
        with told:
            global_batch.first_step(hold, WINDOWS[:, :2])
        for before, after in ((hold, [good] * 2), ([good] * 2, hold)):
            with told:
                data_parallel.averaged([{"w": g} for g in before], [{"w": g} for g in after])
            with told:
                data_parallel.accumulated([[{"w": g}] for g in before], [{"w": g} for g in after], ONE)


def test_a_wrong_number_of_weights_is_reported():
    three, two = np.ones(3), np.ones(2)
    with pytest.raises(CheckFailed, match="rank 1 ends with 2 weights, one process with 3"):
        data_parallel.trained_alike([three] * 2, [three, two], three)


@pytest.mark.parametrize("ends_s, wrong", [
    ([1.0, 2.0, 3.0], None),
    ([None, 2.0, None], "rank 1 never waited for 2 of its 3 receives, the first being number 0, counted from 0"),
    ([2.0, None, 3.0], "rank 1 never waited for 1 of its 3 receives, the first being number 1"),
    ([None], "rank 1 never waited for its receive"),
    ([], None)])
def test_a_receive_that_nobody_waited_for_is_reported(ends_s, wrong):
    events = [Event(1, "recv", peer=0, num_bytes=8, start_s=0.0, end_s=end_s, step=step)
              for step, end_s in enumerate(ends_s)]
    unfinished = Event(0, "send", peer=1, num_bytes=8, start_s=0.0, step=0)  # a send may be left to itself
    with pytest.raises(CheckFailed, match=wrong) if wrong else nullcontext():
        recordings.awaited(Trace([unfinished, *events], 2, "measured", "recorded"))
