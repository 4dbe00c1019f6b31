"""L4: bubblewrap around untrusted code.

What is covered:
- No network. No files but Python, its packages, this book's package and the system's programs, all read-only: no labs,
  no submissions, no home folders, no expected outputs. If the grader is root, the code runs as a user of its own.
- Its own processes, /tmp and host name. It ends, with all that it started, when the grader does.
- Limits on seconds, processes, open files, the size of files and of /tmp, and on each process's time and memory.
  The memory of all together is watched from outside (see run).
- System calls by which sandboxes could reach each other, or the kernel's rarer parts, are refused (see calls).
- Modules of the book that hold an exercise's solution can be imported, but not called.

A sandbox for a process that a warm one has forked is made from inside, and is the same (see enclosed).

What is not covered:
- Faults of the kernel, of bubblewrap or of a GPU's driver; a GPU itself is shared, where one is used.
- Side channels: timing, and the load of the machine, between sandboxes that run side by side.
- Code in one process with the checks can change them: what must be printed is therefore compared outside.
- The rest of the book as an answer: its schedules, formulas and checks stay importable, since labs use them.
- Programs of /usr, which anything inside may read and start.
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
# Prints the folder of the book that Python finds by itself, or nothing if it finds none, or no torch. To import torch
# would take seconds; where it can't be, the lab's own solutions say why.
FOUND = """
from importlib.util import find_spec
book = find_spec("book")
if book and book.submodule_search_locations and find_spec("torch"):
    print(book.submodule_search_locations[0])
"""
HOME, UID = "/home/student", 1000
SCRATCH = ("/dev/shm", "/tmp", HOME)  # what a job can write to, if its sandbox is made in a warm process
FIRST_UID, NUM_UIDS = 61184, 4096  # systemd reserves these ids for services' dynamic users: no other user has one
RIGHTS_OF_WARM = ("CAP_SETUID", "CAP_SETGID", "CAP_SYS_ADMIN")
FILTER = 9  # the handle from which bubblewrap reads the system call filter
ETC = {"passwd": "root:x:0:0::/:/bin/false\nstudent:x:1000:1000::/home/student:/bin/sh\n",
       "group": "root:x:0:\nstudent:x:1000:\n", "hosts": "127.0.0.1 localhost lab\n::1 localhost lab\n",
       "nsswitch.conf": "passwd: files\ngroup: files\nhosts: files\n"}
# Takes the place of modules with the chapters' solutions to an exercise: their names can be imported, but not called.
WITHHELD = '''def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    def withheld(*args, **kwargs):
        raise RuntimeError(name + " of the book is not available when an exercise is graded: use your own")
    return withheld
'''


class SandboxError(RuntimeError):
    """There is no working sandbox on this machine; the message says what to do."""


@dataclass(frozen=True)
class Limits:
    """What the code of one job may use: seconds per cell and in all, bytes, processes and threads."""
    cell_s: float = 60
    wall_s: float = 150
    cpu_s: int = 300
    memory_bytes: int = 6 << 30
    num_processes: int = 512
    scratch_bytes: int = 256 << 20


def folder_for(parent: Path, withheld: Iterable[Path] = (), alone: bool = False) -> Path:
    """Makes a run's folder `parent`/inside, for sockets: the only one visible both inside and outside the sandbox.

    Next to it are the files that a sandbox sees in /etc and in place of withheld modules, and the filter for its system
    calls, which is stricter if its process is `alone`.
    """
    inside = parent / "inside"
    inside.mkdir(mode=0o700)
    for name, text in ETC.items():
        (parent / name).write_text(text)
    (parent / "withheld.py").write_text(WITHHELD)
    (parent / "withheld").write_text("\n".join(map(str, withheld)))
    (parent / "calls").write_bytes(seccomp_filter(alone=alone))
    if os.geteuid() == 0:
        parent.chmod(0o711)
        os.chown(inside, uid_of(parent), uid_of(parent))
    return inside


def uid_of(parent: Path) -> int:
    """The user id of a run's processes if the grader is root: one per run, because process limits are per user."""
    return FIRST_UID + zlib.crc32(str(parent).encode()) % NUM_UIDS


