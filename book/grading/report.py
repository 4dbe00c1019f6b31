"""L4: the reports of a grading run: CSV, JSON, Gradescope's results.json, and HTML pages."""
from __future__ import annotations

import csv
import html
import io
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from threading import Lock
from typing import Any

from book.grading.feedback import page_of
from book.grading.handed_in import printable

Record = dict[str, Any]
BOM = "\ufeff"  # without it a spreadsheet takes names for Latin-1
# A frame can't be reached from this page: it says how high its content is.
AS_HIGH_AS_IT_IS = """<script>
addEventListener("message", ({ source, data }) => {
  const frame = [...document.querySelectorAll("iframe")].find(one => one.contentWindow === source);
  if (frame && data > 0 && data < 4000) frame.style.height = `${data + 4}px`;
});
</script>"""
STYLE = """
:root { color-scheme: light dark; font: 16px/1.5 system-ui, sans-serif; }
body { max-width: 50rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.8rem; line-height: 1.25; overflow-wrap: anywhere; }
div { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; }
th, td { text-align: left; padding: .4rem .8rem; border-bottom: 1px solid #8886; overflow-wrap: anywhere; }
td:not(.n), th:not(.n) { min-width: 8rem; }
pre { overflow-x: auto; padding: .6rem .8rem; background: #8881; white-space: pre-wrap; }
iframe { width: 100%; height: 40rem; border: 1px solid #8886; }
img { max-width: 100%; background: #fff; }
td.n, th.n { text-align: right; white-space: nowrap; }
"""


class Reports:
    """The reports of a run, which are right at any time: each record that is added is in them.

    They are grades.csv, grades.json, index.html, and for each student NAME.html and NAME.gradescope.json in `students`.
    They hold verdicts, and the error of a rank over the wire, which knows no secrets: no other message from a
    submission's code, no hidden source, no expected value. `also` makes the content of one more file of each name from
    all records, or None; `left` says how long the run will still take, "" if that is not known.
    """

    def __init__(self, lab: str, out: Path, num_entries: int = 0,
                 also: dict[str, Callable[[Sequence[Record]], str | None]] | None = None,
                 left: Callable[[], str] = lambda: "") -> None:
        self.lab, self.out, self.num_entries, self.also, self.left = lab, out, num_entries, also or {}, left
        self.records: dict[str, Record] = {}
        self.lock = Lock()

    def add(self, record: Record) -> None:
        """Adds a record, or replaces the one of the same student; from any thread."""
        with self.lock:
            self.records[record["slug"]] = record
            students = self.out / "students"
            students.mkdir(parents=True, exist_ok=True)
            _write(students / f"{record['slug']}.html", student_page(record, self.lab))
            _write(students / f"{record['slug']}.gradescope.json", json.dumps(gradescope(record), indent=1))
            self._write_all(running=True)

    def close(self) -> None:
        """Writes what is said of all records; no more will come."""
        self._write_all(running=False)

    def _write_all(self, running: bool) -> None:
        records = sorted(self.records.values(), key=lambda record: (record["student"], record["slug"]))
        _write(self.out / "grades.csv", BOM + grades_csv(records))
        _write(self.out / "index.html", overview(records, self.lab, self.num_entries if running else None, self.left()))
        for name, content in self.also.items():
            text = content(records)
            if text is not None:
                _write(self.out / name, BOM + text)
        if not running:
            _write(self.out / "grades.json", json.dumps({"lab": self.lab, "submissions": list(map(_shared, records))},
                                                        indent=1))


def _write(path: Path, text: str) -> None:
    """Writes a file at once: whoever opens it sees the old one or the new one."""
    part = path.with_name(path.name + ".part")
    part.write_text(text, encoding="utf-8")
    part.replace(path)


def _shared(record: Record) -> Record:
    """A record without what is for the grader alone: logs, keys, the line of the roster."""
    private = {"key", "kept", "complete", "slug", "fault", "row"}
    kept = {key: value for key, value in record.items() if key not in private}
    return kept | {"exercises": {n: {k: v for k, v in e.items() if k not in ("log", "feedback")}
                                 for n, e in record["exercises"].items()}}


