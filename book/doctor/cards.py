"""L2: what NVML says of this machine's GPUs: driver, clocks, memory errors, and what links which of them.

NVML is the library behind nvidia-smi. It is asked through nvidia-ml-py, where that is installed; names are those of its
reference (nvmlutilization). A card or a driver that does not know a question leaves None, or nothing.
"""
from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from book.extras import optional

LIBRARY, PACKAGE = "pynvml", "nvidia-ml-py"
MOST_LINKS = 36  # of a card, of which NVML may tell
SLOWED = {0x04: "it has reached its power limit", 0x08: "the hardware slows it down, for heat or power",
          0x20: "it is too hot", 0x40: "it is so hot that the hardware slows it down",
          0x80: "the power supply asks it to brake"}  # bits of nvmlClocksEventReasons
LOCKED, AT_WORK = 0x02, 0x04  # limited by the clocks of applications; at its power limit, as busy cards are
SAYS_WHY = {0x08: 0x40 | 0x80}  # bits that say more precisely what another says
PATHS = {0: "PSB", 10: "PIX", 20: "PXB", 30: "PHB", 40: "NODE", 50: "SYS"}  # nvmlGpuTopologyLevel, as in `topo -m`
RECOVERY = {1: "to be reset", 2: "its node to be restarted", 3: "its peer-to-peer traffic to be drained",
            4: "to be drained and reset", 5: "its IMEX domain to be recovered", 6: "its bus to be reset",
            7: "its system to be restarted"}  # nvmlFI GET_GPU_RECOVERY_ACTION
FIELD_RECOVERY, XID_EVENTS = 230, 0x08
SAMPLE_S = 0.1


@dataclass(frozen=True)
class Card:
    """A GPU: clocks in MHz, counts of memory errors that could not be corrected, since the driver was loaded and ever.

    `reasons` are bits of SLOWED and LOCKED, `remapping` says whether replaced rows of memory wait for a reset,
    `is_worn` whether there are none left to replace with. `lanes` are PCIe's, now and at most; `links` the NVLinks that
    are up. A card that `is_lost` has fallen off the bus, and says nothing.
    """

    name: str
    clock: int | None = None
    most_clock: int | None = None
    reasons: int = 0
    errors: int | None = None
    errors_ever: int | None = None
    remapping: bool = False
    is_worn: bool = False
    recovery: int = 0
    lanes: tuple[int, int] | None = None
    links: int = 0
    is_lost: bool = False


@dataclass(frozen=True)
class Cards:
    """What NVML says: the driver, the newest CUDA that it can run, and the path from each card to each other one.

    `paths` has "NV4" for four NVLinks, words of PATHS for PCIe, and "?" where that is not known. `silent` says why
    NVML says nothing, None where it answers.
    """

    driver: str = ""
    cuda: tuple[int, int] | None = None
    cards: tuple[Card, ...] = ()
    paths: tuple[tuple[str, ...], ...] = ()
    silent: str | None = None


