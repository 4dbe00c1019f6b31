"""Ask the planner from a shell.

    python -m book.cost plan llama3-70b --gpus 64 --gpu H100 --tokens 2e12 --price 2.5
    python -m book.cost plan llama3-70b --gpus 64 --config torchtitan     the layout as a file for torchtitan 0.3
    python -m book.cost plan llama3-8b --gpus 1 --train lora --rank 16    adapters alone; --optimizer, --offload
    python -m book.cost read planned.py --gpus 64                        what a file for torchtitan will send, by axis
    python -m book.cost scoreboard                                       how far off it is, set by set
    python -m book.cost calibrate                                        its constants, fitted anew
    python -m book.cost models                                           names of models and GPUs
"""
from __future__ import annotations

import argparse
import sys
from pathlib import Path

from book.cost.answer import MeasuredStep, plan
from book.cost.configs import CONFIGS, read_torchtitan
from book.cost.layouts import Layout
from book.cost.machines import FITTED_FILE, MACHINES, SOFTWARE
from book.cost.models import MODELS
from book.cost.scoreboard import calibrate, scoreboard
from book.cost.tuning import FULL, OPTIMIZERS, TRAIN, Tuning


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
    parser = argparse.ArgumentParser("python -m book.cost", description=__doc__.splitlines()[0] if __doc__ else None)
    kinds = parser.add_subparsers(required=True)
    one = kinds.add_parser("plan", help="the fastest layout that fits, with an error bar")
    one.set_defaults(answer=_plan)
    one.add_argument("model", help=", ".join(MODELS))
    one.add_argument("--gpus", type=int, required=True, help="how many")
    one.add_argument("--gpu", default="H100", help=", ".join(MACHINES))
    one.add_argument("--tokens", type=float, default=0.0, help="to train on, such as 2e12")
    one.add_argument("--price", type=float, default=0.0, help="dollars for a GPU hour")
    one.add_argument("--batch", type=int, default=0, help="sequences of a step; default: about 4 million tokens")
    one.add_argument("--sequence", type=int, default=0, help="tokens of a sequence; default: the model's")
    one.add_argument("--software", help=f"{', '.join(SOFTWARE)}; default: that of --config, or {SOFTWARE[0]}")
    one.add_argument("--precision", default="bf16", help="bf16, fp8")
    one.add_argument("--measured", metavar="SECONDS,pp,dp,tp,MICRO,ZERO", help="a step of your own, and its layout")
    _add_tuning(one)
    one.add_argument("--config", choices=CONFIGS, help="print the layout as that framework's options instead")
    read = kinds.add_parser("read", help="a file for torchtitan: its layout, and what a GPU sends along each axis")
    read.add_argument("file", type=Path)
    read.add_argument("--gpus", type=int, default=0, help="how many, if its shard degree is -1")
    read.set_defaults(answer=lambda options: str(read_torchtitan(options.file.read_text("utf-8"), options.gpus)))
    board = kinds.add_parser("scoreboard", help="errors on measured steps, family by family, set by set")
    board.set_defaults(answer=lambda options: scoreboard())
    fit = kinds.add_parser("calibrate", help="fit the constants anew and leave models out in turn (two minutes)")
    fit.add_argument("file", type=Path, nargs="?", default=Path(__file__).parent.joinpath(*FITTED_FILE))
    fit.set_defaults(answer=lambda options: calibrate(options.file))
    names = kinds.add_parser("models", help="names of models and GPUs")
    names.set_defaults(answer=lambda options: f"models: {', '.join(MODELS)}\nGPUs: {', '.join(MACHINES)}")
    return parser


def _add_tuning(one: argparse.ArgumentParser) -> None:
    """What is trained, and with what."""
    one.add_argument("--train", default="full", help=f"{', '.join(TRAIN)}: everything, or adapters alone")
    one.add_argument("--rank", type=int, default=FULL.rank, help="of adapters")
    one.add_argument("--frozen-layers", type=int, default=0, help="so many of the first layers are not trained")
    one.add_argument("--optimizer", default=FULL.optimizer, help=", ".join(OPTIMIZERS))
    one.add_argument("--offload", default="", help="optimizer: its state is in the host's memory")


def _tuning(options: argparse.Namespace) -> Tuning:
    tuning = Tuning(options.train, options.rank, options.frozen_layers, options.optimizer, options.offload)
    if options.config and tuning != FULL:
        raise ValueError("--config writes options that train everything with Adam: leave out --train, "
                         "--frozen-layers, --optimizer and --offload")
    return tuning


def _plan(options: argparse.Namespace) -> str:
    software = options.software or options.config or SOFTWARE[0]
    found = plan(options.model, options.gpus, options.gpu, options.tokens, options.price, options.batch,
                 options.sequence, software, options.precision, _measured(options.measured), tuning=_tuning(options))
    return CONFIGS[options.config](found) if options.config else str(found)


def _measured(text: str | None) -> MeasuredStep | None:
    if not text:
        return None
    try:
        step_s, *sizes = text.split(",")
        pp, dp, tp, micro_batch_size, zero_stage = map(int, sizes)
        layout = Layout(pp, dp, tp, micro_batch_size, zero_stage=zero_stage, sequence_parallel=int(tp > 1))
        return MeasuredStep(layout, float(step_s))
    except ValueError as error:
        raise ValueError(f"--measured is SECONDS,pp,dp,tp,MICRO,ZERO, such as 21.5,4,2,8,1,1: {error}") from None


if __name__ == "__main__":
    sys.exit(main())
