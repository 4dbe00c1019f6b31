"""Data parallelism, with buckets of one's own too, and the model that all of it trains."""
from __future__ import annotations

import copy
import math
import pickle
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from hypothesis import given, settings, strategies as st
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from book.collectives import parameter_server_all_reduce, ring_all_reduce
from book.cost import ring_sent_bytes, root_sent_bytes
from book.device import message_device
from book.execute import execute
from book.launch import LaunchError, launch, rank_device
from book.parallel import GPT, Characters, GPTConfig, Windows, load_text
from book.parallel.compressed import TopK
from book.parallel.data import BucketedDDP, broadcast_state
from book.parallel.line import SlowLine
from book.parallel.rarely import Rarely, Streaming, _cut
from book.record import follow_backward
from book.record.buckets import OwnBuckets
from tests.by_value import sent_by_value


sent_by_value(__name__)


def make_model():
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.BatchNorm1d(8), nn.Linear(8, 5), nn.Tanh(), nn.Linear(5, 2))


def batch(num_examples, seed=3):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_examples, 6, generator=generator), torch.randn(num_examples, 2, generator=generator)


def train(bucket_bytes, steps):
    """How far this rank's weights are from those of one process after some steps of SGD, in float64."""
    device = rank_device()
    dist.init_process_group()
    rank, world_size = dist.get_rank(), dist.get_world_size()
    module = make_model().double().to(device)
    module[2].eval()  # its statistics depend on the share of the batch; its weights are trained
    module[0].bias.requires_grad_(False)
    parallel = BucketedDDP(module, bucket_bytes)
    alone = copy.deepcopy(module)
    x, y = (t.double().to(device) for t in batch(4 * world_size))
    share = slice(rank, None, world_size)
    for model, mine in ((parallel, share), (alone, slice(None))):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(steps):
            optimizer.zero_grad()
            F.mse_loss(model(x[mine]), y[mine]).backward()
            if model is parallel:
                model.finish()
            optimizer.step()
    return max((a - b).abs().max().item() for a, b in zip(module.parameters(), alone.parameters()))


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [
    pytest.param(1, marks=pytest.mark.slow), 2, 3, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("bucket_bytes", [
    pytest.param(1, marks=pytest.mark.slow), 200, pytest.param(10**9, marks=pytest.mark.slow)])
def test_training_equals_one_process(world_size, bucket_bytes):
    assert max(launch(train, world_size, bucket_bytes, 4)) < 1e-12


def refused(how):
    """The error that `BucketedDDP` raises for a backward that it can't average."""
    device = rank_device()
    dist.init_process_group()
    parallel = BucketedDDP(nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)]).to(device), bucket_bytes=0)
    first, second = parallel.module
    x = torch.ones(1, 2, device=device)
    try:
        if how == "unused":
            first(x).sum().backward()
        else:
            for _ in range(2):
                second(first(x)).sum().backward()
        parallel.finish()
    except RuntimeError as error:
        return str(error)
    return "nothing"


@pytest.mark.slow
@pytest.mark.parametrize("how, words", [("unused", "got no gradient"), ("twice", "finish() after each backward")])
def test_a_backward_that_cannot_be_averaged_raises_an_error(how, words):
    for said in launch(refused, 2, how):
        assert words in said


def state_after_broadcast():
    device = rank_device()
    dist.init_process_group()
    module = make_model().to(device)
    module[2].running_mean += dist.get_rank()
    module[2].num_batches_tracked += dist.get_rank()
    before = copy.deepcopy(module.state_dict())
    broadcast_state(module)
    return {k: v.cpu() for k, v in before.items()}, {k: v.cpu() for k, v in module.state_dict().items()}


@pytest.mark.slow
def test_every_rank_gets_the_parameters_and_buffers_of_rank_0():
    run = launch(state_after_broadcast, 3)
    wanted = run[0][0]
    assert any(not torch.equal(run[1][0][name], wanted[name]) for name in wanted)
    for _, after in run:
        assert all(torch.equal(after[name], wanted[name]) for name in wanted)


def followed(wrap):
    device = rank_device()
    dist.init_process_group()
    parallel = wrap(make_model().double().to(device))
    x, y = (t.double().to(device) for t in batch(8))
    for _ in range(3):
        parallel.zero_grad()
        loss = F.mse_loss(parallel(x), y)
        with follow_backward(parallel):
            loss.backward()
            if isinstance(parallel, BucketedDDP):
                parallel.finish()


