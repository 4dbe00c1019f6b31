"""Cut products: what is read off tensors, what real runs leave in a trace, and what stands on a page."""
from __future__ import annotations

import html
import json
import re
from functools import cache, partial
from string import ascii_uppercase
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_reduce
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from book.blocks import SIZES, BlockError, BlockOp, MatrixBlock
from book.launch import RankError, launch
from book.record.known_blocks import blocks_of_mlp, blocks_of_product
from book.shards import trace_mlp, trace_product
from book.trace import Event, Trace
from book.widgets import sharded_product
from tests.by_value import sent_by_value
from tests.players import html_of
from tests.shards import RUNS, by_columns, by_rows, own, partial_sum, recorded, summed

sent_by_value(__name__)

MOST_PAGE_BYTES = 60_000
DONE, WRONG = "Done: ", "Wrong: "


def data_of(shown: Any) -> dict[str, Any]:
    """The data in a widget's HTML, as a browser would read the attribute."""
    return json.loads(html.unescape(re.match(r"<div data-lockstep-shards='([^']*)'>", html_of(shown))[1]))


def run_of(trace: Trace) -> dict[str, Any]:
    """The data of one run."""
    return data_of(sharded_product(trace))["runs"][0]


def told(trace: Trace) -> list[str]:
    """What is said at each step."""
    return [stress + rest for stop in run_of(trace)["stops"] for stress, rest, *_ in stop["say"]]


def figures(trace: Trace) -> list[str]:
    """The row of figures."""
    return [" ".join(pair) for pair in run_of(trace)["figures"]]


def followed(fn: Any, num_ranks: int = 2, trace: Any = trace_product) -> Trace:
    """A run of a function that is not among RUNS."""
    return launch(trace, num_ranks, fn, record=True).trace


def at_end(trace: Trace, name: str) -> dict[int, dict[int, list[float] | None]]:
    """What each rank's blocks of a matrix hold at the end, by rank and number: this test's own reader of the data."""
    run = run_of(trace)
    [index] = [i for i, matrix in enumerate(run["matrices"]) if matrix["name"] == name]
    held: dict[int, dict] = {rank: {} for rank in range(run["n"])}
    for block in [block for stop in run["stops"] for block in stop["set"]]:
        rank, matrix, number, *contents = block
        if matrix == index:
            held[rank].pop(number, None)
            held[rank].update({number: contents[0]} if contents else {})
    return held


# What is read off tensors

@cache
def known_of(num_ranks: int) -> Any:
    """The known of a product with a bias, which reading leaves as it is."""
    return blocks_of_product(num_ranks, bias=True)


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_sum_of_parts_is_recognized_from_its_numbers(data: st.DataObject) -> None:
    n = data.draw(st.sampled_from([2, 3, 4]))
    known = known_of(n)
    x, a = (known.given[name] for name in "XA")
    row, column = (data.draw(st.integers(0, n - 1)) for _ in range(2))
    # A bias is the same in every row: by itself it doesn't tell where it is.
    counts = data.draw(st.lists(st.integers(0, 4), min_size=n, max_size=n).filter(any))
    counts = [*counts, data.draw(st.integers(0, 4))]
    factor = data.draw(st.sampled_from([1, 1 / n]))
    rows, columns = x.chunk(n)[row], a.chunk(n, 1)[column]
    parts = [p @ q for p, q in zip(rows.chunk(n, 1), columns.chunk(n, 0))]
    parts.append(known.given["bias"].chunk(n)[column].expand(len(rows), -1))
    block = sum(count * factor * part for count, part in zip(counts, parts))
    dtype = data.draw(st.sampled_from([torch.float64, torch.float32]))
    for tensor in (block.to(dtype), block.T.to(dtype)):
        found = known.find(tensor)
        assert found.matrix == "Y" and list(found.contents) == [(row, column)]
        assert found.contents[row, column] == pytest.approx([count * factor for count in counts], abs=1e-12)


