"""Checks on accumulation, on the rows that ranks take, on uneven batches: each mistake gets its sentence."""
import numpy as np
import pytest

from book.checks import frameworks
from book.launch import HangError, RankError
from book.checks.verdict import CheckFailed
from book.trace import Event, Trace

ROWS = np.random.default_rng(0).standard_normal((3, 2, 20))  # 3 ranks, 2 passes


@pytest.mark.parametrize("weights, reason", [
    (np.full((3, 2), 1 / 3), "2 times what it should be: backward adds up"),
    (np.full((3, 2), 1 / 12), "divided by passes twice"),
    (np.full((3, 2), 1 / 18), "divided by 3 once too often: DDP already takes the mean"),
    (np.array([[0, 0], [1, 1], [0, 0]]) / 2, "rank 1 steps with only its own gradients"),
    (np.array([[0, 1]] * 3) / 6, "zero_grad clears"),
    (np.array([[1, 0]] * 3) / 6, "pass 1 of the window, counted from 0"),
    (np.array([[2, 1]] * 3) / 6, "weigh .* but each should weigh 0.16"),
    (np.zeros((3, 2)), "the gradient is 0")])
def test_a_window_s_wrong_gradient_is_explained(weights, reason):
    with pytest.raises(CheckFailed, match=f"step 4: .*{reason}"):
        frameworks.window_gradient(4, 1, np.einsum("rp,rpn->n", weights, ROWS), ROWS, 2, 2)


def test_a_window_s_mean_passes():
    frameworks.window_gradient(1, 0, ROWS.mean(axis=(0, 1)), ROWS, 2, 2)


@pytest.mark.parametrize("divisor, other, reason", [(3, 2, "divide every loss by passes"),
                                                    (2, 3, "divide each window by the number of passes that it has")])
def test_a_short_window_has_a_divisor_of_its_own(divisor, other, reason):
    summed = ROWS.mean(axis=0).sum(axis=0)
    frameworks.window_gradient(1, 0, summed / divisor, ROWS, 3, divisor)
    with pytest.raises(CheckFailed, match=reason):
        frameworks.window_gradient(1, 0, summed / other, ROWS, 3, divisor)


@pytest.mark.parametrize("steps, reason", [([3, 7], "rank 1: the optimizer steps after every pass"),
                                           ([2, 3], "rank 0: .* the last, short window"),
                                           ([3, 4], "it should step 3 times")])
def test_a_wrong_number_of_steps_is_explained(steps, reason):
    frameworks.num_window_steps([3, 3], 7, 3)
    with pytest.raises(CheckFailed, match=reason):
        frameworks.num_window_steps(steps, 7, 3)


def test_an_all_reduce_in_each_pass_is_refused():
    def trace(times):
        events = [Event(rank=rank, kind="collective", op="all_reduce", num_bytes=80, group=(0, 1))
                  for _ in range(times) for rank in range(2)]
        return Trace(events, 2, "logical", "recorded")

    assert frameworks.synchronised_once(trace(2), 80, 2, 6) == 2
    with pytest.raises(CheckFailed, match="rank 0 all-reduces its gradient 6 times in 6 passes and 2 steps"):
        frameworks.synchronised_once(trace(6), 80, 2, 6)


ORDER = {0: [3, 1, 4, 0, 2], 1: [0, 4, 2, 1, 3]}


def dealt(first_order, second_order):
    return {epoch: [[order[:4][rank::2], order[4:][rank::2]] for rank in range(2)]
            for epoch, order in enumerate((first_order, second_order))}


def test_shared_global_batches_pass():
    assert frameworks.global_batches(dealt(ORDER[0], ORDER[1]), 5, 4, ORDER) == (8 + 2 * 2) + (7 + 2 * 3)


