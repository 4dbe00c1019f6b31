"""L3: a followed matrix product as moments: what each rank did, and which blocks it holds after each of them.

book.shards writes the trace that this reads. Blocks are as fine as the run cuts its matrices: a dimension that no rank
cuts has one part, any other has one part per rank.
"""
from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from book.blocks import MLP, PRODUCT, BlockOp, Matrix, MatrixBlock
from book.trace import Event, Trace

Contents = tuple[float, ...] | None  # how often each part of the sum is in a block, then the bias; None: unknown
Tile = tuple[str, int, int]  # matrix, row and column among its N x N finest blocks
Tiles = dict[Tile, Contents]
MOST_RANKS = 4
ALONE = ("multiply", "apply", "message")  # a rank does these as soon as it comes to them; for others it is seen to wait


@dataclass
class Act:
    """What one rank did: `kind` "multiply", "apply", "collective", "message", "return", "backward" or "gradient".

    `name` is the operation's, `blocks` are what it worked on, `holds` what the rank then has, `sent_to` are peers.
    """

    kind: str
    name: str
    blocks: list[MatrixBlock] = field(default_factory=list)
    holds: Tiles = field(default_factory=dict)
    num_multiplications: int = 0
    event: Event | None = None
    sent_to: list[int] = field(default_factory=list)

    @property
    def group(self) -> tuple[int, ...]:
        """The ranks of a collective."""
        return (self.event.group if self.event else None) or ()

    def replaced(self, held: Tiles) -> list[Tile]:
        """What a rank no longer has after this: the sum that a reduce-scatter took, or what it did not return."""
        only = self.kind in ("return", "gradient") or self.name == "reduce_scatter"
        names = {place[0] for place in self.holds} if only else set()
        return [place for place in held if place[0] in names and place not in self.holds]


@dataclass
class Moment:
    """What ranks did at the same time: acts of one kind and name, by rank."""

    kind: str
    name: str
    acts: dict[int, Act]


@dataclass
class ProductPlay:
    """A run: its matrices and their shapes, what each rank has at the start, its moments, bytes of a number."""

    world_size: int
    matrices: dict[str, Matrix]
    shapes: dict[str, tuple[int, int]]
    start: list[Tiles]
    moments: list[Moment]
    bias: bool
    num_bytes: int = 8
    source: str = "recorded"

    def states(self) -> Iterator[list[Tiles]]:
        """What each rank holds before the first moment and after each."""
        held = [dict(state) for state in self.start]
        yield [dict(state) for state in held]
        for moment in self.moments:
            for rank, act in moment.acts.items():
                for place in act.replaced(held[rank]):
                    del held[rank][place]
                held[rank].update(act.holds)
            yield [dict(state) for state in held]

    def bytes_of(self, tiles: Iterable[Tile]) -> int:
        """The bytes of these blocks."""
        sizes = [self.shapes[name] for name, _, _ in tiles]
        return sum(height * width for height, width in sizes) * self.num_bytes // self.world_size**2


def read_play(trace: Trace) -> ProductPlay:
    """The moments of a product or MLP that was followed; raises ValueError for a trace without one."""
    if trace.world_size > MOST_RANKS or trace.clock == "logical":
        raise ValueError("a sharded product is shown from the trace that was recorded, on 2 to 4 ranks: "
                         "sharded_product(launch(trace_product, 2, fn, record=True).trace)")
    readers = [_Program(trace, rank) for rank in range(trace.world_size)]
    shapes = {name: shape for reader in readers for name, shape in reader.shapes.items()}
    if not all(reader.shapes for reader in readers):
        raise ValueError("this trace follows no matrix product: launch trace_product or trace_mlp with your function, "
                         "launch(trace_product, 2, fn, record=True)")
    play = MLP if "B" in shapes else PRODUCT
    sizes = {dim: size for matrix in play for dim, size in zip(matrix.dims, shapes.get(matrix.name, ()))}
    shown = {m.name: m for m in play if m.name in shapes or not m.name.startswith("d")}
    whole = {name: (sizes[matrix.dims[0]], sizes[matrix.dims[1]]) for name, matrix in shown.items()}
    return ProductPlay(trace.world_size, shown, whole, [reader.start for reader in readers],
                       list(_aligned([reader.acts for reader in readers])), "bias" in shapes,
                       next(reader.num_bytes for reader in readers), trace.source)


