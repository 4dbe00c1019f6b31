"""The player's Python side: what a trace is written as, its HTML on a page; how texts have bytes, times and names."""
from __future__ import annotations

import html
import json
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings, strategies as st

from book import collectives
from book.collectives import COLLECTIVES
from book.cost import Link
from book.execute import execute
from book.launch import launch
from book.pipelines import gpipe
from book.promise import PROMISES, variants
from book.record import lanes, watch
from book.schedule import Schedule
from book.simulate import simulate
from book.trace import Event, Trace
from book.widgets import panel, pipeline_player, play, race
from book.widgets.player import run_payload
from book.widgets.registry import ASSETS, STYLE, TWIN, WIDGETS, loaded, module, path_of, plain, text_of
from book.widgets.terms import percent, spelled
from book.words import counted, in_bytes, in_seconds
from tests.by_value import sent_by_value
from tests.players import MOST_PAGE_BYTES, compressed, html_of


sent_by_value(__name__)

LINK = Link(20e-6, 1e9)


def simulated(schedule: Schedule, **options: Any) -> Trace:
    return simulate(schedule, 400e6, LINK, **options)


def data_of(shown: Any) -> dict[str, Any]:
    """The data in a player's HTML, as a browser would read the attribute."""
    return json.loads(html.unescape(re.match(r"<div data-lockstep-player='([^']*)'>", html_of(shown))[1]))


def events_of(trace: Trace) -> dict[tuple, list]:
    """What a trace says of each (step, src, dst): every send's and receive's chunk, op and contributions."""
    found = defaultdict(list)
    for e in trace.events:
        if e.kind in ("send", "recv"):
            ends = (e.rank, e.peer) if e.kind == "send" else (e.peer, e.rank)
            found[(e.step, *ends)].append((e.kind, e.chunk, e.op if e.kind == "recv" else None, e.contributions))
    return {key: sorted(values, key=repr) for key, values in found.items()}


def contents(data: dict[str, Any]) -> list[tuple[float, ...] | None]:
    """What the places in a payload stand for."""
    return [held and tuple(held) for held in data["contents"]]


def decoded(data: dict[str, Any]) -> dict[tuple, list]:
    """The payload read back in the form of `events_of`, by this test's own reader."""
    held, columns, found = contents(data), data["transfers"], defaultdict(list)
    for src, dst, chunk, into, op, leaves, arrives, sent, after in zip(*columns.values(), strict=True):
        found[leaves, src, dst].append(("send", chunk, None, held[sent]))
        if arrives is not None:
            found[arrives, src, dst].append(("recv", into, op, held[after]))
    return {key: sorted(values, key=repr) for key, values in found.items()}


@pytest.mark.parametrize("name", COLLECTIVES)
@pytest.mark.parametrize("num_ranks", [2, 3, 4, 8, 13, 16])
def test_nothing_is_lost_in_the_payload(name: str, num_ranks: int) -> None:
    for schedule in COLLECTIVES[name].schedules(num_ranks):
        trace = simulated(schedule)
        assert decoded(run_payload(trace)) == events_of(trace)


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(st.data())
def test_wrong_and_unknown_contents_survive(data: st.DataObject) -> None:
    """Whatever a recording says a chunk held, the player is told just that, not what would have been right."""
    trace = simulated(collectives.ring_all_reduce(4))
    value = st.sampled_from([0, 1, 2, 0.25, 3])
    held = st.none() | st.tuples(value, value, value, value)
    events = [replace(e, contributions=data.draw(held)) if data.draw(st.booleans()) else e for e in trace.events]
    changed = Trace(events, 4, "modelled", "recorded")
    assert decoded(run_payload(changed)) == events_of(changed)


def test_a_message_into_the_wrong_chunk_and_one_never_received() -> None:
    start = [Event(r, "hold", chunk=c, step=0, contributions=(1 - r, r)) for r in (0, 1) for c in (0, 1)]
    events = [*start, Event(0, "send", None, 1, chunk=0, step=0, contributions=(1, 0)),
              Event(1, "recv", "reduce", 0, chunk=1, step=1, contributions=(1, 1)),
              Event(1, "send", None, 0, chunk=0, step=1, contributions=(0, 1)),
              Event(0, "hold", chunk=1, step=1, contributions=(2, 0))]
    trace = Trace(events, 2, "logical", "recorded")
    data = run_payload(trace)
    assert decoded(data) == events_of(trace)
    assert [(*where, contents(data)[place]) for *where, place in data["holds"]] == [(1, 0, 1, (2, 0))]
    assert data["ok"] is False and data["verdict"].endswith("Rank 0's chunk 0 lacks the contribution of rank 1.")


