"""L2: replicas that are not equal at the end of a run: which parameters, between which ranks, since when and why."""
from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from book.audit.notes import Notes, Replica, Value, noted
from book.words import agree, alike, capitalised, counted, joined, listed, named

MOST_NAMES = 4
Copies = Mapping[int, Replica]  # by rank


class Parting(NamedTuple):
    """When copies parted: the last moment at which they were alike, and the first one after it; 0 if none is known."""
    alike: int
    apart: int

    @property
    def in_step(self) -> bool:
        """Whether it may have been in a step of an optimizer."""
        return not (self.apart % 2 and (self.apart == self.alike + 1 or self.apart == 1))

    @property
    def between_steps(self) -> bool:
        """Whether it may have been before, between or after steps."""
        return self.apart % 2 == 1 or self.apart != self.alike + 1


ANY = Parting(0, 1 << 62)


def look(ranks: Sequence[Notes | None]) -> Iterator[str]:
    """A sentence for each model whose copies part, and are not equal again."""
    for all_copies in copies_of(ranks):
        said = [sentence for copies in _by_shard(all_copies) if (sentence := _mixed(copies) or _apart(copies))]
        yield from said[:1] or _uneven(all_copies)  # the copies of one shard tell of those of the others


def summed(ranks: Sequence[Notes | None]) -> Iterator[str]:
    """Parameters that differed between ranks when these first summed the gradients by a line of the program."""
    found: dict[tuple[tuple[int, ...], str, int], dict[int, Mapping[str, Value]]] = defaultdict(dict)
    before = Counter[tuple[int, tuple[int, ...], str]]()  # optimizers
    for rank, each in noted(ranks, "summed"):
        found[each.ranks, each.place, before[rank, each.ranks, each.place]][rank] = each.values
        before[rank, each.ranks, each.place] += 1
    for (some, place, _), held in found.items():
        first, *others = held.values()
        names = [name for name in first if any(name in each and _differ(first[name], each[name]) for each in others)]
        if names and place:
            which = "the parameters" if len(names) == len(first) else counted(len(names), "parameter")
            yield (f"{which} whose gradients {named(some)} sum in {place} {agree('differs', names)} between these "
                   "ranks already before the first step that uses the sums, and each step adds the same to all: make "
                   "them equal before, as by dist.broadcast(parameter.data, src=0) of each")


def _by_shard(copies: Copies) -> list[Copies]:
    """The copies that should be equal."""
    found: dict[int, dict[int, Replica]] = defaultdict(dict)
    for rank, copy in copies.items():
        found[copy.shard][rank] = copy
    return [same for same in found.values() if len(same) > 1]


def _mixed(copies: Copies) -> str | None:
    """That ranks have made the same parameters in different orders; None if they have not."""
    orders = {rank: list(copy.end or copy.parameters.get(1, {})) for rank, copy in sorted(copies.items())}
    (first, order), *others = orders.items()
    for rank, names in others:
        if names != order and sorted(names) == sorted(order):
            place = next(place for place, (one, other) in enumerate(zip(order, names)) if one != other)
            return (f"the ranks have made {copies[first].name} in different orders: its parameter {place + 1} is "
                    f"{order[place]} on rank {first} and {names[place]} on rank {rank}, and what passes between ranks "
                    "is paired by order: a set of names has an order of its own in each process, so loop over "
                    "sorted(names)")
    return None


def _apart(copies: Copies) -> str | None:
    """That copies part, and are not equal again; None if they do not."""
    names = differing(copies)
    since = parting(copies) if names else None
    return None if since is None else _said(copies, names, since)


def _uneven(copies: Copies) -> Iterator[str]:
    """That ranks train their shards of a model in different ways."""
    first = next(iter(copies.values()))
    if first.by != "FSDP":
        return
    numbers = {rank: copy._replace(settings={step: {name: each for name, each in settings.items()
                                                    if isinstance(each, float)}  # not a rank's own number
                                             for step, settings in copy.settings.items()})
               for rank, copy in copies.items()}
    why = _set(numbers) or _stepped(copies)
    if why:
        yield f"the ranks do not train their shards of {first.name} alike: {why}"


