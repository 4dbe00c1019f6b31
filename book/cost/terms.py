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
from book.cost.traffic import num_passes, pipeline_sends, replicated_sent_bytes, tensor_parallel_sent_bytes
from book.cost.transformer import Transformer, layer_shape
from book.cost.tuning import FULL, Tuning, adapter_numbers, adapter_parameters, matrices


class Terms:
    """The columns of layouts as floats, and what they hold and send: arrays of one entry for each layout.

    b is the sequences of a micro-batch, m the micro-batches of a step, v the stages of a rank, `shards` the ranks that
    share out what replicas have in common. `by` chooses by a column's value; `kept` is a layer's bytes of one
    micro-batch. Model, cluster and batch may be arrays too, with an entry for each layout.
    """

    def __init__(self, model: Sizes, cluster: Cluster, layouts: Columns, global_batch: Any, each: StateBytes,
                 tuning: Tuning = FULL):
        self.model, self.cluster, self.layouts, self.batch, self.each = model, cluster, layouts, global_batch, each
        self.tuning = tuning
        columns: list[Any] = [layouts.array(name).astype(float) for name in (
            "pp", "dp", "tp", "micro_batch_size", "stages_per_rank", "cp", "ep", "replicas")]
        self.pp, self.dp, self.tp, self.b, self.v, self.cp, self.ep, self.replicas = columns
        self.sequence_parallel = layouts.array("sequence_parallel") == 1
        self.m: Any = global_batch / (self.dp * self.b)
        self.shards = self.dp * self.cp / self.replicas
        self.longest = np.ceil(model.num_layers / self.pp / self.v)  # layers of a stage
        self.layers = self.longest * self.v
        self.again = 1.0 * self.recomputed("full") + 0.5 * self.recomputed("half")  # of a forward
        self.tokens = self.b * model.num_tokens / self.cp
        self.shape = layer_shape(model, self.b, self.cp)
        self.between_bytes = 2 * self.shape.num_activations  # what goes from layer to layer, in 16 bits
        self.key_value_bytes = 2 * self.tokens * model.key_value_width / self.tp  # of a layer, on a rank of cp
        ends = model.embedding_parameters + (self.pp == 1) * model.head_parameters
        self.parameters = (self.layers * model.layer_parameters + ends) / self.tp
        self.expert_parameters = self.layers * model.expert_parameters / self.ep
        self.expert_shards = self.shards * self.tp / self.ep
        # of a stage's layers, those with a backward: where only the last ones have one, the last stage sets the pace
        self.trained_layers = self.layers
        if tuning.frozen_layers:
            self.trained_layers = np.minimum(self.layers, model.num_layers - tuning.frozen_layers)
        self.trained, self.frozen = self._adapted() if tuning.adapts else self._whole()

    def _whole(self) -> tuple[list[tuple[Any, Any, Any]], list[tuple[Any, Any, Any, float]]]:
        """Trained parameters, with the ranks that ZeRO shards them over and how many GPUs these are apart.

        Frozen ones too, with the bytes of each. Experts are on ep neighbours, over tp too.
        """
        model, without = self.model, self.layers - self.trained_layers
        trained = [(self.parameters, self.shards, self.tp), (self.expert_parameters, self.expert_shards, self.ep)]
        if not self.tuning.frozen_layers:
            return trained, []
        tied = model.head_parameters < model.vocab_size * model.width
        layers = (without * model.layer_parameters + (not tied) * model.embedding_parameters) / self.tp
        frozen = [(layers, self.shards, self.tp, 2.0),
                  (without * model.expert_parameters / self.ep, self.expert_shards, self.ep, 2.0)]
        return [(num - part, shards, apart) for (num, shards, apart), (part, *_) in zip(trained, frozen)], frozen

    def _adapted(self) -> tuple[list[tuple[Any, Any, Any]], list[tuple[Any, Any, Any, float]]]:
        """The same with adapters: of the rest, the matrices of the layers may have fewer bytes."""
        model, tuning = self.model, self.tuning
        linear = self.layers * model.products_per_token / self.tp
        adapters = self.layers * adapter_parameters(model, tuning.rank, self.tp)
        return [(adapters, self.shards, self.tp)], [(linear, self.shards, self.tp, tuning.weight_bytes),
                                                    (self.parameters - linear, self.shards, self.tp, 2.0)]

    def check(self, model: Transformer, uneven: bool) -> None:
        """Raise ValueError for the first layout whose degrees don't divide what they cut."""
        if self.batch < 1:
            raise ValueError(f"global_batch is at least one sequence, not {self.batch}")
        used, experts = self.pp * self.dp * self.tp * self.cp, self.model.num_experts
        wrong = {f"this cluster has {self.cluster.num_gpus} GPUs": used != self.cluster.num_gpus,
                 f"{model.num_layers} layers can't be cut so: stages have k or k - 1, and at most k + 1 have k - 1":
                     self.layers * self.pp - model.num_layers > (np.inf if uneven else self.longest + 1),
                 f"{model.num_layers} layers are fewer than these stages": self.pp * self.v > model.num_layers + 2,
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
        between: Any = 0.0  # the two matrices of each adapter
        if self.tuning.adapts:
            between = {"full": 0, "half": 1}.get(recompute or "", 2) * self.tokens * adapter_numbers(
                self.model, self.tuning.rank)
        return between + np.where(self.sequence_parallel, activation_bytes(self.shape, self.tp, True, True, recompute),
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
        model, layers = self.model, self.trained_layers
        more = self.cluster.overheads.kept_factor
        kept = self.by("recompute", RECOMPUTE, self.kept)
        shared = np.where(self.sequence_parallel, self.tp, 1)
        n = self.shape.num_activations
        # the embedding's dropout mask; at the other end the last norm, and the logits in 32 bits (korthikanti2022)
        first = self.in_flight() * layers * kept + np.minimum(self.pp, self.m) * n / shared
        logits = self.cluster.overheads.logit_bytes * self.tokens * model.vocab_size / self.tp
        last = (2 if self.tuning.adapts else 4) * n / shared + logits / more  # a frozen head needs no input
        kept_bytes = np.where(self.pp == 1, first + last,
                              np.maximum(first, self.last_in_flight() * layers * kept + last))
        gathered = self.by("zero_stage", range(4), self.gathered)
        return {"state_bytes": self.by("zero_stage", range(4), self.state),
                "activation_bytes": more * kept_bytes,
                "gathered_bytes": gathered + more * (self.kept(None) - kept) + self.cluster.overheads.fixed_bytes}

    def state(self, zero_stage: int) -> Any:
        """Bytes of parameters, gradients and optimizer."""
        return self.updated(zero_stage, self.each) + self.fixed(zero_stage)

    def fixed(self, zero_stage: int) -> Any:
        """Bytes of frozen parameters."""
        return sum(state_bytes(num, zero_stage, shards, StateBytes(each, 0, 0)).total
                   for num, shards, _, each in self.frozen)

    def updated(self, zero_stage: int, each: StateBytes) -> Any:
        """Those of trained parameters, which take `each`."""
        return sum(state_bytes(num, zero_stage, shards, each).total for num, shards, _ in self.trained)

    def gathered(self, zero_stage: int) -> Any:
        """Bytes of whole layers: ZeRO-3 holds one while it gathers the next, from ZeRO-2 on one's gradients are whole.

        A frozen matrix in 4 bits is made one of 16 before each product.
        """
        model, tuning, each = self.model, self.tuning, self.each
        layer = model.layer_parameters / self.tp + model.expert_parameters / self.ep
        if not tuning.adapts:
            return layer * (2 * each.parameters * (zero_stage == 3) + each.gradients * (zero_stage >= 2))
        linear, adapters = model.products_per_token / self.tp, adapter_parameters(model, tuning.rank, self.tp)
        weights = linear * tuning.weight_bytes + 2 * (layer - linear) + adapters * each.parameters
        widest = max(wide for wide, _ in matrices(model))
        return (2 * weights * (zero_stage == 3) + adapters * each.gradients * (zero_stage >= 2)
                + (tuning.train == "qlora") * 2 * model.width * widest / self.tp)

    def sent(self) -> dict[str, np.ndarray]:
        """Bytes that the rank sends that sends most, by axis. Full recomputation repeats a forward's two all-reduces.

        cp passes keys and values around a ring, forward and again with their gradients backward, which go one hop
        further, home (liu2023); ep sends each token to its experts and back, in 16 bits, forward and backward
        (lepikhin2020). Where ep borrows tp, each rank of tp sends its part of the tokens. They were gathered before
        and are scattered after, as in torchtitan: software that hands its part on as it is sends half as much along tp.
        """
        model = self.model
        with_gathers = np.where(self.sequence_parallel, tensor_parallel_sent_bytes(self.tp, self.between_bytes, True),
                                tensor_parallel_sent_bytes(self.tp, self.between_bytes))
        again = self.again * 2 * ring_sent_bytes(self.tp, self.between_bytes)
        # each rank of a tensor-parallel group sends its part of what goes to the next stage (narayanan2021, 4.1)
        between = self.m * self.between_bytes / self.tp
        hop = self.key_value_bytes * (self.cp > 1)
        tokens = 2 * self.tokens * model.width * model.routed / self.tp
        often, forward = self.m * self.trained_layers, self.m * (self.layers - self.trained_layers)
        return {"tp_bytes": often * (with_gathers + again) + forward * 2 * ring_sent_bytes(self.tp, self.between_bytes),
                "cp_bytes": (often * (3 + self.again) + forward) * (self.cp - 1) * hop + often * hop,
                "ep_bytes": (often * (4 + 2 * self.again) + forward * 2) * (self.ep - 1) / self.ep * tokens,
                "pp_bytes": pipeline_sends(self.pp, self.v)[0] * between,
                "dp_bytes": sum(num_bytes for num_bytes, _, _ in self.rings())}

    def rings(self) -> list[tuple[Any, Any, Any]]:
        """Of each ring of data parallelism: what a rank sends, how many GPUs it spans, how far apart neighbours are.

        First those of shards: gradients, in 16 bits, and gathered parameters. Frozen ones have no gradients and are not
        updated: ZeRO-3 alone gathers them, twice in each micro-batch. Then those that add the gradients of a shard over
        its replicas, after each backward.
        """
        span, gathers = self.shards * self.tp, self.m * (self.layouts.array("zero_stage") == 3)
        passes = self.by("zero_stage", range(4), self._passes)
        return [*((passes * ring_sent_bytes(shards, num), span, apart) for num, shards, apart in self.trained),
                *((gathers * ring_sent_bytes(shards, num * each), span, apart)
                  for num, shards, apart, each in self.frozen),
                *((self.m * replicated_sent_bytes(self.replicas, shards, 2 * num), span * self.replicas, span)
                  for num, shards, _ in self.trained)]

    def _passes(self, zero_stage: int) -> Any:
        """How often gradients and parameters go around, two bytes for each number; an all-reduce is two such passes."""
        gradients, parameters = num_passes(zero_stage, self.m)
        return gradients + self.cluster.overheads.gather_bytes / 2 * parameters
