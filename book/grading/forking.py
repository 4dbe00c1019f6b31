"""L4: a warm process, which has imported all that jobs need, and forks a child for each job.

python -m book.grading.forking HANDLE nbval | enclosed [MODULE ...]. Over the socket HANDLE it is handed sockets, one
for each job. It reads nothing from those: its children do. So nothing that a job is told is ever in the memory that the
next one is forked from. It ends, with all its children, when the other end of HANDLE is closed.
"""
from __future__ import annotations

import gc
import importlib
import json
import os
import resource
import signal
import socket
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from book.extras import without_iri_grammar

NBVAL, ENCLOSED = "nbval", "enclosed"
KERNEL, RANK = "kernel", "rank"  # what runs in a sandbox
KERNEL_HANDLE = "LOCKSTEP_KERNEL"  # environment variable: nbval's handle on the socket of its kernel's job
MAX_BYTES = 1 << 20  # of a message
MAX_HANDLES = 8
OUR_MODULES = ("IPython.core.interactiveshell", "ipykernel.ipkernel", "ipykernel.kernelapp", "ipykernel_launcher",
               "book.grading.listening", "book.wire.rank")
RIGHTS = 1 << 6 | 1 << 7  # to change its group and its user

Job = Callable[[socket.socket], None]


def main(arguments: Sequence[str]) -> None:
    """Imports everything, then forks until nobody asks any more."""
    handle, kind, *modules = arguments
    channel = socket.socket(fileno=int(handle))
    without_iri_grammar()
    gc.disable()  # nothing here is garbage
    (_prepare_nbval if kind == NBVAL else _prepare_enclosed)(modules)
    gc.enable()
    gc.freeze()
    _serve(channel, run_nbval if kind == NBVAL else run_enclosed)


def _prepare_nbval(modules: Sequence[str]) -> None:
    """Import and make what each run of nbval would, which is half of what such a run computes."""
    import nbformat
    import nbval.plugin
    from jupyter_client.provisioning import KernelProvisionerFactory

    from book.grading import kernel, nbval_plugin
    assert nbval and kernel and nbval_plugin
    plugins = importlib.import_module("_pytest.config").default_plugins
    for name in [*(f"_pytest.{plugin}" for plugin in plugins), "ipykernel.kernelspec"]:
        with suppress(ImportError):  # pytest's own names: whatever it needs it imports itself
            importlib.import_module(name)
    KernelProvisionerFactory.instance()  # it looks through all installed packages
    nbformat.validate(nbformat.v4.new_notebook())  # compiles what notebooks are validated with


def _prepare_enclosed(modules: Sequence[str]) -> None:
    from book.grading import enclosed
    from book.launch.imports import LATER, USED
    if os.getuid() == 0:
        enclosed.mount_proc()
        enclosed.keep_capabilities(RIGHTS)
    os.environ["MPLBACKEND"] = "module://matplotlib_inline.backend_inline"  # as in a kernel
    os.environ[USED] = " ".join(LATER)
    importlib.import_module("book.launch.preload")
    for name in modules:
        with suppress(Exception):  # whoever uses it learns what is wrong
            importlib.import_module(name)


def _serve(channel: socket.socket, job: Job) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody asks how they end
    while True:
        _, handles, _, _ = socket.recv_fds(channel, 1, 1)
        if not handles:
            return
        if os.fork() == 0:
            try:
                channel.close()
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                _told_of_errors(job, socket.socket(fileno=handles[0]))
            finally:
                os._exit(0)  # to unload torch takes seconds
        os.close(handles[0])


def _told_of_errors(job: Job, asked: socket.socket) -> None:
    try:
        job(asked)
    except Exception as error:
        with suppress(OSError):
            asked.send(json.dumps({"error": f"{type(error).__name__}: {error}"[:1000]}).encode())


def read(job: socket.socket) -> tuple[dict[str, Any] | None, list[int]]:
    """The next message on a job's socket, with its handles; None if there will be none."""
    data, handles, _, _ = socket.recv_fds(job, MAX_BYTES, MAX_HANDLES)
    return (json.loads(data) if data else None), list(handles)


def is_over(job: socket.socket) -> bool:
    """Whether the process at the other end has ended; what it has said last can still be read."""
    try:
        job.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return False
    except OSError:
        pass
    return True


def run_nbval(job: socket.socket) -> None:
    """Runs pytest as the message says: its folder, environment, arguments, and most memory."""
    import pytest

    from book.launch import family
    told, handles = read(job)
    if told is None:
        return
    family.die_with_parent()
    log, kernel = handles
    os.setsid()
    for stream in (1, 2):
        os.dup2(log, stream)
    os.chdir(told["folder"])
    os.environ.clear()
    os.environ.update(told["env"], **{KERNEL_HANDLE: str(kernel)})
    resource.setrlimit(resource.RLIMIT_AS, (told["bytes"], told["bytes"]))
    job.send(json.dumps({"ready": True}).encode())
    pytest.main(told["arguments"])
    for text in (sys.stdout, sys.stderr):
        text.flush()


def run_enclosed(job: socket.socket) -> None:
    """Enters a sandbox as the first message says, and runs there what the second one says: a kernel or a rank."""
    from book.grading import enclosed
    from book.grading.sandbox import Limits
    told, _ = read(job)
    if told is None:
        return
    child = enclosed.enter(Limits(**told["limits"]), told["uid"], told["alone"])
    if child:
        _, _, usage = os.wait4(child, 0)
        job.send(json.dumps({"largest_bytes": usage.ru_maxrss * 1024}).encode())
        return
    enclosed.hide()
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])
    job.send(json.dumps({"ready": True}).encode())
    told, handles = read(job)
    if told is not None:
        child = (_start_kernel if told["what"] == KERNEL else _start_rank)(job, told, handles)
        for handle in handles:
            os.close(handle)
        enclosed.wait_for(child, lambda: is_over(job))


def _begin(job: socket.socket) -> None:
    """In a process that is to run what students wrote."""
    from book.grading import enclosed
    job.close()
    enclosed.show()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGCHLD])


def _start_kernel(job: socket.socket, told: dict[str, Any], handles: Sequence[int]) -> int:
    from book.launch import forked

    def before(is_server: bool) -> None:
        _begin(job)
        for handle in handles if is_server else ():
            os.close(handle)

    return forked.start_beside(_kernel, told, handles, before=before)


def _kernel(told: dict[str, Any], handles: Sequence[int]) -> None:
    from book.grading import listening
    # A file without a name: the folder of a kernel's file is often one that others write to, and here there is none.
    with tempfile.TemporaryFile("w+") as file:
        json.dump(told["connection"], file)
        file.flush()
        listeners = {path: socket.socket(fileno=handle) for path, handle in zip(told["paths"], handles)}
        listening.run(listeners, ["ipykernel_launcher", "-f", f"/proc/self/fd/{file.fileno()}"])


def _start_rank(job: socket.socket, told: dict[str, Any], handles: Sequence[int]) -> int:
    from book.wire import rank
    child = os.fork()
    if child == 0:
        try:
            _begin(job)
            rank.once(socket.socket(fileno=handles[0]), told["head"])
        finally:
            os._exit(0)
    return child


if __name__ == "__main__":
    from book.grading import forking  # a module of its own, which children that are forked again can name

    forking.main(sys.argv[1:])
