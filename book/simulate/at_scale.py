"""L2: when each rank is done, without a trace: one rank is simulated for all that are alike, however many.

Two ranks are alike if in each step they send as much, to ranks that are alike, and receive as much, from ranks that are
alike. Then both wait for the same things and do the same at the same time, so the times of one hold for the other. In a
ring all ranks are alike, so only one of them is simulated. Where ranks share cards, two ranks are alike only if they
have the same place on nodes that are alike at every place, so that their cards carry the same. A slowed rank is alike
to ranks with the same factor only. Where few ranks are alike, each is simulated. Shapes: R ranks, M messages.
"""
from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from book.cost import Link, Network
from book.schedule import Round, Schedule
from book.simulate.collective import chunk_size, factors, run_rounds
from book.simulate.messages import rounds
from book.simulate.shared import run_shared_rounds

MOST_PASSES = 32  # a difference travels from rank to rank, one or more in each pass
MOST_SHARED = 2_000_000  # messages on shared cards are followed one by one


def done_s(schedule: Schedule, num_bytes: float, link: Link | Network, *,
           slowdown: Mapping[int, float] | None = None) -> np.ndarray:
    """When each rank has done its part of `schedule`, in seconds, shape (R,): the times of `simulate` without a trace.

    The arguments are those of `simulate`. A collective of `book.collectives` (all but `all_to_all`) may have thousands
    of ranks. Raises ValueError as `simulate` does, and where too few ranks that share cards are alike.
    """
    slower = factors(schedule.world_size, slowdown or {})
    return rounds_done_s(list(rounds(schedule)), chunk_size(schedule, num_bytes), link, slower)


def rounds_done_s(given: Sequence[Round], chunk_bytes: float, link: Link | Network, slower: np.ndarray) -> np.ndarray:
    """The same of rounds that need not be a schedule's: seconds, shape (R,), with each rank's factor `slower`, (R,)."""
    network = link if isinstance(link, Network) else None
    crosses = [network.crossing(one.src, one.dst) if network else np.zeros(len(one.src), dtype=bool) for one in given]
    label = alike(given, crosses, slower, network.ranks_per_node if network else None)
    used, first, num_alike = np.unique(label, return_index=True, return_counts=True)
    slower_of, alike_of = np.ones(label.max() + 1), np.ones(label.max() + 1, dtype=int)
    slower_of[used], alike_of[used] = slower[first], num_alike
    kept = [np.isin(one.src, first) for one in given]
    few = [_of_few(one, keep, label) for one, keep in zip(given, kept)]
    if not isinstance(link, Network):
        return run_rounds(few, chunk_bytes, link, slower_of)[label]
    _check_number(sum(len(one.src) * one.num_steps for one in few))
    told = [(one, out[keep], alike_of[one.src]) for one, keep, out in zip(few, kept, crosses)]
    return run_shared_rounds(told, chunk_bytes, link, slower_of)[label]


def _of_few(one: Round, keep: np.ndarray, label: np.ndarray) -> Round:
    """The messages of ranks that stand for others, with labels in place of ranks."""
    return Round(label[one.src[keep]], label[one.dst[keep]], one.num_chunks[keep], one.num_added[keep], one.num_steps)


def _check_number(num_messages: int) -> None:
    if num_messages > MOST_SHARED:
        raise ValueError(f"too few ranks of this schedule are alike: {num_messages:,} messages that share cards are "
                         f"too many to follow, at most {MOST_SHARED:,}; give fewer ranks, or a Link, not a Network")


def alike(given: Sequence[Round], crosses: Sequence[np.ndarray], slowdown: np.ndarray,
          ranks_per_node: int | None = None) -> np.ndarray:
    """A label for each rank, (R,); ranks that are alike in these rounds share one.

    `crosses` says for each round which messages go to another node. With `ranks_per_node` the labels of a node's ranks
    are consecutive, as the ranks are. All ranks start with one label, or one for each slowdown, and are told apart by
    what they send and receive, until a pass over all rounds finds no more differences. Each rank has its own label
    where a rank sends or receives two messages in one step, and where MOST_PASSES passes are not enough.
    """
    own = np.arange(len(slowdown))
    if any(len(np.unique(ports)) < len(ports) for one in given for ports in (one.src, one.dst)):
        return own
    label = _with_nodes(_numbered(slowdown), ranks_per_node)
    kinds = [_numbered(np.column_stack([one.num_chunks, one.num_added, out])) for one, out in zip(given, crosses)]
    for _ in range(MOST_PASSES):
        num_known = len(np.unique(label))
        for one, kind in zip(given, kinds):
            label = _told_apart(label, one, kind)
        label = _with_nodes(_numbered(label), ranks_per_node)
        if len(np.unique(label)) == num_known:
            return label
    return own


def _told_apart(label: np.ndarray, one: Round, kind: np.ndarray) -> np.ndarray:
    """New labels for the ranks of a round: by their label, the peers' labels and the kinds of messages, each way."""
    ranks = np.unique([one.src, one.dst])
    seen = np.full((len(ranks), 5), -1)
    seen[:, 0] = label[ranks]
    for column, own, peer in ((1, one.src, one.dst), (3, one.dst, one.src)):
        at = np.searchsorted(ranks, own)
        seen[at, column], seen[at, column + 1] = label[peer], kind
    new = label.copy()
    new[ranks] = label.max() + 1 + _numbered(seen)
    return new


def _numbered(rows: np.ndarray) -> np.ndarray:
    """Numbers from 0 on, equal for equal rows."""
    return np.unique(rows, axis=0, return_inverse=True)[1].ravel()


def _with_nodes(label: np.ndarray, ranks_per_node: int | None) -> np.ndarray:
    """Labels that also tell apart what sits on nodes with different labels, or at different places of a node."""
    if ranks_per_node is None:
        return label
    num_nodes = -(-len(label) // ranks_per_node)
    nodes = np.full(num_nodes * ranks_per_node, -1)  # the last node may not be full
    nodes[:len(label)] = label
    node = _numbered(nodes.reshape(num_nodes, ranks_per_node))
    return (node[:, None] * ranks_per_node + np.arange(ranks_per_node)).ravel()[:len(label)]
