"""L2: weights on their way from a trainer to generators, which hold them cut in another way: reinforcement learning.

A trainer changes a model and generators draw samples from it, so after a step its weights travel. What each rank of a
generator needs is worked out once, as pieces of tensors. Pieces between the same two ranks go together, in buckets, and
each bucket says of which version it is.

Shapes: a bucket's message has 8 bytes for the version, then those of its pieces.
"""
from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

VERSION_BYTES = 8


class TornError(ValueError):
    """Weights of more than one version, which together are no model that was ever trained."""


@dataclass(frozen=True)
class WeightPiece:
    """`length` elements along `dim` of a tensor, from `src_start` on what rank `src` holds to `dst_start` on `dst`'s.

    A `dim` of None is all of a tensor that every rank has whole.
    """

    name: str
    dim: int | None
    length: int
    src: int
    src_start: int
    dst: int
    dst_start: int
    num_bytes: int

    def sent_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The view of it in the sender's tensor."""
        return tensor if self.dim is None else tensor.narrow(self.dim, self.src_start, self.length)

    def place_in(self, tensor: torch.Tensor) -> torch.Tensor:
        """The view of its place in the receiver's tensor."""
        return tensor if self.dim is None else tensor.narrow(self.dim, self.dst_start, self.length)


Bucket = tuple[WeightPiece, ...]


def spans(length: int, num_parts: int) -> list[tuple[int, int]]:
    """Where each part of a dimension starts and stops, as `shard` cuts it; raises ValueError if it is too short."""
    if length < num_parts:
        raise ValueError(f"a dimension of {length} can't be cut for {num_parts} ranks: each needs a part of it")
    parts = torch.arange(length).tensor_split(num_parts)
    return [(int(part[0]), int(part[-1]) + 1) for part in parts]


def agreed_cuts(module: nn.Module, src: int) -> dict[str, int | None]:
    """Along which dim rank `src` has cut each parameter of its module, told to all ranks of the world."""
    told = [{name: getattr(p, "shard_dim", None) for name, p in module.named_parameters()}]
    dist.broadcast_object_list(told, src)
    return told[0]


def pieces(whole: Mapping[str, torch.Tensor], cuts: Mapping[str, int | None], trainer: Sequence[int],
           generators: Iterable[Sequence[int]]) -> list[WeightPiece]:
    """What each rank of each generator needs of each tensor, and which of the trainer's ranks sends it.

    `whole` are the tensors of the model before it is cut (those on "meta" will do); `trainer` and each of `generators`
    are the ranks of one tp group, and all cut along `cuts`. What all ranks have whole comes from one after the other.
    """
    found = []
    for number, generator in enumerate(generators):
        for place, dst in enumerate(generator):
            for name, tensor in whole.items():
                dim = cuts[name]
                if dim is None:
                    src = trainer[(number + place) % len(trainer)]
                    found.append(WeightPiece(name, None, len(tensor), src, 0, dst, 0, tensor.nbytes))
                    continue
                first, last = spans(tensor.shape[dim], len(generator))[place]
                for src, (start, stop) in zip(trainer, spans(tensor.shape[dim], len(trainer))):
                    low, high = max(first, start), min(last, stop)
                    if low < high:
                        num_bytes = tensor.nbytes // tensor.shape[dim] * (high - low)
                        found.append(WeightPiece(name, dim, high - low, src, low - start, dst, low - first, num_bytes))
    return found


def buckets(pieces: Iterable[WeightPiece], max_bytes: int) -> list[Bucket]:
    """Pieces between the same two ranks, in their order, as many in a bucket as `max_bytes` allows, but at least one.

    First buckets come first, whoever sends them, so that all senders are at work.
    """
    found: dict[tuple[int, int], list[list[WeightPiece]]] = defaultdict(list)
    for piece in pieces:
        filled = found[piece.src, piece.dst]
        if not filled or sum(other.num_bytes for other in filled[-1]) + piece.num_bytes > max_bytes:
            filled.append([])
        filled[-1].append(piece)
    turns = max(map(len, found.values()), default=0)
    return [tuple(filled[turn]) for turn in range(turns) for filled in found.values() if turn < len(filled)]


