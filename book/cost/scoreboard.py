"""L1: how far off the planner is, data set by data set, on rows that its constants were not fitted to."""
from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from book.cost.calibration import START, Constants, Rows, calibrated
from book.cost.machines import CONSTANTS, MACHINES
from book.cost.measured import DataSet, data_sets

# The plain formula: two constants, as `published` has them for A100, and no overheads.
PLAIN: Constants = {"all": {"num_passes": 6.5}, "a100": {"efficiency": 0.645}, "h100": {"efficiency": 0.645},
                    "megatron": {}, "llm-foundry": {}, "nanotron": {}}


@dataclass(frozen=True)
class Score:
    """One data set's score: how many rows were compared and refused, and the errors as shares of the measured seconds.

    `bias` is the median of estimate/measured - 1; `null` the mean error of one share of the peak for the whole set, the
    best for these very rows; `one_row` that of the estimate if any one of the rows sets its scale for the others.
    `regrets` are what the layout that the planner would choose among those measured took longer than the best of them,
    for each model, number of GPUs and batch; empty where nobody measured two.
    """

    name: str
    title: str
    num_rows: int
    num_refused: int
    mean: float
    median: float
    bias: float
    null: float
    plain: float
    one_row: float
    regrets: tuple[float, ...]

    @property
    def skill(self) -> float:
        """The share of the null model's error that the estimate avoids; below 0 it is worse."""
        return 1 - self.mean / self.null


def score(data: DataSet, constants: Constants = CONSTANTS) -> Score:
    """One data set's score, on its rows that are not marked for calibration."""
    held = [row for row in data.rows if not row.calibrates]
    rows = Rows(held)
    ratio = rows.seconds(constants) / rows.measured_s
    plain = rows.seconds(PLAIN) / rows.measured_s
    peak = np.array([row.model.step_flops(row.global_batch, row.layout.recompute) / row.layout.num_gpus
                     / MACHINES[row.machine].bf16_flops_per_s for row in held]) / rows.measured_s
    off = np.abs(ratio - 1)
    return Score(data.name, data.title, len(held), sum(number for _, number in data.refused), off.mean(),
                 float(np.median(off)), float(np.median(ratio) - 1), _null(peak), np.abs(plain - 1).mean(),
                 _one_row(ratio), tuple(_regrets(data, constants)))


def _null(share: np.ndarray) -> float:
    """The smallest mean error of one share of the peak: one of those that were measured is the best."""
    return float(np.abs(share[None] / share[:, None] - 1).mean(axis=1).min())


def _one_row(ratio: np.ndarray) -> float:
    """The mean error over all pairs of one row that sets the scale and another."""
    n = len(ratio)
    return float(np.abs(ratio[None] / ratio[:, None] - 1).sum() / (n * (n - 1)))


def _regrets(data: DataSet, constants: Constants) -> Iterator[float]:
    rows = Rows(data.rows)
    estimated, groups = rows.seconds(constants), defaultdict(list)
    for i, row in enumerate(data.rows):
        groups[row.model, row.layout.num_gpus, row.global_batch].append(i)
    for choice in map(np.array, groups.values()):
        if len(choice) > 1:
            measured = rows.measured_s[choice]
            yield float(measured[estimated[choice].argmin()] / measured.min() - 1)


def leave_one_out(data: dict[str, DataSet] | None = None) -> dict[str, float]:
    """Each set's mean error when the constants are fitted, from START, without any row of the same source."""
    data = data or data_sets()
    found = {}
    for source in dict.fromkeys(one.source for one in data.values()):
        others = [one for one in data.values() if one.source != source]
        constants = calibrated([[row for row in one.rows if row.calibrates] for one in others], START, num_rounds=4)
        for one in (one for one in data.values() if one.source == source):
            rows = Rows(one.rows)
            found[one.name] = float(np.abs(rows.seconds(constants) / rows.measured_s - 1).mean())
    return found


def memory_errors(data: DataSet | None = None) -> np.ndarray:
    """Estimated over measured memory of a GPU, less 1, of the rows that say how much they took."""
    rows = Rows([row for row in (data or data_sets()["nanotron"]).rows if row.memory_bytes])
    measured = np.array([row.memory_bytes for row in rows.rows])
    return rows.estimates()["memory_bytes"] / measured - 1


def scoreboard(refit: bool = False) -> str:
    """All scores as a table; with `refit` also with the constants fitted again without each source (a minute)."""
    without = leave_one_out() if refit else {}
    lines = [f"{'':15}{'rows':>4}{'refused':>8}{'mean':>6}{'median':>7}{'bias':>6}{'null':>6}{'skill':>6}{'plain':>6}"
             f"{'one row':>8}{'regret':>12}" + f"{'left out':>9}" * refit]
    for data in data_sets().values():
        one = score(data)
        numbers = ((one.mean, 6, 1), (one.median, 7, 1), (one.bias, 6, 1), (one.null, 6, 1), (one.skill, 6, 0),
                   (one.plain, 6, 1), (one.one_row, 8, 1))
        parts = [f"{one.name:15}{one.num_rows:4}{one.num_refused:8}",
                 *(f"{100 * value:{width}.{digits}f}" for value, width, digits in numbers)]
        regret = f"{100 * np.median(one.regrets):.1f}, {100 * np.mean(one.regrets):.1f}" if one.regrets else ""
        parts += [f"{regret:>12}", f"{100 * without[one.name]:9.1f}" if refit else ""]
        lines.append("".join(parts).rstrip())
    off = np.abs(memory_errors())
    lines += [f"memory of nanotron's {len(off)} rows: mean error {100 * off.mean():.1f}, "
              f"median {100 * np.median(off):.1f}",
              "All in per cent; errors on rows that nothing was fitted to; regret: median, mean."]
    return "\n".join(lines)
