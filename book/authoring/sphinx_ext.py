"""The website's Sphinx extension: formulas as MathML, no third-party scripts, labs as readers may see them.

Jupyter Book loads it through `_config.yml`; it imports nothing from the rest of the book, so that the website builds
without torch, ipywidgets or an installed package. It reads from one file what each widget is made of, and runs
`lockstep release` in a separate process to make student copies.
"""
from __future__ import annotations

import hashlib
import html
import io
import json
import os
import re
import runpy
import shutil
import subprocess
import sys
import tempfile
import zipfile
from base64 import b64decode, b64encode
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import nbformat
from docutils import nodes
from PIL import Image
from pybtex import plugin
from sphinx.application import Sphinx
from sphinx.errors import SphinxError
from sphinx.util import logging

CHINESE = re.compile("[\u4e00-\u9fff]")
WIDGETS = Path(__file__).parents[1] / "widgets"
REGISTRY = runpy.run_path(str(WIDGETS / "registry.py"))
LABS, COPIES = "labs/", "student"  # the pages that are labs; the website's folder with their student copies
HOW_TO = "chapters/93_for_students"
ABOUT_FOLDED = " On these pages the solutions are folded."
WHY_THERE = re.compile(r"(\d+ ranks? on gloo \(CPU\)): (no GPU here)")  # as `launch` says it, in stored outputs too
QUOTED = 12  # minimum length of a line of code that counts as quoted if a message contains it
READ_BY_INLINE_SCRIPTS = {"documentation_options", "doctools", "sphinx_highlight"}
# The last argument of a cell, or one that is called title.
BEFORE_PERCENT = re.compile(r"(?<=\d) (?=%)")
SENTENCE_CHARACTERS = 40
TABLE_CHARACTERS = 82  # what the column of text has room for, with two for each column's margins
PLOT_TITLE = re.compile(r'(?:title=|,\s*)"([^"]+)"\)\s*\Z|title="([^"]+)"')

# Names, punctuation and space, which both styles show in the color of text.
PLAIN_CODE = re.compile(r'<span class="[npw]">([^<]*)</span>')

log = logging.getLogger(__name__)


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the settings, the parts and the hooks with Sphinx."""
    app.add_config_value("widget_files", "", "html", str)
    app.add_config_value("lab_solutions", os.environ.get("SOLUTIONS", "1") != "0", "env", bool)
    for beside in ("citations", "formulas", "landing", "symbols", "wayfinding"):
        app.setup_extension(f"book.authoring.{beside}")
    look_for_plugins_once()
    app.connect("config-inited", point_launch_buttons, priority=100)
    app.connect("config-inited", copy_widgets)
    app.connect("builder-inited", leave_plain_code_plain)
    app.connect("builder-inited", pack_student_copies)
    app.connect("source-read", publish_lab)
    app.connect("source-read", say_why_once)
    app.connect("doctree-resolved", offer_student_copy)
    app.connect("doctree-resolved", describe_plots)
    app.connect("doctree-resolved", keep_together)
    app.connect("doctree-resolved", widen_tables)
    app.connect("doctree-resolved", drop_thebe_settings, priority=900)
    app.connect("doctree-resolved", name_language_of_terms, priority=900)
    app.connect("html-page-context", load_widgets, priority=800)
    app.connect("html-page-context", tidy_scripts, priority=900)
    app.connect("build-finished", publish_sources)
    app.connect("build-finished", drop_icon_script)
    app.connect("build-finished", take_fewer_colors)
    app.connect("build-finished", drop_spare_files)
    return {"parallel_read_safe": True, "parallel_write_safe": True}


def look_for_plugins_once() -> None:
    """Let pybtex keep what it finds: it looks through all installed packages 350 times in a build."""
    plugin.entry_points = cache(plugin.entry_points)


def leave_plain_code_plain(app: Sphinx) -> None:
    """Write code without the spans of what has no color of its own: they are a fifth of all pages' bytes."""
    highlighter = getattr(app.builder, "highlighter", None)
    if highlighter is None:
        return
    colored = highlighter.highlight_block

    def with_fewer_spans(*args: Any, **options: Any) -> str:
        return PLAIN_CODE.sub(r"\1", colored(*args, **options))

    highlighter.highlight_block = with_fewer_spans


def point_launch_buttons(app: Sphinx, config: Any) -> None:
    """Point launch buttons to the repository that this build runs for, or leave them out if it is unknown.

    A website without solutions has no buttons either, since the repository has the solutions.
    """
    repository = os.environ.get("GITHUB_REPOSITORY", "")
    options = config.html_theme_options
    if repository.count("/") > 1:
        raise SphinxError(f"GITHUB_REPOSITORY is {repository!r}; it has to be owner/name.")
    if repository and config.lab_solutions:
        options["repository_url"] = f"{os.environ.get('GITHUB_SERVER_URL', 'https://github.com')}/{repository}"
        options["use_repository_button"] = True
    else:
        options["launch_buttons"] = {}


