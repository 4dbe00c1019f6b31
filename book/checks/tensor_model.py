"""L3, lab 5: what a split GPT has besides its cut maps: a loss that is cut by vocabulary, dropout, traffic, sizes.

Shapes: N predictions, V tokens in the vocabulary, S = V/R of them on each of R ranks.
"""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import combinations, product
from typing import Any

import numpy as np

from book.checks.attribution import Attribution
from book.checks.formula import Formula, Slips
from book.checks.verdict import (
    TOLERANCE, CheckFailed, dense, held, identical, likeliest, refuse, require, reworded, same, short,
)
from book.trace import Trace

Mistake = tuple[str, list[np.ndarray]]  # its message, and the losses (N,) that it can lead to on a rank
Run = Mapping[str, Sequence[Any]]
OWN_TARGETS = ("each rank's loss has only the predictions whose targets it holds: after the all-reduces every rank has "
               "both sums of all predictions, so take the mean of all there")
MANY = 5.0  # standard deviations: a fair draw is further from its mean once in two million


# The loss

def vocabulary_loss(losses: Sequence[Any], gradients: Sequence[Any], logits_NV: Any, targets_N: Any) -> float:
    """Every rank must return the mean cross-entropy over all V tokens, and get the gradient of its own S logits.

    Returns the loss.
    """
    cut = _Cut(dense(logits_NV), dense(targets_N).astype(int), len(losses))
    num = len(cut.targets)
    alone = all(np.shape(got)[:1] == (num,) and not dense(got)[cut.owner != r].any() for r, got in enumerate(gradients))
    with reworded(instead=OWN_TARGETS * (alone and len(losses) > 1)):
        for rank, loss in enumerate(losses):
            _check_loss(rank, loss, cut)
    softmax, chosen = np.exp(cut.logits - cut.total[:, None]) / num, np.zeros_like(cut.logits)
    chosen[cut.rows, cut.targets] = 1 / num
    for rank, gradient in enumerate(gradients):
        _check_gradient(rank, gradient, [np.split(whole, cut.num_ranks, axis=1)[rank]
                                         for whole in (softmax, chosen, cut.logits)], cut.num_ranks)
    return float(cut.loss.mean())


