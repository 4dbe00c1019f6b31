"""L3, lab 15: a parameter server over RPC: what it answers and when, which pushes its steps are made of.

Gradients and parameters are flat, (n,). W workers push; pushes of a round are numbered from 1 in the order of arrival.
"""
from __future__ import annotations

import re
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from book.checks.attribution import Attribution
from book.checks.verdict import CheckFailed, agree, flat, held, likeliest, magnitude, refuse, require, stands_still
from book.launch import HangError, LaunchError
from book.tap.place import is_learners, outwards
from book.waiting.hang import Standing
from book.words import joined, listed

STEP = {  # the step of a synchronous round
    "nothing": "round {round}: the last push has come, but the parameters have not changed: make the step before you "
               "answer",
    "sum": "round {round}: the step goes along the sum of the {size} gradients, so {size} times too far: with equal "
           "shares the batch's gradient is their mean",
    "other": "round {round}: the step uses only worker {other}'s gradient: keep each push until the round is full",
    "missing ranks": "round {round}: the gradient of worker {absent} has no part in the step: is every push kept until "
                     "the round is full?",
    "alike": "round {round}: every gradient weighs {highest}, but they should weigh {shares}: weight each by its "
             "worker's share of the examples",
    "scaled": "round {round}: the step is {times} times what it should be: make it once, lr times the mean of this "
              "round's gradients",
    "unequal": "round {round}: the gradients weigh {weights} in the step, but should weigh {shares}",
    "unknown": "round {round}: the step is not a sum of this round's gradients: does it contain one of an earlier "
               "round? Clear what was pushed when the step is made"}
APPLIED = {  # one push at an asynchronous server
    "nothing": "the push of worker {worker} is not applied at once. Only its answer may have to wait",
    "scaled": "the push of worker {worker} moves the parameters {times} times as far as it should: subtract lr times "
              "the whole gradient, once",
    "unknown": "the push of worker {worker} does not move the parameters along its gradient: is an earlier push "
               "applied with it?"}
LATE = {  # one push at a server that divides by staleness
    "nothing": "push {number} has not moved the parameters: a late gradient counts less, but is not dropped",
    "one too many": "push {number} has staleness {staleness}, but its step is divided by one more: a gradient of "
                    "staleness 0 or 1 is taken whole",
    "whole": "push {number} has staleness {staleness} but is taken whole: divide its step by its staleness",
    "multiplied": "push {number} has staleness {staleness}, and its step is multiplied by it: divide instead",
    "uphill": "push {number} moves the parameters along its gradient, but it should move them against it",
    "scaled": "push {number} has staleness {staleness}, and its step is {times} times what it should be: divide lr by "
              "the staleness, where lr is what the server was given",
    "unknown": "push {number} does not move the parameters along its gradient: only the length of the step changes"}
PUSHES = {  # what all pushes together have done
    "nothing": "no push has changed the parameters: does push write what work returned, before it returns?",
    "missing ranks": "{num_lost} of {size} simultaneous pushes left no trace in the parameters. {why}",
    "scaled": "the pushes have moved the parameters {times} times as far as they should: each is applied once, whole",
    "unequal": "the pushes weigh {weights} in the parameters, but each should weigh 1: apply each once. {why}",
    "unknown": "the change of the parameters is not a sum of the pushes. {why}"}
UNSEEN = ("push must go through read, work and write, and hold self.lock meanwhile: the parameters are changed past "
          "these, and without the lock, so two pushes at the same time may lose one")
Notes = Sequence[str]  # what one push did, in order: made, acquire, read, work, write, release


# A synchronous round

def is_future(answer: Any) -> None:
    """`push_and_pull` must return a future, which frees its thread; the answer is sent once the future is set."""
    refuse(answer is None, "push_and_pull returned None: return a future that you set when the round is full")
    require(hasattr(answer, "done") and hasattr(answer, "then"),
            f"push_and_pull returned a {type(answer).__name__}, but at that moment nobody knows the new parameters: "
            "return a torch.futures.Future, and set its result later")


