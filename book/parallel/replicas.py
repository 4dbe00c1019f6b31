"""L2: replicas of one training, each a process of its own, that are started, killed and listened to one by one."""
from __future__ import annotations

import os
import pickle
import signal
import threading
import time
from collections.abc import Callable, Iterable
from importlib.util import find_spec
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

import cloudpickle
import torch

from book.launch import forked
from book.parallel.model import GPT
from book.parallel.quorum import Attempt, batch, begin, train

HEARTBEAT_S = 1.0  # so long after a replica's last sign of life the lighthouse goes on without it; 5 unless you say so
JOIN_S = 10.0  # how long it waits for one that lives and has not asked yet
LIMIT_S = 90.0


class Replicas:
    """A lighthouse, and replicas that meet there; a context that leaves no process behind.

    `told` has what the replicas' programs have told, in the order of its arrival; `processes` are all that were
    started. Raises ModuleNotFoundError where torchft is not installed.
    """

    def __init__(self, min_replicas: int = 2) -> None:
        self.told: list[Any] = []
        self.processes: list[BaseProcess] = []
        self._of: dict[int, BaseProcess] = {}
        self._lines: list[Connection] = []  # a process ends when its line is closed
        self._open: list[Connection] = []  # those of replicas that have not ended
        self._min_replicas = min_replicas

    def __enter__(self) -> Replicas:
        if find_spec("torchft") is None:
            raise ModuleNotFoundError("replicas need torchft: python -m pip install -r requirements-frameworks.txt",
                                      name="torchft")
        try:
            line, _ = self._fork(_be_lighthouse, self._min_replicas)
            if not line.poll(LIMIT_S):
                raise TimeoutError(f"the lighthouse has not started within {LIMIT_S:.0f} s")
            self.lighthouse: str = line.recv()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: Any) -> None:
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()
        for line in self._lines:
            line.close()

    def start(self, replica: int, program: Callable[..., None] = train, **options: Any) -> None:
        """Start a replica: a process that runs `program(replica, lighthouse, tell, **options)`."""
        line, self._of[replica] = self._fork(_be_replica, replica, self.lighthouse,
                                             cloudpickle.dumps((program, options)))
        self._open.append(line)

    def kill(self, replica: int) -> float:
        """End a replica by SIGKILL, and return the time at which that was done."""
        process = self._of[replica]
        process.kill()
        time_s = time.time()
        process.join()
        return time_s

    def exit_codes(self) -> dict[int, int | None]:
        """How each replica has ended: None if it lives, and minus the signal that killed it."""
        return {replica: process.exitcode for replica, process in self._of.items()}

    def listen(self, done: Callable[[list[Any]], bool]) -> None:
        """Listen until `done(told)`, or until no replica lives. Raises TimeoutError after 90 seconds."""
        end_s = time.monotonic() + LIMIT_S
        while not done(self.told) and self._open:
            if time.monotonic() > end_s:
                raise TimeoutError(f"the replicas have not come there within {LIMIT_S:.0f} s: their exit codes are "
                                   f"{self.exit_codes()}, and they have told of {len(self.told)} attempts")
            ready = set(wait(self._open, timeout=0.1))
            for line in [line for line in self._open if line in ready]:
                try:
                    self.told.append(line.recv())
                except (EOFError, OSError):  # it has ended, perhaps in the middle of a message
                    self._open.remove(line)
                    line.close()
        if not self._open:
            for process in self._of.values():
                process.join(1)

    def _fork(self, target: Callable[..., None], *arguments: Any) -> tuple[Connection, BaseProcess]:
        ours, theirs = Pipe()
        process = forked.start(target, theirs, *arguments)
        self.processes.append(process)
        self._lines.append(ours)
        theirs.close()
        return ours, process


def history(told: Iterable[Attempt]) -> list[Attempt]:
    """The committed steps in their order, each as the first replica that has told of it."""
    first: dict[int, Attempt] = {}
    for attempt in sorted(told, key=lambda attempt: attempt.time_s):
        if attempt.committed:
            first.setdefault(attempt.step, attempt)
    return [first[step] for step in sorted(first)]


def replay(nums_replicas: Iterable[int]) -> list[list[float]]:
    """Train alone on what so many replicas had in each step: the loss of each batch, a list for each step."""
    gpt, optimizer = begin()
    losses: list[list[float]] = []
    number = 0
    for num_replicas in nums_replicas:
        optimizer.zero_grad()
        losses.append([])
        for _ in range(num_replicas):
            inputs, targets = batch(number)
            loss = GPT.loss(gpt(inputs), targets)
            (loss / num_replicas).backward()
            losses[-1].append(loss.item())
            number += 1
        optimizer.step()
    return losses


def _alone(line: Connection) -> None:
    """Have this process end with the one that started it, and be silent: torchft and its lighthouse log a lot."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.dup2(null, 2)
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    def leave_with_starter() -> None:
        try:
            line.poll(None)
        finally:
            os._exit(0)

    threading.Thread(target=leave_with_starter, daemon=True).start()


def _be_lighthouse(line: Connection, min_replicas: int) -> None:
    _alone(line)
    from torchft.coordination import LighthouseServer
    server = LighthouseServer(bind="127.0.0.1:0", min_replicas=min_replicas, join_timeout_ms=round(1000 * JOIN_S),
                              quorum_tick_ms=50, heartbeat_timeout_ms=round(1000 * HEARTBEAT_S))
    line.send(f"http://127.0.0.1:{server.address().rpartition(':')[2]}")
    signal.pause()


def _be_replica(line: Connection, replica: int, lighthouse: str, program: bytes) -> None:
    _alone(line)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    run, options = pickle.loads(program)
    try:
        run(replica, lighthouse, line.send, **options)
        os._exit(0)
    finally:
        os._exit(1)  # at once: torchft's threads would hold up the end
