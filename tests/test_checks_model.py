"""Checks on split models, pipelines, meshes, plans: what passes, to the last digit, and what no answer reaches."""
import dataclasses
import functools
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist

from book.checks import (best_layout, hybrid, hybrid_steps, meshes, pipeline_orders, pipeline_parallel,
                         pipeline_replicas, planner,
                         recordings, tensor_model, tensor_operators, tensor_parallel)
from book.checks.verdict import CheckFailed
from book.checks.hybrid import cut
from book.checks.best_layout import _layouts
from book.checks.planner import _dp_slips, _pp_slips, _time_slips, _tp_slips
from book.cost import Cluster, Layout, StateBytes, Transformer, estimate, pipeline_bubble
from book.cost.published import A100
from book.launch import LaunchError, RankError, launch
from book.mesh import AXES, Mesh
from book.parallel import GPTConfig
from book.parallel.model import Block
from book.pipelines import gpipe, interleaved, one_f_one_b
from book.replay import bubble
from book.schedule import Action, PipelineSchedule
from book.simulate import simulate_pipeline
from book.trace import Event, Trace

RNG = np.random.default_rng(0)
X, WEIGHT, BIAS = RNG.normal(size=(7, 8)), RNG.normal(size=(12, 8)), RNG.normal(size=12)
WHOLE = X @ WEIGHT.T + BIAS


def blocks(whole, num_ranks, axis):
    return [np.array(block) for block in np.split(whole, num_ranks, axis=axis)]


def parts(num_ranks):
    """Each rank's term of the product, without the bias."""
    return [x @ w.T for x, w in zip(blocks(X, num_ranks, 1), blocks(WEIGHT, num_ranks, 1))]


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
@pytest.mark.parametrize("convert", [np.array, torch.tensor, lambda a: torch.tensor(a, requires_grad=True)])
def test_right_products_pass_in_any_form(num_ranks, convert):
    total = pytest.approx(np.abs(WHOLE).sum())
    columns = [convert(block) for block in blocks(WHOLE, num_ranks, 1)]
    assert tensor_parallel.column_outputs(columns, X, WEIGHT, BIAS) == total
    assert tensor_parallel.row_outputs([convert(sum(parts(num_ranks)) + BIAS)] * num_ranks, X, WEIGHT, BIAS) == total


@pytest.mark.parametrize("seed", range(20))
def test_an_error_of_one_millionth_on_one_rank_is_noticed(seed):
    rng = np.random.default_rng(seed)
    rank = rng.integers(2)
    rows = [WHOLE.copy(), WHOLE.copy()]
    for check, right in ((tensor_parallel.column_outputs, blocks(WHOLE, 2, 1)), (tensor_parallel.row_outputs, rows)):
        right[rank].flat[rng.integers(right[rank].size)] += 1e-6
        with pytest.raises(CheckFailed):
            check(right, X, WEIGHT, BIAS)


@pytest.mark.parametrize("change, complaint", [
    (lambda own: own[:, ::-1], "rank 0: these are columns 5, 4, 3, 2, 1, 0, but the rank's are 0 to 5"),
    (lambda own: 2 * own, "this is not a block of columns"),
    (lambda own: own * np.nan, "rank 0 holds nan"),
])
def test_wrong_columns_are_reported(change, complaint):
    own = blocks(WHOLE, 2, 1)
    own[0] = change(own[0])
    with pytest.raises(CheckFailed, match=complaint):
        tensor_parallel.column_outputs(own, X, WEIGHT, BIAS)


def test_wrong_sums_of_parts_are_reported():
    got = sum(weight * part for weight, part in zip([1, 1, 2, 1], parts(4))) + BIAS
    with pytest.raises(CheckFailed, match="the ranks' parts are in it 1, 1, 2, 1 times"):
        tensor_parallel.row_outputs([got] * 4, X, WEIGHT, BIAS)


def test_rows_that_are_not_a_sum_of_parts_are_reported():
    with pytest.raises(CheckFailed, match="not a sum of products of x's blocks with the weight's"):
        tensor_parallel.row_outputs([np.tanh(WHOLE)] * 2, X, WEIGHT, BIAS)


def test_work_that_is_not_shared_out_is_reported():
    tensor_parallel.computed([50, 50], 100)
    with pytest.raises(CheckFailed, match="column_linear: rank 1 computes 0.75 of the product, but its share is 1/2"):
        tensor_parallel.computed([50, 75], 100)


@pytest.mark.parametrize("error, said", [
    (RuntimeError("mat1 and mat2 shapes cannot be multiplied (5x6 and 3x8)"), "is a row of the weight .dim 0"),
    (RuntimeError("mat1 and mat2 shapes cannot be multiplied (5x6 and 3x6)"), "transposed it would fit"),
    (RuntimeError("mat1 and mat2 shapes cannot be multiplied (5x6 and 5x8)"), "a slice leaves out its end"),
    (IndexError("index 7 is out of bounds for dimension 1 with size 6"), "block of V/R tokens begins at r V/R"),
])
def test_an_error_of_torch_is_explained_in_the_place_where_it_happened(error, said):
    def stumble():
        raise error

    with pytest.raises(CheckFailed, match=f"^{type(error).__name__}: .*{said}") as caught, (
            tensor_parallel.shapes_in_words()):
        stumble()
    assert caught.traceback[-1].name == "stumble"


@pytest.mark.parametrize("error", [RuntimeError("Connection reset"), ValueError("must match the size")])
def test_an_error_that_is_not_about_shapes_stays_as_it_is(error):
    with pytest.raises(type(error)) as caught, tensor_parallel.shapes_in_words():
        raise error
    assert caught.value is error


def test_torch_still_raises_the_errors_that_are_explained():
    table = torch.zeros(2, 6)
    linear = torch.nn.functional.linear
    for act in (lambda: torch.ones(2, 3) @ torch.ones(2, 3), lambda: torch.ones(2, 3) + torch.ones(4),
                lambda: linear(torch.ones(7, 12), torch.ones(4, 12), torch.ones(8)), lambda: None + table,
                lambda: linear(None, table), lambda: table.view(4, 6), lambda: table.unflatten(1, (4, 6)),
                lambda: table.gather(1, torch.full((2, 1), 7)), lambda: table[:, 7], lambda: table.narrow(1, 4, 3),
                lambda: table.narrow(2, 0, 1), lambda: (2).shape):
        with pytest.raises(CheckFailed, match=(
                ": (the input has 3 numbers in a row, but what it is multiplied with takes 2|3 numbers meet 4|the bias "
                "has 8 numbers, but your outputs have 4|a rank holds a part|an index is|something here is None|the "
                "block ends past|there is no such dim|this is a number)")):
            with tensor_parallel.shapes_in_words():
                act()


