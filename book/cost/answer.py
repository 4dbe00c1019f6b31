"""L1: the planner's answer: which layout for this model on these GPUs, what it costs, and how certain that is."""
from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from book.cost.cluster import Cluster
from book.cost.layouts import Layout, stages_in_words
from book.cost.machines import SHARED, SOFTWARE, Machine
from book.cost.published import Published
from book.cost.question import Question, asked, searched
from book.cost.refusals import other_layouts, refusal
from book.cost.scoreboard import bar, memory_errors
from book.cost.scoreboard import measured as measured_rows
from book.cost.search import WORDS, Search, usable_bytes
from book.cost.step import PARTS, Estimate, estimates, frozen_bytes, largest_micro_batch
from book.cost.transformer import Transformer
from book.cost.tuning import FULL, Tuning
from book.words import rounded


@dataclass(frozen=True)
class MeasuredStep:
    """A step that you measured: its layout, its seconds, and a GPU's peak memory in bytes if you know it."""

    layout: Layout
    step_s: float
    memory_bytes: float = 0.0

    def __post_init__(self) -> None:
        if not 0 < self.step_s < float("inf") or not self.memory_bytes >= 0:
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
    gpu_key: str
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
    def cluster(self) -> Cluster:
        """The GPUs that it is for."""
        return self.search.cluster

    @property
    def global_batch(self) -> int:
        """Sequences of a step."""
        return self.search.global_batch

    @property
    def tokens_a_step(self) -> int:
        """Tokens of the batch."""
        return self.global_batch * self.model.num_tokens

    @property
    def gpu_hours(self) -> float:
        """GPU hours for all tokens, without failures or restarts."""
        return self.tokens / self.tokens_a_step * self.cost.step_s * self.cluster.num_gpus / 3600

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

    @property
    def dp_alone(self) -> tuple[Layout, float] | None:
        """The fastest layout that fits and cuts only the batch and the state, and by which share it is slower."""
        found = self.search
        cut = np.any([found.layouts.array(name)[found.ranked] > 1 for name in ("pp", "tp", "cp", "ep")], axis=0)
        if cut.all():
            return None
        position = int(found.ranked[int(cut.argmin())])
        return found.layouts[position], float(found.estimates.array("step_s")[position] / self.cost.step_s - 1)

    def __str__(self) -> str:
        """The answer, one line per figure."""
        return "\n".join(_lines(self))


@dataclass(frozen=True)
class LayoutAnswer:
    """What one layout costs on `cluster`, with error bars as a Plan has them; `frozen_bytes` are not trained."""

    model: Transformer
    model_name: str
    gpu_name: str
    gpu_key: str
    cluster: Cluster
    global_batch: int
    layout: Layout
    cost: Estimate
    low_s: float
    high_s: float
    worst_s: float
    basis: str
    tuning: Tuning = FULL
    frozen_bytes: float = 0.0
    scale: float = 1.0
    memory_scale: float = 1.0

    @property
    def usable_bytes(self) -> float:
        """Bytes that it may need."""
        return usable_bytes(self.cluster, self.frozen_bytes)

    @property
    def fits(self) -> bool:
        """Whether a plan could choose it."""
        return bool(self.cost.memory_bytes <= self.usable_bytes)

    @property
    def micro_batches(self) -> dict[str, int]:
        """Sequences of the largest micro-batch that fits with each recomputation, 0 where none does."""
        between = "selective" if self.model.attention == "scores" else "half"
        return {how or "": largest_micro_batch(
            self.model, self.cluster, replace(self.layout, recompute=how), self.global_batch, self.usable_bytes,
            self.tuning.each, self.tuning) for how in (None, between, "full")}

    def __str__(self) -> str:
        """The estimate, one line per figure."""
        return "\n".join(_told(self))


