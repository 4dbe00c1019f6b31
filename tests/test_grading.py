"""Copies and submissions: no solution is in a copy, no work is lost, damaged and badly marked files are told."""
from __future__ import annotations

import csv
import io
import json
import random
import re
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbformat import NotebookNode, write
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

from book.authoring.lint import lint
from book.checks.unwritten import FIRST
from book.grading.__main__ import main
from book.grading.calls import seccomp_filter
from book.grading.grade import Grader
from book.grading.handed_in import find, skipped
from book.grading.lab import SIMULATED, LabError, code_cells, job, marks, needed, points, read_lab, simulated
from book.grading.lab_schema import KEY
from book.grading.lint import marked_wrongly
from book.grading.release import in_variant, pristine, readme, released
from book.grading.report import Reports, grades_csv, stale_pages
from book.grading.submission import SubmissionError, read_submission
from tests.attack_lab import answered, attack_lab



LABS = sorted((Path(__file__).resolve().parents[1] / "labs").glob("*.ipynb"))


def lab(source, **mark):
    cell = new_code_cell(source)
    cell.metadata["lockstep"] = {"id": "a", "kind": "answer", "exercise": 1, **mark}
    return new_notebook(cells=[cell])


@pytest.mark.parametrize("path", LABS, ids=lambda p: p.stem)
def test_a_copy_keeps_every_cell_but_no_solution(path):
    source = read_lab(path)
    copy = released(source)
    kept = [cell for cell in source.cells if not marks(cell).get("hidden")]
    assert len(copy.cells) == len(kept)
    assert sum("Below each check stands what it prints when your answer is right" in cell.source
               for cell in copy.cells) == 1, "its outputs are not the student's"
    for before, after in zip(kept, copy.cells):
        if before.cell_type == "code":
            kind = marks(before)["kind"]
            assert after.outputs == (before.outputs if kind == "check" else [])
            assert after.execution_count == (0 if kind == "check" else None), "no cell looks as if it had been run"
            assert "SOLUTION" not in after.source
            assert (after.source != FIRST.get(kind, "") + before.source) == (kind == "answer")
            assert ("raise NotImplementedError" in after.source) == (kind == "answer")
            compile(after.source, "cell", "exec")
            assert after.metadata["editable"] == (kind in ("answer", "parameters"))
            assert "hide-input" not in after.metadata["tags"]
        else:
            assert "{cite}" not in after.source and "```{" not in after.source, "JupyterLab shows it as it stands"
            assert "make lab" not in after.source, "it is that copy already"
            assert len(after.source) > 0.8 * len(before.source) or "```{bibliography}" in before.source


@pytest.mark.parametrize("path", LABS, ids=lambda p: p.stem)
def test_nothing_that_is_released_holds_a_solution_or_a_hidden_check(path, tmp_path):
    """Not in sources, outputs, metadata or attachments: the whole text of the files is searched."""
    source = read_lab(path)
    assert main(["release", str(path), "-o", str(tmp_path)]) == 0
    text = "".join(file.read_text() for file in tmp_path.iterdir())
    visible = "".join(cell.source for cell in source.cells if marks(cell).get("kind") != "answer"
                      and not marks(cell).get("hidden"))
    for cell in code_cells(source):
        secret = cell.source if marks(cell).get("hidden") else ""
        if marks(cell)["kind"] == "answer":
            parts = cell.source.split("### BEGIN SOLUTION")[1:]
            secret = "".join(part.split("### END SOLUTION")[0] for part in parts)
        lines = [line.strip() for line in secret.splitlines() if len(line.strip()) > 25]
        assert not [line for line in lines if line not in visible and json.dumps(line)[1:-1] in text]
        assert not marks(cell).get("hidden") or marks(cell)["id"] not in text


@pytest.mark.parametrize("path", LABS, ids=lambda p: p.stem)
def test_every_lab_is_marked_up_as_an_assignment(path):
    source = read_lab(path)
    assert not list(marked_wrongly(source))
    assert all(worth > 0 for worth in points(source).values())


