"""L3: the bucket timeline on a page and in a notebook: recorded runs, replayed on a modelled clock."""
from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import Any

from book.replay import Overlap, followed, overlap
from book.trace import Trace
from book.widgets.choices import arranged, names_of
from book.widgets.page import Page
from book.widgets.terms import origin
from book.widgets.timeline import NO_BUCKET, Backward, read_backward, run_payload
from book.widgets.units import in_seconds

MOST_ROWS, MOST_NAMES = 24, 12  # longer tables are for data, not for reading
TITLE = "One backward pass, bucket by bucket"


class BucketTimeline(Page):
    """What a bucket timeline shows: recorded runs by key and the replay that gives their events modelled times."""

    widget = "timeline"

    def __init__(self, traces: Mapping[Any, Trace], replay: Callable[[Trace], Trace] | None, title: str | None = None,
                 labels: Sequence[str] | None = None, select: Any = None):
        self.traces, self._replay = dict(traces), replay
        self.title, self._labels, self._select = title or TITLE, labels, select
        self._modelled = {key: self._replayed(trace) for key, trace in self.traces.items()}
        self._data = self._payload(self._modelled, live=False)

    def with_trace(self, what: Any) -> BucketTimeline:
        """The same timeline of another trace."""
        return BucketTimeline({"": what}, self._replay, self.title)

    def data(self, live: bool) -> dict[str, Any]:
        """The timeline's data; where it is live, runs on GPUs have the times that were measured there."""
        if not live:
            return self._data
        shown = {key: trace if _has_true_times(trace) else self._modelled[key] for key, trace in self.traces.items()}
        return self._payload(shown, live=True)

    def text(self) -> str:
        """One line that says what is shown."""
        ranks = " and ".join(dict.fromkeys(str(trace.world_size) for trace in self.traces.values()))
        several = f" of {len(self.traces)} runs ({', '.join(names_of(self.traces))})" if len(self.traces) > 1 else ""
        return f"{self.title}: bucket timeline{several}, {ranks} ranks, order recorded, durations modelled"

    def words(self) -> str:
        """The figures of each run and, where there is one run, its buckets."""
        rows = [_row([name, str(len(_numbers(read_backward(trace)))), *_figures(overlap(trace))])
                for name, trace in zip(names_of(self.traces), self._modelled.values())]
        head = _row(["run", "buckets", "step", "all-reduces", "hidden behind backward", "exposed"], "th")
        table = f"<table>{head}{''.join(rows)}</table>"
        return f"<p><strong>{escape(self.title)}</strong> ({escape(self._source())})</p>{table}{self._buckets()}"

    def _source(self) -> str:
        return self._data["runs"][0]["source"]

    def _buckets(self) -> str:
        """A table of the buckets of the run that is shown first."""
        key = next(iter(self.traces)) if self._select is None else self._select
        run = read_backward(self._modelled[key])
        rows = [_bucket_row(run, i) for i in range(len(run.buckets))]
        if len(rows) > MOST_ROWS:
            return ""
        of = f" of {escape(names_of([key])[0])}" if len(self.traces) > 1 else ""
        head = _row(["bucket", "its gradients, in the order they are ready", "full", "all-reduce"], "th")
        return f"<p>Buckets{of}, as rank 0 sees them:</p><table>{head}{''.join(rows)}</table>"

    def _replayed(self, trace: Any) -> Trace:
        if not isinstance(trace, Trace):
            raise TypeError("bucket_timeline() takes a recorded Trace (run.trace), or a mapping of them, not "
                            f"{type(trace).__name__}")
        if trace.clock == "modelled":
            return trace
        if self._replay is None:
            raise ValueError("a recorded trace needs a replay, Replay(backward_s_per_byte, link): what processes that "
                             "share cores took says nothing of how long it takes elsewhere")
        return self._replay(trace)

    def _payload(self, shown: Mapping[Any, Trace], live: bool) -> dict[str, Any]:
        names: dict[tuple[str, float], int] = {}
        runs = {key: run_payload(trace, source_of(trace, live), names) for key, trace in shown.items()}
        known = {"names": [name for name, _ in names], "sizes": [round(num_bytes) for _, num_bytes in names]}
        return {"v": 1, "title": self.title, **known,
                **arranged(runs, self._labels, self._select, integers="run")}


def source_of(trace: Trace, live: bool) -> str:
    """Where a run's order and times come from; the backend is named only where it may differ between machines."""
    if trace.clock == "measured":
        return f"{origin(trace, live)} · durations measured"
    return f"order {origin(trace, live)} · durations modelled"


def _has_true_times(trace: Trace) -> bool:
    """On GPUs each rank computes by itself, and NCCL beside it; on gloo all share a few cores.

    A run that hung has all-reduces that never ended, so there is nothing to draw but what was meant to be.
    """
    return trace.clock == "measured" and trace.backend == "nccl" and all(
        event.end_s is not None for program in followed(trace) for event in program)


def _numbers(run: Backward) -> list[int]:
    return [number for _, number in run.buckets if number != NO_BUCKET]


def _figures(found: Overlap) -> list[str]:
    if not found.communication_s:  # one rank, or nothing sent
        return [_ms(found.step_s), "none", "–", "–"]
    hidden = f"{_ms(found.hidden_s)} ({found.hidden_s / found.communication_s:.0%})"
    return [_ms(found.step_s), _ms(found.communication_s), hidden, _ms(found.exposed_s)]


def _bucket_row(run: Backward, index: int) -> str:
    number = run.buckets[index][1]
    own = [gradient for gradient in run.gradients[0] if gradient.bucket == index]
    flights = [flight.span for flight, ranks in run.flights.items() if flight.bucket == index and 0 in ranks]
    names = ", ".join(f"{g.name} ({g.num_bytes:,.0f} B)" for g in own[:MOST_NAMES])
    names += f" and {len(own) - MOST_NAMES} more" if len(own) > MOST_NAMES else ""
    full = _ms(run.seconds(own[-1].span[1])) if own else "–"
    flown = ", ".join(f"{_ms(run.seconds(start))} to {_ms(run.seconds(end))}" for start, end in flights)
    return _row(["none" if number == NO_BUCKET else str(number), names, full, flown or "none"])


def _row(cells: Sequence[str], tag: str = "td") -> str:
    return f"<tr>{''.join(f'<{tag}>{escape(cell)}</{tag}>' for cell in cells)}</tr>"


def _ms(seconds: float) -> str:
    return in_seconds(seconds, "ms")
