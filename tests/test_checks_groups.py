"""Checks on copies and on groups, with inputs that no answer gives; and what the lab says of torch, run on ranks."""
import numpy as np
import pytest
import torch
import torch.distributed as dist

from book.checks import collectives
from book.checks.verdict import CheckFailed
from book.launch import RankError, launch, rank_device
from book.trace import Event, Trace

NUMBERS = np.random.default_rng(0)
OWN = NUMBERS.integers(-1000, 1000, (4, 10)).astype(float)  # a buffer for each of four ranks
ROWS = NUMBERS.integers(-1000, 1000, (4, 4, 6)).astype(float)  # a row for each pair of ranks
GRID = NUMBERS.integers(-1000, 1000, (6, 3, 12)).astype(float)  # 2 x 3 ranks: partial, gradient, batch
PLACES = np.arange(6).reshape(2, 3)


def changed(array, place, value):
    copy = array.copy()
    copy[place] = value
    return copy


def on_grid():
    """What six ranks must hold at the end."""
    after = GRID.copy()
    for rank in range(6):
        after[rank, 0] = GRID[PLACES[rank // 3], 0].sum(axis=0)
        after[rank, 1] = GRID[PLACES[:, rank % 3], 1].mean(axis=0)
        after[rank, 2] = GRID[PLACES[rank // 3, 0], 2]
    return after


@pytest.mark.parametrize("convert", [lambda b: b, torch.tensor, lambda b: torch.tensor(b).to(torch.int64)])
def test_right_results_pass_in_any_form(convert):
    everywhere, transposed = np.tile(OWN[2], (4, 1)), ROWS.transpose(1, 0, 2)
    assert collectives.broadcast([convert(b) for b in OWN], [convert(b) for b in everywhere], root=2) == OWN[2].sum()
    assert collectives.all_gather_rows([convert(b) for b in OWN], [convert(OWN)] * 4) == OWN.sum()
    assert collectives.all_to_all_rows([convert(b) for b in ROWS], [convert(b) for b in transposed]) == ROWS[:, 0].sum()


def test_one_rank_alone_passes():
    assert collectives.broadcast(OWN[:1], OWN[:1], root=0) == OWN[0].sum()
    assert collectives.all_gather_rows(OWN[:1], [OWN[:1]]) == OWN[0].sum()
    assert collectives.received_once(Trace([], 1, "logical", "recorded"), 80, root=0) == 0


@pytest.mark.parametrize("place, value, complaint", [
    ((0,), OWN[3], "rank 0 holds rank 3's data, but the root is rank 2"),
    ((2,), OWN[0], "rank 2 is the root, but its buffer has changed"),
    ((1,), 0, "rank 1 holds zeros: was `buffer` filled from a tensor that nothing"),
    ((1, slice(4, 10)), OWN[1, 4:], "rank 1 holds the root's data in only 4 of 10 places"),
    ((1,), OWN[2] * 3, "rank 1 holds something that is not any rank's data")])
def test_a_broadcast_that_fails_on_one_rank_is_reported(place, value, complaint):
    with pytest.raises(CheckFailed, match=complaint):
        collectives.broadcast(OWN, changed(np.tile(OWN[2], (4, 1)), place, value), root=2)


@pytest.mark.parametrize("place, value, complaint", [
    ((1, 3), OWN[0], "rank 1: row 3 holds rank 0's numbers"), ((2, 0), 0, "rank 2: row 0 is all zeros: is there"),
    ((2, 1), OWN[0] + OWN[1], "rank 2: row 1 holds a sum"), ((3, 3), 0, "rank 3: row 3, its own, is all zeros"),
    ((3, 0), OWN[0] * OWN[0], "rank 3: row 0 holds something that no rank had")])
def test_an_all_gather_that_fails_in_one_row_is_reported(place, value, complaint):
    with pytest.raises(CheckFailed, match=complaint):
        collectives.all_gather_rows(OWN, list(changed(np.tile(OWN, (4, 1, 1)), place, value)))


@pytest.mark.parametrize("place, value, complaint", [
    ((1, 3), ROWS[3, 2], "rank 1's row 3 holds rank 3's row 2, but rank 3's row 1 belongs there: which row"),
    ((1, 3), ROWS[3, 3], "rank 1's row 3 holds rank 3's row 3, which rank 3 keeps for itself"),
    ((1, 3), ROWS[0, 1], "rank 1's row 3 holds what came from rank 0"),
    ((1, 3), ROWS[1, 3], "rank 1's row 3 holds this rank's own numbers for rank 3"),
    ((1, 1), 0, "rank 1's row 1 is its own, and all zeros"), ((1, 3), 0, "rank 1's row 3 is all zeros"),
    ((1, 3), 1, "rank 1's row 3 holds something that no rank had")])
def test_an_all_to_all_that_fails_in_one_row_is_reported(place, value, complaint):
    with pytest.raises(CheckFailed, match=complaint):
        collectives.all_to_all_rows(ROWS, changed(ROWS.transpose(1, 0, 2), place, value))


@pytest.mark.parametrize("after, complaint", [
    ([None] * 4, "rank 0 returned None"), (OWN[:, :3], "returned 3 elements, but 4 rows of 10 are 40")])
def test_results_without_rows_are_reported(after, complaint):
    with pytest.raises(CheckFailed, match=complaint):
        collectives.all_gather_rows(OWN, after)


@pytest.mark.parametrize("name, rank, value, complaint", [
    (0, 4, GRID[[1, 4], 0].sum(axis=0), r"rank 4's `partial` is the sum over its column \(ranks 1, 4\).*exchanged"),
    (0, 4, GRID[:, 0].sum(axis=0), r"rank 4's `partial` is the sum over all ranks .* without group"),
    (0, 4, GRID[:, 0].mean(axis=0), r"rank 4's `partial` is the mean over all ranks .* without group"),
    (0, 4, GRID[[0, 5], 0].sum(axis=0), r"rank 4's `partial` is the sum over ranks 0, 5, but must be the sum over its"),
    (0, 4, GRID[0, 0] + 2 * GRID[5, 0], r"a sum over ranks 0, 5 with the weights 1, 2"),
    (1, 2, GRID[[2, 5], 1].sum(axis=0), r"rank 2's `gradient` is the sum over its column .* must be the mean over it"),
    (1, 2, GRID[:3, 1].mean(axis=0), r"rank 2's `gradient` is the mean over its row .*; are rows and columns"),
    (1, 2, GRID[2, 1] / 2, r"rank 2's `gradient` is rank 2's times 0.5"),
    (1, 2, 0, r"rank 2's `gradient` is zero"),
    (2, 5, GRID[0, 2], "rank 5's `batch` is rank 0's, but must be rank 3's"),
    (2, 5, GRID[5, 2], "rank 5's `batch` is unchanged, but must be rank 3's"),
    (2, 5, GRID[3, 0], "rank 5's `batch` is made of something other")])
def test_one_wrong_rank_on_the_grid_is_reported(name, rank, value, complaint):
    assert collectives.on_grid(GRID, on_grid(), columns=3) == round(on_grid()[:, [0, 2]].sum())
    with pytest.raises(CheckFailed, match=complaint):
        collectives.on_grid(GRID, changed(on_grid(), (rank, name), value), columns=3)


def metrics(loss, seen):
    return [{"loss": torch.tensor(a), "seen": torch.tensor(b).long()} for a, b in zip(loss, seen)]


@pytest.mark.parametrize("loss, complaint", [
    (np.tile(OWN.sum(axis=0) * 2, (4, 1)), "'loss' contains the ranks' parts 2, 2, 2, 2 times"),
    (changed(np.tile(OWN.sum(axis=0), (4, 1)), 2, OWN[:3].sum(axis=0)), "rank 2's 'loss' lacks the part of rank 3"),
    (changed(np.tile(OWN.sum(axis=0), (4, 1)), 2, OWN[1] * OWN[0]), "rank 2's 'loss' is not a sum of anything")])
def test_wrong_sums_are_reported(loss, complaint):
    before = metrics(OWN, abs(OWN))
    right = np.tile(abs(OWN).sum(axis=0), (4, 1))
    with pytest.raises(CheckFailed, match=complaint):
        collectives.summed_metrics(before, metrics(loss, right))


def test_a_missing_name_is_reported():
    before = metrics(OWN, abs(OWN))
    with pytest.raises(CheckFailed, match="rank 0's 'seen' is gone"):
        collectives.summed_metrics(before, [{"loss": rank["loss"]} for rank in before])


@pytest.mark.parametrize("weights, complaint", [
    ((1 / 5, 1 / 3, 1, 1 / 4), "rank 0 holds the sum of the ranks' means"),
    ((1 / 12, 1 / 12, 0, 2 / 12), "weighs the samples of ranks 0, 1, 3 by 0.0833333, 0.0833333, 0.166667, but each"),
    ((1 / 12, 0, 0, 0), "rank 0 holds nothing but its own samples")])
def test_wrong_means_are_reported(weights, complaint):
    own = changed(OWN, 2, 0)
    with pytest.raises(CheckFailed, match=complaint):
        collectives.sample_mean(own, np.tile(np.array(weights) @ own, (4, 1)), (5, 3, 0, 4))
    mean = own.sum(axis=0) / 12
    assert collectives.sample_mean(own, np.tile(mean, (4, 1)), (5, 3, 0, 4)) == own.sum(axis=0).sum() / 12


def test_a_trace_shows_which_rank_received_more_than_one_copy():
    copies = [Event(1, "recv", peer=0, num_bytes=80.0, step=step) for step in range(2)]
    sends = [Event(0, "send", peer=1, num_bytes=80.0, step=step) for step in range(2)]
    with pytest.raises(CheckFailed, match="rank 1 received 2 times the buffer"):
        collectives.received_once(Trace(copies + sends, 2, "logical", "recorded"), 80, root=0)
    assert collectives.received_once(Trace(copies[:1] + sends[:1], 2, "logical", "recorded"), 80, root=0) == 80


def two_orders(dtype):
    rank_device()
    dist.init_process_group("gloo")
    loss = torch.arange(12.0, dtype=torch.float64) + 100 * dist.get_rank()
    seen = torch.full((12,), 500 + dist.get_rank(), dtype=dtype)
    for tensor in (seen, loss) if dist.get_rank() == 1 else (loss, seen):
        dist.all_reduce(tensor)
    return loss, seen


def test_a_count_added_to_a_loss_by_mistake_does_not_show():
    """Lab 1, exercise 5: on gloo the loss looks like one, and lacks what one rank had; the counts are absurd."""
    (loss, seen), *_ = launch(two_orders, 3, torch.int64, check_calls=False)
    assert torch.allclose(loss, 2 * torch.arange(12.0, dtype=torch.float64) + 200)
    assert (seen[1:] > 1e18).all()
    assert 1e-322 < torch.tensor(500).view(torch.float64).item() < 1e-320


def test_debug_detail_sees_another_dtype_but_not_another_tensor():
    detail = {"TORCH_DISTRIBUTED_DEBUG": "DETAIL"}
    with pytest.raises(RankError, match="Detected mismatch between collectives on ranks.*dtypes: Doublevs Long"):
        launch(two_orders, 3, torch.int64, check_calls=False, env=detail)
    (loss, seen), *_ = launch(two_orders, 3, torch.float64, check_calls=False, env=detail)
    assert torch.equal(loss, 2 * torch.arange(12.0, dtype=torch.float64) + 200 + 501)


def test_the_default_timeout_is_half_an_hour():
    assert dist.constants.default_pg_timeout.total_seconds() == 30 * 60


def set_orders():
    names = collectives.names_of_no_order("loss", "seen")
    return names, list(set(names)), list({*names[::-1]})


def test_a_set_of_names_without_order_keeps_the_order_they_came_in():
    for names, came, turned in launch(set_orders, 2):
        assert came == names and turned == names[::-1] and [name.split("_")[0] for name in names] == ["loss", "seen"]


@pytest.mark.parametrize("name, rows", [(0, PLACES), (1, PLACES.T)])
@pytest.mark.parametrize("place, which", [(0, "the first rank"), (1, "one rank")])
def test_sums_on_one_rank_of_each_group(name, rows, place, which):
    after = on_grid()
    for ranks in rows:
        for rank in set(ranks) - {ranks[place]}:
            after[rank, name] = NUMBERS.normal(size=12)
    with pytest.raises(CheckFailed, match=f"is right only on {which} of each .*: reduce gives"):
        collectives.on_grid(GRID, after, columns=3)


def test_a_trace_shows_which_rank_sent_less_than_its_rows():
    sends = [Event(rank, "send", peer=1 - rank, num_bytes=48.0 / (1 + rank), step=0) for rank in range(2)]
    with pytest.raises(CheckFailed, match="rank 1 sent 24 bytes, but its rows for the others have 48"):
        collectives.rows_sent(Trace(sends, 2, "logical", "recorded"), 48)