def pack_student_copies(app: Sphinx) -> None:
    """Make the student copy of each lab, and put it among the website's files as a zip, always with the same bytes.

    Raises SphinxError for a lab that can't be released.
    """
    if app.builder.format != "html":
        return
    with tempfile.TemporaryDirectory() as folder:
        labs = Path(app.srcdir, LABS)
        command = [sys.executable, "-m", "book.grading", "release", "--apart", str(labs), "-o", folder]
        run = subprocess.run(command, cwd=WIDGETS.parents[1], text=True, capture_output=True)
        if run.returncode:
            raise SphinxError(f"No student copies of the labs: {run.stderr.strip()}")
        for copy in sorted(Path(folder).iterdir()):
            target = zip_of(app, LABS + copy.name)
            target.parent.mkdir(exist_ok=True)
            with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as archive:
                for path in sorted(copy.iterdir()):
                    entry = zipfile.ZipInfo(f"{copy.name}/{path.name}")
                    entry.external_attr, entry.compress_type = 0o644 << 16, zipfile.ZIP_DEFLATED
                    archive.writestr(entry, path.read_bytes())


def zip_of(app: Sphinx, page: str) -> Path:
    """Where the student copy of a lab's page is."""
    return Path(app.outdir, COPIES, Path(page).name + ".zip")


def publish_lab(app: Sphinx, page: str, source: list[str]) -> None:
    """Build a lab's page from what readers may see instead of from the notebook in the repository."""
    if page.startswith(LABS) and app.builder.format == "html":
        source[0] = published(source[0], None if app.config.lab_solutions else stubs(app, page))


def say_why_once(app: Sphinx, page: str, source: list[str]) -> None:
    """Keep launch's reason for the backend only in the first output of a page; `launch` prints it every time."""
    told: set[str] = set()

    def once(found: re.Match[str]) -> str:
        again = found[2] in told
        told.add(found[2])
        return found[1] if again else found[0]

    source[0] = WHY_THERE.sub(once, source[0])


def published(text: str, answers: dict[str, str] | None = None) -> str:
    """A lab's notebook without hidden checks and variants, and with these answers, if any are given."""
    lab = nbformat.reads(text, as_version=4)
    lab.cells = [cell for cell in lab.cells if not mark(cell).get("hidden") and "remove-cell" not in tags(cell)]
    for cell in lab.cells:
        mark(cell).pop("variants", None)
    if answers is not None:
        put_answers(lab, answers)
    return nbformat.writes(lab)


def put_answers(lab: nbformat.NotebookNode, answers: dict[str, str]) -> None:
    """Put these sources into a lab's answer cells, and remove the old ones from outputs, as errors may quote them."""
    old = [line.strip() for cell in lab.cells if mark(cell).get("kind") == "answer"
           for line in cell.source.splitlines()]
    for cell in lab.cells:
        if mark(cell).get("kind") == "answer":
            cell.source, cell.outputs = answers[mark(cell)["id"]], []
            cell.metadata["tags"] = [tag for tag in tags(cell) if tag != "hide-input"]
        elif cell.cell_type == "markdown":
            cell.source = cell.source.replace(ABOUT_FOLDED, "")
    known = "\n".join(cell.source for cell in lab.cells)
    gone = sorted({line for line in old if len(line) >= QUOTED and line not in known}, key=len, reverse=True)
    for cell in lab.cells:
        for output in cell.get("outputs", []):
            for line in gone:
                if output.output_type == "stream":
                    output.text = output.text.replace(line, "…")
                elif output.output_type == "error":
                    output.evalue = output.evalue.replace(line, "…")
                    output.traceback = [text.replace(line, "…") for text in output.traceback]


def stubs(app: Sphinx, page: str) -> dict[str, str]:
    """The answer cells' sources in a lab's student copy, by cell id."""
    name = Path(page).name
    with zipfile.ZipFile(zip_of(app, page)) as archive:
        copy = nbformat.reads(archive.read(f"{name}/{name}.ipynb").decode("utf-8"), as_version=4)
    return {mark(cell)["id"]: cell.source for cell in copy.cells if mark(cell).get("kind") == "answer"}


def mark(cell: Any) -> dict[str, Any]:
    """The lab metadata of a cell."""
    return cell.metadata.get("lockstep", {})


def tags(cell: Any) -> list[str]:
    """The tags of a cell."""
    return cell.metadata.get("tags", [])


