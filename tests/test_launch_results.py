"""Results on their way back from ranks whose functions have returned."""
import os
import threading
import time
from collections.abc import Callable
from contextlib import closing
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from book.launch import HangError, launch, transfer
from book.launch.transfer import SharedFile

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
    assert cause == "possible cause: rank 1 waits in recv from rank 0, which has returned"
    assert first == "  rank 0 has returned, and its result is on its way"


VALUES = {
    "large": lambda: torch.arange(50_000.0),
    "small": lambda: torch.arange(3),
    "none": lambda: torch.zeros(0),
    "bfloat16": lambda: torch.arange(40_000).to(torch.bfloat16),
    "bool": lambda: torch.arange(70_001) % 3 == 0,
    "complex": lambda: torch.arange(10_000) * 1j,
    "part": lambda: torch.arange(60_000.0).view(2, 30_000)[:, 10:20_000].T,
    "parameter": lambda: torch.nn.Parameter(torch.ones(200, 200)),
    "frozen": lambda: torch.nn.Parameter(torch.ones(200, 200), requires_grad=False),
    "array": lambda: np.arange(70_003, dtype=np.uint8),
    "bytes": lambda: bytes(range(256)) * 400,
    "last": lambda: torch.arange(65_537).to(torch.int8),
}


def resized_and_back(values: dict[str, Any]) -> dict[str, Any]:
    """What arrived; a rank may resize its arguments."""
    values["large"].resize_(100_000).resize_(50_000)
    return values


def same(one: object, other: object) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return (type(one), one.dtype, one.stride(), one.requires_grad) == (
            type(other), other.dtype, other.stride(), other.requires_grad) and torch.equal(one, other)
    return type(one) is type(other) and np.array_equal(one, other)


def test_large_values_go_to_the_ranks_and_come_back_as_they_are() -> None:
    values = {name: make() for name, make in VALUES.items()}
    run = launch(resized_and_back, 2, values)
    for rank in range(2):
        assert all(same(run[rank][name], value) for name, value in values.items())


def test_a_large_result_may_be_changed_and_is_not_shared() -> None:
    run = launch(lambda: (torch.ones(40_000), np.ones(40_000)), 2)
    for value in run[0]:
        value[:] += 1
    assert all(float(value.min()) == float(value.max()) == 2 for value in run[0])
    assert all(float(value.min()) == float(value.max()) == 1 for value in run[1])


def test_where_no_file_can_be_written_results_take_the_pipe(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_room(*_: object) -> None:
        raise OSError(28, "No space left on device")

    file = SharedFile()
    monkeypatch.setattr(SharedFile, "write", no_room)
    sent = transfer.packed(torch.arange(50_000), file)
    assert sent.sizes == () and torch.equal(transfer.unpacked(sent, file), torch.arange(50_000))
    file.close()


def test_without_files_in_memory_a_temporary_one_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "memfd_create", raising=False)
    with closing(SharedFile()) as file:
        values = [torch.arange(50_000), "words", np.ones(30_000)]
        sent = transfer.packed(values, file)
        assert len(sent.sizes) == 2 and len(sent.head) < transfer.LARGE_BYTES
        assert all(map(same, transfer.unpacked(sent, file), values))


def test_launches_with_large_values_keep_no_file_open() -> None:
    before = len(os.listdir("/proc/self/fd"))
    kept = [launch(lambda values: values, 2, torch.ones(40_000)) for _ in range(3)]
    with pytest.raises(TypeError, match="argument 1 cannot be sent"):
        launch(lambda values: values, 2, threading.Lock())
    del kept
    assert len(os.listdir("/proc/self/fd")) <= before + 1  # the fork server's, after the first launch
