"""`lockstep`, the one command: its words lead to the parts of the book."""
from __future__ import annotations

import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

from book.__main__ import COMMANDS, main


def test_words_lead_to_their_parts(capsys: pytest.CaptureFixture[str]) -> None:
    line = ["plan", "llama3-8b", "--gpus", "8"]
    assert main(line) == 0
    asked = capsys.readouterr().out
    assert import_module("book.cost.__main__").main(line) == 0 and capsys.readouterr().out == asked


@pytest.mark.parametrize("word", COMMANDS)
def test_every_word_has_a_part_that_knows_it(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([word, "--help"])
    assert ended.value.code == 0 and capsys.readouterr().out.startswith(f"usage: lockstep {word} ")


def test_help_is_one_line_for_each_word_and_another_word_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == main(["--help"]) == 0
    told = capsys.readouterr().out
    assert all(f"  lockstep {word} " in told for word in COMMANDS)
    assert main(["plna"]) == 2
    assert capsys.readouterr().err == f"lockstep has no command 'plna': use {', '.join(COMMANDS)}\n"


@pytest.mark.slow
def test_it_is_installed_and_is_the_module() -> None:
    script = Path(sys.executable).with_name("lockstep")
    for command in ([str(script)], [sys.executable, "-m", "book"]):
        told = subprocess.run([*command, "models"], capture_output=True, text=True, check=True).stdout
        assert told.startswith("models: ")
