"""L3: widgets that are live, and the panel that reruns what it shows (anywidget and ipywidgets)."""
from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import anywidget
import ipywidgets
import traitlets

from book.schedule import PipelineSchedule
from book.trace import Trace
from book.widgets.page import Page
from book.widgets.registry import STYLE, module, text_of


class Live(anywidget.AnyWidget):
    """A live widget. Traits: `step` and `playing` go both ways, `payload` is the data, `error` a text to show.

    Setting `trace` shows another trace; `shown` is what a static page shows.
    """

    payload = traitlets.Unicode().tag(sync=True)
    step = traitlets.Int(0).tag(sync=True)
    playing = traitlets.Bool(False).tag(sync=True)
    error = traitlets.Unicode("").tag(sync=True)

    def __init__(self, shown: Page):
        self.shown = shown
        super().__init__(payload=shown.live_json())

    @property
    def trace(self) -> Trace:
        """The trace that is shown, the first one of several; raises AttributeError if there is none."""
        return self._shown_trace()

    @trace.setter
    def trace(self, what: Any) -> None:
        self.shown = self.shown.with_trace(what)
        self.step, self.playing, self.error = 0, False, ""
        self.payload = self.shown.live_json()

    def save(self, path: str | Path) -> None:
        """Write what a static page shows to `path`, as one HTML file that needs no network."""
        self.shown.save(path)

    def _shown_trace(self) -> Trace:
        if not self.shown.traces:
            raise AttributeError(f"there is no trace behind this widget: {self.shown.text()}")
        return next(iter(self.shown.traces.values()))

    def __repr__(self) -> str:
        return self.shown.text()

    def _repr_mimebundle_(self, **kwargs: Any) -> Any:
        """The live view, with the HTML and text that a stored notebook keeps."""
        return _beside(super()._repr_mimebundle_(**kwargs), self.shown)


class Game(Live):
    """A live pipeline game. The trait `placed` is what the reader has placed so far, as JSON; `schedule` reads it."""

    shown: Any  # a PipelineGame
    placed = traitlets.Unicode("[]").tag(sync=True)

    @property
    def schedule(self) -> PipelineSchedule:
        """What was placed, complete or not."""
        return self.shown.schedule(self.placed)

    def _shown_trace(self) -> Trace:
        return self.shown.simulate(self.placed)


OWN = {"game": Game}  # live widgets with a class of their own


@cache
def live_class(widget: str) -> type[Live]:
    """The class of a live widget, by its name in the registry."""
    assets = {"_esm": module(widget), "_css": text_of(STYLE)}
    return type(f"Live{widget.capitalize()}", (OWN.get(widget, Live),), assets)


class Panel(ipywidgets.VBox):
    """Controls for the arguments of `run`, a button, and the player of the trace that `run` returned last."""

    def __init__(self, run: Callable[..., Trace], page_of: Callable[[Trace], Page], controls: Mapping[str, Any]):
        self._run, self._controls = run, {name: _control(name, value) for name, value in controls.items()}
        page = page_of(run(**self._values()))
        self.player = live_class(page.widget)(page)
        self.button = ipywidgets.Button(description="Run", tooltip="Run again with these values")
        self.button.on_click(self._clicked)
        super().__init__([ipywidgets.HBox([*self._controls.values(), self.button]), self.player])

    def _values(self) -> dict[str, Any]:
        return {name: control.value for name, control in self._controls.items()}

    def _clicked(self, _button: ipywidgets.Button) -> None:
        if self.button.disabled:
            return
        self.button.disabled, self.button.description = True, "running …"
        try:
            self.player.trace = self._run(**self._values())
        except Exception as error:  # whatever the learner's code raises belongs in the panel, not in a lost log
            self.player.error = f"{type(error).__name__}: {error}"
        finally:
            self.button.disabled, self.button.description = False, "Run"

    def save(self, path: str | Path) -> None:
        """Write the player of the last run to `path`, as one HTML file that needs no network."""
        self.player.save(path)

    def __repr__(self) -> str:
        return f"Panel ({', '.join(self._controls)}): {self.player.shown.text()}"

    def _repr_mimebundle_(self, **kwargs: Any) -> Any:
        """The live panel, with the recorded player of the last run."""
        return _beside(super()._repr_mimebundle_(**kwargs), self.player.shown, repr(self))


def _beside(live: Any, shown: Page, text: str | None = None) -> Any:
    data, metadata = live if isinstance(live, tuple) else (live or {}, {})
    return {**data, "text/plain": text or shown.text(), "text/html": shown.html()}, metadata


def _control(name: str, value: Any) -> ipywidgets.Widget:
    words = name.replace("_", " ")
    if isinstance(value, ipywidgets.Widget):
        return value
    if isinstance(value, range):
        return ipywidgets.IntSlider(value.start, value.start, value[-1], value.step, description=words)
    if isinstance(value, tuple) and len(value) == 2 and all(isinstance(x, int) for x in value):
        return ipywidgets.IntSlider(value[0], *value, description=words)
    if isinstance(value, (list, tuple)) and value:
        return ipywidgets.Dropdown(options=list(value), value=value[0], description=words)
    raise ValueError(f"panel: {name} can't be {value!r}: give (lowest, highest), a range, choices or a widget")
