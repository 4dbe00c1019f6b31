"""A Slurm cluster of two nodes on this machine, with key, ports and folders of its own; it needs root and slurm."""
from __future__ import annotations

import os
import secrets
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

PROGRAMS = ("slurmctld", "slurmd", "munged", "sbatch", "scontrol", "sinfo")
NODES = ("127.0.0.1", "127.0.0.2")  # names that every machine finds
READY_S = 60
CONF = """ClusterName=lockstep
SlurmctldHost={host}(127.0.0.1)
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/ctld.pid
SlurmdPidFile={folder}/d-%n.pid
SlurmctldPort={ports[0]}
ReturnToService=2
SwitchType=switch/none
MpiDefault=none
NodeName=127.0.0.1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=2 State=UNKNOWN
NodeName=127.0.0.2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=2 State=UNKNOWN
PartitionName=cpu Nodes=127.0.0.[1-2] Default=YES MaxTime=10 State=UP OverSubscribe=FORCE
"""


class NoSlurm(RuntimeError):
    """No cluster can be started here; the text says why."""


@contextmanager
def cluster(folder: Path) -> Iterator[dict[str, str]]:
    """Two nodes, ready for jobs; gives the environment for sbatch and the like."""
    missing = [name for name in PROGRAMS if not shutil.which(name)]
    if missing or os.geteuid() != 0:
        raise NoSlurm(f"a Slurm cluster needs root and {', '.join(missing) or 'nothing else'}: "
                      "apt install slurmctld slurmd slurm-client munge")
    environment = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}
    _prepare(folder)
    with open(folder / "daemons.log", "w") as log:
        daemons = [subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
                   for command in _commands(folder)]
        try:
            _wait_until_ready(environment, folder)
            yield environment
        finally:
            for daemon in reversed(daemons):
                daemon.terminate()
            for daemon in daemons:
                daemon.wait(30)


def _prepare(folder: Path) -> None:
    """What the daemons need: their folders, a key, the configuration."""
    for name in ("state", *(f"spool-{node}" for node in NODES)):
        (folder / name).mkdir(parents=True)
    key = folder / "munge.key"
    key.write_bytes(secrets.token_bytes(1024))
    key.chmod(0o400)
    folder.chmod(0o755)
    ports = [_free_port() for _ in range(3)]
    host = socket.gethostname().split(".")[0]
    (folder / "slurm.conf").write_text(CONF.format(host=host, folder=folder, ports=ports))


def _commands(folder: Path) -> list[Sequence[str]]:
    files = {"socket": "munge.socket", "key-file": "munge.key", "pid-file": "munge.pid", "log-file": "munge.log",
             "seed-file": "munge.seed"}
    munge = [f"--{name}={folder / file}" for name, file in files.items()]
    return [["munged", "--force", "--foreground", *munge], ["slurmctld", "-D"],
            *(["slurmd", "-D", "-N", node] for node in NODES)]


def _wait_until_ready(environment: dict[str, str], folder: Path) -> None:
    until = time.monotonic() + READY_S
    while time.monotonic() < until:
        told = subprocess.run(["sinfo", "--noheader", "--format=%D %t"], env=environment, capture_output=True,
                              text=True, timeout=READY_S)
        if told.stdout.split() == ["2", "idle"]:
            return
        time.sleep(0.5)
    raise NoSlurm(f"the nodes are not ready after {READY_S} s: {(folder / 'daemons.log').read_text()[-2000:]}")


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])
