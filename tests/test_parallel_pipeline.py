"""Pipelines: their schedules, and models trained on them."""
from __future__ import annotations

import copy
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings, strategies as st
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import get_schedule_class
from torch.utils.flop_counter import FlopCounterMode

from book.cost import Link, pipeline_bubble
from book.launch import launch, rank_device
from book.parallel.data import broadcast_state
from book.parallel.model import GPT, GPTConfig
from book.parallel.pipeline import Mail, run_one_f_one_b, run_pipeline, stages_here
from book.parallel.split_backward import SplitBackward
from book.parallel.stage import GPTStage
from book.pipelines import gpipe, interleaved, one_f_one_b, zero_bubble
from book.record.activations import held_for_backward, saved_for_backward
from book.replay import bubble, pipeline_order
from book.schedule import Action, PipelineSchedule, ScheduleError
from book.simulate import simulate_pipeline
from tests.by_value import sent_by_value


sent_by_value(__name__)

FREE = Link(0.0, 1.0)
CONFIG = GPTConfig(vocab_size=11, context=6, num_layers=6, num_heads=2, width=8, dtype=torch.float64)
SIZE, TOLERANCE = 2, 1e-12  # sequences in a micro-batch


def micro_batches(number, device):
    """Inputs and targets, the same on every rank."""
    generator = torch.Generator().manual_seed(5)
    return torch.randint(CONFIG.vocab_size, (2, number, SIZE, CONFIG.context), generator=generator).to(device)


def a_model(device, config=CONFIG):
    """A model from this rank's own seed, and then rank 0's weights."""
    gpt = GPT(config).to(device)
    drawn = gpt.head.weight[0, 0].item()
    broadcast_state(gpt)
    return gpt, drawn


def like(device):
    return torch.empty(SIZE, CONFIG.context, CONFIG.width, dtype=CONFIG.dtype, device=device)


def differences(gpt, parts, loss, inputs, targets):
    """How far the loss (None on other ranks) and the gradients are from those of one process with the whole batch."""
    alone = copy.deepcopy(gpt)
    wanted = GPT.loss(alone(inputs.flatten(0, 1)), targets.flatten(0, 1))
    wanted.backward()
    whole = dict(alone.named_parameters())
    gradients = [(p.grad - whole[name].grad).abs().max().item() for part in parts
                 for name, p in part.model.named_parameters()]
    return None if loss is None else abs(loss - wanted).item(), max(gradients), len(gradients)


def by_the_book(schedule):
    """Two equal steps of `schedule`: the second adds only its own gradients."""
    device = rank_device()
    dist.init_process_group()
    gpt, drawn = a_model(device)
    inputs, targets = micro_batches(schedule.num_micro_batches, device)
    stages, mail = stages_here(schedule, gpt), Mail(schedule, like(device))
    for _ in range(2):
        for stage in stages.values():
            stage.module.zero_grad()
        loss = run_pipeline(schedule, stages, mail, inputs if 0 in stages else None,
                            targets if schedule.num_stages - 1 in stages else None)
    left = [stage.kept for stage in stages.values()], mail.here, mail.sent
    return drawn, differences(gpt, [stage.module for stage in stages.values()], loss, inputs, targets), left


@pytest.mark.slow
@pytest.mark.parametrize("schedule", [
    gpipe(3, 4), one_f_one_b(4, 2), interleaved(6, 2, 3), zero_bubble(4, 5),
    *(pytest.param(schedule, marks=pytest.mark.slow) for schedule in (
        gpipe(1, 3), one_f_one_b(2, 5), one_f_one_b(4, 6), interleaved(4, 4), interleaved(6, 3), interleaved(2, 2),
        zero_bubble(2, 3), zero_bubble(6, 2)))],
    ids=lambda schedule: f"{schedule.name}-{schedule.num_stages}-{schedule.num_micro_batches}")
