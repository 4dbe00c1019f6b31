"""Under torchrun on several hosts: time messages on both kinds of links, then all-reduces by turns; prints JSON."""
from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist

from benchmarks.across import MESSAGE_BYTES, schedules
from book.execute import execute

NUM_MESSAGES = 5


def main(num_bytes: int, num_rounds: int) -> None:
    """Rank 0 prints the seconds of messages of MESSAGE_BYTES, inside a host and across, and of each all-reduce."""
    dist.init_process_group("gloo")
    ranks_per_host = int(os.environ["LOCAL_WORLD_SIZE"])
    messages = {where: [_messages_s(dst, size) for size in MESSAGE_BYTES]
                for where, dst in (("inside", 1), ("across", ranks_per_host))}
    buffer = torch.ones(num_bytes // 8, dtype=torch.float64)
    made = schedules(dist.get_world_size() // ranks_per_host, ranks_per_host)
    rounds = [{name: _slowest_s(partial(execute, schedule, buffer.clone())) for name, schedule in made.items()}
              for _ in range(num_rounds)]
    if dist.get_rank() == 0:
        print(json.dumps({"messages": messages, "rounds": rounds}))
    dist.destroy_process_group()


def _messages_s(dst: int, num_bytes: int) -> float:
    """How long a message from rank 0 to `dst` takes: half of a message there and one back, the median of several."""
    buffer, seconds = torch.zeros(num_bytes, dtype=torch.uint8), []
    dist.barrier()
    for _ in range(NUM_MESSAGES if dist.get_rank() in (0, dst) else 0):
        start_s = time.monotonic()
        for step in (0, 1):
            if (dist.get_rank() == 0) == (step == 0):
                dist.send(buffer, dst if dist.get_rank() == 0 else 0)
            else:
                dist.recv(buffer, dst if dist.get_rank() == 0 else 0)
        seconds.append((time.monotonic() - start_s) / 2)
    return statistics.median(seconds) if seconds else 0.0


def _slowest_s(all_reduce: Callable[[], object]) -> float:
    """How long the slowest rank takes."""
    dist.barrier()
    start_s = time.monotonic()
    all_reduce()
    seconds = torch.tensor([time.monotonic() - start_s], dtype=torch.float64)
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    return seconds.item()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
