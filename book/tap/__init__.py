"""L2: one tap on torch.distributed: each call of a process is seen once, and noted in one log that others read.

`start()` works in any program, under `launch` or torchrun. Called before `dist.init_process_group()`, it sees what C++
calls too, such as DDP's all-reduces; called later, only what Python calls.

    log        Op: a call as plain data; Subscriber: what is told of it, or refuses it before it is made
    place      the line of the program that made a call, and which function of torch.distributed it called
    group      the process group that sees the operations that pass through it
    work       the requests that it returns, which tell when the program has waited for them
    functions  what no process group sees: new groups, collectives of objects, models in DDP, the lookup of ranks
    replaced   what all this has put in the place of torch's own, so that it can be put back
    imported   modules seen as they are imported, so that nothing has to import them earlier
"""
from __future__ import annotations

from book.tap.log import LENGTH, LOG, Op, Subscriber

__all__ = ["LENGTH", "Op", "Subscriber", "ops", "start", "stop", "subscribe", "unsubscribe"]


def start() -> None:
    """See every call to torch.distributed from now on; does nothing in a process that does already."""
    from book.tap import functions, group
    if not LOG.is_on:
        LOG.is_on = True
        LOG.ring.clear()  # of an earlier run of this process
        group.install()
        functions.install()


def stop() -> None:
    """See no further calls. Groups made in the meantime note nothing from then on.

    Their batches of sends and receives are no longer coalesced, which NCCL needs: destroy such groups first.
    """
    from book.tap import replaced
    LOG.is_on = False
    replaced.undo()


def subscribe(subscriber: Subscriber) -> None:
    """Tell `subscriber` of all calls from now on, after those that were there before it."""
    LOG.subscribe(subscriber)


def unsubscribe(subscriber: Subscriber) -> None:
    """Tell `subscriber` of no further calls."""
    LOG.unsubscribe(subscriber)


def ops() -> list[Op]:
    """The last calls of this process, oldest first: at most `LENGTH`, whatever the program does."""
    return list(LOG.ring)
