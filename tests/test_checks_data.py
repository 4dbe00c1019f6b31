"""Checks on data parallelism: what passes, to the last digit, and the sentences that no kept answer reaches."""
import threading
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
import torch

from book.checks import (data_parallel, frameworks, global_batch, gradient_buckets, multi_host, recovery,
                         sharded_state, sharded_steps, thread_replicas)
from book.checks.verdict import CheckFailed
from book.launch import HangError, RankError
from book.cost import StateBytes, sharded_sent_bytes, state_bytes
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
    (0 * MEAN, "this is 0: was the gradient cleared"),
    (MEAN * [1, 1, 0, 1], "it contains nothing from rank 2"),
    (MEAN * [1, 1, 0, 0], "it contains nothing from rank 2, 3"),
    (MEAN * [1, 2, 1, 1], "have the weights 0.25, 0.5, 0.25, 0.25, but each must have 0.25"),
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
    (np.full((2, 2, 3), 1 / 2) * [0, 0, 1], "only the last micro-batch is in it: are gradients cleared"),
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
    (2, [], "no forward ran"),
    (2, [[0, 1], [1, 2, 3]], "example 1 went to several replicas"),
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


BUCKET_SIZES = {"a": 100, "b": 10, "c": 100, "d": 10}


@pytest.mark.parametrize("buckets, complaint", [
    ([["d", "c"], ["b", "a"], []], "bucket 2 is empty"),
    ([["d", "c"], ["a", "b"]], "don't hold the parameters in reverse order"),
    ([["d", "c"], ["b", "a", "a"]], "a is in your buckets more than once"),
])
def test_wrong_buckets_are_named(buckets, complaint):
    assert gradient_buckets.bucket_layout([["d", "c"], ["b", "a"]], BUCKET_SIZES, 110) == 2
    assert gradient_buckets.bucket_layout([["d"], ["c"], ["b"], ["a"]], BUCKET_SIZES, 5) == 4
    with pytest.raises(CheckFailed, match=complaint):
        gradient_buckets.bucket_layout(buckets, BUCKET_SIZES, 110)


def backward(sent):
    """A followed backward on two ranks: gradients at 1, 2, 3 and 4 s, all-reduces at the times `sent`."""
    ready = [Event(r, "compute", op=str(i), num_bytes=4, start_s=i, end_s=i + 1.0) for r in (0, 1) for i in range(4)]
    issued = [Event(r, "collective", op="all_reduce", num_bytes=8, start_s=s, end_s=9.0)
              for r in (0, 1) for s in sent]
    return Trace(ready + issued, 2, "measured", "recorded")


def test_wrong_traffic_is_named():
    assert gradient_buckets.bucket_traffic(backward([2.1, 4.1]), backward([2.2, 4.2]), 2) == (2, 16)
    with pytest.raises(CheckFailed, match="no all-reduce was issued after the first gradient"):
        gradient_buckets.bucket_traffic(backward([]), backward([2.1, 4.1]), 2)
    with pytest.raises(CheckFailed, match="2 all-reduces for 1 buckets: there should be one"):
        gradient_buckets.bucket_traffic(backward([2.1, 4.1]), backward([2.1, 4.1]), 1)


WINDOWS = RNG.normal(size=(6, 50))


def test_losses_of_the_wrong_kind_are_reported():
    windows, expected = np.array([1.0, 2.0, 6.0]), [3.0, 2.5]
    assert global_batch.global_losses([expected] * 2, windows, expected) == 2.5
    for losses, complaint in (
            ([[3.75, 2.5]] * 2, "mean of the ranks' means"), ([[2.0, 2.5]] * 2, "the mean over all windows")):
        with pytest.raises(CheckFailed, match=complaint):
            global_batch.global_losses(losses, windows, expected)


def test_swapped_tensors_are_reported():
    before = [{"0.weight": np.full(3, rank), "1.mean": np.full(3, 10 + rank)} for rank in range(2)]
    assert data_parallel.same_state(before, [before[0]] * 2, ["0.weight"]) == 30
    crossed = {"0.weight": before[0]["1.mean"], "1.mean": before[0]["0.weight"]}
    with pytest.raises(CheckFailed, match="do all ranks send their tensors in the same order"):
        data_parallel.same_state(before, [before[0], crossed], ["0.weight"])


