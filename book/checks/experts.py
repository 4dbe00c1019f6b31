"""L3, lab 9: places at experts, what keeps their loads even, and which gradients are averaged where.

A wrong result is compared with what wrong code makes of the same numbers. Shapes: N tokens (of a rank, or of the whole
batch), K choices of each, E experts in blocks of E/R on R ranks, width D.
"""
from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from book.checks.formula import Slips, told
from book.checks.verdict import CheckFailed, dense, held, kind_of, likeliest, magnitude, refuse, require, same, short
from book.mesh import Mesh


# Who has a place

def places(got: Any, choices: Any, num_ranks: int, factor: float, num_experts: int, case: str,
           over_batch: bool = False) -> int:
    """`got` must be the choices (N, K) that have a place, for the tokens of each rank, or with `over_batch` of all.

    Returns how many have none.
    """
    chosen = dense(choices).astype(int)
    require(hasattr(got, "shape"), f"{case}: return a tensor of booleans, not {kind_of(got)}")
    require(tuple(got.shape) == chosen.shape, f"{case}: the shape is {tuple(got.shape)}, but it should be "
            f"{chosen.shape}: one boolean for each choice of each token")
    require("bool" in str(got.dtype), f"{case}: return booleans, such as queue <= capacity, not {got.dtype}")
    found, parts = dense(got).astype(bool), 1 if over_batch else num_ranks
    share = factor * chosen.size / num_experts
    want = _kept(chosen, parts, math.ceil(share / parts))
    if not np.array_equal(found, want):
        token, column = np.argwhere(found != want)[0]
        said = next((said for kept, said in _slips_of_places(chosen, num_ranks, factor, share, over_batch)
                     if np.array_equal(found, kept)), "go through the choices in their order, first choices before "
                    "second ones, and give each a place as long as its expert has one")
        raise CheckFailed(f"{case}: choice {column} of token {token} should {'' if want[token, column] else 'not '}"
                          f"have a place: {said}")
    return int((~want).sum())


def _slips_of_places(chosen: np.ndarray, num_ranks: int, factor: float, share: float, over_batch: bool) -> Slips:
    parts, other = (1, num_ranks) if over_batch else (num_ranks, 1)
    capacity, top_k = share / parts, chosen.shape[1]
    right, most = partial(_kept, chosen, parts), math.ceil(capacity)
    early = factor * math.ceil(capacity / factor)
    scope = ("places are counted for each rank's tokens by themselves. In this copy an expert's places are for the "
             "whole batch" if over_batch else "places are counted over the whole batch. A rank sees its own tokens "
             "only, so each expert has places for each rank's tokens by themselves")
    return [
        (_kept(chosen, other, math.ceil(share / other)), scope),
        (right(most, by_column=True), "first and second choices stand in queues of their own: an expert has one"),
        (np.ones_like(chosen, dtype=bool), "every choice has a place here: nothing is dropped"),
        (right(math.ceil(share / other)), "the queues are right, but not the capacity: whose tokens are the places "
         "for?"),
        (_kept(chosen, other, most), "the capacity is right, but not the queues: whose tokens stand in one?"),
        (right(most, order="tokens"), "places are given token by token. All first choices come before all second ones"),
        (right(math.floor(capacity)), "the capacity is rounded down, and should be rounded up"),
        *((right(count), "N K / E is rounded up before factor multiplies it: round the product up, and only that")
          for count in (math.floor(early), math.ceil(early))),
        (right(most - 1), "there is one place too few: is a place counted from 1 and compared as if from 0?"),
        (right(most + 1), "there is one place too many: is a place counted from 0 and compared as if from 1?"),
        (right(math.ceil(capacity / top_k)), "this is the capacity for one choice of each token: every token makes "
         f"{top_k}"),
        (right(most, order="last"), "the last in the queue get the places: the first should"),
        (right(most, order="all first"), "a token that loses one choice loses all: the other one may keep its place"),
        (~right(most), "these are the choices that have no place")]


