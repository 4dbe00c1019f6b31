"""L2: files of which every rank writes one: read them in any order, with none missing and none twice."""
from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Protocol, TypeVar

from book.trace import TraceError


class OfRank(Protocol):
    """What one rank wrote."""

    @property
    def rank(self) -> int: ...

    @property
    def world_size(self) -> int: ...


Written = TypeVar("Written", bound=OfRank)


def read_all(paths: Iterable[str | Path], form: str, parsed: Callable[[dict[str, Any]], Written], what: str,
             absent: str) -> list[Written]:
    """What `parsed` makes of the ranks' files, by rank; they are JSON, and their "format" is `form`.

    Raises TraceError for a file that is not `what`, for two files of one rank, and for a missing one, in the words of
    `absent`.
    """
    found: dict[int, Written] = {}
    for path in map(Path, paths):
        one = _read(path, form, parsed, what)
        if one.rank in found:
            raise TraceError(f"{path} is from rank {one.rank}, and so is another file: give one file for each rank")
        found[one.rank] = one
    world_size = max((one.world_size for one in found.values()), default=0)
    missing = [str(rank) for rank in range(world_size) if rank not in found]
    if missing or not found:
        raise TraceError(absent.format(", ".join(missing) or "0"))
    return [found[rank] for rank in range(world_size)]


def _read(path: Path, form: str, parsed: Callable[[dict[str, Any]], Written], what: str) -> Written:
    try:
        plain = json.loads(path.read_text("utf-8"))
        if plain.pop("format") != form:
            raise ValueError("another format")
        return parsed(plain)
    except OSError as error:
        raise TraceError(f"{path} can't be read: {error.strerror}") from None
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise TraceError(f"{path} is not {what}: {error}") from None
