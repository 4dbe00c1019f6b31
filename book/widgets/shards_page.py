"""L3: the sharded product on a page and in a notebook."""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from book.trace import Trace
from book.widgets.choices import arranged, names_of
from book.widgets.page import Page
from book.widgets.shards import read_play
from book.widgets.shards_data import figures, run_payload
from book.widgets.shards_words import begin, told
from book.widgets.terms import origin


class ShardedProduct(Page):
    """What a sharded product shows: traces by key."""

    widget = "shards"

    def __init__(self, traces: Mapping[Any, Trace], title: str | None = None, labels: Sequence[str] | None = None,
                 select: Any = None):
        for trace in traces.values():
            if not isinstance(trace, Trace):
                raise TypeError("sharded_product() takes a recorded Trace (run.trace), or a mapping of them, not "
                                f"{type(trace).__name__}")
        self.traces, self._labels, self._select = dict(traces), labels, select
        self._plays = {key: read_play(trace) for key, trace in self.traces.items()}
        mlp = any("B" in play.matrices for play in self._plays.values())
        self._given_title, self.title = title, title or ("A sharded MLP" if mlp else "A sharded matrix product")

    def with_trace(self, what: Any) -> ShardedProduct:
        """The same widget of another trace."""
        return ShardedProduct({"": what}, self._given_title)

    def data(self, live: bool) -> dict[str, Any]:
        """The widget's data; where it is live, with the backend's name."""
        runs = {key: run_payload(play, origin(self.traces[key], live))
                for key, play in self._plays.items()}
        return {"v": 1, "title": self.title, **arranged(runs, self._labels, self._select)}

    def text(self) -> str:
        """One line that says what is shown."""
        ranks = " and ".join(dict.fromkeys(str(play.world_size) for play in self._plays.values()))
        several = f" of {len(self.traces)} runs ({', '.join(names_of(self.traces))})" if len(self.traces) > 1 else ""
        return f"{self.title}: sharded product{several}, {ranks} ranks, recorded"

    def words(self) -> str:
        """The steps of each run, and its figures."""
        parts = [f"<p><strong>{escape(self.title)}</strong></p>"]
        for name, trace, play in zip(names_of(self.traces), self.traces.values(), self._plays.values()):
            if len(self.traces) > 1:
                parts.append(f"<p>{escape(name)}:</p>")
            texts = [begin(play), *(stress + rest for stress, rest, _ in told(play))]
            parts.append(f"<ol>{''.join(f'<li>{escape(text)}</li>' for text in texts)}</ol>")
            pairs = "; ".join(f"{value} {meaning}" for value, meaning in figures(play))
            parts.append(f"<p>{escape(pairs)}. ({escape(origin(trace, with_backend=False))})</p>")
        return "".join(parts)
