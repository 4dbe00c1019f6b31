"""Checks on a split model, with inputs that no answer gives: each mistake is named, and only the right passes."""
import numpy as np
import pytest
import torch

from book.checks import recordings, tensor_model, tensor_parallel
from book.checks.verdict import CheckFailed
from book.parallel import GPTConfig
from book.parallel.model import Block
from book.trace import Event, Trace

RNG = np.random.default_rng(0)
X, WEIGHT, BIAS = RNG.normal(size=(7, 8)), RNG.normal(size=(12, 8)), RNG.normal(size=12)
WHOLE = X @ WEIGHT.T + BIAS


def blocks(whole, num_ranks, axis):
    return [np.array(block) for block in np.split(whole, num_ranks, axis=axis)]


def parts(num_ranks):
    """Each rank's term of the product, without the bias."""
    return [x @ w.T for x, w in zip(blocks(X, num_ranks, 1), blocks(WEIGHT, num_ranks, 1))]


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
@pytest.mark.parametrize("convert", [np.array, torch.tensor, lambda a: torch.tensor(a, requires_grad=True)])
def test_right_products_pass_in_any_form(num_ranks, convert):
    total = pytest.approx(np.abs(WHOLE).sum())
    columns = [convert(block) for block in blocks(WHOLE, num_ranks, 1)]
    assert tensor_parallel.column_outputs(columns, X, WEIGHT, BIAS) == total
    assert tensor_parallel.row_outputs([convert(sum(parts(num_ranks)) + BIAS)] * num_ranks, X, WEIGHT, BIAS) == total


@pytest.mark.parametrize("seed", range(20))
def test_an_error_of_one_millionth_on_one_rank_is_noticed(seed):
    rng = np.random.default_rng(seed)
    rank = rng.integers(2)
    rows = [WHOLE.copy(), WHOLE.copy()]
    for check, right in ((tensor_parallel.column_outputs, blocks(WHOLE, 2, 1)), (tensor_parallel.row_outputs, rows)):
        right[rank].flat[rng.integers(right[rank].size)] += 1e-6
        with pytest.raises(CheckFailed):
            check(right, X, WEIGHT, BIAS)


@pytest.mark.parametrize("change, complaint", [
    (lambda own: own[:, ::-1], "rank 0: these are columns 5, 4, 3, 2, 1, 0, but the rank's are 0 to 5"),
    (lambda own: 2 * own, "this is not a block of columns"),
    (lambda own: own[:, :5], r"in the shape \(7, 5\), but it should be \(7, 6\)"),
    (lambda own: own.tolist(), "a list, not a tensor, as"),
    (lambda own: own * np.nan, "rank 0 holds nan"),
])
def test_wrong_columns_are_reported(change, complaint):
    own = blocks(WHOLE, 2, 1)
    own[0] = change(own[0])
    with pytest.raises(CheckFailed, match=complaint):
        tensor_parallel.column_outputs(own, X, WEIGHT, BIAS)


@pytest.mark.parametrize("weights, bias, complaint", [
    ([1, 1, 0, 1], 1, "the part of rank 2 is missing"),
    ([1, 1, 2, 1], 1, "the ranks' parts are in it 1, 1, 2, 1 times"),
    ([1, 1, 1, 1], 0.25, "but the bias is in it 0.25 times"),
    ([4, 4, 4, 4], 1, "this is 4 times the sum"),
])
def test_wrong_sums_of_parts_are_reported(weights, bias, complaint):
    got = sum(weight * part for weight, part in zip(weights, parts(4))) + bias * BIAS
    with pytest.raises(CheckFailed, match=complaint):
        tensor_parallel.row_outputs([got] * 4, X, WEIGHT, BIAS)


