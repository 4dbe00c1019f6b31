"""The mesh explorer's Python side: a recorded step as stops, what its data say, and what stands on a page."""
from __future__ import annotations

import html
import json
import re
from dataclasses import replace
from itertools import permutations
from typing import Any

import pytest

from book.cost import bytes_across_nodes, bytes_by_axis, flows
from book.mesh import Mesh
from book.trace import Event, Trace
from book.widgets import mesh_explorer
from book.widgets.mesh import across, orders, plain, sizes, told
from book.widgets.mesh_run import read_step
from tests.meshes import CUBE, explorer, mesh_of, recorded
from tests.players import html_of

MOST_DATA_BYTES = 60_000
PAIR = Mesh.of({"dp": 2})


def data_of(shown: Any) -> dict[str, Any]:
    """The data in an explorer's HTML, as a browser would read the attribute."""
    return json.loads(html.unescape(re.match(r"<div data-lockstep-mesh='([^']*)'>", html_of(shown))[1]))


def said(trace: Trace, mesh: Mesh) -> list[str]:
    return [plain(sentences) for sentences in told(read_step(trace), mesh)]


def by_hand(*events: Event) -> Trace:
    """A trace of two ranks whose events take a second each, one after the other on each rank."""
    clock = [0, 0]
    timed = []
    for event in events:
        start_s = clock[event.rank]
        clock[event.rank] += 1
        timed.append(replace(event, start_s=start_s, end_s=start_s + 0.5 if event.end_s is None else event.end_s))
    return Trace(timed, 2, "measured", "recorded")


@pytest.mark.slow
def test_the_stops_of_a_step() -> None:
    """1F1B on two stages, two replicas and two ranks to a layer; 2 all-reduces a block, and those of the ends."""
    assert said(recorded(), mesh_of(CUBE)) == [
        "Forward of micro-batch 0 on stage 0: 5 all-reduces along tp, 2.56 kB from each rank.",
        "Output of micro-batch 0 from stage 0 to stage 1: 512 B from each of 4 ranks.",
        "Forward of micro-batch 1 on stage 0: 5 all-reduces along tp, 2.56 kB from each rank. "
        "Forward of micro-batch 0 on stage 1: 7 all-reduces along tp, 2.14 kB from each rank.",
        "Output of micro-batch 1 from stage 0 to stage 1: 512 B from each of 4 ranks.",
        "Backward of micro-batch 0 on stage 1: 5 all-reduces along tp, 2.56 kB from each rank.",
        "Gradient of micro-batch 0 from stage 1 to stage 0: 512 B from each of 4 ranks.",
        "Backward of micro-batch 0 on stage 0: 4 all-reduces along tp, 2.05 kB from each rank. "
        "Forward of micro-batch 1 on stage 1: 7 all-reduces along tp, 2.14 kB from each rank.",
        "Backward of micro-batch 1 on stage 1: 5 all-reduces along tp, 2.56 kB from each rank.",
        "Gradient of micro-batch 1 from stage 1 to stage 0: 512 B from each of 4 ranks.",
        "Backward of micro-batch 1 on stage 0: 4 all-reduces along tp, 2.05 kB from each rank.",
        "All-reduce along dp on all 8 ranks: up to 14.3 kB from each rank, after the last backward."]


@pytest.mark.slow
def test_stops_depend_only_on_each_ranks_order() -> None:
    """Ranks that are late, and times that are twice as long, change nothing."""
    trace = recorded()
    late = [replace(event, start_s=2 * event.start_s + event.rank, end_s=2 * event.end_s + event.rank)
            for event in trace.events]
    slow = Trace(late, 8, "measured", "recorded")
    assert html_of(mesh_explorer(slow, mesh_of(CUBE))) == html_of(explorer())


def test_the_stops_send_what_the_step_sends() -> None:
    """No byte is lost or counted twice between the trace and the stops, along any axis."""
    data = data_of(explorer())
    found: dict[tuple, float] = {}
    for sent in (sent for stop in data["stops"] for sent in stop["sent"]):
        path = data["names"][sent["axis"]], sent["src"], sent["dst"]
        found[path] = found.get(path, 0) + sent["bytes"]
    assert found == flows(recorded(), mesh_of(CUBE))
    assert {(data["names"][f["axis"]], f["src"], f["dst"]): f["bytes"] for f in data["flows"]} == found


@pytest.mark.slow
def test_of_several_steps_the_first_is_played_and_bytes_are_the_mean() -> None:
    one, three = recorded(), recorded(num_steps=3)
    first, several = (data_of(mesh_explorer(trace, mesh_of(CUBE))) for trace in (one, three))
    assert several["source"] == "recorded from 8 processes · the first of 3 steps, bytes of their mean"
    assert {**several, "source": first["source"]} == first


