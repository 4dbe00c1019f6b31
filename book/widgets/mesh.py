"""L3: the mesh explorer on a page and in a notebook: a recorded step on a mesh, and the JSON that is drawn.

Ranks are named by their numbers in the trace; the script renumbers them if the reader reorders the axes.

    axes, shape, per    the mesh as it was recorded: axes, outermost first, ranks per node; `sizes` to choose from
    names               the axes, and other paths of messages as book.cost.flows calls them: "dp+tp", "none"
    flows               what is sent in a step, each with its `axis` (its place in `names`), `src`, `dst` and `bytes`;
                        `span` says whether that is a step or the whole run
    stops               what is played, after the start

A stop has, in addition to what scene.js says about all stops, the `kind` of what is done; `work`, a list of [kind of
action, micro-batch, ranks]; and what is `sent`: flows with a `label`, the action that they come from, "F0". Its texts
are lists of parts, of which numbers are ranks.
"""
from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import permutations
from typing import TYPE_CHECKING, Any

from book.cost import Flows, axis_name, bytes_across_nodes, bytes_by_axis, flows, sent_bytes
from book.mesh import Mesh
from book.trace import Event, Trace
from book.widgets.mesh_run import RESULTS, RankAct, Step, Stop, read_step
from book.widgets.page import Data, Page, heading, listed, table
from book.widgets.show import show
from book.widgets.terms import origin, spelled
from book.words import agree, capitalised, counted, in_bytes, joined, plural

if TYPE_CHECKING:
    from book.widgets.live import Live


def mesh_explorer(trace: Trace, mesh: Mesh, *, title: str | None = None) -> MeshExplorer | Live:
    """The ranks of a training step on their nodes: the groups of each, and what is sent along each axis.

    `trace` is recorded, or of `simulate_hybrid` or `simulate_groups`. The reader plays the step, reorders the axes and
    changes how many ranks a node has; bytes then go between the same coordinates as before. Forwards and backwards are
    told apart if the program marks them (`stage_action`). In a run of several steps, the first is played, and bytes are
    the mean. Raises TypeError for anything but a trace and a mesh, ValueError for a different number of ranks, more
    than 16 ranks, 4 axes or 128 stops, a logical trace, and what `book.cost.flows` raises.
    """
    return show(MeshExplorer(trace, mesh, title))


MOST_RANKS, MOST_AXES, MOST_STOPS = 16, 4, 128
PHASES = {"work": "0", "message": "1"}  # of other kinds of stops: 2


class MeshExplorer(Page):
    """What the mesh explorer shows: a recorded step, and the mesh that its ranks are on."""

    widget = "mesh"

    def __init__(self, trace: Trace, mesh: Mesh, title: str | None = None):
        _check(trace, mesh)
        self.traces, self.mesh, self._given_title = {"": trace}, mesh, title
        self.title = title or f"A training step on a mesh of {counted(mesh.world_size, 'rank')}"
        self._trace, self._step = trace, read_step(trace)
        if len(self._step.stops) > MOST_STOPS:
            raise ValueError(f"this step has {len(self._step.stops)} stops, and the mesh explorer shows {MOST_STOPS}: "
                             "record one step with fewer micro-batches")
        self._sent = step_flows(trace, mesh, self._step)

    def with_trace(self, what: Any) -> MeshExplorer:
        """The same explorer of another trace on the same mesh."""
        return MeshExplorer(what, self.mesh, self._given_title)

    def data(self, live: bool) -> dict[str, Any]:
        """The explorer's data; in a live notebook with the backend's name."""
        return {"title": self.title, "source": self._source(live),
                **mesh_payload(self._trace, self.mesh, self._step)}

    def text(self) -> str:
        """One line that says what is shown."""
        shape = " · ".join(f"{axis} {size}" for axis, size in zip(self.mesh.axes, self.mesh.shape))
        return f"{self.title}: mesh explorer, {shape}, {counted(len(self._step.stops), 'stop')}, {self._trace.source}"

    def words(self) -> str:
        """The axes, what crosses nodes in each order of them, and the stops."""
        stops = listed(plain(said) for said in told(self._step, self.mesh))
        per = self.mesh.ranks_per_node or self.mesh.world_size
        return "".join([
            heading(self.title, self._source(False)),
            table(self._axes(), ("axis", "ranks", "its groups", "sent by a rank")),
            f"<p>Bytes that cross nodes {self._step.span}, with {counted(per, 'rank')} on each node:</p>",
            table(self._orders(), ("axes, outermost first", "cross nodes")), stops])

    def _axes(self) -> list[Sequence[str]]:
        sent = most_sent(self._sent, self.mesh)
        named = [*self.mesh.axes, *(name for name in sent if name not in self.mesh.axes)]
        return [(axis, *self._groups(axis),
                 f"up to {in_bytes(sent[axis], zeros=True)}" if sent.get(axis) else "nothing") for axis in named]

    def _groups(self, axis: str) -> tuple[str, str]:
        if axis not in self.mesh.axes:
            return "", ""
        groups = self.mesh.groups(axis)
        where = "across nodes" if any(map(self.mesh.crosses, groups)) else "inside a node"
        return str(self.mesh.size(axis)), f"{'; '.join(', '.join(map(str, group)) for group in groups)} ({where})"

    def _orders(self) -> list[Sequence[str]]:
        found = orders(self._sent, self.mesh)
        given = f", as {self._trace.source}"
        return [(" · ".join(axes) + given * (axes == self.mesh.axes), in_bytes(num_bytes, zeros=True))
                for axes, num_bytes in found.items()]

    def _source(self, live: bool) -> str:
        several = f" · the first of {self._step.num_steps} steps, bytes of their mean"
        return origin(self._trace, live) + several * (self._step.num_steps > 1)


