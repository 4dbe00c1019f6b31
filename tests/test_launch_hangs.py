"""Programs that hang: what `launch` says of each, those of the page "When it hangs" and others."""
from __future__ import annotations

import ast
import hashlib
import os
import re
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset

from book.launch import HangError, LaunchError, around, launch, threads
from book.launch.pending import keys_of_store
from book.record import lanes, watch
from book.trace import Trace
from book.waiting.message import graph
from book.widgets.player import run_payload
from examples import faults

SECTIONS = faults.sections()
NO_WAIT = ("a_loop_that_never_ends", "a_call_that_keeps_the_interpreter")  # told at the time limit
REFUSED = ("batches_that_meet_an_all_reduce", "one_evaluates_a_ddp_model",  # before anything hangs, or goes wrong
           "a_column_of_a_matrix", "a_message_of_another_type", "a_part_of_another_size", "a_thread_in_the_same_group")
QUICK = ("one_returns_early", "a_request_that_is_dropped", "a_loss_that_leaves_parameters_out",
         "calls_that_hold_a_lock", "two_locks_in_two_orders", "a_call_that_keeps_the_interpreter")

# For each program: what its message must give as the cause, and the line of the mistake, or of the call that it leaves
# out.
EXPECTED = {
    "one_returns_early": ("rank 2 returned without it", "dist.barrier()"),
    "one_leaves_the_loop_early": ("rank 1 returned without it (last call in this group: all_reduce",
                                  "dist.all_reduce(torch.ones(4))"),
    "one_receives_instead": ("rank 1 waits in recv from rank 0 instead", "dist.recv(torch.ones(4), src=0)"),
    "a_collective_for_the_log": ("rank 0 waits in all_gather_object(); ranks 1, 2 returned without it",
                                 "dist.all_gather_object(losses, 0.5)"),
    "losses_with_other_keys": ("rank 0 has called all_reduce 7 times, ranks 1, 2 only 6 times, at line 8: ",
                               "dist.all_reduce(losses[name])"),
    "a_validation_that_is_longer": ("ranks 0 and 1 are out of step since call 4 of this group",
                                    "dist.all_reduce(correct)"),
    "an_error_that_is_swallowed": ("rank 1 returned without it", "dist.all_reduce(mean)"),
    "an_asynchronous_collective": ("rank 1 returned without it", "work.wait()"),
    "one_saves_a_checkpoint": ("ranks 1, 2 returned without it", "dist.checkpoint.save("),
    "two_groups_in_two_orders": ("call the groups' collectives in the same order",
                                 "dist.all_reduce(torch.ones(4), group=group)"),
    "a_group_without_one_of_its_ranks": ("rank 2 returned without it", "dist.all_reduce(torch.ones(4), group=pair)"),
    "a_group_that_one_rank_makes": ("rank 0 waits in new_group([0, 1]); ranks 1, 2 returned without it",
                                    "dist.new_group([0, 1])"),
    "a_group_that_one_rank_destroys": ("rank 0 waits in barrier(); rank 1 has destroyed that group without calling it",
                                       "dist.destroy_process_group(pair)"),
    "all_send_first": ("ranks 0, 1, 2 all send first", "dist.send(torch.ones(4), dst=(rank + 1) % 3)"),
    "all_receive_first": ("ranks 0, 1, 2 all receive first", "dist.recv(torch.ones(4), src=(rank - 1) % 3)"),
    "all_send_and_receive_on_one_side": ("each has sent, but not to the rank that waits for it",
                                         "dist.isend(torch.ones(4), dst=right)"),
    "requests_that_are_waited_for_too_early": ("ranks 0, 1, 2 wait for irecvs from one another", "incoming.wait()"),
    "a_pipeline_that_warms_up_too_long": ("ranks 0, 1 wait for each other in a circle, at different lines",
                                          "dist.recv(torch.ones(4), src=0)"),
    "tags_that_differ": ("the send and the receive of ranks 0 and 1 do not match",
                         "dist.send(torch.ones(4), dst=1, tag=1)"),
    "a_message_in_another_group": ("the send and the receive of ranks 0 and 1 do not match",
                                   "dist.send(torch.ones(4), dst=1, group=pair)"),
    "a_send_to_the_wrong_rank": ("rank 0 waits in send to rank 2, while rank 1 waits in recv from rank 0",
                                 "dist.send(torch.ones(4), dst=2)"),
    "one_message_too_few": ("rank 1 waits in recv from rank 0 instead", "dist.recv(torch.ones(4), src=0)"),
    "a_receive_from_anyone": ("rank 0 waits in recv from any rank; ranks 1, 2 have returned",
                              "dist.recv(torch.ones(4))"),
    "a_request_that_is_dropped": ("rank 0 did not keep what isend returned", "dist.isend(torch.ones(4), dst=1)"),
    "a_batch_without_its_other_half": ("rank 2 waits for its isend to rank 0", "request.wait()"),
    "a_peer_that_has_returned": ("rank 0 waits in recv from rank 2, which has returned",
                                 "dist.recv(torch.ones(4), src=2)"),
    "a_chain_of_receives": ("rank 1 waits in recv from rank 2, which has returned",
                            "dist.recv(torch.ones(4), src=rank + 1)"),
    "one_has_a_batch_fewer_under_ddp": ("ranks 0, 2 have run the DDP model on 3 batches, rank 1 on only 2",
                                        ".backward()"),
    "batches_that_meet_an_all_reduce": ("ranks 0, 2 have run the DDP model on 3 batches, rank 1 on only 2",
                                        "dist.all_reduce(torch.ones(1))"),
    "a_batch_that_is_skipped": ("it has caught an error in between, and `except MemoryError` goes on at line 11",
                                "loss.backward()"),
    "a_loss_that_leaves_parameters_out": ("the loss of rank 1 does not use second.weight, second.bias",
                                          "loss.backward()"),
    "one_evaluates_a_ddp_model": ("rank 0 has made 1 forward of the DDP model more than ranks 1, 2: line 5: ",
                                  "model(torch.ones(2, 4))"),
    "one_evaluates_a_sharded_model": ("rank 0 waits in all_gather_single(float32 [5]) of FSDP; ranks",
                                      "model(torch.ones(2, 4))"),
    "calls_that_hold_a_lock": ("ranks 0 and 1 call each other over RPC, and each call waits for a lock", "with LOCK:"),
    "a_call_to_oneself": ("rank 0 calls itself over RPC, and the call waits for a lock", "with LOCK:"),
    "calls_that_take_all_threads": ("rank 1 serves calls in 2 threads, and each waits in Barrier.wait(), so",
                                    "ALL_CALLS.wait()"),
    "a_shutdown_that_is_forgotten": ("ranks 0, 2 wait in shutdown; rank 1 has returned", "rpc.shutdown()"),
    "a_reply_that_is_never_set": ("worker1, which runs no call: has its function returned a future",
                                  'rpc.rpc_sync("worker1", promise)'),
    "a_lock_taken_twice": ("rank 0 waits for a lock, and has no other thread that could release it", "with lock:"),
    "two_locks_in_two_orders": ("its threads A and B each wait for a lock that another holds", "with other:"),
    "an_empty_queue": ("no other thread that could put an item in", "Queue().get()"),
    "a_queue_whose_items_are_never_done": ("no other thread that could call task_done", "queue.join()"),
    "an_event_that_nobody_sets": ("no other thread that could set it", "threading.Event().wait()"),
    "a_thread_that_receives": ("rank 0 waits in recv from rank 1, which has returned",
                               "dist.recv(torch.ones(4), src=1)"),
    "a_future_that_is_not_done": ("rank 0 waits in recv from rank 1 instead", "dist.recv(torch.ones(4), src=1)"),
    "a_pool_that_waits_for_itself": ("the pool has no thread left to run what they wait for",
                                     "pool.submit(lambda: pool.submit(int).result()).result()"),
    "a_key_that_nobody_sets": ("rank 0 waits for the key 'never set' of the store, which no rank has set",
                               'store.get("never set")'),
    "a_file_that_is_locked": ("ranks 1, 2 wait in fcntl.flock instead", "fcntl.flock(file, fcntl.LOCK_EX)"),
    "a_loop_that_never_ends": ("rank 1 computes instead", ""),  # the loop's head or its body
    "a_call_that_keeps_the_interpreter": ("rank 1 waits in C code that holds the interpreter lock instead",
                                          "ctypes.PyDLL(None).pause()"),
}


