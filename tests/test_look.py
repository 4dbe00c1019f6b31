"""`lockstep show`: Flight Recorder dumps as torch writes them, of real ranks that hang and of states set by hand; runs,
traces and recordings of this book's own; pages."""
from __future__ import annotations

import json
import pickle
import re
from dataclasses import replace
from html import unescape
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from book.__main__ import main
from book.launch import HangError, launch
from book.look.dumps import DumpError, plain, ranks_of, read_dumps
from book.look.flights import Due, guilty, waits
from book.look.runs import read_run, write_run
from book.look.timelines import NUM_ROWS, ROW, timeline
from book.look.told import timelines_told
from book.report.page import write_run_page
from book.trace import Event, Trace
from book.waiting.hang import Group
from book.widgets.calls import KINDS, TICKS, Calls
from tests.damaged import damaged
from tests.test_look_times import made_up

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
    write_run(folder, state, [*timelines_told(timelines), "cause: <b>"], {f"{one.rank}.ring": one for one in timelines},
              totals, "cause: rank 2 is missing")
    return folder


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
    assert stops[-1]["say"][0][1].startswith("rank 2 is late: it came last to 19 of 19 exchanges")
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
    ("ended", "that has ended", "rank 2 is late: "), ("interrupted", "that was interrupted", "rank 2 is late: "),
    ("failed", "that has failed", "The end."), ("hung", "that hangs", "cause: rank 2 is missing")])
def test_the_page_of_a_run_says_how_it_ended(state: str, title: str, end: str, tmp_path: Path) -> None:
    """Whatever its lines have said: here the first cause among them is another."""
    page = tmp_path / "report.html"
    write_run_page(page, read_run(run_in(tmp_path / "run", state=state) / "run.json"))
    assert f"<h1>A run of 4 ranks {title}</h1>" in page.read_text("utf-8")
    assert shown_on(page)["stops"][-1]["say"][0][1].startswith(end)


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
    ends = [sum(lane[1::3]) + sum(lane[2::3]) for lane in data["lanes"]]
    assert ends[1] == TICKS and ends[0] == ends[2] < 0.95 * TICKS
    assert data["stops"][-1] == {"t": TICKS, "say": [["", "rank 1 is missing"]]}


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
    assert shown_on(tmp_path / "page.html")["stops"][-1]["say"] == [["", said[3].strip()]]
    path.write_text(path.read_text()[:-9])
    assert main(["show", str(path)]) == 2 and "this is not a trace's JSON" in capsys.readouterr().err
