"""L3, lab 8: attention block by block, and in a ring of ranks, forward and backward.

A wrong result is compared with what wrong rings make of the same numbers. Shapes: B sequences, H heads, T tokens, width
K; whole queries, keys and values are (B, H, T, K), and rank r has the tokens at `positions[r]`.
"""
from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

import numpy as np

from book.checks.formula import Slips, told
from book.checks.recordings import point_to_point
from book.checks.verdict import CheckFailed, agree, dense, held, kind_of, magnitude, refuse, require, same, short
from book.trace import Trace

HIDDEN = -np.inf  # the score of a key that a query does not see
Block: TypeAlias = "tuple[int, int, tuple[int, int] | None]"  # ranks: of the keys, the values; of the mask, if any


# Block by block

def is_state(got: Any) -> Sequence[Any]:
    """`got` must be a state, (maximum, total, output), and is returned."""
    given = "nothing (None)" if got is None else f"{len(got)} values" if isinstance(got, (tuple, list)) else (
        f"a {type(got).__name__}")
    require(isinstance(got, (tuple, list)) and len(got) == 3, f"add_block returns {given}: return the state with the "
            "block in it, (maximum, total, output)")
    return got


def blockwise(got: Any, scores: Any, values: Any, blocks: Sequence[Sequence[int]], case: str) -> float:
    """`got`, (outputs, log-sum-exp), must be those of all `scores` (..., T, S), however the keys came in `blocks`.

    Returns the sum of absolute values of both.
    """
    scores, values = dense(scores), dense(values)
    want, want_log = attend_all(scores, values)
    output, log_sum = _pair(got, case)
    for what, found, due in (("the output", output, want), ("the log-sum-exp", log_sum, want_log)):
        require(found.shape == due.shape, f"{case}: {what} has the shape {found.shape}, but it should be {due.shape}: "
                "a row of scores has one maximum and one total, and as many outputs as a value has numbers")
    for row in np.argwhere(~np.isfinite(output).all(-1) | ~np.isfinite(log_sum)):
        _explain_nan(tuple(row), scores, blocks, case)
    same(f"{case}: the output", output, want, want,
         lambda: told(output, _slips_of_blocks(scores, values, blocks), "this is not one softmax over all keys"))
    same(f"{case}: the log-sum-exp", log_sum, want_log, want_log, lambda: "the outputs are right, but maximum and "
         "total do not belong together: total is the sum of exp(score - maximum) with the maximum that you return")
    return magnitude(output) + magnitude(log_sum)


def _slips_of_blocks(scores: np.ndarray, values: np.ndarray, blocks: Sequence[Sequence[int]]) -> Slips:
    means = [attend_all(scores[..., block], values[..., block, :])[0] for block in blocks]
    return [
        (_running(scores, values, blocks, False, True), "the old total is not rescaled. It is a sum of exp(score - old "
         "maximum): where the maximum has risen, multiply it with exp(old maximum - new maximum)"),
        (_running(scores, values, blocks, True, False), "the old output is not rescaled, only the total. Both are sums "
         "with the old maximum in them"),
        (_running(scores, values, blocks, False, False), "neither the old total nor the old output is rescaled to the "
         "new maximum"),
        (_running(scores, values, blocks, True, True, True), "the output is divided by the total block by block: "
         "return the sum, finished divides it once at the end"),
        (sum(means) / len(means), "this is the mean of the blocks' attentions. A block with larger scores must weigh "
         "more: add up totals and outputs, and divide once at the end"),
        (sum(means), "this is the sum of the blocks' attentions, each divided by its own total"),
        (means[-1], "only the last block is in it: the old total and output are lost"),
        (means[0], "only the first block is in it")]


