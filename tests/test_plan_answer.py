"""One question, one answer: in Python and in a shell; with a measured step; as what frameworks read."""
from __future__ import annotations

import tomllib

import pytest

from book.cost import Layout, MeasuredStep, cluster_of, plan
from book.cost.__main__ import main
from book.cost.answer import default_batch, error_bar
from book.cost.configs import megatron_options, torchtitan_toml
from book.cost.models import MODELS

QUESTION = {"model": "llama3-70b", "gpus": 64, "gpu": "H100", "tokens": 2e12, "price": 2.5}
IN_A_SHELL = ["plan", "llama3-70b", "--gpus", "64", "--gpu", "H100", "--tokens", "2e12", "--price", "2.5"]


@pytest.fixture(scope="module")
def answer():
    return plan(**QUESTION)


def test_the_answer_says_all_that_was_asked(answer):
    assert answer.layout.num_gpus == 64 and answer.cost.memory_bytes <= answer.search.cluster.usable_bytes
    assert answer.low_s < answer.high_s < answer.worst_s and 0.2 < answer.cost.mfu < 0.6
    hours = 2e12 / (512 * 8192) * answer.cost.step_s * 64 / 3600
    assert answer.gpu_hours == pytest.approx(hours) and answer.dollars == pytest.approx(2.5 * hours)
    assert len(answer.next_best) == 3 and all(more >= 0 for _, more in answer.next_best)
    assert sum(share for _, share in answer.binds) == pytest.approx(1, abs=0.03)
    assert answer.halved.estimates[answer.halved.best].step_s >= answer.cost.step_s
    text = str(answer)
    for words in ("layout", "step ", "memory", "binds", "days", "dollars", "half the network", "half of such steps"):
        assert words in text


def test_a_shell_gets_the_same(answer, capsys):
    assert main(IN_A_SHELL) == 0
    assert capsys.readouterr().out == f"{answer}\n"


@pytest.mark.parametrize("change, words", [
    ({"model": "llama5"}, "no model is called 'llama5'"), ({"gpu": "H10"}, "no GPU is called 'H10'"),
    ({"gpus": 0}, "gpus must be a whole number above 0"), ({"gpus": 8.0}, "gpus must be a whole number"),
    ({"gpus": 8, "model": "llama3-405b"}, r"none of \d+ layouts fits: the smallest needs"),
    ({"tokens": -1}, "tokens must be a finite number"), ({"price": float("nan")}, "price must be a finite number"),
    ({"software": "jax"}, "no software is called 'jax'"), ({"precision": "fp4"}, "precision is bf16 or fp8"),
    ({"batch": -7}, "batch must be a finite number")])
def test_bad_questions_get_one_clear_sentence(change, words):
    with pytest.raises(ValueError, match=words) as caught:
        plan(**{**QUESTION, **change})
    assert "\n" not in str(caught.value)


def test_a_shell_says_the_sentence_and_fails(capsys):
    assert main(["plan", "llama3-70b", "--gpus", "64", "--gpu", "H10"]) == 2
    assert capsys.readouterr().err.startswith("error: no GPU is called 'H10'")
    assert main([*IN_A_SHELL, "--measured", "60,4"]) == 2
    assert "--measured is SECONDS,pp,dp,tp,MICRO,ZERO" in capsys.readouterr().err
    assert main(["models"]) == 0 and "llama3-70b" in capsys.readouterr().out


def test_a_measured_step_sets_the_scale_of_times_and_of_memory(answer):
    layout, cost = answer.layout, answer.cost
    slower = plan(**QUESTION, measured=MeasuredStep(layout, 1.5 * cost.step_s))
    assert slower.scale == pytest.approx(1.5) and slower.cost.step_s == pytest.approx(1.5 * cost.step_s)
    assert slower.lost == 0 and slower.low_s < slower.cost.step_s < slower.high_s
    larger = plan(**QUESTION, measured=MeasuredStep(layout, cost.step_s, 1.3 * cost.memory_bytes))
    assert larger.lost > 0 and larger.memory_scale == pytest.approx(1.3) and "rules out" in str(larger)
    assert 1.3 * larger.cost.memory_bytes <= answer.search.cluster.usable_bytes * 1.001
    with pytest.raises(ValueError, match="step_s must be above 0"):
        MeasuredStep(layout, 0)


