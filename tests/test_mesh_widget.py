"""The mesh explorer: a recorded step as stops, its data and words, and its static page in a real Chromium."""
from __future__ import annotations

import html
import json
import re
from collections.abc import Callable
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
from tests.players import assert_readable, caption, captions, click, figures, first, html_of, press, state, until

MOST_DATA_BYTES = 60_000
PAIR = Mesh.of({"dp": 2})
LEGEND = "all => all.map(e => [...e.querySelectorAll(':scope > .lk-grip b, :scope > span')].map(x => x.textContent))"
# Chooses how many ranks are on a node; what then stands on the cubes, the bytes that cross nodes, the nodes' names.
CHOSEN = """per => {
  const select = document.querySelector("select[aria-label='ranks on a node']");
  select.value = [...select.options].find(option => option.text === per).value;
  select.dispatchEvent(new Event('change'));
  const texts = (selector, root = document) => [...root.querySelectorAll(selector)].map(e => e.textContent);
  const cubes = [...document.querySelectorAll('.lk-cube')].map(cube => texts('text', cube));
  const nodes = texts('.lk-name').filter(name => name.startsWith('node'));
  return [cubes, document.querySelector('.lockstep-player').dataset.across, nodes];
}"""
SAID = "Forward of micro-batch 0 on stage 0: 5 all-reduces along tp, 2.56 kB from each rank."


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


def ranks(page: Any, look: str = ".lk-cube") -> list[int]:
    """The numbers of the ranks that look so, in their order."""
    texts = page.eval_on_selector_all(f"{look} .lk-rank", "all => all.map(e => e.textContent)")
    return sorted(int(text.removeprefix("rank ")) for text in texts)


def legend(page: Any) -> dict[str, list[str]]:
    """What each axis' card says, in the order in which they stand."""
    return {name: lines for name, *lines in page.eval_on_selector_all(".lk-axis", LEGEND)}


def order(page: Any, *axes: str) -> None:
    """Put the axes into this order with the buttons."""
    for place, axis in enumerate(axes):
        for _ in range(state(page)["order"].split().index(axis) - place):
            page.eval_on_selector(f"[aria-label='Move {axis} out']", "button => button.click()")


def test_it_opens_on_rank_0_and_its_groups(show: Callable) -> None:
    page = show(explorer())
    assert caption(page) == ("8 ranks on 2 nodes of 4, pp 2 · dp 2 · tp 2: 8.19 kB cross nodes in a step. Touch a "
                             "rank, and its groups light up.")
    assert ranks(page) == list(range(8)) and ranks(page, ".lk-cube.mate") == [0, 1, 2, 4]
    assert page.inner_text(".lk-head span") == "recorded from 8 processes"
    assert page.eval_on_selector_all(".lk-name", "all => all.map(e => e.textContent)") == [
        "node 0", "pp 0", "node 1", "pp 1"]


@pytest.mark.parametrize("how", ["hover", "tap", "keys"])
def test_a_rank_lights_up_its_groups(show: Callable, how: str) -> None:
    page = show(explorer(), has_touch=True)
    if how == "keys":
        press(page, *["ArrowDown"] * 6)
    else:
        getattr(page.locator("[data-r='5']"), how)()
    assert ranks(page, ".lk-cube.on") == [5] and ranks(page, ".lk-cube.mate") == [1, 4, 5, 7]
    assert legend(page) == {"pp": ["with rank 1 · across nodes", "sends 1.02 kB in a step"],
                            "dp": ["with rank 7 · inside the node", "sends 14.1 kB in a step"],
                            "tp": ["with rank 4 · inside the node", "sends 9.41 kB in a step"]}
    assert page.inner_text(".lk-who").startswith("Rank 5 is at pp 1, dp 0, tp 1, on node 1.")
    links = page.eval_on_selector_all("[data-link]", "all => all.map(g => [g.dataset.link, g.children.length])")
    assert sorted(links) == [["0,1,5", 3], ["1,5,7", 1], ["2,4,5", 1]], "a tube around the one that leaves the node"
    lines = page.eval_on_selector_all("[data-link] .lk-wired", "all => all.map(e => getComputedStyle(e)).map("
                                      "style => [style.strokeDasharray, style.stroke])")
    assert len({dash for dash, _ in lines}) == len({colour for _, colour in lines}) == 3


