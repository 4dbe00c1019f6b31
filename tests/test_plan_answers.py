"""What people ask the planner: a layout of their own, GPUs that nobody measured, and questions that nothing answers."""
from __future__ import annotations

import json
import random
import re
from dataclasses import astuple, replace
from pathlib import Path
from typing import Any

import nbformat
import numpy as np
import pytest

from book.cost import MACHINES, MODELS, Layout, MeasuredStep, cluster_of, layout_of, machine_of, model_named, plan, told
from book.cost.__main__ import main
from book.cost.calibration import Rows
from book.cost.machines import SOFTWARE, like
from book.cost.measured import data_sets
from book.cost.question import Question, asked
from book.cost.refusals import fits
from book.cost.scoreboard import bar, fitted, is_measured, measured
from book.cost.search import WORDS
from book.cost.step import PARTS
from book.cost.tuning import Tuning
from tests.website import ROOT

SENTENCE = r"^(none of \d+ layouts (fits|may be chosen): |no layout of \d+ GPUs divides ).*"
# Questions that nothing answers, the cause, and what of the GPUs is short.
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"model": "llama3-70b", "gpus": 16}, "memory: 70.6 GB of state"),
    ({"model": "llama3-8b", "gpus": 4, "gpu": "RTX 4090"}, "memory: 32.1 GB of state"),
    ({"model": "llama3-405b", "gpus": 8}, "memory: 811.7 GB of state"),
    ({"model": "qwen3-8b", "gpus": 8, "num_tokens": 2**20, "batch": 8}, "memory: 318.2 GB of activations"),
    ({"model": "gpt-oss-120b", "gpus": 16, "gpu": "l40s"}, "memory: 116.8 GB of state"),
    ({"model": "qwen3-0.6b", "gpus": 128, "batch": 1}, "a rule: dp divides the sequences"),
    ({"model": "qwen3-0.6b", "gpus": 1, "gpu": "l4", "num_tokens": 65536, "batch": 1}, "memory: "),
    ({"model": "llama3-70b", "gpus": 2, "gpu": "RTX 4090", "tuning": Tuning("lora")}, "memory: 72.8 GB of state")]
OPTIONS = {"gpus": "--gpus", "gpu": "--gpu", "num_tokens": "--sequence", "batch": "--batch"}


def in_a_shell(question: dict[str, Any], *more: str) -> list[str]:
    """The command that asks the same."""
    words = [word for name, option in OPTIONS.items() if name in question for word in (option, str(question[name]))]
    tuned = ("--train", question["tuning"].train) if "tuning" in question else ()
    return ["plan", question["model"], *words, *tuned, *more]


def refused(**question: Any) -> str:
    """What the planner says instead of an answer."""
    with pytest.raises(ValueError, match=SENTENCE) as caught:
        plan(**question)
    return str(caught.value)


@pytest.mark.parametrize("question, cause", REFUSED, ids=lambda of: of["model"] if isinstance(of, dict) else "")
def test_a_refusal_says_the_cause_and_what_it_advises_works(question: dict[str, Any], cause: str, capsys: Any) -> None:
    lines = refused(**question).splitlines()
    assert lines[1].startswith(f"cause    {cause}")
    changes = [line.partition(":")[0].removeprefix("change   ") for line in lines if line.startswith("change")]
    assert 1 <= len(changes) <= 2
    for change in changes:
        if change.startswith("--"):
            assert main(in_a_shell(question, *change.split())) == 0, change
            assert "layout   " in capsys.readouterr().out


@pytest.mark.parametrize("question", [question for question, _ in REFUSED[:5]], ids=lambda of: of["model"])
def test_the_number_of_gpus_that_is_enough_is_the_smallest(question: dict[str, Any]) -> None:
    """Of powers of two inside a node, and of whole nodes: each that is fewer is refused."""
    said = re.search(r"enough   ([\d,]+) .* are the fewest that work", refused(**question))
    assert said
    enough, node = int(said[1].replace(",", "")), MACHINES[asked(**{"gpu": "H100", **question}).gpu_key].gpus_per_node
    assert plan(**{**question, "gpus": enough}).cost.memory_bytes > 0
    for fewer in {*(2**k for k in range(4) if 2**k < node), *range(node, enough, node)} - {question["gpus"]}:
        if fewer < enough:
            refused(**{**question, "gpus": fewer})


