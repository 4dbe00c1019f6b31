"""L1: what was read from a job's files, in words: a line for what they are, then what they say."""
from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np

from book.look.arrivals import FOCUS, JITTER, LINK, NOBODY, TRANSFER, Arrivals, arrivals
from book.look.flights import FlightDump, guilty, sentences
from book.look.gpu_memory import NO_FRAMES, GpuMemory, Part
from book.look.profiles import EXPOSED, Exposed, Profile, by_name, exposed_by_group, exposed_by_step, times
from book.look.runs import FAILED, HUNG, JobRun
from book.look.timelines import ExposedWaits, Steps, Timeline, arrivals_of, exposed_waits, steps, waiting_shares
from book.waiting.hang import Group
from book.words import counted, in_bytes, in_seconds, named

MOST_NAMES = 3
MOST_RANKS = 8  # whose shares are told one by one
MOST_LINES = 8  # of a program that hold memory


def dumps_told(flights: Sequence[FlightDump]) -> Iterator[str]:
    """Whose dumps these are, which rank is to blame, and why."""
    world_size = max(flight.world_size for flight in flights)
    backends = sorted({flight.backend for flight in flights} - {""})
    yield (f"{counted(len(flights), 'Flight Recorder dump')} of {counted(world_size, 'rank')}"
           + (f", on {', '.join(backends)}" if backends else ""))
    missing = sorted(set(range(world_size)) - {flight.rank for flight in flights})
    if missing:
        yield f"no dump of {named(missing)}"
    said, blamed = list(sentences(flights)), guilty(flights)
    if not said:
        yield "no rank waits: every call in these dumps is done"
    else:
        yield f"the others wait for {named(blamed)}" if blamed else "no single rank is to blame"
    yield from (f"  {sentence}" for sentence in said)


def snapshot_told(name: str, snapshot: GpuMemory) -> Iterator[str]:
    """What holds a GPU's memory, by part of the model and by line, at the moment when most was held."""
    yield (f"{name}, GPU {snapshot.device}: the allocator has {in_bytes(snapshot.reserved)}, of which tensors hold "
           f"{in_bytes(snapshot.held)}; the largest free piece has {in_bytes(snapshot.largest_free)}")
    if snapshot.asked:
        yield (f"  out of memory: {in_bytes(snapshot.asked)} were asked for while tensors held "
               f"{in_bytes(snapshot.held_then)} and {in_bytes(snapshot.left)} were left on the GPU"
               + ("; more than that is free, but in pieces" if _in_pieces(snapshot) else ""))
    if not snapshot.has_history:
        yield ("  nothing says who holds it: call torch.cuda.memory._record_memory_history() before the model is "
               "built")
        return
    yield (f"  at most {in_bytes(snapshot.peak)} were held, by the names in the stacks of who allocated them: "
           + ", ".join(f"{part} {in_bytes(num_bytes)}" for part, num_bytes in _by_part(snapshot.parts)))
    for part in [part for part in snapshot.parts if part.place][:MOST_LINES]:
        yield f"    {part.place}: {in_bytes(part.num_bytes)} in {counted(part.count, 'tensor')}, {part.name}"
    if any(part.name == NO_FRAMES for part in snapshot.parts):
        yield ("  what has no Python frames was allocated by backward's own thread, as gradients are, or before the "
               "history began")


def _in_pieces(snapshot: GpuMemory) -> bool:
    """Whether enough was free of what the allocator has, and no piece was long enough."""
    return snapshot.is_then and snapshot.largest_free < snapshot.asked <= snapshot.reserved - snapshot.held


def _by_part(parts: Sequence[Part]) -> list[tuple[str, int]]:
    found: Counter[str] = Counter()
    for part in parts:
        found[part.name] += part.num_bytes
    return found.most_common()


def profiles_told(profiles: Sequence[Profile]) -> Iterator[str]:
    """Where the time of each rank went, and which rank the others waited for."""
    devices = {"GPU" if profile.on_gpu else "CPU" for profile in profiles}
    yield f"{counted(len(profiles), 'profiler trace')}" + (f", {devices.pop()}" if len(devices) == 1 else "")
    for position, profile in enumerate(profiles):
        yield from _times_told(_name(profile, position), profile)
    if len(profiles) > 1:
        found = arrivals(profiles)
        yield from _arrivals_told(found) if found else [
            "who comes last: fewer than five collectives of these traces are the same on all ranks"]