def last_sent(trace):
    """The all-reduces of rank 0's last backward: bucket and bytes, in order."""
    sent = [(e.bucket, e.num_bytes) for e in trace.of_rank(0) if e.op == "all_reduce" and e.bucket is not None]
    return sent[max(i for i, (bucket, _) in enumerate(sent) if bucket == 0):]


@pytest.mark.slow
@pytest.mark.parametrize("bucket_bytes", [1, 300])
def test_sends_the_same_bytes_as_torchs_ddp_in_the_same_order(bucket_bytes):
    ours = launch(followed, 2, partial(BucketedDDP, bucket_bytes=bucket_bytes), record=True).trace
    wrap = partial(DistributedDataParallel, bucket_cap_mb=bucket_bytes / 2**20)
    torchs = launch(followed, 2, wrap, record=True).trace
    assert sum(size for _, size in last_sent(ours)) == sum(size for _, size in last_sent(torchs))
    assert [bucket for bucket, _ in last_sent(ours)] == list(range(len(last_sent(ours))))


def ddp_on(schedule):
    device = rank_device()
    dist.init_process_group()
    world_size = dist.get_world_size()

    def reduce_bucket(state, bucket):
        flat = bucket.buffer()
        execute(schedule(world_size), flat)
        done = torch.futures.Future()
        done.set_result(flat / world_size)
        return done

    torch.manual_seed(0)
    module = nn.Linear(59, 4).double().to(device)  # 240 weights: every number of ranks up to 6 divides them
    parallel = DistributedDataParallel(module)
    parallel.register_comm_hook(None, reduce_bucket)
    x = torch.full((1, 59), float(dist.get_rank()), dtype=torch.float64, device=device)
    parallel(x).sum().backward()
    return module.weight.grad[0, 0].item()


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [
    pytest.param(2, marks=pytest.mark.slow), 3, *(pytest.param(n, marks=pytest.mark.slow) for n in (4, 5))])
def test_ddp_traffic_matches_the_formulas(world_size):
    num_bytes = 240 * 8
    ring = launch(ddp_on, world_size, ring_all_reduce, record=True)
    star = launch(ddp_on, world_size, parameter_server_all_reduce, record=True)
    assert list(ring) == list(star) == pytest.approx([(world_size - 1) / 2] * world_size)
    assert ring.trace.message_bytes() == pytest.approx([ring_sent_bytes(world_size, num_bytes)] * world_size)
    root, *others = star.trace.message_bytes()
    assert root == root_sent_bytes(world_size, num_bytes) and set(others) == {num_bytes}


@pytest.fixture
def model():
    """Three layers of equal size, each with its own bucket; the first two have the same gradient."""
    made = nn.ModuleList(nn.Linear(2, 2, bias=False) for _ in range(3))
    made.buckets = [[layer.weight] for layer in made]
    for layer, value in zip(made, (0.0, 0.0, 1.0)):
        layer.weight.grad = torch.full((2, 2), value)
    return made


def carried(model, copy, *order):
    """The bucket of a copy when the gradients of these layers have become ready in this order."""
    ready = {model[layer].weight: place for place, layer in enumerate(order)}
    return OwnBuckets(model, model.parameters()).carried([torch.tensor(copy)], ready)[0]


def test_of_indistinguishable_buckets_the_first_complete_one_is_taken(model):
    assert carried(model, [0.0] * 4, 1, 0) == 1
    assert carried(model, [0.0] * 4, 0, 1) == 0
    assert carried(model, [0.0] * 4, 2, 1, 0) == 2


def test_contents_take_precedence_over_order(model):
    assert carried(model, [0.5] * 4, 1, 0, 2) == 2


def test_a_bucket_that_is_not_complete_or_of_another_size_is_not_taken(model):
    assert carried(model, [1.0] * 4, 0) == 0
    assert carried(model, [1.0] * 8, 0, 1, 2) is None


DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
SMALL = GPTConfig(vocab_size=11, context=8, num_layers=3, num_heads=2, width=8, dtype=torch.float64)
TEXT = load_text()


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Use one thread: more slow down kernels this small, and much so when other processes occupy the cores."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def tokens(config: GPTConfig, num_sequences: int = 4, num_tokens: int | None = None, seed: int = 0) -> torch.Tensor:
    """Random token numbers (B, T); T is the context unless it is given."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(config.vocab_size, (num_sequences, num_tokens or config.context), generator=generator)


def weights(model: torch.nn.Module) -> torch.Tensor:
    """All of a model's weights in one row."""
    return torch.nn.utils.parameters_to_vector(model.parameters()).detach()


