"""L2: threads that an error has ended: Python prints it, and the main thread, which joins them, goes on.

The rank does not fail: the main thread may not need what the thread was to do, and torchrun's ranks end well too.
"""
from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from book.audit.notes import noted
from book.tap.place import is_learners
from book.tap.replaced import replace
from book.words import alike, named


class Uncaught(NamedTuple):
    """An error that has ended a thread: the thread's name, the error's, its text, and the learner's line or ""."""
    thread: str
    name: str
    message: str
    place: str


MOST = 10
_uncaught: list[tuple[str, BaseException]] = []


def forget() -> None:
    """Forget what has been noted."""
    _uncaught.clear()


def start() -> None:
    """Have this process note the errors that end its threads, and print them as before."""
    prints: Callable[[Any], Any] = threading.excepthook

    def noted(args: Any) -> None:
        # One that another hook has kept from an earlier run may note the same error.
        is_new = all(error is not args.exc_value for _, error in _uncaught)
        if args.exc_value is not None and is_new and len(_uncaught) < MOST and args.exc_type is not SystemExit:
            _uncaught.append((args.thread.name if args.thread else "", args.exc_value))
        prints(args)

    replace(threading, "excepthook", noted)


def uncaught(place_of: Callable[[str, int], Any]) -> tuple[Uncaught, ...]:
    """The errors that have ended threads of this process."""
    return tuple(Uncaught(thread, type(error).__name__, str(error), _place(error, place_of))
                 for thread, error in list(_uncaught))


def _place(error: BaseException, place_of: Callable[[str, int], Any]) -> str:
    """The innermost of the learner's lines that an error has come through."""
    found, traceback = "", error.__traceback__
    while traceback is not None:
        filename = traceback.tb_frame.f_code.co_filename
        found = str(place_of(filename, traceback.tb_lineno)) if is_learners(filename) else found
        traceback = traceback.tb_next
    return found


def threads_that_failed(ranks: Sequence[Any]) -> Iterator[str]:
    """Errors that have ended threads, those of several ranks together."""
    for error, failed in alike(dict.fromkeys(noted(ranks, "uncaught"))).items():
        where = f" in {error.place}" if error.place else ""
        yield (f"thread {error.thread} of {named(failed)} has ended with an error{where}, and the rank "
               f"went on: {': '.join(filter(None, (error.name, error.message)))}")