def plan(model: str | Transformer, gpus: int, gpu: str | Machine | Cluster = "H100", tokens: float = 0.0,
         price: float = 0.0, batch: int = 0, num_tokens: int = 0, software: str = SOFTWARE[0],
         precision: str = "bf16", measured: MeasuredStep | None = None, zero_stages: Sequence[int] = (),
         tuning: Tuning = FULL) -> Plan:
    """The fastest layout of a model that fits on `gpus` GPUs, with an error bar, hours and cost.

    `model` and `gpu` are names (`models`, `machines`), numbers as `machine_of` takes them, or a Transformer, a Machine
    and a Cluster of your own; `price` is dollars for a GPU hour, `batch` sequences of `num_tokens` tokens. A `measured`
    step of yours sets the scale of all times, and of memory if it includes that. tp stays inside a node, and layouts
    are those that are `known` of the software; `zero_stages` names the stages to use everywhere instead. `tuning` says
    what is trained and with which optimizer; where that is not all, a step has about 131,072 tokens by default. Raises
    ValueError for unknown names, impossible numbers, and where nothing fits: with the cause, the number of GPUs that is
    enough, and what else to change.
    """
    question = asked(model, gpus, gpu, batch, num_tokens, software, precision, zero_stages, tuning)
    for name, value in (("tokens", tokens), ("price", price)):
        if not value >= 0 or value == float("inf"):
            raise ValueError(f"{name} must be a finite number of at least 0, not {value!r}")
    question, lost = _scaled(question, measured)
    chosen = _searched(question)
    low, high, worst, basis = _bar(question, chosen.layouts[chosen.best], bool(measured))
    step_s = chosen.estimates[chosen.best].step_s
    cluster = chosen.cluster
    halved = searched(question.model, replace(cluster, across_bytes_per_s=cluster.across_bytes_per_s / 2),
                      chosen.global_batch, software, zero_stages, tuning=question.tuning)
    return Plan(question.model, _name(model), question.gpu_name, question.gpu_key, chosen, tokens, price, step_s * low,
                step_s * high, step_s * worst, basis, halved, question.scale, question.memory_scale, lost,
                question.tuning)


def told(model: str | Transformer, gpus: int, layout: Layout, gpu: str | Machine | Cluster = "H100", batch: int = 0,
         num_tokens: int = 0, software: str = SOFTWARE[0], precision: str = "bf16",
         measured: MeasuredStep | None = None, tuning: Tuning = FULL) -> LayoutAnswer:
    """What a layout of your own costs, with an error bar; stages may be as uneven as they are.

    The other arguments are as in `plan`. Raises ValueError as that does, and for a layout that can't be.
    """
    if layout.num_gpus != gpus:
        raise ValueError(f"this layout is for {layout.num_gpus:,} GPUs, not for {gpus!r}: {layout}")
    question = asked(model, gpus, gpu, batch, num_tokens, software, precision, tuning=tuning)
    question, _ = _scaled(question, measured)
    cost = _estimate(question, layout)
    low, high, worst, basis = _bar(question, layout, bool(measured))
    frozen = frozen_bytes(question.model, question.cluster, [layout], question.global_batch, question.tuning)
    return LayoutAnswer(question.model, _name(model), question.gpu_name, question.gpu_key, question.cluster,
                        question.global_batch, layout, cost, cost.step_s * low, cost.step_s * high,
                        cost.step_s * worst, basis, question.tuning, float(frozen[0]), question.scale,
                        question.memory_scale)


def _name(model: str | Transformer) -> str:
    return model if isinstance(model, str) else f"{model.num_parameters / 1e9:.1f} billion parameters"


def _estimate(question: Question, layout: Layout) -> Estimate:
    found: Estimate = estimates(question.model, question.cluster, [layout], question.global_batch,
                                question.tuning.each, uneven=True, tuning=question.tuning)[0]
    return found


def _searched(question: Question) -> Search:
    """All layouts; raises ValueError, with ways out, where none may be chosen."""
    found = question.search()
    if not found.fits.any():
        raise ValueError(refusal(question, found))
    return found


def _scaled(question: Question, measured: MeasuredStep | None) -> tuple[Question, int]:
    """The question with the scales of a measured step, if there is one; how many layouts no longer fit for it."""
    if not measured:
        return question, 0
    found = _estimate(question, measured.layout)
    after = replace(question, scale=measured.step_s / found.step_s,
                    memory_scale=measured.memory_bytes / found.memory_bytes if measured.memory_bytes else 1.0)
    return after, int(question.search().fits.sum() - after.search().fits.sum())


def _bar(question: Question, layout: Layout, scaled: bool) -> tuple[float, float, float, str]:
    """Shares of an estimate between which half of such steps are, above which one in ten is; whose steps these are."""
    (low, middle, high, worst), basis = bar(question.gpu_key, question.software, bool(question.model.experts),
                                             layout.pp > 1)
    middle = middle if scaled else 1.0  # a known scale leaves only the spread of the rows
    return low / middle, high / middle, worst / middle, basis


