"""Every benchmark at a tiny size: it runs the real thing and fills its table. How fast anything was is not tested."""
from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import pytest

from benchmarks import __main__ as command
from benchmarks import launching, pages, planning, player, process, ring, simulation
from benchmarks.machine import measured_on
from benchmarks.report import BEGIN, END, Claim, Findings, Table, Unavailable, document, put_into
from book.collectives import ring_all_reduce
from book.widgets import play
from book.widgets.assets import ASSETS, SCRIPTS, STYLES, links
from tests.browser import find_browser


@pytest.mark.full
def test_every_way_to_launch_runs() -> None:
    found = launching.measure(world_sizes=(2,), num_rounds=1)
    [table], missing = found.tables, "accelerate is not installed"
    shown = {row[0] for row in table.rows}
    assert {launching.OURS, launching.TORCHRUN, "`torch.multiprocessing.spawn`"} <= shown, found.left_out
    assert shown == launching.WAYS.keys() or missing in found.left_out[0], found.left_out
    assert len(found.claims) == 1 and all(len(row) == len(table.columns) for row in table.rows)


@pytest.mark.slow
def test_a_way_that_fails_is_left_out_with_its_complaint(monkeypatch: pytest.MonkeyPatch) -> None:
    ways = {"this": launching.Way("benchmarks.programs.missing", 2),
            "that": launching.Way("benchmarks.programs.with_spawn", 2, "not_installed")}
    monkeypatch.setattr(launching, "WAYS", ways)
    found = launching.measure(world_sizes=(2,), num_rounds=1)
    assert not found.tables[0].rows and not found.claims
    assert "not_installed is not installed" in found.left_out[0]
    assert "this with 2 ranks" in found.left_out[1] and "benchmarks.programs.missing" in found.left_out[1]


@pytest.mark.slow
def test_a_program_takes_all_that_it_started_with_it() -> None:
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
def test_a_program_that_takes_too_long_is_given_up(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Torchrun keeps its ranks in sessions of their own, out of reach, and ends them when it is asked to end."""
    monkeypatch.setattr(process, "LIMIT_S", 2)
    with pytest.raises(Unavailable, match="not done after 2 s"):
        process.time_program([sys.executable, "-c", LIKE_TORCHRUN, str(tmp_path / "pid")])
    assert not is_running(int((tmp_path / "pid").read_text()))


@pytest.mark.slow
def test_the_ring_is_compared_at_each_size() -> None:
    found = ring.measure(world_sizes=(2,), sizes=(1 << 10, 16 << 20), num_pairs=2)
    assert [row[:2] for row in found.tables[0].rows] == [("2", "1 KB"), ("2", "16 MB")]
    assert len(found.claims) == 1


def test_the_ring_is_the_chapters(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    chapter = tmp_path / "chapter.ipynb"
    monkeypatch.setattr(ring, "CHAPTER", chapter)
    cells = [{"cell_type": "markdown", "source": ["def ring(buffer): not code"]},
             {"cell_type": "code", "source": ["def ring(buffer):\n", "    return buffer + dist.ReduceOp.SUM\n"]}]
    chapter.write_text(json.dumps({"cells": cells}), "utf-8")
    assert ring.chapter_ring().__code__.co_names == ("dist", "ReduceOp", "SUM")
    chapter.write_text(json.dumps({"cells": cells[:1]}), "utf-8")
    with pytest.raises(ValueError, match="defines ring"):
        ring.chapter_ring()


def test_simulations_are_counted_in_moves() -> None:
    found = simulation.measure(world_sizes=(3, 8), num_rounds=1)
    assert [row[:2] for row in found.tables[0].rows] == [(str(n), str(len(ring_all_reduce(n).moves))) for n in (3, 8)]
    assert "to the power of" in found.tables[0].note and not found.claims


def test_searches_are_counted_in_layouts() -> None:
    found = planning.measure(cluster_sizes=(8, 64), num_rounds=1)
    counts = [f"{len(planning.time_once(num_gpus)[1]):,}" for num_gpus in (8, 64)]
    assert [row[:2] for row in found.tables[0].rows] == [("8", counts[0]), ("64", counts[1])] and not found.claims


@pytest.fixture
def small_site(tmp_path: Path) -> Path:
    """A website of one page with two players."""
    for name in (*STYLES, *SCRIPTS):
        (tmp_path / name).write_bytes((ASSETS / name).read_bytes())
    (tmp_path / "chapters").mkdir()
    players = [play(ring_all_reduce(n)) for n in (2, 4)]
    head = "<!doctype html>" + links("..")
    body = "".join(getattr(shown, "shown", shown).html() for shown in players)
    (tmp_path / "chapters" / "one.html").write_text(head + body, "utf-8")
    return tmp_path


@pytest.mark.slow
def test_pages_are_weighed_and_painted(small_site: Path) -> None:
    find_browser()
    found = pages.measure(small_site, num_loads=1)
    weights, loaded = found.tables
    assert weights.rows[-1][:2] == ("largest data of a player in `chapters/one.html`", "2")
    [row] = loaded.rows
    num_bytes = sum(file.stat().st_size for file in small_site.rglob("*") if file.is_file())
    assert row[:3] == ("`chapters/one.html`", str(1 + len(STYLES + SCRIPTS)), f"{num_bytes / 1000:.1f} KB")
    assert row[-1].endswith("s")
    assert len(found.claims) == 2 + len(pages.CODE_BUDGETS_BYTES)


def test_the_data_of_players_is_found(small_site: Path) -> None:
    data = pages.payloads(small_site / "chapters" / "one.html")
    assert [json.loads(text)["runs"][0]["n"] for text in data] == [4, 2]
    assert pages.compressed(ASSETS / "player.js") < pages.plain(ASSETS / "player.js")


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


@pytest.mark.parametrize(("arguments", "advice"), [("rings", "use any of"), ("ring --readme", "leave out the parts"),
                                                   ("--quick --readme", "leave out the parts")])
def test_wrong_arguments_are_refused(arguments: str, advice: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command.main(arguments.split())
    assert advice in capsys.readouterr().err


def test_a_run_is_kept_between_the_readmes_markers(tmp_path: Path) -> None:
    readme = tmp_path / "README.md"
    readme.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n", "utf-8")
    findings = Findings([Table("Title", ("a", "b"), [("1", "2")])], [Claim("this", "3", False)], ["that: why"])
    for _ in range(2):
        put_into(readme, document("Measured.", [findings]))
    text = readme.read_text("utf-8")
    assert text.startswith("before\n") and text.endswith("\nafter\n") and "old" not in text
    assert text.count("| 1 | 2 |") == 1 and "| this | 3 | **no** |" in text and "Left out: that: why" in text
    readme.write_text("no markers", "utf-8")
    with pytest.raises(ValueError, match="no place for the table"):
        put_into(readme, "text")


def test_the_readme_has_a_place_for_the_table() -> None:
    text = (process.ROOT / "README.md").read_text("utf-8")
    assert text.index(BEGIN) < text.index(END)


def test_the_machine_is_described_without_its_name() -> None:
    text = measured_on()
    assert "cores" in text and "torch" in text and os.uname().nodename not in text