def command(inner: Sequence[str], parent: Path, limits: Limits, env: Mapping[str, str] | None = None) -> list[str]:
    """The command that runs `inner` in a sandbox whose folder `folder_for` made.

    Raises SandboxError if bubblewrap, setpriv or prlimit is not installed.
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
    # The inner bwrap's --die-with-parent is lost when setpriv changes the user, but the outer pid namespace ends with
    # the outer bwrap, and all processes with it.
    return [*opened, bwrap, "--dev-bind", "/", "/", "--unshare-pid", *reachable([*pythons(), BOOK]),
            "--die-with-parent", "--", *drop, *sandbox]


def command_of_warm(inner: Sequence[str], parent: Path) -> list[str]:
    """The command of a warm process, which makes sandboxes for the processes that it forks: it has the same files.

    If the grader is root, it may change its user, and mount its own /proc: in one that bubblewrap covers in part, the
    system lets nobody mount another. Raises SandboxError as `command` does.
    """
    is_root = os.geteuid() == 0
    apart = [f"--unshare-{name}" for name in ("pid", "net", "ipc", "uts", "cgroup")]
    rights = ["--cap-drop", "ALL"] + [word for name in RIGHTS_OF_WARM for word in ("--cap-add", name)] * is_root
    user = [] if is_root else ["--unshare-user", "--uid", str(UID), "--gid", str(UID)]
    opened = ["/bin/sh", "-c", f'exec "$@" {FILTER}<"$0"', str(parent / "calls")]
    sandbox = [tool("bwrap"), *user, *apart, *rights, "--new-session", "--clearenv", "--hostname", "lab", "--seccomp",
               str(FILTER), *_scratch(Limits(), "--dir" if is_root else "--proc"), *_open_to_all(), *_system(parent),
               "--remount-ro", "/home", *_environment({}), "--", *inner]
    return [*opened, *sandbox]


def _open_to_all() -> list[str]:
    """The folders above what is visible: where bubblewrap makes one by itself, for root, nobody else can enter it."""
    above = {parent for place in [*pythons(), BOOK, Path("/etc/passwd")] for parent in place.parents} - {Path("/")}
    return [word for folder in sorted(above) for word in ("--perms", "0755", "--dir", str(folder))]


def dying_with_us() -> list[str]:
    """A command prefix that has the command killed when the thread that started it ends, for whatever reason."""
    return [tool("setpriv"), "--pdeathsig", "KILL", "--"]


def probe() -> None:
    """Starts a sandbox that imports the book. Raises SandboxError if that fails, or if it finds another book there."""
    with tempfile.TemporaryDirectory(prefix="lockstep-") as folder:
        try:
            folder_for(Path(folder))
        except NotImplementedError as error:
            raise SandboxError(f"{error}: grade on a machine with one of these.") from None
        run = subprocess.run(command([sys.executable, "-c", FOUND], Path(folder), Limits()), capture_output=True,
                             text=True)
    if run.returncode:
        raise SandboxError(f"a trial of the sandbox failed ({run.stderr.strip() or run.returncode}). bubblewrap needs "
                           "user namespaces: on Ubuntu 24.04 allow them for bwrap with an AppArmor profile; start a "
                           "container with the permission to create them. Or grade on another machine.")
    found = run.stdout.strip()
    if found != str(BOOK):
        there = f"the one in {Path(found).parent}" if found else "none, or find no torch"
        raise SandboxError(f"this is the book in {BOOK.parent}, but submissions would import {there}, since that is "
                           f"what {sys.executable} has installed. Install this one with `pip install -e .`, or grade "
                           "where the installed one is")


def tool(name: str) -> str:
    """The path of a program that the sandbox needs. Raises SandboxError if it is not installed."""
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
    """The parts of the machine that are visible, read-only, including the run's folder."""
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
        args += ["--tmpfs", str(cache)]  # withheld modules could be recovered from their bytecode
    for module in filter(None, (parent / "withheld").read_text().splitlines()):
        args += ["--ro-bind", str(parent / "withheld.py"), module]
    inside = str(parent / "inside")
    return [*args, "--ro-bind", inside, inside, "--chdir", HOME, "--remount-ro", "/dev", "--remount-ro", "/"]


def _scratch(limits: Limits, proc: str = "--proc") -> list[str]:
    """Writable folders, in memory and of limited size. They are mounted first: the book may be in a home folder."""
    size = ["--size", str(limits.scratch_bytes)]
    own = [word for place in ("/dev/shm", "/tmp", "/home") for word in (*size, "--tmpfs", place)]
    return [proc, "/proc", "--dev", "/dev", *own, "--dir", HOME, *_gpus()]


def _gpus() -> list[str]:
    """NVIDIA's devices, if any, with /sys, from which NCCL reads the machine's topology.

    Written from the documentation of bubblewrap and of NVIDIA's container toolkit; it has not been run on GPUs.
    """
    devices = sorted(glob.glob("/dev/nvidia*"))
    args = [word for device in devices for word in ("--dev-bind", device, device)]
    return [*args, "--ro-bind", "/sys", "/sys"] if devices else []


def _environment(env: Mapping[str, str]) -> list[str]:
    known = {"HOME": HOME, "TMPDIR": "/tmp", "PATH": f"{sys.prefix}/bin:/usr/bin:/bin", "LANG": "C.UTF-8",
             "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONDONTWRITEBYTECODE": "1",
             "PYTHONNOUSERSITE": "1", "IPYTHONDIR": f"{HOME}/.ipython", "MPLCONFIGDIR": f"{HOME}/.matplotlib",
             # What is freed goes back to the system at once, so that a process's peak is what it has really held.
             "MALLOC_MMAP_THRESHOLD_": str(1 << 17)}
    return [word for name, value in {**known, **env}.items() for word in ("--setenv", name, value)]


def reachable(paths: Iterable[Path], bind: str = "--ro-bind") -> list[str]:
    """For root: replace folders above `paths` that other users can't enter with folders that hold only `paths`."""
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
