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
from book.cost.activations import RECOMPUTE, activation_bytes
from book.cost.cluster import Cluster
from book.cost.layouts import Layout
from book.cost.links import ring_sent_bytes
from book.cost.seconds import seconds
from book.cost.sizes import Sizes
from book.cost.state import ADAM_MIXED, StateBytes, state_bytes
from book.cost.traffic import sharded_sent_bytes, tensor_parallel_sent_bytes
from book.cost.transformer import Transformer, layer_shape


@dataclass(frozen=True)
class Estimate:
    """What a GPU holds, sends and spends in a step.

    `gathered_bytes` are temporary: what ZeRO gathers, one layer's activations, workspaces. The seconds from `matmul_s`
    to `update_s` add up to `step_s`; `dp_s` counts only what does not overlap with computing. `mfu` is the model's own
    FLOPs, without recomputation, as a share of the peak.
    """

    state_bytes: float = measure()
    activation_bytes: float = measure()
    gathered_bytes: float = measure()
    memory_bytes: float = measure()
    tp_bytes: float = measure()
    cp_bytes: float = measure()
    ep_bytes: float = measure()
    pp_bytes: float = measure()
    dp_bytes: float = measure()
    matmul_s: float = measure()
    elementwise_s: float = measure()
    launch_s: float = measure()
    tp_s: float = measure()
    cp_s: float = measure()
    ep_s: float = measure()
    pp_s: float = measure()
    bubble_s: float = measure()
    dp_s: float = measure()
    update_s: float = measure()
    step_s: float = measure()
    mfu: float = measure()


PARTS = ("matmul_s", "elementwise_s", "launch_s", "tp_s", "cp_s", "ep_s", "pp_s", "bubble_s", "dp_s", "update_s")


def estimate(model: Transformer, cluster: Cluster, layout: Layout, global_batch: int, each: StateBytes = ADAM_MIXED,
             overlap: bool = False) -> Estimate:
    """One layout's estimate; everything else is as in `estimates`."""
    return estimates(model, cluster, [layout], global_batch, each, overlap)[0]


def estimates(model: Transformer, cluster: Cluster, layouts: Sequence[Layout], global_batch: int,
              each: StateBytes = ADAM_MIXED, overlap: bool = False, uneven: bool = False) -> Columns:
    """Estimates of layouts, as Columns in their order, for a step of `global_batch` sequences with (interleaved) 1F1B.

    `each` is the state of one parameter. Communication of tp and pp is waited for; so is dp's, unless the cluster's
    overheads give a share that overlaps, or `overlap` allows all of it to: with the last micro-batch's backward
    (ZeRO 0 and 1) or with all computing (2 and 3). If stages may be `uneven`, the longest one sets the pace.
    Raises ValueError for an empty list, a batch below 1, a layout for another number of GPUs, or one whose degrees
    don't divide layers, heads, experts, tokens or batch.
    """
    if not len(layouts) and not isinstance(layouts, Columns):
        raise ValueError("there is nothing to estimate: the list has no layouts")
    terms = Terms(model.sizes, cluster, Columns.from_rows(Layout, layouts), global_batch, each)
    terms.check(model, uneven)
    found = costs(terms, overlap)
    peak = cluster.num_gpus * cluster.flops_per_s
    return Columns(Estimate, {**found, "mfu": model.step_flops(global_batch) / (peak * found["step_s"])})


def costs(terms: Terms, overlap: bool = False) -> dict[str, np.ndarray]:
    """The columns of an Estimate, all but the MFU."""
    held, sent = terms.held(), terms.sent()
    spent = seconds(terms, sent, held["state_bytes"], overlap)
    held["memory_bytes"] = held["state_bytes"] + held["activation_bytes"] + held["gathered_bytes"]
    return {**held, **sent, **spent, "step_s": np.sum([spent[part] for part in PARTS], axis=0)}


