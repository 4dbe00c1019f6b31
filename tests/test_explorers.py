"""Explorers: what a page says without JavaScript, and the answers of their scripts beside the package's."""
from __future__ import annotations

import html
import json
import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from book import pipelines
from book.collectives import COLLECTIVES
from book.cost import LayerShape, Link, hybrid_sent_bytes, ring_all_reduce_s
from book.execute import execute
from book.launch import launch
from book.mesh import WITH_CONTEXT, Mesh
from book.replay import Replay, bubble, overlap
from book.simulate import simulate, simulate_pipeline
from book.simulate.streams import fill_buckets
from book.trace import Event, Trace
from book.widgets import (axes_explorer, bucket_explorer, load_explorer, pipeline_explorer, play, race_explorer,
                          server_explorer, sharding_explorer)
from book.widgets import step_explorers, traffic_explorers
from book.widgets.explorer import Dial, Explorer, decades
from book.widgets.step_explorers import CAPS, BucketExplorer, ShardingExplorer, expert_loads
from book.widgets.traffic_explorers import ALGORITHMS, AXES, across, sent_along, servers
from book.words import in_seconds
from tests.backward import recorded
from tests.players import (PLAYER, assert_readable, axe_finds, caption, click, contrasts, figures, first, html_of,
                           paint, state)

LAYERS = [16, 4096, *[1024, 262144] * 6]  # bytes of gradients, in the order of chapter 2's backward


@dataclass(frozen=True)
class Row:
    """What the tests of all explorers need to know of one."""

    make: Callable[[], Any]
    says: str  # in its sentence once `dial` is turned to its value number `to`
    dial: str = "ranks"
    to: int = 10
    how: str = "simulated"  # or computed, by a formula
    rows: int = 5  # of the table without JavaScript, its head included
    colours: tuple[str, ...] = ("x0", "x1", "x2", "x3")  # that have to stand out


EXPLORERS = {
    "race_explorer": Row(race_explorer, "on 12 ranks"),
    "pipeline_explorer": Row(pipeline_explorer, "on 12 ranks", colours=("kF", "kB")),
    "server_explorer": Row(server_explorer, "of 8 machines", "machines", 6),
    "bucket_explorer": Row(lambda: bucket_explorer(LAYERS), "on 12 ranks", rows=9, colours=("kF", "kB")),
    "sharding_explorer": Row(sharding_explorer, "on 12 ranks", colours=("kF", "kB")),
    "axes_explorer": Row(axes_explorer, "on 128 ranks", "dp", 2, "computed", 7),
    "load_explorer": Row(load_explorer, "of 16 experts", "experts", 2, "computed", 6)}
COMPARED: set[str] = set()  # explorers whose script a test below holds to the package
each = pytest.mark.parametrize("name", EXPLORERS)
some_explorers = pytest.mark.parametrize("name", first(*EXPLORERS, num=2))
# Turns the dial of this label to a place, as dragging does: an input event for each place on the way.
TURN = """([label, to]) => {
  const all = [...document.querySelectorAll('.lk-dial :is(input, select)')];
  const dial = all.find(e => e.getAttribute('aria-label') === label);
  const by = Math.sign(to - dial.value);
  for (let at = +dial.value; at !== to; at += by) {
    dial.value = at + by;
    dial.dispatchEvent(new Event('input', { bubbles: true }));
  }
}"""
PICTURE = "document.querySelector('.lk-field').innerHTML"


def compares(name: str) -> Callable[[Callable], Callable]:
    """Mark the test that compares what an explorer's script answers with the package."""
    COMPARED.add(name)
    return lambda test: test


def data_of(shown: Any) -> dict[str, Any]:
    """The data in an explorer's HTML."""
    return json.loads(html.unescape(re.match(r"<div data-lockstep-\w+='([^']*)'>", html_of(shown))[1]))


def turn(page: Any, label: str, to: int) -> None:
    """Drag a dial to a place among its values."""
    page.evaluate(TURN, [label, to])


# data and words
def test_a_dial_has_the_value_that_it_starts_with() -> None:
    data = Dial("n", "buffer", decades(3, 5), 12_500.0, "B").data()
    assert data["values"][data["at"]] == 12_500 and data["values"] == sorted(data["values"])
    assert (data["values"][0], data["values"][-1], len(data["values"])) == (1000, 100_000, 18)


