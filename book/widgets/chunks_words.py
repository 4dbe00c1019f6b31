"""L3: what a step does, as the half of a sentence that follows "rank 0 sends chunk 3 to rank 1".

A step in which nothing is seen to travel, only collectives of the library, is told in whole sentences.
"""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from book.widgets.chunks_run import Call, Run, State, Transfer

NUMBERS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight")
MOST_GROUPS = 4  # so many groups that call the same at once are told one by one
Message = list[Transfer]


def words_of(run: Run) -> dict[str, Any]:
    """`rests`: the different half sentences, `says`: which of them each step has, `begin`: the words before step 1."""
    texts = [_rest(run, step, held) for step, held in zip(range(run.num_steps), run.states())]
    rests = list(dict.fromkeys(texts))
    return {"rests": rests, "says": [rests.index(text) for text in texts], "begin": _begin(run)}


def calls_in_words(calls: Sequence[Call], world_size: int) -> str:
    """Who calls which collective: "all 4 ranks call all_reduce"."""
    ops = {op for call in calls for op in call.ops.values()}
    if len(calls) > MOST_GROUPS and len(ops) == 1:
        return f"{len(calls)} groups of ranks call {ops.pop()}, each for itself"
    return "; ".join(_call(call, world_size) for call in calls)


def _begin(run: Run) -> str:
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


def _rest(run: Run, step: int, held: State) -> str:
    messages: dict[tuple[int, int], Message] = {}
    for t in run.transfers:
        if t.leaves == step:
            messages.setdefault((t.src, t.dst), []).append(t)
    calls = [call for call in run.calls if call.step == step]
    parts = [_library(calls, run.world_size, bool(messages)), _own(run, step) if calls else "", _fault(run, step)]
    if messages:
        parts[:0] = [f", {_does(next(iter(messages.values())), held)}.", _others(run, messages)]
    return " ".join(part for part in parts if part)


def _does(message: Message, held: State) -> str:
    it, first = ("it" if len(message) == 1 else "them"), message[0]
    elsewhere = next((t.into for t in message if t.into is not None and t.into != t.chunk), None)
    own = "its own" if elsewhere is None else f"its chunk {elsewhere}"
    if first.arrives is None:
        return "and nobody receives " + it
    if all(t.finds_empty(held) for t in message):
        return "which held nothing there"
    return {"reduce": f"which adds {it} to {own}", "copy": f"which puts {it} in place of {own}"}.get(
        first.op or "", f"which receives {it}")


def _others(run: Run, messages: dict[tuple[int, int], Message]) -> str:
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


def _library(calls: Sequence[Call], world_size: int, also_messages: bool) -> str:
    """What the collectives of a step do, as far as it is seen."""
    if not calls:
        return ""
    who = calls_in_words(calls, world_size)
    who = f"Meanwhile {who}" if also_messages else who[0].upper() + who[1:]
    if any(call.missing for call in calls):
        return f"{who}."
    if {op for call in calls for op in call.ops.values()} == {"barrier"}:
        return f"{who}: nobody goes on before all have called it."
    if any(call.changes for call in calls):
        return f"{who}: the library moves the data, and does not tell how."
    return f"{who}: the watched buffer holds what it held before."


def _own(run: Run, step: int) -> str:
    """Who changed its own chunks before the next step: the picture shows what came of both."""
    ranks = sorted(run.own[step + 1]) if step + 1 in run.own else []
    if not ranks:
        return ""
    who = _ranks(ranks, run.world_size)
    return f"Then {who} change{'s its' if len(ranks) == 1 else ' their'} own chunks."


def _call(call: Call, world_size: int) -> str:
    by_op: dict[str, list[int]] = {}
    for rank, op in sorted(call.ops.items()):
        by_op.setdefault(op, []).append(rank)
    parts = [f"{_ranks(ranks, world_size)} call{'s' if len(ranks) == 1 else ''} {op}" for op, ranks in by_op.items()]
    if call.missing:
        parts.append(f"{_ranks(call.missing)} {'does' if len(call.missing) == 1 else 'do'} not")
    return ", ".join(parts)


def _ranks(ranks: Sequence[int], world_size: int | None = None) -> str:
    if len(ranks) == world_size and len(ranks) > 1:
        return "both ranks" if world_size == 2 else f"all {world_size} ranks"
    *most, last = map(str, ranks)
    return f"ranks {', '.join(most)} and {last}" if most else f"rank {last}"


def _fault(run: Run, step: int) -> str:
    for t in run.transfers:
        if t.leaves == step and t.into is not None and t.after and max(t.after) > 1:
            double = next(rank for rank, times in enumerate(t.after) if times > 1)
            return f"Rank {t.dst}'s chunk {t.into} now counts rank {double} more than once."
    return ""


def _number(x: int) -> str:
    return NUMBERS[x] if x < len(NUMBERS) else str(x)