class _Cut:
    """Logits (N, V) that are cut by vocabulary, and the right and wrong losses that follow from them.

    `blocks` (R, N, S), `totals` and `tops` (R, N) are those of the ranks, `total`, `top` and `target` (N,) those of the
    whole: the logarithm of the sum of exponentials, the largest logit, the target's logit. `places` (R, N) are those of
    the targets counted from the first token of each rank's block.
    """

    def __init__(self, logits: np.ndarray, targets: np.ndarray, num_ranks: int) -> None:
        self.logits, self.targets, self.num_ranks, self.rows = logits, targets, num_ranks, np.arange(len(targets))
        self.blocks = np.stack(np.split(logits, num_ranks, axis=1))
        self.size = self.blocks.shape[2]
        self.owner, self.ranks = targets // self.size, np.arange(num_ranks)[:, None]
        self.places = targets - self.ranks * self.size
        self.totals, self.total = np.logaddexp.reduce(self.blocks, axis=2), np.logaddexp.reduce(logits, axis=1)
        self.tops, self.top, self.target = self.blocks.max(axis=2), logits.max(axis=1), logits[self.rows, targets]
        self.loss = self.total - self.target

    def wrong_sums(self, rank: int) -> list[Mistake]:
        """Mistakes with the sum of exponentials."""
        total, totals, top, tops, target = self.total, self.totals, self.top, self.tops, self.target
        own, num_ranks = self.owner == rank, self.num_ranks
        shifted = np.log(np.exp(self.blocks - tops[:, :, None]).sum(axis=(0, 2)))
        return [
            ("the softmax runs only over the rank's own part of the vocabulary, but the sum of exponentials is over "
             "all ranks. (identity_then_all_reduce adds nothing forward)",
             [totals[rank] - target, totals[rank] - np.where(own, target, 0),
              totals[rank] - top - np.where(own, target - top, 0)]),
            ("each rank subtracts the largest logit of its own part, so exponentials with different shifts are added "
             "up: subtract the largest of the whole vocabulary, a MAX over the ranks",
             [shifted + tops[rank] - target, shifted - target + tops[self.owner, self.rows], shifted + top - target,
              shifted - target]),
            ("the ranks' own losses are added up, but the sum over the vocabulary must be inside the logarithm",
             [totals.sum(axis=0) - target, totals.sum(axis=0) - num_ranks * target,
              (totals - top).sum(axis=0) - target + top]),
            ("the ranks' own losses are averaged, but the sum over the vocabulary must be inside the logarithm",
             [totals.mean(axis=0) - target, totals.mean(axis=0) - target / num_ranks]),
            ("the sum of exponentials is averaged over the ranks, but it must be added up",
             [self.loss - np.log(num_ranks)]),
            (f"this is {num_ranks} times the loss: every rank already has all of it, so don't add it up",
             [self.loss * num_ranks]),
            (f"this is the loss divided by {num_ranks}: every rank already has all of it, so don't average it",
             [self.loss / num_ranks]),
            ("this is the sum over the predictions: return the mean", [self.loss * len(self.targets)]),
            ("the target's logit is added to the logarithm, but it must be subtracted",
             [total + target, total + target - 2 * top]),
            ("the logarithm of the sum of exponentials is missing", [np.exp(total - top) - target + top]),
            ("the largest logit is subtracted in the sum of exponentials, but not from the target's logit",
             [total - top - target]),
            ("the largest logit is subtracted from the target's logit, but not in the sum of exponentials",
             [total + top - target])]

    def wrong_targets(self, rank: int) -> list[Mistake]:
        """Mistakes with the target's logit."""
        total, top, size, places = self.total, self.top, self.size, self.places
        own, folded = self.owner == rank, self.targets % size
        # A negative index counts from the end.
        looked_up = [self.blocks[self.ranks, self.rows, place].sum(axis=0)
                     for place in (np.clip(places, 0, size - 1), folded, np.clip(places, -size, size - 1))]
        return [
            ("only one rank holds a target's logit: the others must add 0, and the sum over the ranks brings it to all "
             "(identity_then_all_reduce adds nothing forward)",
             [total - np.where(own, self.target, 0), total - top - np.where(own, self.target - top, 0)]),
            ("ranks that don't hold a target add the logit of another token: for targets outside its block a rank must "
             "add 0, whatever place it looks up",
             [total - wrong + shift for wrong in looked_up
              for shift in (0, (self.num_ranks - 1) * top, self.tops.sum(axis=0) - top)]),
            ("a rank looks up a target that it does not hold, and uses that logit: for targets outside its block a "
             "rank must add 0, and the sum over the ranks brings the right logit to all",
             [total - self.blocks[rank, self.rows, place] for place in (folded, np.clip(places[rank], 0, size - 1))]),
            ("a target is looked up at the wrong place: rank r's block begins at token r S, which is at place 0 "
             "there", self._misplaced()),
            ("a comparison leaves out the first or the last token of a block, or takes one more: a rank holds the "
             "targets at the places 0 to S - 1 of its block", self._off_by_one())]

    def _off_by_one(self) -> list[np.ndarray]:
        """Losses (N,) if a comparison with an end of a rank's block is wrong."""
        places, last = self.places, self.size - 1
        ends = [(first, end) for first in (0, 1) for end in (last - 1, last, last + 1) if (first, end) != (0, last)]
        return [loss for first, end in ends for loss in self._looked_up(places, (places >= first) & (places <= end))]

    def _misplaced(self) -> list[np.ndarray]:
        """Losses (N,) if a rank counts from a wrong first token: in where it looks, in what it holds, or in both."""
        right = self.places
        wrong = [self.targets - first for first in (0 * self.ranks, self.ranks * self.num_ranks, self.ranks)]
        pairs = [pair for places in wrong for pair in ((right, places), (places, right), (places, places))]
        return [loss for looked, own in pairs for loss in self._looked_up(looked, (own >= 0) & (own < self.size))]

    def _looked_up(self, places: np.ndarray, held: np.ndarray) -> list[np.ndarray]:
        """Losses (N,), without and with the largest logit subtracted, of ranks that look at `places` if they `held`."""
        found = self.blocks[self.ranks, self.rows, np.clip(places, 0, self.size - 1)]
        return [self.total - shift - ((found - shift) * held).sum(axis=0) for shift in (0, self.top)]