# The same for programs that fail, and for those that end and are wrong.
TOLD = {
    "a_port_in_the_program": ("nothing listens at port 12355 of localhost: the program has overwritten what launch",
                              'os.environ["MASTER_PORT"] = "12355"'),
    "a_rank_by_hand": ("ranks 0 and 1 of this launch both call themselves rank 0", "rank=0, world_size=3"),
    "a_world_size_by_hand": ("this start waits for 4 ranks (world_size=4), and launch has started 3", "world_size=4"),
    "a_backend_without_its_device": ("NCCL needs a GPU for each rank", 'init_process_group("nccl")'),
    "a_second_start": ("this program has started before, in line 3", 'dist.init_process_group("gloo")'),
    "an_output_that_no_loss_uses": ("gave second.weight, second.bias no gradient", "model(torch.ones(2, 4))"),
    "a_root_by_its_number_in_the_group": ("pass src=1 or group_src=0", "src=0, group=group"),
    "a_time_limit_that_is_too_short": ("It waited for rank 0, which sleeps at line 4", "dist.barrier()"),
    "a_file_that_is_not_there_yet": ("Rank 1 has read it too early: call dist.barrier()", "torch.save("),
    "keys_of_the_wrapper": ("the checkpoint's keys begin with 'module.'", "load_state_dict(saved)"),
    "a_loader_s_worker_that_is_stuck": ("its worker process 0 waits in lock.acquire() at line", "lock.acquire()"),
    "a_loader_s_worker_that_is_killed": ("worker process 0 of its DataLoader was killed by SIGKILL", "LargeImages()"),
    "a_forward_past_the_wrapper": ("since step 1. The forward in", "model.module(torch.randn(8, 4))"),
    "a_head_after_wrapping": ("1.weight and 1.bias of the model", "DistributedDataParallel(layers"),
    "one_loads_a_checkpoint": ("Only rank 0 has loaded a state in", "load_state_dict(saved)"),
    "a_scheduler_with_each_rank_s_own_loss": ("lr was 0.1 on rank 0 and 0.01 on ranks 1, 2",
                                              "DistributedDataParallel(torch.nn.Linear(4, 1))"),
    "copies_of_shards_that_each_rank_makes": ("which hold copies of the same shard, already before the first step",
                                              "fully_shard(layer, mesh=mesh)"),
    "an_optimizer_made_before_sharding": ("steps in vain on ranks 0, 1, 2: its 2 parameters are in no model",
                                          "torch.optim.SGD(layer.parameters()"),
    "all_ranks_read_the_same": ("ranks 0, 1, 2 train on the same samples", "DataLoader(data"),
    "epochs_in_the_same_order": ("ranks 0, 1, 2 train on samples in the same order in every epoch", "for x, in loader"),
    "workers_that_read_the_same": ("the 2 workers of the loader of", "DataLoader(Lines()"),
    "splits_that_differ": ("what one holds back, another trains on", "random_split("),
    "masks_that_are_equal": ("dropout zeroes the same elements on ranks 0, 1, 2", "DistributedDataParallel(layers)"),
    "a_column_of_a_matrix": ("is not contiguous (shape [2], strides [3])", "matrix[:, 0]"),
    "a_message_of_another_type": ("rank 0 sends float32 [2] to rank 1", "dtype=torch.int32"),
    "a_part_of_another_size": ("rank 0 sends 2 to rank 1, rank 1 expects 3", "all_to_all_single("),
    "a_buffer_that_is_used_again": ("was changed before its wait() at line 10", "dist.isend(buffer, dst=1)"),
    "a_gradient_that_is_divided_too_early": ("was changed before its wait() at line 6", "async_op=True"),
    "features_that_autograd_does_not_pass": ("no gradient flows back to the peers", "dist.all_gather(features, mine)"),
    "a_loss_that_is_reduced_first": ("the gradient is at best that of the rank's own loss", "dist.all_reduce(loss)"),
    "a_thread_in_the_same_group": ("rank 0's thread 'saver' calls all_reduce", "dist.all_reduce(torch.ones(2))"),
    "an_error_in_a_thread": ("thread saver of ranks 0, 1, 2 has ended with an error", "os.remove("),
}


