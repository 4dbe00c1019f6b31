"""Pages apart from chapters and labs: their words and links are those of the package and of each other."""
from __future__ import annotations

import ast
import re
import shlex
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import nbformat
import pytest
from docutils import nodes
from nbformat import NotebookNode

from book.__main__ import COMMANDS
from book.authoring import wayfinding
from book.authoring.symbols import BEGINS, FORMULA, PAGE, ROW, chapters, first_uses, symbols_in
from book.authoring.syllabus import SYLLABUS, weeks
from book.authoring.wayfinding import PLAIN_WORDS, found_first, linked, pattern_of, with_words
from book.cost.__main__ import _parser as planner_parser
from book.grading import reference
from book.grading.__main__ import parser
from book.grading.handed_in import MAX_DEPTH
from book.grading.lab import needed, points, read_lab
from book.grading.sandbox import Limits
from book.grading.submission import MAX_BYTES
from book.legacy import LegacyError, Overview, Row, ScriptError, Section, observe, observe_ranks, run_script
from tests.browser import Browser
from tests.website import ROOT, Site



CALLS = "chapters/90_legacy_map"
GLOSSARY = "chapters/91_glossary"
WORDS_OF_SEARCH = Path(wayfinding.__file__).with_name("search_words.txt")
CHINESE = re.compile("[\u4e00-\u9fff]")
LINK = re.compile(r" \[([^]]+)\]\(((?:\.\./labs/)?\w+\.ipynb)(#[\w-]+)?\)$")
OTHER_SPELLINGS = re.compile(
    r"\b(all ?reduce|all ?gather|reduce ?scatter|all ?to ?all|micro ?batch|point to point)\b", re.I)


@dataclass(frozen=True)
class Term:
    """An entry of the glossary."""

    theme: str
    english: str
    chinese: str
    meaning: str
    page: str | None


def terms() -> Iterator[Term]:
    """Read the glossary's entries: a line in English, one in Chinese, an indented sentence that may end in a link."""
    text = (ROOT / f"{GLOSSARY}.md").read_text("utf-8")
    for theme, block in re.findall(r"^## ([^\n]+)\n\n```\{glossary\}\n(.*?)^```$", text, re.M | re.S):
        for entry in block.strip().split("\n\n"):
            english, chinese, body = entry.split("\n")
            link = LINK.search(body)
            yield Term(theme, english, chinese, LINK.sub("", body).strip(), link[2] if link else None)


ALL_TERMS = list(terms())


def notebook(page: str) -> NotebookNode:
    return nbformat.read(ROOT / f"{page}.ipynb", as_version=4)


def calls() -> Iterator[tuple[str, str, NotebookNode]]:
    """Each heading of an old call without its backticks, the name in the row below it, and that row's cell."""
    headings: list[str] = []
    for cell in notebook(CALLS).cells:
        if cell.cell_type == "markdown":
            headings = re.findall(r"^### (.*)$", cell.source, re.M) or headings
            continue
        rows = [node for node in ast.walk(ast.parse(cell.source)) if isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute) and node.func.attr == "row"]
        for row in rows:
            yield headings.pop(0).replace("`", ""), ast.literal_eval(row.args[0]), cell


ALL_CALLS = list(calls())


def test_every_old_call_has_a_heading_and_a_row_of_one_name() -> None:
    headings = [line for cell in notebook(CALLS).cells if cell.cell_type == "markdown"
                for line in re.findall(r"^### .*$", cell.source, re.M)]
    assert 25 <= len(ALL_CALLS) == len(headings) == len({name for _, name, _ in ALL_CALLS})
    assert [heading for heading, _, _ in ALL_CALLS] == [name for _, name, _ in ALL_CALLS]


@pytest.mark.parametrize("name, cell", [(name, cell) for _, name, cell in ALL_CALLS])
def test_every_row_is_shown_below_its_code(name: str, cell: NotebookNode) -> None:
    """That it is true is checked where it is made: the cell raises otherwise, and nbval runs it."""
    (shown,) = [output.data for output in cell.outputs if "text/markdown" in output.get("data", {})]
    assert shown["text/plain"].startswith(name + " ")
    assert re.match(r"\*\*Today\*\* it (raises|warns|fails|hangs|runs)", shown["text/markdown"])


