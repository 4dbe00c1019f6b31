"""L4: run a kernel inside the sandbox, on sockets that were bound outside, so that it needs no writable folder.

python -m book.grading.listening HANDLES -f CONNECTION_FILE, where HANDLES is JSON that maps each socket's path to its
handle. With the environment variable LOCKSTEP_LAUNCHES set, the kernel is forked from the server of its ranks, which
has loaded all that ranks may need, or some of it.
"""
from __future__ import annotations

import json
import os
import runpy
import socket
import sys
from typing import Any

import zmq

LAUNCHES = "LOCKSTEP_LAUNCHES"  # environment variable: ALL or SOME if the notebook launches ranks
ALL, SOME = "all", "some"


def main() -> None:
    """Runs a kernel, in this process or in one that is forked from its ranks' server, until it ends."""
    path_to_handle = json.loads(sys.argv.pop(1))
    listeners = {path: socket.socket(fileno=handle) for path, handle in path_to_handle.items()}
    loaded = os.environ.pop(LAUNCHES, "")
    if not loaded:
        run(listeners, sys.argv)
        return
    from book.launch import forked  # other notebooks need no ranks, and start sooner without it

    kernel = forked.start(run, listeners, sys.argv, whole=loaded == ALL)
    kernel.join()
    os._exit(kernel.exitcode or 0)


def run(listeners: dict[str, socket.socket], argv: list[str]) -> None:
    """Runs ipykernel; when it binds a path that is among the listeners', it listens there instead."""
    sys.argv = argv
    bind = zmq.Socket.bind

    def listen(own: zmq.Socket, address: str) -> Any:
        listener = listeners.get(address.removeprefix("ipc://"))
        if listener is not None:
            own.setsockopt(zmq.USE_FD, listener.detach())
        return bind(own, address)

    zmq.Socket.bind = listen
    runpy.run_module("ipykernel_launcher", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    from book.grading import listening  # a function of __main__ can't be handed to another process

    listening.main()
