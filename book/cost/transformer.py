"""L1: parameters and FLOPs of a transformer, from its sizes alone.

Symbols in the formulas: L layers of width h with a heads, sequences of s tokens, a vocabulary of V, B sequences.
A product of an (m, k) and a (k, n) matrix is 2 m k n FLOPs; nothing but products is counted, attention as if it were
not causal.
"""
from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from book.cost.activations import LayerShape, check_recompute
from book.cost.sizes import Experts, Latent, Sizes

ATTENTION, BIASES, NORMS = ("scores", "flash"), ("all", "qkv", "none"), ("layer", "rms")
QK_NORMS = ("", "head", "whole")


@dataclass(frozen=True)
class Transformer:
    """The sizes of a decoder. By default a GPT: an MLP 4 h wide, biases, two norms a layer, learned positions, tied.

    0 stands for what follows from the rest: as many keys and values as heads, a head of h/a, an MLP of 4 h. `gated` is
    an MLP of three matrices (SwiGLU), `tied` a head that is the embedding; `attention` keeps its scores or, as "flash",
    does not (dao2022). `last_norm` counts the norm before the head, which the papers' formula leaves out. `num_norms`
    are a layer's; `qk_norm` adds one for queries and one for keys, of each "head" or of the "whole" of them. In
    `num_window_layers` a token attends to the last `window` tokens only; `sinks` adds a number to each head's scores.

    Raises ValueError for a size below 1, heads that don't divide the width, keys that don't divide the heads, more
    layers with a window than layers, and words that are not in ATTENTION, BIASES, NORMS and QK_NORMS.
    """

    num_layers: int
    width: int
    num_heads: int
    num_tokens: int = 2048
    vocab_size: int = 51200
    num_kv_heads: int = 0
    head_width: int = 0
    mlp_width: int = 0
    gated: bool = False
    tied: bool = True
    attention: str = "scores"
    biases: str = "all"
    norm: str = "layer"
    qk_norm: str = ""
    num_norms: int = 2
    sinks: bool = False
    window: int = 0
    num_window_layers: int = 0
    learned_positions: bool = True
    last_norm: bool = False
    dropout: bool = True
    experts: Experts | None = None
    latent: Latent | None = None

    def __post_init__(self) -> None:
        if min(self.num_layers, self.width, self.num_heads, self.num_tokens, self.vocab_size) < 1:
            raise ValueError(f"each size of a transformer is at least 1: {self}")
        if not self.head_width and self.width % self.num_heads:
            raise ValueError(f"a width of {self.width} can't be shared out over {self.num_heads} heads")
        if self.num_heads % self.kv_heads:
            raise ValueError(f"{self.num_heads} heads can't share {self.num_kv_heads} keys and values evenly")
        for name, words in (("attention", ATTENTION), ("biases", BIASES), ("norm", NORMS), ("qk_norm", QK_NORMS)):
            if getattr(self, name) not in words:
                raise ValueError(f"{name} is one of {', '.join(words)}, not {getattr(self, name)!r}")
        if not 0 <= self.num_window_layers <= self.num_layers * (self.window > 0):
            raise ValueError(f"{self.num_window_layers} of {self.num_layers} layers can't have a window of "
                             f"{self.window} tokens")
        if self.experts and self.experts.num_dense_layers >= self.num_layers:
            raise ValueError(f"{self.experts.num_dense_layers} of {self.num_layers} layers are dense: no expert "
                             "is left")

    @property
    def kv_heads(self) -> int:
        """How many heads keys and values have."""
        return self.num_kv_heads or self.num_heads

    @property
    def head_size(self) -> int:
        """The width of a head."""
        return self.head_width or self.width // self.num_heads

    @property
    def mlp_size(self) -> int:
        """The width inside the plain MLP."""
        return self.mlp_width or 4 * self.width

    @property
    def attention_matrices(self) -> int:
        """Numbers in a layer's projections to queries, keys and values, and back."""
        h, heads, head = self.width, self.num_heads, self.head_size
        if self.latent is None:
            return h * head * (2 * heads + 2 * self.kv_heads)
        narrow = self.latent
        queries = narrow.query_rank * (h + heads * (head + narrow.rope_width))
        values = h * (narrow.value_rank + narrow.rope_width) + narrow.value_rank * heads * 2 * head
        return queries + values + heads * head * h

    @property
    def attention_vectors(self) -> int:
        """Numbers in attention's biases, in its sinks and in the norms inside it."""
        inner = self.head_size * (self.num_heads + 2 * self.kv_heads)
        found = {"all": inner + self.width, "qkv": inner, "none": 0}[self.biases] + self.sinks * self.num_heads
        found += self.head_size * {"": 0, "head": 2, "whole": self.num_heads + self.kv_heads}[self.qk_norm]
        return found + (self.latent.query_rank + self.latent.value_rank if self.latent else 0)

    def mlp_parameters(self, width: int) -> int:
        """Parameters of an MLP of this width, with its biases."""
        biases = self.width + (1 + self.gated) * width if self.biases == "all" else 0
        return (2 + self.gated) * self.width * width + biases

    @property
    def num_expert_layers(self) -> int:
        """How many layers have experts."""
        return self.num_layers - self.experts.num_dense_layers if self.experts else 0

    @property
    def layer_parameters(self) -> int:
        """Parameters of a layer with the plain MLP: 12 h^2 + 13 h in a GPT (narayanan2021)."""
        return self.attention_matrices + self.attention_vectors + self.mlp_parameters(
            self.mlp_size) + self.num_norms * self.norm_parameters

    @property
    def norm_parameters(self) -> int:
        """Parameters of a norm: a weight, and with "layer" a bias."""
        return self.width * (2 if self.norm == "layer" else 1)

    @property
    def embedding_parameters(self) -> int:
        """Parameters of the tokens' and the learned positions' embedding: (V + s) h."""
        return (self.vocab_size + self.num_tokens * self.learned_positions) * self.width

    @property
    def head_parameters(self) -> int:
        """Parameters after the last layer: the head's, unless it is tied, and the last norm's."""
        return (not self.tied) * self.vocab_size * self.width + self.last_norm * self.norm_parameters

    @property
    def num_parameters(self) -> int:
        """All of them; in a GPT 12 L h^2 (1 + 13/(12 h) + (V + s)/(12 L h)) (narayanan2021)."""
        return (self.num_layers * self.layer_parameters + self._more_in_experts(every=True)
                + self.embedding_parameters + self.head_parameters)

    @property
    def num_active_parameters(self) -> int:
        """Those that a token meets: of the routed experts, only the ones that it is sent to."""
        return (self.num_layers * self.layer_parameters + self._more_in_experts(every=False)
                + self.embedding_parameters + self.head_parameters)

    def _more_in_experts(self, every: bool) -> int:
        """What layers of experts and their routers have more than layers with the plain MLP."""
        if self.experts is None:
            return 0
        num = self.experts.num_shared + (self.experts.num if every else self.experts.per_token)
        router = self.experts.num * (self.width + (self.experts.router_biases or self.biases == "all"))
        more = num * self.mlp_parameters(self.experts.width) + router - self.mlp_parameters(self.mlp_size)
        return self.num_expert_layers * more

    @property
    def seen_share(self) -> float:
        """Which share of scores is not left out by windows, on average over layers."""
        short = min(self.window, self.num_tokens) / self.num_tokens
        return 1 - self.num_window_layers / self.num_layers * (1 - short) ** 2

    @property
    def sizes(self) -> Sizes:
        """The numbers that an estimate needs, of an average layer."""
        h, heads, head, experts, gates = self.width, self.num_heads, self.head_size, self.experts, 1 + self.gated
        share = self.num_expert_layers / self.num_layers
        active = (1 - share) * self.mlp_size
        routed_parameters = 0.0
        if experts:
            active += share * experts.width * (experts.per_token + experts.num_shared)
            routed_parameters = share * experts.num * self.mlp_parameters(experts.width)
        whole = (self.num_parameters - self.embedding_parameters - self.head_parameters) / self.num_layers
        key = head + (self.latent.rope_width if self.latent else 0)
        wide = heads * (key + head)  # of queries and of what attention gives; then of keys and values
        kept = wide + (wide if self.latent else 2 * self.kv_heads * head) + (1 + gates) * active
        return Sizes(
            num_layers=self.num_layers, width=h, num_heads=heads, num_tokens=self.num_tokens,
            vocab_size=self.vocab_size, attention_in=self.attention_matrices / h - heads * head,
            attention_out=heads * head, mlp_in=gates * active, mlp_out=active, kept_inside=kept,
            kept_outside_bytes=(10 if self.dropout else 8) + 2 * (self.num_norms - 2),  # a norm of outputs keeps these
            score_width=heads * (key + head) * self.seen_share, score_bytes=5 if self.dropout else 4,
            key_value_width=2 * self.kv_heads * head, layer_parameters=whole - routed_parameters,
            expert_parameters=routed_parameters, num_experts=experts.num if experts else 1,
            expert_width=experts.width if experts else 0,
            routed=share * experts.per_token if experts else 0.0, embedding_parameters=self.embedding_parameters,
            head_parameters=self.head_parameters, is_flash=float(self.attention == "flash"))

    def layer(self, num_sequences: float) -> LayerShape:
        """The shape of a layer that gets so many sequences."""
        return layer_shape(self.sizes, num_sequences)

    def layer_flops(self, num_sequences: float) -> float:
        """FLOPs of a layer's forward, 24 B s h^2 + 4 B s^2 h in a GPT (narayanan2021); a backward is twice as much."""
        tokens = num_sequences * self.num_tokens
        return 2 * tokens * self.sizes.products_per_token + self.attention_flops(num_sequences)

    def attention_flops(self, num_sequences: float) -> float:
        """The part of them that is scores and their product with the values: 4 B s^2 h."""
        return 2 * num_sequences * self.num_tokens**2 * self.sizes.score_width

    def head_flops(self, num_sequences: float) -> float:
        """FLOPs of the logits' forward: 2 B s h V."""
        return 2 * num_sequences * self.num_tokens * self.width * self.vocab_size

    def step_flops(self, num_sequences: float, recompute: str | None = None) -> float:
        """FLOPs of a training step: 72 B L s h^2 (1 + s/(6 h) + V/(12 h L)) (korthikanti2022).

        "full" recomputation runs each layer's forward twice: 96 B L s h^2 (1 + s/(6 h) + V/(16 h L)) (narayanan2021).
        "selective" runs twice what `attention_flops` counts: + s/(18 h) in the first bracket (derived; in the hardware
        FLOPs of korthikanti2022 it is + s/(6 h)). Raises ValueError for another word.
        """
        check_recompute(recompute)
        layer = self.layer_flops(num_sequences)
        again = {"full": layer, "half": layer / 2, "selective": self.attention_flops(num_sequences)}
        layers = self.num_layers * (3 * layer + again.get(str(recompute), 0.0))
        return layers + 3 * self.head_flops(num_sequences)


def layer_shape(sizes: Sizes, num_sequences: Any, num_ranks: Any = 1) -> LayerShape:
    """The shape of a layer that gets so many sequences, each cut over `num_ranks`: sizes may be arrays."""
    scores = sizes.score_bytes * sizes.num_heads * sizes.num_tokens / sizes.width * (1 - sizes.is_flash)
    return LayerShape(num_sequences, sizes.num_tokens / num_ranks, sizes.width, sizes.num_heads,
                      sizes.kept_outside_bytes, 2 * sizes.kept_inside / sizes.width, scores)
