"""L3: the graph of a hang as SVG: ranks that do the same in a box, and an arrow from who waits to who is waited for."""
from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from html import escape
from typing import NamedTuple

from book.waiting.standstill import WAITS, Stand, each_does, waits_told
from book.words import alike, capitalised, listed, named

WIDTH, GUTTER, PAD, LINE, GAP = 346, 56, 10, 17, 36  # pixels
LETTERS = 42  # that a line of a box has room for
MOST_LINES, MOST_BOXES = 3, 10
LANE = 11  # pixels between arrows beside the boxes

STYLE = """<style>
figure.waits { margin: 0 0 16px } .waits figcaption { font-size: 14px; margin: 6px 0 0 } .waits svg { max-width: 100% }
.waits rect { fill: none; stroke: #8888; rx: 9px } .waits .held { stroke: var(--held); stroke-width: 2.5 }
.waits path { fill: none; stroke: currentColor; stroke-width: 1.6 } .waits marker path { fill: currentColor }
.waits text { fill: currentColor; font: 13px system-ui, sans-serif } .waits rect + text { font-weight: 600 }
.waits { --held: #b42318 } @media (prefers-color-scheme: dark) { .waits { --held: #ff8a7a } }
</style>"""

TIP = ('<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
       '<path d="M0 0L8 4L0 8z"/></marker></defs>')


class Box(NamedTuple):
    """Ranks that do the same, for the same ranks: where the box begins and ends, and the lines in it."""
    ranks: tuple[int, ...]
    first: Stand
    top: int
    bottom: int
    lines: tuple[str, ...]

    @property
    def middle(self) -> float:
        """Halfway down."""
        return (self.top + self.bottom) / 2


def drawn(stands: Sequence[Stand]) -> str:
    """The figure, with a caption that says the same; a rank that others wait for and that does not wait is framed."""
    boxes, left_out = _boxes(stands)
    arrows = list(_arrows(boxes))
    height = boxes[-1].bottom + 2 if boxes else 0
    awaited = {rank for stand in stands for wait in stand.waits for rank in wait.ranks}
    shown = {rank for box in boxes for rank in box.ranks}
    told = capitalised(waits_told([stand for stand in stands if stand.rank in shown]))
    more = f" Not drawn: {named(left_out)}." if left_out else ""
    parts = [*(_box(box, bool(awaited & set(box.ranks)) and box.first.state != WAITS) for box in boxes),
             *_drawn_arrows(arrows, boxes)]
    return f"""{STYLE}<figure class="waits"><svg width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}"
role="img" aria-label="{escape(_alternative(boxes))}">{TIP}{"".join(parts)}</svg>
<figcaption>{escape(told)}.{escape(more)}</figcaption></figure>"""


def _alternative(boxes: Sequence[Box]) -> str:
    return "; ".join(f"{named(box.ranks)}: {each_does(box.first.does, box.ranks)}" for box in boxes)


def _boxes(stands: Sequence[Stand]) -> tuple[list[Box], list[int]]:
    """From the top: those that nobody waits for first, each followed by those that it waits for; ranks left out."""
    same = alike((stand.rank, stand._replace(rank=-1)) for stand in stands)
    found = {key: tuple(ranks) for key, ranks in same.items()}
    of_rank = {rank: key for key, ranks in found.items() for rank in ranks}
    after = {key: list(dict.fromkeys(of_rank[rank] for wait in key.waits for rank in wait.ranks if rank in of_rank))
             for key in found}
    awaited = {other for key, others in after.items() for other in others if other != key}
    order: dict[Stand, None] = {}
    for key in sorted(found, key=lambda one: (one in awaited, not one.waits)):
        _follow(key, after, order)
    boxes, top = [], 1
    for key in [*order][:MOST_BOXES]:
        lines = _lines(key, found[key])
        bottom = top + 2 * PAD + LINE * len(lines)
        boxes.append(Box(found[key], key, top, bottom, lines))
        top = bottom + GAP
    return boxes, sorted(rank for key in [*order][MOST_BOXES:] for rank in found[key])


def _follow(key: Stand, after: dict[Stand, list[Stand]], order: dict[Stand, None]) -> None:
    """Put this one into the order, and then those that it waits for."""
    left = [key]
    while left:
        one = left.pop()
        if one not in order:
            order[one] = None
            left += reversed(after[one])


def _lines(stand: Stand, ranks: Sequence[int]) -> tuple[str, ...]:
    who = textwrap.shorten(named(ranks), LETTERS - 4, placeholder=" …")
    does = textwrap.wrap(each_does(stand.does, ranks), LETTERS, max_lines=MOST_LINES, placeholder=" …")
    place = textwrap.wrap(f"at {stand.place}", LETTERS, max_lines=2, placeholder=" …") if stand.place else []
    return who, *does, *place


def _box(box: Box, is_held: bool) -> str:
    held, height = ' class="held"' * is_held, box.bottom - box.top
    texts = (f'<text x="{PAD + 2}" y="{box.top + PAD + LINE * row + 13}">{escape(line)}</text>'
             for row, line in enumerate(box.lines))
    return f'<rect x="2" y="{box.top}" width="{WIDTH - GUTTER}" height="{height}"{held}/>{"".join(texts)}'


def _arrows(boxes: Sequence[Box]) -> Iterator[tuple[int, int, str]]:
    """From which box to which, and the kind of wait."""
    for start, box in enumerate(boxes):
        for end, other in enumerate(boxes):
            kinds = dict.fromkeys(wait.kind for wait in box.first.waits if set(wait.ranks) & set(other.ranks))
            if kinds:
                yield start, end, listed(kinds)


def _drawn_arrows(arrows: Sequence[tuple[int, int, str]], boxes: Sequence[Box]) -> Iterator[str]:
    """An arrow to the next box goes straight down, with the kind of wait beside it, and any other beside the boxes."""
    lane = 0
    for start, end, kind in arrows:
        one, other = boxes[start], boxes[end]
        if end == start + 1:
            yield (f'<path d="M40 {one.bottom}V{other.top - 1}" marker-end="url(#tip)"/>'
                   f'<text x="50" y="{one.bottom + GAP / 2 + 4}">{escape(kind)}</text>')
            continue
        side, lane = WIDTH - GUTTER + 2, lane + 1
        out = side + 12 + LANE * ((lane - 1) % 4)
        away, back = one.middle + 5, other.middle - 5
        yield f'<path d="M{side} {away}H{out}V{back}H{side + 2}" marker-end="url(#tip)"/>'
