"""Where a run that broke its promise first went wrong, as the player's data say it, and what a browser shows of it."""
from __future__ import annotations

import inspect
import json
import linecache
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from book import collectives
from book.launch import HangError, launch, rank_device
from book.record import lanes, watch
from book.schedule import Move, Schedule
from book.trace import Event, Trace
from book.trace_schema import CellLine
from book.widgets import play
from book.widgets.player import run_payload
from book.widgets.player_run import as_trace
from tests.browser import Browser
from tests.players import assert_readable, click, first, state, until
from tests.website import Site
from tests.widget_rows import wrong_ring

def ring(change: Callable[[Move], Move | None], shift: int = 0) -> Schedule:
    """A ring all-reduce whose moves are changed, or left out; `shift` is added to the numbers of its chunks."""
    moves = (change(replace(move, chunk=(move.chunk + shift) % 4)) for move in collectives.ring_all_reduce(4).moves)
    return Schedule("mine", 4, 4, [move for move in moves if move is not None], "all_reduce")


def fault(schedule: Schedule) -> tuple[int, str]:
    """The first wrong step of a schedule's run, and what is said of it."""
    found = run_payload(as_trace(schedule))["fault"]
    return found["step"], found["says"]


def rebound_step(chunks: list[torch.Tensor], step: int) -> None:
    """A step of the reduce-scatter as learners write it: the name `mine` is bound to what came, the chunk stays."""
    rank, size = dist.get_rank(), dist.get_world_size()
    outgoing, mine = chunks[(rank - step) % size], chunks[(rank - step - 1) % size]
    incoming = torch.empty_like(mine)
    for request in dist.batch_isend_irecv([dist.P2POp(dist.isend, outgoing, (rank + 1) % size),
                                           dist.P2POp(dist.irecv, incoming, (rank - 1) % size)]):
        request.wait()
    mine = incoming


def in_a_cell(function: Callable, *helpers: Callable) -> Callable:
    """The same function as a notebook's cell defines it, with its helpers."""
    source, name = "".join(map(inspect.getsource, (function, *helpers))), f"<ipython-input-{function.__name__}>"
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    namespace = {**function.__globals__, "__name__": "__main__"}
    exec(compile(source, name, "exec"), namespace)
    return namespace[function.__name__]


def rebound(make_step: Callable[[list[torch.Tensor], int], None]) -> None:
    """In a rank: a reduce-scatter of such steps."""
    rank_device()
    dist.init_process_group()
    size = dist.get_world_size()
    buffer = lanes(size)
    watch(buffer, size)
    for step in range(size - 1):
        make_step(list(buffer.tensor_split(size)), step)


def played(trace: Trace) -> dict[str, Any]:
    """What a player is told of a reduce-scatter that went wrong."""
    return run_payload(trace, "reduce_scatter")["fault"]


@pytest.mark.slow
def test_the_line_of_the_cell_that_sent_is_told() -> None:
    trace = launch(rebound, 4, in_a_cell(rebound_step), record=True).trace
    assert {event.line for event in trace.of_kind("recv")} == {None}
    text = "for request in dist.batch_isend_irecv([dist.P2POp(dist.isend, outgoing, (rank + 1) % size),"
    assert {event.line for event in trace.of_kind("send")} == {(6, "rebound_step", text)}
    assert played(trace)["line"] == ["6", "rebound_step", text]
    assert played(Trace.from_json(trace.to_json()))["line"] == ["6", "rebound_step", text]
    without = json.loads(trace.to_json())
    del without["events"]["line"]  # as in an older recording
    old = played(Trace.from_json(json.dumps(without)))
    assert "line" not in old and old["says"] == played(trace)["says"]
    assert {event.line for event in launch(rebound, 2, rebound_step, record=True).trace.events} == {None}, "no cell's"


def shifted(outgoing: torch.Tensor, incoming: torch.Tensor) -> None:
    """A helper that is handed its chunks: to the right goes one, from the left comes the other."""
    rank, size = dist.get_rank(), dist.get_world_size()
    transfers = [dist.P2POp(dist.isend, outgoing, (rank + 1) % size),
                 dist.P2POp(dist.irecv, incoming, (rank - 1) % size)]
    for request in dist.batch_isend_irecv(transfers):
        request.wait()


def exchanged(*, outgoing: torch.Tensor, incoming: torch.Tensor, into: torch.Tensor) -> None:
    """A helper of helpers."""
    shifted(outgoing, incoming)
    into += incoming