def stale_pages(records: Sequence[Record], out: Path) -> list[str]:
    """Pages that an earlier run wrote for students who no longer have a submission."""
    slugs = {record["slug"] for record in records}
    return sorted(page.name for page in (out / "students").glob("*.html") if page.stem not in slugs)


def grades_csv(records: Sequence[Record]) -> str:
    """One line per student: points of each exercise, their sum less what lateness costs, what to look at."""
    numbers = list(records[0]["exercises"]) if records else []
    text = io.StringIO()
    writer = csv.writer(text)
    asked = [question["title"] for question in records[0].get("by_hand", [])] if records else []
    writer.writerow(["student", "id", "email", "section", *(f"exercise {n}" for n in numbers), *map(no_formula, asked),
                     "late", "points", "max points", "error", "notes"])
    for record in records:
        who = [no_formula(record.get(key, "")) for key in ("student", "id", "email", "section")]
        words = [no_formula(text) for text in (record["error"] or "", "; ".join(_noted(record)))]
        earned = [record["exercises"][n]["points"] for n in numbers]
        earned += ["" if q["points"] is None else q["points"] for q in record.get("by_hand", [])]
        writer.writerow([*who, *earned, record.get("late", ""), record["points"], record["max_points"], *words])
    return text.getvalue()


def _noted(record: Record) -> list[str]:
    """What the instructor should look at, what the student is not shown included."""
    return [*record["notes"], *record.get("for_instructor", ())]


def no_formula(text: str) -> str:
    """Text that no spreadsheet will read as a formula."""
    text = printable(text)
    return "'" + text if text[:1] in "=+-@\t\r|%" and text else text


def gradescope(record: Record) -> Record:
    """Gradescope's results.json: one test for each exercise."""
    tests = [{"name": f"Exercise {n}", "score": e["points"], "max_score": e["max_points"], "visibility": "visible",
              "output": "\n".join([*_outcome(e), _shown(_message(e), printable)]).strip()}
             for n, e in record["exercises"].items()]
    tests += [{"name": question["title"], "score": question["points"] or 0, "max_score": question["max_points"],
               "visibility": "visible", "output": printable(question["comment"])}
              for question in record.get("by_hand", [])]
    told = "; ".join(filter(None, [record["error"], *record["notes"]]))
    return {"score": record["points"], "output": printable(told), "stdout_visibility": "hidden", "tests": tests}


def overview(records: Sequence[Record], lab: str, expected: int | None = None, left: str = "") -> str:
    """The instructor's page: all students' points, with links to their pages.

    While submissions are still graded, `expected` is how many there are, `left` how long that will take, and the page
    loads itself again.
    """
    numbers = list(records[0]["exercises"]) if records else []
    head = "".join(f'<th class="n">{n}</th>' for n in numbers)
    rows = "".join(
        f'<tr><td><a href="students/{_safe(r["slug"])}.html">{_safe(r["student"])}</a></td>'
        + "".join(f'<td class="n">{r["exercises"][n]["points"]}</td>' for n in numbers)
        + f'<td class="n">{r["points"]} / {r["max_points"]}</td><td class="n">{_safe(r.get("late", ""))}</td>'
        + f'<td>{_safe("; ".join(filter(None, [r["error"], *_noted(r)])))}</td></tr>' for r in records)
    told = f"{len(records)} submissions" if expected is None else f"{len(records)} of {expected} submissions graded"
    told += f", {left}" if left and expected is not None else ""
    return _page(f"{lab}: {told}",
                 f'<div tabindex="0"><table><thead><tr><th>Student</th>{head}<th class="n">Points</th>'
                 f"<th>Late</th><th>To look at</th></tr></thead><tbody>{rows}</tbody></table></div>",
                 '<meta http-equiv="refresh" content="10">' if expected is not None else "")


def _safe(text: Any) -> str:
    return html.escape(printable(str(text)))


