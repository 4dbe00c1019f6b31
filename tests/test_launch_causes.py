"""Which of several failures a launch blames, and what it says of why ranks wait for each other."""
import os
import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from book.launch import HangError, LaunchError, launch
from book.launch.board import Call
from book.launch.causes import Standing, causes


def one_dies_and_another_raises() -> None:
    if os.environ["RANK"] == "1":
        os._exit(3)
    time.sleep(0.1)
    raise ValueError("without its peer")


@pytest.mark.slow
def test_a_death_is_the_cause_of_an_error_that_comes_later():
    with pytest.raises(LaunchError, match="rank 1 ended with exit code 3"):
        launch(one_dies_and_another_raises, 2)


def start() -> int:
    dist.init_process_group()
    return dist.get_rank()


def one_returns_early() -> None:
    if start() == 2:
        return
    dist.broadcast(torch.ones(4), 0)  # rank 0 may be through with it when the others wait
    dist.barrier()


def one_leaves_the_loop_early() -> None:
    rank = start()
    for _ in range(2 if rank == 1 else 3):
        dist.all_reduce(torch.ones(4))


def one_receives_instead() -> None:
    if start() == 1:
        dist.recv(torch.ones(4), 0)
    dist.all_reduce(torch.ones(4))


def all_send_first() -> None:
    rank = start()
    dist.send(torch.ones(4), (rank + 1) % 4)
    dist.recv(torch.ones(4), (rank - 1) % 4)


def all_receive_first() -> None:
    rank = start()
    dist.recv(torch.ones(4), (rank - 1) % 4)
    dist.send(torch.ones(4), (rank + 1) % 4)


def two_tags() -> None:
    rank = start()
    if rank == 0:
        dist.send(torch.ones(4), 1, tag=1)
    if rank == 1:
        dist.recv(torch.ones(4), 0, tag=2)


def two_groups_in_two_orders() -> None:
    rank = start()
    groups = [dist.new_group(range(4)), dist.new_group(range(4))]
    for group in groups if rank == 0 else reversed(groups):
        dist.all_reduce(torch.ones(4), group=group)


def a_group_without_one_of_its_ranks() -> None:
    rank = start()
    pair = dist.new_group([0, 2])
    if rank == 0:
        dist.all_reduce(torch.ones(4), group=pair)


def a_peer_that_has_returned() -> None:
    if start() == 0:
        dist.recv(torch.ones(4), 3)


def a_chain_to_a_rank_that_has_returned() -> None:
    rank = start()
    if rank < 3:
        dist.recv(torch.ones(4), rank + 1)


REDUCES = "all_reduce(float32 [4], SUM)"


@pytest.mark.slow
@pytest.mark.parametrize("program, said", [
    (one_returns_early, "wait in barrier(); rank 2 returned without it (last call in this group: none)"),
    (one_leaves_the_loop_early, f"ranks 0, 2, 3 wait in {REDUCES}; rank 1 returned without it "
                                f"(last call in this group: {REDUCES} at test_launch_causes.py line "),
    (one_receives_instead, f"ranks 0, 2, 3 wait in {REDUCES}; rank 1 waits in recv from rank 0 instead"),
    (all_send_first, "ranks 0, 1, 2, 3 all send first"),
    (all_receive_first, "ranks 0, 1, 2, 3 all receive first"),
    (two_tags, "ranks 0 and 1 send and receive past each other: compare tag="),
    (two_groups_in_two_orders, f"rank 0 waits in {REDUCES} of one group, ranks 1, 2, 3 wait in {REDUCES} of another"),
    (a_group_without_one_of_its_ranks, f"rank 0 waits in {REDUCES}; rank 2 returned without it"),
    (a_peer_that_has_returned, "rank 0 waits in recv from rank 3, which has returned"),
    (a_chain_to_a_rank_that_has_returned, "rank 2 waits in recv from rank 3, which has returned"),
])
def test_the_cause_of_a_hang_is_named(program: Callable[[], None], said: str) -> None:
    with pytest.raises(HangError) as caught:
        launch(program, 4, hang_s=0.5)
    named = [line.removeprefix("cause: ") for line in str(caught.value).splitlines() if line.startswith("cause: ")]
    assert len(named) == 1 and said in named[0]


def _call(number: int, name: str = "all_reduce") -> Call:
    return Call(number, name.encode(), f"{name}()\ncode.py:{number}")


@pytest.mark.parametrize("num_ranks", [2, 5, 64])
def test_ranks_that_miss_a_collective_in_the_same_way_share_a_sentence(num_ranks: int) -> None:
    waits = Standing("waits in all_reduce")
    ranks = [waits, *[Standing("finished")] * (num_ranks - 1)]
    last = {0: _call(3), **{rank: _call(2) for rank in range(1, num_ranks)}}
    said, = causes(ranks, {f"0 {list(range(num_ranks))}": last})
    assert said.startswith("rank 0 waits in all_reduce(); rank") and said.count("returned without it") == 1
    others = ", ".join(map(str, range(1, num_ranks)))
    assert f" {others} returned" in said


def test_nothing_is_blamed_where_all_ranks_are_in_the_same_collective() -> None:
    waits = Standing("waits in all_reduce")
    assert causes([waits] * 3, {"0 [0, 1, 2]": dict.fromkeys(range(3), _call(4))}) == []
    assert causes([Standing("computes")] * 3, {}) == []


def test_a_rank_that_computes_is_named_where_the_others_wait_for_it() -> None:
    ranks = [Standing("waits in barrier"), Standing("computes"), Standing("computes")]
    said, = causes(ranks, {"0 [0, 1, 2]": {0: _call(1, "barrier")}})
    assert said == "rank 0 waits in barrier(); ranks 1, 2 compute instead (last call in this group: none)"
