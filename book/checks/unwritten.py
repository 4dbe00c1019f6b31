"""L3: answers that are not written yet: a cell that needs one says so in one line, and "Run All" goes on after it.

A student copy's stub raises NotImplementedError with the number of its exercise. In a notebook the cells that fail for
that reason, or because they lack a name that such a cell would have made, show one line instead of a traceback, and
tell the frontend that it may go on. The cell still shows an error, so that nbval and grading see a check that failed.

A check that is run before the cells above it says that. In a new kernel its first line does (FIRST); once the first
cell of the lab has been run, `Unwritten` names what no cell has made yet.
"""
from __future__ import annotations

import ast
import re
import sys
import traceback
from collections.abc import Iterable, Iterator
from types import ModuleType
from typing import Any

from book.waiting.hang import GIVEN

ABOVE = "run the cells above first (menu Run, Run All Above Selected Cell)"
INSTALLED = "unwritten.install()"  # in a lab that has it a student copy has these first lines, in setup and in checks
FIRST = {"setup": f"{GIVEN}\n", "check": f'assert "unwritten" in globals(), "{ABOVE}"  {GIVEN}\n'}
STUB = re.compile(r"NotImplementedError: exercise (\d+): write this function")  # as book.grading.release writes it
LACKED = re.compile(r"\bNameError: name '(\w+)' is not defined")  # here, or in a rank, where launch tells of it
_INSTALLED = "_lockstep_unwritten"  # the mark of a shell that already reports such answers


def install() -> None:
    """Report answers that are not written yet in this notebook's kernel; elsewhere, and a second time, do nothing.

    The first cell of a student copy calls it.
    """
    shell: Any = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    if shell is not None and hasattr(shell, "kernel") and not hasattr(shell, _INSTALLED):
        setattr(shell, _INSTALLED, Unwritten(shell))


class Unwritten:
    """What a kernel knows of answers that are not written: which cells stopped for them, and what those lack."""

    def __init__(self, shell: Any):
        self.shell, self._show = shell, shell.showtraceback
        self._missing: dict[str, str] = {}  # name -> the exercise without which it was never made
        self._told: BaseException | None = None  # the error of the running cell that was reported in a line
        self._cell = ""
        shell.showtraceback = self.show
        shell.events.register("pre_run_cell", self._begin)
        shell.events.register("post_run_cell", self._end)

    def show(self, exc_tuple: Any = None, *arguments: Any, **options: Any) -> None:
        """Replaces the shell's `showtraceback`: one line for an answer that is not written, otherwise what the shell
        shows."""
        error = (exc_tuple or sys.exc_info())[1]
        exercise = self.exercise_of(error)
        if exercise is None or error is None:
            lacks = self._lacks(error)
            if lacks and error:
                self.shell._showtraceback(type(error), error, [
                    f"No cell has made `{lacks}` yet, which this check needs: {ABOVE}."])
            else:
                self._show(exc_tuple, *arguments, **options)
            return
        self._told = error
        made = names_made(self._cell, self._line_of(error))
        modules = {name for name in made if isinstance(self.shell.user_ns.get(name), ModuleType)}  # no call changes one
        self._missing |= dict.fromkeys(made - modules, exercise)
        self.shell._showtraceback(type(error), error, [
            f"Not written yet. This cell needs exercise {exercise}: write its function, then run this cell again."])

    def exercise_of(self, error: BaseException | None) -> str | None:
        """The number of the exercise whose stub led to an error; None if none did.

        A cell that takes what a stopped cell would have made fails for the same reason, whatever its own error is. One
        that makes the same names itself fails for its own.
        """
        stubs = (STUB.search(f"{type(one).__name__}: {one}") for one in causes(error))
        read = (self._missing.get(name) for name in names_read(self._cell))
        return next((found[1] for found in stubs if found), None) or next(filter(None, read), None)

    def _lacks(self, error: BaseException | None) -> str:
        """The name that a check takes from a cell above and that none has made; "" if that is not what is wrong."""
        found = LACKED.search(f"{type(error).__name__}: {error}") if self._cell.startswith(FIRST["check"]) else None
        return found[1] if found and found[1] in {*names_read(self._cell)} - self.shell.user_ns.keys() else ""

    def _line_of(self, error: BaseException) -> int:
        """The line of the cell that raised an error."""
        lines = [line for frame, line in traceback.walk_tb(error.__traceback__)
                 if frame.f_globals is self.shell.user_ns and frame.f_code.co_name == "<module>"]
        return lines[-1] if lines else 1

    def _begin(self, info: Any) -> None:
        self._cell, self._told = info.raw_cell or "", None

    def _end(self, result: Any) -> None:
        """A cell whose error was reported counts as run; names that a successful cell made are no longer missing."""
        if self._told is not None and result.error_in_exec is self._told:
            result.error_in_exec = None
        elif result.success:
            for name in names_made(self._cell):
                self._missing.pop(name, None)


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """An error, and those that it was raised from or during."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def names_made(cell: str, line: int = 1) -> set[str]:
    """The global names that the statements of a cell make or fill, from the one that holds this line on."""
    made: set[str] = set()
    for node in _body(cell):
        if (node.end_lineno or 0) < line:
            continue
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            made.add(node.name)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            made |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
        else:
            made |= {name for inner in _without_targets(node) for name in _filled(inner)}
    return made


def names_read(cell: str) -> list[str]:
    """The names that a cell takes from cells before it, in the order of its text: it reads what it has not made."""
    return list(_taken(_body(cell), set()))


def _taken(statements: Iterable[ast.AST], made: set[str]) -> Iterator[str]:
    """The names that statements read and that are not `made` by then; adds what they make."""
    for node in statements:
        inner = [child for child in ast.iter_child_nodes(node) if isinstance(child, (ast.stmt, ast.excepthandler))]
        outer = [part for child in ast.iter_child_nodes(node) if child not in inner for part in ast.walk(child)]
        names = [name for name in outer if isinstance(name, ast.Name)]
        there = {name.id for part in outer if isinstance(part, ast.comprehension) for name in ast.walk(part.target)
                 if isinstance(name, ast.Name)}  # they live in their comprehension alone
        yield from (name.id for name in names if isinstance(name.ctx, ast.Load) and name.id not in made | there)
        made |= {name.id for name in names if isinstance(name.ctx, ast.Store)}
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            made.add(node.name)
            yield from _taken(inner, made | _parameters(node))
        else:
            yield from _taken(inner, made)


def _without_targets(node: ast.AST) -> Iterator[ast.AST]:
    """All parts of a statement but what its comprehensions assign to, which lives there alone."""
    yield node
    for child in ast.iter_child_nodes(node):
        if not (isinstance(node, ast.comprehension) and child is node.target):
            yield from _without_targets(child)


def _parameters(node: ast.AST) -> set[str]:
    return {each.arg for each in ast.walk(getattr(node, "args", node)) if isinstance(each, ast.arg)}


def _filled(node: ast.AST) -> Iterator[str]:
    """What is assigned to, what gets an item, as in `runs[2] = run`, and what a method changes, as append does."""
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        yield node.id
    if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store) and isinstance(node.value, ast.Name):
        yield node.value.id
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        called = node.value.func
        if isinstance(called, ast.Attribute) and isinstance(called.value, ast.Name):
            yield called.value.id


def _body(cell: str) -> list[ast.stmt]:
    try:
        return ast.parse(cell).body
    except SyntaxError:  # it has magics
        return []