@st.composite
def configs(draw: st.DrawFn) -> GPTConfig:
    """Small models of any shape."""
    size = st.integers(1, 4)
    heads = draw(size)
    return GPTConfig(vocab_size=draw(st.integers(1, 9)), context=draw(st.integers(1, 6)), num_layers=draw(size),
                     num_heads=heads, width=heads * draw(size), mlp_width=draw(st.none() | st.integers(1, 9)),
                     dtype=draw(st.sampled_from([torch.float32, torch.float64])))


@settings(max_examples=40, deadline=None)
@given(configs(), st.integers(1, 3), st.data())
def test_shapes_dtype_and_number_of_parameters(config: GPTConfig, num_sequences: int, data: st.DataObject) -> None:
    model = GPT(config)
    num_tokens = data.draw(st.integers(1, config.context))
    logits = model(tokens(config, num_sequences, num_tokens))
    assert logits.shape == (num_sequences, num_tokens, config.vocab_size) and logits.dtype == config.dtype
    assert sum(p.numel() for p in model.parameters()) == config.num_parameters
    assert {p.dtype for p in model.parameters()} == {config.dtype}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_logits_depend_on_what_came_before_and_on_nothing_later(dtype: torch.dtype, device: str) -> None:
    model = GPT.seeded(replace(SMALL, dtype=dtype), seed=3).to(device)
    before = tokens(SMALL).to(device)
    after = before.clone()
    after[:, 5] = (after[:, 5] + 1) % SMALL.vocab_size
    changed = (model(before) - model(after)).abs().amax(dim=(0, 2))
    assert changed[:5].eq(0).all() and changed[5:].gt(1e-6).all()


def test_equal_tokens_at_different_positions_are_distinguished() -> None:
    logits = GPT.seeded(SMALL, seed=0)(torch.zeros(1, SMALL.context, dtype=torch.int64))
    assert (logits[0, 1:] - logits[0, :-1]).abs().amax(dim=1).gt(1e-6).all()


def test_a_seed_fixes_the_weights_and_leaves_the_generators_alone() -> None:
    torch.manual_seed(1)
    first = weights(GPT.seeded(SMALL, seed=7))
    torch.manual_seed(2)
    state = torch.get_rng_state()
    assert torch.equal(weights(GPT.seeded(SMALL, seed=7)), first)
    assert torch.equal(torch.get_rng_state(), state)
    assert not torch.allclose(weights(GPT.seeded(SMALL, seed=8)), first)


def test_a_seed_means_the_same_weights_in_every_dtype_and_under_every_default() -> None:
    double, single = GPT.seeded(SMALL, seed=7), GPT.seeded(replace(SMALL, dtype=torch.float32), seed=7)
    assert torch.equal(weights(double), weights(single).double())
    try:
        torch.set_default_dtype(torch.float64)
        with torch.device("meta"):
            elsewhere = GPT.seeded(SMALL, seed=7)
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(weights(elsewhere), weights(double))


@pytest.mark.slow
def test_without_a_seed_ranks_draw_different_weights() -> None:
    def first_weight() -> float:
        return GPT(GPTConfig(vocab_size=5)).head.weight[0, 0].item()

    drawn = list(launch(first_weight, 3))
    assert len(set(drawn)) == 3


def test_weights_are_drawn_as_in_gpt_2() -> None:
    config = GPTConfig(vocab_size=64, context=64, num_layers=8, num_heads=4, width=64)
    model = GPT.seeded(config, seed=0)
    block = model.blocks[5]
    for usual in (block.attention.q, block.attention.k, block.attention.v, block.mlp.up, model.head,
                  model.token_embedding, model.position_embedding):
        assert usual.weight.std().item() == pytest.approx(0.05, rel=0.1)
    for adds_to_input in (block.attention.out, block.mlp.down):
        assert adds_to_input.weight.std().item() == pytest.approx(0.05 / math.sqrt(16), rel=0.1)
    assert not any(p.any() for name, p in model.named_parameters() if name.endswith("bias"))


def test_dropout_is_for_training_only() -> None:
    plain, dropping = GPT.seeded(SMALL, seed=0), GPT.seeded(replace(SMALL, dropout=0.5), seed=0)
    x = tokens(SMALL)
    assert torch.equal(dropping.eval()(x), plain(x))
    assert not torch.allclose(dropping.train()(x), plain(x))


