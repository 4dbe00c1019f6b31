"""Where messages come from: the same device as `rank_device()` decides on, however the process group was made."""
from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from book.collectives import ring_all_reduce
from book.device import message_backends, message_device
from book.execute import execute
from book.launch import launch, rank_device
from book.record import lanes


def plain() -> tuple[dict[str, str], str, str, str | None]:
    """In a rank that leaves everything to torch: (backends, device of messages, of lanes, backend of a trace)."""
    dist.init_process_group()
    trace = execute(ring_all_reduce(dist.get_world_size()))
    return message_backends(), str(message_device()), str(lanes(2).device), trace.backend


def test_the_device_follows_from_the_process_group_not_its_name():
    run = launch(plain, 2)
    kind = "cuda" if run.backend == "nccl" else "cpu"
    for rank, (backends, messages, device, backend) in enumerate(run):
        assert backends == {kind: run.backend} and backend == run.backend
        assert messages == device == (f"cuda:{rank}" if kind == "cuda" else "cpu")


def test_gloo_takes_messages_from_the_cpu_wherever_it_runs():
    def gloo() -> tuple[str, str, str | None]:
        dist.init_process_group("gloo")
        return str(message_device()), str(lanes(2).device), execute(ring_all_reduce(2)).backend

    assert list(launch(gloo, 2)) == [("cpu", "cpu", "gloo")] * 2


def test_messages_come_from_the_device_that_a_rank_was_given():
    def given() -> tuple[str, str]:
        device = rank_device()
        dist.init_process_group()
        return str(device), str(message_device())

    for device, messages in launch(given, 2):
        assert device == messages


@pytest.mark.parametrize("local_rank, current, num_visible, number", [
    (2, 0, 4, 2),  # nobody has chosen: GPU 0 is current everywhere
    (2, 1, 4, 1),  # the program has chosen
    (2, 0, 1, 0),  # the launcher shows each rank its own GPU alone
])
def test_each_rank_has_its_own_gpu_under_nccl(monkeypatch, local_rank, current, num_visible, number):
    """What torch would answer on a machine with GPUs, so that the choice is tested where there is none."""
    monkeypatch.setenv("LOCAL_RANK", str(local_rank))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_visible)
    monkeypatch.setattr(dist, "get_backend_config", lambda: "cuda:nccl")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert message_device() == torch.device("cuda", number)
    finally:
        dist.destroy_process_group()