@pytest.mark.parametrize("name", COLLECTIVES)
def test_right_runs_end_right(name: str) -> None:
    assert all(run_payload(simulated(schedule))["ok"] is True for schedule in COLLECTIVES[name].schedules(8))


def test_wrong_runs_say_what_is_wrong() -> None:
    ring = collectives.ring_all_reduce(4)
    adds = Schedule(ring.name, 4, 4, [replace(move, op="reduce") for move in ring.moves], ring.promise)
    verdict = run_payload(simulated(adds))["verdict"]
    assert verdict.startswith("Wrong at the end: 4 of 16 chunks are complete. Rank 0's chunk 0 counts too often: "
                              "rank 0 (2 times)")
    copies = Schedule(ring.name, 4, 4, [replace(move, op="copy") for move in ring.moves], ring.promise)
    assert "lacks the contribution of ranks" in run_payload(simulated(copies))["verdict"]


@pytest.mark.parametrize("name", COLLECTIVES)
@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_goals_are_the_promise_of_the_schedule(name: str, num_ranks: int) -> None:
    for schedule in COLLECTIVES[name].schedules(num_ranks):
        promise, size = PROMISES[COLLECTIVES[name].promise], (num_ranks, schedule.num_chunks)
        data = run_payload(simulated(schedule))
        for rank, chunk in np.ndindex(size):
            place = data["goals"][rank][chunk]
            goal = contents(data)[place] if place is not None else None
            assert goal == (tuple(promise.goal(*size)[rank, chunk]) if promise.where(*size)[rank, chunk] else None)


def told(data: dict[str, Any]) -> list[str]:
    """All that a run says in words: at the start, of each step, at the end."""
    return [data["begin"], *(data["rests"][place] for place in data["says"]), data["verdict"]]


def payloads(num_ranks: int) -> dict[str, dict[str, Any]]:
    """What the player is given of each collective of the book that is made for a number of ranks alone."""
    alone = [c for c in COLLECTIVES.values() if c.sizes(num_ranks) == [(num_ranks,)]]
    return {c.name: run_payload(simulated(c.schedule(num_ranks))) for c in alone}


def test_rooted_collectives_in_words() -> None:
    said = {name: told(data) for name, data in payloads(4).items()}
    nothing = ", which held nothing there. Every other link is idle."
    assert said["broadcast"] == ["Start: only rank 0 holds data.", nothing, ", which held nothing there. Two links "
                                 "carry four chunks each at once.", "Done: every rank holds rank 0's data."]
    assert said["scatter"] == ["Start: only rank 0 holds data.", *[nothing] * 3,
                               "Done: every rank holds its chunk of rank 0's data."]
    assert said["gather"] == ["Start: each chunk is on one rank only.", *[nothing] * 3,
                              "Done: rank 0 holds a chunk of every rank's data."]
    assert said["reduce"][0] == "Start: every rank holds only its own data."
    assert said["reduce"][-1] == "Done: rank 0 holds every chunk complete."
    assert said["all_to_all"][1] == ", which puts it in place of its chunk 0. Four links carry one chunk at once."
    assert said["all_to_all"][-1] == "Done: every rank holds a chunk of every rank's data."


def test_bytes_sent_by_rooted_collectives() -> None:
    data = payloads(8)
    figures = {name: (run["total"], run["who"], run["formula"].replace("\u00a0", " ")) for name, run in data.items()}
    assert figures["broadcast"] == (3.0, 0, ": ⌈lg N⌉ · n")
    assert figures["scatter"] == (0.875, 0, ": (N−1)/N · n")
    assert figures["gather"] == (0.125, 1, ": 1/N · n")
    assert figures["reduce"] == (1.0, 1, "")
    assert figures["all_to_all"] == (0.875, -1, ": (N−1)/N · n")
    assert {run["bytes"] for run in data.values()} == {400_000_000}
    assert data["scatter"]["names"] == ["scatter", "scatter", ""]
    on_three = run_payload(simulated(collectives.broadcast(3)))
    assert (on_three["total"], on_three["formula"]) == (2.0, "")  # lg N and N-1 agree there


