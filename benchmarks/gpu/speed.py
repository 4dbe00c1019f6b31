"""MFU of the book's GPT on one GPU, without any communication: the labs' size, and a billion parameters."""
from __future__ import annotations

import re
import statistics
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.gpu.ranks import by_turns, joined, silent, spread
from benchmarks.report import Findings, Table
from book.cost import MACHINES
from book.parallel import GPT, GPTConfig

NOTE = ("One step: forward, backward and AdamW, everything in the model's own type. FLOPs: those of matrix products "
        "and attention as torch's FlopCounterMode counts them, attention as if nothing were masked. MFU: their share "
        "of the dense bf16 peak in `book.cost.MACHINES`. Median (smallest–largest).")


@dataclass(frozen=True)
class Job:
    """A GPT, and how many whole contexts are in a step."""

    name: str
    config: GPTConfig
    batch: int


LAB = GPTConfig(vocab_size=65, context=32, num_layers=2, width=32)
BILLION = GPTConfig(vocab_size=32768, context=2048, num_layers=20, num_heads=16, width=2048, dtype=torch.bfloat16)
JOBS = (Job("the labs' GPT", LAB, 16), Job("a billion parameters", BILLION, 4))
REHEARSAL = {"jobs": (Job("the labs' GPT", LAB, 16),), "num_rounds": 3}


def time_steps(job: Job, num_rounds: int) -> tuple[list[float], int, str]:
    """On one rank: seconds of steps, FLOPs of one, and what the GPU is called."""
    device = joined()
    model = GPT(job.config).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    inputs, targets = torch.randint(job.config.vocab_size, (2, job.batch, job.config.context), device=device)

    def step() -> None:
        optimizer.zero_grad()
        GPT.loss(model(inputs), targets).backward()
        optimizer.step()

    with FlopCounterMode(display=False) as counter:
        step()
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    return by_turns({"step": step}, num_rounds, device)["step"], counter.get_total_flops(), name


def peak_flops_per_s(name: str) -> float | None:
    """The dense bf16 peak of a GPU as its driver calls it; None for one that the planner does not know."""
    words = re.findall(r"[a-z0-9]+", name.lower())
    called = {*words, *map("".join, pairwise(words))}  # "NVIDIA GeForce RTX 4090" is rtx4090
    return next((machine.bf16_flops_per_s for key, machine in MACHINES.items() if key in called), None)


def measure(num_gpus: int, jobs: tuple[Job, ...] = JOBS, num_rounds: int = 10) -> Findings:
    """Train each size for some steps on the first GPU."""
    columns = ("model", "parameters", "step", "tokens a second", "TFLOP/s", "MFU")
    table = Table("MFU on one GPU", columns, [], NOTE)
    for job in jobs:
        seconds, flops, name = silent(time_steps, 1, job, num_rounds)[0]
        middle, peak = statistics.median(seconds), peak_flops_per_s(name)
        table.rows.append((job.name, f"{job.config.num_parameters:,}", spread(seconds),
                           f"{job.batch * job.config.context / middle:,.0f}", f"{flops / middle / 1e12:.3g}",
                           f"{flops / middle / peak:.1%}" if peak else "–"))
    return Findings([table])
