"""L2: run a function on several real processes from a notebook cell, and report clearly how that ended.

`launch(fn, 4)` runs `fn` on four ranks that are set up as torchrun sets them up: `fn` calls an ordinary
`dist.init_process_group()`, and runs unchanged under torchrun.
"""
from __future__ import annotations

import functools
import itertools
import multiprocessing
import os
import pickle
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple

from book.audit import findings
from book.extras import require
from book.launch import arguments, supervise, where
from book.launch.meanwhile import meanwhile
from book.launch.output import MAX_SHOWN_BYTES
from book.launch.ranks import Ranks
from book.launch.server import warm_up
from book.launch.transfer import Packed, SharedFile
from book.waiting.counts import out_of_step
from book.waiting.hang import Hang
from book.waiting.message import graph, message
from book.words import counted

if TYPE_CHECKING:
    from book.trace import Trace

_announced: set[tuple[str, str]] = set()  # (execution of a cell, line) of this notebook
NOT_RECORDED = "this run was not recorded: pass record=True to launch"


class Written(NamedTuple):
    """What each rank wrote, by rank."""
    stdout: list[str]
    stderr: list[str]


class LaunchError(RuntimeError):
    """A launch without results: `stdout` and `stderr` hold what each rank wrote, `trace` what was recorded or None."""

    def __init__(self, message: str, written: Written | None = None, trace: Trace | None = None) -> None:
        super().__init__(message)
        self.stdout, self.stderr = written or Written([], [])
        self.trace = trace

    def _render_traceback_(self) -> list[str]:
        # IPython prints this instead of the launcher's own frames, which do not help a reader.
        return [f"{type(self).__name__}: {self}"]


class RankError(LaunchError):
    """A rank raised or died: `rank` says which, `traceback` is its full traceback, `__cause__` its exception."""

    rank: int = -1
    traceback: str = ""


class HangError(LaunchError):
    """The ranks wait for one another, or ran out of time; the message says where each of them is.

    `hang` is what is known of each rank, `late` says whether time ran out before all of them stood still. `waits` maps
    each rank that waits to the ranks that it waits for: {0: (1,), 1: (0,)}.
    """

    hang: Hang = Hang((), {})
    late: bool = False

    @property
    def waits(self) -> Mapping[int, tuple[int, ...]]:
        """For each rank that waits, the ranks that it waits for."""
        return self.hang.waits


class Run:
    """The outcome of a launch: results by rank (`run[r]`, `len(run)`, iteration), `backend` and `trace`.

    `stdout[r]` and `stderr[r]` are what rank r wrote, `findings` sentences on what the audit finds wrong.
    """

    def __init__(self, results: list[Any], backend: str, written: Written, recorded: list[Any],
                 findings: Sequence[str] = ()) -> None:
        self.backend, (self.stdout, self.stderr), self.findings = backend, written, list(findings)
        self._results, self._recorded = results, recorded
        self._trace: Trace | None = None

    def __len__(self) -> int:
        return len(self._results)

    def __getitem__(self, rank: int) -> Any:
        return self._results[rank]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._results)

    def __repr__(self) -> str:
        return f"Run({len(self)} ranks on {self.backend})"

    @property
    def trace(self) -> Trace:
        """What the ranks did, as a `book.trace.Trace`; raises `LaunchError` if the run was not recorded."""
        if all(payload is None for payload in self._recorded):
            raise LaunchError(NOT_RECORDED)
        if self._trace is None:
            from book import record
            self._trace = record.assemble(self._recorded, backend=self.backend)
        return self._trace


