"""L2: parameters whose gradients a program sums over ranks by itself, without DDP, before the first step with these.

A step adds the same to each copy, so copies that begin apart stay apart. What an optimizer holds is noted once.
"""
from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from book.audit.notes import PlaceOf, Summed, named
from book.audit.quiet import quietly
from book.audit.replicas import Held, held, plain_values
from book.tap import Op, Subscriber
from book.tap.log import Place

LOOKS = 3  # steps of an optimizer: the first one may have no gradients
MOST = 1024  # all-reduces, the last ones

Where = tuple[tuple[int, ...], Place | None]  # the ranks and the line of an all-reduce


class Sums(Subscriber):
    """Notes what optimizers hold where the program has all-reduced the gradients."""

    def __init__(self) -> None:
        self._sums: dict[int, tuple[StorageWeakRef, Where]] = {}  # by their tensors' addresses
        self._steps: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._found: list[tuple[Where, dict[str, Held]]] = []

    @quietly
    def issued(self, op: Op, tensors: Sequence[torch.Tensor]) -> None:
        if op.function == "all_reduce" and op.owner is None and op.reduces in ("SUM", "AVG"):
            where = op.group.shared.ranks, op.place
            if len(self._sums) == MOST:
                self._sums.pop(next(iter(self._sums)))
            self._sums[tensors[0].data_ptr()] = StorageWeakRef(tensors[0].untyped_storage()), where

    @quietly
    def before_step(self, optimizer: Any, *_: Any) -> None:
        """An optimizer is about to make a step."""
        steps = self._steps.get(optimizer, 0)
        if steps < LOOKS and self._sums:
            self._steps[optimizer] = LOOKS if self._look(optimizer) else steps + 1

    def _look(self, optimizer: Any) -> bool:
        """Note the parameters whose gradients have been summed; whether there are any."""
        found: dict[Where, list[tuple[str, Any]]] = {}
        trained = [each for group in optimizer.param_groups for each in group["params"] if each.grad is not None]
        for number, each in enumerate(trained):
            memory, where = self._sums.get(each.grad.data_ptr(), (None, ((), None)))
            if memory and memory.cdata == each.grad.untyped_storage()._cdata and len(where[0]) > 1:
                found.setdefault(where, []).append((str(number), each))
        self._found += [(where, held(parameters)) for where, parameters in found.items()]
        return bool(found)

    def told(self, place_of: PlaceOf) -> tuple[Summed, ...]:
        """What was noted, with readable places."""
        return tuple(Summed(ranks, named(place, place_of), plain_values(values))
                     for (ranks, place), values in self._found)