def message_bytes(bucket: Bucket) -> int:
    """How long a bucket's message is."""
    return VERSION_BYTES + sum(piece.num_bytes for piece in bucket)


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor, in one dimension: a copy, unless it is contiguous."""
    return tensor.contiguous().flatten().view(torch.uint8)


class WeightSender:
    """What a rank of the trainer sends of its module: the buckets of the plan whose `src` it is.

    Messages are copies, so the next step may change the weights while these travel. They are kept until they are sent:
    as many bytes as this rank sends.
    """

    def __init__(self, module: nn.Module, plan: Iterable[Bucket]) -> None:
        self.weights = dict(module.named_parameters())
        self.buckets = [bucket for bucket in plan if bucket[0].src == dist.get_rank()]
        self.messages: list[tuple[dist.Work | None, torch.Tensor]] = []

    @torch.no_grad()
    def send(self, version: int) -> None:
        """Start to send this version, once the one before has been received."""
        self.wait()
        for bucket in self.buckets:
            parts = [piece.sent_of(self.weights[piece.name]) for piece in bucket]
            number = torch.tensor([version], device=parts[0].device)
            message = torch.cat([as_bytes(part) for part in (number, *parts)])
            self.messages.append((dist.isend(message, bucket[0].dst), message))

    def wait(self) -> None:
        """Wait until all that was sent is received."""
        for request, _ in self.messages:
            if request is not None:
                request.wait()
        self.messages.clear()


class WeightReceiver:
    """What a rank of a generator does with the buckets of the plan whose `dst` it is.

    With `double` they are written beside the weights that the module answers with, and both change places when all
    pieces are of one version: twice the weights are held. Without it each bucket overwrites what the module answers
    with, so it must not answer until the last one is there. No version may come twice.
    """

    def __init__(self, module: nn.Module, plan: Iterable[Bucket], double: bool = True) -> None:
        self.weights = dict(module.named_parameters())
        self.buckets = [bucket for bucket in plan if bucket[0].dst == dist.get_rank()]
        self.double = double
        self.back = {name: torch.empty_like(p) if double else p.detach() for name, p in self.weights.items()}
        self.versions: dict[WeightPiece, int | None] = {piece: None for bucket in self.buckets for piece in bucket}
        self.arrived = dict(self.versions) if double else self.versions

    @property
    def version(self) -> int | None:
        """The version of what the module answers with, None before the first; raises TornError if there are two."""
        found = set(self.versions.values())
        if len(found) > 1:
            raise TornError(f"these weights are of the versions {', '.join(map(str, sorted(found, key=str)))}: wait "
                            "until the last bucket is there before you use them, or receive with double=True")
        return found.pop()

    def of_tensors(self) -> dict[str, set[int | None]]:
        """Of which version each tensor is, of which versions where its pieces differ."""
        found: dict[str, set[int | None]] = defaultdict(set)
        for piece, version in self.versions.items():
            found[piece.name].add(version)
        return dict(found)

    def receive(self) -> None:
        """Take all buckets of the next version."""
        for bucket in self.buckets:
            self.take(bucket)

    @torch.no_grad()
    def take(self, bucket: Bucket) -> None:
        """Receive one bucket, and swap if that makes a version whole."""
        device = self.back[bucket[0].name].device
        message = torch.empty(message_bytes(bucket), dtype=torch.uint8, device=device)
        dist.recv(message, bucket[0].src)
        number, *parts = message.split([VERSION_BYTES, *(piece.num_bytes for piece in bucket)])
        for piece, part in zip(bucket, parts):
            place = piece.place_in(self.back[piece.name])
            place.copy_(part.clone().view(place.dtype).view(place.shape))  # a copy begins where its dtype may begin
            self.arrived[piece] = int(number.view(torch.int64))
        if self.double and len(set(self.arrived.values())) == 1:
            self._swap()

    def _swap(self) -> None:
        for name, weight in self.weights.items():
            weight.data, self.back[name] = self.back[name], weight.data
        self.versions, self.arrived = self.arrived, dict.fromkeys(self.arrived)
