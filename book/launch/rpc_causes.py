"""L2: why ranks wait for each other over RPC: from the worker that each calls, and the calls that workers run."""
from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from book.launch.rpc import Call
from book.launch.standing import Standing

_CALLS = re.compile(r"waits in (\w+) to (\S+)")
LOCK = "waits for a lock"


def causes(ranks: Sequence[Standing]) -> Iterator[str]:
    """A sentence for each rank that has no thread left for calls, else for each that waits for a call."""
    full = list(_full(ranks))
    yield from full or _waiting(ranks)


def _full(ranks: Sequence[Standing]) -> Iterator[str]:
    for rank, standing in enumerate(ranks):
        worker = standing.worker
        if worker and 0 < worker.num_threads <= len(worker.calls) and all(map(_waits, worker.calls)):
            yield (f"rank {rank} serves calls in {worker.num_threads} thread{'s' * (worker.num_threads > 1)}, and each "
                   f"{_first(worker.calls).partition(' at ')[0]}, so a further call finds none: give init_rpc more "
                   f"num_worker_threads, or let no call wait for another. Look at {worker.calls[0].place}")


def _waiting(ranks: Sequence[Standing]) -> Iterator[str]:
    """For each rank that waits in a call to a worker: what that call waits for there."""
    peers = {rank: peer for rank, standing in enumerate(ranks)
              if (peer := called(ranks, standing)) is not None}
    for rank, peer in peers.items():
        worker = ranks[peer].worker
        calls = list(filter(_waits, worker.calls)) if worker else []
        if calls and peers.get(peer) == rank:
            if rank <= peer:
                who = f"ranks {rank} and {peer} call each other" if rank < peer else f"rank {rank} calls itself"
                yield f"{who} over RPC, and {_told(calls[0], 'each' if rank < peer else 'the')}"
        elif calls:
            yield f"rank {rank} {ranks[rank].doing}, where the call {_first(calls)}"
        elif worker and not worker.calls:
            yield (f"rank {rank} {ranks[rank].doing}, which runs no call: has its function returned a future "
                   "(async_execution) that nobody completes?")


def called(ranks: Sequence[Standing], standing: Standing) -> int | None:
    """The rank of the worker that a rank waits for."""
    found = _CALLS.match(standing.doing)
    return next((rank for rank, other in enumerate(ranks) if found and other.worker and other.worker.name == found[2]),
                None)


def _waits(call: Call) -> bool:
    return call.doing.startswith("waits")


def _first(calls: Sequence[Call]) -> str:
    return f"{calls[0].doing} at {calls[0].place}"


def _told(call: Call, article: str) -> str:
    """What a call waits for, and if it is a lock, what to do."""
    if call.doing != LOCK:
        return f"{article} call {call.doing} at {call.place}"
    return f"{article} call {call.doing}: release the lock before you call. Look at {call.place}"
