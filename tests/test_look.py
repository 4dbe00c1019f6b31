"""`lockstep show`: Flight Recorder dumps as torch writes them, of real ranks that hang and of states set by hand; runs,
traces and recordings of this book's own; pages. Where time goes: profiler traces, counted by hand, of real jobs, and
damaged; what ranks have noted, of made-up runs.
"""
from __future__ import annotations

import gzip
import json
import pickle
import random
import re
import time
from collections.abc import Iterable
from dataclasses import replace
from html import unescape
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from book.__main__ import main
from book.job.noted import RingNotes
from book.launch import HangError, launch
from book.look.arrivals import JITTER, LINK, NOBODY, RANK, arrivals
from book.look.dumps import DumpError, plain, ranks_of, read_dumps
from book.look.flights import Call, Due, FlightDump, guilty, waits
from book.look.profiles import TraceFileError, exposed_by_group, exposed_by_step, read_profile, times
from book.look.runs import read_run, write_run
from book.look.spans import common, covered_s, length, less, union
from book.look.timelines import (NUM_BYTES, NUM_ROWS, PHASES, ROW, Timeline, arrivals_of, exposed_waits, steps,
                                 timeline, timeline_of, waiting_shares)
from book.look.told import timelines_told
from book.report.page import write_run_page
from book.report import shown as reports
from book.report.standing import common_told, standstill_of
from book.report.traces import LAST, timelines_of_dumps
from book.tap.log import OwnGroup
from book.trace import Event, Trace
from book.waiting.hang import Group
from book.waiting.standstill import OWN_CODE, UNKNOWN, WAITS, Common, Stand, Standstill, WaitFor
from book.words import capitalised
from book.widgets.calls import KINDS, MARGIN, TICKS, Calls, blocks
from tests.damaged import damaged

FAULTS = ("late", "other", "groups")


