"""Run the benchmarks: `python -m benchmarks [PART ...] [--quick] [--readme]`."""
from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from types import ModuleType

from benchmarks import grading, launching, pages, planning, player, ring, simulation
from benchmarks.machine import measured_on
from benchmarks.process import ROOT
from benchmarks.report import Findings, Unavailable, document, put_into

PARTS: dict[str, ModuleType] = {"launch": launching, "ring": ring, "simulation": simulation, "planning": planning,
                                "pages": pages, "player": player, "grading": grading}


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print Markdown, and say on stderr what is going on; returns the exit status."""
    options = parse(arguments)
    findings = [run(name, options.quick) for name in PARTS if name in (options.parts or PARTS)]
    text = document(measured_on(), findings)
    print(text)
    if options.readme:
        put_into(ROOT / "README.md", text)
        print("== Kept in README.md", file=sys.stderr)
    return 0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line; what is kept in the README has to be a whole run."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Measure this book on this machine.")
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"any of: {', '.join(PARTS)} (all, if none is given)")
    parser.add_argument("--quick", action="store_true", help="fewer repeats, for a first look")
    parser.add_argument("--readme", action="store_true", help="keep the result in README.md, between its markers")
    options = parser.parse_args(arguments)
    unknown = [name for name in options.parts if name not in PARTS]
    if unknown:
        parser.error(f"there is no part {unknown[0]!r}: use any of {', '.join(PARTS)}")
    if options.readme and (options.parts or options.quick):
        parser.error("--readme keeps a whole run: leave out the parts and --quick")
    return options


def run(name: str, quick: bool) -> Findings:
    """Run one part; where it can't run here, that is what it found."""
    print(f"== Measuring: {name}", file=sys.stderr, flush=True)
    start_s = time.perf_counter()
    try:
        return PARTS[name].measure(**(PARTS[name].QUICK if quick else {}))
    except Unavailable as reason:
        return Findings(left_out=[f"{name}: {reason}"])
    finally:
        print(f"   {time.perf_counter() - start_s:.0f} s", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
