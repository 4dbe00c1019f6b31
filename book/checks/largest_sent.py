"""L3, lab 15: ranks that send the largest numbers of their gradients, and owe the rest: what all of them make of it.

Gradients are drawn by the check, so that what is right follows from them alone. So does what each mistake leads to.
N ranks, tensors of n numbers.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from book.checks.verdict import CheckFailed, agree, dense, held, likeliest, refuse, require
from book.launch import LaunchError

Steps = Sequence[Sequence[np.ndarray]]  # tensors of each step, (N, n) each
PAIR_BYTES = 16  # a number and its place


def largest(values: np.ndarray, k: int) -> np.ndarray:
    """Which k numbers of each row are the largest by magnitude, (N, n) of bool."""
    return _most(np.abs(values), k)


def _most(values: np.ndarray, k: int) -> np.ndarray:
    chosen = np.zeros(values.shape, dtype=bool)
    np.put_along_axis(chosen, np.argsort(-values, axis=1, kind="stable")[:, :k], True, axis=1)
    return chosen


def _to_all(one: np.ndarray, ranks: np.ndarray) -> np.ndarray:
    """The same row for each of the ranks."""
    return one[None].repeat(len(ranks), 0)


def rounded_down(share: float, length: int) -> int:
    """How many numbers of a tensor are sent."""
    return max(1, int(share * length))


@dataclass(frozen=True)
class Sending:
    """What ranks do in a step with a tensor. `owing` is the gradient with what was left before, (N, n) as all here.

    `pick` says which numbers are sent, from `owing` and the gradient; `value` what is sent of these; `merge` what all
    ranks make of what was sent, and of which numbers were; `rest` what is left, from `owing`, the gradient, what was
    sent, and the result. `count` is how many of a tensor's numbers are sent, from the share, its length, and the length
    of all tensors. If they are taken `together` they are one tensor.
    """

    count: Callable[[float, int, int], int] = lambda share, length, total: rounded_down(share, length)
    pick: Callable[..., np.ndarray] = lambda owing, gradient, k: largest(owing, k)
    value: Callable[..., np.ndarray] = lambda owing, gradient: owing
    merge: Callable[..., np.ndarray] = lambda sent, chosen: _to_all(sent.mean(0), sent)
    rest: Callable[..., np.ndarray] = lambda owing, gradient, sent, result: owing - sent
    together: bool = False

    def results(self, gradients: Steps, share: float) -> list[list[np.ndarray]]:
        """What each rank gets for each tensor in each step."""
        if self.together:
            cuts = np.cumsum([one.shape[1] for one in gradients[0]])[:-1]
            whole = replace(self, together=False).results([[np.concatenate(step, 1)] for step in gradients], share)
            return [np.split(one, cuts, axis=1) for [one] in whole]
        left, total = [np.zeros_like(one) for one in gradients[0]], sum(one.shape[1] for one in gradients[0])
        found: list[list[np.ndarray]] = []
        for step in gradients:
            found.append([])
            for place, gradient in enumerate(step):
                owing = gradient + left[place]
                k = min(self.count(share, gradient.shape[1], total), gradient.shape[1])
                chosen = self.pick(owing, gradient, k)
                sent = np.where(chosen, self.value(owing, gradient), 0)
                found[-1].append(self.merge(sent, chosen))
                left[place] = self.rest(owing, gradient, sent, found[-1][-1])
        return found


def _own_places(sent: np.ndarray, chosen: np.ndarray) -> np.ndarray:
    """The ranks' numbers are added up in the order of their places, and every rank puts them at its own."""
    result, k = np.zeros_like(sent), int(chosen[0].sum())
    order = np.argsort(-np.abs(sent), axis=1, kind="stable")[:, :k]
    np.put_along_axis(result, order, _to_all(np.take_along_axis(sent, order, 1).mean(0), sent), 1)
    return result


def _last_wins(sent: np.ndarray, chosen: np.ndarray) -> np.ndarray:
    """Where several ranks have sent a number, only that of the last one counts."""
    result = np.zeros_like(sent[0])
    for own, mine in zip(sent, chosen):
        result[mine] = own[mine]
    return _to_all(result / len(sent), sent)