def test_numbers_that_are_not_a_block_are_not_read_as_one() -> None:
    known = blocks_of_mlp(4)
    x, a = known.given["X"], known.given["A"]
    y = x @ a
    columns = y.chunk(4, 1)
    for tensor in (torch.randn(24, 12, dtype=torch.float64), torch.zeros(24, 12), columns[0] + columns[1], y.abs(),
                   y[:, ::4], y[1:7], torch.cat(columns[::-1], 1), F.relu(y), y * float("nan"), y[0], torch.tensor(3)):
        assert known.find(tensor) is None, tensor.shape
    assert known.find(y).matrix == "P" and known.find(F.gelu(y)).matrix == "H"
    assert known.find(F.gelu(y, approximate="tanh")) is None
    assert set(known.find(y[:, 12:36]).contents) == {(row, column) for row in range(4) for column in (1, 2)}


def test_zeros_beside_a_block_are_not_held() -> None:
    """The gradient of a slice is zero where nothing was sliced."""
    known = blocks_of_product(2, bias=False)
    x = known.given["X"].clone()
    x[:, 6:] = 0
    assert set(known.find(x).contents) == {(0, 0), (1, 0)}


edges = st.lists(st.integers(0, 60), min_size=2, max_size=2, unique=True).map(lambda pair: tuple(sorted(pair)))


@given(st.tuples(st.sampled_from(["", "d"]), st.sampled_from(ascii_uppercase)).map("".join), edges, edges,
       st.tuples(st.integers(1, 99), st.integers(1, 99)))
def test_a_block_survives_a_round_trip_through_text(name: str, rows: tuple, columns: tuple, shape: tuple) -> None:
    block = MatrixBlock(name, rows, columns, shape)
    assert MatrixBlock.parse(str(block)) == block


@pytest.mark.parametrize("text", ["", "A", "A[0:2] of 3x4", "A[0:2, 3:4]", "A[0:2, 3:4] of 3x4 "])
def test_other_texts_are_no_blocks(text: str) -> None:
    with pytest.raises(BlockError, match="names no block"):
        MatrixBlock.parse(text)


X, A = MatrixBlock("X", (0, 24), (0, 6), (24, 12)), MatrixBlock("A", (0, 6), (0, 48), (12, 48))


@pytest.mark.parametrize("op, text", [
    (BlockOp("given", (X, A)), "given: X[0:24, 0:6] of 24x12; A[0:6, 0:48] of 12x48"),
    (BlockOp("multiply", (X, A), factors=((24, 6), (6, 48))),
     "24x6 @ 6x48: X[0:24, 0:6] of 24x12; A[0:6, 0:48] of 12x48"),
    (BlockOp("multiply", (), factors=((24, 6), (6, 48))), "24x6 @ 6x48: "),
    (BlockOp("apply", (X,), "gelu"), "gelu: X[0:24, 0:6] of 24x12"), (BlockOp("apply", (), "add_"), "add_: "),
    (BlockOp("sends", (A,)), "sends: A[0:6, 0:48] of 12x48"), (BlockOp("sends"), "sends: "),
    (BlockOp("return"), "return"), (BlockOp("gradient"), "gradient")])
def test_a_block_operation_survives_a_round_trip_through_text(op: BlockOp, text: str) -> None:
    assert str(op) == text and BlockOp.parse(text) == op
    assert op.num_multiplications == (24 * 6 * 48 if op.kind == "multiply" else 0)


def test_a_text_that_lists_something_else_than_blocks_is_refused() -> None:
    with pytest.raises(BlockError, match="'12' names no block"):
        BlockOp.parse("sends: A[0:6, 0:48] of 12x48; 12")


# Real runs