def test_loss_is_the_mean_over_all_predictions() -> None:
    logits, targets = torch.randn(3, 5, 7, dtype=torch.float64), torch.randint(7, (3, 5))
    by_hand = -logits.log_softmax(-1).gather(-1, targets[..., None]).mean()
    assert GPT.loss(logits, targets).item() == pytest.approx(by_hand.item(), abs=1e-14)


@pytest.mark.parametrize("cut", [0, 1, 2, 3])
def test_a_step_in_two_pieces_equals_a_whole_step(cut: int) -> None:
    """As on two pipeline stages: activations cross a boundary invisible to autograd, and their gradient comes back."""
    whole, pieces = GPT.seeded(SMALL, seed=1), GPT.seeded(SMALL, seed=1)
    inputs, targets = tokens(SMALL, seed=1), tokens(SMALL, seed=2)
    GPT.loss(whole(inputs), targets).backward()

    sent = pieces.apply_blocks(pieces.embed(inputs), 0, cut)
    received = sent.detach().requires_grad_()
    loss = GPT.loss(pieces.predict(pieces.apply_blocks(received, cut)), targets)
    loss.backward()
    sent.backward(received.grad)

    started = weights(whole)
    for model in (whole, pieces):
        torch.optim.AdamW(model.parameters(), lr=1e-2).step()
    assert torch.equal(weights(whole), weights(pieces)) and not torch.equal(weights(whole), started)


def loss_and_gradient_norms_split_by_heads(config: GPTConfig) -> tuple[float, list[float]]:
    """In a rank: one backward of the model with q, k, v and up split by columns, out and down by rows."""
    device = rank_device()
    dist.init_process_group()
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    model = GPT.seeded(config, seed=1).to(device)
    plan = {f"attention.{name}": ColwiseParallel() for name in "qkv"} | {"mlp.up": ColwiseParallel()}
    plan |= {"attention.out": RowwiseParallel(), "mlp.down": RowwiseParallel()}
    for block in model.blocks:
        parallelize_module(block, mesh, plan)
    loss = GPT.loss(model(tokens(config, seed=1).to(device)), tokens(config, seed=2).to(device))
    loss.backward()
    grads = [getattr(p.grad, "full_tensor", lambda p=p: p.grad)() for p in model.parameters()]
    return loss.item(), [grad.norm().item() for grad in grads]


@pytest.mark.slow
def test_tensor_parallelism_splits_the_model_unmodified() -> None:
    whole = GPT.seeded(SMALL, seed=1)
    loss = GPT.loss(whole(tokens(SMALL, seed=1)), tokens(SMALL, seed=2))
    loss.backward()
    for split_loss, norms in launch(loss_and_gradient_norms_split_by_heads, SMALL.num_heads, SMALL):
        assert split_loss == pytest.approx(loss.item(), abs=1e-12)
        assert norms == pytest.approx([p.grad.norm().item() for p in whole.parameters()], abs=1e-12)


