"""What memory, traffic and a transformer cost, against formulas counted by hand; the formulas of the cheat-sheet."""
from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop
from torch.utils.flop_counter import FlopCounterMode

from book.cost import (ADAM_32, ADAM_FSDP2, ADAM_MIXED, ADAM_MIXED_GRADIENTS_32, MODELS, Estimate, LayerShape, Layout,
                       StateBytes, Transformer, activation_bytes, bytes_across_nodes, bytes_by_axis, cluster_of,
                       estimate, flows, hybrid_sent_bytes, pipeline_bubble, sent_bytes, sharded_sent_bytes, state_bytes)
from book.cost.ledger import GPU, SEQUENCES
from book.cost.machines import EACH, SOFTWARE
from book.cost.measured import data_sets
from book.cost.published import RECOMPUTATION, WEAK_SCALING
from book.launch import launch
from book.mesh import Mesh, MeshError
from book.parallel import GPT
from book.trace import Event, Trace
from tests.browser import Browser
from tests.hybrid import CONFIG, MIXED, NUM_MICRO_BATCHES, NUM_SEQUENCES, NUM_STEPS, mesh_of, trained
from tests.website import ROOT, Site


def test_the_papers_row_of_7_5_billion_on_64_ranks():
    found = [round(state_bytes(7.5e9, stage, 64).total / 1e9, 1) for stage in range(4)]
    assert found == [120.0, 31.4, 16.6, 1.9]


@pytest.mark.parametrize("each, total", [(ADAM_MIXED, 16), (ADAM_MIXED_GRADIENTS_32, 18), (ADAM_32, 16)])
def test_bytes_of_one_parameter(each, total):
    assert each.total == state_bytes(1, each=each).total == total


@pytest.mark.parametrize("stage, shards", [(0, (1, 1, 1)), (1, (1, 1, 4)), (2, (1, 4, 4)), (3, (4, 4, 4))])
def test_a_stage_shards_one_more_of_the_three(stage, shards):
    found = state_bytes(100, stage, 4, StateBytes(2, 3, 5))
    assert (found.parameters, found.gradients, found.optimizer) == tuple(
        100 * size / shard for size, shard in zip((2, 3, 5), shards))


