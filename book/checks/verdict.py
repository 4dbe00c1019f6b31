"""L3: a verdict: the error that names a misconception, what raises it, and the comparisons that checks share.

Tensors may be of any dtype, on any device, with or without a gradient, or arrays; they are compared in float64. "Up to
rounding" means to one part in 10^9 of the largest element of a scale: sums in another order differ by about one in
10^15. States and gradients come as dicts, name -> tensor or array.
"""
from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from book.launch import HangError, LaunchError
from book.launch.agreement import CallMismatch
from book.launch.rpc import remote_error

TOLERANCE = 1e-9
SIX_DIGITS = 1e-5  # the error that remains if numbers were float32 at some point
ROUNDED = "this is right to only six digits: was it float32 on the way?"
REDUCED = "only rank 0 holds {}: reduce gives the result to one rank, all_reduce to every rank"
StateDict = Mapping[str, Any]
Gradients = Mapping[str, Any]  # None if there is no gradient


class CheckFailed(AssertionError):
    """A learner's answer is wrong; the message says how."""

    _render_traceback_ = LaunchError._render_traceback_  # one line, without frames of this package


def require(holds: object, message: str) -> None:
    """Raise CheckFailed with this message unless the condition holds."""
    if not holds:
        raise CheckFailed(message)


def refuse(mistaken: object, message: str) -> None:
    """Raise CheckFailed with this message if the condition holds."""
    if mistaken:
        raise CheckFailed(message)


def likeliest(*reasons: tuple[object, str]) -> str:
    """The sentence of the first reason that holds, each given as (whether it holds, its sentence); "" if none does."""
    return next((sentence for holds, sentence in reasons if holds), "")


@contextmanager
def reworded(before: str = "", after: str = "", instead: str = "") -> Iterator[None]:
    """Put text around the message of a CheckFailed raised in this block, or replace the message."""
    try:
        yield
    except CheckFailed as error:
        raise CheckFailed(instead or f"{before}{error}{after}") from None


@contextmanager
def explained(failure: Callable[..., str], *more: Any) -> Iterator[None]:
    """Turn a launch's error in this block into CheckFailed, if a check in a rank raised it or `failure` explains it.

    `failure` is given the error, and `more`, and returns its message with an explanation, or unchanged if it has none:
    then the launch's own error is raised, which shows the line of the learner's code.
    """
    try:
        yield
    except LaunchError as error:
        if isinstance(error.__cause__, CheckFailed):
            raise _without_calls(error.__cause__) from None
        said = failure(error, *more)
        if said == str(error):
            raise
        raise CheckFailed(said) from None


def _without_calls(error: CheckFailed) -> CheckFailed:
    """The error, or the one that a worker raised in an RPC call, whose text holds those of all calls on its way."""
    remote = remote_error(str(error))
    said = remote.error.partition(f"{CheckFailed.__name__}: ")[2] if remote else ""
    return CheckFailed(said) if said else error


def with_hint(message: object, hints: Mapping[str, str]) -> str:
    """An error or its message, and below it the first hint whose key is part of the message, if there is one."""
    hint = next((hint for said, hint in hints.items() if said in str(message)), None)
    return f"{message}\n{hint}" if hint else str(message)


def stands_still(error: LaunchError) -> bool:
    """Whether the ranks wait for one another."""
    return isinstance(error, HangError) and not error.late


def disagree(error: LaunchError) -> bool:
    """Whether the ranks have called collectives that do not match."""
    return isinstance(error.__cause__, CallMismatch)


# In words

def short(x: float) -> str:
    """A number with six significant digits."""
    return f"{x:.6g}"


def kind_of(got: Any) -> str:
    """What a function has returned in place of several things, in words."""
    return f"{len(got)}" if isinstance(got, (tuple, list)) else "nothing" if got is None else f"a {type(got).__name__}"


def unmet(error: LaunchError, advice: str) -> str:
    """The message of an error, with advice if the ranks' collectives do not match."""
    return f"{error}\na collective without group= runs over all ranks of the world{advice}" if disagree(error) else (
        str(error))


# Comparisons

def equal(a: float, b: float) -> bool:
    """Whether two numbers agree to one part in a million."""
    return bool(np.isclose(a, b, rtol=1e-6, atol=0))


def dense(tensor: Any) -> np.ndarray:
    """A tensor or an array as a float64 array of the same shape."""
    if hasattr(tensor, "detach"):
        tensor = tensor.detach().cpu().double().numpy()
    return np.asarray(tensor, dtype=np.float64)


def flat(tensor: Any) -> np.ndarray:
    """A tensor or an array as a flat array."""
    return dense(tensor).ravel()


def whole(named: StateDict, names: Collection[str] | None = None) -> np.ndarray:
    """All arrays of a state, or those with the given names, end to end."""
    return np.concatenate([flat(named[name]) for name in (named if names is None else names)])


def magnitude(tensor: Any) -> float:
    """The sum of absolute values: most checks return it for the cell to print, since it depends on the data."""
    return float(np.abs(dense(tensor)).sum())


