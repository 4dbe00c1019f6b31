"""L2: what a rank writes, line by line, and how much of it is kept and shown."""
from __future__ import annotations

import bisect
import itertools

# How much of a rank's output is kept, how much of one line, and how much of all ranks' output a cell shows: an endless
# loop of prints must fill up neither the notebook's memory nor the page.
MAX_KEPT_BYTES, MAX_LINE_BYTES, MAX_SHOWN_BYTES = 1 << 22, 1 << 18, 1 << 17


class StreamLines:
    """The lines that a rank wrote to one stream; after `MAX_KEPT_BYTES` further lines are counted, not kept.

    Of a line longer than `MAX_LINE_BYTES` only its head is kept.
    """

    def __init__(self) -> None:
        self.kept: list[str] = []
        self._num_bytes = self._num_dropped = self._num_cut = 0
        self._partial = bytearray()

    def feed(self, data: bytes) -> list[str]:
        """Add bytes that were read, b"" at the end of the stream; returns the lines that are now complete."""
        *whole, rest = data.split(b"\n")
        lines = [self._end(part) for part in whole]
        self._extend(rest)
        if not data and self._partial:
            lines.append(self._end(b""))
        for line in lines:
            self._keep(line)
        return lines

    def _extend(self, part: bytes) -> None:
        room = MAX_LINE_BYTES - len(self._partial)
        self._partial += part[:room]
        self._num_cut += max(0, len(part) - room)

    def _end(self, part: bytes) -> str:
        self._extend(part)
        line = self._partial.decode("utf-8", "replace")
        line += f" ... and {self._num_cut} more bytes in this line" if self._num_cut else ""
        self._partial, self._num_cut = bytearray(), 0
        return line

    def _keep(self, line: str) -> None:
        self._num_bytes += len(line) + 1
        if self._num_bytes <= MAX_KEPT_BYTES:
            self.kept.append(line)
        else:
            self._num_dropped += 1

    def shown(self) -> list[str]:
        """The lines to show; if some were dropped, a last line says how many."""
        return self.kept + ([f"... and more: {self._num_dropped} lines not kept"] if self._num_dropped else [])

    def head(self, limit: int) -> tuple[list[str], int]:
        """The first lines to show that fit into `limit` characters together, and the number of the others.

        A first line that does not fit is cut, and counts as one of the others.
        """
        lines = self.shown()
        ends = list(itertools.accumulate(len(line) + 1 for line in lines))
        num = bisect.bisect_right(ends, limit)
        cut = [f"{lines[0][:limit]} ..."] if lines and not num else []
        return lines[:num] + cut, len(lines) - num
