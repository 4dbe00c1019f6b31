"""Starting ranks on NCCL against gloo, again and again from one program, and where a rank's time goes."""
from __future__ import annotations

import statistics
import time

import torch
import torch.distributed as dist

from benchmarks.gpu.ranks import finish, ratios, silent, spread, world_sizes
from benchmarks.report import Findings, Table, duration, ratio
from book.launch import rank_device

REHEARSAL = {"num_rounds": 2}
PHASES = ("device", "group", "first all_reduce", "second all_reduce")
NOTE = ("A launch is one call of `book.launch` in a program that has launched before, up to its results: every rank "
        "takes its device, joins the group, and all-reduces 4 bytes twice. Gloo: the same with CPU tensors, by turns "
        "with the first. Medians (smallest–largest); ratios of the same round.")
PHASE_NOTE = ("Device: CUDA's context and a first tensor. Group: `init_process_group()`. The first all_reduce makes "
              "NCCL's communicator. Each is the slowest rank's; medians over the launches.")


def phases(backend: str | None) -> dict[str, float]:
    """In a rank: the seconds of each phase of its start; if `backend` is None, torch chooses, as in the book."""
    start_s, seconds = time.perf_counter(), {}
    device = torch.device("cpu") if backend else rank_device()
    tensor = torch.ones(1, device=device)
    for phase in PHASES:
        if phase == "group":
            dist.init_process_group(backend)
        elif phase != "device":
            dist.all_reduce(tensor)
        finish(device)
        seconds[phase] = time.perf_counter() - start_s
        start_s = time.perf_counter()
    if tensor.item() != dist.get_world_size()**2:
        raise AssertionError(f"two all-reduces of ones give {tensor.item()} on {dist.get_world_size()} ranks")
    return seconds


def launch_once(world_size: int, backend: str | None) -> tuple[float, dict[str, float], str]:
    """Seconds of one launch, the slowest rank's time in each phase, and the backend that was used."""
    start_s = time.perf_counter()
    run = silent(phases, world_size, backend)
    taken_s = time.perf_counter() - start_s
    return taken_s, {phase: max(rank[phase] for rank in run) for phase in PHASES}, backend or run.backend


def measure(num_gpus: int, num_rounds: int = 5) -> Findings:
    """Launch 1, 2, 4 ... ranks in both ways by turns, after one launch each to warm up."""
    columns = ("ranks", "backend", "launch", "gloo", "ratio to gloo")
    table = Table("Launching again, NCCL against gloo", columns, [], NOTE)
    inside = Table("Inside a rank", ("ranks", "backend", *PHASES), [], PHASE_NOTE)
    for world_size in world_sizes(num_gpus):
        rounds = []
        for turn in range(num_rounds + 1):
            ways = (None, "gloo")[::1 if turn % 2 else -1]
            rounds.append({way: launch_once(world_size, way) for way in ways})
        taken, gloo = ([turn[way][0] for turn in rounds[1:]] for way in (None, "gloo"))
        name = rounds[0][None][2]
        table.rows.append((str(world_size), name, spread(taken), spread(gloo), ratio(ratios(taken, gloo))))
        medians = [statistics.median(turn[None][1][phase] for turn in rounds[1:]) for phase in PHASES]
        inside.rows.append((str(world_size), name, *map(duration, medians)))
    return Findings([table, inside])
