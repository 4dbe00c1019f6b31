"""L4: whether a lab's simulated players are just that: no ranks, nothing that a learner wrote, no names overwritten."""
from __future__ import annotations

import ast
import builtins
import symtable
from collections.abc import Iterator

from nbformat import NotebookNode

from book.grading.lab import SIMULATED, code_cells, marks, simulated
from book.grading.release import FOLDED

# What such a cell may import from: nothing here starts a process, or holds what a chapter trains with.
ROOMS = ("book.blocks", "book.collectives", "book.cost", "book.faults", "book.mesh", "book.pipelines", "book.plot",
         "book.schedule", "book.simulate", "book.widgets")


def faults(lab: NotebookNode) -> Iterator[str]:
    """What is wrong with the cells that show, above an answer, what its run should look like, one sentence each."""
    cells = list(code_cells(lab))
    for number, cell in enumerate(cells):
        mark, where = marks(cell), f"code cell {number} ({marks(cell)['id']})"
        if not mark["id"].startswith(SIMULATED):
            continue
        if not simulated(cell):
            yield f"{where} has an id that begins with {SIMULATED}, as only setup cells may"
        if mark.get("exercise") not in [marks(c)["exercise"] for c in cells[number:] if marks(c)["kind"] == "answer"]:
            yield f"{where} needs the number of an exercise whose answer comes after it"
        if cell.metadata.get("tags", []) != [FOLDED]:
            yield f"{where} needs the tag {FOLDED}, and no other: its code is not what is taught"
        for name in _foreign(cell.source):
            yield f"{where} uses {name}: it may use only what it imports itself, from {', '.join(ROOMS)}"
        for other in (other for other in cells if not simulated(other)):
            for name in _overwritten(cell.source, other.source):
                yield f"{where} binds {name}, which {marks(other)['id']} binds too: run again, it would overwrite that"


def _foreign(source: str) -> list[str]:
    """The names in a source that are neither its own, nor Python's, nor imported from `ROOMS`: a launch, an answer."""
    tree = list(ast.walk(ast.parse(source)))
    arguments = {node.arg for node in tree if isinstance(node, ast.arg)}
    stored = {node.id for node in tree if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    used = {node.id for node in tree if isinstance(node, ast.Name)}
    used -= arguments | stored | set(_bound(source)) | set(dir(builtins))
    origins = [origin for origin in _bound(source).values() if origin is not None]
    return sorted(used | {origin for origin in origins if not f"{origin}.".startswith(tuple(f"{r}." for r in ROOMS))})


def _overwritten(source: str, other: str) -> list[str]:
    """The names that both sources bind, unless both import the same by them."""
    ours, theirs = _bound(source), _bound(other)
    return sorted(name for name in ours.keys() & theirs.keys() if ours[name] is None or ours[name] != theirs[name])


def _bound(source: str) -> dict[str, str | None]:
    """The names that a cell leaves in the notebook, each with what it is imported from, in full, if it is imported."""
    try:
        table, tree = symtable.symtable(source, "cell", "exec"), ast.parse(source)
    except SyntaxError:
        return {}
    origins = {alias.asname or alias.name: f"{node.module}.{alias.name}" for node in ast.walk(tree)
               if isinstance(node, ast.ImportFrom) for alias in node.names}
    origins |= {alias.asname or alias.name.split(".")[0]: alias.name for node in ast.walk(tree)
                if isinstance(node, ast.Import) for alias in node.names}
    names = [symbol for symbol in table.get_symbols() if symbol.is_assigned() or symbol.is_imported()]
    return {symbol.get_name(): origins.get(symbol.get_name()) for symbol in names}
