"""L4: Markdown of the book as plain text: no marks, links as their words, formulas in letters."""
from __future__ import annotations

import re

from book.authoring.symbols import FORMULA

CITED = re.compile(r"\s*\{cite\}`([^`]+)`")
LINK = re.compile(r"!?\[([^\]]*)\]\([^)]*\)")
MARKS = re.compile(r"^#+ |\*\*|(?<!\w)\*(?=\S)|(?<=\S)\*(?!\w)|</?(?:details|summary)>|`", re.M)
FRACTION = re.compile(r"\\[td]?frac\s*(?:\{([^{}]*)\}|(\w))\s*(?:\{([^{}]*)\}|(\w))")
COMMANDS = {"cdot": "·", "times": "×", "le": "≤", "ge": "≥", "approx": "≈", "to": "→", "dots": "…", "ldots": "…",
            "sum": "Σ", "top": "ᵀ", "alpha": "α", "beta": "β", "gamma": "γ", "kappa": "κ", "Psi": "Ψ", "tau": "τ",
            "pi": "π", "qquad": "  ", "quad": "  ", "left": "", "right": "", "big": "", "Big": "", "text": "",
            "mathrm": ""}


def plain(markdown: str) -> str:
    """The text as a slide shows it, paragraphs and lists as they stand."""
    text = FORMULA.sub(lambda found: in_letters(found[1] or found[2]), LINK.sub(r"\1", CITED.sub("", markdown)))
    return re.sub(r"(?<=\d) %", "\u00a0%", MARKS.sub("", text)).strip()  # a number and its sign stay on one line


def in_letters(latex: str) -> str:
    r"""A formula on one line: `2\frac{N-1}{N}n` is 2(N-1)/N n. What has no letter here keeps its name."""
    before, text = "", latex
    while before != text:
        before, text = text, FRACTION.sub(_fraction, text)
    text = re.sub(r"\\([A-Za-z]+)", lambda found: COMMANDS.get(found[1], found[1]), text)
    return " ".join(re.sub(r"\\[,;!: ]|[{}&\\]", lambda found: " " if found[0][0] == "\\" else "", text).split())


def cited(markdown: str) -> list[str]:
    """The keys of the sources that a text cites, each once."""
    return list(dict.fromkeys(key.strip() for found in CITED.findall(markdown) for key in found.split(",")))


def _fraction(found: re.Match[str]) -> str:
    above, below = found[1] or found[2], found[3] or found[4]
    return f"{_grouped(above)}/{_grouped(below)} "


def _grouped(term: str) -> str:
    return term if re.fullmatch(r"[\w\\]+", term) else f"({term})"
