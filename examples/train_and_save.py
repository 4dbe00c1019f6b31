"""For torchrun on several hosts: DDP trains while one rank sends its checkpoint over the network that all-reduces use.

    torchrun ... examples/train_and_save.py [--storage HOST:PORT [--rank 1] [--most-bytes-per-s N]]

HOST:PORT takes what comes and answers nothing. Without --storage nothing is saved. At the end rank 0 prints the median
step. The checkpoint is large: it is still on its way at the end, so that each step but the first ones has company.
"""
import argparse
import os
import socket
import statistics
import threading
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

STEPS, WARM_UP = 40, 5
CHECKPOINT_BYTES, PIECE = 80_000_000, 64 << 10
COMPUTE_S = 0.05  # a pause in the place of computing, as all hosts share this machine's cores


def send(address: str, most_bytes_per_s: float) -> None:
    """Send a checkpoint, piece by piece; slower than the network if that is asked for."""
    host, _, port = address.rpartition(":")
    start_s = time.monotonic()
    with socket.create_connection((host, int(port))) as storage:
        for sent in range(0, CHECKPOINT_BYTES, PIECE):
            storage.sendall(bytes(PIECE))
            if most_bytes_per_s:
                time.sleep(max(0.0, start_s + (sent + PIECE) / most_bytes_per_s - time.monotonic()))


def main() -> None:
    """Train, and save in the background on one rank."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--storage")
    parser.add_argument("--rank", type=int, default=1)
    parser.add_argument("--most-bytes-per-s", type=float, default=0)
    asked = parser.parse_args()
    dist.init_process_group("gloo")
    model = DistributedDataParallel(nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 256)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    steps_s = []
    for step in range(STEPS):
        if step == WARM_UP and asked.storage and int(os.environ["RANK"]) == asked.rank:
            threading.Thread(target=send, args=(asked.storage, asked.most_bytes_per_s), daemon=True).start()
        start_s = time.monotonic()
        time.sleep(COMPUTE_S)
        model(torch.randn(8, 256)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        steps_s.append(time.monotonic() - start_s)
    if int(os.environ["RANK"]) == 0:
        print(f"median step: {1000 * statistics.median(steps_s[WARM_UP:]):.0f} ms", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
