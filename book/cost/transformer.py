"""L1: parameters and FLOPs of a transformer like GPT, from its sizes alone.

Symbols in the formulas: L layers of width h with a heads, sequences of s tokens, a vocabulary of V, B sequences.
A product of an (m, k) and a (k, n) matrix is 2 m k n FLOPs; nothing but products is counted, attention as if it were
not causal.
"""
from __future__ import annotations

from dataclasses import dataclass

from book.cost.activations import LayerShape, check_recompute


@dataclass(frozen=True)
class Transformer:
    """The sizes of a GPT: an MLP 4 h wide, biases, two norms a layer, learned positions, a head tied to the embedding.

    Raises ValueError for a size below 1 and for a width that the number of heads does not divide.
    """

    num_layers: int
    width: int
    num_heads: int
    num_tokens: int = 2048
    vocab_size: int = 51200

    def __post_init__(self) -> None:
        if min(self.num_layers, self.width, self.num_heads, self.num_tokens, self.vocab_size) < 1:
            raise ValueError(f"each size of a transformer is at least 1: {self}")
        if self.width % self.num_heads:
            raise ValueError(f"a width of {self.width} can't be shared out over {self.num_heads} heads")

    @property
    def layer_parameters(self) -> int:
        """Parameters of a layer: 12 h^2 + 13 h (narayanan2021)."""
        return 12 * self.width**2 + 13 * self.width

    @property
    def embedding_parameters(self) -> int:
        """Parameters of the tokens' and the positions' embedding: (V + s) h."""
        return (self.vocab_size + self.num_tokens) * self.width

    @property
    def num_parameters(self) -> int:
        """All of them: 12 L h^2 (1 + 13/(12 h) + (V + s)/(12 L h)) (narayanan2021)."""
        return self.num_layers * self.layer_parameters + self.embedding_parameters

    def layer(self, num_sequences: float) -> LayerShape:
        """The shape of a layer that gets so many sequences."""
        return LayerShape(num_sequences, self.num_tokens, self.width, self.num_heads)

    def layer_flops(self, num_sequences: float) -> float:
        """FLOPs of a layer's forward: 24 B s h^2 + 4 B s^2 h (narayanan2021); a backward is twice as much."""
        return 24 * num_sequences * self.num_tokens * self.width**2 + self.attention_flops(num_sequences)

    def attention_flops(self, num_sequences: float) -> float:
        """The part of them that is scores and their product with the values: 4 B s^2 h."""
        return 4 * num_sequences * self.num_tokens**2 * self.width

    def head_flops(self, num_sequences: float) -> float:
        """FLOPs of the logits' forward: 2 B s h V."""
        return 2 * num_sequences * self.num_tokens * self.width * self.vocab_size

    def step_flops(self, num_sequences: float, recompute: str | None = None) -> float:
        """FLOPs of a training step: 72 B L s h^2 (1 + s/(6 h) + V/(12 h L)) (korthikanti2022).

        "full" recomputation runs each layer's forward twice: 96 B L s h^2 (1 + s/(6 h) + V/(16 h L)) (narayanan2021).
        "selective" runs twice what `attention_flops` counts: + s/(18 h) in the first bracket (derived; in the hardware
        FLOPs of korthikanti2022 it is + s/(6 h)). Raises ValueError for another word.
        """
        again = recomputed_flops(self, num_sequences, recompute)
        layers = self.num_layers * (3 * self.layer_flops(num_sequences) + again)
        return layers + 3 * self.head_flops(num_sequences)

    @property
    def flops_per_token(self) -> int:
        """6 N + 12 L h s for each token: the rule of thumb that counts each parameter as part of a product."""
        return 6 * self.num_parameters + 12 * self.num_layers * self.width * self.num_tokens


def recomputed_flops(model: Transformer, num_sequences: float, recompute: str | None) -> float:
    """FLOPs of what a layer's backward computes a second time; raises ValueError for another word."""
    check_recompute(recompute)
    if recompute == "full":
        return model.layer_flops(num_sequences)
    return model.attention_flops(num_sequences) if recompute else 0 * num_sequences
