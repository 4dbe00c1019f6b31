"""The twin in JavaScript against the package: drawn inputs event by event, golden files that both read, and names."""
from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from book import collectives, pipelines
from book.cost import Link
from book.schedule import PipelineSchedule, Schedule
from book.simulate import simulate, simulate_pipeline
from book.trace import Trace
from book.widgets.registry import ASSETS, TWIN
from tests.browser import page_with
from tests.players import first
from tests.twins import SCRIPTS, differences, drawn, python_answer, script_answers
from tests.website import ROOT

READS = ["book/twin/*.js", "book/*.py", "book/*/*.py", "tests/golden/*", "tests/golden/*/*"]
GOLDEN = ROOT / "tests" / "golden"
JOBS_OF_A_SEED = 500
# What a room of Python has and the twin has not, and why.
LEFT_OUT = {
    "promise": {"Promise", "OfSize", "variants"},  # types; a promise of another root or owner judges a recording
    # Rows of columns, plain objects and lists; steps kept as rules, for more ranks than a page shows.
    "schedule": {"Move", "Action", "Work", "Round", "Phase", "Phases", "moves_of"},
    "trace": {"Event", "STATE"},  # a plain object; what memory events hold
    "links": {"fit_ring_link"},  # a fit to measured times
    "network": {"SWITCH"},
    # stepsOf: without bytes, so that it is kept from one simulation to the next; rounds are for thousands of ranks.
    "messages": {"Step", "steps", "rounds"},
    "shared": {"run_shared_rounds"},
    "collectives": {"Collective"},  # a plain object
    "pipelines": {"Pair", "Step"},
    # Times of thousands of ranks; what shows an exercise's run in a lab, where Python has drawn it already.
    "simulate": {"done_s", "simulate_step", "StepTimes", "StepWork", "simulate_backward", "simulate_groups",
                 "simulate_hybrid", "simulate_mlp", "simulate_product", "simulate_sharded"},
    "streams": {"Task", "simulate_backward"},  # a plain object; its tasks as a trace, which only labs show
}


@pytest.fixture
def twin(browser: Any) -> Iterator[Any]:
    """A page with the twin's scripts and nothing else."""
    with page_with(browser, SCRIPTS) as page:
        yield page


@pytest.mark.parametrize("seed", first(*range(4)))
def test_both_make_the_same_of_drawn_inputs(twin: Any, seed: int) -> None:
    """Collectives, moves that nobody planned, pipelines, drawn orders, closed forms; also what cannot be."""
    jobs = list(drawn(seed, JOBS_OF_A_SEED))
    print(f"seed {seed}: {len(jobs)} inputs")
    answers = zip(jobs, map(python_answer, jobs), script_answers(twin, jobs), strict=True)
    found = {json.dumps(job): fault for job, python, script in answers if (fault := differences(job, python, script))}
    assert not found, "\n".join(f"{words}\n  of {job:.400}" for job, words in list(found.items())[:3])


def test_no_collective_is_without_a_twin() -> None:
    script = (ROOT / "book/twin/collectives.js").read_text("utf-8")
    lacking = [name for name in collectives.COLLECTIVES if not re.search(rf"record\({name}\b", script)]
    assert not lacking, f"book/twin/collectives.js lacks {', '.join(lacking)}: list it in COLLECTIVES there"


def test_drawn_inputs_are_of_every_kind() -> None:
    jobs = list(drawn(0, 4000))
    names = {job["name"] for job in jobs if job["what"] in ("collective", "pipeline")}
    assert names == {*collectives.COLLECTIVES, "gpipe", "one_f_one_b", "interleaved", "zero_bubble"}
    assert {job["what"] for job in jobs} == {"collective", "moves", "pipeline", "order", "form"}
    sizes = [job["arguments"][0] for job in jobs if job["what"] == "collective" and len(job["arguments"]) == 1]
    assert {0, 1, 2, 3} < set(sizes) and max(sizes) > 60
    for option in ("slowdown", "links", "contributions", "link", "network"):
        assert {bool(job.get(option)) for job in jobs} == {True, False}, option
    answers = [python_answer(job) for job in jobs[:300]]
    assert 10 < sum("error" in answer for answer in answers) < 100, "a few can't be"


