"""L2: tokens per second and MFU of a job, by what its user says of a step; beside the planner's estimate of that step.
"""
from __future__ import annotations

import argparse
import json
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass

from book.look.timelines import Steps
from book.words import in_seconds, rounded

WORK = "LOCKSTEP_WORK"  # the variable of the environment in which the judge finds it
FLAGS = "--params or --model"


@dataclass(frozen=True)
class Work:
    """What all ranks together do in a step; 0 and "" for what was not said.

    `flops` are those of the model alone, counted as `flops_of` says, `peak_flops_per_s` is what `peak_of` could do.
    `planned_s` is the estimate of `layout`, with `low_s` and `high_s` between which half of such steps lie; `asks` is
    how the planner is asked for other layouts, but for the measured step.
    """

    tokens: float
    num_ranks: int
    flops: float = 0.0
    flops_of: str = ""
    peak_flops_per_s: float = 0.0
    peak_of: str = ""
    layout: str = ""
    planned_s: float = 0.0
    low_s: float = 0.0
    high_s: float = 0.0
    asks: str = ""


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add what may be said of a step."""
    parser.add_argument("--tokens-per-step", type=float, default=0.0, metavar="N",
                        help="tokens that all ranks together train on in a step of the optimizer: for tokens a second")
    parser.add_argument("--params", type=float, default=0.0, metavar="N",
                        help="parameters that a token passes through, such as 8e9: with --gpu, for the MFU")
    parser.add_argument("--model", default="", help="instead of --params, a model that lockstep plan knows, or a "
                        "config.json of Hugging Face: then attention counts too")
    parser.add_argument("--sequence", type=int, default=0, metavar="N", help="tokens of a sequence, for --model")
    parser.add_argument("--gpu", default="", help="a GPU that lockstep plan knows, or numbers as it takes them")
    parser.add_argument("--layout", default="", metavar="dp=4,zero=2,...",
                        help="your layout, with --model and --gpu: what lockstep estimate expects of it")


def work_of(said: argparse.Namespace) -> Work | None:
    """What the flags say; None without any. Raises ValueError, in a sentence, where they do not fit together."""
    if not (said.tokens_per_step or said.params or said.model or said.gpu or said.layout or said.sequence):
        return None
    _check(said)
    from book.cost.machines import machine_of, name_of
    from book.cost.question import asked
    found = {"tokens": said.tokens_per_step, "num_ranks": said.ranks}
    if said.gpu:
        found |= {"peak_flops_per_s": said.ranks * machine_of(said.gpu).bf16_flops_per_s,
                  "peak_of": f"{said.ranks} {name_of(said.gpu)}"}
    if said.params:
        found |= {"flops": 6 * said.params * said.tokens_per_step, "flops_of": "6 FLOPs a token and parameter"}
    if said.model:
        model = asked(said.model, said.ranks, said.gpu or "H100", num_tokens=said.sequence).model
        found |= {"flops": model.step_flops(said.tokens_per_step / model.num_tokens),
                  "flops_of": f"{said.model}'s FLOPs, with attention's over {model.num_tokens:,} tokens"}
        found |= _planned(said, model.num_tokens) if said.layout else {}
    return Work(**found)


def _check(said: argparse.Namespace) -> None:
    for name, value in (("--tokens-per-step", said.tokens_per_step), ("--params", said.params)):
        if not 0 <= value < 1e18:
            raise ValueError(f"{name} is a number above 0, not {value:g}")
    if not said.tokens_per_step:
        raise ValueError("the rest needs --tokens-per-step: how many tokens all ranks together train on in a step")
    if said.params and said.model:
        raise ValueError("--params and --model both say how large the model is: leave one out")
    if said.gpu and not (said.params or said.model):
        raise ValueError(f"--gpu is for the MFU, which needs {FLAGS} too")
    if said.layout and not (said.model and said.gpu):
        raise ValueError("--layout is for the planner's estimate, which needs --model and --gpu too")
    if said.sequence and not said.model:
        raise ValueError("--sequence is for --model, whose attention depends on it")


def _planned(said: argparse.Namespace, num_tokens: int) -> Mapping[str, float | str]:
    """The planner's estimate of the layout."""
    from book.cost.answer import told
    from book.cost.layouts import layout_of
    batch = said.tokens_per_step / num_tokens
    if not batch.is_integer():
        raise ValueError(f"a step of {said.tokens_per_step:,g} tokens is no whole number of sequences of {num_tokens:,}"
                         ": say with --sequence how long they are")
    layout = layout_of(said.layout, said.ranks)
    found = told(said.model, said.ranks, layout, said.gpu, int(batch), said.sequence)
    asks = ["lockstep", "plan", said.model, "--gpus", str(said.ranks), "--gpu", said.gpu, "--batch", str(int(batch)),
            *(["--sequence", str(said.sequence)] if said.sequence else []), "--measured"]
    return {"layout": said.layout, "planned_s": found.cost.step_s, "low_s": found.low_s, "high_s": found.high_s,
            "asks": shlex.join(asks)}


def to_environment(work: Work | None) -> dict[str, str]:
    """The variable that tells the judge."""
    return {WORK: json.dumps(asdict(work))} if work else {}


def from_environment(variables: Mapping[str, str]) -> Work | None:
    """What the command has said of a step; None if nothing."""
    return Work(**json.loads(variables[WORK])) if WORK in variables else None


def rates_told(work: Work, made: Steps | None) -> Iterator[str]:
    """Tokens per second, MFU, and what was to be expected, as far as that was said."""
    if made is None:
        yield "tokens per second: not known, as no two steps of an optimizer were seen"
        return
    each_s = work.tokens / made.median_s
    yield f"tokens per second: {rounded(each_s)} in the median step, {rounded(each_s / work.num_ranks)} a rank"
    if work.flops and work.peak_flops_per_s:
        mfu = work.flops / made.median_s / work.peak_flops_per_s
        too_much = "; more than all is possible in 8 bits alone: check the numbers that you gave" if mfu > 1 else ""
        yield (f"MFU: {100 * mfu:.3g}% of the {rounded(work.peak_flops_per_s / 1e12)} TFLOP/s in 16 bits of "
               f"{work.peak_of}, by {work.flops_of}{too_much}")
    if work.planned_s:
        planned = work.flops / work.planned_s / work.peak_flops_per_s
        yield (f"lockstep estimate for {work.layout}: {in_seconds(work.planned_s)} a step, MFU {100 * planned:.3g}%; "
               f"half of such steps take {in_seconds(work.low_s)} to {in_seconds(work.high_s)}. Yours takes "
               f"{made.median_s / work.planned_s:.3g} times as long as the estimate")
        yield f"other layouts, with your step as the measure: {work.asks} {made.median_s:.4g},{work.layout}"
