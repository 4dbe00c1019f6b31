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
from functools import partial

import numpy as np

from book.cost import links
from book.promise import ROOT
from book.schedule import Phase, Phases, Schedule, ScheduleError, check_counts, moves_of


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
    check_counts(world_size=world_size)
    return Schedule("broadcast", world_size, world_size, Phases(_tree_down(world_size)), "broadcast")


def reduce(world_size: int) -> Schedule:
    """The binomial tree upwards: ceil(lg N) steps, each adds one half of the sums to the other (Thakur 2005)."""
    check_counts(world_size=world_size)
    return Schedule("reduce", world_size, world_size, Phases(_tree_up(world_size)), "reduce")


def scatter(world_size: int) -> Schedule:
    """N-1 steps of one chunk: the root sends rank r its chunk r, one rank after the other."""
    check_counts(world_size=world_size)
    down = Phase("copy", np.array([[ROOT]]), _others(world_size), _next_chunk, num_steps=world_size - 1)
    return Schedule("scatter", world_size, world_size, Phases([down]), "scatter")


def gather(world_size: int) -> Schedule:
    """N-1 steps of one chunk: rank r sends the root its chunk r, one rank after the other."""
    check_counts(world_size=world_size)
    up = Phase("copy", _others(world_size), np.array([[ROOT]]), _next_chunk, num_steps=world_size - 1)
    return Schedule("gather", world_size, world_size, Phases([up]), "gather")


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
    check_counts(world_size=world_size)
    return Schedule("ring_reduce_scatter", world_size, world_size, Phases([_ring(world_size, "reduce")]),
                    "reduce_scatter")


def ring_all_gather(world_size: int) -> Schedule:
    """N-1 steps that carry chunk r+1 of rank r to every rank: in step s rank r passes on chunk r+1-s."""
    check_counts(world_size=world_size)
    return Schedule("ring_all_gather", world_size, world_size, Phases([_ring(world_size, "copy")]), "all_gather")


def ring_all_reduce(world_size: int) -> Schedule:
    """A ring reduce-scatter, then a ring all-gather: 2(N-1) steps of one chunk (Patarasuk and Yuan 2009)."""
    check_counts(world_size=world_size)
    phases = Phases([_ring(world_size, "reduce"), _ring(world_size, "copy")])
    return Schedule("ring_all_reduce", world_size, world_size, phases, "all_reduce")


def parameter_server_all_reduce(world_size: int) -> Schedule:
    """Rank 0 takes in the whole buffer of every other rank, one after the other, then sends each of them the sum."""
    check_counts(world_size=world_size)
    others, root = _others(world_size), np.array([[ROOT]])
    whole = partial(_same_chunks, np.arange(world_size)), world_size, world_size - 1
    phases = Phases([Phase("reduce", others, root, *whole), Phase("copy", root, others, *whole)])
    return Schedule("parameter_server_all_reduce", world_size, world_size, phases, "all_reduce")


def tree_all_reduce(world_size: int) -> Schedule:
    """A binomial tree up to rank 0 and down again: 2 ceil(lg N) steps of the whole buffer (Thakur 2005)."""
    check_counts(world_size=world_size)
    phases = Phases(_tree_up(world_size) + _tree_down(world_size))
    return Schedule("tree_all_reduce", world_size, world_size, phases, "all_reduce")


def halving_doubling_all_reduce(world_size: int) -> Schedule:
    """Recursive halving, then recursive doubling: 2 lg P steps on P = 2^floor(lg N) ranks (Rabenseifner 2004).

    Each of the N-P extra ranks first adds its whole buffer into one of the P and is sent the sum at the end.
    """
    check_counts(world_size=world_size)
    num_core = 1 << (world_size.bit_length() - 1)
    halving, doubling = [], []
    for level in range(num_core.bit_length() - 1):
        src, dst, chunks_of = _halves(num_core, 1 << level)
        halving.insert(0, Phase("reduce", src, dst, chunks_of, 1 << level))
        # What a rank got complete in the halving is what it gives back in the doubling.
        doubling.append(Phase("copy", dst, src, chunks_of, 1 << level))
    extra, chunks = np.arange(num_core, world_size), np.arange(num_core)
    fold = [_messages("reduce", extra, extra - num_core, chunks)] if len(extra) else []
    unfold = [_messages("copy", extra - num_core, extra, chunks)] if len(extra) else []
    phases = Phases(fold + halving + doubling + unfold)
    return Schedule("halving_doubling_all_reduce", world_size, num_core, phases, "all_reduce")


