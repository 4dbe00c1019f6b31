"""L1: the scoreboard as a text: errors by family and set, what choices lose, plans against the best published steps."""
from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from book.cost.answer import plan
from book.cost.measured import data_sets
from book.cost.published import Published
from book.cost.scoreboard import (FAMILIES, Measured, family, measured, memory_errors, new_gpu_errors, ran_out, regrets,
                                  score, too_large)

TRIES = 3
# Models that people ask for, and the GPUs on which somebody published a step; sequences of so many tokens.
ASKED = (("llama3-405b", 16384), ("llama3-405b", 8192), ("llama3-405b", 1152), ("llama3-70b", 64))
GPU, NUM_TOKENS = "h100", 8192
NOTE = """All in per cent. Times, and what a choice loses: of rows whose model was left out of the fit.
Plans and memory: constants are fitted to all rows."""


def scoreboard() -> str:
    """All scores: errors, bars, memory, what the planner's choices lose, plans against published steps."""
    return "\n".join([*_errors(), "", *_choices(), "", *_plans(), "", *_memory(), NOTE])


def _errors() -> Iterator[str]:
    """Of families and of sets."""
    some = measured()
    families = [family(name, row) for name, row in zip(some.names, some.rows)]
    yield (f"{'':24}{'rows':>5}{'layouts':>8}{'mean':>6}{'median':>7}{'bias':>7}{'40 %':>6}{'in half':>8}{'above':>6}")
    parts = [(title, some.where([one == key for one in families])) for key, title in FAMILIES.items()]
    for title, part in parts + [(name, _set(some, name)) for name in data_sets()]:
        one = score(part)
        yield (f"{title:24}{one.num_rows:5}{one.num_layouts:8.0f}{100 * one.mean:6.1f}{100 * one.median:7.1f}"
               f"{100 * one.bias:+7.1f}{100 * one.null:6.1f}{100 * one.half:8.0f}{100 * one.above:6.0f}")


def _set(some: Measured, name: str) -> Measured:
    return some.where([one == name for one in some.names])


def _choices() -> Iterator[str]:
    """Of the sets that have layouts to choose from: what the first choice loses, the best of three, and one by lot."""
    some = measured()
    yield f"{'a choice loses':24}{'choices':>8}{'mean':>6}{'median':>7}{f'best of {TRIES}':>10}{'by lot':>8}"
    for name in data_sets():
        part = _set(some, name)
        lost = [np.array(list(regrets(part.rows, part.estimated_s, tries))) for tries in (1, TRIES, 0)]
        if len(lost[0]):
            yield (f"{name:24}{len(lost[0]):8}{100 * lost[0].mean():6.1f}{100 * np.median(lost[0]):7.1f}"
                   f"{100 * lost[1].mean():10.1f}{100 * lost[2].mean():8.1f}")


def best_published(model: str, num_gpus: int) -> tuple[Published, float]:
    """The step of most tokens a second that was published of a model on so many H100s, and its left-out ratio."""
    some = measured()
    wanted = (model, num_gpus, GPU, NUM_TOKENS)
    found = [(row, float(ratio)) for row, ratio in zip(some.rows, some.ratios)
             if (row.name, row.layout.num_gpus, row.machine, row.model.num_tokens) == wanted]
    return min(found, key=lambda pair: pair[0].step_s / pair[0].global_batch)


def _plans() -> Iterator[str]:
    """The steps that plans promise where somebody published one, with its software, precision and batch."""
    yield f"{'plan':29}{'precision':>9}{'published':>11}{'its layout':>12}{'the plan':>14}"
    for model, num_gpus in ASKED:
        row, ratio = best_published(model, num_gpus)
        step_s = plan(model, num_gpus, GPU, batch=row.global_batch, software=row.software,
                      precision=row.precision).cost.step_s
        yield (f"{model:12}{num_gpus:7,} {row.software:9}{row.precision:>9}{row.step_s:9.2f} s"
               f"{100 * ratio - 100:+12.1f}{step_s:7.2f} s{100 * step_s / row.step_s - 100:+5.0f}")


def _memory() -> Iterator[str]:
    """Memory, and GPUs that are left out."""
    off = np.abs(memory_errors())
    (num, share), (ran, tight, large) = ran_out(), too_large()
    new = ", ".join(f"{100 * mean:.0f} on {gpu.upper()}" for gpu, mean in new_gpu_errors().items())
    yield f"a GPU left out with all its rows: mean error of dense steps {new}"
    yield (f"memory of {len(off)} rows: mean error {100 * off.mean():.1f}, median {100 * np.median(off):.1f}; "
           f"of {num} layouts that fit by it {share:.0%} ran out")
    yield f"of {ran:,} that ran it would not choose {tight:.0%}, and {large:.0%} would need more than all memory"