def _kept(chosen: np.ndarray, parts: int, capacity: int, order: str = "columns", by_column: bool = False) -> np.ndarray:
    """Which choices have a place, in the right order of the queue or another one."""
    kept = np.zeros(chosen.shape, dtype=bool)
    for tokens in np.array_split(np.arange(len(chosen)), parts):
        queue = [(token, column) for column in range(chosen.shape[1]) for token in tokens]
        queue = sorted(queue) if order == "tokens" else queue[::-1] if order == "last" else queue
        taken: Counter[Any] = Counter()
        for token, column in queue:
            where = chosen[token, column], column if by_column else 0
            kept[token, column] = taken[where] < capacity
            taken[where] += 1
    return np.repeat(kept.all(1, keepdims=True), chosen.shape[1], 1) if order == "all first" else kept


# Balance

def balanced(got: Sequence[Any], batches: Sequence[Sequence[tuple[Any, Any]]], num_experts: int, case: str) -> float:
    """Each rank must return the loss for balance of its micro-batches (probabilities, choices), differentiable.

    `got` has two of a rank: the loss, and the gradients of its probabilities. Returns the mean loss.
    """
    losses = []
    for rank, (loss, gradients) in enumerate(got):
        where = f"{case}, rank {rank}"
        slips = _slips_of_balance(batches, rank, num_experts)
        found = held(rank, "the loss", loss, ())
        same(f"{where}: the loss", found, slips[0][0], slips[0][0], partial(
            told, found, slips[1:], f"this is {short(float(found))}, and should be {short(float(slips[0][0]))}"))
        for batch, gradient in enumerate(gradients):
            refuse(gradient is None, f"{where}: the loss is right, but has no gradient. It is to change the "
                   "probabilities, so their means must not be detached")
            size, _ = dense(gradient).shape
            counts = np.sum([_counts(one[batch][1], num_experts) for one in batches], 0)
            due = np.tile(num_experts * counts / counts.sum() / size / len(batches[rank]), (size, 1))
            same(f"{where}: the gradient of the probabilities", dense(gradient), due, due, lambda: "the loss is right, "
                 "but not its gradient: it goes through the mean probabilities alone, since counts have none")
        losses.append(float(found))
    return float(np.mean(losses))


def _slips_of_balance(batches: Sequence[Sequence[tuple[Any, Any]]], rank: int, num_experts: int) -> Slips:
    mine = [(dense(p), c) for p, c in batches[rank]]
    means = [p.mean(0) for p, _ in mine]
    own = [_counts(c, num_experts) for _, c in mine]
    counts = [np.sum([_counts(one[batch][1], num_experts) for one in batches], 0) for batch in range(len(mine))]
    shares, own_shares = ([c / c.sum() for c in some] for some in (counts, own))
    first = [np.sum([_counts(one[batch][1][:, :1], num_experts) for one in batches], 0) for batch in range(len(mine))]
    so_far = [c / c.sum() for c in np.cumsum(counts, 0)]
    masses = [np.mean([dense(one[batch][0]).mean(0) for one in batches], 0) for batch in range(len(mine))]
    top_k = mine[0][1].shape[1]

    def loss(some: Any, others: Any) -> np.ndarray:
        return np.asarray(num_experts * np.mean([(a * b).sum() for a, b in zip(some, others)]))

    right, alone = loss(shares, means), loss(own_shares, means)
    return [
        (right, ""),
        (right * len(mine), "this is the sum over the micro-batches. It grows with their number: take the mean"),
        (alone, "the shares are those of the rank's own choices: add up the counts of all ranks first"),
        (alone * len(mine), "the shares are those of the rank's own choices, and the micro-batches are summed"),
        (right / num_experts, "this is the loss divided by E. Is the factor E missing, or a mean over experts taken in "
         "place of the sum?"),
        (right * num_experts, "this is E times the loss: is the factor E there twice?"),
        (right * top_k, "the counts are divided by the number of tokens: every token makes "
         f"{top_k} choices, and shares add up to 1"),
        (right * top_k * len(batches), "the counts are those of all ranks, and are divided by the number of one rank's "
         "tokens: divide them by their own sum"),
        (right * len(batches), "the counts are those of all ranks, and are divided by the number of one rank's "
         "choices"),
        (loss([c / c.sum() for c in first], means), "only first choices are counted"),
        (loss(means, means), "this multiplies mean probabilities with themselves: one factor is the share of choices"),
        (loss(shares, shares), "this multiplies shares with themselves: one factor is the mean probability"),
        (loss(shares, masses), "this is the mean of all ranks' losses, as it is where the probabilities or the "
         "finished loss are averaged over ranks. Each rank's own are enough: its gradients are averaged later"),
        (loss(shares, masses) * len(batches), "this is the sum of all ranks' losses. Add up the counts alone, and "
         "leave each rank its own loss"),
        (loss([np.sum(counts, 0) / np.sum(counts)] * len(mine), means), "the shares are those of all micro-batches "
         "together. Those that come later are not known yet: take each by itself"),
        (loss(so_far, means), "the shares are those of this micro-batch and all before it. Here each micro-batch is "
         "taken by itself"),
        (right * len(mine) / len(batches), "this is divided by the number of ranks, not by that of micro-batches"),
        (right / len(batches), "this is divided by the number of ranks: averaging gradients does that already")]