class _Program:
    """One rank's events, in the order of its program, as acts."""

    def __init__(self, trace: Trace, rank: int):
        self._num_parts = trace.world_size
        self.shapes: dict[str, tuple[int, int]] = {}
        self.start: Tiles = {}
        self.acts: list[Act] = []
        self.num_bytes = 8
        self._given = {m.name for m in (*PRODUCT, *MLP) if not m.recipe}
        self._of_loss: Tiles = {}
        for event in sorted(trace.of_rank(rank), key=lambda event: event.start_s):
            {"hold": self._hold, "compute": self._compute, "collective": self._collective}.get(
                event.kind, self._message)(event)
        self._begin_backward()
        self.acts = [a for a in self.acts if a.holds or a.kind in ("collective", "multiply", "message")]

    def _compute(self, event: Event) -> None:
        op = BlockOp.parse(event.op or "")
        if op.kind == "given":
            self.shapes |= {block.matrix: block.shape for block in op.blocks}
        elif op.kind == "sends":
            self._sends(op.blocks)
        elif op.kind in ("multiply", "apply"):
            self.acts.append(Act(op.kind, op.name, list(op.blocks), {}, op.num_multiplications))
        elif not self.acts or self.acts[-1].kind != op.kind:
            self.acts.append(Act(op.kind, op.kind))

    def _collective(self, event: Event) -> None:
        self.acts.append(Act("collective", "", event=event))

    def _message(self, event: Event) -> None:
        """Consecutive messages are one act."""
        if not self.acts or self.acts[-1].kind != "message" or self.acts[-1].holds:
            self.acts.append(Act("message", "message"))
        self.acts[-1].sent_to += [event.peer] if event.kind == "send" and event.peer is not None else []

    def _sends(self, blocks: Iterable[MatrixBlock]) -> None:
        last = self.acts[-1] if self.acts else None
        if last is None or last.kind not in ("collective", "message"):
            raise ValueError("this run's collectives were not recorded: launch it with record=True")
        last.blocks += [block for block in blocks if block not in last.blocks]
        last.name = last.event.op or "" if last.event else last.name

    def _hold(self, event: Event) -> None:
        block, n = MatrixBlock.parse(event.op or ""), self._num_parts
        self.shapes[block.matrix] = block.shape
        self.num_bytes = round((event.num_bytes or 0) / (block.size[0] * block.size[1]))
        place = (block.matrix, block.rows[0] * n // block.shape[0], block.columns[0] * n // block.shape[1])
        last = self.acts[-1] if self.acts else None
        given = block.matrix in self._given and not (last and last.kind == "collective" and last.name)
        if given:
            (self._of_loss if block.matrix == "dY" else self.start)[place] = event.contributions
        elif last:
            last.holds[place] = event.contributions

    def _begin_backward(self) -> None:
        if self._of_loss:
            after = [act.kind for act in self.acts].index("return") + 1
            self.acts.insert(after, Act("backward", "backward", holds=self._of_loss))


def _aligned(programs: list[list[Act]]) -> Iterator[Moment]:
    """The ranks' acts side by side: first what ranks do alone, then collectives, then what they end with."""
    at = [0] * len(programs)
    while any(at[rank] < len(program) for rank, program in enumerate(programs)):
        ready = {rank: program[at[rank]] for rank, program in enumerate(programs) if at[rank] < len(program)}
        alone = {rank: act for rank, act in ready.items() if act.kind in ALONE}
        together = {rank: act for rank, act in ready.items() if act.kind == "collective" and
                    all(peer in ready and ready[peer].kind == "collective" for peer in act.group)}
        able = alone or together or ready
        first = next(iter(able.values()))
        now = {rank: act for rank, act in able.items() if _key(act) == _key(first)}
        for rank in now:
            at[rank] += 1
        yield Moment(first.kind, first.name, now)


def _key(act: Act) -> tuple[Any, ...]:
    if act.kind == "collective":
        return act.kind, act.group
    return act.kind, act.name, tuple(sorted(block.matrix for block in act.blocks))


class Drawing:
    """Which matrices are drawn where, and how finely."""

    def __init__(self, play: ProductPlay):
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
        painted = min(axes, key=lambda axis: matrix.dims[axis] == "T", default=None)  # not tokens if another is cut
        paint = {None: "", 0: "row", 1: "column"}[painted]
        grid = [self._play.world_size if axis in axes else 1 for axis in (0, 1)]
        return {"name": name, "recipe": matrix.recipe, "shape": list(self._play.shapes[name]), "slot": slot,
                "line": int(name != base), "grid": grid, "lanes": lanes, "paint": paint,
                **({"bias": 1} if self._play.bias and name == "Y" else {})}

    def blocks(self, rank: int, state: Tiles) -> list[list[Any]]:
        """The blocks of a state as the drawing cuts them."""
        found = {self._coarse(place): self._shown(place, contents) for place, contents in state.items()}
        return [[rank, matrix, number, shown] for (matrix, number), shown in found.items()]

    def gone(self, rank: int, places: Iterable[Tile]) -> list[list[Any]]:
        """The blocks that a rank no longer has."""
        return [[rank, *at] for at in dict.fromkeys(map(self._coarse, places))]

    def moves(self, moment: Moment, before: list[Tiles]) -> list[list[Any]]:
        """Which of each rank's blocks go to which other rank: those that it sent and that the other has afterwards."""
        if moment.kind not in ("collective", "message"):
            return []
        found: dict[tuple[int, int, int], list[int]] = {}
        for src, sender in moment.acts.items():
            names = {block.matrix for block in sender.blocks}
            held = {place for place in before[src] if place[0] in names}
            for dst, act in moment.acts.items():
                given = held & act.holds.keys() if moment.kind == "collective" else held
                for place in sorted(given) if dst in (sender.sent_to or moment.acts) and dst != src else ():
                    matrix, number = self._coarse(place)
                    numbers = found.setdefault((matrix, src, dst), [])
                    numbers.extend([number] if number not in numbers else [])
        return [[*key, numbers] for key, numbers in found.items()]

    def busy(self, moment: Moment) -> list[int]:
        """The matrices that a moment works on."""
        names = {block.matrix for act in moment.acts.values() for block in act.blocks}
        names |= {place[0] for act in moment.acts.values() for place in act.holds}
        return sorted(self._names.index(name) for name in names)

    def _coarse(self, place: Tile) -> tuple[int, int]:
        name, row, column = place
        down, across = self.matrices[self._names.index(name)]["grid"]
        return self._names.index(name), (row if down > 1 else 0) * across + (column if across > 1 else 0)

    def _shown(self, place: Tile, contents: Contents) -> list[float] | None:
        matrix = self.matrices[self._names.index(place[0])]
        if contents is None:
            return None
        counts = [*contents[:matrix["lanes"]], *contents[-1:] * bool(matrix.get("bias"))]
        return [int(count) if count == int(count) else round(count, 4) for count in counts]


def cuts(play: ProductPlay) -> tuple[set[str], set[tuple[str, int]]]:
    """The dimensions that some rank has or sums in parts; and which axes of matrices are cut, as (matrix, axis)."""
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
    """Whether a rank's rows (or columns) of blocks differ: it has some and not others, or other contents in them."""
    lines = [{at[1 - axis]: held for at, held in tiles.items() if at[axis] == i} for i in range(num_parts)]
    return any(line != lines[0] for line in lines)
