"""L3: the widgets' JavaScript and CSS: which files a page loads, in order, and the module that a live widget runs."""
from __future__ import annotations

from pathlib import Path

ASSETS = Path(__file__).parent  # for the site, tests and benchmarks to copy from
PARTS = {  # what widgets are made of
    "player": ("controls", "player"), "timeline": ("controls", "lanes", "timeline"),
    "pipeline": ("controls", "lanes", "pipeline"), "game": ("controls", "lanes", "pipeline", "game"),
    "shards": ("controls", "shards"), "mesh": ("controls", "lanes", "mesh"), "layouts": ("controls", "layouts"),
    "memory": ("controls", "memory"), "memorybars": ("controls", "memory", "memory_bars")}
ALL = tuple(dict.fromkeys(part for parts in PARTS.values() for part in parts))
STYLES, SCRIPTS = tuple(f"{part}.css" for part in ALL), tuple(f"{part}.js" for part in ALL)


def links(folder: str) -> str:
    """The HTML that loads all of it, as the website does, from `folder`: a relative or absolute address."""
    styles = [f'<link rel="stylesheet" href="{folder}/{name}">' for name in STYLES]
    return "".join(styles + [f'<script defer src="{folder}/{name}"></script>' for name in SCRIPTS])


def module(widget: str) -> str:
    """The JavaScript module of a live widget, named as in PARTS: the scripts that it needs, and the export."""
    code = "".join(_text(f"{part}.js") for part in PARTS[widget])
    return f"{code}export default globalThis.lockstep{widget.capitalize()};\n"


def style(widget: str) -> str:
    """The CSS of a live widget."""
    return "".join(_text(f"{part}.css") for part in PARTS[widget])


def _text(name: str) -> str:
    return (ASSETS / name).read_text(encoding="utf-8")
