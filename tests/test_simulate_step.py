"""Simulated steps on a mesh, of pipelines and of sharded training: alone, together, and against real ranks."""
from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from itertools import pairwise, permutations

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings, strategies as st

from book.collectives import COLLECTIVES, ring_all_reduce
from book.cost import Link, Network
from book.cost.links import ring_all_reduce_s
from book.launch import launch, rank_device
from book.mesh import AXES, Mesh
from book.parallel import GPT, GPTConfig, sharded
from book.pipelines import gpipe, interleaved, one_f_one_b, zero_bubble
from book.record import follow_units, paused
from book.replay import bubble
from book.schedule import Action, Move, PipelineSchedule, Schedule, ScheduleError
from book.simulate import StepWork, simulate, simulate_pipeline, simulate_sharded, simulate_step
from book.trace import Trace
from book.widgets import memory_player
from book.widgets.memory_run import read_held
from tests.test_simulate import some, some_links


FAST, CARD = Link(2e-6, 4e11), Link(1e-5, 5e10)
WORK = StepWork(3e-3, 6e-3, tp_bytes=16e6, num_all_reduces=4, pp_bytes=16e6, dp_bytes=7e8)
works = st.builds(StepWork, some(0, 5), some(0, 5), some(0, 20), st.integers(0, 2), some(0, 20), some(0, 40))


@st.composite
def pipelines(draw: st.DrawFn, num_ranks: int) -> PipelineSchedule:
    """One of the book's schedules on so many ranks."""
    num_micro_batches = num_ranks * draw(st.integers(1, 2))
    make, stages = draw(st.sampled_from([(gpipe, 1), (one_f_one_b, 1), (interleaved, 2), (zero_bubble, 2)]))
    return make(stages * num_ranks, num_micro_batches)


@st.composite
def meshes(draw: st.DrawFn) -> Mesh:
    """Up to three ranks on each axis, in any order."""
    axes = draw(st.permutations(AXES))
    return Mesh(tuple(axes), draw(st.tuples(*[st.integers(1, 3)] * 3)))


