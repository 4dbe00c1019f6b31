"""L1: collectives as schedules.

Every function returns a `Schedule` whose promise `check()` verifies. Buffers are cut into as many chunks as there are
ranks (halving-doubling: as many as the largest power of two that fits), so that the same buffer can be watched under
each algorithm. Steps count rounds: in one step a rank sends at most one message and receives at most one. The root,
where there is one, is rank 0.

`COLLECTIVES`, at the end, has a record of each: what it promises, what it costs, where it was published.
"""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from book.cost import links
from book.promise import ROOT
from book.schedule import (ChunkRange, Loops, Phase, Phases, Schedule, ScheduleError, check_counts, every, moves_of,
                           phase)


def _any_world_size(world_size: int) -> list[tuple[int, ...]]:
    return [(world_size,)]


def _always(world_size: int) -> bool:
    return True


@dataclass(frozen=True)
class Collective:
    """A collective of the book: the function that schedules it, its promise, its closed forms, its source.

    `promise` names an entry of `book.promise.PROMISES`. `sizes` returns, for a number of ranks, every tuple of
    arguments with which `schedule` makes one for that many: [(8,)] for most, [(2, 4), (4, 2)] and so on for nodes of
    ranks, [] where the collective is not defined. `time_s(*arguments, num_bytes, link)` is the time in seconds on equal
    links, `sent_bytes(*arguments, num_bytes)` what the busiest rank sends in bytes; None where the book has no closed
    form. On a world size where `exact` is false, `time_s` is an upper bound if adding takes time. `source` is a key of
    references.bib, None for what is too plain to have one. `phases` are what the two halves of an all-reduce promise,
    the one that adds and the one that copies.
    """

    schedule: Callable[..., Schedule]
    promise: str
    time_s: Callable[..., float] | None = None
    source: str | None = None
    sent_bytes: Callable[..., float] | None = None
    sizes: Callable[[int], list[tuple[int, ...]]] = _any_world_size
    exact: Callable[[int], bool] = _always
    phases: tuple[str, str] = ("reduce_scatter", "all_gather")

    @property
    def name(self) -> str:
        """The name of the function that schedules it."""
        return self.schedule.__name__

    def schedules(self, world_size: int) -> list[Schedule]:
        """Every schedule of it on `world_size` ranks, one for each entry of `sizes`.

        Raises ScheduleError where a schedule promises something else than the record.
        """
        check_counts(world_size=world_size)
        made = [self.schedule(*arguments) for arguments in self.sizes(world_size)]
        for schedule in made:
            if schedule.promise != self.promise:
                raise ScheduleError(f"{self.name}: its record promises {self.promise!r} and its schedule "
                                    f"{schedule.promise!r}: state the same promise in both")
        return made


def broadcast(world_size: int) -> Schedule:
    """A binomial tree: ceil(lg N) steps of the whole buffer, and each doubles the ranks that have it (Thakur 2005)."""
    return _scheduled("broadcast", world_size, "broadcast", _tree_down)


def reduce(world_size: int) -> Schedule:
    """The binomial tree upwards: ceil(lg N) steps, each adds one half of the sums to the other (Thakur 2005)."""
    return _scheduled("reduce", world_size, "reduce", _tree_up)


def scatter(world_size: int) -> Schedule:
    """N-1 steps of one chunk: the root sends rank r its chunk r, one rank after the other."""
    return _scheduled("scatter", world_size, "scatter", _deal_out)


def gather(world_size: int) -> Schedule:
    """N-1 steps of one chunk: rank r sends the root its chunk r, one rank after the other."""
    return _scheduled("gather", world_size, "gather", _collect)


def all_to_all(world_size: int) -> Schedule:
    """Exchanges of pairs, in place: rank a's chunk b and rank b's chunk a change places (Thakur 2005).

    Every pair meets once, as in a round-robin tournament, so that a chunk leaves in the same step in which another one
    takes its place: N-1 steps, or N on an odd N, where in each step one rank has no partner.
    """
    check_counts(world_size=world_size)
    # In step s, rank r meets rank s-r (mod circle). As circle is odd, that leaves one alone: it meets rank `circle`.
    circle = world_size - 1 + world_size % 2
    step, rank = np.indices((circle, world_size))
    alone = step * (circle + 1) // 2 % circle
    partner = np.where(rank == alone, circle, np.where(rank == circle, alone, (step - rank) % circle))
    meet = partner < world_size  # on an odd N there is no such rank
    src, dst = rank[meet], partner[meet]
    moves = moves_of(step[meet], src, dst, dst, "copy")
    return Schedule("all_to_all", world_size, world_size, moves.replace(into=moves.array("src")), "all_to_all")


