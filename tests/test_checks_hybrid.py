"""Checks of a step on a mesh, with inputs that no answer gives: each mistake is named, and nothing wrong passes."""
import sys

import numpy as np
import pytest

from book.checks import hybrid, hybrid_steps, meshes
from book.launch import RankError
from book.checks.verdict import CheckFailed
from book.checks.hybrid import cut
from book.mesh import AXES, Mesh

RNG = np.random.default_rng(0)
MESH = Mesh(AXES, (2, 2, 2))
SHAPES = {"first": (4, 6), "norm": (6,), "last": (6, 4)}
LAYOUT = {"first": 0, "norm": None, "last": 1}
STAGES = {0: ["first", "norm"], 1: ["last"]}
SINGLE = [{name: RNG.normal(size=shape) for name, shape in SHAPES.items()} for _ in range(8)]  # of 8 sequences
WHOLE = {name: RNG.normal(size=shape) for name, shape in SHAPES.items()}


def held(whole=WHOLE, place=lambda rank: rank):
    """What each rank holds of `whole`, cut as for the rank `place(rank)`."""
    return [{name: cut(whole[name], name, place(rank), MESH, LAYOUT)
             for name in STAGES[MESH.coordinates(rank)["pp"]]} for rank in range(8)]


def gradients(weights=lambda rank, name: np.full(8, 1 / 8)):
    """What each rank holds with these weights of the eight sequences' gradients."""
    return [{name: cut(np.tensordot(weights(rank, name), [own[name] for own in SINGLE], axes=1), name, rank, MESH,
                       LAYOUT) for name in STAGES[MESH.coordinates(rank)["pp"]]} for rank in range(8)]


def times(factor):
    return gradients(lambda rank, name: np.full(8, factor / 8))


def check(found):
    return hybrid.mesh_gradients(found, SINGLE, MESH, LAYOUT, 4)


def test_the_gradient_of_the_batch_passes():
    mean = {name: np.mean([own[name] for own in SINGLE], axis=0) for name in SHAPES}
    assert check(gradients()) == pytest.approx(sum(np.abs(value).sum() for value in mean.values()))


@pytest.mark.parametrize("seed", range(12))
def test_no_other_gradient_passes(seed):
    rng = np.random.default_rng(seed)
    rank, by = int(rng.integers(8)), 10.0 ** -rng.integers(1, 7)
    found = gradients(lambda own, name: np.full(8, 1 / 8) * (1 + by * (own == rank)))
    with pytest.raises(CheckFailed, match=f"rank {rank} has a wrong gradient"):
        check(found)


@pytest.mark.parametrize("found, complaint", [
    (times(4), "scale each loss by 1/4"),
    (times(2), "it is the sum over the 2 replicas"),
    (times(1 / 4), "twice"),
    (times(8), "divide by both"),
    (times(0), "it is 0"),
    (gradients(lambda rank, name: np.full(8, 2 / 8 if name == "norm" else 1 / 8)), "has already summed it"),
    (gradients(lambda rank, name: np.repeat([1 / 4, 0], 4)), "is in no rank's gradient"),
    (gradients(lambda rank, name: np.repeat(np.eye(2)[MESH.coordinates(rank)["dp"]] / 4, 4)), "over the dp group"),
    ([None] * 8, "has made no step"),
    ([dict.fromkeys(own) for own in gradients()], "no gradient for any parameter"),
])
def test_a_wrong_gradient_is_identified(found, complaint):
    with pytest.raises(CheckFailed, match=complaint):
        check(found)


def test_a_sum_over_tp_is_distinguished_from_one_over_dp():
    local = gradients(lambda rank, name: np.repeat(np.eye(2)[MESH.coordinates(rank)["dp"]] / 4, 4))
    summed = [{name: sum(local[other][name] for other in MESH.group_of(rank, "tp")) / 2 for name in own}
              for rank, own in enumerate(local)]
    with pytest.raises(CheckFailed, match="0.5 times a sum over tp, .* average over dp alone"):
        check(summed)


