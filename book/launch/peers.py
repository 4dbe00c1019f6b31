"""L2: refuse a peer that does not exist, or that is the rank itself, in the call that names it.

gloo does not check the peers of sends and receives. It reads past the end of its list, which is undefined behaviour:
the rank may crash, wait forever or spin, and that varies from run to run. NCCL refuses such a peer, and so does torch
in every group except the default one. When a rank sends to itself, gloo raises a socket error in `isend`; torch's
`send` refuses it, and NCCL supports it.
"""
from __future__ import annotations

from book.tap import Op, Subscriber
from book.tap.log import NOBODY

TO_ITSELF = {"send": "sends to itself", "recv": "receives from itself"}


class Peers(Subscriber):
    """Makes calls raise ValueError if they name a rank that there is not, or, except on NCCL, their own as the peer."""

    def named(self, rank: int, world_size: int) -> None:
        if isinstance(rank, int) and not 0 <= rank < world_size:
            raise ValueError(f"there is no rank {rank}: ranks are 0 to {world_size - 1}")

    def before(self, op: Op) -> None:
        if NOBODY in (op.peer, op.root):
            raise ValueError("group_src= or group_dst= names a rank that the group does not have: its ranks are 0 to "
                             f"{len(op.group.ranks) - 1}")
        if op.peer == op.group.rank and "nccl" not in op.group.backend:
            raise ValueError(f"rank {op.peer} {TO_ITSELF[op.kind]}: copy instead")
