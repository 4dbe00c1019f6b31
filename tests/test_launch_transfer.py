"""What goes to ranks and comes back: arguments that cannot work are refused at once; results on their way."""

import os
import re
import threading
import time
from collections.abc import Callable
from contextlib import closing
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from book.launch import HangError, LaunchError, arguments, launch, rank_device, transfer
from book.launch.transfer import SharedFile


def nothing():
    pass


def scaled(scale):
    return scale


async def awaited():
    pass


def yielded():
    yield


async def yielded_later():
    yield


@pytest.mark.parametrize("args, options, error, words", [
    ((nothing, 0), {}, ValueError, "world_size must be at least 1, not 0"),
    ((nothing, -2), {}, ValueError, "world_size must be at least 1, not -2"),
    ((nothing, 2.0), {}, TypeError, "world_size is a number of processes, not 2.0"),
    ((nothing, True), {}, TypeError, "world_size is a number of processes, not True"),
    ((nothing, 65), {}, ValueError, "pass allow_many_ranks=True to start more than 64"),
    ((4, nothing), {}, TypeError, "launch needs a function to run on the ranks, not 4"),
    ((scaled, 2), {}, TypeError, "scaled(scale) cannot be called with 0 arguments"),
    ((awaited, 2), {}, TypeError, "awaited is an async function, which a call does not run: launch one that calls"),
    ((yielded, 2), {}, TypeError, "yielded yields, so a call does not run it: collect the values in a list and return"),
    ((yielded_later, 2), {}, TypeError, "yielded_later yields, so a call does not run it"),
    ((nothing, 2), {"timeout_s": 0}, ValueError, "timeout_s must be more than 0 seconds, not 0"),
    ((nothing, 2), {"hang_s": -1}, ValueError, "hang_s must be more than 0 seconds, not -1"),
    ((nothing, 2), {"hang_s": float("nan")}, ValueError, "hang_s must be more than 0 seconds, not nan"),
    ((nothing, 2), {"timeout_s": None}, TypeError,
     "timeout_s is a number of seconds, not None: pass a number, such as 10"),
    ((nothing, 2), {"hang_s": "5"}, TypeError, "hang_s is a number of seconds, not '5': pass a number, such as 10"),
    ((nothing, 2), {"on_line": 5}, TypeError, "on_line must be a function of a rank and a line, not 5: write on_line="),
    ((nothing, 2), {"on_line": lambda line: None}, TypeError, "on_line must be a function of a rank and a line"),
    ((nothing, 2), {"env": 5}, TypeError, "env must be a dict of environment variables, not 5: write env={'NAME'"),
    ((nothing, 2), {"env": {5: 5}}, TypeError, "names in env must be text, not 5: write env={'NAME': 'value'}"),
    ((nothing, 2), {"env": {"A=B": "1"}}, ValueError, "'A=B' in env cannot name an environment variable: leave out"),
    ((nothing, 2), {"env": {"A": None}}, TypeError, "env['A'] must be text or a number, not None: leave it out"),
    ((nothing, 2), {"env": {"A": "a\0b"}}, ValueError, "env['A'] must not contain the character '\\0'"),
    ((scaled, 2, threading.Lock()), {}, TypeError, "argument 1 cannot be sent to the ranks"),
])
def test_bad_arguments_are_refused_in_one_sentence(args, options, error, words, capsys):
    with pytest.raises(error, match=re.escape(words)):
        launch(*args, **options)
    assert capsys.readouterr().out == ""


def test_a_working_folder_that_was_deleted_is_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tmp_path.rmdir()
    with pytest.raises(LaunchError, match="the folder that this process works in has been deleted: call os.chdir"):
        launch(nothing, 2)


def test_an_object_that_cannot_be_pickled_is_named():
    guard = threading.Lock()

    def use_lock():
        with guard:
            pass

    with pytest.raises(TypeError, match="'guard', which use_lock uses, cannot be sent to the ranks"):
        launch(use_lock, 2)


def test_rank_device_raises_outside_a_rank():
    with pytest.raises(LaunchError, match="belongs inside a function that launch or torchrun runs"):
        rank_device()


def test_code_travels_with_the_name_of_its_file() -> None:
    """cloudpickle 3.1.3 puts another name in its place, and a message could not quote the line anymore."""
    code = launch.__code__
    args = (0, "<dynamic-code>", "launch")
    assert arguments._code(type(code), args, filename="cell") == (type(code), (0, "cell", "launch"))


class SlowToPickle:
    """A result that takes its time to be pickled, and is its number of seconds afterwards."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def __reduce__(self) -> tuple[Callable[[str], float], tuple[str]]:
        time.sleep(self.seconds)
        return float, (str(self.seconds),)


def slow() -> SlowToPickle:
    return SlowToPickle(4.0)


@pytest.mark.slow
def test_the_time_limit_is_for_the_functions_and_not_for_their_results() -> None:
    assert list(launch(slow, 2, timeout_s=2)) == [4.0, 4.0]


def one_returns_a_result_and_another_waits() -> SlowToPickle | None:
    dist.init_process_group()
    if dist.get_rank() == 0:
        return SlowToPickle(60)
    dist.recv(torch.ones(4), 0)
    return None


@pytest.mark.slow
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


@pytest.mark.slow
def test_large_values_go_to_the_ranks_and_come_back_as_they_are() -> None:
    values = {name: make() for name, make in VALUES.items()}
    run = launch(resized_and_back, 2, values)
    for rank in range(2):
        assert all(same(run[rank][name], value) for name, value in values.items())


@pytest.mark.slow
def test_a_large_result_may_be_changed_and_is_not_shared() -> None:
    run = launch(lambda: (torch.ones(40_000), np.ones(40_000)), 2)
    for value in run[0]:
        value[:] += 1
    assert all(float(value.min()) == float(value.max()) == 2 for value in run[0])
    assert all(float(value.min()) == float(value.max()) == 1 for value in run[1])


@pytest.mark.slow
def test_where_no_file_can_be_written_results_take_the_pipe(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_room(*_: object) -> None:
        raise OSError(28, "No space left on device")

    file = SharedFile()
    monkeypatch.setattr(SharedFile, "write", no_room)
    sent = transfer.packed(torch.arange(50_000), file)
    assert sent.sizes == () and torch.equal(transfer.unpacked(sent, file), torch.arange(50_000))
    file.close()


@pytest.mark.slow
def test_without_files_in_memory_a_temporary_one_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "memfd_create", raising=False)
    with closing(SharedFile()) as file:
        values = [torch.arange(50_000), "words", np.ones(30_000)]
        sent = transfer.packed(values, file)
        assert len(sent.sizes) == 2 and len(sent.head) < transfer.LARGE_BYTES
        assert all(map(same, transfer.unpacked(sent, file), values))


@pytest.mark.slow
def test_launches_with_large_values_keep_no_file_open() -> None:
    before = len(os.listdir("/proc/self/fd"))
    kept = [launch(lambda values: values, 2, torch.ones(40_000)) for _ in range(3)]
    with pytest.raises(TypeError, match="argument 1 cannot be sent"):
        launch(lambda values: values, 2, threading.Lock())
    del kept
    assert len(os.listdir("/proc/self/fd")) <= before + 1  # the fork server's, after the first launch
