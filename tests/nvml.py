"""A library in the place of nvidia-ml-py, whose cards answer as NVML's reference says: no GPU is needed to test."""
from __future__ import annotations

from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any


class NVMLError(Exception):
    """What NVML raises."""


@dataclass
class FakeCard:
    """A card: its place on PCI, and by question what it answers; a question that is not there is not supported."""

    bus: int
    answers: dict[str, Any] = field(default_factory=dict)
    links: dict[int, Any] = field(default_factory=dict)  # where NVLinks lead: another card, "switch", None: down
    levels: dict[int, int] = field(default_factory=dict)  # by the bus of another card
    errors: tuple[int, int] = (0, 0)
    xids: list[int] = field(default_factory=list)
    is_lost: bool = False


H100 = {"Name": "NVIDIA H100 80GB HBM3", "ClockInfo": 345, "MaxClockInfo": 1980, "CurrentClocksEventReasons": 0x01,
        "RemappedRows": (0, 0, 0, 0), "CurrPcieLinkWidth": 16, "MaxPcieLinkWidth": 16}


def library(cards: list[FakeCard], driver: str = "580.65.06", cuda: int = 13000, older: bool = False) -> Any:
    """The module `pynvml` of a machine with these cards; `older`: with the names that questions had before 535."""
    made: Any = ModuleType("pynvml")
    made.NVMLError = NVMLError
    made.NVML_CLOCK_SM, made.NVML_MEMORY_ERROR_TYPE_UNCORRECTED = 1, 1
    made.NVML_VOLATILE_ECC, made.NVML_AGGREGATE_ECC, made.NVML_NVLINK_DEVICE_TYPE_SWITCH = 0, 1, 2
    made.open = 0

    def opened(by: int) -> None:
        made.open += by

    def handle(number: int) -> FakeCard:
        if cards[number].is_lost:
            raise NVMLError("GPU is lost")
        return cards[number]

    def pci(card: FakeCard) -> Any:
        return SimpleNamespace(domain=0, bus=card.bus, device=0)

    def answer(name: str) -> Any:
        def asked(card: FakeCard, *_: Any) -> Any:
            assert made.open > 0, "NVML is asked before it is initialized"
            if name not in card.answers:
                raise NVMLError("Not Supported")
            return card.answers[name]
        return asked

    def end(card: FakeCard, link: int) -> Any:
        if link not in card.links:
            raise NVMLError("Invalid Argument")
        return card.links[link]

    def level(card: FakeCard, other: FakeCard) -> int:
        if other.bus not in card.levels:
            raise NVMLError("Not Supported")
        return card.levels[other.bus]

    def wait(events: list[FakeCard], _: int) -> Any:
        card = next((one for one in events if one.xids), None)
        if card is None:
            raise NVMLError("Timeout")
        return SimpleNamespace(device=card, eventData=card.xids.pop(0))

    for name in ("Name", "ClockInfo", "MaxClockInfo", "RemappedRows", "CurrPcieLinkWidth", "MaxPcieLinkWidth",
                 "CurrentClocksThrottleReasons", *(() if older else ("CurrentClocksEventReasons",))):
        setattr(made, f"nvmlDeviceGet{name}", answer(name))
    made.nvmlInit, made.nvmlShutdown = (lambda: opened(1)), (lambda: opened(-1))
    made.nvmlSystemGetDriverVersion, made.nvmlSystemGetCudaDriverVersion = (lambda: driver), (lambda: cuda)
    made.nvmlDeviceGetCount, made.nvmlDeviceGetHandleByIndex = (lambda: len(cards)), handle
    made.nvmlDeviceGetPciInfo = pci
    made.nvmlDeviceGetTotalEccErrors = lambda card, kind, counter: card.errors[counter]
    made.nvmlDeviceGetFieldValues = lambda card, ids: [SimpleNamespace(
        nvmlReturn=0 if "recovery" in card.answers else 3, value=SimpleNamespace(uiVal=card.answers.get("recovery")))]
    made.nvmlDeviceGetNvLinkState = lambda card, link: int(end(card, link) is not None)
    made.nvmlDeviceGetNvLinkRemoteDeviceType = lambda card, link: 2 if end(card, link) == "switch" else 0
    made.nvmlDeviceGetNvLinkRemotePciInfo = lambda card, link: pci(
        end(card, link) if isinstance(end(card, link), FakeCard) else FakeCard(200))
    made.nvmlDeviceGetTopologyCommonAncestor = level
    made.nvmlEventSetCreate, made.nvmlEventSetFree = list, (lambda events: None)
    made.nvmlDeviceRegisterEvents = lambda card, kinds, events: events.append(card)
    made.nvmlEventSetWait_v2 = wait
    return made
