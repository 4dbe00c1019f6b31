"""How readers find their way on the website: terms lead to the glossary, and the search finds titles first."""
from __future__ import annotations

import re
from typing import Any

import pytest
from docutils import nodes

from book.authoring.wayfinding import PLAIN_WORDS, linked, pattern_of, with_words
from tests.browser import Browser
from tests.website import Site

READS = ["_toc.yml", "_config.yml", "chapters/91_glossary.md", "book/authoring/*"]
TERMS = "a.term"


def searched(site: Site, browser: Browser, query: str) -> Any:
    """The first result of a search, on a page from a folder; they are listed one by one."""
    page, _ = browser.open((site.folder / "search.html").as_uri() + f"?q={query}")
    page.wait_for_selector("#search-results li a")
    return page.locator("#search-results li a").first


@pytest.mark.parametrize("query, target", [("FSDP", "04_sharded_data_parallel.html"), ("气泡", "91_glossary.html#"),
                                           ("ring", "03_ring_all_reduce.html")])
def test_the_search_finds_a_title_first(site: Site, browser: Browser, query: str, target: str) -> None:
    first = searched(site, browser, query)
    address = first.get_attribute("href")
    assert target in address
    if "#" in target:
        first.click()
        term = first.page.locator(f"[id='{address.split('#')[1]}']")
        assert "流水线气泡" in term.locator("xpath=..").inner_text()


def test_a_term_leads_to_the_glossary_where_it_is_first_used(site: Site, browser: Browser) -> None:
    page, log = browser.open((site.folder / "chapters" / "03_ring_all_reduce.html").as_uri())
    names = [text.lower() for text in page.locator(TERMS).all_text_contents()]
    assert len(names) > 10 and len(set(names)) == len(names), "each once"
    assert page.locator(f":is(h1, h2, h3, code, pre, a a) {TERMS}").count() == 0
    page.locator(TERMS).first.click()
    page.wait_for_url("**/91_glossary.html#term-*")
    assert page.evaluate("!!document.querySelector(decodeURIComponent(location.hash))")
    log.assert_clean()


def test_plain_words_lead_to_the_glossary_only_where_they_are_terms(site: Site) -> None:
    linked_on = {word: set() for word in PLAIN_WORDS}
    for path in (site.folder / "chapters").glob("[0-9]*.html"):
        for word in re.findall(r'<a class="term[^>]*>([a-z]+?)s?</a>', path.read_text("utf-8"), re.IGNORECASE):
            linked_on.get(word.lower(), set()).add(path.name[:2])
    assert linked_on == PLAIN_WORDS


def test_a_term_is_a_whole_word_or_its_plural() -> None:
    left = {"rank": "term-rank", "ring all-reduce": "term-ring"}
    any_term = pattern_of(tuple(left))
    parts = list(linked("Ranked; ranks pass a ring all-reduce to rank 1.", any_term, left, "glossary.html"))
    links = [(part.astext(), part["refuri"]) for part in parts if isinstance(part, nodes.reference)]
    assert links == [("ranks", "glossary.html#term-rank"), ("ring all-reduce", "glossary.html#term-ring")]
    assert "".join(part.astext() for part in parts) == "Ranked; ranks pass a ring all-reduce to rank 1." and not left


def test_parts_of_chinese_terms_lead_to_the_term_that_ends_so() -> None:
    found = with_words({}, {"chapters/1": "Ring all-reduce"}, {"零气泡调度": "b", "流水线气泡": "a"},
                       {"chapters/1": 0, "chapters/91_glossary": 1})
    assert found["气泡"] == [[1, "a"]] and found["零气"] == [[1, "b"]] and found["ring"] == [[0, None]]
