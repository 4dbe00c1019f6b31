"""Plans as configurations, read by the released packages; a configuration read, and run small against its bytes."""
from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from book.cost import Layout, estimate, plan
from book.cost.__main__ import main
from book.cost.configs import TORCHTITAN, megatron_options, read_torchtitan, shrunk, torchtitan_toml
from tests.once import folder, once
from tests.test_cost_traffic import check

# What reads the configurations, without what these packages need besides torch: it is not asked to train.
RELEASED = ("torchtitan==0.2.2", "megatron-core==0.16.1", "tyro==1.0.17", "docstring-parser", "typeguard", "shtab",
            "rich", "typing-extensions")
READ = """
import json, sys, types
from dataclasses import asdict, fields

packages, jobs = sys.argv[1], json.load(sys.stdin)
sys.path.insert(0, packages)
sys.modules["torchtitan"] = bare = types.ModuleType("torchtitan")  # its own __init__ loads all that it trains with
bare.__path__ = [f"{packages}/torchtitan"]
import torch
from torchtitan.config import ConfigManager
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer.transformer_config import TransformerConfig

kinds = TransformerConfig, DistributedDataParallelConfig, OptimizerConfig
read = []
for path in jobs["files"]:
    read.append(asdict(ConfigManager().parse_args([f"--job.config_file={path}"])))
made = []
for values in jobs["options"]:
    known = {f.name for kind in kinds for f in fields(kind)}
    own = {name: value for name, value in values.items() if name in {f.name for f in fields(TransformerConfig)}}
    ready = TransformerConfig(**own, pipeline_dtype=torch.bfloat16)  # as the script has it from --bf16
    made.append({"unknown": sorted(values.keys() - known), "made": bool(ready)})
print(json.dumps({"read": read, "made": made}, default=str))
"""
# Megatron-LM's options that set a field of another name in its core, or one of its training script.
CALLED = {"num_experts": "num_moe_experts", "swiglu": "gated_linear_unit",
          "num_virtual_stages_per_pipeline_rank": "virtual_pipeline_model_parallel_size",
          "disable_bias_linear": "add_bias_linear"}
OF_THE_SCRIPT = {"group_query_attention", "seq_length", "max_position_embeddings", "position_embedding_type",
                 "untie_embeddings_and_output_weights", "micro_batch_size", "global_batch_size", "attention_backend",
                 "use_megatron_fsdp"}


def installed() -> str:
    """A folder with the released packages, installed once in a run; skips where there is no registry."""
    return once("released", _installed)


