"""L0: what a collective promises: what every rank holds before it, and what must be held at the end.

Contents are counts of shape (R, C, K): how often rank k's data is in chunk c of rank r (K = R). Counts tell whose data
a chunk holds, but not which of that rank's chunks it was: `source_chunk` says which it must be. Where one rank is
special, the root, it is rank 0, if no other is named. Where chunks belong to ranks, chunk c belongs to rank c (c mod N,
if there are more chunks than ranks); in a reduce-scatter and an all-gather to rank c - 1, as a ring leaves it. A new
kind of promise is one more entry of `_promises`.
"""
from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

ROOT = 0
OfSize = Callable[[int, int], np.ndarray]  # (world_size, num_chunks) -> array


def _same_chunk(world_size: int, num_chunks: int) -> np.ndarray:
    return np.broadcast_to(np.arange(num_chunks), (world_size, num_chunks))


@dataclass(frozen=True)
class Promise:
    """The start and the goal of a collective, by world size and number of chunks.

    `says` is the goal in words. `start` and `goal` return counts (R, C, K); `where` returns which (rank, chunk) the
    goal is about, bool (R, C); `source_chunk` from which chunk of its owner the data there must come, ints (R, C).
    """

    name: str
    says: str
    start: OfSize
    goal: OfSize
    where: OfSize
    source_chunk: OfSize = _same_chunk


def _own_data(world_size: int, num_chunks: int) -> np.ndarray:
    ranks = np.arange(world_size)
    held = np.zeros((world_size, num_chunks, world_size), dtype=np.int32)
    held[ranks, :, ranks] = 1
    return held


def _own_data_where(where: OfSize) -> OfSize:
    return lambda *size: _own_data(*size) * where(*size)[..., None]


def _all_data(world_size: int, num_chunks: int) -> np.ndarray:
    return np.ones((world_size, num_chunks, world_size), dtype=np.int32)


def _everywhere(world_size: int, num_chunks: int) -> np.ndarray:
    return np.ones((world_size, num_chunks), dtype=bool)


def _after_a_ring(world_size: int, num_chunks: int) -> np.ndarray:
    """Chunk c starts on rank c, goes to the right, and is complete after N-1 steps: on rank c-1."""
    return np.arange(world_size)[:, None] == (np.arange(num_chunks) - 1) % world_size


def _on_their_ranks(world_size: int, num_chunks: int) -> np.ndarray:
    return np.arange(world_size)[:, None] == np.arange(num_chunks) % world_size


def _data_of(owned: OfSize) -> OfSize:
    """Every chunk holds the data of the rank that owns it, on whichever rank it is."""
    def goal(world_size: int, num_chunks: int) -> np.ndarray:
        owner_of_chunk = owned(world_size, num_chunks).T.astype(np.int32)
        return np.broadcast_to(owner_of_chunk, (world_size, num_chunks, world_size))
    return goal


def _chunk_for_this_rank(world_size: int, num_chunks: int) -> np.ndarray:
    """Rank r takes from everybody the chunk that belongs to it: an all-to-all transposes ranks and chunks."""
    first_of_its_block = np.arange(num_chunks) // world_size * world_size
    return np.arange(world_size)[:, None] + first_of_its_block


def _promises(root: int, owned: OfSize) -> dict[str, Promise]:
    """`root` is the rank that is special, `owned` the (rank, chunk) pairs of a reduce-scatter or an all-gather."""
    def root_data(world_size: int, num_chunks: int) -> np.ndarray:
        return _own_data(world_size, num_chunks)[[root] * world_size]

    def on_root(world_size: int, num_chunks: int) -> np.ndarray:
        return _everywhere(world_size, num_chunks) & (np.arange(world_size)[:, None] == root)

    complete, roots_data = "every rank holds every chunk complete", _own_data_where(on_root)
    theirs, of_theirs = _own_data_where(_on_their_ranks), _data_of(_on_their_ranks)
    return {promise.name: promise for promise in (
        Promise("all_reduce", complete, _own_data, _all_data, _everywhere),
        Promise("reduce_scatter", "every chunk is complete on one rank", _own_data, _all_data, owned),
        Promise("all_gather", complete, _own_data_where(owned), _data_of(owned), _everywhere),
        Promise("broadcast", f"every rank holds rank {root}'s data", roots_data, root_data, _everywhere),
        Promise("scatter", f"every rank holds its chunk of rank {root}'s data", roots_data, root_data, _on_their_ranks),
        Promise("gather", f"rank {root} holds a chunk of every rank's data", theirs, of_theirs, on_root),
        Promise("reduce", f"rank {root} holds every chunk complete", _own_data, _all_data, on_root),
        Promise("all_to_all", "every rank holds a chunk of every rank's data", _own_data, of_theirs, _everywhere,
                _chunk_for_this_rank),
    )}


PROMISES = _promises(ROOT, _after_a_ring)


def variants(name: str, world_size: int) -> Iterator[Promise]:
    """The promise called `name` as `PROMISES` has it, then as other programs keep it.

    With any rank as its root; or, for a reduce-scatter and an all-gather, with chunk c on rank c, as torch has it.
    """
    yield PROMISES[name]
    if name in ("reduce_scatter", "all_gather"):
        yield _promises(ROOT, _on_their_ranks)[name]
    elif name in ("broadcast", "scatter", "gather", "reduce"):
        yield from (_promises(root, _after_a_ring)[name] for root in range(1, world_size))
