"""L3: widgets on a static page: deterministic HTML that holds their data and, in words, what they will show."""
from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from book.trace import Trace
from book.widgets.registry import DATA_VERSION, standalone
from book.widgets.terms import origin

Data = dict[str, Any]


class Page(ABC):
    """What a widget leaves in a stored notebook: HTML that holds its data and, in words, what it will show."""

    widget: str  # which script draws it, by the name that it gives to define() in scene.js
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

    def several(self) -> str:
        """How many runs there are, and what they are called, if there is more than one."""
        return f" of {len(self.traces)} runs ({', '.join(names_of(self.traces))})" if len(self.traces) > 1 else ""

    def ranks(self) -> str:
        """How many ranks the runs have: "4 ranks", "2 and 4 ranks"."""
        return f"{each_once(str(trace.world_size) for trace in self.traces.values())} ranks"

    def sources(self) -> str:
        """Where the runs come from: "simulated", "simulated and executed"."""
        return each_once(trace.source for trace in self.traces.values())

    def live_json(self) -> str:
        """The data as a live widget gets it."""
        return self._json(live=True)

    def html(self) -> str:
        """The div that a script mounts; its data is in an attribute, so markup in a title can't break out."""
        data = self._json(live=False).replace("&", "&amp;").replace("'", "&#39;").replace("<", "&lt;")
        return f"<div data-lockstep-{self.widget}='{data}'>{self.words()}</div>"

    def _json(self, live: bool) -> str:
        return json.dumps({"v": DATA_VERSION, **self.data(live)}, separators=(",", ":"), ensure_ascii=False)

    def save(self, path: str | Path) -> None:
        """Write one HTML file to `path` that shows the widget in any browser, without a network."""
        Path(path).write_text(standalone(self.widget, self.text(), self.html()), encoding="utf-8")

    def __repr__(self) -> str:
        return self.text()

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        return {"text/plain": self.text(), "text/html": self.html()}


class Recorded(Page):
    """A page of a trace, or of several that the reader chooses from by their keys; `select` is the key to open with.

    `maker` is the function that readers call, and `takes` what it takes. Raises TypeError for anything else, ValueError
    for no trace and for another key.
    """

    maker: str
    takes = "a recorded Trace (run.trace)"
    hint = ""  # how to get one

    def __init__(self, runs: Any, title: str | None, labels: Sequence[str] | None, select: Any):
        self.traces = mapping(runs if isinstance(runs, Mapping) else {"": runs})
        check_choice("select", select, (None, *self.traces))
        for trace in self.traces.values():
            if not isinstance(trace, Trace):
                raise TypeError(f"{self.maker}() takes {self.takes}, or a mapping of them, not "
                                f"{type(trace).__name__}{self.hint}")
        self._given_title, self._labels, self._select = title, labels, select

    def with_trace(self, what: Any) -> Page:
        """The same widget of another trace."""
        return type(self)({"": what}, self._given_title, None, None)


class Played(Recorded):
    """A page of runs that go from stop to stop: each is read once, and drawn and told from what was read."""

    called: str  # by a line of text
    usual_title: str
    read: Callable[[Trace], Any]  # raises ValueError for a trace that can't be shown
    payload: Callable[[Any, str], Data]  # a run as JSON data, with where it comes from
    said: Callable[[Any], tuple[Iterable[str], Iterable[Sequence[str]]]]  # its stops in words, its figures

    def __init__(self, runs: Any, title: str | None = None, labels: Sequence[str] | None = None, select: Any = None):
        super().__init__(runs, title, labels, select)
        self.plays = {key: self.read(trace) for key, trace in self.traces.items()}
        self.title = title or self.usual_title

    def data(self, live: bool) -> Data:
        """The widget's data; in a live notebook with the backend's name."""
        runs = {key: self.payload(play, origin(self.traces[key], live)) for key, play in self.plays.items()}
        return {"title": self.title, **self.common(), **arranged(runs, self._labels, self._select)}

    def common(self) -> Data:
        """The data that all runs share."""
        return {}

    def text(self) -> str:
        """One line that says what is shown."""
        return f"{self.title}: {self.called}{self.several()}, {self.ranks()}, {self.sources()}"

    def words(self) -> str:
        """The stops of each run, and its figures."""
        parts = [heading(self.title)]
        for name, trace, play in zip(names_of(self.traces), self.traces.values(), self.plays.values()):
            steps, figures = self.said(play)
            if len(self.traces) > 1:
                parts.append(f"<p>{escape(name)}:</p>")
            parts.append(listed(steps))
            pairs = "; ".join(f"{value} {meaning}" for value, meaning in figures)
            parts.append(f"<p>{escape(pairs)}. ({escape(origin(trace, with_backend=False))})</p>")
        return "".join(parts)


