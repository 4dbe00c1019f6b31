"""Training steps: their replay on a modelled clock, and the widget that shows who waits for whom."""
from __future__ import annotations

import json
import re
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from book.cost import Link, ring_all_reduce_s
from book.launch import launch
from book.record import phase
from book.replay import StepReplay, read_job, steps_of
from book.trace import Event, Trace
from book.widgets import step_timeline
from book.widgets.steps import figures
from tests.steps import PHASES, recorded
from tests.website import ROOT

LINK = Link(1e-5, 1e8)
RING_S = ring_all_reduce_s(4, 1000, LINK)
STEP_S = sum(PHASES.values())
OFTEN, ALONE = "comes last over and over", "of the time all wait for a single rank"
TRAVEL = "of the time messages travel, and all wait"


def replayed(late: Any = None, **options: Any) -> Trace:
    return StepReplay(PHASES, options.pop("link", LINK), late or {})(recorded(**options))


def told(trace: Trace) -> dict[str, str]:
    """The figures of a job, by what they mean."""
    return {meaning: value for value, meaning in figures(read_job(trace))}


def test_a_step_takes_its_phases_and_the_last_all_reduce() -> None:
    job = read_job(replayed(num_steps=3))
    assert job.num_steps == 3 and job.end_s == pytest.approx(3 * (STEP_S + RING_S))
    assert job.own_s(1) == pytest.approx({name: 3 * seconds for name, seconds in PHASES.items()})
    assert job.timed_s(1)["backward"] == pytest.approx(3 * (PHASES["backward"] + RING_S))


@pytest.mark.parametrize("rank", range(4))
@pytest.mark.parametrize("name", PHASES)
def test_a_late_rank_is_named_with_its_phase_although_all_backwards_take_as_long(rank: int, name: str) -> None:
    trace = replayed({(rank, name): 0.03}, num_steps=4)
    found = told(trace)
    assert found[OFTEN] == f"rank {rank}, {name}"
    job = read_job(trace)
    if name == "backward":
        assert len({round(job.timed_s(one)["backward"], 9) for one in range(4)}) == 1, "this is all that a monitor sees"


def test_nobody_is_accused_of_a_slow_network_of_jitter_or_of_nothing() -> None:
    assert told(replayed())[OFTEN] == "nobody"
    slow = told(replayed(link=Link(0.01, 1e8)))
    assert slow[OFTEN] == "nobody" and float(slow[TRAVEL].split()[0]) > 30
    turns = {(rank, "forward"): [0.03 * (step == rank) for step in range(4)] for rank in range(4)}
    jitter = told(replayed(turns, num_steps=4))
    assert jitter[OFTEN] == "nobody" and float(jitter[ALONE].split()[0]) > 20


def test_a_verdict_names_a_rank_or_says_that_none_can_be_named() -> None:
    assert read_job(replayed({(2, "backward"): 0.03})).verdict == "the others wait for rank 2, most of all in backward"
    turns = {(rank, "forward"): [0.03 * (step == rank) for step in range(4)] for rank in range(4)}
    for trace in (replayed(turns, num_steps=4), replayed()):
        said = read_job(trace).verdict
        assert re.fullmatch(r"no rank can be named: for \d+% of the time all others waited for one of them, and not "
                            "for the same one over and over", said), said
    chapter = json.loads((ROOT / "chapters/13_slow_jobs.ipynb").read_text("utf-8"))
    code = "".join("".join(cell["source"]) for cell in chapter["cells"] if cell["cell_type"] == "code")
    assert ".verdict" in code and "late_rank" not in code, "a cell that prints late_rank prints None one day"


def test_a_sequence_of_delays_is_by_time_and_zero_after_its_end() -> None:
    job = read_job(replayed({(0, "input"): [0.0, 0.05]}, num_steps=4))
    assert [one.last == 0 and one.late_s > 0.04 for one in job.meetings] == [False, True, False, False]


def test_an_all_reduce_outside_of_a_phase_is_waited_for() -> None:
    group = (0, 1)
    events = [event for rank in group for event in (
        Event(rank, "compute", "forward", start_s=0.0, end_s=1.0),
        Event(rank, "collective", "all_reduce", group=group, num_bytes=8, start_s=1.5, end_s=2.0),
        Event(rank, "compute", "backward", start_s=3.0, end_s=4.0))]
    trace = StepReplay({"forward": 1.0, "backward": 1.0}, LINK, {(1, "forward"): 2.0})(
        Trace(events, 2, "measured", "recorded"))
    done_s = 3 + ring_all_reduce_s(2, 8, LINK)
    times_s = [time_s for event in trace.of_rank(0) for time_s in event.times_s]
    assert times_s == pytest.approx([0, 1, 1, done_s, done_s, done_s + 1])
    assert read_job(trace).meetings[0].name == "all-reduce"


def test_what_cannot_be_replayed_or_drawn_is_refused() -> None:
    plain = Trace([Event(0, "compute", "w", num_bytes=4, start_s=0, end_s=1)], 1, "measured", "recorded")
    with pytest.raises(ValueError, match="has no phases: wrap the parts of a step"):
        step_timeline(plain)
    with pytest.raises(ValueError, match="phase_s has no duration for optimizer"):
        StepReplay({"input": 1, "forward": 1, "backward": 1}, LINK)(recorded())
    alone = [event for event in recorded(2).events if event.rank or event.kind != "collective"]
    with pytest.raises(ValueError, match="do not all have the same phases and all-reduces"):
        StepReplay(PHASES, LINK)(Trace(alone, 2, "measured", "recorded"))
    with pytest.raises(ValueError, match="no all-reduce is called by all ranks"):
        step_timeline(Trace(alone, 2, "measured", "recorded"))
    with pytest.raises(ValueError, match="has room for 8 ranks, not 9"):
        step_timeline(recorded(9))
    with pytest.raises(TypeError, match="takes a Trace .* not int"):
        step_timeline(3)


def test_the_answer_is_in_the_words_and_not_in_the_caption_at_the_start() -> None:
    page = step_timeline({"A": replayed({(2, "backward"): 0.03}), "B": replayed()}, labels=["job"])
    html = page._repr_mimebundle_()[0]["text/html"] if hasattr(page, "shown") else page.html()
    assert "<td>rank 2, backward</td>" in html and "<td>nobody</td>" in html
    assert '"say":[["","This is what a monitor shows' in html.replace("&quot;", '"')
    assert str(page) == ("Training steps, rank by rank: step timeline of 2 runs (A, B), 4 ranks, order recorded, "
                         "durations modelled")


def steps(late_rank: int) -> None:
    dist.init_process_group()
    for _ in range(3):
        with phase("forward"):
            time.sleep(0.3 if dist.get_rank() == late_rank else 0.01)
        with phase("backward"):
            dist.all_reduce(torch.ones(4))


def test_a_real_job_has_its_phases_and_its_late_rank() -> None:
    trace = launch(steps, 3, 1, record=True).trace
    assert [[block.phase.op for block in program if block.phase] for program in steps_of(trace)] == [
        ["forward", "backward"] * 3] * 3
    assert told(trace)[OFTEN] == "rank 1, forward"


def test_a_phase_that_raises_is_not_recorded() -> None:
    def fail() -> None:
        dist.init_process_group()
        with pytest.raises(KeyError), phase("forward"):
            raise KeyError
    assert not launch(fail, 1, record=True).trace.of_kind("compute")