def _check_loss(rank: int, loss: Any, cut: _Cut) -> None:
    shape, num = tuple(getattr(loss, "shape", ())), len(cut.targets)
    refuse(shape[:1] == (num,), f"rank {rank} returns {num} losses, one for each prediction: return their mean")
    if loss is not None and not shape and not np.isfinite(dense(loss)):
        raise CheckFailed(f"rank {rank}'s loss is {dense(loss)}: {_why_infinite(float(dense(loss)), cut.logits)}")
    got, want = held(rank, "the loss", loss, ()), cut.loss.mean()
    same(f"rank {rank}'s loss is {short(float(got))}, but in one process it is {short(float(want))}", got, want, want,
         partial(_why_loss, rank, float(got), cut))


def _check_gradient(rank: int, gradient: Any, blocks: Sequence[np.ndarray], num_ranks: int) -> None:
    """The gradient (N, S) must be the first of the rank's `blocks` minus the second: softmax, choice, logits."""
    require(gradient is not None, f"rank {rank}'s logits get no gradient: the loss is right, but cut off from autograd "
            "(detach, item, no_grad)")
    softmax, chosen, logits = blocks
    refuse(hasattr(gradient, "shape") and np.isnan(dense(gradient)).any(), f"the loss is right, but rank {rank}'s "
           "gradient of its logits is nan: perhaps autograd went back through the search for the largest logit, whose "
           "result the MAX over the ranks has overwritten. The largest logit cancels out of the loss, so compute it "
           "under no_grad() or detach() it")
    got = held(rank, "the gradient of its logits", gradient, softmax.shape)
    same(f"the loss is right, but rank {rank}'s gradient of its logits is not", got, softmax - chosen, softmax + chosen,
         partial(_why_gradient, got, softmax, chosen, logits, num_ranks))


def _why_infinite(loss: float, logits: np.ndarray) -> str:
    return likeliest(
        (loss == -np.inf, "you take the logarithm of 0, because all logits of a prediction are far below what you "
         "subtract: subtract that prediction's own largest logit of the whole vocabulary, a MAX over the ranks, not a "
         "sum"),
        (np.isnan(loss) and logits.max() < 700, "exp of logits as small as these is finite, so the nan comes from "
         "elsewhere, such as inf - inf or 0 * inf. A rank that doesn't hold a target must add 0, not -inf"),
        (loss == np.inf and logits.max() < 700,  # below what exp takes in float64
         "exp of logits as small as these is finite, so which is inf, the logarithm of the sum or the target's logit? "
         "A rank that doesn't hold a target must add 0, not -inf, and only the largest logit is subtracted"),
        (True, "exp of a large number is inf: subtract from each prediction's logits the largest one of the whole "
         "vocabulary, a MAX over the ranks. If you do, is it the logarithm of an exponential that is 0, far below the "
         "largest? The target's logit needs neither exp nor log"))


def _why_loss(rank: int, got: float, cut: _Cut) -> str:
    mistakes, near = [*cut.wrong_sums(rank), *cut.wrong_targets(rank)], partial(np.isclose, rtol=1e-7, atol=TOLERANCE)
    slips = [(np.mean(value), why) for why, values in mistakes for value in values]
    if said := Formula(np.mean(cut.loss), slips, near).explain(got):
        return said
    divisor = cut.loss.sum() / got if got else 0.0
    if divisor > 0.5 and np.isclose(divisor, round(divisor), rtol=1e-7, atol=0):
        return (f"this is the sum over the predictions divided by {round(divisor)}, but there are {len(cut.targets)} "
                "of them: divide by the number of predictions that you were given")
    return ("it should be the mean, over the predictions, of log(sum of the exponentials of all V logits) minus the "
            "logit of the target. Which of these sums is over the ranks, and from what do you subtract the largest "
            "logit? Or do you look up a target at the wrong place? Rank r's block begins at r S")