def ring_of_helpers(chunks: list[torch.Tensor], _: int) -> None:
    """A reduce-scatter that sends a wrong chunk by a helper of helpers, which it is not in itself."""
    rank, size = dist.get_rank(), dist.get_world_size()
    for step in range(size - 1):
        outgoing, mine = chunks[(rank + step) % size], chunks[(rank + step - 1) % size]
        exchanged(outgoing=outgoing, incoming=torch.empty_like(mine),
                  into=mine)


def ring_of_one(chunks: list[torch.Tensor], _: int) -> None:
    """A wrong step that is in no loop: nobody knows that the schedule is here."""
    shifted(chunks[0], chunks[0].clone())


def looped(chunk: torch.Tensor) -> None:
    """Sends what it is handed in a loop of its own: to the right, and receives from the left."""
    rank, size = dist.get_rank(), dist.get_world_size()
    for away in (1,):
        request = dist.isend(chunk, (rank + away) % size)
        dist.recv(chunk.clone(), (rank - away) % size)
        request.wait()


def one_of_many(chunks: list[torch.Tensor], _: int) -> None:
    """Calls a helper in a loop, but the helper has one too."""
    for _ in range(2):
        looped(chunks[0])


def picks(chunks: list[torch.Tensor], number: int) -> None:
    """Chooses what it sends itself."""
    rank, size = dist.get_rank(), dist.get_world_size()
    request = dist.isend(chunks[number], (rank + 1) % size)
    dist.recv(chunks[number].clone(), (rank - 1) % size)
    request.wait()


def told_to_pick(chunks: list[torch.Tensor], _: int) -> None:
    """Calls a helper in a loop that chooses what it sends."""
    for number in range(2):
        picks(chunks, number)


def chosen(chunks: list[torch.Tensor], number: int) -> None:
    """One step: chooses what a helper sends, and is in no loop itself."""
    shifted(chunks[number], chunks[number].clone())


def step_by_step(chunks: list[torch.Tensor], _: int) -> None:
    """Calls one step after the other, as a check does."""
    for number in range(2):
        chosen(chunks, number)


def comprehended(chunks: list[torch.Tensor], _: int) -> None:
    """Sends in a comprehension, in a line of its own."""
    rank, size = dist.get_rank(), dist.get_world_size()
    requests = [
        dist.isend(chunks[number], (rank + 1) % size)
        for number in range(2)]
    for request in requests:
        dist.recv(chunks[0].clone(), (rank - 1) % size)
        request.wait()


def comprehends_helpers(chunks: list[torch.Tensor], _: int) -> None:
    """Chooses in a comprehension what a helper sends."""
    assert all([shifted(chunks[number], chunks[number].clone()) is None for number in range(2)])


@pytest.mark.slow
@pytest.mark.parametrize("step, function, source", [
    (comprehended, "comprehended", "dist.isend(chunks[number], (rank + 1) % size)"),
    pytest.param(comprehends_helpers, "comprehends_helpers", "assert all([shifted(chunks[number], chunks[number]."
                 "clone()) is None for number in range(2)])",
                 marks=pytest.mark.skipif(sys.version_info >= (3, 12), reason="the comprehension is no function")),
    (ring_of_helpers, "ring_of_helpers", "exchanged(outgoing=outgoing, incoming=torch.empty_like(mine),"),
    (ring_of_one, "shifted", "for request in dist.batch_isend_irecv(transfers):"),
    (one_of_many, "looped", "request = dist.isend(chunk, (rank + away) % size)"),
    (step_by_step, "chosen", "shifted(chunks[number], chunks[number].clone())"),
    (told_to_pick, "picks", "request = dist.isend(chunks[number], (rank + 1) % size)")])
def test_the_line_of_helpers_is_that_of_the_loop_that_chose_what_they_send(step: Callable, function: str,
                                                                           source: str) -> None:
    trace = launch(rebound, 4, in_a_cell(step, shifted, exchanged, looped, picks, chosen), record=True).trace
    assert {event.line and event.line[1:] for event in trace.of_kind("send")} == {(function, source)}


def two_messages(first: torch.Tensor, second: torch.Tensor) -> None:
    """Drops the request of the first message while the function still runs."""
    rank, size = dist.get_rank(), dist.get_world_size()
    request = dist.isend(first, (rank + 1) % size)
    request = dist.isend(second, (rank + 1) % size)
    for _ in range(2):
        dist.recv(first.clone(), (rank - 1) % size)
    request.wait()


