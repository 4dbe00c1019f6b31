"""Tensors that say what is wrong: their layout, the other side of a message, changes under way, gradients."""
import re
import threading
import time

import pytest
import torch
import torch.distributed as dist
import torch.distributed.nn.functional as differentiable
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from book.launch import RankError, launch

pytestmark = pytest.mark.slow


def start():
    dist.init_process_group("gloo")
    return dist.get_rank(), dist.get_world_size()


def seeded(wrapped=True):
    rank, size = start()
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    return rank, size, DistributedDataParallel(model) if wrapped else model, torch.randn(4, 4)


def gathered(tensor, size):
    every = [torch.zeros_like(tensor) for _ in range(size)]
    dist.all_gather(every, tensor)
    return every


# Layouts

def broadcast_column():
    start()
    dist.broadcast(torch.zeros(2, 3)[:, 0], 0)


def reduce_every_second():
    start()
    dist.all_reduce(torch.zeros(8)[::2])


def scatter_transposed():
    rank, size = start()
    dist.scatter(torch.zeros(3, 4), [torch.zeros(4, 3).t()] * size if rank == 0 else None, 0)


def reduce_scatter_into_a_column():
    start()
    dist.reduce_scatter(torch.zeros(4, 3)[:, 0], [torch.ones(4), torch.ones(4)])


def transposed_on_one_rank():
    rank, _ = start()
    square = torch.zeros(3, 3)
    dist.broadcast(square if rank else square.t(), 0)


def layouts_that_are_right():
    """Every operation that copies, or whose ranks agree: values are compared here."""
    rank, size = start()
    whole = torch.arange(12.0).reshape(3, 4)
    transposed = whole.clone().t()
    dist.all_reduce(transposed)
    assert torch.equal(transposed, size * whole.t())
    pictures = torch.ones(2, 3, 2, 2).contiguous(memory_format=torch.channels_last)
    dist.broadcast(pictures, 0)
    column, into = whole[:, 1], torch.zeros(3, 2 * size)
    every = [into[:, 2 * place] for place in range(size)]
    dist.all_gather(every, column)
    dist.gather(column, every if rank == 0 else None, 0)
    assert torch.equal(into[:, 0], column)
    dist.all_to_all(every, [column] * size)
    dist.all_gather_into_tensor(torch.zeros(2 * 3 * size)[::2], column)
    dist.reduce_scatter_tensor(into[:, 0], column.repeat(size))
    dist.reduce_scatter(torch.zeros(3), [column] * size)


# Messages

def other_dtype():
    rank, _ = start()
    if rank == 0:
        dist.send(torch.ones(4), 1)
    else:
        dist.recv(torch.zeros(4, dtype=torch.int32), 0)


def longer_than_its_tensor():
    rank, _ = start()
    for count in (4, 4, 6):
        if rank == 0:
            dist.isend(torch.ones(count), 1).wait()
        else:
            dist.irecv(torch.zeros(4), 0).wait()


def other_order():
    rank, _ = start()
    parts = [torch.zeros(3), torch.zeros(5)]
    if rank == 0:
        [request.wait() for request in [dist.isend(part, 1) for part in parts]]
    else:
        [request.wait() for request in [dist.irecv(part, 0) for part in reversed(parts)]]


def shorter_than_its_tensor():
    rank, _ = start()
    if rank == 0:
        dist.send(torch.ones(3), 1)
    else:
        dist.recv(torch.zeros(2, 2), 0)


def from_any_rank_with_another_dtype():
    rank, _ = start()
    if rank == 0:
        dist.recv(torch.zeros(4))
    else:
        dist.send(torch.ones(4, dtype=torch.int32), 0)


def messages_that_are_right():
    rank, _ = start()
    sent = [torch.ones(2, 3), torch.ones(4).view(torch.uint8), torch.ones(2, dtype=torch.complex64)]
    received = [torch.zeros(6), torch.zeros(4), torch.zeros(2, 2)]
    for out, into in zip(sent, received):
        dist.send(out, 1) if rank == 0 else dist.recv(into, 0)
    objects = ["a", {}]
    dist.send_object_list(objects, 1) if rank == 0 else dist.recv_object_list(objects, 0)
    for count in (1, 2, 3):  # from any rank, and then from a certain one: which is which is not known
        dist.send(torch.ones(count), 1) if rank == 0 else dist.recv(torch.zeros(count), *[0] * (count % 2))
    if rank == 0:
        dist.send(torch.ones(7), 1, tag=6)
        dist.send(torch.ones(2), 1, tag=5)
    else:
        later = dist.irecv(torch.zeros(2), 0, tag=5)
        dist.recv(torch.zeros(7), 0, tag=6)
        later.wait()
    many = [torch.ones(count) for count in range(1, 100)]
    requests = [(dist.isend if rank == 0 else dist.irecv)(each, 1 - rank) for each in many]
    [request.wait() for request in requests]


