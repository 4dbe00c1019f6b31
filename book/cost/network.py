"""L1: nodes whose ranks share network cards, and what a message passes through on its way."""
from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from book.cost.links import Link

SWITCH = 1  # its number among what messages pass

@dataclass(frozen=True)
class Network:
    """Nodes of `ranks_per_node` ranks each, whose ranks share the node's cards, each way, with all that pass there.

    A message inside a node has the link `inside` to itself. One to another node takes `across`, whose bandwidth is
    that of a card; messages that use a card in one direction at the same time share it. With several cards, ranks are
    spread over them evenly, neighbours on the same one; `cards_per_node=ranks_per_node` gives each rank its own, as the
    rails of large clusters do. `switch_bytes_per_s` limits all messages between nodes together. Raises ValueError for
    impossible numbers.
    """

    ranks_per_node: int
    inside: Link
    across: Link
    cards_per_node: int = 1
    switch_bytes_per_s: float = float("inf")

    def __post_init__(self) -> None:
        if self.ranks_per_node < 1 or not 1 <= self.cards_per_node <= self.ranks_per_node:
            raise ValueError(f"a node of {self.ranks_per_node} ranks can't have {self.cards_per_node} cards: give at "
                             "least one rank, and one card to as many as there are ranks")
        if not self.switch_bytes_per_s > 0:
            raise ValueError(f"switch_bytes_per_s must be positive, not {self.switch_bytes_per_s}")

    def node_of(self, rank: int) -> int:
        """The node that a rank sits on."""
        return rank // self.ranks_per_node

    def crosses(self, src: int, dst: int) -> bool:
        """Whether two ranks sit on different nodes."""
        return self.node_of(src) != self.node_of(dst)

    def card_of(self, rank: int) -> int:
        """The number of the card that a rank uses, counted through all nodes."""
        node, place = divmod(rank, self.ranks_per_node)
        return node * self.cards_per_node + place * self.cards_per_node // self.ranks_per_node

    def link(self, src: int, dst: int) -> Link:
        """The link that a message from `src` to `dst` takes."""
        return self.across if self.crosses(src, dst) else self.inside

    def crossing(self, src: np.ndarray, dst: np.ndarray) -> np.ndarray:
        """Which messages from `src` to `dst`, (M,) each, go to another node, (M,)."""
        return src // self.ranks_per_node != dst // self.ranks_per_node

    def routes(self, src: np.ndarray, dst: np.ndarray, crosses: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """What messages from `src` to `dst` pass on their way, and the bytes per second of each of these.

        `crosses` says which of them go to another node; all three are (M,). Each row, of (M, 3), indexes the second
        array: the card out, the card in and the switch. For a message inside a node all three point to entry 0, which
        has no limit.
        """
        num_cards = 1 + max((self.card_of(int(rank)) for rank in (*src, *dst)), default=0)
        cards = np.full(2 * num_cards, self.across.bandwidth_bytes_per_s)
        passed = [(2 + self.card_of(a), 2 + num_cards + self.card_of(b), SWITCH) if out else (0, 0, 0)
                  for a, b, out in zip(src.tolist(), dst.tolist(), crosses.tolist())]
        return (np.array(passed, dtype=int).reshape(-1, 3),
                np.concatenate([[np.inf, self.switch_bytes_per_s], cards]))
