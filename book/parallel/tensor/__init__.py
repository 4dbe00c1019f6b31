"""L2: tensor parallelism as chapter 05 builds it: weight matrices are cut, and every rank computes a part of a layer.

    products    a matrix product cut by columns and by rows, without gradients
    operators   what leads activations into cut layers and out of them, in two conjugate pairs
    layers      linear layers cut by columns and by rows, embedding and loss cut by vocabulary
    regather    columns that keep a piece of their input for backward, in place of the whole
    gpt         split_gpt: the book's GPT cut over ranks

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
