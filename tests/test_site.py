"""The built website: clean, complete, and the same with no network, on a phone, in the dark and over file://."""
from __future__ import annotations

import html
import io
import json
import re
import zipfile
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from nbformat import NotebookNode

from book.authoring.formulas import to_mathml
from book.authoring.sphinx_ext import REGISTRY, copy_widgets, point_launch_buttons, published
from book.grading.lab import marks, read_lab
from book.grading.release import release_all, released
from book.widgets.registry import WIDGETS, needed
from tests.browser import SETTLED, Browser
from tests.players import first
from tests.website import ROOT, Site

SCREENS = {"desktop": dict(width=1280), "phone": dict(width=390, height=844, has_touch=True),
           "dark": dict(width=1280, color_scheme="dark")}
LABS = sorted((ROOT / "labs").glob("*.ipynb"))
TELLING = 30  # a line of code with more characters is recognised when it stands somewhere else
OVERFLOW = """() => [...document.querySelectorAll('body *')].filter(e => {
  const box = e.getBoundingClientRect();
  if (!box.width || box.right <= innerWidth + 1) return false;
  for (let p = e; p && p !== document.body; p = p.parentElement) {
    const style = getComputedStyle(p);
    if (style.position === 'fixed' || (p !== e && style.overflowX !== 'visible')) return false;
  }
  return true;
}).map(e => e.tagName + '.' + e.className)"""

# One page of each kind: the index, a chapter with players and formulas, a lab, for courses, for reference, the search.
KINDS = {"index.html", "chapters/03_ring_all_reduce.html", "labs/01_ranks.html", "chapters/92_for_instructors.html",
         "chapters/90_legacy_map.html", "search.html"}


def plain(text: str) -> str:
    """Text with single blanks between its words, so that line breaks and indents make no difference."""
    return " ".join(text.split())


def lines(sources: Iterator[str], known: str) -> set[str]:
    """The lines of sources that are long enough to tell, and are not in the known text."""
    return {line for source in sources for line in map(plain, source.splitlines())
            if len(line) > TELLING and line not in known}


def solutions(lab: NotebookNode) -> set[str]:
    """The lines that only the solutions of a lab have: its student copy has them nowhere."""
    known = plain("\n".join(cell.source for cell in released(lab).cells))
    return lines((block for cell in lab.cells for block in
                  re.findall(r"### BEGIN SOLUTION\n(.*?)### END SOLUTION", cell.source, re.S)), known)


def kept_back(lab: NotebookNode) -> set[str]:
    """The lines that only hidden checks and variants of a lab have."""
    known = plain("\n".join(cell.source for cell in lab.cells if not marks(cell).get("hidden")))
    hidden = [cell.source for cell in lab.cells if marks(cell).get("hidden")]
    others = [other if isinstance(other, str) else other["source"] for cell in lab.cells
              for other in marks(cell).get("variants", {}).values()]
    return lines(iter(hidden + others), known)


