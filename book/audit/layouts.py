"""L2: tensors whose memory gloo takes as it lies: refused in the call, or noted where only the other ranks can tell.

gloo reads and writes as many elements as the tensor has from its first one on, whatever its strides, in some operations
and copies in the others; NCCL refuses such tensors. So the broadcast of a column writes outside the column. A tensor
that fills its memory in another order, as a transposed one does, is right wherever all ranks' tensors have that order.
"""
from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from book.audit.notes import Notes, PlaceOf, noted
from book.tap import Op, Subscriber
from book.tap.log import Place
from book.waiting.hang import Group
from book.words import listed, named

if TYPE_CHECKING:
    import torch

AS_IT_LIES = {"all_reduce", "broadcast", "reduce", "scatter"}  # all their tensors, by torch's name of the function
OUTPUT_AS_IT_LIES = {"reduce_scatter", "all_to_all_single"}  # their first tensor, which the others must be like
MOST = 100  # notes

Order = tuple[int, ...]  # the strides of the dimensions that have more than one element; () of a contiguous tensor


class StridedCall(NamedTuple):
    """A collective with a tensor that fills its memory in another order than its indices."""
    group: Group
    number: int  # among the group's collectives
    call: str
    order: Order
    place: Place | str | None  # a readable one once it is told


class Layouts(Subscriber):
    """Makes calls raise ValueError if gloo would take a tensor for something else; notes those that may be right."""

    def __init__(self) -> None:
        from torch import strided
        self._noted: list[StridedCall] = []
        self._strided = strided

    def told(self, place_of: PlaceOf) -> tuple[StridedCall, ...]:
        """What was noted, with readable places."""
        return tuple(layout._replace(place=str(place_of(*layout.place)) if layout.place else "a line of a library")
                     for layout in self._noted)

    def issued(self, op: Op, tensors: Sequence[torch.Tensor]) -> None:
        for tensor in tensors:
            if tensor.layout is self._strided and not tensor.is_contiguous() and tensor.device.type == "cpu":
                self._judge(op, tensors)
                return

    def _judge(self, op: Op, tensors: Sequence[torch.Tensor]) -> None:
        call = op.function or ""
        if call in AS_IT_LIES:
            gapped = [tensor for tensor in tensors if not _is_dense(tensor)]
            orders = {_order(tensor) for tensor in tensors}
            if gapped or len(orders) > 1:
                _refuse(call, [*gapped, *filter(_order, tensors)][0])
            if len(self._noted) < MOST:
                self._noted.append(StridedCall(op.group.shared, op.number, call, orders.pop(), op.place))
        elif call in OUTPUT_AS_IT_LIES and ((tensors[0].numel() and not _is_dense(tensors[0]))
                                            or len(set(map(_order, tensors))) > 1):
            strange = [tensor for tensor in tensors if _order(tensor)]
            _refuse(call, strange[0] if strange else tensors[0])


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether a tensor fills a stretch of memory, each place once, in whatever order."""
    filled = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape)):
        if size > 1:
            if stride != filled:
                return False
            filled *= size
    return True


def _order(tensor: torch.Tensor) -> Order:
    """In which order a tensor fills its memory; one with gaps is copied first, in the order of its indices."""
    if tensor.is_contiguous() or not _is_dense(tensor):
        return ()
    return tuple(stride for size, stride in zip(tensor.shape, tensor.stride()) if size > 1)


def _refuse(call: str, tensor: torch.Tensor) -> None:
    raise ValueError(f"the tensor of {call} is not contiguous (shape {list(tensor.shape)}, strides "
                     f"{list(tensor.stride())}), and gloo takes its memory as it lies: pass x.contiguous(). Where "
                     f"{call} writes into it, pass y = x.contiguous(), and copy the result back: x.copy_(y)")


def look(ranks: Sequence[Notes | None]) -> Iterator[str]:
    """Collectives in which the ranks' tensors fill their memory in different orders."""
    by_call: dict[Any, dict[int, StridedCall]] = {}
    for rank, layout in noted(ranks, "layouts"):
        by_call.setdefault((layout.group, layout.number), {})[rank] = layout
    for ((_, members), _), found in by_call.items():
        others = [rank for rank in members if rank not in found and rank < len(ranks) and ranks[rank] is not None]
        orders = {layout.order for layout in found.values()} | ({()} if others else set())
        if len(orders) > 1:
            rank, layout = next(iter(found.items()))
            yield (f"in {layout.call} at {layout.place} the tensor of {named([rank])} fills its memory in another "
                   f"order (strides {listed(layout.order)}) than those of the other ranks: gloo takes it as it lies, "
                   "so its elements have changed places: pass x.contiguous() on every rank")