@pytest.mark.slow
def test_collectives_inside_a_backward_are_described_with_it() -> None:
    texts = said(recorded(zero_stage=2), mesh_of(CUBE))
    assert any(re.search(r"Backward of micro-batch 1 on stage 1: 5 all-reduces along tp, .* from each rank; "
                         r"3 reduce-scatters along dp, ", text) for text in texts)


def test_bytes_that_cross_nodes_in_each_order_are_those_of_the_mesh() -> None:
    """The coordinates of a rank stay; the trace of the renumbered ranks, counted anew, has the same bytes."""
    trace, mesh = recorded(), mesh_of(CUBE)
    sent = flows(trace, mesh)
    found = {}
    for axes in permutations(mesh.axes):
        other = mesh.with_axes(*axes)
        number = {rank: other.rank_at(**mesh.coordinates(rank)) for rank in range(8)}
        moved = [replace(event, rank=number[event.rank],
                         peer=None if event.peer is None else number[event.peer],
                         group=None if event.group is None else tuple(sorted(number[r] for r in event.group)))
                 for event in trace.events]
        again = flows(Trace(moved, 8, "measured", "recorded"), other)
        found[axes] = sum(bytes_across_nodes(again, other).values())
    assert orders(sent, mesh) == found
    by_axis = {axis: float(sum(bytes_by_axis(sent, 8)[axis])) for axis in mesh.axes}
    assert found == {axes: by_axis[axes[0]] for axes in found}, "half of the ranks on a node: the outermost crosses"
    assert across(sent, mesh, mesh_of(CUBE, 8)) == 0 and across(sent, mesh, mesh_of(CUBE, 1)) == sum(sent.values())


def test_sizes_of_nodes_to_choose_from() -> None:
    assert sizes(mesh_of(CUBE)) == [1, 2, 4, 8] == sizes(mesh_of(CUBE, None))
    assert sizes(mesh_of((3, 2, 2), 3)) == [1, 2, 3, 4, 8, 12]


def test_crossing_messages_are_not_a_deadlock() -> None:
    """Both ranks ask for a message before they send, as batch_isend_irecv does: it is needed when it is waited for."""
    both = [Event(rank, kind, peer=1 - rank, num_bytes=8.0, end_s=9.0) for rank in (0, 1) for kind in ("recv", "send")]
    assert said(by_hand(*both), PAIR) == ["Both ranks send 8 B each along dp."]


def test_messages_between_ranks_that_are_both_at_work_are_a_part_of_it() -> None:
    """A ring inside of a layer: no rank has to end its forward before the other can go on."""
    both = [Event(rank, "compute", "F", stage=0, micro_batch=0, start_s=0.0, end_s=9.0) for rank in (0, 1)]
    ring = [Event(rank, kind, peer=1 - rank, num_bytes=8.0, start_s=at, end_s=at + 1.0) for at in (1.0, 3.0)
            for rank in (0, 1) for kind in ("recv", "send")]
    trace = Trace(both + ring, 2, "measured", "recorded")
    assert said(trace, PAIR) == ["Forward of micro-batch 0 on stage 0: 2 messages along dp, 16 B from each rank."]
    assert [sent["bytes"] for sent in data_of(mesh_explorer(trace, PAIR))["stops"][1]["sent"]] == [16, 16]


def test_a_message_is_named_only_if_it_is_unambiguous() -> None:
    """Two sends after one forward could be anything, and so could one that goes to no neighbouring stage."""
    mesh = Mesh.of({"pp": 2})
    f0 = Event(0, "compute", "F", stage=0, micro_batch=0)
    send, f1 = Event(0, "send", peer=1, num_bytes=8.0), Event(1, "compute", "F", stage=1, micro_batch=0)
    recv = Event(1, "recv", peer=0, num_bytes=8.0)
    assert said(by_hand(f0, send, recv, f1), mesh)[1] == "Output of micro-batch 0 from stage 0 to stage 1: 8 B from " \
                                                         "one rank."
    assert said(by_hand(f0, send, send, recv, recv, f1), mesh)[1] == "Rank 0 sends 2 times 8 B along pp."
    assert said(by_hand(f0, send, recv, replace(f1, stage=0)), mesh)[1] == "Rank 0 sends 8 B along pp."


