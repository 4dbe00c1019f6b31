"""L3, lab 2: data parallelism by threads: who computed what, and whether all of it came back to the module.

The module's forward tells a `Meeting` that it is there.
"""
from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from book.checks.attribution import Attribution, is_zero
from book.checks.formula import Formula
from book.checks.verdict import CheckFailed, Gradients, finite, flat, magnitude, refuse, require, whole
from book.words import listed

GRADIENT = {  # the module's gradient, which should be the mean over the examples
    "nothing": "the module's gradients are zero: the replicas' gradients are on the copies, so add them up in the "
               "module",
    "over num_replicas": "the gradient is divided by the number of replicas: the loss is already the mean over the "
                         "whole batch, so the replicas' parts of its gradient are added, not averaged",
    "sum of means": "you add up losses that are means over the replicas' shares: gather the outputs, then compute one "
                    "loss",
    "mean of means": "this is the mean of the replicas' means, but their shares are not equal: compute one loss over "
                     "all outputs",
    "absent replicas": "no gradient of replica {replicas} has reached the module: add up the gradients of all replicas",
    "scaled": "the gradient is {times} times that of the whole batch's mean loss",
    "unequal": "the examples have different weights in the gradient, but each must have 1 / (number of examples)",
    "unknown": "the gradient is not a sum of the examples' gradients: does output i meet target i? Gather the outputs "
               "in the order of the shares, not in the order in which threads finish"}

NO_GRAPH = "does not require grad and does not have a grad_fn"  # in what torch says when backward has nowhere to go


@dataclass(frozen=True)
class ForwardVisit:
    """One forward: its thread, its module object, the address of its weights, and its examples in order."""

    thread: int
    network: int
    weights: int
    examples: tuple[int, ...]


class Meeting:
    """A barrier for the forwards of one step; when all have arrived, the last share leaves first.

    Forwards that run one after another never meet; after `patience_s` seconds they go on. Leaving in reverse order
    exposes outputs that are gathered in the order of completion.
    """

    def __init__(self, num_replicas: int, patience_s: float = 2.0) -> None:
        self.num_replicas, self.visits, self.complete = num_replicas, list[ForwardVisit](), False
        self._barrier, self._patience_s = threading.Barrier(num_replicas, self._met), patience_s
        self._caller = threading.get_ident()

    def arrive(self, network: int, weights: int, examples: Sequence[int]) -> None:
        """Note that a forward of this module has begun, with weights at this address; returns when it may go on."""
        visit = ForwardVisit(threading.get_ident(), network, weights, tuple(int(example) for example in examples))
        self.visits.append(visit)
        try:
            self._barrier.wait(self._patience_s)
        except threading.BrokenBarrierError:
            return
        later = sum(other.examples > visit.examples for other in self.visits)
        time.sleep(0.03 * later)

    @contextmanager
    def in_words(self) -> Iterator[None]:
        """While the step runs, explain an error that comes from a wrong replica number or detached copies."""
        try:
            yield
        except Exception as error:
            shares = [visit.examples for visit in self.visits]
            if len(shares) > 1 and len(set(shares)) == 1:
                raise CheckFailed(
                    f"{len(shares)} threads computed the same share, examples {listed(shares[0])}: a function made in "
                    "a loop, such as lambda: apply(i), looks up i when it is called, after the loop. Give each thread "
                    "its own: Thread(target=apply, args=(i,))") from error
            if NO_GRAPH in str(error):
                raise CheckFailed(
                    "autograd knows of no parameter behind the loss: copies made from state_dict(), from .data or with "
                    "detach() are cut off from the module. Clone its parameters themselves, name by name, with "
                    "named_parameters()") from error
            raise

    def in_order(self) -> list[ForwardVisit]:
        """The forwards by their first examples."""
        return sorted(self.visits, key=lambda visit: visit.examples)

    def check(self, num_examples: int) -> None:
        """Each example must have been in one of `num_replicas` threads that run at once, with weights of their own."""
        require(self.visits, "no forward ran: call the replicas, each with its share of the inputs")
        require(self._caller not in {visit.thread for visit in self.visits},
                "a forward ran in the notebook's own thread: give each replica its own thread")
        require(len(self.visits) == self.num_replicas, f"{len(self.visits)} forwards ran for {self.num_replicas} "
                "replicas: run one for each (split(n) cuts pieces of n examples, chunk(n) cuts into n pieces or fewer, "
                "tensor_split(n) always into n)")
        require(self.complete, "the replicas ran one after another: start all threads before you join the first")
        examples = [example for visit in self.visits for example in visit.examples]
        seen = np.bincount(np.array(examples, dtype=int), minlength=num_examples)
        require(seen.all(), f"example {listed(np.flatnonzero(seen == 0))} of 0 to {num_examples - 1} went to no "
                "replica: shares need not be equal, but must cover the batch (tensor_split leaves nothing out)")
        require(seen.max() == 1,
                f"example {np.argmax(seen > 1)} went to several replicas: each must get its own share of the batch")
        num_weights = len({visit.weights for visit in self.visits})
        num_networks = len({visit.network for visit in self.visits})
        refuse(num_weights > 1 and num_networks < self.num_replicas, "two threads swap weights in the same module "
               "object, so each may compute with the other's: give each a copy.deepcopy(module) to call")
        require(num_weights == self.num_replicas,
                "two replicas used the same weights, but on separate devices each needs its own copy")

    def _met(self) -> None:
        self.complete = True


def replica_gradients(meeting: Meeting, loss: Any, losses: Any, gradients: Gradients, single: Gradients) -> float:
    """A step by threads must leave the gradient of the whole batch's mean loss in the module.

    `losses` (B,) and `single`, name -> (B, ...), are those of each example by itself; `gradients`, name -> tensor or
    None, is what the step left and `loss` what it returned. Returns the sum of the gradient's absolute values.
    """
    losses = flat(losses)
    meeting.check(len(losses))
    require(all(gradient is not None for gradient in gradients.values()),
            "the module lacks gradients: was backward() called, and nothing cleared after it? Or are they on the "
            "copies? Make the copies with an operation that autograd follows, such as clone(), or add up their "
            "gradients yourself")
    got = finite("the module", "its gradients", whole(gradients, single))
    rows = np.concatenate([flat(rows).reshape(len(losses), -1) for rows in single.values()], axis=1)
    found = Attribution(got, rows, 1 / len(losses), axes=("examples",), counts={"num_replicas": meeting.num_replicas})
    if not found.is_right():
        raise CheckFailed(_why_not_whole(found, [list(visit.examples) for visit in meeting.in_order()]))
    Formula(losses.mean()).require_right("the loss that you return", loss.item() if hasattr(loss, "item") else loss)
    return magnitude(got)


def _why_not_whole(found: Attribution, shares: Sequence[list[int]]) -> str:
    means = np.zeros(len(found.rows))
    for share in shares:
        means[share] = 1 / len(share)
    mistakes = {"sum of means": means, "mean of means": means / len(shares)}
    absent = [] if found.factors is None else [i for i, share in enumerate(shares)
                                               if is_zero(found.factors[share]).all()]
    if absent and found.factors is not None:
        mistakes["absent replicas"] = found.factors
    return found.explain(GRADIENT, mistakes, replicas=listed(absent))
