"""L2: pipeline parallelism as chapter 06 builds it: a GPT cut into stages, and any schedule run over messages.

A rank has only the stages that the schedule assigns to it. `run_pipeline` goes through its actions one by one, `Stage`
computes, `Mail` sends and receives. Torch's own is torch.distributed.pipelining.

Shapes: b sequences in a micro-batch, T tokens, D width, V vocabulary.
"""
from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from book.parallel.model import GPT
from book.parallel.split_backward import SplitBackward
from book.parallel.stage import GPTStage
from book.record import stage_action
from book.schedule import PipelineSchedule, Work


class Stage:
    """A stage on its rank: the module, and what the backward of each micro-batch in flight needs.

    The last stage ends in `loss_fn(output, target)`, divided by the number of micro-batches: gradients add up, so the
    sum of the micro-batches' means would be that many times too large. Actions are recorded.
    """

    def __init__(self, module: nn.Module, number: int, num_stages: int, num_micro_batches: int,
                 loss_fn: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
        self.module, self.number, self.loss_fn = module, number, loss_fn
        self.is_first, self.is_last = number == 0, number == num_stages - 1
        self.num_micro_batches = num_micro_batches
        self.kept = {}

    def forward(self, m: int, x: torch.Tensor, target: torch.Tensor | None = None) -> torch.Tensor:
        """F: the output of micro-batch `m`; on the last stage, its share of the loss."""
        with stage_action("F", self.number, m):
            x = x.detach().requires_grad_(x.is_floating_point())  # token numbers have no gradient
            y = self.module(x)
            if self.is_last:
                y = self.loss_fn(y, target) / self.num_micro_batches
            self.kept[m] = x, y
        return y.detach()

    def backward(self, m: int, gradient: torch.Tensor | None = None) -> torch.Tensor | None:
        """B: takes the gradient of the output (None for the loss), adds the weights' gradients, returns the input's."""
        with stage_action("B", self.number, m):
            x, y = self.kept.pop(m)
            y.backward(gradient)
        return x.grad


class SplitStage(Stage):
    """A stage whose backward can also be run in two halves, I and W."""

    def backward_input(self, m: int, gradient: torch.Tensor | None = None) -> torch.Tensor | None:
        """I: like `backward`, but leaves the weights' gradients, and what they need, for W."""
        with stage_action("I", self.number, m):
            self.kept[m] = split = SplitBackward(*self.kept[m], gradient)
        return split.input_gradient

    def backward_weights(self, m: int) -> None:
        """W: adds the gradients that I left out to those of the weights."""
        with stage_action("W", self.number, m):
            self.kept.pop(m).backward_weights()


def stages_here(schedule: PipelineSchedule, gpt: GPT, place: int | None = None) -> dict[int, SplitStage]:
    """The stages of a GPT that `schedule` assigns to this rank, by number; their weights are copies of the model's.

    Each rank holds its own stages and, once it has dropped `gpt`, nothing else of the model. `place` is the rank in the
    schedule, if it differs from the rank in the world. Raises ValueError for more stages than blocks.
    """
    place = dist.get_rank() if place is None else place
    num_stages = schedule.num_stages
    return {number: SplitStage(GPTStage(copy.deepcopy(gpt), number, num_stages), number, num_stages,
                               schedule.num_micro_batches, GPT.loss)
            for number in range(num_stages) if schedule.rank_of(number) == place}


def run_pipeline(schedule: PipelineSchedule, stages: dict[int, SplitStage], mail: Mail,
                 inputs: Sequence[torch.Tensor] | None = None, targets: Sequence[torch.Tensor] | None = None
                 ) -> torch.Tensor | None:
    """Run this rank's actions of any schedule, in order; gradients are added to the parameters' `.grad`.

    `inputs` (one for each micro-batch) are needed on the rank of stage 0, `targets` on that of the last stage. Returns
    the mean loss of the batch on the rank of the last stage, None elsewhere. Micro-batches must have equal sizes.
    Raises ValueError if there are too few or too many micro-batches.
    """
    check_batch(schedule, stages, inputs, targets)
    losses = []
    for action in schedule.of_rank(mail.place):
        stage, m = stages[action.stage], action.micro_batch
        if action.kind == "F":
            x = inputs[m] if stage.is_first else mail.take((stage.number - 1, m, "output"))
            y = stage.forward(m, x, targets[m] if stage.is_last else None)
            if stage.is_last:
                losses.append(y)
            else:
                mail.post((stage.number, m, "output"), y)
        elif action.kind in "BI":
            gradient = None if stage.is_last else mail.take((stage.number + 1, m, "gradient"))
            backward = stage.backward if action.kind == "B" else stage.backward_input
            gradient = backward(m, gradient)
            if not stage.is_first:
                mail.post((stage.number, m, "gradient"), gradient)
        else:
            stage.backward_weights(m)
    mail.close()
    return sum(losses) if losses else None


def run_one_f_one_b(stage: Stage, like: torch.Tensor, forth: dist.ProcessGroup, back: dist.ProcessGroup,
                    inputs: Sequence[torch.Tensor] | None = None, targets: Sequence[torch.Tensor] | None = None
                    ) -> torch.Tensor | None:
    """1F1B written out, with one stage on every rank of the world: what `run_pipeline` does with that schedule.

    `forth` and `back` are two groups of all ranks, for outputs and for gradients. A rank keeps only the last tensor
    that it has sent in each direction.
    """
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    losses, sent = [], {}

    def send(tensor: torch.Tensor, peer: int, group: dist.ProcessGroup) -> None:
        if peer in sent:
            sent[peer].wait()  # the peer receives in order, so this ends
        sent[peer] = dist.isend(tensor, peer, group=group)

    def receive(peer: int, group: dist.ProcessGroup) -> torch.Tensor:
        tensor = torch.empty_like(like)
        dist.recv(tensor, peer, group=group)
        return tensor

    def forward(m: int) -> None:
        x = inputs[m] if rank == 0 else receive(rank - 1, forth)
        y = stage.forward(m, x, targets[m] if rank == last else None)
        if rank == last:
            losses.append(y)
        else:
            send(y, rank + 1, forth)

    def backward(m: int) -> None:
        gradient = None if rank == last else receive(rank + 1, back)
        gradient = stage.backward(m, gradient)
        if rank > 0:
            send(gradient, rank - 1, back)

    num_ahead = min(last - rank, stage.num_micro_batches)
    for m in range(num_ahead):
        forward(m)
    for m in range(stage.num_micro_batches):
        if m + num_ahead < stage.num_micro_batches:
            forward(m + num_ahead)
        backward(m)
    for request in sent.values():
        request.wait()
    return sum(losses) if losses else None


def check_batch(schedule: PipelineSchedule, stages: dict[int, Stage], inputs: Sequence[torch.Tensor] | None,
                targets: Sequence[torch.Tensor] | None) -> None:
    """Raise ValueError unless there are as many inputs and targets as micro-batches, if a stage here needs them."""
    for number, what, given in ((0, "inputs", inputs), (schedule.num_stages - 1, "targets", targets)):
        num_given = 0 if given is None else len(given)
        if number in stages and num_given != schedule.num_micro_batches:
            raise ValueError(f"stage {number} needs {what} for {schedule.num_micro_batches} micro-batches, but got "
                             f"{num_given}: give a sequence with one tensor for each")


@dataclass(frozen=True)
class _Letter:
    """A result that `src` makes and `dst` takes, with the positions of both actions in the ranks' orders."""

    work: Work
    src: int
    made: int
    dst: int
    taken: int


class Mail:
    """Outputs and gradients in transit between this rank and others; those that stay on the rank are handed over here.

    `like` is a tensor with the shape and dtype of all messages. Sends don't block. Messages from one rank to another
    arrive in the order in which they were made: a rank that needs the third one receives the first two as well and
    keeps them.

    Messages to higher ranks use one process group, those to lower ranks another: in a lazily initialized group NCCL
    runs all messages between two ranks in one queue, and two ranks that both start by sending would wait for each other
    to receive. A group made with `device_id` has one queue for all its ranks, and NCCL requires the same order of work
    in all groups on all ranks: use one common order or `dist.batch_isend_irecv` there. This has been run on gloo only.
    """

    def __init__(self, schedule: PipelineSchedule, like: torch.Tensor, ranks: Sequence[int] | None = None) -> None:
        """`ranks` are the ranks of this pipeline, in its order, if there are several. Raises what `check()` raises."""
        self.ranks = list(range(schedule.world_size)) if ranks is None else list(ranks)
        self.like, self.place = like, self.ranks.index(dist.get_rank())
        self.letters = {letter.work: letter for letter in _letters(schedule.check())
                        if self.place in (letter.src, letter.dst)}
        self.groups = [dist.new_group(ranks, use_local_synchronization=ranks is not None) for _ in ("down", "up")]
        self.here, self.sent, self.due = {}, [], self._due()

    def post(self, work: Work, tensor: torch.Tensor) -> None:
        """Send a result to the rank that takes it, or keep it if that is this rank."""
        if work not in self.letters:
            self.here[work] = tensor
            return
        if (tensor.shape, tensor.dtype) != (self.like.shape, self.like.dtype):
            raise ValueError(f"stage {work[0]} gives {tensor.dtype} of the shape {tuple(tensor.shape)}, and the others "
                             f"wait for {self.like.dtype} of the shape {tuple(self.like.shape)}: make `like` as what "
                             "travels, and all micro-batches equally large")
        letter = self.letters[work]
        request = dist.isend(tensor.contiguous(), self.ranks[letter.dst], group=self._group(letter))
        self.sent.append((letter, request))  # gloo cancels a send whose request is dropped

    def take(self, work: Work) -> torch.Tensor:
        """A result of this rank or another; waits until it has arrived."""
        while work not in self.here:
            letter = next(self.due[self.letters[work].src])
            tensor = torch.empty_like(self.like)
            dist.recv(tensor, self.ranks[letter.src], group=self._group(letter))
            self.here[letter.work] = tensor
            self._forget(letter.src, letter.made)
        return self.here.pop(work)

    def close(self) -> None:
        """Wait until everything is sent, and reset for the next step."""
        for _, request in self.sent:
            request.wait()
        self.here, self.sent, self.due = {}, [], self._due()

    def _group(self, letter: _Letter) -> dist.ProcessGroup:
        return self.groups[letter.src < letter.dst]

    def _due(self) -> dict[int, Iterator[_Letter]]:
        """The messages that each rank sends here, in its order."""
        return {src: iter([letter for letter in self.letters.values() if letter.src == src])
                for src in range(len(self.ranks))}

    def _forget(self, peer: int, made: int) -> None:
        """Release sends that `peer` received before it made the result that just arrived; no backend reports that."""
        taken = [letter.dst == peer and letter.taken < made for letter, _ in self.sent]
        for (_, request), is_taken in zip(self.sent, taken):
            if is_taken:
                request.wait()
        self.sent = [pair for pair, is_taken in zip(self.sent, taken) if not is_taken]


def _letters(schedule: PipelineSchedule) -> Iterator[_Letter]:
    """Every result that goes from one rank to another, in the order in which they are made on each rank."""
    orders = [schedule.of_rank(rank) for rank in range(schedule.world_size)]
    takers = {work: (rank, place) for rank, order in enumerate(orders) for place, action in enumerate(order)
              for work, _ in action.needs(schedule.num_stages) if work[0] != action.stage}
    for src, order in enumerate(orders):
        for made, action in enumerate(order):
            for work in action.gives():
                dst, taken = takers.get(work, (src, made))
                if dst != src:
                    yield _Letter(work, src, made, dst, taken)