def test_a_difference_is_seen_and_named() -> None:
    job = next(job for job in drawn(0, 2000) if job["what"] == "collective" and job["name"] == "ring_all_reduce"
               and job["arguments"][0] > 2 and job["num_bytes"] > 0)
    python = python_answer(job)
    script = {**python, "events": {name: list(map(plain, column)) for name, column in python["events"].items()}}
    assert not differences(job, python, script)
    script["events"]["end_s"][3] *= 1 + 1e-11
    script["events"]["peer"][2] += 1
    late, other = sorted(differences(job, python, script))
    assert re.match(r"event 2 \((send|recv) of rank \d+\): peer is \d+ in Python, \d+ in JavaScript", late)
    assert re.match(r"event 3 \((send|recv) of rank \d+\): end_s is ", other)
    assert differences(job, python, {"error": "no"}) == ["Python says None, JavaScript 'no'"]


def plain(value: Any) -> Any:
    """A value as JSON would have it."""
    return getattr(value, "tolist", lambda: value)()


# golden files
SLOW, LINK = {1: 3.0}, Link(2e-6, 1e9, 1e-10)
TRACES: dict[str, Callable[[], Trace]] = {
    "ring_all_reduce_3": lambda: simulate(collectives.ring_all_reduce(3), 3e6, LINK, slowdown=SLOW),
    "hierarchical_all_reduce_2_2": lambda: simulate(
        collectives.hierarchical_all_reduce(2, 2), 4e6, LINK, links={(0, 2): Link(1e-5, 1e8), (3, 1): Link(1e-5, 1e8)}),
    "one_f_one_b_2_3": lambda: simulate_pipeline(pipelines.one_f_one_b(2, 3), 1e-3, 2e-3, link=LINK, num_bytes=1e5),
    "zero_bubble_4_3": lambda: simulate_pipeline(pipelines.zero_bubble(4, 3), 1e-3, 2e-3, 5e-4, slowdown=SLOW),
}
GOLDEN_TRACES = """traces => {
  const { links, collectives, pipelines, simulate, trace } = globalThis.lockstepTwin;
  const { Link } = links;
  const link = new Link(2e-6, 1e9, 1e-10);
  const slow = new Link(1e-5, 1e8);
  const slowdown = { 1: 3 };
  const { ring_all_reduce, hierarchical_all_reduce } = collectives;
  const { one_f_one_b, zero_bubble } = pipelines;
  const mine = {
    ring_all_reduce_3: simulate.simulate(ring_all_reduce(3), 3e6, link, { slowdown }),
    hierarchical_all_reduce_2_2: simulate.simulate(hierarchical_all_reduce(2, 2), 4e6, link, {
      links: [[0, 2, slow], [3, 1, slow]],
    }),
    one_f_one_b_2_3: simulate.simulate_pipeline(one_f_one_b(2, 3), 1e-3, 2e-3, null, link, { num_bytes: 1e5 }),
    zero_bubble_4_3: simulate.simulate_pipeline(zero_bubble(4, 3), 1e-3, 2e-3, 5e-4, null, { slowdown }),
  };
  const read = Object.fromEntries(Object.entries(traces).map(([name, text]) => [name, trace.Trace.from_json(text)]));
  return Object.keys(traces).map(name => {
    return [name, mine[name].to_json(), read[name].to_json(), read[name].duration_s, read[name].sent_bytes()];
  });
}"""


def test_both_read_and_make_the_golden_traces(twin: Any) -> None:
    """They are in tests/golden/traces, as `to_json` wrote them."""
    texts = {path.stem: path.read_text("utf-8").strip() for path in (GOLDEN / "traces").glob("*.json")}
    assert texts.keys() == TRACES.keys()
    for name, made, read, duration_s, sent in twin.evaluate(GOLDEN_TRACES, texts):
        golden = Trace.from_json(texts[name])
        assert TRACES[name]().to_json() == texts[name], name
        assert Trace.from_json(made) == golden == Trace.from_json(read), name
        assert (duration_s, sent) == (golden.duration_s, golden.sent_bytes().tolist()), name