def drops_one(chunks: list[torch.Tensor], _: int) -> None:
    """Hands a helper two chunks."""
    two_messages(chunks[0], chunks[1])


@pytest.mark.slow
@pytest.mark.parametrize("record", [False, True])
def test_to_look_for_the_line_keeps_no_request_that_a_helper_drops(record: bool) -> None:
    with pytest.raises(HangError, match="did not keep what isend returned"):
        launch(rebound, 3, in_a_cell(drops_one, two_messages), record=record, hang_s=0.5)


@pytest.mark.parametrize("what", ["replaced", "another chunk", "left out"])
def test_the_line_is_that_of_the_message_that_was_to_come(what: str) -> None:
    """In step 2 rank 0 gets a wrong message from rank 3, or none, and one from rank 2 that changes no chunk."""
    changed = {"replaced": lambda m: replace(m, op="copy"), "another chunk": lambda m: replace(m, chunk=3),
               "left out": lambda m: None}[what]
    schedule = ring(lambda m: changed(m) if (m.step, m.dst) == (2, 0) else m)
    trace = as_trace(schedule)
    lines = [replace(e, line=CellLine(10 * e.step + e.rank, "f", "send(x)") if e.kind == "send" else None)
             for e in trace.events]
    lines.insert(0, Event(2, "send", peer=0, chunk=2, step=2, contributions=(0, 0, 1, 0),
                          line=CellLine(99, "f", "other(x)")))
    lines.append(Event(0, "recv", peer=2, step=2))
    found = run_payload(Trace(lines, 4, "logical", "recorded", promise="all_reduce"))["fault"]
    assert found["step"] == 3 and found.get("line") == (None if what == "left out" else ["23", "f", "send(x)"])


@pytest.mark.slow
def test_a_name_that_is_rebound_is_wrong_from_the_first_step_on() -> None:
    data = run_payload(launch(rebound, 4, rebound_step, record=True).trace, "reduce_scatter")
    assert data["fault"]["says"] == "rank 1's chunk 0 lacks rank 0, from step 1 on"
    right = run_payload(as_trace(collectives.ring_reduce_scatter(4)))
    assert all(data["fault"]["right"][name] == right[name] for name in ("transfers", "contents"))
    assert data["transfers"]["into"][:4] == [None] * 4 and data["transfers"]["arrives"][:4] == [0] * 4
    assert data["rests"][0].startswith(", which receives it and changes no chunk.")


def test_the_first_wrong_step_is_told() -> None:
    assert fault(wrong_ring()) == (4, "rank 1's chunk 1 counts rank 1 twice, from step 4 on")
    assert fault(ring(lambda m: replace(m, op="copy") if m.step == 2 and m.dst == 0 else m)) == (
        3, "rank 0's chunk 1 lacks rank 0, from step 3 on")
    assert fault(ring(lambda m: None if (m.step, m.src) == (1, 2) else m)) == (
        2, "rank 3's chunk 1 lacks ranks 1 and 2, from step 2 on")


@pytest.mark.parametrize("shift", range(4))
def test_a_ring_may_begin_with_another_chunk(shift: int) -> None:
    """Nothing but the step that was changed is wrong of it."""
    assert fault(ring(lambda m: replace(m, op="copy") if m.step == 2 else m, shift))[0] == 3
    assert run_payload(as_trace(ring(lambda m: m, shift)))["ok"]


def test_the_right_run_starts_with_what_the_wrong_one_held() -> None:
    """Lab 3's all-gather begins with every rank's own data in all of its chunks, not only in one."""
    gather = collectives.ring_all_gather(4)
    held = {(r, c): tuple(np.eye(4)[r]) for r in range(4) for c in range(4)}
    events = [Event(r, "hold", chunk=c, step=0, contributions=own) for (r, c), own in held.items()]
    for m in gather.moves:
        src, sent = m.src, held[m.src, m.chunk]
        events.append(Event(src, "send", peer=m.dst, chunk=m.chunk, step=m.step, contributions=sent))
        into = None if m.step == 1 else m.chunk  # a step whose messages change no chunk
        events.append(Event(m.dst, "recv", "copy" if into is not None else None, m.src, chunk=into, step=m.step,
                            contributions=sent if into is not None else None))
        if into is not None:
            held[m.dst, m.chunk] = sent
    found = run_payload(Trace(events, 4, "logical", "recorded"), "all_gather")["fault"]
    right = found["right"]
    assert found["step"] == 2
    held = [[right["contents"][place] for place in row] for row in right["start"]]
    assert held == [[[*own]] * 4 for own in np.eye(4)]


