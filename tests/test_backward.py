"""Following backward passes of real ranks: torch's DDP and the wrappers that people write themselves."""
from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook, fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel as DDP

from book.device import message_device
from book.launch import HangError, RankError, launch, rank_device
from book.record import clock, follow_backward
from book.record.buckets import OwnBuckets
from book.record.clock import in_program_order
from book.trace import Event, Trace
from tests.by_value import sent_by_value

sent_by_value(__name__)


def join(*widths: int) -> nn.Sequential:
    """Join the group; linear layers from each width to the next, the same on each rank."""
    device = rank_device()
    dist.init_process_group()
    torch.manual_seed(7)
    return nn.Sequential(*[nn.Linear(a, b) for a, b in pairwise(widths)]).to(device)


def backward(model: nn.Module) -> None:
    first = next(model.parameters())
    inputs = torch.arange(2.0 * first.shape[1], device=first.device).view(2, -1) / 100 + dist.get_rank()
    model(inputs).square().sum().backward()


def gradients(trace: Trace, rank: int = 0) -> list[Event]:
    return [event for event in trace.of_rank(rank) if event.kind == "compute"]


def all_reduces(trace: Trace, rank: int = 0) -> list[Event]:
    """The rank's all-reduces from its first followed gradient on, in issue order."""
    first_s = gradients(trace, rank)[0].end_s
    own = [event for event in trace.of_rank(rank) if event.op == "all_reduce" and event.start_s > first_s]
    return sorted(own, key=lambda event: event.start_s)


def sent(trace: Trace, rank: int = 0) -> list[tuple[int | None, float]]:
    return [(event.bucket, event.num_bytes) for event in all_reduces(trace, rank)]


def contents(trace: Trace, rank: int = 0) -> dict[int | None, list[str]]:
    """The gradients in each bucket, in the order they became ready."""
    found: dict[int | None, list[str]] = {}
    for event in gradients(trace, rank):
        found.setdefault(event.bucket, []).append(event.op)
    return found


# torch's DDP

def follow_ddp(widths: tuple[int, ...], options: dict[str, Any], hook: Callable | None = None,
               num_passes: int = 1) -> dict[str, tuple[int, ...]]:
    model = DDP(join(*widths), **options)
    for _ in range(2):
        backward(model)
    for _ in range(num_passes):
        with follow_backward(model, hook=hook):
            backward(model)
    return {name: tuple(parameter.shape) for name, parameter in model.module.named_parameters()}


@pytest.mark.slow
def test_each_gradient_is_ready_once_and_goes_with_its_bucket() -> None:
    run = launch(follow_ddp, 2, (64,) * 5, {"bucket_cap_mb": 0.02}, record=True)
    names = [f"{layer}.{kind}" for layer in (3, 2, 1, 0) for kind in ("bias", "weight")]
    for rank in range(2):
        ready = gradients(run.trace, rank)
        assert [event.op for event in ready] == names and set(names) == run[rank].keys()
        assert [event.num_bytes for event in ready] == [64 * 4, 64 * 64 * 4] * 4
        assert contents(run.trace, rank) == {0: names[:4], 1: names[4:]}
        assert sent(run.trace, rank) == [(0, 2 * 65 * 64 * 4), (1, 2 * 65 * 64 * 4)]
    assert (run.trace.clock, run.trace.source) == ("measured", "recorded")


@pytest.mark.slow
@pytest.mark.parametrize("cap_mb, sizes", [
    (None, [1, 4]),  # the first closes at 1 MiB, the others at 25
    pytest.param(1, [1, 1, 1, 1, 1], marks=pytest.mark.slow),
    (1.5, [2, 2, 1]),  # one closes when it has reached the cap, so it may be larger
    pytest.param(25, [5], marks=pytest.mark.slow),  # given, 25 MiB is the first one's too
])
def test_bucket_sizes_follow_the_cap(cap_mb: float | None, sizes: list[int]) -> None:
    trace = launch(follow_ddp, 2, (512,) * 6, {"bucket_cap_mb": cap_mb}, record=True).trace
    layer = 512 * 513 * 4  # 1 MiB and a bias of 2 KiB
    assert sent(trace) == [(bucket, size * layer) for bucket, size in enumerate(sizes)]
    assert [len(names) for names in contents(trace).values()] == [2 * size for size in sizes]


