"""L3: all widgets, and the scripts that draw each: what pages of the website, live widgets and tests load.

The website runs this file by its path, without the package, so it imports only the standard library and a minifier.
"""
from __future__ import annotations

from html import escape
from pathlib import Path

# The twin, which simulates on the page: what a widget lists first that does so. Beside the widgets' folder.
TWIN = tuple(f"../twin/{room}" for room in ("promise", "schedule", "trace", "links", "network", "collectives",
                                            "pipelines", "messages", "shared", "simulate", "streams"))
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
    **{f"{name}_explorer": (*TWIN, "scene", "explorer", "traffic_explorers") for name in ("race", "server", "axes")},
    **{f"{name}_explorer": (*TWIN, "scene", "explorer", "step_explorers") for name in ("pipeline", "bucket",
                                                                                        "sharding")},
    "plan_explorer": (*PLANNER, "scene", "layouts", "explorer", "plan_explorer"),
}
ASSETS = Path(__file__).parent
STYLE = "widgets.css"  # the styles of all widgets
SCRIPTS = tuple(dict.fromkeys(f"{script}.js" for scripts in (TWIN, *WIDGETS.values()) for script in scripts))
# What a page loads as one file: scripts of no use without each other, or of the same chapters: those that draw a
# training step in lanes, and those that draw models cut over ranks. A reader of several chapters loads them once.
BUNDLES = {"twin.js": tuple(f"{room}.js" for room in TWIN),
           "planner.js": (*(f"{room}.js" for room in PLANNER if room not in TWIN), "plan_explorer.js"),
           "explorers.js": ("explorer.js", "traffic_explorers.js", "step_explorers.js"),
           "steps.js": ("timeline.js", "pipeline.js", "game.js", "memory.js", "memory_bars.js"),
           "splits.js": ("shards.js", "mesh.js", "layouts.js"),
           "landing.js": ("ring.js", "duel.js")}


def sources(widgets: set[str]) -> list[str]:
    """The files that these widgets are made of, in the order in which they load, by their paths from `ASSETS`."""
    wanted = {f"{script}.js" for widget in widgets for script in WIDGETS[widget]}
    return [STYLE] * bool(wanted) + [name for name in SCRIPTS if name in wanted]


def needed(widgets: set[str]) -> list[str]:
    """The files that a page with these widgets loads, in order: the styles, if there is a widget, and the scripts.

    `write` makes them, all in one folder.
    """
    bundle_of = {source: bundle for bundle, parts in BUNDLES.items() for source in parts}
    return list(dict.fromkeys(bundle_of.get(source, source) for source in sources(widgets)))


def minified(name: str, text: str) -> str:
    """A script or a style without comments, and without blanks that mean nothing."""
    import minify  # part of what builds the website; widgets elsewhere are not minified

    minify.config({"js-keep-var-names": True})  # the twin finds collectives by the names of their functions
    return minify.string("text/css" if name == STYLE else "application/javascript", text)


def served(name: str) -> str:
    """The text of a file that pages load, minified."""
    parts = BUNDLES.get(name, (name,))
    # A minified script ends without a semicolon.
    return ";\n".join(minified(part, (ASSETS / part).read_text("utf-8")) for part in parts)


def write(folder: Path, widgets: set[str]) -> list[Path]:
    """Write the files that pages with these widgets load into a folder, and return their paths."""
    paths = [folder / name for name in needed(widgets)]
    for path in paths:
        path.write_text(served(path.name), "utf-8")
    return paths


def links(folder: str, widgets: set[str]) -> str:
    """The HTML that loads what these widgets need from `folder`: a relative or absolute address."""
    return "".join(f'<link rel="stylesheet" href="{folder}/{name}">' if name == STYLE else
                   f'<script defer src="{folder}/{name}"></script>' for name in needed(widgets))


def module(widget: str) -> str:
    """The JavaScript module of a live widget: the scripts that it needs, and the export."""
    code = "".join((ASSETS / name).read_text("utf-8") for name in sources({widget}) if name != STYLE)
    return f"{code}export default globalThis.lockstep{widget.capitalize()};\n"


def standalone(widget: str, title: str, html: str) -> str:
    """A whole page of one widget, whose HTML is `html`, with its styles and scripts inlined: it loads nothing."""
    style, *scripts = [(ASSETS / name).read_text("utf-8") for name in sources({widget})]
    code = "".join(f"<script>{script}</script>\n" for script in scripts)
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>
<meta name="viewport" content="width=device-width, initial-scale=1"><meta name="color-scheme" content="light dark">
<style>body {{ margin: 20px }}
{style}</style></head>
<body>{html}
{code}</body></html>
"""
