"""The one stored form of a notebook: what two runs of the same notebook on two machines have in common."""
from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path

import nbformat
from nbformat import NotebookNode

from book.authoring.notebooks import label, parse, tags
from book.authoring.png import shrunk

KERNELSPEC = {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"}
LANGUAGE_INFO = {"file_extension": ".py", "mimetype": "text/x-python", "name": "python", "pygments_lexer": "ipython3"}
WIDGET_VIEW = "application/vnd.jupyter.widget-view+json"

# Left behind by editors and timing extensions; everything else was put there by an author and is kept.
CELL_NOISE = ("ExecuteTime", "collapsed", "colab", "execution", "jupyter", "pycharm", "scrolled", "trusted", "vscode")
NOTEBOOK_NOISE = ("colab", "orig_nbformat", "toc", "vscode", "widgets")

# Random ids from editors: new at each save of a new cell, so meaningless. Ids chosen by a person are kept.
RANDOM_ID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}|[0-9a-f]{8}")

KERNEL_FILE = re.compile(r"/\S*/ipykernel_\d+/\d+\.py")
SITE_PACKAGES = re.compile(r"(?<![\w.])[~/][^\s\"':]*/(?:site|dist)-packages/")
STANDARD_LIBRARY = re.compile(r"(?<![\w.])[~/][^\s\"':]*/lib/python3\.\d+/")


def normal_text(text: str, path: Path) -> str:
    """Bring the text of a notebook file into normal form; text already in normal form is returned unchanged."""
    return nbformat.writes(normalise(parse(text, path))).rstrip("\n") + "\n"


def normalise(notebook: NotebookNode) -> NotebookNode:
    """Return a copy of `notebook` in normal form.

    Sequential execution counts (a code cell that never ran has none), fixed cell ids, one kernel and language, no
    timing, no widget state, streams joined by name, and no machine-specific paths in tracebacks.
    """
    result = deepcopy(notebook)
    kept = {key: value for key, value in result.metadata.items() if key not in NOTEBOOK_NOISE}
    result.metadata = nbformat.from_dict({**kept, "kernelspec": KERNELSPEC, "language_info": LANGUAGE_INFO})
    set_ids(result.cells)
    for cell in result.cells:
        clean_metadata(cell)
    number_runs(result.cells)
    for cell in result.cells:
        if cell.cell_type == "code":
            cell.outputs = [clean_output(output, cell.execution_count) for output in join_streams(cell.outputs)]
    return result


def set_ids(cells: list[NotebookNode]) -> None:
    """Replace missing, repeated and random ids with one made from the cell's text, which the cell then keeps."""
    used: set[str] = set()
    for cell in cells:
        name = cell.get("id", "")
        if not name or name in used or RANDOM_ID.fullmatch(name):
            name = free_id(cell, used)
        cell["id"] = name
        used.add(name)


def free_id(cell: NotebookNode, used: set[str]) -> str:
    """Make an id that is not in `used` from the kind and text of a cell."""
    digest = hashlib.sha256(f"{cell.cell_type}\n{cell.source}".encode()).hexdigest()[:8]
    name, copies = f"cell-{digest}", 1
    while name in used:
        copies += 1
        name = f"cell-{digest}-{copies}"
    return name


def clean_metadata(cell: NotebookNode) -> None:
    """Drop what editors leave in a cell's metadata, including an empty list of tags."""
    for key in CELL_NOISE:
        cell.metadata.pop(key, None)
    if not tags(cell):
        cell.metadata.pop("tags", None)


def number_runs(cells: list[NotebookNode]) -> None:
    """Count the code cells that ran from 1; an empty one has neither count nor outputs."""
    count = 0
    for cell in cells:
        if cell.cell_type != "code":
            continue
        if not cell.source.strip():
            cell.execution_count, cell.outputs = None, []
        elif cell.execution_count is not None:
            count += 1
            cell.execution_count = count


def join_streams(outputs: list[NotebookNode]) -> list[NotebookNode]:
    """Join the pieces of each stream at the place of the first, as nbval does: where they were cut is random."""
    joined: list[NotebookNode] = []
    streams: dict[str, NotebookNode] = {}
    for output in outputs:
        if output.output_type != "stream":
            joined.append(output)
        elif output.name in streams:
            streams[output.name].text += output.text
        else:
            streams[output.name] = output
            joined.append(output)
    return joined


def clean_output(output: NotebookNode, execution_count: int | None) -> NotebookNode:
    """Drop what differs between runs: widget views (their model ids are random), counts, paths in tracebacks.

    Pictures are stored in as few bytes as they need: each is twice on the website, the second time in its notebook.
    """
    if output.output_type == "error":
        output.traceback = [portable(line) for line in output.traceback]
    if "data" in output:
        output.data.pop(WIDGET_VIEW, None)
        output.metadata = NotebookNode()
        if "image/png" in output.data:
            output.data["image/png"] = small_picture(output.data["image/png"])
    if output.output_type == "execute_result":
        output.execution_count = execution_count
    return output


def small_picture(encoded: str) -> str:
    """A PNG in base64, without filters."""
    picture = base64.b64decode(encoded)
    smaller = shrunk(picture)
    return encoded if smaller == picture else base64.b64encode(smaller).decode() + "\n" * encoded.endswith("\n")


def portable(line: str) -> str:
    """Replace machine-specific paths in a line of a traceback with portable names."""
    for pattern, replacement in ((KERNEL_FILE, "cell.py"), (SITE_PACKAGES, "site-packages/"),
                                 (STANDARD_LIBRARY, "python3/")):
        line = pattern.sub(replacement, line)
    return line


def differences(text: str, path: Path) -> Iterator[str]:
    """Say where a stored notebook is not in normal form, cell by cell; nothing if it is."""
    before, after = parse(text, path), parse(normal_text(text, path), path)
    if before.metadata != after.metadata:
        yield "the notebook's metadata"
    for old, new in zip(before.cells, after.cells):
        changed = [key for key in sorted({*old, *new}) if old.get(key) != new.get(key)]
        if changed:
            yield f"{label(before, old)}: {', '.join(changed)}"
    if before == after and text != normal_text(text, path):
        yield "the layout of the file (indentation, order of keys, newline at the end)"
