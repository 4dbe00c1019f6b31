"""L3, lab 9: rows sent to the ranks that have their experts, and back, with their gradients.

A wrong result is compared with what wrong code makes of the same numbers. Shapes: N tokens of a rank, K choices of
each, E experts in blocks of E/R on R ranks, width D.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from book.checks.formula import Slips, told
from book.checks.verdict import (dense, disagree, held, kind_of, likeliest, magnitude, refuse, require, same, short,
                                 with_hint)
from book.launch import LaunchError
from book.trace import Trace


class Routed:
    """What the tokens of all ranks choose: for each rank its choices (N, K), and which of them are kept."""

    def __init__(self, choices: Sequence[Any], kept: Sequence[Any], num_experts: int) -> None:
        self.choices = [dense(own).astype(int) for own in choices]
        self.kept = [dense(own).astype(bool) for own in kept]
        self.num_ranks, self.per_rank = len(self.choices), num_experts // len(self.choices)

    def sent(self, rank: int) -> tuple[np.ndarray, np.ndarray]:
        """The tokens and columns of the rows that a rank sends, in the order of their experts."""
        tokens, columns = np.nonzero(self.kept[rank])
        order = np.argsort(self.choices[rank][tokens, columns], kind="stable")
        return tokens[order], columns[order]

    def experts(self, rank: int, at: tuple[np.ndarray, np.ndarray] | None = None) -> np.ndarray:
        """The experts of the rows that a rank sends, or of other choices of its tokens."""
        return self.choices[rank][at or self.sent(rank)]

    def rows(self, rank: int, which: Any = None) -> list[int]:
        """How many rows a rank sends to each rank, or how many there would be for another mask of choices."""
        chosen = self.choices[rank][self.kept[rank] if which is None else which]
        return np.bincount(chosen // self.per_rank, minlength=self.num_ranks).tolist()

    def trip(self, rank: int) -> tuple[list[int], list[int], list[int], list[int]]:
        """The right tokens, columns, give and take of a rank."""
        tokens, columns = self.sent(rank)
        return (tokens.tolist(), columns.tolist(), self.rows(rank),
                [self.rows(source)[rank] for source in range(self.num_ranks)])


MOST_ROWS = 10 ** 6  # far more than an exercise sends


def sizes(rows: Any, give: Any, take: Any, num_ranks: int) -> None:
    """In a rank, before rows are sent: `give` and `take` must be lists of numbers of rows, and `give` fit the rows."""
    for name, given in (("give", give), ("take", take)):
        require(isinstance(given, (list, tuple)) and all(type(one) is int for one in given), f"{name} has to be a list "
                "of whole numbers, such as counts.tolist()")
        refuse(min(given, default=0) < 0 or sum(given) > MOST_ROWS, f"{name} is {list(given)}: torch.empty holds what "
               "was in memory before. Has anything been written into the counts?")
        require(len(given) == num_ranks, f"{name} has {len(given)} sizes, and there are {num_ranks} ranks: add up the "
                "counts of the experts that are on one rank")
    swapped = sum(take) == len(rows)
    require(sum(give) == len(rows), f"{len(rows)} rows are sent, but give adds up to {sum(give)}" + (
        ". take adds up to their number: are the two swapped? What a rank takes on the way there it gives on the way "
        "back" if swapped else ": give[r] is how many of them go to rank r"))


ROWS_SENT = ("all_to_all_single(arrived", "exchange(")  # in a line of code where rows are sent
SHORT_COUNTS = ("these are the counts: every rank needs one for each expert, chosen or not. bincount stops at the "
                "largest expert that is chosen: give it minlength=num_experts")


def exchange_failure(error: LaunchError) -> str:
    """An error of ranks that exchange counts and then rows, with a hint."""
    sends_rows = any(said in str(error) for said in ROWS_SENT)
    return with_hint(error, {
        "is not what the other expects": "take[r] is what rank r gives to this rank. Only rank r knows that: exchange "
        "the counts first, and then the rows" if sends_rows else SHORT_COUNTS,
        "does not divide equally": SHORT_COUNTS, **({} if sends_rows else {"bytes came for a tensor": SHORT_COUNTS})})


def counts_failure(error: LaunchError) -> str:
    """An error of ranks that add up counts, with a hint."""
    return f"{error}\n{SHORT_COUNTS}" if disagree(error) else str(error)


def dispatched(got: Sequence[Any], tokens: Sequence[Any], routed: Routed, case: str) -> float:
    """What each rank returns must be the rows that come for its experts, the expert of each, and the trip.

    Rows may come in any order that keeps each rank's together. Returns the sum of absolute values of all rows.
    """
    trips = []
    for rank, three in enumerate(got):
        require(isinstance(three, (tuple, list)) and len(three) == 3, f"{case}, rank {rank}: return three things, the "
                f"rows, their experts and a Trip, not {kind_of(three)}")
        trips.append(_trip(three[2], f"{case}, rank {rank}"))
    came = partial(_rows_came, [rows for rows, _, _ in got], tokens, routed)
    for rank, trip in enumerate(trips):
        _require_trip(trip, routed, rank, f"{case}, rank {rank}", came)
    for rank, (rows, experts, _) in enumerate(got):
        where = f"{case}, rank {rank}"
        parts = [_part(trip, rank) for trip in trips]
        want = np.concatenate([dense(tokens[source])[part[0]] for source, part in enumerate(parts)])
        found = held(rank, "the rows that arrive", rows, want.shape)
        same(f"{where}, the rows", found, want, want, lambda: "they are not the tokens that the ranks' trips name: "
             "tokens and columns have to be in the order in which the rows are sent")
        _require_experts(experts, rank, parts, routed, where)
    return sum(magnitude(rows) for rows, _, _ in got)


def gradients_come_home(gradients: Sequence[Any], kept: Sequence[Any], case: str) -> None:
    """Where each row that arrived sends a 1 back, a token's gradient must be 1 for each of its choices that is kept."""
    for rank, (gradient, own) in enumerate(zip(gradients, kept)):
        where = f"{case}, rank {rank}"
        require(gradient is not None, f"{where}: the rows that arrive have no gradient for their tokens. Send them "
                "with exchange, which sends each row's gradient back: dist.all_to_all_single alone has no backward")
        counts = dense(own).sum(1)
        want = np.repeat(counts[:, None], dense(gradient).shape[-1], axis=1)
        found = held(rank, "the tokens' gradient", gradient, want.shape)
        same(f"{where}, the tokens' gradient", found, want, want, lambda: "each row sends its gradient back to its "
             "token, once for each choice that is kept")


