"""L3: a module that is split over ranks, against the whole module in one process: parts, output, gradients, traffic.

A run comes as one dict per rank: `shards` and `gradients` by parameter name, `storage`, the bytes of memory that each
parameter holds on to, `output` and `input_gradient`.
"""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from book.checks.compare import agree, dense, held, is_own, magnitude, multiples, same, times
from book.checks.tensor import why_parts
from book.checks.verdict import CheckFailed, number, short
from book.trace import Event, Trace


def split_module(runs: Sequence[Mapping[str, Any]], before: Sequence[Mapping[str, Any]], whole: Mapping[str, Any],
                 parts: Sequence[Mapping[str, Any]], layout: Mapping[str, int | None],
                 hints: Mapping[str, Any] = {}, between: str = "what does forward do between the two cuts?") -> float:
    """R ranks that split a module must compute, forward and backward, what one process does with rank 0's weights.

    `before[rank]` are the whole weights that a rank has drawn. `whole` has `output`, `input_gradient` and `gradients`
    of one process, `parts[rank]` the output, without the last bias, and the input gradient that go through that rank's
    part alone. `layout` maps each parameter to the dim that is cut, None for one that stays whole. `hints` maps what to
    say to a wrong output, `between` is what to say of one that is none of them. Returns the sum of the absolute values
    of output and input gradient. Raises CheckFailed with the likeliest reason.
    """
    for rank, run in enumerate(runs):
        shard_shapes(rank, len(runs), run["shards"], before[rank], layout)
        for name, dim in layout.items():
            _check_shard(rank, name, dim, run["shards"][name], before)
    for rank, run in enumerate(runs):
        _check_memory(rank, run)
    for rank, run in enumerate(runs):
        _check_output(rank, run["output"], before[0], whole, parts, layout, hints, between)
    # The bias of k has no gradient but rounding: attention is the same whatever all keys have in common.
    largest = np.array(max(np.abs(dense(gradient)).max() for gradient in whole["gradients"].values()))
    for name, dim in layout.items():
        for rank, run in enumerate(runs):
            want = _block(dense(whole["gradients"][name]), dim, rank, len(runs))
            _check_gradient(rank, name, run["gradients"][name], want, largest, len(runs))
    for rank, run in enumerate(runs):
        _check_input_gradient(rank, run["input_gradient"], whole, parts)
    return magnitude(whole["output"]) + magnitude(whole["input_gradient"])


def split_traffic(trace: Trace, wanted: Mapping[str, int | None], num_bytes: int) -> int:
    """Each rank must issue, in each phase, `wanted[phase]` all-reduces of `num_bytes`, and nothing else.

    Barriers end the phases; None stands for any traffic. Returns the bytes that a rank gave to all-reduces in the
    phases that are counted. Raises CheckFailed with the likeliest reason.
    """
    for rank in range(trace.world_size):
        phases = _phases(trace.of_rank(rank))
        if len(phases) != len(wanted):
            raise CheckFailed(f"rank {rank} came to {len(phases) - 1} barriers, the check has {len(wanted) - 1}: leave "
                              "dist.barrier() out of your code, collectives need none")
        for (phase, num), events in zip(wanted.items(), phases):
            if num is not None:
                _check_phase(f"{phase}, rank {rank}", events, num, num_bytes)
    return num_bytes * sum(num or 0 for num in wanted.values())


