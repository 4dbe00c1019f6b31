"""Families of answers: those whose messages come from the same function, and those that are right in the same exercise.

A message is traced to the function, or table of sentences, in `book.checks`, `book.launch` or the lab's own cells that
has the longest string contained in the message that the answer should get.
"""
from __future__ import annotations

import ast
import random
import subprocess
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from nbformat import NotebookNode

import book

WORDING = ("checks", "launch")  # the parts of the package that word messages
MIN_LENGTH = 6  # a shorter string is in too many messages
Family = tuple[object, ...]


def strings(lab: NotebookNode) -> list[tuple[str, str, str]]:
    """Every string that may be part of a message about an answer to this lab, with its file and its function."""
    return list({*_of_package(), *_of_lab(lab)})


def family(known: list[tuple[str, str, str]], exercise: int, expected: str) -> Family:
    """The family of an answer: the place that its message comes from, or the exercise if it has none."""
    if expected == "pass":
        return "right", exercise
    whole = [(len(expected), *place) for text, *place in known if expected in text]
    _, *place = max(whole or [(len(text), *place) for text, *place in known if text in expected], default=(0,))
    return tuple(place) or ("in other words", exercise)


def drawn(families: Iterable[tuple[Family, str]], count: int, seed: str, cost_s: Callable[[str], float],
          limit_s: float) -> set[str]:
    """One name from each of at most `count` families, given as pairs of family and name; all follow from the seed.

    A name whose cost would take the sum above `limit_s` is left out.
    """
    members: dict[str, list[str]] = {}
    for key, name in families:
        members.setdefault(str(key), []).append(name)
    chance = random.Random(seed)
    taken, spent_s = set(), 0.0
    for key in chance.sample(sorted(members), min(count, len(members))):
        name = chance.choice(sorted(members[key]))
        if spent_s + cost_s(name) <= limit_s:
            taken.add(name)
            spent_s += cost_s(name)
    return taken


def some(argument: str, values: Sequence[Any], count: int) -> Callable[[Callable], Any]:
    """Parametrize a test: `make test` takes `count` of the values, which change from commit to commit and test to test.

    The others are full.
    """
    def marked(test: Callable) -> Any:
        drawn = random.Random(test.__name__ + commit()).sample(list(values), count)
        params = [pytest.param(value, marks=() if value in drawn else pytest.mark.full) for value in values]
        return pytest.mark.parametrize(argument, params, ids=str)(test)

    return marked


@cache
def commit() -> str:
    """The commit that is checked out, as the seed of what `make test` draws; empty where there is no repository."""
    here = Path(__file__).parent
    return subprocess.run(["git", "rev-parse", "HEAD"], cwd=here, text=True, capture_output=True).stdout


@cache
def _of_package() -> list[tuple[str, str, str]]:
    folder = Path(book.__file__).parent
    return [found for part in WORDING for path in sorted((folder / part).glob("*.py"))
            for found in _strings(ast.parse(path.read_text("utf-8")), path.stem)]


def _of_lab(lab: NotebookNode) -> Iterator[tuple[str, str, str]]:
    for cell in lab.cells:
        if cell.cell_type == "code":
            yield from _strings(ast.parse(cell.source), cell.id)


def _strings(node: ast.AST, file: str, place: str = "") -> Iterator[tuple[str, str, str]]:
    """Every string below a node that is long enough, with its file and the function or table that it is in."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Constant) and isinstance(child.value, str) and len(child.value.strip()) >= MIN_LENGTH:
            yield child.value.strip(), file, place
        table = isinstance(node, ast.Module) and isinstance(child, ast.Assign)
        named = child.name if isinstance(child, ast.FunctionDef) else ast.unparse(child.targets[0]) if table else place
        yield from _strings(child, file, named)
