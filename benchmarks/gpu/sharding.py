"""What it costs FSDP2 to gather a block's parameters only when the block is reached, and what gathering ahead buys."""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from benchmarks.gpu.ranks import by_turns, finish, joined, ratios, silent, slowest, spread
from benchmarks.gpu.speed import BILLION, LAB, Job
from benchmarks.report import Findings, Table, ratio
from book.parallel import GPT

NOTE = ("The same model three times, its blocks units of `fully_shard`, in bf16 and with gradients reduced in 32 bits, "
        "by turns in the same processes; forward and backward, each the slowest rank's. When reached: the device is "
        "waited for before each block's forward, so nothing of the next one is gathered beside it. Two ahead: "
        "`set_modules_to_forward_prefetch`. Medians (smallest–largest); ratios of the same round.")
BIG = Job("a billion parameters", replace(BILLION, dtype=torch.float32), 2)
REHEARSAL = {"job": Job("the labs' GPT", LAB, 8), "num_rounds": 3}
AHEAD, REACHED, TWO = "next block ahead, as FSDP2 does", "when reached", "two blocks ahead"


def time_ways(job: Job, num_rounds: int) -> tuple[dict[str, list[float]], int]:
    """On one rank: seconds of each way in each round, and the most bytes that a GPU held."""
    device = joined()
    ways = {name: _step(job, name, device) for name in (AHEAD, REACHED, TWO)}
    seconds = by_turns(ways, num_rounds, device)
    return seconds, torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0


def _step(job: Job, way: str, device: torch.device) -> Callable[[], None]:
    torch.manual_seed(0)
    model = GPT(job.config).to(device)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.blocks:
        fully_shard(block, mp_policy=policy)
        if way == REACHED:
            block.register_forward_pre_hook(lambda *_: finish(device), prepend=True)
    fully_shard(model, mp_policy=policy)
    if way == TWO:
        blocks = [*model.blocks, None]
        for block, (one, other) in zip(blocks, pairwise([*blocks[1:], None])):
            block.set_modules_to_forward_prefetch([ahead for ahead in (one, other) if ahead is not None])
    inputs, targets = torch.randint(job.config.vocab_size, (2, job.batch, job.config.context), device=device)

    def step() -> None:
        model.zero_grad()
        GPT.loss(model(inputs), targets).backward()

    return step


def measure(num_gpus: int, job: Job = BIG, num_rounds: int = 8) -> Findings:
    """Take steps in the three ways on all GPUs."""
    if num_gpus < 2:
        return Findings(left_out=["sharding: with one GPU FSDP2 has nothing to gather; it needs 2"])
    run = silent(time_ways, num_gpus, job, num_rounds)
    seconds = slowest([rank for rank, _ in run])
    rows = [(name, spread(of), ratio(ratios(of, seconds[AHEAD]))) for name, of in seconds.items()]
    told = f"FSDP2's gathers, {num_gpus} ranks on {run.backend}: {job.name}"
    most = max(num_bytes for _, num_bytes in run)
    note = NOTE + (f" All three models together held {most / 1e9:.1f} GB of a GPU at most." if most else "")
    return Findings([Table(told, ("parameters are gathered", "step", "ratio to the first"), rows, note)])
