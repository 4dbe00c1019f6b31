"""L2: which of attention's scores a rank works on, with which keys, product by product.

Every score is made 0 and every value a unit vector, so a product of weights with values shows by its numbers which keys
each query gave a weight to. Such a product leaves an event for each query: a compute whose op is SCORES, `chunk` the
query's position, and `contributions`, one number for each token of the sequence: 1 where its key got a weight, else 0.
"""
from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from book import record
from book.device import message_device
from book.record.watcher import MULTIPLY
from book.trace import SCORES, Event


class _Products(TorchDispatchMode):
    """Sees each product of weights with unit vectors."""

    def __init__(self, positions: Sequence[int]):
        super().__init__()
        self.events: list[Event] = []
        self._positions = positions

    def __torch_dispatch__(self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (),
                           kwargs: Any = None) -> Any:
        start_s = time.monotonic()
        result = func(*args, **(kwargs or {}))
        if func.__name__.partition(".")[0] in MULTIPLY:
            self._see(args[-2].detach().flatten(0, -3), args[-1].detach().flatten(0, -3), start_s)
        return result

    def _see(self, weights: torch.Tensor, values: torch.Tensor, start_s: float) -> None:
        own = weights[0] if weights.dim() == 3 else weights
        units = values[0] if values.dim() == 3 else values
        if not torch.equal(units.sum(-1), units.new_ones(len(units))) or len(own) != len(self._positions):
            return
        seen = ((own != 0).to(units.dtype) @ units).tolist()
        self.events += [Event(torch.distributed.get_rank(), "compute", SCORES, chunk=position, start_s=start_s,
                              end_s=time.monotonic(), contributions=tuple(row))
                        for position, row in zip(self._positions, seen)]


def follow_scores(attention: Callable[..., torch.Tensor], positions: Sequence[int], num_tokens: int) -> torch.Tensor:
    """Call `attention(q, k, v)` on this rank's tokens, and add to the trace which scores it works on.

    Runs inside a rank: `launch(fn, n, record=True)` with a fn that calls it after `init_process_group`. `positions` are
    those of the rank's tokens in a sequence of `num_tokens`. q, k and v are float64, (1, 1, tokens of the rank,
    num_tokens). What it returns has in row i the weights that query i gives to all keys, which add up to 1.
    """
    here = [int(position) for position in positions]
    values = torch.eye(num_tokens, dtype=torch.float64, device=message_device())[here][None, None]
    products = _Products(here)
    try:
        with products, torch.no_grad():
            result = attention(torch.zeros_like(values), torch.zeros_like(values), values.clone())
    finally:
        record.emit(*products.events, source="recorded")
    return result[0, 0]
