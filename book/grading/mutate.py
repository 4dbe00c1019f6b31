"""L4: how good a lab's checks are: small faults in its own answers, and what the checks say about each.

A mutant is caught when a check raises, or prints something other than it printed for the solution. A mutant that
survives shows a hole in the checks, or is equivalent to the solution: a person decides that, and notes the reason.
"""
from __future__ import annotations

import random
import re
import signal
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nbformat import NotebookNode

from book.grading.lab import LabError, checks, marks, points
from book.grading.mutations import Mutant, mutants
from book.grading.trial import printed, solution, stored
from book.launch.server import warm_up

TELLING = ("CheckFailed", "HangError")
IN_RANK = re.compile(r"\n[\w.]*CheckFailed: ")  # with its module where it came over RPC
# Errors of launch, PyTorch and Python that say what is wrong with a call, at the line of the answer that makes it.
NAMED = re.compile(
    r"there is no (rank|stage) |blocks can't make \d+ stages|Pipeline group size \d+ cannot|"
    r"(sends to|receives from) itself|should not be the same as the rank of the current process|"
    r"Invalid ``op``\. Expected|Expected parameter `\w+`|Must specify global_rank|missing \d+ required|"
    r"argument '\w+' .*must be|incompatible function arguments|unsupported operand type|"
    r"cannot join thread before it is started")
LIMIT_S = 90  # of one mutant; this also ends infinite loops


@dataclass(frozen=True)
class MutantOutcome:
    """What became of a mutant: a "public" or "hidden" check caught it, or it "survived" or is "equivalent"."""

    exercise: int
    mutant: Mutant
    verdict: str
    message: str
    line: str = ""  # where an error was raised, the innermost one in the lab's cells

    @property
    def at_answer(self) -> bool:
        """Whether an error points to a line of the answer, not to one of the lab's own code around it."""
        return bool(self.line) and self.line in {line.strip() for line in self.mutant.source.splitlines()}

    @property
    def explained(self) -> bool:
        """Whether the message says what is wrong: that of a check, here or in a rank, of a hang, or of a bad call.

        Other errors only show the line.
        """
        return (self.message.startswith(TELLING) or bool(IN_RANK.search(self.message))
                or bool(NAMED.search(self.message)))


def outcomes(lab: NotebookNode, num_each: int, seed: int, equivalent: Mapping[str, str],
             exercises: Collection[int] | None = None) -> Iterator[MutantOutcome]:
    """Runs `num_each` drawn mutants of each exercise, or all if there are fewer, and yields the outcome of each.

    `exercises` None stands for all. `equivalent` has, by `Mutant.key`, why a mutant is as good as the solution.
    """
    warm_up(whole=True)  # launches follow one another, and leave no time to load what optimizers need
    for exercise in exercises or points(lab):
        found = list(mutants(solution(lab, exercise)))
        drawn = random.Random(f"{seed} {exercise}").sample(found, min(num_each, len(found)))
        for mutant in sorted(drawn, key=lambda one: one.line):
            yield _outcome(lab, exercise, mutant, equivalent)


def _outcome(lab: NotebookNode, exercise: int, mutant: Mutant, equivalent: Mapping[str, str]) -> MutantOutcome:
    hidden = {marks(cell)["id"] for cell in checks(lab, exercise) if marks(cell).get("hidden")}
    passed: dict[str, str] = {}
    try:
        with _limited():
            texts = printed(lab, exercise, mutant.source, "mutant", passed)
    except Exception as error:
        where = "hidden" if {marks(cell)["id"] for cell in checks(lab, exercise)} - set(passed) <= hidden else "public"
        return MutantOutcome(exercise, mutant, where, f"{type(error).__name__}: {error}", _line_of(error))
    different = [name for name, text in texts.items() if text != stored(lab, name)]
    if different:
        return MutantOutcome(exercise, mutant, "hidden" if set(different) <= hidden else "public",
                             f"prints {texts[different[0]]!r}")
    return MutantOutcome(exercise, mutant, "equivalent" if mutant.key in equivalent else "survived",
                         equivalent.get(mutant.key, ""))


def _line_of(error: Exception) -> str:
    """The innermost line of the lab's cells at which an error was raised, in a rank or here."""
    in_rank = re.match(r"rank \d+ failed in cell line \d+: (.*)", str(error))
    frames = traceback.extract_tb(error.__traceback__)
    here = [frame.line or "" for frame in frames if frame.filename.startswith("<ipython-input-")]
    return in_rank[1] if in_rank else here[-1] if here else ""


@contextmanager
def _limited() -> Iterator[None]:
    def late(*_: Any) -> None:
        raise TimeoutError(f"not done after {LIMIT_S} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(LIMIT_S)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def read_equivalent(path: Path) -> dict[str, str]:
    """The mutants that a person has found to be equivalent: lines `before -> after  # reason`."""
    lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    for line in lines:
        if " -> " not in line or "  # " not in line:
            raise LabError(f"{path}: a line must read 'before -> after  # reason', not {line!r}")
    return {key: reason for key, _, reason in (line.partition("  # ") for line in lines)}


def table(found: list[MutantOutcome]) -> str:
    """A line for each exercise: how many mutants, what caught them, for how many a message says what is wrong.

    "Own line" counts those of the others whose error points to a line of the answer.
    """
    lines = ["exercise  mutants  public  hidden only  survived  equivalent  explained  own line"]
    numbers: list[int | None] = [*sorted({one.exercise for one in found}), None]
    for exercise in numbers:
        own = [one for one in found if exercise in (None, one.exercise)]
        counts = {verdict: sum(one.verdict == verdict for one in own)
                  for verdict in ("public", "hidden", "survived", "equivalent")}
        caught = [one for one in own if one.verdict in ("public", "hidden")]
        explained = f"{sum(one.explained for one in caught)} of {len(caught)}"
        own_line = sum(one.at_answer and not one.explained for one in caught)
        lines.append(f"{exercise or 'all':>8}  {len(own):7}  {counts['public']:6}  {counts['hidden']:11}  "
                     f"{counts['survived']:8}  {counts['equivalent']:10}  {explained:>9}  {own_line:8}")
    return "\n".join(lines)


def report(lab: NotebookNode, num_each: int, seed: int, equivalent: Mapping[str, str],
           tell: Callable[[str], None], exercises: Collection[int] | None = None) -> bool:
    """Runs mutants, reports each outcome and a table at the end; returns whether any mutant survived."""
    found = []
    for one in outcomes(lab, num_each, seed, equivalent, exercises):
        found.append(one)
        said = ": ".join(one.message.split("\n")[:2])  # a rank's own error is on the launcher's second line
        tell(f"exercise {one.exercise}, {one.mutant.mutation.mistake}: {one.mutant.key}\n"
             f"    {one.verdict}{': ' + said if said else ''}")
    tell(table(found))
    return any(one.verdict == "survived" for one in found)