def student_page(record: Record, lab: str) -> str:
    """A page to hand back: points and verdicts for each exercise."""
    rows = "".join(f'<tr><td class="n">{_safe(n)}</td><td class="n">{e["points"]} / {e["max_points"]}</td>'
                   f'<td>{"<br>".join(map(html.escape, _outcome(e)))}</td></tr>'
                   for n, e in record["exercises"].items())
    rows += "".join(f'<tr><td class="n">{_safe(q["title"])}</td><td class="n">'
                    f'{"–" if q["points"] is None else q["points"]} / {q["max_points"]}</td>'
                    f'<td>{_safe(q["comment"])}</td></tr>' for q in record.get("by_hand", []))
    notes = "".join(f"<li>{_safe(note)}</li>" for note in filter(None, [record["error"], *record["notes"]]))
    return _page(f"{lab}: {record['student']}",
                 f"<p>{record['points']} of {record['max_points']} points{_lateness(record)}.</p>"
                 '<div tabindex="0"><table><thead><tr><th class="n">Exercise</th><th class="n">Points</th>'
                 f"<th>What happened</th></tr></thead><tbody>{rows}</tbody></table></div>"
                 + (f"<ul>{notes}</ul>" if notes else "")
                 + "".join(_explained(n, e) for n, e in record["exercises"].items())
                 + "<p>Each check that passes gives its points, unless the exercise was stopped, held too much memory, "
                 "or failed over the wire or in a check that your copy does not have. All ran with numbers drawn for "
                 "this grading. What the checks say above, and the pictures, come from one more run with the numbers "
                 "of your own copy.</p>", AS_HIGH_AS_IT_IS, pictures=True)


def summary(record: Record) -> str:
    """What a student may read of the verdicts, in one cell of a table."""
    if record["error"]:
        return no_formula(record["error"])
    return "; ".join(f"exercise {n}: {e['points']} of {e['max_points']}, {' '.join(_outcome(e))}"
                     for n, e in record["exercises"].items())


def _lateness(record: Record) -> str:
    if not record.get("late"):
        return ""
    return f": {record['earned']} for the answers, handed in {record['late']} late"


def _outcome(exercise: Record) -> list[str]:
    """An exercise's status, and what a rank over the wire reported, as lines to show."""
    return [printable(line) for line in (exercise["status"], exercise.get("told", "").replace("\n", " ")) if line]


def _explained(number: str, exercise: Record) -> str:
    """What a student's own copy says of an exercise that lost points, and the pictures of their run."""
    found = exercise.get("feedback")
    if not found:
        return ""
    said = (f"<pre>{_shown(_message(exercise))}</pre>" if found["message"] else
            "<p>In your own copy all checks pass. Try other sizes and other numbers of ranks.</p>")
    drawn = "".join(map(_drawn, found["pictures"]))
    heading = "<p>Your run:</p>" if drawn else ""
    return f"<h2>Exercise {_safe(number)}</h2>{said}{heading}{drawn}"


def _drawn(picture: Record) -> str:
    """A picture of a run. A widget runs in a frame of its own, which reaches neither this page nor a network."""
    if "png" in picture:
        return f'<img alt="A chart of your run" src="data:image/png;base64,{_safe(picture["png"])}">'
    if "widget" in picture:
        return (f'<iframe sandbox="allow-scripts" title="{_safe(picture["text"] or "Your run")}" '
                f'srcdoc="{html.escape(page_of(picture))}"></iframe>')
    return f"<pre>{_shown(picture['text'])}</pre>"


def _message(exercise: Record) -> str:
    """What the public checks say of an exercise, if they say something."""
    return (exercise.get("feedback") or {}).get("message") or ""


def _shown(text: str, safe: Callable[[str], str] = _safe) -> str:
    """Text of several lines."""
    return "\n".join(map(safe, text.split("\n")))


def _page(title: str, body: str, head: str = "", pictures: bool = False) -> str:
    allowed = "style-src 'unsafe-inline'" + ("; img-src data:; script-src 'unsafe-inline'" if pictures else "")
    return ('<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><meta name="viewport" '
            'content="width=device-width, initial-scale=1"><meta http-equiv="Content-Security-Policy" '
            f"content=\"default-src 'none'; {allowed}\">"
            f"{head}<title>{_safe(title)}</title><style>{STYLE}</style></head><body><main><h1>{_safe(title)}</h1>{body}"
            "</main></body></html>\n")