@pytest.mark.slow
def test_by_rows_every_rank_has_a_partial_sum_until_it_is_reduced() -> None:
    assert told(recorded("by rows", 4)) == [
        "Y = X A on 4 ranks. Every rank holds its columns of X and its rows of A.",
        "Every rank multiplies its columns of X by its rows of A: a partial sum of all of Y (1 of 4 terms).",
        "All-reduce of Y: what the ranks have is added up, and every rank gets the sum. Every rank now has all of Y, "
        "complete.",
        "Done: every rank returns all of Y, complete."]
    run = run_of(recorded("by rows", 4))
    assert [m["grid"] for m in run["matrices"]] == [[1, 4], [4, 1], [1, 1]]
    start, *steps = run["stops"]
    assert start["set"] == [block for r in range(4) for block in ([r, 0, r, [1]], [r, 1, r, [1]])]
    ones = [[int(k == r) for k in range(4)] for r in range(4)]
    assert [step["set"] for step in steps] == [
        [[r, 2, 0, ones[r]] for r in range(4)], *[[[r, 2, 0, [1] * 4] for r in range(4)]] * 2]
    sent = [(src, dst) for _, src, dst, _ in steps[1]["moves"]]
    assert sent == [(s, d) for s in range(4) for d in range(4) if s != d]


@pytest.mark.slow
def test_by_columns_nothing_moves() -> None:
    assert told(recorded("by columns"))[1:] == [
        "Every rank multiplies all of X by its columns of A: its columns of Y, complete.",
        "Done: every rank returns its columns of Y, complete. Together they have all of Y."]
    assert at_end(recorded("by columns", 4), "Y") == {rank: {rank: [1]} for rank in range(4)}
    assert "All-gather of Y: every rank gets what the others have." in told(recorded("gathered"))[2]
    assert at_end(recorded("gathered"), "Y") == {0: {0: [1], 1: [1]}, 1: {0: [1], 1: [1]}}


@pytest.mark.slow
def test_an_mlp_needs_one_all_reduce_each_way() -> None:
    said = told(recorded("MLP, backward", 4))
    assert [text.split(":")[0] for text in said if text.startswith("All-")] == ["All-reduce of Y", "All-reduce of dX"]
    assert "Every rank applies GELU to its columns of P: its columns of H. Nothing moves." in said
    assert "Every rank begins its backward with all of dY, the loss's gradient of what it returned." in said
    assert said[-1] == ("Done: every rank ends with all of dX, its columns of dA and its rows of dB, complete. "
                        "Together they have all of dX, dA and dB.")
    assert set(map(str, at_end(recorded("MLP, backward", 4), "dX").values())) == {"{0: [1, 1, 1, 1]}"}


@pytest.mark.slow
def test_sequence_parallel_ends_with_rows() -> None:
    trace = recorded("sequence parallel", 4)
    collectives = [text.split(":")[0] for text in told(trace) if re.match("All-|Reduce-", text)]
    assert collectives == ["All-gather of X", "Reduce-scatter of Y", "All-gather of dY", "Reduce-scatter of dX"]
    assert at_end(trace, "Y") == at_end(trace, "dX") == {rank: {rank: [1] * 4} for rank in range(4)}


@pytest.mark.slow
@pytest.mark.parametrize("name, verdict", [
    ("partial", "every rank returns a partial sum of all of Y (1 of 2 terms)."),
    ("twice", "every rank returns all of Y with every term counted twice."),
    ("columns summed", "every rank returns something that is not made of blocks of Y."),
    ("bias", "every rank returns all of Y with the bias counted twice."),
    ("rows first", "every rank returns something that is not made of blocks of Y."),
    ("no sum backward", "every rank ends with a partial sum of all of dX (1 of 2 terms), its columns of dA, complete "
                        "and its rows of dB, complete."),
])
def test_a_mistake_gets_its_own_verdict(name: str, verdict: str) -> None:
    assert told(recorded(name))[-1] == WRONG + verdict
    assert run_of(recorded(name))["stops"][-1]["say"][0][2] is True


