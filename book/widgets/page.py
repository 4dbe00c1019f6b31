"""L3: widgets on a static page: deterministic HTML that holds their data and, in words, what they will show."""
from __future__ import annotations

import json
from abc import ABC, abstractmethod
from typing import Any

from book.trace import Trace


class Page(ABC):
    """What a widget leaves in a stored notebook: HTML that holds its data and, in words, what it will show."""

    widget: str  # which script draws it, by the name that it gives to define() in controls.js
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


def _compact(data: Any) -> str:
    return json.dumps(data, separators=(",", ":"), ensure_ascii=False)
