"""L2: count the bytes that autograd keeps from a forward pass for its backward pass."""
from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks


class saved_for_backward(saved_tensors_hooks):  # noqa: N801 (a context manager, named as torch names its own)
    """Counts what is kept for backward from the forwards inside: `with saved_for_backward(parameters) as kept: ...`.

    `kept.num_bytes` is their sum. A storage counts once, however many tensors share it. `parameters`, which stay in
    memory anyway, do not count, and nor does anything else that is listed there.
    """

    def __init__(self, parameters: Iterable[torch.Tensor] = ()) -> None:
        super().__init__(self._keep, lambda tensor: tensor)
        self._left_out = {tensor.untyped_storage().data_ptr() for tensor in parameters}
        self._storages: dict[int, torch.UntypedStorage] = {}  # held, so that no address is used twice

    def __enter__(self) -> saved_for_backward:
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)

    @property
    def num_bytes(self) -> int:
        """Bytes of all storages that were kept."""
        return sum(storage.nbytes() for storage in self._storages.values())

    def _keep(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._left_out:
            self._storages[storage.data_ptr()] = storage
        return tensor
