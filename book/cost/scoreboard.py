"""L1: how far off the planner is on steps that its constants were not fitted to, and the error bars that follow.

One protocol everywhere: models are left out in turn (`NUM_FOLDS` parts, each with all rows of its models, whoever
measured them), the constants are fitted to the rest, and these rows are estimated. A layout that a set has at several
numbers of GPUs counts once. `data/fitted.json` has what came out: the constants fitted to all rows, and the ratio of
the left-out estimate to each measured step. For GPUs that nobody measured, the same with all rows of a GPU's family
left out: so far off is an estimate that knows only a data sheet. `lockstep calibrate` writes all anew.
"""
from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np

from book.cost.calibration import Rows, calibrated, calibrated_memory, settled
from book.cost.layouts import Layout
from book.cost.machines import FITTED_FILE, cluster_of, like
from book.cost.measured import data_sets
from book.cost.published import Published

NUM_FOLDS = 12
OLD = ("zero3",)  # software of 2021 that nobody runs today: scored, but never fitted to
FAMILIES = {"experts": "experts", "h100": "dense, H100 to GB300", "fsdp": "FSDP", "a100": "A100, 3-D layouts",
            "sweeps": "sweeps of small models"}
SWEEPS = ("nanotron", "vtrain-single", "vtrain-multi")
STRAY = ("nanotron",)  # half of its pipelines wait a second more in each micro-batch: no measure for other software
ENOUGH, MOST = 10, 30  # layouts that an error bar needs, for one in ten is read off; for how many a set counts in it


@dataclass(frozen=True)
class Measured:
    """All rows with a step, in the order of the sets, with what each one counts; `ratios` are of left-out estimates.

    `new_ratios` are of estimates that knew no step of the row's GPU; NaN where none would have known its software.
    """

    names: tuple[str, ...]
    rows: tuple[Published, ...]
    weights: np.ndarray
    ratios: np.ndarray
    new_ratios: np.ndarray

    @property
    def estimated_s(self) -> np.ndarray:
        """The left-out estimates."""
        return self.ratios * [row.step_s for row in self.rows]

    def where(self, holds: Sequence[bool] | np.ndarray) -> Measured:
        """The rows that are marked."""
        at = np.flatnonzero(holds)
        return Measured(tuple(self.names[i] for i in at), tuple(self.rows[i] for i in at), self.weights[at],
                        self.ratios[at], self.new_ratios[at])


@cache
def measured() -> Measured:
    """All rows that were measured, each with the ratios that `fitted.json` has."""
    pairs = [(name, row) for name, data in data_sets().items() for row in data.rows]
    names, rows = zip(*pairs)
    often = Counter(_layout(name, row) for name, row in pairs)
    weights = np.array([1 / often[_layout(name, row)] for name, row in pairs])
    known = json.loads(files("book.cost").joinpath(*FITTED_FILE).read_text("utf-8"))
    ratios = [np.concatenate([_kept(known.get(key, {}).get(name), len(data.rows))
                              for name, data in data_sets().items()])
              for key in ("left_out", "gpu_left_out")]
    return Measured(names, rows, weights, *ratios)


Fit = Callable[[Measured], dict[str, dict[str, float]]]


def _kept(ratios: list[float | None] | None, num_rows: int) -> np.ndarray:
    """The ratios of a set; NaN, which spoils every score, if its rows have changed since `book.cost calibrate` ran."""
    return np.array(ratios if ratios and len(ratios) == num_rows else [np.nan] * num_rows, dtype=float)


def _layout(name: str, row: Published) -> tuple[object, ...]:
    """What makes two rows the same layout: in a sweep, batch and replicas too."""
    batch = (row.layout.dp, row.global_batch) if name in SWEEPS or name.startswith("foundry") else ()
    return (name, row.name, row.model.num_tokens, row.model.attention, row.machine, row.precision,
            replace(row.layout, dp=1, ep=1), row.layout.ep, batch)


def family(name: str, row: Published) -> str:
    """The key in FAMILIES of a row of a set."""
    if row.model.experts:
        return "experts"
    if name in SWEEPS:
        return "sweeps"
    if row.software in ("torchtitan", "llm-foundry", "maxtext"):
        return "fsdp"
    return "a100" if like(row.machine) == "a100" else "h100"