def test_a_chain_of_messages_is_a_stop_for_each() -> None:
    """Rank 1 sends on what it got: not in the same moment."""
    there, back = (Event(rank, "send", peer=1 - rank, num_bytes=8.0) for rank in (0, 1))
    got = Event(1, "recv", peer=0, num_bytes=8.0)
    assert len(said(by_hand(there, got, back, Event(0, "recv", peer=1, num_bytes=8.0)), PAIR)) == 2


def test_operations_that_never_complete_are_described() -> None:
    stuck = by_hand(Event(0, "recv", peer=1, num_bytes=8.0),
                    Event(1, "collective", "all_reduce", group=(0, 1), num_bytes=8.0))
    assert said(stuck, PAIR) == ["Rank 0 waits for a message from rank 1 that never came. "
                                 "Rank 1 waits in all-reduce with both ranks."]
    assert data_of(mesh_explorer(stuck, PAIR))["stops"][1]["kind"] == "stuck"


def test_collectives_alone_are_counted_over_the_run() -> None:
    """Without forwards and backwards nothing tells one step from the next; alike in a row, they are one stop."""
    calls = [Event(rank, "collective", "all_reduce", group=(0, 1), num_bytes=8.0) for rank in (0, 1) for _ in range(3)]
    barrier = [Event(rank, "collective", "barrier", group=(0, 1), num_bytes=0.0) for rank in (0, 1)]
    trace = by_hand(*calls, *barrier)
    assert said(trace, PAIR) == ["3 all-reduces along dp on both ranks: 24 B from each rank.",
                                 "Barrier along dp on both ranks: nobody goes on before all have come."]
    assert data_of(mesh_explorer(trace, PAIR))["span"] == "in this run"


@pytest.mark.parametrize("wrong, error, words", [
    (lambda: mesh_explorer(PAIR, PAIR), TypeError, "takes a recorded Trace"),
    (lambda: mesh_explorer(recorded(), PAIR), ValueError, "8 ranks and the mesh has 2"),
    (lambda: mesh_explorer(recorded().logical(), mesh_of(CUBE)), ValueError, "a logical one does not say"),
    (lambda: mesh_explorer(Trace([], 32, "measured", "recorded"), Mesh.of({"dp": 32})), ValueError, "up to 16 ranks"),
    (lambda: mesh_explorer(Trace([], 1, "measured", "recorded"), Mesh(tuple("abcde"), (1,) * 5)), ValueError, "4 axes"),
    (lambda: mesh_explorer(by_hand(*[Event(rank, "send", peer=1 - rank, num_bytes=1.0) if (rank + k) % 2 else
                                     Event(rank, "recv", peer=1 - rank, num_bytes=1.0) for k in range(200)
                                     for rank in (0, 1)]), PAIR), ValueError, "200 stops, and the mesh explorer"),
])
def test_invalid_input_raises_a_clear_error(wrong: Any, error: type, words: str) -> None:
    with pytest.raises(error, match=words):
        wrong()


def test_a_reader_without_javascript_gets_axes_orders_and_stops() -> None:
    page = html_of(explorer())
    assert "<td>pp</td><td>2</td><td>0, 4; 1, 5; 2, 6; 3, 7 (across nodes)</td><td>up to 1.02 kB</td>" in page
    assert "<td>tp</td><td>2</td><td>0, 1; 2, 3; 4, 5; 6, 7 (inside a node)</td><td>up to 9.41 kB</td>" in page
    assert "<td>pp · dp · tp, as recorded</td><td>8.19 kB</td>" in page and page.count("<tr>") == 11
    assert page.count("<li>") == 11
    assert str(explorer()) == ("A training step on a mesh of 8 ranks: mesh explorer, pp 2 · dp 2 · tp 2, 11 stops, "
                               "recorded")


def test_names_cannot_break_out_of_the_page() -> None:
    bad = """</div><script>alert('1')</script>"&amp;"""
    shown = mesh_explorer(Trace([], 2, "measured", "recorded"), Mesh.of({bad: 2}), title=bad)
    assert "<script" not in html_of(shown) and data_of(shown)["axes"] == [bad]


def test_another_trace_can_be_set_and_the_backend_is_live_only() -> None:
    player = explorer()
    assert json.loads(player.payload)["source"] == "recorded from 8 processes on gloo"
    assert data_of(player)["source"] == "recorded from 8 processes"
    player.step = 3
    player.trace = recorded(zero_stage=2)
    assert player.step == 0 and "reduce-scatters" in player.payload


@pytest.mark.slow
def test_sizes_keep_the_budget() -> None:
    long = mesh_explorer(recorded((4, 2, 1), 8), mesh_of((4, 2, 1)))
    assert len(data_of(long)["stops"]) > 40 and len(html_of(long).encode()) <= MOST_DATA_BYTES
