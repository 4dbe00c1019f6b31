"""L2: the program of one rank: python -m book.wire.rank SOCKET < HEAD. It runs what the broker's tasks say.

HEAD is JSON, a list of sources that are run first. Then the rank connects to the socket, and serves each connection in
a process of its own, forked from there: what one run does to it the next does not see (what it writes to disk stays).

The first task of a connection has `sources`, run one after the other in one namespace. Each later one has `call`,
`rank`, `world_size` and whatever else the call uses, and an input: an array of float64 called `buffer`, which the call
leaves as its result.
"""
from __future__ import annotations

import ctypes
import json
import linecache
import os
import socket
import sys
import traceback
from collections.abc import Sequence
from typing import Any

import psutil
import torch

from book.wire.frames import FAIL, READY, RESULT
from book.wire.group import Link, join

_SET_CHILD_SUBREAPER = 36  # of Linux's prctl: orphans of this process's children become its own


def main(path: str) -> None:
    """Serves the brokers that accept at the socket `path`, one after the other, until it is gone."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    namespace, failed = {"__name__": "__main__"}, None
    try:
        run_sources(json.load(sys.stdin), namespace, "head")
    except Exception as error:
        failed = error
    while True:
        connection = socket.socket(socket.AF_UNIX)
        try:
            connection.connect(path)
        except OSError:
            return
        child = os.fork()
        if child == 0:
            serve(connection, namespace, failed)
            os._exit(0)
        connection.close()
        os.waitpid(child, 0)
        end_children()


def end_children() -> None:
    """Ends what a run has left behind: its orphans are children of this process, which has asked for them."""
    while children := psutil.Process().children(recursive=True):
        for one in children:
            try:
                one.kill()
            except psutil.NoSuchProcess:
                pass
        psutil.wait_procs(children, timeout=1)


def serve(connection: socket.socket, namespace: dict[str, Any], failed: Exception | None = None) -> None:
    """Does a broker's tasks until it is gone; where `failed` is why the head did not run, says so instead."""
    link = Link(connection)
    while (payload := link.next_task()) is not None:
        head, data = payload.split(b"\n", 1)
        task = json.loads(head)
        try:
            if failed is not None:
                raise failed
            if "sources" in task:
                run_sources(task["sources"], namespace, "source")
                link.say(READY)
            else:
                link.say(RESULT, payload=run_call(link, task, data, namespace))
        except BaseException as error:  # SystemExit too: the broker must learn that there will be no result
            last = traceback.extract_tb(error.__traceback__)[-1]
            link.say(FAIL, payload=f"{type(error).__name__}: {error} (line {last.lineno}: {last.line})".encode())


def run_sources(sources: Sequence[str], namespace: dict[str, Any], called: str) -> None:
    """Runs sources in a namespace, so that an error can show its line."""
    for number, source in enumerate(sources):
        name = f"<{called} {number}>"
        linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
        exec(compile(source, name, "exec"), namespace)


def run_call(link: Link, task: dict[str, Any], data: bytes, namespace: dict[str, Any]) -> bytes:
    """Runs a task's call and returns the bytes of its `buffer`."""
    join(link, task["rank"], task["world_size"])
    buffer = torch.frombuffer(bytearray(data), dtype=torch.float64)
    local = {**namespace, **task, "buffer": buffer, "torch": torch}  # its names are not those of the sources
    run_sources([task["call"]], local, "call")
    return local["buffer"].detach().contiguous().double().numpy().tobytes()


if __name__ == "__main__":
    main(sys.argv[1])
