"""Where a package is missing that pip installs only with an extra, the error says which, and how to get it."""
from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest

from tests.website import ROOT

READS = ["pyproject.toml"]
LAUNCH = "from book.launch import launch; launch(print, 2)"
ADVICE = "pip install 'lockstep-book[run]'"


def said(program: str, *missing: str) -> str:
    """The last line that a Python without these packages writes to stderr."""
    hidden = f"import sys; sys.modules.update(dict.fromkeys({missing!r}))\n"
    done = subprocess.run([sys.executable, "-c", hidden + program], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 1
    return done.stderr.strip().splitlines()[-1]


@pytest.mark.slow
@pytest.mark.parametrize("program, missing, needs", [
    (LAUNCH, ["torch"], "launch needs torch"),
    (LAUNCH, ["torch", "cloudpickle"], "launch needs torch and cloudpickle"),
    (LAUNCH, ["cloudpickle"], "launch needs cloudpickle"),
    ("from book.launch import rank_device; rank_device()", ["torch"], "rank_device needs torch"),
    ("from book.plot import lines", ["matplotlib"], "book.plot needs matplotlib"),
    ("import book.device", ["torch"], "book.device needs torch"),
    ("from book.record.stages import follow_stages", ["torch"], "book.record needs torch"),
    ("from book.execute import execute", ["torch"], "book.execute needs torch"),
    ("from book.shards import trace_mlp", ["torch"], "book.shards needs torch"),
    ("from book.parallel.pipeline import Mail", ["torch"], "book.parallel needs torch"),
    ("from book.widgets import panel; panel(print)", ["anywidget"], "panel needs anywidget"),
    ("from book.widgets import panel; panel(print)", ["ipywidgets"], "panel needs ipywidgets"),
])
def test_a_missing_package_is_named_with_how_to_install_it(program: str, missing: list[str], needs: str) -> None:
    assert said(program, *missing) == f"ModuleNotFoundError: {needs}: {ADVICE}"


def test_the_extra_that_is_named_has_these_packages() -> None:
    listed = re.search(r"^run = (.*)$", (ROOT / "pyproject.toml").read_text(encoding="utf-8"), re.MULTILINE)
    packages = {requirement.split(">=")[0] for requirement in json.loads(listed[1])}
    assert {"torch", "cloudpickle", "matplotlib", "ipywidgets", "anywidget"} <= packages
