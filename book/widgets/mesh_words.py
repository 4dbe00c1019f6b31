"""L3: the stops of a step on a mesh in words; a rank is written as @ and its number in the trace, for a reader who
renumbers them."""
from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any

from book.cost import axis_name, sent_bytes
from book.mesh import Mesh
from book.trace import Event
from book.widgets.mesh_run import RESULTS, Item, Step, Stop
from book.widgets.terms import counted, in_bytes, spelled

KINDS = {"F": "forward", "B": "backward", "I": "input gradient", "W": "weight gradient"}
Said = tuple[str, str]  # what to stress, and the rest of the sentence


def told(step: Step, mesh: Mesh) -> list[list[Said]]:
    """What happens at each stop, sentence by sentence."""
    teller = _Teller(step, mesh)
    return [list({"work": teller.work, "message": teller.messages, "collective": teller.collectives,
                  "stuck": teller.stuck}[stop.kind](stop)) for stop in step.stops]


def plain(sentences: Iterable[Said]) -> str:
    """Sentences as text, with the ranks' numbers in the trace."""
    return re.sub(r"@(\d+)", r"\1", " ".join(stress + rest for stress, rest in sentences))


class _Teller:
    def __init__(self, step: Step, mesh: Mesh):
        self._step, self._mesh = step, mesh

    def work(self, stop: Stop) -> Iterator[Said]:
        """An action of a stage is one sentence, however many ranks the stage has."""
        same: dict[tuple[Any, ...], list[Item]] = defaultdict(list)
        for item in stop.items:
            same[item.event.stage, item.event.op, item.event.micro_batch].append(item)
        for (stage, kind, micro_batch), items in sorted(same.items()):
            where = self._where([item.event.rank for item in items], stage)
            inside = self._inside(items)
            yield (f"{KINDS[kind].capitalize()} of micro-batch {micro_batch} on {where}{':' if inside else '.'}",
                   f" {inside}." if inside else "")

    def messages(self, stop: Stop) -> Iterator[Said]:
        """Results that go from one stage to the next are one sentence, and so are others of the same size."""
        same: dict[tuple[Any, ...], list[Event]] = defaultdict(list)
        for item in stop.items:
            made = item.made
            key = (made.stage, made.op, made.micro_batch) if made else (-1, "", -1)
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
                yield (f"{who[0].upper()}{who[1:]} send{'s' * (len(ranks) == 1)}",
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
        """What the ranks wait for that never came."""
        for item in stop.items:
            event = item.event
            if item.kind == "recv":
                rest = f" for a message from rank @{event.peer} that never came."
            elif item.kind == "collective":
                rest = f" in {spelled(event.op or '')} with {_names(sorted(event.group or ()), self._mesh.world_size)}."
            else:
                rest = f" in the {KINDS.get(event.op or '', 'step')} of micro-batch {event.micro_batch}."
            yield f"Rank @{event.rank} waits", rest

    def _inside(self, items: list[Item]) -> str:
        """The collectives inside actions of one kind: "5 all-reduces along tp, 2.56 kB from each rank"."""
        same: dict[tuple[Any, ...], list[Event]] = defaultdict(list)
        for item in items:
            for event in item.inner:
                same[event.op, axis_name(event, self._mesh)].append(event)
        return "; ".join(f"{_several(op, len(events) // len(items))} along {axis}, {_size(events)}"
                         for (op, axis), events in same.items())

    def _where(self, ranks: list[int], stage: int | None = None) -> str:
        """The ranks as the stage that they are, or as all, or by their names."""
        names = _names(ranks, self._mesh.world_size)
        if stage is not None:
            return f"stage {stage}" + f", {names}" * (self._step.ranks_of_stage[stage] != set(ranks))
        whole = [number for number, own in self._step.ranks_of_stage.items() if own <= set(ranks)]
        in_them = {rank for number in whole for rank in self._step.ranks_of_stage[number]}
        if len(ranks) == self._mesh.world_size or set(ranks) != in_them:
            return names
        return f"stage{'s' * (len(whole) > 1)} {_join(map(str, whole))}"


def _several(op: str, count: int) -> str:
    return counted(count, spelled(op)) if count > 1 else spelled(op)


def _size(events: list[Event]) -> str:
    """What each rank sends in these collectives, all together."""
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
    return f"rank{'s' * (len(ranks) > 1)} {_join(f'@{rank}' for rank in ranks)}"


def _join(texts: Iterable[str]) -> str:
    *most, last = texts
    return f"{', '.join(most)} and {last}" if most else last
