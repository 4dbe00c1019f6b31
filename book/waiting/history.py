"""L1: how often each line of a rank has made a call, and in which order: where ranks fell out of step."""
from __future__ import annotations

from typing import NamedTuple


class Condition(NamedTuple):
    """What decides whether a line is reached: it is "under", "after" or "in the else of" the text "if rank == 0"."""
    how: str
    text: str


class Handler(NamedTuple):
    """What catches an error at a line: "except MemoryError", and the place at which the rank goes on then."""
    text: str
    goes_on: str


class CallSite(NamedTuple):
    """A line that calls something; the same source is equal on all ranks. `number` is 0 if it is not known."""
    place: str = ""  # "train.py line 7: dist.all_reduce(x)"
    number: int = 0
    loop: str = ""  # the head of the loop around it: "for name in losses"
    condition: Condition | None = None
    handler: Handler | None = None
    block: int = 0  # the line of the `try` that the handler belongs to
    leaves: str = ""  # what may end a loop around it: "if bad_epochs > 3: break"


class SiteCall(NamedTuple):
    """A line, and what it calls: "all_reduce", of "DDP" if torch makes the call for it."""
    line: CallSite
    call: str
    owner: str = ""
    in_backward: bool = False


class History(NamedTuple):
    """The calls of a rank in one group: how often it has made each, and which were the last ones, as keys of `counts`.

    A line that makes several calls per batch, as DDP does in backward, counts once for each batch.
    """
    total: int
    counts: dict[SiteCall, int]
    last: tuple[SiteCall, ...]
    is_done: bool | None  # whether the last one is, as far as the program knows; None if DDP waits for it

    def at(self, number: int) -> SiteCall:
        """The call with this number, from 1; it must be among the last ones."""
        return self.last[number - self.total - 1]


class Model(NamedTuple):
    """A model in DDP: its batches (forwards in training, with gradients), and how often each line has run it so that
    DDP may call other ranks."""
    num_batches: int
    forwards: dict[CallSite, int]
