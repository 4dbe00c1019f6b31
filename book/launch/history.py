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


@dataclass
class _Calls:
    """The calls in one group."""
    total: int = 0
    counts: dict[_Key, int] = field(default_factory=dict)
    batches: dict[_Key, int] = field(default_factory=dict)  # the one at the last call
    last: deque[_Key] = field(default_factory=lambda: deque(maxlen=LENGTH))
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
        key = _Key(op.function or op.kind, op.owner or "", op.in_backward, chain(sys._getframe(1)))
        calls.total += 1
        calls.op = op
        calls.last.append(key)
        # DDP's buckets are no calls that a reader knows: a line counts once for each batch.
        if not (key.owner and key.in_backward and calls.batches.get(key) == self._batch):
            calls.counts[key] = calls.counts.get(key, 0) + 1
            calls.batches[key] = self._batch

    def withdrawn(self, op: Op) -> None:
        calls = _groups.get(op.group)
        if calls and calls.op is op:
            calls.total -= 1
            key = calls.last.pop()
            calls.counts[key] -= 1

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
    made = {key: SiteCall(around.line(key.chain), key.call, key.owner, key.in_backward) for key in list(calls.counts)}
    counts: dict[SiteCall, int] = defaultdict(int)
    for key, count in list(calls.counts.items()):
        counts[made[key]] += count
    return history.History(calls.total, dict(counts), tuple(made[key] for key in list(calls.last) if key in made),
                           _is_done(calls.op))


def _is_done(op: Op | None) -> bool | None:
    if op is None or (op.owner and op.in_backward and not op.waited):
        return None
    return op.waited


def models() -> list[history.Model]:
    """The models in DDP, in the order in which they were wrapped."""
    return [history.Model(runs.num_batches, {around.line(lines): count for lines, count in list(runs.counts.items())})
            for runs in _models]
