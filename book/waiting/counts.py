"""L1: causes that count: which rank has run a model or called a line more often than another, and since when."""
from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise

from book.waiting.hang import CollectiveCall, Hang
from book.waiting.history import CallSite, History, Model, SiteCall
from book.words import agree, alike, counted, named

JOIN = "give all ranks equally many, or train inside `with model.join():`"
MODULE = "run it on every rank, or run `model.module` there"


NO_CALLS = History(0, {}, (), None)


def out_of_step(hang: Hang) -> Iterator[str]:
    """Ranks that have run a model in DDP more often than others, or called a line of a collective that hangs."""
    histories = _histories(hang)
    for look in (_swallowed, _left_out, _forwards_of_some, _left_to_ddp, _uneven, _parted, _counts, _sharded,
                 _unsynchronised):
        if sentences := list(dict.fromkeys(sentence for each in histories for sentence in look(hang, each))):
            yield from sentences
            return


def _histories(hang: Hang) -> list[dict[int, History]]:
    """The histories of the ranks of each group that hangs, or whose ranks make different calls.

    Not those of ranks that have made calls and can't tell which, as one that is stopped.
    """
    groups = [group for group, last in hang.calls.items()
              if any(one.group == group for one in hang.missing) or _disagree(last)]
    found = ({rank: hang.ranks[rank].calls.get(group, NO_CALLS) for rank in group.ranks if rank < len(hang.ranks)
              and (group in hang.ranks[rank].calls or rank not in hang.calls[group])} for group in groups)
    return [histories for histories in found if len(histories) > 1]


def _disagree(last: Mapping[int, CollectiveCall]) -> bool:
    return len({(call.number, call.what) for call in last.values()}) > len({call.number for call in last.values()})


# Errors that a rank has caught

def _swallowed(hang: Hang, histories: Mapping[int, History]) -> Iterator[str]:
    """Ranks that have left a `try` before its last call, while others have not.

    A rank that has never come to a line outside of loops, and as often as another to the line before, has left it too.
    """
    forwards = {rank: _forwards(hang.ranks[rank].models) for rank in histories}
    counts = {rank: {**_by_line(histories[rank].counts), **forwards[rank]} for rank in histories}
    lines = sorted({line for each in counts.values() for line in each if line.handler}, key=lambda line: line.number)
    for rank, own in counts.items():
        for first, last in pairwise(lines):
            if first.block == last.block and own.get(first, 0) > own.get(last, 0) and any(
                    other.get(first) == other.get(last) or _went_on(other, own, first, last)
                    for other in counts.values()) and last.handler and first.condition == last.condition:
                yield (f"rank {rank} has come {times(own[first])} to {first.place}, but {times(own.get(last, 0))} to "
                       f"{last.place}: it has caught an error in between, and `{last.handler.text}` goes "
                       f"on{_at(last.handler.goes_on)}. Let the error end the rank, or have the ranks agree on what "
                       "to do")


def _went_on(other: Mapping[CallSite, int], own: Mapping[CallSite, int], first: CallSite, last: CallSite) -> bool:
    return last in other and last not in own and not last.loop and other.get(first) == own[first]


def _at(place: str) -> str:
    return f" at {place}" if place else ""


def _forwards(models: Sequence[Model]) -> dict[CallSite, int]:
    found: dict[CallSite, int] = {}
    for model in models:
        for line, count in model.forwards.items():
            found[line] = found.get(line, 0) + count
    return found


def _by_line(counts: Mapping[SiteCall, int]) -> dict[CallSite, int]:
    found: dict[CallSite, int] = {}
    for made, count in counts.items():
        found[made.line] = max(found.get(made.line, 0), count)
    return found


# Models in DDP

