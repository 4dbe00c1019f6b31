"""The ledger: its lines beside the planner's estimates and published steps, and the page's beside Python's."""
from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

import nbformat
import numpy as np
import pytest

from book.cost import (ADAM_MIXED, MACHINES, MODELS, LayerShape, Layout, activation_bytes, cluster_of, estimate,
                       largest_micro_batch, pipeline_bubble, state_bytes)
from book.cost.answer import told as plan_told
from book.cost.ledger import MODELS_OF_THE_STORY, SEQUENCES, STORY, Apart, Entry, Way, entry, joined, story
from book.cost.machines import SOFTWARE
from book.cost.measured import data_sets
from book.cost.scoreboard import measured
from book.cost.traffic import pipeline_sends
from book.faults import Job, daly, expected_goodput
from book.pipelines import one_f_one_b
from book.simulate import simulate_pipeline
from book.widgets import ledger
from book.widgets.ledger import AGAIN, EVERY, GPUS, HALLS, NAMES, PARTS, SIZES
from book.widgets.step_explorers import expert_loads
from tests.players import PLAYER, assert_readable, axe_finds, caption, click, html_of, state
from tests.test_explorers import data_of, turn
from tests.website import ROOT


def test_each_chapter_opens_with_what_does_not_fit_and_closes_with_what_does() -> None:
    for way in STORY:
        line = way.line
        assert (line.limit == "memory") == (line.memory_bytes > line.room_bytes)
        assert (line.limit == ("line" if way.apart else "memory")) == way.opens, way
    closing = [way.chapter for way in STORY if not way.opens]
    assert closing == [*range(1, 11), 15]


def test_a_line_is_the_planners_estimate() -> None:
    for way in (way for way in STORY if not way.apart):
        line, model = way.line, replace(MODELS[way.model], num_tokens=way.num_tokens)
        sequences = SEQUENCES * 8192 // way.num_tokens
        cluster = cluster_of("h100", way.layout.num_gpus, SOFTWARE[0])
        told = estimate(model, cluster, way.layout, sequences, ADAM_MIXED)
        assert line.memory_bytes == pytest.approx(told.memory_bytes)
        most, mean = pipeline_sends(way.layout.pp)
        sent = told.tp_bytes + told.cp_bytes + told.ep_bytes + told.pp_bytes * mean / max(most, 1) + told.dp_bytes
        assert line.inside_bytes + line.crossing_bytes == pytest.approx(sent)
        computing_s = told.matmul_s + told.elementwise_s + told.launch_s + told.update_s
        assert line.exposed_s + line.idle_s == pytest.approx(told.step_s - computing_s)
        assert told.mfu == pytest.approx(
            line.tokens_per_s * model.step_flops(sequences) / (sequences * model.num_tokens * cluster.flops_per_s))


@pytest.mark.parametrize("zero_stage", range(4))
def test_state_is_told_part_by_part(zero_stage: int) -> None:
    line = entry("llama3-8b", Layout(1, 16, 1, zero_stage=zero_stage))
    held = state_bytes(MODELS["llama3-8b"].num_parameters, zero_stage, 16)
    assert (line.parameter_bytes, line.gradient_bytes, line.optimizer_bytes) == pytest.approx(
        (held.parameters, held.gradients, held.optimizer))


@pytest.mark.parametrize(("layout", "share"), [
    (Layout(1, 1, 8), 0), (Layout(1, 8, 1), 0), (Layout(1, 16, 1), 1 / 8), (Layout(1, 16, 4), 1 / 2),
    (Layout(1, 4, 8, zero_stage=1), None), (Layout(4, 1, 8), None), (Layout(4, 1, 4), None), (Layout(2, 8, 1), None),
    (Layout(4, 1, 4, stages_per_rank=2), None), (Layout(2, 2, 4, stages_per_rank=4), None)])
def test_of_a_ring_one_hop_in_as_many_as_a_node_has_members_leaves_it(layout: Layout, share: float | None) -> None:
    line = entry("llama3.2-1b", layout)
    found = estimate(MODELS["llama3.2-1b"], cluster_of("h100", layout.num_gpus, SOFTWARE[0]), layout, SEQUENCES)
    most, mean = pipeline_sends(layout.pp, layout.stages_per_rank)
    sent = {"tp": found.tp_bytes, "dp": found.dp_bytes, "pp": found.pp_bytes * mean / max(most, 1)}
    neighbours = {axis: pairs(layout, axis) for axis in sent}
    crossing = sum(sent[axis] * share for axis, share in neighbours.items() if sent[axis])
    assert line.crossing_bytes == pytest.approx(crossing)
    assert line.inside_bytes == pytest.approx(sum(sent.values()) - crossing)
    if share is not None:
        assert neighbours["dp"] == share


