"""L1: the planner's answer: which layout for this model on these GPUs, what it costs, and how certain that is."""
from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from book.cost.cluster import Cluster
from book.cost.layouts import Layout, known
from book.cost.machines import SOFTWARE, cluster_of, machine_key
from book.cost.models import model_named
from book.cost.scoreboard import bar, memory_errors
from book.cost.scoreboard import measured as measured_rows
from book.cost.search import WORDS, Search, search
from book.cost.step import PARTS, Estimate, estimate
from book.cost.transformer import Transformer
from book.cost.tuning import FULL, Tuning

TOKENS_A_STEP = 4_194_304  # the batch that llama3 starts with; the default here
TOKENS_A_TUNING_STEP = 131_072  # where a part is frozen: 64 sequences of 2,048, say
LONG = 8192  # tokens of a sequence from which on cp is tried


@dataclass(frozen=True)
class MeasuredStep:
    """A step that you measured: its layout, its seconds, and a GPU's peak memory in bytes if you know it."""

    layout: Layout
    step_s: float
    memory_bytes: float = 0.0

    def __post_init__(self) -> None:
        if not self.step_s > 0 or not self.memory_bytes >= 0:
            raise ValueError(f"step_s must be above 0 and memory_bytes at least 0, not {self.step_s} and "
                             f"{self.memory_bytes}")


@dataclass(frozen=True)
class Plan:
    """An answer: the fastest layout that fits (`search` has all), with an error bar from measured steps (`basis`).

    If the estimate is as far off for you as for those steps, half of all such steps take between `low_s` and `high_s`,
    and one in ten takes more than `worst_s`. `scale` is the ratio of your measured step to its estimate, 1 without one;
    `lost` counts the layouts that no longer fit because of it.
    """

    model: Transformer
    model_name: str
    gpu_name: str
    search: Search
    tokens: float
    price: float
    low_s: float
    high_s: float
    worst_s: float
    basis: str
    halved: Search
    scale: float = 1.0
    memory_scale: float = 1.0
    lost: int = 0
    tuning: Tuning = FULL

    @cached_property
    def layout(self) -> Layout:
        """The layout chosen."""
        found: Layout = self.search.layouts[self.search.best]
        return found

    @cached_property
    def cost(self) -> Estimate:
        """Its estimate."""
        found: Estimate = self.search.estimates[self.search.best]
        return found

    @property
    def tokens_a_step(self) -> int:
        """Tokens of the batch."""
        return self.search.global_batch * self.model.num_tokens

    @property
    def gpu_hours(self) -> float:
        """GPU hours for all tokens, without failures or restarts."""
        return self.tokens / self.tokens_a_step * self.cost.step_s * self.search.cluster.num_gpus / 3600

    @property
    def dollars(self) -> float:
        """The price of these hours."""
        return self.gpu_hours * self.price

    @property
    def binds(self) -> tuple[tuple[str, float], ...]:
        """Where a step's time goes, in words, with the shares; the largest comes first."""
        shares = [(WORDS[part], getattr(self.cost, part) / self.cost.step_s) for part in PARTS]
        return tuple(sorted((pair for pair in shares if pair[1] >= 0.005), key=lambda pair: -pair[1]))

    @property
    def next_best(self) -> tuple[tuple[Layout, float], ...]:
        """The three fastest alternatives that differ in pp, dp, tp, cp or ep, and by which share they are slower."""
        found: dict[tuple[int, ...], tuple[Layout, float]] = {}
        axes = np.column_stack([self.search.layouts.array(name) for name in ("pp", "dp", "tp", "cp", "ep")])
        step_s = self.search.estimates.array("step_s")
        for position in self.search.ranked:
            key = tuple(axes[position].tolist())
            if key not in found:
                found[key] = (self.search.layouts[int(position)], float(step_s[position] / self.cost.step_s - 1))
            if len(found) == 4:
                break
        return tuple(found.values())[1:]

    def __str__(self) -> str:
        """The answer, one line per figure."""
        return "\n".join(_lines(self))


