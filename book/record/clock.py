"""L2: times on a device's clock, for a program that runs ahead of its device.

Without a GPU the program's own times are right, and nothing has to be corrected.
"""
from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

Where = tuple[str, int, str]  # where a time is in the recording: which rows, the row's index, the time's name


@dataclass(frozen=True)
class Stamp:
    """A moment: when the program reached it, and the event it recorded on the GPU's stream (None without a GPU)."""

    time_ns: int
    event: torch.cuda.Event | None = None


def now(device: torch.device) -> Stamp:
    """A stamp of this moment for work on `device`; on a GPU it also records an event on the current stream."""
    if device.type != "cuda":
        return Stamp(time.monotonic_ns())
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return Stamp(time.monotonic_ns(), event)


class Clock:
    """Moments on one device, converted to CLOCK_MONOTONIC once the device has finished its work.

    A GPU's events are timed relative to one that the program waited for at the start, so ranks agree to within the time
    of that wait (tens of microseconds). NCCL's completions are recorded on the streams that torch sets for a future's
    callbacks.
    """

    def __init__(self, device: torch.device):
        self._device = device
        self._noted: dict[Where, Stamp] = {}
        self._zero = self.stamp()
        if self._zero.event:
            self._zero.event.synchronize()
            self._zero = Stamp(time.monotonic_ns(), self._zero.event)

    def stamp(self) -> Stamp:
        """Now on this clock's device."""
        return now(self._device)

    def note(self, rows: str, index: int, name: str, stamp: Stamp) -> None:
        """Remember the device's moment for the time `name` of a row in the recording; does nothing without a GPU.

        Only the first stamp for a time counts: a completion may be reported more than once.
        """
        if stamp.event:
            self._noted.setdefault((rows, index, name), stamp)

    def corrections(self) -> Iterator[tuple[str, int, str, int]]:
        """Place and nanoseconds of each noted time, as `retime` takes them; waits until the device has reached them."""
        noted = [(place, stamp.event) for place, stamp in self._noted.items() if stamp.event]
        zero = self._zero.event
        if zero is None:
            return
        for _, event in noted:
            event.synchronize()
        passed = [self._zero.time_ns + round(zero.elapsed_time(event) * 1e6) for _, event in noted]
        yield from in_program_order([(*place, time_ns) for (place, _), time_ns in zip(noted, passed)])


def in_program_order(times: Sequence[tuple[str, int, str, int]]) -> Iterator[tuple[str, int, str, int]]:
    """Device times (rows, index, name, time) in the order noted, adjusted so that the program's steps never go back.

    A GPU's clock ticks every half microsecond, so two events may have the same time; the one that comes later in the
    program is then moved a nanosecond later. An operation never ends before it starts; otherwise operations may end in
    any order.
    """
    latest, started = 0, {}
    for rows, index, name, time_ns in times:
        if (rows, name) in (("gradients", "end_ns"), ("operations", "start_ns")):
            time_ns = latest = max(time_ns, latest + 1)
            started[rows, index] = time_ns
        elif (rows, name) == ("operations", "end_ns"):
            time_ns = max(time_ns, started.get((rows, index), time_ns))
        yield rows, index, name, time_ns
