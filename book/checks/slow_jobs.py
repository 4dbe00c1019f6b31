"""L3: lab 13: who is late, which communication nothing hides, what a step should take, what is wrong with a job."""
from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from book.checks.formula import Formula
from book.checks.verdict import SIX_DIGITS, CheckFailed, refuse, require, reworded, short
from book.look.arrivals import FOCUS, SHARE
from book.look.spans import common, length, union

Arrivals = Sequence[Sequence[float]]  # of each collective when each rank came, in seconds
Span = tuple[float, float]
TOLERANCE = 1e-6


def lost_seconds(got: Any, arrivals: Arrivals, case: str) -> list[float]:
    """`got` must hold, for each rank, how long all others had come and waited for it alone; returns it."""
    num_ranks = len(arrivals[0])
    require(isinstance(got, (list, tuple)), f"{case}: return a list of seconds, one for each rank, not "
            f"{type(got).__name__}")
    require(len(got) == num_ranks, f"{case}: there are {num_ranks} ranks, and you return {len(got)} numbers"
            + (". So many collectives there are: arrivals[c] is a collective, and has a moment for each rank"
               if len(got) == len(arrivals) else ""))
    try:
        found = [float(value) for value in got]
    except (TypeError, ValueError):
        raise CheckFailed(f"{case}: return a number of seconds for each rank, not {got!r}") from None
    formula = Formula(_lost(arrivals, lambda row: row[-1] - row[-2]), [
        (_lost(arrivals, lambda row: row[-1] - row[0]),
         "you take how long the *first* rank waits. Until the last but one has come, the last is not alone to "
         "blame: if it had been faster, all would still have waited for that one"),
        (_lost(arrivals, lambda row: row[-1] - sum(row) / len(row)),
         "you take how far the last rank is behind the mean. What all would gain is its distance from the last but "
         "one"),
        (_lost(arrivals, lambda row: row[-1] - row[-2], last=-2), "you charge the last but one. All wait for the last"),
        (_lost(arrivals, lambda row: 1.0), "these are numbers of times. A rank that is last by a hair each time costs "
         "nothing: add up seconds"),
        (_waits(arrivals), "this is how long each rank itself *waits*. Who waits longest is a victim: the late rank "
         "waits least"),
        (_lost(arrivals, lambda row: row[-1] - row[-2], last=0), "you charge the rank that came first. Nobody waits "
         "for that one: all wait for the last"),
        (_lost(arrivals, lambda row: row[1] - row[0], last=0), "you look at who came first. Nobody waits for that one: "
         "all wait for the last"),
        ([one / len(arrivals) for one in _lost(arrivals, lambda row: row[-1] - row[-2])],
         "this is the mean over the collectives: add up the seconds of the whole job"),
    ], near=_near_all)
    if formula.is_right(found):
        return found
    six_digits = SIX_DIGITS * np.abs(arrivals).max()
    refuse(np.allclose(found, formula.want, rtol=0, atol=six_digits), f"{case}: this is right to only six digits: "
           "are the moments float32 on the way? By a clock that counts for days, float32 is milliseconds off: use "
           "Python's floats, or torch.float64")
    raise CheckFailed(f"{case}: " + formula.explain(found, f"rank {_first_difference(found, formula.want)} is charged "
                      f"with {short(found[_first_difference(found, formula.want)])} s, but the others waited for it "
                      f"alone for {short(formula.want[_first_difference(found, formula.want)])} s"))


def _lost(arrivals: Arrivals, seconds: Callable[[Sequence[float]], float], last: int = -1) -> list[float]:
    """Of each rank the sum of seconds(sorted arrivals) over the collectives to which it came last (or first)."""
    lost = [0.0] * len(arrivals[0])
    for row in arrivals:
        order = sorted(range(len(row)), key=lambda rank: row[rank])
        lost[order[last]] += seconds(sorted(row))
    return lost


def _waits(arrivals: Arrivals) -> list[float]:
    rows = np.asarray(arrivals, float)
    return [float(seconds) for seconds in (rows.max(axis=1, keepdims=True) - rows).sum(axis=0)]


def _near_all(got: Sequence[float], want: Sequence[float]) -> bool:
    return bool(np.allclose(got, want, rtol=1e-6, atol=1e-9))


