"""L2: moments on a device's clock, for a program that runs ahead of its device.

Where there is no GPU the program's own times are the ones, and nothing here has anything to correct.
"""
from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

Place = tuple[str, int, str]  # a time in the recording: its rows, the row's index, the time's name


@dataclass(frozen=True)
class Stamp:
    """A moment: when the program passed it, and the mark that it left in a GPU's work (None: that is all there is)."""

    time_ns: int
    event: torch.cuda.Event | None = None


def now(device: torch.device) -> Stamp:
    """This moment, for work on `device`: on a GPU the current stream is marked as well. Not run without a GPU."""
    if device.type != "cuda":
        return Stamp(time.monotonic_ns())
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return Stamp(time.monotonic_ns(), event)


class Clock:
    """Moments on one device, and, once it has done its work, what they were on CLOCK_MONOTONIC.

    A GPU's marks are timed from one that the program waited for at the start, so ranks agree to within that wait
    (tens of microseconds). NCCL's completions are marked on the streams that torch gives a future's callbacks.
    """

    def __init__(self, device: torch.device):
        self._device = device
        self._noted: dict[Place, Stamp] = {}
        self._zero = self.stamp()
        if self._zero.event:
            self._zero.event.synchronize()
            self._zero = Stamp(time.monotonic_ns(), self._zero.event)

    def stamp(self) -> Stamp:
        """Now on this clock's device."""
        return now(self._device)

    def note(self, rows: str, index: int, name: str, stamp: Stamp) -> None:
        """Remember what the time `name` of a row of the recording should be, where the program's own is not it.

        The first stamp for a time counts: a completion may be told of more than once.
        """
        if stamp.event:
            self._noted.setdefault((rows, index, name), stamp)

    def corrections(self) -> Iterator[tuple[str, int, str, int]]:
        """Place and nanoseconds of all that was noted, the arguments of `retime`; waits for the device to get there."""
        noted = [(place, stamp.event) for place, stamp in self._noted.items() if stamp.event]
        zero = self._zero.event
        if zero is None:
            return
        for _, event in noted:
            event.synchronize()
        passed = [self._zero.time_ns + round(zero.elapsed_time(event) * 1e6) for _, event in noted]
        yield from in_program_order([(*place, time_ns) for (place, _), time_ns in zip(noted, passed)])


def in_program_order(times: Sequence[tuple[str, int, str, int]]) -> Iterator[tuple[str, int, str, int]]:
    """Device times (rows, index, name, time) in the order noted, none of a program's own steps before the last one.

    A GPU's clock ticks every half microsecond, so that two marks may have one time; what comes later in the program is
    then a nanosecond later. An operation ends no earlier than it starts; otherwise ends are not in the program's order.
    """
    latest, started = 0, {}
    for rows, index, name, time_ns in times:
        if (rows, name) in (("gradients", "end_ns"), ("operations", "start_ns")):
            time_ns = latest = max(time_ns, latest + 1)
            started[rows, index] = time_ns
        elif (rows, name) == ("operations", "end_ns"):
            time_ns = max(time_ns, started.get((rows, index), time_ns))
        yield rows, index, name, time_ns
