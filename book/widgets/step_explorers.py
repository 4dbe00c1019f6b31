"""L3: explorers of a training step: a pipeline, buckets behind a backward, sharded state, the load of experts."""
from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from book import pipelines
from book.cost import ADAM_MIXED, Link, state_bytes
from book.replay import bubble
from book.schedule import PipelineSchedule
from book.simulate import simulate_pipeline
from book.simulate.streams import bucketed_backward, gathered_bytes, sharded_step, stream_times
from book.widgets.explorer import Dial, Explorer, decades
from book.widgets.page import heading, table
from book.widgets.show import show
from book.widgets.terms import percent
from book.words import counted, in_bytes, in_seconds

if TYPE_CHECKING:
    from book.widgets.live import Live

SCHEDULES = {"GPipe": "gpipe", "1F1B": "one_f_one_b", "interleaved": "interleaved", "ZB-V": "zero_bubble"}
RATIOS = (0.5, 0.75, 1, 1.5, 2, 2.5, 3, 4)
LINK_SHARES = (0, 0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1, 1.5, 2)
MOST_RANKS, MOST_BATCHES, MOST_PER_RANK = 16, 32, 4


def pipeline_explorer(num_ranks: int = 4, num_micro_batches: int = 8, schedule: str = "1F1B", *,
                      title: str = "How long is a pipeline's step, and what does it hold?") -> PipelineExplorer | Live:
    """A pipeline whose ranks, micro-batches, schedule, lengths of backwards and messages the reader chooses.

    The arguments are what it opens with; a backward takes two forwards, and messages no time. `schedule` is "GPipe",
    "1F1B", "interleaved" or "ZB-V". Raises ValueError unless there are 2 to 16 ranks and 1 to 32 micro-batches.
    """
    return show(PipelineExplorer(num_ranks, num_micro_batches, schedule, title))


class PipelineExplorer(Explorer):
    """What the explorer starts from; raises ValueError for what a reader can't choose."""

    widget = "pipeline_explorer"

    def __init__(self, num_ranks: int, num_micro_batches: int, schedule: str, title: str):
        dials = (
            Dial("schedule", "schedule", tuple(SCHEDULES), schedule, "word"),
            Dial("ranks", "ranks", tuple(range(2, MOST_RANKS + 1)), num_ranks),
            Dial("batches", "micro-batches", tuple(range(1, MOST_BATCHES + 1)), num_micro_batches),
            Dial("per_rank", "stages on a rank", tuple(range(1, MOST_PER_RANK + 1)), 1),
            Dial("ratio", "backward / forward", RATIOS, 2),
            Dial("link", "message / forward", LINK_SHARES, 0))
        super().__init__(title, dials)
        self.num_ranks, self.num_micro_batches, self.schedule = num_ranks, num_micro_batches, schedule

    def data(self, live: bool) -> dict[str, Any]:
        """The dials, and the schedules by the names of their functions."""
        return {**super().data(live), "schedules": SCHEDULES}

    def text(self) -> str:
        """One line that says what is shown."""
        return f"{self.title} {', '.join(SCHEDULES)} on {self._size()}"

    def words(self) -> str:
        """Step, bubble and most in flight of each schedule that these counts allow."""
        rows = [(name, *figures) for name, make in SCHEDULES.items()
                if (figures := self._figures(getattr(pipelines, make)))]
        head = ("schedule", "step, in forwards of one rank", "bubble", "most in flight, in a rank's activations")
        return heading(self.title, f"simulated, {self._size()}") + table(rows, head)

    def _figures(self, make: Callable[..., PipelineSchedule]) -> tuple[str, str, str] | None:
        per_rank = 2 if make in (pipelines.interleaved, pipelines.zero_bubble) else 1
        if make is pipelines.interleaved and self.num_micro_batches % self.num_ranks:
            return None
        order = make(self.num_ranks * per_rank, self.num_micro_batches)
        trace = simulate_pipeline(order, 1 / per_rank, 2 / per_rank, link=Link(0.0, 1.0))
        found, most = bubble(trace), max(order.peak_in_flight())
        return f"{found.step_s:.4g}", percent(found.share), f"{most / per_rank:g}"

    def _size(self) -> str:
        sizes = f"{counted(self.num_ranks, 'rank')}, {counted(self.num_micro_batches, 'micro-batch')}"
        return f"{sizes}, a backward takes two forwards"


