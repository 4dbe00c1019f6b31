"""The rules for notebooks that can be checked automatically, each with its reason in the message."""
from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Callable, Iterator
from typing import NamedTuple

from nbformat import NotebookNode

from book.authoring.notebooks import code_cells, label, output_text, tags
from book.grading.lab import simulated

IGNORE_TAGS = {"nbval-ignore-output", "nbval-skip"}
IGNORE_COMMENT = re.compile(r"^\s*#+\s*(NBVAL_IGNORE_OUTPUT|NBVAL_SKIP|PYTEST_VALIDATE_IGNORE_OUTPUT)\s*$", re.M)
HIDING_TAGS = {"hide-cell", "hide-input", "remove-cell", "remove-input"}
FIGURE_TYPES = {"text/html", "image/svg+xml", "image/png"}
BANNED_NAMES = {
    "interact": "it can stall a run until its timeout; use a live panel",
    "interactive": "it can stall a run until its timeout; use a live panel",
    "interact_manual": "it can stall a run until its timeout; use a live panel",
    "Output": "an Output widget can stall a run until its timeout; print or return instead",
    "clear_output": "what was cleared is still compared; print once, at the end",
    "update_display": "updates of a display fail a strict comparison; show the final state once",
}
FILE_READERS = {"open", "read_text", "read_bytes", "from_json"}
ADDRESS = re.compile(r"\b0x[0-9a-fA-F]{4,}\b")
MACHINE_PATH = re.compile(r"(?<![\w.])/(?:tmp|home|root|Users|var/folders)/\S+")


class Problem(NamedTuple):
    """One finding: the cell it is about, as `label` names it, and what to do."""

    cell: str
    message: str


def lint(notebook: NotebookNode) -> list[Problem]:
    """Apply every rule to a notebook; the list is empty if it is clean."""
    cells = [at(notebook, cell, said) for rule in OF_CELLS for _, cell in code_cells(notebook) for said in rule(cell)]
    return cells + [problem for rule in RULES for problem in rule(notebook)]


def at(notebook: NotebookNode, cell: NotebookNode, message: str) -> Problem:
    """A finding about one cell."""
    return Problem(label(notebook, cell), message)


def tree(cell: NotebookNode) -> ast.AST | None:
    """Parse a code cell without its IPython lines (% and !); None if Python can't parse it."""
    lines = [re.sub(r"^(\s*)[%!].*", r"\1pass", line) for line in cell.source.splitlines()]
    try:
        return ast.parse("\n".join(lines))
    except SyntaxError:
        return None


def names(cell: NotebookNode) -> set[str]:
    """Every name, attribute, imported name and call keyword that a code cell mentions."""
    found: set[str] = set()
    for node in ast.walk(tree(cell) or ast.Module(body=[], type_ignores=[])):
        if isinstance(node, ast.Name):
            found.add(node.id)
        elif isinstance(node, ast.Attribute):
            found.add(node.attr)
        elif isinstance(node, ast.alias):
            found.add(node.name.split(".")[-1])
        elif isinstance(node, ast.keyword) and node.arg:
            found.add(node.arg)
    return found


def ignores_output(cell: NotebookNode) -> bool:
    """Whether a tag or comment tells nbval not to compare a cell."""
    return bool(IGNORE_TAGS & set(tags(cell)) or IGNORE_COMMENT.search(cell.source))


def banned_calls(cell: NotebookNode) -> Iterator[str]:
    """Widgets and displays that a strict run can't compare, and outputs that come from a file instead of the run."""
    mentioned = names(cell)
    for name in sorted(BANNED_NAMES.keys() & mentioned):
        yield f"{name} is banned: {BANNED_NAMES[name]}"
    if "display_id" in mentioned:
        yield "display_id is banned: updates of a display fail a strict comparison"
    for name in sorted(FILE_READERS & mentioned):
        yield f"{name} reads a file: outputs have to come from the run itself"


def trailing_semicolon(cell: NotebookNode) -> Iterator[str]:
    """A cell that ends in `;`, which hides its value from the reader and from nbval."""
    skip = {tokenize.COMMENT, tokenize.NEWLINE, tokenize.NL, tokenize.ENDMARKER, tokenize.DEDENT}
    try:
        found = [t for t in tokenize.generate_tokens(io.StringIO(cell.source).readline) if t.type not in skip]
    except (tokenize.TokenError, SyntaxError):
        return
    if found and found[-1].string == ";":
        yield "ends in ';', which hides its value from the reader and from nbval"


def never_ran(cell: NotebookNode) -> Iterator[str]:
    """A code cell without an execution count: nbval does not compare it."""
    if cell.source.strip() and cell.execution_count is None:
        yield "never ran, so nbval does not compare it: python -m book.authoring run"


