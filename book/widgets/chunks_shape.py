"""L3: how the ranks of a run hang together: what the player needs to lay them out."""
from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

Pair = tuple[int, int]


def shape_of(pairs: Iterable[Pair], world_size: int) -> dict[str, Any]:
    """"ring" (only neighbours talk), "tree" (with each rank's depth and place; a star's hub too), else "mesh"."""
    pairs = set(pairs)
    if world_size <= 2 or all((b - a) % world_size in (1, world_size - 1) for a, b in pairs):
        return {"kind": "ring"}
    hubs = set.intersection(*(set(pair) for pair in pairs)) if pairs else set()
    tree = _tree({(min(pair), max(pair)) for pair in pairs}, world_size)
    return {**tree, **({"hub": min(hubs)} if hubs else {})} if tree else {"kind": "mesh"}


def _tree(edges: set[Pair], world_size: int) -> dict[str, Any] | None:
    """Levels below the rank with most links, leaves side by side; None when the links are no tree."""
    if len(edges) != world_size - 1:
        return None
    near = defaultdict(list)
    for a, b in sorted(edges):
        near[a].append(b)
        near[b].append(a)
    root = max(range(world_size), key=lambda rank: (len(near[rank]), -rank))
    depth = {root: 0}
    slot: dict[int, float] = {}
    order = _depth_first(near, root, depth)
    leaves = 0
    for rank in reversed(order):  # children come before their parents here
        below = [slot[child] for child in near[rank] if depth[child] == depth[rank] + 1]
        slot[rank] = (min(below) + max(below)) / 2 if below else leaves
        leaves += not below
    if len(order) != world_size:
        return None
    width = max(leaves - 1, 1)
    place = [round(1 - slot[r] / width, 4) if leaves > 1 else 0.5 for r in range(world_size)]
    return {"kind": "tree", "depth": [depth[r] for r in range(world_size)], "slot": place}


def _depth_first(near: dict[int, list[int]], root: int, depth: dict[int, int]) -> list[int]:
    order, todo = [], [root]
    while todo:
        rank = todo.pop()
        order.append(rank)
        for child in reversed(near[rank]):
            if child not in depth:
                depth[child] = depth[rank] + 1
                todo.append(child)
    return order