def read_cards() -> Cards:
    """What NVML says now."""
    nvml = optional(LIBRARY)
    if nvml is None:
        return Cards(silent=f"{PACKAGE} is not installed")
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        return Cards(silent=str(error))
    try:
        handles = _handles(nvml)
        ends = [_ends(nvml, handle) for handle in handles]
        version = _asked(nvml, nvml.nvmlSystemGetCudaDriverVersion)
        return Cards(str(_asked(nvml, nvml.nvmlSystemGetDriverVersion) or ""),
                     (version // 1000, version % 1000 // 10) if version else None,
                     tuple(_card(nvml, handle, len(links)) for handle, links in zip(handles, ends)),
                     _paths(nvml, handles, ends))
    finally:
        nvml.nvmlShutdown()


def _handles(nvml: Any) -> list[Any]:
    """Each card's, by its number; None for one that has fallen off the bus."""
    return [_asked(nvml, nvml.nvmlDeviceGetHandleByIndex, number)
            for number in range(_asked(nvml, nvml.nvmlDeviceGetCount) or 0)]


def _asked(nvml: Any, question: Callable[..., Any], *about: Any) -> Any:
    """What NVML answers; None where it does not."""
    try:
        return question(*about)
    except nvml.NVMLError:
        return None


def _card(nvml: Any, handle: Any, links: int) -> Card:
    if handle is None:
        return Card("GPU", is_lost=True)

    def ask(name: str, *more: Any) -> Any:
        return _asked(nvml, getattr(nvml, f"nvmlDeviceGet{name}"), handle, *more)

    rows, now, most = ask("RemappedRows"), ask("CurrPcieLinkWidth"), ask("MaxPcieLinkWidth")
    errors, errors_ever = (ask("TotalEccErrors", nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, counter)
                           for counter in (nvml.NVML_VOLATILE_ECC, nvml.NVML_AGGREGATE_ECC))
    clock, most_clock = (ask(name, nvml.NVML_CLOCK_SM) for name in ("ClockInfo", "MaxClockInfo"))
    return Card(str(ask("Name") or "GPU"), clock, most_clock, _reasons(nvml, handle), errors, errors_ever,
                bool(rows and rows[2]), bool(rows and rows[3]), _recovery(nvml, handle),
                (now, most) if now and most else None, links)


def _reasons(nvml: Any, handle: Any) -> int:
    """Why the clock is what it is; the question's name has changed with driver 535."""
    newer = getattr(nvml, "nvmlDeviceGetCurrentClocksEventReasons", None)
    found = _asked(nvml, newer, handle) if newer else None
    return int(_asked(nvml, nvml.nvmlDeviceGetCurrentClocksThrottleReasons, handle) or 0 if found is None else found)


def _recovery(nvml: Any, handle: Any) -> int:
    found = _asked(nvml, nvml.nvmlDeviceGetFieldValues, handle, [FIELD_RECOVERY])
    return int(found[0].value.uiVal) if found and found[0].nvmlReturn == 0 else 0


End = tuple[bool, "tuple[int, int, int] | None"]  # whether a switch is there, and the address of what is there


def _ends(nvml: Any, handle: Any) -> list[End]:
    """Where a card's NVLinks lead that are up."""
    if handle is None:
        return []
    up = [link for link in range(MOST_LINKS) if _asked(nvml, nvml.nvmlDeviceGetNvLinkState, handle, link)]
    kinds = [_asked(nvml, nvml.nvmlDeviceGetNvLinkRemoteDeviceType, handle, link) for link in up]
    places = [_address(_asked(nvml, nvml.nvmlDeviceGetNvLinkRemotePciInfo, handle, link)) for link in up]
    return [(kind == nvml.NVML_NVLINK_DEVICE_TYPE_SWITCH, place) for kind, place in zip(kinds, places)]


def _paths(nvml: Any, handles: Sequence[Any], ends: Sequence[Sequence[End]]) -> tuple[tuple[str, ...], ...]:
    """What joins each card to each: NVLinks from one to the other or to switches that both are on, or PCIe."""
    places = [_place(nvml, handle) for handle in handles]
    switched = [sum(is_switch for is_switch, _ in links) for links in ends]

    def path(one: int, other: int) -> str:
        if handles[one] is None or handles[other] is None:
            return "?"
        direct = sum(place == places[other] for _, place in ends[one])
        if num := direct or min(switched[one], switched[other]):
            return f"NV{num}"
        return PATHS.get(_asked(nvml, nvml.nvmlDeviceGetTopologyCommonAncestor, handles[one], handles[other]), "?")

    numbers = range(len(handles))
    return tuple(tuple("X" if one == other else path(one, other) for other in numbers) for one in numbers)


def _place(nvml: Any, card: Any) -> tuple[int, int, int] | str:
    return (card is not None and _address(_asked(nvml, nvml.nvmlDeviceGetPciInfo, card))) or "nowhere"


def _address(pci: Any) -> tuple[int, int, int] | None:
    return (pci.domain, pci.bus, pci.device) if pci else None


@dataclass
class Watched:
    """What cards said while something ran: by card the bits of `reasons`, and Xids with their card."""

    reasons: dict[int, int] = field(default_factory=dict)
    xids: list[tuple[int, int]] = field(default_factory=list)


@contextmanager
def watched() -> Iterator[Watched]:
    """Ask cards over and over why their clocks are what they are, and listen for Xids, while something runs."""
    nvml, seen, over = optional(LIBRARY), Watched(), threading.Event()
    if nvml is None or read_cards().silent is not None:
        yield seen
        return
    nvml.nvmlInit()
    handles = {number: handle for number, handle in enumerate(_handles(nvml)) if handle is not None}
    events = _events(nvml, [*handles.values()])
    thread = threading.Thread(target=_look, args=(nvml, handles, events, seen, over), daemon=True)
    thread.start()
    try:
        yield seen
    finally:
        over.set()
        thread.join()
        if events is not None:
            nvml.nvmlEventSetFree(events)
        nvml.nvmlShutdown()


def _events(nvml: Any, handles: Sequence[Any]) -> Any:
    """A set of events that has the Xids of the cards that tell them; None where NVML has none."""
    found = _asked(nvml, nvml.nvmlEventSetCreate)
    for handle in handles if found is not None else ():
        _asked(nvml, nvml.nvmlDeviceRegisterEvents, handle, XID_EVENTS, found)
    return found


def _look(nvml: Any, handles: Mapping[int, Any], events: Any, seen: Watched, over: threading.Event) -> None:
    places = {_place(nvml, handle): number for number, handle in handles.items()}
    while not over.wait(SAMPLE_S):
        for number, handle in handles.items():
            seen.reasons[number] = seen.reasons.get(number, 0) | _reasons(nvml, handle)
        while event := _asked(nvml, nvml.nvmlEventSetWait_v2, events, 0) if events is not None else None:
            with suppress(KeyError):
                seen.xids.append((places[_place(nvml, event.device)], int(event.eventData)))
