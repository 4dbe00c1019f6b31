"""L4: a Jupyter kernel in the sandbox. It communicates over sockets in the run's folder: the sandbox has no network.

It is forked from a warm process if the run has one (see warm), else it starts in bubblewrap.
"""
from __future__ import annotations

import fcntl
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from jupyter_client.provisioning import LocalProvisioner

from book.grading import sandbox
from book.grading.forking import KERNEL, KERNEL_HANDLE, is_over
from book.grading.listening import LAUNCHES

SANDBOXED, PLAIN = "lockstep-sandboxed", "lockstep-plain"  # the kernels' names
PROVISIONER = "lockstep-sandbox"  # its name among the entry points in pyproject.toml
RUN, LIMITS = "LOCKSTEP_RUN", "LOCKSTEP_LIMITS"  # environment variables: the run's folder, its limits as JSON


def write_specs(folder: Path) -> None:
    """Writes both kernels' specifications where JUPYTER_PATH=`folder` finds them."""
    for name in (SANDBOXED, PLAIN):
        spec: dict[str, Any] = {"argv": [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"],
                                "display_name": name, "language": "python"}
        if name == SANDBOXED:
            spec["metadata"] = {"kernel_provisioner": {"provisioner_name": PROVISIONER}}
        place = folder / "kernels" / name
        place.mkdir(parents=True)
        (place / "kernel.json").write_text(json.dumps(spec))


class SandboxProvisioner(LocalProvisioner):
    """Starts a kernel in the sandbox of the run that LOCKSTEP_RUN names."""

    forked: socket.socket | None = None  # of a kernel's job, which warm.ForkedJob has at its other end

    async def pre_launch(self, **kwargs: Any) -> dict[str, Any]:
        """Puts the connection file into the run's folder, and wraps the kernel's command in bubblewrap."""
        run, manager, is_forked = Path(os.environ[RUN]), self.parent, KERNEL_HANDLE in os.environ
        folder = run if is_forked else run / "inside"
        manager.transport, manager.ip = "ipc", str(folder / "k")
        manager.connection_file = str(folder / "c.json")
        kwargs = await super().pre_launch(**kwargs)
        handles = self._listen(f"{folder / 'k'}-{port}" for port in manager.ports)
        if is_forked:
            return kwargs
        if os.geteuid() == 0:
            os.chown(folder / "c.json", sandbox.uid_of(run), sandbox.uid_of(run))
        limits = sandbox.Limits(**json.loads(os.environ[LIMITS]))
        python, _, _, *rest = kwargs["cmd"]
        inner = [python, "-m", "book.grading.listening", json.dumps(handles), *rest]
        launches = {name: os.environ[name] for name in (LAUNCHES,) if name in os.environ}
        kwargs["cmd"] = sandbox.command(inner, run, limits, launches)
        kwargs.update(cwd="/", env={"PATH": "/usr/bin:/bin"}, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                      pass_fds=list(handles.values()))
        return kwargs

    async def launch_kernel(self, cmd: list[str], **kwargs: Any) -> dict[str, Any]:
        """Starts the kernel, then closes this process's handles on its sockets."""
        if KERNEL_HANDLE in os.environ:
            info = self._tell_the_forked_one()
        else:
            info = await super().launch_kernel(cmd, **kwargs)
        for handle in self.handles:
            os.close(handle)
        return info

    def _tell_the_forked_one(self) -> dict[str, Any]:
        self.forked = socket.socket(fileno=int(os.environ[KERNEL_HANDLE]))
        connection = json.loads(Path(self.parent.connection_file).read_text())
        told = {"what": KERNEL, "connection": connection, "paths": self.paths}
        socket.send_fds(self.forked, [json.dumps(told).encode()], self.handles)
        return self.connection_info

    @property
    def has_process(self) -> bool:
        """Whether there is a kernel, as far as this process knows."""
        return self.forked is not None or super().has_process

    async def poll(self) -> int | None:
        """None while the kernel runs."""
        if self.forked is None:
            return await super().poll()
        return 0 if is_over(self.forked) else None

    async def wait(self) -> int | None:
        """Returns at once for a forked kernel: whoever started it ends it, with its sandbox."""
        return 0 if self._let_go() else await super().wait()

    async def send_signal(self, signum: int) -> None:
        """A kernel that is forked gets none: nbval's interrupt comes when a cell has used up its time."""
        if self.forked is None:
            await super().send_signal(signum)

    async def kill(self, restart: bool = False) -> None:
        """Ends the kernel; see `wait`."""
        if not self._let_go():
            await super().kill(restart)

    async def terminate(self, restart: bool = False) -> None:
        """Ends the kernel; see `wait`."""
        if not self._let_go():
            await super().terminate(restart)

    def _let_go(self) -> bool:
        """Whether the kernel was forked; from now on there is none."""
        if self.forked is None:
            return False
        self.forked.close()
        self.forked = None
        return True

    def _listen(self, paths: Iterable[str]) -> dict[str, int]:
        """Binds the kernel's sockets outside the sandbox: inside, their folder is read-only."""
        handles: dict[str, int] = {}
        for path in paths:
            with socket.socket(socket.AF_UNIX) as one:
                one.bind(path)
                one.listen(16)
                handles[path] = fcntl.fcntl(one, fcntl.F_DUPFD_CLOEXEC, sandbox.FILTER + 1)  # FILTER is in use
        self.paths, self.handles = list(handles), list(handles.values())
        return handles
