"""Replays of followed backward passes: the recorded order on a modelled clock, and how much of it overlaps."""
from __future__ import annotations

from dataclasses import replace
from itertools import accumulate, pairwise

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from book.cost import Link, ring_all_reduce_s
from book.launch import launch
from book.record import follow_backward
from book.replay import Overlap, Replay, followed, overlap
from book.trace import Event, Trace
from tests.test_backward import After, Bucketed, Each, backward, follow_ddp, follow_own, gradients, join

LINK = Link(1e-5, 1e9)
REPLAY = Replay(2e-9, LINK)
Program = list[tuple[str, int, bool]]  # ("ready", bytes, _) | ("send", bytes, whether the program waits for it)


def recorded(program: Program, world_size: int = 2, pace_s: tuple[float, ...] = (1.0,), **changes: object) -> Trace:
    """What a recorder would have recorded of `program`: one event every `pace_s` of the rank, which no model uses."""
    events = []
    for rank in range(world_size):
        bucket, num_ready, own = 0, 0, []
        for place, (what, num_bytes, waits) in enumerate(program):
            now_s = (place + 1) * pace_s[rank % len(pace_s)]
            if what == "ready":
                own.append(Event(rank, "compute", f"{place}", num_bytes=num_bytes, start_s=now_s - 0.5, end_s=now_s,
                                 bucket=bucket))
                num_ready += 1
            else:
                own.append(Event(rank, "collective", "all_reduce", group=tuple(range(world_size)), num_bytes=num_bytes,
                                 start_s=now_s, end_s=now_s + 100, bucket=bucket, waited=num_ready if waits else None))
                bucket += 1
        events += own
    return Trace([replace(event, **changes) for event in events], world_size, "measured", "recorded")