def _check(trace: Any, mesh: Any) -> None:
    if not isinstance(trace, Trace) or not isinstance(mesh, Mesh):
        raise TypeError("mesh_explorer() takes a recorded Trace (run.trace) and the Mesh that its ranks are on, not "
                        f"{type(trace).__name__} and {type(mesh).__name__}")
    if trace.world_size != mesh.world_size:
        raise ValueError(f"the trace has {trace.world_size} ranks and the mesh has {mesh.world_size}: give the mesh "
                         "that the program ran on")
    if mesh.world_size > MOST_RANKS or len(mesh.axes) > MOST_AXES:
        raise ValueError(f"the mesh explorer shows up to {MOST_RANKS} ranks on up to {MOST_AXES} axes, not "
                         f"{mesh.world_size} on {len(mesh.axes)}")


def mesh_payload(trace: Trace, mesh: Mesh, step: Step) -> Data:
    """The mesh, what is sent along its axes, and the stops."""
    sent = step_flows(trace, mesh, step)
    names = [*mesh.axes, *sorted({name for name, _, _ in sent} - set(mesh.axes))]
    per = mesh.ranks_per_node or mesh.world_size
    stops: list[Data] = [{"kind": "start", "say": [], "phase": "2", "work": [], "sent": []}]
    stops += [{"kind": stop.kind, "say": [[*map(parts, pair)] for pair in said], "phase": PHASES.get(stop.kind, "2"),
               "work": _work(stop), "sent": _sent(stop, mesh, names)}
              for stop, said in zip(step.stops, told(step, mesh))]
    return {"axes": list(mesh.axes), "shape": list(mesh.shape), "per": per, "sizes": sizes(mesh), "names": names,
            "span": step.span, "flows": [_flow(names, *item) for item in sent.items()], "stops": stops}


def step_flows(trace: Trace, mesh: Mesh, step: Step) -> Flows:
    """Bytes from rank to rank by axis in a step; the mean if there are several."""
    return {key: num_bytes / step.num_steps for key, num_bytes in sorted(flows(trace, mesh).items())}


def sizes(mesh: Mesh) -> list[int]:
    """Numbers of ranks per node to choose from: 1, 2, 4, ..., all ranks, and what the mesh has."""
    powers = {2**k for k in range(mesh.world_size.bit_length()) if 2**k < mesh.world_size}
    return sorted(powers | {mesh.world_size, mesh.ranks_per_node or mesh.world_size})