def both_ways(forward, backward, num_ranks=3):
    """Runs of an operator that mixes ranks' tensors by `forward` (R, R) and their gradients by `backward`."""
    x, upstream = RNG.normal(size=(2, num_ranks, 3, 4))
    return [{"x": x[r], "x_after": x[r], "upstream": upstream[r], "upstream_after": upstream[r],
             "output": np.tensordot(forward[r], x, axes=1), "gradient": np.tensordot(backward[r], upstream, axes=1)}
            for r in range(num_ranks)]


EYE, ONES = np.eye(3), np.ones((3, 3))


def test_an_operator_that_makes_something_else_is_reported():
    runs = both_ways(EYE, ONES)
    runs[2]["output"] = np.ones((3, 4))
    with pytest.raises(CheckFailed, match="f, forward, rank 2: this can't be made from the ranks' tensors"):
        tensor_operators.operator("f", runs, "identity", "sum")


LAYOUT = {"weight": 1, "bias": None}


def split(num_ranks=2):
    """A row-split linear map as it should be: what `split_module` takes."""
    upstream, terms = RNG.normal(size=WHOLE.shape), parts(num_ranks)
    backs = [np.zeros_like(X) for _ in range(num_ranks)]
    for back, columns in zip(backs, np.split(np.arange(8), num_ranks)):
        back[:, columns] = upstream @ WEIGHT[:, columns]
    whole = {"output": WHOLE, "input_gradient": sum(backs),
             "gradients": {"weight": upstream.T @ X, "bias": upstream.sum(axis=0)}}
    runs = [{"shards": {"weight": w, "bias": BIAS}, "storage": {"weight": w.nbytes, "bias": BIAS.nbytes},
             "output": WHOLE, "input_gradient": whole["input_gradient"],
             "gradients": {"weight": g, "bias": whole["gradients"]["bias"]}}
            for w, g in zip(blocks(WEIGHT, num_ranks, 1), blocks(whole["gradients"]["weight"], num_ranks, 1))]
    before = [{"weight": WEIGHT + r * RNG.normal(size=WEIGHT.shape), "bias": BIAS + r} for r in range(num_ranks)]
    return runs, before, whole, [{"output": t, "input_gradient": b} for t, b in zip(terms, backs)], LAYOUT


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_a_right_split_passes(num_ranks):
    assert tensor_parallel.split_module(*split(num_ranks)) > 0


@pytest.mark.parametrize("where, change, complaint", [
    (("output",), lambda y: y - parts(2)[0], "rank 1's output is wrong: this is only the rank's own part"),
    (("output",), np.tanh, "it is not a sum of what the ranks' parts give"),
    (("input_gradient",), lambda g: None, "rank 1: x gets no gradient"),
])
def test_wrong_splits_are_reported(where, change, complaint):
    runs, *others = split()
    place = runs[1]
    for key in where[:-1]:
        place = place[key]
    place[where[-1]] = change(place[where[-1]])
    with pytest.raises(CheckFailed, match=complaint):
        tensor_parallel.split_module(runs, *others)


def traffic(*phases):
    """A trace of two ranks whose phases are lists of (operation, bytes)."""
    events, now = [], 0.0
    for number, phase in enumerate(phases):
        for op, num_bytes in [*phase, *([("barrier", 0)] if number < len(phases) - 1 else [])]:
            now += 1
            events += [Event(r, "collective", op=op, num_bytes=num_bytes, start_s=now, end_s=now) for r in (0, 1)]
    return Trace(events, 2, "measured", "recorded")


SUM = ("all_reduce", 80)


@pytest.mark.parametrize("phases, complaint", [
    ([[], []], "backward, rank 0: 0 all-reduces instead of 1"),
    ([[], [("all_reduce", 40)]], "an all-reduce of 40 bytes, but 80 are enough"),
])
def test_wrong_traffic_is_reported(phases, complaint):
    wanted = {"forward": 0, "backward": 1}
    assert recordings.split_traffic(traffic([], [SUM]), wanted, 80) == 80
    assert recordings.split_traffic(traffic([SUM, SUM], [SUM]), {"forward": None, "backward": 1}, 80) == 80
    with pytest.raises(CheckFailed, match=complaint):
        recordings.split_traffic(traffic(*phases), wanted, 80)


