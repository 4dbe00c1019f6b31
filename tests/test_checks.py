"""What all checks share, and checks on buffers and groups: what passes, what just fails, what no answer reaches."""
import contextlib
import threading
import traceback
from operator import methodcaller

import numpy as np
import pytest
import torch
import torch.distributed as dist

from book.checks import collectives, gradient_buckets, pipeline_orders, rings, verdict
from book.checks.attribution import Attribution
from book.checks.formula import Formula
from book.checks.interleaved import as_if_in_turn
from book.checks.verdict import CheckFailed
from book.launch import LaunchError, RankError, launch, rank_device
from book.pipelines import one_f_one_b
from book.trace import Event, Trace, parting

WHOLE = np.random.default_rng(0).integers(-1000, 1000, (4, 44)).astype(float)
SUM = np.tile(WHOLE.sum(axis=0), (4, 1))


@pytest.mark.parametrize("convert", [
    lambda b: b, torch.tensor, lambda b: torch.tensor(b, requires_grad=True), lambda b: torch.tensor(b).float()])
def test_any_kind_of_buffer_is_compared(convert):
    assert rings.all_reduce([convert(b) for b in WHOLE], [convert(b) for b in SUM]) == WHOLE.sum()


def test_fractions_are_refused_because_their_sums_are_not_exact():
    with pytest.raises(ValueError, match="whole numbers"):
        rings.all_reduce(WHOLE / 3, SUM / 3)


@pytest.mark.parametrize("rank, chunk, change, complaint", [
    (2, 1, lambda w: w.sum(0) + w[1], r"rank 2 chunk 1 counts too often: rank 1 \(2 times\)"),
    (1, 3, lambda w: 0 * w[0], "rank 1 chunk 3 is all zeros"),
    (1, 0, lambda w: np.roll(w.sum(0), -11), "rank 1 chunk 0 holds data that belongs in chunk 1"),
    (1, 0, lambda w: w[0] ** 2, "rank 1 chunk 0 holds neither a sum"),
])
def test_one_wrong_chunk_is_named(rank, chunk, change, complaint):
    after = SUM.copy()
    part = slice(11 * chunk, 11 * chunk + 11)
    after[rank, part] = change(WHOLE)[part]
    with pytest.raises(CheckFailed, match=complaint):
        rings.all_reduce(WHOLE, after)


@pytest.mark.parametrize("after, complaint", [
    (SUM[:3], "there are 4 ranks, but 3 results"), (SUM[:, :40], "had 44 elements and now have 40"),
    ([None, *SUM[1:]], "rank 0 returned None"), ([SUM[0], *SUM[1:, :9]], "differ in length")])
def test_results_that_cannot_be_compared_are_refused(after, complaint):
    with pytest.raises(CheckFailed, match=complaint):
        rings.all_reduce(WHOLE, after)


def test_nan_is_a_wrong_number():
    with pytest.raises(CheckFailed, match="x is nan, which is wrong"):
        Formula(5, [(10, "twice")]).require_right("x", float("nan"))


@pytest.mark.parametrize("got", [5, 5.0, np.float32(5), torch.tensor(5), np.array(5.0)])
def test_a_right_number_passes(got):
    assert Formula(5).require_right("x", got) == 5.0


def test_zero_can_be_the_expected_number():
    assert Formula(0).require_right("x", 0) == 0
    with pytest.raises(CheckFailed, match="x is 5, which is wrong"):
        Formula(0).require_right("x", 5)


def test_coefficients_are_unique_or_unknown():
    assert Attribution(WHOLE[0] + 2 * WHOLE[3], WHOLE).factors == pytest.approx([1, 0, 0, 2])
    assert Attribution(WHOLE[1] - 3 * WHOLE[2], WHOLE).factors == pytest.approx([0, 1, -3, 0])
    assert Attribution(WHOLE[0] ** 2, WHOLE).factors is None
    assert Attribution(WHOLE[0, :3], WHOLE[:, :3]).factors is None
    without = np.concatenate([WHOLE[:2], 0 * WHOLE[:1]])
    assert Attribution(2 * WHOLE[1], without).factors == pytest.approx([0, 2, np.nan], nan_ok=True)


