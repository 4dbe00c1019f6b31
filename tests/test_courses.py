"""The pages for courses: their plan, commands, limits and messages are those of the labs and of the grader."""
from __future__ import annotations

import re
import shlex
import subprocess
import sys

import pytest

from book.grading import reference
from book.grading.__main__ import parser
from book.grading.handed_in import MAX_DEPTH
from book.grading.lab import points, read_lab
from book.grading.sandbox import Limits
from book.grading.submission import MAX_BYTES
from tests.website import ROOT

LABS = sorted((ROOT / "labs").glob("*.ipynb"))
INSTRUCTORS, STUDENTS = ((ROOT / "chapters" / name).read_text("utf-8")
                         for name in ("92_for_instructors.md", "93_for_students.md"))
DOCUMENTS = {"instructors": INSTRUCTORS, "students": STUDENTS,
             **{name: (ROOT / name).read_text("utf-8") for name in ("README.md", "CONTRIBUTING.md")}}
NUMBERS = {1: "one", 2: "two", 3: "three", 4: "four", 5: "five", 10: "Ten", 11: "Eleven", 12: "Twelve"}


def table(text: str, first: str) -> list[list[str]]:
    """The rows of the table whose first heading this is."""
    lines = text[text.index(f"| {first} |"):].split("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_the_plan_has_every_lab_with_its_points() -> None:
    plan = {re.search(r"labs/(\w+)\.ipynb", row[2])[1]: row for row in table(INSTRUCTORS, "Weeks") if "labs/" in row[2]}
    assert list(plan) == [path.stem for path in LABS]
    assert INSTRUCTORS.startswith(f"# For instructors\n\n{NUMBERS[len(LABS)]}")
    for path in LABS:
        worth = points(read_lab(path))
        assert plan[path.stem][3] == " + ".join(map(str, worth.values())), path.stem
        assert plan[path.stem][4] == str(sum(worth.values())), path.stem


def test_the_plan_adds_up_and_names_every_chapter() -> None:
    *rows, total = table(INSTRUCTORS, "Weeks")
    for column in (4, 5):
        assert sum(int(row[column] or 0) for row in rows) == int(total[column])
    read = re.findall(r"\((\w+)\.ipynb\)", "".join(row[1] for row in rows))
    assert read == [path.stem for path in sorted((ROOT / "chapters").glob("*.ipynb")) if path.stem < "80"]


@pytest.mark.parametrize("name", DOCUMENTS)
def test_every_command_can_be_read_by_the_parser(name: str) -> None:
    text = DOCUMENTS[name].replace("\\\n", "")  # a shell joins these lines too
    commands = re.findall(r"python -m book\.grading (\w+ [^`\n]*[^`\s])$", text, re.M)
    assert commands or name == "CONTRIBUTING.md"
    for command in commands:
        options = parser().parse_args(shlex.split(command))
        for path in [*getattr(options, "labs", []), getattr(options, "lab", ROOT)]:
            assert (ROOT / path).exists(), command


def test_options_that_the_pages_name_exist() -> None:
    verbs = parser()._subparsers._group_actions[0].choices.values()
    known = {flag for verb in verbs for flag in verb._option_string_actions}
    named = {flag for text in (INSTRUCTORS, STUDENTS)
             for flag in re.findall(r"(?<=[`\s])--?[a-z][a-z-]*(?=[`\s])", text)}
    assert {"--variant", "--source", "-j", "--exercise"} <= named <= known | {"--nbval", "-m"}, named - known


def test_limits_are_those_of_the_grader() -> None:
    assert f"{Limits().memory_bytes >> 30} GiB of memory" in INSTRUCTORS
    assert f"at most {MAX_BYTES >> 20} MiB" in STUDENTS
    assert f"at most {NUMBERS[MAX_DEPTH]} levels down" in INSTRUCTORS
    assert reference.ALLOWANCE_S == 60 and f"a minute more than {NUMBERS[reference.TIMES_SLOWER]} times" in INSTRUCTORS


def test_messages_are_those_of_the_grader() -> None:
    sources = " ".join(re.sub(r'"\s*\n\s*f?"', "", path.read_text("utf-8"))
                       for path in (ROOT / "book/grading").glob("*.py"))
    for message, _ in table(STUDENTS, "message"):
        for piece in filter(None, map(str.strip, re.split(r"…|, |: | (?=that your)", message))):
            assert piece in sources, message


def test_files_of_the_results_are_those_of_the_grader() -> None:
    sources = "".join(path.read_text("utf-8") for path in (ROOT / "book" / "grading").glob("*.py"))
    listed = re.findall(r"^((?:`[\w./]+`(?:, )?)+)\n: ", INSTRUCTORS, re.M)
    assert len(listed) >= 6
    for name in re.findall(r"`(?:students/NAME\.)?([\w.]+)`", " ".join(listed)):
        assert name.removesuffix(".json") in sources, name


@pytest.mark.slow
def test_a_copy_is_made_where_only_the_website_can_be_built(tmp_path: object) -> None:
    """Without torch, and without what checks and sandboxes need."""
    absent = ("torch", "psutil", "nbval", "pytest", "jupyter_client", "IPython", "tqdm")
    code = (f"import sys; sys.modules.update(dict.fromkeys({absent})); from book.grading.__main__ import main; "
            f"sys.exit(main(['release', 'labs', '-o', {str(tmp_path)!r}]))")
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, text=True, capture_output=True, timeout=120)
    assert run.returncode == 0 and run.stdout.count("wrote") == len(LABS), run.stderr