def block_count(answer: Any, width: int, mlp_width: int, num_ranks: int, num_tokens: int,
                element_bytes: int) -> tuple[float, float]:
    """`answer` must be (parameters that a rank holds of one split block, bytes that it gives to all-reduces); returned.

    Cut are the weights, and the biases of maps that are cut by columns, (4 D^2 + 2 D M + 3 D + M) / R; whole are two
    norms and two biases, 6 D. Each of two sums is D numbers a token, forward and backward.
    """
    if not isinstance(answer, (tuple, list)) or len(answer) != 2:
        raise CheckFailed(f"return two numbers, parameters and bytes, not {type(answer).__name__}")
    weights, biases, whole = 4 * width**2 + 2 * width * mlp_width, 3 * width + mlp_width, 6 * width
    everything, num_bytes = weights + biases + whole, 4 * num_tokens * width * element_bytes
    return (number("the number of parameters", answer[0], (weights + biases) / num_ranks + whole, [
        (everything, "that is the whole block"),
        (everything / num_ranks,
         "not everything is cut: norms, and the biases of the maps that are cut by rows, are whole on every rank"),
        ((everything - 4 * width) / num_ranks + 4 * width,
         "the biases of the maps that are cut by rows are whole on every rank, as they are added to the whole sum"),
        ((everything - 2 * width) / num_ranks + 2 * width, "the norms are whole on every rank"),
        ((everything - 5 * width) / num_ranks + 5 * width,
         "one bias too much is cut: out and down add theirs to the whole sum, so both are whole"),
        (weights / num_ranks + biases + whole, "the biases of the maps that are cut by columns are cut with them"),
        ((weights + 3 * width) / num_ranks + mlp_width + whole, "the bias of up is cut as its outputs are"),
        ((weights + mlp_width) / num_ranks + 3 * width + whole,
         "the biases of q, k and v are cut as their outputs are"),
        ((weights + biases) / num_ranks + 4 * width,
         "2 D are missing: a block has two norms, and whole biases in out and down"),
        ((weights + biases) / num_ranks + 2 * width, "that is without the norms"),
        (weights / num_ranks + 4 * width, "that is without any biases"),
        (weights / num_ranks, "that is the weights alone: norms and biases are parameters too"),
    ]), number("the number of bytes", answer[1], num_bytes, [
        (num_bytes / 2, "that is half: there is one after attention and one after the MLP, and backward has as many"),
        (num_bytes / 4, "that is a single all-reduce: attention and MLP make one each, forward and backward"),
        (num_bytes / element_bytes, f"that counts numbers: each has {element_bytes} bytes"),
        (num_bytes / num_ranks, "every rank gives the whole activation, not a part of it"),
        (num_bytes * mlp_width / width, "what is added up is as wide as the block's output, not as the hidden layer"),
        (num_bytes * 2 * (num_ranks - 1) / num_ranks, "that is what a ring sends; asked for is what goes in"),
    ]))


def shard_shapes(rank: int, num_ranks: int, shards: Mapping[str, Any], whole: Mapping[str, Any],
                 layout: Mapping[str, int | None]) -> None:
    """A rank must hold a part of each parameter of `whole` that has the shape `layout` says, and no other parameter."""
    absent, more = [n for n in layout if n not in shards], [n for n in shards if n not in layout]
    if absent:
        has = ", ".join(shards) or "none at all"
        raise CheckFailed(f"rank {rank}'s module has no parameter {absent[0]}, it has {has}: keep the names of the "
                          "whole module, and each part as a parameter")
    if more:
        raise CheckFailed(f"rank {rank}'s module also holds {more[0]}, {tuple(shards[more[0]].shape)}: it "
                          f"should have {', '.join(layout)} and nothing else, or no memory is saved")
    for name, dim in layout.items():
        shape, theirs = tuple(shards[name].shape), dense(whole[name])
        if shape != _block(theirs, dim, rank, num_ranks).shape:
            raise CheckFailed(f"rank {rank}'s {name} {_why_shape(shape, dim, theirs, num_ranks)}")


