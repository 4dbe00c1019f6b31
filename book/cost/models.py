"""L1: models by name, with the sizes that their authors published."""
from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from book.cost.sizes import Experts, Latent
from book.cost.transformer import Transformer


def _llama(num_layers: int, width: int, num_heads: int, mlp_width: int, num_kv_heads: int = 8) -> Transformer:
    """RMS norms, a gated MLP, rotary positions, no biases, a head of its own; 8,192 tokens (llama3, table 3)."""
    return Transformer(num_layers, width, num_heads, 8192, 128256, num_kv_heads=num_kv_heads, mlp_width=mlp_width,
                       gated=True, tied=False, attention="flash", biases="none", norm="rms", learned_positions=False,
                       last_norm=True, dropout=False)


def _qwen3(num_layers: int, width: int, num_heads: int, mlp_width: int, tied: bool = False, num_kv_heads: int = 8,
           experts: Experts | None = None) -> Transformer:
    """Heads of 128, whose queries and keys are normalized (qwen3, tables 1 and 2)."""
    return replace(_llama(num_layers, width, num_heads, mlp_width, num_kv_heads), head_width=128, vocab_size=151936,
                   qk_norm="head", num_tokens=4096, tied=tied, experts=experts)


def _olmo2(num_layers: int, width: int, num_heads: int, mlp_width: int, num_kv_heads: int) -> Transformer:
    """Norms after attention and MLP instead of before, and one of all queries, one of all keys (olmo2, table 3)."""
    return replace(_llama(num_layers, width, num_heads, mlp_width, num_kv_heads), vocab_size=100352, qk_norm="whole",
                   num_tokens=4096)


def _gpt_oss(num_layers: int, num_experts: int) -> Transformer:
    """Biases, sinks, and a window of 128 tokens in every second layer (gptoss, section 2)."""
    return replace(_llama(num_layers, 2880, 64, 2880), head_width=64, vocab_size=201088, biases="all", sinks=True,
                   num_tokens=4096, window=128, num_window_layers=num_layers // 2,
                   experts=Experts(num_experts, 4, 2880))


