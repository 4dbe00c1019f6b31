"""L2: results of collectives that a backward uses, although autograd does not pass through the collectives themselves.

A tensor that is reduced in place keeps the graph of this rank's own part: a hook on it tells when a backward comes by.
What is gathered has no graph: a backward's graph shows where constants stand beside the part that was gathered. Only
what is used counts: a result that is printed is right, whatever was recorded for it.
"""
from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from book.audit.notes import Notes, PlaceOf, noted
from book.tap import Op, Subscriber
from book.tap.log import Place
from book.tap.place import caller
from book.tap.replaced import replace

if TYPE_CHECKING:
    import torch

SUMS, MEANS = {"SUM", "AVG"}, {"all_reduce", "reduce"}
GATHERS = {"all_gather", "all_gather_into_tensor", "all_gather_single"}
JOINING = {"CatBackward0", "StackBackward0", "CopySlices", "IndexPutBackward0", "SliceScatterBackward0",
           "SelectScatterBackward0"}
MARK = "gathered"
MOST_NODES, MOST_BETWEEN, MOST_PENDING, MOST = 5000, 24, 64, 10


class BackwardUse(NamedTuple):
    """A collective whose result a backward used; `how` is "reduced", "gathered" or, if nothing has a gradient, "cut".
    """
    how: str
    call: str
    is_scalar: bool
    called_at: Place | str | None
    used_at: Place | str | None


class _Gather(NamedTuple):
    """A gather of a tensor with a graph: the node that made it, its rows, and the ranks of the group."""
    op: Op
    num_rows: int
    ranks: tuple[int, ...]


