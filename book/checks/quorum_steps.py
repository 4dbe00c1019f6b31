"""L3, lab 12: steps with the replicas that are there: whose gradients count, what divides them, who is healed."""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from book.checks.verdict import CheckFailed, agree, dense, finite, likeliest, refuse, require, stands_still
from book.launch import LaunchError
from book.words import named


class Scripted(NamedTuple):
    """An attempt as it was meant: who takes part, who of them is new, and whose part in it fails, and where.

    `where` is "sum", if that member is killed before it gives its gradient; "summed", if when this has come to
    some; "agreed", if before the vote; "missed", if it lives, and the sum does not come to it. `fails` is None if
    all is well.
    """

    members: tuple[int, ...]
    new: tuple[int, ...] = ()
    fails: int | None = None
    where: str = ""


class State(NamedTuple):
    """What a replica holds: weights and momentum, both (n,), and its counters."""

    weights: Any
    momentum: Any
    step: Any
    num_batches: Any


class Tried(NamedTuple):
    """An attempt of one replica, as it was noted beside its code.

    `left` are the gradients that it began with. `asked` are its calls of `loss`: the batch, the weights and the right
    gradient. `given` is what it gave to each sum. `after` is None if it was killed.
    """

    before: State
    left: Any
    asked: Sequence[tuple[Any, Any, Any]]
    given: Sequence[Any]
    returned: Any
    after: State | None


class Rule(NamedTuple):
    """The optimizer's numbers, and how many replicas there are if none is lost."""

    lr: float
    momentum: float
    num_replicas: int


SIZE_OF_ALL = "divide by the members of this quorum, not by all replicas that there once were"


def same_call(said: Mapping[int, str], number: int) -> None:
    """All living members must make the same call next; `said` has each one's, "end" where its attempt has ended."""
    if len(set(said.values())) < 2:
        return
    where = f"attempt {number + 1}: "
    of = {call: [rank for rank, own in said.items() if own == call] for call in said.values()}
    if "agreed" in of and "end" in of:
        raise CheckFailed(f"{where}agreed is called by {named(of['agreed'])}, but not by "
                          f"{named(of['end'])}: the attempt ends there without a vote. Whoever finds that the sum is "
                          "not whole has to say so, by agreed(False), or those that have it whole never hear of it")
    if "copy" in of:
        others = [rank for rank in said if rank not in of["copy"]]
        raise CheckFailed(f"{where}copy is called by {named(of['copy'])}, but not by {named(others)}: if a "
                          "member is behind, all of them call it")
    raise CheckFailed(where + "the members make different calls: " + "; ".join(
        f"{'the attempt has ended on' if call == 'end' else f'{call} is called by'} {named(ranks)}"
        for call, ranks in sorted(of.items())))


def never_called(turn: Scripted, number: int) -> None:
    """Raise CheckFailed: the call in which a member should have been killed was never made."""
    raise CheckFailed(f"attempt {number + 1}: " + (
        "its members end it without a vote: commit only if quorum.agreed, asked after the sum, says so on all of them"
        if turn.where == "agreed" else "its members end it without quorum.sum: their gradients never meet"))


def quorum_failure(error: LaunchError) -> str:
    """The error of a launch of replicas, with a hint if they wait for one another."""
    if stands_still(error):
        return (f"{error}\na collective over the world, such as dist.barrier or dist.all_reduce, waits for replicas "
                "that are lost, and for the coordinator: talk to the members by quorum's methods alone")
    return str(error)


def trained_by_quorums(turns: Sequence[Scripted], notes: Mapping[int, Sequence[Tried | None]],
                       rule: Rule) -> np.ndarray:
    """Each attempt must commit the mean over its members, or nothing; returns the weights at the end, (n,).

    `notes[rank]` has the attempts of a replica, None where it took no part.
    """
    first = next(own[0] for own in notes.values() if own[0] is not None).before
    at = State(dense(first.weights), dense(first.momentum), first.step, first.num_batches)
    for number, turn in enumerate(turns):
        tried = {rank: note for rank in turn.members if (note := notes[rank][number]) is not None}
        for rank, note in tried.items():
            _gradient(f"attempt {number + 1}, rank {rank}: ", rank, note, turn, at, rule)
        if turn.fails is None:
            at = _committed(number, turn, tried, at, rule)
        else:
            _thrown_away(number, turn, tried, at)
        for rank, note in tried.items():
            if note.after is None:
                continue
            said, right = note.returned, turn.fails is None
            require(said is not None and bool(said) is right, f"attempt {number + 1}, rank {rank}: attempt returns "
                    f"{said!r}, but the step was {'committed' if right else 'not committed'}: return whether it was")
    return at.weights