@pytest.mark.parametrize("parameters, num_bytes, complaint", [
    ((4578 - 96) // 3 + 96, 7680, "the biases of the maps that are cut by rows are whole"),
    ((4578 - 48) // 3 + 48, 7680, "the norms are whole on every rank"),
    (4320 // 3 + 114 + 144, 7680, "the biases of the maps that are cut by columns are cut with them"),
    (4320 // 3, 7680, "that is the weights alone"),
    ((4320 + 42) / 3 + 72 + 144, 7680, "the biases of q, k and v are cut"),
    (1622, 1920, "that is a single all-reduce"),
    (1622, 2560, "every rank gives the whole activation"),
    (1622, 10240, "that is what a ring sends"),
])
def test_wrong_counts_are_reported(parameters, num_bytes, complaint):
    assert tensor_model.block_count((1622, 7680), 24, 42, 3, 10, 8) == (1622, 7680)
    with pytest.raises(CheckFailed, match=complaint):
        tensor_model.block_count((parameters, num_bytes), 24, 42, 3, 10, 8)


def test_the_count_is_that_of_a_block():
    block = Block(GPTConfig(vocab_size=1, width=24, mlp_width=42))
    num_parameters = sum(p.numel() for p in block.parameters())
    assert tensor_model.block_count((num_parameters, 7680), 24, 42, 1, 10, 8) == (num_parameters, 7680)


LOGITS, TARGETS = 3 * RNG.normal(size=(9, 12)), np.array([0, 11, 5, 6, 3, 8, 1, 10, 4])
TOTAL = np.log(np.exp(LOGITS).sum(axis=1))
CHOSEN = np.eye(12)[TARGETS] / 9
SOFTMAX = np.exp(LOGITS - TOTAL[:, None]) / 9
LOSS = torch.tensor((TOTAL - LOGITS[np.arange(9), TARGETS]).mean())


def test_the_loss_and_its_gradients_equal_torchs():
    logits = torch.tensor(LOGITS, requires_grad=True)
    loss = torch.nn.functional.cross_entropy(logits, torch.tensor(TARGETS))
    loss.backward()
    shares = logits.grad.chunk(3, dim=1)
    assert tensor_model.vocabulary_loss([loss] * 3, shares, logits, TARGETS) == pytest.approx(LOSS.item())


def test_wrong_losses_are_reported():
    top, target = LOGITS.max(axis=1), LOGITS[np.arange(9), TARGETS]
    gradients = blocks(SOFTMAX - CHOSEN, 2, 1)
    for values, complaint in ((TOTAL - np.log(2) - target, "averaged over the ranks, but it must be added up"),
                              (TOTAL + top - target, "but not in the sum of exponentials"),
                              (TOTAL - target + 0.1, "Which of these sums is over the ranks"),
                              (np.full(9, np.nan), "rank 0's loss is nan: exp of logits as small as these is finite"),
                              (TOTAL - 2 * target * (TARGETS < 6), "Which of these sums is over the ranks"),
                              (np.full(9, np.inf), "A rank that doesn't hold a target must add 0, not -inf")):
        with pytest.raises(CheckFailed, match=complaint):
            tensor_model.vocabulary_loss([torch.tensor(values.mean())] * 2, gradients, LOGITS, TARGETS)


def test_wrong_gradients_are_reported():
    own = [np.exp(z - np.log(np.exp(z).sum(axis=1, keepdims=True))) / 9 - c
           for z, c in zip(blocks(LOGITS, 2, 1), blocks(CHOSEN, 2, 1))]
    half = blocks((SOFTMAX - CHOSEN) / 2, 2, 1)
    for gradients, complaint in ((own, "the softmax over the rank's own part"), (2 * [np.ones((9, 6))], "it should be"),
                                 (half, "the softmax is divided by 2 and the part of the target is divided by 2")):
        with pytest.raises(CheckFailed, match=complaint):
            tensor_model.vocabulary_loss([LOSS] * 2, gradients, LOGITS, TARGETS)


def masks(alike, apart):
    return {"alike": alike, "apart": apart, "gradients": alike, "apart_gradients": apart}


def drawn(seed, rank=0, dropout=0.25, calls=4):
    rng = np.random.default_rng([seed, rank])
    return [(rng.random((16, 32)) >= dropout) / (1 - dropout) for _ in range(calls)]


OTHER = [masks(drawn(9), drawn(10, rank)) for rank in range(2)]


def test_right_masks_pass_and_return_the_scale_of_kept_values():
    runs = [masks(drawn(1), drawn(2, rank)) for rank in range(2)]
    assert tensor_model.dropout_masks(runs, OTHER, OTHER, (16, 32), [0.25] * 4) == 1 / 0.75


def test_the_first_p_and_seeds_that_are_products_are_named():
    runs = [masks(drawn(1), drawn(2, rank)) for rank in range(2)]
    with pytest.raises(CheckFailed, match="alike, call 2, rank 0: this is dropout with the p of the first call, 0.25"):
        tensor_model.dropout_masks(runs, OTHER, OTHER, (16, 32), [0.25, 0.25, 0.1, 0.25])
    with pytest.raises(CheckFailed, match="with the seed 0, though .*: call 0 of apart: ranks 0 and 1 draw the same"):
        tensor_model.dropout_masks(runs, OTHER, [masks(drawn(9), drawn(10))] * 2, (16, 32), [0.25] * 4)


# Pipelines

SHAPES = {"embedding": (5, 4), "block.weight": (4, 4), "block.bias": (4,), "head": (4, 5)}
SINGLE = [{name: RNG.normal(size=shape) for name, shape in SHAPES.items()} for _ in range(4)]  # of 4 micro-batches
STAGES = [["embedding"], ["block.weight", "block.bias"], ["head"]]


def held(weights):
    """What three stages hold that take the micro-batches' gradients `weights` (3, 4) times."""
    return [{name: np.tensordot(row, [own[name] for own in SINGLE], axes=1) for name in names}
            for names, row in zip(STAGES, np.broadcast_to(weights, (3, 4)))]


MEAN = np.full((3, 4), 0.25)


def test_the_gradient_of_the_batch_passes_in_any_form_and_order_of_additions():
    total = pytest.approx(sum(np.abs(gradient).sum() for stage in held(MEAN) for gradient in stage.values()))
    assert pipeline_parallel.stage_gradients(held(MEAN), SINGLE) == total
    assert pipeline_parallel.stage_gradients(held(MEAN + 1e-13), SINGLE) == total
    as_tensors = [{name: torch.tensor(gradient, requires_grad=True) for name, gradient in stage.items()}
                  for stage in held(MEAN)]
    assert pipeline_parallel.stage_gradients(as_tensors, SINGLE) == total
    uneven = [0.4, 0.3, 0.2, 0.1]
    assert pipeline_parallel.stage_gradients(held(uneven), SINGLE, uneven) > 0


@pytest.mark.parametrize("seed", range(30))
def test_no_other_weights_pass(seed):
    """One weight on one stage off by as little as a millionth of it, one number of one gradient, or all at random."""
    rng = np.random.default_rng(seed)
    weights = MEAN.copy()
    weights[tuple(rng.integers(3, size=1)), rng.integers(4)] *= 1 + 10.0 ** -rng.integers(1, 7)
    found = held([weights, rng.normal(size=(3, 4)), MEAN][seed % 3])
    if seed % 3 == 2:
        found[1]["block.bias"][rng.integers(4)] += 1e-6
    with pytest.raises(CheckFailed):
        pipeline_parallel.stage_gradients(found, SINGLE)


def with_none(*names):
    return [{name: None if name in names else gradient for name, gradient in stage.items()} for stage in held(MEAN)]


@pytest.mark.parametrize("found, complaint", [
    (held(MEAN * 7), "the gradient is 7 times what it should be"),
    (held(0 * MEAN), "its gradients are 0: were they cleared"),
    (with_none("head"), "stage 2 has no gradient at all: is backward called on the loss"),
    (with_none("embedding"), "stage 0 has no gradient at all: what came back from stage 1"),
    (with_none("block.bias"), "stage 1 has no gradient for block.bias, though it has others"),
    ([{name: gradient * np.nan for name, gradient in stage.items()} for stage in held(MEAN)],
     "stage 2 holds nan in its gradients"),
    ([held(MEAN)[0], {**held(MEAN)[1], "block.bias": np.ones(4)}, held(MEAN)[2]],
     "stage 1's gradients are not a sum of its micro-batches' gradients, but those of stage 2 are right"),
])
def test_wrong_gradients_are_named(found, complaint):
    with pytest.raises(CheckFailed, match=complaint):
        pipeline_parallel.stage_gradients(found, SINGLE)


def test_means_of_unequal_micro_batches_are_reported():
    with pytest.raises(CheckFailed, match="every micro-batch weighs 0.25, but they have different numbers"):
        pipeline_parallel.stage_gradients(held(MEAN), SINGLE, [0.4, 0.2, 0.2, 0.2])
    with pytest.raises(CheckFailed, match="it is the mean of the micro-batches' means"):
        pipeline_parallel.batch_loss(2.0, [1.0, 3.0], counts=[3, 1])
    assert pipeline_parallel.batch_loss(torch.tensor(1.5), [1.0, 3.0], counts=[3, 1]) == 1.5


def test_stages_that_change_a_weight_are_reported():
    model = {"a": np.ones(3), "b": np.zeros(2)}
    assert pipeline_parallel.stage_parts([{"a": np.ones(3)}, {"b": np.zeros(2)}], model) == [3, 2]
    with pytest.raises(CheckFailed, match="stage 1 has changed b"):
        pipeline_parallel.stage_parts([{"a": np.ones(3)}, {"b": np.ones(2)}], model)


def ran(order, begun=()):
    """A recording of a schedule's actions, one second each, and of actions that were begun and never done."""
    events = [Event(a.rank, "compute", a.kind, stage=a.stage, micro_batch=a.micro_batch, start_s=i, end_s=i + 1)
              for rank in range(order.world_size) for i, a in enumerate(order.of_rank(rank))]
    all_begun = [(a.rank, a.kind, a.micro_batch) for a in order.actions] + list(begun)
    events += [Event(rank, "compute", f"begin {kind}", stage=rank, micro_batch=m, start_s=0.0, end_s=0.0)
               for rank, kind, m in all_begun]
    return Trace(events, order.world_size, "measured", "recorded")


@pytest.mark.parametrize("size", [(1, 1), (1, 4), (2, 1), (3, 2), (4, 4), (4, 9)])
def test_the_right_orders_pass_at_every_size(size):
    assert pipeline_orders.one_f_one_b_order(ran(one_f_one_b(*size)), *size).actions == one_f_one_b(*size).actions
    assert pipeline_orders.gpipe_order(ran(gpipe(*size)), *size).actions == gpipe(*size).actions


def swapped(order, place, rank=0):
    """`order` with two actions of a rank that follow one another exchanged."""
    own = order.of_rank(rank)
    own[place], own[place + 1] = own[place + 1], own[place]
    others = [action for action in order.actions if action.rank != rank]
    return PipelineSchedule("swapped", order.num_stages, order.num_micro_batches, [*own, *others])


@pytest.mark.parametrize("rank, place", [(rank, place) for rank in (0, 2) for place in range(9)])
def test_exchanging_any_two_actions_of_1f1b_is_refused(rank, place):
    with pytest.raises(CheckFailed):
        pipeline_orders.one_f_one_b_order(ran(swapped(one_f_one_b(3, 5), place, rank)), 3, 5)


def test_the_place_where_1f1b_hangs_is_reported():
    done = PipelineSchedule("o", 2, 4, [Action(0, 0, 0, "F"), Action(1, 1, 0, "F")], 2)
    assert pipeline_orders.where_stuck(ran(done, [(0, "B", 0), (1, "F", 1)]), 2, 4) == (
        "rank 0 stands at B0, action 2 of its 8, which in 1F1B is F1; "
        "rank 1 stands at F1, action 2 of its 8, which in 1F1B is B0")
    assert pipeline_orders.where_stuck(ran(done, [(1, "F", 1), (1, "F", 2)]), 2, 4) == (
        "rank 0 ends after 1 of its 8 actions; rank 1 runs F1, action 2 of its 8, which in 1F1B is B0")
    assert pipeline_orders.where_stuck(ran(done), 2, 4) == (
        "rank 0 ends after 1 of its 8 actions; rank 1 ends after 1 of its 8 actions")
    assert pipeline_orders.where_stuck(ran(done, [(0, "F", 1)]), 2, 4) == "rank 1 ends after 1 of its 8 actions"
    assert pipeline_orders.where_stuck(None, 2, 4) == ""


@pytest.mark.parametrize("schedule", [gpipe(3, 4), one_f_one_b(4, 2), interleaved(4, 4)])
def test_measures_pass_when_right_and_not_otherwise(schedule):
    trace = simulate_pipeline(schedule, 1.0, 2.5, slowdown={0: 1.3})
    share, peaks = bubble(trace).share, schedule.peak_in_flight()
    assert pipeline_orders.bubble_share(np.float64(share), trace) == share
    assert pipeline_orders.peaks_in_flight(np.array(peaks), schedule) == peaks
    with pytest.raises(CheckFailed):
        pipeline_orders.bubble_share(share * (1 + 1e-5), trace)
    for rank in range(len(peaks)):
        with pytest.raises(CheckFailed, match=f"for rank {rank} of"):
            pipeline_orders.peaks_in_flight([*peaks[:rank], peaks[rank] + 1, *peaks[rank + 1:]], schedule)
    for odd in (None, "no", peaks[:-1], [0.5] * len(peaks)):
        with pytest.raises(CheckFailed, match="peak_in_flight must"):
            pipeline_orders.peaks_in_flight(odd, schedule)


def test_a_prediction_of_one_stage_has_no_bubble():
    right = {"bubble": 0.0, "gpipe": [5], "one_f_one_b": [1]}
    assert pipeline_orders.predicted_pipeline(right, 1, 5) == 0
    for wrong in (0.1, None, float("nan")):
        with pytest.raises(CheckFailed, match="the bubble of 1 stage"):
            pipeline_orders.predicted_pipeline({**right, "bubble": wrong}, 1, 5)
    assert pipeline_orders.predicted_pipeline({"bubble": 3 / 11, "gpipe": [8] * 4, "one_f_one_b": (4, 3, 2, 1)}, 4, 8) \
        == pytest.approx(pipeline_bubble(4, 8))


BEFORE = [{"a": np.ones(4)}, {"b": np.full(3, 2.0)}]
GRADIENTS = [{"a": RNG.normal(size=4), "b": RNG.normal(size=3)} for _ in range(2)]
AFTER = [{name: value - 0.1 * (GRADIENTS[0][name] + GRADIENTS[1][name]) / 2 for name, value in stage.items()}
         for stage in BEFORE]


def test_wrong_first_updates_are_reported():
    assert pipeline_parallel.first_updates(BEFORE, AFTER, GRADIENTS, 0.1, [0.5, 0.5]) > 0
    for after, complaint in ((BEFORE, "no stage's weights have changed"),
                             ([AFTER[0], BEFORE[1]], "stage 1's weights have not changed in the first step")):
        with pytest.raises(CheckFailed, match=complaint):
            pipeline_parallel.first_updates(BEFORE, after, GRADIENTS, 0.1, [0.5, 0.5])
    with pytest.raises(CheckFailed, match="stage 1: the gradient is the sum over 2 micro-batches"):
        pipeline_parallel.first_updates(BEFORE, [{name: 2 * AFTER[i][name] - own[name] for name in own}
                                      for i, own in enumerate(BEFORE)], GRADIENTS, 0.1, [0.5, 0.5])


@pytest.mark.parametrize("got, complaint", [
    (([1.0], [2.0, 3.1]), "the loss of step 2 is 3.1, which .*left over from earlier steps"),
    (([1.1], [2.0, 3.0]), "the loss of step 0 is 1.1, .*mean over the whole batch"),
    (([None], [2.0, 3.0]), "the loss of step 0 must be a number")])
def test_wrong_losses_of_steps_are_reported(got, complaint):
    pipeline_parallel.losses_of_steps(([1.0], [2.0, 3.0]), [1.0, 2.0, 3.0], 1)
    with pytest.raises(CheckFailed, match=complaint):
        pipeline_parallel.losses_of_steps(got, [1.0, 2.0, 3.0], 1)


def test_wrong_weights_at_the_end_are_reported():
    expected = {"a": np.ones(4), "b": np.full(3, 2.0)}
    assert pipeline_parallel.same_weights(BEFORE, expected) == 10
    with pytest.raises(CheckFailed, match="b of stage 1 ends with different numbers"):
        pipeline_parallel.same_weights(BEFORE, {**expected, "b": np.array([2, 2, 2 + 1e-6])})


def test_replicas_are_distinguished():
    starts = [{"a": np.full(2, float(rank)), "b": np.full(2, 10.0 + rank)} for rank in range(4)]
    right = [{"a": starts[0]["a"]}] * 2 + [{"b": starts[2]["b"]}] * 2
    pipeline_replicas.same_replicas(right, starts, 2)
    for rank, wrong, complaint in ((3, {"b": starts[1]["b"]}, "rank 3, .* has a b that is not rank 2's"),
                                   (3, {"a": starts[3]["a"]}, "holds other parameters than rank 2")):
        with pytest.raises(CheckFailed, match=complaint):
            pipeline_replicas.same_replicas([*right[:rank], wrong, *right[rank + 1:]], starts, 2)
    with pytest.raises(CheckFailed, match="has run no forward"):
        pipeline_replicas.shares_of_replicas([[], [3, 3]], 12, 2)


def sum_of_own_sizes():
    dist.init_process_group()
    dist.all_reduce(torch.ones(2 + dist.get_rank()))


@pytest.mark.slow
def test_mismatched_collectives_get_a_hint_at_the_group():
    with pytest.raises(LaunchError) as caught:
        launch(sum_of_own_sizes, 2)
    first, *calls, hint = pipeline_replicas.failure_of_replicas(caught.value).splitlines()
    assert "different sizes" in first and len(calls) == 2 and "give group=" in hint
    assert pipeline_replicas.failure_of_replicas(LaunchError("rank 0 failed")) == "rank 0 failed"


def test_actions_that_are_not_due_are_refused():
    waiting = set()
    for kind, micro_batch in [("F", 0), ("F", 1), ("B", 1), ("F", 2), ("B", 0), ("B", 2)]:
        pipeline_parallel.next_action(kind, micro_batch, waiting, 3)
    assert not waiting
    with pytest.raises(CheckFailed, match=r"backward\(0\) has no forward"):
        pipeline_parallel.next_action("B", 0, waiting, 3)


@pytest.mark.parametrize("rank, stage, complaint", [
    (None, 2, "stage 2 has no stage after"),
    (3, 1, "rank 3 is not next to stage 1: the stage before is on rank 0, the stage after on rank 4"),
    (torch.ones(2), 1, "a rank is a number, not a Tensor: the order of the arguments")])
def test_only_the_stages_next_to_a_stage_are_its_neighbours(rank, stage, complaint):
    for right in (0, 4):
        pipeline_parallel.neighbour(right, 1, 0, 4)
    with pytest.raises(CheckFailed, match=complaint):
        pipeline_parallel.neighbour(rank, stage, 0, 4)
    with pytest.raises(CheckFailed, match="stage 0 is the only stage"):
        pipeline_parallel.neighbour(None, 0, None, None)


def test_stages_called_out_of_order_are_reported():
    tokens, activations = torch.zeros(2, 3, dtype=torch.long), torch.zeros(2, 3, 4)
    pipeline_parallel.input_of_stage(tokens, 0)
    pipeline_parallel.input_of_stage(activations, 1)
    with pytest.raises(CheckFailed, match="stage 0 gets activations"):
        pipeline_parallel.input_of_stage(activations, 0)
    with pytest.raises(CheckFailed, match="stage 2 gets tokens, but it takes what stage 1 returns"):
        pipeline_parallel.input_of_stage(tokens, 2)


# Meshes

MESH = Mesh(AXES, (2, 2, 2))
MESH_SHAPES = {"first": (4, 6), "norm": (6,), "last": (6, 4)}
MESH_CUT = {"first": 0, "norm": None, "last": 1}
MESH_STAGES = {0: ["first", "norm"], 1: ["last"]}
MESH_SINGLE = [{name: RNG.normal(size=shape) for name, shape in MESH_SHAPES.items()} for _ in range(8)]  # sequences
MESH_WEIGHTS = {name: RNG.normal(size=shape) for name, shape in MESH_SHAPES.items()}


def held_on_mesh(whole=MESH_WEIGHTS, place=lambda rank: rank):
    """What each rank holds of `whole`, cut as for the rank `place(rank)`."""
    return [{name: cut(whole[name], name, place(rank), MESH, MESH_CUT)
             for name in MESH_STAGES[MESH.coordinates(rank)["pp"]]} for rank in range(8)]


def gradients(weights=lambda rank, name: np.full(8, 1 / 8)):
    """What each rank holds with these weights of the eight sequences' gradients."""
    return [{name: cut(np.tensordot(weights(rank, name), [own[name] for own in MESH_SINGLE], axes=1), name, rank, MESH,
                       MESH_CUT) for name in MESH_STAGES[MESH.coordinates(rank)["pp"]]} for rank in range(8)]


def times(factor):
    return gradients(lambda rank, name: np.full(8, factor / 8))


def check(found):
    return hybrid.mesh_gradients(found, MESH_SINGLE, MESH, MESH_CUT, 4)


def test_the_gradient_of_the_batch_passes():
    mean = {name: np.mean([own[name] for own in MESH_SINGLE], axis=0) for name in MESH_SHAPES}
    assert check(gradients()) == pytest.approx(sum(np.abs(value).sum() for value in mean.values()))


@pytest.mark.parametrize("seed", range(12))
def test_no_other_gradient_passes(seed):
    rng = np.random.default_rng(seed)
    rank, by = int(rng.integers(8)), 10.0 ** -rng.integers(1, 7)
    found = gradients(lambda own, name: np.full(8, 1 / 8) * (1 + by * (own == rank)))
    with pytest.raises(CheckFailed, match=f"rank {rank} has a wrong gradient"):
        check(found)


@pytest.mark.parametrize("found, complaint", [
    (times(4), "scale each loss by 1/4"),
    (times(2), "it is the sum over the 2 replicas"),
    (times(1 / 4), "twice"),
    (times(8), "divide by both"),
    (times(0), "it is 0"),
    (gradients(lambda rank, name: np.full(8, 2 / 8 if name == "norm" else 1 / 8)), "has already summed it"),
    (gradients(lambda rank, name: np.repeat([1 / 4, 0], 4)), "is in no rank's gradient"),
    (gradients(lambda rank, name: np.repeat(np.eye(2)[MESH.coordinates(rank)["dp"]] / 4, 4)), "over the dp group"),
    ([dict.fromkeys(own) for own in gradients()], "no gradient for any parameter"),
])
def test_a_wrong_gradient_is_identified(found, complaint):
    with pytest.raises(CheckFailed, match=complaint):
        check(found)


def test_a_sum_over_tp_is_distinguished_from_one_over_dp():
    local = gradients(lambda rank, name: np.repeat(np.eye(2)[MESH.coordinates(rank)["dp"]] / 4, 4))
    summed = [{name: sum(local[other][name] for other in MESH.group_of(rank, "tp")) / 2 for name in own}
              for rank, own in enumerate(local)]
    with pytest.raises(CheckFailed, match="0.5 times a sum over tp, .* average over dp alone"):
        check(summed)


def test_ranks_that_scale_by_different_factors_are_reported():
    found = gradients(lambda rank, name: np.full(8, (0.3 + 0.1 * (rank % 2)) / 8))
    with pytest.raises(CheckFailed, match="ranks 6, 7 of one tp group scale theirs by 0.3, 0.4"):
        check(found)
    with pytest.raises(CheckFailed, match="what is it scaled by, and how often"):
        check(times(0.3))


def test_zeros_in_different_places_are_masks_drawn_independently():
    whole, other = RNG.normal(size=(4, 6)), RNG.normal(size=(4, 6))
    mask = RNG.random((4, 6)) < 0.5
    hybrid.drawn_alike([whole * mask, whole * mask, other, other] * 2, MESH)
    hybrid.drawn_alike([whole, other] * 4, MESH)  # wrong, but not for a mask
    hybrid.drawn_alike([None, whole] * 4, MESH)
    with pytest.raises(CheckFailed, match="ranks 2 and 3 of one tp group have zeros in 24 different places"):
        hybrid.drawn_alike([whole, whole, other * mask, other * ~mask] * 2, MESH)


def test_sizes_belong_to_axes_in_any_order():
    mesh = Mesh(AXES, (4, 1, 2), ranks_per_node=4)
    messages = [("pp", 0, 2, 8.0), ("pp", 2, 4, 8.0), ("tp", 0, 1, 4.0)]
    total, want = {"pp": 16.0, "dp": 0.0, "tp": 4.0}, {"pp": 0.0, "dp": 0.0, "tp": 4.0}
    arguments = ("tp", "dp", "pp"), want, total, {}, messages, mesh
    assert meshes.crossing(want, *arguments) == 4
    with pytest.raises(CheckFailed, match="each size belongs to its axis"):
        meshes.crossing(dict.fromkeys(AXES, 0.0), *arguments)  # as if tp had 4 ranks and pp 2
    with pytest.raises(CheckFailed, match="tp has 4 bytes that cross between nodes, not 5"):
        meshes.crossing({**want, "tp": 5}, *arguments)


@pytest.mark.parametrize("message, hint", [
    ("AttributeError: 'Identity' object has no attribute 'attention'", "cut the blocks first"),
    ("IndexError: tuple index out of range", "counts in the world"),
])
def test_an_error_of_a_rank_gets_a_hint(message, hint):
    assert hint in hybrid.mesh_failure(RankError(message)) and hybrid.mesh_failure(RankError("other")) == "other"


@pytest.mark.parametrize("parts, complaint", [
    (held_on_mesh(place=lambda rank: rank ^ 1), "is the part that belongs to rank"),
    (held_on_mesh({name: value + 1 for name, value in MESH_WEIGHTS.items()}), "is not a part of rank 0's"),
    ([own | {"last": MESH_WEIGHTS["last"]} for own in held_on_mesh()], "stages 0, 1 hold last"),
    ([{name: MESH_WEIGHTS[name] for name in own} for own in held_on_mesh()], "is whole, but its part has"),
    ([{name: value for name, value in own.items() if name != "norm"} for own in held_on_mesh()], "no rank holds norm"),
])
def test_the_rank_that_a_wrong_part_belongs_to_is_named(parts, complaint):
    drawn = [MESH_WEIGHTS] + [{name: RNG.normal(size=shape) for name, shape in MESH_SHAPES.items()} for _ in range(7)]
    hybrid.parts_on_mesh(held_on_mesh(), drawn, MESH, MESH_CUT)
    with pytest.raises(CheckFailed, match=complaint):
        hybrid.parts_on_mesh(parts, drawn, MESH, MESH_CUT)


def test_calls_are_noted_and_imports_are_not(monkeypatch, tmp_path):
    import book.pipelines

    with hybrid_steps.calls_into(["book/mesh", "book/pipelines"]) as called:
        MESH.coordinates(0)
    assert called == {"book/mesh"} and book.pipelines
    (tmp_path / "own_parts.py").write_text("def part(): pass\n\n\npart()\n")
    monkeypatch.syspath_prepend(tmp_path)
    for calls in (False, True):
        with hybrid_steps.calls_into(["own_parts"]) as found:
            import own_parts
            if calls:
                own_parts.part()
        assert found == ({"own_parts"} if calls else set())
        monkeypatch.delitem(sys.modules, "own_parts")
    hybrid_steps.by_hand([set()] * 8)
    with pytest.raises(CheckFailed, match="rank 1 calls functions of book.mesh"):
        hybrid_steps.by_hand([set(), called])
    with pytest.raises(CheckFailed, match="calls functions of book.mesh"), hybrid_steps.calls_into(["book/mesh"]):
        MESH.coordinates(99)
    with pytest.raises(KeyError), hybrid_steps.calls_into(["book/mesh"]):
        {}["nothing of these places"]


@pytest.mark.parametrize("losses, complaint", [
    ([1.0, 1.0, 1.0, 1.0, 1.5, 1.5, 2.5, 2.5], "only the last stage"),
    ([None] * 8, "returns no loss"),
    ([None] * 4 + [1.5, 1.6, 2.5, 2.5], "ranks 4 and 5 of one tp group"),
    ([None] * 4 + [6.0, 6.0, 10.0, 10.0], "the sum over the micro-batches"),
    ([None] * 4 + [2.0, 2.0, 2.0, 2.0], "the mean over the replicas, but each"),
])
def test_a_wrong_first_loss_is_reported(losses, complaint):
    sequences = [1, 1, 2, 2, 2, 2, 3, 3]
    hybrid_steps.first_losses([None] * 4 + [1.5, 1.5, 2.5, 2.5], sequences, MESH, 4)
    with pytest.raises(CheckFailed, match=complaint):
        hybrid_steps.first_losses(losses, sequences, MESH, 4)


def test_losses_must_continue_as_in_one_process():
    rows = [[None] * 3] * 4 + [[3.0, 2.0, 1.0]] * 2 + [[5.0, 4.0, 3.0]] * 2
    assert hybrid_steps.mesh_losses(rows, [4.0, 3.0, 2.0], MESH) == 2.0
    with pytest.raises(CheckFailed, match="the loss of step 1 is 3, but one process has 3.1"):
        hybrid_steps.mesh_losses(rows, [4.0, 3.1, 2.0], MESH)
    with pytest.raises(CheckFailed, match="which weights does each"):
        hybrid_steps.mesh_losses(rows, [4.5, 3.0, 2.0], MESH)
    assert hybrid_steps.resumed([row[1:] for row in rows], [4.0, 3.0, 2.0], 1, MESH) == 2.0
    with pytest.raises(CheckFailed, match="weights are not those that were saved"):
        hybrid_steps.resumed([row[1:] for row in rows], [4.0, 3.1, 2.0], 1, MESH)
    with pytest.raises(CheckFailed, match="the optimizer's state did not"):
        hybrid_steps.resumed([row[1:] for row in rows], [4.0, 3.0, 2.1], 1, MESH)


def test_places_and_groups_of_any_order_pass_and_no_others():
    mesh = Mesh(AXES, (2, 3, 4))
    meshes.places([tuple(mesh.coordinates(rank).values()) for rank in range(24)], mesh)
    assert meshes.groups_of_axis("dp", [list(group) for group in reversed(mesh.groups("dp"))], mesh) == 8
    for wrong, complaint in [([group[::-1] for group in mesh.groups("dp")], "not in the order"),
                             ([(0, 1)], "must be in exactly one group"), (None, "must be a list"),
                             ([*mesh.groups("dp")[:-2], (15, 18, 22), (14, 19, 23)], "the ranks 14, 19, 23 differ in")]:
        with pytest.raises(CheckFailed, match=complaint):
            meshes.groups_of_axis("dp", wrong, mesh)


def test_a_group_of_ranks_that_do_not_exist_is_refused():
    meshes.same_group([None] * 4)
    meshes.same_group([[0, 3]] * 4)
    for strange in (4, -1, 0.5):
        with pytest.raises(CheckFailed, match=f"rank 1 makes a group with rank {strange}, but .* from 0 to 3"):
            meshes.same_group([[0, 1], [1, strange], [0, 1], [0, 1]])


# Plans

CONFIG = SimpleNamespace(width=24, vocab_size=80, context=8, num_layers=4, num_heads=4, num_parameters=33_000)
LAYOUTS = [Layout(1, 1, 4), Layout(4, 1, 8), Layout(1, 8, 1), Layout(1, 16, 1), Layout(2, 8, 2), Layout(2, 2, 16),
           Layout(4, 8, 4, zero_stage=1), Layout(8, 4, 2, recompute="full"), Layout(3, 2, 8, micro_batch_size=2)]
SMALL = Transformer(num_layers=24, width=2304, num_heads=24, num_tokens=2048, vocab_size=51200)


def a_step(layout, num_micro_batches, overlap=False):
    model = Transformer(num_layers=8 * layout.pp, num_heads=4 * layout.tp, width=3072, num_tokens=1024,
                        vocab_size=51200)
    cluster = Cluster(num_gpus=layout.num_gpus, memory_bytes=80e9, flops_per_s=2e14, memory_bytes_per_s=float("inf"),
                      inside_bytes_per_s=2e11, across_bytes_per_s=2e10, efficiency=1.0, num_passes=0)
    batch = layout.dp * layout.micro_batch_size * num_micro_batches
    return cluster, estimate(model, cluster, layout, batch, overlap=overlap)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_slips_of_a_step_s_seconds_are_refused_with_a_sentence(layout, overlap):
    cluster, cost = a_step(layout, 6, overlap)
    assert planner.step_seconds(cost.step_s, cost, layout, cluster, 6) == cost.step_s
    for value, why in _time_slips(cost, layout, cluster, 6):
        if value == pytest.approx(cost.step_s, rel=2e-6):
            continue  # here the mistake changes nothing
        with pytest.raises(CheckFailed) as caught:
            planner.step_seconds(value, cost, layout, cluster, 6)
        assert "times what it should be" not in str(caught.value), why


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_slips_of_sent_bytes_are_refused_with_a_sentence(layout):
    want = {"pp": 4096.0 * (layout.pp > 1), "dp": 5e4 * (layout.dp > 1), "tp": 9216.0 * (layout.tp > 1)}
    slips = planner.traffic_slips(want, CONFIG, layout, 0, 3)
    assert {axis: len(found) for axis, found in slips.items()} == {
        "pp": len(list(_pp_slips(1, CONFIG, layout, 3))), "dp": len(list(_dp_slips(1, layout, 3))),
        "tp": len(list(_tp_slips(1, CONFIG, layout, 0, 3)))}
    hybrid_steps.traffic_by_axis(want, want, 0, slips)
    for axis in (axis for axis in want if want[axis]):
        with pytest.raises(CheckFailed, match="counts numbers, not bytes|are bytes already"):
            hybrid_steps.traffic_by_axis(want | {axis: want[axis] / 4}, want, 0, {axis: slips[axis][-1:]} | {
                other: [] for other in want if other != axis})


def test_what_a_rank_holds_is_compared_part_by_part():
    layout = Layout(2, 2, 1, zero_stage=1)
    state = StateBytes(4000.0, 4000.0, 4000.0)
    held = {"parameters": 4000, "gradients": 4000, "optimizer": 4000, "activations": 600}
    assert planner.held_on_rank(held, state, 600.0, CONFIG, layout, 0, 4) == 12600
    assert planner.held_on_rank(held | {"activations": 0}, state, None, CONFIG, layout, 0, 4) == 12000
    for name, value, said in [("optimizer", 8000, "from ZeRO stage 1 on, a rank keeps only 1/2"),
                              ("gradients", 2000, "share them out only from ZeRO stage 2 on"),
                              ("parameters", 1000, "each has 4 bytes"),
                              ("activations", 300, "dp does not divide it further"),
                              ("activations", 1200, "that is all 4 micro-batches")]:
        with pytest.raises(CheckFailed, match=said):
            planner.held_on_rank(held | {name: value}, state, 600.0, CONFIG, layout, 0, 4)
    with pytest.raises(CheckFailed, match="must return a dict"):
        planner.held_on_rank({"parameters": 1}, state, None, CONFIG, layout, 0, 4)


def a_case(num_gpus=24, memory_bytes=40e9, batch=48):
    cluster = dataclasses.replace(A100, num_gpus=num_gpus, memory_bytes=memory_bytes)

    @functools.cache
    def cost(layout):
        return estimate(SMALL, cluster, layout, batch)

    return SMALL, cluster, batch, lambda layout: cost(layout).memory_bytes, lambda layout: cost(layout).step_s


@pytest.mark.slow
@pytest.mark.parametrize("num_gpus, memory_bytes", [(8, 80e9), (24, 40e9), (12, 24e9)])
def test_only_the_best_layout_that_fits_is_taken(num_gpus, memory_bytes):
    case = a_case(num_gpus, memory_bytes)
    model, cluster, batch, memory, seconds = case
    every = list(_layouts(model, num_gpus, batch))
    fitting = [layout for layout in every if memory(layout) <= cluster.usable_share * memory_bytes]
    first = min(fitting, key=seconds)
    best_s = seconds(first)
    for layout in every:
        if layout in fitting and seconds(layout) == best_s:
            assert best_layout.chosen_layout(layout, *case) == (first, best_s)
        else:
            with pytest.raises(CheckFailed, match="which fits too|GB are usable"):
                best_layout.chosen_layout(layout, *case)
    least = min((layout for layout in fitting if seconds(layout) <= 1.1 * best_s), key=memory)
    assert best_layout.chosen_layout(least, *case, slack=0.1)[0] == least


@pytest.mark.slow
def test_no_layout_is_the_answer_where_none_fits():
    nothing_fits = a_case(memory_bytes=1e9)
    assert best_layout.chosen_layout(None, *nothing_fits) == (None, 0.0)
    with pytest.raises(CheckFailed, match="no layout fits, but you chose"):
        best_layout.chosen_layout(Layout(1, 24, 1), *nothing_fits)
    with pytest.raises(CheckFailed, match="you found no layout that fits, but there are"):
        best_layout.chosen_layout(None, *a_case())


@pytest.mark.parametrize("wrong, said", [
    (Layout(1, 1, 16), "it has 16 GPUs"), (Layout(1, 24, 1, micro_batch_size=4), "into whole micro-batches of 4"),
    (Layout(1, 24, 1, zero_stage=3), "zero_stage 0 or 1"),
])
@pytest.mark.slow
def test_layouts_outside_the_exercise_are_refused(wrong, said):
    with pytest.raises(CheckFailed, match=said):
        best_layout.chosen_layout(wrong, *a_case())
