"""`lockstep show FILES`: what files of a job say, in sentences."""
from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from book.look.dumps import DumpError, read_dumps
from book.look.flights import Flight, guilty, sentences
from book.words import counted, named


def main(arguments: list[str] | None = None) -> int:
    """Show files; the exit status is 2, with one sentence that says why, if none of them can be read."""
    options = _parser().parse_args(arguments)
    try:
        flights, problems = read_dumps(files_in(options.files))
        if not flights:
            raise DumpError(problems[0] if problems else "there is no file here: give the dumps of a job's ranks")
    except DumpError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print("\n".join([*told(flights), *(f"not read: {problem}" for problem in problems)]))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("lockstep")
    show = parser.add_subparsers(required=True).add_parser(
        "show", help="what files of a job say",
        description="Flight Recorder dumps, pickles or JSON, of some or all of a job's ranks: which rank the others "
                    "wait for, and what it did instead. The last number in a file's name is its rank. Nothing in a "
                    "file is run.")
    show.add_argument("files", nargs="+", type=Path, help="the dumps, or folders of them")
    return parser


def files_in(paths: Sequence[Path]) -> list[Path]:
    """These files, and those in these folders."""
    return [file for path in paths
            for file in (sorted(one for one in path.iterdir() if one.is_file()) if path.is_dir() else [path])]


def told(flights: Sequence[Flight]) -> Iterator[str]:
    """Whose dumps these are, which rank is to blame, and why."""
    world_size = max(flight.world_size for flight in flights)
    backends = sorted({flight.backend for flight in flights} - {""})
    yield (f"{counted(len(flights), 'Flight Recorder dump')} of {counted(world_size, 'rank')}"
           + (f", on {', '.join(backends)}" if backends else ""))
    missing = sorted(set(range(world_size)) - {flight.rank for flight in flights})
    if missing:
        yield f"no dump of {named(missing)}"
    blamed = guilty(flights)
    said = list(sentences(flights))
    if not said:
        yield "no rank waits: every call in these dumps is done"
    else:
        yield f"the others wait for {named(blamed)}" if blamed else "no single rank is to blame"
    yield from (f"  {sentence}" for sentence in said)


if __name__ == "__main__":
    sys.exit(main())
