"""L3: explorers of what crosses a network: all-reduces raced, parameter servers, the order of a mesh's axes."""
from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import permutations
from typing import TYPE_CHECKING, Any

from book.collectives import COLLECTIVES, ring_all_reduce
from book.cost import Link, context_parallel_sent_bytes, sharded_sent_bytes, tensor_parallel_sent_bytes
from book.mesh import Mesh
from book.schedule import Move, Schedule
from book.simulate import simulate
from book.widgets.explorer import Dial, Explorer, decades
from book.widgets.page import heading, table
from book.widgets.show import show
from book.words import counted, in_bytes, in_seconds

if TYPE_CHECKING:
    from book.widgets.live import Live

ALGORITHMS = {"root": "parameter_server_all_reduce", "tree": "tree_all_reduce", "ring": "ring_all_reduce",
              "halving–doubling": "halving_doubling_all_reduce"}
MOST_RANKS, NUM_BYTES, LINK = 64, 400e6, Link(10e-6, 12.5e9)
TOLD_BYTES = (1e3, 1e5, 1e7)  # what the table for readers without JavaScript has beside the chosen size


def race_explorer(num_ranks: int = 4, num_bytes: float = NUM_BYTES, link: Link = LINK) -> RaceExplorer | Live:
    """Root, tree, ring and halving-doubling on a clock and against size: the reader chooses ranks, size and links.

    The arguments are what it opens with. One link and one rank can be made slow. Raises ValueError unless there are 2
    to 64 ranks, and for sizes and links outside of 1 kB to 10 GB, 100 ns to 10 ms and 10 MB/s to 1 TB/s.
    """
    return show(RaceExplorer(num_ranks, num_bytes, link))


class RaceExplorer(Explorer):
    """What the race starts from; raises ValueError for what a reader can't choose."""

    widget = "race_explorer"

    def __init__(self, num_ranks: int, num_bytes: float, link: Link):
        dials = (
            Dial("ranks", "ranks", tuple(range(2, MOST_RANKS + 1)), num_ranks),
            Dial("num_bytes", "buffer", decades(3, 10), num_bytes, "B"),
            Dial("latency_s", "latency", decades(-7, -2), link.latency_s, "s"),
            Dial("bandwidth_bytes_per_s", "bandwidth", decades(7, 12), link.bandwidth_bytes_per_s, "B/s"),
            Dial("slow_link", "link 0–1 slower", (1, 1.5, 2, 3, 4, 5, 8, 10, 20, 50, 100), 1, "x"),
            Dial("slow_rank", "rank 1 slower", (1, 1.25, 1.5, 2, 3, 4, 5, 8, 10), 1, "x"))
        super().__init__("Which all-reduce is fastest?", dials)
        self.num_ranks, self.num_bytes, self.link = num_ranks, num_bytes, link

    def data(self, live: bool) -> dict[str, Any]:
        """The dials, and the algorithms by the names of their functions."""
        return {**super().data(live), "algorithms": list(ALGORITHMS.items())}

    def text(self) -> str:
        """One line that says what is shown."""
        return f"{self.title} {', '.join(ALGORITHMS)} on {self._size()}"

    def words(self) -> str:
        """The time of each algorithm at several sizes."""
        sizes = sorted({*TOLD_BYTES, self.num_bytes})
        rows = [(in_bytes(size), *(in_seconds(self._duration_s(name, size)) for name in ALGORITHMS.values()))
                for size in sizes]
        return heading(self.title, f"simulated, {self._size()}") + table(rows, ("buffer", *ALGORITHMS))

    def _duration_s(self, name: str, num_bytes: float) -> float:
        schedule = COLLECTIVES[name].schedule(self.num_ranks)
        return simulate(schedule, num_bytes, self.link, contributions=False).duration_s or 0.0

    def _size(self) -> str:
        speed = f"{in_seconds(self.link.latency_s)} and {in_bytes(self.link.bandwidth_bytes_per_s)}/s a link"
        return f"{counted(self.num_ranks, 'rank')}, {speed}"


