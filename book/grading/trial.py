"""L4: put one answer in the place of the lab's own, and run the checks of its exercise on it, in this process."""
from __future__ import annotations

import contextlib
import io
import linecache
import re
from typing import Any

from nbformat import NotebookNode

from book.grading.lab import answer_cells, code_cells, marks, shown


def printed(lab: NotebookNode, exercise: int, answer: str, name: str,
            texts: dict[str, str] | None = None) -> dict[str, str]:
    """What each check of an exercise prints, by the check's id, with `answer` in the place of its answer cell.

    The other answers are the lab's own; players, panels and timings are not run. Raises what a check raises; `texts`
    then has the checks before it. Only for code that you would run by hand: there is no sandbox.
    """
    texts = {} if texts is None else texts
    namespace: dict[str, Any] = {"__name__": "__main__"}  # as in a kernel: RPC finds a class by that name
    for cell in code_cells(lab):
        mark = marks(cell)
        if shown(cell) or (mark["kind"] == "check" and mark["exercise"] != exercise):
            continue
        source = answer if (mark["kind"], mark.get("exercise")) == ("answer", exercise) else cell.source
        filename = f"<ipython-input-{name}-{mark['id']}>"  # launch shows the line of a cell where a rank fails
        linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
        with contextlib.redirect_stdout(io.StringIO()) as told:
            exec(compile(source, filename, "exec"), namespace)
        if mark["kind"] == "check":
            texts[mark["id"]] = without_device(told.getvalue())
    return texts


def stored(lab: NotebookNode, check: str) -> str:
    """What a check printed when the lab's outputs were stored."""
    cell = next(cell for cell in code_cells(lab) if marks(cell).get("id") == check)
    return without_device("".join(out["text"] for out in cell.outputs if out.get("name") == "stdout"))


def solution(lab: NotebookNode, exercise: int) -> str:
    """The lab's own answer to an exercise, without the solution markers."""
    (found,) = answer_cells(lab, exercise)
    return "\n".join(line for line in found.source.split("\n") if not line.strip().startswith("### "))


def without_device(text: str) -> str:
    """What a cell printed, without the line in which `launch` says what the ranks run on."""
    return re.sub(r"\d+ ranks? on \w+ \([^\n]*\n", "", text)
