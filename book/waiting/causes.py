"""L1: why ranks wait for each other, in a sentence each.

A cause is a function `look(hang)` that yields a sentence for each thing it finds wrong, and nothing in a run that it
does not explain. To add one, write it below and name it in `CAUSES`: in a row of its own, or beside those whose
sentences may stand next to its own. It matches what ranks do by `Kind` and fields, never by words. A program that hangs
for this cause goes into `examples/faults_that_hang.py`; `examples/faults.py` writes the page "When it hangs".
"""
from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import combinations

from book.waiting.counts import out_of_step, uneven_messages
from book.waiting.doing import ANY, Doing, Kind
from book.waiting.hang import Hang, Missing, Served, Standing, Thread
from book.words import agree, alike, counted, joined, listed, named

Look = Callable[[Hang], Iterator[str]]
MOST_NAMES = 6  # of parameters
MOST = 3  # sentences; the first ones explain the rest
OTHER_SIDE = {"send": "recv", "recv": "send"}
CIRCLES = {  # of ranks that wait in the same way; with requests, other transfers may be under way
    ("send", False): "all send first, and nobody receives: let one of them receive first, or use isend",
    ("recv", False): "all receive first, and nobody sends: let one of them send first",
    ("send", True): "wait for isends to one another, and nobody receives these: compare dst= and src=",
    ("recv", True): "wait for irecvs from one another, and nobody sends these: start the sends before you wait, and "
                    "compare dst= and src=",
}
# What would end a wait inside a process; another thread of the rank would have to do it.
ENDS = {
    Kind.LOCK: "release it", Kind.ITEM: "put an item in", Kind.ROOM: "take an item out", Kind.EVENT: "set it",
    Kind.CONDITION: "notify it", Kind.BARRIER: "come to it", Kind.FUTURE: "complete it", Kind.TASKS: "call task_done",
}


def causes(hang: Hang) -> list[str]:
    """Sentences on why these ranks wait, at most `MOST`, from the first row of `CAUSES` that has any."""
    for row in CAUSES:
        if sentences := list(dict.fromkeys(sentence for look in row for sentence in look(hang))):
            return sentences[:MOST]
    return []


# Requests that nobody keeps

def dropped_requests(hang: Hang) -> Iterator[str]:
    """Lines at which ranks dropped a request whose peer now waits for its message."""
    who_dropped: dict[tuple[str, str], set[int]] = {}
    missed = set()  # lines whose messages a rank waits for
    for rank, standing in enumerate(hang.ranks):
        for request in standing.dropped:
            line, verb = (request.call, request.place), OTHER_SIDE[request.call.removeprefix("i")]
            who_dropped.setdefault(line, set()).add(rank)
            peers = range(len(hang.ranks)) if request.peer is None else [request.peer]
            if any(_may_meet(hang.ranks[peer].doing, verb, rank) for peer in peers if 0 <= peer < len(hang.ranks)):
                missed.add(line)
    alike = {line: sorted(who) for line, who in who_dropped.items() if line in missed}
    for (call, place), who in alike.items():
        yield (f"{named(who)} did not keep what {call} returned; when Python drops a request, its message is lost: "
               f"keep it, and call wait() on it. Look at {place}")
    polled = [rank for rank, standing in enumerate(hang.ranks) if standing.polled]
    if polled and not alike:
        yield (f"{named(polled)} {agree('seems', polled)} to have dropped what isend or irecv returned before it was "
               "done: keep it, and call wait() on it")


def _may_meet(doing: Doing, verb: str, rank: int) -> bool:
    """Whether a rank waits in `verb` ("send" or "recv") with `rank`, or may do so: the peer or the call is unknown."""
    unknown = doing.kind is Kind.REQUEST and not doing.operation
    return unknown or (verb == "recv" and doing.peer == ANY) or doing.message == (verb, rank)


# Waits inside a rank's own process

def inside_the_process(hang: Hang) -> Iterator[str]:
    """Ranks that wait for something in their own process, or for a key of the store."""
    for rank, standing in enumerate(hang.ranks):
        if why := _locked_in(standing):
            yield f"rank {rank}{why}"
        elif standing.doing.kind is Kind.KEYS:
            which = "which no rank has" if len(standing.doing.keys) == 1 else "not all of which have been"
            yield f"rank {rank} {standing.doing.words()}, {which} set"


def _locked_in(standing: Standing) -> str | None:
    """What comes after "rank 0" if its main thread waits for its other threads and these wait too; else None."""
    threads, doing = standing.threads, standing.main
    serves = bool(standing.worker and standing.worker.calls)
    if threads is None or serves or any(thread.communicates for thread in threads):
        return None
    in_locks = [thread.name for thread in threads if thread.doing.kind is Kind.LOCK]
    if doing.kind is Kind.FUTURE and threads and all(thread.doing.kind is Kind.FUTURE for thread in threads):
        return _starved(doing, threads)
    if len(in_locks) > 1 and doing.kind in (Kind.JOIN, Kind.TASKS):
        return (f": its threads {joined(in_locks)} each wait for a lock that another holds: take the locks in "
                "the same order in all threads")
    if threads and all(thread.doing.kind in ENDS for thread in threads):
        doings = [f"its thread {thread.name} {thread.doing.words()}" for thread in threads]
        return f" {doing.words()}, and {joined(doings)}"
    if not threads and doing.kind in ENDS:
        return f" {doing.words()}, and has no other thread that could {ENDS[doing.kind]}"
    return None


