"""L3, lab 8: which rank has which tokens and how much it computes, heads exchanged for tokens, and what is sent.

Shapes: B sequences, H heads, T tokens, width K; whole queries, keys and values are (B, H, T, K).
"""
from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from book.checks.formula import Formula, Slips, told
from book.checks.ring_attention import Cut
from book.checks.verdict import CheckFailed, dense, held, magnitude, refuse, require, same, short
from book.cost import context_parallel_sent_bytes
from book.trace import Trace


# Who computes how much

def zigzag_positions(got: Sequence[Any], num_tokens: int) -> None:
    """Rank r of N must have chunks r and 2N-1-r of 2N, in any order."""
    n = len(got)
    chunks = np.arange(num_tokens).reshape(2 * n, -1)
    _positions(got, num_tokens, [chunks[[rank, -1 - rank]] for rank in range(n)], [
        (np.arange(num_tokens).reshape(n, -1), "this is one contiguous chunk for each rank: the last rank has the most "
         "to do"),
        ([chunks[[rank, rank + n]] for rank in range(n)], "the second chunks run in the same order as the first, so "
         "the last rank has the later ones of both. Go through them backwards"),
        (_striped(n, num_tokens), "the tokens are dealt out one by one. Here a rank has two chunks"),
        ([np.sort(np.concatenate([np.arange(one, num_tokens, 2 * n) for one in (rank, 2 * n - 1 - rank)]))
          for rank in range(n)], "single tokens are dealt out, back and forth. Here a rank has two chunks"),
        ([chunks[[rank]] for rank in range(n)], "the late chunk is missing")])


def striped_positions(got: Sequence[Any], num_tokens: int) -> None:
    """Rank r of N must have the tokens r, r + N, r + 2N, ..., in any order."""
    n = len(got)
    chunks = np.arange(num_tokens).reshape(2 * n, -1)
    _positions(got, num_tokens, _striped(n, num_tokens), [
        (np.arange(num_tokens).reshape(n, -1), "this is one contiguous chunk for each rank: the last rank has the most "
         "to do"),
        ([chunks[[rank, -1 - rank]] for rank in range(n)], "this is the zigzag order, an early and a late chunk. In "
         "this copy the tokens are dealt out one by one")])


def _striped(num_ranks: int, num_tokens: int) -> list[np.ndarray]:
    return [np.arange(rank, num_tokens, num_ranks) for rank in range(num_ranks)]


def _positions(got: Sequence[Any], num_tokens: int, want: Any, slips: Slips) -> None:
    for own in got:
        require(hasattr(own, "shape"), f"own_positions returns a {type(own).__name__}: return one tensor with all "
                "positions of the rank, such as torch.cat of its chunks")
    found = [np.sort(dense(own).ravel()) for own in got]
    for rank, (own, due) in enumerate(zip(found, want)):
        if not np.array_equal(own, np.sort(np.ravel(due))):
            said = next((said for ranks, said in slips
                         if all(np.array_equal(a, np.sort(np.ravel(b))) for a, b in zip(found, ranks))), "")
            counts = np.bincount(np.concatenate(found).astype(int), minlength=num_tokens)
            odd = np.flatnonzero(counts != 1)
            said = said or (f"the token at {odd[0]} is on {counts[odd[0]]} ranks: each is on one" if len(odd) else
                            f"rank {rank} has other tokens than it should")
            raise CheckFailed(f"{num_tokens} tokens on {len(found)} ranks: {said}. Rank {rank} has "
                              f"{own.astype(int).tolist()}")