@pytest.mark.parametrize("wrong, said", [
    (dict(vocab_size=0), "vocab_size is 0"), (dict(num_layers=0), "num_layers is 0"),
    (dict(mlp_width=0), "mlp_width is 0"), (dict(width=9), "multiple of num_heads"),
    (dict(dropout=1.0), "dropout is 1.0"), (dict(dtype=torch.int64), "torch.int64"),
])
def test_invalid_sizes_are_refused(wrong: dict, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        replace(SMALL, **wrong)


def test_a_sequence_longer_than_the_context_is_refused() -> None:
    with pytest.raises(ValueError, match="9 tokens, but this model's context is 8"):
        GPT(SMALL)(tokens(SMALL, num_tokens=9))


def test_the_config_can_be_pickled_and_its_mlp_scales_with_its_width() -> None:
    assert pickle.loads(pickle.dumps(SMALL)) == SMALL
    assert replace(SMALL, width=16).mlp_features == 64 and replace(SMALL, mlp_width=5).mlp_features == 5


def test_the_text_is_ascii_and_has_the_size_that_labs_rely_on() -> None:
    assert 6_000 <= len(TEXT) <= 9_000 and TEXT.isascii() and TEXT.endswith(".\n")
    assert set("".join(filter(lambda c: not c.isalpha(), TEXT))) == set("\n \"',.?")


@given(st.text(alphabet=sorted(set(TEXT))))
def test_encoded_characters_decode_to_the_same_text(text: str) -> None:
    characters = Characters(TEXT)
    encoded = characters.encode(text)
    assert encoded.dtype == torch.int64 and encoded.shape == (len(text),)
    assert characters.decode(encoded) == text == characters.decode(encoded.tolist())


def test_tokens_number_the_alphabet_in_order() -> None:
    characters = Characters("banana")
    assert (characters.alphabet, characters.vocab_size) == ("abn", 3)
    assert characters.encode("nab").tolist() == [2, 0, 1]


def test_invalid_tokens_are_refused() -> None:
    characters = Characters("banana")
    with pytest.raises(ValueError, match="no token for 'X', 'c'"):
        characters.encode("bancX")
    with pytest.raises(ValueError, match="3 is not a token: they are numbered from 0 to 2"):
        characters.decode([0, 3])
    with pytest.raises(ValueError, match="-1 is not a token"):
        characters.decode([-1])
    with pytest.raises(ValueError, match="one row at a time"):
        characters.decode([[0, 1]])
    with pytest.raises(ValueError, match="an empty text"):
        Characters("")


@given(st.integers(2, 60), st.integers(1, 12))
def test_windows_cover_the_text_without_overlap_and_targets_are_shifted_by_one(num_tokens: int, context: int) -> None:
    row = torch.arange(num_tokens)
    if num_tokens <= context:
        with pytest.raises(ValueError, match=f"at least {context + 1} tokens"):
            Windows(row, context)
        return
    windows = list(Windows(row, context))
    assert len(windows) == len(Windows(row, context)) == (num_tokens - 1) // context
    covered = torch.cat([inputs for inputs, _ in windows])
    assert torch.equal(covered, row[:len(covered)]) and num_tokens - 1 - len(covered) < context
    assert all(len(inputs) == context and torch.equal(targets, inputs + 1) for inputs, targets in windows)


def test_windows_are_indexed_like_a_list() -> None:
    windows = Windows(torch.arange(10), 3)
    assert windows[-1][0].tolist() == windows[2][0].tolist() == [6, 7, 8]
    with pytest.raises(IndexError):
        windows[3]
    with pytest.raises(TypeError, match="encode the text"):
        Windows("add what comes", 3)
    with pytest.raises(ValueError, match="context is 0"):
        Windows(torch.arange(10), 0)


def test_a_sampler_distributes_the_windows_over_ranks() -> None:
    windows = Windows(Characters(TEXT).encode(TEXT), 32)
    dealt = []
    for rank in range(4):
        sampler = DistributedSampler(windows, num_replicas=4, rank=rank, drop_last=True)
        for inputs, targets in DataLoader(windows, batch_size=4, sampler=sampler, drop_last=True):
            assert inputs.shape == targets.shape == (4, 32) and torch.equal(inputs[:, 1:], targets[:, :-1])
            dealt += [Characters(TEXT).decode(row) for row in inputs]
    whole = {TEXT[start:start + 32] for start in range(0, 32 * len(windows), 32)}
    assert len(dealt) == len(windows) // 16 * 16 and set(dealt) <= whole


@pytest.mark.slow
def test_the_story_is_learned_in_a_hundred_steps() -> None:
    characters = Characters(TEXT)
    windows = Windows(characters.encode(TEXT), 32)
    model = GPT.seeded(GPTConfig(characters.vocab_size), seed=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    generator, losses = torch.Generator().manual_seed(0), []
    for _ in range(100):
        chosen = torch.randperm(len(windows), generator=generator)[:16].tolist()
        inputs, targets = (torch.stack(rows) for rows in zip(*(windows[index] for index in chosen)))
        optimizer.zero_grad()
        loss = GPT.loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[0] == pytest.approx(math.log(characters.vocab_size), abs=0.2)
    assert sum(losses[-5:]) / 5 < 2.2


# ranks that agree rarely

def apart(every, lr, momentum, inner, num_steps, num_parts=1):
    """Train this rank's share of the batches; its weights in the end, and those that all agreed on last."""
    device = rank_device()
    dist.init_process_group()
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank)  # other weights on each rank: the first ones have to be rank 0's
    module = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2)).double().to(device)
    rarely = Streaming(module, every, num_parts, lr, momentum) if num_parts > 1 else Rarely(module, every, lr, momentum)
    optimizer = inner(module.parameters())
    for step in range(num_steps):
        x, y = (t.double().to(device) for t in batch(4 * world_size, seed=step))
        optimizer.zero_grad()
        F.mse_loss(module(x[rank::world_size]), y[rank::world_size]).backward()
        optimizer.step()
        rarely.after_step()
    return [p.detach().cpu() for p in module.parameters()], [was.cpu() for was in rarely.agreed]


