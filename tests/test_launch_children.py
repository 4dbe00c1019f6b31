"""Processes that a rank starts, such as a DataLoader's workers: they run, end with it, and say where they are."""
from __future__ import annotations

import functools
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.utils.data import DataLoader, Dataset, IterableDataset

from book.launch import HangError, RankError, launch

pytestmark = pytest.mark.slow

CELL = """
import torch, torch.distributed as dist, torch.multiprocessing as mp
from torch.utils.data import DataLoader, Dataset, IterableDataset
from book.launch import launch
SCALE = 2

class Squares(Dataset):
    def __len__(self):
        return 8
    def __getitem__(self, index):
        return torch.tensor([float(index * index)])

class Count(IterableDataset):
    def __iter__(self):
        return iter(torch.arange(6.0).unbind())

def collate(batch):
    return SCALE * torch.stack(batch)

def double(x):
    return SCALE * x

def train(num_workers, persistent):
    dist.init_process_group()
    found = []
    for data in (Squares(), Count()):
        loader = DataLoader(data, 2, num_workers=num_workers, persistent_workers=persistent, collate_fn=collate)
        found += [float(sum(batch.sum() for batch in loader)) for epoch in range(2)]
    with mp.Pool(2) as pool:
        found += pool.map(double, range(2))
    queue = mp.Queue()
    process = mp.Process(target=lambda: queue.put(SCALE))
    process.start()
    found.append(queue.get())
    process.join()
    return found

if __name__ == "__main__":
    for num_workers in (1, 2):
        print([launch(train, 2, num_workers, persistent, audit=False)[1] for persistent in (False, True)])
"""
# Two workers read what is counted twice.
SAID = "\n".join(str([[280.0, 280.0, float(each), float(each), 0, 2, 2]] * 2) for each in (30, 60))


def test_a_script_s_classes_reach_the_workers_of_its_ranks(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(CELL)
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    run = subprocess.run([sys.executable, str(tmp_path / "train.py")], capture_output=True, text=True, timeout=300,
                         env=environment, check=True)
    assert run.stdout.replace("2 ranks on gloo (CPU): no GPU here\n", "").strip() == SAID
    assert run.stderr == ""  # as of leaked semaphores


def test_a_notebook_s_classes_reach_the_workers_of_its_ranks(tmp_path: Path) -> None:
    import nbformat
    from nbclient import NotebookClient

    from tests.kernels import FOR_NBCLIENT
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(CELL)])
    notebook.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3"}
    NotebookClient(notebook, timeout=300, kernel_manager_class=FOR_NBCLIENT,
                   resources={"metadata": {"path": tmp_path}}).execute()
    text = "".join(output.get("text", "") for output in notebook.cells[0].outputs)
    assert text.replace("2 ranks on gloo (CPU): no GPU here\n", "").strip() == SAID


class Stumbles(Dataset[torch.Tensor]):
    """On rank 1, item 5 does something else first."""

    def __init__(self, does: Callable[[], object]) -> None:
        self.does = does

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 5 and dist.get_rank() == 1:
            self.does()
        return torch.tensor([float(index)])


