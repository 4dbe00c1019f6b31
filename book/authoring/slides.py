"""L4: slides for each week of the syllabus, from the figures that chapters store.

A deck is a PowerPoint file, since instructors change slides: they drop some, add their own, translate. What
`jupyter nbconvert --to slides` makes is a web page that loads reveal.js from elsewhere, and changes only with its
notebook. Players don't play in PowerPoint: each slide names the page where its figure does.
"""
from __future__ import annotations

import io
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from PIL import Image

from book.authoring.figures import LEDGER, Figure, figures, table_of
from book.authoring.notebooks import NotebookError, parse
from book.authoring.photos import Camera, camera
from book.authoring.prose import cited, plain
from book.authoring.syllabus import SYLLABUS, ClassFigure, Week, weeks
from book.words import capitalised

ROOT = Path(__file__).resolve().parents[2]
WIDTH, HEIGHT, MARGIN = 13.333, 7.5, 0.5  # inches
INSIDE = WIDTH - 2 * MARGIN
FIGURE_TOP, FIGURE_END, FOOT_TOP = 1.25, 6.75, 6.85
QUESTION_POINTS, QUESTION_IN = 24, {1: 0.6, 2: 1.0}  # its type, and the height of its box by lines
TEXT_END = 6.7  # of a slide without a line at its foot
TABLE_POINTS, HEAD_IN = range(14, 10, -1), 0.5  # a table's type, and the height of its head, which has two lines
LETTER = 0.56  # width of a letter, in heights of the type
LINE = 1.25  # height of a line, in heights of the type
INK, SOFT, BLUE, PALE = "1F2328", "59636E", "0B57D0", "E8F0FE"
NOTES_CHARACTERS = 4000
TITLED = re.compile(r"(?<!\*)\*([^*\n]+)\*(?!\*)")  # sections to read, in italics, which slides have not
SOURCES_ON_SLIDE = 9
LICENCE = "Text and figures: Lockstep, CC BY 4.0. Keep this line when you share the slides."
MISSING = "Slides need python-pptx: .venv/bin/python -m pip install -r requirements-frameworks.txt"


def make(numbers: Sequence[int], folder: Path, site: str = "") -> list[Path]:
    """Write the decks of these weeks, all if none is named, as week_NN.pptx; `site` is the website's address.

    Raises NotebookError for a week that the syllabus does not have, and if python-pptx is missing.
    """
    plan = {week.number: week for week in weeks(SYLLABUS.read_text("utf-8"))}
    unknown = [number for number in numbers if number not in plan]
    if unknown:
        raise NotebookError(f"The syllabus has weeks 1 to {max(plan)}, and no week {unknown[0]}.")
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    with camera() as take:
        for number in numbers or plan:
            paths.append(folder / f"week_{number:02}.pptx")
            deck = Deck(site, take)
            deck.week(plan[number])
            deck.file.save(str(paths[-1]))
    return paths


