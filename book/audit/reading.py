"""L2: what this process notes of the data that it reads: batches of loaders, random splits, shards of samplers."""
from __future__ import annotations

import sys
import zlib
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch.utils.data import (BatchSampler, DataLoader, Dataset, DistributedSampler, IterableDataset, RandomSampler,
                              SequentialSampler, get_worker_info, random_split)

from book.audit import digests
from book.audit.digests import Digest
from book.audit.notes import Epoch, Loader, PlaceOf, RandomSplit, Sharding, named
from book.tap.log import Place
from book.tap.place import caller, outwards

MOST = 16  # loaders, splits and samplers, and batches of each loader
LOOKED_AT = 8  # elements of a list
_SPLITS = random_split.__code__


class LoaderRead:
    """What an iterator of a loader has handed out."""

    def __init__(self, iterator: Any, loader: Any, place: Place | None) -> None:
        self.place = place
        self.repeats = isinstance(iterator._dataset, IterableDataset) and iterator._num_workers > 1
        self.num_workers: int = iterator._num_workers
        self.reads_all = _reads_all(loader)
        self.order = _order_of(loader.sampler, place)
        self.sampler_epoch: int = getattr(loader.sampler, "epoch", 0)
        self.batches: list[Digest | None] = []
        self.indices: list[int | None] = []  # that were asked for; None of data that have no indices
        self.handed = self.trained = 0
        self.epoch: tuple[int, int] | None = None  # what the data are like and how many, once all have been handed out


class Order:
    """The epochs that a model was trained on in the order of one sampler: the sampler's number, and a digest."""

    def __init__(self, place: Place | None) -> None:
        self.place = place
        self.epochs: list[tuple[int, int]] = []


_loaders: list[LoaderRead] = []
_reading: WeakKeyDictionary[Any, LoaderRead] = WeakKeyDictionary()
_just_read: list[LoaderRead] = []
_splits: list[tuple[Place | None, int, tuple[int, ...], int]] = []
_shardings: list[tuple[Place | None, int, int, int, int]] = []
_orders: list[Order] = []
_ordered: WeakKeyDictionary[Any, Order] = WeakKeyDictionary()  # by sampler
_sharding: WeakSet[Any] = WeakSet()  # samplers that are noted


def forget() -> None:
    """Forget what has been noted."""
    for noted in (_loaders, _reading, _just_read, _splits, _shardings, _orders, _ordered, _sharding):
        noted.clear()


def _reads_all(loader: Any) -> bool:
    """Whether a loader hands out each sample of its data once."""
    sampler = loader.sampler
    if type(loader.batch_sampler) not in (BatchSampler, type(None)) or type(loader) is not DataLoader:
        return False  # another library's, which may give each rank its share of the batches
    return isinstance(sampler, SequentialSampler) or (
        isinstance(sampler, RandomSampler) and not sampler.replacement and sampler.num_samples == len(loader.dataset))


def _order_of(sampler: Any, place: Place | None) -> Order | None:
    """What is noted of a sampler that shuffles shares; None of any other."""
    if not (isinstance(sampler, DistributedSampler) and sampler.shuffle):
        return None
    if sampler not in _ordered:
        _ordered[sampler] = Order(place)
        _orders.append(_ordered[sampler])
    return _ordered[sampler]


def opened(iterator: Any, loader: Any) -> None:
    """A loader begins to read."""
    if len(_loaders) < MOST:
        _reading[iterator] = LoaderRead(iterator, loader, caller(sys._getframe())[1])
        _loaders.append(_reading[iterator])


def asked(iterator: Any, indices: Any) -> None:
    """A loader asks for samples."""
    read = _reading.get(iterator)
    if read is not None and len(read.indices) < MOST:
        has_none = indices is None or (isinstance(indices, list) and None in indices)
        read.indices.append(None if has_none else zlib.crc32(repr(indices).encode()))


def handed(iterator: Any, batch: Any) -> None:
    """A loader hands out a batch."""
    read = _reading.get(iterator)
    if read is None:
        return
    read.handed += 1
    if len(_just_read) < MOST:
        _just_read.append(read)
    if read.repeats and read.handed <= MOST:
        read.batches.append(digests.of_batch(batch))