# Parts

def splits():
    rank, _ = start()
    send, receive = [[4, 2], [1, 5]][rank], [[4, 1], [3, 5]][rank]
    dist.all_to_all_single(torch.zeros(sum(receive)), torch.zeros(sum(send)), receive, send)


def splits_that_are_right():
    """Rows by rank, and equal parts that one rank names and the other does not."""
    rank, _ = start()
    send, receive = [[4, 2], [0, 5]][rank], [[4, 0], [2, 5]][rank]
    dist.all_to_all_single(torch.zeros(sum(receive), 3), torch.zeros(sum(send), 3), receive, send)
    dist.all_to_all_single(torch.zeros(4), torch.zeros(4), [2, 2] if rank else None)
    dist.all_to_all_single(torch.tensor(1.0), torch.tensor(2.0))  # without dimensions


# Changed under way

def buffer_reused():
    rank, _ = start()
    buffer, requests = torch.zeros(1000), []
    for number in range(3):
        if rank == 0:
            buffer.fill_(number)
            requests.append(dist.isend(buffer, 1))
        else:
            dist.recv(buffer, 0)
    [request.wait() for request in requests]


def added_to_in_a_ring():
    rank, size = start()
    mine, other = torch.ones(1000), torch.zeros(1000)
    request = dist.isend(mine, (rank + 1) % size)
    dist.recv(other, (rank - 1) % size)
    mine += other
    request.wait()


def sent_slice_overwritten():
    rank, _ = start()
    buffer = torch.zeros(8)
    if rank == 0:
        request = dist.isend(buffer[:4], 1)
        buffer.fill_(3)
        request.wait()
    else:
        dist.recv(buffer[:4], 0)


def zeroed_while_it_is_received():
    rank, _ = start()
    x = torch.ones(4)
    if rank == 0:
        dist.send(x, 1)
    else:
        request = dist.irecv(x, 0)
        x.zero_()
        request.wait()


def divided_before_the_sum():
    _, size = start()
    gradient = torch.ones(4)
    request = dist.all_reduce(gradient, async_op=True)
    gradient /= size
    request.wait()


def other_slices():
    rank, _ = start()
    buffer, requests = torch.zeros(12), []
    for part in buffer.view(3, 4):
        part.fill_(1)
        requests.append((dist.isend if rank == 0 else dist.irecv)(part, 1 - rank))
    [request.wait() for request in requests]


def changed_after_an_answer():
    rank, _ = start()
    x, answer = torch.ones(4), torch.zeros(1)
    for _ in range(10):
        if rank == 0:
            request = dist.isend(x, 1)
            dist.recv(answer, 1)
            x += 1
            request.wait()
        else:
            dist.recv(x, 0)
            dist.send(answer, 0)


def changed_after_a_round():
    """That the token is back says that the next rank has it."""
    rank, size = start()
    token = torch.zeros(1)
    for _ in range(5):
        if rank == 0:
            request, back = dist.isend(token, 1), torch.zeros(1)
            dist.recv(back, size - 1)
            token += 1
            request.wait()
        else:
            dist.recv(token, rank - 1)
            dist.send(token, (rank + 1) % size)


def changed_after_a_barrier():
    rank, _ = start()
    x = torch.ones(4)
    for _ in range(5):
        request = dist.isend(x, 1) if rank == 0 else None
        if rank == 1:
            dist.recv(x, 0)
        dist.barrier()
        x += 1
        if request:
            request.wait()


def two_buffers_by_turns():
    rank, _ = start()
    buffers, under_way = [torch.zeros(4), torch.zeros(4)], {}
    for step in range(6):
        place = step % 2
        if rank == 0:
            if place in under_way:
                under_way[place].wait()
            buffers[place].fill_(step)
            under_way[place] = dist.isend(buffers[place], 1)
        else:
            dist.recv(buffers[place], 0)
    [request.wait() for request in under_way.values()]


def sums_begun_in_hooks():
    _, size, model, x = seeded(wrapped=False)
    under_way = []
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(
            lambda parameter: under_way.append((parameter, dist.all_reduce(parameter.grad, async_op=True))))
    for _ in range(2):
        model.zero_grad()
        model(x).sum().backward()
        while under_way:
            parameter, request = under_way.pop()
            request.wait()
            parameter.grad /= size


# Threads

