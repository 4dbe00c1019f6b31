"""L4: how readers find their way on the website: terms that lead to the glossary, and what the search finds first.

Sphinx's search finds a title only if the query is at least half as long. So the words of pages' titles, and parts of
Chinese terms, are put into its index as titles of their own. What `search_words.txt` lists, and terms of the glossary
that link to a section, are put there as entries of a printed index, which it finds first.
"""
from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx

GLOSSARY, CHAPTERS = "chapters/91_glossary", re.compile(r"chapters/(\d+)_")
CHINESE = re.compile("[\u4e00-\u9fff]{2,}")
NO_PLACE = (nodes.reference, nodes.literal, nodes.title, nodes.raw, nodes.term, nodes.math, nodes.literal_block,
            nodes.citation)
# Terms that are also plain words, and the pages, by number, whose first use of them is the term.
PLAIN_WORDS = {"card": {"02", "03", "05", "08", "09", "11", "15", "80", "81", "83", "87", "92"},
               "gather": {"01", "02", "81"}, "host": {"11", "80", "87", "94", "95"}, "reduce": {"01", "81"},
               "root": {"01", "02", "81", "83"}, "scatter": {"01", "02"}, "stage": {"86"}, "step": {"02", "03", "06"},
               "store": {"01", "11", "12", "80", "81", "95"}, "work": set()}
SPELLED = {"zero": "ZeRO"}  # terms that are plain words in small letters
LAB_QUOTED = 400  # characters: the tasks say what the chapters say
INDEX = ("Search.setIndex(", ")")
TAUGHT = re.compile(r"^(\S[^\n]*)\n(\S[^\n]*)\n  .*\[[^]]+\]\(([\w/.]+?)\.ipynb(#[\w-]+)?\)$", re.MULTILINE)
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
        word = found[1].lower()
        label = left.pop(word, None) if SPELLED.get(word, found[1]) == found[1] else None
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
    """Let the search find a page by a word of its title or one listed for it, and a Chinese term by a part of it."""
    path = Path(app.outdir, "searchindex.js")
    if error is not None or not path.is_file():
        return
    begin, end = INDEX
    index = json.loads(path.read_text("utf-8").removeprefix(begin).removesuffix(end))
    numbers = {name: number for number, name in enumerate(index["docnames"])}
    index["alltitles"] = with_words(index["alltitles"], titles_of(app), anchors(app), numbers)
    index["indexentries"] = {words: [[numbers[page], anchor, True]] for words, (page, anchor)
                             in found_first(Path(app.srcdir), list(numbers)).items()}
    path.write_text(begin + json.dumps(index, separators=(",", ":"), ensure_ascii=False) + end, "utf-8")


def write_texts(app: Sphinx, error: Exception | None) -> None:
    """Write the paragraphs of all pages, and how labs begin, to the script from which the search's page quotes."""
    if error is not None or app.builder.format != "html":
        return
    texts = {page: " ".join(paragraphs_of(app.env.get_doctree(page))) for page in sorted(app.env.found_docs)}
    texts.update({page: text[:LAB_QUOTED] for page, text in texts.items() if page.startswith("labs/")})
    written = json.dumps(texts, ensure_ascii=False, separators=(",", ":"))
    Path(app.outdir, "_static", "search_texts.js").write_text(f"const SEARCH_TEXTS = {written};\n", "utf-8")


def paragraphs_of(doctree: nodes.document) -> Iterator[str]:
    """A page's paragraphs as plain text, formulas in their letters."""
    for paragraph in doctree.findall(nodes.paragraph):
        parts = (text.astext() for text in paragraph.findall(nodes.Text) if not isinstance(text.parent, nodes.raw))
        yield " ".join("".join(parts).split())


def load_excerpts(app: Sphinx, page: str, template: str, context: dict[str, Any], doctree: Any) -> None:
    """Make the search's page quote what it finds."""
    if page == "search":
        for name in ("search_texts.js", "search_excerpts.js"):
            app.add_js_file(name, defer="defer")


def found_first(root: Path, pages: Iterable[str]) -> dict[str, tuple[str, str]]:
    """The page, and the id of a section in it, that each of these words lead to; a list's words go before a term's."""
    glossary = (root / f"{GLOSSARY}.md").read_text("utf-8")
    found = {term.lower(): (f"chapters/{page}", (section or "")[1:]) for term, _, page, section
             in TAUGHT.findall(glossary) if not page.startswith("../")}
    numbered = {page: CHAPTERS.match(page) for page in pages}
    found.update({f"chapter {int(chapter[1])}": (page, "") for page, chapter in numbered.items()
                  if chapter and chapter[1] < "80"})
    by_name = {CHAPTERS.sub("", page): page for page, chapter in numbered.items() if chapter}
    for line in Path(__file__).with_name("search_words.txt").read_text("utf-8").splitlines():
        name, _, words = line.partition(": ")
        if not line.startswith("#") and name in by_name:
            found.update({word.lower(): (by_name[name], "") for word in words.split(", ")})
    return found


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
    app.connect("build-finished", write_texts)
    app.connect("html-page-context", load_excerpts, priority=800)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
