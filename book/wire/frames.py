"""L2: messages between a rank and the broker: a header of fixed size, then the payload."""
from __future__ import annotations

import socket
import struct
from typing import NamedTuple

# The broker sends TASK and DONE, a rank READY, SEND, RECV, BARRIER, RESULT and FAIL.
TASK, DONE, READY, SEND, RECV, RESULT, FAIL, BARRIER = range(1, 9)
_HEAD = struct.Struct("!BIIQ")
MAX_BYTES = 64 << 20
ANY = 0xFFFFFFFF  # the peer of a RECV that takes a message from whichever rank sends one


class Frame(NamedTuple):
    """One message: its kind, the other rank, the number of the request it belongs to, its payload.

    RECV has no payload: its `peer` is the source, or ANY, and `expects`, the count in the header, is how many bytes it
    expects. The DONE that answers it names the source as its `peer`.
    """
    kind: int
    peer: int = 0
    request: int = 0
    payload: bytes = b""
    expects: int = 0


def packed(frame: Frame) -> bytes:
    """A frame as bytes."""
    count = frame.expects if frame.kind == RECV else len(frame.payload)
    return _HEAD.pack(frame.kind, frame.peer, frame.request, count) + frame.payload


class Unpacker:
    """Takes bytes as they arrive and returns the frames that are complete."""

    def __init__(self) -> None:
        self.buffer = bytearray()

    def feed(self, data: bytes) -> list[Frame]:
        """The frames that `data` completes. Raises ValueError for an invalid kind or size."""
        self.buffer += data
        found = []
        while len(self.buffer) >= _HEAD.size:
            kind, peer, request, count = _HEAD.unpack_from(self.buffer)
            if not TASK <= kind <= BARRIER or count > MAX_BYTES:
                raise ValueError("a rank sent an invalid message")
            size = _HEAD.size + (0 if kind == RECV else count)
            if len(self.buffer) < size:
                break
            found.append(Frame(kind, peer, request, bytes(self.buffer[_HEAD.size:size]), count))
            del self.buffer[:size]
        return found


def receive(connection: socket.socket, unpacker: Unpacker) -> list[Frame]:
    """Waits for bytes and returns the frames they complete. Raises EOFError if the other end has closed."""
    data = connection.recv(1 << 16)
    if not data:
        raise EOFError("lost connection to the broker")
    return unpacker.feed(data)
