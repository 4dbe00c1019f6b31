"""A lab's notebook may have been damaged by an editor: it is refused in one sentence, or what is left of it works."""
from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import nbformat
import pytest

from book.grading.lab import LabError, code_cells, job, marks, points, read_lab
from book.grading.lint import marked_wrongly
from book.grading.release import in_variant, readme, released
from tests.attack_lab import attack_lab

VALUES = [None, True, -1, 0, 3, 10**9, 10**30, 1e308, -5.5, float("nan"), "", "x", "1", [], [1], [None], ["a"], [[1]],
          {}, {"a": 1}, {"B": {"source": 1}}, {"B": {}}, {"B": {"source": "x", "points": "2"}}, {"B": None}]


def whole() -> dict[str, Any]:
    """A small lab with every mark that labs may have, as JSON."""
    lab = attack_lab()
    lab.metadata["lockstep"] |= {"open": {"book.parallel.data": [1]}}
    of = {marks(cell)["id"]: cell.metadata["lockstep"] for cell in code_cells(lab)}
    of["sent"] |= {"depends": [1]}
    of["check-2"] |= {"memory": 1.5, "wire": "ring_all_reduce",
                      "variants": {"B": {"source": "print(SEED)", "points": 5}}}
    of["seed"] |= {"variants": {"B": "SEED = 4"}}
    return json.loads(nbformat.writes(lab))


WHOLE = json.dumps(whole())


def damaged(rng: random.Random) -> str:
    """The lab's JSON with one fault: something in it is lost, is there twice, or has become something else."""
    data = json.loads(WHOLE)
    holder, name = drawn(rng, data)
    if rng.random() < 0.2:
        holder.pop(name)
    elif rng.random() < 0.1 and isinstance(holder, list):
        holder.append(holder[name])
    else:
        holder[name] = rng.choice(VALUES)
    return json.dumps(data)


def drawn(rng: random.Random, data: dict[str, Any]) -> tuple[Any, Any]:
    """A place in the notebook: usually in the marks of a cell or of the notebook, otherwise anywhere."""
    cell = rng.choice([cell for cell in data["cells"] if cell["cell_type"] == "code"])
    holder: Any = rng.choice([data, cell, cell["metadata"]["lockstep"], cell["metadata"]["lockstep"],
                              data["metadata"]["lockstep"]])
    while True:
        name = rng.choice(list(holder)) if isinstance(holder, dict) else rng.randrange(len(holder))
        if not isinstance(holder[name], dict | list) or not holder[name] or rng.random() < 0.4:
            return holder, name
        holder = holder[name]


def use(lab: nbformat.NotebookNode) -> None:
    """What a course does with a lab, except to run it. Raises LabError."""
    readme({"lab": released(lab, nbgrader=True)})
    released(in_variant(lab, "B"))
    list(marked_wrongly(lab))
    for exercise in points(lab):
        job(lab, exercise, 7)


def fate_of(text: str, path: Path) -> str | None:
    """What a damaged lab is told; None if it works."""
    path.write_text(text)
    try:
        use(read_lab(path))
    except LabError as error:
        return str(error)
    return None


def test_a_damaged_lab_is_refused_in_one_sentence_or_still_works(tmp_path: Path) -> None:
    told = [fate_of(damaged(random.Random(seed)), tmp_path / "lab.ipynb") for seed in range(300)]
    for seed, words in enumerate(told):
        assert words is None or ("\n" not in words and len(words) < 300), (seed, words)
    assert 100 < sum(words is not None for words in told) < 300


def test_the_whole_lab_is_fit(tmp_path: Path) -> None:
    assert fate_of(WHOLE, tmp_path / "lab.ipynb") is None


@pytest.mark.parametrize("mark, value, words", [
    ("exercise", "2", "has exercise '2', which must be a whole number of at least 1"),
    ("points", 1.5, "has points 1.5, which must be a whole number of at least 0"),
    ("hidden", "no", "has hidden 'no', which must be true or false"),
    ("depends", 1, "has depends 1, which must be a list of exercises"),
    ("memory", 0.5, "has memory 0.5, which must be a number of at least 1"),
    ("variants", {"B": 3}, "has variants {'B': 3}, which must be a source, or a source and marks, for each variant"),
    ("worth", 3, "has worth 3, which must be left out: there is no such mark"),
])
def test_a_wrong_mark_is_named(tmp_path: Path, mark: str, value: Any, words: str) -> None:
    data = json.loads(WHOLE)
    check = next(cell for cell in data["cells"] if cell["metadata"].get("lockstep", {}).get("id") == "check-2")
    check["metadata"]["lockstep"][mark] = value
    told = fate_of(json.dumps(data), tmp_path / "lab.ipynb")
    assert told and words in told and "code cell 6 (check-2)" in told
