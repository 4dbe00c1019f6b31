"""L3: data parallelism by threads: who computed what, and whether all of it came back to the module.

The module's forward tells a `Meeting` that it is there. Gradients are compared as sums of the single examples'
gradients: least squares finds with which weight each example is in the result, and the weights say what went wrong.
"""
from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from book.checks.compare import Gradients, agree, flat, magnitude, multiples, whole
from book.checks.verdict import CheckFailed, finite, listed, number, short


@dataclass(frozen=True)
class Visit:
    """One forward: in which thread and module object, with weights at which address, on which examples, in order."""

    thread: int
    network: int
    weights: int
    examples: tuple[int, ...]


class Meeting:
    """Where the forwards of one step meet: each waits here for the others, then the last share leaves first.

    Forwards that run one after another never meet; after `patience_s` seconds that is noted. Leaving in reverse order
    makes it show when outputs are gathered in the order in which they are done.
    """

    def __init__(self, num_replicas: int, patience_s: float = 2.0) -> None:
        self.num_replicas, self.visits, self.complete = num_replicas, list[Visit](), False
        self._barrier, self._patience_s = threading.Barrier(num_replicas, self._met), patience_s
        self._caller = threading.get_ident()

    def arrive(self, network: int, weights: int, examples: Sequence[int]) -> None:
        """A forward of the module with this id is here, with weights at this address; returns when it may go on."""
        visit = Visit(threading.get_ident(), network, weights, tuple(int(example) for example in examples))
        self.visits.append(visit)
        try:
            self._barrier.wait(self._patience_s)
        except threading.BrokenBarrierError:
            return
        later = sum(other.examples > visit.examples for other in self.visits)
        time.sleep(0.03 * later)

    def in_order(self) -> list[Visit]:
        """The forwards by their first examples."""
        return sorted(self.visits, key=lambda visit: visit.examples)

    def check(self, num_examples: int) -> None:
        """Each example must have been in one of `num_replicas` threads that run at once, with weights of their own."""
        if not self.visits:
            raise CheckFailed("no forward ran: call the replicas, each with its share of the inputs")
        if any(visit.thread == self._caller for visit in self.visits):
            raise CheckFailed("a forward ran in the notebook's own thread: give each replica a thread of its own")
        if len(self.visits) != self.num_replicas:
            raise CheckFailed(f"{len(self.visits)} forwards ran for {self.num_replicas} replicas: one each, please "
                              "(split(n) cuts pieces of n examples, tensor_split(n) cuts into n pieces)")
        if not self.complete:
            raise CheckFailed("the replicas ran one after another: start every thread before you join the first")
        self._check_examples(num_examples)
        num_weights = len({visit.weights for visit in self.visits})
        if num_weights > 1 and len({visit.network for visit in self.visits}) < self.num_replicas:
            raise CheckFailed("two threads swap weights in one module object, and either may compute with the other's: "
                              "give each a copy.deepcopy(module) to call")
        if num_weights < self.num_replicas:
            raise CheckFailed("two replicas used the same weights: on devices of their own each needs a copy")

    def _met(self) -> None:
        self.complete = True

    def _check_examples(self, num_examples: int) -> None:
        seen = np.bincount(np.concatenate([visit.examples for visit in self.visits]).astype(int),
                           minlength=num_examples)
        if not seen.all():
            absent = listed(np.flatnonzero(seen == 0))
            raise CheckFailed(f"example {absent} of 0 to {num_examples - 1} went to no replica: shares need not be "
                              "equal (chunk and tensor_split leave nothing out)")
        if seen.max() > 1:
            raise CheckFailed(f"example {np.argmax(seen > 1)} went to several replicas: each gets a share of the batch")


def replica_gradients(meeting: Meeting, loss: Any, losses: Any, gradients: Gradients, single: Gradients) -> float:
    """A step by threads must leave the gradient of the whole batch's mean loss in the module.

    `losses` (B,) and `single`, name -> (B, ...), are those of each example by itself; `gradients`, name -> tensor or
    None, is what the step left and `loss` what it returned. Returns the sum of the gradient's absolute values. Raises
    CheckFailed with the likeliest reason.
    """
    losses = flat(losses)
    meeting.check(len(losses))
    if any(gradient is None for gradient in gradients.values()):
        raise CheckFailed("the module has no gradients: was backward() called, and nothing cleared after it? Or are "
                          "they on the copies? Make these by something that autograd goes back through, such as "
                          "clone(), or add the copies' gradients up yourself")
    got = finite(0, "the module's gradients", whole({name: gradients[name] for name in single}))
    rows = np.concatenate([flat(rows).reshape(len(losses), -1) for rows in single.values()], axis=1)
    if not agree(got, rows.mean(axis=0), rows):
        raise CheckFailed(_why_not_whole(multiples(rows, got), meeting))
    number("the loss that you return", loss.item() if hasattr(loss, "item") else loss, losses.mean())
    return magnitude(got)


def _why_not_whole(weights: np.ndarray | None, meeting: Meeting) -> str:
    if weights is None:
        return ("the gradient is no sum of the examples' gradients: does output i meet target i? Gather the outputs in "
                "the order of the shares, whichever is done first")
    num_examples, num_replicas = len(weights), meeting.num_replicas
    shares = [list(visit.examples) for visit in meeting.in_order()]
    means = np.zeros(num_examples)
    for share in shares:
        means[share] = 1 / len(share)
    if not weights.any():
        return "the module's gradients are zero: the replicas' are on the copies; add them up in the module"
    if np.allclose(weights * num_examples * num_replicas, 1):
        return ("the gradient is divided by the number of replicas: the loss is the mean over the whole batch already, "
                "and the replicas' parts of its gradient add up")
    if np.allclose(weights, means):
        return "each replica's loss is the mean over its own share, and you add these up: gather, then compute one loss"
    if np.allclose(weights, means / num_replicas):
        return ("this is the mean of the replicas' means, and their shares are not equal: compute one loss, over all "
                "outputs")
    absent = [i for i, share in enumerate(shares) if np.allclose(weights[share], 0)]
    if absent:
        return (f"nothing of replica {listed(absent)} has come back to the module: add up the gradients of all "
                "replicas")
    if np.allclose(weights, weights[0]):
        return f"the gradient is {short(weights[0] * num_examples)} times that of the whole batch's mean loss"
    return "the examples have different weights in the gradient: each must have 1 / (number of examples)"
