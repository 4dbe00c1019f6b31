"""L3, lab 4: what ranks hold of sharded state and when, what they send, how they clip.

`sizes` has for each unit how many numbers its parameters have, and in how many tensors. A share is 1/N of the numbers
plus one number for each tensor, to leave room for every kind of padding. What a rank holds is read from a recording's
memory events.
"""
from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from book.checks.formula import Formula
from book.checks.verdict import CheckFailed, likeliest, refuse, require, short
from book.cost import BUS_FACTORS, SHARDED_FROM, StateBytes, sent_bytes, sharded_sent_bytes
from book.trace import Event, Trace
from book.words import counted

Sizes = Mapping[str, tuple[int, int]]
FACTORS: Mapping[str, Callable[[int], float]] = BUS_FACTORS
DROPPED = "once the shard has its part, set p.grad = None for each parameter. Zeros in its place would keep the memory"


def predicted_state(got: Any, measured: StateBytes, zero_stage: int, num_ranks: int, item_bytes: int) -> float:
    """`got` must be the bytes of three kinds of state that a rank holds, as `measured`. Returns their sum."""
    require(isinstance(got, (tuple, list)) and len(got) == len(SHARDED_FROM), "held_bytes must return three numbers, "
            f"the bytes of parameters, gradients and optimizer state, not {got!r}")
    for (name, first), value in zip(SHARDED_FROM.items(), got):
        want = getattr(measured, name)
        words = "optimizer state" if name == "optimizer" else name
        formula = Formula(want, [
            (want * num_ranks, f"that is all of them, but from stage {first} on, a rank has 1/{num_ranks}"),
            (want / num_ranks, f"that is 1/{num_ranks} of them, but before stage {first} a rank has them all"),
            (want / item_bytes, "that counts numbers, but `each` says how many bytes one takes")])
        formula.require_right(f"in stage {zero_stage} on {num_ranks} ranks, the number of bytes of {words}", value)
    return measured.total


def fewest(got: Any, want: int | None, name: str) -> None:
    """`got` must be the fewest ranks on which something fits, None if no number of ranks will do."""
    if want is None:
        require(got is None, f"{name}: you return {got} ranks, but what is not sharded is already too large for one "
                "rank, whatever the number of ranks: return None")
        return
    require(got is not None, f"{name}: you return None, but it fits on {counted(want, 'rank')}")
    formula = Formula(want, [
        (want - 1, "round up: a fraction of a rank needs a whole one"),
        (want + 1, "one rank fewer is enough: it just fits"),
        (2 ** (want - 1).bit_length(), "the number of ranks need not be a power of two"),
        (min(want, got) if isinstance(got, (int, float)) else want, "on so few ranks it does not fit. What the stage "
         "does not shard stays whole on every rank, and only the rest is shared out")])
    formula.require_right(f"{name}: the fewest ranks", got)


# Over time

def held_in_time(trace: Trace, rank: int, what: str) -> Iterator[tuple[Event, dict[str, float]]]:
    """Each event of a rank, and how many bytes of `what` it then holds of every unit."""
    held: dict[str, float] = {}
    for event in sorted(trace.of_rank(rank), key=lambda event: event.start_s or 0.0):
        if event.kind == "memory" and event.op == what and event.unit is not None:
            held = {**held, event.unit: event.num_bytes or 0.0}
        yield event, held


def optimizer_sharded(trace: Trace, sizes: Sizes, numbers_each: int, item_bytes: int) -> float:
    """No rank may keep optimizer state for more than its share, with `numbers_each` numbers for each parameter.

    Returns the bytes that rank 0 keeps at the end.
    """
    kept = [_at_the_end(trace, rank, "optimizer") for rank in range(trace.world_size)]
    for rank, held in enumerate(kept):
        for unit in _whole(held, sizes, trace.world_size, numbers_each * item_bytes):
            raise CheckFailed(f"rank {rank} keeps {held[unit]:.0f} bytes of optimizer state for {unit}, but it should "
                              f"keep state for only 1/{trace.world_size} of its numbers")
    return sum(kept[0].values())


