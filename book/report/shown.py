"""L3: what a job's files say: dumps, profiler traces, memory snapshots, this book's runs, traces and recordings."""
from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from book.look.arrivals import arrivals
from book.look.dumps import DumpError, read_dumps
from book.look.flights import sentences
from book.look.gpu_memory import is_snapshot, read_snapshot
from book.look.profiles import TraceFileError, is_profile, read_profile
from book.look.recorded import timelines_in
from book.look.runs import HUNG, JobRun, RunFileError, Totals, is_run, read_run
from book.look.streams import Streams, streams_of
from book.look.timelines import Timeline
from book.look.told import dumps_told, end_told, late_told, profiles_told, snapshot_told, timelines_told
from book.report.standing import Moment, common_of, common_told, standstill_of
from book.report.traces import timelines_of, timelines_of_dumps, trace_told
from book.trace import Trace, TraceError
from book.waiting.standstill import Standstill

HEAD = 64  # bytes of a file in which this book's forms show
TRACE, RECORDING = b'{"format": "lockstep trace', b'{"format": "lockstep recording'


@dataclass
class Shown:
    """What files say: lines, and why others can't be read; what there is for a picture, and the sentence at its end.

    Of a hang `standstill` says who waits for whom, and `common` when all had last made a call together. The picture of
    Flight Recorder dumps has times `by_hosts`, by the clock of each. `streams` is a step of profiler traces.
    """

    lines: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    timelines: Sequence[Timeline] = ()
    totals: Totals = field(default_factory=dict)
    end: str = ""
    hangs: bool = False
    standstill: Standstill | None = None
    common: Moment | None = None
    by_hosts: bool = False
    streams: Streams | None = None


def files_in(paths: Sequence[Path]) -> list[Path]:
    """These files, and those in these folders; of a folder of `lockstep run` the file that tells of the run."""
    found: list[Path] = []
    for path in paths:
        inside = sorted(one for one in path.iterdir() if one.is_file()) if path.is_dir() else [path]
        found += [one for one in inside if is_run(one)] or inside
    return found


def shown(paths: Sequence[Path]) -> Shown:
    """What files say. Raises DumpError where the names of dumps do not tell their ranks."""
    found, heads = Shown(), {path: _head(path).replace(b'":"', b'": "') for path in paths}
    for path in filter(is_run, paths):
        _tell(found, [path], _add_run)
    for path in [path for path in paths if heads[path].startswith(TRACE)]:
        _tell(found, [path], _add_trace)
    _tell(found, [path for path in paths if heads[path].startswith(RECORDING)], _add_recordings)
    left = [path for path in paths if not is_run(path) and not heads[path].startswith((TRACE, RECORDING))]
    traces = [path for path in left if is_profile(path)]
    _add_profiles(found, traces)
    snapshots = [path for path in left if path not in traces and is_snapshot(path)]
    _add_snapshots(found, snapshots)
    _add_dumps(found, [path for path in left if path not in traces + snapshots])
    return found


def _head(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(HEAD)
    except OSError:
        return b""  # whoever reads it says why


def _tell(found: Shown, paths: Sequence[Path], add: Callable[[Shown, Sequence[Path]], None]) -> None:
    """Add what files say, or why they can't be read."""
    if not paths:
        return
    try:
        add(found, paths)
    except (RunFileError, TraceError) as error:
        found.problems.append(str(error) if str(paths[0].parent) in str(error) else f"{paths[0]}: {error}")
    except (ImportError, OSError, RecursionError, UnicodeDecodeError) as error:
        found.problems.append(f"{paths[0]} can't be read: {error}")


def _add_run(found: Shown, paths: Sequence[Path]) -> None:
    run = of_run(read_run(paths[0]))
    vars(found).update(vars(run), lines=found.lines + run.lines, problems=found.problems)


def of_run(run: JobRun) -> Shown:
    """What a run of `lockstep run` says."""
    hangs = run.state == HUNG
    return Shown([*(run.said or timelines_told(run.timelines))], [], run.timelines, run.totals, end_told(run), hangs,
                 run.standstill if hangs else None, common_of(run) if hangs else None)


def _add_trace(found: Shown, paths: Sequence[Path]) -> None:
    _add(found, Trace.from_json(paths[0].read_text("utf-8")))


def _add_recordings(found: Shown, paths: Sequence[Path]) -> None:
    from book.record.saved import merge  # it needs torch
    _add(found, merge(paths))


def _add(found: Shown, trace: Trace) -> None:
    found.lines += trace_told(trace)
    timelines = timelines_in(trace)
    _draw(found, timelines, late_told(timelines) if trace.clock == "measured" else "")


def _draw(found: Shown, timelines: Sequence[Timeline], end: str = "") -> None:
    """Take these for the picture, and nothing that was known of another one."""
    found.timelines, found.end, found.totals = timelines, end, {}
    found.hangs, found.by_hosts, found.common = False, False, None


def _add_profiles(found: Shown, paths: Sequence[Path]) -> None:
    profiles = []
    for path in paths:
        try:
            profiles.append(read_profile(path))
        except TraceFileError as error:
            found.problems.append(str(error))
    if profiles:
        found.lines += profiles_told(profiles)
        aligned = arrivals(profiles)
        found.streams = streams_of(profiles, aligned)
        if aligned:
            _draw(found, timelines_of(aligned))


def _add_snapshots(found: Shown, paths: Sequence[Path]) -> None:
    for path in paths:
        try:
            found.lines += [line for one in read_snapshot(path) for line in snapshot_told(path.name, one)]
        except DumpError as error:
            found.problems.append(str(error))


def _add_dumps(found: Shown, paths: Sequence[Path]) -> None:
    flights, unread = read_dumps(paths)
    found.problems += unread
    if not flights:
        return
    found.lines += dumps_told(flights)
    timelines, moment_s, common = timelines_of_dumps(flights)
    stands = standstill_of(flights, common) if any(sentences(flights)) else None
    if found.standstill is None:
        found.standstill = stands
    if timelines and not found.timelines:
        found.timelines, found.hangs, found.by_hosts = timelines, True, True
        found.end = "; ".join(sentences(flights)) + "."
        found.common = (moment_s, common_told(stands)) if common and stands else None
