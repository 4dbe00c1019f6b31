"""Data parallelism on real ranks with different seeds: equal to one process with the whole batch, and its traffic."""
import copy
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from book.collectives import parameter_server_all_reduce, ring_all_reduce
from book.cost import ring_sent_bytes, root_sent_bytes
from book.execute import execute
from book.launch import launch, rank_device
from book.parallel.data import BucketedDDP, broadcast_state
from book.record import follow_backward
from tests.by_value import sent_by_value

sent_by_value(__name__)

pytestmark = pytest.mark.slow


def make_model():
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.BatchNorm1d(8), nn.Linear(8, 5), nn.Tanh(), nn.Linear(5, 2))


def batch(num_examples):
    generator = torch.Generator().manual_seed(3)
    return torch.randn(num_examples, 6, generator=generator), torch.randn(num_examples, 2, generator=generator)


def train(bucket_bytes, steps):
    """How far this rank's weights are from those of one process after some steps of SGD, in float64."""
    device = rank_device()
    dist.init_process_group()
    rank, world_size = dist.get_rank(), dist.get_world_size()
    module = make_model().double().to(device)
    module[2].eval()  # its statistics depend on the share of the batch; its weights are trained
    module[0].bias.requires_grad_(False)
    parallel = BucketedDDP(module, bucket_bytes)
    alone = copy.deepcopy(module)
    x, y = (t.double().to(device) for t in batch(4 * world_size))
    share = slice(rank, None, world_size)
    for model, mine in ((parallel, share), (alone, slice(None))):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(steps):
            optimizer.zero_grad()
            F.mse_loss(model(x[mine]), y[mine]).backward()
            if model is parallel:
                model.finish()
            optimizer.step()
    return max((a - b).abs().max().item() for a, b in zip(module.parameters(), alone.parameters()))


@pytest.mark.parametrize("world_size", [
    pytest.param(1, marks=pytest.mark.full), 2, 3, pytest.param(4, marks=pytest.mark.full)])
@pytest.mark.parametrize("bucket_bytes", [
    pytest.param(1, marks=pytest.mark.full), 200, pytest.param(10**9, marks=pytest.mark.full)])
def test_training_equals_one_process(world_size, bucket_bytes):
    assert max(launch(train, world_size, bucket_bytes, 4)) < 1e-12


def refused(how):
    """The error that `BucketedDDP` raises for a backward that it can't average."""
    device = rank_device()
    dist.init_process_group()
    parallel = BucketedDDP(nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)]).to(device), bucket_bytes=0)
    first, second = parallel.module
    x = torch.ones(1, 2, device=device)
    try:
        if how == "unused":
            first(x).sum().backward()
        else:
            for _ in range(2):
                second(first(x)).sum().backward()
        parallel.finish()
    except RuntimeError as error:
        return str(error)
    return "nothing"


@pytest.mark.parametrize("how, words", [("unused", "got no gradient"), ("twice", "finish() after each backward")])
def test_a_backward_that_cannot_be_averaged_raises_an_error(how, words):
    for said in launch(refused, 2, how):
        assert words in said


def state_after_broadcast():
    device = rank_device()
    dist.init_process_group()
    module = make_model().to(device)
    module[2].running_mean += dist.get_rank()
    module[2].num_batches_tracked += dist.get_rank()
    before = copy.deepcopy(module.state_dict())
    broadcast_state(module)
    return {k: v.cpu() for k, v in before.items()}, {k: v.cpu() for k, v in module.state_dict().items()}


def test_every_rank_gets_the_parameters_and_buffers_of_rank_0():
    run = launch(state_after_broadcast, 3)
    wanted = run[0][0]
    assert any(not torch.equal(run[1][0][name], wanted[name]) for name in wanted)
    for _, after in run:
        assert all(torch.equal(after[name], wanted[name]) for name in wanted)


def followed(wrap):
    device = rank_device()
    dist.init_process_group()
    parallel = wrap(make_model().double().to(device))
    x, y = (t.double().to(device) for t in batch(8))
    for _ in range(3):
        parallel.zero_grad()
        loss = F.mse_loss(parallel(x), y)
        with follow_backward(parallel):
            loss.backward()
            if isinstance(parallel, BucketedDDP):
                parallel.finish()


def last_sent(trace):
    """The all-reduces of rank 0's last backward: bucket and bytes, in order."""
    sent = [(e.bucket, e.num_bytes) for e in trace.of_rank(0) if e.op == "all_reduce" and e.bucket is not None]
    return sent[max(i for i, (bucket, _) in enumerate(sent) if bucket == 0):]


@pytest.mark.parametrize("bucket_bytes", [1, 300])
def test_sends_the_same_bytes_as_torchs_ddp_in_the_same_order(bucket_bytes):
    ours = launch(followed, 2, partial(BucketedDDP, bucket_bytes=bucket_bytes), record=True).trace
    wrap = partial(DistributedDataParallel, bucket_cap_mb=bucket_bytes / 2**20)
    torchs = launch(followed, 2, wrap, record=True).trace
    assert sum(size for _, size in last_sent(ours)) == sum(size for _, size in last_sent(torchs))
    assert [bucket for bucket, _ in last_sent(ours)] == list(range(len(last_sent(ours))))


def ddp_on(schedule):
    device = rank_device()
    dist.init_process_group()
    world_size = dist.get_world_size()

    def reduce_bucket(state, bucket):
        flat = bucket.buffer()
        execute(schedule(world_size), flat)
        done = torch.futures.Future()
        done.set_result(flat / world_size)
        return done

    torch.manual_seed(0)
    module = nn.Linear(59, 4).double().to(device)  # 240 weights: every number of ranks up to 6 divides them
    parallel = DistributedDataParallel(module)
    parallel.register_comm_hook(None, reduce_bucket)
    x = torch.full((1, 59), float(dist.get_rank()), dtype=torch.float64, device=device)
    parallel(x).sum().backward()
    return module.weight.grad[0, 0].item()


@pytest.mark.parametrize("world_size", [
    pytest.param(2, marks=pytest.mark.full), 3, *(pytest.param(n, marks=pytest.mark.full) for n in (4, 5))])
def test_ddp_traffic_matches_the_formulas(world_size):
    num_bytes = 240 * 8
    ring = launch(ddp_on, world_size, ring_all_reduce, record=True)
    star = launch(ddp_on, world_size, parameter_server_all_reduce, record=True)
    assert list(ring) == list(star) == pytest.approx([(world_size - 1) / 2] * world_size)
    assert ring.trace.sent_bytes() == pytest.approx([ring_sent_bytes(world_size, num_bytes)] * world_size)
    root, *others = star.trace.sent_bytes()
    assert root == root_sent_bytes(world_size, num_bytes) and set(others) == {num_bytes}
