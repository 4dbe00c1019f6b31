"""L1: a layout as a configuration for torchtitan or Megatron-LM, and a file of torchtitan's read back.

torchtitan 0.3 is configured in Python, 0.2 was in TOML: the first is written, both are read. A test has torchtitan
0.3.0's own manager take what is written. Megatron-LM's options are those that its arguments.py and the configurations
of its core declare; its package on PyPI has no training script, so the test gives them to the core's configurations.
"""
from __future__ import annotations

import ast
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

from book.columns import Columns
from book.cost.answer import LayoutAnswer, Plan
from book.cost.layouts import Layout, known, stage_layers
from book.cost.machines import cluster_of
from book.cost.models import model_named
from book.cost.step import Estimate, estimate
from book.cost.transformer import Transformer

# Names of torchtitan's own models, and the configuration that ours starts from.
TORCHTITAN = {"llama3-8b": ("llama3", "8B", "llama3_8b"), "llama3-70b": ("llama3", "70B", "llama3_70b"),
              "llama3-405b": ("llama3", "405B", "llama3_405b"), "qwen3-8b": ("qwen3", "8B", "qwen3_14b"),
              "deepseek-v3": ("deepseek_v3", "671B", "deepseek_v3_671b")}
ASSETS = {"qwen3-8b": "Qwen3-8B"}  # where the configuration that it starts from has another model's tokenizer
# How many layers fewer the first and the last stage have.
LESS = ("pipeline_parallel_first_stage_less_layers", "pipeline_parallel_last_stage_less_layers")
FLOAT8 = """, converters=[
            Float8LinearConverter.Config(filter_fqns=["lm_head"], model_compile_enabled=True)]"""
CHECKPOINTS = {"full": "FullAC", "half": "SelectiveAC"}  # SelectiveAC recomputes every second product
FILE = '''# For torchtitan 0.3: save as planned.py, and start on each node
#   torchrun ... -m torchtitan.train --module planned --config planned
from dataclasses import replace

{imports}
from torchtitan.models.{name} import model_registry
from torchtitan.models.{name}.config_registry import {base}


def planned():
    """{words}."""
    return replace(
        {base}(),
{values})
'''


def torchtitan_config(plan: Plan | LayoutAnswer) -> str:
    """The layout as a module for torchtitan 0.3, which reads Python: a function that its `--config` names.

    ZeRO-3 is FSDP there, ZeRO-2 is FSDP without resharding after forward, which in a pipeline, where gradients are
    shared out once in a step, is ZeRO-1; ZeRO-0 is replicas. Raises ValueError for a model and a layout that torchtitan
    does not have.
    """
    layout, model = plan.layout, plan.model
    if plan.model_name not in TORCHTITAN:
        raise ValueError(f"torchtitan has no {plan.model_name}: it has {', '.join(TORCHTITAN)}")
    if not known(Columns.from_rows(Layout, [layout]), "torchtitan")[0]:
        raise ValueError(f"torchtitan has no ZeRO-{layout.zero_stage} like {layout}: plan with software torchtitan, or "
                         "print options for megatron")
    name, flavor, base = TORCHTITAN[plan.model_name]
    fast = plan.cluster.overheads.linear_speedup > 1
    if fast and model.experts:
        raise ValueError("torchtitan's float8 for experts is not written here: plan in bf16")
    registry = f'"{flavor}"' + FLOAT8 * fast
    values = {"model_spec": f"model_registry({registry})", "training": _call("TrainingConfig", _training(plan)),
              "parallelism": _call("ParallelismConfig", _parallelism(layout, model.num_layers)),
              "activation_checkpoint": f"{CHECKPOINTS[layout.recompute]}.Config()" if layout.recompute else "None"}
    if not model.experts:
        values["compile"] = "CompileConfig(enable=True)"  # as the steps that its constants were fitted to
    if plan.model_name in ASSETS:
        values["hf_assets_path"] = f'"./assets/hf/{ASSETS[plan.model_name]}"'
    imports = {"components.quantization": "Float8LinearConverter" * fast,
               "config": "CompileConfig, " * (not model.experts) + "ParallelismConfig, TrainingConfig",
               "distributed.activation_checkpoint": CHECKPOINTS.get(str(layout.recompute))}
    return FILE.format(
        name=name, base=base, words=f"{plan.model_name} on {layout.num_gpus} GPUs: {layout}",
        imports="\n".join(f"from torchtitan.{module} import {what}" for module, what in imports.items() if what),
        values=",\n".join(f"        {key}={value}" for key, value in values.items()))


def _training(plan: Plan | LayoutAnswer) -> dict[str, object]:
    layout, batch = plan.layout, plan.global_batch
    graphs = {"disable_cuda_graphs": True} if layout.pp > 1 or layout.ep > 1 else {}  # 0.3 has none for these
    return {"local_batch_size": batch // layout.dp if layout.pp > 1 else layout.micro_batch_size,
            "global_batch_size": batch, "seq_len": plan.model.num_tokens, **graphs}


