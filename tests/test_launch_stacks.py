"""Stacks as faulthandler writes them: read without touching the frames of a thread that runs."""
import os
import sys
import threading
import time

import pytest
import torch
import torch.distributed as dist

from book.launch import HangError, launch
from book.launch.child import _Stillness
from book.launch.stacks import Line, of_crash, of_threads, read
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


@pytest.mark.parametrize("memory", [True, False])
def test_the_lines_of_every_thread(monkeypatch, memory):
    if not memory:
        monkeypatch.delattr(os, "memfd_create", raising=False)
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


def test_the_thread_that_crashed_is_blamed():
    assert of_crash(CRASH) == (Line("/home/rené/ring.py", 9, "<module>"), Line("/home/rené/ring.py", 3, "step"))


def test_the_main_thread_is_blamed_for_a_crash_outside_python():
    assert of_crash(CRASH.replace("Current thread", "Thread")) == (Line("main.py", 1, "<module>"),)


def test_a_stack_of_c_code_blames_nobody():
    told = CRASH.replace("Current thread 0x00007f22 (most", "Current thread's C stack trace (most")
    assert of_crash(told) == (Line("main.py", 1, "<module>"),)


def test_a_stack_is_found_behind_a_line_without_an_end():
    told = '\r 45%|###Stack (most recent call first):\n  File "a b.py", line 3 in f\n'
    assert of_crash(told) == (Line("a b.py", 3, "f"),)


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
    assert Line(str(path), 1, "f").calls() == called


@pytest.mark.parametrize("innermost, doing", [
    ([], "computes"),
    ([("torch/distributed/c10d_logger.py", "wrapper"), ("torch/distributed/distributed_c10d.py", "all_reduce")],
     "waits in all_reduce"),
    ([("torch/distributed/rpc/api.py", "_invoke_rpc"), ("torch/distributed/rpc/api.py", "rpc_sync")],
     "waits in rpc_sync"),
    ([("torch/distributed/pipelining/schedules.py", "step"), ("torch/autograd/graph.py", "backward")], "waits in step"),
])
def test_what_a_thread_does_that_moves(innermost, doing):
    lines = [Line("ring.py", 1, "step"), *(Line(f"/site-packages/{file}", 1, name) for file, name in innermost)]
    assert doing_at(lines) == doing


def test_a_thread_that_sleeps_on_its_way(tmp_path):
    path = tmp_path / "cell.py"
    path.write_text("time.sleep(1)\nwork.wait(); time.sleep(1)\n")
    assert doing_at([Line(str(path), 1, "poll")]) == "sleeps"
    assert not sleeps([Line(str(path), 2, "poll")])  # it may wait as well, and then for a peer


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere ranks are not looked at while they run")
def test_a_rank_that_runs_is_looked_at_without_touching_its_frames():
    def be_looked_at():
        dist.init_process_group()
        sys._current_frames = None
        stillness, found_s = _Stillness(), []

        def look():
            for _ in range(20):
                found_s.append(stillness.measure_s())

        looker = threading.Thread(target=look)
        looker.start()
        while looker.is_alive():
            dist.all_reduce(torch.ones(1))
        return len(found_s)

    assert launch(be_looked_at, 1)[0] == 20


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere all frames are read, when the launch is over")
def test_the_frames_of_a_rank_that_computes_are_not_read_at_the_time_limit():
    def compute():
        sys._current_frames = None
        while True:
            pass

    with pytest.raises(HangError, match="rank 0 computes at test_launch_stacks.py line [0-9]+: (while True:|pass)"):
        launch(compute, 1, timeout_s=0.5)