def launch(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout_s: float = 60,
    hang_s: float = 3,
    record: bool = False,
    check_calls: bool = True,
    audit: bool | int = True,
    hash_seeds: bool = False,
    on_line: Callable[[int, str], None] | None = None,
    env: dict[str, str] | None = None,
    allow_many_ranks: bool = False,
) -> Run:
    """Run `fn(*args)` on `world_size` new processes and return their results by rank.

    Prints one line that names the backend (once per execution of a cell, however often the cell launches) and, when the
    ranks are done, the first 131 kB of what they printed, in rank order; `on_line(rank, line)` gets each line as it
    comes instead. `record` keeps what the ranks communicate, for `run.trace`. `check_calls` makes a collective raise if
    a peer calls a different one or passes a tensor that does not fit. `audit` has the ranks take notes, and prints a
    warning for what they say is wrong with a run although it ended; a number k: of models after each k-th step.
    `hash_seeds` gives each rank a hash seed of its own, as torchrun does, and takes seconds. `env` adds environment
    variables. The random numbers of Python, NumPy and torch are seeded with 1000 + rank.

    Raises `RankError` for the first rank that raised or died; `HangError` when all unfinished ranks have waited for
    one another for `hang_s`, or are not done `timeout_s` after the last rank entered `fn`; `LaunchError` if the ranks
    can't be started; `TypeError` or `ValueError` for bad arguments; `ModuleNotFoundError` without torch or cloudpickle.
    """
    _check_process()
    arguments.check_call(fn, world_size, args, allow_many_ranks)
    arguments.check_options(timeout_s, hang_s, audit, on_line, env)
    require("launch", "torch", "cloudpickle")
    world_size, timeout_s, hang_s = int(world_size), float(timeout_s), float(hang_s)
    with closing(SharedFile()) as called:
        call = arguments.packed(fn, args, called)
        _begin_to_load()
        backend, reason = _backend(world_size, env or {})
        _announce(f"{counted(world_size, 'rank')} on {reason}")
        ranks = Ranks(world_size, on_line, check_calls)
        with _shown(ranks, on_line is None), _hosted_store(world_size) as port, ranks:
            job = _job(_environment(world_size, port, backend, env), record, audit, call)
            _start(ranks, job, called, hash_seeds)
            run = _results(ranks, backend, timeout_s, hang_s)
        return _warned(run)


def _warned(run: Run) -> Run:
    """The same, once its findings are printed."""
    print("".join(f"warning: {finding}\n" for finding in run.findings), end="", flush=True)
    return run


@contextmanager
def _shown(ranks: Ranks, prints: bool) -> Iterator[None]:
    """Whatever becomes of a run, print at its end what the ranks wrote, if this process `prints` that."""
    try:
        yield
    except KeyboardInterrupt:
        raise _interrupted(len(list(ranks))) from None
    finally:
        if prints:
            _show(ranks)


def _interrupted(world_size: int) -> KeyboardInterrupt:
    """An interrupt that a notebook shows as one line, as it does a LaunchError."""
    # Not a subclass: nbval recognizes a cell that it has interrupted by the error's name.
    error: Any = KeyboardInterrupt(f"you have stopped this run; none of its {world_size} ranks is left")
    error._render_traceback_ = lambda: [f"KeyboardInterrupt: {error}"]
    return error


def _backend(world_size: int, env: Mapping[str, Any]) -> tuple[str, str]:
    """The backend that the ranks will use after `rank_device`, and a phrase that says why."""
    num_gpus = _num_gpus(env)
    if num_gpus >= world_size:
        return "nccl", "nccl: a GPU each"
    here = f"{counted(num_gpus, 'GPU')} here, fewer than ranks" if num_gpus else "no GPU here"
    return "gloo", f"gloo (CPU): {here}"


def _num_gpus(env: Mapping[str, Any]) -> int:
    """The GPUs that the ranks will see: `env` may hide some that this process sees."""
    import torch
    num_gpus = torch.cuda.device_count()
    if "CUDA_VISIBLE_DEVICES" not in env:
        return num_gpus
    names = [name.strip() for name in str(env["CUDA_VISIBLE_DEVICES"]).split(",")]
    visible = itertools.takewhile(lambda name: name not in ("", "-1"), names)  # CUDA ignores everything after those
    return min(num_gpus, len(list(visible)))


