"""L3: comparisons that checks share: of arrays, of dicts of them, of what ranks hold, of sums taken apart.

Whatever comes may be a tensor, of any dtype, on any device, with or without a gradient, or an array, and is compared in
float64. But for rounding means: to one part in 10^9 of the largest element of a scale, as sums in another order differ
by about one in 10^15. States and gradients come as dicts, name -> tensor or array.
"""
from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np

from book.checks.verdict import CheckFailed, finite

TOLERANCE = 1e-9
SIX_DIGITS = 1e-5  # what is left where numbers have been float32 on the way
State = Mapping[str, Any]
Gradients = Mapping[str, Any]  # None where there is no gradient


# As float64

def dense(tensor: Any) -> np.ndarray:
    """A tensor or an array, in float64 and in its shape."""
    if hasattr(tensor, "detach"):
        tensor = tensor.detach().cpu().double().numpy()
    return np.asarray(tensor, dtype=np.float64)


def flat(tensor: Any) -> np.ndarray:
    """A tensor or an array as a flat array."""
    return dense(tensor).ravel()


def whole(named: State) -> np.ndarray:
    """All arrays of a state, or gradients of a module, end to end."""
    return np.concatenate([flat(array) for array in named.values()])


def magnitude(tensor: Any) -> float:
    """The sum of absolute values, which depends on the data: what most checks return, for the cell to print."""
    return float(np.abs(dense(tensor)).sum())


# Two of a kind

def agree(got: Any, want: Any, scale: Any = None, tolerance: float = TOLERANCE) -> bool:
    """Whether `got` is `want` but for rounding, as seen from the largest element of `scale` (default: of `want`).

    Both are compared end to end: a shape is not looked at, a number of elements is. None agrees with nothing.
    """
    if got is None or (flat_got := flat(got)).shape != (flat_want := flat(want)).shape:
        return False
    largest = np.abs(flat_want if scale is None else scale).max()
    return bool(np.allclose(flat_got, flat_want, rtol=0, atol=tolerance * largest))


def identical(got: Any, want: Any) -> bool:
    """Whether both are the same numbers in the same order, to the last bit."""
    return np.array_equal(flat(got), flat(want))


def differing(one: State, other: State, scale: Any = None, tolerance: float = 0.0) -> list[str]:
    """The names in `one`, in its order, under which `other` has something else.

    They are compared to the last bit, or with a `tolerance`, as seen from `scale`, as in `agree`.
    """
    return [name for name, array in one.items() if not (
        agree(array, other[name], scale, tolerance) if tolerance else identical(array, other[name]))]


def times(got: Any, want: Any) -> float:
    """Of all multiples of `want`, that which is nearest to `got`, for as many elements; nan where `want` is 0."""
    got, want = flat(got), flat(want)
    return float(want @ got / (want @ want)) if want.any() else float("nan")


def first_wrong(losses: Sequence[float] | np.ndarray, want: Sequence[float],
                tolerance: float = TOLERANCE) -> int | None:
    """The first step whose loss is not that in `want`, to a `tolerance` that is a share of it; None if all are."""
    wrong = np.flatnonzero(~np.isclose(losses, want, rtol=tolerance, atol=0))
    return int(wrong[0]) if len(wrong) else None


def held(rank: int, what: str, value: Any, shape: Sequence[int]) -> np.ndarray:
    """What `rank` gives as `what`, in float64; CheckFailed for no tensor, another shape, fewer digits, nan and inf."""
    if value is None or not hasattr(value, "shape"):
        given = "nothing (None)" if value is None else f"no tensor but a {type(value).__name__}"
        raise CheckFailed(f"rank {rank} gives {given} as {what}: is the result returned, as a tensor? "
                          "(dist.all_reduce, for one, works in place and returns nothing)")
    if tuple(value.shape) != tuple(shape):
        raise CheckFailed(f"rank {rank} gives {what} in the shape {tuple(value.shape)}, it should be {tuple(shape)}")
    if not str(value.dtype).endswith("float64"):
        raise CheckFailed(f"rank {rank} gives {what} as {str(value.dtype).removeprefix('torch.')}: all that comes in "
                          "is float64, so where has it changed?")
    return finite(rank, what, dense(value))


def same(where: str, got: np.ndarray, want: np.ndarray, scale: np.ndarray, why: Callable[[], str]) -> None:
    """`got` must be `want` but for rounding as seen from the largest element of `scale`; else `why` says what it is."""
    if agree(got, want, scale):
        return
    if agree(got, want, scale, SIX_DIGITS):
        raise CheckFailed(f"{where}: this is right to six digits only: has it been float32 on the way?")
    raise CheckFailed(f"{where}: {why()}")


# All ranks

def furthest(arrays: Sequence[np.ndarray]) -> tuple[int, float]:
    """The rank whose array is furthest from rank 0's, and their largest difference."""
    apart = [float(np.abs(array - arrays[0]).max()) for array in arrays]
    return int(np.argmax(apart)), max(apart)


def all_but_rank_0(wrong: Collection[int], num_ranks: int) -> bool:
    """Whether the ranks in `wrong` are all others than rank 0, as where a reduce is in the place of an all-reduce."""
    return set(wrong) == set(range(1, num_ranks))


def num_given(values: Sequence[Any] | None) -> int:
    """How many a rank returned, none where it returned None."""
    return 0 if values is None else len(values)


# Sums taken apart

def multiples(rows: np.ndarray, got: Any) -> np.ndarray | None:
    """The factors f, shape (R,), with f @ rows = got, for `rows` (R, n) and `got` (n,); NaN for a row of zeros.

    None where there are no such factors, or where more than one set of them fits.
    """
    used = rows.any(axis=1)
    got, factors = flat(got), np.full(len(rows), np.nan)
    if got.shape != rows.shape[1:] or np.linalg.matrix_rank(rows[used]) < used.sum():
        return None
    factors[used] = np.linalg.lstsq(rows[used].T, got, rcond=None)[0]
    return factors if agree(factors[used] @ rows[used], got, rows) else None


def is_zero(factors: Any) -> np.ndarray:
    """Which of these factors are 0 but for rounding: what they stand for is not in the sum."""
    return np.isclose(factors, 0, atol=TOLERANCE)


def is_own(factors: np.ndarray, rank: int) -> bool:
    """Whether a sum with these factors of the ranks' data is `rank`'s alone, once."""
    return bool(np.allclose(factors, np.arange(len(factors)) == rank))
