"""The command line: python -m book.authoring run | normalise | lint | new-lab | new-exercise | picture | slides."""
from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from book.extras import without_iri_grammar


def main(arguments: list[str] | None = None) -> int:
    """Run one command; returns 0, or 1 with a line for each thing that is wrong."""
    options = parser().parse_args(arguments)
    without_iri_grammar()
    if options.command == "picture":
        from book.authoring.picture import PICTURE, draw

        PICTURE.write_text(draw(), encoding="utf-8")
        return 0
    from book.authoring.notebooks import NotebookError, find

    try:
        if options.command in NEW:
            return NEW[options.command](options)
        return sum(COMMANDS[options.command](path, options) for path in find(options.paths)) and 1
    except NotebookError as error:
        print(error, file=sys.stderr)
        return 1


def parser() -> argparse.ArgumentParser:
    """Describe the commands."""
    result = argparse.ArgumentParser(prog="python -m book.authoring", description="Tools for those who write the book.")
    commands = result.add_subparsers(dest="command", required=True)
    for name, text in (("run", "execute notebooks and store their outputs in normal form"),
                       ("normalise", "bring stored notebooks into normal form"),
                       ("lint", "check the rules for notebooks")):
        command = commands.add_parser(name, help=text)
        command.add_argument("paths", nargs="+", help="notebooks, or folders of notebooks")
        if name == "normalise":
            command.add_argument("--check", action="store_true", help="only say what would change, and fail")
        if name == "run":
            command.add_argument("--cell-timeout", type=int, default=120, metavar="S", help="seconds a cell may take")
    lab = commands.add_parser("new-lab", help="write a lab that has no exercises yet")
    lab.add_argument("name", help="such as 16_name")
    exercise = commands.add_parser("new-exercise", help="add an exercise to a lab, with an example to write over")
    exercise.add_argument("lab", help="the lab's name, such as 16_name")
    exercise.add_argument("name", help="the function that learners write")
    exercise.add_argument("--points", default="2", help="what its check is worth (default 2)")
    exercise.add_argument("--depends", nargs="*", default=[], metavar="N", help="exercises whose answers it calls")
    for command in (lab, exercise):
        command.add_argument("--folder", type=Path, default=Path("labs"), help="where labs are (default labs)")
    commands.add_parser("picture", help="draw the README's picture from what chapter 3 stores")
    slides = commands.add_parser("slides", prog="lockstep slides",
                                 help="make slides for weeks of the syllabus from the chapters' figures")
    slides.add_argument("weeks", nargs="*", type=int, metavar="WEEK", help="numbers of weeks (default: all)")
    slides.add_argument("-o", "--output", type=Path, default=Path("_build/slides"), help="folder (_build/slides)")
    slides.add_argument("--site", default="", metavar="ADDRESS", help="the website's address: figures link to it")
    return result


def run_one(path: Path, options: argparse.Namespace) -> int:
    """Execute one notebook in place."""
    from book.authoring.rerun import rerun

    print(f"{path}: running ...", end=" ", flush=True)
    start_s = time.monotonic()
    rerun(path, options.cell_timeout)
    print(f"{time.monotonic() - start_s:.0f} s, outputs stored")
    return 0


def normalise_one(path: Path, options: argparse.Namespace) -> int:
    """Bring one notebook into normal form, or with --check report where it is not."""
    from book.authoring.normalise import differences, normal_text

    text = path.read_text(encoding="utf-8")
    found = list(differences(text, path))
    if not found:
        return 0
    if not options.check:
        path.write_text(normal_text(text, path), encoding="utf-8")
        print(f"{path}: brought into normal form")
        return 0
    for place in found:
        print(f"{path}: not in normal form: {place}")
    print(f"{path}: fix with: python -m book.authoring normalise {path}")
    return 1


def lint_one(path: Path, options: argparse.Namespace) -> int:
    """Check the rules on one notebook."""
    from book.authoring.lint import lint
    from book.authoring.notebooks import parse

    problems = lint(parse(path.read_text(encoding="utf-8"), path))
    for problem in problems:
        print(f"{path}: {problem.cell}: {problem.message}")
    return len(problems)


def new_lab(options: argparse.Namespace) -> int:
    """Write a lab without exercises."""
    from book.authoring import new

    path = new.new_lab(options.name, options.folder)
    print(f"wrote {path}; list it in _toc.yml, and add exercises: make new-exercise LAB={path.stem} NAME=...")
    return 0


def new_exercise(options: argparse.Namespace) -> int:
    """Add an exercise to a lab."""
    from book.authoring import new

    path, number = new.new_exercise(options.lab, options.name, options.points, options.depends, options.folder)
    print(f"added exercise {number} to {path}; write its task, solution and checks over the example's")
    return 0


def slides(options: argparse.Namespace) -> int:
    """Write the decks of some weeks."""
    from book.authoring.slides import make

    for path in make(options.weeks, options.output, options.site):
        print(f"wrote {path}")
    return 0


NEW = {"new-lab": new_lab, "new-exercise": new_exercise, "slides": slides}
COMMANDS = {"run": run_one, "normalise": normalise_one, "lint": lint_one}

if __name__ == "__main__":
    sys.exit(main())
