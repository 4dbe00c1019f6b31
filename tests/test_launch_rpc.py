"""Launching programs that call one another over RPC: how errors and hangs appear, and that nothing is left behind."""
import os
import re
import sys
import threading

import pytest
from torch.distributed import rpc

from book.launch import HangError, RankError, launch
from book.launch.rpc import remote_error
from tests.test_launch_processes import wait_until_gone

pytestmark = pytest.mark.slow

STILL = "the ranks wait for one another: nothing has moved for 0.5 s"


def serve(world_size=2, num_threads=16):
    """Join the other workers; returns the rank."""
    rank = int(os.environ["RANK"])
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=world_size,
                 rpc_backend_options=rpc.TensorPipeRpcBackendOptions(num_worker_threads=num_threads))
    return rank


def refuse(x):
    raise ValueError(f"{x} is refused\nand this is why")


def fetch(rref):
    return rref.to_here()


BOTH_THREADS = threading.Barrier(2)


def fetch_in_both_threads(rref):
    """Wait until the other thread has begun too: else one call may be answered before the second takes a thread."""
    BOTH_THREADS.wait()
    return rref.to_here()


def never():
    threading.Event().wait()


def hang(fn, world_size=2):
    with pytest.raises(HangError) as caught:
        launch(fn, world_size, hang_s=0.5)
    head, *lines = re.sub(r"line \d+", "line N", str(caught.value)).splitlines()
    assert head == STILL
    return [line.removeprefix("  ") for line in lines]


def crunch():
    while True:
        pass


def test_a_call_that_computes_is_reported_at_the_time_limit():
    def ask():
        if serve() == 0:
            rpc.rpc_sync("worker1", crunch)
        rpc.shutdown()

    with pytest.raises(HangError) as caught:
        launch(ask, 2, timeout_s=1)
    *_, waits, serves = re.sub(r"line \d+: (while True:|pass)", "line N", str(caught.value)).splitlines()
    assert re.fullmatch(r"  rank 1 waits in shutdown at test_launch_rpc.py line \d+: rpc.shutdown\(\)", waits)
    assert serves == "    for a peer it is at test_launch_rpc.py line N"


def test_a_call_without_a_reply_is_reported():
    def ask():
        if serve() == 0:
            rpc.rpc_sync("worker1", never)
        rpc.shutdown()

    assert hang(ask) == [
        "cause: rank 0 waits in rpc_sync to worker1, where the call waits in Event.wait() at test_launch_rpc.py line N"
        ": threading.Event().wait()",
        'rank 0 waits in rpc_sync to worker1 at test_launch_rpc.py line N: rpc.rpc_sync("worker1", never)',
        "rank 1 waits in shutdown at test_launch_rpc.py line N: rpc.shutdown()",
        "  for a peer it waits in Event.wait() at test_launch_rpc.py line N: threading.Event().wait()"]


class Keeper:
    def keep(self):
        never()


def test_a_method_called_through_a_reference():
    def ask():
        if serve() == 0:
            rpc.remote("worker1", Keeper).rpc_sync().keep()
        rpc.shutdown()

    assert hang(ask)[1] == ("rank 0 waits in rpc_sync to worker1 at test_launch_rpc.py line N: "
                            'rpc.remote("worker1", Keeper).rpc_sync().keep()')


def test_a_method_called_with_no_thread_left_to_name_its_class():
    def ask():
        if serve(num_threads=2) == 0:
            keeper = rpc.remote("worker1", Keeper)
            keeper.to_here()
            calls = [rpc.rpc_async("worker1", never) for _ in range(2)]
            keeper.rpc_sync().keep()
            rpc.wait_all(calls)
        rpc.shutdown()

    place = "test_launch_rpc.py line N"
    assert hang(ask)[1] == f"rank 0 waits in rpc_sync to worker1 at {place}: keeper.rpc_sync().keep()"


def test_calls_that_leave_no_thread_for_the_answer():
    def ask():
        if serve(num_threads=2) == 0:
            x = rpc.RRef(1)
            calls = [rpc.rpc_async("worker1", fetch_in_both_threads, args=(x,)) for _ in range(2)]
            calls[0].wait()
        rpc.shutdown()

    assert hang(ask) == [
        "cause: rank 1 serves calls in 2 threads, and each waits in to_here, so a further call finds none: give "
        "init_rpc more num_worker_threads, or let no call wait for another. Look at test_launch_rpc.py line N: "
        "return rref.to_here()",
        "rank 0 waits for a request at test_launch_rpc.py line N: calls[0].wait()",
        "rank 1 waits in shutdown at test_launch_rpc.py line N: rpc.shutdown()",
        "  for its peers, in 2 threads, it waits in to_here at test_launch_rpc.py line N: return rref.to_here()"]


def test_a_forgotten_shutdown():
    def ask():
        if serve() == 1:
            rpc.shutdown()

    assert hang(ask) == ["cause: rank 1 waits in shutdown; rank 0 has returned",
                         "rank 0 finished",
                         "rank 1 waits in shutdown at test_launch_rpc.py line N: rpc.shutdown()"]


@pytest.mark.parametrize("how", [
    "rpc_sync", pytest.param("rref", marks=pytest.mark.slow), "through another"])
def test_a_remote_error_is_reported_with_its_own_line(how):
    def ask():
        if serve(3) == 0:
            if how == "rpc_sync":
                rpc.rpc_sync("worker2", refuse, args=(7,))
            x = rpc.remote("worker2", refuse, args=(7,))
            rpc.rpc_sync("worker1", fetch, args=(x,)) if how == "through another" else x.to_here()
        rpc.shutdown()

    with pytest.raises(RankError) as caught:
        launch(ask, 3)
    head, *rest = re.sub(r"line \d+", "line N", str(caught.value)).splitlines()
    assert head.startswith("rank 0 failed in test_launch_rpc.py line N: ")
    assert rest == ["ValueError: 7 is refused", "and this is why", "raised by worker2 in test_launch_rpc.py line N: "
                    'raise ValueError(f"{x} is refused\\nand this is why")']
    assert caught.value.rank == 0


def test_the_text_of_an_ordinary_error_is_left_alone():
    assert remote_error("On WorkerInfo(id=1, name=worker1):\ntold by hand") is None
    assert remote_error("7 is refused") is None


@pytest.mark.parametrize("end", [pytest.param("raises", marks=pytest.mark.slow), "dies"])
def test_a_worker_that_fails_by_itself_is_the_cause(end):
    def one_fails():
        rank = serve()
        if rank == 0:
            rpc.rpc_sync("worker1", never)
        elif end == "dies":
            os._exit(7)
        raise KeyError("own")

    with pytest.raises(RankError) as caught:
        launch(one_fails, 2)
    assert caught.value.rank == 1


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_no_worker_outlives_a_hang():
    pids = []

    def ask():
        print(os.getpid())
        if serve() == 0:
            rpc.rpc_sync("worker1", never)
        rpc.shutdown()

    with pytest.raises(HangError):
        launch(ask, 2, hang_s=0.5, on_line=lambda rank, line: pids.append(int(line)))
    assert len(pids) == 2
    wait_until_gone(pids)