def _run_unevenly(hang: Hang) -> Iterator[tuple[str, CallSite, dict[int, list[int]]]]:
    """Models that some ranks have run more often than others: the model, the line that did, the ranks by count."""
    all_models = [standing.models for standing in hang.ranks]
    num_models = min(map(len, all_models), default=0)
    for index in range(num_models):
        models = {rank: models[index] for rank, models in enumerate(all_models)}
        which = "the DDP model" if num_models == 1 else f"DDP model {index + 1}, in the order in which they were made,"
        for line in dict.fromkeys(line for model in models.values() for line in model.forwards):
            who = alike((rank, model.forwards.get(line, 0)) for rank, model in models.items())
            if len(who) > 1:
                yield which, line, who


def _forwards_of_some(hang: Hang, histories: Mapping[int, History]) -> Iterator[str]:
    """Lines that run a model in DDP on some ranks only, or under a condition that holds more often on some."""
    for which, line, who in _run_unevenly(hang):
        most, least = max(who), min(who)
        if least == 0 or line.condition:
            yield (f"{named(who[most])} {agree('has', who[most])} made {counted(most - least, 'forward')} of "
                   f"{which} more than {named(who[least])}: {line.place}{_under(line)}; {MODULE}")


def _uneven(hang: Hang, histories: Mapping[int, History]) -> Iterator[str]:
    """Models that some ranks have run on more batches than others."""
    for which, line, who in _run_unevenly(hang):
        (most, first), *others = sorted(who.items(), reverse=True)
        rest = "".join(f", {named(ranks)} on only {count}" for count, ranks in others)
        yield (f"{named(first)} {agree('has', first)} run {which} on {counted(most, 'batch')}{rest}, at "
               f"{line.place}: {JOIN}{_agree_to_leave(line)}")


def _agree_to_leave(line: CallSite) -> str:
    if not line.leaves:
        return ""
    return f"; if `{line.leaves}` has ended the loop, have all ranks decide alike, as by an all_reduce"


def _under(line: CallSite) -> str:
    return f", {line.condition.how} `{line.condition.text}`" if line.condition else ""


# Lines of collectives

def _left_out(hang: Hang, histories: Mapping[int, History], owned: bool = False) -> Iterator[str]:
    """Lines at which ranks wait, in calls of their own, and that stand under a condition that has not held on others.
    """
    batches = {rank: sum(model.num_batches for model in hang.ranks[rank].models) for rank in histories}
    waiting = {rank: history for rank, history in histories.items() if history.last and history.last[-1].line.condition}
    if len({history.last[-1] for history in waiting.values()}) > 1:
        return  # the ranks took different branches, and the message shows both
    for rank, history in waiting.items():
        made = history.last[-1]
        if bool(made.owner) != owned:
            continue
        who = alike((other, its.counts.get(made, 0)) for other, its in histories.items())
        fewer = [other for count, ranks in who.items() if count < history.counts[made] for other in ranks]
        # A rank that has had fewer batches has not left the line out: it has not come to it.
        if fewer and all(batches[other] >= batches[rank] for other in fewer):
            yield _come(who, made.line)
            return


def _left_to_ddp(hang: Hang, histories: Mapping[int, History]) -> Iterator[str]:
    """The same of lines at which DDP and its like make the call."""
    yield from _left_out(hang, histories, owned=True)


def _come(who: Mapping[int, Sequence[int]], line: CallSite) -> str:
    """"ranks 0, 2 have come 3 times to train.py line 7: dist.barrier(), under `if rank != 1`, rank 1 only once"."""
    (most, first), *others = sorted(who.items(), reverse=True)
    rest = "".join(f", {named(ranks)} {'only ' if count else ''}{times(count)}" for count, ranks in others)
    return f"{named(first)} {agree('has', first)} come {times(most)} to {line.place}{_under(line)}{rest}"


def _parted(hang: Hang, histories: Mapping[int, History]) -> Iterator[str]:
    """Where the ranks of a group made their first calls that do not belong together."""
    first, *others = sorted(histories)
    for other in others:
        number = _first_apart(histories[first], histories[other])
        if number is not None and number < min(histories[first].total, histories[other].total):
            one, two = histories[first].at(number), histories[other].at(number)
            yield (f"ranks {first} and {other} are out of step since call {number} of this group: rank {first} made "
                   f"it at {one.line.place}{_under(one.line)}, and rank {other} at {two.line.place}{_under(two.line)}")
            return