@pytest.mark.parametrize("program", [
    pytest.param(program, id=program.__name__, marks=() if program.__name__ in QUICK else pytest.mark.slow)
    for program in faults.PROGRAMS])
def test_a_faulty_program_gets_the_message_on_the_page(program: faults.Program) -> None:
    said = faults.message(program)
    if program is faults.hang.a_loop_that_never_ends:  # at one of two lines
        said = re.sub(r"at line 4: pass", "at line 3: while rank == 1:", said)
    on_page = f"#### {faults.title(program)}\n{SECTIONS[program.__name__]}"
    assert on_page.rstrip() == faults.section(program, said).rstrip(), (
        f"run `python examples/faults.py --page {program.__name__}`")


def test_the_keys_that_a_rank_waits_for_are_read_from_each_call_of_a_store() -> None:
    store, wanted = dist.HashStore(), ["a", "b"]
    both = tuple(wanted)
    told = {"store.get('a')": ("a",), "store.wait(wanted)": both, "store.multi_get(wanted)": both,
            "store.set('a', 'b')": None, "wanted.get('a')": None}
    for text, keys in told.items():
        call = ast.parse(text, mode="eval").body
        assert isinstance(call, ast.Call) and keys_of_store(call, sys._getframe()) == keys, (text, store)


def test_what_stands_around_the_programs_is_on_the_page() -> None:
    page = faults.PAGE.read_text("utf-8")
    assert page.startswith(faults.HEAD + faults.HANGS) and page.endswith(faults.TAIL)
    assert faults.FAILS in page and faults.SILENT in page
    groups = [title for part in (faults.hang, faults.fail, faults.silent) for title in part.GROUPS]
    assert groups == list(faults.READ_ON) and all(f"### {each}\n\n{faults.READ_ON[each]}\n\n#### " in page
                                                  for each in groups)


