"""L2: all axes on one mesh: `Hybrid` with sequences that are cut over cp, and with experts folded over dp and cp.

To the weights, a rank with other tokens of the same sequences is a replica like one with other sequences. So `Hybrid`
runs as it is on a mesh where dp and cp are one axis, and the rest is which tokens a rank takes. Experts stay out of it:
they are shared by the ranks of "ep", which are those of dp and cp under other names.

Shapes: B sequences in the global batch, T tokens, D width.
"""
from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from book.mesh import WITH_CONTEXT, Mesh, MeshError
from book.parallel.checked import checked_by
from book.parallel.context import cut_by_tokens, positions, ring_attention
from book.parallel.experts import ExpertParallel, MoE
from book.parallel.hybrid import Hybrid, average_gradients, axis_groups, micro_batches
from book.parallel.model import GPT, Block
from book.parallel.sharded import MakeOptimizer


class ExpertMLP(nn.Module):
    """A layer of experts in the place of a block's MLP: all tokens of all sequences alike."""

    def __init__(self, layer: MoE | ExpertParallel) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        """(B, T, D) -> (B, T, D)."""
        return self.layer(x_BTD.flatten(0, 1)).view_as(x_BTD)


def with_experts(gpt: GPT, num_experts: int, top_k: int, seed: int) -> GPT:
    """Put experts, each as wide as an MLP, in the place of every block's MLP, and return the model.

    Their weights depend only on the sizes and `seed`; torch's generators are left as they were.
    """
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.manual_seed(seed)
        layers = [MoE(gpt.config.width, gpt.config.mlp_features, num_experts, top_k) for _ in gpt.blocks]
    for block, layer in zip(gpt.blocks, layers):
        block.mlp = ExpertMLP(layer.to(block.attention.q.weight))
    return gpt


class ExpertAverage:
    """What ZeRO's classes are to `Hybrid`, for a model with experts: a step that averages the gradients first.

    Over `replicas` for all weights but the experts'. An expert's gradient is a sum over the ranks of "ep" already: it
    is averaged over "efsdp", and divided by the size of "ep".
    """

    def __init__(self, module: nn.Module, make_optimizer: MakeOptimizer, replicas: dist.ProcessGroup,
                 groups: Mapping[str, dist.ProcessGroup]) -> None:
        self.replicas, self.groups = replicas, groups
        layers = [layer for layer in module.modules() if isinstance(layer, ExpertParallel)]
        self.experts = [parameter for layer in layers for parameter in (layer.up, layer.down)]
        theirs = set(self.experts)
        self.others = [parameter for parameter in module.parameters() if parameter not in theirs]
        self.optimizer = make_optimizer(module.parameters())

    def average(self) -> None:
        """Make the gradients of this rank's loss those of the whole batch's."""
        average_gradients(self.others, self.replicas)
        average_gradients(self.experts, self.groups["efsdp"])
        for parameter in self.experts:
            parameter.grad /= dist.get_world_size(self.groups["ep"])

    def step(self) -> None:
        """Average the gradients, then update."""
        self.average()
        self.optimizer.step()
        self.optimizer.zero_grad()


def check_axes(gpt: GPT, mesh: Mesh, zero_stage: int, ep: int | None) -> None:
    """Raise MeshError for another mesh or an ep that does not divide it, ValueError where experts and ep don't go."""
    if sorted(mesh.axes) != sorted(WITH_CONTEXT):
        raise MeshError(f"this needs a mesh of {', '.join(WITH_CONTEXT)}, not of {', '.join(mesh.axes)}: an axis that "
                        "is not used has the size 1")
    if any(isinstance(block.mlp, ExpertMLP) for block in gpt.blocks) != (ep is not None):
        raise ValueError("ep says how many ranks share the experts of a layer: give it for a model with_experts, and "
                         "for no other")
    num_replicas = mesh.size("dp") * mesh.size("cp")
    if ep is not None and num_replicas % ep:
        raise MeshError(f"{ep} ranks that share experts can't be folded over {num_replicas} ranks of dp and cp: ep "
                        f"has to divide {num_replicas}")
    if ep is not None and zero_stage:
        raise ValueError("ZeRO is for models without experts here: use zero_stage=0")


class FiveAxes(Hybrid):
    """`Hybrid` on a mesh of pp, dp, cp and tp, where dp and cp are next to one another, dp outside.

    Each rank takes its replica's sequences, and of these the tokens of its place on cp (in zigzag order). `attention`
    is one of `book.parallel.context`'s. With experts in the model (`with_experts`) each layer's are shared by `ep` of
    the dp · cp ranks that have one place on pp and tp, and gradients are averaged in `step`, not in `gradients`. Raises
    what `Hybrid` raises, and ValueError for a model with dropout, and where experts and `ep` don't go together.
    """

    sharded: Any  # ZeRO's classes, or `ExpertAverage`

    @checked_by(check_axes)
    def __init__(self, gpt: GPT, mesh: Mesh, num_micro_batches: int, make_optimizer: MakeOptimizer,
                 zero_stage: int = 0, ep: int | None = None,
                 attention: Callable[..., torch.Tensor] = ring_attention) -> None:
        self.whole, self.at = mesh, mesh.coordinates(dist.get_rank())
        num_replicas = mesh.size("dp") * mesh.size("cp")
        replicas = mesh.folded(("dp", "cp"), {"dp": num_replicas})
        layers, groups = {}, {}
        if ep is not None:
            folded = mesh.folded(("dp", "cp"), {"efsdp": num_replicas // ep, "ep": ep})
            groups = axis_groups(folded)
            layers = {block: ExpertParallel(block.mlp.layer, folded, groups=groups) for block in gpt.blocks}
            for block in gpt.blocks:
                block.mlp = nn.Identity()  # until the rest is rank 0's on all ranks: experts differ between them
        cut_by_tokens(gpt, attention, group=axis_groups(mesh)["cp"])
        super().__init__(gpt, replicas, num_micro_batches, make_optimizer, zero_stage)
        if ep is not None:
            for block in (block for block in gpt.blocks if isinstance(block, Block)):  # those of this stage
                block.mlp = ExpertMLP(layers[block])
            self.sharded = ExpertAverage(self.module, make_optimizer, self.groups["dp"], groups)
            self.optimizer = self.sharded.optimizer

    def share(self, batch: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The micro-batches of this rank: its tokens of equal parts of its replica's equal part of the batch."""
        own = positions(self.at["cp"], self.whole.size("cp"), batch.shape[1]).to(batch.device)
        return micro_batches(batch[:, own], self.whole.size("dp"), self.at["dp"], self.num_micro_batches)
