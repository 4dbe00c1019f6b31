"""L3: what ranks hold of sharded state and when, by the measured memory events of a recorded run, and what they send.

A unit's `sizes` are its numbers of parameters, unit -> (numbers, tensors). A share is 1/N of the numbers and, to leave
room for every way to fill up, one number for each tensor.
"""
from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from book.checks.verdict import CheckFailed, number, short
from book.cost import BUS_FACTORS, StateBytes, sent_bytes, sharded_sent_bytes
from book.trace import STATE, Event, Trace

Sizes = Mapping[str, tuple[int, int]]
SHARDED = STATE[:3]  # activations are no state of a model


def predicted_state(got: Any, measured: StateBytes, zero_stage: int, num_ranks: int, item_bytes: int) -> float:
    """`got` must be the three bytes that `measured` says a rank holds. Returns their sum."""
    if not isinstance(got, (tuple, list)) or len(got) != len(SHARDED):
        raise CheckFailed("held_bytes must return three numbers, the bytes of parameters, gradients and optimizer "
                          f"state, not {got!r}")
    for first, (name, value) in zip((3, 2, 1), zip(SHARDED, got)):
        want = getattr(measured, name)
        words = "optimizer state" if name == "optimizer" else name
        number(f"in stage {zero_stage} on {num_ranks} ranks, the number of bytes of {words}", value, want, [
            (want * num_ranks, f"that is all of them, and from stage {first} on a rank has 1/{num_ranks}"),
            (want / num_ranks, f"that is 1/{num_ranks} of them, and before stage {first} a rank has them all"),
            (want / item_bytes, "that is how many numbers there are; `each` says how many bytes one takes")])
    return measured.total


def fewest(got: Any, want: int | None, name: str) -> None:
    """`got` must be the fewest ranks on which something fits, None where no number of them will do."""
    if want is None:
        if got is not None:
            raise CheckFailed(f"{name}: you say {got} ranks, but what is not sharded is already too large for one "
                              "rank, and no number of ranks changes that: return None")
        return
    if got is None:
        raise CheckFailed(f"{name}: you say that it never fits, but on {want} rank{'s' * (want > 1)} it does")
    number(f"{name}: the fewest ranks", got, want, [
        (want - 1, "a part of a rank is a rank more: round up"),
        (want + 1, "one rank fewer would do: what just fits, fits")])


# In time

def held_in_time(trace: Trace, rank: int, what: str) -> Iterator[tuple[Event, dict[str, float]]]:
    """Each event of a rank, and how many bytes of `what` it then holds of every unit."""
    held: dict[str, float] = {}
    for event in sorted(trace.of_rank(rank), key=lambda event: event.start_s):
        if event.kind == "memory" and event.op == what:
            held = {**held, event.unit: event.num_bytes or 0.0}
        yield event, held


def optimizer_sharded(trace: Trace, sizes: Sizes, numbers_each: int, item_bytes: int) -> float:
    """No rank may keep optimizer state for more than its share, `numbers_each` for each number.

    Returns the bytes that rank 0 keeps at the end.
    """
    for rank in range(trace.world_size):
        *_, (_, held) = held_in_time(trace, rank, "optimizer")
        for unit, num_bytes in held.items():
            if num_bytes > numbers_each * _share(sizes[unit], trace.world_size, item_bytes):
                raise CheckFailed(f"rank {rank} keeps {num_bytes:.0f} bytes of optimizer state for {unit}: it should "
                                  f"be for 1/{trace.world_size} of its numbers")
        if rank == 0:
            kept = sum(held.values())
    return kept


def gradients_dropped(trace: Trace, sizes: Sizes, item_bytes: int) -> None:
    """After the last step no rank may keep a unit's whole gradients."""
    for rank in range(trace.world_size):
        *_, (_, held) = held_in_time(trace, rank, "gradients")
        for unit, num_bytes in held.items():
            if num_bytes > _share(sizes[unit], trace.world_size, item_bytes):
                raise CheckFailed(f"rank {rank} keeps {num_bytes:.0f} bytes of gradients of {unit} after the step: "
                                  "when the shard has its part, set p.grad = None for each parameter. Zeros in its "
                                  "place keep the memory")


def gradients_sharded(trace: Trace, sizes: Sizes, item_bytes: int) -> float:
    """Whole gradients may be there for the unit that backward is in, and for root; at the update for none.

    Returns the most bytes of gradients that rank 0 held at once.
    """
    peaks = []
    for rank in range(trace.world_size):
        peaks.append(0.0)
        for event, held in held_in_time(trace, rank, "gradients"):
            peaks[-1] = max(peaks[-1], sum(held.values()))
            kept = [unit for unit in sizes if held.get(unit, 0) > _share(sizes[unit], trace.world_size, item_bytes)]
            if event.op == "update" and kept:
                raise CheckFailed(f"rank {rank} still has whole gradients of {kept[0]} at the update: when the shard "
                                  "has its part, set p.grad = None for each parameter")
            blocks = [unit for unit in kept if unit != "root"]
            if len(blocks) > 1:
                raise CheckFailed(_why_gradients(rank, sorted(blocks), held, sizes, item_bytes))
    return peaks[0]


