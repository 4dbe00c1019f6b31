"""L2: which expert works on which token, and what comes back, in a layer whose experts are on several ranks.

Every token is a unit vector, so a row tells whose it is wherever it arrives. These events are left, where `bucket` is
an expert and `chunk` a token:

    hold     EXPERT     an expert of this rank
    compute  CHOSEN     a choice of a token of this rank, best first
    compute  WORKED     a row that an expert of this rank gets, in their order
    compute  RETURNED   what has come back to a token: `contributions`, how often each token's row is in it
"""
from __future__ import annotations

import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from book import record
from book.device import message_device
from book.trace import CHOSEN, EXPERT, RETURNED, WORKED, Event

Work = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def follow_tokens(layer: Callable[[torch.Tensor, Work], torch.Tensor], choices: torch.Tensor,
                  num_experts: int) -> torch.Tensor:
    """Call `layer(tokens, work)` on this rank's tokens, and add to the trace which expert works on which of them.

    Runs inside a rank: `launch(fn, n, record=True)` with a fn that calls it after `init_process_group`. `choices`,
    (tokens of the rank, choices of each), say which experts a token wants; all ranks have as many tokens. The layer
    calls `work(rows, experts)` once, with the rows that arrived and which of this rank's experts each is for, sends
    back what it returns, and adds it up with all gates 1. Returns what the layer does.
    """
    rank, own = dist.get_rank(), len(choices)
    num_tokens, per_rank = own * dist.get_world_size(), num_experts // dist.get_world_size()
    events = [Event(rank, "hold", EXPERT, bucket=per_rank * rank + expert) for expert in range(per_rank)]

    def note(op: str, token: int, expert: int | None = None, held: tuple[float, ...] | None = None) -> None:
        now_s = time.monotonic()
        events.append(Event(rank, "compute", op, chunk=token, start_s=now_s, end_s=now_s, contributions=held,
                            bucket=expert))

    def work(rows: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
        for token, expert in zip(rows.argmax(-1).tolist(), experts.tolist()):
            note(WORKED, token, per_rank * rank + expert)
        return rows

    tokens = torch.eye(num_tokens, dtype=torch.float64, device=message_device())[own * rank:own * (rank + 1)]
    for token, wanted in enumerate(choices.tolist()):
        for expert in wanted:
            note(CHOSEN, own * rank + token, expert)
    try:
        with torch.no_grad():
            result = layer(tokens, work)
        for token, held in enumerate(result.tolist()):
            note(RETURNED, own * rank + token, held=tuple(held))
    finally:
        record.emit(*events, source="recorded")
    return result
