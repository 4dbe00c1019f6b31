"""Recorded backward passes as data, for tests that start no process: what a recorder would have noted of a program."""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from book.trace import Event, Trace

Gradients = Sequence[tuple[str, int]]  # names and bytes, in the order they are ready


def recorded(buckets: Mapping[int | None, Gradients], world_size: int = 2, *, at_the_end: bool = False,
             backend: str | None = "gloo", scale: float = 1.0) -> Trace:
    """A measured trace of ranks that fill `buckets` one after the other and all-reduce each when it is full.

    With `at_the_end` they send them when backward is over; the gradients of bucket None are never sent. `scale` is how
    long a thing took.
    """
    events, group = [], tuple(range(world_size))
    for rank in range(world_size):
        now, late = 0, []
        for number, gradients in buckets.items():
            for name, num_bytes in gradients:
                events.append(Event(rank, "compute", name, num_bytes=num_bytes, start_s=now, end_s=now + 1,
                                    bucket=number))
                now += 1
            if number is not None:
                size = sum(num_bytes for _, num_bytes in gradients)
                sent = Event(rank, "collective", "all_reduce", group=group, num_bytes=size, bucket=number)
                (late if at_the_end else events).append(replace(sent, start_s=now + 0.25, end_s=now + 3))
        events += [replace(event, start_s=now + 0.5 + i / 8, end_s=now + 4 + i) for i, event in enumerate(late)]
    times = [replace(event, start_s=event.start_s * scale, end_s=event.end_s * scale) for event in events]
    return Trace(times, world_size, "measured", "recorded", backend=backend)


def layers(num_layers: int, per_bucket: int = 2, width: int = 256) -> dict[int, list[tuple[str, int]]]:
    """The buckets of a stack of linear layers, the last layer's gradients first."""
    found: dict[int, list[tuple[str, int]]] = {}
    for i, layer in enumerate(reversed(range(num_layers))):
        own = [(f"layers.{layer}.bias", 4 * width), (f"layers.{layer}.weight", 4 * width * width)]
        found.setdefault(i // per_bucket, []).extend(own)
    return found
