"""L1: what a layout costs on a cluster: bytes held, bytes sent, seconds of a step; for one layout or many at once.

Every rank does the same work here: layers, embedding and logits are spread evenly over time, and the first stage's
rank, which keeps the most activations, stands for memory.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from book.columns import Columns, measure
from book.cost.activations import activation_bytes
from book.cost.layouts import RECOMPUTE, Layout
from book.cost.links import pipeline_bubble, ring_sent_bytes
from book.cost.state import ADAM_MIXED, StateBytes, state_bytes
from book.cost.traffic import sharded_sent_bytes, tensor_parallel_sent_bytes
from book.cost.transformer import Transformer, recomputed_flops


@dataclass(frozen=True)
class Cluster:
    """GPUs and links. Bandwidths are one direction's, `across_bytes_per_s` what each GPU has to other nodes.

    Two constants are fitted to measured steps: `efficiency`, the share of the peak that matrix products reach, and
    `num_passes`, how often what a layer keeps goes through memory for all that is no product (norms, dropout, softmax).
    `usable_share` of the memory is for training; the rest is the allocator's and the libraries'. Raises ValueError for
    what no cluster has: no GPU, a rate of 0, a share that is none.
    """

    num_gpus: int
    memory_bytes: float
    flops_per_s: float
    memory_bytes_per_s: float
    inside_bytes_per_s: float
    across_bytes_per_s: float
    efficiency: float
    num_passes: float
    gpus_per_node: int = 8
    usable_share: float = 0.9

    def __post_init__(self) -> None:
        if min(self.num_gpus, self.gpus_per_node) < 1:
            raise ValueError(f"a cluster has at least one GPU, and a node too: {self}")
        for name in ("memory_bytes", "flops_per_s", "memory_bytes_per_s", "inside_bytes_per_s", "across_bytes_per_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} is above 0, not {getattr(self, name)}")
        for name in ("efficiency", "usable_share"):
            if not 0 < getattr(self, name) <= 1:
                raise ValueError(f"{name} is a share, above 0 and at most 1, not {getattr(self, name)}")
        if not self.num_passes >= 0:
            raise ValueError(f"num_passes is at least 0, not {self.num_passes}")


@dataclass(frozen=True)
class Estimate:
    """What a GPU holds, sends and spends in a step. `gathered_bytes` come and go: what ZeRO gathers, a layer at work.

    The seconds from `matmul_s` to `update_s` add up to `step_s`; of `dp_s` it is what no computing hides. `mfu` is the
    share of the peak that the model's own FLOPs make up, without recomputation.
    """

    state_bytes: float = measure()
    activation_bytes: float = measure()
    gathered_bytes: float = measure()
    memory_bytes: float = measure()
    tp_bytes: float = measure()
    pp_bytes: float = measure()
    dp_bytes: float = measure()
    matmul_s: float = measure()
    elementwise_s: float = measure()
    tp_s: float = measure()
    pp_s: float = measure()
    bubble_s: float = measure()
    dp_s: float = measure()
    update_s: float = measure()
    step_s: float = measure()
    mfu: float = measure()


PARTS = ("matmul_s", "elementwise_s", "tp_s", "pp_s", "bubble_s", "dp_s", "update_s")  # of step_s


def estimate(model: Transformer, cluster: Cluster, layout: Layout, global_batch: int, each: StateBytes = ADAM_MIXED,
             overlap: bool = False) -> Estimate:
    """One layout's estimate; everything else is as in `estimates`."""
    return estimates(model, cluster, [layout], global_batch, each, overlap)[0]


def estimates(model: Transformer, cluster: Cluster, layouts: Sequence[Layout], global_batch: int,
              each: StateBytes = ADAM_MIXED, overlap: bool = False) -> Columns:
    """Estimates of layouts, as Columns in their order, for a step of `global_batch` sequences with (interleaved) 1F1B.

    `each` is the state of one parameter. Communication of tp and pp is waited for; so is dp's, unless `overlap`: then
    it hides behind the last micro-batch's backward (ZeRO 0 and 1) or behind all computing (2 and 3). Raises ValueError
    for a list without layouts, a batch below 1, a layout of another number of GPUs, or one that doesn't divide layers,
    heads or batch.
    """
    if not len(layouts) and not isinstance(layouts, Columns):
        raise ValueError("there is nothing to estimate: the list has no layouts")
    terms = _Terms(model, cluster, Columns.from_rows(Layout, layouts), global_batch, each)
    terms.check()
    held, sent = terms.held(), terms.sent()
    spent = terms.spent(sent, held["state_bytes"], overlap)
    step_s = sum(spent[part] for part in PARTS)
    held["memory_bytes"] = held["state_bytes"] + held["activation_bytes"] + held["gathered_bytes"]
    peak = cluster.num_gpus * cluster.flops_per_s
    return Columns(Estimate, {**held, **sent, **spent, "step_s": step_s,
                              "mfu": model.step_flops(global_batch) / (peak * step_s)})