def pairs(layout: Layout, axis: str) -> float:
    """The share of hops on an axis that lead to another node of eight: of a pipeline's stages, or around a ring."""
    mesh = np.arange(layout.num_gpus).reshape(layout.pp, layout.dp, layout.tp)
    rings = np.moveaxis(mesh, ("pp", "dp", "tp").index(axis), -1).reshape(-1, getattr(layout, axis))
    if axis == "pp" and layout.pp > 1:
        stages = np.tile(rings, layout.stages_per_rank) // 8
        return float((stages[:, 1:] != stages[:, :-1]).mean())
    return float((rings // 8 != np.roll(rings, 1, axis=1) // 8).mean())


@pytest.mark.parametrize("layout", [
    Layout(1, 64, 1, zero_stage=3, ep=ep) for ep in (1, 2, 8)] + [Layout(1, 32, 2, zero_stage=1, ep=4),
                                                                 Layout(1, 1, 1, zero_stage=3, cp=16)])
def test_shards_of_an_expert_are_as_many_ranks_apart_as_share_the_experts(layout: Layout) -> None:
    """Around the rings of its shards and of all else, by the nodes of the ranks; experts are on neighbours."""
    line, model, node = entry("mixtral-8x7b", layout), MODELS["mixtral-8x7b"], 8
    passes = 3 * SEQUENCES // layout.dp if layout.zero_stage == 3 else 2
    ends, crossing = 2 * model.vocab_size * model.width, 0.0
    for apart, parameters in ((layout.tp, model.num_layers * model.sizes.layer_parameters + ends),
                              (layout.ep, model.num_layers * model.sizes.expert_parameters)):
        rings = np.arange(layout.num_gpus).reshape(-1, apart).T // node
        share = (rings != np.roll(rings, 1, axis=1)).mean()
        crossing += passes * (1 - 1 / rings.shape[1]) * 2 * parameters / apart * share
    if layout.cp > 1:  # the ring of keys and values
        told = estimate(model, cluster_of("h100", 16, SOFTWARE[0]), layout, SEQUENCES)
        crossing += told.cp_bytes / 8
    assert line.crossing_bytes == pytest.approx(crossing, rel=1e-3)


def test_a_pipeline_that_mostly_waits_is_limited_by_its_bubble() -> None:
    line = entry("llama3-70b", Layout(8, 1, 8, sequence_parallel=1), sequences=4)
    assert line.limit == "pipeline" and line.idle_s > line.exposed_s


def test_a_wait_below_a_tenth_of_the_step_is_not_what_limits() -> None:
    line = entry("llama3-70b", Layout(1, 64, 1, 2, zero_stage=3, recompute="full"))
    assert 0.05 < line.exposed_s / line.step_s < 0.1 and line.limit == "computing"


@pytest.mark.parametrize(("model", "layout", "sequences", "measured"), [
    # torchtitan's reports: rows of data/reported.csv
    ("llama3-8b", Layout(1, 128, 1, micro_batch_size=2, zero_stage=3, recompute="half"), 256, 6514),
    ("llama3-8b", Layout(1, 8, 1, micro_batch_size=2, zero_stage=3, recompute="half"), 16, 6667)])
def test_published_steps_are_near(model: str, layout: Layout, sequences: int, measured: float) -> None:
    assert entry(model, layout, sequences).tokens_per_s == pytest.approx(measured, rel=0.12)


@pytest.mark.parametrize("apart", [Apart(), Apart(4), Apart(every=20), Apart(4, 7, 4), Apart(2, 2, 4, 1e7),
                                   Apart(parts=4), Apart(2, 50)])
def test_halls_wait_for_the_line_between_them(apart: Apart) -> None:
    """By hand: a ring of the halls, 16 bits in each step or 32 now and then, over one line for all GPUs of a hall."""
    layout, model = Layout(1, 16, 1, zero_stage=3), MODELS["llama3-8b"]
    alone = entry("llama3-8b", layout, SEQUENCES // apart.halls)
    line = Way(15, "", "llama3-8b", layout, apart=apart).line
    hops, chunk = 2 * (apart.halls - 1), model.num_parameters / apart.halls
    num_bytes = hops * chunk * 2 if apart.every == 1 else hops * chunk * 4 / apart.every
    assert line.crossing_bytes - alone.crossing_bytes == pytest.approx(num_bytes / 16)
    line_s = num_bytes / apart.bytes_per_s
    waits_s = line_s if apart.parts == 1 or apart.every == 1 else max(line_s - alone.step_s, 0)
    assert line.step_s - alone.step_s == pytest.approx(waits_s) == pytest.approx(line.exposed_s - alone.exposed_s)
    assert line.tokens_per_s * line.step_s == pytest.approx(alone.tokens_per_s * alone.step_s)
    shares = {"communication": alone.exposed_s, "pipeline": alone.idle_s, "line": waits_s}
    is_large = max(alone.exposed_s + waits_s, alone.idle_s) >= 0.1 * line.step_s
    assert line.limit == (max(shares, key=shares.__getitem__) if is_large else "computing")
    assert line.memory_bytes - alone.memory_bytes == pytest.approx(
        8 * model.num_parameters / 16 if apart.every > 1 else 0)


def test_what_halls_keep_for_their_agreement_may_not_fit() -> None:
    full = Way(15, "", "llama3-8b", Layout(1, 16, 1, zero_stage=1), apart=Apart())
    assert full.line.memory_bytes > 80e9 and full.line.limit == "memory"
    model = replace(MODELS["llama3-8b"], num_layers=44)
    line = entry(model, Layout(1, 16, 1, zero_stage=3), 256)
    kept = joined(line, model, Layout(1, 16, 1, zero_stage=3), Apart(every=100))
    assert line.memory_bytes < 80e9 < kept.memory_bytes and (line.limit, kept.limit) == ("communication", "memory")


@pytest.mark.parametrize("chapter", [0, 16, 1.5])
def test_a_chapter_without_a_line_is_refused(chapter: Any) -> None:
    if chapter == 1.5:
        assert len(story(chapter)) == 1
    else:
        with pytest.raises(ValueError, match="the story has chapters 1 to 15, not"):
            ledger(chapter)


# In the chapters

def told(chapter: int) -> str:
    """What a chapter says in words."""
    [path] = ROOT.glob(f"chapters/{chapter:02}_*.ipynb")
    return "\n".join(cell.source for cell in nbformat.read(path, 4).cells if cell.cell_type == "markdown")


def speed(line: Entry) -> str:
    """Tokens per second and GPU as a chapter writes them."""
    return f"{line.tokens_per_s:,.0f}"


def sent(line: Entry) -> float:
    """All bytes that a GPU sends in a step."""
    return line.inside_bytes + line.crossing_bytes


def days(line: Entry, num_gpus: int) -> float:
    """What a trillion tokens take."""
    return 1e12 / line.tokens_per_s / num_gpus / 86_400


def test_chapters_say_what_the_ledger_says() -> None:
    (one, ddp, many, big, sharded, huge, tensor, staged, hybrid, *_) = (way.line for way in STORY)
    says = {number: told(number) for number in (*range(1, 8), 10)}
    assert f"{speed(one)} tokens a second, and needs {days(one, 1):.0f} days" in says[1]
    assert f"take it {days(one, 1):.0f} days" in says[2] and f"take {days(ddp, 16):.0f} days" in says[2]
    assert f"a trillion tokens take {days(ddp, 16):.0f} days" in says[3]
    assert f"train on {speed(ddp)} tokens a second each, where one alone trains on {speed(one)}" in says[2]
    assert f"a GPU sends {sent(ddp) / 1e9:.2f} GB" in says[2] and ddp.exposed_s < 0.005 * ddp.step_s
    mfu = ddp.tokens_per_s * MODELS["llama3.2-1b"].step_flops(1) / 8192 / 989e12
    assert f"the 1B model would reach {100 * mfu:.0f} % of the peak" in says[2]
    short = entry(replace(MODELS["llama3.2-1b"], num_tokens=2048), Layout(1, 16, 1), sequences=16)
    assert f"a GPU waits for {100 * short.exposed_s / short.step_s:.0f} % of the step" in says[2]
    over = cluster_of("h100", 8, SOFTWARE[0]).overheads
    assert (f"of 450 GB/s inside a node {450 * over.inside_share:.0f} are reached, and of 50 GB/s between nodes "
            f"{50 * over.across_share:.0f}") in says[1]
    assert f"each sends {sent(many) / 1e9:.1f} GB in a step, where it sends {sent(ddp) / 1e9:.2f} among 16" in says[3]
    assert f"{speed(many)} tokens a second, {100 * (1 - many.tokens_per_s / ddp.tokens_per_s):.0f} % fewer" in says[3]
    assert f"A trillion tokens take {days(many, 128):.1f} days" in says[3]
    state = big.parameter_bytes + big.gradient_bytes + big.optimizer_bytes
    assert f"{state / 1e9:.0f} GB of state" in says[4] and f"{big.activation_bytes / 1e9:.0f} GB of activ" in says[4]
    assert f"keeps {state / 16e9:.0f} GB of them, and holds {sharded.memory_bytes / 1e9:.0f} GB with" in says[4]
    assert f"sends {sent(sharded) / 1e12:.2f} TB in a step, where DDP sends {sent(big) / 1e9:.0f} GB" in says[4]
    assert f"takes {sharded.exposed_s:.0f} seconds of {sharded.step_s:.0f}" in says[4]
    assert f"waiting: {100 * sharded.exposed_s / sharded.step_s:.0f} % of the step" in says[4]
    reported = entry("llama3-8b", Layout(1, 128, 1, 2, zero_stage=3, recompute="half"), 256)
    assert f"6,514 tokens a second. The ledger's formulas say {speed(reported)}" in says[4]
    state = huge.parameter_bytes + huge.gradient_bytes + huge.optimizer_bytes
    assert f"shrinks to {state / 1e9:.0f} GB" in says[5] and f"{huge.activation_bytes / 1e9:.0f} GB of them" in says[5]
    assert f"sums are {80 * activation_bytes(MODELS['llama3-70b'].layer(1)) / 1e9 + 14.7:.1f} GB, and the" in says[4]
    assert f"the ledger has {huge.activation_bytes / 1e9:.0f}." in says[4]
    assert f"but for {100 * (1 - over.kept_factor):.1f} % of the layers' part" in says[4]
    assert f"{tensor.activation_bytes / 1e9:.0f} GB, and {tensor.memory_bytes / 1e9:.0f} GB in all" in says[5]
    assert f"gathered again: {tensor.inside_bytes / 1e12:.0f} TB in a step" in says[5]
    eight_s = 0.8 * tensor.inside_bytes / (450e9 * over.inside_share)  # of ten halves; two hide behind products
    assert (f"eight halves take {eight_s:.0f} s at {450 * over.inside_share:.0f} GB/s, and "
            f"{100 * over.tensor_hidden_share:.0f} % of those hide") in says[5]
    assert f"counts {eight_s * (1 - over.tensor_hidden_share):.0f} s of waiting for it" in says[5]
    assert f"{100 * (tensor.exposed_s + tensor.idle_s) / tensor.step_s:.0f} % of the step, four fifths" in says[5]
    gathers = (tensor.exposed_s - staged.exposed_s) / tensor.exposed_s  # the rest is alike in both
    assert gathers == pytest.approx(4 / 5, abs=0.01) and f"if nothing of it hides: {speed(tensor)} tokens" in says[5]
    assert gathers * tensor.exposed_s / tensor.step_s == pytest.approx(0.5, abs=0.02)
    again = entry("llama3-70b", Layout(1, 64, 1, zero_stage=3, recompute="full"))
    assert f"everything recomputed, would train on {speed(again)}" in says[5] and again.limit != "memory"
    assert (f"{staged.crossing_bytes / 1e9:.0f} GB in a step instead of {tensor.crossing_bytes / 1e12:.0f} TB, and "
            f"trains on {speed(staged)} tokens a second instead of {speed(tensor)}") in says[6]
    assert f"still waits for {100 * (staged.exposed_s + staged.idle_s) / staged.step_s:.0f} % of the step" in says[6]
    assert f"The bubble is {100 * staged.idle_s / staged.step_s:.1f} %" in says[6]
    assert f"between others sends {staged.crossing_bytes / 7e9 * 8:.1f} GB, the first and the last half" in says[6]
    [last_s] = (by_rules(way)["last"] for way in STORY if way.chapter == 6)
    assert f"for {last_s:.1f} of the step's {staged.step_s:.0f} seconds the other stages wait for the last" in says[6]
    assert f"{speed(hybrid)} tokens a second, {100 * (hybrid.tokens_per_s / staged.tokens_per_s - 1):.0f} %" in says[7]
    held = []
    for pp, words in ((8, "trains on {} tokens a second. With four"), (4, "replicas it trains on {}"),
                      (2, "two stages on {}"), (1, "one node each, on {}")):
        line = entry("llama3-70b", Layout(pp, 64 // pp, 8, zero_stage=1, sequence_parallel=1))
        assert words.format(speed(line)) in says[7]
        held.append(f"{line.memory_bytes / 1e9:.0f}")
    assert f"holds more: {', '.join(held[:-1])} and {held[-1]} GB" in says[7]
    [planned] = [way.line for way in STORY if way.chapter == 10]
    assert f"trains on {speed(planned)} tokens a second" in says[10]
    assert f"{100 * (planned.tokens_per_s / hybrid.tokens_per_s - 1):.0f} % more than" in says[10]


def test_chapters_say_what_other_ways_would_do() -> None:
    """Those that the story does not take."""
    way, other = (way for way in STORY if way.chapter in (5, 6) and not way.opens)
    tensor, staged = way.line, other.line
    gathers_s = estimate(MODELS[way.model], cluster_of("h100", 64, SOFTWARE[0]), way.layout, SEQUENCES).dp_s
    hidden = tensor.tokens_per_s * tensor.step_s / (tensor.step_s - gathers_s)
    assert f"If all of that hid, it would be {hidden:,.0f}" in told(5)
    maxtext = entry("llama3-70b", Layout(1, 128, 1, 2, zero_stage=3, recompute="full"), 256)
    assert f"everything recomputed say {speed(maxtext)};" in told(5)
    once = entry("llama3-70b", Layout(1, 8, 8, zero_stage=1, sequence_parallel=1))
    assert f"train on {speed(once)} tokens a second, and hold {once.memory_bytes / 1e9:.0f} GB" in told(6)
    assert f"The pipeline holds {staged.memory_bytes / 1e9:.0f} GB" in told(6)


def reached(line: Entry, model: str, num_gpus: int) -> float:
    """FLOP/s while a GPU computes, 6 for each parameter and token."""
    return 6 * MODELS[model].num_parameters * SEQUENCES * 8192 / num_gpus / (
        line.step_s - line.exposed_s - line.idle_s)


def test_chapters_derive_what_is_kept_for_backward() -> None:
    says, sequence = {number: told(number) for number in (4, 5)}, 8192
    gpt = LayerShape(1, sequence, 4096, 32)
    assert activation_bytes(gpt) == (34 + 5 * 32 * sequence / 4096) * gpt.num_activations
    assert 5 * 32 * sequence / 4096 == 320 and "the second is $320h$" in says[4]
    layer, model = MODELS["llama3-8b"].layer(1), MODELS["llama3-8b"]
    assert activation_bytes(layer) == 34 * 4096 * sequence
    assert f"{activation_bytes(layer) / 1e9:.2f} GB, and 32" in says[4]
    layers, logits = 32 * activation_bytes(layer), 14 * model.vocab_size * sequence
    assert f"keep {layers / 1e9:.1f} GB" in says[4] and f"makes {logits / 1e9:.1f} GB for a sequence" in says[4]
    assert layers + logits == pytest.approx(entry("llama3-8b", Layout(1, 16, 1)).activation_bytes, rel=0.01)
    assert cluster_of("h100", 8, SOFTWARE[0]).overheads.logit_bytes == pytest.approx(14, rel=0.01)
    assert round(logits / activation_bytes(layer)) == 13 and "as much as thirteen layers" in says[4]
    large = MODELS["llama3-70b"].layer(1)
    kept = [activation_bytes(large, 8, *way) / 1e9 for way in ((), (True,), (True, True))]
    assert (f"keeps {activation_bytes(large) / 1e9:.2f} GB on one GPU. On eight it keeps {kept[0]:.2f} GB with tensor "
            f"parallelism alone, {kept[1]:.2f} GB with sequence parallelism, and {kept[2]:.2f} GB if") in says[5]
    unit = large.num_activations
    assert [1e9 * of / unit for of in kept] == pytest.approx([8 + 25.5 / 8, 4 + 29.5 / 8, 33.5 / 8])
    assert f"these are {12 * sequence / 1e3:.0f} kB" in says[5] and f"{logits / 8e9:.1f} GB." in says[5]


def test_chapters_say_from_how_many_tokens_on_communication_hides() -> None:
    says = {number: told(number) for number in (2, 4, 5, 6)}
    over = cluster_of("h100", 64, SOFTWARE[0]).overheads
    inside, across = 450e9 * over.inside_share, 50e9 * over.across_share
    sharded, tensor, staged = [entry(way.model, way.layout) for way in STORY
                               if way.chapter in (4, 5, 6) and not way.opens]
    small, large = reached(sharded, "llama3-8b", 16), reached(tensor, "llama3-70b", 64)
    assert small == pytest.approx(436e12, rel=0.005) and "is 436 TFLOP/s, 44 % of the peak" in says[4]
    assert (small / inside, small / across) == pytest.approx((1590, 9800), rel=0.005)
    assert "$F\\beta$ is 1,590 tokens" in says[4] and f"at {across / 1e9:.1f} GB/s, it is 9,800." in says[4]
    assert f"$F = {large / 1e12:.0f}$ TFLOP/s, {100 * large / 989e12:.0f} % of the peak" in says[5]
    [tiny] = [reached(entry(way.model, way.layout), way.model, 16) for way in STORY if way.chapter == 2]
    assert (tiny / across, tiny / inside) == pytest.approx((6950, 1130), rel=0.005)
    assert (f"{across / 1e9:.1f} GB/s of a card, {inside / 1e9:.0f} GB/s inside" in says[2]
            and f"reach 8 · {across / 1e9:.1f} = {8 * across / 1e9:.0f} GB/s and NVLink {inside / 1e9:.0f}" in says[2])
    assert says[2].count("1,130") == says[2].count("6,950") == 2
    assert f"1B model has {tiny / 1e12:.0f}, and 8B {small / 1e12:.0f}" in says[5]
    peaks = [2250 / 0.9, 989 / 0.45, 2250 / 0.4, 989 / 0.4]
    assert peaks == pytest.approx([2500, 2200, 5620, 2470], rel=0.002)
    assert "2,500 tokens are needed inside a node, up from 2,200 on" in says[2]
    assert "5,620 are needed, up from 2,470" in says[2]
    counted = [of * MODELS[name].step_flops(1) / (6 * MODELS[name].num_parameters * 8192 * 989e10)
               for name, of in (("llama3-8b", small), ("llama3-70b", large))]  # attention's products too
    assert f"of the peak, 8B {counted[0]:.0f} % and 70B {counted[1]:.0f} %" in says[2]
    alone, short = (reached(entry(name, Layout(1, 64 // t, t, zero_stage=3, sequence_parallel=int(t > 1))), name, 64)
                    for name, t in (("llama3-70b", 1), ("llama3.2-1b", 8)))
    assert f"has {alone / 1e12:.0f} with $t = 1$, and the 1B model only {short / 1e12:.0f} with $t = 8$" in says[5]
    model = MODELS["llama3-70b"]
    each = 3 / 8 * model.sizes.layer_parameters / model.width / 7  # FLOPs a byte, for t = 8
    assert (each, large / inside, large / across) == pytest.approx((5600, 1890, 11600), rel=0.005)
    assert "5,600 FLOPs a byte" in says[5] and "1,890 FLOPs" in says[5] and "$F\\beta$ is 11,600" in says[5]
    assert f"sending takes {100 * large / inside / each:.0f} % of the time" in says[5]
    narrow = MODELS["llama3-8b"]
    share = small / inside / (3 / 8 * narrow.sizes.layer_parameters / narrow.width / 7)
    assert f"half as wide, it would be {100 * share:.0f} %" in says[5]
    assert large / across / each == pytest.approx(2.1, abs=0.05) and "is 11,600 ([chapter 2's table]" in says[6]
    stage = 10 * model.sizes.layer_parameters / model.width
    assert f"a message takes {100 * large / across / stage:.1f} % of the forward" in says[6]
    assert f"it would take {1000 * large / across / stage:.0f} %" in says[6]
    num = next(m for m in range(1, 1000) if pipeline_bubble(8, m) <= 0.05)
    assert f"$m = {num}$" in says[6] and num * 8192 / 64 == pytest.approx(17_000, rel=0.01)
    assert SEQUENCES * 8192 // 64 == 65_536 and round(pipeline_bubble(8, 64), 2) == 0.1
    assert f"{staged.activation_bytes / 1e9:.0f} GB" in says[6]
    [way] = [way for way in STORY if way.chapter == 7]
    hybrid, together = entry(way.model, way.layout), told(7)
    assert 2 * stage == pytest.approx(2.1e6, rel=0.01) and "2.1 million against 11,600" in together
    assert SEQUENCES // way.layout.dp == 256 > 19 * (way.layout.pp - 1) == 57
    found = estimate(model, cluster_of("h100", 64, SOFTWARE[0]), way.layout, SEQUENCES)
    assert (f"of the {hybrid.exposed_s + hybrid.idle_s:.0f} seconds in {hybrid.step_s:.0f} that a GPU waits in the "
            f"[ledger](#in-the-ledger), {found.tp_s:.0f} are tp's") in together
    share = 2 / 3 * large / across  # of computing, times the tokens of a replica
    assert share / 0.05 == pytest.approx(155_000, rel=0.01) and "needs $13.3 F\\beta$, 155,000 tokens" in together
    assert f"65,536 each, and pay {100 * share / (SEQUENCES * 8192 / 64):.0f} %" in together


def printed(chapter: int, words: str) -> str:
    """What the cell of a chapter printed whose output has these words."""
    [path] = ROOT.glob(f"chapters/{chapter:02}_*.ipynb")
    texts = ["".join(out.text for out in cell.outputs if out.output_type == "stream")
             for cell in nbformat.read(path, 4).cells if cell.cell_type == "code"]
    [text] = [text for text in texts if words in text]
    return text


def test_one_table_has_the_flops_of_a_byte_and_the_other_chapters_lead_to_it() -> None:
    over, peak = cluster_of("h100", 64, SOFTWARE[0]).overheads, 989e12
    rows = {name: reached(way.line, way.model, way.layout.num_gpus) for name, way in zip(
        ("1B", "8B", "70B"), (way for way in STORY if way.chapter in (2, 4, 5) and not way.opens))}
    table = {line.split()[0]: line.split()[-3:] for line in printed(2, "F times beta").splitlines()[2:]}
    assert list(table) == ["1B:", "8B:", "70B:", "data"]
    for name, (speed_said, inside, across) in table.items():
        found = rows.get(name.rstrip(":"), peak)
        shares = (over.inside_share, over.across_share) if name != "data" else (1, 1)
        assert float(speed_said) == pytest.approx(found / 1e12, abs=0.5)
        assert [float(words.replace(",", "")) for words in (inside, across)] == pytest.approx(
            [found / 450e9 / shares[0], found / 50e9 / shares[1]], rel=0.005)
    link = "02_data_parallel.ipynb#how-many-flops-a-byte"
    assert all(link in told(chapter) for chapter in (4, 5, 6, 7))
    assert all(link in (ROOT / f"chapters/{page}.md").read_text("utf-8") for page in ("98_symbols", "99_cheat_sheet"))


def test_chapter_7_says_when_stages_lose_less_than_replicas() -> None:
    """Its closed form beside the planner's bubble and reduction, and the numbers of its text."""
    says, model, over = told(7), MODELS["llama3-70b"], cluster_of("h100", 512, SOFTWARE[0]).overheads
    across = 50e9 * over.across_share

    def found(num_gpus: int, p: int, v: int = 1) -> Any:
        layout = Layout(p, num_gpus // 8 // p, 8, zero_stage=1, sequence_parallel=1, stages_per_rank=v)
        return estimate(model, cluster_of("h100", num_gpus, SOFTWARE[0]), layout, SEQUENCES)

    alone = found(512, 1)
    working_s = alone.step_s - alone.dp_s - alone.update_s
    flops_per_s = 6 * model.num_parameters * 8192 / working_s  # a GPU of 512 has 8,192 tokens
    assert f"a GPU works at {flops_per_s / 1e12:.0f} TFLOP/s" in says
    per_byte, hidden = flops_per_s / across, over.hidden_share * 2 / 3 * 8192
    assert (per_byte, 2 / 3 * per_byte, hidden, 2 / 3 * per_byte - hidden) == pytest.approx(
        (8970, 5980, 2180, 3790), rel=0.003)
    assert "$F\\beta$ is 8,970, and two thirds of it are 5,980" in says
    assert "or 2,180 tokens. That leaves 3,790." in says
    for v, p in ((1, 1), (1, 2), (1, 8), (1, 16), (2, 4), (2, 8), (5, 8)):
        step = found(512, p, v)
        share = ((p - 1) * 8192 / v + 2 / 3 * (1 - p / 64) * per_byte - hidden) / (8192 * p * 8)
        assert (step.bubble_s + step.dp_s) / working_s == pytest.approx(share, abs=0.0025), (v, p)
    whole, two, five = ([sum(vars(found(512, p, v))[part] for part in ("bubble_s", "dp_s")) for p in (2, 4, 8)]
                        for v in (1, 2, 5))
    assert whole == sorted(whole) and five == sorted(five, reverse=True) and max(two) < 1.05 * min(two)
    waits = [100 * (step.step_s - step.bubble_s - step.dp_s - step.update_s - working_s) / working_s
             for step in (found(512, 8), found(512, 8, 5))]
    assert (f"with eight stages on 512 GPUs {waits[0]:.1f} % of the work if stages are whole, and "
            f"{waits[1]:.1f} % with $v = 5$") in says
    steps = {p: found(512, p, 5 if p > 1 else 1).step_s for p in (1, 2, 4, 8)}
    assert sorted(steps, key=steps.__getitem__)[::3] == [2, 8]
    assert f"shortest with two, {steps[2]:.2f} s, and longest with eight, {steps[8]:.2f} s" in says
    assert "at most 0.15 points" in says and "at most 0.15 points" in printed(7, "points apart")


def test_chapter_7_says_how_long_each_order_of_axes_sends() -> None:
    says, parameters, tokens, t = told(7), 80 * 12 * 8192**2, 16 * 4096, 8
    n = 2 * 8192 * 4096
    computing_s = 6 * parameters / (4 * t) * tokens / 518e12
    tp_s, pp_s, dp_s = (16 * 20 * 8 * 7 / 8 * n / 274e9, 2 * 16 * n / 44.5e9,  # to both neighbours
                        2 * 7 / 8 * 2 * parameters / (4 * t) / 44.5e9)
    assert (f"dp's {dp_s:.2f} s can mostly be hidden, pp's {pp_s:.2f} s only" in says
            and f"tp's {tp_s:.2f} s only" in says)
    sends_s = tp_s + pp_s + dp_s
    assert f"{sends_s:.2f} s. Of that" in says and sends_s / computing_s == pytest.approx(0.5, abs=0.01)
    assert f"tp alone takes {100 * tp_s / computing_s:.0f} % of computing" in says
    assert MODELS["llama3-70b"].sizes.layer_parameters / (12 * 8192**2) == pytest.approx(1.06, abs=0.005)
    outer = tp_s * 274 / 44.5 + pp_s
    assert outer > 2 * computing_s and f"{outer + 2 * 7 / 8 * 2 * parameters / (4 * t) / 274e9:.2f} s" in printed(
        7, "sending takes")


def test_chapter_4_says_which_sequences_fit_beside_the_state() -> None:
    says, model, text = told(4), MODELS["llama3-8b"], printed(4, "tokens fit beside the state")
    room, logits = 80e9 - state_bytes(model.num_parameters, 3, 16).total, 14 * model.vocab_size
    layer = activation_bytes(model.layer(1)) / model.num_tokens
    inputs = activation_bytes(model.layer(1), recompute="full") / model.num_tokens
    of_a_token = [32 * layer + logits, 32 * 23 / 34 * layer + logits, 32 * inputs + layer + logits,
                  32 * inputs + layer]
    fits = [int(line.split()[-6].replace(",", "")) for line in text.splitlines()]
    assert fits == [pytest.approx(room / each, abs=1) for each in of_a_token]
    kept, _, again, chunked = fits
    assert 8192 < kept < 16384 < again < 32768 < 131072 < chunked and "one of 32,768 just fails to" in says
    assert again > 0.999 * 32768 and f"logits alone would take {131072 * logits / 1e9:.0f} GB" in says
    [sharded] = (way.line for way in STORY if way.chapter == 4 and not way.opens)
    assert f"libraries' buffers, {sharded.moment_bytes / 1e9:.0f} GB in the ledger" in says
    first, second = map(float, re.findall(r"([\d.]+) MB", printed(4, "in the first step, and")))
    assert f"second step therefore needs {second - first:.1f} MB more than the first" in says


def test_chapter_5_says_what_was_published_of_the_largest_micro_batches() -> None:
    says, rows = told(5), data_sets()["nanotron"].rows
    model = next(row.model for row in rows if row.name == "3B")
    [alone] = [row for row in rows if row.name == "3B" and row.layout == Layout(1, 8, 1, zero_stage=1)]
    flops_per_s = 6 * model.num_parameters * alone.global_batch * model.num_tokens / alone.step_s / 8
    assert flops_per_s == pytest.approx(350e12, rel=0.005) and "$F$ is 350 TFLOP/s" in says
    bound = [8 / 3 * (t - 1) * model.width / model.sizes.layer_parameters * 350e12 / 436e9 for t in (2, 8)]
    lost = 1 - (1 + bound[0]) / (1 + bound[1])
    assert f"loses {100 * (1 - 10889 / 14167):.0f} %, where the bound says {100 * lost:.0f} %" in says
    assert (f"it loses {100 * (1 - 6159 / 10889):.0f} %, and from 16 to 32 another {100 * (1 - 3610 / 6159):.0f} %"
            in says)


def test_chapter_6_says_how_long_a_turn_of_published_pipelines_is() -> None:
    turns: dict[int, list[float]] = {}
    shares: dict[int, list[float]] = {}
    for row in data_sets()["replicas"].rows:
        p, m = row.layout.pp, row.global_batch // row.layout.dp
        turns.setdefault(p, []).append(row.step_s / (m + p - 1))
        shares.setdefault(p, []).append(1 - m * turns[p][0] / row.step_s - pipeline_bubble(p, m))
    short, long = (max(of) / min(of) - 1 for of in turns.values())
    assert f"a turn varies by {100 * short:.1f} %, no" in told(6)
    assert f"With 35 it becomes {100 * long:.1f} % shorter as replicas are added" in told(6)
    assert turns[35] == sorted(turns[35], reverse=True)
    assert max(map(abs, shares[12])) < 0.002 and -0.011 < min(shares[35]) <= max(shares[35]) < 1e-9
    assert "within 0.2 points with twelve stages, and at most 1.1 below it with 35." in told(6)
    assert [len(row.split()) for row in printed(6, "a turn").splitlines()[1:]] == [8] * 6


def test_chapter_5_says_what_a_cut_leaves_of_a_products_speed() -> None:
    """The numbers beside its roofline, with FLOPs and bytes counted matrix by matrix."""
    says, gpu, tokens = told(5), MACHINES["h100"], 8192
    large, small = MODELS["llama3-70b"], MODELS["llama3.2-1b"]
    ridge = gpu.bf16_flops_per_s / gpu.memory_bytes_per_s

    def per_byte(rows: float, width: int, columns: float) -> float:
        flop = 2 * rows * width * columns
        return flop / (2 * (rows * width + width * columns + rows * columns))

    def enough(width: int, columns: float) -> float:
        return next(rows for rows in range(1, 1 << 14) if per_byte(rows, width, columns) >= ridge)

    together = {model: model.head_size * (model.num_heads + 2 * model.kv_heads) for model in (large, small)}
    assert f"an H100 needs {ridge:.0f} FLOPs for each byte" in says
    gate, whole, cut = (enough(model.width, columns) for model, columns in (
        (large, large.mlp_width / 8), (small, together[small]), (small, together[small] / 8)))
    assert f"reach the roof of 989 TFLOP/s with {gate} to {whole} tokens" in says
    assert f"The 1B model's $Q$, $K$ and $V$, cut over eight ranks, need {cut:,}" in says
    keys = large.head_size * large.kv_heads // 8
    most = per_byte(1e15, large.width, keys) * gpu.memory_bytes_per_s / 1e12
    assert (f"is {keys} columns wide with $t = 8$: with {tokens:,} tokens it has "
            f"{per_byte(tokens, large.width, keys):.0f} FLOPs a byte, and no number of tokens lifts it above "
            f"{most:.0f} TFLOP/s") in says
    assert f"$Q$ and $V$ (`linear_qkv`), which has {per_byte(tokens, large.width, together[large] / 8):.0f}." in says


def test_chapter_8_says_what_long_sequences_cost() -> None:
    says, model, over = told(8), MODELS["llama3-8b"], cluster_of("h100", 16, SOFTWARE[0]).overheads
    whole, cut = (way.line for way in STORY if way.chapter == 8)
    [sharded] = (way.line for way in STORY if way.chapter == 4 and not way.opens)
    assert f"keeps {whole.activation_bytes / 1e9:.0f} GB, sixteen times {sharded.activation_bytes / 1e9:.0f} GB" in says
    assert cut.memory_bytes == sharded.memory_bytes and f"holds {cut.memory_bytes / 1e9:.0f} GB, to the byte" in says
    assert f"trains on {speed(cut)} tokens a second; in chapter 4 it was {speed(sharded)}" in says
    assert f"waits for {100 * cut.exposed_s / cut.step_s:.0f} % of the step" in says and cut.limit == "computing"
    other = Way(8, "", "llama3-8b", Layout(1, 2, 8, zero_stage=3, sequence_parallel=1, recompute="half"),
                num_tokens=131072).line
    assert round(100 * (cut.tokens_per_s / other.tokens_per_s - 1)) == 21 and "cp is 21 % faster than" in says
    again = Way(8, "", "llama3-8b", Layout(1, 16, 1, zero_stage=3, recompute="full"), num_tokens=131072).line
    assert f"each layer's input and the logits, {again.activation_bytes / 1e9:.0f} GB" in says
    tokens, width = 8192, model.sizes.key_value_width
    rate, across = 989e12 * over.attention_share, 50e9 * over.across_share
    assert (rate, width, model.width) == (pytest.approx(174e12, rel=0.005), 2048, 4096)
    assert f"takes {2e3 * tokens * width / across:.2f} ms over the card" in says
    assert f"and the work {2e3 * model.width * tokens**2 / rate:.2f} ms" in says
    scores = 3 * 2 * model.width * 131072 * model.num_layers  # FLOPs of a token, forward and backward
    assert f"{6 * model.num_parameters / 1e9:.0f} billion" in says and f"{scores / 1e9:.0f} billion in all" in says
    crossover = 6 * model.num_parameters / (scores / 131072)
    assert "At 61,000 tokens the two are equal" in says and crossover == pytest.approx(61_000, rel=0.01)
    assert "is 3,910 FLOPs a byte over the card" in says and rate / across == pytest.approx(3910, rel=0.002)
    [found] = [estimate(replace(model, num_tokens=131072), cluster_of("h100", 16, SOFTWARE[0]), way.layout, 32)
               for way in STORY if way.chapter == 8 and not way.opens]
    assert found.cp_s == 0 and f"The ring's {found.cp_bytes / 1e12:.1f} TB hide" in says
    attention_s = 3.5 / 3 * scores * SEQUENCES * 8192 / 16 / rate  # a kernel's backward takes 2.5 forwards
    assert f"{attention_s:.0f} seconds of {cut.step_s:.0f}" in says
    wide = Way(8, "", "llama3-8b", Layout(1, 32, 1, zero_stage=3, cp=16), num_tokens=131072).line
    assert f"still trains on {speed(wide)} tokens" in says


# The constants of chapter 7's rules, as it prints them: FLOP/s and bytes per second, seconds, depths and times.
PRODUCT, DEPTH, SCORES, PASSES, MEMORY, LEAST, LAST = 873e12, 949, 174e12, 6.2, 3.35e12, 0.79e-3, 0.83


def layer_by_rules(model: Any, t: int, tokens: int) -> tuple[float, float, float]:
    """By chapter 7's rules: a layer's products and attention, its passes over memory, and the rest of the least."""
    sizes, head = model.sizes, 2 * tokens * model.num_tokens * model.width / t / SCORES
    parts = [(model.width, sizes.attention_in / t), (sizes.attention_out / t, model.width),
             (model.width, 2 * model.mlp_width / t), (model.mlp_width / t, model.width)]
    took = [[2 * tokens * k * n * (1 + DEPTH / terms) / PRODUCT for terms in (k, n, tokens)] for k, n in parts]
    ahead, back = sum(of[0] for of in took) + head, sum(of[1] + of[2] for of in took) + 2.5 * head
    passes = PASSES * activation_bytes(model.layer(tokens // model.num_tokens), t, t > 1, t > 1) / MEMORY
    idle = max(LEAST - ahead - passes / 3, 0) + max(2 * LEAST - back - 2 / 3 * passes, 0)
    return ahead + back, passes, idle


def by_rules(way: Way) -> dict[str, float]:
    """The seconds of a line without cp and ep, filled by chapter 7's rules."""
    lay, model, line = way.layout, MODELS[way.model], way.line
    p, t, m = lay.pp, lay.tp, SEQUENCES // lay.dp
    products, passes, idle = layer_by_rules(model, t, 8192)
    head = 6 * 8192 * model.width * model.vocab_size / t * (1 + DEPTH / model.width) / PRODUCT
    state = line.parameter_bytes + line.gradient_bytes + line.optimizer_bytes
    n, num = 2 * 8192 * model.width, m * model.num_layers / p
    tp_s = 0.91 * num * 8 * (t - 1) / t * n / 274e9
    pp_s = (p > 1) * m * 2 * n / t / 44.5e9
    layers = num * (products + passes + idle) + m * head / p
    last = LAST * m * head * (1 - 1 / p)
    card = min(274e9, 44.5e9 * max(8 // t, 1))
    often = 3 * m if lay.zero_stage == 3 else 2
    sent_s = often * (1 - 1 / lay.dp) * line.parameter_bytes * (lay.dp if lay.zero_stage == 3 else 1) / card
    hops_s = often * (lay.dp - 1) * model.num_layers / p * 1.0e-6
    hidden = 0 if lay.zero_stage == 3 else 0.4 * 2 / 3 * (layers + tp_s + pp_s) / m
    return {"computed": layers + last + 2 * state / MEMORY, "last": last, "tp": tp_s, "pp": pp_s,
            "bubble": (p - 1) / m * (layers + tp_s + pp_s), "dp": max(sent_s + hops_s - hidden, 0),
            "held": state + line.activation_bytes + 0.65e9 + (lay.zero_stage == 3) * 6 * (
                model.sizes.layer_parameters / t)}


def test_the_rules_of_chapter_7_fill_the_ledgers_lines() -> None:
    lines = [way for way in STORY if way.chapter <= 7]
    short = Way(0, "too short a layer", "llama3.2-1b", Layout(1, 8, 8, sequence_parallel=1))
    for way in (*lines, short):
        ruled, found = by_rules(way), estimate(
            MODELS[way.model], cluster_of("h100", way.layout.num_gpus, SOFTWARE[0]), way.layout, SEQUENCES)
        computed = found.matmul_s + found.elementwise_s + found.launch_s + found.update_s
        assert [ruled[part] for part in ("computed", "tp", "pp", "bubble", "dp")] == pytest.approx(
            [computed, found.tp_s, found.pp_s, found.bubble_s, found.dp_s], rel=0.01, abs=0.005), way
        assert ruled["held"] == pytest.approx(way.line.memory_bytes, rel=0.005)
        assert (found.launch_s > 0) == (way is short)
    assert len(lines) == 9


def test_chapter_7_says_what_the_ledger_counts() -> None:
    says, cluster = told(7), cluster_of("h100", 64, SOFTWARE[0])
    over, peak = cluster.overheads, cluster.flops_per_s
    assert (peak * cluster.efficiency, over.product_depth, peak * over.attention_share, cluster.num_passes,
            cluster.memory_bytes_per_s, over.launch_s, over.head_share) == pytest.approx(
        (PRODUCT, DEPTH, SCORES, PASSES, MEMORY, LEAST, LAST), rel=0.005)
    assert f"at ${PRODUCT / 1e12:.0f}\\,/\\,(1 + {DEPTH}/\\text{{depth}})$ TFLOP/s" in says
    assert f"backward, at {SCORES / 1e12:.0f} TFLOP/s" in says and f"{PASSES} times the [bytes" in says
    assert f"{1e3 * LEAST:.2f} ms for a layer's forward and {2e3 * LEAST:.2f} for its backward" in says
    assert f"a layer's forward takes {1e3 * LEAST:.2f} ms at least, and its backward {2e3 * LEAST:.2f}" in told(5)
    ahead = [(products / 3, passes / 3) for products, passes, _ in (
        layer_by_rules(MODELS[name], 8, 8192) for name in ("llama3-70b", "llama3.2-1b"))]
    assert sum(ahead[0]) == pytest.approx(3.4e-3, rel=0.05) and sum(ahead[1]) == pytest.approx(0.5e-3, rel=0.05)
    assert f"at {MEMORY / 1e12:.2f} TB/s" in says and f"{over.fixed_bytes / 1e9:.2f} GB of buffers" in says
    assert f"The others wait for {100 * over.head_share:.0f} % (fitted) of the other $1-1/p$" in says
    updates = [entry(name, Layout(1, 16, 1, zero_stage=stage)) for name, stage in (
        ("llama3.2-1b", 0), ("llama3-8b", 0), ("llama3-8b", 3))]
    took = [2e3 * (line.parameter_bytes + line.gradient_bytes + line.optimizer_bytes) / MEMORY for line in updates]
    assert f"{took[0]:.0f} ms for 1B, and for 8B {took[1]:.0f} ms under DDP and {took[2]:.0f} with stage 3" in says
    assert (f"at the slower of {450 * over.inside_share:.0f} GB/s and the cards of their ring, each "
            f"{50 * over.across_share:.1f}.") in says
    assert f"less {100 * over.tensor_hidden_share:.0f} %" in says
    assert f"to {100 * (1 - over.stage_hidden_share):.0f} % if they do" in says
    assert f"the last {100 * over.hidden_share:.0f} % of the last backward" in says
    assert f"waits {1e6 * over.ring_hop_s:.1f} µs more for each message" in says
    small, middle, *large = (round(100 * reached(way.line, way.model, way.layout.num_gpus) / 989e12) for way in STORY
                             if way.chapter in (2, 4, 5, 6, 7) and (not way.opens or way.chapter == 5))
    assert f"reach {small} % with the 1B model, {middle} % with 8B and {min(large)} to {max(large)} % with 70B" in says


def test_chapter_3_says_what_messages_wait_for() -> None:
    says, hop_s = told(3), cluster_of("h100", 128, SOFTWARE[0]).overheads.ring_hop_s
    buckets = MODELS["llama3.2-1b"].num_parameters * 2 / (25 * 2**20)
    few, many = (2 * (size - 1) for size in (128, 1024))
    assert f"{few} of them, {1e3 * few * hop_s:.1f} ms, and on 1,024 GPUs {many:,}, {1e3 * many * hop_s:.1f} ms" in says
    assert f"16 layers: {16e3 * few * hop_s:.0f} ms and {16e3 * many * hop_s:.0f} ms" in says
    assert f"are {buckets:.0f} buckets" in says
    assert f"wait {1e3 * buckets * few * hop_s:.0f} ms and {buckets * many * hop_s:.1f} s" in says


def test_chapter_3_says_how_long_nccl_counts_its_own_hops() -> None:
    """Its model of a ring of GPUs on nodes of eight, and of a tree with a chain in each node: src/graph/tuning.cc.

    A hop inside a node takes 0.6 or 3.4 µs, or what it takes to post a message, 1 µs, in the second protocol three.
    """
    says, ring, tree = told(3), {"small": (max(0.6, 1.0), 2.7), "large": (max(3.4, 3 * 1.0), 14.0)}, (4.0, 14.0)

    def ring_us(num_gpus: int, inside_us: float, across_us: float) -> float:
        across = 2 * (num_gpus // 8 - 1)
        return (2 * (num_gpus - 1) - across) * inside_us + across * across_us

    each = [ring_us(128, *hop) / 254 for hop in ring.values()]
    amd = max(0.6, 2.0), max(3.4, 3 * 2.0)  # there it takes 2 µs to post a message
    for (size, (inside, across)), inside_amd, mean in zip(ring.items(), amd, each):
        assert (f"| for {size} buffers | {inside:.1f} µs | {inside_amd:.1f} µs | {across:g} µs | {mean:.1f} µs |"
                ) in says
    assert f"1.4 times its sum, so {1.4 * each[1]:.1f} µs a message" in says
    assert (f"would wait {1.4 * ring_us(128, *ring['large']) / 1e3:.1f} ms, and "
            f"{1.4 * ring_us(1024, *ring['large']) / 1e3:.1f} on 1,024") in says
    few, many = (2 * (7 * tree[0] + levels * tree[1]) / 1e3 for levels in (4, 7))
    assert f"it counts {few:.2f} ms and {many:.2f}." in says
    gathers_ms = 1023 * each[1] / 1e3
    assert f"{each[1]:.1f} µs that NCCL counts for large buffers it would be {gathers_ms:.1f} ms" in told(4)


def test_chapter_9_says_what_experts_cost() -> None:
    says, model, sequences = told(9), MODELS["mixtral-8x7b"], 512
    over = cluster_of("h100", 64, SOFTWARE[0]).overheads
    whole, spread = (way.line for way in STORY if way.chapter == 9)
    assert f"all {model.num_parameters / 1e9:.1f} billion parameters" in says
    assert f"$6 \\cdot {model.num_active_parameters / 1e9:.1f}$ billion FLOPs" in says
    sent = [line.inside_bytes + line.crossing_bytes for line in (whole, spread)]
    assert f"sends {sent[1] / 1e9:.0f} GB in a step instead of {sent[0] / 1e12:.1f} TB" in says
    assert f"{whole.moment_bytes / 1e9:.1f} GB of temporary buffers" in says
    assert f"it needs {whole.memory_bytes / 1e9:.1f} GB" in says
    assert (f"holds {spread.memory_bytes / 1e9:.1f} GB, {(whole.memory_bytes - spread.memory_bytes) / 1e9:.1f} GB less"
            in says)
    waits = [round(100 * line.exposed_s / line.step_s) for line in (spread, whole)]
    assert f"waits for {waits[0]} % of the step instead of {waits[1]} %, which the opening line" in says
    assert f"line would wait if it fitted, and trains on {speed(spread)} tokens" in says
    qwen = MODELS["qwen3-235b-a22b"].experts
    assert qwen and f"they have {1.5 * qwen.width * 8 / 7:,.0f} FLOPs for a byte" in says
    found = estimate(model, cluster_of("h100", 64, SOFTWARE[0]), Layout(1, 64, 1, zero_stage=3, ep=8), sequences,
                     ADAM_MIXED)
    assert f"are {found.ep_bytes / 1e9:.0f} GB and {found.ep_s:.1f} of the {spread.step_s:.0f} seconds" in says
    loads = expert_loads(8, 2, 3)
    assert says.count(f"{max(loads):.2f} times as long") == 2
    assert f"or {100 * sum(max(load - 1.25, 0) for load in loads) / 8:.1f} % are dropped at a factor of 1.25" in says
    again = entry("mixtral-8x7b", Layout(1, 64, 1, 4, zero_stage=3, ep=8, recompute="full"))
    assert (f"four sequences, which gather a quarter as often. That holds {again.memory_bytes / 1e9:.0f} GB and trains "
            f"on {speed(again)} tokens a second") in says
    # of three passes over the experts, in each of eight micro-batches, seven eighths go to other nodes
    experts_bytes = 8 * 3 * 7 / 8 * 2 * 32 * model.sizes.expert_parameters / 8
    own, shared = (experts_bytes / rate for rate in (50e9 * over.across_share, 450e9 * over.inside_share))
    assert (f"At {50 * over.across_share:.0f} GB/s that takes {own:.1f} seconds. With all cards of a node it would be "
            f"{shared:.1f}.") in says and own == pytest.approx(0.87 * spread.exposed_s, rel=0.02)
    flops, small = 6 * model.num_active_parameters, 6 * MODELS["llama3-8b"].num_parameters
    [dense] = (way.line for way in STORY if way.chapter == 4 and not way.opens)
    assert f"costs {flops / 1e9:.0f} billion FLOPs, and {small / 1e9:.0f} billion in the 8B model" in says
    assert (f"reaches {spread.tokens_per_s * flops / 1e12:.0f} TFLOP/s and the last layout "
            f"{again.tokens_per_s * flops / 1e12:.0f}, where the 8B model reached "
            f"{dense.tokens_per_s * small / 1e12:.0f}") in says
    four, wide = (entry("mixtral-8x7b", Layout(1, gpus, 1, zero_stage=3, ep=ep)) for gpus, ep in ((64, 4), (128, 8)))
    assert (f"holds {four.memory_bytes / 1e9:.1f} GB. On 128 GPUs the line of the ledger, with ep 8, trains on "
            f"{speed(wide)} tokens") in says
    rate = flops * spread.tokens_per_s * spread.step_s / (spread.step_s - spread.exposed_s)
    per_byte = [1.5 * width * ep / (ep - 1) for width, ep in ((14336, 8), (2048, 64), (2048, 8))]
    card, inside = rate / (50e9 * over.across_share), rate / (450e9 * over.inside_share)
    assert f"at {per_byte[0]:,.0f} FLOPs a byte against {card:,.0f} over the card" in says
    assert f"they take {100 * inside / per_byte[0]:.0f} % of the time" in says
    assert round(14336 / qwen.width) == 9 and round(card / (1.5 * qwen.width * 8 / 7)) == 4
    assert f"have {per_byte[1]:,.0f} FLOPs for a byte" in says
    assert f"they would have {per_byte[2]:,.0f}, where {inside:,.0f} are enough" in says
    crossing = 1.5 * 2048 * 8 / 7
    assert 2.5 < card / crossing < 3.5, "three times as long"
    assert f"{crossing:,.0f} FLOPs for a byte, but these bytes go over the card, where {card:,.0f} are needed" in says
    assert f"{model.num_parameters / model.num_active_parameters:.1f} times as many for Mixtral" in says
    layer = found.ep_bytes / 8 / 32
    assert f"are {layer / 1e6:.0f} MB in each layer, {32 * layer / 1e9:.0f} GB in 32 layers" in says
    assert f"{6 * 32 * model.sizes.expert_parameters * 8 * 63 / 64 / 1e12:.1f} TB in a step" in says
    assert f"take {found.launch_s:.1f} of the {spread.step_s:.0f} seconds of a step for that" in says
    assert 989e12 / 3.35e12 == pytest.approx(295, abs=0.5) and "below 295 rows" in says


def test_chapters_2_to_15_open_with_what_fails_and_close_in_the_ledger() -> None:
    for chapter in range(2, 16):
        before, *after = told(chapter).split("\n## ")
        assert "**What still fails.**" in before + after[0], chapter
        assert any(section.startswith("In the ledger") for section in after), chapter
    for chapter in range(11, 15):
        closing = told(chapter).partition("## In the ledger")[2].partition("\n## ")[0]
        assert "**Solved:**" in closing and "**Left open:**" in closing, chapter


def test_chapter_11_says_what_other_networks_make_of_the_lines() -> None:
    says, h100s = told(11), cluster_of("h100", 64, SOFTWARE[0])
    worse, better = replace(h100s, across_bytes_per_s=50e9 / 8), replace(h100s, gpus_per_node=64)
    zero, *others = [[entry(way.model, way.layout, gpu=network) for network in (h100s, worse, better)]
                     for way in STORY if way.model == "llama3-70b" and not way.opens]
    tb = zero[0].crossing_bytes / 1e12  # of three passes one is of gradients
    assert zero[0] == STORY[6].line and f"each GPU sends {tb:.0f} TB to other nodes in a step, counted in 16" in says
    assert f"torchtitan's gradients in 32 bits make it {4 / 3 * tb:.0f}" in says
    assert f"trains on {speed(zero[1])} tokens a second instead of {speed(zero[0])}, and on NVLink it would" in says
    assert f"would train on {speed(zero[2])}." in says
    across = sorted(round(line.crossing_bytes / 1e9) for line, *_ in others)
    lost = sorted(round(100 * (1 - row[1].tokens_per_s / row[0].tokens_per_s)) for row in others)
    assert f"a GPU sends {across[0]} to {across[-1]} GB, and they lose {lost[0]} to {lost[-1]} %" in says
    assert f"50 GB/s to itself, of which it reaches {50 * h100s.overheads.across_share:.0f}" in says


def test_chapter_12_says_what_failures_leave_of_a_line() -> None:
    says, day = told(12), 24 * 3600
    node_s = 54 * day / 419 * 2048
    small, large = (Job(num_gpus // 8, node_s, 60, 300) for num_gpus in (64, 16384))
    [line] = (way.line for way in STORY if way.chapter == 10)
    [row] = [row for row in data_sets()["llama3-paper"].rows
             if row.layout.num_gpus == 16384 and row.model.num_tokens == 8192]
    published = row.global_batch * 8192 / row.step_s / 16384

    def kept(job: Job) -> float:
        return expected_goodput(job, daly(job.save_s, job.job_mtbf_s))

    days = 2e12 / line.tokens_per_s / 64 / day
    assert f"trains on {speed(line)} tokens a second and GPU" in says and f"to go on for {days:.0f} days" in says
    assert f"interrupted once in {small.job_mtbf_s / day:.0f} days, ten times" in says
    assert days * day / small.job_mtbf_s == pytest.approx(10, abs=0.5)
    assert f"{line.tokens_per_s * kept(small):,.0f} tokens are left of {speed(line)}" in says and kept(small) > 0.99
    assert kept(small) - expected_goodput(small, day) == pytest.approx(0.01, abs=0.001)
    assert expected_goodput(large, day) < 0.005
    assert (f"{published:.0f} tokens become {published * kept(large):.0f}, and "
            f"{published * kept(replace(large, restart_s=900)):.0f} if") in says
    assert f"for 5 s, they are {published * kept(replace(large, save_s=5)):.0f}" in says


def test_chapter_13_says_what_one_late_gpu_costs() -> None:
    says, [way] = told(13), [way for way in STORY if way.chapter == 10]
    line, bar = way.line, plan_told(way.model, 64, way.layout)
    more_s = (line.step_s - line.exposed_s - line.idle_s) / 10
    step_s = line.step_s + more_s
    assert f"trains on {speed(line)} tokens a second" in says
    assert f"Your log says {line.tokens_per_s * line.step_s / step_s:.0f}." in says
    assert bar.low_s < step_s < bar.high_s and "still inside the error bar" in says
    assert (f"takes {more_s:.1f} seconds from each step of the 63 others, and "
            f"{24 * 64 * more_s / step_s:.0f} GPU hours from each day") in says


@pytest.mark.parametrize("late", range(4))
def test_a_late_stage_makes_the_step_longer_by_what_it_computes_longer(late: int) -> None:
    """What chapter 13 adds: the pipeline has that stage's pace, but for its fill and drain."""
    even, slow = (simulate_pipeline(one_f_one_b(4, 256), 1, 2, slowdown=slowdown).duration_s
                  for slowdown in ({}, {late: 1.1}))
    assert 0.1 * 3 * (256 - 3) - 1e-9 <= slow - even <= 0.1 * 3 * 256 + 1e-9


def test_chapter_14_says_what_was_published_of_the_planned_layout() -> None:
    says, some = told(14), measured()
    rows = {row.precision: (row, 64 * row.step_s, ratio) for row, ratio in zip(some.rows, some.ratios)
            if (row.name, row.machine, row.layout.num_gpus) == ("llama3-70b", "h100", 64)}
    [way] = [way for way in STORY if way.chapter == 10]
    eight, plain = rows["fp8"][0].layout, rows["bf16"][0].layout
    assert replace(eight, stages_per_rank=1) == way.layout and f"{eight.stages_per_rank}" == "5"
    assert (plain.zero_stage, plain.tp, plain.pp, plain.cp) == (3, 1, 1, 2)
    rates = {name: (row.global_batch * 8192 / spent, row.global_batch * 8192 / spent / ratio)
             for name, (row, spent, ratio) in rows.items()}
    assert "its step has 128 sequences" in says and rows["fp8"][0].global_batch == 128
    assert "It trains on {:,.0f} tokens a second, where the estimate is {:,.0f}".format(*rates["fp8"]) in says
    assert "It reaches {:,.0f} in 16 bits, and the estimate is {:,.0f}".format(*rates["bf16"]) in says
    assert f"The ledger's {speed(way.line)} are an estimate" in says
    [path] = ROOT.glob("chapters/14_*.ipynb")
    [hidden] = re.findall(r"In this model of the times (\d+) % of the messages hide", says)
    opening = next(cell for cell in nbformat.read(path, 4).cells if cell.cell_type == "code")
    assert any(f"({hidden}%)</td>" in out.get("data", {}).get("text/html", "") for out in opening.outputs)


def test_chapter_15_says_what_a_slow_line_costs() -> None:
    says, model = told(15), MODELS["llama3-8b"]
    each, rarely = (way for way in STORY if way.chapter == 15)
    [one] = (way.line for way in STORY if way.chapter == 4 and not way.opens)
    gradients, weights = (way.apart.line_bytes(model.num_parameters) for way in (each, rarely) if way.apart)
    alone = entry("llama3-8b", each.layout, SEQUENCES // 2)
    assert f"{gradients / 1e9:.1f} GB go each way over the line: {gradients / 1e9:.1f} seconds that nothing" in says
    assert f"beside {alone.step_s:.1f} of everything else" in says
    assert f"a GPU trains on {speed(each.line)} tokens a second, where it trained on {speed(one)} in one hall" in says
    assert (f"{weights / 1e9:.2f} GB a step in place of {gradients / 1e9:.1f}, so a step waits for the line for "
            f"{1e3 * weights / 1e9:.0f} ms in place of {gradients / 1e9:.1f} seconds") in says
    assert f"and a GPU trains on {speed(rarely.line)} tokens a second in place of {speed(each.line)}" in says
    kept = rarely.line.memory_bytes - each.line.memory_bytes
    assert f"{kept / 1e9:.1f} GB more, {rarely.line.memory_bytes / 1e9:.1f} GB in all" in says
    streamed = replace(rarely, apart=Apart(every=100, parts=4)).line
    assert f"by parts, nothing is left to wait for: {speed(streamed)}" in says
    before, *after = says.split("\n## ")
    assert "**What still fails.**" in before and any(section.startswith("In the ledger") for section in after)
    least = weights / alone.step_s
    assert f"{least / 1e6:.0f} MB/s would do" in says


# In a page

LINES = """(chosen) => {
  const data = JSON.parse(JSON.stringify(globalThis.ledgerData));
  return globalThis.lockstepLedger.answer(data).answer(chosen, data);
}"""


def drawn(seed: int) -> dict[str, Any]:
    """What a reader may choose."""
    some = random.Random(seed)
    chosen = {"model": some.choice(list(NAMES.values())), "tp": some.choice(SIZES[:4]), "pp": some.choice(SIZES),
              "micro": some.choice(SIZES), "again": some.choice(AGAIN), "cp": some.choice(SIZES),
              "tokens": some.choice([8192, 65536, 131072]), "halls": some.choice(HALLS), "every": some.choice(EVERY),
              "parts": some.choice(PARTS)}
    least = chosen["tp"] * chosen["pp"] * chosen["cp"]
    sequences = 512 * 8192 // chosen["tokens"] // chosen["halls"]
    chosen["gpus"] = some.choice([n for n in GPUS if least <= n <= least * sequences // chosen["micro"]] or [least])
    spread = [ep for ep in SIZES[:4] if ep <= chosen["gpus"] // chosen["pp"] and (ep == 1 or chosen["model"] == "8x7B")]
    return chosen | {"zero": some.randrange(4) if chosen["gpus"] > least else 0, "ep": some.choice(spread)}


def layout_of(chosen: dict[str, Any]) -> Layout:
    """The layout that a reader's choice stands for."""
    tp, pp, cp = chosen["tp"], chosen["pp"], chosen["cp"]
    return Layout(pp, chosen["gpus"] // tp // pp // cp, tp, chosen["micro"], zero_stage=chosen["zero"], cp=cp,
                  ep=chosen["ep"], sequence_parallel=int(tp > 1),
                  recompute={"half": "half", "all": "full"}.get(chosen["again"]))


def largest(way: Way) -> list[tuple[str, int]]:
    """The largest micro-batches that fit an H100, by what is recomputed."""
    cluster, tokens = cluster_of("h100", way.layout.num_gpus, SOFTWARE[0]), way.num_tokens
    halls, outer = 1, 0.0
    if way.apart:
        halls, outer = way.apart.halls, way.line.optimizer_bytes - replace(way, apart=None).line.optimizer_bytes
    return [(words, largest_micro_batch(
        replace(MODELS[way.model], num_tokens=tokens), cluster, replace(way.layout, recompute=how),
        SEQUENCES * 8192 // tokens // halls, cluster.memory_bytes - outer, ADAM_MIXED))
        for words, how in zip(AGAIN, (None, "half", "full"))]


def test_page_and_notebook_have_the_same_lines(show: Callable[..., Any]) -> None:
    page = show(ledger(15))
    page.evaluate("data => { globalThis.ledgerData = data }", data_of(ledger(15)))
    models = {short: name for name, short in NAMES.items()}
    for seed in range(40):
        chosen = drawn(seed)
        found = page.evaluate(LINES, chosen)
        apart = Apart(chosen["halls"], chosen["every"], chosen["parts"]) if chosen["halls"] > 1 else None
        own = Way(8, "", models[chosen["model"]], layout_of(chosen), num_tokens=chosen["tokens"], apart=apart)
        assert_equal(found["own"], own.line)
        assert [tuple(pair) for pair in found["own"]["fits"]] == largest(own)
    for line, way in zip(found["lines"], STORY, strict=True):
        assert_equal(line, way.line)


def assert_equal(found: dict[str, Any], line: Any) -> None:
    """A line of the page and one of Python have the same numbers and words."""
    for name, value in asdict(line).items():
        assert found[name] == (value if isinstance(value, str) else pytest.approx(value, rel=1e-9, abs=1e-9)), name


def test_the_reader_is_told_which_batch_fits_and_can_turn_to_it(show: Callable[..., Any]) -> None:
    page = show(ledger(6))
    said = caption(page).partition("Largest micro-batch that fits: ")[2]
    assert said == "2 with nothing, 4 with half, 16 with all recomputed."
    assert largest(STORY[7]) == [("nothing", 2), ("half", 4), ("all", 16)]
    turn(page, "micro-batch", SIZES.index(16))
    page.get_by_role("button", name="all", exact=True).click()
    assert state(page)["limit"] != "memory"
    turn(page, "stages", SIZES.index(1))  # the layers of all stages on each GPU
    assert state(page)["limit"] == "memory" and "fits: none with nothing, none with half, none with" in caption(page)
    [way] = (way for way in STORY if way.chapter == 4 and not way.opens)
    sizes, logits = dict(largest(way)), 4 * 14 * MODELS[way.model].vocab_size * 8192
    assert f"here {sizes['nothing']} sequence with nothing recomputed, and {sizes['all']} with all" in told(4)
    four = replace(way, layout=replace(way.layout, micro_batch_size=4, recompute="full")).line.memory_bytes
    assert f"Four hold {four / 1e9:.1f} GB even so: {logits / 1e9:.1f} are their logits" in told(4)
    own = plan_told(way.model, 16, way.layout).micro_batches
    assert f"with half recomputed, {own['half']} here in place of {sizes['half']}." in told(4)


def test_what_does_not_go_together_can_not_be_chosen(show: Callable[..., Any]) -> None:
    page = show(ledger(1))
    turn(page, "tensor parallel", 3)
    assert state(page)["tp"] == "1", "one GPU has no group of eight"
    turn(page, "GPUs", 4)
    turn(page, "tensor parallel", 3)
    turn(page, "ZeRO stage", 3)
    assert (state(page)["tp"], state(page)["dp"], state(page)["zero_stage"]) == ("8", "2", "3")
    turn(page, "stages", 1)
    assert (state(page)["pp"], state(page)["dp"], state(page)["zero_stage"]) == ("2", "1", "0")
    click(page, "Reset")
    assert state(page)["pp"] == "1"
    turn(page, "GPUs", GPUS.index(1024))
    assert state(page)["dp"] == str(SEQUENCES), "a replica has one sequence at least"


def test_only_a_model_with_experts_spreads_them_over_gpus_of_a_stage(show: Callable[..., Any]) -> None:
    page = show(ledger(9))
    assert (state(page)["ep"], state(page)["dp"]) == ("8", "64")
    assert "8x7B on 64 GPUs, dp 64, ep 8, ZeRO-3: 3,833 tokens/s per GPU" in caption(page)
    turn(page, "GPUs", 2)
    assert (state(page)["dp"], state(page)["ep"]) == ("4", "4")
    page.get_by_role("button", name="70B", exact=True).click()
    assert state(page)["ep"] == "1"
    assert "expert parallel" not in html_of(ledger(8)) and "8x7B" not in html_of(ledger(8))


def test_lines_are_readable_wide_and_narrow_and_in_words(show: Callable[..., Any]) -> None:
    for width in (760, 390):
        page = show(ledger(5), width=width)
        assert not axe_finds(page)
        assert_readable(page, f"at {width} px")
        text = page.inner_text(PLAYER).replace("\u00a0", " ")
        assert "216 GB: too much" in text and "43 GB" in text and "481" in text
        assert ("1 · 1B" in text) == (width == 760)
        if width == 390:
            click(page, "Show 3 earlier lines")
            assert "1 · 1B" in page.inner_text(PLAYER)
    assert caption(page).startswith("70B on 64 GPUs, dp 8, tp 8, ZeRO-3: 481 tokens/s per GPU. A GPU holds 43 GB")
    words = html_of(ledger(5))
    assert "<td>ZeRO-3 on 64 GPUs</td><td>216 GB of 80 GB</td>" in words and "<td>481</td>" in words
    assert MODELS_OF_THE_STORY == tuple(NAMES)
