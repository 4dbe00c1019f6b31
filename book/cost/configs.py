"""L1: a layout as a configuration for torchtitan or Megatron-LM, and a torchtitan file read back.

A test reads these files with torchtitan 0.2.2's own reader; 0.3 no longer reads TOML. Megatron-LM's options are those
that its arguments.py and the configurations of its core declare; its package on PyPI has no training script, so the
test gives them to the core's configurations.
"""
from __future__ import annotations

import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from book.cost.answer import Plan
from book.cost.layouts import Layout
from book.cost.machines import cluster_of
from book.cost.models import model_named
from book.cost.step import Estimate, estimate

# Names of torchtitan's own configurations, by model.
TORCHTITAN = {"llama3-8b": ("llama3", "8B"), "llama3-70b": ("llama3", "70B"), "llama3-405b": ("llama3", "405B"),
              "qwen3-8b": ("qwen3", "8B"), "deepseek-v3": ("deepseek_v3", "671B")}
# How many layers fewer the first and the last stage have.
LESS = ("pipeline_parallel_first_stage_less_layers", "pipeline_parallel_last_stage_less_layers")


def torchtitan_toml(plan: Plan) -> str:
    """The plan as a file for torchtitan 0.2, which reads TOML.

    ZeRO-3 is FSDP there, ZeRO-2 is FSDP without resharding after forward, ZeRO-0 is replicas. Raises ValueError for a
    model that torchtitan does not have, and for ZeRO-1, which it does not have either.
    """
    layout, model = plan.layout, plan.model
    if plan.model_name not in TORCHTITAN:
        raise ValueError(f"torchtitan has no {plan.model_name}: it has {', '.join(TORCHTITAN)}")
    if layout.zero_stage == 1:
        raise ValueError(f"torchtitan has no ZeRO-1, which {layout} needs: ask for another layout, or for megatron")
    name, flavor = TORCHTITAN[plan.model_name]
    replicated = layout.zero_stage == 0
    local = plan.search.global_batch // layout.dp
    spare = _spare(model.num_layers, layout)
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
            "pipeline_parallel_layers_per_stage": -(-model.num_layers // (layout.pp * layout.stages_per_rank)),
            **dict(zip(LESS, (int(spare > 1), int(spare > 0))))},
        "activation_checkpoint": {"mode": layout.recompute or "none"},
    }
    if layout.recompute == "half":
        sections["activation_checkpoint"] = {"mode": "selective", "selective_ac_option": "2"}
    if layout.pp == 1:
        for key in ("schedule", "microbatch_size", "layers_per_stage", "first_stage_less_layers",
                    "last_stage_less_layers"):
            del sections["parallelism"][f"pipeline_parallel_{key}"]
    return "\n\n".join("\n".join([f"[{section}]", *(f"{key} = {_toml(value)}" for key, value in values.items())])
                       for section, values in sections.items())


def _spare(num_layers: int, layout: Layout) -> int:
    """How many layers are missing from equal stages: at the head, then at the embedding."""
    return -num_layers % (layout.pp * layout.stages_per_rank)


def _toml(value: object) -> str:
    return f'"{value}"' if isinstance(value, str) else str(value)


@dataclass(frozen=True)
class Configured:
    """What a configuration says about a run: model, layout, tokens in a sequence, sequences in a step."""

    model_name: str
    layout: Layout
    num_tokens: int
    global_batch: int

    def estimate(self, gpu: str = "H100") -> Estimate:
        """Bytes and seconds on GPUs of this name, with torchtitan's constants."""
        model = replace(model_named(self.model_name), num_tokens=self.num_tokens)
        return estimate(model, cluster_of(gpu, self.layout.num_gpus, "torchtitan"), self.layout, self.global_batch)

    def __str__(self) -> str:
        """The run, and the bytes that a GPU sends along each axis in a step."""
        cost = self.estimate()
        sent = {axis: getattr(cost, f"{axis}_bytes") for axis in ("tp", "cp", "ep", "pp", "dp")}
        lines = [f"{self.model_name} on {self.layout.num_gpus:,} GPUs, {self.global_batch:,} sequences of "
                 f"{self.num_tokens:,} tokens a step: {self.layout}"]
        return "\n".join(lines + [f"a GPU sends {num_bytes / 1e9:.2f} GB along {axis} in a step"
                                  for axis, num_bytes in sent.items() if num_bytes])


