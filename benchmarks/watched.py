"""What `lockstep run` costs: the same steps of training in two jobs, one watched and one plain, by turns."""
from __future__ import annotations

import socket
import statistics
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TextIO

from benchmarks.process import LIMIT_S, started
from benchmarks.report import Claim, Findings, Table, Unavailable, duration, ratio

QUICK = {"work": (("FSDP2", 32),), "num_pairs": 3}
PROGRAM = str(Path(__file__).with_name("programs") / "watched_steps.py")
WORK = (("DDP", 512), ("FSDP2", 512), ("FSDP2", 1024))  # how the model is wrapped, and its width
NUM_RANKS, STEPS, WARM_UP = 2, 5, 20
PLAIN, WATCHED = "plain", "watched"
STARTS = {PLAIN: ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(NUM_RANKS)),
          WATCHED: ("-m", "book", "run", "--ranks", str(NUM_RANKS))}
PROMISED = 1.03
NOTE = (f"{NUM_RANKS} ranks on gloo, eight linear layers. Both jobs are there all the time, and one runs {STEPS} steps "
        "while the other waits. Times are CPU seconds of all threads of the ranks, the watching one included. Medians; "
        "ratios of the same pair: median (smallest–largest).")


def measure(work: Sequence[tuple[str, int]] = WORK, num_pairs: int = 60) -> Findings:
    """Time steps with and without `lockstep run`."""
    found, rows = Findings(), []
    for kind, width in work:
        pairs = time_pairs(kind, width, num_pairs)
        ratios = [watched / plain for watched, plain in pairs]
        watched, plain = (duration(statistics.median(seconds)) for seconds in zip(*pairs))
        what = f"a step of {kind} with layers of {width} × {width}"
        rows.append((what, plain, watched, ratio(ratios)))
        found.claims.append(Claim(f"under `lockstep run`, {what} takes at most {PROMISED} times the ranks' CPU time",
                                  f"{ratio(ratios)} times", statistics.median(ratios) <= PROMISED))
    found.tables.append(Table("What `lockstep run` costs", ("work", "plain", "watched", "ratio"), rows, NOTE))
    return found


def time_pairs(kind: str, width: int, num_pairs: int) -> list[tuple[float, float]]:
    """`num_pairs` pairs of CPU seconds of a step, (watched, plain). Raises Unavailable if a job does not start."""
    with ExitStack() as stack:
        server = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        server.settimeout(LIMIT_S)
        program = [PROGRAM, str(server.getsockname()[1]), kind, str(width)]
        for start in STARTS.values():
            stack.enter_context(started([sys.executable, *start, *program]))
        ranks: dict[str, list[TextIO]] = {who: [] for who in STARTS}
        for _ in range(NUM_RANKS * len(STARTS)):
            rank = _connected(server, stack)
            ranks.setdefault(rank.readline().strip(), []).append(rank)  # it tells whether it sees a tap
        if {who: len(each) for who, each in ranks.items()} != dict.fromkeys(STARTS, NUM_RANKS):
            raise Unavailable("of the two jobs, one has to be watched and one plain")
        for who in ranks:
            _seconds(ranks[who], WARM_UP)
        pairs = []
        for pair in range(num_pairs):
            seconds = {who: _seconds(ranks[who], STEPS) for who in (WATCHED, PLAIN)[::1 if pair % 2 else -1]}
            pairs.append((seconds[WATCHED], seconds[PLAIN]))
    return pairs


def _connected(server: socket.socket, stack: ExitStack) -> TextIO:
    """The lines from and to the next rank that connects."""
    try:
        connection = stack.enter_context(server.accept()[0])
    except TimeoutError:
        raise Unavailable(f"a job had not started after {LIMIT_S:.0f} s") from None
    connection.settimeout(LIMIT_S)
    return stack.enter_context(connection.makefile("rw"))


def _seconds(ranks: Sequence[TextIO], num_steps: int) -> float:
    """The CPU seconds of a step, of all ranks of a job."""
    try:
        for rank in ranks:
            print(num_steps, file=rank, flush=True)
        return sum(float(rank.readline()) for rank in ranks) / num_steps
    except (OSError, ValueError):
        raise Unavailable("a rank has ended, or stands still") from None