def test_ranks_that_shuffle_only_their_own_examples_are_reported():
    first, second, third = [[2, 1], [0, 3]], [[1, 2], [3, 0]], [[2, 1], [3, 0]]
    orders = [list(own) for own in zip(first, second, third)]
    with pytest.raises(CheckFailed, match="each rank has the same examples in every epoch, only in another order"):
        data_parallel.epochs(orders, 4, 3)
    orders[0][2], orders[1][2] = [3, 1], [2, 0]
    data_parallel.epochs(orders, 4, 3)


@pytest.mark.parametrize("orders, complaint", [
    ([[[]], [[3, 0, 2, 1]]], "rank 0 gets no example in epoch 0"),
    ([[[2, 1]], [[3, 4]]], "rank 1 gets example 4 in epoch 0, but there are only 0 to 3"),
    ([[[2, -1]], [[3, 0]]], "rank 0 gets example -1"),
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


# Accumulation, rows, uneven batches

ROWS = np.random.default_rng(0).standard_normal((3, 2, 20))  # 3 ranks, 2 passes


def test_a_window_s_mean_passes():
    frameworks.window_gradient(1, 0, ROWS.mean(axis=(0, 1)), ROWS, 2, 2)


def test_a_short_window_has_a_divisor_of_its_own():
    summed = ROWS.mean(axis=0).sum(axis=0)
    for divisor in (2, 3):
        frameworks.window_gradient(1, 0, summed / divisor, ROWS, 3, divisor)
    with pytest.raises(CheckFailed, match="divide each window by the number of passes that it has"):
        frameworks.window_gradient(1, 0, summed / 3, ROWS, 3, 2)


ORDER = {0: [3, 1, 4, 0, 2], 1: [0, 4, 2, 1, 3]}


def dealt(first_order, second_order):
    return {epoch: [[order[:4][rank::2], order[4:][rank::2]] for rank in range(2)]
            for epoch, order in enumerate((first_order, second_order))}


def test_shared_global_batches_pass():
    assert frameworks.global_batches(dealt(ORDER[0], ORDER[1]), 5, 4, ORDER) == (8 + 2 * 2) + (7 + 2 * 3)


@pytest.mark.parametrize("epochs, reason", [
    ({0: [[[3, 4], []], [[1, 0], []]]}, "1 of 5 rows never come, for example row 2"),
    ({0: [[[3, 4, 1], [0]]]}, "do the global batches cover the whole order"),
    ({0: [[[3, 1], [4, 2]], [[0], []]]}, "together the ranks take 3 rows, but they should take 4"),
    ({0: [None, [[1, 0], []]]}, "rank 0 returned None")])
def test_wrong_batches_are_explained(epochs, reason):
    with pytest.raises(CheckFailed, match=reason):
        frameworks.global_batches(epochs, 5, 4, ORDER)


def test_weights_must_not_depend_on_the_number_of_ranks():
    assert frameworks.same_weights_on({1: np.array([1.0, -2.0]), 2: np.array([1.0, -2.0])}) == 3
    with pytest.raises(CheckFailed, match="4 ranks end with different weights than 1"):
        frameworks.same_weights_on({1: np.ones(2), 4: np.array([1.0, 1.001])})


EVERY_ROW, ROWS_OF_RANKS = ROWS.reshape(6, 20), (3, 2, 1)


def test_a_rank_without_a_gradient_is_told_to_run_a_backward():
    with pytest.raises(CheckFailed, match="rank 2 has no gradient: every rank must run a backward"):
        frameworks.uneven_gradient(2, [None], EVERY_ROW, ROWS_OF_RANKS)


def test_a_wait_for_a_rank_without_rows_is_explained():
    hang = HangError("nothing has moved")
    assert frameworks.uneven_failure(hang, (2, 0)).startswith("rank 1 has no rows, and the others wait")
    assert frameworks.uneven_failure(hang, (2, 1)).startswith("some ranks run more backwards than")
    assert frameworks.uneven_failure(RankError("division by zero"), (2, 1)) == "division by zero"


# Sharded state

UNITS = {"root": {"embedding": RNG.normal(size=(7, 3)), "norm": RNG.normal(size=2)},
         "block 0": {"weight": RNG.normal(size=(5, 4)), "bias": RNG.normal(size=3)}}
NAMES = {name: unit for unit, own in UNITS.items() for name in own}
START = {name: UNITS[unit][name] for name, unit in NAMES.items()}


@dataclass
class Whole:
    loss: float
    before: dict
    after: dict
    parts: list


@dataclass
class Step:
    loss: float
    updates: dict
    num_foreign: int = 0
    weights: dict = field(default_factory=dict)


def one_process(num_parts, num_steps=2):
    """Steps of plain SGD with a rate of 1 along the mean of random gradients."""
    weights, steps = START, []
    for k in range(num_steps):
        parts = [{name: RNG.normal(size=value.shape) for name, value in START.items()} for _ in range(num_parts)]
        after = {name: value - np.mean([part[name] for part in parts], axis=0) for name, value in weights.items()}
        steps.append(Whole(2.0 + k, weights, after, parts))
        weights = after
    return steps


def shards(named, unit, num_ranks):
    flat = np.concatenate([np.asarray(named[name]).ravel() for name in UNITS[unit]])
    return np.pad(flat, (0, -len(flat) % num_ranks)).reshape(num_ranks, -1)


def right(expected, num_ranks, gradient=None):
    """What ranks have that do everything right; `gradient(step, k, rank)` gives another gradient than the mean."""
    def own(k, rank):
        step = expected[k]
        named = gradient(step, k, rank) if gradient else mean(step)
        return Step(step.loss + (rank - (num_ranks - 1) / 2), {
            unit: (torch.tensor(shards(step.before, unit, num_ranks)[rank]), shards(named, unit, num_ranks)[rank])
            for unit in UNITS}, 0, step.after)
    return [[own(k, rank) for k in range(len(expected))] for rank in range(num_ranks)]


def mean(step):
    return {name: np.mean([part[name] for part in step.parts], axis=0) for name in START}


@pytest.mark.parametrize("num_ranks, num_backwards", [(1, 1), (2, 1), (4, 1), (3, 2)])
def test_the_training_of_one_process_passes(num_ranks, num_backwards):
    expected = one_process(num_ranks * num_backwards)
    total = sum(np.abs(value).sum() for value in expected[-1].after.values())
    assert sharded_steps.sharded_training(right(expected, num_ranks), expected, UNITS) == pytest.approx(total)


@pytest.mark.parametrize("seed", range(20))
def test_nothing_else_passes(seed):
    """One number of one gradient, of a weight, of a shard or a loss, off by as little as a millionth."""
    rng = np.random.default_rng(seed)
    expected = one_process(4)
    ranks = right(expected, 4)
    rank, k, unit = rng.integers(4), rng.integers(2), ["root", "block 0"][rng.integers(2)]
    step, off = ranks[rank][k], 10.0 ** -rng.integers(2, 7)
    if seed % 4 == 0:
        step.updates[unit][1][0] += off
    elif seed % 4 == 1:
        step.weights = {name: value + off for name, value in step.weights.items()}
    elif seed % 4 == 2:
        ranks[rank][0].updates[unit][0][0] += off
    else:
        step.loss += off * 40
    with pytest.raises(CheckFailed):
        sharded_steps.sharded_training(ranks, expected, UNITS)


@pytest.mark.parametrize("gradient, complaint", [
    (lambda step, k, rank: {n: (step.parts[0][n] + step.parts[1][n]) / 4 for n in START}, "of ranks 2, 3 have no part"),
    (lambda step, k, rank: {n: g * np.nan for n, g in START.items()}, "rank 0 holds nan in the gradient of root's sh"),
])
def test_wrong_gradients_are_named(gradient, complaint):
    expected = one_process(4)
    with pytest.raises(CheckFailed, match=complaint):
        sharded_steps.sharded_training(right(expected, 4, gradient), expected, UNITS)


def test_backward_passes_that_weigh_less_are_reported():
    expected, weights = one_process(4), (0.125, 0.25, 0.125, 0.25)
    found = right(expected, 2, lambda step, k, rank: {
        n: np.tensordot(weights, [part[n] for part in step.parts], axes=1) for n in START})
    with pytest.raises(CheckFailed, match="the 2 backwards of each rank weigh 0.125, 0.25, but should weigh 0.25"):
        sharded_steps.sharded_training(found, expected, UNITS)


def test_wrong_optimizers_and_shards_are_reported():
    expected = one_process(2)

    def spoiled(**changed):
        ranks = right(expected, 2)
        ranks[1][0] = replace(ranks[1][0], **changed)
        return ranks

    for ranks, complaint in (
            (spoiled(weights={**expected[0].after, "bias": np.zeros(3)}), "they are zeros"),
            (spoiled(loss=np.nan), "rank 1 holds nan in the loss of step 0")):
        with pytest.raises(CheckFailed, match=complaint):
            sharded_steps.sharded_training(ranks, expected, UNITS)


def test_padding_with_a_gradient_is_reported():
    expected = one_process(2)
    ranks = right(expected, 2)
    ranks[1][0].updates["root"][1][-1] = 0.5
    with pytest.raises(CheckFailed, match="the zeros that pad the shard have a gradient"):
        sharded_steps.sharded_training(ranks, expected, UNITS)


# What is held

def recorded(*events):
    """One rank of two: memory events (what, unit, numbers), work (op,), with a second between them."""
    made = []
    for at_s, event in enumerate(events):
        times = {"start_s": float(at_s), "end_s": float(at_s)}
        made.append(Event(0, "compute", event[0], unit="all", **times) if len(event) == 1 else
                    Event(0, "memory", event[0], unit=event[1], num_bytes=8.0 * event[2], **times))
    made += [replace(event, rank=1) for event in made]
    return Trace(made, 2, "measured", "recorded")


UNIT_SIZES = {"root": (11, 2), "block 0": (10, 2)}  # numbers, tensors
BLOCKS = {**UNIT_SIZES, "block 1": (10, 2)}


def test_unsharded_gradients_are_reported():
    passing = [("gradients", "block 1", 10), ("gradients", "block 1", 5), ("gradients", "root", 11),
               ("gradients", "block 0", 10), ("gradients", "block 0", 5), ("gradients", "root", 6), ("update",)]
    assert sharded_state.gradients_sharded(recorded(*passing), BLOCKS, 8) == 8 * (11 + 10 + 5)
    for events, complaint in (
            ([("gradients", "block 1", 10), ("gradients", "block 0", 10)], "whole gradients of block 0 and block 1"),
            ([("gradients", "block 1", 15), ("gradients", "block 0", 10)], "of block 1 after its reduce_scatter"),
            ([("gradients", "root", 11), ("update",)], "still has whole gradients of root at the update")):
        with pytest.raises(CheckFailed, match=complaint):
            sharded_state.gradients_sharded(recorded(*events), BLOCKS, 8)


def test_gradients_left_after_the_step_are_reported():
    dropped = recorded(("gradients", "block 1", 10), ("update",), ("gradients", "block 1", 5))
    sharded_state.gradients_dropped(dropped, BLOCKS, 8)
    with pytest.raises(CheckFailed, match="rank 0 keeps 80 bytes of gradients of block 1 after the step"):
        sharded_state.gradients_dropped(recorded(("gradients", "block 1", 10), ("update",)), BLOCKS, 8)


def whole_and_back(unit):
    return [("parameters", unit, 16), ("parameters", unit, 5)]


def test_parameters_that_are_never_freed_are_reported():
    step = [*whole_and_back("root"), ("parameters", "root", 17), *whole_and_back("block 0"), *whole_and_back("block 1"),
            ("backward",), *whole_and_back("block 1"), *whole_and_back("block 0"), ("parameters", "root", 6)]
    assert sharded_state.parameters_sharded(recorded(*step), BLOCKS, 8, 1) == 8 * (17 + 16 + 5)
    for events, complaint in (
            ([("forward",), ("parameters", "block 0", 15), ("parameters", "block 1", 15)], "as soon as its forward is"),
            ([("backward",), ("parameters", "block 0", 15), ("parameters", "block 1", 15)], "as soon as its backward"),
            (3 * whole_and_back("root"), "twice for each is enough")):
        with pytest.raises(CheckFailed, match=complaint):
            sharded_state.parameters_sharded(recorded(*events), BLOCKS, 8, 1)


def test_optimizer_state_of_more_than_a_share_is_reported():
    held = recorded(("optimizer", "root", 12), ("optimizer", "block 0", 10))
    assert sharded_state.optimizer_sharded(held, UNIT_SIZES, 2, 8) == 8 * 22
    with pytest.raises(CheckFailed, match="rank 0 keeps 176 bytes of optimizer state for root"):
        sharded_state.optimizer_sharded(recorded(("optimizer", "root", 22)), UNIT_SIZES, 2, 8)


# Sent, predicted, clipped, saved

def collectives(*ops, num_bytes=800.0, num_ranks=4):
    group = tuple(range(num_ranks))
    return Trace([Event(rank, "collective", op, group=group, num_bytes=num_bytes, start_s=0.0, end_s=0.0)
                  for rank in group for op in ops], num_ranks, "measured", "recorded")


@pytest.mark.parametrize("stage, ops", [(0, ["all_reduce"]), (1, ["reduce_scatter", "all_gather"]),
                                        (3, ["all_gather"] * 2 + ["reduce_scatter"])])
def test_each_stage_may_send_its_own_bytes_and_no_more(stage, ops):
    passes = sharded_state.sharded_traffic(collectives(*ops), stage, 800.0)
    assert passes * 600 == pytest.approx(sharded_sent_bytes(stage, 4, 800.0))
    for wrong in ([*ops, "all_gather"], ops[1:]):
        with pytest.raises(CheckFailed, match="a rank sends .* of the model"):
            sharded_state.sharded_traffic(collectives(*wrong), stage, 800.0)
    if stage:
        with pytest.raises(CheckFailed, match="your run all-reduces"):
            sharded_state.sharded_traffic(collectives("all_reduce"), stage, 800.0)


@pytest.mark.parametrize("stage", range(4))
def test_predictions_pass_when_right_and_not_otherwise(stage):
    measured = state_bytes(1000, stage, 4, StateBytes(8, 8, 16))
    got = (measured.parameters, measured.gradients, measured.optimizer)
    assert sharded_state.predicted_state(got, measured, stage, 4, 8) == measured.total
    for place, first in enumerate((3, 2, 1)):
        complaint = f"from stage {first} on, a rank has 1/4" if stage >= first else f"before stage {first} a rank has"
        wrong = [value * (1 if i != place else 4 if stage >= first else 1 / 4) for i, value in enumerate(got)]
        with pytest.raises(CheckFailed, match=complaint):
            sharded_state.predicted_state(wrong, measured, stage, 4, 8)


def test_a_wrong_fewest_number_of_ranks_is_reported():
    for got, want in ((3, 3), (None, None), (3.0, 3)):
        sharded_state.fewest(got, want, "it")
    for got, want, complaint in ((None, 3, "fits on 3 ranks"),
                                 (2, 5, "the stage does not shard stays whole")):
        with pytest.raises(CheckFailed, match=complaint):
            sharded_state.fewest(got, want, "it")


def test_norms_that_differ_from_rank_to_rank_are_reported():
    local, want = [[3.0, 0.0], [2.4, 3.2]], 5.0  # by rank, by unit
    assert sharded_state.clipped([5.0, 5.0], [0.2, 0.2], local, want, 1.0) == 5
    assert sharded_state.clipped([5.0, 5.0], [1.0, 1.0], local, want, 9.0) == 5
    assert sharded_state.clipped([3.2, 3.2], [1.0, 1.0], local, 3.2, 9.0) == 3.2  # a norm of another kind
    with pytest.raises(CheckFailed, match="another norm is asked for"):
        sharded_state.clipped([5.0, 5.0], [1.0, 1.0], local, 3.2, 9.0)
    with pytest.raises(CheckFailed, match="you do it twice"):
        sharded_state.clipped([5.0, 5.0], [0.04, 0.2], local, want, 1.0)


def test_zeros_in_a_local_part_are_reported():
    right = [{"shard": (3, 10, 0)}, {"shard": (3, 10, 3)}, {"shard": (3, 10, 6)}, {"shard": (1, 10, 9)}]
    sharded_steps.parts_without_zeros(right)
    sharded_steps.parts_without_zeros([{"one": (1, 2, 0)}, {"one": (1, 2, 1)}, {"one": (0, 2, 2)}])
    with pytest.raises(CheckFailed, match="rank 3's part of shard has 3 numbers, but .* it should have 1 on 4"):
        sharded_steps.parts_without_zeros([*right[:3], {"shard": (3, 10, 9)}])


def test_resumed_training_equals_one_process():
    expected = one_process(2, num_steps=4)
    loaded = [expected[2].before] * 2

    def going_on(weights):
        return [[Step(own.loss, {}, 0, weights[k]) for k, own in enumerate(expected[2:])] for _ in range(2)]

    after = [own.after for own in expected[2:]]
    assert sharded_steps.continued(loaded, going_on(after), expected, 2, {}) == expected[3].loss
    lost = {name: value + 1 for name, value in after[0].items()}
    with pytest.raises(CheckFailed, match="after the next step they are not: what else does the step depend on"):
        sharded_steps.continued(loaded, going_on([after[0], lost]), expected, 2, {"the averages are lost": lost})


# Runs that go on after a kill, and several hosts

STUCK = {0: [("0", 9, (0, 1, 2), True), ("a", 2, (0, 1), False)], 1: [("0", 9, (0, 1, 2), True)],
         2: [("0", 9, (0, 1, 2), True)]}
WANT = {0: 3.0, 1: 2.0, 2: 1.5}
SLIPS = {"never_updated": {0: 3.0, 1: 3.0, 2: 3.0}, "never_cleared": {0: 3.0, 1: 2.0, 2: 1.7}}


def test_the_guilty_rank_is_returned():
    assert recovery.guilty_ranks([1], STUCK, "stuck") == [1]


def test_losses_of_one_process_pass():
    recovery.trained_as_one({step: loss + 1e-12 for step, loss in WANT.items()}, WANT, SLIPS)


def test_a_training_that_returns_no_losses_is_reported():
    with pytest.raises(CheckFailed, match="a dict of its losses by step, not None"):
        recovery.trained_as_one(None, WANT, SLIPS)


def traced(*calls):
    """A trace of calls of two ranks on each of two hosts, all across, as (op, bytes)."""
    return Trace([Event(rank, "collective", op, group=(rank % 2, rank % 2 + 2), num_bytes=num_bytes)
                  for op, num_bytes in calls for rank in range(4)], 4, "logical", "recorded")


@pytest.mark.parametrize("calls", [[("all_reduce", 40)], [("reduce_scatter", 40), ("all_gather", 40)]])
def test_one_buffer_of_each_host_may_cross(calls):
    assert multi_host.crossing_bytes(traced(*calls), 2, 80) == 160


def test_more_than_one_buffer_is_refused():
    with pytest.raises(CheckFailed, match="what is sent twice"):
        multi_host.crossing_bytes(traced(("all_reduce", 40), ("all_reduce", 20)), 2, 80)


def test_sums_that_are_not_handed_out_are_told_from_other_wrong_ones():
    before = np.arange(1.0, 17).reshape(4, 4) ** 2
    total, own = before.sum(axis=0), np.array([[1, 1, 0, 0], [0, 0, 1, 1]] * 2, dtype=bool)
    multi_host.handed_out(before, [total] * 4, 2)
    multi_host.handed_out(before, before, 2)  # another check refuses these
    with pytest.raises(CheckFailed, match="an all-gather inside brings the other shares"):
        multi_host.handed_out(before, np.where(own, total, before), 2)
    with pytest.raises(CheckFailed, match="the MAX of the hosts' sums, not their sum"):
        multi_host.handed_out(before, [before.reshape(2, 2, 4).sum(axis=1).max(axis=0)] * 4, 2)
