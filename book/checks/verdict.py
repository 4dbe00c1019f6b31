"""L3: a verdict: the error that names a misconception, what raises it, and the check of a single number."""
from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np


class CheckFailed(AssertionError):
    """A learner's answer is wrong; the message says how."""

    def _render_traceback_(self) -> list[str]:
        # IPython prints this instead of a traceback into this package, which does not help a learner.
        return [f"{type(self).__name__}: {self}"]


def require(holds: object, message: str) -> None:
    """Raise CheckFailed with this message unless the condition holds."""
    if not holds:
        raise CheckFailed(message)


def refuse(mistaken: object, message: str) -> None:
    """Raise CheckFailed with this message if the condition holds."""
    if mistaken:
        raise CheckFailed(message)


def likeliest(*reasons: tuple[object, str]) -> str:
    """The sentence of the first of these reasons, (whether it holds, its sentence), that holds; "" if none does."""
    return next((sentence for holds, sentence in reasons if holds), "")


def number(name: str, got: Any, want: float, misconceptions: Iterable[tuple[float, str]] = ()) -> float:
    """`got` must equal `want` to one part in a million; otherwise the message names the misconception.

    `misconceptions` are the values that mistakes give, each with its message; the first value that fits decides.
    Returns `got` as a float.
    """
    value = got.item() if getattr(got, "ndim", None) == 0 else got
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise CheckFailed(f"{name} must be a number, not {type(got).__name__}: did your function return it?")
    if equal(value, want):
        return float(value)
    for mistaken, message in misconceptions:
        refuse(equal(value, mistaken) and not equal(mistaken, want), f"{name} is {short(value)}: {message}")
    require(want and np.isfinite(value), f"{name} is {short(value)}, which it should not be")
    ratio = value / want
    digits = 3 if abs(ratio - 1) > 0.005 else 6
    raise CheckFailed(f"{name} is {short(value)}, which is {ratio:.{digits}g} times what it should be")


@contextmanager
def reworded(before: str = "", after: str = "", instead: str = "") -> Iterator[None]:
    """Put text around the message of a CheckFailed that is raised in this block, or another message in its place."""
    try:
        yield
    except CheckFailed as error:
        raise CheckFailed(instead or f"{before}{error}{after}") from None


def finite(rank: int, name: str, array: np.ndarray) -> np.ndarray:
    """`array`, which `rank` holds as `name`, must not have nan or inf; returns it. Comparisons with nan are false."""
    for odd in array[~np.isfinite(array)]:
        raise CheckFailed(f"rank {rank} holds {odd} in {name}: was something divided by zero, read before it "
                          "was there (torch.empty), or has it grown without bound?")
    return array


def equal(a: float, b: float) -> bool:
    """Whether two numbers agree to one part in a million."""
    return bool(np.isclose(a, b, rtol=1e-6, atol=0))


def short(x: float) -> str:
    """A number with six significant digits."""
    return f"{x:.6g}"


def listed(things: Iterable[Any]) -> str:
    """Ranks, numbers or names, with commas."""
    return ", ".join(map(str, things))


def hint_for(message: str, hints: Mapping[str, str]) -> str | None:
    """The hint whose key is part of an error's message; None if there is none."""
    return next((hint for said, hint in hints.items() if said in message), None)


def unmet(message: str, advice: str) -> str:
    """An error of a launch, with advice if it says that the ranks' collectives do not match."""
    if "the ranks disagree in a collective" not in message:
        return message
    return f"{message}\na collective without group= is one of all ranks of the world{advice}"