def ring_reduce_scatter(world_size: int) -> Schedule:
    """N-1 steps after which rank r alone holds the sum of chunk r+1 (Patarasuk and Yuan 2009).

    In step s rank r sends chunk r-s to its right-hand neighbour, which adds it to its own.
    """
    return _scheduled("ring_reduce_scatter", world_size, "reduce_scatter", _reduce_scatter)


def ring_all_gather(world_size: int) -> Schedule:
    """N-1 steps that carry chunk r+1 of rank r to every rank: in step s rank r passes on chunk r+1-s."""
    return _scheduled("ring_all_gather", world_size, "all_gather", _all_gather)


def ring_all_reduce(world_size: int) -> Schedule:
    """A ring reduce-scatter, then a ring all-gather: 2(N-1) steps of one chunk (Patarasuk and Yuan 2009)."""
    return _scheduled("ring_all_reduce", world_size, "all_reduce", _reduce_scatter, _all_gather)


def parameter_server_all_reduce(world_size: int) -> Schedule:
    """Rank 0 takes in the whole buffer of every other rank, one after the other, then sends each of them the sum."""
    return _scheduled("parameter_server_all_reduce", world_size, "all_reduce", _to_the_root, _from_the_root)


def tree_all_reduce(world_size: int) -> Schedule:
    """A binomial tree up to rank 0 and down again: 2 ceil(lg N) steps of the whole buffer (Thakur 2005)."""
    return _scheduled("tree_all_reduce", world_size, "all_reduce", _tree_up, _tree_down)


def halving_doubling_all_reduce(world_size: int) -> Schedule:
    """Recursive halving, then recursive doubling: 2 lg P steps on P = 2^floor(lg N) ranks (Rabenseifner 2004).

    Each of the N-P extra ranks first adds its whole buffer into one of the P and is sent the sum at the end.
    """
    check_counts(world_size=world_size)
    core = 1 << (world_size.bit_length() - 1)
    phases = Phases([_fold(core, world_size - core), _halving(core), _doubling(core), _unfold(core, world_size - core)])
    return Schedule("halving_doubling_all_reduce", world_size, core, phases, "all_reduce")


def hierarchical_all_reduce(num_nodes: int, ranks_per_node: int) -> Schedule:
    """Reduce-scatter inside each node, all-reduce each shard across nodes, all-gather inside each node: three rings.

    Rank = node * ranks_per_node + local rank. A shard is `num_nodes` chunks; a link across nodes carries
    2(k-1)/k * n/g bytes for k nodes of g ranks.
    """
    check_counts(num_nodes=num_nodes, ranks_per_node=ranks_per_node)
    world_size = num_nodes * ranks_per_node
    phases = Phases([_inside_nodes(num_nodes, ranks_per_node, "reduce", 0),
                     _across_nodes(num_nodes, ranks_per_node, "reduce", 0),
                     _across_nodes(num_nodes, ranks_per_node, "copy", 1),
                     _inside_nodes(num_nodes, ranks_per_node, "copy", 1)])
    return Schedule("hierarchical_all_reduce", world_size, world_size, phases, "all_reduce")


def _scheduled(name: str, world_size: int, promise: str, *phases: Callable[[int], Phase]) -> Schedule:
    """A schedule whose buffer has as many chunks as there are ranks."""
    check_counts(world_size=world_size)
    return Schedule(name, world_size, world_size, Phases(made(world_size) for made in phases), promise)


# Each yields, step by step, who sends what to whom: (step, src, dst, chunk, op).

@phase
def _reduce_scatter(N: int) -> Loops:
    for step in range(N - 1):
        for rank in every(N):
            yield step, rank, (rank + 1) % N, (rank - step) % N, "reduce"


@phase
def _all_gather(N: int) -> Loops:
    for step in range(N - 1):
        for rank in every(N):
            yield step, rank, (rank + 1) % N, (rank + 1 - step) % N, "copy"


@phase
def _deal_out(N: int) -> Loops:
    for rank in range(1, N):
        yield rank - 1, ROOT, rank, rank, "copy"


@phase
def _collect(N: int) -> Loops:
    for rank in range(1, N):
        yield rank - 1, rank, ROOT, rank, "copy"


@phase
def _to_the_root(N: int) -> Loops:
    for rank in range(1, N):
        yield rank - 1, rank, ROOT, ChunkRange(0, N), "reduce"


