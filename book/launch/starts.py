"""L2: find a start that can't succeed, in the call of `init_process_group`, and say which line is to go.

`launch` sets what ranks need to find one another, as torchrun does, and hosts their store. A program that sets its own
address, rank or world size waits for a rank that does not exist or a store that nobody hosts, until its time is up.
`launch` refuses such a start.
Ranks tell one another in the launcher's store which rank they claim to be, and where they are to meet.
"""
from __future__ import annotations

import functools
import inspect
import os
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from types import CodeType, FunctionType
from typing import Any, NamedTuple
from urllib.parse import parse_qs, urlparse

from book.launch import where
from book.tap.log import Place
from book.tap.place import caller, is_learners, outwards
from book.tap.replaced import replace
from book.words import counted, joined

NAMES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "GLOO_SOCKET_IFNAME")
CONNECT_S, ANSWER_S, OWNER_S = 1.0, 10.0, 1.0
WITHOUT_PEERS = ("fake", "mpi")  # backends that meet nobody, or in their own way
MOST_CALLS = 4  # from a function that a process is to run to the one that names init_process_group


class Launched(NamedTuple):
    """What the launcher has set for this process."""
    rank: int
    world_size: int
    address: tuple[str, int]
    began_s: float  # by time.time()
    pid: int
    is_audited: bool = True
    by: str = "launch"
    run: str = "launch"  # what all its ranks are called
    attempt: str = ""  # of torchrun, whose store has what the ranks of earlier ones have said

    @property
    def sets_them(self) -> str:
        """Who sets what ranks need to find one another."""
        return "launch sets them, as torchrun does" if self.by == "launch" else f"{self.by} sets them"


class Start(NamedTuple):
    """A call of init_process_group: the rank and the world that it names, and where ranks meet."""
    rank: int
    world_size: int
    meeting: str
    address: tuple[str, int] | None
    place: Place
    given: frozenset[str]  # which of rank and world_size are arguments

    def advice(self, launched: Launched) -> str:
        """What to do about numbers that are wrong."""
        by_hand = " and ".join(f"{name}=" for name in ("rank", "world_size") if name in self.given)
        return f"leave {by_hand or 'what sets them'} out, {launched.sets_them}"

    def words(self, name: str) -> str:
        """Where a number comes from: "world_size=4" or "WORLD_SIZE=4, set in x.py line 3: ..."."""
        value = getattr(self, name)
        return f"{name}={value}" if name in self.given else _set(name.upper(), value)


written: dict[str, Place] = {}  # variables of NAMES that the program has set, and its line
_starts: Counter[str] = Counter()  # by meeting
_met: dict[str, Place] = {}  # where this process has met others, and the line
_sizes: list[tuple[int, Place]] = []  # of the worlds that this process has started, and the lines
_stores: list[Any] = []  # the launcher's, once it is open


def watch(launched: Launched) -> None:
    """Check each start of this process from now on; the tap must be on."""
    import torch.distributed as dist
    import torch.multiprocessing as multiprocessing
    from torch.distributed import distributed_c10d
    init = _checked(distributed_c10d.init_process_group, launched)
    for module in (distributed_c10d, dist):
        replace(module, "init_process_group", init)
    spawn = _without_ranks(multiprocessing.spawn)
    for module in (multiprocessing, sys.modules["torch.multiprocessing.spawn"]):
        replace(module, "spawn", spawn)
    replace(os._Environ, "__setitem__", _noted(os._Environ.__setitem__))


def alone() -> Place | None:
    """The line at which this process has started a world of one, and no other; None if it has not."""
    return _sizes[0][1] if _sizes and all(size == 1 for size, _ in _sizes) else None


def line_that_set(name: str) -> str | None:
    """The line of the program that has set a variable of `NAMES`; None if it has not."""
    return str(where.place_of(*written[name])) if name in written else None


