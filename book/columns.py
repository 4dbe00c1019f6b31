"""L0: rows of one frozen dataclass, kept as NumPy columns.

A schedule of two million moves is five short arrays; as two million Python objects it would take minutes and gigabytes.
`Columns` looks like a sequence of the dataclass, builds a row only when it is asked for, and gives the arrays to
whoever computes. Which array a field becomes is written beside the field: `count()`, `measure()`, `word()`, `vector()`.
"""
from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, field, fields
from typing import Any

import numpy as np

ABSENT = -1  # how None is written in an integer or word column


class ColumnError(ValueError):
    """A value that its column can't hold."""


def count(**kwargs: Any) -> Any:
    """A field that holds a small integer or None (int32 column; None is kept as -1)."""
    return field(metadata={"column": "count"}, **kwargs)


def measure(**kwargs: Any) -> Any:
    """A field that holds a quantity or None (float64 column; None is kept as NaN)."""
    return field(metadata={"column": "measure"}, **kwargs)


def word(**kwargs: Any) -> Any:
    """A field that holds one of a few hashable values or None (int16 column of positions in a vocabulary)."""
    return field(metadata={"column": "word"}, **kwargs)


def vector(**kwargs: Any) -> Any:
    """A field that holds a tuple of numbers, equally long in all rows, or None (one row of a float32 matrix)."""
    return field(metadata={"column": "vector"}, **kwargs)


class Columns(Sequence[Any]):
    """An immutable sequence of `row_type` on NumPy columns.

    `arrays` maps a field's name to its array; a missing field is None in every row. `vocabularies` maps the name of
    a `word` field to the tuple of values that its array holds positions in.
    """

    def __init__(self, row_type: type, arrays: Mapping[str, np.ndarray],
                 vocabularies: Mapping[str, tuple[Any, ...]] = {}):
        self.row_type, self.vocabularies = row_type, dict(vocabularies)
        self._arrays = dict(arrays)
        self._fields: tuple[Field[Any], ...] = fields(row_type)
        lengths = {len(array) for array in self._arrays.values()}
        if len(lengths) > 1:
            raise ValueError(f"columns of {row_type.__name__} differ in length: {sorted(lengths)}")
        self._len = lengths.pop() if lengths else 0

    @classmethod
    def from_rows(cls, row_type: type, rows: Iterable[Any]) -> Columns:
        """Columns from an iterable of `row_type` objects, or of tuples in the order of its fields.

        Raises ColumnError for a value that its field can't hold.
        """
        if isinstance(rows, Columns):
            return rows
        rows = [row if isinstance(row, row_type) else _row(row_type, row) for row in rows]
        arrays, vocabularies = {}, {}
        for f in fields(row_type):
            values = [getattr(row, f.name) for row in rows]
            if f.default is not MISSING and all(value is None for value in values):
                continue
            arrays[f.name], vocabulary = _encode(f, values)
            if vocabulary is not None:
                vocabularies[f.name] = vocabulary
        return cls(row_type, arrays, vocabularies)

    def __len__(self) -> int:
        return self._len

    def __getitem__(self, index: int | slice) -> Any:
        if isinstance(index, slice):
            return self.take(np.arange(self._len)[index])
        i = range(self._len)[index]  # an IndexError like any sequence's
        return self.row_type(**{f.name: self._value(f, i) for f in self._fields})

    def __iter__(self) -> Iterator[Any]:
        return (self[i] for i in range(self._len))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sequence) or isinstance(other, str):
            return NotImplemented
        return len(self) == len(other) and all(a == b for a, b in zip(self, other))

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"<{self._len} {self.row_type.__name__} rows>"

    def has(self, name: str) -> bool:
        """Whether any row may have a value in field `name`."""
        return name in self._arrays

    def array(self, name: str) -> np.ndarray:
        """The column of field `name`, read-only; None is -1, NaN or a row of NaN. KeyError when no row has a value."""
        view = self._arrays[name].view()
        view.flags.writeable = False
        return view

    def mask(self, name: str, value: Any) -> np.ndarray:
        """Which rows hold `value` in the word field `name`, as a boolean array."""
        vocabulary = self.vocabularies.get(name, ())
        if name not in self._arrays or value not in vocabulary:
            return np.zeros(self._len, dtype=bool)
        return self._arrays[name] == vocabulary.index(value)

    def take(self, rows: np.ndarray) -> Columns:
        """The chosen rows (positions or a boolean mask), in the given order."""
        chosen = {name: array[rows] for name, array in self._arrays.items()}
        return Columns(self.row_type, chosen, self.vocabularies)

    def replace(self, **arrays: np.ndarray | None) -> Columns:
        """The same rows with other columns; None drops a column."""
        merged = {**self._arrays, **arrays}
        kept = {name: array for name, array in merged.items() if array is not None}
        return Columns(self.row_type, kept, self.vocabularies)

    def _value(self, f: Field[Any], i: int) -> Any:
        if f.name not in self._arrays:
            return None
        raw, kind = self._arrays[f.name][i], f.metadata["column"]
        if kind == "vector":
            return None if np.isnan(raw[0]) else tuple(_number(x) for x in raw.tolist())
        if kind == "measure":
            return None if np.isnan(raw) else _number(float(raw))
        if raw == ABSENT:
            return None
        return self.vocabularies[f.name][raw] if kind == "word" else int(raw)


