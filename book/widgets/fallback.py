"""L3: what a reader without JavaScript gets: the run in words."""
from __future__ import annotations

from collections import defaultdict
from html import escape

from book.widgets.run import Run, State, Transfer
from book.widgets.words import calls_in_words

MOST_STEPS, MOST_MESSAGES = 14, 60  # longer runs are summed up: this text is for reading, not for data
DOES = {"reduce": "added", "copy": "replacing what was there"}


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