def give_up(push: Any) -> None:
    """Stop waiting for what a push returns: it has been in its method for seconds."""
    with suppress(RuntimeError):  # it is answered at this moment
        push.set_exception(CheckFailed("the server stands still: a thread that waits inside a method serves nobody "
                                       "else. push_and_pull has not returned after some seconds: return a future at "
                                       "once, and set its result when the worker may go on"))


def answered_together(done: Sequence[bool], num_workers: int, number: int) -> None:
    """All pushes of round `number` must be answered when its last one comes; `done` is about those that came so far."""
    come = len(done)
    if come < num_workers:
        for push in np.flatnonzero(done):
            raise CheckFailed(f"round {number}: push {push + 1} is answered when only {come} of {num_workers} pushes "
                              "have come: its answer must wait for the last one" + ("" if number == 1 else
                              ", whichever worker sends it. When a round is full, do you make a new future, clear what "
                              "was pushed, and start the count again?"))
    waiting = [push + 1 for push, known in enumerate(done) if not known]
    have = f"push {listed(waiting)} has" if len(waiting) < 2 else f"pushes {joined(waiting)} have"
    require(come < num_workers or not waiting, f"round {number}: all {num_workers} pushes have come, but {have} no "
            "answer: answer all pushes of the round when the last one comes")


def not_moved_yet(before: Any, after: Any, come: int, num_workers: int, number: int) -> None:
    """Until the last push of a round the parameters must stay as they were."""
    require(agree(after, before), f"round {number}: the parameters have moved when only {come} of {num_workers} pushes "
            "have come: make one step per round, along the mean of all gradients, not one for each push")


def round_step(before: Any, after: Any, gradients: Sequence[Any], lr: float, number: int,
               weights: Sequence[float] | None = None) -> float:
    """One step along the mean of a round's gradients, (W, n) by worker, or with other weights that add up to 1.

    Returns the sum of the absolute values of the parameters after it.
    """
    shares = np.full(len(gradients), 1 / len(gradients)) if weights is None else np.asarray(weights)
    moved = flat(before) - flat(after)
    refuse(len(moved) > 1 and moved.any() and np.ptp(moved) <= 1e-9 * np.abs(moved).max(), f"round {number}: the step "
           "is the same for all elements of the parameter: take the mean over the workers for each element, not the "
           "mean of all elements")
    found = Attribution(moved / lr, np.stack([flat(g) for g in gradients]), shares)
    found.require_right(STEP, round=number, shares=listed(f"{share:.3g}" for share in shares))
    return magnitude(after)


def same_answers(answers: Sequence[Any], after: Any, number: int) -> None:
    """Every worker must be given the parameters as they are after the step; `answers` is by worker."""
    for worker, answer in enumerate(answers):
        got = held(worker + 1, "the answer", answer, np.shape(after))
        require(agree(got, after), f"round {number}: worker {worker} gets parameters that differ from the server's "
                "after the step: set the result when the step is made")


def answer_kept(given: Any, now: Any) -> None:
    """An answer must stay as it was given when later pushes change the parameters."""
    require(agree(now, given), "an answer changed after it was given: it is the live parameter, which the next step "
            "changes in place, perhaps while it is being sent. Return a copy")


def next_round_waits(done: bool | None) -> None:
    """A push that comes as soon as the round is answered must not be answered itself; `done` is None if none came."""
    refuse(done, "a push that comes as soon as the round is answered gets its answer at once, with parameters that do "
           "not contain it: put the new future in place before you set the old one's result")


def _calls_itself(standing: Standing) -> bool:
    """Whether all of a rank's threads for calls run one, and there it calls itself."""
    worker = standing.worker
    return worker is not None and len(worker.calls) >= max(1, worker.num_threads) and all(
        call.doing.worker == worker.name for call in worker.calls)