def _installed() -> str:
    target = folder() / "released-packages"
    run = subprocess.run([sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", target, *RELEASED],
                         capture_output=True, text=True, timeout=300, check=False)
    if run.returncode:
        pytest.skip(f"the released packages can't be installed: {run.stderr.strip().splitlines()[-1]}")
    return str(target)


def option_values(text: str) -> dict[str, Any]:
    """Options of Megatron-LM as fields of its core: numbers as numbers, and true where no value follows."""
    words = text.replace("\\\n", " ").split()
    found: dict[str, Any] = {}
    for word, after in zip(words, [*words[1:], "--"]):
        if word.startswith("--"):
            name = word[2:].replace("-", "_")
            value: Any = True if after.startswith("--") else int(after) if after.isdigit() else after
            found[CALLED.get(name, name)] = not value if name == "disable_bias_linear" else value
    return {name: value for name, value in found.items() if name not in OF_THE_SCRIPT}


@pytest.mark.full
def test_the_released_packages_read_the_plans(tmp_path: Path) -> None:
    """torchtitan's reader gets the degrees of each; Megatron's core makes its configuration of all options but 9."""
    packages = installed()
    plans = [plan("llama3-70b", 64, zero_stages=(0, 2, 3)), plan("llama3-8b", 32, zero_stages=(3,)),
             plan("qwen3-8b", 16, zero_stages=(0,))]
    for number, found in enumerate(plans):
        (tmp_path / f"{number}.toml").write_text(torchtitan_toml(found))
    megatron = [plan("llama3-70b", 64), plan("mixtral-8x7b", 64), plan("llama3-8b", 64, zero_stages=(3,)),
                plan("gpt3", 512, "a100")]
    jobs = {"files": [str(tmp_path / f"{number}.toml") for number in range(len(plans))],
            "options": [option_values(megatron_options(found)) for found in megatron]}
    assert len(jobs["options"][0]) > 12
    jobs["options"].append({"num_layers": 2, "hidden_size": 8, "num_attention_heads": 2, "no_such_option": 1})
    run = subprocess.run([sys.executable, "-W", "ignore", "-c", READ, packages], input=json.dumps(jobs), text=True,
                         capture_output=True, timeout=300, check=False)
    assert run.returncode == 0, run.stderr
    said = json.loads(run.stdout.splitlines()[-1])
    for found, read in zip(plans, said["read"], strict=True):
        degrees, layout = read["parallelism"], found.layout
        assert (degrees["pipeline_parallel_degree"], degrees["tensor_parallel_degree"]) == (layout.pp, layout.tp)
        assert degrees["data_parallel_replicate_degree"] * degrees["data_parallel_shard_degree"] == layout.dp
        assert read["training"]["global_batch_size"] == found.search.global_batch
    *made, wrong = said["made"]
    assert [one["unknown"] for one in made] == [[]] * len(megatron) and wrong["unknown"] == ["no_such_option"]


@pytest.mark.parametrize("name, gpus, stages", [("llama3-70b", 64, (0, 2, 3)), ("llama3-8b", 32, (3,)),
                                                ("qwen3-8b", 16, (0,)), ("llama3-405b", 1024, (3,))])
def test_a_plan_is_read_back_as_it_was(name: str, gpus: int, stages: tuple[int, ...]) -> None:
    found = plan(name, gpus, zero_stages=stages)
    read = read_torchtitan(torchtitan_toml(found))
    assert (read.model_name, read.layout) == (name, found.layout)
    assert (read.num_tokens, read.global_batch) == (found.model.num_tokens, found.search.global_batch)


def test_what_a_file_leaves_out_is_torchtitans_own() -> None:
    text = '[model]\nname = "llama3"\nflavor = "8B"\n[training]\nlocal_batch_size = 2\nseq_len = 4096\n'
    read = read_torchtitan(text, 8)
    assert read.layout == Layout(1, 8, 1, 2, zero_stage=3, recompute="selective")
    assert (read.global_batch, read.num_tokens) == (16, 4096)
    tp = read_torchtitan(f"{text}[parallelism]\ntensor_parallel_degree = 2\npipeline_parallel_degree = 2", 8).layout
    assert (tp.pp, tp.dp, tp.tp, tp.zero_stage, tp.sequence_parallel) == (2, 2, 2, 2, 1)


@pytest.mark.parametrize("text, words", [
    ("[model", "this is not TOML"),
    ('[model]\nname = "llama3"\nflavor = "7B"', "no model here is torchtitan's llama3 7B"),
    ('[model]\nname = "llama3"\nflavor = "8B"', "must divide the number of GPUs: give it"),
    ('[model]\nname = "llama3"\nflavor = "8B"\n[parallelism]\ndata_parallel_replicate_degree = 2\n'
     "data_parallel_shard_degree = 2", r"replicas of shards \(2 of 2\) are not known here")])
def test_a_file_that_says_too_little_or_too_much_is_refused(text: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        read_torchtitan(text)


def test_a_shell_reads_a_file(tmp_path: Path, capsys: Any) -> None:
    found = plan("llama3-70b", 64, zero_stages=(0, 2, 3))
    path = tmp_path / "run.toml"
    path.write_text(torchtitan_toml(found))
    assert main(["read", str(path)]) == 0
    told = capsys.readouterr().out
    cost = estimate(found.model, found.search.cluster, found.layout, found.search.global_batch)
    for axis in ("tp", "pp", "dp"):
        assert f"a GPU sends {getattr(cost, f'{axis}_bytes') / 1e9:.2f} GB along {axis} in a step\n" in told
    assert main(["read", str(tmp_path / "none.toml")]) == 2 and "error: " in capsys.readouterr().err


@pytest.mark.slow
def test_a_file_run_small_sends_what_is_predicted_along_each_axis() -> None:
    """The layout that a file for 64 GPUs says, halved to 8 ranks, on the book's GPT: recorded bytes, not estimates."""
    read = read_torchtitan(torchtitan_toml(plan("llama3-70b", 64, zero_stages=(0, 2, 3))))
    small = shrunk(read.layout)
    assert small.num_gpus == 8 and small.zero_stage == read.layout.zero_stage
    assert [getattr(small, axis) > 1 for axis in ("pp", "dp", "tp")] == [
        getattr(read.layout, axis) > 1 for axis in ("pp", "dp", "tp")]
    check((small.pp, small.dp, small.tp), small.zero_stage)
    with pytest.raises(ValueError, match="can't be halved"):
        shrunk(Layout(1, 27, 1))


def test_all_models_that_torchtitan_has_are_here() -> None:
    assert all(plan(name, 256, zero_stages=(3,)).layout.zero_stage == 3 for name in TORCHTITAN if "405" not in name)
