"""L2: follow a matrix product that is cut over ranks: which blocks each rank holds, computes and sends.

`trace_product` and `trace_mlp` call a function with whole matrices, the same on every rank, and look at what each
operation of torch gives. What a tensor holds is read off its numbers (see atlas), never from what was expected, so
a missing all-reduce shows as a partial sum and one too many as a sum that counts twice. Collectives come from
the recording of the launch. In a rank's events, by the time at which they start,

    compute  what the rank did, and with which blocks: "24x6 @ 6x48: X[...] of 24x12; A[...] of 12x48"
    hold     a block that the rank has from then on; its contributions count the N parts of the sum in it, then the bias

A matrix that the function was given is held from where it is first used: only what is used must be there.
"""
from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass

from book import record
from book.blocks import Block
from book.device import message_device
from book.launch import rank_device
from book.parallel.atlas import Atlas, Contents, Find, mlp_atlas, product_atlas
from book.record.group import tensors_in
from book.trace import Event

MULTIPLY = ("mm", "addmm", "bmm", "baddbmm")
ELEMENTWISE = {"gelu": ("P", "H"), "gelu_backward": ("dH", "dP")}  # from which matrix to which
NAMESPACES = ("c10d", "_c10d_functional")
WAITS = ("wait_tensor", "_wrap_tensor_autograd")  # what a functional collective is followed by
UNWRAPPED = ("DTensor", "AsyncCollectiveTensor")  # these call themselves with the tensors inside them


def trace_product(fn: Callable[..., torch.Tensor], backward: bool = False, bias: bool = False) -> Any:
    """Call `fn(x, a)`, which computes Y = X A or a block of it on this rank, and add what it does to the trace.

    Runs inside a rank, of 2 to 4: `launch(trace_product, 2, fn, record=True).trace`. X is (24, 12), A (12, 48), in
    float64, whole and the same on every rank. With `backward` the result's gradient follows, with `bias` it is
    `fn(x, a, bias)`. Returns the result; raises ValueError for another number of ranks, TypeError for a result that
    is no tensor.
    """
    num_ranks = _ready()
    return _trace(fn, product_atlas(num_ranks, bias), ["X", "A", "bias"][:2 + bias], backward)


def trace_mlp(fn: Callable[..., torch.Tensor], backward: bool = False) -> Any:
    """Call `fn(x, a, b)`, which computes Y = GELU(X A) B or a block of it, and add what it does to the trace.

    As `trace_product`; X is (24, 12), A (12, 48), B (48, 12).
    """
    return _trace(fn, mlp_atlas(_ready()), ["X", "A", "B"], backward)


def _ready() -> int:
    """Set up the default group if there is none; how many ranks there are."""
    if not dist.is_initialized():
        rank_device()
        dist.init_process_group()
    num_ranks = dist.get_world_size()
    if not 2 <= num_ranks <= 4:
        raise ValueError(f"a cut product is followed on 2 to 4 ranks, and {num_ranks} are running: launch 2, 3 or 4")
    return num_ranks


def _trace(fn: Callable[..., torch.Tensor], atlas: Atlas, names: Sequence[str], backward: bool) -> Any:
    device = message_device()
    given = [atlas.given[name].to(device).requires_grad_(backward) for name in names]
    watcher = _Watcher(atlas)
    watcher.given(names)
    try:
        with watcher:
            result = fn(*given)
        if not isinstance(result, torch.Tensor):
            raise TypeError(f"the function must return the tensor that it computed, not {type(result).__name__}")
        watcher.returned("return", [result], "Y")
        if backward:
            if not result.requires_grad:
                raise ValueError("the result has no gradient to follow: compute it from x with operations that autograd "
                                 "knows, outside torch.no_grad()")
            with watcher:
                result.backward(_gradient_of(result, atlas).to(device))
            for name, tensor in zip(names, given):
                if tensor.grad is not None:
                    watcher.returned("gradient", [tensor.grad], "d" + name)
    finally:
        record.emit(*watcher.events, source="recorded")
    return result.detach()


def _gradient_of(result: torch.Tensor, atlas: Atlas) -> torch.Tensor:
    """The loss's gradient of what a rank returned: of its block of Y, or of all of it."""
    found = atlas.find(result)
    whole = atlas.given["dY"]
    if found is None or found.matrix != "Y":
        return whole if result.shape == whole.shape else torch.ones_like(result)
    block = _block(atlas, found)
    return whole[slice(*block.rows), slice(*block.columns)].reshape(result.shape)


def _block(atlas: Atlas, found: Find) -> Block:
    """The smallest block around all that was found."""
    rows, columns = zip(*found.contents)
    return atlas.block(found.matrix, (min(rows), max(rows) + 1), (min(columns), max(columns) + 1))


