"""L2: what the tap has put in the place of torch's own, so that it can be put back."""
from __future__ import annotations

from typing import Any

_undone: list[tuple[Any, str, Any]] = []


def replace(owner: Any, name: str, new: Any) -> None:
    """Put `new` in the place of an attribute of a module or class."""
    _undone.append((owner, name, vars(owner).get(name)))
    setattr(owner, name, new)


def undo() -> None:
    """Put all of it back, the last first."""
    while _undone:
        owner, name, old = _undone.pop()
        if old is None:
            delattr(owner, name)
        else:
            setattr(owner, name, old)
