"""The bucket timeline of a program that sends one bucket in two parts."""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from book.trace import Trace
from book.widgets import bucket_timeline
from tests.backward import recorded
from tests.players import press, state
from tests.widget_rows import REPLAY


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
