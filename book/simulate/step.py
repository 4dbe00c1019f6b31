"""L2: the time of a training step on a mesh of pipeline, data and tensor parallelism, at any number of ranks.

Ranks at the same place on pp do the same at the same time, whatever their places on dp and tp. So one pipeline is
simulated, with one rank for each of its places. What the ranks of a place send along an axis is simulated for all of
them at once, so that they share network cards where a node's ranks do. There, too, one rank stands for all alike.
Shapes: P, D and T ranks on pp, dp and tp; G groups of N ranks.
"""
from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import astuple, dataclass
from itertools import pairwise

import numpy as np

from book.collectives import broadcast, ring_all_reduce
from book.cost import Link, Network
from book.mesh import AXES, Mesh
from book.schedule import PipelineSchedule, Round, Schedule
from book.simulate.at_scale import rounds_done_s
from book.simulate.messages import rounds
from book.simulate.pipeline import simulate_pipeline
from book.trace import Trace


@dataclass(frozen=True)
class StepWork:
    """What a rank does in a step: of one micro-batch on one stage, `dp_bytes` excepted.

    Computing alone takes `forward_s` and `backward_s`, half of it for the gradients of the weights. A forward has
    `num_all_reduces` over the tp group, of a buffer of `tp_bytes` each, and a backward as many. A rank sends `pp_bytes`
    to the next stage, and as many back. At its end all of a rank's gradients, `dp_bytes`, are all-reduced over dp.
    Raises ValueError for a negative number.
    """

    forward_s: float
    backward_s: float
    tp_bytes: float = 0.0
    num_all_reduces: int = 0
    pp_bytes: float = 0.0
    dp_bytes: float = 0.0

    def __post_init__(self) -> None:
        if not all(0 <= value < float("inf") for value in astuple(self)):
            raise ValueError(f"the times, bytes and numbers of a step can't be negative or infinite: {self}")


@dataclass(frozen=True)
class StepTimes:
    """When a step is done, in seconds, and what takes how long in it.

    `tp_s` is one all-reduce over tp, `pp_s` the longest message between two stages, `dp_s` the all-reduce of the
    gradients of each place on pp, (P,); `pipeline` is the trace of one pipeline, without that all-reduce. `done_s` says
    when the ranks of each place are done, (P,).
    """

    tp_s: float
    pp_s: float
    dp_s: np.ndarray
    pipeline: Trace
    done_s: np.ndarray

    @property
    def step_s(self) -> float:
        """When the last rank is done."""
        return float(self.done_s.max())


def simulate_step(mesh: Mesh, schedule: PipelineSchedule, work: StepWork, link: Link | Network, *,
                  all_reduce: Callable[[int], Schedule] = ring_all_reduce) -> StepTimes:
    """The time of one step on `mesh`, whose axes are pp, dp and tp in any order, without the optimizer's update.

    Each place on pp runs its actions of `schedule` (narayanan2021). It waits for every all-reduce over tp, and averages
    its gradients over dp after its last backward: nothing of that overlaps with computing. `all_reduce` makes the
    schedule of both, for a number of ranks. Messages along one axis are not slowed by those along another, nor by those
    of another place. Where the ranks of a place are not alike, all of them wait for the slowest. Raises ValueError for
    another mesh, for a schedule or a network that does not fit it, and where `done_s` does.
    """
    _check(mesh, schedule, link)
    ranks_PDT = np.arange(mesh.world_size).reshape(mesh.shape).transpose([mesh.axes.index(axis) for axis in AXES])
    times = _Times(link)
    over_tp, over_dp = (all_reduce(mesh.size(axis)) for axis in ("tp", "dp"))
    tp_s = max(times.of(ranks_DT, over_tp, work.tp_bytes) for ranks_DT in ranks_PDT)
    between_s = {(src, dst): times.of(np.stack([ranks_PDT[src].ravel(), ranks_PDT[dst].ravel()], axis=1), broadcast(2),
                                      work.pp_bytes) for src, dst in _neighbours(schedule)}
    waiting_s = work.num_all_reduces * tp_s
    pipeline = simulate_pipeline(schedule, work.forward_s + waiting_s, work.backward_s + waiting_s, work.backward_s / 2,
                                 links={pair: Link(each_s, float("inf")) for pair, each_s in between_s.items()})
    dp_s = np.array([times.of(ranks_DT.T, over_dp, work.dp_bytes) for ranks_DT in ranks_PDT])
    return StepTimes(tp_s, max(between_s.values(), default=0.0), dp_s, pipeline, _ends_s(pipeline) + dp_s)


class _Times:
    """How long groups take that run the same schedule at once; what lies alike on other nodes is worked out once."""

    def __init__(self, link: Link | Network) -> None:
        self.link = link
        self._known: dict[tuple[str, tuple[int, ...], bytes, float], float] = {}

    def of(self, groups: np.ndarray, schedule: Schedule, num_bytes: float) -> float:
        """Seconds until the last of the groups, rows of ranks (G, N), has run `schedule` on buffers of `num_bytes`."""
        per_node = self.link.ranks_per_node if isinstance(self.link, Network) else 1
        first = int(groups.min()) // per_node * per_node
        groups = np.ascontiguousarray(groups - first)
        key = schedule.name, groups.shape, groups.tobytes(), num_bytes
        if key not in self._known:
            slower = np.ones((groups.max() // per_node + 1) * per_node)  # whole nodes, so that the last is like others
            done_s = rounds_done_s(list(_in_groups(schedule, groups)), num_bytes / schedule.num_chunks, self.link,
                                   slower)
            self._known[key] = float(done_s.max())
        return self._known[key]


def _in_groups(schedule: Schedule, groups: np.ndarray) -> Iterator[Round]:
    """The rounds of `schedule` in all of these groups at once, rows of ranks (G, N)."""
    for one in rounds(schedule):
        num_chunks, num_added = (np.tile(counts, len(groups)) for counts in (one.num_chunks, one.num_added))
        yield Round(groups[:, one.src].ravel(), groups[:, one.dst].ravel(), num_chunks, num_added, one.num_steps)


def _neighbours(schedule: PipelineSchedule) -> set[tuple[int, int]]:
    """Who sends to whom along pp: the ranks of two stages in a row, both ways."""
    ranks = [schedule.rank_of(stage) for stage in range(schedule.num_stages)]
    pairs = {(src, dst) for src, dst in pairwise(ranks) if src is not None and dst is not None and src != dst}
    return pairs | {(dst, src) for src, dst in pairs}


def _ends_s(pipeline: Trace) -> np.ndarray:
    """When each rank of a pipeline has computed its last, in seconds, (P,)."""
    ends_s = np.zeros(pipeline.world_size)
    for event in pipeline.of_kind("compute"):
        ends_s[event.rank] = max(ends_s[event.rank], event.end_s or 0.0)
    return ends_s


def _check(mesh: Mesh, schedule: PipelineSchedule, link: Link | Network) -> None:
    if sorted(mesh.axes) != sorted(AXES):
        raise ValueError(f"a step is simulated on a mesh of {', '.join(AXES)}, not of {', '.join(mesh.axes)}: give an "
                         "axis that you don't use one rank")
    if schedule.world_size != mesh.size("pp"):
        raise ValueError(f"{schedule.name} is for {schedule.world_size} ranks and the mesh's pp has "
                         f"{mesh.size('pp')}: they have to be as many")
    per_node = mesh.ranks_per_node
    if isinstance(link, Network) and per_node not in (None, link.ranks_per_node):
        raise ValueError(f"the mesh has {per_node} ranks on a node and the network {link.ranks_per_node}: they have "
                         "to be as many")
