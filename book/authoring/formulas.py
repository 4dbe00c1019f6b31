"""L4: formulas as MathML, which browsers set without scripts."""
from __future__ import annotations

import html
import re

from docutils import nodes
from latex2mathml.converter import convert
from sphinx.application import Sphinx
from sphinx.util import logging
from sphinx.util.math import get_node_equation_number
from sphinx.writers.html5 import HTML5Translator

log = logging.getLogger(__name__)


def inline_math(translator: HTML5Translator, node: nodes.math) -> None:
    """Write an inline formula as MathML."""
    translator.body.append(to_mathml(node, node.astext(), "inline"))
    raise nodes.SkipNode


def display_math(translator: HTML5Translator, node: nodes.math_block) -> None:
    """Write a displayed formula as MathML in a box of its own, which scrolls on a narrow screen, with its number."""
    translator.body.append(translator.starttag(node, "div", CLASS="math"))
    translator.body.append(to_mathml(node, node.astext(), "block"))
    if node["number"]:
        number = get_node_equation_number(translator, node)
        translator.body.append(f'<span class="eqno">({number})')
        translator.add_permalink_ref(node, "Link to this equation")
        translator.body.append("</span>")
    translator.body.append("</div>\n")
    raise nodes.SkipNode


def to_mathml(node: nodes.Node, latex: str, display: str) -> str:
    """Convert LaTeX to MathML; for a formula that can't be parsed, warn with its place and show its source."""
    try:
        return spaced(convert(latex.strip(), display=display))
    except Exception as error:  # latex2mathml has no common base class for its errors
        log.warning("formula %r can't be turned into MathML: %r", latex, error, location=node)
        return f"<code>{html.escape(latex)}</code>"


# What latex2mathml writes and browsers set too wide or too tight, and what stands there instead: the comma of thousands
# is a part of its number, infinity is no operator, a minus after an operator is a sign, and a function has thin spaces.
ENDS = ("&#x00029;", "&#x0007D;", "&#x0007C;", "&#x02016;", "&#x00021;", "]", "!")  # behind these a minus is no sign
CLOSED = "".join(f"(?<!{end}</mo>)" for end in ENDS)
ALONE = "(?<!<msub>)(?<!<msup>)(?<!<msubsup>)"
FUNCTION = "<mi>(?:sin|cos|exp|log|ln)</mi>"
SPACES = ((re.compile(r"</mn><mrow><mo>&#x0002C;</mo></mrow><mn>(?=\d{3})"), ","),
          (re.compile(r"<mo>&#x0221E;</mo>"), "<mi>&#x0221E;</mi>"),
          (re.compile(rf"(?<=</mo>){CLOSED}<mo>&#x02212;</mo>"), '<mo form="prefix">&#x02212;</mo>'),
          (re.compile(rf"(?<=</m[in]>)(?=(?:<msub>)?{FUNCTION})"), '<mspace width="0.167em" />'),
          (re.compile(rf"({ALONE}{FUNCTION}|<msub>{FUNCTION}<m[in]>\w+</m[in]></msub>)(?!<mo|<mspace|</)"),
           r'\1<mspace width="0.167em" />'))


def spaced(mathml: str) -> str:
    """A formula with the spaces that LaTeX would set."""
    for found, instead in SPACES:
        mathml = found.sub(instead, mathml)
    return mathml


def setup(app: Sphinx) -> dict[str, bool]:
    """Register how formulas are written with Sphinx."""
    app.add_html_math_renderer("mathml", (inline_math, None), (display_math, None))
    return {"parallel_read_safe": True, "parallel_write_safe": True}