def fit_weights(some: Measured) -> np.ndarray:
    """What each row counts in a fit: less in sets with many layouts; every sixth row of large sweeps stands for six."""
    total: Counter[str] = Counter()
    for name, weight in zip(some.names, some.weights):
        total[name] += weight
    found = some.weights / np.sqrt([total[name] for name in some.names])
    thin = np.array([name in ("nanotron", "vtrain-single") for name in some.names])
    found = np.where(thin, np.where(np.arange(len(found)) % 6 == 0, 6 * found, 0), found)
    return np.where([name in OLD for name in some.names], 0, found)


def fitted(some: Measured) -> dict[str, dict[str, float]]:
    """The constants that fit these rows best."""
    return calibrated(*_fit_rows(some, fit_weights(some)))


def fitted_from(num_starts: int, some: Measured) -> dict[str, dict[str, float]]:
    """The same from several starts, with the sets of STRAY by themselves: their two groups are two minima.

    All else is fitted without them, then the factors of their software with all else known. This has one start, which
    is near the group of rows that take no second more.
    """
    weights, stray = fit_weights(some), np.array([name in STRAY for name in some.names])
    found = settled(*_fit_rows(some, np.where(stray, 0, weights)), num_starts)
    rows, counts = _fit_rows(some, np.where(stray, weights, 0))
    return settled(rows, counts, 1, found, sorted({row.software for row in rows.rows})) if len(counts) else found


def _fit_rows(some: Measured, weights: np.ndarray) -> tuple[Rows, np.ndarray]:
    """The rows that count, and what."""
    used = np.flatnonzero(weights)
    return Rows([some.rows[i] for i in used]), weights[used]


def left_out(some: Measured, fit: Fit = fitted) -> np.ndarray:
    """Estimated over measured seconds of each row, by constants fitted without any row of its model (a minute)."""
    models = [row.name.split("/")[0] for row in some.rows]
    part = {model: i % NUM_FOLDS for i, model in enumerate(sorted(set(models)))}
    fold = np.array([part[model] for model in models])
    found = np.empty(len(models))
    for k in range(NUM_FOLDS):
        mine = some.where(fold == k)
        rows = Rows(mine.rows)
        found[fold == k] = rows.seconds(fit(some.where(fold != k))) / rows.measured_s
    return found


def gpu_left_out(some: Measured, fit: Fit = fitted) -> np.ndarray:
    """Estimated over measured seconds of each row, by constants fitted without any row of its GPU's family.

    NaN where the rest has no step of the row's software.
    """
    gpus = np.array([like(row.machine) for row in some.rows])
    found = np.full(len(gpus), np.nan)
    for gpu in set(gpus):
        rest = some.where(gpus != gpu)
        mine = np.logical_and(gpus == gpu, [row.software in {one.software for one in rest.rows} for row in some.rows])
        rows = Rows(some.where(mine).rows)
        found[mine] = rows.seconds(fit(rest)) / rows.measured_s
    return found


def fitted_memory() -> dict[str, dict[str, float]]:
    """The constants of memory that fit best the rows that say how much they held, or that they ran out.

    Of software where no row says either, what ran needed no more than there is, and no less than the formulas count.
    """
    held = [(name, row) for name, data in data_sets().items() for row in data.rows
            if row.memory_bytes or data.refused_rows]
    held += [("out of memory", row) for data in data_sets().values() for row in data.refused_rows]
    said = calibrated_memory(*_by_sets(held))
    rest = [(name, row) for name, data in data_sets().items() for row in data.rows if row.software not in said]
    ran = calibrated_memory(*_by_sets(rest), known=said)
    for of in ran.values():  # a bound from above alone would take any: nothing keeps less than the formulas count
        of["kept_factor"] = max(of["kept_factor"], 1 / said["all"]["kept_factor"])
    return {**said, **ran}


def _by_sets(some: Sequence[tuple[str, Published]]) -> tuple[Rows, np.ndarray]:
    """Rows of named sets, and what each counts: less in large sets."""
    often = Counter(name for name, _ in some)
    return Rows([row for _, row in some]), np.array([often[name] ** -0.5 for name, _ in some])