def _name(profile: Profile, position: int) -> str:
    return f"trace {position + 1}" if profile.rank is None else f"rank {profile.rank}"


def _times_told(name: str, profile: Profile) -> Iterator[str]:
    found = times(profile)
    if not found.span_s:
        yield f"{name}: no work in it"
        return
    parts = {"computing": found.computing_s, EXPOSED: found.exposed_s, "idle": found.idle_s}
    shares = ", ".join(f"{part} {seconds / found.span_s:.1%}" for part, seconds in parts.items())
    yield f"{name}: {found.span_s:.3g} s, {shares}"
    if found.messages_s:
        hidden = 1 - found.exposed_s / found.messages_s
        most = ", ".join(f"{count} {kind} in {seconds:.3g} s" for kind, count, seconds in
                         by_name(profile.messages)[:MOST_NAMES])
        yield f"  of {found.messages_s:.3g} s of communication {hidden:.1%} are hidden; most are {most}"
        yield from _exposed_told(exposed_by_group(profile), exposed_by_step(profile))


def _exposed_told(groups: Sequence[Exposed], steps: Sequence[Exposed]) -> Iterator[str]:
    """Exposed communication, by process group and by step, a line for each."""
    if groups:
        told = [f"{one.name} {in_seconds(one.exposed_s)} of {in_seconds(one.messages_s)}" for one in groups]
        more = f", and {len(told) - MOST_RANKS} more" if len(told) > MOST_RANKS else ""
        yield f"  exposed, by group: {', '.join(told[:MOST_RANKS])}{more}"
    if 1 < len(steps) <= MOST_RANKS:
        yield "  exposed, by step: " + ", ".join(
            f"{one.name.removeprefix('ProfilerStep#')}: {in_seconds(one.exposed_s)}" for one in steps)
    elif steps:
        most = max(steps, key=lambda one: one.exposed_s)
        yield (f"  exposed, by step: {in_seconds(float(np.median([one.exposed_s for one in steps])))} in the median "
               f"of {counted(len(steps), 'step')}, most in {most.name}: {in_seconds(most.exposed_s)}")


def _arrivals_told(found: Arrivals) -> Iterator[str]:
    """Which rank the others waited for, or that there is none."""
    num, position, lost = len(found.starts_s), found.late_position, found.lost_s
    if any(found.left_out):
        left = ", ".join(f"{counted(each, 'collective')} of rank {rank}"
                         for rank, each in zip(found.ranks, found.left_out) if each)
        yield f"compared: {num} collectives that are on all ranks; left out: {left}"
    often = [int((found.last == place).sum()) for place in range(len(lost))]
    most = lost.index(max(lost))
    if position is None and any(found.left_out) and lost[most] > FOCUS * sum(lost) > 0:
        yield (f"who comes last: rank {found.ranks[most]}, to {often[most]} of these {num}; all others waited "
               f"{in_seconds(lost[most])} for it. Of those left out nothing is known")
        return
    if position is None:
        yield (f"who comes last: no rank stands out in {num} collectives; {named(found.ranks)} kept the others waiting "
               f"for {', '.join(f'{seconds / found.wall_s:.1%}' for seconds in lost)} of {found.wall_s:.3g} s")
        return
    yield (f"who comes last: rank {found.ranks[position]}, {counted(often[position], 'time')} in {num} collectives. "
           f"For {lost[position] / found.wall_s:.1%} of {found.wall_s:.3g} s all others waited for it")


def timelines_told(timelines: Sequence[Timeline]) -> Iterator[str]:
    """How long steps took, how long ranks waited, and who was late, by how much and in which phase."""
    if not any(len(timeline.calls) for timeline in timelines):
        return
    made = steps(timelines)
    if made:
        which = f"{counted(made.num, 'step')} after the first" if made.whole else f"the last {made.num} steps"
        yield f"{which}: {in_seconds(made.median_s)} in the median"
    if _on_gpu(timelines):
        yield ("who is late, and what is exposed: a GPU's collectives run after the calls seen here; give profiler "
               "traces to lockstep show")
        return
    found = arrivals_of(timelines)
    if not found:
        yield f"who is late: too few {'exchanges' if len(timelines) > 1 else 'ranks'} to say"
        return
    shares = waiting_shares(timelines, found)
    yield f"waiting in communication: {_by_rank(found.ranks, shares, '{:.0%}'.format)} of {found.wall_s:.3g} s"
    yield from _late_told(found, made)
    exposed = exposed_waits(timelines)
    yield from _waits_told(found.ranks, exposed) if exposed else ()


