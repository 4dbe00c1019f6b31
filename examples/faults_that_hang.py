"""Programs that hang, or are refused before they do, each for one reason; `faults.py` runs them.

The first line of a docstring says what is wrong, the rest what to do.
"""
from __future__ import annotations

import contextlib
import ctypes
import fcntl
import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from queue import Queue

import torch
import torch.distributed as dist
import torch.distributed.checkpoint
from torch.distributed import rpc
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

Program = Callable[[], None]
LOCK, ALL_CALLS = threading.Lock(), threading.Barrier(3)


def start() -> int:
    """Join the group; returns the rank."""
    dist.init_process_group()
    return dist.get_rank()


def start_rpc(num_threads: int = 16) -> int:
    """Join the workers of RPC, each with threads for so many calls; returns the rank."""
    rank = start()
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=dist.get_world_size(),
                 rpc_backend_options=rpc.TensorPipeRpcBackendOptions(num_worker_threads=num_threads))
    return rank


def take_the_lock() -> None:
    """Called over RPC."""
    with LOCK:
        pass


def meet_the_others() -> None:
    """Called over RPC."""
    ALL_CALLS.wait()


@rpc.functions.async_execution
def promise() -> torch.futures.Future[int]:
    """Called over RPC."""
    return torch.futures.Future()


class TwoHeads(torch.nn.Module):
    """A model with two outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(4, 1), torch.nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The outputs of both heads."""
        return self.first(x), self.second(x)


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

    Give all ranks the same number of batches: a `DistributedSampler` pads, or drops with its `drop_last=True`. (That of
    the `DataLoader` drops a short batch, and leaves shares unequal.)
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


def batches_that_meet_an_all_reduce() -> None:
    """One rank has a batch fewer, and its next call meets DDP's own all-reduce.

    Give all ranks the same number of batches, or train inside `with model.join():`.
    """
    rank = start()
    model = DistributedDataParallel(torch.nn.Linear(4, 1))
    for _ in range(2 if rank == 1 else 3):
        model(torch.ones(2, 4)).sum().backward()
    dist.all_reduce(torch.ones(1))


def a_batch_that_is_skipped() -> None:
    """One rank catches an error in a batch, and goes on with the next.

    The others wait for it in that batch's backward. Let the error end the rank, or have the ranks agree on what to do.
    """
    rank = start()
    model = DistributedDataParallel(torch.nn.Linear(4, 1))
    for step in range(3):
        try:
            loss = model(torch.ones(2, 4)).sum()
            if rank == step == 1:
                raise MemoryError
            loss.backward()
        except MemoryError:
            continue


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
    dist.send(torch.ones(4), dst=(rank + 1) % 3)
    dist.recv(torch.ones(4), src=(rank - 1) % 3)


def all_send_and_receive_on_one_side() -> None:
    """Every rank receives from the rank that it sends to.

    In a ring, what goes to the right comes from the left.
    """
    rank = start()
    right = (rank + 1) % 3
    request = dist.isend(torch.ones(4), dst=right)
    dist.recv(torch.ones(4), src=right)
    request.wait()


def all_receive_first() -> None:
    """Every rank receives from its neighbour before it sends.

    Nothing has been sent yet. Let one rank send first.
    """
    rank = start()
    dist.recv(torch.ones(4), src=(rank - 1) % 3)
    dist.send(torch.ones(4), dst=(rank + 1) % 3)


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
    dist.barrier()
    if rank == 1:
        dist.recv(torch.ones(4), src=0)


def a_peer_that_has_returned() -> None:
    """The peer returns without sending.

    Check the peer's rank and the number of messages.
    """
    rank = start()
    if rank == 0:
        dist.recv(torch.ones(4), src=2)


def a_chain_of_receives() -> None:
    """Each rank waits for the next one, and the last one returns without sending.

    The first line of the message names the end of the chain. Begin there.
    """
    rank = start()
    if rank < 2:
        dist.recv(torch.ones(4), src=rank + 1)


def two_groups_in_two_orders() -> None:
    """Two groups with the same ranks are used in different orders.

    Call collectives of several groups in the same order on all ranks.
    """
    rank = start()
    groups = [dist.new_group(range(3)), dist.new_group(range(3))]
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

