"""L2: what a rank's program does with the blocks of given matrices, operation by operation.

A `Watcher` sees every operation that torch dispatches in its block: forward, backward, collectives. It recognizes what
a tensor holds by its values (see known_blocks), never by what is expected. So a missing all-reduce shows up as a
partial sum, and an extra one as a sum whose parts count twice. Its events come on top of the recorder's, by start time:

    compute  what the program did with blocks, as a BlockOp of book.blocks
    hold     a block that the rank has from then on, "Y[0:12, 0:24] of 24x48", and how often each of the N parts of
             its sum, and then the bias, is in it; None if its values are unexplained

A given block counts as held from its first use: a rank needs only the blocks that it uses.
"""
from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass

from book.blocks import BlockOp, MatrixBlock
from book.record.known_blocks import Contents, Find, KnownBlocks
from book.tap.group import tensors_in
from book.trace import Event

MULTIPLY = ("mm", "addmm", "bmm", "baddbmm")
ELEMENTWISE = {"gelu": ("P", "H"), "gelu_backward": ("dH", "dP")}  # from which matrix to which
COLLECTIVES = ("c10d", "_c10d_functional")  # torch's namespaces
WAITS = ("wait_tensor", "_wrap_tensor_autograd")  # follow a functional collective
UNWRAPPED = ("DTensor", "AsyncCollectiveTensor")  # dispatch again with the tensors inside them


def around(known: KnownBlocks, found: Find) -> MatrixBlock:
    """The smallest block that contains everything that was found of a matrix."""
    rows, columns = zip(*found.contents)
    return known.block(found.matrix, (min(rows), max(rows) + 1), (min(columns), max(columns) + 1))


