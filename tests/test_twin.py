"""The twin in JavaScript against the package: what pages use of it, on drawn inputs, and the traces that both read."""
from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from book import collectives, pipelines
from book.collectives import COLLECTIVES
from book.cost import Link, links
from book.schedule import OPS, Move, Schedule
from book.simulate import simulate, simulate_pipeline
from book.trace import Trace
from book.widgets.registry import TWIN, WIDGETS, loaded, path_of, plain, text_of
from tests.browser import page_with
from tests.players import first
from tests.website import ROOT

Job = dict[str, Any]
REL = 1e-12  # of times
JOBS_OF_A_SEED = 400
ALL_REDUCES = ("parameter_server_all_reduce", "tree_all_reduce", "ring_all_reduce", "halving_doubling_all_reduce")
PIPELINES = ("gpipe", "one_f_one_b", "interleaved", "zero_bubble")
FORMS = ("ring_all_gather_s", "ring_all_reduce_s", "ring_sent_bytes", "pipeline_bubble")
# Answers a list of jobs as JSON text: Playwright would take long over so many small values.
ANSWER = """jobs => {
  const { schedule, links, collectives, pipelines, simulate } = globalThis.lockstep;
  const linkOf = numbers => numbers && new links.Link(...numbers);
  const drawn = ({ world_size, num_chunks, moves }) => {
    const columns = new schedule.Moves();
    for (const move of moves) columns.add(...move);
    return new schedule.Schedule(world_size, num_chunks, columns);
  };
  const run = job => {
    const link = linkOf(job.link);
    if (job.what === "form") return { facts: [links[job.name](...job.arguments, ...(link ? [link] : []))] };
    if (job.what === "pipeline") {
      const order = pipelines[job.name](...job.arguments);
      const times = pipelines.actionTimes(order, job.forward_s, job.backward_s, link).map(({ action, ...at }) => {
        const { rank, stage, micro_batch, kind } = action;
        return [rank, stage, micro_batch, kind, at.start_s, at.end_s];
      });
      return { facts: order.peak_in_flight(), times };
    }
    const made = job.what === "moves" ? drawn(job) : collectives[job.name](job.world_size);
    const options = { slowdown: job.slowdown, links: job.links.map(([src, dst, own]) => [src, dst, linkOf(own)]) };
    const { start_s, done_s } = simulate.moveTimes(made, job.num_bytes, link, options);
    const duration_s = simulate.durationOf(made, job.num_bytes, link, options);
    const { moves } = made;
    const times = [...made.replay()].map(([i, sent, after]) => {
      const row = [moves.src[i], moves.dst[i], moves.chunk[i], moves.step[i], schedule.OPS[moves.op[i]]];
      return [...row, sent.join(), after.join(), start_s[i], done_s[i]];
    });
    return { facts: [made.num_chunks, made.num_steps, duration_s, ...made.sent_bytes(job.num_bytes)], times };
  };
  return JSON.stringify(jobs.map(run));
}"""


def rooms() -> list[str]:
    """The twin's scripts, in the order in which they load."""
    return [script for script in loaded(set(WIDGETS)) if path_of(script).parent == TWIN]


@pytest.fixture
def twin(browser: Any) -> Iterator[Any]:
    """A page with the twin's scripts and nothing else."""
    with page_with(browser, "".join(map(plain, rooms()))) as page:
        yield page


# what Python makes of a job
def python_answer(job: Job) -> Job:
    """Facts, and rows of what happens: words and numbers, then when it starts and ends."""
    link: Any = Link(*job["link"]) if job["link"] else None
    if job["what"] == "form":
        return {"facts": [getattr(links, job["name"])(*job["arguments"], *([link] if link else []))]}
    if job["what"] == "pipeline":
        order = getattr(pipelines, job["name"])(*job["arguments"])
        left = simulate_pipeline(order, job["forward_s"], job["backward_s"], None, link, num_bytes=0)
        return {"facts": order.peak_in_flight(), "times": [
            [e.rank, e.stage, e.micro_batch, e.op, e.start_s, e.end_s] for e in left.of_kind("compute")]}
    return _moved(_schedule(job), job, link)


