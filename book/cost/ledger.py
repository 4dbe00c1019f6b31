"""L1: the ledger: what a GPU holds, sends and waits for in a training step, and what limits, for each way of training.

The book's story has three models of one family and one with experts, on H100s in nodes of eight, and the same batch
throughout. A chapter opens with the way that no longer works and closes with its own. In chapter 15 the GPUs are in
halls that a slow line joins.
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil
from typing import Any

import numpy as np

from book.columns import Columns
from book.cost.cluster import Cluster
from book.cost.layouts import Layout
from book.cost.machines import SOFTWARE, cluster_of
from book.cost.models import model_named
from book.cost.state import ADAM_MIXED, StateBytes
from book.cost.step import Estimate, estimate
from book.cost.terms import Terms
from book.cost.traffic import pipeline_sends
from book.cost.transformer import Transformer

MODELS_OF_THE_STORY = ("llama3.2-1b", "llama3-8b", "llama3-70b", "mixtral-8x7b")
GPU, SEQUENCES = "h100", 512  # of NUM_TOKENS each: four million tokens a step
NUM_TOKENS, LONG = 8192, 131072  # of a sequence; LONG in the chapter on long sequences
AXES = ("tp", "cp", "ep", "pp", "dp")
LARGE_SHARE = 0.1  # of a step, from which on communication or waiting for other stages is what limits
OUTER_BYTES = 8  # DiLoCo's state of a parameter: what was agreed on last, and the outer momentum, in 32 bits


@dataclass(frozen=True)
class Apart:
    """Halls that a slow line joins: each trains in a layout of its own, on its share of a step's sequences.

    With `every` 1 the halls add up gradients, in 16 bits. Otherwise they agree on weights every so many steps (DiLoCo),
    in 32 bits, and wait for it; with several `parts` they train on while one part after another is on its way.
    `bytes_per_s` is what a hall sends over its line, each way.
    """

    halls: int = 2
    every: int = 1
    parts: int = 1
    bytes_per_s: float = 1e9

    def line_bytes(self, num_parameters: float) -> float:
        """What a hall sends over the line in a step, of a ring of the halls; in the mean, if not in every step."""
        return 2 * (self.halls - 1) / self.halls * num_parameters * (4 / self.every if self.every > 1 else 2)


@dataclass(frozen=True)
class Way:
    """A way to train a model: the chapter that it belongs to, its name there, its layout, and the tokens of a sequence.

    With `apart` the layout is that of one hall. `opens` is whether the chapter opens with it: the way that no longer
    works. A step has as many tokens in all ways.
    """

    chapter: int
    name: str
    model: str
    layout: Layout
    opens: bool = False
    num_tokens: int = NUM_TOKENS
    apart: Apart | None = None

    @property
    def line(self) -> Entry:
        """Its line."""
        model = replace(model_named(self.model), num_tokens=self.num_tokens)
        sequences = SEQUENCES * NUM_TOKENS // self.num_tokens
        if not self.apart:
            return entry(model, self.layout, sequences)
        return joined(entry(model, self.layout, sequences // self.apart.halls), model, self.layout, self.apart)


STORY = (
    Way(1, "one GPU", "llama3.2-1b", Layout(1, 1, 1)),
    Way(2, "DDP on 16 GPUs", "llama3.2-1b", Layout(1, 16, 1)),
    Way(3, "DDP on 128 GPUs", "llama3.2-1b", Layout(1, 128, 1)),
    Way(4, "DDP on 16 GPUs", "llama3-8b", Layout(1, 16, 1), opens=True),
    Way(4, "ZeRO-3 on 16 GPUs", "llama3-8b", Layout(1, 16, 1, zero_stage=3)),
    Way(5, "ZeRO-3 on 64 GPUs", "llama3-70b", Layout(1, 64, 1, zero_stage=3), opens=True),
    Way(5, "ZeRO-3 over 8 nodes, tensor parallel inside", "llama3-70b",
        Layout(1, 8, 8, zero_stage=3, sequence_parallel=1)),
    Way(6, "8 stages, tensor parallel inside", "llama3-70b", Layout(8, 1, 8, sequence_parallel=1)),
    Way(7, "4 stages, 2 replicas, tensor parallel inside", "llama3-70b",
        Layout(4, 2, 8, zero_stage=1, sequence_parallel=1)),
    Way(8, "128k tokens, ZeRO-3 on 16 GPUs", "llama3-8b", Layout(1, 16, 1, zero_stage=3), opens=True, num_tokens=LONG),
    Way(8, "128k tokens, each sequence over 16 GPUs", "llama3-8b", Layout(1, 1, 1, zero_stage=3, cp=16),
        num_tokens=LONG),
    Way(9, "ZeRO-3 on 64 GPUs", "mixtral-8x7b", Layout(1, 64, 1, zero_stage=3), opens=True),
    Way(9, "ZeRO-3 on 64 GPUs, experts over the 8 of a node", "mixtral-8x7b", Layout(1, 64, 1, zero_stage=3, ep=8)),
    Way(10, "4 stages, 2 replicas, each sequence over 2, tensor parallel over 4", "llama3-70b",
        Layout(4, 2, 4, zero_stage=1, sequence_parallel=1, cp=2)),
    Way(15, "2 halls of 16 GPUs, gradients in each step", "llama3-8b", Layout(1, 16, 1, zero_stage=3), opens=True,
        apart=Apart()),
    Way(15, "2 halls of 16 GPUs, weights every 100 steps", "llama3-8b", Layout(1, 16, 1, zero_stage=3),
        apart=Apart(every=100)),
)


@dataclass(frozen=True)
class Entry:
    """A line of the ledger: bytes that a GPU holds and sends, seconds of a step, and what limits.

    `moment_bytes` are what is gathered or recomputed for a moment, and the buffers of libraries. Of what it sends, the
    mean over GPUs, `crossing_bytes` go to other nodes: of a ring with k members on each node, one hop in k (all of an
    expert's shards, if ep fills nodes), and of a pipeline one in k but for the end of its last stage, which has no hop;
    and its share of what a hall's line carries.
    In `exposed_s` of a step it computes nothing because it communicates, in `idle_s` because other stages of a pipeline
    have not finished. `limit` is "memory" where `memory_bytes` are over `room_bytes`, a GPU's memory; else
    "communication", "pipeline" or "line", the slow line between halls, if that takes a tenth of the step or more; else
    "computing".
    """

    parameter_bytes: float
    gradient_bytes: float
    optimizer_bytes: float
    activation_bytes: float
    moment_bytes: float
    room_bytes: float
    inside_bytes: float
    crossing_bytes: float
    step_s: float
    exposed_s: float
    idle_s: float
    tokens_per_s: float  # of each GPU
    limit: str

    @property
    def memory_bytes(self) -> float:
        """All that a GPU holds."""
        return (self.parameter_bytes + self.gradient_bytes + self.optimizer_bytes + self.activation_bytes
                + self.moment_bytes)


def entry(model: str | Transformer, layout: Layout, sequences: int = SEQUENCES, gpu: str | Cluster = GPU) -> Entry:
    """The line of a model, by name or as a Transformer, trained in a layout with steps of so many `sequences`.

    Estimated as by the planner, with torchtitan's constants (`book.cost.estimate`), 16 bytes of state a parameter.
    Raises ValueError for an unknown name and for sequences that dp × micro_batch_size does not divide.
    """
    model = model_named(model) if isinstance(model, str) else model
    known = cluster_of(gpu, layout.num_gpus, SOFTWARE[0]) if isinstance(gpu, str) else gpu
    cluster = replace(known, num_gpus=layout.num_gpus)
    each = ADAM_MIXED
    found = estimate(model, cluster, layout, sequences, each)

    def state(part: StateBytes) -> float:
        return float(estimate(model, cluster, layout, sequences, part).state_bytes)

    sent = {axis: float(getattr(found, f"{axis}_bytes")) for axis in AXES}
    most, mean = pipeline_sends(layout.pp, layout.stages_per_rank)
    sent["pp"] *= float(mean) / max(float(most), 1)
    rings = Terms(model.sizes, cluster, Columns.from_rows(Layout, [layout]), sequences, each).rings()
    crossing = (sum(sent[axis] * _crossing(layout, axis, cluster.gpus_per_node) for axis in AXES[:-1])
                + sum(_leaving(*ring, cluster.gpus_per_node) for ring in rings))
    exposed_s = sum(getattr(found, f"{axis}_s") for axis in AXES)
    return Entry(
        state(StateBytes(each.parameters, 0, 0)), state(StateBytes(0, each.gradients, 0)),
        state(StateBytes(0, 0, each.optimizer)), found.activation_bytes, found.gathered_bytes, cluster.memory_bytes,
        sum(sent.values()) - crossing, crossing, found.step_s, exposed_s, found.bubble_s,
        sequences * model.num_tokens / found.step_s / layout.num_gpus, _limit(found, exposed_s, cluster))


def joined(line: Entry, model: Transformer, layout: Layout, apart: Apart) -> Entry:
    """The line of one hall's layout, with what a hall's slow line adds to it."""
    line_bytes = apart.line_bytes(model.num_parameters)
    line_s = line_bytes / apart.bytes_per_s
    waits_s = max(line_s - line.step_s, 0.0) if apart.parts > 1 and apart.every > 1 else line_s
    step_s = line.step_s + waits_s
    outer = line.optimizer_bytes * OUTER_BYTES / ADAM_MIXED.optimizer if apart.every > 1 else 0.0
    seconds, limit = max((line.exposed_s, "communication"), (line.idle_s, "pipeline"), (waits_s, "line"))
    if max(line.exposed_s + waits_s, seconds) < LARGE_SHARE * step_s:
        limit = "computing"
    if line.memory_bytes + outer > line.room_bytes:
        limit = "memory"
    return replace(line, optimizer_bytes=line.optimizer_bytes + outer, limit=limit, step_s=step_s,
                   crossing_bytes=line.crossing_bytes + line_bytes / layout.num_gpus,
                   exposed_s=line.exposed_s + waits_s, tokens_per_s=line.tokens_per_s * line.step_s / step_s)


def _leaving(num_bytes: Any, span: Any, apart: Any, node: int) -> float:
    """Bytes of a ring of data parallelism that leave a node: of one member's, the share of hops that do."""
    return float(np.sum(num_bytes * (span > node) / np.maximum(node // apart, 1)))


def _crossing(layout: Layout, axis: str, node: int) -> float:
    """The share of another axis's bytes that leaves a node."""
    span, size = layout.spans[axis], getattr(layout, axis)
    if span <= node or size == 1:
        return 0.0
    near = max(node // (span // size), 1)  # members of a group on one node
    if axis == "pp":  # of all stages but the last, which sends no further
        return (layout.stages_per_rank * ceil(size / near) - 1) / (layout.stages_per_rank * size - 1)
    return (size - near) / (size - 1) if axis == "ep" else 1 / near  # experts send to all, others around a ring


def _limit(found: Estimate, exposed_s: float, cluster: Cluster) -> str:
    if found.memory_bytes > cluster.memory_bytes:
        return "memory"
    seconds, name = max((exposed_s, "communication"), (found.bubble_s, "pipeline"))
    return name if seconds >= LARGE_SHARE * found.step_s else "computing"


def story(chapter: int) -> Sequence[Way]:
    """The ways up to the end of a chapter; raises ValueError for a chapter that the story does not reach."""
    last = max(way.chapter for way in STORY)
    if not 1 <= chapter <= last:
        raise ValueError(f"the story has chapters 1 to {last}, not {chapter!r}")
    return [way for way in STORY if way.chapter <= chapter]
