"""L2: split the book's GPT over ranks in place: its code stays, its layers and what connects them are replaced.

Shapes: B sequences in the batch, T tokens, V vocabulary, of which a rank has v, about V/N on N ranks.
"""
from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch.distributed as dist
from torch import nn

from book.parallel.model import GPT, MLP, Attention, Block
from book.parallel.tensor.layers import (AlikeDropout, ColumnParallelLinear, Operator, RowParallelLinear,
                                         VocabParallelEmbedding, vocab_parallel_cross_entropy)
from book.parallel.tensor.operators import (Group, all_gather_then_reduce_scatter, all_reduce_then_identity,
                                            already_entered, identity_then_all_reduce, reduce_scatter_then_all_gather)
from book.parallel.tensor.regather import RegatheringLinear, gather_and_keep_piece

SEQUENCE_DIM = 1


@dataclass(frozen=True)
class TensorSplit:
    """How a model is split: how activations enter and leave split layers, and the class of column-parallel layers."""

    group: Group
    enter: Operator
    leave: Operator
    columns: type[ColumnParallelLinear]


def split_gpt(model: GPT, group: Group = None, sequence_parallel: bool = False, regather: bool = False) -> GPT:
    """Split a GPT over the ranks of a group, in place, and return it.

    Every rank gets the state of the group's first rank. Then q, k, v and up are split by columns, out and down by rows,
    embedding and head by vocabulary; what is in the place of an MLP stays whole. `model(tokens)` returns this rank's
    logits (B, T, v), and `model.loss` takes them. With `sequence_parallel` a rank holds T/N of the tokens between the
    split layers; with `regather` as well, it keeps only these of the split layers' inputs for backward. Move the model
    to its device first, and create the optimizer afterwards; with dropout, give each rank its own random seed.
    `state_dict` then has only this rank's part. Raises ValueError if the group's size does not divide the number of
    heads, or if head and embedding share one weight.
    """
    _check(model, group, sequence_parallel, regather)
    first_rank = dist.get_global_rank(group or dist.group.WORLD, 0)
    for tensor in [*model.parameters(), *model.buffers()]:
        dist.broadcast(tensor.detach(), first_rank, group=group)
    split = _ways(group, sequence_parallel, regather)
    model.token_embedding = VocabParallelEmbedding(model.token_embedding, group, split.leave)
    model.head = split.columns(model.head, group, split.enter)
    for block in model.blocks:
        _split_block(block, split)
    if sequence_parallel:
        _share_positions(model, group)
    elif model.config.dropout:
        _drop_alike(model, group)
    model.loss = partial(vocab_parallel_cross_entropy, first=model.token_embedding.first, group=group)
    return model


def _ways(group: Group, sequence_parallel: bool, regather: bool) -> TensorSplit:
    if not sequence_parallel:
        return TensorSplit(group, identity_then_all_reduce, all_reduce_then_identity, ColumnParallelLinear)
    gather = gather_and_keep_piece if regather else all_gather_then_reduce_scatter
    return TensorSplit(group, partial(gather, dim=SEQUENCE_DIM),
                       partial(reduce_scatter_then_all_gather, dim=SEQUENCE_DIM),
                       RegatheringLinear if regather else ColumnParallelLinear)


def _split_block(block: Block, split: TensorSplit) -> None:
    attention, mlp = block.attention, block.mlp
    for name in ("q", "k", "v"):
        setattr(attention, name, split.columns(getattr(attention, name), split.group, already_entered))
    _lead_in_once(attention, split)
    attention.out = RowParallelLinear(attention.out, split.group, split.leave)
    if not isinstance(mlp, MLP):
        return  # experts, which every rank of the group has whole
    mlp.up = split.columns(mlp.up, split.group, split.enter)
    mlp.down = RowParallelLinear(mlp.down, split.group, split.leave)


def _lead_in_once(attention: Attention, split: TensorSplit) -> None:
    """Let q, k and v enter through one operator, so the gradient of their input is summed over the ranks only once."""
    attention.register_forward_pre_hook(lambda _, inputs: (split.enter(inputs[0], group=split.group),))


def _share_positions(model: GPT, group: Group) -> None:
    """Give every rank the positions of its own tokens, and sum the gradients of parameters that every rank has whole.

    Norms, the position embedding and the biases added after a sum see only a rank's own tokens, so each rank's gradient
    of them is partial. The hook sums each once per backward, before it is accumulated.
    """
    num_ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    model.position_embedding.register_forward_pre_hook(lambda _, inputs: (inputs[0].chunk(num_ranks)[rank],))
    for parameter in model.parameters():
        if parameter.requires_grad and not hasattr(parameter, "shard_dim"):
            parameter.register_hook(partial(all_reduce_then_identity, group=group))


def _drop_alike(model: GPT, group: Group) -> None:
    """Use one dropout mask on all ranks between the split layers, where all hold the same activations."""
    for module in (model, *model.blocks):
        module.dropout = AlikeDropout(model.config.dropout, group)


def _check(model: GPT, group: Group, sequence_parallel: bool, regather: bool) -> None:
    num_ranks, config = dist.get_world_size(group), model.config
    if num_ranks < 1:
        raise ValueError("this rank is not in the group: split on the group's ranks only")
    if not isinstance(model.head, nn.Linear):
        raise ValueError("this GPT is already split: split a whole one, made by GPT(config) on every rank")
    if model.head.weight is model.token_embedding.weight:
        raise ValueError("head and token_embedding share one weight, which splitting would turn into two: give the "
                         "head its own weight")
    if config.num_heads % num_ranks:
        raise ValueError(f"{num_ranks} ranks can't share {config.num_heads} heads, since heads are not split: use a "
                         f"number of ranks that divides num_heads")
    if regather and not sequence_parallel:
        raise ValueError("regather needs sequence_parallel=True: without it no rank has a piece to keep")
