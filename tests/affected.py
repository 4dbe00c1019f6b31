"""Which files a test depends on, and how near a changed file is to it: from imports, never from a run.

A file depends on the files that its imports lead to; a name that a package's `__init__` takes from a module leads to
that module. A notebook depends on what its code cells import. What is not imported is named in a test module's READS,
a list of patterns of paths below the repository. A widget's script or style belongs to those test modules
about widgets, the browser or players on a page whose names have the first word of a widget that uses it, such as
test_memory_browser.
"""
from __future__ import annotations

import ast
import json
import subprocess
from collections import deque
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

from book.widgets.registry import ASSETS, WIDGETS, sources

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("book", "tests", "benchmarks")
# Every test depends on these, but distantly.
EVERYTHING = {"conftest.py", "pyproject.toml", "constraints.txt", "requirements.txt", "tests/conftest.py"}
FAR = 99


def changed_since(revision: str) -> set[str]:
    """The files that differ from a revision in this working tree, and untracked ones."""
    commands = (["git", "diff", "--name-only", revision, "--"], ["git", "ls-files", "--others", "--exclude-standard"])
    found = [subprocess.run(command, cwd=ROOT, text=True, capture_output=True, check=True).stdout
             for command in commands]
    return {line for said in found for line in said.splitlines()}


def distances(changed: Iterable[str]) -> dict[str, int]:
    """How many imports lie between each file and the nearest changed one; 0 for the changed ones themselves."""
    users = _users()
    found = dict.fromkeys(changed, 0)
    queue = deque(found)
    while queue:
        name = queue.popleft()
        for user in users.get(name, ()):
            if user not in found:
                found[user] = found[name] + 1
                queue.append(user)
    if found.keys() & EVERYTHING:
        found = {name: found.get(name, FAR) for name in {*found, *_sources()}}
    return found


@cache
def _sources() -> list[str]:
    """Every Python file and notebook whose imports are read."""
    paths = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")
             if "attacks" not in path.parts]
    paths += [path for folder in ("chapters", "labs") for path in (ROOT / folder).glob("*.ipynb")]
    return sorted(str(path.relative_to(ROOT)) for path in paths)


@cache
def _users() -> dict[str, set[str]]:
    """The files that depend directly on each file."""
    users: dict[str, set[str]] = {}
    for source in _sources():
        for used in {*_imported(source), *_read(source)} - {source}:
            users.setdefault(used, set()).add(source)
    return users


def _imported(source: str) -> Iterator[str]:
    """The files of the repository that a file's imports lead to."""
    for module, name in _imports(source):
        yield from _leads_to(module, name)


@cache
def _imports(source: str) -> list[tuple[str, str | None]]:
    """What a file imports: (module, name) of `from module import name`, (module, None) of `import module`."""
    found: list[tuple[str, str | None]] = []
    for text in _code(source):
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Import):
                found += [(alias.name, None) for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and not node.level:
                found += [(node.module or "", alias.name) for alias in node.names]
    return found


def _code(source: str) -> Iterator[str]:
    text = (ROOT / source).read_text("utf-8")
    if not source.endswith(".ipynb"):
        yield text
        return
    for cell in json.loads(text)["cells"]:
        if cell["cell_type"] == "code":
            yield "".join(cell["source"])


def _leads_to(module: str, name: str | None) -> set[str]:
    """The file that a name comes from: a module's own, or what its package's `__init__` has taken it from."""
    if module.split(".")[0] not in FOLDERS:
        return set()
    if name and _file(f"{module}.{name}"):
        return {_file(f"{module}.{name}")}
    file = _file(module)
    if not file:
        return set()
    taken = {taken: origin for origin, taken in _imports(file) if taken} if file.endswith("__init__.py") else {}
    return _leads_to(taken[name], name) if name in taken and taken[name] != module else {file}


def _file(module: str) -> str | None:
    path = ROOT.joinpath(*module.split("."))
    found = next((path for path in (path.with_suffix(".py"), path / "__init__.py") if path.is_file()), None)
    return str(found.relative_to(ROOT)) if found else None


def _read(source: str) -> Iterator[str]:
    """The files that a test module reads without importing them."""
    if not source.startswith("tests/"):
        return
    for node in ast.parse((ROOT / source).read_text("utf-8")).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "READS":
            for pattern in ast.literal_eval(node.value):
                yield from (str(path.relative_to(ROOT)) for path in ROOT.glob(pattern) if path.is_file())
    words = set(Path(source).stem.split("_"))
    if words & {"browser", "widget"} or "tests.players" in (module for module, _ in _imports(source)):
        about = [widget for widget in WIDGETS if widget.split("_")[0] in words]
        yield from (str((ASSETS / name).relative_to(ROOT)) for name in sources(about))
