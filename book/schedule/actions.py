"""L0: pipelines as plain data: which forward or backward of which micro-batch each rank runs next.

A model is cut into stages, a batch into micro-batches. For each micro-batch a stage runs

    F   the forward: takes what the stage before gives, and keeps what the backward will need
    B   the whole backward: gradients of the stage's input and of its weights
    I   the first half of it: the gradient of its input, which the stage before waits for
    W   the second half: the gradients of its weights, which nobody waits for

so either F and B, or F, I and W. A rank runs its actions one after the other, in its own order; what ties ranks
together is that an F needs the F of the stage before, a B or I the B or I of the stage after.
"""
from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from book.columns import ColumnError, Columns, count, word
from book.schedule.moves import check_counts
from book.schedule.phases import ScheduleError

KINDS = ("F", "B", "I", "W")
Work = tuple[int, int, str]  # stage, micro-batch, and "output", "gradient" (of its input) or "weights"


@dataclass(frozen=True)
class Action:
    """Rank `rank` runs the `kind` ("F", "B", "I" or "W") of micro-batch `micro_batch` on stage `stage`."""

    rank: int = count()
    stage: int = count()
    micro_batch: int = count()
    kind: str = word()

    def __str__(self) -> str:
        return f"{self.kind}{self.micro_batch} of stage {self.stage}"

    def needs(self, num_stages: int) -> Iterator[tuple[Work, str]]:
        """What must be there before this can run, and who gives it, in words."""
        stage, m = self.stage, self.micro_batch
        if self.kind == "F" and stage > 0:
            yield (stage - 1, m, "output"), f"F{m} of stage {stage - 1}"
        if self.kind in ("B", "I"):
            yield (stage, m, "output"), f"F{m} of stage {stage}"
            if stage < num_stages - 1:
                yield (stage + 1, m, "gradient"), f"the backward of micro-batch {m} on stage {stage + 1}"
        if self.kind == "W":
            yield (stage, m, "gradient"), f"I{m} of stage {stage}"

    def gives(self) -> Iterator[Work]:
        """What is there once this has run."""
        for what in {"F": ("output",), "B": ("gradient", "weights"), "I": ("gradient",), "W": ("weights",)}[self.kind]:
            yield self.stage, self.micro_batch, what


def taker_of(work: Work, num_stages: int) -> int | None:
    """The other stage that needs a result: the one after for an output, the one before for a gradient; or None."""
    stage, _, what = work
    taker = {"output": stage + 1, "gradient": stage - 1}.get(what, -1)
    return taker if 0 <= taker < num_stages else None


