"""L1: pipeline schedules: in which order the ranks of a pipeline run forwards and backwards of micro-batches.

Each function says for one rank what it does, and leaves the waiting to the run: a rank starts its next action when
what that needs has come. p ranks, S stages, v = S/p stages on each rank, M micro-batches.
"""
from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import islice

from book.schedule import Action, PipelineSchedule, ScheduleError, check_counts

Pair = tuple[int, int]  # stage, micro-batch
Turn = tuple[int, int, str]  # stage, micro-batch, kind


def gpipe(num_stages: int, num_micro_batches: int) -> PipelineSchedule:
    """All forwards, then all backwards, one stage on each rank (huang2019).

    Raises ScheduleError for a count below 1, as all schedules here do.
    """
    def order(rank: int) -> Iterator[Turn]:
        for kind in ("F", "B"):
            yield from ((rank, m, kind) for m in range(num_micro_batches))

    return _schedule("gpipe", num_stages, num_micro_batches, num_stages, order)


def one_f_one_b(num_stages: int, num_micro_batches: int) -> PipelineSchedule:
    """As many forwards as there are stages behind, then one forward, one backward in turn, and a flush at the end.

    Stage s starts its first backward with min(S - s, M) micro-batches in flight, and never has more. narayanan2019 ran
    it without a flush, on weights of several versions; with one it is in fan2021, and narayanan2021memory's
    PipeDream-Flush.
    """
    def order(rank: int) -> Iterator[Turn]:
        pairs = [(rank, m) for m in range(num_micro_batches)]
        return _in_turn(pairs, pairs, num_stages - 1 - rank)

    return _schedule("one_f_one_b", num_stages, num_micro_batches, num_stages, order)


def interleaved(num_stages: int, num_micro_batches: int, stages_per_rank: int = 2) -> PipelineSchedule:
    """1F1B with v = `stages_per_rank` stages on each rank, S/v apart from one another (narayanan2021).

    A rank runs p micro-batches on its first stage, then the same p on its next one, and so on. Raises ScheduleError
    unless v divides S, and p divides M.
    """
    check_counts(num_stages=num_stages, num_micro_batches=num_micro_batches, stages_per_rank=stages_per_rank)
    world_size, rest = divmod(num_stages, stages_per_rank)
    if rest:
        raise ScheduleError(f"interleaved: {num_stages} stages can't be shared out {stages_per_rank} to a rank: make "
                            "num_stages a multiple of stages_per_rank")
    if num_micro_batches % world_size:
        raise ScheduleError(f"interleaved: micro-batches go round in groups of {world_size}, one for each rank, and "
                            f"{num_micro_batches} are no whole number of groups: use a multiple of {world_size}")

    def order(rank: int) -> Iterator[Turn]:
        stages = range(rank, num_stages, world_size)
        groups = [range(first, first + world_size) for first in range(0, num_micro_batches, world_size)]
        forwards = [(stage, m) for group in groups for stage in stages for m in group]
        backwards = [(stage, m) for group in groups for stage in reversed(stages) for m in group]
        return _in_turn(forwards, backwards, (stages_per_rank - 1) * world_size + 2 * (world_size - 1 - rank))

    return _schedule("interleaved", num_stages, num_micro_batches, world_size, order)


def zero_bubble(num_stages: int, num_micro_batches: int) -> PipelineSchedule:
    """ZB-V: two stages on each rank, laid out as a V, and backwards split so that W fills what would be idle (qi2024).

    Rank r runs stage r on the way down and stage S-1-r on the way up, so the first rank also has the last stage, and
    the loss. Raises ScheduleError for an odd number of stages.
    """
    check_counts(num_stages=num_stages, num_micro_batches=num_micro_batches)
    world_size, rest = divmod(num_stages, 2)
    if rest:
        raise ScheduleError(f"zero_bubble: the V has two stages on each rank, so {num_stages} stages don't fit: use an "
                            "even number")

    def order(rank: int) -> Iterator[Turn]:
        # Planned for a pipeline that is full; with fewer micro-batches the places of the others stay empty.
        planned = _v_order(rank, num_stages, max(num_micro_batches, 2 * world_size - 1))
        return ((stage, m, kind) for stage, m, kind in planned if m < num_micro_batches)

    return _schedule("zero_bubble", num_stages, num_micro_batches, world_size, order)


def _schedule(name: str, num_stages: int, num_micro_batches: int, world_size: int,
              order: Callable[[int], Iterator[Turn]]) -> PipelineSchedule:
    check_counts(num_stages=num_stages, num_micro_batches=num_micro_batches)
    actions = [Action(rank, *step) for rank in range(world_size) for step in order(rank)]
    return PipelineSchedule(name, num_stages, num_micro_batches, actions, world_size)


def _in_turn(forwards: Sequence[Pair], backwards: Sequence[Pair], num_ahead: int) -> Iterator[Turn]:
    """`num_ahead` forwards first, then a forward and a backward in turn, then the backwards that are left."""
    ahead, waiting = iter(forwards), iter(backwards)
    for stage, m in islice(ahead, num_ahead):
        yield stage, m, "F"
    for (stage, m), backward in zip(ahead, waiting):  # forwards end first
        yield stage, m, "F"
        yield *backward, "B"
    done = max(0, len(forwards) - num_ahead)
    yield from ((stage, m, "B") for stage, m in backwards[done:])


def _v_order(rank: int, num_stages: int, num_micro_batches: int) -> Iterator[Turn]:
    """What a rank of ZB-V does, phase by phase (qi2024); "down" is its first stage, "up" its second."""
    world_size = num_stages // 2
    down, up = _Stage(rank), _Stage(num_stages - 1 - rank)
    behind = world_size - rank  # ranks from here to the turn of the V
    yield from (down.next("F") for _ in range(2 * behind - 1))
    for _ in range(rank):
        yield up.next("F")
        yield down.next("F")
    for _ in range(behind):
        yield from (up.next(kind) for kind in "FIW")
    while up.at["F"] < num_micro_batches:  # full: forward, backward and weights of both stages in turn
        if down.at["F"] < num_micro_batches:
            yield down.next("F")
        yield from (down.next(kind) for kind in "IW")
        yield from (up.next(kind) for kind in "FIW")
    for _ in range(rank):  # nobody may wait for a gradient now: weights can be left for later
        yield down.next("I")
        yield up.next("I")
    for _ in range(behind):
        yield from (down.next(kind) for kind in "IW")
    for stage in (up, down):
        yield from (stage.next("W") for _ in range(num_micro_batches - stage.at["W"]))


class _Stage:
    """A stage and the micro-batch that comes next in it, for each kind of action."""

    def __init__(self, number: int) -> None:
        self.number, self.at = number, dict.fromkeys("FIW", 0)

    def next(self, kind: str) -> Turn:
        """The stage's next action of a kind."""
        m = self.at[kind]
        self.at[kind] += 1
        return self.number, m, kind
