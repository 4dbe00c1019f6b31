"""L2: refuse a peer that does not exist, or that is the rank itself, in the call that names it.

gloo does not check the peers of sends and receives. It reads past the end of its list, which is undefined behaviour:
the rank may crash, wait forever or spin, and that varies from run to run. NCCL refuses such a peer, and so does torch
in every group except the default one. When a rank sends to itself, gloo raises a socket error in `isend`; torch's
`send` refuses it, and NCCL supports it.
"""
from __future__ import annotations

import functools
import sys
from typing import Any

TO_ITSELF = {"isend": "sends to itself", "irecv": "receives from itself"}


def refuse_missing() -> None:
    """Make operations of this process raise ValueError if they name a peer outside the world."""
    import torch.distributed as dist
    from torch.distributed import distributed_c10d
    resolve = distributed_c10d.get_group_rank  # every operation with a peer looks the peer up with this

    @functools.wraps(resolve)
    def get_group_rank(group: Any, global_rank: int) -> int:
        if isinstance(global_rank, int) and not 0 <= global_rank < dist.get_world_size():
            raise ValueError(f"there is no rank {global_rank}: ranks are 0 to {dist.get_world_size() - 1}")
        return resolve(group, global_rank)

    distributed_c10d.get_group_rank = get_group_rank


def refuse_itself() -> None:
    """Make `isend` and `irecv` of this process raise ValueError for its own rank, except on NCCL."""
    import torch.distributed as dist
    from torch.distributed import distributed_c10d
    resolve = distributed_c10d._canonicalize_group_rank  # looks a peer up by its rank in the group or in the world

    @functools.wraps(resolve)
    def canonicalize(group: Any, *args: Any, **options: Any) -> int:
        peer, caller = resolve(group, *args, **options), sys._getframe(1).f_code.co_name
        if caller in TO_ITSELF and peer == group.rank() and "nccl" not in dist.get_backend_config(group):
            raise ValueError(f"rank {dist.get_rank()} {TO_ITSELF[caller]}: copy instead")
        return peer

    distributed_c10d._canonicalize_group_rank = canonicalize