def test_parts_that_are_picked_from_are_named_in_rows_and_modules():
    got = np.max(parts(4), axis=0) + BIAS
    with pytest.raises(CheckFailed, match="by the operation MAX, but parts of a sum must be added up"):
        tensor_parallel.row_outputs([got] * 4, X, WEIGHT, BIAS)
    runs, *others = split(4)
    runs[0]["output"] = got
    with pytest.raises(CheckFailed, match="by the operation MAX, but parts of a sum must be added up"):
        tensor_parallel.split_module(runs, *others)


def test_a_slip_in_the_sixth_digit_is_named_before_rounding():
    runs, *others = split()
    runs[0]["output"] = WHOLE * (1 + 1e-6)
    with pytest.raises(CheckFailed, match="right to only six digits"):
        tensor_parallel.split_module(runs, *others)
    with pytest.raises(CheckFailed, match="rank 0's output is wrong: the slip"):
        tensor_parallel.split_module(runs, *others, {"the slip": WHOLE * (1 + 1e-6)})


def test_rows_that_are_not_a_sum_of_parts_are_reported():
    with pytest.raises(CheckFailed, match="not a sum of products of x's blocks with the weight's"):
        tensor_parallel.row_outputs([np.tanh(WHOLE)] * 2, X, WEIGHT, BIAS)


def test_work_that_is_not_shared_out_is_reported():
    tensor_parallel.computed([50, 50], 100)
    with pytest.raises(CheckFailed, match="column_linear: rank 1 computes 0.75 of the product, but its share is 1/2"):
        tensor_parallel.computed([50, 75], 100)


@pytest.mark.parametrize("error, said", [
    (RuntimeError("mat1 and mat2 shapes cannot be multiplied (5x6 and 3x8)"), "is a row of the weight .dim 0"),
    (IndexError("index 7 is out of bounds for dimension 1 with size 6"), "block of V/R tokens begins at r V/R"),
])
def test_an_error_of_torch_is_explained_in_the_place_where_it_happened(error, said):
    def stumble():
        raise error

    match = f"^{type(error).__name__}: .*{said}"
    with pytest.raises(CheckFailed, match=match) as caught, tensor_parallel.shapes_in_words():
        stumble()
    assert caught.traceback[-1].name == "stumble"


@pytest.mark.parametrize("error", [RuntimeError("Connection reset"), ValueError("must match the size")])
def test_an_error_that_is_not_about_shapes_stays_as_it_is(error):
    with pytest.raises(type(error)) as caught, tensor_parallel.shapes_in_words():
        raise error
    assert caught.value is error


def test_torch_still_raises_the_errors_that_are_explained():
    table = torch.zeros(2, 6)
    linear = torch.nn.functional.linear
    for act in (lambda: torch.ones(2, 3) @ torch.ones(2, 3), lambda: torch.ones(2, 3) + torch.ones(4),
                lambda: linear(torch.ones(7, 12), torch.ones(4, 12), torch.ones(8)), lambda: None + table,
                lambda: linear(None, table), lambda: table.view(4, 6), lambda: table.unflatten(1, (4, 6)),
                lambda: table.gather(1, torch.full((2, 1), 7)), lambda: table[:, 7], lambda: table.narrow(1, 4, 3),
                lambda: table.narrow(2, 0, 1), lambda: (2).shape):
        with pytest.raises(CheckFailed, match=(
                ": (the input has 3 numbers in a row, but what it is multiplied with takes 2|3 numbers meet 4|the bias "
                "has 8 numbers, but your outputs have 4|a rank holds a part|an index is|something here is None|the "
                "block ends past|there is no such dim|this is a number)")):
            with tensor_parallel.shapes_in_words():
                act()


def both_ways(forward, backward, num_ranks=3):
    """Runs of an operator that mixes ranks' tensors by `forward` (R, R) and their gradients by `backward`."""
    x, upstream = RNG.normal(size=(2, num_ranks, 3, 4))
    return [{"x": x[r], "x_after": x[r], "upstream": upstream[r], "upstream_after": upstream[r],
             "output": np.tensordot(forward[r], x, axes=1), "gradient": np.tensordot(backward[r], upstream, axes=1)}
            for r in range(num_ranks)]