def machine_in_outputs(cell: NotebookNode) -> Iterator[str]:
    """Object addresses and machine-specific paths in a cell's output."""
    shown = "\n".join(map(output_text, cell.outputs))
    for pattern, what in ((ADDRESS, "an address in memory"), (MACHINE_PATH, "a path of one machine")):
        match = pattern.search(shown)
        if match:
            yield f"shows {what} ({match[0][:60]}), which no other run repeats"


def unexpected_errors(cell: NotebookNode) -> Iterator[str]:
    """A stored error in a cell that is not meant to raise, and output on stderr."""
    for output in cell.outputs:
        if output.output_type == "error" and "raises-exception" not in tags(cell):
            yield f"stores a {output.ename}; if that is the point, tag it raises-exception"
        if output.output_type == "stream" and output.name == "stderr":
            yield "writes to stderr, which differs between machines"


def ignored_outputs(notebook: NotebookNode) -> Iterator[Problem]:
    """Cells that nbval does not compare: under a third, only for measured times, never a player."""
    codes = [cell for _, cell in code_cells(notebook) if cell.source.strip()]
    ignored = [cell for cell in codes if ignores_output(cell)]
    if codes and 3 * len(ignored) >= len(codes):
        yield Problem("notebook", f"{len(ignored)} of {len(codes)} code cells are not compared; keep it under a third")
    for cell in ignored:
        if "nbval-skip" in tags(cell) or "NBVAL_SKIP" in cell.source:
            yield at(notebook, cell, "is skipped by nbval; every cell must run")
        if "play" in names(cell):
            yield at(notebook, cell, "plays a trace and is not compared; every run gives a player the same HTML")
        if "measured on" not in surroundings(notebook, cell).lower():
            yield at(notebook, cell, "is not compared, so say in it or next to it what it was measured on")


def surroundings(notebook: NotebookNode, cell: NotebookNode) -> str:
    """A cell's output, and the markdown right before and after it."""
    place = next(i for i, candidate in enumerate(notebook.cells) if candidate is cell)
    beside = [c.source for c in notebook.cells[max(0, place - 1):place + 2] if c.cell_type == "markdown"]
    return "\n".join([*map(output_text, cell.outputs), *beside])


def opening(notebook: NotebookNode) -> NotebookNode | None:
    """The cell that makes a chapter's opening figure: the first code cell that shows one. A lab has none."""
    codes = [cell for _, cell in code_cells(notebook)]
    if any("lockstep" in cell.metadata for cell in codes):
        return None
    shows = (cell for cell in codes if any(FIGURE_TYPES & set(output.get("data", {})) for output in cell.outputs))
    return next(shows, None)


def hidden_code(notebook: NotebookNode) -> Iterator[Problem]:
    """Hidden cells: a lab's solutions and simulated players and a chapter's opening may be folded, a check removed."""
    first = opening(notebook)
    for _, cell in code_cells(notebook):
        hiding = HIDING_TAGS & set(tags(cell))
        kept_for_grading = cell.metadata.get("lockstep", {}).get("hidden")
        folded = (cell is first or simulated(cell)) and hiding == {"hide-input"}
        if hiding and "### BEGIN SOLUTION" not in cell.source and not kept_for_grading and not folded:
            yield at(notebook, cell, "is hidden; of the code that runs, only the cell that makes a chapter's opening "
                                     "figure, and a lab's solutions and simulated players, may be folded (hide-input)")


def imports_by_name(notebook: NotebookNode) -> Iterator[Problem]:
    """The first code cell must import by name what it uses from the package."""
    first = next((cell for _, cell in code_cells(notebook)), None)
    if first is None:
        yield Problem("notebook", "has no code cell")
        return
    found = [n for n in ast.walk(tree(first) or ast.Module(body=[], type_ignores=[])) if isinstance(n, ast.ImportFrom)]
    if not any((node.module or "").split(".")[0] == "book" for node in found):
        yield at(notebook, first, "is the first: import by name what is used (from book.x import y)")
    if any(alias.name == "*" for node in found for alias in node.names):
        yield at(notebook, first, "imports *; import by name, so that a reader sees where things come from")


def widget_without_html(cell: NotebookNode) -> Iterator[str]:
    """A widget that the website, which has no kernel, can't show."""
    for output in cell.outputs:
        if "application/vnd.jupyter.widget-view+json" in output.get("data", {}):
            yield "stores a widget view, which needs a kernel: normalise it"


OF_CELLS: tuple[Callable[[NotebookNode], Iterator[str]], ...] = (
    banned_calls, trailing_semicolon, never_ran, machine_in_outputs, unexpected_errors, widget_without_html)
RULES: tuple[Callable[[NotebookNode], Iterator[Problem]], ...] = (ignored_outputs, hidden_code, imports_by_name)
