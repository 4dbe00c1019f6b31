"""L3, lab 6: in which order the ranks of a pipeline ran, what they kept meanwhile, how much of the time they were idle.

Orders are those that were recorded (see `book.replay.pipeline_order`).
"""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any

from book.checks.formula import Formula
from book.checks.verdict import CheckFailed, refuse, require, short
from book.cost import pipeline_bubble
from book.pipelines import one_f_one_b
from book.replay import bubble, pipeline_order
from book.schedule import Action, PipelineSchedule, ScheduleError
from book.simulate import simulate_pipeline
from book.trace import Trace, parting
from book.words import counted


def gpipe_order(trace: Trace, num_stages: int, num_micro_batches: int) -> PipelineSchedule:
    """Every rank must have run all its forwards before its first backward. Returns the recorded order."""
    order = _complete(trace, num_stages, num_micro_batches)
    for rank in range(num_stages):
        for action in order.of_rank(rank)[_warm_up(order, rank):]:
            refuse(action.kind == "F", f"rank {rank} runs {action} after its first backward, but GPipe runs all "
                   "forwards first")
    return order


def one_f_one_b_order(trace: Trace, num_stages: int, num_micro_batches: int) -> PipelineSchedule:
    """Every rank must have run the order of 1F1B. Returns it."""
    order, wanted = _complete(trace, num_stages, num_micro_batches), one_f_one_b(num_stages, num_micro_batches)
    warm_ups, right = ([_warm_up(one, rank) for rank in range(num_stages)] for one in (order, wanted))
    refuse(set(warm_ups) == {num_micro_batches} != set(right), "this is GPipe: every rank runs "
           f"all {num_micro_batches} forwards before its first backward and keeps all their activations")
    for rank, (got, want) in enumerate(zip(warm_ups, right)):
        if got < want:
            share, best = (short(bubble(simulate_pipeline(one, 1.0, 2.0)).share) for one in (order, wanted))
            raise CheckFailed(f"rank {rank} starts its first backward after {counted(got, 'forward')}, but in "
                              f"1F1B after {want}: your ranks are idle {share} of the time, in 1F1B {best}")
        require(got == want, f"rank {rank} starts its first backward after {got} forwards, but in 1F1B after {want}: "
                "more forwards keep more activations and save no time")
    for rank in range(num_stages):
        actions, due = order.of_rank(rank), wanted.of_rank(rank)
        place = parting(actions, due)
        if place is not None:
            raise CheckFailed(f"rank {rank}'s action {place + 1} is {actions[place]}, but in 1F1B it is {due[place]}: "
                              "after the warm-up, forwards and backwards alternate, each in the order of the "
                              "micro-batches")
    return order


def activations_kept(peaks: Sequence[float], order: PipelineSchedule) -> float:
    """The most that ranks kept, in micro-batches, must be what the order has in flight. Returns the sum of `peaks`."""
    for rank, (got, want) in enumerate(zip(peaks, order.peak_in_flight())):
        require(got <= want + 0.01, f"rank {rank} has the right order, but keeps the activations of {short(got)} "
                f"micro-batches while only {want} are in flight: what is kept after its backward (retain_graph, a "
                "reference to the graph)?")
    return float(sum(peaks))


def bubble_share(got: Any, trace: Trace) -> float:
    """`got` must be the idle share of the ranks' time in a trace of one pipeline step. Returns it."""
    found, events = bubble(trace), [event.times_s for event in trace.events if event.end_s is not None]
    step_s, idle_s, busy_s, num_ranks = found.step_s, sum(found.idle_s), sum(found.busy_s), len(found.busy_s)
    all_s = sum(end_s - start_s for start_s, end_s in events)
    work = [[event.times_s for event in trace.of_kind("compute") if event.rank == rank] for rank in range(num_ranks)]
    spans_s = [max(end_s for _, end_s in own) - min(start_s for start_s, _ in own) for own in work]
    own_shares = [1 - own_s / span_s for own_s, span_s in zip(found.busy_s, spans_s)]
    own_spans = ("you count each rank's time from its own first action to its own last, but waiting before and after "
                 "belongs to the bubble too: count the whole step for every rank")
    formula = Formula(found.share, [
        (1 - found.share, "it is the busy share, but the idle share is asked for"),
        (idle_s / busy_s, "it is the idle time divided by the busy time: divide by all of the time"),
        (1 - busy_s / step_s, "you divide the time of all ranks by that of one: each rank has a whole step"),
        (idle_s, "it is in seconds: divide by the time that all ranks have together"),
        (1 - busy_s / sum(spans_s), own_spans), (sum(own_shares) / num_ranks, own_spans),
        (found.idle_s[0] / step_s, "it is one rank's idle share: count the time of all ranks"),
        (found.idle_s[-1] / step_s, "it is the last rank's idle share: count the time of all ranks"),
        (found.share * num_ranks, "it is the sum of the ranks' shares: divide by the number of ranks"),
        (1 - busy_s / (max(end_s for _, end_s in events) * num_ranks),
         "you count the step from 0 s, but it begins when the first action does"),
        (1 - all_s / (step_s * num_ranks),
         "you count messages as work, but a rank that sends or waits for one computes nothing")])
    return formula.require_right("the bubble", got)


