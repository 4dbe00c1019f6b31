"""L1: steps, and layouts that ran out of memory, as vendors and projects reported them: `data/reported.csv`.

Models that have no entry in `models` have their sizes here. A layout that a report has at several numbers of GPUs is
there at all of them; who counts errors counts it once (`weights` in scoreboard).
"""
from __future__ import annotations

from dataclasses import replace

from book.cost.layouts import Layout
from book.cost.models import MODELS
from book.cost.published import Published
from book.cost.transformer import Transformer

LLAMA2 = replace(MODELS["llama3-70b"], num_tokens=4096, vocab_size=32000)
NEMOTRON = replace(LLAMA2, vocab_size=256000, gated=False, norm="layer")
MEGATRON = Transformer(24, 2048, 16, 4096, 131072, tied=False, attention="flash", learned_positions=False,
                       last_norm=True, dropout=False)
BLOOM = Transformer(70, 14336, 112, 2048, 250880, last_norm=True)


def _sized(model: Transformer, num_layers: int, width: int, num_heads: int, mlp_width: int = 0,
           num_kv_heads: int = 0) -> Transformer:
    return replace(model, num_layers=num_layers, width=width, num_heads=num_heads, mlp_width=mlp_width,
                   num_kv_heads=num_kv_heads)


SIZES = {
    **MODELS,
    "gpt3-175b": replace(MODELS["gpt3"], vocab_size=51200, attention="flash"),
    "llama2-7b": _sized(LLAMA2, 32, 4096, 32, 11008), "llama2-13b": _sized(LLAMA2, 40, 5120, 40, 13824),
    "llama2-70b": LLAMA2, "llama-34b": _sized(LLAMA2, 48, 8192, 64, 22016, 8),
    "internlm-7b": replace(_sized(LLAMA2, 32, 4096, 32, 11008), vocab_size=103168),
    "smollm3": replace(_sized(LLAMA2, 36, 2048, 16, 11008, 4), vocab_size=128256, tied=True),
    "nemotron3-22b": _sized(NEMOTRON, 40, 6144, 48, 24576), "nemotron4-15b": _sized(NEMOTRON, 32, 6144, 48, 24576, 8),
    "nemotron4-340b": _sized(NEMOTRON, 96, 18432, 96, 73728, 8),
    "gpt 1.7B": _sized(MEGATRON, 24, 2048, 16), "gpt 16B": _sized(MEGATRON, 32, 6144, 48),
    # no report says that its kernels skip what a window leaves out, and its steps fit better if they don't
    "gpt-oss-120b": replace(MODELS["gpt-oss-120b"], num_window_layers=0),
    "gpt 119B": _sized(MEGATRON, 92, 10240, 80), "gpt 314B": _sized(MEGATRON, 96, 16384, 128),
    **{f"llama {size}": replace(_sized(LLAMA2, *sizes), vocab_size=128000) for size, sizes in {
        "13B": (40, 5120, 40, 13824), "30B": (60, 6656, 52, 17920), "65B": (80, 8192, 64, 22016)}.items()},
}


# Rows whose messages alone, at the bandwidths of data sheets, would take longer than their step: not of these layouts.
IMPOSSIBLE = {("automodel", "gpt-oss-120b")}


def model_of(name: str, num_tokens: int, kernels: str = "") -> Transformer:
    """The model of a row: "llama3-405b/7" has 7 layers, "gpt 72x14336x64" 72 layers of that width and 64 heads."""
    base, _, num_layers = name.partition("/")
    sizes = [int(part) for part in name.removeprefix("gpt ").split("x") if part.isdigit()]
    model = _sized(BLOOM, *sizes) if len(sizes) == 3 else SIZES[base]
    if num_layers:
        model = replace(model, num_layers=int(num_layers))
    stored = kernels in ("torch", "fused")  # they keep attention's scores
    return replace(model, num_tokens=num_tokens, attention="scores" if stored else model.attention)


def reported_row(row: dict[str, str]) -> Published:
    """A row of reported.csv; one that ran out of memory has a step of 0 seconds."""
    at = {name: int(row[name]) for name in (
        "num_tokens", "num_gpus", "pp", "tp", "cp", "ep", "stages_per_rank", "micro_batch_size", "global_batch",
        "zero_stage", "sequence_parallel")}
    model = model_of(row["model"], at["num_tokens"], row["kernels"])
    dp = at["num_gpus"] // (at["pp"] * at["tp"] * at["cp"])
    layout = Layout(at["pp"], dp, at["tp"], at["micro_batch_size"], at["stages_per_rank"], at["zero_stage"],
                    at["sequence_parallel"], row["recompute"] or None, at["cp"], at["ep"])
    return Published(row["model"], model, layout, at["global_batch"], float(row["step_s"] or 0), "reported",
                     row["gpu"], row["software"], memory_bytes=float(row["gpu_gb"] or 0) * 1e9,
                     precision=row["precision"])