@pytest.mark.slow
def test_a_bucket_is_sent_when_it_is_full_and_a_single_one_after_the_last_gradient() -> None:
    for cap_mb, num_later in ((0.01, [4, 2, 0]), (1, [0])):
        trace = launch(follow_ddp, 2, (64,) * 4, {"bucket_cap_mb": cap_mb}, record=True).trace
        for rank in range(2):
            ready = [event.end_s for event in gradients(trace, rank)]
            assert [sum(end_s > event.start_s for end_s in ready) for event in all_reduces(trace, rank)] == num_later


@pytest.mark.slow
def test_times_are_in_program_order_and_an_all_reduce_ends_after_the_others_began() -> None:
    trace = launch(follow_ddp, 2, (64,) * 5, {"bucket_cap_mb": 0.01}, record=True).trace
    ready = gradients(trace)
    assert [event.start_s for event in ready[1:]] == [event.end_s for event in ready[:-1]]
    assert all(event.start_s < event.end_s for event in ready)
    issued_s = [max(event.start_s for event in pair) for pair in zip(*(all_reduces(trace, r) for r in (0, 1)))]
    for rank in range(2):
        assert all(event.end_s > start_s for event, start_s in zip(all_reduces(trace, rank), issued_s, strict=True))


@pytest.mark.slow
def test_the_first_backward_has_a_single_bucket_because_ddp_builds_the_rest_after_it() -> None:
    def first() -> None:
        model = DDP(join(64, 64, 64), bucket_cap_mb=0.01)
        with follow_backward(model):
            backward(model)
    assert sent(launch(first, 2, record=True).trace) == [(0, 2 * 65 * 64 * 4)]


@pytest.mark.slow
def test_compression_halves_the_bytes_only_in_the_block() -> None:
    def compressed(recorded: bool) -> tuple[list[torch.Tensor], int]:
        model = DDP(join(16, 16, 16))
        backward(model)
        found = []
        for hook in (fp16_compress_hook, None):
            model.zero_grad()
            with follow_backward(model, hook=hook):
                backward(model)
            found.append(model.module[0].weight.grad.clone().cpu())
        return found, len(model._comm_hooks)
    run = launch(compressed, 2, True, record=True)
    assert sent(run.trace) == [(0, 2 * 17 * 16 * 2), (0, 2 * 17 * 16 * 4)]
    assert {event.num_bytes for event in gradients(run.trace)} == {16 * 4, 16 * 16 * 4}
    alone = launch(compressed, 2, False)
    for (half, full), hooks in (run[0], alone[0]):
        assert hooks == 1 and not torch.equal(half, full) and torch.allclose(half, full, rtol=2e-3)


@pytest.mark.slow
def test_no_sync_leaves_gradients_without_a_bucket() -> None:
    def accumulate(together: bool) -> None:
        model = DDP(join(8, 8, 8))
        for _ in range(2):
            backward(model)
        with follow_backward(model) if together else contextlib.nullcontext():
            with contextlib.nullcontext() if together else follow_backward(model), model.no_sync():
                backward(model)
            if together:
                backward(model)
    alone = launch(accumulate, 2, False, record=True).trace
    assert contents(alone) == {None: ["1.bias", "1.weight", "0.bias", "0.weight"]} and all_reduces(alone) == []
    both = launch(accumulate, 2, True, record=True).trace
    assert [event.bucket for event in gradients(both)] == [None] * 4 + [0] * 4
    assert sent(both) == [(0, 2 * 9 * 8 * 4)]


@pytest.mark.slow
def test_static_graph_is_followed_the_same_way() -> None:
    traces = [launch(follow_ddp, 2, (64,) * 4, {"bucket_cap_mb": 0.01, "static_graph": static}, record=True).trace
              for static in (False, True)]
    assert contents(traces[0]) == contents(traces[1]) and sent(traces[0]) == sent(traces[1])
    assert len(sent(traces[1])) == 3