def test_a_step_equals_one_process_in_the_order_of_the_schedule(schedule):
    run = launch(by_the_book, schedule.world_size, schedule, record=True)
    assert len({drawn for drawn, _, _ in run}) == schedule.world_size
    found = [difference for _, difference, _ in run]
    assert sum(count for _, _, count in found) == len(list(GPT(CONFIG).parameters()))
    assert [loss for loss, _, _ in found if loss is not None] == [pytest.approx(0, abs=TOLERANCE)]
    assert max(gradient for _, gradient, _ in found) < TOLERANCE
    assert all(not any(kept) and not here and not sent for _, _, (kept, here, sent) in run)
    for step in (0, 1):
        order = pipeline_order(run.trace, step)
        assert order.actions == schedule.actions and order.peak_in_flight() == schedule.peak_in_flight()


@pytest.mark.slow
@pytest.mark.parametrize("schedule", [
    *(pytest.param(schedule, marks=pytest.mark.slow)
      for schedule in (gpipe(3, 4), one_f_one_b(3, 4), interleaved(4, 4))),
    zero_bubble(4, 3)],
                         ids=lambda schedule: schedule.name)
def test_every_output_and_gradient_between_ranks_is_one_message(schedule):
    trace = launch(by_the_book, schedule.world_size, schedule, record=True).trace
    num_bytes = SIZE * CONFIG.context * CONFIG.width * 8
    between = sum(schedule.rank_of(stage) != schedule.rank_of(stage + 1) for stage in range(schedule.num_stages - 1))
    sends = [event for event in trace.of_kind("send") if event.num_bytes]
    assert len(sends) == 2 * 2 * between * schedule.num_micro_batches  # two steps, both ways
    assert {event.num_bytes for event in sends} == {num_bytes}
    planned = Counter((e.rank, e.peer) for e in simulate_pipeline(schedule, 1, 2, link=FREE).of_kind("send"))
    assert Counter((event.rank, event.peer) for event in sends) == {pair: 2 * count for pair, count in planned.items()}


def by_torch(name, schedule):
    device = rank_device()
    dist.init_process_group()
    gpt, drawn = a_model(device)
    inputs, targets = micro_batches(schedule.num_micro_batches, device)
    own = [number for number in range(schedule.num_stages) if schedule.rank_of(number) == dist.get_rank()]
    parts = [GPTStage(copy.deepcopy(gpt), number, schedule.num_stages) for number in own]
    stages = [PipelineStage(part, number, schedule.num_stages, device) for part, number in zip(parts, own)]
    runs = get_schedule_class(name)(stages if len(own) > 1 else stages[0], schedule.num_micro_batches, loss_fn=GPT.loss)
    losses, first, last = [], 0 in own, schedule.num_stages - 1 in own
    runs.step(*([inputs.flatten(0, 1)] if first else []), target=targets.flatten(0, 1) if last else None, losses=losses)
    return drawn, differences(gpt, parts, torch.stack(losses).mean() if last else None, inputs, targets)


@pytest.mark.parametrize(("name", "schedule"), [
    ("GPipe", gpipe(3, 4)), ("1F1B", one_f_one_b(3, 4)), ("Interleaved1F1B", interleaved(4, 4)),
    ("ZBVZeroBubble", zero_bubble(4, 4))])
@pytest.mark.slow
def test_torchs_schedules_equal_one_process_too(name, schedule):
    run = launch(by_torch, schedule.world_size, name, schedule)
    found = [difference for _, difference in run]
    assert [loss for loss, _, _ in found if loss is not None] == [pytest.approx(0, abs=TOLERANCE)]
    assert max(gradient for _, gradient, _ in found) < TOLERANCE


def by_hand(num_micro_batches):
    device = rank_device()
    dist.init_process_group()
    gpt, drawn = a_model(device)
    inputs, targets = micro_batches(num_micro_batches, device)
    (stage,) = stages_here(one_f_one_b(dist.get_world_size(), num_micro_batches), gpt).values()
    loss = run_one_f_one_b(stage, like(device), dist.new_group(), dist.new_group(), inputs, targets)
    return drawn, differences(gpt, [stage.module], loss, inputs, targets)


