"""L2: replicas compared when a program asks for it, with messages between the ranks."""
from __future__ import annotations

import linecache
import os
from typing import Any

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from book.audit import digests, drift
from book.audit.notes import Notes, Replica
from book.audit.replicas import held, plain_values


def compare(model: Any, group: Any, replicas: Any) -> list[str]:
    """See `book.audit.compare`; `replicas` is what this process notes of models, or None."""
    group = group or getattr(model, "process_group", None)
    ranks = tuple(dist.get_process_group_ranks(group or dist.group.WORLD))
    own = replicas.replica(model, _place) if replicas is not None else None
    told: list[Any] = [None] * len(ranks)
    dist.all_gather_object(told, own or _now(model, ranks), group)
    notes: list[Notes | None] = [None] * dist.get_world_size()
    for rank, replica in zip(ranks, told):
        notes[rank] = Notes(replicas=(replica,))
    return list(drift.look(notes))


def _now(model: Any, ranks: tuple[int, ...]) -> Replica:
    """A module of which nothing has been noted, as it is now."""
    parameters = (model.module if isinstance(model, DistributedDataParallel) else model).named_parameters()
    found = held((name, each) for name, each in parameters if not _is_cut(each))
    return Replica(ranks, 1, forwards=1, end=plain_values(found) if digests.reached() else None)


def _is_cut(parameter: Any) -> bool:
    """Whether this is a DTensor of which ranks hold different parts."""
    return not all(placement.is_replicate() for placement in getattr(parameter, "placements", ()))


def _place(filename: str, line: int) -> str:
    source = linecache.getline(filename, line).strip()
    return f"{os.path.basename(filename)} line {line}" + (f": {source}" if source else "")
