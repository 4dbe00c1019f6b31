"""L2: 3-D parallelism as chapter 07 builds it: tensor, pipeline and data parallelism on one mesh.

Each kind is the one its own chapter built, on the groups of one axis of the mesh. Torch's DTensor, FSDP and pipelining
are not used; torch's own combination is fully_shard, pipelining and parallelize_module on one DeviceMesh.

Shapes: B sequences in the global batch, T tokens.
"""
from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
import torch.distributed as dist
from torch import nn

from book.cost.state import check_zero_stage
from book.mesh import AXES, Mesh, MeshError
from book.parallel.checked import checked_by
from book.parallel.data import broadcast_state
from book.parallel.model import GPT
from book.parallel.pipeline import Mail, Stage, run_pipeline
from book.parallel.sharded import MakeOptimizer, Zero1, Zero2, Zero3
from book.parallel.stage import GPTStage
from book.parallel.tensor import split_gpt
from book.pipelines import one_f_one_b

ZERO = {1: Zero1, 2: Zero2, 3: Zero3}


def axis_groups(mesh: Mesh) -> dict[str, dist.ProcessGroup]:
    """This rank's process group on each axis of the mesh.

    Every rank makes every group, in the same order, including those it is not in: `new_group` is a collective of the
    whole world. Raises MeshError if the mesh and the world differ in their number of ranks.
    """
    if mesh.world_size != dist.get_world_size():
        raise MeshError(f"this mesh has {mesh.world_size} ranks and the world has {dist.get_world_size()}: they have "
                        "to be as many")
    mine = {}
    for axis in mesh.axes:
        for ranks in mesh.groups(axis):
            group = dist.new_group(ranks)
            if dist.get_rank() in ranks:
                mine[axis] = group
    return mine


def average_gradients(parameters: Iterable[nn.Parameter], group: dist.ProcessGroup | None) -> None:
    """Replace each gradient by its mean over the group, in one all-reduce; all must have the same dtype."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    dist.all_reduce(flat, group=group)
    flat /= dist.get_world_size(group)
    for gradient, piece in zip(gradients, flat.split([g.numel() for g in gradients])):
        gradient.copy_(piece.view_as(gradient))


def check_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Raise ValueError if none of the parameters has a gradient, so that there is nothing to clip."""
    if all(p.grad is None for p in parameters):
        raise ValueError("no parameter has a gradient: ZeRO-2 and 3 keep only shards of them (Unit.shard.grad), and "
                         "before a backward there are none")


@checked_by(check_gradients)
def clip_gradients(parameters: Iterable[nn.Parameter], groups: Mapping[str, dist.ProcessGroup],
                   max_norm: float) -> torch.Tensor:
    """Scale the gradients of the whole model to a norm of at most `max_norm`; return their norm. Only without ZeRO.

    Each gradient counts once: squares are summed over tp for parameters that are split over tp, and not for those that
    all tp ranks hold; then they are summed over the stages (pp). Replicas hold the same averaged gradients, so nothing
    is summed over dp. Every rank of the mesh must call it, between `gradients` and the step. With ZeRO-1 gradients are
    not averaged before the step; with ZeRO-2 and 3 there are none, and ValueError is raised. Equals
    `torch.nn.utils.clip_grad_norm_` in one process.
    """
    gradients = [(p.grad, hasattr(p, "shard_dim")) for p in parameters if p.grad is not None]
    cut, whole = (sum(g.square().sum() for g, is_cut in gradients if is_cut == wanted) for wanted in (True, False))
    dist.all_reduce(cut, group=groups["tp"])
    squares = cut + whole
    dist.all_reduce(squares, group=groups["pp"])
    norm = squares.sqrt()
    for gradient, _ in gradients:
        gradient *= (max_norm / (norm + 1e-6)).clamp(max=1.0)
    return norm