EYE, ONES = np.eye(3), np.ones((3, 3))


@pytest.mark.parametrize("forward, backward, complaint", [
    (EYE, 3 * ONES, "backward, rank 0: this is 3 times the sum"),
    (EYE, ONES * [1, 0, 1], "backward, rank 0: the part of rank 1 is missing"),
    (2 * EYE, ONES, "forward, rank 0: the ranks' tensors are in it 2, 0, 0 times: pass on the rank's own"),
    (EYE[::-1], ONES, "forward, rank 0: the ranks' tensors are in it 0, 0, 1 times"),
    (ONES / 3, ONES, "forward, rank 0: the ranks' tensors are in it 0.333333, 0.333333, 0.333333 times"),
])
def test_wrong_operators_are_reported(forward, backward, complaint):
    assert tensor_parallel.operator("f", both_ways(EYE, ONES), "identity", "sum") > 0
    with pytest.raises(CheckFailed, match=f"f, {complaint}"):
        tensor_parallel.operator("f", both_ways(forward, backward), "identity", "sum")


def test_an_operator_that_makes_something_else_is_reported():
    runs = both_ways(EYE, ONES)
    runs[2]["output"] = np.ones((3, 4))
    with pytest.raises(CheckFailed, match="f, forward, rank 2: this can't be made from the ranks' tensors"):
        tensor_parallel.operator("f", runs, "identity", "sum")


def test_an_operator_that_changes_the_dtype_is_reported():
    x = torch.ones(3)
    runs, wide = {"f": [{"x": x, "output": x, "gradient": x}]}, {"f": [{"x": x, "output": x, "gradient": x.double()}]}

    def sent(num_bytes):
        return Trace([Event(0, "collective", op="all_reduce", num_bytes=num_bytes)], 1, "logical", "recorded")

    tensor_parallel.keeps_dtype(runs, sent(12), 12)
    with pytest.raises(CheckFailed, match="f, backward, rank 0: float32 went in, but float64 came out"):
        tensor_parallel.keeps_dtype(wide, sent(12), 12)
    with pytest.raises(CheckFailed, match="rank 0 gives all_reduce 24 bytes for a tensor of 12"):
        tensor_parallel.keeps_dtype(runs, sent(24), 12)


def test_tensors_of_the_caller_must_stay_as_they_were():
    targets = torch.arange(3)
    with tensor_parallel.left_alone("f", targets=targets):
        targets + 1
    with pytest.raises(CheckFailed, match="f has changed the targets that it was given"), (
            tensor_parallel.left_alone("f", targets=targets)):
        targets += 1


LAYOUT = {"weight": 1, "bias": None}


def split(num_ranks=2):
    """A row-split linear map as it should be: what `split_module` takes."""
    upstream, terms = RNG.normal(size=WHOLE.shape), parts(num_ranks)
    backs = [np.zeros_like(X) for _ in range(num_ranks)]
    for back, columns in zip(backs, np.split(np.arange(8), num_ranks)):
        back[:, columns] = upstream @ WEIGHT[:, columns]
    whole = {"output": WHOLE, "input_gradient": sum(backs),
             "gradients": {"weight": upstream.T @ X, "bias": upstream.sum(axis=0)}}
    runs = [{"shards": {"weight": w, "bias": BIAS}, "storage": {"weight": w.nbytes, "bias": BIAS.nbytes},
             "output": WHOLE, "input_gradient": whole["input_gradient"],
             "gradients": {"weight": g, "bias": whole["gradients"]["bias"]}}
            for w, g in zip(blocks(WEIGHT, num_ranks, 1), blocks(whole["gradients"]["weight"], num_ranks, 1))]
    before = [{"weight": WEIGHT + r * RNG.normal(size=WEIGHT.shape), "bias": BIAS + r} for r in range(num_ranks)]
    return runs, before, whole, [{"output": t, "input_gradient": b} for t, b in zip(terms, backs)], LAYOUT


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_a_right_split_passes(num_ranks):
    assert tensor_parallel.split_module(*split(num_ranks)) > 0