def calibrate(path: Path, num_starts: int = 0) -> str:
    """Fit all constants, leave models out in turn, then GPUs, and write all to a file; 0 starts as `fitted` does."""
    some, fit = measured(), partial(fitted_from, num_starts) if num_starts else fitted
    memory = fitted_memory()
    constants = {group: {**of, **memory.get(group, {})} for group, of in fit(some).items()}
    said: dict[str, dict[str, Any]] = {
        "constants": {group: {name: float(f"{x:.4g}") for name, x in of.items()} for group, of in constants.items()},
        "left_out": _by_set(some, left_out(some, fit)), "gpu_left_out": _by_set(some, gpu_left_out(some, fit))}
    parts = [f'"{key}": {{\n' + ",\n".join(f' "{name}": {json.dumps(of)}' for name, of in part.items()) + "}"
             for key, part in said.items()]
    path.write_text("{" + ",\n".join(parts) + "}\n", "utf-8")
    return f"wrote {path}"


def _by_set(some: Measured, ratios: np.ndarray) -> dict[str, list[float | None]]:
    """The ratios of each set that has some."""
    found: dict[str, list[float | None]] = defaultdict(list)
    for name, ratio in zip(some.names, ratios):
        found[name].append(None if np.isnan(ratio) else float(f"{ratio:.4g}"))
    return {name: of for name, of in found.items() if any(of)}


def _quantiles(values: np.ndarray, weights: np.ndarray, shares: Sequence[float]) -> np.ndarray:
    """The values below which so much of the weight is."""
    order = np.argsort(values)
    return np.interp(shares, (np.cumsum(weights[order]) - weights[order] / 2) / weights.sum(), values[order])


@cache
def bar(machine: str, software: str, experts: bool, staged: bool = False) -> tuple[tuple[float, ...], str]:
    """Measured over estimated seconds of left-out steps like these, as quartiles and nine of ten; and whose they are.

    The steps are of the same software and GPU, or where fewer than ENOUGH layouts were measured, of the same software
    or the same GPU; then, or if nothing is alike, the bar is twice as wide. Machines that share constants are one
    here. For a machine that no step was measured on, "" too, they are those of other GPUs by `new_ratios`. Without
    experts they are of pipelines where this one is `staged`, else of layouts that have none.
    """
    some = measured()
    some = some.where([bool(row.model.experts) == experts and (experts or (row.layout.pp > 1) == staged)
                       and name not in OLD and (row.software == software or name not in STRAY)
                       for name, row in zip(some.names, some.rows)])
    known = is_measured(machine)
    some = some if known else some.where(np.isfinite(some.new_ratios))
    gpu = [like(row.machine) == like(machine) if known else True for row in some.rows]
    same = [row.software == software for row in some.rows]
    choices = [some.where(holds) for holds in (
        np.logical_and(gpu, same), np.logical_or(gpu, same), np.ones(len(same), bool))]
    near = next(of for of in choices if of.weights.sum() >= ENOUGH)
    wide = 1.0 if near is choices[0] else 2.0
    ratios = near.ratios if known else near.new_ratios
    found = _quantiles(-np.log(ratios), _evenly(near), (0.25, 0.5, 0.75, 0.9))
    found = np.exp(found[1] + wide * (found - found[1]))
    if staged and wide > 1:  # no surer than without a pipeline
        low, _, *high = bar(machine, software, experts)[0]
        found[0], found[2:] = min(found[0], low), np.maximum(found[2:], high)
    whose = like(machine).upper() if known else "GPUs left out of the fit"
    words = f"{software}{' pipelines' * (staged and not experts)} on {whose}{' with experts' * experts}"
    if wide > 1:
        words = f"few or no {words}, and others"
    return tuple(round(float(factor), 4) for factor in found), words  # which pages carry for each GPU and software


def _evenly(some: Measured) -> np.ndarray:
    """What each row counts where no sweep may drown the other sets: of a set at most MOST layouts."""
    total = {name: some.weights[[one == name for one in some.names]].sum() for name in set(some.names)}
    return some.weights * [min(1, MOST / total[name]) for name in some.names]


def new_gpu_errors() -> dict[str, float]:
    """Mean errors of dense rows of each GPU, estimated without any step of it; no sweep drowns the other sets."""
    some = measured()
    some = some.where([name not in OLD and not row.model.experts and np.isfinite(ratio)
                       for name, row, ratio in zip(some.names, some.rows, some.new_ratios)])
    gpus = np.array([like(row.machine) for row in some.rows])
    weights, off = _evenly(some), np.abs(some.new_ratios - 1)
    return {gpu: float(np.average(off[gpus == gpu], weights=weights[gpus == gpu])) for gpu in sorted({*gpus})}