def _begin_to_load() -> None:
    """Have torch loaded for the ranks while this process loads it."""
    _announce_first_launch()
    try:
        warm_up()
    except OSError as error:
        if "AF_UNIX path too long" not in str(error):
            raise
        raise LaunchError(f"the path of the folder for temporary files, {tempfile.gettempdir()}, is too long for a "
                          f"socket in it: set TMPDIR to a folder with a shorter path (export TMPDIR=/tmp) and start "
                          f"Python again") from None


def _check_process() -> None:
    if "TORCHELASTIC_RUN_ID" in os.environ:
        raise LaunchError("this process is itself a rank: call the function directly instead of launching it")
    if "forkserver" not in multiprocessing.get_all_start_methods():
        raise LaunchError("launch needs to fork processes: use Linux, macOS, or WSL2 on Windows")
    try:
        os.getcwd()
    except FileNotFoundError:
        raise LaunchError("the folder that this process works in has been deleted: call os.chdir with one that "
                          "exists, or start the notebook again") from None


def _announce(line: str) -> None:
    """Print a line once per execution of a notebook cell, even if the cell launches in a loop."""
    shell: Any = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    # Tell executions apart by their request: nbval's executions have no execution count.
    request = shell.get_parent().get("header", {}).get("msg_id") if hasattr(shell, "get_parent") else None
    if request and (request, line) in _announced:
        return
    if request:
        _announced.add((request, line))
    print(line, flush=True)


@functools.cache
def _announce_first_launch() -> None:
    """Say once that the first launch takes a few seconds: on a terminal, never in a cell's output."""
    if sys.__stderr__ is not None and sys.__stderr__.isatty():
        print("first launch: loading torch for the ranks, a few seconds ...", file=sys.__stderr__, flush=True)


@contextmanager
def _hosted_store(world_size: int) -> Iterator[int]:
    """The port of the store through which the ranks find one another; it listens on 127.0.0.1 only.

    The store runs as long as its object exists. Only this frame refers to the object, and deletes it: other frames of a
    launch may stay alive in the traceback of a kept error.
    """
    import torch.distributed as dist
    _require_loopback()
    listener = socket.create_server(("127.0.0.1", 0), backlog=max(128, world_size))
    port = listener.getsockname()[1]
    store = dist.TCPStore("127.0.0.1", port, world_size, True, timedelta(seconds=300), wait_for_workers=False,
                          master_listen_fd=listener.detach())
    try:
        yield store.port
    finally:
        del store


def _require_loopback() -> None:
    """Raise LaunchError if 127.0.0.1 can't be reached: torch would try for five minutes to connect to its own store."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.bind(("127.0.0.1", 0))  # fails without the address
            probe.connect(probe.getsockname())  # fails where the interface is down; it sends nothing
    except OSError as error:
        raise LaunchError(f"the ranks find one another through 127.0.0.1, and this machine can't reach that address "
                          f"({error.strerror}): switch the loopback interface on (`ip link set lo up`) and give it "
                          f"the address (`ip addr add 127.0.0.1/8 dev lo`)") from None


def _environment(world_size: int, port: int, backend: str, extra: Mapping[str, Any] | None) -> dict[str, str]:
    """This process's environment, with the variables that torchrun sets to the same value on all ranks."""
    loopback = next((name for _, name in socket.if_nameindex() if name.startswith("lo")), None)
    return {
        # Without this, gloo resolves the host's name, which fails on many laptops and in many containers.
        **({"GLOO_SOCKET_IFNAME": loopback, "TP_SOCKET_IFNAME": loopback} if loopback else {}),
        **os.environ,
        **({"CUDA_VISIBLE_DEVICES": ""} if backend == "gloo" else {}),
        **{name: str(value) for name, value in (extra or {}).items()},
        "WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": str(world_size),
        "GROUP_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0", "TORCHELASTIC_RUN_ID": "launch",
    }


def _job(environment: dict[str, str], record: bool, audit: bool | int, call: Packed) -> bytes:
    """What each rank is to do, and what it has to know of the process that launches it."""
    starts_by = multiprocessing.get_start_method(allow_none=True)
    return pickle.dumps((environment, where.cell_sources(), starts_by, time.time(), record, audit, call))