def strings(value: Any) -> Iterator[str]:
    """All strings in what JSON holds; a list of lines is one."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list) and value and all(isinstance(item, str) for item in value):
        yield "".join(value)
    elif isinstance(value, (list, dict)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from strings(item)


def said(path: str, content: bytes) -> str:
    """What a file says, with and without the tags in it."""
    if path.endswith(".zip"):
        archive = zipfile.ZipFile(io.BytesIO(content))
        return "\n".join(said(name, archive.read(name)) for name in archive.namelist())
    text = content.decode("utf-8", "replace")
    if path.endswith((".ipynb", ".json")):
        text = "\n".join(strings(json.loads(text)))
    return plain(html.unescape(text) + "\n" + html.unescape(re.sub(r"<[^>]*>", "", text)))


@cache
def files(site: Site) -> dict[str, str]:
    """What all files of a website say, but those of its theme, by their paths."""
    paths = (path for path in site.folder.rglob("*") if path.is_file() and "_static" not in path.parts)
    return {str(path.relative_to(site.folder)): said(path.name, path.read_bytes()) for path in paths}


def test_builds_without_a_warning(site: Site) -> None:
    assert site.status == 0 and "WARNING" not in site.said, site.said


def test_has_every_page_of_the_contents(site: Site) -> None:
    listed = {f"{name}.html" for name in re.findall(r"- file: (\S+)", (ROOT / "_toc.yml").read_text("utf-8"))}
    assert KINDS < {"index.html", "search.html", *listed} <= set(site.pages()), site.said


def test_a_source_without_a_year_is_cited_by_its_title(site: Site) -> None:
    text = (site.folder / "chapters" / "12_when_a_rank_dies.html").read_text("utf-8")
    assert ">Flight Recorder for Debugging Stuck Jobs</a>]" in text and "2024</a>]" in text
    assert not [name for name in site.pages() if "n.d." in (site.folder / name).read_text("utf-8")]


def test_a_page_loads_what_its_widgets_need(site: Site) -> None:
    """In order, and nothing of widgets that are not on it."""
    for name in site.pages():
        text = (site.folder / name).read_text("utf-8")
        widgets = set(re.findall(r"<div data-lockstep-(\w+)=", text))
        styles, scripts = (re.findall(found, text) for found in (
            r'<link [^>]*href="[^"]*/(\w+\.css)\?', r'<script defer="defer" src="[^"]*/(\w+\.js)\?'))
        own = {*needed(set(WIDGETS))}
        loaded = [file for file in styles + scripts if file in own]
        assert loaded == needed(widgets), name


def test_is_no_larger_than_it_has_to_be(site: Site) -> None:
    files = [path for path in site.folder.rglob("*") if path.is_file()]
    assert not [path for path in files if path.suffix == ".map"]
    assert sum(path.stat().st_size for path in files) < 15e6


def test_plots_of_notebooks_to_download_are_there_once(site: Site) -> None:
    found = [output["data"] for path in site.folder.glob("_sources/chapters/*.ipynb")
             for cell in json.loads(path.read_text("utf-8"))["cells"] for output in cell.get("outputs", ())
             if "image/png" in output.get("data", {})]
    assert len(found) > 50 and not [data for data in found if "image/svg+xml" in data]


def test_loads_nothing_from_elsewhere(site: Site) -> None:
    """Links may lead anywhere; scripts, styles, fonts and pictures come with the site."""
    loads = re.compile(r"""<(?:script|img|iframe|source|video|audio)\b[^>]*\bsrc=["'](?:https?:)?//|"""
                       r"""<link\b(?=[^>]*rel=["'](?:stylesheet|preload|icon))[^>]*href=["'](?:https?:)?//|@import|"""
                       r"""url\(["']?(?:https?:)?//""")
    found = {page: loads.findall((site.folder / page).read_text("utf-8")) for page in site.pages()}
    assert not any(found.values()), found


def assert_clean(site: Site, address: str, browser: Browser, names: Iterable[str], **view: Any) -> None:
    """No 404, no console error, no request to elsewhere, nothing wider than the screen: one page shows them in turn."""
    page, log = browser.open("about:blank", **view)
    for name in names:
        page.goto(f"{address}/{name}", wait_until="load")
        width = page.evaluate(SETTLED)
        assert not str(log), f"{name}:\n{log}"
        assert width <= page.viewport_size["width"], f"{name} is {width} px wide: {page.evaluate(OVERFLOW)}"


@pytest.mark.parametrize("screen", [
    screen if screen == "phone" else pytest.param(screen, marks=pytest.mark.slow) for screen in SCREENS])
def test_a_page_of_each_kind_is_clean(site: Site, site_url: str, browser: Browser, screen: str) -> None:
    assert_clean(site, site_url, browser, sorted(KINDS), **SCREENS[screen])


def test_a_page_of_each_kind_opens_from_a_file(site: Site, browser: Browser) -> None:
    assert_clean(site, site.folder.as_uri(), browser, sorted(KINDS))


# Each page comes in each width, in each colours, with a server and without; each kind of page in all of them, above.
@pytest.mark.slow
def test_every_page_is_clean_on_a_dark_phone(site: Site, site_url: str, browser: Browser) -> None:
    assert_clean(site, site_url, browser, site.pages(), **SCREENS["dark"] | SCREENS["phone"])


