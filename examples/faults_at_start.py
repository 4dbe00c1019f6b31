"""Programs that can't start, or that stop with an error of torch's, each for one reason; `faults.py` runs them.

The first line of a docstring says what is wrong, the rest what to do.
"""
from __future__ import annotations

import os
import signal
import threading
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from faults_that_hang import Program, TwoHeads, start
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset


class Images(Dataset):  # type: ignore[type-arg]
    """Four images, of which one can't be read."""

    def __init__(self, bad: bool) -> None:
        self.bad = bad

    def __len__(self) -> int:
        """How many there are."""
        return 4

    def __getitem__(self, index: int) -> torch.Tensor:
        """An image."""
        if self.bad and index == 2:
            lock = threading.Lock()
            lock.acquire()
            lock.acquire()
        return torch.ones(4)


class LargeImages(Dataset):  # type: ignore[type-arg]
    """Four images, too large for the machine."""

    def __len__(self) -> int:
        """How many there are."""
        return 4

    def __getitem__(self, index: int) -> torch.Tensor:
        """An image."""
        if index == 2:
            os.kill(os.getpid(), signal.SIGKILL)  # as the system does when no memory is left
        return torch.ones(4)


# Starts

def a_port_in_the_program() -> None:
    """The program writes an address and a port of its own.

    The launcher, torchrun too, has set both to where its own store listens. Leave the lines out.
    """
    os.environ["MASTER_ADDR"] = "localhost"
    os.environ["MASTER_PORT"] = "12355"
    dist.init_process_group()


def a_rank_by_hand() -> None:
    """Every process says that it is rank 0.

    Leave `rank=` and `world_size=` out: the launcher has set both.
    """
    dist.init_process_group("gloo", rank=0, world_size=3)


def a_world_size_by_hand() -> None:
    """The program waits for more ranks than were started.

    Leave `rank=` and `world_size=` out: the launcher has set both.
    """
    dist.init_process_group("gloo", rank=int(os.environ["RANK"]), world_size=4)


def a_backend_without_its_device() -> None:
    """The program asks for NCCL, and there is no GPU.

    Leave the backend out, and torch takes the one that fits the devices.
    """
    dist.init_process_group("nccl")


def a_second_start() -> None:
    """The program destroys its groups and starts again.

    Under torchrun such a program fails or hangs, but not every time
    ([public report 55967](https://github.com/pytorch/pytorch/issues/55967)): both starts use one store and the same
    keys. If you must start again, on your own servers, use another port each time.
    """
    for _ in range(2):
        dist.init_process_group("gloo")
        dist.all_reduce(torch.ones(4))
        dist.destroy_process_group()


# Errors

def an_output_that_no_loss_uses() -> None:
    """No rank's loss uses all parameters of a model under DDP.

    Torch complains in the step after. Use them, freeze them before DDP wraps the model, or pass
    `find_unused_parameters=True`.
    """
    start()
    model = DistributedDataParallel(TwoHeads())
    for _ in range(2):
        first, second = model(torch.ones(2, 4))
        first.sum().backward()


def a_root_by_its_number_in_the_group() -> None:
    """The root of a group's broadcast is given by its number in the group.

    `src=` is a rank of the world. Pass `group_src=` for the number in the group.
    """
    rank = start()
    group = dist.new_group([1, 2])
    if rank in (1, 2):
        dist.broadcast(torch.ones(4), src=0, group=group)


def a_time_limit_that_is_too_short() -> None:
    """One rank prepares something for longer than the others may wait.

    Raise `timeout=` of the group, or do long work before the group is made.
    """
    dist.init_process_group("gloo", timeout=timedelta(seconds=1))
    if dist.get_rank() == 0:
        time.sleep(6)  # it unpacks the data, say
    dist.barrier()


def a_file_that_is_not_there_yet() -> None:
    """Ranks load what rank 0 is still saving.

    Put a barrier between them.
    """
    rank = start()
    path = Path(os.environ["RUN_FOLDER"], "best.pt")
    if rank == 0:
        time.sleep(0.5)  # a large model
        torch.save({"weight": torch.ones(4)}, path)
    torch.load(path)


def keys_of_the_wrapper() -> None:
    """A checkpoint of the wrapped model is loaded into a plain one.

    Save `model.module.state_dict()`: it fits both.
    """
    start()
    model = DistributedDataParallel(torch.nn.Linear(4, 1))
    saved = model.state_dict()
    torch.nn.Linear(4, 1).load_state_dict(saved)


# Processes of a rank

def a_loader_s_worker_that_is_stuck() -> None:
    """A worker process of one rank's loader waits forever.

    The message has the line in the worker.
    """
    rank = start()
    for _ in DataLoader(Images(bad=rank == 1), batch_size=2, num_workers=1):
        dist.all_reduce(torch.ones(4))


def a_loader_s_worker_that_is_killed() -> None:
    """The system kills a worker process of a loader.

    Signal 9 mostly means that no memory was left: use fewer workers, or smaller batches.
    """
    start()
    for _ in DataLoader(LargeImages(), batch_size=2, num_workers=1):
        pass


GROUPS: dict[str, list[Program]] = {
    "Starts": [a_port_in_the_program, a_rank_by_hand, a_world_size_by_hand, a_backend_without_its_device,
               a_second_start],
    "Errors of torch": [
        an_output_that_no_loss_uses, a_root_by_its_number_in_the_group, a_time_limit_that_is_too_short,
        a_file_that_is_not_there_yet, keys_of_the_wrapper,
    ],
    "Processes of a rank": [a_loader_s_worker_that_is_stuck, a_loader_s_worker_that_is_killed],
}
HELPERS = (TwoHeads, Images, LargeImages)
