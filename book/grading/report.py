"""L4: the reports of a grading run: CSV, JSON, Gradescope's results.json, and HTML pages."""
from __future__ import annotations

import csv
import html
import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from book.grading.handed_in import printable

Record = dict[str, Any]
STYLE = """
:root { color-scheme: light dark; font: 16px/1.5 system-ui, sans-serif; }
body { max-width: 50rem; margin: 2rem auto; padding: 0 1rem; }
div { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; }
th, td { text-align: left; padding: .4rem .8rem; border-bottom: 1px solid #8886; overflow-wrap: anywhere; }
td:not(.n), th:not(.n) { min-width: 8rem; }
td.n, th.n { text-align: right; white-space: nowrap; }
"""


def write_reports(records: Sequence[Record], lab: str, out: Path) -> None:
    """Writes grades.csv, grades.json, index.html, and for each student NAME.html and NAME.gradescope.json.

    Reports hold verdicts, and the error of a rank over the wire, which knows no secrets: no other message from a
    submission's code, no hidden source, no expected value. (The logs, which come from untrusted code, stay in
    students/NAME.json.)
    """
    (out / "grades.csv").write_text(grades_csv(records), encoding="utf-8")
    private = {"key", "complete", "slug", "fault"}
    shared = [{key: value for key, value in record.items() if key not in private} for record in records]
    for record in shared:
        record["exercises"] = {n: {k: v for k, v in e.items() if k != "log"} for n, e in record["exercises"].items()}
    (out / "grades.json").write_text(json.dumps({"lab": lab, "submissions": shared}, indent=1), encoding="utf-8")
    (out / "index.html").write_text(overview(records, lab), encoding="utf-8")
    for record in records:
        page, scope = (out / "students" / f"{record['slug']}.{kind}" for kind in ("html", "gradescope.json"))
        page.write_text(student_page(record, lab), encoding="utf-8")
        scope.write_text(json.dumps(gradescope(record), indent=1), encoding="utf-8")


def stale_pages(records: Sequence[Record], out: Path) -> list[str]:
    """Pages that an earlier run wrote for students who no longer have a submission."""
    slugs = {record["slug"] for record in records}
    return sorted(page.name for page in (out / "students").glob("*.html") if page.stem not in slugs)


def grades_csv(records: Sequence[Record]) -> str:
    """One line per student: points of each exercise, their sum, and what an instructor should look at."""
    numbers = list(records[0]["exercises"]) if records else []
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerow(["student", *(f"exercise {n}" for n in numbers), "points", "max points", "error", "notes"])
    for record in records:
        words = [no_formula(text) for text in (record["student"], record["error"] or "", "; ".join(record["notes"]))]
        earned = [record["exercises"][n]["points"] for n in numbers]
        writer.writerow([words[0], *earned, record["points"], record["max_points"], *words[1:]])
    return text.getvalue()


def no_formula(text: str) -> str:
    """Text that no spreadsheet will read as a formula."""
    text = printable(text)
    return "'" + text if text[:1] in "=+-@\t\r|%" and text else text


def gradescope(record: Record) -> Record:
    """Gradescope's results.json: one test for each exercise."""
    tests = [{"name": f"Exercise {n}", "score": e["points"], "max_score": e["max_points"],
              "output": "\n".join(_outcome(e)), "visibility": "visible"} for n, e in record["exercises"].items()]
    told = "; ".join(filter(None, [record["error"], *record["notes"]]))
    return {"score": record["points"], "output": printable(told), "stdout_visibility": "hidden", "tests": tests}


def overview(records: Sequence[Record], lab: str) -> str:
    """The instructor's page: all students' points, with links to their pages."""
    numbers = list(records[0]["exercises"]) if records else []
    head = "".join(f'<th class="n">{n}</th>' for n in numbers)
    rows = "".join(
        f'<tr><td><a href="students/{_safe(r["slug"])}.html">{_safe(r["student"])}</a></td>'
        + "".join(f'<td class="n">{r["exercises"][n]["points"]}</td>' for n in numbers)
        + f'<td class="n">{r["points"]} / {r["max_points"]}</td>'
        + f'<td>{_safe("; ".join(filter(None, [r["error"], *r["notes"]])))}</td></tr>' for r in records)
    return _page(f"{lab}: {len(records)} submissions",
                 f'<div tabindex="0"><table><thead><tr><th>Student</th>{head}<th class="n">Points</th>'
                 f"<th>To look at</th></tr></thead><tbody>{rows}</tbody></table></div>")


def student_page(record: Record, lab: str) -> str:
    """A page to hand back: points and verdicts for each exercise."""
    rows = "".join(f'<tr><td class="n">{_safe(n)}</td><td class="n">{e["points"]} / {e["max_points"]}</td>'
                   f'<td>{"<br>".join(map(html.escape, _outcome(e)))}</td></tr>'
                   for n, e in record["exercises"].items())
    notes = "".join(f"<li>{_safe(note)}</li>" for note in filter(None, [record["error"], *record["notes"]]))
    return _page(f"{lab}: {record['student']}",
                 f"<p>{record['points']} of {record['max_points']} points.</p>"
                 '<div tabindex="0"><table><thead><tr><th class="n">Exercise</th><th class="n">Points</th>'
                 f"<th>What happened</th></tr></thead><tbody>{rows}</tbody></table></div>"
                 + (f"<ul>{notes}</ul>" if notes else "")
                 + "<p>Each check that passes gives its points, unless the exercise was stopped, held too much memory, "
                 "or failed over the wire or in a check that your copy does not have. All ran with numbers drawn for "
                 "this grading. To see what a check says, run it in your own copy.</p>")


def _outcome(exercise: Record) -> list[str]:
    """An exercise's status, and what a rank over the wire reported, as lines to show."""
    return [printable(line) for line in (exercise["status"], exercise.get("told", "").replace("\n", " ")) if line]


def _page(title: str, body: str) -> str:
    return ('<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><meta name="viewport" '
            'content="width=device-width, initial-scale=1"><meta http-equiv="Content-Security-Policy" '
            "content=\"default-src 'none'; style-src 'unsafe-inline'\">"
            f"<title>{_safe(title)}</title><style>{STYLE}</style></head><body><main><h1>{_safe(title)}</h1>{body}"
            "</main></body></html>\n")


def _safe(text: Any) -> str:
    return html.escape(printable(str(text)))