@pytest.mark.slow
@pytest.mark.parametrize(("num_stages", "num_micro_batches"), [
    *(pytest.param(*sizes, marks=pytest.mark.slow) for sizes in ((1, 2), (2, 5), (4, 2))), (3, 4)])
def test_1f1b_written_out_follows_the_schedule(num_stages, num_micro_batches):
    run = launch(by_hand, num_stages, num_micro_batches, record=True)
    found = [difference for _, difference in run]
    assert [loss for loss, _, _ in found if loss is not None] == [pytest.approx(0, abs=TOLERANCE)]
    assert max(gradient for _, gradient, _ in found) < TOLERANCE
    assert pipeline_order(run.trace).actions == one_f_one_b(num_stages, num_micro_batches).actions


def open_sends(num_micro_batches):
    """The most sends that 1F1B written out has started but not waited for, and how many are left at its end."""
    device = rank_device()
    dist.init_process_group()
    gpt, _ = a_model(device)
    inputs, targets = micro_batches(num_micro_batches, device)
    (stage,) = stages_here(one_f_one_b(dist.get_world_size(), num_micro_batches), gpt).values()
    begun, most, isend = set(), [0], dist.isend

    class Request:
        def __init__(self, *args, **kwargs):
            self.request = isend(*args, **kwargs)
            begun.add(self)
            most.append(len(begun))

        def wait(self):
            begun.discard(self)
            return self.request.wait()

    dist.isend = Request
    run_one_f_one_b(stage, like(device), dist.new_group(), dist.new_group(), inputs, targets)
    return max(most), len(begun)


@pytest.mark.slow
@pytest.mark.parametrize("num_micro_batches", [pytest.param(2, marks=pytest.mark.slow), 8])
def test_1f1b_written_out_keeps_one_sent_tensor_each_way(num_micro_batches):
    assert list(launch(open_sends, 3, num_micro_batches)) == [(1, 0), (2, 0), (1, 0)]


def two_pipelines():
    """Ranks 0 and 3 are one pipeline, 2 and 1 another: the loss of each, on the last stage's rank."""
    device = rank_device()
    dist.init_process_group()
    gpt, _ = a_model(device)
    ranks = (0, 3) if dist.get_rank() in (0, 3) else (2, 1)
    inputs, targets = micro_batches(3, device)
    schedule = interleaved(4, 4) if ranks == (0, 3) else zero_bubble(4, 4)
    inputs, targets = torch.cat([inputs, inputs[:1]]), torch.cat([targets, targets[:1]])
    stages = stages_here(schedule, gpt, ranks.index(dist.get_rank()))
    loss = run_pipeline(schedule, stages, Mail(schedule, like(device), ranks), inputs, targets)
    return differences(gpt, [stage.module for stage in stages.values()], loss, inputs, targets)


@pytest.mark.slow
def test_several_pipelines_run_side_by_side():
    run = launch(two_pipelines, 4, record=True)
    assert [loss is None for loss, _, _ in run] == [True, True, False, False]
    assert all(gradient < TOLERANCE and (loss or 0) < TOLERANCE for loss, gradient, _ in run)
    assert pipeline_order(run.trace, ranks=(0, 3)).actions == interleaved(4, 4).actions
    assert pipeline_order(run.trace, ranks=(2, 1)).actions == zero_bubble(4, 4).actions