def _explain_nan(row: tuple[int, ...], scores: np.ndarray, blocks: Sequence[Sequence[int]], case: str) -> None:
    first = scores[row[:-1]][row[-1]][list(blocks[0])]
    where = f"{case}: there is nan or inf in row {row[-1]}"
    refuse((first == HIDDEN).all(), f"{where}, which sees no key of the first block. Its maximum is still -inf, and "
           "-inf less -inf is nan: subtract 0 in such a row")
    last = scores[row[:-1]][row[-1]][list(blocks[-1])]
    refuse((last == HIDDEN).all(), f"{where}, which sees no key of the last block. The maximum must not fall from "
           "block to block: keep the larger of the old one and the block's")
    refuse(np.abs(scores[np.isfinite(scores)]).max() > 700, f"{where}. Its scores are near {first.max():.0f}, and exp "
           "of that is infinite: subtract the maximum of all scores so far")
    raise CheckFailed(f"{where}, although it sees a key of the first block: rescale with exp(old maximum - new "
                      "maximum), and return the new one")


@np.errstate(divide="ignore", invalid="ignore")
def _running(scores: np.ndarray, values: np.ndarray, blocks: Sequence[Sequence[int]], rescale_total: bool,
             rescale_output: bool, divide: bool = False) -> np.ndarray:
    """The outputs of attention block by block, where sums are rescaled or not, and the output divided each time."""
    maximum = np.full(scores.shape[:-1], HIDDEN)
    total, output = np.zeros(maximum.shape), np.zeros((*maximum.shape, values.shape[-1]))
    for block in blocks:
        new = np.maximum(maximum, scores[..., block].max(-1))
        shift = np.where(new == HIDDEN, 0, new)
        factor = np.exp(maximum - shift)
        weights = np.exp(scores[..., block] - shift[..., None])
        total = total * (factor if rescale_total else 1) + weights.sum(-1)
        output = output * (factor[..., None] if rescale_output else 1) + weights @ values[..., block, :]
        output = output / total[..., None] if divide else output
        maximum = new
    return output / total[..., None]


# In a ring

class Cut:
    """Queries, keys and values (B, H, T, K) and the positions of each rank's tokens."""

    def __init__(self, q: Any, k: Any, v: Any, positions: Sequence[Any]) -> None:
        self.positions = [dense(own).astype(int) for own in positions]
        self.num_ranks = len(self.positions)
        self.q, self.k, self.v = ([dense(x)[:, :, own] for own in self.positions] for x in (q, k, v))

    def scores(self, rank: int, owner: int, mask: tuple[int, int] | None) -> np.ndarray:
        """A rank's scores with the keys of `owner`, under the mask of two ranks' positions, or without one."""
        found = self.q[rank] @ self.k[owner].swapaxes(-1, -2) / np.sqrt(self.q[0].shape[-1])
        if mask is None:
            return found
        queries, keys = (self.positions[one % self.num_ranks] for one in mask)
        return np.where(keys > queries[:, None], HIDDEN, found)

    def attend(self, rank: int, blocks: Sequence[Block]) -> tuple[Any, Any]:
        """A rank's outputs and log-sum-exp from blocks: owner of the keys, owner of the values, ranks of the mask."""
        scores = np.concatenate([self.scores(rank, owner, mask) for owner, _, mask in blocks], -1)
        return attend_all(scores, np.concatenate([self.v[owner] for _, owner, _ in blocks], 2))

    def right(self, rank: int) -> list[Block]:
        """The blocks as they come to a rank."""
        return [(owner, owner, (rank, owner)) for owner in self.owners(rank)]

    def owners(self, rank: int) -> list[int]:
        """Whose blocks come to a rank, hop by hop."""
        return [(rank - hop) % self.num_ranks for hop in range(self.num_ranks)]


