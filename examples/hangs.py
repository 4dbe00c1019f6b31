"""Programs that hang, each for one reason, and what `book.launch` says of each.

    python examples/hangs.py            lists them
    python examples/hangs.py NAME       runs one, and prints the message
    python examples/hangs.py --page     runs all, and writes the page "When it hangs" of the book

The first line of a docstring says what is wrong, the rest what to do.
"""
from __future__ import annotations

import argparse
import contextlib
import inspect
import io
import re
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import Queue

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from book.launch import HangError, launch

PAGE = Path(__file__).parents[1] / "chapters" / "95_when_it_hangs.md"
NUM_RANKS, HANG_S = 4, 1.0
Program = Callable[[], None]


def start() -> int:
    """Join the group; returns the rank."""
    dist.init_process_group()
    return dist.get_rank()


def one_returns_early() -> None:
    """One rank returns before a collective.

    Have every rank of the group make the call, or leave that rank out of the group with `new_group`.
    """
    rank = start()
    if rank == 2:
        return
    dist.barrier()


def one_leaves_the_loop_early() -> None:
    """One rank runs one iteration fewer: its share of the data is smaller.

    Give all ranks the same number of batches: `drop_last=True`, or a sampler that pads.
    """
    rank = start()
    for _ in range(2 if rank == 1 else 3):
        dist.all_reduce(torch.ones(4))


def one_has_a_batch_fewer_under_ddp() -> None:
    """One rank runs one iteration fewer, and DDP's own all-reduce waits for it.

    Give all ranks the same number of batches, or train inside `with model.join():`.
    """
    rank = start()
    model = DistributedDataParallel(torch.nn.Linear(4, 1))
    for _ in range(2 if rank == 1 else 3):
        model(torch.ones(2, 4)).sum().backward()


def one_receives_instead() -> None:
    """One rank is at another call.

    Look at the two lines: the ranks took different branches.
    """
    rank = start()
    if rank == 1:
        dist.recv(torch.ones(4), src=0)
    dist.all_reduce(torch.ones(4))


def all_send_first() -> None:
    """Every rank sends to its neighbour before it receives.

    `send` may wait until the peer receives. Let one rank receive first, or use `isend` or `batch_isend_irecv`.
    """
    rank = start()
    dist.send(torch.ones(4), dst=(rank + 1) % 4)
    dist.recv(torch.ones(4), src=(rank - 1) % 4)


def all_receive_first() -> None:
    """Every rank receives from its neighbour before it sends.

    Nothing has been sent yet. Let one rank send first.
    """
    rank = start()
    dist.recv(torch.ones(4), src=(rank - 1) % 4)
    dist.send(torch.ones(4), dst=(rank + 1) % 4)


def tags_that_differ() -> None:
    """The sender and the receiver use different tags.

    A message is only received by a call with the same tag and group.
    """
    rank = start()
    if rank == 0:
        dist.send(torch.ones(4), dst=1, tag=1)
    if rank == 1:
        dist.recv(torch.ones(4), src=0, tag=2)


def a_request_that_is_dropped() -> None:
    """A rank does not keep what `isend` returned.

    A request that nobody refers to is deleted, and its message with it. Keep the request, and call `wait()` on it.
    """
    rank = start()
    if rank == 0:
        dist.isend(torch.ones(4), dst=1)
    if rank == 1:
        dist.recv(torch.ones(4), src=0)
    dist.barrier()


def a_peer_that_has_returned() -> None:
    """The peer returns without sending.

    Check the peer's rank and the number of messages.
    """
    rank = start()
    if rank == 0:
        dist.recv(torch.ones(4), src=3)


def a_chain_of_receives() -> None:
    """Each rank waits for the next one, and the last one returns without sending.

    The first line of the message names the end of the chain. Begin there.
    """
    rank = start()
    if rank < 3:
        dist.recv(torch.ones(4), src=rank + 1)


def two_groups_in_two_orders() -> None:
    """Two groups with the same ranks are used in different orders.

    Call collectives of several groups in the same order on all ranks.
    """
    rank = start()
    groups = [dist.new_group(range(4)), dist.new_group(range(4))]
    for group in groups if rank == 0 else reversed(groups):
        dist.all_reduce(torch.ones(4), group=group)


def a_group_without_one_of_its_ranks() -> None:
    """A rank of a subgroup does not make the subgroup's call.

    Every rank of the group has to make it; the other ranks must not.
    """
    rank = start()
    pair = dist.new_group([0, 2])
    if rank == 0:
        dist.all_reduce(torch.ones(4), group=pair)


def a_lock_taken_twice() -> None:
    """A thread waits for a lock that it holds itself.

    Release it first, or use `threading.RLock`.
    """
    rank = start()
    lock = threading.Lock()
    if rank == 0:
        lock.acquire()
        with lock:
            pass
    dist.barrier()


def two_locks_in_two_orders() -> None:
    """Two threads of one rank hold a lock each and wait for the other one.

    Take locks in the same order in all threads.
    """
    rank = start()
    first, second, both = threading.Lock(), threading.Lock(), threading.Barrier(2)

    def take(one: threading.Lock, other: threading.Lock) -> None:
        with one:
            both.wait()
            with other:
                pass

    if rank == 0:
        threads = [threading.Thread(target=take, args=(first, second), name="A"),
                   threading.Thread(target=take, args=(second, first), name="B")]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    dist.barrier()