def _first_difference(got: Sequence[float], want: Sequence[float]) -> int:
    return next((place for place, (a, b) in enumerate(zip(got, want)) if not np.isclose(a, b, rtol=1e-6, atol=1e-9)), 0)


def unchanged(answer: Callable[..., Any], *arguments: Any) -> Any:
    """What an answer returns for these arguments, of which it gets a copy; CheckFailed if it changes that."""
    given = copy.deepcopy(arguments)
    got = answer(*given)
    refuse(repr(given) != repr(arguments), "your function changes its arguments, and who calls it may still need them: "
           "work on a copy, as sorted(row) makes one and row.sort() doesn't")
    return got


def late_rank(got: Any, arrivals: Arrivals, wall_s: float, case: str) -> int | None:
    """`got` must be the rank that costs over SHARE of `wall_s` and over FOCUS of all that is lost, or None."""
    lost = _lost(arrivals, lambda row: row[-1] - row[-2])
    most = max(range(len(lost)), key=lost.__getitem__)
    much, alone = lost[most] > SHARE * wall_s, lost[most] > FOCUS * sum(lost)
    want = most if much and alone else None
    if got == want and type(got) is type(want):
        return want
    require(got is None or (type(got) is int and 0 <= got < len(lost)), f"{case}: return a rank as an int from 0 to "
            f"{len(lost) - 1}, or None, not {got!r}")
    refuse(got is None, f"{case}: the others wait for rank {want} alone for {lost[most] / wall_s:.1%} of the job, "
           f"which is {lost[most] / (sum(lost) or 1):.0%} of all that is lost so. Over {SHARE:.0%} of the job and over "
           f"{FOCUS:.0%} of what is lost, it has to be named")
    where = f"{case}: you name rank {got}"
    often = [0] * len(lost)
    for row in arrivals:
        often[max(range(len(row)), key=lambda rank: row[rank])] += 1
    counted = often[got] == max(often)
    hair = (". If you count how often a rank is last: one that is last by a hair costs nothing. Add up seconds"
            if counted and got != most else "")
    refuse(want is None and not much and sum(lost) > SHARE * wall_s, f"{where}, which costs {lost[got] / wall_s:.1%} "
           f"of the job. All ranks together cost {sum(lost) / wall_s:.1%} of it, but what this one rank costs has to "
           f"be over {SHARE:.0%}{hair}")
    refuse(want is None and not much, f"{where}, but the others wait for rank {most}, the latest, for "
           f"{lost[most] / wall_s:.1%} of the job alone. Under {SHARE:.0%} it is not worth a search{hair}")
    refuse(want is None, f"{where}, which costs {lost[got] / (sum(lost) or 1):.0%} of what is lost to late ranks. "
           f"Ask for over {FOCUS:.0%}: otherwise they are late in turn, and to replace one would save little"
           f"{hair}")
    waits = _waits(arrivals)
    refuse(waits[got] == max(waits), f"{where}, which waits longest of all. It is a victim: rank {want} comes last")
    refuse(counted, f"{where}, which comes last most often, but by so little that it costs "
           f"{lost[got] / wall_s:.1%} of the job. Rank {want} costs {lost[most] / wall_s:.0%}")
    raise CheckFailed(f"{where}, for which the others wait alone for {lost[got] / wall_s:.1%} of the job. For rank "
                      f"{want} it is {lost[most] / wall_s:.0%}")


def exposed_seconds(got: Any, computing: Sequence[Span], messages: Sequence[Span], case: str) -> float:
    """`got` must be for how long messages are under way while nothing is computed; returns it."""
    formula = _covered(computing, messages)
    few = len(computing) + len(messages) <= 3
    with reworded(after=f". Computing {_told(computing)}, messages {_told(messages)}: it should be "
                  f"{short(formula.want)} s" if few else ""):
        return formula.require_right(f"{case}: the exposed time", got)


def _told(spans: Sequence[Span]) -> str:
    return " and ".join(f"from {short(start)} to {short(end)} s" for start, end in spans)