@pytest.mark.parametrize("epochs, reason", [
    (dealt(ORDER[0], ORDER[0]), "epoch 1 has the same order as epoch 0"),
    (dealt(list(range(5)), ORDER[1]), "step 1: the rows come in their original order"),
    (dealt([3, 1, 4, 2, 0], ORDER[1]), "on 2 ranks the global batch has different rows"),
    (dealt([3, 1, 4, 0, 3], ORDER[1]), "the same seed"),
    ({0: [[[3, 4], [2]], [[1, 0], [2]]]}, "repeats rows"),
    ({0: [[[3, 4]], [[1, 0]]]}, "you dropped the last, short one"),
    ({0: [[[3, 1, 4, 0]], [[2]]]}, "each rank takes global_batch rows"),
    ({0: [[[3, 4], []], [[1, 0], []]]}, "1 of 5 rows never come, for example row 2"),
    ({0: [[[3, 4, 1], [0]]]}, "do the global batches cover the whole order"),
    ({0: [[[3, 1, 4], [2]], [[0], []]]}, "the ranks take 3, 1 rows"),
    ({0: [[[3, 1], [4, 2]], [[0], []]]}, "together the ranks take 3 rows, but they should take 4"),
    ({0: [None, [[1, 0], []]]}, "rank 0 returned None")])
def test_wrong_batches_are_explained(epochs, reason):
    with pytest.raises(CheckFailed, match=reason):
        frameworks.global_batches(epochs, 5, 4, ORDER)


def test_one_rank_s_other_order_is_explained():
    with pytest.raises(CheckFailed, match="seed the generator with seed"):
        frameworks.global_batches({0: [[[0, 4, 2, 1], [3]]]}, 5, 4, ORDER)


def test_weights_must_not_depend_on_the_number_of_ranks():
    assert frameworks.same_weights_on({1: np.array([1.0, -2.0]), 2: np.array([1.0, -2.0])}) == 3
    with pytest.raises(CheckFailed, match="4 ranks end with different weights than 1"):
        frameworks.same_weights_on({1: np.ones(2), 4: np.array([1.0, 1.001])})


EVERY_ROW, SIZES = ROWS.reshape(6, 20), (3, 2, 1)


@pytest.mark.parametrize("weights, reason", [
    (np.array([1 / 9] * 3 + [1 / 6] * 2 + [1 / 3]), "each rank's mean weighs the same"),
    (np.full(6, 1 / 18), "divided by the number of ranks once too often"),
    (np.full(6, 1 / 3), "not divided by the size of the global batch"),
    (np.ones(6), "the sum over the rows of the global batch"),
    (np.array([1, 1, 0, 1, 1, 1]) / 6, "counted from 0, have no part in the gradient: 2"),
    (np.full(6, 0.05), "0.3 times what it should be"),
    (np.array([2, 1, 1, 1, 1, 1]) / 6, "but each should weigh 0.16"),
    (np.zeros(6), "the gradient is 0")])
def test_wrong_weights_of_rows_are_explained(weights, reason):
    frameworks.uneven_gradient(1, np.split(EVERY_ROW.mean(axis=0), [5]), EVERY_ROW, SIZES)
    with pytest.raises(CheckFailed, match=f"rank 1: .*{reason}"):
        frameworks.uneven_gradient(1, [weights @ EVERY_ROW], EVERY_ROW, SIZES)


def test_a_rank_without_a_gradient_is_told_to_run_a_backward():
    with pytest.raises(CheckFailed, match="rank 2 has no gradient: every rank must run a backward"):
        frameworks.uneven_gradient(2, [None], EVERY_ROW, SIZES)


def test_a_wait_for_a_rank_without_rows_is_explained():
    hang = HangError("nothing has moved")
    assert frameworks.uneven_failure(hang, (2, 0)).startswith("rank 1 has no rows, and the others wait")
    assert frameworks.uneven_failure(hang, (2, 1)).startswith("some ranks run more backwards than")
    assert frameworks.uneven_failure(RankError("division by zero"), (2, 1)) == "division by zero"
