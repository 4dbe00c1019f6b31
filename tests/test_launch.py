"""Launching on real processes: what comes back, how failures and hangs are shown, and that nothing is left behind."""
import ctypes
import gc
import io
import multiprocessing
import functools
import os
import re
import signal
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from book.launch import HangError, LaunchError, RankError, launch
from book.launch.output import MAX_LINE_BYTES, StreamLines
from book.launch.ranks import Ranks
from tests.by_value import sent_by_value

sent_by_value(__name__)

pytestmark = pytest.mark.slow


def start():
    """Join the process group; returns (rank, world_size)."""
    dist.init_process_group()
    return dist.get_rank(), dist.get_world_size()


def nothing():
    pass


# What comes back

def add_up(scale):
    rank, _ = start()
    x = torch.full((3,), float(rank * scale))
    dist.all_reduce(x)
    return x


def test_results_are_ordered_by_rank():
    run = launch(add_up, 4, 2)
    assert len(run) == 4 and run.backend in ("gloo", "nccl")
    assert all(torch.equal(result, torch.full((3,), 12.0)) for result in run)


@functools.lru_cache(maxsize=2)
def squared(x):
    return x * x


def test_a_cached_function_can_be_launched():
    def called_twice():
        return squared(3), squared(3), squared.cache_info()[:3]

    assert list(launch(called_twice, 2)) == [(9, 9, (1, 1, 2))] * 2
    assert list(launch(squared, 2, 4)) == [16, 16]


def test_a_readers_function_is_pickled_by_value_with_its_classes():
    class Point:
        def __init__(self, x):
            self.x = x

    run = launch(lambda x: Point(x + int(os.environ["RANK"])), 2, 5)
    assert [type(point) for point in run] == [Point, Point] and [point.x for point in run] == [5, 6]


def speak():
    rank = int(os.environ["RANK"])
    time.sleep(0.2 * (2 - rank))
    print("hello")
    print("no end of line", end="")
    print("aside", file=sys.stderr)


def test_a_function_may_name_a_variable_config():
    def width_of(sizes):  # cloudpickle takes these names for torch.distributed.config, and can't pickle that module
        dist.init_process_group()
        config = SimpleNamespace(config=sizes)
        return config.config["width"]

    assert list(launch(width_of, 2, {"width": 32})) == [32, 32]


def test_lines_are_grouped_by_rank(capsys):
    run = launch(speak, 3)
    head, *lines = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"3 ranks on (gloo \(CPU\): .+|nccl: a GPU each)", head)
    assert lines == [f"[rank {rank}] {word}" for rank in range(3) for word in ("hello", "no end of line")]
    assert run.stderr == ["aside\n"] * 3


def test_the_first_line_comes_before_anything_slow(monkeypatch):
    class Screen(io.StringIO):
        def write(self, text):
            started.append(len(multiprocessing.active_children()))
            return super().write(text)

    started = []
    monkeypatch.setattr(sys, "stdout", Screen())
    launch(nothing, 2)
    assert set(started) == {0} and sys.stdout.getvalue().startswith("2 ranks on ")



def test_on_line_receives_lines_instead_of_the_output(capsys):
    heard = []
    launch(speak, 2, on_line=lambda rank, line: heard.append((rank, line)))
    assert sorted(heard) == [(0, "hello"), (0, "no end of line"), (1, "hello"), (1, "no end of line")]
    assert len(capsys.readouterr().out.splitlines()) == 1


def test_megabytes_of_lines_and_a_huge_result_just_work(capsys):
    def chatter():
        for _ in range(20_000):
            print("x" * 99)
        print("y" * 3_000_000)
        return torch.arange(25_000_000, dtype=torch.float32)

    run = launch(chatter, 1)
    assert run[0][-1] == 24_999_999
    *lines, last = capsys.readouterr().out.splitlines()[1:]
    assert set(lines) == {"[rank 0] " + "x" * 99} and 1_000 < len(lines) < 2_000
    assert last == (f"[rank 0] ... and more, {20_001 - len(lines)} lines: stdout[0] of the run, or of the error, has "
                    "them")
    *kept, long = run.stdout[0].splitlines()
    assert kept == ["x" * 99] * 20_000
    assert long == "y" * MAX_LINE_BYTES + f" ... and {3_000_000 - MAX_LINE_BYTES} more bytes in this line"


