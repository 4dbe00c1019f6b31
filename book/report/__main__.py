"""`lockstep run` and `lockstep show`, with the pages that they write."""
from __future__ import annotations

import argparse
import sys
from pathlib import Path

from book.job import command
from book.look.dumps import DumpError
from book.look.runs import FILE, RunFileError, read_run
from book.report.shown import Shown, files_in, shown


def main(arguments: list[str] | None = None) -> int:
    """Run a script or show files; the exit status is torchrun's, or 2 if nothing can be started or read."""
    word, *rest = sys.argv[1:] if arguments is None else arguments
    return run(rest) if word == "run" else show(rest)


def run(arguments: list[str]) -> int:
    """`lockstep run`: with `--out DIR` it leaves DIR/report.html."""
    asked = command.asked_for(arguments)
    status = command.run(asked)
    kept = Path(asked.out, FILE) if asked.out else None
    if kept and kept.exists():
        from book.report.page import write_run_page  # the widgets: a job without a page starts without them
        path = kept.with_name(command.REPORT)
        try:
            write_run_page(path, read_run(kept))
            print(f"[lockstep] a page on this run: {path}", file=sys.stderr)
        except (OSError, RunFileError) as error:
            print(f"[lockstep] no page on this run: {error}", file=sys.stderr)
    return status


def show(arguments: list[str]) -> int:
    """`lockstep show`: the exit status is 2, with one sentence that says why, if no file can be read."""
    asked = _parser().parse_args(arguments)
    try:
        found = shown(files_in(asked.files))
        if found.lines and asked.out:
            from book.report.page import page
            asked.out.write_text(page("What the files of a job say", [*_lines(found)], found), "utf-8")
    except (DumpError, OSError) as error:
        found = Shown(problems=[str(error)])
    if not found.lines:
        more = f"; nor can the {len(found.problems) - 1} others here be read" if len(found.problems) > 1 else ""
        print(f"error: {found.problems[0] if found.problems else 'there is no file here'}{more}", file=sys.stderr)
        return 2
    print("\n".join(_lines(found)))
    return 0


def _lines(found: Shown) -> list[str]:
    return [*found.lines, *(f"not read: {problem}" for problem in found.problems)]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "lockstep show", description="Flight Recorder dumps, pickles or JSON: which rank the others wait for, and what "
                                     "it did instead. PyTorch profiler traces, .json or .json.gz: how much "
                                     "communication is exposed, in each group and step, which rank comes last to "
                                     "the collectives, and on a page each stream in one step. Snapshots of CUDA's "
                                     "memory: what holds it when most is held, by part of the model and line. Of "
                                     "some or all ranks; for dumps, the last number in a file's name is its rank. "
                                     "The folder of a lockstep run, and traces and recordings of this book's. "
                                     "Nothing in a file is run.")
    parser.add_argument("files", nargs="+", type=Path, help="the files, or folders of them")
    parser.add_argument("--out", type=Path, help="write a page of one file here, with a picture where files have times")
    return parser


if __name__ == "__main__":
    sys.exit(main())
