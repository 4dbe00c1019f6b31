"""L2: parameters under DDP that a rank's loss leaves out.

DDP all-reduces a bucket when the gradients of all its parameters are there, and ends backward when all buckets are
done. A rank whose loss does not use a parameter never starts that all-reduce, so the others wait in backward for it.
"""
from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

from book.tap import Subscriber


_living: weakref.WeakSet[Any] = weakref.WeakSet()
_of_the_dead: list[str] = []  # of the last model that was deleted


class Models(Subscriber):
    """Has this process note the models that it wraps in DDP."""

    def wrapped(self, model: Any) -> None:
        _living.add(model)

    def unwrapped(self, model: Any) -> None:
        _of_the_dead[:] = _without_gradient(model)


def parameters() -> Sequence[str]:
    """The names of parameters that a backward under DDP has left without a gradient, while others got one."""
    found = [name for model in list(_living) for name in _without_gradient(model)]
    return found or list(_of_the_dead)


def _without_gradient(model: Any) -> list[str]:
    """The parameters of one model that lack a gradient; none if all do, or if DDP looks for unused parameters."""
    try:
        if model.find_unused_parameters:
            return []
        known = {name: parameter for name, parameter in model.module.named_parameters() if parameter.requires_grad}
    except AttributeError:
        return []  # its __init__ has raised
    missing = [name for name, parameter in known.items() if parameter.grad is None]
    return missing if len(missing) < len(known) else []
