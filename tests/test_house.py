"""The rules of the house that a machine can see: layers, torch's place, sizes, the README's commands."""
from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import yaml

import book
from tests.website import ROOT

PACKAGE = ROOT / "book"
SOURCES = sorted(path for path in PACKAGE.rglob("*.py") if "__pycache__" not in path.parts)
MAX_FUNCTION_LINES, MAX_MODULE_LINES, MAX_LINE, MAX_README_LINES = 45, 400, 120, 90
RUNNERS = {"device", "tap", "audit", "launch", "job", "doctor", "record", "execute", "shards", "wire", "parallel"}


def layers() -> dict[str, int]:
    """Read the layer of each part of the package from its docstring: lines like `    L1  cost   what it is`."""
    found, level = {}, -1
    for line in (book.__doc__ or "").splitlines():
        match = re.match(r" {4}(?:L(\d)| {2})  (\w+) {2,}\S", line)
        if match:
            level = int(match[1]) if match[1] else level
            found[match[2]] = level
    return found


def part(path: Path) -> str:
    """The part of the package that a file belongs to: a module's name, or that of the folder it is in."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def name_of(path: Path) -> str:
    """A file's path below the repository."""
    return str(path.relative_to(ROOT))


@cache
def tree(path: Path) -> ast.Module:
    """A file as Python reads it."""
    return ast.parse(path.read_text("utf-8"))


def walk_what_runs(node: ast.AST) -> Iterator[ast.AST]:
    """Walk a tree without the blocks that only a type checker reads."""
    yield node
    if not (isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")):
        for child in ast.iter_child_nodes(node):
            yield from walk_what_runs(child)


@cache
def imports(path: Path) -> set[str]:
    """Every module that a file imports, anywhere in it, by its full name."""
    found: set[str] = set()
    package = ".".join(path.relative_to(ROOT).parts[:-1])
    for node in walk_what_runs(tree(path)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                base = ".".join([*package.split(".")[:len(package.split(".")) - node.level + 1], *filter(None, [base])])
            found |= {f"{base}.{alias.name}" for alias in node.names}
    return found


def used_parts(path: Path) -> set[str]:
    """The other parts of the package that a file imports from."""
    known = {part(other) for other in SOURCES} - {"__init__"}
    used = {name.split(".")[1] for name in imports(path) if name.startswith("book.") and name.count(".") >= 1}
    return used & known - {part(path)}


def test_the_map_lists_the_layers() -> None:
    assert layers()["schedule"] == 0 and layers()["collectives"] == 1 and layers()["authoring"] == 4


def test_imports_run_downward() -> None:
    level, offences = layers(), []
    for path in SOURCES:
        own = level.get(part(path), max(level.values()))
        offences += [f"{name_of(path)} is in layer {own} and imports {name} from layer {level[name]}"
                     for name in sorted(used_parts(path)) if level[name] > own]
    assert not offences, "\n".join(offences)


def test_no_part_imports_itself_in_a_circle() -> None:
    graph = {name: set() for name in map(part, SOURCES)}
    for path in SOURCES:
        graph[part(path)] |= used_parts(path)
    while free := {name for name, needs in graph.items() if not needs & graph.keys()}:
        graph = {name: needs for name, needs in graph.items() if name not in free}
    assert not graph, f"these import each other: {graph}"


def test_the_map_names_every_part_and_no_other() -> None:
    assert {part(path) for path in SOURCES} - {"__init__"} == layers().keys()


def test_only_the_runners_import_torch() -> None:
    offences = [f"{name_of(path)} imports {name}" for path in SOURCES if part(path) not in RUNNERS
                for name in sorted(imports(path)) if name.split(".")[0] == "torch"]
    assert not offences, "\n".join(offences)


@pytest.mark.slow
def test_everything_else_works_without_torch() -> None:
    """Import all of it in a Python that refuses torch."""
    modules = [".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__") for path in SOURCES
               if part(path) not in RUNNERS and path.name != "__main__.py"]
    code = f"import sys, importlib; sys.modules['torch'] = None\nfor name in {modules}: importlib.import_module(name)"
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, text=True, capture_output=True, timeout=180)
    assert len(modules) > 10 and run.returncode == 0, run.stderr


