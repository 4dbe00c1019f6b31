"""Which of the labs' answers stand for the others: `python -m tests.families` writes answers/families.txt.

Runs every answer and notes which lines of `book.checks` and of the lab's checks it reaches, and the kind of error that a
rank met. Then takes answers, the cheapest for what they add first, until every line that any answer reaches is reached:
one for each branch of a message.
"""
from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

from book import checks
from book.checks import CheckFailed
from book.launch import LaunchError
from tests.test_answers import ANSWERS, FAMILIES, LABS, headed, named, run_lab

CHECKS = str(Path(checks.__file__).parent)
HEAD = """\
# Written by `python -m tests.families`. A plus: `make test` runs this answer; the others take turns there.
"""
Reached = set[tuple[Any, ...]]


def reached_by(path: Path) -> tuple[Reached, float]:
    """What running an answer reaches, and the seconds that it takes."""
    exercise, _, body = headed(path)
    found: Reached = set()
    begin_s = time.perf_counter()
    sys.settrace(_tracer(found))
    try:
        run_lab(LABS[path.parent.name], exercise, body, path.stem)
    except (CheckFailed, LaunchError) as error:
        # What is checked in a rank is not traced here: its error's first words stand for the branch.
        in_rank = re.findall(r"^(\w+(?:Error|Failed)): ((?:\S+ ?){0,3})", str(error), re.M)
        found |= {(path.parent.name, exercise, *words) for words in in_rank}
        found |= {(path.parent.name, exercise, type(error).__name__)}
    finally:
        sys.settrace(None)
    return found, time.perf_counter() - begin_s


def _tracer(found: Reached) -> Callable[..., Any]:
    def each_line(frame: FrameType, event: str, _: Any) -> Callable[..., Any]:
        if event == "line":
            found.add((frame.f_code.co_filename, frame.f_lineno))
        return each_line

    def each_call(frame: FrameType, _event: str, _argument: Any) -> Callable[..., Any] | None:
        return each_line if frame.f_code.co_filename.startswith(CHECKS) else None

    return each_call


def cover(reached: dict[str, tuple[Reached, float]]) -> list[str]:
    """Answers that together reach what all of them reach: each time the one that adds most for its seconds."""
    missing = set().union(*(lines for lines, _ in reached.values()))
    chosen = []
    while missing:
        best = max(reached, key=lambda name: len(reached[name][0] & missing) / (reached[name][1] + 0.1))
        chosen.append(best)
        missing -= reached[best][0]
    return chosen


def main() -> None:
    """Run all answers, and write which of them stand for the others."""
    reached = {}
    for number, path in enumerate(ANSWERS, 1):
        reached[named(path)] = reached_by(path)
        print(f"{number} of {len(ANSWERS)}: {named(path)}", file=sys.stderr)
    chosen = set(cover(reached))
    FAMILIES.write_text(HEAD + "".join(f"{'+' if name in chosen else '-'} {name}\n" for name in sorted(reached)))
    seconds = sum(reached[name][1] for name in chosen)
    print(f"{len(chosen)} of {len(reached)} answers reach all that is reached, in about {seconds:.0f} s")


if __name__ == "__main__":
    main()
