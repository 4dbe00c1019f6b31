"""Every benchmark at a tiny size: it runs the real thing and fills its table. How fast anything was is not tested."""
from __future__ import annotations

import json
import os
import re
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks import __main__ as command
from benchmarks import (kept, late, launching, pages, planning, player, process, quorum, ring, simulation, watched,
                        weights)
from benchmarks.chapter import code_that_binds
from benchmarks.machine import measured_on
from benchmarks.report import Claim, Findings, Table, Unavailable, document
from book.collectives import ring_all_reduce
from book.widgets import play
from book.widgets.registry import ASSETS, STYLE, WIDGETS, links, loaded, minified, needed, served, write
from tests.browser import find_browser

FOUND = Findings([Table("One & two", ("a", "b"), [("1", "2")], "A note.")], [Claim("this", "3", False)], ["that: why"])


@pytest.mark.slow
def test_every_launch_method_runs() -> None:
    found = launching.measure(world_sizes=(2,), num_rounds=1)
    [table], missing = found.tables, "accelerate is not installed"
    shown = {row[0] for row in table.rows}
    assert {launching.OURS, launching.TORCHRUN, "`torch.multiprocessing.spawn`"} <= shown, found.left_out
    assert shown == launching.WAYS.keys() or missing in found.left_out[0], found.left_out
    assert len(found.claims) == 1 and all(len(row) == len(table.columns) for row in table.rows)


@pytest.mark.slow
def test_a_launch_method_that_fails_is_left_out_with_its_error(monkeypatch: pytest.MonkeyPatch) -> None:
    ways = {"this": launching.Way("benchmarks.programs.missing", 2),
            "that": launching.Way("benchmarks.programs.with_spawn", 2, "not_installed")}
    monkeypatch.setattr(launching, "WAYS", ways)
    found = launching.measure(world_sizes=(2,), num_rounds=1)
    assert not found.tables[0].rows and not found.claims
    assert "not_installed is not installed" in found.left_out[0]
    assert "this with 2 ranks" in found.left_out[1] and "benchmarks.programs.missing" in found.left_out[1]


@pytest.mark.slow
def test_processes_started_by_a_program_end_with_it() -> None:
    start_child = ("import subprocess, sys; sleeper = [sys.executable, '-c', 'import time; time.sleep(60)']; "
                   "print(subprocess.Popen(sleeper, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL).pid)")
    _, said = process.time_program([sys.executable, "-c", start_child])
    limit_s = time.monotonic() + 10
    while is_running(int(said)) and time.monotonic() < limit_s:
        time.sleep(0.02)
    assert not is_running(int(said))


def is_running(pid: int) -> bool:
    """Tell whether a process exists and is not just waiting to be reaped."""
    try:
        os.kill(pid, 0)
        stat = Path(f"/proc/{pid}/stat")
        return not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] != "Z"
    except (ProcessLookupError, FileNotFoundError):
        return False


LIKE_TORCHRUN = """
import pathlib, signal, subprocess, sys
rank = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
signal.signal(signal.SIGTERM, lambda *_: (rank.kill(), rank.wait(), sys.exit(1)))
pathlib.Path(sys.argv[1]).write_text(str(rank.pid))
signal.pause()
"""


