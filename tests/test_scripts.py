"""Scripts and styles: a linter that needs no network and no Node.js, only the browser of other tests."""
from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from book.widgets.registry import EXPORT, IMPORT, plain
from tests.website import ROOT

PATTERNS = ["book/twin/*.js", "book/widgets/*.js", "book/widgets/*.css", "book/authoring/*.css"]
FILES = sorted(path for pattern in PATTERNS for path in ROOT.glob(pattern))
SCRIPTS = [path for path in FILES if path.suffix == ".js"]
MAX_LINE = 120
ASKED_BY_TESTS = {"refusal", "timed", "scored", "fewest"}
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
    """Names that a script defines at its outermost level, or imports from another, and never uses."""
    own = code(text)
    names = re.findall(r"^(?:function|class) (\w+)", own, re.M) + re.findall(r"^(?:const|let) (\w+) =", own, re.M)
    for group in re.findall(r"^(?:const|let) [\[{] ([^\]}=]*) [\]}] =", own, re.M) + re.findall(
            r"^const \[([^\]=]*)\] =", own, re.M) + [names for names, _ in IMPORT.findall(text)]:
        names += re.findall(r"(\w+)(?=\s*(?:,|\}|$))", group)
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


def test_imports_and_exports_have_the_one_form_that_is_read() -> None:
    for script in SCRIPTS:
        lines = re.findall(r"^(?:import|export)\b", code(script.read_text("utf-8")), re.M)
        read = len(IMPORT.findall(script.read_text("utf-8"))) + len(EXPORT.findall(script.read_text("utf-8")))
        assert len(lines) == read, script.name


def test_what_a_script_exports_another_imports() -> None:
    """So the twin has what pages use, and no more."""
    taken = {name for script in SCRIPTS for names, _ in IMPORT.findall(script.read_text("utf-8"))
             for name in re.findall(r"\w+", names)}
    for script in SCRIPTS:
        given = {name for names in EXPORT.findall(script.read_text("utf-8")) for name in re.findall(r"\w+", names)}
        everything = "".join(other.read_text("utf-8") for other in SCRIPTS if other != script)
        through = set(re.findall(rf"\b{script.stem}\.(\w+)", everything))  # import * as links
        if f"{script.stem}[" in everything:  # by a name from the data
            through = given
        assert given - taken - through - ASKED_BY_TESTS == set(), script.name


def test_scripts_parse(browser: Any) -> None:
    page, log = browser.open("about:blank")
    found = {script.name: page.evaluate(PARSED, plain(script.stem)) for script in SCRIPTS}
    assert found and not any(found.values()), found
    assert page.evaluate(PARSED, "const = 1"), "a fault is seen"
    log.assert_clean()


@pytest.mark.parametrize("text, names", [
    ("function used() {}\nconst lost = used();\n", ["lost"]),
    ("const { make, sum } = other;\nsum();\nlet x = 1;\nx++;\n", ["make"]),
    ('import { make, sum } from "./other.js";\nsum();\n', ["make"]),
    ('const only = 1;\ntell("only");\n', ["only"])])
def test_a_name_that_nothing_uses_is_seen(text: str, names: list[str]) -> None:
    assert unused(text) == names


@pytest.mark.parametrize("line, seen", [("a(); b();", True), ("for (let i = 0; i < 3; i++) a(i);", False),
                                        ('a("x; y");', False), ("const f = () => { a(); };", False)])
def test_a_second_statement_on_a_line_is_seen(line: str, seen: bool) -> None:
    assert bool(list(crowded(line))) == seen