def test_every_order_and_node_size_is_counted_as_the_mesh_counts_it(show: Callable) -> None:
    """Numbers, coordinates and bytes that cross nodes: the script's are Python's, for all orders and sizes."""
    page, mesh = show(explorer(), reduced_motion="reduce"), mesh_of(CUBE)
    sent = flows(recorded(), mesh)
    for axes in permutations(mesh.axes):
        order(page, *axes)
        assert list(legend(page)) == list(axes) == state(page)["order"].split()
        for per in sizes(mesh):
            cubes, crossing, nodes = page.evaluate(CHOSEN, str(per))
            other = Mesh(axes, tuple(mesh.size(axis) for axis in axes), per)
            assert {int(name.removeprefix("rank ")): tuple(map(int, at.split())) for name, at, _ in cubes} == {
                r: tuple(other.coordinates(r).values()) for r in range(8)}
            assert float(crossing) == pytest.approx(across(sent, mesh, other))
            assert nodes == [f"node {i}" for i in range(other.num_nodes)]
    page.get_by_role("button", name="as recorded").click()
    assert state(page)["order"] == "pp dp tp" and state(page)["per"] == "4"


def test_figures_compare_with_the_recorded_order(show: Callable) -> None:
    page = show(explorer(), reduced_motion="reduce")
    order(page, "tp", "pp", "dp")
    shown = {meaning.replace("\u00a0", " "): value.replace("\u00a0", " ") for meaning, value in figures(page).items()}
    assert shown == {"cross nodes in a step": "74.5 kB", "as recorded: pp · dp · tp, 4 on a node": "8.19 kB",
                     "at least: pp · dp · tp": "8.19 kB", "at most: dp · pp · tp": "114 kB",
                     "sent by all ranks in a step": "196 kB"}
    assert caption(page).replace("\u00a0", " ") == (
        "8 ranks on 2 nodes of 4, tp 2 · pp 2 · dp 2: 74.5 kB cross nodes in a step; 8.19 kB as recorded, "
        "pp · dp · tp and 4 on a node.")


def test_axes_by_keyboard_keep_the_focus(show: Callable) -> None:
    page = show(explorer(), reduced_motion="reduce")
    page.get_by_role("button", name="Move dp out").focus()
    page.keyboard.press("Enter")
    assert state(page)["order"] == "dp pp tp"
    assert page.evaluate("document.activeElement.ariaLabel") == "Move dp out"
    page.keyboard.press("Enter")
    assert state(page)["order"] == "dp pp tp", "further out is nothing"
    assert page.get_by_role("button", name="Move dp out").get_attribute("aria-disabled") == "true"
    page.keyboard.press("Tab")
    page.keyboard.press(" ")
    assert state(page)["order"] == "pp dp tp" and page.evaluate("document.activeElement.ariaLabel") == "Move dp in"


@pytest.mark.parametrize("width", first(390, 800))
def test_axes_by_dragging(show: Callable, width: int) -> None:
    """A card let go over another takes its place; let go where it was, nothing changes."""
    page = show(explorer(), width=width, height=1500, reduced_motion="reduce")

    def middle(axis: str) -> tuple[float, float]:
        box = page.locator(".lk-axis", has_text=axis).first.bounding_box()
        return box["x"] + box["width"] / 2, box["y"] + box["height"] / 2

    grip = page.locator(".lk-axis", has_text="tp").locator(".lk-grip b").bounding_box()
    for target, expected in (("tp", "pp dp tp"), ("pp", "tp pp dp")):
        page.mouse.move(grip["x"] + 4, grip["y"] + 6)
        page.mouse.down()
        page.mouse.move(*middle(target), steps=4)
        page.mouse.up()
        assert state(page)["order"] == expected
    assert not page.locator(".lk-axis.held").count()


def test_each_stop_is_described_as_on_the_page_without_javascript(show: Callable) -> None:
    page, mesh = show(explorer(), reduced_motion="reduce"), mesh_of(CUBE)
    crossing = {"work": "None of it leaves its node.", "message": "All of it crosses nodes.",
                "collective": "None of it leaves its node."}
    step = read_step(recorded())
    wanted = [f"{plain(said)} {crossing[stop.kind]}" for stop, said in zip(step.stops, told(step, mesh))]
    assert [" ".join(text.split()) for text in captions(page)][1:] == wanted


def test_ranks_show_what_they_do_and_send(show: Callable) -> None:
    page = show(explorer(), reduced_motion="reduce")
    press(page, "ArrowRight")
    assert caption(page).startswith(SAID) and ranks(page, ".lk-cube.mate") == [0, 1, 2, 3]
    assert page.eval_on_selector_all(".lk-doing", "all => all.map(e => e.textContent)") == ["F0"] * 4 + [""] * 4
    assert page.locator(".lk-move circle").count() == 4 and page.locator(".lk-wired").count() - 3 == 2
    assert page.locator("[data-r='3']").get_attribute("aria-label") == (
        "rank 3: pp 0, dp 1, tp 1, on node 0; forward of micro-batch 0")
    page.keyboard.press("ArrowRight")
    assert page.eval_on_selector_all(".lk-sent", "all => all.map(e => e.textContent)") == ["F0"] * 4
    assert page.locator(".lk-tube:not(.in)").count() == 4


