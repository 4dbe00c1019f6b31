"""Searches that tests of the chart of layouts share."""
from __future__ import annotations

from dataclasses import replace
from functools import cache

from book.cost import MODELS, Search, Transformer, cluster_of, search
from book.cost.published import A100


@cache
def few() -> Search:
    """A small model on 4 GPUs with little memory: some layouts fit and some don't."""
    return search(Transformer(12, 768, 12), replace(A100, num_gpus=4, memory_bytes=4e9), 4)


@cache
def many() -> Search:
    """GPT-3 on 1,024 GPUs."""
    return search(Transformer(96, 12288, 96), replace(A100, num_gpus=1024), 1536)


@cache
def none() -> Search:
    """A model that no layout fits into 8 GPUs."""
    return search(Transformer(96, 12288, 96), replace(A100, num_gpus=8), 8)


@cache
def rare() -> Search:
    """Experts and a long sequence: layouts with cp and ep."""
    return search(replace(MODELS["mixtral-8x7b"], num_tokens=32768), cluster_of("h100", 32), 32, most_tp=8, most_cp=4,
                  most_ep=8)
