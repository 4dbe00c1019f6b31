"""L3, lab 14: what frameworks hide: how gradients accumulate, which rank sees which rows, uneven batches.

Gradients are flat, (n,). A window is the passes that lead to one step of the optimizer. R ranks; steps count from 1 in
messages. Rows are the numbers of examples.
"""
from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from book.checks.attribution import Attribution
from book.launch import LaunchError
from book.checks.formula import Formula
from book.checks.verdict import (
    CheckFailed, disagree, held, likeliest, magnitude, refuse, require, whole, stands_still,
)
from book.trace import Trace
from book.words import listed

WINDOW = {  # the gradient with which an optimizer steps at the end of a window
    "nothing": "step {step}: the gradient is 0 when the optimizer steps: clear it after the step, not before",
    "by passes": "step {step}: the last window has only {length} of {passes} passes, but its losses are divided by "
                 "{passes}: divide each window by the number of passes that it has",
    "by length": "step {step}: the last window has only {length} of {passes} passes, and its losses are divided by "
                 "{length}: divide every loss by passes, even in a short window",
    "by batches": "step {step}: the losses are divided by {num_batches}, the number of all batches, but a step is made "
                  "from {passes}",
    "times passes": "step {step}: the gradient is {passes} times what it should be: backward adds up the gradients of "
                    "the passes, so divide each loss by passes",
    "over passes": "step {step}: the gradient is divided by passes twice",
    "over ranks": "step {step}: the gradient is divided by {ranks} once too often: DDP already takes the mean over the "
                  "ranks, and loss_on the mean over a batch's rows",
    "only own": "step {step}: rank {rank} steps with only its own gradients: the last pass of every window must "
                "synchronise, even of a short one",
    "only last passes": "step {step}: only the last pass of the window has a part in the gradient: zero_grad clears "
                        "what earlier passes left, so call it once per step",
    "first pass": "step {step}: rank {rank} steps with the ranks' mean of the window's first pass, but only its own "
                  "gradients of the later ones: synchronise in the last pass, not in the first",
    "missing passes": "step {step}: pass {absent} of the window, counted from 0, has no part in the gradient",
    "scaled": "step {step}: the gradient is {times} times what it should be",
    "unequal": "step {step}: the passes of the ranks weigh {weights} in the gradient, but each should weigh {share}",
    "unknown": "step {step}: the gradient is not a sum of this window's gradients: does it contain one from an earlier "
               "window? Call zero_grad after each step"}
UNEVEN = {  # the gradient of ranks with unequal numbers of rows
    "nothing": "rank {rank}: the gradient is 0",
    "over ranks with rows": "rank {rank}: DDP takes the mean over all ranks, also those without a row: multiply each "
                            "loss by the number of all ranks",
    "means of ranks": "rank {rank}: each rank's mean weighs the same, so a row counts for more on a rank with few "
                      "rows: multiply each rank's loss by its share of the global batch, times the number of ranks",
    "means of ranks twice": "rank {rank}: each rank's mean weighs the same, and is divided by the number of ranks once "
                            "more, although DDP already divides by it: weight each rank by its number of rows",
    "over ranks": "rank {rank}: the gradient is divided by the number of ranks once too often: DDP takes the mean over "
                  "the ranks, so multiply each loss by the number of ranks",
    "times rows": "rank {rank}: the gradient is the sum over the rows of the global batch: divide by their number",
    "of sums": "rank {rank}: the rows' losses are added up but not divided by the size of the global batch: DDP "
               "divides only by the number of ranks",
    "upside down": "rank {rank}: the fewer rows a rank has, the more its mean weighs: the weight is upside down",
    "weighted after": "rank {rank}: the gradient is multiplied after DDP has taken the mean, by a different number "
                      "on each rank: multiply the loss, before its backward",
    "missing rows": "rank {rank}: these rows of the global batch, counted from 0, have no part in the gradient: "
                    "{absent}",
    "scaled": "rank {rank}: the gradient is {times} times what it should be",
    "unequal": "rank {rank}: the rows of the global batch weigh {weights} in the gradient, but each should weigh "
               "{share}",
    "unknown": "rank {rank}: the gradient is not a sum of the rows' gradients"}
