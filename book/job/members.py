"""L2: a rank of a job as the judge of its host sees it: what it has said, and what the system knows of its process."""
from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from book.job import told
from book.job.told import Told
from book.launch import family, where
from book.launch.stacks import of_crash
from book.launch.supervise import is_victim
from book.waiting.doing import Doing, Kind
from book.waiting.hang import Standing

DEAF_S = 4.0  # a rank reports twice a second; on a crowded machine less often


@dataclass
class Member:
    """A rank. Times are those of time.monotonic()."""
    told: Told
    moved_s: float  # since when it has called nothing
    gone_s: float | None = None  # since when its process is gone
    stopped_s: float | None = None  # since when a signal keeps it from running
    ended_s: float | None = None  # when its process ended, where the system has told; `gone_s` is when this was seen

    def look(self, said: Told, now_s: float, ended_s: float | None = None) -> None:
        """Note what it says now, and whether its process runs, or when that ended."""
        self.ended_s = ended_s
        if (said.serial, said.ended, said.entered) != (self.told.serial, self.told.ended, self.told.entered):
            self.moved_s = now_s
        self.told = said
        if self.gone_s is None and family.is_gone(said.pid):
            self.gone_s = now_s
        self.stopped_s = (self.stopped_s or now_s) if family.is_stopped(said.pid) else None

    @property
    def rank(self) -> int:
        """Its rank in the world."""
        return self.told.rank

    @property
    def died(self) -> bool:
        """Whether its process is gone, and its script had not ended."""
        return self.gone_s is not None and not self.told.ended

    @property
    def failed(self) -> bool:
        """Whether its script has raised, or its process died."""
        return self.died or self.told.failure is not None

    @property
    def works(self) -> bool:
        """Whether its script runs."""
        return not self.told.ended and self.gone_s is None

    @property
    def is_victim(self) -> bool:
        """Whether it has failed because another rank had."""
        return self.told.failure is not None and is_victim(self.told.failure)

    def failed_s(self) -> float:
        """When it failed."""
        return self.told.time_s if self.told.failure or self.gone_s is None else self.gone_s

    def still_s(self, now_s: float) -> float:
        """How long it has stood still; 0.0 if it may go on by itself."""
        if self.stopped_s is not None:
            return now_s - self.stopped_s
        silent_s = now_s - self.told.time_s
        if silent_s < DEAF_S:
            return self.told.still_s + (silent_s if self.told.still_s else 0.0)
        return silent_s if self.told.entered and family.is_asleep(self.told.pid) else 0.0

    def standing(self, folder: Path, now_s: float) -> Standing:
        """What it does, for the causes of a hang."""
        said = self.told
        if said.ended:
            return said.standing or Standing(Doing(Kind.FINISHED))
        if self.stopped_s is not None:
            return self._last(Kind.STOPPED)
        if now_s - said.time_s < DEAF_S:
            return said.standing or Standing(Doing(Kind.COMPUTES))
        lines = of_crash(_text(told.stacks_file(folder, self.rank)))
        places = where.places(lines)
        asleep = said.entered and family.is_asleep(said.pid)
        kind = Kind.IN_C if asleep else Kind.DEAF
        return self._last(kind)._replace(place=str(places[-1]) if places else "")

    def _last(self, kind: Kind) -> Standing:
        """What it had left undone when it last said so, and what it is known to do now."""
        before = self.told.standing or Standing(Doing(kind))
        return before._replace(main=Doing(kind), place="", threads=None, worker=None)


def _text(path: Path) -> str:
    """What faulthandler has written last; it writes a heading before each time."""
    try:
        return path.read_text(errors="replace").rpartition("Timeout (")[2]
    except OSError:
        return ""
