"""L3, lab 6: what stages of a pipeline hold and send, over a process group and over RPC.

Parameters and gradients come as one dict per stage, name -> tensor or array, with the names of the whole model.
"""
from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from book.checks.attribution import Attribution, in_words
from book.launch import HangError, LaunchError
from book.checks.formula import Formula
from book.checks.verdict import (
    TOLERANCE, CheckFailed, Gradients, StateDict, agree, differing, finite, flat, identical, magnitude,
    num_given, refuse, require, reworded, whole, with_hint,
)
from book.words import counted, listed

GRADIENT = {  # a stage's gradient, which should be a weighted sum over the micro-batches, or what else {what} is
    "nothing": "stage {stage}: its gradients are 0: were they cleared at the end?",
    "times num": "stage {stage}: the gradient is the sum over {num} {several}, each of whose losses is a mean: scale "
                 "by 1/{num}, before the forward, in which the loss is made",
    "over num": "stage {stage}: the gradient is divided by the {num} {several} twice",
    "times num_per_stage": "stage {stage}: the gradient is divided by {num_stages}, the number of stages, but it is a "
                           "mean over {num} {several}",
    "missing micro_batches": "stage {stage}: {what} {absent} of {num} has no part in the gradient: does each get its "
                             "backward, and is nothing cleared in between?",
    "alike": "stage {stage}: every {what} weighs {highest}, but they have different numbers of sequences: weight each "
             "mean by its share of the batch",
    "scaled": "stage {stage}: the gradient is {times} times what it should be: what is it scaled by, and how often?",
    "unequal": "stage {stage}: its {several} weigh {weights}, but should weigh {shares}",
    "unknown": "stage {stage}'s gradients are not a sum of its {several}' gradients, but those of stage {later} are "
               "right. Stage {later} must send back the gradient of its input (x.grad), and here it must meet the "
               "output of the same {what}. Is the input of each {what} still unchanged when its backward runs?"}
LAST = GRADIENT | {
    "unknown": "stage {stage}, the last, has gradients that are not a sum of its {several}' gradients: is the input of "
               "a {what} still unchanged when its backward runs, and does each have its own targets?"}


# The parts

