"""L2: digests of tensors: numbers that are equal where the tensors are, bit for bit.

Of a tensor on a GPU, a digest is a tensor on that GPU, which can be read once `reached()` says so.
"""
from __future__ import annotations

import functools
import time
import zlib
from collections.abc import Iterable
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

HEAD_BYTES = 256  # of a parameter that are looked at in every step: what drifts drifts everywhere
MOST_BYTES = 1 << 16  # of each tensor in a batch
SAMPLES = 64
WORDS = 1 << 20  # that a GPU digests at once
WAIT_S = 1.0  # for GPUs: they may wait for a rank that never comes
ROUNDINGS = {8: 8.0, 4: 8.0, 2: 1.5}  # how many units in the last place a mean may differ by with its order, by size

Digest = Any  # an int, or a tensor on a GPU
_asked: dict[Any, Any] = {}  # the last event of each stream that digests something


def of(tensor: torch.Tensor, most_bytes: int | None = None) -> Digest | None:
    """A digest of a tensor's values, or of its first bytes; None of a kind of tensor that it can't read.

    Of a DTensor, only the part that this rank holds is looked at.
    """
    plain = _own(tensor).detach()
    if type(plain) is not torch.Tensor or plain.layout != torch.strided or plain.is_meta or plain.is_quantized:
        return None
    flat = plain.contiguous().view(-1)
    if most_bytes is not None:
        flat = flat[:most_bytes // flat.itemsize]
    if flat.is_cpu:
        return zlib.crc32(flat.view(torch.uint8).numpy())
    return None if flat.is_cuda and torch.cuda.is_current_stream_capturing() else _on_device(flat.view(torch.uint8))


def _own(tensor: Any) -> Any:
    """The part of a DTensor that this rank holds; any other tensor itself."""
    return getattr(tensor, "_local_tensor", tensor)


def _on_device(flat: torch.Tensor) -> torch.Tensor:
    """The sum of a tensor's words, each times an odd number of its own, modulo 2^64."""
    words = torch.nn.functional.pad(flat, (0, -flat.numel() % 4)).view(torch.int32)
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    for start in range(0, words.numel(), WORDS):
        part = words[start:start + WORDS].long()
        total = total * 31 + (part * _weights(flat.device)[:part.numel()]).sum()
    if flat.is_cuda:
        stream = torch.cuda.current_stream(flat.device)
        _asked[stream] = stream.record_event()
    return total


@functools.cache
def _weights(device: torch.device) -> torch.Tensor:
    return torch.arange(WORDS, device=device) * 0x2545F4914F6CDD1D * 2 + 1


def of_batch(batch: Any) -> Digest | None:
    """A digest of the tensors and numbers in what a loader or a forward gets; None if there are none."""
    leaves = [leaf for leaf in tree_leaves(batch) if leaf is not None]
    on_gpu = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and not leaf.is_cpu]
    if on_gpu:
        return of(on_gpu[0], MOST_BYTES)
    parts = [of(leaf, MOST_BYTES) if isinstance(leaf, torch.Tensor) else repr(leaf)[:MOST_BYTES] for leaf in leaves]
    return zlib.crc32(repr(parts).encode()) if parts else None


def of_random_state(device: torch.device) -> int:
    """A digest of the state of a device's random numbers."""
    state = torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()
    return zlib.crc32(state.numpy())


class Heads:
    """The beginnings of some parameters on the CPU, which take well under a microsecond each to look at again."""

    def __init__(self, parameters: Iterable[torch.Tensor]) -> None:
        self._parameters = [parameter for parameter in parameters if _is_plain(parameter)]
        self._are_own = all(_own(parameter) is parameter for parameter in self._parameters)
        self._addresses: list[int] = []
        self._heads: list[memoryview] = []

    def digest(self) -> int | None:
        """A digest of them as they are now; None if there are none."""
        own = self._parameters if self._are_own else [_own(parameter) for parameter in self._parameters]
        addresses = [tensor.data_ptr() for tensor in own]
        if addresses != self._addresses:
            self._addresses, self._heads = addresses, [_head(tensor) for tensor in own]
        return zlib.crc32(b"".join(self._heads)) if self._heads else None


def _is_plain(parameter: torch.Tensor) -> bool:
    own = _own(parameter)
    return (isinstance(parameter, torch.nn.Parameter) and type(own.detach()) is torch.Tensor
            and own.is_cpu and own.is_contiguous() and own.numel() > 0)


def _head(tensor: torch.Tensor) -> memoryview:
    flat = tensor.detach().view(-1)
    return memoryview(flat[:HEAD_BYTES // flat.itemsize].view(torch.uint8).numpy())


def sample(tensor: torch.Tensor) -> torch.Tensor:
    """Some of a tensor's numbers, on its device."""
    tensor = _own(tensor)
    flat = torch.view_as_real(tensor.detach()).reshape(-1) if tensor.is_complex() else tensor.detach().reshape(-1)
    return flat[::max(1, -(-flat.numel() // SAMPLES))].to(torch.float64, copy=True)


def rounding(tensor: torch.Tensor) -> float:
    """By how much numbers near 1 of a tensor's dtype may differ when a mean is formed in another order."""
    return ROUNDINGS.get(tensor.itemsize, 0.0) * torch.finfo(tensor.dtype).eps if tensor.is_floating_point() else 0.0


def reached() -> bool:
    """Whether the GPUs have computed what they were asked to, after `WAIT_S` at most."""
    end_s = time.monotonic() + WAIT_S
    while not all(event.query() for event in list(_asked.values())):
        if time.monotonic() > end_s:
            return False
        time.sleep(0.001)
    return True
