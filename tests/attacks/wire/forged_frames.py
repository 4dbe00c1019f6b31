# exercise: 1
# ends: over a wire that only sends and receives

# Frames of the attacker's own on the broker's socket: results before their time, for others, to itself, absurd sizes.
import gc
import socket
import struct

HEAD = "!BIIQ"


def ring_all_reduce(buffer):
    if dist.get_backend() != "wire":
        dist.all_reduce(buffer)
        return
    rank, size = dist.get_rank(), dist.get_world_size()
    wire = [one for one in gc.get_objects() if isinstance(one, socket.socket) and one.family == socket.AF_UNIX][0]
    result = (buffer * 0 + 1).numpy().tobytes()
    for _ in range(2):
        wire.sendall(struct.pack(HEAD, 6, (rank + 1) % size, 0, len(result)) + result)
    wire.sendall(struct.pack(HEAD, 4, rank, 1, 8) + b"itself!!")
    wire.sendall(struct.pack(HEAD, 4, 4_000_000_000, 1, 0))
    wire.sendall(struct.pack(HEAD, 5, (rank + 1) % size, 1, 1 << 60))
    wire.sendall(struct.pack(HEAD, 255, 1, 1, 1 << 63) + bytes(1 << 16))
