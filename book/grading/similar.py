"""L4: which answers are alike beyond what their exercise makes alike: names, comments and layout changed or not.

An answer becomes the tokens of its syntax tree, with the names that it chooses itself numbered in their order. What
two answers share is counted in runs of tokens, as in fingerprints of documents; runs that the student
copy gives to everybody, or that many students wrote, do not count.
"""
from __future__ import annotations

import ast
import csv
import io
import tokenize
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from nbformat import NotebookNode

from book.grading.lab import Answers, answer_cells, marks, points
from book.grading.release import without_solutions
from book.grading.report import no_formula

RUN = 12  # tokens: about a line
FEWEST = 30  # runs of their own, below which two answers are too short to say anything
OFTEN = 0.3  # the share of students, three at least, from which on a run is what the exercise makes all write
ALIKE = 0.8  # the share of the shorter answer's runs from which on a pair is shown
PUBLISHED = "the published solution"


@dataclass(frozen=True)
class Pair:
    """Two students whose answers to an exercise are alike, and the share of the shorter one that the other has too."""
    exercise: int
    one: str
    other: str
    share: float


def pairs(lab: NotebookNode, answers: Mapping[str, Answers]) -> Iterator[Pair]:
    """The pairs of students with answers alike, exercise by exercise, the most alike first.

    `answers` are each student's sources by the ids of answer cells. The lab's own solution is compared too.
    """
    for exercise in points(lab):
        cells = answer_cells(lab, exercise)
        given = set().union(*(runs(without_solutions(cell.source, exercise)[0]) for cell in cells))
        found = {name: set().union(*(runs("\n".join(own.get(marks(cell)["id"], []))) for cell in cells)) - given
                 for name, own in answers.items()}
        count = Counter(run for own in found.values() for run in own)
        usual = {run for run, times in count.items() if times >= max(4, OFTEN * len(answers))}
        found[PUBLISHED] = set().union(*(runs(cell.source) for cell in cells)) - given
        yield from sorted(_alike(exercise, {name: own - usual for name, own in found.items()}),
                          key=lambda pair: (-pair.share, pair.one, pair.other))


def _alike(exercise: int, found: Mapping[str, set[int]]) -> Iterator[Pair]:
    names = sorted((name for name, own in found.items() if len(own) >= FEWEST), key=lambda name: name != PUBLISHED)
    for place, one in enumerate(names):
        for other in names[place + 1:]:
            share = len(found[one] & found[other]) / min(len(found[one]), len(found[other]))
            if share >= ALIKE:
                first, second = (other, one) if one == PUBLISHED else sorted((one, other))
                yield Pair(exercise, first, second, share)


def runs(source: str) -> set[int]:
    """All runs of tokens of an answer whose own names are numbered; of one that is no Python, of what it says."""
    try:
        words = [token.string for token in tokenize.generate_tokens(io.StringIO(plain(source)).readline)
                 if token.string.strip()]
    except (SyntaxError, ValueError, RecursionError, tokenize.TokenError):
        words = source.split()
    return {hash(tuple(words[start:start + RUN])) for start in range(len(words) - RUN + 1)}


def plain(source: str) -> str:
    """Source with its own names numbered in the order in which they come, and without comments, docstrings and hints.

    Raises SyntaxError for what is no Python.
    """
    tree = ast.parse(source)
    own = {name: f"name{number}" for number, name in enumerate(dict.fromkeys(_chosen(tree)))}
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and node.id in own:
            node.id = own[node.id]
        elif isinstance(node, ast.arg):
            node.arg, node.annotation = own[node.arg], None
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            node.name = own[node.name]
            node.body = [part for part in node.body if not _is_text(part)] or [ast.Pass()]
            if not isinstance(node, ast.ClassDef):
                node.returns = None
    return ast.unparse(tree)


def _chosen(tree: ast.AST) -> Iterator[str]:
    """The names that a source gives itself: of functions, arguments and variables."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id


def _is_text(part: ast.stmt) -> bool:
    return isinstance(part, ast.Expr) and isinstance(part.value, ast.Constant) and isinstance(part.value.value, str)


def pairs_csv(found: Sequence[Pair]) -> str:
    """The pairs as a table: exercise, two students, share."""
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerow(["exercise", "student", "other", "alike"])
    writer.writerows([pair.exercise, no_formula(pair.one), no_formula(pair.other), f"{pair.share:.2f}"]
                     for pair in found)
    return text.getvalue()
