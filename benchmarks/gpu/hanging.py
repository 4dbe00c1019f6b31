"""What a machine says when one rank is missing: NCCL's watchdog, the Flight Recorder's dumps, and what these tell."""
from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.gpu.bounded import Ended, run_bounded
from benchmarks.process import ROOT
from benchmarks.report import Findings, Table
from book.look.dumps import read_dumps
from book.look.flights import sentences

PROGRAM = ROOT / "benchmarks" / "programs" / "one_rank_sleeps.py"
DUMPS = "TORCH_FR_DUMP_TEMP_FILE"  # followed by the rank
SAID = r"^.*(?:Watchdog caught collective operation timeout|Timed out waiting|timeout).*$"
NOTE = ("torchrun, four all-reduces, before the last of which rank 1 sleeps. The first line of the log that speaks of "
        "a timeout; what `lockstep show` says of the dumps.")
REHEARSAL = {"timeout_s": 3.0}


def measure(num_gpus: int, timeout_s: float = 20.0, limit_s: float = 120.0) -> Findings:
    """Let one rank sleep through a collective, and read what is left."""
    if num_gpus < 2:
        return Findings(left_out=["hanging: a rank alone waits for nobody; it needs 2"])
    with tempfile.TemporaryDirectory() as folder, _asked_for(f"{folder}/rank_"):
        ended = run_bounded("torch.distributed.run", ["--standalone", "--nproc-per-node", str(num_gpus), str(PROGRAM),
                                                      str(timeout_s)], limit_s)
        dumps = sorted(Path(folder).iterdir())
        flights, problems = read_dumps(dumps)
    return Findings([Table(f"One of {num_gpus} ranks sleeps, timeout {timeout_s:g} s", ("what", "which"),
                           [*_rows(ended, len(dumps)), *(("of the dumps", text) for text in (
                               *problems, *(sentences(flights) if flights else ())))], NOTE)])


@contextmanager
def _asked_for(beginning: str) -> Iterator[None]:
    """Ranks that are started meanwhile write dumps whose names begin so."""
    asked = {DUMPS: beginning, "TORCH_NCCL_DUMP_ON_TIMEOUT": "1", "TORCH_FR_BUFFER_SIZE": "2000"}
    before = {name: os.environ.get(name) for name in asked}
    os.environ.update(asked)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name)
            if value is not None:
                os.environ[name] = value


def _rows(ended: Ended, num_dumps: int) -> list[tuple[str, str]]:
    found = re.search(SAID, ended.output, re.MULTILINE | re.IGNORECASE)
    how = "not ended" if ended.status is None else f"exit status {ended.status}"
    return [("how the job ended", f"{how} after {ended.seconds:.0f} s"),
            ("the first word of a timeout", " ".join(found[0].split())[:240].replace("|", "/") if found else "none"),
            ("dumps", str(num_dumps))]
