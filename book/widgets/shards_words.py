"""L3: the steps of a sharded product in words."""
from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from book.widgets.shards_run import Action, Contents, Place, Play, State, Step
from book.widgets.terms import spelled

MOVES = {"all_reduce": "what the ranks have is added up, and every rank gets the sum",
         "all_gather": "every rank gets what the others have",
         "reduce_scatter": "what the ranks have is added up, and every rank gets its part of the sum"}
APPLIES = {"add": "adds to it", "add_": "adds to it", "cat": "puts blocks together", "mul": "multiplies by a number",
           "mul_": "multiplies by a number", "div": "divides by a number", "div_": "divides by a number"}
Said = tuple[str, str, bool]  # what to stress, the rest, and whether something is wrong


def told(play: Play) -> list[Said]:
    """What happens in each step."""
    states = play.states()
    next(states)
    return [_tell(play, step, held) for step, held in zip(play.steps, states)]


def _tell(play: Play, step: Step, held: list[State]) -> Said:
    """`held` is what the ranks have afterwards."""
    if step.kind == "return":
        return _verdict(play, _of_all(step), ["Y"], "returns")
    if step.kind == "gradient":
        return _verdict(play, held, [name for name in ("dX", "dA", "dB") if name in play.matrices], "ends with")
    if step.kind == "collective":
        return _collective(play, step, held)
    say = {"multiply": _multiply, "apply": _apply, "message": _message, "backward": _backward}[step.kind]
    said: dict[tuple[str, str], list[int]] = {}
    for rank, action in step.actions.items():
        said.setdefault(say(play, step, action, held[rank]), []).append(rank)
    parts = [(subject(ranks, play.world_size), does, rest) for (does, rest), ranks in said.items()]
    (who, does, rest), *others = parts
    more = " ".join(f"{other} {it}{tail}" for other, it, tail in others)
    return f"{who} {does}", f"{rest} {more}".rstrip(), False


def begin(play: Play) -> str:
    """The words before the first step."""
    recipe = "Y = GELU(X A) B" if "B" in play.matrices else "Y = X A"
    given = [name for name, matrix in play.matrices.items() if not matrix.recipe and name != "dY"]
    held = [join(part(play, tiles_of(state, name), play.start, name) for name in given) for state in play.start]
    if len(set(held)) == 1:
        return f"{recipe}{' + bias' if play.bias else ''} on {play.world_size} ranks. Every rank holds {held[0]}."
    each = "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(held))
    return f"{recipe} on {play.world_size} ranks. They hold, {each}."


def subject(ranks: Sequence[int], world_size: int) -> str:
    """The ranks as the subject of a sentence in the singular."""
    if len(ranks) == world_size:
        return "Every rank"
    return f"Rank {ranks[0]}" if len(ranks) == 1 else f"Each of ranks {join(map(str, ranks))}"


def join(texts: Iterable[str]) -> str:
    """One text after the other, "and" before the last."""
    *most, last = texts
    return f"{', '.join(most)} and {last}" if most else last


def tiles_of(state: State, name: str) -> State:
    """What of one matrix is in a state."""
    return {place: contents for place, contents in state.items() if place[0] == name}