def test_both_read_and_make_the_golden_schedules(twin: Any) -> None:
    read = """([kind, room, name, sizes, text]) => {
      const { [kind]: read } = globalThis.lockstepTwin.schedule;
      return [read.from_csv(text).check().to_csv(), globalThis.lockstepTwin[room][name](...sizes).to_csv()];
    }"""
    paths = sorted(GOLDEN.rglob("*.csv"))
    assert len(paths) > 5
    for path in paths:
        text, (name, *sizes) = path.read_text("utf-8"), re.split(r"_(?=\d)", path.stem)
        kind, room = (PipelineSchedule, "pipelines") if path.parent.name == "pipelines" else (Schedule, "collectives")
        assert kind.from_csv(text).to_csv() == text
        assert twin.evaluate(read, [kind.__name__, room, name, list(map(int, sizes)), text]) == [text, text], path.name


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
        globalThis.lockstepTwin.trace.Trace.from_json(text);
      } catch (error) {
        return `${error.name}: ${error.message}`;
      }
    }""", text)
    assert said.startswith(f"TraceError: {words}")


# names
def room_of(script: str) -> ModuleType:
    """The Python module that a script mirrors: by its line in the docstring of book.twin."""
    text = import_module("book.twin").__doc__ or ""
    [module] = re.findall(rf"^    {Path(script).name}\.js +(book[\w.]+)", text, re.M)
    return import_module(module)


def public(module: ModuleType) -> set[str]:
    """The public names that a module defines, or a package hands on."""
    own = {name for name, value in vars(module).items()
           if name[0] != "_" and not inspect.ismodule(value) and getattr(value, "__module__", "") == module.__name__}
    text = inspect.getsource(module)
    return set(getattr(module, "__all__", own | set(re.findall(r"^([A-Z]\w*)(?::.*)? = ", text, re.M))))


def test_a_room_of_the_twin_has_the_names_of_its_room_in_python(twin: Any) -> None:
    """All of them, other than those in LEFT_OUT; what Python has not is in camelCase, or a class."""
    rooms = twin.evaluate("() => Object.entries(globalThis.lockstepTwin).map(([room, names]) => "
                          "[room, Object.entries(names).map(([name, x]) => [name, String(x).startsWith('class')])])")
    assert [room for room, _ in rooms] == [Path(script).name for script in TWIN]
    for room, names in rooms:
        wanted = public(room_of(room)) - LEFT_OUT[room]
        extra = {name for name, is_class in names if name not in wanted and not is_class}
        assert wanted <= {name for name, _ in names}, room
        assert all(re.fullmatch(r"[a-z]+[A-Z]\w*", name) or name == "gives" or name == "needs" for name in extra), extra


HANDED_ON = re.compile(r"globalThis\.lockstepTwin(?: \?\?= \{\}\))?\.\w+ = (\{.*?\n?\});", re.S)
FUNCTION = re.compile(r"(/\*\*(?:(?!\*/).)*\*/)?\n  function (\w+)\(([^)]*)\)", re.S)


def undocumented(text: str) -> list[str]:
    """Functions that a script hands on without a JSDoc comment that has the type of each parameter and the result."""
    handed_on = set(re.findall(r"\w+", "".join(HANDED_ON.findall(text))))
    found = []
    for comment, name, arguments in FUNCTION.findall(text):
        whole = re.sub(r"\{[^}]*\}|\[[^\]]*\]", "_", arguments)  # a parameter that is taken apart has no name
        parameters = [parameter.split(" = ")[0] for parameter in whole.split(", ") if parameter]
        typed = re.findall(r"@param \{.+\} (\w+)", comment)
        named = len(typed) == len(parameters) and all(a in (b, "_") for a, b in zip(parameters, typed))
        if name in handed_on and not (named and ("@returns {" in comment or name == "check_counts")):
            found.append(name)
    return found


@pytest.mark.parametrize("script", TWIN)
def test_what_is_handed_on_has_its_types_in_words(script: str) -> None:
    text = (ASSETS / f"{script}.js").read_text("utf-8")
    assert undocumented(text) == []
    for name in re.findall(r"\n   \* @param \{.+\} \w+", text)[:1]:
        assert undocumented(text.replace(name, "", 1)), "a missing type is seen"
