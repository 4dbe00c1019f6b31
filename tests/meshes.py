"""Steps of a small GPT on meshes of real ranks, for tests of the mesh explorer."""
from __future__ import annotations

from functools import cache
from typing import Any

import torch
import torch.distributed as dist

from book.launch import launch, rank_device
from book.mesh import Mesh
from book.parallel import GPT, GPTConfig
from book.parallel.hybrid import Hybrid
from book.record import paused
from book.trace import Trace
from book.widgets import mesh_explorer

CONFIG = GPTConfig(vocab_size=16, context=4, num_layers=4, num_heads=4, width=16)
CUBE = (2, 2, 2)
Shape = tuple[int, int, int]


def mesh_of(shape: Shape, ranks_per_node: int | None = 4) -> Mesh:
    """The mesh (pp, dp, tp) of these sizes."""
    return Mesh(("pp", "dp", "tp"), shape, ranks_per_node)


def train(shape: Shape, num_micro_batches: int, num_steps: int, zero_stage: int) -> None:
    """In a rank: some steps of its part of the model."""
    device = rank_device()
    dist.init_process_group()
    with paused():
        hybrid = Hybrid(GPT.seeded(CONFIG, dist.get_rank()).to(device), mesh_of(shape), num_micro_batches,
                        torch.optim.AdamW, zero_stage)
        tokens_2BT = torch.randint(16, (2, 2 * shape[1] * num_micro_batches, 4)).to(device)
    for _ in range(num_steps):
        hybrid.step(*tokens_2BT)


@cache
def recorded(shape: Shape = CUBE, num_micro_batches: int = 2, num_steps: int = 1, zero_stage: int = 0) -> Trace:
    """The trace of such a run, launched the first time that it is asked for."""
    num_ranks = shape[0] * shape[1] * shape[2]
    return launch(train, num_ranks, shape, num_micro_batches, num_steps, zero_stage, record=True).trace


def explorer(shape: Shape = CUBE, num_micro_batches: int = 2, ranks_per_node: int | None = 4) -> Any:
    """The mesh explorer of such a run."""
    return mesh_explorer(recorded(shape, num_micro_batches), mesh_of(shape, ranks_per_node))