def _gemma3(num_layers: int, width: int, num_heads: int, mlp_width: int, num_kv_heads: int, head_width: int = 256,
            window: int = 1024, vocab_size: int = 262208) -> Transformer:
    """Text alone: norms before and after attention and MLP, a window in five of six layers (gemma3, section 2)."""
    return replace(_llama(num_layers, width, num_heads, mlp_width, num_kv_heads), head_width=head_width, tied=True,
                   vocab_size=vocab_size, qk_norm="head", num_norms=4, window=window,
                   num_window_layers=num_layers - num_layers // 6)


# Each with its source, an entry of references.bib.
SOURCES = {"small-gpt": "", "gpt3": "brown2020", "llama3.2-1b": "llama32", "llama3.2-3b": "llama32",
           **dict.fromkeys(("llama3-8b", "llama3-70b", "llama3-405b"), "llama3"), "qwen2.5-7b": "qwen25",
           **dict.fromkeys(("qwen3-0.6b", "qwen3-1.7b", "qwen3-4b", "qwen3-8b", "qwen3-14b", "qwen3-32b",
                            "qwen3-30b-a3b", "qwen3-235b-a22b"), "qwen3"),
           **dict.fromkeys(("olmo2-1b", "olmo2-7b", "olmo2-13b", "olmo2-32b"), "olmo2"),
           **dict.fromkeys(("gemma3-1b", "gemma3-4b", "gemma3-12b", "gemma3-27b"), "gemma3"),
           "gpt-oss-20b": "gptoss", "gpt-oss-120b": "gptoss", "mixtral-8x7b": "mixtral", "deepseek-v3": "deepseekv3"}
MODELS = {
    "small-gpt": Transformer(4, 48, 4, 32, 65, tied=False, last_norm=True, dropout=False),  # book.parallel's
    "gpt3": Transformer(96, 12288, 96, 2048, 50257, last_norm=True),
    "llama3.2-1b": replace(_llama(16, 2048, 32, 8192), tied=True),
    "llama3.2-3b": replace(_llama(28, 3072, 24, 8192), tied=True),
    "llama3-8b": _llama(32, 4096, 32, 14336),
    "llama3-70b": _llama(80, 8192, 64, 28672),
    "llama3-405b": _llama(126, 16384, 128, 53248),
    "qwen2.5-7b": replace(_llama(28, 3584, 28, 18944, 4), vocab_size=152064, biases="qkv", num_tokens=4096),
    "qwen3-0.6b": _qwen3(28, 1024, 16, 3072, tied=True), "qwen3-1.7b": _qwen3(28, 2048, 16, 6144, tied=True),
    "qwen3-4b": _qwen3(36, 2560, 32, 9728, tied=True), "qwen3-8b": _qwen3(36, 4096, 32, 12288),
    "qwen3-14b": _qwen3(40, 5120, 40, 17408), "qwen3-32b": _qwen3(64, 5120, 64, 25600),
    "qwen3-30b-a3b": _qwen3(48, 2048, 32, 6144, num_kv_heads=4, experts=Experts(128, 8, 768)),
    "qwen3-235b-a22b": _qwen3(94, 4096, 64, 12288, num_kv_heads=4, experts=Experts(128, 8, 1536)),
    "olmo2-1b": _olmo2(16, 2048, 16, 8192, 16), "olmo2-7b": _olmo2(32, 4096, 32, 11008, 32),
    "olmo2-13b": _olmo2(40, 5120, 40, 13824, 40), "olmo2-32b": _olmo2(64, 5120, 40, 27648, 8),
    "gemma3-1b": _gemma3(26, 1152, 4, 6912, 1, window=512, vocab_size=262144),
    "gemma3-4b": _gemma3(34, 2560, 8, 10240, 4), "gemma3-12b": _gemma3(48, 3840, 16, 15360, 8),
    "gemma3-27b": _gemma3(62, 5376, 32, 21504, 16, head_width=128),
    "gpt-oss-20b": _gpt_oss(24, 32), "gpt-oss-120b": _gpt_oss(36, 128),
    "mixtral-8x7b": replace(_llama(32, 4096, 32, 14336), vocab_size=32000, experts=Experts(8, 2, 14336)),
    "deepseek-v3": replace(
        _llama(61, 7168, 128, 18432, 128), head_width=128, vocab_size=129280, num_tokens=4096,
        experts=Experts(256, 8, 2048, num_shared=1, num_dense_layers=3, router_biases=True),
        latent=Latent(1536, 512, 64)),
}


# Kinds of config.json that are read: Llama's architecture but for these; and words that each must have.
KINDS: dict[str, dict[str, Any]] = {"llama": {}, "mistral": {}, "qwen2": {"biases": "qkv"},
                                    "qwen3": {"qk_norm": "head"}}
READ = ("num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size")
MOST_TOKENS = 8192  # of a sequence by default, where a model can take more


def model_named(name: str) -> Transformer:
    """The model of this name in upper or lower case, or of a config.json as Hugging Face has it.

    Llama 3.1 has the sizes of Llama 3, and may be called so. Raises ValueError, with the known names, for any other,
    and OSError for a file that can't be read.
    """
    if name.endswith(".json"):
        return _configured(name)
    key = name.lower().replace("llama-3", "llama3").replace("llama3.1-", "llama3-")
    if key not in MODELS:
        raise ValueError(f"no model is called {name!r}: use {', '.join(MODELS)}, or the config.json of a model of "
                         f"Hugging Face's kinds {', '.join(KINDS)}")
    return MODELS[key]


def _configured(name: str) -> Transformer:
    try:
        said = json.loads(Path(name).read_text("utf-8"))
        kind = KINDS[said["model_type"]]
        num_layers, width, num_heads, mlp_width = (int(said[word]) for word in READ)
        found = _llama(num_layers, width, num_heads, mlp_width, int(said.get("num_key_value_heads") or num_heads))
        return replace(found, vocab_size=int(said["vocab_size"]), head_width=int(said.get("head_dim") or 0),
                       tied=bool(said.get("tie_word_embeddings")),
                       num_tokens=min(int(said.get("max_position_embeddings") or MOST_TOKENS), MOST_TOKENS), **kind)
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        raise ValueError(f"{name} is no config.json of the kinds {', '.join(KINDS)}, with model_type, "
                         f"{', '.join(READ)} and vocab_size: {error!r}") from None