def _is_kin(row: Published, model: Transformer, cluster: Cluster) -> bool:
    """Whether a step was measured in this precision, with experts or without as the model has them."""
    is_fp8 = cluster.overheads.linear_speedup > 1
    return (row.precision == "fp8") == is_fp8 and bool(row.model.experts) == bool(model.experts)


def _alike(model: Transformer, cluster: Cluster, gpu: str) -> list[Published]:
    """Such steps on this GPU."""
    return [row for row in measured_rows().rows if row.machine == gpu and _is_kin(row, model, cluster)]


def reached(model: Transformer, cluster: Cluster, gpu: str) -> tuple[float, float, str]:
    """The largest MFU that was measured on this GPU with sequences of half to twice as many tokens, and whose.

    Of the same model if it was measured, else of any; with the share of it that is far below: nine tenths for the
    same model, four fifths for another. Zeros and no words where no such step was measured.
    """
    rows = [row for row in _alike(model, cluster, gpu) if 0.5 <= row.model.num_tokens / model.num_tokens <= 2]
    same = [row for row in rows if row.model.num_parameters == model.num_parameters]
    if not rows:
        return 0.0, 0.0, ""
    best = max(same or rows, key=lambda row: row.mfu)
    whose = (f"{best.name} on {best.layout.num_gpus:,} {gpu.upper()}, {best.model.num_tokens:,} tokens, "
             f"{best.software}: {best.layout}")
    return best.mfu, 0.9 if same else 0.8, whose


def _about(found: Plan | LayoutAnswer, speed: str = "") -> Iterator[str]:
    """What was asked, the layout, the seconds of its step, and how certain these are."""
    cost, cluster = found.cost, found.cluster
    yield (f"{found.model_name} on {cluster.num_gpus:,} {found.gpu_name}, {found.global_batch:,} sequences of "
           f"{found.model.num_tokens:,} tokens a step")
    yield f"layout   {found.layout}"
    num_stages = found.layout.pp * found.layout.stages_per_rank
    if found.model.num_layers % num_stages:
        yield f"stages   {stages_in_words(found.model.num_layers, num_stages)}"
    yield f"step     {cost.step_s:.2f} s, MFU {cost.mfu:.0%}{speed}"
    yield (f"         by measured steps ({found.basis}) half of such steps take "
           f"{found.low_s:.1f} to {found.high_s:.1f} s, one in ten over {found.worst_s:.1f} s")
    if cluster.num_gpus > cluster.gpus_per_node and cluster.across_bytes_per_s == SHARED:
        yield f"         between nodes {SHARED / 1e9:.1f} GB/s for each GPU are assumed: give numbers of your own"
    most = max(row.mfu for row in measured_rows().rows if _is_kin(row, found.model, cluster))
    if cost.mfu > most:
        yield f"         no step like this was measured above {most:.0%}, on any GPU: " + (
            "check the seconds, batch and layout of your own" if found.scale != 1 else "do not count on it")
    if not _alike(found.model, cluster, found.gpu_key):
        article = "an" if found.gpu_name[0] in "AHLMR" else "a"
        whose = f"{article} {found.gpu_name}" if found.gpu_key else "this GPU"
        yield f"         no step of {whose} was measured like this: what it reaches is taken from other machines"
    if found.tuning != FULL:
        yield from _tuned(found.tuning, found.model)
    if found.tuning.train == "qlora" and (found.layout.pp > 1 or found.layout.tp > 1):
        yield "         no software is known to cut weights in 4 bits by tp or pp: ZeRO-3 shards them"


def _tuned(tuning: Tuning, model: Transformer) -> Iterator[str]:
    """What is trained and what is not, and that the bar is of other steps."""
    if tuning.freezes:
        yield "         none of these steps is fine-tuning: all train every parameter"
    how = {"lora": f"adapters of rank {tuning.rank} beside each matrix of the layers, the rest frozen in 16 bits",
           "qlora": f"adapters of rank {tuning.rank} beside each matrix of the layers, which are frozen in 4 bits",
           "full": f"the first {tuning.frozen_layers} layers frozen" if tuning.frozen_layers else "all"}[tuning.train]
    each, trained = tuning.kept, tuning.trained_parameters(model)
    yield f"trains   {trained / 1e6:,.1f} of {model.num_parameters / 1e6:,.1f} million parameters: {how}"
    yield (f"         {tuning.optimizer}: {each.parameters:g} bytes of each, {each.gradients:g} of its gradient, "
           f"{each.optimizer:.3g} of the optimizer{' in the memory of the host' if tuning.offload else ''}")


