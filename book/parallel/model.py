"""L2: a small GPT, written once and split in many ways.

Code that splits it relies on its names and structure. `blocks` is a list that is divided among pipeline stages, with
`embed` before it and `predict` after it. In a block the projections `q`, `k`, `v` and `up` may be split by columns,
`out` and `down` by rows: attention infers its number of heads from its projections' outputs, so it also works on a
subset of the heads.

Shapes: B sequences in the batch, T tokens, D width, H heads of K = D/H, M width inside the MLP, V vocabulary.
"""
from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F

INIT_STD = 0.05  # GPT-2, 16 times as wide, uses 0.02; with that, 100 steps would learn less here


@dataclass(frozen=True)
class GPTConfig:
    """The sizes of a `GPT`; `mlp_width=None` means four times the width, `context` is the longest sequence in tokens.

    Raises ValueError for a size below 1, a width that is not a multiple of the heads, a dropout outside [0, 1), and a
    dtype that is not floating-point.
    """

    vocab_size: int
    context: int = 32
    num_layers: int = 4
    num_heads: int = 4
    width: int = 48
    mlp_width: int | None = None
    dropout: float = 0.0
    dtype: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        for name in ("vocab_size", "context", "num_layers", "num_heads", "width", "mlp_width"):
            size = getattr(self, name)
            if size is not None and size < 1:
                raise ValueError(f"{name} is {size}, but a GPT needs at least 1")
        if self.width % self.num_heads:
            raise ValueError(f"a width of {self.width} can't be shared by {self.num_heads} heads: "
                             f"make width a multiple of num_heads")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout is {self.dropout}, but it is a probability: at least 0 and less than 1")
        if not self.dtype.is_floating_point:
            raise ValueError(f"dtype is {self.dtype}, but weights need a floating-point dtype such as torch.float32")

    @property
    def mlp_features(self) -> int:
        """The width inside the MLP, M: `mlp_width`, or 4 D."""
        return 4 * self.width if self.mlp_width is None else self.mlp_width

    @property
    def num_parameters(self) -> int:
        """The number of parameters of a `GPT` of these sizes: (2V + T) D + L (4 D^2 + 9 D + 2 D M + M) + 2 D.

        With T the context and L layers: V D and T D in the embeddings, D V in the head, 2 D in the last norm; in each
        block 4 (D^2 + D) in attention, 2 D M + M + D in the MLP, 4 D in two norms.
        """
        d, m = self.width, self.mlp_features
        block = 4 * d * d + 9 * d + 2 * d * m + m
        return (2 * self.vocab_size + self.context) * d + self.num_layers * block + 2 * d


class Attention(nn.Module):
    """Causal self-attention: position t sees positions 0 to t."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.head_width = config.width // config.num_heads
        self.dropout = config.dropout
        self.q = nn.Linear(config.width, config.width)
        self.k = nn.Linear(config.width, config.width)
        self.v = nn.Linear(config.width, config.width)
        self.out = nn.Linear(config.width, config.width)

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        """(B, T, D) -> (B, T, D)."""
        q_BHTK, k_BHTK, v_BHTK = (self._heads(project(x_BTD)) for project in (self.q, self.k, self.v))
        y_BHTK = F.scaled_dot_product_attention(q_BHTK, k_BHTK, v_BHTK, is_causal=True,
                                                dropout_p=self.dropout if self.training else 0.0)
        return self.out(y_BHTK.transpose(1, 2).flatten(2))

    def _heads(self, x_BTD: torch.Tensor) -> torch.Tensor:
        return x_BTD.unflatten(-1, (-1, self.head_width)).transpose(1, 2)


class MLP(nn.Module):
    """Two linear maps with a GELU between them, applied to each position separately."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.up = nn.Linear(config.width, config.mlp_features)
        self.down = nn.Linear(config.mlp_features, config.width)

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        """(B, T, D) -> (B, T, D)."""
        return self.down(F.gelu(self.up(x_BTD)))


