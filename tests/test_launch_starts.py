"""Starts that can't succeed are refused in the call, with the line that is to go; those that can go on."""
from __future__ import annotations

import os
import socket
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed import distributed_c10d

from book.launch import RankError, kept, launch

pytestmark = pytest.mark.slow


def total() -> float:
    x = torch.ones(1)
    dist.all_reduce(x)
    return x.item()


def own_port() -> None:
    os.environ["MASTER_PORT"] = "12355"
    dist.init_process_group()


def own_port_among_others() -> None:
    os.environ.update({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(29500 + 7)})
    dist.init_process_group("gloo")


def own_address_as_url() -> None:
    dist.init_process_group("gloo", init_method="tcp://localhost:23456", rank=int(os.environ["RANK"]), world_size=2)


def all_rank_0() -> None:
    dist.init_process_group("gloo", rank=0, world_size=2)


def all_rank_0_in_the_environment() -> None:
    os.environ["RANK"] = "0"
    dist.init_process_group()


def too_large_a_world() -> None:
    dist.init_process_group(rank=int(os.environ["RANK"]), world_size=4)


def a_world_from_the_environment() -> None:
    os.environ["WORLD_SIZE"] = "8"
    dist.init_process_group()


def ranks_from_1() -> None:
    dist.init_process_group(rank=int(os.environ["RANK"]) + 1, world_size=2)


def nccl_without_gpus() -> None:
    dist.init_process_group("nccl")


def another_interface() -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "eth77"
    dist.init_process_group("gloo")


def of_each(rank: int, size: int) -> None:
    dist.init_process_group("gloo", rank=rank, world_size=size)


def spawns_ranks() -> None:
    mp.spawn(of_each, (2,), nprocs=2)