class SentRows(NamedTuple):
    """Which rows a rank has sent: their tokens and columns of choices, and how many went to and came from each rank."""

    tokens: np.ndarray
    columns: np.ndarray
    give: list[int]
    take: list[int]


def _trip(given: Any, where: str) -> SentRows:
    require(isinstance(given, (tuple, list)) and len(given) == 4, f"{where}: the third thing has to be a Trip(tokens, "
            f"columns, give, take), not {kind_of(given)}")
    tokens, columns, give, take = (dense(one).astype(int).ravel() for one in given)
    return SentRows(tokens, columns, give.tolist(), take.tolist())


def _part(trip: SentRows, rank: int) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and columns of the rows that a trip sends to a rank."""
    part = slice(sum(trip.give[:rank]), sum(trip.give[:rank + 1]))
    return trip.tokens[part], trip.columns[part]


def _rows_came(rows: Sequence[Any], tokens: Sequence[Any], routed: Routed) -> bool:
    """Whether each rank got the rows for its experts from each rank, in whichever order."""
    for rank, arrived in enumerate(rows):
        take = routed.trip(rank)[3]
        if tuple(getattr(arrived, "shape", ())) != (sum(take), dense(tokens[rank]).shape[1]):
            return False
        for source, part in enumerate(np.split(dense(arrived), np.cumsum(take)[:-1])):
            sent = routed.sent(source)[0][routed.experts(source) // routed.per_rank == rank]
            if sorted(part.tolist()) != sorted(dense(tokens[source])[sent].tolist()):
                return False
    return True


def _require_trip(trip: SentRows, routed: Routed, rank: int, where: str, came: Callable[[], bool]) -> None:
    """The sizes must be right, and the trip name each kept choice once, those of a rank's experts together.

    `came` tells whether the right rows came to all ranks.
    """
    due, given, taken = routed.trip(rank), trip.give, trip.take
    every, first = np.ones_like(routed.kept[rank]), np.zeros_like(routed.kept[rank])
    first[:, 0] = routed.kept[rank][:, 0]
    require(given == due[2], f"{where}: give is {given}, and should be {due[2]}" + likeliest(
        (given == routed.rows(rank, every), ": choices that are not kept are sent too"),
        (given == routed.rows(rank, first), ": only first choices are sent. A token goes to all its experts"),
        (given == due[3], ": these are the numbers of rows that come: give and take are swapped")))
    require(taken == due[3], f"{where}: take is {taken}, and should be {due[3]}")
    names = (trip.tokens, trip.columns)
    require({len(name) for name in names} == {sum(given)}, f"{where}: the trip has {len(names[0])} tokens and "
            f"{len(names[1])} columns, and {sum(given)} rows are sent: one of each for every row")
    require(names[1].max(initial=0) < every.shape[1] and names[0].max(initial=0) < len(every), f"{where}: the trip's "
            "tokens are rows of choices, and its columns are columns of it")
    goes = routed.experts(rank, names) // routed.per_rank
    is_sorted = np.array_equal(goes, np.repeat(np.arange(routed.num_ranks), given))
    refuse(not is_sorted and came(), f"{where}: the right rows are sent, but trip.tokens and trip.columns name them in "
           "another order: sort both as you sort the rows")
    require(is_sorted, f"{where}: the rows are not in the order of the ranks that they are for. The first give[0] rows "
            "of what you send go to rank 0, the next give[1] to rank 1: sort them by expert")
    require(set(zip(*names)) == set(zip(*np.nonzero(routed.kept[rank]))), f"{where}: the trip does not name each "
            "choice that is kept once")


def _require_experts(experts: Any, rank: int, parts: Sequence[tuple[np.ndarray, np.ndarray]], routed: Routed,
                     where: str) -> None:
    """Each row must have the number of its expert, counted from the rank's first one."""
    require(hasattr(experts, "shape"), f"{where}: the experts have to be a tensor, one number for each row, not "
            f"{kind_of(experts)}")
    mine = [routed.experts(source, part) for source, part in enumerate(parts)]
    want, found = np.concatenate(mine) - rank * routed.per_rank, dense(experts).astype(int)
    require(found.shape == want.shape, f"{where}: the experts have the shape {found.shape}, but {len(want)} rows "
            "arrive")
    own = routed.experts(rank)
    slips: Slips = [
        (want + rank * routed.per_rank, "these are the numbers of experts among all: count from the rank's first one"),
        (np.concatenate([part + (source - rank) * routed.per_rank for source, part in enumerate(mine)]), "these count "
         "the experts on through the ranks that the rows come from. All rows are for this rank's experts, of which the "
         "first is 0"),
        (np.concatenate([np.sort(part) for part in mine]) - rank * routed.per_rank, "this takes the rows of each rank "
         "for sorted by expert, and they were sent in another order: sort them by expert, not only by rank"),
        (np.sort(want), "this takes the rows for sorted by expert. They are sorted by the rank that they come from, "
         "and only those of one rank by expert"),
        (want * 0, "all rows go to one expert: a rank has several"),
        (np.resize(np.arange(routed.per_rank), want.shape), "this deals the rows out one by one"),
        (own % routed.per_rank, "these are the experts of the rows that the rank sent, not of those that came"),
        (np.concatenate([np.sort(part)[::-1] for part in mine]) - rank * routed.per_rank, "the rows of each rank are "
         "taken in the reverse order of experts")]
    require(np.array_equal(found, want), f"{where}: row {int((found != want).argmax())} goes to the wrong expert: " +
            next((said for value, said in slips if np.array_equal(found, value)),
                 "the counts that came before the rows say how many of each rank's rows are for which expert"))


