"""Recorded training steps as data, for tests that start no process: what a recorder would have noted of a program."""
from __future__ import annotations

from collections.abc import Mapping

from book.trace import Event, Trace

PHASES = {"input": 0.01, "forward": 0.02, "backward": 0.04, "optimizer": 0.005}  # seconds


def recorded(world_size: int = 4, num_steps: int = 3, *, num_buckets: int = 2, num_bytes: int = 1000,
             own_s: Mapping[str, float] = PHASES) -> Trace:
    """A measured trace of ranks whose steps have these phases, and all-reduces in the backward, all at one pace."""
    events, group = [], tuple(range(world_size))
    for rank in range(world_size):
        now = 0.0
        for _ in range(num_steps):
            for name, seconds in own_s.items():
                events.append(Event(rank, "compute", name, start_s=now, end_s=now + seconds))
                if name == "backward":
                    events += [Event(rank, "collective", "all_reduce", group=group, num_bytes=num_bytes,
                                     start_s=now + seconds * (i + 0.5) / num_buckets, end_s=now + seconds)
                               for i in range(num_buckets)]
                now += seconds
    return Trace(events, world_size, "measured", "recorded", backend="gloo")
