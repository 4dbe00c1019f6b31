"""The reference pages: every old call is a row that ran, every term is complete and taught where it says."""
from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass

import nbformat
import pytest
from nbformat import NotebookNode

from tests.browser import Browser
from tests.website import ROOT, Site

CALLS = "chapters/90_legacy_map"
GLOSSARY = "chapters/91_glossary"
CHINESE = re.compile("[\u4e00-\u9fff]")
LINK = re.compile(r" \[([^]]+)\]\(((?:\.\./labs/)?\w+\.ipynb)(#[\w-]+)?\)$")
OTHER_SPELLINGS = re.compile(
    r"\b(all ?reduce|all ?gather|reduce ?scatter|all ?to ?all|micro ?batch|point to point)\b", re.I)


@dataclass(frozen=True)
class Term:
    """An entry of the glossary."""

    theme: str
    english: str
    chinese: str
    meaning: str
    page: str | None


def terms() -> Iterator[Term]:
    """Read the glossary's entries: a line in English, one in Chinese, an indented sentence that may end in a link."""
    text = (ROOT / f"{GLOSSARY}.md").read_text("utf-8")
    for theme, block in re.findall(r"^## ([^\n]+)\n\n```\{glossary\}\n(.*?)^```$", text, re.M | re.S):
        for entry in block.strip().split("\n\n"):
            english, chinese, body = entry.split("\n")
            link = LINK.search(body)
            yield Term(theme, english, chinese, LINK.sub("", body).strip(), link[2] if link else None)


ALL_TERMS = list(terms())


def notebook(page: str) -> NotebookNode:
    return nbformat.read(ROOT / f"{page}.ipynb", as_version=4)


def calls() -> Iterator[tuple[str, str, NotebookNode]]:
    """Each heading of an old call without its backticks, the name in the row below it, and that row's cell."""
    headings: list[str] = []
    for cell in notebook(CALLS).cells:
        if cell.cell_type == "markdown":
            headings = re.findall(r"^### (.*)$", cell.source, re.M) or headings
            continue
        rows = [node for node in ast.walk(ast.parse(cell.source)) if isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute) and node.func.attr == "row"]
        for row in rows:
            yield headings.pop(0).replace("`", ""), ast.literal_eval(row.args[0]), cell


ALL_CALLS = list(calls())


def test_every_old_call_has_a_heading_and_a_row_of_one_name() -> None:
    headings = [line for cell in notebook(CALLS).cells if cell.cell_type == "markdown"
                for line in re.findall(r"^### .*$", cell.source, re.M)]
    assert 25 <= len(ALL_CALLS) == len(headings) == len({name for _, name, _ in ALL_CALLS})
    assert [heading for heading, _, _ in ALL_CALLS] == [name for _, name, _ in ALL_CALLS]


@pytest.mark.parametrize("name, cell", [(name, cell) for _, name, cell in ALL_CALLS])
def test_every_row_is_shown_below_its_code(name: str, cell: NotebookNode) -> None:
    """That it is true is checked where it is made: the cell raises otherwise, and nbval runs it."""
    (shown,) = [output.data for output in cell.outputs if "text/markdown" in output.get("data", {})]
    assert shown["text/plain"].startswith(name + " ")
    assert re.match(r"\*\*Today\*\* it (raises|warns|fails|hangs|runs)", shown["text/markdown"])


def test_the_table_of_calls_leads_to_every_heading(site: Site) -> None:
    built = (site.folder / f"{CALLS}.html").read_text("utf-8")
    table = built[built.index("call-map"):]
    anchors = re.findall(r'<tr><td><a href="#([^"]+)"', table[:table.index("</table>")])
    assert len(anchors) == len(ALL_CALLS) == len(set(anchors))
    assert not [anchor for anchor in anchors if f'id="{anchor}"' not in built]


def test_every_term_stands_once_and_in_order() -> None:
    names = [term.english.casefold() for term in ALL_TERMS]
    assert 60 <= len(names) == len(set(names)) and len({term.chinese for term in ALL_TERMS}) == len(names)
    by_theme = {term.theme: [other.english.casefold() for other in ALL_TERMS if other.theme == term.theme]
                for term in ALL_TERMS}
    assert all(listed == sorted(listed) for listed in by_theme.values()), by_theme


@pytest.mark.parametrize("term", ALL_TERMS, ids=lambda term: term.english)
def test_a_term_is_complete_and_taught_where_it_says(term: Term) -> None:
    assert CHINESE.search(term.chinese) and not CHINESE.search(term.english)
    assert re.fullmatch(r"[^.]+\.", term.meaning.replace("torch.distributed", "")), "one sentence"
    assert not OTHER_SPELLINGS.search(term.english + " " + term.meaning)
    if term.page:
        chapter = notebook(f"chapters/{term.page.removesuffix('.ipynb')}")
        text = " ".join(" ".join(cell.source for cell in chapter.cells).split())
        assert re.search(rf"\b{re.escape(term.english)}", text, re.I), f"{term.page} has no {term.english}"


def test_terms_have_addresses_and_chinese_is_marked(site: Site) -> None:
    built = (site.folder / f"{GLOSSARY}.html").read_text("utf-8")
    assert len(re.findall(r'<dt id="term-', built)) == 2 * len(ALL_TERMS)
    assert len(re.findall('<span lang="zh-Hans">', built)) == len(ALL_TERMS)


@pytest.mark.parametrize("query", ["all-reduce", "梯度桶"])
def test_search_finds_a_term_in_either_language(site: Site, browser: Browser, query: str) -> None:
    page, log = browser.open((site.folder / "search.html").as_uri() + f"?q={query}")
    page.wait_for_selector(f"#search-results li a[href*='{GLOSSARY}']")  # they are listed one by one
    log.assert_clean()
