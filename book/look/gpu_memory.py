"""L1: snapshots of CUDA's allocator, as torch.cuda.memory._dump_snapshot writes them: what holds a GPU's memory.

Blocks and events carry the call stack of their allocation, if the history was recorded. The part of the model that a
block belongs to is read from its stack: its innermost frame that says one.
"""
from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from book.look.dumps import LIBRARIES, DumpError, loaded

HEAD = 4096  # bytes of a file in which a snapshot shows: "segments" is its first key
PARAMETERS, MADE, OPTIMIZER, GATHERED, REDUCED, BUCKETS, BACKWARD, FORWARD, NO_FRAMES, OTHER = (
    "parameters", "made in __init__", "optimizer", "gathered by FSDP", "reduced by FSDP", "DDP's buckets", "backward",
    "forward", "no Python frames", "other code")
FSDP, DDP = "torch/distributed/fsdp/", "torch/nn/parallel/distributed.py"
# A frame whose file has the first and whose function is the second says which part it is; "" is any.
SIGNS = (("/optim/", "", OPTIMIZER), ("/optimizer/", "", OPTIMIZER), ("/optimizers/", "", OPTIMIZER),
         (FSDP, "foreach_all_gather", GATHERED), (FSDP, "init_all_gather_outputs", GATHERED),
         (FSDP, "alloc_all_gather_outputs", GATHERED), (FSDP, "foreach_all_gather_copy_out", GATHERED),
         (FSDP, "foreach_reduce", REDUCED), (FSDP, "to_accumulated_grad_if_needed", REDUCED),
         (FSDP, "_init_sharded_param", PARAMETERS), (FSDP, "reset_sharded_param", PARAMETERS),
         (DDP, "_ddp_init_helper", BUCKETS), (DDP, "_pre_forward", BUCKETS),
         ("torch/nn/modules/", "_apply", PARAMETERS), ("torch/nn/modules/", "__init__", PARAMETERS),
         ("", "backward", BACKWARD), ("", "forward", FORWARD))
ENGINE = "torch::autograd::Engine"  # in C++ frames, which a stack may have too
SOURCES = (".py", ">")  # how a Python frame's file ends, such as "<stdin>"
Held = Mapping[int, tuple[int, Sequence[Mapping[str, Any]]]]  # by address: bytes, frames of the allocation


@dataclass(frozen=True)
class Part:
    """Tensors of one part of the model that one line allocated: their bytes, and how many there are."""

    name: str
    place: str
    num_bytes: int
    count: int


@dataclass(frozen=True)
class GpuMemory:
    """Memory of one GPU, in bytes.

    `reserved` is what the allocator has of the GPU, `held` what tensors hold of that at the end, `largest_free` the
    longest stretch of the rest. `peak` is the most that was held since the history began, by `parts` then, the largest
    first. `asked` and `left` are of the last request that was refused: its bytes, and what the GPU still had;
    `held_then` is what tensors held at that time, and `is_then` says that nothing has changed since.
    """

    device: int
    reserved: int
    held: int
    largest_free: int
    peak: int
    parts: tuple[Part, ...]
    has_history: bool
    asked: int = 0
    left: int = 0
    held_then: int = 0
    is_then: bool = False


def is_snapshot(path: Path) -> bool:
    """Whether a file begins like a snapshot."""
    try:
        with path.open("rb") as file:
            head = file.read(HEAD)
    except OSError:
        return False  # whoever reads it says why
    return head[:1] == b"\x80" and b"segments" in head


def read_snapshot(path: Path) -> list[GpuMemory]:
    """A snapshot of each GPU that has memory in the file; raises DumpError, which names the file."""
    found = loaded(path)
    try:
        segments, traces = found["segments"], list(found.get("device_traces") or ())
        devices = sorted({int(segment.get("device", 0)) for segment in segments}
                         | {device for device, events in enumerate(traces) if events})
        snapshots = [_snapshot(device, [one for one in segments if int(one.get("device", 0)) == device],
                               traces[device] if device < len(traces) else ()) for device in devices]
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise DumpError(f"{path} is no memory snapshot as torch writes it: {type(error).__name__} "
                            f"{error}") from None
    if not snapshots:
        raise DumpError(f"{path} is a snapshot of no memory: nothing had been allocated on a GPU")
    return snapshots


