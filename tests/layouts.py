"""Searches that tests of the chart of layouts share."""
from __future__ import annotations

from dataclasses import replace
from functools import cache

from book.cost import Search, Transformer, search
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
