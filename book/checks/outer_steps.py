"""L3, lab 15: ranks that train apart and agree every so many steps: what they send, and what the outer step is made of.

Each rank's run is noted from outside: where its gradients were asked for, where its inner steps ended, and how much its
inner optimizer remembered before each. From these follow the outer steps, right ones and wrong ones. n parameters, N
ranks.
"""
from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from book.checks.formula import Slips
from book.checks.verdict import CheckFailed, agree, dense, finite, held, likeliest, refuse, require


class Noted(NamedTuple):
    """A rank's run: what it returned, places of its gradients, ends of its inner steps, what these remembered.

    `given` are the gradients that it got, `used` those with which its inner steps were made, None where there was none.
    `meant` is where the inner steps would have ended by an optimizer that nobody but the check can reach.
    `last` is where its parameter is in the end, `num_with_graph` how many tensors it returned with autograd's graph.
    `others` says of each gradient whether the Parameter that it was asked for is another than the round was given.
    """

    history: Any
    asked: Sequence[Any]
    given: Sequence[Any]
    used: Sequence[Any]
    ended: Sequence[Any]
    meant: Sequence[Any]
    remembered: Sequence[int]
    last: Any
    num_with_graph: int = 0
    others: Sequence[bool] = ()


class Outer(NamedTuple):
    """What was asked for: how many rounds, of how many inner steps, and the outer optimizer's numbers."""

    num_rounds: int
    every: int
    lr: float
    momentum: float


def num_with_graph(history: Any) -> int:
    """How many tensors hold the graph of what led to them; counted in the rank, since none travels with it."""
    given = history if isinstance(history, (list, tuple)) else []
    return sum(getattr(one, "grad_fn", None) is not None for one in given)


def trained_rarely(run: Sequence[Noted], calls: Sequence[Sequence[int]], start: Any, outer: Outer) -> np.ndarray:
    """Ranks must take their inner steps, agree once a round by DiLoCo's outer step, and go on from there.

    `calls` has for each rank the numbers of parameters in its collectives. Returns what was agreed on after the last
    round, (n,).
    """
    first = dense(start)
    for rank, noted in enumerate(run):
        _inner_steps(rank, noted, outer)
    found = [_history(rank, noted, first, outer) for rank, noted in enumerate(run)]
    _messages(calls, len(first), outer)
    ends = np.stack([[dense(place) for place in noted.ended] for noted in run])[:, outer.every - 1::outer.every]
    agreed = np.stack([first, *found[0]])
    for number in range(outer.num_rounds):
        _before_exchange(run, found, ends, number, outer)
        _outer_step(found, ends, agreed, number, outer)
        if number:
            _put_back(run, agreed[number], number, outer)
    for rank, noted in enumerate(run):
        require(agree(noted.last, found[0][-1]), f"rank {rank}: what the last round has agreed on is not in the "
                "parameter: put it back after the last round too")
    return found[0][-1]


def _inner_steps(rank: int, noted: Noted, outer: Outer) -> None:
    wanted = outer.num_rounds * outer.every
    require(len(noted.ended) == wanted, f"rank {rank}: the inner optimizer that you were given made {len(noted.ended)} "
            f"steps, but {outer.num_rounds} rounds of {outer.every} are {wanted}" + likeliest(
                (len(noted.ended) < wanted == len(noted.asked), ". Is another one made in its place? The inner "
                 "optimizer keeps its moments, from the first step to the last")))
    require(len(noted.asked) == wanted, f"rank {rank}: gradient was called {len(noted.asked)} times for {wanted} "
            "steps: call it once for each")
    for step in range(wanted):
        _inner_step(rank, noted, step, outer)
    lost = next((step for step, count in enumerate(noted.remembered) if step and not count), None)
    refuse(lost, f"rank {rank}: before step {lost} the inner optimizer has forgotten its moments: only the outer "
           "optimizer belongs to the agreement, so leave the inner one's state alone")
    changed = next((step + 1 for step in range(wanted) if not agree(noted.ended[step], noted.meant[step])), 0)
    refuse(changed, f"rank {rank}: inner step {changed} ends elsewhere than the inner optimizer takes it: its moments "
           "or its options have been changed, so leave both as they are")