def dumping(folder: str, fault: str) -> None:
    """Four ranks that hang, and write what torch's recorder holds as its watchdog does on NCCL."""
    import threading
    from pathlib import Path

    import torch
    import torch._inductor.codecache  # or the first dump with frames takes seconds
    import torch.distributed as dist
    from torch._C._distributed_c10d import _dump_fr_trace

    dist.init_process_group("gloo")
    rank, x = dist.get_rank(), torch.ones(4)
    group = dist.new_group([2, 3])
    dist.all_reduce(x)
    path = Path(folder, f"job7_{rank}")
    watchdog = threading.Timer(0.7, lambda: path.write_bytes(_dump_fr_trace(True, True, False)))
    watchdog.daemon = True
    watchdog.start()
    if rank == 2 and fault == "late":
        return watchdog.join()
    if rank == 2 and fault == "other":
        dist.broadcast(x, 0)
    if rank == 3 and fault == "groups":
        dist.all_reduce(x, group=group)
    dist.all_reduce(x)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Dumps of each fault."""
    found = {fault: tmp_path_factory.mktemp(fault) for fault in FAULTS}
    for fault, folder in found.items():
        with pytest.raises(HangError):
            launch(dumping, 4, str(folder), fault, hang_s=2, timeout_s=60, check_calls=False)
    return found


def shown(capsys: pytest.CaptureFixture[str], *paths: Path) -> list[str]:
    assert main(["show", *map(str, paths)]) == 0
    return capsys.readouterr().out.splitlines()


@pytest.mark.slow
def test_the_guilty_rank_of_real_dumps_is_named_with_its_line(folders: dict[str, Path],
                                                              capsys: pytest.CaptureFixture[str]) -> None:
    head, verdict, waiting, instead = shown(capsys, folders["late"])
    assert head == "4 Flight Recorder dumps of 4 ranks, on gloo" and verdict == "the others wait for rank 2"
    assert waiting.startswith("  ranks 0, 1, 3 wait in call 2, all_reduce(float [4]): test_look.py:")
    assert instead.startswith("  rank 2's last is call 1, all_reduce(float [4]): test_look.py:")
    assert shown(capsys, folders["other"])[1] == shown(capsys, folders["groups"])[1].replace("3", "2") == verdict
    assert "  rank 2 waits in call 2, broadcast(float [4])" in "\n".join(shown(capsys, folders["other"]))


@pytest.mark.slow
def test_what_some_dumps_say_is_used(folders: dict[str, Path], tmp_path: Path,
                                     capsys: pytest.CaptureFixture[str]) -> None:
    late = [folders["late"] / f"job7_{rank}" for rank in range(4)]
    without = shown(capsys, late[0], late[1], late[3])
    assert "no dump of rank 2" in without and "the others wait for rank 2" in without
    assert "the others wait for ranks 2, 3" in shown(capsys, late[0], late[1])
    for rank, path in enumerate(late):
        data = path.read_bytes()
        (tmp_path / f"dump_{rank}").write_bytes(data if rank != 1 else data[:len(data) // 2])
    told = shown(capsys, tmp_path)
    assert "the others wait for rank 2" in told and told[-1].startswith(f"not read: {tmp_path / 'dump_1'} is neither")


def covered(lane: list[int]) -> int:
    """To which tick a rank did something that was no waiting."""
    return sum(lane[1::3]) + sum(lane[2::3])


@pytest.mark.slow
def test_a_picture_of_dumps_shows_until_the_end_which_rank_does_not_come(folders: dict[str, Path],
                                                                        tmp_path: Path) -> None:
    flights, _ = read_dumps(folders["late"].iterdir())
    timelines, moment_s, common = timelines_of_dumps(flights)
    assert common is not None
    told = common_told(standstill_of(flights, common))
    calls = Calls(timelines, end="rank 2", hangs=True, common=(moment_s, told), by_hosts=True)
    run = calls.data(live=False)["runs"][0]
    ends = [covered(lane) for lane in run["lanes"]]
    assert ends[2] == TICKS > max(ends[0], ends[1], ends[3]) and run["names"] == [0, 1, 2, 3]
    assert [stop["say"][0][1] for stop in run["stops"]][1:] == [
        "Here ranks 0, 1, 2, 3 had made call 1 of their group, all_reduce(float [4]), and no later one together. "
        "Since then: ranks 0, 1, 3: each waits in call 2, all_reduce(float [4]); rank 2: has not made call 2; its last "
        "is call 1, all_reduce(float [4]).", "Rank 2"]
    assert run["opens"] == run["stops"][1]["t"]
    assert main(["show", str(folders["late"]), "--out", str(tmp_path / "page.html")]) == 0
    assert "Here ranks 0, 1, 2, 3 had made call 1" in (tmp_path / "page.html").read_text("utf-8")


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_a_call_of_a_dump_ends_when_its_last_rank_has_come(backend: str) -> None:
    draw, number = random.Random(7), LAST + 3
    times_ns = [sorted(draw.sample(range(1, 10 ** 9), number)) for _ in range(3)]
    flights = [FlightDump(rank, 3, backend, tuple(
        Call("0", (0, 1, 2), place, "all_reduce", "all_reduce(float [8])", 32, time_ns, place < number, "")
        for place, time_ns in enumerate(times_ns[rank][:number - (rank == 1)], 1))) for rank in range(3)]
    timelines, moment_s, common = timelines_of_dumps(flights)
    came_s = [(max(column) - min(map(min, times_ns))) / 1e9 + 1 for column in zip(*times_ns)]
    assert guilty(flights) == (1,) and moment_s == pytest.approx(came_s[number - 2])
    assert common == Common(Group("0", (0, 1, 2)), number - 1, "all_reduce(float [8])")
    for rank, each in enumerate(timelines):
        assert each.calls["in_group"].tolist() == [*range(number - LAST, number), *[number] * (rank != 1)]
        ends_s = came_s[number - LAST - 1:number - 1] if backend == "gloo" else [0] * LAST
        assert each.calls["end_s"].tolist() == pytest.approx([*ends_s, *[0] * (rank != 1)])
        assert (each.calls["waits_s"][-1] > 0) == (rank != 1 or backend == "gloo")


def test_dumps_without_times_or_in_which_nobody_waits_have_no_picture() -> None:
    call = Call("0", (0, 1), 1, "all_reduce", "all_reduce(float [8])", 32, 5, True, "")
    for calls in ([call, call], [replace(call, done=False, time_ns=0), call]):
        assert timelines_of_dumps([FlightDump(rank, 2, "gloo", (one,)) for rank, one in enumerate(calls)]) == (
            [], 0.0, None)


def dump(*states: str, members: bool = True, **last: Any) -> dict[str, Any]:
    """As a rank of four on NCCL dumps it: a call for each of these states."""
    return {"version": "2.10", "pg_config": {"0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1, 2, 3]"}}
            if members else {}, "pg_status": {"0": {"last_enqueued_collective": len(states), **last}}, "entries": [
        {"process_group": ("0", "default_pg"), "collective_seq_id": number, "profiling_name": "nccl:all_reduce",
         "time_created_ns": number, "input_sizes": [[8]], "input_dtypes": ["BFloat16"], "state": state,
         "retired": state != "scheduled", "is_p2p": False, "frames": []} for number, state in enumerate(states, 1)]}


def written(folder: Path, *dumps: dict[str, Any] | None) -> list[Path]:
    """Pickles, of which None is not written; those of even ranks as JSON."""
    for rank, one in enumerate(dumps):
        if one is not None:
            path = folder / f"host{7 + rank // 2}_{rank}"
            path.write_bytes(json.dumps(one).encode() if rank % 2 == 0 else pickle.dumps(one, 2))
    return sorted(folder.iterdir())


DONE, OPEN, QUEUED = "completed", "started", "scheduled"
BEHIND, NEXT, AHEAD = dump(DONE), dump(DONE, OPEN), dump(DONE, OPEN, QUEUED, QUEUED)


@pytest.mark.parametrize("dumps, blamed, due", [
    ((AHEAD, AHEAD, BEHIND, NEXT), (2,), Due.NOT_CALLED),
    ((AHEAD, NEXT, dump(DONE, QUEUED), AHEAD), (2,), Due.NOT_STARTED),
    ((AHEAD, NEXT, None, AHEAD), (2,), Due.NO_DUMP),
    ((NEXT, NEXT, NEXT, NEXT), (), Due.NOBODY),
    ((NEXT, NEXT, dump(DONE, DONE), dump(DONE, DONE)), (), Due.NOBODY),
    ((NEXT, NEXT, {**NEXT, "entries": []}, {**BEHIND, "entries": []}), (3,), Due.NOT_CALLED)],
    ids=["host stuck", "GPU stuck", "dump missing", "all started", "done on two", "entries empty"])
def test_states_of_nccl_are_judged(tmp_path: Path, dumps: tuple[Any, ...], blamed: tuple[int, ...], due: Due) -> None:
    flights, problems = read_dumps(written(tmp_path, *dumps))
    assert not problems and guilty(flights) == blamed
    assert [wait.due for wait in waits(flights)] == [due]
    stands = {stand.rank: stand for stand in standstill_of(flights, None).stands}
    assert all(stands[rank].state == UNKNOWN and not stands[rank].waits for rank in blamed)
    waiting = [stands[rank] for wait in waits(flights) for rank in wait.calls.keys() - {*blamed}]
    assert waiting and all(stand.state == WAITS for stand in waiting)
    assert all(stand.waits == ((WaitFor("all_reduce", blamed),) if blamed else ()) for stand in waiting)
    assert sorted(stands) == [0, 1, 2, 3]


def message(verb: str, rank: int, peer: int, state: str = QUEUED) -> dict[str, Any]:
    arrow = "->" if verb == "send" else "<-"
    return {"process_group": ("0", "default_pg"), "collective_seq_id": 1, "p2p_seq_id": 4, "input_sizes": [[8]],
            "profiling_name": f"nccl:{verb} {rank}{arrow}{peer}", "input_dtypes": ["Float"], "state": state,
            "retired": False, "is_p2p": True, "frames": [{"filename": "/job/pipe.py", "line": 9, "name": "step"}]}


@pytest.mark.parametrize("messages, blamed", [
    (([], [("recv", 0)], [("recv", 1)], [("recv", 2)]), (0,)),  # a pipeline whose first rank has stopped
    (([("send", 1)], [("recv", 0)], [], []), ()),  # under way on both sides: not the order of calls
    (([("recv", 1)], [("recv", 0)], [], []), ()),  # each waits for the other
    (([("send", 1, DONE)], [("recv", 2)], None, []), (2,))], ids=["chain", "met", "circle", "no dump"])
def test_ranks_that_wait_for_messages_lead_to_the_one_that_sends_none(
        tmp_path: Path, messages: Any, blamed: tuple[int, ...], capsys: pytest.CaptureFixture[str]) -> None:
    dumps = [None if own is None else {**dump(DONE), "entries": [
        *dump(DONE)["entries"], *(message(verb, rank, *more) for verb, *more in own)]}
        for rank, own in enumerate(messages)]
    flights, problems = read_dumps(written(tmp_path, *dumps))
    assert not problems and guilty(flights) == blamed
    said = "\n".join(shown(capsys, tmp_path))
    assert blamed != (0,) or "rank 1 waits in call 4, recv from rank 0: pipe.py:9" in said.replace(" of group 0", "")


def test_of_ranks_that_no_dump_names_nothing_is_concluded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = written(tmp_path, *[dump(DONE, OPEN, members=False)] * 2)
    assert shown(capsys, *paths)[1:] == [
        "no single rank is to blame", "  ranks 0, 1 wait in call 2, all_reduce(bfloat16 [8])",
        "  all of these ranks have made this call; the dumps do not say which others are in the group"]


def test_a_call_that_timed_out_is_not_done_though_it_was_retired(tmp_path: Path) -> None:
    flights, _ = read_dumps(written(tmp_path, NEXT, NEXT, BEHIND, NEXT))
    assert NEXT["entries"][1]["retired"] and flights[0].stuck("0").number == 2


def test_a_time_in_a_name_is_no_rank(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "hang_1732838400.json"
    path.write_text(json.dumps(AHEAD))
    assert main(["show", str(path)]) == 0 and "838400" not in capsys.readouterr().out


def test_ranks_come_from_the_number_that_tells_names_apart() -> None:
    for names in (["dump_0", "dump_1"], ["node3_rank0.pickle", "node3_rank1.pickle"], ["r0_v2", "r1_v2"], ["0", "1"]):
        assert list(ranks_of([Path(name) for name in names]).values()) == [0, 1]
    with pytest.raises(DumpError, match="do not tell ranks apart: let each end in its rank"):
        ranks_of([Path("a"), Path("b")])


class Planted:
    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return exec, ("open('planted', 'w')",)


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_nothing_in_a_file_is_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, protocol: int) -> None:
    monkeypatch.chdir(tmp_path)
    Path("dump_0").write_bytes(pickle.dumps({**NEXT, "more": Planted()}, protocol))
    with pytest.raises(DumpError, match="dump_0 is neither a Flight"):
        plain(Path("dump_0"))
    assert not Path("planted").exists()


@pytest.mark.parametrize("seed", range(4))
def test_damaged_files_are_refused_in_a_sentence(tmp_path: Path, seed: int, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "dump_0"
    whole = json.dumps(AHEAD).encode() if seed % 2 else pickle.dumps(AHEAD, 2)
    for data in damaged(whole, seed):
        path.write_bytes(data)
        status = main(["show", str(path)])
        told = capsys.readouterr()
        assert (status, told.err) == (0, "") or (status == 2 and len(told.err.splitlines()) == 1)


@pytest.mark.parametrize("data, words", [
    (b"", "is empty: its rank may have died"), (b"[1]", "is neither a Flight"), (b"{}", "it has no entries"),
    (b"{\"traceEvents\": []}", "without any work in it"), (b"\x80\x04r\xff\xff\xff\x7f", "its end is missing"),
    (json.dumps({"entries": [1]}).encode(), "no Flight Recorder dump"),
    (b"{\"entries\": " + b"[" * 99999, "end is missing")])
def test_other_files_are_refused(tmp_path: Path, data: bytes, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "x").write_bytes(data)
    assert main(["show", str(tmp_path)]) == 2 and words in capsys.readouterr().err
    assert main(["show", str(tmp_path / "y")]) == 2 and "No such file" in capsys.readouterr().err


# What this book leaves

def run_in(folder: Path, num_ranks: int = 4, num_steps: int = 20, state: str = "ended") -> Path:
    """The folder of a run that never was, whose rank 2 is late."""
    folder.mkdir(exist_ok=True)
    timelines = made_up(num_ranks, 2, "backward", num_steps=num_steps)
    for one in timelines:
        rings = np.zeros((2, NUM_ROWS), ROW)
        for ring, rows in zip(rings, (one.calls, one.phases)):
            ring[rows["number"] % NUM_ROWS] = rows
        (folder / f"{one.rank}.ring").write_bytes(rings.tobytes())
    totals = {(timelines[0].groups[0], "all_reduce"): (2 * num_steps, 4096),
              (timelines[0].groups[0]._replace(name="again"), "all_reduce"): (3, 12)}
    stands = hung(timelines[0].groups[0], 2 * num_steps) if state == "hung" else None
    write_run(folder, state, [*timelines_told(timelines), "cause: <b>"], {f"{one.rank}.ring": one for one in timelines},
              totals, "cause: rank 2 is missing", stands)
    return folder


def hung(group: Group, number: int) -> Standstill:
    """All others wait for rank 2 in the call after this one."""
    waits = Stand(0, WAITS, "waits in all_reduce", "train.py line 7: f(x)", (WaitFor("all_reduce", (2,)),))
    sleeps = Stand(2, OWN_CODE, "sleeps", "train.py line 3: time.sleep(60)", ())
    return Standstill(tuple(sleeps if rank == 2 else waits._replace(rank=rank) for rank in group.ranks),
                      Common(group, number, "all_reduce(float32 [<b>])"))


def test_the_page_of_a_hang_opens_where_all_still_went_on_and_draws_who_waits_for_whom(tmp_path: Path) -> None:
    folder, page = run_in(tmp_path / "run", state="hung"), tmp_path / "report.html"
    run = read_run(folder / "run.json")
    assert run.standstill == hung(run.timelines[0].groups[0], 40)
    write_run_page(page, run)
    html, stops = page.read_text("utf-8"), shown_on(page)["stops"]
    opens, = (stop for stop in stops if stop["t"] == shown_on(page)["opens"])
    assert opens["t"] == pytest.approx(TICKS / (1 + MARGIN), rel=0.02), "what comes after was not noted any more"
    assert stops.index(opens) == len(stops) - 2 and opens["say"][0][1] == (
        "Here ranks 0, 1, 2, 3 had made call 40 of their group, all_reduce(float32 [<b>]), and no later one together. "
        "Since then: ranks 0, 1, 3: each waits in all_reduce; rank 2: sleeps.")
    assert re.findall("<figcaption>(.*?)</figcaption>", html) == ["Ranks 0, 1, 3 wait for rank 2."]
    assert 'aria-label="ranks 0, 1, 3: each waits in all_reduce; rank 2: sleeps"' in html
    assert html.count('class="held"') == 1 and ">all_reduce</text>" in html
    assert html.count("marker-end") == 1, "ranks that do the same share an arrow"


def test_a_run_of_an_earlier_version_has_a_page_without_a_graph(tmp_path: Path) -> None:
    file, page = run_in(tmp_path / "run", state="hung") / "run.json", tmp_path / "report.html"
    told = json.loads(file.read_text("utf-8"))
    assert told.pop("standstill")
    file.write_text(json.dumps(told), "utf-8")
    write_run_page(page, read_run(file))
    assert "figcaption" not in page.read_text("utf-8") and "opens" not in shown_on(page)


def test_a_run_is_shown_again_with_its_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, page = run_in(tmp_path / "run"), tmp_path / "page.html"
    assert main(["show", str(folder), "--out", str(page)]) == 0
    said, html = capsys.readouterr().out, page.read_text("utf-8")
    assert "rank 2 is late: it came last to 19 of 19 exchanges" in said
    assert "rank 2 is late: it came last" in html and "cause: &lt;b&gt;" in html
    assert re.findall("<tr><td>(.*?)</td><td>all_reduce</td><td>(.*?)</td><td>(.*?)</td>", html) == [
        ("ranks 0, 1, 2, 3 (group 1 of 2)", "40", "4,096"), ("ranks 0, 1, 2, 3 (group 2 of 2)", "3", "12")]
    data = shown_on(page)
    lanes, (start, *stops) = data["lanes"], data["stops"]
    assert len(lanes) == 4 and start["t"] == 0 and stops[-1]["t"] == TICKS == 100_000
    assert stops[-1]["say"][0][1].startswith("Rank 2 is late: it came last to 19 of 19 exchanges")
    assert stops[0]["say"] == [["Rank 2 comes last", ", 20 ms after the one before it and 20 ms after the first."]]
    lengths = [sum(lane[place + 2] for place in range(0, len(lane), 3) if lane[place] == KINDS.index("backward"))
               for lane in lanes]
    assert lengths[2] == pytest.approx(2 * lengths[0], rel=0.15) and lengths[0] == lengths[1] == lengths[3]
    assert all(sum(lane[1::3]) + sum(lane[2::3]) <= TICKS for lane in lanes)
    assert not re.search(r"(src|href)=[\"']?(http|//)", html)


def shown_on(page: Path) -> dict[str, Any]:
    """The data of the picture on a page."""
    written = re.search(r"data-lockstep-calls='([^']*)'", page.read_text("utf-8"))
    assert written is not None
    shown: dict[str, Any] = json.loads(unescape(written[1]))["runs"][0]
    return shown


@pytest.mark.parametrize("state, title, end", [
    ("ended", "that has ended", "Rank 2 is late: "), ("interrupted", "that was interrupted", "Rank 2 is late: "),
    ("failed", "that has failed", "The end."), ("hung", "that hangs", "Cause: rank 2 is missing")])
def test_the_page_of_a_run_says_how_it_ended(state: str, title: str, end: str, tmp_path: Path) -> None:
    """Whatever its lines have said: here the first cause among them is another."""
    page = tmp_path / "report.html"
    write_run_page(page, read_run(run_in(tmp_path / "run", state=state) / "run.json"))
    assert f"<h1>A run of 4 ranks {title}</h1>" in page.read_text("utf-8")
    assert shown_on(page)["stops"][-1]["say"][0][1].startswith(end)


@pytest.mark.slow
def test_a_page_of_many_ranks_is_light(tmp_path: Path) -> None:
    folder, page = run_in(tmp_path / "run", 64, 5000), tmp_path / "page.html"
    assert main(["show", str(folder), "--out", str(page)]) == 0
    assert page.stat().st_size < 2e6


def test_a_hang_ends_with_ranks_that_wait(tmp_path: Path) -> None:
    """Rank 1 works on, and the others wait for it to the end of the picture."""
    calls = [("all_reduce", Group("", (0, 1, 2)), number, float(number), number + 0.5, 8.0) for number in range(1, 9)]
    timelines = [timeline(rank, calls) for rank in range(3)]
    for one in timelines:
        one.calls["end_s"][-1] = 0 if one.rank != 1 else one.calls["end_s"][-1]
    timelines[1] = replace(timelines[1], calls=timelines[1].calls[:-1])
    data = Calls(timelines, end="rank 1 is missing", hangs=True).data(live=False)["runs"][0]
    ends = [covered(lane) for lane in data["lanes"]]
    assert ends[1] == TICKS and ends[0] == ends[2] < 0.95 * TICKS
    assert data["stops"][-1] == {"t": TICKS, "say": [["", "Rank 1 is missing"]]}


@pytest.mark.parametrize("is_over", [True, False])
def test_a_phase_that_is_not_over_lasts_until_the_end_of_the_picture(is_over: bool) -> None:
    group, window = Group("", (0, 1)), (1.0, 11.0)
    one = timeline(0, [("all_reduce", group, 1, 1.0, 2.0, 8.0)])
    phases = np.zeros(2, ROW)
    phases["number"], phases["name"] = (2, 3), 1
    phases["start_s"], phases["end_s"] = (4.0, 6.0), (5.0, 7.0 * is_over)
    found = blocks(replace(one, names=(*one.names, "backward"), phases=phases), None, 0, window)
    backward = [(start_s, end_s) for kind, start_s, end_s in found if KINDS[kind] == "backward"]
    assert backward == [(4.0, 5.0), (6.0, 7.0 if is_over else 11.0)]


@pytest.mark.parametrize("seed", range(4))
def test_damaged_runs_are_refused_in_a_sentence(tmp_path: Path, seed: int, capsys: pytest.CaptureFixture[str]) -> None:
    folder = run_in(tmp_path / "run", 3)
    path = folder / ("run.json" if seed % 2 else "1.ring")
    for data in damaged(path.read_bytes(), seed):
        path.write_bytes(data)
        status = main(["show", str(folder), "--out", str(tmp_path / "page.html")])
        told = capsys.readouterr()
        assert (status, told.err) == (0, "") or (status == 2 and len(told.err.splitlines()) == 1)


def test_a_run_that_names_a_file_elsewhere_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = run_in(tmp_path / "run")
    told = json.loads((folder / "run.json").read_text())
    told["ranks"][0]["ring"] = "../../etc/passwd"
    (folder / "run.json").write_text(json.dumps(told))
    assert main(["show", str(folder)]) == 2 and "lies elsewhere" in capsys.readouterr().err


def test_a_trace_of_this_book_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    events = [Event(rank, "collective", "all_reduce", group=(0, 1), num_bytes=8.0, start_s=step + 0.3 * rank,
                    end_s=step + 0.5) for step in range(9) for rank in (0, 1)]
    path = tmp_path / "trace.json"
    path.write_text(Trace(events, 2, "measured", "recorded", backend="gloo").to_json())
    assert main(["show", str(path), "--out", str(tmp_path / "page.html")]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[:2] == ["a trace of 2 ranks, recorded on gloo, measured times", "  all ranks together: all_reduce 18"]
    assert said[3].startswith("  rank 1 is late: it came last to 5 of 5 exchanges")
    assert shown_on(tmp_path / "page.html")["stops"][-1]["say"] == [["", capitalised(said[3].strip())]]
    path.write_text(path.read_text()[:-9])
    assert main(["show", str(path)]) == 2 and "this is not a trace's JSON" in capsys.readouterr().err


def test_the_picture_of_one_file_has_nothing_of_another(tmp_path: Path) -> None:
    """A run that hung, and a trace: each has clocks and calls of its own."""
    events = [Event(rank, "collective", "all_reduce", group=(0, 1), start_s=float(step), end_s=step + 0.5)
              for step in range(9) for rank in (0, 1)]
    trace, run = tmp_path / "trace.json", run_in(tmp_path / "run", state="hung") / "run.json"
    trace.write_text(Trace(events, 2, "measured", "recorded", backend="gloo").to_json())
    alone, both = reports.shown([run]), reports.shown([run, trace])
    assert alone.hangs and alone.common and len(alone.timelines) == 4
    assert not both.hangs and both.common is None and len(both.timelines) == 2 and both.standstill == alone.standstill


SAMPLES = Path(__file__).parents[2] / "shared/data/traces"
NCCL = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
OLD_NCCL = "ncclKernel_AllReduce_RING_LL_Sum_float(ncclWorkElem)"


def event(category: str, name: str, start_us: float, length_us: float, **more: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": category, "name": name, "ts": start_us, "dur": length_us, "pid": 0, "tid": 7, **more}


def profile_of(path: Path, events: Iterable[dict[str, Any]], rank: int = 0, world_size: int = 1) -> Path:
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
    found = times(read_profile(profile_of(tmp_path / "a.json.gz", events)))
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


@pytest.mark.parametrize("seed", range(5))
def test_exposed_communication_by_group_and_step_is_that_of_counting_each_microsecond(tmp_path: Path,
                                                                                      seed: int) -> None:
    draw, groups = random.Random(seed), {"mesh_tp": {"Process Group Name": "3", "Process Group Description": "mesh_tp"},
                                         "group 1": {"Process Group Name": "1",
                                                     "Process Group Description": "undefined"},
                                         "no group named": {"stream": 7}}
    cover: dict[str, set[int]] = {name: set() for name in (*groups, "computing")}
    events = [event("user_annotation", f"ProfilerStep#{5 + k}", 100 * k + 40, 100) for k in range(2)]
    for name in (*cover, *draw.choices(list(cover), k=40)):
        start, length = draw.randrange(290), draw.randrange(1, 20)
        cover[name] |= set(range(start, start + length))
        more = {"args": groups[name]} if name in groups else {}
        events.append(event("kernel", NCCL if name in groups else "gemm", start, length, **more))
    profile = read_profile(profile_of(tmp_path / "a.json", events))
    computing = cover.pop("computing")
    assert {one.name: (round(1e6 * one.messages_s), round(1e6 * one.exposed_s)) for one in exposed_by_group(profile)
            } == {name: (len(some), len(some - computing)) for name, some in cover.items()}
    every = set().union(*cover.values())
    inside = [every & set(range(100 * k + 40, 100 * k + 140)) for k in range(2)]
    assert [(one.name, round(1e6 * one.messages_s), round(1e6 * one.exposed_s)) for one in exposed_by_step(profile)
            ] == [(f"ProfilerStep#{5 + k}", len(some), len(some - computing)) for k, some in enumerate(inside)]


def test_what_is_exposed_by_group_and_step_is_told_and_on_the_page(tmp_path: Path,
                                                                  capsys: pytest.CaptureFixture[str]) -> None:
    """Each step of 10 ms has a sum of 2 ms over "dp", of which 1 ms is hidden, and one of the default group, hidden."""
    events = []
    for k in range(12):
        start = 10_000 * k
        events += [event("user_annotation", f"ProfilerStep#{k}", start, 10_000), event("kernel", "gemm", start, 5000),
                   event("kernel", NCCL, start + 4000, 2000 + 500 * (k == 7), args={
                       "Process Group Name": "1", "Process Group Description": "dp"}),
                   event("kernel", NCCL, start + 1000, 1000, args={"Process Group Name": "0"})]
    path = profile_of(tmp_path / "a.json", events)
    assert main(["show", str(path), "--out", str(tmp_path / "page.html")]) == 0
    lines = ["  exposed, by group: dp 12.5 ms of 24.5 ms, group 0 0 s of 12 ms",
             "  exposed, by step: 1 ms in the median of 12 steps, most in ProfilerStep#7: 1.5 ms"]
    assert capsys.readouterr().out.splitlines()[-2:] == lines
    assert all(line in unescape((tmp_path / "page.html").read_text("utf-8")) for line in lines)


@pytest.mark.skipif(not SAMPLES.exists(), reason="needs the sample traces of HolisticTraceAnalysis")
def test_what_samples_have_in_common_is_compared_and_what_not_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", *(str(SAMPLES / f"nccl_rank_{rank}.json.gz") for rank in (0, 1))]) == 0
    compared, late = capsys.readouterr().out.splitlines()[-2:]
    assert compared == ("compared: 5 collectives that are on all ranks; left out: 5 collectives of rank 0, "
                        "5 collectives of rank 1")
    assert late.startswith("who comes last: rank 1, to ") and late.endswith("Of those left out nothing is known")


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


ALL_GATHER = NCCL.replace("AllReduce", "AllGather")


def compared(tmp_path: Path, capsys: pytest.CaptureFixture[str], *ranks: list[tuple[str, float, float]]) -> list[str]:
    """What is said of who comes last to these kernels: name, start and end in seconds, of each rank."""
    for rank, some in enumerate(ranks):
        profile_of(tmp_path / f"{rank}.json", [event("kernel", name, 1e6 * begin, 1e6 * (end - begin))
                                               for name, begin, end in some], rank, len(ranks))
    assert main(["show", str(tmp_path)]) == 0
    said = capsys.readouterr().out.splitlines()
    return said[[line.startswith(("compared", "who comes last")) for line in said].index(True):]


def test_operations_that_all_ranks_have_as_often_are_compared(tmp_path: Path,
                                                              capsys: pytest.CaptureFixture[str]) -> None:
    """Rank 1 comes last to each all-reduce, on a clock that is 3 s on; only rank 0 noted all of its all-gathers."""
    sums = [[(NCCL, k + 0.4 * rank + 3 * rank, k + 0.5 + 3 * rank) for k in range(6)] for rank in (0, 1)]
    sums[0] += [(ALL_GATHER, k + 0.6, k + 0.61) for k in range(3)]
    sums[1] += [(ALL_GATHER, 3.6, 3.61)]
    said = compared(tmp_path, capsys, *sums)
    assert said[0] == ("compared: 6 collectives that are on all ranks; left out: 3 collectives of rank 0, "
                       "1 collective of rank 1")
    assert said[1].startswith("who comes last: rank 1, 6 times in 6 collectives. For 43.6% of 5.5 s ")


def test_of_operations_that_some_lack_those_that_end_together_are_compared(tmp_path: Path,
                                                                           capsys: pytest.CaptureFixture[str]) -> None:
    """Rank 2 comes last; each rank lacks another one of ten, and their clocks differ by seconds."""
    draw = random.Random(3)
    begins = [1.3 * k + draw.random() for k in range(10)]
    ranks = [[(NCCL, begin + 0.2 * (rank == 2) + 5 * rank, begin + 0.25 + 5 * rank) for begin in begins]
             for rank in range(3)]
    for rank, some in enumerate(ranks):
        del some[2 + 3 * rank]
    said = compared(tmp_path, capsys, *ranks)
    assert said[0] == ("compared: 7 collectives that are on all ranks; left out: 2 collectives of rank 0, "
                       "2 collectives of rank 1, 2 collectives of rank 2")
    assert said[1].startswith("who comes last: rank 2, 7 times in 7 collectives. For ")


def test_what_does_not_fit_together_is_not_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Other times, other operations; then too few that are the same."""
    draw = random.Random(5)
    apart = [[(NCCL, start, start + 0.01) for start in sorted(draw.random() * 99 for _ in range(12))] for _ in (0, 1)]
    others = [[(name, k, k + 0.5) for k in range(9)] for name in (NCCL, ALL_GATHER)]
    few = [[(NCCL, k, k + 0.5) for k in range(4)] for _ in (0, 1)]
    for ranks in (apart, others, few):
        assert compared(tmp_path, capsys, *ranks) == [
            "who comes last: fewer than five collectives of these traces are the same on all ranks"]