@pytest.mark.slow
def test_why_rows_do_not_come_first() -> None:
    assert told(recorded("rows first"))[2].endswith(
        "something that is not made of blocks of H. GELU of a sum is not the sum of GELUs.")


@pytest.mark.slow
def test_the_bias_counts_as_often_as_it_was_added() -> None:
    assert at_end(recorded("bias", 4), "Y")[0] == {0: [1, 1, 1, 1, 4]}
    assert at_end(recorded("bias once", 4), "Y")[3] == {0: [1, 1, 1, 1, 1]}
    assert told(recorded("bias once"))[-1] == DONE + "every rank returns all of Y, complete."
    forgotten = followed(lambda x, a, bias: by_rows(x, a), 2, partial(trace_product, bias=True))
    assert told(forgotten)[0].startswith("Y = X A + bias on 2 ranks.")
    assert told(forgotten)[-1] == WRONG + "every rank returns all of Y without the bias."


@pytest.mark.slow
@pytest.mark.parametrize("n", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_figures_are_those_of_the_formulas(n: int) -> None:
    t, d, m, o = SIZES["T"], SIZES["D"], SIZES["M"], SIZES["O"]
    product, both = [figures(recorded(key, n)) for key in ("by rows", "MLP")]
    assert product[1] == f"{t * d * m // n:,} multiplications on each rank, 1/{n} of one process's"
    assert both[0] == f"{8 * (d * m + m * o) / n / 1000:#.3g} kB of A and B on each rank, 1/{n} of 9.22 kB"
    assert product[2] == (f"{8 * t * m * 2 * (n - 1) / n / 1000:#.3g} kB sent by each rank: 2(t−1)/t·n, n = 9.22 kB, "
                          f"t = {n}")
    whole, rows = (figures(recorded(key, n))[2].split()[0] for key in ("MLP, backward", "sequence parallel"))
    assert whole == rows, "sequence parallel sends the same bytes"
    assert all(len(figures(recorded(name, n))) == 5 for name in RUNS)


def waits_later(x: Tensor, a: Tensor) -> Tensor:
    y = partial_sum(x, a)
    works = [dist.all_reduce(half, async_op=True) for half in y.chunk(2)]
    works[0].wait()
    other = y[:12] * 2  # beside the half that is still under way
    works[1].wait()
    return y + 0 * other.sum()


def functional(x: Tensor, a: Tensor) -> Tensor:
    return all_reduce(partial_sum(x, a), "sum", dist.group.WORLD)


def as_linear(x: Tensor, a: Tensor) -> Tensor:
    return F.linear(x, own(a, 1).T.contiguous())


def in_three_dims(x: Tensor, a: Tensor) -> Tensor:
    return summed(own(x, 1).reshape(2, 12, -1) @ own(a, 0)).flatten(0, 1)


def in_float32(x: Tensor, a: Tensor) -> Tensor:
    return by_rows(x.float(), a.float())


def in_bfloat16(x: Tensor, a: Tensor) -> Tensor:
    return by_rows(x.bfloat16(), a.bfloat16())


@pytest.mark.slow
@pytest.mark.parametrize("fn", [
    waits_later, functional, in_bfloat16,
    *(pytest.param(fn, marks=pytest.mark.slow) for fn in (as_linear, in_three_dims, in_float32))])
def test_every_right_way_to_write_it_passes(fn: Any) -> None:
    trace = followed(fn, 4 if fn is in_bfloat16 else 2)
    assert told(trace)[-1].startswith(DONE), told(trace)


@pytest.mark.slow
def test_three_ranks() -> None:
    assert at_end(followed(by_rows, 3), "Y") == {rank: {0: [1, 1, 1]} for rank in range(3)}


def ring(x: Tensor, a: Tensor) -> Tensor:
    total = partial_sum(x, a)
    n, rank, held = dist.get_world_size(), dist.get_rank(), total
    for _ in range(n - 1):
        got = torch.empty_like(total)
        for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, held, (rank + 1) % n),
                                            dist.P2POp(dist.irecv, got, (rank - 1) % n)]):
            work.wait()
        total, held = total + got, got
    return total


