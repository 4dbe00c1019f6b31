"""L0: packages that only some parts of the book need, and how a reader gets them; one that no part needs."""
from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType


def require(what: str, *packages: str) -> None:
    """Raise ModuleNotFoundError where a package that `what` needs is missing; it says how to install it."""
    missing = [name for name in packages if find_spec(name) is None]
    if missing:
        raise ModuleNotFoundError(f"{what} needs {' and '.join(missing)}: pip install 'lockstep-book[run]'",
                                  name=missing[0])


def optional(name: str) -> ModuleType | None:
    """A module that some readers have and nothing needs; None where it is not installed."""
    try:
        return import_module(name)
    except ImportError:
        return None


@contextmanager
def needed_by(what: str, *packages: str) -> Iterator[None]:
    """Around imports: where one fails because a package that `what` needs is missing, raise what `require` raises."""
    try:
        yield
    except ModuleNotFoundError:
        require(what, *packages)
        raise


def without_iri_grammar() -> None:
    """Have this process import nbformat in a fifth of a second: for programs, before they import it.

    It validates notebooks with jsonschema, which imports rfc3987_syntax, if installed, to check IRIs. That spends more
    than a second on a grammar, and no notebook has an IRI to check.
    """
    sys.modules.setdefault("rfc3987_syntax", None)  # type: ignore[arg-type]  # None makes the import fail


def pytest_addoption() -> None:
    """With `-p book.extras`, which pytest loads before nbval, and with it nbformat: the same for pytest."""
    without_iri_grammar()
