"""L3: widgets on a static page: deterministic HTML that holds their data and, in words, what they will show."""
from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from book.trace import Trace
from book.widgets.choices import names_of
from book.widgets.fallback import describe, fallback
from book.widgets.payload import Options, payload
from book.widgets.run import as_trace, read_run
from book.widgets.words import spelled


class Page(ABC):
    """What a widget leaves in a stored notebook: HTML that holds its data and, in words, what it will show."""

    widget = "player"  # which script draws it, by the name that it gives to define() in controls.js
    traces: dict[Any, Trace]

    @abstractmethod
    def data(self, live: bool) -> dict[str, Any]:
        """The data to draw; on a page (not `live`) the same on every machine, without backends or measured times."""

    @abstractmethod
    def words(self) -> str:
        """HTML for a reader without JavaScript."""

    @abstractmethod
    def text(self) -> str:
        """One line that says what is shown."""

    @abstractmethod
    def with_trace(self, what: Any) -> Page:
        """The same widget of another trace."""

    def live_json(self) -> str:
        """The data as a live widget gets it."""
        return _compact(self.data(live=True))

    def html(self) -> str:
        """The div that a script mounts; its data is in an attribute, so that no markup in a title can break out."""
        data = _compact(self.data(live=False)).replace("&", "&amp;").replace("'", "&#39;").replace("<", "&lt;")
        return f"<div data-lockstep-{self.widget}='{data}'>{self.words()}</div>"

    def __repr__(self) -> str:
        return self.text()

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        return {"text/plain": self.text(), "text/html": self.html()}


class Shown(Page):
    """What a player shows: traces by key, a title, and the options of `play` or `race`."""

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


def _compact(data: Any) -> str:
    return json.dumps(data, separators=(",", ":"), ensure_ascii=False)
