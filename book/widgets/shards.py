"""L3: the sharded product on a page and in a notebook, and the JSON that its player draws.

A run has, in addition to what scene.js says about all runs, `n` ranks, the bytes of an `item` and

    matrices   what is drawn on each rank, in the places of `slots`; a later matrix replaces one with the same slot and
               line: name, recipe, shape, slot, line (0: forward, 1: gradients)
    grid       into how many blocks, [down, across], the run cuts a matrix
    lanes      how many parts of a sum its blocks are drawn with, 1 if the run cuts no sum; bias: one more for it
    paint      what colours a block without lanes: its "row", its "column" or nothing ("")

A stop, of which the first is the start, has

    set        blocks that change, [rank, matrix, number row by row, contents]: how often each lane is in it, null if
               that is unknown; a block without contents is gone
    moves      [matrix, from, to, numbers of its blocks]
    busy       the matrices that it works on
"""
from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from book.trace import Trace
from book.widgets.page import Played
from book.widgets.shards_run import Act, Contents, Drawing, Moment, ProductPlay, Tile, Tiles, read_play
from book.widgets.show import show
from book.widgets.terms import spelled
from book.words import alike, in_bytes, joined

if TYPE_CHECKING:
    from book.widgets.live import Live


def sharded_product(runs: Trace | Mapping[Any, Trace], *, title: str | None = None,
                    labels: Sequence[str] | None = None, select: Any = None) -> ShardedProduct | Live:
    """A matrix product or MLP that ranks have cut, or several that the reader chooses from, step by step.

    `runs` are traces recorded with `trace_product` or `trace_mlp` of book.shards, which recognize what each block holds
    by its numbers, or those of `simulate_product` and `simulate_mlp`. `labels` name the choices and `select` is the key
    to open with. Raises TypeError for anything but traces, ValueError for a trace that follows no product.
    """
    return show(ShardedProduct(runs, title, labels, select))


PHASES = {"collective": "1", "message": "1", "return": "2", "gradient": "2", "backward": "2"}  # of others: 0


def run_payload(play: ProductPlay, source: str) -> dict[str, Any]:
    """One run as JSON data."""
    drawing, states = Drawing(play), play.states()
    before = next(states)
    start = [block for rank, state in enumerate(play.start) for block in drawing.blocks(rank, state)]
    stops: list[dict[str, Any]] = [
        {"say": [["", begin(play)]], "phase": "0", "set": start, "moves": [], "busy": [0]}]
    for moment, said, after in zip(play.moments, told(play), states):
        changes = [block for rank, act in sorted(moment.acts.items())
                   for block in drawing.gone(rank, act.replaced(before[rank])) + drawing.blocks(rank, act.holds)]
        stops.append({"say": [said], "phase": PHASES.get(moment.kind, "0"), "set": changes,
                      "moves": drawing.moves(moment, before), "busy": drawing.busy(moment)})
        before = after
    return {"n": play.world_size, "source": source, "item": play.num_bytes, "slots": drawing.slots,
            "matrices": drawing.matrices, "stops": stops, "figures": figures(play)}


def figures(play: ProductPlay) -> list[list[str]]:
    """Pairs of a value and what it means: the most that any rank has or does."""
    weights = [name for name in ("A", "B") if name in play.matrices]
    states = list(play.states())
    held = max(play.bytes_of(place for place in state if place[0] in weights) for state in play.start)
    whole = sum(_bytes(play, name) for name in weights)
    done = max(sum(moment.acts[rank].num_multiplications for moment in play.moments if rank in moment.acts)
               for rank in range(play.world_size))
    alone = sum(_alone(play, name) for name, matrix in play.matrices.items()
                if matrix.summed and any(place[0] == name for state in states[-1] for place in state))
    results = max(play.bytes_of(place for place in state if place[0] == "Y") for state in states[-1])
    return [[_written(held), f"of {' and '.join(weights)} on each rank, {share(held, whole)} of {_written(whole)}"],
            [f"{done:,}", f"multiplications on each rank, {share(done, alone)} of one process's"],
            *_traffic(play),
            [_written(results), f"of Y on each rank at the end, {share(results, _bytes(play, 'Y'))}"]]