def _snapshot(device: int, segments: Sequence[Mapping[str, Any]], events: Sequence[Mapping[str, Any]]) -> GpuMemory:
    blocks = [block for segment in segments for block in segment["blocks"]]
    free = [int(block["size"]) for block in blocks if block["state"] == "inactive"]
    held = {int(block["address"]): (int(block.get("requested_size", block["size"])), block.get("frames") or ())
            for block in blocks if block["state"] != "inactive"}
    peak, then = _at_peak(held, events)
    return GpuMemory(device, sum(int(segment["total_size"]) for segment in segments), _total(held),
                     max(free, default=0), peak, _parts(then), bool(events) or any(of for _, of in held.values()),
                     *_refused(held, events))


def _refused(held: Held, events: Sequence[Mapping[str, Any]]) -> tuple[int, int, int, bool] | tuple[()]:
    """Of the last request that was refused: its bytes, those left, those held then, whether this is still so."""
    at = next((place for place in range(len(events) - 1, -1, -1) if events[place]["action"] == "oom"), None)
    if at is None:
        return ()
    since = events[at + 1:]
    return (int(events[at]["size"]), int(events[at].get("device_free", 0)),
            _total(held) + sum(num_bytes for _, num_bytes, _ in _undone(since)),
            not {event["action"] for event in since} - {"snapshot"})


def _at_peak(held: Held, events: Sequence[Mapping[str, Any]]) -> tuple[int, Held]:
    """The most bytes held at once, and by what: events undone one by one, from what is held after the last."""
    undone = list(_undone(events))
    total, most, when = _total(held), _total(held), 0
    for number, (_, num_bytes, _) in enumerate(undone, 1):
        total += num_bytes
        if total > most:
            most, when = total, number
    then = dict(held)
    for address, num_bytes, frames in undone[:when]:
        if num_bytes < 0:
            then.pop(address, None)
        else:
            then[address] = num_bytes, frames
    return most, then


def _undone(events: Sequence[Mapping[str, Any]]) -> Iterator[tuple[int, int, Sequence[Mapping[str, Any]]]]:
    """Of each event, the last first: an address, the bytes that are held more before it, the frames of who holds them.

    A block that was allocated before the history began has no frames.
    """
    stacks: dict[int, Sequence[Mapping[str, Any]]] = {}
    changes = []
    for event in events:
        address, num_bytes = int(event.get("addr", 0)), int(event["size"])
        if event["action"] == "alloc":
            stacks[address] = event.get("frames") or ()
            changes.append((address, -num_bytes, stacks[address]))
        elif event["action"] == "free_completed":
            changes.append((address, num_bytes, stacks.pop(address, ())))
    return reversed(changes)


def _total(held: Held) -> int:
    return sum(num_bytes for num_bytes, _ in held.values())


def _parts(held: Held) -> tuple[Part, ...]:
    """What is held, by part and line."""
    sums: dict[tuple[str, str], tuple[int, int]] = {}
    for num_bytes, frames in held.values():
        key = part_of(frames), _place(frames)
        before, count = sums.get(key, (0, 0))
        sums[key] = before + num_bytes, count + 1
    found = (Part(*key, num_bytes, count) for key, (num_bytes, count) in sums.items())
    return tuple(sorted(found, key=lambda part: -part.num_bytes))


def part_of(frames: Sequence[Mapping[str, Any]]) -> str:
    """The part of the model that a stack is of, the innermost frame first; backward's own threads have no Python."""
    for frame in frames:
        path = str(frame["filename"]).replace("\\", "/")
        for file, function, part in SIGNS:
            if file in path and function in ("", frame["name"]):
                return part
    if any(frame["name"] == "__init__" for frame in frames):
        return MADE  # parameters of a module that is built on the GPU, as a rule
    if any(str(frame["name"]).startswith(ENGINE) for frame in frames):
        return BACKWARD
    return OTHER if any(str(frame["filename"]).endswith(SOURCES) for frame in frames) else NO_FRAMES


def _place(frames: Sequence[Mapping[str, Any]]) -> str:
    """The innermost frame that is the program's, as "train.py:17 in forward"; "" if none is."""
    for frame in frames:
        path = str(frame["filename"]).replace("\\", "/")
        if path.endswith(SOURCES) and not any(part in path for part in LIBRARIES):
            return f"{path.rpartition('/')[2]}:{int(frame['line'])} in {frame['name']}"
    return ""