def test_the_table_of_calls_leads_to_every_heading(site: Site) -> None:
    built = (site.folder / f"{CALLS}.html").read_text("utf-8")
    table = built[built.index("call-map"):]
    anchors = re.findall(r'<tr><td><a href="#([^"]+)"', table[:table.index("</table>")])
    assert len(anchors) == len(ALL_CALLS) == len(set(anchors))
    assert not [anchor for anchor in anchors if f'id="{anchor}"' not in built]


def test_every_term_stands_once_and_in_order() -> None:
    names = [term.english.casefold() for term in ALL_TERMS]
    assert 60 <= len(names) == len(set(names)) and len({term.chinese for term in ALL_TERMS}) == len(names)
    by_theme = {term.theme: [other.english.casefold() for other in ALL_TERMS if other.theme == term.theme]
                for term in ALL_TERMS}
    assert all(listed == sorted(listed) for listed in by_theme.values()), by_theme


@pytest.mark.parametrize("term", ALL_TERMS, ids=lambda term: term.english)
def test_a_term_is_complete_and_taught_where_it_says(term: Term) -> None:
    assert CHINESE.search(term.chinese) and not CHINESE.search(term.english)
    assert re.fullmatch(r"[^.]+\.", term.meaning.replace("torch.distributed", "")), "one sentence"
    assert not OTHER_SPELLINGS.search(term.english + " " + term.meaning)
    if term.page:
        chapter = notebook(f"chapters/{term.page.removesuffix('.ipynb')}")
        text = " ".join(" ".join(cell.source for cell in chapter.cells).split())
        assert re.search(rf"\b{re.escape(term.english)}", text, re.I), f"{term.page} has no {term.english}"


def test_terms_have_addresses_and_chinese_is_marked(site: Site) -> None:
    built = (site.folder / f"{GLOSSARY}.html").read_text("utf-8")
    assert len(re.findall(r'<dt id="term-', built)) == 2 * len(ALL_TERMS)
    assert len(re.findall('<span lang="zh-Hans">', built)) == len(ALL_TERMS)


@pytest.mark.parametrize("query", ["all-reduce", "梯度桶"])
def test_search_finds_a_term_in_either_language(site: Site, browser: Browser, query: str) -> None:
    page, log = browser.open((site.folder / "search.html").as_uri() + f"?q={query}")
    page.wait_for_selector(f"#search-results li a[href*='{GLOSSARY}']")  # they are listed one by one
    log.assert_clean()


# What readers look for, by a part of the name of the page that has to come first.
LOOKED_FOR = {
    "when_it_hangs": "NCCL timeout, deadlock, cannot pickle",
    "81_starting_ranks": "torchrun",
    "when_a_rank_dies": "flight recorder, elastic, checkpoint, goodput",
    "ring_all_reduce": "chapter 3, all-reduce, allreduce, ring all-reduce",
    "pipeline_parallel": "chapter 6, pipeline, bubble, 1F1B",
    "data_parallel": "DDP, DistributedDataParallel, buckets, gradient accumulation, no_sync",
    "legacy_map": "DataParallel, torch.distributed.launch",
    "ddp_in_pytorch": "find_unused_parameters",
    "sharded_data_parallel": "FSDP, fully_shard, ZeRO",
    "hybrid_pytorch": "HSDP",
    "tensor_parallel": "tensor parallel",
    "tensor_in_pytorch": "sequence parallelism, DTensor",
    "hybrid_3d": "3d parallelism, DeviceMesh",
    "09_experts": "mixture of experts, expert parallelism, MoE",
    "context_parallel": "context parallelism, ring attention, Ulysses",
    "parameter_server": "parameter server, RPC, staleness",
    "planner": "planner",
    "slow_jobs": "MFU, straggler, why is my job slow",
    "frameworks": "accelerate, lightning",
    "beyond_one_machine": "slurm",
    "job_managers": "kubernetes, busbw",
    "starting_ranks": "init_process_group",
    "training_with_ddp": "DistributedSampler",
    "01_ranks": "broadcast",
    "glossary": "glossary",
    "symbols": "symbols",
    "cheat_sheet": "cheat sheet",
    "all_reduce_in_libraries": "NCCL_ALGO",
}