def with_dropout(schedule):
    """Every rank draws dropout from its own seed; one process does the same, with all ranks' generators in turn."""
    dist.init_process_group("gloo")
    gpt, _ = a_model(torch.device("cpu"), replace(CONFIG, dropout=0.3))
    inputs, targets = micro_batches(schedule.num_micro_batches, torch.device("cpu"))
    stages, mail = stages_here(schedule, gpt), Mail(schedule, like(torch.device("cpu")))
    torch.manual_seed(dist.get_rank())
    run_pipeline(schedule, stages, mail, inputs, targets)
    own = {name: p.grad for stage in stages.values() for name, p in stage.module.model.named_parameters()}
    states = [torch.Generator().manual_seed(rank).get_state() for rank in range(schedule.world_size)]
    parts = [GPTStage(copy.deepcopy(gpt), number, schedule.num_stages) for number in range(schedule.num_stages)]
    outputs = {(-1, m): x for m, x in enumerate(inputs)}
    for action in schedule.runnable():
        if action.kind == "F":
            torch.set_rng_state(states[action.rank])
            x = outputs[action.stage - 1, action.micro_batch]
            outputs[action.stage, action.micro_batch] = parts[action.stage](x)
            states[action.rank] = torch.get_rng_state()
    logits = torch.stack([outputs[schedule.num_stages - 1, m] for m in range(schedule.num_micro_batches)])
    GPT.loss(logits, targets).backward()
    wanted = {name: p.grad for part in parts for name, p in part.model.named_parameters()}
    return own, max((gradient - wanted[name]).abs().max().item() for name, gradient in own.items())


@pytest.mark.slow
def test_dropout_drops_the_same_forward_and_backward():
    runs = {schedule.name: launch(with_dropout, 3, schedule)
            for schedule in (gpipe(3, 4), one_f_one_b(3, 4), interleaved(6, 3), zero_bubble(6, 3))}
    assert all(difference < TOLERANCE for run in runs.values() for _, difference in run)
    for (ours, _), (theirs, _) in zip(runs["gpipe"], runs["one_f_one_b"]):  # the same forwards in the same order
        assert all((ours[name] - theirs[name]).abs().max() < TOLERANCE for name in ours)


def what_is_held(schedule):
    """Bytes held: the peak, at the end, and for one micro-batch on one stage; and the most sends open at once."""
    device = rank_device()
    dist.init_process_group()
    gpt, _ = a_model(device)
    inputs, targets = ([t.clone() for t in tensors] for tensors in micro_batches(schedule.num_micro_batches, device))
    stages, mail = stages_here(schedule, gpt), Mail(schedule, like(device))
    del gpt
    parameters = [p for stage in stages.values() for p in stage.module.parameters()]
    (stage, *_), open_sends, post = stages.values(), [], mail.post

    def posted(*letter):
        post(*letter)
        open_sends.append(len(mail.sent))

    mail.post = posted
    with saved_for_backward(parameters) as kept:
        x = inputs[0] if stage.is_first else like(device).zero_()
        stage.forward(0, x, targets[0] if stage.is_last else None)
    stage.kept.clear()
    with held_for_backward(parameters) as held:
        run_pipeline(schedule, stages, mail, inputs, targets)
    return held.peak_bytes, held.num_bytes, kept.num_bytes, max(open_sends)


@pytest.mark.slow
def test_gpipe_holds_all_micro_batches_and_1f1b_one_for_each_stage_from_here_on():
    for schedule, in_flight in ((gpipe(3, 6), [6, 6, 6]), (one_f_one_b(3, 6), [3, 2, 1])):
        run = launch(what_is_held, 3, schedule)
        assert [round(peak / one, 6) for peak, _, one, _ in run] == in_flight
        assert [left for _, left, _, _ in run] == [0, 0, 0]
    assert max(sends for _, _, _, sends in run) <= 4  # not all 12: what has arrived is released


