"""L0: what a collective promises: what every rank holds before it, and what must be held at the end.

Contents are counts of shape (R, C, K): how often rank k's data is in chunk c of rank r (K = R). Counts tell whose data
a chunk holds, but not which of that rank's chunks it was: `source_chunk` says which it must be. Where one rank is
special it is rank 0, the root; where chunks belong to ranks, chunk c belongs to rank c (c mod N, if there are more
chunks than ranks). A new collective with a promise of its own is one more entry of `PROMISES`.
"""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

ROOT = 0
OfSize = Callable[[int, int], np.ndarray]  # (world_size, num_chunks) -> array


def owners(world_size: int, num_chunks: int) -> np.ndarray:
    """The rank that a ring reduce-scatter leaves each chunk complete on, and an all-gather takes it from, shape (C,).

    Chunk c starts on rank c, goes to the right, and is complete after N-1 steps, on rank c-1.
    """
    return (np.arange(num_chunks) - 1) % world_size


def _same_chunk(world_size: int, num_chunks: int) -> np.ndarray:
    return np.broadcast_to(np.arange(num_chunks), (world_size, num_chunks))


@dataclass(frozen=True)
class Promise:
    """The start and the goal of a collective, by world size and number of chunks.

    `start` and `goal` return counts (R, C, K); `where` returns which (rank, chunk) the goal is about, bool (R, C);
    `source_chunk` returns from which chunk of its owner the data there must come, ints (R, C).
    """

    name: str
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


def _data_of(rank_of_chunk: OfSize) -> OfSize:
    """Chunk c holds the data of rank `rank_of_chunk(...)[c]`, on every rank."""
    def goal(world_size: int, num_chunks: int) -> np.ndarray:
        of_chunk = np.eye(world_size, dtype=np.int32)[rank_of_chunk(world_size, num_chunks)]
        return np.broadcast_to(of_chunk, (world_size, num_chunks, world_size))
    return goal


def _root_of_each(world_size: int, num_chunks: int) -> np.ndarray:
    return np.full(num_chunks, ROOT)


def _rank_of_each(world_size: int, num_chunks: int) -> np.ndarray:
    return np.arange(num_chunks) % world_size


def _everywhere(world_size: int, num_chunks: int) -> np.ndarray:
    return np.ones((world_size, num_chunks), dtype=bool)


def _on_root(world_size: int, num_chunks: int) -> np.ndarray:
    return _everywhere(world_size, num_chunks) & (np.arange(world_size)[:, None] == ROOT)


def _owned(world_size: int, num_chunks: int) -> np.ndarray:
    return np.arange(world_size)[:, None] == owners(world_size, num_chunks)


def _own_chunks(world_size: int, num_chunks: int) -> np.ndarray:
    return np.arange(world_size)[:, None] == _rank_of_each(world_size, num_chunks)


def _chunk_for_this_rank(world_size: int, num_chunks: int) -> np.ndarray:
    """Rank r takes from everybody the chunk that belongs to it: an all-to-all transposes ranks and chunks."""
    first_of_its_block = np.arange(num_chunks) // world_size * world_size
    return np.arange(world_size)[:, None] + first_of_its_block


PROMISES = {promise.name: promise for promise in (
    Promise("all_reduce", _own_data, _all_data, _everywhere),
    Promise("reduce_scatter", _own_data, _all_data, _owned),
    Promise("all_gather", _own_data_where(_owned), _data_of(owners), _everywhere),
    Promise("broadcast", _own_data_where(_on_root), _data_of(_root_of_each), _everywhere),
    Promise("scatter", _own_data_where(_on_root), _data_of(_root_of_each), _own_chunks),
    Promise("gather", _own_data_where(_own_chunks), _data_of(_rank_of_each), _on_root),
    Promise("reduce", _own_data, _all_data, _on_root),
    Promise("all_to_all", _own_data, _data_of(_rank_of_each), _everywhere, _chunk_for_this_rank),
)}


def promised_by(name: str) -> str:
    """The promise that a schedule's name ends with ("ring_all_gather": "all_gather"); "all_reduce" if it has none."""
    fitting = [promise for promise in PROMISES if f"_{name}".endswith(f"_{promise}")]
    return max(fitting, key=len, default="all_reduce")  # the longest: "all_gather" ends with "gather" too
