"""L1: the constants of `machines`, found from measured steps: the smallest error on them."""
from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from book.columns import Columns
from book.cost.cluster import Cluster
from book.cost.layouts import Layout
from book.cost.machines import CONSTANTS, EACH, MACHINES, SOFTWARE, cluster_of, groups_of, like
from book.cost.published import Published
from book.cost.sizes import stacked
from book.cost.step import costs
from book.cost.terms import Terms

Constants = Mapping[str, Mapping[str, float]]
# What a fit begins with, and which constants have a factor for each GPU, software, or pair of both.
START = {"efficiency": 0.75, "num_passes": 6.5, "product_depth": 500, "attention_share": 0.3, "fp8_speedup": 1.6,
         "launch_s": 5e-4, "expert_launch_s": 1e-3, "inside_share": 0.8, "across_share": 0.5,
         "hop_s": 1e-4, "ring_hop_s": 1e-6, "tensor_hidden_share": 0.2, "stage_hidden_share": 0.7, "hidden_share": 0.8,
         "head_share": 0.5}
BY_GPU = ("efficiency", "attention_share", "across_share", "fp8_speedup", "launch_s", "inside_share")
BY_SOFTWARE = ("efficiency", "num_passes", "attention_share", "launch_s", "across_share", "hidden_share",
               "tensor_hidden_share")
BY_PAIR = ("attention_share", "across_share", "efficiency", "inside_share", "num_passes")
MEMORY = {"kept_factor": 1.2, "logit_bytes": 8, "fixed_bytes": 2e9}
OF_ONE = {"nanotron": {"send_node_s": 1e-3, "slowdown": 1.0}}
TIGHT = 0.002  # how much a factor of e costs, beside a mean error of 1; a tenth of it if it is one of a free group
MOST_ERROR, LEAST_ERROR = 0.7, 0.02  # no single row counts for more: some were measured on a bad day
# Of `settled`: the logarithm of how far apart starts are, where errors begin to count in squares first, when it stops.
SPREAD, ROUND_FIRST, LEAST_GAIN = 0.2, 0.2, 1e-5


class Rows:
    """Measured steps, to be estimated all at once, again and again with other constants."""

    def __init__(self, rows: Sequence[Published]):
        self.rows = list(rows)
        self.measured_s = np.array([row.step_s for row in self.rows])
        self._layouts = Columns.from_rows(Layout, [row.layout for row in self.rows])
        self._sizes = stacked([row.model.sizes for row in self.rows])
        self._batch = np.array([row.global_batch for row in self.rows], dtype=float)
        self._each = stacked([EACH[row.software] for row in self.rows])
        pairs = [(row.machine, row.software, row.precision) for row in self.rows]
        self.pairs = list(dict.fromkeys(pairs))
        self._pair = np.array([self.pairs.index(pair) for pair in pairs])
        self._num_gpus = np.array([row.layout.num_gpus for row in self.rows], dtype=float)

    def estimates(self, constants: Constants = CONSTANTS) -> dict[str, np.ndarray]:
        """The columns of an Estimate, all but the MFU."""
        kinds = stacked([cluster_of(machine, 1, software, precision, constants)
                         for machine, software, precision in self.pairs])
        return costs(Terms(self._sizes, self._clusters(kinds), self._layouts, self._batch, self._each))

    def seconds(self, constants: Constants = CONSTANTS) -> np.ndarray:
        """Seconds of each step."""
        return self.estimates(constants)["step_s"]

    def touched(self, group: str) -> np.ndarray:
        """Mask of the rows whose constants have a group's factors."""
        return np.array([group in groups_of(machine, software) for machine, software, _ in self.pairs])[self._pair]

    def _clusters(self, kinds: Any) -> Cluster:
        """A cluster for each row, as one with arrays."""
        found = object.__new__(type(kinds))
        for name, value in vars(kinds).items():
            nested = hasattr(value, "__dataclass_fields__")
            object.__setattr__(found, name, self._clusters(value) if nested else value[self._pair])
        if isinstance(kinds, Cluster):
            object.__setattr__(found, "num_gpus", self._num_gpus)
        return found