def _schedule(job: Job) -> Schedule:
    if job["what"] == "collective":
        return COLLECTIVES[job["name"]].schedule(job["world_size"])
    return Schedule("drawn", job["world_size"], job["num_chunks"], [Move(*move) for move in job["moves"]], "all_reduce")


def _moved(made: Schedule, job: Job, link: Link) -> Job:
    own = {(src, dst): Link(*numbers) for src, dst, numbers in job["links"]}
    slowdown = {int(rank): factor for rank, factor in job["slowdown"].items()}
    left = simulate(made, job["num_bytes"], link, slowdown=slowdown, links=own, contributions=True)
    sends, recvs = ([e for e in left.events if e.kind == kind] for kind in ("send", "recv"))
    times = [[s.rank, r.rank, s.chunk, s.step, r.op, _joined(s), _joined(r), s.start_s, r.end_s]
             for s, r in zip(sends, recvs, strict=True)]
    sent = made.sent_bytes(job["num_bytes"])
    return {"facts": [made.num_chunks, made.num_steps, left.duration_s or 0, *sent], "times": times}


def _joined(event: Any) -> str:
    return ",".join(f"{times:.0f}" for times in event.contributions)


# where the two differ
def differences(job: Job, python: Job, script: Job) -> list[str]:
    """In words where the answer of the twin's script is another than Python's; the first few rows of many."""
    found = [f"fact {i}: {a} in Python, {b} in JavaScript"
             for i, (a, b) in enumerate(zip(python["facts"], script["facts"], strict=True)) if not _close(a, b)]
    both = [sorted(one.get("times", []), key=lambda row: list(map(str, row[:-2]))) for one in (python, script)]
    if len(both[0]) != len(both[1]):
        return [*found, f"Python has {len(both[0])} rows, JavaScript {len(both[1])}"]
    rows = [f"{a} in Python, {b} in JavaScript" for a, b in zip(*both)
            if a[:-2] != b[:-2] or not all(map(_close, a[-2:], b[-2:]))]
    return found + rows[:2]


def _close(a: float, b: float) -> bool:
    return abs(a - b) <= REL * max(abs(a), abs(b))


# jobs
def drawn(seed: int, num_jobs: int) -> Iterator[Job]:
    """Jobs of all kinds, the same for a seed."""
    draw = random.Random(seed)
    kinds = {_collective: 8, _moves: 4, _pipeline: 6, _form: 3}
    for make in draw.choices(list(kinds), kinds.values(), k=num_jobs):
        yield make(draw)


def _size(draw: random.Random, most: int = 64) -> int:
    """A number of ranks or stages: mostly small, as large ones take long."""
    return draw.randint(1, draw.choices((6, 14, 32, most), (50, 30, 14, 6))[0])


def _link(draw: random.Random) -> list[float]:
    return [draw.choice((0.0, 10 ** draw.uniform(-7, -3))), 10 ** draw.uniform(5, 12)]


def _simulated(draw: random.Random, num_ranks: int) -> Job:
    """Up to two stragglers, and links of a few pairs of their own."""
    slow = {str(draw.randrange(num_ranks)): draw.uniform(0.3, 8) for _ in range(draw.choice((0, 0, 1, 2)))}
    pairs = {(draw.randrange(num_ranks), draw.randrange(num_ranks)) for _ in range(draw.choice((0, 0, 1, 4, 12)))}
    num_bytes = draw.choice((0.0, 1.0, 10 ** draw.uniform(0, 10), float(draw.randrange(10**9))))
    return {"num_bytes": num_bytes, "link": _link(draw), "slowdown": slow, "world_size": num_ranks,
            "links": [[src, dst, _link(draw)] for src, dst in sorted(pairs) if src != dst]}


def _collective(draw: random.Random) -> Job:
    return {"what": "collective", "name": draw.choice(ALL_REDUCES), **_simulated(draw, _size(draw))}