def test_lines_that_are_not_kept_are_counted_in_an_error_too(capsys):
    def chatter():
        for _ in range(60):
            print("x" * 100_000)
        print(1 / 0)

    with pytest.raises(RankError) as caught:
        launch(chatter, 1)
    *kept, last = caught.value.stdout[0].splitlines()
    assert set(kept) == {"x" * 100_000} and last == f"... and more: {60 - len(kept)} lines not kept"
    shown = capsys.readouterr().out.splitlines()[1:]
    assert shown[0] == "[rank 0] " + "x" * 100_000 and "and more, 41 lines" in shown[1]


@given(st.lists(st.binary(max_size=9).map(lambda data: data.replace(b"b", b"\n")), max_size=9))
def test_lines_do_not_depend_on_how_the_bytes_arrive(parts):
    lines = StreamLines()
    complete = [line for part in [*filter(None, parts), b""] for line in lines.feed(part)]
    whole = [line.decode("utf-8", "replace") for line in b"".join(parts).split(b"\n")]
    assert complete == lines.kept == (whole if whole[-1] else whole[:-1])


def test_random_numbers_differ_between_ranks_but_not_between_launches():
    def draw():
        return torch.rand(1).item(), float(np.random.rand())

    first, again = launch(draw, 2), launch(draw, 2)
    assert list(first) == list(again) and first[0] != first[1]


def test_ranks_import_nothing_for_a_function_of_a_lab():
    """The server that they are forked from has: for 8 ranks it would take as long as the launch itself, four times."""
    assert set(launch(loaded, 2)) == {True}


def loaded():
    return {"torch", "book.record", "book.checks.verdict", "book.checks.rings"} <= sys.modules.keys()


def test_the_current_environment_is_passed_with_env_on_top(monkeypatch):
    monkeypatch.setenv("LOCKSTEP_TEST", "now")

    def read():
        return os.environ["LOCKSTEP_TEST"], os.environ.get("LOCKSTEP_EXTRA"), os.environ["LOCAL_RANK"]

    assert list(launch(read, 2, env={"LOCKSTEP_EXTRA": "1"})) == [("now", "1", "0"), ("now", "1", "1")]


def test_ranks_may_have_workers_of_their_own():
    def load():
        data = torch.utils.data.DataLoader(range(4), batch_size=2, num_workers=1)
        return [batch.tolist() for batch in data]

    assert launch(load, 1)[0] == [[0, 1], [2, 3]]


# Failures

@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_errors_that_are_kept_hold_nothing_open():
    def held():
        gc.collect()
        return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))

    failure(divide_on_rank_2)
    before = held()
    kept = [failure(divide_on_rank_2) for _ in range(3)]
    with pytest.raises(HangError) as hung:
        launch(add_up, 2, 1, timeout_s=0.001)
    kept.append(hung.value)
    assert held() == before and all(error.__traceback__ for error in kept)


def divide(rank):
    return 1 // (rank - 2)


def divide_on_rank_2():
    rank, _ = start()
    print("before")
    divide(rank)
    dist.barrier()


def failure(fn, world_size=3, *args, **options):
    with pytest.raises(RankError) as caught:
        launch(fn, world_size, *args, **options)
    return caught.value


def test_an_error_is_reported_with_its_own_line(capsys):
    error = failure(divide_on_rank_2)
    assert re.fullmatch(
        r"rank 2 failed in test_launch.py line \d+: return 1 // \(rank - 2\)\n"
        r"ZeroDivisionError: integer division or modulo by zero\n"
        r"called from test_launch.py line \d+: divide\(rank\)", str(error))
    assert error.rank == 2 and isinstance(error.__cause__, ZeroDivisionError)
    assert "in divide_on_rank_2" in error.traceback and len(error.stderr) == 3 and error.trace is None
    assert capsys.readouterr().out.count("before") == 3


