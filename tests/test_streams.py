"""A profiler trace stream by stream: by hand, of real runs, of others' traces, and in Chromium."""
from __future__ import annotations

import random
from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from benchmarks import streams
from book.__main__ import main
from book.look.arrivals import arrivals
from book.look.profiles import read_profile, times
from book.look.streams import (COMPUTING, COPY, HOST, KEPT, MESSAGES, MOST_BLOCKS, MOST_RANKS, PIXELS, WAITS, Streams,
                               kept_step, short_kernel, streams_of)
from book.widgets.registry import standalone
from book.widgets.streams import StreamsView
from book.widgets.timeline import TICKS
from tests.test_chapters import cells
from tests.test_look import NCCL, SAMPLES, event, profile_of, profiled

GEMM = "void cutlass::Kernel<cutlass_80_tensorop_s1688gemm_128x128>(cutlass::Params)"


def kernel(name: str, start_us: float, length_us: float, stream: int = 7, number: int | None = None) -> dict[str, Any]:
    said = {"stream": stream} | ({} if number is None else {"correlation": number})
    return event("kernel", name, start_us, length_us, args=said)


def launch_of(number: int, start_us: float, length_us: float = 5) -> dict[str, Any]:
    return event("cuda_runtime", "cudaLaunchKernel", start_us, length_us, args={"correlation": number})


def step(number: int, start_us: float, length_us: float) -> dict[str, Any]:
    return event("user_annotation", f"ProfilerStep#{number}", start_us, length_us)


def a_step(base: float = 0) -> list[dict[str, Any]]:
    """10 ms: products from 1 to 5, a sum from 4 to 8 on its own stream, a copy at 9; the host waits from 6 to 8."""
    return [step(3, base, 10_000), event("cpu_op", "aten::linear", base + 100, 900),
            event("cpu_op", "aten::addmm", base + 200, 700), launch_of(1, base + 500),
            event("user_annotation", "nccl:all_reduce", base + 1500, 200), launch_of(2, base + 1600),
            event("cuda_runtime", "cudaStreamSynchronize", base + 6000, 2000),
            kernel(GEMM, base + 1000, 2000, number=1), kernel("void at::native::add_kernel<4>(int)", base + 3001, 1999),
            kernel("ncclKernel_SendRecv_RING_SIMPLE_Sum_int8_t(ncclDevComm*)", base + 4000, 4000, 12, 2),
            event("gpu_memcpy", "Memcpy DtoH (Device -> Pageable)", base + 9000, 500, args={"stream": 7})]


def shown(tmp_path: Path, *ranks: Iterable[dict[str, Any]]) -> Streams:
    profiles = [read_profile(profile_of(tmp_path / f"{rank}.json", events, rank, len(ranks)))
                for rank, events in enumerate(ranks)]
    found = streams_of(profiles, arrivals(profiles))
    assert found is not None
    return found


def in_us(seconds: float) -> int:
    return round(1e6 * seconds)


def test_a_step_by_hand(tmp_path: Path) -> None:
    found = shown(tmp_path, a_step())
    assert found.chosen == "ProfilerStep#3, the only whole step" and in_us(found.duration_s) == 10_000
    drawn = {lane.name: [(one.kind, in_us(one.start_s), in_us(one.end_s), one.name, one.count) for one in lane.blocks]
             for lane in found.lanes}
    assert drawn == {
        "CPU": [(HOST, 100, 1000, "aten::linear", 1), (HOST, 1600, 1605, "cudaLaunchKernel", 1),
                (WAITS, 6000, 8000, "cudaStreamSynchronize", 1)],
        "stream 7": [(COMPUTING, 1000, 3000, "cutlass_80_tensorop_s1688gemm_128x128", 1),
                     (COMPUTING, 3001, 5000, "add_kernel", 1),
                     (COPY, 9000, 9500, "Memcpy DtoH", 1)],
        "stream 12": [(MESSAGES, 4000, 8000, "all_reduce", 1)]}, "the host knows better than the kernel what it is"
    [one] = found.shares
    assert [in_us(value) for value in (one.computing_s, one.messages_s, one.exposed_s, one.idle_s, one.ahead_s or 0)
            ] == [3999, 4000, 3000, 2501, 1450]
    told = [(in_us(one.start_s), in_us(one.end_s), one.name, one.host) for one in found.moments]
    assert (5000, 8000, "all_reduce", "") in told and (0, 1000, "", HOST) in told and (8000, 9000, "", "") in told
    assert Streams.from_json(found.to_json()) == found


