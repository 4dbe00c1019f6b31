"""L2: what is wrong with GPUs, by what NVML says of them, and what to do about it."""
from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from book.doctor.cards import AT_WORK, LOCKED, RECOVERY, SAYS_WHY, SLOWED, Card, Cards, Watched
from book.doctor.findings import Finding
from book.words import counted, listed

RESET = "drain the node, then nvidia-smi --gpu-reset -i {}; have the card replaced if it comes back"
XID_PAGE = "https://docs.nvidia.com/deploy/xid-errors"


def ailments(cards: Cards) -> Iterator[Finding]:
    """What is wrong with cards, the gravest first."""
    if "mismatch" in (cards.silent or "").lower():
        yield Finding(f"the driver and its library NVML are not of one version ({cards.silent}): no program can use "
                      "the GPUs", "restart the machine, as an update of the driver needs that")
    for number, card in enumerate(cards.cards):
        if card.is_lost:
            yield Finding(f"GPU {number} does not answer: it has fallen off the bus, or its driver has given it up",
                          f"`dmesg | grep Xid` shows the error, {XID_PAGE} its meaning; drain the node and restart it")
    for number, card in enumerate(cards.cards):
        yield from _broken(number, card)
        yield from _slow(number, card)
    yield from _unlike(cards.cards)
    yield from _links(cards)


def _broken(number: int, card: Card) -> Iterator[Finding]:
    if card.recovery:
        yield Finding(f"GPU {number} asks {RECOVERY.get(card.recovery, 'for help')}, after an error of the hardware",
                      f"`dmesg | grep Xid` shows the error, {XID_PAGE} its meaning; stop the job, and do as it asks")
    if card.errors:
        ever = f", and {card.errors_ever:,} ever" if card.errors_ever else ""
        yield Finding(f"GPU {number} has had {counted(card.errors, 'memory error')} since the driver was loaded that "
                      f"could not be corrected{ever}", RESET.format(number))
    if card.is_worn:
        yield Finding(f"GPU {number} has no spare rows of memory left to replace faulty ones with",
                      "have the card replaced")
    elif card.remapping:
        yield Finding(f"GPU {number} has faulty rows of memory that are replaced at its next reset",
                      f"drain the node, then nvidia-smi --gpu-reset -i {number}")


def _slow(number: int, card: Card) -> Iterator[Finding]:
    for why in slowed(card.reasons & ~AT_WORK):
        yield Finding(f"GPU {number} runs below its clock: {why}", SLOW_REMEDY)
    if card.reasons & LOCKED:
        yield Finding(f"the clock of GPU {number} is limited by the clocks of applications",
                      "nvidia-smi --reset-gpu-clocks and --reset-applications-clocks, unless that was meant")
    if card.lanes and card.lanes[0] < card.lanes[1]:
        yield Finding(f"GPU {number} has {card.lanes[0]} of its {card.lanes[1]} PCIe lanes",
                      "have the card seated anew")


SLOW_REMEDY = ("nvidia-smi -q -d PERFORMANCE,TEMPERATURE,POWER shows more; look at fans, air and the power limit "
               "(nvidia-smi -pl)")


def slowed(reasons: int) -> list[str]:
    """Why a clock is low, in words; an idle GPU's is low for no reason that hurts."""
    return [why for bit, why in SLOWED.items() if reasons & bit and not reasons & SAYS_WHY.get(bit, 0)]


def _unlike(cards: Sequence[Card]) -> Iterator[Finding]:
    """Cards of one name that can do less than the others of this machine."""
    for what, of, remedy in (("clock may rise to {} MHz", "most_clock", "nvidia-smi -q -d CLOCK shows what limits it"),
                             ("NVLinks that are up are {}", "links", "nvidia-smi nvlink --status shows which are down; "
                              "then `dmesg | grep Xid`, and have its seat or bridge looked at")):
        for name in dict.fromkeys(card.name for card in cards):
            values = {number: getattr(card, of) for number, card in enumerate(cards)
                      if card.name == name and getattr(card, of) is not None}
            most = max(values.values(), default=0)
            few = [number for number, value in values.items() if value < most]
            if few:
                found = listed(what.format(value) for value in sorted({values[number] for number in few}))
                yield Finding(f"of {_cards(few)} the {found}, of the others of this machine {most}", remedy)


def _links(cards: Cards) -> Iterator[Finding]:
    joined = {path.startswith("NV") for row in cards.paths for path in row if path not in ("X", "?")}
    if joined == {True, False}:
        groups = " and ".join(f"{{{', '.join(map(str, group))}}}" for group in linked(cards.paths))
        yield Finding(f"NVLink joins only the GPUs of {groups}; all other pairs talk over PCIe",
                      "keep tensor parallelism inside such a group: CUDA_VISIBLE_DEVICES sets the order of ranks")


def linked(paths: Sequence[Sequence[str]]) -> list[tuple[int, ...]]:
    """The groups of cards that NVLinks join, over other cards too."""
    left, found = set(range(len(paths))), []
    while left:
        group, new = set[int](), {min(left)}
        while new:
            group |= new
            new = {other for one in new for other, path in enumerate(paths[one]) if path.startswith("NV")} - group
        left -= group
        found.append(tuple(sorted(group)))
    return [group for group in found if len(group) > 1]


def while_it_ran(seen: Watched, before: Sequence[Card] = ()) -> Iterator[Finding]:
    """What cards said while all-reduces ran, but for what they had said before."""
    for number, xid in dict.fromkeys(seen.xids):
        yield Finding(f"GPU {number} has reported Xid {xid} while all-reduces ran", f"{XID_PAGE} says what it means")
    for number, reasons in seen.reasons.items():
        known = before[number].reasons & ~AT_WORK if number < len(before) else 0
        for why in slowed(reasons & ~known):
            yield Finding(f"GPU {number} ran below its clock while all-reduces ran: {why}", SLOW_REMEDY)


def _cards(numbers: Iterable[int]) -> str:
    every = list(numbers)
    return f"GPU{'s' * (len(every) > 1)} {listed(every)}"


def cards_told(cards: Cards) -> Iterator[str]:
    """The driver, clocks, memory errors of a card's life, and what joins which cards, as a table."""
    if cards.silent is not None:
        yield f"NVML tells nothing of clocks, memory errors and links: {cards.silent}"
        return
    cuda = f", up to CUDA {cards.cuda[0]}.{cards.cuda[1]}" if cards.cuda else ""
    yield f"driver {cards.driver}{cuda}"
    clocks = sorted({card.clock for card in cards.cards if card.clock is not None})
    most = sorted({card.most_clock for card in cards.cards if card.most_clock is not None})
    if clocks and most:
        yield f"clocks now {_range(clocks)} MHz, at most {_range(most)}"
    worn = {number: card.errors_ever for number, card in enumerate(cards.cards) if card.errors_ever}
    if worn:
        yield "memory errors that could not be corrected, ever: " + ", ".join(
            f"GPU {number} {num:,}" for number, num in worn.items())
    if len(cards.paths) > 1:
        yield "what joins GPUs: NV: so many NVLinks, else PCIe from PIX, one switch, to SYS, across processors"
        yield from _table(cards.paths)


def _range(values: Sequence[int]) -> str:
    return f"{values[0]}" if len(values) == 1 else f"{values[0]} to {values[-1]}"


def _table(paths: Sequence[Sequence[str]]) -> Iterator[str]:
    names = [str(number) for number in range(len(paths))]
    yield "      " + "".join(f"{name:>6}" for name in names)
    for name, row in zip(names, paths):
        yield f"  {name:>4}" + "".join(f"{path:>6}" for path in row)