# buckets
CAPS = tuple(2.0**power for power in range(14, 22))


def bucket_explorer(gradient_bytes: Sequence[float]) -> BucketExplorer | Live:
    """A backward pass whose gradients, in this order, leave in buckets of a size that the reader chooses.

    It opens with buckets of 256 KiB on two ranks, and links of 100 us and 1 GB/s; a byte takes 2 ns in backward.
    """
    return show(BucketExplorer(gradient_bytes, 2.0**18, 2, Link(100e-6, 1e9), 2e-9))


class BucketExplorer(Explorer):
    """What the buckets start from; raises ValueError for what a reader can't choose."""

    widget = "bucket_explorer"

    def __init__(self, gradient_bytes: Sequence[float], cap_bytes: float, num_ranks: int, link: Link,
                 backward_s_per_byte: float):
        super().__init__("How large should buckets be?", (
            Dial("cap", "bucket", CAPS, cap_bytes, "KiB"), Dial("ranks", "ranks", tuple(range(2, 65)), num_ranks),
            Dial("bandwidth_bytes_per_s", "bandwidth", decades(7, 12), link.bandwidth_bytes_per_s, "B/s"),
            Dial("latency_s", "latency", decades(-7, -2), link.latency_s, "s")))
        self.gradients, self.s_per_byte = [float(size) for size in gradient_bytes], backward_s_per_byte
        self.num_ranks, self.link = num_ranks, link

    def data(self, live: bool) -> dict[str, Any]:
        """The dials, the gradients' bytes, and what a byte takes in backward."""
        return {**super().data(live), "gradients": self.gradients, "s_per_byte": self.s_per_byte}

    def step_s(self, cap_bytes: float) -> float:
        """Seconds from the start of backward to the end of the last all-reduce."""
        return max(end_s for _, end_s in stream_times(self._tasks(cap_bytes)))

    def text(self) -> str:
        """One line that says what is shown."""
        return f"{self.title} {counted(len(self.gradients), 'gradient')} on {counted(self.num_ranks, 'rank')}"

    def words(self) -> str:
        """All-reduces and the step's time of each size."""
        rows = [(f"{cap / 1024:g} KiB", str(len(self._tasks(cap)) - len(self.gradients)), in_seconds(self.step_s(cap)))
                for cap in CAPS]
        return heading(self.title, "simulated") + table(rows, ("bucket", "all-reduces", "the step"))

    def _tasks(self, cap_bytes: float) -> list[Any]:
        return list(bucketed_backward(self.gradients, cap_bytes, self.num_ranks, self.s_per_byte, self.link))


# sharded state
NUM_UNITS = 8  # as many as fit into a picture's width


def sharding_explorer(num_parameters: float = 1.6e9, num_ranks: int = 8, link: Link | None = None, *,
                      num_tokens: int = 4096, flops_per_s: float = 150e12) -> ShardingExplorer | Live:
    """Time and memory of a step of a model in eight equal units: the reader chooses stage, ranks, links, prefetching.

    The arguments are what it opens with, `link` by default 10 us and 25 GB/s, mixed precision with Adam. A forward
    takes 2 operations for each parameter and token of a rank. Raises ValueError for what can't be chosen.
    """
    forward_s = 2 * num_parameters / NUM_UNITS * num_tokens / flops_per_s
    return show(ShardingExplorer(num_parameters, num_ranks, link or Link(10e-6, 25e9), forward_s))


