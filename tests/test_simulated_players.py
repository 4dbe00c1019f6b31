"""Players above a lab's answers show what the learner's run should look like: simulated, and no part of grading."""
from pathlib import Path

import pytest
from nbformat import NotebookNode, write
from nbformat.v4 import new_code_cell

from book.authoring.lint import lint
from book.grading.lab import SIMULATED, code_cells, job, marks, points, read_lab, simulated
from book.grading.lint import marked_wrongly
from book.grading.release import released
from book.grading.submission import read_submission
from tests.attack_lab import attack_lab

LABS = sorted((Path(__file__).resolve().parents[1] / "labs").glob("*.ipynb"))
READS = ["labs/*.ipynb"]
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