SLIPS = (
    (Sending(pick=lambda owing, gradient, k: _most(owing, k)),
     "the largest by value were sent: a gradient of -5 says more than one of 1, so choose by magnitude"),
    (Sending(pick=lambda owing, gradient, k: _most(-np.abs(owing), k)), "the smallest were sent: choose the largest"),
    (Sending(value=lambda owing, gradient: np.abs(owing),
             rest=lambda owing, gradient, sent, result: np.where(sent != 0, 0, owing)),
     "the magnitudes were sent, without their signs: take the numbers themselves at the chosen places"),
    (Sending(together=True),
     "the largest of all tensors together were sent: each tensor sends a share of its own numbers"),
    (Sending(count=lambda share, length, total: rounded_down(share, total)),
     "as many numbers of each tensor were sent as are a share of all tensors together: k is a share of the tensor's "
     "own numbers"),
    (Sending(count=lambda share, length, total: max(1, int(np.ceil(share * length)))),
     "k is rounded up: round it down, and send one number at least"),
    (Sending(count=lambda share, length, total: max(1, round(share * length))),
     "k is rounded to the nearest number: round it down, and send one number at least"),
    (Sending(count=lambda share, length, total: int(share * length)),
     "of a small tensor nothing was sent: send one number at least"),
    (Sending(count=lambda share, length, total: length), "everything was sent: send the k largest numbers"),
    (Sending(merge=lambda sent, chosen: _to_all(sent.sum(0), sent)),
     "this is the sum of what the ranks have sent: divide by their number"),
    (Sending(merge=lambda sent, chosen: _to_all(sent.sum(0) / np.maximum(chosen.sum(0), 1), sent)),
     "each number is divided by how many ranks have sent it: divide by the number of all ranks, for the others have "
     "sent 0"),
    (Sending(merge=lambda sent, chosen: sent),
     "this is what the rank has sent itself: gather what all of them have sent"),
    (Sending(merge=lambda sent, chosen: sent / len(sent)),
     "this is the rank's own part of the mean: gather what all of them have sent"),
    (Sending(merge=_own_places),
     "numbers of different places have been added up: every rank has chosen others, so gather numbers and places, and "
     "add each where it belongs"),
    (Sending(merge=_last_wins),
     "where two ranks have sent the same place only one of their numbers counts: add them up, as index_add_ does"),
    (Sending(rest=lambda owing, gradient, sent, result: np.zeros_like(owing)),
     "what was not sent is lost: keep it, and add it to the next gradient before you choose"),
    (Sending(rest=lambda owing, gradient, sent, result: owing),
     "what was sent is still owed, and is sent again: subtract it from what you keep"),
    (Sending(rest=lambda owing, gradient, sent, result: np.where(sent != 0, 0, gradient)),
     "only what is left of the newest gradient is kept: what was owed before, and not sent, is still owed"),
    (Sending(rest=lambda owing, gradient, sent, result: gradient - sent),
     "what is kept is the gradient less what was sent: take it from the gradient with what was owed before"),
    (Sending(pick=lambda owing, gradient, k: largest(gradient, k)),
     "the places are the largest of the gradient alone: add what is owed before you choose"),
    (Sending(value=lambda owing, gradient: gradient),
     "the gradient's own numbers were sent: at the chosen places send what was owed before, too"),
    (Sending(rest=lambda owing, gradient, sent, result: _to_all((owing - sent).mean(0), sent)),
     "all ranks owe the mean of what is left: each rank keeps its own, for nobody else knows what it has not sent"),
    (Sending(rest=lambda owing, gradient, sent, result: _to_all((owing - sent).sum(0), sent)),
     "all ranks owe what all have left: each rank keeps its own, or it is sent once by each of them"),
    (Sending(rest=lambda owing, gradient, sent, result: owing - result),
     "what is kept is the gradient less what all ranks agreed on: subtract what this rank has sent, as it was before "
     "the mean"),
    (Sending(rest=lambda owing, gradient, sent, result: sent), "what is kept is what was sent: keep the rest"),
    (Sending(rest=lambda owing, gradient, sent, result: sent - owing),
     "what is kept has the wrong sign: it is what you wanted to send less what you have sent"),
)


