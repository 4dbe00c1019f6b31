"""One rank of a script of your own: `torchrun ... -m book.job train.py ARGS` (see `book.job.attach`).

`lockstep run` starts torchrun with this on one machine.
"""
from __future__ import annotations

import sys

if __name__ == "__main__":
    from book.job import attach
    attach.main(sys.argv[1:])