class Speechless(Exception):
    def __str__(self):
        raise KeyError("text")


def test_an_error_that_has_no_text_is_named():
    def fail():
        raise Speechless

    assert "Speechless: it has no text: its __str__ raised KeyError" in str(failure(fail, 1))


def deeper():
    return deeper()


def test_an_endless_recursion_is_reported_in_few_lines():
    assert re.fullmatch(
        r"rank 0 failed in test_launch.py line \d+: return deeper\(\)\nRecursionError: .*\n"
        r"called from test_launch.py line \d+: return deeper\(\), \d+ times", str(failure(deeper, 1)))


def test_the_same_error_everywhere_is_reported_once_for_the_lowest_rank():
    def fail():
        start()
        raise ValueError("wrong shape")

    assert re.fullmatch(
        r"rank 0 failed in test_launch.py line \d+: raise ValueError\(\"wrong shape\"\)\n"
        r"ValueError: wrong shape\nthe same on ranks 1, 2", str(failure(fail)))


@pytest.mark.parametrize("end, words", [
    (lambda: os._exit(3), "rank 1 ended with exit code 3 before its function returned"),
    pytest.param(lambda: os._exit(0), "rank 1 ended with exit code 0 before its function returned",
                 marks=pytest.mark.slow),
    (lambda: os.kill(os.getpid(), signal.SIGKILL),
     "rank 1 was killed by SIGKILL before its function returned: the machine may have run out of memory"),
])
def test_a_dead_rank_is_the_cause_not_its_peers(end, words):
    def die():
        rank, _ = start()
        dist.barrier()
        if rank == 1:
            end()
        dist.all_reduce(torch.ones(1))

    assert str(failure(die)) == words


def test_a_crash_in_c_is_reported_with_its_line():
    def crash():
        ctypes.string_at(0)

    words = (r"rank 0 was killed by SIGSEGV before its function returned "
             r"at test_launch.py line \d+: ctypes.string_at\(0\)")
    assert re.fullmatch(words, str(failure(crash, 1)))


def without_line_numbers(error):
    return re.sub(r"line \d+", "line N", str(error)).splitlines()


@pytest.mark.parametrize("record", [False, True])
def test_a_peer_that_does_not_exist_is_named(record):
    def forget_modulo():
        rank, world_size = start()
        dist.isend(torch.ones(1), rank + 1)
        dist.recv(torch.ones(1), (rank - 1) % world_size)

    assert without_line_numbers(failure(forget_modulo, 3, record=record)) == [
        "rank 2 failed in test_launch.py line N: dist.isend(torch.ones(1), rank + 1)",
        "ValueError: there is no rank 3: ranks are 0 to 2"]


@pytest.mark.parametrize("call", [
    lambda x, peer: dist.recv(x, peer),
    pytest.param(lambda x, peer: dist.irecv(x, src=peer).wait(), marks=pytest.mark.slow),
    lambda x, peer: dist.batch_isend_irecv([dist.P2POp(dist.irecv, x, peer)]),
    pytest.param(lambda x, peer: dist.broadcast(x, peer), marks=pytest.mark.slow),
])
def test_a_receive_from_a_rank_that_does_not_exist_is_named(call):
    def receive():
        rank, _ = start()
        call(torch.zeros(1), rank - 1)

    assert str(failure(receive, 1)).splitlines()[1] == "ValueError: there is no rank -1: ranks are 0 to 0"


@pytest.mark.slow
def test_a_rank_that_the_group_does_not_have_is_named():
    """By its number in the group, with which torch itself looks up nothing."""
    def send():
        rank, _ = start()
        pair = dist.new_group([1, 2])
        if rank == 2:
            dist.isend(torch.ones(1), group=pair, group_dst=2)

    assert str(failure(send, 3)).splitlines()[1] == (
        "ValueError: group_src= or group_dst= names a rank that the group does not have: its ranks are 0 to 1")