SAMPLERS = {  # how to recognise a sampler
    "rows": "a rank's rows are as far apart as the number of ranks, even within a batch",
    "batches": "the rows of a batch are consecutive, but those of the rank's next batch are further on",
    "blocks": "a rank's rows are consecutive from its first batch to its last",
    "everything": "all ranks have the same rows in the same order",
    "own order": "some rows are on two ranks, but no rank has all of them"}
Epoch = Sequence[Sequence[Sequence[int]]]  # by rank and step, the rows that the rank takes


# Accumulation

def num_window_steps(steps: Sequence[int], num_batches: int, passes: int) -> None:
    """Each rank must step once for each window, the short last one too; `steps` is by rank."""
    wanted = -(-num_batches // passes)
    for rank, taken in enumerate(steps):
        refuse(taken == 0 < max(steps), f"rank {rank}: the optimizer never steps, while that of rank "
               f"{int(np.argmax(steps))} does: each rank has its own copy of the weights and must make every step on "
               "it")
        refuse(taken == num_batches != wanted, f"rank {rank}: the optimizer steps after every pass, but it should step "
               f"once in {passes} passes, so {wanted} times in {num_batches} batches")
        refuse(taken == num_batches // passes != wanted, f"rank {rank}: the optimizer steps {taken} times, but "
               f"{num_batches} batches make {wanted} windows of up to {passes} passes: the last, short window needs "
               "its step too")
        require(taken == wanted, f"rank {rank}: the optimizer steps {taken} times, but it should step {wanted} times"
                + (": is the first pass a window of its own? Count passes from 1. Or do you step again after the "
                   "loop, even if its last window was whole?" if taken == wanted + 1 else ""))


def window_gradient(step: int, rank: int, got: Any, rows: Any, passes: int, divisor: int, num_batches: int = 0) -> None:
    """The gradient of a step must be the mean over ranks of a window's gradients, summed and divided by `divisor`.

    `got` is what `rank` steps with, (n,); `rows` are the gradients of the passes alone, (R, passes of this window, n).
    `num_batches` is how many batches the rank trains on in all.
    """
    num_ranks, length = np.shape(rows)[:2]
    found = Attribution(got, rows, 1 / (num_ranks * divisor), rank, ("ranks", "passes"),
                        {"passes": passes, "ranks": num_ranks})
    divisors = {"by passes": passes, "by length": length} if length < passes else {}
    divisors |= {"by batches": num_batches} if num_batches > passes else {}
    mistakes: dict[str, Any] = {name: 1 / (num_ranks * divisor) for name, divisor in divisors.items()}
    if length > 2:
        first = np.zeros((num_ranks, length))
        first[:, 0], first[rank, 1:] = 1 / (num_ranks * divisor), 1 / divisor
        mistakes["first pass"] = first
    found.require_right(WINDOW, mistakes, step=step, rank=rank, passes=passes, length=length, num_batches=num_batches)


def gradients_cleared(left: Sequence[Any]) -> None:
    """No rank may keep gradients after its last step; `left` is by rank, (n,)."""
    for rank, own in enumerate(left):
        refuse(magnitude(own), f"rank {rank}: the gradients of the last window are still there after the loop, and the "
               "next backward would add to them: clear them after each step")


def synchronised_once(trace: Trace, num_bytes: int, num_steps: int, num_batches: int) -> float:
    """Each rank must have all-reduced a gradient of so many bytes once for each step, and not in each pass.

    Returns how often it has.
    """
    for rank in range(trace.world_size):
        sent = sum(event.num_bytes for event in trace.of_rank(rank)
                   if event.op == "all_reduce" and event.kind == "collective") / num_bytes
        refuse(sent == 2 * num_steps < num_batches, f"rank {rank} all-reduces its gradient twice for each step: DDP "
               "already made it the mean over the ranks, in the backward of the last pass")
        require(sent == num_steps, f"rank {rank} all-reduces its gradient {sent:g} times in {num_batches} passes and "
                f"{num_steps} steps: once for each step is enough. no_sync must be around the forward too, since DDP "
                "decides there whether this backward synchronises")
    return num_steps


# Who sees which rows

def global_batches(epochs: Mapping[int, Epoch], num_rows: int, global_batch: int, expected: Mapping[int, Sequence[int]]
                   ) -> int:
    """The ranks together must take each global batch of an epoch's order, and share it evenly.

    `epochs` is by the number of the epoch, `expected` the order of all rows in each. Returns the rows of all steps,
    each times the number of its step, added up.
    """
    total = 0
    for epoch, ranks in epochs.items():
        _check_lengths(epoch, ranks, num_rows, global_batch)
        _check_once(epoch, ranks, num_rows)
        steps = [[row for own in ranks for row in own[step]] for step in range(len(ranks[0]))]
        first = next(iter(epochs))
        refuse(epoch != first and ranks == epochs[first], f"epoch {epoch} has the same order as epoch {first}: a "
               "framework calls set_epoch for you, but here you must add the epoch to the generator's seed")
        for step, rows in enumerate(steps):
            due = expected[epoch][step * global_batch:(step + 1) * global_batch]
            if sorted(rows) != sorted(due):
                raise CheckFailed(_why_other_rows(epoch, step, rows, due, num_rows, global_batch, len(ranks)))
            sizes = [len(own[step]) for own in ranks]
            require(max(sizes) - min(sizes) <= 1, f"epoch {epoch}, step {step + 1}: the ranks take {listed(sizes)} "
                    "rows, but these numbers may differ by at most one")
        total += sum((step + 1) * sum(rows) for step, rows in enumerate(steps))
    return total


def _check_lengths(epoch: int, ranks: Epoch, num_rows: int, global_batch: int) -> None:
    wanted, num_ranks = -(-num_rows // global_batch), len(ranks)
    for rank, own in enumerate(ranks):
        require(own is not None, f"rank {rank} returned None: return the list of its batches")
        require(isinstance(own, (list, tuple)), f"rank {rank} returned a {type(own).__name__}: return a list of its "
                "batches")
        odd = next((batch for batch in own if not isinstance(batch, (list, tuple))), None)
        require(odd is None, f"rank {rank} returned a list that contains {odd!r}, of type {type(odd).__name__}: for "
                "each step it must contain a list of the rows that the rank takes")
        for row in (row for batch in own for row in batch):
            require(type(row) is int, f"rank {rank} has rows of type {type(row).__name__}: return plain ints "
                    "(tolist())")
            require(0 <= row < num_rows, f"rank {rank} takes row {row}, but there are only rows 0 to {num_rows - 1}")
        where = f"epoch {epoch}: rank {rank} of {num_ranks} has {len(own)} batches, but should have {wanted}: "
        refuse(len(own) < wanted and max(map(len, own), default=0) == global_batch and num_ranks > 1, where +
               "each rank takes global_batch rows. That is what a loader's batch_size means under a framework, but "
               "here the ranks share global_batch")
        refuse(all(len(other) == num_rows // global_batch < wanted for other in ranks),
               where + "you dropped the last, short one")
        require(len(own) == wanted, where + "every rank must take part in every step")


def _check_once(epoch: int, ranks: Epoch, num_rows: int) -> None:
    """Every row must come once in an epoch."""
    times = Counter(row for own in ranks for batch in own for row in batch)
    twice = sorted(row for row, count in times.items() if count > 1)
    if twice and times.total() > num_rows:
        raise CheckFailed(f"epoch {epoch}: row {twice[0]} comes {times[twice[0]]} times, and the ranks take "
                          f"{times.total()} rows of {num_rows}. Do several ranks take the same part of a batch? And "
                          "a distributed sampler repeats rows until all ranks have equally many, but here no row may "
                          "come twice")
    refuse(twice and len(ranks) == 1, f"epoch {epoch}: row {listed(twice[:1])} comes more than once on one rank, and "
           "others never come: draw one order for the epoch, and cut it into steps")
    refuse(twice, f"epoch {epoch}: row {listed(twice[:1])} is on several ranks, and others never come: all ranks must "
           "shuffle with the same seed, and then take different parts")
    missing = sorted(set(range(num_rows)) - set(times))
    refuse(missing, f"epoch {epoch}: {len(missing)} of {num_rows} rows never come, for example row "
           f"{listed(missing[:1])}: "
           + ("do the global batches cover the whole order?" if len(ranks) == 1 else "if a batch is not divisible by "
              "the number of ranks, some ranks must take one row more"))


def _why_other_rows(epoch: int, step: int, rows: Sequence[int], due: Sequence[int], num_rows: int, global_batch: int,
                    num_ranks: int) -> str:
    in_order = list(range(num_rows))[step * global_batch:(step + 1) * global_batch]
    return f"epoch {epoch}, step {step + 1}: " + likeliest(
        (sorted(rows) == in_order, "the rows come in their original order: shuffle them"),
        (num_ranks == 1 and sorted(rows) == list(range(min(rows), min(rows) + len(rows))),
         "the batches are shuffled, but each has consecutive rows: shuffle all rows first"),
        (len(rows) != len(due), f"together the ranks take {len(rows)} rows, but they should take {len(due)}"),
        (num_ranks > 1, f"on {num_ranks} ranks the global batch has different rows than on one: first cut the order "
         "into global batches, then cut each of these into the ranks' parts"),
        (True, "even a single rank does not take the rows in the given order: seed the generator with seed + epoch"))


def same_weights_on(weights: Mapping[int, Any]) -> float:
    """Trained with the same global batches, any number of ranks must end with the same weights, (n,), by rank count.

    Returns the sum of their absolute values.
    """
    (first, want), *others = weights.items()
    for num_ranks, got in others:
        require(np.allclose(got, want, rtol=0, atol=1e-9), f"{num_ranks} ranks end with different weights than "
                f"{first}: is each global batch shared out evenly?")
    return magnitude(want)


# Uneven batches

def uneven_gradient(rank: int, gradients: Sequence[Any], rows: Any, sizes: Sequence[int]) -> None:
    """A rank's gradient must be the mean over all rows of the global batch, whichever rank has them.

    `gradients` are the rank's, by parameter; `rows` those of each row alone, (N, n), in the order of the ranks, which
    have `sizes` of them.
    """
    refuse(any(gradient is None for gradient in gradients), f"rank {rank} has no gradient: every rank must run a "
           "backward, even one without a row")
    named = {str(place): held(rank, "a gradient", own, own.shape) for place, own in enumerate(gradients)}
    num_rows, num_ranks = len(rows), len(sizes)
    means = [1 / (num_ranks * size) for size in sizes for _ in range(size)]
    found = Attribution(whole(named), rows, 1 / num_rows, axes=("rows",),
                        counts={"ranks": num_ranks, "rows": num_rows})
    with_rows = {"over ranks with rows": sum(map(bool, sizes)) / num_ranks / num_rows} if 0 in sizes else {}
    found.require_right(UNEVEN, {**with_rows, "means of ranks": means, "of sums": 1 / num_ranks,
                                 "means of ranks twice": [mean / num_ranks for mean in means],
                                 "upside down": [num_rows * mean ** 2 for mean in means],
                                 "weighted after": [num_ranks * sizes[rank] / num_rows * mean for mean in means]},
                        rank=rank)


def uneven_failure(error: LaunchError, sizes: Sequence[int]) -> str:
    """The error of ranks with unequal numbers of rows: an explanation if some waited for one that has none."""
    message = str(error)
    left = "Connection closed" in str(error.__cause__)  # gloo's words to a rank whose peer has returned
    if 0 in sizes and (left or stands_still(error)):
        return (f"rank {sizes.index(0)} has no rows, and the others wait for its part of the all-reduce: every rank "
                "must run a backward, even one without a row, and of a loss that comes out of the model, since DDP "
                f"gets ready in its forward.\n{message}")
    if 0 in sizes and disagree(error):
        return (f"rank {sizes.index(0)} has no rows, and makes other calls than the others: DDP joins gradients in "
                f"buckets, so every rank must leave the all-reduce to a backward of its own.\n{message}")
    if stands_still(error):
        return ("some ranks run more backwards than others, and wait: each rank must run exactly one, over all of its "
                f"rows, whatever their number.\n{message}")
    return message


# Closed frameworks

def found_hidden(got: Any, want: Any, num_ranks: int, num_steps: int, logs: bool) -> None:
    """`got` must be the settings `want` of a framework: its passes, divisor, all_reduces and sampler.

    The run had so many ranks and steps; `logs` says whether each pass all-reduced a loss as well.
    """
    require(isinstance(got, tuple) and len(got) == len(want), "what_it_hides must return Settings(passes, divisor, "
            f"all_reduces, sampler), not {got!r:.60}")
    passes, divisor, all_reduces, sampler = got
    made = want.passes * num_steps
    refuse(passes == made != want.passes, f"you find {passes} passes for each step, but these are the passes of the "
           f"whole run, which has {num_steps} steps")
    formula = Formula(want.passes, [
        (num_steps, "that is the number of steps"),
        (num_ranks * want.passes, "that counts all ranks together, but they make their passes at the same time")])
    formula.require_right("the number of passes for each step", passes)
    mean = f"a step's gradient is the mean over {num_ranks} ranks of what each has added up in {want.passes} passes"
    formula = Formula(want.divisor, [
        (num_ranks * want.divisor, f"{mean}: DDP takes the mean over ranks, so the divisor does not contain the number "
         "of ranks"),
        (want.divisor / num_ranks, f"{mean}: compare with the mean over ranks, not with rank 0 alone"),
        (want.divisor / want.passes, f"{mean}: compare with the sum over the passes, not with their mean or with one "
         "pass"),
        (want.passes, f"{mean}, and here no loss is divided by the number of passes. Measure the divisor with "
         "gradient_of"),
        (1 / want.divisor, f"{mean}, and each loss is multiplied by this number: return its reciprocal")])
    odd = isinstance(divisor, (int, float)) and not formula.is_right(divisor) and not formula.explain(divisor)
    refuse(odd, f"what each loss is divided by is {divisor:.6g}, which is wrong: {mean}. Compute this mean with "
           "gradient_of, for the passes of all ranks and with the weights before the step, and compare it with the "
           "gradient that the step got")
    formula.require_right("what each loss is divided by", divisor)
    formula = Formula(want.all_reduces, [
        (want.all_reduces + 1 / num_steps, "that includes a broadcast of the weights: look at op"),
        (want.all_reduces + want.passes * logs, "losses are all-reduced too, for the log, but they are not gradients: "
         "look at num_bytes"),
        (want.all_reduces * num_steps, "that is the whole run"),
        ((want.all_reduces + want.passes * logs) * num_steps, "that is the whole run, including the losses"),
        (want.all_reduces * num_ranks, "that is all ranks together: look at one"),
        (want.passes, "that is one for each pass, but under no_sync a pass sends nothing: count in the trace"),
        (1, "that would be right with no_sync: count in the trace"),
        (0, "count those of the whole run, and divide by its number of steps, not of passes")])
    formula.require_right("the number of all-reduces of the gradient for each step", all_reduces)
    require(sampler == want.sampler, f"you find the sampler {sampler!r}, but it is {want.sampler!r}: "
            + SAMPLERS.get(want.sampler, ""))