class Followed:
    """A step in which every rank is followed alone: `done_s`, by rank. Each pair of ranks has its own link."""

    def __init__(self, mesh: Mesh, schedule: PipelineSchedule, work: StepWork, link: Link | Network) -> None:
        self.mesh, self.schedule, self.work, self.link = mesh, schedule, work, link
        self.done_s = dict.fromkeys(range(mesh.world_size), 0.0)
        self.wire_s: dict[tuple[int, int], float] = defaultdict(float)
        self.there_s: dict[tuple, float] = defaultdict(float)
        for action in schedule.runnable():
            for ranks in mesh.groups("tp"):
                if mesh.coordinates(ranks[0])["pp"] == action.rank:
                    self.run(action, ranks)
        for ranks in mesh.groups("dp"):
            self.all_reduce(ranks, work.dp_bytes)

    def run(self, action: Action, ranks: tuple[int, ...]) -> None:
        """An action by the ranks of a tp group."""
        work, half_s = self.work, self.work.backward_s / 2
        computed_s = {"F": work.forward_s, "B": work.backward_s, "I": half_s, "W": half_s}[action.kind]
        for rank in ranks:
            needs = [self.there_s[rank, needed] for needed, _ in action.needs(self.schedule.num_stages)]
            self.done_s[rank] = max([self.done_s[rank], *needs]) + computed_s
        for _ in range(work.num_all_reduces * (action.kind != "W")):
            self.all_reduce(ranks, work.tp_bytes)
        for rank in ranks:
            for given_work in action.gives():
                self.there_s[rank, given_work] = self.done_s[rank]
                self.pass_on(rank, given_work)

    def pass_on(self, rank: int, given_work: tuple[int, int, str]) -> None:
        """Send a result to the rank at the same place of the stage that takes it, if that is another rank."""
        stage, _, what = given_work
        to = self.schedule.rank_of(stage + {"output": 1, "gradient": -1}.get(what, 0))
        place = self.mesh.coordinates(rank)
        if to in (None, place["pp"]):
            return
        peer = self.mesh.rank_at(**{**place, "pp": to})
        start_s = max(self.done_s[rank], self.wire_s[rank, peer])
        self.wire_s[rank, peer] = start_s + self.between(rank, peer).transfer_s(self.work.pp_bytes)
        self.there_s[peer, given_work] = self.wire_s[rank, peer]

    def all_reduce(self, ranks: tuple[int, ...], num_bytes: float) -> None:
        """A ring, message by message."""
        size, chunk_bytes = len(ranks), num_bytes / len(ranks)
        out_s, in_s = [0.0] * size, [0.0] * size  # from when on each rank's port is free, each way
        for step in range(2 * (size - 1)):
            left_s = [max(self.done_s[rank], out_s[i], in_s[(i + 1) % size]) for i, rank in enumerate(ranks)]
            for i, rank in enumerate(ranks):
                to = (i + 1) % size
                link = self.between(rank, ranks[to])
                out_s[i] = in_s[to] = left_s[i] + link.transfer_s(chunk_bytes)
            for i, rank in enumerate(ranks):
                adding_s = self.between(ranks[i - 1], rank).reduce_s(chunk_bytes) if step < size - 1 else 0.0
                self.done_s[rank] = max(out_s[i], in_s[i] + adding_s)

    def between(self, src: int, dst: int) -> Link:
        return self.link.link(src, dst) if isinstance(self.link, Network) else self.link

    def by_place(self) -> list[float]:
        """When the last rank of each place on pp is done."""
        return [max(self.done_s[rank] for ranks in self.mesh.groups("dp", "tp") for rank in ranks
                    if self.mesh.coordinates(rank)["pp"] == place) for place in range(self.mesh.size("pp"))]


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(data=st.data(), mesh=meshes(), work=works, link=some_links)
def test_one_rank_for_all_is_as_fast_as_each_followed_alone(data, mesh, work, link):
    schedule = data.draw(pipelines(mesh.size("pp")))
    expected = Followed(mesh, schedule, work, link).by_place()
    assert simulate_step(mesh, schedule, work, link).done_s == pytest.approx(expected, rel=1e-9, abs=1e-12)


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(data=st.data(), mesh=meshes(), work=works, links=st.tuples(some_links, some_links), per_node=st.integers(1, 6))
def test_nodes_that_cut_through_groups_make_all_wait_for_the_slowest(data, mesh, work, links, per_node):
    """With a card for each rank, so that none is shared."""
    schedule = data.draw(pipelines(mesh.size("pp")))
    rails = Network(per_node, *links, cards_per_node=per_node)
    followed, found = (make(mesh, schedule, work, rails) for make in (Followed, simulate_step))
    for alone_s, all_s in zip(followed.by_place(), found.done_s):
        assert alone_s <= all_s * (1 + 1e-9)
    if mesh.axes[0] == "pp" and per_node % (mesh.size("dp") * mesh.size("tp")) == 0:  # a node has whole places
        assert found.done_s == pytest.approx(followed.by_place(), rel=1e-9, abs=1e-12)


