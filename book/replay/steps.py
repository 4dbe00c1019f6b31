"""L2: replay the steps of a training job: the recorded order of phases and all-reduces, with durations from a model."""
from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from book.cost import Link, ring_all_reduce_s
from book.trace import Event, Trace

Late = Mapping[tuple[int, str], float | Sequence[float]]


@dataclass(frozen=True)
class RankPhase:
    """A phase of one rank, such as its third backward, and the all-reduces that the rank calls in it, in order.

    `phase` is None for an all-reduce that is called outside of any phase.
    """

    phase: Event | None
    calls: tuple[Event, ...]

    @property
    def first_s(self) -> float:
        """When it begins."""
        return (self.phase or self.calls[0]).times_s[0]

    @property
    def called_s(self) -> float:
        """When the last of its all-reduces is called; only where it has calls."""
        return max(call.start_s or 0.0 for call in self.calls)

    @property
    def end_s(self) -> float:
        """When it ends."""
        return self.phase.times_s[1] if self.phase else max(call.times_s[1] for call in self.calls)

    @property
    def wait_s(self) -> tuple[float, float] | None:
        """From when to when its rank waits in it: after the last call, to the end; None without calls."""
        return (self.called_s, self.end_s) if self.calls else None


@dataclass(frozen=True)
class StepReplay:
    """How long a step takes: call it with a recorded trace to get the same events on a modelled clock.

    A phase takes `phase_s[its name]`, and on some ranks more: `late[rank, phase]` is a number of seconds for each time,
    or a sequence, for the first time, the second and so on. All-reduces that are called inside of a phase come evenly
    spread, the last of them at the end of its computing, as a DDP's buckets do. Each starts when all ranks have called
    it and the one before is done, and takes the time of a ring on `link` (cost.ring_all_reduce_s). A phase ends when
    its computing and its all-reduces have ended, and a rank waits for an all-reduce that is called outside of a phase.
    Other collectives are left out.
    """

    phase_s: Mapping[str, float]
    link: Link
    late: Late = field(default_factory=dict, hash=False)

    def __call__(self, trace: Trace) -> Trace:
        """The trace's phases and all-reduces from 0 s; an all-reduce of a rank lasts from its call to its end.

        Raises ValueError for a trace without phases, for a phase without a duration, and where ranks differ in their
        phases or all-reduces: only jobs whose ranks all do the same are replayed.
        """
        programs = steps_of(trace)
        shapes = [[(block.phase and block.phase.op, [(call.op, call.num_bytes) for call in block.calls])
                   for block in program] for program in programs]
        if any(shape != shapes[0] for shape in shapes):
            raise ValueError("these ranks do not all have the same phases and all-reduces, so the job can't be "
                             "replayed")
        unknown = {block.phase.op for block in programs[0] if block.phase} - set(self.phase_s)
        if unknown:
            raise ValueError(f"phase_s has no duration for {', '.join(sorted(map(str, unknown)))}")
        events = sorted(self._events(programs), key=lambda event: (event.times_s, event.rank))
        return Trace(events, trace.world_size, "modelled", trace.source, name=trace.name, backend=trace.backend)

    def _events(self, programs: Sequence[Sequence[RankPhase]]) -> Iterator[Event]:
        clock_s, seen = [0.0] * len(programs), dict[str, int]()
        for blocks in zip(*programs):
            name = blocks[0].phase.op if blocks[0].phase else None
            own_s = [self._own_s(rank, name, seen.get(name or "", 0)) for rank in range(len(programs))]
            seen[name or ""] = seen.get(name or "", 0) + 1
            done_s, num = 0.0, len(blocks[0].calls)
            for number, calls in enumerate(zip(*(block.calls for block in blocks)), start=1):
                come_s = [begin_s + busy_s * number / num for begin_s, busy_s in zip(clock_s, own_s)]
                done_s = max(*come_s, done_s) + ring_all_reduce_s(len(programs), calls[0].num_bytes or 0.0, self.link)
                for call, start_s in zip(calls, come_s):
                    yield replace(call, step=None, start_s=start_s, end_s=done_s)
            for block in blocks:
                if block.phase:
                    rank = block.phase.rank
                    end_s = max(clock_s[rank] + own_s[rank], done_s)
                    yield replace(block.phase, step=None, start_s=clock_s[rank], end_s=end_s)
            clock_s = [max(begin_s + busy_s, done_s) for begin_s, busy_s in zip(clock_s, own_s)]

    def _own_s(self, rank: int, name: str | None, number: int) -> float:
        """How long a rank computes in a phase for the time of this number; 0 outside of phases."""
        if name is None:
            return 0.0
        extra = self.late.get((rank, name), 0.0)
        if isinstance(extra, Sequence):
            extra = extra[number] if number < len(extra) else 0.0
        return self.phase_s[name] + extra


def steps_of(trace: Trace) -> list[list[RankPhase]]:
    """Of each rank its phases in order, with the all-reduces of each, and those that belong to none.

    An all-reduce belongs to the phase in which it is called. Raises ValueError for a trace without phases.
    """
    programs = [_blocks(list(trace.of_rank(rank))) for rank in range(trace.world_size)]
    if not any(block.phase for program in programs for block in program):
        raise ValueError('this trace has no phases: wrap the parts of a step in `with phase("forward"):` and launch '
                         "with record=True")
    return programs


def _blocks(events: Sequence[Event]) -> list[RankPhase]:
    phases = [event for event in events if is_phase(event)]
    calls = [event for event in events if event.op == "all_reduce" and event.start_s is not None]
    inside = [[call for call in calls if phase.times_s[0] <= (call.start_s or 0.0) < phase.times_s[1]]
              for phase in phases]
    taken = {id(call) for some in inside for call in some}
    blocks = [RankPhase(phase, tuple(some)) for phase, some in zip(phases, inside)]
    return sorted([*blocks, *(RankPhase(None, (call,)) for call in calls if id(call) not in taken)],
                  key=lambda block: block.first_s)


def is_phase(event: Event) -> bool:
    """Whether an event is a phase of a step, and no gradient, stage's action or product."""
    return (event.kind == "compute" and event.num_bytes is None and event.stage is None
            and isinstance(event.op, str) and event.end_s is not None)
