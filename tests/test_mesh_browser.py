"""The mesh explorer in a real Chromium, on static pages of real runs' HTML and assets, with the network blocked."""
from __future__ import annotations

from collections.abc import Callable
from itertools import permutations
from typing import Any

import pytest

from book.cost import flows
from book.mesh import Mesh
from book.trace import Event, Trace
from book.widgets import mesh_explorer
from book.widgets.mesh import across, plain, sizes, told
from book.widgets.mesh_run import read_step
from tests.meshes import CUBE, explorer, mesh_of, recorded
from tests.players import assert_readable, caption, captions, click, figures, first, press, state, until

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
