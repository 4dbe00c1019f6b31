"""L4: the letters in chapters' formulas, and the column of the page of symbols that says where each is first used."""
from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from sphinx.application import Sphinx

PAGE = "chapters/98_symbols"
GREEK = ("alpha beta gamma delta Delta epsilon varepsilon eta theta kappa lambda mu pi rho tau Psi ell").split()
# Letters that an earlier chapter has in another sense, which its text gives, and the chapter where the book's begins.
BEGINS = {"v": "06", "W": "15", "P": "15", "H": "15", "k": "11", "V": "05", "S": "02", "rho": "09", "pi": "09",
          "mu": "15", "u": "15"}
CODE = re.compile(r"```.*?```|`[^`\n]*`", re.DOTALL)
FORMULA = re.compile(r"\$\$(.+?)\$\$|(?<![\\$\w])\$(?![\s{])([^$\n]+?)(?<!\s)\$(?!\w)", re.DOTALL)
WORDS = re.compile(r"\\(?:text|mathrm|begin|end)\{[^}]*\}|\\([A-Za-z]+)")
INDEX = re.compile(r"_\w")  # of ranks or experts: a letter with a row of its own
ROW = re.compile(r"^\| (?=\$)(.*?) \|.*\|$|^\| symbol \|.*\|$|^\|---\|---\|---\|$", re.MULTILINE)


def symbols_in(latex: str) -> set[str]:
    r"""The letters that a formula uses: `2\frac{t-1}{t}n` has n and t; words in \text and \log are none."""
    greek = {name for name in WORDS.findall(latex) if name in GREEK}
    return greek | set(re.findall("[A-Za-z]", WORDS.sub(" ", latex)))


def formulas_of(path: Path) -> Iterator[str]:
    """The formulas in a page's text, code left out."""
    text = path.read_text("utf-8")
    if path.suffix == ".ipynb":
        cells = json.loads(text)["cells"]
        text = "\n\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")
    for displayed, inline in FORMULA.findall(CODE.sub("", text)):
        yield displayed or inline


@cache
def chapters(root: Path) -> list[Path]:
    """The files of the chapters in the order of the table of contents."""
    listed = re.findall(r"- file: (chapters/\S+)", (root / "_toc.yml").read_text("utf-8"))
    files = [root / f"{name}{suffix}" for name in listed if name != PAGE for suffix in (".ipynb", ".md")]
    return [path for path in files if path.is_file()]


def first_uses(root: Path) -> dict[str, Path]:
    """The chapter in which each letter is first used in the book's sense."""
    found: dict[str, Path] = {}
    for path in chapters(root):
        for formula in formulas_of(path):
            for symbol in symbols_in(formula):
                if path.name[:2] >= BEGINS.get(symbol, ""):
                    found.setdefault(symbol, path)
    return found


def add_first_uses(app: Sphinx, page: str, source: list[str]) -> None:
    """Give the tables of the page of symbols their last column."""
    if page != PAGE:
        return
    root = Path(app.srcdir)
    first = first_uses(root)
    for path in chapters(root):
        app.env.note_dependency(path)

    def with_place(row: re.Match[str]) -> str:
        if row[1] is None:
            return row[0] + (" first used |" if "symbol" in row[0] else "---|")
        symbols = [symbol for latex in FORMULA.findall(row[1]) for symbol in symbols_in(INDEX.sub("", latex[1]))]
        paths = [path for path in chapters(root) if path in {first.get(symbol) for symbol in symbols}]
        return f"{row[0]} {f'[{place(paths[0])}]({paths[0].name})' if paths else ''} |"

    source[0] = ROW.sub(with_place, source[0])


def place(path: Path) -> str:
    """What a table calls a chapter."""
    number = path.name[:2]
    return f"chapter\u00a0{int(number)}" if number < "80" else "going deeper"  # on one line, in a narrow column


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the hook with Sphinx."""
    app.connect("source-read", add_first_uses)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
