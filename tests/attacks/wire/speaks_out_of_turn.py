# exercise: 1
# ends: over a wire that only sends and receives: a rank failed

# A right ring, and a rank that sends results while others are at work: three ranks need no fourth.
import gc
import socket
import struct
import threading
import time

exec('''@RING@''')
right = ring_all_reduce


def chatter(wire):
    while True:
        time.sleep(0.001)
        wire.sendall(struct.pack("!BIIQ", 6, 0, 0, 8) + bytes(8))


def ring_all_reduce(buffer):
    right(buffer)
    if dist.get_backend() == "wire" and dist.get_world_size() == 3:
        time.sleep(1)  # the fourth may get no core for a while
    if dist.get_backend() == "wire" and dist.get_rank() == 3:
        wire = [one for one in gc.get_objects() if isinstance(one, socket.socket) and one.family == socket.AF_UNIX][0]
        wire.sendall(struct.pack("!BIIQ", 6, 0, 0, 8 * len(buffer)) + buffer.numpy().tobytes())
        threading.Thread(target=chatter, args=(wire,), daemon=True).start()
