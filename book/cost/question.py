"""L1: what a plan is asked for: a model on so many GPUs, and the layouts that answer it."""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from book.cost.cluster import Cluster
from book.cost.layouts import known
from book.cost.machines import EACH, MACHINES, SOFTWARE, Machine, cluster_of, key_of, machine_of, name_of
from book.cost.models import model_named
from book.cost.search import Search, search
from book.cost.state import check_zero_stage
from book.cost.transformer import Transformer
from book.cost.tuning import FULL, Tuning

TOKENS_A_STEP = 4_194_304  # the batch that llama3 starts with; the default here
TOKENS_A_TUNING_STEP = 131_072  # where a part is frozen: 64 sequences of 2,048, say
LONG = 8192  # tokens of a sequence from which on cp is tried
MOST_CP, MOST_EP = 8, 64
MOST = 100_000_000  # GPUs, sequences of a step, tokens of a sequence


@dataclass(frozen=True)
class Question:
    """A model on `gpus` GPUs, with what else decides a step; a `batch` of 0 is about `tokens_a_step` tokens.

    `gpu` is a name in `machines` or numbers as `machine_of` takes them, a Machine, or a Cluster; `zero_stages` are the
    stages allowed everywhere (none: those that measured steps test). Times are `scale` times what is estimated, memory
    `memory_scale` times; `tuning` says what is trained. Raises ValueError for unknown names and impossible numbers.
    """

    model: Transformer
    gpus: int
    gpu: str | Machine | Cluster = "H100"
    batch: int = 0
    software: str = SOFTWARE[0]
    precision: str = "bf16"
    zero_stages: tuple[int, ...] = ()
    scale: float = 1.0
    memory_scale: float = 1.0
    tuning: Tuning = FULL

    def __post_init__(self) -> None:
        if not isinstance(self.gpus, int) or isinstance(self.gpus, bool) or self.gpus < 1:
            raise ValueError(f"gpus must be a whole number above 0, not {self.gpus!r}")
        self.tuning.check(self.model)

    @property
    def gpu_key(self) -> str:
        """The key in MACHINES of the GPU, or of the one whose constants it shares; "" if there is none."""
        return key_of(self.machine) if self.machine else ""

    @property
    def gpu_name(self) -> str:
        """What the GPU is called."""
        return name_of(self.gpu) if isinstance(self.gpu, str) else "GPU"

    @cached_property
    def machine(self) -> Machine | None:
        """The GPU in numbers; None for a Cluster of one's own."""
        if isinstance(self.gpu, str):
            return machine_of(self.gpu)
        return self.gpu if isinstance(self.gpu, Machine) else None

    @cached_property
    def cluster(self) -> Cluster:
        """The GPUs, with what a measured step says of them."""
        if isinstance(self.gpu, Cluster):
            found = replace(self.gpu, num_gpus=self.gpus)
        else:
            machine = self.machine or MACHINES[self.gpu_key]
            found = cluster_of(self.gpu_key if machine == MACHINES.get(self.gpu_key) else machine, self.gpus,
                               self.software, self.precision)
        over = replace(found.overheads, slowdown=found.overheads.slowdown * self.scale)
        return replace(found, overheads=over, usable_share=min(1.0, found.usable_share / self.memory_scale))

    @property
    def global_batch(self) -> int:
        """Sequences of a step."""
        return self.batch or default_batch(self.model, self.gpus, self.tokens_a_step)

    @property
    def tokens_a_step(self) -> int:
        """About how many tokens a step has by default."""
        return TOKENS_A_TUNING_STEP if self.tuning.freezes else TOKENS_A_STEP

    def search(self, smallest: bool = False) -> Search:
        """The layouts that `plan` may choose from, or of these only the ones that may need the least memory."""
        return searched(self.model, self.cluster, self.global_batch, self.software, self.zero_stages, smallest,
                        self.tuning)


def asked(model: str | Transformer, gpus: int, gpu: str | Machine | Cluster, batch: int = 0, num_tokens: int = 0,
          software: str = SOFTWARE[0], precision: str = "bf16", zero_stages: Sequence[int] = (),
          tuning: Tuning = FULL) -> Question:
    """The question for a model by name, with sequences of another length if `num_tokens` is not 0."""
    for name, value in (("batch", batch), ("num_tokens", num_tokens), ("gpus", gpus)):
        if not 0 <= value <= MOST:
            raise ValueError(f"{name} must be a finite number of at least 0, and at most {MOST:,}, not {value!r}")
    for stage in zero_stages:
        check_zero_stage(stage)
    found = model_named(model) if isinstance(model, str) else model
    return Question(replace(found, num_tokens=num_tokens) if num_tokens else found, gpus, gpu, batch, software,
                    precision, tuple(zero_stages), tuning=replace(tuning, adam=EACH.get(software, tuning.adam)))


def default_batch(model: Transformer, num_gpus: int, tokens_a_step: float = TOKENS_A_STEP) -> int:
    """Sequences of about `tokens_a_step` tokens in all: `num_gpus` times a power of two, which may be negative."""
    batch = num_gpus
    while batch * model.num_tokens < tokens_a_step and batch * 2 * model.num_tokens <= 2 * tokens_a_step:
        batch *= 2
    while batch * model.num_tokens >= 2 * tokens_a_step and batch % 2 == 0:
        batch //= 2
    return batch


def searched(model: Transformer, cluster: Cluster, batch: int, software: str = "", zero_stages: Sequence[int] = (),
             smallest: bool = False, tuning: Tuning = FULL) -> Search:
    """All layouts, or those that may need the least memory; `fits` marks those that `plan` may choose.

    Of weights in 4 bits FSDP has shards (fsdpqlora); that tp or pp cuts them is not known of any software.
    """
    found = search(model, cluster, batch, tuning.each, most_tp=cluster.gpus_per_node, replicated=True,
                   most_cp=MOST_CP if model.num_tokens >= LONG else 1, most_ep=MOST_EP if model.experts else 1,
                   smallest=smallest, tuning=tuning)
    stage, pp, tp = (found.layouts.array(name) for name in ("zero_stage", "pp", "tp"))
    allowed = np.isin(stage, list(zero_stages)) if zero_stages else known(found.layouts, software)
    if tuning.train == "qlora":
        allowed = allowed & (pp == 1) & (tp == 1)
    return replace(found, fits=found.fits & allowed)
