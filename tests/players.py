"""Widgets on static pages of their own HTML and assets, as a browser test opens them, and what can be asked of them."""
from __future__ import annotations

import gzip
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks.weights import GZIP_LEVEL
from book.widgets.registry import links, write

PLAYER = ".lockstep-player"
WAIT_MS = 30_000
MOST_PAGE_BYTES = 60_000  # of a widget's HTML, compressed as web servers do
HEAD = """<!doctype html><html lang="en"><head><meta charset="utf-8"><title>Players</title>
<meta name="viewport" content="width=device-width, initial-scale=1"><style>body { margin: 20px }</style>"""
# Texts of the first widget that can't be read: too small, outside the widget, or over another.
UNREADABLE = """() => {
  const boxes = [], found = [], root = document.querySelector('.lockstep-player'), p = root.getBoundingClientRect();
  const walk = document.createTreeWalker(root, NodeFilter.SHOW_TEXT);
  for (let node; (node = walk.nextNode());) {
    const e = node.parentElement;
    if (!node.textContent.trim() || e.closest('.lk-move, option, [hidden], ul') || e.matches('pattern')) continue;
    const range = document.createRange(); range.selectNodeContents(node);
    for (const b of e.namespaceURI.endsWith('svg') ? [e.getBoundingClientRect()] : range.getClientRects())
      if (b.width) boxes.push([node.textContent, b, parseFloat(getComputedStyle(e).fontSize)]);
  }
  boxes.forEach(([text, a, size], i) => {
    if (size < 10.5) found.push([text, 'is too small', size]);
    if (a.left < p.left || a.right > p.right || a.top < p.top || a.bottom > p.bottom) found.push([text, 'is outside']);
    for (const [other, b] of boxes.slice(i + 1)) {
      const x = Math.min(a.right, b.right) - Math.max(a.left, b.left);
      const y = Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top);
      // a box is a line high: letters fill its middle, so lines may touch but letters may not
      if (x > 0.5 && y > size * 0.34) found.push([text, 'covers', other, x, y]);
    }
  });
  return [boxes.length, found];
}"""
# Goes from stop to stop by keys, as fast as the widget draws; needs reduced motion. Returns what can't be read at
# about `every` stops and the last, and in how many places the controls were.
WALK = f"""every => {{
  const root = document.querySelector('.lockstep-player'), places = new Set(), found = [], unreadable = {UNREADABLE};
  const press = key => root.dispatchEvent(new KeyboardEvent('keydown', {{ key, bubbles: true }}));
  press('Home');
  const last = +root.dataset.steps;
  for (let step = 0; step <= last; step++) {{
    if (+root.dataset.step !== step) throw new Error(`at ${{root.dataset.step}}, not at stop ${{step}}`);
    if (every && (step % Math.max(1, Math.floor(last / every)) === 0 || step === last))
      found.push(...unreadable()[1].map(what => [step, ...what]));
    places.add(Math.round(document.querySelector('.lk-play').getBoundingClientRect().y));
    press('ArrowRight');
  }}
  return [found, places.size];
}}"""

CONTRASTS = """([colours, grounds]) => {
  const linear = x => (x /= 255) <= 0.04045 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4;
  const lum = c => { const [r, g, b] = c.match(/[\\d.]+/g).map(linear);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b };
  const probe = document.createElement('i');
  document.querySelector('.lockstep-player').append(probe);
  const of = name => { probe.style.color = `var(--${name})`; return lum(getComputedStyle(probe).color) };
  const ratio = (a, b) => (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05), found = {};
  for (const c of colours) for (const ground of grounds) found[`${c} on ${ground}`] = ratio(of(c), of(ground));
  return found }"""
# Waits until so many frames have been drawn.
FRAMES = """wanted => new Promise(done => {
  const tick = () => (wanted-- ? requestAnimationFrame(tick) : done(true));
  tick();
})"""


def first(*values: Any, num: int = 1) -> list[Any]:
    """Values of a parameter, the first `num` in `make test` and the others only in `make test-all`."""
    return [*values[:num], *(pytest.param(value, marks=pytest.mark.slow) for value in values[num:])]


def html_of(shown: Any) -> str:
    """The HTML that a widget leaves in a stored notebook."""
    bundle = shown._repr_mimebundle_()
    return (bundle[0] if isinstance(bundle, tuple) else bundle)["text/html"]


def compressed(text: str) -> int:
    """A text's bytes as a web server sends them."""
    return len(gzip.compress(text.encode(), GZIP_LEVEL))


def write_page(file: Path, *shown: Any) -> Path:
    """A page with these widgets, which loads what they are made of, as a page of the website does, from its folder."""
    body = "".join(map(html_of, shown))
    on_it = set(re.findall(r"<div data-lockstep-(\w+)=", body))
    write(file.parent, on_it)
    file.write_text(f"{HEAD}{links('.', on_it)}</head><body><main>{body}</main></body></html>", "utf-8")
    return file


def state(page: Any) -> dict[str, str]:
    """What the page's first widget says of itself: its data attributes."""
    return page.eval_on_selector(PLAYER, "e => ({...e.dataset})")


def until(page: Any, **wanted: Any) -> None:
    """Wait until the first widget's data attributes have these values, all at once."""
    page.wait_for_function("wanted => { const has = document.querySelector('.lockstep-player').dataset;"
                           "            return Object.entries(wanted).every(([name, value]) => has[name] === value) }",
                           arg={name: str(value) for name, value in wanted.items()}, timeout=WAIT_MS)


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
    num_texts, found = page.evaluate(UNREADABLE)
    assert num_texts and not found, (where, found)


def contrasts(page: Any, colours: Sequence[str], grounds: Sequence[str]) -> dict[str, float]:
    """The contrast of each of the first widget's colours on each ground, both by the names of their CSS variables."""
    return page.evaluate(CONTRASTS, [colours, grounds])


def paint(page: Any, theme: str) -> None:
    """Give the page a theme, as the website's switch does."""
    page.evaluate("""theme => { document.documentElement.dataset.theme = theme;
                                document.body.style.background = theme === 'dark' ? '#000' : '#fff' }""", theme)


def axe_finds(page: Any) -> str:
    """What axe says against the page's widgets, "" if nothing; skips where it is not installed."""
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="axe-playwright-python is not installed")
    found = axe.Axe().run(page, context=PLAYER, options={"preload": False})  # it would fetch the CSS again
    return found.generate_report() if found.violations_count else ""
