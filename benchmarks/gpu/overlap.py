"""How much of DDP's communication is hidden behind its backward pass: by the clock, and by the recorder."""
from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from benchmarks.gpu.ranks import by_turns, joined, ratios, silent, slowest, spread
from benchmarks.report import Findings, Table, duration, ratio
from book.record import follow_backward
from book.replay import Overlap, overlap

NOTE = ("Four ways by turns in the same processes, each the slowest rank's, on a GPU between CUDA events: DDP, whose "
        "buckets go while backward runs; the same pass with the same all-reduces after it; the pass alone; the "
        "all-reduces alone. Hidden: (pass alone + all-reduces alone − DDP) / all-reduces alone, of the same round. It "
        "can exceed its bounds: kernels that share a GPU slow each other down. Medians (smallest–largest).")
RECORDED_NOTE = ("Each row is a launch of its own, `follow_backward` around one backward pass after warm-up, read by "
                 "`book.replay.overlap`: the slowest rank.")


@dataclass(frozen=True)
class Size:
    """A model of square layers, and its batch: from 25 MB on, each layer's weight is a bucket of its own."""

    width: int = 4096
    num_layers: int = 16
    batch: int = 4096

    def told(self, dtype: torch.dtype) -> str:
        """In words."""
        return f"{self.num_layers} layers of {self.width} × {self.width}, {str(dtype)[6:]}, batch {self.batch}"


REHEARSAL = {"size": Size(512, 4, 64), "num_rounds": 3, "num_recordings": 2}


class Steps:
    """One model and batch on a rank, and the ways to take a step with them."""

    def __init__(self, size: Size, device: torch.device):
        torch.manual_seed(0)
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        layers = [nn.Linear(size.width, size.width, bias=False) for _ in range(size.num_layers)]
        whole = nn.Sequential(*layers).to(device, dtype)
        # With a cap below a layer's size each weight is sent by itself, so the other ways can send the same.
        cap_mb = size.width**2 * dtype.itemsize / 2**20 / 2
        self.model = DDP(whole, bucket_cap_mb=cap_mb, gradient_as_bucket_view=True)
        self.inputs = torch.randn(size.batch, size.width, device=device, dtype=dtype)
        self.spare = [torch.zeros_like(weight) for weight in whole.parameters()]

    def overlapped(self) -> None:
        """DDP's own step."""
        self.model.zero_grad()
        self.model(self.inputs).sum().backward()

    def computed(self) -> None:
        """The same pass, with nothing sent."""
        with self.model.no_sync():
            self.overlapped()

    def afterwards(self) -> None:
        """The same pass, then the same all-reduces."""
        self.computed()
        self._send([weight.grad for weight in self.model.parameters()])

    def communicated(self) -> None:
        """The all-reduces alone."""
        self._send(self.spare)

    def _send(self, tensors: list[torch.Tensor]) -> None:
        for tensor in tensors:
            tensor.mul_(1 / dist.get_world_size())
        for work in [dist.all_reduce(tensor, async_op=True) for tensor in reversed(tensors)]:
            work.wait()

    @property
    def ways(self) -> dict[str, Callable[[], None]]:
        """The ways by name."""
        return {"overlapped": self.overlapped, "after": self.afterwards, "pass": self.computed,
                "all-reduces": self.communicated}


def time_steps(size: Size, num_rounds: int) -> tuple[dict[str, list[float]], str]:
    """On one rank: seconds of each way in each round, and the model in words."""
    steps = Steps(size, joined())
    return by_turns(steps.ways, num_rounds, steps.inputs.device), size.told(steps.inputs.dtype)


def follow_step(size: Size) -> None:
    """On one rank: record a backward pass after others, once DDP has settled its buckets."""
    steps = Steps(size, joined())
    for _ in range(3):
        steps.overlapped()
    dist.barrier()
    loss = steps.model(steps.inputs).sum()
    with follow_backward(steps.model):
        loss.backward()


def measure(num_gpus: int, size: Size = Size(), num_rounds: int = 10, num_recordings: int = 3) -> Findings:
    """Take steps in four ways on all GPUs, then record some."""
    if num_gpus < 2:
        return Findings(left_out=["overlap: with one GPU DDP has nothing to send; it needs 2"])
    timed = silent(time_steps, num_gpus, size, num_rounds)
    seconds, told = slowest([rank for rank, _ in timed]), timed[0][1]
    rows = [("DDP", spread(seconds["overlapped"])), ("all-reduces after the pass", spread(seconds["after"])),
            ("the pass alone", spread(seconds["pass"])), ("the all-reduces alone", spread(seconds["all-reduces"])),
            ("after / DDP", ratio(ratios(seconds["after"], seconds["overlapped"]))),
            ("hidden share of the all-reduces", ratio(hidden_shares(seconds)))]
    title = f"DDP's overlap, {num_gpus} ranks on {timed.backend}: {told}"
    found = [overlap(silent(follow_step, num_gpus, size, record=True).trace) for _ in range(num_recordings)]
    return Findings([Table(title, ("what", "step"), rows, NOTE), _recorded_table(found)])


def hidden_shares(seconds: dict[str, list[float]]) -> list[float]:
    """In each round, the share of the all-reduces' time that DDP's step does not add to the pass."""
    turns = zip(seconds["pass"], seconds["all-reduces"], seconds["overlapped"])
    return [(computing + sending - both) / sending for computing, sending, both in turns]


def _recorded_table(found: list[Overlap]) -> Table:
    columns = ("recording", "backward", "all-reduces", "hidden", "exposed", "hidden share")
    rows = [(str(number), *map(duration, (one.backward_s, one.communication_s, one.hidden_s, one.exposed_s)),
             f"{one.hidden_s / one.communication_s:.2f}") for number, one in enumerate(found, 1)]
    median = statistics.median(one.hidden_s / one.communication_s for one in found)
    return Table("The same overlap by the recorder", columns, rows, f"{RECORDED_NOTE} Median share: {median:.2f}.")
