"""L2: count the bytes that a forward pass keeps for its backward pass, those of autograd or all."""
from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


if TYPE_CHECKING:
    from typing import Self


class _Hooks(saved_tensors_hooks):
    """Hooks on what autograd saves and gets back, for `with ... as`; `parameters` are left out of what is counted."""

    def __init__(self, keep: Callable[[torch.Tensor], object], give_back: Callable[..., torch.Tensor],
                 parameters: Iterable[torch.Tensor]) -> None:
        super().__init__(keep, give_back)
        self._left_out = {_storage(tensor).data_ptr() for tensor in parameters}

    def __enter__(self) -> Self:
        super().__enter__()
        return self


class saved_for_backward(_Hooks):  # noqa: N801 (a context manager, named as torch names its own)
    """Counts what forward passes in the block keep for backward: `with saved_for_backward(parameters) as kept: ...`.

    `kept.num_bytes` is the total. A storage counts once, however many tensors share it; of a DTensor, only this rank's
    part counts. Tensors listed in `parameters` do not count: parameters stay in memory anyway.
    """

    def __init__(self, parameters: Iterable[torch.Tensor] = ()) -> None:
        super().__init__(self._keep, lambda tensor: tensor, parameters)
        self._storages: dict[int, torch.UntypedStorage] = {}  # kept alive so that no address is reused

    @property
    def num_bytes(self) -> int:
        """Bytes of all storages that were kept."""
        return sum(storage.nbytes() for storage in self._storages.values())

    def _keep(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = _storage(tensor)
        if storage.data_ptr() not in self._left_out:
            self._storages[storage.data_ptr()] = storage
        return tensor


class held_for_backward(_Hooks):  # noqa: N801
    """Tracks what is currently kept for backward: `with held_for_backward(parameters) as held: ...`.

    `held.num_bytes` is what forward passes in the block have kept and no backward pass has freed yet, `held.peak_bytes`
    its maximum so far. Storages and `parameters` count as in `saved_for_backward`.
    """

    def __init__(self, parameters: Iterable[torch.Tensor] = ()) -> None:
        super().__init__(self._keep, lambda kept: kept.tensor, parameters)
        self._users: Counter[int] = Counter()
        self.num_bytes = self.peak_bytes = 0

    def _keep(self, tensor: torch.Tensor) -> _Kept:
        kept, storage = _Kept(tensor), _storage(tensor)
        address, num_bytes = storage.data_ptr(), storage.nbytes()
        if address not in self._left_out:
            self.num_bytes += 0 if self._users[address] else num_bytes
            self.peak_bytes = max(self.peak_bytes, self.num_bytes)
            self._users[address] += 1
            weakref.finalize(kept, self._free, address, num_bytes)
        return kept

    def _free(self, address: int, num_bytes: int) -> None:
        self._users[address] -= 1
        self.num_bytes -= 0 if self._users[address] else num_bytes


class still_held(TorchDispatchMode):  # noqa: N801
    """Counts what the block has computed and somebody still holds: `with still_held(parameters) as held: ...`.

    `held.num_bytes` is the total when it is asked for, whoever holds it: autograd, a variable, or a checkpoint that has
    kept results beside its inputs, which hooks of autograd do not see. A storage counts once, and `parameters` do not.
    """

    def __init__(self, parameters: Iterable[torch.Tensor] = ()) -> None:
        super().__init__()
        self._left_out = {StorageWeakRef(_storage(tensor)).cdata for tensor in parameters}
        self._made: dict[int, tuple[StorageWeakRef, int]] = {}  # a weak reference keeps its address from being reused

    @property
    def num_bytes(self) -> int:
        """Bytes of all storages that are not freed yet."""
        return sum(num_bytes for storage, num_bytes in self._made.values() if not storage.expired())

    def __torch_dispatch__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                storage = _storage(tensor)
                seen = StorageWeakRef(storage)
                if seen.cdata not in self._left_out:
                    self._made[seen.cdata] = seen, storage.nbytes()
        return result


class _Kept:
    """A tensor that autograd has saved."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor.detach()  # a node that saves its own output would keep itself alive forever


def _storage(tensor: torch.Tensor) -> torch.UntypedStorage:
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).untyped_storage()