def hidden_share(got: Any, computing: Sequence[Span], messages: Sequence[Span], case: str) -> float:
    """`got` must be the share of the time of messages that computing covers; returns it."""
    seconds = _covered(computing, messages)
    both, all_s = length(common(_union(messages), _union(computing))), length(_union(messages))
    if isinstance(got, float) and seconds.is_right(got) and abs(got - both / all_s) > TOLERANCE:
        raise CheckFailed(f"{case}: this is for how many seconds nothing hides the messages: here the *share* of their "
                          "time is asked that computing hides")
    return Formula(both / all_s, [
        (1 - both / all_s, "this is the share that nothing hides: it is 1 minus that"),
        (both, "these are the seconds that are hidden: divide by the time in which messages are under way"),
        (both / sum(end - start for start, end in messages), "messages that overlap are counted twice in what you "
         "divide by: time counts once"),
    ]).require_right(f"{case}: the hidden share", got)


def _covered(computing: Sequence[Span], messages: Sequence[Span]) -> Formula:
    covered, moving = _union(computing), _union(messages)
    both = length(common(moving, covered))
    pairs = sum(max(0.0, min(a[1], b[1]) - max(a[0], b[0])) for a in messages for b in computing)
    sums = sum(end - start for start, end in messages)
    works = sum(end - start for start, end in computing)
    edges = [edge for span in (*computing, *messages) for edge in span]
    whole = max(edges) - min(edges)
    return Formula(length(moving) - both, [
        (length(moving), "this is all the time of messages. What runs beside computing costs nothing: leave it out"),
        (both, "this is the time that is hidden: messages beside computing. Asked is the rest"),
        (_exposed(_cut_off(computing), _cut_off(messages)), "where one span lies within another, the shorter one's end "
         "is taken: two that overlap end when the later one of them ends"),
        (sums - both, "two messages overlap, and their common time counts twice: join them first"),
        (length(moving) - pairs, "two spans of computing overlap, and you take their common time off twice: join them "
         "first"),
        (length(moving) - length(covered), "this takes the lengths from one another. Computing hides messages only "
         "while they are under way"),
        (max(0.0, sums - works), "this takes the lengths from one another. Computing hides messages only while they "
         "are under way"),
        (length(covered) - both, "this is the time of computing without messages: the other way round"),
        ((length(moving) - both) / whole, "this is a share of the trace: return seconds"),
        (whole - length(covered), "this is all the time without computing. Leave out that in which no message is under "
         "way either"),
    ])


def _exposed(covered: np.ndarray, moving: np.ndarray) -> float:
    return length(moving) - length(common(moving, covered))


def _cut_off(spans: Iterable[Span]) -> np.ndarray:
    """Spans joined as if the one that begins later also ended later."""
    joined: list[Span] = []
    for start, end in sorted(spans):
        overlaps = joined and start <= joined[-1][1]
        joined[-1:] = [(joined[-1][0], end)] if overlaps else [*joined[-1:], (start, end)]
    return np.array(joined)


def _union(spans: Iterable[Span]) -> np.ndarray:
    return union(np.array(list(spans)))


def utilization(got: Any, sizes: Mapping[str, float], case: str) -> float:
    """`got` must be the MFU of a job with these sizes, as a share: the keys are the arguments of the exercise."""
    weights = 6 * sizes["num_parameters"]
    attention = 12 * sizes["num_layers"] * sizes["width"] * sizes["context"]
    per_gpu = sizes["tokens_per_s"] / sizes["num_gpus"] / sizes["peak_flops_per_s"]
    want = per_gpu * (weights + attention)
    return Formula(want, [
        (100 * want, "return a share, 0.4 for 40 %"),
        (want * sizes["num_gpus"] * sizes["peak_flops_per_s"], "these are the FLOPs of a second: divide by what all "
         "GPUs together could do in it"),
        (want * sizes["peak_flops_per_s"], "these are the FLOPs of a second on each GPU: divide by its peak"),
        (per_gpu * (weights + attention / 2), "attention is halved, as a causal mask allows: here each token is "
         "counted as if it met all of its context"),
        (want * sizes["num_gpus"], "this is as if one GPU had done it all: divide by the peak of all GPUs together"),
        (per_gpu * weights, "attention's products are missing: each token meets every token of its sequence in each "
         "layer"),
        (per_gpu * (weights + attention / sizes["num_layers"]), "attention is counted for one layer: every one has it"),
        (per_gpu * (weights + attention) / 3, "this is forward alone. Backward costs twice as much: 2 FLOPs become 6 "
         "for each parameter, and 4 become 12 in attention"),
        (2 / 3 * want, "forward and backward together are three times forward: backward alone is twice"),
        (per_gpu * (weights / 3 + attention), "each parameter costs 2 FLOPs in forward and 4 in backward"),
        (per_gpu * (weights + attention / 3), "attention is counted for forward alone: backward costs twice as much"),
        (per_gpu * 4 / 3 * (weights + attention), "this counts forward twice, as a step with full recomputation does "
         "it. MFU counts what the model needs, and not what is done again"),
        (1 / want, "this is the other way round: what the job does, divided by what the GPUs could do"),
    ]).require_right(f"{case}: MFU", got)


