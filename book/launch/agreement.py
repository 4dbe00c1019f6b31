"""L2: check that the ranks of a group call the same collective before any of its bytes move.

gloo and NCCL do not compare what ranks call. Two ranks that reduce different dtypes silently get garbage, and two that
call different collectives wait forever or fail with an error about the sizes of gloo's messages. Under `launch` each
rank first writes its call on the `board` and compares it with the calls that are already there. The last rank to call
therefore finds any difference, and no collective can complete before its last rank has called it.
"""
from __future__ import annotations

import functools
import inspect
import threading
import time
import zlib
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from book.launch import where
from book.launch.board import NUM_ALIKE, Board, Call
from book.waiting.hang import Group
from book.words import agree, named

WAIT_S = 2.0  # for ranks that are on their way to the same call, so that the message can name them all


class Kind(NamedTuple):
    """The arguments of a collective that must be the same on all ranks."""
    tensor: str | None = None  # of the same dtype and number of elements
    tensors: str | None = None  # a list of tensors, which may differ from each other
    root: str | None = None  # "src" or "dst"
    reduces: bool = False
    splits: tuple[str, ...] = ()  # where one of these is given, ranks may have different numbers of elements
    members: str | None = None  # the ranks of a new group; all ranks of the world make that call


KINDS = {
    "all_reduce": Kind("tensor", reduces=True),
    "reduce": Kind("tensor", root="dst", reduces=True),
    "broadcast": Kind("tensor", root="src"),
    "all_gather": Kind(tensors="tensor_list"),
    "all_gather_into_tensor": Kind("input_tensor"),
    "all_gather_single": Kind("input_tensor"),
    "gather": Kind("tensor", root="dst"),
    "scatter": Kind("tensor", root="src"),
    "reduce_scatter": Kind(tensors="input_list", reduces=True),
    "reduce_scatter_tensor": Kind("output", reduces=True),
    "reduce_scatter_single": Kind("output", reduces=True),
    "all_to_all_single": Kind("input", splits=("input_split_sizes", "output_split_sizes")),
    "all_to_all": Kind(),
    "barrier": Kind(),
    "new_group": Kind(members="ranks"),
    "all_gather_object": Kind(),
    "gather_object": Kind(root="dst"),
    "broadcast_object_list": Kind(root="src"),
    "scatter_object_list": Kind(root="src"),
}


# How calls may differ, in the order in which the differences are looked for.
DIFFERENCES = (
    "they call different collectives, and must make the same calls in the same order",
    "every rank must call new_group for every group, in the same order, members or not",
    "their tensors have different dtypes, or they pass different numbers of tensors",
    "their tensors have different sizes",
    "they reduce with different operations",
    "they name different roots",
)
assert len(DIFFERENCES) == NUM_ALIKE


class CallMismatch(RuntimeError):
    """The ranks of a group call different collectives, or the same one with tensors that do not fit together."""


def watch(board: Board) -> None:
    """Have the collectives of torch.distributed in this process compare their calls on the board."""
    import torch.distributed as dist
    from torch.distributed import distributed_c10d
    checks = _Checks(board)
    for name, kind in KINDS.items():
        function = getattr(distributed_c10d, name, None)
        if function is not None:
            watched = _watched(function, kind, checks)
            setattr(distributed_c10d, name, watched)
            setattr(dist, name, watched)


def _watched(function: Callable[..., Any], kind: Kind, checks: _Checks) -> Callable[..., Any]:
    described = _Description(function, kind)

    @functools.wraps(function)
    def collective(*args: Any, **options: Any) -> Any:
        with checks.outermost() as is_outermost:
            if not is_outermost:
                return function(*args, **options)
            noted = checks.compare(described, args, options)
            try:
                return function(*args, **options)
            except Exception:
                checks.take_back(noted)  # torch has refused the call: it counts as never made
                raise

    return collective