def test_where_only_a_rule_is_in_the_way_the_rule_is_named(capsys: Any) -> None:
    """Sharded parameters in a pipeline would fit, and are what the option allows."""
    question: dict[str, Any] = {"model": "llama3-405b", "gpus": 128, "num_tokens": 131072}
    text = refused(**question)
    assert "cause    a rule: too few measured steps test ZeRO-2 and 3 in pipelines" in text
    assert "change   --zero 0,1,2,3" in text and "enough   " in text
    found = plan(**question, zero_stages=(0, 1, 2, 3))
    assert found.layout.zero_stage >= 2 and found.layout.pp > 1
    assert main(in_a_shell(question, "--zero", "0,1,2,3")) == 0 and capsys.readouterr().out == f"{found}\n"
    assert main(in_a_shell(question, "--zero", "0,5")) == 2 and "--zero is stages" in capsys.readouterr().err


def test_a_search_of_the_smallest_layouts_finds_whether_any_fits() -> None:
    """The quick check against the whole search, on drawn questions near the edge; and the smallest of both is one."""
    draw, seen = random.Random(3), []
    for _ in range(60):
        model = replace(MODELS[draw.choice(list(MODELS))], num_tokens=draw.choice((2048, 8192, 65536)))
        gpu = draw.choice(list(MACHINES))
        least = 18 * model.num_parameters / MACHINES[gpu].memory_bytes
        gpus = max(1, int(2 ** draw.uniform(0, 3) * least))
        question = Question(model, gpus if gpus < 8 else gpus // 8 * 8, gpu)
        whole, small = question.search(), question.search(smallest=True)
        assert fits(question) == whole.fits.any(), question
        if len(whole):
            memory = [found.estimates.array("memory_bytes").min() for found in (whole, small)]
            assert memory[0] == pytest.approx(memory[1]), question
        seen.append(bool(whole.fits.any()))
    assert 10 < sum(seen) < 50


@pytest.mark.parametrize("question", [{"model": "llama3-70b", "gpus": 64}, {"model": "mixtral-8x7b", "gpus": 64},
                                      {"model": "llama3-8b", "gpus": 8, "gpu": "L40S"},
                                      {"model": "llama3-405b", "gpus": 1024, "software": "megatron"}])
def test_an_estimate_is_the_plans_own(question: dict[str, Any]) -> None:
    """Of its choice, with its error bar, and of the alternatives that it lists."""
    found = plan(**question)
    own = told(**question, layout=found.layout)
    assert astuple(own.cost) == pytest.approx(astuple(found.cost))
    assert (own.low_s, own.high_s, own.worst_s, own.basis) == pytest.approx(
        (found.low_s, found.high_s, found.worst_s, found.basis)) and own.fits
    for layout, more in found.next_best:
        assert told(**question, layout=layout).cost.step_s == pytest.approx((1 + more) * found.cost.step_s)


def test_a_shell_tells_of_a_layout_part_by_part(capsys: Any) -> None:
    assert main(["estimate", "llama3-70b", "--gpus", "64", "--layout", "pp=4,tp=4,cp=2,zero=1"]) == 0
    text = capsys.readouterr().out
    own = told("llama3-70b", 64, Layout(4, 2, 4, cp=2, zero_stage=1, sequence_parallel=1))
    assert text == f"{own}\n"
    for words in (f"layout   {own.layout}", f"{own.cost.step_s:.2f} s, MFU {own.cost.mfu:.0%}", "half of such steps",
                  f"state {own.cost.state_bytes / 1e9:.1f}", "margin   "):
        assert words in text
    rate = 512 * 8192 / own.cost.step_s / 64
    assert f"{rate:,.0f} tokens a second on each GPU" in text
    seconds = {words: float(number) for number, words in re.findall(r"^ +([\d.e-]+) s +[\d.]+%  (.*)$", text, re.M)}
    for part in PARTS:
        if getattr(own.cost, part) > 0.001 * own.cost.step_s:
            assert seconds[WORDS[part]] == pytest.approx(getattr(own.cost, part), rel=1e-3)


@pytest.mark.parametrize("model, layout", [
    ("llama3-8b", Layout(1, 8, 1, zero_stage=3)), ("llama3-70b", Layout(8, 1, 8, sequence_parallel=1)),
    ("llama3-70b", Layout(4, 2, 8, zero_stage=1, sequence_parallel=1)), ("gpt3", Layout(16, 1, 8)),
    ("llama3-70b", Layout(4, 1, 8, stages_per_rank=2, sequence_parallel=1))])
def test_the_largest_micro_batch_fits_and_the_next_does_not(model: str, layout: Layout) -> None:
    """Of 120 sequences in all, some of whose divisors are no powers of two; interleaved, those that torch's schedule
    takes."""
    own, batch = told(model, layout.num_gpus, layout, batch=120), 120
    for how, size in own.micro_batches.items():
        fitting = []
        for micro in range(1, batch // layout.dp + 1):
            number, rest = divmod(batch // layout.dp, micro)
            if rest or (layout.stages_per_rank > 1 and number % max(1, number // layout.pp)):
                continue
            other = replace(layout, micro_batch_size=micro, recompute=how or None)
            fitting += [micro] * told(model, layout.num_gpus, other, batch=batch).fits
        assert size == max(fitting, default=0), how
    plain, *others = ((how, size or "none") for how, size in own.micro_batches.items())
    last = str(own).splitlines()[-1]
    assert last.startswith(f"batch    largest micro-batch that fits: {plain[1]} without recompute, {others[0][1]} with")
    assert last.endswith(f"{others[1][1]} with full") and others[0][0] == ("selective" if "gpt" in model else "half")


def test_a_measured_step_and_fine_tuning_change_which_micro_batch_fits() -> None:
    layout = Layout(1, 8, 1, zero_stage=3)
    counted = told("llama3-8b", 8, layout)
    twice = MeasuredStep(layout, 20.0, 2 * counted.cost.memory_bytes)
    assert told("llama3-8b", 8, layout, measured=twice).micro_batches["full"] < counted.micro_batches["full"]
    adapters, everything = (told("llama3-8b", 1, Layout(1, 1, 1), tuning=Tuning(train)) for train in ("lora", "full"))
    assert set(everything.micro_batches.values()) == {0} and adapters.micro_batches["full"] >= 2


def test_a_micro_batch_that_fits_is_one_that_fits() -> None:
    """Two stages on each of four ranks: torch's schedule takes 11 sequences as one micro-batch only."""
    own = told("llama3.2-1b", 4, Layout(4, 1, 1, stages_per_rank=2, micro_batch_size=1), batch=11)
    assert own.fits and own.micro_batches[""] == 1


@pytest.mark.parametrize("model, gpus", [("llama3-8b", 128), ("llama3-70b", 64), ("llama3-70b", 24),
                                         ("llama3.2-1b", 1)])
def test_an_answer_says_what_data_parallelism_alone_would_take(model: str, gpus: int) -> None:
    found = plan(model, gpus, "h200")
    layouts, step_s = found.search.layouts, found.search.estimates.array("step_s")
    alone = [int(place) for place in found.search.ranked if layouts[int(place)].num_gpus == layouts[int(place)].dp]
    said = [line for line in str(found).splitlines() if line.startswith("dp alone")]
    if not alone:
        assert found.dp_alone is None and not said
        return
    layout, more = found.dp_alone
    assert layout == layouts[min(alone, key=lambda place: step_s[place])] and more >= 0
    told_already = layout in (found.layout, *(other for other, _ in found.next_best))
    assert said == ([] if told_already else [f"dp alone {more:+.1%}: {layout}"])


def test_a_shell_tells_of_a_measured_step_and_its_memory(capsys: pytest.CaptureFixture[str]) -> None:
    ask = ["plan", "Llama-3.1-70B", "--gpus", "64", "--measured"]
    step = "pp=4,dp=2,tp=8,zero=1,sp=1"
    assert main([*ask, f"95,{step}"]) == 0
    said = capsys.readouterr().out
    assert "llama3-70b on 64" in said.lower().replace("llama-3.1", "llama3")
    assert "your step took" in said and "it held" not in said
    assert main([*ask, f"95,memory=78e9,{step}"]) == 0
    assert "it held 1.5" in (said := capsys.readouterr().out) and "rules out" in said
    assert main([*ask, f"95,{step},memory=30e9"]) == 0
    assert "layouts more fit" in capsys.readouterr().out
    assert main([*ask, f"95,{step},memory=much"]) == 2
    assert "with memory=60e9" in capsys.readouterr().err


def test_chapter_10_reads_its_heat_map_right() -> None:
    """The fastest layouts by tp and pp, and what the open cells lack."""
    found = plan("llama3-70b", 64).search
    best, held = {}, found.estimates.array("memory_bytes")
    for place in map(int, found.ranked):
        best.setdefault((found.layouts[place].tp, found.layouts[place].pp), place)
    ways = {cell: (found.layouts[place], found.estimates[place]) for cell, place in best.items()}
    rates = {cell: 512 * 8192 / 64 / cost.step_s for cell, (_, cost) in ways.items()}
    near = {cell for cell, rate in rates.items() if rate >= 0.95 * max(rates.values())}
    assert near == {(4, 4), (4, 8)}
    assert {layout.zero_stage for (_, pp), (layout, _) in ways.items() if pp == 1} == {2, 3}
    waits = [cost.dp_s / cost.step_s for (_, pp), (_, cost) in ways.items() if pp == 1]
    assert {tp for (tp, pp), (layout, _) in ways.items() if pp == 1 and layout.recompute == "full"} == {1, 2, 4}
    for layout, cost in (ways[tp, 1] for tp in (1, 2, 4)):
        assert cost.step_s - told("llama3-70b", 64, replace(layout, recompute=None)).cost.step_s > cost.dp_s
    assert (round(min(waits), 2), round(max(waits), 2)) == (0.1, 0.25)
    assert all(0.16 < cost.tp_s / cost.step_s < 0.24 for (tp, _), (_, cost) in ways.items() if tp == 8)
    again = {(tp, pp) for (tp, pp), (layout, _) in ways.items() if layout.recompute and pp > 1}
    assert again == {(tp, pp) for tp, pp in ways if (tp < 4 or pp == 16) and pp > 1}
    for tp, pp in ((1, 2), (1, 4), (1, 8), (2, 2), (2, 4), (4, 2)):
        here = (found.layouts.array("tp") == tp) & (found.layouts.array("pp") == pp)
        plain = here & (found.layouts.array("zero_stage") < 2)
        assert (tp, pp) not in ways and held[plain].min() > 64e9 > held[here].min() and tp * pp in (2, 4, 8)
    assert round(MODELS["llama3-70b"].num_parameters / 1e9) == 71


def test_chapter_10_reads_its_table_of_gpus_right() -> None:
    """What it says of 1B to 405B on 8 to 4,096 GPUs: which axes each needs, and what more GPUs cost."""
    [words] = [cell.source for cell in nbformat.read(ROOT / "chapters/10_planner.ipynb", 4).cells
               if cell.get("id") == "more-gpus-words"]

    def seconds(model: str, gpus: int) -> dict[str, float]:
        search, best = plan(model, gpus).search, {}
        for place in map(int, search.ranked):
            layout = search.layouts[place]
            axes = [axis for axis in ("tp", "pp", "cp") if getattr(layout, axis) > 1]
            best.setdefault("cp" if "cp" in axes else "+".join(axes), search.estimates[place].step_s)
        return {way: took_s / min(best.values()) for way, took_s in best.items()} | {"s": min(best.values())}

    small, eight, large = ({(model, gpus): seconds(model, gpus) for gpus in sizes} for model, sizes in (
        ("llama3.2-1b", (8, 64, 512)), ("llama3-8b", (8, 64, 512, 2048)), ("llama3-70b", (64, 512, 1024, 4096))))
    large |= {("llama3-405b", gpus): seconds("llama3-405b", gpus) for gpus in (512, 4096)}
    assert {times[""] for times in small.values()} == {1.0}
    alone, groups = ([100 * (times[way] - 1) for times in list(eight.values())[:3]] for way in ("", "tp"))
    assert f"**8B** takes {min(alone):.0f} to {max(alone):.0f} % longer with data parallelism alone" in words
    assert f"groups of two take {min(groups):.0f} to {max(groups):.0f} % longer" in words
    assert f"two stages on 64 GPUs {100 * (eight['llama3-8b', 64]['pp'] - 1):.0f} %" in words
    one_axis = [times[way] for times in large.values() for way in ("", "tp", "pp") if way in times]
    assert f"at least {min(one_axis):.2f} times as long" in words
    assert all(("" in times) == (gpus <= 512 and model != "llama3-405b")
               for (model, gpus), times in (eight | large).items())
    few_s, many_s = (large["llama3-70b", gpus]["s"] for gpus in (64, 4096))
    assert f"{100 * few_s / many_s / 64:.0f} % of the tokens a second" in words
    days = [1e12 * took_s / (512 * 8192) / 86400 for took_s in (many_s, few_s)]
    assert f"take {days[0]:.1f} days instead of {days[1]:.0f}, for {100 * (64 * many_s / few_s - 1):.0f} %" in words
    ahead = [100 * (min(took for way, took in times.items() if way not in ("cp", "s")) - 1)
             for times in (eight | large).values()]
    assert f"by {min(ahead):.0f} to {max(ahead):.0f} %" in words
    rows = [row for data in data_sets().values() for row in data.rows]
    with_cp = [row.layout.cp for row in rows if row.layout.cp > 1 and row.model.num_tokens == 8192]
    assert f"{len(with_cp)} of {len(rows):,} have cp at this length" in words and set(with_cp) == {2}


def test_a_layout_that_does_not_fit_is_told_with_others_that_do() -> None:
    own = told("llama3-70b", 64, Layout(4, 2, 8, 4, zero_stage=1, sequence_parallel=1))
    text = str(own)
    assert not own.fits and "it does not fit: " in text and "margin" not in text
    changes = re.findall(r"change   ([\d.]+) GB, ([\d.]+) s: (.*)", text)
    assert len(changes) == 2
    for gigabytes, seconds, words in changes:
        micro, how = re.search(r"micro-batch (\d+)", words), re.search(r"(\w+) recompute", words)
        assert micro and how
        other = replace(own.layout, micro_batch_size=int(micro[1]), recompute=None if how[1] == "no" else how[1])
        assert str(other) == words
        found = told("llama3-70b", 64, other)
        assert found.fits and (f"{found.cost.memory_bytes / 1e9:.1f}", f"{found.cost.step_s:.2f}") == (
            gigabytes, seconds)


@pytest.mark.parametrize("num_tokens", [8192, 10240, 10752])
def test_every_answer_says_how_much_more_a_gpu_has_than_is_counted(num_tokens: int) -> None:
    """And calls it tight where one in ten measured steps would have held more than that."""
    own = told("llama3-8b", 8, Layout(1, 8, 1, zero_stage=3, recompute="half"), num_tokens=num_tokens)
    held, [line] = own.cost.memory_bytes, [line for line in str(own).splitlines() if line.startswith("margin")]
    assert line.startswith(f"margin   {(80e9 - held) / 1e9:.1f} GB to all 80 GB of a GPU: a step may hold "
                           f"{80e9 / held - 1:.0%} more than is counted; one in ten measured steps held over 27% more")
    assert ("tight" in line) == (80e9 / held < 1.27)
    chosen = plan("llama3-8b", 8, measured=MeasuredStep(own.layout, 10.0, 1.2 * held), num_tokens=num_tokens)
    [line] = [line for line in str(chosen).splitlines() if line.startswith("margin")]
    held = 1.2 * chosen.cost.memory_bytes
    assert line == (f"margin   {(80e9 - held) / 1e9:.1f} GB to all 80 GB of a GPU: a step may hold "
                    f"{80e9 / held - 1:.0%} more than your step says")


def test_a_faster_step_that_was_measured_is_named_if_its_sequences_are_as_long() -> None:
    """Steps of 4,096 tokens say nothing of 131,072."""
    long = str(plan("llama3-8b", 16, num_tokens=131072))
    assert "MFU 33%" in long and "was measured" not in long
    assert "an MFU of 65% was measured" in str(plan("llama3-8b", 16))


def test_weights_in_4_bits_are_sharded_and_cut_by_nothing_else() -> None:
    tuning = Tuning("qlora")
    chosen = plan("llama3-70b", 8, num_tokens=2048, tuning=tuning)
    fits = chosen.search.fits
    assert fits.any() and {*chosen.search.layouts.array("tp")[fits], *chosen.search.layouts.array("pp")[fits]} == {1}
    ask: dict[str, Any] = {"num_tokens": 2048, "tuning": tuning}
    assert "no software is known to cut weights in 4 bits" in str(told("llama3-70b", 8, Layout(1, 1, 8), **ask))
    assert "known to cut" not in str(told("llama3-70b", 8, chosen.layout, **ask))
    with pytest.raises(ValueError, match="all with weights in 4 bits cut by tp or pp, or ZeRO-2 or 3 in a pipeline"):
        plan("llama3-70b", 2, "rtx3090", num_tokens=512, tuning=Tuning("qlora", optimizer="adam8bit"))


def test_stages_may_be_uneven_in_a_layout_of_your_own() -> None:
    """126 layers in 12 stages: the longest has 11."""
    own = told("llama3-405b", 768, Layout(12, 8, 8, zero_stage=1, sequence_parallel=1, recompute="full"), batch=768)
    assert own.cost.matmul_s > 0
    with pytest.raises(ValueError, match="heads can't be cut so"):
        told("llama3-8b", 24, Layout(1, 8, 3), batch=24)


@pytest.mark.parametrize("text, layout", [
    ("pp=2,dp=4,tp=8,cp=2,ep=4,micro=3,stages=2,zero=1,sp=0,recompute=half",
     Layout(2, 4, 8, 3, 2, 1, 0, "half", 2, 4)),
    ("tp=4", Layout(1, 16, 4, sequence_parallel=1)), ("zero=3", Layout(1, 64, 1, zero_stage=3)),
    ("dp=64,recompute=no", Layout(1, 64, 1)), ("pp=4, tp=8, recompute=full", Layout(4, 2, 8, 1, 1, 0, 1, "full"))])
def test_layouts_as_people_write_them(text: str, layout: Layout) -> None:
    assert layout_of(text, 64) == layout


@pytest.mark.parametrize("text, words", [
    ("4,2,8", "4=, 2=, 8= is not part of one"), ("pp=4,tq=2", "tq=2 is not part"), ("tp=two", "tp=two is not part"),
    ("recompute=some", "recompute can't be 'some'"), ("zero=4", "no ZeRO stage 4"), ("pp=0", "at least 1"),
    ("pp=2,pp=4", "pp is said twice in 'pp=2,pp=4'"),
    ("stages=2", "need a pipeline"), ("", "a layout is written pp=2,dp=4")])
def test_what_is_no_layout_is_refused_with_an_example(text: str, words: str, capsys: Any) -> None:
    with pytest.raises(ValueError, match=words):
        layout_of(text, 64)
    assert main(["estimate", "llama3-8b", "--gpus", "64", "--layout", text]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_a_layout_for_other_gpus_is_refused(capsys: Any) -> None:
    assert main(["estimate", "llama3-8b", "--gpus", "64", "--layout", "pp=4,tp=8,dp=4"]) == 2
    assert capsys.readouterr().err.startswith("error: this layout is for 128 GPUs, not for 64: pp 4")


def test_a_measured_step_has_all_axes_of_a_layout(capsys: Any) -> None:
    """Every part that a layout has changes the scale; the command and the function agree."""
    question: dict[str, Any] = {"model": "mixtral-8x7b", "gpus": 64, "num_tokens": 16384, "batch": 64}
    for words in ("pp=2,dp=4,tp=4,cp=2,ep=4,stages=2,zero=1,recompute=half", "dp=8,tp=8,sp=0,ep=8,recompute=full"):
        found = plan(**question, measured=MeasuredStep(layout_of(words, 64), 30.0))
        assert main(in_a_shell(question, "--measured", f"30,{words}")) == 0
        assert capsys.readouterr().out == f"{found}\n"
        own = told(**question, layout=layout_of(words, 64), measured=MeasuredStep(layout_of(words, 64), 30.0))
        assert own.cost.step_s == pytest.approx(30)


def test_a_step_that_can_not_be_is_doubted() -> None:
    layout = Layout(4, 2, 8, zero_stage=1, sequence_parallel=1)
    doubted = str(told("llama3-70b", 64, layout, measured=MeasuredStep(layout, 5.0)))
    assert "no step like this was measured above 65%, on any GPU: check the seconds" in doubted


@pytest.mark.parametrize("name, key", [("RTX 4090", "rtx4090"), ("4090", "rtx4090"), ("H100-80", "h100"),
                                       ("H100 80GB", "h100"), ("GB200-NVL72", "gb200"), ("A100-40", "a100-40"),
                                       ("NVIDIA L40S", "l40s"), ("AMD MI300X", "mi300x"), ("rtx_a6000", "a6000")])
def test_gpus_are_known_by_what_people_call_them(name: str, key: str) -> None:
    assert machine_of(name) == MACHINES[key]
    assert plan("llama3.2-1b", 8, name).cost == plan("llama3.2-1b", 8, key).cost


OWN = {"memory": 80e9, "flops": 989e12, "fp8": 1979e12, "bandwidth": 3.35e12, "inside": 450e9, "across": 50e9,
       "node": 8, "like": "h100"}


def test_a_network_that_no_data_sheet_has_is_said_to_be_assumed() -> None:
    words = "between nodes 1.6 GB/s for each GPU are assumed"
    assert words in str(plan("llama3-8b", 16, "RTX 4090")) and words not in str(plan("llama3.2-1b", 8, "RTX 4090"))
    assert words not in str(plan("llama3-8b", 16, "MI300X"))


def test_numbers_of_your_own_answer_as_the_machine_that_has_them(tmp_path: Path) -> None:
    """As a list, a TOML and a JSON file; without `like` they have what all GPUs have, and a wider bar."""
    listed = ",".join(f"{name}={value}" for name, value in OWN.items())
    (tmp_path / "ours.json").write_text(json.dumps(OWN))
    (tmp_path / "ours.toml").write_text("\n".join(f"{name} = {value!r}" for name, value in OWN.items()))
    known = plan("llama3-8b", 8, "H100")
    for text in (listed, str(tmp_path / "ours.json"), str(tmp_path / "ours.toml")):
        found = plan("llama3-8b", 8, text)
        assert (found.cost, found.low_s, found.basis) == (known.cost, known.low_s, known.basis)
        assert found.gpu_name == ("GPU" if text == listed else "ours")
    alone = plan("llama3-8b", 8, listed.replace(",like=h100", ""))
    assert plan("llama3-8b", 8, listed.replace(",like=h100", ",like=")).cost == alone.cost
    assert alone.worst_s / alone.cost.step_s > known.worst_s / known.cost.step_s
    assert "no step of this GPU was measured like this" in str(alone)


@pytest.mark.parametrize("text, words", [
    ("memory=48,flops=1e14,bandwidth=1e12,inside=1e10,across=1e9,node=8", "a GPU's memory is in bytes, and at least"),
    ("memory=48e9,flops=100,bandwidth=1e12,inside=1e10,across=1e9,node=8", "a GPU's flops is in FLOP/s"),
    ("memory=48e9,flops=1e14", "missing: bandwidth, inside, across, node"),
    ("memory=48e9,flops=1e14,bandwidth=1e12,inside=1e10,across=1e9,node=8,nvlink=1", "unknown: nvlink"),
    ("memory=lots,flops=1e14,bandwidth=1e12,inside=1e10,across=1e9,node=8", "has a number for each word"),
    ("memory=48e9,flops=1e14,bandwidth=1e12,inside=1e10,across=1e9,node=0", "GPUs in a node is an integer, not 0"),
    ("memory=48e9,flops=1e14,bandwidth=1e12,inside=1e10,across=1e9,node=8.7", "GPUs in a node is an integer, not 8.7"),
    ("memory=48e9,flops=1e14,memory=1e9", "memory is said twice"),
    ("memory=48e9,flops=1e14,bandwidth=1e12,inside=1e10,across=1e9,node=8,like=h99", "no GPU is called 'h99'"),
    ("none.toml", "none.toml")])
def test_numbers_that_can_not_be_are_refused_in_one_sentence(text: str, words: str, capsys: Any) -> None:
    assert main(["plan", "llama3-8b", "--gpus", "8", "--gpu", text]) == 2
    said = capsys.readouterr().err
    assert words in said and len(said.splitlines()) == 1


CONFIGURED = {"llama3-8b": {"model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32, "vocab_size": 128256,
                            "num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 14336,
                            "max_position_embeddings": 131072, "tie_word_embeddings": False},
              "qwen3-0.6b": {"model_type": "qwen3", "hidden_size": 1024, "num_hidden_layers": 28, "vocab_size": 151936,
                             "num_attention_heads": 16, "num_key_value_heads": 8, "intermediate_size": 3072,
                             "head_dim": 128, "max_position_embeddings": 40960, "tie_word_embeddings": True},
              "qwen2.5-7b": {"model_type": "qwen2", "hidden_size": 3584, "num_hidden_layers": 28, "vocab_size": 152064,
                             "num_attention_heads": 28, "num_key_value_heads": 4, "intermediate_size": 18944}}


def test_a_model_of_your_own_is_read_from_its_config(tmp_path: Path, capsys: Any) -> None:
    """Those that have a name too are the same, but for the tokens of a sequence."""
    for name, config in CONFIGURED.items():
        path = tmp_path / f"{name}.json"
        path.write_text(json.dumps(config))
        assert replace(model_named(str(path)), num_tokens=MODELS[name].num_tokens) == MODELS[name]
    assert main(["plan", str(tmp_path / "llama3-8b.json"), "--gpus", "8"]) == 0 and "MFU" in capsys.readouterr().out
    assert main(["plan", str(tmp_path / "none.json"), "--gpus", "8"]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1
    for config in ({}, [], {**CONFIGURED["llama3-8b"], "model_type": "gpt_neox"},
                   {**CONFIGURED["llama3-8b"], "hidden_size": "wide"}):
        path.write_text(json.dumps(config))
        with pytest.raises(ValueError, match="is no config.json of the kinds llama, mistral"):
            model_named(str(path))


def test_a_file_that_is_none_is_refused(tmp_path: Path) -> None:
    for name, text, words in (("a.json", "{", "can't be read"), ("a.toml", "memory", "can't be read"),
                              ("b.json", "[1]", "is not a table")):
        (tmp_path / name).write_text(text)
        with pytest.raises(ValueError, match=words):
            machine_of(str(tmp_path / name))


def test_data_sheets_hang_together() -> None:
    """fp8 is twice bf16 but for rounding, memory is faster than links, and links inside nodes than those across."""
    for name, machine in MACHINES.items():
        assert machine.fp8_flops_per_s == 0 or machine.fp8_flops_per_s / machine.bf16_flops_per_s == pytest.approx(
            2, rel=0.02), name
        assert machine.memory_bytes_per_s > machine.inside_bytes_per_s > machine.across_bytes_per_s, name


@pytest.mark.parametrize("software", SOFTWARE)
def test_a_gpu_that_nobody_measured_has_a_bar_of_gpus_that_were_left_out(software: str) -> None:
    assert not is_measured("rtx4090") and not is_measured("") and is_measured("h800") and is_measured("gb300")
    of, words = bar("rtx4090", software, False)
    assert "GPUs left out of the fit" in words and list(of) == sorted(of)
    assert bar("mi300x", software, False) == bar("", software, False) == (of, words)
    found = cluster_of("rtx4090", 8, software).efficiency
    assert 0.5 < found <= 1


def test_estimates_that_knew_no_step_of_the_gpu_are_worse_but_no_guess() -> None:
    """Dense rows of each GPU that had to be estimated from its data sheet: what the bar above is made of."""
    some = measured()
    known = some.where(np.isfinite(some.new_ratios) & [not row.model.experts for row in some.rows])
    gpus = np.array([like(row.machine) for row in known.rows])
    assert {*gpus} == {"a100", "h100", "gb200"}
    for gpu in {*gpus}:
        mine = known.where(gpus == gpu)
        off = [float(np.median(np.abs(ratios - 1))) for ratios in (mine.new_ratios, mine.ratios)]
        assert off[1] < off[0] < 0.3, gpu


@pytest.mark.slow
def test_estimates_without_a_gpu_are_those_that_are_stored() -> None:
    """Those of the H100, by constants fitted anew to all other GPUs."""
    some = measured()
    mine = np.array([like(row.machine) == "h100" for row in some.rows]) & np.isfinite(some.new_ratios)
    rows = some.where(mine)
    constants = fitted(some.where([like(row.machine) != "h100" for row in some.rows]))
    assert Rows(rows.rows).seconds(constants) / [row.step_s for row in rows.rows] == pytest.approx(
        rows.new_ratios, rel=0.02)


def test_a_layout_with_replicas_that_does_not_fit_is_told_so() -> None:
    text = str(told("llama3-70b", 32, Layout(1, 32, 1, zero_stage=3, replicas=4), batch=64))
    assert "does not fit" in text and "change   " in text


@pytest.mark.parametrize("text", ['model = "x"', '[model]\nname = "llama3"\nflavor = "8B"\n[parallelism]\n'
                                  'data_parallel_shard_degree = "8"'])
def test_a_file_with_values_of_another_kind_is_refused_in_a_sentence(text: str, tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "run.toml").write_text(text)
    assert main(["read", str(tmp_path / "run.toml"), "--gpus", "8"]) == 2
    assert "of another kind than torchtitan's" in capsys.readouterr().err


@pytest.mark.parametrize("more", [["--gpus", "2147483648"], ["--gpus", "8", "--sequence", "9999999999"],
                                  ["--gpus", "8", "--batch", "99999999999999999999"], ["--gpus", "8", "--zero", "12"],
                                  ["--gpus", "64", "--measured", "inf,tp=8,pp=8"]])
def test_numbers_that_can_not_be_are_refused_at_once(more: list[str], capsys: Any) -> None:
    assert main(["plan", "llama3-8b", *more]) == 2
    told = capsys.readouterr().err
    assert told.startswith("error: ") and "Traceback" not in told and len(told.splitlines()) == 1


def test_more_stages_than_layers_are_refused() -> None:
    for layout in (Layout(64, 1, 1), Layout(2, 1, 1, stages_per_rank=1000)):
        with pytest.raises(ValueError, match="layers are fewer than these stages"):
            told("llama3.2-1b", layout.num_gpus, layout)


def test_what_chapter_13_says_of_published_steps_is_what_its_cell_prints() -> None:
    cells = nbformat.read(ROOT / "chapters" / "13_slow_jobs.ipynb", as_version=4).cells
    (place,) = (number for number, cell in enumerate(cells) if "import data_sets" in cell.source)
    (printed,) = (output["text"] for output in cells[place].outputs if output["output_type"] == "stream")
    shares = {line.rpartition(": ")[0]: [int(share) for share in re.findall(r"(\d+)%", line)]
              for line in printed.splitlines()}
    said = cells[place + 1].source
    for lead, line in (("Megatron's dense models reach", "Megatron"), ("PyTorch's FSDP", "torchtitan and kin"),
                       ("recomputes a part,", "llama3-8b, 8,192 tokens, torchtitan and kin"),
                       ("Llama 3 70B reaches", "llama3-70b, 8,192 tokens, MaxText"),
                       ("Llama 3 8B reaches", "llama3-8b, 4,096 tokens, Megatron")):
        low, high = shares[line]
        assert f"{lead} {low} to {high}" in said, line
    assert f"down to {shares['nanotron'][0]} %" in said and f"comes over {shares['with experts'][1]}." in said
    nearest = shares["llama3-8b, 8,192 tokens, torchtitan and kin"][1]
    best = shares["llama3-70b, 8,192 tokens, MaxText"]
    assert 0.2 < 1 - 30.2 / nearest < 0.25 and "at most a quarter of the time is lost" in said
    assert best[0] <= 51 <= best[1] and round(1 - 30.2 / 51, 1) == 0.4 and "Against 51 % you lose 40 %" in said