# What an import may change in a process, apart from the modules that it loads: it should change nothing.
EFFECTS = """
import importlib, multiprocessing, os, signal, sys, threading, warnings
import torch, torch.distributed.fsdp, torch.distributed.tensor, torch.distributed.pipelining
def state():
    handlers = {one: signal.getsignal(one) for one in signal.valid_signals() if one not in (9, 19)}
    none = {name for name, module in sys.modules.items() if module is None}
    return (dict(os.environ), handlers, none, threading.active_count(), os.getcwd(), sys.excepthook,
            len(multiprocessing.active_children()), torch.distributed.all_reduce, torch.get_num_threads())
before = state()
for name in reversed(MODULES): importlib.import_module(name)  # grading before authoring, which loads nbformat as it is
assert state() == before, [pair for pair in zip(before, state()) if pair[0] != pair[1]]
"""


@pytest.mark.slow
def test_imports_have_no_side_effects() -> None:
    programs = {"book.launch.preload", "book.launch.forked"}  # run as programs, or by the server of the ranks
    modules = [".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__") for path in SOURCES
               if path.name != "__main__.py"]
    code = EFFECTS.replace("MODULES", repr([name for name in modules if name not in programs]))
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, text=True, capture_output=True, timeout=180)
    assert run.returncode == 0, run.stderr


def test_the_website_needs_nothing_from_the_package() -> None:
    """It is built in an environment without torch, ipywidgets or the package's own requirements."""
    assert not used_parts(PACKAGE / "authoring" / "sphinx_ext.py")


def test_there_is_no_module_named_utils() -> None:
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, text=True, capture_output=True, check=True).stdout.split()
    assert not [name for name in tracked if Path(name).stem in {"utils", "util", "helpers", "common", "misc"}]


def unkempt(path: Path) -> Iterator[str]:
    """What is too long in a file, and what lacks a docstring, a sentence at a time."""
    lines = path.read_text("utf-8").splitlines()
    if len(lines) > MAX_MODULE_LINES:
        yield f"{len(lines)} lines, over {MAX_MODULE_LINES}"
    yield from (f"line {number} has over {MAX_LINE} characters" for number, line in enumerate(lines, 1)
                if len(line) > MAX_LINE)
    if not ast.get_docstring(tree(path)):
        yield "no docstring that says what the module is for"
    for node in ast.walk(tree(path)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            if node.end_lineno - node.lineno >= MAX_FUNCTION_LINES:
                yield f"{node.name} has {node.end_lineno - node.lineno + 1} lines, over {MAX_FUNCTION_LINES}"
    for node in tree(path).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and not node.name.startswith("_"):
            if not ast.get_docstring(node):
                yield f"{node.name} has no docstring"


def test_modules_and_functions_are_small_and_documented() -> None:
    offences = [f"{name_of(path)}: {offence}" for path in SOURCES for offence in unkempt(path)]
    assert not offences, "\n".join(offences)


def test_a_public_class_name_has_one_meaning() -> None:
    where: dict[str, list[str]] = {}
    for path in SOURCES:
        for node in tree(path).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                where.setdefault(node.name, []).append(name_of(path))
    assert not {name: modules for name, modules in where.items() if len(modules) > 1}


# They read messages that have come as text, in a notebook's outputs.
READ_TEXTS = {"authoring", "grading"}
READING = {"startswith", "endswith", "partition", "rpartition", "removeprefix", "removesuffix", "split", "find",
           "match", "search", "fullmatch", "findall", "finditer", "compile", "sub"}
WORDS = re.compile(r"\b(waits|sleeps|computes|finished|has returned|cause|disagree|does not|a lock|wait for)\b"
                   r"|of the store|\branks? ")


def read_back(node: ast.AST) -> Iterator[str]:
    """The texts that an expression compares with, searches for, or matches as a pattern."""
    inside: list[ast.expr] = []
    if isinstance(node, ast.Compare):
        inside = [node.left, *node.comparators]
    elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") in READING:
        inside = node.args
    for part_of in (inner for expression in inside for inner in ast.walk(expression)):
        if isinstance(part_of, ast.Constant) and isinstance(part_of.value, str):
            yield part_of.value


def test_no_module_reads_back_the_words_that_another_has_written() -> None:
    """What ranks do is matched by `book.waiting.doing.Kind` and fields: a sentence can be reworded freely."""
    offences = [f"{name_of(path)} line {node.lineno} reads {text!r}" for path in SOURCES if part(path) not in READ_TEXTS
                for node in ast.walk(tree(path)) for text in read_back(node) if WORDS.search(text)]
    assert not offences, "\n".join(offences)


@pytest.mark.parametrize("document", ["README.md", "CONTRIBUTING.md", "index.md"])
def test_commands_in_the_documents_exist(document: str) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text("utf-8"), re.M))
    text = (ROOT / document).read_text("utf-8")
    named = set(re.findall(r"(?:^|`|\s)make ([a-z-]+)(?=`|\s+#|$)", text, re.M))
    assert named and named <= targets, named - targets
    for module in set(re.findall(r"python -m (book\.\w+|benchmarks)", text)):
        assert (ROOT / module.replace(".", "/") / "__main__.py").is_file(), f"{document} names {module}"


