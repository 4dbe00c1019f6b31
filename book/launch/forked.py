"""L2: a process that is forked from the server of its ranks, so that torch is imported once for both.

A notebook's kernel imports torch, and then starts a server that imports it again, to fork its ranks from. A process
that was forked from this server has torch from its start, and its ranks are forked from the same server. `start` starts
both; `start_beside` forks both from a process that has imported all that ranks may need.
"""
from __future__ import annotations

import multiprocessing
import os
import signal
import socket
from collections.abc import Callable
from multiprocessing import forkserver, util
from multiprocessing.process import BaseProcess
from typing import Any

from book.launch import family, server


def start(target: Callable[..., None], *arguments: Any, whole: bool = True) -> BaseProcess:
    """Start a process that runs `target(*arguments)`, a function of a module; it can launch ranks at once.

    The server has loaded all that ranks may need or, without `whole`, only what all of them need. This process has to
    outlive the new one: the server ends with this process.
    """
    server.warm_up(whole)
    process = multiprocessing.get_context("forkserver").Process(target=_run, args=(target, arguments))
    with server.without_main_module():
        process.start()
    return process


def start_beside(target: Callable[..., None], *arguments: Any, before: Callable[[bool], None]) -> int:
    """Fork a server of ranks, and a process that runs `target(*arguments)` and can launch ranks; returns its id.

    This process has imported `preload`, and has no threads. The server ends with the new process. Both call `before`
    first, with whether they are the server.
    """
    with socket.socket(socket.AF_UNIX) as listener:
        address = os.path.join(util.get_temp_dir(), "server")
        listener.bind(address)
        listener.listen()
        alive_r, alive_w = os.pipe()
        if os.fork() == 0:
            os.close(alive_w)
            before(True)
            _serve(listener.detach(), alive_r)
        os.close(alive_r)
        child = os.fork()
        if child == 0:
            try:
                listener.close()
                before(False)
                _use_the_server_at(address, alive_w)
                _run(target, arguments)
            finally:
                os._exit(0)
        os.close(alive_w)
    return child


def _serve(listener: int, alive: int) -> None:
    """Be the server: fork a rank for each that connects to the listener, until the other end of `alive` is closed."""
    try:
        os.setsid()
        family.adopt_orphans()
        forkserver.main(listener, alive, [])
    finally:
        os._exit(0)  # to unload torch takes many seconds


def _use_the_server_at(address: str, alive: int) -> None:
    ours: Any = forkserver._forkserver
    ours._forkserver_address, ours._forkserver_alive_fd = address, os.dup(alive)  # `alive` itself stays open


def _run(target: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # the server's, see preload
    multiprocessing.set_start_method(None, force=True)  # it starts processes as one that was not forked would
    _share_the_server()
    target(*arguments)


def _share_the_server() -> None:
    """Have ranks of this process forked from the server that it was forked from, and let that end with the starter."""
    ours: Any = forkserver._forkserver
    # The server runs as long as this pipe is open somewhere. The starter holds it; ranks close the end they are handed.
    os.close(ours._forkserver_alive_fd)
    ours._forkserver_alive_fd = os.open(os.devnull, os.O_WRONLY)
    # CPython intends a child to reuse the server, but starts another if this process is not the server's parent.
    forkserver.ensure_running = ours.ensure_running = lambda: None