@pytest.mark.slow
def test_a_view_of_the_bucket_is_followed_the_same_way() -> None:
    options = {"bucket_cap_mb": 0.01, "gradient_as_bucket_view": True}
    trace = launch(follow_ddp, 2, (64,) * 3, options, record=True).trace
    assert contents(trace) == {0: ["1.bias", "1.weight"], 1: ["0.bias", "0.weight"]}
    assert [bucket for bucket, _ in sent(trace)] == [0, 1]


class SkipsOne(nn.Module):
    def __init__(self, layers: nn.Sequential):
        super().__init__()
        self.layers = layers

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers[2](self.layers[0](x))


@pytest.mark.slow
def test_an_unused_parameter_has_no_event_but_takes_room_in_its_bucket() -> None:
    def skip() -> None:
        model = DDP(SkipsOne(join(8, 8, 8, 8)), find_unused_parameters=True)
        for _ in range(2):
            backward(model)
        with follow_backward(model):
            backward(model)
    trace = launch(skip, 2, record=True).trace
    assert contents(trace) == {0: ["layers.2.bias", "layers.2.weight", "layers.0.bias", "layers.0.weight"]}
    # DDP also all-reduces which parameters any rank has used, one number for each: these are not gradients.
    assert sorted(sent(trace), key=str) == [(0, 3 * 9 * 8 * 4), (None, 6 * 4)]


def train(follows: bool, view: bool, to_none: bool) -> list[torch.Tensor]:
    """The gradients of three steps, of which the second is followed if any is."""
    model = DDP(join(32, 32, 32), gradient_as_bucket_view=view)
    torch.manual_seed(dist.get_rank())
    found = []
    for step in range(3):
        model.zero_grad(set_to_none=to_none)
        with follow_backward(model) if follows and step == 1 else contextlib.nullcontext():
            model(torch.randn(4, 32, device=model.device)).square().sum().backward()
        found += [parameter.grad.clone().cpu() for parameter in model.parameters()]
    return found


@pytest.mark.slow
@pytest.mark.parametrize("view, to_none", [
    (False, True), (True, False),
    *(pytest.param(*both, marks=pytest.mark.slow) for both in ((False, False), (True, True)))])
def test_following_changes_no_gradient_not_even_in_its_last_bit(view: bool, to_none: bool) -> None:
    # On 3 ranks dividing by 3 and multiplying by 1/3 round differently.
    plain, followed = launch(train, 3, False, view, to_none), launch(train, 3, True, view, to_none, record=True)
    unrecorded = launch(train, 3, True, view, to_none)
    last_bit = torch.finfo(torch.float32).eps if view and not to_none else 0.0  # there DDP without a hook divides
    assert len(plain[0]) == 3 * 4
    for one, other, third in zip(plain[0], followed[0], unrecorded[0], strict=True):
        torch.testing.assert_close(other, one, rtol=4 * last_bit, atol=4 * last_bit)
        assert torch.equal(one, third)


@pytest.mark.slow
def test_a_second_block_follows_again_and_what_is_between_stays_unmarked() -> None:
    def twice() -> None:
        model = DDP(join(8, 8))
        for _ in range(2):
            with follow_backward(model):
                backward(model)
            backward(model)
    trace = launch(twice, 2, record=True).trace
    assert [event.op for event in gradients(trace)] == ["0.bias", "0.weight"] * 2
    assert [bucket for bucket, _ in sent(trace)] == [0, None, 0, None]


@pytest.mark.slow
def test_without_a_recording_the_model_is_left_alone() -> None:
    def untouched() -> tuple[int, int]:
        model = DDP(join(8, 8))
        with follow_backward(model):
            backward(model)
            hooks = [parameter._backward_hooks for parameter in model.parameters()]
        return len(model._comm_hooks), sum(map(bool, hooks))
    assert launch(untouched, 2)[0] == (0, 0)


