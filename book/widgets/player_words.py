"""L3: a run of the chunk player in words: where it comes from, what each step does, its phases.

What a step does is the second half of a sentence, after "rank 0 sends chunk 3 to rank 1". A step that has only
collectives of the library, so that no chunk is seen to travel, is told in whole sentences.
"""
from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from book.collectives import COLLECTIVES
from book.promise import Promise
from book.trace import Trace
from book.widgets.page import listed
from book.widgets.player_run import Called, ChunkRun, State, Transfer, shape_of
from book.widgets.terms import spelled
from book.words import agree, alike, capitalised, in_bytes, joined, plural

NUMBERS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight")
MOST_GROUPS = 4  # up to this many groups that call the same collective at once are named one by one
Message = list[Transfer]


def told(run: ChunkRun, trace: Trace, promised: Promise) -> dict[str, Any]:
    """All words about a run but for how it ends, with the shape of its links, on which some depend."""
    shape = shape_of([(t.src, t.dst) for t in run.transfers], run.world_size)
    digits, called = phases(run)
    names = _phase_names(trace.name, promised.name, shape) + called
    return {"goal": promised.name, "shape": shape, "names": names, "phases": digits, **_words_of(run),
            "source": source_of(trace, run), **_totals(run, promised.name)}


def _words_of(run: ChunkRun) -> dict[str, Any]:
    """`rests`: the distinct half sentences, `says`: which of them each step has, `begin`: the words before step 1."""
    texts = [_rest(run, step, held) for step, held in zip(range(run.num_steps), run.states())]
    rests = list(dict.fromkeys(texts))
    return {"rests": rests, "says": [rests.index(text) for text in texts], "begin": _begin(run)}


def _calls_in_words(calls: Sequence[Called], world_size: int) -> str:
    """Who calls which collective: "all 4 ranks call all_reduce"."""
    ops = {op for call in calls for op in call.ops.values()}
    if len(calls) > MOST_GROUPS and len(ops) == 1:
        return f"{len(calls)} groups of ranks call {ops.pop()}, each for itself"
    return "; ".join(_call(call, world_size) for call in calls)


def _begin(run: ChunkRun) -> str:
    held = next(run.states()).items()
    holders = [(rank, chunk) for (rank, chunk), contents in held if contents and any(contents)]
    ranks = {rank for rank, _ in holders}
    if len(ranks) == 1 < run.world_size and all(contents is not None for _, contents in held):
        return f"Start: only rank {ranks.pop()} holds data."
    if sorted(chunk for _, chunk in holders) == list(range(run.num_chunks)) and run.world_size > 1:
        return "Start: each chunk is on one rank only."
    if all(contents and sum(contents) == contents[rank] == 1 for (rank, _), contents in held):
        return "Start: every rank holds only its own data."
    return "Start: what every rank holds before the first step."


def _rest(run: ChunkRun, step: int, held: State) -> str:
    messages: dict[tuple[int, int], Message] = {}
    for t in run.transfers:
        if t.leaves == step:
            messages.setdefault((t.src, t.dst), []).append(t)
    calls = [call for call in run.calls if call.step == step]
    parts = [_library(calls, run.world_size, bool(messages)), _own(run, step) if calls else "",
             _counted_twice(run, step), _unmet(run, step)]
    if messages:
        parts[:0] = [f", {_does(next(iter(messages.values())), held)}.", _others(run, messages)]
    return " ".join(part for part in parts if part)


def _unmet(run: ChunkRun, step: int) -> str:
    ranks = sorted(run.unmet.get(step, []))
    if not ranks:
        return ""
    who = ranks_named(ranks)
    return f"{capitalised(who)} {agree('waits', ranks)} to receive, and nobody sends."


def _does(message: Message, held: State) -> str:
    it, first = ("it" if len(message) == 1 else "them"), message[0]
    elsewhere = next((t.into for t in message if t.into is not None and t.into != t.chunk), None)
    own = "its own" if elsewhere is None else f"its chunk {elsewhere}"
    if first.arrives is None:
        return "and nobody receives " + it
    if all(t.finds_empty(held) for t in message):
        return "which held nothing there"
    if first.into is None:
        return f"which receives {it} and changes no chunk"
    return {"reduce": f"which adds {it} to {own}", "copy": f"which puts {it} in place of {own}"}.get(
        first.op or "", f"which receives {it}")


