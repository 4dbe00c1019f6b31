"""L2: the program of one rank: python -m book.wire SOCKET < HEAD. It runs what the broker's tasks say.

HEAD is JSON, a list of sources that are run first. Then the rank connects to the socket, and serves each connection in
a newly forked process, so that one run can't affect the next, except through files on disk and this process's memory.
`once` serves a single connection.

The first task of a connection has `sources`, cells that are run one after the other in one namespace, as IPython runs
them. One that raises is no failure by itself: it may be a trial that the answer does not need. Each later task has
`call`, `rank`, `world_size` and whatever else the call uses, and an input: an array of float64 called `buffer`, in
which the call leaves its result.
"""
from __future__ import annotations

import ctypes
import gc
import json
import linecache
import os
import socket
import sys
from collections.abc import Sequence
from typing import Any

import psutil
import torch

from book.wire.cells import Cells, told
from book.wire.frames import FAIL, READY, RESULT
from book.wire.group import Connection, join

_SET_CHILD_SUBREAPER = 36  # for Linux's prctl: orphaned descendants become children of this process


def main(path: str) -> None:
    """Serves the brokers that accept at the socket `path`, one after the other, until it no longer accepts."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    cells, failed = _after_head(json.load(sys.stdin))
    gc.freeze()  # so that a forked process neither looks through torch's modules nor copies their pages
    gc.enable()
    while True:
        connection = socket.socket(socket.AF_UNIX)
        try:
            connection.connect(path)
        except OSError:
            return
        child = os.fork()
        if child == 0:
            serve(connection, cells, failed)
            os._exit(0)
        connection.close()
        os.waitpid(child, 0)
        end_children()


def once(connection: socket.socket, head: Sequence[str]) -> None:
    """Runs the sources in `head`, then a broker's tasks until the connection closes."""
    cells, failed = _after_head(head)
    serve(connection, cells, failed)


def _after_head(head: Sequence[str]) -> tuple[Cells, Exception | None]:
    """Cells that have the names of `head`, and the error with which it failed."""
    namespace: dict[str, Any] = {"__name__": "__main__"}
    cells = Cells(namespace)
    try:
        run_sources(head, namespace, "head")
    except Exception as error:
        return cells, error
    return cells, None


def end_children() -> None:
    """Kills what a run has left behind: its orphans are children of this process, which is their subreaper."""
    while children := psutil.Process().children(recursive=True):
        for one in children:
            try:
                one.kill()
            except psutil.NoSuchProcess:
                pass
        psutil.wait_procs(children, timeout=1)


def serve(connection: socket.socket, cells: Cells, failed: Exception | None = None) -> None:
    """Runs a broker's tasks until the connection closes; if the head `failed`, reports that instead."""
    link = Connection(connection)
    while (payload := link.next_task()) is not None:
        head, data = payload.split(b"\n", 1)
        task = json.loads(head)
        try:
            if failed is not None:
                raise failed
            if "sources" in task:
                cells.run(task["sources"])
                link.send(READY)
            else:
                link.send(RESULT, payload=run_call(link, task, data, cells))
        except BaseException as error:  # SystemExit too: the broker must know that there will be no result
            earlier = f"; before that a cell failed: {told(cells.errors[0])}" if cells.errors else ""
            link.send(FAIL, payload=(told(error) + earlier).encode("utf-8", "replace"))


def run_sources(sources: Sequence[str], namespace: dict[str, Any], called: str) -> None:
    """Runs sources in a namespace, registered with linecache so that a traceback can show their lines."""
    for number, source in enumerate(sources):
        name = f"<{called} {number}>"
        linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
        exec(compile(source, name, "exec"), namespace)


def run_call(link: Connection, task: dict[str, Any], data: bytes, cells: Cells) -> bytes:
    """Runs a task's call and returns the bytes of its `buffer`."""
    join(link, task["rank"], task["world_size"])
    buffer = torch.frombuffer(bytearray(data), dtype=torch.float64)
    local = {**cells.shell.user_ns, **task, "buffer": buffer, "torch": torch}  # a copy of the cells' names
    with cells.names():
        run_sources([task["call"]], local, "call")
    return local["buffer"].detach().contiguous().double().numpy().tobytes()