def all_at_once(groups: list[tuple[int, ...]], schedule: Schedule, num_bytes: float, network: Network) -> float:
    """Seconds of a full simulation of a schedule in these groups, all of whose ranks are simulated."""
    moves = [Move(move.step, ranks[move.src], ranks[move.dst], move.chunk, move.op)
             for ranks in groups for move in schedule.moves]
    whole = Schedule("together", 1 + max(map(max, groups)), schedule.num_chunks, moves, "all_reduce")
    return simulate(whole, num_bytes, network, contributions=False).duration_s or 0.0


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(data=st.data(), mesh=meshes(), work=works, links=st.tuples(some_links, some_links), per_node=st.integers(1, 6))
def test_cards_are_shared_by_all_that_an_axis_sends(data, mesh, work, links, per_node):
    """The parts against full simulations of all ranks of each place, and the step against what they make together."""
    schedule, cards = data.draw(pipelines(mesh.size("pp"))), data.draw(st.integers(1, per_node))
    network = Network(per_node, *links, cards, data.draw(st.just(float("inf")) | some(0, 20)))
    found = simulate_step(mesh, schedule, work, network)
    places = [[[ranks for ranks in mesh.groups(axis) if mesh.coordinates(ranks[0])["pp"] == place]
               for axis in ("tp", "dp")] for place in range(mesh.size("pp"))]
    tp_s = max(all_at_once(tp, ring_all_reduce(mesh.size("tp")), work.tp_bytes, network) for tp, _ in places)
    dp_s = [all_at_once(dp, ring_all_reduce(mesh.size("dp")), work.dp_bytes, network) for _, dp in places]
    one = Schedule("one", 2, 1, [Move(0, 0, 1, 0, "copy")], "broadcast")
    between = {(a, b): Link(all_at_once([(ranks[a], ranks[b]) for ranks in mesh.groups("pp")], one, work.pp_bytes,
                                        network), float("inf")) for a, b in permutations(range(len(places)), 2)}
    more_s = work.num_all_reduces * tp_s
    pipeline = simulate_pipeline(schedule, work.forward_s + more_s, work.backward_s + more_s, work.backward_s / 2,
                                 links=between)
    ends = [max(e.end_s for e in pipeline.of_rank(place) if e.kind == "compute") for place in range(len(places))]
    assert found.tp_s == pytest.approx(tp_s, rel=1e-9, abs=1e-12)
    assert found.dp_s == pytest.approx(dp_s, rel=1e-9, abs=1e-12)
    assert found.done_s == pytest.approx([end + own for end, own in zip(ends, dp_s)], rel=1e-9, abs=1e-12)


def test_a_step_of_16384_ranks_takes_the_time_of_the_closed_forms():
    """Tensor parallelism inside a node; each rank has a card of its own, so all rings are as if alone."""
    mesh = Mesh.of({"pp": 16, "dp": 128, "tp": 8}, ranks_per_node=8)
    found = simulate_step(mesh, one_f_one_b(16, 32), replace(WORK, pp_bytes=0.0), Network(8, FAST, replace(
        CARD, latency_s=0.0), cards_per_node=8))
    tp_s, dp_s = ring_all_reduce_s(8, 16e6, FAST), ring_all_reduce_s(128, 7e8, replace(CARD, latency_s=0.0))
    assert found.tp_s == pytest.approx(tp_s) and found.dp_s == pytest.approx([dp_s] * 16)
    assert found.step_s == pytest.approx((32 + 16 - 1) * (9e-3 + 8 * tp_s) + dp_s)
    assert found.done_s.argmax() == 0, "the first stage has the last backward"


def test_a_card_for_all_of_a_node_makes_its_messages_slower_and_nothing_else():
    mesh = Mesh.of({"pp": 2, "dp": 4, "tp": 4}, ranks_per_node=4)
    shared, rails = (simulate_step(mesh, one_f_one_b(2, 4), WORK, Network(4, FAST, CARD, cards)) for cards in (1, 4))
    assert shared.tp_s == rails.tp_s
    assert shared.pp_s == pytest.approx(CARD.transfer_s(4 * 16e6)) and rails.pp_s == CARD.transfer_s(16e6)
    assert shared.dp_s == pytest.approx([ring_all_reduce_s(4, 4 * 7e8, CARD)] * 2)


