"""A simulated cut product computes, holds and sends, block by block, what real ranks do with the chapter's code."""
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from book.launch import launch
from book.parallel.tensor import all_reduce_then_identity, by_columns, by_rows, identity_then_all_reduce
from book.parallel.tensor.products import mine
from book.shards import trace_mlp, trace_product
from book.simulate import simulate_mlp, simulate_product
from book.trace import Trace
from book.widgets import sharded_product
from book.widgets.shards_run import read_play


def mlp(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    hidden = F.gelu(identity_then_all_reduce(x) @ mine(a, dim=1))
    return all_reduce_then_identity(hidden @ mine(b, dim=0))


def story(trace: Trace) -> list[Any]:
    """What the widget plays of a trace."""
    play = read_play(trace)
    steps = [(step.kind, step.name, {rank: (action.kind, action.name, sorted(map(str, action.blocks)), action.holds,
                                            action.num_multiplications) for rank, action in step.actions.items()})
             for step in play.steps]
    return [play.world_size, play.shapes, play.start, steps]


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [2, pytest.param(4, marks=pytest.mark.full)])
@pytest.mark.parametrize("program, simulated", [
    ((trace_product, by_columns), lambda num_ranks: simulate_product("M", num_ranks)),
    ((trace_product, by_rows), lambda num_ranks: simulate_product("D", num_ranks)),
    ((trace_mlp, mlp), simulate_mlp), ((trace_mlp, mlp, True), lambda num_ranks: simulate_mlp(num_ranks, True))],
    ids=["columns", "rows", "MLP", "MLP and backward"])
def test_a_simulated_product_is_that_of_real_ranks(program: Any, simulated: Any, num_ranks: int) -> None:
    trace, *arguments = program
    assert story(simulated(num_ranks)) == story(launch(trace, num_ranks, *arguments, record=True).trace)


@pytest.mark.parametrize("cut, num_ranks", [("T", 2), ("M", 5), ("D", 5)])
def test_only_the_sum_or_the_columns_can_be_cut_and_equally(cut: str, num_ranks: int) -> None:
    with pytest.raises(ValueError, match="choose one of M, D"):
        simulate_product(cut, num_ranks)


def test_the_widget_says_that_it_is_simulated() -> None:
    shown = sharded_product(simulate_mlp(backward=True))._repr_mimebundle_()[0]
    assert "simulated" in shown["text/plain"] and "(simulated)" in shown["text/html"]
    assert "recorded" not in shown["text/plain"] + shown["text/html"]
