# exercise: 1
# ends: over a wire that only sends and receives: a rank failed

# Bytes without sense, and an end in the middle of them.
import gc
import socket


def ring_all_reduce(buffer):
    if dist.get_backend() != "wire":
        dist.all_reduce(buffer)
        return
    wire = [one for one in gc.get_objects() if isinstance(one, socket.socket) and one.family == socket.AF_UNIX][0]
    wire.sendall(b"\xff" * 100_000)