def a_loss_that_leaves_parameters_out() -> None:
    """One rank's loss does not use all parameters of a model under DDP.

    DDP all-reduces a bucket when all of its gradients are there. Use every parameter on every rank, or pass
    `find_unused_parameters=True`.
    """
    rank = start()
    model = DistributedDataParallel(TwoHeads())
    first, second = model(torch.ones(2, 4))
    loss = first.sum() if rank == 1 else first.sum() + second.sum()
    loss.backward()


def one_evaluates_a_ddp_model() -> None:
    """One rank alone evaluates a model under DDP.

    DDP's forward broadcasts buffers, such as those of batch norm. Evaluate on all ranks, or call `model.module` under
    `torch.no_grad()`: with gradients, it would train this rank alone.
    """
    rank = start()
    model = DistributedDataParallel(torch.nn.BatchNorm1d(4))
    if rank == 0:
        model(torch.ones(2, 4))
    dist.barrier()


def one_evaluates_a_sharded_model() -> None:
    """One rank alone evaluates a model whose parameters are sharded.

    Its forward gathers the parameters from all ranks, so all ranks must run it.
    """
    rank = start()
    model = fully_shard(torch.nn.Linear(4, 3), mesh=init_device_mesh("cpu", (3,)))
    if rank == 0:
        model(torch.ones(2, 4))


def one_saves_a_checkpoint() -> None:
    """One rank alone saves a distributed checkpoint.

    `save` is a collective: all ranks call it, and it decides who writes what.
    """
    rank = start()
    if rank == 0:
        with tempfile.TemporaryDirectory() as folder:
            dist.checkpoint.save({"weight": torch.ones(4)}, checkpoint_id=folder)


def a_group_that_one_rank_makes() -> None:
    """One rank alone makes a new group.

    All ranks of the world have to call `new_group`, in the same order, members or not.
    """
    rank = start()
    if rank == 0:
        dist.new_group([0, 1])


def a_group_that_one_rank_destroys() -> None:
    """One rank destroys a group that another one still uses.

    Make all calls of a group on all of its ranks, then destroy it.
    """
    rank = start()
    pair = dist.new_group([0, 1])
    if rank == 1:
        dist.destroy_process_group(pair)
    if rank == 0:
        dist.barrier(group=pair)
    dist.barrier()


def a_collective_for_the_log() -> None:
    """One rank alone gathers numbers for its log.

    Let all ranks call the collective, and one of them print the result.
    """
    rank = start()
    if rank == 0:
        losses = [None] * 3
        dist.all_gather_object(losses, 0.5)
        print(losses)


def losses_with_other_keys() -> None:
    """One rank's dict of losses has a key more, so its all-reduces pair up with those of other steps.

    The sums are wrong before anything hangs. Loop over the same keys, in the same order, on every rank.
    """
    rank = start()
    for _ in range(3):
        losses = {"class": torch.tensor(1.0), "box": torch.tensor(2.0)}
        if rank == 0:
            losses["accuracy"] = torch.tensor(0.5)
        for name in losses:
            dist.all_reduce(losses[name])


def a_validation_that_is_longer() -> None:
    """One rank's validation set has a batch more, so its calls pair up with those of other lines.

    Sum on each rank first, and all-reduce the sums once, after the loop.
    """
    rank = start()
    for _ in range(2):
        for _ in range(4 if rank == 1 else 3):
            correct = torch.tensor(1.0)
            dist.all_reduce(correct)
        loss = torch.tensor(1.0)
        dist.all_reduce(loss)


def an_error_that_is_swallowed() -> None:
    """One rank catches an error, and leaves out the collective that follows.

    Let the error end the rank, or have the ranks agree on what to do about it.
    """
    rank = start()
    with contextlib.suppress(ZeroDivisionError):
        mean = torch.tensor(1 / (rank - 1))
        dist.all_reduce(mean)


def an_asynchronous_collective() -> None:
    """A rank waits for an asynchronous collective that another rank does not call.

    The call returns at once, so the rank stands at the line with `wait`.
    """
    rank = start()
    if rank == 1:
        return
    work = dist.all_reduce(torch.ones(4), async_op=True)
    work.wait()


