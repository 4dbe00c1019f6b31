"""Models by name weigh what their authors say; experts, context parallelism and machines cost what they should."""
from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from book.cost import (MACHINES, MODELS, Experts, Latent, Layout, Overheads, Transformer, activation_bytes, cluster_of,
                       estimate, model_named)
from book.cost.layouts import all_layouts
from book.cost.models import SOURCES
from book.cost.published import A100
from book.parallel import GPTConfig

# The sums over the tensors of the published checkpoints, where there are such.
PUBLISHED = {"llama3-8b": 8_030_261_248, "llama3-70b": 70_553_706_496, "llama3-405b": 405_853_388_800,
             "qwen2.5-7b": 7_615_616_512, "qwen3-8b": 8_190_735_360, "mixtral-8x7b": 46_702_792_704}


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_are_the_published_ones(name):
    assert MODELS[name].num_parameters == PUBLISHED[name]


def test_deepseek_has_671_billion_of_which_a_token_meets_37():
    """By hand from its config.json; the routers' 14,848 biases, which no gradient changes, are not counted."""
    h, heads = 7168, 128
    attention = (h * 1536 + 1536 + 1536 * heads * 192) + (h * 576 + 512 + 512 * heads * 256) + heads * 128 * h
    dense, expert = 3 * h * 18432, 3 * h * 2048
    layers = 61 * (attention + 2 * h) + 3 * dense + 58 * (257 * expert + 256 * h)
    model = MODELS["deepseek-v3"]
    assert model.num_parameters == layers + 2 * 129280 * h + h == 671_026_404_352
    assert model.num_active_parameters == model.num_parameters - 58 * 248 * expert
    assert round(model.num_active_parameters / 1e9) == 38  # the paper's 37 leave the embedding out
    assert round((model.num_active_parameters - 129280 * h) / 1e9) == 37


def test_gpt_3_and_the_small_gpt():
    h = 12288
    assert MODELS["gpt3"].num_parameters == 96 * (12 * h * h + 13 * h) + (50257 + 2048) * h + 2 * h
    config = GPTConfig(vocab_size=65)
    small = MODELS["small-gpt"]
    assert small.num_parameters == config.num_parameters and small.num_tokens == config.context


def test_every_model_and_machine_has_a_source():
    keys = {line.split("{")[1].strip(",\n ") for line in open("references.bib", encoding="utf-8") if line[0] == "@"}
    assert SOURCES.keys() == MODELS.keys() and set(filter(None, SOURCES.values())) <= keys
    assert {machine.source for machine in MACHINES.values()} <= keys
    with pytest.raises(ValueError, match="no model is called 'llama4': use small-gpt"):
        model_named("llama4")


def test_flops_of_an_average_layer_of_experts_are_those_of_the_ones_a_token_meets():
    model = replace(MODELS["mixtral-8x7b"], attention="scores")
    matrices = 32 * (4096 * 128 * (32 + 32 + 8 + 8) + 2 * 3 * 4096 * 14336)
    tokens = 2 * model.num_tokens
    assert model.num_layers * (model.layer_flops(2) - model.attention_flops(2)) == pytest.approx(2 * tokens * matrices)


def test_attention_that_keeps_no_scores_keeps_less_and_computes_only_what_is_not_masked():
    scores, flash = Transformer(8, 512, 8, 4096), Transformer(8, 512, 8, 4096, attention="flash")
    assert activation_bytes(scores.layer(1)) - activation_bytes(flash.layer(1)) == 5 * 8 * 4096**2
    cluster = replace(A100, num_gpus=1)
    one, other = (estimate(model, cluster, Layout(1, 1, 1), 1).matmul_s for model in (scores, flash))
    attention_s = scores.attention_flops(1) * 8 / (cluster.flops_per_s * cluster.efficiency)
    assert one - other == pytest.approx(3 * attention_s - (1 + 2.5) / 2 * attention_s)


def test_shared_keys_and_a_gated_mlp_keep_what_they_hold():
    """h 64, 8 heads of 8, 2 of keys and values, MLP of 96: two norms' inputs and outputs, q, out, k, v, three of 96."""
    model = Transformer(2, 64, 8, 16, 100, num_kv_heads=2, mlp_width=96, gated=True, attention="flash", dropout=False)
    assert activation_bytes(model.layer(3)) == 2 * 3 * 16 * (4 * 64 + 2 * 64 + 2 * 16 + 3 * 96)


