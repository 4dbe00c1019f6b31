"""L2: process groups that outlive `destroy_process_group` for a while, since freeing one at once can hang a rank.

A model in DDP that is freed after its group was destroyed frees the group as well. In torch 2.13, DDP's reducer does so
with the interpreter lock held, and waits for the threads of gloo; one of these may still be letting go of a tensor of
the last collective, for which it needs the lock. Whoever keeps the group's Python object lets the lock go first.
"""
from __future__ import annotations

import functools
from collections import deque
from typing import Any

from book.tap.replaced import replace

NUM_KEPT = 16  # a program may make and destroy groups all day; each has threads and connections

_destroyed: deque[Any] = deque(maxlen=NUM_KEPT)


def keep_destroyed_groups() -> None:
    """Keep the newest groups of those that this process destroys from now on."""
    import torch.distributed as dist
    from torch.distributed import distributed_c10d
    destroy = distributed_c10d.destroy_process_group

    @functools.wraps(destroy)
    def destroy_process_group(group: Any = None) -> None:
        groups = distributed_c10d._world.pg_map
        gone = [group] if group in groups else [*groups] if group is None else []
        _destroyed.extend([each for each in gone if not _meets_in_a_file(groups[each][1])])
        destroy(group)

    for module in (distributed_c10d, dist):
        replace(module, "destroy_process_group", destroy_process_group)


def _meets_in_a_file(store: Any) -> bool:
    """Whether ranks meet in a file, which the next group of that name must not find: the last store deletes it."""
    import torch.distributed as dist
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return isinstance(store, dist.FileStore)
