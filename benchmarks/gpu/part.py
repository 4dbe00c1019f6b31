"""One part in a process of its own, which can be killed: `python -m benchmarks.gpu.part NAME NUM_GPUS FILE`.

What it finds goes into FILE as JSON. NUM_GPUS of 0 is a rehearsal: few ranks on gloo, small sizes, few repeats.
"""
from __future__ import annotations

import json
import sys
import tempfile
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from typing import Any

from benchmarks.gpu.bounded import Ended, run_bounded
from benchmarks.report import Findings, Table

PARTS = ("launching", "ring", "speed", "overlap", "traces", "sharding", "memory", "recording",
         "hanging")


class PartFailed(Exception):
    """A part failed; the text says how it ended."""


def run_part(name: str, num_gpus: int, limit_s: float) -> dict[str, Any]:
    """Run one part and return what it found as plain data; raises `PartFailed`."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "found.json")
        ended = run_bounded("benchmarks.gpu.part", [name, str(num_gpus), str(file)], limit_s)
        if ended.status == 0 and file.exists():
            return json.loads(file.read_text("utf-8"))
    raise PartFailed(_how(ended, limit_s))


def measured(name: str, num_gpus: int, limit_s: float) -> Findings:
    """What one part measured; if it failed, its findings say so."""
    try:
        found = run_part(name, num_gpus, limit_s)
    except PartFailed as error:
        return Findings(left_out=[f"{name}: {error}"])
    return Findings([Table(table["title"], tuple(table["columns"]), [tuple(row) for row in table["rows"]],
                           table["note"]) for table in found["tables"]], [], found["left_out"])


def _how(ended: Ended, limit_s: float) -> str:
    how = f"not done after {limit_s:g} s" if ended.status is None else f"ended with status {ended.status}"
    left = f", {ended.num_left} of its processes would not end" if ended.num_left else ""
    return how + left + "".join(f"\n    {line}" for line in ended.tail())


def main(name: str, num_gpus: int, file: Path) -> None:
    """Run the part here."""
    if name == "machine":
        found = import_module("benchmarks.gpu.machine").find()
    else:
        part = import_module(f"benchmarks.gpu.{name}")
        found = asdict(part.measure(num_gpus) if num_gpus else part.measure(2, **part.REHEARSAL))
    file.write_text(json.dumps(found), "utf-8")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))