def refused(case):
    """The error on rank 0, which runs alone: nothing is sent before it."""
    dist.init_process_group("gloo")
    cpu = torch.device("cpu")
    schedule, (inputs, targets) = one_f_one_b(1, 3), micro_batches(3, cpu)
    if case == "order":
        schedule = PipelineSchedule("mine", 2, 1, [(0, 0, 0, "F"), (0, 0, 0, "B"), (1, 1, 0, "B"), (1, 1, 0, "F")])
    if case in ("stages", "shape"):
        schedule = one_f_one_b({"stages": 7, "shape": 2}[case], 3)
    try:
        run_pipeline(schedule, stages_here(schedule, GPT(CONFIG)), Mail(schedule, like(cpu)[:1]),
                     inputs if case != "inputs" else inputs[:2], targets if case != "targets" else None)
    except ValueError as error:
        return str(error)


@pytest.mark.slow
@pytest.mark.parametrize(("case", "words"), [
    ("order", "mine: this order cannot run: rank 0 waits at B0 of stage 0 for"),
    ("stages", "6 blocks can't make 7 stages"),
    ("inputs", "stage 0 needs inputs for 3 micro-batches, but got 2: give"),
    ("targets", "stage 0 needs targets for 3 micro-batches, but got 0: give"),
    ("shape", r"stage 0 gives torch.float64 of the shape \(2, 6, 8\), and the others wait for torch.float64 of the "
              r"shape \(1, 6, 8\): ")])
def test_invalid_input_raises_a_clear_error(case, words):
    assert re.match(words, launch(refused, 1, case)[0])


def a_stage():
    gpt = GPT.seeded(CONFIG, seed=0)
    x = torch.randn(SIZE, CONFIG.context, CONFIG.width, dtype=CONFIG.dtype, requires_grad=True)
    return GPTStage(gpt, 2, 3), x


def multiplied(run):
    with FlopCounterMode(display=False) as counted:
        done = run()
    return done, counted.get_total_flops()


def test_the_backward_of_stage_0_costs_what_that_of_the_next_stage_does():
    """Its input, token numbers, gets no gradient; but the gradient has to go down to the embeddings."""
    gpt, costs = GPT.seeded(CONFIG, seed=0), []
    between = torch.randn(SIZE, CONFIG.context, CONFIG.width, dtype=CONFIG.dtype, requires_grad=True)
    for number, x in enumerate((torch.zeros(SIZE, CONFIG.context, dtype=torch.long), between)):
        y = GPTStage(copy.deepcopy(gpt), number, 3)(x)
        costs.append(multiplied(lambda: y.backward(torch.ones_like(y)))[1])  # noqa: B023
    assert costs[0] == costs[1] > 0


def test_a_split_backward_costs_the_same_products_and_gives_the_same_result():
    stage, x = a_stage()
    y, forward = multiplied(lambda: stage(x))
    _, whole = multiplied(lambda: y.square().mean().backward())
    wanted, input_gradient = [p.grad.clone() for p in stage.parameters()], x.grad.clone()
    stage.zero_grad()
    loss = stage(x).square().mean()
    split, first = multiplied(lambda: SplitBackward(x, loss))
    assert torch.equal(split.input_gradient, input_gradient)
    assert all(p.grad is None for p in stage.parameters())
    _, second = multiplied(split.backward_weights)
    assert all(torch.equal(p.grad, gradient) for p, gradient in zip(stage.parameters(), wanted))
    assert (first, second, whole) == (forward, forward, 2 * forward)
    split.backward_weights()
    assert all(torch.equal(p.grad, gradient) for p, gradient in zip(stage.parameters(), wanted))


def test_a_split_backward_releases_the_forward_when_done():
    stage, x = a_stage()
    with held_for_backward(stage.parameters()) as held:
        loss = stage(x).square().mean()
        whole = held.num_bytes
        split = SplitBackward(x, loss)
        del loss
        assert held.num_bytes > 0
        split.backward_weights()
        del split
        assert whole > held.num_bytes == 0


