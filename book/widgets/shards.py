"""L3: the sharded product on a page and in a notebook, and the JSON that its player draws.

A run has, beside what scene.js says of all runs, `n` ranks, the bytes of an `item` and

    matrices   what is drawn on each rank, in the places of `slots`; a later one of a slot and line takes its place:
               name, recipe, shape, slot, line (0: forward, 1: gradients)
    grid       into how many blocks, [down, across], the run cuts a matrix
    lanes      how many parts of a sum its blocks are drawn with, 1 where the run cuts no sum; bias: one more for it
    paint      what colours a block without lanes: its "row", its "column" or nothing ("")

A stop, of which the first is the start, has

    set        blocks that change, [rank, matrix, number row by row, contents]: how often each lane is in it, null where
               that is unknown; one without contents is there no longer
    moves      [matrix, from, to, numbers of its blocks]
    busy       the matrices that it works on
"""
from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING, Any

from book.trace import Trace
from book.widgets.page import Page, arranged, check_choice, heading, listed, mapping, names_of, show
from book.widgets.shards_run import Contents, Place, Play, State, Step, read_play
from book.widgets.shards_words import begin, told
from book.widgets.terms import in_bytes, origin

if TYPE_CHECKING:
    from book.widgets.live import Live


def sharded_product(runs: Trace | Mapping[Any, Trace], *, title: str | None = None,
                    labels: Sequence[str] | None = None, select: Any = None) -> ShardedProduct | Live:
    """A matrix product or MLP that ranks have cut, or several that the reader chooses from, step by step.

    `runs` are traces recorded with `trace_product` or `trace_mlp` of book.shards, which read what each block
    holds off its numbers. `labels` name the choices and `select` is the key to open with. Raises TypeError for what
    is no trace, ValueError for a trace that follows no product.
    """
    traces = mapping(runs if isinstance(runs, Mapping) else {"": runs})
    check_choice("select", select, (None, *traces))
    return show(ShardedProduct(traces, title, labels, select))


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
        return f"{self.title}: sharded product{self.several()}, {ranks} ranks, recorded"

    def words(self) -> str:
        """The steps of each run, and its figures."""
        parts = [heading(self.title)]
        for name, trace, play in zip(names_of(self.traces), self.traces.values(), self._plays.values()):
            if len(self.traces) > 1:
                parts.append(f"<p>{escape(name)}:</p>")
            texts = [begin(play), *(stress + rest for stress, rest, _ in told(play))]
            parts.append(listed(texts))
            pairs = "; ".join(f"{value} {meaning}" for value, meaning in figures(play))
            parts.append(f"<p>{escape(pairs)}. ({escape(origin(trace, with_backend=False))})</p>")
        return "".join(parts)


PHASES = {"collective": "1", "message": "1", "return": "2", "gradient": "2", "backward": "2"}  # of others: 0


def run_payload(play: Play, source: str) -> dict[str, Any]:
    """One run as JSON data."""
    drawing, states = _Drawing(play), play.states()
    before = next(states)
    start = [block for rank, state in enumerate(play.start) for block in drawing.blocks(rank, state)]
    stops: list[dict[str, Any]] = [
        {"say": [["", begin(play)]], "phase": "0", "set": start, "moves": [], "busy": [0]}]
    for step, said, after in zip(play.steps, told(play), states):
        changes = [block for rank, action in sorted(step.actions.items())
                   for block in drawing.gone(rank, action.replaced(before[rank])) + drawing.blocks(rank, action.holds)]
        stops.append({"say": [said], "phase": PHASES.get(step.kind, "0"), "set": changes,
                      "moves": drawing.moves(step, before), "busy": drawing.busy(step)})
        before = after
    return {"n": play.world_size, "source": source, "item": play.num_bytes, "slots": drawing.slots,
            "matrices": drawing.matrices, "stops": stops, "figures": figures(play)}


