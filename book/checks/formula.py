"""L3: what an answer must be, and what mistakes make of it: a right formula and wrong ones, on the same inputs."""
from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from book.checks.verdict import CheckFailed, agree, equal, require, short

Slips = Sequence[tuple[Any, str]]  # what a wrong formula leads to, and what to say of it


def told(found: np.ndarray, slips: Slips, otherwise: str) -> str:
    """The sentence of the first slip that makes what was found."""
    return next((said for value, said in slips if agree(found, value)), otherwise)


class Formula:
    """What the inputs lead to, `want`, and `slips`: what each wrong formula makes of them, with its sentence.

    Where several slips fit, the first one decides. `near(got, value)` says whether an answer is this value; by default,
    whether two numbers agree to one part in a million.
    """

    def __init__(self, want: Any, slips: Slips = (), near: Callable[[Any, Any], Any] = equal) -> None:
        self.want, self.slips, self.near = want, slips, near

    def is_right(self, got: Any) -> bool:
        """Whether this is the answer."""
        return self.near(got, self.want)

    def explain(self, got: Any, otherwise: str = "") -> str:
        """The sentence of the first slip that leads to this answer, and not to the right one."""
        return next((sentence for value, sentence in self.slips
                     if self.near(got, value) and not self.is_right(value)), otherwise)

    def require_right(self, name: str, got: Any) -> float:
        """`got`, called `name`, must be this number, and is returned; otherwise raises CheckFailed with the slip."""
        value = got.item() if getattr(got, "ndim", None) == 0 else got
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise CheckFailed(f"{name} must be a number, not {type(got).__name__}: did your function return it?")
        if self.is_right(value):
            return float(value)
        if said := self.explain(value):
            raise CheckFailed(f"{name} is {short(value)}: {said}")
        require(self.want and np.isfinite(value), f"{name} is {short(value)}, which is wrong")
        ratio = value / self.want
        digits = next((3 * (n + 1) for n in range(4) if abs(ratio - 1) > 0.005 / 1000**n), 15)
        raise CheckFailed(f"{name} is {short(value)}, which is {ratio:.{digits}g} times what it should be")