def one_process(world_size, every, lr, momentum, inner, num_steps, parts=(1, 1, 1, 1)):
    """The same as one process, which plays all ranks: the definition of DiLoCo, written out, and of its parts."""
    torch.manual_seed(0)
    agreed = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2)).double()
    workers = [copy.deepcopy(agreed) for _ in range(world_size)]
    optimizers = [inner(worker.parameters()) for worker in workers]
    speed = [torch.zeros_like(p) for p in agreed.parameters()]
    for step in range(num_steps):
        x, y = (t.double() for t in batch(4 * world_size, seed=step))
        for rank, (worker, optimizer) in enumerate(zip(workers, optimizers)):
            optimizer.zero_grad()
            F.mse_loss(worker(x[rank::world_size]), y[rank::world_size]).backward()
            optimizer.step()
        for k, was in enumerate(agreed.parameters()):
            if (step + 1 - parts[k] * every // max(parts)) % every == 0:
                travelled = torch.stack([was - [*worker.parameters()][k] for worker in workers]).mean(0).detach()
                speed[k] = momentum * speed[k] + travelled
                was.data -= lr * (travelled + momentum * speed[k])
                for worker in workers:
                    [*worker.parameters()][k].data.copy_(was)
    return [[p.detach() for p in worker.parameters()] for worker in workers], [p.detach() for p in agreed.parameters()]


ADAMW, SGD = partial(torch.optim.AdamW, lr=1e-2), partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("world_size, every, lr, momentum, inner", [
    (2, 3, 0.7, 0.9, ADAMW), (3, 2, 1.0, 0.0, SGD), (4, 5, 0.5, 0.5, SGD), (3, 1, 0.7, 0.9, ADAMW)])
def test_ranks_that_agree_rarely_do_what_the_definition_says(world_size, every, lr, momentum, inner):
    run = launch(apart, world_size, every, lr, momentum, inner, 7, record=True)
    expected, agreed = one_process(world_size, every, lr, momentum, inner, 7)
    for rank, (weights, mine) in enumerate(run):
        for got, want in zip([*weights, *mine], [*expected[rank], *agreed]):
            torch.testing.assert_close(got, want, rtol=0, atol=1e-12)
    num_bytes = sum(p.nbytes for p in agreed)
    sums = [event.num_bytes for event in run.trace.of_rank(0)
            if (event.kind, event.op) == ("collective", "all_reduce")]
    assert sums == [num_bytes] * (7 // every)


@pytest.mark.slow
@pytest.mark.parametrize("world_size, every, num_parts, parts", [(2, 4, 2, (1, 2, 2, 2)), (3, 5, 3, (1, 2, 3, 3)),
                                                                 (3, 1, 2, (1, 2, 2, 2))])
def test_ranks_that_agree_on_parts_in_turn_do_what_the_definition_says(world_size, every, num_parts, parts):
    """48, 8, 16 and 2 numbers: a part of them at a time, and in all as many bytes."""
    run = launch(apart, world_size, every, 0.7, 0.6, ADAMW, 10, num_parts, record=True)
    expected, agreed = one_process(world_size, every, 0.7, 0.6, ADAMW, 10, parts)
    for rank, (weights, mine) in enumerate(run):
        for got, want in zip([*weights, *mine], [*expected[rank], *agreed]):
            torch.testing.assert_close(got, want, rtol=0, atol=1e-12)
    sums = [event.num_bytes for event in run.trace.of_rank(0)
            if (event.kind, event.op) == ("collective", "all_reduce")]
    of_part = [8 * sum(p.numel() for p, part in zip(agreed, parts) if part == one) for one in range(1, num_parts + 1)]
    due = [part for step in range(1, 11) for part in range(num_parts)
           if (step - (part + 1) * every // num_parts) % every == 0]
    assert sums == [of_part[part] for part in due] and sum(of_part) == 8 * 74


@pytest.mark.parametrize("num_parts", [0, 4, 9])
def test_more_parts_than_can_be_cut_are_refused(num_parts):
    with pytest.raises(ValueError, match=f"can't be cut into {num_parts} parts"):
        _cut([*nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 2)).parameters()], num_parts)


@pytest.mark.slow
def test_agreeing_in_every_step_is_synchronous_training_if_the_inner_step_is_linear():
    [(weights, _), *_] = launch(apart, 3, 1, 1.0, 0.0, SGD, 6)
    torch.manual_seed(0)
    alone = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2)).double()
    optimizer = SGD(alone.parameters())
    for step in range(6):
        x, y = (t.double() for t in batch(12, seed=step))
        optimizer.zero_grad()
        F.mse_loss(alone(x), y).backward()
        optimizer.step()
    for got, want in zip(weights, alone.parameters()):
        torch.testing.assert_close(got, want.detach(), rtol=0, atol=1e-12)


