"""Start ranks with `torch.multiprocessing.spawn`, as PyTorch's own examples do."""
import os

import torch.multiprocessing as mp

from benchmarks.programs.calls import free_port, report
from benchmarks.programs.first_all_reduce import first_all_reduce


def run_rank(rank: int, world_size: int, port: int) -> None:
    """One rank: say who it is, then do the work."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world_size),
                   "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    first_all_reduce()


def start_ranks(world_size: int) -> None:
    """Start the ranks and wait for them."""
    mp.spawn(run_rank, args=(world_size, free_port()), nprocs=world_size)


if __name__ == "__main__":
    report(start_ranks)