class PipelineSchedule:
    """The order in which every rank of a pipeline runs its actions.

    `actions` is any iterable of `Action` (or of tuples in its order); those of one rank keep their order, and are kept
    as NumPy columns, rank by rank. `world_size` is one more than the highest rank, if not given. Raises ScheduleError
    when an action names an invalid stage, micro-batch, rank or kind, or comes twice, and when two ranks run one stage.
    An order need not be complete: a run that hung has done a part of it. `check()` says whether it is, and runs.
    """

    def __init__(self, name: str, num_stages: int, num_micro_batches: int, actions: Iterable[Action],
                 world_size: int | None = None):
        if not isinstance(name, str) or not name.isidentifier():
            raise ScheduleError(f"a schedule's name is letters, digits and underscores, not {name!r}")
        check_counts(num_stages=num_stages, num_micro_batches=num_micro_batches)
        self.name, self.num_stages, self.num_micro_batches = name, int(num_stages), int(num_micro_batches)
        try:
            rows = Columns.from_rows(Action, actions)
        except ColumnError as error:
            raise ScheduleError(f"{name}: {error}") from error
        ranks = rows.array("rank") if len(rows) else np.zeros(0, dtype=np.int32)
        self.actions: Columns = rows.take(np.argsort(ranks, kind="stable"))
        self.world_size = int(ranks.max(initial=0)) + 1 if world_size is None else world_size
        check_counts(world_size=self.world_size)
        self._check_ranges()
        self._rank_of = self._check_places()

    def __repr__(self) -> str:
        size = f"{self.num_stages} stages on {self.world_size} ranks, {self.num_micro_batches} micro-batches"
        return f"<PipelineSchedule {self.name}: {size}, {len(self.actions)} actions>"

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, PipelineSchedule):
            return NotImplemented
        return self._head() == other._head() and self.actions == other.actions

    __hash__ = None  # type: ignore[assignment]

    def of_rank(self, rank: int) -> list[Action]:
        """The actions of one rank, in its order."""
        return list(self.actions.take(self.actions.array("rank") == rank)) if len(self.actions) else []

    def rank_of(self, stage: int) -> int | None:
        """The rank that runs a stage; None where none does."""
        return self._rank_of.get(stage)

    def check(self) -> PipelineSchedule:
        """Returns the schedule if every stage runs every micro-batch forward and backward, in an order that can run.

        Raises ScheduleError naming what is missing, or what each rank would wait for.
        """
        done = {work for action in self.runnable() for work in action.gives()}
        for stage in range(self.num_stages):
            for m in range(self.num_micro_batches):
                for what, kinds in (("output", f"F{m}"), ("gradient", f"B{m} or I{m}"), ("weights", f"W{m}")):
                    if (stage, m, what) not in done:
                        raise ScheduleError(f"{self.name}: nobody runs {kinds} of stage {stage}")
        return self

    def runnable(self) -> Iterator[Action]:
        """All actions in an order in which one process after the other could run them.

        Raises ScheduleError where no rank can go on: for each of them what it waits for.
        """
        queues = [self.of_rank(rank) for rank in range(self.world_size)]
        at, moved = [0] * self.world_size, True
        done: set[Work] = set()
        while moved:
            moved = False
            for rank, queue in enumerate(queues):
                while at[rank] < len(queue) and not self._missing(queue[at[rank]], done):
                    done.update(queue[at[rank]].gives())
                    yield queue[at[rank]]
                    at[rank], moved = at[rank] + 1, True
        stuck = [queue[i] for queue, i in zip(queues, at) if i < len(queue)]
        if stuck:
            waits = tuple(self._waits(action, done, queues[action.rank]) for action in stuck)
            error = ScheduleError(f"{self.name}: this order cannot run: {'; '.join(waits)}")
            error.waits = waits
            raise error

    def in_flight(self) -> list[list[int]]:
        """For each rank, after each of its actions, how many forwards wait for their backward (for W, if it is split).

        What such a forward kept is still in memory; a unit is one micro-batch's activations on one stage.
        """
        change = {"F": 1, "B": -1, "I": 0, "W": -1}
        return [np.cumsum([change[action.kind] for action in self.of_rank(rank)], dtype=int).tolist()
                for rank in range(self.world_size)]

    def peak_in_flight(self) -> list[int]:
        """The most forwards that wait for their backward at once, for each rank."""
        return [max(counts, default=0) for counts in self.in_flight()]

    def to_csv(self) -> str:
        """The schedule as text: a comment line with its head, then a line per rank such as "0F0,0F1,0B0".

        An action is written as its stage, its kind and its micro-batch.
        """
        lines = [",".join(f"{a.stage}{a.kind}{a.micro_batch}" for a in self.of_rank(rank))
                 for rank in range(self.world_size)]
        return "\n".join([f"# {self.name},{self.num_stages},{self.num_micro_batches}", *lines]) + "\n"

    @classmethod
    def from_csv(cls, text: str) -> PipelineSchedule:
        """The schedule that `to_csv` wrote; raises ScheduleError when the text is something else."""
        head, *lines = text.splitlines() or [""]
        try:
            name, num_stages, num_micro_batches = head.removeprefix("# ").split(",")
            actions = [_parsed(rank, word) for rank, line in enumerate(lines) for word in line.split(",") if word]
            return cls(name, int(num_stages), int(num_micro_batches), actions, world_size=len(lines))
        except (TypeError, ValueError) as error:
            if isinstance(error, ScheduleError):
                raise
            raise ScheduleError(f"this is not a pipeline's CSV (write one with to_csv): {error}") from error

    def _head(self) -> tuple[str, int, int, int]:
        return self.name, self.num_stages, self.num_micro_batches, self.world_size

    def _missing(self, action: Action, done: set[Work]) -> list[str]:
        return [giver for work, giver in action.needs(self.num_stages) if work not in done]

    def _waits(self, action: Action, done: set[Work], queue: list[Action]) -> str:
        wanted = self._missing(action, done)[0]
        own = any(f"{later}" == wanted for later in queue)
        return f"rank {action.rank} waits at {action} for {wanted}" + (", which it runs later itself" if own else "")

    def _check_ranges(self) -> None:
        limits = {"rank": self.world_size, "stage": self.num_stages, "micro_batch": self.num_micro_batches}
        for name, limit in limits.items() if len(self.actions) else ():
            column = self.actions.array(name)
            bad = np.flatnonzero((column < 0) | (column >= limit))
            if len(bad):
                raise ScheduleError(f"{self.name}: action {bad[0]} has {name} {column[bad[0]]}, it must be "
                                    f"0 to {limit - 1}")
        for action in self.actions:
            if action.kind not in KINDS:
                raise ScheduleError(f"{self.name}: kind must be one of {', '.join(KINDS)}, not {action.kind!r}")

    def _check_places(self) -> dict[int, int]:
        """The rank of each stage; refuses a stage on two ranks and work that is done twice."""
        rank_of: dict[int, int] = {}
        done: set[Work] = set()
        for action in self.actions:
            if rank_of.setdefault(action.stage, action.rank) != action.rank:
                raise ScheduleError(f"{self.name}: stage {action.stage} is run by ranks {rank_of[action.stage]} and "
                                    f"{action.rank}: a stage's weights are on one rank")
            for work in action.gives():
                if work in done:
                    raise ScheduleError(f"{self.name}: rank {action.rank} runs {action} when that was done already")
                done.add(work)
        return rank_of


def _parsed(rank: int, word: str) -> Action:
    kind = next((letter for letter in word if letter in KINDS), None)
    if kind is None:
        raise ValueError(f"{word!r} is no action such as 0F3")
    stage, micro_batch = word.split(kind)
    return Action(rank, int(stage), int(micro_batch), kind)