@pytest.mark.slow
def test_the_search_finds_the_right_page_first(site: Site, browser: Browser) -> None:
    first = {}
    for query in [query for queries in LOOKED_FOR.values() for query in queries.split(", ")]:
        page, log = browser.open((site.folder / "search.html").as_uri() + f"?q={quote(query)}")
        page.wait_for_selector("#search-results li a")
        first[query] = page.locator("#search-results li a").first.get_attribute("href")
        browser.take_back()
    wanted = {query: name for name, queries in LOOKED_FOR.items() for query in queries.split(", ")}
    assert len(wanted) >= 40
    assert not {query: href for query, href in first.items() if wanted[query] not in href}


def test_what_is_found_is_quoted(site: Site, browser: Browser) -> None:
    page, log = browser.open((site.folder / "search.html").as_uri() + "?q=flight+recorder")
    quoted = page.locator("#search-results li", has=page.locator("a[href*=when_a_rank_dies]")).first.locator(".context")
    assert "flight recorder" in quoted.inner_text().lower() and quoted.locator("mark").count()
    sign, typed = (page.locator(f".bd-search-container .bd-search {part}").bounding_box() for part in ("i", "input"))
    padding = page.locator(".bd-search-container input").evaluate("it => parseFloat(getComputedStyle(it).paddingLeft)")
    assert sign["x"] + sign["width"] < typed["x"] + padding
    log.assert_clean()


def test_words_of_the_search_lead_to_pages_and_sections_that_are_there(site: Site) -> None:
    names = [path.with_suffix("").relative_to(ROOT).as_posix() for path in chapters(ROOT)]
    leads = found_first(ROOT, [*names, PAGE])
    assert {"chapter 3", "torchrun", "flight recorder", "nccl timeout"} <= set(leads)
    for line in WORDS_OF_SEARCH.read_text("utf-8").splitlines():
        assert line.startswith("#") or any(re.sub(r"\w+/\d+_", "", page) == line.partition(": ")[0]
                                           for page, _ in leads.values()), line
    for words, (page, anchor) in leads.items():
        built = (site.folder / f"{page}.html").read_text("utf-8")
        assert not anchor or f'id="{anchor}"' in built, words


# Letters that one cell uses and says in the same sentence what they are.
SAID_THERE = {"u", "H", "l", "q"}


def test_every_letter_of_a_formula_has_one_meaning_in_the_table() -> None:
    rows = [row for row in ROW.findall((ROOT / f"{PAGE}.md").read_text("utf-8")) if row]
    listed = [re.findall(r"\\?([A-Za-z]+)", latex)[0] for row in rows for _, latex in FORMULA.findall(row)]
    assert len(listed) == len(set(listed)) > 40, "a letter stands twice"
    used = {symbol: path.name for symbol, path in first_uses(ROOT).items()}
    assert {symbol: used[symbol][:2] for symbol in BEGINS} == BEGINS
    assert not {symbol: page for symbol, page in used.items() if symbol not in {*listed, *SAID_THERE}}


def test_letters_are_told_from_words_and_code() -> None:
    assert symbols_in(r"2\frac{t-1}{t}n_\text{ring} + \log_2 N \, \Psi") == {"t", "n", "N", "Psi"}
    assert [inline for _, inline in FORMULA.findall(r"costs \$3 and $(N-1)n$, or $n$ in $HOME")] == ["(N-1)n", "n"]


def test_the_page_of_symbols_leads_to_where_each_is_first_used(site: Site) -> None:
    built = (site.folder / f"{PAGE}.html").read_text("utf-8")
    rows = re.findall(r"<tr[^>]*>.*?</tr>", built, re.S)
    assert len(rows) > 45 and [row for row in rows if "<td" in row and "chapter\u00a01</" in row]
    where = {re.search("<td.*?</td>", row, re.S)[0]: row for row in rows if "<td" in row}
    for letter, chapter in (("v", 6), ("W", 15), ("k", 11), ("S", 2), ("N", 1)):  # chapter 5 has its own v and W
        [row] = [row for cell, row in where.items() if re.search(rf">{letter}</mi>", cell)]
        assert f"chapter\u00a0{chapter}</" in row, letter
    assert not [row for row in rows if "<td" in row and "href=" not in row]


