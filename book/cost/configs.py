"""L1: a chosen layout as what frameworks read: a file for torchtitan, options for Megatron-LM.

torchtitan 0.2.2's own reader took such files, and 0.3 reads no TOML any more. Megatron-LM's options are those that its
arguments.py and the configurations of its core declare; its package on PyPI has no training script to try them with.
"""
from __future__ import annotations

from collections.abc import Iterator

from book.cost.answer import Plan

# Names of torchtitan's own configurations, by model.
TORCHTITAN = {"llama3-8b": ("llama3", "8B"), "llama3-70b": ("llama3", "70B"), "llama3-405b": ("llama3", "405B"),
              "qwen3-8b": ("qwen3", "8B"), "deepseek-v3": ("deepseek_v3", "671B")}


def torchtitan_toml(plan: Plan) -> str:
    """The plan as a file for torchtitan 0.2, which reads TOML.

    ZeRO-3 is FSDP there, ZeRO-2 FSDP that keeps what it gathered, ZeRO-0 replicas. Raises ValueError for a model that
    torchtitan has not, and for ZeRO-1, which it has not either.
    """
    layout, model = plan.layout, plan.model
    if plan.model_name not in TORCHTITAN:
        raise ValueError(f"torchtitan has no {plan.model_name}: it has {', '.join(TORCHTITAN)}")
    if layout.zero_stage == 1:
        raise ValueError(f"torchtitan has no ZeRO-1, which {layout} needs: ask for another layout, or for megatron")
    name, flavor = TORCHTITAN[plan.model_name]
    replicated = layout.zero_stage == 0
    local = plan.search.global_batch // layout.dp
    schedule = "Interleaved1F1B" if layout.stages_per_rank > 1 else "1F1B"
    sections: dict[str, dict[str, object]] = {
        "model": {"name": name, "flavor": flavor},
        "training": {"local_batch_size": local if layout.pp > 1 else layout.micro_batch_size,
                     "global_batch_size": plan.search.global_batch, "seq_len": model.num_tokens},
        "parallelism": {
            "data_parallel_replicate_degree": layout.dp if replicated else 1,
            "data_parallel_shard_degree": 1 if replicated else layout.dp,
            "fsdp_reshard_after_forward": "never" if layout.zero_stage == 2 else "always",
            "tensor_parallel_degree": layout.tp, "context_parallel_degree": layout.cp,
            "expert_parallel_degree": layout.ep, "pipeline_parallel_degree": layout.pp,
            "pipeline_parallel_schedule": schedule, "pipeline_parallel_microbatch_size": layout.micro_batch_size,
            "pipeline_parallel_layers_per_stage": model.num_layers // layout.pp // layout.stages_per_rank},
        "activation_checkpoint": {"mode": layout.recompute or "none"},
    }
    if layout.pp == 1:
        for key in ("schedule", "microbatch_size", "layers_per_stage"):
            del sections["parallelism"][f"pipeline_parallel_{key}"]
    return "\n\n".join("\n".join([f"[{section}]", *(f"{key} = {_toml(value)}" for key, value in values.items())])
                       for section, values in sections.items())


def _toml(value: object) -> str:
    return f'"{value}"' if isinstance(value, str) else str(value)


def megatron_options(plan: Plan) -> str:
    """The plan as options of Megatron-LM's pretrain_gpt.py: the model's sizes, the layout, recomputation."""
    return " \\\n".join(_megatron(plan))


def _megatron(plan: Plan) -> Iterator[str]:
    layout, model = plan.layout, plan.model
    yield f"--num-layers {model.num_layers} --hidden-size {model.width} --num-attention-heads {model.num_heads}"
    yield f"--ffn-hidden-size {model.mlp_size} --kv-channels {model.head_size}"
    if model.kv_heads != model.num_heads:
        yield f"--group-query-attention --num-query-groups {model.kv_heads}"
    yield f"--seq-length {model.num_tokens} --max-position-embeddings {model.num_tokens}"
    if model.gated:
        yield "--swiglu"
    if model.norm == "rms":
        yield "--normalization RMSNorm"
    if model.biases != "all":
        yield "--disable-bias-linear" + " --add-qkv-bias" * (model.biases == "qkv")
    if model.qk_norm:
        yield "--qk-layernorm"
    if not model.learned_positions:
        yield "--position-embedding-type rope"
    if not model.tied:
        yield "--untie-embeddings-and-output-weights"
    if model.attention == "flash":
        yield "--attention-backend flash"
    if model.experts:
        yield f"--num-experts {model.experts.num} --moe-router-topk {model.experts.per_token}"
        yield f"--moe-ffn-hidden-size {model.experts.width} --expert-model-parallel-size {layout.ep}"
    yield f"--tensor-model-parallel-size {layout.tp} --pipeline-model-parallel-size {layout.pp}"
    yield f"--context-parallel-size {layout.cp}" + " --sequence-parallel" * layout.sequence_parallel
    if layout.stages_per_rank > 1:
        yield f"--num-virtual-stages-per-pipeline-rank {layout.stages_per_rank}"
    yield f"--micro-batch-size {layout.micro_batch_size} --global-batch-size {plan.search.global_batch} --bf16"
    yield from _sharding(layout.zero_stage)
    if layout.recompute == "full":
        yield "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
    elif layout.recompute == "selective":
        yield "--recompute-granularity selective"


def _sharding(zero_stage: int) -> Iterator[str]:
    if zero_stage == 1:
        yield "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"
    elif zero_stage:
        strategy = "optim_grads" if zero_stage == 2 else "optim_grads_params"
        yield f"--use-megatron-fsdp --data-parallel-sharding-strategy {strategy} --use-distributed-optimizer"


CONFIGS = {"torchtitan": torchtitan_toml, "megatron": megatron_options}