def across(sent: Flows, mesh: Mesh, other: Mesh) -> float:
    """Bytes that would cross nodes if each rank of `mesh` sat at its coordinates on the mesh `other`."""
    placed = [other.rank_at(**mesh.coordinates(rank)) for rank in range(mesh.world_size)]
    moved = {(name, placed[src], placed[dst]): num_bytes for (name, src, dst), num_bytes in sent.items()}
    return sum(bytes_across_nodes(moved, other).values())


def orders(sent: Flows, mesh: Mesh) -> dict[tuple[str, ...], float]:
    """Bytes that cross nodes for each order of the axes, outermost first."""
    return {axes: across(sent, mesh, mesh.with_axes(*axes)) for axes in permutations(mesh.axes)}


def most_sent(sent: Flows, mesh: Mesh) -> dict[str, float]:
    """For each axis, the bytes of the rank that sends the most along it."""
    return {name: float(per_rank.max()) for name, per_rank in bytes_by_axis(sent, mesh.world_size).items()}


def short(num_bytes: float) -> float:
    """A number of bytes without needless digits."""
    return int(num_bytes) if num_bytes == int(num_bytes) else round(num_bytes, 3)


def _work(stop: Stop) -> list[list[Any]]:
    ranks: dict[tuple[str | None, int | None], list[int]] = defaultdict(list)
    for item in stop.items if stop.kind == "work" else ():
        ranks[item.event.op, item.event.micro_batch].append(item.event.rank)
    return [[*what, who] for what, who in ranks.items()]


def _sent(stop: Stop, mesh: Mesh, names: list[str]) -> list[Data]:
    """What travels at a stop."""
    if stop.kind == "stuck":
        return []
    by_label: dict[str, list[Event]] = defaultdict(list)
    for item in stop.items:
        label = f"{item.made.kind}{item.made.micro_batch}" if item.made else ""
        by_label[label] += item.inner if stop.kind == "work" else [item.event]
    return [{**_flow(names, *sent), "label": label} for label, events in by_label.items()
            for sent in flows(Trace(events, mesh.world_size, "measured", "recorded"), mesh).items()]


def _flow(names: list[str], path: tuple[str, int, int], num_bytes: float) -> Data:
    name, src, dst = path
    return {"axis": names.index(name), "src": src, "dst": dst, "bytes": short(num_bytes)}


# The stops in words; a rank is written as @ and its number in the trace.
KINDS = {"F": "forward", "B": "backward", "I": "input gradient", "W": "weight gradient"}
Said = tuple[str, str]  # what to stress, and the rest of the sentence


def told(step: Step, mesh: Mesh) -> list[list[Said]]:
    """What happens at each stop, sentence by sentence."""
    teller = _Teller(step, mesh)
    return [list({"work": teller.work, "message": teller.messages, "collective": teller.collectives,
                  "stuck": teller.stuck}[stop.kind](stop)) for stop in step.stops]


def parts(text: str) -> list[str | int]:
    """A text in parts, of which numbers are ranks."""
    return [int(part) if place % 2 else part for place, part in enumerate(re.split(r"@(\d+)", text)) if part]


def plain(sentences: Iterable[Said]) -> str:
    """Sentences as text, with the ranks' numbers in the trace."""
    return " ".join("".join(map(str, parts(stress + rest))) for stress, rest in sentences)