def test_a_place_that_lies_on_two_nodes_is_slower_than_one_on_a_single_node():
    """Replicas 0 to 2 of the first stage are on node 0; of the second, ranks 3 to 5, one is there and two on node 1."""
    found = simulate_step(Mesh.of({"pp": 2, "dp": 3, "tp": 1}), gpipe(2, 2), WORK, Network(4, FAST, CARD))
    assert found.dp_s == pytest.approx([ring_all_reduce_s(3, 7e8, link) for link in (FAST, CARD)], rel=1e-6)


def test_another_all_reduce_can_be_asked_for():
    mesh = Mesh.of({"pp": 1, "dp": 4, "tp": 2})
    halving = COLLECTIVES["halving_doubling_all_reduce"]
    found = simulate_step(mesh, gpipe(1, 2), WORK, CARD, all_reduce=halving.schedule)
    assert found.dp_s == pytest.approx([halving.time_s(4, 7e8, CARD)]) and found.pp_s == 0


@pytest.mark.parametrize("arguments, complaint", [
    ({"mesh": Mesh.of({"pp": 2, "dp": 2})}, "not of pp, dp: give an axis that you don't use one rank"),
    ({"schedule": gpipe(3, 2)}, "gpipe is for 3 ranks and the mesh's pp has 2"),
    ({"link": Network(4, FAST, CARD)}, "the mesh has 2 ranks on a node and the network 4")])
def test_what_does_not_fit_is_refused(arguments, complaint):
    right = {"mesh": Mesh.of({"pp": 2, "dp": 2, "tp": 2}, ranks_per_node=2), "schedule": gpipe(2, 2), "work": WORK,
             "link": CARD}
    with pytest.raises(ValueError, match=complaint):
        simulate_step(**{**right, **arguments})


@pytest.mark.parametrize("wrong", [{"forward_s": -1}, {"dp_bytes": float("nan")}, {"num_all_reduces": -1}])
def test_impossible_work_is_refused(wrong):
    with pytest.raises(ValueError, match="can't be negative or infinite"):
        replace(WORK, **wrong)


def spans(trace, rank):
    return [(f"{e.op}{e.micro_batch}", e.start_s, e.end_s) for e in trace.of_rank(rank) if e.kind == "compute"]


def test_two_stages_by_hand():
    trace = simulate_pipeline(one_f_one_b(2, 2), 1, 2)
    assert spans(trace, 0) == [("F0", 0, 1), ("F1", 1, 2), ("B0", 4, 6), ("B1", 7, 9)]
    assert spans(trace, 1) == [("F0", 1, 2), ("B0", 2, 4), ("F1", 4, 5), ("B1", 5, 7)]
    assert trace.duration_s == 9 and trace.clock == "modelled" and trace.name == "one_f_one_b"
    assert bubble(trace).idle_s == (3, 3) and bubble(trace).share == pytest.approx(1 / 3)


def test_a_split_backward_sends_its_gradient_before_its_weights():
    order = PipelineSchedule.from_csv("# own,2,1\n0F0,0I0,0W0\n1F0,1I0,1W0")
    trace = simulate_pipeline(order, 1, 3, weight_s=2)
    assert spans(trace, 0) == [("F0", 0, 1), ("I0", 3, 4), ("W0", 4, 6)]
    assert spans(trace, 1) == [("F0", 1, 2), ("I0", 2, 3), ("W0", 3, 5)]


def test_weights_do_not_wait_until_the_gradient_has_arrived():
    """It is on its way to the stage before, and the rank that has made it goes on."""
    order = PipelineSchedule.from_csv("# own,2,1\n0F0,0I0,0W0\n1F0,1I0,1W0")
    trace = simulate_pipeline(order, 1, 3, weight_s=2, link=Link(5, 1))
    assert spans(trace, 1) == [("F0", 6, 7), ("I0", 7, 8), ("W0", 8, 10)]
    assert spans(trace, 0) == [("F0", 0, 1), ("I0", 13, 14), ("W0", 14, 16)]


