"""L2: one replica of a training that goes on when another replica dies, as its companion page shows it.

torchft decides in each step who takes part, and whether what they made of it counts. It is needed only here, so it is
imported when a replica starts.
"""
from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from book.parallel.model import GPT, GPTConfig
from book.parallel.text import Characters, Windows, load_text

if TYPE_CHECKING:
    from torchft import Manager

BATCH, CONTEXT = 4, 16
STEP_S = 0.05  # what a step computes on a GPU: a replica sleeps as long
PEER_S, QUORUM_S = 5.0, 30.0  # how long a replica waits for a message of a peer, and for enough peers


@dataclass(frozen=True)
class Attempt:
    """A step that a replica has tried: when, from where, with whom, and whether it counts.

    `cursor` is the first batch of the step, `place` which of the `num_replicas` batches this replica took: None while
    it has no state yet. `step` counts the committed steps before this one. `digest` is of the state after it.
    """
    time_s: float
    replica: int
    quorum: int
    num_replicas: int
    place: int | None
    cursor: int
    step: int
    committed: bool
    loss: float
    digest: str


@cache
def _windows() -> tuple[GPTConfig, Windows]:
    characters = Characters(load_text())
    config = GPTConfig(characters.vocab_size, CONTEXT, num_layers=2, num_heads=2, width=16, dtype=torch.float64)
    return config, Windows(characters.encode(load_text()), CONTEXT)


def batch(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets of this batch, each (4, 16): its number alone decides which windows of the text it has."""
    _, windows = _windows()
    drawn = torch.randperm(len(windows), generator=torch.Generator().manual_seed(number))[:BATCH]
    inputs, targets = zip(*[windows[row] for row in drawn.tolist()])
    return torch.stack(inputs), torch.stack(targets)


def begin(seed: int = 0) -> tuple[GPT, torch.optim.AdamW]:
    """A small GPT in float64, and its optimizer."""
    gpt = GPT.seeded(_windows()[0], seed)
    return gpt, torch.optim.AdamW(gpt.parameters(), lr=3e-3)


def digest(gpt: torch.nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """Sixteen digits that differ if one bit of the weights, or of the optimizer's moments, does."""
    tensors = [tensor for p in gpt.parameters()
               for tensor in (p.detach(), *optimizer.state.get(p, {}).values())]
    return hashlib.sha256(b"".join(tensor.numpy().tobytes() for tensor in tensors)).hexdigest()[:16]


def managed(replica: int, lighthouse: str, gpt: torch.nn.Module, optimizer: torch.optim.Optimizer,
            **options: Any) -> Manager:
    """torchft's manager of a replica that is one process: what it hands to a newcomer, and how long it waits."""
    from torchft import Manager, ProcessGroupGloo
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)

    def state() -> dict[str, Any]:
        return {"model": gpt.state_dict(), "optimizer": optimizer.state_dict()}

    def load(state: dict[str, Any]) -> None:
        gpt.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    manager = Manager(**{**dict(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=PEER_S)), state_dict=state, load_state_dict=load,
        min_replica_size=2, init_sync=False,  # all begin with the same weights
        replica_id=f"replica{replica}", lighthouse_addr=lighthouse, hostname="localhost",
        rank=0, world_size=1, store_addr="localhost", store_port=store.port,
        timeout=timedelta(seconds=2 * PEER_S), quorum_timeout=timedelta(seconds=QUORUM_S)), **options})
    manager.kept_store = store  # it has to live as long
    return manager


def average(manager: Manager, module: torch.nn.Module) -> None:
    """Give each parameter the mean of its gradients over all replicas; if one of them has died, the manager knows."""
    gradients = [p.grad for p in module.parameters()]
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    work = manager.allreduce(flat)
    work.wait()
    if (error := manager.errored()) is None:
        for gradient, mean in zip(gradients, flat.split([gradient.numel() for gradient in gradients])):
            gradient.copy_(mean.view_as(gradient))
    else:
        # The error's traceback keeps the group's sockets open, and who waits for this replica would wait PEER_S.
        error.original_exception.__traceback__ = None
        del work
        manager._pg.abort()


def train(replica: int, lighthouse: str, tell: Callable[[Attempt], None], seed: int = 0) -> None:
    """Train until somebody ends this process, and `tell` of each attempt."""
    from torchft import Optimizer
    gpt, optimizer = begin(seed)
    manager = managed(replica, lighthouse, gpt, optimizer)
    committing = Optimizer(manager, optimizer)
    while True:
        committing.zero_grad()  # asks: who is here?
        num_replicas, place = manager.num_participants(), manager.participating_rank()
        step, cursor = manager.current_step(), manager.batches_committed()
        inputs, targets = batch(cursor + (place or 0))
        time.sleep(STEP_S)
        loss = GPT.loss(gpt(inputs), targets)
        loss.backward()
        average(manager, gpt)
        committing.step()  # only if no replica of this step was lost
        tell(Attempt(time.time(), replica, manager._quorum_id, num_replicas, place, cursor, step,
                     manager.current_step() > step, loss.item(), digest(gpt, optimizer)))
