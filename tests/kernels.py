"""Kernels for nbval that are forked from the process that ranks are forked from, which has loaded torch already.

A fresh kernel imports torch, and then starts a server for its ranks that imports it again: 8 CPU seconds a notebook.
A forked one does neither. `--fresh-kernels` starts every kernel as JupyterLab does.
"""
from __future__ import annotations

import ctypes
import multiprocessing
import os
import runpy
import signal
import sys
import tempfile
import uuid
from pathlib import Path
from typing import Any

import pytest
from jupyter_client.manager import AsyncKernelManager, KernelManager
from jupyter_client.provisioning import LocalProvisioner

from book.grading.nbval_plugin import use_sockets
from book.launch import forked

_PR_SET_PDEATHSIG = 1
CAN_FORK = sys.platform == "linux" and "forkserver" in multiprocessing.get_all_start_methods()


def use_for_nbval(config: pytest.Config, forked: bool) -> None:
    """Have nbval start its kernels here, and speak to them over sockets in a folder that is gone after the run."""
    folder = tempfile.TemporaryDirectory(prefix="nbval-", dir="/tmp")  # a socket's name has room for 100 characters
    config.add_cleanup(folder.cleanup)
    use_sockets(ForkedKernelManager if forked and CAN_FORK else KernelManager, folder.name)


class _Forks(KernelManager):
    """Makes a manager fork its kernels, whatever provisioner the kernel's specification names."""

    async def _async_pre_start_kernel(self, **options: Any) -> Any:
        self.kernel_id = self.kernel_id or str(uuid.uuid4())
        self.provisioner = ForkedProvisioner(kernel_id=self.kernel_id, kernel_spec=self.kernel_spec, parent=self)
        return await super()._async_pre_start_kernel(**options)


class ForkedKernelManager(_Forks):
    """For nbval."""


class AsyncForkedKernelManager(_Forks, AsyncKernelManager):
    """For nbclient."""


FOR_NBCLIENT = AsyncForkedKernelManager if CAN_FORK else AsyncKernelManager


class ForkedProvisioner(LocalProvisioner):
    """Forks a kernel where LocalProvisioner starts a command; all else is as it is there."""

    async def launch_kernel(self, cmd: list[str], **options: Any) -> Any:
        """Fork a kernel with the connection file, folder and environment that a new process would have been given."""
        self.process = _Forked(cmd[cmd.index("-f") + 1], str(options["cwd"] or Path.cwd()), options["env"])
        self.pid = self.pgid = self.process.pid
        self.cwd = options["cwd"]
        return self.connection_info


class _Forked:
    """A forked process with the names that subprocess.Popen has for it."""
    stdin = stdout = stderr = None

    def __init__(self, connection_file: str, folder: str, environment: dict[str, str]) -> None:
        self._process = forked.start(_run_kernel, connection_file, folder, environment)
        self.pid = self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self) -> int | None:
        self._process.join()
        return self.poll()

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)


def _run_kernel(connection_file: str, folder: str, environment: dict[str, str]) -> None:
    """Be a kernel: the target of its process."""
    os.setsid()
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    sys.path[0] = ""  # as `python -m ipykernel_launcher` leaves it: modules are found in the notebook's folder
    sys.argv = ["ipykernel_launcher", "-f", connection_file]
    runpy.run_module("ipykernel_launcher", run_name="__main__", alter_sys=True)
