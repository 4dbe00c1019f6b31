"""Ranks that can only send and receive: the broker forwards, counts, and says what is wrong; no collective is there."""
from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from socket import AF_UNIX, socket

import numpy as np
import pytest

from book.wire.broker import Broker, WireError
from book.wire.frames import DONE, RECV, SEND, Frame, Unpacker, packed

PROGRAM = '''
import torch
import torch.distributed as dist


def others():
    return dist.get_rank(), dist.get_world_size()


def shift(buffer):
    rank, size = others()
    came = torch.empty_like(buffer)
    transfers = [dist.P2POp(dist.isend, buffer, (rank + 1) % size), dist.P2POp(dist.irecv, came, (rank - 1) % size)]
    for request in dist.batch_isend_irecv(transfers):
        request.wait()
    buffer.copy_(came)


def shift_with_isend(buffer):
    rank, size = others()
    came = torch.zeros(len(buffer), dtype=torch.float32)
    request = dist.isend(buffer.float(), (rank + 1) % size)
    dist.recv(came, (rank - 1) % size)
    request.wait()
    assert request.is_completed()
    buffer.copy_(came)


def all_send_first(buffer):
    rank, size = others()
    dist.send(buffer, (rank + 1) % size)
    dist.recv(buffer, (rank - 1) % size)


def sizes_differ(buffer):
    rank, size = others()
    dist.send(buffer, 1) if rank == 0 else dist.recv(buffer[:2], 0) if rank == 1 else None


def never_waited(buffer):
    if dist.get_rank() == 0:
        dist.isend(buffer, 1)


def refused(buffer):
    calls = [lambda: dist.all_reduce(buffer), lambda: dist.broadcast(buffer, 0), lambda: dist.barrier(),
             lambda: dist.all_gather([buffer] * 3, buffer), lambda: dist.reduce_scatter_tensor(buffer[:1], buffer[:3]),
             lambda: dist.recv(buffer)]
    for number, call in enumerate(calls):
        try:
            call()
        except RuntimeError as error:
            told = "can send and receive, and nothing else", "No backend type associated"  # the second is torch's own
            assert any(words in str(error) for words in told), (number, error)
        else:
            raise AssertionError(f"call {number} was not refused")
    buffer.fill_(1)


def leaves(buffer):
    raise SystemExit(0)
'''


@pytest.fixture
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    """Three ranks that have run PROGRAM."""
    folder = tmp_path_factory.mktemp("w")
    connections, processes = [], []
    for rank in range(3):
        with socket(AF_UNIX) as listener:
            listener.bind(str(folder / str(rank)))
            listener.listen()
            command = [sys.executable, "-m", "book.wire.rank", str(folder / str(rank))]
            processes.append(subprocess.Popen(command, stderr=subprocess.DEVNULL))
            connections.append(listener.accept()[0])
    broker = Broker(connections)
    broker.start([PROGRAM], timeout_s=120)
    yield broker
    for connection, process in zip(connections, processes):
        connection.close()
        process.wait(timeout=60)  # a rank whose broker is gone ends by itself


def ask(broker: Broker, call: str, length: int = 4):
    inputs = [np.arange(length) + 10.0 * rank for rank in range(3)]
    tasks = [{"rank": rank, "world_size": 3, "call": call} for rank in range(3)]
    run = broker.run(tasks, [x.tobytes() for x in inputs], timeout_s=60, hang_s=5)
    return inputs, [np.frombuffer(run.results[rank]) for rank in range(3)], run.messages


def test_messages_arrive_and_are_counted(broker: Broker) -> None:
    for call, element_bytes in (("shift(buffer)", 8), ("shift_with_isend(buffer)", 4), ("shift(buffer)", 8)):
        inputs, results, messages = ask(broker, call)
        assert [r.tolist() for r in results] == [inputs[rank - 1].tolist() for rank in range(3)]
        assert sorted(messages) == [(rank, (rank + 1) % 3, 4 * element_bytes) for rank in range(3)]


def test_there_are_no_collectives(broker: Broker) -> None:
    _, results, messages = ask(broker, "refused(buffer)")
    assert not messages and [r.tolist() for r in results] == [[1.0] * 4] * 3


@pytest.mark.parametrize("call, said", [
    ("all_send_first(buffer)", "wait for one another: .*rank 1 sends to rank 2"),
    ("sizes_differ(buffer)", "rank 0 sends 32 bytes where rank 1 receives 16"),
    ("never_waited(buffer)", "wait for every request"),
    ("leaves(buffer)", "SystemExit"),
    ("nothing_of_the_kind(buffer)", "NameError.*nothing_of_the_kind"),
    ("dist.send(buffer, 7)", "failed|can't be")])
def test_what_goes_wrong_is_told(broker: Broker, call: str, said: str) -> None:
    with pytest.raises(WireError, match=said):
        ask(broker, call)


def test_frames_come_out_as_they_went_in_however_they_are_cut() -> None:
    frames = [Frame(SEND, 2, 7, b"abc"), Frame(RECV, 1, 8, expects=5), Frame(DONE, 0, 7, b"")]
    data = b"".join(map(packed, frames))
    for cut in range(1, len(data)):
        unpacker = Unpacker()
        got = [frame for start in range(0, len(data), cut) for frame in unpacker.feed(data[start:start + cut])]
        assert [(f.kind, f.peer, f.request, f.payload) for f in got] == [f[:4] for f in frames]
        assert got[1].expects == 5
    with pytest.raises(ValueError, match="no message"):
        Unpacker().feed(b"\xff" * 40)
