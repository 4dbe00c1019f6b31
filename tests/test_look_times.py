"""Where time goes: profiler traces, counted by hand, of real jobs, and damaged; what ranks have noted, of made-up runs.
"""
from __future__ import annotations

import gzip
import json
import random
import time
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from book.__main__ import main
from book.job.noted import Noted
from book.launch import launch
from book.look.arrivals import JITTER, LINK, NOBODY, RANK, arrivals
from book.look.profiles import TraceFileError, read_profile, times
from book.look.spans import common, covered_s, length, less, union
from book.look.timelines import (NUM_BYTES, NUM_ROWS, PHASES, ROW, Timeline, arrivals_of, steps, timeline_of,
                                 waiting_shares)
from book.look.told import timelines_told
from book.waiting.hang import Group
from tests.damaged import damaged

SAMPLES = Path(__file__).parents[2] / "shared/data/traces"
NCCL = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
OLD_NCCL = "ncclKernel_AllReduce_RING_LL_Sum_float(ncclWorkElem)"


def event(category: str, name: str, start_us: float, length_us: float, **more: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": category, "name": name, "ts": start_us, "dur": length_us, "pid": 0, "tid": 7, **more}


def written(path: Path, events: Iterable[dict[str, Any]], rank: int = 0, world_size: int = 1) -> Path:
    data = json.dumps({"traceEvents": [*events], "distributedInfo": {"rank": rank, "world_size": world_size}}).encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


@pytest.mark.parametrize("seed", range(5))
def test_times_are_those_of_counting_each_microsecond(tmp_path: Path, seed: int) -> None:
    """Kernels, copies and messages that overlap in all ways, on a clock that is as far on as today's."""
    draw, base = random.Random(seed), 1_795_757_178_287_042
    cover: dict[str, set[int]] = {"kernel": set(), "message": set(), "gpu_memcpy": set()}
    events = []
    for _ in range(60):
        kind, start, length = draw.choice(list(cover)), draw.randrange(300), draw.randrange(1, 20)
        cover[kind] |= set(range(start, start + length))
        name = draw.choice((NCCL, OLD_NCCL)) if kind == "message" else "gemm"
        events.append(event("kernel" if kind == "message" else kind, name, base + start, length))
    found = times(read_profile(written(tmp_path / "a.json.gz", events)))
    busy = set().union(*cover.values())
    wanted = {"span_s": max(busy) + 1 - min(busy), "computing_s": len(cover["kernel"]),
              "messages_s": len(cover["message"]), "exposed_s": len(cover["message"] - cover["kernel"])}
    assert {name: getattr(found, name) for name in wanted} == pytest.approx({
        name: microseconds / 1e6 for name, microseconds in wanted.items()})
    assert found.idle_s == pytest.approx((wanted["span_s"] - len(busy)) / 1e6)


@pytest.mark.skipif(not SAMPLES.exists(), reason="needs the sample traces of HolisticTraceAnalysis")
@pytest.mark.parametrize("rank, exposed, hidden, idle, computing", [
    (0, 27.56, 14.95, 55.21, 17.20), (1, 24.65, 19.93, 52.89, 22.09)])
def test_samples_of_others_have_the_shares_that_others_found(rank: int, exposed: float, hidden: float, idle: float,
                                                             computing: float) -> None:
    """HolisticTraceAnalysis 0.5, with include_last_profiler_step=True."""
    found = times(read_profile(SAMPLES / f"nccl_rank_{rank}.json.gz"))
    assert [100 * found.exposed_s / found.span_s, 100 * (1 - found.exposed_s / found.messages_s),
            100 * found.idle_s / found.span_s, 100 * found.computing_s / found.span_s] == pytest.approx(
                [exposed, hidden, idle, computing], abs=0.005)


def profiled(folder: str, where: str) -> None:
    """Three ranks of DDP under PyTorch's profiler; rank 1 is slow in backward, or rank 2 at its data, or nobody."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel
    from torch.profiler import ProfilerActivity, profile

    class Slow(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            if where == "backward" and rank == 1:
                time.sleep(0.15)
            return gradient

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = torch.nn.Linear(64, 64), torch.nn.Linear(64, 64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.second(Slow.apply(self.first(x)))

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(rank)
    model = DistributedDataParallel(Net(), bucket_cap_mb=0.001)
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        for step in range(8):
            if (where == "data" and rank == 2) or (where == "turns" and rank == step % 3):
                time.sleep(0.15)
            model(torch.randn(4, 64)).sum().backward()
    profiler.export_chrome_trace(f"{folder}/{rank}.json")
    del model


def shifted(folder: Path, seconds: tuple[float, ...]) -> None:
    """Set the clocks of the ranks' traces on by so much."""
    for rank, by_s in enumerate(seconds):
        path = folder / f"{rank}.json"
        trace = json.loads(path.read_text())
        for one in trace["traceEvents"]:
            if "ts" in one:
                one["ts"] += 1e6 * by_s
        path.write_text(json.dumps(trace))


@pytest.mark.slow
@pytest.mark.parametrize("where, late", [("backward", 1), ("data", 2), ("turns", None)])
def test_the_late_rank_of_a_real_job_is_named(tmp_path: Path, where: str, late: int | None,
                                              capsys: pytest.CaptureFixture[str]) -> None:
    """Also where its slowness lies in backward, which takes all ranks equally long; whatever the hosts' clocks say."""
    launch(profiled, 3, str(tmp_path), where, timeout_s=120)
    shifted(tmp_path, (0.0, 0.7, -0.4))
    found = arrivals([read_profile(tmp_path / f"{rank}.json") for rank in range(3)])
    assert found is not None and found.late_position == late
    capsys.readouterr()
    assert main(["show", str(tmp_path)]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "3 profiler traces, CPU"
    assert said[-1].startswith(f"who comes last: {'no rank stands out' if late is None else f'rank {late}, '}")


def test_other_calls_are_not_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One has a call more; then as many, but one ends on a rank before the other has come, whatever the clocks say."""
    for spans in ([(k, k + 0.5) for k in range(9)], [(k * (1 + (k > 4)), k * (1 + (k > 4)) + 0.5) for k in range(8)]):
        for rank, some in enumerate(([(k, k + 0.5) for k in range(8)], spans)):
            written(tmp_path / f"{rank}.json", [event("kernel", NCCL, 1e6 * begin, 1e6 * (end - begin))
                                                for begin, end in some], rank, 2)
        assert main(["show", str(tmp_path)]) == 0
        assert "do not have the same collectives" in capsys.readouterr().out


@pytest.mark.parametrize("seed", range(4))
def test_damaged_traces_are_refused_in_a_sentence(tmp_path: Path, seed: int,
                                                  capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / ("0.json.gz" if seed % 2 else "0.json")
    events = [event("kernel", name, 20 * k, 10) for k, name in enumerate((NCCL, "gemm") * 8)]
    whole = written(path, events).read_bytes()
    for data in damaged(whole, seed):
        path.write_bytes(data)
        status = main(["show", str(path)])
        told = capsys.readouterr()
        assert (status, told.err) == (0, "") or (status == 2 and len(told.err.splitlines()) == 1)


def test_an_empty_trace_and_one_that_unpacks_without_end_are_refused(tmp_path: Path,
                                                                     monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TraceFileError, match="without any work"):
        read_profile(written(tmp_path / "a.json", []))
    monkeypatch.setattr("book.look.profiles.MOST_BYTES", 1000)
    with pytest.raises(TraceFileError, match="it unpacks to over"):
        read_profile(written(tmp_path / "b.json.gz", [event("kernel", "gemm", k, 1) for k in range(50)]))


# What ranks have noted

NAMES = ("all_reduce", "send", *PHASES)
LENGTHS_S = {"input": 0.002, "forward": 0.01, "backward": 0.02, "optimizer": 0.005, "other code": 0.003}


def made_up(num_ranks: int, late: int | None = None, phase: str = "", by_s: float = 0.02, transfer_s: float = 0.001,
            jitter_s: float = 0.0, num_steps: int = 20, groups: tuple[tuple[int, ...], ...] = ()) -> list[Timeline]:
    """A run of DDP: its two buckets end with backward, in each group in turn; a rank is slow in a phase."""
    draw, clocks = random.Random(1), [100.0] * num_ranks
    each_group = groups or (tuple(range(num_ranks)),)
    known = tuple(Group(str(number), ranks) for number, ranks in enumerate(each_group))
    calls: list[list[tuple[Any, ...]]] = [[] for _ in clocks]
    phases: list[list[tuple[Any, ...]]] = [[] for _ in clocks]
    for step in range(num_steps):
        begun = {}
        for rank in range(num_ranks):
            for name in ("input", "other code", "forward", "backward"):
                start_s = clocks[rank]
                own_s = LENGTHS_S[name] + by_s * ((rank, name) == (late, phase)) + jitter_s * draw.random() ** 8
                clocks[rank] += own_s
                if (rank, phase, name) == (late, "garbage collector", "forward"):
                    phases[rank].append((start_s + 0.001, start_s + 0.001 + by_s, NAMES.index("garbage collector")))
                    clocks[rank] += by_s
                if name == "backward":
                    begun[rank] = start_s
                elif name != "other code":
                    phases[rank].append((start_s, clocks[rank], NAMES.index(name)))
        for number, members in enumerate(each_group):
            end_s = max(clocks[rank] for rank in members) + transfer_s
            for rank in members:
                for bucket in (0, 1):
                    calls[rank].append((clocks[rank] - 0.01 * (1 - bucket), 0, number, 2 * step + bucket + 1))
                phases[rank].append((begun[rank], end_s, NAMES.index("backward")))
                clocks[rank] = end_s
                step_s = LENGTHS_S["optimizer"] + by_s * ((rank, phase) == (late, "optimizer"))
                phases[rank].append((clocks[rank], clocks[rank] + step_s, NAMES.index("optimizer")))
                clocks[rank] += step_s
    return [Timeline(rank, NAMES, known, rows(calls[rank], 4), rows(phases[rank], 3)) for rank in range(num_ranks)]


def rows(noted: list[tuple[Any, ...]], width: int) -> np.ndarray:
    """Calls of start, name, group and number in it, or phases of start, end and name."""
    found = np.zeros(len(noted), ROW)
    found["number"] = np.arange(1, len(noted) + 1)
    for place, name in enumerate(("start_s", "name", "group", "in_group") if width == 4 else ("start_s", "end_s",
                                                                                             "name")):
        found[name] = [each[place] for each in noted]
    return found


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("num_ranks, late", [(2, 1), (4, 0), (9, 5)])
def test_the_late_rank_and_its_phase(phase: str, num_ranks: int, late: int) -> None:
    timelines = made_up(num_ranks, late, phase)
    found = arrivals_of(timelines)
    assert found is not None and (found.cause, found.late_position) == (RANK, late)
    excess = found.excess_s(late)
    assert max(excess, key=excess.__getitem__) == phase
    assert found.lost_s[late] == pytest.approx(19 * 0.02, rel=1e-3) and excess[phase] == pytest.approx(19 * 0.02)
    made = steps(timelines)
    assert made is not None and (made.num, made.whole) == (19, True)
    assert made.median_s == pytest.approx(sum(LENGTHS_S.values()) + 0.02 + 0.001)
    shares = waiting_shares(timelines, found)
    assert shares.index(min(shares)) == late and max(shares) == pytest.approx(0.021 / made.median_s, rel=0.02)
    said = [*timelines_told(timelines)]
    assert said[2].startswith(f"rank {late} is late: it came last to 19 of 19 exchanges, and all others waited 20 ms")
    assert said[3] == f"  what takes it longer than the others: {phase}, 20 ms a step"


@pytest.mark.parametrize("options, cause, words", [
    ({}, NOBODY, "no rank is late: for 0% of the time"),
    ({"transfer_s": 0.04}, LINK, "the exchanges themselves take 50%"),
    ({"jitter_s": 0.06}, JITTER, "late is now one rank, now another"),
    ({"late": 1, "phase": "input", "by_s": 0.001}, NOBODY, "no rank is late: for 2% of the time"),
])
def test_a_run_without_a_late_rank(options: dict[str, Any], cause: str, words: str) -> None:
    timelines = made_up(4, **options)
    found = arrivals_of(timelines)
    assert found is not None and found.cause == cause and words in "\n".join(timelines_told(timelines))


def test_ranks_of_several_groups_are_compared_within_each() -> None:
    timelines = made_up(4, 2, "forward", groups=((0, 1), (2, 3)))
    found = arrivals_of(timelines)
    assert found is not None and found.late_position == 2 and len(found.starts_s) == 38
    assert found.lost_s[:2] == pytest.approx([0, 0], abs=1e-6) and found.lost_s[2] == pytest.approx(0.38)


def test_too_little_is_no_ground_for_a_verdict() -> None:
    assert arrivals_of(made_up(2, num_steps=5)) is None and arrivals_of(made_up(1)) is None
    assert [*timelines_told(made_up(1))][-1] == "who is late: too few ranks to say"
    assert not [*timelines_told([Timeline(0, (), (), rows([], 4), rows([], 3))])]


@pytest.mark.parametrize("seed", range(5))
def test_stretches_of_time_against_counting(seed: int) -> None:
    draw = random.Random(seed)
    drawn = [np.array(sorted((start, start + draw.randrange(1, 9)) for start in (draw.randrange(90) for _ in range(9))),
                      float) for _ in range(2)]
    sets = [{moment for start, end in each for moment in range(int(start), int(end))} for each in drawn]
    one, other = map(union, drawn)
    assert [length(one), length(common(one, other)), length(less(one, other))] == [
        len(sets[0]), len(sets[0] & sets[1]), len(sets[0] - sets[1])]
    times_s = np.arange(100.0)
    assert covered_s(one, times_s).tolist() == [len([each for each in sets[0] if each < moment]) for moment in times_s]


def test_a_ring_keeps_the_last_rows_and_marks_none_that_has_gone() -> None:
    memory = bytearray(NUM_BYTES)
    noted, group = Noted(memory), Group("0", (1, 0))

    def call(serial: int) -> Any:
        op = SimpleNamespace(serial=serial, group=group, function=None, kind="all_reduce", number=serial, num_bytes=8)
        noted.issued(op, ())
        return op

    first, *_, refused, last = [call(serial) for serial in range(1, NUM_ROWS + 12)]
    before_s = time.monotonic()
    for op in (first, last):
        noted.waits(op)
        noted.waited(op, None)
    marked_s = timeline_of(3, memory, *noted.told()).calls["end_s"][-1]
    noted.waited(last, None)
    noted.withdrawn(refused)
    for _ in range(NUM_ROWS + 3):
        noted.end(noted.begin("forward"))
    found = timeline_of(3, memory, *noted.told())
    assert (found.names, found.groups) == (("all_reduce", "forward"), (Group("0", (0, 1)),))
    assert found.calls["number"].tolist() == [*range(12, NUM_ROWS + 10), NUM_ROWS + 11]
    assert found.calls["end_s"][-1] == marked_s >= before_s and found.calls["end_s"][0] == 0
    assert found.phases["number"].tolist() == [*range(4, NUM_ROWS + 4)] and (found.phases["end_s"] > 0).all()
