"""A job of DDP in which one rank, each in turn or none is slow: KIND RANK MILLISECONDS FOLDER, for its traces.

Its work is sleep, so that as few cores as there are do not decide who is late.
"""
import gc
import random
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile
from torch.utils.data import DataLoader

KIND, LATE, EXTRA_S, FOLDER = sys.argv[1], int(sys.argv[2]), float(sys.argv[3]) / 1e3, Path(sys.argv[4])
NUM_STEPS, WORK_S = 90, 0.006
dist.init_process_group("gloo")
rank = dist.get_rank()
draw = random.Random(rank)
ballast = [[] for _ in range(200_000)]  # what a collection has to look at


def work(where):
    """What a phase takes on each rank, and what is drawn beside it."""
    time.sleep(WORK_S)
    if (KIND, LATE) == (where, rank):
        time.sleep(EXTRA_S)
    if (KIND, where) == ("jitter", "forward"):
        time.sleep(3 * EXTRA_S * draw.random() ** 2)
    if (KIND, LATE, where) == ("garbage collector", rank, "forward"):
        until_s = time.perf_counter() + EXTRA_S
        while time.perf_counter() < until_s:
            gc.collect()


class Work(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        work("forward")
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        work("backward")
        return gradient


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = torch.nn.Linear(64, 64), torch.nn.Linear(64, 64)

    def forward(self, x):
        return self.second(Work.apply(self.first(x)))


class SGD(torch.optim.SGD):
    def step(self):
        work("optimizer")
        return super().step()


def collate(samples):
    work("input")
    return torch.stack(samples)


gc.disable()
net = DistributedDataParallel(Net(), bucket_cap_mb=0.01)
optimizer = SGD(net.parameters(), 0.01)
with profile(activities=[ProfilerActivity.CPU]) as profiler:
    for batch in DataLoader(torch.randn(4 * NUM_STEPS, 64), 4, collate_fn=collate):
        net(batch).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
del net
dist.destroy_process_group()
profiler.export_chrome_trace(str(FOLDER / f"{rank}.json"))
