"""L2: which groups each rank has made, and where two ranks' groups of the same name differ.

torch names a group by the number of `new_group` calls before it. Where ranks call `new_group` for different groups,
groups of the same name have different members, and their ranks wait for each other in any call that follows.
"""
from __future__ import annotations

import sys
from collections.abc import Mapping

RULE = "every rank must call it for every group, in the same order, members or not"


def made() -> dict[str, tuple[int, ...]]:
    """The ranks of every group that this process is in, by the group's name."""
    c10d = sys.modules.get("torch.distributed.distributed_c10d")
    if c10d is None:
        return {}
    ranks = {group: tuple(sorted(of_world)) for group, of_world in list(c10d._world.pg_group_ranks.items())}
    return {name: ranks[group] for group, name in list(c10d._world.pg_names.items()) if group in ranks}


def disagreement(groups: Mapping[int, Mapping[str, tuple[int, ...]]]) -> str | None:
    """A sentence on two ranks that made different groups with the same call of `new_group`; None if there are none.

    `groups`: for each rank, what `made` returned there.
    """
    for name in sorted({name for own in groups.values() for name in own}, key=lambda name: (len(name), name)):
        made_by = {own[name]: rank for rank, own in sorted(groups.items(), reverse=True) if name in own}
        if len(made_by) > 1:
            (first, one), (second, other) = sorted((rank, ranks) for ranks, rank in made_by.items())[:2]
            return (f"new_group: where rank {first} made the group {list(one)}, "
                    f"rank {second} made {list(other)}; {RULE}")
    return None

