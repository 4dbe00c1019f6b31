"""L3: a cross-entropy whose logits are cut by vocabulary: the loss, its gradients, and what it costs to send.

Shapes: N predictions, V tokens in the vocabulary, S = V/R of them on each of R ranks.
"""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from book.checks.compare import TOLERANCE, dense, held, multiples, same
from book.checks.verdict import CheckFailed, short
from book.trace import Trace

Mistake = tuple[str, list[np.ndarray]]  # what to say of it, and the losses (N,) on a rank that it can lead to


def vocabulary_loss(losses: Sequence[Any], gradients: Sequence[Any], logits_NV: Any, targets_N: Any) -> float:
    """Every rank must return the mean cross-entropy over all V tokens, and get the gradient of its own S logits.

    Returns the loss. Raises CheckFailed with the likeliest reason.
    """
    logits, targets, num_ranks = dense(logits_NV), dense(targets_N).astype(int), len(losses)
    total = np.logaddexp.reduce(logits, axis=1)
    want = (total - logits[np.arange(len(targets)), targets]).mean()
    for rank, loss in enumerate(losses):
        _check_loss(rank, loss, want, logits, targets, num_ranks)
    softmax, chosen = np.exp(logits - total[:, None]) / len(targets), np.zeros_like(logits)
    chosen[np.arange(len(targets)), targets] = 1 / len(targets)
    own = zip(*(np.split(whole, num_ranks, axis=1) for whole in (softmax, chosen, logits)))
    for rank, (gradient, blocks) in enumerate(zip(gradients, own)):
        _check_gradient(rank, gradient, blocks, num_ranks)
    return float(want)


def vocabulary_traffic(traces: Mapping[int, Trace], num_predictions: int) -> float:
    """What a rank sends must be the same for each vocabulary size of `traces`, and none of it point to point.

    Returns the bytes that a rank gives to collectives, for each prediction.
    """
    sent = {size: _given_bytes(trace) for size, trace in traces.items()}
    (small, few), (large, many) = min(sent.items()), max(sent.items())
    if many > few:
        raise CheckFailed(f"with {small} tokens a rank gives {short(few)} bytes to collectives, with {large} tokens "
                          f"{short(many)}: logits are sent round. A prediction takes three numbers, its largest logit, "
                          "its sum of exponentials and the logit of its target, whatever V is")
    return many / num_predictions


def _given_bytes(trace: Trace) -> float:
    return max(sum(event.num_bytes or 0 for event in trace.of_rank(rank) if event.kind in ("collective", "send"))
               for rank in range(trace.world_size))


def _check_loss(rank: int, loss: Any, want: np.ndarray, logits: np.ndarray, targets: np.ndarray,
                num_ranks: int) -> None:
    shape = tuple(getattr(loss, "shape", ()))
    if shape[:1] == (len(targets),):
        raise CheckFailed(f"rank {rank} returns {len(targets)} losses, one for each prediction: return their mean")
    if loss is not None and not shape and not np.isfinite(dense(loss)):
        raise CheckFailed(f"rank {rank}'s loss is {dense(loss)}: {_why_infinite(float(dense(loss)), logits)}")
    got = held(rank, "the loss", loss, ())
    same(f"rank {rank}'s loss is {short(float(got))}, of one process {short(float(want))}", got, want, want,
         lambda: _why_loss(rank, float(got), logits, targets, num_ranks))


def _check_gradient(rank: int, gradient: Any, blocks: Sequence[np.ndarray], num_ranks: int) -> None:
    """The gradient (N, S) must be the first of the rank's `blocks` minus the second: softmax, choice, logits."""
    if gradient is None:
        raise CheckFailed(f"rank {rank}'s logits get no gradient: the loss is right, but autograd doesn't know what it "
                          "was made from (detach, item, no_grad)")
    softmax, chosen, logits = blocks
    if hasattr(gradient, "shape") and np.isnan(dense(gradient)).any():
        raise CheckFailed(f"the loss is right, rank {rank}'s gradient of its logits is nan: autograd went back through "
                          "the search for the largest logit, and what that found is not there any more once the MAX "
                          "over the ranks has been written over it. It cancels out of the loss: no_grad() or detach()")
    got = held(rank, "the gradient of its logits", gradient, softmax.shape)
    same(f"the loss is right, rank {rank}'s gradient of its logits is not", got, softmax - chosen, softmax + chosen,
         lambda: _why_gradient(got, softmax, chosen, logits, num_ranks))


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


def _why_loss(rank: int, got: float, logits: np.ndarray, targets: np.ndarray, num_ranks: int) -> str:
    mistakes = [*_wrong_sums(rank, logits, targets, num_ranks), *_wrong_targets(rank, logits, targets, num_ranks)]
    for why, values in mistakes:
        if any(np.isclose(got, np.mean(value), rtol=1e-7, atol=TOLERANCE) for value in values):
            return why
    return ("it is the mean, over the predictions, of log(sum of the exponentials of all V logits) minus the logit of "
            "the target. Which of these sums goes over the ranks, and from what is the largest logit subtracted? Or is "
            "a target looked up at the wrong place? Rank r's block begins at r S")


