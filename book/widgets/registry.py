"""L3: all widgets, and the script that draws each: what pages of the website, live widgets and tests load.

A script names what it needs by `import` lines at its top, and what it hands on in an `export` at its end, one of each
file: `import { make } from "./scene.js"`, `import * as links from "../twin/links.js"`. From these follow the order in
which scripts load and which of them a page loads as one file. Pages also work from a disk, where browsers load no
modules: so a script becomes a function that puts what it exports into `globalThis.lockstep`, by the script's name.

The website runs this file by its path, without the package, so it imports only the standard library and a minifier.
"""
from __future__ import annotations

import re
from functools import cache
from html import escape
from pathlib import Path

DATA_VERSION = 2  # scene.js draws data of this version and no other
WIDGETS = {  # by the name in their HTML, the script that draws each
    **{name: name for name in ("player", "timeline", "pipeline", "game", "shards", "mesh", "layouts", "memory",
                               "memory_bars", "ring", "by_hand", "plan_explorer", "ledger", "steps", "calls",
                               "attention", "experts")},
    **dict.fromkeys(("race_explorer", "server_explorer", "axes_explorer"), "traffic_explorers"),
    **dict.fromkeys(("pipeline_explorer", "bucket_explorer", "sharding_explorer", "load_explorer"), "step_explorers"),
}
ASSETS = Path(__file__).parent
TWIN = ASSETS.parent / "twin"  # scripts that simulate on the page
STYLE = "widgets.css"  # the styles of all widgets
IMPORT = re.compile(r'^import (?:\* as )?(\{[^}]*\}|\w+) from "[./\w]*?(\w+)\.js";\n', re.M)
EXPORT = re.compile(r"^export (\{[^}]*\};)\n", re.M)


def path_of(name: str) -> Path:
    """Where a script, by its name, or the style lies."""
    paths = [ASSETS / name, ASSETS / f"{name}.js", TWIN / f"{name}.js"]
    return next(path for path in paths if path.is_file())


@cache
def text_of(name: str) -> str:
    """The text of a script, by its name, or of the style."""
    return path_of(name).read_text("utf-8")


def closure(script: str) -> list[str]:
    """A script and what it needs, in the order in which they load: each after those that it imports from."""
    needs = [other for _, needed in IMPORT.findall(text_of(script)) for other in closure(needed)]
    return list(dict.fromkeys([*needs, script]))


def loaded(widgets: set[str]) -> list[str]:
    """The scripts that these widgets need, in the order in which they load."""
    entries = [entry for name, entry in WIDGETS.items() if name in widgets]
    return list(dict.fromkeys(script for entry in entries for script in closure(entry)))


@cache
def bundles() -> dict[str, list[str]]:
    """The files that pages load, in order, and the scripts in each: those that the same widgets need are one file.

    It has the name of the last of them, which needs the others. A reader of several pages loads each file once.
    """
    users = {script: frozenset(name for name, entry in WIDGETS.items() if script in closure(entry))
             for script in loaded(set(WIDGETS))}
    together: dict[frozenset[str], list[str]] = {}
    for script, names in users.items():
        together.setdefault(names, []).append(script)
    ordered = sorted(together.items(), key=lambda one: -len(one[0]))  # who needs a script has no more users than it
    return {f"{scripts[-1]}.js": scripts for _, scripts in ordered}


def needed(widgets: set[str]) -> list[str]:
    """The files that a page with these widgets loads, in order: the styles, if there is a widget, and the scripts.

    `write` makes them, all in one folder.
    """
    wanted = set(loaded(widgets))
    return [STYLE] * bool(wanted) + [name for name, scripts in bundles().items() if wanted & set(scripts)]


def plain(script: str) -> str:
    """A script without imports and exports: a function that takes and gives by `globalThis.lockstep`."""
    inside = IMPORT.sub(r"const \1 = globalThis.lockstep.\2;\n", text_of(script))
    inside = EXPORT.sub(rf"(globalThis.lockstep ??= {{}}).{script} = \1\n", inside)
    return f"(() => {{\n{inside}}})();\n"


def minified(name: str, text: str) -> str:
    """A script or a style without comments, and without blanks that mean nothing."""
    import minify  # part of what builds the website; widgets elsewhere are not minified

    return minify.string("text/css" if name == STYLE else "application/javascript", text)


def served(name: str) -> str:
    """The text of a file that pages load, minified."""
    text = text_of(STYLE) if name == STYLE else "".join(map(plain, bundles()[name]))
    return minified(name, text)


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
    return f"{''.join(map(plain, loaded({widget})))}export default globalThis.lockstep{widget.capitalize()};\n"


def standalone(widget: str, title: str, html: str) -> str:
    """A whole page of one widget, whose HTML is `html`, with its styles and scripts inlined: it loads nothing."""
    code = "".join(f"<script>{plain(script)}</script>\n" for script in loaded({widget}))
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>
<meta name="viewport" content="width=device-width, initial-scale=1"><meta name="color-scheme" content="light dark">
<style>body {{ margin: 20px }}
{text_of(STYLE)}</style></head>
<body>{html}
{code}</body></html>
"""
