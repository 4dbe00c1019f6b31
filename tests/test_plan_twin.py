"""The planner's twin in JavaScript against the package: drawn layouts part by part, whole searches, error bars."""
from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import asdict, fields, replace
from typing import Any

import pytest

from book.columns import Columns
from book.cost import ADAM_MIXED, ADAM_MIXED_GRADIENTS_32, MACHINES, MODELS, Cluster, Layout, Search, Transformer
from book.cost import all_layouts, cluster_of, estimates
from book.cost.answer import TOKENS_A_STEP, compared, default_batch, error_bar, features, searched
from book.cost.machines import SOFTWARE
from book.cost.step import Estimate
from book.widgets.registry import closure, plain
from tests.browser import page_with

READS = ["book/twin/*.js", "book/cost/*.py"]
SCRIPTS = "".join(map(plain, closure("plan_answer")))
REL = 1e-11  # of bytes and seconds
COSTS = """jobs => jobs.map(({ model, cluster, layouts, batch, each }) => {
  const { estimate } = globalThis.lockstep.plan_step;
  return layouts.map(layout => estimate(model, cluster, layout, batch, each));
})"""
SEARCH = """({ model, cluster, batch, each, gpu, software, measured }) => {
  const { plan, featuresOf } = globalThis.lockstep.plan_answer;
  const rows = measured.map(({ step, ...row }) => ({ ...row, features: featuresOf(step) }));
  const found = plan(model, cluster, batch, each, { gpu, software, rows });
  return { ...found, fit: found.ranked.length, ranked: found.ranked.slice(0, 20) };
}"""


@pytest.fixture
def twin(browser: Any) -> Iterator[Any]:
    """A page with the planner's scripts and nothing else."""
    with page_with(browser, SCRIPTS) as page:
        yield page


def in_numbers(model: Transformer) -> dict[str, Any]:
    """A model as the twin takes it."""
    return asdict(model.sizes) | {"num_kv_heads": model.kv_heads, "num_parameters": model.num_parameters}


def drawn_model(draw: random.Random) -> Transformer:
    """A model by name, with another sequence, or with stored scores."""
    model = MODELS[draw.choice(list(MODELS))]
    return replace(model, num_tokens=draw.choice((model.num_tokens, 2048, 32768)),
                   attention=draw.choice(("flash", "scores")))


def drawn_cluster(draw: random.Random, num_gpus: int) -> Cluster:
    """A machine by name, with a memory and a network of its own now and then."""
    cluster = cluster_of(draw.choice(list(MACHINES)), num_gpus, draw.choice(SOFTWARE))
    if draw.random() < 0.5:
        own = {"across_bytes_per_s": 10 ** draw.uniform(9, 12), "memory_bytes": 10 ** draw.uniform(10, 12)}
        cluster = replace(cluster, **own)
    return cluster


def drawn_job(draw: random.Random) -> tuple[Transformer, Cluster, Columns, int]:
    """Some of the layouts of a model on a cluster."""
    while True:
        num_gpus = draw.choice((1, 2, 8, 24, 64, 512, 2048))
        model, cluster = drawn_model(draw), drawn_cluster(draw, num_gpus)
        batch = default_batch(model, num_gpus, draw.choice((2**19, TOKENS_A_STEP, 2**24)))
        every = all_layouts(model, num_gpus, batch, 16, draw.choice((1, 8)), draw.choice((1, 64)))
        if len(every):
            rows = sorted(draw.sample(range(len(every)), min(12, len(every))))
            return model, cluster, every.take(rows), batch


