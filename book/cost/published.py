"""L1: layouts that papers published with the time of a step, and the constants of a Cluster fitted to them."""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from book.cost.cluster import Cluster
from book.cost.layouts import Layout
from book.cost.machines import MACHINES
from book.cost.models import MODELS
from book.cost.step import estimate
from book.cost.transformer import Transformer

# DGX A100, 80 GB: each GPU has 12 NVLinks of 25 GB/s a direction, and a 200 Gb/s network card (narayanan2021). The two
# last constants are what `fitted` finds for FITTED.
A100 = Cluster(num_gpus=8, memory_bytes=80e9, flops_per_s=312e12, memory_bytes_per_s=2.039e12, inside_bytes_per_s=300e9,
               across_bytes_per_s=25e9, efficiency=0.645, num_passes=6.5)


@dataclass(frozen=True)
class Published:
    """A step that somebody measured: what was trained, on which layout and machine, and its seconds.

    `source` is an entry of references.bib, `machine` and `software` names in `machines`.
    """

    name: str
    model: Transformer
    layout: Layout
    global_batch: int
    step_s: float
    source: str
    machine: str = "a100"
    software: str = "megatron"
    memory_bytes: float = 0.0
    precision: str = "bf16"

    @property
    def cluster(self) -> Cluster:
        """A cluster of as many A100s as the row used."""
        return replace(A100, num_gpus=self.layout.num_gpus)

    @property
    def peak_flops_per_s(self) -> float:
        """The peak of a GPU of the row's machine in the row's precision."""
        machine = MACHINES[self.machine]
        return machine.bf16_flops_per_s if self.precision == "bf16" else machine.fp8_flops_per_s

    @property
    def mfu(self) -> float:
        """The model's FLOPs as a share of the bf16 peak, in fp8 too."""
        peak = self.layout.num_gpus * MACHINES[self.machine].bf16_flops_per_s
        return self.model.step_flops(self.global_batch) / (self.step_s * peak)

    @property
    def estimated_s(self) -> float:
        """The seconds that the planner estimates."""
        return estimate(self.model, self.cluster, self.layout, self.global_batch).step_s

    @property
    def error(self) -> float:
        """How much longer that is than what was measured, as a share of it."""
        return self.estimated_s / self.step_s - 1