def table(rows: Iterable[Sequence[str]], head: Sequence[str] = ()) -> str:
    """An HTML table of texts."""
    lines = [("th", head)] * bool(head) + [("td", row) for row in rows]
    cells = ["".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in row) for tag, row in lines]
    return f"<table>{''.join(f'<tr>{row}</tr>' for row in cells)}</table>"


def heading(title: str, source: str = "") -> str:
    """The HTML at the start of a page's words: its title, and where its data comes from."""
    return f"<p><strong>{escape(title)}</strong>{f' ({escape(source)})' * bool(source)}</p>"


def listed(texts: Iterable[str], tag: str = "ol") -> str:
    """An HTML list of texts."""
    return f"<{tag}>{''.join(f'<li>{escape(text)}</li>' for text in texts)}</{tag}>"


def arranged(runs: Mapping[Any, Data], labels: Sequence[str] | None, select: Any, integers: str = "ranks") -> Data:
    """`axes`, the choices, and `runs`, each with its place `at` on the axes; the run to open with comes first.

    The keys of `runs` (or tuples of them) become the choices. `labels` names each part of a key; without it a part that
    is an integer in all of them is called `integers`, and others "run". Raises ValueError for keys or labels that don't
    fit.
    """
    keys = _keys(runs, labels)
    parts = [list(dict.fromkeys(values)) for values in zip(*keys)]
    named = labels or [integers if all(type(v) is int for v in values) else "run" for values in parts]
    axes = [{"label": name, "values": [str(value) for value in values]} for name, values in zip(named, parts)]
    placed = [{"at": [axis["values"].index(str(part)) for axis, part in zip(axes, key)], **data}
              for key, data in zip(keys, runs.values())]
    if select is not None:
        placed.insert(0, placed.pop(list(runs).index(select)))
    return {"axes": axes if len(runs) > 1 else [], "runs": placed}


def each_once(texts: Iterable[str]) -> str:
    """The different texts, in their order, joined by "and"."""
    return " and ".join(dict.fromkeys(texts))


def names_of(runs: Iterable[Any]) -> list[str]:
    """The runs' keys as text."""
    return [", ".join(map(str, key)) if isinstance(key, tuple) else str(key) for key in runs]


def _keys(runs: Mapping[Any, Any], labels: Sequence[str] | None) -> list[tuple[Any, ...]]:
    keys = [key if isinstance(key, tuple) else (key,) for key in runs]
    if len({len(key) for key in keys}) > 1:
        raise ValueError("the keys of the runs to choose from must be tuples of one length, or no tuples at all")
    for values in zip(*keys):
        texts = [str(value) for value in dict.fromkeys(values)]
        if len(set(texts)) < len(texts):
            raise ValueError(f"two keys of the runs to choose from read {max(texts, key=texts.count)!r}: give keys "
                             "that a reader can tell apart")
    if labels is not None and (isinstance(labels, str) or len(labels) != len(keys[0])):
        raise ValueError(f"labels names each part of a key: give {len(keys[0])} of them, not {labels!r} (one label "
                         f"for keys that are no tuples)")
    return keys


def mapping(what: Any) -> dict[Any, Any]:
    """Runs by key: a mapping as it is, a sequence by number, or a single run; raises ValueError for none."""
    if isinstance(what, Mapping):
        traces = dict(what)
    elif isinstance(what, Sequence) and not isinstance(what, str):
        traces = dict(enumerate(what, start=1))
    else:
        traces = {"": what}
    if not traces:
        raise ValueError("there is nothing to play: give at least one trace or schedule")
    return traces


def check_choice(name: str, value: Any, choices: tuple[Any, ...]) -> None:
    """Raise ValueError for a value that is not among the choices."""
    if value not in choices:
        known = ", ".join(str(choice) for choice in choices if choice is not None)
        raise ValueError(f"{name} can't be {value!r}: use one of {known}")