def agree(got: Any, want: Any, scale: Any = None, tolerance: float = TOLERANCE) -> bool:
    """Whether `got` equals `want` up to rounding, relative to the largest element of `scale` (default: of `want`).

    Both are flattened first, so only their numbers of elements must be the same. None never agrees.
    """
    if got is None or (flat_got := flat(got)).shape != (flat_want := flat(want)).shape:
        return False
    largest = np.abs(flat_want if scale is None else scale).max()
    return bool(np.allclose(flat_got, flat_want, rtol=0, atol=tolerance * largest))


def identical(got: Any, want: Any) -> bool:
    """Whether both have the same numbers in the same order, to the last bit."""
    return np.array_equal(flat(got), flat(want))


def differing(one: StateDict, other: StateDict, scale: Any = None, tolerance: float = 0.0) -> list[str]:
    """The names, in the order of `one`, whose arrays differ in `other`.

    They are compared to the last bit, or with a `tolerance`, relative to `scale`, as in `agree`.
    """
    return [name for name, array in one.items() if not (
        agree(array, other[name], scale, tolerance) if tolerance else identical(array, other[name]))]


def times(got: Any, want: Any) -> float:
    """The factor by which `want`, of the same size, comes nearest to `got`; nan if `want` is 0."""
    got, want = flat(got), flat(want)
    return float(want @ got / (want @ want)) if want.any() else float("nan")


def same_loss(one: float, other: float) -> bool:
    """Whether two losses agree up to rounding."""
    return bool(np.isclose(one, other, rtol=TOLERANCE, atol=0))


def held(rank: int, what: str, value: Any, shape: Sequence[int]) -> np.ndarray:
    """What `rank` gives as `what`, in float64; CheckFailed for no tensor, another shape or dtype, nan and inf."""
    if value is None or not hasattr(value, "shape"):
        require(value is None, f"rank {rank} gives a {type(value).__name__}, not a tensor, as {what}: return one "
                "tensor")
        raise CheckFailed(f"rank {rank} gives nothing (None) as {what}: do you return the result? (dist.all_reduce, "
                          "for example, works in place and returns None)")
    require(tuple(value.shape) == tuple(shape),
            f"rank {rank} gives {what} in the shape {tuple(value.shape)}, but it should be {tuple(shape)}")
    require(str(value.dtype).endswith("float64"),
            f"rank {rank} gives {what} as {str(value.dtype).removeprefix('torch.')}: all inputs are float64, so where "
            "was it converted?")
    return finite(rank, what, dense(value))


def same(where: str, got: np.ndarray, want: np.ndarray, scale: np.ndarray, why: Callable[[], str]) -> None:
    """`got` must equal `want` up to rounding, relative to the largest element of `scale`; if not, `why` says why."""
    if not agree(got, want, scale):
        raise CheckFailed(f"{where}: {ROUNDED if agree(got, want, scale, SIX_DIGITS) else why()}")


def all_finite(arrays: Sequence[Any], name: str) -> list[np.ndarray]:
    """What each rank holds as `name`, as flat arrays; CheckFailed for nan and inf."""
    return [finite(rank, name, flat(array)) for rank, array in enumerate(arrays)]


def furthest(arrays: Sequence[np.ndarray]) -> tuple[int, float]:
    """The rank whose array is furthest from rank 0's, and their largest difference."""
    apart = [float(np.abs(array - arrays[0]).max()) for array in arrays]
    return int(np.argmax(apart)), max(apart)


def all_but_rank_0(wrong: Collection[int], num_ranks: int) -> bool:
    """Whether all ranks but rank 0 are wrong, as after a reduce instead of an all-reduce."""
    return set(wrong) == set(range(1, num_ranks))


def num_given(values: Sequence[Any] | None) -> int:
    """How many values a rank returned; 0 for None."""
    return 0 if values is None else len(values)


def before_and_after(before: Sequence[Any], after: Sequence[Any]) -> tuple[np.ndarray, np.ndarray]:
    """The ranks' buffers as two (R, n) arrays; CheckFailed if a rank or a buffer is missing.

    They are compared exactly, so fractions, whose sums depend on the order of additions, raise ValueError.
    """
    before, after = buffers_of(before), buffers_of(after)
    if not np.array_equal(before, np.rint(before)):
        raise ValueError("checks compare exactly: give the ranks whole numbers, whose sums are the same in any order")
    require(len(before) == len(after), f"there are {len(before)} ranks, but {len(after)} results")
    return before, after


def buffers_of(buffers: Sequence[Any]) -> np.ndarray:
    """A flat buffer per rank as one (R, n) array in float64; raises CheckFailed for None and unequal lengths."""
    for rank, buffer in enumerate(buffers):
        require(buffer is not None, f"rank {rank} returned None instead of its buffer")
    arrays = [flat(buffer) for buffer in buffers]
    lengths = {len(array) for array in arrays}
    require(len(lengths) == 1,
            f"the ranks' buffers differ in length: {sorted(lengths)}; they must keep the length they had")
    return np.stack(arrays)


def finite(holder: int | str, name: str, array: np.ndarray) -> np.ndarray:
    """`array`, which `holder`, a rank, holds as `name`, must not hold nan or inf; returns it.

    Comparisons with nan are false.
    """
    for odd in array[~np.isfinite(array)]:
        who = f"rank {holder}" if isinstance(holder, int) else holder
        raise CheckFailed(f"{who} holds {odd} in {name}: was something divided by zero, read before it was "
                          "written (torch.empty), or has it grown without bound?")
    return array
