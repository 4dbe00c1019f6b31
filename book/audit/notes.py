"""L2: what one rank has noted of a run, as plain data: it is pickled, and read where torch is not loaded."""
from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from book.audit.layouts import StridedCall
    from book.audit.passed import BackwardUse
    from book.audit.shorter import Shorter
    from book.audit.threads import Turns
    from book.audit.touched import Touched
    from book.audit.uncaught import Uncaught

PlaceOf = Callable[[str, int], Any]  # str() of what it returns is the place: "train.py line 7: loss.backward()"


def named(place: tuple[str, int] | None, place_of: PlaceOf) -> str:
    """A place in words, within a sentence; "" for none."""
    return str(place_of(*place)).removesuffix(":") if place else ""


class Value(NamedTuple):
    """What a parameter held at the end: a digest of all of it, some of its numbers, and how far rounding moves them."""
    digest: int
    sample: tuple[float, ...] = ()
    is_whole: bool = False  # whether the sample is all of it
    rounding: float = 0.0  # of numbers near 1


class Replica(NamedTuple):
    """One rank's copy of a model.

    Steps of its optimizers count from 1. Moment 2k - 1 is before step k, moment 2k after it. `states` has a digest of
    the beginnings of all parameters at a moment, `parameters` one of all of each at fewer moments, `gradients` one of
    the beginning of each gradient before a step; `settings` are what the optimizers' groups had set, from a step on.
    `fed` has, of the first forwards in training, a digest of the input, one of its indices, and the loader.
    """
    ranks: tuple[int, ...]  # that hold a copy
    number: int  # among the models that these ranks hold copies of
    place: str = ""
    wrapped: int | None = None  # a digest of the beginnings of its parameters when DDP had wrapped it
    hook: str = ""  # the function that DDP calls in the place of its all-reduce
    finds_unused: bool = False  # whether DDP looks for parameters that a loss does not use
    steps: int = 0
    forwards: int = 0  # that DDP made for a backward
    states: Mapping[int, int] = {}
    parameters: Mapping[int, Mapping[str, int]] = {}
    gradients: Mapping[int, Mapping[str, int]] = {}
    settings: Mapping[int, Mapping[str, Any]] = {}
    end: Mapping[str, Value] | None = None  # None: it was not over when this was noted
    added: tuple[str, ...] = ()  # parameters that it did not have when DDP wrapped it
    unfrozen: tuple[str, ...] = ()  # that needed no gradient then
    loaded: tuple[tuple[int, str], ...] = ()  # the moments before which states were loaded into it, and the lines
    past: str = ""  # the line that made a forward which DDP did not see
    unaveraged: tuple[int, str] | None = None  # the first step with gradients that DDP had not averaged, and its line
    under_no_sync: bool = False  # whether the last forward before that step was
    stepped: str = ""  # the line of the last step whose gradients were noted
    in_backward: bool = False  # whether that step was inside backward
    fed: tuple[tuple[int, int | None, str], ...] = ()
    masks: tuple[int, ...] = ()  # digests of the random state at its first forwards, if it has dropout
    by: str = "DDP"  # or "FSDP"
    shard: int = 0  # which one it is a copy of

    @property
    def name(self) -> str:
        """The model in words."""
        does = "that DDP wraps" if self.by == "DDP" else "that fully_shard cuts"
        return f"the model {does} in {self.place}" if self.place else "this model"


class Loader(NamedTuple):
    """A `DataLoader` with workers that each read an `IterableDataset`: digests of the first batches."""
    place: str
    num_workers: int
    batches: tuple[int, ...]


class Epoch(NamedTuple):
    """A loader that has handed out all samples of its data, each batch of them to a forward in training."""
    place: str
    of: int
    size: int


class RandomSplit(NamedTuple):
    """A random split: of which data, into which parts."""
    place: str
    of: int
    lengths: tuple[int, ...]
    parts: int


class Sharding(NamedTuple):
    """A `DistributedSampler` that shuffles, when it was first read."""
    place: str
    of: int  # samples
    num_replicas: int
    rank: int
    seed: int


class Orphans(NamedTuple):
    """Parameters that an optimizer holds, and no model does: how many of how many, and its line."""
    place: str
    lost: int
    total: int


class Summed(NamedTuple):
    """Parameters before a step, by their order in the optimizer, whose gradients this line had summed over ranks."""
    ranks: tuple[int, ...]
    place: str
    values: Mapping[str, Value]


def noted(ranks: Sequence[Notes | None], field: str) -> Iterator[tuple[int, Any]]:
    """Each rank with each of what it has noted in a field of `Notes`."""
    for rank, notes in enumerate(ranks):
        yield from ((rank, each) for each in (getattr(notes, field) if notes is not None else ()))


class Notes(NamedTuple):
    """What one rank has noted; each field belongs to the module that fills it."""
    uncaught: tuple[Uncaught, ...] = ()
    alone: str | None = None  # the line that has started a world of this rank alone
    written: Mapping[str, tuple[float, tuple[str, int]]] = {}  # by file: when, by time.monotonic(), and the line
    layouts: tuple[StridedCall, ...] = ()
    shorter: tuple[Shorter, ...] = ()
    touched: tuple[Touched, ...] = ()
    threads: tuple[Turns, ...] = ()
    uses: tuple[BackwardUse, ...] = ()
    replicas: tuple[Replica, ...] = ()
    loaders: tuple[Loader, ...] = ()
    epochs: tuple[Epoch, ...] = ()
    repeated: tuple[str, ...] = ()  # loaders of shuffled shares that gave two epochs the same order
    splits: tuple[RandomSplit, ...] = ()
    shardings: tuple[Sharding, ...] = ()
    orphans: tuple[Orphans, ...] = ()
    summed: tuple[Summed, ...] = ()
