"""L2: refuse a peer that does not exist, where a rank names it.

gloo does not check the peers of sends and receives: it reads past the end of its list, and what follows is undefined.
The rank crashes, waits for ever or spins, differently from run to run. NCCL refuses such a peer, as torch itself does
in every group but the default one.
"""
from __future__ import annotations

import functools
from typing import Any


def refuse_missing() -> None:
    """Have every operation of this process that names a peer outside the world raise ValueError."""
    import torch.distributed as dist
    from torch.distributed import distributed_c10d
    resolve = distributed_c10d.get_group_rank  # what every operation with a peer passes its number through

    @functools.wraps(resolve)
    def get_group_rank(group: Any, global_rank: int) -> int:
        if isinstance(global_rank, int) and not 0 <= global_rank < dist.get_world_size():
            raise ValueError(f"there is no rank {global_rank}: ranks are 0 to {dist.get_world_size() - 1}")
        return resolve(group, global_rank)

    distributed_c10d.get_group_rank = get_group_rank