def _counts(choices: Any, num_experts: int) -> np.ndarray:
    return np.bincount(dense(choices).astype(int).ravel(), minlength=num_experts)


def chosen(got: Any, probabilities: Any, bias: Any, top_k: int, case: str) -> float:
    """`got`, (choices, gates), must be the likeliest experts with the bias, and their probabilities without it."""
    require(isinstance(got, (tuple, list)) and len(got) == 2, f"{case}: return choices and gates, not {kind_of(got)}")
    p, b = dense(probabilities), dense(bias)
    want = np.sort(np.argsort(-(p + b))[:, :top_k])
    for name, one in zip(("choices", "gates"), got):
        require(tuple(getattr(one, "shape", ())) == want.shape, f"{case}: the {name} have the shape "
                f"{tuple(getattr(one, 'shape', ()))}, but it should be {want.shape}")
    refuse("float" in str(got[0].dtype) and "int" in str(got[1].dtype), f"{case}: gates come first here: return the "
           "choices, and then the gates")
    given, gates = dense(got[0]).astype(int), dense(got[1])
    require(np.array_equal(np.sort(given), want), f"{case}: wrong experts are chosen: " + likeliest(
        (np.array_equal(np.sort(given), np.sort(np.argsort(-p)[:, :top_k])), "the bias changes nothing here"),
        (np.array_equal(np.sort(given), np.sort(np.argsort(p + b)[:, :top_k])), "these are the least likely ones"),
        (np.array_equal(np.sort(given), np.sort(np.argsort(b - p)[:, :top_k])), "the bias is subtracted: add it"),
        (True, "take those with the largest sum of probability and bias")))
    own = np.take_along_axis(p, given, 1)
    biased = np.take_along_axis(p + b, given, 1)
    same(f"{case}: the gates", gates, own, own, partial(told, gates, [
        (biased, "the bias is in the gates. It is for the choice alone: otherwise it would change the layer's outputs"),
        (own / own.sum(1, keepdims=True), "the gates are divided by their sum: here a gate is the probability itself"),
        (np.take_along_axis(p, np.argsort(-p), 1)[:, :top_k], "these are the largest probabilities, not those of the "
         "chosen experts")], "a gate is the probability of the expert that is chosen"))
    return magnitude(gates)


def bias_moved(got: Any, bias: Any, counts: Any, rate: float, case: str) -> float:
    """`got` must be the bias (E,), up by `rate` below the mean of the counts and down above it."""
    b, c = dense(bias), dense(counts)
    error = c.mean() - c
    require(hasattr(got, "shape"), f"{case}: return the bias as a tensor, with a number for each expert. You "
            f"return {'nothing' if got is None else f'a {type(got).__name__}'}")
    found = held(0, "the bias", got, b.shape)
    same(f"{case}: the bias", found, b + rate * np.sign(error), np.ones(1), partial(told, found, [
        (b - rate * np.sign(error), "the sign is wrong: an expert with too many choices has to become less likely"),
        (b + rate * error, "the bias moves by the size of the error: only its sign counts"),
        (b + rate * error / c.sum(), "the bias moves by the size of the error: only its sign counts"),
        (b + rate * np.where(error > 0, 1, -1), "an expert with just the mean load moves too: its error is 0"),
        (b + rate * np.where(error >= 0, 1, -1), "an expert with just the mean load moves too: its error is 0"),
        (rate * np.sign(error), "the old bias is lost: the steps add up"),
        (b + np.sign(error), "the rate is missing"),
        (b, "the bias has not moved")], "it should go up by rate where the count is below the mean of the counts, down "
        "by rate where it is above. The mean need not be whole"))
    return magnitude(found)


