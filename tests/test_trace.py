"""Traces: JSON both ways, the logical order, Chrome's format."""
import json
import random

import pytest

from book import collectives
from book.cost import Link
from book.simulate import simulate
from book.trace import Event, Trace, TraceError

LINK = Link(1e-5, 1e9)


def ring(world_size=4, **kwargs):
    return simulate(collectives.ring_all_reduce(world_size), 1e6, LINK, **kwargs)


def test_json_round_trip():
    events = [Event(0, "hold", chunk=0, step=0, contributions=(1, 0)), Event(1, "hold", chunk=0, step=0),
              Event(0, "send", peer=1, chunk=0, step=0, num_bytes=2.5, start_s=0.0, end_s=1.5, contributions=(1, 0.5)),
              Event(1, "collective", op="all_reduce", group=(0, 1), num_bytes=8, start_s=2.0)]
    trace = Trace(events, 2, "measured", "recorded", backend="gloo")
    assert list(trace.events) == events
    assert Trace.from_json(trace.to_json()) == trace
    assert Trace.from_json(ring().to_json()) == ring()


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format": "lockstep trace 9"}', '{"format":"lockstep trace 1"}'])
def test_something_else_is_not_a_trace(text):
    with pytest.raises(TraceError, match="not a trace's JSON"):
        Trace.from_json(text)


def test_logical_drops_times_and_the_order_of_arrival():
    trace = ring()
    events = list(trace.events)
    random.Random(5).shuffle(events)
    shuffled = Trace(events, 4, "modelled", "simulated", name=trace.name, promise=trace.promise)
    assert shuffled.logical() == trace.logical() == ring(slowdown={2: 9.0}).logical()
    assert trace.logical().duration_s is None and trace.logical().clock == "logical"


def test_logical_of_another_program_differs():
    other = simulate(collectives.tree_all_reduce(4), 1e6, LINK)
    assert other.logical() != ring().logical()


def test_chrome_has_a_slice_per_message_end_in_microseconds():
    slices = [e for e in json.loads(ring().to_chrome())["traceEvents"] if e["ph"] == "X"]
    assert len(slices) == 2 * 24
    assert max(e["ts"] + e["dur"] for e in slices) == pytest.approx(ring().duration_s * 1e6)
    assert slices[0]["name"] == "send chunk 0" and slices[0]["args"]["peer"] == 1
    logical = json.loads(ring().logical().to_chrome())["traceEvents"]
    assert max(e["ts"] + e["dur"] for e in logical if e["ph"] == "X") == 6


@pytest.mark.parametrize("arguments", [("sundial", "simulated"), ("measured", "invented")])
def test_an_invalid_clock_or_source_is_refused(arguments):
    with pytest.raises(TraceError, match="must be one of"):
        Trace([], 1, *arguments)


def test_an_empty_trace_has_no_steps_and_no_duration():
    trace = Trace([], 2, "measured", "recorded")
    assert (trace.num_steps, trace.num_chunks, trace.duration_s, trace.held()) == (0, 0, None, {})
    assert trace.sent_bytes().tolist() == [0, 0] and len(trace.logical().events) == 0


@pytest.mark.parametrize("event, complaint", [
    (Event(0, "snd"), "kind must be one of"), (Event(2, "send"), "has rank 2: ranks are 0 to 1"),
    (Event(0, "send", peer=5), "has peer 5"), (Event(0.5, "send"), "rank must be a whole number"),
    (Event(0, "hold", contributions=()), "same number of entries")])
def test_an_invalid_event_is_refused(event, complaint):
    with pytest.raises(TraceError, match=complaint):
        Trace([event], 2, "measured", "recorded")


def test_contributions_of_different_length_are_refused():
    with pytest.raises(TraceError, match="same number of entries"):
        Trace([Event(0, "hold", contributions=(1, 0)), Event(1, "hold", contributions=(1,))], 2, "measured", "recorded")


@pytest.mark.parametrize("world_size", [0, "2", True, 1.5])
def test_an_invalid_world_size_is_refused(world_size):
    with pytest.raises(TraceError, match="world_size must be a whole number"):
        Trace([], world_size, "measured", "recorded")


def test_a_bucket_goes_with_its_gradients_and_its_all_reduce():
    events = [Event(0, "compute", "2.weight", step=0, num_bytes=8, start_s=0.0, end_s=1.0, bucket=0),
              Event(0, "compute", "0.weight", step=0, num_bytes=8, start_s=1.0, end_s=2.0),
              Event(0, "collective", "all_reduce", step=0, num_bytes=8, start_s=1.0, end_s=3.0, bucket=0)]
    trace = Trace(events, 1, "measured", "recorded")
    assert Trace.from_json(trace.to_json()) == trace
    assert [event.bucket for event in trace.logical().events] == [0, 0, None]
    buckets = [e["args"].get("bucket") for e in json.loads(trace.to_chrome())["traceEvents"] if e["ph"] == "X"]
    assert buckets == [0, None, 0]
    with pytest.raises(TraceError, match="bucket must be a whole number"):
        Trace([Event(0, "compute", bucket=0.5)], 1, "measured", "recorded")


def test_columns_of_different_length_are_not_a_trace():
    text = ring().to_json().replace('"rank":[0,', '"rank":[')
    with pytest.raises(TraceError, match="not a trace's JSON"):
        Trace.from_json(text)


def test_a_hang_has_no_duration_but_a_timeline():
    """The reader's case: nothing completed, so no event has an end."""
    waiting = Trace([Event(r, "recv", peer=1 - r, step=0, start_s=0.1 * r) for r in (0, 1)], 2, "measured", "recorded")
    assert waiting.duration_s is None
    assert waiting.to_chrome() and waiting.logical().num_steps == 1
