"""L2: a notebook's cells, run as IPython runs them: magics, shell commands, `display`, top-level `await`."""
from __future__ import annotations

import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from IPython.core.interactiveshell import InteractiveShell
from traitlets.config import Config

_OWN_CODE = ("<head ", "<call ", "<ipython-input-")  # the file names of what is run here
_NO_HISTORY = Config({"HistoryManager": {"enabled": False}})  # no database, and no thread that writes one


class _Shell(InteractiveShell):
    """IPython without a terminal or a kernel around it."""

    def enable_gui(self, gui: str | None = None) -> None:
        """Does nothing, so that `%matplotlib` works: nothing is shown here."""


class Cells:
    """Runs cells in one namespace, which becomes `__main__`; a cell that raises does not stop those below it."""

    def __init__(self, namespace: dict[str, Any]) -> None:
        self.shell = _Shell(config=_NO_HISTORY, user_ns=namespace)
        self.errors: list[BaseException] = []

    def run(self, sources: Sequence[str]) -> None:
        """Runs cells one after the other, and keeps the errors of those that fail."""
        for source in sources:
            # With history, so that `In` and `Out` have the cell.
            result = self.shell.run_cell(source, store_history=True)
            error = result.error_before_exec or result.error_in_exec
            if error is not None:
                self.errors.append(error)

    @contextmanager
    def names(self) -> Iterator[None]:
        """In this context code that is not in a cell has the builtins that cells have, such as `display`."""
        with self.shell.builtin_trap:
            yield


def told(error: BaseException) -> str:
    """An error in a line, with the last line of a cell that led to it."""
    text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    if isinstance(error, SyntaxError) and error.text:
        return f"{type(error).__name__}: {error.msg} (line {error.lineno}: {error.text.strip()})"
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if frame.filename.startswith(_OWN_CODE)]
    at = (own or frames)[-1:]
    return text + "".join(f" (line {frame.lineno}: {frame.line})" for frame in at)
