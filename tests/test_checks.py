"""Checks on inputs that answers in the lab don't reach: dtypes, lengths, values that are not numbers."""
import numpy as np
import pytest
import torch
import torch.distributed as dist

from book.checks import rings, verdict
from book.checks.attribution import Attribution
from book.checks.formula import Formula
from book.checks.verdict import CheckFailed
from book.launch import RankError, launch
from book.trace import parting

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
    (3, 0, lambda w: w[1] + w[3], "rank 3 chunk 0 lacks the contribution of ranks 0, 2"),
    (0, 2, lambda w: w[3], "rank 0 chunk 2 holds only rank 3's data"),
    (0, 2, lambda w: w[0], "rank 0 chunk 2 holds only what it held at the start"),
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


@pytest.mark.parametrize("got, complaint", [
    (None, "must be a number, not NoneType"), ("5", "must be a number, not str"), (True, "must be a number, not bool"),
    (float("nan"), "x is nan, which is wrong"), (10, "x is 10: twice"), (20, "4 times what it should be")])
def test_a_wrong_number_is_refused(got, complaint):
    with pytest.raises(CheckFailed, match=complaint):
        Formula(5, [(10, "twice")]).require_right("x", got)


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


def test_where_two_runs_part_is_found():
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


def test_only_errors_that_something_explains_become_failed_checks():
    def failure(error, word):
        return verdict.with_hint(error, {word: f"do not {word}"})

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
