"""L4: bubblewrap around untrusted code: no network, a read-only system, its own processes and /tmp, and limits.

Calls that reach past all that are refused (see calls).

What is inside sees Python, its packages and this book's package, and nothing else of the machine: no labs, no
submissions, no home folders. As root the code runs under a user id that owns nothing.
"""
from __future__ import annotations

import glob
import os
import shutil
import stat
import subprocess
import sys
import tempfile
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from book.grading.calls import seccomp_filter

BOOK = Path(__file__).resolve().parents[1]
HOME = "/home/student"
FIRST_UID, NUM_UIDS = 61184, 4096  # systemd keeps this range for services' users of the moment, so nobody has them
FILTER = 9  # the handle on which bubblewrap finds the filter of system calls
ETC = {"passwd": "root:x:0:0::/:/bin/false\nstudent:x:1000:1000::/home/student:/bin/sh\n",
       "group": "root:x:0:\nstudent:x:1000:\n", "hosts": "127.0.0.1 localhost lab\n::1 localhost lab\n",
       "nsswitch.conf": "passwd: files\ngroup: files\nhosts: files\n"}
# A module whose names can be imported and do nothing: the chapters' solutions, where an exercise asks for them.
WITHHELD = '''def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    def withheld(*args, **kwargs):
        raise RuntimeError(name + " of the book is not there when an exercise is graded: use your own")
    return withheld
'''


class SandboxError(RuntimeError):
    """There is no working sandbox on this machine; the message says what to do."""


@dataclass(frozen=True)
class Limits:
    """What the code of one job may use: seconds for a cell and for all, bytes, processes and threads."""
    cell_s: float = 60
    wall_s: float = 150
    cpu_s: int = 300
    memory_bytes: int = 6 << 30
    num_processes: int = 512
    scratch_bytes: int = 256 << 20


def folder_for(parent: Path, withheld: Iterable[Path] = ()) -> Path:
    """Makes a run's folder `parent`/inside: the only one that a sandbox and those outside see. It holds sockets.

    Beside it stand the files that a sandbox sees in /etc and in the place of withheld modules.
    """
    inside = parent / "inside"
    inside.mkdir(mode=0o700)
    for name, text in ETC.items():
        (parent / name).write_text(text)
    (parent / "withheld.py").write_text(WITHHELD)
    (parent / "withheld").write_text("\n".join(map(str, withheld)))
    (parent / "calls").write_bytes(seccomp_filter())
    if os.geteuid() == 0:
        parent.chmod(0o711)
        os.chown(inside, uid_of(parent), uid_of(parent))
    return inside


def uid_of(parent: Path) -> int:
    """The user id of a run's processes when the grader is root: its own, because processes are counted by user."""
    return FIRST_UID + zlib.crc32(str(parent).encode()) % NUM_UIDS


def command(inner: Sequence[str], parent: Path, limits: Limits, env: Mapping[str, str] | None = None) -> list[str]:
    """The command that runs `inner` in a sandbox whose folder `folder_for` made.

    Raises SandboxError when bubblewrap, setpriv or prlimit is not installed.
    """
    bwrap, prlimit = tool("bwrap"), tool("prlimit")
    limited = [prlimit, "--core=0", f"--nproc={limits.num_processes}", f"--fsize={limits.scratch_bytes}",
               "--nofile=1024", f"--cpu={limits.cpu_s}", f"--data={limits.memory_bytes}", "--", *inner]
    sandbox = [bwrap, *_namespaces(), "--seccomp", str(FILTER), *_scratch(limits), *_system(parent),
               *_environment(env or {}), "--", *limited]
    opened = ["/bin/sh", "-c", f'exec "$@" {FILTER}<"$0"', str(parent / "calls")]
    if os.geteuid() != 0:
        return [*opened, *sandbox]
    uid = str(uid_of(parent))
    drop = [tool("setpriv"), f"--reuid={uid}", f"--regid={uid}", "--clear-groups", "--no-new-privs", "--"]
    # The inner one does not die with this one: the kernel forgets that wish where the user changes. Its processes do.
    return [*opened, bwrap, "--dev-bind", "/", "/", "--unshare-pid", *reachable([*pythons(), BOOK]),
            "--die-with-parent", "--", *drop, *sandbox]


def dying_with_us() -> list[str]:
    """What to put before a command so that it is killed when the thread that starts it ends, however that ends."""
    return [tool("setpriv"), "--pdeathsig", "KILL", "--"]