def scores_computed(got: Any, own: Any, num_tokens: int, case: str) -> int:
    """`got` must be how many keys all queries at these positions see together; returns it."""
    places = dense(own)
    size = len(places)
    return round(Formula(float((places + 1).sum()), [
        (float(places.sum()), "each token also sees itself"),
        (size * (size + 1) / 2, "this counts the rank's own keys alone: its queries see all keys before them, whoever "
         "has these"),
        (float((num_tokens - places).sum()), "this counts the keys from each query on: a query sees itself and those "
         "before it"),
        (float((num_tokens - places - 1).sum()), "this counts the keys after each query: it sees those before it, and "
         "itself"),
        (float(size * num_tokens), "this counts what the mask hides as well"),
        (float(size * size), "this is as if each query saw the rank's own keys, all of them"),
        (float(places.max() + 1), "this is for one query: add up all of them"),
        (float(num_tokens * (num_tokens + 1) / 2), "this is the whole sequence's: a rank has only the rows of its own "
         "queries"),
    ]).require_right(f"{case}: the number of scores", got))


# Heads for tokens

def exchanged(got: Sequence[Any], whole: Any, to: str, case: str) -> float:
    """Each rank must have all tokens of its heads (`to` "heads"), or all heads of its tokens ("tokens").

    `whole` is (B, H, T, K) of all ranks. Returns the sum of the absolute values.
    """
    full, n = dense(whole), len(got)
    heads, tokens = (np.split(full, n, dim) for dim in (1, 2))
    given, want = (tokens, heads) if to == "heads" else (heads, tokens)
    cut, join = (1, 2) if to == "heads" else (2, 1)
    for rank, result in enumerate(got):
        where = f"{case}, rank {rank}"
        shape = tuple(getattr(result, "shape", ()))
        refuse(shape == given[rank].shape and shape != want[rank].shape, f"{where}: the shape {shape} is as before. "
               f"Cut along dim {cut}, send each rank its piece, join what arrives along dim {join}")
        refuse(len(shape) == 4 and shape != want[rank].shape, f"{where}: the shape is {shape}, and should be "
               f"{want[rank].shape}: cut along dim {cut}, join along dim {join}. Are heads and tokens exchanged?")
        found = held(rank, "what it returns", result, want[rank].shape)
        same(where, found, want[rank], full, partial(_why_not_exchanged, found, given, rank, cut, join))
    return magnitude(full)


def _why_not_exchanged(found: np.ndarray, given: Sequence[np.ndarray], rank: int, cut: int, join: int) -> str:
    n, what = len(given), {1: "heads", 2: "tokens"}
    arrived = [np.split(x, n, cut)[rank] for x in given]
    blind = [x.reshape(n, *arrived[0].shape)[rank] for x in given]
    dealt = [np.take(x, range(rank, x.shape[cut], n), cut) for x in given]
    slips = [
        (np.stack(arrived).reshape(found.shape), f"the right pieces arrive, but are not joined along dim {join}: they "
         "lie one after the other, and view or reshape only reads that memory in another shape. Use torch.cat"),
        (np.concatenate(blind, join), f"the pieces are not cut along dim {cut}: view or reshape to (N, ...) cuts what "
         "lies first in memory, which is the batch. Use chunk and stack"),
        (np.stack(arrived, 1).reshape(found.shape), "the right pieces arrive, but view or reshape joins dims that are "
         f"neighbours: bring the dim of the ranks before dim {join} of a piece first, or use torch.cat"),
        (np.stack(blind).reshape(found.shape), f"pieces are neither cut along dim {cut} nor joined along dim {join}: "
         "view and reshape do not move anything. Use chunk, stack and cat"),
        (np.concatenate(dealt, join), f"the {what[cut]} are dealt out one by one: rank r gets the r-th block of "
         "neighbours"),
        (np.concatenate(arrived[::-1], join), "the pieces are joined in the reverse order of ranks"),
        (np.concatenate([np.split(given[rank], n, cut)[one] for one in range(n)], join), "these are the rank's own "
         "pieces: nothing has come from other ranks. all_to_all_single(output, input) writes into its first argument")]
    return told(found, slips, f"these are not all {what[join]} of the rank's {what[cut]}, in the order of the ranks")