def _parallelism(layout: Layout, num_layers: int) -> dict[str, object]:
    replicated = layout.zero_stage == 0
    found: dict[str, object] = {
        "data_parallel_replicate_degree": layout.dp if replicated else layout.replicas,
        "data_parallel_shard_degree": 1 if replicated else layout.dp // layout.replicas,
        "fsdp_reshard_after_forward": "always" if layout.zero_stage == 3 else "never",
        "tensor_parallel_degree": layout.tp, "enable_sequence_parallel": bool(layout.sequence_parallel),
        "context_parallel_degree": layout.cp, "expert_parallel_degree": layout.ep}
    if layout.pp > 1:
        layers = stage_layers(num_layers, layout.pp * layout.stages_per_rank)
        found |= {"pipeline_parallel_degree": layout.pp,
                  "pipeline_parallel_schedule": "Interleaved1F1B" if layout.stages_per_rank > 1 else "1F1B",
                  "pipeline_parallel_microbatch_size": layout.micro_batch_size,
                  "pipeline_parallel_layers_per_stage": max(layers),
                  **{name: max(layers) - layers[stage] for name, stage in zip(LESS, (0, -1))}}
    return found


def _call(name: str, values: dict[str, object]) -> str:
    inside = ",\n".join(f"            {key}={value!r}" for key, value in values.items())
    return f"{name}(\n{inside})".replace("'", '"')


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
    """What a file for torchtitan says: 0.3's in Python, or 0.2's in TOML.

    Without `num_gpus` its shard degree must be a number. Missing entries have torchtitan's defaults. Raises ValueError
    for a file that is neither or has several configurations, for unknown models and parallelisms, and for a number of
    GPUs that its degrees do not divide.
    """
    try:
        return _configured(_sections(text), num_gpus)
    except (TypeError, AttributeError) as error:  # a text for a number, a number for a section
        raise ValueError(f"a value in this file is of another kind than torchtitan's: {error}") from None


def _configured(found: dict[str, dict[str, Any]], num_gpus: int) -> Configured:
    said = found.get("model", {})
    names = [name for name, known in TORCHTITAN.items() if known[:2] == (said.get("name"), said.get("flavor"))]
    if not names:
        raise ValueError(f"no model here is torchtitan's {said.get('name')} {said.get('flavor')}: there are "
                         f"{', '.join(' '.join(known[:2]) for known in TORCHTITAN.values())}")
    training, mode = found.get("training", {}), found.get("activation_checkpoint", {}).get("mode", "selective")
    local = training.get("local_batch_size", 8)
    layout = _layout(found.get("parallelism", {}), local, model_named(names[0]).num_layers, num_gpus)
    # its "selective" recomputes every second product, or in 0.2 every second layer
    layout = replace(layout, recompute={"none": None, "selective": "half"}.get(mode, mode))
    batch = training.get("global_batch_size", -1)
    return Configured(names[0], layout, training.get("seq_len", 2048), batch if batch > 0 else local * layout.dp)


def _sections(text: str) -> dict[str, dict[str, Any]]:
    """The sections of a file in TOML, or the same out of a file in Python, which is read but not run."""
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as not_toml:
        try:
            tree = ast.parse(text)
        except SyntaxError as error:
            raise ValueError(f"this is neither Python ({error}) nor TOML ({not_toml})") from None
    found: dict[str, dict[str, Any]] = {"model": {}}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torchtitan.models."):
            found["model"]["name"] = str(node.module).split(".")[2]
        elif isinstance(node, ast.Call):
            _take(node, found)
    if not {"training", "parallelism"} <= found.keys():
        raise ValueError("a configuration in Python has a TrainingConfig(...) and a ParallelismConfig(...)")
    return found


def _take(node: ast.Call, found: dict[str, dict[str, Any]]) -> None:
    """Enter what a call says."""
    name, said = ast.unparse(node.func), {word.arg: word.value for word in node.keywords if word.arg}
    section = {"TrainingConfig": "training", "ParallelismConfig": "parallelism"}.get(name)
    if section in found:
        raise ValueError(f"there are several {name}(...): keep one configuration in the file")
    if section:
        found[section] = {key: _literal(value) for key, value in said.items()}
    if name == "model_registry" and node.args:
        found["model"]["flavor"] = _literal(node.args[0])
    if "activation_checkpoint" in said:
        kind = ast.unparse(said["activation_checkpoint"])
        modes = {"None": "none"} | {f"{known}.Config()": mode for mode, known in CHECKPOINTS.items()}
        if kind not in modes:
            raise ValueError(f"activation_checkpoint={kind} is not known here: {', '.join(modes)} are")
        found["activation_checkpoint"] = {"mode": modes[kind]}


