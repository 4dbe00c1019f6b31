"""Training steps with sharded state, recorded on real ranks for tests of what is drawn of them."""
from __future__ import annotations

from functools import cache, partial

import torch
import torch.distributed as dist

from book.launch import launch, rank_device
from book.parallel.model import GPT, GPTConfig
from book.parallel.sharded import Replicated, Zero1, Zero2, Zero3
from book.record import follow_units, paused
from book.trace import Trace

CONFIG = GPTConfig(vocab_size=13, context=4, num_layers=2, num_heads=2, width=8, dtype=torch.float64)
STAGES = (Replicated, Zero1, Zero2, Zero3)


def train(zero_stage: int, own_shards: bool = False) -> list[float]:
    """One step on this rank's sequences; returns the bytes of each unit, whole.

    Shards are views of the whole parameters, or have memory of their own.
    """
    dist.init_process_group()
    rank, world_size = dist.get_rank(), dist.get_world_size()
    with paused():
        sharded = STAGES[zero_stage](GPT.seeded(CONFIG, rank).to(rank_device()), partial(torch.optim.AdamW, lr=1e-2))
        for unit in sharded.units if own_shards else ():
            unit.shard.data = unit.shard.data.clone()
    follow_units(sharded.units, sharded.optimizer)
    tokens = torch.arange(2 * world_size * CONFIG.context, device=rank_device()).view(2 * world_size, -1)
    tokens = (tokens % CONFIG.vocab_size).chunk(world_size)[rank]
    GPT.loss(sharded(tokens), tokens.flip(0)).backward()
    sharded.step()
    return [len(unit.flat) * 8 for unit in sharded.units]


@cache
def run_of(zero_stage: int, num_ranks: int = 2, own_shards: bool = False) -> tuple[Trace, list[float]]:
    """A recorded step, and the bytes of the model's units."""
    run = launch(train, num_ranks, zero_stage, own_shards, record=True)
    return run.trace, run[0]


def recorded(zero_stage: int, num_ranks: int = 2) -> Trace:
    """A recorded step."""
    return run_of(zero_stage, num_ranks)[0]