def test_sharded_state_stays_out_of_pipelines_unless_it_is_asked_for(answer):
    ranked = answer.search.ranked
    stage, pp = (answer.search.layouts.array(name)[ranked] for name in ("zero_stage", "pp"))
    assert not ((stage >= 2) & (pp > 1)).any() and (answer.search.layouts.array("tp")[ranked] <= 8).all()
    assert plan(**QUESTION, zero_stages=(3,)).layout.zero_stage == 3


def test_a_model_and_a_cluster_of_your_own_are_taken():
    found = plan(MODELS["llama3-8b"], 8, cluster_of("a100", 8))
    assert found.layout.num_gpus == 8 and "8.0 billion parameters on 8 GPU" in str(found)


def test_a_machine_that_nobody_measured_is_reported_as_unmeasured():
    words = "no step of a {} is among them"
    assert words.format("B200") in str(plan("llama3-8b", 8, "B200"))
    for gpu in ("A100", "A100-40", "H100"):
        assert words.format(gpu) not in str(plan("qwen2.5-7b", 32, gpu))


def test_the_batch_is_about_four_million_tokens():
    for name, gpus, batch in (("llama3-70b", 64, 512), ("llama3-8b", 24, 768), ("llama3-8b", 4096, 512)):
        assert default_batch(MODELS[name], gpus) == batch


def test_the_error_bar_comes_from_rows_that_are_near():
    assert error_bar(MODELS["gpt3"], Layout(8, 8, 8, recompute="full"), "a100", "megatron")[1][0] in (
        "replicas", "recompute", "megatron", "megascale", "vtrain-multi")
    bar, names = error_bar(MODELS["llama3-8b"], Layout(1, 8, 1, zero_stage=3), "h100", "llm-foundry")
    assert "foundry-h100" in names and (bar[:-1] <= bar[1:]).all()


def test_torchtitan_reads_the_plan():
    found = plan("llama3-70b", 64, zero_stages=(0, 2, 3))
    sections = tomllib.loads(torchtitan_toml(found))
    degrees = sections["parallelism"]
    product = 1
    for name in ("data_parallel_replicate", "data_parallel_shard", "tensor_parallel", "context_parallel",
                 "pipeline_parallel"):
        product *= degrees[f"{name}_degree"]
    assert product == 64 and sections["training"]["seq_len"] == 8192
    assert sections["activation_checkpoint"]["mode"] in ("none", "selective", "full")
    with pytest.raises(ValueError, match="torchtitan has no ZeRO-1"):
        torchtitan_toml(plan("llama3-70b", 64, zero_stages=(1,)))
    with pytest.raises(ValueError, match="torchtitan has no gpt3"):
        torchtitan_toml(plan("gpt3", 512, "a100"))


def test_megatron_gets_its_options(answer, capsys):
    text = megatron_options(answer)
    words = text.replace("\\\n", " ").split()
    at = {name: words[i + 1] for i, name in enumerate(words[:-1]) if name.startswith("--")}
    layout = answer.layout
    assert (at["--tensor-model-parallel-size"], at["--pipeline-model-parallel-size"]) == (
        str(layout.tp), str(layout.pp))
    assert at["--num-query-groups"] == "8" and "--swiglu" in words and at["--global-batch-size"] == "512"
    assert main([*IN_A_SHELL, "--config", "megatron"]) == 0 and capsys.readouterr().out == f"{text}\n"
    assert "--data-parallel-sharding-strategy optim_grads_params" in megatron_options(
        plan("llama3-8b", 64, zero_stages=(3,)))
    assert "--expert-model-parallel-size" in megatron_options(plan("mixtral-8x7b", 64))