def _inner_step(rank: int, noted: Noted, step: int, outer: Outer) -> None:
    """A step must begin where the one before it in its round has ended, and take its own gradient."""
    began, where = step - step % outer.every, f"rank {rank}, inner step {step + 1}: "
    other = any(noted.others[step:step + 1])
    refuse(other and not agree(noted.used[step], noted.given[step]), where + "you train a new parameter; the inner "
           "optimizer still steps the one that you were given. Copy the new numbers into that one")
    if step > began and not agree(noted.asked[step], noted.ended[step - 1]):
        raise CheckFailed(where + "its gradient is not that of where the step before has ended: " + likeliest(
            (agree(noted.asked[step], noted.asked[began]), "gradient gets what was agreed on in every step of the "
             "round; give it the parameter, which moves"), (True, "call gradient(parameter) once the step is made")))
    given, used = noted.given[step], noted.used[step]
    if not agree(used, given):
        summed = [sum(map(dense, noted.given[first:step + 1])) for first in (0, began)]
        raise CheckFailed(where + likeliest(
            (used is None, "parameter.grad is None: put the gradient there before you call inner.step()"),
            (any(agree(used, each) for each in summed), "gradients have been added up: put the new one into "
             "parameter.grad in place of the old one"),
            (agree(used, dense(given) / outer.every), "the gradient is divided by the number of inner steps: each of "
             "them takes the whole of its own"),
            (True, "what is in parameter.grad is not what gradient(parameter) has given")))


def _history(rank: int, noted: Noted, first: np.ndarray, outer: Outer) -> list[np.ndarray]:
    """What a rank says was agreed on, round by round."""
    given = noted.history
    require(isinstance(given, (list, tuple)), f"rank {rank} returns {type(given).__name__}: return a list of what was "
            "agreed on, a tensor for each round")
    require(len(given) == outer.num_rounds, f"rank {rank} returns {len(given)} tensors for {outer.num_rounds} rounds")
    found = [held(rank, f"what was agreed on in round {number + 1}", one, first.shape) for number, one in
             enumerate(given)]
    refuse(noted.num_with_graph, f"rank {rank}: what was agreed on still holds autograd's graph, which grows with "
           "every round: detach the parameter before you compare with it")
    refuse(len(found) > 1 and all(np.array_equal(one, found[0]) for one in found),
           f"rank {rank}: all rounds return the same numbers: keep a copy of what was agreed on, not the tensor "
           "itself, which the next round changes")
    return found


def _messages(calls: Sequence[Sequence[int]], length: int, outer: Outer) -> None:
    for rank, sizes in enumerate(calls):
        total, most = sum(sizes), outer.num_rounds * length
        require(total <= most, f"rank {rank} has sent {total} numbers round the ranks in {len(sizes)} collectives, but "
                f"one exchange of {length} in each of {outer.num_rounds} rounds is enough" + likeliest(
                    (total == most * outer.every, ": exchange after the inner steps, not in each of them"),
                    (total == 2 * most, ": the momentum follows from what is agreed on, so every rank has it already")))


def _outer_step(found: Sequence[Sequence[np.ndarray]], ends: np.ndarray, agreed: np.ndarray, number: int,
                outer: Outer) -> None:
    """Round `number`, from 0, must be right; `agreed` (rounds + 1, n) has the start too, `ends` are (N, rounds, n)."""
    was, right = agreed[number], agreed[number] - _move(_deltas(ends, agreed, number).mean(0), outer)
    for rank, history in enumerate(found):
        if not agree(finite(rank, "what was agreed on", history[number]), right, right - was):
            next_end = ends[rank, number + 1] if number + 1 < outer.num_rounds else None
            refuse(agree(next_end, history[number]), f"rank {rank}: what it returns for round {number + 1} has gone on "
                   "to train in the next round: copy the numbers into the parameter, or return a copy of them")
            later = [_fitting(history[at], ends, agreed, rank, at, outer) for at in range(number, outer.num_rounds)]
            lasting = [said for said in later[0] if all(said in fitting for fitting in later)]
            raise CheckFailed(f"rank {rank}, round {number + 1}: " + next(iter(lasting + later[0]), "this is not the "
                              "outer step: w less lr (delta + momentum * u), where delta is the mean of what the ranks "
                              "have travelled, and u = momentum * u + delta"))