# parameter servers
def server_explorer(num_ranks: int = 4, num_servers: int = 1) -> ServerExplorer | Live:
    """A round with one parameter server or several on the machines that work, beside a ring; the reader chooses.

    The arguments are what it opens with. Raises ValueError unless there are 2 to 16 machines and 1 to 16 servers.
    """
    return show(ServerExplorer(num_ranks, num_servers))


def servers(num_servers: int, world_size: int) -> Schedule:
    """Chunk c is kept by rank c % num_servers: gradients in, sums out."""
    moves = []
    for chunk in range(world_size):
        server = chunk % num_servers
        for turn in range(1, world_size):
            other, later = (server + turn) % world_size, world_size + turn - 2
            moves += [Move(turn - 1, other, server, chunk, "reduce"), Move(later, server, other, chunk, "copy")]
    return Schedule("servers", world_size, world_size, moves, "all_reduce")


class ServerExplorer(Explorer):
    """What the servers start from; raises ValueError for what a reader can't choose."""

    widget = "server_explorer"

    def __init__(self, num_ranks: int, num_servers: int):
        super().__init__("How many servers does it take?", (
            Dial("servers", "servers", tuple(range(1, 17)), num_servers),
            Dial("ranks", "machines", tuple(range(2, 17)), num_ranks),
            Dial("num_bytes", "gradients", decades(3, 10), NUM_BYTES, "B"),
            Dial("bandwidth_bytes_per_s", "bandwidth", decades(7, 12), LINK.bandwidth_bytes_per_s, "B/s")))
        self.num_ranks = num_ranks

    def data(self, live: bool) -> dict[str, Any]:
        """The dials, and the links' latency."""
        return {**super().data(live), "latency_s": LINK.latency_s}

    def text(self) -> str:
        """One line that says what is shown."""
        return f"{self.title} {in_bytes(NUM_BYTES)} on {counted(self.num_ranks, 'machine')}"

    def words(self) -> str:
        """A round's time and the busiest link's bytes, by the number of servers."""
        counts = [k for k in range(1, self.num_ranks + 1) if self.num_ranks % k == 0]
        runs = {counted(k, "server"): servers(k, self.num_ranks) for k in counts}
        runs["ring"] = ring_all_reduce(self.num_ranks)
        rows = []
        for name, schedule in runs.items():
            trace = simulate(schedule, NUM_BYTES, LINK, contributions=False)
            rows.append((name, in_seconds(trace.duration_s or 0.0), in_bytes(float(trace.sent_bytes().max()))))
        return heading(self.title, "simulated") + table(rows, ("", "a round", "sent by the busiest"))


# the order of a mesh's axes
AXES = ("pp", "dp", "cp", "tp", "ep")
ORDERS = tuple(map(" ".join, permutations(("pp", "dp cp", "tp"))))  # a replica's sequences stay around its tokens
# 16-bit numbers, a sequence in a micro-batch. With ep, each layer has experts beside its MLP, each a quarter as wide.
MODEL = {"layers": 80, "width": 8192, "tokens": 4096, "batches": 16, "experts": 16, "choices": 2}


def axes_explorer(pp: int = 4, dp: int = 8, tp: int = 8, ranks_per_node: int = 8, *, cp: int = 1, ep: int = 1,
                  title: str = "Which axes cross the network?") -> AxesExplorer | Live:
    """Bytes across nodes of a large transformer's step, by the order of the axes, which the reader chooses.

    The arguments are what it opens with, pp outermost. The model is that of chapter 7, `MODEL`, without experts where
    ep is 1; else its experts are on `ep` neighbours among a stage's ranks. Raises ValueError for sizes that are no
    powers of two up to 16 (pp, cp, tp, ep) or 32 (dp).
    """
    return show(AxesExplorer({"pp": pp, "dp": dp, "cp": cp, "tp": tp, "ep": ep}, ranks_per_node, title))


