"""L1: the constants of `machines`, found from measured steps: the smallest mean error on the rows marked for it."""
from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields
from typing import Any

import numpy as np

from book.columns import Columns
from book.cost.cluster import Cluster
from book.cost.layouts import Layout
from book.cost.machines import CONSTANTS, EACH, cluster_of
from book.cost.published import Published
from book.cost.sizes import stacked
from book.cost.step import costs
from book.cost.terms import Terms

Constants = Mapping[str, Mapping[str, float]]
# Where a fit begins that may know nothing of CONSTANTS.
START: Constants = {
    "all": {"num_passes": 6.5, "product_depth": 500, "launch_s": 5e-4, "across_share": 0.5, "hop_s": 1e-4,
            "ring_hop_s": 3e-6, "hidden_share": 0.8},
    "a100": {"efficiency": 0.65, "attention_share": 0.3}, "h100": {"efficiency": 0.65, "attention_share": 0.3},
    "megatron": {}, "llm-foundry": {"across_share": 0.5},
    "nanotron": {"launch_s": 5e-4, "send_node_s": 1e-4, "slowdown": 1.0, "across_share": 0.5}}
MOST_ERROR = 0.4  # no single row counts for more: some were measured on a bad day


class Rows:
    """Measured steps, to be estimated all at once, again and again with other constants."""

    def __init__(self, rows: Sequence[Published]):
        self.rows = list(rows)
        self.measured_s = np.array([row.step_s for row in self.rows])
        self._layouts = Columns.from_rows(Layout, [row.layout for row in self.rows])
        self._sizes = stacked([row.model.sizes for row in self.rows])
        self._batch = np.array([row.global_batch for row in self.rows], dtype=float)
        self._each = stacked([EACH[row.software] for row in self.rows])
        kinds = list(dict.fromkeys((row.machine, row.software) for row in self.rows))
        self._kinds, self._kind = kinds, np.array([kinds.index((row.machine, row.software)) for row in self.rows])
        self._num_gpus = np.array([row.layout.num_gpus for row in self.rows], dtype=float)

    def estimates(self, constants: Constants = CONSTANTS) -> dict[str, np.ndarray]:
        """The columns of an Estimate, all but the MFU."""
        kinds = stacked([cluster_of(machine, 1, software, constants=constants) for machine, software in self._kinds])
        return costs(Terms(self._sizes, self._clusters(kinds), self._layouts, self._batch, self._each))

    def seconds(self, constants: Constants = CONSTANTS) -> np.ndarray:
        """Seconds of each step."""
        return self.estimates(constants)["step_s"]

    def _clusters(self, kinds: Any) -> Cluster:
        """A cluster for each row, as one with arrays."""
        found = object.__new__(type(kinds))
        for f in fields(kinds):
            value = getattr(kinds, f.name)
            nested = hasattr(value, "__dataclass_fields__")
            object.__setattr__(found, f.name, self._clusters(value) if nested else value[self._kind])
        if isinstance(kinds, Cluster):
            object.__setattr__(found, "num_gpus", self._num_gpus)
        return found


def calibrated(groups: Iterable[Sequence[Published]], start: Constants = CONSTANTS, num_steps: int = 500,
               num_rounds: int = 3) -> dict[str, dict[str, float]]:
    """The constants with the smallest error on groups of rows, each of which counts as much as another.

    The error is the mean of |log(estimate/measured)|. A constant that no row can tell keeps its start. Found with
    Nelder and Mead's simplex; the least error that it meets need not be the least there is.
    """
    groups = [list(group) for group in groups if len(group)]
    rows = Rows([row for group in groups for row in group])
    ends = np.cumsum([len(group) for group in groups])[:-1]
    known = {row.machine.split("-")[0] for row in rows.rows} | {row.software for row in rows.rows} | {"all"}
    keys = [(group, name) for group in start if group in known for name in start[group]
            if name not in ("kept_factor", "fixed_bytes")]  # no time depends on these

    def constants(point: np.ndarray) -> dict[str, dict[str, float]]:
        found = {group: dict(of) for group, of in start.items()}
        for (group, name), value in zip(keys, np.exp(point)):
            found[group][name] = float(value)
        return found

    def error(point: np.ndarray) -> float:
        try:
            off = np.abs(np.log(rows.seconds(constants(point)) / rows.measured_s))
        except ValueError:  # a share above 1
            return np.inf
        return float(np.mean([part.mean() for part in np.split(np.minimum(off, MOST_ERROR), ends)]))

    point = np.log([start[group][name] for group, name in keys])
    for _ in range(num_rounds):
        point = smallest(error, point, 0.15, num_steps)
    return constants(point)


def smallest(of: Callable[[np.ndarray], float], start: np.ndarray, width: float, num_steps: int) -> np.ndarray:
    """Where a function is small, found by moving the worst corner of a simplex through its middle (neldermead1965)."""
    corners = [(of(point), point) for point in (start, *(start + width * axis for axis in np.eye(len(start))))]
    for _ in range(num_steps):
        corners.sort(key=lambda corner: corner[0])
        worst = corners[-1][1]
        middle = np.mean([point for _, point in corners[:-1]], axis=0)

        def moved(stretch: float, middle: np.ndarray = middle, worst: np.ndarray = worst) -> tuple[float, np.ndarray]:
            point = middle + stretch * (middle - worst)
            return of(point), point

        found = moved(1.0)
        if found[0] < corners[0][0]:
            found = min(found, moved(2.0), key=lambda corner: corner[0])
        elif found[0] >= corners[-2][0]:
            found = min(found, moved(-0.5), key=lambda corner: corner[0])
        if found[0] < corners[-1][0]:
            corners[-1] = found
        else:
            best = corners[0][1]
            corners[1:] = [(of(point), point) for point in ((best + other) / 2 for _, other in corners[1:])]
    return min(corners, key=lambda corner: corner[0])[1]
