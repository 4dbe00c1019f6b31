"""Scripts and styles: a linter that needs no network and no Node.js, only the browser of other tests."""
from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.website import ROOT

READS = ["book/twin/*.js", "book/widgets/*.js", "book/widgets/*.css", "book/authoring/*.css"]
FILES = sorted(path for pattern in READS for path in ROOT.glob(pattern))
SCRIPTS = [path for path in FILES if path.suffix == ".js"]
MAX_LINE = 120
SHARED = r"globalThis\.lockstep(?:Scene|Stages|Explorer|Cluster) = \{(.*?)\n?\s*\};"  # what others may take
TEMPLATE = r"`[^`]*`"
NO_CODE = re.compile(rf"""({TEMPLATE})|/\*.*?\*/|//[^\n]*|"[^"\n]*"|'[^'\n]*'""", re.S)  # a template has code in it
# Runs nothing: makes a function of the text, or returns what is wrong with it.
PARSED = "text => { try { new Function(text); return '' } catch (error) { return String(error) } }"

each_script = pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)


def code(text: str) -> str:
    """A script without comments and plain strings, with as many lines."""
    return NO_CODE.sub(lambda found: found[1] or "\n" * found[0].count("\n"), text)


def crowded(text: str) -> Iterator[str]:
    """Lines with a second statement after a semicolon, other than the heads of loops."""
    for number, line in enumerate(re.sub(TEMPLATE, "", code(text)).splitlines(), 1):
        if re.search(r";\s*[^\s}]", re.sub(r"\bfor \(.*?;.*?;", "", line)):
            yield f"line {number}: {line.strip()}"


def unused(text: str) -> list[str]:
    """Names that the outermost function of a script defines, or takes from another script, and never uses."""
    own = code(text)
    names = re.findall(r"^  function (\w+)", own, re.M) + re.findall(r"^  (?:const|let) (\w+) =", own, re.M)
    for group in re.findall(r"^  (?:const|let) [\[{] ([^\]}=]*) [\]}] =", own, re.M) + re.findall(
            r"^  const \[([^\]=]*)\] =", own, re.M):
        names += re.findall(r"(\w+)(?=\s*(?:,|$))", group)
    return [name for name in names if name != "_" and len(re.findall(rf"(?:(?<![.\w])|(?<=\.\.\.)){name}\b", own)) < 2]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_lines_are_short(path: Path) -> None:
    lines = path.read_text("utf-8").splitlines()
    assert [number for number, line in enumerate(lines, 1) if len(line) > MAX_LINE] == []


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_no_mark_of_a_merge_is_left(path: Path) -> None:
    """A browser passes over what it can't read in a style, and the rule after it, without a word."""
    assert not re.findall(r"^(?:<<<<<<<|=======|>>>>>>>).*", path.read_text("utf-8"), re.M)


@each_script
def test_a_line_has_one_statement(script: Path) -> None:
    assert list(crowded(script.read_text("utf-8"))) == []


@each_script
def test_scripts_use_what_they_define(script: Path) -> None:
    assert unused(script.read_text("utf-8")) == []


def test_shared_names_are_used_by_another_script() -> None:
    """Every name that a script puts at the disposal of the others."""
    texts = {script: code(script.read_text("utf-8")) for script in SCRIPTS}
    for script, text in texts.items():
        others = "".join(other for path, other in texts.items() if path != script)
        for shared in re.findall(SHARED, text, re.S):
            names = re.findall(r"\w+", shared)
            assert names and [name for name in names if not re.search(rf"\b{name}\b", others)] == [], script.name


def test_scripts_parse(browser: Any) -> None:
    page, log = browser.open("about:blank")
    found = {script.name: page.evaluate(PARSED, script.read_text("utf-8")) for script in SCRIPTS}
    assert found and not any(found.values()), found
    assert page.evaluate(PARSED, "const = 1"), "a fault is seen"
    log.assert_clean()


@pytest.mark.parametrize("text, names", [
    ("(() => {\n  function used() {}\n  const lost = used();\n})();", ["lost"]),
    ("(() => {\n  const { make, sum } = other;\n  sum();\n  let x = 1;\n  x++;\n})();", ["make"]),
    ('(() => {\n  const only = 1;\n  tell("only");\n})();', ["only"])])
def test_a_name_that_nothing_uses_is_seen(text: str, names: list[str]) -> None:
    assert unused(text) == names


@pytest.mark.parametrize("line, seen", [("a(); b();", True), ("for (let i = 0; i < 3; i++) a(i);", False),
                                        ('a("x; y");', False), ("const f = () => { a(); };", False)])
def test_a_second_statement_on_a_line_is_seen(line: str, seen: bool) -> None:
    assert bool(list(crowded(line))) == seen