def _noted(set_item: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(set_item)
    def __setitem__(self: Any, name: Any, value: Any) -> None:
        set_item(self, name, value)
        if name in NAMES and (place := caller(sys._getframe(1))[1]):
            written[name] = place

    return __setitem__


def _set(name: str, value: object) -> str:
    line = line_that_set(name)
    return f"{name}={value}" + (f", set in {line}" if line else "")


def _checked(init: Callable[..., None], launched: Launched) -> Callable[..., None]:
    signature = inspect.signature(init)

    @functools.wraps(init)
    def init_process_group(*args: Any, **options: Any) -> None:
        wrong, start, backend = None, None, ""
        try:
            given = signature.bind(*args, **options).arguments
            backend = str(given.get("backend") or "").lower()
            start = _start(given, caller(sys._getframe(1))[1] or ("", 0))
            wrong = _wrong(backend, start, launched)
        except Exception:
            pass  # torch says why
        if wrong:
            raise ValueError(wrong)
        init(*args, **options)
        if start is not None and start.world_size > 1 and backend not in WITHOUT_PEERS:
            _met[start.meeting] = start.place

    return init_process_group


def _wrong(backend: str, start: Start | None, launched: Launched) -> str | None:
    """Why this start can't succeed; None if it can, or if that is not known."""
    import torch.distributed as dist
    if dist.is_initialized() and os.getpid() != launched.pid:
        return (f"rank {launched.rank} has started this process: launch has started the ranks, so start no more "
                "processes that call init_process_group")
    if backend in WITHOUT_PEERS or dist.is_initialized():
        return None
    if wrong := _no_gpu(backend) or ("nccl" not in backend and _no_interface()) or None:
        return wrong
    return None if start is None else _met_before(start, launched) or _never_meets(start, launched)


def never_meets(init: Callable[..., None], args: Sequence[Any], options: Mapping[str, Any],
                launched: Launched) -> str | None:
    """Why the ranks of a call of `init` can't find one another; None if they can, or if that is not known."""
    try:
        start = _start(inspect.signature(init).bind(*args, **options).arguments, ("", 0))
        return _never_meets(start, launched) if start is not None else None
    except Exception:
        return None  # torch says why


def _never_meets(start: Start, launched: Launched) -> str | None:
    return (_numbers(start, launched) or _nobody_listens(start, launched) or _left_over(start, launched)
            or _claimed_twice(start, launched))


def _no_gpu(backend: str) -> str | None:
    import torch
    if backend not in ("nccl", "cuda:nccl") or torch.cuda.device_count():
        return None
    return ("NCCL needs a GPU for each rank, and this run has none: call dist.init_process_group() without a backend "
            "(launch has chosen gloo), or pass \"gloo\"")


def _no_interface() -> str | None:
    asked, there = os.environ.get("GLOO_SOCKET_IFNAME", ""), [name for _, name in socket.if_nameindex()]
    missing = [name for name in filter(None, asked.split(",")) if name not in there]
    if not missing:
        return None
    return (f"{_set('GLOO_SOCKET_IFNAME', asked)}: this machine has no network interface {joined(missing)}, only "
            f"{joined(there)}. Leave it out: launch sets it")


def _start(given: Mapping[str, Any], place: Place) -> Start | None:
    """What a call asks for; None with a store of its own, and where torch will say what is missing."""
    if given.get("store") is not None:
        return None
    url = urlparse(given.get("init_method") or "env://")
    asked = {name: int(values[0]) for name, values in parse_qs(url.query).items() if name in ("rank", "world_size")}
    asked |= {name: int(given[name]) for name in ("rank", "world_size") if given.get(name, -1) != -1}
    by_hand = frozenset(asked)
    if url.scheme == "env":
        asked = {name: int(os.environ[name.upper()]) for name in ("rank", "world_size") if name not in asked} | asked
        address: tuple[str, int] | None = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    else:
        address = (str(url.hostname), int(url.port or 0)) if url.scheme == "tcp" else None
    if not asked.keys() >= {"rank", "world_size"} or url.scheme not in ("env", "tcp", "file"):
        return None
    meeting = _meeting(*address) if address else os.path.realpath(url.path)
    return Start(asked["rank"], asked["world_size"], meeting, address, place, by_hand)


def _meeting(host: str, port: int) -> str:
    return f"{'127.0.0.1' if host == 'localhost' else host}:{port}"


def _met_before(start: Start, launched: Launched) -> str | None:
    """Whether this process has met others in the launcher's store, which still has the addresses of then."""
    if start.world_size == 1 or start.meeting not in _met or start.meeting != _meeting(*launched.address):
        return None
    return (f"this program has started before, in {where.place_of(*_met[start.meeting])}, and the store in which ranks "
            "meet still has the addresses of that start: a rank that reads one of these waits for ever, under torchrun "
            "too. Start once, and make further groups with dist.new_group()")


def _numbers(start: Start, launched: Launched) -> str | None:
    """What is wrong with a rank and a world size by themselves."""
    if not 0 <= start.rank < start.world_size:
        return (f"there is no rank {start.rank} in a world of {start.world_size}: {start.words('rank')}, "
                f"{start.words('world_size')}: {start.advice(launched)}")
    if start.world_size > launched.world_size and os.getpid() == launched.pid:
        return (f"this start waits for {counted(start.world_size, 'rank')} ({start.words('world_size')}), and "
                f"{launched.by} has started {launched.world_size}: {start.advice(launched)}")
    return None


def _nobody_listens(start: Start, launched: Launched) -> str | None:
    """Whether ranks are to meet where no store is: the launcher hosts it, so torch hosts none on rank 0."""
    if start.address in (None, launched.address) or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    assert start.address is not None
    if _hosts_by_hand():
        return None
    try:
        socket.create_connection(start.address, CONNECT_S).close()
    except OSError:
        there = f"nothing listens at port {start.address[1]} of {start.address[0]}"
    else:
        if _is_store(start.address):
            return None
        there = f"another program listens at port {start.address[1]} of {start.address[0]}, and answers no rank"
    own = [line for name in ("MASTER_ADDR", "MASTER_PORT") if (line := line_that_set(name))]
    if own:
        which = "this line" if len(own) == 1 else "these lines"
        return (f"{there}: the program has overwritten what {launched.by} had set, in {joined(dict.fromkeys(own))}. "
                f"Leave {which} out: {launched.sets_them}")
    return (f"{there}: ranks under {launched.by} meet in its own store. Leave init_method= out, and rank= and "
            "world_size= with it")


def _is_store(address: tuple[str, int]) -> bool:
    """Whether what listens there answers as a store does: torch would wait for it without a limit."""
    import torch.distributed as dist
    opened: list[Any] = []

    def connect() -> None:
        with suppress(Exception):
            opened.append(dist.TCPStore(*address, is_master=False, wait_for_workers=False))

    thread = threading.Thread(target=connect, daemon=True)
    thread.start()
    thread.join(timeout=ANSWER_S)
    return bool(opened)


def _hosts_by_hand() -> bool:
    """Whether the program may host a store itself: a calling function, or one that it calls, names the class."""
    return any(is_learners(frame.f_code.co_filename) and _names(frame.f_code, frame.f_globals, "TCPStore")
               for frame in outwards(sys._getframe(1)))


def _left_over(start: Start, launched: Launched) -> str | None:
    """Whether the file in which ranks are to meet was written before this launch began."""
    if start.address is not None:
        return None
    try:
        file = os.stat(start.meeting)
    except OSError:
        return None
    if not file.st_size or file.st_mtime >= launched.began_s:
        return None
    return (f"the file {start.meeting} is left over from an earlier run, and holds its addresses: delete it "
            f"before the ranks start, or leave init_method= out: {launched.by} has a store for them")


def _claimed_twice(start: Start, launched: Launched) -> str | None:
    """Whether another process has said that it is this rank too, or that the world has another size."""
    if launched.is_audited:
        _sizes.append((start.world_size, start.place))
    if start.world_size == 1:
        return None
    store = _launchers_store(launched)
    _starts[start.meeting] += 1
    key = f"lockstep/start{launched.attempt}/{start.meeting}/{_starts[start.meeting]}"
    is_own = start.rank == launched.rank and os.getpid() == launched.pid
    mine = f"{launched.rank} {os.getpid()} {start.world_size}"
    first = store.compare_set(f"{key}/{'own' if is_own else 'other'}/{start.rank}", "", mine).decode()
    store.set(f"lockstep/came{launched.attempt}/{launched.rank}", "")
    first = "" if first == mine else first
    told = first or _late_for(store, key, start) if is_own else _of_owner(store, key, start, launched) or first
    return _twice(start, launched, int(told.split()[0])) if told else _other_size(store, key, start, launched)


def _of_owner(store: Any, key: str, start: Start, launched: Launched) -> str:
    """What the launch's rank of this number has said, if it calls itself so too: of the two, it goes on."""
    end_s = time.monotonic() + OWNER_S
    while (start.rank != launched.rank and not store.check([f"lockstep/came{launched.attempt}/{start.rank}"])
           and time.monotonic() < end_s):
        time.sleep(0.01)
    store.set(f"{key}/past/{start.rank}", "")
    return _said(store, f"{key}/own/{start.rank}")


def _late_for(store: Any, key: str, start: Start) -> str:
    """What another process has said that calls itself so too, and has waited for this one in vain."""
    return _said(store, f"{key}/other/{start.rank}") if store.check([f"{key}/past/{start.rank}"]) else ""


def _said(store: Any, key: str) -> str:
    return store.get(key).decode() if store.check([key]) else ""


def _twice(start: Start, launched: Launched, other: int) -> str:
    if other == launched.rank:
        return (f"rank {other} and a process that it has started, or two of these, call themselves rank {start.rank}; "
                f"{launched.by} has started the ranks, so start no more processes that call init_process_group")
    both = f"ranks {min(other, launched.rank)} and {max(other, launched.rank)}"
    return (f"{both} of this {launched.run} both call themselves rank {start.rank} "
            f"({start.words('rank')}): {start.advice(launched)}")


def _other_size(store: Any, key: str, start: Start, launched: Launched) -> str | None:
    """Whether a rank that meets this one at the same place has named another size of the world."""
    if start.world_size == launched.world_size:
        return None
    for rank in range(launched.world_size):
        if said := _said(store, f"{key}/own/{rank}"):
            size = int(said.split()[2])
            if size != start.world_size:
                return (f"rank {rank} starts with a world of {size}, this one with {start.world_size} "
                        f"({start.words('world_size')}): {start.advice(launched)}")
    return None


def _launchers_store(launched: Launched) -> Any:
    import torch.distributed as dist
    if not _stores or os.getpid() != launched.pid:
        _stores[:] = [dist.TCPStore(*launched.address, is_master=False, wait_for_workers=False)]
    return _stores[0]


def _without_ranks(spawn: Callable[..., Any]) -> Callable[..., Any]:
    """How torch starts processes, but none that are to become ranks: these there are."""
    @functools.wraps(spawn)
    def call(function: Any, *args: Any, **options: Any) -> Any:
        is_known = isinstance(function, FunctionType)
        if is_known and _names(function.__code__, function.__globals__, "init_process_group"):
            raise ValueError(f"launch has started the ranks already: call {function.__name__}(...) on each rank "
                             "instead of mp.spawn, with the rank from os.environ[\"RANK\"]")
        return spawn(function, *args, **options)

    return call


def _names(code: CodeType, known: Mapping[str, Any], name: str, depth: int = MOST_CALLS) -> bool:
    """Whether a function, or one that it calls by a name in `known`, names another."""
    if name in code.co_names or not depth:
        return name in code.co_names
    called = [known[each] for each in code.co_names if isinstance(known.get(each), FunctionType)]
    return any(_names(each.__code__, each.__globals__, name, depth - 1) for each in called
               if each.__code__ is not code and is_learners(each.__code__.co_filename))
