"""L1: the bytes that the state of training takes on a rank: parameters, gradients, what the optimizer keeps."""
from __future__ import annotations

from dataclasses import asdict, dataclass

import numpy as np


@dataclass(frozen=True)
class StateBytes:
    """Bytes of parameters, of their gradients and of the optimizer's state: for one parameter, or on one rank.

    `copied`: the parameters' 16 bits are a copy of the optimizer's 32, and only ZeRO-1 and 2 hold one. FSDP2 gathers it
    from the shards of those. Stage 3 drops it after each layer, and where nothing is sharded there is none.
    """

    parameters: float
    gradients: float
    optimizer: float
    copied: bool = False

    @property
    def total(self) -> float:
        """All three together."""
        return self.parameters + self.gradients + self.optimizer

    @property
    def parts(self) -> dict[str, float]:
        """All three by name."""
        return {name: num_bytes for name, num_bytes in asdict(self).items() if name in SHARDED_FROM}

    def held(self, zero_stage: int) -> StateBytes:
        """What is there in a stage of ZeRO, wherever it is: without the copy where none is held."""
        parameters = self.parameters * (1 - self.copied * (zero_stage in (0, 3)))
        return StateBytes(parameters, self.gradients, self.optimizer)


ADAM_MIXED = StateBytes(2, 2, 12)  # 16 bits; the optimizer has a copy of the weights, momentum and variance in 32
ADAM_MIXED_GRADIENTS_32 = StateBytes(2, 4, 12)  # bf16, gradients added up in 32 bits
ADAM_32 = StateBytes(4, 4, 8)
# Of FSDP2 with parameters in 16 bits and gradients reduced in 32, as torchtitan sets it: in a pipeline, which
# sends them once in a step, they are whole until then (torch/distributed/fsdp, to_accumulated_grad_if_needed).
ADAM_FSDP2 = StateBytes(2, 4, 12, copied=True)


SHARDED_FROM = {"parameters": 3, "gradients": 2, "optimizer": 1}  # the first ZeRO stage that cuts each


def check_zero_stage(zero_stage: int) -> None:
    """Raises ValueError for what is not a ZeRO stage, 0 to 3."""
    if zero_stage not in range(4):
        raise ValueError(f"there is no ZeRO stage {zero_stage!r}: use 0, 1, 2 or 3")


def state_bytes(num_parameters: float, zero_stage: int = 0, num_shards: int = 1,
                each: StateBytes = ADAM_MIXED) -> StateBytes:
    """Bytes of state on each of N ranks: what a stage shards is over N (rajbhandari2020, figure 1).

    Stage 1 shards the optimizer's state, 2 the gradients too, 3 the parameters too; `each` is what one parameter
    takes. What is gathered for a moment, activations and what the allocator loses come on top. Raises ValueError for
    another stage or no shard.
    """
    check_zero_stage(zero_stage)
    if np.any(np.less(num_shards, 1)):  # one, or several at once in an array
        raise ValueError(f"num_shards is {num_shards}, but there is at least one")
    parameters, gradients, optimizer = (
        num_parameters * num_bytes / (num_shards if zero_stage >= SHARDED_FROM[what] else 1)
        for what, num_bytes in each.held(zero_stage).parts.items())
    return StateBytes(parameters, gradients, optimizer)