@pytest.mark.slow
def test_hooks_are_gone_after_an_error_and_the_model_can_be_followed_again() -> None:
    def fails() -> int:
        model = DDP(join(8, 8))
        try:
            with follow_backward(model):
                model(torch.ones(2, 8, device=model.device))
                raise KeyError("the reader's own")
        except KeyError:
            pass
        left = len(model._forward_hooks) + sum(map(bool, (p._backward_hooks for p in model.parameters())))
        with follow_backward(model):
            backward(model)
        return left
    run = launch(fails, 2, record=True)
    assert run[0] == 0 and contents(run.trace) == {0: ["0.bias", "0.weight"]}


def nested() -> None:
    model = DDP(join(8, 8))
    with follow_backward(model), follow_backward(model):
        backward(model)


def hooked_elsewhere() -> None:
    model = DDP(join(8, 8))
    model.register_comm_hook(None, allreduce_hook)
    with follow_backward(model):
        backward(model)


def hook_without_ddp() -> None:
    with follow_backward(join(8, 8), hook=fp16_compress_hook):
        pass


@pytest.mark.slow
@pytest.mark.parametrize("program, sentence", [
    (nested, "a backward pass is being followed already: end that `with` block first"),
    (hooked_elsewhere, r"give that hook to follow_backward\(model, hook=...\)"),
    (hook_without_ddp, "wrap the model in DDP, or leave hook= out")])
def test_what_cannot_be_followed_raises_a_clear_error(program: Callable, sentence: str) -> None:
    with pytest.raises(RankError, match=sentence):
        launch(program, 2, record=True)


@pytest.mark.slow
def test_a_hang_shows_the_gradients_that_were_ready() -> None:
    def skips_a_bucket() -> None:
        model = Bucketed(join(8, 8, 8), num_layers=1, skip=dist.get_rank() == 1)
        with follow_backward(model):
            backward(model)
            model.finish()
    with pytest.raises(HangError) as caught:
        launch(skips_a_bucket, 2, record=True, hang_s=0.5)
    assert contents(caught.value.trace) == {0: ["1.bias", "1.weight"], 1: ["0.bias", "0.weight"]}
    last = all_reduces(caught.value.trace)[-1]
    assert last.bucket == 1 and last.end_s is None


# Wrappers of one's own