def test_receiving_from_any_rank_still_works():
    def exchange():
        rank, _ = start()
        if rank == 0:
            return dist.recv(torch.zeros(1))
        dist.send(torch.zeros(1), 0)

    assert launch(exchange, 2)[0] == 1


def test_a_message_that_does_not_fit_is_reported_with_its_size():
    def send_too_much():
        rank, _ = start()
        if rank == 0:
            dist.send(torch.ones(8), 1)
        else:
            dist.recv(torch.ones(4), 0)
        dist.barrier()

    assert without_line_numbers(failure(send_too_much, 2)) == [
        "a message is received as something else than it was sent as: the number of elements must be the same on both "
        "sides, and messages arrive in the order of their sends",
        "  rank 0 sends float32 [8] to rank 1 at test_launch.py line N: dist.send(torch.ones(8), 1)",
        "  rank 1 receives float32 [4] from rank 0 at test_launch.py line N: dist.recv(torch.ones(4), 0)"]


@pytest.mark.parametrize("record", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("call, words", [
    pytest.param(lambda x: dist.isend(x, 1), "rank 1 sends to itself: copy instead", marks=pytest.mark.slow),
    (lambda x: dist.irecv(x, group_src=1), "rank 1 receives from itself: copy instead"),
    (lambda x: dist.batch_isend_irecv([dist.P2POp(dist.isend, x, 1)]), "rank 1 sends to itself: copy instead"),
])
def test_a_rank_that_sends_to_itself_is_reported(call, words, record):
    def to_itself():
        rank, _ = start()
        if rank == 1:
            call(torch.zeros(1))

    assert str(failure(to_itself, 2, record=record)).splitlines()[1] == f"ValueError: {words}"


def test_sys_exit_is_an_error():
    assert "SystemExit: a rank must return, not call sys.exit(0)" in str(failure(lambda: sys.exit(0), 1))


def test_a_result_that_cannot_be_pickled_is_named():
    def make_a_lock():
        return threading.Lock()

    assert str(failure(make_a_lock, 2)) == (
        "rank 0 failed\n"
        "TypeError: what make_a_lock returned cannot be sent back (cannot pickle '_thread.lock' object): "
        "return numbers, strings, lists, dicts or tensors\n"
        "the same on rank 1")


def test_an_error_without_a_line_of_the_reader_names_none_of_the_book():
    assert str(failure(int, 1, "many")) == (
        "rank 0 failed\nValueError: invalid literal for int() with base 10: 'many'")


class NotANumber:
    def __reduce__(self):
        return int, ("many",)


def test_objects_that_cannot_be_unpickled_are_reported_on_either_side():
    assert str(failure(add_up, 1, NotANumber())) == (
        "rank 0 failed before its function started\n"
        "ValueError: invalid literal for int() with base 10: 'many'")
    with pytest.raises(LaunchError, match=r"a rank's result cannot be rebuilt here \(ValueError: invalid literal"):
        launch(NotANumber, 1)


def test_launch_inside_a_rank_is_refused():
    def nest():
        launch(nothing, 2)

    assert "this process is itself a rank: call the function directly" in str(failure(nest, 1))


def test_debug_level_names_mismatched_collectives():
    def mismatch():
        rank, _ = start()
        if rank == 0:
            dist.all_reduce(torch.ones(1))
        else:
            dist.broadcast(torch.ones(1), 0)

    message = str(failure(mismatch, 2, check_calls=False, env={"TORCH_DISTRIBUTED_DEBUG": "DETAIL"}))
    assert "Detected mismatch between collectives on ranks" in message


def test_asking_for_stacks_does_not_change_which_rank_failed():
    def fail():
        rank, _ = start()
        if rank == 1:
            raise ValueError("wrong shape")
        signal.signal(signal.SIGUSR1, signal.SIG_DFL)  # the rank will die of being asked
        ctypes.PyDLL(None).sleep(600)

    assert failure(fail, 2).rank == 1


def test_only_ranks_that_can_answer_are_asked_for_their_stack():
    early, gone = (subprocess.Popen(["sleep", "600"]) for _ in range(2))
    gone.kill()
    gone.wait()
    with Ranks(2, None) as ranks:
        first, second = ranks
        first.process, second.process, second.entered = early, SimpleNamespace(pid=gone.pid), True
        assert ranks.dump(0.1) == {1: ""}
        assert early.poll() is None
        first.process = second.process = None
    early.kill()
    early.wait()


# Hangs

def hang(fn, world_size=3, timeout_s=60.0, hang_s=0.5, late=False):
    with pytest.raises(HangError) as caught:
        launch(fn, world_size, timeout_s=timeout_s, hang_s=hang_s)
    assert caught.value.late is late, "told because nothing moved, or because the time was up"
    head, *lines = str(caught.value).splitlines()
    return head, [re.sub(r"line \d+", "line N", line.strip()) for line in lines
                  if not line.startswith(("cause: ", "possible cause: "))]


STILL = "the ranks wait for one another: nothing has moved for 0.5 s"


def test_a_ring_in_which_all_ranks_receive_first_hangs():
    def exchange():
        rank, world_size = start()
        buffer = torch.zeros(2)
        dist.recv(buffer, (rank - 1) % world_size)
        dist.send(buffer, (rank + 1) % world_size)

    where = "at test_launch.py line N: dist.recv(buffer, (rank - 1) % world_size)"
    expected = [f"rank {r} waits in recv from rank {(r - 1) % 3} {where}" for r in range(3)]
    assert hang(exchange) == (STILL, expected)


@pytest.mark.slow
def test_a_ring_in_which_all_ranks_send_first_hangs():
    def exchange():
        rank, world_size = start()
        buffer = torch.zeros(2)
        dist.send(buffer, (rank + 1) % world_size)
        dist.recv(buffer, (rank - 1) % world_size)

    where = "at test_launch.py line N: dist.send(buffer, (rank + 1) % world_size)"
    assert hang(exchange) == (STILL, [f"rank {r} waits in send to rank {(r + 1) % 3} {where}" for r in range(3)])


def test_a_root_given_by_its_rank_in_the_group_is_explained():
    def broadcast():
        rank, _ = start()
        pair = dist.new_group([1, 2])
        if rank == 2:
            dist.broadcast(torch.zeros(2), group_src=0, group=pair)

    where = "at test_launch.py line N: dist.broadcast(torch.zeros(2), group_src=0, group=pair)"
    assert hang(broadcast) == (STILL, ["ranks 0, 1 finished",
                                       f"rank 2 waits in broadcast from rank 1 {where}"])


def test_a_group_created_by_one_rank_alone_is_reported():
    def alone():
        rank, _ = start()
        if rank == 0:
            dist.new_group([0, 1])

    where = "waits in new_group at test_launch.py line N: dist.new_group([0, 1])"
    rule = "new_group: every rank must call it for every group, in the same order, members or not"
    head, lines = hang(alone)
    assert (head, lines) == (STILL, [f"rank 0 {where}", "ranks 1, 2 finished", rule])


@pytest.mark.slow
def test_mismatched_order():
    def mismatch():
        rank, _ = start()
        if rank == 0:
            dist.recv(torch.zeros(1), 1)
        elif rank == 1:
            dist.barrier()

    assert hang(mismatch) == (STILL, [
        "rank 0 waits in recv from rank 1 at test_launch.py line N: dist.recv(torch.zeros(1), 1)",
        "rank 1 waits in barrier at test_launch.py line N: dist.barrier()",
        "rank 2 finished",
    ])


def test_requests_are_named_by_the_call_that_made_them():
    def wait_for_requests():
        rank, world_size = start()
        left, right = (rank - 1) % world_size, (rank + 1) % world_size
        if rank == 0:
            incoming = dist.irecv(torch.zeros(1), src=left)
            incoming.wait()
        elif rank == 1:
            requests = [dist.irecv(torch.zeros(1), left), dist.isend(torch.zeros(1), right)]
            for request in requests:
                request.wait()
        elif rank == 2:
            dist.all_reduce(torch.zeros(1), async_op=True).wait()

    assert hang(wait_for_requests) == (STILL, [
        "rank 0 waits for its irecv from rank 2 at test_launch.py line N: incoming.wait()",
        "rank 1 waits for its irecv from rank 0 at test_launch.py line N: request.wait()",
        "rank 2 waits for its all_reduce at test_launch.py line N: "
        "dist.all_reduce(torch.zeros(1), async_op=True).wait()",
    ])


def test_backward_of_ddp_without_its_peer():
    def train():
        rank, _ = start()
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
        loss = model(torch.ones(1, 2)).sum()
        if rank == 0:
            loss.backward()

    assert hang(train, 2) == (STILL, [
        "rank 0 waits in backward at test_launch.py line N: loss.backward()", "rank 1 finished"])


def test_a_missing_rank_at_the_start():
    def start_all_but_one():
        if os.environ["RANK"] == "0":
            dist.init_process_group()

    assert hang(start_all_but_one, 2) == (STILL, [
        "rank 0 waits in init_process_group at test_launch.py line N: dist.init_process_group()", "rank 1 finished"])


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a hang is told at the time limit")
def test_threads_of_many_groups_do_not_count_as_work():
    def wait_among_groups():
        rank, world_size = start()
        for _ in range(24):  # each with a thread of gloo that wakes up 100 times a second
            dist.new_group(range(world_size))
        dist.irecv(torch.zeros(1), 1 - rank).wait()

    head, _ = hang(wait_among_groups, 2, timeout_s=10, hang_s=2)
    assert head == "the ranks wait for one another: nothing has moved for 2 s"


def test_a_slow_rank_is_not_a_hang():
    def slow():
        rank, _ = start()
        if rank == 0:
            time.sleep(2)
        dist.barrier()
        return "done"

    assert list(launch(slow, 2, hang_s=1)) == ["done", "done"]


def test_many_short_waits_are_not_a_hang():
    def iterate():
        rank, world_size = start()
        buffer, end_s = torch.zeros(1), time.monotonic() + 1.5
        while True:
            going = torch.tensor([float(time.monotonic() < end_s)])
            dist.broadcast(going, 0)
            if not going.item():
                return "done"
            outgoing = dist.isend(buffer, (rank + 1) % world_size)
            dist.recv(buffer, (rank - 1) % world_size)
            outgoing.wait()

    assert list(launch(iterate, 3, hang_s=0.5)) == ["done"] * 3


def test_a_busy_rank_is_reported_at_the_time_limit():
    def be_busy():
        rank, _ = start()
        if rank == 0:
            while True:
                pass
        if rank == 1:
            ctypes.PyDLL(None).sleep(600)  # C code that does not let go of the GIL
        if rank == 2:
            time.sleep(600)
        dist.barrier()

    assert hang(be_busy, 4, timeout_s=2, late=True) == ("not done after 2 s", [
        "rank 0 computes at test_launch.py line N: while True:",
        "rank 1 waits in C code that holds the interpreter lock at test_launch.py line N: "
        "ctypes.PyDLL(None).sleep(600)  # C code that does not let go of the GIL",
        "rank 2 sleeps at test_launch.py line N: time.sleep(600)",
        "rank 3 waits in barrier at test_launch.py line N: dist.barrier()",
    ])


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_stopped_rank_stands_still():
    def stop():
        rank, _ = start()
        if rank == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        dist.barrier()

    first, lines = hang(stop, 2, timeout_s=60, hang_s=1)
    assert first == "the ranks wait for one another: nothing has moved for 1 s"
    assert lines == ["rank 0 waits in barrier at test_launch.py line N: dist.barrier()",
                     "rank 1 is stopped by a signal (SIGSTOP)"]


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_rank_that_was_stopped_for_a_while_goes_on():
    def pause():
        rank, _ = start()
        if rank == 1:
            subprocess.Popen(["sh", "-c", f"sleep 0.5; kill -CONT {os.getpid()}"])
            os.kill(os.getpid(), signal.SIGSTOP)
        dist.barrier()
        return "done"

    assert list(launch(pause, 2, hang_s=2)) == ["done"] * 2


# Recording

def ring_step(break_on):
    rank, world_size = start()
    outgoing = dist.isend(torch.ones(4), (rank + 1) % world_size)
    dist.recv(torch.empty(4), (rank - 1) % world_size)
    outgoing.wait()
    if break_on == "error" and rank == 1:
        raise ValueError("broken")
    if break_on == "hang":
        dist.recv(torch.empty(4), (rank - 1) % world_size)


def sends_and_receives(trace):
    return sorted((event.rank, event.kind, event.peer) for event in trace.events)


EXCHANGE = [(0, "recv", 1), (0, "send", 1), (1, "recv", 0), (1, "send", 0)]


def test_a_recorded_run_has_a_trace():
    run = launch(ring_step, 2, None, record=True)
    assert run.trace.source == "recorded" and sends_and_receives(run.trace) == EXCHANGE


def test_what_was_recorded_survives_a_failure_and_a_hang():
    with pytest.raises(RankError, match="ValueError: broken") as failed:
        launch(ring_step, 2, "error", record=True)
    assert sends_and_receives(failed.value.trace) == EXCHANGE
    with pytest.raises(HangError) as hung:
        launch(ring_step, 2, "hang", record=True, hang_s=0.5)
    # The receives that hang are in the trace too: they are what a reader wants to see.
    assert sends_and_receives(hung.value.trace) == sorted([*EXCHANGE, (0, "recv", 1), (1, "recv", 0)])


def sends_once_and_receives_twice(kept):
    """A ring with one receive too many, by ranks that keep the request of their isend or not."""
    dist.init_process_group()
    rank, world_size = dist.get_rank(), dist.get_world_size()
    request = dist.isend(torch.ones(1), (rank + 1) % world_size)
    if not kept:
        del request
    for _ in range(2):
        dist.recv(torch.zeros(1), (rank - 1) % world_size)


@pytest.mark.parametrize(("kept", "record"), [(True, False), (False, False), (False, True)])
def test_a_hang_names_the_line_of_requests_that_were_dropped(kept, record):
    with pytest.raises(HangError) as hung:
        launch(sends_once_and_receives_twice, 3, kept, record=record, hang_s=0.5)
    assert "nothing has moved for 0.5 s" in str(hung.value)  # although gloo polls for what nobody takes
    dropped = re.search(r"cause: ranks 0, 1, 2 did not keep what isend returned; .* line \d+: (.*)", str(hung.value))
    assert (dropped[1] if dropped else None) == (None if kept else "request = dist.isend(torch.ones(1), (rank + 1) % "
                                                                   "world_size)")


def sends_much(num_values):
    dist.init_process_group("gloo")
    values = torch.zeros(num_values)
    if dist.get_rank() == 0:
        dist.send(values, 1)
    else:
        dist.recv(values, 0)


def test_a_long_transfer_is_no_hang():
    """Only gloo's own thread works in it, for longer than `hang_s`.

    A loaded machine may not run it for as long as that: not three times in a row.
    """
    for last in (False, False, True):
        try:
            launch(sends_much, 2, 300_000_000, hang_s=0.2)
            return
        except HangError:
            if last:
                raise


def test_a_run_that_was_not_recorded_says_so():
    with pytest.raises(LaunchError, match="this run was not recorded: pass record=True"):
        launch(nothing, 1).trace


# Arguments

def test_numpy_numbers_are_accepted():
    assert list(launch(add_up, np.int64(1), 1, timeout_s=np.float32(60), hang_s=np.int64(3), env={"A": 1}))