@pytest.mark.slow
def test_every_page_is_clean_on_a_desktop_from_a_file(site: Site, browser: Browser) -> None:
    assert_clean(site, site.folder.as_uri(), browser, site.pages(), **SCREENS["desktop"])


@pytest.mark.slow
def test_no_column_of_a_table_is_cut_off_on_a_desktop(site: Site, browser: Browser) -> None:
    page, _ = browser.open("about:blank", width=1280)
    cut = {}
    for name in site.pages():
        page.goto((site.folder / name).as_uri(), wait_until="load")
        cut[name] = page.evaluate("""[...document.querySelectorAll('.pst-scrollable-table-container')]
            .filter(box => box.scrollWidth > box.clientWidth + 1).map(box => box.innerText.slice(0, 40))""")
    assert not any(cut.values()), cut


@pytest.mark.parametrize("width", [390, 1000, 1280])
def test_a_wide_table_takes_the_margin_and_no_more(site: Site, browser: Browser, width: int) -> None:
    page, _ = browser.open((site.folder / "chapters/14_frameworks.html").as_uri(), width=width)
    text, table = page.evaluate("""['.bd-article', '.wide-table'].map(part =>
        document.querySelector(part).getBoundingClientRect().right)""")
    assert (table > text) == (width == 1280) and page.evaluate(SETTLED) <= width


def test_search_finds_the_chapter_with_no_network(site: Site, browser: Browser) -> None:
    page, log = browser.open((site.folder / "search.html").as_uri() + "?q=gradient")
    page.wait_for_selector("#search-results li a[href*='03_ring_all_reduce']")  # they are listed one by one
    log.assert_clean()


def test_follows_the_systems_colours(site_url: str, browser: Browser) -> None:
    themes = {}
    for scheme in ("light", "dark"):
        page, _ = browser.open(f"{site_url}/index.html", color_scheme=scheme)
        themes[scheme] = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert themes["light"] != themes["dark"]


def test_html_outputs_keep_their_background_in_the_dark_theme(site_url: str, browser: Browser) -> None:
    """Put an HTML output on a real page, as a player is one, and ask for its background."""
    page, _ = browser.open(f"{site_url}/chapters/03_ring_all_reduce.html", color_scheme="dark")
    page.evaluate("""document.querySelector('.bd-article').insertAdjacentHTML('beforeend',
        '<div class="cell_output"><div id="probe" class="output text_html">x</div></div>')""")
    assert page.evaluate("getComputedStyle(document.getElementById('probe')).backgroundColor") == "rgba(0, 0, 0, 0)"


def test_formulas_are_mathml_and_show(site_url: str, browser: Browser) -> None:
    page, _ = browser.open(f"{site_url}/chapters/03_ring_all_reduce.html")
    assert page.evaluate("document.querySelectorAll('math').length") > 0
    assert page.evaluate("[...document.querySelectorAll('math')].every(m => m.getBoundingClientRect().width > 2)")
    assert "$" not in page.evaluate("[...document.querySelectorAll('.bd-article p')].map(p => p.innerText).join()")


def test_a_plot_is_described_by_its_title(site: Site) -> None:
    pages = [path.read_text("utf-8") for path in site.folder.glob("*/[0-9]*.html")]
    described = [alt for page in pages for alt in re.findall(r'<img alt="([^"]*)"', page)]
    assert "What the busiest of 6 links carries" in described and "Two senders behind one card" in described
    assert len(described) > 30 and not [alt for alt in described if alt.endswith(".png")]


def test_a_number_keeps_its_percent_sign_and_sentences_in_tables_their_room(site: Site) -> None:
    planner, measured = ((site.folder / "chapters" / f"{name}.html").read_text("utf-8")
                         for name in ("10_planner", "88_planner_measured"))
    assert re.search(r"<p>[^<]*\d\u00a0%", planner) and not re.search(r"<p>[^<]*\d %", planner)
    assert re.search(r'<td class="[^"]*\bsentence\b', measured)


