"""Ask the planner from a shell.

    lockstep plan llama3-70b --gpus 64 --gpu H100 --tokens 2e12 --price 2.5
    lockstep plan llama3-70b --gpus 64 --config torchtitan     the layout as a file for torchtitan 0.3
    lockstep estimate llama3-70b --gpus 64 --layout pp=4,dp=2,tp=8,zero=1,recompute=half    --config too
    lockstep plan llama3-8b --gpus 1 --gpu rtx4090 --train lora --sequence 2048    --optimizer, --offload
    lockstep read planned.py --gpus 64                        what a file for torchtitan will send, by axis
    lockstep scoreboard                                       how far off it is, set by set
    lockstep calibrate                                        its constants, fitted anew
    lockstep models                                           names of models and GPUs
"""
from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from book.cost.answer import LayoutAnswer, MeasuredStep, Plan, plan, told
from book.cost.board import scoreboard
from book.cost.configs import CONFIGS, read_torchtitan
from book.cost.layouts import layout_of
from book.cost.machines import FITTED_FILE, MACHINES, SHORT, SOFTWARE
from book.cost.models import MODELS
from book.cost.scoreboard import calibrate
from book.cost.tuning import FULL, OPTIMIZERS, TRAIN, Tuning

LAYOUT = "sizes of pp, dp, tp, cp, ep; micro and stages: of a micro-batch, on a rank; zero 0 to 3; sp 0 or 1; recompute"


def main(arguments: list[str] | None = None) -> int:
    """Answer one question; the exit status is 2, with one sentence that says why, if it can't be answered."""
    options = _parser().parse_args(arguments)
    try:
        print(options.answer(options))
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("lockstep", description=__doc__.splitlines()[0] if __doc__ else None)
    kinds = parser.add_subparsers(required=True)
    one = kinds.add_parser("plan", help="the fastest layout that fits, with an error bar")
    one.set_defaults(answer=_plan)
    _ask(one)
    one.add_argument("--tokens", type=float, default=0.0, help="to train on, such as 2e12")
    one.add_argument("--price", type=float, default=0.0, help="dollars for a GPU hour")
    one.add_argument("--zero", metavar="STAGES", default="", help="stages of ZeRO allowed in pipelines too: 0,1,2,3")
    two = kinds.add_parser("estimate", help="a layout of your own: memory and time, part by part, with an error bar")
    two.set_defaults(answer=_told)
    _ask(two)
    two.add_argument("--layout", required=True, metavar="pp=2,dp=4,tp=8,...", help=LAYOUT)
    read = kinds.add_parser("read", help="a file for torchtitan: its layout, and what a GPU sends along each axis")
    read.add_argument("file", type=Path)
    read.add_argument("--gpus", type=int, default=0, help="how many, if its shard degree is -1")
    read.set_defaults(answer=lambda options: str(read_torchtitan(options.file.read_text("utf-8"), options.gpus)))
    board = kinds.add_parser("scoreboard", help="errors on measured steps, family by family, set by set")
    board.set_defaults(answer=lambda options: scoreboard())
    fit = kinds.add_parser("calibrate", help="fit the constants anew and leave models out in turn (a minute or two)")
    fit.add_argument("file", type=Path, nargs="?", default=Path(__file__).parent.joinpath(*FITTED_FILE))
    fit.add_argument("--starts", type=int, default=0, choices=range(17), metavar="N",
                     help="descend in other steps from so many points, 16 at most, and keep what fits best; 0: as the "
                     "file in the package was made")
    fit.set_defaults(answer=lambda options: calibrate(options.file, options.starts))
    names = kinds.add_parser("models", help="names of models and GPUs")
    names.set_defaults(answer=lambda options: f"models: {', '.join(MODELS)}\nGPUs: {', '.join(MACHINES)}")
    return parser