def hierarchical_all_reduce(num_nodes: int, ranks_per_node: int) -> Schedule:
    """Reduce-scatter inside each node, all-reduce each shard across nodes, all-gather inside each node: three rings.

    Rank = node * ranks_per_node + local rank. A shard is `num_nodes` chunks; a link across nodes carries
    2(k-1)/k * n/g bytes for k nodes of g ranks.
    """
    check_counts(num_nodes=num_nodes, ranks_per_node=ranks_per_node)
    world_size = num_nodes * ranks_per_node
    phases = Phases([_inside_nodes(num_nodes, ranks_per_node, "reduce"),
                     _across_nodes(num_nodes, ranks_per_node, "reduce"),
                     _across_nodes(num_nodes, ranks_per_node, "copy"),
                     _inside_nodes(num_nodes, ranks_per_node, "copy")])
    return Schedule("hierarchical_all_reduce", world_size, world_size, phases, "all_reduce")


def _others(world_size: int) -> np.ndarray:
    """Every rank but the root, each in a step of its own, (steps, 1)."""
    return np.arange(1, world_size)[:, None]


def _next_chunk(step: np.ndarray) -> np.ndarray:
    return step + 1


def _same_chunks(chunks: np.ndarray, step: np.ndarray) -> np.ndarray:
    return chunks


def _messages(op: str, src: np.ndarray, dst: np.ndarray, chunks: np.ndarray) -> Phase:
    """A step in which each rank of `src` sends the same chunks, (C,)."""
    return Phase(op, src, dst, partial(_same_chunks, chunks), len(chunks))


def _tree_edges(world_size: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """(parents, children) of each level of a binomial tree, the leaves' level first, shapes (pairs,)."""
    distances = [1 << level for level in range((world_size - 1).bit_length())]
    parents = [np.arange(0, world_size - distance, 2 * distance) for distance in distances]
    return [(above, above + distance) for above, distance in zip(parents, distances)]


def _tree_up(world_size: int) -> list[Phase]:
    chunks = np.arange(world_size)
    return [_messages("reduce", below, above, chunks) for above, below in _tree_edges(world_size)]


def _tree_down(world_size: int) -> list[Phase]:
    chunks = np.arange(world_size)
    return [_messages("copy", above, below, chunks) for above, below in reversed(_tree_edges(world_size))]


_AHEAD = {"reduce": 0, "copy": 1}  # an all-gather starts from what the reduce-scatter left: chunk r+1 on rank r


def _ring(size: int, op: str) -> Phase:
    """One trip round a ring."""
    src = np.arange(size)
    return Phase(op, src, (src + 1) % size, partial(_slots, size, src + _AHEAD[op]), num_steps=size - 1)


def _slots(size: int, first: np.ndarray, step: np.ndarray) -> np.ndarray:
    """The part that each rank of a ring sends, one lower in each step, (S, M, 1)."""
    return (first[:, None] - step) % size


def _inside_nodes(num_nodes: int, ranks_per_node: int, op: str) -> Phase:
    """A ring in each node, whose parts are shards of `num_nodes` chunks; messages ordered by local rank, then node."""
    local, first_rank = np.arange(ranks_per_node)[:, None], np.arange(num_nodes) * ranks_per_node
    src, dst = ((first_rank + one % ranks_per_node).ravel() for one in (local, local + 1))
    chunks = partial(_chunks_of_shards, ranks_per_node, np.repeat(local.ravel() + _AHEAD[op], num_nodes), num_nodes)
    return Phase(op, src, dst, chunks, num_nodes, ranks_per_node - 1)


def _chunks_of_shards(size: int, first: np.ndarray, num_chunks: int, step: np.ndarray) -> np.ndarray:
    return _slots(size, first, step) * num_chunks + np.arange(num_chunks)


def _across_nodes(num_nodes: int, ranks_per_node: int, op: str) -> Phase:
    """A ring of each local rank across nodes, through a shard's chunks; messages ordered by node, then local rank."""
    local, node = np.arange(ranks_per_node), np.arange(num_nodes)[:, None]
    src, dst = ((one % num_nodes * ranks_per_node + local).ravel() for one in (node, node + 1))
    shard = (local + 1) % ranks_per_node  # the one that the reduce-scatter left on this local rank
    first = np.repeat(node.ravel() + _AHEAD[op], ranks_per_node)
    chunks = partial(_chunks_in_shards, num_nodes, first, np.tile(shard, num_nodes))
    return Phase(op, src, dst, chunks, num_steps=num_nodes - 1)


def _chunks_in_shards(size: int, first: np.ndarray, shard: np.ndarray, step: np.ndarray) -> np.ndarray:
    return shard[:, None] * size + _slots(size, first, step)


def _halves(num_core: int, distance: int) -> tuple[np.ndarray, np.ndarray, Callable[[np.ndarray], np.ndarray]]:
    """In a halving round every rank sends its partner at `distance` the chunks that the partner's half will keep."""
    src = np.arange(num_core)
    return src, src ^ distance, partial(_half_of, src ^ distance, distance)


def _half_of(rank: np.ndarray, distance: int, step: np.ndarray) -> np.ndarray:
    return rank[:, None] // distance * distance + np.arange(distance)


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