@pytest.mark.parametrize("where, change, complaint", [
    (("shards", "weight"), lambda w: -w, "rank 1's weight is -1 times what it should be"),
    (("shards", "weight"), lambda w: w[::-1], "rank 1's weight has the right shape, but it is not block 1 of rank 0's"),
    (("shards", "weight"), lambda w: w[:, :3], r"rank 1's weight has the shape \(12, 3\), but its block has \(12, 4\)"),
    (("output",), lambda y: y - parts(2)[0], "rank 1's output is wrong: this is only the rank's own part"),
    (("output",), np.tanh, "it is not a sum of what the ranks' parts give"),
    (("gradients", "weight"), lambda g: g / 2, "rank 1's gradient of weight is not: 0.5 times"),
    (("gradients", "weight"), lambda g: g[::-1].copy(), "rank 1's gradient of weight is not: something on the"),
    (("gradients", "bias"), lambda g: 2 * g, "rank 1's gradient of bias is not: 2 times too large"),
    (("input_gradient",), lambda g: 2 * g, "rank 1's gradient of x is not: this is 2 times the sum"),
    (("input_gradient",), lambda g: None, "rank 1: x gets no gradient"),
    (("input_gradient",), np.tanh, "it is not a sum of what comes back"),
])
def test_wrong_splits_are_reported(where, change, complaint):
    runs, *others = split()
    place = runs[1]
    for key in where[:-1]:
        place = place[key]
    place[where[-1]] = change(place[where[-1]])
    with pytest.raises(CheckFailed, match=complaint):
        tensor_parallel.split_module(runs, *others)


def traffic(*phases):
    """A trace of two ranks whose phases are lists of (operation, bytes)."""
    events, now = [], 0.0
    for number, phase in enumerate(phases):
        for op, num_bytes in [*phase, *([("barrier", 0)] if number < len(phases) - 1 else [])]:
            now += 1
            events += [Event(r, "collective", op=op, num_bytes=num_bytes, start_s=now, end_s=now) for r in (0, 1)]
    return Trace(events, 2, "measured", "recorded")


SUM = ("all_reduce", 80)


@pytest.mark.parametrize("phases, complaint", [
    ([[], [("all_gather", 80)]], "calls all_gather, but one all-reduce of what the ranks' parts give is enough"),
    ([[], []], "backward, rank 0: 0 all-reduces instead of 1"),
    ([[], [("all_reduce", 40)]], "an all-reduce of 40 bytes, but 80 are enough"),
    ([[("broadcast", 8)], [SUM]], "forward, rank 0: your code calls broadcast, but nothing needs to be sent"),
    ([[SUM], [SUM]], "forward, rank 0: your code calls all_reduce, but nothing needs to be sent"),
    ([[], [SUM], []], "rank 0 came to 2 barriers, but the check has 1"),
])
def test_wrong_traffic_is_reported(phases, complaint):
    wanted = {"forward": 0, "backward": 1}
    assert recordings.split_traffic(traffic([], [SUM]), wanted, 80) == 80
    assert recordings.split_traffic(traffic([SUM, SUM], [SUM]), {"forward": None, "backward": 1}, 80) == 80
    with pytest.raises(CheckFailed, match=complaint):
        recordings.split_traffic(traffic(*phases), wanted, 80)


