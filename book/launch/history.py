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
from book.waiting.history import SiteCall


class _Key(NamedTuple):
    call: str
    owner: str
    in_backward: bool
    chain: tuple[Place, ...]


@dataclass(slots=True, eq=False)
class _Line:
    """A line that calls: how often it has, and the batch at its last call."""
    key: _Key
    count: int = 0
    batch: int = -1


@dataclass
class _Calls:
    """The calls in one group."""
    total: int = 0
    lines: dict[tuple[Any, ...], _Line] = field(default_factory=dict)  # by what a _Key has
    last: deque[_Line] = field(default_factory=lambda: deque(maxlen=LENGTH))
    op: Op | None = None


@dataclass
class _Runs:
    """The forwards of one model in which DDP may call other ranks."""
    num_batches: int = 0
    counts: dict[tuple[Place, ...], int] = field(default_factory=lambda: defaultdict(int))


_groups: dict[Any, _Calls] = defaultdict(_Calls)
_models: list[_Runs] = []  # also those that have been deleted
_run: WeakKeyDictionary[Any, _Runs] = WeakKeyDictionary()


class CallCounter(Subscriber):
    """Has this process count its calls."""

    def __init__(self) -> None:
        self._batch = 0

    def before(self, op: Op) -> None:
        if op.is_message or op.inside:
            return
        calls = _groups[op.group]
        key = op.function or op.kind, op.owner or "", op.in_backward, op.lines
        line = calls.lines.get(key)
        if line is None:
            line = calls.lines[key] = _Line(_Key(*key))
        calls.total += 1
        calls.op = op
        calls.last.append(line)
        # DDP's buckets are no calls that a reader knows: a line counts once for each batch.
        if not (op.owner and op.in_backward and line.batch == self._batch):
            line.count += 1
            line.batch = self._batch

    def withdrawn(self, op: Op) -> None:
        calls = _groups.get(op.group)
        if calls and calls.op is op:
            calls.total -= 1
            calls.last.pop().count -= 1

    def wrapped(self, model: Any) -> None:
        _models.append(_Runs())
        _run[model] = _models[-1]

    def forward(self, model: Any) -> None:
        runs, trains = _run.get(model), sys.modules["torch"].is_grad_enabled()
        if runs is None or (not trains and not model.will_sync_module_buffers()):
            return  # such a forward, as of an evaluation on one rank, needs no other rank
        runs.counts[chain(sys._getframe(1))] += 1
        if model.training and trains:
            runs.num_batches += 1
            self._batch += 1


def calls() -> dict[Group, history.History]:
    """The calls in each group."""
    return {group.shared: _told(calls) for group, calls in list(_groups.items())}


def _told(calls: _Calls) -> history.History:
    lines = list(calls.lines.values())
    made = {line: SiteCall(around.line(line.key.chain), line.key.call, line.key.owner, line.key.in_backward)
            for line in lines}
    counts: dict[SiteCall, int] = defaultdict(int)
    for line in lines:
        counts[made[line]] += line.count
    return history.History(calls.total, dict(counts), tuple(made[line] for line in list(calls.last) if line in made),
                           _is_done(calls.op))


def _is_done(op: Op | None) -> bool | None:
    if op is None or (op.owner and op.in_backward and not op.waited):
        return None
    return op.waited


def models() -> list[history.Model]:
    """The models in DDP, in the order in which they were wrapped."""
    return [history.Model(runs.num_batches, {around.line(lines): count for lines, count in list(runs.counts.items())})
            for runs in _models]