def test_the_step_of_median_length_is_shown_without_the_first(tmp_path: Path) -> None:
    starts, events = [0, 90, 110, 140, 160], list[dict[str, Any]]()
    for number, (start, end) in enumerate(zip(starts, [*starts[1:], 185])):
        events += [step(number, 1000 * start, 1000 * (end - start)), kernel(GEMM, 1000 * start + 10, 900)]
    assert shown(tmp_path, events).chosen == "ProfilerStep#1, of median length among 4 steps"
    two = shown(tmp_path, [event for event in events if event["ts"] >= 140_000])
    assert two.chosen == "ProfilerStep#3, the shorter of 2 steps" and in_us(two.duration_s) == 20_000
    assert shown(tmp_path, [kernel(GEMM, 0, 10)]).chosen == "no step is marked, so all that the trace has"
    sums = [kernel(NCCL, 100 * k, 50, 12) for k in range(40)]
    found = shown(tmp_path, sums)
    assert found.chosen == "no step is marked, so the last 12 exchanges" and in_us(found.duration_s) == 1150


@pytest.mark.parametrize("seed", range(4))
def test_merging_loses_no_kernel_and_stays_light(tmp_path: Path, seed: int) -> None:
    """Thousands of kernels, copies and messages: each lies in a block of its stream and kind, and none counts twice."""
    draw, at, events, wanted = random.Random(seed), 0.0, list[dict[str, Any]](), list[tuple[str, str, int, int]]()
    for _ in range(6000):
        kind, stream, length = draw.choice((COMPUTING, MESSAGES, COPY)), draw.randrange(4), draw.choice((1, 3, 40, 900))
        name, category = {MESSAGES: (NCCL, "kernel"), COPY: ("Memcpy", "gpu_memcpy")}.get(kind, ("gemm", "kernel"))
        events.append(event(category, name, at, length, args={"stream": stream}))
        wanted.append((f"stream {stream}", kind, round(at), round(at + length)))
        at += length + draw.choice((0, 0, 5, 100))
    found = shown(tmp_path, [step(1, 0, at), *events])
    assert sum(len(lane.blocks) for lane in found.lanes) <= MOST_BLOCKS
    assert sum(one.count for lane in found.lanes for one in lane.blocks) == len(wanted)
    for lane in found.lanes:
        for kind in (COMPUTING, MESSAGES, COPY):
            spans = [(in_us(one.start_s), in_us(one.end_s), in_us(one.busy_s), one.count) for one in lane.blocks
                     if one.kind == kind]
            assert all(end <= start for (_, end, *_), (start, *_) in pairwise(spans))
            own = [(start, end) for name, of, start, end in wanted if (name, of) == (lane.name, kind)]
            for start, end, busy, count in spans:
                inside = own[bisect_left(own, (start, 0)):bisect_right(own, (end, 0))]
                assert all(b <= end for _, b in inside)
                assert (len(inside), sum(b - a for a, b in inside)) == (count, busy)