@pytest.mark.parametrize("seed", range(4))
def test_damaged_traces_are_refused_in_a_sentence(tmp_path: Path, seed: int,
                                                  capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / ("0.json.gz" if seed % 2 else "0.json")
    events = [event("kernel", name, 20 * k, 10) for k, name in enumerate((NCCL, "gemm") * 8)]
    whole = profile_of(path, events).read_bytes()
    for data in damaged(whole, seed):
        path.write_bytes(data)
        status = main(["show", str(path)])
        told = capsys.readouterr()
        assert (status, told.err) == (0, "") or (status == 2 and len(told.err.splitlines()) == 1)


def test_an_empty_trace_and_one_that_unpacks_without_end_are_refused(tmp_path: Path,
                                                                     monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TraceFileError, match="without any work"):
        read_profile(profile_of(tmp_path / "a.json", []))
    monkeypatch.setattr("book.look.profiles.MOST_BYTES", 1000)
    with pytest.raises(TraceFileError, match="it unpacks to over"):
        read_profile(profile_of(tmp_path / "b.json.gz", [event("kernel", "gemm", k, 1) for k in range(50)]))


# What ranks have noted

NAMES = ("all_reduce", "send", *PHASES)
LENGTHS_S = {"input": 0.002, "forward": 0.01, "backward": 0.02, "optimizer": 0.005, "other code": 0.003}


def made_up(num_ranks: int, late: int | None = None, phase: str = "", by_s: float = 0.02, transfer_s: float = 0.001,
            jitter_s: float = 0.0, num_steps: int = 20, groups: tuple[tuple[int, ...], ...] = (),
            last_out: int | None = None, out_s: float | None = None, only: int | None = None) -> list[Timeline]:
    """A run of DDP: its two buckets end with backward, in each group in turn; a rank is slow in a phase.

    `only` is the one step in which it is slow in forward, say; if not given, it is so in all steps.
    Rank `last_out` gets its last message by `out_s`, which is `by_s` if not given, later than the others do.
    """
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
                is_slow = (rank, name) == (late, phase) and (only is None or step == only)
                own_s = LENGTHS_S[name] + by_s * is_slow + jitter_s * draw.random() ** 8
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
                clocks[rank] = end_s + (by_s if out_s is None else out_s) * (rank == last_out)
                phases[rank].append((begun[rank], clocks[rank], NAMES.index("backward")))
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
    ({"last_out": 2}, LINK, "no rank is late by its own time: for 32% of the time all others waited for rank 2, which "
                            "the exchange before had released later: look at its link, and at what else runs on its "
                            "cores"),
    ({"last_out": 2, "transfer_s": 0.04}, LINK, "no rank is late: the exchanges themselves take"),
    ({"jitter_s": 0.06}, JITTER, "late is now one rank, now another"),
    ({"late": 1, "phase": "input", "by_s": 0.001}, NOBODY, "no rank is late: for 2% of the time"),
])
def test_a_run_without_a_late_rank(options: dict[str, Any], cause: str, words: str) -> None:
    timelines = made_up(4, **options)
    found = arrivals_of(timelines)
    assert found is not None and found.cause == cause and words in "\n".join(timelines_told(timelines))


