"""L3: what the stages of a pipeline hold: every parameter once, and the gradient of the whole batch.

Parameters and gradients come as one dict per stage, name -> tensor or array, with the names of the whole model. What a
stage holds instead of the right gradient is found as multiples of what one process gets for each micro-batch (see
`compare.multiples`).
"""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from book.checks.compare import (
    Gradients, agree, flat, identical, is_zero, magnitude, multiples, num_given, whole,
)
from book.checks.verdict import CheckFailed, finite, listed, number, short


def stage_parts(held: Sequence[Mapping[str, Any]], model: Mapping[str, Any], num_blocks: int = 0) -> list[int]:
    """Every parameter of `model` must be on one of the stages, with the value that it has there.

    With `num_blocks`, the parameters of block i are called "blocks.i." and more, and stage s of p must have the blocks
    from num_blocks s // p up to num_blocks (s + 1) // p. Returns how many numbers each stage holds. Raises CheckFailed
    naming a parameter and the stages that have it, or the blocks.
    """
    for name, value in model.items():
        owners = [stage for stage, own in enumerate(held) if name in own]
        if not owners:
            raise CheckFailed(f"with {len(held)} stages no stage holds {name}: every block, both embeddings, norm and "
                              "head belong to one")
        if len(owners) > 1:
            raise CheckFailed(f"with {len(held)} stages {name} is on stages {listed(owners)}: a stage "
                              "keeps what it runs and no more, or nothing is saved")
        if not identical(held[owners[0]][name], value):
            raise CheckFailed(f"stage {owners[0]} has changed {name}: cutting a model leaves its numbers as they are")
    for stage, own in enumerate(held) if num_blocks else ():
        _check_blocks(stage, len(held), own, num_blocks)
    return [sum(flat(value).size for value in own.values()) for own in held]


def same_outputs(got: Any, expected: Any) -> float:
    """The last stage's output must be that of the whole model. Returns the sum of its absolute values."""
    if got is None:
        raise CheckFailed("a part returned None: its forward must return what it computes")
    if tuple(got.shape) != tuple(expected.shape):
        raise CheckFailed(f"the last part gives {tuple(got.shape)}, the whole model {tuple(expected.shape)}: does the "
                          "last stage, and it alone, predict?")
    if not agree(got, expected):
        raise CheckFailed("the parts, one after the other, give other logits than the whole model: does each block run "
                          "once, in order, after embed and before predict?")
    return magnitude(got)


def micro_batch_losses(got: Any, expected: Sequence[float], scale: float = 0.5) -> None:
    """The last stage must have one loss for each micro-batch, those of one process, in which `scale` is already."""
    if got is None or len(got) != len(expected):
        raise CheckFailed(f"the last stage has {num_given(got)} losses, one for each micro-batch would "
                          f"be {len(expected)}: append each to self.losses")
    for m, (loss, wanted) in enumerate(zip(got, expected)):
        number(f"the loss of micro-batch {m}", loss, wanted, [
            (wanted / scale, "it is not times self.scale"),
            (expected[(m + 1) % len(expected)], "it is that of another micro-batch")])


def nothing_kept(counts: Sequence[int]) -> None:
    """`counts` has by stage for how many micro-batches it still keeps something when all backwards are done: none."""
    for stage, count in enumerate(counts):
        if count:
            raise CheckFailed(f"stage {stage} still has {count} of its micro-batches in self.kept when their backwards "
                              "are done: backward(m) must drop what it used, as self.kept.pop(m) does")


def batch_loss(got: Any, losses: Sequence[float], counts: Sequence[int] = ()) -> float:
    """`got`, what the last stage returned, must be the loss of the whole batch: the mean of its micro-batches' losses.

    `counts` are the micro-batches' numbers of sequences, where they differ. Returns the loss.
    """
    if got is None:
        raise CheckFailed("the last stage returned no loss: it alone has the logits, so it must return the batch's")
    mean = float(np.average(losses, weights=counts or None))
    return number("the loss of the batch", got, mean, [
        (sum(losses), "it is the sum over the micro-batches"),
        (losses[-1], "it is that of the last micro-batch alone"),
        (losses[0], "it is that of the first micro-batch alone"),
        (float(np.mean(losses)),
         "it is the mean of the micro-batches' means, and they have different numbers of sequences"),
        (mean / len(losses), "it is divided by the number of micro-batches once more")])