@pytest.mark.parametrize("cancelled", [True, False])
def test_a_clock_that_nobody_stops_ends_a_healthy_program_after_its_loop(cancelled: bool) -> None:
    """The page's loop, with tenths of a second for its minutes: the last save takes longer than a step may."""
    (loop,) = re.findall(r"^for batch in loader:\n.*?(?=^```)", faults.TAIL, re.DOTALL | re.MULTILINE)
    lines = loop.replace("120", "0.3").replace("    ...", "    pass").splitlines()
    assert lines[-1].startswith("faulthandler.cancel_dump_traceback_later()")
    program = ["import faulthandler, time", "loader = range(3)", *(lines if cancelled else lines[:-1]),
               "time.sleep(1)", "print('saved')"]
    done = subprocess.run([sys.executable, "-c", "\n".join(program)], capture_output=True, text=True, timeout=60)
    assert (done.stdout == "saved\n") == cancelled and ("Timeout" in done.stderr) != cancelled


@pytest.mark.parametrize("name", list(EXPECTED))
def test_the_message_names_the_cause_and_the_line(name: str) -> None:
    cause, source = EXPECTED[name]
    message = faults.said_in(SECTIONS[name])
    first, *rest = message.splitlines()
    assert first == ("not done after 2 s" if name in NO_WAIT else
                     "the ranks disagree in a collective: they call different collectives, and must make the same "
                     "calls in the same order" if name in REFUSED else
                     "the ranks wait for one another: nothing has moved for 0.5 s")
    assert any(cause in line for line in rest if line.startswith(("possible " if name in NO_WAIT else "") + "cause: "))
    assert re.search(rf"line \d+: .*{re.escape(source)}", message)
    assert ("computes" in message) == (name == "a_loop_that_never_ends")


