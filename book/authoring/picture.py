"""L4: the README's picture: chapter 3's ring all-reduce as its stored player has it, recorded while processes ran it.

The player's data are those that nbval compares with a fresh run, so the picture needs no run of its own, and no torch.
"""
from __future__ import annotations

import html
import json
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
CHAPTER, PICTURE = ROOT / "chapters" / "03_ring_all_reduce.ipynb", ROOT / "chapters" / "ring_all_reduce.svg"
STYLES = ROOT / "book" / "widgets" / "widgets.css"
PLAYER = re.compile(r"""data-lockstep-player=(["'])(.*?)\1""", re.S)
DOES = {"reduce": "add", "copy": "copy"}
COLUMNS, MARGIN, PANEL, GAP, LABEL, CELL, TITLE = 4, 28, 170, 21, 22, 37, 40
SHARED = ("bg", "ink", "soft", "line", "hollow", "focus")  # colours of the players that the picture uses too
STYLE = """.card{{fill:{bg};stroke:{line}}}.cell{{fill:{hollow}}}.came{{fill:none;stroke:{focus};stroke-width:2.5}}
.name{{fill:{ink};font-weight:600}}.more{{fill:{soft}}}{ranks}"""
TELLS = ("row: a rank", "column: a chunk", "colour: whose data", "framed: just came")

State = list[list[int]]  # by rank and chunk: whose contributions it holds, as a bit mask


def draw() -> str:
    """The picture as SVG: what each rank holds at first and after each step, light or dark as the system is."""
    run = recorded_run(CHAPTER)
    if run["n"] != 4 or run["c"] != 4 or run["S"] != 6:
        raise ValueError(f"the picture has room for 4 ranks, 4 chunks and 6 steps; {CHAPTER.name} records another run")
    panels = [_panel(place, *panel) for place, panel in enumerate(panels_of(run))]
    height = 2 * MARGIN + 2 * (TITLE + 4 * CELL) + GAP
    light, dark = (_style(theme) for theme in themes())
    words = "A ring all-reduce on four ranks, step by step: first chunks are added up, then copied, along the ring."
    return "\n".join([
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 800 {height}" width="800" height="{height}" role="img" '
        'font-family="system-ui,-apple-system,\'Segoe UI\',Roboto,\'Noto Sans\',sans-serif" font-size="22">',
        f"<title>{words}</title>", f"<style>{light}\n@media(prefers-color-scheme:dark){{{dark}}}</style>",
        f'<rect class="card" x=".5" y=".5" width="799" height="{height - 1}" rx="14"/>', *panels,
        _legend(len(panels)), "</svg>\n"])


def recorded_run(notebook: Path) -> dict[str, Any]:
    """The data of a stored notebook's first player of a recorded run; raises ValueError if there is none."""
    for cell in json.loads(notebook.read_text("utf-8"))["cells"]:
        for output in cell.get("outputs", []):
            for _, text in PLAYER.findall("".join(output.get("data", {}).get("text/html", ""))):
                run = json.loads(html.unescape(text))["runs"][0]
                if run["source"].startswith("recorded"):
                    return run
    raise ValueError(f"no player in {notebook.name} plays a recorded run")


def panels_of(run: dict[str, Any]) -> list[tuple[str, State, set[tuple[int, int]]]]:
    """The start and each step: its title, what chunks hold after it, and which of them, (rank, chunk), just came."""
    masks = [sum(times << rank for rank, times in enumerate(contents)) for contents in run["contents"]]
    held = [[masks[place] for place in row] for row in run["start"]]
    columns = [run["transfers"][name] for name in ("leaves", "dst", "into", "op", "after")]
    panels: list[tuple[str, State, set[tuple[int, int]]]] = [("start", held, set())]
    for step in range(run["S"]):
        held = [list(row) for row in held]
        moves = [move for leaves, *move in zip(*columns) if leaves == step]
        for dst, chunk, _, after in moves:
            held[dst][chunk] = masks[after]
        panels.append((f"step {step + 1}: {DOES[moves[0][2]]}", held, {(dst, chunk) for dst, chunk, *_ in moves}))
    return panels


def themes() -> list[dict[str, str]]:
    """The players' colours, light and dark, as the style that all widgets share has them."""
    found = re.findall(r"--(\w+): (#\w+)", STYLES.read_text("utf-8"))
    light: dict[str, str] = {}
    dark: dict[str, str] = {}
    for name, colour in found:
        (dark if name in light else light).setdefault(name, colour)
    return [light, {**light, **dark}]


def _style(theme: dict[str, str]) -> str:
    ranks = "".join(f".r{rank}{{fill:{theme[f'r{rank}']}}}" for rank in range(4))
    return STYLE.format(**{name: theme[name] for name in SHARED}, ranks=ranks)


def _corner(place: int) -> tuple[int, int]:
    row, column = divmod(place, COLUMNS)
    return MARGIN + column * (PANEL + GAP), MARGIN + row * (TITLE + 4 * CELL + GAP)


def _panel(place: int, title: str, held: State, came: set[tuple[int, int]]) -> str:
    left, top = _corner(place)
    parts = [f'<text class="name" x="{left + LABEL}" y="{top + 22}">{title}</text>']
    for rank, row in enumerate(held):
        y = top + TITLE + rank * CELL
        parts.append(f'<text class="name r{rank}" x="{left}" y="{y + 25}">{rank}</text>')
        for chunk, mask in enumerate(row):
            parts.append(_cell(left + LABEL + chunk * CELL, y, mask, (rank, chunk) in came))
    return "".join(parts)


def _cell(x: int, y: int, mask: int, framed: bool) -> str:
    """A chunk: rank k's contribution is always the k-th stripe, so that colour is not all that tells them apart."""
    side = CELL - 4
    parts = [f'<rect class="cell" x="{x}" y="{y}" width="{side}" height="{side}" rx="3"/>']
    parts += [f'<rect class="r{rank}" x="{x + 2 + 7.5 * rank:g}" y="{y + 3}" width="6.5" height="{side - 6}"/>'
              for rank in range(4) if mask >> rank & 1]
    if framed:
        parts.append(f'<rect class="came" x="{x}" y="{y}" width="{side}" height="{side}" rx="3"/>')
    return "".join(parts)


def _legend(place: int) -> str:
    left, top = _corner(place)
    baseline = top + TITLE + 25
    return "".join(f'<text class="more" x="{left - 6}" y="{baseline + number * CELL}" font-size="20">{text}</text>'
                   for number, text in enumerate(TELLS))
