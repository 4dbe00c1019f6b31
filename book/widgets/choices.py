"""L3: several runs in one widget: what a reader chooses them by."""
from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

Data = dict[str, Any]


def arranged(runs: Mapping[Any, Data], labels: Sequence[str] | None, select: Any, integers: str = "ranks") -> Data:
    """`axes`, what there is to choose, and `runs`, each with its place `at` on them, the run to open with first.

    The keys of `runs` (or tuples of them) become the choices. `labels` names each part of a key; without it a part that
    is an integer in all of them is called `integers`, and others "run". Raises ValueError for keys or labels that don't
    fit.
    """
    keys = _keys(runs, labels)
    parts = [list(dict.fromkeys(values)) for values in zip(*keys)]
    named = labels or [integers if all(type(v) is int for v in values) else "run" for values in parts]
    axes = [{"label": name, "values": [str(value) for value in values]} for name, values in zip(named, parts)]
    placed = [{"at": [axis["values"].index(str(part)) for axis, part in zip(axes, key)], **data}
              for key, data in zip(keys, runs.values())]
    if select is not None:
        placed.insert(0, placed.pop(list(runs).index(select)))
    return {"axes": axes if len(runs) > 1 else [], "runs": placed}


def names_of(runs: Iterable[Any]) -> list[str]:
    """The runs' keys as text."""
    return [", ".join(map(str, key)) if isinstance(key, tuple) else str(key) for key in runs]


def _keys(runs: Mapping[Any, Any], labels: Sequence[str] | None) -> list[tuple[Any, ...]]:
    keys = [key if isinstance(key, tuple) else (key,) for key in runs]
    if len({len(key) for key in keys}) > 1:
        raise ValueError("the keys of the runs to choose from must be tuples of one length, or no tuples at all")
    for values in zip(*keys):
        texts = [str(value) for value in dict.fromkeys(values)]
        if len(set(texts)) < len(texts):
            raise ValueError(f"two keys of the runs to choose from read {max(texts, key=texts.count)!r}: give keys "
                             "that a reader can tell apart")
    if labels is not None and (isinstance(labels, str) or len(labels) != len(keys[0])):
        raise ValueError(f"labels names each part of a key: give {len(keys[0])} of them, not {labels!r} (one label "
                         f"for keys that are no tuples)")
    return keys
