"""L4: a sandbox around a process that has just been forked, so that it keeps what its parent has imported.

bubblewrap makes a sandbox for a program that it starts, and a program that starts imports everything anew. This makes
the same one from inside: in a warm process, which sits in a sandbox of bubblewrap's that sees the same files and has
served nobody, a child enters namespaces of its own before it reads what it is to run.

- Namespaces: user, processes, mounts, network, IPC, host name. No further user namespace can be made in them.
- Files: those of the warm process, read-only, with /tmp, /dev/shm, the home folder, terminals and /proc of its own. The
  writable ones are limited in bytes, and in files: the memory of an empty file is the kernel's, and in no process.
- No capabilities, no new privileges, the limits on resources, the filter of system calls.
"""
from __future__ import annotations

import ctypes
import fcntl
import os
import resource
import signal
import socket
import struct
import uuid
from collections.abc import Callable
from pathlib import Path

from book.grading.calls import seccomp_filter
from book.grading.sandbox import HOME, SCRATCH, UID, Limits

NAME = b"sandbox"  # of the first process in each
MAX_FILES = 10_000  # in each writable folder: a file takes 1.3 kB of the kernel's memory, whatever is in it
_libc = ctypes.CDLL(None, use_errno=True)
# From linux/sched.h, sys/mount.h, linux/prctl.h, linux/capability.h, linux/seccomp.h and net/if.h.
_NAMESPACES = 0x00020000 | 0x02000000 | 0x04000000 | 0x08000000 | 0x10000000 | 0x20000000 | 0x40000000
_NOSUID, _NODEV, _NOEXEC, _RDONLY, _REMOUNT, _RECURSIVE, _PRIVATE = 2, 4, 8, 1, 32, 16384, 1 << 18
_NAME, _DUMPABLE, _SECCOMP, _DROP_BOUND, _NO_NEW_PRIVILEGES, _AMBIENT, _CLEAR_AMBIENT = 15, 4, 22, 24, 38, 47, 4
_FILTER, _CAPABILITIES_3 = 2, 0x20080522
_GET_FLAGS, _SET_FLAGS, _UP = 0x8913, 0x8914, 1


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_char_p))


def enter(limits: Limits, uid: int | None = None, alone: bool = False) -> int:
    """Forks, and returns 0 in the first process of a new sandbox, and that process's id outside of it.

    `uid` is the user to become if this process may choose. With `alone` the sandbox says nothing of the machine in
    /proc, and wakes no other process. Raises OSError where the system forbids it.
    """
    if uid is not None:
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
        _prctl(_DUMPABLE, 1)  # otherwise the files below belong to root
    outside = os.getuid(), os.getgid()
    _call("unshare", ctypes.c_int(_NAMESPACES))
    Path("/proc/self/setgroups").write_text("deny")
    for name, outer in zip(("uid_map", "gid_map"), outside):
        Path("/proc/self", name).write_text(f"{UID} {outer} 1")
    child = os.fork()
    if child == 0:
        os.setsid()
        _mount_own(limits, alone)
        _switch_loopback_on()
        _limit(limits)
        _give_up_rights(alone)
        os.chdir(HOME)
    return child


def hide() -> None:
    """Have no process but the system read or write this one's memory, whatever user it has."""
    _prctl(_NAME, NAME)
    _prctl(_DUMPABLE, 0)


def show() -> None:
    """Take `hide` back, which a forked process inherits: debuggers and /proc/self work again."""
    _prctl(_NAME, b"python")
    _prctl(_DUMPABLE, 1)


def mount_proc() -> None:
    """Mounts /proc for this process's namespaces: to mount one in others, the system wants to see a whole one here."""
    _mount("proc", "/proc", _NOSUID | _NODEV | _NOEXEC)


def keep_capabilities(kept: int) -> None:
    """Gives up all capabilities but those in the mask `kept`; raises OSError."""
    header, data = struct.pack("Ii", _CAPABILITIES_3, 0), struct.pack("6I", kept, kept, 0, 0, 0, 0)
    _call("capset", header, data)


