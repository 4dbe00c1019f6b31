"""A step on a mesh: it takes as long as with each rank followed alone, and with all messages of its axes simulated."""
from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from itertools import permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from book.collectives import COLLECTIVES, ring_all_reduce
from book.cost import Link, Network
from book.cost.links import ring_all_reduce_s
from book.mesh import AXES, Mesh
from book.pipelines import gpipe, interleaved, one_f_one_b, zero_bubble
from book.schedule import Action, Move, PipelineSchedule, Schedule
from book.simulate import StepWork, simulate, simulate_pipeline, simulate_step
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