def copies_of(ranks: Sequence[Notes | None]) -> list[Copies]:
    """The copies of each model of which two ranks at least can tell."""
    found: dict[tuple[tuple[int, ...], int], dict[int, Replica]] = defaultdict(dict)
    for rank, replica in noted(ranks, "replicas"):
        if rank in replica.ranks:
            found[replica.ranks, replica.number][rank] = replica
    return [copies for copies in found.values() if len(copies) > 1]


def differing(copies: Copies) -> list[str]:
    """The parameters that differ at the end, or when all copies were last noted."""
    ends = [copy.end for copy in copies.values() if copy.end is not None]
    if len(ends) == len(copies):
        if not any(copy.steps or copy.forwards for copy in copies.values()):
            return []  # none was trained
        return [name for name in ends[0] if any(name in end and _differ(ends[0][name], end[name]) for end in ends[1:])]
    noted = set.intersection(*(set(copy.parameters) for copy in copies.values()))
    return _unlike(copies, max(noted)) if noted else []


def _differ(one: Value, other: Value) -> bool:
    """Whether two ranks hold different values: by more than means differ that are formed in another order."""
    if one.digest == other.digest or len(one.sample) != len(other.sample):
        return False
    if one.sample == other.sample:
        return not one.is_whole  # it is elsewhere
    scale = max((abs(number) for number in one.sample + other.sample if math.isfinite(number)), default=0.0)
    return any(abs(a - b) > one.rounding * scale for a, b in zip(one.sample, other.sample))


def parting(copies: Copies) -> Parting | None:
    """When copies that differ have parted; None if that is by design, or was after all steps, for one rank to evaluate.
    """
    moments = _moments(copies)
    if not moments:
        return Parting(0, 0)
    alike = [moment for moment in moments if _are_alike(copies, moment)]
    apart = [moment for moment in moments if moment not in alike]
    if not apart:
        last = 2 * max(copy.steps for copy in copies.values())
        return None if moments[-1] == last or not _reasons(copies) else Parting(moments[-1], last + 1)
    if any(moment > apart[0] for moment in alike):
        return None  # they are made equal from time to time
    return Parting(alike[-1] if alike else 0, apart[0])


def _moments(copies: Copies) -> list[int]:
    """The moments that all copies have noted, without those at which only a part that stays alike was looked at."""
    whole = set.intersection(*(set(copy.parameters) for copy in copies.values()))
    heads = set.intersection(*(set(copy.states) for copy in copies.values()))
    is_elsewhere = any(_unlike(copies, moment) and len({copy.states[moment] for copy in copies.values()}) == 1
                       for moment in whole & heads)
    return sorted(whole if is_elsewhere else whole | heads)


def _are_alike(copies: Copies, moment: int) -> bool:
    heads = {copy.states[moment] for copy in copies.values() if all(moment in each.states for each in copies.values())}
    return len(heads) <= 1 and not _unlike(copies, moment)


def _unlike(copies: Copies, moment: int) -> list[str]:
    """The parameters whose digests at a moment differ."""
    return _differing([copy.parameters.get(moment, {}) for copy in copies.values()])


def _differing(found: Sequence[Mapping[str, Any]]) -> list[str]:
    return [name for name in found[0] if all(name in each for each in found)
            and len({repr(each[name]) for each in found}) > 1]


def _said(copies: Copies, names: list[str], since: Parting) -> str:
    first = next(iter(copies.values()))
    all_names = first.end if first.end is not None else first.parameters.get(1, {})
    which = "all parameters" if len(names) > 1 and len(names) == len(all_names) else _some(names)
    reasons = _reasons(copies, names, since)
    why = f". {capitalised(reasons[0])}" if reasons else ""
    copies_are = ", which hold copies of the same shard" if first.by == "FSDP" else ""
    return (f"{which} of {first.name} {agree('differs', names)} between {_between(copies, names)}{copies_are}"
            f"{_since(since)}{why}. If that is meant, say so: book.audit.ignore(model)")