def forks_ranks() -> None:
    processes = [mp.Process(target=of_each, args=(rank, 2)) for rank in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    if any(process.exitcode for process in processes):
        raise RuntimeError("a process has failed")


REFUSED: list[tuple[Callable[[], None], str]] = [
    (own_port, ': os.environ["MASTER_PORT"] = "12355". Leave this line out'),
    (own_port_among_others, ": os.environ.update("),
    (own_address_as_url, "ranks under launch meet in its own store. Leave init_method= out"),
    (all_rank_0, "ranks 0 and 1 of this launch both call themselves rank 0 (rank=0)"),
    (all_rank_0_in_the_environment, 'both call themselves rank 0 (RANK=0, set in test_launch_starts.py line '),
    (too_large_a_world, "waits for 4 ranks (world_size=4), and launch has started 2"),
    (a_world_from_the_environment, "WORLD_SIZE=8, set in test_launch_starts.py line "),
    (ranks_from_1, "there is no rank 2 in a world of 2: rank=2, world_size=2"),
    (nccl_without_gpus, "NCCL needs a GPU for each rank, and this run has none"),
    (another_interface, "no network interface eth77"),
    (spawns_ranks, "launch has started the ranks already: call of_each(...) on each rank instead of mp.spawn"),
]


@pytest.mark.parametrize(("program", "words"), REFUSED, ids=[program.__name__ for program, _ in REFUSED])
def test_a_start_that_cannot_succeed_is_refused(program: Callable[[], None], words: str) -> None:
    with pytest.raises(RankError) as caught:
        launch(program, 2, hang_s=20, timeout_s=30)
    assert words in str(caught.value)


def with_own_store() -> float:
    port = int(os.environ["LOCKSTEP_TEST_PORT"])
    rank = int(os.environ["RANK"])
    store = dist.TCPStore("127.0.0.1", port, 2, rank == 0, wait_for_workers=False)
    dist.init_process_group(store=store, rank=rank, world_size=2)
    return total()


def hosts_the_store_of_a_url() -> float:
    port, rank = int(os.environ["LOCKSTEP_TEST_PORT"]), int(os.environ["RANK"])
    store = dist.TCPStore("127.0.0.1", port, 2, True, wait_for_workers=False) if rank == 0 else None
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    total()
    dist.barrier()
    del store
    return 2.0


def hosts_as_without_an_agent() -> float:
    os.environ["MASTER_PORT"] = os.environ["LOCKSTEP_TEST_PORT"]
    del os.environ["TORCHELASTIC_USE_AGENT_STORE"]
    dist.init_process_group("gloo")
    return total()


def in_the_other_order() -> float:
    dist.init_process_group("gloo", rank=1 - int(os.environ["RANK"]), world_size=2)
    return total()


def with_the_same_numbers() -> float:
    os.environ["MASTER_ADDR"] = "localhost"
    dist.init_process_group("gloo", "env://", rank=int(os.environ["RANK"]), world_size=int(os.environ["WORLD_SIZE"]))
    return total()


def twice_by_file() -> float:
    for _ in range(2):
        found = by_file()
        os.environ["LOCKSTEP_TEST_FILE"] += "2"
    return found


def alone_afterwards() -> float:
    dist.init_process_group()
    found = total()
    dist.destroy_process_group()
    dist.init_process_group("gloo", rank=0, world_size=1)
    return found


def of_one_each() -> float:
    dist.init_process_group("gloo", rank=0, world_size=1)
    return 1 + total()


def by_file() -> float:
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo", "file://" + os.environ["LOCKSTEP_TEST_FILE"], rank=rank, world_size=2)
    found = total()
    dist.destroy_process_group()
    return found


def fake() -> float:
    import torch.testing._internal.distributed.fake_pg  # noqa: F401
    dist.init_process_group("fake", rank=int(os.environ["RANK"]), world_size=64)
    return 2.0


def child_of_a_world_of_four(number: int, path: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=number, world_size=4)
    x = torch.ones(2)
    dist.all_reduce(x)
    dist.destroy_process_group()
    os._exit(int(x[0].item() != 4))


def forks_a_world_of_its_own() -> float:
    path = os.path.join(tempfile.mkdtemp(), "meeting")
    children = [mp.get_context("fork").Process(target=child_of_a_world_of_four, args=(number, path))
                for number in range(4)]
    for child in children:
        child.start()
    for child in children:
        child.join()
    assert [child.exitcode for child in children] == [0] * 4
    dist.init_process_group()
    return total()


RIGHT = [forks_a_world_of_its_own, with_own_store, hosts_the_store_of_a_url, hosts_as_without_an_agent,
         in_the_other_order, with_the_same_numbers, twice_by_file, alone_afterwards, of_one_each, by_file, fake]


@pytest.mark.parametrize("program", RIGHT, ids=[program.__name__ for program in RIGHT])
def test_a_start_that_can_succeed_does(program: Callable[[], float], tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    (tmp_path / "meeting").touch()  # as tempfile.mkstemp does
    env = {"LOCKSTEP_TEST_PORT": str(port), "LOCKSTEP_TEST_FILE": str(tmp_path / "meeting")}
    assert list(launch(program, 2, hang_s=20, timeout_s=30, env=env)) == [2.0, 2.0]


def starts_again() -> float:
    dist.init_process_group()
    dist.destroy_process_group()
    dist.init_process_group()
    return total()


def joins_slowly() -> float:
    """Rank 0 waits for 3 s inside init_process_group, as for a name server that does not answer."""
    if os.environ["RANK"] == "0":
        meet, (near, far) = distributed_c10d.rendezvous, socket.socketpair()

        def rendezvous(*args: Any, **options: Any) -> Any:
            near.settimeout(3)
            with suppress(TimeoutError):
                near.recv(1)
            far.close()
            return meet(*args, **options)

        distributed_c10d.rendezvous = rendezvous
    dist.init_process_group()
    return total()


def test_a_name_server_that_does_not_answer_is_no_hang() -> None:
    assert list(launch(joins_slowly, 2, hang_s=1)) == [2.0, 2.0]


def num_kept(by: str) -> int:
    """How many groups are kept once the program has destroyed its own."""
    dist.init_process_group("gloo", by, rank=int(os.environ["RANK"]), world_size=2)
    total()
    dist.destroy_process_group()
    return len(kept._destroyed)


def test_a_group_that_met_in_a_file_is_not_kept_and_lets_go_of_the_file(tmp_path: Path) -> None:
    assert list(launch(num_kept, 2, f"file://{tmp_path / 'meeting'}")) == [0, 0]
    assert list(launch(num_kept, 2, "env://")) == [1, 1]


def test_a_second_start_in_the_store_of_the_first_is_refused() -> None:
    with pytest.raises(RankError, match=r"has started before, in test_launch_starts.py line \d+: dist.init_proc"):
        launch(starts_again, 2)


def at_another_server() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:  # as that of a notebook or a website
        os.environ["MASTER_PORT"] = str(server.getsockname()[1])
        dist.init_process_group("gloo")


def test_a_port_at_which_another_program_listens_is_refused() -> None:
    with pytest.raises(RankError, match="another program listens at port .*, and answers no rank"):
        launch(at_another_server, 2)


def test_worlds_of_one_are_told() -> None:
    found = launch(of_one_each, 2).findings
    assert len(found) == 1 and found[0].startswith("each of the 2 ranks has started a world of one, at test_launch_")
    assert launch(of_one_each, 2, audit=False).findings == launch(of_one_each, 1).findings == []
    assert launch(with_the_same_numbers, 2).findings == []


def half_of_them() -> float:
    rank = int(os.environ["RANK"])
    if rank < 2:
        return 2.0
    path = "file://" + os.environ["LOCKSTEP_TEST_FILE"]
    dist.init_process_group("gloo", path, rank=rank - 2, world_size=2)
    return total()


def test_some_ranks_may_meet_by_themselves(tmp_path: Path) -> None:
    assert list(launch(half_of_them, 4, env={"LOCKSTEP_TEST_FILE": str(tmp_path / "meeting")})) == [2.0] * 4


def dies(path: str, exits: bool) -> float:
    dist.init_process_group("gloo", "file://" + path, rank=int(os.environ["RANK"]), world_size=2)
    total()
    if exits:
        os._exit(1)
    return 2.0


def test_a_file_of_an_earlier_run_is_refused(tmp_path: Path) -> None:
    path = str(tmp_path / "meeting")
    with pytest.raises(RankError):
        launch(dies, 2, path, True)
    with pytest.raises(RankError, match="is left over from an earlier run"):
        launch(dies, 2, path, False)
    os.remove(path)
    assert list(launch(dies, 2, path, False)) == [2.0, 2.0]


def test_processes_of_a_rank_are_no_ranks() -> None:
    with pytest.raises(RankError) as caught:
        launch(forks_ranks, 2, hang_s=20, timeout_s=30)
    assert "call themselves rank" in "".join(caught.value.stderr)
