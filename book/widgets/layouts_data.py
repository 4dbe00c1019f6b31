"""L3: the layouts that a chart shows, as small numbers.

Of all layouts with the same pp, tp, ZeRO stage and recomputation the fastest that fits stands for all (where none
fits, the smallest), and nothing of the front is left out: among what is shown, whatever those four are, the fastest
that fits is the fastest of all.
"""
from __future__ import annotations

from typing import Any

import numpy as np

from book.cost import Search, usable_bytes
from book.cost.plan import PARTS

SIZES = {"pp": "pp", "dp": "dp", "tp": "tp", "b": "micro_batch_size", "v": "stages_per_rank", "zero": "zero_stage",
         "sp": "sequence_parallel", "how": "recompute"}
HELD = {"state": "state_bytes", "kept": "activation_bytes", "moment": "gathered_bytes"}
UNIT_BYTES = 1e7  # a hundredth of a GB
MOST_GROUPS = 420
GROUPED = ("pp", "tp", "zero_stage", "recompute")


def shown(found: Search) -> np.ndarray:
    """Positions of the layouts that stand in the chart, fastest first; of very many groups the fastest."""
    step_s, memory = (found.estimates.array(name) for name in ("step_s", "memory_bytes"))
    groups = np.column_stack([found.layouts.array(name) for name in GROUPED])
    order = np.lexsort([np.where(found.fits, step_s, memory), ~found.fits, *groups.T])
    heads = order[np.concatenate([[True], (np.diff(groups[order], axis=0) != 0).any(axis=1)])]
    chosen = np.union1d(heads[np.argsort(step_s[heads], kind="stable")][:MOST_GROUPS], found.front())
    return chosen[np.lexsort([memory[chosen], step_s[chosen]])]


def layouts_payload(found: Search) -> dict[str, Any]:
    """The layouts as columns: sizes, hundredths of a GB, seconds, thousandths of a step for each of its parts."""
    chosen = shown(found)
    layouts, costs = found.layouts.take(chosen), found.estimates.take(chosen)
    step_s = costs.array("step_s")
    columns = {name: layouts.array(field).tolist() for name, field in SIZES.items()}
    columns |= {name: np.rint(costs.array(field) / UNIT_BYTES).astype(int).tolist() for name, field in HELD.items()}
    columns["step"] = [float(f"{seconds:.4g}") for seconds in step_s]
    columns["mfu"] = np.rint(1000 * costs.array("mfu")).astype(int).tolist()
    columns["fits"] = found.fits[chosen].astype(int).tolist()
    parts = [np.rint(1000 * costs.array(part) / step_s).astype(int).tolist() for part in PARTS]
    return {"columns": columns, "parts": parts, "usable": round(usable_bytes(found.cluster) / UNIT_BYTES),
            "total": len(found), "fitting": int(found.fits.sum())}