def _others(run: ChunkRun, messages: dict[tuple[int, int], Message]) -> str:
    """What the other links do: a rank's link carries one message at a time in each direction."""
    num_links = len({(t.src, t.dst) for t in run.transfers})
    sources, sinks = ({pair[end] for pair in messages} for end in (0, 1))
    if len(messages) == 1:
        return "Every other link is idle." if num_links > 1 else ""
    if len(sinks) == 1:
        return f"{_number(len(messages)).capitalize()} ranks send to rank {sinks.pop()} through its one link."
    if len(sources) == 1:
        return f"It sends to {_number(len(messages))} ranks through its one link."
    lengths = {len(message) for message in messages.values()}
    what = "chunks" if len(lengths) > 1 else "one chunk" if lengths == {1} else f"{_number(lengths.pop())} chunks each"
    every = _number(len(messages)).capitalize()
    if len(messages) == num_links:
        every = "Both" if num_links == 2 else f"All {_number(num_links)}"
    return f"{every} links carry {what} at once."


def _library(calls: Sequence[Called], world_size: int, also_messages: bool) -> str:
    """What the collectives of a step do, as far as the trace shows it."""
    if not calls:
        return ""
    who = _calls_in_words(calls, world_size)
    who = f"Meanwhile {who}" if also_messages else capitalised(who)
    if any(call.missing for call in calls):
        return f"{who}."
    if {op for call in calls for op in call.ops.values()} == {"barrier"}:
        return f"{who}: nobody goes on before all have called it."
    if any(call.changes for call in calls):
        return f"{who}: the library moves the data, and does not tell how."
    return f"{who}: the chunks shown here stay as they are."


def _own(run: ChunkRun, step: int) -> str:
    """Which ranks changed their own chunks before the next step: the picture shows the result of both."""
    ranks = sorted(run.own[step + 1]) if step + 1 in run.own else []
    if not ranks:
        return ""
    who = ranks_named(ranks, run.world_size)
    return f"Then {who} change{'s its' if len(ranks) == 1 else ' their'} own chunks."


def _call(call: Called, world_size: int) -> str:
    parts = [f"{ranks_named(ranks, world_size)} {agree('calls', ranks)} {op}"
             for op, ranks in alike(sorted(call.ops.items())).items()]
    if call.missing:
        parts.append(f"{ranks_named(call.missing)} {agree('does', call.missing)} not")
    return ", ".join(parts)


def ranks_named(ranks: Sequence[int], world_size: int | None = None) -> str:
    """Ranks of a picture, as prose joins them: "ranks 0, 1 and 3"; "all 4 ranks" if they are `world_size` of them.

    `book.words.named` is for reports, whose ranks may be thousands: "ranks 0, 1, 4-63".
    """
    if len(ranks) == world_size and len(ranks) > 1:
        return "both ranks" if world_size == 2 else f"all {world_size} ranks"
    return f"{plural('rank', len(ranks))} {joined(ranks)}"


def _counted_twice(run: ChunkRun, step: int) -> str:
    for t in run.transfers:
        if t.leaves == step and t.into is not None and t.after and max(t.after) > 1:
            double = next(rank for rank, times in enumerate(t.after) if times > 1)
            return f"Rank {t.dst}'s chunk {t.into} now counts rank {double} more than once."
    return ""


def _number(x: int) -> str:
    return NUMBERS[x] if x < len(NUMBERS) else str(x)


MADE = {"simulated": "simulated", "executed": "executed on {} ranks", "recorded": "recorded from a run on {} ranks",
        "instrumented": "instrumented · {} ranks"}
MOST_NAMES = 7  # of collectives as phases: a phase is written as one digit
# What the busiest rank sends, in buffers, by what the run promises; (N-1)/N for any other.
SENT: dict[str, tuple[str, Callable[[int], float]]] = {
    "all_reduce": ("2(N−1)/N", lambda p: 2 * (p - 1) / p),
    "broadcast": ("⌈lg N⌉", lambda p: (p - 1).bit_length()),
    "gather": ("1/N", lambda p: 1 / p),
}


