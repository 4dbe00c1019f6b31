"""Programs that end, or would, and are wrong, each for one reason; `faults.py` runs them.

The first line of a docstring says what is wrong, the rest what to do.
"""
from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator

import torch
import torch.distributed as dist
from faults_that_hang import Program, start
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, TensorDataset, random_split


class Lines(IterableDataset):  # type: ignore[type-arg]
    """A file's lines, say."""

    def __iter__(self) -> Iterator[float]:
        """All of them."""
        return iter([float(number) for number in range(12)])


# Replicas

def a_forward_past_the_wrapper() -> None:
    """The forward goes past DDP, to the model inside.

    DDP prepares its all-reduces in its own forward. Call the model that DDP returned. Without gradients, as in an
    evaluation on one rank, `model.module(x)` is right.
    """
    start()
    model = DistributedDataParallel(torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        model.module(torch.randn(8, 4)).pow(2).mean().backward()
        optimizer.step()


def a_head_after_wrapping() -> None:
    """A part of the model is replaced after DDP has wrapped it.

    DDP knows the parameters that it found when it wrapped the model. Change the model first.
    """
    start()
    layers = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 9))
    model = DistributedDataParallel(layers, find_unused_parameters=True)
    layers[1] = torch.nn.Linear(4, 1)  # a new task
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(8, 4)).pow(2).mean().backward()
        optimizer.step()


def one_loads_a_checkpoint() -> None:
    """One rank alone loads a checkpoint after DDP has wrapped the model.

    DDP copies rank 0's parameters when it wraps a model, and never again. Load before that, or on all ranks.
    """
    rank = start()
    model = DistributedDataParallel(torch.nn.Linear(4, 1))
    if rank == 0:
        saved = {"weight": torch.ones(1, 4), "bias": torch.zeros(1)}
        model.module.load_state_dict(saved)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(8, 4)).pow(2).mean().backward()
        optimizer.step()


def a_scheduler_with_each_rank_s_own_loss() -> None:
    """Each rank's scheduler looks at the rank's own loss.

    Give it a number that all ranks have alike: all-reduce the loss first.
    """
    rank = start()
    model = DistributedDataParallel(torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
    for step in range(5):
        optimizer.zero_grad()
        model(torch.randn(8, 4)).pow(2).mean().backward()
        optimizer.step()
        scheduler.step(float(step * (rank - 1)))  # say, the loss on this rank's share of the validation data


def gradients_of_models_that_differ() -> None:
    """Each rank makes a model of its own, and the program averages the gradients by itself.

    DDP copies rank 0's parameters to all ranks. Without DDP, broadcast them, or make the model with one seed.
    """
    rank = start()
    torch.manual_seed(rank)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(8, 4)).pow(2).mean().backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad, op=dist.ReduceOp.AVG)
        optimizer.step()


