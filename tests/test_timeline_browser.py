"""The bucket timeline in a real Chromium, on static pages of its own HTML and assets, with the network blocked."""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from book.collectives import ring_all_reduce
from book.cost import Link
from book.replay import Replay
from book.trace import Trace
from book.widgets import bucket_timeline, play
from tests.backward import layers, recorded
from tests.players import FRAMES, PLAYER, assert_readable, click, contrasts, figures, press, state, until

REPLAY = Replay(2e-9, Link(100e-6, 1e9))
LATE = replace(REPLAY, slowdown={1: 2.0})
SMALL = {0: [("head.bias", 400), ("head.weight", 99_600)], 1: [("body.weight", 100_000)]}
CONTAINER = ".lk-bucket[data-rank='{}'][data-b='{}']"


def caps() -> dict[float, Trace]:
    return {cap: recorded(layers(8, per_bucket)) for cap, per_bucket in ((0.1, 1), (0.5, 2), (25, 8))}


def gpt(world_size: int) -> Trace:
    """As many parameters, with as long names, as a small GPT has."""
    kinds = ["ln_1.weight", "attention.qkv.weight", "attention.projection.weight", "mlp.0.weight", "mlp.2.weight"]
    blocks = {i: [(f"blocks.{9 - i}.{kind}", 500 + 260_000 * ("weight" in kind and "ln" not in kind)) for kind in kinds]
              for i in range(10)}
    return recorded(blocks, world_size)


def caption(page: Any) -> str:
    return page.inner_text(".lk-caption")


def clock(page: Any) -> str:
    """The time that is written below the lanes."""
    return page.locator(".lk-stage .lk-rank").last.text_content()


def captions(page: Any) -> list[str]:
    """What is said at each stop."""
    press(page, "Home")
    said = [caption(page)]
    for step in range(1, int(state(page)["steps"]) + 1):
        page.keyboard.press("ArrowRight")
        until(page, step=step, playing="false")
        said.append(caption(page))
    return said


def bucket(page: Any, rank: int, index: int) -> tuple[str, str]:
    """How a bucket looks, and what it says of itself."""
    g = page.locator(CONTAINER.format(rank, index))
    return g.get_attribute("class"), g.get_attribute("aria-label")


def test_each_stop_is_told(show: Callable) -> None:
    page = show(bucket_timeline(recorded(SMALL), REPLAY), reduced_motion="reduce")
    assert captions(page) == [
        "Backward begins at the last layer. On each rank 3 gradients, 200 kB, go into 2 buckets.",
        "Both ranks: the gradient of head.bias is ready; bucket 0 has 400 B of 100 kB.",
        "Both ranks: the gradient of head.weight is ready; bucket 0 is full: 100 kB. Its all-reduce starts while "
        "backward goes on.",
        "Both ranks: the gradient of body.weight is ready; bucket 1 is full: 100 kB. It waits: bucket 0 is on the "
        "network. Backward is over.",
        "Bucket 0 is averaged on both ranks. The all-reduce of bucket 1 starts.",
        "Bucket 1 is averaged on both ranks. Done after 800 µs: 33 % of the communication was hidden."]
    assert figures(page) == {"step: backward and all-reduces": "800 µs", "of all-reduces": "600 µs",
                             "of them hidden behind backward": "33 %", "exposed, nothing hides it": "400 µs",
                             "buckets, 200 kB on each rank": "2"}


def test_a_late_rank_is_waited_for(show: Callable) -> None:
    page = show(bucket_timeline(recorded(SMALL), LATE), reduced_motion="reduce")
    said = captions(page)
    assert ("Rank 0: the gradient of head.weight is ready; bucket 0 is full: 100 kB. It waits for rank 1, which is "
            "late.") in said
    assert ("Rank 0: the gradient of body.weight is ready; bucket 1 is full: 100 kB. It waits for rank 1, which is "
            "late. Rank 1: head.weight; bucket 0 is full: 100 kB. Its all-reduce starts while backward goes on. "
            "Backward is over on rank 0.") in said, "two gradients at one moment are both told"
    assert "exposed on the slowest rank" in figures(page)