@pytest.mark.parametrize("name", list(TOLD))
def test_what_is_told_names_the_fault_and_the_line(name: str) -> None:
    fault, source = TOLD[name]
    message = faults.said_in(SECTIONS[name])
    silent = name in [program.__name__ for program in faults.programs_of(faults.silent)]
    assert message.startswith("warning: ") == (silent and name not in REFUSED)
    assert fault in message and re.search(rf"line \d+: .*{re.escape(source)}", message)


def test_there_is_a_row_for_each_program() -> None:
    assert [*EXPECTED, *TOLD] == [program.__name__ for program in faults.PROGRAMS] == list(SECTIONS)
    assert list(EXPECTED) == [program.__name__ for program in faults.programs_of(faults.hang)]


@pytest.mark.parametrize("name", list(EXPECTED))
def test_each_rank_is_named_once_with_its_line_unless_it_has_returned(name: str) -> None:
    message = faults.said_in(SECTIONS[name])
    rows = re.findall(r"^  ranks? ([\d, ]+) (.*)", message, re.MULTILINE)
    assert sorted(int(rank) for who, _ in rows for rank in who.split(", ")) == list(range(faults.NUM_RANKS))
    assert all(does == "finished" or re.search(r"^(waits?|computes|calls?) .*at line \d+: ", does) for _, does in rows)


# Ranks that wait inside their own process, for a lock, a thread or a queue

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


