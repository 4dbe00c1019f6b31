"""Check and measure this book on a machine with GPUs: `python -m benchmarks.gpu`."""
from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.gpu import notebooks
from benchmarks.gpu.machine import Machine, rebuilt
from benchmarks.gpu.part import PARTS, PartFailed, measured, run_part
from benchmarks.gpu.report import Report
from benchmarks.process import ROOT

MACHINE_LIMIT_S, PART_LIMIT_S = 120.0, 300.0
CORES_A_NOTEBOOK, MOST_NOTEBOOKS = 4, 4


def main(arguments: Sequence[str] | None = None) -> int:
    """Find the machine, run what was chosen, write the report; returns the exit status."""
    options = parse(arguments)
    if options.rehearse:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    try:
        machine = rebuilt(run_part("machine", 0, MACHINE_LIMIT_S))
    except PartFailed as error:
        print(f"torch or the GPU's driver does not answer: {error}")
        return 1
    if not machine.gpus and not options.rehearse:
        print(f"{machine.why_not} `python -m benchmarks.gpu --rehearse` runs all of this on gloo and the CPU.")
        return 0
    report = Report(machine, options.rehearse)
    say(machine.table().markdown())
    num_gpus = 0 if options.rehearse else len(machine.gpus)
    check_notebooks(report, options, machine)
    for name in options.parts:
        say(f"== Measuring: {name}")
        report.findings.append(measured(name, num_gpus, PART_LIMIT_S))
        say(report.findings[-1].markdown())
    paths = report.write(options.out)
    say(f"== {'Some notebooks failed' if report.failed else 'No notebook failed'}; the report is in "
        f"{' and '.join(map(str, paths))}")
    return int(report.failed)


def check_notebooks(report: Report, options: argparse.Namespace, machine: Machine) -> None:
    """Run the chosen notebooks, and report each as it ends."""
    if not options.chosen:
        return
    say(f"== Running {len(options.chosen)} notebooks, {options.jobs} side by side")

    def tell(verdict: notebooks.Verdict) -> None:
        say(f"{' | '.join(verdict.row)}")
        for failure in verdict.failures:
            say(f"   {'code cell ' + str(failure.cell) if failure.cell is not None else 'failed'}: "
                + "\n      ".join(failure.why))

    start_s = time.perf_counter()
    report.verdicts = notebooks.run_all(options.chosen, len(machine.gpus), options.jobs, options.limit, tell)
    say(f"   {time.perf_counter() - start_s:.0f} s")


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line: `chosen` are the notebooks to run, `parts` what to measure."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu",
                                     description="Run the book's notebooks on this machine's GPUs, and measure.")
    parser.add_argument("--notebooks", action="store_true", help="run the notebooks, measure nothing")
    parser.add_argument("--measure", action="store_true", help="measure, run no notebook")
    parser.add_argument("--only", nargs="+", metavar="WHAT", default=[],
                        help=f"notebooks whose path begins so (labs/03), or any of {', '.join(PARTS)}")
    parser.add_argument("--rehearse", action="store_true", help="little of everything, on gloo and the CPU")
    parser.add_argument("--jobs", type=int, default=_num_jobs(), help="notebooks side by side (default: %(default)s)")
    parser.add_argument("--limit", type=float, default=notebooks.LIMIT_S, metavar="SECONDS",
                        help="how long one notebook may take (default: %(default)g)")
    parser.add_argument("--out", type=Path, default=ROOT / "_build" / "gpu", help="the folder of the report")
    options = parser.parse_args(arguments)
    both = options.notebooks == options.measure
    options.chosen = _matching(notebooks.names(), options.only) if options.notebooks or both else []
    options.parts = _matching(PARTS, options.only) if options.measure or both else []
    for what in options.only:
        if not _matching([*options.chosen, *options.parts], [what]):
            parser.error(f"nothing to run begins with {what!r}")
    return options


def _matching(names: Sequence[str], beginnings: Sequence[str]) -> list[str]:
    return [name for name in names if not beginnings or name.startswith(tuple(beginnings))]


def _num_jobs() -> int:
    """How many notebooks have enough cores for their ranks if they run side by side."""
    num_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(MOST_NOTEBOOKS, num_cores // CORES_A_NOTEBOOK))


def say(text: str) -> None:
    """Print immediately: the log of a run that was cut short should hold what was known by then."""
    print(text, flush=True)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as with Ctrl-C: what was started ends too
    sys.exit(main())