MADE_OF = {  # coefficients of four ranks' data on rank 1, and the patterns that fit, where the sum is due
    (0, 0, 0, 0): "nothing", (0, 1, 0, 0): "own", (0, 0, 1, 0): "other", (.25, .25, .25, .25): "mean",
    (1 + 1e-6, 1, 1, 1): "rounded", (5, 5, 5, 5): "times examples", (.2, .2, .2, .2): "over examples",
    (1, 2, 1, 1): "added to own", (0, 3, 0, 0): "only own", (1, 1, 0, 0): "missing ranks", (7, 7, 7, 7): "scaled",
    (1, 2, 3, 4): "unequal"}


@pytest.mark.parametrize("factors, pattern", MADE_OF.items())
def test_a_pattern_is_named(factors, pattern):
    found = Attribution(np.array(factors) @ WHOLE, WHOLE, own=1, counts={"examples": 5})
    assert next(found.patterns()).name == pattern
    assert found.explain(dict.fromkeys(["unequal", pattern], "{size} ranks, {weights}")) == (
        "4 ranks, " + ", ".join(f"{factor:.6g}" for factor in factors))


def test_a_pattern_with_given_coefficients_needs_no_more_numbers_than_ranks():
    few = WHOLE[:, :2]
    for got, pattern in ((few[1], "own"), (few[3], "other"), (few.sum(axis=0) + few[1], "added to own"),
                         (few.sum(axis=0) * 5, "times examples"), (few[0] + 2 * few[2], "twice")):
        found = Attribution(got, few, own=1, counts={"examples": 5}).patterns({"twice": [1, 0, 2, 0]})
        assert pattern in {name for name, _ in found}
    assert [name for name, _ in Attribution(few[0] + 3 * few[2], few, own=1).patterns()] == ["unknown"]


@pytest.mark.parametrize("factors, pattern, absent", [
    ([[1, 0], [1, 0]], "missing batches", "1"), ([[0, 1], [0, 1]], "only last batches", ""),
    ([[1, 1], [0, 0]], "only own", ""), ([[1, 1], [1, 0]], "missing batches", "1"),
    ([[0, 0], [1, 1]], "missing ranks", "0"), ([[1, 0], [1, 1]], "unequal", "")])
def test_a_second_axis_is_distinguished(factors, pattern, absent):
    found = Attribution(np.tensordot(factors, WHOLE.reshape(2, 2, 44), 2), WHOLE.reshape(2, 2, 44), own=0,
                        axes=("ranks", "batches"))
    name, fields = next(found.patterns())
    assert (name, fields.get("absent", "")) == (pattern, absent)


@pytest.mark.parametrize("reduction, picked", [
    ("MAX", WHOLE.max(axis=0)), ("MIN", WHOLE.min(axis=0) / 4), ("PRODUCT", WHOLE.prod(axis=0))])
def test_an_all_reduce_that_does_not_add_up_is_named_divided_or_not(reduction, picked):
    found = Attribution(picked, WHOLE, 0.25, own=1)
    assert found.explain({"picked": "{reduction}", "unknown": "?"}) == reduction


def test_numbers_that_some_ranks_divided_before_the_sum_and_others_after_it_are_recognized():
    sentences = dict.fromkeys(["in flight", "unequal", "unknown"], "{size}") | {"in flight": "in flight"}
    late = np.where(np.arange(WHOLE.shape[1]) % 3, 1, 0.25)  # rank 2 divides most numbers after they were sent
    torn = (WHOLE[0] / 4 + WHOLE[1] + late * WHOLE[2] + WHOLE[3]) / 4
    for got in (torn, WHOLE[0] / 4 + WHOLE[1:].sum(axis=0)):
        assert Attribution(got, WHOLE, 0.25, own=1).explain(sentences) == "in flight"
    assert Attribution(torn + 1e-3, WHOLE, 0.25, own=1).explain(sentences) == "4"