def sent_along(sizes: Mapping[str, int]) -> dict[str, float]:
    """Bytes that a rank of a middle stage sends along each axis, as `book.cost` has them, without embedding and loss.

    dp has the gradients of all weights but the experts', which are along "efsdp"; cp is a ring; ep sends tokens to
    their experts and back, forward and backward (lepikhin2020), where each rank of tp has its part of them.
    """
    pp, dp, cp, tp, ep = (sizes[axis] for axis in AXES)
    ep = min(ep, dp * cp * tp)
    activations, per_layer = 2 * MODEL["tokens"] * MODEL["width"] / cp, 12 * MODEL["width"] ** 2
    layers, often = MODEL["layers"] / pp, MODEL["batches"] * MODEL["layers"] / pp
    experts = 2 * layers * MODEL["experts"] * 2 * MODEL["width"] ** 2 / ep if ep > 1 else 0.0
    return {"pp": 2 * MODEL["batches"] * activations if pp > 1 else 0.0,
            "dp": sharded_sent_bytes(0, dp * cp, 2 * layers * per_layer / tp),
            "cp": often * sum(context_parallel_sent_bytes("ring", cp, activations / tp, activations / tp)),
            "tp": often * tensor_parallel_sent_bytes(tp, activations),
            "ep": often * 4 * MODEL["choices"] * activations / tp * (ep - 1) / ep,
            "efsdp": sharded_sent_bytes(0, dp * cp * tp // ep, experts)}


def across(sizes: Mapping[str, int], order: str, ranks_per_node: int) -> dict[str, float]:
    """Bytes of `sent_along` that go to other nodes, on average over the hops along each axis; dp has efsdp's too."""
    mesh = Mesh.of({axis: sizes[axis] for axis in order.split()}, ranks_per_node=ranks_per_node)
    found = {}
    for axis, num_bytes in sent_along(sizes).items():
        hops = list(_hops(mesh, axis, sizes["ep"]))
        crossing = sum(mesh.crosses(hop) for hop in hops)
        found[axis] = num_bytes * crossing / max(1, len(hops))
    found["dp"] += found.pop("efsdp")
    return found


def _hops(mesh: Mesh, axis: str, ep: int) -> Iterator[tuple[int, int]]:
    """Who sends to whom: each rank to the next of its group's ring or pipeline, or to all others of "ep"."""
    if axis in ("ep", "efsdp"):
        stages = mesh.groups("dp", "cp", "tp")
        ep = min(ep, len(stages[0]))
        groups = [stage[first:first + ep] if axis == "ep" else stage[first::ep] for stage in stages
                  for first in (range(0, len(stage), ep) if axis == "ep" else range(ep))]
    else:
        groups = list(mesh.groups("dp", "cp") if axis == "dp" else mesh.groups(axis))
    for group in groups:
        following = [*group[1:], group[0]][:len(group) - (axis == "pp")]
        yield from permutations(group, 2) if axis == "ep" else ((a, b) for a, b in zip(group, following) if a != b)


class AxesExplorer(Explorer):
    """What the mesh starts from; raises ValueError for what a reader can't choose."""

    widget = "axes_explorer"

    def __init__(self, sizes: Mapping[str, int], ranks_per_node: int, title: str):
        powers = (1, 2, 4, 8, 16, 32)
        super().__init__(title, (
            Dial("order", "outermost first", ORDERS, ORDERS[0], "word"),
            Dial("per_node", "ranks a node", powers[:5], ranks_per_node),
            *(Dial(axis, axis, powers if axis == "dp" else powers[:5], sizes[axis]) for axis in AXES)))
        self.sizes, self.ranks_per_node = dict(sizes), ranks_per_node

    def data(self, live: bool) -> dict[str, Any]:
        """The dials, and the model."""
        return {**super().data(live), "model": MODEL}

    def text(self) -> str:
        """One line that says what is shown."""
        sizes = ", ".join(f"{axis} {size}" for axis, size in self.sizes.items() if size > 1 or axis in "pp dp tp")
        return f"{self.title} {sizes}, {counted(self.ranks_per_node, 'rank')} a node"

    def words(self) -> str:
        """Bytes across nodes of each order and axis."""
        rows = []
        for order in ORDERS:
            sent = across(self.sizes, order, self.ranks_per_node)
            rows.append((order.replace(" ", ", "), *(in_bytes(sent[axis]) for axis in AXES),
                         in_bytes(sum(sent.values()))))
        return heading(self.title, "by formula") + table(rows, ("outermost first", *AXES, "in all"))
