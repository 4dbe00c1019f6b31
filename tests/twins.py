"""The twin in a browser beside the package: drawn inputs, what each side makes of them, and where the two differ.

A job is a dictionary that goes to both sides as JSON: `what` it is ("collective", "moves", "pipeline", "order" or
"form"), the arguments, and how it is simulated. Either side answers with columns of events and some facts, or with the
words of its error.
"""
from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import fields
from typing import Any

import numpy as np

from book import pipelines
from book.collectives import COLLECTIVES, Collective
from book.columns import ABSENT
from book.cost import Link, Network, links
from book.promise import PROMISES
from book.schedule import OPS, Action, Move, PipelineSchedule, Schedule, ScheduleError
from book.simulate import simulate, simulate_pipeline
from book.trace import Event, Trace
from book.widgets.registry import ASSETS, TWIN

Job = dict[str, Any]
REL = 1e-12  # of times
BATCH = 50  # jobs in one call of the browser
PIPELINES = ("gpipe", "one_f_one_b", "interleaved", "zero_bubble")
SCRIPTS = "".join((ASSETS / f"{room}.js").read_text("utf-8") for room in TWIN)
# Answers a list of jobs as JSON text: Playwright would take long over so many small values.
ANSWER = """jobs => {
  const { schedule, links, network, collectives, pipelines, simulate } = globalThis.lockstepTwin;
  const linkOf = numbers => numbers && new links.Link(...numbers);
  const cards = ([ranks, inside, across, ...rest]) => {
    return new network.Network(ranks, linkOf(inside), linkOf(across), ...rest);
  };
  const made = {
    collective: job => collectives.COLLECTIVES[job.name].schedule(...job.arguments),
    moves: job => {
      const moves = new schedule.Moves();
      for (const move of job.moves) moves.add(...move);
      return new schedule.Schedule("drawn", job.world_size, job.num_chunks, moves, job.promise);
    },
    pipeline: job => pipelines[job.name](...job.arguments),
    order: job => {
      const actions = job.actions.map(([rank, stage, micro_batch, kind]) => ({ rank, stage, micro_batch, kind }));
      return new schedule.PipelineSchedule("drawn", job.num_stages, job.num_micro_batches, actions);
    },
  };
  const checked = what => {
    try {
      what.check();
      return "";
    } catch (error) {
      return error.message;
    }
  };
  const run = job => {
    const link = job.network ? cards(job.network) : linkOf(job.link);
    if (job.what === "form") {
      const among = job.collective ? collectives.COLLECTIVES[job.collective] : links;
      return { facts: [among[job.name](...job.arguments, ...(link ? [link] : []))] };
    }
    const made_ = made[job.what](job);
    const check = job.check ? checked(made_) : "";
    const { slowdown, contributions, num_bytes } = job;
    if (made_ instanceof schedule.Schedule) {
      const own = job.links.map(([src, dst, numbers]) => [src, dst, linkOf(numbers)]);
      const left = simulate.simulate(made_, num_bytes, link, { slowdown, links: own, contributions });
      const duration_s = simulate.durationOf(made_, num_bytes, link, { slowdown, links: own });
      if (duration_s !== (left.duration_s ?? 0)) throw new Error(`durationOf says ${duration_s}`);
      const facts = [made_.num_chunks, made_.num_steps, left.duration_s, ...made_.sent_bytes(num_bytes)];
      return { check, facts, events: JSON.parse(left.to_json()).events };
    }
    const options = { num_bytes, slowdown };
    const { forward_s, backward_s, weight_s } = job;
    const left = simulate.simulate_pipeline(made_, forward_s, backward_s, weight_s, link, options);
    const facts = [made_.world_size, left.duration_s, ...made_.peak_in_flight()];
    return { check, facts, events: JSON.parse(left.to_json()).events };
  };
  return JSON.stringify(jobs.map(job => {
    try {
      return run(job);
    } catch (error) {
      if (!(error instanceof schedule.ScheduleError || error instanceof RangeError)) throw error;
      return { error: error.name === "ScheduleError" ? error.message : "ValueError" };
    }
  }));
}"""


# what Python makes of a job
def python_answer(job: Job) -> Job:
    """The columns and facts that the package makes of a job, or its error."""
    try:
        return _run(job)
    except ScheduleError as error:
        return {"error": str(error)}
    except ValueError:
        return {"error": "ValueError"}