def test_a_release_is_the_same_byte_for_byte(tmp_path):
    for name in ("a", "b"):
        assert main(["release", *map(str, LABS), "-o", str(tmp_path / name)]) == 0
    files = sorted(path.name for path in (tmp_path / "a").iterdir())
    assert len(files) == 2 * len(LABS) + 1 and "README.md" in files
    assert all((tmp_path / "a" / f).read_bytes() == (tmp_path / "b" / f).read_bytes() for f in files)


def test_labs_apart_have_a_folder_and_a_readme_each(tmp_path):
    labs = LABS[:2]
    assert main(["release", "--apart", *map(str, labs), "-o", str(tmp_path)]) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == [lab.stem for lab in labs]
    for lab, other in (labs, labs[::-1]):
        readme = (tmp_path / lab.stem / "README.md").read_text("utf-8")
        assert (tmp_path / lab.stem / lab.name).exists() and lab.stem in readme and other.stem not in readme


@pytest.mark.slow
def test_the_readme_says_which_exercises_build_on_others(tmp_path):
    assert main(["release", *map(str, LABS), "-o", str(tmp_path)]) == 0
    told = (tmp_path / "README.md").read_text()
    for path in LABS:
        ours = told.split(f"- `{path.name}`")[1].split("\n- ")[0].split("\n\n")[0]
        for number, line in re.findall(r"exercise (\d+) also runs your answers? to ([\d, and]+)", ours):
            assert set(map(int, re.findall(r"\d+", line))) == needed(read_lab(path), int(number)) - {int(number)}
        assert ours.count("also runs") == sum(len(needed(read_lab(path), n)) > 1 for n in points(read_lab(path)))


def answering(depends):
    """A lab whose answer cells name the exercises that they depend on: (exercise, depends) of each cell."""
    cells = [lab("", exercise=exercise, depends=direct).cells[0] for exercise, direct in depends]
    return new_notebook(cells=cells)


@pytest.mark.parametrize("depends, exercises", [
    ([(1, []), (2, [1]), (3, [2]), (4, [3])], {1: {1}, 2: {1, 2}, 3: {1, 2, 3}, 4: {1, 2, 3, 4}}),
    ([(1, []), (2, [1]), (3, [1]), (4, [2, 3])], {3: {1, 3}, 4: {1, 2, 3, 4}}),
    ([(1, []), (2, []), (3, [1]), (3, [2])], {3: {1, 2, 3}}),
    ([(1, [2]), (2, [1]), (3, [])], {1: {1, 2}, 3: {3}})])
def test_dependencies_of_exercises_are_transitive(depends, exercises):
    assert {number: needed(answering(depends), number) for number in exercises} == exercises


def test_nbgrader_finds_its_metadata(tmp_path):
    assert main(["release", str(LABS[0]), "-o", str(tmp_path), "--nbgrader"]) == 0
    cells = list(code_cells(read_lab(tmp_path / LABS[0].name)))
    for cell in cells:
        theirs, kind = cell.metadata["nbgrader"], marks(cell)["kind"]
        flags = (theirs["solution"], theirs["grade"], theirs["locked"])
        assert flags == (kind == "answer", kind == "check", kind != "answer")
        assert theirs.get("points") == (marks(cell)["points"] if kind == "check" else None)
    assert len({cell.metadata["nbgrader"]["grade_id"] for cell in cells}) == len(cells)


def test_the_stub_replaces_the_solution_in_place():
    copy = released(lab("def f(x):\n    y = 1\n    ### BEGIN SOLUTION\n    return x + y\n    ### END SOLUTION"))
    assert copy.cells[0].source == (
        "def f(x):\n    y = 1\n    # YOUR CODE HERE\n"
        "    raise NotImplementedError(\"exercise 1: write this function, then run the cell\")")