def pairs_agree():
    """Ranks 0 and 2 agree, and 1 and 3: this rank's weights after two steps on data of its own."""
    dist.init_process_group()
    groups = [dist.new_group(ranks) for ranks in ([0, 2], [1, 3])]
    module = nn.Linear(6, 2).double()
    rarely = Rarely(module, 2, group=groups[dist.get_rank() % 2])
    for step in range(2):
        x, y = (t.double() for t in batch(4, seed=10 * step + dist.get_rank()))
        module.zero_grad()
        F.mse_loss(module(x), y).backward()
        for p in module.parameters():
            p.data -= 0.1 * p.grad
        rarely.after_step()
    return module.weight.detach()


@pytest.mark.slow
def test_only_the_ranks_of_a_group_agree():
    zero, one, two, three = launch(pairs_agree, 4)
    assert torch.equal(zero, two) and torch.equal(one, three) and not torch.equal(zero, one)


@pytest.mark.parametrize("wrong, message", [
    (dict(every=0), "every must be a whole number of steps, at least 1, not 0"), (dict(every=2.5), "not 2.5"),
    (dict(every=2, lr=0), "lr must be above 0"), (dict(every=2, momentum=1), "below 1, not 1")])
def test_rarely_refuses_what_makes_no_sense(wrong, message):
    with pytest.raises(ValueError, match=message):
        Rarely(nn.Linear(2, 2), **wrong)


# the largest numbers of a gradient

def largest(share, keep, num_steps):
    """Train this rank's share of the batches in DDP with the hook; the weights in the end."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2)).double().to(message_device())
    parallel = DistributedDataParallel(module)
    parallel.register_comm_hook(None, TopK(share, keep).reduce)
    for step in range(num_steps):
        x, y = (t.double().to(message_device()) for t in batch(4 * world_size, seed=step))
        parallel.zero_grad()
        F.mse_loss(parallel(x[rank::world_size]), y[rank::world_size]).backward()
        for p in module.parameters():
            p.data -= 0.3 * p.grad
    return torch.cat([p.detach().flatten().cpu() for p in module.parameters()])


def every_share(shares, num_steps):
    rank_device()
    dist.init_process_group()
    return [largest(*share, num_steps) for share in shares]


def largest_alone(share, keep, num_steps, world_size):
    """The same as one process, which plays all ranks: the definition, written out."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2)).double()
    left = [0.0] * world_size
    for step in range(num_steps):
        x, y = (t.double() for t in batch(4 * world_size, seed=step))
        sent = []
        for rank in range(world_size):
            module.zero_grad()
            F.mse_loss(module(x[rank::world_size]), y[rank::world_size]).backward()
            owed = torch.cat([p.grad.flatten() for p in module.parameters()]) + left[rank]
            few = owed.abs() >= owed.abs().sort(descending=True).values[int(share * len(owed)) - 1]
            sent.append(torch.where(few, owed, 0))
            left[rank] = owed - sent[-1] if keep else 0.0
        pieces = (sum(sent) / world_size).split([p.numel() for p in module.parameters()])
        for p, piece in zip(module.parameters(), pieces):
            p.data -= 0.3 * piece.view_as(p)
    return torch.cat([p.detach().flatten() for p in module.parameters()])


@pytest.mark.slow
def test_a_hook_that_sends_the_largest_numbers_does_what_the_definition_says():
    shares = [(0.25, True), (0.25, False), (1.0, True)]
    for found in launch(every_share, 3, shares, 5):
        for share, weights in zip(shares, found, strict=True):
            torch.testing.assert_close(weights, largest_alone(*share, 5, 3), rtol=0, atol=1e-12)


@pytest.mark.parametrize("share", [0, 1.5, -0.1])
def test_a_share_that_is_none_is_refused(share):
    with pytest.raises(ValueError, match="share must be above 0 and at most 1"):
        TopK(share)


# a slow line