def saver_beside(count, size):
    rank, _ = start()
    begins = threading.Event()

    def save():
        begins.wait()
        dist.all_reduce(torch.ones(count))

    saver = threading.Thread(target=save, name="saver")
    saver.start()
    for step in range(6):
        dist.all_reduce(torch.ones(size))
        if step == (1 if rank == 0 else 4):
            begins.set()
        time.sleep(0.1)  # its call comes before the next one of this thread
    saver.join()


def in_turn():
    rank, _ = start()
    dist.all_reduce(torch.ones(1))
    begun, ends = [], threading.Event()
    for work in (lambda: dist.all_reduce(torch.ones(2)),
                 lambda: begun.append(dist.all_reduce(torch.ones(3), async_op=True))):
        thread = threading.Thread(target=work, name=f"of rank {rank}")
        thread.start()
        thread.join()
        if rank == 0:  # it gets the identifier of the thread that has ended
            threading.Thread(target=ends.wait).start()
    dist.barrier()
    begun[0].wait()
    ends.set()


def with_a_group_of_its_own():
    rank, _ = start()
    group = dist.new_group()

    def save():
        for _ in range(5):
            time.sleep(0.02 * rank)
            dist.all_reduce(torch.ones(2), group=group)

    thread = threading.Thread(target=save)
    thread.start()
    for _ in range(5):
        dist.all_reduce(torch.ones(3))
    thread.join()


# Gradients

def reduced_loss(wrapped):
    _, size, model, x = seeded(wrapped)
    loss = model(x).square().mean()
    dist.all_reduce(loss)
    loss = loss / size
    loss.backward()


def own_part_put_back():
    rank, size, model, x = seeded()
    mine = model(x)
    every = gathered(mine, size)
    every[rank] = mine
    features = torch.cat(every)
    (features @ features.T).logsumexp(1).mean().backward()


def own_part_written_back():
    rank, size, model, x = seeded()
    mine = model(x)
    features = torch.cat(gathered(mine, size))
    features[4 * rank:4 * rank + 4] = mine
    (features @ features.T).logsumexp(1).mean().backward()


def peers_as_keys():
    rank, size, model, x = seeded()
    mine = model(x)
    keys = F.normalize(torch.cat(gathered(mine, size)))
    F.cross_entropy(F.normalize(mine) @ keys.T, torch.arange(4) + 4 * rank).backward()


def nothing_but_the_gathered():
    _, size, model, x = seeded()
    features = torch.cat(gathered(model(x), size))
    (features @ features.T).mean().backward()


def mean_over_ranks():
    _, size, model, x = seeded()
    outputs = model(x)
    mean = outputs.mean(0)
    dist.all_reduce(mean)
    (outputs - mean / size).square().sum().backward()


def losses_that_are_right():
    """For the log: of a copy, after backward, and without gradients."""
    rank, size, model, x = seeded()
    for log in ("detached", "copied", "afterwards", "metric"):
        outputs = model(x)
        loss = outputs.square().mean()
        if log in ("detached", "copied"):
            dist.all_reduce(loss.detach().clone() if log == "detached" else loss.clone())
        if log == "metric":
            torch.cat(gathered(outputs, size)).argmax(1)
        loss.backward()
        if log == "afterwards":
            dist.all_reduce(loss)
    with torch.no_grad():
        keys = torch.cat(gathered(model.module(x), size))
    (model(x) @ keys.T).logsumexp(1).mean().backward()


def gathered_and_scaled():
    """Every rank has the same loss, and DDP's mean of the parts' gradients is made a sum."""
    rank, size, model, x = seeded()
    mine = model(x)
    every = gathered(mine, size)
    every[rank] = mine
    features = torch.cat(every)
    ((features @ features.T).logsumexp(1).mean() * size).backward()


def differentiable_ones():
    _, _, model, x = seeded(wrapped=False)
    features = torch.cat(differentiable.all_gather(model(x)))
    differentiable.all_reduce((features @ features.T).mean()).backward()


class Summed(torch.autograd.Function):
    @staticmethod
    def forward(context, x):
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(context, gradient):
        return gradient


def parts_of_a_model():
    """A map that is cut by rows: the sum needs no more than the identity backward."""
    _, _, model, x = seeded(wrapped=False)
    Summed.apply(model(x)).square().mean().backward()
    partial = F.linear(x, model.weight)
    dist.all_reduce(partial)
    partial.sum().backward()


def gradients_by_hand():
    _, size, model, x = seeded(wrapped=False)
    for parameter in model.parameters():
        dist.broadcast(parameter.data, 0)
    loss = model(x).square().mean()
    loss.backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= size
    norm = sum(parameter.grad.square().sum() for parameter in model.parameters())
    dist.all_reduce(norm)
    with torch.no_grad():
        for parameter in model.parameters():
            dist.all_reduce(parameter)