def ring_outputs(got: Sequence[Any], q: Any, k: Any, v: Any, positions: Sequence[Any], case: str) -> float:
    """What each rank returns must be outputs and log-sum-exp of its queries with all keys that they see."""
    cut = Cut(q, k, v, positions)
    due = [cut.attend(rank, cut.right(rank)) for rank in range(cut.num_ranks)]
    for rank, pair in enumerate(got):
        _pair(pair, f"{case}, rank {rank}")
        require(pair[0].shape == due[rank][0].shape, f"{case}, rank {rank}: the outputs have the shape "
                f"{tuple(pair[0].shape)}, but they should be {due[rank][0].shape}, as the queries")
    found = [np.nan_to_num(dense(output)) for output, _ in got]
    for rank, ((output, log_sum), (want, want_log)) in enumerate(zip(got, due)):
        where = f"{case}, rank {rank}: the output"
        refuse(np.isnan(dense(output)).any(), f"{where} has nan in it: {_why_not_ring(cut, found)}")
        same(where, held(rank, "its outputs", output, want.shape), want, want, lambda: _why_not_ring(cut, found))
        log_sum = held(rank, "the log-sum-exp", log_sum, want_log.shape)
        same(f"{case}, rank {rank}: the log-sum-exp", log_sum, want_log, want_log, lambda: "the outputs are right, but "
             "this is not the log of the sum of exp(score): return both as finished gives them")
    return sum(magnitude(output) for output in found)


def _why_not_ring(cut: Cut, found: Sequence[np.ndarray]) -> str:
    """The sentence of the first mistake that makes what all ranks have found."""
    ranks, n = range(cut.num_ranks), cut.num_ranks
    sums = [np.sum([cut.attend(rank, [block])[0] for block in cut.right(rank)], axis=0) for rank in ranks]
    slips = [([cut.attend(rank, [slip(rank, owner, hop) for hop, owner in enumerate(cut.owners(rank))])[0]
               for rank in ranks], said) for slip, said in SLIPS]
    slips += [([cut.attend(rank, cut.right(rank)[part])[0] for rank in ranks], said) for part, said in PARTS]
    slips += [([total / n for total in sums], "this is the mean of the attentions to single blocks: use add_block, so "
               "that a block weighs as much as its scores say"),
              (sums, "this is the sum of the attentions to single blocks, each divided by its own total")]
    return next((said for outputs, said in slips if all(map(agree, found, outputs))),
                "this is not the attention of the rank's queries to all keys up to their own position")


# What a rank takes at a hop by mistake: whose keys, whose values, and the mask of whose queries and keys.
SLIPS: list[tuple[Callable[[int, int, int], Block], str]] = [
    (lambda rank, owner, hop: (owner, owner, (rank, rank)), "travelled keys get the mask of the rank's own block. A "
     "key keeps the position that it has in its sequence: take the positions of the rank that the keys come from"),
    (lambda rank, owner, hop: (owner, owner, (rank, rank + hop)), "the masks are those of keys that travel the other "
     "way. pass_on sends to rank + 1, so after a hop a rank has the block of rank - 1"),
    (lambda rank, owner, hop: (owner, owner, None), "there is no mask: every query sees the keys that come after it"),
    (lambda rank, owner, hop: (owner, owner, (owner, rank)), "the positions of queries and keys are exchanged in the "
     "mask"),
    (lambda rank, owner, hop: (owner, rank, (rank, owner)), "the keys travel and the values stay: each score needs the "
     "value of its own key, so both make every hop"),
    (lambda rank, owner, hop: (rank, owner, (rank, owner)), "the values travel and the keys stay: both make every hop"),
    (lambda rank, owner, hop: (rank, rank, (rank, owner)), "the masks change from hop to hop, but the keys and values "
     "are always the rank's own: use what pass_on returns")]
PARTS = [  # of the blocks that come, those that are not left out
    (slice(0, 1), "only the rank's own block is in it: the other ranks' keys have to come round"),
    (slice(0, -1), "the block that comes last is missing: N - 1 hops bring N blocks, with the rank's own"),
    (slice(1, None), "the rank's own block is missing: work on it before the first hop")]


