"""L2: process groups that this rank has destroyed, and the lines that did."""
from __future__ import annotations

from book.launch import where
from book.tap import Subscriber
from book.tap.log import OwnGroup, Place
from book.waiting.hang import Group

_lines: dict[Group, Place] = {}


class Destroyed(Subscriber):
    """Has this process note the groups that it destroys."""

    def destroyed(self, group: OwnGroup, place: Place | None) -> None:
        if place is not None:
            _lines[group.shared] = place


def groups() -> dict[Group, str]:
    """The groups that this process has destroyed, and where; not those whose names newer ones have taken."""
    from torch.distributed import distributed_c10d

    living = {group.group_name for group in list(distributed_c10d._world.pg_map)}
    return {group: str(where.place_of(*place)) for group, place in list(_lines.items()) if group.name not in living}