@pytest.mark.parametrize("notebook", [
    lab("x = 1"), lab("### BEGIN SOLUTION\nx = 1"), lab("x = 1", kind="play"), lab("x = 1", kind="setup", id=""),
    lab("### BEGIN SOLUTION\nx = 1\n### END SOLUTION", kind="check")])
def test_a_badly_marked_lab_is_refused(notebook):
    with pytest.raises(LabError, match="cell 0"):
        released(notebook)


def test_existing_work_is_kept_unless_forced(tmp_path, capsys):
    assert main(["release", str(LABS[0]), "-o", str(tmp_path)]) == 0
    copy = tmp_path / LABS[0].name
    copy.write_text("my work")
    assert main(["release", str(LABS[0]), "-o", str(tmp_path)]) == 0
    assert copy.read_text() == "my work" and "your work" in capsys.readouterr().out
    assert main(["release", str(LABS[0]), "-o", str(tmp_path), "--force"]) == 0
    assert "NotImplementedError" in copy.read_text()


def test_a_folder_without_labs_is_reported(tmp_path, capsys):
    assert main(["release", str(tmp_path), "-o", str(tmp_path / "out")]) == 1
    assert "no notebooks in" in capsys.readouterr().err


def test_a_file_that_is_not_a_notebook_is_reported(tmp_path, capsys):
    (tmp_path / "lab.ipynb").write_text("[]")
    assert main(["release", str(tmp_path), "-o", str(tmp_path / "out")]) == 1
    assert "can't be read as a notebook" in capsys.readouterr().err


def test_a_variant_changes_the_cells_that_have_it_and_no_others(tmp_path):
    source = attack_lab()
    text = new_markdown_cell("Plain.", metadata={"lockstep": {"variants": {"B": "Other."}}})
    source.cells.insert(1, text)
    check = next(c for c in source.cells if marks(c).get("id") == "check-2")
    check.metadata["lockstep"]["variants"] = {"B": {"source": "print(SEED)", "points": 5}}
    other = in_variant(source, "B")
    changed = [(a.source, b.source) for a, b in zip(source.cells, other.cells) if a.source != b.source]
    assert changed == [("Plain.", "Other."), (check.source, "print(SEED)")] and points(other) == {1: 2, 2: 5}
    assert "variants" not in json.dumps(released(other)), "a student's copy tells of no other variant"
    assert "variant B" in readme({"lab.ipynb": other}) and "variant" not in readme({"lab.ipynb": source})
    nbformat.write(released(other), tmp_path / "b.ipynb")
    noted = [read_submission(tmp_path / "b.ipynb", lab).notes for lab in (source, other)]
    assert noted[0][-1] == "the copy is of variant B, but the source that grades it is of no variant" and not noted[1]
    with pytest.raises(LabError, match="no variant 'C'; it has B"):
        in_variant(source, "C")


