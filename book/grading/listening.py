"""L4: run a kernel inside the sandbox, on sockets that were bound outside, so that it needs no writable folder.

python -m book.grading.listening HANDLES -f CONNECTION_FILE, where HANDLES is JSON that maps each socket's path to its
handle.
"""
from __future__ import annotations

import json
import runpy
import sys
from typing import Any

import zmq


def main() -> None:
    """Runs ipykernel; when it binds a path that is among the handles, it listens on that handle instead."""
    handles = json.loads(sys.argv.pop(1))
    bind = zmq.Socket.bind

    def listen(socket: zmq.Socket, address: str) -> Any:
        handle = handles.get(address.removeprefix("ipc://"))
        if handle is not None:
            socket.setsockopt(zmq.USE_FD, handle)
        return bind(socket, address)

    zmq.Socket.bind = listen
    runpy.run_module("ipykernel_launcher", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