def one_message_too_few() -> None:
    """A rank receives more messages than its peer sends.

    Count the sends and the receives of both loops.
    """
    rank = start()
    if rank == 0:
        for _ in range(2):
            dist.send(torch.ones(4), dst=1)
    if rank == 1:
        for _ in range(3):
            dist.recv(torch.ones(4), src=0)
    dist.barrier()


def a_send_to_the_wrong_rank() -> None:
    """A rank sends to a rank that does not receive.

    Compare `dst` of the send with `src` of the receive.
    """
    rank = start()
    if rank == 0:
        dist.send(torch.ones(4), dst=2)
    if rank == 1:
        dist.recv(torch.ones(4), src=0)
    dist.barrier()


def a_message_in_another_group() -> None:
    """A message is sent in one group and received in another.

    Pass the same `group` on both sides.
    """
    rank = start()
    pair = dist.new_group([0, 1])
    if rank == 0:
        dist.send(torch.ones(4), dst=1, group=pair)
    if rank == 1:
        dist.recv(torch.ones(4), src=0)


def a_receive_from_anyone() -> None:
    """A rank receives from any rank, and none sends.

    `recv` without `src` takes the next message, whoever sends it.
    """
    rank = start()
    if rank == 0:
        dist.recv(torch.ones(4))


def requests_that_are_waited_for_too_early() -> None:
    """Each rank waits for its receive before it starts its send.

    Start both transfers first, then wait for both.
    """
    rank = start()
    incoming = dist.irecv(torch.ones(4), src=(rank - 1) % 3)
    incoming.wait()
    outgoing = dist.isend(torch.ones(4), dst=(rank + 1) % 3)
    outgoing.wait()


def a_pipeline_that_warms_up_too_long() -> None:
    """The last stage of a pipeline wants another input before it sends a gradient back.

    Compare the orders of both ranks: rank 0 sends the next input only after the first gradient.
    """
    rank = start()
    if rank == 0:
        for _ in range(2):
            dist.send(torch.ones(4), dst=1)
            dist.recv(torch.ones(4), src=1)
    if rank == 1:
        for _ in range(2):
            dist.recv(torch.ones(4), src=0)
        dist.send(torch.ones(4), dst=0)


def a_batch_without_its_other_half() -> None:
    """One rank's `batch_isend_irecv` has a receive that no other rank's list sends.

    Each `P2POp` needs its counterpart in the peer's list.
    """
    rank = start()
    operations = [dist.P2POp(dist.isend, torch.ones(4), (rank + 1) % 3),
                  dist.P2POp(dist.irecv, torch.ones(4), (rank - 1) % 3)]
    for request in dist.batch_isend_irecv(operations[:1] if rank == 0 else operations):
        request.wait()
    dist.barrier()


def calls_that_hold_a_lock() -> None:
    """Two ranks call each other over RPC, and each holds the lock that the other one's call needs.

    Release the lock before the call.
    """
    rank = start_rpc()
    if rank < 2:
        with LOCK:
            dist.barrier(dist.new_group([0, 1], use_local_synchronization=True))
            rpc.rpc_sync(f"worker{1 - rank}", take_the_lock)
    rpc.shutdown()


def a_call_to_oneself() -> None:
    """A rank calls itself over RPC, and holds the lock that the call needs.

    The call runs in another thread, which is not the one that holds the lock: `threading.RLock` does not help either.
    """
    rank = start_rpc()
    if rank == 0:
        with LOCK:
            rpc.rpc_sync("worker0", take_the_lock)
    rpc.shutdown()


def calls_that_take_all_threads() -> None:
    """A server's threads all wait for a call that finds no thread.

    A call must not wait for another call; `rpc.functions.async_execution` waits without a thread.
    """
    rank = start_rpc(num_threads=2)
    if rank == 0:
        calls = [rpc.rpc_async("worker1", meet_the_others) for _ in range(3)]
        torch.futures.wait_all(calls)
    rpc.shutdown()


def a_shutdown_that_is_forgotten() -> None:
    """One rank does not call `rpc.shutdown`.

    The others wait in it until all have called it.
    """
    rank = start_rpc()
    if rank != 1:
        rpc.shutdown()


def a_reply_that_is_never_set() -> None:
    """A function with `async_execution` returns a future that nobody sets.

    Whoever completes the round has to call `set_result`.
    """
    rank = start_rpc()
    if rank == 0:
        rpc.rpc_sync("worker1", promise)
    rpc.shutdown()


