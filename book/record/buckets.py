"""L2: whose gradients an all-reduce carries, for a module that sends them in its own way.

A tensor that shares memory with gradients is identified with certainty. A copy of several gradients is identified by
the module's own `buckets`, lists of parameters. Anything else stays unknown. Contents are compared only on the CPU: on
a GPU that would block the program until the device has caught up.
"""
from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from weakref import ref

import torch
from torch import nn


class OwnBuckets:
    """The buckets of a module that is not torch's DDP; `parameters` are those that may have gradients."""

    def __init__(self, model: nn.Module, parameters: Iterable[nn.Parameter]):
        self._model, self._parameters = model, list(parameters)
        self._numbers: dict[frozenset[nn.Parameter], int] = {}
        self._arriving: tuple[nn.Parameter, ref[torch.Tensor]] | None = None

    def arrives(self, parameter: nn.Parameter, gradient: torch.Tensor) -> None:
        """Note that a gradient is about to become `parameter.grad` or to be added to it; a hook may send it before.

        Only a weak reference is kept: with a strong one autograd would copy the gradient instead of handing it over.
        """
        self._arriving = parameter, ref(gradient)

    def carried(self, tensors: Sequence[torch.Tensor],
                ready: Mapping[nn.Parameter, int]) -> tuple[int | None, list[nn.Parameter]]:
        """The number of the bucket that an all-reduce of `tensors` carries and its parameters; (None, []) if unknown.

        A bucket's number is its index in the module's `buckets`; unlisted ones are numbered after those, in the order
        of their first all-reduce. `ready` maps parameters whose gradients are ready and unsent to their order.
        """
        inside = [parameter for parameter in self._parameters if any(self._lies_in(parameter, t) for t in tensors)]
        if inside:
            return self._number(frozenset(inside)), inside
        if len(tensors) == 1:
            return self._copied(tensors[0], ready)
        return None, []

    def _number(self, parameters: frozenset[nn.Parameter]) -> int:
        listed = [frozenset(bucket) for bucket in self._listed()]
        if parameters in listed:
            return listed.index(parameters)
        return self._numbers.setdefault(parameters, len(listed) + len(self._numbers))

    def _listed(self) -> list[list[nn.Parameter]]:
        """The module's `buckets`, read again each time because it may rebuild them; empty if not lists of lists."""
        listed = getattr(self._model, "buckets", None)
        known = set(self._parameters)
        if not isinstance(listed, (list, tuple)) or not all(isinstance(bucket, (list, tuple)) for bucket in listed):
            return []
        return [[parameter for parameter in bucket if isinstance(parameter, nn.Parameter) and parameter in known]
                for bucket in listed]

    def _copied(self, copy: torch.Tensor, ready: Mapping[nn.Parameter, int]) -> tuple[int | None, list[nn.Parameter]]:
        """The complete bucket of the copy's size; of several, the one with its contents, or else the first to complete.

        On devices other than the CPU contents are not compared, so it is always the first to complete.
        """
        complete = [(max(ready[parameter] for parameter in bucket), number, bucket)
                    for number, bucket in enumerate(self._listed())
                    if bucket and all(parameter in ready for parameter in bucket)
                    and sum(map(_num_bytes, bucket)) == _num_bytes(copy)]
        compares = len(complete) > 1 and copy.device.type == "cpu"
        fitting = [entry for entry in complete if compares and _holds(copy, entry[2])]
        if not complete:
            return None, []
        _, number, bucket = min(fitting or complete, key=lambda entry: entry[:2])
        return number, bucket

    def _lies_in(self, parameter: nn.Parameter, tensor: torch.Tensor) -> bool:
        arriving = self._arriving[1]() if self._arriving and self._arriving[0] is parameter else None
        where = _memory(tensor)
        for gradient in (parameter.grad, arriving):
            own = _memory(gradient)
            if own and where and where.start <= own.start and own.stop <= where.stop:
                return True
        return False


def _memory(tensor: torch.Tensor | None) -> range | None:
    """The addresses of a tensor's elements; None if it has none, or is sparse."""
    if tensor is None or tensor.layout is not torch.strided or not tensor.numel():
        return None
    return range(tensor.data_ptr(), tensor.data_ptr() + _num_bytes(tensor))


def _num_bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _holds(copy: torch.Tensor, bucket: Sequence[nn.Parameter]) -> bool:
    """Whether `copy` is the gradients of `bucket` end to end, as they are or all scaled by one factor, such as 1/N."""
    gradients = [parameter.grad for parameter in bucket]
    if any(gradient is None or gradient.dtype != copy.dtype for gradient in gradients):
        return False
    flat, own = torch.cat([gradient.reshape(-1) for gradient in gradients]), copy.detach().reshape(-1)
    largest, rounding = flat.abs().argmax(), 8 * torch.finfo(copy.dtype).eps
    return torch.allclose(own / own[largest], flat / flat[largest], rtol=rounding, atol=rounding)  # 0 / 0 gives False
