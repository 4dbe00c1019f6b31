"""L3: a followed training step in words, and its figures beside the formulas."""
from __future__ import annotations

from collections.abc import Iterator, Mapping

from book.cost import sharded_sent_bytes
from book.trace import STATE
from book.widgets.memory_steps import Action, Held
from book.widgets.terms import counted
from book.widgets.units import in_bytes

PARTS = {1: "whole", 2: "half", 3: "third", 4: "quarter", 5: "fifth", 6: "sixth", 7: "seventh", 8: "eighth"}
SHARDED = ("nothing", "the optimizer's state", "the optimizer's state and the gradients",
           "the optimizer's state, the gradients and the parameters")


def begin(held: Held) -> list[str]:
    """What is there before the first action: [words to stress, the rest]."""
    whole = _kb(sum(held.units.values()))
    parameters = sum(num_bytes for (what, _), num_bytes in held.start.items() if what == "parameters")
    more = parameters - sum(held.units.values())
    has = (f"a {PARTS[held.world_size]} of the parameters, {_kb(parameters)} of {whole}" if held.frees
           else f"all parameters, {whole}" + (f", and {_kb(more)} for a shard of its own" if more > 0 else ""))
    if held.zero_stage is None:
        return [f"Each rank holds {has}", "."]
    return [f"ZeRO stage {held.zero_stage}", f": the ranks shard {SHARDED[held.zero_stage]}. Each holds {has}."]


def told(held: Held) -> Iterator[list[str]]:
    """Each action: [words to stress, the rest]."""
    state = dict(held.start)
    last = max((k for k, action in enumerate(held.actions) if action.op != "free"), default=0)
    for k, action in enumerate(held.actions):
        stress, rest = _told(held, action, state)
        state.update(dict(action.changes))
        yield [stress, rest + (" The step is over." if k == last == len(held.actions) - 1 else "")]


def _told(held: Held, action: Action, state: Mapping[tuple[str, str], float]) -> tuple[str, str]:
    unit, part = action.unit, PARTS[held.world_size]
    grown = {what: sum(b - state.get((w, u), 0) for (w, u), b in action.changes if w == what) for what in STATE}
    if action.op == "all_gather":
        if grown["parameters"] > 0:
            rest = f"each sends {_kb(action.num_sent)}; from here on each holds it whole."
        else:
            rest = f"what each has updated goes to all the others; each sends {_kb(action.num_sent)}."
        return f"All ranks gather {unit}", f": {rest}"
    if action.op == "reduce_scatter":
        return (f"Reduce-scatter of {unit}", f": each rank keeps its {part} of the mean gradient, "
                f"{_kb(held.units[unit] / held.world_size)}; each sends {_kb(action.num_sent)}.")
    if action.op == "all_reduce":
        return (f"All-reduce of {unit}",
                f": each rank gets all of the mean gradient; each sends {_kb(action.num_sent)}.")
    if action.op == "free":
        return f"{_upper(unit)} is freed", f": each rank keeps its {part}, {_kb(action.changes[0][1])}."
    if action.op == "drop":
        return "The gradients are dropped", f": {_kb(-grown['gradients'])} on each rank."
    return _computed(held, action, grown)


def _computed(held: Held, action: Action, grown: dict[str, float]) -> tuple[str, str]:
    made = [f"{_kb(grown[what])} of {what}" for what in ("activations", "gradients") if grown[what] > 0]
    if action.op == "update":
        sharded = held.zero_stage in (1, 2, 3) and held.world_size > 1
        whose = f"its {PARTS[held.world_size]} of the parameters" if sharded else "all parameters"
        new = f": the optimizer makes its state, {_kb(grown['optimizer'])}." if grown["optimizer"] > 0 else "."
        return f"Each rank updates {whose}", new
    around = " What lies outside the blocks is first and last in use." if action.unit == "root" else ""
    new = f", which makes {' and '.join(made)}" if made else ""
    return f"{_upper(action.op)} of {action.unit}", f" on each rank's part of the batch{new}.{around}"


def figures(held: Held) -> list[list[str]]:
    """[value, meaning]; an empty value is what the player counts as it goes."""
    whole = sum(held.units.values())
    totals = list(held.totals())
    sent = sum(action.num_sent for action in held.actions)
    return [["", "held by each rank now"], [_kb(max(totals)), "held at most"],
            [_kb(totals[-1]), f"held after the step{_kept(held)}"],
            ["", f"sent by each rank so far, of {_kb(sent)}{_rule(held, sent, whole)}"],
            [_kb(whole), f"n: all parameters, {counted(len(held.units), 'unit')}"]]


def _rule(held: Held, sent: float, whole: float) -> str:
    """The closed form, where it is what was sent."""
    stage, per_step = held.zero_stage, sent / held.num_steps
    if stage is None or abs(sharded_sent_bytes(stage, held.world_size, whole) - per_step) > 1e-6 * whole:
        return ""
    several = f", {held.num_steps} steps" if held.num_steps > 1 else ""
    return f" = {3 if stage == 3 else 2}(N−1)/N·n{several}"


def _kept(held: Held) -> str:
    """What of the state is left, each with its share."""
    left = dict(held.start)
    for action in held.actions:
        left.update(dict(action.changes))
    shards = {"parameters": held.frees, "optimizer": bool(held.zero_stage)}
    names = [f"{what}/{held.world_size}" if shards.get(what) and held.world_size > 1 else what
             for what in STATE if sum(b for (w, _), b in left.items() if w == what)]
    return f": {' + '.join(names)}" if names else ""


def _upper(text: str) -> str:
    return text[0].upper() + text[1:]


def _kb(num_bytes: float) -> str:
    return in_bytes(num_bytes, zeros=True)
