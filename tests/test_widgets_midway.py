"""Players between the cases that all of them are tried with: an action under way, a mesh with axes of other sizes."""
from __future__ import annotations

from collections.abc import Callable
from itertools import permutations

from book.mesh import Mesh
from book.pipelines import one_f_one_b
from book.trace import Event, Trace
from book.widgets import mesh_explorer, pipeline_player
from tests.players import click, press, state


def test_a_rank_that_works_is_not_idle(show: Callable) -> None:
    """After 5 ms rank 0 is half through its first backward, and has waited for it for 2 ms."""
    page = show(pipeline_player(one_f_one_b(2, 2)), reduced_motion="reduce")
    press(page, *["ArrowRight"] * 4)
    found = page.eval_on_selector_all("text", "all => all.map(e => e.textContent).filter(t => t.startsWith('idle'))")
    assert found == ["idle 2 ms", "idle 1 ms"]


def all_reduces(mesh: Mesh) -> Trace:
    """Along every axis each group of the mesh has one all-reduce."""
    events = [Event(rank, "collective", "all_reduce", group=group, num_bytes=8.0, start_s=float(step), end_s=step + 0.5)
              for step, axis in enumerate(mesh.axes) for group in mesh.groups(axis) if len(group) > 1 for rank in group]
    return Trace(events, mesh.world_size, "measured", "recorded")


def test_a_mesh_with_axes_of_other_sizes_is_numbered_as_the_mesh_numbers_it(show: Callable) -> None:
    mesh = Mesh(("pp", "dp", "tp"), (1, 3, 2), 2)
    page = show(mesh_explorer(all_reduces(mesh), mesh), reduced_motion="reduce")
    for axes in permutations(mesh.axes):
        for place, axis in enumerate(axes):
            while state(page)["order"].split().index(axis) > place:
                click(page, f"Move {axis} out")
        cubes = page.eval_on_selector_all(".lk-cube", "all => all.map(e => [...e.querySelectorAll('text')].map("
                                          "t => t.textContent).slice(0, 2))")
        other = mesh.with_axes(*axes)
        assert sorted(cubes) == [[f"rank {rank}", " ".join(map(str, other.coordinates(rank).values()))]
                                 for rank in range(6)]