def test_what_is_sent_after_backward_and_what_nobody_sends(show: Callable) -> None:
    runs = {"late": recorded(SMALL, at_the_end=True), "kept": recorded({None: SMALL[0]})}
    page = show(bucket_timeline(runs, REPLAY), reduced_motion="reduce")
    said = captions(page)
    assert "Both ranks: the gradient of head.weight is ready; bucket 0 is full: 100 kB. It is sent later." in said
    page.get_by_label("run").select_option(label="kept")
    assert captions(page)[-1] == ("Both ranks: the gradient of head.weight is ready; no all-reduce takes it. Backward "
                                  "is over. Done after 200 µs.")
    assert figures(page)["of all-reduces"] == "–"
    assert bucket(page, 0, 0) == ("lk-bucket not sent", "no bucket of rank 0: 100 kB, not sent")


def test_one_rank_has_nothing_to_hide(show: Callable) -> None:
    page = show(bucket_timeline(recorded(SMALL, 1), REPLAY), reduced_motion="reduce")
    assert captions(page)[-1].endswith("Done after 400 µs.")
    assert figures(page) == {"step: backward and all-reduces": "400 µs", "of all-reduces": "–",
                             "of them hidden behind backward": "–", "exposed, nothing hides it": "–",
                             "buckets, 200 kB on each rank": "2"}


def test_buckets_fill_wait_fly_and_are_averaged(show: Callable) -> None:
    page = show(bucket_timeline(recorded(SMALL), LATE), reduced_motion="reduce")
    seen: dict[int, list[tuple[str, str]]] = {0: [], 1: []}
    for step in range(int(state(page)["steps"]) + 1):
        for rank, found in seen.items():
            now = bucket(page, rank, 0)
            found.extend([now] if now not in found else [])
        press(page, "ArrowRight")
    told = [(name.removeprefix("lk-bucket "), label.removeprefix("bucket 0 of rank 0: ")) for name, label in seen[0]]
    assert told == [("filling", "0 B of 100 kB"), ("filling", "400 B of 100 kB"), ("waits", "100 kB, waits"),
                    ("flying", "100 kB, flying"), ("averaged", "100 kB, averaged")]
    assert [name for name, _ in seen[1]] == ["lk-bucket filling"] * 2 + ["lk-bucket flying", "lk-bucket averaged"]
    assert page.locator(f"{CONTAINER.format(0, 0)} .lk-fill.in").count() == 2
    widths = page.eval_on_selector_all(f"{CONTAINER.format(0, 0)} .lk-fill", "all => all.map(e => e.getBBox().width)")
    assert widths[0] < widths[1] / 20, "segments are as wide as their gradients are large"


def test_every_control(show: Callable) -> None:
    page = show(bucket_timeline(recorded(SMALL), REPLAY))
    click(page, "One step forward")
    until(page, step=1, playing="false")
    click(page, "One step forward")
    until(page, step=2, playing="false")
    click(page, "One step back")
    until(page, step=1)
    page.get_by_role("button", name="1×").click()
    page.get_by_role("button", name="2×").click()
    click(page, "Play")
    until(page, playing="true")
    click(page, "Pause")
    until(page, playing="false")
    click(page, "Play")
    until(page, step=5, playing="false")
    click(page, "Back to the start")
    until(page, step=0)


def test_scrubbing_moves_the_clock_and_what_it_passed(show: Callable) -> None:
    page = show(bucket_timeline(recorded(SMALL), REPLAY))
    hidden_right = "parseFloat(document.querySelector('.lk-move').style.clipPath.split(' ')[1])"
    before = page.evaluate(hidden_right)
    box = page.locator(".lk-scrub").bounding_box()
    page.mouse.move(box["x"] + box["width"] * 0.55, box["y"] + box["height"] / 2)
    page.mouse.down()
    page.mouse.up()
    assert clock(page) == "440 µs", "where it was let go, not at a stop"
    assert state(page)["step"] == "3" and page.evaluate(hidden_right) < before - 100
    assert page.get_by_role("slider").get_attribute("aria-valuetext") == "440 µs of 800 µs"


def test_keyboard_and_nothing_leaks(show: Callable) -> None:
    page = show(bucket_timeline(recorded(SMALL), REPLAY))
    page.evaluate("document.addEventListener('keydown', e => { window.leaked = (window.leaked || '') + e.key })")
    press(page, "End")
    for key, step in (("ArrowLeft", 4), ("Home", 0), ("ArrowRight", 1), ("a", 1), ("Enter", 1)):
        page.keyboard.press(key)
        until(page, step=step, playing="false")
    for playing in ("true", "false"):
        page.keyboard.press(" ")
        until(page, playing=playing)
    assert page.evaluate("window.leaked") is None