def a_queue_whose_items_are_never_done() -> None:
    """A rank waits until all items of a queue are done, and the thread that takes them does not say so.

    Call `task_done` once for each item.
    """
    rank = start()
    if rank == 0:
        queue: Queue[int] = Queue()
        queue.put(1)
        threading.Thread(target=queue.get, name="worker").start()
        queue.join()
    dist.barrier()


def a_pool_that_waits_for_itself() -> None:
    """A function in a pool waits for another one, for which the pool has no thread.

    A pool needs a thread for each function that waits, and one more.
    """
    rank = start()
    if rank == 0:
        with ThreadPoolExecutor(1, "pool") as pool:
            pool.submit(lambda: pool.submit(int).result()).result()
    dist.barrier()


def a_file_that_is_locked() -> None:
    """A rank holds the lock of a file while it waits for the ranks that want the lock.

    Release the lock before the barrier.
    """
    rank = start()
    with open(__file__) as file:
        if rank == 0:
            fcntl.flock(file, fcntl.LOCK_EX)
        dist.barrier()
        fcntl.flock(file, fcntl.LOCK_EX)
        dist.barrier()


def a_loop_that_never_ends() -> None:
    """A rank computes without end, and the others wait for it.

    The message comes at the time limit, since a long computation looks the same. The line is where the rank was then.
    """
    rank = start()
    while rank == 1:
        pass
    dist.barrier()


def a_call_that_keeps_the_interpreter() -> None:
    """A call into C keeps Python's interpreter lock, so no other thread of the rank runs.

    Release the lock in the extension, as `ctypes.CDLL` does and `ctypes.PyDLL` does not. If a job on gloo stops like
    this after its last step, with no extension of yours, it may have destroyed its group while a model in DDP was still
    there: [delete the model first](82_training_with_ddp.ipynb).
    """
    rank = start()
    if rank == 1:
        ctypes.PyDLL(None).pause()
    dist.barrier()



GROUPS: dict[str, list[Program]] = {
    "Collectives": [
        one_returns_early, one_leaves_the_loop_early, one_receives_instead, a_collective_for_the_log,
        losses_with_other_keys, a_validation_that_is_longer, an_error_that_is_swallowed, an_asynchronous_collective,
        one_saves_a_checkpoint,
    ],
    "Groups": [
        two_groups_in_two_orders, a_group_without_one_of_its_ranks, a_group_that_one_rank_makes,
        a_group_that_one_rank_destroys,
    ],
    "Sends and receives": [
        all_send_first, all_receive_first, all_send_and_receive_on_one_side, requests_that_are_waited_for_too_early,
        a_pipeline_that_warms_up_too_long, tags_that_differ, a_message_in_another_group, a_send_to_the_wrong_rank,
        one_message_too_few, a_receive_from_anyone, a_request_that_is_dropped, a_batch_without_its_other_half,
        a_peer_that_has_returned, a_chain_of_receives,
    ],
    "DDP and sharded models": [
        one_has_a_batch_fewer_under_ddp, batches_that_meet_an_all_reduce, a_batch_that_is_skipped,
        a_loss_that_leaves_parameters_out, one_evaluates_a_ddp_model, one_evaluates_a_sharded_model,
    ],
    "RPC": [
        calls_that_hold_a_lock, a_call_to_oneself, calls_that_take_all_threads, a_shutdown_that_is_forgotten,
        a_reply_that_is_never_set,
    ],
    "Locks, threads and queues": [
        a_lock_taken_twice, two_locks_in_two_orders, an_empty_queue, a_queue_whose_items_are_never_done,
        an_event_that_nobody_sets, a_thread_that_receives, a_future_that_is_not_done, a_pool_that_waits_for_itself,
    ],
    "The store, files and computations": [
        a_key_that_nobody_sets, a_file_that_is_locked, a_loop_that_never_ends, a_call_that_keeps_the_interpreter,
    ],
}

SHORT_TIMEOUT_S = {a_loop_that_never_ends: 2.0, a_call_that_keeps_the_interpreter: 2.0}
HELPERS = (take_the_lock, meet_the_others, promise, TwoHeads)  # shown above the programs that use them
