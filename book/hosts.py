"""L2: hosts on one machine: network namespaces on a switch, with cards of a given rate, for torchrun to span.

Each host has one card, and both of its directions are limited. Packets of less than 256 bytes go first: on a real card
the acknowledgements of what comes in don't wait behind what goes out. This needs Linux and root; where it can't be had,
`hosts_or_agents` starts torchrun's agents on this machine as it is.
"""
from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import ClassVar

LIMIT_S = 150
CARD, PORT, LOOPBACK = "eth0", 29500, "127.0.0.1"
ROOT = Path(__file__).parents[1]
STORAGE = "10.78.0.200"
TAKES_ALL = """import socket, sys, threading
def take(connection):
    while connection.recv(1 << 20): pass
server = socket.create_server((sys.argv[1], int(sys.argv[2])))
print("listens", flush=True)
while True:
    threading.Thread(target=take, args=server.accept()[:1], daemon=True).start()
"""
BUFFERED_S = 0.2  # what a card and a switch's port keep before they drop packets


class NoHosts(RuntimeError):
    """Hosts can't be made here, or a program on them failed; the text says why."""


class Hosts:
    """A context in which there are `num_hosts` hosts whose cards carry `bits_per_s` each way.

    Each host's CLOCK_MONOTONIC is `clock_shift_s` seconds ahead of that of the host before it. Raises NoHosts where
    they can't be made: without root, without iproute2, in some containers.
    """

    def __init__(self, num_hosts: int, bits_per_s: int, clock_shift_s: int = 0) -> None:
        self.num_hosts, self.bits_per_s, self.clock_shift_s = num_hosts, bits_per_s, clock_shift_s
        self._made = ExitStack()

    def __enter__(self) -> Hosts:
        if os.geteuid() != 0 or not (shutil.which("ip") and shutil.which("tc")):
            raise NoHosts("hosts are network namespaces, which need root and iproute2")
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

    def __str__(self) -> str:
        return f"{self.num_hosts} hosts, each with a card of {self.bits_per_s / 1e6:g} Mbit/s each way"

    def torchrun(self, ranks_per_host: int, program: Sequence[str]) -> str:
        """Run a program on so many ranks of each host under torchrun, and return what they printed, host by host.

        `program` is what torchrun is given: a file and its arguments, or "-m", a module and its arguments.

        Raises NoHosts with the last lines of a host's stderr when a host fails, or takes longer than LIMIT_S.
        """
        with tempfile.TemporaryDirectory() as folder, ExitStack() as started:
            agents = [started.enter_context(self._agent(number, ranks_per_host, program, Path(folder)))
                      for number in range(self.num_hosts)]
            try:
                statuses = [agent.wait(LIMIT_S) for agent in agents]
            except subprocess.TimeoutExpired:
                raise NoHosts(f"not done after {LIMIT_S} s") from None
            finally:
                for agent in agents:
                    agent.terminate()  # torchrun ends its ranks
            for number, status in enumerate(statuses):
                if status:
                    raise NoHosts(f"host {number}: {(Path(folder) / f'{number}.err').read_text()[-2000:]}")
            return "".join((Path(folder) / f"{number}.out").read_text() for number in range(self.num_hosts))

    @contextmanager
    def storage(self) -> Iterator[str]:
        """A context with an address, HOST:PORT, that takes what hosts send; it has no card that could be slow."""
        _ip(self._switch, f"addr add {STORAGE}/24 dev bridge")
        command = ["ip", "netns", "exec", self._switch, sys.executable, "-c", TAKES_ALL, STORAGE, str(PORT)]
        taking = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)
        try:
            if taking.stdout is None or not taking.stdout.readline():  # a line once it listens
                raise NoHosts(f"nothing listens on {STORAGE}:{PORT}")
            yield f"{STORAGE}:{PORT}"
        finally:
            taking.kill()
            taking.communicate()
            _ip(self._switch, f"addr del {STORAGE}/24 dev bridge")

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
        command = [*self._inside(number), sys.executable, "-m", "torch.distributed.run", f"--nnodes={self.num_hosts}",
                   f"--nproc-per-node={ranks_per_host}", "--rdzv-backend=c10d", f"--rdzv-conf=is_host={number == 0}",
                   "--rdzv-id=hosts", f"--rdzv-endpoint={self._endpoint}", f"--local-addr={self._address(number)}",
                   *program]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "",
                       **self._environment}
        with open(folder / f"{number}.out", "w") as out, open(folder / f"{number}.err", "w") as err:
            return subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=out, stderr=err,
                                    start_new_session=True)

    _environment: ClassVar[dict[str, str]] = {"GLOO_SOCKET_IFNAME": CARD}

    def _inside(self, number: int) -> list[str]:
        """What a command begins with that is to run on a host."""
        clock = ["unshare", "--time", "--monotonic", str(number * self.clock_shift_s)] if self.clock_shift_s else []
        return ["ip", "netns", "exec", self._host(number), *clock]

    def _address(self, number: int) -> str:
        return address(number)

    @property
    def _endpoint(self) -> str:
        return f"{address(0)}:{PORT}"


class Agents(Hosts):
    """As many agents of torchrun on this machine, with its clock, and neither cards nor addresses of their own."""

    _environment: ClassVar[dict[str, str]] = {"GLOO_SOCKET_IFNAME": "lo"} if sys.platform == "linux" else {}

    def __init__(self, num_hosts: int) -> None:
        super().__init__(num_hosts, 0)

    def __enter__(self) -> Agents:
        with socket.create_server((LOOPBACK, 0)) as free:
            self._port = free.getsockname()[1]
        return self

    def __str__(self) -> str:
        return f"{self.num_hosts} agents on this machine: hosts of their own need root, iproute2 and Linux"

    def _inside(self, number: int) -> list[str]:
        return []

    def _address(self, number: int) -> str:
        return LOOPBACK

    @property
    def _endpoint(self) -> str:
        return f"{LOOPBACK}:{self._port}"


@contextmanager
def hosts_or_agents(num_hosts: int, bits_per_s: int, clock_shift_s: int = 0) -> Iterator[Hosts]:
    """A context with Hosts where they can be made, and else with Agents; the text of what it gives says which."""
    with ExitStack() as stack:
        made: Hosts
        try:
            made = stack.enter_context(Hosts(num_hosts, bits_per_s, clock_shift_s))
        except NoHosts:
            made = stack.enter_context(Agents(num_hosts))
        yield made


def address(number: int) -> str:
    """The address of a host's card."""
    return f"10.78.0.{number + 1}"


def _ip(namespace: str, words: str) -> None:
    _run(f"ip -n {namespace} {words}")


def _run(command: str) -> None:
    """Run a command of iproute2. Raises NoHosts with what it says."""
    done = subprocess.run(command.split(), capture_output=True, text=True)
    if done.returncode:
        raise NoHosts(f"`{command}` failed: {done.stderr.strip()}")
