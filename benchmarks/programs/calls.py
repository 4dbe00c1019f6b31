"""Report how long each call took in a program that starts ranks repeatedly."""
from __future__ import annotations

import json
import socket
import sys
import time
from collections.abc import Callable


def report(start_ranks: Callable[[int], object]) -> None:
    """Call `start_ranks(world_size)` as the program's arguments say (WORLD_SIZE NUM_CALLS); print seconds as JSON."""
    world_size, num_calls = map(int, sys.argv[1:])
    seconds = []
    for _ in range(num_calls):
        start_s = time.perf_counter()
        start_ranks(world_size)
        seconds.append(time.perf_counter() - start_s)
    print(json.dumps(seconds))


def free_port() -> int:
    """A port that is free at the moment."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]
