"""L1: layouts: how a training step is cut over GPUs, and all the ways in which it can be."""
from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

import numpy as np

from book.columns import Columns, count, word
from book.cost.activations import RECOMPUTE, check_recompute
from book.cost.state import check_zero_stage
from book.cost.transformer import Transformer
from book.mesh import Mesh


@dataclass(frozen=True)
class Layout:
    """The sizes of the axes pp, dp and tp, and what else decides a step's memory and time.

    `stages_per_rank` above 1 is interleaved 1F1B; `sequence_parallel` is 0 or 1, with inputs kept as pieces and
    gathered again; `recompute` is None, "selective" or "full" (korthikanti2022). Raises ValueError for a size below
    1 and for what goes with no other part of the layout.
    """

    pp: int = count()
    dp: int = count()
    tp: int = count()
    micro_batch_size: int = count(default=1)
    stages_per_rank: int = count(default=1)
    zero_stage: int = count(default=0)
    sequence_parallel: int = count(default=0)
    recompute: str | None = word(default=None)

    def __post_init__(self) -> None:
        if min(self.pp, self.dp, self.tp, self.micro_batch_size, self.stages_per_rank) < 1:
            raise ValueError(f"each size of a layout is at least 1: {self}")
        check_zero_stage(self.zero_stage)
        check_recompute(self.recompute)
        if self.sequence_parallel not in (0, 1):
            raise ValueError(f"sequence_parallel is 0 or 1, not {self.sequence_parallel!r}")
        if self.stages_per_rank > 1 and self.pp == 1:
            raise ValueError("several stages on a rank need a pipeline: pp is 1")
        object.__setattr__(self, "sequence_parallel", int(self.sequence_parallel))

    @property
    def num_gpus(self) -> int:
        """How many GPUs it needs."""
        return self.pp * self.dp * self.tp

    def mesh(self, ranks_per_node: int | None = None) -> Mesh:
        """Its mesh, tp innermost."""
        return Mesh.of({"pp": self.pp, "dp": self.dp, "tp": self.tp}, ranks_per_node)

    def __str__(self) -> str:
        """In short: "pp 8 × dp 16 × tp 8, micro-batch 1, 2 stages a rank, ZeRO-1, sequence parallel, no recompute"."""
        parts = [f"pp {self.pp} × dp {self.dp} × tp {self.tp}", f"micro-batch {self.micro_batch_size}"]
        parts += [f"{self.stages_per_rank} stages a rank"] if self.stages_per_rank > 1 else []
        parts += [f"ZeRO-{self.zero_stage}"] if self.zero_stage else []
        parts += ["sequence parallel"] if self.sequence_parallel else []
        return ", ".join([*parts, f"{self.recompute or 'no'} recompute"])


def all_layouts(model: Transformer, num_gpus: int, global_batch: int, most_tp: int | None = None) -> Columns:
    """Every layout of a model on all of these GPUs that divides evenly, as Columns of Layout.

    tp divides heads and width, pp times stages_per_rank the layers, dp times micro_batch_size the global batch of
    sequences. Interleaving needs a number of micro-batches that pp divides, as Megatron does; sequence parallelism
    tokens that tp divides; ZeRO two replicas or more. `most_tp` bounds tp.
    """
    shapes = np.array(list(_shapes(model, num_gpus, global_batch, most_tp)), dtype=np.int32).reshape(-1, 5)
    choices = np.array(list(product(range(4), (0, 1), range(-1, 2))), dtype=np.int32)
    rows = np.hstack([np.repeat(shapes, len(choices), axis=0), np.tile(choices, (len(shapes), 1))])
    _, dp, tp, _, _, zero_stage, sequence_parallel, _ = rows.T
    possible = ((dp > 1) | (zero_stage == 0)) & ((tp > 1) & (model.num_tokens % tp == 0) | (sequence_parallel == 0))
    names = ("pp", "dp", "tp", "micro_batch_size", "stages_per_rank", "zero_stage", "sequence_parallel", "recompute")
    return Columns(Layout, dict(zip(names, rows[possible].T)), {"recompute": RECOMPUTE[1:]})


def _shapes(model: Transformer, num_gpus: int, global_batch: int,
            most_tp: int | None) -> Iterator[tuple[int, int, int, int, int]]:
    for tp in divisors(num_gpus):
        if tp > (most_tp or tp) or model.num_heads % tp:
            continue
        for pp in divisors(num_gpus // tp):
            dp = num_gpus // tp // pp
            if model.num_layers % pp or global_batch % dp:
                continue
            for micro_batch_size in divisors(global_batch // dp):
                yield pp, dp, tp, micro_batch_size, 1
                if pp > 1 and global_batch // dp // micro_batch_size % pp == 0:
                    for stages_per_rank in divisors(model.num_layers // pp)[1:]:
                        yield pp, dp, tp, micro_batch_size, stages_per_rank


def divisors(number: int) -> list[int]:
    """All divisors of a number, smallest first."""
    return [k for k in range(1, number + 1) if number % k == 0]
