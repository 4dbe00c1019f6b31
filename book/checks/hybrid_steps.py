"""L3: training on a mesh, step by step: what it was built from, its losses, its updates, what it sent."""
from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from book.checks.compare import Gradients, State, agree, first_wrong, flat, identical
from book.checks.verdict import CheckFailed, number, short
from book.mesh import Mesh


@contextmanager
def calls_into(places: Sequence[str]) -> Iterator[set[str]]:
    """Note which of these places, parts of file names, have a function called in this block, in this thread.

    What has been imported before does not count, only what runs. An error in the block is raised as that of a call into
    these places where there was one: what is not built by hand may fail before it is looked at.
    """
    found: set[str] = set()
    before = sys.getprofile()

    def note(frame: Any, event: str, _: Any) -> None:
        if event == "call":
            name = frame.f_code.co_filename.replace(os.sep, "/")
            found.update(place for place in places if place in name)

    sys.setprofile(note)
    try:
        yield found
    except Exception:
        _refuse("your code", found)
        raise
    finally:
        sys.setprofile(before)


def by_hand(called: Sequence[set[str]]) -> None:
    """`called` has by rank what `calls_into` found: nothing, or it was not built by hand."""
    for rank, own in enumerate(called):
        _refuse(f"rank {rank}", own)


def first_losses(losses: Sequence[Any], sequences: Sequence[float], mesh: Mesh, num_micro_batches: int) -> None:
    """`losses` has by rank what the first step returned: the mean of its share on the last stage, None elsewhere.

    `sequences` are the losses of the batch's sequences one by one; shares may be any that do not overlap.
    """
    last = mesh.size("pp") - 1
    for rank, loss in enumerate(losses):
        stage = mesh.coordinates(rank)["pp"]
        if stage < last and loss is not None:
            raise CheckFailed(f"rank {rank}, of stage {stage}, returns {loss!r}: the last stage alone knows the loss")
        if stage == last and loss is None:
            raise CheckFailed(f"rank {rank}, of the last stage, returns no loss: step returns what the pipeline gives")
    _check_alike([float(loss) if loss is not None else None for loss in losses], mesh)
    replicas = [float(losses[mesh.rank_at(pp=last, dp=replica, tp=0)]) for replica in range(mesh.size("dp"))]
    mean, got = float(np.mean(sequences)), float(np.mean(replicas))
    number("the mean of the replicas' losses in step 0", got, mean, [
        (mean * num_micro_batches, "it is the sum over the micro-batches; each counts 1 / (number of micro-batches)"),
        (mean / num_micro_batches, "it is divided by the number of micro-batches twice"),
        *((float(np.mean(share)), f"it is the loss of share {place} alone: each replica takes one of its own")
          for place, share in enumerate(np.array_split(sequences, mesh.size("dp"))) if mesh.size("dp") > 1),
        (mean / mesh.size("dp"), "it is divided by the number of replicas: return the mean over the share")])
    if np.allclose(replicas, mean, rtol=1e-9, atol=0) and len(replicas) > 1 and np.ptp(sequences) > 0:
        raise CheckFailed(f"every replica returns the loss {short(mean)} in step 0: that is the mean over the "
                          "replicas, and each returns the mean over its own share")


def moved(before: Sequence[State], after: Sequence[State], gradients: Sequence[Gradients],
          learning_rate: float) -> None:
    """The first step of SGD must have moved every weight along the gradient that it found."""
    for rank, (start, end) in enumerate(zip(before, after)):
        if all(identical(start[name], end[name]) for name in start):
            raise CheckFailed(f"the gradients are right, but rank {rank}'s weights have not moved: which parameters "
                              "was the optimizer given? Cutting makes new ones")
        for name, value in start.items():
            want = flat(value) - learning_rate * flat(gradients[rank][name])
            if not agree(end[name], want, want):
                what = "has not moved" if identical(value, end[name]) else "has moved by something else"
                raise CheckFailed(f"rank {rank}'s {name} {what} in the first step: is the optimizer made, once, from "
                                  "all parameters of the part after the cuts?")


def mesh_losses(losses: Sequence[Sequence[Any]], expected: Sequence[float], mesh: Mesh) -> float:
    """The mean of the replicas' losses must be `expected`, one process's, in each step. Returns the last."""
    last = mesh.size("pp") - 1
    rows = [[float(loss) for loss in losses[mesh.rank_at(pp=last, dp=replica, tp=0)]]
            for replica in range(mesh.size("dp"))]
    got = np.mean(rows, axis=0)
    step = first_wrong(got, expected)
    if step is not None:
        raise CheckFailed(f"the loss of step {step} is {short(got[step])}, one process has {short(expected[step])}: "
                          "the first step was right, so what is carried from step to step? Are gradients cleared, "
                          "and does every rank step?")
    return float(got[-1])


def traffic_by_axis(answer: Any, want: Mapping[str, float], rank: int, slips: Mapping[str, Sequence[tuple[float, str]]]
                    ) -> None:
    """`answer` must be what a rank sends along each axis in a step, as its recording has it."""
    if not isinstance(answer, Mapping) or set(answer) != set(want):
        raise CheckFailed(f"predicted_bytes must return a dict with the bytes of {', '.join(want)}")
    for axis, value in want.items():
        try:
            number(f"rank {rank}, {axis}: the number of bytes", answer[axis], value, slips.get(axis, ()))
        except CheckFailed as error:
            if value == 0:
                raise CheckFailed(f"rank {rank} sends nothing along {axis}, and you predict {answer[axis]!r}: a group "
                                  "of one rank has nobody to send to") from None
            raise CheckFailed(f"{error} (recorded: {short(value)})") from None


def _check_alike(losses: Sequence[float | None], mesh: Mesh) -> None:
    """The ranks of a tp group compute one and the same loss."""
    for rank, loss in enumerate(losses):
        first = mesh.group_of(rank, "tp")[0]
        wanted = losses[first]
        if loss is not None and wanted is not None and not np.isclose(loss, wanted, rtol=1e-9):
            raise CheckFailed(f"ranks {first} and {rank} of one tp group have different losses, {short(wanted)} "
                              f"and {short(loss)}: they work on the same share, with the same weights where nothing is "
                              "cut")


def _refuse(who: str, called: set[str]) -> None:
    for place in sorted(called):
        raise CheckFailed(f"{who} calls functions of {place.replace('/', '.')}: in this exercise the three kinds of "
                          "parallelism are put together by hand")
