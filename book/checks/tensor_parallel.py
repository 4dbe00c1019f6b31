"""L3, labs 5 and 7: a linear map that is cut over ranks, and modules made of such maps.

What a rank holds in place of a sum of the ranks' parts is attributed to these parts.

Shapes: B examples, I inputs, O outputs. Weights are (O, I), as nn.Linear keeps them.
"""
from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np

from book.checks.attribution import Attribution, is_zero
from book.checks.verdict import (
    ROUNDED, SIX_DIGITS, CheckFailed, agree, all_but_rank_0, dense, held, identical, likeliest, magnitude,
    refuse, require, same, short, times,
)
from book.words import listed

# The message for a product whose sides don't fit, if nothing is known of the weight.
PRODUCT = ("the weight is cut along the wrong dim, or not at all: nn.Linear keeps it as (outputs, inputs), so a column "
           "of the product is a row of the weight (dim 0), and inputs are dim 1. Or you cut x again, which is already "
           "what the rank needs")
TRANSPOSED = "transposed it would fit. F.linear transposes the weight that it is given, @ multiplies with it as it is"
ONE_OFF = ("a block is a number too short or too long. Of n numbers rank r of R has those from r n/R up to, not "
           "including, (r + 1) n/R, and a slice leaves out its end")
UNLIKE = ("you add a cut tensor to a whole one, or to one that is cut along another dim. A bias has one number for "
          "each output, so cut it where the outputs are cut")
PIECES = ". (torch.split takes the size of a piece, chunk the number of pieces)"
MEANINGS = {  # torch's messages about tensors that don't fit, as patterns, and what they mean if a map is cut
    r"cannot be multiplied \(\d+x(\d+) and (\d+)x":
        "the input has {0} numbers in a row, but what it is multiplied with takes {1}: {product}",
    r"expanded size of the tensor \((\d+)\) must match the existing size \((\d+)\)":
        "the bias has {1} numbers, but your outputs have {0}. A bias has one number for each output: cut it where the "
        "outputs are cut, and keep it whole where they are whole",
    r"tensor a \((\d+)\) must match the size of tensor b \((\d+)\)":
        "{0} numbers meet {1}: {unlike}",
    "invalid for input of size|don't multiply up to":
        "a rank holds a part, but this is the shape of the whole: the rank has H/R heads, as wide as before. Use -1 to "
        "let torch count them",
    "same dtype": "all inputs are float64, but nn.Linear makes float32 weights unless you pass a dtype",
    "out of bounds": "an index is too large for the table: rank r's block of V/R tokens begins at r V/R, and the "
                     "places in it count from there. For a target outside the block, clamp the place, and use 0 "
                     "instead of what you find",
    r"start \(\d+\) \+ length \(\d+\) exceeds":
        "the block ends past the last number: of n numbers, rank r of R has n/R, from r n/R on",
    "Dimension out of range":
        "there is no such dim: a weight has the dims 0 and 1, a bias has only dim 0",
    "'int' object has no attribute": "this is a number where a tensor should be: are two arguments exchanged?",
    "NoneType": "something here is None: dist.all_reduce works in place and returns None, so use the tensor that you "
                "gave it. So does a function of yours that has no return"}
PARTS = {  # a sum of the ranks' parts
    "own": "this is only the rank's own part of a sum: the all-reduce is missing",
    "mean": "this is the mean of the {size} ranks' parts, but parts of a sum must be added up, not averaged",
    "times num_ranks": "this is {num_ranks} times the sum: is it all-reduced twice?",
    "picked": "the ranks' parts are combined by the operation {reduction}, but parts of a sum must be added up, which "
              "all_reduce does by default",
    "missing ranks": "the part of rank {absent} is missing: does every rank's part go into the sum?",
    "unequal": "the ranks' parts are in it {weights} times, but each should be in it once"}
INPUT_GRADIENT = PARTS | {
    "own": "it is only what comes back through the rank's own part. All ranks use x, so pass x through the operator "
           "whose backward is an all-reduce",
    "unknown": "it is not a sum of what comes back through the ranks' parts: does x go through the operator once, for "
               "everything that uses it?"}


@contextmanager
def left_alone(function: str, **given: Any) -> Iterator[None]:
    """On a rank: the tensors that are `given` to a learner's function, by name, must be the same after it."""
    before = {name: dense(tensor).copy() for name, tensor in given.items()}
    yield
    for name, tensor in given.items():
        require(identical(tensor, before[name]), f"{function} has changed the {name} that it was given, which the "
                "caller may still need. Operations whose names end in _, and -= and the like, work in place")


