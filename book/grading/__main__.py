"""Command line: python -m book.grading release labs -o student"""
from __future__ import annotations

import argparse
import sys
from pathlib import Path

from book.grading.lab import LabError
from book.grading.release import release_all


def main(arguments: list[str] | None = None) -> int:
    """Runs the command and returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m book.grading", description="Labs as course assignments.")
    commands = parser.add_subparsers(dest="command", required=True)
    release = commands.add_parser("release", help="make student copies: solutions taken out, outputs cleared")
    release.add_argument("labs", nargs="+", type=Path, help="lab notebooks, or folders of them")
    release.add_argument("-o", "--out", type=Path, required=True, help="folder for the copies")
    release.add_argument("--force", action="store_true", help="replace copies that are there, with any work in them")
    options = parser.parse_args(arguments)
    try:
        for line in release_all(options.labs, options.out, options.force):
            print(line)
    except LabError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