def peaks_in_flight(got: Any, schedule: PipelineSchedule) -> list[int]:
    """`got` must say, for each rank, the most micro-batches that wait for their backward. Returns it as a list."""
    wanted = schedule.peak_in_flight()
    peaks = _whole_numbers("peak_in_flight", got, len(wanted))
    for rank, (own, want) in enumerate(zip(peaks, wanted)):
        num_forwards = sum(action.kind == "F" for action in schedule.of_rank(rank))
        formula = Formula(want, [
            (want - 1, "take the highest count right after a forward, before the next backward frees anything"),
            (_num_distinct(schedule.of_rank(rank)), "a micro-batch that waits on two stages of the rank counts twice: "
             "keep its stage with its number"),
            (0, "it is the count at the end: keep the highest count on the way"),
            (num_forwards, "it counts all forwards, but a backward frees what its forward kept")])
        why = formula.explain(own, "add one for a forward, take one away for a backward, keep the highest")
        require(own == want,
                f"peak_in_flight returns {own} for rank {rank} of {schedule.name}, but it is {want}: {why}")
    return peaks


def _num_distinct(actions: Sequence[Action]) -> int:
    """The most micro-batches that wait at once; one that waits on two stages counts once, until its first backward."""
    waiting: set[int] = set()
    peak = 0
    for action in actions:
        if action.kind == "F":
            waiting.add(action.micro_batch)
        else:
            waiting.discard(action.micro_batch)
        peak = max(peak, len(waiting))
    return peak


def predicted_pipeline(got: Any, num_stages: int, num_micro_batches: int) -> float:
    """`got` must have the "bubble" of GPipe and 1F1B, and by rank the peaks of "gpipe" and "one_f_one_b".

    Returns the bubble.
    """
    p, m = num_stages, num_micro_batches
    size = f"of {counted(p, 'stage')} and {counted(m, 'micro-batch')}"
    require(isinstance(got, Mapping) and not {"bubble", "gpipe", "one_f_one_b"} - set(got),
            'predicted must return a dict with "bubble", "gpipe" and "one_f_one_b"')
    formula = Formula(pipeline_bubble(p, m), [
        ((p - 1) / m, "it is the idle time divided by the ideal time, as in many papers: divide by the whole step"),
        (p / (m + p), "it counts p idle slots, but only p - 1 have passed when the last stage begins"),
        (m / (m + p - 1), "it is the busy share"),
        ((p - 1) / (m + p), "the step lasts M + p - 1 slots of a forward and a backward")])
    share = formula.require_right(f"the bubble {size}", got["bubble"])
    for name, wanted, why in (("gpipe", [m] * p, "GPipe keeps every micro-batch until the backwards begin"),
                              ("one_f_one_b", [min(m, p - s) for s in range(p)],
                               "1F1B has as many in flight as there are stages from this one on, or all micro-batches "
                               "if these are fewer")):
        peaks = _whole_numbers(f'"{name}"', got[name], p)
        require(peaks == wanted, f'"{name}" {size} is {peaks}, it should be {wanted}: {why}')
    return share


def where_stuck(trace: Trace | None, num_stages: int, num_micro_batches: int) -> str:
    """Where the ranks of a run that hung departed from the order of 1F1B, in words.

    A rank that begins an action leaves an event with the `op` "begin F" or "begin B".
    """
    if trace is None:
        return ""
    said = []
    for rank in range(num_stages):
        events = [((event.op or "").removeprefix("begin "), event.micro_batch, event.op)
                  for event in trace.of_rank(rank) if event.kind == "compute"]
        begun = [(kind, m) for kind, m, op in events if op != kind]
        done = [(kind, m) for kind, m, op in events if op == kind]
        wanted = [(a.kind, a.micro_batch) for a in one_f_one_b(num_stages, num_micro_batches).of_rank(rank)]
        place = parting(begun, wanted)
        if place is None or place == len(wanted):
            continue
        if place < len(begun):
            waits = place == len(begun) - 1 and begun[place] not in done
            said.append("rank {} {} {}{}, action {} of its {}, which in 1F1B is {}{}".format(
                rank, "stands at" if waits else "runs", *begun[place], place + 1, len(wanted), *wanted[place]))
        elif begun and begun[-1] in done:
            said.append(f"rank {rank} ends after {len(begun)} of its {len(wanted)} actions")
    return "; ".join(said)


def _complete(trace: Trace, num_stages: int, num_micro_batches: int) -> PipelineSchedule:
    """The recorded order, in which every stage must have run every micro-batch forward and backward, once."""
    try:
        order = pipeline_order(trace)
        again = pipeline_order(trace, step=1) if _repeats(trace) else None
    except ValueError as error:
        raise CheckFailed("no forward or backward was recorded: call stage.forward(m) and stage.backward(m)") from error
    for action in again.actions if again is not None else ():
        raise CheckFailed(f"rank {action.rank} runs {action} twice, but each micro-batch must go through once")
    try:
        return PipelineSchedule(order.name, num_stages, num_micro_batches, order.actions, num_stages).check()
    except ScheduleError as error:
        raise CheckFailed(f"the recorded order is not complete: {error}") from error


def _repeats(trace: Trace) -> bool:
    ran = [(e.rank, e.stage, e.micro_batch, e.op) for e in trace.of_kind("compute") if e.op in ("F", "B")]
    return len(set(ran)) < len(ran)


def _warm_up(order: PipelineSchedule, rank: int) -> int:
    """How many forwards a rank runs before its first backward."""
    return [action.kind for action in order.of_rank(rank)].index("B")


def _whole_numbers(name: str, got: Any, length: int) -> list[int]:
    """`got` as a list of `length` whole numbers, one for each rank."""
    values = got.tolist() if hasattr(got, "tolist") else got
    require(isinstance(values, Sequence) and not isinstance(values, str) and len(values) == length,
            f"{name} must be a list with a number for each of {length} ranks, not {got!r}")
    require(all(isinstance(value, Real) and not isinstance(value, bool) and float(value).is_integer()
                for value in values), f"{name} must hold whole numbers, not {values!r}")
    return [int(value) for value in values]
