"""Every widget that plays as a row: what test_widgets_browser.py asks of all of them. A new one is a new row."""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from book import collectives
from book.cost import Link
from book.pipelines import gpipe, interleaved, one_f_one_b, zero_bubble
from book.replay import Replay, StepReplay
from book.schedule import Action, PipelineSchedule, Schedule
from book.simulate import simulate, simulate_pipeline
from book.trace import Trace
from book.widgets import (attention_player, bucket_timeline, expert_player, layout_chart, memory_player,
                          pipeline_game, pipeline_player, pipeline_race, play, race, sharded_product, step_timeline)
from book.widgets.registry import ASSETS
from tests.backward import layers, recorded
from tests.memory import recorded as recorded_step
from tests.layouts import few, many
from tests.meshes import explorer
from tests.scores import recorded as recorded_scores
from tests.shards import recorded as recorded_product
from tests.steps import PHASES, recorded as recorded_steps
from tests.tokens import recorded as recorded_tokens

TRANSPORT = ("Back to the start", "One step back", "Play", "One step forward", "Step", "1×")
AWAY = "document.querySelector('.lk-move g')?.getAttribute('transform')"
CLIP = "document.querySelector('.lk-move').style.clipPath"
WRONG = [Action(0, 0, 0, "F"), Action(0, 0, 0, "B"), Action(0, 0, 1, "F"), Action(0, 0, 1, "B"),  # it deadlocks
         Action(1, 1, 0, "F"), Action(1, 1, 1, "F"), Action(1, 1, 0, "B"), Action(1, 1, 1, "B")]
Contrast = tuple[list[str], list[str], float]  # CSS variables of colours and of their grounds, the least ratio


@dataclass(frozen=True)
class Widget:
    """What a widget's tests need to know of it; `keys` are pressed first, where there is something to place."""

    name: str
    make: Callable[[], Any]  # a small one, whose last stop is `steps`
    steps: int
    many: Callable[[], tuple[Any, ...]]  # what it looks like at most; the first with a choice of "run", if it has one
    themed: str  # a selector: something with a fill that a theme changes
    moving: str  # JavaScript: what changes from frame to frame while it plays
    tabs: tuple[str, ...]  # where the Tab key stops
    told: tuple[str, int, str]  # without JavaScript: a selector, how many there are, and some words
    contrasts: tuple[Contrast, ...]
    heaviest: Callable[[], Any] | None = None
    keys: tuple[str, ...] = ()
    narrowest: int = 320  # at so many px all texts stand apart
    steady: bool = True  # the controls stay where they are, however long the caption is

    def __str__(self) -> str:
        return self.name

    @property
    def path(self) -> Path:
        """The script that draws it: whoever edits that runs this row."""
        return ASSETS / f"{self.name}.js"


# the chunk player
LINK = Link(20e-6, 1e9)


def simulated(make: Callable[[int], Schedule], num_ranks: int, **options: Any) -> Trace:
    """A modelled run of a collective."""
    return simulate(make(num_ranks), 400e6, LINK, **options)


def wrong_ring() -> Schedule:
    """A ring that adds where it should replace."""
    ring = collectives.ring_all_reduce(4)
    return Schedule(ring.name, 4, 4, [replace(move, op="reduce") for move in ring.moves], ring.promise)


def _players() -> tuple[Any, ...]:
    runs = {"wrong": wrong_ring(), "hierarchical": collectives.hierarchical_all_reduce(2, 4),
            "tree": collectives.tree_all_reduce(9), "16 ranks": collectives.ring_all_reduce(16)}
    both = {name: simulated(make, 8) for name, make in (("ring", collectives.ring_all_reduce),
                                                        ("tree", collectives.tree_all_reduce))}
    return (play(runs), play(simulated(collectives.ring_all_reduce, 4), predict=True), race(both),
            *(play(collectives.ring_all_reduce(16), view=view) for view in ("ring", "matrix")))


# the bucket timeline
REPLAY = Replay(2e-9, Link(100e-6, 1e9))
LATE = replace(REPLAY, slowdown={1: 2.0})
SMALL = {0: [("head.bias", 400), ("head.weight", 99_600)], 1: [("body.weight", 100_000)]}


def caps() -> dict[float, Trace]:
    """Runs with small and large buckets, by their size in MB."""
    return {cap: recorded(layers(8, per_bucket)) for cap, per_bucket in ((0.1, 1), (0.5, 2), (25, 8))}


def gpt(world_size: int) -> Trace:
    """As many parameters, with as long names, as a small GPT has."""
    kinds = ["ln_1.weight", "attention.qkv.weight", "attention.projection.weight", "mlp.0.weight", "mlp.2.weight"]
    blocks = {i: [(f"blocks.{9 - i}.{kind}", 500 + 260_000 * ("weight" in kind and "ln" not in kind)) for kind in kinds]
              for i in range(10)}
    return recorded(blocks, world_size)