def _start(ranks: Ranks, job: bytes, called: SharedFile, hash_seeds: bool) -> None:
    try:
        ranks.start(job, called, hash_seeds)
    except OSError as error:
        raise LaunchError(f"the ranks cannot be started: {error}; with many ranks, raise `ulimit -n`") from error


def _results(ranks: Ranks, backend: str, timeout_s: float, hang_s: float) -> Run:
    verdict = supervise.supervise(ranks, timeout_s, hang_s)
    if verdict == "failed":
        raise _rank_error(ranks, backend)
    if verdict != "done":
        limit_s = {"hang": hang_s, "late": timeout_s}.get(verdict, supervise.START_LIMIT_S)
        raise _hang_error(ranks, verdict, limit_s, backend)
    ranks.dismiss(supervise.LEAVE_LIMIT_S)
    try:
        results, recorded = zip(*(member.unpacked() for member in ranks))
    except Exception as error:
        raise LaunchError(f"a rank's result cannot be rebuilt here ({type(error).__name__}: {error}): "
                          "return numbers, strings, lists, dicts or tensors") from error
    return Run(list(results), backend, _written(ranks), list(recorded), _findings(ranks))


def _findings(ranks: Ranks) -> list[str]:
    return findings([member.notes for member in ranks])


def _with_findings(message: str, ranks: Ranks) -> str:
    return "\n".join([message, *(f"also: {finding}" for finding in _findings(ranks))])


def _rank_error(ranks: Ranks, backend: str) -> RankError:
    # Choose before asking for reports: asking can kill a rank, which would then look like the cause.
    first = supervise.first_failure(ranks)
    message = supervise.describe_failure(ranks, first)
    hang = supervise.ask_for_reports(ranks)
    causes = out_of_step(hang) if supervise.is_mismatch(first) else ()
    message = "\n".join([message, *(f"cause: {cause}" for cause in causes), *meanwhile(ranks, first, hang)])
    error = RankError(_with_findings(message, ranks), _written(ranks), _partial_trace(ranks, backend))
    error.rank = first.rank
    if first.failure is not None:
        error.traceback = first.failure.traceback
        error.__cause__ = _unpickled(first.failure.exception)
    return error


def _hang_error(ranks: Ranks, verdict: str, limit_s: float, backend: str) -> HangError:
    hang = supervise.ask_for_reports(ranks)
    trace = _partial_trace(ranks, backend, graph(hang.waits) or "ranks wait")
    error = HangError(_with_findings(message(hang, verdict, limit_s), ranks), _written(ranks), trace)
    error.hang, error.late = hang, verdict == "late"
    return error


def _unpickled(exception: bytes | None) -> BaseException | None:
    """A rank's exception; None if its class cannot be unpickled here."""
    try:
        return pickle.loads(exception) if exception else None
    except Exception:
        return None


def _partial_trace(ranks: Ranks, backend: str, hangs: str | None = None) -> Trace | None:
    """The trace of what was recorded before a failure, or before the run `hangs`; None if none can be made of it."""
    recorded = [member.recording() for member in ranks]
    if all(payload is None for payload in recorded):
        return None
    from book import record
    try:
        return record.assemble(recorded, backend=backend, hangs=hangs)
    except Exception:
        return None


def _written(ranks: Ranks) -> Written:
    by_stream = zip(*((member.output, member.errors) for member in ranks))
    return Written(*(["".join(line + "\n" for line in lines.shown()) for lines in stream] for stream in by_stream))


def _show(ranks: Ranks) -> None:
    """Print what the ranks wrote, in rank order, each up to its share of what a cell shows."""
    members = list(ranks)
    for member in members:
        lines, num_others = member.output.head(MAX_SHOWN_BYTES // len(members))
        for line in lines:
            print(f"[rank {member.rank}] {line}")
        if num_others:
            print(f"[rank {member.rank}] ... and more, {num_others} lines: stdout[{member.rank}] of the run, or of the "
                  "error, has them")
