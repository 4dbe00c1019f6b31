"""Checks on planned layouts: right numbers pass, every mistake gets a sentence, and no wrong choice is taken."""
import dataclasses
import functools
from types import SimpleNamespace

import pytest

from book.checks import best_layout, hybrid_steps, planner
from book.checks.verdict import CheckFailed
from book.checks.best_layout import _layouts
from book.checks.planner import _dp_slips, _pp_slips, _time_slips, _tp_slips
from book.cost import Cluster, Layout, StateBytes, Transformer, estimate
from book.cost.published import A100

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


def test_no_layout_is_the_answer_where_none_fits():
    nothing_fits = a_case(memory_bytes=1e9)
    assert best_layout.chosen_layout(None, *nothing_fits) == (None, 0.0)
    with pytest.raises(CheckFailed, match="no layout fits, but you chose"):
        best_layout.chosen_layout(Layout(1, 24, 1), *nothing_fits)
    with pytest.raises(CheckFailed, match="you found no layout that fits, but there are"):
        best_layout.chosen_layout(None, *a_case())


@pytest.mark.parametrize("wrong, said", [
    (Layout(1, 1, 16), "it has 16 GPUs"), (Layout(1, 24, 1, micro_batch_size=4), "into whole micro-batches of 4"),
    (Layout(1, 24, 1, zero_stage=3), "zero_stage 0 or 1"), ("tp 8", "must return a Layout"),
])
def test_layouts_outside_the_exercise_are_refused(wrong, said):
    with pytest.raises(CheckFailed, match=said):
        best_layout.chosen_layout(wrong, *a_case())
