"""L4: which modules of the book are withheld while an exercise is graded: the chapters' code, unless a lab uses it."""
from __future__ import annotations

import ast
from pathlib import Path

from nbformat import NotebookNode

from book.grading.lab import code_cells, marks
from book.grading.lab_schema import KEY
from book.grading.sandbox import BOOK

PACKAGE = "book.parallel"
MAX_CHARS = 200_000  # a syntax tree takes a thousand times its source's memory
ALWAYS_OPEN = {"__init__", "model", "text", "checked"}


def withheld_modules(lab: NotebookNode, exercise: int) -> list[Path]:
    """The files of `book.parallel` that are disabled when this exercise is graded.

    A module stays open if a setup or check cell says `from book.parallel.NAME import …`, or an open module imports it,
    or the notebook's metadata name it in `open`: {"book.parallel.NAME": [exercise, …]}.
    """
    modules: dict[str, list[Path]] = {}
    for path in sorted((BOOK / "parallel").rglob("*.py")):
        modules.setdefault(path.relative_to(BOOK / "parallel").parts[0].removesuffix(".py"), []).append(path)
    open_now = set(ALWAYS_OPEN)
    for name, exercises in lab.metadata.get(KEY, {}).get("open", {}).items():
        open_now |= {name.removeprefix(PACKAGE + ".")} if exercise in exercises else set()
    for cell in code_cells(lab):
        if marks(cell).get("kind") in ("setup", "check"):
            open_now |= _imported(cell.source)
    new = open_now & modules.keys()
    while new:
        paths = [path for name in new - {"__init__"} for path in modules[name]]
        new = set().union(*(_imported(path.read_text("utf-8")) for path in paths)) & modules.keys() - open_now
        open_now |= new
    return [path for name, paths in sorted(modules.items()) if name not in open_now for path in paths]


def exists(module: str) -> bool:
    """Whether `book.parallel` has the module of this full name."""
    place = BOOK.parent.joinpath(*module.split("."))
    return module.startswith(PACKAGE + ".") and (place.is_dir() or place.with_suffix(".py").is_file())


def imports(source: str) -> set[str]:
    """The modules that a source's import statements name, by their full names; none if it is no Python, or too long."""
    if len(source) > MAX_CHARS:
        return set()
    try:
        nodes = list(ast.walk(ast.parse(source)))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return set()
    named = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    named |= {node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module not in (None, "book")}
    return named | {f"book.{alias.name}" for node in nodes if isinstance(node, ast.ImportFrom) and node.module == "book"
                    for alias in node.names}


def imports_from_book(source: str) -> set[str]:
    """The modules of the book among them."""
    return {name for name in imports(source) if name.split(".")[0] == "book"}


def _imported(source: str) -> set[str]:
    """The modules of `book.parallel` that `from book.parallel.NAME import …` names."""
    return {name.split(".")[2] for name in imports_from_book(source) if name.startswith(PACKAGE + ".")}
