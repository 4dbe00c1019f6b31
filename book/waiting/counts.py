"""L1: causes that count: which rank has run a model or called a line more often than another, and since when."""
from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from book.waiting.hang import Group, Hang
from book.waiting.history import History, Line, Made, Model
from book.words import agree, counted, joined, named

JOIN = "give all ranks equally many, or train inside `with model.join():`"
MODULE = "run it on every rank, or run `model.module` there"


def out_of_step(hang: Hang) -> Iterator[str]:
    """Ranks that have run a model in DDP more often than others, or called a line of a collective that hangs."""
    histories = _histories(hang)
    swallowed = list(dict.fromkeys(sentence for each in histories for sentence in _swallowed(hang, each)))
    if swallowed:
        yield from swallowed
    elif uneven := list(_uneven(hang)):
        yield from uneven
    else:
        for each in histories:
            yield from _parted(each) or _counts(each)


def _histories(hang: Hang) -> list[dict[int, History]]:
    """The histories of the ranks of each group that hangs, or whose ranks make different calls."""
    groups = [group for group, last in hang.calls.items()
              if any(one.group == group for one in hang.missing) or _disagree(last)]
    found = [{rank: hang.ranks[rank].calls[group] for rank in group.ranks if group in hang.ranks[rank].calls}
             for group in groups]
    return [histories for histories in found if len(histories) > 1]


def _disagree(last: Mapping[int, object]) -> bool:
    return len({(call.number, call.what) for call in last.values()}) > len({call.number for call in last.values()})


# Errors that a rank has caught

def _swallowed(hang: Hang, histories: Mapping[int, History]) -> Iterator[str]:
    """Ranks that have left a `try` before its last call, while others have not."""
    forwards = {rank: _forwards(hang.ranks[rank].models) for rank in histories}
    counts = {rank: {**forwards[rank], **_by_line(histories[rank].counts)} for rank in histories}
    lines = sorted({line for each in counts.values() for line in each if line.handler}, key=lambda line: line.number)
    for rank, own in counts.items():
        for first, last in zip(lines, lines[1:]):
            if first.block == last.block and own.get(first, 0) > own.get(last, 0) and any(
                    other.get(first) == other.get(last) for other in counts.values()) and last.handler:
                yield (f"rank {rank} has called line {first.number} {times(own[first])} and line {last.number} "
                       f"{times(own.get(last, 0))}: it has caught an error in between, and `{last.handler.text}` goes "
                       f"on{_at(last.handler.goes_on)}. Let the error end the rank, or have the ranks agree on what "
                       "to do")


def _at(place: str) -> str:
    return f" at {place}" if place else ""


def _forwards(models: Sequence[Model]) -> dict[Line, int]:
    found: dict[Line, int] = {}
    for model in models:
        for line, count in model.forwards.items():
            found[line] = found.get(line, 0) + count
    return found


def _by_line(counts: Mapping[Made, int]) -> dict[Line, int]:
    found: dict[Line, int] = {}
    for made, count in counts.items():
        found[made.line] = max(found.get(made.line, 0), count)
    return found


# Models in DDP

def _uneven(hang: Hang) -> Iterator[str]:
    """Models that some ranks have run more often than others, and the lines that did."""
    all_models = [standing.models for standing in hang.ranks]
    for index in range(min(map(len, all_models), default=0)):
        models = {rank: models[index] for rank, models in enumerate(all_models)}
        lines = dict.fromkeys(line for model in models.values() for line in model.forwards)
        which = "the DDP model" if len(all_models[0]) == 1 else f"the DDP model that was made as number {index + 1}"
        for line in lines:
            who = _grouped({rank: model.forwards.get(line, 0) for rank, model in models.items()})
            if len(who) < 2:
                continue
            ahead, behind = max(who), min(who)
            if behind == 0 or line.condition:
                yield (f"{named(who[ahead])} {agree('has', who[ahead])} made {counted(ahead - behind, 'forward')} of "
                       f"{which} more than {named(who[behind])}: {line.place}{_under(line)}; {MODULE}")
            else:
                yield f"{_each(who, 'run', f'{which} on', 'batch')}, at {line.place}: {JOIN}"


def _grouped(counts: Mapping[int, int]) -> dict[int, list[int]]:
    """The ranks with each count."""
    found: dict[int, list[int]] = {}
    for rank, count in counts.items():
        found.setdefault(count, []).append(rank)
    return found


def _each(who: Mapping[int, Sequence[int]], verb: str, what: str, unit: str) -> str:
    """"ranks 0, 2 have run the DDP model on 3 batches, rank 1 on 2"."""
    (most, first), *others = sorted(who.items(), reverse=True)
    rest = [f"{named(ranks)} {what.rpartition(' ')[2]} {count}" for count, ranks in others]
    return ", ".join([f"{named(first)} {agree('has', first)} {verb} {what} {counted(most, unit)}", *rest])


def _under(line: Line) -> str:
    return f", {line.condition.how} `{line.condition.text}`" if line.condition else ""


# Lines of collectives

def _parted(histories: Mapping[int, History]) -> list[str]:
    """Where the ranks of a group made their first calls that do not belong together."""
    ranks = sorted(histories)
    first, *others = ranks
    for other in others:
        number = _first_apart(histories[first], histories[other])
        if number is None or number >= min(histories[first].total, histories[other].total):
            continue
        one, two = histories[first].at(number), histories[other].at(number)
        return [f"ranks {first} and {other} are out of step since call {number} of this group: rank {first} made it at "
                f"{one.line.place}{_under(one.line)}, and rank {other} at {two.line.place}{_under(two.line)}"]
    return []


def _first_apart(one: History, other: History) -> int | None:
    """The number of the first known call that ranks made at different lines, of which each rank has called one."""
    start = max(one.total - len(one.last), other.total - len(other.last)) + 1
    for number in range(start, min(one.total, other.total) + 1):
        mine, its = one.at(number), other.at(number)
        if mine.line != its.line and (its in one.counts or mine in other.counts):
            return number
    return None


def _counts(histories: Mapping[int, History]) -> Iterator[str]:
    """Lines that all ranks have called, and some more often than others."""
    for made in dict.fromkeys(made for history in histories.values() for made in history.counts):
        who = _grouped({rank: history.counts.get(made, 0) for rank, history in histories.items()})
        if len(who) > 1 and min(who) > 0:
            parts = [f"{named(ranks)} {times(count)}" for count, ranks in sorted(who.items(), reverse=True)]
            loop = f": compare what `{made.line.loop}` goes over on each rank" if made.line.loop else ""
            yield f"{made.call} has been called at {made.line.place} by {joined(parts)}{loop}"
            return


def times(count: int) -> str:
    """How often: "never", "once", "9 times"."""
    return {0: "never", 1: "once"}.get(count, f"{count} times")