def test_weights_computed_from_weights_are_found_and_one_used_twice_is_refused():
    x = torch.randn(3, 4, requires_grad=True)
    normed = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))
    split = SplitBackward(x, normed(x).sum())
    assert all(p.grad is None for p in normed.parameters())
    split.backward_weights()
    found = [p.grad.clone() for p in normed.parameters()]
    normed.zero_grad()
    normed(x).sum().backward()
    assert all(torch.allclose(p.grad, gradient) for p, gradient in zip(normed.parameters(), found))
    with pytest.raises(ValueError, match="used in two places"):
        SplitBackward(x, normed(normed(x)).sum())


GOLDEN = Path(__file__).parent / "golden" / "pipelines"
MADE = {"gpipe_4_6": gpipe(4, 6), "one_f_one_b_4_6": one_f_one_b(4, 6), "interleaved_8_8": interleaved(8, 8),
        "zero_bubble_8_8": zero_bubble(8, 8), "zero_bubble_6_2": zero_bubble(6, 2)}
sizes = st.tuples(st.integers(1, 6), st.integers(1, 12))


def order(text, num_stages, num_micro_batches):
    return PipelineSchedule.from_csv(f"# own,{num_stages},{num_micro_batches}\n{text}")


@pytest.mark.parametrize("name", MADE)
def test_golden_orders(name):
    text = (GOLDEN / f"{name}.csv").read_text()
    assert MADE[name].to_csv() == text
    assert PipelineSchedule.from_csv(text) == MADE[name]


@given(sizes, st.integers(1, 4))
@settings(deadline=None, max_examples=60)
def test_every_schedule_runs_every_action(size, stages_per_rank):
    num_ranks, num_micro_batches = size
    made = [gpipe(*size), one_f_one_b(*size), zero_bubble(2 * num_ranks, num_micro_batches),
            interleaved(num_ranks * stages_per_rank, num_ranks * num_micro_batches, stages_per_rank)]
    for schedule in made:
        assert schedule.check() is schedule
        assert schedule.world_size == num_ranks


@given(sizes)
@settings(deadline=None, max_examples=60)
def test_in_flight_is_what_one_f_one_b_saves(size):
    num_stages, num_micro_batches = size
    assert gpipe(*size).peak_in_flight() == [num_micro_batches] * num_stages
    assert one_f_one_b(*size).peak_in_flight() == [min(num_micro_batches, num_stages - s) for s in range(num_stages)]
    assert max(zero_bubble(2 * num_stages, num_micro_batches).peak_in_flight()) <= 2 * num_stages


@given(sizes, st.floats(0.1, 3), st.floats(0.1, 3))
@settings(deadline=None, max_examples=60)
def test_the_bubble_is_the_closed_form(size, forward_s, backward_s):
    for make in (gpipe, one_f_one_b):
        found = bubble(simulate_pipeline(make(*size), forward_s, backward_s))
        assert found.share == pytest.approx(pipeline_bubble(*size), abs=1e-9)
        assert found.step_s == pytest.approx((sum(size) - 1) * (forward_s + backward_s))


@pytest.mark.parametrize(("num_ranks", "groups", "stages_per_rank"), [(2, 1, 2), (4, 2, 2), (4, 1, 3), (3, 4, 4)])
def test_interleaving_divides_the_bubble(num_ranks, groups, stages_per_rank):
    schedule = interleaved(num_ranks * stages_per_rank, num_ranks * groups, stages_per_rank)
    found = bubble(simulate_pipeline(schedule, 1.0, 2.0))
    assert found.share == pytest.approx(pipeline_bubble(num_ranks, num_ranks * groups, stages_per_rank))


@pytest.mark.parametrize("num_ranks", [2, 3, 4, 6])
def test_zero_bubble_wastes_less_than_interleaved(num_ranks):
    """Forward, input gradient and weight gradient equally long: the case that ZB-V is made for."""
    split = bubble(simulate_pipeline(zero_bubble(2 * num_ranks, 4 * num_ranks), 1.0, 2.0))
    whole = bubble(simulate_pipeline(interleaved(2 * num_ranks, 4 * num_ranks), 1.0, 2.0))
    assert split.share < whole.share


