"""Results on their way back from ranks whose functions have returned."""
import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from book.launch import HangError, launch

pytestmark = pytest.mark.slow


class SlowToPickle:
    """A result that takes its time to be pickled, and is its number of seconds afterwards."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def __reduce__(self) -> tuple[Callable[[str], float], tuple[str]]:
        time.sleep(self.seconds)
        return float, (str(self.seconds),)


def slow() -> SlowToPickle:
    return SlowToPickle(4.0)


def test_the_time_limit_is_for_the_functions_and_not_for_their_results() -> None:
    assert list(launch(slow, 2, timeout_s=2)) == [4.0, 4.0]


def one_returns_a_result_and_another_waits() -> SlowToPickle | None:
    dist.init_process_group()
    if dist.get_rank() == 0:
        return SlowToPickle(60)
    dist.recv(torch.ones(4), 0)
    return None


def test_a_rank_that_has_returned_is_the_cause_while_its_result_is_on_its_way() -> None:
    with pytest.raises(HangError) as caught:
        launch(one_returns_a_result_and_another_waits, 2, timeout_s=6)
    head, cause, first, _ = str(caught.value).splitlines()
    assert head == "not done after 6 s"
    assert cause == "cause: rank 1 waits in recv from rank 0, which has returned"
    assert first == "  rank 0 has returned, and its result is on its way"