def plan(model: str | Transformer, gpus: int, gpu: str | Cluster = "H100", tokens: float = 0.0, price: float = 0.0,
         batch: int = 0, num_tokens: int = 0, software: str = SOFTWARE[0], precision: str = "bf16",
         measured: MeasuredStep | None = None, zero_stages: Sequence[int] = (), tuning: Tuning = FULL) -> Plan:
    """The fastest layout of a model that fits on `gpus` GPUs, with an error bar, hours and cost.

    `model` and `gpu` are names (`models`, `machines`) or a Transformer and a Cluster of your own; `price` is dollars
    for a GPU hour, `batch` sequences of `num_tokens` tokens. A `measured` step of yours sets the scale of all times,
    and of memory if it includes that. tp stays inside a node, and layouts are those that are `known` of the software,
    of these `zero_stages`. `tuning` says what is trained and with which optimizer; where that is not all, a step has
    about 131,072 tokens by default. Raises
    ValueError for unknown names, impossible numbers, and where nothing fits.
    """
    if not isinstance(gpus, int) or isinstance(gpus, bool) or gpus < 1:
        raise ValueError(f"gpus must be a whole number above 0, not {gpus!r}")
    for name, value in (("tokens", tokens), ("price", price), ("batch", batch), ("num_tokens", num_tokens)):
        if not value >= 0 or value == float("inf"):
            raise ValueError(f"{name} must be a finite number of at least 0, not {value!r}")
    found = model_named(model) if isinstance(model, str) else model
    found = replace(found, num_tokens=num_tokens) if num_tokens else found
    cluster = cluster_of(gpu, gpus, software, precision) if isinstance(gpu, str) else replace(gpu, num_gpus=gpus)
    tuning.check(found)
    batch = batch or default_batch(found, gpus, TOKENS_A_TUNING_STEP if tuning.freezes else TOKENS_A_STEP)
    chosen, scale, memory_scale, lost = _scaled(found, cluster, batch, measured, software, zero_stages, tuning)
    quartiles, basis = bar(machine_key(gpu) if isinstance(gpu, str) else "", software, bool(found.experts))
    low, middle, high, worst = quartiles
    middle = middle if measured else 1.0  # a known scale leaves only the spread of the rows
    step_s = chosen.estimates[chosen.best].step_s
    halved = searched(found, replace(chosen.cluster, across_bytes_per_s=chosen.cluster.across_bytes_per_s / 2), batch,
                      software, zero_stages, tuning)
    name = model if isinstance(model, str) else f"{found.num_parameters / 1e9:.1f} billion parameters"
    return Plan(found, name, gpu if isinstance(gpu, str) else "GPU", chosen, tokens, price,
                step_s * low / middle, step_s * high / middle, step_s * worst / middle, basis, halved, scale,
                memory_scale, lost, tuning)


def default_batch(model: Transformer, num_gpus: int, tokens_a_step: float = TOKENS_A_STEP) -> int:
    """Sequences of about `tokens_a_step` tokens in all: `num_gpus` times a power of two, which may be negative."""
    batch = num_gpus
    while batch * model.num_tokens < tokens_a_step and batch * 2 * model.num_tokens <= 2 * tokens_a_step:
        batch *= 2
    while batch * model.num_tokens >= 2 * tokens_a_step and batch % 2 == 0:
        batch //= 2
    return batch


def searched(model: Transformer, cluster: Cluster, batch: int, software: str = "", zero_stages: Sequence[int] = (),
             tuning: Tuning = FULL) -> Search:
    """All layouts; `fits` marks those that `plan` may choose."""
    found = search(model, cluster, batch, tuning.each, most_tp=cluster.gpus_per_node, tuning=tuning, replicated=True,
                  most_cp=8 if model.num_tokens >= LONG else 1, most_ep=64 if model.experts else 1)
    wanted = np.isin(found.layouts.array("zero_stage"), list(zero_stages or range(4)))
    return replace(found, fits=found.fits & wanted & known(found.layouts, software))


def _scaled(model: Transformer, cluster: Cluster, batch: int, measured: MeasuredStep | None,
            software: str, zero_stages: Sequence[int], tuning: Tuning) -> tuple[Search, float, float, int]:
    """All layouts, scaled to a measured step if there is one; the scales; how many layouts no longer fit."""
    before = searched(model, cluster, batch, software, zero_stages, tuning)
    if not measured:
        before.best  # noqa: B018  # raises where nothing fits
        return before, 1.0, 1.0, 0
    told = estimate(model, cluster, measured.layout, batch, tuning.each, tuning=tuning)
    scale = measured.step_s / told.step_s
    memory_scale = measured.memory_bytes / told.memory_bytes if measured.memory_bytes else 1.0
    over = cluster.overheads
    slower = replace(cluster, overheads=replace(over, slowdown=over.slowdown * scale),
                     usable_share=min(1.0, cluster.usable_share / memory_scale))
    after = searched(model, slower, batch, software, zero_stages, tuning)
    after.best  # noqa: B018
    return after, scale, memory_scale, int(before.fits.sum() - after.fits.sum())


