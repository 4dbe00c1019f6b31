"""L3: what an observed tensor is made of: its coefficients on labelled axes, and the pattern that they form.

Most mistakes of a distributed run are linear: what a rank holds in place of the right tensor is a sum of the ranks' (or
micro-batches', windows', replicas') contributions with other coefficients. An `Attribution` finds these. `patterns`
yields what fits, the most telling first; `explain` gives a lab's sentence for the first that it has one for:

    "nothing"               the tensor is 0
    "own", "other"          one rank's contribution alone, once: that of the rank that holds it, or of `{other}`
    "sum", "mean"           every contribution once; every one 1/size times
    names of `mistakes`     coefficients that the lab gives
    "rounded"               right to six digits only, which has one sentence in all labs
    "times x", "over x"     `{x}` times what it should be, or divided by it, for each x of `counts`
    "added to own"          what it should be, plus the rank's own contribution
    "in flight"             every contribution; in some elements, some of them divided by `{size}`, once or more
    "picked"                no sum: the largest, the smallest or the product of all, from `{reduction}`
    "only own"              `{own_times}` times the rank's own contribution
    "only last <axis>"      of each rank the last contribution on this axis alone
    "missing <axis>"        `{absent}` on this axis have no part in it; on any axis but the first, of other ranks
    "alike"                 all coefficients are `{highest}`, and should not be
    "scaled"                `{times}` times what it should be
    "unequal"               any other sum, with the coefficients `{weights}`
    "unknown"               no sum of the contributions, or more than one fits

All sentences may also use `{size}`, the number of contributions, and `{share}`, the coefficient that each should have.
Patterns with given coefficients are tested on the data itself, so they are found even if the coefficients of a sum are
not unique because it has fewer numbers than contributions.
"""
from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from itertools import product
from typing import Any, NamedTuple

import numpy as np

from book.checks.verdict import ROUNDED, SIX_DIGITS, TOLERANCE, CheckFailed, agree, flat, short, times
from book.words import listed

CLOSE = 1e-6  # the tolerance for coefficients
MOST_IN_FLIGHT = 5  # contributions; with more there are too many ways to divide some of them
REDUCTIONS: Mapping[str, Callable[..., np.ndarray]] = {"MAX": np.max, "MIN": np.min, "PRODUCT": np.prod}


class Pattern(NamedTuple):
    """A pattern that fits, and those fields of its sentence that other patterns don't have."""

    name: str
    fields: Mapping[str, Any] = {}