@pytest.mark.parametrize(("latex", "holds"), [
    (r"3.6 \cdot 1{,}678", "<mn>1,678</mn>"), (r"1, 2", "<mn>1</mn><mo>"), (r"-\infty", "<mi>&#x0221E;</mi>"),
    (r"\log^2 n", "<msup><mi>log</mi><mn>2</mn></msup>"), ("[x]-1", "<mo>&#x02212;</mo><mn>1"),
    (r"\{x\}-1", "<mo>&#x02212;</mo><mn>1"), ("n!-1", "<mo>&#x02212;</mo><mn>1"), (r"a\|-1", "<mo>&#x02212;</mo><mn>1"),
    (r"a = -b", '<mo form="prefix">&#x02212;</mo><mi>b</mi>'), ("(a)-b", "<mo>&#x02212;</mo><mi>b</mi>"),
    (r"2\sin\frac12", '<mn>2</mn><mspace width="0.167em" /><mi>sin</mi><mspace width="0.167em" /><mfrac>'),
    (r"N\log_2 N", '</mi><mspace width="0.167em" /><msub><mi>log</mi><mn>2</mn></msub><mspace width="0.167em" /><mi>')])
def test_formulas_have_the_spaces_of_latex(latex: str, holds: str) -> None:
    assert holds in to_mathml(None, latex, "inline")


def test_a_fraction_becomes_mathml() -> None:
    assert "<mfrac>" in to_mathml(None, r"\frac{2(p-1)}{p}", "inline")


