"""L2: the sentences on a job that has ended: who failed first and how, or what the ranks have called in all."""
from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from book.audit.drift import copies_of, differing
from book.audit.findings import findings
from book.audit.notes import Notes
from book.job.members import Member
from book.job.rates import Work, rates_told
from book.job.told import Told
from book.launch.meanwhile import Other, time_up, written_late
from book.launch.supervise import hang_of, raised
from book.look.timelines import Timeline, steps
from book.look.told import groups_told, timelines_told
from book.waiting.causes import causes
from book.waiting.counts import out_of_step
from book.waiting.doing import Doing, Kind
from book.waiting.hang import CollectiveCall, Group, Hang, Standing
from book.words import alike, counted, in_bytes, named

AT_ONCE_S = 0.5  # torchrun ends all ranks when one has ended: who was first is seen only where the system tells it


def difference(words: str, hang: Hang | None) -> str:
    """What the ranks do that can't be right, in words, and where they fell out of step; None if that is not known."""
    is_known = hang is not None and all(standing.calls for standing in hang.ranks)
    return "\n".join([words, *(f"cause: {cause}" for cause in (out_of_step(hang) if hang and is_known else ()))])


def failure(members: Sequence[Member], hang: Hang, differed: bool) -> str:
    """The rank that failed first, its error with the line, the last call of each other rank, what the audit finds.

    `differed` says whether it has been told what the ranks did that can't be right.
    """
    calls = hang.calls
    made = {member.rank: sum(last[member.rank].number for last in calls.values() if member.rank in last)
            for member in members}
    first = _first([member for member in members if member.failed], made)
    also = [f"also: {finding}" for finding in findings(_notes([member.told for member in members]))]
    if differed and (first.died or first.is_victim):
        how = "died" if first.died else "lost the connection to a peer"
        return "\n".join([f"rank {first.rank} {how} after that", *also])
    if first.is_victim and (left := _left(members, calls)):
        return left
    said = first.told.failure
    lines = raised(first.rank, said) if said else [
        f"rank {first.rank} died without an error: something has killed it, as the system does when memory runs out, "
        "or it called os._exit"]
    others = [member for member in members if member is not first]
    if said and said.waited:
        return "\n".join([*lines, time_up(first.rank, said.waited, [_other(member) for member in others], hang), *also])
    if said and said.not_read:
        lines += written_late(first.rank, said.not_read, {member.rank: member.told.written for member in others})
    shown = [first] if said is None else []
    return "\n".join([*lines, *_where(shown, calls), *_where(others, calls), *also])


def _other(member: Member) -> Other:
    return Other(member.rank, member.told.failure, member.failed, member.told.ended and not member.failed)


def _notes(ranks: Sequence[Told]) -> list[Notes | None]:
    """The notes of these ranks for the audit, by rank; those of another host are not known."""
    notes: list[Notes | None] = [None] * max(said.world_size for said in ranks)
    for said in ranks:
        notes[said.rank] = said.notes
    return notes


def _left(members: Sequence[Member], calls: Mapping[Group, Mapping[int, CollectiveCall]]) -> str:
    """Why ranks have lost a peer whose script had ended well: it has left them in a call; "" if that is not so."""
    standings = [Standing(Doing(Kind.UNKNOWN))] * max(member.told.world_size for member in members)
    for member in members:
        said = member.told.standing or Standing(Doing(Kind.FINISHED))
        doing = _was_doing(member, calls) if member.is_victim else None
        standings[member.rank] = said._replace(main=doing) if doing else said
    victims = [member for member in members if member.is_victim]
    ended = [member.rank for member in members if member.told.ended and not member.failed]
    found = causes(hang_of(standings, calls)) if ended and victims else []
    if not found:
        return ""
    head = f"{named([member.rank for member in victims])} lost the connection to a peer: {named(ended)} had ended"
    return "\n".join([head, *(f"cause: {cause}" for cause in found), *_where(victims, calls)])


def _was_doing(victim: Member, calls: Mapping[Group, Mapping[int, CollectiveCall]]) -> Doing | None:
    """What a rank that has lost a peer was in: the send or receive that raised, else its last collective."""
    raised_in = victim.told.failure.doing if victim.told.failure else None
    if raised_in and raised_in.message:
        return raised_in
    last = _last(victim.rank, calls)
    return Doing(Kind.CALL, last.name) if last else None


