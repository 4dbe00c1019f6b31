"""L3, lab 3: a ring all-reduce: what buffers hold after each half of it, what a run sends, what that costs.

Buffers are compared exactly, so the ranks' data must be whole numbers. Shapes: R ranks; `before` and `after` hold one
flat buffer per rank, (n,), equally long. Chunks are those of `tensor_split`.
"""
from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise, product
from math import ceil, log2
from typing import Any

import numpy as np

from book import cost
from book.checks.attribution import Attribution
from book.checks.formula import Formula
from book.checks.recordings import point_to_point
from book.checks.verdict import CheckFailed, before_and_after, refuse, require
from book.schedule import contents_fault
from book.trace import Trace
from book.words import listed

SUMMED = {  # a chunk that should hold the sum
    "nothing": "is all zeros: did you read the receive buffer before wait(), or never receive?",
    "own": "holds only what it held at the start: did you add before wait() had returned, or to another chunk than the "
           "received one?",
    "other": "holds only rank {other}'s data: was it copied instead of added? (A receive into the chunk itself "
             "copies.)",
    "unequal": "{fault}: {why}",
    "unknown": "holds neither a sum of the ranks' data for this chunk nor one for another chunk: was wrong data added?"}
TOO_OFTEN = "one step too many, or the wrong chunk sent"
DOUBLED = ("the receive took the chunk's place, and was then added to itself: receive into a tensor of its own, and "
           "add that to the chunk")
TOO_SELDOM = "was every step made, and the right chunk sent?"
FEWER_CHUNKS = ("there are fewer chunks than ranks: buffer.chunk(n) makes no empty pieces, so it makes fewer than n "
                "from a short buffer; tensor_split(n) always makes n")
GATHERED = {  # a chunk that should hold its owner's data
    "own": "is unchanged: rank {owner}'s chunk never arrived, or was not written into the buffer",
    "other": "holds what rank {other} had there, but rank {owner} is the chunk's owner",
    "added to own": "holds its own old data plus rank {owner}'s: an all-gather copies, it does not add",
    "unknown": "holds something that no rank had there: is the chunk that you receive the one that is sent?"}


@contextmanager
def chunks_in_words() -> Iterator[None]:
    """On a rank: add to an error about an index out of range what it means for a buffer cut into chunks."""
    try:
        yield
    except IndexError as error:
        # The error itself goes on, so that it still points to the line where it happened.
        error.args = (f"{error}: {FEWER_CHUNKS}",)
        raise


def reduce_scatter(before: Sequence[Any], after: Sequence[Any]) -> int:
    """Rank r's buffer must hold the sum of chunk r+1. Returns the sum over those chunks."""
    before, after = _moved(before, after)
    _check_mean(before, after)
    _check_first_chunk(before, after)
    owned = [((rank + 1) % len(after), buffer) for rank, buffer in enumerate(after)]
    for rank, (chunk, buffer) in enumerate(owned):
        _check_sum(rank, chunk, before, buffer)
    return round(sum(buffer[_chunks(before)[chunk]].sum() for chunk, buffer in owned))


def all_gather(before: Sequence[Any], after: Sequence[Any]) -> int:
    """Every rank's buffer must hold, as chunk c, what rank c-1 held there before. Returns the sum of one buffer."""
    before, after = _moved(before, after)
    chunks, num_ranks = _chunks(before), len(before)
    for shift in range(num_ranks - 1):
        owned = np.concatenate([before[(chunk + shift) % num_ranks][part] for chunk, part in enumerate(chunks)])
        refuse((after == owned).all(), f"every rank holds, as chunk 1, what rank {(1 + shift) % num_ranks} had there, "
               "but rank 0 is its owner: in step 0 rank r sends chunk r+1, which the reduce-scatter completed")
    for rank, chunk in np.ndindex(num_ranks, num_ranks):
        part, owner = chunks[chunk], (chunk - 1) % num_ranks
        if not np.array_equal(after[rank][part], before[owner][part]):
            found = Attribution(after[rank][part], before[:, part], np.arange(num_ranks) == owner, rank)
            raise CheckFailed(f"rank {rank} chunk {chunk} {found.explain(GATHERED, owner=owner)}")
    return round(after[0].sum())


