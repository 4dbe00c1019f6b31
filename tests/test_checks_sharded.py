"""Checks on sharded state, with inputs that no answer gives: each mistake is named, and nothing wrong passes."""
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
import torch

from book.checks import sharded_state, sharded_steps
from book.launch import RankError
from book.checks.verdict import CheckFailed
from book.cost import StateBytes, sharded_sent_bytes, state_bytes
from book.trace import Event, Trace

RNG = np.random.default_rng(0)
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
    (lambda step, k, rank: {n: 4 * g for n, g in mean(step).items()}, "step 0, rank 0, root: it is the sum over 4 ra"),
    (lambda step, k, rank: {n: g / 4 for n, g in mean(step).items()}, "it is 0.25 times the mean"),
    (lambda step, k, rank: step.parts[rank], "only this rank's own gradient is in it"),
    (lambda step, k, rank: {n: (step.parts[0][n] + step.parts[1][n]) / 4 for n in START}, "of ranks 2, 3 have no part"),
    (lambda step, k, rank: {n: RNG.normal(size=g.shape) for n, g in START.items()}, "not a sum of the ranks' grad"),
    (lambda step, k, rank: {n: g * np.nan for n, g in START.items()}, "rank 0 holds nan in the gradient of root's sh"),
])
def test_wrong_gradients_are_named(gradient, complaint):
    expected = one_process(4)
    with pytest.raises(CheckFailed, match=complaint):
        sharded_steps.sharded_training(right(expected, 4, gradient), expected, UNITS)


@pytest.mark.parametrize("weights, complaint", [
    ((0.0, 0.5, 0.0, 0.5), "only the last of the step's 2 backwards is in it"),
    ((0.125, 0.25, 0.125, 0.25), "the 2 backwards of each rank weigh 0.125, 0.25, but should weigh 0.25"),
    ((0.5, 0.5, 0, 0), "only this rank's own gradient"),
])
def test_lost_backward_passes_are_reported(weights, complaint):
    expected = one_process(4)
    found = right(expected, 2, lambda step, k, rank: {
        n: np.tensordot(weights, [part[n] for part in step.parts], axes=1) for n in START})
    with pytest.raises(CheckFailed, match=complaint):
        sharded_steps.sharded_training(found, expected, UNITS)


def test_a_gradient_that_is_never_cleared_is_reported():
    expected = one_process(2)
    found = right(expected, 2, lambda step, k, rank: {
        n: mean(step)[n] + (mean(expected[0])[n] if k else 0) for n in START})
    with pytest.raises(CheckFailed, match="step 1, rank 0, root: it still contains the gradient of the step before"):
        sharded_steps.sharded_training(found, expected, UNITS)


def test_wrong_optimizers_and_shards_are_reported():
    expected = one_process(2)

    def spoiled(**changed):
        ranks = right(expected, 2)
        ranks[1][0] = replace(ranks[1][0], **changed)
        return ranks

    good = right(expected, 2)
    other = {unit: (torch.randn(6, dtype=torch.float64), grad) for unit, (_, grad) in good[1][0].updates.items()}
    everything = {unit: (np.concatenate([np.asarray(own[0].updates[unit][0]) for own in good]), None)
                  for unit in UNITS}
    for ranks, complaint in (
            (spoiled(updates={}), "rank 1's optimizer makes no step"),
            (spoiled(num_foreign=21), "rank 1's optimizer has 21 numbers that are in no unit's shard"),
            (spoiled(updates=other), "numbers in rank 1's shard of root are not among rank 0's parameters"),
            (spoiled(updates=everything), "rank 1's shard of root has 24 of its 23 numbers, but"),
            (spoiled(updates=good[0][0].updates), "12 numbers of root are in the shards of two ranks"),
            (spoiled(updates={unit: (shard[:-2], g[:-2]) for unit, (shard, g) in good[1][0].updates.items()}),
             "1 of the 23 numbers of root are in nobody's shard"),
            (spoiled(weights=expected[0].before), "all parameters are as before the step"),
            (spoiled(weights={**expected[0].after, "bias": np.zeros(3)}), "they are zeros"),
            (spoiled(weights={**expected[0].after, "bias": expected[0].after["bias"][::-1]}),
             "they are right numbers in wrong places"),
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


SIZES = {"root": (11, 2), "block 0": (10, 2)}  # numbers, tensors
BLOCKS = {**SIZES, "block 1": (10, 2)}


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
            ([("parameters", "block 0", 15), ("update",)], "rank 0 holds block 0 whole after the backwards"),
            (whole_and_back("root"), "rank 0 makes root whole 1 times in 1 forwards and backwards"),
            (3 * whole_and_back("root"), "twice for each is enough")):
        with pytest.raises(CheckFailed, match=complaint):
            sharded_state.parameters_sharded(recorded(*events), BLOCKS, 8, 1)


def test_optimizer_state_of_more_than_a_share_is_reported():
    held = recorded(("optimizer", "root", 12), ("optimizer", "block 0", 10))
    assert sharded_state.optimizer_sharded(held, SIZES, 2, 8) == 8 * 22
    with pytest.raises(CheckFailed, match="rank 0 keeps 176 bytes of optimizer state for root"):
        sharded_state.optimizer_sharded(recorded(("optimizer", "root", 22)), SIZES, 2, 8)


def test_parameters_left_after_a_forward_are_reported():
    sharded_state.nothing_behind([0, 0])
    with pytest.raises(CheckFailed, match="on rank 1 80 bytes of whole parameters outlive the forward"):
        sharded_state.nothing_behind([0, 80])


# Sent, predicted, clipped, saved

