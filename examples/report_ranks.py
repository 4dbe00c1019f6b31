"""For torchrun on one or several nodes: each rank says who it is, on which node, and the sum of a 1 from every rank."""
import os
import socket

import torch
import torch.distributed as dist


def main() -> None:
    """Print a line for each rank."""
    dist.init_process_group("gloo")
    ones = torch.ones(1)
    dist.all_reduce(ones)
    node = os.environ.get("SLURMD_NODENAME", socket.gethostname())
    print(f"rank {os.environ['RANK']} of {os.environ['WORLD_SIZE']}, local rank {os.environ['LOCAL_RANK']}, "
          f"node {node}, sum {ones.item():.0f}\n", end="", flush=True)  # one write: ranks can't mix their lines
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