def test_help_lists_every_target() -> None:
    text = (ROOT / "Makefile").read_text("utf-8")
    targets = set(re.search(r"^\.PHONY: (.*)$", text, re.M)[1].split()) - {"help"}
    said = subprocess.run(["make", "help"], cwd=ROOT, text=True, capture_output=True, check=True).stdout
    assert {line.split()[1] for line in said.splitlines() if line.startswith("make ")} == targets


def test_links_between_documents_lead_somewhere() -> None:
    for document in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "CODE_OF_CONDUCT.md"):
        for target in re.findall(r"\]\(([^)#:]+)\)", (ROOT / document).read_text("utf-8")):
            assert (ROOT / target).exists(), f"{document} links to {target}"


def test_the_citation_is_of_this_version() -> None:
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text("utf-8"))
    assert f'\nversion = "{cited["version"]}"\n' in (ROOT / "pyproject.toml").read_text("utf-8")
    assert cited["license"] == ["MIT", "CC-BY-4.0"] and {"cff-version", "message", "title", "authors"} <= cited.keys()


def test_the_readme_is_two_screens_with_one_picture() -> None:
    text = (ROOT / "README.md").read_text("utf-8")
    assert len(text.splitlines()) <= MAX_README_LINES and len(re.findall(r"!\[[^\]]+\]\(", text)) == 1


def test_mypy_reports_the_same_with_only_the_check_extra_installed() -> None:
    tomllib = pytest.importorskip("tomllib")  # from Python 3.11
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["mypy"]["overrides"]
    passed_over = {name.removesuffix(".*") for each in settings if each.get("ignore_missing_imports")
                   for name in each["module"]}
    installed = set(re.findall(r"^(\w+)==", (ROOT / "requirements-check.txt").read_text("utf-8"), re.M))
    imported = {module.split(".")[0] for path in SOURCES for node in ast.walk(tree(path))
                for module in ([alias.name for alias in node.names] if isinstance(node, ast.Import)
                               else [node.module] if isinstance(node, ast.ImportFrom) and node.module else [])}
    assert imported - passed_over - installed - {"book"} <= sys.stdlib_module_names


def test_all_documents_state_the_same_duration_of_make_test() -> None:
    told = re.compile(r"make test\b(?!-).*?(an? (?:\w+ )*hour|\d+ minutes)")
    said = {name: told.findall((ROOT / name).read_text("utf-8"))
            for name in ("README.md", "CONTRIBUTING.md", "Makefile")}
    assert all(said.values()) and len({time for times in said.values() for time in times}) == 1, said


def test_every_requirement_is_pinned() -> None:
    """Each name with one exact version, which the list of limits repeats."""
    limits = set(re.findall(r"^([\w.-]+==[\w.]+)", (ROOT / "constraints.txt").read_text("utf-8"), re.M))
    for document in ROOT.glob("requirements*.txt"):
        for line in document.read_text("utf-8").splitlines():
            wanted = line.split("#")[0].split(";")[0].strip()
            if wanted and not wanted.startswith("-"):
                assert wanted in limits, f"{document.name}: {wanted} is not in constraints.txt"
        assert "://" not in re.sub(r"^#.*$", "", document.read_text("utf-8"), flags=re.M), "no package index is named"