def test_a_run_like_no_schedule_of_the_book_has_no_right_one() -> None:
    """What is there too often is reported all the same; what is missing has no first step."""
    moves = [Move(step, 0, 1, 0, "reduce") for step in range(3)]
    found = run_payload(as_trace(Schedule("mine", 4, 4, moves, "all_reduce")))["fault"]
    assert "right" not in found
    assert (found["step"], found["says"]) == (2, "rank 1's chunk 0 counts rank 0 twice, from step 2 on")
    assert fault(Schedule("mine", 4, 4, moves[:1], "all_reduce")) == (1, "")


LINE = "requests.append(dist.isend(chunks[(rank - step) % world_size].contiguous(), right)) # <b>"


def with_lines(schedule: Schedule) -> Trace:
    """A schedule's run as if a cell had sent its messages, by one long line."""
    trace = as_trace(schedule)
    lines = [replace(e, line=CellLine(6, "step", LINE) if e.kind == "send" else None) for e in trace.events]
    return Trace(lines, 4, "logical", "recorded", promise=trace.promise)


WHERE = "all => all.map(e => [e.getBoundingClientRect().left, e.getBoundingClientRect().right])"


@pytest.mark.parametrize("width", first(1200, 390))
def test_a_wrong_run_opens_at_its_first_wrong_step(show: Callable, width: int) -> None:
    """In the error colour, with the verdict in the title row and the right run beside it, in the same step."""
    page = show(play(with_lines(wrong_ring())), width=width, reduced_motion="reduce")
    until(page, step=4)
    assert page.inner_text(".lk-callline") == f"Sent by line 6 of your cell, in step: {LINE}"
    assert page.inner_text(".lk-head .lk-wrong") == "rank 1's chunk 1 counts rank 1 twice, from step 4 on"
    assert page.locator(".lk-track.wrong").count() == 4
    click(page, "Beside the right run")
    lanes = page.locator(".lk-lane")
    assert lanes.count() == 2 and lanes.nth(1).locator(".lk-track.wrong").count() == 0
    if width > 600:
        (_, end), (begin, _) = page.eval_on_selector_all(".lk-lane .lk-stage", WHERE)
        assert end <= begin, "one does not cover the other"
    assert_readable(page, f"beside, {width} px")
    page.keyboard.press("End")
    until(page, step=6)
    assert [lane.locator(".lk-num.bad").count() for lane in lanes.all()] == [12, 0]
    click(page, "Beside the right run")
    assert lanes.count() == 0 and state(page)["step"] == "6"


def test_the_opening_step_is_in_a_saved_file(tmp_path: Path, browser: Browser) -> None:
    play(wrong_ring()).save(tmp_path / "saved.html")
    page, log = browser.open((tmp_path / "saved.html").as_uri())
    until(page, step=4)
    assert page.locator(".lk-head .lk-wrong").is_visible()
    log.assert_clean()


def test_predicting_begins_at_the_start(show: Callable) -> None:
    assert state(show(play(wrong_ring(), predict=True)))["step"] == "0"


def test_a_right_run_has_nothing_wrong_in_its_title(show: Callable) -> None:
    page = show(play(collectives.ring_all_reduce(4)))
    assert page.locator(".lk-fault").is_hidden() and state(page)["step"] == "0"


def test_the_website_tells_the_line_of_a_chapters_broken_run(site: Site, browser: Browser) -> None:
    page, log = browser.open((site.folder / "chapters" / "03_ring_all_reduce.html").as_uri())
    told = page.locator(".lk-callline:not(:empty)")
    assert told.all_inner_texts() == [
        "Sent by line 8 of your cell, in wrong_chunk: exchange(outgoing, incoming)",
        "Sent by line 6 of your cell, in copy_instead_of_add: "
        "exchange(outgoing, chunks[(rank - step - 1) % world_size])"]
    log.assert_clean()


def test_a_fault_without_a_line_says_nothing_of_one(show: Callable) -> None:
    assert show(play(wrong_ring())).locator(".lk-callline").is_hidden()
