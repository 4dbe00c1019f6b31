"""L3: a player on a static page: deterministic HTML that holds its data and, in words, what it will show."""
from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from book.widgets.fallback import describe, fallback
from book.widgets.payload import Options, payload
from book.widgets.run import as_trace, read_run
from book.widgets.words import spelled


class Shown:
    """What a player shows: traces by key, a title, and the options of `play` or `race`; it shows itself as HTML."""

    def __init__(self, traces: Mapping[Any, Any], title: str, options: Options):
        self.traces = {key: as_trace(what) for key, what in traces.items()}
        self.title, self.options = title, options
        self._runs = [read_run(trace) for trace in self.traces.values()]
        self._data = payload(self.traces, title, options, with_backend=False)

    def with_trace(self, what: Any) -> Shown:
        """The same player of another trace."""
        return Shown({"": what}, self.title, replace(self.options, labels=None, select=None))

    def live_json(self) -> str:
        """The data as a live widget gets it: with the backend's name, which a stored page leaves out."""
        return _compact(payload(self.traces, self.title, self.options, with_backend=True))

    def html(self) -> str:
        """The div that player.js mounts; its data is in an attribute, so that no markup in a title can break out."""
        data = _compact(self._data).replace("&", "&amp;").replace("'", "&#39;").replace("<", "&lt;")
        body = fallback(self.title, *self._about())
        return f"<div data-lockstep-player='{data}'>{body}</div>"

    def text(self) -> str:
        """One line that says what is shown."""
        return describe(self.title, *self._about())

    def _about(self) -> tuple[list[str], list[Any], str]:
        names = [", ".join(map(str, key)) if isinstance(key, tuple) else str(key) for key in self.traces]
        sources = dict.fromkeys(trace.source for trace in self.traces.values())
        return names, self._runs, " and ".join(sources)

    def __repr__(self) -> str:
        return self.text()

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        return {"text/plain": self.text(), "text/html": self.html()}


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
