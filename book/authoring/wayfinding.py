"""L4: how readers find their way on the website: terms that lead to the glossary, and what the search finds first.

Sphinx's search finds a title only if the query is at least half as long. So the words of pages' titles, and parts of
Chinese terms, are put into its index as titles of their own.
"""
from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

from docutils import nodes
from sphinx.application import Sphinx

GLOSSARY, CHAPTERS = "chapters/91_glossary", re.compile(r"chapters/(\d+)_")
CHINESE = re.compile("[\u4e00-\u9fff]{2,}")
NO_PLACE = (nodes.reference, nodes.literal, nodes.title, nodes.raw, nodes.term, nodes.math, nodes.literal_block,
            nodes.citation)
# Terms that are also plain words, and the pages, by number, whose first use of them is the term.
PLAIN_WORDS = {"gather": {"01", "02", "81"}, "reduce": {"01", "81"}, "root": {"01", "02", "81", "83"},
               "scatter": {"01", "02"}, "stage": {"06", "86"}, "step": {"02", "03", "06"},
               "store": {"01", "11", "12", "80", "81", "88", "95"}, "work": set()}
INDEX = ("Search.setIndex(", ")")
Anchors = dict[str, str]  # of terms, by the term
Titles = dict[str, list[list[int | str | None]]]  # of the search's index: pages, by number, and anchors in them


def anchors(app: Sphinx) -> Anchors:
    """Where each term of the glossary stands, by the term as it is written there."""
    terms = app.env.domaindata["std"].get("terms", {})
    return {term: label for term, (page, label) in terms.items() if page == GLOSSARY}


def link_terms(app: Sphinx, doctree: nodes.document, page: str) -> None:
    """Lead from the first use of each term in a chapter's paragraphs to the glossary."""
    chapter = CHAPTERS.match(page)
    if app.builder.format != "html" or page == GLOSSARY or chapter is None:
        return
    left = {term.lower(): label for term, label in anchors(app).items()
            if not CHINESE.search(term) and chapter[1] in PLAIN_WORDS.get(term.lower(), {chapter[1]})}
    to, any_term = app.builder.get_relative_uri(page, GLOSSARY), pattern_of(tuple(left))
    for text in [text for paragraph in doctree.findall(nodes.paragraph) for text in paragraph.findall(nodes.Text)]:
        if left and any_term.search(text.astext()) and not in_any(text, NO_PLACE):
            parts = list(linked(text.astext(), any_term, left, to))
            if len(parts) > 1:
                text.parent.replace(text, parts)


def in_any(node: nodes.Node, kinds: tuple[type, ...]) -> bool:
    """Whether a node is inside one of these kinds."""
    while node.parent is not None:
        node = node.parent
        if isinstance(node, kinds):
            return True
    return False


def linked(text: str, any_term: re.Pattern[str], left: Anchors, to: str) -> Iterator[nodes.Node]:
    """The text, with a link at each term of `left`, which is taken from there; `any_term` finds all of the page's."""
    done = 0
    for found in any_term.finditer(text):
        label = left.pop(found[1].lower(), None)
        if label is None:
            continue
        yield nodes.Text(text[done:found.start()])
        yield nodes.reference("", found[0], internal=True, refuri=f"{to}#{label}", classes=["term"])
        done = found.end()
    yield nodes.Text(text[done:])


@cache
def pattern_of(terms: tuple[str, ...]) -> re.Pattern[str]:
    """Finds these terms in a text, in singular or plural, the longest first."""
    longest_first = "|".join(re.escape(term) for term in sorted(terms, key=len, reverse=True))
    return re.compile(rf"(?<![\w-])({longest_first})(?:e?s)?(?![\w-])", re.IGNORECASE)


def name_titles(app: Sphinx, error: Exception | None) -> None:
    """Let the search find a page by a word of its title, and a Chinese term by a part of it."""
    path = Path(app.outdir, "searchindex.js")
    if error is not None or not path.is_file():
        return
    begin, end = INDEX
    index = json.loads(path.read_text("utf-8").removeprefix(begin).removesuffix(end))
    numbers = {name: number for number, name in enumerate(index["docnames"])}
    index["alltitles"] = with_words(index["alltitles"], titles_of(app), anchors(app), numbers)
    path.write_text(begin + json.dumps(index, separators=(",", ":"), ensure_ascii=False) + end, "utf-8")


def titles_of(app: Sphinx) -> dict[str, str]:
    """The titles of pages, by page, with what the table of contents calls them."""
    contents = Path(app.srcdir, "_toc.yml").read_text("utf-8")
    listed = dict(re.findall(r'- file: (\S+)\n +title: "?([^"\n]+)', contents))
    return {page: f"{title.astext()} {listed.get(page, '')}" for page, title in app.env.titles.items()}


def with_words(titles: Titles, pages: Mapping[str, str], terms: Anchors, numbers: Mapping[str, int]) -> Titles:
    """The titles with one for each word of a page's title, and for each two adjacent characters of a Chinese term.

    A part leads to the term that ends with it, if there is one, else to the shortest.
    """
    found: Titles = {title: list(places) for title, places in titles.items()}
    for page, title in pages.items():
        for word in sorted(set(re.findall(r"[a-z][\w-]{2,}", title.lower()))):
            place: list[int | str | None] = [numbers[page], None]
            if page in numbers and place not in found.setdefault(word, []):
                found[word].append(place)
    parts: dict[str, str] = {}
    for term in sorted(terms, key=len, reverse=True):
        for run in CHINESE.findall(term):
            twos = [run[i:i + 2] for i in range(len(run) - 1)]
            parts.update({two: term for two in twos if two == twos[-1] or not parts.get(two, "").endswith(two)})
    for part, term in parts.items():
        found.setdefault(part, []).append([numbers[GLOSSARY], terms[term]])
    return found


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the hooks with Sphinx."""
    app.connect("doctree-resolved", link_terms, priority=800)
    app.connect("build-finished", name_titles)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