def _run(job: Job) -> Job:
    link: Any = Link(*job["link"]) if job["link"] else None
    if job.get("network"):
        ranks, inside, across, *rest = job["network"]
        link = Network(ranks, Link(*inside), Link(*across), *rest)
    if job["what"] == "form":
        among = COLLECTIVES[job["collective"]] if job["collective"] else links
        return {"facts": [getattr(among, job["name"])(*job["arguments"], *([link] if link else []))]}
    made = _made(job)
    check = _checked(made) if job["check"] else ""
    slowdown = {int(rank): factor for rank, factor in job["slowdown"].items()}
    if isinstance(made, Schedule):
        own = {(src, dst): Link(*numbers) for src, dst, numbers in job["links"]}
        left = simulate(made, job["num_bytes"], link, slowdown=slowdown, links=own, contributions=job["contributions"])
        facts = [made.num_chunks, made.num_steps, left.duration_s, *made.sent_bytes(job["num_bytes"])]
    else:
        left = simulate_pipeline(made, job["forward_s"], job["backward_s"], job["weight_s"], link,
                                 num_bytes=job["num_bytes"], slowdown=slowdown)
        facts = [made.world_size, left.duration_s, *made.peak_in_flight()]
    return {"check": check, "facts": facts, "events": columns_of(left)}


def _made(job: Job) -> Schedule | PipelineSchedule:
    if job["what"] == "collective":
        return COLLECTIVES[job["name"]].schedule(*job["arguments"])
    if job["what"] == "pipeline":
        return getattr(pipelines, job["name"])(*job["arguments"])
    if job["what"] == "moves":
        moves = [Move(*move) for move in job["moves"]]
        return Schedule("drawn", job["world_size"], job["num_chunks"], moves, job["promise"])
    actions = [Action(*action) for action in job["actions"]]
    return PipelineSchedule("drawn", job["num_stages"], job["num_micro_batches"], actions)


def _checked(made: Schedule | PipelineSchedule) -> str:
    try:
        made.check()
    except ScheduleError as error:
        return str(error)
    return ""


def columns_of(trace: Trace) -> dict[str, Any]:
    """A trace's events as columns: words as lists, numbers as arrays (-1 or NaN where an event has none)."""
    return {f.name: _column(trace, f.name) for f in fields(Event) if trace.events.has(f.name)}


def _column(trace: Trace, name: str) -> Any:
    array = trace.events.array(name)
    if name not in trace.events.vocabularies:
        return array
    words = [*trace.events.vocabularies[name], None]  # -1 is the last one
    return [words[code] for code in array]


# where the two differ
def differences(job: Job, python: Job, script: Job) -> list[str]:
    """In words where the answer of the twin's script is another than Python's; the first few events of many."""
    if "error" in python or "error" in script:
        both = python.get("error"), script.get("error")
        return [] if both[0] == both[1] else [f"Python says {both[0]!r}, JavaScript {both[1]!r}"]
    if python.get("check", "") != script.get("check", ""):
        return [f"check() says {python['check']!r} in Python, {script['check']!r} in JavaScript"]
    found = [f"fact {i}: {a} in Python, {b} in JavaScript"
             for i, (a, b) in enumerate(zip(python["facts"], script["facts"], strict=True)) if not _close(a, b)]
    return found + _differing_events(python.get("events", {}), script.get("events", {}))


def _close(a: float | None, b: float | None) -> bool:
    if a is None or b is None:
        return a == b or (a or b) == 0  # a schedule without moves
    return abs(a - b) <= REL * max(abs(a), abs(b))


def _differing_events(python: dict[str, Any], script: dict[str, Any]) -> list[str]:
    found = []
    named = {name for name, column in script.items() if any(value is not None for value in column)}
    if named != python.keys():
        return [f"Python has the fields {sorted(python)}, JavaScript {sorted(named)}"]
    for name, column in python.items():
        other = script[name]
        if len(column) != len(other):
            return [f"Python has {len(column)} events, JavaScript {len(other)}"]
        for i in np.flatnonzero(_unequal(column, other))[:2]:
            what = f"{script['kind'][i]} of rank {script['rank'][i]}"
            found.append(f"event {i} ({what}): {name} is {column[i]} in Python, {other[i]} in JavaScript")
    return found


def _unequal(column: Any, other: list[Any]) -> np.ndarray:
    """Which values differ: words and whole numbers at all, others by more than the tolerance."""
    if isinstance(column, list):
        return np.array([a != b for a, b in zip(column, other)], dtype=bool)
    if column.dtype.kind == "i":
        return column != np.array([ABSENT if value is None else value for value in other])
    if column.ndim == 2:
        return (column != np.array(other, dtype=np.float64)).any(axis=1)
    values = np.array([np.nan if value is None else value for value in other], dtype=np.float64)
    near = np.abs(column - values) <= REL * np.maximum(np.abs(column), np.abs(values))
    return ~(near | (np.isnan(column) & np.isnan(values)))


