"""L2: a layer that takes as long as it is told, so that ranks that share a few cores do not slow each other down."""
from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor, nn


class PacedLinear(nn.Linear):
    """A square linear layer whose forward and backward sleep for `forward_s` and `backward_s` seconds beside computing.

    A rank that sleeps uses no core, as one does that waits for its GPU. The times may be changed between steps.
    """

    def __init__(self, width: int, forward_s: float = 0.0, backward_s: float = 0.0) -> None:
        super().__init__(width, width)
        self.forward_s, self.backward_s = forward_s, backward_s

    def forward(self, input: Tensor) -> Tensor:
        """(..., width) to (..., width)."""
        time.sleep(self.forward_s)
        output: Tensor = _Pause.apply(super().forward(input), self.backward_s)
        return output


class _Pause(torch.autograd.Function):
    """The identity, whose backward sleeps: it runs before the gradients of the layer that made its input."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, backward_s: float) -> Tensor:
        ctx.backward_s = backward_s
        return input.view_as(input)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        time.sleep(ctx.backward_s)
        return gradients[0], None
