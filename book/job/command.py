"""L2: the command `lockstep run`: torchrun on this machine, and a judge beside it."""
from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from book.job import rates, told
from book.job.attach import package_path, start_judge
from book.look import runs

JUDGE_LIMIT_S = 60.0
REPORT = "report.html"


def run(asked: argparse.Namespace) -> int:
    """Run a script on so many ranks; returns torchrun's exit status, 2 for what can't be run."""
    if not Path(asked.script).is_file():
        print(f"there is no script {asked.script}", file=sys.stderr)
        return 2
    try:
        work = rates.work_of(asked)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    kept = asked.out is not None
    folder = os.path.abspath(asked.out) if kept else tempfile.mkdtemp(prefix="lockstep-")
    if kept:
        _clear(folder)
    try:
        return _run(asked, folder, work)
    finally:
        if not kept:
            shutil.rmtree(folder, ignore_errors=True)


def asked_for(arguments: list[str]) -> argparse.Namespace:
    """What a command line asks for."""
    parser = argparse.ArgumentParser(prog="lockstep run", description="Run your own script on several ranks of this "
                                     "machine by torchrun, and say why it hangs or fails.")
    parser.add_argument("--ranks", type=int, default=2, help="processes to start (2)")
    parser.add_argument("--hang-s", type=float, default=told.DEFAULT_HANG_S,
                        help="seconds without progress after which a hang is told (10)")
    parser.add_argument("--end-hung", action="store_true", help="kill the ranks of a hang once it is told")
    parser.add_argument("--out", help="keep what ranks report in this folder, and a page on it, report.html")
    rates.add_flags(parser)
    parser.add_argument("script", help="a Python script that torchrun can start")
    parser.add_argument("args", nargs=argparse.REMAINDER, help="its own arguments")
    return parser.parse_args(arguments)


def _clear(folder: str) -> None:
    """Delete what an earlier run has reported."""
    for file in (runs.FILE, REPORT):
        Path(folder, file).unlink(missing_ok=True)
    for old in Path(folder).glob("attempt*"):
        shutil.rmtree(old)


def _run(asked: argparse.Namespace, folder: str, work: rates.Work | None) -> int:
    """torchrun's exit status, once the judge has said all."""
    for old in (rates.WORK, told.END_HUNG):  # of a run that has started this one
        os.environ.pop(old, None)
    os.environ.update({told.FOLDER: folder, told.HANG_S: str(asked.hang_s), told.JUDGED: "1",
                       **rates.to_environment(work), **package_path()})
    if asked.end_hung:
        os.environ[told.END_HUNG] = "1"
    torchrun = subprocess.Popen([
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(asked.ranks),
        "-m", "book.job", asked.script, *asked.args])
    judge = start_judge(folder, torchrun.pid)
    with _passed_on(torchrun, judge):
        status = torchrun.wait()
        with suppress(subprocess.TimeoutExpired):
            judge.wait(JUDGE_LIMIT_S)
        judge.kill()
    return status if status >= 0 else 128 - status


@contextmanager
def _passed_on(torchrun: subprocess.Popen[bytes], judge: subprocess.Popen[bytes]) -> Iterator[None]:
    """Pass on what asks this command to end; the judge then blames no rank that dies of it."""
    def end(number: int, frame: object) -> None:
        judge.terminate()
        if number == signal.SIGTERM:  # a terminal sends SIGINT to torchrun as well
            torchrun.terminate()

    before = {number: signal.signal(number, end) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