def _starved(doing: Doing, threads: Sequence[Thread]) -> str:
    do = "does its thread" if len(threads) == 1 else "do its threads"
    return (f" {doing.words()}, and so {do} {joined(thread.name for thread in threads)}: "
            "the pool has no thread left to run what they wait for")


def processes_of_a_rank(hang: Hang) -> Iterator[str]:
    """Ranks that wait for processes which they have started and which wait themselves."""
    for rank, standing in enumerate(hang.ranks):
        for child in standing.children:
            if child.doing.waits and standing.main.waits:
                held = ", which nobody there releases if a thread of the rank held it at the fork,"
                yield (f"rank {rank} {standing.main.words()}, and its {child.name} {child.doing.words()}"
                       f"{held if child.doing == Doing(Kind.LOCK) else ''} at {child.place}")


# Calls over RPC

def calls_over_rpc(hang: Hang) -> Iterator[str]:
    """Ranks that have no thread left for calls, else those that wait for a call."""
    yield from list(_out_of_threads(hang)) or _in_calls(hang)


def _out_of_threads(hang: Hang) -> Iterator[str]:
    for rank, standing in enumerate(hang.ranks):
        worker = standing.worker
        if worker and 0 < worker.num_threads <= len(worker.calls) and all(call.doing.waits for call in worker.calls):
            yield (f"rank {rank} serves calls in {counted(worker.num_threads, 'thread')}, and each "
                   f"{worker.calls[0].doing.words()}, so a further call finds none: give init_rpc more "
                   f"num_worker_threads, or let no call wait for another. Look at {worker.calls[0].place}")


def _in_calls(hang: Hang) -> Iterator[str]:
    callees = {rank: peer for rank in range(len(hang.ranks)) if (peer := hang.callee(rank)) is not None}
    for rank, peer in callees.items():
        worker = hang.ranks[peer].worker
        calls = [call for call in worker.calls if call.doing.waits] if worker else []
        does = f"rank {rank} {hang.ranks[rank].doing.words()}"
        if calls and callees.get(peer) == rank:
            if rank <= peer:
                who = f"ranks {rank} and {peer} call each other" if rank < peer else f"rank {rank} calls itself"
                yield f"{who} over RPC, and {'each' if rank < peer else 'the'} call {_in_call(calls[0])}"
        elif calls:
            yield f"{does}, where the call {calls[0].doing.words()} at {calls[0].place}"
        elif worker and not worker.calls:
            yield (f"{does}, which runs no call: has its function returned a future (async_execution) that nobody "
                   "completes?")


def _in_call(call: Served) -> str:
    """What a call waits for, and if it is a lock, what to do."""
    if call.doing.kind is not Kind.LOCK:
        return f"{call.doing.words()} at {call.place}"
    return f"{call.doing.words()}: release the lock before you call. Look at {call.place}"


# Collectives that not all ranks call

def parameters_left_out(hang: Hang) -> Iterator[str]:
    """Ranks whose loss leaves out parameters, while others wait in backward for DDP's all-reduce."""
    waiting = [rank for rank, standing in enumerate(hang.ranks)
               if standing.doing.kind is Kind.CALL and standing.doing.operation == "backward"]
    for rank, standing in enumerate(hang.ranks):
        if waiting and standing.left_out and rank not in waiting:
            names = [*standing.left_out[:MOST_NAMES], *["..."] * (len(standing.left_out) > MOST_NAMES)]
            yield (f"{named(waiting)} {agree('waits', waiting)} in backward for an all-reduce of DDP; the loss of rank "
                   f"{rank} does not use {listed(names)}, so rank {rank} never starts it: use them on every rank, or "
                   "pass find_unused_parameters=True")


def crossed_groups(hang: Hang) -> Iterator[str]:
    """Two groups in which each waits for ranks that wait in the other one."""
    for one, other in combinations(hang.missing, 2):
        if set(one.waiting) & set(other.behind) and set(other.waiting) & set(one.behind):
            yield (f"{_wait_in(one)} of one group, {_wait_in(other)} of another, each for the other: "
                   "call the groups' collectives in the same order on every rank")
            return


def destroyed_groups(hang: Hang) -> Iterator[str]:
    """Ranks that wait in a collective of a group that others have destroyed without having called it."""
    for one in hang.missing:
        places = ((rank, hang.ranks[rank].destroyed.get(one.group)) for rank in one.behind
                  if not hang.ranks[rank].doing.returned)  # one that has ended has destroyed all of its own
        for place, who in alike((rank, place) for rank, place in places if place).items():
            yield (f"{_wait_in(one)}; {named(who)} {agree('has', who)} destroyed that group without calling it: make "
                   f"all of its calls before destroy_process_group. Look at {place}")


