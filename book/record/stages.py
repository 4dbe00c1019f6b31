"""L2: follow a pipeline: which forward or backward of which micro-batch a rank ran, and when.

The recorder sees what travels between stages, but not what a rank computes. `stage_action` adds that when the program
runs its stages itself, `follow_stages` when torch.distributed.pipelining does.
"""
from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch.distributed import rpc

from book.record.recorder import emit
from book.schedule import KINDS
from book.trace import Event

if TYPE_CHECKING:  # importing it takes longer than most programs that are recorded
    from torch.distributed.pipelining import PipelineStage


@contextlib.contextmanager
def stage_action(kind: str, stage: int, micro_batch: int) -> Iterator[None]:
    """Record what runs in this block as the `kind` ("F", "B", "I" or "W") of a micro-batch on a stage.

    Nothing is recorded if the block raises. Raises ValueError for another kind.
    """
    if kind not in KINDS:
        raise ValueError(f"kind must be one of {', '.join(KINDS)}, not {kind!r}")
    start_s = time.monotonic()
    yield
    action_done(kind, stage, micro_batch, start_s)


def action_done(kind: str, stage: int, micro_batch: int, start_s: float) -> None:
    """Record an action that is not a block of code and ends now; `start_s` is `time.monotonic()` at its start."""
    emit(Event(_rank(), "compute", kind, stage=stage, micro_batch=micro_batch, start_s=start_s,
               end_s=time.monotonic()))


@contextlib.contextmanager
def follow_stages(*stages: PipelineStage) -> Iterator[None]:
    """Record every forward and backward that a schedule of torch.distributed.pipelining runs on `stages` in this block.

    Torch's backward of a micro-batch is a B, or an I and later a W if its schedule splits it.
    """
    with contextlib.ExitStack() as stack:
        for stage in stages:
            for method, kind_of in _METHODS.items():
                stack.callback(setattr, stage, method, getattr(stage, method))
                setattr(stage, method, _followed(stage, getattr(stage, method), kind_of))
        yield


def _backward_kind(full_backward: bool = True) -> str:
    return "B" if full_backward else "I"


_METHODS: dict[str, Callable[..., str]] = {
    "forward_one_chunk": lambda: "F", "backward_one_chunk": _backward_kind, "backward_weight_one_chunk": lambda: "W"}


def _followed(stage: PipelineStage, method: Callable[..., Any], kind_of: Callable[..., str]) -> Callable[..., Any]:
    def run(micro_batch: int, *args: Any, **options: Any) -> Any:
        split = {name: value for name, value in options.items() if name == "full_backward"}
        with stage_action(kind_of(**split), stage.stage_index, micro_batch):
            return method(micro_batch, *args, **options)
    return run


def _rank() -> int:
    """This process's rank; in a program that uses only RPC, its worker id."""
    return dist.get_rank() if dist.is_initialized() else rpc.get_worker_info().id