def server_failure(error: LaunchError) -> str:
    """The error of ranks that talk to a server: a check's own sentence, or an explanation if torch has none."""
    message = str(error)
    said = re.search(r"CheckFailed: ([^\n]+)", message)  # over RPC, errors come as text
    own_call = isinstance(error, HangError) and any(map(_calls_itself, error.hang.ranks))
    return said[1] if said else likeliest(
        ("ZeroDivisionError" in message, "the step is divided by a staleness of 0: a gradient that is not stale takes "
         f"the whole of lr\n{message}"),
        (own_call, "a server calls itself and waits for the answer, but the only thread that could give it is the one "
         f"that waits.\n{message}"),
        (stands_still(error), "the server stands still: a thread that waits inside a method serves nobody "
         f"else, and the call that it waits for needs a thread, or a lock, too.\n{message}"),
        (bool(re.search(r"Error on Node \d+: *(\n|$)", message)), "lookup returned None: return the future\n"
         f"{message}"),
        ("must return a torch.futures.Future" in message or "object has no attribute '_fut'" in message,
         "a method under @rpc.functions.async_execution returned something other than a torch.futures.Future: return "
         f"the future itself, and do not wait for it\n{message}"),
        ("mark a completed Future" in message,
         f"an answer is given twice: drop a push's future when you have set its result.\n{message}"),
        ("Future to a torch" in message, "what `then` and `collect_all` pass on are futures: get each one's rows with "
         f"its value().\n{message}"),
        ("shape mismatch" in message, "the rows of one call are put in the places of another call's keys: a server "
         f"that has none of the rows gets no call, so keep no places for it.\n{message}"),
        ("destination dtypes match" in message, "the rows are float64, but the tensor that you put them in is not: "
         f"make it float64 too.\n{message}"),
        ("pickle" in message and "Future" in message, "the server sends the Future itself, which can't be sent. Put "
         "@rpc.functions.async_execution above the method, so that RPC sends the result once it is set; and turn a "
         "future of futures into a future of their values, with `then`"),
        (True, message))


# Bounded staleness

def applied_at_once(before: Any, after: Any, gradient: Any, lr: float, worker: int) -> None:
    """A push must move the parameters by lr times its gradient, the moment it comes."""
    found = Attribution((flat(before) - flat(after)) / lr, flat(gradient)[None])
    found.require_right(APPLIED, worker=worker)


def held_back(waiting: Sequence[int], given: Sequence[int], steps: Sequence[int], bound: int, pushed: int) -> None:
    """After a push of worker `pushed`, those more than `bound` steps ahead of the slowest must wait, and nobody else.

    `waiting` have no answer, `given` got theirs by this push; `steps` is by worker.
    """
    ahead = [own - min(steps) for own in steps]
    for worker in given:
        require(ahead[worker] <= bound, f"worker {worker} is {ahead[worker]} steps ahead of the slowest, more than the "
                f"bound of {bound}, but it has its answer: hold it back"
                + ". A worker that has not pushed yet is the slowest, with 0 steps" * (min(steps) == 0))
    for worker in sorted(waiting, key=lambda other: other != pushed):
        if ahead[worker] > bound:
            continue
        refuse(worker == pushed, f"worker {worker} is {ahead[worker]} steps ahead of the slowest, the bound is "
               f"{bound}, but it has no answer: a worker that is at most bound steps ahead goes on. Count the push "
               "before you look for the slowest")
        refuse(set(given) - {pushed}, f"worker {worker} was held and is now {ahead[worker]} steps ahead, with the "
               f"bound {bound}; others were answered by this push, so check all held workers, not just one")
        raise CheckFailed(f"worker {worker} was held, is now {ahead[worker]} steps ahead, with the bound {bound}, but "
                          "no held worker was answered: a push of the slowest worker must answer those who may go on")


