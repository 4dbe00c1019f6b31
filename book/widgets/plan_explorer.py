"""L3: the planner's answer for what the reader chooses, computed in the page: layout, time, memory, hours and cost."""
from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from book.cost import MACHINES, MODELS, Plan, cluster_of, plan
from book.cost.question import LONG
from book.cost.machines import CONSTANTS, EACH, SOFTWARE, like
from book.cost.scoreboard import bar
from book.widgets.explorer import Dial, Explorer
from book.widgets.page import heading, listed
from book.widgets.show import show

if TYPE_CHECKING:
    from book.widgets.live import Live

GPUS = (8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 4096, 8192, 16384)
HARDWARE = ("memory_bytes", "flops_per_s", "memory_bytes_per_s", "inside_bytes_per_s", "across_bytes_per_s",
            "gpus_per_node")
PLANNED = SOFTWARE[:5]  # Megatron-DeepSpeed's constants are of steps of 2021 to 2023, on A100s alone
CONSTANT = ("efficiency", "num_passes", "usable_share", "overheads")
MEMORY_BYTES = tuple(sorted({64e9, 120e9, 240e9, 288e9, *(machine.memory_bytes for machine in MACHINES.values())}))
NETWORK = tuple(sorted({3.125e9, 6.25e9, 12.5e9, 200e9, 400e9,
                        *(machine.across_bytes_per_s for machine in MACHINES.values())}))
MILLIONS = (0.5, 1, 2, 4, 8, 16, 32, 64)
DOLLARS = (0.5, 1, 1.5, 2, 2.5, 3, 4, 5, 6, 8, 10)


def plan_explorer(model: str = "llama3-70b", gpus: int = 64, gpu: str = "H100", tokens: float = 2e12,
                  price: float = 2.5) -> PlanExplorer | Live:
    """What `book.cost.plan` answers, for a model, GPUs, memory, network, batch and price of choice.

    The arguments are what it opens with, as in `plan`; all but `tokens` can be changed. Raises what `plan` raises.
    """
    return show(PlanExplorer(model, gpus, gpu, tokens, price))


class PlanExplorer(Explorer):
    """What the explorer starts from; raises ValueError for what a reader can't choose."""

    widget = "plan_explorer"

    def __init__(self, model: str, gpus: int, gpu: str, tokens: float, price: float):
        self.answer: Plan = plan(model, gpus, gpu, tokens, price)
        machine = cluster_of(gpu, gpus, SOFTWARE[0])
        names = sorted((name for name in MODELS if MODELS[name].num_parameters > 1e9),
                       key=lambda name: MODELS[name].num_parameters)
        super().__init__("Plan a training run", (
            Dial("model", "model", tuple(names), model),
            Dial("gpu", "GPU", tuple(map(str.upper, MACHINES)), gpu.upper()),
            Dial("software", "software", PLANNED, PLANNED[0]),
            Dial("gpus", "GPUs", GPUS, gpus), Dial("memory_bytes", "memory", MEMORY_BYTES, machine.memory_bytes, "B"),
            Dial("across_bytes_per_s", "network", NETWORK, machine.across_bytes_per_s, "B/s"),
            Dial("millions", "batch", MILLIONS, 4, "million"), Dial("price", "GPU hour", DOLLARS, price, "$")))

    def data(self, live: bool) -> dict[str, Any]:
        """The dials; models and machines in numbers; for kinds of GPUs and each software constants and error bars."""
        models = {name: asdict(MODELS[name].sizes) | {"num_kv_heads": MODELS[name].kv_heads,
                                                      "num_parameters": MODELS[name].num_parameters}
                  for name in self.dials[0].values}
        machines = {name.upper(): {key: getattr(cluster_of(name, 1), key) for key in HARDWARE} | {"kind": kind_of(name)}
                    for name in MACHINES}
        kinds = {f"{kind_of(name)} {software}": {
            key: value for key, value in asdict(cluster_of(name, 1, software)).items() if key in CONSTANT} | {
            "bars": [bar(name, software, *of) for of in ((False,), (False, True), (True,))]}
            for name in MACHINES for software in PLANNED}
        return {**super().data(live), "models": models, "machines": machines, "kinds": kinds, "long": LONG,
                "each": {name: asdict(EACH[name]) for name in PLANNED}, "tokens": self.answer.tokens}

    def text(self) -> str:
        """One line that says what is shown."""
        return f"{self.title} {self.answer.layout}: {self.answer.cost.step_s:.4g} s a step, modelled"

    def words(self) -> str:
        """The answer, line by line."""
        return heading(self.title, "modelled") + listed(map(str.strip, str(self.answer).splitlines()), "ul")


def kind_of(name: str) -> str:
    """The machine whose constants and error bars a GPU has here; "new" where no step was measured on such a one."""
    return next((key for key in (name, like(name)) if key in CONSTANTS), "new")
