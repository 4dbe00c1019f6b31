"""L3: the chunk player on a page and in a notebook, and what a reader without JavaScript gets: the run in words."""
from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from html import escape
from typing import Any

from book.widgets.choices import names_of
from book.widgets.chunks_data import Options, payload
from book.widgets.chunks_run import Run, State, Transfer, as_trace, read_run
from book.widgets.chunks_words import calls_in_words
from book.widgets.page import Page
from book.widgets.terms import spelled

MOST_STEPS, MOST_MESSAGES = 14, 60  # longer runs are summed up: this text is for reading, not for data
DOES = {"reduce": "added", "copy": "replacing what was there"}


class Shown(Page):
    """What a player shows: traces by key, a title, and the options of `play` or `race`."""

    widget = "player"

    def __init__(self, traces: Mapping[Any, Any], title: str, options: Options):
        self.traces = {key: as_trace(what) for key, what in traces.items()}
        self.title, self.options = title, options
        self._runs = [read_run(trace) for trace in self.traces.values()]
        self._data = payload(self.traces, title, options, with_backend=False)

    def with_trace(self, what: Any) -> Shown:
        """The same player of another trace."""
        return Shown({"": what}, self.title, replace(self.options, labels=None, select=None))

    def data(self, live: bool) -> dict[str, Any]:
        """The players' data: with the backend's name where it is live."""
        return payload(self.traces, self.title, self.options, with_backend=True) if live else self._data

    def words(self) -> str:
        """The steps, where they are few."""
        return fallback(self.title, *self._about())

    def text(self) -> str:
        """One line that says what is shown."""
        return describe(self.title, *self._about())

    def _about(self) -> tuple[list[str], list[Any], str]:
        sources = dict.fromkeys(trace.source for trace in self.traces.values())
        return names_of(self.traces), self._runs, " and ".join(sources)


def title_of(traces: Mapping[Any, Any]) -> str:
    """A title from the traces' names where they all have the same."""
    names = {getattr(what, "name", None) for what in traces.values()}
    name = names.pop() if len(names) == 1 else None
    if not name:
        return "What every rank's chunks hold"
    words = spelled(name)
    return words[0].upper() + words[1:]


def describe(title: str, names: list[str], runs: list[Run], source: str) -> str:
    """One line that says what the player shows; the same for equal traces."""
    if len(runs) == 1:
        return f"{title}: player, {_size(runs[0])}, {source}"
    return f"{title}: player of {len(runs)} runs ({', '.join(names)}), {source}"


def fallback(title: str, names: list[str], runs: list[Run], source: str) -> str:
    """HTML: the runs' sizes, and every step in words where that is short."""
    parts = [f"<p><strong>{escape(title)}</strong> ({escape(source)})</p>"]
    if len(runs) > 1:
        rows = "".join(f"<li>{escape(name)}: {_size(run)}</li>" for name, run in zip(names, runs))
        return parts[0] + f"<ul>{rows}</ul>"
    (run,) = runs
    if run.num_steps > MOST_STEPS or len(run.transfers) > MOST_MESSAGES:
        return parts[0] + f"<p>{_size(run)}, {len(run.transfers)} chunks sent.</p>"
    sent, called = defaultdict(list), defaultdict(list)
    for transfer in run.transfers:
        sent[transfer.leaves].append(transfer)
    for call in run.calls:
        called[call.step].append(call)
    steps = (_sent(sent[step], held) + [escape(calls_in_words(called[step], run.world_size))] * bool(called[step])
             for step, held in zip(range(run.num_steps), run.states()))
    return parts[0] + "<ol>" + "".join(f"<li>{'; '.join(step)}</li>" for step in steps) + "</ol>"


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


def _size(run: Run) -> str:
    return f"{run.world_size} ranks, {run.num_steps} steps"