def ring_gradients(got: Sequence[Any], q: Any, k: Any, v: Any, upstream: Any, positions: Sequence[Any],
                   case: str) -> float:
    """What each rank returns must be the gradients of its queries, keys and values."""
    cut = Cut(q, k, v, positions)
    ups = [dense(upstream)[:, :, own] for own in cut.positions]
    parts = _parts(cut, ups)
    for rank, three in enumerate(got):
        require(isinstance(three, (tuple, list)) and len(three) == 3, f"{case}, rank {rank}: return three gradients, "
                f"of q, k and v, not {kind_of(three)}")
    for place, name, why in ((0, "q", _why_not_queries), (2, "v", _why_not_travelled), (1, "k", _why_not_travelled)):
        for rank, three in enumerate(got):
            want = _due(parts, name, rank)
            refuse(np.isnan(dense(three[place])).any(), f"{case}, rank {rank}: the gradient of {name} has nan in it. A "
                   "block's weights are exp(score - log_sum). A softmax of the block alone is nan where all of it is "
                   "hidden")
            found = held(rank, f"the gradient of {name}", three[place], want.shape)
            same(f"{case}, rank {rank}: the gradient of {name}", found, want, want,
                 partial(why, cut, ups, rank, name, found))
    return sum(magnitude(x) for three in got for x in three)


Parts = Mapping[str, list[list[np.ndarray]]]  # of each name [rank][owner]: from a rank's queries with owner's keys


def _parts(cut: Cut, ups: Sequence[np.ndarray], dots: bool = True, scale: bool = True, own_mask: bool = False,
           backwards: bool = False, by_block: bool = False) -> Parts:
    """What each rank's queries and each rank's keys make of the gradients together, right or with one mistake."""
    parts: dict[str, list[list[np.ndarray]]] = {"q": [], "k": [], "v": []}
    for rank, up in enumerate(ups):
        output, log_sum = cut.attend(rank, cut.right(rank))
        rows: dict[str, list[np.ndarray]] = {"q": [], "k": [], "v": []}
        for owner in range(cut.num_ranks):
            whose = rank if own_mask else (2 * rank - owner) % cut.num_ranks if backwards else owner
            scores = cut.scores(rank, owner, (rank, whose))
            norm = attend_all(scores, cut.v[owner])[1] if by_block else log_sum
            weights = np.exp(scores - np.where(np.isfinite(norm), norm, 0)[..., None])
            slope = up @ cut.v[owner].swapaxes(-1, -2) - dots * (up * output).sum(-1, keepdims=True)
            slope = weights * slope / np.sqrt(up.shape[-1]) ** scale
            rows["q"].append(slope @ cut.k[owner])
            rows["k"].append(slope.swapaxes(-1, -2) @ cut.q[rank])
            rows["v"].append(weights.swapaxes(-1, -2) @ up)
        for name, row in rows.items():
            parts[name].append(row)
    return parts


def _due(parts: Parts, name: str, rank: int) -> np.ndarray:
    """The whole gradient of a rank's queries, keys or values."""
    return np.sum(parts["q"][rank] if name == "q" else [row[rank] for row in parts[name]], axis=0)


def _of_scores(cut: Cut, ups: Sequence[np.ndarray], rank: int, name: str) -> Slips:
    """Mistakes in one block's formulas, whichever way the gradients go."""
    return [(_due(_parts(cut, ups, **{slip: value}), name, rank), said) for slip, value, said in (
        ("dots", False, "the softmax's own term is missing: subtract from each row of gradient @ v.mT the row's sum of "
         "gradient * output"),
        ("scale", False, "the scores were divided by the root of K, so their gradient is too"),
        ("own_mask", True, "the mask is that of the rank's own block at every hop: take the positions of the rank that "
         "the keys come from"),
        ("backwards", True, "the masks are those of keys that travel the other way: after a hop a rank has the block "
         "of rank - 1"),
        ("by_block", True, "each block's weights are a softmax of their own. The weights of all blocks add up to 1: "
         "exp(score - log_sum), with the log_sum of the forward"))]