def start(rows: Rows) -> dict[str, dict[str, float]]:
    """START, and a factor of 1 for each GPU, software and pair that the rows have."""
    found: dict[str, dict[str, float]] = {"all": dict(START)}
    for machine, software, _ in rows.pairs:
        gpu = like(machine)
        found[gpu] = dict.fromkeys(BY_GPU, 1.0)
        if gpu != machine:
            found[machine] = dict.fromkeys(("efficiency", "attention_share", "launch_s"), 1.0)
        found[software] = {**dict.fromkeys(BY_SOFTWARE, 1.0), **OF_ONE.get(software, {})}
        found[f"{software} {gpu}"] = dict.fromkeys(BY_PAIR, 1.0)
    return found


def calibrated(rows: Rows, weights: np.ndarray, num_rounds: int = 25) -> dict[str, dict[str, float]]:
    """The constants with the smallest error on measured steps, each of which counts as `weights` say.

    The error is about the mean of |log(estimate/measured)|, and a little for each factor that is not 1, so that GPUs
    and software differ only where rows say so. A factor of software costs a tenth of one of a GPU or of a pair.
    """
    begin = start(rows)
    return _moved(begin, rows, lambda constants: np.log(rows.seconds(constants) / rows.measured_s), weights, num_rounds,
                  ("all", *SOFTWARE))


def settled(rows: Rows, weights: np.ndarray, num_starts: int, known: dict[str, dict[str, float]] | None = None,
            of: Sequence[str] = SOFTWARE) -> dict[str, dict[str, float]]:
    """The same from several starts, of which the first is START: the smallest of the minima where these come out.

    With what is `known` of everything else, the factors of software `of` and of its pairs alone.
    """
    begin = start(rows)
    if known is not None:
        begin = {group: factors for group, factors in begin.items() if group.split()[0] in of}
    others = known or {}
    return others | _moved(begin, rows, lambda found: np.log(rows.seconds({**others, **found}) / rows.measured_s),
                           weights, 60, ("all", *SOFTWARE), num_starts)


def calibrated_memory(rows: Rows, weights: np.ndarray, known: Constants | None = None,
                      num_rounds: int = 25) -> dict[str, dict[str, float]]:
    """What of MEMORY fits the bytes of a GPU best, and their factors by software.

    Rows that say no bytes but ran were below nine tenths of the GPU's memory, those with a step of 0 above. With what
    is `known` of all software, the rows are of software that says no bytes and of which nothing ran out: its factors
    are fitted, to what ran in all of the memory.
    """
    begin: dict[str, dict[str, float]] = {} if known else {"all": dict(MEMORY)}
    begin |= {software: dict.fromkeys(MEMORY, 1.0) for _, software, _ in rows.pairs}
    held = np.array([row.memory_bytes for row in rows.rows])
    room = (1.0 if known else 0.9) * np.array([MACHINES[row.machine].memory_bytes for row in rows.rows])

    def off(constants: Constants) -> np.ndarray:
        groups = {**(known or {}), **constants}.items()
        found = rows.estimates({**CONSTANTS, **{group: {**CONSTANTS.get(group, {}), **of}
                                                for group, of in groups}})["memory_bytes"]
        over = np.log(found / np.where(held > 0, held, room))
        return np.where(held > 0, over, np.where(rows.measured_s > 0, np.maximum(over, 0), np.minimum(over, 0)))

    return _moved(begin, rows, off, weights, num_rounds, ("all",))


