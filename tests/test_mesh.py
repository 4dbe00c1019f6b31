"""Ranks on a mesh: coordinates, groups and nodes, whatever its axes; and torch's DeviceMesh on eight real ranks."""
from __future__ import annotations

import itertools
import math
import re

import pytest
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh

from book.launch import launch, rank_device
from book.mesh import AXES, WITH_CONTEXT, Mesh, MeshError
from book.parallel.hybrid import axis_groups

CUBE = Mesh(AXES, (2, 2, 2), 4)
names = st.lists(st.sampled_from(["pp", "dp", "tp", "cp", "ep"]), unique=True, min_size=1, max_size=4)


@st.composite
def meshes(draw):
    axes = draw(names)
    shape = tuple(draw(st.integers(1, 4)) for _ in axes)
    return Mesh(tuple(axes), shape, draw(st.one_of(st.none(), st.integers(1, 9))))


@settings(deadline=None, max_examples=40)
@given(meshes())
def test_each_rank_has_coordinates_of_its_own(mesh):
    places = [tuple(mesh.coordinates(rank).values()) for rank in range(mesh.world_size)]
    assert places == list(itertools.product(*map(range, mesh.shape)))  # row by row
    assert [mesh.rank_at(**mesh.coordinates(rank)) for rank in range(mesh.world_size)] == list(range(mesh.world_size))


@settings(deadline=None, max_examples=40)
@given(meshes(), st.data())
def test_the_groups_of_some_axes_share_out_the_ranks(mesh, data):
    axes = data.draw(st.lists(st.sampled_from(mesh.axes), unique=True))
    groups = mesh.groups(*axes)
    assert sorted(rank for group in groups for rank in group) == list(range(mesh.world_size))
    assert {len(group) for group in groups} == {math.prod(mesh.size(axis) for axis in axes)}
    assert list(groups) == sorted(groups) and all(list(group) == sorted(group) for group in groups)
    for group in groups:
        assert all(mesh.group_of(rank, *axes) == group for rank in group)
        fixed = [{axis: at for axis, at in mesh.coordinates(rank).items() if axis not in axes} for rank in group]
        assert all(place == fixed[0] for place in fixed)
        assert mesh.axis_of(group) == tuple(axis for axis in mesh.axes if axis in axes and mesh.size(axis) > 1)


@settings(deadline=None, max_examples=40)
@given(meshes(), st.data())
def test_ranks_that_are_not_a_whole_group_have_no_axis(mesh, data):
    ranks = data.draw(st.sets(st.sampled_from(range(mesh.world_size)), min_size=1))
    every = {group for size in range(len(mesh.axes) + 1) for axes in itertools.combinations(mesh.axes, size)
             for group in mesh.groups(*axes)}
    assert (mesh.axis_of(sorted(ranks)) is None) == (tuple(sorted(ranks)) not in every)


@settings(deadline=None, max_examples=40)
@given(meshes())
def test_nodes_are_filled_one_after_the_other(mesh):
    nodes = [mesh.node_of(rank) for rank in range(mesh.world_size)]
    assert nodes == sorted(nodes) and set(nodes) == set(range(mesh.num_nodes))
    full = mesh.ranks_per_node or mesh.world_size
    assert all(nodes.count(node) == full for node in range(mesh.num_nodes - 1))
    assert mesh.crosses(range(mesh.world_size)) == (mesh.num_nodes > 1) and not mesh.crosses([0])


@settings(deadline=None, max_examples=40)
@given(meshes(), st.randoms())
def test_another_order_keeps_sizes_and_nodes(mesh, random):
    order = random.sample(mesh.axes, len(mesh.axes))
    other = mesh.with_axes(*order)
    assert other.axes == tuple(order) and all(other.size(axis) == mesh.size(axis) for axis in order)
    assert other.ranks_per_node == mesh.ranks_per_node and other.with_axes(*mesh.axes) == mesh


