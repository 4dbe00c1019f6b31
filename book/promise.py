"""L0: what a collective promises: what every rank holds before it, and what must be held at the end.

Contents are counts of shape (R, C, K): how often rank k's data is in chunk c of rank r (K = R). A new collective with
a promise of its own is one more entry of `PROMISES`.
"""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Promise:
    """The start and the goal of a collective, by world size and number of chunks.

    `start` and `goal` return counts (R, C, K); `where` returns which (rank, chunk) the goal is about, bool (R, C).
    """

    name: str
    start: Callable[[int, int], np.ndarray]
    goal: Callable[[int, int], np.ndarray]
    where: Callable[[int, int], np.ndarray]


def owners(world_size: int, num_chunks: int) -> np.ndarray:
    """The rank that a ring reduce-scatter leaves each chunk complete on, and an all-gather takes it from, shape (C,).

    Chunk c starts on rank c, goes to the right, and is complete after N-1 steps, on rank c-1.
    """
    return (np.arange(num_chunks) - 1) % world_size


def _own_data(world_size: int, num_chunks: int) -> np.ndarray:
    ranks = np.arange(world_size)
    held = np.zeros((world_size, num_chunks, world_size), dtype=np.int32)
    held[ranks, :, ranks] = 1
    return held


def _owned_chunks(world_size: int, num_chunks: int) -> np.ndarray:
    return _own_data(world_size, num_chunks) * _owned(world_size, num_chunks)[..., None]


def _all_data(world_size: int, num_chunks: int) -> np.ndarray:
    return np.ones((world_size, num_chunks, world_size), dtype=np.int32)


def _data_of_owners(world_size: int, num_chunks: int) -> np.ndarray:
    of_chunk = np.eye(world_size, dtype=np.int32)[owners(world_size, num_chunks)]
    return np.broadcast_to(of_chunk, (world_size, num_chunks, world_size))


def _everywhere(world_size: int, num_chunks: int) -> np.ndarray:
    return np.ones((world_size, num_chunks), dtype=bool)


def _owned(world_size: int, num_chunks: int) -> np.ndarray:
    return np.arange(world_size)[:, None] == owners(world_size, num_chunks)


PROMISES = {promise.name: promise for promise in (
    Promise("all_reduce", _own_data, _all_data, _everywhere),
    Promise("reduce_scatter", _own_data, _all_data, _owned),
    Promise("all_gather", _owned_chunks, _data_of_owners, _everywhere),
)}


def promised_by(name: str) -> str:
    """The promise that a schedule's name ends with ("ring_all_gather": "all_gather"); "all_reduce" if it has none."""
    return next((promise for promise in PROMISES if name.endswith(promise)), "all_reduce")