def missed_collectives(hang: Hang) -> Iterator[str]:
    """Ranks that have not reached a collective: those that have returned, if any, else what each does instead."""
    for one in hang.missing:
        returned = [rank for rank in one.behind if hang.ranks[rank].doing.returned]
        instead = alike((rank, (None if returned else hang.ranks[rank].doing, one.last.get(rank)))
                        for rank in returned or one.behind)
        for (doing, last), who in instead.items():
            does = f"{doing.words(len(who))} instead" if doing else "returned without it"
            last_call = f"{last.what} at {last.place}" if last else "none"
            yield f"{_wait_in(one)}; {named(who)} {does} (last call in this group: {last_call})"
    if hang.missing:
        yield from uneven_messages(hang)


def _wait_in(missing: Missing) -> str:
    return f"{named(missing.waiting)} {agree('waits', missing.waiting)} in {missing.what}"


def all_others_returned(hang: Hang) -> Iterator[str]:
    """Ranks that wait in the same way, as in DDP's own all-reduce, while all others have returned."""
    waiting = [rank for rank, standing in enumerate(hang.ranks) if standing.doing.waits]
    returned = [rank for rank, standing in enumerate(hang.ranks) if standing.doing.returned]
    if waiting and returned and len(waiting) + len(returned) == len(hang.ranks):
        does = {hang.ranks[rank].doing for rank in waiting}
        if len(does) == 1:
            yield (f"{named(waiting)} {does.pop().words(len(waiting))}; {named(returned)} {agree('has', returned)} "
                   "returned")


# Sends and receives that do not match

def sends_astray(hang: Hang) -> Iterator[str]:
    """Ranks that send to one rank while another one waits to receive from them."""
    for rank, standing in enumerate(hang.ranks):
        verb, peer = standing.doing.message or ("", -1)
        others = [other for other, its in enumerate(hang.ranks) if its.doing.message == ("recv", rank)]
        if verb == "send" and 0 <= peer < len(hang.ranks) and others and peer not in others and (
                hang.ranks[peer].doing.message is None and not hang.ranks[peer].doing.returned):
            yield (f"rank {rank} {standing.doing.words()}, while {named(others)} {agree('waits', others)} in recv from "
                   f"rank {rank}: compare dst= and src=")


def messages_without_a_match(hang: Hang) -> Iterator[str]:
    """For each rank that waits in a send or a receive: why its peer makes no matching call."""
    for rank, standing in enumerate(hang.ranks):
        verb, peer = standing.doing.message or ("", -1)
        if not 0 <= peer < len(hang.ranks):
            continue
        other = hang.ranks[peer].doing
        if other.returned:
            yield f"rank {rank} {standing.doing.words()}, which has returned"
        elif other.message is None:
            yield f"rank {rank} {standing.doing.words()}, which {other.words()}"
        elif other.message == (OTHER_SIDE[verb], rank):
            yield (f"the send and the receive of ranks {min(rank, peer)} and {max(rank, peer)} do not match: compare "
                   "tag= and group=")
        else:
            yield from _circle(hang, rank, verb)


def _circle(hang: Hang, first: int, verb: str) -> Iterator[str]:
    """A sentence if ranks in a circle, from `first` on, wait in the same way for the next one."""
    circle, rank = [first], first
    while (found := hang.ranks[rank].doing.message) and found[0] == verb and (
            found[1] < len(hang.ranks) and found[1] not in circle):
        rank = found[1]
        circle.append(rank)
    if found != (verb, first):
        return
    circle.sort()
    if len({hang.ranks[rank].place for rank in circle}) > 1:
        yield (f"{named(circle)} wait for each other in a circle, at different lines: the orders of their sends and "
               "receives do not match")
    else:
        has_requests = all(hang.ranks[rank].doing.kind in (Kind.REQUEST, Kind.POLLS) for rank in circle)
        # Each has sent to the rank that it receives from, and not to the one that waits for it.
        sent = [place for rank in circle for peer, place in hang.ranks[rank].sent[-1:]
                if hang.ranks[rank].doing.message == (verb, peer) and hang.ranks[peer].doing.message != (verb, rank)]
        if verb == "recv" and len(sent) == len(circle):
            yield (f"{named(circle)} wait in recv for one another in a circle, and each has sent, but not to the rank "
                   f"that waits for it: compare dst= and src=. Look at {sent[0]}")
        else:
            yield f"{named(circle)} {CIRCLES[verb, has_requests]}"


# The first row in which a cause has something to say is told; what stands in later rows follows from it.
CAUSES: Sequence[Sequence[Look]] = (
    (dropped_requests,),
    (inside_the_process, processes_of_a_rank, calls_over_rpc, parameters_left_out),
    (destroyed_groups,),
    (sends_astray, crossed_groups),
    (missed_collectives, out_of_step),
    (messages_without_a_match, uneven_messages),
    (all_others_returned,),
)