def test_dotfiles_are_skipped(tmp_path):
    """macOS puts ._lab.ipynb into archives, Jupyter its checkpoints."""
    for name in ("ada/mine.ipynb", "ada/._mine.ipynb", "ada/.ipynb_checkpoints/mine.ipynb", "._bob.ipynb", "bob.ipynb"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("{}")
    assert [(e.student, e.path, e.error) for e in find(tmp_path, "lab.ipynb")] == [
        ("ada", tmp_path / "ada" / "mine.ipynb", None), ("bob", tmp_path / "bob.ipynb", None)]


def test_no_file_is_skipped_silently(tmp_path):
    """An upper-case suffix is a notebook too; files that are not notebooks are reported."""
    for name in ("ADA.IPYNB", "grace.pdf", ".hidden.pdf"):
        (tmp_path / name).write_text("{}")
    (tmp_path / "link").symlink_to(tmp_path)
    assert [(e.student, e.path.name) for e in find(tmp_path, "lab.ipynb")] == [("ADA", "ADA.IPYNB")]
    assert skipped(tmp_path) == ["grace.pdf", "link"]


def test_pages_of_an_earlier_run_are_reported(tmp_path):
    record = {"student": "ada", "slug": "ada", "error": None, "notes": [], "exercises": {}, "points": 0,
              "max_points": 0}
    for there in (["ada", "grace"], ["ada"]):
        reports = Reports("lab", tmp_path)
        for name in there:
            reports.add(record | {"student": name, "slug": name})
        reports.close()
    assert stale_pages([record], tmp_path) == ["grace.html"]


def test_a_copy_of_another_variant_is_reported_and_its_cells_are_not_called_edited(tmp_path):
    lab = attack_lab()
    copy = answered(lab, setup="import random")
    copy.metadata["lockstep"]["variant"] = "B"
    nbformat.write(copy, tmp_path / "b.ipynb")
    assert read_submission(tmp_path / "b.ipynb", lab).notes == [
        "the copy is of variant B, but the source that grades it is of no variant"]


def without_metadata(notebook):
    for cell in notebook.cells:
        cell.metadata = {}
    return notebook


def without_ids(notebook):
    for cell in without_metadata(notebook).cells:
        cell.pop("id")
    notebook.nbformat_minor = 4
    return notebook


def as_text(notebook):
    for cell in notebook.cells:
        if cell.cell_type == "code" and marks(cell)["kind"] == "answer":
            cell.cell_type = "raw"
    return notebook


def with_other_line_ends(notebook):
    for cell in notebook.cells:
        cell.source = cell.source.replace("\n", "\r\n")
    return notebook


def in_format_3(notebook):
    return nbformat.convert(notebook, 3)


@pytest.mark.parametrize("damage, way", [
    (without_metadata, "has lost its metadata, and was found by its cell id"),
    (without_ids, "has lost its metadata, and was found by its function names"),
    (as_text, "is not a code cell, and was read as one"), (with_other_line_ends, None), (in_format_3, None)])
@pytest.mark.parametrize("path", LABS, ids=lambda path: path.stem)
def test_answers_are_found_in_a_copy_that_an_editor_has_changed(path, damage, way, tmp_path):
    source = read_lab(path)
    solved = {marks(cell)["id"]: [f"# mine\n{cell.source}"] for cell in code_cells(source)
              if marks(cell)["kind"] == "answer"}
    copy = released(source)
    for cell in code_cells(copy):
        if marks(cell)["kind"] == "answer":
            cell.source = solved[marks(cell)["id"]][0]
    (tmp_path / "handed_in.ipynb").write_text(json.dumps(damage(copy)))
    found = read_submission(tmp_path / "handed_in.ipynb", source)
    assert found.answers == solved
    noted = [f"answer cell {name} {way}" for name in solved] if way else []
    assert noted == [note for note in found.notes if note.startswith("answer cell")]
    assert not any("edited" in note for note in found.notes)


def test_the_learners_own_cells_stay_theirs_where_answers_keep_their_metadata(tmp_path):
    """A trial that defines the same name is not another answer, and a cell that was split gives both parts."""
    copy = answered(attack_lab())
    place = next(i for i, cell in enumerate(copy.cells) if marks(cell).get("id") == "sent")
    whole = "".join(copy.cells[place].source)
    copy.cells.insert(place, new_code_cell("def ring_sent(num_bytes, world_size):\n    return 0"))
    nbformat.write(copy, tmp_path / "kept.ipynb")
    kept = read_submission(tmp_path / "kept.ipynb", attack_lab())
    assert not any("metadata" in note for note in kept.notes)
    copy.cells[place:place + 2] = [new_code_cell("WAYS = 2"), new_code_cell(whole)]
    nbformat.write(copy, tmp_path / "split.ipynb")
    assert read_submission(tmp_path / "split.ipynb", attack_lab()).answers["sent"] == ["WAYS = 2", whole]


def test_an_answer_that_sets_the_seed_is_told_why_its_checks_fail(tmp_path):
    lab = attack_lab()
    (name, *_) = [marks(cell)["id"] for cell in code_cells(lab) if marks(cell)["kind"] == "answer"]
    for source, noted in (("SEED = 7\nx = 1", True), ("x = SEED == 7", False), ("    SEED=7", False), ("SEED=7", True)):
        nbformat.write(answered(lab, **{name: source}), tmp_path / "ada.ipynb")
        told = f"the answer {name} sets SEED: its checks then print other numbers, and fail"
        assert (told in read_submission(tmp_path / "ada.ipynb", lab).notes) == noted, source


def test_too_many_cells_are_refused_and_notes_are_kept_short(tmp_path):
    lab = attack_lab()
    copy = answered(lab)
    copy.cells += [new_code_cell("x = 1")] * 1000
    (tmp_path / "many.ipynb").write_text(json.dumps(copy))
    with pytest.raises(SubmissionError, match="more than 1000 cells"):
        read_submission(tmp_path / "many.ipynb", lab)
    copy.cells = [cell for cell in answered(lab).cells for _ in range(8)]
    copy.cells[0] = new_code_cell("import " + ", ".join(f"book.{'x' * number}" for number in range(1, 60)))
    (tmp_path / "twice.ipynb").write_text(json.dumps(copy))
    notes = read_submission(tmp_path / "twice.ipynb", lab).notes
    assert len(notes) == 21 and notes[-1].endswith("more notes") and max(map(len, notes)) <= 201


def test_the_system_call_filter_exists_for_supported_architectures():
    assert seccomp_filter("x86_64") != seccomp_filter("aarch64")
    with pytest.raises(NotImplementedError, match="only the system calls of x86_64 and aarch64"):
        seccomp_filter("sparc64")


def test_two_runs_do_not_share_a_folder(tmp_path):
    nbformat.write(attack_lab(), tmp_path / "lab.ipynb")
    first = Grader.start(tmp_path / "lab.ipynb", tmp_path / "out")
    with pytest.raises(LabError, match="another run is using"):
        Grader.start(tmp_path / "lab.ipynb", tmp_path / "out")
    first.close()
    Grader.start(tmp_path / "lab.ipynb", tmp_path / "out").close()


def test_a_job_has_the_answers_that_its_exercise_needs():
    source = attack_lab()
    answers = {"bounds": ["x = 1", "y = 2"], "sent": ["z = 3"]}
    two = [marks(c)["id"] for c in job(source, 2, 7, answers).cells]
    assert two == ["setup", "seed", "sent", "check-2", "hidden-2"]
    next(c for c in source.cells if marks(c).get("id") == "sent").metadata["lockstep"]["depends"] = [1]
    cells = job(source, 2, 7, answers).cells
    assert [c.source for c in cells if marks(c)["kind"] == "learner"] == ["x = 1", "y = 2", "z = 3"]
    assert [c.source for c in cells if marks(c)["kind"] == "parameters"] == ["SEED = 7"]


def faults_of(wrong, **metadata):
    """What lint says about the small lab with changed marks in some cells and changed metadata."""
    source = attack_lab()
    source.metadata["lockstep"].update(metadata)
    for cell in code_cells(source):
        cell.metadata["lockstep"].update(wrong.get(marks(cell)["id"], {}))
    return " ".join(marked_wrongly(source))


@pytest.mark.parametrize("wrong, words", [
    ({"check-1": {"points": "2"}}, "has points '2', which must be a whole number"),
    ({"hidden-1": {"points": 2}}, "is hidden and has points"),
    ({"check-2": {"id": "check-1"}}, "that another cell has"),
    ({"seed": {"kind": "seed"}}, "has kind 'seed', which must be one of setup, parameters, answer, check"),
    ({"seed": {"id": ""}}, "needs an id and a kind"),
    ({"hidden-1": {"wire": "pigeon"}}, "'pigeon', which is not one of"),
    ({"sent": {"depends": "1"}}, "has depends '1', which must be a list of exercises"),
    ({"sent": {"exercise": None}}, "has exercise None, which must be a whole number of at least 1"),
    ({"check-1": {"hidden": True, "points": 0}}, "needs the tag remove-cell"),
    ({"hidden-2": {"hidden": False}}, "exercise 2 needs a hidden check"),
    ({"bounds": {"depends": [2]}}, "depends on exercise 2, which does not come before it"),
    ({"check-2": {"points": 7}}, "say 3 points, but its checks add up to 9")])
def test_wrong_marks_are_reported(wrong, words):
    assert words in faults_of(wrong)


def test_opened_modules_must_exist():
    assert "open book.parallel.nothing to [1]" in faults_of({}, open={"book.parallel.nothing": [1]})
    assert "open book.parallel.data to [9]" in faults_of({}, open={"book.parallel.data": [9]})
    assert not faults_of({}, open={"book.parallel.data": [2]}) and not faults_of({})


def test_the_pristine_copy_has_only_code():
    copy = pristine(released(attack_lab()))
    assert {cell.cell_type for cell in copy.cells} == {"code"}
    nbformat.validate(copy)


STUB = '# YOUR CODE HERE\nraise NotImplementedError("exercise 1: write this function, then run the cell")'


def cell(source, name, kind, **more):
    return new_code_cell(source, metadata={KEY: {"id": name, "kind": kind, "exercise": 1, **more}})


def solution(source):
    return f"### BEGIN SOLUTION\n{source}\n### END SOLUTION"


def test_code_between_two_solutions_belongs_to_the_learner_too():
    lab = new_notebook(cells=[cell(f"{solution('x = 1')}\ny = x\n{solution('z = y')}\nprint(z)", "a", "answer")])
    assert released(lab).cells[0].source == f"{STUB}\ny = x\n{STUB}\nprint(z)"


def test_a_learners_own_cells_belong_to_the_adjacent_answer(tmp_path):
    lab = new_notebook(cells=[cell(solution("x = 1"), "a", "answer"), cell("print(x)", "check-a", "check", points=1),
                              cell(solution("y = 2"), "b", "answer")])
    own = [new_code_cell(source) for source in ("before", "after", "behind the check", "last")]
    answers = [cell("x = 1", "a", "answer"), cell("print(x)", "check-a", "check"), cell("y = 2", "b", "answer")]
    handed_in = new_notebook(cells=[own[0], answers[0], own[1], answers[1], own[2], answers[2], own[3]])
    nbformat.write(handed_in, tmp_path / "ada.ipynb")
    found = read_submission(tmp_path / "ada.ipynb", lab)
    assert found.answers == {"a": ["before", "x = 1", "after"], "b": ["behind the check", "y = 2", "last"]}
    assert found.notes == []


@pytest.mark.parametrize("first", "=+-@|%")
def test_a_students_name_is_never_a_formula(first):
    record = {"student": f"{first}1+1", "error": None, "notes": [], "points": 0, "max_points": 3,
              "exercises": {"1": {"points": 0}}}
    _, row = csv.reader(io.StringIO(grades_csv([record])))
    assert row == [f"'{first}1+1", "", "", "", "0", "", "0", "3", "", ""]


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


PLAYS = "from book.collectives import broadcast\nfrom book.widgets import play\n\nplay(broadcast(4))"


def with_player(source: str = PLAYS, before: str = "bounds", tags: tuple[str, ...] = ("hide-input",),
                **mark: object) -> NotebookNode:
    """The small lab with a simulated player before the cell with this id."""
    lab = attack_lab()
    cell = new_code_cell(source)
    cell.metadata.update({"tags": list(tags),
                          "lockstep": {"id": f"{SIMULATED}1", "kind": "setup", "exercise": 1, **mark}})
    at = next(i for i, other in enumerate(lab.cells) if marks(other).get("id") == before)
    lab.cells.insert(at, cell)
    return lab


@pytest.mark.parametrize("path", LABS, ids=lambda path: path.stem)
def test_a_lab_has_players_and_each_is_simulated(path: Path) -> None:
    lab = read_lab(path)
    players = [cell for cell in code_cells(lab) if simulated(cell)]
    assert players
    for cell in players:
        (output,) = cell.outputs
        assert {"text/html", "image/png"} & output.data.keys(), "the website has no kernel"
        assert "recorded" not in output.data["text/plain"] + output.data.get("text/html", "").split("<p>")[0]
        assert "Wrong at the end" not in output.data.get("text/html", "")
        beside = lab.cells[lab.cells.index(cell) - 1]
        assert beside.cell_type == "markdown" and "should look like" in beside.source


@pytest.mark.parametrize("path", LABS, ids=lambda path: path.stem)
def test_players_are_in_the_students_copy_and_in_no_grading_job(path: Path) -> None:
    lab = read_lab(path)
    own = [marks(cell)["id"] for cell in code_cells(lab) if simulated(cell)]
    copied = {marks(cell)["id"]: cell for cell in code_cells(released(lab))}
    assert all(not copied[name].metadata["editable"] for name in own)
    for exercise in points(lab):
        assert set(own).isdisjoint(marks(cell)["id"] for cell in job(lab, exercise).cells)


def test_a_player_is_folded_and_passes_both_lints() -> None:
    assert not list(marked_wrongly(with_player()))
    cell = next(cell for cell in code_cells(with_player()) if simulated(cell))
    cell.execution_count = 1

    def said() -> str:
        lab = attack_lab()
        lab.cells = [cell]
        return "".join(problem.message for problem in lint(lab))

    assert "is hidden" not in said()
    cell.metadata["lockstep"]["id"] = "play-1"
    assert "is hidden" in said()


@pytest.mark.parametrize("wrong, words", [
    (with_player(PLAYS + "\nlaunch(print, 2)"), "uses launch: it may use only what it imports itself"),
    (with_player("from book.launch import launch\nlaunch(print, 2)"), "uses book.launch.launch"),
    (with_player("from book.parallel.tensor import by_rows"), "uses book.parallel.tensor.by_rows"),
    (with_player("import torch"), "uses torch"),
    (with_player("chunk_bounds(7, 2)"), "uses chunk_bounds"),
    (with_player("random.random()"), "uses random"),
    (with_player("from book.collectives import broadcast as chunk_bounds"), "binds chunk_bounds, which bounds binds"),
    (with_player("SEED = 4"), "binds SEED, which seed binds too"),
    (with_player(tags=()), "needs the tag hide-input"),
    (with_player(tags=("hide-input", "nbval-ignore-output")), "needs the tag hide-input, and no other"),
    (with_player(before="check-1"), "needs the number of an exercise whose answer comes after it"),
    (with_player(exercise=3), "needs the number of an exercise whose answer comes after it"),
    (with_player(kind="check", points=0), "as only setup cells may"),
])
def test_lint_names_a_player_that_is_more_than_a_simulation(wrong: NotebookNode, words: str) -> None:
    assert words in " ".join(marked_wrongly(wrong))


def test_a_player_may_name_what_it_makes_itself() -> None:
    own = "from book.simulate import simulate\n\n\ndef twice(x):\n    return 2 * x\n\n\n[twice(x) for x in (0, 1)]"
    assert not list(marked_wrongly(with_player(own)))


def test_what_a_player_imports_is_not_given_to_answers(tmp_path: Path) -> None:
    lab, path = with_player(), tmp_path / "answers.ipynb"
    answer = next(cell for cell in code_cells(lab) if marks(cell)["id"] == "bounds")
    taken = "from book.collectives import broadcast"
    handed_in = with_player()
    next(cell for cell in code_cells(handed_in) if marks(cell)["id"] == "bounds").source = taken + "\n" + answer.source
    write(handed_in, path)
    assert "answers import from the book: book.collectives" in read_submission(path, lab).notes
