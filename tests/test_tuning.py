"""Fine-tuning in the planner: counted on adapters and frozen layers in a real GPT, by hand, and asked as people ask."""
from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from book.cost import (ADAM_MIXED, MODELS, OPTIMIZERS, Cluster, Layout, Plan, StateBytes, Tuning,
                       cluster_of, estimate, plan, ring_sent_bytes)
from book.cost.__main__ import main
from book.cost.tuning import NF4_BYTES
from book.parallel import GPT, GPTConfig
from book.record.activations import saved_for_backward
from book.record.memory import held_state

SMALL = replace(MODELS["small-gpt"], attention="flash")
CONFIG = GPTConfig(65, dtype=torch.bfloat16)
LAYERS, WIDTH, TOKENS, SEQUENCES, RANK = 4, 48, 32, 3, 5
PLAIN = Cluster(1, 80e9, 1e15, 3e12, 4e11, 5e10, 0.5, 0)
ONE = Layout(1, 1, 1, micro_batch_size=SEQUENCES)
LORA = Tuning("lora", RANK, optimizer="adam-bf16")


# a real GPT whose adapters are trained, or whose last layers are
class Adapted(nn.Module):
    """A frozen linear map, and two narrow ones beside it."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.linear = linear
        self.down = nn.Linear(linear.in_features, RANK, bias=False, dtype=linear.weight.dtype)
        self.up = nn.Linear(RANK, linear.out_features, bias=False, dtype=linear.weight.dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) + 2.0 * self.up(self.down(x))


def adapted() -> GPT:
    model = GPT.seeded(CONFIG, 0).requires_grad_(False)
    for block in model.blocks:
        for inside in (block.attention, block.mlp):
            for name, child in list(inside.named_children()):
                setattr(inside, name, Adapted(child))
    return model


def without_first(num: int) -> GPT:
    model = GPT.seeded(CONFIG, 0)
    for frozen in (model.token_embedding, model.position_embedding, *model.blocks[:num]):
        frozen.requires_grad_(False)
    return model


def trained(model: GPT) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


def measured(model: GPT, through_embedding: bool = True) -> tuple[StateBytes, int, int]:
    """After a step: bytes of state, bytes that the forward kept, FLOPs of products other than attention's.

    Adapters get their gradients through all layers: libraries make the embedding's output require one.
    """
    tokens = torch.randint(65, (SEQUENCES, TOKENS), generator=torch.Generator().manual_seed(1))
    optimizer = torch.optim.Adam(trained(model))
    with FlopCounterMode(display=False) as counter:
        x = model.embed(tokens)
        with saved_for_backward(model.parameters()) as kept:
            logits = model.predict(model.apply_blocks(x.requires_grad_() if through_embedding else x))
        GPT.loss(logits, tokens).backward()
    optimizer.step()
    products = sum(num for op, num in counter.get_flop_counts()["Global"].items() if "attention" not in str(op))
    return held_state(model.parameters(), optimizer), kept.num_bytes, products


def flops(tuning: Tuning) -> float:
    found = told(tuning)
    return found.mfu * PLAIN.flops_per_s * found.step_s


def told(tuning: Tuning, **other: Any) -> Any:
    return estimate(SMALL, PLAIN, replace(ONE, **other), SEQUENCES, tuning.each, tuning=tuning)


def test_adapters_take_the_bytes_and_flops_that_are_counted() -> None:
    """State to the byte; of activations and FLOPs, how many more or fewer than where everything is trained."""
    state, kept, products = measured(adapted())
    assert sum(p.numel() for p in trained(adapted())) == LORA.trained_parameters(SMALL)
    assert state.total == told(LORA).state_bytes
    _, all_kept, all_products = measured(GPT.seeded(CONFIG, 0))
    everything = Tuning(optimizer="adam-bf16")
    assert kept - all_kept == told(LORA).activation_bytes - told(everything).activation_bytes
    assert all_products - products == pytest.approx(LORA.spared_flops(SMALL, SEQUENCES))
    assert flops(everything) - flops(LORA) == pytest.approx(all_products - products)


@pytest.mark.parametrize("num", [1, 3])
def test_frozen_layers_take_the_bytes_and_flops_that_are_counted(num: int) -> None:
    everything, tuning = (Tuning(frozen_layers=k, optimizer="adam-bf16") for k in (0, num))
    state, kept, products = measured(without_first(num), through_embedding=False)
    assert state.total == told(tuning).state_bytes
    assert sum(p.numel() for p in trained(without_first(num))) == tuning.trained_parameters(SMALL)
    _, all_kept, all_products = measured(GPT.seeded(CONFIG, 0))
    statistics = all_kept - kept - (told(everything).activation_bytes - told(tuning).activation_bytes)
    assert 0 <= statistics < 0.06 * (all_kept - kept)  # of norms and of attention, which the formula leaves out
    without_attention = replace(SMALL, num_tokens=TOKENS).attention_flops(SEQUENCES) * 2 * num
    assert all_products - products == pytest.approx(tuning.spared_flops(SMALL, SEQUENCES) - without_attention)


def test_a_frozen_matrix_alone_needs_no_input() -> None:
    """A block without adapters keeps no norm's output, and not the GELU's; with them it does, and r numbers each."""
    x = torch.randn(SEQUENCES, TOKENS, WIDTH, dtype=CONFIG.dtype, requires_grad=True)
    found = []
    for model in (GPT.seeded(CONFIG, 0), GPT.seeded(CONFIG, 0).requires_grad_(False), adapted()):
        with saved_for_backward(model.parameters()) as kept:
            model.blocks[0](x)
        found.append(kept.num_bytes)
    everything, frozen, adapters = found
    assert everything - frozen == 2 * (1 + 1 + 4) * x.numel()
    assert adapters - everything == 2 * 6 * RANK * SEQUENCES * TOKENS


# by hand
EIGHT = MODELS["llama3-8b"]


def test_adapters_of_a_large_model() -> None:
    """What PEFT prints for rank 16 on all linear layers of Llama 3 8B: 41,943,040 trainable parameters."""
    assert Tuning("lora", 16).trained_parameters(EIGHT) == 41_943_040
    gib = 2**30
    cluster, layout = cluster_of("h100", 1, "torchtitan"), Layout(1, 1, 1, recompute="full")
    state = {train: estimate(EIGHT, cluster, layout, 1, tuning.each, tuning=tuning).state_bytes / gib
             for train in ("full", "lora", "qlora") for tuning in [Tuning(train, 16, optimizer="adam-bf16")]}
    assert state["full"] == pytest.approx(8 * 8_030_261_248 / gib)
    assert state["lora"] == pytest.approx((2 * 8_030_261_248 + 8 * 41_943_040) / gib)
    linear = 32 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336)
    assert state["qlora"] == pytest.approx(
        (4.127 / 8 * linear + 2 * (8_030_261_248 - linear) + 8 * 41_943_040) / gib, rel=1e-4)
    assert NF4_BYTES * 8 - 4 == pytest.approx(0.127, abs=5e-4)  # bits (dettmers2023, section 3)


@pytest.mark.parametrize("zero_stage", range(4))
def test_what_is_frozen_is_sharded_and_gathered_but_never_reduced(zero_stage: int) -> None:
    tuning, batch, adapters = Tuning("qlora", 16), 32, 41_943_040
    cluster = replace(cluster_of("h100", 8, "megatron"), overheads=PLAIN.overheads)
    layout = Layout(1, 8, 1, zero_stage=zero_stage, recompute="full")
    found = estimate(EIGHT, cluster, layout, batch, tuning.each, tuning=tuning)
    linear = 32 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336)
    frozen = NF4_BYTES * linear + 2 * (EIGHT.num_parameters - linear)
    each, shards = tuning.each, [8 if zero_stage >= first else 1 for first in (3, 2, 1)]
    held = adapters * (each.parameters / shards[0] + each.gradients / shards[1] + each.optimizer / shards[2])
    assert found.state_bytes == pytest.approx(frozen / shards[0] + held)
    passes, gathers = ((2, 0), (2, 0), (5, 0), (12, 8))[zero_stage]  # of (N-1)/N, with 4 micro-batches
    assert found.dp_bytes == pytest.approx((passes * ring_sent_bytes(8, 2 * adapters)
                                            + gathers * ring_sent_bytes(8, frozen)) / 2)


def test_tensor_parallel_ranks_each_hold_the_narrow_sides_of_adapters() -> None:
    tuning = Tuning("lora", 16, optimizer="sgd")
    cluster = cluster_of("h100", 2, "torchtitan")
    found = estimate(EIGHT, cluster, Layout(1, 1, 2), 1, tuning.each, tuning=tuning).state_bytes
    narrow = 32 * 7 * 16 * 4096  # beside each of seven matrices, at its end of 4096 numbers
    assert found == pytest.approx((2 * EIGHT.num_parameters + 4 * (41_943_040 + narrow)) / 2)


@pytest.mark.parametrize("optimizer, num_bytes", [("adam", 16), ("adam-bf16", 8), ("adam8bit", 6.03125), ("sgd", 4)])
def test_optimizers_take_their_bytes(optimizer: str, num_bytes: float) -> None:
    cluster = cluster_of("h100", 1, "torchtitan")
    tuning = Tuning(optimizer=optimizer)
    held = estimate(EIGHT, cluster, Layout(1, 1, 1), 1, tuning.each, tuning=tuning)
    assert held.state_bytes == pytest.approx(num_bytes * EIGHT.num_parameters)
    assert tuning.kept == OPTIMIZERS[optimizer]
    away = replace(tuning, offload="optimizer")
    less = estimate(EIGHT, cluster, Layout(1, 1, 1), 1, away.each, tuning=away)
    assert held.state_bytes - less.state_bytes == pytest.approx(tuning.kept.optimizer * EIGHT.num_parameters)
    assert less.update_s > 10 * held.update_s and less.matmul_s == held.matmul_s


def test_training_everything_is_what_it_was() -> None:
    """No tuning, and one that leaves nothing out, are the same, and the default of `plan`."""
    cluster = cluster_of("h100", 64, "torchtitan")
    layout = Layout(1, 64, 1, zero_stage=3, recompute="full")
    assert Tuning().each == ADAM_MIXED
    assert estimate(EIGHT, cluster, layout, 64, ADAM_MIXED) == estimate(
        EIGHT, cluster, layout, 64, Tuning().each, tuning=Tuning())


# Peak memory in GiB and tokens per second of Llama 3.1 that torchtune reports (its README, in October 2024): two
# sequences of 2,048 tokens on each GPU, adapters of rank 8, and a loss in chunks, which never holds all logits.
FULLY, NOT = Layout(1, 1, 1, 2, recompute="full"), Layout(1, 1, 1, 2)
SHARDED = Layout(1, 8, 1, 2, zero_stage=3, recompute="full")
REPORTED = [
    ("llama3-8b", "lora", FULLY, 165e12, 16.2, 3083), ("llama3-8b", "qlora", FULLY, 165e12, 7.4, 2413),
    ("llama3-8b", "lora", NOT, 155e12, 30.3, 0), ("llama3-70b", "lora", SHARDED, 312e12, 27.6, 3497),
    ("llama3-405b", "qlora", SHARDED, 312e12, 44.8, 653)]


@pytest.mark.parametrize("model, train, layout, flops_per_s, gib, tokens_per_s", REPORTED)
def test_fine_tuning_that_was_measured(model: str, train: str, layout: Layout, flops_per_s: float, gib: float,
                                       tokens_per_s: float) -> None:
    cluster = cluster_of("a100", layout.num_gpus, "torchtitan")
    over = replace(cluster.overheads, logit_bytes=0)
    cluster = replace(cluster, flops_per_s=flops_per_s, overheads=over)
    tuning, sizes = Tuning(train, 8, optimizer="adam-bf16"), replace(MODELS[model], num_tokens=2048)
    num = 2 * layout.num_gpus
    found = estimate(sizes, cluster, layout, num, tuning.each, tuning=tuning)
    assert found.memory_bytes / 2**30 == pytest.approx(gib, rel=0.1)
    if tokens_per_s:
        assert 0.65 < num * 2048 / found.step_s / tokens_per_s < 1.3


# as people ask
def card(gigabytes: float, num: int = 1) -> Cluster:
    """A GPU of a workstation: 165 TFLOP/s, 1 TB/s, PCIe."""
    one = cluster_of("h100", num, "torchtitan")
    return replace(one, memory_bytes=gigabytes * 1e9, flops_per_s=165e12, memory_bytes_per_s=1e12,
                   inside_bytes_per_s=25e9, gpus_per_node=num)


def asked(model: str, gigabytes: float, num: int, num_tokens: int, tuning: Tuning) -> Plan:
    return plan(model, num, card(gigabytes, num), num_tokens=num_tokens, tuning=tuning)


def test_what_is_known_to_fit_fits() -> None:
    """LoRA of 8B on 24 GB with one sequence and recomputation; QLoRA of 70B on 48 GB, and on four of 24.

    On two of 24 its shards need a gigabyte more than is usable.
    """
    found = asked("llama3-8b", 24, 1, 2048, Tuning("lora"))
    assert found.layout.micro_batch_size == 1 and found.layout.recompute == "full"
    assert asked("llama3-8b", 24, 1, 4096, Tuning("qlora")).cost.memory_bytes < 22e9
    assert asked("llama3-70b", 48, 1, 512, Tuning("qlora", optimizer="adam8bit")).layout.num_gpus == 1
    assert asked("llama3-70b", 24, 4, 512, Tuning("qlora", optimizer="adam8bit")).layout.zero_stage == 3
    with pytest.raises(ValueError, match="all with weights in 4 bits cut by tp or pp"):
        asked("llama3-70b", 24, 2, 512, Tuning("qlora", optimizer="adam8bit"))


@pytest.mark.parametrize("gigabytes, tuning, needs", [
    (24, Tuning(), "the smallest needs 133"), (48, Tuning(optimizer="adam8bit"), "the smallest needs 53"),
    (16, Tuning("lora"), "the smallest needs 21"), (80, Tuning(), "the smallest needs 133")])
def test_what_does_not_fit_is_refused_with_what_it_needs(gigabytes: float, tuning: Tuning, needs: str) -> None:
    with pytest.raises(ValueError, match=needs):
        asked("llama3-8b", gigabytes, 1, 2048, tuning)


def test_the_margin_is_of_what_varies() -> None:
    """A fifth of the memory is kept free where all varies, and a fifth of what frozen weights leave."""
    found = asked("llama3-8b", 24, 1, 2048, Tuning("lora"))
    frozen, usable = 2 * EIGHT.num_parameters, found.search.usable[found.search.best]
    assert usable == pytest.approx(frozen + 0.8 * (24e9 - frozen))
    whole = plan("llama3-8b", 8, "h100")
    assert set(whole.search.usable) == {64e9}


def test_adapters_are_faster_but_not_by_all_weight_gradients() -> None:
    step_s = {train: plan("llama3-8b", 8, "h100", num_tokens=4096, batch=64, tuning=Tuning(train)).cost.step_s
              for train in ("full", "lora", "qlora")}
    assert 1.15 < step_s["full"] / step_s["lora"] < 1.5 and 1 < step_s["qlora"] / step_s["lora"] < 1.15


def test_a_shell_asks_for_fine_tuning(capsys: pytest.CaptureFixture[str]) -> None:
    ask = ["plan", "llama3-8b", "--gpus", "1", "--sequence", "2048"]
    assert main([*ask, "--train", "qlora", "--rank", "8", "--optimizer", "adam8bit"]) == 0
    said = capsys.readouterr().out
    assert "none of these steps is fine-tuning" in said and "64 sequences of 2,048 tokens" in said
    assert "trains   21.0 of 8,030.3 million parameters: adapters of rank 8 beside each matrix of the layers" in said
    assert main([*ask, "--frozen-layers", "28", "--offload", "optimizer"]) == 0
    said = capsys.readouterr().out
    assert "the first 28 layers frozen" in said and "12 of the optimizer in the memory of the host" in said


@pytest.mark.parametrize("options, change, works", [
    ([], "--train lora: ", ["--train", "lora"]),
    (["--gpus", "4"], "--offload optimizer: ", ["--gpus", "4", "--offload", "optimizer"]),
    (["--gpus", "2", "--offload", "optimizer"], "--optimizer adam8bit: ",
     ["--gpus", "2", "--offload", "optimizer", "--optimizer", "adam8bit"]),
    (["--gpu", "a10g", "--train", "lora", "--sequence", "4096"], "--train qlora: ",
     ["--gpu", "a10g", "--train", "qlora", "--sequence", "4096"])])
def test_a_refusal_names_smaller_state_that_works(options: list[str], change: str, works: list[str],
                                                  capsys: pytest.CaptureFixture[str]) -> None:
    ask = ["plan", "llama3-8b", "--gpus", "1", "--gpu", "rtx4090", "--sequence", "2048"]
    assert main([*ask, *options]) == 2
    assert f"change   {change}" in capsys.readouterr().err
    assert main([*ask, *works]) == 0


def test_a_layout_of_ones_own_is_estimated_for_fine_tuning(capsys: pytest.CaptureFixture[str]) -> None:
    """It has the same numbers as the plan that chose it, and one that does not fit has others that do."""
    ask = ["llama3-8b", "--gpus", "1", "--gpu", "rtx4090", "--sequence", "2048", "--train", "lora"]
    assert main(["plan", *ask]) == 0
    memory = [line for line in capsys.readouterr().out.splitlines() if line.startswith("memory")]
    assert main(["estimate", *ask, "--layout", "micro=1,recompute=full"]) == 0
    said = capsys.readouterr().out
    assert memory[0] in said and "adapters of rank 16" in said and "does not fit" not in said
    assert main(["estimate", *ask, "--layout", "micro=1"]) == 0
    said = capsys.readouterr().out
    assert "it does not fit" in said and "change   21.9 GB" in said


@pytest.mark.parametrize("options, words", [
    (["--train", "dora"], "train is one of full, lora, qlora"), (["--optimizer", "lion"], "optimizer is one of adam"),
    (["--offload", "weights"], "offload is one of optimizer"), (["--train", "lora", "--rank", "0"], "at least 1"),
    (["--frozen-layers", "32"], "this model has 32 layers"), (["--frozen-layers", "-1"], "at least 0"),
    (["--train", "lora", "--frozen-layers", "3"], "adapters are in all layers"),
    (["--train", "lora", "--config", "megatron"], "--config writes options that train everything")])
def test_what_cannot_be_asked_is_refused(options: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "llama3-8b", "--gpus", "1", *options]) == 2
    assert words in capsys.readouterr().err


def test_adapters_of_experts_are_not_counted() -> None:
    with pytest.raises(ValueError, match="not for experts or latent attention"):
        plan("mixtral-8x7b", 8, "h100", tuning=Tuning("lora"))
