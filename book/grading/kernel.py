"""L4: a Jupyter kernel in the sandbox. It communicates over sockets in the run's folder: the sandbox has no network."""
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

    async def pre_launch(self, **kwargs: Any) -> dict[str, Any]:
        """Puts the connection file into the run's folder, and wraps the kernel's command in bubblewrap."""
        run, manager = Path(os.environ[RUN]), self.parent
        inside = run / "inside"
        manager.transport, manager.ip = "ipc", str(inside / "k")
        manager.connection_file = str(inside / "c.json")
        kwargs = await super().pre_launch(**kwargs)
        if os.geteuid() == 0:
            os.chown(inside / "c.json", sandbox.uid_of(run), sandbox.uid_of(run))
        limits = sandbox.Limits(**json.loads(os.environ[LIMITS]))
        handles = self._listen(f"{inside / 'k'}-{port}" for port in manager.ports)
        python, _, _, *rest = kwargs["cmd"]
        inner = [python, "-m", "book.grading.listening", json.dumps(handles), *rest]
        launches = {name: os.environ[name] for name in (LAUNCHES,) if name in os.environ}
        kwargs["cmd"] = sandbox.command(inner, run, limits, launches)
        kwargs.update(cwd="/", env={"PATH": "/usr/bin:/bin"}, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                      pass_fds=list(handles.values()))
        return kwargs

    async def launch_kernel(self, cmd: list[str], **kwargs: Any) -> dict[str, Any]:
        """Starts the kernel, then closes this process's handles on its sockets."""
        info = await super().launch_kernel(cmd, **kwargs)
        for handle in self.handles:
            os.close(handle)
        return info

    def _listen(self, paths: Iterable[str]) -> dict[str, int]:
        """Binds the kernel's sockets outside the sandbox: inside, their folder is read-only."""
        handles = {}
        for path in paths:
            with socket.socket(socket.AF_UNIX) as one:
                one.bind(path)
                one.listen(16)
                handles[path] = fcntl.fcntl(one, fcntl.F_DUPFD_CLOEXEC, sandbox.FILTER + 1)  # FILTER is in use
        self.handles = list(handles.values())
        return handles