def _why_not_queries(cut: Cut, ups: Sequence[np.ndarray], rank: int, name: str, found: np.ndarray) -> str:
    row = _parts(cut, ups)["q"][rank]
    last = (rank + 1) % cut.num_ranks
    slips = [(row[rank], "only the rank's own block is in it: every block of keys that comes by adds its part"),
             (sum(row) - row[last], f"the part of rank {last}'s keys, the last to come, is missing"),
             (row[last], "only the last block's part is in it: add the parts up"),
             *_of_scores(cut, ups, rank, name)]
    return told(found, slips, "this is not the sum over all blocks of (gradient of the scores) @ keys")


def _why_not_travelled(cut: Cut, ups: Sequence[np.ndarray], rank: int, name: str, found: np.ndarray) -> str:
    parts, n = _parts(cut, ups), cut.num_ranks
    other, each = "k" if name == "v" else "v", [row[rank] for row in parts[name]]
    after, before = (rank + 1) % n, (rank - 1) % n
    thing = {"k": "keys", "v": "values"}[name]
    slips = [
        (_due(parts, name, after), f"this is the gradient of rank {after}'s {thing}, whole but not at home: after N - "
         "1 hops with all parts it lies one rank before its own. One more hop takes it there"),
        (_due(parts, name, before), f"this is the gradient of rank {before}'s {thing}: it has made one hop too many"),
        (each[rank], "only the rank's own queries are in it: other ranks' queries see these keys, and their parts have "
         "to come home"),
        (sum(parts[name][rank]), f"the sum has stayed on this rank while the {thing} moved on, so it has the parts of "
         f"all ranks' {thing} in it: a block's gradient travels with the block"),
        (sum(map(sum, parts[name])), f"this adds up the gradients of all ranks' {thing}, which are different ones: "
         "each block's gradient goes to the rank that the block is from"),
        (_due(parts, other, rank), "this is that of the other: return the gradients as q, k, v"),
        *((sum(each) - one, f"the part of rank {which}'s queries is missing") for which, one in enumerate(each)),
        *_of_scores(cut, ups, rank, name)]
    return told(found, slips, "this is not the sum over all ranks' queries of their part in it")


def ring_traffic(trace: Trace, key_bytes: int, way: str) -> int:
    """Every rank may send 2(N-1) blocks of `key_bytes` "forward", 4N-2 "backward"; returns the bytes of rank 0."""
    n = trace.world_size
    most = {"forward": 2 * (n - 1), "backward": 4 * n - 2}[way]
    reason = {"forward": "N - 1 hops bring all blocks to all ranks: one hop more takes keys and values home, where "
                         "they are already",
              "backward": "Keys and values make N - 1 hops. Only their gradients make one more, to get home. They make "
              "none before the rank's own part is in them"}[way]
    point_to_point(trace)
    for rank, sent in enumerate(trace.message_bytes()):
        require(sent <= most * key_bytes, f"the result is right, but in the {way} pass rank {rank} sends "
                f"{short(sent / key_bytes)} blocks (keys, values or gradients of one rank), and {most} are enough. "
                f"{reason}")
    return round(trace.message_bytes()[0])


# Shared

def attend_all(scores: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Outputs and log-sum-exp; 0 and -inf for a query that sees no key."""
    shift = np.maximum(scores.max(-1, keepdims=True), -1e300)
    weights = np.exp(scores - shift)
    total = weights.sum(-1, keepdims=True)
    with np.errstate(divide="ignore"):
        return weights @ values / np.where(total, total, 1), (shift + np.log(total))[..., 0]


def _pair(got: Any, where: str) -> tuple[np.ndarray, np.ndarray]:
    require(isinstance(got, (tuple, list)) and len(got) == 2, f"{where}: return two tensors, as finished(state) gives "
            f"them, not {kind_of(got)}")
    require(all(hasattr(x, "shape") for x in got), f"{where}: return two tensors, outputs and log-sum-exp")
    return dense(got[0]), dense(got[1])