LABS = sorted((ROOT / "labs").glob("*.ipynb"))
INSTRUCTORS, STUDENTS = ((ROOT / "chapters" / name).read_text("utf-8")
                         for name in ("92_for_instructors.md", "93_for_students.md"))
DOCUMENTS = {"instructors": INSTRUCTORS, "students": STUDENTS,
             **{name: (ROOT / name).read_text("utf-8") for name in ("README.md", "CONTRIBUTING.md")}}
NUMBERS = {1: "one", 2: "two", 3: "three", 4: "four", 5: "five", 10: "Ten", 11: "Eleven", 12: "Twelve", 13: "Thirteen",
           14: "Fourteen", 15: "Fifteen"}


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


SYLLABUS_TEXT = SYLLABUS.read_text("utf-8")
WEEKS = list(weeks(SYLLABUS_TEXT))


def set_in(cell: str) -> list[tuple[str, list[int]]]:
    """The labs, by name, and the exercises of each that a cell of the syllabus' tables sets."""
    return [(name, [int(n) for n in numbers.split(", ")])
            for name, numbers in re.findall(r"\(\.\./labs/(\w+)\.ipynb\): ([\d, ]*\d)", cell)]


@pytest.mark.parametrize("first", ["Week", "Week of six", "Begin"])
def test_the_syllabus_has_the_labs_points_and_sets_what_its_exercises_need(first: str) -> None:
    *rows, total = table(SYLLABUS_TEXT, first)
    for row in rows:
        worth = 0
        for name, numbers in set_in(row[-3]):
            lab = read_lab(ROOT / "labs" / f"{name}.ipynb")
            worth += sum(points(lab)[number] for number in numbers)
            assert set().union(*(needed(lab, number) for number in numbers)) == set(numbers), row
        assert worth == int(row[-2] or 0), row
    for column in (-2, -1):
        assert sum(float(row[column] or 0) for row in rows) == float(total[column])


def test_weeks_of_the_syllabus_are_those_of_its_table_and_name_each_exercise_as_its_lab_does() -> None:
    rows = table(SYLLABUS_TEXT, "Week")[:-1]
    assert [(str(week.number), week.title) for week in WEEKS] == [(row[0], row[1]) for row in rows]
    assert [name for week in WEEKS for name in week.chapters()] == [path.stem for path in LABS]  # in the story's order
    for week, row in zip(WEEKS, rows):
        assert list(week.fields) == ["Question", "Read", "Show", "Lab", "Afterwards", "Discuss", "Answer"], week.number
        told = []
        for name, said in re.findall(r"\(\.\./labs/(\w+)\.ipynb\): (.*?)\.(?= \[|$)", week.fields["Lab"]):
            lab = read_lab(ROOT / "labs" / f"{name}.ipynb")
            headings = dict(re.findall(r"^## (\d+)\. (.+)$", "\n".join(cell.source for cell in lab.cells), re.M))
            numbers = [int(number) for number in re.findall(r"(?:^|; )(\d+)\. ", said)]
            told.append((name, numbers))
            assert said == "; ".join(f"{n}. {headings[str(n)]} ({points(lab)[n]})" for n in numbers)
        assert told == set_in(row[3])


def test_tables_of_what_holds_today_name_the_pinned_version() -> None:
    pinned, = re.findall(r"^torch==(\d+\.\d+)", (ROOT / "requirements.txt").read_text("utf-8"), re.MULTILINE)
    pages = "".join(path.read_text("utf-8") for path in (ROOT / "chapters").glob("*.ipynb"))
    heads = re.findall(r"\| (?:they say|then) \| today([^|]*) \|", pages)
    assert len(heads) > 5 and {*heads} == {f" (2026, PyTorch {pinned})"}


