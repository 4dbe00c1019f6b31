"""Student copies have no solution or hidden check, work is never overwritten, a badly marked lab is refused."""
import json
import re
from pathlib import Path

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

from book.grading.__main__ import main
from book.grading.calls import seccomp_filter
from book.grading.grade import Grader
from book.grading.handed_in import find, skipped
from book.grading.lab import LabError, code_cells, job, marks, needed, points, read_lab
from book.grading.lint import marked_wrongly
from book.grading.release import in_variant, pristine, readme, released
from book.grading.report import stale_pages, write_reports
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
    for before, after in zip(kept, copy.cells):
        if before.cell_type == "code":
            kind = marks(before)["kind"]
            assert after.outputs == (before.outputs if kind == "check" else [])
            assert (after.execution_count is not None) == (kind == "check")
            assert "SOLUTION" not in after.source and (after.source != before.source) == (kind == "answer")
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
    (tmp_path / "students").mkdir()
    for gone in (["ada", "grace"], ["ada"]):
        write_reports([record | {"student": name, "slug": name} for name in gone], "lab", tmp_path)
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
