"""Widgets on static pages of their own HTML and assets, as a browser test opens them, and what can be asked of them."""
from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from book.widgets.assets import ASSETS, links

PLAYER = ".lockstep-player"
HEAD = """<!doctype html><html lang="en"><head><meta charset="utf-8"><title>Players</title>
<meta name="viewport" content="width=device-width, initial-scale=1"><style>body { margin: 20px }</style>"""
TEXTS = """() => {
  const boxes = [], root = document.querySelector('.lockstep-player');
  const walk = document.createTreeWalker(root, NodeFilter.SHOW_TEXT);
  for (let node; (node = walk.nextNode());) {
    const e = node.parentElement;
    if (!node.textContent.trim() || e.closest('.lk-move, option, [hidden], ul') || e.matches('pattern')) continue;
    const range = document.createRange(); range.selectNodeContents(node);
    for (const b of e.namespaceURI.endsWith('svg') ? [e.getBoundingClientRect()] : range.getClientRects())
      if (b.width) boxes.push([node.textContent, b.left, b.top, b.right, b.bottom, parseFloat(getComputedStyle(e).fontSize)]);
  }
  const p = root.getBoundingClientRect();
  return [boxes, [p.left, p.top, p.right, p.bottom]];
}"""

CONTRASTS = """([colours, grounds]) => {
  const lum = c => { const [r, g, b] = c.match(/[\\d.]+/g).map(x => (x /= 255) <= 0.04045 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b };
  const probe = document.createElement('i');
  document.querySelector('.lockstep-player').append(probe);
  const of = name => { probe.style.color = `var(--${name})`; return lum(getComputedStyle(probe).color) };
  const ratio = (a, b) => (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05), found = {};
  for (const c of colours) for (const ground of grounds) found[`${c} on ${ground}`] = ratio(of(c), of(ground));
  return found }"""
FRAMES = """() => new Promise(done => { let n = 0; const start = performance.now();
  const tick = now => now - start < 1000 ? (n++, requestAnimationFrame(tick)) : done(n); requestAnimationFrame(tick) })"""


def html_of(shown: Any) -> str:
    """The HTML that a widget leaves in a stored notebook."""
    bundle = shown._repr_mimebundle_()
    return (bundle[0] if isinstance(bundle, tuple) else bundle)["text/html"]


def write_page(file: Path, *shown: Any) -> Path:
    """A page with these widgets, which loads their assets from where they lie."""
    body = "".join(map(html_of, shown))
    file.write_text(f"{HEAD}{links(ASSETS.as_uri())}</head><body><main>{body}</main></body></html>", "utf-8")
    return file


def state(page: Any) -> dict[str, str]:
    """What the page's first widget says of itself: its data attributes."""
    return page.eval_on_selector(PLAYER, "e => ({...e.dataset})")


def until(page: Any, **wanted: Any) -> None:
    """Wait until the first widget's data attributes have these values."""
    for name, value in wanted.items():
        page.wait_for_function("([n, v]) => document.querySelector('.lockstep-player').dataset[n] === v",
                               arg=[name, str(value)], timeout=15_000)


def click(page: Any, name: str) -> None:
    """Click the first button of this name."""
    page.get_by_role("button", name=name, exact=True).first.click()


def press(page: Any, *keys: str) -> None:
    """Press keys on the first widget."""
    page.focus(PLAYER)
    for key in keys:
        page.keyboard.press(key)


def scrub(page: Any, share: float) -> None:
    """Put the first widget's clock to a share of the run."""
    box = page.locator(".lk-scrub").first.bounding_box()
    page.mouse.click(box["x"] + box["width"] * share, box["y"] + box["height"] / 2)


def caption(page: Any) -> str:
    """What the first widget says."""
    return page.inner_text(".lk-caption")


def captions(page: Any) -> list[str]:
    """What it says at each stop."""
    press(page, "Home")
    said = [caption(page)]
    for step in range(1, int(state(page)["steps"]) + 1):
        page.keyboard.press("ArrowRight")
        until(page, step=step, playing="false")
        said.append(caption(page))
    return said


def figures(page: Any) -> dict[str, str]:
    """The row of figures: value by meaning."""
    pairs = page.eval_on_selector_all(".lk-foot div", "all => all.map(d => [...d.children].map(x => x.textContent))")
    return {meaning: value for value, meaning in pairs}


def assert_readable(page: Any, where: str) -> None:
    """No text covers another or leaves the widget, none is too small."""
    boxes, (left, top, right, bottom) = page.evaluate(TEXTS)
    for text, x0, y0, x1, y1, size in boxes:
        assert size >= 10.5, (where, text, size)
        assert left <= x0 and x1 <= right and top <= y0 and y1 <= bottom, (where, text, "is outside")
    for (a, ax0, ay0, ax1, ay1, size), (b, bx0, by0, bx1, by1, _) in itertools.combinations(boxes, 2):
        # a box is a line high: letters fill its middle, so lines may touch but letters may not
        over_x, over_y = min(ax1, bx1) - max(ax0, bx0), min(ay1, by1) - max(ay0, by0)
        assert over_x <= 0.5 or over_y <= size * 0.34, (where, a, b, over_x, over_y)


def contrasts(page: Any, colours: Sequence[str], grounds: Sequence[str]) -> dict[str, float]:
    """The contrast of each of the first widget's colours on each ground, both by the names of their CSS variables."""
    return page.evaluate(CONTRASTS, [colours, grounds])
