"""Errors of torch's that say more under launch: names, lines, and what the other ranks were doing."""
from __future__ import annotations

import json
import os
import tempfile
import pickle
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from book.launch import RankError, launch

pytestmark = pytest.mark.slow
SHORT = timedelta(seconds=2)


class TwoHeads(nn.Module):
    """Only the first one is used."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(2, 1), nn.Linear(2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.first(x)


def an_unused_head() -> None:
    dist.init_process_group()
    model = DistributedDataParallel(TwoHeads())
    for _ in range(2):
        model(torch.ones(1, 2)).sum().backward()


def an_unused_head_beside_old_gradients() -> None:
    dist.init_process_group()
    inner = TwoHeads()
    model = DistributedDataParallel(inner)
    for parameter in inner.parameters():
        parameter.grad = torch.zeros_like(parameter)
    for _ in range(2):
        model(torch.ones(1, 2)).sum().backward()


def a_rank_of_the_group_for_the_world() -> None:
    dist.init_process_group()
    group = dist.new_group([0, 2])
    if dist.get_rank() != 1:
        dist.all_reduce(torch.ones(1), group=group)
        dist.send(torch.ones(1), dst=1, group=group)


def a_root_outside() -> None:
    dist.init_process_group()
    group = dist.new_group([0, 1])
    if dist.get_rank() < 2:
        dist.broadcast(torch.ones(1), src=2, group=group)


def checkpoint_of_ddp() -> None:
    dist.init_process_group()
    nn.Linear(2, 2).load_state_dict(DistributedDataParallel(nn.Linear(2, 2)).state_dict())


def checkpoint_without_ddp() -> None:
    dist.init_process_group()
    DistributedDataParallel(nn.Linear(2, 2)).load_state_dict(nn.Linear(2, 2).state_dict())


def checkpoint_of_another_wrapper() -> None:
    state = {f"backbone.{name}": value for name, value in nn.Linear(2, 2).state_dict().items()}
    nn.Linear(2, 2).load_state_dict(state)


def to_its_gpu() -> None:
    nn.Linear(2, 2).to(f"cuda:{os.environ['LOCAL_RANK']}")


def to_its_number() -> None:
    nn.Linear(2, 2).to(int(os.environ["LOCAL_RANK"]))


def with_device_ids() -> None:
    dist.init_process_group()
    DistributedDataParallel(nn.Linear(2, 2), device_ids=[dist.get_rank()])


def monitored_without_a_name() -> None:
    dist.init_process_group()
    dist.monitored_barrier()


def out_of_files() -> None:
    import resource
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
    dist.init_process_group()
    [dist.new_group() for _ in range(40)]


def no_checkpoint_here() -> None:
    dcp.load({"x": torch.ones(1)}, checkpoint_id="/nowhere/at/all", no_dist=True)


def late_for_a_barrier() -> None:
    dist.init_process_group(timeout=SHORT)
    if dist.get_rank() == 0:
        time.sleep(6)
    dist.barrier()


def late_for_a_receive() -> None:
    dist.init_process_group(timeout=SHORT)
    x = torch.ones(1)
    if dist.get_rank() == 0:
        time.sleep(6)
        dist.send(x, 2)
    elif dist.get_rank() == 2:
        dist.recv(x, 0)


def late_for_a_request() -> None:
    dist.init_process_group(timeout=SHORT)
    if dist.get_rank() == 1:
        time.sleep(6)
    request = dist.all_reduce(torch.ones(1), async_op=True)
    request.wait()


def late_for_backward() -> None:
    dist.init_process_group(timeout=SHORT)
    model = DistributedDataParallel(nn.Linear(2, 2))
    if dist.get_rank() == 1:
        time.sleep(6)
    model(torch.ones(1, 2)).sum().backward()


def late_for_the_start() -> None:
    if os.environ["RANK"] == "1":
        time.sleep(6)
    dist.init_process_group(timeout=SHORT)


def not_at_a_monitored_barrier() -> None:
    dist.init_process_group("gloo")
    if dist.get_rank() != 1:
        dist.monitored_barrier(timeout=SHORT)


EXPLAINED: list[tuple[Callable[[], None], str]] = [
    (an_unused_head, "gave second.weight, second.bias no gradient"),
    (an_unused_head_beside_old_gradients, "gave second.weight, second.bias no gradient"),
    (a_rank_of_the_group_for_the_world, "this group has ranks 0 and 2, not 1: dst= is a rank of the world. For the "
                                        "group's own number 1, pass dst=2 or group_dst=1"),
    (a_root_outside, "this group has ranks 0 and 1, not 2: src= is a rank of the world."),
    (checkpoint_of_ddp, "the checkpoint's keys begin with 'module.', as those of a model in DDP do"),
    (checkpoint_without_ddp, "call load_state_dict of model.module"),
    (checkpoint_of_another_wrapper, "the checkpoint's keys begin with 'backbone.', and this model's do not"),
    (to_its_gpu, "this run has no GPU"),
    (to_its_number, "this run has no GPU"),
    (with_device_ids, "the model is on the CPU, and device_ids=[0] names a GPU: leave device_ids out"),
    (monitored_without_a_name, 'dist.init_process_group("gloo")'),
    (out_of_files, "open files, and has them all"),
    (no_checkpoint_here, "/nowhere/at/all holds no complete checkpoint"),
    (late_for_a_barrier, "waited 2 s in barrier, and then its time was up. It waited for rank 0, which sleeps at "),
    (late_for_a_receive, "rank 2 waited 2 s in recv from rank 0, and then its time was up. It waited for rank 0, "),
    (late_for_a_request, "waited 2 s for its all_reduce, and then its time was up. It waited for rank 1, which sleeps"),
    (late_for_backward, "waited 2 s in backward, and then its time was up. It waited for rank 1, which sleeps at "),
    (late_for_the_start, "waited 2 s in init_process_group, and then its time was up. It waited for rank 1, which "),
    (not_at_a_monitored_barrier, "It waited for rank 1, which finished: every rank has to make the call"),
]


@pytest.mark.parametrize(("program", "words"), EXPLAINED, ids=[program.__name__ for program, _ in EXPLAINED])
def test_an_error_says_what_is_known(program: Callable[[], None], words: str) -> None:
    if torch.cuda.is_available() and "GPU" in words:
        pytest.skip("it is right here")
    with pytest.raises(RankError) as caught:
        launch(program, 3, hang_s=20, timeout_s=60)
    assert words in str(caught.value)


def loads_too_early(path: str) -> None:
    dist.init_process_group()
    if dist.get_rank() == 0:
        time.sleep(0.5)
        torch.save({}, path)
    torch.load(path)


def reads_too_early(path: str) -> None:
    dist.init_process_group()
    if dist.get_rank() == 0:
        time.sleep(0.5)
        with open(path, "w") as file:
            json.dump({}, file)
    else:
        with open(path) as file:
            json.load(file)


def reads_half(path: str) -> None:
    dist.init_process_group()
    if dist.get_rank() == 0:
        with open(path, "wb") as file:
            file.flush()
            dist.barrier()
            time.sleep(1)
            pickle.dump([1] * 1000, file)
    else:
        dist.barrier()
        with open(path, "rb") as file:
            pickle.load(file)


def renames_too_late(path: str) -> None:
    dist.init_process_group()
    if dist.get_rank() == 0:
        torch.save({}, path + ".new")
        time.sleep(0.5)
        os.replace(path + ".new", path)
    else:
        torch.load(path)


@pytest.mark.parametrize("program", [loads_too_early, reads_too_early, reads_half, renames_too_late])
def test_a_file_that_another_rank_is_writing(program: Callable[[str], None], tmp_path: Path) -> None:
    with pytest.raises(RankError) as caught:
        launch(program, 2, str(tmp_path / "best.pt"))
    assert "rank 0 writes this file at test_launch_explain.py line " in str(caught.value)
    assert "Rank 1 has read it too early: call dist.barrier() on all ranks between the two lines" in str(caught.value)


def finds_nothing(path: str) -> None:
    if os.environ["RANK"] == "0":
        torch.save({}, path + ".other")
    torch.load(path)


def test_a_file_that_nobody_writes_is_just_not_there(tmp_path: Path) -> None:
    with pytest.raises(RankError) as caught:
        launch(finds_nothing, 2, str(tmp_path / "best.pt"))
    assert "FileNotFoundError" in str(caught.value) and "too early" not in str(caught.value)


def works_in_a_folder_that_is_gone() -> None:
    dist.init_process_group()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
    namespace = {"dist": dist}
    exec("def meet():\n dist.barrier()", namespace)
    namespace["meet"]()
    open("data.txt")


def test_an_error_in_a_folder_that_is_gone_is_named() -> None:
    with pytest.raises(RankError, match=r"(?s)rank 0 failed in .*FileNotFoundError.*data\.txt"):
        launch(works_in_a_folder_that_is_gone, 2)


def order() -> tuple[list[str], list[str]]:
    dist.init_process_group()
    names = list({"query", "key", "value", "output", "gate", "up", "down"})
    everyone: list[list[str]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyone, names)
    return everyone[0], everyone[1]


def test_ranks_may_have_hash_seeds_of_their_own() -> None:
    first, second = launch(order, 2)[0]
    assert first == second
    first, second = launch(order, 2, hash_seeds=True)[0]
    assert first != second and sorted(first) == sorted(second)
    assert launch(order, 2, hash_seeds=True)[1] == (first, second)  # the same in every run