def test_numbers_agree_in_file_names_headings_and_contents() -> None:
    """Chapters and labs are quoted by number, and stand in its order. Each chapter's lab has the chapter's name."""
    contents = dict(re.findall(r'- file: (\S+)\n +title: "?([^"\n]+)', (ROOT / "_toc.yml").read_text("utf-8")))
    names = {}
    for folder, begins in (("chapters", "{}. "), ("labs", "Lab {}: ")):
        paths = [path for path in sorted((ROOT / folder).glob("*.ipynb")) if path.stem < "80"]
        for path in paths:
            numbered = begins.format(int(path.stem[:2]))
            assert nbformat.read(path, 4).cells[0].source.startswith(f"# {numbered}"), path
            assert contents[f"{folder}/{path.stem}"].startswith(numbered), path
        names[folder] = [path.stem for path in paths]
        assert [page for page in contents if page.startswith(f"{folder}/") and page.split("/")[1] < "80"] == [
            f"{folder}/{name}" for name in names[folder]]
    assert names["chapters"] == names["labs"]


@pytest.mark.parametrize("name", DOCUMENTS)
def test_every_command_can_be_read_by_the_parser(name: str) -> None:
    text = DOCUMENTS[name].replace("\\\n", "")  # a shell joins these lines too
    commands = re.findall(r"^(?:\.venv/bin/)?lockstep (\w+ [^`\n]*[^`\s])$", text, re.M)
    assert commands or name == "CONTRIBUTING.md"
    for command in commands:
        word, *rest = shlex.split(command, comments=True)
        read = {"book.grading": parser, "book.cost": planner_parser}.get(COMMANDS[word][0])
        options = read().parse_args([word, *rest]) if read else None
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
    for name in re.findall(r"`(?:(?:students|private)/NAME\.)?([\w.]+)`", " ".join(listed)):
        assert name.removesuffix(".json").removesuffix(".csv") in sources, name


@pytest.mark.slow
def test_a_copy_is_made_where_only_the_website_can_be_built(tmp_path: object) -> None:
    """Without torch, and without what checks and sandboxes need."""
    absent = ("torch", "psutil", "nbval", "pytest", "jupyter_client", "IPython", "tqdm")
    code = (f"import sys; sys.modules.update(dict.fromkeys({absent})); from book.grading.__main__ import main; "
            f"sys.exit(main(['release', 'labs', '-o', {str(tmp_path)!r}]))")
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, text=True, capture_output=True, timeout=120)
    assert run.returncode == 0 and run.stdout.count("wrote") == len(LABS), run.stderr


def refuses() -> None:
    raise ValueError("Not like this. Use `that` (/home/me/file.py) instead. And so on.")


def warns() -> int:
    warnings.warn("It is old. Use `that` instead.", FutureWarning, stacklevel=2)
    return 7


def nothing() -> None:
    return None


def row(old: Callable[[], Any] = nothing, new: Callable[[], Any] = nothing, **stated: Any) -> Row:
    return Section("Calls").row("old()", old, "new()", new, today="Words.", **stated)


@pytest.mark.parametrize("stated, happened, said", [
    (dict(old=refuses, raises=ValueError, says="that"), "raises `ValueError`", "Use `that` instead"),
    (dict(old=warns, warns=FutureWarning, says="that", gives=7), "warns of a `FutureWarning`", "Use `that` instead"),
    (dict(old=lambda: run_script("python train.py", "1 / 0"), raises=ScriptError, says="zero"),
     "fails", "ZeroDivisionError: division by zero"),
    (dict(old=lambda: 3, gives=3), "runs", "")])
def test_a_row_shows_what_happened_and_the_sentence_that_says_so(stated: dict, happened: str, said: str) -> None:
    made = row(**stated)
    assert (made.happened, made.said) == (happened, said)
    assert made.happened in made._repr_markdown_() and made.said in made._repr_markdown_()