@pytest.mark.slow
def test_a_program_that_takes_too_long_is_stopped(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Torchrun keeps its ranks in sessions of their own, out of reach, and ends them when it is asked to end."""
    monkeypatch.setattr(process, "LIMIT_S", 2)
    with pytest.raises(Unavailable, match="not done after 2 s"):
        process.time_program([sys.executable, "-c", LIKE_TORCHRUN, str(tmp_path / "pid")])
    assert not is_running(int((tmp_path / "pid").read_text()))


@pytest.mark.slow
def test_a_watched_job_and_a_plain_one_run_the_same_steps_by_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    pairs = watched.time_pairs("FSDP2", 32, 2)
    assert len(pairs) == 2 and all(seconds > 0 for pair in pairs for seconds in pair)
    monkeypatch.setitem(watched.STARTS, watched.WATCHED, watched.STARTS[watched.PLAIN])
    with pytest.raises(Unavailable, match="one has to be watched and one plain"):
        watched.time_pairs("DDP", 32, 1)


@pytest.mark.slow
def test_the_ring_is_compared_at_each_size() -> None:
    found = ring.measure(world_sizes=(2,), sizes=(1 << 10, 16 << 20), num_pairs=2)
    assert [row[:2] for row in found.tables[0].rows] == [("2", "1 KB"), ("2", "16 MB")]
    assert len(found.claims) == 1


def test_the_ring_is_that_of_the_chapter(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    chapter = tmp_path / "chapter.ipynb"
    monkeypatch.setattr(ring, "CHAPTER", chapter)
    cells = [{"cell_type": "markdown", "source": ["def ring(buffer): not code"]},
             {"cell_type": "code", "source": ["def ring(buffer):\n", "    return buffer + dist.ReduceOp.SUM\n"]}]
    chapter.write_text(json.dumps({"cells": cells}), "utf-8")
    assert ring.chapter_ring().__code__.co_names == ("dist", "ReduceOp", "SUM")
    chapter.write_text(json.dumps({"cells": cells[:1]}), "utf-8")
    with pytest.raises(ValueError, match="defines ring"):
        ring.chapter_ring()


def test_the_quorum_is_that_of_its_page(monkeypatch: pytest.MonkeyPatch) -> None:
    cells = [code_that_binds(quorum.PAGE, name) for name in ("Replicas", "killed_s", "quorum_s", "alone", "restart_s")]
    assert len(set(cells)) == 5 and "victim" in cells[1] and "RESTARTED" in cells[4]
    kills = iter([quorum.Kill(1, 1.1), quorum.Kill(2, 1.3, equal=False), quorum.Kill(0, 1.2, error=1e-15)])
    monkeypatch.setattr(quorum, "find_spec", lambda name: name)
    monkeypatch.setattr(quorum, "replica_killed", lambda: next(kills))
    monkeypatch.setattr(quorum, "rank_killed", lambda: quorum.Kill(7, 6.25))
    monkeypatch.setattr(quorum, "one_of_five_killed", lambda program: 5.2 if program is quorum.left_open else 1.1)
    ends = iter([quorum.Beacon(3, 0, 30.01), quorum.Beacon(0, 0, 7.6), quorum.Beacon(0, 2, 33.0)])
    monkeypatch.setattr(quorum, "lighthouse_killed", lambda anew=False: next(ends))
    found = quorum.measure(num_kills=3, num_restarts=1, num_of_five=1, num_lighthouses=2)
    assert [row[1] for row in found.tables[0].rows] == ["3", "1 (0–2)", "1", "1.20 (1.10–1.30)"]
    assert [claim.kept for claim in found.claims] == [False, False, True]
    assert [row[1:] for row in found.tables[1].rows][2] == ("0", "1")
    assert [row[1:] for row in found.tables[2].rows] == [
        ("1", "2"), ("1", "0"), ("30.0", "–"), ("0", "1"), ("–", "33.0 (33.0–33.0)"), ("0", "1"),
        ("–", "7.6 (7.6–7.6)")]


def test_verdicts_on_late_ranks_are_counted() -> None:
    """Right; right but for the phase; another rank; missed; jitter that is taken for a rank; nobody, rightly."""
    jobs = [late.Job("input", 1, 12), late.Job("forward", 0, 25), late.Job("backward", 2, 50),
            late.Job("optimizer", 1, 12), late.Job("jitter", None, 25), late.Job("nobody", None, 12)]
    under = [late.Verdict(1, "input"), late.Verdict(0, "input"), late.Verdict(1, "backward"), late.Verdict(),
             late.Verdict(0, "forward"), late.Verdict()]
    alone = [late.Verdict(job.rank) for job in jobs]
    assert late.score(jobs, under) == late.Score(late=4, clean=2, rank=2, both=1, false=2)
    assert late.score(jobs, alone) == late.Score(late=4, clean=2, rank=4, both=0, false=0)
    found = late.findings(jobs, list(zip(under, alone)))
    assert found.tables[0].rows == [("`lockstep run`", "2 of 4", "1 of 4", "2 of 6"),
                                    ("traces alone", "4 of 4", "–", "0 of 6")]
    assert [claim.kept for claim in found.claims] == [False, False]
    assert ("wrong about: forward by 25 ms on rank 0: rank 0, input; backward by 50 ms on rank 2: rank 1, backward; "
            "optimizer by 12 ms on rank 1: nobody; jitter by 25 ms: rank 0, forward.") in found.tables[0].note
    right = late.findings(jobs, [(late.Verdict(job.rank, job.kind if job.rank is not None else None), one)
                                 for job, one in zip(jobs, alone)])
    assert all(claim.kept for claim in right.claims) and "wrong" not in right.tables[0].note


def test_jobs_are_drawn_of_all_kinds_and_the_same_each_time() -> None:
    jobs = late.drawn(21)
    assert jobs == late.drawn(21) and jobs[:5] == late.drawn(5)
    assert [sum(job.kind == kind for job in jobs) for kind in late.KINDS] == [3] * 7
    assert all((job.rank is None) == (job.kind in ("jitter", "nobody")) for job in jobs)


@pytest.mark.slow
def test_a_job_with_a_late_rank_is_run_and_judged() -> None:
    under, alone = late.run(late.Job("backward", 1, 150))
    assert (under, alone.rank) == (late.Verdict(1, "backward"), 1)


def test_simulations_are_counted_in_moves() -> None:
    found = simulation.measure(world_sizes=(3, 8), num_rounds=1, many=())
    assert [row[:2] for row in found.tables[0].rows] == [(str(n), str(len(ring_all_reduce(n).moves))) for n in (3, 8)]
    assert "to the power of" in found.tables[0].note and not found.claims


@pytest.mark.slow
def test_many_ranks_are_simulated_in_processes_of_their_own() -> None:
    asked = ((simulation.RING, 64), (simulation.STEP, 128), ("nothing", 8))
    found = simulation.measure(world_sizes=(3,), num_rounds=1, many=asked)
    rows = found.tables[1].rows
    assert [row[:2] for row in rows] == [("ring all-reduce", "64"), ("3-D step", "128")]
    for *_, peak, before in rows:
        assert int(peak.removesuffix(" MB")) >= int(before.removesuffix(" MB")) > 10
    assert [claim.promise for claim in found.claims] == ["a 3-D step of 128 ranks is simulated in at most 30 s"]
    assert found.left_out == ["nothing of 8 ranks: KeyError: 'nothing'"]


def test_searches_are_counted_in_layouts() -> None:
    questions = ["plan llama3-8b --gpus 8", "plan llama3-70b --gpus 16"]
    found = planning.measure(cluster_sizes=(8, 64), num_rounds=1, questions=questions)
    counts = [(name, f"{num_gpus}", f"{len(planning.time_once(num_gpus, name)[1]):,}")
              for name in planning.SEARCHED for num_gpus in (8, 64)]
    assert [row[:3] for row in found.tables[0].rows] == counts
    assert [claim.promise for claim in found.claims] == ["each of 2 questions is answered in under 0.5 s"]
    fits, not_enough = (row[1] for row in found.tables[1].rows)
    assert re.fullmatch(r"MFU \d\d%", fits) and not_enough.startswith("does not fit; enough: 24 H100")


@pytest.fixture
def small_site(tmp_path: Path) -> Path:
    """A website of one page with two players."""
    write(tmp_path, {"player"})
    (tmp_path / "chapters").mkdir()
    players = [play(ring_all_reduce(n)) for n in (2, 4)]
    head = "<!doctype html>" + links("..", {"player"})
    body = "".join(getattr(shown, "shown", shown).html() for shown in players)
    (tmp_path / "chapters" / "one.html").write_text(head + body, "utf-8")
    return tmp_path


@pytest.mark.slow
def test_page_sizes_and_first_paints_are_measured(small_site: Path) -> None:
    find_browser()
    found = pages.measure(small_site, num_loads=1)
    [row] = found.tables[0].rows
    num_bytes = sum(file.stat().st_size for file in small_site.rglob("*") if file.is_file())
    assert row[:3] == ("`chapters/one.html`", str(1 + len(needed({"player"}))), f"{num_bytes / 1000:.1f} KB")
    assert row[-1].endswith("s")
    assert len(found.claims) == 1


def test_the_data_of_players_is_found(small_site: Path) -> None:
    data = weights.payloads(small_site / "chapters" / "one.html")
    assert [json.loads(text)["runs"][0]["n"] for text in data] == [4, 2]
    found = weights.measure(small_site)
    assert found.tables[0].rows[-1][:3] == ("largest data of a player in `chapters/one.html`", "2",
                                            f"{len(data[0]) / 1000:.1f} KB")
    assert len(found.claims) == 2 and all(claim.kept for claim in found.claims)
    assert weights.weight("player.js") < weights.compressed(ASSETS / "player.js") < weights.plain(ASSETS / "player.js")
    assert weights.weight("player.js") == weights.compressed(small_site / "player.js")


def test_comments_and_blanks_go() -> None:
    script = 'a("/* no */"); // yes\n\n  /* two\n lines */ b(c ? `${c ? ` x ` : 1}, y` : d);'
    assert minified("one.js", script) == 'a("/* no */"),b(c?`${c?` x `:1}, y`:d)'
    assert minified(STYLE, "/* why */\n.a :hover { width: calc(1px + 2px); }") == ".a :hover{width:calc(1px + 2px)}"


def test_minified_scripts_run(browser: Any) -> None:
    """In the order of the website. Every test of a widget in a browser runs them too."""
    page, log = browser.open("about:blank")
    for name in needed(set(WIDGETS)):
        if name != STYLE:
            page.add_script_tag(content=served(name))
    assert len(loaded(set(WIDGETS))) >= page.evaluate("Object.keys(globalThis.lockstep).length") > 15
    assert all(page.evaluate("name => !!globalThis[`lockstep${name}`]", name.capitalize()) for name in WIDGETS)
    log.assert_clean()


@pytest.mark.slow
def test_without_a_website_or_a_browser_pages_say_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                     small_site: Path) -> None:
    with pytest.raises(Unavailable, match="make site"):
        pages.measure(tmp_path / "nothing")
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("LOCKSTEP_BROWSER", raising=False)
    with pytest.raises(Unavailable, match="no Chromium found"):
        pages.measure(small_site)
    assert "Left out: player: no Chromium found" in command.run("player", quick=True).markdown()


@pytest.mark.slow
def test_frames_are_counted_while_the_player_plays() -> None:
    find_browser()
    found = player.measure(world_size=4, seconds=0.3)
    assert [row[0] for row in found.tables[0].rows] == ["ring", "matrix"]
    assert all(float(row[2]) > 0 for row in found.tables[0].rows)


@pytest.mark.slow
def test_parts_are_chosen_and_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["simulation", "--quick"]) == 0
    said = capsys.readouterr()
    assert said.out.startswith("Measured on 2") and "| 1024 | 2,095,104 |" in said.out
    assert "Measuring: simulation" in said.err and "ring by hand" not in said.out


@pytest.mark.parametrize(("arguments", "advice"), [("rings", "use any of"), ("--quick --keep", "leave out --quick")])
def test_wrong_arguments_are_refused(arguments: str, advice: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command.main(arguments.split())
    assert advice in capsys.readouterr().err


def test_a_run_is_printed_with_its_claims() -> None:
    text = document("Measured.", [FOUND])
    assert text.startswith("Measured.\n\n**What is promised**") and "| this | 3 | **no** |" in text
    assert "**One & two**\n\n| a | b |\n|:--|--:|\n| 1 | 2 |\n\nA note.\n\nLeft out: that: why" in text


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in which this test's measurements are kept, those of two parts to begin with."""
    monkeypatch.setattr(kept, "DATA", tmp_path / "measured.json")
    monkeypatch.setattr(kept, "PAGE", tmp_path / "page.md")
    before = kept.Kept("Measured before.", FOUND, "All was smaller.")
    kept.write({"grading": before, "ring": before})
    return tmp_path


def test_kept_results_are_read_back_unchanged(elsewhere: Path) -> None:
    assert kept.read() == dict.fromkeys(("grading", "ring"), kept.Kept("Measured before.", FOUND, "All was smaller."))


def test_a_new_measurement_replaces_the_kept_one(elsewhere: Path) -> None:
    command.keep("Measured now.", {"ring": FOUND, "grading": Findings(left_out=["grading: no bubblewrap"])})
    parts = kept.read()
    assert parts["ring"] == kept.Kept("Measured now.", FOUND) and parts["grading"].measured_on == "Measured before."
    text = (elsewhere / "page.md").read_text("utf-8")
    assert text.count("| this | 3 | **no** | [ring](#one--two) |") == 1
    assert text.index("Measured now.") < text.index("Measured before.")
    assert "Measured before. All was smaller. Command: `.venv/bin/python -m benchmarks grading`." in text
    assert text.count("| 1 | 2 |\n\nA note.\n\nLeft out: that: why") == 2


def test_the_measurements_page_shows_the_kept_results() -> None:
    """Each part with its numbers and promises, where, when, and by which command."""
    text, parts = kept.PAGE.read_text("utf-8"), kept.read()
    assert text == command.page(), "chapters/94_measurements.md is not what benchmarks/measured.json says"
    assert parts.keys() <= command.PARTS.keys() and {"launch", "ring", "weights", "grading"} <= parts.keys()
    for name, part in parts.items():
        assert re.match(r"Measured on \d{4}-\d\d-\d\d with \d+ cores of .*, Python .*, torch .*\.$", part.measured_on)
        assert part.found.tables and part.found.claims and f"-m benchmarks {name}`" in text


@pytest.mark.slow
def test_measuring_a_part_keeps_it_only_when_told_to(elsewhere: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["planning", "--quick"]) == 0 and "planning" not in kept.read()
    assert command.main(["planning", "--keep"]) == 0 and "Kept in measured.json" in capsys.readouterr().err
    assert kept.read()["planning"].measured_on == measured_on()


def test_the_machine_is_described_without_its_name() -> None:
    text = measured_on()
    assert "cores" in text and "torch" in text and os.uname().nodename not in text
