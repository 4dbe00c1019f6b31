"""L2: carry values between the launcher and its ranks: a pickle, and beside it a file with the large buffers.

The sender writes each buffer once and the receiver maps the file, so a result in transit takes no more memory than its
own size, and no buffer goes through a pipe.
"""
from __future__ import annotations

import io
import mmap
import os
import pickle
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.reduction import DupFd
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch.storage import TypedStorage

LARGE_BYTES = 1 << 16  # smaller buffers stay in the pickle
_ALIGNMENT = 64


@dataclass(frozen=True)
class Packed:
    """A pickled value, and the sizes of the buffers that it has in a file."""
    head: bytes
    sizes: tuple[int, ...] = ()


class SharedFile:
    """A file without a name; a process that multiprocessing starts with it as an argument shares it."""

    def __init__(self, file: int | None = None) -> None:
        self._file = new_file() if file is None else file

    def __reduce__(self) -> tuple[Any, ...]:
        return _shared, (DupFd(self._file),)

    def close(self) -> None:
        """Close the file; what was unpacked from it stays."""
        os.close(self._file)

    def write(self, buffers: Sequence[memoryview]) -> None:
        """Replace the content with these buffers, each at a multiple of 64 bytes. Raises OSError without room."""
        os.ftruncate(self._file, 0)
        for at, buffer in zip(_places([len(buffer) for buffer in buffers]), buffers):
            while buffer:
                written = os.pwrite(self._file, buffer, at)  # one call writes 2 GiB at most
                at, buffer = at + written, buffer[written:]

    def buffers(self, sizes: Sequence[int]) -> list[memoryview]:
        """Private buffers of these sizes; pages that nobody changes stay shared with the file."""
        if not sizes:
            return []
        places = _places(sizes)
        own = {"flags": mmap.MAP_PRIVATE, "prot": mmap.PROT_READ | mmap.PROT_WRITE}
        memory = memoryview(mmap.mmap(self._file, places[-1] + sizes[-1], **own))
        return [memory[at:at + size] for at, size in zip(places, sizes)]


def new_file(num_bytes: int = 0) -> int:
    """An open file without a name, in memory if the system has such files; untouched pages take no memory."""
    try:
        file = os.memfd_create("lockstep")
    except (AttributeError, OSError):  # not on Linux, or a sandbox forbids it
        with tempfile.TemporaryFile() as temporary:
            file = os.dup(temporary.fileno())
    os.ftruncate(file, num_bytes)
    return file


def packed(value: Any, file: SharedFile, reduced: Callable[[Any], Any] = lambda obj: NotImplemented,
           copied: bool = False) -> Packed:
    """Pickle `value` by value, and write its large buffers into `file`.

    `reduced(obj)` is asked first how an object is pickled, like `pickle.Pickler.reducer_override`. The receiver's large
    tensors lie in the mapped file and can't be resized; with `copied`, they lie in memory of their own. Raises what
    pickling raises.
    """
    buffers: list[memoryview] = []

    def beside(buffer: pickle.PickleBuffer) -> bool:
        """Take a large buffer out of the pickle; True for a small one, which stays in it."""
        raw = buffer.raw()
        small = raw.nbytes < LARGE_BYTES
        if not small:
            buffers.append(raw)
        return small

    head = pickled(value, reduced, copied, beside)
    try:
        file.write(buffers)
    except OSError:  # no room for a file: take the pipe
        return Packed(pickled(value, reduced, copied))
    return Packed(head, tuple(buffer.nbytes for buffer in buffers))


def unpacked(value: Packed, file: SharedFile) -> Any:
    """The value that was packed; its large buffers lie in the file. Raises what unpickling raises."""
    return pickle.loads(value.head, buffers=file.buffers(value.sizes))


def pickled(value: Any, reduced: Callable[[Any], Any], copied: bool = False,
            beside: Callable[[pickle.PickleBuffer], bool] | None = None) -> bytes:
    """`value` pickled by value, without the buffers that `beside` takes; for the rest see `packed`."""
    import cloudpickle
    from torch.storage import TypedStorage

    class Pickler(cloudpickle.Pickler):
        def reducer_override(self, obj: Any) -> Any:
            found = reduced(obj)
            if found is not NotImplemented:
                return found
            if isinstance(obj, TypedStorage) and _is_large(obj):
                return _storage, (pickle.PickleBuffer(_bytes(obj)), obj.dtype, copied)
            return super().reducer_override(obj)

    stream = io.BytesIO()
    Pickler(stream, protocol=pickle.HIGHEST_PROTOCOL, buffer_callback=beside).dump(value)
    return stream.getvalue()


def _is_large(storage: TypedStorage) -> bool:
    """Whether this is at least `LARGE_BYTES` of the CPU's memory."""
    untyped = storage._untyped_storage
    return untyped.device.type == "cpu" and untyped.nbytes() >= LARGE_BYTES


def _bytes(storage: TypedStorage) -> memoryview:
    import torch
    return torch.empty(0, dtype=torch.uint8).set_(storage._untyped_storage).numpy().data


def _storage(buffer: Any, dtype: torch.dtype, copied: bool) -> TypedStorage:
    import torch
    values = torch.frombuffer(buffer, dtype=torch.uint8)
    wrapped = (values.clone() if copied else values).untyped_storage()
    return torch.storage.TypedStorage(wrap_storage=wrapped, dtype=dtype, _internal=True)


def _shared(file: Any) -> SharedFile:
    return SharedFile(file.detach())


def _places(sizes: Sequence[int]) -> list[int]:
    """Where buffers of these sizes begin."""
    places, at = [], 0
    for size in sizes:
        places.append(at)
        at += -(-size // _ALIGNMENT) * _ALIGNMENT
    return places