def rows_travel(trace: Trace, num_ranks: int, num_experts: int) -> None:
    """Rows must go by all-to-all; only counts may be gathered."""
    for rank in range(num_ranks):
        for event in trace.of_rank(rank):
            other = event.kind in ("collective", "send") and event.op not in ("all_to_all", "barrier")
            refuse(other and (event.num_bytes or 0) > 8 * num_ranks * num_experts, f"the results are right, but rank "
                   f"{rank} calls {event.op or event.kind} with {short(event.num_bytes or 0)} bytes: rows go by "
                   "exchange, to the ranks that need them alone")


def combined(got: Sequence[Any], done: Sequence[Any], gates: Sequence[Any], upstream: Sequence[Any], routed: Routed,
             case: str) -> float:
    """What each rank returns must be its outputs (N, D), and the gradients of `done` and `gates` must be right.

    `got` has three of a rank: outputs, the gradient of `done`, that of `gates`. Returns the sum of absolute values.
    """
    ends = [np.cumsum(routed.trip(rank)[3]).tolist() for rank in range(routed.num_ranks)]
    pieces = [np.split(dense(own), ends[rank][:-1]) for rank, own in enumerate(done)]
    for rank, (outputs, _, _) in enumerate(got):
        returned = np.concatenate([piece[rank] for piece in pieces])
        slips = _slips_of_outputs(returned, dense(gates[rank]), routed, rank)
        want = slips[0][0]
        found = held(rank, "the outputs", outputs, want.shape)
        same(f"{case}, rank {rank}: the outputs", found, want, want, partial(
            told, found, slips[1:], "this is not the sum of each token's rows, each times its gate"))
    for rank, (_, done_gradient, gate_gradient) in enumerate(got):
        _require_gradients(done_gradient, gate_gradient, pieces, gates, upstream, routed, f"{case}, rank {rank}", rank)
    return sum(magnitude(outputs) for outputs, _, _ in got)


