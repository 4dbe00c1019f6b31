"""L3: what a step does, as the half of a sentence that follows "rank 0 sends chunk 3 to rank 1"."""
from __future__ import annotations

from typing import Any

from book.widgets.run import Run, Transfer

NUMBERS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight")
Message = list[Transfer]


def words_of(run: Run) -> dict[str, Any]:
    """`rests`: the different half sentences, `says`: which of them each step has, `begin`: the words before step 1."""
    texts = [_rest(run, step) for step in range(run.num_steps)]
    rests = list(dict.fromkeys(texts))
    return {"rests": rests, "says": [rests.index(text) for text in texts], "begin": _begin(run)}


def _begin(run: Run) -> str:
    held = run.start.items()
    holders = [chunk for (_, chunk), contents in held if contents and any(contents)]
    if sorted(holders) == list(range(run.num_chunks)) and run.world_size > 1:
        return "Start: each chunk is on one rank only."
    if len(held) == run.world_size * run.num_chunks and all(
            contents and sum(contents) == contents[rank] == 1 for (rank, _), contents in held):
        return "Start: every rank holds only its own data."
    return "Start: what every rank holds before the first step."


def _rest(run: Run, step: int) -> str:
    messages: dict[tuple[int, int], Message] = {}
    for t in run.transfers:
        if t.leaves == step:
            messages.setdefault((t.src, t.dst), []).append(t)
    first = next(iter(messages.values()))
    parts = [f", {_does(first)}.", _others(run, messages), _fault(run, step)]
    return " ".join(part for part in parts if part)


def _does(message: Message) -> str:
    it, op = ("it" if len(message) == 1 else "them"), message[0].op
    elsewhere = next((t.into for t in message if t.into is not None and t.into != t.chunk), None)
    own = "its own" if elsewhere is None else f"its chunk {elsewhere}"
    if message[0].arrives is None:
        return "and nobody receives " + it
    return {"reduce": f"which adds {it} to {own}", "copy": f"which puts {it} in place of {own}"}.get(
        op or "", f"which receives {it}")


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
    what = "chunks" if len(lengths) > 1 else "one chunk" if lengths == {1} else f"{_number(lengths.pop())} chunks"
    every = _number(len(messages)).capitalize()
    if len(messages) == num_links:
        every = "Both" if num_links == 2 else f"All {_number(num_links)}"
    return f"{every} links carry {what} at once."


def _fault(run: Run, step: int) -> str:
    for t in run.transfers:
        if t.leaves == step and t.into is not None and t.after and max(t.after) > 1:
            double = next(rank for rank, times in enumerate(t.after) if times > 1)
            return f"Rank {t.dst}'s chunk {t.into} now counts rank {double} more than once."
    return ""


def _number(x: int) -> str:
    return NUMBERS[x] if x < len(NUMBERS) else str(x)
