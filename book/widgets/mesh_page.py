"""L3: the mesh explorer on a page and in a notebook."""
from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

from book.mesh import Mesh
from book.trace import Trace
from book.widgets.mesh_data import mesh_payload, most_sent, orders, step_flows
from book.widgets.mesh_steps import read_step
from book.widgets.mesh_words import plain, told
from book.widgets.page import Page
from book.widgets.terms import counted, origin
from book.widgets.units import in_bytes

MOST_RANKS, MOST_AXES, MOST_STOPS = 16, 4, 128


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
        """The explorer's data; where it is live, with the backend's name."""
        return {"v": 1, "title": self.title, "source": self._source(live),
                **mesh_payload(self._trace, self.mesh, self._step)}

    def text(self) -> str:
        """One line that says what is shown."""
        shape = " · ".join(f"{axis} {size}" for axis, size in zip(self.mesh.axes, self.mesh.shape))
        return f"{self.title}: mesh explorer, {shape}, {counted(len(self._step.stops), 'stop')}, {self._trace.source}"

    def words(self) -> str:
        """The axes, what crosses nodes in each order of them, and the stops."""
        stops = "".join(f"<li>{escape(plain(said))}</li>" for said in told(self._step, self.mesh))
        per = self.mesh.ranks_per_node or self.mesh.world_size
        return (f"<p><strong>{escape(self.title)}</strong> ({escape(self._source(False))})</p>"
                f"{_table(('axis', 'ranks', 'its groups', 'sent by a rank'), self._axes())}"
                f"<p>Bytes that cross a node {self._step.span}, with {counted(per, 'rank')} on each node:</p>"
                f"{_table(('axes, outermost first', 'cross a node'), self._orders())}<ol>{stops}</ol>")

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
        return [(" · ".join(axes) + ", as recorded" * (axes == self.mesh.axes), in_bytes(num_bytes, zeros=True))
                for axes, num_bytes in found.items()]

    def _source(self, live: bool) -> str:
        several = f" · the first of {self._step.num_steps} steps, bytes of their mean"
        return origin(self._trace, live) + several * (self._step.num_steps > 1)


def _check(trace: Any, mesh: Any) -> None:
    if not isinstance(trace, Trace) or not isinstance(mesh, Mesh):
        raise TypeError("mesh_explorer() takes a recorded Trace (run.trace) and the Mesh that its ranks are on, not "
                        f"{type(trace).__name__} and {type(mesh).__name__}")
    if trace.world_size != mesh.world_size:
        raise ValueError(f"the trace has {trace.world_size} ranks and the mesh has {mesh.world_size}: they have to be "
                         "as many")
    if mesh.world_size > MOST_RANKS or len(mesh.axes) > MOST_AXES:
        raise ValueError(f"the mesh explorer shows up to {MOST_RANKS} ranks on up to {MOST_AXES} axes, not "
                         f"{mesh.world_size} on {len(mesh.axes)}")


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    cells = ["".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in row)
             for tag, row in [("th", head), *(("td", row) for row in rows)]]
    return f"<table>{''.join(f'<tr>{row}</tr>' for row in cells)}</table>"
