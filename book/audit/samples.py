"""L2: ranks that train on the same samples, split data differently or draw the same masks; idle optimizers."""
from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from book.audit.drift import Copies, copies_of
from book.audit.notes import Loader, Notes, noted
from book.words import agree, alike, joined, named, plural

Ranks = Sequence[Notes | None]


def same_batches(ranks: Ranks) -> Iterator[str]:
    """Ranks that have trained one model on the same batches of a loader, and whose batches do differ in time."""
    for copies in copies_of(ranks):
        for same in _alike(_fed(copies)):
            line = copies[same[0]].fed[0][2]
            yield (f"{named(same)} train on the same samples, from the loader of {line}: give each rank its own, with "
                   "sampler=DistributedSampler(dataset), or in an IterableDataset by `rank` and `world_size`")


def whole_epochs(ranks: Ranks) -> Iterator[str]:
    """Ranks that train one model, each on all samples of the same data, in an order of its own."""
    for copies in copies_of(ranks):
        fed = {rank: copy.fed for rank, copy in copies.items() if copy.fed and copy.fed[0][2]}
        orders = {indices for each in fed.values() for _, indices, _ in each[:1]}
        epochs = [{each for each in notes.epochs if each.place == fed[rank][0][2]} if notes is not None else set()
                  for rank, notes in enumerate(ranks) if rank in fed]
        same = set.intersection(*epochs) if epochs else set()
        if len(fed) == len(copies) == len(orders) and None not in orders and same:
            epoch = next(iter(same))
            yield (f"each of {named(sorted(fed))} trains on all {epoch.size} samples, in an order of its own, from the "
                   f"loader of {epoch.place}: to give each its share, pass sampler=DistributedSampler(dataset)")


def _fed(copies: Copies) -> dict[int, tuple[tuple[int, int | None], ...]]:
    """For each rank what its first forwards were fed, if all of it came from a loader and it did not stay the same."""
    num = min(len(copy.fed) for copy in copies.values())
    fed = {rank: copy.fed[:num] for rank, copy in copies.items() if all(line for _, _, line in copy.fed[:num])}
    return {rank: tuple((batch, indices) for batch, indices, _ in each) for rank, each in fed.items()
            if len({batch for batch, _, _ in each}) > 1}


def _alike(by_rank: Mapping[int, tuple[Any, ...]]) -> list[list[int]]:
    """The ranks with equal values, where there are several."""
    return [same for same in alike(sorted(by_rank.items())).values() if len(same) > 1]


def same_workers(ranks: Ranks) -> Iterator[str]:
    """Workers of a loader that hand out the same batches, one after the other."""
    repeating = {(rank, (each.place, each.num_workers)) for rank, each in noted(ranks, "loaders") if _repeats(each)}
    for (place, num), where in alike(sorted(repeating)).items():
        yield (f"the {num} workers of the loader of {place} hand out the same batches on {named(where)}: in the "
               "dataset's __iter__, take a share by get_worker_info().id and .num_workers")


def _repeats(loader: Loader) -> bool:
    rounds = [loader.batches[at:at + loader.num_workers]
              for at in range(0, len(loader.batches) - loader.num_workers + 1, loader.num_workers)]
    return len({each[0] for each in rounds}) > 1 and all(len(set(each)) == 1 for each in rounds)


def other_splits(ranks: Ranks) -> Iterator[str]:
    """Random splits of the same data into the same lengths that differ between ranks."""
    known = {rank: notes.splits for rank, notes in enumerate(ranks) if notes is not None}
    for number in range(min(map(len, known.values()), default=0)):
        splits = {rank: each[number] for rank, each in known.items()}
        first = next(iter(splits.values()))
        if len({(each.place, each.of, each.lengths) for each in splits.values()}) == 1 < len(
                {each.parts for each in splits.values()}):
            yield (f"the ranks split the same data differently in {first.place}: what one holds back, another trains "
                   "on; pass generator=torch.Generator().manual_seed(0), the same on all ranks")


def other_shards(ranks: Ranks) -> Iterator[str]:
    """Samplers that cut their shards of the same data from different orders, or cut the same one."""
    known = {rank: notes.shardings for rank, notes in enumerate(ranks) if notes is not None}
    for number in range(min(map(len, known.values()), default=0)):
        shards = {rank: each[number] for rank, each in known.items()}
        first = next(iter(shards.values()))
        by_seed = alike((rank, each.seed) for rank, each in shards.items())
        if len({(each.place, each.of, each.num_replicas) for each in shards.values()}) == 1 < len(by_seed):
            seeds = joined(f"{seed} on {named(where)}" for seed, where in by_seed.items())
            yield (f"the sampler of {first.place} shuffles with seed + epoch = {seeds}, so the ranks' shards overlap: "
                   "give it the same seed, and set_epoch() the same number, on all ranks")


def same_orders(ranks: Ranks) -> Iterator[str]:
    """Samplers that shuffle, and give a second epoch of training the order of the first."""
    for place, where in alike(noted(ranks, "repeated")).items():
        yield (f"{named(where)} {agree('trains', where)} on samples in the same order in every epoch, from the loader "
               f"of {place}: call set_epoch(epoch) on its DistributedSampler before each epoch")


def same_masks(ranks: Ranks) -> Iterator[str]:
    """Ranks whose random numbers are the same whenever a model with dropout makes a forward."""
    for copies in copies_of(ranks):
        num = min(len(copy.masks) for copy in copies.values())
        for same in _alike({rank: copy.masks[:num] for rank, copy in copies.items()} if num > 1 else {}):
            yield (f"dropout zeroes the same elements on {named(same)}, in {copies[same[0]].name}: their random "
                   "numbers are the same; seed each rank with a number of its own, as torch.manual_seed(1 + rank) "
                   "does, after the model and all data that ranks share are made")


def idle_optimizers(ranks: Ranks) -> Iterator[str]:
    """Optimizers that hold parameters which no model has."""
    for (place, count, total), where in alike(noted(ranks, "orphans")).items():
        which = f"{count} of its {total}" if count < total else f"its {total}"
        yield (f"the optimizer of {place} steps in vain on {named(where)}: {which} {plural('parameter', total)} "
               f"{agree('is', count)} in no model any more; make it after what replaces them, such as fully_shard or a "
               "new head")
