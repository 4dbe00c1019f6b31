"""`lockstep run`: start an unchanged script by torchrun, and say what goes wrong in it.

    lockstep run --ranks 4 train.py --epochs 3

As a module under torchrun it is one rank: `torchrun ... -m book.job train.py ARGS` (see `book.job.attach`).
"""
from __future__ import annotations

import sys


def main(arguments: list[str] | None = None) -> int:
    """Run a job, and return torchrun's exit status."""
    from book.job import command
    return command.main(sys.argv[1:] if arguments is None else arguments)


if __name__ == "__main__":
    from book.job import attach
    attach.main(sys.argv[1:])