def phases(run: ChunkRun) -> tuple[str, list[str]]:
    """A digit per step: 0 if it mostly adds, 1 if it replaces, 2 if that is unknown, else which collective it calls.

    From 3 on, a digit is a place in the list of collectives that is returned with the digits.
    """
    digits: list[str] = []
    names: list[str] = []
    for step in range(run.num_steps):
        ops = [t.op for t in run.transfers if t.leaves == step]
        called = sorted({op for call in run.calls if call.step == step for op in call.ops.values()})
        if ops or len(called) != 1 or len({*names, *called}) > MOST_NAMES:
            digits.append("0" if 2 * ops.count("reduce") > len(ops) else "1" if "copy" in ops else "2")
            continue
        names += [op for op in called if op not in names]
        digits.append(str(3 + names.index(called[0])))
    return "".join(digits), [spelled(name) for name in names]


def _phase_names(name: str | None, promise: str, shape: dict[str, Any]) -> list[str]:
    """The names of the phase that adds, of the one that replaces, and of the one where that is unknown."""
    if promise in ("broadcast", "scatter", "gather", "reduce", "all_to_all"):
        return [spelled(promise), spelled(promise), ""]
    if name in COLLECTIVES:
        return [*map(spelled, COLLECTIVES[name].phases), ""]
    # The book has no record of this schedule: judge it by its shape and its name.
    to_one = shape["kind"] == "tree" or any(word in (name or "") for word in ("server", "tree"))
    return ["reduce", "broadcast", ""] if to_one else ["reduce-scatter", "all-gather", ""]


def source_of(trace: Trace, run: ChunkRun, with_backend: bool = False) -> str:
    """Where the picture comes from; the backend only if the text may differ between machines."""
    made = MADE[trace.source].format(trace.world_size)
    num_bytes = run.num_bytes()
    parts = [made, trace.backend if with_backend else None, f"n = {in_bytes(num_bytes)}" if num_bytes else None]
    return " · ".join(part for part in parts if part)


def _totals(run: ChunkRun, promise: str) -> dict[str, Any]:
    """`total`: what the busiest rank sends, in buffers; `who` that is (-1: all the same); `formula` if one holds."""
    sent, shares, p = np.zeros(run.world_size), run.shares(), run.world_size
    for t in run.transfers:
        sent[t.src] += shares[t.chunk] if t.chunk is not None else 1 / run.num_chunks
    even, rules = sent.max() - sent.min() < 1e-6, []
    rule, value = SENT.get(promise, ("(N−1)/N", lambda p: (p - 1) / p))
    if (even or promise in ("broadcast", "scatter", "gather")) and abs(sent.max() - value(p)) < 1e-6:
        rules.append(rule)
    if not even and abs(sent.max() - (p - 1)) < 1e-6:
        rules.append("(N−1)")
    formula = f": {rules[0]}\u00a0·\u00a0n" if len(rules) == 1 else ""  # both: they agree on so few ranks
    return {"total": round(float(sent.max()), 6), "who": -1 if even else int(sent.argmax()), "formula": formula}


# For a reader without JavaScript
MOST_STEPS, MOST_MESSAGES = 14, 60  # longer runs are summed up: this text is for reading, not for data
DOES = {"reduce": "added", "copy": "replacing what was there"}


def steps_in_words(run: ChunkRun) -> str:
    """HTML: every message of every step, if these are few."""
    if run.num_steps > MOST_STEPS or len(run.transfers) > MOST_MESSAGES:
        return f"<p>{size_of(run)}, {len(run.transfers)} chunks sent.</p>"
    sent, called = defaultdict(list), defaultdict(list)
    for transfer in run.transfers:
        sent[transfer.leaves].append(transfer)
    for call in run.calls:
        called[call.step].append(call)
    return listed("; ".join(_sent(sent[step], held)
                            + [_calls_in_words(called[step], run.world_size)] * bool(called[step]))
                  for step, held in zip(range(run.num_steps), run.states()))


def _sent(transfers: list[Transfer], held: State) -> list[str]:
    if not transfers:
        return []
    texts = [f"{t.src} → {t.dst}: {_chunk(t)}" for t in transfers]
    does = {"where nothing was" if t.finds_empty(held) else
            DOES.get(t.op or "", "received" if t.arrives is not None else "never received") for t in transfers}
    return [f"{', '.join(texts)} ({' or '.join(sorted(does))})"]


def _chunk(t: Transfer) -> str:
    into = f" into chunk {t.into}" if t.into is not None and t.into != t.chunk else ""
    return f"chunk {'?' if t.chunk is None else t.chunk}{into}"


def size_of(run: ChunkRun) -> str:
    """How many ranks and steps it has."""
    return f"{run.world_size} ranks, {run.num_steps} steps"
