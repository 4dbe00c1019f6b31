"""L2: what runs in a rank before its script: the tap starts before the first init_process_group, whoever calls that."""
from __future__ import annotations

import builtins
import functools
import io
import os
import subprocess
import sys
import time
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from book.job import told
from book.job.told import Told
from book.tap.imported import AfterImport
from book.tap.place import caller

_C10D, _RPC = "torch.distributed.distributed_c10d", "torch.distributed.rpc"


def main(arguments: Sequence[str]) -> None:
    """Run a script with its arguments, as Python would, and report on it."""
    if not arguments or arguments[0].startswith("-"):
        sys.exit("usage: torchrun ... -m book.job train.py ARGS")
    if "RANK" not in os.environ:
        sys.exit("this is no rank of torchrun's: use lockstep run --ranks 4 train.py ARGS")
    rank = Rank()
    sys.meta_path.insert(0, AfterImport(_C10D, rank.enter_group_at))
    sys.meta_path.insert(0, AfterImport(_RPC, rank.enter_rpc_at))
    script = Script(arguments)
    try:
        script.run()
    except BaseException as error:
        rank.end(error)
        raise
    rank.end(None)


class Rank:
    """This process as a rank of a job: its folder, and the thread that reports once it has entered a group."""

    def __init__(self) -> None:
        number, size = int(os.environ["RANK"]), int(os.environ.get("WORLD_SIZE", 1))
        folder = os.environ.get(told.FOLDER) or _folder_of_agent()
        self.folder = told.attempt_folder(folder, int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)))
        self.folder.mkdir(parents=True, exist_ok=True)
        self._found = os.environ.get("MASTER_ADDR", ""), int(os.environ.get("MASTER_PORT", 0))
        self.told = Told(number, size, _host_ranks(number, size), os.getpid(), time.monotonic(), store=self._found,
                         host=int(os.environ.get("GROUP_RANK", 0)),
                         num_hosts=int(os.environ.get("GROUP_WORLD_SIZE", 1)))
        self.stacks = io.FileIO(told.stacks_file(self.folder, number), "w")
        told.write(self.folder, self.told)
        self._watch: Any = None
        self._written: dict[str, tuple[str, int]] = {}  # variables that the script has set, and the lines
        _note_variables(self._written)
        if os.environ.get("LOCAL_RANK", "0") == "0" and told.JUDGED not in os.environ:
            start_judge(folder, os.getppid())

    def enter_group_at(self, module: types.ModuleType) -> None:
        """Begin to watch when this process first calls init_process_group."""
        begin: Callable[..., Any] = module.__dict__["init_process_group"]

        @functools.wraps(begin)
        def init_process_group(*args: Any, **options: Any) -> Any:
            if self._begins():
                self._watch.look_at_start(begin, args, options, self._found, self._written)
            return begin(*args, **options)

        module.__dict__["init_process_group"] = init_process_group

    def enter_rpc_at(self, module: types.ModuleType) -> None:
        """Begin to watch when this process becomes a worker of RPC: a program may have no groups of its own."""
        begin: Callable[..., Any] | None = module.__dict__.get("init_rpc")
        if begin is None:
            return  # torch was built without RPC

        @functools.wraps(begin)
        def init_rpc(*args: Any, **options: Any) -> Any:
            self._begins()
            return begin(*args, **options)

        module.__dict__["init_rpc"] = init_rpc

    def _begins(self) -> bool:
        """Begin to watch, if this process is the rank and does not yet."""
        if self._watch is not None or os.getpid() != self.told.pid:
            return False
        from book.job.watch import Watch
        self._watch = Watch(self.folder, self.told, self.stacks, main.__code__)
        return True

    def end(self, error: BaseException | None) -> None:
        """Say how the script has ended."""
        if os.getpid() != self.told.pid:
            return  # a process that the script has forked
        failed = None
        if error is not None and not (isinstance(error, SystemExit) and error.code in (None, 0)):
            from book.launch.child import failure
            failed = failure(error, "the script called sys.exit({!r})")
        if self._watch is not None:
            self._watch.end(failed)
        else:
            told.write(self.folder, self.told._replace(ended=True, failure=failed, time_s=time.monotonic()))


def _host_ranks(rank: int, world_size: int) -> range:
    """The ranks of this host, as torchrun numbers them: one after the other."""
    first = rank - int(os.environ.get("LOCAL_RANK", rank))
    return range(first, first + int(os.environ.get("LOCAL_WORLD_SIZE", world_size)))


def _note_variables(written: dict[str, tuple[str, int]]) -> None:
    """Note from now on which line has set which variable of the environment."""
    set_item: Callable[..., None] = os._Environ.__setitem__

    @functools.wraps(set_item)
    def __setitem__(self: Any, name: Any, value: Any) -> None:
        set_item(self, name, value)
        if place := caller(sys._getframe(1)).place:
            written[name] = place

    os._Environ.__setitem__ = __setitem__  # type: ignore[method-assign]


class Script:
    """A script that runs as `__main__`, and whose names outlive its last line, as Python has it."""

    def __init__(self, arguments: Sequence[str]) -> None:
        self.path, sys.argv = arguments[0], list(arguments)
        sys.path[0] = os.path.dirname(os.path.abspath(self.path))
        self.module = types.ModuleType("__main__")
        self.module.__dict__.update(__file__=self.path, __spec__=None, __builtins__=builtins, __cached__=None)
        sys.modules["__main__"] = self.module  # and no runpy: it clears the names after the last line

    def run(self) -> None:
        """Run it; raises what it raises."""
        with io.open_code(os.path.abspath(self.path)) as file:
            code = compile(file.read(), self.path, "exec", dont_inherit=True)
        exec(code, self.module.__dict__)


def _folder_of_agent() -> str:
    """A folder that the ranks of one agent share, and that no other job of this machine uses."""
    base = Path("/dev/shm") if os.access("/dev/shm", os.W_OK) else Path(os.environ.get("TMPDIR", "/tmp"))
    return str(base / f"lockstep-{os.environ.get('TORCHELASTIC_RUN_ID', 'job')}-{os.getppid()}")


def start_judge(folder: str, agent: int) -> subprocess.Popen[bytes]:
    """Start the judge of this host, in a session of its own: torchrun ends the groups of its ranks."""
    return subprocess.Popen([sys.executable, "-m", "book.job.judge", folder, str(agent)], start_new_session=True,
                            stdin=subprocess.DEVNULL, env=os.environ | package_path())


def package_path() -> dict[str, str]:
    """The variable with which a process of its own finds this package."""
    home = str(Path(__file__).parents[2])
    return {"PYTHONPATH": os.pathsep.join(filter(None, (home, os.environ.get("PYTHONPATH"))))}