def _moves(draw: random.Random) -> Job:
    """Moves that nobody planned: several chunks in a message, a port for two messages of a step."""
    world_size, num_chunks = draw.randint(2, 7), draw.randint(1, 9)
    moves = [[draw.randrange(6), *draw.sample(range(world_size), 2), draw.randrange(num_chunks), draw.choice(OPS)]
             for _ in range(draw.choice((0, 3, 12, 40)))]
    return {"what": "moves", "num_chunks": num_chunks, "moves": moves, **_simulated(draw, world_size)}


def _pipeline(draw: random.Random) -> Job:
    name, num_ranks = draw.choice(PIPELINES), min(_size(draw), 16)
    per_rank = {"interleaved": draw.randint(1, 4), "zero_bubble": 2}.get(name, 1)
    batches = draw.randint(1, 24 if num_ranks < 9 else 6)
    arguments = [num_ranks * per_rank, batches]
    if name == "interleaved":
        arguments = [num_ranks * per_rank, num_ranks * draw.randint(1, 3), per_rank]
    forward_s = 10 ** draw.uniform(-6, 0)
    return {"what": "pipeline", "name": name, "arguments": arguments, "forward_s": forward_s,
            "backward_s": forward_s * draw.uniform(0, 4), "link": draw.choice((None, _link(draw)))}


def _form(draw: random.Random) -> Job:
    name, num_ranks, num_bytes = draw.choice(FORMS), _size(draw), 10 ** draw.uniform(0, 11)
    arguments = [num_ranks, draw.randint(1, 64), draw.randint(1, 4)] if name == FORMS[-1] else [num_ranks, num_bytes]
    return {"what": "form", "name": name, "arguments": arguments, "link": _link(draw) if name[-2:] == "_s" else None}


@pytest.mark.parametrize("seed", first(*range(4)))
def test_both_make_the_same_of_drawn_inputs(twin: Any, seed: int) -> None:
    """All-reduces, moves that nobody planned, pipelines, closed forms."""
    jobs = list(drawn(seed, JOBS_OF_A_SEED))
    print(f"seed {seed}: {len(jobs)} inputs")
    answers = zip(jobs, map(python_answer, jobs), json.loads(twin.evaluate(ANSWER, jobs)), strict=True)
    found = {json.dumps(job): fault for job, python, script in answers if (fault := differences(job, python, script))}
    assert not found, "\n".join(f"{words}\n  of {job:.400}" for job, words in list(found.items())[:3])


def test_drawn_inputs_are_of_every_kind() -> None:
    jobs = list(drawn(0, 2000))
    assert {job.get("name", job["what"]) for job in jobs} == {*ALL_REDUCES, *PIPELINES, *FORMS, "moves"}
    sizes = [job["world_size"] for job in jobs if job["what"] == "collective"]
    assert {1, 2, 3} < set(sizes) and max(sizes) > 60
    for option in ("slowdown", "links", "link"):
        assert {bool(job.get(option)) for job in jobs} == {True, False}, option


def test_a_difference_is_seen_and_named() -> None:
    job = next(job for job in drawn(0, 2000) if job.get("name") == "ring_all_reduce" and 2 < job["world_size"] < 6
               and job["num_bytes"] > 0)
    python = python_answer(job)
    script = json.loads(json.dumps(python))
    assert not differences(job, python, script)
    script["times"][3][-1] *= 1 + 1e-11
    script["facts"][0] += 1
    few, late = differences(job, python, script)
    assert few == f"fact 0: {job['world_size']} in Python, {job['world_size'] + 1} in JavaScript"
    assert late.startswith(f"[{python['times'][3][0]}, ") and " in Python, [" in late


