"""Pipelines over RPC on real ranks with different seeds: equal to one process, one replica of them or two."""
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.autograd as dist_autograd
from torch.distributed import rpc
from torch.distributed.optim import DistributedOptimizer

from book.launch import launch, rank_device
from book.parallel.model import GPT, GPTConfig
from book.parallel.remote import RemotePipeline, rpc_worker
from book.parallel.stage import GPTStage

CONFIG = GPTConfig(vocab_size=11, context=8, num_layers=4, num_heads=2, width=8, dtype=torch.float64)
BATCH, STEPS, LR, TOLERANCE = 8, 3, 0.5, 1e-12


def batch():
    generator = torch.Generator().manual_seed(5)
    return torch.randint(0, 11, (2, BATCH, 8), generator=generator)


def train(num_replicas, num_micro_batches):
    """On a driver: what its pipeline held before and after, the losses, the last gradients; stage outermost."""
    device = rank_device()
    dist.init_process_group()
    num_stages = dist.get_world_size() // num_replicas
    ranks = torch.arange(dist.get_world_size()).view(num_stages, num_replicas).tolist()
    with rpc_worker() as rank:
        if rank >= num_replicas:
            return None
        pipeline = RemotePipeline([f"worker{peers[rank]}" for peers in ranks], CONFIG,
                                  peers=ranks if num_replicas > 1 else None)
        before, losses = pipeline.state(), []
        optimizer = DistributedOptimizer(torch.optim.SGD, pipeline.parameter_rrefs(), lr=LR)
        inputs, targets = (t.chunk(num_replicas)[rank].to(device) for t in batch())
        for _ in range(STEPS):
            with dist_autograd.context() as context_id:
                loss = GPT.loss(pipeline(inputs, num_micro_batches), targets)
                dist_autograd.backward(context_id, [loss])
                optimizer.step(context_id)
                gradients = pipeline.gradients(context_id)
            losses.append(loss.item())
        return before, losses, gradients, pipeline.state()


def alone(state):
    """Losses, last gradients and final parameters of one process that starts from the pipeline's state."""
    model = GPT(CONFIG)
    model.load_state_dict(state)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    inputs, targets = batch()
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = GPT.loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, {name: p.grad for name, p in model.named_parameters()}, model.state_dict()


def apart(tensors, others):
    assert tensors.keys() == others.keys()
    return max((tensors[name] - others[name]).abs().max().item() for name in others)


@pytest.mark.parametrize("world_size, num_replicas, num_micro_batches", [(2, 1, 1), (3, 1, 3), (2, 1, 8), (4, 2, 2)])
def test_training_equals_one_process(world_size, num_replicas, num_micro_batches):
    run = launch(train, world_size, num_replicas, num_micro_batches)
    drivers = run[:num_replicas] if num_replicas > 1 else [run[0]]
    before = drivers[0][0]
    losses, gradients, state = alone(before)
    means = torch.tensor([driver[1] for driver in drivers], dtype=torch.float64).mean(0)
    assert (means - torch.tensor(losses, dtype=torch.float64)).abs().max() < TOLERANCE
    assert losses[-1] < losses[0]
    for driver in drivers:
        assert apart(driver[0], before) == 0.0
        assert apart(driver[2], gradients) < TOLERANCE
        assert apart(driver[3], state) < TOLERANCE
