"""L2: one stage of the small GPT: consecutive blocks, with the embedding on the first stage and the head on the last.

Shapes: B sequences in the batch, T tokens, D width, V vocabulary.
"""
from __future__ import annotations

import torch
from torch import nn

from book.parallel.model import GPT


class GPTStage(nn.Module):
    """Stage `stage` of `num_stages`: blocks `first` up to, not including, `last` of a GPT.

    It takes over the model and removes what other stages hold. The rest keeps its names, so the stages'
    `stage.model.state_dict()` together make up the whole model's. Raises ValueError for more stages than blocks, and
    for a stage number out of range.
    """

    def __init__(self, model: GPT, stage: int, num_stages: int) -> None:
        super().__init__()
        num_blocks = len(model.blocks)
        if not 1 <= num_stages <= num_blocks:
            raise ValueError(f"{num_blocks} blocks can't make {num_stages} stages: each needs at least one block")
        if not 0 <= stage < num_stages:
            raise ValueError(f"there is no stage {stage}: stages are 0 to {num_stages - 1}")
        self.first, self.last = (num_blocks * s // num_stages for s in (stage, stage + 1))
        self.embeds, self.predicts = stage == 0, stage == num_stages - 1
        for block in set(range(num_blocks)) - set(range(self.first, self.last)):
            model.blocks[block] = nn.Identity()  # a placeholder without weights: the other blocks keep their numbers
        if not self.embeds:
            model.token_embedding = model.position_embedding = None
        if not self.predicts:
            model.norm = model.head = None
        self.model = model

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(B, T, D) -> (B, T, D); the first stage takes token numbers (B, T), the last gives logits (B, T, V)."""
        x_BTD = self.model.embed(x) if self.embeds else x
        x_BTD = self.model.apply_blocks(x_BTD, self.first, self.last)
        return self.model.predict(x_BTD) if self.predicts else x_BTD
