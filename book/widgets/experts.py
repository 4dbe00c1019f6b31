"""L3: tokens and experts on several ranks: which expert each token wants, who waits for whom, what comes back.

A run has, in addition to what scene.js says about all runs, `n` ranks with `per` experts each, and

    wants   for each token, rank by rank, the experts that it wants, best first
    queues  for each expert the tokens whose rows it gets, in their order
    back    for each token 1 if its rows came back to it, 0 if some did not, 2 if it got what is another's

Its stops are always the same six: the start, choices, numbers of rows, rows, work, and the way back.
"""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from book.trace import CHOSEN, EXPERT, RETURNED, WORKED, Trace
from book.widgets.page import Data, Played
from book.widgets.show import show
from book.words import agree, counted, joined, plural

if TYPE_CHECKING:
    from book.widgets.live import Live

MOST_RANKS, MOST_EXPERTS, MOST_TOKENS = 4, 8, 64  # that there is room for
Say = list[list[Any]]


def expert_player(runs: Trace | Mapping[Any, Trace], *, title: str | None = None, labels: Sequence[str] | None = None,
                  select: Any = None) -> ExpertPlayer | Live:
    """A layer whose experts are on several ranks, or several such runs that the reader chooses from.

    `runs` are traces recorded with `follow_tokens` of book.record.tokens. `labels` name the choices and `select` is the
    key to open with. Raises TypeError for anything but traces, ValueError for a trace without experts, with more than 4
    ranks, 8 experts or 64 tokens.
    """
    return show(ExpertPlayer(runs, title, labels, select))


@dataclass(frozen=True)
class ExpertsPlay:
    """A run as its player needs it; `returned[t]` says how often each token's row came back to token t."""

    num_ranks: int
    wants: tuple[tuple[int, ...], ...]
    queues: tuple[tuple[int, ...], ...]
    returned: tuple[tuple[float, ...], ...]

    @property
    def per_rank(self) -> int:
        """Experts of a rank."""
        return len(self.queues) // self.num_ranks

    @property
    def rows(self) -> list[int]:
        """How many rows each rank works on."""
        lengths = [len(queue) for queue in self.queues]
        return [sum(lengths[rank * self.per_rank:][:self.per_rank]) for rank in range(self.num_ranks)]

    @property
    def num_choices(self) -> int:
        """Choices of all tokens."""
        return sum(map(len, self.wants))

    @property
    def num_dropped(self) -> int:
        """Choices of which no expert gets the row."""
        return self.num_choices - sum(self.rows)

    @property
    def num_strange(self) -> int:
        """Rows that an expert gets although their token did not choose it."""
        return sum(expert not in self.wants[token] for expert, queue in enumerate(self.queues) for token in queue)

    def home(self, token: int) -> int:
        """The rank of a token."""
        return token * self.num_ranks // len(self.wants)

    def num_leaving(self) -> int:
        """Rows that leave their rank."""
        return sum(self.home(token) != expert // self.per_rank
                   for expert, queue in enumerate(self.queues) for token in queue)

    def back(self, token: int) -> int:
        """1 if a token's rows came back to it, 0 if some did not, 2 if it got what is another's."""
        sent = sum(queue.count(token) for queue in self.queues)
        others = sum(map(abs, self.returned[token])) - abs(self.returned[token][token])
        return 2 if others else int(self.returned[token][token] == sent)


def read_visit(trace: Trace) -> ExpertsPlay:
    """The run of a trace; raises ValueError for one that can't be shown."""
    def noted(op: str) -> list[Any]:
        return [event for rank in range(trace.world_size) for event in trace.of_rank(rank) if event.op == op]

    experts, chosen, returned = noted(EXPERT), noted(CHOSEN), noted(RETURNED)
    if not (experts and chosen and returned):
        raise ValueError("this trace has no experts: record a run whose ranks call follow_tokens of book.record.tokens")
    for most, num, what in ((MOST_RANKS, trace.world_size, "ranks"), (MOST_EXPERTS, len(experts), "experts"),
                            (MOST_TOKENS, len(returned), "tokens")):
        if num > most:
            raise ValueError(f"there is room for {most} {what}, not {num}")
    wants: list[list[int]] = [[] for _ in returned]
    for event in chosen:
        wants[event.chunk].append(event.bucket)
    queues: list[list[int]] = [[] for _ in experts]
    for event in noted(WORKED):
        queues[event.bucket].append(event.chunk)
    return ExpertsPlay(trace.world_size, tuple(map(tuple, wants)), tuple(map(tuple, queues)),
                       tuple(event.contributions for event in sorted(returned, key=lambda event: event.chunk)))


