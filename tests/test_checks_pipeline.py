"""Checks on pipelines, with inputs that no answer gives: each mistake is named, and nothing wrong passes."""
import numpy as np
import pytest
import torch
import torch.distributed as dist

from book.checks import pipeline_orders, pipeline_parallel
from book.checks.verdict import CheckFailed
from book.cost import pipeline_bubble
from book.launch import LaunchError, launch
from book.pipelines import gpipe, interleaved, one_f_one_b
from book.replay import bubble
from book.schedule import Action, PipelineSchedule
from book.simulate import simulate_pipeline
from book.trace import Event, Trace

RNG = np.random.default_rng(0)
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
    (held(4 * MEAN), "stage 2: the gradient is the sum over 4 micro-batches"),
    (held(MEAN / 4), "stage 2: the gradient is divided by the 4 micro-batches twice"),
    (held(MEAN * 4 / 3), "divided by 3, the number of stages, but it is a mean over 4 micro-batches"),
    (held(MEAN * 7), "the gradient is 7 times what it should be"),
    (held(MEAN * [[1], [4], [1]]), "stage 1: the gradient is the sum over 4 micro-batches"),
    (held(MEAN * [1, 0, 1, 0]), "micro-batch 1, 3 of 4 has no part in the gradient"),
    (held(0 * MEAN), "its gradients are 0: were they cleared"),
    (held(MEAN * [1, 2, 1, 0.5]), "its micro-batches weigh 0.25, 0.5, 0.25, 0.125, but should weigh 0.25"),
    (with_none("head"), "stage 2 has no gradient at all: is backward called on the loss"),
    (with_none("embedding"), "stage 0 has no gradient at all: what came back from stage 1"),
    (with_none("block.bias"), "stage 1 has no gradient for block.bias, though it has others"),
    ([{name: gradient * np.nan for name, gradient in stage.items()} for stage in held(MEAN)],
     "stage 2 holds nan in its gradients"),
    ([held(MEAN)[0], {**held(MEAN)[1], "block.bias": np.ones(4)}, held(MEAN)[2]],
     "stage 1's gradients are not a sum of its micro-batches' gradients, but those of stage 2 are right"),
    ([*held(MEAN)[:2], {"head": np.ones((4, 5))}], "stage 2, the last, has gradients that are not a sum"),
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


def test_a_stage_keeps_the_blocks_that_all_runs_of_the_lab_give_it():
    one, two, three = ({f"blocks.{i}.weight": np.full(2, i)} for i in range(3))
    assert pipeline_parallel.stage_parts([one, two | three], one | two | three, num_blocks=3) == [2, 4]
    assert pipeline_parallel.stage_parts([one | two, three], one | two | three) == [4, 2]
    with pytest.raises(CheckFailed, match="with 2 stages stage 0 keeps block 0, 1, but should keep 0: the blocks"):
        pipeline_parallel.stage_parts([one | two, three], one | two | three, num_blocks=3)


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


@pytest.mark.parametrize("order, size, complaint", [
    (one_f_one_b(2, 3), (2, 3), "rank 0 runs F2 of stage 0 after its first backward"),
    (PipelineSchedule("o", 2, 1, [Action(0, 0, 0, "F")], 2), (2, 1),
     "not complete: pipeline: nobody runs B0 or I0 of stage 0"),
    (gpipe(2, 4), (2, 3), "micro_batch 3, it must be 0 to 2"),
])
def test_other_orders_are_not_gpipe(order, size, complaint):
    with pytest.raises(CheckFailed, match=complaint):
        pipeline_orders.gpipe_order(ran(order), *size)


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


def test_excess_activations_are_reported_even_if_the_order_is_right():
    order = one_f_one_b(2, 4)
    assert pipeline_orders.activations_kept([2.0, 1.0], order) == 3.0
    with pytest.raises(CheckFailed, match="rank 1 has the right order, but keeps the activations of 4 micro-batches"):
        pipeline_orders.activations_kept([2.0, 4.0], order)


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
    (([1.0], [2.0]), "1 losses are returned for 2 steps"), ((None, [2.0, 3.0]), "no losses are returned for 1 step"),
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
    pipeline_parallel.same_replicas(right, starts, 2)
    for rank, wrong, complaint in ((1, {"a": starts[1]["a"]}, "rank 1, replica 1's stage 0, starts with its own a"),
                                   (3, {"b": starts[1]["b"]}, "rank 3, .* has a b that is not rank 2's"),
                                   (3, {"a": starts[3]["a"]}, "holds other parameters than rank 2")):
        with pytest.raises(CheckFailed, match=complaint):
            pipeline_parallel.same_replicas([*right[:rank], wrong, *right[rank + 1:]], starts, 2)
    for rows, complaint in (([[3, 3], [6], [3, 3], [6]], "in one forward"), ([[], [3, 3]], "has run no forward"),
                            ([[3, 3], [12]], "rank 1 puts 12 sequences")):
        with pytest.raises(CheckFailed, match=complaint):
            pipeline_parallel.shares_of_replicas(rows, 12, 2)


def test_kept_micro_batches_and_wrong_senders_are_reported():
    pipeline_parallel.nothing_kept([0, 0])
    with pytest.raises(CheckFailed, match="stage 1 still has 2 of its micro-batches"):
        pipeline_parallel.nothing_kept([0, 2])
    pipeline_parallel.from_stage_to_stage([["worker0"] * 2, ["worker1"] * 2, ["worker2"] * 2])
    for owner, who in (("worker0", "the driver"), ("worker1", "worker1")):
        with pytest.raises(CheckFailed, match=f"stage 2 fetches an input from {who}, not from stage 1"):
            pipeline_parallel.from_stage_to_stage([["worker0"], ["worker1"], ["worker2", owner]])


def sum_of_own_sizes():
    dist.init_process_group()
    dist.all_reduce(torch.ones(2 + dist.get_rank()))


def test_mismatched_collectives_get_a_hint_at_the_group():
    with pytest.raises(LaunchError) as caught:
        launch(sum_of_own_sizes, 2)
    first, *calls, hint = pipeline_parallel.failure_of_replicas(caught.value).splitlines()
    assert "different sizes" in first and len(calls) == 2 and "give group=" in hint
    assert pipeline_parallel.failure_of_replicas(LaunchError("rank 0 failed")) == "rank 0 failed"


def test_actions_that_are_not_due_are_refused():
    waiting = set()
    for kind, micro_batch in [("F", 0), ("F", 1), ("B", 1), ("F", 2), ("B", 0), ("B", 2)]:
        pipeline_parallel.next_action(kind, micro_batch, waiting, 3)
    assert not waiting
    for kind, micro_batch, complaint in [("F", 3, "no micro-batch 3 to run forward: the 3"), ("B", -1, "0 to 2"),
                                         ("F", None, "no micro-batch None"), ("B", 0, r"backward\(0\) has no forward")]:
        with pytest.raises(CheckFailed, match=complaint):
            pipeline_parallel.next_action(kind, micro_batch, waiting, 3)


@pytest.mark.parametrize("rank, stage, complaint", [
    (None, 0, "stage 0 has no stage before"), (None, 2, "stage 2 has no stage after"),
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