def late_told(timelines: Sequence[Timeline]) -> str:
    """Who was late, in one sentence of what `timelines_told` says; "" if that is not known."""
    found = None if _on_gpu(timelines) else arrivals_of(timelines)
    return next(_late_told(found, steps(timelines))) if found else ""


def _on_gpu(timelines: Sequence[Timeline]) -> bool:
    return any(timeline.on_gpu for timeline in timelines)


def end_told(run: JobRun) -> str:
    """How a run ended, in one sentence: why it hung, or who was late; "" if it failed, or if that is not known."""
    return run.cause if run.state == HUNG else "" if run.state == FAILED else late_told(run.timelines)


def groups_told(groups: Iterable[Group]) -> dict[Group, str]:
    """Each group by its ranks; of several with the same ranks it says which, in the order given."""
    every = list(dict.fromkeys(groups))
    sizes, before, found = Counter(group.ranks for group in every), Counter[tuple[int, ...]](), {}
    for group in every:
        before[group.ranks] += 1
        number, size = before[group.ranks], sizes[group.ranks]
        found[group] = named(group.ranks) + (f" (group {number} of {size})" if size > 1 else "")
    return found


def _by_rank(ranks: Sequence[int], values: Sequence[float], written: Callable[[float], str]) -> str:
    """A value of each rank; of many ranks the least and the largest."""
    if len(ranks) <= MOST_RANKS:
        return ", ".join(f"rank {rank} {written(value)}" for rank, value in zip(ranks, values))
    least, most = ranks[values.index(min(values))], ranks[values.index(max(values))]
    return f"from {written(min(values))} (rank {least}) to {written(max(values))} (rank {most})"


def _waits_told(ranks: Sequence[int], exposed: ExposedWaits) -> Iterator[str]:
    """Exposed communication in a step, by rank, and by group where there are several."""
    yield (f"{EXPOSED} of a step, late ranks' included, in the median: "
           + _by_rank(ranks, exposed.by_rank, in_seconds))
    names = groups_told(exposed.by_group)
    most = sorted(exposed.by_group.items(), key=lambda one: -one[1][1])
    told = [f"{names[group]}: {in_seconds(seconds)} on rank {rank}" for group, (rank, seconds) in most if seconds]
    if len(names) > 1 and told:
        more = f"; and {len(told) - MOST_RANKS} more" if len(told) > MOST_RANKS else ""
        yield f"  by group, on the rank that waits longest: {'; '.join(told[:MOST_RANKS])}{more}"


def _late_told(found: Arrivals, made: Steps | None) -> Iterator[str]:
    """Which rank or what else the others waited for."""
    lost, position, wall_s = found.lost_s, found.late_position, found.wall_s
    if position is None:
        kept = f"for {sum(lost) / wall_s:.0%} of the time all others waited for one of them"
        slow = found.awaited
        if slow is not None and found.transfer_share <= TRANSFER:
            yield (f"no rank is late by its own time: for {lost[slow] / wall_s:.0%} of the time all others waited for "
                   f"rank {found.ranks[slow]}, which the exchange before had released later: look at its link, and at "
                   "what else runs on its cores")
            return
        yield {LINK: f"no rank is late: the exchanges themselves take {found.transfer_share:.0%} of the time, when all "
                     "ranks have come. The link, or what serves it, is slow for these bytes",
               JITTER: "late is now one rank, now another: "
                       f"{kept} ({_by_rank(found.ranks, [each / wall_s for each in lost], '{:.0%}'.format)})",
               NOBODY: f"no rank is late: {kept}"}[found.cause]
        return
    num, each = (made.num, "a step") if made else (len(found.last), "in each exchange")
    longest_s = found.longest_s(position)
    times = f"{int((found.last == position).sum())} of {counted(len(found.last), 'exchange')}"
    yield (f"rank {found.ranks[position]} is late: it came last to {times}, and all others waited "
           f"{in_seconds(lost[position] / num)} {each} for it, {lost[position] / wall_s:.0%} of the time"
           + (f", most of it in one exchange: {in_seconds(longest_s)}" if longest_s > lost[position] / 2 else ""))
    phase, seconds = max(found.excess_s(position).items(), key=lambda one: one[1])
    yield f"  what takes it longer than the others: {phase}, {in_seconds(seconds / num)} {each}"
