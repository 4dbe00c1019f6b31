"""L2: ranks agree on a backend before they have a process group: NCCL if each has a GPU of its own, else gloo.

A host without a GPU, or with fewer than ranks, would begin with gloo while the others begin with NCCL, and all would
hang. So each rank says over the store what it can follow, and the last one to do so says what all take.
"""
from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal

from book.extras import require
from book.launch.api import LaunchError

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

Backend = Literal["nccl", "gloo"]
AGREE_S = 60.0
_agreed: dict[tuple[str | None, ...], tuple[Backend, Any]] = {}  # a hosted store ends with its object


@dataclass(frozen=True)
class Said:
    """What a rank has said: where it is, the GPUs it sees for its host's ranks, and the backend it was told to take."""

    rank: int
    host: str
    num_gpus: int
    num_ranks: int
    told: str | None

    @property
    def can(self) -> bool:
        """Whether this rank can follow to NCCL."""
        return self.num_gpus >= self.num_ranks and self.told != "gloo"


def rank_device(backend: Backend | None = None, timeout_s: float = AGREE_S) -> torch.device:
    """Put this rank on its device, and return it: its own GPU if every rank of every host has one, else the CPU.

    Side effects: the GPU becomes this process's current CUDA device; if the CPU is chosen, all GPUs are hidden from
    this process (`CUDA_VISIBLE_DEVICES=""`). Call it on all ranks before `dist.init_process_group()`, whose default
    backend follows from it: NCCL with a GPU each, gloo on the CPU. The ranks agree over the store that `MASTER_ADDR`
    and `MASTER_PORT` name, alike under `launch` and torchrun; further calls return the same device.

    "nccl" refuses what else would become gloo; "gloo" takes the CPU on all ranks. Raises LaunchError outside a rank,
    where a rank can't follow to "nccl", and where ranks have not answered after `timeout_s`; all three name the rank.
    """
    require("rank_device", "torch")
    import torch
    if "LOCAL_WORLD_SIZE" not in os.environ:
        raise LaunchError("rank_device() belongs inside a function that launch or torchrun runs on its ranks")
    if backend not in (None, "nccl", "gloo"):
        raise ValueError(f"backend must be 'nccl', 'gloo' or None, not {backend!r}")
    if _taken(backend, timeout_s) == "nccl":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        return device
    # init_process_group() takes NCCL alone as soon as it sees one GPU, and could then not move CPU tensors.
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    return torch.device("cpu")


def _taken(backend: Backend | None, timeout_s: float) -> Backend:
    """The backend of the default group, or what the ranks agree on if there is none yet."""
    import torch
    import torch.distributed as dist
    if dist.is_initialized():
        from book.device import message_backends
        return "nccl" if message_backends().get("cuda") == "nccl" else "gloo"
    names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT")
    job = tuple(os.environ.get(name) for name in names)
    if job not in _agreed:
        mine = Said(int(os.environ["RANK"]), socket.gethostname(), torch.cuda.device_count(),
                    int(os.environ["LOCAL_WORLD_SIZE"]), backend)
        _agreed[job] = _agree(mine, int(os.environ["WORLD_SIZE"]), timeout_s)
    return _agreed[job][0]


def _agree(mine: Said, world_size: int, timeout_s: float) -> tuple[Backend, dist.Store | None]:
    """What all ranks take, and the store over which they said so; every rank calls this."""
    store = None
    if world_size == 1:
        verdict = verdict_on([mine])
    else:
        from torch import distributed as dist
        from torch.distributed.rendezvous import rendezvous
        store = next(rendezvous("env://", timeout=timedelta(seconds=timeout_s)))[0]
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        verdict = _heard(dist.PrefixStore(f"lockstep/backend/{attempt}/{world_size}", store), mine, world_size,
                         timeout_s)
    if verdict["error"]:
        raise LaunchError(verdict["error"])
    if verdict["why"] and mine.rank == 0:
        print(verdict["why"], file=sys.stderr, flush=True)
    return ("nccl" if verdict["backend"] == "nccl" else "gloo"), store


def _heard(store: dist.Store, mine: Said, world_size: int, timeout_s: float) -> dict[str, Any]:
    """Say what this rank can follow, and wait for the verdict: the last to speak reads what all said."""
    import torch.distributed as dist
    store.set(str(mine.rank), json.dumps(asdict(mine)))
    if store.add("number that spoke", 1) == world_size:
        said = [Said(**json.loads(store.get(str(rank)))) for rank in range(world_size)]
        store.set("verdict", json.dumps(verdict_on(said)))
    try:
        store.wait(["verdict"], timedelta(seconds=timeout_s))
    except dist.DistStoreError:
        silent = [rank for rank in range(world_size) if not store.check([str(rank)])]
        raise LaunchError(f"{_named(silent)} did not say within {timeout_s:g} s which backend to take: is there a "
                          f"process for each, and does it call rank_device()? Every rank has to") from None
    return dict(json.loads(store.get("verdict")))


def verdict_on(said: Sequence[Said]) -> dict[str, str]:
    """The `backend` that all take, `why` it is gloo where some could do more, or the `error` if NCCL was asked for."""
    unable = [one for one in said if not one.can]
    if not unable:
        return {"backend": "nccl", "why": "", "error": ""}
    alike = (unable[0].host, unable[0].told == "gloo")
    because = _because([one for one in unable if (one.host, one.told == "gloo") == alike])
    if firm := [one.rank for one in said if one.told == "nccl"]:
        return {"backend": "", "why": "", "error": f"{_named(firm)} asked for NCCL, but {because}. Start ranks only "
                "where each has a GPU, or call rank_device() without a backend: then all take gloo"}
    mixed = len(unable) < len(said) and not alike[1]
    return {"backend": "gloo", "why": f"all ranks take gloo: {because}" if mixed else "", "error": ""}


def _because(unable: Sequence[Said]) -> str:
    """Why these ranks of one host can't follow to NCCL."""
    who, first = f"{_named([one.rank for one in unable])} on {unable[0].host}", unable[0]
    if first.told == "gloo":
        return f"{who} asked for gloo"
    if not first.num_gpus:
        return f"{who} ha{'s' if len(unable) == 1 else 've'} no GPU"
    sees = f"see{'s' * (len(unable) == 1)} {first.num_gpus} GPU{'s' * (first.num_gpus > 1)}"
    return f"{who} {sees} for {first.num_ranks} ranks"


def _named(ranks: Sequence[int]) -> str:
    """Ranks by name: "rank 3", "ranks 3 and 4", "ranks 3, 4 and 12 more"."""
    first, others = [str(rank) for rank in ranks[:4]], len(ranks) - 4
    if others > 0:
        first.append(f"{others} more")
    if len(first) == 1:
        return f"rank {first[0]}"
    return f"ranks {', '.join(first[:-1])} and {first[-1]}"
