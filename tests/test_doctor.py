"""`lockstep doctor`: what it finds on machines that have faults, and on this one."""
from __future__ import annotations

import socket
from dataclasses import replace
from typing import Any

import pytest

from book.__main__ import main
from book.doctor import machine as machines
from book.doctor.__main__ import told
from book.doctor.findings import findings
from book.doctor.machine import HostFacts, this_machine

WELL = HostFacts(torch="2.13.0+cu130", cuda="13.0", driver=True, gpus=("NVIDIA H100",) * 8, nccl="2.29.3", peers=1.0,
                 shm_bytes=64 << 30, locked_bytes=None, num_files=1 << 20, cores=96, quota=None, free_bytes=900 << 30,
                 infiniband=("mlx5_0",), host="node7", address="10.0.0.7", lookup_s=0.001,
                 interfaces={"eth0": "10.0.0.7"}, port_taken=False, variables={})
FAULTS: list[tuple[dict[str, Any], str]] = [
    ({"cuda": None, "gpus": (), "torch": "2.13.0+cpu"}, "a build without CUDA, and this machine has an NVIDIA driver"),
    ({"gpus": ()}, "built for CUDA 13.0 and sees no GPU"),
    ({"peers": 0.25}, "75% of the pairs of GPUs can't read each other's memory"),
    ({"shm_bytes": 64 << 20}, "/dev/shm has 64 MiB"),
    ({"locked_bytes": 8 << 20}, "a process may lock 8 MiB of memory, and InfiniBand (mlx5_0)"),
    ({"num_files": 1024}, "a process may have 1024 files open"),
    ({"lookup_s": 5.02}, "looking up the name of 127.0.0.1 takes 5.0 s"),
    ({"lookup_s": None}, "takes over 8 s"),
    ({"address": ""}, "node7, leads to no address"),
    ({"address": "127.0.1.1"}, "leads to 127.0.1.1: ranks on other hosts would be told to connect to themselves"),
    ({"interfaces": {"eth0": "10.0.0.7", "eth1": "10.1.0.7", "docker0": "172.1.0.1"}}, "several networks (eth0, eth1)"),
    ({"port_taken": True}, "port 29500, where torchrun meets by default, is in use"),
    ({"variables": {"RANK": "0"}}, "RANK is set in this shell: a program"),
    ({"variables": {"CUDA_LAUNCH_BLOCKING": "1"}}, "CUDA_LAUNCH_BLOCKING=1 is set"),
    ({"variables": {"TORCH_FR_BUFFER_SIZE": "0"}}, "a job that hangs leaves no dumps"),
    ({"quota": 1.5}, "1.5 cores for 8 ranks")]


def test_a_machine_on_which_all_is_well_has_nothing() -> None:
    assert not list(findings(WELL))
    harmless = {"NCCL_P2P_DISABLE": "0", "TORCH_FR_BUFFER_SIZE": "20000", "NCCL_SOCKET_IFNAME": "eth0"}
    assert not list(findings(replace(WELL, variables=harmless, interfaces={"eth0": "10.0.0.7", "eth1": "10.1.0.7"})))
    assert not list(findings(replace(WELL, infiniband=(), locked_bytes=8 << 20)))


@pytest.mark.parametrize("fault, words", FAULTS, ids=lambda of: of if isinstance(of, str) else "")
def test_each_fault_is_found_alone_and_has_a_remedy(fault: dict[str, Any], words: str) -> None:
    (found,) = findings(replace(WELL, **fault))
    assert words in found.what and len(found.remedy) > 5 and not found.what.endswith(".")


def test_what_the_system_says_is_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    """A port that is taken, a name that leads nowhere, a name server that does not answer."""
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setattr(machines, "WAIT_S", 0.1)
    monkeypatch.setattr(socket, "gethostname", lambda: "no-such-host.invalid")
    monkeypatch.setattr(socket, "getnameinfo", lambda *_: [machines.time.sleep(1), ("", "")][1])
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        monkeypatch.setattr(machines, "PORT", listener.getsockname()[1])
        found = this_machine()
    assert found.port_taken and found.address == "" and found.lookup_s is None
    assert found.variables["MASTER_ADDR"] == "127.0.0.1" and found.shm_bytes > 0 and found.cores > 0
    assert not replace(found, port_taken=machines._taken(machines.PORT)).port_taken


def test_a_machine_is_told_in_four_lines() -> None:
    assert list(told(WELL)) == [
        "torch 2.13.0+cu130, CUDA 13.0, NCCL 2.29.3", "8 GPUs: NVIDIA H100",
        "96 cores, 900 GiB of memory free, 64.0 GiB in /dev/shm", "node7: eth0 10.0.0.7, InfiniBand mlx5_0"]


@pytest.mark.slow
def test_the_command_looks_at_this_machine_and_times_all_reduces(capsys: pytest.CaptureFixture[str]) -> None:
    status = main(["doctor", "--ranks", "2"])
    said = capsys.readouterr().out.splitlines()
    numbered = [line for line in said if line[:2].rstrip(".").isdigit()]
    assert status == bool(numbered) and said[0].startswith("torch ")
    assert [line.split()[1] for line in said[-3:]] == ["bytes"] * 3
    assert main(["doctor", "--ranks", "1"]) == 2 and "at least 2 ranks" in capsys.readouterr().err
    assert main(["doctor", "--quick"]) == status and "all-reduce" not in capsys.readouterr().out