def concatenate(parts: Sequence[Columns]) -> Columns:
    """All rows of `parts`, one after the other; fields that one part lacks are None there."""
    row_type, arrays, vocabularies = parts[0].row_type, {}, {}
    for f in fields(row_type):
        if not any(part.has(f.name) for part in parts):
            continue
        if f.metadata["column"] == "word":
            vocabularies[f.name] = tuple(dict.fromkeys(w for part in parts for w in part.vocabularies.get(f.name, ())))
        arrays[f.name] = np.concatenate([_aligned(part, f, parts, vocabularies) for part in parts])
    return Columns(row_type, arrays, vocabularies)


def _aligned(part: Columns, f: Field[Any], parts: Sequence[Columns],
             vocabularies: Mapping[str, tuple[Any, ...]]) -> np.ndarray:
    if not part.has(f.name):
        model = next(p.array(f.name) for p in parts if p.has(f.name))
        empty = np.nan if model.dtype.kind == "f" else ABSENT
        return np.full((len(part), *model.shape[1:]), empty, dtype=model.dtype)
    array = part.array(f.name)
    if f.metadata["column"] != "word":
        return array
    positions = [vocabularies[f.name].index(w) for w in part.vocabularies[f.name]] + [ABSENT]
    return np.array(positions, dtype=np.int16)[array]  # position -1 is the last: ABSENT stays ABSENT


def _row(row_type: type, row: Any) -> Any:
    try:
        return row_type(*row)
    except TypeError as error:
        names = ", ".join(f.name for f in fields(row_type))
        raise ColumnError(f"{row!r} is not a {row_type.__name__}: give ({names})") from error


def _encode(f: Field[Any], values: list[Any]) -> tuple[np.ndarray, tuple[Any, ...] | None]:
    kind = f.metadata["column"]
    if kind == "word":
        vocabulary = tuple(dict.fromkeys(v for v in values if v is not None))
        position = {w: i for i, w in enumerate(vocabulary)} | {None: ABSENT}
        return np.array([position[v] for v in values], dtype=np.int16), vocabulary
    if kind == "vector":
        return _vectors(f.name, values), None
    if kind == "measure":
        return np.array([np.nan if v is None else v for v in values], dtype=np.float64), None
    return np.array([_whole(f.name, v) for v in values], dtype=np.int32), None


def _whole(name: str, value: Any) -> int:
    if value is None:
        return ABSENT
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or not -2**31 <= value < 2**31:
        raise ColumnError(f"{name} must be a whole number, not {value!r}")
    return int(value)


def _vectors(name: str, values: list[Any]) -> np.ndarray:
    lengths = {len(v) for v in values if v is not None}
    if len(lengths) > 1 or 0 in lengths:
        raise ColumnError(f"{name} must have the same number of entries in all rows, not {sorted(lengths)}")
    width = lengths.pop() if lengths else 1
    return np.array([(np.nan,) * width if v is None else v for v in values], dtype=np.float32).reshape(-1, width)


def _number(x: float) -> int | float:
    return int(x) if x.is_integer() else x
