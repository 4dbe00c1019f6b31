"""What students are told beside the verdict: their own run, from a job that holds no secret, on an inert page."""
from __future__ import annotations

import base64
import json
from copy import deepcopy
from functools import cache
from pathlib import Path

import nbformat
import pytest
from attack_lab import USERS, Course, answered, attack_lab
from nbformat import NotebookNode

from book.collectives import ring_all_reduce
from book.grading import feedback, similar
from book.grading.lab import code_cells, marks, read_lab
from book.grading.release import without_solutions
from book.grading.report import student_page
from book.grading.run import run
from book.grading.submission import Submission
from book.widgets import play
from tests.browser import Browser
from tests.players import html_of
from tests.website import ROOT

RING = ROOT / "labs" / "03_ring_all_reduce.ipynb"


@cache
def ring() -> NotebookNode:
    return read_lab(RING)


def answers(**changed: tuple[str, str]) -> dict[str, list[str]]:
    """The ring lab's own answers by cell, some with a text replaced."""
    found = {marks(cell)["id"]: [cell.source] for cell in code_cells(ring()) if marks(cell)["kind"] == "answer"}
    for name, (old, new) in changed.items():
        (source,) = found[name.replace("_", "-")]
        assert old in source
        found[name.replace("_", "-")] = [source.replace(old, new)]
    return found


def test_the_job_that_explains_holds_nothing_that_the_copy_does_not() -> None:
    hidden = {marks(cell)["id"] for cell in ring().cells if marks(cell).get("hidden")}
    for exercise in range(1, 7):
        job = feedback.job(ring(), exercise, answers())
        ids = [marks(cell)["id"] for cell in job.cells]
        assert hidden and not hidden & set(ids) and "SEED = 3" in "".join(cell.source for cell in job.cells)
        pictures = [name for name in ids if name.startswith("play-")]
        assert pictures == ([f"play-{exercise}"] if exercise <= 3 else [])
        assert ids[len(ids) - len(pictures):] == pictures, "after the checks"


def shown(html: str) -> dict[str, object]:
    return {"output_type": "execute_result", "data": {"text/html": html, "text/plain": "<Player>"}}


def test_only_data_is_taken_from_what_untrusted_code_shows() -> None:
    real = html_of(play(ring_all_reduce(3)))
    (picture,) = feedback.pictures(shown(real))
    assert picture["widget"] == "player" and json.loads(picture["data"])["kind"] == "play"
    wrapped = f"<script>alert(1)</script><img src=x onerror=alert(1)>{real}<a href=//evil>"
    assert feedback.pictures(shown(wrapped)) == [picture]
    for nothing in ("<div data-lockstep-player='{'></div>", "<div data-lockstep-other='{}'></div>", "<b>hello</b>",
                    f"<div data-lockstep-player='{'[' * 100000}'></div>", "x" * (feedback.MAX_BYTES + 1)):
        assert feedback.pictures(shown(nothing)) == []
    png = base64.b64encode(feedback.PNG + b"rest").decode()
    assert feedback.pictures({"data": {"image/png": png + "\n"}}) == [{"png": png}]
    for false in ("not base64!", base64.b64encode(b"<svg onload=alert(1)>").decode()):
        assert feedback.pictures({"data": {"image/png": false}}) == []
    assert feedback.pictures({"text": "2 ranks on cpu (gloo)\n"}) == []
    assert feedback.pictures({"text": "2 ranks on cpu (gloo)\nloss 2.5\n"}) == [{"text": "loss 2.5\n"}]


def record(*pictures: feedback.Picture, message: str = "check-1: no") -> dict[str, object]:
    told = {"message": message, "pictures": list(pictures)}
    return {"student": "ada", "slug": "ada", "error": None, "notes": [], "points": 0, "max_points": 2, "exercises": {
        "1": {"points": 0, "max_points": 2, "status": "a check failed", "checks": [], "feedback": told}}}