class ShardingExplorer(Explorer):
    """What the step starts from; raises ValueError for what a reader can't choose."""

    widget = "sharding_explorer"

    def __init__(self, num_parameters: float, num_ranks: int, link: Link, forward_s: float):
        super().__init__("What does sharding cost, and what does it save?", (
            Dial("stage", "ZeRO stage", (0, 1, 2, 3), 3, "word"),
            Dial("prefetch", "prefetch", ("on", "off"), "on", "word"),
            Dial("ranks", "ranks", tuple(range(2, 65)), num_ranks),
            Dial("bandwidth_bytes_per_s", "bandwidth", decades(7, 12), link.bandwidth_bytes_per_s, "B/s"),
            Dial("latency_s", "latency", decades(-7, -2), link.latency_s, "s")))
        self.num_parameters, self.num_ranks, self.link, self.forward_s = num_parameters, num_ranks, link, forward_s

    def data(self, live: bool) -> dict[str, Any]:
        """The dials, the parameters of a unit and bytes of each, how many units there are, what a forward takes."""
        return {**super().data(live), "unit": self.num_parameters / NUM_UNITS, "num_units": NUM_UNITS,
                "forward_s": self.forward_s, "each": ADAM_MIXED.parts}

    def step(self, zero_stage: int, prefetch: bool = True) -> tuple[float, float, float]:
        """Seconds of a step, bytes that a rank keeps, and the most that it holds for a while beside them."""
        unit_bytes = ADAM_MIXED.parameters * self.num_parameters / NUM_UNITS
        tasks = sharded_step(zero_stage, self.num_ranks, NUM_UNITS, unit_bytes, self.forward_s, self.link, prefetch)
        times = stream_times(tasks)
        kept = state_bytes(self.num_parameters, zero_stage, self.num_ranks, ADAM_MIXED).total
        return (max(end_s for _, end_s in times), kept,
                gathered_bytes(tasks, times, zero_stage, self.num_ranks, unit_bytes))

    def text(self) -> str:
        """One line that says what is shown."""
        billions = f"{self.num_parameters / 1e9:g} billion parameters"
        return f"{self.title} {billions} on {counted(self.num_ranks, 'rank')}"

    def words(self) -> str:
        """Time and bytes of each stage."""
        rows = []
        for stage in range(4):
            step_s, kept, extra = self.step(stage)
            rows.append((str(stage), in_seconds(step_s), in_bytes(kept), in_bytes(extra)))
        head = ("ZeRO stage", "a step", "kept by each rank", "more for a while")
        return heading(self.title, "simulated") + table(rows, head)


# the load of experts
FACTORS = ("as needed", "1", "1.25", "1.5", "2")


def load_explorer(num_experts: int = 8, skew: float = 3, *,
                  title: str = "How long does the busiest expert work?") -> LoadExplorer | Live:
    """What experts get if some are more popular, how long the busiest works, and what is dropped; the reader chooses.

    The arguments are what it opens with: `skew` says how many times as often the most popular expert is a first choice
    as the least popular one. Raises ValueError for values that are not on the dials.
    """
    return show(LoadExplorer(num_experts, skew, title))


def expert_loads(num_experts: int, top_k: int, skew: float) -> list[float]:
    """What each expert gets, in equal shares, the most popular one first: for 1 or 2 choices of each token.

    First choices fall by the same factor from each expert to the next; a second one falls on the others in the same
    proportions.
    """
    weights = [skew ** (-expert / (num_experts - 1)) for expert in range(num_experts)]
    first = [weight / sum(weights) for weight in weights]
    if top_k == 1:
        return [num_experts * share for share in first]
    odds = sum(share / (1 - share) for share in first)
    return [num_experts / 2 * share * (1 + odds - share / (1 - share)) for share in first]


class LoadExplorer(Explorer):
    """What the explorer starts from; raises ValueError for what a reader can't choose."""

    widget = "load_explorer"

    def __init__(self, num_experts: int, skew: float, title: str):
        super().__init__(title, (
            Dial("skew", "most over least", (1, 1.25, 1.5, 2, 3, 5, 10, 20, 50), skew, "times"),
            Dial("experts", "experts", (4, 8, 16), num_experts), Dial("top_k", "choices of a token", (1, 2), 2),
            Dial("factor", "places", FACTORS, FACTORS[0], "word")))
        self.num_experts, self.skew = num_experts, skew

    def text(self) -> str:
        """One line that says what is shown."""
        return f"{self.title} {counted(self.num_experts, 'expert')}, the most popular {self.skew:g} times the least"

    def words(self) -> str:
        """The busiest expert and what is dropped, by the number of places."""
        loads = expert_loads(self.num_experts, 2, self.skew)
        rows = []
        for factor in FACTORS:
            places = max(loads) if factor == FACTORS[0] else float(factor)
            dropped = sum(max(load - places, 0) for load in loads) / len(loads)
            rows.append((factor, f"{min(max(loads), places):.2f}", percent(dropped)))
        return heading(self.title, "by formula") + table(rows, ("places", "busiest, in equal shares", "dropped"))