def test_ranks_that_scale_by_different_factors_are_reported():
    found = gradients(lambda rank, name: np.full(8, (0.3 + 0.1 * (rank % 2)) / 8))
    with pytest.raises(CheckFailed, match="ranks 6, 7 of one tp group scale theirs by 0.3, 0.4"):
        check(found)
    with pytest.raises(CheckFailed, match="what is it scaled by, and how often"):
        check(times(0.3))


def test_zeros_in_different_places_are_masks_drawn_independently():
    whole, other = RNG.normal(size=(4, 6)), RNG.normal(size=(4, 6))
    mask = RNG.random((4, 6)) < 0.5
    hybrid.drawn_alike([whole * mask, whole * mask, other, other] * 2, MESH)
    hybrid.drawn_alike([whole, other] * 4, MESH)  # wrong, but not for a mask
    hybrid.drawn_alike([None, whole] * 4, MESH)
    with pytest.raises(CheckFailed, match="ranks 2 and 3 of one tp group have zeros in 24 different places"):
        hybrid.drawn_alike([whole, whole, other * mask, other * ~mask] * 2, MESH)


def test_sizes_belong_to_axes_in_any_order():
    mesh = Mesh(AXES, (4, 1, 2), ranks_per_node=4)
    messages = [("pp", 0, 2, 8.0), ("pp", 2, 4, 8.0), ("tp", 0, 1, 4.0)]
    total, want = {"pp": 16.0, "dp": 0.0, "tp": 4.0}, {"pp": 0.0, "dp": 0.0, "tp": 4.0}
    arguments = ("tp", "dp", "pp"), want, total, {}, messages, mesh
    assert meshes.crossing(want, *arguments) == 4
    with pytest.raises(CheckFailed, match="each size belongs to its axis"):
        meshes.crossing(dict.fromkeys(AXES, 0.0), *arguments)  # as if tp had 4 ranks and pp 2
    with pytest.raises(CheckFailed, match="tp has 4 bytes that cross between nodes, not 5"):
        meshes.crossing({**want, "tp": 5}, *arguments)


@pytest.mark.parametrize("message, hint", [
    ("AttributeError: 'Identity' object has no attribute 'attention'", "cut the blocks first"),
    ("IndexError: tuple index out of range", "counts in the world"),
])
def test_an_error_of_a_rank_gets_a_hint(message, hint):
    assert hint in hybrid.mesh_failure(RankError(message)) and hybrid.mesh_failure(RankError("other")) == "other"


@pytest.mark.parametrize("parts, complaint", [
    (held(place=lambda rank: rank ^ 1), "is the part that belongs to rank"),
    (held({name: value + 1 for name, value in WHOLE.items()}), "is not a part of rank 0's"),
    ([own | {"last": WHOLE["last"]} for own in held()], "stages 0, 1 hold last"),
    ([{name: WHOLE[name] for name in own} for own in held()], "is whole, but its part has"),
    ([{name: value for name, value in own.items() if name != "norm"} for own in held()], "no rank holds norm"),
])
def test_the_rank_that_a_wrong_part_belongs_to_is_named(parts, complaint):
    drawn = [WHOLE] + [{name: RNG.normal(size=shape) for name, shape in SHAPES.items()} for _ in range(7)]
    hybrid.parts_on_mesh(held(), drawn, MESH, LAYOUT)
    with pytest.raises(CheckFailed, match=complaint):
        hybrid.parts_on_mesh(parts, drawn, MESH, LAYOUT)


def test_calls_are_noted_and_imports_are_not(monkeypatch, tmp_path):
    import book.pipelines

    with hybrid_steps.calls_into(["book/mesh", "book/pipelines"]) as called:
        MESH.coordinates(0)
    assert called == {"book/mesh"} and book.pipelines
    (tmp_path / "own_parts.py").write_text("def part(): pass\n\n\npart()\n")
    monkeypatch.syspath_prepend(tmp_path)
    for calls in (False, True):
        with hybrid_steps.calls_into(["own_parts"]) as found:
            import own_parts
            if calls:
                own_parts.part()
        assert found == ({"own_parts"} if calls else set())
        monkeypatch.delitem(sys.modules, "own_parts")
    hybrid_steps.by_hand([set()] * 8)
    with pytest.raises(CheckFailed, match="rank 1 calls functions of book.mesh"):
        hybrid_steps.by_hand([set(), called])
    with pytest.raises(CheckFailed, match="calls functions of book.mesh"), hybrid_steps.calls_into(["book/mesh"]):
        MESH.coordinates(99)
    with pytest.raises(KeyError), hybrid_steps.calls_into(["book/mesh"]):
        {}["nothing of these places"]


