"""L0: blocks of matrices, and the products whose matrices the book cuts: Y = X A, and the MLP Y = GELU(X A) B.

A block is written as Python slices it, with the shape of the whole: "A[0:12, 24:48] of 12x48". What is done with
blocks is written too, as the `op` of a compute event. So a trace's events say it all, and whoever reads them needs
nothing else.

Dimensions: T tokens, D width, M what the first product makes of it, O the width that the second one gives.
"""
from __future__ import annotations

import re
from dataclasses import dataclass

FORM = re.compile(r"(\w+)\[(\d+):(\d+), (\d+):(\d+)\] of (\d+)x(\d+)")
FACTORS = re.compile(r"(\d+)x(\d+) @ (\d+)x(\d+)")
Size = tuple[int, int]  # rows and columns


class BlockError(ValueError):
    """A text that names no block."""


@dataclass(frozen=True)
class MatrixBlock:
    """Rows and columns of a matrix, each from the first up to, not including, the last; `shape` is the whole's."""

    matrix: str
    rows: tuple[int, int]
    columns: tuple[int, int]
    shape: tuple[int, int]

    def __str__(self) -> str:
        (top, bottom), (left, right), (height, width) = self.rows, self.columns, self.shape
        return f"{self.matrix}[{top}:{bottom}, {left}:{right}] of {height}x{width}"

    @classmethod
    def parse(cls, text: str) -> MatrixBlock:
        """The block that `str` wrote; raises BlockError for any other text."""
        match = FORM.fullmatch(text)
        if not match:
            raise BlockError(f"{text!r} names no block: it reads like 'A[0:12, 24:48] of 12x48'")
        top, bottom, left, right, height, width = map(int, match.groups()[1:])
        return cls(match[1], (top, bottom), (left, right), (height, width))

    @property
    def size(self) -> Size:
        """How many rows and columns it has."""
        return self.rows[1] - self.rows[0], self.columns[1] - self.columns[0]


@dataclass(frozen=True)
class BlockOp:
    """What a rank does with blocks: `str` gives the `op` of a compute event, `parse` reads it.

        kind      the text
        given     "given: X[0:24, 0:12] of 24x12; ..."         the matrices that there are
        multiply  "24x6 @ 6x48: X[...] of ...; A[...] of ..."  a product of these blocks; `factors` are the sizes
        apply     "gelu: P[...] of ..."                        any other operation, by its `name`
        sends     "sends: Y[...] of ..."                       what the recorded operation before it took
        return    "return"                                     what a program ends with: its result,
        gradient  "gradient"                                   the gradient of something that it was given

    A block that is not known is left out.
    """

    kind: str
    blocks: tuple[MatrixBlock, ...] = ()
    name: str = ""
    factors: tuple[Size, Size] | None = None

    def __str__(self) -> str:
        if self.kind in ("return", "gradient"):
            return self.kind
        head = " @ ".join(f"{height}x{width}" for height, width in self.factors or ()) or self.name or self.kind
        return f"{head}: {'; '.join(map(str, self.blocks))}"

    @classmethod
    def parse(cls, text: str) -> BlockOp:
        """What `str` wrote; raises BlockError where something else than blocks is listed."""
        head, _, listed = text.partition(": ")
        blocks = tuple(MatrixBlock.parse(block) for block in listed.split("; ") if block)
        if (match := FACTORS.fullmatch(head)):
            m, k, n, o = map(int, match.groups())
            return cls("multiply", blocks, factors=((m, k), (n, o)))
        known = head in ("given", "sends", "return", "gradient")
        return cls(head, blocks) if known else cls("apply", blocks, head)

    @property
    def num_multiplications(self) -> int:
        """Of two numbers each, in a product."""
        (height, inner), (_, width) = self.factors or ((0, 0), (0, 0))
        return height * inner * width


@dataclass(frozen=True)
class Matrix:
    """A matrix of a play: its rows' and columns' dimensions, and the one summed over where it is a product.

    `recipe` says what it is computed from.
    """

    name: str
    dims: str
    summed: str = ""
    recipe: str = ""

    @property
    def factors(self) -> list[str]:
        """The matrices of its recipe, transposed or not, where it is a product."""
        return [name.removesuffix("ᵀ") for name in self.recipe.split()] if self.summed else []


SIZES = {"T": 24, "D": 12, "M": 48, "O": 12}  # of an MLP four times as wide inside; 2, 3 and 4 ranks divide them
PRODUCT = (Matrix("X", "TD"), Matrix("A", "DM"), Matrix("Y", "TM", "D", "X A"),
           Matrix("dY", "TM"), Matrix("dX", "TD", "M", "dY Aᵀ"), Matrix("dA", "DM", "T", "Xᵀ dY"))
MLP = (Matrix("X", "TD"), Matrix("A", "DM"), Matrix("P", "TM", "D", "X A"), Matrix("H", "TM", "", "GELU(P)"),
       Matrix("B", "MO"), Matrix("Y", "TO", "M", "H B"),
       Matrix("dY", "TO"), Matrix("dH", "TM", "O", "dY Bᵀ"), Matrix("dP", "TM", "", "dH GELU′(P)"),
       Matrix("dB", "MO", "T", "Hᵀ dY"), Matrix("dX", "TD", "M", "dP Aᵀ"), Matrix("dA", "DM", "T", "Xᵀ dP"))
