"""Ranks agree on a backend before there is a process group, whatever each of them sees.

Where a test needs GPUs, torch's count of them is replaced, in the rank; the ranks, the store and the words are real.
"""
from __future__ import annotations

import itertools
import json
import os
import re
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from book.device import message_backends
from book.hosts import Agents
from book.launch import HangError, LaunchError, RankError, launch, rank_device
from book.launch.backend import Said, heard, verdict_on
from tests.website import ROOT

PROGRAM, LIMIT_S = ROOT / "tests/programs/agree_on_backend.py", 100
HERE = socket.gethostname()


def said(gpus: list[int], told: dict[int, str] | None = None, num_ranks: int = 2) -> list[Said]:
    """Two ranks on each host, whose ranks see so many GPUs."""
    return [Said(rank, f"host{rank // num_ranks}", gpus[rank // num_ranks], num_ranks, (told or {}).get(rank))
            for rank in range(num_ranks * len(gpus))]


@pytest.mark.parametrize("ranks, backend, why", [
    (said([2, 2]), "nccl", ""),
    (said([0, 0]), "gloo", ""),
    (said([2, 0]), "gloo", "all ranks take gloo: ranks 2 and 3 on host1 see no GPU"),
    (said([1, 2]), "gloo", "all ranks take gloo: ranks 0 and 1 on host0 see 1 GPU for 2 ranks"),
    (said([8, 8, 7], num_ranks=8), "gloo",
     "all ranks take gloo: ranks 16, 17, 18, 19 and 4 more on host2 see 7 GPUs for 8 ranks"),
    (said([2, 2], {1: "gloo"}), "gloo", ""),
    (said([2, 2], dict.fromkeys(range(4), "nccl")), "nccl", ""),
])
def test_all_take_what_all_can(ranks, backend, why):
    assert verdict_on(ranks) == {"backend": backend, "why": why, "error": ""}


@pytest.mark.parametrize("ranks, words", [
    (said([2, 0], {0: "nccl"}), "rank 0 asked for NCCL, but ranks 2 and 3 on host1 see no GPU. Start ranks only"),
    (said([1, 0], {0: "nccl", 1: "nccl"}, 1), "ranks 0 and 1 asked for NCCL, but rank 1 on host1 sees no GPU"),
    (said([2, 1], {3: "nccl"}), "rank 3 asked for NCCL, but ranks 2 and 3 on host1 see 1 GPU for 2 ranks"),
    (said([2, 2], {0: "nccl", 2: "gloo"}), "rank 0 asked for NCCL, but rank 2 on host1 asked for gloo"),
])
def test_a_rank_that_cannot_follow_to_nccl_is_named(ranks, words):
    assert verdict_on(ranks)["error"].startswith(words)


STALE = {  # what an earlier start on as many ranks may have left in the store, by what it was about to do when it ended
    "nothing": {},
    "had asked": {"question": "old"},
    "was answered": {"question": "old", "old/1": "x", "old/2": "x"},
    "was partly answered": {"question": "old", "old/2": "x"},
    "had all its verdicts": {"question": "old", "old/1": "x", "old/2": "x", "t1": "v", "t2": "v", "t1/read": ""},
}


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))), ids=str)
@pytest.mark.parametrize("left", STALE)
def test_what_an_earlier_start_left_in_the_store_has_no_influence(left, order):
    store = dist.HashStore()
    old = json.dumps({"said": asdict(Said(1, "host1", 0, 1, None)), "token": "t1"})
    no = json.dumps({"backend": "gloo", "why": "", "error": ""})
    for key, value in STALE[left].items():
        store.set(key, {"x": old, "v": no}.get(value, value))
    ranks = said([1, 1, 1], num_ranks=1)
    with ThreadPoolExecutor(3) as threads:
        verdicts = []
        for rank in order:
            verdicts.append(threads.submit(heard, store, ranks[rank], 3, 20))
            time.sleep(0.01)  # so that they come in this order, mostly
        assert [verdict.result()["backend"] for verdict in verdicts] == ["nccl"] * 3


def test_repeated_starts_in_one_store_do_not_affect_each_other():
    store, gpus, found = dist.HashStore(), [[1, 1], [1, 0], [1, 1], [0, 0], [1, 1]], []
    with ThreadPoolExecutor(2) as threads:
        for counts in gpus:
            first, second = said(counts, num_ranks=1)
            late = threads.submit(heard, store, second, 2, 20)
            time.sleep(0.05)  # rank 1 finds what the previous start has left
            found.append([heard(store, first, 2, 20)["backend"], late.result()["backend"]])
    assert found == [["nccl"] * 2, ["gloo"] * 2, ["nccl"] * 2, ["gloo"] * 2, ["nccl"] * 2]