@pytest.mark.parametrize("losses, complaint", [
    ([1.0, 1.0, 1.0, 1.0, 1.5, 1.5, 2.5, 2.5], "only the last stage"),
    ([None] * 8, "returns no loss"),
    ([None] * 4 + [1.5, 1.6, 2.5, 2.5], "ranks 4 and 5 of one tp group"),
    ([None] * 4 + [6.0, 6.0, 10.0, 10.0], "the sum over the micro-batches"),
    ([None] * 4 + [1.5, 1.5, 1.5, 1.5], "the loss of share 0 alone"),
    ([None] * 4 + [2.0, 2.0, 2.0, 2.0], "the mean over the replicas, but each"),
])
def test_a_wrong_first_loss_is_reported(losses, complaint):
    sequences = [1, 1, 2, 2, 2, 2, 3, 3]
    hybrid_steps.first_losses([None] * 4 + [1.5, 1.5, 2.5, 2.5], sequences, MESH, 4)
    with pytest.raises(CheckFailed, match=complaint):
        hybrid_steps.first_losses(losses, sequences, MESH, 4)


def test_losses_must_continue_as_in_one_process():
    rows = [[None] * 3] * 4 + [[3.0, 2.0, 1.0]] * 2 + [[5.0, 4.0, 3.0]] * 2
    assert hybrid_steps.mesh_losses(rows, [4.0, 3.0, 2.0], MESH) == 2.0
    with pytest.raises(CheckFailed, match="the loss of step 1 is 3, but one process has 3.1"):
        hybrid_steps.mesh_losses(rows, [4.0, 3.1, 2.0], MESH)
    for first, complaint in ((4.0 + 1e-7, "has 4: this is right to only six digits"), (4.5, "which weights does each")):
        with pytest.raises(CheckFailed, match=complaint):
            hybrid_steps.mesh_losses(rows, [first, 3.0, 2.0], MESH)
    assert hybrid_steps.resumed([row[1:] for row in rows], [4.0, 3.0, 2.0], 1, MESH) == 2.0
    with pytest.raises(CheckFailed, match="weights are not those that were saved"):
        hybrid_steps.resumed([row[1:] for row in rows], [4.0, 3.1, 2.0], 1, MESH)
    with pytest.raises(CheckFailed, match="the optimizer's state did not"):
        hybrid_steps.resumed([row[1:] for row in rows], [4.0, 3.0, 2.1], 1, MESH)


def test_places_and_groups_of_any_order_pass_and_no_others():
    mesh = Mesh(AXES, (2, 3, 4))
    meshes.places([tuple(mesh.coordinates(rank).values()) for rank in range(24)], mesh)
    assert meshes.groups_of_axis("dp", [list(group) for group in reversed(mesh.groups("dp"))], mesh) == 8
    for wrong, complaint in [([group[::-1] for group in mesh.groups("dp")], "not in the order"),
                             (mesh.groups("tp"), "gives the groups of tp"),
                             (mesh.groups("dp")[:3], "return all of them"),
                             ([(0, 1)], "must be in exactly one group"), (None, "must be a list"),
                             ([*mesh.groups("dp")[:-2], (15, 18, 22), (14, 19, 23)], "the ranks 14, 19, 23 differ in")]:
        with pytest.raises(CheckFailed, match=complaint):
            meshes.groups_of_axis("dp", wrong, mesh)


def test_a_group_of_ranks_that_do_not_exist_is_refused():
    meshes.same_group([None] * 4)
    meshes.same_group([[0, 3]] * 4)
    for strange in (4, -1, 0.5):
        with pytest.raises(CheckFailed, match=f"rank 1 makes a group with rank {strange}, but .* from 0 to 3"):
            meshes.same_group([[0, 1], [1, strange], [0, 1], [0, 1]])
