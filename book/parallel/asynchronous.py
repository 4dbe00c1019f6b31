"""L2: asynchronous tensor parallelism: a gather or a reduce-scatter in hops of a ring, each beside a part of a product.

Sequence parallelism gathers the tokens before a column-parallel product and reduce-scatters them after a row-parallel
one. Cut into as many products as there are ranks, each product needs one rank's tokens: the next ones travel meanwhile.
No gradients pass here; each of the two is the other's backward.

Shapes: T tokens of all N ranks, D and F numbers each; a rank has the same number of tokens as every other.
"""
from __future__ import annotations

import torch
import torch.distributed as dist

from book.parallel.context import pass_on
from book.parallel.tensor.operators import Group


def gathered_product(x: torch.Tensor, weight: torch.Tensor, group: Group = None) -> torch.Tensor:
    """All ranks' x, (T/N, D), one below the other, times this rank's weight, (D, F) -> (T, F).

    Rank r begins with its own tokens, and then has those of r - 1, r - 2, ...
    """
    rank, num_ranks = dist.get_rank(group), dist.get_world_size(group)
    products: list[torch.Tensor] = [x] * num_ranks  # each is replaced
    for hop in range(num_ranks):
        arrives = pass_on(x, group) if hop < num_ranks - 1 else None
        products[(rank - hop) % num_ranks] = x @ weight
        if arrives is not None:
            x = arrives()
    return torch.cat(products)


def scattered_product(x: torch.Tensor, weight: torch.Tensor, group: Group = None) -> torch.Tensor:
    """This rank's rows of the sum over the ranks of x, (T, D), times weight, (D, F) -> (T/N, F).

    What is summed for rank r sets out from rank r + 1, and each rank on its way adds its own product. Raises ValueError
    if the ranks can't share the rows equally.
    """
    rank, num_ranks = dist.get_rank(group), dist.get_world_size(group)
    if len(x) % num_ranks:
        raise ValueError(f"{num_ranks} ranks can't share {len(x)} rows equally: use a multiple of {num_ranks}")
    rows = x.chunk(num_ranks)
    total = rows[rank - 1] @ weight
    for hop in range(1, num_ranks):
        arrives = pass_on(total, group)
        own = rows[(rank - 1 - hop) % num_ranks] @ weight
        total = arrives() + own
    return total