def newest_given(answers: Sequence[Any], after: Any, pushed: int) -> None:
    """All answers that a push of worker `pushed` brings must hold the parameters after it."""
    for answer in answers:
        got = held(pushed + 1, "an answer", answer, np.shape(after))
        require(agree(got, after), f"an answer that worker {pushed}'s push triggered holds older parameters: a held "
                "worker must get the parameters as they are when it goes on")


# Late gradients

def late_push(answer: Any, staleness: int, number: int, before: Any, after: Any, gradient: Any, lr: float) -> None:
    """Push `number`, from 0, must return its staleness, and have moved the parameters by lr / max(1, staleness)."""
    require(isinstance(answer, tuple) and len(answer) == 3, "push_and_pull must return three values: the staleness, "
            "the new version and the new parameters")
    wrong = f"push {number} has staleness {staleness}, but yours is {answer[0]}: "
    refuse(number == 0 and answer[0] == 1, wrong + "a push does not make itself stale, so count before you increase "
           "the version")
    require(answer[0] == staleness, wrong + "it is the number of pushes applied between its worker's pull and itself: "
            "the server's version minus the one that the gradient was computed for")
    require(answer[1] == number + 1, f"after push {number} the version is {answer[1]}, but it should be {number + 1}: "
            "it grows by one with each push")
    found = Attribution((flat(before) - flat(after)) / lr, flat(gradient)[None], 1 / max(1, staleness))
    mistakes = {"whole": 1.0, "multiplied": staleness, "uphill": -1 / max(1, staleness)}
    if number < 3:  # a later step may be divided by what earlier pushes left
        mistakes["one too many"] = 1 / (staleness + 1)
    found.require_right(LATE, mistakes, number=number, staleness=staleness)


def of_one_moment(answers: Sequence[Any], states: Mapping[int, Sequence[Any]]) -> None:
    """Each answer's version and parameters must belong together; `states` are what parameters a version may have."""
    for _, version, parameters in answers:
        require(any(agree(parameters, each) for each in states.get(int(version), ())), f"an answer says version "
                f"{version}, but the parameters that come with it are another version's: read both under the same lock")


# Servers that ask each other

def looked_up(got: Any, table: Any, keys: Sequence[int], place: int, num_servers: int) -> float:
    """A lookup at server `place`, on rank place + 1, must give the rows of `table`, (n,), with these keys, in order.

    Returns their sum.
    """
    values, want = held(place + 1, "the lookup's answer", got, (len(keys),)), flat(table)[list(keys)]
    by_server = sorted(range(len(keys)), key=lambda i: keys[i] % num_servers)
    refuse(not agree(values, want) and agree(values, want[by_server]), "the rows come server by server: put each at "
           "the places where its key stands in keys")
    refuse(not agree(values, want) and agree(np.sort(values), np.sort(want)), "the rows are the right ones, but not in "
           "the order of keys")
    if not agree(values, want):
        raise CheckFailed(f"a lookup of the keys {listed(keys)} returns rows that differ from the table's"
                          f"{_why_not_rows(values, want, flat(table), keys)}")
    return float(want.sum())


def _why_not_rows(values: np.ndarray, want: np.ndarray, table: np.ndarray, keys: Sequence[int]) -> str:
    """What is likely if these are not the rows (K,) with these keys; begins with a colon, or is empty."""
    wrong = [i for i in range(len(keys)) if not agree(values[i], want[i])]
    right = {keys[i] for i in set(range(len(keys))) - set(wrong)}
    strange = not np.isclose(values[wrong][:, None], table, rtol=1e-5).any()
    return likeliest(
        (all(keys[i] in right for i in wrong), f": key {keys[wrong[0]]} comes more than once, and you fill only one of "
         "its places"),
        (strange, f": nothing has been put at place {listed(wrong)} of the answer. Answer when all calls are done. And "
         "a function that is made in a loop sees the loop's last `here`, unless that is a default argument, here=here"))