def read_torchtitan(text: str, num_gpus: int = 0) -> Configured:
    """What a file for torchtitan 0.2 says; without `num_gpus` its shard degree must be a number.

    Missing entries have torchtitan's defaults. Raises ValueError for invalid TOML, for unknown models and parallelisms,
    and for a number of GPUs that its degrees do not divide.
    """
    try:
        found = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"this is not TOML: {error}") from None
    said = found.get("model", {})
    names = [name for name, known in TORCHTITAN.items() if known == (said.get("name"), said.get("flavor"))]
    if not names:
        raise ValueError(f"no model here is torchtitan's {said.get('name')} {said.get('flavor')}: there are "
                         f"{', '.join(map(' '.join, TORCHTITAN.values()))}")
    training, again = found.get("training", {}), found.get("activation_checkpoint", {})
    mode = again.get("mode", "selective")
    mode = "half" if mode == "selective" and again.get("selective_ac_option") == "2" else mode
    local = training.get("local_batch_size", 8)
    layout = _layout(found.get("parallelism", {}), local, model_named(names[0]).num_layers, num_gpus)
    layout = replace(layout, recompute=None if mode == "none" else mode)
    batch = training.get("global_batch_size", -1)
    return Configured(names[0], layout, training.get("seq_len", 2048), batch if batch > 0 else local * layout.dp)


def _layout(said: dict[str, Any], local: int, num_layers: int, num_gpus: int) -> Layout:
    """The layout of torchtitan's section "parallelism"."""
    degree = {name: said.get(f"{name}_degree", 1) for name in (
        "data_parallel_replicate", "tensor_parallel", "context_parallel", "pipeline_parallel", "expert_parallel")}
    copies, tp, cp, pp, ep = degree.values()
    shards = said.get("data_parallel_shard_degree", -1)
    if shards < 0:
        shards, rest = divmod(num_gpus, copies * tp * cp * pp)
        if not shards or rest:
            raise ValueError(f"the degrees make {copies * tp * cp * pp}, which must divide the number of GPUs: "
                             f"{num_gpus or 'give it (--gpus)'}")
    if copies > 1 and shards > 1:
        raise ValueError(f"replicas of shards ({copies} of {shards}) are not known here")
    kept = said.get("fsdp_reshard_after_forward", "default")
    whole = kept == "never" or (kept == "default" and pp > 1)
    long = said.get("pipeline_parallel_layers_per_stage", 0)
    stages = max(1, (num_layers + sum(said.get(key, 1) for key in LESS)) // long // pp) if long else 1
    return Layout(pp, copies * shards, tp, said.get("pipeline_parallel_microbatch_size", 1) if pp > 1 else local,
                  stages if pp > 1 else 1, (2 if whole else 3) if shards * cp > 1 and copies == 1 else 0, int(tp > 1),
                  None, cp, ep)


def shrunk(layout: Layout, num_ranks: int = 8) -> Layout:
    """The layout on few ranks: its longest axis halved until it fits, axes of one rank left alone.

    Raises ValueError where halving does not lead there.
    """
    while layout.num_gpus > num_ranks:
        axis = max(("pp", "dp", "tp", "cp"), key=lambda name: getattr(layout, name))
        if getattr(layout, axis) % 2 or getattr(layout, axis) == 2:
            raise ValueError(f"{layout} can't be halved to {num_ranks} ranks")
        layout = replace(layout, ep=1, **{axis: getattr(layout, axis) // 2})
    return layout


def megatron_options(plan: Plan) -> str:
    """The plan as options of Megatron-LM's pretrain_gpt.py: the model's sizes, the layout, recomputation."""
    return " \\\n".join(_megatron(plan))


def _megatron(plan: Plan) -> Iterator[str]:
    layout, model = plan.layout, plan.model
    if model.qk_norm == "whole" or model.num_norms != 2 or model.sinks or model.window:
        raise ValueError(f"no options are known here for the norms, windows or sinks of {plan.model_name}")
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
    spare = _spare(model.num_layers, layout)
    if spare:
        yield "--account-for-embedding-in-pipeline-split " * (spare > 1) + "--account-for-loss-in-pipeline-split"
    if layout.recompute == "half":
        stage = -(-model.num_layers // (layout.pp * layout.stages_per_rank))
        yield f"--recompute-granularity full --recompute-method block --recompute-num-layers {max(1, stage // 2)}"
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
