"""L0: blocks of matrices, and the products whose matrices the book cuts: Y = X A, and the MLP Y = GELU(X A) B.

A block is written as Python slices it, with the shape of the whole: "A[0:12, 24:48] of 12x48". So a trace's events
can name blocks, and whoever reads them needs nothing else.

Dimensions: T tokens, D width, M what the first product makes of it, O the width that the second one gives.
"""
from __future__ import annotations

import re
from dataclasses import dataclass

FORM = re.compile(r"(\w+)\[(\d+):(\d+), (\d+):(\d+)\] of (\d+)x(\d+)")


class BlockError(ValueError):
    """A text that names no block."""


@dataclass(frozen=True)
class Block:
    """Rows and columns of a matrix, each from the first up to, not including, the last; `shape` is the whole's."""

    matrix: str
    rows: tuple[int, int]
    columns: tuple[int, int]
    shape: tuple[int, int]

    def __str__(self) -> str:
        (top, bottom), (left, right), (height, width) = self.rows, self.columns, self.shape
        return f"{self.matrix}[{top}:{bottom}, {left}:{right}] of {height}x{width}"

    @classmethod
    def parse(cls, text: str) -> Block:
        """The block that `str` wrote; raises BlockError for any other text."""
        match = FORM.fullmatch(text)
        if not match:
            raise BlockError(f"{text!r} names no block: it reads like 'A[0:12, 24:48] of 12x48'")
        top, bottom, left, right, height, width = map(int, match.groups()[1:])
        return cls(match[1], (top, bottom), (left, right), (height, width))

    @property
    def size(self) -> tuple[int, int]:
        """How many rows and columns it has."""
        return self.rows[1] - self.rows[0], self.columns[1] - self.columns[0]


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


PRODUCT = (Matrix("X", "TD"), Matrix("A", "DM"), Matrix("Y", "TM", "D", "X A"),
           Matrix("dY", "TM"), Matrix("dX", "TD", "M", "dY Aᵀ"), Matrix("dA", "DM", "T", "Xᵀ dY"))
MLP = (Matrix("X", "TD"), Matrix("A", "DM"), Matrix("P", "TM", "D", "X A"), Matrix("H", "TM", "", "GELU(P)"),
       Matrix("B", "MO"), Matrix("Y", "TO", "M", "H B"),
       Matrix("dY", "TO"), Matrix("dH", "TM", "O", "dY Bᵀ"), Matrix("dP", "TM", "", "dH GELU′(P)"),
       Matrix("dB", "MO", "T", "Hᵀ dY"), Matrix("dX", "TD", "M", "dP Aᵀ"), Matrix("dA", "DM", "T", "Xᵀ dP"))