def _moved(begin: Constants, rows: Rows, off_by: Callable[[Constants], np.ndarray], weights: np.ndarray,
           num_rounds: int, free: Sequence[str], num_starts: int = 0) -> dict[str, dict[str, float]]:
    """Constants near `begin` with which what they are off by is small; those of `free` groups may be less near."""
    keys = [(group, name) for group, of in begin.items() for name in of]
    first = np.array([begin[group][name] for group, name in keys])
    tight = TIGHT * np.array([0.1 if group in free else 1.0 for group, _ in keys])
    touched = np.column_stack([rows.touched(group) for group, _ in keys])

    def constants(point: np.ndarray) -> dict[str, dict[str, float]]:
        found: dict[str, dict[str, float]] = {group: {} for group in begin}
        for (group, name), value in zip(keys, first * np.exp(point)):
            found[group][name] = float(value)
        return found

    def off(point: np.ndarray) -> np.ndarray:
        return off_by(constants(point))

    point, shares = np.zeros(len(keys)), weights / weights.sum()
    if not num_starts:
        return constants(smallest(off, point, shares, tight, num_rounds, touched))
    draw = np.random.default_rng(0)
    points = [point, *(draw.normal(0, SPREAD, len(keys)) for _ in range(num_starts - 1))]
    for round_at in (ROUND_FIRST, LEAST_ERROR):
        points = [smallest(off, point, shares, tight, num_rounds, touched, round_at) for point in points]
    return constants(min(points, key=lambda point: cost(off(point), point, shares, tight)))


def cost(off: np.ndarray, point: np.ndarray, weights: np.ndarray, tight: np.ndarray, round_at: float = 0.0) -> float:
    """The weighted mean of |off|, at most MOST_ERROR each, and `tight` times the point's squares.

    With `round_at`, the square of what is smaller counts, scaled so that its slope is 1 there.
    """
    size = np.minimum(np.abs(off), MOST_ERROR)
    if round_at:
        size = np.where(size < round_at, size**2 / (2 * round_at) + round_at / 2, size)
    return float((weights * size).sum() + (tight * point**2).sum())


def smallest(off: Callable[[np.ndarray], np.ndarray], point: np.ndarray, weights: np.ndarray, tight: np.ndarray,
             num_rounds: int, touched: np.ndarray, round_at: float = 0.0) -> np.ndarray:
    """Where the cost is small.

    `touched` marks the values of `off` (rows) that a coordinate of the point (columns) can change.
    Least squares, solved again and again: a row's weight is over its last error (Gauss and Newton's steps, damped as
    levenberg1944 does). Without `round_at` the steps are not quite the cost's: they round it at LEAST_ERROR, and see
    half of the squares' slope. So they can stop above a minimum. `fitted.json` was found so.
    """
    now, damping, parts = off(point), 1e-3, _apart(touched)
    least, pull = (round_at, 2 * tight) if round_at else (LEAST_ERROR, tight)
    lowest = cost(now, point, weights, tight, round_at)
    for _ in range(num_rounds):
        slopes = touched * sum(np.outer((off(point + 1e-4 * part) - now) / 1e-4, part) for part in parts)
        size = np.abs(now)
        strong = weights / np.clip(size, least, None) * (size < MOST_ERROR)
        square = slopes.T @ (strong[:, None] * slopes) + np.diag(pull + 1e-12)
        slope = slopes.T @ (strong * now) + pull * point
        for _ in range(6):
            move = np.linalg.solve(square + damping * np.diag(np.diag(square)), -slope)
            other = point + np.clip(move, -0.5, 0.5)
            after = off(other)
            reached = cost(after, other, weights, tight, round_at)
            if reached < lowest:
                gain, point, now, lowest, damping = lowest - reached, other, after, reached, damping / 5
                break
            damping *= 8
        else:
            break
        if round_at and gain < LEAST_GAIN:
            break
    return point


def _apart(touched: np.ndarray) -> list[np.ndarray]:
    """Sets of coordinates that can be moved at once, for no two of a set change the same value: a mask for each."""
    parts: list[np.ndarray] = []
    for j in range(touched.shape[1]):
        fits = [part for part in parts if not (touched[:, part == 1].any(axis=1) & touched[:, j]).any()]
        if not fits:
            parts.append(np.zeros(touched.shape[1]))
        (fits or parts[-1:])[0][j] = 1
    return parts
