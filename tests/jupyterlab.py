"""A real JupyterLab for tests: a server of its own on a free port, its settings in a folder that is thrown away."""
from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from tests.website import ROOT

CONFIG = ROOT / "book" / "authoring" / "jupyter"  # what `make lab` uses too
LIMIT_S = 60


@contextlib.contextmanager
def running_lab(folder: Path, settings: Path) -> Iterator[str]:
    """Run JupyterLab on `folder` with its settings in `settings`; yields its address, the token in it."""
    homes = {f"JUPYTER_{kind}_DIR": str(settings / kind.lower()) for kind in ("CONFIG", "DATA", "RUNTIME")}
    homes["JUPYTER_CONFIG_PATH"] = str(CONFIG)
    command = [sys.executable, "-m", "jupyter", "lab", "--no-browser", "--allow-root", "--ServerApp.ip=127.0.0.1",
               "--ServerApp.port=0", f"--notebook-dir={folder}", "--LabApp.extension_manager=readonly"]
    log = settings / "jupyterlab.log"
    with log.open("w") as output:
        server = subprocess.Popen(command, env={**os.environ, **homes}, stdout=output, stderr=output)
    try:
        yield read_address(server, log)
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait(timeout=LIMIT_S)


def read_address(server: subprocess.Popen[bytes], log: Path) -> str:
    """Wait for the address that the server prints, or fail with all that it said instead."""
    end_s = time.monotonic() + LIMIT_S
    while time.monotonic() < end_s and server.poll() is None:
        if found := re.search(r"http://127\.0\.0\.1:\d+/lab\?token=\w+", log.read_text()):
            return found[0]
        time.sleep(0.1)
    raise AssertionError("JupyterLab printed no address:\n" + log.read_text())


def notebook_address(address: str, name: str) -> str:
    """The address of the notebook `name` in the folder of a running JupyterLab, with no other notebook open beside."""
    return address.replace("/lab?", f"/lab/tree/{name}?reset&")