IN_C = [
    (acquires_a_lock_twice, "lock.acquire, and has no other thread that could release it", "lock.acquire()"),
    (gets_from_a_simple_queue_that_stays_empty, "queue.get, and has no other thread that could put an item in",
     "queue.get()"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("program", "cause", "line"), IN_C, ids=[program.__name__ for program, *_ in IN_C])
def test_a_call_into_c_that_waits_for_another_thread_is_a_hang(program: Callable[[], None], cause: str,
                                                               line: str) -> None:
    with pytest.raises(HangError) as caught:
        launch(program, 2, hang_s=1, timeout_s=60)
    head, first, *lines = str(caught.value).splitlines()
    assert head == "the ranks wait for one another: nothing has moved for 1 s"
    assert first == f"cause: rank 0 waits in {cause}"
    assert re.fullmatch(rf"  rank 0 waits .* at test_launch_hangs.py line \d+: {re.escape(line)}", lines[0])


# Calls that one rank does not come to

def matches_its_rank() -> None:
    rank = not start()
    for step in range(4):
        match (step, rank):
            case (3, True):
                pass
            case (late, _) if late > 1:
                dist.all_reduce(torch.ones(1))


def catches_an_error_before_its_call() -> None:
    rank = not start()
    for step in range(4):
        try:
            if rank and step == 2:
                raise ValueError("no batch")
            dist.all_reduce(torch.ones(1))
        except ValueError:
            print("skipped")


NOT_CALLED = [
    (matches_its_rank, "rank 0 has come 2 times to {}: dist.all_reduce(torch.ones(1)), under `case [late, _] if "
     "late > 1`, rank 1 only once"),
    (catches_an_error_before_its_call, "rank 0 has called all_reduce 4 times, rank 1 only 3 times, at {}: "
     "dist.all_reduce(torch.ones(1)): did rank 1 catch an error before it? `except ValueError` goes on at {}: "
     'print("skipped")'),
]


@pytest.mark.slow
@pytest.mark.parametrize(("program", "cause"), NOT_CALLED, ids=[program.__name__ for program, _ in NOT_CALLED])
def test_what_kept_a_rank_from_a_call_is_named(program: Callable[[], None], cause: str) -> None:
    with pytest.raises(HangError) as caught:
        launch(program, 2, hang_s=1, timeout_s=60)
    said = re.sub(r"test_launch_hangs.py line \d+", "{}", str(caught.value))
    assert f"cause: {cause}" in said.splitlines()


HANDLERS = {  # the statements of a handler, and whether a rank may go on behind its error
    "print('skipped')": True, "return": True, "raise": False, "print('ends')\nraise": False,
    "if 'memory' in str(error):\n    return\nraise": True,
    "if 'memory' in str(error):\n    print('skipped')\nelse:\n    raise error": True,
    "if 'memory' in str(error):\n    raise MemoryError\nelse:\n    raise error": False,
}


@pytest.mark.parametrize("handler", list(HANDLERS))
def test_a_handler_that_raises_some_errors_goes_on_after_others(handler: str, tmp_path: Path) -> None:
    file = tmp_path / "program.py"
    handles = "except RuntimeError as error:\n" + textwrap.indent(handler, "    ")
    file.write_text("def train():\n" + textwrap.indent(f"try:\n    train_step()\n{handles}", "    "))
    found = around.line(((str(file), 3),)).handler
    assert (found is not None) == HANDLERS[handler]


def test_what_may_end_the_loops_around_a_line_is_known(tmp_path: Path) -> None:
    file = tmp_path / "program.py"
    file.write_text("for epoch in range(9):\n    for batch in loader:\n        for one in batch:\n"
                    "            train(one)\n        for one in batch:\n            if one: break\n"
                    "    if stop(epoch):\n        break\n")
    lines = [around.line(((str(file), number),)).leaves for number in (4, 6)]
    assert lines == ["if stop(epoch): break", "if one: break"]


class CallsInside(torch.nn.Linear):
    """A model whose forward makes a call of its own, as Lightning has DDP run what a user's step calls."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if dist.get_rank() == 0:
            dist.barrier()
        return super().forward(x)


def calls_inside_a_forward() -> None:
    start()
    DistributedDataParallel(CallsInside(2, 1))(torch.ones(1, 2))


def test_a_call_inside_the_forward_of_ddp_is_named_by_itself() -> None:
    with pytest.raises(HangError, match="rank 0 waits in barrier at test_launch_hangs.py line"):
        launch(calls_inside_a_forward, 2, hang_s=1, timeout_s=60)


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


@pytest.mark.slow
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


@pytest.mark.slow
def test_a_rank_that_waits_for_a_timer_does_not_hang() -> None:
    assert list(launch(waits_for_a_timer, 2, hang_s=0.5)) == [True, False]


@pytest.mark.slow
def test_a_rank_whose_thread_computes_does_not_hang() -> None:
    assert list(launch(computes_in_a_thread, 2, hang_s=0.5)) == [1, 1]


# Which of several failures is blamed, and how a hang looks in a large run and in a recording

def one_dies_and_another_raises() -> None:
    if os.environ["RANK"] == "1":
        os._exit(3)
    time.sleep(0.1)
    raise ValueError("without its peer")


@pytest.mark.slow
def test_a_death_is_the_cause_of_an_error_that_comes_later():
    with pytest.raises(LaunchError, match="rank 1 ended with exit code 3"):
        launch(one_dies_and_another_raises, 2)


def one_of_twelve_returns_early() -> None:
    dist.init_process_group()
    if dist.get_rank() != 7:
        dist.barrier()


@pytest.mark.slow
def test_ranks_at_the_same_place_share_a_line_in_a_large_run():
    with pytest.raises(HangError) as caught:
        launch(one_of_twelve_returns_early, 12, hang_s=1)
    _, cause, count, *lines = str(caught.value).splitlines()
    assert count.startswith("cause: ranks 0-6, 8, 9, 10, 11 have come once to ") and count.endswith(", rank 7 never")
    assert cause.startswith("cause: ranks 0-6, 8, 9, 10, 11 wait in barrier(); ")
    assert cause.endswith("rank 7 returned without it (last call in this group: none)")
    assert [line.partition(" at ")[0] for line in lines] == [
        "  ranks 0-6, 8, 9, 10, 11 wait in barrier", "  rank 7 finished"]


def ring_with_a_hang(hangs_in: str) -> None:
    """Two steps of a ring, of which the second hangs."""
    dist.init_process_group()
    rank, world_size = dist.get_rank(), dist.get_world_size()
    buffer = lanes(world_size)
    watch(buffer, world_size)
    chunks, got = buffer.chunk(world_size), torch.empty(world_size)
    left, right = (rank - 1) % world_size, (rank + 1) % world_size
    request = dist.isend(chunks[rank], right)
    dist.recv(got, left)
    request.wait()
    chunks[left].add_(got)
    if hangs_in == "send":
        dist.send(chunks[left], right)
    dist.recv(got, left)


@pytest.mark.slow
@pytest.mark.parametrize(("hangs_in", "unmet", "says"), [
    ("send", 3, ", and nobody receives it. All three links carry one chunk at once."),
    ("recv", 0, "Ranks 0, 1 and 2 wait to receive, and nobody sends.")])
def test_the_recording_of_a_hung_run_is_played_up_to_its_last_step(hangs_in: str, unmet: int, says: str) -> None:
    with pytest.raises(HangError) as caught:
        launch(ring_with_a_hang, 3, hangs_in, record=True, hang_s=0.5)
    trace, step = caught.value.trace, 1 if hangs_in == "send" else -1
    assert caught.value.waits == {rank: ((rank + step) % 3,) for rank in range(3)}
    assert trace is not None and Trace.from_json(trace.to_json()) == trace
    played = run_payload(trace.logical())
    assert played["S"] == 2 and played["transfers"]["op"] == ["reduce"] * 3 + [None] * unmet
    assert played["transfers"]["arrives"] == [0] * 3 + [None] * unmet
    assert played["rests"][played["says"][-1]] == says
    assert played["verdict"] == f"Here the run hangs: {graph(caught.value.waits)}."
    assert not played["ok"]


@pytest.mark.slow
def test_a_trace_has_no_hangs_if_the_run_did_not_hang() -> None:
    trace = launch(dist.init_process_group, 2, record=True).trace
    assert trace.hangs is None and "hangs" not in trace.to_json()


@pytest.fixture
def crowded_core() -> Iterator[int]:
    """A core on which another process computes."""
    core = min(os.sched_getaffinity(0))
    code = f"import os\nos.sched_setaffinity(0, {{{core}}})\nprint(flush=True)\nwhile True: pass"
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert process.stdout and process.stdout.readline()
    yield core
    process.kill()
    process.wait()


def test_a_thread_that_computes_and_gets_no_core_does_not_stand_still(crowded_core):
    begun, done = threading.Event(), threading.Event()

    def compute():
        me, data = threading.get_native_id(), bytes(10 ** 6)
        os.sched_setaffinity(me, {crowded_core})
        os.sched_setscheduler(me, os.SCHED_IDLE, os.sched_param(0))
        begun.set()
        while not done.is_set():
            hashlib.sha256(data)  # lets others have the interpreter

    with ThreadPoolExecutor(2) as pool:  # `stand_still` leaves out its own thread, and the main one waits here
        pool.submit(compute)
        begun.wait()
        looks = [pool.submit(threads.stand_still).result() for _ in range(6)]
        done.set()
    assert (True, False) in looks and (True, True) not in looks