@contextmanager
def shapes_in_words(product: str = PRODUCT, unlike: str = UNLIKE) -> Iterator[None]:
    """On a rank: raise CheckFailed for torch's errors about shapes, with what they mean if a map is cut.

    `product` is the message for a product whose sides don't fit, `unlike` that for a sum or difference. Errors that are
    not about shapes stay as they are.
    """
    try:
        yield
    except (RuntimeError, IndexError, TypeError, AttributeError) as error:
        if sides := re.search(r"cannot be multiplied \(\d+x(\d+) and (\d+)x(\d+)", str(error)):
            length, taken, width = map(int, sides.groups())
            product = _why_no_product(length, taken, width, product)
        found = [(re.search(said, str(error)), meaning) for said, meaning in MEANINGS.items()]
        words = {"product": product, "unlike": unlike}
        meant = next((meaning.format(*said.groups(), **words) for said, meaning in found if said), "")
        if not meant:
            raise
        # With its traceback, the report still points to the line where the error happened.
        raise CheckFailed(f"{type(error).__name__}: {error}: {meant}").with_traceback(error.__traceback__) from None


def _why_no_product(length: int, taken: int, width: int, otherwise: str) -> str:
    """Why rows of `length` numbers don't meet a matrix (taken, width)."""
    return likeliest((width == length, TRANSPOSED), (abs(length - taken) == 1, ONE_OFF),
                     (True, otherwise + PIECES * (taken < length)))


# One map

def column_outputs(outputs: Sequence[Any], x_BI: Any, weight_OI: Any, bias_O: Any) -> float:
    """Rank r must hold the r-th block of the columns of x weight^T + bias, (B, O/R) on each of R ranks.

    Returns the sum of the absolute values of all blocks.
    """
    bias = dense(bias_O)
    whole = dense(x_BI) @ dense(weight_OI).T + bias
    size = whole.shape[1] // len(outputs)
    for rank, output in enumerate(outputs):
        where = f"column_linear, rank {rank}"
        if getattr(output, "shape", None) == whole.shape and len(outputs) > 1:
            advice = "don't gather them" if agree(output, whole) else "cut the outputs of the weight, not its inputs"
            raise CheckFailed(f"{where} returns all {whole.shape[1]} outputs, but it should keep only the {size} of "
                              f"its part of the weight: {advice}")
        got = held(rank, "the output of column_linear", output, (len(whole), size))
        same(where, got, whole[:, rank * size:][:, :size], whole, partial(_why_not_columns, rank, got, whole, bias))
    return magnitude(whole)


def row_outputs(outputs: Sequence[Any], x_BI: Any, weight_OI: Any, bias_O: Any) -> float:
    """Every rank must hold all of x weight^T + bias, of which rank r had the r-th block of x's columns.

    Returns the sum of its absolute values.
    """
    num_ranks, (x, weight, bias) = len(outputs), map(dense, (x_BI, weight_OI, bias_O))
    whole = x @ weight.T + bias
    got = [held(rank, "the output of row_linear", output, whole.shape) for rank, output in enumerate(outputs)]
    wrong = [rank for rank in range(num_ranks) if not agree(got[rank], whole)]
    refuse(wrong and all_but_rank_0(wrong, num_ranks), "row_linear: only rank 0 holds the whole output, but every rank "
           "must end with it. reduce gives the sum to one rank, all_reduce to all; add the bias on all ranks too")
    for rank in wrong:
        same(f"row_linear, rank {rank}", got[rank], whole, whole,
             partial(_why_not_rows, rank, got[rank], x, weight, bias, num_ranks))
    return magnitude(whole)


def computed(num_flops: Sequence[float], whole_flops: float) -> None:
    """Each of R ranks may make up to 1/R of the `whole_flops` that column_linear takes in one process."""
    for rank, made in enumerate(num_flops):
        much = "the whole product" if made == whole_flops else f"{short(made / whole_flops)} of the product"
        require(made <= whole_flops / len(num_flops), f"column_linear: rank {rank} computes {much}, but its share is "
                f"1/{len(num_flops)}: cut the weight and multiply with the part")


