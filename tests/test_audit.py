"""The audit of a run: it names what parts replicas and which data ranks share, and is silent where all is right."""
import copy
import io
import random
import subprocess
import sys
import threading
from contextlib import nullcontext
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.optimizer import _global_optimizer_post_hooks
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, TensorDataset, random_split

from book import audit, tap
from book.audit import digests
from book.launch import HangError, launch


def start(same_seed=False):
    dist.init_process_group()
    if same_seed:
        torch.manual_seed(0)
    return dist.get_rank()


def mlp(*more):
    return nn.Sequential(nn.Linear(6, 8), *more, nn.ReLU(), nn.Linear(8, 2))


def replica(same_seed=False):
    """A small model in DDP, and its optimizer."""
    start(same_seed)
    model = DDP(mlp())
    return model, torch.optim.SGD(model.parameters(), lr=0.01)


def step(model, optimizer, inputs=None, call=None, before=lambda: None):
    """One step of training, with `call` in the place of the model and `before` called before the optimizer."""
    optimizer.zero_grad()
    (call or model)(torch.randn(4, 6) if inputs is None else inputs).pow(2).mean().backward()
    before()
    optimizer.step()


def trained(model, steps=5, optimizer=None, **options):
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        step(model, optimizer, **options)


# What parts replicas, with what is to be said of it

def past_the_wrapper():
    start()
    model = DDP(mlp())
    trained(model, call=model.module)


def the_inner_model_by_its_name():
    start()
    net = mlp()
    model = DDP(net)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for k in range(6):
        step(model, optimizer, call=model if k < 2 else net)


