"""L3: the memory player on a page and in a notebook: what each rank holds of a model's state, step by step.

The data of a run, in addition to what scene.js says about all runs: `n` ranks; `units`, each with its `name` and the
`bytes` of its whole parameters. A stop, of which the first is the start, has

    op, unit    what all ranks do, and the unit's number; null: all of them
    sent        bytes that each rank sends
    set         what each rank holds from then on: [kind, unit, bytes, look]
    kind        0 parameters, 1 gradients, 2 optimizer state, 3 activations
    look        "" nothing, "shard" this rank's shard, "whole" all of it, "updated" all, of which only this rank's shard
                is updated, "own" the gradient of this rank's own part of the batch

A figure without a value is counted while the clock runs. `room` is the most that a rank holds of each kind in any run:
the bars of all runs have the same scale.
"""
from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING, Any

from book.cost import num_passes, sharded_sent_bytes
from book.trace import STATE, Trace
from book.widgets.memory_run import HINT, REDUCES, Held, MemoryMoment, Piece, read_held
from book.widgets.page import Data, Played, heading, listed, names_of
from book.widgets.show import show
from book.words import capitalised, counted, in_bytes

if TYPE_CHECKING:
    from book.widgets.live import Live


def memory_player(runs: Trace | Mapping[Any, Trace], *, title: str | None = None,
                  labels: Sequence[str] | None = None, select: Any = None) -> MemoryPlayer | Live:
    """What each rank holds of a model's state in a training step, or in several that the reader chooses from.

    `runs` are traces recorded with book.record.follow_units, or simulate_sharded's; keys may be tuples such as (stage,
    num_ranks). `labels` name the choices and `select` is the key to open with. Raises TypeError for anything but
    traces, ValueError for a trace that does not say what ranks hold, whose ranks differ, or with more than 8 ranks.
    """
    return show(MemoryPlayer(runs, title, labels, select))


TITLE = "What each rank holds in one training step"


def run_payload(held: Held, source: str) -> Data:
    """One run as JSON data."""
    drawing = _Drawing(held)
    first = [drawing.change(piece, num_bytes, "start") for piece, num_bytes in held.start.items()]
    stops: list[Data] = [{"say": [begin(held)], "phase": "0", "op": "start", "unit": None, "sent": 0, "set": first}]
    for operation, phase, said in zip(held.operations, _phases(held), told(held)):
        stops.append({"say": [said], "phase": phase, "op": operation.op,
                      "unit": drawing.names.index(operation.unit) if operation.unit in held.units else None,
                      "sent": _number(operation.num_sent),
                      "set": drawing.changes(operation.op, operation.unit, operation.changes)})
    units = [{"name": name, "bytes": _number(num_bytes)} for name, num_bytes in held.units.items()]
    return {"source": source, "n": held.world_size, "units": units, "stops": stops, "figures": figures(held)}


def _phases(held: Held) -> str:
    """A digit for each operation: 0 until the first backward, 1 until the first update, then 2."""
    ops = [operation.op for operation in held.operations]
    first, last = (ops.index(op) if op in ops else len(ops) for op in ("backward", "update"))
    return "".join("2" if k >= last else "1" if k >= first else "0" for k in range(len(ops)))


class _Drawing:
    """How what is held looks."""

    def __init__(self, held: Held):
        self.names = list(held.units)
        self._stage = held.zero_stage or 0
        self._held, self._frees = dict(held.start), held.frees

    def change(self, piece: Piece, num_bytes: float, op: str) -> list[Any]:
        """One change, as data."""
        self._held[piece] = num_bytes
        what, unit = piece
        look = self._look(what, op) if num_bytes else ""
        return [STATE.index(what), self.names.index(unit), _number(num_bytes), look]

    def changes(self, op: str, unit: str, measured: Sequence[tuple[Piece, float]]) -> list[list[Any]]:
        """What an operation changes: what was measured, and what only looks different from now on."""
        found = [self.change(piece, num_bytes, op) for piece, num_bytes in measured]
        silent = [("parameters", unit)] if op == "all_gather" else [("gradients", unit)] if op in REDUCES else (
            [("parameters", name) for name in self.names] if op == "update" and self._stage in (1, 2) else [])
        seen = {piece for piece, _ in measured}
        return found + [self.change(piece, self._held.get(piece, 0), op) for piece in silent if piece not in seen]

    def _look(self, what: str, op: str) -> str:
        if what == "gradients":
            return {"reduce_scatter": "shard", "all_reduce": "whole"}.get(op, "own")
        if what == "optimizer":
            return "shard" if self._stage else "whole"
        if what == "parameters" and op == "update":
            return "updated"
        return "shard" if self._frees and op in ("start", "free") else "whole"


