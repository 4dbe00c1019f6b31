"""L3, lab 7: which pieces of a cut dimension go from a trainer's ranks to a generator's, and what arrives."""
from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from book.checks.verdict import CheckFailed, identical, likeliest, refuse, require
from book.words import listed

Cut = Callable[[int, int], list[np.ndarray]]
Ranks = Sequence[int]
Piece = tuple[int, ...]  # src, src_start, dst, dst_start, num
FIELDS = "(src, src_start, dst, dst_start, num)"


def pieces(answer: Any, length: int, trainer: Ranks, generator: Ranks) -> int:
    """`answer` must be all pieces of a dimension of this length, in any order. Returns how many there are."""
    where = f"weight_pieces({length}, {list(trainer)}, {list(generator)})"
    require(isinstance(answer, (list, tuple)) and all(isinstance(piece, (list, tuple)) and len(piece) == 5
                                                      for piece in answer),
            f"{where} must be a list with a tuple {FIELDS} for each piece")
    require(all(isinstance(number, (int, np.integer)) for piece in answer for number in piece),
            f"{where}: the numbers of a piece are whole numbers (.item() makes one of a tensor's element)")
    got, want = sorted(tuple(piece) for piece in answer), [piece for piece, _ in _right(length, trainer, generator)]
    if got == sorted(want):
        return len(want)
    refuse(any(piece[4] < 1 for piece in got), f"{where} has a piece with num = {min(piece[4] for piece in got)}: "
           "leave out two parts that don't overlap")
    reason = likeliest(*((got == slip, words) for slip, words in _slips(length, trainer, generator)))
    if reason:
        raise CheckFailed(f"{where}: {reason}")
    raise CheckFailed(f"{where}{_first_fault(got, length, trainer, generator)}")


def arrived(parts: Sequence[Any], whole: Any) -> float:
    """By rank of the generator: the rows that it ended with must be its part of the whole. Returns their sum."""
    for place, (part, want) in enumerate(zip(parts, np.array_split(np.asarray(whole), len(parts)))):
        require(identical(part, want), f"rank {place} of the generator has other rows than its part of the whole: "
                "weight_pieces must give the same list on every rank")
    return float(np.asarray(whole).sum())


def _by_split(length: int, num: int) -> list[np.ndarray]:
    return np.array_split(np.arange(length), num)


def _by_chunk(length: int, num: int) -> list[np.ndarray]:
    size = -(-length // num)
    return [np.arange(length)[first:first + size] for first in range(0, size * num, size)]


def _by_quotient(length: int, num: int) -> list[np.ndarray]:
    return [np.arange(length)[place * (length // num):(place + 1) * (length // num)] for place in range(num)]


def _right(length: int, trainer: Ranks, generator: Ranks, cut: Cut = _by_split) -> Iterator[tuple[Piece, int]]:
    """Each piece, and where it begins in the whole dimension."""
    for src, mine in zip(trainer, cut(length, len(trainer))):
        for dst, theirs in zip(generator, cut(length, len(generator))):
            both = np.intersect1d(mine, theirs)
            if len(both):
                first = int(both[0])
                yield (src, first - int(mine[0]), dst, first - int(theirs[0]), len(both)), first


def _slips(length: int, trainer: Ranks, generator: Ranks) -> Iterator[tuple[list[Piece], str]]:
    """What misconceptions give, and the sentence for each."""
    right = list(_right(length, trainer, generator))
    yield sorted((src, at, dst, to, num) for (src, _, dst, to, num), at in right), (
        "src_start counts from the beginning of the whole dimension; count from the first element that rank src holds")
    yield sorted((src, at, dst, at, num) for (src, _, dst, _, num), at in right), (
        "both starts count from the beginning of the whole dimension; count from the first element that the rank "
        "itself holds")
    yield sorted((src, at, dst, to, num) for (src, at, dst, _, num), to in right), (
        "dst_start counts from the beginning of the whole dimension; count from the first element that rank dst holds")
    yield sorted((trainer.index(src), at, generator.index(dst), to, num) for (src, at, dst, to, num), _ in right), (
        "src and dst are places in their groups here; messages need the ranks, trainer[place] and generator[place]")
    yield sorted((src, at, dst, to, at + num) for (src, at, dst, to, num), _ in right), (
        "the last number is where the piece stops; it must be how many elements it has")
    for cut, words in ((_by_chunk, "this is cut as `chunk` does, whose last part is short; `tensor_split` gives the "
                                   "first parts one more"),
                       (_by_quotient, "all parts are equally long here, so the last elements are left over; "
                                      "`tensor_split` gives the first parts one more")):
        yield sorted(piece for piece, _ in _right(length, trainer, generator, cut)), words


def _first_fault(got: Sequence[Piece], length: int, trainer: Ranks, generator: Ranks) -> str:
    """What is wrong with the first piece or element that is."""
    held = dict(zip(trainer, _by_split(length, len(trainer))))
    needed = dict(zip(generator, _by_split(length, len(generator))))
    found: dict[int, list[list[int]]] = {dst: [[] for _ in part] for dst, part in needed.items()}
    for src, src_start, dst, dst_start, num in got:
        piece = f": piece {(src, src_start, dst, dst_start, num)}"
        if src not in held or dst not in needed:
            return f"{piece} must go from one of the ranks {listed(trainer)} to one of {listed(generator)}"
        if src_start < 0 or src_start + num > len(held[src]):
            return f"{piece} ends beyond the {len(held[src])} elements that rank {src} holds"
        if dst_start < 0 or dst_start + num > len(needed[dst]):
            return f"{piece} ends beyond the {len(needed[dst])} elements that rank {dst} needs"
        for step in range(num):
            found[dst][dst_start + step].append(int(held[src][src_start + step]))
    for dst, places in found.items():
        for want, came in zip(needed[dst].tolist(), places):
            if came != [want]:
                what = ("nothing comes for" if not came else f"{len(came)} pieces write" if len(came) > 1
                        else f"element {came[0]} comes in the place of")
                return f": {what} element {want} of the dimension, which rank {dst} needs"
    return f" has the right elements in {len(got)} pieces: two parts that overlap make one piece"
