# exercise: 1
# ends: a check failed
# needs: warm processes
# right if: ways

# What sandboxes have in common in the kernel: locks and watches on a file that all can read, sockets of no network.
import ctypes
import errno
import fcntl
import os
import socket
import struct

libc, ways = ctypes.CDLL(None), []
shared = os.open("/usr/bin/env", os.O_RDONLY)
try:
    asked = struct.pack("@hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, int("@PORT@"), 1, 0)
    kind, *_ = struct.unpack("@hhqqi4x", fcntl.fcntl(shared, fcntl.F_GETLK, asked))
    ways += ["a lock that the course holds"] * (kind != fcntl.F_UNLCK)
except OSError:
    pass
try:
    fcntl.flock(shared, fcntl.LOCK_SH)
    ways.append("flock")
except OSError:
    pass
ways += ["a watch"] * (libc.inotify_init1(0) >= 0) + ["a ring of calls"] * (libc.syscall(425, 1, None) >= 0)
ways += ["what the page cache holds"] * (libc.syscall({"x86_64": 27, "aarch64": 232}[os.uname().machine], None, 0, None) == 0)
try:
    os.preadv(shared, [bytearray(1)], 0, 8)  # RWF_NOWAIT
    ways.append("a read that does not wait")
except OSError as error:
    ways += ["a read that does not wait"] * (error.errno == errno.EAGAIN)
ways += ["how many files are open"] * (os.path.exists("/proc/sys/fs/file-nr") + os.path.exists("/proc/sys/kernel/pty/nr"))
for family in (socket.AF_VSOCK, socket.AF_ALG, socket.AF_PACKET):
    try:
        socket.socket(family, socket.SOCK_SEQPACKET if family == socket.AF_ALG else socket.SOCK_STREAM).close()
        ways.append(f"a socket of family {family}")
    except OSError:
        pass
