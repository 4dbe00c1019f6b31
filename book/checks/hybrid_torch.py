"""L3: a step on a mesh with torch's own parts: how parameters are placed, and what a checkpoint brings back."""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from book.checks.compare import first_wrong
from book.checks.verdict import CheckFailed, short
from book.mesh import Mesh

Placed = Mapping[str, tuple[Any, ...]]


def torch_failure(message: str) -> str:
    """An error of a rank that combines torch's own parts, with what to look at where torch says it of itself."""
    hints = {
        "Cannot distribute a DTensor": "what is cut is sharded over dp already: cut over tp first, then shard over dp",
        "value was None when it should not be": 'has fully_shard been given a mesh? mesh=mesh["dp"]',
        "KeyError: 'betas'": "the optimizer's settings are in a list without names, in which stages overwrite one "
                             "another's: flatten_optimizer_state_dict=True files them by parameter",
        "Missing key": "the checkpoint has no such name: was it saved, under a name that means the same in all shapes?",
    }
    hint = next((hint for word, hint in hints.items() if word in message), None)
    return f"{message}\n{hint}" if hint else message


def placements(placed: Sequence[Placed], layout: Mapping[str, int | None]) -> None:
    """`placed` has by rank, for each parameter, the placements of its DTensor, none for an ordinary tensor.

    `layout` says along which dim it is to be cut over tp; what fully_shard does comes before that in the placements.
    """
    for rank, own in enumerate(placed):
        for name, where in own.items():
            dim = layout[name]
            if not where:
                raise CheckFailed(f"rank {rank}'s {name} is an ordinary tensor: fully_shard the part too, after its "
                                  "blocks, and what is left of it is sharded over dp")
            if dim is None:
                continue
            if len(where) < 2:
                raise CheckFailed(f"rank {rank}'s {name} has one placement, {where[0]}: it is cut over tp by "
                                  "parallelize_module, if the plan names its layer, and then over dp by fully_shard")
            if not where[-1].is_shard() or where[-1].dim != dim:
                raise CheckFailed(f"rank {rank}'s {name} is placed as {where[-1]} over tp, and should be cut along "
                                  f"dim {dim}: q, k, v and up by columns, out and down by rows")


def saved(folder: str) -> None:
    """There must be a checkpoint in the folder."""
    if not (Path(folder) / ".metadata").exists():
        raise CheckFailed("save has written no checkpoint into the folder: dcp.save(state, checkpoint_id=folder), on "
                          "every rank")


def resumed(losses: Sequence[Sequence[Any]], expected: Sequence[float], num_saved: int, mesh: Mesh) -> float:
    """The losses after `num_saved` steps must go on as in a run that was not interrupted. Returns the last."""
    last = mesh.size("pp") - 1
    rows = [[float(loss) for loss in losses[mesh.rank_at(pp=last, dp=replica, tp=0)]]
            for replica in range(mesh.size("dp"))]
    got, want = np.mean(rows, axis=0), expected[num_saved:]
    step = first_wrong(got, want)
    if step is None:
        return float(got[-1])
    head = f"resumed at {mesh.shape}, step {num_saved + step} has the loss {short(got[step])}, not {short(want[step])}"
    if step == 0:
        raise CheckFailed(f"{head}: the weights are not those that were saved. dcp.load fills the dict that it is "
                          "given: has the model's state been handed back to the part?")
    raise CheckFailed(f"{head}, and the first step was right: so the weights came back, and the optimizer's state did "
                      "not: its moments and its step count belong into the checkpoint, and back into the optimizer. So "
                      "do its settings, such as the learning rate, which only set_state_dict hands back")
