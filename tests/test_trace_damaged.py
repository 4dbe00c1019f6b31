"""A trace's text may come from anywhere: damaged, it is refused in one sentence, or what is left of it plays."""
from __future__ import annotations

import copy
import json
import random

import pytest

from book.collectives import ring_all_reduce, tree_all_reduce
from book.cost import Link
from book.simulate import simulate
from book.trace import Trace, TraceError
from book.widgets import play

LINK = Link(latency_s=1e-5, bandwidth_bytes_per_s=1e9)
MODELLED = json.loads(simulate(ring_all_reduce(4), 1e6, LINK).to_json())
LOGICAL = json.loads(simulate(tree_all_reduce(4), 1e6, LINK).logical().to_json())
VALUES = [None, True, -1, 0, 3, 7, 10**9, 10**30, 1e308, -5.5, float("nan"), float("inf"), "", "send", [], [1], [None],
          [[1]], {}, {"a": 1}]


def damaged(rng: random.Random) -> str:
    """A trace's JSON with one fault: a field, a column or a value is lost, or has become something else."""
    data = copy.deepcopy(rng.choice([MODELLED, LOGICAL]))
    holder = data if rng.random() < 0.3 else data["events"]
    name = rng.choice(list(holder))
    if rng.random() < 0.1:
        holder.pop(name)
        return json.dumps(data)
    if holder is data["events"] and rng.random() < 0.9:
        holder, name = holder[name], rng.randrange(len(holder[name]))
        if isinstance(holder[name], list) and rng.random() < 0.5:
            holder, name = holder[name], rng.randrange(len(holder[name]))
    holder[name] = rng.choice(VALUES)
    return json.dumps(data)


def test_a_damaged_trace_is_refused_or_still_plays():
    num_refused = 0
    for seed in range(400):
        try:
            trace = Trace.from_json(damaged(random.Random(seed)))
        except TraceError as error:
            assert "\n" not in str(error) and len(str(error)) < 250, (seed, error)
            num_refused += 1
            continue
        try:
            play(trace)
        except ValueError as error:  # such as a trace whose sends are gone; anything else is an error of ours
            assert str(error).startswith("this trace"), (seed, error)
    assert num_refused > 200


@pytest.mark.parametrize("field, value, words", [
    ("rank", "0", "has rank '0', which must be a rank"),
    ("kind", None, "has kind None, which must be text"),
    ("chunk", 10**9, "has chunk 1000000000, which must be a whole number of at least 0 and not too large"),
    ("num_bytes", -1, "has num_bytes -1, which must be a number of bytes"),
    ("end_s", -1.0, "ends at -1.0 s, before it starts at"),
    ("contributions", [1, 1], "has 2 contributions, and there are 4 ranks"),
])
def test_an_invalid_value_is_named(field, value, words):
    data = copy.deepcopy(MODELLED)
    first = data["events"]["kind"].index("send")
    data["events"][field][first] = value
    with pytest.raises(TraceError, match=f"event {first} {words}"):
        Trace.from_json(json.dumps(data))


@pytest.mark.parametrize("field, value, words", [
    ("world_size", 10**30, "world_size must be a whole number up to 1048576"),
    ("name", 5, "name must be text, not 5"),
])
def test_an_invalid_header_is_named(field, value, words):
    with pytest.raises(TraceError, match=words):
        Trace.from_json(json.dumps({**MODELLED, field: value}))