class Coder(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(6, 6)

    def encode(self, x):
        return self.inner(x)

    def forward(self, x):
        return self.encode(x)


def a_method_of_the_inner_model():
    start()
    model = DDP(Coder())
    trained(model, call=lambda x: model.module.encode(x))


def frozen_then_unfrozen():
    start()
    net = mlp()
    net[0].requires_grad_(False)
    model = DDP(net, find_unused_parameters=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for k in range(6):
        if k == 3:
            net[0].requires_grad_(True)
        step(model, optimizer)


class LoRA(nn.Module):
    def __init__(self, base):
        super().__init__()
        self.base, self.down, self.up = base, nn.Parameter(torch.zeros(6, 2)), nn.Parameter(torch.ones(2, 8))

    def forward(self, x):
        return self.base(x) + x @ self.down @ self.up


def adapters_added_after_wrapping():
    start()
    net = mlp()
    for name, each in net.named_parameters():
        each.requires_grad_(name == "2.bias")
    model = DDP(net)
    net[0] = LoRA(net[0])
    trained(model, optimizer=torch.optim.SGD([each for each in model.parameters() if each.requires_grad], lr=0.1))


def initialised_after_wrapping():
    start()
    model = DDP(mlp())
    model.apply(lambda each: nn.init.normal_(each.weight) if isinstance(each, nn.Linear) else None)
    trained(model)


def layers_in_an_order_of_each_rank():
    names = ["key", "value"][::1 - 2 * start()]
    model = nn.Sequential()
    for name in names:
        model.add_module(name, nn.Linear(6, 6))
    DDP(model)(torch.randn(4, 6)).sum().backward()


def not_made_equal():
    start()
    trained(DDP(mlp(), init_sync=False))


def a_hook_that_does_not_average():
    def leaves(state, bucket):
        future = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    start()
    model = DDP(mlp())
    model.register_comm_hook(None, leaves)
    trained(model)


def only_some_parameters_are_optimized():
    rank = start()
    model = DDP(mlp())
    trained(model, optimizer=torch.optim.SGD((model.module[2] if rank else model).parameters(), lr=0.1))


def a_scheduler_by_a_local_loss():
    rank = start()
    model = DDP(mlp())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=2)
    for k in range(12):
        step(model, optimizer)
        scheduler.step(1.0 if rank else 1.0 / (k + 1))


def clipping_by_a_local_norm():
    rank = start()
    model = DDP(mlp())
    trained(model, before=lambda: nn.utils.clip_grad_norm_(model.parameters(), 0.01 * (rank + 1)))


def gradients_scaled_by_a_local_number():
    rank = start()
    model = DDP(mlp())

    def scale():
        for each in model.parameters():
            each.grad /= rank + 1

    trained(model, before=scale)


def a_step_in_a_hook():
    start()
    model = DDP(nn.Linear(6, 1, bias=False))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.module.weight.register_post_accumulate_grad_hook(lambda _: optimizer.step())
    for _ in range(3):
        model(torch.randn(4, 6)).sum().backward()


def no_sync_over_the_last_micro_batch():
    start()
    model = DDP(mlp())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(4):
        optimizer.zero_grad()
        for micro in range(3):
            with model.no_sync() if micro else nullcontext():
                model(torch.randn(4, 6)).pow(2).mean().backward()
        optimizer.step()


def changed_by_hand_on_one_rank():
    rank = start()
    model = DDP(mlp())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for k in range(7):
        if k == 3 and rank == 1:
            with torch.no_grad():
                model.module[0].weight.mul_(0.5)
        step(model, optimizer)


def changed_through_data_on_one_rank():
    rank = start()
    model = DDP(mlp())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for k in range(7):
        if k == 5 and rank == 0:
            for each in model.parameters():
                each.data.clamp_(-0.01, 0.01)
        step(model, optimizer)


def only_rank_0_loads_the_optimizer():
    rank = start()
    model = DDP(mlp())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    step(model, optimizer)
    state = copy.deepcopy(optimizer.state_dict())
    for _ in range(2):
        step(model, optimizer)
    if rank == 0:
        optimizer.load_state_dict(state)
    trained(model, 3, optimizer)


def only_one_rank_steps_where_its_loss_is_small():
    rank = start()
    model = DDP(mlp())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for k in range(5):
        optimizer.zero_grad()
        model(torch.randn(4, 6)).pow(2).mean().backward()
        if rank == 0 or k % 2:
            optimizer.step()


def one_of_two_models():
    start()
    one, other = DDP(mlp()), DDP(mlp())
    trained(one)
    trained(other, call=other.module)


def in_a_group_of_two():
    rank = start()
    groups = [dist.new_group([0, 1]), dist.new_group([2])]
    if rank < 2:
        model = DDP(mlp(), process_group=groups[0])
        trained(model, call=model.module)


def without_an_optimizer():
    start()
    model = DDP(mlp())
    with model.no_sync():
        model(torch.randn(4, 6)).pow(2).sum().backward()
    with torch.no_grad():
        for each in model.parameters():
            each -= 0.1 * each.grad


class Rows(Dataset):
    def __len__(self):
        return 24

    def __getitem__(self, index):
        return torch.arange(6.0) + index


class Stream(IterableDataset):
    def __init__(self, rank=0, world_size=1):
        self.share = rank, world_size

    def __iter__(self):
        rank, world_size = self.share
        return iter([torch.arange(6.0) + k for k in range(24)][rank::world_size])


def no_sampler():
    model, optimizer = replica()
    for batch in DataLoader(Rows(), batch_size=4):
        step(model, optimizer, batch)


def shuffled_alike():
    model, optimizer = replica(same_seed=True)
    for (batch,) in DataLoader(TensorDataset(torch.arange(144.0).view(24, 6)), batch_size=4, shuffle=True):
        step(model, optimizer, batch)


def each_shuffles_all_of_it():
    model, optimizer = replica()
    for _ in range(2):
        for batch in DataLoader(Rows(), batch_size=4, shuffle=True):
            step(model, optimizer, batch)


def a_stream_for_all():
    model, optimizer = replica()
    for batch in DataLoader(Stream(), batch_size=4):
        step(model, optimizer, batch)


def all_are_replica_0_for_the_sampler():
    model, optimizer = replica()
    for batch in DataLoader(Rows(), batch_size=4, sampler=DistributedSampler(Rows(), 2, 0)):
        step(model, optimizer, batch)


def samplers_with_other_seeds():
    rank = start()
    list(DataLoader(Rows(), sampler=DistributedSampler(Rows(), seed=rank)))


def splits_that_differ():
    start()
    random_split(TensorDataset(torch.arange(10.0)), [0.8, 0.2])


def equal_masks():
    start(same_seed=True)
    trained(DDP(mlp(nn.Dropout(0.5))), inputs=torch.randn(4, 6))


def an_optimizer_made_before_the_head():
    start(same_seed=True)
    net = mlp()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    net[2] = nn.Linear(8, 3)
    trained(DDP(net), optimizer=optimizer)


def an_optimizer_made_before_sharding():
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.device_mesh import init_device_mesh
    start(same_seed=True)
    net = mlp()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    trained(fully_shard(net, mesh=init_device_mesh("cpu", (2,))), optimizer=optimizer)


def cut(net, *size):
    """A model that is cut over the last axis of a mesh of ranks."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    mesh = init_device_mesh("cpu", size, mesh_dim_names=("replicate", "shard")[-len(size):])
    fully_shard(net[0], mesh=mesh)
    return fully_shard(net, mesh=mesh), mesh


def copies_of_shards_made_by_each_rank():
    start()
    trained(cut(mlp(), 2, 2)[0])


def one_replica_of_shards_loads():
    start(same_seed=True)
    model, mesh = cut(mlp(), 2, 2)
    if mesh.get_local_rank("replicate") == 0:
        model.load_state_dict({name: 2 * each for name, each in model.state_dict().items()})
    trained(model)


def copies_of_a_shard_changed_by_hand():
    rank = start(same_seed=True)
    model, _ = cut(mlp(), 2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    for k in range(6):
        factor = 0.5 if rank > 1 and k == 3 else 1.0
        step(model, optimizer, before=lambda by=factor: [each.grad.mul_(by) for each in model.parameters()])


def shards_with_learning_rates_of_their_own():
    rank = start(same_seed=True)
    model, _ = cut(mlp(), 2)
    trained(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1 / (1 + rank)))


def shards_that_read_the_same():
    start(same_seed=True)
    model, _ = cut(mlp(), 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for batch in DataLoader(Rows(), batch_size=4):
        step(model, optimizer, batch)


def averaged_by_hand(model, sums=lambda each: dist.all_reduce(each.grad), parameters=None):
    """Trains without DDP, and averages the gradients of these parameters, by default of all."""
    parameters = list(parameters or model.parameters())

    def average():
        for each in parameters:
            sums(each)
            each.grad /= dist.get_world_size()

    trained(model, optimizer=torch.optim.Adam(model.parameters()), before=average)


def averaged_by_hand_of_models_of_their_own(): averaged_by_hand((start(), mlp())[1])


def averaged_by_hand_of_a_head_of_its_own():
    rank = start(same_seed=True)
    model = mlp()
    torch.manual_seed(rank)
    model[2] = nn.Linear(8, 2)
    averaged_by_hand(model, lambda each: dist.all_reduce(each.grad.data, op=dist.ReduceOp.AVG))


def averaged_by_hand_of_two_models_of_which_one_is_its_own():
    rank = start(same_seed=True)
    models = [mlp()]
    torch.manual_seed(rank)
    models.append(mlp())
    optimizers = [torch.optim.Adam(model.parameters()) for model in models]
    for model in models:
        model(torch.randn(4, 6)).pow(2).mean().backward()
    for model in models:
        for each in model.parameters():
            dist.all_reduce(each.grad)
    for optimizer in optimizers:
        optimizer.step()


CUT = "the model that fully_shard cuts in test_audit.py line "
SHARDS = {
    copies_of_shards_made_by_each_rank: (4, [
        f"all parameters of {CUT}", "between ranks 0, 2, which hold copies of the same shard, already before the",
        "fully_shard does not make copies equal"]),
    one_replica_of_shards_loads: (4, ["before the first step. Rank 0 has loaded a state", "and rank 2 has not: load"]),
    copies_of_a_shard_changed_by_hand: (4, ["since step 4. The gradients of step 4 differ, although FSDP had"]),
    shards_with_learning_rates_of_their_own: (2, [
        f"the ranks do not train their shards of {CUT}", "alike: in step 1, lr was 0.1 on rank 0 and 0.05 on rank 1"]),
    shards_that_read_the_same: (2, ["ranks 0, 1 train on the same samples"]),
}


@pytest.mark.slow
@pytest.mark.parametrize("program", SHARDS, ids=lambda program: program.__name__)
def test_a_fault_of_shards_is_named(program):
    size, parts = SHARDS[program]
    found = launch(program, size, audit=1).findings
    assert len(found) == 1 and all(part in found[0] for part in parts), found


WRAPPED = "of the model that DDP wraps in test_audit.py line "
FAULTS = {
    past_the_wrapper: ["all parameters " + WRAPPED, "between ranks 0, 1, since step 1. The forward in ",
                       "goes past DDP"],
    the_inner_model_by_its_name: ["since step 3", "(call or model)", "goes past DDP"],
    a_method_of_the_inner_model: ["since step 1", "call=lambda x: model.module.encode(x)) goes past DDP"],
    frozen_then_unfrozen: ["0.weight and 0.bias " + WRAPPED, "since step 4. They needed no gradient when DDP wrapped"],
    adapters_added_after_wrapping: ["0.down and 0.up " + WRAPPED, "since step 1. They are new since DDP wrapped"],
    initialised_after_wrapping: ["0.weight and 2.weight ", "already before the first step. DDP had made"],
    layers_in_an_order_of_each_rank: ["its parameter 1 is key.weight on rank 0 and value.weight on rank 1", "sorted("],
    not_made_equal: ["already before the first step. They differed when DDP had wrapped", "init_sync=False"],
    a_hook_that_does_not_average: ["The gradients of step 1 differ: ", "leaves(), which DDP calls in place of"],
    only_some_parameters_are_optimized: ["0.weight and 0.bias ", "since step 1. ", "the optimizer itself differs"],
    a_scheduler_by_a_local_loss: ["since step 5", "In step 5, lr was 0.1 on rank 0 and 0.01 on rank 1"],
    clipping_by_a_local_norm: ["since step 1. The gradients of step 1 differ, although DDP had averaged them",
                               "optimizer.step()"],
    gradients_scaled_by_a_local_number: ["since step 1. The gradients of step 1 differ"],
    a_step_in_a_hook: ["lambda _: optimizer.step()) is called inside backward, before DDP has averaged"],
    no_sync_over_the_last_micro_batch: ["since step 1. The last backward before step 1 ", "was under no_sync()"],
    changed_by_hand_on_one_rank: ["0.weight ", "since some time between steps 3 and 4. No optimizer has changed them"],
    changed_through_data_on_one_rank: ["all parameters", "since some time between steps 5 and 6"],
    only_rank_0_loads_the_optimizer: ["since step 4. Only rank 0 has loaded a state", "load_state_dict(state)"],
    only_one_rank_steps_where_its_loss_is_small: ["since step 1", "rank 0 has made 5 and rank 1 has made 2"],
    one_of_two_models: ["one, other = DDP(mlp()), DDP(mlp())", "goes past DDP"],
    in_a_group_of_two: ["between ranks 0, 1, since step 1"],
    without_an_optimizer: ["all parameters " + WRAPPED],
    no_sampler: ["ranks 0, 1 train on the same samples", "for batch in DataLoader(Rows(), batch_size=4): give each"],
    shuffled_alike: ["ranks 0, 1 train on the same samples"],
    each_shuffles_all_of_it: ["each of ranks 0, 1 trains on all 24 samples, in an order of its own"],
    a_stream_for_all: ["ranks 0, 1 train on the same samples"],
    all_are_replica_0_for_the_sampler: ["ranks 0, 1 train on the same samples"],
    samplers_with_other_seeds: ["shuffles with seed + epoch = 0 on rank 0 and 1 on rank 1"],
    splits_that_differ: ["the ranks split the same data differently in test_audit.py line "],
    equal_masks: ["dropout zeroes the same elements on ranks 0, 1"],
    averaged_by_hand_of_models_of_their_own: [
        "the parameters whose gradients ranks 0, 1 sum in test_audit.py line ", "already before the first step"],
    averaged_by_hand_of_two_models_of_which_one_is_its_own: ["the parameters whose gradients ranks 0, 1 sum in "],
    averaged_by_hand_of_a_head_of_its_own: ["2 parameters whose gradients ranks 0, 1 sum in ", "dist.broadcast("],
    an_optimizer_made_before_the_head: ["steps in vain on ranks 0, 1: 2 of its 4 parameters are in no model any more"],
    an_optimizer_made_before_sharding: ["steps in vain on ranks 0, 1: its 4 parameters are in no model any more"],
}


@pytest.mark.slow
@pytest.mark.parametrize("program", FAULTS, ids=lambda program: program.__name__)
def test_a_fault_is_named(program):
    found = launch(program, 3 if program is in_a_group_of_two else 2).findings
    assert len(found) == 1 and all(part in found[0] for part in FAULTS[program]), found


# What is right

def an_ordinary_training(): trained(DDP((start(), mlp(nn.BatchNorm1d(8), nn.Dropout(0.1)))[1]))


def an_average_of_the_weights():
    start()
    model = DDP(mlp())
    average = copy.deepcopy(model.module)
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(5):
        step(model, optimizer)
        with torch.no_grad():
            for kept, each in zip(average.parameters(), model.module.parameters()):
                kept.lerp_(each, 0.1)
        with torch.no_grad():
            model.module(torch.randn(4, 6))
            average(torch.randn(4, 6))


def accumulated_gradients():
    start()
    model = DDP(mlp())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(4):
        optimizer.zero_grad()
        for micro in range(3):
            with model.no_sync() if micro < 2 else nullcontext():
                model(torch.randn(4, 6)).pow(2).mean().backward()
        optimizer.step()


def averaged_every_third_step(steps=9):
    start()
    model = DDP(mlp())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for k in range(steps):
        with model.no_sync():
            step(model, optimizer)
        if k % 3 == 2:
            for each in model.parameters():
                dist.all_reduce(each.data)
                each.data /= dist.get_world_size()


def averaged_once_more_to_come():
    averaged_every_third_step(10)


def rank_0_loads_its_best_in_the_end():
    rank = start()
    model = DDP(mlp())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step(model, optimizer)
    best = copy.deepcopy(model.module.state_dict())
    trained(model, 6, optimizer)
    if rank == 0:
        model.module.load_state_dict(best)
        model.module.eval()(torch.randn(4, 6))


def rank_0_swaps_its_average_in():
    rank = start()
    model = DDP(mlp())
    trained(model, 7)
    if rank == 0:
        for each in model.parameters():
            each.data.copy_(each.data * 0.9)


def uneven_under_join():
    rank = start()
    model = DDP(mlp())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with model.join():
        for _ in range(3 + 2 * rank):
            step(model, optimizer)


def two_models_that_play():
    start()
    maker, judge = DDP(nn.Linear(6, 6)), DDP(mlp())
    of_maker, of_judge = torch.optim.Adam(maker.parameters()), torch.optim.Adam(judge.parameters())
    for _ in range(4):
        noise = torch.randn(4, 6)
        of_judge.zero_grad()
        (judge(maker(noise).detach()).mean() - judge.module[0](torch.randn(4, 6)).detach().mean()).backward()
        of_judge.step()
        of_maker.zero_grad()
        judge(maker(noise)).mean().neg().backward()
        of_maker.step()


def two_optimizers():
    start()
    model = DDP(mlp())
    one, other = (torch.optim.SGD(model.module[k].parameters(), lr=0.1) for k in (0, 2))
    for _ in range(4):
        step(model, one)
        other.step()


def states_of_the_optimizer_are_sharded():
    from torch.distributed.optim import ZeroRedundancyOptimizer
    start()
    model = DDP(mlp())
    trained(model, optimizer=ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.01))


def local_sgd_of_torch():
    from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook as hook
    from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
    from torch.distributed.optim import PostLocalSGDOptimizer
    start()
    model = DDP(mlp())
    alone = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    model.register_comm_hook(hook.PostLocalSGDState(None, alone, 2), hook.post_localSGD_hook)
    averager = PeriodicModelAverager(period=4, warmup_steps=2)
    trained(model, 8, PostLocalSGDOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), averager))


def compressed_gradients():
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
    start()
    model = DDP(mlp())
    model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    trained(model)


def heads_that_are_meant_to_differ():
    start()
    net = mlp()
    DDP._set_params_and_buffers_to_ignore_for_model(net, ["2.weight", "2.bias"])
    trained(DDP(net))


def told_that_it_is_meant():
    start()
    model = DDP(mlp())
    audit.ignore(model)
    trained(model, call=model.module)


def a_static_graph(): trained(DDP((start(), mlp())[1], static_graph=True))


def statistics_of_its_own():
    start()
    model = DDP(mlp(nn.BatchNorm1d(8)), broadcast_buffers=False)
    trained(model)


def averages_in_another_order():
    rank = start()
    model = DDP(mlp())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(4):
        with model.no_sync():
            optimizer.zero_grad()
            model(torch.randn(4, 6)).pow(2).mean().backward()
        for each in model.parameters():
            parts = [torch.empty_like(each.grad) for _ in range(4)]
            dist.all_gather(parts, each.grad)
            each.grad = sum(parts[rank:] + parts[:rank]) / 4
        optimizer.step()


def lbfgs():
    start()
    model = DDP(mlp())
    optimizer, inputs = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=2), torch.randn(4, 6)

    def closure():
        optimizer.zero_grad()
        loss = model(inputs).pow(2).mean()
        loss.backward()
        dist.all_reduce(seen := loss.detach().clone())
        return seen

    for _ in range(3):
        optimizer.step(closure)


def loaded_everywhere():
    start()
    model = DDP(mlp())
    optimizer = torch.optim.Adam(model.parameters())
    state = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    trained(model, 3, optimizer)
    model.load_state_dict(state[0])
    trained(model, 3, optimizer)


def wrapped_anew_for_a_new_head():
    start()
    net = mlp()
    trained(DDP(net))
    net[2] = nn.Linear(8, 3)
    trained(DDP(net))


def each_its_share():
    rank = start()
    model = DDP(mlp())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for epoch in range(2):
        sampler = DistributedSampler(Rows())
        sampler.set_epoch(epoch)
        for batch in DataLoader(Rows(), batch_size=4, sampler=sampler):
            step(model, optimizer, batch)
    for batch in DataLoader(Stream(rank, 2), batch_size=4):
        step(model, optimizer, batch)


def one_order_to_evaluate_on():
    model, optimizer = replica()
    trains, evaluates = (DataLoader(Rows(), batch_size=4, sampler=DistributedSampler(Rows())) for _ in range(2))
    for epoch in range(2):
        trains.sampler.set_epoch(epoch)
        for batch in trains:
            step(model, optimizer, batch)
        for batch in evaluates:
            with torch.no_grad():
                model(batch)


def equal_orders_on_purpose():
    """Folds with samplers of their own, two models on equal orders, an epoch that is trained again."""
    start()
    data = Rows()
    for _ in range(2):
        model, sampler = DDP(mlp()), DistributedSampler(data)
        epochs(model, sampler, 0, 1)
    sampler = DistributedSampler(data)
    epochs(DDP(mlp()), sampler, 0, 1, 1)
    epochs(DDP(mlp()), sampler, 0, 1)


def epochs(model, sampler, *numbers, **options):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loader = DataLoader(Rows(), batch_size=4, sampler=sampler, **options)
    for number in numbers:
        sampler.set_epoch(number)
        for batch in loader:
            step(model, optimizer, batch)


def workers_that_persist():
    start()
    epochs(DDP(mlp()), DistributedSampler(Rows()), 0, 1, num_workers=1, persistent_workers=True)


def slices_of_one_global_batch():
    rank = start()
    model = DDP(mlp())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for batch in DataLoader(Rows(), batch_size=4):
        step(model, optimizer, batch[rank::2])


def one_full_batch_and_the_same_evaluation():
    model, optimizer = replica()
    for _ in range(5):
        for batch in DataLoader(Rows(), batch_size=24):
            step(model, optimizer, batch)
    with torch.no_grad():
        for batch in DataLoader(Rows(), batch_size=4):
            model(batch)


def data_that_all_look_alike():
    model, optimizer = replica()
    for (batch,) in DataLoader(TensorDataset(torch.ones(24, 6)), batch_size=4):
        step(model, optimizer, batch)


def all_of_its_own_data():
    rank = start()
    model = DDP(mlp())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for (batch,) in DataLoader(TensorDataset(torch.randn(24, 6) + rank), batch_size=4, shuffle=True):
        step(model, optimizer, batch)


def the_same_shards_under_tensor_parallelism():
    rank = start()
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    model = DDP(mlp(), process_group=groups[rank % 2])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for batch in DataLoader(Rows(), batch_size=4, sampler=DistributedSampler(Rows(), 2, rank // 2)):
        step(model, optimizer, batch)


def split_with_a_generator():
    rank = start()
    random_split(range(10), [8, 2], generator=torch.Generator().manual_seed(0))
    random_split(range(10), [8, 2], generator=torch.Generator().manual_seed(rank))  # as in a cross-validation
    random_split(range(rank, 10 + rank), [8, 2])  # each its own data


def one_seed_and_no_dropout():
    start(same_seed=True)
    model = DDP(mlp(nn.Dropout(0.0)))
    trained(model)
    model.eval()
    trained(model)


def sharded_and_replicated():
    rank = start(same_seed=True)
    model, mesh = cut(mlp(), 2, 2)
    torch.manual_seed(rank)
    optimizer = torch.optim.AdamW(model.parameters())
    for k in range(8):
        model.set_requires_gradient_sync(bool(k % 2))  # as for two micro-batches
        model(torch.randn(4, 6)).pow(2).mean().backward()
        if k % 2:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
    if mesh.get_local_rank("replicate") == 0:
        model(torch.randn(4, 6))  # and its gathered parameters stay
    assert audit.compare(model) == []


def shards_made_by_each_rank():
    rank = start()
    net = mlp(nn.Dropout(0.5))
    equal = audit.compare(cut(net, 2)[0])
    optimizer = torch.optim.AdamW([{"params": net.parameters(), "rank": rank}])
    for batch in DataLoader(Rows(), batch_size=4, sampler=DistributedSampler(Rows())):
        step(net, optimizer, batch)
    assert equal == audit.compare(net) == []


def shards_under_tensor_parallelism():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
    start(same_seed=True)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    net = parallelize_module(mlp(), mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(net, mesh=mesh["dp"])
    optimizer = torch.optim.AdamW(net.parameters())
    for batch in DataLoader(Rows(), batch_size=4, sampler=DistributedSampler(Rows(), 2, mesh.get_local_rank("dp"))):
        step(net, optimizer, batch)


def cut_the_old_way(**how):
    """Training with FullyShardedDataParallel: two batches a step, clipped, and its whole state in the end."""
    from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType
    net = FullyShardedDataParallel(mlp(nn.Dropout(0.5)), device_id=torch.device("cpu"), **how)
    torch.manual_seed(dist.get_rank())
    optimizer = torch.optim.AdamW(net.parameters())
    for batch in DataLoader(Rows(), batch_size=4, sampler=DistributedSampler(Rows())):
        with net.no_sync():
            net(batch).sum().backward()
        step(net, optimizer, batch, before=lambda: net.clip_grad_norm_(1.0))
    with FullyShardedDataParallel.state_dict_type(net, StateDictType.FULL_STATE_DICT):
        net.state_dict()


def shards_of_the_old_kind():
    start()
    cut_the_old_way()


def shards_of_the_old_kind_replicated():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import ShardingStrategy
    start(same_seed=True)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    cut_the_old_way(sharding_strategy=ShardingStrategy.HYBRID_SHARD, device_mesh=mesh)


def copies_of_shards_that_are_meant_to_differ():
    start()
    model, _ = cut(mlp(), 2, 2)
    audit.ignore(model)
    trained(model)


def averaged_by_hand_and_saved():
    start()
    model = DDP(mlp())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def average():
        for each in model.parameters():
            dist.all_reduce(each.grad, op=dist.ReduceOp.AVG)

    for _ in range(3):
        step(model, optimizer, call=model.module, before=average)
        torch.save(copy.deepcopy(model.module), io.BytesIO())


def a_sampler_for_each_epoch():
    rank, data, kept = start(), list(range(32)), []
    for epoch in range(6):
        sampler = DistributedSampler(data)
        sampler.set_epoch(epoch)
        list(DataLoader(data, batch_size=4, sampler=sampler))
        kept += [sampler] if rank == 0 or epoch == 1 else []
        del sampler


def averaged_by_hand_of_equal_models():
    start()
    model = mlp()
    for each in model.parameters():
        dist.broadcast(each.data, src=0)
    averaged_by_hand(model)


def averaged_by_hand_of_what_all_share():
    """Each rank has a half of its own, as in tensor parallelism: only what both hold is summed."""
    start()
    model = mlp()
    for each in model[2].parameters():
        dist.broadcast(each.data, src=0)
    averaged_by_hand(model, parameters=model[2].parameters())


def models_of_their_own_with_a_loss_that_is_shown():
    """Its memory may be a gradient's when the optimizer makes its step."""
    start()
    trained(mlp(), before=lambda: [dist.all_reduce(torch.ones(size)) for size in (1, 2, 8, 16, 48)])


RIGHT = {
    averaged_by_hand_of_equal_models: 2, averaged_by_hand_of_what_all_share: 2,
    models_of_their_own_with_a_loss_that_is_shown: 2,
    averaged_by_hand_and_saved: 2, a_sampler_for_each_epoch: 2,
    an_ordinary_training: 2, an_average_of_the_weights: 2, accumulated_gradients: 2, averaged_every_third_step: 2,
    averaged_once_more_to_come: 2, rank_0_loads_its_best_in_the_end: 2, rank_0_swaps_its_average_in: 2,
    uneven_under_join: 2, two_models_that_play: 2, two_optimizers: 2, states_of_the_optimizer_are_sharded: 2,
    local_sgd_of_torch: 2, compressed_gradients: 2, heads_that_are_meant_to_differ: 2, told_that_it_is_meant: 2,
    a_static_graph: 2, statistics_of_its_own: 2, averages_in_another_order: 4, lbfgs: 2, loaded_everywhere: 2,
    wrapped_anew_for_a_new_head: 2, each_its_share: 2, one_order_to_evaluate_on: 2,
    equal_orders_on_purpose: 2, workers_that_persist: 2, slices_of_one_global_batch: 2,
    one_full_batch_and_the_same_evaluation: 2, data_that_all_look_alike: 2, all_of_its_own_data: 2,
    the_same_shards_under_tensor_parallelism: 4, split_with_a_generator: 2, one_seed_and_no_dropout: 2,
    sharded_and_replicated: 4, shards_made_by_each_rank: 2, shards_under_tensor_parallelism: 4,
    copies_of_shards_that_are_meant_to_differ: 4, shards_of_the_old_kind: 2, shards_of_the_old_kind_replicated: 4,
}


@pytest.mark.slow
@pytest.mark.parametrize("program", RIGHT, ids=lambda program: program.__name__)
def test_nothing_is_said_of_what_is_right(program):
    assert launch(program, RIGHT[program]).findings == []


def test_a_digest_for_gpus_differs_where_a_byte_does():
    drawn = torch.Generator().manual_seed(0)
    for size in (1, 3, 4, 17, 4 * digests.WORDS + 5):
        values = torch.randint(256, (size,), dtype=torch.uint8, generator=drawn)
        other = values.clone()
        other[int(torch.randint(size, (), generator=drawn))] ^= 1 << int(torch.randint(8, (), generator=drawn))
        assert int(digests._on_device(values)) == int(digests._on_device(values.clone()))
        assert int(digests._on_device(values)) != int(digests._on_device(other))
        if size > 8 and values[0] != values[4]:
            other = values.clone()
            other[[0, 4]] = other[[4, 0]]
            assert int(digests._on_device(values)) != int(digests._on_device(other))


# What a program asks for itself

def asks(starts):
    if starts:
        audit.start()
    start()
    model, other = DDP(mlp()), mlp()
    equal = audit.compare(model)
    trained(model, call=model.module)
    return equal, audit.compare(model), audit.compare(other)


@pytest.mark.slow
@pytest.mark.parametrize("starts", [True, False])
def test_a_program_compares_its_replicas(starts):
    run = launch(asks, 2, starts, audit=False)
    assert run[0] == run[1]
    equal, apart, never_wrapped = run[0]
    assert equal == [] and "this model differ between ranks 0, 1" in never_wrapped[0]
    assert ("since step 1. The forward in test_audit.py line " in apart[0]) == starts
    assert "between ranks 0, 1" in apart[0]


OF_ITS_OWN = """
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from book import audit, tap
audit.start()
dist.init_process_group("gloo")
torch.manual_seed(dist.get_rank())
model = DistributedDataParallel(torch.nn.Linear(6, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for k in range(5):
    optimizer.zero_grad()
    (model if k < 3 else model.module)(torch.randn(8, 6)).sum().backward()
    optimizer.step()
for sentence in audit.compare(model):
    print(sentence)
"""  # and the process ends while the model is still there


def drops_a_request_before_a_forward_past_ddp():
    model, optimizer = replica()
    step(model, optimizer, call=model.module)
    request = dist.isend(torch.ones(1), 1 - dist.get_rank())
    model.module(torch.randn(4, 6))
    request = dist.isend(torch.ones(1), 1 - dist.get_rank())
    dist.recv(torch.ones(1), 1 - dist.get_rank())
    dist.recv(torch.ones(1), 1 - dist.get_rank())
    request.wait()


@pytest.mark.slow
def test_to_look_for_what_goes_past_ddp_keeps_no_request_that_is_dropped():
    with pytest.raises(HangError, match="did not keep what isend returned"):
        launch(drops_a_request_before_a_forward_past_ddp, 2, hang_s=0.5)


def stopped_and_started(starts):
    tap.stop()
    if starts:
        audit.start()
    past_the_wrapper()
    return threading.excepthook.__module__, len(_global_optimizer_post_hooks)


@pytest.mark.slow
def test_stopped_it_notes_nothing_and_leaves_nothing_and_started_again_it_notes_all():
    run = launch(stopped_and_started, 2, False)
    assert not run.findings and run[0] == ("_thread", 0)
    run = launch(stopped_and_started, 2, True)
    assert "since step 1. The forward in " in run.findings[0] and run[0] == ("book.audit.uncaught", 2)


def stopped_with_notes():
    """What is noted of an earlier run of the same process, and whose hook for errors of threads is left at its end."""
    start()
    splits_by_its_own_seed = random_split(range(10), [8, 2])
    thread = threading.Thread(target=lambda: len(splits_by_its_own_seed[0]) / 0)
    thread.start()
    thread.join()
    noted, others = audit.notes(lambda *place: place), []
    before = threading.excepthook
    threading.excepthook = lambda args: (others.append(args.exc_type), before(args))
    tap.stop()
    kept = threading.excepthook is not before
    audit.start()
    nothing = audit.notes(lambda *place: place)
    thread = threading.Thread(target=lambda: 1 / 0)
    thread.start()
    thread.join()
    again = audit.notes(lambda *place: place)
    return ([len(each.uncaught) for each in (noted, nothing, again)], [len(each.splits) for each in (noted, nothing)],
            kept, len(others), tap.ops())


@pytest.mark.slow
def test_started_again_it_has_no_notes_of_before_and_leaves_the_hooks_of_others():
    assert launch(stopped_with_notes, 1)[0] == ([1, 0, 1], [1, 0], True, 1, [])


@pytest.mark.slow
def test_a_job_of_torchrun_compares_its_replicas(tmp_path):
    program = tmp_path / "own.py"
    program.write_text(OF_ITS_OWN)
    ended = subprocess.run([sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone",
                            str(program)], capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("since step 4. The forward in own.py line 12: ") == 2


@pytest.mark.slow
def test_a_rank_that_fails_says_what_had_parted_before(capsys):
    from book.launch import RankError

    def program():
        past_the_wrapper_for(5)
        raise ValueError("later")

    def past_the_wrapper_for(steps):
        nonlocal_model.append(DDP((start(), mlp())[1]))
        trained(nonlocal_model[0], steps, call=nonlocal_model[0].module)

    nonlocal_model = []
    with pytest.raises(RankError, match="also: all parameters of the model .* since step 1. The forward"):
        launch(program, 2)


@pytest.mark.parametrize("audit", [-1, "yes", None, 2.5])
def test_an_audit_that_can_not_be_is_refused(audit):
    with pytest.raises(ValueError, match="audit is True, False or a number of steps"):
        launch(mlp, 2, audit=audit)


# Drawn models and faults: which parameters have parted, and since when

def draw(seed):
    """For a seed: a model, its optimizer, how many steps it makes, and what goes wrong, where and when."""
    drawn = random.Random(seed)
    sizes = [drawn.choice([1, 5, 70]) for _ in range(drawn.randint(2, 3))]
    net = nn.Sequential(*(nn.Linear(*pair) for pair in pairwise(sizes)))
    optimizer = drawn.choice([torch.optim.SGD, torch.optim.AdamW, torch.optim.RMSprop])
    steps = drawn.randint(1, 9)
    name = drawn.choice([name for name, _ in net.named_parameters()])
    fault = drawn.choice(["none", "none", "by hand", "through data", "gradient", "past", "lr"])
    return net, optimizer, steps, name, fault, drawn.randint(1, steps)


def train_drawn(seed):
    """Train a drawn model, and return what is said of it."""
    net, optimizer, steps, name, fault, at = draw(seed)
    rank, model = dist.get_rank(), DDP(net)
    optimizer, own = optimizer(model.parameters(), lr=0.01), dict(net.named_parameters())[name]
    for k in range(1, steps + 1):
        is_now = k == at and rank == 1
        if is_now and fault == "by hand":
            with torch.no_grad():
                own.add_(1.0)
        if is_now and fault == "through data":
            own.data = own.data + 1.0
        if is_now and fault == "lr":
            optimizer.param_groups[0]["lr"] *= 2
        optimizer.zero_grad()
        call = net if k == at and fault == "past" else model
        (call(torch.randn(3, net[0].in_features)) - 3.0).pow(2).mean().backward()
        if is_now and fault == "gradient":
            own.grad.mul_(-2.0)
        optimizer.step()
    return audit.compare(model)


def expected(seed):
    """Parts of the sentence on a drawn model; None if all is right."""
    net, _, _, name, fault, at = draw(seed)
    every = [name for name, _ in net.named_parameters()]
    before = f"some time between steps {at - 1} and {at}" if at > 1 else "already before the first step"
    return None if fault == "none" else {
        "by hand": [f"{name} of the model", before], "through data": [f"{name} of the model", before],
        "gradient": [f"{name} of the model", f"since step {at}"],
        "past": ["all parameters", f"since step {at}", "no forward went through DDP"],
        "lr": ["all parameters", f"since step {at}", f"In step {at}, lr was 0.01 on rank 0 and 0.02 on rank 1"],
    }[fault] if len(every) > 1 else []


def train_all_drawn(seeds):
    start()
    torch.manual_seed(dist.get_rank())
    return [train_drawn(seed) for seed in seeds]


@pytest.mark.slow
def test_of_drawn_models_the_parameters_and_the_step_are_named():
    seeds = range(60)
    for seed, said in zip(seeds, launch(train_all_drawn, 2, seeds, audit=1)[0]):
        parts = expected(seed)
        told = f"{draw(seed)[1:]}: {said}"
        assert bool(said) == (parts is not None) and all(part in said[0] for part in parts or ()), told