# jobs
def drawn(seed: int, num_jobs: int) -> Iterator[Job]:
    """Jobs of all kinds, the same for a seed."""
    draw = random.Random(seed)
    kinds = {_collective: 8, _moves: 4, _pipeline: 6, _order: 2, _form: 4}
    for make in draw.choices(list(kinds), kinds.values(), k=num_jobs):
        yield make(draw)


def _size(draw: random.Random, most: int = 64) -> int:
    """A number of ranks or stages: mostly small, as large ones take long."""
    return draw.randint(1, draw.choices((6, 14, 32, most), (50, 30, 12, 8))[0])


def _seconds(draw: random.Random, longest: float = 1e-2) -> float:
    return draw.choice((0.0, longest * 10 ** draw.uniform(-5, 0), longest * 10 ** draw.uniform(-5, 0)))


def _link(draw: random.Random) -> list[float]:
    return [_seconds(draw, 1e-3), 10 ** draw.uniform(5, 12), draw.choice((0.0, 10 ** draw.uniform(-12, -8)))]


def _slowdown(draw: random.Random, num_ranks: int) -> dict[str, float]:
    """Up to two stragglers, and now and then a rank or a factor that cannot be."""
    chosen = [(draw.randrange(num_ranks), draw.uniform(0.3, 8)) for _ in range(draw.choice((0, 0, 1, 2)))]
    if draw.random() < 0.02:
        chosen.append(draw.choice(((num_ranks, 2.0), (0, 0.0), (0, -1.0))))
    return {str(rank): factor for rank, factor in chosen}


def _links(draw: random.Random, num_ranks: int) -> list[Any]:
    """Links of a few pairs of their own."""
    pairs = {(draw.randrange(num_ranks), draw.randrange(num_ranks)) for _ in range(draw.choice((0, 0, 1, 4, 12)))}
    return [[src, dst, _link(draw)] for src, dst in sorted(pairs) if src != dst or draw.random() < 0.01]


def _network(draw: random.Random) -> list[Any]:
    """Nodes with shared cards, some behind a switch that can't carry what all of them can."""
    ranks_per_node = draw.choice((1, 2, 4, 8))
    across = _link(draw)
    shared = [ranks_per_node, _link(draw), across, draw.randint(1, ranks_per_node + (draw.random() < 0.05))]
    return [*shared, across[1] * draw.uniform(0.5, 8)] if draw.random() < 0.3 else shared


def _simulated(draw: random.Random, num_ranks: int) -> Job:
    watched = num_ranks <= 12 and draw.random() < 0.4
    num_bytes = draw.choice((0.0, 1.0, 10 ** draw.uniform(0, 10), float(draw.randrange(10**9))))
    shared = _network(draw) if num_ranks <= 16 and draw.random() < 0.2 else None
    own = [] if shared and draw.random() < 0.95 else _links(draw, num_ranks)
    return {"num_bytes": -1.0 if draw.random() < 0.01 else num_bytes, "link": _link(draw), "check": watched,
            "network": shared, "slowdown": _slowdown(draw, num_ranks), "links": own, "contributions": watched}


def _sized(draw: random.Random, collective: Collective) -> tuple[int, tuple[int, ...]]:
    """A world size that a collective is defined on, and arguments for it."""
    while not (choices := collective.sizes(world_size := _size(draw))):
        pass
    return world_size, draw.choice(choices)


def _collective(draw: random.Random) -> Job:
    collective = COLLECTIVES[draw.choice(list(COLLECTIVES))]
    world_size, arguments = _sized(draw, collective)
    if draw.random() < 0.02:
        arguments = tuple(0 for _ in arguments)
    return {"what": "collective", "name": collective.name, "arguments": arguments, **_simulated(draw, world_size)}


def _moves(draw: random.Random) -> Job:
    """Moves that nobody planned: several chunks in a message, a port for two messages of a step, what cannot be."""
    world_size, num_chunks = draw.randint(2, 7), draw.randint(1, 9)
    odd = draw.random() < 0.1  # some are wrong
    moves = []
    for _ in range(draw.choice((0, 3, 12, 40))):
        src, dst = draw.sample(range(world_size), 2)
        if odd and draw.random() < 0.1:
            src, dst = draw.choice(((src, src), (world_size, dst), (src, -1)))
        into = draw.choice((None, None, None, draw.randrange(num_chunks + odd)))
        moves.append([draw.randrange(6), src, dst, draw.randrange(num_chunks), draw.choice(OPS), into])
    return {"what": "moves", "world_size": world_size, "num_chunks": num_chunks, "moves": moves,
            "promise": draw.choice([*PROMISES]), **_simulated(draw, world_size), "contributions": True, "check": True}