def fsdp2_state() -> list[tuple[torch.dtype, torch.dtype, int, int]]:
    """Between the micro-batches of a pipeline, and after a step: types of parameters and gradients, bytes of both."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    dist.init_process_group("gloo")
    model = torch.nn.Linear(64, 64, bias=False)
    fully_shard(model, reshard_after_forward=False, mp_policy=MixedPrecisionPolicy(
        param_dtype=torch.bfloat16, reduce_dtype=torch.float32))
    found = []
    (param,) = model._get_fsdp_state()._fsdp_param_group.fsdp_params
    for is_last in (False, True):
        model.set_requires_gradient_sync(is_last)
        model.set_reshard_after_backward(is_last)
        model(torch.ones(2, 64)).sum().backward()
        gradient = model.weight.grad.to_local() if is_last else param.unsharded_accumulated_grad
        held = model.weight.to_local() if is_last else param._unsharded_param
        found.append((held.dtype, gradient.dtype, held.nbytes, gradient.nbytes))
    return found


def test_fsdp2_holds_the_state_that_is_counted_between_micro_batches_and_after_a_step() -> None:
    between, after = launch(fsdp2_state, 2)[0]
    assert between[:2] == (torch.bfloat16, torch.float32) and after[:2] == (torch.float32, torch.float32)
    in_pipeline, sharded = state_bytes(64 * 64, 1, 2, ADAM_FSDP2), state_bytes(64 * 64, 3, 2, ADAM_FSDP2)
    assert between[2:] == (in_pipeline.parameters, in_pipeline.gradients)
    # stage 3's parameters are counted in the optimizer's twelve bytes: the other eight are Adam's moments
    assert sharded.parameters == 0 and after[2:] == (sharded.optimizer / 3, sharded.gradients)
    assert [state_bytes(1, stage, 4, ADAM_FSDP2).total for stage in range(4)] == [16, 9, 6, 4]


def test_torchtitans_pipelines_hold_more_than_sixteen_bytes_say() -> None:
    """Both that were published, with and without gradients in 32 bits: what is counted is nearer, and still less."""
    rows = [row for row in data_sets()["torchtitan-reports"].rows if row.layout.pp > 1]
    assert [round(row.memory_bytes / 1e9) for row in rows] == [78, 91]
    for row in rows:
        cluster = cluster_of(row.machine, row.layout.num_gpus, row.software, row.precision)
        before, after = (estimate(row.model, cluster, row.layout, row.global_batch, each).memory_bytes
                         for each in (ADAM_MIXED, EACH[row.software]))
        assert before < 0.63 * row.memory_bytes < 0.73 * row.memory_bytes < after < row.memory_bytes


@pytest.mark.parametrize("stage", range(4))
def test_one_shard_holds_everything(stage):
    assert state_bytes(10, stage, 1) == state_bytes(10)


@pytest.mark.parametrize("arguments, words", [((10, 4, 2), "no ZeRO stage 4"), ((10, -1, 2), "no ZeRO stage -1"),
                                             ((10, 3, 0), "num_shards is 0")])
def test_invalid_memory_raises_a_clear_error(arguments, words):
    with pytest.raises(ValueError, match=words):
        state_bytes(*arguments)


CUBE = (2, 2, 2)


def wanted(layout, parameter_bytes, zero_stage=0):
    """The formula for each rank: {axis: bytes of ranks 0 to 7 in a step}."""
    num_sequences = NUM_SEQUENCES // layout[1] // NUM_MICRO_BATCHES
    layer = LayerShape(num_sequences, CONFIG.context, CONFIG.width, CONFIG.num_heads)
    rows = [hybrid_sent_bytes(mesh_of(layout), rank, layer, CONFIG.num_layers, NUM_MICRO_BATCHES, num_bytes, zero_stage,
                              bytes_per_number=8) for rank, num_bytes in enumerate(parameter_bytes)]
    return {axis: [row[axis] for row in rows] for axis in rows[0]}


def held_parameter_bytes(layout):
    """Bytes of parameters of each rank, as it holds them after a run without sharding."""
    return [sum(weight.nbytes for weight in part.weights.values()) for part in trained(layout)]


def check(layout, zero_stage=0):
    found = bytes_by_axis(flows(trained(layout, zero_stage=zero_stage).trace, mesh_of(layout)), 8)
    for axis, per_rank in wanted(layout, held_parameter_bytes(layout), zero_stage).items():
        np.testing.assert_allclose(found.get(axis, np.zeros(8)), np.multiply(per_rank, NUM_STEPS), rtol=1e-12,
                                   err_msg=axis)
    assert found.keys() == {axis for axis, size in zip(("pp", "dp", "tp"), layout) if size > 1}


@pytest.mark.slow
@pytest.mark.parametrize("layout", MIXED)
def test_every_layout_sends_what_the_formula_says_on_each_axis(layout):
    check(layout)


@pytest.mark.slow
@pytest.mark.parametrize("zero_stage", [pytest.param(1, marks=pytest.mark.slow), 2, 3])
def test_with_sharded_state_each_micro_batch_has_its_own_traffic_from_stage_2_on(zero_stage):
    """No unit is padded: two ranks divide each one's parameters."""
    check(CUBE, zero_stage)
    trace = trained(CUBE, zero_stage=zero_stage).trace
    counted = {op: sum(event.op == op and event.group == (0, 2) for event in trace.of_rank(0)) / NUM_STEPS
               for op in ("all_reduce", "reduce_scatter", "all_gather")}
    num_units, m = CONFIG.num_layers // 2 + 1, NUM_MICRO_BATCHES
    assert counted == {"all_reduce": 0, "reduce_scatter": num_units * (1 if zero_stage == 1 else m),
                       "all_gather": num_units * (2 * m if zero_stage == 3 else 1)}


