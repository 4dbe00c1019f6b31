"""L2: a matrix product, or an MLP, that ranks have cut along one dimension: its blocks, its sums, what is sent.

Of each matrix of book.blocks a rank has the block that is its own along the cut dimension, and all of the others. Where
a product sums over the cut dimension, each rank has only its own terms, until an all-reduce adds them up.
"""
from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

from book.blocks import MLP, PRODUCT, SIZES, BlockOp, Matrix, MatrixBlock
from book.trace import Event, Trace

BACKWARD = ("dB", "dH", "dP", "dA", "dX")  # in autograd's order: a weight's gradient before that of the input
APPLIED = {"H": ("gelu", "P"), "dP": ("gelu_backward", "dH")}  # what is no product: the operation, and to what
NUMBER_BYTES = 8


def simulate_product(cut: str, num_ranks: int = 2) -> Trace:
    """The trace of Y = X A for `sharded_product`: A's columns are cut with `cut` "M", its rows with "D".

    Raises ValueError for another dimension, or where the ranks don't share it out equally.
    """
    return _trace([matrix for matrix in PRODUCT if not matrix.name.startswith("d")], cut, num_ranks, "MD")


def simulate_mlp(num_ranks: int = 2, backward: bool = False) -> Trace:
    """The trace of Y = GELU(X A) B, with A cut by columns and B by rows, and of its backward if that is asked for.

    Raises ValueError where the ranks don't share out the hidden units equally.
    """
    return _trace([matrix for matrix in MLP if backward or not matrix.name.startswith("d")], "M", num_ranks, "M")


def _trace(matrices: Sequence[Matrix], cut: str, num_ranks: int, cuts: str) -> Trace:
    if cut not in cuts or SIZES[cut] % num_ranks:
        raise ValueError(f"{num_ranks} ranks can't cut {cut!r}: choose one of {', '.join(cuts)}, and a number of ranks "
                         f"that divides its size")
    events = []
    for rank in range(num_ranks):
        own = _Rank({matrix.name: matrix for matrix in matrices}, cut, rank, num_ranks).events()
        events += [replace(event, start_s=float(at), end_s=float(at)) for at, event in enumerate(own)]
    return Trace(events, num_ranks, "modelled", "simulated", name="product")


@dataclass
class _Rank:
    """What one rank does."""

    matrices: dict[str, Matrix]
    cut: str
    rank: int
    num_ranks: int

    def events(self) -> Iterator[Event]:
        given = [name for name, matrix in self.matrices.items() if not matrix.recipe and name != "dY"]
        yield self._does(BlockOp("given", tuple(self._whole(name) for name in given)))
        used: set[str] = set()
        made = [name for name, matrix in self.matrices.items() if matrix.recipe and not name.startswith("d")]
        made += [name for name in BACKWARD if name in self.matrices]
        for name in made:
            if name.startswith("d") and "dY" not in used:
                yield from self._result("return", "Y")
                used.add("dY")
                yield from self._hold("dY")
            yield from self._computed(name, used)
        yield from self._result("return", "Y") if "dY" not in used else self._gradients(given)

    def _computed(self, name: str, used: set[str]) -> Iterator[Event]:
        """A product or another operation on this rank's blocks, and the all-reduce of a sum that has parts."""
        matrix = self.matrices[name]
        needed = matrix.factors or [APPLIED[name][1]]
        new = [factor for factor in needed if not self.matrices[factor].recipe and factor not in used | {"dY"}]
        blocks = tuple(map(self._own, needed))
        yield self._does(BlockOp("multiply", blocks, factors=self._factors(matrix)) if matrix.summed else
                         BlockOp("apply", blocks, APPLIED[name][0]))
        for factor in new:
            used.add(factor)
            yield from self._hold(factor)
        partial = matrix.summed == self.cut
        yield from self._hold(name, partial)
        if partial:
            block = self._own(name)
            yield Event(self.rank, "collective", "all_reduce", group=tuple(range(self.num_ranks)),
                        num_bytes=float(block.size[0] * block.size[1] * NUMBER_BYTES))
            yield self._does(BlockOp("sends", (block,)))
            yield from self._hold(name)

    def _result(self, kind: str, name: str) -> Iterator[Event]:
        yield self._does(BlockOp(kind))
        yield from self._hold(name)

    def _gradients(self, given: Sequence[str]) -> Iterator[Event]:
        for name in given:
            yield from self._result("gradient", f"d{name}")

    def _factors(self, matrix: Matrix) -> tuple[tuple[int, int], tuple[int, int]]:
        """The sizes of the two factors: rows of the result by what is summed, and that by its columns."""
        down, across, summed = (SIZES[dim] // (self.num_ranks if dim == self.cut else 1)
                                for dim in (*matrix.dims, matrix.summed))
        return (down, summed), (summed, across)

    def _does(self, op: BlockOp) -> Event:
        return Event(self.rank, "compute", str(op))

    def _hold(self, name: str, partial: bool = False) -> Iterator[Event]:
        """What of a matrix this rank has now, in its finest blocks: every term of a sum, or its own ones."""
        matrix, whole = self.matrices[name], self._whole(name)
        if matrix.summed:
            counts = tuple(int(not partial or rank == self.rank) for rank in range(self.num_ranks))
        else:
            counts = (1,) + (0,) * (self.num_ranks - 1)
        own = self._own(name)
        height, width = (size // self.num_ranks for size in whole.shape)
        for row, column in product(range(*own.rows, height), range(*own.columns, width)):
            block = MatrixBlock(name, (row, row + height), (column, column + width), whole.shape)
            yield Event(self.rank, "hold", str(block), num_bytes=float(height * width * NUMBER_BYTES),
                        contributions=(*counts, 0))

    def _own(self, name: str) -> MatrixBlock:
        """This rank's block of a matrix."""
        whole = self._whole(name)
        rows, columns = (self._part(dim) if dim == self.cut else (0, SIZES[dim]) for dim in self.matrices[name].dims)
        return MatrixBlock(name, rows, columns, whole.shape)

    def _whole(self, name: str) -> MatrixBlock:
        height, width = (SIZES[dim] for dim in self.matrices[name].dims)
        return MatrixBlock(name, (0, height), (0, width), (height, width))

    def _part(self, dim: str) -> tuple[int, int]:
        size = SIZES[dim] // self.num_ranks
        return self.rank * size, (self.rank + 1) * size
