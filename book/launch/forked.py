"""L2: a process that is forked from the server of its ranks, so that torch is imported once for both.

A notebook's kernel imports torch, and then starts a server that imports it again, to fork its ranks from. A process
that was forked from this server has torch from its start, and its ranks are forked from the same server.
"""
from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable
from multiprocessing import forkserver
from multiprocessing.process import BaseProcess
from typing import Any

from book.launch import server


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