# Gradients

def averaged(got: Sequence[Any], given: Sequence[Any], mesh: Mesh, case: str) -> float:
    """Each rank must hold the gradients of the mean of all ranks' losses.

    `got` and `given` have two of a rank: the router's gradient, and a list of those of its experts. The mesh has the
    axes efsdp and ep. Returns the sum of absolute values.
    """
    for rank, (router, experts) in enumerate(got):
        _as_it_should(f"{case}, rank {rank}: the router's gradient", rank, router,
                      _slips_of_router([dense(one[0]) for one in given], rank, mesh))
        for number, gradient in enumerate(experts):
            _as_it_should(f"{case}, rank {rank}: an expert's gradient", rank, gradient,
                          _slips_of_expert([dense(one[1][number]) for one in given], rank, mesh))
    return sum(magnitude(router) + sum(map(magnitude, experts)) for router, experts in got)


def _as_it_should(where: str, rank: int, got: Any, slips: Slips) -> None:
    want = slips[0][0]
    found = held(rank, "the gradient", got, want.shape)
    same(where, found, want, want, partial(told, found, slips[1:], "it should be a sum over the ranks that have the "
                                           "same weights, divided by the number of all ranks"))


def _slips_of_router(parts: Sequence[np.ndarray], rank: int, mesh: Mesh) -> Slips:
    """The mean over all ranks, and what mistakes make of their gradients."""
    n, total = mesh.world_size, np.sum(parts, 0)
    return [
        (total / n, ""),
        (parts[rank], "it is still the rank's own. All ranks have the same router: average it over all"),
        (total, "it is the sum over all ranks: each rank's loss is a mean, so divide the sum, in place"),
        (total / n ** 2, "it is divided by the number of ranks twice"),
        (parts[rank] / n, "it is divided, but the other ranks have no part in it: add theirs up first"),
        *((np.sum([parts[one] for one in mesh.group_of(rank, axis)], 0) / share, f"it is added up over {axis} alone. "
           "All ranks have the same router, whichever experts they have") for axis in mesh.axes
          for share in (1, n, mesh.size(axis)))]


def _slips_of_expert(parts: Sequence[np.ndarray], rank: int, mesh: Mesh) -> Slips:
    """The sum over the copies over the number of ranks, and what mistakes make of the ranks' gradients."""
    n, ep, copies, total = mesh.world_size, mesh.size("ep"), mesh.size("efsdp"), np.sum(parts, 0)
    own, neighbours = (np.sum([parts[one] for one in mesh.group_of(rank, axis)], 0) for axis in ("efsdp", "ep"))
    return [
        (own / n, ""),
        (total / n, "it is averaged over all ranks, as in data parallelism. Ranks of one ep group have different "
         "experts, whose gradients have nothing to do with one another"),
        (total, "it is added up over all ranks: those of one ep group have different experts"),
        *((neighbours / share, "it is added up over ep, whose ranks have different experts. The same experts are on "
           "the ranks of efsdp") for share in (1, ep, n)),
        (own / copies, "it is the mean over the copies, and not divided by the number of ranks that sent them tokens. "
         f"Of each of these {ep} ranks the loss is a mean, and their losses are added up in it: divide by ep as well"),
        (own, "it is the sum over the copies, and is not divided. Every rank's loss is a mean over its tokens: divide "
         "in place, as g /= n does. g = g / n makes another tensor"),
        (own / copies / n, "it is divided by the number of copies once too often"),
        (own / ep, "it is divided by ep, but only added up over the copies: take their mean"),
        (parts[rank], "it is still the rank's own. The copies of the expert have gradients from other tokens: add "
         "these up over efsdp, in place, and divide by the number of all ranks"),
        (parts[rank] / n, "it is divided, but the copies of the expert have gradients from other tokens: add these up "
         "over efsdp"),
        (parts[rank] / ep, "it is divided by ep, but the copies of the expert have gradients from other tokens: "
         "average over efsdp")]