def all_reduce(before: Sequence[Any], after: Sequence[Any]) -> int:
    """Every rank's buffer must hold the sum over ranks in every place. Returns the sum of one buffer."""
    before, after = _moved(before, after)
    _check_mean(before, after)
    expected, chunks = before.sum(axis=0), _chunks(before)
    num_ranks, length = before.shape
    right, tail = after == expected, length % num_ranks
    if right.all():
        return round(expected.sum())
    refuse(0 < tail < length and right[:, :-tail].all() and (after == before)[:, -tail:].all(),
           f"the last {tail} of {length} elements were left out: {length} is not a multiple of {num_ranks}, so some "
           "chunks must be longer by one (as tensor_split cuts)")
    complete = np.array([[row[part].all() for part in chunks] for row in right])
    refuse(num_ranks > 1 and (complete.sum(axis=1) == 1).all(),
           "every rank has just one complete chunk, as after the reduce-scatter: the all-gather, which brings the sums "
           "to the other ranks, is missing or came too early")
    refuse((after == _numbered_on(before)).all(), "the chunks are those of an all-gather whose steps go on from step "
           "N-1: it counts its own steps from 0")
    rank, chunk = np.argwhere(~complete)[0]
    raise CheckFailed(_why_not_summed(int(rank), int(chunk), before, after[rank]))


def neighbour_exchange(sent: Sequence[Any], received: Sequence[Any]) -> int:
    """Rank r must have received what rank r-1 sent. Returns the sum of what rank 0 received."""
    sent, received = before_and_after(sent, received)
    for rank, got in enumerate(received):
        left, right = (rank - 1) % len(sent), (rank + 1) % len(sent)
        if np.array_equal(got, sent[left]):
            continue
        require(got.any(), f"rank {rank} received nothing: its `incoming` is all zeros. Did you wait() for the "
                "receive?")
        refuse((got == sent[right]).all(), f"rank {rank} received from rank {right}, its right-hand neighbour, but the "
               f"data goes round the ring from left to right: receive from rank {left}")
        whose = next((other for other, data in enumerate(sent) if np.array_equal(got, data)), None)
        raise CheckFailed(f"rank {rank} did not receive what rank {left} sent" + (
            "" if whose is None else f", but holds rank {whose}'s data: each rank sends its own `outgoing`, not what "
            "it has received"))
    return round(received[0].sum())