@pytest.mark.slow
def test_each_executed_collective_keeps_its_own_promise() -> None:
    makes = (collectives.broadcast, collectives.all_to_all, collectives.ring_reduce_scatter)
    traces = {make.__name__: launch(execute, 4, make(4), torch.ones(10 * 4)).trace for make in makes}
    data = data_of(play(traces))
    assert [(run["goal"], run["ok"]) for run in data["runs"]] == [
        ("broadcast", True), ("all_to_all", True), ("reduce_scatter", True)]
    assert str(play(traces["all_to_all"])) == "All-to-all: player, 4 ranks, 3 steps, executed"
    assert "<li>1 → 2: chunk 2 into chunk 1, 2 → 1: chunk 1 into chunk 2 (replacing what was there)</li>" in html_of(
        play(launch(execute, 3, collectives.all_to_all(3)).trace))
    assert "<li>0 → 1: chunk 1 (where nothing was)</li>" in html_of(play(collectives.scatter(3)))


def test_a_promise_that_is_asked_for_may_have_another_root_or_other_owners() -> None:
    for name in PROMISES:
        for promise in variants(name, 4):
            size = 4, 4
            start = np.eye(4, dtype=int)[:, None] * np.ones((1, 4, 1), dtype=int)
            goal = np.where(promise.where(*size)[..., None], promise.goal(*size), start)
            events = [Event(r, "hold", op, chunk=c, step=0, contributions=tuple(held[r, c].tolist()))
                      for op, held in ((None, start), ("some_collective", goal)) for r, c in np.ndindex(size)]
            events += [Event(r, "collective", "some_collective", group=(0, 1, 2, 3), step=0) for r in range(4)]
            data = run_payload(Trace(events, 4, "logical", "recorded"), name)
            assert (data["ok"], data["verdict"]) == (True, f"Done: {promise.says}.")
    wrong = run_payload(Trace(events, 4, "logical", "recorded"), "reduce")["verdict"]
    assert wrong.startswith("Wrong at the end: 0 of 4 chunks are complete. Rank 0's chunk 0 lacks")