def _final(held: Held) -> list[list[str]]:
    """The figures for the whole step."""
    return [[value, meaning] for value, meaning in figures(held) if value]


def _room(held: Held, what: str) -> float:
    """The most of one kind of state that a rank holds, or would hold if it held all of it."""
    now, most = {piece: b for piece, b in held.start.items() if piece[0] == what}, 0.0
    for operation in held.operations:
        for piece, num_bytes in operation.changes:
            if piece[0] == what:
                now[piece] = num_bytes
                most = max(most, sum(now.values()))
    most = max(most, sum(now.values()))
    if what in ("parameters", "gradients"):
        return _number(max(most, sum(held.units.values())))
    return _number(most * held.world_size if what == "optimizer" and held.zero_stage else most)


def _number(x: float) -> float | int:
    return int(x) if x == int(x) else x


PARTS = {1: "whole", 2: "half", 3: "third", 4: "quarter", 5: "fifth", 6: "sixth", 7: "seventh", 8: "eighth"}
SHARDED = ("nothing", "the optimizer's state", "the optimizer's state and the gradients",
           "the optimizer's state, the gradients and the parameters")


def begin(held: Held) -> list[str]:
    """What ranks hold before the first operation: [words to stress, the rest]."""
    whole = _kb(sum(held.units.values()))
    parameters = sum(num_bytes for (what, _), num_bytes in held.start.items() if what == "parameters")
    more = parameters - sum(held.units.values())
    has = (f"a {PARTS[held.world_size]} of the parameters, {_kb(parameters)} of {whole}" if held.frees
           else f"all parameters, {whole}" + (f", and {_kb(more)} for a shard of its own" if more > 0 else ""))
    if held.zero_stage is None:
        return [f"Each rank holds {has}", "."]
    return [f"ZeRO stage {held.zero_stage}", f": the ranks shard {SHARDED[held.zero_stage]}. Each holds {has}."]


def told(held: Held) -> Iterator[list[str]]:
    """Each operation: [words to stress, the rest]."""
    state = dict(held.start)
    last = max((k for k, operation in enumerate(held.operations) if operation.op != "free"), default=0)
    for k, operation in enumerate(held.operations):
        stress, rest = _told(held, operation, state)
        state.update(dict(operation.changes))
        yield [stress, rest + (" The step is over." if k == last == len(held.operations) - 1 else "")]


def _told(held: Held, operation: MemoryMoment, state: Mapping[tuple[str, str], float]) -> tuple[str, str]:
    unit, part = operation.unit, PARTS[held.world_size]
    grown = {what: sum(b - state.get((w, u), 0) for (w, u), b in operation.changes if w == what) for what in STATE}
    if operation.op == "all_gather":
        if grown["parameters"] > 0:
            rest = f"each sends {_kb(operation.num_sent)}; from here on each holds it whole."
        else:
            rest = f"what each has updated goes to all the others; each sends {_kb(operation.num_sent)}."
        return f"All ranks gather {unit}", f": {rest}"
    if operation.op == "reduce_scatter":
        return (f"Reduce-scatter of {unit}", f": each rank keeps its {part} of the mean gradient, "
                f"{_kb(held.units[unit] / held.world_size)}; each sends {_kb(operation.num_sent)}.")
    if operation.op == "all_reduce":
        return (f"All-reduce of {unit}",
                f": each rank gets all of the mean gradient; each sends {_kb(operation.num_sent)}.")
    if operation.op == "free":
        return f"{capitalised(unit)} is freed", f": each rank keeps its {part}, {_kb(operation.changes[0][1])}."
    if operation.op == "drop":
        return "The gradients are dropped", f": {_kb(-grown['gradients'])} on each rank."
    return _computed(held, operation, grown)