def reached(model: Transformer, cluster: Cluster, gpu: str, experts: bool) -> tuple[float, str]:
    """The largest MFU that was measured on this GPU, and whose: of the same model if it was measured, else of any.

    0 and no words where no step was measured on it.
    """
    key, fast = machine_key(gpu) if gpu else "", cluster.overheads.linear_speedup > 1
    rows = [row for row in measured_rows().rows if row.machine == key and bool(row.model.experts) == experts
            and (row.precision == "fp8") == fast]
    same = [row for row in rows if row.model.num_parameters == model.num_parameters]
    if not rows:
        return 0.0, ""
    best = max(same or rows, key=lambda row: row.mfu)
    return best.mfu, f"{best.name} on {best.layout.num_gpus:,} {gpu.upper()} ({best.software}): {best.layout}"


def _tuned(found: Plan) -> Iterator[str]:
    """What is trained and what is not, and that the bar is of other steps."""
    tuning, model = found.tuning, found.model
    if tuning.freezes:
        yield "         none of these steps is fine-tuning: all train every parameter"
    trained, num = tuning.trained_parameters(model), model.num_parameters
    how = {"lora": f"adapters of rank {tuning.rank} beside each matrix of the layers, the rest frozen in 16 bits",
           "qlora": f"adapters of rank {tuning.rank} beside each matrix of the layers, which are frozen in 4 bits",
           "full": f"the first {tuning.frozen_layers} layers frozen" if tuning.frozen_layers else "all"}[tuning.train]
    each = tuning.kept
    yield f"trains   {trained / 1e6:,.1f} of {num / 1e6:,.1f} million parameters: {how}"
    yield (f"         {tuning.optimizer}: {each.parameters:g} bytes of each, {each.gradients:g} of its gradient, "
           f"{each.optimizer:.3g} of the optimizer{' in the memory of the host' if tuning.offload else ''}")


def _lines(found: Plan) -> Iterator[str]:
    cost, cluster = found.cost, found.search.cluster
    yield (f"{found.model_name} on {cluster.num_gpus:,} {found.gpu_name}, {found.search.global_batch:,} sequences of "
           f"{found.model.num_tokens:,} tokens a step")
    yield f"layout   {found.layout}"
    yield f"step     {cost.step_s:.2f} s, MFU {cost.mfu:.0%}"
    yield (f"         by measured steps ({found.basis}) half of such steps take "
           f"{found.low_s:.1f} to {found.high_s:.1f} s, one in ten over {found.worst_s:.1f} s")
    known = found.gpu_name if found.gpu_name != "GPU" else ""
    mfu, whose = reached(found.model, cluster, known, bool(found.model.experts))
    if known and not mfu:
        yield f"         no step of a {known} was measured like this: what it reaches is taken from other machines"
    if found.tuning != FULL:
        yield from _tuned(found)
    elif cost.mfu < 0.8 * mfu:
        yield f"         an MFU of {mfu:.0%} was measured, beyond what this search finds here: {whose}"
    usable, frozen = (float(of[found.search.best]) for of in (found.search.usable, found.search.frozen))
    yield (f"memory   {cost.memory_bytes / 1e9:.1f} of {usable / 1e9:.1f} GB: state "
           f"{cost.state_bytes / 1e9:.1f}, activations {cost.activation_bytes / 1e9:.1f}, for a moment "
           f"{cost.gathered_bytes / 1e9:.1f}")
    most = np.percentile(1 / (1 + memory_errors()), 90)
    if frozen + (cost.memory_bytes - frozen) * most > usable:
        yield f"         tight: one in ten measured steps held over {most - 1:.0%} more than is counted here"
    yield "binds    " + ", ".join(f"{words} {share:.0%}" for words, share in found.binds)
    if found.tokens:
        days = found.gpu_hours / cluster.num_gpus / 24
        yield (f"{found.tokens:.3g} tokens take {days:,.1f} days with no hour lost, {found.gpu_hours:,.0f} GPU hours"
               + (f", {found.dollars:,.0f} dollars" if found.price else ""))
    for layout, more in found.next_best:
        yield f"else     {more:+.1%}: {layout}"
    slower = found.halved.estimates[found.halved.best].step_s / cost.step_s - 1
    other = found.halved.layouts[found.halved.best]
    yield f"half the network {slower:+.1%}" + ("" if other == found.layout else f", then best: {other}")
    if found.scale != 1.0 or found.memory_scale != 1.0:
        yield (f"your step took {found.scale:.2f} times its estimate, and so does every time here; memory "
               f"{found.memory_scale:.2f} times, which rules out {found.lost:,} layouts")
