"""Two calls at the same time: what two threads do to each other is found each time, and locks of any kind are right."""
import threading
from operator import methodcaller

import pytest

from book.checks.interleaved import as_if_in_turn
from book.checks.verdict import CheckFailed


class Counter:
    """Counts what it is given; each class below has its own idea of how to keep two calls apart."""

    def __init__(self):
        self.lock, self.own = threading.RLock(), threading.Lock()
        self.count, self.log = 0, []

    def add(self, number):
        self.count += number
        self.log.append(self.count)


class Locked(Counter):
    def add(self, number):
        with self.lock:
            super().add(number)


class LockedTwice(Counter):
    def add(self, number):
        with self.lock, self.lock:
            super().add(number)


class OwnLock(Counter):
    def add(self, number):
        with self.own:
            super().add(number)


class LockedInParts(Counter):
    def add(self, number):
        with self.lock:
            before = self.count
        with self.lock:
            self.count = before + number


class TwoLinesApart(Counter):
    """Goes wrong only if each call stops once: both must have appended before either looks."""

    def add(self, number):
        self.log.append(number)
        if len(self.log) == 2:
            self.count += sum(self.log)
            self.log.clear()


class Raises(Counter):
    def add(self, number):
        if self.log:
            del self.log[0]
        else:
            self.log.append(number)
            self.log.remove(number)
        self.count += 0


class Crosswise(Counter):
    """Each call takes both locks, in an order of its own."""

    def add(self, number):
        first, second = (self.lock, self.own) if number == 1 else (self.own, self.lock)
        with first, second:
            self.count += number


def count(server, results):
    return [server.count]


def meet(server):
    as_if_in_turn(server, [methodcaller("add", 1), methodcaller("add", 2)], count)


@pytest.mark.parametrize("server", [Locked, LockedTwice, OwnLock])
def test_calls_that_do_not_interfere_pass(server):
    meet(server)


@pytest.mark.parametrize("server", [Counter, LockedInParts, TwoLinesApart])
def test_calls_that_interfere_are_reported(server):
    with pytest.raises(CheckFailed, match="what they leave one after the other, in either order. Hold self.lock"):
        meet(server)


def test_the_lines_where_both_stand_are_named():
    with pytest.raises(CheckFailed) as caught:
        meet(LockedInParts)
    at, comes = str(caught.value).split(", the other ")
    assert "when one is at test_checks_interleaved.py line" in at
    assert comes.startswith(("comes to test_checks_interleaved.py line", "is served"))


def test_a_call_that_raises_is_reported():
    with pytest.raises(CheckFailed, match=r"one of them raises (ValueError|IndexError): "):
        meet(Raises)


def test_a_missing_answer_is_reported():
    def answers(server, results):
        return [None if server.count < 3 else 1, server.count]

    with pytest.raises(CheckFailed, match="one of them gets no answer"):
        as_if_in_turn(Counter, [methodcaller("add", 1), methodcaller("add", 2)], answers)


def test_calls_that_wait_for_each_other_are_reported(monkeypatch):
    monkeypatch.setattr("book.checks.interleaved.LIMIT_S", 0.3)
    with pytest.raises(CheckFailed, match="two calls at the same time wait for each other"):
        meet(Crosswise)


def test_a_server_left_broken_for_the_next_call_is_reported():
    def spoilt(server, results):
        if server.count < 3:
            raise KeyError(3)
        return [server.count]

    with pytest.raises(CheckFailed, match="the next push raises KeyError: 3"):
        as_if_in_turn(Counter, [methodcaller("add", 1), methodcaller("add", 2)], spoilt)