def stage_gradients(found: Sequence[Gradients], single: Sequence[Gradients], weights: Sequence[float] | None = None,
                    what: str = "micro-batch", hints: Mapping[float, str] = {}) -> float:
    """The stages together must hold the weighted sum of the gradients in `single`, those of each micro-batch alone.

    `weights` (M,) are 1/M each where not given; `what` is what a row of `single` is. `hints` maps a factor to what to
    say when a stage holds that many times the right gradient. Returns the sum of absolute values over all parameters.
    Raises CheckFailed with the likeliest reason.
    """
    wanted = np.full(len(single), 1 / len(single)) if weights is None else np.asarray(weights, dtype=float)
    _check_there(found)
    total = 0.0
    for stage in reversed(range(len(found))):  # backward comes from the last stage, and so do mistakes
        got = finite(stage, f"the gradients of stage {stage}", whole(found[stage]))
        rows = np.stack([whole({name: own[name] for name in found[stage]}) for own in single])
        if not agree(got, right := wanted @ rows, rows):
            factors = multiples(rows, got)
            raise CheckFailed(_why_foreign(stage, len(found) - 1, what) if factors is None else
                              f"stage {stage}: {_why_weights(factors, wanted, what, hints, len(found))}")
        total += magnitude(right)
    return total


def _check_blocks(stage: int, num_stages: int, own: Mapping[str, Any], num_blocks: int) -> None:
    got = sorted({int(name.split(".")[1]) for name in own if name.startswith("blocks.")})
    want = list(range(num_blocks * stage // num_stages, num_blocks * (stage + 1) // num_stages))
    if got != want:
        raise CheckFailed(f"with {num_stages} stages stage {stage} keeps block {listed(got) or 'none'}, it should keep "
                          f"{listed(want)}: a run of blocks from L s // p up to, not including, L (s + 1) // p. What "
                          "later checks say depends on the cut")


def _check_there(found: Sequence[Gradients]) -> None:
    """Every parameter of every stage must have a gradient."""
    last = len(found) - 1
    for stage in reversed(range(len(found))):
        absent = [name for name, gradient in found[stage].items() if gradient is None]
        if len(absent) == len(found[stage]):
            raise CheckFailed(f"stage {stage} has no gradient at all: " + (
                "is backward called on the loss?" if stage == last else
                f"what came back from stage {stage + 1} must go into the backward of what this stage sent"))
        if absent:
            raise CheckFailed(f"stage {stage} has no gradient for {absent[0]}, but for others: is it used in forward?")


def _why_foreign(stage: int, last: int, what: str) -> str:
    if stage < last:
        return (f"stage {stage}'s gradients are no sum of its {_several(what)}' gradients, and those of stage "
                f"{stage + 1} are right: what goes back must be the gradient of the input (x.grad) of stage "
                f"{stage + 1}, and meet the same {what}'s output here. Is the input of each {what} still as it came "
                "when its backward runs?")
    return (f"stage {stage}, the last, has gradients that are no sum of its {_several(what)}' gradients: is the input "
            f"of a {what} still as it came when its backward runs, and does each have its own targets?")


def _why_weights(factors: np.ndarray, wanted: np.ndarray, what: str, hints: Mapping[float, str],
                 num_stages: int) -> str:
    """What is wrong with the multiples (M,) of the micro-batches' gradients that a stage holds."""
    num, absent = len(wanted), np.flatnonzero(is_zero(factors))
    if len(absent) == num:
        return "its gradients are 0: were they cleared at the end?"
    if len(absent):
        return (f"{what} {listed(absent)} of {num} has no part in the gradient: does each have its "
                "backward, and is nothing cleared in between?")
    times = factors / wanted
    if not np.allclose(times, times[0], rtol=1e-6):
        if np.allclose(factors, factors[0], rtol=1e-6):
            return (f"every {what} weighs {short(factors[0])}, but they have different numbers of sequences: weigh "
                    "each mean by its share of the batch")
        return (f"its {_several(what)} weigh {listed(map(short, factors))}, "
                f"and should {listed(map(short, wanted))}")
    said = dict(hints)
    if np.allclose(wanted, 1 / num):
        mean = f"it is a mean over {num} {_several(what)}"
        said = {num: f"the gradients of {num} {_several(what)} add up, and each is that of a mean: scale by 1/{num}",
                1 / num: f"the gradient is divided by the {num} {_several(what)} twice", **hints}
        said.setdefault(num / num_stages, f"the gradient is divided by the number of stages, {num_stages}: {mean}")
    for factor, message in said.items():
        if np.isclose(times[0], factor, rtol=1e-6):
            return message
    return f"the gradient is {short(times[0])} times what it should be: by what is it scaled, and how often?"


def _several(what: str) -> str:
    return what + ("es" if what.endswith("ch") else "s")
