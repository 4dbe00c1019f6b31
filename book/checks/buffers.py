"""L3: what the ranks' buffers hold after a collective, against what they held before it.

Buffers may be tensors or arrays. They are compared exactly, in float64, so the ranks' data must be whole numbers, whose
sums do not depend on the order of additions. Shapes: R ranks; `before` and `after` hold one flat buffer per rank,
equally long.
"""
from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from book.checks.compare import flat
from book.checks.verdict import CheckFailed
from book.schedule import contents_fault


def reduce_scatter(before: Sequence[Any], after: Sequence[Any]) -> int:
    """Rank r's buffer must hold the sum of chunk r+1 (chunks as `tensor_split` cuts them).

    Returns the sum over those chunks. Raises CheckFailed naming the first rank and chunk that hold something else.
    """
    before, after = before_and_after(before, after)
    _check_moved(before, after)
    _check_mean(before, after)
    chunks = _chunks(before)
    total = 0.0
    for rank, buffer in enumerate(after):
        chunk = (rank + 1) % len(after)
        _check_sum(rank, chunk, chunks[chunk], before, buffer)
        total += buffer[chunks[chunk]].sum()
    return round(total)


def all_gather(before: Sequence[Any], after: Sequence[Any]) -> int:
    """Every rank's buffer must hold, as chunk c, what rank c-1 held there before. Returns the sum of one buffer."""
    before, after = before_and_after(before, after)
    chunks = _chunks(before)
    _check_moved(before, after)
    _check_owners(before, after, chunks)
    for rank, buffer in enumerate(after):
        for chunk, part in enumerate(chunks):
            owner = (chunk - 1) % len(before)
            if np.array_equal(buffer[part], before[owner][part]):
                continue
            raise CheckFailed(_why_not_gathered(rank, chunk, part, owner, before, buffer))
    return round(after[0].sum())


def all_reduce(before: Sequence[Any], after: Sequence[Any]) -> int:
    """Every rank's buffer must hold the sum over ranks in every place. Returns the sum of one buffer.

    Raises CheckFailed with the likeliest reason: a mean, a tail left out, a reduce-scatter without its all-gather, a
    chunk copied where it should be added, a contribution missing or counted twice, a result that is not in place.
    """
    before, after = before_and_after(before, after)
    _check_moved(before, after)
    _check_mean(before, after)
    expected = before.sum(axis=0)
    if np.array_equal(after, np.broadcast_to(expected, after.shape)):
        return round(expected.sum())
    _check_tail(before, after, expected)
    _check_gathered(after, expected, _chunks(before))
    for rank, buffer in enumerate(after):
        for chunk, part in enumerate(_chunks(before)):
            _check_sum(rank, chunk, part, before, buffer)
    raise CheckFailed("the ranks' buffers differ from the sum, but in no chunk: is the result of the same length?")


def neighbour_exchange(sent: Sequence[Any], received: Sequence[Any]) -> int:
    """Rank r must have received what rank r-1 sent. Returns the sum of what rank 0 received."""
    sent, received = before_and_after(sent, received)
    for rank in range(len(sent)):
        left, right = (rank - 1) % len(sent), (rank + 1) % len(sent)
        if np.array_equal(received[rank], sent[left]):
            continue
        if not received[rank].any():
            raise CheckFailed(f"rank {rank} received nothing: its `incoming` is all zeros; did you wait() for it?")
        if np.array_equal(received[rank], sent[right]):
            raise CheckFailed(f"rank {rank} received from rank {right}, its right-hand neighbour: the data goes round "
                              f"the ring from left to right, so receive from rank {left}")
        raise CheckFailed(f"rank {rank} did not receive what rank {left} sent")
    return round(received[0].sum())


def contributions(after: np.ndarray, before: np.ndarray) -> tuple[int, ...] | None:
    """How often each rank's data is in `after`, if it is a sum of whole multiples of them.

    `before` is (R, n) and `after` (n,): the multiples are the least-squares solution, and only an exact one counts;
    None when there is none, or when n < R leaves it open.
    """
    if after.size < len(before):
        return None
    multiples = np.rint(np.linalg.lstsq(before.T, after, rcond=None)[0])
    return tuple(int(m) for m in multiples) if np.allclose(multiples @ before, after, atol=1e-6) else None


def before_and_after(before: Sequence[Any], after: Sequence[Any]) -> tuple[np.ndarray, np.ndarray]:
    """Both as (R, n) arrays; raises ValueError for fractions, CheckFailed where a rank or a buffer is missing."""
    before, after = buffers_of(before), buffers_of(after)
    if not np.array_equal(before, np.rint(before)):
        raise ValueError("checks compare exactly: give the ranks whole numbers, whose sums are the same in any order")
    if len(before) != len(after):
        raise CheckFailed(f"there are {len(before)} ranks, but {len(after)} results")
    return before, after


def buffers_of(buffers: Sequence[Any]) -> np.ndarray:
    """A flat buffer per rank as one (R, n) array in float64; raises CheckFailed for None and unequal lengths."""
    arrays = []
    for rank, buffer in enumerate(buffers):
        if buffer is None:
            raise CheckFailed(f"rank {rank} returned None instead of its buffer")
        arrays.append(flat(buffer))
    lengths = {len(array) for array in arrays}
    if len(lengths) > 1:
        raise CheckFailed(f"the ranks' buffers differ in length: {sorted(lengths)}; they must keep the length they had")
    return np.stack(arrays)