def asked_once(calls: Sequence[Sequence[Sequence[int]]], keys: Sequence[int]) -> None:
    """A lookup must ask each server at most once, for rows that it has; `calls` has the keys asked for, by server."""
    for server, own in enumerate(calls):
        refuse(len(own) > 1, f"one lookup asks server {server} {len(own)} times: send it all of its keys in one call")
        refuse(own and not own[0], f"a lookup of the keys {listed(keys)} asks server {server} for no rows at all: "
               "don't call it")


# Two threads, one parameter

def no_lost_update(before: Any, after: Any, gradients: Sequence[Any], lr: float, pushes: Sequence[Notes],
                   made: int = 0) -> float:
    """Every worker's push must be in the parameters, once; `pushes` are what each of them did.

    `made` counts the locks that the server's own constructor made. Returns the sum of the parameters' absolute values.
    """
    found = Attribution((flat(before) - flat(after)) / lr, np.stack([flat(g) for g in gradients]))
    found.require_right(PUSHES, why=_why_lost(pushes, made, len(gradients)), num_lost=len(found.absent_from()))
    refuse(_unseen(pushes, len(gradients)), UNSEEN)
    return magnitude(after)


def _unseen(pushes: Sequence[Notes], num_workers: int) -> bool:
    """Whether a push goes past `read` or `write` where no push takes the server's lock either.

    Nothing made such pushes meet, so that none was lost says nothing. A thread may serve several of them.
    """
    seen = [sum(push.count(name) for push in pushes) for name in ("read", "write")]
    return min(seen) < num_workers and not any("acquire" in push for push in pushes)


def _why_lost(pushes: Sequence[Notes], made: int, num_workers: int) -> str:
    """The likeliest reason why pushes are lost, from what each of them did."""
    notes = next((push for push in pushes if "read" in push), [])
    taken = [notes[:place].count("acquire") - notes[:place].count("release") > 0 for place in range(len(notes))]
    inside = {name for name in ("read", "write") if name in notes and taken[notes.index(name)]}
    between = notes[notes.index("read"):notes.index("write")] if {"read", "write"} <= {*notes} else []
    locked = {"acquire" in push for push in pushes if "read" in push}
    return likeliest(
        (_unseen(pushes, num_workers) and not taken, UNSEEN[0].upper() + UNSEEN[1:]),
        (locked == {True, False}, "One push takes self.lock while another reads and writes without it: a push that "
         "finds the lock taken must wait for it, as `with self.lock:` does"),
        (sum("read" in push for push in pushes) < num_workers, "Not every push has read the parameters: a push that "
         "finds the lock taken must wait for it, not give up"),
        ("acquire" not in notes and "made" in notes, "Each push makes its own lock, so no other push waits for it: all "
         "must take the same one"),
        ("acquire" not in notes and made, "The server has several locks, and no push takes self.lock: a push that "
         "holds another lock does not wait"),
        ("acquire" not in notes, "No push takes self.lock, so both have read before either writes"),
        ("read" not in inside, "The lock is taken after the read, so what was read may be old by then: take it before"),
        ("write" not in inside, "The lock is released before the write, so another push reads the old parameters in "
         "between"),
        ("release" in between, "The lock is released between the read and the write: hold it from the read to the "
         "write"),
        (True, "Does every push write, once, exactly what work returned for what it has just read?"))


def asked_by_learner() -> bool:
    """Whether the caller was called by the learner's code, and not by a library that needs a lock for itself.

    A Semaphore or a Condition makes a lock too: then what matters is which code made it.
    """
    frame = next((each for each in outwards(sys._getframe(2)) if each.f_code.co_filename != threading.__file__), None)
    return frame is not None and is_learners(frame.f_code.co_filename)


def lock_given_back(notes: Notes, raised: bool) -> None:
    """A push that fails must raise at its worker, and must not keep the lock."""
    require(raised, "a gradient of the wrong shape was pushed, but its worker got no error: don't catch it")
    require(notes.count("acquire") <= notes.count("release"), "a push that raised still holds the lock, so no push "
            "will ever be served again: `with self.lock:` releases it in any case")