def ulysses_outputs(got: Sequence[Any], q: Any, k: Any, v: Any, case: str) -> float:
    """Each rank must have the causal attention of its tokens, in contiguous chunks, in all heads."""
    cut = Cut(q, k, v, np.split(np.arange(dense(q).shape[2]), len(got)))
    for rank, output in enumerate(got):
        right = cut.right(rank)
        want = cut.attend(rank, right)[0]
        found = held(rank, "its outputs", output, want.shape)
        slips = [(cut.attend(rank, [(o, o, None) for o, *_ in right])[0], "there is no mask: is_causal=True"),
                 (cut.attend(rank, right[:1])[0], "a token sees only those on its own rank: attend between the two "
                  "exchanges, where all tokens are there")]
        same(f"{case}, rank {rank}", found, want, want, partial(told, found, slips, "to_heads and to_tokens are "
             "right, but these are not the outputs of the rank's tokens: exchange q, k and v, attend, and exchange "
             "once more"))
    return sum(map(magnitude, got))


def exchanges(trace: Trace, num_bytes: int) -> None:
    """Each rank may call all-to-alls alone, of six times `num_bytes` together: one each way, and four in `ulysses`."""
    for rank in range(trace.world_size):
        made = [event for event in trace.of_rank(rank) if event.kind == "collective" and event.op != "barrier"]
        for event in made:
            refuse(event.op != "all_to_all", f"the results are right, but rank {rank} calls {event.op}, which gives "
                   "every rank more than it needs: in an all-to-all a rank gets its own part alone")
        much = sum(event.num_bytes or 0 for event in made) / num_bytes
        require(much <= 6, f"the results are right, but rank {rank} exchanges {short(much)} tensors of its tokens, and "
                "6 are enough: one in to_heads, one in to_tokens, and in ulysses q, k, v and the outputs")


# What it sends

def ring_bytes(got: Any, num_ranks: int, key_bytes: float) -> float:
    """`got` must be what a rank sends forward and backward in a ring; returns it."""
    n, k = num_ranks, key_bytes
    return Formula(sum(context_parallel_sent_bytes("ring", n, 0, k)), [
        (2 * (n - 1) * k, "this is forward alone"),
        ((4 * n - 2) * k, "this is backward alone"),
        (6 * n * k, "keys and values make N - 1 hops each way: what would come in the last one is there already"),
        ((6 * n - 2) * k, "in one of the two passes keys and values make N hops. N - 1 bring them to every rank"),
        (6 * (n - 1) * k, "the gradients make one hop more than keys and values: the last one takes them home"),
        (4 * (n - 1) * k, "the gradients of keys and values travel too, with them"),
        ((3 * n - 2) * k, "keys travel, and values do as well: each hop sends both"),
        (3 * (2 * n - 1) * k, "forward has N - 1 hops, not N"),
        ((6 * n - 4) * k / n, "each rank passes on whole blocks: its own keys, then those of others, N - 1 times"),
        ((6 * n - 4) * k * n, "this is what all ranks send together"),
    ]).require_right("the number of bytes that a rank sends in the ring", got)


def ulysses_bytes(got: Any, num_ranks: int, query_bytes: float, key_bytes: float) -> float:
    """`got` must be what a rank sends forward and backward where heads are exchanged for tokens; returns it."""
    n, q, k = num_ranks, query_bytes, key_bytes
    share = (n - 1) / n
    return Formula(sum(context_parallel_sent_bytes("ulysses", n, q, k)), [
        (2 * share * (q + k), "this is one way: backward exchanges as much as forward"),
        (4 * (q + k), "a rank keeps its own piece: it sends (N - 1)/N of what it has"),
        (2 * share * (q + 2 * k), "queries, keys and values are exchanged, and so are the outputs, which are as large "
         "as the queries"),
        (4 * (n - 1) * (q + k), "a rank sends each of the others a different piece, 1/N of what it has: not all of it "
         "to everyone"),
        (6 * share * (q + k), "each way there are four exchanges: two as large as the queries, two as large as the "
         "keys"),
        (8 * share * q, "keys and values may have fewer heads than queries, so they are smaller"),
        (4 * share * (q + k) * n, "this is what all ranks send together"),
    ]).require_right("the number of bytes that a rank sends in Ulysses", got)
