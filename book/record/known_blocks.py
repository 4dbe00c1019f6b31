"""L2: which block of which matrix a tensor holds, and which parts of a sum are in it, recognized by its values.

A product Y = X A sums over the columns of X and the rows of A. If that dimension is cut into N parts, Y is the sum of N
partial products: part j from columns j of X and rows j of A. The values are random, so any tensor that is a sum of
partial products reveals which are in it, and how often each: they are the unique solution of an overdetermined linear
system. A tensor that no such sum explains stays unknown. This works after a GELU too: the second product of an MLP is
compared with the partial products of the GELU's output. Half of the dtype's digits must match: random numbers never
agree to that many digits by chance.

Shapes: dimensions T, D, M, O as in book.blocks, each cut in N parts; L lanes, one per part and one for a bias.
"""
from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from book.blocks import MLP, PRODUCT, SIZES, Matrix, MatrixBlock

Contents = tuple[float, ...]


@dataclass(frozen=True)
class Find:
    """A tensor that is part of `matrix`: the contents of its blocks, by block row and block column."""

    matrix: str
    contents: Mapping[tuple[int, int], Contents]


class KnownBlocks:
    """All matrices of a play for N ranks: the given ones, which all ranks share, and those computed from them.

    `given` holds X, A, B, dY and the bias, if there is one, in float64.
    """

    def __init__(self, play: tuple[Matrix, ...], num_parts: int, bias: bool = False):
        self.play, self.num_parts = {matrix.name: matrix for matrix in play}, num_parts
        self.given = _draw(play, bias)
        parts = _parts(play, self.given, num_parts)
        if bias:
            parts["Y"].append(self.given["bias"].expand(SIZES["T"], -1))
        self._pages = {name: _Page(lanes, num_parts) for name, lanes in parts.items()}

    def shape(self, matrix: str) -> tuple[int, int]:
        """Rows and columns of a matrix."""
        dims = self.play[matrix].dims
        return SIZES[dims[0]], SIZES[dims[1]]

    def block(self, matrix: str, rows: tuple[int, int], columns: tuple[int, int]) -> MatrixBlock:
        """The block that spans the given half-open range of parts in each dimension."""
        height, width = self.shape(matrix)
        (top, bottom), (left, right) = ([edge * size // self.num_parts for edge in edges]
                                        for edges, size in ((rows, height), (columns, width)))
        return MatrixBlock(matrix, (top, bottom), (left, right), (height, width))

    def find(self, tensor: torch.Tensor) -> Find | None:
        """What a tensor of shape (..., columns) holds, either as it is or transposed; None if unknown."""
        if tensor.ndim < 2 or not tensor.is_floating_point() or not tensor.numel():
            return None
        values = tensor.detach().to("cpu", torch.float64).reshape(-1, tensor.shape[-1]).numpy()
        close = math.sqrt(torch.finfo(tensor.dtype).eps)
        for way in (values, values.T):
            for name, page in self._pages.items():
                contents = page.read(way, close)
                if contents:
                    return Find(name, contents)
        return None


class _Page:
    """One matrix: the values that its blocks would have from each lane alone."""

    def __init__(self, lanes: list[torch.Tensor], num_parts: int):
        whole = np.stack([lane.numpy() for lane in lanes], axis=-1)  # (rows, columns, L)
        self._num_parts = num_parts
        self._size = whole.shape[0] // num_parts, whole.shape[1] // num_parts
        self._basis = _tiles(whole, self._size)  # (N N, numbers in a block, L)
        self._solve = np.linalg.pinv(self._basis)

    def read(self, values: np.ndarray, close: float) -> dict[tuple[int, int], Contents] | None:
        """Contents of each block found in `values`; None if `values` is not part of this matrix.

        `close` is the tolerance, relative to a block's norm.
        """
        if any(given % size or given > size * self._num_parts for given, size in zip(values.shape, self._size)):
            return None
        tiles = _tiles(values[..., None], self._size)[..., 0]  # (K, numbers in a block)
        norm = np.linalg.norm(tiles, axis=1)
        if not norm.any() or not np.isfinite(norm).all():
            return None
        counts = np.einsum("cln,kn->kcl", self._solve, tiles)
        rest = np.linalg.norm(np.einsum("cnl,kcl->kcn", self._basis, counts) - tiles[:, None], axis=2)
        best = rest.argmin(axis=1)
        if (rest.min(axis=1) > close * norm).any():
            return None
        whole = np.round(counts[np.arange(len(tiles)), best] * self._num_parts) / self._num_parts
        own = np.where(abs(whole - counts[np.arange(len(tiles)), best]) < 9 * close, whole, np.nan)
        return None if np.isnan(own).any() else self._placed(values.shape, best, norm > 0, own)

    def _placed(self, shape: tuple[int, int], best: np.ndarray, full: np.ndarray,
                counts: np.ndarray) -> dict[tuple[int, int], Contents] | None:
        """Contents by block if the blocks are arranged as they are in the matrix; zero blocks fit anywhere."""
        height, width = shape[0] // self._size[0], shape[1] // self._size[1]
        rows, columns = np.divmod(best, self._num_parts)
        down, right = np.divmod(np.arange(len(best)), width)
        corners = {(r - i, c - j) for r, i, c, j in zip(rows[full], down[full], columns[full], right[full])}
        if len(corners) != 1:
            return None
        (top, left), = corners
        if min(top, left) < 0 or top + height > self._num_parts or left + width > self._num_parts:
            return None
        return {(int(r), int(c)): tuple((lanes + 0.0).tolist())
                for r, c, lanes in zip(rows[full], columns[full], counts[full])}


def _tiles(values: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """(R r, C c, L) as (R C, r c, L): blocks of r rows and c columns, row by row."""
    down, right, lanes = values.shape[0] // size[0], values.shape[1] // size[1], values.shape[2]
    cut = values.reshape(down, size[0], right, size[1], lanes).transpose(0, 2, 1, 3, 4)
    return np.ascontiguousarray(cut).reshape(down * right, -1, lanes)


def _draw(play: tuple[Matrix, ...], bias: bool) -> dict[str, torch.Tensor]:
    """The same random numbers on every rank, whatever its seed."""
    generator = torch.Generator().manual_seed(5)
    shapes = {matrix.name: [SIZES[dim] for dim in matrix.dims] for matrix in play if not matrix.recipe}
    if bias:
        shapes["bias"] = [SIZES["M"]]
    return {name: torch.randn(*shape, dtype=torch.float64, generator=generator) for name, shape in shapes.items()}


def _parts(play: tuple[Matrix, ...], given: Mapping[str, torch.Tensor],
           num_parts: int) -> dict[str, list[torch.Tensor]]:
    """The partial products that make up each matrix, in order of its summed dimension; one if nothing is summed."""
    whole = dict(given)
    parts = {matrix.name: [whole[matrix.name]] for matrix in play if not matrix.recipe}
    for matrix in play:
        if matrix.summed:
            left, right = (whole[factor].T if text.endswith("ᵀ") else whole[factor]
                           for factor, text in zip(matrix.factors, matrix.recipe.split()))
            parts[matrix.name] = [a @ b for a, b in zip(left.chunk(num_parts, 1), right.chunk(num_parts, 0))]
        elif matrix.name == "H":
            parts["H"] = [F.gelu(whole["P"])]
        elif matrix.name == "dP":
            parts["dP"] = [torch.ops.aten.gelu_backward(whole["dH"], whole["P"])]
        whole[matrix.name] = sum(parts[matrix.name])
    return parts


def blocks_of_product(num_parts: int, bias: bool) -> KnownBlocks:
    """The matrices of Y = X A, or X A + bias."""
    return KnownBlocks(PRODUCT, num_parts, bias)


def blocks_of_mlp(num_parts: int) -> KnownBlocks:
    """The matrices of Y = GELU(X A) B."""
    return KnownBlocks(MLP, num_parts)