@pytest.mark.parametrize("own_s, out_s, cause, words", [
    (0.004, 0.016, LINK, "no rank is late by its own time: for 32% of the time all others waited for rank 2"),
    (0.008, 0.012, RANK, "rank 2 is late: it came last to 19 of 19 exchanges")])
def test_a_rank_is_late_if_its_own_time_explains_enough(own_s: float, out_s: float, cause: str, words: str) -> None:
    """20 ms of each step are lost to rank 2, of which its own time explains 20 %, or 40 %."""
    timelines = made_up(4, 2, "forward", by_s=own_s, last_out=2, out_s=out_s)
    found = arrivals_of(timelines)
    assert found is not None and found.cause == cause and words in "\n".join(timelines_told(timelines))
    assert found.awaited == 2 and found.lost_s[2] == pytest.approx(19 * 0.02, rel=0.06)
    assert sum(found.excess_s(2).values()) == pytest.approx(19 * own_s)


@pytest.mark.parametrize("only, ends", [
    (None, "33% of the time"), (7, "39% of the time, most of it in one exchange: 500 ms")])
def test_a_rank_that_was_late_once_is_told_so(only: int | None, ends: str) -> None:
    """A hiccup is no fault of each step, whatever share of a short run it takes."""
    late = [said for said in timelines_told(made_up(2, 1, "forward", by_s=0.5 if only else 0.02, only=only))
            if said.startswith("rank 1 is late")]
    assert len(late) == 1 and late[0].endswith(ends)