def parameters_sharded(trace: Trace, sizes: Sizes, item_bytes: int, num_forwards: int) -> float:
    """A unit may be whole twice for each forward: while that runs, and while its backward does.

    Returns the most bytes of parameters that rank 0 held at once. Raises CheckFailed for a unit that is never freed,
    or freed too late.
    """
    peaks = []
    for rank in range(trace.world_size):
        rises, before, work = dict.fromkeys(sizes, 0), set(), "forward"
        peaks.append(0.0)
        for event, held in held_in_time(trace, rank, "parameters"):
            peaks[-1] = max(peaks[-1], sum(held.values()))
            now = {unit for unit in sizes if held.get(unit, 0) > _share(sizes[unit], trace.world_size, item_bytes)}
            for unit in now - before:
                rises[unit] += 1
            work = event.op if event.kind == "compute" else work
            _check_whole(rank, work, now)
            before = now
        _check_rises(rank, rises, num_forwards)
    return peaks[0]


def nothing_behind(num_bytes: Sequence[float]) -> None:
    """`num_bytes` by rank of memory that held whole parameters in forward and is still there before backward: none."""
    for rank, kept in enumerate(num_bytes):
        if kept:
            raise CheckFailed(f"on rank {rank} {kept:.0f} bytes of whole parameters outlive the forward, though no "
                              "parameter shows them: autograd has kept views of them for backward. An empty tensor in "
                              "p.data takes the memory from the parameter alone; take it from the storage: "
                              "flat.untyped_storage().resize_(0)")


def _why_gradients(rank: int, blocks: Sequence[str], held: Mapping[str, float], sizes: Sizes, item_bytes: int) -> str:
    for unit in blocks:
        if held[unit] > sizes[unit][0] * item_bytes:
            return (f"rank {rank} holds whole gradients of {unit} after its reduce_scatter, beside its shard's: they "
                    "are no longer needed, so set p.grad = None for each parameter")
    return (f"rank {rank} holds whole gradients of {' and '.join(blocks[:2])} at once: scatter a unit's when the last "
            "of them is there, inside backward, and drop them")


def _check_whole(rank: int, work: str, now: set[str]) -> None:
    """`work` is what the rank does now, or did last."""
    blocks = sorted(now - {"root"})
    if work == "update" and blocks:
        raise CheckFailed(f"rank {rank} holds {blocks[0]} whole after the backwards: it is freed when its gradients "
                          "have been scattered, and after the update nothing has to be whole before the next forward")
    if len(blocks) > 1:
        raise CheckFailed(f"rank {rank} holds {' and '.join(blocks[:2])} whole at the same time: free a unit as soon "
                          f"as its {work} is done")


def _check_rises(rank: int, rises: Mapping[str, int], num_forwards: int) -> None:
    for unit, num in rises.items():
        if num < 2 * num_forwards:
            raise CheckFailed(f"rank {rank} makes {unit} whole {num} times in {num_forwards} forwards and backwards: "
                              "it is gathered for each forward, freed, gathered again for backward, and freed")
        if num > 2 * num_forwards:
            raise CheckFailed(f"rank {rank} makes {unit} whole {num} times in {num_forwards} forwards and backwards: "
                              "two for each are enough")


