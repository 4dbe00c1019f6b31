"""Every lab's solutions beside processes that compute without end: a slow machine must not make a right answer wrong.

    python -m tests.busy [TIMES] [LAB ...]     each exercise of these labs, or of all, TIMES times (10)

Prints a line for each exercise, with what its checks said if they did not print what is stored, and exits with 1 if
any did so.
"""
from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from nbformat import NotebookNode

from book.grading.lab import points
from book.grading.trial import printed, solution, stored
from tests.answers import LABS

NUM_LOOPS = 4


@contextmanager
def busy(num_loops: int = NUM_LOOPS) -> Iterator[None]:
    """This many processes compute until the block ends."""
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(num_loops)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def verdict(lab: NotebookNode, exercise: int, answer: str) -> str | None:
    """What is wrong with an answer by the checks of an exercise, in a line; None if they print what is stored."""
    try:
        texts = printed(lab, exercise, answer, "busy")
    except Exception as error:
        return " | ".join(f"{type(error).__name__}: {error}".split("\n"))
    return next((f"{name} prints {text!r}" for name, text in texts.items() if text != stored(lab, name)), None)


def main(arguments: list[str]) -> int:
    times = int(arguments[0]) if arguments else 10
    num_wrong = 0
    with busy():
        for name in arguments[1:] or LABS:
            lab = LABS[name]
            for exercise in points(lab):
                started_s = time.monotonic()
                said = [verdict(lab, exercise, solution(lab, exercise)) for _ in range(times)]
                wrong = [words for words in said if words]
                print(f"{name}, exercise {exercise}: {len(wrong)} of {times} wrong, "
                      f"{(time.monotonic() - started_s) / times:.1f} s each", *wrong, sep="\n    ", flush=True)
                num_wrong += len(wrong)
    print(f"{num_wrong} wrong verdicts")
    return int(num_wrong > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
