"""One function for `launch` and torchrun alike: `torchrun sum_ranks.py` and `python sum_ranks.py` print the same."""
import os

import torch
import torch.distributed as dist

from book.launch import launch, rank_device


def sum_ranks():
    device = rank_device()
    dist.init_process_group()
    total = torch.ones(2, device=device) * (dist.get_rank() + 1)
    dist.all_reduce(total)
    if dist.get_rank() == 0:
        print("sum", total.tolist(), "on", device.type)
    dist.destroy_process_group()


if "RANK" in os.environ:
    sum_ranks()
else:
    launch(sum_ranks, 2, on_line=lambda rank, line: print(line))