def _mount_own(limits: Limits, alone: bool) -> None:
    _call("mount", None, b"/", None, ctypes.c_ulong(_RECURSIVE | _PRIVATE), None)
    mount_proc()
    Path("/proc/sys/user/max_user_namespaces").write_text("0")
    if alone:
        _mount("proc", "/proc", _NOSUID | _NODEV | _NOEXEC, "subset=pid")
    else:
        _cover_settings()
    for place in SCRATCH:
        _mount("tmpfs", place, _NOSUID | _NODEV, f"size={limits.scratch_bytes},nr_inodes={MAX_FILES},mode=0755")
    _mount("devpts", "/dev/pts", _NOSUID | _NOEXEC, "newinstance,ptmxmode=0666,mode=620")


def _cover_settings() -> None:
    """Hide /proc/sys, which has the numbers of open files and of terminals of the whole machine.

    TensorPipe, which carries torch's RPC, starts only where it can read an id of the running system; it gets a new one.
    """
    place, flags = "/proc/sys", _NOSUID | _NODEV | _NOEXEC
    _mount("tmpfs", place, flags, "size=4k,nr_inodes=4")
    system = Path(place, "kernel", "random", "boot_id")
    system.parent.mkdir(parents=True)
    system.write_text(f"{uuid.uuid4()}\n")
    _mount("tmpfs", place, flags | _REMOUNT | _RDONLY)


def _switch_loopback_on() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        told = fcntl.ioctl(any_socket, _GET_FLAGS, struct.pack("16sh22x", b"lo", 0))
        (flags,) = struct.unpack_from("h", told, 16)
        fcntl.ioctl(any_socket, _SET_FLAGS, struct.pack("16sh22x", b"lo", flags | _UP))


def _limit(limits: Limits) -> None:
    for which, value in ((resource.RLIMIT_CORE, 0), (resource.RLIMIT_NPROC, limits.num_processes),
                         (resource.RLIMIT_FSIZE, limits.scratch_bytes), (resource.RLIMIT_NOFILE, 1024),
                         (resource.RLIMIT_CPU, limits.cpu_s), (resource.RLIMIT_DATA, limits.memory_bytes)):
        resource.setrlimit(which, (value, value))


def _give_up_rights(alone: bool) -> None:
    """The last step: raises OSError, or PermissionError if anything that must be given up is still there."""
    _prctl(_NO_NEW_PRIVILEGES, 1)
    _prctl(_AMBIENT, _CLEAR_AMBIENT)
    last = int(Path("/proc/self/status").read_text().split("CapBnd:\t")[1].split()[0], 16).bit_length()
    for capability in range(last):
        _prctl(_DROP_BOUND, capability)
    keep_capabilities(0)
    program = seccomp_filter(alone=alone)
    held = _Program(len(program) // 8, program)
    _prctl(_SECCOMP, _FILTER, ctypes.byref(held))
    told = dict(line.split(":\t") for line in Path("/proc/self/status").read_text().splitlines() if ":\t" in line)
    left = [name for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb") if int(told[name], 16)]
    if left or told["NoNewPrivs"] != "1" or told["Seccomp"] != "2":
        raise PermissionError(f"a sandbox has kept rights: {left}")


def _mount(kind: str, place: str, flags: int, options: str = "") -> None:
    _call("mount", kind.encode(), place.encode(), kind.encode(), ctypes.c_ulong(flags), options.encode() or None)


def _prctl(option: int, *values: object) -> None:
    padded = [ctypes.c_ulong(value) if isinstance(value, int) else value for value in (*values, 0, 0, 0, 0)[:4]]
    _call("prctl", ctypes.c_int(option), *padded)


def _call(name: str, *arguments: object) -> None:
    """Calls a function of the C library; raises OSError if that fails."""
    function: Callable[..., int] = getattr(_libc, name)
    if function(*arguments) != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"{name}: {os.strerror(error)}")


def wait_for(child: int, over: Callable[[], bool]) -> None:
    """As the first process of a sandbox: collects what has ended until `child` has, or until it is `over` outside."""
    while True:
        try:
            ended, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if ended == child or over():
            return
        if not ended:
            signal.sigtimedwait([signal.SIGCHLD], 0.5)
