"""L4: system calls that reach out of a sandbox, and the seccomp filter that refuses them.

Namespaces hide files, processes and networks. But sandboxes share other kernel objects: locks, leases and watches on
files that both can read, keyrings, sockets that belong to no network. Through these, sandboxes could talk reliably, and
the broker would not see it. The numbers are those of Linux's system call tables; see seccomp(2).
"""
from __future__ import annotations

import errno
import platform
import struct
from collections.abc import Sequence
from typing import NamedTuple


class _Calls(NamedTuple):
    """A machine's architecture, by its number in the kernel's audit interface, and its system call numbers."""
    architecture: int
    refused: Sequence[int]
    fcntl: int
    socket: int
    preadv2: int
    futex: int


_NEW_FUTEXES = (449, 454, 455, 456)  # the same on all architectures
# Refused altogether: flock; inotify_init, inotify_init1, fanotify_init; add_key, request_key, keyctl; io_uring_setup,
# which would open sockets without the socket call; shmget, memfd_create, memfd_secret, whose memory belongs to no
# process while none maps it, so that the limit on all processes would not count it, and semget, msgget, mq_open, whose
# memory never does; mincore, cachestat, which tell how much of a file is in the page cache; futex_wake, futex_wait,
# futex_requeue, futex_waitv, which no C library calls yet.
_CALLS = {"x86_64": _Calls(0xC000003E, (73, 253, 294, 300, 248, 249, 250, 425, 29, 319, 447, 64, 68, 240, 27, 451,
                                         *_NEW_FUTEXES),
                           fcntl=72, socket=41, preadv2=327, futex=202),
          "aarch64": _Calls(0xC00000B7, (32, 26, 262, 217, 218, 219, 425, 194, 279, 447, 190, 186, 180, 232, 451,
                                          *_NEW_FUTEXES),
                            fcntl=25, socket=198, preadv2=286, futex=98)}
# Allowed fcntl commands: for a process's own handles, who gets their signals, a pipe's size, the seals on memory.
_FOR_ONESELF = (0, 1030, 1, 2, 3, 4, 8, 9, 15, 16, 1031, 1032, 1033, 1034)
_FAMILIES = (1, 2, 10, 16)  # Unix, IPv4, IPv6, netlink: a network namespace holds all of them
_NO_FLAGS = (0,)  # for preadv2: RWF_NOWAIT would tell whether the page cache holds a page
# For futex: every operation within a process; across processes only waiting. Waking would tell how many others wait: it
# reaches every process that maps the same page of a file, in any sandbox.
_PRIVATE, _REALTIME, _WAIT, _WAIT_BITSET, _NUM_FUTEX_CALLS = 128, 256, 0, 9, 14
_FUTEXES = [_WAIT, _WAIT_BITSET, _WAIT_BITSET | _REALTIME,
            *(_PRIVATE | clock | call for clock in (0, _REALTIME) for call in range(_NUM_FUTEX_CALLS))]
_OTHER_NUMBERS = 0x40000000  # x86's x32 ABI: the same calls under other numbers

_LOAD, _EQUAL, _AT_LEAST, _RETURN = 0x20, 0x15, 0x35, 0x06  # instructions of Linux's socket filters
_NUMBER, _ARCHITECTURE, _FIRST, _SECOND, _SIXTH = 0, 4, 16, 24, 56  # offsets, of arguments those of their low halves
_ALLOW, _REFUSE = 0x7FFF0000, 0x00050000 | errno.EPERM


def seccomp_filter(machine: str | None = None, alone: bool = False) -> bytes:
    """A filter that answers such calls with EPERM, in the form that bubblewrap reads.

    A process that is `alone` may wake no other process either, which semaphores of multiprocessing need. Raises
    NotImplementedError for an unsupported architecture.
    """
    calls = _CALLS.get(machine or platform.machine())
    if calls is None:
        raise NotImplementedError(f"the sandbox knows only the system calls of {' and '.join(_CALLS)}")
    program = [_step(_LOAD, _ARCHITECTURE), _step(_EQUAL, calls.architecture, 1, 0), _step(_RETURN, _REFUSE),
               _step(_LOAD, _NUMBER), _step(_AT_LEAST, _OTHER_NUMBERS, 0, 1), _step(_RETURN, _REFUSE)]
    for number in calls.refused:
        program += [_step(_EQUAL, number, 0, 1), _step(_RETURN, _REFUSE)]
    program += _only(calls.fcntl, _SECOND, _FOR_ONESELF) + _only(calls.socket, _FIRST, _FAMILIES)
    program += _only(calls.preadv2, _SIXTH, _NO_FLAGS)
    program += _only(calls.futex, _SECOND, _FUTEXES) if alone else []
    return b"".join([*program, _step(_RETURN, _ALLOW)])


def _only(number: int, argument: int, allowed: Sequence[int]) -> list[bytes]:
    """Instructions that allow a call only with these values of an argument."""
    inner = [_step(_LOAD, argument)]
    for value in allowed:
        inner += [_step(_EQUAL, value, 0, 1), _step(_RETURN, _ALLOW)]
    inner.append(_step(_RETURN, _REFUSE))
    return [_step(_EQUAL, number, 0, len(inner)), *inner]


def _step(code: int, value: int, if_so: int = 0, if_not: int = 0) -> bytes:
    """One instruction; a comparison says how many instructions to skip."""
    return struct.pack("HBBI", code, if_so, if_not, value)