def test_the_right_sum_is_recognized():
    assert Attribution(WHOLE.sum(axis=0), WHOLE).is_right() and not Attribution(WHOLE[0], WHOLE).is_right()


def test_arrays_agree_up_to_rounding_relative_to_a_scale():
    assert verdict.agree(WHOLE[0] + 1e-7, WHOLE[0]) and not verdict.agree(WHOLE[0] + 1e-5, WHOLE[0])
    assert verdict.agree(torch.tensor(WHOLE), WHOLE.ravel()) and not verdict.agree(WHOLE[:2], WHOLE[0])
    assert verdict.agree([1e-7], [0.0], scale=WHOLE) and not verdict.agree([1e-7], [0.0])
    assert not verdict.agree(None, WHOLE) and not verdict.agree([np.nan], [1.0])


def test_differing_names_keep_their_order():
    one = {"weight": torch.ones(2), "bias": torch.zeros(2), "norm": torch.ones(1)}
    other = {"norm": np.ones(1) + 1e-12, "bias": np.zeros(2), "weight": np.ones(2) + 1e-3}
    assert verdict.differing(one, other) == ["weight", "norm"]
    assert verdict.differing(one, other, tolerance=1e-9) == ["weight"]
    assert verdict.differing(one, other, scale=WHOLE, tolerance=1e-5) == []


def test_multiples_are_recognized():
    assert verdict.times(2 * WHOLE, torch.tensor(WHOLE)) == pytest.approx(2)
    assert np.isnan(verdict.times(WHOLE, 0 * WHOLE))


def test_the_first_step_with_another_loss_is_found():
    assert parting([1.0, 2.0, 3.0], [1.0, 2.0, 3.0], verdict.same_loss) is None
    assert parting([1.0, 2.001, 4.0], [1.0, 2.0, 3.0], verdict.same_loss) == 1
    assert parting([1.0, float("nan")], [1.0, 2.0], verdict.same_loss) == 1
    assert parting("FFB", "FFBB") == 3 and parting("FFBB", "FFB") == 3
    assert parting("abcd", "xbyd", for_good=True) is None and parting("abcz", "xbyy", for_good=True) == 2
    assert parting("ab", "xy", for_good=True) == 0 and parting("", "", for_good=True) is None
    assert verdict.furthest([np.zeros(2), np.ones(2), np.array([0, -3.0])]) == (2, 3.0)


def fail_on(wrong_rank, error):
    dist.init_process_group()
    if dist.get_rank() == wrong_rank:
        raise error


def over_rpc(error, worker):
    """An error as RPC words it for the one who called a worker: in its text, and with a traceback there."""
    def raise_it():
        raise error

    with contextlib.suppress(CheckFailed):
        raise_it()
    shown = "".join(traceback.format_exception(error))
    return CheckFailed(f"On WorkerInfo(id={worker}, name=worker{worker}):\n{error!r}\n{shown}")


def test_a_check_that_fails_on_a_remote_worker_says_only_its_own_sentence():
    launched = LaunchError("rank 0 failed")
    launched.__cause__ = over_rpc(over_rpc(CheckFailed("stage 1 gets tokens: call each once"), 2), 1)
    with pytest.raises(CheckFailed, match="^stage 1 gets tokens: call each once$"), verdict.explained(str):
        raise launched