def _chunks(buffers: np.ndarray) -> list[slice]:
    """The chunks of a buffer as `tensor_split` and `array_split` cut them."""
    num_chunks, length = buffers.shape
    edges = np.cumsum([0] + [len(part) for part in np.array_split(np.arange(length), num_chunks)])
    return [slice(a, b) for a, b in pairwise(edges)]


def _check_moved(before: np.ndarray, after: np.ndarray) -> None:
    if after.shape != before.shape:
        raise CheckFailed(f"the buffers had {before.shape[1]} elements and now have {after.shape[1]}: work in place")
    if len(before) > 1 and np.array_equal(before, after):
        raise CheckFailed("every buffer is as it was before: did you wait() for what you receive before you used it, "
                          "and write into the memory that you were given? (x += y and x.copy_(y) do; x = x + y and "
                          "chunks[i] = y put another tensor in its place)")


def _check_mean(before: np.ndarray, after: np.ndarray) -> None:
    mean = before.mean(axis=0)
    if len(before) > 1 and mean.any() and np.allclose(after, mean):
        raise CheckFailed("your ranks hold the mean, an all-reduce holds the sum (DDP divides by N afterwards)")


def _check_tail(before: np.ndarray, after: np.ndarray, expected: np.ndarray) -> None:
    """The classic one: chunks of length n // N leave the last n % N elements out."""
    num_ranks, length = before.shape
    tail = length % num_ranks
    whole = length - tail
    if tail and np.array_equal(after[:, whole:], before[:, whole:]) and whole and np.array_equal(
            after[:, :whole], np.broadcast_to(expected[:whole], (num_ranks, whole))):
        raise CheckFailed(f"the last {tail} of {length} elements were left out: {length} is not a multiple of "
                          f"{num_ranks}, so some chunks must be one longer (tensor_split cuts like that)")


def _check_gathered(after: np.ndarray, expected: np.ndarray, chunks: Sequence[slice]) -> None:
    complete = [[np.array_equal(buffer[part], expected[part]) for part in chunks] for buffer in after]
    if len(after) > 1 and all(sum(row) == 1 for row in complete):
        raise CheckFailed("every rank has just one chunk complete: that is the reduce-scatter; the all-gather that "
                          "carries the sums to the others is missing, or came too early")


def _check_owners(before: np.ndarray, after: np.ndarray, chunks: Sequence[slice]) -> None:
    """Everybody has the same, but it started from the wrong ranks."""
    for shift in range(len(before) - 1):
        owned = np.concatenate([before[(chunk + shift) % len(before)][part] for chunk, part in enumerate(chunks)])
        if np.array_equal(after, np.broadcast_to(owned, after.shape)):
            other = (1 + shift) % len(before)
            raise CheckFailed(f"every rank holds, as chunk 1, what rank {other} had there, but rank 0 is its owner: "
                              "in step 0 rank r sends chunk r+1, which the reduce-scatter completed")


def _check_sum(rank: int, chunk: int, part: slice, before: np.ndarray, buffer: np.ndarray) -> None:
    if not np.array_equal(buffer[part], before[:, part].sum(axis=0)):
        raise CheckFailed(f"rank {rank} chunk {chunk} " + _why_not_summed(rank, chunk, part, before, buffer))


def _why_not_summed(rank: int, chunk: int, part: slice, before: np.ndarray, buffer: np.ndarray) -> str:
    if not buffer[part].any():
        return "is all zeros: did you read the receive buffer before wait(), or never receive?"
    counts = contributions(buffer[part], before[:, part])
    if counts is None:
        return _whose_chunk(chunk, part, before, buffer)
    holders = [r for r, times in enumerate(counts) if times]
    if len(holders) == 1 and counts[holders[0]] == 1:
        if holders[0] == rank:
            return ("holds only what it held at the start: was the sum made before wait() had returned, or in another "
                    "chunk than the one received?")
        return f"holds rank {holders[0]}'s data alone: was it copied where it should be added?"
    double = max(counts) > 1
    why = "one step too many, or the wrong chunk sent" if double else "was every step made, and the right chunk sent?"
    return f"{contents_fault(np.array(counts), np.ones(len(counts)))}: {why}"


def _whose_chunk(chunk: int, part: slice, before: np.ndarray, buffer: np.ndarray) -> str:
    """Data of another place in the buffer, or nothing that these ranks ever held."""
    for other, place in enumerate(_chunks(before)):
        if other != chunk and place.stop - place.start == part.stop - part.start:
            if contributions(buffer[part], before[:, place]) is not None:
                return f"holds data that belongs in chunk {other}: the chunk you receive is not the one you send"
    return "holds neither a sum of the ranks' data for that chunk nor another chunk's: was wrong data added?"


def _why_not_gathered(rank: int, chunk: int, part: slice, owner: int, before: np.ndarray, buffer: np.ndarray) -> str:
    where, own = f"rank {rank} chunk {chunk}", before[rank][part]
    if np.array_equal(buffer[part], own):
        return f"{where} is as it was before: rank {owner}'s chunk never arrived, or was not written into the buffer"
    if np.array_equal(buffer[part], own + before[owner][part]):
        return f"{where} holds its own old data plus rank {owner}'s: an all-gather copies, it does not add"
    for other in range(len(before)):
        if np.array_equal(buffer[part], before[other][part]):
            return f"{where} holds what rank {other} had there, but rank {owner} is the chunk's owner"
    return f"{where} holds something that no rank had there: is the chunk you receive the one that is sent?"
