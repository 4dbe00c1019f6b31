"""L2: argument checks kept outside a function, so that a chapter can show the function without them."""
from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import wraps
from inspect import signature
from typing import Any


def checked_by(check: Callable[..., None]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Call `check` before each call of the function, with the arguments that its parameters name; it raises errors."""
    def around(function: Callable[..., Any]) -> Callable[..., Any]:
        takes, checked = signature(function), signature(check).parameters

        @wraps(function)
        def call(*arguments: Any, **options: Any) -> Any:
            bound = takes.bind(*arguments, **options)
            bound.apply_defaults()
            for name in checked:
                if isinstance(bound.arguments[name], Iterator):  # such as parameters(), which can be read only once
                    bound.arguments[name] = list(bound.arguments[name])
            check(**{name: bound.arguments[name] for name in checked})
            return function(*bound.args, **bound.kwargs)
        return call
    return around