@pytest.mark.parametrize("parameters, num_bytes, complaint", [
    (4578 // 3, 7680, "not everything is cut: norms, and the biases"),
    ((4578 - 96) // 3 + 96, 7680, "the biases of the maps that are cut by rows are whole"),
    ((4578 - 48) // 3 + 48, 7680, "the norms are whole on every rank"),
    (4320 // 3 + 114 + 144, 7680, "the biases of the maps that are cut by columns are cut with them"),
    (4320 // 3, 7680, "that is the weights alone"),
    ((4578 - 120) / 3 + 120, 7680, "you cut one bias too many: out and down"),
    ((4320 + 72) / 3 + 42 + 144, 7680, "the bias of up is cut as its outputs are"),
    ((4320 + 42) / 3 + 72 + 144, 7680, "the biases of q, k and v are cut"),
    (1622 - 48, 7680, "2 D are missing: a block has two norms"),
    (1600, 7680, "the number of parameters is 1600, which is 0.986 times"),
    ("1622", 7680, "the number of parameters must be a number"),
    (1622, 1920, "that is a single all-reduce"),
    (1622, 2560, "every rank gives the whole activation"),
    (1622, 10240, "that is what a ring sends"),
])
def test_wrong_counts_are_reported(parameters, num_bytes, complaint):
    assert tensor_model.block_count((1622, 7680), 24, 42, 3, 10, 8) == (1622, 7680)
    with pytest.raises(CheckFailed, match=complaint):
        tensor_model.block_count((parameters, num_bytes), 24, 42, 3, 10, 8)


def test_the_count_is_that_of_a_block():
    block = Block(GPTConfig(vocab_size=1, width=24, mlp_width=42))
    num_parameters = sum(p.numel() for p in block.parameters())
    assert tensor_model.block_count((num_parameters, 7680), 24, 42, 1, 10, 8) == (num_parameters, 7680)


LOGITS, TARGETS = 3 * RNG.normal(size=(9, 12)), np.array([0, 11, 5, 6, 3, 8, 1, 10, 4])
TOTAL = np.log(np.exp(LOGITS).sum(axis=1))
CHOSEN = np.eye(12)[TARGETS] / 9
SOFTMAX = np.exp(LOGITS - TOTAL[:, None]) / 9
LOSS = torch.tensor((TOTAL - LOGITS[np.arange(9), TARGETS]).mean())


def test_the_loss_and_its_gradients_equal_torchs():
    logits = torch.tensor(LOGITS, requires_grad=True)
    loss = torch.nn.functional.cross_entropy(logits, torch.tensor(TARGETS))
    loss.backward()
    shares = logits.grad.chunk(3, dim=1)
    assert tensor_model.vocabulary_loss([loss] * 3, shares, logits, TARGETS) == pytest.approx(LOSS.item())


def test_wrong_losses_are_reported():
    top, target, own = LOGITS.max(axis=1), LOGITS[np.arange(9), TARGETS], np.log(np.exp(LOGITS[:, :6]).sum(axis=1))
    gradients = blocks(SOFTMAX - CHOSEN, 2, 1)
    other = np.log(np.exp(LOGITS[:, 6:]).sum(axis=1))
    for values, complaint in ((own + other - target, "the ranks' own losses are added up"),
                              (TOTAL - np.log(2) - target, "averaged over the ranks, but it must be added up"),
                              (TOTAL + top - target, "but not in the sum of exponentials"),
                              (TOTAL - target + 0.1, "Which of these sums is over the ranks"),
                              (np.full(9, np.nan), "rank 0's loss is nan: exp of logits as small as these is finite"),
                              (TOTAL - LOGITS[np.arange(9), np.clip(TARGETS, 0, 5)]
                               - LOGITS[np.arange(9), 6 + TARGETS % 6], "add the logit of another token"),
                              ((TOTAL - target) * 9 / 8, "divided by 8, but there are 9 of them"),
                              (TOTAL - target * (TARGETS < 6), "only one rank holds a target's logit"),
                              (TOTAL - 2 * target * (TARGETS < 6), "Which of these sums is over the ranks"),
                              (np.full(9, np.inf), "A rank that doesn't hold a target must add 0, not -inf")):
        with pytest.raises(CheckFailed, match=complaint):
            tensor_model.vocabulary_loss([torch.tensor(values.mean())] * 2, gradients, LOGITS, TARGETS)


@pytest.mark.parametrize("softmax, chosen, complaint", [
    (2, 1, "the part of the softmax is 2 times too large and the part of the target is right"),
    (0.5, 0.5, "the part of the softmax is divided by 2 and the part of the target is divided by 2"),
    (1, 3, "the part of the softmax is right and the part of the target is 3 times"),
])
def test_wrong_gradients_are_reported(softmax, chosen, complaint):
    with pytest.raises(CheckFailed, match=complaint):
        tensor_model.vocabulary_loss([LOSS] * 2, blocks(softmax * SOFTMAX - chosen * CHOSEN, 2, 1), LOGITS, TARGETS)


def test_gradients_of_a_local_softmax_or_unknown_ones_are_reported():
    own = [np.exp(z - np.log(np.exp(z).sum(axis=1, keepdims=True))) / 9 - c
           for z, c in zip(blocks(LOGITS, 2, 1), blocks(CHOSEN, 2, 1))]
    for gradients, complaint in ((own, "the softmax over the rank's own part"), (2 * [np.ones((9, 6))], "it should be"),
                                 (blocks((SOFTMAX - CHOSEN) * 9, 2, 1), "9 times")):
        with pytest.raises(CheckFailed, match=complaint):
            tensor_model.vocabulary_loss([LOSS] * 2, gradients, LOGITS, TARGETS)


def masks(alike, apart):
    return {"alike": alike, "apart": apart, "gradients": alike}


def drawn(seed, rank=0, dropout=0.25, calls=4):
    rng = np.random.default_rng([seed, rank])
    return [(rng.random((16, 32)) >= dropout) / (1 - dropout) for _ in range(calls)]


OTHER = [masks(drawn(9), drawn(10, rank)) for rank in range(2)]


def test_right_masks_pass_and_return_the_scale_of_kept_values():
    runs = [masks(drawn(1), drawn(2, rank)) for rank in range(2)]
    assert tensor_model.dropout_masks(runs, OTHER, OTHER, (16, 32), [0.25] * 4) == 1 / 0.75


@pytest.mark.parametrize("alike, apart, complaint", [
    ([0 * m for m in drawn(1)], drawn(2), "alike, call 0, rank 0: everything is dropped"),
    (drawn(1), drawn(2, dropout=0.5), "apart, call 0, rank 0: 5.% are dropped, but 25% should be"),
    (drawn(1), [m * 2 for m in drawn(2)], "a kept 1 becomes 2.667, but should become 1.333"),
    (drawn(1), drawn(2)[:1] * 4, "calls 0 and 1 of apart drop the same elements"),
    (drawn(1), [m.T for m in drawn(2)], r"what apart gives in the shape \(32, 16\), but it should be \(16, 32\)"),
    (drawn(1), drawn(10), "rank 0: two seeds give the same masks in apart"),
    (drawn(1), [None] * 4, r"gives nothing \(None\) as what apart gives"),
])
def test_wrong_masks_are_reported(alike, apart, complaint):
    with pytest.raises(CheckFailed, match=complaint):
        tensor_model.dropout_masks([masks(alike, apart), masks(alike, drawn(2, 1))], OTHER, OTHER, (16, 32), [0.25] * 4)


def test_the_first_p_and_seeds_that_are_products_are_named():
    runs = [masks(drawn(1), drawn(2, rank)) for rank in range(2)]
    with pytest.raises(CheckFailed, match="alike, call 2, rank 0: this is dropout with the p of the first call, 0.25"):
        tensor_model.dropout_masks(runs, OTHER, OTHER, (16, 32), [0.25, 0.25, 0.1, 0.25])
    with pytest.raises(CheckFailed, match="with the seed 0, though .*: call 0 of apart: ranks 0 and 1 draw the same"):
        tensor_model.dropout_masks(runs, OTHER, [masks(drawn(9), drawn(10))] * 2, (16, 32), [0.25] * 4)
