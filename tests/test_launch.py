"""Launching on real processes: results, failures, hangs, and nothing left behind."""
import pytest
import torch
import torch.distributed as dist

from book.launch import HangError, RankError, launch


def add_up(scale):
    dist.init_process_group()
    x = torch.full((3,), float(dist.get_rank() * scale))
    dist.all_reduce(x)
    return x


def divide_on_rank_2():
    dist.init_process_group()
    if dist.get_rank() == 2:
        1 / 0
    dist.barrier()


def everybody_receives_first():
    dist.init_process_group()
    rank, world_size = dist.get_rank(), dist.get_world_size()
    dist.recv(torch.empty(2), (rank - 1) % world_size)


def test_results_come_by_rank():
    run = launch(add_up, 4, 2)
    assert len(run) == 4 and run.backend == "gloo"
    assert all(torch.equal(result, torch.full((3,), 12.0)) for result in run)


def test_first_true_error_names_the_line():
    with pytest.raises(RankError, match=r"rank 2 failed in test_launch.py line \d+: 1 / 0\nZeroDivisionError"):
        launch(divide_on_rank_2, 4)


def test_hang_names_line_and_operation_of_each_rank():
    with pytest.raises(HangError) as caught:
        launch(everybody_receives_first, 3, hang_s=1)
    assert "rank 0 waits in recv from rank 2 at test_launch.py line" in str(caught.value)