def as_plain(layout: Layout) -> dict[str, Any]:
    """A layout as the twin has it."""
    return {f.name: getattr(layout, f.name) for f in fields(layout)}


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.full)])
def test_bytes_and_seconds_of_drawn_layouts_are_the_same(twin: Any, seed: int) -> None:
    """Each part of them: all models and machines, long sequences, stored scores, cp, ep, every stage of ZeRO."""
    draw = random.Random(seed)
    jobs = [(*drawn_job(draw), draw.choice((ADAM_MIXED, ADAM_MIXED_GRADIENTS_32))) for _ in range(60)]
    sent = [{"model": in_numbers(model), "cluster": asdict(cluster), "layouts": [as_plain(one) for one in layouts],
             "batch": batch, "each": asdict(each)} for model, cluster, layouts, batch, each in jobs]
    seen = set()
    for (model, cluster, layouts, batch, each), answers in zip(jobs, twin.evaluate(COSTS, sent), strict=True):
        for layout, mine, theirs in zip(layouts, estimates(model, cluster, layouts, batch, each), answers, strict=True):
            for f in fields(Estimate):
                assert theirs[f.name] == pytest.approx(getattr(mine, f.name), rel=REL, abs=1e-12), (
                    f"{f.name} of {layout}, {model}")
            seen |= {(name, getattr(layout, name) > 1) for name in ("pp", "dp", "tp", "cp", "ep", "stages_per_rank")}
            seen |= {layout.recompute, layout.zero_stage}
    assert {("cp", True), ("ep", True), ("stages_per_rank", True), "full", "selective", 3} <= seen


def compare(twin: Any, model: Transformer, cluster: Cluster, batch: int, gpu: str, software: str) -> None:
    """What both choose on a cluster, and how many fit."""
    each = ADAM_MIXED_GRADIENTS_32
    python: Search = searched(model, cluster, batch)
    script = twin.evaluate(SEARCH, {
        "model": in_numbers(model), "cluster": asdict(cluster), "batch": batch, "each": asdict(each), "gpu": gpu,
        "software": software, "measured": [
            {"name": name, "gpu": row.machine, "software": row.software, "ratio": ratio,
             "step": features(row.model, row.layout)} for name, row, ratio in compared()]})
    assert (script["total"], script["fit"]) == (len(python), int(python.fits.sum()))
    if not script["fit"]:
        if len(python):
            assert script["least"] == pytest.approx(python.estimates.array("memory_bytes").min(), rel=REL)
        return
    step_s = python.estimates.array("step_s")
    for one, position in zip(script["ranked"], python.ranked):
        assert one["cost"]["step_s"] == pytest.approx(step_s[position], rel=REL)
    assert script["layout"] == as_plain(python.layouts[python.best])
    bar, names = error_bar(model, python.layouts[python.best], gpu, software)
    assert tuple(script["nearest"]) == names
    best_s = step_s[python.best]
    for name, share in zip(("low_s", "high_s", "worst_s"), (bar[0], bar[2], bar[3])):
        assert script[name] == pytest.approx(best_s * share, rel=REL)


@pytest.mark.slow
def test_both_choose_the_same_layout_with_the_same_error_bar(twin: Any) -> None:
    draw = random.Random(5)
    for name in MODELS:
        gpu, num_gpus = draw.choice(list(MACHINES)), draw.choice((8, 24, 64, 256))
        model, software = MODELS[name], draw.choice(SOFTWARE)
        compare(twin, model, cluster_of(gpu, num_gpus, software), default_batch(model, num_gpus), gpu, software)
    compare(twin, replace(MODELS["llama3-8b"], num_tokens=131072), cluster_of("h100", 64), 64, "h100", "megatron")
    compare(twin, MODELS["llama3-405b"], cluster_of("h100", 8), 512, "h100", "megatron")
    compare(twin, MODELS["llama3-70b"], cluster_of("h100", 7), 512, "h100", "megatron")


def test_batches_are_the_same(twin: Any) -> None:
    cases = [(name, gpus, tokens) for name in MODELS for gpus in (1, 7, 64, 4096) for tokens in (2**19, 2**22, 2**25)]
    sent = [[in_numbers(MODELS[name]), gpus, tokens] for name, gpus, tokens in cases]
    assert twin.evaluate("all => all.map(of => globalThis.lockstep.plan_answer.default_batch(...of))", sent) == [
        default_batch(MODELS[name], gpus, tokens) for name, gpus, tokens in cases]