@pytest.mark.parametrize(("text", "size", "reason"), [
    ("0B0,0F0", (1, 1), "rank 0 waits at B0 of stage 0 for F0 of stage 0, which it runs later itself"),
    ("0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1", (2, 2), "rank 0 waits at B0 of stage 0 for the backward of micro-batch 0 on "
     "stage 1; rank 1 waits at F1 of stage 1 for F1 of stage 0"),
    ("0F0,0W0,0I0", (1, 1), "rank 0 waits at W0 of stage 0 for I0 of stage 0, which it runs later itself"),
    ("0F0\n1F0,1B0", (2, 1), "nobody runs B0 or I0 of stage 0"),
    ("0F0,0B0", (1, 2), "nobody runs F1 of stage 0"),
    ("0F0,0I0", (1, 1), "nobody runs W0 of stage 0"),
    ("0F0,0B0", (2, 1), "rank 0 waits at B0 of stage 0 for the backward of micro-batch 0 on stage 1"),
])
def test_an_order_that_cannot_run_is_explained(text, size, reason):
    with pytest.raises(ScheduleError) as caught:
        order(text, *size).check()
    assert reason in str(caught.value)


@pytest.mark.parametrize(("actions", "reason"), [
    ([Action(0, 0, 0, "F"), Action(0, 0, 0, "F")], "rank 0 runs F0 of stage 0 when that was done already"),
    ([Action(0, 0, 0, "B"), Action(0, 0, 0, "I")], "rank 0 runs I0 of stage 0 when that was done already"),
    ([Action(0, 0, 0, "F"), Action(1, 0, 1, "F")], "stage 0 is run by ranks 0 and 1"),
    ([Action(0, 2, 0, "F")], "stage 2, it must be 0 to 1"),
    ([Action(0, 0, 2, "F")], "micro_batch 2, it must be 0 to 1"),
    ([Action(-1, 0, 0, "F")], "rank -1, it must be"),
    ([Action(0, 0, 0, "X")], "kind must be one of F, B, I, W, not 'X'"),
    ([(0, 0)], "is not a Action: give"),
])
def test_an_invalid_action_is_refused(actions, reason):
    with pytest.raises(ScheduleError) as caught:
        PipelineSchedule("own", 2, 2, actions)
    assert reason in str(caught.value)


@pytest.mark.parametrize(("make", "reason"), [
    (lambda: gpipe(0, 4), "num_stages must be a whole number of at least 1"),
    (lambda: one_f_one_b(4, 0), "num_micro_batches must be"),
    (lambda: interleaved(6, 4, 4), "make num_stages a multiple of stages_per_rank"),
    (lambda: interleaved(8, 6, 2), "use a multiple of 4"),
    (lambda: zero_bubble(3, 4), "use an even number"),
    (lambda: PipelineSchedule.from_csv("0F0"), "write one with to_csv"),
    (lambda: PipelineSchedule.from_csv("# own,1,1\n0X0"), "'0X0' is no action such as 0F3"),
    (lambda: PipelineSchedule.from_csv(""), "write one with to_csv"),
    (lambda: PipelineSchedule("own name", 1, 1, []), "letters, digits and underscores"),
])
def test_invalid_sizes_are_refused(make, reason):
    with pytest.raises(ScheduleError) as caught:
        make()
    assert reason in str(caught.value)


def test_an_order_may_be_partial():
    """As a run that hung leaves it."""
    part = order("0F0,0F1\n1F0", 2, 2)
    assert [str(action) for action in part.runnable()] == ["F0 of stage 0", "F1 of stage 0", "F0 of stage 1"]
    assert part.in_flight() == [[1, 2], [1]] and part.peak_in_flight() == [2, 1]
    assert part.rank_of(1) == 1 and part.rank_of(7) is None
