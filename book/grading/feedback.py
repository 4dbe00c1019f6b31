"""L4: what a student is told beside the verdict: what the public checks say, and the pictures of their own run.

For that the answers run once more, in the sandbox, in a notebook that holds nothing but what the student's copy has: no
hidden check, and the copy's own seed. So nothing that comes out of it can hold a secret, whatever the answers do.
"""
from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterable, Mapping
from html.parser import HTMLParser
from typing import Any

import nbformat
from nbformat import NotebookNode
from nbformat.v4 import new_output

from book.grading import lab as labs
from book.grading.lab import code_cells, marks, simulated
from book.grading.nbval_plugin import PICTURES
from book.grading.release import released
from book.grading.run import Result
from book.grading.submission import Submission
from book.widgets.registry import WIDGETS, standalone

MAX_BYTES = 1 << 20  # of one picture
MAX_PICTURES = 6  # of an exercise
PNG = b"\x89PNG\r\n\x1a\n"
WITH_NOTHING_ELSE = ("<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; "
                     "script-src 'unsafe-inline'; style-src 'unsafe-inline'\">")
SAYS_ITS_HEIGHT = """<script>
new ResizeObserver(() => parent.postMessage(document.documentElement.offsetHeight + 20, "*")).observe(document.body);
</script>"""

Picture = dict[str, str]  # {"widget": …, "data": JSON, "text": …}, {"png": base64} or {"text": what was printed}


def job(lab: NotebookNode, exercise: int, answers: labs.Answers, own: Mapping[str, int] | None = None) -> NotebookNode:
    """The notebook that explains: what the student's copy runs, with its seed and numbers, its checks, its pictures."""
    public = nbformat.from_dict({**lab, "cells": [cell for cell in lab.cells if not marks(cell).get("hidden")]})
    found = labs.job(public, exercise, None, answers, own)
    labs.expect(found, {marks(cell)["id"]: cell.outputs for cell in labs.checks(public, exercise)})
    found.cells += [labs.cell_of(cell.source, {**marks(cell), "kind": "setup"}) for cell in code_cells(public)
                    if marks(cell).get("exercise") == exercise and marks(cell).get("kind") == "setup"
                    and marks(cell)["id"].startswith(PICTURES) and not simulated(cell)]
    return found


def told(result: Result) -> dict[str, Any]:
    """What a run of `job` tells: the message of the first check that failed, or None, and the pictures that it drew."""
    shown = [cell for cell in result.cells if cell["kind"] == "setup" and cell["id"].startswith(PICTURES)]
    drawn = [picture for cell in shown for output in cell["outputs"] for picture in pictures(output)]
    return {"message": result.first_failure(), "pictures": drawn[:MAX_PICTURES]}


def pictures(output: dict[str, Any]) -> Iterable[Picture]:
    """What an output of untrusted code shows, as plain data: a widget of ours, a PNG, or text."""
    data = output.get("data", {})
    html, png = (data.get(kind) for kind in ("text/html", "image/png"))
    if isinstance(html, str) and len(html) <= MAX_BYTES:
        found = _Widget()
        found.feed(html)
        text = data.get("text/plain")
        return [{"widget": widget, "data": json.dumps(read), "text": text if isinstance(text, str) else ""}
                for widget, read in found.widgets]
    if isinstance(png, str) and len(png) <= MAX_BYTES and _is_png(png):
        return [{"png": "".join(png.split())}]
    text = output.get("text")
    printed = re.sub(r"(?m)^\d+ ranks? on .*\n?", "", text) if isinstance(text, str) else ""
    return [{"text": printed[:4000]}] if printed.strip() else []


def _is_png(encoded: str) -> bool:
    try:
        return base64.b64decode(encoded).startswith(PNG)
    except ValueError:
        return False


class _Widget(HTMLParser):
    """Finds a widget's div, and reads the data in its attribute; nothing else of the HTML is kept."""

    def __init__(self) -> None:
        super().__init__()
        self.widgets: list[tuple[str, Any]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            widget = name.removeprefix("data-lockstep-")
            if tag == "div" and widget != name and widget in WIDGETS and value and not self.widgets:
                try:
                    self.widgets.append((widget, json.loads(value)))
                except (ValueError, RecursionError):
                    continue


def page_of(picture: Picture) -> str:
    """A whole page of a widget, which runs the widget's own scripts and loads nothing."""
    data = picture["data"].replace("&", "&amp;").replace("'", "&#39;").replace("<", "&lt;")
    page = standalone(picture["widget"], "", f"<div data-lockstep-{picture['widget']}='{data}'></div>")
    return page.replace("<head>", f"<head>{WITH_NOTHING_ELSE}", 1).replace("</body>", f"{SAYS_ITS_HEIGHT}</body>", 1)


def notebook(lab: NotebookNode, submission: Submission, exercises: dict[str, Any]) -> NotebookNode:
    """The student's copy with their answers, and below each check what it said when they were graded."""
    copy = released(lab)
    for cell in code_cells(copy):
        mark = marks(cell)
        cell.outputs, cell.execution_count = [], None
        if mark.get("kind") == "answer":
            cell.source = "\n\n".join(submission.answers.get(mark["id"], [])) or cell.source
        elif mark.get("kind") == "check":
            said = exercises[str(mark["exercise"])]
            text = (said.get("feedback") or {}).get("message") or said["status"]
            cell.outputs = [new_output("stream", name="stdout", text=f"When this was graded: {text}\n")]
    return copy
