"""L2: count the bytes that autograd keeps from a forward pass for its backward pass."""
from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor


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


class _Kept:
    """A tensor that autograd has saved."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor.detach()  # a node that saves its own output would keep itself alive forever


def _storage(tensor: torch.Tensor) -> torch.UntypedStorage:
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).untyped_storage()
