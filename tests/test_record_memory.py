"""What a rank holds, measured: memory counted once, and events for what changes in a step of each ZeRO stage."""
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn

from book.cost import StateBytes, state_bytes
from book.launch import launch, rank_device
from book.parallel.model import GPT, GPTConfig
from book.parallel.sharded import Replicated, Zero1, Zero2, Zero3
from book.record import follow_units, held_state, holds, paused, storage_bytes, unit_action, unit_done
from tests.by_value import sent_by_value

sent_by_value(__name__)

CONFIG = GPTConfig(vocab_size=13, context=5, num_layers=2, num_heads=2, width=8, dtype=torch.float64)
STAGES = (Replicated, Zero1, Zero2, Zero3)


def test_shared_memory_counts_once_and_freed_memory_not_at_all():
    flat = torch.zeros(10)
    assert storage_bytes([flat, flat[:3], flat[3:].view(7, 1)]) == 40
    flat.untyped_storage().resize_(0)
    assert storage_bytes([flat]) == 0


def test_state_of_a_model_and_its_optimizer():
    model = nn.Linear(4, 3)
    optimizer = torch.optim.Adam(model.parameters())
    assert held_state(model.parameters(), optimizer) == StateBytes(60, 0, 0)
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    assert held_state(model.parameters(), optimizer) == StateBytes(60, 60, 120)  # no 4 bytes of the step number
    assert held_state([model.bias]) == StateBytes(12, 12, 0)


@pytest.mark.parametrize("call, words", [
    (lambda: holds("weights", "root", 1), "holds one of parameters"),
    (lambda: unit_done("eating", "root", 0.0), "work is one of forward")])
def test_an_unknown_word_is_refused(call, words):
    with pytest.raises(ValueError, match=words):
        call()


def test_an_unknown_word_is_refused_before_the_block_runs():
    ran = []
    with pytest.raises(ValueError, match="work is one of forward"), unit_action("eating", "root"):
        ran.append(True)
    assert not ran


def by_hand():
    dist.init_process_group()
    holds("activations", "block 0", 12)
    with unit_action("forward", "block 0"):
        holds("activations", "block 0", 0)
    try:
        with unit_action("backward", "block 0"):
            raise KeyError("not done")
    except KeyError:
        pass


@pytest.mark.slow
def test_events_of_a_program_that_says_what_it_holds():
    events = sorted(launch(by_hand, 1, record=True).trace.events, key=lambda event: event.start_s)
    assert [(e.kind, e.op, e.unit, e.num_bytes) for e in events] == [
        ("memory", "activations", "block 0", 12), ("compute", "forward", "block 0", None),
        ("memory", "activations", "block 0", 0)]
    assert events[1].end_s >= events[2].end_s


def followed(stage):
    dist.init_process_group()
    rank, world_size = dist.get_rank(), dist.get_world_size()
    with paused():
        sharded = stage(GPT.seeded(CONFIG, rank).to(rank_device()), partial(torch.optim.AdamW, lr=1e-2))
    follow_units(sharded.units, sharded.optimizer)
    tokens = torch.arange(2 * CONFIG.context, device=rank_device()).view(2, -1) % CONFIG.vocab_size
    GPT.loss(sharded(tokens), tokens.flip(0)).backward()
    sharded.step()
    return [len(unit.flat) for unit in sharded.units], world_size


@pytest.fixture(scope="module", params=[
    pytest.param(0, marks=pytest.mark.full), pytest.param(1, marks=pytest.mark.full), 2, 3],
    ids=lambda number: f"stage {number}")
def run(request):
    return request.param, launch(followed, 2, STAGES[request.param], record=True)


def on_rank_0(trace):
    return sorted(trace.of_rank(0), key=lambda event: event.start_s)


def after(events):
    """What rank 0 holds of each (kind of state, unit) at the end, and the most it held of all parameters at once."""
    held, most = {}, 0
    for event in events:
        if event.kind == "memory":
            held[event.op, event.unit] = event.num_bytes
            most = max(most, sum(size for (what, _), size in held.items() if what == "parameters"))
    return held, most


@pytest.mark.slow
def test_memory_left_after_the_step_matches_the_formula(run):
    number, launched = run
    lengths, world_size = launched[0]
    held, _ = after(on_rank_0(launched.trace))
    formula = state_bytes(sum(lengths), number, world_size, StateBytes(8, 8, 16))
    totals = {what: sum(size for (name, _), size in held.items() if name == what)
              for what in ("parameters", "gradients", "optimizer")}
    assert totals == {"parameters": formula.parameters, "gradients": 0, "optimizer": formula.optimizer}


@pytest.mark.slow
def test_only_stage_3_frees_parameters_and_holds_two_units_at_most(run):
    number, launched = run
    (root, *blocks), world_size = launched[0]
    _, most = after(on_rank_0(launched.trace))
    whole = 8 * (root + sum(blocks))
    assert most == (whole / world_size + 8 * (root + max(blocks)) if number == 3 else whole)


@pytest.mark.slow
def test_every_unit_runs_forward_and_backward_once_and_the_update_is_last(run):
    _, launched = run
    work = [(e.op, e.unit) for e in on_rank_0(launched.trace) if e.kind == "compute"]
    units = ["root", "block 0", "block 1"]
    passes = [(op, unit) for op in ("forward", "backward") for unit in units]
    assert sorted(work) == sorted([*passes, ("update", "all")])
    assert [unit for op, unit in work if op == "forward"] == units
    assert [unit for op, unit in work if op == "backward"] == ["root", "block 1", "block 0"]
    assert work[-1] == ("update", "all")


@pytest.mark.slow
def test_the_order_of_a_unit_in_stage_3():
    events = on_rank_0(launch(followed, 2, Zero3, record=True).trace)
    first = [(e.op, e.unit) for e in events if e.kind != "collective" and e.unit in (None, "block 0")]
    kinds = [e.op if e.kind == "collective" else f"{e.op} {'freed' if e.num_bytes == 0 else ''}".strip()
             for e in events if e.kind == "collective" or (e.unit == "block 0" and e.kind == "compute")]
    assert first[0] == ("parameters", "block 0")
    forward = kinds.index("forward")
    assert kinds[:forward + 1] == ["all_gather", "all_gather", "forward"]
    backward = kinds.index("backward")
    assert kinds[backward - 1:backward + 2] == ["all_gather", "backward", "reduce_scatter"]
