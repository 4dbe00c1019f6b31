"""L3: whose data ranks hold after a collective that only copies: broadcast, all-gather, all-to-all.

Everything is compared exactly, so random whole numbers tell whose they are. Shapes: R ranks, n elements; `before` and
`after` have an entry per rank. Out-of-place collectives fill a tensor of R rows, in order of the ranks they come from.
"""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from book.checks.buffers import before_and_after, buffers_of
from book.checks.compare import multiples
from book.checks.traffic import point_to_point
from book.checks.verdict import CheckFailed
from book.trace import Trace


def broadcast(before: Sequence[Any], after: Sequence[Any], root: int) -> int:
    """Every rank's buffer, (n,), must hold what `root` held before. Returns the sum of one buffer."""
    before, after = before_and_after(before, after)
    if after.shape != before.shape:
        raise CheckFailed(f"the buffers had {before.shape[1]} elements and now have {after.shape[1]}: work in place")
    for other in range(len(before)):
        if other != root and (after == before[other]).all():
            raise CheckFailed(f"every rank holds rank {other}'s data, but the root is rank {root}: it is an argument, "
                              "and any rank can be it")
    if not np.array_equal(after[root], before[root]):
        raise CheckFailed(f"rank {root} is the root, and its buffer has changed: a root only sends")
    for rank, buffer in enumerate(after):
        if not np.array_equal(buffer, before[root]):
            raise CheckFailed(f"rank {rank} {_why_not_the_roots(rank, root, before, buffer)}")
    return round(before[root].sum())


def received_once(trace: Trace, num_bytes: int, root: int) -> int:
    """In a broadcast of `num_bytes` made of sends and receives no rank may receive more than that, the root less.

    Returns the bytes that the root sent.
    """
    if trace.world_size == 1:
        return 0
    point_to_point(trace)
    arrived = trace.of_kind("recv")
    received = np.bincount(arrived.array("rank"), weights=arrived.array("num_bytes"), minlength=trace.world_size)
    busiest = int(np.argmax(received))
    if received[busiest] > num_bytes:
        raise CheckFailed(f"rank {busiest} received {received[busiest] / num_bytes:.2g} times the buffer: it needs one "
                          "copy, so only a rank that has the root's data sends, and once to each")
    laziest = min(set(range(trace.world_size)) - {root}, key=lambda rank: received[rank])
    if received[laziest] < num_bytes:
        raise CheckFailed(f"rank {laziest} received {received[laziest]:g} bytes, and the buffer has {num_bytes:g}: "
                          "does it come whole, in its own dtype?")
    if received[root] >= num_bytes:
        raise CheckFailed(f"rank {root} is the root and received the whole buffer: who sends to a rank that has it?")
    return round(trace.sent_bytes()[root])


def all_gather_rows(before: Sequence[Any], after: Sequence[Any]) -> int:
    """Row s of every rank's `after`, (R, n), must be rank s's `before`, (n,). Returns the sum over one rank's rows."""
    before = buffers_of(before)
    after = _rows(after, before.shape[1])
    right = (after == before).all(axis=(1, 2))
    if right.all():
        return round(before.sum())
    if right[0] and not right[1:].any() and not after[1:].any():
        raise CheckFailed("only rank 0 has the rows: that is a gather; in an all-gather every rank gets them")
    if (after[:, 0] == before).all() and len(before) > 1:
        raise CheckFailed("every rank has its own numbers in row 0: the rows are in the order in which you handled "
                          "them, and belong in the order of the ranks")
    rank = int(np.argmin(right))
    raise CheckFailed(f"rank {rank}: {_why_not_gathered(rank, before, after[rank])}")


def all_to_all_rows(before: Sequence[Any], after: Sequence[Any]) -> int:
    """Row s of rank r's `after` must be row r of rank s's `before`, both (R, n). Returns the sum of rank 0's rows."""
    length = buffers_of(before).shape[1] // len(before)
    before, after = _rows(before, length), _rows(after, length)
    for rank, rows in enumerate(after):
        if not rows.any():
            raise CheckFailed(f"rank {rank}: `incoming` is as it was, all zeros: fill the tensor that you were given "
                              "(incoming[s] = ... does, incoming = ... makes a new one), after wait()")
    for rank, source in np.ndindex(len(before), len(before)):
        if not np.array_equal(after[rank, source], before[source, rank]):
            raise CheckFailed(f"rank {rank}'s row {source} {_why_not_exchanged(rank, source, before, after)}")
    return round(after[0].sum())


