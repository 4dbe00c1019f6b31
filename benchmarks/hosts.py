"""Hosts on one machine: network namespaces on a switch, with cards of a given rate, for torchrun to span (Linux, root).

Each host has one card, and both of its directions are limited. Packets of less than 256 bytes go first: on a real card
the acknowledgements of what comes in don't wait behind what goes out.
"""
from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType

from benchmarks.process import ROOT
from benchmarks.report import Unavailable

LIMIT_S = 150
CARD, PORT = "eth0", 29500
BUFFERED_S = 0.2  # what a card and a switch's port keep before they drop packets


class Hosts:
    """A context in which there are `num_hosts` hosts whose cards carry `bits_per_s` each way.

    Each host's CLOCK_MONOTONIC is `clock_shift_s` seconds ahead of that of the host before it. Raises Unavailable where
    they can't be made: without root, without iproute2, in some containers.
    """

    def __init__(self, num_hosts: int, bits_per_s: int, clock_shift_s: int = 0) -> None:
        self.num_hosts, self.bits_per_s, self.clock_shift_s = num_hosts, bits_per_s, clock_shift_s
        self._made = ExitStack()

    def __enter__(self) -> Hosts:
        if os.geteuid() != 0 or not (shutil.which("ip") and shutil.which("tc")):
            raise Unavailable("hosts are network namespaces, which need root and iproute2")
        with ExitStack() as made:
            self._namespace(made, self._switch)
            _ip(self._switch, "link add bridge type bridge")
            _ip(self._switch, "link set bridge up")
            for number in range(self.num_hosts):
                self._add_host(made, number)
            self._made = made.pop_all()
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self._made.close()

    def torchrun(self, ranks_per_host: int, program: Sequence[str]) -> str:
        """Run `python -m PROGRAM` on so many ranks of each host, and return what the first host printed.

        Raises Unavailable with the last lines of a host's stderr when a host fails, or takes longer than LIMIT_S.
        """
        with tempfile.TemporaryDirectory() as folder, ExitStack() as started:
            agents = [started.enter_context(self._agent(number, ranks_per_host, program, Path(folder)))
                      for number in range(self.num_hosts)]
            try:
                statuses = [agent.wait(LIMIT_S) for agent in agents]
            except subprocess.TimeoutExpired:
                raise Unavailable(f"not done after {LIMIT_S} s") from None
            finally:
                for agent in agents:
                    agent.terminate()  # torchrun ends its ranks
            for number, status in enumerate(statuses):
                if status:
                    raise Unavailable(f"host {number}: {(Path(folder) / f'{number}.err').read_text()[-2000:]}")
            return (Path(folder) / "0.out").read_text()

    @property
    def _switch(self) -> str:
        return f"lockstep{os.getpid()}s"

    def _host(self, number: int) -> str:
        return f"lockstep{os.getpid()}h{number}"

    def _namespace(self, made: ExitStack, name: str) -> None:
        _run(f"ip netns add {name}")
        made.callback(_run, f"ip netns del {name}")

    def _add_host(self, made: ExitStack, number: int) -> None:
        host, port = self._host(number), f"p{number}"
        self._namespace(made, host)
        _run(f"ip link add {CARD} netns {host} type veth peer name {port} netns {self._switch}")
        _ip(host, f"addr add {address(number)}/24 dev {CARD}")
        for device in ("lo", CARD):
            _ip(host, f"link set {device} up")
        _ip(self._switch, f"link set {port} master bridge")
        _ip(self._switch, f"link set {port} up")
        self._limit(host, CARD)
        self._limit(self._switch, port)

    def _limit(self, namespace: str, device: str) -> None:
        """Limit what leaves through a device; small packets go first."""
        rate, buffer_bytes = self.bits_per_s, round(self.bits_per_s / 8 * BUFFERED_S)
        tc, quantum = f"ip netns exec {namespace} tc", "quantum 1514"
        _run(f"{tc} qdisc add dev {device} root handle 1: htb default 1")
        _run(f"{tc} class add dev {device} parent 1: classid 1:9 htb rate {rate}bit burst 16kb {quantum}")
        for number, share, first in ((1, 0.9, 1), (2, 0.1, 0)):
            _run(f"{tc} class add dev {device} parent 1:9 classid 1:{number} htb rate {round(rate * share)}bit "
                 f"ceil {rate}bit burst 16kb prio {first} {quantum}")
        _run(f"{tc} qdisc add dev {device} parent 1:1 bfifo limit {buffer_bytes}")
        _run(f"{tc} filter add dev {device} parent 1: protocol ip prio 1 u32 match u16 0x0000 0xff00 at 2 flowid 1:2")

    def _agent(self, number: int, ranks_per_host: int, program: Sequence[str], folder: Path) -> subprocess.Popen[bytes]:
        """torchrun on one host; the first one has the store at which all meet."""
        clock = ["unshare", "--time", "--monotonic", str(number * self.clock_shift_s)] if self.clock_shift_s else []
        command = ["ip", "netns", "exec", self._host(number), *clock, sys.executable, "-m", "torch.distributed.run",
                   f"--nnodes={self.num_hosts}", f"--nproc-per-node={ranks_per_host}", "--rdzv-backend=c10d",
                   f"--rdzv-conf=is_host={number == 0}", "--rdzv-id=hosts", f"--rdzv-endpoint={address(0)}:{PORT}",
                   f"--local-addr={address(number)}", "-m", *program]
        environment = {**os.environ, "GLOO_SOCKET_IFNAME": CARD, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        with open(folder / f"{number}.out", "w") as out, open(folder / f"{number}.err", "w") as err:
            return subprocess.Popen(command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=out,
                                    stderr=err, start_new_session=True)


def address(number: int) -> str:
    """The address of a host's card."""
    return f"10.78.0.{number + 1}"


def _ip(namespace: str, words: str) -> None:
    _run(f"ip -n {namespace} {words}")


def _run(command: str) -> None:
    """Run a command of iproute2. Raises Unavailable with what it says."""
    done = subprocess.run(command.split(), capture_output=True, text=True)
    if done.returncode:
        raise Unavailable(f"`{command}` failed: {done.stderr.strip()}")
