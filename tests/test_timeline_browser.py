"""The bucket timeline and the picture of calls in a real Chromium, on static pages of their own HTML and assets, with
the network blocked."""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from book.trace import Trace
from book.widgets import bucket_timeline
from book.widgets.calls import Calls
from tests.backward import layers, recorded
from tests.players import caption, captions, figures, press, scrub, state, until
from tests.test_look_times import made_up
from tests.widget_rows import LATE, REPLAY, SMALL, caps

CONTAINER = ".lk-bucket[data-rank='{}'][data-b='{}']"


def clock(page: Any) -> str:
    """The time that is written below the lanes."""
    return page.locator(".lk-stage .lk-rank").last.text_content()


def bucket(page: Any, rank: int, index: int) -> tuple[str, str]:
    """How a bucket looks, and what it says of itself."""
    g = page.locator(CONTAINER.format(rank, index))
    return g.get_attribute("class"), g.get_attribute("aria-label")


def test_each_stop_is_described(show: Callable) -> None:
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


def test_one_bucket_is_told_in_the_singular(show: Callable) -> None:
    page = show(bucket_timeline(recorded({0: SMALL[0]}), REPLAY))
    assert figures(page)["bucket, 100 kB on each rank"] == "1"


def test_gradients_sent_after_backward_and_never_sent(show: Callable) -> None:
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


def test_buckets_fill_wait_travel_and_are_averaged(show: Callable) -> None:
    page = show(bucket_timeline(recorded(SMALL), LATE), reduced_motion="reduce")
    seen: dict[int, list[tuple[str, str]]] = {0: [], 1: []}
    for _ in range(int(state(page)["steps"]) + 1):
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


def test_scrubbing_moves_the_clock_and_what_it_passed(show: Callable) -> None:
    page = show(bucket_timeline(recorded(SMALL), REPLAY))
    hidden_right = "parseFloat(document.querySelector('.lk-move').style.clipPath.split(' ')[1])"
    before = page.evaluate(hidden_right)
    scrub(page, 0.55)
    assert clock(page) == "440 µs", "where it was let go, not at a stop"
    assert state(page)["step"] == "3" and page.evaluate(hidden_right) < before - 100
    assert page.get_by_role("slider").get_attribute("aria-valuetext") == "440 µs of 800 µs"


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


def test_the_clock_continues_in_another_run(show: Callable) -> None:
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


@pytest.mark.parametrize("options", [{"color_scheme": "dark", "width": 390}, {}])
def test_calls_open_at_their_end_and_are_told_one_by_one(show: Callable, options: dict[str, Any]) -> None:
    page = show(Calls(made_up(4, 2, "backward", num_steps=9), end="rank 2 is late"), reduced_motion="reduce", **options)
    assert caption(page) == "rank 2 is late" and state(page)["step"] == state(page)["steps"] == "9"
    assert captions(page)[1:9] == [
        "Rank 2 comes last, 20 ms after the one before it and 20 ms after the first."] * 8
    assert page.locator(".lk-key span").all_inner_texts() == [
        "\u00a0input", "\u00a0forward", "\u00a0backward", "\u00a0optimizer", "\u00a0other code", "\u00a0exchange",
        "\u00a0waits for others"]
    assert page.locator(".lk-rank").all_text_contents() == [f"rank {rank}" for rank in range(4)]
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


# A program that sends one bucket in two parts
def in_two_parts() -> Trace:
    """Two gradients in one bucket, which two all-reduces of half its bytes carry, one after the other."""
    whole = recorded({0: [("a", 4000), ("b", 4000)]})
    parts = [replace(event, num_bytes=4000.0, start_s=event.start_s + later, end_s=event.end_s + later)
             for event in whole.events if event.kind == "collective" for later in (0.0, 5.0)]
    return Trace([*(event for event in whole.events if event.kind == "compute"), *parts], 2, "measured", "recorded")


def test_a_bucket_is_averaged_when_its_last_part_is(show: Callable) -> None:
    page = show(bucket_timeline(in_two_parts(), REPLAY), reduced_motion="reduce")
    seen = []
    for _ in range(int(state(page)["steps"]) + 1):
        seen.append(page.locator(".lk-bucket[data-rank='0'][data-b='0']").get_attribute("class").split()[1])
        press(page, "ArrowRight")
    assert seen == ["filling", "filling", "flying", "flying", "averaged"]