def _weak_scaling() -> tuple[Published, ...]:
    """narayanan2021, table 1; micro-batches and stages per rank are those of its script (megatronscaling).

    The table has FLOP/s per GPU, counted with full recomputation: the step's seconds follow.
    """
    rows = (("1.7B", 24, 2304, 24, 1, 1, 32, 512, 16, 1, 137), ("3.6B", 30, 3072, 32, 2, 1, 64, 512, 16, 1, 138),
            ("7.5B", 36, 4096, 32, 4, 1, 128, 512, 16, 1, 142), ("18.4B", 40, 6144, 48, 8, 1, 256, 1024, 8, 1, 135),
            ("39.1B", 48, 8192, 64, 8, 2, 512, 1536, 4, 1, 138), ("76.1B", 60, 10240, 80, 8, 4, 1024, 1792, 2, 3, 140),
            ("145.6B", 80, 12288, 96, 8, 8, 1536, 2304, 2, 2, 148),
            ("310.1B", 96, 16384, 128, 8, 16, 1920, 2160, 1, 2, 155),
            ("529.6B", 105, 20480, 128, 8, 35, 2520, 2520, 1, 3, 163),
            ("1008.0B", 128, 25600, 160, 8, 64, 3072, 3072, 1, 1, 163))
    found = []
    for name, num_layers, width, num_heads, tp, pp, num_gpus, batch, micro, stages, teraflops in rows:
        model = Transformer(num_layers, width, num_heads)
        layout = Layout(pp, num_gpus // (pp * tp), tp, micro, stages, recompute="full")
        step_s = model.step_flops(batch, "full") / (num_gpus * teraflops * 1e12)
        found.append(Published(name, model, layout, batch, step_s, "narayanan2021"))
    return tuple(found)


def _recomputation() -> tuple[Published, ...]:
    """korthikanti2022, tables 3 and 5: one replica, full recomputation, or selective with sequence parallelism."""
    rows = (("22B", 48, 6144, 64, 8, 1, 4, 4, 1, 1.42, 1.10), ("175B", 96, 12288, 96, 8, 8, 64, 1, 3, 18.13, 13.75),
            ("530B", 105, 20480, 128, 8, 35, 280, 1, 3, 49.05, 37.83),
            ("1T", 128, 25600, 160, 8, 64, 512, 1, 1, 94.42, 71.49))
    found = []
    for name, num_layers, width, num_heads, tp, pp, batch, micro, stages, full_s, selective_s in rows:
        model = Transformer(num_layers, width, num_heads)
        for how, sequence_parallel, step_s in (("full", 0, full_s), ("selective", 1, selective_s)):
            layout = Layout(pp, 1, tp, micro, stages, 0, sequence_parallel, how)
            found.append(Published(f"{name}, {how}", model, layout, batch, step_s, "korthikanti2022"))
    return tuple(found)


def _sharded() -> tuple[Published, ...]:
    """narayanan2021, table 2: 174.6 billion parameters in ZeRO-3 alone, without tp or pp; FLOP/s as in table 1."""
    model, batch, found = Transformer(96, 12288, 96), 1536, []
    for num_gpus, micro, teraflops in ((384, 4, 144), (768, 2, 88), (1536, 1, 44)):
        layout = Layout(1, num_gpus, 1, micro, zero_stage=3, recompute="full")
        step_s = model.step_flops(batch, "full") / (num_gpus * teraflops * 1e12)
        found.append(Published("174.6B, ZeRO-3", model, layout, batch, step_s, "narayanan2021"))
    return tuple(found)


def _replicated() -> tuple[Published, ...]:
    """narayanan2021, table 2: tp, pp and dp together, micro-batches of 1; FLOP/s as in table 1."""
    rows = ((96, 12288, 96, 12, 1536, 384, 153), (96, 12288, 96, 12, 1536, 768, 149),
            (96, 12288, 96, 12, 1536, 1536, 141), (105, 20480, 128, 35, 2240, 560, 171),
            (105, 20480, 128, 35, 2240, 1120, 167), (105, 20480, 128, 35, 2240, 2240, 159))
    found = []
    for num_layers, width, num_heads, pp, batch, num_gpus, teraflops in rows:
        model = Transformer(num_layers, width, num_heads)
        step_s = model.step_flops(batch, "full") / (num_gpus * teraflops * 1e12)
        layout = Layout(pp, num_gpus // 8 // pp, 8, recompute="full")
        found.append(Published(f"{model.num_parameters / 1e9:.1f}B", model, layout, batch, step_s, "narayanan2021"))
    return tuple(found)


def _turing() -> tuple[Published, ...]:
    """smith2022, section 4.2: 530 billion parameters on 280, 350 and 420 nodes of 8, a batch of 1,920."""
    model = Transformer(105, 20480, 128)
    return tuple(Published("530B", model, Layout(35, num_nodes * 8 // 280, 8, recompute="full"), 1920, step_s,
                           "smith2022") for num_nodes, step_s in ((280, 60.1), (350, 50.2), (420, 44.4)))


def _megascale() -> tuple[Published, ...]:
    """megascale, table 2, its rows of Megatron-LM: 175 billion, 6 stages on each rank, kernels that keep no scores."""
    model = Transformer(96, 12288, 128, vocab_size=64000, attention="flash", dropout=False)
    rows = ((256, 768, 40.0), (512, 768, 21.2), (768, 768, 15.2), (1024, 768, 11.9), (3072, 6144, 29.02),
            (6144, 6144, 14.78), (8192, 6144, 12.24), (12288, 6144, 8.57))
    return tuple(Published("175B", model, Layout(8, num_gpus // 64, 8, 1, 6, 1, 1), batch, step_s, "megascale")
                 for num_gpus, batch, step_s in rows)


def _torchtitan() -> tuple[Published, ...]:
    """titanperformance: FSDP2 on 64 A100s, its rows without selective recomputation; tokens a second and GPU."""
    llama2 = replace(MODELS["llama3-70b"], num_tokens=4096, vocab_size=32000)
    small = replace(llama2, num_layers=40, width=5120, num_heads=40, num_kv_heads=40, mlp_width=13824)
    rows = (("Llama 3 70B", MODELS["llama3-70b"], 1, "full", 331), ("Llama 2 13B", small, 2, None, 2162),
            ("Llama 2 70B", llama2, 2, "full", 353))
    return tuple(Published(name, model, Layout(1, 64, 1, micro, zero_stage=3, recompute=how), 64 * micro,
                           micro * model.num_tokens / tokens_per_s, "titanperformance", software="torchtitan")
                 for name, model, micro, how, tokens_per_s in rows)


WEAK_SCALING, RECOMPUTATION = _weak_scaling(), _recomputation()
REPLICATED, TURING, MEGASCALE, TORCHTITAN = _replicated(), _turing(), _megascale(), _torchtitan()
SHARDED = _sharded()  # ZeRO-3 alone: the formulas underestimate these steps, so they are neither fitted nor held out
FITTED = WEAK_SCALING[::3]  # the rows that the constants are fitted to; the other rows of these two papers are held out


def fitted(cluster: Cluster, rows: Sequence[Published]) -> Cluster:
    """The cluster with the `efficiency` and `num_passes` that fit published rows best: least squares in relative error.

    Raises ValueError for fewer than two rows, and for rows that no constants of a Cluster describe.
    """
    if len(rows) < 2:
        raise ValueError(f"two constants need two rows or more, not {len(rows)}")
    per_product, num_passes = _least_squares(*_shares(cluster, rows))
    return replace(cluster, efficiency=float(1 / per_product), num_passes=float(num_passes))


def _shares(cluster: Cluster, rows: Sequence[Published]) -> tuple[np.ndarray, np.ndarray]:
    """What 1/efficiency and num_passes are multiplied with, and what they must add up to, as shares of measured steps.

    A step's time is linear in both, bubble included.
    """
    units = [replace(cluster, efficiency=e, num_passes=n) for e, n in ((1.0, 0.0), (0.5, 0.0), (1.0, 1.0))]
    seconds = np.array([[estimate(row.model, replace(unit, num_gpus=row.layout.num_gpus), row.layout,
                                  row.global_batch).step_s for unit in units] for row in rows])
    products, passes = seconds[:, 1] - seconds[:, 0], seconds[:, 2] - seconds[:, 0]
    measured = np.array([row.step_s for row in rows])
    other = measured - (seconds[:, 0] - products)
    return np.column_stack([products, passes]) / measured[:, None], other / measured


def _least_squares(linear: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    return np.linalg.lstsq(linear, wanted, rcond=None)[0]