def _held(cost: Estimate, usable: float, frozen: float, room: float, scale: float) -> Iterator[str]:
    """What a GPU holds, and how far that is from all it has, `room`; it holds `scale` times what is counted."""
    yield (f"memory   {cost.memory_bytes / 1e9:.1f} of {usable / 1e9:.1f} GB: state "
           f"{cost.state_bytes / 1e9:.1f}, activations {cost.activation_bytes / 1e9:.1f}, temporary buffers "
           f"{cost.gathered_bytes / 1e9:.1f}")
    left, varies = room / scale - cost.memory_bytes, cost.memory_bytes - frozen
    if cost.memory_bytes <= usable:
        most = np.percentile(1 / (1 + memory_errors()), 90) - 1
        steps = f"; one in ten measured steps held over {most:.0%} more" + ": tight" * bool(left < most * varies)
        yield (f"margin   {left * scale / 1e9:.1f} GB to all {room / 1e9:.0f} GB of a GPU: a step may hold "
               f"{left / varies:.0%} more than " + ("your step says" if scale != 1 else f"is counted{steps}"))


def _told(found: LayoutAnswer) -> Iterator[str]:
    cost, cluster = found.cost, found.cluster
    rate = found.global_batch * found.model.num_tokens / cost.step_s / cluster.num_gpus
    yield from _about(found, f", {rate:,.0f} tokens a second on each GPU")
    for part in PARTS:
        seconds = getattr(cost, part)
        if seconds >= 0.0005 * cost.step_s:
            yield f"{seconds:12.4g} s {seconds / cost.step_s:6.1%}  {WORDS[part]}"
    yield from _held(cost, found.usable_bytes, found.frozen_bytes, cluster.memory_bytes, found.memory_scale)
    if not found.fits:
        yield f"         it does not fit: {cost.memory_bytes / found.usable_bytes - 1:.0%} too much"
        yield from other_layouts(found.model, cluster, found.layout, found.global_batch, found.tuning)
    plain, *others = ((how, size or "none") for how, size in found.micro_batches.items())
    yield (f"batch    largest micro-batch that fits: {plain[1]} without recompute, "
           + ", ".join(f"{size} with {how}" for how, size in others))


def _lines(found: Plan) -> Iterator[str]:
    cost, cluster = found.cost, found.cluster
    yield from _about(found)
    mfu, far, whose = reached(found.model, cluster, found.gpu_key)
    if cost.mfu < far * mfu and found.tuning == FULL:
        yield f"         an MFU of {mfu:.0%} was measured, beyond what this search finds here: {whose}"
    best = found.search.best
    yield from _held(cost, float(found.search.usable[best]), float(found.search.frozen[best]),
                     cluster.memory_bytes, found.memory_scale)
    yield "binds    " + ", ".join(f"{words} {share:.0%}" for words, share in found.binds)
    if found.tokens:
        days = found.gpu_hours / cluster.num_gpus / 24
        yield (f"{rounded(found.tokens)} tokens take {days:,.1f} days with no hour lost, "
               f"{found.gpu_hours:,.0f} GPU hours" + (f", {found.dollars:,.0f} dollars" if found.price else ""))
    for layout, more in found.next_best:
        yield f"else     {more:+.1%}: {layout}"
    if found.dp_alone and found.dp_alone[0] not in (found.layout, *(layout for layout, _ in found.next_best)):
        layout, more = found.dp_alone
        yield f"dp alone {more:+.1%}: {layout}"
    slower = found.halved.estimates[found.halved.best].step_s / cost.step_s - 1
    other = found.halved.layouts[found.halved.best]
    yield f"half the network {slower:+.1%}" + ("" if other == found.layout else f", then best: {other}")
    if found.scale != 1.0:
        yield f"your step took {found.scale:.2f} times its estimate, and so does every time here"
    if found.memory_scale != 1.0:
        so = f"rules out {found.lost:,} layouts" if found.lost >= 0 else f"lets {-found.lost:,} layouts more fit"
        yield f"it held {found.memory_scale:.2f} times what is counted: that {so}"
