"""Collectives and pipelined steps on a mesh: who is with whom, in which order, how many bytes go along each axis."""
import pytest

from book.collectives import broadcast
from book.cost import Link, bytes_by_axis, flows
from book.cost.links import ring_sent_bytes
from book.mesh import Mesh, MeshError
from book.pipelines import gpipe, one_f_one_b
from book.replay import pipeline_order
from book.schedule import ScheduleError
from book.simulate import simulate, simulate_groups, simulate_hybrid
from book.trace import TraceError
from book.widgets import mesh_explorer, play

MESH = Mesh.of({"pp": 2, "dp": 2, "tp": 2}, ranks_per_node=4)


def test_every_group_of_each_axis_has_its_collective_axis_by_axis() -> None:
    grid = Mesh.of({"column": 2, "row": 3})
    trace = simulate_groups(grid, 96, "row", "column")
    assert [[event.group for event in trace.of_rank(rank)] for rank in (0, 4)] == [[(0, 1, 2), (0, 3)],
                                                                                  [(3, 4, 5), (1, 4)]]
    assert "as simulated" in mesh_explorer(trace, grid)._repr_mimebundle_()[0]["text/html"]
    with pytest.raises(MeshError):
        simulate_groups(grid, 96, "tp")


@pytest.mark.parametrize("make", [gpipe, one_f_one_b])
def test_each_pipeline_of_a_mesh_runs_the_schedule(make) -> None:
    trace = simulate_hybrid(make(2, 4), MESH, 1000, (5000, 5000))
    for first, second in MESH.groups("pp"):
        assert list(pipeline_order(trace, ranks=[first, second]).actions) == list(make(2, 4).actions)


def test_bytes_go_along_the_axes_as_the_formulas_say() -> None:
    sent = bytes_by_axis(flows(simulate_hybrid(one_f_one_b(2, 4), MESH, 1000, (5000, 400), num_all_reduces=3), MESH), 8)
    assert list(sent["pp"]) == [4 * 1000] * 8
    assert list(sent["dp"]) == [ring_sent_bytes(2, 5000)] * 4 + [ring_sent_bytes(2, 400)] * 4
    assert list(sent["tp"]) == [4 * 2 * 3 * ring_sent_bytes(2, 1000)] * 8


def test_a_mesh_may_lack_replicas_and_tensor_parallel_ranks_but_no_pipeline() -> None:
    trace = simulate_hybrid(one_f_one_b(4, 2), Mesh.of({"pp": 4}), 10, [10] * 4)
    assert not len(trace.of_kind("collective")) and trace.world_size == 4
    with pytest.raises(ScheduleError, match="has 4 ranks, and pp has 2"):
        simulate_hybrid(one_f_one_b(4, 2), MESH, 10, (10, 10))
    with pytest.raises(MeshError):
        simulate_hybrid(one_f_one_b(4, 2), Mesh.of({"dp": 4}), 10, (10,))


def test_a_renumbered_run_is_the_same_between_other_ranks() -> None:
    trace = simulate(broadcast(4), 64, Link(1e-5, 1e9))
    other = trace.renumbered([2, 3, 0, 1])
    assert all(contents == (0, 0, 1, 0) for contents in other.held().values())
    assert sorted(event.peer for event in other.of_kind("send") if event.rank == 2) == [0] * 4 + [3] * 4
    assert other.renumbered([2, 3, 0, 1]).events == trace.events and other.promise is None
    assert "every rank holds rank 2" in play(other, promise="broadcast")._repr_mimebundle_()[0]["text/html"]
    groups = simulate_groups(Mesh.of({"row": 2, "column": 2}), 8, "column").renumbered([3, 2, 1, 0])
    assert {event.group for event in groups.of_rank(3)} == {(2, 3)}


@pytest.mark.parametrize("numbers", [[0, 1, 2], [0, 1, 2, 2], [1, 2, 3, 4]])
def test_ranks_can_be_renumbered_with_all_their_numbers_only(numbers: list[int]) -> None:
    with pytest.raises(TraceError, match="must be the ranks 0 to 3 in some order"):
        simulate(broadcast(4), 64, Link(1e-5, 1e9)).renumbered(numbers)