def _why_gradient(got: np.ndarray, softmax: np.ndarray, chosen: np.ndarray, logits: np.ndarray, num_ranks: int) -> str:
    """What is wrong with the gradient (N, S) of these logits; it should be `softmax` minus `chosen`."""
    local = np.exp(logits - np.logaddexp.reduce(logits, axis=1)[:, None]) / len(logits)
    factors = Attribution(got, [softmax, chosen, local]).factors
    if factors is None:
        largest = logits == logits.max(axis=1, keepdims=True)
        if np.allclose((got - softmax + chosen)[~largest], 0, atol=TOLERANCE):
            return ("it differs only at the largest logits. What you subtract cancels out of the loss, so make it a "
                    "constant for autograd: no_grad() or detach()")
        if np.allclose(got, softmax * chosen.any(axis=1, keepdims=True) - chosen, atol=TOLERANCE):
            return "it lacks the predictions whose targets other ranks hold: each rank makes the loss of all of them"
        return "it should be (softmax - 1 at the target) / N, the softmax over the whole vocabulary"
    probability, target, own_part = np.nan_to_num(factors)
    if np.isclose(own_part, 1, atol=1e-6):
        return "it uses the softmax over the rank's own part of the vocabulary, but all parts must go into the sum"
    times = {1.0: "right", 0.0: "missing", float(num_ranks): f"{num_ranks} times too large",
             1 / num_ranks: f"divided by {num_ranks}"}
    said = [f"{what} is {next((say for n, say in times.items() if np.isclose(f, n, atol=1e-6)), short(f) + ' times')}"
            for what, f in (("the part of the softmax", probability), ("the part of the target", -target))]
    return (f"{' and '.join(said)}. In backward both sums over the ranks must pass a gradient on unchanged: each "
            "rank's loss is the whole loss, so nothing is added up on the way back, and nothing is cut off")


# Dropout

def dropout_masks(runs: Sequence[Run], other_seed: Sequence[Run], seed_0: Sequence[Run], shape: Sequence[int],
                  dropouts: Sequence[float]) -> float:
    """Masks must be new in each call: those of `alike` the same on all ranks, those of `apart` different on each.

    A run has the outputs of the calls of `alike` and `apart`, given ones in this `shape`, and the gradients of their
    inputs, `gradients` and `apart_gradients`. The last call of `alike` comes after one of `apart` that drew more
    numbers on some ranks. `other_seed` are runs with another seed, `seed_0` with the seed 0, and `dropouts` the p of
    each call. Returns what a kept 1 becomes on rank 0 in the first call, 1 / (1 - p).
    """
    for rank, run in enumerate(runs):
        for kind in ("alike", "apart"):
            for call, output in enumerate(run[kind]):
                got = held(rank, f"what {kind} gives", output, shape)
                _check_scaled(f"{kind}, call {call}, rank {rank}", got, dropouts[call], dropouts[0])
    _check_alike([run["alike"] for run in runs])
    _check_apart([run["apart"] for run in runs])
    for rank, run in enumerate(runs):
        _check_anew(rank, run)
        for kind, key in (("alike", "gradients"), ("apart", "apart_gradients")):
            for output, gradient in zip(run[kind], run[key]):
                require(gradient is not None and identical(output, gradient), f"rank {rank}, {kind}: what is dropped "
                        "in forward must get the gradient 0, and what is kept the same factor as in forward: multiply "
                        "x by the mask, where autograd sees it")
    for rank, (run, other) in enumerate(zip(runs, other_seed)):
        for kind in ("alike", "apart"):
            refuse(identical(run[kind][0], other[kind][0]), f"rank {rank}: two seeds give the same masks in {kind}: "
                   "its generator must start from the seed")
    _check_seed_0(seed_0)
    return float(dense(runs[0]["alike"][0]).max())


