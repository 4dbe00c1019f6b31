"""Rank 1 sleeps before an all-reduce in which all others wait; torchrun starts it, the argument is the timeout."""
from __future__ import annotations

import os
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist

on_gpu = torch.cuda.is_available()
device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
if on_gpu:
    torch.cuda.set_device(device)
dist.init_process_group("nccl" if on_gpu else "gloo", timeout=timedelta(seconds=float(sys.argv[1])))
ones = torch.ones(1024, device=device)
for _ in range(3):
    dist.all_reduce(ones)
if dist.get_rank() == 1:
    time.sleep(600)
dist.all_reduce(ones)
print(ones.sum().item())  # on a GPU this waits for the kernel