def rows_sent(trace: Trace, row_bytes: int) -> int:
    """In an all-to-all made of sends and receives a rank sends each other rank one row of `row_bytes`.

    Twice as much is let pass, for rows may be passed on; less is not. Returns the bytes that rank 0 sent.
    """
    point_to_point(trace)
    sent, wanted = trace.sent_bytes(), (trace.world_size - 1) * row_bytes
    busiest, laziest = int(np.argmax(sent)), int(np.argmin(sent))
    if sent[laziest] < wanted:
        raise CheckFailed(f"rank {laziest} sent {sent[laziest]:g} bytes, and its rows for the others have {wanted:g}: "
                          "does it send all of them, whole, in their own dtype?")
    if sent[busiest] > 2 * wanted:
        raise CheckFailed(f"rank {busiest} sent {sent[busiest] / row_bytes:g} rows, and has {trace.world_size - 1} for "
                          "the others: is it an all-gather, of which each rank picks its part?")
    return round(sent[0])


def _rows(buffers: Sequence[Any], length: int) -> np.ndarray:
    """Every rank's rows as one array (R, R, n)."""
    flat, num_ranks = buffers_of(buffers), len(buffers)
    if flat.shape[1] != num_ranks * length:
        raise CheckFailed(f"a rank returned {flat.shape[1]} elements, but {num_ranks} rows of {length} are "
                          f"{num_ranks * length}")
    return flat.reshape(num_ranks, num_ranks, length)


def _owner(buffer: np.ndarray, before: np.ndarray) -> int | None:
    """The first rank whose data `buffer` is, or None."""
    same = (before == buffer).all(axis=tuple(range(1, before.ndim)))
    return int(np.argmax(same)) if same.any() else None


def _why_not_the_roots(rank: int, root: int, before: np.ndarray, buffer: np.ndarray) -> str:
    if not buffer.any():
        return "holds zeros: was `buffer` filled from a receive that had not been waited for?"
    owner = _owner(buffer, before)
    if owner == rank:
        return ("still holds its own data: does it receive, into `buffer` itself and no other tensor, and is the "
                "receive waited for?")
    if owner is not None:
        return f"holds rank {owner}'s data: the root is rank {root}, and nobody else's data may travel"
    arrived = int((buffer == before[root]).sum())
    if arrived and not np.array_equal(buffer, before[root]) and set(buffer) <= {*before[root], *before[rank]}:
        return f"holds the root's data in {arrived} of {buffer.size} places: the whole buffer must come"
    if np.array_equal(buffer, before[rank] + before[root]):
        return "holds its own data plus the root's: a broadcast replaces, it does not add"
    return "holds something that is no rank's data"


def _why_not_gathered(rank: int, before: np.ndarray, rows: np.ndarray) -> str:
    if not rows.any():
        return ("`out` is as it was, all zeros: fill the tensor that you were given (out[s] = ... does, out = ... "
                "makes a new one)")
    owners = [_owner(row, before) for row in rows]
    foreign = {owner for source, owner in enumerate(owners) if source != rank}
    if len(rows) > 2 and len(foreign) == 1 and None not in foreign:
        return (f"all rows that came hold rank {foreign.pop()}'s numbers: if they share one tensor, the last message "
                "filled it; let every irecv have its own row. In a ring, do you pass on what came, or your own row "
                "again?")
    source = next(s for s, owner in enumerate(owners) if owner != s)
    if not rows[source].any() and source == rank:
        return f"row {rank}, its own, is all zeros: nobody sends you that, copy `mine` there"
    if not rows[source].any():
        return f"row {source} is all zeros: is there a receive from rank {source}, kept and waited for?"
    if owners[source] is not None:
        return f"row {source} holds rank {owners[source]}'s numbers: what comes from rank s belongs in row s"
    if multiples(before, rows[source]) is not None:
        return f"row {source} holds a sum of several ranks' numbers: an all-gather keeps them apart"
    return f"row {source} holds something that no rank had"


def _why_not_exchanged(rank: int, source: int, before: np.ndarray, after: np.ndarray) -> str:
    """What rank `rank` has in row `source` in place of row `rank` of rank `source`."""
    row, wanted = after[rank, source], f"rank {source}'s row {rank}"
    if not row.any():
        if source == rank:
            return "is its own, and all zeros: nobody sends you that, copy it from `outgoing`"
        return f"is all zeros: is there a receive from rank {source}, kept and waited for?"
    found = np.argwhere((before == row).all(axis=2)).tolist()
    if not found:
        return f"holds something that no rank had; {wanted} belongs there"
    owner, place = found[0]
    if (owner, place) == (rank, source):
        return (f"holds this rank's own numbers for rank {source}, and {wanted} belongs there: was anything exchanged, "
                "or did a row come back that was overwritten before it was sent?")
    if owner == place == source:
        return f"holds rank {source}'s row {source}, which it keeps for itself: send row d to rank d"
    if place == rank:
        return f"holds what came from rank {owner}: what comes from rank s belongs in row s"
    return f"holds rank {owner}'s row {place}, and {wanted} belongs there: which row goes to whom?"
