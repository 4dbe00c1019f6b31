"""Stored notebooks: finding them, reading them, and naming a cell so that a person can find it."""
from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import nbformat
from nbformat import NotebookNode


class NotebookError(Exception):
    """A path or file that can't be worked on; the message says what to do."""


def find(paths: Iterable[str | Path]) -> list[Path]:
    """List the notebooks among `paths` and in its folders, in order."""
    found: list[Path] = []
    for path in map(Path, paths):
        if path.is_dir():
            found += sorted(p for p in path.rglob("*.ipynb") if ".ipynb_checkpoints" not in p.parts)
        elif path.suffix == ".ipynb" and path.is_file():
            found.append(path)
        else:
            raise NotebookError(f"{path} is neither a notebook nor a folder of notebooks.")
    return found


def parse(text: str, path: Path) -> NotebookNode:
    """Read a notebook of any minor version as nbformat 4.5, the first version whose cells have ids."""
    try:
        notebook = nbformat.reads(text, as_version=4)
    except Exception as error:  # nbformat passes on JSON, key and validation errors
        raise NotebookError(f"{path} can't be read as a notebook: {error}") from error
    notebook.nbformat, notebook.nbformat_minor = 4, 5
    return notebook


def code_cells(notebook: NotebookNode) -> Iterator[tuple[int, NotebookNode]]:
    """Number the code cells as nbval does: from 0, code cells only."""
    return enumerate(cell for cell in notebook.cells if cell.cell_type == "code")


def label(notebook: NotebookNode, cell: NotebookNode) -> str:
    """Name a cell: nbval's "Cell N" for a code cell, the place in the notebook for any other, and its id."""
    for number, candidate in code_cells(notebook):
        if candidate is cell:
            return f"Cell {number} ({cell.get('id', 'no id')})"
    place = next(i for i, candidate in enumerate(notebook.cells) if candidate is cell)
    return f"{cell.cell_type} at place {place + 1} ({cell.get('id', 'no id')})"


def tags(cell: NotebookNode) -> list[str]:
    """The tags of a cell; none if it has no list of tags."""
    found = cell.metadata.get("tags", [])
    return list(found) if isinstance(found, list) else []


def output_text(output: NotebookNode) -> str:
    """All text that one output shows: a stream, an error's name and value, or every text of a mime bundle."""
    if output.output_type == "stream":
        return str(output.text)
    if output.output_type == "error":
        return f"{output.ename}: {output.evalue}"
    return "\n".join(str(value) for mime, value in sorted(output.data.items()) if mime.startswith("text/"))
