"""L3: hosts' network cards in the chunk player: which rank uses which, and what shares them in each step, in words.

The player's script draws the rest: which messages go through a card is known from who sends to whom, and those that are
under way at once get an equal part of it, at most.
"""
from __future__ import annotations

from collections import Counter
from typing import Any

from book.cost import Network
from book.widgets.player_run import Run, Transfer
from book.widgets.player_words import NUMBERS
from book.words import joined

MOST_CARDS = 8  # more are not drawn one by one
MOST_NAMED = 2  # more are counted
PARTS = {2: "half", 3: "a third", 4: "a quarter"}
OUT, IN = "out", "in"
Ways = dict[int, set[str]]  # by card


def cards_of(run: Run, network: Network) -> dict[str, Any]:
    """The cards as JSON data.

    `per`: ranks on a host; `of`: each rank's card; `names`: of each card, if they are few; `texts`: the distinct
    sentences about a step, and `says`: which of them each step has.
    """
    sentences = cards_in_words(run, network)
    texts, names = list(dict.fromkeys(sentences)), _names(run, network)
    return {"per": network.ranks_per_node, "of": [network.card_of(rank) for rank in range(run.world_size)],
            "names": names if len(names) <= MOST_CARDS else [], "texts": texts,
            "says": [texts.index(sentence) for sentence in sentences]}


def cards_in_words(run: Run, network: Network) -> list[str]:
    """A sentence about each step: which cards most messages share, and what each of these gets; "" without messages."""
    names = _names(run, network)
    return [_sentence(loads(run, step, network), names) for step in range(run.num_steps)]


def loads(run: Run, step: int, network: Network) -> Counter[tuple[int, str]] | None:
    """How many messages are under way through each (card, "out" or "in") in a step; None where no message is."""
    messages = {(t.leaves, t.src, t.dst) for t in run.transfers if _under_way(t, step)}
    if not messages:
        return None
    found: Counter[tuple[int, str]] = Counter()
    for _, src, dst in messages:
        if network.crosses(src, dst):
            found[network.card_of(src), OUT] += 1
            found[network.card_of(dst), IN] += 1
    return found


def _under_way(t: Transfer, step: int) -> bool:
    return t.leaves <= step <= (t.leaves if t.arrives is None else t.arrives)


def _names(run: Run, network: Network) -> list[str]:
    """The cards' names: "host 0's card", or "host 0's card 1" where it has several."""
    named = [divmod(card, network.cards_per_node) for card in range(network.card_of(run.world_size - 1) + 1)]
    return [f"host {host}'s card" + f" {own}" * (network.cards_per_node > 1) for host, own in named]


def _sentence(found: Counter[tuple[int, str]] | None, names: list[str]) -> str:
    if found is None:
        return ""
    if not found:
        return "No message leaves its host."
    most = max(found.values())
    if most == 1:
        return "No two messages share a card."
    busiest: Ways = {}
    for (card, way), num in found.items():
        if num == most:
            busiest.setdefault(card, set()).add(way)
    part = PARTS.get(most, f"1/{most}")
    number = NUMBERS[most].capitalize() if most < len(NUMBERS) else most
    return f"{number} messages at once share {_named(busiest, names)}: each gets at most {part} of it."


def _named(busiest: Ways, names: list[str]) -> str:
    """Cards, with the ways in which they are shared."""
    if len(busiest) == len(names) > 1 and all(len(ways) == 2 for ways in busiest.values()):
        return "each card (each way)"
    by_ways = {end: sorted(card for card, ways in busiest.items() if ways == wanted)
               for end, wanted in (("each way", {OUT, IN}), (OUT, {OUT}), (IN, {IN}))}
    return _listed([f"{_listed([names[card] for card in cards], MOST_NAMED)} ({end})"
                    for end, cards in by_ways.items() if cards])


def _listed(texts: list[str], most_named: int = 3) -> str:
    return f"each of {len(texts)} cards" if len(texts) > most_named else joined(texts)
