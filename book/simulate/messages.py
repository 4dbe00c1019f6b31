"""L2: the messages of a schedule: moves of one step between the same two ranks travel together."""
from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from book.schedule import Round, Schedule


class StepMessages(NamedTuple):
    """A step's M messages in the schedule's order: from whom, to whom, bytes, and bytes that are added there.

    `moves` are the positions of its moves in the schedule, `message` says in which message each of them is.
    """

    src: np.ndarray
    dst: np.ndarray
    num_bytes: np.ndarray
    added_bytes: np.ndarray
    moves: np.ndarray
    message: np.ndarray


def steps(schedule: Schedule, chunk_bytes: float) -> Iterator[StepMessages]:
    """The messages of each step that has any."""
    if not len(schedule.moves):
        return
    src, dst = (schedule.moves.array(name) for name in ("src", "dst"))
    adds = schedule.moves.mask("op", "reduce")
    for rows in schedule.steps():
        first, message = _grouped(src[rows] * schedule.world_size + dst[rows])
        added_bytes = np.bincount(message, weights=adds[rows]) * chunk_bytes
        num_bytes = np.bincount(message) * chunk_bytes
        yield StepMessages(src[rows[first]], dst[rows[first]], num_bytes, added_bytes, rows, message)


def rounds(schedule: Schedule) -> Iterator[Round]:
    """The same messages with their chunks counted; steps that follow one rule are one round."""
    if schedule.phases is not None:
        yield from schedule.phases.rounds()
        return
    for step in steps(schedule, 1):
        yield Round(*step[:4])


def _grouped(pairs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Moves with the same (src, dst) are one message: each message's first move, and each move's message."""
    _, first, message = np.unique(pairs, return_index=True, return_inverse=True)
    place = np.argsort(np.argsort(first))  # np.unique sorts by pair; keep the order of the schedule
    return np.sort(first), place[message]