class _Drawing:
    """Which matrices are drawn where, and how finely."""

    def __init__(self, play: Play):
        self._play = play
        self._cut, self._axes = cuts(play)
        self._names = list(play.matrices)
        mlp = "B" in play.matrices
        self.slots = ["X", "A", "H", "B", "Y"] if mlp else ["X", "A", "Y"]
        self.matrices = [self._matrix(name) for name in self._names]

    def _matrix(self, name: str) -> dict[str, Any]:
        matrix, base = self._play.matrices[name], name.removeprefix("d")
        slot = self.slots.index({"P": "H"}.get(base, base))
        lanes = self._play.world_size if matrix.summed in self._cut and matrix.summed else 1
        axes = [axis for axis in (0, 1) if (name, axis) in self._axes]
        painted = min(axes, key=lambda axis: matrix.dims[axis] == "T", default=None)  # tokens are cut beside another
        paint = {None: "", 0: "row", 1: "column"}[painted]
        grid = [self._play.world_size if axis in axes else 1 for axis in (0, 1)]
        return {"name": name, "recipe": matrix.recipe, "shape": list(self._play.shapes[name]), "slot": slot,
                "line": int(name != base), "grid": grid, "lanes": lanes, "paint": paint,
                **({"bias": 1} if self._play.bias and name == "Y" else {})}

    def blocks(self, rank: int, state: State) -> list[list[Any]]:
        """The blocks of a state as the drawing cuts them."""
        found = {self._coarse(place): self._shown(place, contents) for place, contents in state.items()}
        return [[rank, matrix, number, shown] for (matrix, number), shown in found.items()]

    def gone(self, rank: int, places: Iterable[Place]) -> list[list[Any]]:
        """The blocks that a rank has no longer."""
        return [[rank, *at] for at in dict.fromkeys(map(self._coarse, places))]

    def moves(self, step: Step, before: list[State]) -> list[list[Any]]:
        """What of each rank's blocks goes to which other: those that it sent and that the other has afterwards."""
        if step.kind not in ("collective", "message"):
            return []
        found: dict[tuple[int, int, int], list[int]] = {}
        for src, sender in step.actions.items():
            names = {block.matrix for block in sender.blocks}
            held = {place for place in before[src] if place[0] in names}
            for dst, action in step.actions.items():
                given = held & action.holds.keys() if step.kind == "collective" else held
                for place in sorted(given) if dst in (sender.sent_to or step.actions) and dst != src else ():
                    matrix, number = self._coarse(place)
                    numbers = found.setdefault((matrix, src, dst), [])
                    numbers.extend([number] if number not in numbers else [])
        return [[*key, numbers] for key, numbers in found.items()]

    def busy(self, step: Step) -> list[int]:
        """The matrices that a step works on."""
        names = {block.matrix for action in step.actions.values() for block in action.blocks}
        names |= {place[0] for action in step.actions.values() for place in action.holds}
        return sorted(self._names.index(name) for name in names)

    def _coarse(self, place: Place) -> tuple[int, int]:
        name, row, column = place
        down, across = self.matrices[self._names.index(name)]["grid"]
        return self._names.index(name), (row if down > 1 else 0) * across + (column if across > 1 else 0)

    def _shown(self, place: Place, contents: Contents) -> list[float] | None:
        matrix = self.matrices[self._names.index(place[0])]
        if contents is None:
            return None
        counts = [*contents[:matrix["lanes"]], *contents[-1:] * bool(matrix.get("bias"))]
        return [int(count) if count == int(count) else round(count, 4) for count in counts]


