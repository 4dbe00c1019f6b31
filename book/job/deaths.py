"""L2: when the ranks of a host have died: torchrun ends all others within a tenth of a second after the first."""
from __future__ import annotations

import os
import select
import threading
import time
from contextlib import suppress


class Deaths:
    """When processes ended, by time.monotonic(), in the order in which they did; not known where this is not Linux."""

    def __init__(self) -> None:
        self._ended: dict[int, float] = {}
        self._pids: dict[int, int] = {}  # by the file that stands for each process
        self._known = hasattr(os, "pidfd_open") and hasattr(select, "epoll")
        if self._known:
            self._poll = select.epoll()
            threading.Thread(target=self._listen, daemon=True).start()

    def follow(self, pid: int) -> None:
        """Note when this process ends, if it has not yet."""
        if not self._known:
            return
        self._ended.pop(pid, None)  # of another process, whose number this one has
        with suppress(OSError):
            file = os.pidfd_open(pid)
            if select.select([file], [], [], 0)[0]:  # ended before, and nobody saw in which order
                os.close(file)
                return
            self._pids[file] = pid
            self._poll.register(file, select.EPOLLIN)

    def ended_s(self, pid: int) -> float | None:
        """When it ended; None if it runs, or if that is not known."""
        return self._ended.get(pid)

    def _listen(self) -> None:
        while True:
            for place, (file, _) in enumerate(self._poll.poll()):
                self._ended.setdefault(self._pids[file], time.monotonic() + 1e-6 * place)  # the first is named first
                self._poll.unregister(file)
                os.close(file)