class Deck:
    """A deck under way: python-pptx's presentation in `file`, and what adds slides to it."""

    def __init__(self, site: str, take: Camera | None) -> None:
        try:
            import pptx
        except ModuleNotFoundError:
            raise NotebookError(MISSING) from None
        self.site, self.take = site.rstrip("/"), take
        self.file: Any = pptx.Presentation()
        self.file.slide_width, self.file.slide_height = _emu(WIDTH), _emu(HEIGHT)

    def week(self, week: Week) -> None:
        """All slides of a week."""
        said = {term: plain(text) for term, text in week.fields.items()}
        asked = {(shown.page, shown.label): shown for shown in week.shown()}
        paths = [ROOT / "chapters" / f"{name}.ipynb" for name in week.chapters()]
        self.words(f"Week {week.number}. {week.title}", said["Question"], size=32)
        for path in paths:
            stored = figures(path)
            for figure in (one for one in stored if one.widget != LEDGER):
                self.figure(figure, asked.get((figure.page, figure.title)))
            for figure in (one for one in stored if one.widget == LEDGER):
                self.ledger(figure)
        self.words("Discuss", said["Discuss"], size=28, notes=said["Answer"])
        read = plain(TITLED.sub(r"“\1”", week.fields["Read"]))
        self.words("To do", f"Read: {read}\n\n{said['Lab']}\n\n{said['Afterwards']}", size=22)
        listed = list(sources(paths))
        for first in range(0, len(listed), SOURCES_ON_SLIDE):
            part = listed[first:first + SOURCES_ON_SLIDE]
            self.words("Sources", "\n".join([*part, "", LICENCE]), size=16)

    def words(self, title: str, text: str, size: int, notes: str = "") -> None:
        """A slide of a title and a text."""
        slide = self.begin(title, notes)
        self.text(slide, text, FIGURE_TOP + 0.2, TEXT_END, size)

    def figure(self, figure: Figure, shown: ClassFigure | None) -> None:
        """A slide of a figure: its question, its picture or its words, where it plays; what is said of it as notes."""
        question = plain(shown.question) if shown else ""
        around = ["\n".join(figure.words), plain(figure.before), plain(figure.after)]
        slide = self.begin(figure.title, "\n\n".join(filter(None, around)))
        top = FIGURE_TOP
        if question:
            height = QUESTION_IN[min(2, num_lines(question, INSIDE, QUESTION_POINTS))]
            self.text(slide, capitalised(question), top, top + height, QUESTION_POINTS, color=BLUE)
            top += height
        picture = self.take(figure, INSIDE / (FIGURE_END - top)) if self.take and figure.html else figure.picture
        if picture:
            self.picture(slide, picture, figure, top)
        elif not question:
            self.text(slide, "\n".join(figure.words), top, FIGURE_END, 20)
        self.foot(slide, figure)

    def ledger(self, figure: Figure) -> None:
        """A slide of the ledger's table; rows of its own chapter are marked."""
        rows, slide = table_of(figure), self.begin("The ledger", plain(figure.after))
        own = str(int(figure.page[:2]))
        heights = [HEAD_IN] + [min(0.45, (FIGURE_END - FIGURE_TOP - HEAD_IN) / len(rows[1:]))] * len(rows[1:])
        shape = slide.shapes.add_table(len(rows), len(rows[0]), *map(_emu, (
            MARGIN, FIGURE_TOP, INSIDE, sum(heights))))
        shape.name = "ledger"
        widths, points = _columns(rows)
        for column, width in zip(shape.table.columns, widths):
            column.width = _emu(width)
        for number, row in enumerate(rows):
            shape.table.rows[number].height = _emu(heights[number])
            for place, said in enumerate(row):
                _cell(shape.table.cell(number, place), said, points, head=not number, own=row[0] == own)
        self.foot(slide, figure)

    def begin(self, title: str, notes: str) -> Any:
        """A slide with its title and notes."""
        slide = self.file.slides.add_slide(self.file.slide_layouts[5])  # title only
        place = slide.shapes.title
        place.left, place.top, place.width, place.height = map(_emu, (MARGIN, 0.3, INSIDE, 0.9))
        size = largest([title], INSIDE, 0.9, 32)
        _write(place.text_frame, [title], size, INK, bold=True)
        if notes:
            slide.notes_slide.notes_text_frame.text = notes[:NOTES_CHARACTERS]
        return slide

    def text(self, slide: Any, text: str, top: float, end: float, size: int, color: str = INK) -> None:
        """A box of text, in the largest type up to `size` points in which it fits; what never fits is cut."""
        lines = text.split("\n")
        points = largest(lines, INSIDE, end - top, size)
        kept = list(fitting(lines, INSIDE, end - top, points))
        box = slide.shapes.add_textbox(*map(_emu, (MARGIN, top, INSIDE, end - top)))
        _write(box.text_frame, kept, points, color)

    def picture(self, slide: Any, picture: bytes, figure: Figure, top: float) -> None:
        """The picture, as large as its place lets it be, with words for a screen reader."""
        with Image.open(io.BytesIO(picture)) as image:
            width, height = image.size
        scale = min(INSIDE / width, (FIGURE_END - top) / height)
        shape = slide.shapes.add_picture(io.BytesIO(picture), *map(_emu, (
            (WIDTH - width * scale) / 2, top, width * scale, height * scale)))
        shape.name = "figure"
        said = [figure.title, f"({figure.source})" * bool(figure.source), *figure.words]
        shape._element.nvPicPr.cNvPr.set("descr", "\n".join(filter(None, said)))

    def foot(self, slide: Any, figure: Figure) -> None:
        """Where the figure stands, as a link if the website's address is known, and where its data comes from."""
        place = f"chapters/{figure.page}.html" + f"#{figure.anchor}" * bool(figure.anchor)
        box = slide.shapes.add_textbox(*map(_emu, (MARGIN, FOOT_TOP, INSIDE, 0.4)))
        _write(box.text_frame, [" · ".join(filter(None, [figure.source, place]))], 12, SOFT)
        if self.site:
            box.text_frame.paragraphs[0].runs[0].hyperlink.address = f"{self.site}/{place}"