def _traffic(play: ProductPlay) -> list[list[str]]:
    """Bytes that each rank sends in its collectives by the bandwidth-optimal algorithms (see book.cost)."""
    t = play.world_size
    firsts = [next(iter(moment.acts.values())).event for moment in play.moments if moment.kind == "collective"]
    calls = [(call.op or "collective", len(call.group or ()), call.num_bytes or 0.0) for call in firsts if call]
    factors = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1}
    known = [call for call in calls if call[0] in factors]
    sent = sum(factors[op] * (size - 1) / size * num_bytes for op, size, num_bytes in known)
    counts = Counter(op for op, _, _ in calls)
    names = ", ".join(f"{count} {op.replace('_', '-')}{'s' * (count > 1)}" for op, count in counts.items())
    names = names[2:] if len(calls) == 1 else f"collectives: {names or 'nothing moves'}"
    rules = [f"{count if count > 1 else ''}{'·' * (count > 1)}{'2' * (factors[op] == 2)}(t−1)/t·n"
             for op, count in counts.items() if op in factors]
    sizes = {num_bytes for _, _, num_bytes in known}
    n = f", n = {_written(sizes.pop())}" if len(sizes) == 1 else ""
    rule = f": {' + '.join(rules)}{n}, t = {t}" if rules and n else f" in {len(known)} collectives" * bool(known)
    return [[_written(round(sent)), f"sent by each rank{rule}"],
            [str(len(calls)), names]]


def _bytes(play: ProductPlay, name: str) -> int:
    height, width = play.shapes[name]
    return height * width * play.num_bytes


def _alone(play: ProductPlay, name: str) -> int:
    """The multiplications of one process for a matrix."""
    sizes = {dim: size for other, matrix in play.matrices.items() for dim, size in zip(matrix.dims, play.shapes[other])}
    height, width = play.shapes[name]
    return height * width * sizes[play.matrices[name].summed]


def share(x: float, whole: float) -> str:
    """A part as text: "all" or "1/4" if it is that, else a percentage."""
    if x == whole:
        return "all"
    parts = whole / x if x else 0
    return f"1/{parts:.0f}" if x and abs(parts - round(parts)) < 1e-9 else f"{x / whole:.0%}"


def _written(num_bytes: float) -> str:
    return in_bytes(num_bytes, zeros=True)


# The words
MOVES = {"all_reduce": "what the ranks have is added up, and every rank gets the sum",
         "all_gather": "every rank gets what the others have",
         "reduce_scatter": "what the ranks have is added up, and every rank gets its part of the sum"}
APPLIES = {"add": "adds to it", "add_": "adds to it", "cat": "puts blocks together", "mul": "multiplies by a number",
           "mul_": "multiplies by a number", "div": "divides by a number", "div_": "divides by a number"}
Said = tuple[str, str, bool]  # what to stress, the rest, and whether something is wrong


def told(play: ProductPlay) -> list[Said]:
    """What happens in each moment."""
    states = play.states()
    next(states)
    return [_tell(play, moment, held) for moment, held in zip(play.moments, states)]


def _tell(play: ProductPlay, moment: Moment, held: list[Tiles]) -> Said:
    """`held` is what the ranks have afterwards."""
    if moment.kind == "return":
        return _verdict(play, _of_all(moment), ["Y"], "returns")
    if moment.kind == "gradient":
        return _verdict(play, held, [name for name in ("dX", "dA", "dB") if name in play.matrices], "ends with")
    if moment.kind == "collective":
        return _collective(play, moment, held)
    say = {"multiply": _multiply, "apply": _apply, "message": _message, "backward": _backward}[moment.kind]
    said = alike((rank, say(play, moment, act, held[rank])) for rank, act in moment.acts.items())
    parts = [(subject(ranks, play.world_size), does, rest) for (does, rest), ranks in said.items()]
    (who, does, rest), *others = parts
    more = " ".join(f"{other} {it}{tail}" for other, it, tail in others)
    return f"{who} {does}", f"{rest} {more}".rstrip(), False


def begin(play: ProductPlay) -> str:
    """The words before the first moment."""
    recipe = "Y = GELU(X A) B" if "B" in play.matrices else "Y = X A"
    given = [name for name, matrix in play.matrices.items() if not matrix.recipe and name != "dY"]
    held = [joined(part(play, tiles_of(state, name), play.start, name) for name in given) for state in play.start]
    if len(set(held)) == 1:
        return f"{recipe}{' + bias' if play.bias else ''} on {play.world_size} ranks. Every rank holds {held[0]}."
    each = "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(held))
    return f"{recipe} on {play.world_size} ranks. They hold, {each}."