def probe() -> None:
    """Starts a sandbox that does nothing. Raises SandboxError when that fails."""
    with tempfile.TemporaryDirectory(prefix="lockstep-") as folder:
        try:
            folder_for(Path(folder))
        except NotImplementedError as error:
            raise SandboxError(f"{error}: grade on such a machine.") from None
        nothing = command([sys.executable, "-c", ""], Path(folder), Limits())
        run = subprocess.run(nothing, capture_output=True, text=True)
    if run.returncode:
        raise SandboxError(f"bubblewrap can't make a sandbox here ({run.stderr.strip() or run.returncode}). It needs "
                           "user namespaces: on Ubuntu 24.04 allow them for bwrap with an AppArmor profile, in a "
                           "container start it with the right to make them. Or grade on another machine.")


def tool(name: str) -> str:
    """The path of a program that the sandbox needs. Raises SandboxError when it is not installed."""
    found = shutil.which(name)
    if not found:
        package = "bubblewrap" if name == "bwrap" else "util-linux"
        raise SandboxError(f"submissions run in a sandbox, which needs {name}: on Debian or Ubuntu, sudo apt install "
                           f"{package}")
    return found


def _namespaces() -> list[str]:
    return ["--unshare-all", "--unshare-user", "--disable-userns", "--die-with-parent", "--new-session", "--cap-drop",
            "ALL", "--clearenv", "--hostname", "lab", "--uid", "1000", "--gid", "1000"]


def pythons() -> list[Path]:
    """The folders that Python and its packages are in."""
    folders = dict.fromkeys((sys.base_prefix, sys.prefix))
    return [Path(folder) for folder in folders if not folder.startswith("/usr")]


def _system(parent: Path) -> list[str]:
    """What of the machine is seen, read-only, the run's folder included."""
    args = ["--ro-bind", "/usr", "/usr"]
    for name in ("bin", "sbin", "lib", "lib64"):
        link = Path("/", name)
        args += ["--symlink", f"usr/{name}", f"/{name}"] if link.is_symlink() else ["--ro-bind-try", *[str(link)] * 2]
    args += ["--ro-bind-try", "/etc/ld.so.cache", "/etc/ld.so.cache"]
    for name in ETC:
        args += ["--ro-bind", str(parent / name), f"/etc/{name}"]
    for folder in [*pythons(), BOOK]:
        args += ["--ro-bind", str(folder), str(folder)]
    for cache in (BOOK / "parallel").rglob("__pycache__"):
        args += ["--tmpfs", str(cache)]  # what is withheld could be read from its bytecode
    for module in filter(None, (parent / "withheld").read_text().splitlines()):
        args += ["--ro-bind", str(parent / "withheld.py"), module]
    inside = str(parent / "inside")
    return [*args, "--ro-bind", inside, inside, "--chdir", HOME, "--remount-ro", "/dev", "--remount-ro", "/"]


def _scratch(limits: Limits) -> list[str]:
    """Folders that can be written to, in memory and of limited size. They come first: a book may be in one's home."""
    size = ["--size", str(limits.scratch_bytes)]
    own = [word for place in ("/dev/shm", "/tmp", "/home") for word in (*size, "--tmpfs", place)]
    return ["--proc", "/proc", "--dev", "/dev", *own, "--dir", HOME, *_gpus()]


def _gpus() -> list[str]:
    """NVIDIA's devices, where there are any, with the description of the machine that NCCL reads.

    Written from the documentation of bubblewrap and of NVIDIA's container toolkit; it has not been run on GPUs.
    """
    devices = sorted(glob.glob("/dev/nvidia*"))
    args = [word for device in devices for word in ("--dev-bind", device, device)]
    return [*args, "--ro-bind", "/sys", "/sys"] if devices else []


def _environment(env: Mapping[str, str]) -> list[str]:
    known = {"HOME": HOME, "TMPDIR": "/tmp", "PATH": f"{sys.prefix}/bin:/usr/bin:/bin", "LANG": "C.UTF-8",
             "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONDONTWRITEBYTECODE": "1",
             "PYTHONNOUSERSITE": "1", "IPYTHONDIR": f"{HOME}/.ipython", "MPLCONFIGDIR": f"{HOME}/.matplotlib"}
    return [word for name, value in {**known, **env}.items() for word in ("--setenv", name, value)]


def reachable(paths: Iterable[Path], bind: str = "--ro-bind") -> list[str]:
    """For root, who passes where others can't: let each closed folder on the way to `paths` hold nothing but them."""
    closed: dict[Path, list[Path]] = {}
    for path in paths:
        shut = [p for p in reversed(path.parents) if not stat.S_IMODE(p.stat().st_mode) & stat.S_IXOTH]
        if shut:
            closed.setdefault(shut[0], []).append(path)
    args = []
    for folder, inside in closed.items():
        between = sorted({parent for path in inside for parent in path.parents if folder in parent.parents})
        args += ["--tmpfs", str(folder)]
        args += [word for parent in between for word in ("--perms", "0755", "--dir", str(parent))]
        args += [word for path in inside for word in (bind, str(path), str(path))]
    return args
