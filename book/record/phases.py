"""L2: follow a training loop: which phase of a step a rank was in, and when."""
from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

import torch.distributed as dist

from book.record.recorder import emit
from book.trace import Event


@contextlib.contextmanager
def phase(name: str) -> Iterator[None]:
    """Record what runs in this block as a phase of a training step: "input", "forward", "backward", "optimizer".

    Blocks do not nest. Nothing is recorded if the block raises.
    """
    start_s = time.monotonic()
    yield
    emit(Event(dist.get_rank(), "compute", name, start_s=start_s, end_s=time.monotonic()))