def stage_parts(held: Sequence[StateDict], model: StateDict, num_blocks: int = 0) -> list[int]:
    """Every parameter of `model` must be on one of the stages, with the value that it has there.

    With `num_blocks`, the parameters of block i are called "blocks.i." and more, and stage s of p must have the blocks
    from num_blocks s // p up to num_blocks (s + 1) // p. Returns how many numbers each stage holds.
    """
    num = len(held)
    for name, value in model.items():
        owners = [stage for stage, own in enumerate(held) if name in own]
        unseen = name.startswith("blocks.") and not any(key.startswith("blocks.") for own in held for key in own)
        require(owners, f"with {num} stages no stage holds {name}: every block, both embeddings, the norm and the head "
                "must be on one" + ". PyTorch finds no blocks in a plain list: use an nn.ModuleList" * unseen)
        require(len(owners) == 1, f"with {num} stages {name} is on stages {listed(owners)}: a stage must keep only "
                "what it runs, or no memory is saved")
        require(identical(held[owners[0]][name], value),
                f"stage {owners[0]} has changed {name}: cutting a model must leave its numbers as they are")
    for stage, own in enumerate(held) if num_blocks else ():
        got = sorted({int(name.split(".")[1]) for name in own if name.startswith("blocks.")})
        want = list(range(num_blocks * stage // num, num_blocks * (stage + 1) // num))
        require(got == want, f"with {num} stages stage {stage} keeps block {listed(got) or 'none'}, but should keep "
                f"{listed(want)}: the blocks from L s // p up to, not including, L (s + 1) // p. Later checks depend "
                "on this cut")
    return [sum(flat(value).size for value in own.values()) for own in held]


def same_outputs(got: Any, expected: Any) -> float:
    """The last stage's output must be that of the whole model. Returns the sum of its absolute values."""
    require(got is not None, "a part returned None: its forward must return what it computes")
    require(tuple(got.shape) == tuple(expected.shape), f"the last part returns the shape {tuple(got.shape)}, but the "
            f"whole model {tuple(expected.shape)}: does the last stage, and only that one, predict? A single stage is "
            "the first and the last")
    require(agree(got, expected), "the parts, one after the other, give different logits from the whole model: does "
            "each block run once, in order, after embed and before predict?")
    return magnitude(got)


@contextmanager
def part_in_words(stage: int) -> Iterator[None]:
    """Raise CheckFailed for torch's error about a part that puts tokens where activations belong."""
    try:
        yield
    except RuntimeError as error:
        if "scalar type" not in str(error):
            raise
        said = (f"{type(error).__name__}: {error}: stage {stage} puts whole numbers into what takes activations. "
                "Tokens go through embed, on the first stage, and every other stage takes what the one before gives")
        raise CheckFailed(said).with_traceback(error.__traceback__) from None


def place_of_part(part: Any, stage: int, num_stages: int) -> None:
    """A part that `is_first` or `is_last` must be at that end of its pipeline, where it is stage `stage`."""
    for end, at_end in (("first", stage == 0), ("last", stage == num_stages - 1)):
        is_end = getattr(part, f"is_{end}", at_end)
        require(is_end == at_end, f"this part is {'' if is_end else 'not '}the {end} of its pipeline, but by the list "
                f"of ranks it is on stage {stage} of {num_stages}: list the ranks of one pipeline, from stage 0 on")


# A step

def neighbour(rank: Any, stage: int, before: int | None, after: int | None) -> None:
    """A stage sends to, and receives from, the ranks of the stages next to it; None stands for one that is not there.

    `before` and `after` are those ranks.
    """
    refuse(rank is None and before is None and after is None,
           "stage 0 is the only stage: it neither sends nor receives anything")
    refuse(rank is None and stage == 0,
           "stage 0 has no stage before: it receives no input, and sends no gradient back")
    refuse(rank is None, f"stage {stage} has no stage after: it sends no output on, and receives no gradient")
    require(isinstance(rank, int), f"a rank is a number, not a {type(rank).__name__}: the order of the arguments is "
            "send(tensor, rank) and receive(rank, m)")
    require(rank in (before, after), f"rank {rank} is not next to stage {stage}: the stage before is on rank {before}, "
            f"the stage after on rank {after}. Use self.before and self.after; receive takes the rank first, then m")


def next_action(kind: str, micro_batch: Any, waiting: set[int], num_micro_batches: int) -> None:
    """A stage must have what it runs next, a forward ("F") or a backward ("B"), still to do.

    `waiting` are the micro-batches that have run forward but not backward; this call updates it.
    """
    name = {"F": "forward", "B": "backward"}[kind]
    require(micro_batch in range(num_micro_batches), f"there is no micro-batch {micro_batch} to run {name}: the "
            f"{num_micro_batches} of this step have the numbers 0 to {num_micro_batches - 1}")
    if kind == "F":
        waiting.add(micro_batch)
        return
    require(micro_batch in waiting, f"backward({micro_batch}) has no forward to go back through: a stage runs the "
            "forward of each micro-batch first, and its backward once")
    waiting.remove(micro_batch)


def own_graph(forward: int, backward: int) -> None:
    """A backward must go through what the forward of the same micro-batch has kept."""
    refuse(forward != backward, f"backward({backward}) goes back through the forward of micro-batch {forward}: keep "
           f"what forward(m) makes under its number, and take out that of m. (A queue hands out the oldest first, but "
           "backwards may come in another order than forwards)")


def micro_batch_losses(got: Any, expected: Sequence[float]) -> None:
    """The last stage must have one loss for each micro-batch, as in one process; `expected` are scaled by 0.5."""
    require(num_given(got) == len(expected), f"the last stage has {num_given(got)} losses, but there are "
            f"{len(expected)} micro-batches: append the loss of each to self.losses")
    for m, (loss, wanted) in enumerate(zip(got, expected)):
        formula = Formula(wanted, [
            (2 * wanted, "it is not multiplied by self.scale"),
            (expected[(m + 1) % len(expected)], "it belongs to another micro-batch")])
        formula.require_right(f"the loss of micro-batch {m}", loss)


def nothing_kept(counts: Sequence[int]) -> None:
    """After all backwards no stage may keep anything; `counts` has by stage how many micro-batches it keeps."""
    for stage, count in enumerate(counts):
        refuse(count, f"stage {stage} still has {count} of its micro-batches in self.kept after their backwards: "
               "backward(m) must drop what it used, as self.kept.pop(m) does")


def batch_loss(got: Any, losses: Sequence[float], counts: Sequence[int] = ()) -> float:
    """`got`, what the last stage returned, must be the loss of the whole batch: the mean of its micro-batches' losses.

    `counts` are the micro-batches' numbers of sequences, where they differ. Returns the loss.
    """
    require(got is not None, "the last stage returned no loss: only it has the logits, so it must return the batch's "
            "loss")
    mean = float(np.average(losses, weights=counts or None))
    formula = Formula(mean, [
        (sum(losses), "it is the sum over the micro-batches"),
        (losses[-1], "it is that of the last micro-batch alone"),
        (losses[0], "it is that of the first micro-batch alone"),
        (float(np.mean(losses)),
         "it is the mean of the micro-batches' means, but they have different numbers of sequences"),
        (mean / len(losses), "it is divided by the number of micro-batches once too often")])
    return formula.require_right("the loss of the batch", got)


def stage_gradients(found: Sequence[Gradients], single: Sequence[Gradients], weights: Sequence[float] | None = None,
                    what: str = "micro-batch", hints: Mapping[float, str] = {}) -> float:
    """The stages together must hold the weighted sum of the gradients in `single`, those of each micro-batch alone.

    `weights` (M,) are 1/M each where not given; `what` is what a row of `single` is. `hints` maps a factor to the
    message for that many times the right gradient. Returns the sum of absolute values over all parameters.
    """
    num, last = len(single), len(found) - 1
    wanted = np.full(num, 1 / num) if weights is None else np.asarray(weights, dtype=float)
    counts = {"num": num, "num_per_stage": num / len(found)} if np.allclose(wanted, 1 / num) else {}
    for stage in reversed(range(len(found))):  # backward comes from the last stage, and so do mistakes
        _check_there(stage, last, found[stage])
    total = 0.0
    for stage in reversed(range(len(found))):
        got = finite(f"stage {stage}", "its gradients", whole(found[stage]))
        rows = np.stack([whole(own, found[stage]) for own in single])
        one = Attribution(got, rows, wanted, axes=("micro_batches",), counts=counts)
        if not one.is_right():
            words: dict[str, Any] = {"what": what, "several": what + ("es" if what.endswith("ch") else "s"), "num": num}
            words |= {"stage": stage, "later": stage + 1, "num_stages": len(found), "shares": in_words(wanted)}
            stage_hints = {factor: f"stage {stage}: {hint}" for factor, hint in hints.items()}
            raise CheckFailed(one.explain(LAST if stage == last else GRADIENT, hints=stage_hints, **words))
        total += magnitude(wanted @ rows)
    return total


def _check_there(stage: int, last: int, own: Gradients) -> None:
    """Every parameter of a stage must have a gradient."""
    absent = [name for name, gradient in own.items() if gradient is None]
    require(len(absent) < len(own), f"stage {stage} has no gradient at all: " + (
        "is backward called on the loss?" if stage == last else
        f"what came back from stage {stage + 1} must go into the backward of what this stage sent"))
    for name in absent:
        raise CheckFailed(f"stage {stage} has no gradient for {name}, though it has others: is it used in forward?")


# Over RPC

def remote_failure(error: LaunchError) -> str:
    """The error of a rank that trains over RPC, explained if torch does not explain it."""
    if "graphTask_" in str(error):
        return ("the gradient reaches a remote call, where nothing expects it: loss.backward() runs only in this "
                "process, dist_autograd.backward(context_id, [loss]) on all of them")
    if isinstance(error, HangError) and any(standing.main.operation == "backward" for standing in error.hang.ranks):
        return f"{error}\nDoes each step have its own context? A second backward in one context never ends"
    return with_hint(error, {
        "Could not find autograd context": "A context ends with its block, and so do its gradients: step inside it"})


def input_of_stage(x: Any, stage: int) -> None:
    """Stage 0 must get tokens (B, T), whole numbers, and every other stage activations (B, T, D)."""
    is_tokens = x.ndim == 2 and not x.is_floating_point()
    require(stage or is_tokens, "stage 0 gets activations, but it takes tokens: call each stage once, in order")
    refuse(stage and is_tokens, f"stage {stage} gets tokens, but it takes what stage {stage - 1} returns: call each "
           "stage once, in order")


def rows_in_calls(rows: Sequence[Sequence[int]], wanted: Sequence[int]) -> None:
    """Each stage must be called once a micro-batch; `rows` has by stage the numbers of sequences of its calls."""
    for stage, own in enumerate(rows):
        refuse(list(own) == [sum(wanted)] and len(wanted) > 1,
               f"stage {stage} gets the whole batch in one call: cut it into {len(wanted)} micro-batches")
        require(sorted(own) == sorted(wanted), f"in one step the calls of stage {stage} bring {listed(own) or 'no'} "
                f"sequences, but the {len(wanted)} micro-batches have {listed(wanted)}")


def in_company(together: bool | None) -> None:
    """The first stage must have been given its second micro-batch before the last one was done with the first."""
    require(together, "the second micro-batch is sent only when the first one is done, so one stage works at a time: "
            "start all calls, then wait (rpc_sync, wait() and to_here() each wait)")


def from_stage_to_stage(owners: Sequence[Sequence[str]]) -> None:
    """Each stage must fetch its inputs from the stage before; `owners` has by stage the workers that it fetched from.

    Worker 0 is the driver, worker s + 1 has stage s.
    """
    for stage, own in enumerate(owners[1:], 1):
        for strange in sorted(set(own) - {f"worker{stage}"}):
            who = "the driver" if strange == "worker0" else strange
            raise CheckFailed(f"stage {stage} fetches an input from {who}, not from stage {stage - 1}: pass on the "
                              "reference that stage.remote() returns, so the tensor stays there until it is fetched")


def first_updates(before: Sequence[StateDict], after: Sequence[StateDict], single: Sequence[Gradients],
                  learning_rate: float, weights: Sequence[float]) -> float:
    """One step of plain SGD must have moved every stage's weights along the gradient of the whole batch.

    `single` are the gradients of its micro-batches, and `weights` their shares of the batch. Returns what
    `stage_gradients` does.
    """
    found = [{name: (flat(own[name]) - flat(now[name])) / learning_rate for name in own}
             for own, now in zip(before, after)]
    idle = [stage for stage, update in enumerate(found) if not whole(update).any()]
    require(len(idle) < len(found), "no stage's weights have changed in the first step: did the forwards run inside "
            "the context, and does the optimizer step with the context's id, before the context ends?")
    for stage in idle:
        raise CheckFailed(f"stage {stage}'s weights have not changed in the first step: are its parameters among "
                          "those that the optimizer was given?")
    num = len(single)
    hints = {1 / num: f"the step is divided by the number of micro-batches, {num}, but the loss is a mean over the "
             "whole batch already"}
    try:
        return stage_gradients(found, single, weights, hints=hints)
    except CheckFailed as error:
        asked = "not a sum" in str(error)
        raise CheckFailed(f"{error}" + " And does the optimizer step once, for the whole batch?" * asked) from None


def losses_of_steps(got: Sequence[Any], expected: Sequence[float], num_first: int) -> None:
    """Two calls, of `num_first` steps and of the rest, must have returned the losses of one process."""
    for own, wanted in zip(got, (expected[:num_first], expected[num_first:])):
        length = len(own) if isinstance(own, Sequence) else "no"
        require(length == len(wanted), f"{length} losses are returned for {counted(len(wanted), 'step')}: "
                "return a list with one number for each")
    for step, (loss, wanted) in enumerate(zip([*got[0], *got[1]], expected)):
        why = ("is anything left over from earlier steps, such as their gradients in a context that all steps share?"
               if step > num_first else "is it the mean over the whole batch, before the step is made?")
        with reworded(after=f": {why}"):
            Formula(wanted).require_right(f"the loss of step {step}", loss)


def same_weights(held: Sequence[StateDict], expected: StateDict) -> float:
    """The stages together must hold `expected`, what one process ends with. Returns the sum of absolute values."""
    scale = whole(expected)
    for stage, own in enumerate(held):
        for name in differing(own, expected, scale, TOLERANCE):
            raise CheckFailed(f"the losses are right, but {name} of stage {stage} ends with different numbers than in "
                              "one process: does the optimizer step after the last loss too?")
    return magnitude(scale)