def figures(play: Play) -> list[list[str]]:
    """Pairs of a value and what it means: the most that any rank has or does."""
    weights = [name for name in ("A", "B") if name in play.matrices]
    states = list(play.states())
    held = max(play.bytes_of(place for place in state if place[0] in weights) for state in play.start)
    whole = sum(_bytes(play, name) for name in weights)
    done = max(sum(step.actions[rank].num_multiplications for step in play.steps if rank in step.actions)
               for rank in range(play.world_size))
    alone = sum(_alone(play, name) for name, matrix in play.matrices.items()
                if matrix.summed and any(place[0] == name for state in states[-1] for place in state))
    results = max(play.bytes_of(place for place in state if place[0] == "Y") for state in states[-1])
    return [[_written(held), f"of {' and '.join(weights)} on each rank, {share(held, whole)} of {_written(whole)}"],
            [f"{done:,}", f"multiplications on each rank, {share(done, alone)} of one process's"],
            *_traffic(play),
            [_written(results), f"of Y on each rank at the end, {share(results, _bytes(play, 'Y'))}"]]


def _traffic(play: Play) -> list[list[str]]:
    """Bytes that each rank sends in its collectives by the bandwidth-optimal algorithms (see book.cost)."""
    t = play.world_size
    firsts = [next(iter(step.actions.values())).event for step in play.steps if step.kind == "collective"]
    calls = [(call.op or "collective", len(call.group or ()), call.num_bytes or 0.0) for call in firsts if call]
    factors = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1}
    known = [call for call in calls if call[0] in factors]
    sent = sum(factors[op] * (size - 1) / size * num_bytes for op, size, num_bytes in known)
    counts = Counter(op for op, _, _ in calls)
    names = ", ".join(f"{count} {op.replace('_', '-')}{'s' * (count > 1)}" for op, count in counts.items())
    names = names[2:] if len(calls) == 1 else f"collectives: {names or 'nothing moves'}"
    rules = [f"{count if count > 1 else ''}{'·' * (count > 1)}{'2' * (factors[op] == 2)}(t−1)/t·n"
             for op, count in counts.items() if op in factors]
    sizes = {num_bytes for _, _, num_bytes in known}
    n = f", n = {_written(sizes.pop())}" if len(sizes) == 1 else ""
    rule = f": {' + '.join(rules)}{n}, t = {t}" if rules and n else f" in {len(known)} collectives" * bool(known)
    return [[_written(round(sent)), f"sent by each rank{rule}"],
            [str(len(calls)), names]]


def _bytes(play: Play, name: str) -> int:
    height, width = play.shapes[name]
    return height * width * play.num_bytes


def _alone(play: Play, name: str) -> int:
    """The multiplications of one process for a matrix."""
    sizes = {dim: size for other, matrix in play.matrices.items() for dim, size in zip(matrix.dims, play.shapes[other])}
    height, width = play.shapes[name]
    return height * width * sizes[play.matrices[name].summed]


def share(x: float, whole: float) -> str:
    """A part as text: "all" or "1/4" where it is that, else a percentage."""
    if x == whole:
        return "all"
    parts = whole / x if x else 0
    return f"1/{parts:.0f}" if x and abs(parts - round(parts)) < 1e-9 else f"{x / whole:.0%}"


def _written(num_bytes: float) -> str:
    return in_bytes(num_bytes, zeros=True)


def cuts(play: Play) -> tuple[set[str], set[tuple[str, int]]]:
    """The dimensions that some rank has in parts, or sums in parts; and of which matrix which axis (0: rows) is cut."""
    dims: set[str] = set()
    axes: set[tuple[str, int]] = set()
    for state in (state for states in play.states() for state in states):
        for name, matrix in play.matrices.items():
            tiles = {(r, c): contents for (m, r, c), contents in state.items() if m == name}
            axes |= {(name, axis) for axis in (0, 1) if tiles and _differs(tiles, axis, play.world_size)}
            if any(held and len(set(held[:play.world_size])) > 1 for held in tiles.values() if matrix.summed):
                dims.add(matrix.summed)
    return dims | {play.matrices[name].dims[axis] for name, axis in axes}, axes


def _differs(tiles: Mapping[tuple[int, int], Contents], axis: int, num_parts: int) -> bool:
    """Whether a rank has some rows (or columns) of blocks and not others, or other contents in them."""
    lines = [{at[1 - axis]: held for at, held in tiles.items() if at[axis] == i} for i in range(num_parts)]
    return any(line != lines[0] for line in lines)