def sources(paths: Iterable[Path]) -> Iterator[str]:
    """What these chapters cite, a line for each: who, when, what, where."""
    from pybtex.database import parse_file

    known = parse_file(str(ROOT / "references.bib")).entries
    texts = [cell.source for path in paths for cell in parse(path.read_text("utf-8"), path).cells
             if cell.cell_type == "markdown"]
    for key in cited("\n".join(texts)):
        entry = known[key]
        who = [" ".join(person.last_names) for person in entry.persons.get("author", [])]
        several = f"{who[0]} et al." if len(who) > 2 or "others" in who else " and ".join(who)
        year, doi = entry.fields.get("year"), entry.fields.get("doi")
        where = entry.fields.get("url") or (f"https://doi.org/{doi}" if doi else "")
        said = [f"{several} ({year})" if year else several, entry.fields["title"], where]
        yield re.sub(r"[{}\\]", "", ". ".join(filter(None, said))).replace("?. ", "? ")


def num_lines(line: str, width: float, points: float) -> int:
    """How many lines a paragraph takes in a box of `width` inches, by the mean width of a letter."""
    return max(1, math.ceil(len(line) * points * LETTER / ((width - 0.2) * 72)))


def largest(lines: Sequence[str], width: float, height: float, points: int) -> int:
    """The largest type, up to `points` and at least 12, in which these paragraphs fit into a box of inches."""
    sizes = range(points, 12, -1)
    return next((size for size in sizes if len(list(fitting(lines, width, height, size))) == len(lines)), 12)


def fitting(lines: Sequence[str], width: float, height: float, points: int) -> Iterator[str]:
    """The paragraphs that fit into a box of inches."""
    left = int((height - 0.1) * 72 / (points * LINE))
    for line in lines:
        left -= num_lines(line, width, points)
        if left < 0:
            return
        yield line


def _emu(inches: float) -> int:
    return round(inches * 914_400)


def _columns(rows: Sequence[Sequence[str]]) -> tuple[list[float], int]:
    """Widths of a table's columns, and its type: the largest in which none of its longest words and texts breaks.

    A head, on two lines, counts by its longest word or half.
    """
    longest = [max([len(head) // 2 + 2, *map(len, [*head.split(), *(row[place] for row in rows[1:])])]) + 2
               for place, head in enumerate(rows[0])]
    fits = (size for size in TABLE_POINTS if sum(longest) * size * LETTER < INSIDE * 72)
    return [INSIDE * one / sum(longest) for one in longest], next(fits, TABLE_POINTS[-1])


def _write(frame: Any, lines: Sequence[str], points: float, color: str, bold: bool = False) -> None:
    from pptx.dml.color import RGBColor
    from pptx.enum.text import PP_ALIGN
    from pptx.util import Pt

    frame.word_wrap = True
    frame.text = "\n".join(lines)
    for paragraph in frame.paragraphs:
        paragraph.alignment = PP_ALIGN.LEFT
        for run in paragraph.runs:
            run.font.size, run.font.bold, run.font.color.rgb = Pt(points), bold, RGBColor.from_string(color)


def _cell(cell: Any, said: str, points: int, head: bool, own: bool) -> None:
    from pptx.dml.color import RGBColor
    from pptx.enum.text import MSO_ANCHOR

    cell.vertical_anchor = MSO_ANCHOR.MIDDLE
    cell.margin_top = cell.margin_bottom = _emu(0.02)
    cell.margin_left = cell.margin_right = _emu(0.06)
    cell.fill.solid()
    cell.fill.fore_color.rgb = RGBColor.from_string(BLUE if head else PALE if own else "FFFFFF")
    _write(cell.text_frame, [said], points, "FFFFFF" if head else INK, bold=own)