class Attribution:
    """What `got` is made of: how often each of `rows` is in it, and how often it should be, `wanted`.

    `rows` has a dimension for each of `axes`, which label the contributions, and then those of `got`. The first axis is
    that of the ranks, or of whatever contributes; `own` is the index on it of the rank that holds `got`. `counts` are
    named numbers by which mistakes multiply or divide. `tolerance` is that of `agree`.
    """

    def __init__(self, got: Any, rows: Any, wanted: Any = 1.0, own: int | None = None,
                 axes: tuple[str, ...] = ("ranks",), counts: Mapping[str, float] = {}, tolerance: float = TOLERANCE
                 ) -> None:
        self.got, self.rows, self.own, self.axes, self.counts = flat(got), np.asarray(rows), own, axes, counts
        self.shape, self.tolerance = self.rows.shape[:len(axes)], tolerance
        self.rows = self.rows.reshape(int(np.prod(self.shape)), -1)
        self.wanted = np.broadcast_to(np.asarray(wanted, dtype=float), self.shape).ravel()

    @cached_property
    def factors(self) -> np.ndarray | None:
        """The coefficients, in the shape of the axes, nan for a contribution of zeros; None if not unique."""
        used, factors = self.rows.any(axis=1), np.full(len(self.rows), np.nan)
        rows = self.rows[used]
        if self.got.shape != rows.shape[1:] or np.linalg.matrix_rank(rows) < len(rows):
            return None
        factors[used] = np.linalg.lstsq(rows.T, self.got, rcond=None)[0]
        return factors.reshape(self.shape) if self._near(factors[used] @ rows) else None

    @cached_property
    def times(self) -> float | None:
        """The factor if this is a multiple of what it should be; None if it is not."""
        right = self.wanted @ self.rows
        if self.got.shape != right.shape or not right.any():
            return None
        factor = times(self.got, right)
        return factor if self._near(factor * right) else None

    def is_right(self) -> bool:
        """Whether it is what it should be."""
        return self._is(self.wanted)

    def require_right(self, sentences: Mapping[str, str], mistakes: Mapping[str, Any] = {}, where: str = "",
                      **words: Any) -> None:
        """Raise CheckFailed, with `where` and then the sentence that `explain` finds, unless this is right."""
        if not self.is_right():
            raise CheckFailed(where + self.explain(sentences, mistakes, **words))

    def absent_from(self, axis: int = 0) -> list[int]:
        """The indices on an axis that should have a part in this but have none; [] if the coefficients are unknown."""
        if self.factors is None:
            return []
        due = (self.wanted.reshape(self.shape) != 0) & ~np.isnan(self.factors)
        zero = is_zero(self.factors) | ~due
        if axis and self.own is not None:
            due, zero = np.delete(due, self.own, axis=0), np.delete(zero, self.own, axis=0)
        others = tuple(other for other in range(len(self.shape)) if other != axis)
        return np.flatnonzero(zero.all(axis=others) & due.any(axis=others)).tolist()

    def is_times(self, factor: float) -> bool:
        """Whether this is `factor` times what it should be."""
        return self.times is not None and bool(np.isclose(self.times, factor, rtol=max(CLOSE, self.tolerance)))

    def explain(self, sentences: Mapping[str, str], mistakes: Mapping[str, Any] = {}, hints: Mapping[float, str] = {},
                **words: Any) -> str:
        """The sentence of the first pattern that has one, with the pattern's fields and `words` filled in.

        `mistakes` are named coefficients, for which there are sentences. `hints` has sentences by factor, for a tensor
        that is so many times what it should be; they come before all patterns.
        """
        for factor, hint in hints.items():
            if self.is_times(factor):
                return hint
        sentences = {"rounded": ROUNDED, **sentences}
        name, fields = next(pattern for pattern in self.patterns(mistakes) if pattern.name in sentences)
        return sentences[name].format(**{**self._fields(), **fields, **self.counts, **words})

    def patterns(self, mistakes: Mapping[str, Any] = {}) -> Iterator[Pattern]:
        """The patterns that fit, the most telling first."""
        if self._is(0):
            yield Pattern("nothing")
        for place in range(len(self.rows)) if len(self.axes) == 1 else ():
            if self._is(self._one(place)):
                yield Pattern("own" if place == self.own else "other", {"other": place})
        for name, factors in {"sum": 1, "mean": 1 / len(self.rows), **mistakes}.items():
            if self._is(factors):
                yield Pattern(name)
        if agree(self.got, self.wanted @ self.rows, self.rows, SIX_DIGITS):
            yield Pattern("rounded")
        for name, count in self.counts.items():
            if self.is_times(count):
                yield Pattern(f"times {name}")
            if self.is_times(1 / count):
                yield Pattern(f"over {name}")
        if self.own is not None and len(self.axes) == 1 and self._is(self.wanted + self._one(self.own)):
            yield Pattern("added to own")
        if self.times is None and self.tolerance <= CLOSE:  # with a coarser one, many numbers would fit by chance
            yield from self._in_another_way()
        if self.factors is not None:
            yield from self._by_factors(self.factors)
        if self.times is not None:
            yield Pattern("scaled")
        if self.factors is not None:
            yield Pattern("unequal")
        yield Pattern("unknown")

    def _by_factors(self, factors: np.ndarray) -> Iterator[Pattern]:
        zero, known = is_zero(factors) | np.isnan(factors), factors[~np.isnan(factors)]
        if self.own is not None and np.delete(zero, self.own, axis=0).all():
            yield Pattern("only own", {"own_times": short(factors[self.own].ravel()[-1])})
        for axis, name in enumerate(self.axes[1:], 1):
            if zero.shape[axis] > 1 and np.delete(zero, -1, axis=axis).all():
                yield Pattern(f"only last {name}")
        for axis, name in enumerate(self.axes):
            if absent := self.absent_from(axis):
                yield Pattern(f"missing {name}", {"absent": listed(absent)})
        if np.ptp(self.wanted) > CLOSE and np.allclose(known, known[0], rtol=CLOSE):
            yield Pattern("alike")

    def _in_another_way(self) -> Iterator[Pattern]:
        """The patterns that fit if the numbers were not all made from the contributions by the same sum."""
        if self._is_divided_in_flight():
            yield Pattern("in flight")
        for reduction, reduced in REDUCTIONS.items() if len(self.axes) == 1 and self.factors is None else ():
            picked = reduced(self.rows, axis=0)
            if self._near(picked) or self._near(picked * self.wanted[0]):
                yield Pattern("picked", {"reduction": reduction})

    def _is_divided_in_flight(self) -> bool:
        """Whether each number is a sum of all contributions, some divided by how many there are, once or more."""
        size = len(self.rows)
        if not 1 < size <= MOST_IN_FLIGHT or len(self.axes) > 1 or self.got.shape != self.rows.shape[1:]:
            return False
        powers = float(size) ** -np.arange(size + 1)  # a part passes through each rank's tensor, which divides it
        apart = np.abs([np.array(factors) @ self.rows - self.got for factors in product(powers, repeat=size)])
        return bool((apart.min(axis=0) <= self.tolerance * np.abs(self.rows).max()).all())

    def _fields(self) -> dict[str, Any]:
        """The fields that any sentence may use."""
        found: dict[str, Any] = {"size": len(self.rows), "share": short(self.wanted[0])}
        if self.times is not None:
            found["times"] = short(self.times)
        if self.factors is not None:
            known = self.factors[~np.isnan(self.factors)]
            found |= {"weights": in_words(known), "lowest": short(known.min()), "highest": short(known.max())}
        return found

    def _one(self, place: int) -> np.ndarray:
        return (np.arange(len(self.rows)) == place).astype(float)

    def _is(self, factors: Any) -> bool:
        """Whether these coefficients give what was observed."""
        return self._near(np.broadcast_to(np.asarray(factors, dtype=float).ravel(), len(self.rows)) @ self.rows)

    def _near(self, other: np.ndarray) -> bool:
        return agree(self.got, other, self.rows, self.tolerance)


def is_zero(factors: Any) -> np.ndarray:
    """Which of these factors are 0 up to rounding."""
    return np.isclose(factors, 0, atol=TOLERANCE)


def in_words(factors: Any) -> str:
    """Factors in six digits, without what rounding leaves of a zero."""
    return listed(map(short, np.round(np.asarray(factors).ravel(), 9) + 0.0))