def _some(names: Sequence[str]) -> str:
    others = len(names) - MOST_NAMES
    return joined(names) if others <= 0 else f"{listed(names[:MOST_NAMES])} and {others} more"


def _between(copies: Copies, names: Sequence[str]) -> str:
    """The ranks that differ: "ranks 0, 1" if no two are equal, else "rank 0 and ranks 1, 2"."""
    ends = ((rank, copy.end if copy.end is not None else copy.parameters.get(max(copy.parameters, default=0), {}))
            for rank, copy in sorted(copies.items()))
    equal = alike((rank, repr([getattr(held.get(name), "digest", held.get(name)) for name in names]))
                  for rank, held in ends)
    return named(sorted(copies)) if len(equal) == len(copies) else joined(map(named, equal.values()))


def _since(since: Parting) -> str:
    """When they parted, in words."""
    if not since.apart:
        return ""
    before, step = (since.alike + 1) // 2, (since.apart + 1) // 2
    if since.apart == 1:
        return ", already before the first step"
    if since.apart == since.alike + 1:
        return f", since some time between steps {step - 1} and {step}" if since.apart % 2 else f", since step {step}"
    if not since.alike:
        return f", as they did after step {step}"
    return f", since some time after step {before}" if since.apart % 2 else f", since step {before + 1} to {step}"


def _reasons(copies: Copies, names: Sequence[str] = (), since: Parting = ANY) -> list[str]:
    """Why copies have parted, the first of which explains it."""
    return [reason for find in (_new, _loaded, _unaveraged, _set, _stepped, _changed, _by_hand)
            if (reason := find(copies, names, since))]


def _new(copies: Copies, names: Sequence[str], since: Parting) -> str | None:
    at_first = _unlike(copies, since.apart) or list(names)
    for copy in copies.values():
        of = set(copy.added) | set(copy.unfrozen)
        parted = names if set(names) <= of else at_first  # the others differ because these do
        if of and set(parted) <= of:
            who = "they" if parted is names else f"those that parted first, {_some(parted)},"
            how = "are new since DDP wrapped the model" if set(parted) <= set(copy.added) else \
                "needed no gradient when DDP wrapped the model"
            return f"{who} {how}, so DDP does not average their gradients: change the model first, and wrap it then"
    return None


def _loaded(copies: Copies, names: Sequence[str], since: Parting) -> str | None:
    """A state that some ranks have loaded, or all of them different ones."""
    before = {rank: [line for moment, line in copy.loaded if since.alike < moment <= since.apart]
              for rank, copy in copies.items()}
    some = [rank for rank, lines in before.items() if lines]
    if not some or (not since.between_steps and len(some) == len(copies)):
        return None
    line = before[some[0]][-1]
    if len(some) < len(copies):
        if copies[some[0]].by == "FSDP":
            others = [rank for rank in copies if rank not in some]
            return (f"{named(some)} {agree('has', some)} loaded a state in {line}, and {named(others)} "
                    f"{agree('has', others)} not: load it on all ranks")
        return (f"only {named(some)} {agree('has', some)} loaded a state in {line}: load it on all ranks, or before "
                "DDP wraps the model")
    return f"what the ranks have loaded in {line} differs"


def _unaveraged(copies: Copies, names: Sequence[str], since: Parting) -> str | None:
    """Steps with gradients that DDP has not averaged."""
    if not since.in_step:
        return None
    for copy in copies.values():
        if copy.unaveraged is None or (since.apart and 2 * copy.unaveraged[0] > since.apart):
            continue
        step, line = copy.unaveraged
        if copy.under_no_sync:
            return (f"the last backward before step {step} in {line} was under no_sync(), so DDP had not averaged its "
                    "gradients: run the last micro-batch before each step outside no_sync(), its forward included")
        past = next((other.past for other in copies.values() if other.past), None)
        if past:
            return (f"the forward in {past} goes past DDP, which then averages no gradients: call the model that DDP "
                    "returned, not the one inside")
        return (f"before step {step} in {line}, no forward went through DDP, so it has averaged no gradients: call the "
                "model that DDP returned, not the one inside")
    return None