def test_a_pair_of_ranks_may_have_its_own_link():
    links = {(0, 1): Link(2, 1), (1, 0): Link(4, 1)}
    trace = simulate_pipeline(gpipe(3, 1), 1, 1, link=Link(1, 1), links=links)
    assert [e.end_s - e.start_s for e in trace.of_kind("send")] == [2, 1, 1, 4]
    alone = simulate_pipeline(gpipe(3, 1), 1, 1, links=links)
    assert [(e.rank, e.peer) for e in alone.of_kind("send")] == [(0, 1), (1, 0)], "others arrive at once"


@pytest.mark.parametrize("pair", [(0, 2), (1, 1), (-1, 0)])
def test_a_link_between_ranks_that_do_not_exist_is_refused(pair):
    with pytest.raises(ValueError, match="must name two different ranks of 0 to 1"):
        simulate_pipeline(gpipe(2, 2), 1, 1, links={pair: Link(1, 1)})


def test_messages_take_time_and_share_a_link():
    trace = simulate_pipeline(gpipe(2, 2), 1, 1, link=Link(0.5, 100), num_bytes=100)
    assert spans(trace, 1)[:2] == [("F0", 2.5, 3.5), ("F1", 4, 5)]
    sent = [(e.rank, e.peer, e.op, e.stage, e.micro_batch, e.start_s, e.end_s) for e in trace.of_kind("send")]
    assert sent == [(0, 1, "output", 0, 0, 1, 2.5), (0, 1, "output", 0, 1, 2.5, 4),
                    (1, 0, "gradient", 1, 0, 6, 7.5), (1, 0, "gradient", 1, 1, 7.5, 9)]
    assert trace.sent_bytes().tolist() == [200, 200]


def test_outputs_and_gradients_travel_at_the_same_time():
    trace = simulate_pipeline(one_f_one_b(2, 2), 1, 1, link=Link(3, 1))
    assert [(e.op, e.micro_batch, e.start_s, e.end_s) for e in trace.of_kind("send")] == [
        ("output", 0, 1, 4), ("output", 1, 4, 7), ("gradient", 0, 6, 9), ("gradient", 1, 9, 12)]


def test_stages_of_one_rank_send_no_messages():
    trace = simulate_pipeline(zero_bubble(4, 2), 1, 2, link=Link(0, 1e9), num_bytes=8)
    hops = {(e.op, e.stage) for e in trace.of_kind("send")}
    assert hops == {("output", 0), ("output", 2), ("gradient", 1), ("gradient", 3)}


@pytest.mark.parametrize("make", [gpipe, one_f_one_b, lambda s, m: interleaved(2 * s, s * m), lambda s, m:
                                  zero_bubble(2 * s, m)])
@given(size=st.tuples(st.integers(1, 5), st.integers(1, 6)), factor=st.floats(1.1, 4))
@settings(deadline=None, max_examples=25)
def test_nothing_starts_before_what_it_needs_and_slower_is_later(make, size, factor):
    schedule, link = make(*size), Link(0.1, 1e3)
    trace = simulate_pipeline(schedule, 1, 2, link=link, num_bytes=50)
    ends = {(e.stage, e.micro_batch, {"B": "I"}.get(e.op, e.op)): e.end_s for e in trace.of_kind("compute")}
    for e in trace.of_kind("compute"):
        if e.op == "F" and e.stage:
            assert e.start_s >= ends[e.stage - 1, e.micro_batch, "F"]
        if e.op in "BI" and e.stage < schedule.num_stages - 1:
            assert e.start_s >= ends[e.stage + 1, e.micro_batch, "I"]
    for rank in range(schedule.world_size):
        own = spans(trace, rank)
        assert all(before[2] <= after[1] for before, after in pairwise(own))
    slow = simulate_pipeline(schedule, 1, 2, link=link, num_bytes=50, slowdown={0: factor})
    assert slow.duration_s > trace.duration_s


