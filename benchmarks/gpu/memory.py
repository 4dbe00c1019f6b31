"""What holds a GPU's memory at the peak of a step, as `lockstep show` reads it from a snapshot of CUDA's allocator."""
from __future__ import annotations

from collections import Counter
from pathlib import Path

import torch

from benchmarks.gpu.ranks import finish, joined, silent
from benchmarks.gpu.speed import BILLION, Job
from benchmarks.process import ROOT
from benchmarks.report import Findings, Table
from book.look.gpu_memory import read_snapshot
from book.parallel import GPT
from book.words import in_bytes

FILE = ROOT / "_build" / "gpu" / "memory.pickle"
NOTE = ("Two steps of AdamW, everything in the model's own type, recorded from before the model is built. The peak by "
        f"the allocator's own counter is in the last row. The snapshot is {FILE.relative_to(ROOT)}.")
JOB = Job("a billion parameters", BILLION, 4)
REHEARSAL = {"file": None}


def snapshot_steps(job: Job, file: str) -> int:
    """On one rank: train with the history on, and write a snapshot; returns the most bytes that were allocated."""
    device = joined()
    torch.cuda.memory._record_memory_history(max_entries=200_000)
    model = GPT(job.config).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    inputs, targets = torch.randint(job.config.vocab_size, (2, job.batch, job.config.context), device=device)
    for _ in range(2):
        optimizer.zero_grad()
        GPT.loss(model(inputs), targets).backward()
        optimizer.step()
    finish(device)
    torch.cuda.memory._dump_snapshot(file)
    return torch.cuda.max_memory_allocated(device)


def measure(num_gpus: int, job: Job = JOB, file: Path | None = FILE) -> Findings:
    """Snapshot a step on the first GPU, and say what held its memory."""
    if file is None:
        return Findings(left_out=["memory: the allocator of the CPU keeps no history; it needs a GPU"])
    file.parent.mkdir(parents=True, exist_ok=True)
    counted = silent(snapshot_steps, 1, job, str(file))[0]
    found, held = read_snapshot(file)[0], Counter[str]()
    for part in found.parts:
        held[part.name] += part.num_bytes
    rows = [(name, in_bytes(num_bytes), f"{num_bytes / job.config.num_parameters:.2f}")
            for name, num_bytes in [*held.most_common(), ("all, at the peak", found.peak), ("by the counter", counted)]]
    return Findings([Table(f"Memory of {job.name} at the peak", ("part", "held", "bytes a parameter"), rows, NOTE)])
