"""L3: lab 13: batches that a thread loads ahead: when each is loaded, how the generator ends, which errors come out."""
from __future__ import annotations

import queue
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from book.checks.verdict import CheckFailed, refuse, require


def loaded_ahead(events: Sequence[tuple[str, int]], num_batches: int, case: str) -> int:
    """`events` of a loader and a trainer, ("load" | "loaded" | "train" | "trained", batch), in order: each load must
    begin before the batch before it has been trained on, no earlier than one batch ahead, and in another thread: who
    loads first and then yields is refused if that is so for all batches. Returns the number of events."""
    trained = [batch for what, batch in events if what == "train"]
    require(trained == list(range(num_batches)), f"{case}: the batches that were trained on are {trained}, not "
            f"{list(range(num_batches))}: every one of them, once, in order")
    at = {event: place for place, event in enumerate(events)}
    for batch in range(1, num_batches):
        require(("load", batch) in at and at["load", batch] < at["trained", batch - 1],
                f"{case}: batch {batch} is loaded only after batch {batch - 1} has been trained on, so the two add up. "
                "Have another thread load it in the meantime")
    late = all(at.get(("loaded", batch), len(at)) < at["train", batch - 1] for batch in range(1, num_batches))
    refuse(late, f"{case}: the caller gets each batch only when the next one has been loaded, so the two add up. Start "
           "the load in another thread, and yield while it runs")
    most = sum(at["load", batch] < at["trained", 0] for batch in range(1, num_batches))
    beside = ("A queue with one place holds one, and the thread that waits for a place holds another." if most == 2 else
              f"While the first batch is in use, {most} more are loaded or begun.")
    for batch in range(2, num_batches):
        require(at["load", batch] > at["trained", batch - 2],
                f"{case}: batch {batch} is loaded before batch {batch - 2} has been trained on, so two are held that "
                f"the caller has not asked for. {beside} Begin a load only when the caller takes the batch before it, "
                "as a thread for each load does")
    return len(events)


def ended(batches: Any) -> Iterator[Any]:
    """The batches of a generator, which must end by itself: CheckFailed for what is none, for one that waits for a
    thread that has stopped, and for a StopIteration that comes out of it as an error."""
    require(hasattr(batches, "__iter__"), f"ahead returns {'nothing' if batches is None else repr(batches)}: write a "
            "generator, with yield")
    steps = iter(batches)
    with _stopped_threads() as stopped:
        while True:
            batch, error = _next(steps, stopped)
            if isinstance(error, StopIteration):
                return
            refuse(isinstance(error, RuntimeError) and isinstance(error.__cause__, StopIteration), _NO_END.format(
                where="your generator, where Python makes it a RuntimeError"))
            if error is not None:
                if isinstance(error, (queue.Empty, LookupError)):  # nothing is there where a thread's batch should be
                    _explain_stop(stopped)
                raise error
            yield batch


_NO_END = ("after the last batch, next(batches) raises StopIteration inside {where}: catch it there and return, or "
           "write next(batches, end) and return once you get `end`")
PATIENCE_S = 10.0  # the slowest loader of the lab takes 0.2 s


def _next(steps: Iterator[Any], stopped: Sequence[BaseException]) -> tuple[Any, BaseException | None]:
    """The next batch, or the error that comes in its place; CheckFailed where none comes within PATIENCE_S."""
    came: list[tuple[Any, BaseException | None]] = []

    def take() -> None:
        try:
            came.append((next(steps), None))
        except BaseException as error:  # raised again where the batches are wanted
            came.append((None, error))

    thread = threading.Thread(target=take, daemon=True)
    thread.start()
    thread.join(PATIENCE_S)
    if not came:
        _explain_stop(stopped)
        raise CheckFailed("your generator waits for a batch that its thread will never put: pass the error on, or the "
                          "end")
    return came[0]


def _explain_stop(stopped: Sequence[BaseException]) -> None:
    """Raise CheckFailed if a thread has stopped for an error that the generator never gets."""
    refuse(any(isinstance(error, StopIteration) for error in stopped), _NO_END.format(
        where="your thread, which stops there"))
    for error in stopped:
        raise CheckFailed("your generator waits for a batch that its thread will never put: pass the error on. The "
                          f"thread has stopped with {type(error).__name__}: {error}")


@contextmanager
def _stopped_threads() -> Iterator[list[BaseException]]:
    """The errors that threads stop with, while in the block; Python shows those that no loader of the lab raises."""
    stopped: list[BaseException] = []
    usual = threading.excepthook

    def note(arguments: Any) -> None:
        stopped.append(arguments.exc_value)
        if not isinstance(arguments.exc_value, (StopIteration, OSError)):
            usual(arguments)

    threading.excepthook = note
    try:
        yield stopped
    finally:
        threading.excepthook = usual


def before_error(got: Sequence[int], after: int) -> int:
    """The batches that came before an error of the loader must be all that it had given; returns how many."""
    require(list(got) == list(range(after)), f"the loader gives {after} batches and then raises an error, and you "
            f"yield {list(got)} before you raise it")
    return len(got)


def error_lost(got: Sequence[Any], after: int) -> None:
    """Raise CheckFailed for a loader's error that did not come out."""
    raise CheckFailed(f"the loader raises OSError after {after} batches, and your generator ends after {len(got)} as "
                      "if all were well: keep what the thread catches, and raise it in the generator")