@pytest.mark.slow
def test_messages_are_described_too() -> None:
    said = told(followed(ring, 3))
    assert sum("Rank 0 sends Y to rank 1; it gets a partial sum of all of Y" in text for text in said) == 2
    assert said[-1] == DONE + "every rank returns all of Y, complete."


def by_torch(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    model = nn.Sequential(nn.Linear(12, 48, bias=False), nn.GELU(), nn.Linear(48, 12, bias=False)).double()
    with torch.no_grad():
        model[0].weight.copy_(a.T)
        model[2].weight.copy_(b.T)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    return parallelize_module(model, mesh, plan, src_data_rank=None)(x)


@pytest.mark.slow
def test_torchs_own_split_is_followed() -> None:
    said = told(followed(by_torch, 2, partial(trace_mlp, backward=True)))
    assert said[0] == ("Y = GELU(X A) B on 2 ranks. Every rank holds all of X, its columns of A and its rows of B.")
    assert [text.split(":")[0] for text in said if text.startswith("All-")] == ["All-reduce of Y", "All-reduce of dX"]
    assert said[-1].startswith(DONE + "every rank ends with all of dX, its columns of dA and its rows of dB, complete")


def mean(x: Tensor, a: Tensor) -> Tensor:
    return by_rows(x, a) / dist.get_world_size()


def less(x: Tensor, a: Tensor) -> Tensor:
    y = partial_sum(x, a)
    return by_rows(x, a) - 2 * dist.get_rank() * y


def same_columns(x: Tensor, a: Tensor) -> Tensor:
    return x @ a.chunk(dist.get_world_size(), 1)[0]


def strided(x: Tensor, a: Tensor) -> Tensor:
    return x @ a[:, dist.get_rank()::dist.get_world_size()]


def to_one_rank(x: Tensor, a: Tensor) -> Tensor:
    y = partial_sum(x, a)
    dist.barrier()
    dist.all_reduce(torch.ones(3))
    return y if dist.get_rank() else y + own(x, 1) @ own(a, 0)


@pytest.mark.slow
@pytest.mark.parametrize("fn, verdict", [
    pytest.param(mean, "every rank returns all of Y divided by 2.", marks=pytest.mark.slow),
    (less, "rank 0 returns all of Y, complete; rank 1 returns all of Y with a term counted -1 times."),
    (same_columns, "every rank returns columns 0 to 23 of Y, complete. Parts of Y are on no rank."),
    pytest.param(strided, "every rank returns something that is not made of blocks of Y.", marks=pytest.mark.slow),
    (to_one_rank, "rank 0 returns all of Y with a term counted twice; rank 1 returns a partial sum of all of Y (1 of 2 "
                  "terms)."),
])
def test_other_mistakes(fn: Any, verdict: str) -> None:
    said = told(followed(fn))
    assert said[-1] == WRONG + verdict
    if fn is to_one_rank:
        assert "Barrier: nobody goes on before all have called it." in said
        assert any(text.endswith("It moves none of these matrices.") for text in said)


@pytest.mark.slow
def test_without_a_recording_it_only_computes() -> None:
    run = launch(trace_product, 2, by_rows)
    assert run[0].shape == (24, 48) and torch.equal(run[0], run[1])
    with pytest.raises(ValueError, match="collectives were not recorded: launch it with record=True"):
        sharded_product(run.trace)


@pytest.mark.slow
@pytest.mark.parametrize("fn, trace, num_ranks, message", [
    (lambda x, a: (x, a), trace_product, 2, "return the tensor that this rank has computed of Y .*, not tuple"),
    (lambda x, a: (x @ a).detach(), partial(trace_product, backward=True), 2, "has no gradient to follow"),
    (by_columns, trace_product, 5, "on 2 to 4 ranks, and 5 are running: launch 2, 3 or 4"),
])
def test_operations_that_cannot_be_followed_are_refused(fn: Any, trace: Any, num_ranks: int, message: str) -> None:
    with pytest.raises(RankError, match=message):
        launch(trace, num_ranks, fn, record=True)


# What stands on a page

@pytest.mark.parametrize("runs, error, message", [
    (Trace([Event(0, "send", peer=1, start_s=0, end_s=1)], 2, "measured", "recorded"), ValueError,
     "follows no matrix product: launch trace_product"),
    (Trace([], 8, "measured", "recorded"), ValueError, "on 2 to 4 ranks"),
    (Trace([], 2, "logical", "recorded"), ValueError, "from the trace that was recorded"),
    ({}, ValueError, "nothing to play"),
    ([1], TypeError, "takes a recorded Trace .* not list"),
    ({"a": "b"}, TypeError, "not str"),
])
def test_a_trace_without_a_followed_product_is_refused(runs: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        sharded_product(runs)


@pytest.mark.slow
def test_a_real_run_has_the_same_page_each_time() -> None:
    pages = [html_of(sharded_product(followed(RUNS["sequence parallel"][1], 2, RUNS["sequence parallel"][0])))
             for _ in range(2)]
    assert pages[0] == pages[1] and "gloo" not in pages[0]
    live = json.loads(sharded_product(recorded("by rows")).payload)["runs"][0]
    assert live["source"] == f"recorded from 2 processes on {recorded('by rows').backend}"


@pytest.mark.slow
def test_runs_are_chosen_by_their_keys() -> None:
    runs = {("by rows", 2): recorded("by rows"), ("by rows", 4): recorded("by rows", 4), ("MLP", 2): recorded("MLP")}
    shown = sharded_product(runs, labels=["cut", "ranks"], select=("by rows", 4), title="Cuts")
    data = data_of(shown)
    assert [axis["values"] for axis in data["axes"]] == [["by rows", "MLP"], ["2", "4"]]
    assert data["runs"][0]["n"] == 4
    assert str(shown).startswith("Cuts: sharded product of 3 runs (by rows, 2, by rows, 4")
    assert str(sharded_product(recorded("MLP"))) == "A sharded MLP: sharded product, 2 ranks, recorded"
    with pytest.raises(ValueError, match="select can't be 'x'"):
        sharded_product(runs, select="x")


@pytest.mark.slow
def test_a_reader_without_javascript_gets_every_step() -> None:
    page = html_of(sharded_product({2: recorded("by rows"), 4: recorded("twice", 4)}, title="Rows"))
    assert page.count("<ol>") == 2 and page.count("<li>") == 4 + 5
    assert "<li>Wrong: every rank returns all of Y with every term counted 4 times.</li>" in page
    assert "9.22 kB sent by each rank: 2(t−1)/t·n, n = 9.22 kB, t = 2" in page


@pytest.mark.slow
def test_names_cannot_break_out_of_the_page() -> None:
    bad = """</div><script>alert('1')</script>"&amp;"""
    shown = sharded_product({bad: recorded("by rows"), "other": recorded("by rows")}, title=bad)
    assert "<script" not in html_of(shown)
    assert data_of(shown)["title"] == bad and data_of(shown)["axes"][0]["values"][0] == bad


@pytest.mark.slow
def test_another_trace_can_be_set() -> None:
    shown = sharded_product(recorded("by rows"))
    shown.step = 2
    shown.trace = recorded("MLP", 4)
    assert shown.step == 0 and json.loads(shown.payload)["runs"][0]["n"] == 4


@pytest.mark.slow
def test_sizes_keep_the_budget() -> None:
    runs = {n: recorded("sequence parallel", n) for n in (2, 4)}
    assert len(html_of(sharded_product(runs)).encode()) <= MOST_PAGE_BYTES