@pytest.mark.parametrize("stated, complaint", [
    (dict(old=refuses, raises=KeyError), "raises ValueError: Not like this.*; the row says that it raises KeyError"),
    (dict(old=refuses), "raises ValueError"),
    (dict(raises=ValueError), "raises and warns of nothing; the row says that it raises ValueError"),
    (dict(old=refuses, raises=ValueError, says="the other"), "'the other' stands in it"),
    (dict(old=warns, gives=7), "the row says nothing of a warning"),
    (dict(old=warns, warns=DeprecationWarning, gives=7), "the row says that it warns of a DeprecationWarning"),
    (dict(old=warns, warns=FutureWarning, says="the other", gives=7), "'the other' stands in it"),
    (dict(old=warns, warns=FutureWarning), "gives 7; the row says None"),
    (dict(old=lambda: 3, gives=4), "gives 3; the row says 4"),
    (dict(new=refuses), r"new\(\), the new code, raises ValueError"),
    (dict(new=warns, new_gives=7), r"new\(\), the new code, warns: FutureWarning"),
    (dict(new=lambda: 3), r"new\(\) gives 3; the row says None")])
def test_a_row_that_is_not_true_fails(stated: dict, complaint: str) -> None:
    section = Section("Calls")
    with pytest.raises(LegacyError, match=complaint):
        section.row("old()", stated.pop("old", nothing), "new()", stated.pop("new", nothing), today="", **stated)
    assert not section.rows


def test_a_cell_that_runs_twice_keeps_one_row() -> None:
    section = Section("Calls")
    for _ in range(2):
        section.row("old()", nothing, "new()", nothing, today="Words.")
    assert len(section.rows) == 1


def test_a_warning_that_python_would_show_once_is_seen_each_time() -> None:
    assert observe(warns).warned == observe(warns).warned != ()


@pytest.mark.slow
def test_ranks_give_a_list_and_say_on_stderr_what_only_cpp_warns_of(capfd: pytest.CaptureFixture[str]) -> None:
    def on_a_rank() -> int:
        import os
        import sys
        print("[W1121 reducer.cpp:1] Warning: slow (function operator())", file=sys.stderr)
        warnings.warn("old", FutureWarning, stacklevel=2)
        return 10 * int(os.environ["RANK"])
    outcome = observe_ranks(on_a_rank, 2)
    assert outcome.value == [0, 10] and outcome.error is None
    assert {(w.category, w.text) for w in outcome.warned} == {
        ("FutureWarning", "old"), ("Warning", "slow (function operator())")}
    assert capfd.readouterr().out == ""


@pytest.mark.slow
def test_the_error_of_one_rank_and_a_hang_are_distinguished() -> None:
    def one_refuses() -> None:
        import os
        if os.environ["RANK"] == "1":
            raise KeyError("rank 1")

    def waits() -> None:
        import torch
        import torch.distributed as dist
        dist.init_process_group("gloo")
        dist.recv(torch.zeros(1), src=1 - dist.get_rank())
    assert observe_ranks(one_refuses, 2).error == "KeyError"
    assert observe_ranks(waits, 2).error == "HangError"


@pytest.mark.slow
def test_a_script_gives_what_it_printed_and_its_warnings() -> None:
    source = "import warnings; print(6 * 7); warnings.warn('it is old', FutureWarning)"
    outcome = observe(lambda: run_script("python train.py", source))
    assert outcome.value == "42" and [(w.category, w.text) for w in outcome.warned] == [("FutureWarning", "it is old")]


@pytest.mark.slow
def test_a_script_that_fails_says_why() -> None:
    with pytest.raises(ScriptError, match="ZeroDivisionError"):
        run_script("python train.py", "1 / 0")


@pytest.mark.slow
def test_a_script_that_hangs_is_ended_with_its_ranks(tmp_path: Any) -> None:
    """torchrun starts its ranks in sessions of their own."""
    source = f"import os, time; open('{tmp_path}/' + str(os.getpid()), 'w').close(); time.sleep(300)"
    with pytest.raises(ScriptError, match="has not ended after 10 s"):
        run_script("torchrun --standalone --nproc-per-node=2 train.py", source, limit_s=10)
    started = [path.name for path in tmp_path.iterdir()]
    assert len(started) == 2
    assert subprocess.run(["ps", "-o", "pid=", "-p", ",".join(started)], capture_output=True, text=True).stdout == ""


