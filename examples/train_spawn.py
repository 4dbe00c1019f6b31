"""Start the ranks of train_ddp.py without torchrun: one program that spawns them, and a file in which they meet.

    python examples/train_spawn.py --epochs 2

It takes the same arguments. Old articles start ranks like this. It works, on one machine; but nobody starts a rank
again that has died, and the number of ranks stands in the program.
"""
import os
import tempfile
from pathlib import Path

import torch
from train_ddp import main

NUM_RANKS = torch.cuda.device_count() or 2


def run(rank: int, meeting: str) -> None:
    """One rank: spawn passes its number, and torchrun's variables are set by hand."""
    os.environ.update(LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(NUM_RANKS))
    main(init_method=f"file://{meeting}", rank=rank, world_size=NUM_RANKS)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:  # a file that a former run has left would make the ranks wait
        torch.multiprocessing.spawn(run, (str(Path(folder, "meeting")),),
                                    nprocs=NUM_RANKS)