def _check_shard(rank: int, name: str, dim: int | None, shard: Any, before: Sequence[Mapping[str, Any]]) -> None:
    """`shard` must be this rank's block of rank 0's weight."""
    num_ranks, theirs = len(before), [dense(weights[name]) for weights in before]
    want, got = _block(theirs[0], dim, rank, num_ranks), dense(shard)
    if agree(got, want):
        return
    if agree(got, _block(theirs[rank], dim, rank, num_ranks), want):
        raise CheckFailed(f"rank {rank}'s {name} is made from the rank's own weights: the ranks drew different ones, "
                          "so hand out rank 0's before you cut")
    for other in range(num_ranks):
        if dim is not None and agree(got, _block(theirs[0], dim, other, num_ranks), want):
            late = "; did you broadcast after cutting? Then every rank has rank 0's block" if other == 0 else ""
            raise CheckFailed(f"rank {rank}'s {name} is block {other}, which belongs to rank {other}: rank r keeps the "
                              f"r-th; otherwise what its columns give doesn't meet its rows{late}")
    strided = np.take(theirs[0], np.arange(rank, theirs[0].shape[dim or 0], num_ranks), axis=dim or 0)
    if dim is not None and agree(got, strided, want):
        raise CheckFailed(f"rank {rank}'s {name} takes indices of dim {dim} that lie {num_ranks} apart: it should be a "
                          "block in one piece (the rows of one head lie next to one another)")
    factor = times(got, want)
    if agree(got, factor * want, want):
        raise CheckFailed(f"rank {rank}'s {name} is {short(factor)} times what it should be: a part is cut out, "
                          "nothing in it changes")
    raise CheckFailed(f"rank {rank}'s {name} has the right shape, but it is not block {rank} of rank 0's: which "
                      "indices of which dim does it take, and of whose weights?")


def _why_shape(shape: tuple[int, ...], dim: int | None, whole: np.ndarray, num_ranks: int) -> str:
    if dim is None:
        return (f"has the shape {shape}, but it is needed whole, {whole.shape}: it is added to the whole sum, on every "
                "rank")
    if shape == whole.shape:
        return f"is whole, {shape}: a rank keeps one block of {num_ranks} of its dim {dim}"
    if whole.ndim == 2 and shape == _block(whole, 1 - dim, 0, num_ranks).shape:
        return (f"is cut along dim {1 - dim}, it should be dim {dim}: nn.Linear keeps (outputs, inputs), so a column "
                "split cuts dim 0 and a row split dim 1")
    return f"has the shape {shape}, its block has {_block(whole, dim, 0, num_ranks).shape}"


def _check_memory(rank: int, run: Mapping[str, Any]) -> None:
    for name, shard in run["shards"].items():
        if run["storage"][name] > dense(shard).nbytes:
            raise CheckFailed(f"rank {rank}'s {name} is right, but it is a view: it keeps all {run['storage'][name]} "
                              f"bytes of the whole tensor in memory for a part of {dense(shard).nbytes}; clone() the "
                              "part")


def _check_output(rank: int, output: Any, weights: Mapping[str, Any], whole: Mapping[str, Any],
                  parts: Sequence[Mapping[str, Any]], layout: Mapping[str, int | None],
                  hints: Mapping[str, Any], between: str) -> None:
    want = dense(whole["output"])
    got = held(rank, "the output", output, want.shape)
    bias = next(dense(weights[name]) for name, dim in layout.items() if dim is None)
    rows = np.stack([*(dense(part["output"]) for part in parts), np.broadcast_to(bias, want.shape)])
    same(f"rank {rank}'s output is wrong", got, want, want, lambda: _why_output(rank, got, rows, hints, between))


def _why_output(rank: int, got: np.ndarray, rows: np.ndarray, hints: Mapping[str, Any], between: str) -> str:
    """What is wrong with an output, from what the ranks' parts give, and the bias, in `rows`."""
    for hint, mistaken in hints.items():
        if agree(got, mistaken, got):
            return hint
    factors = multiples(rows.reshape(len(rows), -1), got)
    if factors is None:
        return f"it is no sum of what the ranks' parts give: {between}"
    own = is_own(factors[:-1], rank) and np.isclose(factors[-1], 1)
    return why_parts(rank, factors[:-1], factors[-1]) + " (identity_then_all_reduce adds nothing forward)" * bool(own)