class Terms:
    """The columns of layouts as floats, and what they hold and send: arrays of one entry for each layout.

    b is the sequences of a micro-batch, m the micro-batches of a step, v the stages of a rank, `shards` the ranks that
    share out what replicas have in common. `by` chooses by a column's value; `kept` is a layer's bytes of one
    micro-batch. Model, cluster and batch may be arrays too, with an entry for each layout.
    """

    def __init__(self, model: Sizes, cluster: Cluster, layouts: Columns, global_batch: Any, each: StateBytes):
        self.model, self.cluster, self.layouts, self.batch, self.each = model, cluster, layouts, global_batch, each
        columns: list[Any] = [layouts.array(name).astype(float) for name in (
            "pp", "dp", "tp", "micro_batch_size", "stages_per_rank", "cp", "ep")]
        self.pp, self.dp, self.tp, self.b, self.v, self.cp, self.ep = columns
        self.sequence_parallel = layouts.array("sequence_parallel") == 1
        self.m: Any = global_batch / (self.dp * self.b)
        self.shards = self.dp * self.cp
        self.layers = np.ceil(model.num_layers / self.pp)
        self.tokens = self.b * model.num_tokens / self.cp
        self.shape = layer_shape(model, self.b, self.cp)
        self.between_bytes = 2 * self.shape.num_activations  # what goes from layer to layer, in 16 bits
        ends = model.embedding_parameters + (self.pp == 1) * model.head_parameters
        self.parameters = (self.layers * model.layer_parameters + ends) / self.tp
        self.expert_parameters = self.layers * model.expert_parameters / self.tp / self.ep

    def check(self, model: Transformer, uneven: bool) -> None:
        """Raise ValueError for the first layout whose degrees don't divide what they cut."""
        if self.batch < 1:
            raise ValueError(f"global_batch is at least one sequence, not {self.batch}")
        used, experts = self.pp * self.dp * self.tp * self.cp, self.model.num_experts
        wrong = {f"this cluster has {self.cluster.num_gpus} GPUs": used != self.cluster.num_gpus,
                 f"{model.num_layers} layers can't be cut so":
                     (model.num_layers / self.pp / self.v % 1 != 0) & ((self.v > 1) | (not uneven)),
                 f"{model.num_heads} heads can't be cut so": model.num_heads / self.tp % 1 != 0,
                 f"{model.num_tokens} tokens can't be cut so": model.num_tokens / self.cp % 1 != 0,
                 f"{experts} experts can't be cut so": (experts / self.ep % 1 != 0) | (self.shards / self.ep % 1 != 0),
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
        """Mask of the rows that recompute in this way."""
        if how is None:
            return ~(self.recomputed("selective") | self.recomputed("full"))
        return self.layouts.mask("recompute", how)

    def kept(self, recompute: str | None) -> Any:
        """Bytes that a layer keeps of one micro-batch."""
        return np.where(self.sequence_parallel, activation_bytes(self.shape, self.tp, True, True, recompute),
                        activation_bytes(self.shape, self.tp, recompute=recompute))

    def in_flight(self) -> np.ndarray:
        """How often the first rank keeps a micro-batch of all its layers: p, or p and a part if interleaved."""
        interleaved = np.minimum(self.v * self.m, 2 * (self.pp - 1) + (self.v - 1) * self.pp + 1) / self.v
        return np.where(self.v > 1, interleaved, np.minimum(self.pp, self.m))

    def held(self) -> dict[str, np.ndarray]:
        """Bytes held, by purpose. Experts are spread over ep ranks and so have ep times fewer replicas."""
        model, each = self.model, self.each
        more = self.cluster.overheads.kept_factor
        layer = (model.layer_parameters + model.expert_parameters / self.ep) / self.tp
        kept = self.by("recompute", RECOMPUTE, self.kept)
        shared = np.where(self.sequence_parallel, self.tp, 1)
        n = self.shape.num_activations
        # the embedding's dropout mask; without a pipeline, the last norm, and the logits in 32 bits (korthikanti2022)
        ends = np.minimum(self.pp, self.m) * n / shared + (self.pp == 1) * (
            4 * n / shared + 4 * self.tokens * model.vocab_size / self.tp)
        # ZeRO-3 holds one gathered layer while it gathers the next; from ZeRO-2 on, one layer's full gradients exist
        gathered = self.by("zero_stage", range(4), lambda stage: layer * (
            2 * each.parameters * (stage == 3) + each.gradients * (stage >= 2)))
        return {"state_bytes": self.by("zero_stage", range(4), self.state),
                "activation_bytes": more * (self.in_flight() * self.layers * kept + ends),
                "gathered_bytes": gathered + more * (self.kept(None) - kept) + self.cluster.overheads.fixed_bytes}

    def state(self, zero_stage: int) -> Any:
        """Bytes of parameters, gradients and optimizer."""
        experts = state_bytes(self.expert_parameters, zero_stage, self.shards / self.ep, self.each).total
        return state_bytes(self.parameters, zero_stage, self.shards, self.each).total + experts

    def sent(self) -> dict[str, np.ndarray]:
        """Bytes that a rank in the middle sends, by axis. Full recomputation repeats a forward's two all-reduces.

        cp passes keys and values around a ring, forward and again with their gradients backward (liu2023); ep sends
        each token to its experts and back, in 16 bits, forward and backward (lepikhin2020).
        """
        model = self.model
        with_gathers = np.where(self.sequence_parallel, tensor_parallel_sent_bytes(self.tp, self.between_bytes, True),
                                tensor_parallel_sent_bytes(self.tp, self.between_bytes))
        full = self.recomputed("full")
        again = full * 2 * ring_sent_bytes(self.tp, self.between_bytes)
        # each rank of a tensor-parallel group sends its part of what goes to the next stage (narayanan2021, 4.1)
        between = 2 * self.v * self.m * self.between_bytes / self.tp
        keys = 2 * self.tokens * model.key_value_width / self.tp
        tokens = 2 * self.tokens * model.width * model.routed / self.tp
        often = self.m * self.layers
        return {"tp_bytes": often * (with_gathers + again),
                "cp_bytes": often * (3 + full) * (self.cp - 1) * keys,
                "ep_bytes": often * (4 + 2 * full) * (self.ep - 1) / self.ep * tokens,
                "pp_bytes": np.where(self.pp > 1, between, 0.0),
                "dp_bytes": self.by("zero_stage", range(4), self.replicas_send)}

    def replicas_send(self, zero_stage: int) -> Any:
        """Bytes of gradients and gathered parameters; each micro-batch has its own backward (see hybrid_sent_bytes)."""
        often = {2: (self.m + 1) / 2, 3: self.m}.get(zero_stage, 1)
        return often * (sharded_sent_bytes(zero_stage, self.shards, 2 * self.parameters)
                        + sharded_sent_bytes(zero_stage, self.shards / self.ep, 2 * self.expert_parameters))