def part(play: Play, tiles: Iterable[Place], all_ranks: Sequence[State], name: str) -> str:
    """Which part of a matrix these blocks are, "its" part where each rank has another one."""
    places = list(tiles)
    rows, columns = {row for _, row, _ in places}, {column for _, _, column in places}
    if not rows:
        return f"nothing of {name}"
    everything = set(range(play.world_size))
    others = {frozenset(place for place in state if place[0] == name) for state in all_ranks}
    its = len(others) == len(all_ranks)
    if rows == columns == everything:
        return f"all of {name}"
    if rows != everything and columns != everything:
        return f"{'its' if its else 'one'} block of {name}"
    lines, at, size = "rows", rows, play.shapes[name][0]
    if rows == everything:
        lines, at, size = "columns", columns, play.shapes[name][1]
    if its:
        return f"its {lines} of {name}"
    first, last = (edge * size // play.world_size for edge in (min(at), max(at) + 1))
    return f"{lines} {first} to {last - 1} of {name}"


def fault(play: Play, tiles: Mapping[Place, Contents]) -> str:
    """What is wrong with blocks, or still missing in them, in words that follow their name; empty if nothing is."""
    held = [contents for contents in tiles.values() if contents is not None]
    if len(held) < len(tiles):
        return "unknown"
    parts, biases = [contents[:-1] for contents in held], [contents[-1] for contents in held]
    summed = bool(play.matrices[next(iter(tiles))[0]].summed)
    counts = [count for lanes in parts for count in (lanes if summed else lanes[:1])]
    odd = [count for count in counts if count not in (0, 1)]
    if odd and len(set(counts)) == 1 and 0 < odd[0] < 1:
        return f"divided by {1 / odd[0]:.4g}"
    if odd:
        who = "" if not summed else "with every term " if len(set(counts)) == 1 else "with a term "
        return f"{who}counted {_times(max(odd, key=abs))}"
    if min(counts) < 1:
        terms, bias = {sum(lanes) for lanes in parts}, " and the bias" * any(biases)
        return f"{min(terms):.0f} of {play.world_size} terms{bias}{' in places' * (len(terms) > 1)}"
    if play.bias and next(iter(tiles))[0] == "Y" and set(biases) != {1}:
        return f"with the bias counted {_times(max(biases))}" if max(biases) else "without the bias"
    return ""


def result(play: Play, tiles: State, all_ranks: Sequence[State]) -> str:
    """What blocks are, and how complete."""
    if not tiles:
        return "nothing new"
    texts = []
    for name in dict.fromkeys(name for name, _, _ in tiles):
        own = tiles_of(tiles, name)
        what, wrong = part(play, own, all_ranks, name), fault(play, own)
        if wrong == "unknown":
            texts.append(f"something that is not made of blocks of {name}")
        elif " terms" in wrong:
            texts.append(f"a partial sum of {what} ({wrong})")
        else:
            complete = ", complete" if play.matrices[name].summed and not wrong else ""
            texts.append(f"{what}{complete}{' ' * bool(wrong)}{wrong}")
    if all(text.endswith(", complete") for text in texts):
        return join(text.removesuffix(", complete") for text in texts) + ", complete"
    return join(texts)


def _times(count: float) -> str:
    return "twice" if count == 2 else f"{count:.4g} times"


def _of_all(step: Step) -> list[State]:
    return [action.holds for action in step.actions.values()]


def _used(play: Play, step: Step, action: Action, name: str, held: State) -> str:
    """The part of a factor that an action uses, and how far it is what it should be."""
    used = [dict.fromkeys(_tiles(play, other, name)) for other in step.actions.values()]
    own = {place: held.get(place) for place in _tiles(play, action, name)}
    return result(play, own, used).removesuffix(", complete")


def _tiles(play: Play, action: Action, name: str) -> list[Place]:
    n, found = play.world_size, []
    for block in action.blocks:
        if block.matrix == name:
            rows, columns = (range(span[0] * n // size, span[1] * n // size)
                             for span, size in zip((block.rows, block.columns), block.shape))
            found += [(name, r, c) for r in rows for c in columns]
    return found


def _multiply(play: Play, step: Step, action: Action, held: State) -> tuple[str, str]:
    """As the recipe of what came of it says."""
    names = {block.matrix for block in action.blocks}
    made = next((matrix for matrix in play.matrices.values() if matrix.summed and set(matrix.factors) == names), None)
    gives = f": {result(play, action.holds, _of_all(step))}." if action.holds else "."
    if made is None:
        return "multiplies", gives
    left, right = (_used(play, step, action, name, held) + ", transposed," * text.endswith("ᵀ")
                   for name, text in zip(made.factors, made.recipe.split()))
    return f"multiplies {left} by {right}".rstrip(","), gives


def _apply(play: Play, step: Step, action: Action, held: State) -> tuple[str, str]:
    gives = result(play, action.holds, _of_all(step))
    if step.name not in ("gelu", "gelu_backward"):
        return APPLIES.get(step.name, f"computes {step.name}"), f": now it has {gives}."
    what = _used(play, step, action, action.blocks[0].matrix, held) if action.blocks else "what it has"
    does = f"applies GELU to {what}" if step.name == "gelu" else f"takes the gradient of GELU from {what}"
    return does, f": {gives}. " + ("GELU of a sum is not the sum of GELUs." if " terms" in what else "Nothing moves.")


def _message(play: Play, step: Step, action: Action, held: State) -> tuple[str, str]:
    names = join(dict.fromkeys(block.matrix for block in action.blocks)) if action.blocks else "something else"
    to = f"sends {names} to {' and '.join(f'rank {peer}' for peer in dict.fromkeys(action.sent_to))}"
    gets = f"; it gets {result(play, action.holds, _of_all(step))}." if action.holds else "."
    return to if action.sent_to else "receives", gets


def _collective(play: Play, step: Step, held: list[State]) -> Said:
    event = next(iter(step.actions.values())).event
    op = (event.op if event else None) or "collective"
    names = dict.fromkeys(block.matrix for action in step.actions.values() for block in action.blocks)
    what = spelled(op).capitalize() + (f" of {join(names)}" if names else "")
    if op == "barrier":
        return "Barrier", ": nobody goes on before all have called it.", False
    moves = f": {MOVES[op]}." if op in MOVES else "."
    said: dict[str, list[int]] = {}
    for rank in step.actions if names else ():
        states = [{place: now for place, now in held[r].items() if place[0] in names} for r in step.actions]
        said.setdefault(result(play, states[list(step.actions).index(rank)], states), []).append(rank)
    now = "".join(f" {subject(ranks, play.world_size)} now has {text}." for text, ranks in said.items())
    return what, f"{moves}{now or ' It moves none of these matrices.'}", False


def _backward(play: Play, step: Step, action: Action, held: State) -> tuple[str, str]:
    got = part(play, action.holds, _of_all(step), "dY")
    return f"begins its backward with {got}", ", the loss's gradient of what it returned."


def _verdict(play: Play, states: list[State], names: Sequence[str], verb: str) -> Said:
    """Whether all ranks together have all of these matrices, complete, and none has anything else."""
    said: dict[str, list[int]] = {}
    ends = [{place: contents for name in names for place, contents in tiles_of(state, name).items()}
            for state in states]
    for rank, state in enumerate(ends):
        said.setdefault(result(play, state, ends), []).append(rank)
    told = "; ".join(f"{_lower(subject(ranks, play.world_size))} {verb} {text}" for text, ranks in said.items())
    wrong = any(fault(play, tiles_of(state, name)) for state in ends for name in names if tiles_of(state, name))
    have = {place for state in ends for place in state}
    lost = [name for name in names if sum(place[0] == name for place in have) < play.world_size**2]
    if lost and not wrong:
        return "Wrong: ", f"{told}. Parts of {join(lost)} are on no rank.", True
    whole = "" if wrong or "all of Y" in told else f" Together they have all of {join(names)}."
    return ("Wrong: " if wrong else "Done: "), f"{told}.{whole}", wrong


def _lower(text: str) -> str:
    return text[0].lower() + text[1:]