def gradients_dropped(trace: Trace, sizes: Sizes, item_bytes: int) -> None:
    """After the last step no rank may keep a unit's whole gradients."""
    for rank in range(trace.world_size):
        held = _at_the_end(trace, rank, "gradients")
        for unit in _whole(held, sizes, trace.world_size, item_bytes):
            raise CheckFailed(f"rank {rank} keeps {held[unit]:.0f} bytes of gradients of {unit} after the step: "
                              + DROPPED)


def gathered_in_place(before: Sequence[int], after: Sequence[int]) -> None:
    """On a rank: a unit's parameters must lie at the same addresses after an all-gather as before it."""
    moved = sum(one != other for one, other in zip(before, after, strict=True))
    refuse(moved, f"all_gather has moved {moved} of {len(before)} parameters into another buffer: gather into the one "
           "that they view, or copy into them")


def gradients_left(left: Sequence[Mapping[str, float]]) -> None:
    """After reduce_scatter no parameter may keep a gradient; `left` has the bytes of each rank, by unit."""
    for rank, held in enumerate(left):
        for unit, num_bytes in held.items():
            refuse(num_bytes, f"rank {rank} keeps {num_bytes:.0f} bytes of gradients of {unit} after reduce_scatter: "
                   + DROPPED)


def gradients_sharded(trace: Trace, sizes: Sizes, item_bytes: int) -> float:
    """Only the unit that backward is in, and root, may have whole gradients; at the update no unit may.

    Returns the most bytes of gradients that rank 0 held at once.
    """
    for rank in range(trace.world_size):
        for event, held in held_in_time(trace, rank, "gradients"):
            kept = _whole(held, sizes, trace.world_size, item_bytes)
            for unit in kept if event.op == "update" else ():
                raise CheckFailed(f"rank {rank} still has whole gradients of {unit} at the update: once the shard has "
                                  "its part, set p.grad = None for each parameter")
            blocks = sorted(unit for unit in kept if unit != "root")
            for unit in blocks if len(blocks) > 1 else ():
                require(held[unit] <= sizes[unit][0] * item_bytes, f"rank {rank} holds whole gradients of {unit} after "
                        "its reduce_scatter, beside its shard's. They are no longer needed, so set p.grad = None for "
                        "each parameter")
            require(len(blocks) < 2, f"rank {rank} holds whole gradients of {' and '.join(blocks[:2])} at once: inside "
                    "backward, scatter a unit's gradients as soon as the last of them is there, and drop them")
    return _peak(trace, "gradients")


def parameters_sharded(trace: Trace, sizes: Sizes, item_bytes: int, num_forwards: int) -> float:
    """A unit may be whole twice for each forward: while that runs, and while its backward runs.

    Returns the most bytes of parameters that rank 0 held at once. Raises CheckFailed for a unit that is never freed,
    or freed too late.
    """
    for rank in range(trace.world_size):
        num_whole, before, work = dict.fromkeys(sizes, 0), set[str](), "forward"
        for event, held in held_in_time(trace, rank, "parameters"):
            now = set(_whole(held, sizes, trace.world_size, item_bytes))
            for unit in now - before:
                num_whole[unit] += 1
            before, work = now, (event.op or "") if event.kind == "compute" else work
            blocks = sorted(now - {"root"})
            for unit in blocks if work == "update" else ():
                raise CheckFailed(f"rank {rank} holds {unit} whole after the backwards: free it once its gradients "
                                  "have been scattered. After the update nothing needs to be whole before the next "
                                  "forward")
            require(len(blocks) < 2, f"rank {rank} holds {' and '.join(blocks[:2])} whole at the same time: free a "
                    f"unit as soon as its {work} is done")
        for unit, num in num_whole.items():
            head = f"rank {rank} makes {unit} whole {num} times in {num_forwards} forwards and backwards: "
            require(num >= 2 * num_forwards,
                    f"{head}gather it for each forward, free it, gather it again for backward, and free it")
            require(num <= 2 * num_forwards, f"{head}twice for each is enough")
    return _peak(trace, "parameters")