def _ask(parser: argparse.ArgumentParser) -> None:
    """Add what both `plan` and `estimate` are asked."""
    parser.add_argument("model", help=f"{', '.join(MODELS)}; or a config.json of Hugging Face")
    parser.add_argument("--gpus", type=int, required=True, help="how many")
    parser.add_argument("--gpu", default="H100", help=f"{', '.join(MACHINES)}; or numbers of your own as memory=48e9,"
                        f"flops=..., or in a .toml or .json file: {', '.join(SHORT.values())}")
    parser.add_argument("--batch", type=int, default=0, help="sequences of a step; default: about 4 million tokens")
    parser.add_argument("--sequence", type=int, default=0, help="tokens of a sequence; default: the model's")
    parser.add_argument("--software", help=f"{', '.join(SOFTWARE)}; default: that of --config, or {SOFTWARE[0]}")
    parser.add_argument("--precision", default="bf16", help="bf16, fp8")
    parser.add_argument("--config", choices=CONFIGS, help="print the layout as that framework's options instead")
    parser.add_argument("--measured", metavar="SECONDS,pp=2,dp=4,...",
                        help="a step of your own, its layout, and memory=60e9 if you know a GPU's peak")
    _ask_tuning(parser)


def _asked(options: argparse.Namespace) -> dict[str, Any]:
    """What both were asked, as `plan` and `told` take it."""
    if options.config and _tuning(options) != FULL:
        raise ValueError("--config writes options that train everything with Adam: leave out --train, "
                         "--frozen-layers, --optimizer and --offload")
    return {"model": options.model, "gpus": options.gpus, "gpu": options.gpu, "batch": options.batch,
            "num_tokens": options.sequence, "precision": options.precision,
            "software": options.software or options.config or SOFTWARE[0],
            "measured": _measured(options.measured, options.gpus), "tuning": _tuning(options)}


def _ask_tuning(parser: argparse.ArgumentParser) -> None:
    """Add what is asked of fine-tuning."""
    parser.add_argument("--train", default="full", help=f"{', '.join(TRAIN)}: everything, or adapters alone")
    parser.add_argument("--rank", type=int, default=FULL.rank, help="of adapters")
    parser.add_argument("--frozen-layers", type=int, default=0, help="so many of the first layers are not trained")
    parser.add_argument("--optimizer", default=FULL.optimizer, help=", ".join(OPTIMIZERS))
    parser.add_argument("--offload", default="", help="optimizer: its state is in the host's memory")


def _tuning(options: argparse.Namespace) -> Tuning:
    return Tuning(options.train, options.rank, options.frozen_layers, options.optimizer, options.offload)


def _plan(options: argparse.Namespace) -> str:
    if not set(options.zero) <= set("0123,"):
        raise ValueError(f"--zero is stages such as 0,1,2,3, not {options.zero}")
    stages = tuple(int(stage) for stage in options.zero.split(",") if stage)
    found = plan(**_asked(options), tokens=options.tokens, price=options.price, zero_stages=stages)
    return _written(found, options)


def _told(options: argparse.Namespace) -> str:
    return _written(told(**_asked(options), layout=layout_of(options.layout, options.gpus)), options)


def _written(found: Plan | LayoutAnswer, options: argparse.Namespace) -> str:
    return CONFIGS[options.config](found) if options.config else str(found)


def _measured(text: str | None, num_gpus: int) -> MeasuredStep | None:
    if not text:
        return None
    step_s, _, rest = text.partition(",")
    memory = next((part for part in rest.split(",") if part.strip().startswith("memory=")), "memory=0")
    layout = ",".join(part for part in rest.split(",") if part != memory)
    try:
        return MeasuredStep(layout_of(layout, num_gpus), float(step_s), float(memory.partition("=")[2]))
    except ValueError as error:
        raise ValueError("--measured is seconds and a layout, such as 21.5,pp=4,dp=2,tp=8,zero=1, with memory=60e9 if "
                         f"you know a GPU's peak: {error}") from None


if __name__ == "__main__":
    sys.exit(main())
