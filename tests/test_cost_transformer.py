"""What a transformer weighs and computes: against published sizes, and against products counted as they run."""
from __future__ import annotations

import pytest
import torch
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop
from torch.utils.flop_counter import FlopCounterMode

from book.cost import Transformer
from book.cost.published import RECOMPUTATION, WEAK_SCALING

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


def test_the_rule_of_thumb_is_near():
    assert GPT3.flops_per_token == pytest.approx(GPT3.step_flops(1) / GPT3.num_tokens, rel=1e-3)


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
def test_invalid_input_raises_a_clear_error(sizes, words):
    with pytest.raises(ValueError, match=words):
        Transformer(*sizes)
    with pytest.raises(ValueError, match="recompute can't be"):
        SMALL.step_flops(1, "some")
