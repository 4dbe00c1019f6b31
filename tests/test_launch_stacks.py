"""Stacks of this process, whatever its threads do meanwhile, and those that faulthandler writes."""
import gc
import subprocess
import sys
import threading
import time
import types
import weakref

import pytest

from book.launch import HangError, launch
from book.launch.stacks import StackLine, of_crash, of_threads, read
from book.launch.where import doing_at, sleeps

CRASH = """\
Fatal Python error: Segmentation fault

Thread 0x00007f11 (most recent call first):
  File "/somewhere/launch/child.py", line 7 in answer

Current thread 0x00007f22 (most recent call first):
  File "/home/ren\\xe9/ring.py", line 3 in step
  File "/home/ren\\xe9/ring.py", line 9 in <module>

Thread 0x00007f33 [main] (most recent call first):
  File "main.py", line 1 in <module>

Extension modules: numpy (total: 1)
"""


def wait_for(event):
    event.wait()


def test_the_lines_of_every_thread():
    done = threading.Event()
    thread = threading.Thread(target=wait_for, args=[done])
    thread.start()
    while (waiting := of_threads()[thread.ident])[-1].function != "wait":
        time.sleep(0.01)
    done.set()
    thread.join()
    (own,) = [line for line in waiting if line.filename == __file__]
    assert own.function == "wait_for" and own.source == "event.wait()"
    assert of_threads()[threading.get_ident()][-1].function == "of_threads"


class Gradient:
    """Something that a function holds, of which we can tell whether it is still there."""


def test_a_frame_of_code_without_lines_has_a_line_all_the_same():
    def waits(event):
        event.wait()

    event = threading.Event()
    made = types.FunctionType(waits.__code__.replace(co_linetable=b""), globals())
    thread = threading.Thread(target=made, args=(event,))
    thread.start()
    while not (line := next((line for line in of_threads()[thread.ident] if line.function == "waits"), None)):
        time.sleep(0.001)
    event.set()
    assert line.number == 0 and line.source == "" and line.calls() == set()


def test_reading_stacks_keeps_no_variables_of_finished_functions():
    def held_while_looked_at():
        gradient = Gradient()
        of_threads()
        return weakref.ref(gradient)

    gc.disable()  # a collection would free it too, if at some other time
    try:
        assert held_while_looked_at()() is None
    finally:
        gc.enable()


def test_the_thread_that_crashed_is_blamed():
    assert of_crash(CRASH) == tuple(StackLine("/home/rené/ring.py", *at) for at in ((9, "<module>"), (3, "step")))


def test_the_main_thread_is_blamed_for_a_crash_outside_python():
    assert of_crash(CRASH.replace("Current thread", "Thread")) == (StackLine("main.py", 1, "<module>"),)


def test_a_stack_of_c_code_blames_nobody():
    told = CRASH.replace("Current thread 0x00007f22 (most", "Current thread's C stack trace (most")
    assert of_crash(told) == (StackLine("main.py", 1, "<module>"),)


def test_a_stack_is_found_after_a_line_without_a_newline():
    told = '\r 45%|###Stack (most recent call first):\n  File "a b.py", line 3 in f\n'
    assert of_crash(told) == (StackLine("a b.py", 3, "f"),)


@pytest.mark.parametrize("text", ["", "Killed", 'a program\'s own:\n  File "x.py", line 1 in f\n'])
def test_a_text_without_a_stack_blames_nobody(text):
    assert read(text) == [] and of_crash(text) == ()


@pytest.mark.parametrize("source, called", [
    ("dist.isend(x, 1).wait()", {"isend", "wait"}),
    ("work.wait()  # no sleep() here", {"wait"}),
    ("print('sleep()')", {"print"}),
    ("print(f'sleep is no call, {work.wait()} is')", {"print", "wait"}),
    ("return engine.run_backward(  # goes on below", {"run_backward"}),
    ("if ready (x) and (y):", {"ready"}),
    ("x = 1", set()),
    (") 'half a string", set()),
])
def test_what_is_called_on_a_line(tmp_path, source, called):
    path = tmp_path / "cell.py"
    path.write_text(f"    {source}\n")
    assert StackLine(str(path), 1, "f").calls() == called


@pytest.mark.parametrize("innermost, doing", [
    ([], "computes"),
    ([("torch/distributed/c10d_logger.py", "wrapper"), ("torch/distributed/distributed_c10d.py", "all_reduce")],
     "waits in all_reduce"),
    ([("torch/distributed/rpc/api.py", "_invoke_rpc"), ("torch/distributed/rpc/api.py", "rpc_sync")],
     "waits in rpc_sync"),
    ([("torch/distributed/pipelining/schedules.py", "step"), ("torch/autograd/graph.py", "backward")], "waits in step"),
])
def test_the_innermost_calls_say_what_a_running_thread_does(innermost, doing):
    called = [StackLine(f"/site-packages/{file}", 1, name) for file, name in innermost]
    lines = [StackLine("ring.py", 1, "step"), *called]
    assert doing_at(lines).words() == doing


def test_a_line_that_may_also_wait_does_not_count_as_sleeping(tmp_path):
    path = tmp_path / "cell.py"
    path.write_text("time.sleep(1)\nwork.wait(); time.sleep(1)\n")
    assert doing_at([StackLine(str(path), 1, "poll")]).words() == "sleeps"
    assert not sleeps([StackLine(str(path), 2, "poll")])  # it may wait as well, and then for a peer


CHURN = """\
import ctypes, sys, threading, time
from book.launch.stacks import of_threads

START = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)(lambda _: None)
LIBC = ctypes.CDLL(None)

def start_threads_of_c():
    thread = ctypes.c_ulong()
    while True:
        LIBC.pthread_create(ctypes.byref(thread), None, START, None)
        LIBC.pthread_join(thread, None)

def go_deep_and_back(depth):
    return go_deep_and_back(depth - 1) if depth else time.sleep(1e-3)

def move():
    while True:
        go_deep_and_back(30)

for target in (start_threads_of_c, start_threads_of_c, move):
    threading.Thread(target=target, daemon=True).start()
end_s, deepest = time.monotonic() + 3, 0
while time.monotonic() < end_s:
    deepest = max(deepest, *map(len, of_threads().values()))
    time.sleep(1e-4)
print(deepest, flush=True)
__import__("os")._exit(0)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="it starts threads of Linux's C library")
def test_stacks_are_read_while_threads_of_c_come_and_go():
    ended = subprocess.run([sys.executable, "-c", CHURN], capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    assert 30 < int(ended.stdout) < 60


def test_reading_stacks_leaves_the_garbage_collector_as_it_was():
    gc.disable()
    try:
        of_threads()
        assert not gc.isenabled()
    finally:
        gc.enable()
    of_threads()
    assert gc.isenabled()


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere threads are not seen to run")
def test_a_rank_that_computes_says_where_at_the_time_limit():
    def compute():
        while True:
            pass

    with pytest.raises(HangError, match="rank 0 computes at test_launch_stacks.py line [0-9]+: (while True:|pass)"):
        launch(compute, 1, timeout_s=0.5)