def subject(ranks: Sequence[int], world_size: int) -> str:
    """The ranks as the subject of a sentence in the singular."""
    if len(ranks) == world_size:
        return "Every rank"
    return f"Rank {ranks[0]}" if len(ranks) == 1 else f"Each of ranks {joined(ranks)}"


def tiles_of(state: Tiles, name: str) -> Tiles:
    """The blocks of one matrix in a state."""
    return {place: contents for place, contents in state.items() if place[0] == name}


def part(play: ProductPlay, tiles: Iterable[Tile], all_ranks: Sequence[Tiles], name: str) -> str:
    """Which part of a matrix these blocks are; "its" part if each rank has a different one."""
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


def fault(play: ProductPlay, tiles: Mapping[Tile, Contents]) -> tuple[str, str]:
    """What is wrong with blocks or still missing in them: its kind, and words that follow their name; "" if nothing is.

    Kinds are "unknown", where something in them comes from no block, "partial", where terms of their sums are missing,
    and "wrong".
    """
    held = [contents for contents in tiles.values() if contents is not None]
    if len(held) < len(tiles):
        return "unknown", ""
    parts, biases = [contents[:-1] for contents in held], [contents[-1] for contents in held]
    summed = bool(play.matrices[next(iter(tiles))[0]].summed)
    counts = [count for lanes in parts for count in (lanes if summed else lanes[:1])]
    odd = [count for count in counts if count not in (0, 1)]
    if odd and len(set(counts)) == 1 and 0 < odd[0] < 1:
        return "wrong", f"divided by {1 / odd[0]:.4g}"
    if odd:
        who = "" if not summed else "with every term " if len(set(counts)) == 1 else "with a term "
        return "wrong", f"{who}counted {_times(max(odd, key=abs))}"
    if min(counts) < 1:
        terms, bias = {sum(lanes) for lanes in parts}, " and the bias" * any(biases)
        return "partial", f"{min(terms):.0f} of {play.world_size} terms{bias}{' in places' * (len(terms) > 1)}"
    if play.bias and next(iter(tiles))[0] == "Y" and set(biases) != {1}:
        return "wrong", f"with the bias counted {_times(max(biases))}" if max(biases) else "without the bias"
    return "", ""


def result(play: ProductPlay, tiles: Tiles, all_ranks: Sequence[Tiles], completeness: bool = True) -> str:
    """What blocks are and, where their `completeness` is to be told, whether their sums are complete."""
    if not tiles:
        return "nothing new"
    texts, complete = [], []
    for name in dict.fromkeys(name for name, _, _ in tiles):
        own = tiles_of(tiles, name)
        what, (kind, wrong) = part(play, own, all_ranks, name), fault(play, own)
        complete.append(completeness and bool(play.matrices[name].summed) and not kind)
        texts.append(f"something that is not made of blocks of {name}" if kind == "unknown" else
                     f"a partial sum of {what} ({wrong})" if kind == "partial" else f"{what} {wrong}".rstrip())
    if all(complete):
        return joined(texts) + ", complete"
    return joined(text + ", complete" * done for text, done in zip(texts, complete))


def _times(count: float) -> str:
    return "twice" if count == 2 else f"{count:.4g} times"


def _of_all(moment: Moment) -> list[Tiles]:
    return [act.holds for act in moment.acts.values()]


def _used(play: ProductPlay, moment: Moment, act: Act, name: str, held: Tiles) -> str:
    """The part of a factor that an act uses, and whether it is what it should be."""
    used = [dict.fromkeys(_tiles(play, other, name)) for other in moment.acts.values()]
    own = {place: held.get(place) for place in _tiles(play, act, name)}
    return result(play, own, used, completeness=False)


