"""L2: what each rank is doing when a run hangs, from which causes are worked out; and how messages name ranks."""
from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple

from book.launch.report import Dropped
from book.launch.rpc import Worker

LONG_RUN = 5  # so many consecutive ranks or more are written as a range
PLURALS = {"has": "have", "is": "are", "does": "do", "waits": "wait", "computes": "compute", "sleeps": "sleep"}
_WAITS_FOR = re.compile(r"waits (?:in|for its) (i?send|i?recv) (?:to|from) rank (\d+)")


class Standing(NamedTuple):
    """What a rank is doing ("waits in recv from rank 1", "finished") and where; other fields as in its report."""
    doing: str
    place: str = ""
    blocked: str | None = None
    worker: Worker | None = None
    polled: bool = False
    dropped: Sequence[Dropped] = ()
    left_out: Sequence[str] = ()

    @property
    def finished(self) -> bool:
        """Whether the rank's function has returned."""
        return self.doing == "finished" or self.doing.startswith("has returned")

    @property
    def peer(self) -> tuple[str, int] | None:
        """The send or receive that it waits in, and with which rank: ("recv", 1); None if it waits in neither."""
        found = _WAITS_FOR.match(self.doing)
        return (found[1].removeprefix("i"), int(found[2])) if found else None


def named(ranks: Sequence[int]) -> str:
    """Ranks in words, five or more consecutive ones as a range: "rank 2", "ranks 0, 1, 4-63"."""
    runs = [[rank for _, rank in run] for _, run in groupby(enumerate(ranks), lambda pair: pair[1] - pair[0])]
    parts = [f"{run[0]}-{run[-1]}" if len(run) >= LONG_RUN else ", ".join(map(str, run)) for run in runs]
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(parts)}"


def plural(does: str, num: int) -> str:
    """What `num` ranks do: "wait in recv" for "waits in recv" if there are several."""
    verb, space, rest = does.partition(" ")
    return f"{PLURALS.get(verb, verb)}{space}{rest}" if num > 1 else does