@pytest.mark.browser
def test_a_page_is_inert_whatever_was_drawn(browser: Browser, tmp_path: Path) -> None:
    """Markup in the data of a picture, in its title and in a message neither runs nor reaches the page or a network."""
    evil = "</script><img src=x onerror=\"top.document.title='x';fetch('http://127.0.0.1:1/')\">'\"&lt;"
    (picture,) = feedback.pictures(shown(html_of(play(ring_all_reduce(3), title=evil))))
    (tmp_path / "page.html").write_text(student_page(record(
        {**picture, "text": evil}, {"text": evil}, message=evil), "lab"), encoding="utf-8")
    page, log = browser.open((tmp_path / "page.html").as_uri())
    frame = page.query_selector("iframe").content_frame()
    page.query_selector("iframe").scroll_into_view_if_needed()
    frame.wait_for_selector("text=Bytes per link")
    assert page.title() == "lab: ada" and page.inner_text("pre") == evil
    assert frame.evaluate("() => { try { return parent.document.title } catch { return 'apart' } }") == "apart"
    page.wait_for_function("document.querySelector('iframe').style.height")  # as high as what is in it
    log.assert_clean()


@pytest.mark.browser
def test_a_long_name_does_not_make_a_phone_s_page_scroll(browser: Browser, tmp_path: Path) -> None:
    long = {**record(), "student": "_".join(["featherstonehaugh"] * 4)}
    (tmp_path / "page.html").write_text(student_page(long, "15_parameter_server"), encoding="utf-8")
    page, _ = browser.open((tmp_path / "page.html").as_uri(), width=390)
    assert page.evaluate("document.documentElement.scrollWidth") <= 390


@pytest.mark.slow
def test_a_wrong_ring_is_played_from_its_first_wrong_step() -> None:
    wrong = answers(reduce_scatter_step=("(rank - step - 1) % world_size]", "(rank - step) % world_size]"))
    told = feedback.told(run(feedback.job(ring(), 1, wrong), sandboxed=False))
    assert told["message"].startswith("check-1: CheckFailed: rank 0 chunk 1 holds only what it held at the start")
    (picture,) = told["pictures"]
    (played,) = json.loads(picture["data"])["runs"]
    assert played["fault"]["step"] == 1 and played["fault"]["says"].startswith("rank 1's chunk 1 also holds rank 0")


@pytest.mark.slow
def test_a_hang_is_explained_by_its_cause() -> None:
    wrong = answers(exchange=("if rank % 2 == 0:", "if True:"))
    told = feedback.told(run(feedback.job(ring(), 6, wrong), sandboxed=False))
    assert "all send first, and nobody receives" in told["message"] and told["pictures"] == []


PRYING = '''
import gc, inspect
found = [str(x) for x in gc.get_objects() if isinstance(x, str)]
raise AssertionError(str([get_ipython().user_ns.get("In"), get_ipython().user_ns.get("SEED"), len(found)]))
'''


@pytest.mark.slow
@pytest.mark.parametrize("user", USERS)
def test_nothing_secret_is_handed_back(user: str, tmp_path: Path) -> None:
    """An answer tells all that it can find: what is handed back has no hidden check and no secret seed."""
    course = Course(tmp_path, attack_lab(1), user == "nobody", explains=True)
    (answer, *_) = [marks(cell)["id"] for cell in code_cells(course.lab) if marks(cell)["kind"] == "answer"]
    course.hand_in("pry", answered(course.lab, **{answer: PRYING}))
    done = course.grade()
    assert done.returncode == 0, done.stderr
    seed = json.loads((tmp_path / "results" / "run.json").read_text())["seed"]
    back = sorted((tmp_path / "results" / "students").iterdir())
    assert [path.name for path in back] == ["pry.gradescope.json", "pry.html", "pry.ipynb"]
    unseen = ["".join(cell.source) for cell in course.lab.cells if marks(cell).get("hidden")]
    hidden = [line.strip() for source in unseen for line in source.split("\n")]
    shared = str([cell.source for cell in answered(course.lab).cells])
    secret = [line for line in hidden if len(line) > 20 and line not in shared]
    assert secret
    for path in back:
        text = path.read_text("utf-8")
        assert "AssertionError" in text or path.suffix == ".ipynb", "what the check said is handed back"
        assert str(seed) not in text and not [line for line in secret if line in text]