def _set(copies: Copies, names: Sequence[str] = (), since: Parting = ANY) -> str | None:
    """What optimizers had set, such as a learning rate, in a step that all have noted."""
    for step in sorted({step for copy in copies.values() for step in copy.settings} if since.in_step else ()):
        settings = {rank: copy.settings[max(at for at in copy.settings if at <= step)]
                    for rank, copy in sorted(copies.items()) if min(copy.settings, default=step + 1) <= step}
        differ = _differing(list(settings.values())) if len(settings) == len(copies) else []
        if differ:
            by_value = alike((rank, _number(each[differ[0]])) for rank, each in settings.items())
            values = joined(f"{value} on {named(ranks)}" for value, ranks in by_value.items())
            return (f"in step {step}, {differ[0]} was {values}: what sets it must get the same numbers on all ranks, "
                    "such as a loss that is averaged over them first")
    return None


def _number(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _stepped(copies: Copies, names: Sequence[str] = (), since: Parting = ANY) -> str | None:
    by_count = alike((rank, copy.steps) for rank, copy in sorted(copies.items()))
    if len(by_count) == 1 or not since.in_step or any(copy.end is None for copy in copies.values()):
        return None
    counts = joined(f"{named(ranks)} {agree('has', ranks)} made {count}" for count, ranks in by_count.items())
    return f"the optimizer's steps are not as many: {counts}"


def _changed(copies: Copies, names: Sequence[str], since: Parting) -> str | None:
    """Gradients that differ although DDP has averaged them, or a step that differs although they do not."""
    steps = sorted(set.intersection(*(set(copy.gradients) for copy in copies.values())))
    for step in steps:
        if since.in_step and _differing([copy.gradients[step] for copy in copies.values()]):
            first = next(iter(copies.values()))
            line = first.stepped
            if first.hook:
                return (f"the gradients of step {step} differ: {first.hook}(), which DDP calls in place of its "
                        f"all-reduce, must leave the same on all ranks, and nothing may change that before {line}")
            if unused := _unused(first, step):
                return (f"in step {step}, {_some(unused)} got no gradient, so DDP did not average those that it sends "
                        "together with these: use them in the loss on every rank, freeze them before DDP wraps the "
                        "model, or pass find_unused_parameters=True")
            if first.in_backward:
                return f"{line} is called inside backward, before {first.by} has averaged the gradients: call it later"
            return (f"the gradients of step {step} differ, although {first.by} had averaged them: something between "
                    f"backward and {line} changes them by a number of the rank's own, as clipping by a local norm does"
                    ": all_reduce that number first")
    if since.apart == since.alike + 1 and since.apart % 2 == 0 and since.apart // 2 in steps:
        return (f"parameters, gradients and settings were the same before step {since.apart // 2}, so the "
                "optimizer itself differs: which parameters it holds, or what it remembers of earlier steps")
    return None


def _unused(copy: Replica, step: int) -> list[str]:
    """Parameters that got no gradient before a step, where DDP waits for those of all."""
    trained = copy.parameters.get(2 * step, {})
    return [] if copy.finds_unused else [name for name in trained if name not in copy.gradients[step]]


def _by_hand(copies: Copies, names: Sequence[str], since: Parting) -> str | None:
    """Parameters that something other than an optimizer has changed."""
    if since.in_step:
        return None
    if since.apart == 1 and all(copy.by == "FSDP" for copy in copies.values()):
        return ("each rank has made its own, and fully_shard does not make copies equal: make the model with the same "
                "seed on all ranks, or load the same state on all of them")
    if since.apart == 1 and len({copy.wrapped for copy in copies.values()}) > 1:
        return ("they differed when DDP had wrapped the model, which makes them equal unless it is told "
                "init_sync=False: leave that out, or make them equal before")
    if since.apart == 1:
        return ("DDP had made them equal when it wrapped the model, so they have been changed since: initialise or "
                "load before DDP wraps the model, or in the same way on all ranks")
    return "no optimizer has changed them there: the ranks must write the same values into them"