@phase
def _from_the_root(N: int) -> Loops:
    for rank in range(1, N):
        yield rank - 1, ROOT, rank, ChunkRange(0, N), "copy"


@phase
def _tree_up(N: int) -> Loops:
    for level in range((N - 1).bit_length()):  # the leaves' level first
        parent = np.arange(0, N - 2**level, 2 * 2**level)
        yield level, parent + 2**level, parent, ChunkRange(0, N), "reduce"


@phase
def _tree_down(N: int) -> Loops:
    for step, level in enumerate(reversed(range((N - 1).bit_length()))):
        parent = np.arange(0, N - 2**level, 2 * 2**level)
        yield step, parent, parent + 2**level, ChunkRange(0, N), "copy"


@phase
def _halving(core: int) -> Loops:
    for step, level in enumerate(reversed(range(core.bit_length() - 1))):
        for rank in every(core):
            partner = rank ^ 2**level  # is sent what its half will keep
            yield step, rank, partner, ChunkRange(partner >> level << level, 2**level), "reduce"


@phase
def _doubling(core: int) -> Loops:
    for level in range(core.bit_length() - 1):
        for rank in every(core):
            partner = rank ^ 2**level  # gets back what it sent in the halving
            yield level, partner, rank, ChunkRange(partner >> level << level, 2**level), "copy"


@phase
def _fold(core: int, num_extra: int) -> Loops:
    for rank in every(num_extra):
        yield 0, core + rank, rank, ChunkRange(0, core), "reduce"


@phase
def _unfold(core: int, num_extra: int) -> Loops:
    for rank in every(num_extra):
        yield 0, rank, core + rank, ChunkRange(0, core), "copy"


@phase
def _inside_nodes(num_nodes: int, ranks_per_node: int, op: str, ahead: int) -> Loops:
    """A ring in each node, through shards of `num_nodes` chunks."""
    for step in range(ranks_per_node - 1):
        for i in every(num_nodes * ranks_per_node):
            node, local = i % num_nodes, i // num_nodes
            right, shard = (local + 1) % ranks_per_node, (local + ahead - step) % ranks_per_node
            yield (step, node * ranks_per_node + local, node * ranks_per_node + right,
                   ChunkRange(shard * num_nodes, num_nodes), op)


@phase
def _across_nodes(num_nodes: int, ranks_per_node: int, op: str, ahead: int) -> Loops:
    """A ring of each local rank across nodes, through the chunks of the shard that the reduce-scatter left on it."""
    for step in range(num_nodes - 1):
        for rank in every(num_nodes * ranks_per_node):
            node, shard = rank // ranks_per_node, (rank % ranks_per_node + 1) % ranks_per_node
            yield (step, rank, (rank + ranks_per_node) % (num_nodes * ranks_per_node),
                   shard * num_nodes + (node + ahead - step) % num_nodes, op)


def _nodes(world_size: int) -> list[tuple[int, ...]]:
    return [(num_nodes, world_size // num_nodes) for num_nodes in range(1, world_size + 1)
            if world_size % num_nodes == 0]


def _power_of_two(world_size: int) -> bool:
    return world_size & (world_size - 1) == 0


COLLECTIVES = {collective.name: collective for collective in (
    Collective(ring_all_reduce, "all_reduce", links.ring_all_reduce_s, "patarasuk2009", links.ring_sent_bytes),
    Collective(ring_reduce_scatter, "reduce_scatter", links.ring_reduce_scatter_s, "patarasuk2009"),
    Collective(ring_all_gather, "all_gather", links.ring_all_gather_s, "thakur2005"),
    Collective(parameter_server_all_reduce, "all_reduce", links.parameter_server_all_reduce_s,
               sent_bytes=links.root_sent_bytes, phases=("reduce", "broadcast")),
    Collective(tree_all_reduce, "all_reduce", links.tree_all_reduce_s, "thakur2005", exact=_power_of_two,
               phases=("reduce", "broadcast")),
    Collective(halving_doubling_all_reduce, "all_reduce", links.halving_doubling_all_reduce_s, "rabenseifner2004"),
    Collective(hierarchical_all_reduce, "all_reduce", links.hierarchical_all_reduce_s, sizes=_nodes),
    Collective(broadcast, "broadcast", links.broadcast_s, "thakur2005"),
    Collective(scatter, "scatter", links.scatter_s),
    Collective(gather, "gather", links.gather_s),
    Collective(reduce, "reduce", links.reduce_s, "thakur2005", exact=_power_of_two),
    Collective(all_to_all, "all_to_all", links.all_to_all_s, "thakur2005"),
)}
