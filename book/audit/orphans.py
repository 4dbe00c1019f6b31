"""L2: parameters that an optimizer holds and no model does: it was made before they were replaced.

A head that is exchanged, or `fully_shard`, puts new parameters into a model. An optimizer that was made before then
makes its steps without an error, and the model does not learn.
"""
from __future__ import annotations

import gc
import sys
from typing import Any
from weakref import WeakKeyDictionary

import torch

from book.audit.notes import Orphans, PlaceOf, named
from book.audit.quiet import quietly
from book.tap.log import Place
from book.tap.place import caller

LOOKS = 2  # the step after which it is looked at: a first step may have no gradients

_made: WeakKeyDictionary[Any, tuple[Place | None, int]] = WeakKeyDictionary()  # with the number of steps
_found: list[tuple[Place | None, int, int]] = []


def forget() -> None:
    """Forget what has been noted."""
    _made.clear()
    _found.clear()


@quietly
def made(optimizer: Any) -> None:
    """An optimizer has been made."""
    _made[optimizer] = caller(sys._getframe())[1], 0


@quietly
def stepped(optimizer: Any, args: Any, options: Any) -> None:
    """An optimizer has made a step."""
    place, steps = _made.get(optimizer, (None, LOOKS))
    if steps == LOOKS or place is None:
        return
    _made[optimizer] = place, steps + 1
    held = [each for group in optimizer.param_groups for each in group["params"]]
    if steps + 1 == LOOKS and any(each.grad is None and each.requires_grad for each in held):
        lost = _lost(held)
        if lost:
            _found.append((place, lost, len(held)))


def _lost(held: list[torch.Tensor]) -> int:
    """How many of them are in no module, while a module has a parameter with a gradient that no optimizer holds."""
    modules = [each for each in gc.get_objects() if issubclass(type(each), torch.nn.Module)]
    owned = {id(each): each for module in modules for each in module._parameters.values() if each is not None}
    stepped = {id(each) for other in _made for group in other.param_groups for each in group["params"]}
    if all(each.grad is None or name in stepped for name, each in owned.items()):
        return 0
    return sum(each.grad is None and each.requires_grad and id(each) not in owned for each in held)


def notes(place_of: PlaceOf) -> tuple[Orphans, ...]:
    """The optimizers that hold such parameters."""
    return tuple(Orphans(named(place, place_of), lost, total) for place, lost, total in _found if place)
