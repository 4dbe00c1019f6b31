"""Bytes sent along each axis: recorded runs on eight ranks against the formulas, and where they cross nodes."""
from __future__ import annotations

import numpy as np
import pytest

from book.cost import (LayerShape, bytes_across_nodes, bytes_by_axis, flows, hybrid_sent_bytes, sent_bytes,
                       sharded_sent_bytes)
from book.mesh import Mesh, MeshError
from book.parallel import GPT
from book.trace import Event, Trace
from tests.hybrid import CONFIG, MIXED, NUM_MICRO_BATCHES, NUM_SEQUENCES, NUM_STEPS, mesh_of, trained

CUBE = (2, 2, 2)


def wanted(layout, parameter_bytes, zero_stage=0):
    """The formula for each rank: {axis: bytes of ranks 0 to 7 in a step}."""
    num_sequences = NUM_SEQUENCES // layout[1] // NUM_MICRO_BATCHES
    layer = LayerShape(num_sequences, CONFIG.context, CONFIG.width, CONFIG.num_heads)
    rows = [hybrid_sent_bytes(mesh_of(layout), rank, layer, CONFIG.num_layers, NUM_MICRO_BATCHES, num_bytes, zero_stage,
                              bytes_per_number=8) for rank, num_bytes in enumerate(parameter_bytes)]
    return {axis: [row[axis] for row in rows] for axis in rows[0]}


def held_parameter_bytes(layout):
    """Bytes of parameters of each rank, as it holds them after a run without sharding."""
    return [sum(weight.nbytes for weight in part.weights.values()) for part in trained(layout)]


def check(layout, zero_stage=0):
    found = bytes_by_axis(flows(trained(layout, zero_stage=zero_stage).trace, mesh_of(layout)), 8)
    for axis, per_rank in wanted(layout, held_parameter_bytes(layout), zero_stage).items():
        np.testing.assert_allclose(found.get(axis, np.zeros(8)), np.multiply(per_rank, NUM_STEPS), rtol=1e-12,
                                   err_msg=axis)
    assert found.keys() == {axis for axis, size in zip(("pp", "dp", "tp"), layout) if size > 1}


@pytest.mark.slow
@pytest.mark.parametrize("layout", MIXED)
def test_every_layout_sends_what_the_formula_says_on_each_axis(layout):
    check(layout)


@pytest.mark.slow
@pytest.mark.parametrize("zero_stage", [pytest.param(1, marks=pytest.mark.full), 2, 3])
def test_with_sharded_state_each_micro_batch_has_its_own_traffic_from_stage_2_on(zero_stage):
    """No unit is padded: two ranks divide each one's parameters."""
    check(CUBE, zero_stage)
    trace = trained(CUBE, zero_stage=zero_stage).trace
    counted = {op: sum(event.op == op and event.group == (0, 2) for event in trace.of_rank(0)) / NUM_STEPS
               for op in ("all_reduce", "reduce_scatter", "all_gather")}
    num_units, m = CONFIG.num_layers // 2 + 1, NUM_MICRO_BATCHES
    assert counted == {"all_reduce": 0, "reduce_scatter": num_units * (1 if zero_stage == 1 else m),
                       "all_gather": num_units * (2 * m if zero_stage == 3 else 1)}


def test_with_one_stage_and_one_micro_batch_zero_costs_what_chapter_04_counts():
    layer = LayerShape(1, 4, 8, 2)
    for zero_stage in range(4):
        found = hybrid_sent_bytes(mesh_of((1, 4, 1)), 0, layer, 2, 1, 1000.0, zero_stage)
        assert found == {"pp": 0, "dp": sharded_sent_bytes(zero_stage, 4, 1000.0), "tp": 0}
    with pytest.raises(ValueError, match="no ZeRO stage 4"):
        hybrid_sent_bytes(mesh_of(CUBE), 0, layer, 2, 1, 1.0, 4)
    for axes in (("dp", "tp"), ("pp", "tp"), ("pp", "dp")):
        with pytest.raises(MeshError, match="no axis"):
            hybrid_sent_bytes(Mesh(axes, (2, 2)), 0, layer, 2, 1, 1.0)


@pytest.mark.slow
@pytest.mark.parametrize(("ranks_per_node", "crossing"), [
    (8, set()), (4, {"pp"}), (2, {"pp", "dp"}), (1, {"pp", "dp", "tp"})])
def test_the_innermost_axis_is_the_last_to_cross_nodes(ranks_per_node, crossing):
    mesh = mesh_of(CUBE, ranks_per_node)
    found = flows(trained(CUBE).trace, mesh)
    across = bytes_across_nodes(found, mesh)
    assert {axis for axis, num_bytes in across.items() if num_bytes} == crossing
    for axis in crossing:
        assert across[axis] == pytest.approx(bytes_by_axis(found, 8)[axis].sum())


def test_each_rank_of_a_ring_sends_to_the_next_and_the_last_to_the_first():
    mesh, group = Mesh.of({"dp": 2, "tp": 4}), (4, 5, 6, 7)
    events = [Event(rank, "collective", "all_gather", group=group, num_bytes=400.0) for rank in group]
    assert flows(Trace(events, 8, "logical", "recorded"), mesh) == {
        ("tp", 4, 5): 300, ("tp", 5, 6): 300, ("tp", 6, 7): 300, ("tp", 7, 4): 300}


def test_groups_along_two_axes_and_along_none_are_distinguished():
    mesh = Mesh.of({"pp": 2, "dp": 2, "tp": 2})
    events = [Event(0, "collective", "all_reduce", group=(0, 1, 2, 3), num_bytes=8.0),
              Event(0, "collective", "all_reduce", group=(0, 3), num_bytes=8.0),
              Event(0, "send", peer=4, num_bytes=5.0), Event(0, "send", peer=7, num_bytes=7.0),
              Event(0, "compute", "F"), Event(0, "collective", "barrier", group=(0, 1))]
    found = flows(Trace(events, 8, "logical", "recorded"), mesh)
    assert found == {("dp+tp", 0, 1): 12, ("none", 0, 3): 8, ("pp", 0, 4): 5, ("none", 0, 7): 7}


def test_traffic_of_collectives_other_than_rings_is_not_guessed():
    with pytest.raises(ValueError, match="broadcast depends on how"):
        sent_bytes(Event(0, "collective", "broadcast", group=(0, 1), num_bytes=8.0))


def test_every_rank_has_a_part_of_the_config():
    assert len(GPT(CONFIG).blocks) == 8 and CONFIG.num_heads == 8 and CONFIG.vocab_size >= 8