def failure(error: LaunchError) -> str:
    """The error of ranks that gather; an explanation if an output does not fit."""
    message = str(error)
    return likeliest(
        ("invalid tensor size at index" in message, "the output of all_gather_into_tensor has the wrong length: it "
         f"holds the k numbers of each rank, so N * k for N ranks\n{message}"),
        ("invalid tensor type at index" in message, "the output of all_gather_into_tensor has another dtype than its "
         f"input: float64 for numbers, int64 for places\n{message}"),
        (True, message))


def only_largest(run: Sequence[Any], calls: Sequence[Sequence[int]], gradients: Sequence[Sequence[Sequence[Any]]],
                 share: float) -> list[list[np.ndarray]]:
    """Each rank must get the mean of what all have sent: the largest numbers of its gradient and of what it owes.

    `run` has what each rank got in each step for each tensor, `gradients` what it was given, `calls` the bytes of its
    collectives. Returns what the ranks got, by steps and tensors.
    """
    steps = [[np.stack([dense(own[step][place]).ravel() for own in gradients])
              for place in range(len(gradients[0][0]))] for step in range(len(gradients[0]))]
    got = [[_given(rank, step, own[step], gradients[rank][step]) for step in range(len(steps))]
           for rank, own in enumerate(run)]
    want = Sending().results(steps, share)
    for step in range(len(steps)):
        for place in range(len(steps[0])):
            for rank in range(len(run)):
                if not agree(got[rank][step][place], want[step][place][rank]):
                    raise CheckFailed(f"rank {rank}, step {step + 1}, tensor {place}: "
                                      + _why(got, steps, gradients[0][0], share, rank, step, place))
    _traffic(calls, steps, share)
    return [[one[0] for one in step] for step in want]


def _given(rank: int, step: int, found: Any, given: Sequence[Any]) -> list[np.ndarray]:
    require(isinstance(found, (list, tuple)), f"rank {rank} gives {type(found).__name__} in step {step + 1}: return a "
            "list, a tensor for each gradient")
    require(len(found) == len(given), f"rank {rank} gives {len(found)} tensors for {len(given)} gradients")
    return [held(rank, f"tensor {place} of step {step + 1}", one, dense(like).shape)
            for place, (one, like) in enumerate(zip(found, given))]


def _of_rows(tensors: Sequence[Any], share: float, place: int) -> tuple[Sending, str]:
    """The slip of a k that is a share of a tensor's first dimension; its sentence is about the tensor at `place`."""
    rows = {dense(one).size: len(dense(one)) for one in tensors}
    length = dense(tensors[place]).size
    return Sending(count=lambda share, length, total: rounded_down(share, rows[length])), (
        f"k is a share of the first dimension, as len gives it: of this tensor's {length} numbers k should be "
        f"{rounded_down(share, length)}, so take numel()")


def _why(got: Sequence[Sequence[Sequence[np.ndarray]]], steps: Steps, tensors: Sequence[Any], share: float, rank: int,
         step: int, place: int) -> str:
    """The sentence of the slip that explains all steps of all ranks; if there is none, that of one for this tensor."""
    here = ""
    for way, said in (*SLIPS, _of_rows(tensors, share, place)):
        found = way.results(steps, share)
        if all(agree(got[r][s][t], found[s][t][r]) for r in range(len(got)) for s in range(len(steps))
               for t in range(len(steps[0]))):
            return said
        if not here and agree(got[rank][step][place], found[step][place][rank]):
            here = said
    return here or ("this is not the mean of what the ranks should have sent: of each rank the k largest numbers of "
                    "its gradient and what it owes, and 0 elsewhere")


def _traffic(calls: Sequence[Sequence[int]], steps: Steps, share: float) -> None:
    """No more than numbers and places may go round."""
    pairs = sum(rounded_down(share, one.shape[1]) for step in steps for one in step)
    for rank, sizes in enumerate(calls):
        refuse(sum(sizes) > pairs * len(calls) * PAIR_BYTES, f"rank {rank}: {sum(sizes):,} bytes have gone round in "
               f"collectives, but {pairs} numbers and places of each rank are {pairs * len(calls) * PAIR_BYTES:,}: "
               "gather these, not whole tensors that are mostly 0")
