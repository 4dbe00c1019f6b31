"""L2: ranks agree on a backend before they have a process group: NCCL if each has a GPU of its own, else gloo.

A host without a GPU, or with fewer GPUs than ranks, would begin with gloo while the others begin with NCCL, and all
would hang. So in a job of several hosts each rank says over the store which backend it can use, and rank 0 decides.

Ranks that torchrun has restarted meet in the store of the previous start, with what was said then, and nothing tells
them which start this is: each agent counts only its own failures. So rank 0 asks a random question, and each rank
answers it with a random token. Rank 0 accepts only answers to its own question, and each rank accepts only a verdict on
its own token.
"""
from __future__ import annotations

import json
import os
import secrets
import socket
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal

from book.extras import require
from book.launch.api import LaunchError
from book.words import agree, counted, joined, plural

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

Backend = Literal["nccl", "gloo"]
AGREE_S = 300.0
LOOK_S = 0.2  # the longest pause before a rank checks whether the question has changed
READ_S = 3.0  # for the others to read the verdict of rank 0
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
        """Whether this rank can use NCCL."""
        return self.num_gpus >= self.num_ranks and self.told != "gloo"


def rank_device(backend: Backend | None = None, timeout_s: float = AGREE_S) -> torch.device:
    """Put this rank on its device, and return it: its own GPU if every rank of every host has one, else the CPU.

    Side effects: the GPU becomes this process's current CUDA device; if the CPU is chosen, all GPUs are hidden from
    this process (`CUDA_VISIBLE_DEVICES=""`). Call it before `dist.init_process_group()`, whose default backend follows
    from it: NCCL with a GPU each, gloo on the CPU. On one host the choice depends on `LOCAL_WORLD_SIZE` and the number
    of GPUs. On several, all ranks have to call it, and agree over the store that `MASTER_ADDR` and `MASTER_PORT` name.
    It is the same under `launch` and torchrun, and further calls return the same device.

    "nccl" raises an error instead of falling back to gloo; "gloo" takes the CPU on all ranks. Raises LaunchError
    outside a rank; and, naming the ranks, if one can't use NCCL or has not answered after `timeout_s`.
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
    job = tuple(os.environ.get(name) for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"))
    if job not in _agreed:
        mine = Said(int(os.environ.get("RANK", "0")), socket.gethostname(), torch.cuda.device_count(),
                    int(os.environ["LOCAL_WORLD_SIZE"]), backend)
        _agreed[job] = _agree(mine, int(os.environ.get("WORLD_SIZE", "1")), timeout_s)
    return _agreed[job][0]


def _agree(mine: Said, world_size: int, timeout_s: float) -> tuple[Backend, dist.Store | None]:
    """The backend that all ranks take, and the store over which they agreed; all ranks of all hosts call this."""
    store = None
    if world_size == mine.num_ranks or "MASTER_ADDR" not in os.environ:
        verdict = verdict_on([mine])  # the ranks of one host see the same GPUs
    else:
        import torch.distributed as dist
        store = _store(mine.rank, timeout_s)
        job = dist.PrefixStore(f"lockstep/backend/{os.environ.get('TORCHELASTIC_RUN_ID', '')}/{world_size}", store)
        verdict = heard(job, mine, world_size, timeout_s)
    if verdict["error"]:
        raise LaunchError(verdict["error"])
    if verdict["why"] and mine.rank == 0:
        print(verdict["why"], file=sys.stderr, flush=True)
    return ("nccl" if verdict["backend"] == "nccl" else "gloo"), store


def _store(rank: int, timeout_s: float) -> dist.Store:
    """The store in which the ranks will meet for their process group too; rank 0 hosts it if nobody does."""
    import torch.distributed as dist
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    hosted = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    try:  # multi_tenant: init_process_group() opens the same store once more
        return dist.TCPStore(address, port, is_master=rank == 0 and not hosted, wait_for_workers=False,
                             multi_tenant=True, timeout=timedelta(seconds=timeout_s))
    except dist.DistError as error:
        raise LaunchError(f"rank {rank} can't open the ranks' store at {address}:{port} (limit: {timeout_s:g} s), to "
                          f"agree on a backend: {str(error).splitlines()[0]}") from None


def heard(store: dist.Store, mine: Said, world_size: int, timeout_s: float) -> dict[str, str]:
    """What `verdict_on` says once all ranks have reported over the store; each rank calls this.

    Whatever an earlier start, finished or not, has left in the store has no influence.
    """
    import torch.distributed as dist
    if mine.rank:
        return _answer(store, mine, timeout_s)
    verdict, tokens = _ask(store, mine, world_size, timeout_s)
    for token in tokens:
        store.set(token, json.dumps(verdict))
    if verdict["error"]:  # the store may end with this process
        with suppress(dist.DistStoreError):
            store.wait([f"{token}/read" for token in tokens], timedelta(seconds=READ_S))
    return verdict


def _ask(store: dist.Store, mine: Said, world_size: int, timeout_s: float) -> tuple[dict[str, str], list[str]]:
    """Rank 0 asks all others: the verdict, and the token of each that has answered."""
    import torch.distributed as dist
    question = secrets.token_hex(8)
    store.set("question", question)
    answers = {rank: f"{question}/{rank}" for rank in range(1, world_size)}
    silent: list[int] = []
    try:
        store.wait(list(answers.values()), timedelta(seconds=timeout_s))
    except dist.DistStoreError:
        silent = [rank for rank, answer in answers.items() if not store.check([answer])]
    said = [json.loads(store.get(answer)) for rank, answer in answers.items() if rank not in silent]
    verdict = _silence(silent, timeout_s) if silent else verdict_on([mine, *(Said(**one["said"]) for one in said)])
    return verdict, [one["token"] for one in said]


def _answer(store: dist.Store, mine: Said, timeout_s: float) -> dict[str, str]:
    """Any other rank answers rank 0, again if the question was from an earlier start; returns the verdict."""
    import torch.distributed as dist
    token, answered = secrets.token_hex(8), b""
    answer = json.dumps({"said": asdict(mine), "token": token})
    end_s = time.monotonic() + timeout_s
    try:
        store.wait(["question"], timedelta(seconds=timeout_s))
    except dist.DistStoreError:
        return _silence([0], timeout_s)
    pause_s = 0.0
    while time.monotonic() < end_s:
        if (question := store.get("question")) != answered:
            store.set(f"{question.decode()}/{mine.rank}", answer)
            answered, end_s = question, time.monotonic() + timeout_s + READ_S  # rank 0 waits for the others
        if store.check([token]):
            verdict = dict(json.loads(store.get(token)))
            store.set(f"{token}/read", "")
            return verdict
        time.sleep(pause_s)  # a wait with a short timeout would warn each time
        pause_s = min(2 * pause_s + 0.005, LOOK_S)
    return _silence([0], timeout_s)


def _silence(silent: Sequence[int], timeout_s: float) -> dict[str, str]:
    """The verdict if some ranks have not said which backend they can use."""
    return {"backend": "", "why": "", "error": f"{_named(silent)} did not say within {timeout_s:g} s which backend to "
            "take: is there a process for each, and does it call rank_device()? Every rank has to"}


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
    """Why these ranks of one host can't use NCCL."""
    who, first = f"{_named([one.rank for one in unable])} on {unable[0].host}", unable[0]
    if first.told == "gloo":
        return f"{who} asked for gloo"
    if not first.num_gpus:
        return f"{who} {agree('sees', unable)} no GPU"
    return f"{who} {agree('sees', unable)} {counted(first.num_gpus, 'GPU')} for {first.num_ranks} ranks"


def _named(ranks: Sequence[int]) -> str:
    """Ranks by name: "rank 3", "ranks 3 and 4", "ranks 3, 4 and 12 more"."""
    more = [f"{len(ranks) - 4} more"] if len(ranks) > 4 else []
    return f"{plural('rank', len(ranks))} {joined([*ranks[:4], *more])}"