class Watcher(TorchDispatchMode):
    """Sees each operation of a rank's program, forward and backward, and records what that does with the matrices."""

    def __init__(self, known: KnownBlocks, given: Iterable[str]):
        super().__init__()
        self.events: list[Event] = []
        self._known, self._rank = known, dist.get_rank()
        self._held: dict[tuple[str, int, int], Contents | None] = {}
        self._sent: list[tuple[float, torch.Tensor, MatrixBlock | None]] = []  # what pending collectives may change
        self._unknown: dict[int, tuple[torch.Tensor, MatrixBlock]] = {}  # tensors with unexplained values, by address
        shapes = {name: tuple(known.given[name].reshape(-1, known.given[name].shape[-1]).shape) for name in given}
        blocks = [MatrixBlock(name, (0, shape[0]), (0, shape[1]), shape) for name, shape in shapes.items()]
        self._did(BlockOp("given", tuple(blocks)))

    def __torch_dispatch__(self, func: Any, types: Sequence[type], args: tuple = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(kind.__name__ in UNWRAPPED for kind in types):
            return NotImplemented
        if any(kind is not torch.nn.Parameter for kind in types):  # shapes without numbers
            return func(*args, **kwargs)
        name, inputs = func.__name__.partition(".")[0], _plain([args, kwargs])
        if name == "copy_" and _memory(inputs[0]) in {_memory(tensor) for _, tensor, _ in self._sent}:
            return func(*args, **kwargs)  # a backend filling its collective's output
        if name in WAITS:  # a functional collective's output is undefined before this
            result = func(*args, **kwargs)
            self._arrived(inputs if name == "wait_tensor" else [])
            return result
        self._arrived(inputs if not func.is_view else [])
        if func.namespace in COLLECTIVES:
            return self._collective(func, args, kwargs)
        places = [self._place(tensor) for tensor in inputs] if name in MULTIPLY or not func.is_view else []
        start_s = time.monotonic()
        result = func(*args, **kwargs)
        if name in MULTIPLY:
            self._product(inputs[-2:], places[-2:], result, start_s)
        elif inputs and not func.is_view and isinstance(result, torch.Tensor) and "empty" not in name:
            self._changed(name, places, _plain([result])[0], start_s)
        return result

    def ends_with(self, tensor: torch.Tensor, matrix: str, how: str) -> None:
        """Record that `tensor` is a result: a block of `matrix`, given in the way `how` ("return" or "gradient")."""
        (tensor,) = _plain([tensor.trigger_wait() if hasattr(tensor, "trigger_wait") else tensor])
        self._arrived([tensor])
        self._did(BlockOp(how))
        self._hold(tensor, self._place(tensor) or self._guess(tensor, matrix), again=True)

    # What an operation does

    def _product(self, factors: list[torch.Tensor], places: list[MatrixBlock | None], result: torch.Tensor,
                 start_s: float) -> None:
        """Record a product of two known factors, or one whose result is part of a known matrix."""
        places = self._with_guess(factors, places)
        into = self._into(places)
        if not any(places) and self._known.find(result) is None:
            return
        for factor, place in zip(factors, places):
            self._use(factor, place)
        sizes = tuple(tuple(factor.shape[-2:]) for factor in factors)
        self._did(BlockOp("multiply", _known(places), factors=sizes), start_s)
        self._hold(result, into)

    def _changed(self, name: str, places: list[MatrixBlock | None], result: torch.Tensor, start_s: float) -> None:
        """Record any other operation if its result is a block that the rank did not hold in this form before."""
        found, place = self._known.find(result), next(filter(None, places), None)
        if found is None and (place is None or result.shape[-2:] != place.size):
            return
        source, target = ELEMENTWISE.get(name, ("", ""))
        into = replace(place, matrix=target) if place and place.matrix == source else place
        if found is None and place.matrix != source and not name.endswith("_"):
            self._unknown[_memory(result)] = result, into  # an intermediate result
        elif found is None or self._is_new(found):
            self._did(BlockOp("apply", _known([place]), name), start_s)
            self._hold(result, into)

    def _collective(self, func: Any, args: tuple, kwargs: Any) -> Any:
        """Record a collective: inputs are read before the call, outputs at their next use, when they are complete."""
        named = dict(zip((argument.name for argument in func._schema.arguments), args)) | kwargs
        filled = "output" if not func.__name__.startswith("recv") else "tensors"
        inputs = _plain(value for key, value in named.items() if not key.startswith(filled))
        places, first = [self._place(tensor) for tensor in inputs], len(self.events)
        for tensor, place in zip(inputs, places):
            self._use(tensor, place)
        self._did(BlockOp("sends", _known(places)))
        result = func(*args, **kwargs)
        now_s = time.monotonic()  # after the start of the recorded operation that these belong to
        self.events[first:] = [replace(event, start_s=now_s, end_s=now_s) for event in self.events[first:]]
        known = {_memory(tensor): place for tensor, place in zip(inputs, places)}
        self._sent += [(now_s, tensor, known.get(_memory(tensor))) for tensor in _plain([args, kwargs, result])]
        return result

    def _arrived(self, tensors: Iterable[torch.Tensor]) -> None:
        """Read what collectives have written to the memory that is about to be used."""
        used = [_span(tensor) for tensor in tensors]
        waiting, self._sent = self._sent, []
        for time_s, tensor, place in waiting:
            span = _span(tensor)
            if any(span.start < other.stop and other.start < span.stop for other in used):
                self._hold(tensor, place, time_s=time_s)
            else:
                self._sent.append((time_s, tensor, place))

    # Where a tensor is, and what it holds

    def _place(self, tensor: torch.Tensor) -> MatrixBlock | None:
        """The block that a tensor is, by its values, or by where it came from if they are unknown."""
        found = self._known.find(tensor)
        if found:
            return around(self._known, found)
        kept, place = self._unknown.get(_memory(tensor), (None, None))
        return place if kept is not None and kept.numel() == tensor.numel() else None

    def _into(self, places: list[MatrixBlock | None]) -> MatrixBlock | None:
        """The block that the product of these two blocks is; None if it is not part of any matrix."""
        if None in places or len(places) < 2:
            return None
        names = {place.matrix for place in places}
        for matrix in self._known.play.values():
            if matrix.summed and set(matrix.factors) == names:
                spans = {dim: span for place in places
                         for dim, span in zip(self._known.play[place.matrix].dims, (place.rows, place.columns))}
                return MatrixBlock(matrix.name, spans[matrix.dims[0]], spans[matrix.dims[1]],
                                   self._known.shape(matrix.name))
        return None

    def _with_guess(self, factors: list[torch.Tensor], places: list[MatrixBlock | None]) -> list[MatrixBlock | None]:
        """The factors' places; if only one is known, the other is guessed to be the block that belongs with it."""
        if places.count(None) != 1:
            return places
        known = next(filter(None, places)).matrix
        factors_of = [matrix.factors for matrix in self._known.play.values() if matrix.summed]
        other = next((names[1 - names.index(known)] for names in factors_of if known in names), "")
        return [place or self._guess(factor, other) for factor, place in zip(factors, places)]

    def _guess(self, tensor: torch.Tensor, matrix: str) -> MatrixBlock | None:
        """Where an unexplained result should be: per dimension the whole matrix if it fits, else this rank's part."""
        if matrix not in self._known.play:
            return None
        whole = self._known.shape(matrix)
        if any(own > size for own, size in zip(tensor.shape[-2:], whole)):
            return None
        spans = [(0, self._known.num_parts) if own == size else (self._rank, self._rank + 1)
                 for own, size in zip(tensor.shape[-2:], whole)]
        return self._known.block(matrix, *spans)

    def _use(self, tensor: torch.Tensor, place: MatrixBlock | None) -> None:
        """Record that a given block is held, since it is used."""
        if place and not self._known.play[place.matrix].recipe:
            self._hold(tensor, place)

    def _is_new(self, found: Find) -> bool:
        matrix = self._known.play[found.matrix]
        return bool(matrix.recipe) and any(self._held.get((found.matrix, *at)) != contents
                                           for at, contents in found.contents.items())

    def _hold(self, tensor: torch.Tensor, place: MatrixBlock | None, time_s: float | None = None,
              again: bool = False) -> None:
        """Record the blocks of a tensor that the rank did not hold in this form before; with `again`, all of them."""
        found = self._known.find(tensor)
        if found:
            self._unknown.pop(_memory(tensor), None)
            tiles = {(found.matrix, *at): contents for at, contents in found.contents.items()}
        elif place:
            self._unknown[_memory(tensor)] = tensor, place
            tiles = {(place.matrix, *at): None for at in self._tiles(place)}
        else:
            return
        for (name, row, column), contents in tiles.items():
            if again or (name, row, column) not in self._held or self._held[name, row, column] != contents:
                block = self._known.block(name, (row, row + 1), (column, column + 1))
                num_bytes = block.size[0] * block.size[1] * tensor.element_size()
                self._note("hold", str(block), time_s, contents, num_bytes)
        self._held |= tiles

    def _tiles(self, place: MatrixBlock) -> list[tuple[int, int]]:
        edges = [[edge * self._known.num_parts // size for edge in span]
                 for span, size in zip((place.rows, place.columns), place.shape)]
        return [(row, column) for row in range(*edges[0]) for column in range(*edges[1])]

    def _did(self, op: BlockOp, time_s: float | None = None) -> None:
        self._note("compute", str(op), time_s)

    def _note(self, kind: str, op: str, time_s: float | None = None, contents: Contents | None = None,
              num_bytes: float | None = None) -> None:
        lanes = self._known.num_parts + 1
        padded = None if contents is None else (*contents, *[0.0] * (lanes - len(contents)))
        now_s = time.monotonic()
        self.events.append(Event(self._rank, kind, op, num_bytes=num_bytes, start_s=time_s or now_s, end_s=now_s,
                                 contributions=padded))


def _known(places: Iterable[MatrixBlock | None]) -> tuple[MatrixBlock, ...]:
    return tuple(place for place in places if place)


def _plain(values: Iterable[Any]) -> list[torch.Tensor]:
    """The tensors in `values`; a wrapper, such as that of a pending collective, is replaced by the tensor inside."""
    tensors = list(tensors_in(values))
    while any(map(is_traceable_wrapper_subclass, tensors)):
        tensors = [getattr(tensor, tensor.__tensor_flatten__()[0][0]) if is_traceable_wrapper_subclass(tensor)
                   else tensor for tensor in tensors]
    return tensors


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _span(tensor: torch.Tensor) -> range:
    """The addresses from a tensor's first element to its last."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
    return range(tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size() * (tensor.numel() > 0))