def test_the_notebook_has_the_answers_and_what_was_said(tmp_path: Path) -> None:
    exercises = {str(n): {"status": "passed", "points": 2} for n in range(1, 7)}
    told = {"message": "check-1: too large", "pictures": []}
    exercises["1"] = {"status": "a check failed", "points": 0, "feedback": told}
    mine = answers(reduce_scatter_step=("step - 1)", "step)"))
    back = feedback.notebook(deepcopy(ring()), Submission(mine), exercises)
    nbformat.validate(back)
    by_id = {marks(cell).get("id"): cell for cell in back.cells}
    assert by_id["reduce-scatter-step"].source == mine["reduce-scatter-step"][0]
    assert by_id["check-1"].outputs[0].text == "When this was graded: check-1: too large\n"
    assert by_id["check-2"].outputs[0].text == "When this was graded: passed\n"
    assert not [cell for cell in back.cells if marks(cell).get("hidden")]


COPIED = '''
# my own work
def reduce_scatter_step(parts, k):
    "Mine."
    me, n = dist.get_rank(), dist.get_world_size()
    send = parts[(me - k) % n]
    keep = parts[(me - k - 1) % n]
    got = torch.empty_like(keep)
    both = [dist.P2POp(dist.isend, send, (me + 1) % n),
            dist.P2POp(dist.irecv, got, (me - 1) % n)]
    for one in dist.batch_isend_irecv(both): one.wait()
    keep += got
'''
ANOTHER = '''
def reduce_scatter_step(chunks, step):
    size = dist.get_world_size()
    rank = dist.get_rank()
    left, right = (rank + size - 1) % size, (rank + 1) % size
    target = chunks[(left - step) % size]
    buffer = torch.zeros_like(target)
    if rank % 2:
        dist.recv(buffer, left)
        dist.send(chunks[(rank - step) % size], right)
    else:
        dist.send(chunks[(rank - step) % size], right)
        dist.recv(buffer, left)
    target.add_(buffer)
'''


def test_a_copy_with_other_names_is_alike_and_another_way_is_not() -> None:
    name = "reduce-scatter-step"
    again = COPIED.replace("parts", "blocks").replace("# my own work", "# by me")
    given = {"ada": ANOTHER, "bob": COPIED, "eve": again, "joe": "def ("}
    found = list(similar.pairs(ring(), {student: {name: [source]} for student, source in given.items()} | {"sue": {}}))
    assert {(pair.exercise, pair.one, pair.other, pair.share) for pair in found} == {
        (1, "bob", "eve", 1), (1, "bob", similar.PUBLISHED, 1), (1, "eve", similar.PUBLISHED, 1)}


def test_what_the_exercise_makes_all_write_says_nothing() -> None:
    """The stub counts for nothing, and neither does an answer that a third of the class has written."""
    stub = {marks(cell)["id"]: [without_solutions(cell.source, 1)[0]] for cell in code_cells(ring())
            if marks(cell)["kind"] == "answer"}
    assert not list(similar.pairs(ring(), {"ada": stub, "bob": stub}))
    everybody = {f"student {n}": {"reduce-scatter-step": [ANOTHER]} for n in range(9)}
    assert not list(similar.pairs(ring(), everybody))


@pytest.mark.parametrize("one, other, same", [
    ("def f(a: int) -> int:\n    return a + 1", "def g(value):\n    'Adds.'\n    return value + 1  # one", True),
    ("x = dist.isend(t, 1)", "x = dist.irecv(t, 1)", False), ("x = y + 1", "x = y + 2", False),
    ("for i in range(3):\n    a[i] = b", "for k in range(3):\n    a[k] = b", True)])
def test_own_names_comments_and_hints_make_no_difference(one: str, other: str, same: bool) -> None:
    assert (similar.plain(one) == similar.plain(other)) == same