def test_a_trace_survives_json():
    trace = simulate_pipeline(interleaved(4, 2), 1, 2, link=Link(0, 1), num_bytes=1)
    assert Trace.from_json(trace.to_json()) == trace


@pytest.mark.parametrize(("arguments", "options"), [
    ((-1, 2), {}), ((1, -2), {}), ((1, 2, 3), {}), ((1, 2, -1), {}), ((1, 2), {"num_bytes": -1}),
    ((float("nan"), 2), {}), ((1, 2), {"slowdown": {4: 2.0}}), ((1, 2), {"slowdown": {0: 0}})])
def test_invalid_times_are_refused(arguments, options):
    with pytest.raises(ValueError, match="must not be|can't be|is not possible"):
        simulate_pipeline(gpipe(2, 2), *arguments, **options)


def test_an_order_that_cannot_run_is_refused():
    with pytest.raises(ScheduleError, match="this order cannot run: rank 0 waits at B0"):
        simulate_pipeline(PipelineSchedule.from_csv("# own,1,1\n0B0,0F0"), 1, 2)


def test_a_trace_without_stages_has_no_bubble():
    with pytest.raises(ValueError, match="no forwards and backwards of stages"):
        bubble(simulate(ring_all_reduce(2), 8, Link(0, 1)))
    with pytest.raises(ValueError, match="a logical clock has no times"):
        bubble(simulate_pipeline(gpipe(2, 2), 1, 2).logical())


CONFIG = GPTConfig(vocab_size=11, context=5, num_layers=2, num_heads=2, width=6, mlp_width=9, dtype=torch.float64)
BLOCK, ROOT, HEAD = 315, 174, 78  # parameters; of root's, those of the last norm and the head


def one_step(stage: int) -> None:
    """A step of the chapter's code; what comes before is not recorded."""
    device = rank_device()
    dist.init_process_group()
    gpt = GPT.seeded(CONFIG, 0).to(device)
    with paused():
        model = (sharded.Zero1, sharded.Zero2, sharded.Zero3)[stage - 1](gpt, torch.optim.AdamW)
    follow_units(model.units, model.optimizer)
    tokens = torch.zeros(1, CONFIG.context, dtype=torch.int64, device=device)
    GPT.loss(model(tokens), tokens).backward()
    model.step()


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_simulated_step_is_that_of_real_ranks(stage: int) -> None:
    real = read_held(launch(one_step, 2, stage, record=True).trace)
    assert read_held(simulate_sharded(stage, 2, ROOT, [BLOCK] * 2, HEAD)) == real
    assert real.zero_stage == stage


def test_sums_are_those_of_the_lab() -> None:
    held = [read_held(simulate_sharded(stage, 4, ROOT, [BLOCK] * 6, HEAD)) for stage in (1, 2, 3)]
    peaks = {what: [max_of(one, what) for one in held] for what in ("parameters", "gradients", "optimizer")}
    assert peaks == {"parameters": [16576, 16576, 8080], "gradients": [16512, 6304, 6304], "optimizer": [8288] * 3}


def max_of(held, what: str) -> float:
    """The most bytes of one kind that a rank holds at once."""
    now = {place: num_bytes for place, num_bytes in held.start.items() if place[0] == what}
    peak = sum(now.values())
    for place, num_bytes in (change for action in held.operations for change in action.changes):
        if place[0] == what:
            now[place] = num_bytes
            peak = max(peak, sum(now.values()))
    return peak


def test_the_player_says_that_it_is_simulated() -> None:
    shown = memory_player(simulate_sharded(2, 4, ROOT, [BLOCK], HEAD))._repr_mimebundle_()[0]
    assert "simulated" in shown["text/plain"] and "recorded" not in shown["text/plain"] + shown["text/html"]
    with pytest.raises(ValueError, match="zero_stage is 1, 2 or 3, not 0"):
        simulate_sharded(0, 4, ROOT, [BLOCK], HEAD)
