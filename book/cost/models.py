"""L1: models by name, with the sizes that their authors published."""
from __future__ import annotations

from dataclasses import replace

from book.cost.sizes import Experts, Latent
from book.cost.transformer import Transformer


def _llama(num_layers: int, width: int, num_heads: int, mlp_width: int, num_kv_heads: int = 8) -> Transformer:
    """RMS norms, a gated MLP, rotary positions, no biases, a head of its own; 8,192 tokens (llama3, table 3)."""
    return Transformer(num_layers, width, num_heads, 8192, 128256, num_kv_heads=num_kv_heads, mlp_width=mlp_width,
                       gated=True, tied=False, attention="flash", biases="none", norm="rms", learned_positions=False,
                       last_norm=True, dropout=False)


# Each with its source, an entry of references.bib.
SOURCES = {"small-gpt": "", "gpt3": "brown2020", "llama3-8b": "llama3", "llama3-70b": "llama3", "llama3-405b": "llama3",
           "qwen2.5-7b": "qwen25", "qwen3-8b": "qwen3", "mixtral-8x7b": "mixtral", "deepseek-v3": "deepseekv3"}
MODELS = {
    "small-gpt": Transformer(4, 48, 4, 32, 65, tied=False, last_norm=True, dropout=False),  # book.parallel's
    "gpt3": Transformer(96, 12288, 96, 2048, 50257, last_norm=True),
    "llama3-8b": _llama(32, 4096, 32, 14336),
    "llama3-70b": _llama(80, 8192, 64, 28672),
    "llama3-405b": _llama(126, 16384, 128, 53248),
    "qwen2.5-7b": replace(_llama(28, 3584, 28, 18944, 4), vocab_size=152064, biases="qkv", num_tokens=4096),
    "qwen3-8b": replace(_llama(36, 4096, 32, 12288), vocab_size=151936, qk_norm=True, num_tokens=4096),
    "mixtral-8x7b": replace(_llama(32, 4096, 32, 14336), vocab_size=32000, experts=Experts(8, 2, 14336)),
    "deepseek-v3": replace(
        _llama(61, 7168, 128, 18432, 128), head_width=128, vocab_size=129280, num_tokens=4096,
        experts=Experts(256, 8, 2048, num_shared=1, num_dense_layers=3, router_biases=True),
        latent=Latent(1536, 512, 64)),
}


def model_named(name: str) -> Transformer:
    """The model of this name; raises ValueError, with the known names, for any other."""
    if name not in MODELS:
        raise ValueError(f"no model is called {name!r}: use {', '.join(MODELS)}, or a Transformer of your own")
    return MODELS[name]