def seeing(gpus: dict[int, int], backend: str | None = None, num_hosts: int = 0) -> str:
    """In a rank: the device that it agrees to, where rank r is made to see `gpus[r]` GPUs on one of so many hosts."""
    if num_hosts:
        os.environ["LOCAL_WORLD_SIZE"] = str(int(os.environ["WORLD_SIZE"]) // num_hosts)
    torch.cuda.device_count = lambda: gpus.get(int(os.environ["RANK"]), 0)  # type: ignore[method-assign]
    torch.cuda.set_device = lambda device: None  # type: ignore[assignment]
    device = rank_device(backend)  # type: ignore[arg-type]
    assert device == rank_device()  # asked again, it is the same
    if device.type == "cuda":
        return str(device)
    dist.init_process_group(backend)
    assert device == rank_device()
    total = torch.ones(1, device=device)
    dist.all_reduce(total)
    return f"{device}, {message_backends()[device.type]}: {total.item():g} of {os.environ['CUDA_VISIBLE_DEVICES']!r}"


@pytest.mark.slow
def test_one_rank_without_a_gpu_takes_all_to_gloo():
    run = launch(seeing, 3, {0: 3, 2: 3}, None, 3)
    assert list(run) == ["cpu, gloo: 3 of ''"] * 3
    assert run.stderr[0] == f"all ranks take gloo: rank 1 on {HERE} sees no GPU\n" and not run.stderr[1]
    assert list(launch(seeing, 2, {0: 2, 1: 2}, "gloo", 2)) == ["cpu, gloo: 2 of ''"] * 2


@pytest.mark.slow
@pytest.mark.parametrize("num_hosts", [1, 2])
def test_ranks_with_a_gpu_each_agree_on_nccl(num_hosts):
    found = ["cuda:0", "cuda:1"]
    assert list(launch(seeing, 2, {0: 2, 1: 2}, None, num_hosts)) == found
    assert list(launch(seeing, 1, {0: 1}, "nccl")) == found[:1]


@pytest.mark.slow
@pytest.mark.parametrize("gpus, num_hosts, words", [
    ({0: 2}, 2, f"ranks 0 and 1 asked for NCCL, but rank 1 on {HERE} sees no GPU"),
    ({}, 1, f"rank . asked for NCCL, but rank . on {HERE} sees no GPU"),
])
def test_nccl_is_refused_in_a_sentence_before_any_rank_waits(gpus, num_hosts, words):
    with pytest.raises(RankError, match=words):
        launch(seeing, 2, gpus, "nccl", num_hosts)


@pytest.mark.slow
@pytest.mark.parametrize("silent", [0, 1])
def test_ranks_that_do_not_answer_are_named(silent: int):
    def but_two(silent: int) -> str:
        os.environ["LOCAL_WORLD_SIZE"] = "2"
        if int(os.environ["RANK"]) in (silent, silent + 1):
            time.sleep(3)
            return ""
        try:
            return str(rank_device(timeout_s=1))
        except LaunchError as error:
            return str(error)

    who = "ranks 1 and 2" if silent else "rank 0"  # nobody asks, so nobody can know of the other
    found = list(launch(but_two, 4, silent, hang_s=20))
    assert found[3].startswith(f"{who} did not say within 1 s which backend to take: is there a process for each")
    assert found[3] == found[0 if silent else 2]


@pytest.mark.slow
def test_ranks_of_one_host_need_not_all_call_it():
    def some() -> str:
        device = rank_device() if int(os.environ["RANK"]) else "none"
        dist.init_process_group("gloo")
        dist.barrier()
        return str(device)

    run = launch(some, 3)
    assert list(run) == ["none", *(["cpu"] * 2 if run.backend == "gloo" else ["cuda:1", "cuda:2"])]


@pytest.mark.slow
def test_a_rank_that_skips_rank_device_is_found_by_the_launcher_too():
    def skips() -> None:
        os.environ["LOCAL_WORLD_SIZE"] = "1"
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


def test_an_unknown_backend_is_refused(monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    with pytest.raises(ValueError, match="backend must be 'nccl', 'gloo' or None, not 'mpi'"):
        rank_device("mpi")  # type: ignore[arg-type]


def ranks_of(told: str, start: int = 0) -> dict[str, str]:
    """What each rank said at this start, by "rank 0 of 4"."""
    lines = re.findall(rf"start {start}, (rank \d of \d): (.*)", told)
    return dict(sorted(lines))


@pytest.mark.slow
@pytest.mark.parametrize("gpus, backend, silent, words", [
    ("2,0", "nccl", "", [f"ranks 0, 1, 2 and 3 asked for NCCL, but ranks 2 and 3 on {HERE} see no GPU"] * 4),
    ("0,0", "", "3", ["rank 3 did not say within 4 s"] * 3 + ["was silent"]),
])
def test_two_agents_agree_over_their_store(gpus, backend, silent, words):
    with Agents(2) as agents:
        told = agents.torchrun(2, [str(PROGRAM), gpus, backend, silent])
    found = ranks_of(told)
    assert list(found) == [f"rank {rank} of 4" for rank in range(4)], told
    assert [line.startswith(word) for line, word in zip(found.values(), words, strict=True)] == [True] * 4, told


def elastic(folder: Path, nodes: str, ranks_per_node: int, arguments: list[str], **environment: str) -> str:
    """What the ranks of elastic agents say, whose store this process hosts, once all agents have ended."""
    num_agents = int(nodes.split(":")[-1])
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    command = [sys.executable, "-m", "torch.distributed.run", f"--nnodes={nodes}", "--max-restarts=3",
               f"--nproc-per-node={ranks_per_node}", "--rdzv-backend=c10d", "--rdzv-id=job",
               f"--rdzv-endpoint=127.0.0.1:{store.port}", "--local-addr=127.0.0.1", "--rdzv-conf=is_host=0,"
               "last_call_timeout=2,keep_alive_interval=1,keep_alive_max_attempt=8", str(PROGRAM), *arguments]
    files = [folder / f"{number}.txt" for number in range(num_agents)]
    with ExitStack() as started:
        agents = []
        for file in files:
            out = started.enter_context(file.open("w"))
            agents.append(subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT, cwd=folder, env={
                    **os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "",
                    "GLOO_SOCKET_IFNAME": "lo", **environment}))
            started.callback(agents[-1].terminate)
        for agent in agents:
            agent.wait(LIMIT_S)
    return "".join(file.read_text() for file in files)


@pytest.mark.slow
@pytest.mark.parametrize("gpus, first, then, shared", [
    ("1,0;1,1", "cpu", "cuda:0", "0"), ("1,1;1,0", "cuda:0", "cpu", "1")])
def test_restarted_ranks_agree_again_in_the_store_of_the_previous_start(tmp_path, gpus, first, then, shared):
    """Rank 1 dies when all have their devices. Its agent counts a restart, and the other agent does not."""
    told = elastic(tmp_path, "2", 1, [gpus, "", "", "1", str(tmp_path)], TORCH_DISABLE_SHARE_RDZV_TCP_STORE=shared)
    assert ranks_of(told) == dict.fromkeys(["rank 0 of 2", "rank 1 of 2"], first), told
    assert ranks_of(told, 1) == dict.fromkeys(["rank 0 of 2", "rank 1 of 2"], then), told


@pytest.mark.slow
@pytest.mark.parametrize("nodes, gpus, first, then", [
    ("2:3", "1,1,0;1,1", 3, ["rank 0 of 2", "rank 1 of 2"]),
])
def test_agents_that_are_left_agree_anew_without_the_one_that_died(tmp_path, nodes, gpus, first, then):
    told = elastic(tmp_path, nodes, 1, [gpus, "", "", f"agent {first - 1}", str(tmp_path)])
    assert ranks_of(told) == {f"rank {rank} of {first}": "cpu" for rank in range(first)}, told
    assert ranks_of(told, 1) == dict.fromkeys(then, "cuda:0"), told


@pytest.mark.slow
def test_without_a_launcher_rank_0_hosts_the_store(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    ranks = [subprocess.Popen([sys.executable, str(PROGRAM), "1,0"], stdout=subprocess.PIPE, text=True, env={
        **os.environ, "RANK": rank, "WORLD_SIZE": "2", "GROUP_RANK": rank, "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "PYTHONPATH": str(ROOT)}) for rank in "10"]
    told = "".join(rank.communicate(timeout=LIMIT_S)[0] for rank in ranks)
    assert ranks_of(told) == dict.fromkeys(["rank 0 of 2", "rank 1 of 2"], "cpu"), told
    assert [rank.returncode for rank in ranks] == [0, 0]
