"""Ranks that wait inside their own process, for a lock, a thread, a queue or a store: what a launch says of them."""
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue

import pytest
import torch.distributed as dist
from torch.utils.data import DataLoader, IterableDataset

from book.launch import HangError, launch

pytestmark = pytest.mark.slow


def start() -> bool:
    """Join the group; whether this is rank 0."""
    dist.init_process_group()
    return dist.get_rank() == 0


def acquires_a_lock_twice() -> None:
    lock = threading.Lock()
    if start():
        lock.acquire()
        lock.acquire()
    dist.barrier()


def gets_from_a_simple_queue_that_stays_empty() -> None:
    queue = SimpleQueue()
    if start():
        queue.get()
    dist.barrier()


HANGS = [
    (acquires_a_lock_twice, "lock.acquire, and has no other thread that could release it", "lock.acquire()"),
    (gets_from_a_simple_queue_that_stays_empty, "queue.get, and has no other thread that could put an item in",
     "queue.get()"),
]


@pytest.mark.parametrize(("program", "cause", "line"), HANGS, ids=[program.__name__ for program, *_ in HANGS])
def test_a_call_into_c_that_waits_for_another_thread_is_a_hang(program: Callable[[], None], cause: str,
                                                               line: str) -> None:
    with pytest.raises(HangError) as caught:
        launch(program, 2, hang_s=1, timeout_s=60)
    head, first, *lines = str(caught.value).splitlines()
    assert head == "the ranks wait for one another: nothing has moved for 1 s"
    assert first == f"cause: rank 0 waits in {cause}"
    assert re.fullmatch(rf"  rank 0 waits .* at test_launch_blocked.py line \d+: {re.escape(line)}", lines[0])


def waits_for_an_event_for_a_while() -> None:
    if start():
        threading.Event().wait(60)
    dist.barrier()


def joins_a_thread_that_computes() -> None:
    if start():
        thread = threading.Thread(target=compute, daemon=True, name="worker")
        thread.start()
        thread.join()
    dist.barrier()


def compute() -> None:
    while True:
        pass


def waits_for_another_program() -> None:
    if start():
        subprocess.run([sys.executable, "-c", "import time; time.sleep(60)"])
    dist.barrier()


class Never(IterableDataset):
    """A data set whose first sample does not come."""

    def __iter__(self) -> Iterator[int]:
        time.sleep(60)
        yield 0


def loads_data_that_does_not_come() -> None:
    if start():
        for _ in DataLoader(Never(), num_workers=1):
            pass
    dist.barrier()


LATE = [
    (waits_for_an_event_for_a_while, "rank 0 waits in Event.wait() at"),
    (joins_a_thread_that_computes, "rank 0 waits in Thread.join() at"),
    (waits_for_another_program, "rank 0 waits in run() at"),
    (loads_data_that_does_not_come, "rank 0 waits in DataLoader at"),
]


@pytest.mark.parametrize(("program", "words"), LATE, ids=[program.__name__ for program, _ in LATE])
def test_a_wait_that_may_end_by_itself_is_no_hang(program: Callable[[], None], words: str) -> None:
    with pytest.raises(HangError) as caught:
        launch(program, 2, hang_s=0.5, timeout_s=3)
    assert str(caught.value).startswith("not done after 3 s")
    assert words in str(caught.value)


def computes_in_a_thread() -> int:
    start()
    with ThreadPoolExecutor(1) as pool:
        num = pool.submit(count_for_a_while).result()
    dist.barrier()
    return num


def count_for_a_while() -> int:
    end_s = time.monotonic() + 2
    while time.monotonic() < end_s:
        pass
    return 1


def waits_for_a_timer() -> bool:
    rung = threading.Event()
    if start():
        threading.Timer(3, rung.set).start()
        rung.wait()
    dist.barrier()
    return rung.is_set()


def test_a_rank_that_waits_for_a_timer_does_not_hang() -> None:
    assert list(launch(waits_for_a_timer, 2, hang_s=0.5)) == [True, False]


def test_a_rank_whose_thread_computes_does_not_hang() -> None:
    assert list(launch(computes_in_a_thread, 2, hang_s=0.5)) == [1, 1]