class Passed(Subscriber):
    """Notes results of collectives that backward passes use."""

    def __init__(self) -> None:
        import torch
        self._torch = torch
        self._uses: dict[BackwardUse, tuple[int, ...]] = {}  # with the ranks of the group
        self._gathers: list[_Gather] = []
        self._groups_of_models: set[tuple[int, ...]] = set()
        self._has_exchanged = False  # gradients, by hand
        replace(torch.autograd, "backward", self._around(torch.autograd.backward))

    def told(self, place_of: PlaceOf) -> tuple[BackwardUse, ...]:
        """What is wrong of what was noted, with readable places."""
        return tuple(use._replace(called_at=_readable(use.called_at, place_of),
                                  used_at=_readable(use.used_at, place_of))
                     for use, ranks in list(self._uses.items()) if self._is_wrong(use, ranks))

    def _is_wrong(self, use: BackwardUse, ranks: tuple[int, ...]) -> bool:
        """Whether a gradient lacks the peers' part.

        Ranks that have a part of a model each need no more than their own; those that sum up gradients by hand may have
        scaled the loss for it.
        """
        is_replicated = ranks in self._groups_of_models
        if use.how == "cut" or is_replicated:
            return True
        return use.how == "reduced" and use.is_scalar and not self._has_exchanged

    def wrapped(self, model: Any) -> None:
        ranks = self._torch.distributed.get_process_group_ranks(model.process_group)
        self._groups_of_models.add(tuple(ranks))

    def issued(self, op: Op, tensors: Sequence[torch.Tensor]) -> None:
        if op.kind in ("all_reduce", "reduce_scatter") and tensors and tensors[0].dim() and self._uses and op.function:
            self._has_exchanged = True
        if op.function in MEANS and tensors[0].requires_grad:
            self._reduced(op, tensors[0])
        elif op.function in GATHERS and tensors[-1].requires_grad:
            self._gathered(op, tensors[-1])

    def _reduced(self, op: Op, tensor: torch.Tensor) -> None:
        if tensor.grad_fn is None or not self._torch.is_grad_enabled() or op.reduces not in SUMS or op.place is None:
            return
        call, is_scalar, called_at, ranks = op.function or "", tensor.dim() == 0, op.place, op.group.ranks

        def used(_: torch.Tensor) -> None:
            self._note(BackwardUse("reduced", call, is_scalar, called_at, caller(sys._getframe(1))[1]), ranks)

        tensor.register_hook(used)

    def _gathered(self, op: Op, tensor: torch.Tensor) -> None:
        if tensor.grad_fn is None or not self._torch.is_grad_enabled() or op.place is None:
            return
        if len(self._gathers) < MOST_PENDING:
            tensor.grad_fn.metadata[MARK, op.serial] = None  # the node itself would keep its graph
            self._gathers.append(_Gather(op, tensor.shape[0] if tensor.dim() else 1, op.group.ranks))

    def _note(self, use: BackwardUse, ranks: tuple[int, ...]) -> None:
        if len(self._uses) < MOST:
            self._uses.setdefault(use, ranks)

    def _around(self, backward: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(backward)
        def looked_at(tensors: Any, *args: Any, **options: Any) -> None:
            if self._gathers:
                self._look_at(tensors if isinstance(tensors, (list, tuple)) else [tensors])
            return backward(tensors, *args, **options)

        return looked_at

    def _look_at(self, roots: Sequence[Any]) -> None:
        """Find gathered parts in the graph of a backward that is about to run."""
        gathers, self._gathers = self._gathers, []
        place = caller(sys._getframe(1))[1]
        try:
            if not any(root.requires_grad for root in roots):
                self._note(BackwardUse("cut", gathers[-1].op.function or "", False, gathers[-1].op.place, place), ())
            for gather in gathers:
                nodes = [root.grad_fn for root in roots if root.requires_grad and root.grad_fn is not None]
                if not any(_scale(node) in (len(gather.ranks),) for node in nodes) and any(
                        _is_joined(node, gather) for node in _nodes(nodes)):
                    use = BackwardUse("gathered", gather.op.function or "", False, gather.op.place, place)
                    self._note(use, gather.ranks)
        except Exception:  # a graph of another kind
            return


def _nodes(roots: Sequence[Any]) -> Iterator[Any]:
    """The nodes of a graph, at most `MOST_NODES`."""
    seen, found = set(roots), list(roots)
    while found and len(seen) < MOST_NODES:
        node = found.pop()
        yield node
        for after, _ in node.next_functions:
            if after is not None and after not in seen:
                seen.add(after)
                found.append(after)


def _is_joined(node: Any, gather: _Gather) -> bool:
    """Whether a node joins the gathered part with constants, or multiplies it with as many rows as were gathered."""
    edges = [after for after, _ in node.next_functions]
    if None not in edges or not any(edges):
        return False
    num_all = gather.num_rows * len(gather.ranks)
    if node.name() == "MmBackward0":
        is_right = edges[0] is not None
        sizes = (node._saved_mat2_sym_sizes if is_right else node._saved_self_sym_sizes)
        if sizes[1 if is_right else 0] != num_all:
            return False
    elif node.name().rpartition(":")[2] not in JOINING:
        return False
    return any(_comes_from(edge, gather.op.serial) for edge in edges if edge is not None)


def _comes_from(node: Any, origin: Any) -> bool:
    """Whether a node is the origin, or made of it by a few others."""
    seen, found = {node}, [node]
    while found and len(seen) < MOST_BETWEEN:
        each = found.pop(0)
        if (MARK, origin) in each.metadata:
            return True
        new = [after for after, _ in each.next_functions if after is not None and after not in seen]
        seen.update(new)
        found += new
    return False


def _scale(node: Any) -> float:
    """What a loss was multiplied with at last, where that is plain to see."""
    if node.name() != "MulBackward0" or node.next_functions[0][0] is None:
        return 1.0
    other = node._saved_other
    return float(other) if other is not None else 1.0


def _readable(place: Place | str | None, place_of: PlaceOf) -> str:
    return str(place_of(*place)) if isinstance(place, tuple) else ""


def look(ranks: Sequence[Notes | None]) -> Iterator[str]:
    """Gradients that lack what the other ranks' parts of a result would have given."""
    for use in dict.fromkeys(use for _, use in noted(ranks, "uses")):
        used_at = f" at {use.used_at}" if use.used_at else ""
        result = f"the result of {use.call} at {use.called_at}, which autograd does not pass"
        if use.how == "cut":
            yield (f"there is nothing for backward{used_at}: it has only {result}: "
                   "torch.distributed.nn.functional.all_gather has a gradient")
        elif use.how == "gathered":
            yield (f"backward{used_at} uses {result}: the other ranks' parts are constants, so no gradient flows back "
                   "to the peers: call torch.distributed.nn.functional.all_gather, or gather x.detach() if that is "
                   "meant")
        elif use.is_scalar:
            yield (f"backward{used_at} begins with {result}: the gradient is at best that of the rank's own loss. To "
                   f"show the loss, {use.call} loss.detach(); to train, call backward on each rank's own loss and "
                   "average the gradients, as DDP does")
        else:
            yield (f"backward{used_at} uses {result}: the gradient lacks what this rank's part does to the other "
                   f"ranks' losses: call torch.distributed.nn.functional.{use.call}")
