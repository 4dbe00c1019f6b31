"""L3: all widgets, and the scripts that draw each: what pages of the website, live widgets and tests load.

The website runs this file by its path, without the package, so it imports only the standard library.
"""
from __future__ import annotations

from html import escape
from pathlib import Path

# The twin, which simulates on the page: what a widget lists first that does so. Beside the widgets' folder.
TWIN = tuple(f"../twin/{room}" for room in ("promise", "schedule", "trace", "links", "network", "collectives",
                                            "pipelines", "messages", "shared", "simulate"))
# The planner's part of it, and what that needs of the rest.
PLANNER = tuple(f"../twin/{room}" for room in ("promise", "links", "plan_layouts", "plan_bytes", "plan_seconds",
                                               "plan_step", "plan_answer"))
WIDGETS = {  # by the name in their HTML, scripts in the order in which they load
    "player": ("scene", "player"),
    "timeline": ("scene", "timeline"),
    "pipeline": ("scene", "pipeline"),
    "game": ("scene", "pipeline", "game"),
    "shards": ("scene", "shards"),
    "mesh": ("scene", "mesh"),
    "layouts": ("scene", "layouts"),
    "memory": ("scene", "memory"),
    "memory_bars": ("scene", "memory_bars"),
    "ring": (*TWIN, "scene", "player", "ring"),
    "duel": (*TWIN, "scene", "player", "ring", "duel"),
    "race_explorer": (*TWIN, "scene", "cluster", "explorer", "race_explorer"),
    "pipeline_explorer": (*TWIN, "scene", "cluster", "explorer", "pipeline_explorer"),
    "plan_explorer": (*PLANNER, "scene", "layouts", "cluster", "explorer", "plan_explorer"),
}
ASSETS = Path(__file__).parent
STYLE = "widgets.css"  # the styles of all widgets
SCRIPTS = tuple(dict.fromkeys(f"{script}.js" for scripts in (TWIN, PLANNER, *WIDGETS.values()) for script in scripts))


def needed(widgets: set[str]) -> list[str]:
    """The files that a page with these widgets loads, in order: the styles, if there is a widget, and the scripts.

    They are named by their paths from `ASSETS`. The website has them all in one folder.
    """
    wanted = {f"{script}.js" for widget in widgets for script in WIDGETS[widget]}
    return [STYLE] * bool(wanted) + [name for name in SCRIPTS if name in wanted]


def links(folder: str, widgets: set[str]) -> str:
    """The HTML that loads what these widgets need from `folder`: a relative or absolute address."""
    return "".join(f'<link rel="stylesheet" href="{folder}/{name}">' if name == STYLE else
                   f'<script defer src="{folder}/{name}"></script>' for name in needed(widgets))


def module(widget: str) -> str:
    """The JavaScript module of a live widget: the scripts that it needs, and the export."""
    code = "".join((ASSETS / name).read_text("utf-8") for name in needed({widget}) if name != STYLE)
    return f"{code}export default globalThis.lockstep{widget.capitalize()};\n"


def standalone(widget: str, title: str, html: str) -> str:
    """A whole page of one widget, whose HTML is `html`, with its styles and scripts inlined: it loads nothing."""
    style, *scripts = [(ASSETS / name).read_text("utf-8") for name in needed({widget})]
    code = "".join(f"<script>{script}</script>\n" for script in scripts)
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>
<meta name="viewport" content="width=device-width, initial-scale=1"><meta name="color-scheme" content="light dark">
<style>body {{ margin: 20px }}
{style}</style></head>
<body>{html}
{code}</body></html>
"""
