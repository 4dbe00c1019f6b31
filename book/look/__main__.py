"""`lockstep show FILES`: what files of a job say, in sentences."""
from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from book.look.dumps import DumpError, read_dumps
from book.look.profiles import TraceFileError, is_profile, read_profile
from book.look.told import dumps_told, profiles_told


def main(arguments: list[str] | None = None) -> int:
    """Show files; the exit status is 2, with one sentence that says why, if none of them can be read."""
    options = _parser().parse_args(arguments)
    try:
        lines, problems = shown(files_in(options.files))
    except (DumpError, OSError) as error:
        lines, problems = [], [str(error)]
    if not lines:
        more = f"; nor can the {len(problems) - 1} others here be read" if len(problems) > 1 else ""
        print(f"error: {problems[0] if problems else 'there is no file here'}{more}", file=sys.stderr)
        return 2
    print("\n".join([*lines, *(f"not read: {problem}" for problem in problems)]))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "lockstep show", description="Flight Recorder dumps, pickles or JSON: which rank the others wait for, and what "
                                     "it did instead. PyTorch profiler traces, .json or .json.gz: how much "
                                     "communication nothing hides, and which rank comes last to the collectives. Of "
                                     "some or all ranks; for dumps, the last number in a file's name is its rank. "
                                     "Nothing in a file is run.")
    parser.add_argument("files", nargs="+", type=Path, help="the files, or folders of them")
    return parser


def files_in(paths: Sequence[Path]) -> list[Path]:
    """These files, and those in these folders."""
    return [file for path in paths
            for file in (sorted(one for one in path.iterdir() if one.is_file()) if path.is_dir() else [path])]


def shown(paths: Sequence[Path]) -> tuple[list[str], list[str]]:
    """What the files say, and which can't be read."""
    traces = [path for path in paths if is_profile(path)]
    profiles, problems = [], []
    for path in traces:
        try:
            profiles.append(read_profile(path))
        except TraceFileError as error:
            problems.append(str(error))
    flights, unread = read_dumps(path for path in paths if path not in traces)
    lines = [*(profiles_told(profiles) if profiles else ()), *(dumps_told(flights) if flights else ())]
    return lines, problems + unread


if __name__ == "__main__":
    sys.exit(main())