def _literal(node: ast.expr) -> Any:
    try:
        return ast.literal_eval(node)
    except (SyntaxError, TypeError, ValueError):
        raise ValueError(f"{ast.unparse(node)} stands for a value that only running the file could tell") from None


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
    kept = said.get("fsdp_reshard_after_forward", "default")
    whole = kept == "never" or (kept == "default" and pp > 1)
    stage = 0 if shards * cp == 1 else (1 if pp > 1 else 2) if whole else 3
    if copies > 1 and stage == 1:
        raise ValueError(f"replicas of shards ({copies} of {shards}) are not known in a pipeline here")
    long = said.get("pipeline_parallel_layers_per_stage") or 0
    stages = max(1, -(-(num_layers + sum(said.get(key, 1) for key in LESS)) // long) // pp) if long else 1
    return Layout(pp, copies * shards, tp, said.get("pipeline_parallel_microbatch_size", 1) if pp > 1 else local,
                  stages if pp > 1 else 1, stage, int(tp > 1 and said.get("enable_sequence_parallel", True)), None,
                  cp, ep, copies if stage else 1)


def megatron_options(plan: Plan | LayoutAnswer) -> str:
    """The layout as options of Megatron-LM's pretrain_gpt.py: the model's sizes, the layout, recomputation."""
    return " \\\n".join(_megatron(plan))


def _megatron_model(plan: Plan | LayoutAnswer) -> Iterator[str]:
    """The model's options."""
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
        yield "--expert-tensor-parallel-size 1 --moe-token-dispatcher-type alltoall --moe-grouped-gemm"
        yield from _deepseek(model)


def _megatron(plan: Plan | LayoutAnswer) -> Iterator[str]:
    layout, model = plan.layout, plan.model
    yield from _megatron_model(plan)
    yield f"--tensor-model-parallel-size {layout.tp} --pipeline-model-parallel-size {layout.pp}"
    yield f"--context-parallel-size {layout.cp}" + " --sequence-parallel" * layout.sequence_parallel
    layers = stage_layers(model.num_layers, layout.pp * layout.stages_per_rank)
    yield from _stages(layers, layout.stages_per_rank)
    yield f"--micro-batch-size {layout.micro_batch_size} --global-batch-size {plan.global_batch} --bf16" + (
        " --fp8-format hybrid" * (plan.cluster.overheads.linear_speedup > 1))
    yield from _sharding(layout)
    if layout.recompute == "half":
        again = max(1, max(layers) // 2)
        yield f"--recompute-granularity full --recompute-method block --recompute-num-layers {again}"
    if layout.recompute == "full":
        yield "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
    elif layout.recompute == "selective":
        yield "--recompute-granularity selective"


def _stages(layers: Sequence[int], stages_per_rank: int) -> Iterator[str]:
    """Stages of so many layers; more than two shorter ones are spelled: E is the embedding, t a layer, L the head."""
    missing = len(layers) * max(layers) - sum(layers)
    if missing > 2:
        middle = "".join(f"(t*{num}|)*{len(list(same))}" for num, same in groupby(layers[1:-1]))
        yield f"--pipeline-model-parallel-layout 'Et*{layers[0]}|{middle}t*{layers[-1]}L'"
        return
    if stages_per_rank > 1:
        yield f"--num-virtual-stages-per-pipeline-rank {stages_per_rank}"
    if missing:
        yield "--account-for-embedding-in-pipeline-split " * (missing > 1) + "--account-for-loss-in-pipeline-split"


def _deepseek(model: Transformer) -> Iterator[str]:
    """Shared experts, dense layers before the experts, latent attention."""
    experts, latent = model.experts, model.latent
    if experts and experts.num_shared:
        yield f"--moe-shared-expert-intermediate-size {experts.num_shared * experts.width}"
    if experts and experts.num_dense_layers:
        yield f"--moe-layer-freq '([0]*{experts.num_dense_layers}+[1]*{model.num_expert_layers})'"
    if latent:
        yield f"--multi-latent-attention --q-lora-rank {latent.query_rank} --kv-lora-rank {latent.value_rank}"
        yield f"--qk-head-dim {model.head_size} --v-head-dim {model.head_size}"
        yield f"--qk-pos-emb-head-dim {latent.rope_width}"


def _sharding(layout: Layout) -> Iterator[str]:
    zero_stage = layout.zero_stage
    if layout.replicas > 1:
        yield f"--num-distributed-optimizer-instances {layout.replicas}"
    if zero_stage == 1:
        yield "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"
    elif zero_stage:
        strategy = "optim_grads" if zero_stage == 2 else "optim_grads_params"
        yield f"--use-megatron-fsdp --data-parallel-sharding-strategy {strategy} --use-distributed-optimizer"


CONFIGS = {"torchtitan": torchtitan_config, "megatron": megatron_options}
