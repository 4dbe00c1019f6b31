"""L3, lab 5: a cross-entropy whose logits are cut by vocabulary: the loss and its gradients.

Shapes: N predictions, V tokens in the vocabulary, S = V/R of them on each of R ranks.
"""
from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from book.checks.attribution import multiples
from book.checks.compare import TOLERANCE, dense, held, same
from book.checks.verdict import CheckFailed, require, short

Mistake = tuple[str, list[np.ndarray]]  # what to say of it, and the losses (N,) on a rank that it can lead to


def vocabulary_loss(losses: Sequence[Any], gradients: Sequence[Any], logits_NV: Any, targets_N: Any) -> float:
    """Every rank must return the mean cross-entropy over all V tokens, and get the gradient of its own S logits.

    Returns the loss.
    """
    cut = _Cut(dense(logits_NV), dense(targets_N).astype(int), len(losses))
    for rank, loss in enumerate(losses):
        _check_loss(rank, loss, cut)
    num = len(cut.targets)
    softmax, chosen = np.exp(cut.logits - cut.total[:, None]) / num, np.zeros_like(cut.logits)
    chosen[cut.rows, cut.targets] = 1 / num
    for rank, gradient in enumerate(gradients):
        _check_gradient(rank, gradient, [np.split(whole, cut.num_ranks, axis=1)[rank]
                                         for whole in (softmax, chosen, cut.logits)], cut.num_ranks)
    return float(cut.loss.mean())


class _Cut:
    """Logits (N, V) that are cut by vocabulary, and what can be made of them right and wrong.

    `blocks` (R, N, S), `totals` and `tops` (R, N) are of the ranks, `total`, `top` and `target` (N,) of the whole: the
    logarithm of the sum of exponentials, the largest logit, the target's logit.
    """

    def __init__(self, logits: np.ndarray, targets: np.ndarray, num_ranks: int) -> None:
        self.logits, self.targets, self.num_ranks, self.rows = logits, targets, num_ranks, np.arange(len(targets))
        self.blocks = np.stack(np.split(logits, num_ranks, axis=1))
        self.size = self.blocks.shape[2]
        self.owner = targets // self.size
        self.totals, self.total = np.logaddexp.reduce(self.blocks, axis=2), np.logaddexp.reduce(logits, axis=1)
        self.tops, self.top, self.target = self.blocks.max(axis=2), logits.max(axis=1), logits[self.rows, targets]
        self.loss = self.total - self.target

    def wrong_sums(self, rank: int) -> list[Mistake]:
        """Mistakes that are made with the sum of exponentials."""
        total, totals, top, tops, target = self.total, self.totals, self.top, self.tops, self.target
        own, num_ranks = self.owner == rank, self.num_ranks
        shifted = np.log(np.exp(self.blocks - tops[:, :, None]).sum(axis=(0, 2)))
        return [
            ("the softmax goes over the rank's own part of the vocabulary: the sum of exponentials is a sum over all "
             "ranks, and identity_then_all_reduce adds nothing forward",
             [totals[rank] - target, totals[rank] - np.where(own, target, 0),
              totals[rank] - top - np.where(own, target - top, 0)]),
            ("each rank subtracts the largest logit of its own part, and then exponentials with different shifts are "
             "added up: the largest of the whole vocabulary is a MAX over the ranks",
             [shifted + tops[rank] - target, shifted - target + tops[self.owner, self.rows], shifted + top - target,
              shifted - target]),
            ("the ranks' own losses are added up: the sum over the vocabulary stands inside the logarithm",
             [totals.sum(axis=0) - target, totals.sum(axis=0) - num_ranks * target]),
            ("the ranks' own losses are averaged: the sum over the vocabulary stands inside the logarithm",
             [totals.mean(axis=0) - target, totals.mean(axis=0) - target / num_ranks]),
            ("the sum of exponentials is averaged over the ranks: it is one sum", [self.loss - np.log(num_ranks)]),
            (f"this is {num_ranks} times the loss: every rank has all of it already, so nothing adds it up",
             [self.loss * num_ranks]),
            (f"this is the loss divided by {num_ranks}: every rank has all of it already, so nothing averages it",
             [self.loss / num_ranks]),
            ("this is the sum over the predictions: return the mean", [self.loss * len(self.targets)]),
            ("the largest logit is subtracted in the sum of exponentials, but not from the target's logit",
             [total - top - target]),
            ("the largest logit is subtracted from the target's logit, but not in the sum of exponentials",
             [total + top - target])]

    def wrong_targets(self, rank: int) -> list[Mistake]:
        """Mistakes that are made with the target's logit."""
        total, top, size, ranks = self.total, self.top, self.size, np.arange(self.num_ranks)[:, None]
        folded, places = self.targets % size, self.targets - ranks * size
        own = self.owner == rank
        # A negative index counts from the end.
        looked_up = [self.blocks[ranks, self.rows, place].sum(axis=0)
                     for place in (np.clip(places, 0, size - 1), folded, np.clip(places, -size, size - 1))]
        return [
            ("a target lies on one rank: the other ranks have 0 for it, and the sum over the ranks hands it to all "
             "(identity_then_all_reduce adds nothing forward)",
             [total - np.where(own, self.target, 0), total - top - np.where(own, self.target - top, 0)]),
            ("ranks that don't hold a target add the logit of another token: outside its own block a rank adds 0, "
             "whichever place it looks up",
             [total - wrong + shift for wrong in looked_up
              for shift in (0, (self.num_ranks - 1) * top, self.tops.sum(axis=0) - top)]),
            ("a rank looks up a target that it does not hold, and uses that logit: outside its own block a rank adds "
             "0, and the sum over the ranks hands the right one to all",
             [total - self.blocks[rank, self.rows, place] for place in (folded, np.clip(places[rank], 0, size - 1))]),
            ("a target is looked up at the wrong place: rank r's block begins at r S, so there its targets are those "
             "from r S on, and its first is at place 0", self._misplaced())]

    def _misplaced(self) -> list[np.ndarray]:
        """Losses (N,) where a rank counts from a wrong first token: where it looks, what it holds, or both."""
        size, ranks = self.size, np.arange(self.num_ranks)[:, None]
        right, wrong = self.targets - ranks * size, [self.targets - first
                                                     for first in (0 * ranks, ranks * self.num_ranks, ranks)]
        losses = []
        for looked, own in [pair for w in wrong for pair in ((right, w), (w, right), (w, w))]:
            found = self.blocks[ranks, self.rows, np.clip(looked, 0, size - 1)]
            inside = (own >= 0) & (own < size)
            losses += [self.total - (found * inside).sum(axis=0),
                       self.total - self.top - ((found - self.top) * inside).sum(axis=0)]
        return losses


