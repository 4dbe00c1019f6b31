"""L2: run a function on several real processes from a notebook cell, and report clearly how that ended.

    api        launch, Run, the errors: what the rest of the book uses
    backend    rank_device: ranks agree on the backend before they have a process group
    arguments  checks the call and pickles it before anything starts
    server     the process that ranks are forked from
    ranks      the rank processes on the side of the launcher: pipes, results, exit
    transfer   carries calls and results: a pickle, and a file for large buffers
    output     what a rank writes, and how much of it is kept
    supervise  the verdict: done, failed, hanging or late; what ranks that hang have told; why a run failed
    family     finds the processes that ranks have started, and ends them with the ranks
    child      the rank's side: environment, output, result, exit when the launcher dies
    peers      refuses a peer that does not exist, which gloo fails to do
    starts     refuses a start that can never succeed, and names the line that is to go
    kept       keeps groups that a program destroys for a while: freed at once, one can hang its rank
    agreement  raises when ranks call different collectives, before any bytes move
    board      memory that all ranks share, where each notes its calls for the others
    messages   raises when a message is received as something else than it was sent as
    mail       a part of that memory, where each notes what it sends and receives
    threads    the rank's threads as the kernel sees them: which are working, which wait for a core
    report     what a rank is doing, and how long it has made no progress
    blocked    waits inside one rank: for a lock, a thread, a queue or a store
    history    how often each line has called a collective, or run a model in DDP
    around     what stands around a line and decides whether a rank reaches it: a condition, a loop, an `except`
    sender     which line of a cell has sent a message: of helpers, the line that chose what they send
    requests   which call made a request, and which requests a rank has dropped
    destroyed  groups that a rank has destroyed
    left_out   parameters under DDP that a rank's loss leaves out
    children   processes that ranks start, as a DataLoader does: what each is doing, how one has died
    explain    errors of torch in plain words, with names and lines that the rank knows
    meanwhile  what the other ranks were doing when one failed
    files      which files a rank has written
    rpc        errors that come over RPC, and calls that a rank serves
    stacks     the stacks of threads, of this process or of one that has crashed
    where      turns stack frames into the reader's own line and the operation waited for
    pending    which transfer a waiting rank waits for
    imports    the modules that the server loads, so that a rank starts in milliseconds
    preload    how it loads them
    forked     starts another process from this server, such as a kernel that gets its ranks from it too

The way of a call. It ends at `api._results`, and for a hang goes on:

    api.launch → arguments.packed → server → ranks.Ranks   the ranks are forked, and a pipe leads to each
    child.main → child._run → the function                 in each rank; `transfer.packed` takes its result
    supervise.supervise                                    asks to LOOK until all have told a result, or none moves
    api._results                                           the results as a Run, or an error
    api._hang_error → supervise.ask_for_reports            asks to REPORT; child._reply → report.report answers
    waiting.message.message                                the cause, in words, for the HangError

Why ranks hang, and how that is said, is worked out in `book.waiting` from what they report.
"""
from book.launch.api import HangError, LaunchError, RankError, Run, launch
from book.launch.backend import rank_device
from book.launch.server import warm_up_in_kernel

__all__ = ["HangError", "LaunchError", "RankError", "Run", "launch", "rank_device"]

# All that an import of the book starts, and only in a notebook: torch loads for the ranks while the reader reads.
warm_up_in_kernel()
