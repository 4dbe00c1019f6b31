"""All layouts of a model on a cluster: none missing, none twice; which fit, which is the fastest, and why."""
from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from book.cost import Transformer
from book.cost.layouts import RECOMPUTE, Layout, all_layouts, divisors
from book.cost.step import estimate, estimates
from book.cost.published import A100
from book.cost.search import explain, search, usable_bytes

MODEL = Transformer(6, 48, 4, 32, 128)
GPUS, BATCH = 12, 24
GPT3 = Transformer(96, 12288, 96)


def possible(pp, dp, tp, micro, stages, zero, parallel, recompute):
    """Whether such a layout can be, asked one by one."""
    if pp * dp * tp != GPUS or MODEL.num_heads % tp or MODEL.num_layers % (pp * stages) or BATCH % (dp * micro):
        return False
    if stages > 1 and (pp == 1 or BATCH // (dp * micro) % pp):
        return False
    return (dp > 1 or not zero) and ((tp > 1 and MODEL.num_tokens % tp == 0) or not parallel)


def test_every_layout_is_found_once():
    sizes = [divisors(GPUS)] * 3 + [divisors(BATCH), divisors(MODEL.num_layers), range(4), (0, 1), RECOMPUTE]
    wanted = {Layout(*of) for of in product(*sizes) if possible(*of)}
    found = list(all_layouts(MODEL, GPUS, BATCH))
    assert len(found) == len(set(found)) and set(found) == wanted and len(wanted) > 300
    estimates(MODEL, replace(A100, num_gpus=GPUS), found, BATCH)  # all of them are accepted


def test_tp_can_be_bounded():
    found = all_layouts(MODEL, GPUS, BATCH, most_tp=2)
    assert set(found.array("tp").tolist()) == {1, 2}


def test_large_clusters_have_many_layouts_and_each_row_is_its_own_estimate():
    found = search(GPT3, replace(A100, num_gpus=16384), 16384)
    assert len(found) > 10_000
    for position in np.random.default_rng(0).choice(len(found), 20, replace=False):
        alone = estimate(GPT3, found.cluster, found.layouts[int(position)], 16384)
        assert found.estimates[int(position)].step_s == pytest.approx(alone.step_s)
        assert found.fits[position] == (alone.memory_bytes <= usable_bytes(found.cluster))


@pytest.fixture(scope="module")
def found():
    return search(GPT3, replace(A100, num_gpus=128), 256)


def test_the_best_is_the_fastest_that_fits(found):
    step_s, memory = (found.estimates.array(name) for name in ("step_s", "memory_bytes"))
    usable = memory <= 0.9 * 80e9
    assert 0 < usable.sum() < len(found)
    assert (found.fits == usable).all() and usable[found.best] and step_s[found.best] == step_s[usable].min()
    ranked = found.ranked
    assert len(ranked) == usable.sum() and (np.diff(step_s[ranked]) >= 0).all()


def test_no_layout_dominates_the_front(found):
    step_s, memory = (found.estimates.array(name) for name in ("step_s", "memory_bytes"))
    front = found.front()
    for position in front:
        assert not ((step_s < step_s[position]) & (memory < memory[position])).any()
    assert (np.diff(step_s[front]) > 0).all() and (np.diff(memory[front]) < 0).all()
    assert memory[front[-1]] == memory.min() and step_s[front[0]] == step_s.min()


def test_the_best_in_words(found):
    text, best = explain(found), found.estimates[found.best]
    layout = found.layouts[found.best]
    assert text.startswith(f"{layout}.") and f"{best.step_s:.2f} s" in text
    assert f"{best.memory_bytes / 1e9:.1f} of 72.0 GB" in text
    assert f"{best.matmul_s / best.step_s:.1%}" in text and f"{best.tp_bytes / 1e9:.1f} GB along tp" in text
    other = next(position for position in found.ranked if found.layouts[int(position)].tp != layout.tp)
    assert f"With another tp: {found.estimates[int(other)].step_s / best.step_s - 1:+.1%}" in text


def test_any_layout_in_words(found):
    """One that needs too much and is slow: the others gain."""
    slow = int(found.estimates.array("step_s").argmax())
    assert "With another pp: -" in explain(found, slow)


def test_where_nothing_fits():
    found = search(GPT3, replace(A100, num_gpus=8), 8)
    assert not found.fits.any() and not len(found.ranked)
    with pytest.raises(ValueError, match="none of .* layouts fits: the smallest needs .* GB on each GPU"):
        found.best
    assert "nothing fits" in explain(found, 0)


def test_a_batch_that_no_layout_divides():
    with pytest.raises(ValueError, match="no layout of 7 GPUs divides the model's 6 layers, its 4 heads and 4 seq"):
        search(MODEL, replace(A100, num_gpus=7), 4).best
    with pytest.raises(ValueError, match="global_batch is at least one sequence, not 0"):
        search(MODEL, replace(A100, num_gpus=4), 0)


@pytest.mark.parametrize("position", [-1, 10**6])
def test_explaining_a_missing_layout_raises_a_clear_error(found, position):
    with pytest.raises(ValueError, match=f"no layout at position {position}: there are {len(found)}"):
        explain(found, position)