def diagnosis(got: Any, want: tuple[str, int | None, str | None], job: Mapping[str, Any], case: str) -> str:
    """`got` must be what is wrong with a job, and is returned in words.

    That is ("rank", which, phase), ("jitter", None, None) or ("messages", None, None). `job` is what ranks recorded.
    """
    kinds = ("rank", "jitter", "messages")
    found = tuple(got) if isinstance(got, list) else got
    require(isinstance(found, tuple) and len(found) == 3 and found[0] in kinds, f"{case}: return (kind, rank, phase) "
            f"with a kind of {', '.join(map(repr, kinds))}, not {got!r}")
    is_rank = type(found[1]) is int and 0 <= found[1] < len(job["ranks"])
    require(found[0] != "rank" or is_rank, f"{case}: there is no rank {found[1]!r} among 0 to {len(job['ranks']) - 1}. "
            "`lost` wants a row for each collective, and `called` is by rank and then by step")
    if found == want:
        return " ".join(str(part) for part in found if part is not None)
    kind, rank, phase = found
    if kind != want[0]:
        _explain_kind(kind, rank, want, job, case)
    waits = _communicates(job)
    require(kind == "rank", f"{case}: it is {kind}: return None for the rank and None for the phase")
    require(rank == want[1], f"{case}: you blame rank {rank}, " + (
        f"which waits longest: it is a victim of rank {want[1]}" if waits[rank] == max(waits) else
        f"but the others wait for rank {want[1]}"))
    steps = job["ranks"][rank]["phases"]
    timed = {one: sum(step[one][1] - step[one][0] for step in steps) for one in steps[0]}
    longest = max(timed, key=timed.__getitem__)
    raise CheckFailed(f"{case}: rank {rank} is late, but not in {phase}. " + (
        "That is its longest phase, as it is on every rank. " if phase == longest else "") +
        "By how many seconds is each phase longer than the same phase of the other ranks, without the time that they "
        "wait in it?")


def _communicates(job: Mapping[str, Any]) -> list[float]:
    """For how long each rank is in the all-reduce: what it waits for late ranks, and the messages."""
    return [sum(step["backward"][1] - called for step, called in zip(one["phases"], one["called"]))
            for one in job["ranks"]]


def _arrivals(job: Mapping[str, Any]) -> list[list[float]]:
    return [list(row) for row in zip(*(one["called"] for one in job["ranks"]))]


def _explain_kind(kind: str, rank: Any, want: tuple[str, int | None, str | None], job: Mapping[str, Any],
                  case: str) -> None:
    """Raise CheckFailed for an answer of another kind."""
    if want[0] == "rank":
        refuse(kind == "messages", f"{case}: you blame the messages, but ranks that wait for rank {want[1]} are in "
               "communication for as long. Messages count from when the last rank has come")
        raise CheckFailed(f"{case}: you say that the ranks are late in turn, but almost all is lost to rank {want[1]}")
    if want[0] == "jitter":
        refuse(kind == "rank", f"{case}: you blame rank {rank}, but the ranks are late in turn, for about as long")
        arrivals, waits = _arrivals(job), _communicates(job)
        lost = sum(_lost(arrivals, lambda row: row[-1] - row[-2]))
        messages = sum(step["backward"][1] - max(row) for step, row in zip(job["ranks"][0]["phases"], arrivals))
        raise CheckFailed(
            f"{case}: you blame the messages. Once the last rank has come they take {messages:.2f} s, and {lost:.2f} s "
            f"are lost before that, to another rank in each step. Rank 0 is in communication for {waits[0]:.2f} s, but "
            f"its wait for late ranks is part of that; the messages of all ranks, {len(waits) * messages:.2f} s, are "
            "under way side by side")
    refuse(kind == "rank", f"{case}: you blame rank {rank}, but nobody is late: all ranks come together, and then the "
           "messages take long")
    raise CheckFailed(f"{case}: you say that ranks are late in turn, but all come together, and then the messages take "
                      "long")