def detail(page: Any) -> str:
    return page.inner_text(".lk-detail").replace("\n", " ")


def test_a_bucket_lists_its_parameters(show: Callable) -> None:
    page = show(bucket_timeline(recorded(SMALL), REPLAY))
    assert detail(page).startswith("0 Bucket 0: 100 kB, full after 200 µs, all-reduced from 200 µs to 500 µs")
    assert page.locator(".lk-detail li").all_inner_texts() == ["head.bias 400 B", "head.weight 99.6 kB"]
    page.locator(CONTAINER.format(1, 1)).hover()
    assert detail(page).startswith("1 Bucket 1: ")
    assert page.locator(".lk-detail li").inner_text() == "body.weight 100 kB"
    assert page.locator(".lk-bucket.on").count() == 2 and page.locator(".lk-block.on").count() == 2 * 2 * 2
    page.mouse.move(2, 2)
    assert detail(page).startswith("0 Bucket 0") and page.locator(".on").count() == 0
    press(page, "End")
    assert detail(page).startswith("1 Bucket 1"), "without a pointer it is the one under way"


def test_buckets_by_keyboard_and_by_touch(show: Callable) -> None:
    page = show(bucket_timeline(recorded(layers(4, 1)), REPLAY), has_touch=True)
    press(page, "ArrowDown", "ArrowDown", "ArrowDown")
    assert detail(page).startswith("2 Bucket 2") and page.evaluate("document.activeElement.dataset.b") == "2"
    page.keyboard.press("ArrowUp")
    assert detail(page).startswith("1 Bucket 1")
    page.keyboard.press("ArrowRight")
    until(page, step=1)
    assert page.locator(".lk-stage [tabindex='0']").count() == 1, "one stop for the Tab key"
    page.locator(CONTAINER.format(1, 3)).tap()
    assert detail(page).startswith("3 Bucket 3")


def test_the_clock_goes_on_in_another_run(show: Callable) -> None:
    page = show(bucket_timeline(caps(), REPLAY, select=0.5, labels=["bucket_cap_mb"]), reduced_motion="reduce")
    select = page.get_by_label("bucket_cap_mb")
    assert select.evaluate("s => s.selectedOptions[0].text") == "0.5"
    press(page, *["ArrowRight"] * 4)
    now = clock(page)
    select.select_option(label="25")
    assert page.locator(".lk-bucket").count() == 2 and figures(page)["of them hidden behind backward"] == "0 %"
    assert clock(page) == now
    press(page, "End")
    select.select_option(label="0.1")
    assert "Done after" in caption(page) and page.locator(".lk-bucket").count() == 16
    widths = {}
    for label in ("0.5", "25"):
        select.select_option(label=label)
        widths[label] = page.evaluate("document.querySelector('.lk-stage svg > rect').getBBox().width")
    assert widths["0.5"] < widths["25"], "all runs are drawn on one clock"


def test_reduced_motion_shows_stops_only(show: Callable) -> None:
    page = show(bucket_timeline(recorded(SMALL), REPLAY), reduced_motion="reduce")
    page.evaluate("""() => { window.seen = new Set(); new MutationObserver(() => seen.add(
        document.querySelector('.lk-move').style.clipPath)).observe(document.body, {subtree: true, attributes: true}) }""")
    page.get_by_role("button", name="1×").click()
    page.get_by_role("button", name="2×").click()
    click(page, "Play")
    until(page, step=5, playing="false")
    assert page.evaluate("seen.size") == 6


def runs() -> dict[str, Trace]:
    return {"SMALL": recorded(SMALL), **{str(cap): trace for cap, trace in caps().items()}, "alone": recorded(SMALL, 1),
            "four": recorded(layers(6), 4), "eight": gpt(8), "kept": recorded({None: SMALL[0]})}