def _before_exchange(run: Sequence[Noted], found: Sequence[Sequence[np.ndarray]], ends: np.ndarray,
                     number: int, outer: Outer) -> None:
    """What is returned for round `number`, from 0, must not be the rank's own weights if it goes on from others."""
    for rank, noted in enumerate(run):
        after = [*noted.asked[(number + 1) * outer.every:], noted.last][0]
        refuse(agree(found[rank][number], ends[rank, number]) and not agree(after, ends[rank, number]),
               f"rank {rank}: what it returns for round {number + 1} are its own weights, from before the exchange: "
               "keep what was agreed on, which you put into the parameter")


def _deltas(ends: np.ndarray, agreed: np.ndarray, number: int) -> np.ndarray:
    """What each rank has travelled in each round up to this one, (N, number + 1, n)."""
    return agreed[None, :number + 1] - ends[:, :number + 1]


def _fitting(got: np.ndarray, ends: np.ndarray, agreed: np.ndarray, rank: int, number: int, outer: Outer) -> list[str]:
    """The sentences of the slips that end in what this rank has in this round."""
    travelled, was = _deltas(ends, agreed, number), agreed[number]
    right = was - _move(travelled.mean(0), outer)
    slips = _slips(was, travelled.mean(0), travelled[rank], len(ends), ends[rank, number], outer)
    return [said for value, said in slips if agree(got, value, right - was) and not agree(value, right, right - was)]


def _move(deltas: np.ndarray, outer: Outer) -> np.ndarray:
    """How far the last of these rounds moves, by Nesterov's momentum."""
    speeds = list(_speeds(deltas, outer.momentum))
    return outer.lr * (deltas[-1] + outer.momentum * speeds[-1])


def _speeds(deltas: np.ndarray, momentum: float) -> Iterator[np.ndarray]:
    speed = np.zeros_like(deltas[0])
    for delta in deltas:
        speed = momentum * speed + delta
        yield speed


def _slips(was: np.ndarray, deltas: np.ndarray, own: np.ndarray, num_ranks: int, end: np.ndarray,
           outer: Outer) -> Slips:
    """What wrong outer steps end in; `own` is what this rank has travelled in each round, `end` where it was."""
    speed, own_speed = list(_speeds(deltas, outer.momentum))[-1], list(_speeds(own, outer.momentum))[-1]
    lr, momentum, delta = outer.lr, outer.momentum, deltas[-1]
    return [
        (was + _move(deltas, outer), "the outer step goes the wrong way: where the ranks have come from, less where "
         "they are, has the sign of a gradient, and a step goes against it"),
        (was - _move(deltas * num_ranks, outer), "this is the step of the sum over the ranks: divide by their number"),
        (was - _move(own, outer), "the rank follows what it has travelled itself: take the mean over all ranks"),
        (was - lr * (delta + momentum * own_speed), "the momentum is that of what this rank has travelled itself: "
         "build it from the mean, so that all ranks have the same"),
        (was - delta, "these are the ranks' mean weights: take the mean of what they have travelled as a gradient, and "
         "let the outer optimizer step on it"),
        (end, "these are this rank's own weights: is what you compare with a copy of the parameter, or the parameter "
         "itself?"),
        (was, "nothing has moved: what was agreed on before has to be a copy of the parameter, made before the inner "
         "steps"),
        (was - lr * speed, "this is momentum without Nesterov's look ahead: renew u first, and step along delta + "
         "momentum * u"),
        (was - lr * (delta + momentum * delta), "the momentum begins anew in every round: keep u from one to the next"),
        (was - lr * delta, "the momentum is missing: u = momentum * u + delta"),
        (was - (delta + momentum * speed), "the outer learning rate is missing"),
    ]


def _put_back(run: Sequence[Noted], agreed: np.ndarray, number: int, outer: Outer) -> None:
    """Round `number`, from 0, must begin on all ranks where the one before it ended."""
    for rank, noted in enumerate(run):
        begins, ended = noted.asked[number * outer.every], noted.ended[number * outer.every - 1]
        if not agree(begins, agreed):
            raise CheckFailed(f"rank {rank}, round {number + 1}: " + likeliest(
                (agree(begins, ended), "it begins where its own inner steps have ended: put what was agreed on back "
                 "into the parameter"),
                (True, "it does not begin at what was agreed on")))
