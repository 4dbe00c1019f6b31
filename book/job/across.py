"""L2: what the judges of a job's hosts tell one another, through the store that torchrun's agents keep.

The judge of host 0 hears of all ranks, and speaks. Another one speaks while that one has not heard from it.
"""
from __future__ import annotations

import os
import pickle
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

from book.job.members import Member
from book.job.told import Told, moved_by
from book.waiting.hang import CollectiveCall, Group, Standing

EXCHANGE_S = 0.3
STORE_LIMIT_S = 2.0
SILENT_S = 6.0  # a host that has said nothing new for so long is not heard any more
ANSWER_S = 1.5  # for host 0 to have read what this one has told
Calls = Mapping[Group, Mapping[int, CollectiveCall]]


class Seen(NamedTuple):
    """A rank as the judge of its host sees it."""
    told: Told
    standing: Standing
    still_s: float
    moved_s: float
    gone_s: float | None
    stopped_s: float | None


class HostReport(NamedTuple):
    """What the judge of a host says at `time_s`, by its own clock: those of hosts differ."""
    number: int
    time_s: float
    ranks: tuple[Seen, ...]
    calls: Calls  # their last ones
    ends: bool  # whether all judges are to end their ranks
    heard: Mapping[int, int]  # the number of the last report of each host that has been read


@dataclass
class Elsewhere(Member):
    """A rank of another host, as the judge there has last seen it."""
    still_then_s: float = 0.0
    heard_s: float = 0.0
    stands: Standing | None = None

    def still_s(self, now_s: float) -> float:
        """How long it has stood still; 0.0 if it may go on by itself."""
        return self.still_then_s + (now_s - self.heard_s if self.still_then_s else 0.0)

    def standing(self, folder: Path, now_s: float) -> Standing:
        """What it did when its judge last looked."""
        assert self.stands is not None
        return self.stands


def seen(member: Member, folder: Path, now_s: float) -> Seen:
    """What to tell of a rank of this host: not what its summary needs, which is large."""
    said = member.told._replace(totals={}, noted=None)
    return Seen(said, member.standing(folder, now_s), member.still_s(now_s), member.moved_s, member.gone_s,
                member.stopped_s)


class Exchange:
    """A thread that writes this host's report into the store again and again, and reads those of others.

    Host 0 reads all, another one that of host 0. Where the store is gone nothing is heard any more. Reports are
    pickled, as the objects of torch's own collectives are: whoever can write to the store is part of the job.
    """

    def __init__(self, first: Told, attempt: str) -> None:
        self.host = first.host
        self._others = [host for host in (range(first.num_hosts) if self.host == 0 else (0,)) if host != self.host]
        self._address, self._prefix = first.store, f"lockstep/{attempt}/"
        self._own = HostReport(0, time.monotonic(), (), {}, False, {})
        self._over, self._ready = threading.Event(), threading.Event()
        self._heard: dict[int, tuple[HostReport, float]] = {}
        threading.Thread(target=self._run, daemon=True).start()

    def tell(self, ranks: tuple[Seen, ...], calls: Calls, ends: bool) -> int:
        """Have this told next, as in HostReport; returns the report's number."""
        heard = {host: report.number for host, (report, _) in list(self._heard.items())}
        self._own = HostReport(self._own.number + 1, time.monotonic(), ranks, calls, ends, heard)
        self._ready.set()
        return self._own.number

    def heard(self) -> list[tuple[HostReport, float]]:
        """The newest report of each host that is heard, and when it came."""
        now_s = time.monotonic()
        return [(report, came_s) for report, came_s in list(self._heard.values()) if now_s < came_s + SILENT_S]

    def hears_all(self) -> bool:
        """Whether all those whose reports are read are heard."""
        return len(self.heard()) == len(self._others)

    def is_read(self, number: int, limit_s: float = 0.0) -> bool:
        """Whether host 0 has read this report of this host, if so long is waited for that."""
        end_s = time.monotonic() + limit_s
        while not any(report.heard.get(self.host, 0) >= number for report, _ in self.heard()):
            if time.monotonic() >= end_s:
                return False
            self._ready.set()
            time.sleep(EXCHANGE_S / 3)
        return True

    def end(self) -> None:
        """Exchange no more."""
        self._over.set()

    def _run(self) -> None:
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # that the store has gone is no news
        with suppress(Exception):
            from torch.distributed import TCPStore
            store = TCPStore(*self._address, is_master=False, wait_for_workers=False,
                             timeout=timedelta(seconds=STORE_LIMIT_S))
            while not self._over.is_set():
                self._ready.wait(EXCHANGE_S)
                self._ready.clear()
                store.set(f"{self._prefix}{self.host}", pickle.dumps(self._own))
                for host in self._others:
                    self._read(store, host)

    def _read(self, store: Any, host: int) -> None:
        key = f"{self._prefix}{host}"
        if not store.check([key]):
            return
        report, now_s = pickle.loads(store.get(key)), time.monotonic()
        if host not in self._heard or self._heard[host][0].number != report.number:
            self._heard[host] = report, now_s


def ranks_of(report: HostReport, came_s: float) -> dict[int, Elsewhere]:
    """The ranks of a report, with times of this host's clock. They are late by what the report was under way."""
    by_s = came_s - report.time_s

    def here(moment_s: float | None) -> float | None:
        return None if moment_s is None else moment_s + by_s

    return {one.told.rank: Elsewhere(moved_by(one.told, by_s), one.moved_s + by_s, here(one.gone_s),
                                     here(one.stopped_s), still_then_s=one.still_s, heard_s=came_s,
                                     stands=one.standing)
            for one in report.ranks}
