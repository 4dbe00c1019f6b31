"""Ranks agree on a backend before there is a process group, whatever each of them sees.

Where a test needs GPUs, torch's count of them is replaced, in the rank; the ranks, the store and the words are real.
"""
from __future__ import annotations

import os
import socket
import time

import pytest
import torch
import torch.distributed as dist

from book.device import message_backends
from book.hosts import Agents
from book.launch import HangError, LaunchError, RankError, launch, rank_device
from book.launch.backend import Said, verdict_on
from tests.website import ROOT

READS = ["tests/programs/agree_on_backend.py"]
HERE = socket.gethostname()


def said(gpus: list[int], told: dict[int, str] | None = None, num_ranks: int = 2) -> list[Said]:
    """Two ranks on each host, whose ranks see so many GPUs."""
    return [Said(rank, f"host{rank // num_ranks}", gpus[rank // num_ranks], num_ranks, (told or {}).get(rank))
            for rank in range(num_ranks * len(gpus))]


@pytest.mark.parametrize("ranks, backend, why", [
    (said([2, 2]), "nccl", ""),
    (said([0, 0]), "gloo", ""),
    (said([2, 0]), "gloo", "all ranks take gloo: ranks 2 and 3 on host1 have no GPU"),
    (said([1, 2]), "gloo", "all ranks take gloo: ranks 0 and 1 on host0 see 1 GPU for 2 ranks"),
    (said([8, 8, 7], num_ranks=8), "gloo",
     "all ranks take gloo: ranks 16, 17, 18, 19 and 4 more on host2 see 7 GPUs for 8 ranks"),
    (said([2, 2], {1: "gloo"}), "gloo", ""),
    (said([2, 2], dict.fromkeys(range(4), "nccl")), "nccl", ""),
])
def test_all_take_what_all_can(ranks, backend, why):
    assert verdict_on(ranks) == {"backend": backend, "why": why, "error": ""}


@pytest.mark.parametrize("ranks, words", [
    (said([2, 0], {0: "nccl"}), "rank 0 asked for NCCL, but ranks 2 and 3 on host1 have no GPU. Start ranks only"),
    (said([1, 0], {0: "nccl", 1: "nccl"}, 1), "ranks 0 and 1 asked for NCCL, but rank 1 on host1 has no GPU"),
    (said([2, 1], {3: "nccl"}), "rank 3 asked for NCCL, but ranks 2 and 3 on host1 see 1 GPU for 2 ranks"),
    (said([2, 2], {0: "nccl", 2: "gloo"}), "rank 0 asked for NCCL, but rank 2 on host1 asked for gloo"),
])
def test_a_rank_that_cannot_follow_to_nccl_is_named(ranks, words):
    assert verdict_on(ranks)["error"].startswith(words)


def seeing(gpus: dict[int, int], backend: str | None = None) -> str:
    """In a rank: the device that it agrees to, where rank r is made to see `gpus[r]` GPUs."""
    torch.cuda.device_count = lambda: gpus.get(int(os.environ["RANK"]), 0)  # type: ignore[method-assign]
    torch.cuda.set_device = lambda device: None  # type: ignore[assignment]
    device = rank_device(backend)  # type: ignore[arg-type]
    assert device == rank_device()  # asked again, it is the same
    if device.type == "cuda":
        return str(device)
    dist.init_process_group(backend)
    total = torch.ones(1, device=device)
    dist.all_reduce(total)
    return f"{device}, {message_backends()[device.type]}: {total.item():g} of {os.environ['CUDA_VISIBLE_DEVICES']!r}"


@pytest.mark.slow
def test_one_rank_without_a_gpu_takes_all_to_gloo():
    run = launch(seeing, 3, {0: 3, 2: 3})
    assert list(run) == ["cpu, gloo: 3 of ''"] * 3
    assert run.stderr[0] == f"all ranks take gloo: rank 1 on {HERE} has no GPU\n" and not run.stderr[1]
    assert list(launch(seeing, 2, {0: 2, 1: 2}, "gloo")) == ["cpu, gloo: 2 of ''"] * 2


@pytest.mark.slow
def test_ranks_with_a_gpu_each_agree_on_nccl():
    assert list(launch(seeing, 2, {0: 2, 1: 2})) == ["cuda:0", "cuda:1"]
    assert list(launch(seeing, 1, {0: 1}, "nccl")) == ["cuda:0"]


@pytest.mark.slow
@pytest.mark.parametrize("gpus, words", [
    ({0: 2}, f"ranks 0 and 1 asked for NCCL, but rank 1 on {HERE} has no GPU"),
    ({}, f"ranks 0 and 1 asked for NCCL, but ranks 0 and 1 on {HERE} have no GPU"),
])
def test_nccl_is_refused_in_a_sentence_before_any_rank_waits(gpus, words):
    with pytest.raises(RankError, match=words):
        launch(seeing, 2, gpus, "nccl")


@pytest.mark.slow
def test_ranks_that_do_not_answer_are_named():
    def but_one(silent: int) -> str:
        if int(os.environ["RANK"]) in (silent, silent + 1):
            time.sleep(4)
            return ""
        try:
            return str(rank_device(timeout_s=1))
        except LaunchError as error:
            return str(error)

    words = "ranks 1 and 2 did not say within 1 s which backend to take: is there a process for each"
    found = list(launch(but_one, 4, 1, hang_s=10))
    assert found[0].startswith(words) and found[3] == found[0]


@pytest.mark.slow
def test_a_rank_that_skips_rank_device_is_found_by_the_launcher_too():
    def skips() -> None:
        if int(os.environ["RANK"]):
            rank_device()
        dist.init_process_group("gloo")

    with pytest.raises(HangError, match=r"rank 1 .*rank_device\(\)"):
        launch(skips, 2, hang_s=1)


@pytest.mark.slow
def test_after_the_process_group_is_there_the_device_follows_it():
    def late() -> str:
        torch.cuda.device_count = lambda: 2  # type: ignore[method-assign]
        dist.init_process_group("gloo")
        return str(rank_device())

    assert list(launch(late, 2)) == ["cpu"] * 2


def test_a_backend_that_there_is_not_is_refused(monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    with pytest.raises(ValueError, match="backend must be 'nccl', 'gloo' or None, not 'mpi'"):
        rank_device("mpi")  # type: ignore[arg-type]


@pytest.mark.full
@pytest.mark.parametrize("gpus, backend, silent, words", [
    ("2,0", "", "", ["cpu"] * 4),
    ("2,2", "", "", ["cuda:0", "cuda:1"] * 2),
    ("2,0", "nccl", "", [f"ranks 0, 1, 2 and 3 asked for NCCL, but ranks 2 and 3 on {HERE} have no GPU"] * 4),
    ("0,0", "", "3", ["rank 3 did not say within 4 s"] * 3 + ["was silent"]),
])
def test_two_agents_agree_over_their_store(gpus, backend, silent, words):
    with Agents(2) as agents:
        told = agents.torchrun(2, [str(ROOT / "tests/programs/agree_on_backend.py"), gpus, backend, silent])
    lines = dict(line.split(": ", 1) for line in sorted(told.splitlines()) if line.startswith("rank "))
    assert list(lines) == [f"rank {rank}" for rank in range(4)], told
    assert [line.startswith(word) for line, word in zip(lines.values(), words, strict=True)] == [True] * 4, told
