"""`lockstep show` of profiler traces: times against counting by hand, late ranks of real jobs, damaged files."""
from __future__ import annotations

import gzip
import json
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from book.__main__ import main
from book.launch import launch
from book.look.arrivals import arrivals
from book.look.profiles import TraceFileError, read_profile, times
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
              "messages_s": len(cover["message"]), "exposed_s": len(cover["message"] - cover["kernel"]),
              "copies_s": len(cover["gpu_memcpy"])}
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
    import time

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
