"""One step of a profiler trace as the facts that chapter 13 draws: python -m benchmarks.streams TRACE.json.gz

The trace is not in this repository; only what is drawn of it is, as blocks: which stream, what kind, from when to when.
"""
from __future__ import annotations

import json
import sys
from pathlib import Path

from book.look.profiles import read_profile
from book.look.streams import KEPT, streams_of


def main(path: Path) -> None:
    """Write the step of a trace to the file that the chapter reads."""
    found = streams_of([read_profile(path)])
    if found is None:
        raise SystemExit(f"{path} has no work in it")
    rounded = json.loads(found.to_json(), parse_float=lambda text: round(float(text), 7))
    KEPT.write_text(json.dumps(rounded, separators=(",", ":")) + "\n", "utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