def library(*calls: str) -> None:
    """In a rank: collectives of the library, and a message by hand, on a watched buffer."""
    dist.init_process_group()
    rank, size = dist.get_rank(), dist.get_world_size()
    buffer = lanes(size)
    chunks = buffer.chunk(size)
    watch(buffer, size)
    pairs = [dist.new_group([first, first + 1]) for first in range(0, size, 2)]
    for call in calls:
        if call == "all_reduce":
            dist.all_reduce(buffer)
        elif call == "broadcast from 2":
            dist.broadcast(buffer, 2)
        elif call == "all_reduce of pairs":
            dist.all_reduce(buffer, group=pairs[rank // 2])
        elif call == "reduce_scatter":
            dist.reduce_scatter_tensor(chunks[rank], buffer.clone())
        elif call == "all_gather":
            dist.all_gather_into_tensor(buffer, chunks[rank].clone())
        elif call == "all_reduce of a loss":
            dist.all_reduce(torch.ones(1))
        elif call == "barrier":
            dist.barrier()
        elif call == "mean":
            buffer /= size
        elif call == "empty":
            buffer.zero_() if rank else None
        elif call == "message" and rank < 2:
            dist.send(chunks[0], 1) if rank == 0 else dist.recv(chunks[0], 0)


def recorded(*calls: str) -> dict[str, Any]:
    return run_payload(launch(library, 4, *calls, record=True).trace)


@pytest.mark.slow
def test_a_librarys_collective_is_one_step_without_messages() -> None:
    data = recorded("all_reduce")
    assert told(data) == ["Start: every rank holds only its own data.",
                          "All 4 ranks call all_reduce: the library moves the data, and does not tell how.",
                          "Done: every rank holds every chunk complete."]
    assert data["S"] == 1 and not data["transfers"]["src"] and data["unseen"] is True
    assert data["names"][int(data["phases"])] == "all-reduce"
    whole = data["contents"].index([1] * 4)
    assert data["holds"] == [[1, rank, chunk, whole] for rank in range(4) for chunk in range(4)]


@pytest.mark.slow
def test_every_collective_of_a_program_is_a_step_and_none_is_judged_without_a_promise() -> None:
    data = recorded("reduce_scatter", "all_gather", "barrier", "all_reduce of a loss", "broadcast from 2")
    assert [text.split(":")[0] for text in told(data)[1:-1]] == [
        f"All 4 ranks call {op}" for op in ("reduce_scatter", "all_gather", "barrier", "all_reduce", "broadcast")]
    assert told(data)[3].endswith(": nobody goes on before all have called it.")
    assert told(data)[4].endswith(": the chunks shown here stay as they are.")
    assert data["verdict"] == "Done: every rank holds every chunk complete."
    assert (data["ok"], told(recorded("all_reduce", "all_reduce"))[-1]) == (True, "")
    assert told(recorded("empty", "all_reduce"))[0] == "Start: only rank 0 holds data."
    assert recorded("broadcast from 2")["verdict"] == "Done: every rank holds rank 2's data."
    for call, who in (("mean", "all 4 ranks"), ("empty", "ranks 1, 2 and 3")):
        assert told(recorded("all_reduce", call))[1].endswith(f"does not tell how. Then {who} change their own chunks.")


@pytest.mark.slow
def test_groups_and_messages_beside_the_library() -> None:
    data = recorded("all_reduce of pairs", "message", "all_reduce")
    assert told(data)[1].startswith("Ranks 0 and 1 call all_reduce; ranks 2 and 3 call all_reduce: the library moves")
    [(_, sends)] = [(key, found) for key, found in decoded(data).items()]
    assert list(decoded(data)) == [(1, 0, 1)] and [(chunk, op) for _, chunk, op, _ in sends] == [(0, "copy"), (0, None)]
    assert data["unseen"]
    assert told(data)[2] == ", which puts it in place of its own."
    page = html_of(play(launch(library, 2, "all_reduce of pairs", "message", record=True).trace))
    assert "<li>both ranks call all_reduce</li><li>0 → 1: chunk 0 (replacing what was there)</li>" in page


def test_ranks_that_do_not_call_a_collective_are_named() -> None:
    hold = [Event(r, "hold", chunk=0, step=0, contributions=(1 - r, r)) for r in (0, 1)]

    def said(*calls: tuple[int, str], world_size: int = 2) -> str:
        events = [Event(r, "collective", op, group=tuple(range(world_size)), step=0) for r, op in calls]
        events += [replace(e, contributions=e.contributions + (0,) * (world_size - 2)) for e in hold]
        return told(run_payload(Trace(events, world_size, "logical", "recorded")))[1]

    assert said((0, "all_reduce")) == "Rank 0 calls all_reduce, rank 1 does not."
    assert said((1, "barrier"), world_size=3) == "Rank 1 calls barrier, ranks 0 and 2 do not."
    assert said((0, "all_reduce"), (1, "broadcast")).startswith("Rank 0 calls all_reduce, rank 1 calls broadcast: the ")


def test_a_promise_can_be_given() -> None:
    trace = simulated(collectives.ring_reduce_scatter(4))
    unnamed = Trace(trace.events, 4, trace.clock, "recorded")
    assert run_payload(unnamed)["ok"] is False
    assert data_of(play(unnamed, promise="reduce_scatter"))["runs"][0]["ok"] is True


def test_figures_agree_with_the_formulas() -> None:
    ring = run_payload(simulated(collectives.ring_all_reduce(4)))
    assert (ring["total"], ring["who"], ring["formula"]) == (1.5, -1, ": 2(N−1)/N\u00a0·\u00a0n")
    server = run_payload(simulated(collectives.parameter_server_all_reduce(4)))
    assert (server["total"], server["who"], server["formula"]) == (3.0, 0, ": (N−1)\u00a0·\u00a0n")
    assert ring["bytes"] == 400_000_000


def test_shapes() -> None:
    kinds = {"ring_all_reduce": "ring", "ring_reduce_scatter": "ring", "ring_all_gather": "ring",
             "parameter_server_all_reduce": "tree", "tree_all_reduce": "tree",
             "halving_doubling_all_reduce": "mesh", "broadcast": "tree", "scatter": "tree", "gather": "tree",
             "reduce": "tree", "all_to_all": "mesh"}
    assert {name: one["shape"]["kind"] for name, one in payloads(8).items()} == kinds


def test_html_is_the_same_every_time_and_has_no_measured_time() -> None:
    trace = simulated(collectives.ring_all_reduce(4))

    def measured(shift_s: float, backend: str) -> Trace:
        events = [replace(e, start_s=shift_s + i * shift_s, end_s=shift_s + (i + 1) * shift_s)
                  for i, e in enumerate(trace.events)]
        return Trace(events, 4, "measured", "executed", name=trace.name, backend=backend)

    slow, fast = play(measured(0.31, "gloo")), play(measured(0.0007, "nccl"))
    assert html_of(slow) == html_of(fast) == html_of(slow)
    assert "times" not in data_of(slow)["runs"][0]
    assert data_of(slow)["runs"][0]["source"] == "executed on 4 ranks · n = 400 MB"


def test_html_escapes_titles() -> None:
    bad = """</script></div><script>alert('1')</script>"&amp;"""
    shown = play(collectives.ring_all_reduce(2), title=bad)
    assert "<script" not in html_of(shown)
    assert data_of(shown)["title"] == bad


def test_every_asset_is_part_of_a_widget() -> None:
    own = {path for folder in (ASSETS, TWIN) for kind in ("js", "css") for path in folder.glob(f"*.{kind}")}
    assert {path_of(name) for name in (STYLE, *loaded(set(WIDGETS)))} == own
    assert len({path.name for path in own}) == len(own), "the website has them in one folder"


@pytest.mark.parametrize("widget", WIDGETS)
def test_a_live_widget_runs_what_its_page_loads(widget: str) -> None:
    live = pytest.importorskip("book.widgets.live").live_class(widget)
    assert live._esm == module(widget) and live._css == text_of(STYLE)
    assert all(plain(script) in live._esm for script in loaded({widget})) and "import" not in live._esm.split()
    assert live._esm.endswith(f"export default globalThis.lockstep{widget.capitalize()};\n")


@pytest.mark.slow
def test_sizes_keep_the_budget() -> None:
    every_ring = play({n: collectives.ring_all_reduce(n) for n in range(2, 17)})
    assert len(data_of(every_ring)["runs"]) == 15
    assert compressed(html_of(every_ring)) <= MOST_PAGE_BYTES
    slow = {n: simulated(collectives.ring_all_reduce(n), slowdown={1: 3.0}) for n in (4, 8, 16)}
    assert compressed(html_of(play(slow))) <= MOST_PAGE_BYTES


def test_a_reader_without_javascript_gets_the_steps() -> None:
    page = html_of(play(collectives.ring_all_reduce(2)))
    assert "<li>0 → 1: chunk 0, 1 → 0: chunk 1 (added)</li>" in page
    assert str(play(collectives.ring_all_reduce(2))) == "Ring all-reduce: player, 2 ranks, 2 steps, simulated"


def test_choices() -> None:
    runs = {(n, slow): simulated(collectives.ring_all_reduce(n), slowdown={0: factor})
            for n in (2, 4) for slow, factor in (("even", 1.0), ("rank 0 is slow", 3.0))}
    data = data_of(play(runs, labels=["ranks", "links"]))
    assert data["axes"] == [{"label": "ranks", "values": ["2", "4"]},
                            {"label": "links", "values": ["even", "rank 0 is slow"]}]
    assert [run["at"] for run in data["runs"]] == [[0, 0], [0, 1], [1, 0], [1, 1]]


@pytest.mark.parametrize("call, message", [
    (lambda: play(3), "a Trace or a Schedule"),
    (lambda: play({}), "nothing to play"),
    (lambda: play(collectives.ring_all_reduce(4), view="round"), "view can't be 'round'"),
    (lambda: play(collectives.ring_all_reduce(4), clock="clock"), "clock can't be"),
    (lambda: play(collectives.ring_all_reduce(4), promise="peace"), "promise can't be"),
    (lambda: play(Trace([Event(0, "compute")], 1, "logical", "executed")), "nothing to play"),
    (lambda: play(collectives.tree_all_reduce(65)), "up to 64 ranks"),
    (lambda: play({1: collectives.ring_all_reduce(4)}, labels=["a", "b"]), "one label"),
    (lambda: play({(1, 2): collectives.ring_all_reduce(4), 3: collectives.ring_all_reduce(4)}), "keys"),
    (lambda: race({"one": simulated(collectives.ring_all_reduce(4))}), "two or more"),
    (lambda: race({"a": collectives.ring_all_reduce(4), "b": collectives.ring_all_reduce(4)}), "no modelled times"),
    (lambda: panel(lambda: None, pace=3), "panel: pace can't be 3"),
])
def test_bad_input_raises_a_clear_error(call: Callable[[], Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        call()


def test_pages_need_no_widget_packages() -> None:
    """Without anywidget the same HTML comes from an object that is no widget."""
    script = ("import sys; sys.modules.update(anywidget=None, ipywidgets=None, traitlets=None)\n"
              "from book.collectives import ring_all_reduce\nfrom book.widgets import play\n"
              "print(play(ring_all_reduce(3))._repr_mimebundle_()['text/html'])")
    plain = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert plain.strip() == html_of(play(collectives.ring_all_reduce(3)))


class TestLive:
    """The widget as a notebook's kernel sees it."""

    @pytest.fixture(autouse=True)
    def _needs_anywidget(self) -> None:
        pytest.importorskip("anywidget")

    def test_traits(self) -> None:
        events = simulated(collectives.ring_all_reduce(4)).events
        player = play(Trace(events, 4, "modelled", "executed", backend="gloo"))
        assert json.loads(player.payload)["runs"][0]["source"] == "executed on 4 ranks · gloo · n = 400 MB"
        player.step, player.error = 3, "old"
        player.trace = collectives.ring_all_reduce(2)
        assert (player.step, player.playing, player.error) == (0, False, "")
        assert json.loads(player.payload)["runs"][0]["n"] == 2 and data_of(player)["runs"][0]["n"] == 2

    def test_panel_reruns_shows_errors_and_ignores_clicks_while_it_runs(self) -> None:
        calls = []

        def run(num_ranks: int, algorithm: str) -> Trace:
            calls.append((num_ranks, algorithm))
            lab.button.click() if len(calls) == 2 else None  # a click while it runs
            if num_ranks == 5:
                raise RuntimeError("rank 3 sends to itself")
            return simulated(getattr(collectives, algorithm)(num_ranks))

        lab = panel(run, num_ranks=(2, 8), algorithm=["ring_all_reduce", "tree_all_reduce"])
        assert calls == [(2, "ring_all_reduce")]
        count, algorithm = lab.children[0].children[:2]
        count.value, algorithm.value = 4, "tree_all_reduce"
        lab.button.click()
        assert calls[1:] == [(4, "tree_all_reduce")] and not lab.button.disabled
        assert data_of(lab)["runs"][0]["n"] == 4
        count.value = 5
        lab.button.click()
        assert lab.player.error == "RuntimeError: rank 3 sends to itself"
        assert data_of(lab)["runs"][0]["n"] == 4


def test_the_player_opens_with_the_run_that_is_selected() -> None:
    data = data_of(play({n: collectives.ring_all_reduce(n) for n in (2, 3, 4)}, select=4))
    assert data["runs"][0]["n"] == 4 and data["axes"][0]["values"] == ["2", "3", "4"]
    assert sorted(run["n"] for run in data["runs"]) == [2, 3, 4]
    with pytest.raises(ValueError, match="select can't be 9: use one of 2, 3"):
        play({n: collectives.ring_all_reduce(n) for n in (2, 3)}, select=9)


def test_a_clock_and_a_race_need_modelled_times() -> None:
    with pytest.raises(ValueError, match="clock='time' needs simulated traces"):
        play(simulated(collectives.ring_all_reduce(3)).logical(), clock="time")
    with pytest.raises(TypeError, match="needs names"):
        race([simulated(collectives.ring_all_reduce(3))] * 2)


# Bytes, times, counts and names; JavaScript writes the same
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
