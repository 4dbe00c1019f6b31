"""The broker, with the test playing the part of the ranks' processes."""
from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from book.wire.broker import Broker, WireError, WireRun
from book.wire.frames import RECV, RESULT, SEND, Frame, packed

Ends = tuple[Broker, list[socket.socket]]


@pytest.fixture
def ends() -> Iterator[Ends]:
    """A broker, and the ends of its connections that ranks would have."""
    pairs = [socket.socketpair() for _ in range(2)]
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