class _Watcher(TorchDispatchMode):
    """Sees each operation of a rank's program, forward and backward, and keeps what it tells of the matrices."""

    def __init__(self, atlas: Atlas):
        super().__init__()
        self.events: list[Event] = []
        self._atlas, self._rank = atlas, dist.get_rank()
        self._held: dict[tuple[str, int, int], Contents | None] = {}
        self._sent: list[tuple[float, torch.Tensor, Block | None]] = []  # what collectives under way may have changed
        self._unknown: dict[int, tuple[torch.Tensor, Block]] = {}  # by memory: whose contents nothing explains

    def __torch_dispatch__(self, func: Any, types: Sequence[type], args: tuple = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(kind.__name__ in UNWRAPPED for kind in types):
            return NotImplemented
        if any(kind is not torch.nn.Parameter for kind in types):  # shapes without numbers
            return func(*args, **kwargs)
        name, inputs = func.__name__.partition(".")[0], _plain([args, kwargs])
        if name == "copy_" and _memory(inputs[0]) in {_memory(tensor) for _, tensor, _ in self._sent}:
            return func(*args, **kwargs)  # how a backend fills what its collective gives
        if name in WAITS:  # before it there is no telling what a functional collective has left
            result = func(*args, **kwargs)
            self._arrived(inputs if name == "wait_tensor" else [])
            return result
        self._arrived(inputs if not func.is_view else [])
        if func.namespace in NAMESPACES:
            return self._collective(func, args, kwargs)
        places = [self._place(tensor) for tensor in inputs] if name in MULTIPLY or not func.is_view else []
        start_s = time.monotonic()
        result = func(*args, **kwargs)
        if name in MULTIPLY:
            self._product(inputs[-2:], places[-2:], result, start_s)
        elif inputs and not func.is_view and isinstance(result, torch.Tensor) and "empty" not in name:
            self._changed(name, places, _plain([result])[0], start_s)
        return result

    def given(self, names: Iterable[str]) -> None:
        """Note which matrices there are, and their shapes."""
        whole = (0, self._atlas.num_parts)
        blocks = [self._atlas.block(name, whole, whole) for name in names if name in self._atlas.play]
        self._note("compute", "given: " + "; ".join(map(str, blocks)))

    def returned(self, how: str, tensors: Iterable[torch.Tensor], matrix: str) -> None:
        """Note what the function returned, or which gradient it left, as it is now."""
        waited = [tensor.trigger_wait() if hasattr(tensor, "trigger_wait") else tensor for tensor in tensors]
        for tensor in _plain(waited):
            self._arrived([tensor])
            self._note("compute", how)
            self._hold(tensor, self._place(tensor) or self._guess(tensor, matrix), again=True)

    # What an operation does

    def _product(self, factors: list[torch.Tensor], places: list[Block | None], result: torch.Tensor,
                 start_s: float) -> None:
        """A product of two known factors, or one that gives a known matrix."""
        places = self._with_guess(factors, places)
        into = self._into(places)
        if not any(places) and self._atlas.find(result) is None:
            return
        for factor, place in zip(factors, places):
            self._use(factor, place)
        sizes = " @ ".join("x".join(map(str, factor.shape[-2:])) for factor in factors)
        self._note("compute", f"{sizes}: {'; '.join(map(str, filter(None, places)))}", start_s)
        self._hold(result, into)

    def _changed(self, name: str, places: list[Block | None], result: torch.Tensor, start_s: float) -> None:
        """Any other operation: told where it gives a block that the rank did not hold so."""
        found, place = self._atlas.find(result), next(filter(None, places), None)
        if found is None and (place is None or result.shape[-2:] != place.size):
            return
        source, target = ELEMENTWISE.get(name, ("", ""))
        into = replace(place, matrix=target) if place and place.matrix == source else place
        if found is None and place.matrix != source and not name.endswith("_"):
            self._unknown[_memory(result)] = result, into  # something on the way to a result
        elif found is None or self._is_new(found):
            self._note("compute", f"{name}: {place or ''}", start_s)
            self._hold(result, into)

    def _collective(self, func: Any, args: tuple, kwargs: Any) -> Any:
        """What goes in is read before the call, what comes out when it is next used: by then it is there."""
        named = dict(zip((argument.name for argument in func._schema.arguments), args)) | kwargs
        filled = "output" if not func.__name__.startswith("recv") else "tensors"
        inputs = _plain(value for key, value in named.items() if not key.startswith(filled))
        places, first = [self._place(tensor) for tensor in inputs], len(self.events)
        for tensor, place in zip(inputs, places):
            self._use(tensor, place)
        self._note("compute", "sends: " + "; ".join(map(str, filter(None, places))))
        result = func(*args, **kwargs)
        now_s = time.monotonic()  # after the start of the recorded operation, which these belong to
        self.events[first:] = [replace(event, start_s=now_s, end_s=now_s) for event in self.events[first:]]
        known = {_memory(tensor): place for tensor, place in zip(inputs, places)}
        self._sent += [(now_s, tensor, known.get(_memory(tensor))) for tensor in _plain([args, kwargs, result])]
        return result

    def _arrived(self, tensors: Iterable[torch.Tensor]) -> None:
        """Look at what collectives have left in the memory that is used now."""
        used = {_memory(tensor) for tensor in tensors}
        waiting, self._sent = self._sent, []
        for time_s, tensor, place in waiting:
            if _memory(tensor) in used:
                self._hold(tensor, place, time_s=time_s)
            else:
                self._sent.append((time_s, tensor, place))

    # Where a tensor is, and what it holds

    def _place(self, tensor: torch.Tensor) -> Block | None:
        """The block that a tensor is, by its numbers, or by where it came from if they are unknown."""
        found = self._atlas.find(tensor)
        if found:
            return _block(self._atlas, found)
        kept, place = self._unknown.get(_memory(tensor), (None, None))
        return place if kept is not None and kept.numel() == tensor.numel() else None

    def _into(self, places: list[Block | None]) -> Block | None:
        """The block of which matrix a product of these two blocks is, None if of none."""
        if None in places or len(places) < 2:
            return None
        names = {place.matrix for place in places}
        for matrix in self._atlas.play.values():
            if matrix.summed and {name.removesuffix("ᵀ") for name in matrix.recipe.split()} == names:
                spans = {dim: span for place in places
                         for dim, span in zip(self._atlas.play[place.matrix].dims, (place.rows, place.columns))}
                return Block(matrix.name, spans[matrix.dims[0]], spans[matrix.dims[1]],
                             self._atlas.shape(matrix.name))
        return None

    def _with_guess(self, factors: list[torch.Tensor], places: list[Block | None]) -> list[Block | None]:
        """Where one factor is a block and the other one's numbers are no block's, the other must be meant to be one."""
        if places.count(None) != 1:
            return places
        known = next(filter(None, places)).matrix
        recipes = [[name.removesuffix("ᵀ") for name in m.recipe.split()] for m in self._atlas.play.values() if m.summed]
        other = next((names[1 - names.index(known)] for names in recipes if known in names), "")
        return [place or self._guess(factor, other) for factor, place in zip(factors, places)]

    def _guess(self, tensor: torch.Tensor, matrix: str) -> Block | None:
        """Where a result should be that nothing explains: all of the matrix, or this rank's share."""
        if matrix not in self._atlas.play:
            return None
        whole = self._atlas.shape(matrix)
        if any(own > size for own, size in zip(tensor.shape[-2:], whole)):
            return None
        spans = [(0, self._atlas.num_parts) if own == size else (self._rank, self._rank + 1)
                 for own, size in zip(tensor.shape[-2:], whole)]
        return self._atlas.block(matrix, *spans)

    def _use(self, tensor: torch.Tensor, place: Block | None) -> None:
        """A given block that is used must have been there."""
        if place and not self._atlas.play[place.matrix].recipe:
            self._hold(tensor, place)

    def _is_new(self, found: Find) -> bool:
        matrix = self._atlas.play[found.matrix]
        return bool(matrix.recipe) and any(self._held.get((found.matrix, *at)) != contents
                                           for at, contents in found.contents.items())

    def _hold(self, tensor: torch.Tensor, place: Block | None, time_s: float | None = None,
              again: bool = False) -> None:
        """Note the blocks of a tensor that the rank did not hold so before, or all of them."""
        found = self._atlas.find(tensor)
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
                block = self._atlas.block(name, (row, row + 1), (column, column + 1))
                num_bytes = block.size[0] * block.size[1] * tensor.element_size()
                self._note("hold", str(block), time_s, contents, num_bytes)
        self._held |= tiles

    def _tiles(self, place: Block) -> list[tuple[int, int]]:
        edges = [[edge * self._atlas.num_parts // size for edge in span]
                 for span, size in zip((place.rows, place.columns), place.shape)]
        return [(row, column) for row in range(*edges[0]) for column in range(*edges[1])]

    def _note(self, kind: str, op: str, time_s: float | None = None, contents: Contents | None = None,
              num_bytes: float | None = None) -> None:
        lanes = self._atlas.num_parts + 1
        padded = None if contents is None else (*contents, *[0.0] * (lanes - len(contents)))
        now_s = time.monotonic()
        self.events.append(Event(self._rank, kind, op, num_bytes=num_bytes, start_s=time_s or now_s, end_s=now_s,
                                 contributions=padded))


def _plain(values: Iterable[Any]) -> list[torch.Tensor]:
    """The tensors in `values`; of one that stands for another, as while a collective is under way, that other."""
    tensors = list(tensors_in(values))
    while any(map(is_traceable_wrapper_subclass, tensors)):
        tensors = [getattr(tensor, tensor.__tensor_flatten__()[0][0]) if is_traceable_wrapper_subclass(tensor)
                   else tensor for tensor in tensors]
    return tensors


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