# recordings that a reader drops on a page
SLOW, LINK = {1: 3.0}, Link(2e-6, 1e9, 1e-10)
TRACES: dict[str, Callable[[], Trace]] = {
    "ring_all_reduce_3": lambda: simulate(collectives.ring_all_reduce(3), 3e6, LINK, slowdown=SLOW),
    "hierarchical_all_reduce_2_2": lambda: simulate(
        collectives.hierarchical_all_reduce(2, 2), 4e6, LINK, links={(0, 2): Link(1e-5, 1e8), (3, 1): Link(1e-5, 1e8)}),
    "one_f_one_b_2_3": lambda: simulate_pipeline(pipelines.one_f_one_b(2, 3), 1e-3, 2e-3, link=LINK, num_bytes=1e5),
    "zero_bubble_4_3": lambda: simulate_pipeline(pipelines.zero_bubble(4, 3), 1e-3, 2e-3, 5e-4, slowdown=SLOW),
}
READ = """text => {
  const read = globalThis.lockstep.trace.Trace.from_json(text);
  const events = Array.from({ length: read.num_events }, (_, i) => read.event(i));
  return [read.world_size, events.map(e => [e.kind, e.rank, e.peer ?? null, e.start_s]), read.message_bytes()];
}"""


def test_both_read_the_golden_traces(twin: Any) -> None:
    """They are in tests/golden/traces, as `to_json` wrote them."""
    texts = {path.stem: path.read_text("utf-8").strip() for path in (ROOT / "tests/golden/traces").glob("*.json")}
    assert texts.keys() == TRACES.keys()
    for name, text in texts.items():
        assert TRACES[name]().to_json() == text, name
        golden = Trace.from_json(text)
        events = [[e.kind, e.rank, e.peer, e.start_s] for e in golden.events]
        assert twin.evaluate(READ, text) == [golden.world_size, events, golden.message_bytes().tolist()], name


@pytest.mark.parametrize("text, words", [
    ("no JSON", "this is not a trace's JSON (write one with to_json): "),
    ('{"traceEvents": []}', "this is not a trace's JSON (write one with to_json)"),
    ('{"format": "lockstep trace 1", "world_size": 2, "clock": "modelled", "source": "simulated", '
     '"events": {"rank": [0, 2], "kind": ["hold", "hold"]}}', "event 1 has rank 2: ranks are 0 to 1"),
    ('{"format": "lockstep trace 1", "world_size": 2, "clock": "modelled", "source": "simulated", '
     '"events": {"rank": [0, 1], "kind": ["hold"]}}', "there are 2 events, and kind is not a list of so many")])
def test_what_is_no_trace_is_refused(twin: Any, text: str, words: str) -> None:
    said = twin.evaluate("""text => {
      try {
        globalThis.lockstep.trace.Trace.from_json(text);
      } catch (error) {
        return `${error.name}: ${error.message}`;
      }
    }""", text)
    assert said.startswith(f"TraceError: {words}")


# names
FUNCTION = re.compile(r"(/\*\*(?:(?!\*/).)*\*/)?\nfunction (\w+)\(([^)]*)\)", re.S)


def undocumented(text: str) -> list[str]:
    """Functions that a script hands on without a JSDoc comment that has the type of each parameter and the result."""
    handed_on = set(re.findall(r"\w+", text[text.rindex("export {"):]))
    found = []
    for comment, name, arguments in FUNCTION.findall(text):
        whole = re.sub(r"\{[^}]*\}|\[[^\]]*\]", "_", arguments)  # a parameter that is taken apart has no name
        parameters = [parameter.split(" = ")[0] for parameter in whole.split(", ") if parameter]
        typed = re.findall(r"@param \{.+\} (\w+)", comment)
        named = len(typed) == len(parameters) and all(a in (b, "_") for a, b in zip(parameters, typed))
        if name in handed_on and not (named and "@returns {" in comment):
            found.append(name)
    return found


@pytest.mark.parametrize("script", rooms())
def test_what_is_handed_on_has_its_types_in_words(script: str) -> None:
    assert undocumented(text_of(script)) == []


def test_a_missing_type_is_seen() -> None:
    text = text_of("collectives")
    assert undocumented(text.replace("\n * @returns {Schedule}", "", 1)) == ["parameter_server_all_reduce"]


def test_the_docstring_lists_the_rooms() -> None:
    listed = re.findall(r"^    (\w+)\.js ", (ROOT / "book/twin/__init__.py").read_text("utf-8"), re.M)
    assert sorted(listed) == sorted(rooms()) == sorted(path.stem for path in TWIN.glob("*.js"))