def _check_scaled(where: str, output: np.ndarray, dropout: float, first: float) -> None:
    """Kept ones must have become 1 / (1 - dropout), and about the right share must be dropped."""
    kept, dropped, right = output[output != 0], (output == 0).mean(), 1 / (1 - dropout)
    refuse(dropout != first and len(kept) and np.allclose(kept, 1 / (1 - first)), f"{where}: this is dropout with the "
           f"p of the first call, {first:.4g}, but p is {dropout:.4g} now: each call has its own")
    spread = np.sqrt(dropout * (1 - dropout) / output.size)
    require(0 < dropped < 1, f"{where}: {'nothing' if len(kept) else 'everything'} is dropped")
    refuse(any(np.isin((output == 0).mean(axis=axis), (0, 1)).all() for axis in range(output.ndim)),
           f"{where}: whole rows are dropped or kept: draw a number for each element")
    require(abs(dropped - dropout) <= MANY * spread,
            f"{where}: {dropped:.0%} are dropped, but {dropout:.0%} should be: p is the probability to drop")
    require(np.allclose(kept, right), f"{where}: a kept 1 becomes {kept[0]:.4g}, but should become {right:.4g}: divide "
            "by the probability to keep, which preserves the mean")


def _check_alike(ranks: Sequence[Sequence[Any]]) -> None:
    for call, outputs in enumerate(zip(*ranks)):
        for rank in (rank for rank, output in enumerate(outputs) if not identical(output, outputs[0])):
            require(call < len(ranks[0]) - 1, f"ranks 0 and {rank} drew the same masks until one of them drew more "
                    "numbers in apart: draw the two kinds of masks from two generators")
            raise CheckFailed(f"call {call} of alike: ranks 0 and {rank} drop different elements of an activation that "
                              "they both hold, so from here on it differs between them: all ranks need the same seed")


def _check_apart(ranks: Sequence[Sequence[Any]]) -> None:
    for (first, one), (second, other) in combinations(enumerate(ranks), 2):
        for call, (a, b) in enumerate(zip(one, other)):
            refuse(identical(a, b), f"call {call} of apart: ranks {first} and {second} draw the same mask for "
                   "different units, whose masks should be independent, as in one process: make the seed depend on the "
                   "rank")
        for (call, a), (later, b) in product(enumerate(one), enumerate(other)):
            refuse(identical(a, b), f"rank {first}'s call {call} of apart draws the mask of rank {second}'s call "
                   f"{later}: ranks that skip some numbers of the same generator meet in later calls. Give each rank a "
                   "generator with its own seed")


def _check_seed_0(runs: Sequence[Run]) -> None:
    """With the seed 0 too, each rank must draw masks of its own."""
    with reworded("with the seed 0, though not with other seeds: ",
                  ". A product with the seed is 0 on every rank: add the rank to the seed instead"):
        _check_apart([run["apart"] for run in runs])
        for rank, run in enumerate(runs):
            _check_anew(rank, run)


def _check_anew(rank: int, run: Run) -> None:
    """No two masks of a rank may be the same."""
    masks = [(kind, call, output) for kind in ("alike", "apart") for call, output in enumerate(run[kind])]
    for (kind, call, a), (other, later, b) in combinations(masks, 2):
        same = identical(a, b)
        refuse(same and kind == other, f"rank {rank}: calls {call} and {later} of {kind} drop the same elements: seed "
               "a generator only once, when you make it")
        refuse(same, f"rank {rank}: alike and apart draw the same masks, because their generators start from the same "
               "seed on this rank: keep apart's seeds away from alike's (seed + 1 + rank)")


# Traffic and sizes

def vocabulary_traffic(traces: Mapping[int, Trace], num_predictions: int) -> float:
    """What a rank sends, in collectives or point to point, must not grow with the vocabulary size, the key of `traces`.

    Returns the bytes that a rank gives to collectives, for each prediction.
    """
    sent = {size: max(sum(event.num_bytes or 0 for event in trace.of_rank(rank) if event.kind in ("collective", "send"))
                      for rank in range(trace.world_size)) for size, trace in traces.items()}
    (small, few), (large, many) = min(sent.items()), max(sent.items())
    require(many <= few, f"with {small} tokens a rank gives {short(few)} bytes to collectives, but with {large} tokens "
            f"{short(many)}, so logits are sent. A prediction needs only three numbers, whatever V is: its largest "
            "logit, its sum of exponentials and the logit of its target")
    return many / num_predictions


