"""L1: what a model's layers are made of besides attention heads and an MLP, and the numbers that an estimate needs."""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Experts:
    """MLPs of which a router picks `per_token` for each token: `num` of `width`, and `num_shared` that all tokens use.

    The first `num_dense_layers` layers have the model's plain MLP instead; `router_biases` are numbers, one for each
    expert, that no gradient changes. Raises ValueError for sizes that can't be.
    """

    num: int
    per_token: int
    width: int
    num_shared: int = 0
    num_dense_layers: int = 0
    router_biases: bool = False

    def __post_init__(self) -> None:
        if not 1 <= self.per_token <= self.num or self.width < 1 or min(self.num_shared, self.num_dense_layers) < 0:
            raise ValueError(f"a token uses at least one expert, and no more than there are: {self}")


@dataclass(frozen=True)
class Latent:
    """Attention whose queries, keys and values come out of narrow vectors (deepseekv3, section 2.1.1).

    `query_rank` and `value_rank` are their widths; `rope_width` is what each head's query and the one shared key have
    more than a head's width, for positions. Raises ValueError for a size below 1.
    """

    query_rank: int
    value_rank: int
    rope_width: int

    def __post_init__(self) -> None:
        if min(self.query_rank, self.value_rank, self.rope_width) < 1:
            raise ValueError(f"each size of latent attention is at least 1: {self}")


@dataclass(frozen=True)
class Sizes:
    """A model in numbers, or many models, with an array in each field: an average layer, and what is at its ends.

    A token's products in a layer are width x attention_in, attention_out x width, width x mlp_in and mlp_out x width;
    `kept_inside` is the numbers between these that its backward needs, `score_width` the widths of a head's key and
    value over all heads, less what windows leave out, `score_bytes` what is kept of a stored score. `layer_parameters`
    leaves the routed experts out, `expert_parameters` are these; a token is `routed` so many times in a layer, each
    time to an expert of `expert_width`.
    """

    num_layers: Any
    width: Any
    num_heads: Any
    num_tokens: Any
    vocab_size: Any
    attention_in: Any
    attention_out: Any
    mlp_in: Any
    mlp_out: Any
    kept_inside: Any
    kept_outside_bytes: Any
    score_width: Any
    score_bytes: Any
    key_value_width: Any
    layer_parameters: Any
    expert_parameters: Any
    num_experts: Any
    expert_width: Any
    routed: Any
    embedding_parameters: Any
    head_parameters: Any
    is_flash: Any

    @property
    def products_per_token(self) -> Any:
        """Numbers of the matrices of a layer that a token is multiplied with."""
        return self.width * (self.attention_in + self.attention_out + self.mlp_in + self.mlp_out)


def stacked(records: Sequence[Any]) -> Any:
    """One record with an array in each field instead of many records of one class, such as `Sizes`."""
    kind = type(records[0])
    values = {f.name: [getattr(record, f.name) for record in records] for f in fields(kind)}
    found = object.__new__(kind)  # its checks are for single values
    for name, column in values.items():
        nested = hasattr(column[0], "__dataclass_fields__")
        object.__setattr__(found, name, stacked(column) if nested else np.array(column, dtype=float))
    return found