def _slips_of_outputs(returned: np.ndarray, gates: np.ndarray, routed: Routed, rank: int) -> Slips:
    """The right outputs, and what mistakes make of the rows that have come back."""
    at, unsorted = routed.sent(rank), np.nonzero(routed.kept[rank])

    def add(tokens: np.ndarray, weights: Any) -> np.ndarray:
        outputs = np.zeros((len(gates), returned.shape[1]))
        np.add.at(outputs, tokens, returned * np.reshape(weights, (-1, 1)))
        return outputs

    last, once = np.zeros((len(gates), returned.shape[1])), np.ones(len(returned))
    last[at[0]] = returned * gates[at][:, None]
    total = (gates * routed.kept[rank]).sum(1)[at[0]]
    return [
        (add(at[0], gates[at]), ""),
        (add(at[0], once), "the gates are forgotten: each row is weighted by the gate of its choice"),
        (add(unsorted[0], gates[unsorted]), "the rows are not put back in order. They come back in the order in which "
         "they were sent, sorted by expert: trip.tokens says which token each is"),
        (add(unsorted[0], gates[at]), "the rows are not put back in order: the gates are, but row i is added to the "
         "i-th token. trip.tokens says which token it is"),
        (add(at[0], gates[unsorted]), "the rows go to the right tokens with the gates of others: take the gate at "
         "trip.tokens and trip.columns"),
        (add(unsorted[0], once), "the rows are not put back in order, and the gates are forgotten"),
        (last, "of a token's rows only one is left: outputs[tokens] = ... overwrites where a token is named twice. Add "
         "them up"),
        (add(at[0], gates[at] / total), "the gates are divided by their sum: here a gate is used as it is"),
        (add(at[0], gates[at[0], 0]), "every row has the gate of its token's first choice: take the column too"),
        (add(at[0], gates[at]) / np.maximum(routed.kept[rank].sum(1), 1)[:, None], "this is the mean of a token's "
         "rows: the gates weigh them, so add them up"),
        (add(at[0], gates[at] ** 2), "the gates are multiplied twice")]


def _require_gradients(done_gradient: Any, gate_gradient: Any, pieces: Sequence[Sequence[np.ndarray]],
                       gates: Sequence[Any], upstream: Sequence[Any], routed: Routed, where: str, rank: int) -> None:
    """The gradients must have come home: to the gates from the rows that came back, to the rows from other ranks."""
    at, ups = routed.sent(rank), [dense(up) for up in upstream]
    returned = np.concatenate([piece[rank] for piece in pieces])
    want = np.zeros(dense(gates[rank]).shape)
    want[at] = (returned * ups[rank][at[0]]).sum(1)
    refuse(gate_gradient is None or not dense(gate_gradient).any(), f"{where}: the outputs are right, but no gradient "
           "comes to the gates, and the router learns through them alone: are they detached, or changed into numbers?")
    same(f"{where}: the gradient of the gates", dense(gate_gradient), want, want, lambda: "each gate's is the product "
         "of its row and the gradient of its token's output")
    refuse(done_gradient is None or not dense(done_gradient).any(), f"{where}: the outputs are right, but no gradient "
           "comes to the experts: are the rows detached, or sent by something that autograd does not see? Use exchange")
    due = []
    for source in range(routed.num_ranks):
        tokens, columns = routed.sent(source)
        mine = routed.experts(source) // routed.per_rank == rank
        due.append((dense(gates[source])[tokens, columns][:, None] * ups[source][tokens])[mine])
    whole = np.concatenate(due)
    same(f"{where}: the gradient of the experts' rows", dense(done_gradient), whole, whole, lambda: "each row's is its "
         "gate times the gradient of its token's output")
