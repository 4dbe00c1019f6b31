"""L1: stretches of time as rows (start, end) in seconds; all but `union` expect rows ascending that do not touch."""
from __future__ import annotations

import numpy as np


def union(rows: np.ndarray) -> np.ndarray:
    """The time that any rows cover, as rows that are ascending and do not touch."""
    rows = rows[np.argsort(rows[:, 0], kind="stable")]
    if not len(rows):
        return rows
    ends = np.maximum.accumulate(rows[:, 1])
    begins = np.concatenate([[True], rows[1:, 0] > ends[:-1]])
    return np.column_stack([rows[begins, 0], ends[np.append(np.flatnonzero(begins)[1:] - 1, len(rows) - 1)]])


def length(rows: np.ndarray) -> float:
    """Seconds that rows cover."""
    return float((rows[:, 1] - rows[:, 0]).sum())


def common(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """The time that both cover."""
    return _where(one, other, True)


def less(rows: np.ndarray, holes: np.ndarray) -> np.ndarray:
    """The time that rows cover and holes do not."""
    return _where(rows, holes, False)


def _where(rows: np.ndarray, others: np.ndarray, wanted: bool) -> np.ndarray:
    edges = np.unique(np.concatenate([rows.ravel(), others.ravel()]))
    middles = (edges[1:] + edges[:-1]) / 2
    kept = _covers(rows, middles) & (_covers(others, middles) == wanted)
    return union(np.column_stack([edges[:-1][kept], edges[1:][kept]])) if len(edges) > 1 else rows[:0]


def _covers(rows: np.ndarray, times_s: np.ndarray) -> np.ndarray:
    if not len(rows):
        return np.zeros(len(times_s), bool)
    at = np.searchsorted(rows[:, 0], times_s, "right") - 1
    return (at >= 0) & (times_s < rows[at, 1])


def covered_s(rows: np.ndarray, times_s: np.ndarray) -> np.ndarray:
    """How many seconds up to each time rows cover."""
    if not len(rows):
        return np.zeros(len(times_s))
    sums = np.repeat(np.cumsum(rows[:, 1] - rows[:, 0]), 2)
    sums[::2] -= rows[:, 1] - rows[:, 0]
    return np.interp(times_s, rows.ravel(), sums)