@pytest.mark.parametrize(("program", "said"), [
    (broadcast_column, "not contiguous (shape [2], strides [3]), and gloo takes its memory as it lies"),
    (reduce_every_second, "the tensor of all_reduce is not contiguous"),
    (scatter_transposed, "the tensor of scatter is not contiguous"),
    (reduce_scatter_into_a_column, "the tensor of reduce_scatter is not contiguous"),
    (other_dtype, "rank 0 sends float32 [4] to rank 1 at test_audit_tensors.py"),
    (other_dtype, "rank 1 receives int32 [4] from rank 0 at test_audit_tensors.py"),
    (other_order, "the number of elements must be the same on both sides"),
    (longer_than_its_tensor, "rank 0 sends float32 [6] to rank 1"),
    (from_any_rank_with_another_dtype, "the dtype must be the same on both sides"),
    (splits, "rank 0 sends 2 to rank 1, rank 1 expects 3"),
    (nothing_but_the_gathered, "also: there is nothing for backward at test_audit_tensors.py"),
])
def test_what_can_not_be_right_is_refused(program, said):
    with pytest.raises(RankError) as caught:
        launch(program, 2)
    assert said in str(caught.value)


@pytest.mark.parametrize(("program", "size", "said"), [
    (transposed_on_one_rank, 2, "the tensor of rank 0 fills its memory in another order"),
    (shorter_than_its_tensor, 2, "the last 1 element of that tensor stayed as before"),
    (buffer_reused, 2, "the tensor of isend at test_audit_tensors.py"),
    (added_to_in_a_ring, 2, "the receiver gets either value"),
    (added_to_in_a_ring, 3, "the receiver gets either value"),
    (sent_slice_overwritten, 2, "the receiver gets either value"),
    (zeroed_while_it_is_received, 2, "the tensor of irecv at test_audit_tensors.py"),
    (divided_before_the_sum, 2, "the tensor of all_reduce at test_audit_tensors.py"),
    (own_part_put_back, 2, "no gradient flows back to the peers"),
    (own_part_written_back, 2, "no gradient flows back to the peers"),
    (peers_as_keys, 2, "no gradient flows back to the peers"),
    (mean_over_ranks, 2, "call torch.distributed.nn.functional.all_reduce"),
])
def test_what_is_wrong_although_the_run_ended_is_said(program, size, said):
    (finding,) = launch(program, size).findings
    assert said in finding


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_loss_that_is_reduced_before_backward_has_the_gradient_of_the_own_one(wrapped):
    (finding,) = launch(reduced_loss, 2, wrapped).findings
    assert "the gradient is at best that of the rank's own loss" in finding and "all_reduce loss.detach()" in finding


def test_two_threads_of_a_group_are_named():
    (finding,) = launch(saver_beside, 2, 5, 5).findings  # sums of what does not belong together
    with pytest.raises(RankError) as caught:
        launch(saver_beside, 2, 2, 5)
    for said in (finding, str(caught.value)):
        # The call of either rank may meet one of its main thread.
        assert re.search("rank [01]'s thread 'saver' calls all_reduce at ", said)
        assert "a second thread needs a group of its" in said


@pytest.mark.parametrize(("program", "size"), [
    (layouts_that_are_right, 2), (messages_that_are_right, 2), (splits_that_are_right, 2), (other_slices, 2),
    (changed_after_an_answer, 2), (changed_after_a_round, 3), (changed_after_a_barrier, 3), (two_buffers_by_turns, 2),
    (sums_begun_in_hooks, 2), (in_turn, 2), (with_a_group_of_its_own, 2), (losses_that_are_right, 2),
    (gathered_and_scaled, 2), (differentiable_ones, 2), (parts_of_a_model, 2), (gradients_by_hand, 2),
])
def test_nothing_is_said_of_a_right_program(program, size):
    assert launch(program, size).findings == []


def test_a_received_message_has_its_own_bytes_and_not_those_of_its_tensor():
    trace = launch(shorter_than_its_tensor, 2, record=True).trace
    assert {event.num_bytes for event in trace.events if event.kind in ("send", "recv")} == {12.0}


def changed_after_many_futures():
    start()
    for _ in range(1100):
        dist.all_reduce(torch.ones(2), async_op=True).get_future().wait()
    x = torch.ones(2)
    work = dist.all_reduce(x, async_op=True)
    x /= 2
    work.wait()


@pytest.mark.slow
def test_futures_that_the_program_waits_for_fill_no_list():
    (finding,) = launch(changed_after_many_futures, 2).findings
    assert "was changed before its wait()" in finding