def test_with_one_stage_and_one_micro_batch_zero_costs_what_chapter_04_counts():
    layer = LayerShape(1, 4, 8, 2)
    for zero_stage in range(4):
        found = hybrid_sent_bytes(mesh_of((1, 4, 1)), 0, layer, 2, 1, 1000.0, zero_stage)
        assert found == {"pp": 0, "dp": sharded_sent_bytes(zero_stage, 4, 1000.0), "tp": 0}
    with pytest.raises(ValueError, match="no ZeRO stage 4"):
        hybrid_sent_bytes(mesh_of(CUBE), 0, layer, 2, 1, 1.0, 4)
    for axes in (("dp", "tp"), ("pp", "tp"), ("pp", "dp")):
        with pytest.raises(MeshError, match="no axis"):
            hybrid_sent_bytes(Mesh(axes, (2, 2)), 0, layer, 2, 1, 1.0)


@pytest.mark.slow
@pytest.mark.parametrize(("ranks_per_node", "crossing"), [
    (8, set()), (4, {"pp"}), (2, {"pp", "dp"}), (1, {"pp", "dp", "tp"})])
def test_the_innermost_axis_is_the_last_to_cross_nodes(ranks_per_node, crossing):
    mesh = mesh_of(CUBE, ranks_per_node)
    found = flows(trained(CUBE).trace, mesh)
    across = bytes_across_nodes(found, mesh)
    assert {axis for axis, num_bytes in across.items() if num_bytes} == crossing
    for axis in crossing:
        assert across[axis] == pytest.approx(bytes_by_axis(found, 8)[axis].sum())


def test_each_rank_of_an_all_to_all_sends_to_all_others():
    mesh, group = Mesh.of({"dp": 2, "ep": 3}), (3, 4, 5)
    even = Event(4, "collective", "all_to_all", group=group, num_bytes=30.0)
    uneven = Event(4, "collective", "all_to_all", group=group, num_bytes=30.0, parts=(1, 20, 5))
    assert flows(Trace([even], 6, "logical", "recorded"), mesh) == {("ep", 4, 3): 10, ("ep", 4, 5): 10}
    assert flows(Trace([uneven], 6, "logical", "recorded"), mesh) == {("ep", 4, 3): 1, ("ep", 4, 5): 5}
    assert sent_bytes(even) == 20 and sent_bytes(uneven) == 6


def test_each_rank_of_a_ring_sends_to_the_next_and_the_last_to_the_first():
    mesh, group = Mesh.of({"dp": 2, "tp": 4}), (4, 5, 6, 7)
    events = [Event(rank, "collective", "all_gather", group=group, num_bytes=400.0) for rank in group]
    assert flows(Trace(events, 8, "logical", "recorded"), mesh) == {
        ("tp", 4, 5): 300, ("tp", 5, 6): 300, ("tp", 6, 7): 300, ("tp", 7, 4): 300}


def test_groups_along_two_axes_and_along_none_are_distinguished():
    mesh = Mesh.of({"pp": 2, "dp": 2, "tp": 2})
    events = [Event(0, "collective", "all_reduce", group=(0, 1, 2, 3), num_bytes=8.0),
              Event(0, "collective", "all_reduce", group=(0, 3), num_bytes=8.0),
              Event(0, "send", peer=4, num_bytes=5.0), Event(0, "send", peer=7, num_bytes=7.0),
              Event(0, "compute", "F"), Event(0, "collective", "barrier", group=(0, 1))]
    found = flows(Trace(events, 8, "logical", "recorded"), mesh)
    assert found == {("dp+tp", 0, 1): 12, ("none", 0, 3): 8, ("pp", 0, 4): 5, ("none", 0, 7): 7}


def test_traffic_of_collectives_other_than_rings_is_not_guessed():
    with pytest.raises(ValueError, match="broadcast depends on how"):
        sent_bytes(Event(0, "collective", "broadcast", group=(0, 1), num_bytes=8.0))