def _share(size: tuple[int, int], num_ranks: int, item_bytes: int) -> float:
    numbers, tensors = size
    return (-(-numbers // num_ranks) + tensors) * item_bytes


# Sent

def sharded_traffic(trace: Trace, zero_stage: int, num_bytes: float, num_steps: int = 1) -> float:
    """All ranks together must have sent what the stage needs, but for what fills shards up.

    `num_bytes` are those of all parameters. Returns how often a rank sent its (N-1)/N of the model in a step.
    """
    used = {event.op for event in trace.of_kind("collective")}
    if "all_reduce" in used and zero_stage:
        raise CheckFailed("your run all-reduces: that hands every rank the whole mean gradient, at twice the bytes of "
                          "a reduce-scatter, and a rank needs its part alone")
    once = BUS_FACTORS["all_gather"](trace.world_size) * num_bytes * num_steps
    passes = sum(map(_sent, trace.events)) / trace.world_size / once
    want = sharded_sent_bytes(zero_stage, trace.world_size, num_bytes) * num_steps / once
    if not want - 1e-6 <= passes <= want * 1.15:
        raise CheckFailed(f"a rank sends (N-1)/N of the model {passes:.2f} times in a step; stage {zero_stage} takes "
                          f"{want:.0f}: " + ("two all-gathers, for forward and backward, and a reduce-scatter"
                                             if zero_stage == 3 else "a reduce-scatter and an all-gather"))
    return passes


def _sent(event: Event) -> float:
    """Bytes that a rank sends in it, the mean over the ranks where they differ."""
    if event.kind == "collective" and event.op in ("broadcast", "reduce"):
        return BUS_FACTORS["all_gather"](len(event.group)) * (event.num_bytes or 0.0)
    if event.kind == "collective" and event.op != "barrier":
        return BUS_FACTORS[event.op](len(event.group)) * (event.num_bytes or 0.0)
    return sent_bytes(event)


def counted_bytes(got: Any, events: Sequence[Event], num_ranks: int, item_bytes: int) -> float:
    """`got` must be the bytes that the rank of these events sent, if collectives are rings. Returns it."""
    want = sum(map(sent_bytes, events))
    by_op = {op: sum(event.num_bytes for event in events if event.op == op) for op in BUS_FACTORS}
    ring, buffers = (num_ranks - 1) / num_ranks, sum(by_op.values())
    return number(f"the bytes that a rank of {num_ranks} sends", got, want, [
        (buffers, "that is what the buffers weigh. In a ring a rank sends (N-1)/N of one, and in an all-reduce twice"),
        (ring * buffers, "an all-reduce goes round the ring twice, and you count it once"),
        (2 * ring * buffers, "you count each collective twice: a reduce-scatter and an all-gather go round once"),
        (buffers + by_op["all_reduce"], "a rank keeps 1/N of a buffer to itself: (N-1)/N, not all"),
        (want / ring / num_ranks, "that is one rank's piece; N-1 pieces pass through a rank in a ring"),
        (want / item_bytes, "num_bytes is in bytes already"),
        (want * num_ranks, "that is all ranks together")])


def clipped(norms: Sequence[Any], scales: Sequence[float], local: Sequence[Sequence[float]], want: float,
            max_norm: float) -> float:
    """Every rank must find the norm `want` of the whole gradient, and scale its shards by min(1, max_norm / norm).

    `scales` are the factors that the ranks' gradients were multiplied with, `local` the roots of the sums of squares of
    their own shards, unit by unit; `want` may be a norm of another kind. Returns the norm. Raises CheckFailed with the
    likeliest reason.
    """
    own, num = [float(np.linalg.norm(units)) for units in local], len(norms)
    total, units = sum(own), np.linalg.norm(local, axis=0)
    added = "the norms of the units are added: norms don't add, their squares do"
    for rank, norm in enumerate(norms):
        number(f"the norm on rank {rank}", norm, want, [
            (max_norm, "that is max_norm: return the norm from before clipping"),
            (own[rank], "that is the norm of this rank's shards alone: every rank clips by a factor of its own"),
            (total, "that is the sum of the ranks' norms. Squares add up, norms don't"),
            (total / num, "that is the mean of the ranks' norms: add up their squares, then take the root"),
            (max(own), "that is the largest of the ranks' norms: add up their squares, then take the root"),
            (float(np.linalg.norm(local)), "that is the root of the sum of the squares, and another norm is asked for"),
            (want**2, "that is the square of the norm"), (want / num, "it is divided by the number of ranks"),
            (want / np.sqrt(num), "that is the root of the mean of the ranks' squares: add them up"),
            *((float(unit), "that is the norm of one unit: clipping needs that of the whole gradient, over all units, "
               "and shortens them all by one factor") for unit in (*units, *local[rank])),
            *((mistaken, added) for mistaken in (np.sum(local), np.sum(units), sum(local[rank]),
                                                 np.linalg.norm(np.sum(local, axis=1))))])
    factor = min(1.0, max_norm / want)
    for rank, scale in enumerate(scales):
        if not np.isclose(scale, factor, rtol=1e-5):
            by = "by no one factor" if np.isnan(scale) else f"by {short(scale)}"
            raise CheckFailed(f"rank {rank}'s gradients are multiplied {by}, and should be by {short(factor)} "
                              + _why_scale(scale, want, max_norm))
    return float(want)


def _why_scale(scale: float, norm: float, max_norm: float) -> str:
    if np.isnan(scale):
        return "(max_norm / norm), all units alike: is each clipped by a norm of its own?"
    if np.isclose(scale, 1):
        return "(max_norm / norm): the norm is right, and nothing is clipped. Change shard.grad in place (mul_)"
    if norm < max_norm:
        return "as the norm is below max_norm: clipping makes gradients shorter, never longer"
    if np.isclose(scale, (max_norm / norm)**2):
        return "(max_norm / norm): it is done twice"
    return "(max_norm / norm)"