def _timelines() -> tuple[Any, ...]:
    runs = {"SMALL": recorded(SMALL), **{str(cap): trace for cap, trace in caps().items()}, "alone": recorded(SMALL, 1),
            "four": recorded(layers(6), 4), "eight": gpt(8), "kept": recorded({None: SMALL[0]})}
    return bucket_timeline(runs, LATE), bucket_timeline(gpt(8), REPLAY)


# the step timeline
def _step_timelines() -> tuple[Any, ...]:
    runs = {"2 is late": _late(4), "eight": _late(8, 6), "two": _late(2, 1), "measured": recorded_steps()}
    return step_timeline(runs), step_timeline(_late(8, 6))


def _late(world_size: int, num_steps: int = 2) -> Trace:
    return StepReplay(PHASES, LINK, {(1, "backward"): 0.03})(recorded_steps(world_size, num_steps))


# the pipeline player and the game
KINDS = ["kF", "kB", "kI"]
PIPELINES = {"GPipe": gpipe(4, 8), "1F1B": one_f_one_b(4, 8), "interleaved": interleaved(8, 8),
             "ZB-V": zero_bubble(8, 8)}
STAGES: tuple[Contrast, ...] = (([*KINDS, "soft"], ["bg"], 4.5), (["kW"], ["ink"], 4.5), (KINDS, ["hollow"], 3),
                                (["kB", "kW"], ["kF"], 1.8))  # they differ in tone too


def _pipelines() -> tuple[Any, ...]:
    slow = simulate_pipeline(zero_bubble(8, 4), 1e-3, 2e-3, link=Link(1e-3, 1e9))
    runs = {"1F1B": one_f_one_b(4, 8), "slow links": slow, "stopped": PipelineSchedule("mine", 2, 2, WRONG),
            "one": gpipe(1, 2), "eight": interleaved(16, 8)}
    return pipeline_player(runs), pipeline_race(PIPELINES)


# the sharded product
def product(name: str, num_ranks: int = 2) -> Any:
    """A sharded product of one real run."""
    return sharded_product(recorded_product(name, num_ranks))


def _products() -> tuple[Any, ...]:
    small = ("twice", "partial", "gathered", "columns summed", "bias", "rows first", "no sum backward")
    large = ("by columns", "sequence parallel", "bias", "rows first")
    runs = {**{name: recorded_product(name) for name in small},
            **{f"{name} 4": recorded_product(name, 4) for name in large}}
    return sharded_product(runs), product("MLP, backward", 4)


# the memory player
def _steps() -> tuple[Any, ...]:
    runs = {**{f"stage {stage}": recorded_step(stage) for stage in range(4)}, "4 ranks": recorded_step(3, 4)}
    return memory_player(runs), memory_player(recorded_step(1, 4))


# the attention player
def _attentions() -> tuple[Any, ...]:
    runs = {"contiguous": recorded_scores(), "zigzag": recorded_scores(zigzag=True),
            "wrong": recorded_scores(fault="own mask"), "two": recorded_scores(2, num_tokens=32)}
    return attention_player(runs), attention_player(recorded_scores(fault="backwards"))


# the expert player
def _experts() -> tuple[Any, ...]:
    runs = {"even": recorded_tokens(), "uneven": recorded_tokens(skew=1.5, capacity=3),
            "two of eight": recorded_tokens(4, 8, 2, skew=1.0, num_tokens=16),
            "wrong": recorded_tokens(2, 4, 2, fault="sorted")}
    return expert_player(runs), expert_player(recorded_tokens(2, 4, 2, fault="not in order"))