def test_the_overview_links_each_row_to_its_heading_and_escapes_code() -> None:
    section = Section("Calls")
    section.row('mesh["tp"] of <a> mesh', nothing, "new()", nothing, today="Use `x`. More.")
    shown = Overview(section)._repr_html_()
    assert '<a href="#mesh-tp-of-a-mesh">' in shown and "&lt;a&gt;" in shown
    assert "Runs. Use <code>x</code>.<" in shown and repr(Overview(section)) == "1 old calls in 1 sections"


TERMS = "a.term"


def searched(site: Site, browser: Browser, query: str) -> Any:
    """The first result of a search, on a page from a folder; they are listed one by one."""
    page, _ = browser.open((site.folder / "search.html").as_uri() + f"?q={query}")
    page.wait_for_selector("#search-results li a")
    return page.locator("#search-results li a").first


@pytest.mark.parametrize("query, target", [("FSDP", "04_sharded_data_parallel.html"), ("气泡", "91_glossary.html#"),
                                           ("ring", "03_ring_all_reduce.html")])
def test_the_search_finds_a_title_first(site: Site, browser: Browser, query: str, target: str) -> None:
    first = searched(site, browser, query)
    address = first.get_attribute("href")
    assert target in address
    if "#" in target:
        first.click()
        term = first.page.locator(f"[id='{address.split('#')[1]}']")
        assert "流水线气泡" in term.locator("xpath=..").inner_text()


def test_a_term_leads_to_the_glossary_where_it_is_first_used(site: Site, browser: Browser) -> None:
    page, log = browser.open((site.folder / "chapters" / "03_ring_all_reduce.html").as_uri())
    names = [text.lower() for text in page.locator(TERMS).all_text_contents()]
    assert len(names) > 10 and len(set(names)) == len(names), "each once"
    assert page.locator(f":is(h1, h2, h3, code, pre, a a) {TERMS}").count() == 0
    page.locator(TERMS).first.click()
    page.wait_for_url("**/91_glossary.html#term-*")
    assert page.evaluate("!!document.querySelector(decodeURIComponent(location.hash))")
    log.assert_clean()


def test_plain_words_lead_to_the_glossary_only_where_they_are_terms(site: Site) -> None:
    linked_on = {word: set() for word in PLAIN_WORDS}
    for path in (site.folder / "chapters").glob("[0-9]*.html"):
        for word in re.findall(r'<a class="term[^>]*>([a-z]+?)s?</a>', path.read_text("utf-8"), re.IGNORECASE):
            linked_on.get(word.lower(), set()).add(path.name[:2])
    assert linked_on == PLAIN_WORDS
    assert not [path.name for path in (site.folder / "chapters").glob("*.html")
                if re.search('<a class="term[^>]*>zero', path.read_text("utf-8"))]


def test_a_term_is_a_whole_word_or_its_plural() -> None:
    left = {"rank": "term-rank", "ring all-reduce": "term-ring"}
    any_term = pattern_of(tuple(left))
    parts = list(linked("Ranked; ranks pass a ring all-reduce to rank 1.", any_term, left, "glossary.html"))
    links = [(part.astext(), part["refuri"]) for part in parts if isinstance(part, nodes.reference)]
    assert [*linked("It adds zeros; NCCL does.", pattern_of(("zero",)), {"zero": "term-ZeRO"}, "")] == [
        nodes.Text("It adds zeros; NCCL does.")]
    assert links == [("ranks", "glossary.html#term-rank"), ("ring all-reduce", "glossary.html#term-ring")]
    assert "".join(part.astext() for part in parts) == "Ranked; ranks pass a ring all-reduce to rank 1." and not left


def test_parts_of_chinese_terms_lead_to_the_term_that_ends_so() -> None:
    found = with_words({}, {"chapters/1": "Ring all-reduce"}, {"零气泡调度": "b", "流水线气泡": "a"},
                       {"chapters/1": 0, "chapters/91_glossary": 1})
    assert found["气泡"] == [[1, "a"]] and found["零气"] == [[1, "b"]] and found["ring"] == [[0, None]]