def _last(rank: int, calls: Mapping[Group, Mapping[int, CollectiveCall]]) -> CollectiveCall | None:
    """A rank's last call, in the newest of its groups."""
    own = [last[rank] for last in calls.values() if rank in last]
    return own[-1] if own else None


def _first(failed: Sequence[Member], made: Mapping[int, int]) -> Member:
    """The one whose failure is no effect of another's; of those that died at once, the one that the system names first,
    else the one that was least far."""
    causes = [member for member in failed if not member.is_victim] or failed
    begin_s = min(member.failed_s() for member in causes)
    soon = [member for member in causes if member.failed_s() < begin_s + AT_ONCE_S]
    told_why = [member for member in soon if member.told.failure]
    if told_why and min(member.failed_s() for member in told_why) <= begin_s + AT_ONCE_S / 2:
        soon = told_why
        return min(soon, key=lambda member: (member.failed_s(), member.rank))
    died_s = [member.ended_s for member in soon if member.ended_s is not None]
    if len(died_s) == len(soon):
        return soon[died_s.index(min(died_s))]
    return min(soon, key=lambda member: (made[member.rank], member.rank))


def _where(members: Sequence[Member], calls: Mapping[Group, Mapping[int, CollectiveCall]]) -> list[str]:
    """The last calls of ranks, a line for those that are at the same one."""
    last = ((member.rank, _last(member.rank, calls)) for member in members)
    found = alike((rank, call.where if call else "") for rank, call in last)
    return [f"  the last call of {named(ranks)}: {words}" if words else f"  {named(ranks)} had called no collective"
            for words, ranks in found.items()]


def summary(ranks: Sequence[Told], timelines: Sequence[Timeline], work: Work | None = None) -> str:
    """How this host's ranks spent their time, who was late, what they called, and what the audit finds."""
    times = [*times_told(timelines, work)]
    if timelines and len(ranks) < max(said.world_size for said in ranks):
        times.append("  all this is of the ranks of this host; one of another host may be later still")
    lines = [f"{counted(len(ranks), 'rank')} ended", *(f"  {line}" for line in times)]
    groups: dict[Group, dict[str, tuple[int, int]]] = {}
    for (group, name), sums in totals(ranks).items():
        groups.setdefault(group, {})[name] = sums
    names = groups_told(groups)
    for group, each in groups.items():
        made = ", ".join(f"{name} {calls}" for name, (calls, _) in sorted(each.items(), key=lambda one: -one[1][0]))
        size = sum(size for _, size in each.values())
        objects = ", its objects not counted" if any("object" in name for name in each) else ""
        lines.append(f"  group of {names[group]}: {made}; {in_bytes(size)} in a rank's tensors{objects}")
    everyone = len(ranks) == max(said.world_size for said in ranks)
    notes = _notes(ranks) if everyone else []
    return "\n".join([*lines, *_equal(notes), *(f"warning: {finding}" for finding in findings(notes))])


def _equal(notes: Sequence[Notes | None]) -> Iterator[str]:
    """The models whose copies are alike, as DDP leaves them."""
    for copies in copies_of(notes):
        is_known = all(copy.by == "DDP" and copy.steps and copy.end is not None for copy in copies.values())
        if is_known and not differing(copies):
            model = f"model {copies[min(copies)].number} in DDP" if len(copies_of(notes)) > 1 else "the model in DDP"
            yield f"  {model} is the same on {named(sorted(copies))} after the last step"


def times_told(timelines: Sequence[Timeline], work: Work | None = None) -> Iterator[str]:
    """How ranks spent their time and who was late; with what their user says of a step, how fast that is."""
    yield from timelines_told(timelines) if timelines else ()
    yield from rates_told(work, steps(timelines)) if work else ()


def totals(ranks: Sequence[Told]) -> dict[tuple[Group, str], tuple[int, int]]:
    """How often a rank has called what in each group, and the bytes of its tensors: of the ranks the most."""
    found: dict[tuple[Group, str], tuple[int, int]] = {}
    for said in ranks:
        for key, (calls, size) in said.totals.items():
            most_calls, most_bytes = found.get(key, (0, 0))
            found[key] = max(calls, most_calls), max(size, most_bytes)
    return found