class _Teller:
    def __init__(self, step: Step, mesh: Mesh):
        self._step, self._mesh = step, mesh

    def work(self, stop: Stop) -> Iterator[Said]:
        """One sentence for each action of a stage, however many ranks the stage has."""
        same: dict[tuple[Any, ...], list[RankAct]] = defaultdict(list)
        for item in stop.items:
            same[item.event.stage, item.event.op, item.event.micro_batch].append(item)
        for (stage, kind, micro_batch), items in sorted(same.items()):
            where = self._where([item.event.rank for item in items], stage)
            inside = self._inside(items)
            yield (f"{KINDS[kind].capitalize()} of micro-batch {micro_batch} on {where}{':' if inside else '.'}",
                   f" {inside}." if inside else "")

    def messages(self, stop: Stop) -> Iterator[Said]:
        """One sentence for results that go from a stage to the next, and one for other messages of the same size."""
        same: dict[tuple[Any, ...], list[Event]] = defaultdict(list)
        for item in stop.items:
            made = item.made
            key = (made.stage, made.kind, made.micro_batch) if made else (-1, "", -1)
            same[(*key, item.event.num_bytes)].append(item.event)
        for (stage, kind, micro_batch, num_bytes), events in sorted(same.items()):
            ranks = sorted({event.rank for event in events})
            size = in_bytes(num_bytes or 0, zeros=True)
            if kind:
                what, by = RESULTS[kind]
                yield (f"{what.capitalize()} of micro-batch {micro_batch} from stage {stage} to stage {stage + by}:",
                       f" {size} from {_each(len(ranks))}.")
            else:
                who, each = _names(ranks, self._mesh.world_size), len(events) // len(ranks)
                axes = sorted({axis_name(event, self._mesh) for event in events})
                size = f"{each} times {size}" if each > 1 else size
                yield (f"{capitalised(who)} {agree('sends', ranks)}",
                       f" {size}{' each' * (len(ranks) > 1)} along {' and '.join(axes)}.")

    def collectives(self, stop: Stop) -> Iterator[Said]:
        """Collectives between actions, axis by axis."""
        same: dict[tuple[Any, ...], list[Event]] = defaultdict(list)
        for item in stop.items:
            same[item.event.op, axis_name(item.event, self._mesh)].append(item.event)
        for (op, axis), events in same.items():
            ranks = sorted({event.rank for event in events})
            over = ", after the last backward" if self._step.ranks_of_stage and stop.ended.issuperset(ranks) else ""
            size = "" if op == "barrier" else f" {_size(events)}{over}."
            yield f"{_several(op, len(events) // len(ranks)).capitalize()} along {axis} on {self._where(ranks)}:", \
                size or " nobody goes on before all have come."

    def stuck(self, stop: Stop) -> Iterator[Said]:
        """What the ranks wait for in vain."""
        for item in stop.items:
            event = item.event
            if item.kind == "recv":
                rest = f" for a message from rank @{event.peer} that never came."
            elif item.kind == "collective":
                rest = f" in {spelled(event.op or '')} with {_names(sorted(event.group or ()), self._mesh.world_size)}."
            else:
                rest = f" in the {KINDS.get(event.op or '', 'step')} of micro-batch {event.micro_batch}."
            yield f"Rank @{event.rank} waits", rest

    def _inside(self, items: list[RankAct]) -> str:
        """What is sent inside actions of one kind: "5 all-reduces along tp, 2.56 kB from each rank"."""
        same: dict[tuple[Any, ...], list[Event]] = defaultdict(list)
        for item in items:
            for event in item.inner:
                op = event.op if event.kind == "collective" else "message"
                same[op, axis_name(event, self._mesh)].append(event)
        return "; ".join(f"{_several(op, len(events) // len(items))} along {axis}, {_size(events)}"
                         for (op, axis), events in same.items())

    def _where(self, ranks: list[int], stage: int | None = None) -> str:
        """The ranks in words: as stages, as all ranks, or one by one."""
        names = _names(ranks, self._mesh.world_size)
        if stage is not None:
            return f"stage {stage}" + f", {names}" * (self._step.ranks_of_stage[stage] != set(ranks))
        whole = [number for number, own in self._step.ranks_of_stage.items() if own <= set(ranks)]
        in_them = {rank for number in whole for rank in self._step.ranks_of_stage[number]}
        if len(ranks) == self._mesh.world_size or set(ranks) != in_them:
            return names
        return f"{plural('stage', len(whole))} {joined(whole)}"


def _several(op: str, count: int) -> str:
    return counted(count, spelled(op)) if count > 1 else spelled(op)


def _size(events: list[Event]) -> str:
    """What each rank sends in all of these collectives together."""
    sent: dict[int, float] = defaultdict(float)
    for event in events:
        sent[event.rank] += sent_bytes(event)
    upto = "up to " if len(set(sent.values())) > 1 else ""
    return f"{upto}{in_bytes(max(sent.values()), zeros=True)} from each rank"


def _each(count: int) -> str:
    return "one rank" if count == 1 else f"each of {count} ranks"


def _names(ranks: list[int], world_size: int) -> str:
    if len(ranks) == world_size > 1:
        return "both ranks" if world_size == 2 else f"all {world_size} ranks"
    return f"{plural('rank', len(ranks))} {joined(f'@{rank}' for rank in ranks)}"
