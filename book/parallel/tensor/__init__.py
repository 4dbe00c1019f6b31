"""L2: tensor parallelism as chapter 05 builds it: weight matrices are split, and every rank computes part of a layer.

    products    a matrix product split by columns and by rows, without gradients
    operators   how activations enter and leave split layers, in two conjugate pairs
    layers      linear layers split by columns and by rows, embedding and loss split by vocabulary
    regather    column-parallel layers that keep only a piece of their input for backward
    gpt         split_gpt: the book's GPT split over ranks

Torch's own tensor parallelism is `torch.distributed.tensor.parallel`.
"""
from book.parallel.tensor.gpt import split_gpt
from book.parallel.tensor.layers import (AlikeDropout, ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding,
                                         first_of_shard, shard, vocab_parallel_cross_entropy)
from book.parallel.tensor.operators import (AllGatherThenReduceScatter, AllReduceThenIdentity, IdentityThenAllReduce,
                                            ReduceScatterThenAllGather, all_gather_then_reduce_scatter,
                                            all_reduce_then_identity, already_entered, identity_then_all_reduce,
                                            reduce_scatter_then_all_gather)
from book.parallel.tensor.products import by_columns, by_rows, mine

__all__ = ["AlikeDropout", "AllGatherThenReduceScatter", "AllReduceThenIdentity", "ColumnParallelLinear",
           "IdentityThenAllReduce", "ReduceScatterThenAllGather", "RowParallelLinear", "VocabParallelEmbedding",
           "all_gather_then_reduce_scatter", "all_reduce_then_identity", "already_entered", "by_columns", "by_rows",
           "first_of_shard", "identity_then_all_reduce", "mine", "reduce_scatter_then_all_gather", "shard", "split_gpt",
           "vocab_parallel_cross_entropy"]
