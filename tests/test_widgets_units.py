"""Bytes, times, counts and names as widgets write them, and that JavaScript writes the same."""
from __future__ import annotations

from collections.abc import Callable

import pytest

from book.pipelines import gpipe
from book.widgets import pipeline_player
from book.widgets.terms import spelled
from book.words import counted
from book.widgets.terms import in_bytes, in_seconds, percent

SIZES = {0: "0 B", 400: "400 B", 999: "999 B", 1000: "1.00 kB", 4608: "4.61 kB", 99_600: "99.6 kB", 461_000: "461 kB",
         999_499: "999 kB", 999_500: "1.00 MB", 400e6: "400 MB", 7.5e9: "7.50 GB"}
TIMES = {0: "0 s", 2e-7: "0.2 µs", 8e-4: "800 µs", 9.994e-4: "999 µs", 9.996e-4: "1 ms", 6.6e-3: "6.6 ms",
         0.12: "120 ms", 0.9994: "999 ms", 0.9996: "1 s", 1.804: "1.8 s", 240.0: "240 s"}


def test_three_digits_in_the_unit_that_fits() -> None:
    assert {size: in_bytes(size, zeros=True) for size in SIZES} == SIZES
    assert {time_s: in_seconds(time_s) for time_s in TIMES} == TIMES
    assert [in_bytes(size) for size in (1000, 4608, 2300, 7e12)] == ["1 kB", "4.61 kB", "2.3 kB", "7 TB"]
    assert [percent(share) for share in (0, 3 / 11, 1)] == ["0.0 %", "27.3 %", "100.0 %"]


@pytest.mark.parametrize("seconds, text", [(0, "0 ms"), (7e-5, "0.07 ms"), (0.0066, "6.6 ms"), (1.5, "1500 ms")])
def test_a_column_of_times_has_one_unit(seconds: float, text: str) -> None:
    assert in_seconds(seconds, "ms") == text


def test_counts_and_names() -> None:
    assert [counted(count, "micro-batch") for count in (1, 2)] == ["1 micro-batch", "2 micro-batches"]
    assert [counted(2, one) for one in ("process", "stage")] == ["2 processes", "2 stages"]
    assert [spelled(name) for name in ("ring_all_reduce", "broadcast")] == ["ring all-reduce", "broadcast"]


def test_javascript_writes_the_same(show: Callable) -> None:
    """What a script works out as the clock runs reads as what Python has put beside it."""
    page = show(pipeline_player(gpipe(2, 2)))
    written = "([all, by]) => all.map(x => globalThis.lockstep.scene[by](x))"
    assert page.evaluate(written, [list(SIZES), "bytes"]) == list(SIZES.values())
    assert page.evaluate(written, [list(TIMES), "short"]) == list(TIMES.values())
