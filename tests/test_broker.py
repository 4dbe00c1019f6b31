"""The broker, with the test playing the part of the ranks' processes."""
from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from book.wire.broker import Broker, WireError, WireRun
from book.wire.frames import ANY, RECV, RESULT, SEND, Frame, Unpacker, packed, receive

Ends = tuple[Broker, list[socket.socket]]


@pytest.fixture
def ends(request: pytest.FixtureRequest) -> Iterator[Ends]:
    """A broker, and the ends of its connections that ranks would have."""
    pairs = [socket.socketpair() for _ in range(getattr(request, "param", 2))]
    yield Broker([own for own, _ in pairs]), [other for _, other in pairs]
    for end in (end for pair in pairs for end in pair):
        end.close()


def run(broker: Broker) -> WireRun:
    return broker.run([{}, {}], [b"", b""], timeout_s=20, hang_s=10)


@pytest.mark.parametrize("left", [Frame(SEND, 1, 1, b"data"), Frame(RECV, 1, 1, expects=4)])
def test_a_rank_that_returns_with_half_a_transfer_is_reported(ends: Ends, left: Frame) -> None:
    broker, (first, second) = ends
    first.sendall(packed(left) + packed(Frame(RESULT, payload=b"0")))
    second.sendall(packed(Frame(RESULT, payload=b"1")))
    with pytest.raises(WireError, match="a rank returned before its transfers were done"):
        run(broker)


def test_completed_transfers_are_recorded_and_results_come_back(ends: Ends) -> None:
    broker, (first, second) = ends
    first.sendall(packed(Frame(SEND, 1, 1, b"data")) + packed(Frame(RESULT, payload=b"0")))
    second.sendall(packed(Frame(RECV, 0, 1, expects=4)) + packed(Frame(RESULT, payload=b"1")))
    found = run(broker)
    assert found.messages == [(0, 1, 4)] and found.results == {0: b"0", 1: b"1"}


@contextmanager
def serving(ends: Ends) -> Iterator[WireRun]:
    """A broker that serves three ranks meanwhile; at the end all ranks return. Gives what it has recorded so far."""
    broker, ranks = ends
    server = threading.Thread(target=broker.run, args=([{}] * 3, [b""] * 3, 20, 10))
    server.start()
    try:
        while not hasattr(broker, "done"):
            time.sleep(0.01)
        yield broker.done
    finally:
        for rank in ranks:
            rank.sendall(packed(Frame(RESULT)))
        server.join()


def answers_at(end: socket.socket, count: int) -> list[tuple[int, int, bytes]]:
    """The (request, sender, message) of the broker's answers to a rank, in order; the rank's task comes before them."""
    unpacker, found = Unpacker(), []
    end.settimeout(10)
    while len(found) < 1 + count:
        found += receive(end, unpacker)
    return [(frame.request, frame.peer, frame.payload) for frame in found[1:]]


@pytest.mark.parametrize("ends", [3], indirect=True)
def test_a_receive_from_any_rank_yields_to_earlier_receives_that_name_the_sender(ends: Ends) -> None:
    _, (zero, one, two) = ends
    with serving(ends) as run:
        for number, peer in enumerate((2, ANY, ANY)):
            zero.sendall(packed(Frame(RECV, peer, number, expects=1)))
        one.sendall(packed(Frame(SEND, 0, 1, b"a")) + packed(Frame(SEND, 0, 2, b"b")))
        assert answers_at(zero, 2) == [(1, 1, b"a"), (2, 1, b"b")]
        two.sendall(packed(Frame(SEND, 0, 1, b"c")))
    assert run.messages == [(1, 0, 1), (1, 0, 1), (2, 0, 1)]


@pytest.mark.parametrize("ends", [3], indirect=True)
def test_a_receive_from_any_rank_takes_the_earliest_waiting_message(ends: Ends) -> None:
    broker, (zero, one, two) = ends
    with serving(ends):
        for rank, number, message in ((two, 2, b"c"), (one, 1, b"a")):
            rank.sendall(packed(Frame(SEND, 0, 1, message)))
            while not broker.sends.get((number, 0)):
                time.sleep(0.01)
        zero.sendall(packed(Frame(RECV, ANY, 1, expects=1)) + packed(Frame(RECV, ANY, 2, expects=1)))
        assert answers_at(zero, 2) == [(1, 2, b"c"), (2, 1, b"a")]
