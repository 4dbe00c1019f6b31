"""Which of several failures a launch blames, and what it says of why ranks wait for each other."""
import os
import time

import pytest
import torch.distributed as dist

from book.launch import HangError, LaunchError, launch
from book.launch.board import NUM_ALIKE, Call, Group
from book.launch.causes import causes
from book.launch.report import Dropped
from book.launch.standing import Standing, plural


def one_dies_and_another_raises() -> None:
    if os.environ["RANK"] == "1":
        os._exit(3)
    time.sleep(0.1)
    raise ValueError("without its peer")


@pytest.mark.slow
def test_a_death_is_the_cause_of_an_error_that_comes_later():
    with pytest.raises(LaunchError, match="rank 1 ended with exit code 3"):
        launch(one_dies_and_another_raises, 2)


def _call(number: int, name: str = "all_reduce") -> Call:
    return Call(number, (0,) * NUM_ALIKE, name, "", "code.py", number)


@pytest.mark.parametrize("num_ranks", [2, 5, 64])
def test_ranks_that_miss_a_collective_in_the_same_way_share_a_sentence(num_ranks: int) -> None:
    waits = Standing("waits in all_reduce")
    ranks = [waits, *[Standing("finished")] * (num_ranks - 1)]
    last = {0: _call(3), **{rank: _call(2) for rank in range(1, num_ranks)}}
    said, = causes(ranks, {Group("0", tuple(range(num_ranks))): last})
    assert said.startswith("rank 0 waits in all_reduce(); rank") and said.count("returned without it") == 1
    others = {2: "rank 1", 5: "ranks 1, 2, 3, 4", 64: "ranks 1-63"}[num_ranks]
    assert f" {others} returned" in said


def test_nothing_is_blamed_where_all_ranks_are_in_the_same_collective() -> None:
    waits = Standing("waits in all_reduce")
    assert causes([waits] * 3, {Group("0", (0, 1, 2)): dict.fromkeys(range(3), _call(4))}) == []
    assert causes([Standing("computes")] * 3, {}) == []


def test_a_rank_that_computes_is_named_where_the_others_wait_for_it() -> None:
    ranks = [Standing("waits in barrier"), Standing("computes"), Standing("computes")]
    said, = causes(ranks, {Group("0", (0, 1, 2)): {0: _call(1, "barrier")}})
    assert said == "rank 0 waits in barrier(); ranks 1, 2 compute instead (last call in this group: none)"


def one_of_twelve_returns_early() -> None:
    dist.init_process_group()
    if dist.get_rank() != 7:
        dist.barrier()


@pytest.mark.slow
def test_ranks_at_the_same_place_share_a_line_in_a_large_run():
    with pytest.raises(HangError) as caught:
        launch(one_of_twelve_returns_early, 12, hang_s=1)
    _, cause, *lines = str(caught.value).splitlines()
    assert cause.startswith("cause: ranks 0-6, 8, 9, 10, 11 wait in barrier(); ")
    assert cause.endswith("rank 7 returned without it (last call in this group: none)")
    assert [line.partition(" at ")[0] for line in lines] == [
        "  ranks 0-6, 8, 9, 10, 11 wait in barrier", "  rank 7 finished"]


def test_each_rank_that_has_dropped_requests_at_a_line_is_named_once() -> None:
    dropped = [Dropped("isend", peer, "cell line 4: dist.isend(x, peer)") for peer in (1, 2)]
    ranks = [Standing("waits in recv from rank 1", dropped=dropped), Standing("waits in recv from rank 0"),
             Standing("finished", dropped=dropped[:1])]
    said, = causes(ranks, {})
    assert said.startswith("ranks 0, 2 did not keep what isend returned")
    assert said.endswith("Look at cell line 4: dist.isend(x, peer)")


def test_a_dropped_request_whose_message_nobody_waits_for_is_not_the_cause() -> None:
    dropped = [Dropped("isend", 1, "cell line 4: dist.isend(x, 1)")]
    ranks = [Standing("finished", dropped=dropped), Standing("waits in recv from rank 2"), Standing("finished")]
    said, = causes(ranks, {})
    assert said == "rank 1 waits in recv from rank 2, which has returned"


@pytest.mark.parametrize("one, several", [
    ("waits in recv", "wait in recv"), ("is stopped by a signal", "are stopped by a signal"),
    ("does not answer", "do not answer"), ("has returned", "have returned"), ("finished", "finished")])
def test_what_several_ranks_do_is_said_in_the_plural(one, several):
    assert (plural(one, 1), plural(one, 2)) == (one, several)