def ring_traffic(trace: Trace, length: int, element_bytes: int, num_columns: int = 0) -> float:
    """Every rank must have sent 2(N-1) chunks of a buffer of `length` elements, all of them to the same neighbour.

    A rank may send 2(N-1)/N of the buffer, with chunks rounded up or down. If the buffer is a matrix, `num_columns` is
    the length of its rows. Returns the bytes that rank 0 sent.
    """
    world_size, num_bytes = trace.world_size, length * element_bytes
    if world_size == 1:
        return 0.0
    point_to_point(trace)
    sent = trace.message_bytes()
    num_messages = 2 * (world_size - 1)
    least, most = (num_messages * size * element_bytes for size in (length // world_size, -(-length // world_size)))
    busiest, laziest = int(np.argmax(sent)), int(np.argmin(sent))
    asked = f"a ring sends {num_messages / world_size:.2f} times"
    of_a_root = sent[busiest] >= (world_size - 1) * num_bytes and world_size > 2
    messages = [event.num_bytes or 0 for event in trace.of_kind("send")]
    refuse(num_columns and sent[busiest] > most and not any(size % (num_columns * element_bytes) for size in messages),
           f"every message is one or more whole rows of {num_columns} elements, because tensor_split cuts a matrix "
           "into rows. Cut by elements: buffer.view(-1) is the same memory as one row")
    require(sent[busiest] <= most, f"rank {busiest} sent {sent[busiest] / num_bytes:.2f} times the buffer, {asked}: "
            + ("that is the traffic of a root, or of whole buffers passed around; send one chunk a step" if of_a_root
               else "is a step made too often, or more than one chunk sent in a step?"))
    require(sent[laziest] >= least, f"rank {laziest} sent only {sent[laziest] / num_bytes:.2f} times the buffer, "
            f"{asked}: are some of its steps missing?")
    for rank in range(world_size):
        partners = sorted({event.peer for event in trace.of_kind("send") if event.rank == rank})
        require(len(partners) < 2,
                f"rank {rank} sent to ranks {listed(partners)}, but in a ring it sends to one neighbour only")
    return float(sent[0])


def ring_cost(answer: Any, trace: Trace, length: int, element_bytes: int) -> tuple[float, float]:
    """`answer` must be (rounds, bytes that each rank sends) of the ring all-reduce that `trace` recorded; returned."""
    sent = ring_traffic(trace, length, element_bytes)
    return _cost(answer, (trace.num_steps, sent), trace.world_size, length * element_bytes, element_bytes)


def own_ring_cost(answer: Any, world_size: int, num_bytes: int) -> tuple[float, float]:
    """`answer` must be (rounds, bytes that each rank sends) of a ring all-reduce with these numbers; returned."""
    rounds = 2 * (world_size - 1)
    right = rounds, rounds * num_bytes / world_size
    return _cost(answer, right, world_size, num_bytes, 4, " of your own ring, as `my_count` returns it,")


def _cost(answer: Any, right: tuple[float, float], world_size: int, num_bytes: int, element_bytes: int,
          of: str = "") -> tuple[float, float]:
    require(isinstance(answer, (tuple, list)) and len(answer) == 2,
            f"return two numbers, the rounds and the bytes that a rank sends, not {type(answer).__name__}")
    num_rounds, sent = right
    formula = Formula(num_rounds, [
        (sent, "that is the number of bytes: return the rounds first"),
        (world_size - 1, "that is the reduce-scatter alone, the all-gather takes as many"),
        (2 * num_rounds, "a rank sends and receives in the same round, so that is one round and not two"),
        (2 * world_size, "in each half the last contribution crosses N-1 links, not N"),
        (2 * ceil(log2(world_size)), "that is a tree's, whose messages go further in each round; in a ring "
         "data moves on by one rank in each round")])
    rounds = formula.require_right(f"the number of rounds{of}", answer[0])
    formula = Formula(sent, [
        (sent / 2, "that is the reduce-scatter alone, the all-gather sends as much again"),
        (2 * num_bytes, "that is the limit for many ranks; a rank never sends its last chunk"),
        (num_bytes, "that is the buffer once, but each of the two halves sends all of it except one chunk"),
        (num_bytes / world_size, "that is one chunk, but a rank sends one in each round"),
        (cost.root_sent_bytes(world_size, num_bytes),
         "that is the traffic of a root, which sends the whole buffer to each of the others"),
        (2 * sent, "that is what a rank sends and receives together, but only what it sends is asked for"),
        (sent * world_size, "that is what all ranks send together, or the whole buffer in every round"),
        (sent / element_bytes, f"that counts elements, but each has {element_bytes} bytes")])
    return rounds, formula.require_right(f"the number of bytes that a rank sends{of}", answer[1])


def bus_bandwidth(answer: Any, world_size: int, num_bytes: float, seconds: float) -> float:
    """`answer` must be the bus bandwidth, in bytes per second, of an all-reduce of `num_bytes`; returns it."""
    wanted = cost.bus_bandwidth_bytes_per_s("all_reduce", world_size, num_bytes, seconds)
    formula = Formula(wanted, [
        (num_bytes / seconds,
         "that is the algorithm bandwidth, bytes over seconds: multiply it by the share of the buffer that each link "
         "carries"),
        (wanted / 2, "the share is (N-1)/N for a reduce-scatter, and twice that for an all-reduce"),
        (wanted / 1e9, "that is in GB/s; leave it in bytes per second"),
        (wanted * 8, "that is in bits; leave it in bytes per second"),
        (1 / wanted, "that is seconds over bytes: return bytes over seconds"),
        (wanted / (2 * (world_size - 1) / world_size)**2, "the share is upside down: it is 2(N-1)/N"),
        (wanted * world_size, "each link carries 2(N-1)/N of the buffer; the division by N is missing"),
        (wanted * seconds, "divide by the seconds"),
        (wanted * seconds**2, "you have multiplied by the seconds: divide by them")])
    return formula.require_right("the bus bandwidth", answer)


def _chunks(buffers: np.ndarray) -> list[slice]:
    """The chunks of a buffer, cut as `tensor_split` and `array_split` do."""
    num_chunks, length = buffers.shape
    edges = np.cumsum([0] + [len(part) for part in np.array_split(np.arange(length), num_chunks)])
    return [slice(a, b) for a, b in pairwise(edges)]


def _moved(before: Sequence[Any], after: Sequence[Any]) -> tuple[np.ndarray, np.ndarray]:
    """The buffers as arrays; they must have kept their length, and something in them must have changed."""
    before, after = before_and_after(before, after)
    require(after.shape == before.shape,
            f"the buffers had {before.shape[1]} elements and now have {after.shape[1]}: work in place")
    refuse(len(before) > 1 and (before == after).all(),
           "every buffer is unchanged: did you receive at all, use the data only after wait(), and write into "
           "the memory that you were given? (x += y and x.copy_(y) do; x = x + y and chunks[i] = y replace "
           "it by another tensor)")
    return before, after


def _check_mean(before: np.ndarray, after: np.ndarray) -> None:
    mean = before.mean(axis=0)
    refuse(len(before) > 1 and mean.any() and np.allclose(after, mean),
           "your ranks hold the mean, but an all-reduce makes the sum (DDP divides by N afterwards)")


def _check_first_chunk(before: np.ndarray, after: np.ndarray) -> None:
    """The chunks that are complete must not be those that another first chunk leads to."""
    num_ranks, right = len(before), after == before.sum(axis=0)
    done = np.array([[row[part].all() for part in _chunks(before)] for row in right])
    for place in set(range(num_ranks)) - {1 % num_ranks}:
        chunks = [(rank + place) % num_ranks for rank in range(num_ranks)]
        refuse((done == (np.arange(num_ranks) == np.array(chunks)[:, None])).all(), f"rank 0 has the sum of chunk "
               f"{chunks[0]}, rank 1 that of chunk {chunks[1]}, and so on, but rank r must have that of chunk r+1: in "
               "step 0 rank r sends chunk r")


def _numbered_on(before: np.ndarray) -> np.ndarray:
    """What buffers hold if the all-gather goes on counting where the reduce-scatter ended, at step N-1."""
    num_ranks, chunks, held = len(before), _chunks(before), before.copy()
    for rank, (chunk, part) in product(range(num_ranks), enumerate(chunks)):
        held[rank, part] = sum(before[(chunk + i) % num_ranks, part] for i in range((rank - chunk) % num_ranks + 1))
    for step in range(num_ranks - 1, 2 * num_ranks - 2):
        sent = held.copy()
        for rank in range(num_ranks):
            part = chunks[(rank - step) % num_ranks]
            held[rank, part] = sent[rank - 1, part]
    return held


def _check_sum(rank: int, chunk: int, before: np.ndarray, buffer: np.ndarray) -> None:
    part = _chunks(before)[chunk]
    if not np.array_equal(buffer[part], before[:, part].sum(axis=0)):
        raise CheckFailed(_why_not_summed(rank, chunk, before, buffer))


def _why_not_summed(rank: int, chunk: int, before: np.ndarray, buffer: np.ndarray) -> str:
    where, chunks = f"rank {rank} chunk {chunk}", _chunks(before)
    found = Attribution(buffer[chunks[chunk]], before[:, chunks[chunk]], own=rank)
    counts = _counts(found)
    if counts is None and found.got.any():
        for other, place in enumerate(chunks):
            if other != chunk and _counts(Attribution(found.got, before[:, place])) is not None:
                return (f"{where} holds data that belongs in chunk {other}: the chunk that you receive is not the one "
                        "that is sent")
        return f"{where} {SUMMED['unknown']}"
    counts = np.zeros(len(before)) if counts is None else counts
    fault = contents_fault(counts, np.ones(len(counts)))
    return f"{where} " + found.explain(SUMMED, fault=fault, why=_why_counted(counts))


def _why_counted(counts: np.ndarray) -> str:
    """Why the ranks' data are in a chunk so often, by their numbers."""
    if np.count_nonzero(counts) == 1 and log2(max(counts)).is_integer() and max(counts) > 1:
        return DOUBLED
    return TOO_OFTEN if max(counts) > 1 else TOO_SELDOM


def _counts(found: Attribution) -> np.ndarray | None:
    """How often each rank's data is in it, if it is a sum of whole multiples of them."""
    whole = None if found.factors is None else np.rint(np.nan_to_num(found.factors))
    return whole if whole is not None and np.array_equal(whole @ found.rows, found.got) else None