def an_empty_queue() -> None:
    """A rank waits for an item that nobody puts into its queue.

    The thread that should put it has ended, or was never started.
    """
    rank = start()
    if rank == 0:
        Queue().get()
    dist.barrier()


def an_event_that_nobody_sets() -> None:
    """A rank waits for an event that nobody sets.

    Ranks share no memory: an event that another rank sets is another object.
    """
    rank = start()
    if rank == 0:
        threading.Event().wait()
    dist.barrier()


def a_thread_that_receives() -> None:
    """A rank joins a thread of its own, which waits for another rank.

    The cause is what the thread waits for, not the `join`.
    """
    rank = start()

    def receive() -> None:
        dist.recv(torch.ones(4), src=1)

    if rank == 0:
        thread = threading.Thread(target=receive, name="receiver")
        thread.start()
        thread.join()


def a_future_that_is_not_done() -> None:
    """A rank waits for the result of a function in a pool, which waits for another rank.

    The cause is what the function waits for, not `result`.
    """
    rank = start()

    def receive() -> None:
        dist.recv(torch.ones(4), src=1)

    if rank == 0:
        with ThreadPoolExecutor(1, "pool") as pool:
            pool.submit(receive).result()
    dist.barrier()


def a_key_that_nobody_sets() -> None:
    """A rank waits for a key of the store that no rank sets.

    Compare the key's name with the one that is set. The store gives up after its timeout, by default minutes.
    """
    rank = start()
    if rank == 0:
        store = dist.distributed_c10d._get_default_store()
        store.get("never set")
    dist.barrier()


HANGS: list[Program] = [
    one_returns_early, one_leaves_the_loop_early, one_has_a_batch_fewer_under_ddp, one_receives_instead, all_send_first,
    all_receive_first, tags_that_differ, a_request_that_is_dropped, a_peer_that_has_returned, a_chain_of_receives,
    two_groups_in_two_orders, a_group_without_one_of_its_ranks, a_lock_taken_twice, two_locks_in_two_orders,
    an_empty_queue, an_event_that_nobody_sets, a_thread_that_receives, a_future_that_is_not_done,
    a_key_that_nobody_sets,
]


def message(program: Program) -> str:
    """What `launch` says of a program that hangs; line numbers count from the program's `def`."""
    lines, first = inspect.getsourcelines(program)
    shift = first + len(lines) - len(listing(program).splitlines()) - 1
    with contextlib.redirect_stdout(io.StringIO()):
        try:
            launch(program, NUM_RANKS, hang_s=HANG_S, timeout_s=60)
        except HangError as error:
            return re.sub(r"\bhangs\.py line (\d+)", lambda place: f"line {int(place[1]) - shift}", str(error))
    raise AssertionError(f"{program.__name__} does not hang")


def listing(program: Program) -> str:
    """A program's code without its docstring."""
    return re.sub(r'\n +""".*?"""', "", inspect.getsource(program), count=1, flags=re.DOTALL).rstrip()


HEAD = """# When it hangs

Each program on this page hangs, for one reason. Below it stands what `launch` says of it: the cause, then where each
rank is. Find the message that looks like yours. Lines are counted from the program's `def`. The programs are in
`examples/hangs.py`: `python examples/hangs.py one_returns_early` runs one of them.

`launch` reports a hang when all ranks have waited for `hang_s` seconds (here 1). A wait that may end by itself is
reported at the time limit, `timeout_s`: a wait with a time limit of its own, or one for another process, as in a
`DataLoader` with workers.

"""
TAIL = """
## A job that `launch` did not start

`torchrun` does not report a hang. Two calls do:

```python
dist.init_process_group(timeout=timedelta(seconds=60))
for batch in loader:
    faulthandler.dump_traceback_later(120, exit=True)  # restarts the clock in each step
    ...
```

With the `timeout`, a gloo call that has waited for a minute raises an error; the default is 30 minutes, with NCCL 10.
If a step takes longer than two minutes, the rank prints the lines that all its threads are at, and ends.
"""


def section(program: Program, said: str) -> str:
    """A program's part of the page."""
    head, _, advice = inspect.cleandoc(program.__doc__ or "").partition("\n\n")
    return (f"## {head.rstrip('.')}\n\n{advice}\n\n"
            f"```{{code-block}} python\n:linenos:\n{listing(program)}\n```\n\n"
            f"```{{code-block}} text\n:class: message\n{said}\n```\n")


def main() -> None:
    """Run the command line."""
    names = {program.__name__: program for program in HANGS}
    parser = argparse.ArgumentParser(description="Programs that hang, and what book.launch says of them.")
    parser.add_argument("name", nargs="?", choices=names, metavar="NAME", help="run this program")
    parser.add_argument("--page", action="store_true", help="run all programs, and write the book's page")
    options = parser.parse_args()
    if options.page:
        PAGE.write_text(HEAD + "\n".join(section(program, message(program)) for program in HANGS) + TAIL, "utf-8")
    elif options.name:
        print(message(names[options.name]))
    else:
        print("\n".join(names))


if __name__ == "__main__":
    main()