@pytest.mark.parametrize("width", [760, 390, 320])
def test_nothing_overlaps_and_nothing_moves(show: Callable, width: int) -> None:
    """At every few stops of every run all texts can be read, and the controls stay where they are."""
    page = show(bucket_timeline(runs(), LATE), width=width, height=1500, reduced_motion="reduce")
    for name in runs():
        page.get_by_label("run").select_option(label=name)
        press(page, "Home")
        steps, places = int(state(page)["steps"]), set()
        for step in range(0, steps + 1):
            if step % max(1, steps // 6) == 0 or step == steps:
                assert_readable(page, f"{name} at {width} px, stop {step}")
            places.add(round(page.locator(".lk-bar").bounding_box()["y"]))
            page.keyboard.press("ArrowRight")
        assert len(places) == 1, (name, places)
        assert page.evaluate("document.documentElement.scrollWidth") <= width


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_letters_on_bucket_colours_can_be_read(show: Callable, theme: str) -> None:
    page = show(bucket_timeline(recorded(SMALL), REPLAY))
    page.evaluate(f"document.documentElement.dataset.theme = '{theme}'")
    colours = [f"b{i}" for i in range(4)] + ["soft"]
    assert min(contrasts(page, colours, ["bg"]).values()) >= 4.5
    assert min(contrasts(page, colours, ["hollow"]).values()) >= 3


def test_dark_wherever_the_page_is_dark(show: Callable) -> None:
    colour = "getComputedStyle(document.querySelector('.lk-move .lk-block rect')).fill"
    page = show(bucket_timeline(recorded(SMALL), REPLAY))
    light = page.evaluate(colour)
    page.evaluate("document.documentElement.dataset.theme = 'dark'")
    dark = page.evaluate(colour)
    assert light != dark
    page.evaluate("delete document.documentElement.dataset.theme; document.body.dataset.jpThemeLight = 'false'")
    assert page.evaluate(colour) == dark
    assert show(bucket_timeline(recorded(SMALL), REPLAY), color_scheme="dark").evaluate(colour) == dark


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_axe_finds_nothing(show: Callable, theme: str) -> None:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="axe-playwright-python is not installed")
    page = show(bucket_timeline(caps(), LATE), bucket_timeline(gpt(8), REPLAY))
    page.evaluate(f"document.documentElement.dataset.theme = '{theme}'; document.body.style.background = "
                  f"'{'#000' if theme == 'dark' else '#fff'}'")
    press(page, "End")
    found = axe.Axe().run(page, context=PLAYER, options={"preload": False})
    assert found.violations_count == 0, found.generate_report()


def test_every_control_can_be_reached_by_tab(show: Callable) -> None:
    page = show(bucket_timeline(caps(), REPLAY, labels=["bucket_cap_mb"]))
    reached = []
    for _ in range(9):
        page.keyboard.press("Tab")
        reached.append(page.evaluate("(e => e.ariaLabel || e.textContent || e.title)(document.activeElement)"))
    assert reached == ["One backward pass, bucket by bucket", "bucket 0 of rank 0: 0 B of 263 kB", "Back to the start",
                       "One step back", "Play", "One step forward", "Step", "1×", "bucket_cap_mb"]


def test_printing_shows_the_end(show: Callable) -> None:
    page = show(bucket_timeline(recorded(SMALL), REPLAY))
    page.emulate_media(media="print")
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert state(page)["step"] == "5" and page.locator(".lk-bar").is_hidden()


def test_without_javascript_the_tables_can_be_read(show: Callable) -> None:
    page = show(bucket_timeline(recorded(SMALL), REPLAY), wait=False, java_script_enabled=False)
    assert page.locator("table").count() == 2 and "head.weight (99,600 B)" in page.inner_text("main")


def test_it_stands_beside_players(show: Callable) -> None:
    page = show(play(ring_all_reduce(4)), bucket_timeline(recorded(SMALL), REPLAY), bucket_timeline(gpt(4), REPLAY))
    assert page.locator(PLAYER).count() == 3
    ids = page.eval_on_selector_all("pattern", "all => all.map(e => e.id)")
    assert len(set(ids)) == len(ids) == 2


def test_frames_at_8_ranks(show: Callable) -> None:
    """Frames are counted, not timed against a limit: a machine may be slow, but the timeline must keep drawing."""
    page = show(bucket_timeline(gpt(8), LATE))
    click(page, "Play")
    frames = page.evaluate(FRAMES)
    assert frames > 5 and state(page)["playing"] == "true"
