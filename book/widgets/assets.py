"""L3: the widgets' JavaScript and CSS: which files a page loads, in order, and the module that a live widget runs."""
from __future__ import annotations

from pathlib import Path

ASSETS = Path(__file__).parent  # for the site, tests and benchmarks to copy from
STYLES = ("controls.css", "player.css")
SCRIPTS = ("controls.js", "player.js")


def links(folder: str) -> str:
    """The HTML that loads all of it, as the website does, from `folder`: a relative or absolute address."""
    styles = [f'<link rel="stylesheet" href="{folder}/{name}">' for name in STYLES]
    return "".join(styles + [f'<script defer src="{folder}/{name}"></script>' for name in SCRIPTS])


def module(widget: str) -> str:
    """The JavaScript module of a live widget, "player" or "timeline": what all share, its own part, and the export."""
    code = _text("controls.js") + _text(f"{widget}.js")
    return f"{code}export default globalThis.lockstep{widget.capitalize()};\n"


def style(widget: str) -> str:
    """The CSS of a live widget: what all share, and its own part."""
    return _text("controls.css") + _text(f"{widget}.css")


def _text(name: str) -> str:
    return (ASSETS / name).read_text(encoding="utf-8")
