"""A simulated ZeRO step holds, gathers and scatters what a real one does, byte by byte, in the same order."""
import pytest
import torch
import torch.distributed as dist

from book.launch import launch, rank_device
from book.parallel import GPT, GPTConfig, sharded
from book.record import follow_units, paused
from book.simulate import simulate_sharded
from book.widgets import memory_player
from book.widgets.memory_run import read_held

CONFIG = GPTConfig(vocab_size=11, context=5, num_layers=2, num_heads=2, width=6, mlp_width=9, dtype=torch.float64)
BLOCK, ROOT, HEAD = 315, 174, 78  # parameters; of root's, those of the last norm and the head


def one_step(stage: int) -> None:
    """A step of the chapter's code; what comes before is not recorded."""
    device = rank_device()
    dist.init_process_group()
    gpt = GPT.seeded(CONFIG, 0).to(device)
    with paused():
        model = (sharded.Zero1, sharded.Zero2, sharded.Zero3)[stage - 1](gpt, torch.optim.AdamW)
    follow_units(model.units, model.optimizer)
    tokens = torch.zeros(1, CONFIG.context, dtype=torch.int64, device=device)
    GPT.loss(model(tokens), tokens).backward()
    model.step()


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_simulated_step_is_that_of_real_ranks(stage: int) -> None:
    real = read_held(launch(one_step, 2, stage, record=True).trace)
    assert read_held(simulate_sharded(stage, 2, ROOT, [BLOCK] * 2, HEAD)) == real
    assert real.zero_stage == stage


def test_sums_are_those_of_the_lab() -> None:
    held = [read_held(simulate_sharded(stage, 4, ROOT, [BLOCK] * 6, HEAD)) for stage in (1, 2, 3)]
    peaks = {what: [max_of(one, what) for one in held] for what in ("parameters", "gradients", "optimizer")}
    assert peaks == {"parameters": [16576, 16576, 8080], "gradients": [16512, 6304, 6304], "optimizer": [8288] * 3}


def max_of(held, what: str) -> float:
    """The most bytes of one kind that a rank holds at once."""
    now = {place: num_bytes for place, num_bytes in held.start.items() if place[0] == what}
    peak = sum(now.values())
    for place, num_bytes in (change for action in held.actions for change in action.changes):
        if place[0] == what:
            now[place] = num_bytes
            peak = max(peak, sum(now.values()))
    return peak


def test_the_player_says_that_it_is_simulated() -> None:
    shown = memory_player(simulate_sharded(2, 4, ROOT, [BLOCK], HEAD))._repr_mimebundle_()[0]
    assert "simulated" in shown["text/plain"] and "recorded" not in shown["text/plain"] + shown["text/html"]
    with pytest.raises(ValueError, match="zero_stage is 1, 2 or 3, not 0"):
        simulate_sharded(0, 4, ROOT, [BLOCK], HEAD)
