"""L0: ranks on a mesh with named axes, the groups of each axis, and the nodes that the ranks sit on.

Ranks are laid out as `torch.distributed.device_mesh.init_device_mesh` does: row by row, so the neighbours along the
last axis are neighbouring ranks. The first axis is called the outermost, the last the innermost.
"""
from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

AXES = ("pp", "dp", "tp")  # outermost first: what talks most sits closest together
WITH_CONTEXT = ("pp", "dp", "cp", "tp")  # the same with sequences cut over cp


class MeshError(ValueError):
    """A mesh that can't be, or a place that it does not have."""


@dataclass(frozen=True)
class Mesh:
    """`world_size` ranks on a grid: `axes` from the outermost to the innermost, and how many ranks `shape` each has.

    With `ranks_per_node`, ranks 0 to that many less one are on node 0, and so on; the last node may have fewer. None
    puts all of them on one. Raises MeshError for names that repeat, for another number of sizes than axes, and for a
    size or a number of ranks on a node that is no whole number from 1 on.
    """

    axes: tuple[str, ...]
    shape: tuple[int, ...]
    ranks_per_node: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "axes", tuple(self.axes))
        object.__setattr__(self, "shape", tuple(self.shape))
        if len(self.axes) != len(self.shape):
            raise MeshError(f"{len(self.axes)} axes need as many sizes, not {len(self.shape)}")
        if len(set(self.axes)) != len(self.axes):
            raise MeshError(f"each axis needs a name of its own: {', '.join(self.axes)}")
        for axis, size in zip(self.axes, self.shape):
            _check_count(f"axis {axis}", size)
        if self.ranks_per_node is not None:
            _check_count("a node", self.ranks_per_node)

    @classmethod
    def of(cls, sizes: Mapping[str, int], ranks_per_node: int | None = None) -> Mesh:
        """The mesh with these axes, outermost first: `Mesh.of({"pp": 2, "dp": 2, "tp": 2}, ranks_per_node=4)`."""
        return cls(tuple(sizes), tuple(sizes.values()), ranks_per_node)

    @property
    def world_size(self) -> int:
        """How many ranks it has: the product of the sizes of its axes."""
        return math.prod(self.shape)

    @property
    def num_nodes(self) -> int:
        """How many nodes its ranks need."""
        return -(-self.world_size // (self.ranks_per_node or self.world_size))

    def size(self, axis: str) -> int:
        """How many ranks a group of this axis has; raises MeshError for an axis that the mesh does not have."""
        return self.shape[self._place(axis)]

    def coordinates(self, rank: int) -> dict[str, int]:
        """Where a rank is, axis by axis; raises MeshError for a rank that there is not."""
        if not 0 <= rank < self.world_size:
            raise MeshError(f"there is no rank {rank}: this mesh has ranks 0 to {self.world_size - 1}")
        found = {}
        for axis, size in zip(reversed(self.axes), reversed(self.shape)):
            rank, found[axis] = divmod(rank, size)
        return {axis: found[axis] for axis in self.axes}

    def rank_at(self, **coordinates: int) -> int:
        """The rank at these coordinates, one for each axis; raises MeshError for a missing axis or a place outside."""
        if coordinates.keys() != set(self.axes):
            raise MeshError(f"give one coordinate for each of {', '.join(self.axes)}, not {', '.join(coordinates)}")
        rank = 0
        for axis, size in zip(self.axes, self.shape):
            if not 0 <= coordinates[axis] < size:
                raise MeshError(f"{axis}={coordinates[axis]} is outside of this mesh: it has 0 to {size - 1}")
            rank = rank * size + coordinates[axis]
        return rank

    def groups(self, *axes: str) -> tuple[tuple[int, ...], ...]:
        """The groups of an axis: ranks that differ in this coordinate alone, each in its order along the axis.

        Of several axes: ranks that differ in these coordinates alone, in the order of their ranks. The groups come in
        the order of their first ranks. Each rank is in exactly one of them.
        """
        moving = [self._place(axis) for axis in axes]
        fixed = [place for place in range(len(self.axes)) if place not in moving]
        return tuple(tuple(self._ranks(dict(zip(fixed, at)))) for at in
                     product(*(range(self.shape[place]) for place in fixed)))

    def group_of(self, rank: int, *axes: str) -> tuple[int, ...]:
        """The group of an axis (or of several) that a rank is in; raises MeshError for an axis that there is not."""
        own, moving = self.coordinates(rank), {self._place(axis) for axis in axes}
        fixed = {place: own[axis] for place, axis in enumerate(self.axes) if place not in moving}
        return tuple(self._ranks(fixed))

    def axis_of(self, ranks: Sequence[int]) -> tuple[str, ...] | None:
        """The axes along which these ranks are a whole group, outermost first; None where they are none.

        Axes of size 1 are left out; a group of one rank has none: ().
        """
        ranks = sorted(ranks)
        places = [self.coordinates(rank) for rank in ranks]
        moving = tuple(axis for axis in self.axes if len({place[axis] for place in places}) > 1)
        return moving if ranks and ranks == sorted(self.group_of(ranks[0], *moving)) else None

    def node_of(self, rank: int) -> int:
        """The node that a rank sits on."""
        return rank // (self.ranks_per_node or self.world_size)

    def crosses(self, ranks: Sequence[int]) -> bool:
        """Whether these ranks sit on more than one node."""
        return len({self.node_of(rank) for rank in ranks}) > 1

    def with_axes(self, *axes: str) -> Mesh:
        """The same sizes in another order of the axes; raises MeshError where `axes` are not this mesh's."""
        if sorted(axes) != sorted(self.axes):
            raise MeshError(f"an order of {', '.join(self.axes)} names each of them once, not {', '.join(axes)}")
        return Mesh(axes, tuple(self.size(axis) for axis in axes), self.ranks_per_node)

    def folded(self, axes: Sequence[str], into: Mapping[str, int]) -> Mesh:
        """The same ranks with other axes in the place of some that are next to one another, outermost first.

        `mesh.folded(("dp", "cp"), {"efsdp": 2, "ep": 4})` has experts on ep in the place of data and sequences. Raises
        MeshError where `axes` are not next to one another in this order, or `into` has another number of ranks.
        """
        first = self._place(axes[0])
        last = first + len(axes)
        if self.axes[first:last] != tuple(axes):
            raise MeshError(f"only axes that are next to one another can be folded: {', '.join(axes)} are not in "
                            f"{', '.join(self.axes)}")
        here, there = math.prod(self.shape[first:last]), math.prod(into.values())
        if here != there:
            raise MeshError(f"{', '.join(axes)} have {here} ranks together and can't be folded into {there} of "
                            f"{', '.join(into)}")
        return Mesh((*self.axes[:first], *into, *self.axes[last:]),
                    (*self.shape[:first], *into.values(), *self.shape[last:]), self.ranks_per_node)

    def _ranks(self, fixed: Mapping[int, int]) -> Iterator[int]:
        """The ranks with these coordinates, by the place of the axis, in their order."""
        free = [(fixed[place],) if place in fixed else range(size) for place, size in enumerate(self.shape)]
        for at in product(*free):
            yield self.rank_at(**dict(zip(self.axes, at)))

    def _place(self, axis: str) -> int:
        if axis not in self.axes:
            raise MeshError(f"this mesh has no axis {axis!r}: it has {', '.join(self.axes)}")
        return self.axes.index(axis)


def _check_count(what: str, count: int) -> None:
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise MeshError(f"{what} can't have {count!r} ranks: it needs a whole number, 1 or more")
