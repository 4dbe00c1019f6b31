"""L3: a step on a mesh with torch's own parts: how parameters are placed, and what a checkpoint brings back."""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from book.checks.compare import first_wrong
from book.checks.verdict import CheckFailed, short
from book.mesh import Mesh

Placed = Mapping[str, tuple[tuple[Any, ...], int]]


def torch_failure(message: str) -> str:
    """An error of a rank that combines torch's own parts, with what to look at where torch says it of itself."""
    hints = {
        "view": "a layer gives a shape that the next one does not take",
        "Missing key": "the checkpoint has no such name: was it saved, under a name that means the same in all shapes?",
    }
    hint = next((hint for word, hint in hints.items() if word in message), None)
    return f"{message}\n{hint}" if hint else message


def placements(placed: Sequence[Placed], layout: Mapping[str, int | None], mesh: Mesh,
               sizes: Mapping[str, int]) -> None:
    """`placed` has by rank, for each parameter, its placements and how many numbers the rank holds of it.

    `layout` says along which dim a parameter is to be cut over tp, `sizes` how many numbers it has as a whole.
    """
    for rank, own in enumerate(placed):
        for name, (where, num) in own.items():
            whole = [placement for placement in where]
            cuts = [placement for placement in whole if placement.is_shard()]
            if not where:
                raise CheckFailed(f"rank {rank}'s {name} is an ordinary tensor: fully_shard the part too, after its "
                                  "blocks, and what is left of it is sharded over dp")
            if layout[name] is not None and len(where) < 2:
                raise CheckFailed(f"rank {rank}'s {name} is not cut over tp: put its layer into the plan, by its name "
                                  "in the block, and call parallelize_module before fully_shard")
            if layout[name] is not None and not any(cut.dim == layout[name] for cut in cuts[-1:]):
                raise CheckFailed(f"rank {rank}'s {name} is cut along dim {cuts[-1].dim if cuts else None} over tp, and "
                                  f"should be along dim {layout[name]}: q, k, v and up by columns (dim 0 of weight), "
                                  "out and down by rows (dim 1)")
        del num


def saved(folder: str, names: Sequence[str]) -> None:
    """There must be a checkpoint in the folder."""
    if not (Path(folder) / ".metadata").exists():
        raise CheckFailed("save has written no checkpoint into the folder: dcp.save(state, checkpoint_id=folder), on "
                          "every rank")
    del names


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
                      "not: its moments and its step count belong into the checkpoint, and back into the optimizer")