WIDGETS = (
    Widget("player", lambda: play(simulated(collectives.ring_all_reduce, 4)), 6, _players,
           themed=".lk-card rect", moving="document.querySelectorAll('.lk-mover').length",
           tabs=("Ring all-reduce", *TRANSPORT, "matrix", "steps", "predict", "Bytes per link"),
           told=("li", 6, "0 → 1: chunk 0"),
           contrasts=(([f"r{rank}" for rank in range(16)], ["bg", "card", "hollow"], 3),),
           heaviest=lambda: play(simulated(collectives.ring_all_reduce, 16), view="ring"), narrowest=390, steady=False),
    Widget("timeline", lambda: bucket_timeline(recorded(SMALL), REPLAY), 5, _timelines,
           themed=".lk-move .lk-block rect", moving=CLIP,
           tabs=("One backward pass, bucket by bucket", "bucket 0 of rank 0: 0 B of 100 kB", *TRANSPORT),
           told=("table", 2, "head.weight (99,600 B)"),
           contrasts=(([*(f"b{i}" for i in range(4)), "soft"], ["bg"], 4.5),
                      ([*(f"b{i}" for i in range(4)), "soft"], ["hollow"], 3)),
           heaviest=lambda: bucket_timeline(gpt(8), LATE)),
    Widget("steps", lambda: step_timeline(_late(2)), 3, _step_timelines,
           themed=".lk-block rect", moving=CLIP, tabs=("Training steps, rank by rank", *TRANSPORT),
           told=("table", 2, "comes last over and over"),
           contrasts=((["soft", "ink"], ["bg"], 4.5), (["bg"], [f"b{i}" for i in range(4)], 4.5),
                      (["p0", "p1"], ["bg", "hollow"], 3)),
           heaviest=lambda: step_timeline(_late(8, 6))),
    Widget("pipeline", lambda: pipeline_player(one_f_one_b(2, 3)), 10, _pipelines,
           themed=".lk-move .lk-block rect", moving=CLIP,
           tabs=("Pipeline: 1F1B, 2 stages, 3 micro-batches", *TRANSPORT),
           told=("tr", 2, "F0 F1 B0 F2 B1 B2"), contrasts=STAGES,
           heaviest=lambda: pipeline_player(one_f_one_b(8, 32))),
    Widget("game", lambda: pipeline_game(2, 2), 7, lambda: (pipeline_game(2, 2), pipeline_game(4, 8)),
           themed=".lk-move .lk-block rect", moving=CLIP,
           tabs=("Place the forwards and backwards yourself", "0", "1", "F0", "F1", "B0", "B1", *TRANSPORT, "Undo",
                 "Restart"),
           told=("li", 2, "1F1B: 9 ms · bubble 33.3 %"), contrasts=STAGES,
           keys=("f", "f", "ArrowDown", *"fbfb", "ArrowUp", "b", "b")),
    Widget("shards", lambda: product("by rows"), 3, _products,
           themed=".lk-cell > g > rect", moving="document.querySelector('.lk-move').style.visibility",
           tabs=("A sharded matrix product", "X on rank 0: all 24 rows, columns 0 to 5 of 24×12, 1.15 kB.", *TRANSPORT),
           told=("li", 4, "Every rank multiplies its columns of X"),
           contrasts=((["soft", "ink", "bad"], ["bg"], 4.5),
                      ([*(f"r{i}" for i in range(4)), "p0", "p2", "bad"], ["hollow"], 3)),
           heaviest=lambda: product("sequence parallel", 4)),
    Widget("layouts", lambda: layout_chart(few()), 8, lambda: (layout_chart(few()), layout_chart(many())),
           themed=".lk-point:not(.gone)", moving="document.querySelector('.lk-spot').getAttribute('transform')",
           tabs=("126 million parameters on 4 GPUs", *TRANSPORT, "tp", "pp", "ZeRO", "recompute", "only what fits"),
           told=("tr", 10, "pp 1 × dp 1 × tp 4, micro-batch 1, sequence parallel, full"),
           contrasts=(([*(f"r{i}" for i in (0, 1, 2, 3, 7, 8, 10)), "p2"], ["bg", "hollow"], 3),
                      (["soft", "ink"], ["bg"], 4.5)), heaviest=lambda: layout_chart(many())),
    Widget("mesh", lambda: explorer((2, 1, 2), 1, 2), 6, lambda: (explorer(), explorer((2, 1, 2), 1, 2)),
           themed=".lk-cube.mate .lk-face", moving=AWAY,
           tabs=("A training step on a mesh of 4 ranks", "rank 0: pp 0, dp 0, tp 0, on node 0", *TRANSPORT,
                 "ranks on a node", "as recorded",
                 *(f"Move {axis} {way}" for axis in ("pp", "dp", "tp") for way in ("out", "in"))),
           told=("table", 2, "Output of micro-batch 0 from stage 0 to stage 1"),
           contrasts=(([*(f"x{i}" for i in range(5)), "soft", "ink"], ["bg"], 4.5), (["soft", "ink"], ["card"], 4.5)),
           heaviest=explorer),
    Widget("memory", lambda: memory_player(recorded_step(3)), 23, _steps,
           themed=".lk-hold", moving="document.querySelector('.lk-move').style.visibility",
           tabs=("What each rank holds in one training step", *TRANSPORT),
           told=("li", 24, "All ranks gather block 0"),
           contrasts=(([*(f"m{i}" for i in range(4)), "soft", "focus"], ["bg"], 4.5),
                      ([f"r{i}" for i in range(8)], ["hollow"], 3)),
           heaviest=lambda: memory_player(recorded_step(3, 4))),
    Widget("attention", lambda: attention_player(recorded_scores()), 4, _attentions,
           themed=".lk-stage rect.lk-slot", moving=AWAY, tabs=("Attention over a cut sequence", *TRANSPORT),
           told=("li", 5, "Every rank passes keys and values on to the next"),
           contrasts=((["soft", "ink"], ["bg", "card"], 4.5), ([f"r{i}" for i in range(4)], ["bg", "hollow"], 3)),
           heaviest=lambda: attention_player(recorded_scores(num_tokens=32))),
    Widget("experts", lambda: expert_player(recorded_tokens()), 5, _experts,
           themed=".lk-stage rect.lk-slot", moving="document.querySelectorAll('.lk-stage rect[fill]').length",
           tabs=("Tokens and their experts", *TRANSPORT),
           told=("li", 6, "Numbers first: each rank tells every other"),
           contrasts=((["soft", "ink"], ["bg"], 4.5), ([f"r{i}" for i in range(8)], ["bg", "hollow"], 3)),
           heaviest=lambda: expert_player(recorded_tokens(4, 8, 2, skew=1.0, num_tokens=16))))