def carried_by_a_line(lengths, bytes_per_s, latency_s):
    """What this rank gets of sums and gathers over a line, what it has sent, how long each took, and was noted."""
    rank_device()
    dist.init_process_group()
    rank, line, found = dist.get_rank(), SlowLine(bytes_per_s, latency_s), []
    for length in lengths:
        own = torch.arange(length, dtype=torch.float64).view(-1, 1) + 10 * rank
        dist.barrier()
        began, sent, messages, busy_s = time.monotonic(), line.num_bytes, line.num_messages, line.busy_s
        summed = own.clone()
        future = dist.all_reduce(summed, group=line, async_op=True).get_future()
        took_s = time.monotonic() - began
        assert future.done() and future.value()[0] is summed
        found.append((summed, line.num_bytes - sent, line.num_messages - messages, took_s, line.busy_s - busy_s))
        began, sent, messages, busy_s = time.monotonic(), line.num_bytes, line.num_messages, line.busy_s
        gathered = own.new_empty(line.size() * length)
        dist.all_gather_into_tensor(gathered, own.flatten(), group=line)
        found.append((gathered, line.num_bytes - sent, line.num_messages - messages, time.monotonic() - began,
                      line.busy_s - busy_s))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_slow_line_carries_what_a_ring_sends_and_takes_as_long(world_size):
    lengths, rate, latency_s = (1, 6, 20), 20e3, 0.003
    for found in launch(carried_by_a_line, world_size, lengths, rate, latency_s):
        own = [torch.arange(length, dtype=torch.float64) for length in lengths]
        for (summed, *sums), (gathered, *gathers), mine in zip(found[::2], found[1::2], own, strict=True):
            everybody = [mine + 10 * rank for rank in range(world_size)]
            assert torch.equal(summed.flatten(), sum(everybody)) and summed.shape == (len(mine), 1)
            assert torch.equal(gathered, torch.cat(everybody))
            chunk, hops = 8 * -(-len(mine) // world_size), world_size - 1
            for (num_bytes, messages, took_s, busy_s), each, num in ((sums, chunk, 2 * hops),
                                                                     (gathers, 8 * len(mine), hops)):
                assert (num_bytes, messages) == (num * each, num)
                assert took_s >= busy_s >= num * (latency_s + each / rate)


HOOKED = {"32 bits": lambda group: (group, default_hooks.allreduce_hook),
          "16 bits": lambda group: (group, default_hooks.fp16_compress_hook),
          "low rank": lambda group: (powerSGD_hook.PowerSGDState(group, 1, start_powerSGD_iter=2),
                                     powerSGD_hook.powerSGD_hook),
          "largest": lambda group: (None, TopK(0.25, group=group).reduce)}


def hooked_on(groups):
    """The weights that DDP trains with each hook, over torch's own group and over a line."""
    rank_device()
    dist.init_process_group()
    rank, found = dist.get_rank(), {}
    for name, hook in HOOKED.items():
        for where in groups:
            group = SlowLine(1e9) if where == "line" else None
            torch.manual_seed(0)
            module = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))
            parallel = DistributedDataParallel(module)
            parallel.register_comm_hook(*hook(group))
            for step in range(5):
                x, y = batch(8, seed=step)
                parallel.zero_grad()
                F.mse_loss(parallel(x.float()[rank::2]), y.float()[rank::2]).backward()
                for p in module.parameters():
                    p.data -= 0.3 * p.grad
            found[name, where] = torch.cat([p.detach().flatten() for p in module.parameters()])
            assert group is None or group.num_bytes > 0, "the hook sends over the line"
    return found


@pytest.mark.slow
def test_ddps_hooks_train_over_a_slow_line_as_over_torchs_own_group():
    for found in launch(hooked_on, 2, ("torch", "line")):
        for name in HOOKED:
            torch.testing.assert_close(found[name, "line"], found[name, "torch"], rtol=0, atol=1e-6)
        assert not torch.equal(found["largest", "line"], found["32 bits", "line"])


def largest_of_a_slow_line():
    dist.init_process_group()
    options = dist.AllreduceOptions()
    options.reduceOp = dist.ReduceOp.MAX
    SlowLine(1e9).allreduce([torch.ones(2)], options)  # dist.all_reduce words its error itself


@pytest.mark.slow
def test_a_slow_line_refuses_what_it_can_not_do():
    with pytest.raises(LaunchError, match="a slow line can only add up"):
        launch(largest_of_a_slow_line, 2)
    for wrong, message in (({"bytes_per_s": 0}, "bytes_per_s must be above 0, not 0"),
                           ({"bytes_per_s": 1, "latency_s": -1}, "latency_s must be at least 0, not -1")):
        with pytest.raises(ValueError, match=message):
            SlowLine(**wrong)