class _Description:
    """Describes calls of one collective: what must be the same on all ranks, and arguments for a reader."""

    def __init__(self, function: Callable[..., Any], kind: Kind) -> None:
        self.name, self._kind = function.__name__, kind
        parameters = inspect.signature(function).parameters.values()
        self._arguments = {parameter.name: (place, parameter.default) for place, parameter in enumerate(parameters)}

    def argument(self, name: str, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """The value that a call gives to an argument."""
        if name in options:
            return options[name]
        if name not in self._arguments:
            return None  # new_group has no group
        place, default = self._arguments[name]
        return args[place] if place < len(args) else default

    def fields(self, group: Any, args: tuple[Any, ...], options: dict[str, Any]) -> tuple[list[str], str]:
        """What must be the same, one for each of `DIFFERENCES`, and the arguments: "float32 [4], SUM"."""
        kind, dtype, size, op, words = self._kind, "", "", "", []
        if kind.tensor or kind.tensors:
            given = self.argument(kind.tensor or kind.tensors or "", args, options)
            tensors = [given] if kind.tensor else list(given)
            is_split = any(self.argument(name, args, options) for name in kind.splits)
            dtype = " ".join(str(tensor.dtype) for tensor in tensors)
            size = "" if is_split else " ".join(str(tensor.numel()) for tensor in tensors)
            words.append(_shapes(tensors))
        if kind.reduces:
            given = self.argument("op", args, options)
            op = str(getattr(given, "op", given)).rpartition(".")[2]
            words.append(op)
        root = str(self._root(kind.root, group, args, options)) if kind.root else ""
        words += [f"{kind.root}={root}"] if root else []
        members = str(sorted(self.argument(kind.members, args, options) or [])) if kind.members else ""
        words += [members] if members else []
        return [self.name, members, dtype, size, op, root], ", ".join(words)

    def _root(self, side: str, group: Any, args: tuple[Any, ...], options: dict[str, Any]) -> int:
        """The root's rank in the world."""
        root, place = (self.argument(name, args, options) for name in (side, f"group_{side}"))
        if place is None:
            return 0 if root is None else root
        import torch.distributed as dist
        return dist.get_global_rank(group, place) if group is not None else place


def _shapes(tensors: Sequence[Any]) -> str:
    shapes = [f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}" for tensor in tensors]
    if len(shapes) > 1 and len(set(shapes)) == 1:
        return f"{len(shapes)} × {shapes[0]}"
    return ", ".join(shapes[:4] + ["..."] * (len(shapes) > 4))


class _Checks:
    """This rank's calls so far, and their comparison with those of its peers."""

    def __init__(self, board: Board) -> None:
        self._board, self._local = board, threading.local()
        self._numbers: dict[Group, int] = defaultdict(int)

    def outermost(self) -> _Outermost:
        """A context that tells whether a call is the outermost one: collectives call other collectives internally."""
        return _Outermost(self._local)

    def compare(self, called: _Description, args: tuple[Any, ...], options: dict[str, Any]) -> tuple[Group, int] | None:
        """Note a call, and raise `CallMismatch` if a peer's call with the same number differs.

        Returns the group and the call's number, for `take_back`.
        """
        import torch.distributed as dist
        if options.get("use_local_synchronization"):
            return None  # of new_group: then only the members call it
        try:
            group = called.argument("group", args, options) or dist.group.WORLD
            rank, ranks = dist.get_rank(), dist.get_process_group_ranks(group)
            fields, arguments = called.fields(group, args, options)
        except Exception:
            return None  # torch refuses such arguments itself, and says why
        if rank not in ranks:
            return None
        noted = Group(group.group_name, tuple(sorted(ranks)))
        self._numbers[noted] += 1
        alike = tuple(zlib.crc32(field.encode()) for field in fields)
        call = Call(self._numbers[noted], alike, called.name, arguments, *where.caller())
        self._board.note(rank, noted, call)
        for peer in noted.ranks:
            other = self._board.read(peer, noted, call.number) if peer != rank else None
            if other is not None and other.alike != call.alike and not (
                    self._has_refused(peer, noted, call) or self._has_refused(rank, noted, other)):
                raise CallMismatch(self._told(noted, call.number))
        return noted, call.number

    def _has_refused(self, rank: int, group: Group, call: Call) -> bool:
        """Whether torch has refused this call on a rank that has moved on to its next: it will refuse it on all."""
        refused = self._board.refused(rank, group)
        return refused is not None and (refused.number, refused.alike) == (call.number, call.alike)

    def take_back(self, noted: tuple[Group, int] | None) -> None:
        """Take back the last call noted in a group: it counts as never made."""
        if noted is not None:
            import torch.distributed as dist
            group, number = noted
            self._numbers[group] = number - 1
            self._board.refuse(dist.get_rank(), group, number)

    def _told(self, group: Group, number: int) -> str:
        """What each rank of a group calls, once all have called or after `WAIT_S`."""
        end_s = time.monotonic() + WAIT_S
        while True:
            calls = {rank: self._board.read(rank, group, number) for rank in group.ranks}
            if all(calls.values()) or time.monotonic() > end_s:
                return describe({rank: call for rank, call in calls.items() if call})
            time.sleep(0.01)


class _Outermost:
    """A context whose value is True for the outermost of nested calls in a thread, and False for the others."""

    def __init__(self, local: threading.local) -> None:
        self._local = local

    def __enter__(self) -> bool:
        self._local.depth = depth = getattr(self._local, "depth", 0) + 1
        return depth == 1

    def __exit__(self, *_: Any) -> None:
        self._local.depth -= 1


def describe(calls: dict[int, Call]) -> str:
    """How the ranks' calls differ where they should be the same, and what each rank calls."""
    fields = zip(*(call.alike for call in calls.values()))
    differs = next((difference for difference, values in zip(DIFFERENCES, fields) if len(set(values)) > 1), "")
    alike: dict[str, list[int]] = defaultdict(list)
    for rank, call in sorted(calls.items()):
        alike[with_place(call)].append(rank)
    lines = [f"the ranks disagree in a collective: {differs}"]
    return "\n".join([*lines, *(f"  {named(ranks)} {agree('calls', ranks)} {words}" for words, ranks in alike.items())])


def with_place(call: Call) -> str:
    """A call in words: "all_reduce(float32 [4], SUM) at cell line 3: dist.all_reduce(x)"."""
    return f"{call.name}({call.arguments}) at {where.place_of(call.filename, call.line)}"
