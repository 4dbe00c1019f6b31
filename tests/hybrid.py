"""A GPT trained on a mesh of real ranks and in one process, for the tests of what chapter 07 builds."""
from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from book.launch import Run, launch, rank_device
from book.mesh import Mesh
from book.parallel import GPT, GPTConfig
from book.parallel.hybrid import Hybrid
from book.record import paused
from tests.by_value import sent_by_value
from tests.once import once

sent_by_value(__name__)

CONFIG = GPTConfig(vocab_size=16, context=4, num_layers=8, num_heads=8, width=16, dtype=torch.float64)
NUM_SEQUENCES, NUM_MICRO_BATCHES, NUM_STEPS, LEARNING_RATE = 32, 4, 2, 1e-2
LAYOUTS = [(pp, dp, 8 // pp // dp) for pp in (1, 2, 4, 8) for dp in (1, 2, 4, 8) if 8 % (pp * dp) == 0]
DAILY = {(2, 2, 2), (1, 1, 8)}  # all three axes at once, and tensor parallelism alone
# Each two axes together, all three, and one alone: the others have tests of their own, where nothing is combined.
MIXED = [pytest.param(layout, id=str(layout), marks=() if layout in DAILY else pytest.mark.slow)
         for layout in ((1, 1, 8), (1, 2, 4), (2, 1, 4), (2, 4, 1), (2, 2, 2))]
Weights = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Trained:
    """What became of a rank's part: `cut` says along which dim tensor parallelism cut a weight, if it did."""

    drawn: float
    losses: list[float]
    weights: Weights
    cut: dict[str, int | None]
    pss_kb: int


def mesh_of(layout: tuple[int, int, int], ranks_per_node: int | None = None) -> Mesh:
    """The mesh (pp, dp, tp) of these sizes."""
    return Mesh(("pp", "dp", "tp"), layout, ranks_per_node)


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets of a step, (B, T) each: random tokens, the same on every rank, and a rule to learn."""
    tokens = torch.randint(CONFIG.vocab_size, (NUM_SEQUENCES, CONFIG.context),
                           generator=torch.Generator().manual_seed(step))
    return tokens, (3 * tokens + 1) % CONFIG.vocab_size


def adamw(parameters) -> torch.optim.Optimizer:
    """What most of them train with."""
    return torch.optim.AdamW(parameters, lr=LEARNING_RATE)


def optimizer_for(dtype: torch.dtype):
    """AdamW in 64 bits. In 32 it would make rounding large: the bias of attention's keys has a gradient of zero, and
    AdamW divides what rounding leaves of it by its own size."""
    return adamw if dtype == torch.float64 else partial(torch.optim.SGD, lr=0.1, momentum=0.9)


def proportional_set_kb() -> int:
    """Memory of this process, in kB; what it shares with others counts in proportion."""
    return int(re.search(r"^Pss:\s+(\d+)", Path("/proc/self/smaps_rollup").read_text(), re.M)[1])


def train_rank(layout: tuple[int, int, int], config: GPTConfig, num_steps: int, zero_stage: int) -> Trained:
    """In a rank: train its part of a model that each rank draws from its own seed."""
    device = rank_device()
    dist.init_process_group()
    with paused():
        gpt = GPT(config).to(device)
        drawn = gpt.blocks[0].mlp.up.weight[0, 0].item()
        hybrid = Hybrid(gpt, mesh_of(layout), NUM_MICRO_BATCHES, optimizer_for(config.dtype), zero_stage)
    losses = [hybrid.step(*(tensor.to(device) for tensor in batch(step))) for step in range(num_steps)]
    weights = {} if zero_stage == 3 else dict(hybrid.module.model.named_parameters())
    with paused():
        dist.barrier()  # all ranks are alive when their memory is measured
        pss_kb = proportional_set_kb()
        dist.barrier()
    return Trained(drawn, [loss.item() for loss in losses if loss is not None],
                   {name: p.detach().cpu().clone() for name, p in weights.items()},
                   {name: getattr(p, "shard_dim", None) for name, p in weights.items()}, pss_kb)


@cache
def trained(layout: tuple[int, int, int], num_steps: int = NUM_STEPS, zero_stage: int = 0,
            dtype: torch.dtype = torch.float64) -> Run:
    """The run of eight ranks with this layout, once for all tests; recorded where it is short."""
    name = f"trained-{layout}-{num_steps}-{zero_stage}-{dtype}"
    return once(name, lambda: launch(train_rank, 8, layout, replace(CONFIG, dtype=dtype), num_steps, zero_stage,
                                     record=num_steps == NUM_STEPS))


@cache
def alone(num_steps: int = NUM_STEPS, dtype: torch.dtype = torch.float64) -> tuple[list[float], Weights]:
    """Losses and last weights of one process, with the weights that rank 0 starts from and the whole batch."""
    return once(f"alone-{num_steps}-{dtype}", lambda: _trained_alone(num_steps, dtype))


def _trained_alone(num_steps: int, dtype: torch.dtype) -> tuple[list[float], Weights]:
    gpt = launch(partial(_rank_0_s, replace(CONFIG, dtype=dtype)), 1)[0]
    optimizer, losses = optimizer_for(dtype)(gpt.parameters()), []
    for step in range(num_steps):
        inputs, targets = batch(step)
        loss = GPT.loss(gpt(inputs), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, {name: p.detach() for name, p in gpt.named_parameters()}


def mean_losses(run: Run, layout: tuple[int, int, int]) -> list[float]:
    """The loss of the whole batch at each step: the mean over the replicas, from one rank of each one's last stage."""
    mesh = mesh_of(layout)
    ranks = [mesh.rank_at(pp=layout[0] - 1, dp=replica, tp=0) for replica in range(layout[1])]
    return torch.tensor([run[rank].losses for rank in ranks], dtype=torch.float64).mean(0).tolist()


def expected_piece(weights: Weights, name: str, cut: int | None, place: int, num_pieces: int) -> torch.Tensor:
    """What a rank should hold of a weight of the whole model."""
    return weights[name] if cut is None else weights[name].tensor_split(num_pieces, cut)[place]


def _rank_0_s(config: GPTConfig) -> GPT:
    return GPT(config)