def test_every_rank_has_a_part_of_the_config():
    assert len(GPT(CONFIG).blocks) == 8 and CONFIG.num_heads == 8 and CONFIG.vocab_size >= 8


B, S, H, A, V, L = 2, 6, 8, 2, 20, 3
SMALL = Transformer(L, H, A, S, V)
GPT3 = Transformer(96, 12288, 96, 2048, 50257)


@pytest.mark.parametrize("row", WEAK_SCALING, ids=lambda row: row.name)
def test_parameters_are_those_of_the_published_table(row):
    assert f"{row.model.num_parameters / 1e9:.1f}B" == row.name


def test_gpt_3_has_175_billion():
    assert round(GPT3.num_parameters / 1e9) == 175


def test_parameters_by_matrix_and_vector():
    layer = {"qkv": 3 * H * H + 3 * H, "projection": H * H + H, "mlp": 2 * 4 * H * H + 4 * H + H, "norms": 4 * H}
    assert SMALL.layer_parameters == sum(layer.values())
    assert SMALL.num_parameters == L * sum(layer.values()) + V * H + S * H
    closed = 12 * L * H**2 * (1 + 13 / (12 * H) + (V + S) / (12 * L * H))
    assert SMALL.num_parameters == pytest.approx(closed, rel=1e-12)


def attention_core(q, k, v):
    return torch.softmax(q @ k.transpose(-1, -2), -1) @ v