def micro_batches(batch: torch.Tensor, num_replicas: int, replica: int,
                  num_micro_batches: int) -> tuple[torch.Tensor, ...]:
    """Equal parts of one replica's equal part of a batch of sequences; raises ValueError if there are none."""
    parts = num_replicas * num_micro_batches
    if len(batch) % parts:
        raise ValueError(f"{len(batch)} sequences can't be divided among {num_replicas} replicas with "
                         f"{num_micro_batches} micro-batches each: use a multiple of {parts}")
    return batch.chunk(num_replicas)[replica].chunk(num_micro_batches)


def check_hybrid(mesh: Mesh, zero_stage: int) -> None:
    """Raise MeshError for a mesh with axes other than pp, dp and tp, ValueError for an invalid ZeRO stage."""
    if sorted(mesh.axes) != sorted(AXES):
        raise MeshError(f"3-D parallelism needs a mesh of {', '.join(AXES)}, not of {', '.join(mesh.axes)}: an axis "
                        "that is not used has the size 1")
    check_zero_stage(zero_stage)


class Hybrid:
    """This rank's part of a GPT on a mesh with the axes "pp", "dp" and "tp", and a training step of the whole model.

    All ranks get rank 0's weights. Then the layers are split over tp and the blocks over pp, and each of the dp
    replicas takes its share of the batch; with a `zero_stage` of 1, 2 or 3 their state is sharded over dp (chapter 04).
    `gpt` is taken over and stays on its device. Raises ValueError if the heads or the blocks can't be divided, and for
    an invalid ZeRO stage, MeshError for a mesh with other axes or a wrong number of ranks.
    """

    @checked_by(check_hybrid)
    def __init__(self, gpt: GPT, mesh: Mesh, num_micro_batches: int, make_optimizer: MakeOptimizer,
                 zero_stage: int = 0) -> None:
        rank = dist.get_rank()
        self.mesh, self.config = mesh, gpt.config
        self.num_micro_batches = num_micro_batches
        self.place, self.groups = mesh.coordinates(rank), axis_groups(mesh)
        num_stages = mesh.size("pp")
        broadcast_state(gpt)
        split_gpt(gpt, self.groups["tp"])
        self.module = GPTStage(gpt, self.place["pp"], num_stages)
        self.stage = Stage(self.module, self.place["pp"], num_stages, num_micro_batches, gpt.loss)
        self.schedule = one_f_one_b(num_stages, num_micro_batches)
        self.pipeline = mesh.group_of(rank, "pp")
        self.sharded = ZERO[zero_stage](self.module, make_optimizer, self.groups["dp"]) if zero_stage else None
        self.optimizer = self.sharded.optimizer if zero_stage else make_optimizer(self.module.parameters())
        self.mail = None

    def gradients(self, inputs_BT: torch.Tensor, targets_BT: torch.Tensor) -> torch.Tensor | None:
        """Run forward and backward of the global batch, of which this rank takes its replica's share.

        Returns the mean loss of that share on the ranks of the last stage, None elsewhere; gradients are then those of
        the whole batch (with ZeRO-1, which averages in its step, those of the share). Raises ValueError unless B is a
        multiple of dp times the number of micro-batches.
        """
        inputs, targets = (self.share(tensor) for tensor in (inputs_BT, targets_BT))
        if self.mail is None:  # the first batch tells the shape of messages
            like = torch.empty(*inputs[0].shape, self.config.width, dtype=self.config.dtype, device=inputs_BT.device)
            self.mail = Mail(self.schedule, like, self.pipeline)
        loss = run_pipeline(self.schedule, {self.place["pp"]: self.stage}, self.mail, inputs, targets)
        if self.sharded is None:
            average_gradients(self.module.parameters(), self.groups["dp"])
        return loss

    def step(self, inputs_BT: torch.Tensor, targets_BT: torch.Tensor) -> torch.Tensor | None:
        """`gradients`, then the optimizer's step; returns the same loss."""
        loss = self.gradients(inputs_BT, targets_BT)
        if self.sharded is None:
            self.optimizer.step()
            self.optimizer.zero_grad()
        else:
            self.sharded.step()
        return loss

    def share(self, batch: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The micro-batches of this rank's replica: equal parts of its equal part of the batch."""
        return micro_batches(batch, self.mesh.size("dp"), self.place["dp"], self.num_micro_batches)