@pytest.mark.slow
def test_only_errors_that_something_explains_become_failed_checks():
    def failure(message, word):
        return verdict.with_hint(message, {word: f"do not {word}"})

    with pytest.raises(CheckFailed, match="(?s)rank 1 failed.*stumble.*\ndo not stumble"):
        with verdict.explained(failure, "stumble"):
            launch(fail_on, 2, 1, ValueError("stumble"))
    with pytest.raises(RankError, match="fall"):  # nothing to add: the launcher's error shows the line
        with verdict.explained(failure, "stumble"):
            launch(fail_on, 2, 1, ValueError("fall"))
    with pytest.raises(CheckFailed, match="^the sum is wrong$"):  # a check in a rank has said what is wrong
        with verdict.explained(failure, "stumble"):
            launch(fail_on, 2, 0, CheckFailed("the sum is wrong"))
    with pytest.raises(KeyError):  # not an error of a launch
        with verdict.explained(failure, "stumble"):
            {}["stumble"]


# Values just inside and just outside

@pytest.mark.parametrize("times, reason", [
    ((2, 1, 1, 1), "one step too many, or the wrong chunk sent"), ((2, 0, 1, 1), "one step too many")])
def test_sums_too_large_and_too_small_have_different_reasons(times, reason):
    after = np.tile(WHOLE.sum(axis=0), (4, 1))
    after[1, 11:22] = (np.array(times) @ WHOLE)[11:22]
    with pytest.raises(CheckFailed, match=f"rank 1 chunk 1 .*: {reason}"):
        rings.all_reduce(WHOLE, after)


def test_one_more_micro_batch_kept_is_refused():
    order = one_f_one_b(3, 6)
    assert pipeline_orders.activations_kept([3.005, 2.0, 0.9], order) == pytest.approx(5.905)
    for peaks, complaint in (([3.02, 2.0, 1.0], "rank 0 .* of 3.02 micro-batches while only 3 are in flight"),
                             ([3.0, 2.0, 2.0], "rank 2 .* activations of 2 micro-batches while only 1 are in flight")):
        with pytest.raises(CheckFailed, match=complaint):
            pipeline_orders.activations_kept(peaks, order)


def backward(*sent_s):
    """A followed backward on two ranks: six gradients that end at 1, 2, ... 6 s, and all-reduces issued at `sent_s`."""
    ready = [Event(rank, "compute", op=str(i), num_bytes=4, start_s=i, end_s=i + 1.0)
             for rank in (0, 1) for i in range(6)]
    issued = [Event(rank, "collective", op="all_reduce", num_bytes=8, start_s=start_s, end_s=9.0)
              for rank in (0, 1) for start_s in sent_s]
    return Trace(ready + issued, 2, "measured", "recorded")


def test_only_the_last_bucket_may_be_sent_when_backward_is_over():
    assert gradient_buckets.bucket_traffic(backward(2.1, 4.1, 6.1), backward(2.1, 4.1, 6.1), 3) == (3, 24)
    with pytest.raises(CheckFailed, match="rank 0 issued 1 of 3 all-reduces before .* 2 can be"):
        gradient_buckets.bucket_traffic(backward(2.1, 6.1, 6.2), backward(2.1, 4.1, 6.1), 3)


# Copies and groups

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
    ((1,), OWN[2] * 3, "rank 1 holds something that is not any rank's data")])
def test_a_broadcast_that_fails_on_one_rank_is_reported(place, value, complaint):
    with pytest.raises(CheckFailed, match=complaint):
        collectives.broadcast(OWN, changed(np.tile(OWN[2], (4, 1)), place, value), root=2)


@pytest.mark.parametrize("place, value, complaint", [
    ((2, 0), 0, "rank 2: row 0 is all zeros: is there"),
    ((3, 0), OWN[0] * OWN[0], "rank 3: row 0 holds something that no rank had")])
def test_an_all_gather_that_fails_in_one_row_is_reported(place, value, complaint):
    with pytest.raises(CheckFailed, match=complaint):
        collectives.all_gather_rows(OWN, list(changed(np.tile(OWN, (4, 1, 1)), place, value)))