def copies_of_shards_that_each_rank_makes() -> None:
    """Each rank makes a model of its own, and FSDP keeps copies of the shards (HSDP).

    DDP copies rank 0's parameters to all ranks. `fully_shard` does not: use one seed, or load one state on all ranks.
    """
    rank = start()
    torch.manual_seed(rank)
    layer = torch.nn.Linear(6, 6)
    mesh = init_device_mesh("cpu", (3, 1), mesh_dim_names=("replicate", "shard"))
    fully_shard(layer, mesh=mesh)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    for _ in range(3):
        layer(torch.randn(2, 6)).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def an_optimizer_made_before_sharding() -> None:
    """The optimizer is made before the model is sharded.

    `fully_shard` puts new parameters in the place of the old ones. Shard first, and make the optimizer then.
    """
    start()
    layer = torch.nn.Linear(6, 6)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    fully_shard(layer)
    for _ in range(3):
        layer(torch.randn(2, 6)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


# Data and random numbers

def all_ranks_read_the_same() -> None:
    """Every rank's loader goes over all of the data, in the same order.

    Give each rank its share with a `DistributedSampler`.
    """
    start()
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(24, 4))
    model = DistributedDataParallel(torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, in DataLoader(data, batch_size=8, shuffle=True):
        optimizer.zero_grad()
        model(x).pow(2).mean().backward()
        optimizer.step()


def epochs_in_the_same_order() -> None:
    """Every epoch has the same batches, in the same order.

    A `DistributedSampler` shuffles with its seed and the number of the epoch, which it does not count itself: call
    `sampler.set_epoch(epoch)` before each.
    """
    start()
    data = TensorDataset(torch.randn(24, 4))
    loader = DataLoader(data, batch_size=4, sampler=DistributedSampler(data))
    model = DistributedDataParallel(torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        for x, in loader:
            optimizer.zero_grad()
            model(x).pow(2).mean().backward()
            optimizer.step()


def workers_that_read_the_same() -> None:
    """Each worker of a loader goes over all of an `IterableDataset`.

    Every worker has a copy of it. In `__iter__`, take the share of this rank, and of `get_worker_info().id` in it.
    """
    rank = start()
    for numbers in DataLoader(Lines(), batch_size=4, num_workers=2):
        if rank == 0:
            print(numbers.tolist())


def splits_that_differ() -> None:
    """Each rank splits the data by random numbers of its own.

    What one rank trains on, another one validates on. Pass `generator=torch.Generator().manual_seed(0)`.
    """
    start()
    random_split(range(100), [80, 20])  # type: ignore[arg-type]
    dist.barrier()


def masks_that_are_equal() -> None:
    """All ranks draw the same random numbers, and so the same dropout masks.

    Seed each rank differently once the model is made: DDP copies rank 0's parameters to all. (Ranks that share one
    replica, as in tensor parallelism, need the same masks: seed by the number of the replica.)
    """
    rank = start()
    torch.manual_seed(0)
    layers = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(), torch.nn.Linear(8, 1))
    model = DistributedDataParallel(layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        model(torch.full((8, 4), 1.0 + rank + step)).pow(2).mean().backward()
        optimizer.step()


# Tensors

def a_column_of_a_matrix() -> None:
    """A tensor whose elements do not lie one after the other is broadcast.

    gloo would read and write the memory behind its first element. Pass `x.contiguous()`.
    """
    start()
    matrix = torch.arange(6.0).reshape(2, 3)
    dist.broadcast(matrix[:, 0], src=0)


def a_message_of_another_type() -> None:
    """A message is received as another type than it was sent as.

    Messages are bytes. Agree on the type, or send it first.
    """
    rank = start()
    if rank == 0:
        dist.send(torch.tensor([1.0, 2.0]), dst=1)
    if rank == 1:
        dist.recv(torch.zeros(2, dtype=torch.int32), src=0)


def a_part_of_another_size() -> None:
    """A rank of an all-to-all expects another number of elements than is sent to it.

    Exchange the sizes first, by an all-to-all of one number for each rank.
    """
    rank = start()
    sizes = [2, 2, 2]
    expected = [3, 2, 2] if rank == 1 else sizes
    dist.all_to_all_single(torch.zeros(sum(expected)), torch.ones(6), expected, sizes)


def a_buffer_that_is_used_again() -> None:
    """A tensor is overwritten while it is being sent.

    Wait first, or take another tensor for the next message.
    """
    rank = start()
    buffer = torch.zeros(100_000)
    if rank == 0:
        requests = []
        for number in range(3):
            buffer.fill_(number)
            requests.append(dist.isend(buffer, dst=1))
        for request in requests:
            request.wait()
    if rank == 1:
        for _ in range(3):
            dist.recv(buffer, src=0)


def a_gradient_that_is_divided_too_early() -> None:
    """A tensor is divided while it is being added up.

    Wait first.
    """
    start()
    gradient = torch.ones(100_000)
    work = dist.all_reduce(gradient, async_op=True)
    gradient /= dist.get_world_size()
    work.wait()


def features_that_autograd_does_not_pass() -> None:
    """A loss uses what `all_gather` has gathered, and no gradient flows back through it.

    `torch.distributed.nn.functional.all_gather` sends the gradients back to the ranks that the features came from.
    """
    rank = start()
    model = DistributedDataParallel(torch.nn.Linear(4, 4))
    mine = model(torch.randn(2, 4))
    features = [torch.zeros(2, 4) for _ in range(3)]
    dist.all_gather(features, mine)
    features[rank] = mine
    every = torch.cat(features)
    (every @ every.T).logsumexp(1).mean().backward()


def a_loss_that_is_reduced_first() -> None:
    """The loss is all-reduced before backward, to average the gradients.

    It changes the number, and at best not the gradients: those are still of the rank's own loss. (A loss that ends in
    `sqrt` needs its value in backward, and gets the sum.) DDP averages gradients; all-reduce a copy of the loss if you
    want to show its mean.
    """
    start()
    layer = torch.nn.Linear(4, 1)
    loss = layer(torch.randn(8, 4)).pow(2).mean()
    dist.all_reduce(loss)
    loss.backward()


# Threads

def a_thread_in_the_same_group() -> None:
    """A second thread calls collectives of the group that the first one uses.

    Which of them comes first varies from rank to rank. Make a group for it with `new_group`, on all ranks.
    """
    rank = start()

    def save() -> None:
        time.sleep(0.1 if rank == 0 else 0.5)  # one disk is slower
        dist.all_reduce(torch.ones(2))

    saver = threading.Thread(target=save, name="saver")
    saver.start()
    for _ in range(6):
        dist.all_reduce(torch.ones(5))
        time.sleep(0.1)
    saver.join()


def an_error_in_a_thread() -> None:
    """A thread fails, and the main thread goes on.

    `join` does not raise what the thread has raised. A `ThreadPoolExecutor` keeps it: `future.result()` raises it.
    """
    start()
    saver = threading.Thread(target=lambda: os.remove("/no/such/file"), name="saver")
    saver.start()
    saver.join()


GROUPS: dict[str, list[Program]] = {
    "Replicas of a model": [
        a_forward_past_the_wrapper, a_head_after_wrapping, one_loads_a_checkpoint,
        a_scheduler_with_each_rank_s_own_loss, gradients_of_models_that_differ, copies_of_shards_that_each_rank_makes,
        an_optimizer_made_before_sharding,
    ],
    "Data and random numbers": [
        all_ranks_read_the_same, epochs_in_the_same_order, workers_that_read_the_same, splits_that_differ,
        masks_that_are_equal,
    ],
    "Tensors": [
        a_column_of_a_matrix, a_message_of_another_type, a_part_of_another_size, a_buffer_that_is_used_again,
        a_gradient_that_is_divided_too_early, features_that_autograd_does_not_pass, a_loss_that_is_reduced_first,
    ],
    "Threads": [a_thread_in_the_same_group, an_error_in_a_thread],
}
HELPERS = (Lines,)
