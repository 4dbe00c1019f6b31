"""L1: the columns of layouts, and what a rank of each holds and sends in a step."""
from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from book.columns import Columns
from book.cost.activations import RECOMPUTE, activation_bytes
from book.cost.links import ring_sent_bytes
from book.cost.cluster import Cluster
from book.cost.sizes import Sizes
from book.cost.state import StateBytes, state_bytes
from book.cost.traffic import num_passes, tensor_parallel_sent_bytes
from book.cost.transformer import Transformer, layer_shape


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
        self.layers = np.ceil(model.num_layers / self.pp / self.v) * self.v
        self.again = 1.0 * self.recomputed("full") + 0.5 * self.recomputed("half")  # of a forward
        self.tokens = self.b * model.num_tokens / self.cp
        self.shape = layer_shape(model, self.b, self.cp)
        self.between_bytes = 2 * self.shape.num_activations  # what goes from layer to layer, in 16 bits
        ends = model.embedding_parameters + (self.pp == 1) * model.head_parameters
        self.parameters = (self.layers * model.layer_parameters + ends) / self.tp
        self.expert_parameters = self.layers * model.expert_parameters / self.ep
        self.expert_shards = self.shards * self.tp / self.ep

    def check(self, model: Transformer, uneven: bool) -> None:
        """Raise ValueError for the first layout whose degrees don't divide what they cut."""
        if self.batch < 1:
            raise ValueError(f"global_batch is at least one sequence, not {self.batch}")
        used, experts = self.pp * self.dp * self.tp * self.cp, self.model.num_experts
        wrong = {f"this cluster has {self.cluster.num_gpus} GPUs": used != self.cluster.num_gpus,
                 f"{model.num_layers} layers can't be cut so":
                     self.layers * self.pp - model.num_layers > (self.pp * self.v - 1 if uneven else 2 * (self.pp > 1)),
                 f"{model.num_heads} heads can't be cut so": model.num_heads / self.tp % 1 != 0,
                 f"{model.num_tokens} tokens can't be cut so": model.num_tokens / self.cp % 1 != 0,
                 f"{experts} experts can't be cut so": (experts / self.ep % 1 != 0) | (self.expert_shards % 1 != 0),
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
            return ~np.any([self.recomputed(word) for word in RECOMPUTE[1:]], axis=0)
        return self.layouts.mask("recompute", how)

    def kept(self, recompute: str | None) -> Any:
        """Bytes that a layer keeps of one micro-batch."""
        return np.where(self.sequence_parallel, activation_bytes(self.shape, self.tp, True, True, recompute),
                        activation_bytes(self.shape, self.tp, recompute=recompute))

    def in_flight(self) -> np.ndarray:
        """How often the first rank keeps a micro-batch of all its layers: p, or p and a part if interleaved."""
        interleaved = np.minimum(self.v * self.m, 2 * (self.pp - 1) + (self.v - 1) * self.pp + 1) / self.v
        return np.where(self.v > 1, interleaved, np.minimum(self.pp, self.m))

    def last_in_flight(self) -> np.ndarray:
        """The same of the last rank, which runs each micro-batch's backward at once."""
        return np.where(self.v > 1, np.minimum(self.m, ((self.v - 1) * self.pp + 1) / self.v), 1.0)

    def held(self) -> dict[str, np.ndarray]:
        """Bytes held, by purpose. Experts are spread over ep ranks of dp, cp and tp, and have fewer replicas."""
        model, each = self.model, self.each
        more = self.cluster.overheads.kept_factor
        layer = model.layer_parameters / self.tp + model.expert_parameters / self.ep
        kept = self.by("recompute", RECOMPUTE, self.kept)
        shared = np.where(self.sequence_parallel, self.tp, 1)
        n = self.shape.num_activations
        # the embedding's dropout mask; at the other end the last norm, and the logits in 32 bits (korthikanti2022)
        first = self.in_flight() * self.layers * kept + np.minimum(self.pp, self.m) * n / shared
        logits = self.cluster.overheads.logit_bytes * self.tokens * model.vocab_size / self.tp
        last = 4 * n / shared + logits / more
        kept_bytes = np.where(self.pp == 1, first + last,
                              np.maximum(first, self.last_in_flight() * self.layers * kept + last))
        # ZeRO-3 holds one gathered layer while it gathers the next; from ZeRO-2 on, one layer's full gradients exist
        gathered = self.by("zero_stage", range(4), lambda stage: layer * (
            2 * each.parameters * (stage == 3) + each.gradients * (stage >= 2)))
        return {"state_bytes": self.by("zero_stage", range(4), self.state),
                "activation_bytes": more * kept_bytes,
                "gathered_bytes": gathered + more * (self.kept(None) - kept) + self.cluster.overheads.fixed_bytes}

    def state(self, zero_stage: int) -> Any:
        """Bytes of parameters, gradients and optimizer."""
        experts = state_bytes(self.expert_parameters, zero_stage, self.expert_shards, self.each).total
        return state_bytes(self.parameters, zero_stage, self.shards, self.each).total + experts

    def sent(self) -> dict[str, np.ndarray]:
        """Bytes that a rank in the middle sends, by axis. Full recomputation repeats a forward's two all-reduces.

        cp passes keys and values around a ring, forward and again with their gradients backward (liu2023); ep sends
        each token to its experts and back, in 16 bits, forward and backward (lepikhin2020).
        """
        model = self.model
        with_gathers = np.where(self.sequence_parallel, tensor_parallel_sent_bytes(self.tp, self.between_bytes, True),
                                tensor_parallel_sent_bytes(self.tp, self.between_bytes))
        again = self.again * 2 * ring_sent_bytes(self.tp, self.between_bytes)
        # each rank of a tensor-parallel group sends its part of what goes to the next stage (narayanan2021, 4.1)
        between = 2 * self.v * self.m * self.between_bytes / self.tp
        keys = 2 * self.tokens * model.key_value_width / self.tp
        tokens = 2 * self.tokens * model.width * model.routed / self.tp
        often = self.m * self.layers
        return {"tp_bytes": often * (with_gathers + again),
                "cp_bytes": often * (3 + self.again) * (self.cp - 1) * keys,
                "ep_bytes": often * (4 + 2 * self.again) * (self.ep - 1) / self.ep * tokens,
                "pp_bytes": np.where(self.pp > 1, between, 0.0),
                "dp_bytes": self.by("zero_stage", range(4), self.replicas_send)}

    def replicas_send(self, zero_stage: int) -> Any:
        """Bytes of gradients, in 16 bits, and gathered parameters; each micro-batch has its own backward."""
        gradients, parameters = num_passes(zero_stage, self.m)
        each = gradients + self.cluster.overheads.gather_bytes / 2 * parameters  # a ring all-reduce is two passes
        return each * (ring_sent_bytes(self.shards, self.parameters)
                       + ring_sent_bytes(self.expert_shards, self.expert_parameters))
