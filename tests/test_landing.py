"""The opening page: the ring that runs by itself, the race against the reader, the map of the book."""
from __future__ import annotations

from typing import Any

import pytest
from sphinx.errors import SphinxError

from book.authoring.landing import stations
from book.collectives import ring_all_reduce
from tests.browser import Browser
from tests.players import axe_finds, first
from tests.website import Site

RING, DUEL, MAP = ".lockstep-player[aria-label='A ring all-reduce']", "[aria-label='A race against you']", ".book-path"
# A binomial tree: to rank 0, then from rank 0, each time all chunks.
TREE = [(1, 0), (3, 2), (2, 0), (0, 2), (0, 1), (2, 3)]


def test_it_fits_on_three_screens(site_url: str, browser: Browser) -> None:
    """The first has the whole ring with its control."""
    page, log = browser.open(f"{site_url}/index.html", width=1280, height=800)
    control = page.locator(RING).get_by_label("ranks").bounding_box()
    assert control["y"] + control["height"] < 800
    assert page.evaluate("document.querySelector('.bd-article').getBoundingClientRect().bottom") <= 2400
    log.assert_clean()


@pytest.mark.parametrize("width", first(1280, 390))
def test_the_ring_runs_by_itself_for_as_many_ranks_as_are_chosen(site: Site, browser: Browser, width: int) -> None:
    """From a file; in the end every chunk is complete, which is what the twin worked out."""
    page, log = browser.open((site.folder / "index.html").as_uri(), width=width)
    ring = page.locator(RING)
    page.wait_for_function("at => +document.querySelector(at).dataset.step > 0", arg=RING)
    for ranks in (12, 5):
        ring.get_by_label("ranks").fill(str(ranks))
        assert ring.get_attribute("data-steps") == str(ring_all_reduce(ranks).num_steps)
        assert ring.locator(".lk-card[data-rank]").count() >= ranks
    assert "Each of 5 ranks (processes) holds 400 MB of gradients" in ring.locator(".lk-caption").inner_text()
    assert "640 MB" in ring.locator(".lk-caption").inner_text()  # 2 (N-1)/N n
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    ring.get_by_role("button", name="Pause").click()
    stopped = ring.get_attribute("data-step")
    page.wait_for_timeout(400)
    assert ring.get_attribute("data-step") == stopped
    log.assert_clean()


def test_the_ring_stands_still_where_less_motion_is_asked_for(site_url: str, browser: Browser) -> None:
    page, _ = browser.open(f"{site_url}/index.html", reduced_motion="reduce")
    ring = page.locator(RING)
    assert (ring.get_attribute("data-step"), ring.get_attribute("data-playing")) == ("3", "false")
    assert ring.locator(".lk-num.done").count() == 4, "each sum is complete on one rank"


def send(page: Any, src: int, dst: int) -> None:
    """Send all chunks of a rank by the keyboard."""
    for rank in (src, dst):
        page.locator(".lk-peername").nth(rank).focus()
        page.keyboard.press("Enter")


def test_a_reader_races_the_ring(site: Site, browser: Browser) -> None:
    """A tree moves whole buffers: four levels of 0.4 s each, and two buffers in and out of rank 0."""
    page, log = browser.open((site.folder / "index.html").as_uri(), reduced_motion="reduce")
    duel, said = page.locator(DUEL).first, page.locator(f"{DUEL} .lk-caption").first
    send(page, 1, 0)
    send(page, 1, 0)
    assert said.inner_text().startswith("Not sent: rank 0 has all of that already.")
    page.get_by_role("button", name="Undo").click()
    for src, dst in TREE:
        assert duel.locator(".lk-scrub").count() == 0
        send(page, src, dst)
    assert duel.get_attribute("data-complete") == "16"
    assert said.inner_text() == (
        "All complete after 6 messages. You need 1.60 s and the ring 600 ms, for a buffer of 400 MB on links of "
        "1 GB/s. Your busiest link carries 1.3 times as much.")
    assert [line.inner_text() for line in duel.locator(".lk-handscore span").all()] == [
        "Your busiest link, out of rank 0: 2.00 n", "The ring's, out of rank 0: 1.50 n"]
    duel.locator(".lk-scrub").press("End")
    assert duel.locator(".lk-lane").count() == 2 and duel.locator(".lk-tick.won").count() == 2
    page.get_by_role("button", name="Start over").click()
    assert duel.get_attribute("data-complete") == "0" and duel.locator(".lk-scrub").count() == 0
    log.assert_clean()


def test_nothing_is_counted_twice_in_the_race(site_url: str, browser: Browser) -> None:
    page, _ = browser.open(f"{site_url}/index.html", has_touch=True, width=390)
    for src, dst in ((1, 0), (1, 2), (0, 2)):
        for rank in (src, dst):
            page.locator(".lk-peername").nth(rank).tap()
    assert page.locator(f"{DUEL} .lk-caption").inner_text().startswith(
        "Not sent: rank 2's chunk 0 would count rank 1 twice.")


def test_a_step_of_messages_that_can_travel_at_once_is_one(site_url: str, browser: Browser) -> None:
    """The reader who sends as the ring does is as fast as the ring."""
    page, _ = browser.open(f"{site_url}/index.html", reduced_motion="reduce")
    for m in ring_all_reduce(4).moves:
        page.locator(".lk-peer").nth(m.src).locator(".lk-peerchunk").nth(m.chunk).click()
        page.locator(".lk-peername").nth(m.dst).click()
    said = page.locator(f"{DUEL} .lk-caption").first.inner_text()
    assert "You need 600 ms and the ring 600 ms" in said and "no more than the ring's" in said


def test_the_map_leads_to_every_chapter_and_lab(site: Site, browser: Browser) -> None:
    """Without JavaScript too, where the picture of a recorded ring stands for the one that runs."""
    page, _ = browser.open((site.folder / "index.html").as_uri(), java_script_enabled=False)
    targets = [link.get_attribute("href") for link in page.locator(f"{MAP} a").all()]
    assert len(targets) == 30 and all((site.folder / target).is_file() for target in targets)
    assert page.locator("[data-lockstep-ring] img").bounding_box()["width"] > 300
    assert "no link carries more than one and a half" in page.inner_text("[data-lockstep-by_hand]")


def test_no_card_of_the_map_covers_another(site_url: str, browser: Browser) -> None:
    page, _ = browser.open(f"{site_url}/index.html", width=1280)
    boxes = [card.bounding_box() for card in page.locator(f"{MAP} li").all()]
    for number, a in enumerate(boxes):
        for b in boxes[:number]:
            x = min(a["x"] + a["width"], b["x"] + b["width"]) - max(a["x"], b["x"])
            y = min(a["y"] + a["height"], b["y"] + b["height"]) - max(a["y"], b["y"])
            assert x <= 0 or y <= 0, (a, b)


def test_the_widgets_are_accessible(site_url: str, browser: Browser) -> None:
    page, _ = browser.open(f"{site_url}/index.html", reduced_motion="reduce")
    assert not axe_finds(page)


def test_a_station_stands_after_all_that_it_builds_on() -> None:
    first_, second, third = stations(["c/1_a | | x", "c/2_b | 1_a | y", "c/3_c | 1_a 2_b | z"])
    assert [first_.column, second.column, third.column] == [0, 1, 2]
    with pytest.raises(SphinxError, match="has c/1_a build on 2_b"):
        stations(["c/1_a | 2_b | x", "c/2_b | | y"])
