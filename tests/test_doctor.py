"""`lockstep doctor`: what it finds on machines that have faults, and on this one."""
from __future__ import annotations

import re
import socket
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist

from book.__main__ import main
from book.doctor import across
from book.doctor import machine as machines
from book.doctor.__main__ import told
from book.doctor.ailments import ailments, cards_told, while_it_ran
from book.doctor.cards import FIELD_RECOVERY, PATHS, SAMPLE_S, SLOWED, XID_EVENTS, Card, Cards, read_cards, watched
from book.doctor.findings import findings
from book.doctor.machine import HostFacts, this_machine
from book.hosts import Agents, Hosts, NoHosts
from tests.nvml import H100, FakeCard, NVMLError, library

WELL = HostFacts(torch="2.13.0+cu130", cuda="13.0", driver=True, gpus=("NVIDIA H100",) * 8, nccl="2.29.3", peers=1.0,
                 shm_bytes=64 << 30, locked_bytes=None, num_files=1 << 20, cores=96, quota=None, free_bytes=900 << 30,
                 infiniband=("mlx5_0",), host="node7", address="10.0.0.7", lookup_s=0.001,
                 interfaces={"eth0": "10.0.0.7"}, port_taken=False, variables={})
FAULTS: list[tuple[dict[str, Any], str]] = [
    ({"cuda": None, "gpus": (), "torch": "2.13.0+cpu"}, "a build without CUDA, and this machine has an NVIDIA driver"),
    ({"gpus": ()}, "built for CUDA 13.0 and sees no GPU"),
    ({"gpus": (), "driver_version": "535.104.05"},
     "CUDA 13.0, which needs driver 580 or later, and this machine has 535.104.05"),
    ({"nccl_found": "2.19.3"}, "NCCL 2.19.3 is loaded, and torch was built with 2.29.3"),
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
    assert not list(findings(replace(WELL, driver_version="580.65.06", nccl_found="2.30.1")))
    assert not list(findings(replace(WELL, cuda="12.8", driver_version="535.104.05")))
    assert not list(findings(replace(WELL, driver_version="535.104.05"))), "cuda-compat makes up for it"
    assert not list(findings(replace(WELL, address="127.0.0.1", variables={"GLOO_SOCKET_IFNAME": "eth0"})))


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


def test_gpus_that_torch_counts_and_can_not_start_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def too_old(number: int) -> str:
        raise RuntimeError("The NVIDIA driver on your system is too old")

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr(torch.cuda, "get_device_name", too_old)
    assert machines._gpus() == ()


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


def joined(num: int, **answers: Any) -> list[FakeCard]:
    """Cards on one switch of NVLinks, of which each has three."""
    return [FakeCard(bus, {**H100, **answers}, dict.fromkeys(range(3), "switch"),
                     dict.fromkeys(range(num), 50)) for bus in range(num)]


def read(monkeypatch: pytest.MonkeyPatch, cards: list[FakeCard], **options: Any) -> Cards:
    """What is read of these cards, through the library in NVML's place."""
    nvml = library(cards, **options)
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    found = read_cards()
    assert nvml.open == 0, "NVML is left open"
    return found


def test_cards_on_which_all_is_well(monkeypatch: pytest.MonkeyPatch) -> None:
    found = read(monkeypatch, joined(2))
    assert not list(ailments(found)) and found.cuda == (13, 0) and found.paths == (("X", "NV3"), ("NV3", "X"))
    assert list(cards_told(found)) == [
        "driver 580.65.06, up to CUDA 13.0", "clocks now 345 MHz, at most 1980",
        "what joins GPUs: NV: so many NVLinks, else PCIe from PIX, one switch, to SYS, across processors",
        "           0     1", "     0     X   NV3", "     1   NV3     X"]


BROKEN: list[tuple[dict[str, Any], str]] = [
    ({"recovery": 2}, "GPU 1 asks its node to be restarted"),
    ({"RemappedRows": (0, 3, 1, 0)}, "GPU 1 has faulty rows of memory that are replaced at its next reset"),
    ({"RemappedRows": (9, 9, 1, 1)}, "GPU 1 has no spare rows"),
    ({"CurrentClocksEventReasons": 0x20}, "GPU 1 runs below its clock: it is too hot"),
    ({"CurrentClocksEventReasons": 0x80}, "the power supply asks it to brake"),
    ({"CurrentClocksEventReasons": 0x02}, "the clock of GPU 1 is limited by the clocks of"),
    ({"CurrPcieLinkWidth": 8}, "GPU 1 has 8 of its 16 PCIe lanes"),
    ({"MaxClockInfo": 1410}, "of GPU 1 the clock may rise to 1410 MHz, of the others of this machine 1980"),
]


@pytest.mark.parametrize("answers, words", BROKEN, ids=lambda of: of if isinstance(of, str) else "")
def test_each_fault_of_a_card_is_found_alone(answers: dict[str, Any], words: str,
                                             monkeypatch: pytest.MonkeyPatch) -> None:
    cards = joined(3)
    cards[1].answers |= answers
    (found,) = ailments(read(monkeypatch, cards))
    assert words in found.what and len(found.remedy) > 5 and not found.what.endswith(".")


def test_memory_errors_and_links_that_are_down(monkeypatch: pytest.MonkeyPatch) -> None:
    cards = joined(3)
    cards[0].errors, cards[2].errors, cards[1].links[2] = (2, 5), (0, 4), None
    found = read(monkeypatch, cards)
    errors, links = ailments(found)
    assert errors.what == ("GPU 0 has had 2 memory errors since the driver was loaded that could not be corrected, "
                           "and 5 ever")
    assert links.what == "of GPU 1 the NVLinks that are up are 2, of the others of this machine 3"
    assert found.paths[0] == ("X", "NV2", "NV3") and "ever: GPU 0 5, GPU 2 4" in "\n".join(cards_told(found))


def test_a_card_that_is_lost_is_told_and_the_others_keep_their_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    cards = joined(4)
    cards[1].is_lost, cards[3].errors = True, (1, 1)
    found = read(monkeypatch, cards)
    lost, errors = ailments(found)
    assert lost.what.startswith("GPU 1 does not answer") and errors.what.startswith("GPU 3 has had 1 memory error")
    assert found.paths[0] == ("X", "?", "NV3", "NV3") and "--gpu-reset -i 3" in errors.remedy
    with watched() as seen:
        cards[3].xids.append(48)
        time.sleep(5 * SAMPLE_S)
    assert seen.xids == [(3, 48)] and not list(while_it_ran(seen, found.cards))[1:]


def test_pairs_without_a_switch_are_told_from_those_on_pcie(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two bridges of two links each join 0 with 1 and 2 with 3; the rest goes over PCIe; names of old drivers."""
    cards = [FakeCard(bus, {**H100, "CurrentClocksThrottleReasons": 0x48}) for bus in range(4)]
    for one, card in enumerate(cards):
        card.links = dict.fromkeys(range(2), cards[one ^ 1])
        card.levels = {other: 10 if one // 2 == other // 2 else 50 for other in range(4)}
    found = read(monkeypatch, cards, older=True)
    assert found.paths[1] == ("NV2", "X", "SYS", "SYS") and found.paths[2] == ("SYS", "SYS", "X", "NV2")
    *hot, apart = ailments(found)
    assert len(hot) == 4 and "so hot that the hardware" in hot[0].what
    assert apart.what == "NVLink joins only the GPUs of {0, 1} and {2, 3}; all other pairs talk over PCIe"
    assert read(monkeypatch, [FakeCard(0), FakeCard(1, levels={0: 40})]).paths == (("X", "?"), ("NODE", "X"))


def test_a_card_that_answers_little_and_a_library_that_answers_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    (card,) = read(monkeypatch, [FakeCard(0)]).cards
    assert (card.name, card.clock, card.reasons, card.lanes, card.links) == ("GPU", None, 0, None, 0)
    nvml = library([])

    def refuses() -> None:
        raise NVMLError("RM has detected an NVML/RM version mismatch.")

    nvml.nvmlInit = refuses
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    (found,) = ailments(read_cards())
    assert "not of one version" in found.what and found.remedy.startswith("restart")
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert read_cards().silent == "nvidia-ml-py is not installed" and not list(ailments(read_cards()))
    with watched() as seen:
        pass
    assert not list(while_it_ran(seen))


def test_what_cards_say_while_something_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = library(cards := joined(2))
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    with watched() as seen:
        cards[0].answers["CurrentClocksEventReasons"] = 0x04
        cards[1].xids += [79, 79]
        time.sleep(10 * SAMPLE_S)
        cards[0].answers["CurrentClocksEventReasons"] = 0x00
    assert [found.what for found in while_it_ran(seen)] == [
        "GPU 1 has reported Xid 79 while all-reduces ran",
        "GPU 0 ran below its clock while all-reduces ran: it has reached its power limit"]
    assert nvml.open == 0
    assert [found.what for found in while_it_ran(seen, [Card("", reasons=0x04), Card("", reasons=0x20)])] == [
        found.what for found in while_it_ran(seen)], "a power limit says nothing of a card at rest"
    assert not list(ailments(Cards(cards=(Card("", reasons=0x04),))))
    seen.reasons[0] = 0x48
    (hot,) = [found for found in while_it_ran(seen) if "GPU 0" in found.what]
    assert "so hot" in hot.what and not [
        found for found in while_it_ran(seen, [Card("", reasons=0x48)]) if "GPU 0" in found.what]


def test_the_names_that_stand_in_for_nvml_are_those_of_the_real_library() -> None:
    real = pytest.importorskip("pynvml")
    fake = library([])
    for name in [name for name in vars(fake) if name.startswith(("nvml", "NVML")) and name != "NVMLError"]:
        assert hasattr(real, name), name
        assert callable(getattr(fake, name)) or getattr(fake, name) == getattr(real, name), name
    assert real.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION == FIELD_RECOVERY
    assert real.nvmlEventTypeXidCriticalError == XID_EVENTS
    reasons = ("SwPowerCap", "HwSlowdown", "SwThermalSlowdown", "HwThermalSlowdown", "HwPowerBrakeSlowdown")
    assert [*SLOWED] == [getattr(real, f"nvmlClocksEventReason{name}") for name in reasons]
    assert [*PATHS] == [getattr(real, f"NVML_TOPOLOGY_{name}") for name in (
        "INTERNAL", "SINGLE", "MULTIPLE", "HOSTBRIDGE", "NODE", "SYSTEM")]


def together(**changes: Any) -> across.Together:
    """Two hosts, the second of which has these changes."""
    said = [across.HostSaid(facts, Cards(), "3.12.3", facts.address, 1, b"")
            for facts in (WELL, replace(WELL, host="node8", address="10.0.0.8", **changes))]
    return across.Together(tuple(said), ((0.0, 0.0), (0.02, 0.001)), ())


@pytest.mark.parametrize("changes, words", [
    ({"torch": "2.12.1+cu130"}, "differ in torch: 2.13.0+cu130 on host 0 (node7); 2.12.1+cu130 on host 1 (node8)"),
    ({"nccl": "2.27.5"}, "hosts differ in NCCL: 2.29.3 on host 0 (node7); 2.27.5 on host 1 (node8)"),
    ({"driver_version": "580.65.06"}, "hosts differ in the driver: none on host 0"),
    ({"gpus": ("NVIDIA H100",) * 7}, "hosts differ in GPUs: 8 NVIDIA H100 on host 0 (node7); 7 NVIDIA H100 on host 1"),
    ({"variables": {"NCCL_IB_DISABLE": "1", "RANK": "1"}}, "in NCCL_IB_DISABLE: not set on host 0 (node7); 1 on host"),
])
def test_what_differs_between_hosts_is_told_in_one_sentence(changes: dict[str, Any], words: str) -> None:
    (found,) = across.differences(together(**changes))
    assert words in found.what and len(found.remedy) > 5
    assert not list(across.differences(together()))


def test_clocks_and_addresses_of_hosts_are_told_and_faults_of_several_once() -> None:
    found = together()._replace(ahead_s=((0.0, 0.0), (-1.5, 0.01)), unreached=((0, 1),))
    reach, clock = across.differences(found)
    assert reach.what.startswith("host 0 (node7) can't reach host 1 (node8) at 10.0.0.8, which gloo's ranks tell")
    assert clock.what.startswith("the clock of host 1 (node8) is 1.50 s behind host 0's")
    slow = [said._replace(facts=replace(said.facts, num_files=1024, port_taken=True, variables={"RANK": "0"}))
            for said in found.hosts]
    (twice,) = across.own_findings(found._replace(hosts=tuple(slow)))
    assert twice.what.startswith("host 0 (node7), host 1 (node8): a process may have 1024 files open")


def test_hosts_measure_how_far_their_clocks_are_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three hosts in three threads, with clocks that are shifted."""
    store = dist.HashStore()
    monkeypatch.setattr(across, "this_machine", lambda: replace(WELL, address="127.0.0.1"))
    shifts_s = (0.0, 5.0, -2.0)
    with ThreadPoolExecutor(3) as pool:
        meets = [pool.submit(across.meet, store, host, 3, lambda by=shift_s: time.time() + by)
                 for host, shift_s in enumerate(shifts_s)]
        found = meets[0].result(60)
        assert [each.result(60).unreached for each in meets] == [()] * 3
    for (ahead_s, error_s), shift_s in zip(found.ahead_s, shifts_s):
        assert abs(ahead_s - shift_s) <= error_s < 1


class Unlike(Agents):
    """Agents of which each has a variable of its own."""

    def _inside(self, number: int) -> list[str]:
        return ["env", f"NCCL_P2P_DISABLE={number}"]


class Deaf(Hosts):
    """Hosts whose ranks tell others the address of the loopback."""

    _environment: ClassVar[dict[str, str]] = {"GLOO_SOCKET_IFNAME": "lo"}


@pytest.mark.slow
def test_under_torchrun_hosts_are_compared_and_all_ranks_all_reduce() -> None:
    with Unlike(2) as agents:
        said = agents.torchrun(2, ["-m", "book.doctor"])
    assert said.count("hosts differ in NCCL_P2P_DISABLE: 0 on host 0") == 1 and "can't reach" not in said, said
    assert "all-reduce between 4 ranks on gloo" in said and said.count(" GB/s") == 3
    assert "RANK" not in said and "torchrun meets by default" not in said, "torchrun's own doing is no fault"


@pytest.mark.slow
def test_hosts_that_can_not_reach_each_other_are_named_before_anything_hangs() -> None:
    try:
        with Deaf(2, 100_000_000) as hosts:
            said = hosts.torchrun(1, ["-m", "book.doctor"])
    except NoHosts as reason:
        pytest.skip(str(reason))
    assert re.search(r"host 0 \(.*\) can't reach host 1 \(.*\) at 127.0.0.1, which gloo's", said), said
    assert re.search(r"host 1 \(.*\) can't reach host 0 \(.*\) at 127.0.0.1, which gloo's", said)
    assert "all-reduce" not in said and not re.search(r"hosts differ|the clock of", said)