def _wrong_sums(rank: int, logits: np.ndarray, targets: np.ndarray, num_ranks: int) -> list[Mistake]:
    """What to say, and which losses (N,) on `rank` the mistakes lead to that are made with the sum of exponentials."""
    blocks = np.stack(np.split(logits, num_ranks, axis=1))  # (R, N, S)
    rows, size = np.arange(len(targets)), blocks.shape[2]
    totals, total = np.logaddexp.reduce(blocks, axis=2), np.logaddexp.reduce(logits, axis=1)
    tops, top, target = blocks.max(axis=2), logits.max(axis=1), logits[rows, targets]
    own = targets // size == rank
    mine = np.where(own, target, 0.0)
    shifted = np.log(np.exp(blocks - tops[:, :, None]).sum(axis=(0, 2)))
    want = total - target
    return [
        ("the softmax goes over the rank's own part of the vocabulary: the sum of exponentials is a sum over all "
         "ranks, and identity_then_all_reduce adds nothing forward",
         [totals[rank] - target, totals[rank] - mine, totals[rank] - top - np.where(own, target - top, 0)]),
        ("each rank subtracts the largest logit of its own part, and then exponentials with different shifts are added "
         "up: the largest of the whole vocabulary is a MAX over the ranks",
         [shifted + tops[rank] - target, shifted - target + tops[targets // size, rows], shifted + top - target,
          shifted - target]),
        ("the ranks' own losses are added up: the sum over the vocabulary stands inside the logarithm",
         [totals.sum(axis=0) - target, totals.sum(axis=0) - num_ranks * target]),
        ("the ranks' own losses are averaged: the sum over the vocabulary stands inside the logarithm",
         [totals.mean(axis=0) - target, totals.mean(axis=0) - target / num_ranks]),
        ("the sum of exponentials is averaged over the ranks: it is one sum", [want - np.log(num_ranks)]),
        (f"this is {num_ranks} times the loss: every rank has all of it already, so nothing adds it "
         "up", [want * num_ranks]),
        (f"this is the loss divided by {num_ranks}: every rank has all of it already, so nothing averages it",
         [want / num_ranks]),
        ("this is the sum over the predictions: return the mean", [want * len(targets)]),
    ]


def _wrong_targets(rank: int, logits: np.ndarray, targets: np.ndarray, num_ranks: int) -> list[Mistake]:
    """What to say, and which losses (N,) on `rank` the mistakes lead to that are made with the target's logit."""
    blocks, rows = np.stack(np.split(logits, num_ranks, axis=1)), np.arange(len(targets))
    size, owner = blocks.shape[2], targets // blocks.shape[2]
    total, top, target = np.logaddexp.reduce(logits, axis=1), logits.max(axis=1), logits[rows, targets]
    clamped = sum(blocks[r, rows, np.clip(targets - r * size, 0, size - 1)] for r in range(num_ranks))
    folded = sum(blocks[r, rows, targets % size] for r in range(num_ranks))
    # A negative index counts from the end.
    wrapped = sum(blocks[r, rows, np.clip(targets - r * size, -size, size - 1)] for r in range(num_ranks))
    tops = blocks.max(axis=2)
    return [
        ("a target lies on one rank: the other ranks have 0 for it, and the sum over the ranks hands it to all "
         "(identity_then_all_reduce adds nothing forward)",
         [total - np.where(owner == rank, target, 0), total - top - np.where(owner == rank, target - top, 0)]),
        ("ranks that don't hold a target add the logit of another token: outside its own block a rank adds 0, "
         "whichever place it looks up",
         [total - wrong + shift for wrong in (clamped, folded, wrapped)
          for shift in (0, (num_ranks - 1) * top, tops.sum(axis=0) - top)]),
        ("a rank looks up a target that it does not hold, and uses that logit: outside its own block a rank adds 0, "
         "and the sum over the ranks hands the right one to all",
         [total - blocks[rank, rows, place]
          for place in (targets % size, np.clip(targets - rank * size, 0, size - 1))]),
        ("a target is looked up at the wrong place: rank r's block begins at r S, so there its targets are those from "
         "r S on, and its first is at place 0", _misplaced(logits, targets, num_ranks)),
        ("the largest logit is subtracted in the sum of exponentials, but not from the target's "
         "logit", [total - top - target]),
        ("the largest logit is subtracted from the target's logit, but not in the sum of "
         "exponentials", [total + top - target]),
    ]


def _misplaced(logits: np.ndarray, targets: np.ndarray, num_ranks: int) -> list[np.ndarray]:
    """Losses (N,) where a rank counts from a wrong first token: where it looks, what it takes for its own, or both."""
    blocks, rows = np.stack(np.split(logits, num_ranks, axis=1)), np.arange(len(targets))
    size, ranks = blocks.shape[2], np.arange(num_ranks)[:, None]
    total, top = np.logaddexp.reduce(logits, axis=1), logits.max(axis=1)
    right, wrong = targets - ranks * size, [targets - first for first in (0 * ranks, ranks * num_ranks, ranks)]
    losses = []
    for looked, own in [(right, w) for w in wrong] + [(w, right) for w in wrong] + [(w, w) for w in wrong]:
        found = blocks[ranks, rows, np.clip(looked, 0, size - 1)]
        inside = (own >= 0) & (own < size)
        losses += [total - (found * inside).sum(axis=0), total - top - ((found - top) * inside).sum(axis=0)]
    return losses


def _why_gradient(got: np.ndarray, softmax: np.ndarray, chosen: np.ndarray, logits: np.ndarray, num_ranks: int) -> str:
    """What is wrong with the gradient (N, S) of these logits; it should be `softmax` minus `chosen`."""
    local = np.exp(logits - np.logaddexp.reduce(logits, axis=1)[:, None]) / len(logits)
    factors = multiples(np.stack([softmax.ravel(), chosen.ravel(), local.ravel()]), got)
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