def nothing_behind(num_bytes: Sequence[float]) -> None:
    """No memory of whole parameters may be left between forward and backward; `num_bytes` is what is left, by rank."""
    for rank, kept in enumerate(num_bytes):
        refuse(kept, f"on rank {rank} {kept:.0f} bytes of whole parameters outlive the forward, though no parameter "
               "refers to them: autograd keeps views of them for backward. An empty tensor in p.data does not free "
               "memory that these views use; empty the storage: flat.untyped_storage().resize_(0)")


def _at_the_end(trace: Trace, rank: int, what: str) -> dict[str, float]:
    """How many bytes of `what` a rank holds of every unit after its last event."""
    *_, (_, held) = held_in_time(trace, rank, what)
    return held


def _peak(trace: Trace, what: str) -> float:
    """The most bytes of `what` that rank 0 held at once."""
    return max(sum(held.values()) for _, held in held_in_time(trace, 0, what))


def _whole(held: Mapping[str, float], sizes: Sizes, num_ranks: int, item_bytes: int) -> list[str]:
    """The units of which a rank holds more than its share."""
    return [unit for unit, (numbers, tensors) in sizes.items()
            if held.get(unit, 0) > (-(-numbers // num_ranks) + tensors) * item_bytes]


# Sent

def sharded_traffic(trace: Trace, zero_stage: int, num_bytes: float, num_steps: int = 1) -> float:
    """All ranks together must have sent what the stage needs, apart from padding.

    `num_bytes` are those of all parameters. Returns how often a rank sent its (N-1)/N of the model in a step.
    """
    refuse(zero_stage and "all_reduce" in {event.op for event in trace.of_kind("collective")},
           "your run all-reduces. For gradients that gives every rank the whole mean at twice the bytes of a "
           "reduce-scatter, but a rank needs only its part")
    once = FACTORS["all_gather"](trace.world_size) * num_bytes * num_steps
    passes = sum(map(_sent, trace.events)) / trace.world_size / once
    want = sharded_sent_bytes(zero_stage, trace.world_size, num_bytes) * num_steps / once
    require(want - 1e-6 <= passes <= want * 1.15, f"a rank sends (N-1)/N of the model {passes:.2f} times in a step, "
            f"but stage {zero_stage} needs {want:.0f}: " + ("two all-gathers, for forward and backward, and a "
            "reduce-scatter" if zero_stage == 3 else "a reduce-scatter and an all-gather")
            + (", for each unit once and not for each of its parameters" if passes > 2 * want else ""))
    return passes


def _sent(event: Event) -> float:
    """Bytes that a rank sends in this event; the mean over the ranks if they differ."""
    if event.kind != "collective" or event.op is None or event.op == "barrier":
        return sent_bytes(event)
    op = "all_gather" if event.op in ("broadcast", "reduce") else event.op
    return FACTORS[op](len(event.group or ())) * (event.num_bytes or 0.0)


def counted_bytes(got: Any, events: Sequence[Event], num_ranks: int, item_bytes: int) -> float:
    """`got` must be the bytes that the rank of these events sent, if collectives are rings. Returns it."""
    want = sum(map(sent_bytes, events))
    by_op = {op: sum(event.num_bytes or 0 for event in events if event.op == op) for op in BUS_FACTORS}
    ring, buffers = (num_ranks - 1) / num_ranks, sum(by_op.values())
    by_number = sum(sent_bytes(replace(event, group=tuple(range(max(event.group) + 1)))) for event in events
                    if event.group)
    formula = Formula(want, [
        (buffers, "that is the size of the buffers. In a ring a rank sends (N-1)/N of a buffer, and twice that in an "
         "all-reduce"),
        (ring * buffers, "an all-reduce goes round the ring twice, but you count it once"),
        (2 * ring * buffers, "you count each collective twice, but a reduce-scatter and an all-gather go round only "
         "once"),
        (buffers + by_op["all_reduce"], "a rank keeps 1/N of a buffer to itself, so it sends (N-1)/N, not all"),
        (want / ring / num_ranks, "that is one rank's piece, but in a ring a rank sends N-1 pieces"),
        (want / item_bytes, "num_bytes is in bytes already"),
        (by_number, "you use the highest rank of a group as its size: ranks 3 to 6 are four ranks, len(event.group)"),
        (want * num_ranks, "that is all ranks together"),
        *((want + (num_ranks - 1 - ring) * sum(map(by_op.__getitem__, ops)), "num_bytes is the whole buffer, and a "
           "rank's piece of it is 1/N of that, in an all-gather too")
          for ops in (["all_gather"], ["reduce_scatter", "all_gather"]))])
    return formula.require_right(f"the bytes that a rank of {num_ranks} sends", got)


def clipped(norms: Sequence[Any], scales: Sequence[float], local: Sequence[Sequence[float]], want: float,
            max_norm: float) -> float:
    """Every rank must find the norm `want` of the whole gradient, and scale its shards by min(1, max_norm / norm).

    `scales` are the factors that the ranks' gradients were multiplied with, `local` the roots of the sums of squares of
    their own shards, unit by unit; `want` may be a norm of another kind. Returns the norm.
    """
    own, num = [float(np.linalg.norm(units)) for units in local], len(norms)
    total, units = sum(own), np.linalg.norm(local, axis=0)
    added = "the norms of the units are added up: norms don't add, their squares do"
    for rank, norm in enumerate(norms):
        formula = Formula(want, [
            (max_norm, "that is max_norm: return the norm before clipping"),
            (own[rank], "that is the norm of this rank's shards alone, so every rank would clip by its own factor"),
            (total, "that is the sum of the ranks' norms. Squares add up, norms don't"),
            (total / num, "that is the mean of the ranks' norms: add up their squares, then take the root"),
            (max(own), "that is the largest of the ranks' norms: add up their squares, then take the root"),
            (float(np.linalg.norm(local)), "that is the root of the sum of the squares, but another norm is asked for"),
            (want**2, "that is the square of the norm"), (want / num, "it is divided by the number of ranks"),
            (want / np.sqrt(num), "that is the root of the mean of the ranks' squares: add them up"),
            *((float(unit), "that is the norm of one unit: clipping needs the norm of the whole gradient, over all "
               "units, and shortens all of them by the same factor") for unit in (*units, *local[rank])),
            *((float(mistaken), added) for mistaken in (np.sum(local), np.sum(units), sum(local[rank]),
                                                 np.linalg.norm(np.sum(local, axis=1))))])
        formula.require_right(f"the norm on rank {rank}", norm)
    factor = min(1.0, max_norm / want)
    for rank, scale in enumerate(scales):
        by = "by several factors" if np.isnan(scale) else f"by {short(scale)}"
        require(np.isclose(scale, factor, rtol=1e-5), f"rank {rank}'s gradients are multiplied {by}, but should be by "
                f"{short(factor)} {_why_scale(scale, want, max_norm)}")
    return float(want)


def _why_scale(scale: float, norm: float, max_norm: float) -> str:
    return likeliest(
        (np.isnan(scale), "(max_norm / norm), all units alike: is each clipped by its own norm?"),
        (np.isclose(scale, 1),
         "(max_norm / norm): the norm is right, but nothing is clipped. Change shard.grad in place (mul_)"),
        (norm < max_norm, "as the norm is below max_norm: clipping makes gradients shorter, never longer"),
        (np.isclose(scale, (max_norm / norm)**2), "(max_norm / norm): you do it twice"),
        (True, "(max_norm / norm)"))