def test_launch_buttons_lead_to_the_repository_of_the_build(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GITHUB_REPOSITORY", "somebody/fork")
    config = SimpleNamespace(lab_solutions=True, html_theme_options={"launch_buttons": {"binderhub_url": "https://mybinder.org"}})
    point_launch_buttons(None, config)
    assert config.html_theme_options["repository_url"] == "https://github.com/somebody/fork"
    assert config.html_theme_options["launch_buttons"]


def test_no_launch_button_leads_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GITHUB_REPOSITORY", raising=False)
    config = SimpleNamespace(lab_solutions=True, html_theme_options={"launch_buttons": {"binderhub_url": "https://mybinder.org"}})
    point_launch_buttons(None, config)
    assert not config.html_theme_options["launch_buttons"]


def test_a_website_without_solutions_does_not_lead_to_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GITHUB_REPOSITORY", "somebody/fork")
    config = SimpleNamespace(lab_solutions=False, html_theme_options={"launch_buttons": {"binderhub_url": "x"}})
    point_launch_buttons(None, config)
    assert config.html_theme_options == {"launch_buttons": {}}


def test_a_changed_widget_file_is_copied_anew(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Sphinx copies nothing when all pages are up to date, so a changed file has to be a changed setting."""
    def setting(style: str) -> str:
        (tmp_path / "widgets.css").write_text(style)
        monkeypatch.setitem(REGISTRY, "write", lambda folder, widgets: [tmp_path / "widgets.css"])
        config = SimpleNamespace(html_static_path=[], widget_files="")
        copy_widgets(SimpleNamespace(doctreedir=tmp_path), config)
        return config.widget_files

    assert setting("b { margin: 0 }") == setting("b { margin: 0 }") != setting("b { margin: 1px }")


@pytest.mark.parametrize("built", ["site", pytest.param("bare_site", marks=pytest.mark.slow)])
def test_hidden_checks_and_variants_are_nowhere(request: pytest.FixtureRequest, site: Site, built: str) -> None:
    """On no page, in no notebook or zip for download, not in what the search knows."""
    secret = set().union(*(kept_back(read_lab(lab)) for lab in LABS))
    assert len(secret) > 50
    for path, text in files(request.getfixturevalue(built)).items():
        found = [line for line in secret if line in text] + re.findall(r"\bhidden-\d|remove-cell", text)
        assert not found, f"{path}: {found}"


@pytest.mark.parametrize("path", LABS, ids=lambda path: path.stem)
def test_solutions_are_on_the_page_and_not_in_the_copy(site: Site, path: Path) -> None:
    wanted, texts = solutions(read_lab(path)), files(site)
    page, notebook, copy = f"labs/{path.stem}.html", f"_sources/labs/{path.name}", f"student/{path.stem}.zip"
    assert wanted and all(line in texts[page] and line in texts[notebook] for line in wanted)
    assert not [line for line in wanted if line in texts[copy]]


@cache
def without_solutions() -> dict[Path, str]:
    """What the website without solutions is built from; the tests of that website itself take a second build."""
    texts = {}
    for path in LABS:
        answers = {marks(cell)["id"]: cell.source for cell in released(read_lab(path)).cells
                   if marks(cell).get("kind") == "answer"}
        texts[path] = said(path.name, published(path.read_text("utf-8"), answers).encode())
    return texts


@pytest.mark.parametrize("path", LABS, ids=lambda path: path.stem)
def test_a_lab_that_is_published_without_solutions_has_none(path: Path) -> None:
    """Another lab's page must not have them either."""
    lab, texts = read_lab(path), without_solutions()
    assert "NotImplementedError" in texts[path]
    assert not [line for line in kept_back(lab) if line in texts[path]]
    for other, text in texts.items():
        assert not [line for line in solutions(lab) if line in text], other.name


@pytest.mark.slow
@pytest.mark.parametrize("path", LABS, ids=lambda path: path.stem)
def test_the_website_without_solutions_contains_none(bare_site: Site, path: Path) -> None:
    """The chapters are left out: they build what labs ask for."""
    wanted, texts = solutions(read_lab(path)), files(bare_site)
    page = texts[f"labs/{path.stem}.html"]
    assert "NotImplementedError" in page and "solutions are folded" not in page
    for name, text in texts.items():
        if "chapters/" not in name:
            assert not [line for line in wanted if line in text], name


@pytest.mark.slow
def test_the_website_without_solutions_is_built_without_a_warning(bare_site: Site) -> None:
    assert bare_site.status == 0 and "WARNING" not in bare_site.said, bare_site.said


@pytest.mark.slow
def test_the_search_does_not_know_the_solutions(site: Site, bare_site: Site) -> None:
    """Names that occur in solutions alone are found on one website, and not on the other."""
    names = {lab: set(re.findall(r"\b[a-z]\w{5,}", " ".join(solutions(read_lab(lab))))) for lab in LABS}
    known = {word for path, text in files(bare_site).items() if path != "searchindex.js"
             for word in re.findall(r"\w+", text.lower())}
    alone = {name.lower() for lab in LABS for name in names[lab]} - known
    full, bare = (built.folder.joinpath("searchindex.js").read_text("utf-8") for built in (site, bare_site))
    assert len([name for name in alone if name in full]) >= 3, f"{alone}: the search knows stems, in small letters"
    assert not [name for name in alone if name in bare]


@pytest.mark.parametrize("path", LABS, ids=lambda path: path.stem)
def test_the_student_copy_is_what_release_makes(site: Site, path: Path, tmp_path: Path) -> None:
    list(release_all([path], tmp_path))
    with zipfile.ZipFile(site.folder / "student" / f"{path.stem}.zip") as archive:
        got = {Path(name).name: archive.read(name) for name in archive.namelist()}
    assert got == {made.name: made.read_bytes() for made in tmp_path.iterdir()}


@pytest.mark.parametrize("path", first(*LABS), ids=lambda path: path.stem)
def test_the_student_copy_can_be_downloaded(site: Site, browser: Browser, path: Path, tmp_path: Path) -> None:
    """From a page in a folder, on a phone, with the keyboard."""
    page, log = browser.open((site.folder / "labs" / f"{path.stem}.html").as_uri(), width=390)
    link = page.get_by_role("link", name="Download the student copy")
    assert link.bounding_box()["y"] < 400 and link.bounding_box()["height"] >= 24
    with page.expect_download() as download:
        link.press("Enter")
    download.value.save_as(tmp_path / "copy.zip")
    assert (tmp_path / "copy.zip").read_bytes() == (site.folder / "student" / f"{path.stem}.zip").read_bytes()
    log.failed = [text for text in log.failed if f"{path.stem}.zip (net::ERR_ABORTED)" not in text]  # the download
    log.assert_clean()