def _first_apart(one: History, other: History) -> int | None:
    """The number of the first known call that ranks made at different lines, of which each rank has called one."""
    start = max(one.total - len(one.last), other.total - len(other.last)) + 1
    for number in range(start, min(one.total, other.total) + 1):
        mine, its = one.at(number), other.at(number)
        if mine.line != its.line and (its in one.counts or mine in other.counts):
            return number
    return None


def _counts(hang: Hang, histories: Mapping[int, History]) -> Iterator[str]:
    """Lines that all ranks have called, and some more often than others."""
    for made in dict.fromkeys(made for history in histories.values() for made in history.counts):
        who = alike((rank, history.counts.get(made, 0)) for rank, history in histories.items())
        if len(who) > 1 and min(who) > 0 and not made.owner:
            (most, first), *others = sorted(who.items(), reverse=True)
            rest = "".join(f", {named(ranks)} only {times(count)}" for count, ranks in others)
            yield (f"{named(first)} {agree('has', first)} called {made.call} {times(most)}{rest}, at "
                   f"{made.line.place}{_why_fewer(made.line, [rank for _, ranks in others for rank in ranks])}")
            return


def _why_fewer(line: CallSite, fewer: Sequence[int]) -> str:
    """What may have kept ranks from a line that others came to."""
    if line.handler:
        return (f": did {named(sorted(fewer))} catch an error before it? `{line.handler.text}` goes "
                f"on{_at(line.handler.goes_on)}")
    return f": compare what `{line.loop}` goes over on each rank" if line.loop else ""


def _sharded(hang: Hang, histories: Mapping[int, History]) -> Iterator[str]:
    """Lines at which FSDP gathers parameters, of a model that some ranks have run more often than others."""
    for made in dict.fromkeys(made for history in histories.values() for made in history.counts):
        who = alike((rank, history.counts.get(made, 0)) for rank, history in histories.items())
        if made.owner == "FSDP" and len(who) > 1 and not made.in_backward:
            yield f"{_come(who, made.line)}: a forward gathers all ranks' shards, so all must run equally many"
            return


def _unsynchronised(hang: Hang, histories: Mapping[int, History]) -> Iterator[str]:
    """Ranks that have ended, and whose DDP has summed gradients in fewer backwards than others', of as many batches."""
    batches = {sum(model.num_batches for model in hang.ranks[rank].models) for rank in histories}
    if len(batches) > 1:
        return
    for made in dict.fromkeys(made for history in histories.values() for made in history.counts):
        who = alike((rank, history.counts.get(made, 0)) for rank, history in histories.items())
        least = who[min(who)]
        if made.owner == "DDP" and made.in_backward and len(who) > 1 and all(
                hang.ranks[rank].doing.returned for rank in least):
            yield (f"{named(who[max(who)])} {agree('has', who[max(who)])} summed gradients in {max(who)} backwards, "
                   f"{named(least)} in only {min(who)}, of as many batches, at {made.line.place}: did "
                   f"{named(least)} leave it out, by no_sync() or require_backward_grad_sync? From then on the sums "
                   "are of different batches")
            return


# Messages

def uneven_messages(hang: Hang) -> Iterator[str]:
    """Ranks of which one has sent more messages than the other has received, or fewer, and that waits for more."""
    for rank, standing in enumerate(hang.ranks):
        for (kind, peer), count in standing.messages.items():
            if kind != "send" or not 0 <= peer < len(hang.ranks):
                continue
            received = hang.ranks[peer].messages.get(("recv", rank), 0)
            waiting = standing if count > received else hang.ranks[peer]
            if received and received != count and waiting.doing.waits:
                pipeline = ": do they have equally many micro-batches?" if "Schedule" in waiting.doing.operation else ""
                yield (f"rank {rank} has called send for {counted(count, 'message')} to rank {peer}, which has called "
                       f"recv for {received}{pipeline}")


def times(count: int) -> str:
    """How often: "never", "once", "9 times"."""
    return {0: "never", 1: "once"}.get(count, f"{count} times")
