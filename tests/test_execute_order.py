"""In which order a rank adds what several others send it in one step: rounding depends on it."""
import pytest
import torch
import torch.distributed as dist

from book.execute import execute
from book.launch import launch
from book.schedule import Schedule

# Chunk 0 of rank 0 takes 1e16 and -1e16 from rank 1, and between the two 1 from rank 2, which 1e16 swallows.
BETWEEN = Schedule("between", 3, 2, [(0, 1, 0, 0, "reduce"), (0, 2, 0, 0, "reduce"), (0, 1, 0, 1, "reduce", 0)],
                   "all_reduce")
DATA = [[0.0, 0.0], [1e16, -1e16], [1.0, 0.0]]


def run() -> list[float]:
    dist.init_process_group()
    data = torch.tensor(DATA[dist.get_rank()], dtype=torch.float64)
    execute(BETWEEN, data)
    return data.tolist()


@pytest.mark.slow
def test_messages_from_several_ranks_are_added_in_schedule_order():
    assert launch(run, 3)[0] == [0.0, 0.0]