def _check_gradient(rank: int, name: str, gradient: Any, want: np.ndarray, largest: np.ndarray, num_ranks: int) -> None:
    if gradient is None:
        raise CheckFailed(f"rank {rank} has no gradient for {name}: every rank uses all that it holds, or the first "
                          "step makes the ranks different")
    got = held(rank, f"the gradient of {name}", gradient, want.shape)
    same(f"the output is right, rank {rank}'s gradient of {name} is not", got, want, largest,
         lambda: _why_gradient(name, got, want, largest, num_ranks))


def _why_gradient(name: str, got: np.ndarray, want: np.ndarray, largest: np.ndarray, num_ranks: int) -> str:
    factor = times(got, want)
    if not agree(got, factor * want, largest):
        return ("on its way back from the output it meets something that changes it: which operator stands there, and "
                "what does that do backward?")
    if np.isclose(factor, num_ranks):
        return (f"{num_ranks} times too large: the gradient that comes back from the output is the same on all ranks, "
                "so nothing may add it up; the sum over the ranks hands it on as it is")
    return (f"{short(factor)} times what it should be: is something shared out among the ranks that each has whole? "
            f"Every rank uses its {name} once")


def _check_input_gradient(rank: int, gradient: Any, whole: Mapping[str, Any],
                          parts: Sequence[Mapping[str, Any]]) -> None:
    want = dense(whole["input_gradient"])
    if gradient is None:
        raise CheckFailed(f"rank {rank}: x gets no gradient: does what goes into your module reach the output?")
    got = held(rank, "the gradient of x", gradient, want.shape)
    same(f"the output and the parameters' gradients are right, rank {rank}'s gradient of x is not", got, want, want,
         lambda: _why_input_gradient(rank, got, parts))


def _why_input_gradient(rank: int, got: np.ndarray, parts: Sequence[Mapping[str, Any]]) -> str:
    factors = multiples(np.stack([dense(part["input_gradient"]).ravel() for part in parts]), got)
    if factors is None:
        return "it is no sum of what comes back through the ranks' parts: does all that uses x get it by one operator?"
    if is_own(factors, rank):
        return ("it is what comes back through the rank's own part. All ranks use x, so x goes in through the operator "
                "whose way back is an all-reduce")
    return why_parts(rank, factors)


def _block(whole: np.ndarray, dim: int | None, rank: int, num_ranks: int) -> np.ndarray:
    return whole if dim is None else np.split(whole, num_ranks, axis=dim)[rank]


def _phases(events: Sequence[Event]) -> list[list[Event]]:
    """What a rank communicated, cut at its barriers."""
    phases: list[list[Event]] = [[]]
    for event in events:
        if event.op == "barrier":
            phases.append([])
        elif event.kind in ("collective", "send", "recv"):
            phases[-1].append(event)
    return phases


def _check_phase(where: str, events: Sequence[Event], num: int, num_bytes: int) -> None:
    for event in events:
        if event.op != "all_reduce" or num == 0:
            raise CheckFailed(f"{where}: your code calls {event.op or event.kind}, {_why_needless(num)}")
    if len(events) > num:
        raise CheckFailed(f"{where}: {len(events)} all-reduces where {num} will do: add up what the ranks' parts give "
                          "once, at the end; and let x through its operator once, for all that use it")
    if len(events) < num:
        raise CheckFailed(f"{where}: {len(events)} all-reduces where {num} should be: what brings the ranks' parts "
                          "together?")
    for event in events:
        if event.num_bytes != num_bytes:
            raise CheckFailed(f"{where}: an all-reduce of {short(event.num_bytes or 0)} bytes, {short(num_bytes)} are "
                              "enough: send the sum itself, in its own dtype, and nothing beside it")


def _why_needless(num: int) -> str:
    if num == 0:
        return "and nothing has to be sent: each rank has all that its own part takes"
    return ("and one all-reduce of what the ranks' parts give is all: what goes into a cut by rows is cut already, so "
            "nothing is gathered or handed round before")