class Pours(IterableDataset[torch.Tensor]):
    """A stream that, on rank 1, waits for what nobody puts in."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        yield torch.zeros(1)
        if dist.get_rank() == 1:
            queue.Queue[int]().get()
        yield torch.zeros(1)


def lock_twice() -> None:
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


def wait_for_event() -> None:
    threading.Event().wait()


def load(does: Callable[[], object]) -> int:
    dist.init_process_group()
    for _ in DataLoader(Stumbles(does), batch_size=2, num_workers=2):
        dist.barrier()
    return 0


def pour() -> None:
    dist.init_process_group()
    for _ in DataLoader(Pours(), num_workers=1):
        dist.barrier()


def map_in_a_pool() -> None:
    dist.init_process_group()
    if dist.get_rank() == 1:
        with mp.Pool(1) as pool:
            pool.map(lock_twice_for, range(2))
    dist.barrier()


def lock_twice_for(_: int) -> None:
    lock_twice()


def through_lock() -> None:
    load(lock_twice)


def lock_in_with() -> None:
    lock = threading.Lock()
    with lock:
        with lock:
            pass


def through_with() -> None:
    load(lock_in_with)


def through_event() -> None:
    load(wait_for_event)


STUCK = [
    (through_lock, "cause: rank 1 waits in DataLoader, and its worker process 0 waits in lock.acquire() at "),
    (through_with, "cause: rank 1 waits in DataLoader, and its worker process 0 waits for a lock, which nobody there "
     "releases if a thread of the rank held it at the fork, at test_launch_children.py line "),
    (through_event, "cause: rank 1 waits in DataLoader, and its worker process 0 waits in wait() at "),
    (pour, "cause: rank 1 waits in DataLoader, and its worker process 0 waits in get() at "),
    (map_in_a_pool, "cause: rank 1 waits in Pool.map(), and its process "),
]


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(("program", "words"), STUCK, ids=[program.__name__ for program, _ in STUCK])
def test_a_process_that_waits_for_ever_is_a_hang(program: Callable[[], None], words: str) -> None:
    with pytest.raises(HangError) as caught:
        launch(program, 2, hang_s=2, timeout_s=50)
    assert not caught.value.late and words in str(caught.value)


def sleep_long() -> None:
    time.sleep(60)


def sleep_in_a_thread() -> None:
    thread = threading.Thread(target=time.sleep, args=(60,))
    thread.start()
    thread.join()


def read_a_pipe() -> None:
    os.read(os.pipe()[0], 1)


def compute() -> None:
    while True:
        pass


MOVING = [(sleep_long, "sleeps"), (sleep_in_a_thread, "waits in join()"), (compute, "computes"),
          (read_a_pipe, "does not use any CPU time")]


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(("does", "words"), MOVING, ids=[does.__name__ for does, _ in MOVING])
def test_a_process_that_may_go_on_is_no_hang(does: Callable[[], None], words: str) -> None:
    with pytest.raises(HangError) as caught:
        launch(load, 2, does, hang_s=1, timeout_s=6)
    assert caught.value.late and f"its worker process 0 {words} at test_launch_children.py" in str(caught.value)


def read_slowly() -> None:
    time.sleep(3)


def test_a_slow_worker_is_waited_for() -> None:
    assert list(launch(load, 2, read_slowly, hang_s=1)) == [0, 0]


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def crash() -> None:
    import ctypes
    ctypes.string_at(0)


def leave() -> None:
    os._exit(3)


def look_up() -> None:
    {}["label"]


LOST = [
    (kill, "worker process 0 of its DataLoader was killed by SIGKILL: the machine may have run out of memory"),
    (crash, "worker process 0 of its DataLoader was killed by SIGSEGV at test_launch_children.py line "),
    (leave, "worker process 0 of its DataLoader ended with exit code 3"),
    (look_up, "worker process 0 of its DataLoader raised it at test_launch_children.py line "),
]


@pytest.mark.parametrize(("does", "words"), LOST, ids=[does.__name__ for does, _ in LOST])
def test_a_lost_worker_is_named(does: Callable[[], None], words: str) -> None:
    with pytest.raises(RankError) as caught:
        launch(load, 2, does)
    message = str(caught.value)
    assert message.startswith("rank 1 failed in test_launch_children.py line ") and words in message
    assert "Traceback" not in message and (does is not look_up or "KeyError: 'label'" in message)


def persist() -> list[int | None]:
    loader = DataLoader(range(8), num_workers=2, persistent_workers=True)  # type: ignore[arg-type, var-annotated]
    next(iter(loader))
    return [worker.pid for worker in loader._iterator._workers]  # type: ignore[union-attr]


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_workers_end_with_their_rank() -> None:
    pids = [pid for found in launch(persist, 2) for pid in found]
    end_s = time.monotonic() + 5
    while any(Path(f"/proc/{pid}").exists() for pid in pids) and time.monotonic() < end_s:
        time.sleep(0.05)
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]


@dataclass(frozen=True)
class Unreadable(Exception):
    """Takes no attributes, as frozen errors do."""
    index: int


class Speechless(Exception):
    """Has no text."""

    def __str__(self) -> str:
        raise KeyError("no text")


def stumble(error: Callable[..., Exception], *args: object) -> None:
    raise error(*args)


@pytest.mark.slow
@pytest.mark.parametrize("error, words", [
    ((Unreadable, 5), "Unreadable: Caught Unreadable in DataLoader worker process"),
    ((Speechless,), "Speechless: it has no text: its __str__ raised KeyError")], ids=["frozen", "speechless"])
def test_an_unusual_error_of_a_worker_reaches_the_reader(error: tuple[Any, ...], words: str) -> None:
    with pytest.raises(RankError) as caught:
        launch(load, 2, functools.partial(stumble, *error))
    assert words in str(caught.value)
