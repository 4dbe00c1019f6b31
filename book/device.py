"""L2: which backend moves a rank's messages, and the device that it takes them from.

`rank_device()` decides before there is a process group; this asks the one that there is, however it was made.
"""
from __future__ import annotations

from book.extras import needed_by

with needed_by("book.device", "torch"):
    import torch
    import torch.distributed as dist


def message_backends() -> dict[str, str]:
    """The default group's backends by device type: {"cpu": "gloo"}, {"cuda": "nccl"}, or one for each.

    `dist.get_backend()` says "undefined" after a plain `dist.init_process_group()`; the configuration always says it.
    """
    return dict(pair.split(":") for pair in dist.get_backend_config().split(","))


def message_device() -> torch.device:
    """The device that the default group takes tensors from: this rank's own GPU where NCCL moves them, else the CPU."""
    if message_backends().get("cuda") != "nccl":
        return torch.device("cpu")
    return dist.group.WORLD.bound_device_id or torch.device("cuda", _own_gpu())


def _own_gpu() -> int:
    """The GPU that the program has chosen, or else the one that `rank_device()` would choose.

    GPU 0 is current on every rank that has chosen none: NCCL refuses two ranks on one GPU. Where a launcher shows each
    rank a single GPU, that one is number 0 whatever the local rank.
    """
    return torch.cuda.current_device() or dist.get_node_local_rank(fallback_rank=0) % torch.cuda.device_count()