def is_measured(machine: str) -> bool:
    """Whether steps were measured on a machine or on one that shares its constants."""
    return machine != "" and like(machine) in {like(row.machine) for row in measured().rows}


@dataclass(frozen=True)
class Score:
    """The errors on some rows, as shares of the measured seconds, each layout counted once.

    `bias` is the median of estimate/measured - 1; `null` the mean error of "40 % of the peak, always"; `half` and
    `above` the shares of rows inside the bar for half of them, and above the one for nine of ten.
    """

    num_rows: int
    num_layouts: float
    mean: float
    median: float
    bias: float
    null: float
    half: float
    above: float


def score(some: Measured) -> Score:
    """The score of rows, by their left-out estimates."""
    off, share = np.abs(some.ratios - 1), some.weights / some.weights.sum()
    always = np.array([row.model.step_flops(row.global_batch) / (0.4 * row.layout.num_gpus * row.peak_flops_per_s)
                       / row.step_s for row in some.rows])
    bars = np.array([bar(row.machine, row.software, bool(row.model.experts), row.layout.pp > 1)[0]
                     for row in some.rows])
    took = 1 / some.ratios
    half = (bars[:, 0] <= took) & (took <= bars[:, 2])
    return Score(len(some.rows), float(some.weights.sum()), float((off * share).sum()),
                 float(_quantiles(off, some.weights, [0.5])[0]),
                 float(_quantiles(some.ratios, some.weights, [0.5])[0] - 1), float((np.abs(always - 1) * share).sum()),
                 float((half * share).sum()), float(((took > bars[:, 3]) * share).sum()))


def regrets(rows: Sequence[Published], estimated_s: Sequence[float] | np.ndarray, tries: int = 1) -> Iterator[float]:
    """What the layout that the planner would choose among those measured took longer than the best of them.

    One for each model, sequence, number of GPUs and batch of which two layouts or more were measured; a layout that was
    measured again counts with its mean. `estimated_s` are the seconds that the planner expects of each row. With more
    `tries`, so many layouts that it expects to be the fastest are run, and the best of these is kept; with 0, the mean
    over all layouts: what a choice by lot costs.
    """
    groups: dict[Any, dict[Layout, list[tuple[float, float]]]] = defaultdict(lambda: defaultdict(list))
    for row, step_s in zip(rows, estimated_s):
        groups[row.name, row.model.num_tokens, row.machine, row.precision, row.layout.num_gpus,
               row.global_batch, row.model.attention][row.layout].append((step_s, row.step_s))
    for group in groups.values():
        if len(group) > 1:
            estimated, took = np.array([np.mean(times, axis=0) for times in group.values()]).T
            kept = took[estimated.argsort()[:tries]].min() if tries else took.mean()
            yield float(kept / took.min() - 1)


def memory_errors() -> np.ndarray:
    """Estimated over measured memory of a GPU, less 1, of the rows that say how much they took."""
    rows = Rows([row for one in data_sets().values() for row in one.rows if row.memory_bytes])
    return rows.estimates()["memory_bytes"] / np.array([row.memory_bytes for row in rows.rows]) - 1


def too_large() -> tuple[int, float, float]:
    """Of layouts that ran: how many, which share would need more than may be used, and which more than there is."""
    rows = Rows(measured().rows)
    held = rows.estimates()["memory_bytes"]
    clusters = [cluster_of(row.machine, 1, row.software) for row in rows.rows]
    tight, large = (float(np.mean(held > [getattr(cluster, room) for cluster in clusters]))
                    for room in ("usable_bytes", "memory_bytes"))
    return len(held), tight, large


def ran_out() -> tuple[int, float]:
    """Of reported layouts whose bytes would fit: how many, and which share of them ran out of memory."""
    found = []
    for data in data_sets().values():
        if data.refused_rows:
            rows = Rows([*data.rows, *data.refused_rows])
            clusters = [cluster_of(row.machine, 1, row.software) for row in rows.rows]
            fits = rows.estimates()["memory_bytes"] <= [cluster.usable_bytes for cluster in clusters]
            found += list(rows.measured_s[fits] == 0)
    return len(found), float(np.mean(found))