def test_the_cube_of_the_chapter():
    assert CUBE.groups("tp") == ((0, 1), (2, 3), (4, 5), (6, 7))
    assert CUBE.groups("dp") == ((0, 2), (1, 3), (4, 6), (5, 7))
    assert CUBE.groups("pp") == ((0, 4), (1, 5), (2, 6), (3, 7))
    assert CUBE.coordinates(5) == {"pp": 1, "dp": 0, "tp": 1} and CUBE == Mesh.of({"pp": 2, "dp": 2, "tp": 2}, 4)
    assert CUBE.axis_of((0, 1, 2, 3)) == ("dp", "tp") and CUBE.axis_of((0, 3)) is None and CUBE.axis_of([]) is None
    assert {axis: any(map(CUBE.crosses, CUBE.groups(axis))) for axis in AXES} == {"pp": True, "dp": False, "tp": False}


def test_folded_axes_keep_the_ranks_and_the_other_groups():
    mesh = Mesh(WITH_CONTEXT, (2, 2, 2, 1), 4)
    folded = mesh.folded(("dp", "cp"), {"efsdp": 2, "ep": 2})
    assert folded == Mesh(("pp", "efsdp", "ep", "tp"), (2, 2, 2, 1), 4)
    assert folded.groups("efsdp", "ep") == mesh.groups("dp", "cp") and folded.groups("pp") == mesh.groups("pp")
    assert mesh.folded(("cp", "tp"), {"ep": 2}).groups("ep") == mesh.groups("cp")
    assert CUBE.folded(("dp", "tp"), {"efsdp": 1, "ep": 4}).groups("ep") == ((0, 1, 2, 3), (4, 5, 6, 7))


def torch_s_groups(sizes):
    """In a rank: its group on each axis of torch's mesh, and of ours; and what a sum over ours gives."""
    device = rank_device()
    dist.init_process_group()
    theirs = init_device_mesh(device.type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    mesh = Mesh.of(sizes)
    ours = axis_groups(mesh)
    place = dict(zip(theirs.mesh_dim_names, theirs.get_coordinate()))
    return place, {axis: (dist.get_process_group_ranks(theirs[axis].get_group()),
                          dist.get_process_group_ranks(ours[axis]), list(mesh.group_of(dist.get_rank(), axis)))
                   for axis in sizes}


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [{"pp": 2, "dp": 2, "tp": 2}, {"tp": 2, "dp": 1, "pp": 4}], ids=str)
def test_coordinates_and_groups_equal_those_of_torchs_device_mesh(sizes):
    for rank, (place, groups) in enumerate(launch(torch_s_groups, 8, sizes)):
        assert place == Mesh.of(sizes).coordinates(rank)
        assert all(theirs == made == told for theirs, made, told in groups.values())


@pytest.mark.parametrize(("make", "message"), [
    (lambda: Mesh(("dp",), (2, 2)), "1 axes need as many sizes, not 2"),
    (lambda: Mesh(("dp", "dp"), (2, 2)), "a name of its own"),
    (lambda: Mesh.of({"dp": 0}), "axis dp can't have 0 ranks"),
    (lambda: Mesh.of({"dp": 2.0}), "axis dp can't have 2.0 ranks"),
    (lambda: Mesh.of({"dp": 2}, 0), "a node can't have 0 ranks"),
    (lambda: Mesh.of({"dp": 2}, 2.5), "a node can't have 2.5 ranks: it needs a whole number"),
    (lambda: Mesh.of({"dp": 2}, "4"), "a node can't have '4' ranks"),
    (lambda: CUBE.group_of(0, "xx"), "no axis 'xx': it has pp, dp, tp"),
    (lambda: CUBE.group_of(0, "dp", "xx"), "no axis 'xx'"),
    (lambda: CUBE.size("cp"), "no axis 'cp': it has pp, dp, tp"),
    (lambda: CUBE.coordinates(8), "no rank 8: this mesh has ranks 0 to 7"),
    (lambda: CUBE.rank_at(pp=0, dp=0), "one coordinate for each of pp, dp, tp, not pp, dp"),
    (lambda: CUBE.rank_at(pp=0, dp=2, tp=0), "dp=2 is outside"),
    (lambda: CUBE.folded(("pp", "tp"), {"ep": 4}), "pp, tp are not in pp, dp, tp"),
    (lambda: CUBE.folded(("dp", "tp"), {"efsdp": 1, "ep": 8}), "4 ranks together and can't be folded into 8 of efsdp"),
    (lambda: CUBE.with_axes("pp", "dp"), "names each of them once"),
])
def test_an_invalid_mesh_raises_a_clear_error(make, message):
    with pytest.raises(MeshError, match=re.escape(message)):
        make()