def block_count(answer: Any, width: int, mlp_width: int, num_ranks: int, num_tokens: int,
                element_bytes: int) -> tuple[float, float]:
    """`answer` must be (parameters that a rank holds of one split block, bytes that it gives to all-reduces); returned.

    The weights and the biases of maps that are cut by columns are cut, (4 D^2 + 2 D M + 3 D + M) / R; two norms and two
    biases stay whole, 6 D. Each of two sums has D numbers for each token, forward and backward.
    """
    require(isinstance(answer, (tuple, list)) and len(answer) == 2,
            f"return two numbers, parameters and bytes, not {type(answer).__name__}")
    weights, biases, whole = 4 * width**2 + 2 * width * mlp_width, 3 * width + mlp_width, 6 * width
    num_bytes = 4 * num_tokens * width * element_bytes
    kept = Formula((weights + biases) / num_ranks + whole, _wrong_parameters(weights, biases, whole, width, num_ranks))
    given = Formula(num_bytes, [
        (num_bytes / 2, "that is half: one all-reduce follows attention, one the MLP, as many in backward"),
        (num_bytes / 4, "that is a single all-reduce, but attention and MLP make one each, forward and backward"),
        (num_bytes / element_bytes, f"that counts numbers, but each has {element_bytes} bytes"),
        (num_bytes / num_tokens, f"that is for one token, but there are {num_tokens}"),
        (num_bytes * num_ranks, "that is what all ranks give together, but the question is what one gives"),
        (num_bytes / num_ranks, "every rank gives the whole activation to the all-reduce, not a part of it"),
        *((num_bytes * (1 + num * (hidden / width - 1) / 4),
           "what is added up is as wide as the block's output, not as the hidden layer")
          for num in (4, 2, 1) for hidden in (mlp_width, mlp_width / num_ranks)),
        (num_bytes * 6 / 4, "that is an all-reduce for each of q, k and v, but they have the same input"),
        (num_bytes * 2 * (num_ranks - 1) / num_ranks,
         "that is what a ring sends, but the question is what a rank gives to the all-reduces")])
    return (kept.require_right("the number of parameters", answer[0]),
            given.require_right("the number of bytes", answer[1]))


def _wrong_parameters(weights: int, biases: int, whole: int, width: int, num_ranks: int) -> Slips:
    """Numbers of parameters of a split block that mistakes give; `whole` stay whole, `biases` belong to cut columns."""
    everything, of_qkv = weights + biases + whole, 3 * width
    return [
        (everything, "that is the whole block"),
        (everything / num_ranks,
         "not everything is cut: norms, and the biases of the maps that are cut by rows, are whole on every rank"),
        ((everything - 4 * width) / num_ranks + 4 * width,
         "the biases of the maps that are cut by rows are whole on every rank, as they are added to the whole sum"),
        ((everything - 2 * width) / num_ranks + 2 * width, "the norms are whole on every rank"),
        ((everything - 5 * width) / num_ranks + 5 * width,
         "you cut one bias too many: out and down add theirs to the whole sum, so both are whole"),
        (weights / num_ranks + biases + whole, "the biases of the maps that are cut by columns are cut with them"),
        ((weights + of_qkv) / num_ranks + biases - of_qkv + whole, "the bias of up is cut as its outputs are"),
        ((weights + biases - of_qkv) / num_ranks + of_qkv + whole,
         "the biases of q, k and v are cut as their outputs are"),
        ((weights + biases) / num_ranks + 4 * width,
         "2 D are missing: a block has two norms, and whole biases in out and down"),
        ((weights + biases) / num_ranks + 2 * width, "that is without the norms"),
        (weights / num_ranks + 4 * width, "that is without any biases"),
        (weights / num_ranks, "that is the weights alone: norms and biases are parameters too")]