# The data and the words

def run_payload(visit: ExpertsPlay, source: str) -> Data:
    """One run as JSON data."""
    return {"n": visit.num_ranks, "per": visit.per_rank, "wants": visit.wants, "queues": visit.queues,
            "back": [visit.back(token) for token in range(len(visit.wants))], "source": source,
            "stops": [{"say": say, "phase": str(number)} for number, say in enumerate(told(visit))],
            "figures": figures(visit)}


def told(visit: ExpertsPlay) -> list[Say]:
    """What is said at each stop."""
    own, rows, n = len(visit.wants) // visit.num_ranks, visit.rows, visit.num_ranks
    start = (f"Each of {n} ranks has {counted(own, 'token')} and {counted(visit.per_rank, 'expert')}. "
             f"A token chooses {counted(len(visit.wants[0]), 'expert')}.")
    wanted = [sum(expert in wanted for wanted in visit.wants) for expert in range(len(visit.queues))]
    asks = f" Experts 0 to {len(wanted) - 1} are wanted by {joined(wanted)} tokens. "
    lost = visit.num_dropped
    drops = [["", f"{counted(lost, 'choice')} {agree('has', lost)} no place and {agree('is', lost)} dropped."]]
    leave, most = visit.num_leaving(), max(rows)
    waits = [rank for rank in range(n) if rows[rank] < most]
    busiest = joined(rank for rank in range(n) if rows[rank] == most)
    late = (f", and {plural('rank', len(waits))} {joined(waits)} {agree('waits', waits)} for rank {busiest}" if waits
            else "")
    return [[["", start]], [["The router chooses.", asks], *(drops if lost else [])],
            [["Numbers first:", " each rank tells every other how many rows will come, so that it can make room."]],
            [["Then the rows:", f" {leave} of {sum(rows)} leave their rank. They arrive rank by rank."]],
            [["The experts work", f" on {joined(rows)} rows{late}."]],
            [["Back in order:", " the same way back, each row to its own token. "], *_ending(visit)]]


def _ending(visit: ExpertsPlay) -> Say:
    states = [visit.back(token) for token in range(len(visit.wants))]
    none = sum(not any(token in visit.queues[expert] for expert in wanted) for token, wanted in enumerate(visit.wants))
    counts = ((visit.num_strange, "row", "met the wrong expert"),
              (states.count(2), "token", "got what is another's"), (states.count(0), "token", "did not get its rows"))
    faults = [f"{counted(num, what)} {words}" for num, what, words in counts if num]
    if faults:
        return [["Wrong: ", f"{joined(faults)}.", True]]
    nothing = f"{counted(none, 'token')} met no expert, and the layer adds nothing to {'it' if none == 1 else 'them'}."
    return [["", nothing if none else "Every token has met an expert."]]


def figures(visit: ExpertsPlay) -> list[list[str]]:
    """Pairs of a value and what it means."""
    mean = visit.num_choices / visit.num_ranks
    return [[str(max(visit.rows)), f"rows of the busiest rank; an equal share is {mean:g}"],
            [str(visit.num_dropped), f"dropped, of {visit.num_choices} choices"],
            [str(visit.num_leaving()), "rows that leave their rank, and come back"]]


def in_words(visit: ExpertsPlay) -> tuple[list[str], list[list[str]]]:
    """The stops of a run, and its figures."""
    return ["".join(stress + rest for stress, rest, *_ in say).strip() for say in told(visit)], figures(visit)


class ExpertPlayer(Played):
    """What an expert player shows: traces by key."""

    widget, maker, called, usual_title = "experts", "expert_player", "expert player", "Tokens and their experts"
    read, payload, said = staticmethod(read_visit), staticmethod(run_payload), staticmethod(in_words)