def test_context_parallelism_cuts_activations_and_sends_keys_and_values():
    model, cluster = MODELS["llama3-8b"], cluster_of("h100", 8)
    whole, cut = (estimate(model, cluster, Layout(1, dp, 1, zero_stage=3, cp=cp), 8) for dp, cp in ((8, 1), (2, 4)))
    assert cut.activation_bytes == pytest.approx(whole.activation_bytes / 4, rel=0.02)
    assert cut.state_bytes == pytest.approx(whole.state_bytes)  # eight GPUs share it out in both
    keys = 2 * 2 * 8 * 128 * model.num_tokens / 4
    assert cut.cp_bytes == pytest.approx(4 * 32 * 3 * 3 * keys) and whole.cp_bytes == 0


def test_experts_are_spread_and_their_tokens_sent():
    model, cluster = MODELS["mixtral-8x7b"], cluster_of("h100", 8)
    alone, spread = (estimate(model, cluster, Layout(1, 8, 1, ep=ep), 8) for ep in (1, 8))
    experts = 32 * 8 * 3 * 4096 * 14336
    assert alone.state_bytes - spread.state_bytes == pytest.approx(16 * experts * 7 / 8)
    assert spread.ep_bytes == pytest.approx(32 * 4 * 7 / 8 * 2 * model.num_tokens * 4096 * 2)
    assert spread.dp_bytes < alone.dp_bytes  # no replica is left whose gradients of experts were to be added


def test_layouts_with_experts_and_cut_sequences_divide_evenly():
    found = all_layouts(MODELS["mixtral-8x7b"], 64, 64, 8, 4, 8)
    assert {*found.array("ep").tolist()} == {1, 2, 4, 8} and {*found.array("cp").tolist()} == {1, 2, 4}
    assert (found.array("dp") * found.array("cp") % found.array("ep") == 0).all()
    sizes = np.prod([found.array(name) for name in ("pp", "dp", "tp", "cp")], axis=0)
    assert (sizes == 64).all() and (found.array("tp") <= 8).all()


@pytest.mark.parametrize("fields, words", [
    ({"num_kv_heads": 3}, "8 heads can't share 3"), ({"attention": "ring"}, "attention is one of scores, flash"),
    ({"norm": "batch"}, "norm is one of"), ({"biases": "some"}, "biases is one of"),
    ({"experts": Experts(4, 2, 8, num_dense_layers=2)}, "no expert is left")])
def test_impossible_models_are_refused(fields, words):
    with pytest.raises(ValueError, match=words):
        Transformer(2, 64, 8, **fields)


def test_impossible_parts_are_refused():
    for make, words in ((lambda: Experts(4, 5, 8), "no more than there are"), (lambda: Latent(0, 1, 1), "at least 1"),
                        (lambda: Overheads(across_share=1.5), "a share at most 1"),
                        (lambda: Overheads(launch_s=-1), "at least 0"), (lambda: Overheads(slowdown=0), "above 0"),
                        (lambda: Layout(1, 4, 1, ep=3), "ep 3 does not divide 4")):
        with pytest.raises(ValueError, match=words):
            make()
    with pytest.raises(ValueError, match="8 experts can't be cut so"):
        estimate(MODELS["mixtral-8x7b"], cluster_of("h100", 16), Layout(1, 16, 1, ep=16), 16)
    with pytest.raises(ValueError, match="8192 tokens can't be cut so"):
        estimate(MODELS["llama3-8b"], cluster_of("h100", 3), Layout(1, 1, 1, cp=3), 1)


@pytest.mark.parametrize("name, words", [("v100", "no GPU is called 'v100': use a100"), ("a100", "a100 has no fp8")])
def test_unknown_machines_are_refused(name, words):
    with pytest.raises(ValueError, match=words):
        cluster_of(name, 8, precision="fp8")


def test_uneven_stages_go_at_the_pace_of_the_longest():
    model, cluster = Transformer(6, 64, 8), replace(A100, num_gpus=4)
    with pytest.raises(ValueError, match="6 layers can't be cut so"):
        estimate(model, cluster, Layout(4, 1, 1), 8)
    from book.cost import estimates
    uneven = estimates(model, cluster, [Layout(4, 1, 1)], 8, uneven=True)[0]
    longest = estimate(replace(model, num_layers=8), cluster, Layout(4, 1, 1), 8)
    assert uneven.matmul_s == pytest.approx(longest.matmul_s)


@pytest.mark.parametrize("name", ["launch_s", "hop_s", "send_node_s", "ring_hop_s", "product_depth"])
def test_each_overhead_makes_a_step_longer(name):
    model = Transformer(8, 512, 16)
    cluster, layout = replace(A100, num_gpus=64, gpus_per_node=4), Layout(2, 4, 8)
    before = estimate(model, cluster, layout, 16).step_s
    more = replace(cluster, overheads=Overheads(**{name: 1e3 if name == "product_depth" else 1e-3}))
    assert estimate(model, more, layout, 16).step_s > 1.01 * before