def _computed(held: Held, operation: MemoryMoment, grown: dict[str, float]) -> tuple[str, str]:
    made = [f"{_kb(grown[what])} of {what}" for what in ("activations", "gradients") if grown[what] > 0]
    if operation.op == "update":
        sharded = held.zero_stage in (1, 2, 3) and held.world_size > 1
        whose = f"its {PARTS[held.world_size]} of the parameters" if sharded else "all parameters"
        new = f": the optimizer makes its state, {_kb(grown['optimizer'])}." if grown["optimizer"] > 0 else "."
        return f"Each rank updates {whose}", new
    around = " What lies outside the blocks is first and last in use." if operation.unit == "root" else ""
    new = f", which makes {' and '.join(made)}" if made else ""
    return f"{capitalised(operation.op)} of {operation.unit}", f" on each rank's part of the batch{new}.{around}"


def figures(held: Held) -> list[list[str]]:
    """[value, meaning]; an empty value is one that the player counts as it goes."""
    whole = sum(held.units.values())
    totals = list(held.totals())
    sent = sum(operation.num_sent for operation in held.operations)
    return [["", "held by each rank now"], [_kb(max(totals)), "held at most"],
            [_kb(totals[-1]), f"held after the step{_kept(held)}"],
            ["", f"sent by each rank so far, of {_kb(sent)}{_rule(held, sent, whole)}"],
            [_kb(whole), f"n: all parameters, {counted(len(held.units), 'unit')}"]]


def _rule(held: Held, sent: float, whole: float) -> str:
    """The closed form, if it gives what was sent."""
    stage, per_step = held.zero_stage, sent / held.num_steps
    if stage is None or abs(sharded_sent_bytes(stage, held.world_size, whole) - per_step) > 1e-6 * whole:
        return ""
    several = f", {held.num_steps} steps" if held.num_steps > 1 else ""
    return f" = {sum(num_passes(stage))}(N−1)/N·n{several}"


def _kept(held: Held) -> str:
    """What of the state is left, each with its share."""
    left = dict(held.start)
    for operation in held.operations:
        left.update(dict(operation.changes))
    shards = {"parameters": held.frees, "optimizer": bool(held.zero_stage)}
    names = [f"{what}/{held.world_size}" if shards.get(what) and held.world_size > 1 else what
             for what in STATE if sum(b for (w, _), b in left.items() if w == what)]
    return f": {' + '.join(names)}" if names else ""


def _kb(num_bytes: float) -> str:
    return in_bytes(num_bytes, zeros=True)


def in_words(held: Held) -> tuple[list[str], list[list[str]]]:
    """The steps of a run, and its figures at the end."""
    return [stress + rest for stress, rest in [begin(held), *told(held)]], _final(held)


class MemoryPlayer(Played):
    """What a memory player shows: recorded traces by key."""

    widget, maker, takes, hint = "memory", "memory_player", "a trace", f": {HINT}"
    called, usual_title = "memory player", TITLE
    read, payload, said = staticmethod(read_held), staticmethod(run_payload), staticmethod(in_words)

    def common(self) -> Data:
        """How much room all runs need."""
        return {"room": [max(_room(held, what) for held in self.plays.values()) for what in STATE]}

    def words(self) -> str:
        """The figures of each run and, if there is only one, its steps."""
        parts = [heading(self.title)]
        for name, held in zip(names_of(self.traces), self.plays.values()):
            steps, figures = self.said(held)
            named = f"{name}: " if len(self.traces) > 1 else ""
            parts.append(f"<p>{escape(named + '; '.join(f'{value} {meaning}' for value, meaning in figures))}.</p>")
        return "".join([*parts, listed(steps) if len(self.plays) == 1 else ""])