class _Terms:
    """The columns of layouts as floats, and the parts of their estimates: arrays of one entry for each layout.

    b is the sequences of a micro-batch, m the micro-batches of a step, v the stages of a rank. `by` chooses by a
    column's value; `kept` is a layer's bytes of one micro-batch, `held` what is in memory in all; `often` is how many
    times dp's messages go, `again` what recomputation does twice, `behind` the seconds that can hide messages.
    """

    def __init__(self, model: Transformer, cluster: Cluster, layouts: Columns, global_batch: int, each: StateBytes):
        self.model, self.cluster, self.layouts, self.batch, self.each = model, cluster, layouts, global_batch, each
        self.pp, self.dp, self.tp, self.b, self.v = (layouts.array(name).astype(float) for name in (
            "pp", "dp", "tp", "micro_batch_size", "stages_per_rank"))
        self.sequence_parallel = layouts.array("sequence_parallel") == 1
        self.m = global_batch / (self.dp * self.b)
        self.layers = model.num_layers / self.pp
        self.shape = model.layer(self.b)
        self.between_bytes = 2 * self.shape.num_activations  # what goes from layer to layer, in 16 bits
        self.parameters = (self.layers * model.layer_parameters + model.embedding_parameters) / self.tp

    def check(self) -> None:
        if self.batch < 1:
            raise ValueError(f"global_batch is at least one sequence, not {self.batch}")
        model, used = self.model, self.pp * self.dp * self.tp
        wrong = {f"this cluster has {self.cluster.num_gpus} GPUs": used != self.cluster.num_gpus,
                 f"{model.num_layers} layers can't be cut so": self.layers / self.v % 1 != 0,
                 f"{model.num_heads} heads can't be cut so": model.num_heads / self.tp % 1 != 0,
                 f"{self.batch} sequences can't be cut so": self.m % 1 != 0}
        for words, rows in wrong.items():
            if rows.any():
                raise ValueError(f"{self.layouts[int(rows.argmax())]}: {words}")

    def by(self, name: str, values: Sequence[Any], of: Callable[[Any], np.ndarray]) -> np.ndarray:
        """of(value) in the rows whose column holds this value."""
        holds = self.recomputed if name == "recompute" else lambda value: self.layouts.array(name) == value
        return np.select([holds(value) for value in values],
                         [np.broadcast_to(of(value), self.pp.shape) for value in values])

    def recomputed(self, how: str | None) -> np.ndarray:
        if how is None:
            return ~(self.recomputed("selective") | self.recomputed("full"))
        return self.layouts.mask("recompute", how)

    def kept(self, recompute: str | None) -> np.ndarray:
        """Bytes that a layer keeps of one micro-batch."""
        return np.where(self.sequence_parallel, activation_bytes(self.shape, self.tp, True, True, recompute),
                        activation_bytes(self.shape, self.tp, recompute=recompute))

    def in_flight(self) -> np.ndarray:
        """How often the first rank keeps a micro-batch of all its layers: p, or p and a part if interleaved."""
        interleaved = np.minimum(self.v * self.m, 2 * (self.pp - 1) + (self.v - 1) * self.pp + 1) / self.v
        return np.where(self.v > 1, interleaved, np.minimum(self.pp, self.m))

    def held(self) -> dict[str, np.ndarray]:
        model, each = self.model, self.each
        layer = model.layer_parameters / self.tp
        kept = self.by("recompute", RECOMPUTE, self.kept)
        shared = np.where(self.sequence_parallel, self.tp, 1)
        n, tokens = self.shape.num_activations, self.b * model.num_tokens
        # the embedding's dropout mask; without a pipeline, the last norm, and the logits in 32 bits (korthikanti2022)
        ends = np.minimum(self.pp, self.m) * n / shared + (self.pp == 1) * (
            4 * n / shared + 4 * tokens * model.vocab_size / self.tp)
        # ZeRO-3 holds one gathered layer while it gathers the next; from ZeRO-2 on, one layer's full gradients exist
        gathered = self.by("zero_stage", range(4), lambda stage: layer * (
            2 * each.parameters * (stage == 3) + each.gradients * (stage >= 2)))
        return {"state_bytes": self.by("zero_stage", range(4), lambda stage: state_bytes(
                    self.parameters, stage, self.dp, each).total),
                "activation_bytes": self.in_flight() * self.layers * kept + ends,
                "gathered_bytes": gathered + self.kept(None) - kept}

    def sent(self) -> dict[str, np.ndarray]:
        """By axis, of a rank in the middle. Full recomputation runs a forward's two all-reduces again."""
        gradient_bytes = 2 * self.parameters
        with_gathers = np.where(self.sequence_parallel, tensor_parallel_sent_bytes(self.tp, self.between_bytes, True),
                                tensor_parallel_sent_bytes(self.tp, self.between_bytes))
        again = self.recomputed("full") * 2 * ring_sent_bytes(self.tp, self.between_bytes)
        # each rank of a tensor-parallel group sends its part of what goes to the next stage (narayanan2021, 4.1)
        between = 2 * self.v * self.m * self.between_bytes / self.tp
        often = {2: (self.m + 1) / 2, 3: self.m}  # each micro-batch has its own backward, as in hybrid_sent_bytes
        return {"tp_bytes": self.m * self.layers * (with_gathers + again),
                "pp_bytes": np.where(self.pp > 1, between, 0.0),
                "dp_bytes": self.by("zero_stage", range(4), lambda stage: often.get(stage, 1) * sharded_sent_bytes(
                    stage, self.dp, gradient_bytes))}

    def spent(self, sent: dict[str, np.ndarray], held_bytes: np.ndarray, overlap: bool) -> dict[str, np.ndarray]:
        model, cluster = self.model, self.cluster
        again = self.by("recompute", RECOMPUTE, lambda how: recomputed_flops(model, self.b, how))
        flops = self.layers * (3 * model.layer_flops(self.b) + again) + 3 * model.head_flops(self.b) / self.pp
        whole = self.kept(None)  # a third of the passes are in the forward, which recomputation repeats
        passes = whole + self.by("recompute", RECOMPUTE, lambda how: (how is not None) * (
            whole if how == "full" else whole - self.kept(how)) / 3)
        busy = {"matmul_s": self.m * flops / self.tp / (cluster.flops_per_s * cluster.efficiency),
                "elementwise_s": self.m * self.layers * passes * cluster.num_passes / cluster.memory_bytes_per_s,
                "tp_s": self.waited_tp_bytes() / self.bandwidth(self.tp, np.minimum(self.tp, cluster.gpus_per_node)),
                "pp_s": sent["pp_bytes"] / self.bandwidth(self.pp * self.dp * self.tp)}
        busy_s = sum(busy.values())
        share = pipeline_bubble(self.pp, self.m, self.v)
        dp_s = sent["dp_bytes"] / self.bandwidth(self.dp * self.tp, cluster.gpus_per_node // self.tp)
        behind = self.by("zero_stage", range(4), lambda stage: busy_s if stage >= 2 else 2 / 3 * busy_s / self.m)
        return {**busy, "bubble_s": busy_s * share / (1 - share), "dp_s": np.maximum(dp_s - overlap * behind, 0),
                "update_s": 2 * held_bytes / cluster.memory_bytes_per_s}

    def waited_tp_bytes(self) -> np.ndarray:
        """What ranks wait for: all but the all-gathers of kept pieces, which hide behind products (korthikanti2022)."""
        num_all_reduces = 4 + 2 * self.recomputed("full")
        return self.m * self.layers * num_all_reduces * ring_sent_bytes(self.tp, self.between_bytes)

    def bandwidth(self, span: np.ndarray, num_shared: np.ndarray | float = 1.0) -> np.ndarray:
        """Bytes per second of a group that spans so many neighbouring GPUs; of it `num_shared` are on each node.

        A ring crosses from node to node once, so the network cards of all its members on a node serve it.
        """
        across = np.minimum(self.cluster.across_bytes_per_s * np.maximum(num_shared, 1),
                            self.cluster.inside_bytes_per_s)
        return np.where(span <= self.cluster.gpus_per_node, self.cluster.inside_bytes_per_s, across)
