"""Run the benchmarks: `python -m benchmarks [PART ...] [--quick] [--keep]`."""
from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping, Sequence
from types import ModuleType

from benchmarks import (across, grading, kept, late, launching, pages, planning, player, quorum, ring, simulation, tap,
                        watched, weights)
from benchmarks.machine import measured_on
from benchmarks.report import Findings, Unavailable, document

PARTS: dict[str, ModuleType] = {"launch": launching, "ring": ring, "tap": tap, "watched": watched,
                                "simulation": simulation, "across": across, "planning": planning, "weights": weights,
                                "pages": pages, "player": player, "grading": grading, "quorum": quorum, "late": late}


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print Markdown, with the progress on stderr; returns the exit status."""
    options = parse(arguments)
    where = measured_on()
    found = {name: run(name, options.quick) for name in PARTS if name in (options.parts or PARTS)}
    print(document(where, list(found.values())))
    if options.keep:
        keep(where, found)
    return 0


def keep(where: str, found: Mapping[str, Findings]) -> None:
    """Save the results and rewrite the book's page; if a part can't run here, its earlier results are kept."""
    kept.write({**kept.read(), **{name: kept.Kept(where, part) for name, part in found.items() if part.tables}})
    kept.PAGE.write_text(page(), "utf-8")
    print(f"== Kept in {kept.DATA.name}; {kept.PAGE.name} is written anew, and `make book` shows it", file=sys.stderr)


def page() -> str:
    """The book's page of what is kept; the first line of a part's module says what the part measures."""
    return kept.page(kept.read(), {name: part.__doc__.partition("\n")[0] for name, part in PARTS.items()})


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line; results that are kept must have been measured with all repeats."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Measure this book on this machine.")
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"any of: {', '.join(PARTS)} (all, if none is given)")
    parser.add_argument("--quick", action="store_true", help="fewer repeats, for a first look")
    parser.add_argument("--keep", action="store_true", help="keep the result, and write the page of measurements")
    options = parser.parse_args(arguments)
    unknown = [name for name in options.parts if name not in PARTS]
    if unknown:
        parser.error(f"there is no part {unknown[0]!r}: use any of {', '.join(PARTS)}")
    if options.keep and options.quick:
        parser.error("--keep keeps what was measured with all repeats: leave out --quick")
    return options


def run(name: str, quick: bool) -> Findings:
    """Run one part; if it can't run here, its findings say so."""
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