def test_neighbours_nearer_than_a_pixel_are_one_block_but_not_two_wide_ones(tmp_path: Path) -> None:
    pixel = 100.0
    tiny = [kernel("a", pixel / 2 * k, pixel / 4) for k in range(8)]
    far = [kernel("b", 2000 + 3 * pixel * k, pixel / 4) for k in range(2)]
    wide = [kernel(name, 10_000 + 1001 * k, 1000) for k, name in enumerate("cd")]
    [lane] = shown(tmp_path, [step(1, 0, PIXELS * pixel), *tiny, *far, *wide]).lanes
    assert [(one.name, one.count) for one in lane.blocks] == [("a", 8), ("b", 1), ("b", 1), ("c", 1), ("d", 1)]
    many = [kernel("a", 2 * pixel * k, pixel / 2, stream) for k in range(PIXELS // 2) for stream in range(10)]
    found = shown(tmp_path, [step(1, 0, PIXELS * pixel), *many])
    assert MOST_BLOCKS / 20 < sum(len(lane.blocks) for lane in found.lanes) <= MOST_BLOCKS
    nested = [kernel("a", 0, 1000), kernel("b", 100, 50), kernel("c", 1050, 10)]
    [lane] = shown(tmp_path, [step(1, 0, PIXELS * pixel), *nested]).lanes
    assert [(in_us(one.end_s), in_us(one.busy_s), one.count) for one in lane.blocks] == [(1060, 1010, 3)]


def test_ranks_stand_under_each_other_on_one_clock(tmp_path: Path) -> None:
    """Rank 1's clock is 3 s ahead, and its trace begins 5 ms earlier; it comes 400 us later to each sum."""
    def rank(late_us: float, clock_us: float) -> list[dict[str, Any]]:
        begins = [1000 * k + clock_us for k in range(8)]
        return [step(1, clock_us, 8000), event("cpu_op", "aten::empty", clock_us - 12.5 * late_us, 1),
                *(kernel(NCCL, begin + late_us, 900 - late_us, 12) for begin in begins),
                *(kernel(GEMM, begin, late_us) for begin in begins if late_us)]

    found = shown(tmp_path, rank(0, 0), rank(400, 3e6))
    ends = {lane.rank: [in_us(one.end_s) for one in lane.blocks] for lane in found.lanes if lane.name == "stream 12"}
    assert found.one_clock and ends[0] == ends[1] and len(ends[0]) == 8
    assert [in_us(one.exposed_s) for one in found.shares] == [7200, 4000]
    alone = shown(tmp_path, rank(0, 0)[:4], rank(400, 3e6)[:4])
    assert not alone.one_clock and [in_us(lane.blocks[0].start_s) for lane in alone.lanes
                                    if lane.name == "stream 12"] == [0, 400]
    assert "No clocks are aligned" in StreamsView(alone).words()


def test_of_many_ranks_some_are_drawn_and_the_late_one(tmp_path: Path) -> None:
    num, late = 12, 10
    ranks = [[step(1, 0, 8000), *(kernel(NCCL, 1000 * k + 500 * (rank == late), 900 - 500 * (rank == late), 12)
                                  for k in range(8))] for rank in range(num)]
    found = shown(tmp_path, *ranks)
    assert [one.rank for one in found.shares] == [*range(MOST_RANKS - 1), late] and found.left_out == num - MOST_RANKS
    assert f"Not drawn: {num - MOST_RANKS} ranks more" in StreamsView(found).words()


def told(found: Streams) -> list[tuple[int, str]]:
    """When something is told, and what."""
    [run] = StreamsView(found).data(live=False)["runs"]
    return [(stop["t"], "".join(stress + rest for stress, rest in stop["say"])) for stop in run["stops"]]


def test_a_gap_says_in_which_annotation_the_host_is(tmp_path: Path) -> None:
    """The innermost that covers most of it: not the shorter one in it, nor the outer one, nor the step."""
    events = [step(1, 0, 10_000), kernel(GEMM, 0, 1000), kernel(GEMM, 9000, 1000),
              event("user_annotation", "## optimizer ##", 2000, 7500), event("cpu_op", "aten::mul_", 1500, 100),
              event("user_annotation", "Optimizer.step#Shampoo.step", 2000, 6500),
              event("user_annotation", "inner", 3000, 1500),
              event("gpu_user_annotation", "on the GPU", 1000, 6000)]
    found = shown(tmp_path, events)
    assert (90_000, "Rank 0 is idle for 8 ms; no operator or CUDA call is noted in most of it, and 6.5 ms of it are in "
                    "Optimizer.step#Shampoo.step.") in told(found)
    assert "## optimizer ##" not in StreamsView(found).words()


@pytest.mark.parametrize("host, words", [
    ([event("cpu_op", "c10d::allreduce_", 1500, 5000)], "the host is busy"),
    ([event("cpu_op", "aten::mul_", 1500, 3000), event("cuda_runtime", "cudaDeviceSynchronize", 5000, 3000)],
     "the host is busy or waits for the GPU"),
    ([event("cpu_op", "aten::mul_", 1500, 1500), event("cuda_runtime", "cudaDeviceSynchronize", 5000, 1500)],
     "no operator or CUDA call is noted in most of it")])
def test_a_gap_says_what_the_host_does_in_most_of_it(tmp_path: Path, host: list[dict[str, Any]], words: str) -> None:
    found = shown(tmp_path, [step(1, 0, 10_000), kernel(GEMM, 0, 1000), kernel(GEMM, 9000, 1000), *host])
    assert (90_000, f"Rank 0 is idle for 8 ms; {words}.") in told(found)


def test_stretches_that_end_together_or_with_the_window_are_told(tmp_path: Path) -> None:
    """Rank 0 idles from 4 to 10 and rank 1 from 7; both idle from 0 to 1, and rank 1 is told of last."""
    ranks = [[step(1, 0, 10_000), kernel(GEMM, 1000, length)] for length in (3000, 6000)]
    found = shown(tmp_path, *ranks)
    first, last = ([say for t, say in told(found) if t == at] for at in (10_000, TICKS))
    assert [say.count("is idle for") for say in (*first, *last)] == [1, 2] and len(told(found)) == 3
    assert last[0].startswith("Rank 0 is idle for 6 ms; ") and ". Rank 1 is idle for 3 ms; " in last[0]
    assert last[0].endswith("idle 7 ms.") and "idle for 6 ms" in StreamsView(found).words()


def test_the_shares_told_are_of_the_rank_with_most_exposed_and_of_the_late_one(tmp_path: Path) -> None:
    """Rank 3 comes 500 us later to each sum, and ranks 1 and 2 also compute for a while as they wait."""
    late, hides = 3, {1: 200, 2: 100}
    ranks = [[step(1, 0, 8000), *(kernel(NCCL, 1000 * k + 500 * (rank == late), 900 - 500 * (rank == late), 12)
                                  for k in range(8)),
              *(kernel(GEMM, 1000 * k, hides.get(rank, 0)) for k in range(8) if rank in hides)]
             for rank in (1, 2, 3, 4)]
    profiles = [read_profile(profile_of(tmp_path / f"{one}.json", events, one, 5))
                for one, events in enumerate(ranks, 1)]
    found = streams_of(profiles, arrivals(profiles))
    assert found is not None and found.late == late
    _, said = told(found)[-1]
    assert [f"Rank {rank}: computing" in said for rank in (1, 2, 3, 4)] == [False, False, True, True]
    assert Streams.from_json(found.to_json()) == found


def test_a_message_has_the_name_of_the_call_that_its_thread_is_in(tmp_path: Path) -> None:
    """The innermost around its launch; another thread's calls and what computes have nothing to do with it."""
    def call(name: str, start: float, length: float, **more: Any) -> dict[str, Any]:
        return event("user_annotation", f"nccl:{name}", start, length, **more)

    sums = "ncclKernel_AllReduce_RING_LL_Sum_float(ncclDevComm*)"
    events = [step(1, 0, 10_000), call("_all_gather_base", 0, 900), call("broadcast", 100, 100),
              call("all_to_all", 400, 300, tid=8), call("all_to_all", 410, 300, pid=9), call("send 0->1", 970, 20),
              *(launch_of(number, at) for number, at in enumerate((150, 500, 600, 950, 980))),
              kernel(sums, 1000, 500, 12, 0), kernel(sums, 2000, 500, 12, 1), kernel(GEMM, 3000, 500, 7, 2),
              kernel(sums, 4000, 500, 12, 3), kernel(sums, 5000, 500, 12, 4)]
    names = {lane.name: [block.name for block in lane.blocks] for lane in shown(tmp_path, events).lanes}
    assert names["stream 12"] == ["broadcast", "all_gather", "AllReduce", "send 0->1"]
    assert names["stream 7"] == ["cutlass_80_tensorop_s1688gemm_128x128"]


def test_an_operator_that_another_has_called_counts_once(tmp_path: Path) -> None:
    """Also if both begin at once; a thread of the same number in another process is another one."""
    events = [step(1, 0, 9000), kernel(GEMM, 0, 100), event("cpu_op", "aten::relu", 1000, 5),
              event("cpu_op", "aten::clamp_min", 1000, 3), event("cpu_op", "aten::linear", 4000, 10),
              event("cpu_op", "aten::mm", 4002, 5, pid=9)]
    [host] = [lane for lane in shown(tmp_path, events).lanes if lane.name == "CPU"]
    assert [(block.name, block.count) for block in host.blocks] == [("aten::relu", 1), ("aten::linear", 2)]


def test_without_one_clock_each_rank_has_its_own_time(tmp_path: Path) -> None:
    """Rank 0's step takes 4 ms, rank 1's 8: of rank 0 nothing after its step counts, neither work nor idling."""
    ranks = [[step(1, 0, 4000), kernel(GEMM, 0, 3000), kernel(NCCL, 2000, 2000, 12), kernel(GEMM, 5000, 3000)],
             [step(1, 0, 8000), kernel(GEMM, 0, 8000)]]
    found = shown(tmp_path, *ranks)
    assert not found.one_clock and in_us(found.duration_s) == 8000
    assert [[in_us(value) for value in (one.computing_s, one.exposed_s, one.idle_s, one.duration_s)]
            for one in found.shares] == [[3000, 1000, 0, 4000], [8000, 0, 0, 8000]]
    [run] = StreamsView(found).data(live=False)["runs"]
    assert run["figures"][0][0] == "25.0 %" and not any("idle for" in say for _, say in told(found))
    assert "No clocks are aligned: each rank begins at 0." in told(found)[0][1]


def test_long_names_of_lanes_are_cut_beside_them(tmp_path: Path) -> None:
    [run] = StreamsView(shown(tmp_path, [kernel(GEMM, 0, 10, 9_007_199_254_740_993)])).data(live=False)["runs"]
    assert run["names"] == [[0, "stream 9007…", "rank 0, stream 9007199254740993"]]


@pytest.mark.parametrize("name, short", [
    (GEMM, "cutlass_80_tensorop_s1688gemm_128x128"), (NCCL, "AllReduce"),
    ("Memcpy HtoD (Pinned -> Device)", "Memcpy HtoD"),
    ("void at::native::(anonymous namespace)::fill<int, 2>(int)", "fill"), ("aten::addmm", "aten::addmm"),
    ("autograd::engine::evaluate_function: MmBackward", "MmBackward"),
    ("recv 0<-1", "recv 0<-1"), ("cutlass::Kernel(int)", "Kernel"), ("<>", "<>"), ("x" * 60, "x" * 43 + "…")])
def test_names_are_short(name: str, short: str) -> None:
    assert short_kernel(name) == short


@pytest.mark.parametrize("events", [
    [kernel(GEMM, 5, 0)], [kernel(GEMM, float("nan"), 3), kernel(GEMM, 5, 10), kernel(NCCL, 7, float("inf"))],
    [kernel(GEMM, 5, 10), step(1, 5, 0)], [event("kernel", GEMM, 5, 10, args={"stream": {}, "correlation": []})],
    [kernel(GEMM, 10**400, 3), kernel(GEMM, 5, 10**400), kernel(GEMM, 5, 10)],
    [kernel(GEMM, -10**400, 3), kernel(GEMM, 5, 10, number=10**400)], [kernel(GEMM, 5, 10), kernel(NCCL, 20, -18)],
    [event("cpu_op", "aten::mm", 0, 5, tid=None)], [step(1, 0, 10), kernel(GEMM, 5, -3)]])
def test_odd_traces_make_a_page_or_none(tmp_path: Path, events: list[dict[str, Any]]) -> None:
    path = profile_of(tmp_path / "a.json", events)
    assert main(["show", str(path), "--out", str(tmp_path / "page.html")]) == 0
    said = (tmp_path / "page.html").read_text("utf-8").partition("<script>")[0]
    profile = read_profile(path)
    assert all(one.end_s >= one.start_s for one in (*profile.computing, *profile.messages))
    assert "profiler trace" in said and "nan" not in said.lower().partition("<body>")[2]


def test_the_picture_says_what_was_found(tmp_path: Path) -> None:
    page = StreamsView(shown(tmp_path, a_step()))
    [run] = page.data(live=False)["runs"]
    assert run["names"] == [[0, name, f"rank 0, {name}"] for name in ("CPU", "stream 7", "stream 12")]
    kind, start, length = run["lanes"][2]
    assert run["kinds"][kind] == [MESSAGES, "all_reduce"] and (start, length) == (0.4 * TICKS, 0.4 * TICKS)
    assert ["Rank 0: 3 ms of all_reduce", ", exposed."] in [stop["say"][0] for stop in run["stops"]]
    assert run["figures"][:2] == [["30.0 %", "of the time of rank 0 is exposed communication"],
                                  ["25.0 %", "of its communication is hidden"]]
    assert "all_reduce" in page.words() and "cudaStreamSynchronize" in page.words()


@pytest.mark.slow
def test_a_real_run_on_cpus_is_drawn(tmp_path: Path) -> None:
    """Two lanes a rank; what is shown is the last exchanges, as no step is marked."""
    from book.launch import launch
    launch(profiled, 3, str(tmp_path), "nobody")
    profiles = [read_profile(tmp_path / f"{rank}.json") for rank in range(3)]
    found = streams_of(profiles, arrivals(profiles))
    assert found is not None and found.one_clock
    assert [(lane.rank, lane.name) for lane in found.lanes] == [(rank, name) for rank in range(3)
                                                                for name in ("CPU", "gloo")]
    for one, profile in zip(found.shares, profiles):
        assert 0 < one.exposed_s <= one.messages_s <= times(profile).messages_s + 1e-9
        assert 0 < one.computing_s <= times(profile).computing_s + 1e-9


@pytest.mark.skipif(not SAMPLES.exists(), reason="needs the sample traces of HolisticTraceAnalysis")
def test_traces_of_others_are_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    profiles = [read_profile(SAMPLES / f"nccl_rank_{rank}.json.gz") for rank in (0, 1)]
    found = streams_of(profiles, arrivals(profiles))
    assert found is not None and found.chosen.startswith("ProfilerStep#551, ")
    assert [lane.name for lane in found.lanes if lane.rank == 0] == [
        "CPU", *(f"stream {number}" for number in (7, 23, 25, 84, 203))]
    assert [round(1e3 * one.exposed_s) for one in found.shares] == [172, 134]  # as `exposed_by_step` has them
    for name in ("one_gpu_training.json.gz", "rocm_one_gpu.json.gz", "gloo_rank_34.pt.trace.json.gz"):
        assert main(["show", str(SAMPLES / name), "--out", str(tmp_path / "page.html")]) == 0
        assert "One step, stream by stream" in (tmp_path / "page.html").read_text("utf-8")


@pytest.mark.slow
def test_a_page_of_many_ranks_is_light(tmp_path: Path) -> None:
    for rank in range(64):
        events = [event for k in range(160) for event in (
            kernel(GEMM, 1000 * k, 300), kernel(NCCL, 1000 * k + 200 + rank, 700 - rank, 12))]
        profile_of(tmp_path / f"rank{rank}.json.gz", events, rank, 64)
    assert main(["show", str(tmp_path), "--out", str(tmp_path / "page.html")]) == 0
    assert (tmp_path / "page.html").stat().st_size < 2e6


@pytest.mark.slow
def test_a_block_says_what_it_is_to_a_pointer_a_finger_and_keys(browser: Any, tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    page = StreamsView(shown(tmp_path, a_step()))
    path.write_text(standalone("calls", page.text(), page.html()), "utf-8")
    said = "rank 0, stream 12, 4.00 ms to 8.00 ms: communication, all_reduce"
    for width, scheme in ((1280, "light"), (1280, "dark"), (390, "dark")):
        tab, log = browser.open(path.as_uri(), width=width, color_scheme=scheme, has_touch=width == 390)
        detail = tab.locator(".lk-detail")
        assert detail.inner_text().startswith("Point at a block")
        box = tab.locator(".lk-sent").first.bounding_box()
        at = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2
        (tab.touchscreen.tap if width == 390 else tab.mouse.move)(*at)
        assert detail.inner_text() == said and detail.get_attribute("aria-live") == "off"
        assert not tab.locator(".lk-undefined").count() and tab.locator(".lk-block").count() >= 6
        tab.locator(".lockstep-player").focus()
        tab.keyboard.press("ArrowUp")
        assert "stream 7, 9.00 ms to 9.50 ms: copy, Memcpy DtoH" in detail.inner_text()
        assert detail.get_attribute("aria-live") == "polite", "what a key asks for is read out"
        assert tab.evaluate("document.documentElement.scrollWidth") <= width
        assert {"computing", "communication", "copy", "host works", "host waits", "idle"} <= set(
            map(str.strip, tab.locator(".lk-key").inner_text().split("\n")))
        log.assert_clean()


@pytest.mark.skipif(not SAMPLES.exists(), reason="needs the sample traces of HolisticTraceAnalysis")
def test_the_kept_step_is_what_its_script_makes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "KEPT", tmp_path / "step.json")
    streams.main(SAMPLES / "nccl_rank_0.json.gz")
    assert (tmp_path / "step.json").read_text("utf-8") == KEPT.read_text("utf-8")


def test_the_chapter_tells_the_kept_step_and_where_it_is_from() -> None:
    step, told = kept_step(), "\n".join(cells("13_slow_jobs", "markdown"))
    [one] = step.shares
    ahead, hidden = f"{1e3 * (one.ahead_s or 0):.1f} ms before", f"{1 - one.exposed_s / one.messages_s:.1%} of the"
    for said in (ahead, hidden, f"{one.computing_s / step.duration_s:.1%} of the step", "{cite}`htasample`",
                 f"{one.idle_s / step.duration_s:.1%}, no kernel", f"{1e3 * one.exposed_s:.0f} ms are exposed",
                 f"{one.exposed_s / step.duration_s:.1%} of the step"):
        assert said.replace("%", " %") in told, said
    gaps = sorted(round(1e3 * (gap.end_s - gap.start_s)) for gap in step.moments if not gap.name)
    assert gaps[-2:] == [32, 57] and "longest gap, 57 ms" in told and "second longest, 32 ms" in told
    [gap] = [gap for gap in step.moments if not gap.name and gap.end_s - gap.start_s > 0.05]
    [cpu] = [lane for lane in step.lanes if lane.name == "CPU"]
    works_s = sum(block.busy_s for block in cpu.blocks if gap.start_s < block.start_s and block.end_s < gap.end_s)
    assert f"operators and CUDA calls for {1e3 * works_s:.0f} ms" in told and gap.host == ""
    assert f"For {1e3 * gap.said_s:.0f} ms, the trace has the host in `{gap.said}`" in told
    exposed = [one.end_s - one.start_s for one in step.moments if one.name][-1:] + [
        one.end_s - one.start_s for one in step.moments if one.name == "all_to_all"][-1:]
    assert sum(exposed) > one.exposed_s / 2, "most of it is two messages'"
    [first, *_] = [block for lane in step.lanes for block in lane.blocks if block.name == "all_reduce"]
    assert f"The all-reduce at {1e3 * first.start_s:.0f} ms takes {1e3 * first.busy_s:.1f} ms here" in told
    busy_s = {lane.name: sum(block.busy_s for block in lane.blocks if block.kind == COMPUTING) for lane in step.lanes}
    assert busy_s["stream 7"] > 0.9 * one.computing_s, "nearly all of it"