def _tiles(play: ProductPlay, act: Act, name: str) -> list[Tile]:
    n, found = play.world_size, []
    for block in act.blocks:
        if block.matrix == name:
            rows, columns = (range(span[0] * n // size, span[1] * n // size)
                             for span, size in zip((block.rows, block.columns), block.shape))
            found += [(name, r, c) for r in rows for c in columns]
    return found


def _multiply(play: ProductPlay, moment: Moment, act: Act, held: Tiles) -> tuple[str, str]:
    """The product in words, with its factors in the order of the result's recipe."""
    names = {block.matrix for block in act.blocks}
    made = next((matrix for matrix in play.matrices.values() if matrix.summed and set(matrix.factors) == names), None)
    gives = f": {result(play, act.holds, _of_all(moment))}." if act.holds else "."
    if made is None:
        return "multiplies", gives
    left, right = (_used(play, moment, act, name, held) + ", transposed," * text.endswith("ᵀ")
                   for name, text in zip(made.factors, made.recipe.split()))
    return f"multiplies {left} by {right}".rstrip(","), gives


def _apply(play: ProductPlay, moment: Moment, act: Act, held: Tiles) -> tuple[str, str]:
    gives = result(play, act.holds, _of_all(moment))
    if moment.name not in ("gelu", "gelu_backward"):
        return APPLIES.get(moment.name, f"computes {moment.name}"), f": now it has {gives}."
    what = _used(play, moment, act, act.blocks[0].matrix, held) if act.blocks else "what it has"
    does = f"applies GELU to {what}" if moment.name == "gelu" else f"takes the gradient of GELU from {what}"
    return does, f": {gives}. " + ("GELU of a sum is not the sum of GELUs." if " terms" in what else "Nothing moves.")


def _message(play: ProductPlay, moment: Moment, act: Act, held: Tiles) -> tuple[str, str]:
    names = joined(dict.fromkeys(block.matrix for block in act.blocks)) if act.blocks else "something else"
    to = f"sends {names} to {' and '.join(f'rank {peer}' for peer in dict.fromkeys(act.sent_to))}"
    gets = f"; it gets {result(play, act.holds, _of_all(moment))}." if act.holds else "."
    return to if act.sent_to else "receives", gets


def _collective(play: ProductPlay, moment: Moment, held: list[Tiles]) -> Said:
    event = next(iter(moment.acts.values())).event
    op = (event.op if event else None) or "collective"
    names = dict.fromkeys(block.matrix for act in moment.acts.values() for block in act.blocks)
    what = spelled(op).capitalize() + (f" of {joined(names)}" if names else "")
    if op == "barrier":
        return "Barrier", ": nobody goes on before all have called it.", False
    moves = f": {MOVES[op]}." if op in MOVES else "."
    states = [{place: now for place, now in held[rank].items() if place[0] in names} for rank in moment.acts]
    said = alike((rank, result(play, state, states)) for rank, state in zip(moment.acts, states) if names)
    now = "".join(f" {subject(ranks, play.world_size)} now has {text}." for text, ranks in said.items())
    return what, f"{moves}{now or ' It moves none of these matrices.'}", False


def _backward(play: ProductPlay, moment: Moment, act: Act, held: Tiles) -> tuple[str, str]:
    got = part(play, act.holds, _of_all(moment), "dY")
    return f"begins its backward with {got}", ", the loss's gradient of what it returned."


def _verdict(play: ProductPlay, states: list[Tiles], names: Sequence[str], verb: str) -> Said:
    """Whether the ranks together have all of these matrices, complete, and no rank has anything else."""
    ends = [{place: contents for name in names for place, contents in tiles_of(state, name).items()}
            for state in states]
    said = alike((rank, result(play, state, ends)) for rank, state in enumerate(ends))
    told = "; ".join(f"{_lower(subject(ranks, play.world_size))} {verb} {text}" for text, ranks in said.items())
    wrong = any(fault(play, tiles_of(state, name))[0] for state in ends for name in names if tiles_of(state, name))
    have = {place for state in ends for place in state}
    lost = [name for name in names if sum(place[0] == name for place in have) < play.world_size**2]
    if lost and not wrong:
        return "Wrong: ", f"{told}. Parts of {joined(lost)} are on no rank.", True
    has_y = any(len(tiles_of(state, "Y")) == play.world_size**2 for state in ends)
    whole = "" if wrong or has_y else f" Together they have all of {joined(names)}."
    return ("Wrong: " if wrong else "Done: "), f"{told}.{whole}", wrong


def _lower(text: str) -> str:
    return text[0].lower() + text[1:]


def in_words(play: ProductPlay) -> tuple[list[str], list[list[str]]]:
    """The steps of a run, and its figures."""
    return [begin(play), *(stress + rest for stress, rest, _ in told(play))], figures(play)


class ShardedProduct(Played):
    """What a sharded product shows: traces by key."""

    widget, maker, called = "shards", "sharded_product", "sharded product"
    read, payload, said = staticmethod(read_play), staticmethod(run_payload), staticmethod(in_words)

    @property
    def usual_title(self) -> str:  # type: ignore[override]
        """The title where none is given."""
        mlp = any("B" in play.matrices for play in self.plays.values())
        return "A sharded MLP" if mlp else "A sharded matrix product"
