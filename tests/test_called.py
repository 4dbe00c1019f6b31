"""Recordings of collectives alone: what `play` draws of them, by hand, of a real program, and in Chromium."""
from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from book.launch import launch
from book.trace import Event, Trace
from book.widgets import play
from book.widgets.called import CollectivesView
from book.widgets.calls import KINDS, TICKS

OWN, WAITS, SUMS = KINDS.index("other code"), len(KINDS), len(KINDS) + 1


def recording(*calls: tuple[str, tuple[int, ...], dict[int, tuple[float, float]]], num_ranks: int = 2) -> Trace:
    """A recording of these collectives: name, group, and of each rank when it came and when it was done."""
    return Trace([Event(rank, "collective", op, group=group, num_bytes=8, start_s=times_s[0], end_s=times_s[1])
                  for op, group, ranks in calls for rank, times_s in ranks.items()], num_ranks, "measured", "recorded")


def view(what: Any, **options: Any) -> CollectivesView:
    shown = play(what, **options)
    page = getattr(shown, "shown", shown)
    assert isinstance(page, CollectivesView)
    return page


def decoded(lane: list[int]) -> list[tuple[int, float, float]]:
    """Kind, start and end of each block, in shares of the time."""
    found, at = [], 0
    for kind, gap, length in zip(*[iter(lane)] * 3):
        found.append((kind, (at + gap) / TICKS, (at + gap + length) / TICKS))
        at += gap + length
    return found


def test_who_waits_in_which_collective() -> None:
    trace = recording(("all_reduce", (0, 1), {0: (0.0, 0.6), 1: (0.4, 0.6)}),
                      ("broadcast", (0, 1), {0: (0.7, 0.75), 1: (0.8, 1.0)}))
    [run] = view(trace).data(live=False)["runs"]
    assert run["called"] == [["all_reduce"], ["broadcast"]] and run["duration_s"] == 1
    root = [(WAITS, 0, 0.4), (SUMS, 0.4, 0.6), (OWN, 0.6, 0.7), (SUMS + 2, 0.7, 0.75), (OWN, 0.75, 1)]
    assert decoded(run["lanes"][0]) == root, "a root that is done before the last rank comes has not waited for it"
    assert decoded(run["lanes"][1]) == [(OWN, 0, 0.4), (SUMS, 0.4, 0.6), (OWN, 0.6, 0.8), (SUMS + 2, 0.8, 1)]
    assert [stop["t"] / TICKS for stop in run["stops"]] == [0, 0.4, 0.8, 1]
    assert run["stops"][1]["say"] == [["Rank 1 comes last to all_reduce", ", 400 ms after the first."]]
    assert run["figures"] == [["1×", "all_reduce of ranks 0, 1, 8 B in a rank's tensors"],
                              ["1×", "broadcast of ranks 0, 1, 8 B in a rank's tensors"],
                              ["400 ms", "rank 0 waits for others, the most of all"], ["0 s", "rank 1, the least"]]


def test_groups_are_named_and_calls_that_overlap_are_drawn_one_after_the_other() -> None:
    trace = recording(("all_reduce", (0, 1), {0: (0.0, 0.5), 1: (0.0, 0.5)}),
                      ("all_gather", (0, 1), {0: (0.2, 1.0), 1: (0.2, 1.0)}),
                      ("all_reduce", (2, 3), {2: (0.0, 0.5), 3: (0.25, 0.5)}), num_ranks=4)
    [run] = view({"a": trace}).data(live=False)["runs"]
    assert run["called"] == [["all_reduce of ranks 0, 1", "all_reduce"], ["all_reduce of ranks 2, 3", "all_reduce"],
                             ["all_gather of ranks 0, 1", "all_gather"]]
    assert decoded(run["lanes"][0]) == [(SUMS, 0, 0.5), (SUMS + 4, 0.5, 1)]
    assert decoded(run["lanes"][2]) == [(WAITS + 2, 0, 0.25), (SUMS + 2, 0.25, 0.5), (OWN, 0.5, 1)]


def test_of_a_long_recording_the_end_is_shown() -> None:
    calls = [("all_reduce", (0, 1), {0: (k, k + 0.5), 1: (k + 0.25, k + 0.5)}) for k in range(5000)]
    page = view({"long": recording(*calls), "short": recording(*calls[:2])}, select="long")
    long, short = page.data(live=False)["runs"]
    assert long["stops"][0]["say"][0][1].startswith("The last ") and short["stops"][0]["say"][0][1].startswith("All ")
    assert long["figures"][0][0] == "5000×" and len(page.html()) < 100_000
    assert "<strong>short</strong>" in page.words() and "all_reduce of ranks 0, 1" in page.words()


def test_traces_with_anything_else_are_not_drawn_so() -> None:
    plain = recording(("barrier", (0, 1), {0: (0, 1), 1: (0, 1)}))
    message = [Event(0, "send", peer=1, chunk=0, step=0), Event(1, "recv", peer=0, chunk=0, step=0)]
    mixed = Trace([*plain.events, *message], 2, "measured", "recorded")
    assert not isinstance(getattr(play(mixed), "shown", play(mixed)), CollectivesView)
    with pytest.raises(ValueError, match="collectives alone are drawn where they have times"):
        play(plain.logical())
    with pytest.raises(ValueError, match="with collectives alone"):
        view(plain).with_trace(mixed)


def training() -> None:
    """Rank 1 comes late to each of three sums, and then two groups sum."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    for _ in range(3):
        time.sleep(0.25 * (rank == 1))
        dist.all_reduce(torch.ones(1 << 18))
    dist.all_reduce(torch.ones(4), group=groups[rank // 2])


@pytest.mark.slow
def test_a_real_recording_is_drawn(browser: Any, tmp_path: Path) -> None:
    trace = launch(training, 4, record=True).trace
    assert trace.sent_bytes().tolist() == [3 * 1.5 * (4 << 18) + 16] * 4
    page = view(trace)
    [run] = page.data(live=False)["runs"]
    waited = [sum(end - start for kind, start, end in decoded(lane) if kind >= WAITS and (kind - WAITS) % 2 == 0)
              for lane in run["lanes"]]
    assert min(waited[0], waited[2], waited[3]) * run["duration_s"] > 0.6 > 0.3 > waited[1] * run["duration_s"]
    page.save(tmp_path / "page.html")
    for width, scheme in ((1280, "light"), (1280, "dark"), (390, "light")):
        tab, log = browser.open((tmp_path / "page.html").as_uri(), width=width, color_scheme=scheme)
        assert tab.evaluate("document.documentElement.scrollWidth") <= width
        assert tab.locator(".lk-waits text").first.text_content() == "all_reduce"
        assert "all_reduce of ranks 2, 3" in tab.locator("body").inner_text()
        log.assert_clean()
