"""L1: what of a model is trained and with what: adapters beside frozen matrices, frozen layers, smaller optimizers."""
from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from book.cost.sizes import Sizes
from book.cost.state import ADAM_MIXED, StateBytes
from book.cost.transformer import Transformer

NF4_BYTES = (4 + 8 / 64 + 32 / (64 * 256)) / 8  # of a weight: 4 bits; a byte for 64, 32 bits for 256 of those bytes
# What a trained parameter takes, with "adam" where no software is named. Without copies in 32 bits, weights and
# gradients have 16; in 8-bit Adam's two bytes every 256 numbers share a scale of 32 bits, 2048 in the paper
# (dettmers2022).
OPTIMIZERS = {"adam": ADAM_MIXED, "adam-bf16": StateBytes(2, 2, 4),
              "adam8bit": StateBytes(2, 2, 2 + 2 * 4 / 256), "sgd": StateBytes(2, 2, 0)}
TRAIN, OFFLOAD = ("full", "lora", "qlora"), ("", "optimizer")
# Assumed, not measured: what a GPU's link to its host reaches, and the memory of a host, which its GPUs share.
HOST_LINK_BYTES_PER_S, HOST_MEMORY_BYTES_PER_S = 25e9, 100e9


@dataclass(frozen=True)
class Tuning:
    """What is trained: everything ("full"), or adapters alone; with which optimizer, and where its state is.

    "lora" freezes the model and trains two matrices of `rank` beside each matrix of the layers, those of queries, keys,
    values, output and MLP (hu2021); embedding, head and norms have none. "qlora" has these matrices in NF4, their
    scales quantized too (dettmers2023), the rest in 16 bits. "full" may leave out the first `frozen_layers` and with
    them the embedding, unless it is the head. `optimizer` is in OPTIMIZERS; with the offload "optimizer" its state is
    in the host's memory (ren2021). `adam` is what that optimizer takes, which differs by software (`machines.EACH`).
    Raises ValueError for other words, a rank below 1, layers below 0 or with adapters.
    """

    train: str = "full"
    rank: int = 16
    frozen_layers: int = 0
    optimizer: str = "adam"
    offload: str = ""
    adam: StateBytes = field(default=ADAM_MIXED, compare=False)

    def __post_init__(self) -> None:
        for name, words in (("train", TRAIN), ("optimizer", tuple(OPTIMIZERS)), ("offload", OFFLOAD)):
            if getattr(self, name) not in words:
                raise ValueError(f"{name} is one of {', '.join(filter(None, words))}, not {getattr(self, name)!r}")
        if self.rank < 1 or self.frozen_layers < 0:
            raise ValueError(f"a rank is at least 1 and frozen_layers at least 0, not {self.rank} and "
                             f"{self.frozen_layers}")
        if self.adapts and self.frozen_layers:
            raise ValueError("adapters are in all layers: frozen_layers goes with train='full'")

    @property
    def adapts(self) -> bool:
        """Whether adapters alone are trained."""
        return self.train != "full"

    @property
    def freezes(self) -> bool:
        """Whether a part of the model is not trained."""
        return self.adapts or self.frozen_layers > 0

    @property
    def kept(self) -> StateBytes:
        """What a trained parameter takes, wherever it is."""
        return self.adam if self.optimizer == "adam" else OPTIMIZERS[self.optimizer]

    @property
    def each(self) -> StateBytes:
        """What of it is in a GPU's memory."""
        kept = self.kept
        return StateBytes(kept.parameters, kept.gradients, 0) if self.offload else kept

    @property
    def weight_bytes(self) -> float:
        """Bytes of a weight in a frozen matrix of the layers."""
        return NF4_BYTES if self.train == "qlora" else 2.0

    def check(self, model: Transformer) -> None:
        """Raise ValueError for a model whose adapters are not counted here, and for more frozen layers than it has."""
        if self.adapts and (model.experts or model.latent):
            raise ValueError("adapters are counted for plain attention and MLPs, not for experts or latent attention")
        if self.frozen_layers >= model.num_layers:
            raise ValueError(f"frozen_layers is {self.frozen_layers}, but this model has {model.num_layers} layers, of "
                             "which one at least is trained")

    def trained_parameters(self, model: Transformer) -> int:
        """How many parameters are trained."""
        if self.adapts:
            return int(model.num_layers * adapter_parameters(model.sizes, self.rank))
        embedding = model.embedding_parameters if self.frozen_layers and not model.tied else 0
        return model.num_parameters - self.frozen_layers * model.layer_parameters - embedding

    def state_bytes(self, model: Transformer) -> float:
        """Bytes of state of all GPUs together, if each parameter is on one: what no way to share it out is below."""
        trained = self.trained_parameters(model)
        frozen = model.num_parameters - (0 if self.adapts else trained)
        return trained * self.each.held(3).total + frozen * self.weight_bytes

    def spared_flops(self, model: Transformer, num_sequences: float) -> float:
        """FLOPs that a step has fewer than one that trains everything: frozen matrices have no weight gradients.

        2 of 6 for each weight and token; frozen layers have no backward at all. Adapters add 6 for each of theirs.
        """
        if not self.adapts:
            return 2 * self.frozen_layers * model.layer_flops(num_sequences)
        tokens, sizes = num_sequences * model.num_tokens, model.sizes
        frozen = model.num_layers * sizes.products_per_token + model.width * model.vocab_size
        return 2 * tokens * (frozen - 3 * self.trained_parameters(model))


FULL = Tuning()


def matrices(model: Sizes) -> tuple[tuple[Any, Any], ...]:
    """The matrices of a layer: the width at the end that tp cuts, and how many; at the other end each has h."""
    return ((model.attention_out, 2), (model.key_value_width / 2, 2), (model.mlp_out, 1 + model.mlp_in / model.mlp_out))


def adapter_parameters(model: Sizes, rank: int, group_size: Any = 1) -> Any:
    """Parameters of a layer's adapters on each of t ranks: r (h + w/t) beside each h x w matrix."""
    return rank * sum(often * (model.width + wide / group_size) for wide, often in matrices(model))


def adapter_numbers(model: Sizes, rank: int) -> Any:
    """Numbers that a layer's adapters keep of each token beside what the layer keeps: the r between their matrices.

    Their inputs are the inputs of the matrices, which a layer keeps anyway. A frozen matrix alone would need none.
    """
    return rank * sum(often for _, often in matrices(model))
