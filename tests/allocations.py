"""What CUDA's allocator would note of a program on the CPU: a snapshot in the form of torch.cuda.memory._snapshot."""
from __future__ import annotations

import traceback
from typing import Any

from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch import Tensor


class Allocations(TorchDispatchMode):
    """Notes the storages that operations make, with their stacks, and when they are gone; `most` is the peak."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[dict[str, Any]] = []
        self.live: dict[int, tuple[StorageWeakRef, dict[str, Any]]] = {}
        self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.collect()
        given = func(*args, **(kwargs or {}))
        self.collect()
        for tensor in tree_leaves(given):
            if isinstance(tensor, Tensor):
                self._note(tensor)
        return given

    def collect(self) -> None:
        """Note what is gone."""
        for address, (storage, born) in list(self.live.items()):
            if storage.expired():
                self.events.append({**born, "action": "free_requested"})
                self.events.append({**born, "action": "free_completed"})
                del self.live[address]

    def _note(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        address, num_bytes = storage.data_ptr(), storage.nbytes()
        if not num_bytes or address in self.live:
            return
        frames = [{"filename": frame.filename, "line": frame.lineno, "name": frame.name}
                  for frame in reversed(traceback.extract_stack()[:-2])]
        born = {"action": "alloc", "addr": address, "size": num_bytes, "stream": 0, "frames": frames}
        self.events.append(born)
        self.live[address] = StorageWeakRef(storage), born
        self.most = max(self.most, sum(event["size"] for _, event in self.live.values()))

    def snapshot(self, free: tuple[int, ...] = ()) -> dict[str, Any]:
        """What is held, each in a segment whose block is rounded up, and segments that are free."""
        self.collect()
        blocks = [{"address": address, "size": -(-born["size"] // 512) * 512, "requested_size": born["size"],
                   "state": "active_allocated", "frames": born["frames"]} for address, (_, born) in self.live.items()]
        blocks += [{"address": -k - 1, "size": size, "requested_size": 0, "state": "inactive", "frames": []}
                   for k, size in enumerate(free)]
        segments = [{"device": 0, "address": block["address"], "total_size": block["size"], "stream": 0,
                     "segment_type": "large", "allocated_size": block["requested_size"],
                     "active_size": block["requested_size"], "blocks": [block]} for block in blocks]
        return {"segments": segments, "device_traces": [self.events], "allocator_settings": {}}
