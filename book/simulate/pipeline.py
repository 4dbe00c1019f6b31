"""L2: what a pipeline would do with forwards and backwards of given lengths.

A rank runs its actions in its own order, each as soon as the one before is done and what it needs has arrived: a
forward needs the output of the stage before, a backward the gradient of the stage after. Messages from one rank to
another leave one after the other, each when it is ready; a rank computes while its messages travel. Nothing travels
between two stages of one rank.
"""
from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

from book.cost import Link
from book.schedule import Action, PipelineSchedule, Work, taker_of
from book.trace import Event, Trace


def simulate_pipeline(schedule: PipelineSchedule, forward_s: float, backward_s: float, weight_s: float | None = None,
                      link: Link | None = None, *, num_bytes: float = 0.0,
                      slowdown: Mapping[int, float] | None = None,
                      links: Mapping[tuple[int, int], Link] | None = None) -> Trace:
    """The trace that `schedule` leaves when a forward of one stage takes `forward_s` and a backward `backward_s`.

    `weight_s` is the part of a backward that goes to the weights (default: half): W takes that long, I the rest.
    `slowdown` maps a rank to the factor on its times. With `link` each output, and each gradient on its way back, is a
    message of `num_bytes` between two ranks; without, they arrive at once. `links` maps (src, dst) to the link between
    just those two. Events are, for every action, a compute event whose `op` is its kind, and for every message a send
    and a recv with the micro-batch, and the stage that it comes from. Raises ValueError for impossible times and ranks,
    ScheduleError for an order that cannot run.
    """
    weight_s = backward_s / 2 if weight_s is None else weight_s
    if not (forward_s >= 0 and 0 <= weight_s <= backward_s < float("inf") and num_bytes >= 0):
        raise ValueError(f"forward_s ({forward_s}), backward_s ({backward_s}) and num_bytes ({num_bytes}) must not be "
                         f"negative, and weight_s ({weight_s}) is a part of backward_s")
    _check_ranks(schedule.world_size, slowdown or {}, links or {})
    lengths = {"F": forward_s, "B": backward_s, "I": backward_s - weight_s, "W": weight_s}
    run = _Run(schedule, lengths, slowdown or {}, link, links or {}, num_bytes)
    for action in schedule.runnable():
        run.take(action)
    events = sorted(run.events, key=lambda event: (event.start_s, event.end_s, event.rank))
    return Trace(events, schedule.world_size, "modelled", "simulated", name=schedule.name)


def _check_ranks(world_size: int, slowdown: Mapping[int, float], links: Mapping[tuple[int, int], Link]) -> None:
    for rank, factor in slowdown.items():
        if not (0 <= rank < world_size and 0 < factor < float("inf")):
            raise ValueError(f"slowdown: rank {rank} with factor {factor} is not possible: ranks are 0 to "
                             f"{world_size - 1} and factors positive")
    for src, dst in links:
        if not (0 <= src < world_size and 0 <= dst < world_size and src != dst):
            raise ValueError(f"links: ({src}, {dst}) must name two different ranks of 0 to {world_size - 1}")


@dataclass
class _Run:
    """The ranks' clocks, what has arrived where, and the events so far."""

    schedule: PipelineSchedule
    lengths: Mapping[str, float]
    slowdown: Mapping[int, float]
    link: Link | None
    links: Mapping[tuple[int, int], Link]
    num_bytes: float
    events: list[Event] = field(default_factory=list)
    free_s: dict[int, float] = field(default_factory=lambda: defaultdict(float))  # by rank
    wire_s: dict[tuple[int, int], float] = field(default_factory=lambda: defaultdict(float))  # by sender and receiver
    made_s: dict[Work, float] = field(default_factory=dict)  # when the stage that gives it has it
    there_s: dict[Work, float] = field(default_factory=dict)  # when the other stage that needs it has it

    def take(self, action: Action) -> None:
        """Run an action whose needs were taken before it."""
        awaited = [(self.made_s if work[0] == action.stage else self.there_s)[work]
                   for work, _ in action.needs(self.schedule.num_stages)]
        start_s = max([self.free_s[action.rank], *awaited])
        end_s = start_s + self.lengths[action.kind] * self.slowdown.get(action.rank, 1.0)
        self.free_s[action.rank] = end_s
        self.events.append(Event(action.rank, "compute", action.kind, stage=action.stage,
                                 micro_batch=action.micro_batch, start_s=start_s, end_s=end_s))
        for work in action.gives():
            self.made_s[work], self.there_s[work] = end_s, self._arrival_s(action, work, end_s)

    def _arrival_s(self, action: Action, work: Work, ready_s: float) -> float:
        """When the rank that takes a result has it; leaves the events of the message."""
        taker = taker_of(work, self.schedule.num_stages)
        peer = None if taker is None else self.schedule.rank_of(taker)
        if peer in (None, action.rank):
            return ready_s
        wire = action.rank, peer
        link = self.links.get(wire, self.link)
        if link is None:
            return ready_s
        start_s = max(ready_s, self.wire_s[wire])
        end_s = self.wire_s[wire] = start_s + link.transfer_s(self.num_bytes)
        for rank, kind, other in ((action.rank, "send", peer), (peer, "recv", action.rank)):
            self.events.append(Event(rank, kind, work[2], other, stage=action.stage, micro_batch=action.micro_batch,
                                     num_bytes=self.num_bytes, start_s=start_s, end_s=end_s))
        return end_s