def buckets(*sizes: int, num_gradients: int = 2, waits: bool = False) -> Program:
    """Buckets of `sizes` bytes, each made of equal gradients and sent when full."""
    return [thing for size in sizes
            for thing in [("ready", size // num_gradients, False)] * num_gradients + [("send", size, waits)]]


def ends(trace: Trace, rank: int = 0) -> list[float]:
    return [event.end_s for event in gradients(trace, rank)]


def all_reduces(trace: Trace, rank: int = 0) -> list[Event]:
    """In the order they run."""
    return [event for event in trace.of_rank(rank) if event.kind == "collective"]


def runs(trace: Trace, rank: int = 0) -> list[float]:
    """The start and end of each all-reduce in turn."""
    return [time_s for event in all_reduces(trace, rank) for time_s in (event.start_s, event.end_s)]


def ring_s(num_bytes: float, world_size: int = 2) -> float:
    return ring_all_reduce_s(world_size, num_bytes, LINK)


# The model, by hand

def test_gradients_follow_one_another_and_all_reduces_run_one_at_a_time() -> None:
    trace = REPLAY(recorded(buckets(4000, 40000, 4000)))
    assert (trace.clock, trace.source, trace.world_size) == ("modelled", "recorded", 2)
    for rank in range(2):
        assert ends(trace, rank) == pytest.approx([4e-6, 8e-6, 48e-6, 88e-6, 92e-6, 96e-6])
        first, second = ring_s(4000), ring_s(40000)
        assert first == pytest.approx(24e-6) and second == pytest.approx(60e-6)
        assert runs(trace, rank) == pytest.approx([8e-6, 32e-6, 88e-6, 148e-6, 148e-6, 172e-6])
    found = overlap(trace)
    assert found.backward_s == pytest.approx(96e-6) and found.communication_s == pytest.approx(108e-6)
    assert found.hidden_s == pytest.approx(32e-6) and found.exposed_s == pytest.approx(76e-6)
    assert found.step_s == pytest.approx(172e-6)


def test_one_bucket_at_the_end_hides_nothing() -> None:
    found = overlap(REPLAY(recorded(buckets(8000, num_gradients=8))))
    assert (found.hidden_s, found.exposed_s) == pytest.approx((0, ring_s(8000)))
    assert found.step_s == pytest.approx(2e-9 * 8000 + ring_s(8000))


def test_a_straggler_holds_up_every_all_reduce() -> None:
    program = buckets(4000, 4000)
    slow = replace(REPLAY, slowdown={1: 10.0})(recorded(program))
    assert ends(slow, 0) == ends(REPLAY(recorded(program)), 0)
    assert ends(slow, 1) == pytest.approx([40e-6, 80e-6, 120e-6, 160e-6])
    assert runs(slow, 0) == runs(slow, 1) == pytest.approx([80e-6, 104e-6, 160e-6, 184e-6])
    assert overlap(slow).backward_s == pytest.approx(160e-6)  # of the slowest rank
    assert overlap(slow).hidden_s == pytest.approx(24e-6)


def test_waiting_in_the_hook_overlaps_nothing() -> None:
    trace = REPLAY(recorded(buckets(4000, 4000, waits=True)))
    assert ends(trace) == pytest.approx([4e-6, 8e-6, 36e-6, 40e-6])
    assert overlap(trace).hidden_s == 0 and overlap(trace).step_s == pytest.approx(64e-6)


def test_each_group_has_its_own_stream() -> None:
    events = []
    for rank, group in enumerate([(0, 1), (0, 1), (2, 3), (2, 3)]):
        events += [Event(rank, "compute", "w", num_bytes=1000 * (rank + 1), start_s=0.0, end_s=1.0, bucket=0),
                   Event(rank, "collective", "all_reduce", group=group, num_bytes=4000, start_s=2.0, bucket=0)]
    trace = REPLAY(Trace(events, 4, "measured", "recorded"))
    assert [runs(trace, rank)[0] for rank in range(4)] == pytest.approx([4e-6, 4e-6, 8e-6, 8e-6])


def test_a_new_pass_waits_for_the_buckets_of_the_previous_one() -> None:
    once = buckets(4000, num_gradients=1)
    events = []
    for number in range(2):
        for event in recorded(once).events:
            later_s = event.end_s + 10 * number if event.kind == "compute" else None
            events.append(replace(event, start_s=event.start_s + 10 * number, end_s=later_s))
    trace = REPLAY(Trace(events, 2, "measured", "recorded"))
    assert ends(trace) == pytest.approx([8e-6, 8e-6 + 24e-6 + 8e-6])
    assert overlap(trace).exposed_s == pytest.approx(48e-6)


def test_an_unknown_all_reduce_counts_if_gradients_were_sent_unknown() -> None:
    known = recorded([*buckets(4000), ("send", 4, False)])
    loss = [replace(event, bucket=None) if event.num_bytes == 4 else event for event in known.events]
    assert [event.num_bytes for event in all_reduces(REPLAY(Trace(loss, 2, "measured", "recorded")))] == [4000]
    unknown = recorded(buckets(4000), bucket=None)
    assert len(all_reduces(REPLAY(unknown))) == 1
    assert overlap(REPLAY(unknown)) == overlap(REPLAY(recorded(buckets(4000))))


def test_an_all_reduce_after_an_unsent_pass_does_not_carry_its_gradients() -> None:
    events = []
    for rank in range(2):
        events += [Event(rank, "compute", "w", num_bytes=4000, start_s=number, end_s=number + 0.5, bucket=bucket)
                   for number, bucket in enumerate([None, 0])]
        events += [Event(rank, "collective", "all_reduce", num_bytes=num_bytes, start_s=2.0 + number, bucket=bucket)
                   for number, (num_bytes, bucket) in enumerate([(4000, 0), (4, None)])]
    trace = REPLAY(Trace(events, 2, "measured", "recorded"))
    assert [event.num_bytes for event in all_reduces(trace)] == [4000]


# What can't be replayed

def test_a_trace_without_a_followed_backward_is_refused() -> None:
    alone = Event(0, "collective", "all_reduce", group=(0,), num_bytes=8, start_s=0.0)
    plain = Trace([alone], 1, "measured", "recorded")
    for ask in (REPLAY, overlap, followed):
        with pytest.raises(ValueError, match=r"follow_backward\(model\):` and launch with record=True"):
            ask(plain)


@pytest.mark.parametrize("change", [Trace.logical, REPLAY])
def test_a_trace_that_was_not_recorded_is_refused(change: object) -> None:
    with pytest.raises(ValueError, match="clock: replay the trace that was recorded, run.trace"):
        REPLAY(change(recorded(buckets(4000))))


def test_ranks_that_send_differently_are_refused() -> None:
    events = list(recorded(buckets(4000, 8000)).events)
    with pytest.raises(ValueError, match="rank 0 issued 2 all-reduces and rank 1 1: every rank of a group must"):
        REPLAY(Trace(events[:-1], 2, "measured", "recorded"))
    events[-1] = replace(events[-1], num_bytes=4)
    with pytest.raises(ValueError, match="all-reduce 1 has 8000 bytes on rank 0 and 4 on rank 1"):
        REPLAY(Trace(events, 2, "measured", "recorded"))


def test_buckets_not_sent_by_all_reduce_are_refused() -> None:
    gathered = [replace(event, op="all_gather") if event.kind == "collective" else event
                for event in recorded(buckets(4000)).events]
    with pytest.raises(ValueError, match="rank 0 sends bucket 0 by all_gather: only all-reduces can be replayed"):
        REPLAY(Trace(gathered, 2, "measured", "recorded"))


def test_waits_that_can_never_end_are_refused() -> None:
    """Rank 0 waits for the pair's first all-reduce before it issues the triple's; rank 1 does the reverse."""
    events = []
    for rank, order in enumerate([[(0, 1), (0, 1, 2)], [(0, 1, 2), (0, 1)], [(0, 1, 2)]]):
        for place, group in enumerate(order):
            events += [Event(rank, "compute", f"{place}", num_bytes=8, start_s=place, end_s=place + 0.2),
                       Event(rank, "collective", "all_reduce", group=group, num_bytes=8, start_s=place + 0.5,
                             bucket=place, waited=place + 1)]
    with pytest.raises(ValueError, match="waits for an all-reduce that another has yet to issue"):
        REPLAY(Trace(events, 3, "measured", "recorded"))


def test_an_all_reduce_that_never_ended_has_a_replay_but_no_overlap() -> None:
    hung = [replace(event, end_s=None) if event.kind == "collective" else event
            for event in recorded(buckets(4000)).events]
    trace = Trace(hung, 2, "measured", "recorded")
    assert overlap(REPLAY(trace)) == overlap(REPLAY(recorded(buckets(4000))))
    with pytest.raises(ValueError, match="did not end"):
        overlap(trace)


@pytest.mark.parametrize("arguments, complaint", [
    ((-1.0, LINK), "can't be negative"), ((float("nan"), LINK), "can't be negative"),
    ((1.0, LINK, {0: 0.0}), "positive factor")])
def test_an_invalid_model_is_refused(arguments: tuple, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        Replay(*arguments)


# Of any program

@st.composite
def programs(draw: st.DrawFn) -> Program:
    sizes = draw(st.lists(st.lists(st.integers(1, 10**6), min_size=1, max_size=4), min_size=1, max_size=6))
    waits = draw(st.lists(st.booleans(), min_size=len(sizes), max_size=len(sizes)))
    return [thing for own, wait in zip(sizes, waits)
            for thing in [*(("ready", size, False) for size in own), ("send", sum(own), wait)]]


models = st.builds(Replay, st.floats(1e-12, 1e-6), st.builds(Link, st.floats(0, 1e-3), st.floats(1e6, 1e12)),
                   st.dictionaries(st.integers(0, 3), st.floats(0.1, 10), max_size=2))


@settings(max_examples=60, deadline=None)
@given(programs(), st.integers(1, 4), models)
def test_a_replay_keeps_the_order_and_adds_up(program: Program, world_size: int, model: Replay) -> None:
    trace = model(recorded(program, world_size, pace_s=(1.0, 0.3)))
    for rank in range(world_size):
        ready, carried = gradients(trace, rank), all_reduces(trace, rank)
        assert [event.num_bytes for event in ready] == [size for what, size, _ in program if what == "ready"]
        assert [event.num_bytes for event in carried] == [size for what, size, _ in program if what == "send"]
        for events in (ready, carried):
            assert all(a.start_s <= a.end_s <= b.start_s for a, b in pairwise(events))
        for event in carried:
            assert event.start_s >= max(g.end_s for g in ready if g.bucket == event.bucket)
        assert runs(trace, rank) == runs(trace, 0)
    found = overlap(trace)
    assert found.hidden_s + found.exposed_s == pytest.approx(found.communication_s)
    assert 0 <= found.hidden_s <= found.backward_s * (1 + 1e-9)
    assert found.step_s >= max(found.backward_s, found.communication_s) * (1 - 1e-9)
    assert found.step_s <= (found.backward_s + found.communication_s) * (1 + 1e-9)


@settings(max_examples=60, deadline=None)
@given(programs(), models, st.floats(1, 100))
def test_nothing_gets_slower_with_faster_links_or_ranks(program: Program, model: Replay, factor: float) -> None:
    trace = recorded(program, 3)
    before_s = overlap(model(trace)).step_s
    link = Link(model.link.latency_s / factor, model.link.bandwidth_bytes_per_s * factor)
    for faster in (replace(model, link=link), replace(model, backward_s_per_byte=model.backward_s_per_byte / factor)):
        assert overlap(faster(trace)).step_s <= before_s * (1 + 1e-9)
    assert overlap(replace(model, slowdown={1: 1e3})(trace)).step_s >= before_s * (1 - 1e-9)


@settings(max_examples=30, deadline=None)
@given(programs(), models)
def test_measured_times_affect_only_the_order(program: Program, model: Replay) -> None:
    assert model(recorded(program, 3, (1.0, 0.1))) == model(recorded(program, 3, (7.0, 0.4, 2.0)))


# Of real ranks

def test_two_runs_of_one_program_have_one_replay() -> None:
    traces = [launch(follow_ddp, 2, (64,) * 5, {"bucket_cap_mb": 0.02}, record=True).trace for _ in range(2)]
    first, second = map(REPLAY, traces)
    assert first == second and first.to_json() == second.to_json()
    ready_s = list(accumulate(2e-9 * size for size in [256, 16384] * 4))
    assert ends(first) == pytest.approx(ready_s)
    assert runs(first)[:2] == pytest.approx([ready_s[3], ready_s[3] + ring_s(33280)])
    assert overlap(first).hidden_s == pytest.approx(min(ready_s[-1] - ready_s[3], ring_s(33280)))


def test_wrappers_differ_in_what_they_hide() -> None:
    """Waiting in hooks, or sending after backward, hides nothing, whatever the timing of the ranks' cores."""
    found = {}
    for wrapper, style in ((Each, "now"), (Each, "later"), (After, "each"), (After, "one copy"), (Bucketed, 1)):
        found[wrapper, style] = overlap(REPLAY(launch(follow_own, 2, wrapper, style, record=True).trace))
    hides = {key for key, value in found.items() if value.hidden_s > 1e-12}
    assert hides == {(Each, "later"), (Bucketed, 1)}
    num_bytes, num_each = 3 * 17 * 16 * 4, 6
    latency_s = ring_s(0)
    assert found[After, "one copy"].communication_s == pytest.approx(ring_s(num_bytes))
    assert found[After, "each"].communication_s == pytest.approx(ring_s(num_bytes) + (num_each - 1) * latency_s)
    assert {round(value.backward_s * 1e9) for value in found.values()} == {round(2e-9 * num_bytes * 1e9)}


class Checkpoints(Each):
    """Asynchronous all-reduces, and after each a barrier of another group: the program waits, but not for them."""

    def __init__(self, module: nn.Module, group: dist.ProcessGroup):
        super().__init__(module, "later")
        self.group = group

    def send(self, gradient: torch.Tensor) -> None:
        super().send(gradient)
        dist.barrier(group=self.group)


@pytest.mark.slow
def test_a_wait_for_something_else_keeps_the_overlap() -> None:
    def follow(style: str) -> None:
        layers = join(16, 16, 16, 16)
        model = Checkpoints(layers, dist.new_group()) if style == "barriers" else Each(layers, style)
        with follow_backward(model):
            backward(model)
            model.finish()
    waits, later, now = (REPLAY(launch(follow, 2, style, record=True).trace) for style in ("barriers", "later", "now"))
    assert waits == later and overlap(waits).hidden_s > 1e-6
    assert overlap(now).hidden_s == pytest.approx(0, abs=1e-12)


def test_own_buckets_replay_like_torchs() -> None:
    own = launch(follow_own, 2, Bucketed, 1, record=True).trace
    torchs = launch(follow_ddp, 2, (16,) * 4, {"bucket_cap_mb": 0.001}, record=True).trace
    assert REPLAY(own) == REPLAY(torchs) and len(all_reduces(REPLAY(own))) == 3


def test_a_recorded_trace_has_an_overlap_too() -> None:
    trace = launch(follow_ddp, 2, (64,) * 5, {"bucket_cap_mb": 0.02}, record=True).trace
    found = overlap(trace)
    assert isinstance(found, Overlap) and found.hidden_s + found.exposed_s == pytest.approx(found.communication_s)
    assert 0 < found.step_s < trace.duration_s