def test_without_javascript_times_stand_in_a_table() -> None:
    page = html_of(race_explorer())
    for name, told in (("root", "192 ms"), ("tree", "128 ms"), ("ring", "48.1 ms"), ("halving–doubling", "48 ms")):
        assert f"<th>{name}</th>" in page and f"<td>{told}</td>" in page
    page = html_of(pipeline_explorer())
    for cells in (("GPipe", "33", "27.3 %", "8"), ("1F1B", "33", "27.3 %", "4"),
                  ("interleaved", "28.5", "15.8 %", "5.5"), ("ZB-V", "25.5", "5.9 %", "4")):
        assert "".join(f"<td>{cell}</td>" for cell in cells) in page, cells
    assert "<td>interleaved</td>" not in html_of(pipeline_explorer(4, 6))


def test_every_explorer_is_tested() -> None:
    explorers = {kind.widget for kind in (*step_explorers.__dict__.values(), *traffic_explorers.__dict__.values())
                 if isinstance(kind, type) and issubclass(kind, Explorer) and kind is not Explorer}
    assert explorers == set(EXPLORERS), "an explorer needs a row in EXPLORERS"
    assert explorers == COMPARED, "an explorer needs a test, marked with @compares, of its answers beside the package's"


@each
def test_the_html_is_the_same_every_time(name: str) -> None:
    assert html_of(EXPLORERS[name].make()) == html_of(EXPLORERS[name].make())
    assert len(html_of(EXPLORERS[name].make()).encode()) < 5000


@pytest.mark.parametrize("make, words", [
    (lambda: race_explorer(65), "ranks can be 2 to 64, not 65"),
    (lambda: race_explorer(2.5), "ranks can be 2 to 64, not 2.5"),
    (lambda: race_explorer(num_bytes=1), "buffer can be 1000 to 1e\\+10, not 1"),
    (lambda: race_explorer(link=Link(1.0, 1e9)), "latency can be 1e-07 to 0.01, not 1.0"),
    (lambda: pipeline_explorer(1), "ranks can be 2 to 16, not 1"),
    (lambda: server_explorer(4, 0), "servers can be 1 to 16, not 0"),
    (lambda: axes_explorer(tp=3), "tp can be 1 to 16, not 3"),
    (lambda: BucketExplorer(LAYERS, 1.0, 2, Link(1e-4, 1e9), 2e-9), "bucket can be 16384 to 2.09715e\\+06, not 1.0"),
    (lambda: pipeline_explorer(schedule="2F2B"), "schedule can't be '2F2B': use one of GPipe, 1F1B")])
