# exercise: 1
# ends: a check failed
# right if: ways

# Memory that belongs to no process while none maps it: a limit that is a sum over processes does not see it.
import ctypes
import os

libc, ways = ctypes.CDLL(None), []
try:
    os.close(os.memfd_create("kept"))
    ways.append("a file in memory")
except OSError:
    pass
ways += ["a System V segment"] * (libc.shmget(0, 1 << 20, 0o1600) >= 0)
ways += ["semaphores"] * (libc.semget(0, 1000, 0o1600) >= 0) + ["messages"] * (libc.msgget(0, 0o1600) >= 0)
ways += ["a queue of messages"] * (libc.syscall({"x86_64": 240, "aarch64": 180}[os.uname().machine], b"kept", 0o102, 0o600, None) >= 0)
ways += ["secret memory"] * (libc.syscall(447, 0) >= 0)
