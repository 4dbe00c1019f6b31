"""The programs of examples/hangs.py: what `launch` says of each is what the page "When it hangs" says."""
from __future__ import annotations

import re

import pytest

from examples import hangs

READS = ["examples/hangs.py", "chapters/95_when_it_hangs.md"]
SECTIONS = dict(zip((program.__name__ for program in hangs.HANGS),
                    re.split(r"^### ", hangs.PAGE.read_text("utf-8").partition("\n## A job that")[0], flags=re.M)[1:]))
NO_WAIT = ("a_loop_that_never_ends", "a_call_that_keeps_the_interpreter")  # told at the time limit
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
    "an_error_that_is_swallowed": ("rank 1 returned without it", "dist.all_reduce(mean)"),
    "an_asynchronous_collective": ("rank 1 returned without it", "work.wait()"),
    "one_saves_a_checkpoint": ("ranks 1, 2 returned without it", "dist.checkpoint.save("),
    "two_groups_in_two_orders": ("call the groups' collectives in the same order",
                                 "dist.all_reduce(torch.ones(4), group=group)"),
    "a_group_without_one_of_its_ranks": ("rank 2 returned without it", "dist.all_reduce(torch.ones(4), group=pair)"),
    "a_group_that_one_rank_makes": ("rank 0 waits in new_group([0, 1]); ranks 1, 2 returned without it",
                                    "dist.new_group([0, 1])"),
    "all_send_first": ("ranks 0, 1, 2 all send first", "dist.send(torch.ones(4), dst=(rank + 1) % 3)"),
    "all_receive_first": ("ranks 0, 1, 2 all receive first", "dist.recv(torch.ones(4), src=(rank - 1) % 3)"),
    "requests_that_are_waited_for_too_early": ("ranks 0, 1, 2 all receive first", "incoming.wait()"),
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
    "one_has_a_batch_fewer_under_ddp": ("ranks 0, 2 wait in backward; rank 1 has returned", ".backward()"),
    "a_loss_that_leaves_parameters_out": ("the loss of rank 1 does not use second.weight, second.bias",
                                          "loss.backward()"),
    "one_evaluates_a_ddp_model": ("rank 0 waits in DistributedDataParallel.forward() instead",
                                  "model(torch.ones(2, 4))"),
    "one_evaluates_a_sharded_model": ("rank 0 waits in all_gather_single(float32 [5]); ranks 1, 2 returned",
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


@pytest.mark.slow
@pytest.mark.parametrize("program", [
    pytest.param(program, id=program.__name__, marks=() if program.__name__ in QUICK else pytest.mark.full)
    for program in hangs.HANGS])
def test_a_program_that_hangs_gets_the_message_on_the_page(program: hangs.Program) -> None:
    said = hangs.message(program)
    if program is hangs.a_loop_that_never_ends:  # at one of two lines
        said = re.sub(r"at line 4: pass", "at line 3: while rank == 1:", said)
    on_page = "### " + SECTIONS[program.__name__].partition("\n## ")[0]
    assert on_page.rstrip() == hangs.section(program, said).rstrip(), "run `python examples/hangs.py --page`"


@pytest.mark.parametrize("name", list(EXPECTED))
def test_the_message_names_the_cause_and_the_line(name: str) -> None:
    cause, source = EXPECTED[name]
    message = re.search(r":class: message\n(.*?)```", SECTIONS[name], re.DOTALL)[1]
    first, *rest = message.splitlines()
    assert first == ("not done after 2 s" if name in NO_WAIT else
                     "the ranks wait for one another: nothing has moved for 0.5 s")
    assert any(cause in line for line in rest if line.startswith(("possible " if name in NO_WAIT else "") + "cause: "))
    assert re.search(rf"line \d+: .*{re.escape(source)}", message)
    assert ("computes" in message) == (name == "a_loop_that_never_ends")


def test_there_is_a_row_for_each_program() -> None:
    assert list(EXPECTED) == [program.__name__ for program in hangs.HANGS] == list(SECTIONS)
    assert len(EXPECTED) >= 41


@pytest.mark.parametrize("name", list(SECTIONS))
def test_each_rank_is_named_once_with_its_line_unless_it_has_returned(name: str) -> None:
    message = re.search(r":class: message\n(.*?)```", SECTIONS[name], re.DOTALL)[1]
    rows = re.findall(r"^  ranks? ([\d, ]+) (.*)", message, re.MULTILINE)
    assert sorted(int(rank) for who, _ in rows for rank in who.split(", ")) == list(range(hangs.NUM_RANKS))
    assert all(does == "finished" or re.search(r"^(waits?|computes) .*at line \d+: ", does) for _, does in rows)