def _why_not_columns(rank: int, got: np.ndarray, whole: np.ndarray, bias: np.ndarray) -> str:
    size, num_columns, first = got.shape[1], whole.shape[1], rank * got.shape[1]
    found = _columns(got, whole)
    if found is None:
        off = got - (whole - bias)[:, first:first + size]
        if _columns(got, whole - bias) is not None:
            return "the bias is missing: in a column split it is cut like the outputs"
        if np.allclose(off, off[:1]):
            return "the product is right, but the bias is not: cut it like the outputs, into blocks in rank order"
        return ("this is not a block of columns of x weight^T + bias: which part of the weight does the rank multiply "
                "with?")
    if found == list(range(found[0], found[0] + size)) and found[0] % size == 0:
        return (f"this is block {found[0] // size} of the columns, which belongs to rank {found[0] // size}: rank r "
                "must hold the r-th block")
    if found == list(range(rank, num_columns, num_columns // size)):
        return (f"these are columns {listed(found)}, but each rank needs one contiguous block, here columns {first} to "
                f"{first + size - 1}")
    return f"these are columns {listed(found)}, but the rank's are {first} to {first + size - 1}"


def _columns(got: np.ndarray, whole: np.ndarray) -> list[int] | None:
    """Which columns of `whole` those of `got` are; None if some column is not among them."""
    same = [[agree(column, other, whole) for other in whole.T] for column in got.T]
    return [row.index(True) for row in same] if all(map(any, same)) else None


def _why_not_rows(rank: int, got: np.ndarray, x: np.ndarray, weight: np.ndarray, bias: np.ndarray,
                  num_ranks: int) -> str:
    pieces, blocks = np.split(x, num_ranks, axis=1), np.split(weight, num_ranks, axis=1)
    crossed = [piece @ block.T for piece in pieces for block in blocks]
    whole_bias = np.broadcast_to(bias, got.shape)
    if said := _why_not_summed(rank, got, crossed[::num_ranks + 1], whole_bias):
        return said
    factors = Attribution(got, [*crossed, whole_bias]).factors
    if factors is None:
        if agree(got, sum(a @ weight[:, r::num_ranks].T for r, a in enumerate(pieces)) + bias, x @ weight.T):
            return (f"each rank takes inputs of the weight that lie {num_ranks} apart, but its part of x is a "
                    "contiguous block: cut both alike")
        return ("this is not a sum of products of x's blocks with the weight's: cut dim 1 of the weight into "
                "contiguous blocks in rank order, multiply, add up over the ranks, then add the bias")
    piece, block = next(pair for pair in np.argwhere(~is_zero(factors[:-1].reshape(num_ranks, num_ranks)))
                        if pair[0] != pair[1])
    return (f"block {piece} of x's columns meets block {block} of the weight's: rank r must multiply its part of x "
            "with the r-th block of the weight's dim 1")


def _why_not_summed(rank: int, got: np.ndarray, parts: Sequence[np.ndarray], bias: np.ndarray) -> str | None:
    """What is wrong with a sum of the ranks' parts and a bias, or with a choice among them; None if it is neither."""
    factors = Attribution(got, [*parts, bias]).factors
    if factors is None:
        picked = Attribution(got - bias, parts)
        return picked.explain(PARTS) if any(name == "picked" for name, _ in picked.patterns()) else None
    found = Attribution(got - factors[-1] * bias, parts, own=rank, counts={"num_ranks": len(parts)})
    if found.is_right() and np.isclose(factors[-1], len(parts)):
        return (f"the bias is in it {len(parts)} times, because every rank adds it to its part before the parts are "
                "added up: add it once, after the all-reduce")
    if found.is_right():
        much = "not in it" if is_zero(factors[-1]) else f"in it {short(factors[-1])} times"
        return f"the parts are added up correctly, but the bias is {much}: every rank must end with it once"
    return found.explain(PARTS)


# A module

def split_module(runs: Sequence[Mapping[str, Any]], before: Sequence[Mapping[str, Any]], whole: Mapping[str, Any],
                 parts: Sequence[Mapping[str, Any]], layout: Mapping[str, int | None],
                 hints: Mapping[str, Any] = {}, between: str = "what does forward do between the two cuts?") -> float:
    """R ranks that split a module must compute, forward and backward, what one process does with rank 0's weights.

    A run has `shards` and `gradients` by parameter name, `storage`, the bytes of memory that each parameter holds on
    to, `output` and `input_gradient`. `before[rank]` are the whole weights that a rank has drawn. `whole` has `output`,
    `input_gradient` and `gradients` of one process, `parts[rank]` the output, without the last bias, and the input
    gradient that go through that rank's part alone. `layout` maps each parameter to the dim that is cut, None for one
    that stays whole. `hints` maps messages to wrong outputs, `between` is the message for any other one.
    Returns the sum of the absolute values of output and input gradient.
    """
    _check_shards(runs, before, layout)
    bias = next(dense(before[0][name]) for name, dim in layout.items() if dim is None)
    outputs, want = [dense(part["output"]) for part in parts], dense(whole["output"])
    for rank, run in enumerate(runs):
        got = held(rank, "the output", run["output"], want.shape)
        if not agree(got, want):  # a slip may change the output in the sixth digit only, so it comes before `same`
            raise CheckFailed(f"rank {rank}'s output is wrong: " + _why_output(
                rank, got, want, outputs, np.broadcast_to(bias, want.shape), hints,
                _why_unlike_parts(run["gradients"], between)))
    _check_gradients(runs, whole, layout)
    _check_input_gradients(runs, dense(whole["input_gradient"]), [dense(part["input_gradient"]) for part in parts])
    return magnitude(whole["output"]) + magnitude(whole["input_gradient"])


def shard_shapes(rank: int, num_ranks: int, shards: Mapping[str, Any], whole: Mapping[str, Any],
                 layout: Mapping[str, int | None]) -> None:
    """A rank must hold a part of each parameter of `whole`, in the shape that `layout` says, and no other parameter."""
    for name in layout:
        require(name in shards, f"rank {rank}'s module has no parameter {name}, but {listed(shards) or 'none at all'}: "
                "keep the names of the whole module, and make each part a parameter")
    for name in shards:
        require(name in layout, f"rank {rank}'s module also holds {name}, {tuple(shards[name].shape)}, but it should "
                f"have only {listed(layout)}, or no memory is saved")
    for name, dim in layout.items():
        shape, theirs = tuple(shards[name].shape), dense(whole[name])
        if shape != _block(theirs, dim, rank, num_ranks).shape:
            raise CheckFailed(f"rank {rank}'s {name} {_why_shape(shape, dim, theirs, num_ranks)}")


def _check_shards(runs: Sequence[Mapping[str, Any]], before: Sequence[Mapping[str, Any]],
                  layout: Mapping[str, int | None]) -> None:
    """Each rank must hold its block of rank 0's weights, and not the memory of more than that."""
    for rank, run in enumerate(runs):
        shard_shapes(rank, len(runs), run["shards"], before[rank], layout)
        for name, dim in layout.items():
            _check_shard(rank, name, dim, run["shards"][name], before)
    for rank, run in enumerate(runs):
        for name, shard in run["shards"].items():
            require(run["storage"][name] <= dense(shard).nbytes, f"rank {rank}'s {name} is right, but it is a view: it "
                    f"keeps all {run['storage'][name]} bytes of the whole tensor in memory for a part of "
                    f"{dense(shard).nbytes}: clone() the part")


def _check_shard(rank: int, name: str, dim: int | None, shard: Any, before: Sequence[Mapping[str, Any]]) -> None:
    """`shard` must be this rank's block of rank 0's weight."""
    num_ranks, theirs, head = len(before), [dense(weights[name]) for weights in before], f"rank {rank}'s {name}"
    want, got = _block(theirs[0], dim, rank, num_ranks), dense(shard)
    if agree(got, want):
        return
    refuse(agree(got, _block(theirs[rank], dim, rank, num_ranks), want), f"{head} is made from the rank's own weights, "
           "which differ between ranks: broadcast rank 0's before you cut")
    for other in range(num_ranks) if dim is not None else ():
        late = ". Did you broadcast after cutting? Then every rank has rank 0's block" if other == 0 else ""
        refuse(agree(got, _block(theirs[0], dim, other, num_ranks), want), f"{head} is block {other}, which belongs to "
               f"rank {other}: rank r must keep the r-th, or the outputs of its columns don't meet its rows{late}")
    strided = np.take(theirs[0], np.arange(rank, theirs[0].shape[dim or 0], num_ranks), axis=dim or 0)
    refuse(dim is not None and agree(got, strided, want), f"{head} takes indices of dim {dim} that lie {num_ranks} "
           "apart, but it should be a contiguous block (the rows of one head are neighbours)")
    factor = times(got, want)
    refuse(agree(got, factor * want, want),
           f"{head} is {short(factor)} times what it should be: cutting must not change any number")
    raise CheckFailed(f"{head} has the right shape, but it is not block {rank} of rank 0's: which indices of which dim "
                      "does it take, and of whose weights?")


def _why_shape(shape: tuple[int, ...], dim: int | None, whole: np.ndarray, num_ranks: int) -> str:
    if dim is None:
        return (f"has the shape {shape}, but must be whole, {whole.shape}: it is added to the whole sum, on every rank")
    return likeliest(
        (shape == whole.shape, f"is whole, {shape}, but a rank must keep one block of {num_ranks} along dim {dim}"),
        (whole.ndim == 2 and shape == _block(whole, 1 - dim, 0, num_ranks).shape, f"is cut along dim {1 - dim}, but "
         f"should be along dim {dim}: nn.Linear keeps (outputs, inputs), so a column split cuts dim 0 and a row split "
         "dim 1"),
        (True, f"has the shape {shape}, but its block has {_block(whole, dim, 0, num_ranks).shape}"))


def _why_output(rank: int, got: np.ndarray, want: np.ndarray, parts: Sequence[np.ndarray], bias: np.ndarray,
                hints: Mapping[str, Any], between: str) -> str:
    for hint, mistaken in hints.items():
        if agree(got, mistaken, got):
            return hint
    if agree(got, want, tolerance=SIX_DIGITS):
        return ROUNDED
    said = _why_not_summed(rank, got, parts, bias) or f"it is not a sum of what the ranks' parts give: {between}"
    return said + " (identity_then_all_reduce adds nothing forward)" * (said == PARTS["own"])


def _why_unlike_parts(gradients: Mapping[str, Any], between: str) -> str:
    """The question to ask of an output that is no sum of parts: about what has no gradient, or else `between`."""
    idle = [name for name, gradient in gradients.items() if gradient is None]
    some = 0 < len(idle) < len(gradients)
    return f"does it use {listed(idle)}? Nothing there gets a gradient, while other parameters do" if some else between


def _check_gradients(runs: Sequence[Mapping[str, Any]], whole: Mapping[str, Any],
                     layout: Mapping[str, int | None]) -> None:
    num_ranks = len(runs)
    # The gradient of the bias of k is 0 up to rounding: attention does not change if all keys are shifted alike.
    largest = np.array(max(np.abs(dense(gradient)).max() for gradient in whole["gradients"].values()))
    for name, dim in layout.items():
        for rank, run in enumerate(runs):
            want = _block(dense(whole["gradients"][name]), dim, rank, num_ranks)
            require(run["gradients"][name] is not None, f"rank {rank} has no gradient for {name}: every rank must use "
                    "all parameters that it holds")
            got = held(rank, f"the gradient of {name}", run["gradients"][name], want.shape)
            blocks = [_block(dense(whole["gradients"][name]), dim, other, num_ranks) for other in range(num_ranks)]
            mixed = dim == 0 and agree(got, np.sum(blocks, axis=0), largest)
            same(f"the output is right, but rank {rank}'s gradient of {name} is not", got, want, largest,
                 partial(_why_gradient, name, got, want, largest, num_ranks, mixed))


def _why_gradient(name: str, got: np.ndarray, want: np.ndarray, largest: np.ndarray, num_ranks: int,
                  mixed: bool) -> str:
    factor = times(got, want)
    return likeliest(
        (mixed, "it is the sum of those of all ranks' blocks, whose outputs differ: identity_then_all_reduce belongs "
         "before the map, on x, which all ranks have alike, and not on what comes out of the map"),
        (not agree(got, factor * want, largest), "something on the way back from the output changes it: which operator "
         "is there, and what does it do in backward?"),
        (np.isclose(factor, num_ranks), f"{num_ranks} times too large: the gradient that comes back from the output is "
         "the same on all ranks, so don't add it up; the backward of the sum over ranks passes it on unchanged"),
        (True, f"{short(factor)} times what it should be: do you divide something among the ranks that each has whole? "
         f"Every rank uses its {name} once"))


def _check_input_gradients(runs: Sequence[Mapping[str, Any]], want: np.ndarray, backs: Sequence[np.ndarray]) -> None:
    """Each rank's x must get the gradient `want`, the sum of `backs`, what comes back through each rank's part."""
    for rank, run in enumerate(runs):
        require(run["input_gradient"] is not None,
                f"rank {rank}: x gets no gradient: does what goes into your module reach the output?")
        got = held(rank, "the gradient of x", run["input_gradient"], want.shape)
        same(f"the output and the parameters' gradients are right, but rank {rank}'s gradient of x is "
             "not", got, want, want,
             partial(Attribution(got, backs, own=rank, counts={"num_ranks": len(runs)}).explain, INPUT_GRADIENT))


def _block(whole: np.ndarray, dim: int | None, rank: int, num_ranks: int) -> np.ndarray:
    return whole if dim is None else np.split(whole, num_ranks, axis=dim)[rank]