def publish_sources(app: Sphinx, error: Exception | None) -> None:
    """Replace the notebooks for download, which Sphinx copies from the repository, with those that the pages show.

    All are written without indentation, which is 0.2 MB, and their plots with fewer colors, which is 1 MB, and as PNG
    alone, which is 0.6 MB: JupyterLab shows no SVG of a notebook that it does not trust.
    """
    for path in Path(app.outdir, "_sources").glob("*/*.ipynb"):
        text = path.read_text("utf-8")
        if path.parent.name == LABS.rstrip("/"):
            text = published(text, None if app.config.lab_solutions else stubs(app, LABS + path.stem))
        notebook = json.loads(text)
        for plot in plots_in(notebook):
            plot.pop("image/svg+xml", None)
            plot["image/png"] = b64encode(with_fewer_colors(b64decode("".join(plot["image/png"])))).decode()
        path.write_text(json.dumps(notebook, ensure_ascii=False, separators=(",", ":")), encoding="utf-8")


def plots_in(notebook: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """What the outputs of cells hold that have a PNG."""
    for cell in notebook["cells"]:
        yield from (output["data"] for output in cell.get("outputs", ()) if "image/png" in output.get("data", {}))


def offer_student_copy(app: Sphinx, doctree: nodes.document, page: str) -> None:
    """Put a link to the student copy under the title of a lab's page."""
    if not page.startswith(LABS) or app.builder.format != "html":
        return
    copy, title = zip_of(app, page), next(doctree.findall(nodes.title))
    how_to = app.builder.get_relative_uri(page, HOW_TO)
    link = (f'<p class="lab-copy"><a class="sd-btn sd-btn-outline-primary" href="../{COPIES}/{copy.name}" download>'
            '<i class="fa-solid fa-download" aria-hidden="true"></i> Download the student copy</a>'
            "<span>The notebook without solutions, and what its checks must print (zip, "
            f'{copy.stat().st_size / 1000:.0f} KB). <a href="{how_to}">How to work with it</a></span></p>')
    title.parent.insert(title.parent.index(title) + 1, nodes.raw("", link, format="html"))


def describe_plots(app: Sphinx, doctree: nodes.document, page: str) -> None:
    """Let a screen reader say a plot's title, taken from the code of its cell, instead of a file name."""
    for cell in doctree.findall(lambda node: isinstance(node, nodes.container) and "cell" in node["classes"]):
        code = "".join(block.astext() for block in cell.findall(nodes.literal_block))
        titles = [last or named for last, named in PLOT_TITLE.findall(code)]
        for image in cell.findall(nodes.image):
            image["alt"] = titles[-1] if titles else "A plot that the code above makes"


def keep_together(app: Sphinx, doctree: nodes.document, page: str) -> None:
    """Let no line end between a number and its percent sign, and mark cells of tables that hold a sentence.

    On a phone columns of sentences are given room: a table that is too wide scrolls.
    """
    for text in list(doctree.findall(nodes.Text)):
        is_code = isinstance(text.parent, (nodes.FixedTextElement, nodes.literal, nodes.raw))
        if BEFORE_PERCENT.search(text) and not is_code:
            text.parent.replace(text, nodes.Text(BEFORE_PERCENT.sub("\u00a0", text)))
    for cell in doctree.findall(nodes.entry):
        if len(cell.astext()) > SENTENCE_CHARACTERS:
            cell["classes"].append("sentence")


def widen_tables(app: Sphinx, doctree: nodes.document, page: str) -> None:
    """Let a table whose longest words do not fit beside one another take the margin too: no column is cut off."""
    for table in list(doctree.findall(nodes.table)):
        columns = zip(*(map(longest_word, row.findall(nodes.entry)) for row in table.findall(nodes.row)))
        is_wide = sum(max(words) + 2 for words in columns) > TABLE_CHARACTERS
        if is_wide and "full-width" not in table.parent["classes"]:
            box = nodes.container("", classes=["full-width", "wide-table"], is_div=True)
            table.parent.replace(table, box)
            box += table
            for code in list(table.findall(nodes.literal)):
                let_break_before_arguments(code)


def let_break_before_arguments(code: nodes.literal) -> None:
    """Where a line has no room for a call, it goes on behind the parenthesis: code on pages is never broken else."""
    name, bracket, arguments = map(html.escape, code.astext().partition("("))
    if arguments:
        whole = f'<code class="docutils literal notranslate">{name}{bracket}<wbr>{arguments}</code>'
        code.parent.replace(code, nodes.raw("", whole, format="html"))


def longest_word(cell: nodes.entry) -> int:
    """The characters of the longest word in a cell of a table: formulas break and do not count."""
    texts = (text for text in cell.findall(nodes.Text) if not isinstance(text.parent, nodes.math))
    return max(map(len, "".join(texts).split()), default=0)


def copy_widgets(app: Sphinx, config: Any) -> None:
    """Write the scripts and the style of all widgets to where pages find them.

    Their hash is a setting: without a changed setting Sphinx copies no files when all pages are up to date.
    """
    folder = Path(app.doctreedir, "widgets")
    folder.mkdir(parents=True, exist_ok=True)
    paths = REGISTRY["write"](folder, set(REGISTRY["WIDGETS"]))
    config.html_static_path += map(str, paths)
    own = sorted(Path(__file__).parent.glob("*.css"))
    config.widget_files = hashlib.sha256(b"".join(path.read_bytes() for path in [*paths, *own])).hexdigest()


def load_widgets(app: Sphinx, page: str, template: str, context: dict[str, Any], doctree: Any) -> None:
    """Make a page load the scripts of only the widgets that are on it, and their style where there is one."""
    for name in REGISTRY["needed"](widgets_in(context.get("body") or "")):
        app.add_css_file(name) if name.endswith(".css") else app.add_js_file(name, defer="defer")


def widgets_in(body: str) -> set[str]:
    """The names of the widgets that a page's HTML holds."""
    return {name for name in REGISTRY["WIDGETS"] if f"<div data-lockstep-{name}=" in body}


def drop_thebe_settings(app: Sphinx, doctree: nodes.document, page: str) -> None:
    """Remove the settings for Thebe from a page: it would load from a CDN and no page uses it."""
    for node in list(doctree.findall(nodes.raw)):
        if "x-thebe-config" in node.astext() or node.astext().startswith("<script>kernelName"):
            node.parent.remove(node)


def name_language_of_terms(app: Sphinx, doctree: nodes.document, page: str) -> None:
    """Mark Chinese terms as Chinese: browsers choose glyphs, and screen readers a voice, by the language."""
    for term in doctree.findall(nodes.term):
        for text in [text for text in term.findall(nodes.Text) if CHINESE.search(text)]:
            start, end = (nodes.raw("", tag, format="html") for tag in ('<span lang="zh-Hans">', "</span>"))
            text.parent.replace(text, [start, text.copy(), end])


def tidy_scripts(app: Sphinx, page: str, template: str, context: dict[str, Any], doctree: Any) -> None:
    """Remove Thebe's scripts from a page (some declare its settings twice); let no other script delay first paint."""
    context["script_files"] = [script for script in context.get("script_files", []) if not is_thebe(script)]
    for script in context["script_files"]:
        if script.filename and Path(str(script.filename)).stem not in READ_BY_INLINE_SCRIPTS:
            script.attributes.setdefault("defer", "defer")
    context["css_files"] = [css for css in context.get("css_files", []) if "thebe" not in str(css.filename)]


def is_thebe(script: Any) -> bool:
    """Whether a script tag is Thebe's or its settings."""
    body = getattr(script, "attributes", {}).get("body") or ""
    return "thebe" in str(getattr(script, "filename", "")) or "THEBE_JS_URL" in body


def drop_icon_script(app: Sphinx, error: Exception | None) -> None:
    """Empty the theme's icon script: 1.5 MB on every page for icons that its style sheet has as a 0.15 MB font."""
    script = Path(app.outdir, "_static", "scripts", "fontawesome.js")
    if error is None and script.is_file():
        script.write_text("/* The icons come from the font in the style sheet. */\n", encoding="utf-8")


def drop_spare_files(app: Sphinx, error: Exception | None) -> None:
    """Delete what no page loads: source maps, 3.5 MB, translations of the theme, and the icons' older form of font.

    The style sheet names that one second, for browsers without WOFF2, which all have had since 2018.
    """
    static = Path(app.outdir, "_static")
    shutil.rmtree(static / "locales", ignore_errors=True)
    fonts = [path for path in static.rglob("*.ttf") if path.with_suffix(".woff2").exists()]
    for path in [*static.rglob("*.map"), *fonts]:
        path.unlink()


def take_fewer_colors(app: Sphinx, error: Exception | None) -> None:
    """Write plots with fewer colors."""
    for path in Path(app.outdir, "_images").glob("*.png"):
        path.write_bytes(with_fewer_colors(path.read_bytes()))


def with_fewer_colors(png: bytes) -> bytes:
    """A plot in the 256 colors that are nearest to its own: half the bytes, and to the eye the same."""
    found = io.BytesIO()
    with Image.open(io.BytesIO(png)) as picture:
        few = picture.convert("RGBA").quantize(256, Image.Quantize.FASTOCTREE, dither=Image.Dither.NONE)
    few.save(found, "PNG", optimize=True)
    return min(found.getvalue(), png, key=len)