def test_a_step_on_reordered_axes_renames_the_ranks(show: Callable) -> None:
    """What rank 1 sent, another sends: the same coordinates, another number."""
    events = [Event(1, "send", peer=0, num_bytes=8.0, start_s=0.0, end_s=1.0),
              Event(0, "recv", peer=1, num_bytes=8.0, start_s=0.0, end_s=1.0)]
    trace = Trace(events, 4, "measured", "recorded")
    page = show(mesh_explorer(trace, Mesh.of({"dp": 2, "tp": 2}, 2)), reduced_motion="reduce")
    press(page, "ArrowRight")
    assert caption(page) == "Rank 1 sends 8 B along tp. None of it leaves its node."
    click(page, "Move tp out")
    press(page, "ArrowLeft", "ArrowRight")
    assert caption(page) == "Rank 2 sends 8 B along tp. All of it crosses nodes."


def test_messages_move(show: Callable) -> None:
    page = show(explorer())
    press(page, "ArrowRight")
    until(page, step=1, playing="false")
    page.evaluate("""() => { window.seen = new Set(); new MutationObserver(() => document.querySelectorAll(
        '.lk-sent').forEach(g => seen.add(g.getAttribute('transform')))).observe(document.body,
        {subtree: true, attributes: true}) }""")
    page.keyboard.press("ArrowRight")
    until(page, step=2, playing="false")
    assert page.evaluate("seen.size") > 4, "it was somewhere between"


def test_a_run_that_stopped_says_so(show: Callable) -> None:
    waits = Trace([Event(0, "recv", peer=1, num_bytes=8.0, start_s=0.0)], 2, "measured", "recorded")
    page = show(mesh_explorer(waits, Mesh.of({"dp": 2})))
    press(page, "End")
    assert page.inner_text(".lk-caption .lk-wrong") == "Rank 0 waits"


@pytest.mark.parametrize("shape", first((2, 2, 4), (1, 1, 8), (1, 2, 4), (4, 2, 1), num=2), ids=str)
@pytest.mark.parametrize("width", first(320, 390, 800))
def test_other_meshes_fit(show: Callable, shape: tuple[int, int, int], width: int) -> None:
    """At every node size, with the first rank's groups and in the first stops; no launch: two messages will do."""
    n = shape[0] * shape[1] * shape[2]
    events = [Event(rank, "compute", "F", stage=0, micro_batch=0, start_s=0.0, end_s=1.0) for rank in range(n)]
    page = show(mesh_explorer(Trace(events, n, "measured", "recorded"), mesh_of(shape)), width=width, height=2500,
                reduced_motion="reduce")
    for per in sizes(mesh_of(shape)):
        page.get_by_label("ranks on a node").select_option(str(per))
        assert_readable(page, f"{shape} at {width} px, {per} on a node")
        assert page.evaluate("document.documentElement.scrollWidth") <= width


# A mesh with axes of other sizes
def all_reduces(mesh: Mesh) -> Trace:
    """Along every axis each group of the mesh has one all-reduce."""
    events = [Event(rank, "collective", "all_reduce", group=group, num_bytes=8.0, start_s=float(step), end_s=step + 0.5)
              for step, axis in enumerate(mesh.axes) for group in mesh.groups(axis) if len(group) > 1 for rank in group]
    return Trace(events, mesh.world_size, "measured", "recorded")


def test_a_mesh_with_axes_of_other_sizes_is_numbered_as_the_mesh_numbers_it(show: Callable) -> None:
    mesh = Mesh(("pp", "dp", "tp"), (1, 3, 2), 2)
    page = show(mesh_explorer(all_reduces(mesh), mesh), reduced_motion="reduce")
    for axes in permutations(mesh.axes):
        for place, axis in enumerate(axes):
            while state(page)["order"].split().index(axis) > place:
                click(page, f"Move {axis} out")
        cubes = page.eval_on_selector_all(".lk-cube", "all => all.map(e => [...e.querySelectorAll('text')].map("
                                          "t => t.textContent).slice(0, 2))")
        other = mesh.with_axes(*axes)
        assert sorted(cubes) == [[f"rank {rank}", " ".join(map(str, other.coordinates(rank).values()))]
                                 for rank in range(6)]