def _check_loss(rank: int, loss: Any, cut: _Cut) -> None:
    shape, num = tuple(getattr(loss, "shape", ())), len(cut.targets)
    require(shape[:1] != (num,), f"rank {rank} returns {num} losses, one for each prediction: return their mean")
    if loss is not None and not shape and not np.isfinite(dense(loss)):
        raise CheckFailed(f"rank {rank}'s loss is {dense(loss)}: {_why_infinite(float(dense(loss)), cut.logits)}")
    got, want = held(rank, "the loss", loss, ()), cut.loss.mean()
    same(f"rank {rank}'s loss is {short(float(got))}, of one process {short(float(want))}", got, want, want,
         partial(_why_loss, rank, float(got), cut))


def _check_gradient(rank: int, gradient: Any, blocks: Sequence[np.ndarray], num_ranks: int) -> None:
    """The gradient (N, S) must be the first of the rank's `blocks` minus the second: softmax, choice, logits."""
    require(gradient is not None, f"rank {rank}'s logits get no gradient: the loss is right, but autograd doesn't know "
            "what it was made from (detach, item, no_grad)")
    softmax, chosen, logits = blocks
    require(not hasattr(gradient, "shape") or not np.isnan(dense(gradient)).any(), f"the loss is right, rank {rank}'s "
            "gradient of its logits is nan: autograd went back through the search for the largest logit, and what that "
            "found is not there any more once the MAX over the ranks has been written over it. It cancels out of the "
            "loss: no_grad() or detach()")
    got = held(rank, "the gradient of its logits", gradient, softmax.shape)
    same(f"the loss is right, rank {rank}'s gradient of its logits is not", got, softmax - chosen, softmax + chosen,
         partial(_why_gradient, got, softmax, chosen, logits, num_ranks))


def _why_infinite(loss: float, logits: np.ndarray) -> str:
    if loss == -np.inf:
        return ("the logarithm is that of 0, as all logits are far below what you subtract: that is the largest one of "
                "the whole vocabulary, a MAX over the ranks and no sum")
    if loss == np.inf and logits.max() < 700:  # below what exp takes in float64
        return ("exp of logits as small as these is finite, so see which of the two is inf, the logarithm of the sum "
                "or the target's logit. A rank that doesn't hold a target adds 0, not -inf, and only the largest logit "
                "is subtracted")
    return ("exp of a large number is inf; subtract from each prediction's logits the largest one of the whole "
            "vocabulary, a MAX over the ranks")


def _why_loss(rank: int, got: float, cut: _Cut) -> str:
    for why, values in [*cut.wrong_sums(rank), *cut.wrong_targets(rank)]:
        if any(np.isclose(got, np.mean(value), rtol=1e-7, atol=TOLERANCE) for value in values):
            return why
    return ("it is the mean, over the predictions, of log(sum of the exponentials of all V logits) minus the logit of "
            "the target. Which of these sums goes over the ranks, and from what is the largest logit subtracted? Or is "
            "a target looked up at the wrong place? Rank r's block begins at r S")


def _why_gradient(got: np.ndarray, softmax: np.ndarray, chosen: np.ndarray, logits: np.ndarray, num_ranks: int) -> str:
    """What is wrong with the gradient (N, S) of these logits; it should be `softmax` minus `chosen`."""
    local = np.exp(logits - np.logaddexp.reduce(logits, axis=1)[:, None]) / len(logits)
    factors = multiples([softmax.ravel(), chosen.ravel(), local.ravel()], got)
    if factors is None:
        largest = logits == logits.max(axis=1, keepdims=True)
        if np.allclose((got - softmax + chosen)[~largest], 0, atol=TOLERANCE):
            return ("it differs at the largest logits alone. What you subtract cancels out of the loss, so let "
                    "autograd take it for a constant: no_grad() or detach()")
        return "it should be (softmax - 1 at the target) / N, the softmax over the whole vocabulary"
    probability, target, own_part = np.nan_to_num(factors)
    if np.isclose(own_part, 1, atol=1e-6):
        return "it is made with the softmax over the rank's own part of the vocabulary: all parts go into the sum"
    times = {1.0: "right", 0.0: "missing", float(num_ranks): f"{num_ranks} times too large",
             1 / num_ranks: f"divided by {num_ranks}"}
    said = [f"{what} is {next((say for n, say in times.items() if np.isclose(f, n, atol=1e-6)), short(f) + ' times')}"
            for what, f in (("the part of the softmax", probability), ("the part of the target", -target))]
    return (f"{' and '.join(said)}. Both sums over the ranks hand a gradient on as it is: each rank's loss is the "
            "whole loss, so on the way back nothing is added up, and nothing is cut off")
