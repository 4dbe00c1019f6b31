"""L2: a matrix product that is cut over ranks, followed: which blocks each rank holds, computes and sends.

`trace_product` and `trace_mlp` call a function with whole matrices, the same on every rank, and add what it does to
the recording of the launch (see book.record.watcher), for `sharded_product` of book.widgets to play.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence

from book.extras import needed_by
from book.launch import rank_device

with needed_by("book.shards", "torch"):
    import torch
    import torch.distributed as dist
    from torch.distributed.tensor import DTensor

    from book import record
    from book.device import message_device
    from book.record.known_blocks import KnownBlocks, blocks_of_mlp, blocks_of_product
    from book.record.watcher import Watcher, around

Product = Callable[..., torch.Tensor]


def trace_product(fn: Product, backward: bool = False, bias: bool = False) -> torch.Tensor:
    """Call `fn(x, a)`, which computes Y = X A or a block of it on this rank, and add what it does to the trace.

    Runs inside a rank, one of 2 to 4: `launch(trace_product, 2, fn, record=True).trace`. X is (24, 12), A (12, 48),
    float64, whole and the same on every rank. With `bias`, it is `fn(x, a, bias)`, bias (48,). With `backward`, x and
    a ask for gradients, and the result's backward follows, from the same gradient of Y on all ranks. Returns what fn
    returned. Raises ValueError for another number of ranks and a result without a gradient to follow, TypeError for
    a result that is no tensor.
    """
    return _trace(fn, blocks_of_product(_ready(), bias), ["X", "A", "bias"][:2 + bias], backward)


def trace_mlp(fn: Product, backward: bool = False) -> torch.Tensor:
    """Call `fn(x, a, b)`, which computes Y = GELU(X A) B or a block of it, and add what it does to the trace.

    As `trace_product`; X is (24, 12), A (12, 48), B (48, 12).
    """
    return _trace(fn, blocks_of_mlp(_ready()), ["X", "A", "B"], backward)


def _ready() -> int:
    """Set up the default group if there is none; how many ranks there are."""
    if not dist.is_initialized():
        rank_device()
        dist.init_process_group()
    num_ranks = dist.get_world_size()
    if not 2 <= num_ranks <= 4:
        raise ValueError(f"a cut product is followed on 2 to 4 ranks, and {num_ranks} are running: launch 2, 3 or 4")
    return num_ranks


def _trace(fn: Product, known: KnownBlocks, names: Sequence[str], backward: bool) -> torch.Tensor:
    device = message_device()
    given = {name: known.given[name].to(device).requires_grad_(backward) for name in names}
    watcher = Watcher(known, names)
    try:
        with watcher:
            result = fn(*given.values())
        if not isinstance(result, torch.Tensor) or isinstance(result, DTensor):
            raise TypeError("return the tensor that this rank has computed of Y (of a DTensor, its to_local()), not "
                            f"{type(result).__name__}")
        watcher.ends_with(result, "Y", "return")
        if backward:
            _follow_backward(result, known, watcher)
            for name, tensor in given.items():
                if tensor.grad is not None:
                    watcher.ends_with(tensor.grad, "d" + name, "gradient")
    finally:
        record.emit(*watcher.events, source="recorded")
    return result.detach()


def _follow_backward(result: torch.Tensor, known: KnownBlocks, watcher: Watcher) -> None:
    if not result.requires_grad:
        raise ValueError("this result has no gradient to follow: compute it from x and a with operations that autograd "
                         "knows, and not under torch.no_grad()")
    gradient = _gradient_of(result, known)
    with watcher:
        result.backward(gradient)


def _gradient_of(result: torch.Tensor, known: KnownBlocks) -> torch.Tensor:
    """The loss's gradient of what a rank returned: of its block of Y, or of all of it."""
    found, whole = known.find(result), known.given["dY"]
    if found and found.matrix == "Y":
        block = around(known, found)
        whole = whole[slice(*block.rows), slice(*block.columns)]
    return whole.reshape(result.shape).to(result) if whole.numel() == result.numel() else torch.ones_like(result)