def test_what_cannot_be_chosen_is_refused(make: Callable[[], Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make()


@each
def test_an_explorer_takes_no_trace(name: str) -> None:
    shown = EXPLORERS[name].make()
    with pytest.raises(TypeError, match="simulates what the reader chooses"):
        getattr(shown, "shown", shown).with_trace(None)


# answers
RACE = """([chosen, data]) => {
  const { runs, even, order } = globalThis.lockstepRace_explorer.answer(chosen, data);
  return [runs.map(run => run.now), even, order[0].label, runs.map(run => run.points.length)];
}"""


def chosen_links(draw: random.Random) -> dict[str, Any]:
    return {"ranks": draw.choice((2, 3, 4, 8, 13, 16)), "num_bytes": 10 ** draw.uniform(3, 10),
            "latency_s": 10 ** draw.uniform(-7, -2), "bandwidth_bytes_per_s": 10 ** draw.uniform(7, 12),
            "slow_link": draw.choice((1, 1, 5)), "slow_rank": draw.choice((1, 1, 2.5))}


def seconds(name: str, chosen: dict[str, Any], num_bytes: float) -> float:
    """What the package simulates on the links that are chosen."""
    link = Link(chosen["latency_s"], chosen["bandwidth_bytes_per_s"])
    slow = Link(link.latency_s, link.bandwidth_bytes_per_s / chosen["slow_link"])
    trace = simulate(COLLECTIVES[name].schedule(chosen["ranks"]), num_bytes, link, contributions=False,
                     links={(0, 1): slow, (1, 0): slow}, slowdown={1: chosen["slow_rank"]})
    return trace.duration_s or 0.0


@compares("race_explorer")
def test_the_race_takes_what_the_package_simulates(show: Callable) -> None:
    """On drawn links, some of them slow; and where ring and tree take the same time they do so in the package too."""
    draw, page = random.Random(7), show(race_explorer())
    data = data_of(race_explorer())
    crossed = 0
    for _ in range(12):
        chosen = chosen_links(draw)
        found, even, best, _ = page.evaluate(RACE, [chosen, data])
        times = {label: seconds(name, chosen, chosen["num_bytes"]) for label, name in ALGORITHMS.items()}
        assert found == pytest.approx(list(times.values()), rel=1e-12)
        assert times[best] == min(times.values())
        if even:
            crossed += 1
            ring_s, tree_s = (seconds(name, chosen, even) for name in ("ring_all_reduce", "tree_all_reduce"))
            assert ring_s == pytest.approx(tree_s, rel=1e-5)
    assert crossed > 3


@pytest.mark.parametrize("num_ranks", [4, 8, 64])
def test_ring_and_tree_cross_where_the_formula_of_chapter_3_says(show: Callable, num_ranks: int) -> None:
    rounds, data = (num_ranks - 1).bit_length(), data_of(race_explorer(num_ranks))
    even = (num_ranks - 1 - rounds) / (rounds - (num_ranks - 1) / num_ranks) * 10e-6 * 12.5e9
    page = show(race_explorer(num_ranks))
    assert float(state(page)["even"]) == pytest.approx(even, rel=1e-5)
    chosen = {dial["key"]: dial["values"][dial["at"]] for dial in data["dials"]}
    assert page.evaluate(RACE, [chosen, data])[3] == [2] * 4, "straight lines are simulated at three sizes"


@compares("pipeline_explorer")
def test_the_pipeline_takes_what_the_package_simulates(show: Callable) -> None:
    page = show(pipeline_explorer())
    places = {dial["label"]: dial["values"] for dial in data_of(pipeline_explorer())["dials"]}
    for name, make, ranks, batches, per_rank in (
            ("GPipe", pipelines.gpipe, 5, 7, 1), ("1F1B", pipelines.one_f_one_b, 8, 16, 1),
            ("interleaved", pipelines.interleaved, 4, 12, 3), ("ZB-V", pipelines.zero_bubble, 6, 9, 2)):
        click(page, "Reset") if page.get_by_role("button", name="Reset").is_enabled() else None
        click(page, name)
        turn(page, "ranks", places["ranks"].index(ranks))
        turn(page, "micro-batches", places["micro-batches"].index(batches))
        if name == "interleaved":
            turn(page, "stages on a rank", per_rank - 1)
        turn(page, "message / forward", places["message / forward"].index(0.2))
        turn(page, "backward / forward", places["backward / forward"].index(1.5))
        sizes = (ranks * per_rank, batches, *([per_rank] if name == "interleaved" else []))
        order, link = make(*sizes), Link(0.2, 1.0)
        found = bubble(simulate_pipeline(order, 1 / per_rank, 1.5 / per_rank, link=link))
        said = state(page)
        assert (said["schedule"], said["ranks"], said["batches"], said["per_rank"]) == (
            name, str(ranks), str(batches), str(per_rank))
        assert (float(said["length"]), float(said["bubble"]), float(said["peak"])) == pytest.approx(
            (found.step_s, found.share, max(order.peak_in_flight()) / per_rank), rel=1e-9)
        assert f"{found.share:.1%}".replace("%", " %") in caption(page)


def answered(page: Any, name: str, what: str, jobs: list[dict[str, Any]], data: dict[str, Any]) -> list[Any]:
    """What an explorer's script answers to drawn choices; `what` takes the numbers out of an answer."""
    ask = f"([jobs, data]) => jobs.map(job => ({what})(globalThis.lockstep{name.capitalize()}.answer(job, data)))"
    return page.evaluate(ask, [jobs, data])


def drawn_links(draw: random.Random) -> dict[str, Any]:
    return {"ranks": draw.randint(2, 16), "latency_s": 10 ** draw.uniform(-7, -2),
            "bandwidth_bytes_per_s": 10 ** draw.uniform(7, 12)}


def test_the_dial_of_servers_follows_that_of_machines(show: Callable) -> None:
    page = show(server_explorer())
    turn(page, "machines", 5)
    turn(page, "servers", 9)
    assert page.inner_text(".lk-dial:has-text('servers') output") == "7"
    assert page.inner_text(".lk-caption").startswith("This sets servers to 7. 7 servers of 7 machines")


@compares("server_explorer")
def test_servers_take_what_the_package_simulates(show: Callable) -> None:
    draw, page = random.Random(3), show(server_explorer())
    jobs = [{**drawn_links(draw), "servers": draw.randint(1, 16), "num_bytes": 10 ** draw.uniform(3, 10)}
            for _ in range(60)]
    found = answered(page, "server_explorer", "({ now }) => [now.count, now.time, now.most]", jobs, {})
    for job, (count, time_s, most) in zip(jobs, found):
        link = Link(job["latency_s"], job["bandwidth_bytes_per_s"])
        trace = simulate(servers(count, job["ranks"]).check(), job["num_bytes"], link, contributions=False)
        assert count == min(job["servers"], job["ranks"])
        assert [time_s, most] == pytest.approx([trace.duration_s, trace.sent_bytes().max()], rel=1e-12)
    assert [max(simulate(servers(k, 4), 400e6, Link(0.0, 1.0), contributions=False).sent_bytes()) for k in (1, 2, 4)
            ] == [(4 + k - 2) / k * 400e6 for k in (1, 2, 4)], "as chapter 15 derives it"


@compares("axes_explorer")
def test_axes_cross_as_the_package_counts(show: Callable) -> None:
    """The package goes from hop to hop of the mesh; the page has closed forms for powers of two."""
    draw, page, data = random.Random(4), show(axes_explorer()), data_of(axes_explorer())
    orders = data["dials"][0]["values"]
    most = {"per_node": 4, "pp": 3, "dp": 3, "cp": 2, "tp": 3, "ep": 4}
    jobs = [{"order": draw.choice(orders), **{axis: 2 ** draw.randint(0, power) for axis, power in most.items()}}
            for _ in range(60)]
    found = answered(page, "axes_explorer", "({ now }) => now.across", jobs, data)
    for job, told in zip(jobs, found):
        want = across(job, job["order"], job["per_node"])
        assert told == pytest.approx([want[axis] for axis in AXES], rel=1e-12), job


def test_axes_send_what_a_rank_of_a_mesh_sends() -> None:
    for pp, dp, cp, tp in ((4, 8, 1, 8), (4, 2, 4, 8), (8, 2, 2, 1)):
        mesh, layer = Mesh(WITH_CONTEXT, (pp, dp, cp, tp)), LayerShape(1, 4096 // cp, 8192, 64)
        want = hybrid_sent_bytes(mesh, mesh.rank_at(pp=1, dp=0, cp=0, tp=0), layer, 80, 16,
                                 2 * 80 * 12 * 8192**2 / (pp * tp), bytes_per_number=2)
        want["dp"] += want.pop("dp+cp", 0)
        assert sent_along({"pp": pp, "dp": dp, "cp": cp, "tp": tp, "ep": 1}) == pytest.approx(
            {**want, "ep": 0, "efsdp": 0})


@compares("load_explorer")
def test_experts_get_what_tokens_that_draw_them_choose(show: Callable) -> None:
    page, draw = show(load_explorer()), random.Random(1)
    jobs = [{"experts": draw.choice((4, 8, 16)), "top_k": draw.choice((1, 2)), "skew": draw.choice((1, 3, 20)),
             "factor": draw.choice(("as needed", "1", "1.25"))} for _ in range(8)]
    found = answered(page, "load_explorer", "({ all }) => all.map(one => [one.kept, one.lost])", jobs,
                     data_of(load_explorer()))
    for job, bars in zip(jobs, found, strict=True):
        n, top_k = job["experts"], job["top_k"]
        loads = expert_loads(n, top_k, job["skew"])
        places = float("inf") if job["factor"] == "as needed" else float(job["factor"])
        assert bars == [pytest.approx([min(load, places), max(load - places, 0)]) for load in loads]
        likes = torch.tensor([job["skew"] ** (-expert / (n - 1)) for expert in range(n)])
        drawn = torch.multinomial(likes.expand(40_000, n), top_k, generator=torch.Generator().manual_seed(0))
        assert (drawn.flatten().bincount(minlength=n) * n / drawn.numel()).tolist() == pytest.approx(loads, abs=0.06)


@compares("bucket_explorer")
def test_buckets_take_what_a_replay_of_a_recording_takes(show: Callable) -> None:
    """The twin against the package, and the package against `Replay`, which has the buckets from a recording."""
    draw, page = random.Random(5), show(bucket_explorer(LAYERS))
    for _ in range(20):
        sizes = [draw.choice((16, 1024, 4096, 65536, 262144)) for _ in range(draw.randint(1, 30))]
        links = drawn_links(draw)
        link, cap = Link(links["latency_s"], links["bandwidth_bytes_per_s"]), draw.choice(CAPS)
        explorer = BucketExplorer(sizes, cap, links["ranks"], link, 2e-9)
        [[step_s, num_buckets]] = answered(page, "bucket_explorer", "({ now }) => [now.step, now.buckets]",
                                           [{**links, "cap": cap}], explorer.data(False))
        buckets = {number: [(str(i), sizes[i]) for i in bucket] for number, bucket in
                   enumerate(fill_buckets(sizes, cap))}
        replayed = overlap(Replay(2e-9, link)(recorded(buckets, links["ranks"])))
        assert num_buckets == len(buckets)
        assert [step_s, explorer.step_s(cap)] == pytest.approx([replayed.step_s] * 2, rel=1e-9)


@compares("sharding_explorer")
def test_sharded_steps_take_what_the_package_simulates(show: Callable) -> None:
    draw, page = random.Random(6), show(sharding_explorer())
    for _ in range(20):
        links = drawn_links(draw)
        link = Link(links["latency_s"], links["bandwidth_bytes_per_s"])
        explorer = ShardingExplorer(10 ** draw.uniform(8, 11), links["ranks"], link, 10 ** draw.uniform(-4, 0))
        jobs = [{**links, "stage": stage, "prefetch": prefetch} for stage in range(4) for prefetch in ("on", "off")]
        found = answered(page, "sharding_explorer", "({ now }) => [now.step, now.kept, now.extra]", jobs,
                         explorer.data(False))
        for job, told in zip(jobs, found):
            assert told == pytest.approx(explorer.step(job["stage"], job["prefetch"] == "on"), rel=1e-12)


# on the page
@some_explorers
def test_a_turn_of_a_dial_changes_picture_sentence_and_figures_until_reset(show: Callable, name: str) -> None:
    page = show(EXPLORERS[name].make())
    tested = EXPLORERS[name]
    assert page.inner_text(".lk-head span") == f"{tested.how} in this page"
    before = page.evaluate(PICTURE), caption(page), figures(page)
    assert page.get_by_role("button", name="Reset").is_disabled()
    turn(page, tested.dial, tested.to)
    after = page.evaluate(PICTURE), caption(page), figures(page)
    assert all(one != other for one, other in zip(before, after) if one), "an explorer may have no row of figures"
    assert tested.says in after[1].lower()
    field, said = (page.locator(name).bounding_box() for name in (".lk-field", ".lk-caption"))
    assert said["y"] >= field["y"] + field["height"], "the sentence stands below the picture"
    click(page, "Reset")
    assert (page.evaluate(PICTURE), caption(page), figures(page)) == before


@some_explorers
def test_dials_take_keys_and_say_their_values(show: Callable, name: str) -> None:
    page = show(EXPLORERS[name].make())
    label = EXPLORERS[name].dial
    dial = page.get_by_role("slider", name=label, exact=True)
    before = dial.get_attribute("aria-valuetext")
    dial.focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    after = dial.get_attribute("aria-valuetext")
    assert before != after in state(page).values()
    assert page.evaluate("document.activeElement.getAttribute('aria-label')") == label, "it keeps the focus"
    named = page.eval_on_selector_all(".lk-dial input", "all => all.map(e => e.getAttribute('aria-valuetext'))")
    assert all(named)


def test_interleaving_takes_whole_groups_of_micro_batches(show: Callable) -> None:
    page = show(pipeline_explorer(4, 6))
    click(page, "interleaved")
    assert (state(page)["batches"], state(page)["per_rank"]) == ("8", "2")
    turn(page, "ranks", 10)
    assert int(state(page)["batches"]) % 12 == 0
    click(page, "1F1B")
    assert state(page)["per_rank"] == "1"
    click(page, "ZB-V")
    turn(page, "stages on a rank", 3)
    assert state(page)["per_rank"] == "2"


@pytest.mark.parametrize("view", first("390 dark", "320 light", "1280 light", "1280 dark"))
@some_explorers
def test_all_texts_can_be_read(show: Callable, name: str, view: str) -> None:
    width, theme = int(view.split()[0]), view.split()[1]
    page = show(EXPLORERS[name].make(), width=width, color_scheme=theme)
    paint(page, theme)
    label = EXPLORERS[name].dial
    for at in (0, 2, int(page.get_by_role("slider", name=label, exact=True).get_attribute("max"))):
        turn(page, label, at)
        assert_readable(page, f"{name}, {at}")
        assert page.evaluate(f"document.querySelector('{PLAYER}').scrollWidth <= {width}")
    assert axe_finds(page) == ""
    assert min(contrasts(page, list(EXPLORERS[name].colours), ["bg"]).values()) >= 3


@some_explorers
def test_a_page_without_javascript_has_the_table(show: Callable, name: str) -> None:
    page = show(EXPLORERS[name].make(), wait=False, java_script_enabled=False)
    assert page.locator("table").is_visible() and page.locator("tr").count() == EXPLORERS[name].rows


# a reader's own recording
def drop(page: Any, name: str, text: str) -> None:
    """Drop a file onto the page's first widget, as a reader does with the mouse."""
    page.evaluate("""([name, text]) => {
      const data = new DataTransfer();
      data.items.add(new File([text], name));
      const drop = new DragEvent('drop', { dataTransfer: data, bubbles: true, cancelable: true });
      document.querySelector('.lockstep-player').dispatchEvent(drop);
    }""", [name, text])


@pytest.fixture(scope="module")
def recording() -> Trace:
    """A real run: a ring on four ranks, its messages recorded."""
    trace = launch(execute, 4, COLLECTIVES["ring_all_reduce"].schedule(4), torch.zeros(1 << 12)).trace
    assert trace is not None
    return trace


@pytest.mark.slow
@pytest.mark.parametrize("how", ["dropped", "chosen"])
def test_a_recording_is_shown_beside_the_ideal(show: Callable, recording: Trace, how: str) -> None:
    page = show(race_explorer())
    text = recording.to_json()
    if how == "chosen":
        file = {"name": "run.json", "mimeType": "application/json", "buffer": text.encode()}
        page.locator("input[type=file]").set_input_files(file)
    else:
        drop(page, "run.json", text)
    page.locator(".lk-own svg").nth(1).wait_for()
    ideal = seconds("ring_all_reduce", {"latency_s": 10e-6, "bandwidth_bytes_per_s": 12.5e9, "slow_link": 1,
                                        "slow_rank": 1, "ranks": 4}, recording.sent_bytes().max() * 4 / 6)
    said = caption(page)
    assert "Your recording: 4 ranks, 24 messages" in said and f"takes {in_seconds(ideal)}" in said
    assert page.locator(".lk-alert").is_hidden()
    before = said
    turn(page, "latency", 30)
    assert caption(page) != before, "the ideal follows the dials"


OTHER_FILES = [
    ("trace.pt.trace.json.gz", "\x1f\x8b\b", "is compressed, as profiler traces are"),
    ("rank3.json", '{"schemaVersion": 1, "deviceProperties": [], "traceEvents": []}', "is a profiler trace"),
    ("dump_0", "\x80\x02}q\x00", "is a pickle, as dumps of PyTorch are"),
    ("dump_1", '{"version": "2.10", "pg_config": {}, "entries": []}', "is a Flight Recorder dump"),
    ("run.json", '{"format": "lockstep run 2", "state": "hung"}', "is of a whole job"),
    ("rank0.json", '{"format": "lockstep recording 3"}', "is of a whole job"),
]


@pytest.mark.parametrize("name, text, what", OTHER_FILES, ids=[name for name, *_ in OTHER_FILES])
def test_of_other_files_of_a_job_the_command_that_reads_them_is_told(show: Callable, name: str, text: str,
                                                                     what: str) -> None:
    page = show(race_explorer())
    file = {"name": name, "mimeType": "", "buffer": text.encode("latin1")}
    page.locator("input[type=file]").set_input_files(file)
    page.locator(".lk-alert:visible").wait_for()
    assert page.inner_text(".lk-alert") == (
        f"{name}: it {what}. lockstep show {name} --out page.html makes a page of it.")
    assert not page.locator(".lk-own svg").count()


def collectives_alone(*ops: str) -> Trace:
    """Two ranks that call these, each for 2 ms, and 1 ms apart."""
    return Trace([Event(rank, "collective", op, group=(0, 1), num_bytes=8000, start_s=3e-3 * place,
                        end_s=3e-3 * place + 2e-3) for rank in (0, 1) for place, op in enumerate(ops)],
                 2, "measured", "recorded")


@pytest.mark.parametrize("ops, says", [
    (("all_reduce", "broadcast", "all_reduce"),
     "2 ranks, 3 collectives, 8 ms; 2 all-reduces as rings on these links, {}."),
    (("broadcast",), "2 ranks, 1 collective, 2 ms.")])
def test_a_recording_of_collectives_alone_is_played_beside_its_all_reduces(show: Callable, ops: tuple[str, ...],
                                                                           says: str) -> None:
    page, ideal = show(race_explorer()), 2 * ring_all_reduce_s(2, 8000, Link(10e-6, 12.5e9))
    drop(page, "run.json", collectives_alone(*ops).to_json())
    page.locator(".lk-own svg").first.wait_for()
    assert caption(page).endswith("Your recording: " + says.format(in_seconds(ideal)))
    assert page.locator(".lk-own svg").count() == 1 + ("all_reduce" in ops)


def test_rings_beside_a_recording_are_of_each_collectives_group(show: Callable) -> None:
    """Ranks 0, 1 and 2, 3 sum at once, then all do: the two rings of two ranks lie beside one another."""
    sums = [((0, 1), 0.0), ((2, 3), 0.0), ((0, 1, 2, 3), 3e-3)]
    trace = Trace([Event(rank, "collective", "all_reduce", group=group, num_bytes=8000, start_s=at, end_s=at + 2e-3)
                   for group, at in sums for rank in group], 4, "measured", "recorded")
    page, link = show(race_explorer()), Link(10e-6, 12.5e9)
    drop(page, "run.json", trace.to_json())
    page.locator(".lk-own svg").nth(1).wait_for()
    ideal = in_seconds(ring_all_reduce_s(2, 8000, link) + ring_all_reduce_s(4, 8000, link))
    assert caption(page).endswith(f"4 ranks, 2 collectives, 5 ms; 3 all-reduces as rings on these links, {ideal}.")


def action(rank: int, kind: str, micro_batch: int, start_s: float, end_s: float, stage: int | None = None) -> Event:
    """What a rank of a recorded pipeline did."""
    return Event(rank, "compute", kind, stage=rank if stage is None else stage, micro_batch=micro_batch,
                 start_s=start_s, end_s=end_s)


def late_pipeline() -> Trace:
    """Two stages, two micro-batches, a forward 1 s and a backward 2 s long, all one after the other: 12 s."""
    order = [(rank, "F", batch) for batch in (0, 1) for rank in (0, 1)]
    order += [(rank, "B", batch) for batch in (0, 1) for rank in (1, 0)]
    events, now = [], 0.0
    for rank, kind, batch in order:
        events.append(action(rank, kind, batch, now, now + (1 if kind == "F" else 2)))
        now = events[-1].end_s or 0.0
    return Trace(events, 2, "measured", "recorded")


def test_a_recorded_pipeline_is_shown_beside_the_chosen_schedule(show: Callable) -> None:
    """GPipe on two stages takes (2 + 1) forwards and as many backwards: 9 s, in which 12 of 18 s are worked."""
    page = show(pipeline_explorer(schedule="GPipe"))
    drop(page, "run.json", late_pipeline().to_json())
    page.locator(".lk-own svg").nth(1).wait_for()
    assert caption(page).endswith("Your recording: 2 ranks, 2 micro-batches, idle for 50.0 % of 12 s; GPipe with your "
                                  "mean times takes 9 s, idle for 33.3 %.")
    page.get_by_role("button", name="ZB-V").click()
    assert page.inner_text(".lk-alert") == "This recording has 1 stage on a rank: choose as many."


def test_a_recorded_backward_is_shown_with_its_all_reduces_on_the_chosen_links(show: Callable) -> None:
    """Two gradients, a millisecond each; a bucket's all-reduce goes when its gradient is there and the link is free."""
    trace = recorded({0: [("head", 4_000)], 1: [("body", 8_000)]}, scale=1e-3)
    page = show(bucket_explorer(LAYERS))
    drop(page, "run.json", trace.to_json())
    page.locator(".lk-own svg").nth(1).wait_for()
    dials = data_of(bucket_explorer(LAYERS))["dials"]
    chosen = {dial["key"]: dial["values"][dial["at"]] for dial in dials}
    link = Link(chosen["latency_s"], chosen["bandwidth_bytes_per_s"])
    first = max(2e-3, 1e-3 + ring_all_reduce_s(2, 4_000, link))
    ideal = first + ring_all_reduce_s(2, 8_000, link)
    assert caption(page).endswith(f"Your recording: 2 ranks, 2 buckets, 5 ms; with its all-reduces on these links, "
                                  f"{in_seconds(ideal)}.")


def test_a_recording_is_shown_beside_the_ring_at_the_parameter_server(show: Callable, recording: Trace) -> None:
    page = show(server_explorer())
    drop(page, "run.json", recording.to_json())
    page.locator(".lk-own svg").nth(1).wait_for()
    assert "Your recording: 4 ranks, 24 messages" in caption(page)


def test_a_recording_dropped_on_another_player_goes_to_the_one_that_takes_it(show: Callable, recording: Trace) -> None:
    """Not to the browser, which would leave the page for the file."""
    page = show(play(COLLECTIVES["ring_all_reduce"].schedule(4)), server_explorer(), race_explorer())
    drop(page, "run.json", recording.to_json())
    page.locator(".lk-own svg").nth(1).wait_for()
    shown = page.locator(PLAYER).evaluate_all("all => all.map(one => one.querySelectorAll('.lk-own svg').length)")
    assert shown == [0, 2, 0]


def test_no_text_of_a_file_becomes_part_of_the_page(show: Callable) -> None:
    page = show(race_explorer())
    head = json.loads(Trace([Event(r, "send", peer=1 - r, num_bytes=8, start_s=0, end_s=1, chunk=0) for r in (0, 1)],
                            2, "measured", "recorded").to_json())
    head["events"]["chunk"] = ["<b class=planted>0</b>", 1]
    drop(page, "run.json", json.dumps(head))
    page.locator(".lk-own svg").nth(1).wait_for()
    assert not page.locator(".planted").count()


@pytest.mark.parametrize("make, said", [(pipeline_explorer, "no forwards and backwards"),
                                        (lambda: bucket_explorer(LAYERS), "no all-reduces of buckets")])
def test_a_recording_of_something_else_gets_a_sentence(show: Callable, make: Callable, said: str,
                                                       recording: Trace) -> None:
    page = show(make())
    drop(page, "run.json", recording.to_json())
    page.locator(".lk-alert").get_by_text(f"This recording has {said}").wait_for()
    assert not page.locator(".lk-own svg").count()


BAD = {"no.json": ("{", "this is not a trace's JSON"),
       "other.json": ('{"a": 1}', "this is not a trace's JSON"),
       "ranks.json": ('{"format": "lockstep trace 1", "world_size": 2, "clock": "modelled", "source": "simulated", '
                      '"events": {"rank": [0, 7], "kind": ["send", "send"]}}', "event 1 has rank 7"),
       "silent.json": ('{"format": "lockstep trace 1", "world_size": 2, "clock": "logical", "source": "recorded", '
                       '"events": {"rank": [0], "kind": ["hold"]}}', "This recording has no messages with times"),
       "numbers.json": ("[1, 2, 3]", "this is not a trace's JSON")}


@pytest.mark.parametrize("name", first(*BAD, num=2))
def test_a_file_that_is_no_recording_gets_a_sentence(show: Callable, name: str) -> None:
    page = show(race_explorer())
    before = caption(page)
    drop(page, name, BAD[name][0])
    alert = page.locator(".lk-alert")
    alert.get_by_text(BAD[name][1]).wait_for()
    assert len(alert.inner_text()) < 200 and caption(page) == before and not page.locator(".lk-own svg").count()
