"""L2: what this process notes of its copies of models: their parameters at some moments, and what may part them.

A copy is noted while DDP wraps it: before and after steps of optimizers, by the beginnings of its parameters; after
steps 1, 2, 4, 8, ... (or every k-th) by all of them. Once that has taken over 1 % of the run's time it is done less
often. Buffers are not compared: in a right program, those of batch norm differ until rank 0's are broadcast again.
"""
from __future__ import annotations

import itertools
import sys
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from book.audit import digests, reading
from book.audit.digests import Digest, Heads
from book.audit.notes import PlaceOf, Replica, Value, named
from book.audit.quiet import Time, quietly
from book.tap.log import Place, Subscriber
from book.tap.place import caller, is_learners, outwards, variables

MOST = 64  # models, and inputs of a model's first forwards
MOST_STATES = 4096
FIRST = 4  # forwards whose inputs and random state are digested

Held = tuple[Digest | None, torch.Tensor, bool, float]  # of a parameter: as in Value


class ModelCopy:
    """One copy of a model, while DDP wraps it."""

    by = "DDP"

    def __init__(self, model: Any, ranks: tuple[int, ...], number: int, place: Place | None, time: Time,
                 every: int | None) -> None:
        self.model, self.ranks, self.number, self.place = weakref.ref(model), ranks, number, place
        self.ignored: set[str] = set(getattr(model, "parameters_to_ignore", ()))
        self.shard = 0
        self.wrapped = {name: (weakref.ref(each), each.requires_grad) for name, each in self._named()}
        self.at_first = Heads(each for _, each in self._named()).digest()
        self.hook = ""
        self.finds_unused = bool(getattr(model, "find_unused_parameters", True) or model.static_graph)
        self.trained: list[tuple[str, Any]] = []
        self.added: tuple[str, ...] = ()
        self.unfrozen: tuple[str, ...] = ()
        self.steps = self.forwards = self._forwards_until = 0
        self.synced = True  # by the last forward
        self.states: dict[int, int | None] = {}
        self.parameters: dict[int, dict[str, Digest]] = {}
        self.gradients: dict[int, dict[str, Digest]] = {}
        self.settings: dict[int, dict[str, Any]] = {}
        self.end: dict[str, Held] | None = None
        self.loaded: list[tuple[int, Place | None]] = []
        self.past: Place | None = None
        self.unaveraged: tuple[int, Place | None] | None = None
        self.under_no_sync = False
        self.stepped: Place | None = None
        self.in_backward = False
        self.fed: list[tuple[Digest, int | None, Place | None]] = []
        self.masks: list[int] = []
        self._time, self._every, self._stride = time, every, 1
        self._heads = Heads([])
        self._hooks: list[Any] = []

    def _named(self, model: Any = None) -> Iterator[tuple[str, Any]]:
        model = model or self.model()
        for name, parameter in model.module.named_parameters() if model is not None else ():
            if name not in self.ignored:
                yield name, parameter

    def holds(self, parameters: set[int]) -> bool:
        """Whether some of these are its own."""
        return any(id(parameter) in parameters for _, parameter in self._named())

    def _refresh(self, model: Any = None) -> None:
        """See which parameters it has: some may be new, or need a gradient only now."""
        self.trained = [(name, each) for name, each in self._named(model) if each.requires_grad]
        self._heads = Heads(each for _, each in self.trained)
        known = {name: first for name, (first, _) in self.wrapped.items()}
        self.added = tuple(name for name, each in self.trained if name not in known or known[name]() is not each)
        self.unfrozen = tuple(name for name, _ in self.trained if name not in self.added and not self.wrapped[name][1])

    def _is_marked(self, step: int) -> bool:
        return step % self._every == 0 if self._every else step & (step - 1) == 0 and not self._time.is_spent()

    def _is_seen(self, step: int) -> bool:
        """Whether the beginnings are looked at in this step: in fewer steps where time or memory is short."""
        if step % self._stride:
            return False
        if (self._time.is_spent() and not self._every) or len(self.states) > MOST_STATES:
            self._stride *= 2
            if len(self.states) > MOST_STATES:
                self.states = {at: state for at, state in self.states.items() if (at + 1) // 2 % self._stride == 0}
        return step % self._stride == 0

    def next_step(self, last: int) -> int:
        """The number of an optimizer's next step: that of another optimizer's if no forward came between."""
        return self.steps + (last == self.steps or self._forwards_until != self.forwards)

    def before(self, step: int) -> None:
        """Note it before a step of an optimizer."""
        is_marked = self._is_marked(step)
        if is_marked or not self.trained:
            self._refresh()
        if step == 1 and not self.parameters:
            self.parameters[1] = {name: digests.of(each) for name, each in self._named()}
        if self._is_seen(step):
            self.states.setdefault(2 * step - 1, self._heads.digest())
        if is_marked:
            self.gradients[step] = {name: digests.of(each.grad, digests.HEAD_BYTES)
                                    for name, each in self.trained if each.grad is not None}
            self.stepped = caller(sys._getframe())[1]
            self.in_backward = torch._C._current_graph_task_id() != -1
            hooks = getattr(self.model(), "_comm_hooks", ())
            self.hook = next((getattr(hook, "__name__", "its hook") for hook, _ in hooks), "")

    def after(self, step: int, settings: dict[str, Any], forwards: int) -> None:
        """Note it after a step, before which the optimizer had seen so many of its forwards."""
        self.steps, self._forwards_until = step, self.forwards
        if self._is_seen(step):
            self.states[2 * step] = self._heads.digest()
        if step & (step - 1) == 0 or settings != self.settings.get(max(self.settings, default=0)):
            if len(self.settings) > MOST:
                self.settings.popitem()
            self.settings[step] = settings
        if self._is_marked(step):
            self.parameters[2 * step] = {name: digests.of(each) for name, each in self.trained}
        if self.unaveraged is None and (forwards == self.forwards or not self.synced):
            self._look_for_unaveraged(step, forwards)

    def _look_for_unaveraged(self, step: int, forwards: int) -> None:
        """Note a step with gradients that DDP has not averaged."""
        if any(each.grad is not None for _, each in self.trained):
            self.unaveraged, self.under_no_sync = (step, caller(sys._getframe())[1]), forwards != self.forwards
            if not self.under_no_sync:
                self._look_for_forwards()

    def _look_for_forwards(self) -> None:
        """Find the line of the next forward that goes past DDP."""
        model = self.model()
        for module in itertools.islice(model.module.modules() if model is not None else (), MOST):
            self._hooks.append(module.register_forward_pre_hook(_Passing(self)))

    def _passes(self, module: Any, args: Any) -> None:
        if torch.is_grad_enabled() and DistributedDataParallel._active_ddp_module is None:
            self.past = _line_outside_modules()
            self._look_no_more()

    def _look_no_more(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def forward(self, model: Any, inputs: Any) -> None:
        """Note that it makes a forward whose loss may go backward."""
        self.forwards += 1
        self.synced = getattr(model, "require_backward_grad_sync", True)
        read = reading.just_read(model.training)
        if self.forwards > FIRST or not model.training:
            return
        self.fed.append((digests.of_batch(inputs), *read))
        if any(isinstance(each, torch.nn.modules.dropout._DropoutNd) and each.p > 0 and each.training
               for each in model.modules()):
            self.masks.append(digests.of_random_state(next(model.parameters()).device))

    def finish(self, model: Any) -> None:
        """Note what it holds at the end."""
        self._look_no_more()
        self._refresh(model)
        self.end = held(self._named(model))
        self.trained, self._heads = [], Heads([])

    def note(self, place_of: PlaceOf, reached: bool) -> Replica:
        """All of it as plain data; without what GPUs have not `reached`."""
        def plain(found: dict[Any, Any]) -> dict[Any, int]:
            return {key: int(each) for key, each in found.items() if is_known(each)}

        def is_known(digest: Digest | None) -> bool:
            return isinstance(digest, int) or (digest is not None and reached)

        def line(place: Place | None) -> str:
            return named(place, place_of)

        fed = ((int(each), indices, line(place)) for each, indices, place in self.fed if is_known(each))
        return Replica(
            self.ranks, self.number, line(self.place), self.at_first, self.hook, self.finds_unused, self.steps,
            self.forwards, plain(self.states), {at: plain(each) for at, each in self.parameters.items()},
            {at: plain(each) for at, each in self.gradients.items()}, dict(self.settings),
            plain_values(self.end) if self.end is not None and reached else None, self.added, self.unfrozen,
            tuple((at, line(place)) for at, place in self.loaded), line(self.past),
            (self.unaveraged[0], line(self.unaveraged[1])) if self.unaveraged else None, self.under_no_sync,
            line(self.stepped), self.in_backward, tuple(fed), tuple(self.masks), self.by, self.shard)


def held(parameters: Iterable[tuple[str, Any]]) -> dict[str, Held]:
    """What parameters hold now."""
    return {name: (digests.of(each), digests.sample(each), each.numel() <= digests.SAMPLES, digests.rounding(each))
            for name, each in parameters}


def plain_values(found: dict[str, Held]) -> dict[str, Value]:
    """The same as plain data, of those that have a digest."""
    return {name: Value(int(digest), tuple(sample.tolist()), is_whole, rounding)
            for name, (digest, sample, is_whole, rounding) in found.items() if digest is not None}


def _line_outside_modules() -> Place | None:
    """The innermost line of the learner's that is in no method of a module."""
    return next(((frame.f_code.co_filename, frame.f_lineno or 0) for frame in outwards(sys._getframe(1)) if is_learners(
        frame.f_code.co_filename) and not isinstance(variables(frame, ["self"])[0], torch.nn.Module)), None)


class _Passing:
    """A hook that can be pickled and copied with its module, and does nothing there."""

    def __init__(self, copy: Any = None) -> None:
        self._copy = copy

    def __reduce__(self) -> Any:
        return _Passing, ()

    def __call__(self, module: Any, args: Any) -> None:
        if self._copy is not None:
            self._copy._passes(module, args)


class Stepping:
    """An optimizer: the copies whose parameters it holds, its last step with each, and their forwards until then."""

    def __init__(self) -> None:
        self.copies: list[ModelCopy] | None = None
        self.steps: Counter[ModelCopy] = Counter()
        self.forwards: Counter[ModelCopy] = Counter()


class ReplicaNotes(Subscriber):
    """Has this process note its copies of models."""

    def __init__(self, every: int | None) -> None:
        self._every, self._time = every, Time()
        self._numbers: Counter[tuple[int, ...]] = Counter()
        self._all: list[ModelCopy] = []
        self._living: weakref.WeakKeyDictionary[Any, ModelCopy] = weakref.WeakKeyDictionary()
        self._stepping: weakref.WeakKeyDictionary[Any, Stepping] = weakref.WeakKeyDictionary()
        self._loads: weakref.WeakKeyDictionary[Any, Place | None] = weakref.WeakKeyDictionary()
        self._ignored: weakref.WeakSet[Any] = weakref.WeakSet()

    @quietly
    def wrapped(self, model: Any) -> None:
        ranks = tuple(torch.distributed.get_process_group_ranks(model.process_group))
        self._numbers[ranks] += 1
        if len(ranks) > 1 and len(self._all) < MOST:
            self._add(model, ModelCopy(model, ranks, self._numbers[ranks], caller(sys._getframe())[1], self._time,
                                       self._every))

    def _add(self, model: Any, copy: ModelCopy) -> None:
        self._all.append(copy)
        self._living[model] = copy
        self._forget_who_steps()

    @quietly
    def sharded(self, state: Any, result: Any, model: Any, *inputs: Any) -> None:
        """A model in FSDP is about to run forward, or a part of one."""
        from book.audit import sharded
        if not state._is_root or not torch.is_grad_enabled() or model in self._ignored:
            return
        with self._time:
            copy = self._living.get(model)
            if copy is None:
                ranks = sharded.ranks_of(state)
                self._numbers[ranks] += 1
                copy = sharded.Shard(state, model, self._numbers[ranks], self._time, self._every)
                copy.loaded += [(1, self._loads[model])] if model in self._loads else []
                self._add(model, copy)
                sharded.when_gone(model, copy)
            copy.forward(model, inputs)

    @quietly
    def unwrapped(self, model: Any) -> None:
        copy = self._living.pop(model, None)
        if copy is not None and not sys.is_finalizing():
            self._forget_who_steps()
            self._finish(copy, model)

    def ignore(self, model: Any) -> None:
        """Note nothing more of a model, and say nothing of it."""
        self._ignored.add(model)
        copy = self._living.pop(model, None)
        if copy is not None:
            self._forget_who_steps()
            self._all.remove(copy)

    def _finish(self, copy: ModelCopy, model: Any) -> None:
        if _averages_by_itself(model):
            self._all.remove(copy)
        else:
            copy.finish(model)

    def _forget_who_steps(self) -> None:
        for stepping in self._stepping.values():
            stepping.copies = None

    @quietly
    def forward(self, model: Any, inputs: Any) -> None:
        """DDP makes a forward."""
        copy = self._living.get(model)
        if copy is not None and torch.is_grad_enabled():
            with self._time:
                copy.forward(model, inputs)

    @quietly
    def before_step(self, optimizer: Any, args: Any, options: Any) -> None:
        """An optimizer is about to make a step."""
        if not self._living:
            return
        with self._time:
            own = self._stepping.setdefault(optimizer, Stepping())
            if own.copies is None:
                own.copies = self._held(optimizer)
            for copy in own.copies:
                own.steps[copy] = copy.next_step(own.steps[copy])
                copy.before(own.steps[copy])

    @quietly
    def after_step(self, optimizer: Any, args: Any, options: Any) -> None:
        """An optimizer has made a step."""
        own = self._stepping.get(optimizer)
        if own is None or not own.copies:
            return
        with self._time:
            settings = {f"{name} of group {number}" if number else name: each
                        for number, group in enumerate(optimizer.param_groups) for name, each in group.items()
                        if isinstance(each, (int, float, tuple)) or each is None}
            for copy in own.copies:
                copy.after(own.steps[copy], settings, own.forwards[copy])
                own.forwards[copy] = copy.forwards

    def _held(self, optimizer: Any) -> list[ModelCopy]:
        parameters = {id(each) for group in optimizer.param_groups for each in group["params"]}
        return [copy for copy in self._living.values() if copy.holds(parameters)]

    @quietly
    def loaded(self, into: Any) -> None:
        """A state has been loaded into a module or an optimizer."""
        groups = getattr(into, "param_groups", None)
        found = into.parameters() if groups is None else (each for group in groups for each in group["params"])
        parameters = {id(each) for each in found}
        if isinstance(into, torch.nn.Module):
            self._loads[into] = caller(sys._getframe())[1]
        for copy in self._living.values():
            if copy.holds(parameters):
                load = 2 * copy.steps + (1 if groups is None else 2), caller(sys._getframe())[1]
                copy.loaded += [load] if copy.loaded[-1:] != [load] else []

    def replica(self, model: Any, place_of: PlaceOf) -> Replica | None:
        """What is known of the copy in `model` now; None if it is not one of those that are noted."""
        copy = self._living.get(model)
        if copy is None:
            return None
        copy.finish(model)
        noted = copy.note(place_of, digests.reached())
        copy.end = None
        return noted

    def notes(self, place_of: PlaceOf, is_over: bool) -> tuple[Replica, ...]:
        """What is known of all copies; those that are still there are at their end if the run `is_over`."""
        for model, copy in list(self._living.items()) if is_over else ():
            self._finish(copy, model)
        reached = digests.reached()
        return tuple(copy.note(place_of, reached) for copy in self._all)


def _averages_by_itself(model: Any) -> bool:
    """Whether replicas differ on purpose most of the time."""
    return any(type(state).__name__ == "PostLocalSGDState" for _, state in getattr(model, "_comm_hooks", ()))
