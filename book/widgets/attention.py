"""L3: attention over a cut sequence: which scores each rank works on, and the keys and values that travel meanwhile.

A run has, in addition to what scene.js says about all runs, `n` ranks, `rows`, the rank of each token's query, and
`most`, the most scores that a rank works on at a stop. A stop, of which the first is the start, has

    moves   [from, to, whose keys and values]
    holds   whose keys and values each rank has
    work    how many scores each rank works on
    set     those scores, [query, keys]
"""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from book.trace import SCORES, Trace
from book.widgets.page import Data, Played
from book.widgets.show import show
from book.words import capitalised, counted, in_bytes, joined

if TYPE_CHECKING:
    from book.widgets.live import Live

MOST_RANKS, MOST_TOKENS = 4, 32  # that there is room for


def attention_player(runs: Trace | Mapping[Any, Trace], *, title: str | None = None,
                     labels: Sequence[str] | None = None, select: Any = None) -> AttentionPlayer | Live:
    """Attention over a sequence that is cut over a ring of ranks, or several such runs that the reader chooses from.

    `runs` are traces recorded with `follow_scores` of book.record.scores. `labels` name the choices and `select` is the
    key to open with. Raises TypeError for anything but traces, ValueError for a trace without scores, with more than 4
    ranks or with more than 32 tokens.
    """
    return show(AttentionPlayer(runs, title, labels, select))


@dataclass(frozen=True)
class Hop:
    """What happens between two stops: whose keys and values each rank then has, and the scores that it works on."""

    moves: tuple[tuple[int, int, int], ...]  # from, to, whose
    holds: tuple[int, ...]
    scores: tuple[dict[int, list[int]], ...]  # of each rank: keys by query

    @property
    def work(self) -> list[int]:
        """How many scores each rank works on."""
        return [sum(map(len, rows.values())) for rows in self.scores]


@dataclass(frozen=True)
class AttentionPlay:
    """A run as its player needs it: the rank of each token's query, and its hops, the first with nothing moved.

    `sent` has the bytes of each message of the rank that sends most.
    """

    rows: tuple[int, ...]
    hops: tuple[Hop, ...]
    sent: tuple[float, ...]

    @property
    def num_ranks(self) -> int:
        """How many ranks it has."""
        return len(self.hops[0].holds)

    @property
    def totals(self) -> list[int]:
        """How many scores each rank works on in all hops."""
        return [sum(work) for work in zip(*(hop.work for hop in self.hops))]

    @property
    def in_turn(self) -> int:
        """Scores that are worked on one after another, if every hop waits for the rank with the most."""
        return sum(max(hop.work) for hop in self.hops)

    def counted(self) -> list[list[int]]:
        """How often each query (row) has met each key (column)."""
        met = [[0] * len(self.rows) for _ in self.rows]
        for hop in self.hops:
            for rows in hop.scores:
                for query, keys in rows.items():
                    for key in keys:
                        met[query][key] += 1
        return met


def read_play(trace: Trace) -> AttentionPlay:
    """The hops of a run; raises ValueError for a trace that can't be shown."""
    n = trace.world_size
    if n > MOST_RANKS:
        raise ValueError(f"there is room for {MOST_RANKS} ranks, not {n}")
    products = [_products(trace, rank) for rank in range(n)]
    if not all(products):
        raise ValueError("this trace has no scores: record a run whose ranks call follow_scores of book.record.scores")
    owners = {query: rank for rank in range(n) for query in products[rank][0]}
    if len(owners) > MOST_TOKENS or set(owners) != set(range(len(owners))):
        raise ValueError("the queries of all ranks together are tokens 0, 1, ... of a sequence of at most "
                         f"{MOST_TOKENS}")
    num_hops = max(map(len, products))
    sent = [_sent_to(trace, rank, num_hops) for rank in range(n)]
    holds, hops = list(range(n)), []
    for at in range(num_hops):
        moves = [(rank, sent[rank][at - 1], holds[rank]) for rank in range(n) if at and len(sent[rank]) >= at]
        for _, dst, whose in moves:
            holds[dst] = whose
        rows = tuple(found[at] if at < len(found) else {} for found in products)
        hops.append(Hop(tuple(moves), tuple(holds), rows))
    sizes = [[event.num_bytes or 0 for event in trace.of_rank(rank) if event.kind == "send"] for rank in range(n)]
    return AttentionPlay(tuple(owners[token] for token in range(len(owners))), tuple(hops), tuple(max(sizes, key=sum)))