class Each(nn.Module):
    """An all-reduce per parameter in hooks: "later" waits in finish(), "now" in the hook, "tensor" in the tensor's."""

    def __init__(self, module: nn.Module, style: str):
        super().__init__()
        self.module, self.style, self.works = module, style, []
        for parameter in module.parameters():
            if style == "tensor":
                parameter.register_hook(self.exchanged)
            else:
                parameter.register_post_accumulate_grad_hook(lambda parameter: self.send(parameter.grad))

    def exchanged(self, gradient: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(gradient)
        return gradient / dist.get_world_size()

    def send(self, gradient: torch.Tensor) -> None:
        work = dist.all_reduce(gradient, async_op=self.style == "later")
        self.works += [work] if work else []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.module(x)

    def finish(self) -> None:
        for work in self.works:
            work.wait()


class Bucketed(nn.Module):
    """Flat copies of `num_layers` layers each, sent when they are full; `skip` never sends the last."""

    def __init__(self, module: nn.Sequential, num_layers: int, skip: bool = False):
        super().__init__()
        self.module, self.skip, self.sent = module, skip, []
        order = [parameter for layer in reversed(module) for parameter in reversed(list(layer.parameters()))]
        self.buckets = [order[i:i + 2 * num_layers] for i in range(0, len(order), 2 * num_layers)]
        self.missing = [len(bucket) for bucket in self.buckets]
        for number, bucket in enumerate(self.buckets):
            for parameter in bucket:
                parameter.register_post_accumulate_grad_hook(lambda _, number=number: self.count(number))

    def count(self, number: int) -> None:
        self.missing[number] -= 1
        if self.missing[number] == 0 and not (self.skip and number == len(self.buckets) - 1):
            flat = torch.cat([parameter.grad.flatten() for parameter in self.buckets[number]])
            self.sent.append((number, flat, dist.all_reduce(flat, async_op=True)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.module(x)

    def finish(self) -> None:
        for number, flat, work in self.sent:
            work.wait()
            parts = flat.split([parameter.numel() for parameter in self.buckets[number]])
            for parameter, part in zip(self.buckets[number], parts):
                parameter.grad.copy_(part.view_as(parameter) / dist.get_world_size())


class After(nn.Module):
    """All gradients after backward: each by itself, as one copy, or as equal copies in the order of `buckets`."""

    def __init__(self, module: nn.Sequential, style: str):
        super().__init__()
        self.module, self.style = module, style
        if style != "one copy":
            self.buckets = [list(layer.parameters()) for layer in module]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.module(x)

    def finish(self) -> None:
        parameters = list(self.module.parameters())
        if self.style == "each":
            for parameter in parameters:
                dist.all_reduce(parameter.grad)
        for bucket in [parameters] if self.style == "one copy" else self.buckets if self.style == "layers" else []:
            dist.all_reduce(torch.cat([parameter.grad.flatten() for parameter in bucket]) / dist.get_world_size())


def follow_own(wrapper: type[nn.Module], argument: object, num_passes: int = 1) -> None:
    model = wrapper(join(16, 16, 16, 16), argument)
    for _ in range(num_passes):
        with follow_backward(model):
            backward(model)
            getattr(model, "finish", lambda: None)()


def names(*layers: int, order: Iterable[str] = ("bias", "weight")) -> list[str]:
    return [f"{layer}.{kind}" for layer in layers for kind in order]


@pytest.mark.slow
@pytest.mark.parametrize("style", ["later", "now", pytest.param("tensor", marks=pytest.mark.slow)])
def test_an_all_reduce_of_a_gradient_is_that_parameters(style: str) -> None:
    trace = launch(follow_own, 2, Each, style, record=True).trace
    assert contents(trace) == dict(enumerate([name] for name in names(2, 1, 0)))
    assert sent(trace) == list(enumerate([16 * 4, 16 * 16 * 4] * 3))
    for ready, carries in zip(gradients(trace), all_reduces(trace), strict=True):
        assert ready.end_s < carries.start_s
    # A wait in the hook comes before the next gradient is ready: that is how a replay recognizes it.
    assert [event.waited for event in all_reduces(trace)] == ([6] * 6 if style == "later" else [1, 2, 3, 4, 5, 6])


@pytest.mark.slow
def test_a_copy_is_identified_by_the_wrappers_buckets() -> None:
    trace = launch(follow_own, 2, Bucketed, 2, record=True).trace
    assert contents(trace) == {0: names(2, 1), 1: names(0)}
    assert sent(trace) == [(0, 2 * 17 * 16 * 4), (1, 17 * 16 * 4)]
    assert all_reduces(trace)[0].start_s < gradients(trace)[-1].end_s  # backward goes on meanwhile


@pytest.mark.slow
def test_gradients_sent_after_backward_are_identified_by_address() -> None:
    trace = launch(follow_own, 2, After, "each", record=True).trace
    assert all_reduces(trace)[0].start_s > gradients(trace)[-1].end_s
    # None of `buckets` matches what was sent, so the numbers continue after them, in the order of the all-reduces.
    assert contents(trace) == {8: ["2.bias"], 7: ["2.weight"], 6: ["1.bias"], 5: ["1.weight"], 4: ["0.bias"],
                               3: ["0.weight"]}
    assert [bucket for bucket, _ in sent(trace)] == [3, 4, 5, 6, 7, 8]


@pytest.mark.slow
def test_buckets_of_equal_size_are_distinguished_by_contents() -> None:
    trace = launch(follow_own, 2, After, "layers", record=True).trace
    assert contents(trace) == {2: names(2), 1: names(1), 0: names(0)}
    # On a GPU contents are not compared, and the buckets are taken in the order in which they were complete.
    assert [bucket for bucket, _ in sent(trace)] == ([0, 1, 2] if trace.backend == "gloo" else [2, 1, 0])


def test_contents_are_compared_only_on_the_cpu() -> None:
    model = nn.Module()
    model.early, model.late = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4))
    model.buckets = [[model.late], [model.early]]
    for parameter, value in ((model.early, 1.0), (model.late, 2.0)):
        parameter.grad = torch.arange(4.0) + value
    ready, own = {model.early: 0, model.late: 1}, OwnBuckets(model, model.parameters())
    assert own.carried([model.late.grad.clone()], ready)[0] == 0
    assert own.carried([torch.empty(4, device="meta")], ready)[0] == 1  # reading it would raise


@pytest.mark.parametrize("dtype, size", [(torch.float64, 1e-200), (torch.float32, 1e-30), (torch.float32, 1e30),
                                         (torch.float16, 1e-2), (torch.bfloat16, 1.0)])
@pytest.mark.parametrize("factor", [1.0, 1 / 3, -2.0])
def test_contents_are_recognized_however_small_they_are(dtype: torch.dtype, size: float, factor: float) -> None:
    model = nn.Linear(5, 5).to(dtype)
    model.buckets = [[model.weight], [model.weight, model.bias], [nn.Parameter(torch.ones(25))]]
    model.other = nn.Parameter(torch.ones(25, dtype=dtype))
    model.buckets.append([model.other])
    generator = torch.Generator().manual_seed(3)
    for parameter in model.parameters():
        parameter.grad = (torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * size).to(dtype)
    ready = {model.weight: 0, model.bias: 1, model.other: 2}
    for number in (0, 3):
        flat = model.buckets[number][0].grad.flatten() * factor
        assert OwnBuckets(model, model.parameters()).carried([flat], ready)[0] == number


class Twins(nn.Module):
    """Two parameters whose gradients are the same to the last bit, so that their copies are too."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Parameter(torch.ones(1, 4)), nn.Parameter(torch.ones(1, 4))
        self.buckets = [[self.first], [self.second]]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + (self.first + self.second * 1)


@pytest.mark.slow
def test_of_identical_buckets_the_first_complete_one_is_taken() -> None:
    def copies() -> None:
        join()
        model = Twins().to(message_device())
        for _ in range(2):
            with follow_backward(model):
                backward(model)
                dist.all_reduce(model.first.grad.clone())
                dist.all_reduce(model.first.grad.clone())
    trace = launch(copies, 2, record=True).trace
    assert contents(trace) in ({0: ["first"] * 2, 1: ["second"] * 2}, {1: ["second"] * 2, 0: ["first"] * 2})
    order = {event.op: event.bucket for event in gradients(trace)}
    assert [bucket for bucket, _ in sent(trace)] == list(order.values()) * 2


@pytest.mark.slow
def test_an_all_reduce_ends_when_it_is_complete_however_late_the_program_waits() -> None:
    def waits_late() -> None:
        model = Each(join(16, 16), "later")
        with follow_backward(model):
            backward(model)
            dist.barrier()  # by here both ranks have issued all of them
            time.sleep(0.5)
            dist.barrier()
            model.finish()
    trace = launch(waits_late, 2, record=True).trace
    *_, later = [event for event in trace.of_rank(0) if event.op == "barrier"]
    assert all(event.end_s < later.start_s for event in all_reduces(trace)) and len(all_reduces(trace)) == 2


@pytest.mark.slow
def test_a_copy_of_a_wrapper_without_buckets_stays_unknown() -> None:
    trace = launch(follow_own, 2, After, "one copy", record=True).trace
    assert contents(trace) == {None: names(2, 1, 0)} and sent(trace) == [(None, 3 * 17 * 16 * 4)]


@pytest.mark.slow
def test_an_all_reduced_buffer_carries_the_gradients_in_it() -> None:
    def views() -> None:
        model = join(16, 16, 16)
        buffer = torch.zeros(2 * 17 * 16, device=next(model.parameters()).device)
        parts = buffer.split([parameter.numel() for parameter in model.parameters()])
        for parameter, part in zip(model.parameters(), parts):
            parameter.grad = part.view_as(parameter)
        with follow_backward(model):
            backward(model)
            dist.all_reduce(buffer)
            dist.all_reduce(torch.ones(1, device=buffer.device))  # a loss, say
    trace = launch(views, 2, record=True).trace
    assert contents(trace) == {0: names(1, 0)} and sent(trace) == [(0, 2 * 17 * 16 * 4), (None, 4)]


@pytest.mark.slow
def test_every_pass_of_a_wrapper_has_the_same_buckets() -> None:
    trace = launch(follow_own, 2, Each, "now", 2, record=True).trace
    assert [event.bucket for event in gradients(trace)] == list(range(6)) * 2
    assert [bucket for bucket, _ in sent(trace)] == list(range(6)) * 2


# Times on a GPU

def test_events_within_one_tick_keep_program_order() -> None:
    noted = [("gradients", 0, "start_ns", 100), ("gradients", 0, "end_ns", 500), ("operations", 3, "start_ns", 500),
             ("operations", 3, "end_ns", 400), ("gradients", 1, "end_ns", 499)]
    assert [time_ns for *_, time_ns in in_program_order(noted)] == [100, 500, 501, 501, 502]


LAG_S = 1000.0


class LateMark:
    """Stands in for an event on a GPU whose clock is `LAG_S` ahead of the program from the second event on."""

    waited_for = 0

    def __init__(self) -> None:
        self.time_s = time.monotonic()

    def synchronize(self) -> None:
        LateMark.waited_for += 1

    def elapsed_time(self, later: LateMark) -> float:
        return (later.time_s - self.time_s + LAG_S) * 1e3


def follow_late(fails: bool) -> int:
    """Follow a pass with every kind of ending on a clock of `LateMark`s; returns how many of them were waited for."""
    model = Each(join(8, 8), "later")
    clock.now = lambda device: clock.Stamp(time.monotonic_ns(), LateMark())
    with contextlib.suppress(KeyError), follow_backward(model):
        backward(model)
        model.finish()
        dist.barrier()
        dist.broadcast(torch.ones(4, device=message_device()), 0)
        dist.all_gather_into_tensor(torch.empty(8, device=message_device()), torch.ones(4, device=message_device()))
        time.sleep(0.3)  # by here the backend's threads have told of every completion
        if fails:
            raise KeyError("the reader's own")
    return LateMark.waited_for


@pytest.mark.slow
def test_times_on_a_device_are_those_of_its_clock_for_every_collective() -> None:
    run = launch(follow_late, 2, False, record=True)
    for rank in range(2):
        own = [event for event in run.trace.of_rank(rank) if event.kind == "collective"]
        assert [event.op for event in own] == ["all_reduce"] * 2 + ["barrier", "broadcast", "all_gather"]
        assert all(0 <= event.end_s - event.start_s < LAG_S / 2 for event in own)
        ready = gradients(run.trace, rank)
        assert [event.bucket for event in ready] == [0, 1]
        # All times are on the device's clock, so what the program did in order is in order.
        moments = [ready[0].end_s, own[0].start_s, ready[1].end_s, *(event.start_s for event in own[1:])]
        assert moments == sorted(moments) and max(moments) < LAG_S / 2
        assert run[rank] == 1 + 2 * (2 + 5)


@pytest.mark.slow
def test_after_an_error_no_device_is_waited_for() -> None:
    run = launch(follow_late, 2, True, record=True)
    assert list(run) == [1, 1] and len(gradients(run.trace)) == 2


@pytest.mark.slow
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU: times on its streams can't be taken")
def test_on_a_gpu_times_are_those_of_the_streams() -> None:
    trace = launch(follow_ddp, 1, (4096,) * 5, {"bucket_cap_mb": 1}, None, 2, record=True).trace
    ready = gradients(trace)
    assert trace.backend == "nccl" and len(ready) == 16
    assert all(a.end_s < b.end_s for a, b in pairwise(ready))
    for event in all_reduces(trace):
        assert event.end_s > event.start_s > max(g.end_s for g in ready if g.bucket == event.bucket
                                                 and g.end_s < event.start_s)