def _lengths(draw: random.Random, num_ranks: int) -> Job:
    forward_s = 10 ** draw.uniform(-6, 0)
    backward_s = forward_s * draw.choice((1.0, 2.0, draw.uniform(0, 4)))
    weight_s = draw.choice((None, backward_s * draw.random(), backward_s * draw.choice((0.0, 1.0, 1.5))))
    return {"forward_s": forward_s, "backward_s": backward_s, "weight_s": weight_s, "check": True,
            "link": draw.choice((None, _link(draw))), "num_bytes": draw.choice((0.0, 10 ** draw.uniform(0, 9))),
            "slowdown": _slowdown(draw, num_ranks)}


def _pipeline(draw: random.Random) -> Job:
    name = draw.choice(PIPELINES)
    num_ranks = min(_size(draw), 16) if draw.random() < 0.98 else 64
    per_rank = {"interleaved": draw.randint(1, 4), "zero_bubble": 2}.get(name, 1)
    micro_batches = draw.randint(1, 24 if num_ranks < 9 else 6)
    if name == "interleaved" and draw.random() < 0.9:
        micro_batches = num_ranks * draw.randint(1, 3)
    stages = num_ranks * per_rank - (draw.random() < 0.03)
    arguments = [stages, micro_batches, *([per_rank] if name == "interleaved" else [])]
    return {"what": "pipeline", "name": name, "arguments": arguments, **_lengths(draw, num_ranks)}


def _order(draw: random.Random) -> Job:
    """An order that can run, drawn action by action; or one that is shuffled, or wrong."""
    num_stages, num_micro_batches, num_ranks = draw.randint(1, 6), draw.randint(1, 5), draw.randint(1, 4)
    home = [draw.randrange(num_ranks) for _ in range(num_stages)]
    kinds = draw.choice(("FB", "FIW"))
    left = [(stage, m, kind) for stage in range(num_stages) for m in range(num_micro_batches) for kind in kinds]
    done: set[Any] = set()
    actions = []
    while left:
        ready = [one for one in left if all(work in done for work, _ in Action(0, *one).needs(num_stages))]
        one = draw.choice(ready)
        left.remove(one)
        done.update(Action(0, *one).gives())
        actions.append([home[one[0]], *one])
    wrong = draw.random()
    if wrong < 0.2:
        draw.shuffle(actions)
    elif wrong < 0.4:
        draw.choice(actions)[draw.randrange(4)] = draw.choice((0, 1, num_stages, "F", "B"))
        actions = [action for action in actions if isinstance(action[3], str) and all(
            isinstance(value, int) for value in action[:3])]
    elif wrong < 0.5:
        actions.pop()
    return {"what": "order", "num_stages": num_stages, "num_micro_batches": num_micro_batches, "actions": actions,
            **_lengths(draw, num_ranks)}


def _form(draw: random.Random) -> Job:
    """A closed form: one that a collective's record has, or another of `links`."""
    num_bytes = 10 ** draw.uniform(0, 11)
    if draw.random() < 0.8:
        name = "time_s" if draw.random() < 0.9 else "sent_bytes"
        collective = draw.choice([each for each in COLLECTIVES.values() if getattr(each, name)])
        arguments = [*_sized(draw, collective)[1], num_bytes]
        link = _link(draw) if name == "time_s" else None
        return {"what": "form", "collective": collective.name, "name": name, "arguments": arguments, "link": link}
    world_size = _size(draw)
    name, arguments, link = draw.choice((
        ("pipeline_bubble", [world_size, draw.randint(1, 64), draw.randint(1, 4)], None),
        ("latency_bound_s", [world_size], _link(draw)), ("bandwidth_bound_s", [world_size, num_bytes], _link(draw)),
        ("bus_bandwidth_bytes_per_s", [draw.choice([*links.BUS_FACTORS, "dance"]), world_size, num_bytes, 0.5], None)))
    return {"what": "form", "collective": "", "name": name, "arguments": arguments, "link": link}


def script_answers(page: Any, jobs: list[Job]) -> list[Job]:
    """What the twin's scripts on a page make of jobs."""
    parts = [jobs[first:first + BATCH] for first in range(0, len(jobs), BATCH)]
    return [answer for part in parts for answer in json.loads(page.evaluate(ANSWER, part))]
