"""L3: the memory player on a page and in a notebook: what each rank holds of a model's state, step by step.

The data of a run, beside what `choices` adds: `n` ranks; `units`, [name, bytes of its whole parameters]; `start` and,
in each of the `steps`, changes [lane, unit, bytes, look].

    step    [kind, unit (-1: all), words to stress, the rest, bytes that each rank sends, changes]; words are numbers of
            `texts`, which all runs share, as `begin` is
    lane    0 parameters, 1 gradients, 2 optimizer state, 3 activations
    look    "" nothing, "s" this rank's shard, "w" all of it, "o" all, of which only this rank's shard is updated,
            "l" the gradient of this rank's own part of the batch

`room` is the most that a rank holds of each lane in any run: bars of all runs are drawn to one scale.
"""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from book.trace import STATE, Trace
from book.widgets.choices import arranged, names_of
from book.widgets.memory_steps import HINT, REDUCES, Held, Place, read_held
from book.widgets.memory_words import begin, figures, told
from book.widgets.page import Page
from book.widgets.terms import origin

TITLE = "What each rank holds in one training step"


class MemoryPlayer(Page):
    """What a memory player shows: recorded traces by key."""

    widget = "memory"

    def __init__(self, traces: Mapping[Any, Trace], title: str | None = None, labels: Sequence[str] | None = None,
                 select: Any = None):
        for trace in traces.values():
            if not isinstance(trace, Trace):
                raise TypeError(f"memory_player() takes a trace, or a mapping of them, not {type(trace).__name__}: "
                                f"{HINT}")
        self.traces, self._labels, self._select = dict(traces), labels, select
        self._held = {key: read_held(trace) for key, trace in self.traces.items()}
        self._given_title, self.title = title, title or TITLE

    def with_trace(self, what: Any) -> MemoryPlayer:
        """The same player of another trace."""
        return MemoryPlayer({"": what}, self._given_title)

    def data(self, live: bool) -> dict[str, Any]:
        """The player's data; where it is live, with the backend's name."""
        texts: dict[str, int] = {}
        runs = {key: {"source": origin(self.traces[key], live), **run_payload(held, texts)}
                for key, held in self._held.items()}
        room = [max(_room(held, what) for held in self._held.values()) for what in STATE]
        return {"v": 1, "title": self.title, "room": room, "texts": list(texts),
                **arranged(runs, self._labels, self._select)}

    def text(self) -> str:
        """One line that says what is shown."""
        ranks = " and ".join(dict.fromkeys(str(held.world_size) for held in self._held.values()))
        several = f" of {len(self.traces)} runs ({', '.join(names_of(self.traces))})" if len(self.traces) > 1 else ""
        return f"{self.title}: memory player{several}, {ranks} ranks, recorded"

    def words(self) -> str:
        """The figures of each run and, where there is one run, its steps."""
        parts = [f"<p><strong>{escape(self.title)}</strong></p>"]
        for name, held in zip(names_of(self.traces), self._held.values()):
            known = [f"{value} {meaning}" for value, meaning in _final(held)]
            named = f"{name}: " if len(self.traces) > 1 else ""
            parts.append(f"<p>{escape(named + '; '.join(known))}.</p>")
        if len(self._held) == 1:
            said = [begin(held), *told(held)]
            parts.append(f"<ol>{''.join(f'<li>{escape(stress + rest)}</li>' for stress, rest in said)}</ol>")
        return "".join(parts)


def run_payload(held: Held, texts: dict[str, int]) -> dict[str, Any]:
    """One run as JSON data; its words are put into `texts`, each with its number."""
    def kept(said: Sequence[str]) -> list[int]:
        return [texts.setdefault(text, len(texts)) for text in said]

    drawing = _Drawing(held)
    start = [drawing.change(place, num_bytes, "start") for place, num_bytes in held.start.items()]
    steps = [[action.op, drawing.names.index(action.unit) if action.unit in held.units else -1, *kept(said),
              _number(action.num_sent), drawing.changes(action.op, action.unit, action.changes)]
             for action, said in zip(held.actions, told(held))]
    return {"n": held.world_size, "units": [[name, _number(b)] for name, b in held.units.items()],
            "begin": kept(begin(held)), "start": start, "steps": steps, "figures": figures(held)}


class _Drawing:
    """How what is held looks."""

    def __init__(self, held: Held):
        self.names = list(held.units)
        self._stage = held.zero_stage or 0
        self._held, self._frees = dict(held.start), held.frees

    def change(self, place: Place, num_bytes: float, op: str) -> list[Any]:
        """One change, as data."""
        self._held[place] = num_bytes
        what, unit = place
        look = self._look(what, op) if num_bytes else ""
        return [STATE.index(what), self.names.index(unit), _number(num_bytes), look]

    def changes(self, op: str, unit: str, measured: Sequence[tuple[Place, float]]) -> list[list[Any]]:
        """What an action changes: what was measured, and what only looks different from here on."""
        found = [self.change(place, num_bytes, op) for place, num_bytes in measured]
        silent = [("parameters", unit)] if op == "all_gather" else [("gradients", unit)] if op in REDUCES else (
            [("parameters", name) for name in self.names] if op == "update" and self._stage in (1, 2) else [])
        seen = {place for place, _ in measured}
        return found + [self.change(place, self._held.get(place, 0), op) for place in silent if place not in seen]

    def _look(self, what: str, op: str) -> str:
        if what == "gradients":
            return {"reduce_scatter": "s", "all_reduce": "w"}.get(op, "l")
        if what == "optimizer":
            return "s" if self._stage else "w"
        if what == "parameters" and op == "update":
            return "o"
        return "s" if self._frees and op in ("start", "free") else "w"


def _final(held: Held) -> list[list[str]]:
    """The figures that stand for the whole step."""
    return [[value, meaning] for value, meaning in figures(held) if value]


def _room(held: Held, what: str) -> float:
    """The most of one kind of state that a rank holds, or would hold if it held all of it."""
    now, most = {place: b for place, b in held.start.items() if place[0] == what}, 0.0
    for action in held.actions:
        for place, num_bytes in action.changes:
            if place[0] == what:
                now[place] = num_bytes
                most = max(most, sum(now.values()))
    most = max(most, sum(now.values()))
    if what in ("parameters", "gradients"):
        return _number(max(most, sum(held.units.values())))
    return _number(most * held.world_size if what == "optimizer" and held.zero_stage else most)


def _number(x: float) -> float | int:
    return int(x) if x == int(x) else x