def saved(got: Any, fault: tuple[str, int | None, str | None], job: Mapping[str, Any], case: str) -> float:
    """`got` must be how many seconds less a job takes once its fault, as in `diagnosis`, is mended; returns it."""
    ranks = job["ranks"]
    arrivals = _arrivals(job)
    kind, rank, _ = fault
    name = f"{case}, in which {_WRONG[kind]}: what the remedy saves"
    if kind == "messages":
        return _saved_by_hiding(ranks, arrivals).require_right(name, got)
    lost, waits = _lost(arrivals, lambda row: row[-1] - row[-2]), _waits(arrivals)
    want = sum(lost) if rank is None else lost[rank]
    return Formula(want, [
        (sum(lost) if rank is not None else max(lost), "this is what is lost to all ranks together: mend one, and what "
         "is lost to the others stays" if rank is not None else "this is what is lost to one rank: the remedy is for "
         "all of them"),
        (sum(waits), "these are the seconds of all ranks added up. They wait side by side: the job gets shorter by "
         "what they wait at the same time"),
        (max(waits), "this is how long one rank waits, for whomever. Mended, the late rank comes with the one before "
         "it, no sooner"),
        (sum(max(row) - min(row) for row in arrivals), "this takes the last rank's distance from the first. Mended, "
         "all others still wait for the one before the last"),
        (sum(max(row) - float(np.median(row)) for row in arrivals), "this takes the last rank's distance from the "
         "median of the ranks" + (". Where another is late too, the job still waits for that one" if rank is not None
                                  else ". Count what the others wait for one rank alone")),
        (want / len(arrivals), "this is for one step: add up all of them"),
        (want / len(ranks), "this is divided by the number of ranks. They wait side by side, and all are done earlier "
         "by the whole of it"),
        (want / job["wall_s"], "this is a share of the job: return seconds"),
        (job["wall_s"] - want, "this is how long the mended job takes: return what it saves"),
        (0.0, "nothing, you say. But whoever comes last makes all others wait"),
    ]).require_right(name, got)


_WRONG = {"rank": "one rank is late", "jitter": "ranks are late in turn", "messages": "the messages take long"}


def _saved_by_hiding(ranks: Sequence[Mapping[str, Any]], arrivals: Arrivals) -> Formula:
    spans = [(*ranks[row.index(max(row))]["phases"][step]["backward"], max(row)) for step, row in enumerate(arrivals)]
    messages = [end - last for _, end, last in spans]
    hidden = [min(end - last, last - start) for start, end, last in spans]
    lost = sum(_lost(arrivals, lambda row: row[-1] - row[-2]))
    smaller = "Take the smaller of the two in each step, then add up"
    return Formula(sum(hidden), [
        (sum(messages), "this is all the time of the messages. They can hide only behind what is computed: in each "
         "step no more than the backward takes until the last rank calls. By the clock backward includes the wait and "
         f"the messages. {smaller}"),
        (sum(last - start for start, _, last in spans), "this is what could hide the messages: where they are shorter, "
         f"no more than they take is saved. {smaller}"),
        (sum(end - start for start, end, _ in spans), "this is all of backward, and the computing in it stays"),
        (lost, "this is what is lost to late ranks. Here the messages take long, once all have come"),
        *((value, "you count from when the *first* rank calls: the messages begin when the last has") for value in (
            sum(min(end - min(row), min(row) - start) for (start, end, _), row in zip(spans, arrivals)),
            sum(min(end - min(row), last - start) for (start, end, last), row in zip(spans, arrivals)),
            sum(end - min(row) for (_, end, _), row in zip(spans, arrivals)))),
        *((sum(min(end - last, row[rank] - own["phases"][step]["backward"][0])
               for step, ((_, end, last), row) in enumerate(zip(spans, arrivals))),
           f"you take what rank {rank} computed in backward, in every step. The messages wait for the rank that came "
           "last, in most steps another one") for rank, own in enumerate(ranks)),
        *((sum(min(step["backward"][1] - called, called - step["backward"][0])
               for step, called in zip(own["phases"], own["called"])),
           f"you take rank {rank} alone, and its wait for later ranks counts as messages. In each step the rank that "
           "came last decides") for rank, own in enumerate(ranks)),
        (sum(hidden) / len(arrivals), "this is the mean over the steps: add them up"),
    ])