def layer(x, weights, recompute):
    """All products of a layer: q, k, v; scores and values; the projection; the MLP."""
    qkv, projection, up, down = weights
    q, k, v = ((x @ qkv).view(B, S, 3, A, H // A).permute(2, 0, 3, 1, 4))
    core = checkpoint(attention_core, q, k, v, use_reentrant=False) if recompute else attention_core(q, k, v)
    x = x + core.transpose(1, 2).reshape(B, S, H) @ projection
    return x + torch.relu(x @ up) @ down


def counted(recompute):
    """FLOPs of all products in the forward and backward of L layers and a head, as torch ran them.

    By itself torch stops a recomputation before a last product whose result no backward needs; the papers count it.
    """
    gen = torch.Generator().manual_seed(0)
    shapes = [(H, 3 * H), (H, H), (H, 4 * H), (4 * H, H)]
    weights = [[torch.randn(shape, generator=gen, requires_grad=True) for shape in shapes] for _ in range(L)]
    head = torch.randn(H, V, generator=gen, requires_grad=True)
    x = torch.randn(B, S, H, generator=gen, requires_grad=True)
    with set_checkpoint_early_stop(False), FlopCounterMode(display=False) as counter:
        for own in weights:
            x = checkpoint(layer, x, own, None, use_reentrant=False) if recompute == "full" else layer(
                x, own, recompute)
        (x @ head).sum().backward()
    return counter.get_total_flops()


@pytest.mark.parametrize("recompute", [None, "selective", "full"])
def test_flops_are_the_products_that_run(recompute):
    assert SMALL.step_flops(B, recompute) == counted(recompute)


@pytest.mark.parametrize("model", [SMALL, GPT3])
def test_flops_are_the_closed_forms_of_the_papers(model):
    layers, h, s, vocab = model.num_layers, model.width, model.num_tokens, model.vocab_size
    plain = 72 * B * layers * s * h**2 * (1 + s / (6 * h) + vocab / (12 * h * layers))
    full = 96 * B * layers * s * h**2 * (1 + s / (6 * h) + vocab / (16 * h * layers))
    selective = plain + 72 * B * layers * s * h**2 * s / (18 * h)
    assert [model.step_flops(B, how) for how in (None, "full", "selective")] == pytest.approx(
        [plain, full, selective], rel=1e-12)


@pytest.mark.parametrize("row, mfu", [*zip(RECOMPUTATION[1::2], (41.5, 51.4, 56.0, 56.3))])
def test_published_times_and_shares_of_the_peak_agree(row, mfu):
    """1.10 s is given to three digits, so 41.5 is uncertain by 0.2."""
    found = row.model.step_flops(row.global_batch) / (row.layout.num_gpus * 312e12 * row.step_s)
    assert 100 * found == pytest.approx(mfu, abs=0.2)


@pytest.mark.parametrize("row, ratio", [*zip(RECOMPUTATION[1::2], (43.7 / 41.5, 52.8 / 51.4, 57.0 / 56.0,
                                                                   57.0 / 56.3))])
def test_the_paper_counts_selective_recomputation_three_times(row, ratio):
    """Its hardware FLOPs over its model FLOPs: a forward of scores and values made again is a third of the excess."""
    model = row.model
    excess = model.step_flops(1, "selective") / model.step_flops(1) - 1
    assert 1 + 3 * excess == pytest.approx(ratio, abs=0.003) and 1 + excess < ratio


@pytest.mark.parametrize("sizes, words", [((0, 8, 2), "at least 1"), ((2, 8, 3), "shared out over 3 heads")])
def test_an_invalid_size_raises_a_clear_error(sizes, words):
    with pytest.raises(ValueError, match=words):
        Transformer(*sizes)
    with pytest.raises(ValueError, match="recompute can't be"):
        SMALL.step_flops(1, "some")


# The cheat-sheet: its formulas, evaluated as they stand on the page, and its examples are the planner's numbers
PAGE = "chapters/99_cheat_sheet"
TEXT = (ROOT / f"{PAGE}.md").read_text("utf-8")
WAYS = [[cell.strip() for cell in line.strip("|").split("|")] for line in TEXT.splitlines() if line.startswith("| [")]
LLAMA, LONG = MODELS["llama3-8b"], replace(MODELS["llama3-8b"], num_tokens=131072)
CASES: dict[str, tuple[Transformer, Layout, int, tuple[str, ...]]] = {
    "DDP": (LLAMA, Layout(1, 64, 1), SEQUENCES, ("dp",)),
    **{f"ZeRO-{k}": (LLAMA, Layout(1, 64, 1, zero_stage=k), SEQUENCES, ("dp",)) for k in (1, 2)},
    "ZeRO-3, FSDP": (LLAMA, Layout(1, 64, 1, zero_stage=3), SEQUENCES, ("dp",)),
    "HSDP": (LLAMA, Layout(1, 64, 1, zero_stage=3, replicas=8), SEQUENCES, ("dp",)),
    "TP": (LLAMA, Layout(1, 8, 8), SEQUENCES, ("tp",)),
    "TP with SP": (LLAMA, Layout(1, 8, 8, sequence_parallel=1), SEQUENCES, ("tp",)),
    "inputs gathered again": (LLAMA, Layout(1, 8, 8, sequence_parallel=1), SEQUENCES, ("tp",)),
    "PP": (LLAMA, Layout(8, 8, 1), SEQUENCES, ("pp",)),
    "CP": (LONG, Layout(1, 8, 1, cp=8, zero_stage=3), 32, ("cp",)),
    "EP": (MODELS["mixtral-8x7b"], Layout(1, 64, 1, ep=8, zero_stage=3), SEQUENCES, ("ep",)),
}
TOKEN = re.compile(r"\\text\{(\w+)\}|\\(Psi)|([a-zA-Z]_\{?\w+\}?)|([a-zA-Z]|\d+)|([()+/-])")


def value(latex: str, letters: dict[str, float]) -> float:
    """What a formula on the page comes to: letters and numbers that stand side by side are multiplied."""
    python, before = "", ""
    for found in TOKEN.finditer(latex):
        token = next(filter(None, found.groups()))
        factor = token not in ")+/-"
        python += ("*" if factor and before and before not in "(+/-" else "") + (
            str(letters[token]) if token in letters else token)
        before = token
    return float(eval(python))


def letters_of(model: Transformer, layout: Layout, sequences: int) -> dict[str, float]:
    shards = layout.dp // layout.replicas
    return {"Psi": model.num_parameters, "N": layout.num_gpus, "m": sequences / layout.dp, "L": model.num_layers,
            "s": model.num_tokens, "b": 1, "h": model.width, "h_{kv}": model.sizes.key_value_width, "t": layout.tp,
            "p": layout.pp, "cp": layout.cp, "ep": layout.ep, "d_r": layout.replicas, "d_s": shards}


def told(model: Transformer, layout: Layout, sequences: int) -> Estimate:
    cluster = cluster_of(GPU, layout.num_gpus, SOFTWARE[0])
    return estimate(model, cluster, layout, sequences, ADAM_MIXED)


def test_the_table_has_the_ways_in_this_order() -> None:
    assert [re.search(r"\[([^]]+)\]", row[0])[1] for row in WAYS] == list(CASES)


@pytest.mark.parametrize("name", CASES)
def test_formulas_and_example_of_a_way_are_the_planners(name: str) -> None:
    row = WAYS[list(CASES).index(name)]
    model, layout, sequences, axes = CASES[name]
    found, letters = told(model, layout, sequences), letters_of(model, layout, sequences)
    embedding = name == "PP" and 16 * model.num_parameters / 16  # the first stage's, less than half a stage's layers
    state = value(re.search(r"\$(.*?)\$", row[3])[1], letters)
    assert state == pytest.approx(found.state_bytes, rel=0.01, abs=embedding)
    sent = sum(getattr(found, f"{axis}_bytes") for axis in axes)
    kept = found.activation_bytes
    if name == "TP with SP":  # the planner gathers inputs again; without that they stay whole
        ways = [activation_bytes(model.layer(1), layout.tp, True, regather) for regather in (False, True)]
        sent, kept = 0.8 * sent, kept + model.num_layers * (ways[0] - ways[1])
    each = model.experts.per_token if name == "EP" else 1
    assert value(re.search(r"\$(.*?)\$", row[4])[1], letters) * each == pytest.approx(sent)
    shown = [float(number.replace(",", "")) for number in re.findall(r"\d[\d,]*", row[5])]
    assert all(f"{number:,.0f}" in row[5] for number in shown)
    assert shown == [round(num / 1e9) for num in (found.state_bytes, kept, sent)]


def test_the_recipes_thresholds_follow_from_the_machine() -> None:
    reached, words = 436e12, " ".join(TEXT.split())  # of the 8B model, by chapter 2's table
    assert 80e9 / 2 / 16 == 2.5e9 and "2.5 billion parameters on 80 GB" in words
    assert f"up to {80e9 / 2 / (4 + 12 / 64) / 1e9:.1f} billion fit there" in words
    over = cluster_of("h100", 64, "torchtitan").overheads
    card, inside = 50 * over.across_share, 450 * over.inside_share
    assert f"{round(reached / 1e9 / card, -1):,.0f} tokens at {card:.1f} GB/s" in words
    assert f"{round(reached / 1e9 / inside, -1):,.0f} where a node's eight cards" in words and inside < 8 * card
    assert f"NVLink's {inside:.0f}" in words
    for name, flops_per_s, said in (("llama3-70b", 518e12, "for the 70B model ($F = 518$ TFLOP/s)"),
                                    ("llama3-8b", 436e12, "for 8B (436)")):
        layer = MODELS[name].width / MODELS[name].sizes.layer_parameters
        assert f"{100 * 8 / 3 * 7 * layer * flops_per_s / 274e9:.0f} % {said}" in words
    assert all(pipeline_bubble(p, 4 * p) < 1 / 5 for p in range(2, 33)) and "a fifth of the step is idle" in words


def test_the_sheet_prints_on_one_page(site: Site, browser: Browser) -> None:
    page, log = browser.open((site.folder / f"{PAGE}.html").as_uri())
    pdf = page.pdf(prefer_css_page_size=True)
    assert len(re.findall(rb"/Type\s*/Page\b", pdf)) == 1
    log.assert_clean()