def collectives(*ops, num_bytes=800.0, num_ranks=4):
    group = tuple(range(num_ranks))
    return Trace([Event(rank, "collective", op, group=group, num_bytes=num_bytes, start_s=0.0, end_s=0.0)
                  for rank in group for op in ops], num_ranks, "measured", "recorded")


@pytest.mark.parametrize("stage, ops", [(0, ["all_reduce"]), (1, ["reduce_scatter", "all_gather"]),
                                        (2, ["reduce", "broadcast"]), (3, ["all_gather"] * 2 + ["reduce_scatter"])])
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
    for got, want, complaint in ((2, 3, "round up"), (4, 3, "one rank fewer is enough"), (None, 3, "fits on 3 ranks"),
                                 (3, None, "whatever the number of ranks"), (7, 3, "2.33 times"),
                                 (8, 5, "need not be a power of two"), (2, 5, "the stage does not shard stays whole")):
        with pytest.raises(CheckFailed, match=complaint):
            sharded_state.fewest(got, want, "it")


def test_norms_that_differ_from_rank_to_rank_are_reported():
    local, want = [[3.0, 0.0], [2.4, 3.2]], 5.0  # by rank, by unit
    assert sharded_state.clipped([5.0, 5.0], [0.2, 0.2], local, want, 1.0) == 5
    assert sharded_state.clipped([5.0, 5.0], [1.0, 1.0], local, want, 9.0) == 5
    assert sharded_state.clipped([3.2, 3.2], [1.0, 1.0], local, 3.2, 9.0) == 3.2  # a norm of another kind
    with pytest.raises(CheckFailed, match="another norm is asked for"):
        sharded_state.clipped([5.0, 5.0], [1.0, 1.0], local, 3.2, 9.0)
    for norms, scales, most, complaint in (
            ([5.0, 4.0], [0.2, 0.2], 1.0, "the norm on rank 1 is 4: that is the norm of this rank's shards alone"),
            ([1.0, 1.0], [0.2, 0.2], 1.0, "return the norm before clipping"),
            ([8.6, 8.6], [0.2, 0.2], 1.0, "norms don't add"),
            ([5.0, 5.0], [0.2, 1.0], 1.0, "rank 1's gradients are multiplied by 1, but should be by 0.2"),
            ([5.0, 5.0], [0.04, 0.2], 1.0, "you do it twice"),
            ([5.0, 5.0], [1.8, 1.8], 9.0, "never longer"),
            ([5.0, 5.0], [float("nan")] * 2, 1.0, "by several factors, but should be by 0.2 .*, all units alike"),
            ([3.2, 3.2], [0.2, 0.2], 1.0, "that is the norm of one unit")):
        with pytest.raises(CheckFailed, match=complaint):
            sharded_state.clipped(norms, scales, local, want, most)


def test_zeros_in_a_local_part_are_reported():
    right = [{"shard": (3, 10, 0)}, {"shard": (3, 10, 3)}, {"shard": (3, 10, 6)}, {"shard": (1, 10, 9)}]
    sharded_steps.parts_without_zeros(right)
    sharded_steps.parts_without_zeros([{"one": (1, 2, 0)}, {"one": (1, 2, 1)}, {"one": (0, 2, 2)}])
    with pytest.raises(CheckFailed, match="rank 3's part of shard has 3 numbers, but .* it should have 1 on 4"):
        sharded_steps.parts_without_zeros([*right[:3], {"shard": (3, 10, 9)}])


def test_wrong_contents_of_a_checkpoint_are_reported():
    sharded_steps.saved_once({"shard": 100, "exp_avg": 100, "exp_avg_sq": 100, "step": 1}, 300, 4)
    for sizes, complaint in ((None, "no checkpoint that torch.distributed.checkpoint can read"),
                             ({"shard": 100}, "includes the optimizer's"), ({"shard": 75}, "takes a plain tensor"),
                             ({"shard": 304}, "the zeros that pad"), ({"shard": 1200}, "each of the 4 ranks")):
        with pytest.raises(CheckFailed, match=complaint):
            sharded_steps.saved_once(sizes, 300, 4)
    no_match, not_filled = RankError("ValueError: Size mismatch between"), RankError("invalid fill tensor-volume: 174")
    assert "Size mismatch" in sharded_steps.load_failure(no_match, "/somewhere")
    assert "must use the same name" in sharded_steps.saving_failure(not_filled, "/somewhere")
    assert sharded_steps.load_failure(RankError("no /somewhere/x"), "/somewhere") == "no the folder/x"


def test_resumed_training_equals_one_process():
    expected = one_process(2, num_steps=4)
    loaded = [expected[2].before] * 2

    def going_on(weights):
        return [[Step(own.loss, {}, 0, weights[k]) for k, own in enumerate(expected[2:])] for _ in range(2)]

    after = [own.after for own in expected[2:]]
    assert sharded_steps.continued(loaded, going_on(after), expected, 2, {}) == expected[3].loss
    lost = {name: value + 1 for name, value in after[0].items()}
    for own, weights, complaint in (
            ([expected[2].before, expected[1].before], after, "rank 1 has loaded different numbers for embedding"),
            (loaded, [lost, after[1]], "after the next step they are not: the averages"),
            (loaded, [after[0], lost], "after the next step they are not: what else does the step depend on")):
        with pytest.raises(CheckFailed, match=complaint):
            sharded_steps.continued(own, going_on(weights), expected, 2, {"the averages are lost": lost})


def test_parameters_that_a_gather_moves_are_reported():
    sharded_state.gathered_in_place([1000, 2000], [1000, 2000])
    with pytest.raises(CheckFailed, match="moved 1 of 2 parameters into another buffer"):
        sharded_state.gathered_in_place([1000, 2000], [1000, 3000])