def test_own_time_that_is_not_known_counts_as_none() -> None:
    """In one exchange nothing is known of the late rank, in another nothing of the others; NaN would blame anybody."""
    found = arrivals_of(made_up(4, 2, "forward"))
    assert found is not None
    own_s = {name: seconds.copy() for name, seconds in found.own_s.items()}
    for seconds in own_s.values():
        seconds[3, 2], seconds[5, [0, 1, 3]] = np.nan, np.nan
    partly = replace(found, own_s=own_s)
    assert sum(partly.excess_s(2).values()) == pytest.approx(17 * 0.02) and partly.late_position == 2
    unknown = replace(found, own_s={name: np.full_like(seconds, np.nan) for name, seconds in own_s.items()})
    assert [*unknown.excess_s(2).values()] == [0] * len(own_s) and unknown.late_position is None


def test_ranks_of_several_groups_are_compared_within_each() -> None:
    timelines = made_up(4, 2, "forward", groups=((0, 1), (2, 3)))
    found = arrivals_of(timelines)
    assert found is not None and found.late_position == 2 and len(found.starts_s) == 38
    assert found.lost_s[:2] == pytest.approx([0, 0], abs=1e-6) and found.lost_s[2] == pytest.approx(0.38)


def test_exposed_waits_are_those_of_the_median_step_by_rank_and_by_group() -> None:
    found = exposed_waits(made_up(4, 2, "forward", groups=((0, 1), (2, 3))))
    assert found is not None and found.by_rank == pytest.approx([0.001, 0.001, 0.001, 0.021])
    assert [*found.by_group.values()] == [(pytest.approx(0), pytest.approx(0.001)), (3, pytest.approx(0.021))]
    said = [*timelines_told(made_up(4, 2, "forward", groups=((0, 1), (2, 3))))]
    assert said[-2] == ("exposed communication of a step, late ranks' included, in the median: rank 0 1 ms, "
                        "rank 1 1 ms, rank 2 1 ms, "
                        "rank 3 21 ms")
    assert said[-1] == ("  by group, on the rank that waits longest: ranks 2, 3: 21 ms on rank 3; ranks 0, 1: 1 ms on "
                        "rank 0")
    assert "by group" not in "\n".join(timelines_told(made_up(2, 1, "forward")))
    assert exposed_waits(made_up(2, num_steps=1)) is None


def test_optimizers_that_step_one_after_the_other_are_one_step() -> None:
    names = ("optimizer", "backward")
    phases = rows([(10 * step + at, 10 * step + at + 1, name) for step in range(1, 4)
                   for at, name in ((0, 1), (3, 0), (5, 0))], 3)
    assert Timeline(0, names, (), rows([], 4), phases).step_starts_s.tolist() == [13, 23, 33]
    stepped = phases[phases["name"] == 0]
    assert Timeline(0, names, (), rows([], 4), stepped).step_starts_s.tolist() == [13, 15, 23, 25, 33, 35]


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
    noted, group = RingNotes(memory), OwnGroup("0", (1, 0), "gloo", 0)

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