def ended(iterator: Any) -> None:
    """A loader has handed out all that its sampler names."""
    read = _reading.get(iterator)
    if read is None or read.handed != read.trained or read.handed < 2:
        return
    if read.reads_all:
        read.epoch = likeness(iterator._dataset), len(iterator._dataset)
    if read.order is not None:
        read.order.epochs.append((read.sampler_epoch, zlib.crc32(repr(read.indices).encode())))
        read.order = None  # workers that persist go on with the same iterator


def just_read(trains: bool) -> tuple[int | None, Place | None]:
    """A digest of the indices of what loaders have handed out since this was last asked, and a loader's line.

    `trains` says whether a model is trained on it.
    """
    read = [(each, each.indices[each.handed - 1]) for each in _just_read if 0 < each.handed <= len(each.indices)]
    for each in _just_read:
        each.trained += trains
    _just_read.clear()
    indices = [index for _, index in read]
    return (zlib.crc32(repr(indices).encode()) if any(index is not None for index in indices) else None,
            read[0][0].place if read else None)


def parted(subset: Any) -> None:
    """A subset of data is made; noted is the first of a random split whose caller has named no generator."""
    frame = next((each for each in outwards(sys._getframe()) if each.f_code is _SPLITS), None)
    values = {} if frame is None else frame.f_locals
    if values.get("generator") is torch.default_generator and subset.indices[:1] == values["indices"][:1]:
        if len(_splits) < MOST:
            parts = zlib.crc32(repr(values["indices"][:1024]).encode())
            _splits.append((caller(frame)[1], likeness(subset.dataset), tuple(values["lengths"]), parts))


def sharded(sampler: Any) -> None:
    """A sampler for several ranks is read."""
    if sampler in _sharding:
        return
    if sampler.shuffle and sampler.num_replicas > 1 and len(_shardings) < MOST and get_worker_info() is None:
        _sharding.add(sampler)
        _shardings.append((caller(sys._getframe())[1], len(sampler.dataset), sampler.num_replicas,
                           sampler.rank, sampler.seed + sampler.epoch))


def likeness(data: Any, depth: int = 3) -> int:
    """A digest that is the same for the same data, and differs where a look at some of it can tell."""
    kind = type(data).__qualname__
    if isinstance(data, torch.Tensor):
        return zlib.crc32(f"{kind} {tuple(data.shape)} {digests.of(data, digests.MOST_BYTES)}".encode())
    if isinstance(data, (list, tuple)) and depth:
        some = data[::max(1, -(-len(data) // LOOKED_AT))]
        return zlib.crc32(repr((kind, len(data), [likeness(each, depth - 1) for each in some])).encode())
    if isinstance(data, dict) and depth:
        some = sorted((str(key), likeness(each, depth - 1)) for key, each in list(data.items())[:LOOKED_AT])
        return zlib.crc32(repr((kind, len(data), some)).encode())
    if isinstance(data, Dataset) and depth:
        return zlib.crc32(repr((kind, likeness(vars(data), depth - 1))).encode())
    if isinstance(data, (str, bytes)):
        return zlib.crc32(repr((kind, len(data), data[:digests.MOST_BYTES])).encode())
    if isinstance(data, (int, float, bool, range, type(None))):
        return zlib.crc32(repr(data).encode())
    if hasattr(data, "tobytes") and hasattr(data, "flat"):
        return zlib.crc32(data.flat[:1024].tobytes())
    return zlib.crc32(kind.encode())


def notes(place_of: PlaceOf, reached: bool) -> dict[str, Any]:
    """What is known of loaders whose workers may repeat each other, of epochs, their orders, splits and samplers."""
    loaders = tuple(Loader(named(read.place, place_of), read.num_workers,
                           tuple(int(batch) for batch in read.batches if batch is not None and reached))
                    for read in _loaders if read.repeats)
    return {
        "loaders": loaders,
        "epochs": tuple(Epoch(named(read.place, place_of), *read.epoch) for read in _loaders if read.epoch),
        "repeated": tuple(dict.fromkeys(named(order.place, place_of) for order in _orders
                                        if len(set(order.epochs)) == 1 < len(order.epochs))),
        "splits": tuple(RandomSplit(named(place, place_of), of, lengths, parts)
                        for place, of, lengths, parts in _splits),
        "shardings": tuple(Sharding(named(place, place_of), *rest) for place, *rest in _shardings)}
