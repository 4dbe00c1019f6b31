"""L0: packages that only some parts of the book need, and how a reader gets them."""
from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec


def require(what: str, *packages: str) -> None:
    """Raise ModuleNotFoundError where a package that `what` needs is missing; it says how to install it."""
    missing = [name for name in packages if find_spec(name) is None]
    if missing:
        raise ModuleNotFoundError(f"{what} needs {' and '.join(missing)}: pip install 'lockstep-book[run]'",
                                  name=missing[0])


@contextmanager
def needed_by(what: str, *packages: str) -> Iterator[None]:
    """Around imports: where one fails because a package that `what` needs is missing, raise what `require` raises."""
    try:
        yield
    except ModuleNotFoundError:
        require(what, *packages)
        raise