class Block(nn.Module):
    """Attention and an MLP, each applied to its normalised input and added to that input (pre-norm, as in GPT-2)."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.width)
        self.attention = Attention(config)
        self.mlp_norm = nn.LayerNorm(config.width)
        self.mlp = MLP(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        """(B, T, D) -> (B, T, D)."""
        x_BTD = x_BTD + self.dropout(self.attention(self.attention_norm(x_BTD)))
        return x_BTD + self.dropout(self.mlp(self.mlp_norm(x_BTD)))


class GPT(nn.Module):
    """A decoder-only transformer: tokens in, for each position the logits of the next token out.

    Learned positions, pre-norm blocks, a final norm, a head that is not tied to the embedding. Weights are drawn as in
    GPT-2 (Radford 2019) except for the scale: normal with standard deviation 0.05, divided by sqrt(2L) for layers whose
    output one of the L blocks adds to its input; biases are 0. They come from torch's global generator, so ranks with
    different seeds draw different weights: see `GPT.seeded`.
    """

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.token_embedding = nn.Embedding(config.vocab_size, config.width)
        self.position_embedding = nn.Embedding(config.context, config.width)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocab_size, bias=False)
        self.to(config.dtype)
        self._draw_weights()

    @classmethod
    def seeded(cls, config: GPTConfig, seed: int) -> GPT:
        """A model on the CPU that depends only on `config` and `seed`; torch's generators are left as they were."""
        with torch.random.fork_rng(devices=[]), torch.device("cpu"):
            model = cls(config)
            model._draw_weights(torch.Generator().manual_seed(seed))
        return model

    @staticmethod
    def loss(logits_BTV: torch.Tensor, targets_BT: torch.Tensor) -> torch.Tensor:
        """The mean cross-entropy of all B T predictions, in nats: about ln V for an untrained model."""
        return F.cross_entropy(logits_BTV.flatten(0, -2), targets_BT.flatten())

    def forward(self, tokens_BT: torch.Tensor) -> torch.Tensor:
        """Token numbers (B, T) -> logits (B, T, V), T up to the context."""
        return self.predict(self.apply_blocks(self.embed(tokens_BT)))

    def embed(self, tokens_BT: torch.Tensor) -> torch.Tensor:
        """Token numbers (B, T) -> the first block's input (B, T, D).

        Raises ValueError for more tokens than the context.
        """
        num_tokens = tokens_BT.shape[-1]
        if num_tokens > self.config.context:
            raise ValueError(f"a sequence has {num_tokens} tokens, but this model's context is {self.config.context}: "
                             f"give it shorter windows, or make it with a longer context")
        positions_T = torch.arange(num_tokens, device=tokens_BT.device)
        return self.dropout(self.token_embedding(tokens_BT) + self.position_embedding(positions_T))

    def apply_blocks(self, x_BTD: torch.Tensor, first: int = 0, last: int | None = None) -> torch.Tensor:
        """Blocks `first` up to, not including, `last` (None: to the end), (B, T, D) -> (B, T, D)."""
        for block in self.blocks[first:last]:
            x_BTD = block(x_BTD)
        return x_BTD

    def predict(self, x_BTD: torch.Tensor) -> torch.Tensor:
        """The last block's output (B, T, D) -> logits (B, T, V)."""
        return self.head(self.norm(x_BTD))

    @torch.no_grad()
    def _draw_weights(self, generator: torch.Generator | None = None) -> None:
        for name, module in self.named_modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                adds_to_input = name.endswith(("attention.out", "mlp.down"))
                std = INIT_STD / math.sqrt(2 * self.config.num_layers) if adds_to_input else INIT_STD
                # Random numbers depend on the dtype: always draw float32, so that a seed gives the same weights in all.
                drawn = torch.empty(module.weight.shape, dtype=torch.float32).normal_(std=std, generator=generator)
                module.weight.copy_(drawn)
            if isinstance(module, nn.Linear) and module.bias is not None:
                module.bias.zero_()
