"""L2: models in FSDP, by `fully_shard`: each rank holds a shard; on a mesh of two axes, several hold copies of one.

Shards differ by design, so only copies of one shard are compared, parameter by parameter. On any mesh it is seen
whether the optimizer's settings and its number of steps are the same on all ranks, and, as with DDP, whether ranks read
the same data. FSDP's older class, `FullyShardedDataParallel`, is not looked at.
"""
from __future__ import annotations

import sys
import weakref
from collections.abc import Iterator
from typing import Any
from weakref import WeakKeyDictionary

from book.audit.quiet import Time, quietly
from book.audit.replicas import ModelCopy
from book.tap.log import Place
from book.tap.place import caller

_cut: WeakKeyDictionary[Any, Place] = WeakKeyDictionary()  # the lines that called fully_shard, by FSDP's state


class Shard(ModelCopy):
    """One rank's part of a model in FSDP."""

    by = "FSDP"

    def __init__(self, state: Any, model: Any, number: int, time: Time, every: int | None) -> None:
        groups = _groups(state)
        info = groups[0].mesh_info
        if any(group.mesh_info.mesh != info.mesh for group in groups) or info.is_spmd_mesh:
            raise NotImplementedError  # parts of it are shared by other ranks
        self._parts = [(part._param_fqn, part.sharded_param) for group in groups for part in group.fsdp_params
                       if info.mesh.ndim > 1]
        super().__init__(model, ranks_of(state), number, _cut.get(state), time, every)
        self.shard = info.shard_mesh_rank if info.mesh.ndim > 1 else info.mesh.get_rank()
        self._all = {id(part.sharded_param) for group in groups for part in group.fsdp_params}

    def _named(self, model: Any = None) -> Iterator[tuple[str, Any]]:
        yield from self._parts

    def holds(self, parameters: set[int]) -> bool:
        return bool(self._all & parameters)

    def _look_for_unaveraged(self, step: int, forwards: int) -> None:
        """Nothing goes past FSDP: a model's own forward is what gathers its parameters."""

    def gone(self) -> None:
        """Note what it held at its end."""
        self.finish(None)
        self._parts = []


def ranks_of(state: Any) -> tuple[int, ...]:
    """All ranks of the mesh that a model is cut on."""
    return tuple(_groups(state)[0].mesh_info.mesh.mesh.flatten().tolist())


def _groups(state: Any) -> list[Any]:
    """FSDP's groups of parameters in a model."""
    return [group for each in state._state_ctx.all_states for group in each._fsdp_param_groups]


@quietly
def cut(state: Any, *_: Any) -> None:
    """fully_shard has made FSDP's state of a module."""
    if place := caller(sys._getframe())[1]:
        _cut[state] = place


def when_gone(model: Any, copy: Shard) -> None:
    """Note what a model held at its end once it is gone; its parameters stay until then."""
    weakref.finalize(model, quietly(copy.gone)).atexit = False