@pytest.mark.parametrize("place, value, complaint", [
    ((1, 3), 0, "rank 1's row 3 is all zeros"),
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
    (0, 4, GRID[0, 0] + 2 * GRID[5, 0], r"a sum over ranks 0, 5 with the weights 1, 2"),
    (2, 5, GRID[3, 0], "rank 5's `batch` is made of something other")])
def test_one_wrong_rank_on_the_grid_is_reported(name, rank, value, complaint):
    assert collectives.on_grid(GRID, on_grid(), columns=3) == round(on_grid()[:, [0, 2]].sum())
    with pytest.raises(CheckFailed, match=complaint):
        collectives.on_grid(GRID, changed(on_grid(), (rank, name), value), columns=3)


def metrics(loss, seen):
    return [{"loss": torch.tensor(a), "seen": torch.tensor(b).long()} for a, b in zip(loss, seen)]


@pytest.mark.parametrize("loss, complaint", [
    (np.tile(OWN.sum(axis=0) * 2, (4, 1)), "'loss' contains the ranks' parts 2, 2, 2, 2 times"),
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
    ((1 / 12, 1 / 12, 0, 2 / 12), "weighs the samples of ranks 0, 1, 3 by 0.0833333, 0.0833333, 0.166667, but each")])
def test_wrong_means_are_reported(weights, complaint):
    own = changed(OWN, 2, 0)
    with pytest.raises(CheckFailed, match=complaint):
        collectives.sample_mean(own, np.tile(np.array(weights) @ own, (4, 1)), (5, 3, 0, 4))
    right = np.tile(own.sum(axis=0) / 12, (4, 1))
    assert collectives.sample_mean(own, right, (5, 3, 0, 4)) == own.sum(axis=0).sum() / 12


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


@pytest.mark.slow
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


# Two calls at the same time

class Counter:
    """Counts what it is given; each class below has its own idea of how to keep two calls apart."""

    def __init__(self):
        self.lock, self.own = threading.RLock(), threading.Lock()
        self.count, self.log = 0, []

    def add(self, number):
        self.count += number
        self.log.append(self.count)


class Locked(Counter):
    def add(self, number):
        with self.lock:
            super().add(number)


class LockedTwice(Counter):
    def add(self, number):
        with self.lock, self.lock:
            super().add(number)


class OwnLock(Counter):
    def add(self, number):
        with self.own:
            super().add(number)


class LockedInParts(Counter):
    def add(self, number):
        with self.lock:
            before = self.count
        with self.lock:
            self.count = before + number


class Crosswise(Counter):
    """Each call takes both locks, in an order of its own."""

    def add(self, number):
        first, second = (self.lock, self.own) if number == 1 else (self.own, self.lock)
        with first, second:
            self.count += number


def count(server, results):
    return [server.count]


def meet(server):
    as_if_in_turn(server, [methodcaller("add", 1), methodcaller("add", 2)], count)


@pytest.mark.slow
@pytest.mark.parametrize("server", [Locked, LockedTwice, OwnLock])
def test_calls_that_do_not_interfere_pass(server):
    meet(server)


def test_the_lines_where_both_stand_are_named():
    with pytest.raises(CheckFailed) as caught:
        meet(LockedInParts)
    at, comes = str(caught.value).split(", the other ")
    assert "when one is at test_checks.py line" in at
    assert comes.startswith(("comes to test_checks.py line", "is served"))


def test_calls_that_wait_for_each_other_are_reported(monkeypatch):
    monkeypatch.setattr("book.checks.interleaved.LIMIT_S", 0.3)
    with pytest.raises(CheckFailed, match="two calls at the same time wait for each other"):
        meet(Crosswise)


def test_a_server_left_broken_for_the_next_call_is_reported():
    def spoilt(server, results):
        if server.count < 3:
            raise KeyError(3)
        return [server.count]

    with pytest.raises(CheckFailed, match="the next push raises KeyError: 3"):
        as_if_in_turn(Counter, [methodcaller("add", 1), methodcaller("add", 2)], spoilt)
