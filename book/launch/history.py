"""L2: how often each line of this rank has called a collective, and run a model in DDP."""
from __future__ import annotations

import sys
from collections import defaultdict, deque
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from book.launch import around
from book.tap import LENGTH, Op, Subscriber
from book.tap.log import Place
from book.tap.place import chain
from book.waiting import history
from book.waiting.hang import Group
from book.waiting.history import Made


class _Key(NamedTuple):
    call: str
    owner: str
    in_backward: bool
    chain: tuple[Place, ...]


@dataclass
class _Calls:
    """The calls in one group."""
    total: int = 0
    lines: dict[_Key, _Line] = field(default_factory=dict)
    last: deque[_Line] = field(default_factory=lambda: deque(maxlen=LENGTH))
    op: Op | None = None


class _Line(Subscriber):
    """Counts the calls of one line; in which `batch` the last one was."""

    def __init__(self, key: _Key, calls: _Calls, history: History) -> None:
        self.key, self.count = key, 0
        # DDP's buckets are no calls that a reader knows: a line counts once for each batch.
        self._is_of_batch = bool(key.owner and key.in_backward)
        self._batch, self._calls, self._history = -1, calls, history

    def before(self, op: Op) -> None:
        calls = self._calls
        calls.total += 1
        calls.op = op
        calls.last.append(self)
        if not (self._is_of_batch and self._batch == self._history.batch):
            self.count += 1
            self._batch = self._history.batch

    def withdrawn(self, op: Op) -> None:
        if self._calls.op is op:
            self._calls.total -= 1
            self._calls.last.pop().count -= 1


@dataclass
class _Runs:
    """The forwards of one model."""
    num_batches: int = 0
    counts: dict[tuple[Place, ...], int] = field(default_factory=lambda: defaultdict(int))


_groups: dict[Any, _Calls] = defaultdict(_Calls)
_models: list[_Runs] = []  # also those that have been deleted
_run: WeakKeyDictionary[Any, _Runs] = WeakKeyDictionary()


class History(Subscriber):
    """Has this process count its calls."""

    def __init__(self) -> None:
        self.batch = 0

    def told_of(self, op: Op) -> Subscriber | None:
        if op.is_message or op.inside:
            return None
        calls = _groups[op.group]
        key = _Key(op.function or op.kind, op.owner or "", op.in_backward, op.form.lines)
        return calls.lines.setdefault(key, _Line(key, calls, self))

    def wrapped(self, model: Any) -> None:
        _models.append(_Runs())
        _run[model] = _models[-1]

    def forward(self, model: Any) -> None:
        runs = _run.get(model)
        if runs is None:
            return
        runs.counts[chain(sys._getframe(1))] += 1
        if model.training and sys.modules["torch"].is_grad_enabled():
            runs.num_batches += 1
            self.batch += 1


def calls() -> dict[Group, history.History]:
    """The calls in each group."""
    return {Group(group.name, tuple(sorted(group.ranks))): _told(calls) for group, calls in list(_groups.items())}


def _told(calls: _Calls) -> history.History:
    made = {each: Made(around.line(key.chain), key.call, key.owner, key.in_backward)
            for key, each in list(calls.lines.items())}
    counts: dict[Made, int] = defaultdict(int)
    for each in made:
        counts[made[each]] += each.count
    return history.History(calls.total, dict(counts), tuple(made[each] for each in list(calls.last) if each in made),
                           _is_done(calls.op))


def _is_done(op: Op | None) -> bool | None:
    if op is None or (op.owner and op.in_backward and not op.waited):
        return None
    return op.waited


def models() -> list[history.Model]:
    """The models in DDP, in the order in which they were wrapped."""
    return [history.Model(runs.num_batches, {around.line(lines): count for lines, count in list(runs.counts.items())})
            for runs in _models]
