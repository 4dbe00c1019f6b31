"""Rows of old and new calls: what is stated must be what happens, in this process, on ranks and in scripts."""
from __future__ import annotations

import subprocess
import warnings
from collections.abc import Callable
from typing import Any

import pytest

from book.legacy import LegacyError, Overview, Row, ScriptError, Section, observe, observe_ranks, run_script


def refuses() -> None:
    raise ValueError("Not like this. Use `that` (/home/me/file.py) instead. And so on.")


def warns() -> int:
    warnings.warn("It is old. Use `that` instead.", FutureWarning, stacklevel=2)
    return 7


def nothing() -> None:
    return None


def row(old: Callable[[], Any] = nothing, new: Callable[[], Any] = nothing, **stated: Any) -> Row:
    return Section("Calls").row("old()", old, "new()", new, today="Words.", **stated)


@pytest.mark.parametrize("stated, happened, said", [
    (dict(old=refuses, raises=ValueError, says="that"), "raises `ValueError`", "Use `that` instead"),
    (dict(old=warns, warns=FutureWarning, says="that", gives=7), "warns of a `FutureWarning`", "Use `that` instead"),
    (dict(old=lambda: run_script("python train.py", "1 / 0"), raises=ScriptError, says="zero"),
     "fails", "ZeroDivisionError: division by zero"),
    (dict(old=lambda: 3, gives=3), "runs", "")])
def test_a_row_shows_what_happened_and_the_sentence_that_says_so(stated: dict, happened: str, said: str) -> None:
    made = row(**stated)
    assert (made.happened, made.said) == (happened, said)
    assert made.happened in made._repr_markdown_() and made.said in made._repr_markdown_()


@pytest.mark.parametrize("stated, complaint", [
    (dict(old=refuses, raises=KeyError), "raises ValueError: Not like this.*; the row says that it raises KeyError"),
    (dict(old=refuses), "raises ValueError"),
    (dict(raises=ValueError), "raises and warns of nothing; the row says that it raises ValueError"),
    (dict(old=refuses, raises=ValueError, says="the other"), "'the other' stands in it"),
    (dict(old=warns, gives=7), "the row says nothing of a warning"),
    (dict(old=warns, warns=DeprecationWarning, gives=7), "the row says that it warns of a DeprecationWarning"),
    (dict(old=warns, warns=FutureWarning, says="the other", gives=7), "'the other' stands in it"),
    (dict(old=warns, warns=FutureWarning), "gives 7; the row says None"),
    (dict(old=lambda: 3, gives=4), "gives 3; the row says 4"),
    (dict(new=refuses), r"new\(\), the new code, raises ValueError"),
    (dict(new=warns, new_gives=7), r"new\(\), the new code, warns: FutureWarning"),
    (dict(new=lambda: 3), r"new\(\) gives 3; the row says None")])
def test_a_row_that_is_not_true_fails(stated: dict, complaint: str) -> None:
    section = Section("Calls")
    with pytest.raises(LegacyError, match=complaint):
        section.row("old()", stated.pop("old", nothing), "new()", stated.pop("new", nothing), today="", **stated)
    assert not section.rows


def test_a_cell_that_runs_twice_keeps_one_row() -> None:
    section = Section("Calls")
    for _ in range(2):
        section.row("old()", nothing, "new()", nothing, today="Words.")
    assert len(section.rows) == 1


def test_a_warning_that_python_would_show_once_is_seen_each_time() -> None:
    assert observe(warns).warned == observe(warns).warned != ()


@pytest.mark.slow
def test_ranks_give_a_list_and_say_on_stderr_what_only_cpp_warns_of(capfd: pytest.CaptureFixture[str]) -> None:
    def on_a_rank() -> int:
        import os
        import sys
        print("[W1121 reducer.cpp:1] Warning: slow (function operator())", file=sys.stderr)
        warnings.warn("old", FutureWarning, stacklevel=2)
        return 10 * int(os.environ["RANK"])
    outcome = observe_ranks(on_a_rank, 2)
    assert outcome.value == [0, 10] and outcome.error is None
    assert {(w.category, w.text) for w in outcome.warned} == {
        ("FutureWarning", "old"), ("Warning", "slow (function operator())")}
    assert capfd.readouterr().out == ""


@pytest.mark.slow
def test_the_error_of_one_rank_and_a_hang_are_distinguished() -> None:
    def one_refuses() -> None:
        import os
        if os.environ["RANK"] == "1":
            raise KeyError("rank 1")

    def waits() -> None:
        import torch
        import torch.distributed as dist
        dist.init_process_group("gloo")
        dist.recv(torch.zeros(1), src=1 - dist.get_rank())
    assert observe_ranks(one_refuses, 2).error == "KeyError"
    assert observe_ranks(waits, 2).error == "HangError"


@pytest.mark.slow
def test_a_script_gives_what_it_printed_and_its_warnings() -> None:
    source = "import warnings; print(6 * 7); warnings.warn('it is old', FutureWarning)"
    outcome = observe(lambda: run_script("python train.py", source))
    assert outcome.value == "42" and [(w.category, w.text) for w in outcome.warned] == [("FutureWarning", "it is old")]


@pytest.mark.slow
def test_a_script_that_fails_says_why() -> None:
    with pytest.raises(ScriptError, match="ZeroDivisionError"):
        run_script("python train.py", "1 / 0")


@pytest.mark.full
def test_a_script_that_hangs_is_ended_with_its_ranks(tmp_path: Any) -> None:
    """torchrun starts its ranks in sessions of their own."""
    source = f"import os, time; open('{tmp_path}/' + str(os.getpid()), 'w').close(); time.sleep(300)"
    with pytest.raises(ScriptError, match="has not ended after 10 s"):
        run_script("torchrun --standalone --nproc-per-node=2 train.py", source, limit_s=10)
    started = [path.name for path in tmp_path.iterdir()]
    assert len(started) == 2
    assert subprocess.run(["ps", "-o", "pid=", "-p", ",".join(started)], capture_output=True, text=True).stdout == ""


def test_the_overview_links_each_row_to_its_heading_and_escapes_code() -> None:
    section = Section("Calls")
    section.row('mesh["tp"] of <a> mesh', nothing, "new()", nothing, today="Use `x`. More.")
    shown = Overview(section)._repr_html_()
    assert '<a href="#mesh-tp-of-a-mesh">' in shown and "&lt;a&gt;" in shown
    assert "Runs. Use <code>x</code>.<" in shown and repr(Overview(section)) == "1 old calls in 1 sections"
