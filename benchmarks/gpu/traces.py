"""What PyTorch's profiler sees of DDP's step: its all-reduces beside the backward pass, and after it."""
from __future__ import annotations

from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu.overlap import Size, Steps
from benchmarks.gpu.ranks import finish, joined, silent
from benchmarks.process import ROOT
from benchmarks.report import Findings, Table, duration
from book.look.profiles import read_profile, times

FOLDER = ROOT / "_build" / "gpu" / "traces"
WAYS = {"overlapped": "beside the pass, as DDP does", "after": "after the pass"}
NOTE = ("The profiler's traces of all ranks, read as `lockstep show` reads them; each row is the rank with the most "
        f"exposed communication. The files are in {FOLDER.relative_to(ROOT)}.")
REHEARSAL = {"size": Size(256, 4, 64), "num_steps": 2}


def trace_steps(size: Size, num_steps: int, folder: str) -> None:
    """On one rank: profile steps of both ways, and write a file for each."""
    device = joined()
    steps = Steps(size, device)
    seen = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (device.type == "cuda")
    for name in WAYS:
        for _ in range(3):
            steps.ways[name]()
        finish(device)
        torch.distributed.barrier()
        with profile(activities=seen) as found:
            for _ in range(num_steps):
                steps.ways[name]()
            finish(device)
        found.export_chrome_trace(f"{folder}/{name}_rank{torch.distributed.get_rank()}.json")


def measure(num_gpus: int, size: Size = Size(), num_steps: int = 3, folder: Path = FOLDER) -> Findings:
    """Trace both ways on all GPUs, and say what the traces show."""
    if num_gpus < 2:
        return Findings(left_out=["traces: with one GPU DDP has nothing to send; it needs 2"])
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("*_rank*.json"):
        old.unlink()
    silent(trace_steps, num_gpus, size, num_steps, str(folder))
    table = Table("DDP in the profiler", ("all-reduces", "from first to last work", "computing", "communication",
                                          "exposed", "share exposed"), [], NOTE)
    for name, told in WAYS.items():
        found = [times(read_profile(folder / f"{name}_rank{rank}.json")) for rank in range(num_gpus)]
        worst = max(found, key=lambda one: one.exposed_s)
        table.rows.append((told, *map(duration, (worst.span_s, worst.computing_s, worst.messages_s, worst.exposed_s)),
                           f"{worst.exposed_s / worst.messages_s:.0%}" if worst.messages_s else "–"))
    return Findings([table])