def _gradient(where: str, rank: int, note: Tried, turn: Scripted, at: State, rule: Rule) -> None:
    """A member must ask for its batch once, at the weights that all have, and give this gradient to the sum."""
    require(len(note.asked) == 1, f"{where}replica.loss is called {len(note.asked)} times: each member takes one batch "
            "in each attempt" + ", with the replica that it was given" * (not note.asked))
    batch, weights, right = note.asked[0]
    new, size, place = rank in turn.new, len(turn.members), turn.members.index(rank)
    if not agree(weights, at.weights):
        raise CheckFailed(where + likeliest(
            (new and agree(weights, note.before.weights), "it has joined and trains on weights of its own: copy those "
             "of the source before its gradient counts"),
            (True, "its gradient is taken at other weights than the source has")))
    due = at.num_batches + place
    if batch != due:
        raise CheckFailed(f"{where}it takes batch {batch}, but batch {due} is due: " + likeliest(
            (new and batch == note.before.num_batches + place, "a replica that joins copies num_batches too, or it "
             "trains on batches that were done"),
            (batch == at.step * size + place, "step * members counts right only as long as no replica is lost: begin "
             "at num_batches"),
            (batch in (at.num_batches + rank, at.num_batches + rank - 1), "add its place among the members, not its "
             "rank: of those that are lost nobody takes the batch"),
            (True, "num_batches, and its place among the members")))
    given = [dense(one) for one in note.given]
    require(len(given) == 1, f"{where}quorum.sum is called {len(given)} times: once in each attempt is enough")
    if any(agree(given[0], dense(right) / count) for count in {1, size}):
        return
    raise CheckFailed(f"{where}what it gives to the sum is not the gradient of its batch: " + likeliest(
        (note.left is not None and agree(given[0], dense(note.left) + dense(right)), "that of the attempt before is "
         "still in it. Clear the gradients in each attempt, also after one that was thrown away"),
        (agree(given[0], dense(right) / rule.num_replicas), SIZE_OF_ALL),
        (True, "is it made by backward, and given whole?")))


def _committed(number: int, turn: Scripted, tried: Mapping[int, Tried], at: State, rule: Rule) -> State:
    """All members must have made the step of the mean; returns what they hold then."""
    gradients = {rank: dense(note.asked[0][2]) for rank, note in tried.items()}
    mean, size = np.mean(list(gradients.values()), axis=0), len(turn.members)
    momentum = rule.momentum * at.momentum + mean
    right = State(at.weights - rule.lr * momentum, momentum, at.step + 1, at.num_batches + size)
    for rank, note in tried.items():
        if note.after is None:
            continue
        where, new, after = f"attempt {number + 1}, rank {rank}: ", rank in turn.new, note.after
        refuse(agree(after.weights, at.weights) and agree(after.momentum, at.momentum, momentum),
               f"{where}all gradients have come, and the weights have not moved: call optimizer.step() if all agree")
        held = finite(rank, "the momentum", dense(after.momentum))
        _momentum(where, held, new, mean, gradients[rank], at, size, rule)
        require(agree(after.weights, right.weights), f"{where}the weights are not where the optimizer's step leads to: "
                "is it made once?")
        require(after.step == right.step, f"{where}step is {after.step}, but {right.step} steps are committed"
                + likeliest((new and after.step == note.before.step + 1, ": a replica that joins goes on at the "
                             "source's step"), (after.step == at.step, ": count the step that you commit")))
        require(after.num_batches == right.num_batches, f"{where}num_batches is {after.num_batches}, but "
                f"{right.num_batches} batches are committed" + likeliest(
                    (after.num_batches == at.num_batches + rule.num_replicas, ": a lost replica has taken none"),
                    (after.num_batches == at.num_batches, ": those of a committed step count"),
                    (after.num_batches == at.num_batches + 1, ": count those of all members")))
    return right


def _momentum(where: str, got: np.ndarray, new: bool, mean: np.ndarray, own: np.ndarray, at: State, size: int,
              rule: Rule) -> None:
    """The optimizer's memory after a step tells with which gradient the step was made."""
    kept = rule.momentum * at.momentum
    if agree(got, kept + mean):
        return
    raise CheckFailed(where + likeliest(
        (new and agree(got, mean), "it has joined with an optimizer that remembers nothing: copy its state too"),
        (size < rule.num_replicas and agree(got, kept + mean * size / rule.num_replicas),
         f"the sum of {size} gradients is divided by {rule.num_replicas}: {SIZE_OF_ALL}"),
        (agree(got, kept + mean * size), "its step is that of the sum: divide by the number of members"),
        (agree(got, kept + mean / size), "the sum is divided twice"),
        (agree(got, kept + own), "its step is that of its own gradient, not of the mean. The sum is put into "
         "the tensors that were given: are these each p.grad?"),
        (True, "its step is not that of the mean of the members' gradients")))


def _thrown_away(number: int, turn: Scripted, tried: Mapping[int, Tried], at: State) -> None:
    """An attempt that has failed on a member must leave all as they were."""
    after = {rank: note.after for rank, note in tried.items() if note.after is not None}
    missed = turn.where == "missed"
    where = f"attempt {number + 1}: " + (f"the sum does not come to rank {turn.fails}" if missed else
                                         f"rank {turn.fails} is lost")
    moved = [rank for rank, state in after.items()
             if not (agree(state.weights, at.weights) and agree(state.momentum, at.momentum, at.weights))]
    still = [rank for rank in after if rank not in moved]
    refuse(moved and not any(tried[rank].returned for rank in moved),
           f"{where}. The attempt returns False on {named(moved)}, but the weights or the momentum have changed: "
           "vote first, and call optimizer.step() only if all agree")
    refuse(moved and still, f"{where}. The step is made by {named(moved)}, and not by {named(still)}: from "
           "now on their weights differ. Commit only if quorum.agreed says so, and ask it after the sum")
    refuse(moved and missed, f"{where}, and all make the step: tell quorum.agreed what quorum.sum has returned")
    refuse(moved, f"{where}, and the others make a step nevertheless, of the gradients that have come: throw the "
           "attempt away as a whole, and the next one is made by those who are there")
    for rank, state in after.items():
        require((state.step, state.num_batches) == (at.step, at.num_batches), f"{where}. The attempt is thrown away, "
                f"and rank {rank} counts it: step is {state.step} and num_batches {state.num_batches}, but {at.step} "
                f"and {at.num_batches} are committed")
