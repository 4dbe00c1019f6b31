"""L1: links, and the closed forms of what a collective or a pipeline takes on them.

Symbols in the formulas: n bytes, p ranks, latency alpha (s), beta = 1 / bandwidth (s per byte), gamma (s per byte
added).
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from book.factors import BUS_FACTORS


@dataclass(frozen=True)
class Link:
    """A link that takes `latency_s + num_bytes / bandwidth_bytes_per_s` for a message; adding a byte takes
    `reduce_s_per_byte`. Raises ValueError for a negative latency or a bandwidth that is not positive."""

    latency_s: float
    bandwidth_bytes_per_s: float
    reduce_s_per_byte: float = 0.0

    def __post_init__(self) -> None:
        if not self.bandwidth_bytes_per_s > 0:
            raise ValueError(f"bandwidth_bytes_per_s must be positive, not {self.bandwidth_bytes_per_s}")
        if not (self.latency_s >= 0 and self.reduce_s_per_byte >= 0):
            raise ValueError("latency_s and reduce_s_per_byte can't be negative: "
                             f"{self.latency_s}, {self.reduce_s_per_byte}")

    def transfer_s(self, num_bytes: float) -> float:
        """Seconds that one message of `num_bytes` takes."""
        return self.latency_s + num_bytes / self.bandwidth_bytes_per_s

    def reduce_s(self, num_bytes: float) -> float:
        """Seconds that adding `num_bytes` takes."""
        return num_bytes * self.reduce_s_per_byte


def broadcast_s(world_size: int, num_bytes: float, link: Link) -> float:
    """ceil(lg p) (alpha + n beta): a binomial tree (thakur2005)."""
    return (world_size - 1).bit_length() * link.transfer_s(num_bytes)


def reduce_s(world_size: int, num_bytes: float, link: Link) -> float:
    """ceil(lg p) (alpha + n beta + n gamma): a binomial tree (thakur2005).

    Exact for a power of two or gamma = 0; otherwise a parent may add one child's data while it receives the next, and
    this is an upper bound.
    """
    return (world_size - 1).bit_length() * (link.transfer_s(num_bytes) + link.reduce_s(num_bytes))


def scatter_s(world_size: int, num_bytes: float, link: Link) -> float:
    """(p-1) alpha + (p-1)/p n beta: the root's p-1 chunks leave through its one link, one after the other.

    A binomial tree would need ceil(lg p) alpha only, for the same beta term (thakur2005).
    """
    return (world_size - 1) * link.transfer_s(num_bytes / world_size)


def gather_s(world_size: int, num_bytes: float, link: Link) -> float:
    """(p-1) alpha + (p-1)/p n beta: as `scatter_s`, into the root."""
    return scatter_s(world_size, num_bytes, link)


def all_to_all_s(world_size: int, num_bytes: float, link: Link) -> float:
    """(p-1) alpha + (p-1)/p n beta on an even p: p-1 exchanges of one chunk (thakur2005, "pairwise exchange").

    In place, an odd p takes p rounds instead of p-1, for in each of them one rank has no partner; p = 1 takes none.
    """
    num_rounds = world_size - 1 + world_size % 2 if world_size > 1 else 0
    return num_rounds * link.transfer_s(num_bytes / world_size)


def ring_reduce_scatter_s(world_size: int, num_bytes: float, link: Link) -> float:
    """(p-1) alpha + (p-1)/p n beta + (p-1)/p n gamma (thakur2005)."""
    chunk_bytes = num_bytes / world_size
    return (world_size - 1) * (link.transfer_s(chunk_bytes) + link.reduce_s(chunk_bytes))


def ring_all_gather_s(world_size: int, num_bytes: float, link: Link) -> float:
    """(p-1) alpha + (p-1)/p n beta (thakur2005): as `scatter_s`, for a chunk leaves each rank in each of p-1 steps."""
    return scatter_s(world_size, num_bytes, link)


def ring_all_reduce_s(world_size: int, num_bytes: float, link: Link) -> float:
    """2(p-1) alpha + 2(p-1)/p n beta + (p-1)/p n gamma (patarasuk2009)."""
    return ring_reduce_scatter_s(world_size, num_bytes, link) + ring_all_gather_s(world_size, num_bytes, link)


def hierarchical_all_reduce_s(num_nodes: int, ranks_per_node: int, num_bytes: float, link: Link) -> float:
    """2(k+g-2) alpha + 2(p-1)/p n beta + (p-1)/p n gamma for k nodes of g ranks, p = k g, on equal links.

    A ring all-reduce of the buffer inside each node, and between its two halves one of n/g bytes across nodes.
    """
    inside_s = ring_all_reduce_s(ranks_per_node, num_bytes, link)
    return inside_s + ring_all_reduce_s(num_nodes, num_bytes / ranks_per_node, link)


def parameter_server_all_reduce_s(world_size: int, num_bytes: float, link: Link) -> float:
    """2(p-1)(alpha + n beta): both phases go through the root's one link, one message after the other.

    Adding is taken to be no slower than receiving (gamma <= beta + alpha/n), so that only the last addition shows.
    """
    last_addition_s = link.reduce_s(num_bytes) if world_size > 1 else 0.0
    return 2 * (world_size - 1) * link.transfer_s(num_bytes) + last_addition_s


def tree_all_reduce_s(world_size: int, num_bytes: float, link: Link) -> float:
    """ceil(lg p) (2 alpha + 2 n beta + n gamma): a binomial tree up and down (thakur2005), exact as `reduce_s` is."""
    return reduce_s(world_size, num_bytes, link) + broadcast_s(world_size, num_bytes, link)


def halving_doubling_all_reduce_s(world_size: int, num_bytes: float, link: Link) -> float:
    """2 lg p alpha + 2(p-1)/p n beta + (p-1)/p n gamma for a power of two (rabenseifner2004, thakur2005).

    On any other number of ranks the folding adds 2(alpha + n beta) + n gamma around the largest power of two.
    """
    num_core = 1 << (world_size.bit_length() - 1)
    moved_bytes = (num_core - 1) / num_core * num_bytes
    core_s = (2 * (num_core.bit_length() - 1) * link.latency_s + 2 * moved_bytes / link.bandwidth_bytes_per_s
              + link.reduce_s(moved_bytes))
    if num_core == world_size:
        return core_s
    return core_s + 2 * link.transfer_s(num_bytes) + link.reduce_s(num_bytes)


def fit_ring_link(world_size: int, sizes: Sequence[float], seconds: Sequence[float]) -> Link:
    """The link whose ring all-reduce time fits measured times best: least squares in the relative error.

    `sizes` are buffers in bytes, `seconds` what each took; additions count as bandwidth. Raises ValueError when the
    times say nothing about latency and bandwidth (fewer than two sizes, or times that fall as sizes grow).
    """
    steps = 2 * (world_size - 1)
    model = np.array([[steps, ring_sent_bytes(world_size, size)] for size in sizes]) / np.array(seconds)[:, None]
    (latency_s, s_per_byte), *_ = np.linalg.lstsq(model, np.ones(len(sizes)), rcond=None)
    if len(set(sizes)) < 2 or s_per_byte <= 0:
        raise ValueError("these times don't determine a link: give at least two sizes, with times that grow")
    return Link(max(float(latency_s), 0.0), 1 / float(s_per_byte))


def ring_sent_bytes(world_size: int, num_bytes: float) -> float:
    """Bytes that every rank of a ring all-reduce sends: 2(p-1)/p n, the least possible (patarasuk2009)."""
    return BUS_FACTORS["all_reduce"](world_size) * num_bytes


def root_sent_bytes(world_size: int, num_bytes: float) -> float:
    """Bytes that the root of a gather-and-broadcast sends, and also receives: (p-1) n."""
    return (world_size - 1) * num_bytes


def pipeline_bubble(num_ranks: int, num_micro_batches: int, stages_per_rank: int = 1) -> float:
    """(p-1) / (v M + p - 1): the idle share of a step of GPipe or 1F1B (v = 1), or of interleaved 1F1B (narayanan2021).

    p ranks, M micro-batches, v stages on each rank. Exact where every forward takes the same time, so does every
    backward, and messages take none. Narayanan et al. give idle time over ideal time, (p-1) / (v M); this is the share
    of the whole step.
    """
    return (num_ranks - 1) / (stages_per_rank * num_micro_batches + num_ranks - 1)


def latency_bound_s(world_size: int, link: Link) -> float:
    """ceil(lg p) alpha: no all-reduce is faster, since the ranks that know a contribution at best double each round."""
    return (world_size - 1).bit_length() * link.latency_s


def bandwidth_bound_s(world_size: int, num_bytes: float, link: Link) -> float:
    """2(p-1)/p n beta: no all-reduce is faster on links of one bandwidth (patarasuk2009)."""
    return ring_sent_bytes(world_size, num_bytes) / link.bandwidth_bytes_per_s


def bus_bandwidth_bytes_per_s(collective: str, world_size: int, num_bytes: float, seconds: float) -> float:
    """Buffer bytes per second times the share of them that every link must carry (nccltests PERFORMANCE.md,
    and for scatter and gather its scatter.cu and gather.cu).

    `num_bytes` is the size of the whole buffer. Raises ValueError for a collective without such a factor.
    """
    if collective not in BUS_FACTORS:
        raise ValueError(f"no bus factor for {collective!r}: use one of {', '.join(BUS_FACTORS)}")
    return num_bytes / seconds * BUS_FACTORS[collective](world_size)