def _products(trace: Trace, rank: int) -> list[dict[int, list[int]]]:
    """The scores of a rank, keys by query, product by product: a new one begins where a query comes again."""
    found: list[dict[int, list[int]]] = []
    for event in trace.of_rank(rank):
        if event.kind == "compute" and event.op == SCORES:
            if not found or event.chunk in found[-1]:
                found.append({})
            found[-1][event.chunk] = [key for key, times in enumerate(event.contributions) if times]
    return found


def _sent_to(trace: Trace, rank: int, num_hops: int) -> list[int]:
    """To whom a rank sends between its products: keys and values are as many messages in each hop."""
    peers = [event.peer for event in trace.of_rank(rank) if event.kind == "send"]
    each = max(1, len(peers) // max(1, num_hops - 1))
    return peers[::each]


# The data and the words

def run_payload(play: AttentionPlay, source: str) -> Data:
    """One run as JSON data."""
    stops: list[Data] = [{"say": [["", begin(play)]], "phase": "0", "moves": [], "holds": list(range(play.num_ranks)),
                          "work": [0] * play.num_ranks, "set": []}]
    for say, hop in zip(told(play), play.hops):
        scores = [[query, keys] for rows in hop.scores for query, keys in rows.items() if keys]
        stops.append({"say": say, "phase": "1" if hop.moves else "0", "moves": hop.moves, "holds": hop.holds,
                      "work": hop.work, "set": scores})
    return {"n": play.num_ranks, "rows": play.rows, "most": max(max(hop.work) for hop in play.hops), "source": source,
            "stops": stops, "figures": figures(play)}


def begin(play: AttentionPlay) -> str:
    """The words before the first product."""
    first = joined(token for token, rank in enumerate(play.rows) if rank == 0)
    return (f"{len(play.rows)} tokens on {play.num_ranks} ranks. Each has the queries, keys and values of its own "
            f"tokens, rank 0 of tokens {first}. A query needs the keys up to its own.")


def told(play: AttentionPlay) -> list[list[list[Any]]]:
    """What happens in each hop."""
    said = [[_hop(hop)] for hop in play.hops]
    met, tokens = play.counted(), range(len(play.rows))
    late = sum(bool(met[i][j]) for i in tokens for j in tokens if j > i)
    lost = sum(not met[i][j] for i in tokens for j in tokens if j <= i)
    twice = sum(met[i][j] > 1 for i in tokens for j in tokens)
    counts = (late, "with later keys"), (lost, "missing"), (twice, "counted twice")
    faults = [f"{num} {words}" for num, words in counts if num]
    said[-1] += ([["Wrong: ", f"of the scores, {joined(faults)}.", True]] if faults else
                 [["Done: ", "every query has met every key up to its own, once."]])
    return said


def _hop(hop: Hop) -> list[Any]:
    work = joined(hop.work)
    idle = [rank for rank, num in enumerate(hop.work) if num < max(hop.work)]
    waits = f" Ranks {joined(idle)} wait." if len(idle) > 1 else f" Rank {idle[0]} waits." if idle else ""
    if not hop.moves:
        return ["Own keys first:", f" the ranks work on {work} scores.{waits} "]
    n = len(hop.holds)
    by = {(dst - src) % n for src, dst, _ in hop.moves}
    if len(hop.moves) == n and by in ({1}, {n - 1}):
        where = "to the next" if by == {1} else "to the one before it"
        return ["Every rank passes keys and values on", f" {where}. The ranks work on {work} scores.{waits} "]
    moves = joined(f"rank {src} sends rank {whose}'s keys to rank {dst}" for src, dst, whose in hop.moves)
    return [f"{capitalised(moves)}.", f" The ranks work on {work} scores.{waits} "]


def figures(play: AttentionPlay) -> list[list[str]]:
    """Pairs of a value and what it means."""
    least, best = min(play.totals), max(play.totals)
    return [[f"{least} to {best}" if least < best else str(best), "scores of a rank"],
            [str(play.in_turn), "one after another, as each hop waits for its busiest rank"],
            [in_bytes(sum(play.sent), zeros=True), f"sent by a rank in {counted(len(play.sent), 'message')}"]]


def in_words(play: AttentionPlay) -> tuple[list[str], list[list[str]]]:
    """The hops of a run, and its figures."""
    return [begin(play), *("".join(stress + rest for stress, rest, *_ in say).strip() for say in told(play))], (
        figures(play))


class AttentionPlayer(Played):
    """What an attention player shows: traces by key."""

    widget, maker, called = "attention", "attention_player", "attention player"
    usual_title = "Attention over a cut sequence"
    read, payload, said = staticmethod(read_play), staticmethod(run_payload), staticmethod(in_words)
