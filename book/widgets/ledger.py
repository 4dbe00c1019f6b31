"""L3: the ledger of the story: a line for each way to train, up to a chapter, and one that the reader chooses."""
from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from book.cost import ADAM_MIXED, Layout, cluster_of, model_named
from book.cost.activations import RECOMPUTE
from book.cost.ledger import GPU, LARGE_SHARE, LONG, MODELS_OF_THE_STORY, NUM_TOKENS, SEQUENCES, Apart, Way, story
from book.cost.machines import SOFTWARE
from book.widgets.explorer import Dial, Explorer
from book.widgets.page import heading, table
from book.widgets.show import show
from book.words import in_bytes

if TYPE_CHECKING:
    from book.widgets.live import Live

NAMES = {"llama3.2-1b": "1B", "llama3-8b": "8B", "llama3-70b": "70B", "mixtral-8x7b": "8x7B"}
GPUS = tuple(2**power for power in range(11))
SIZES = (1, 2, 4, 8, 16)
HALLS, EVERY, PARTS = (1, 2, 4), (1, 10, 50, 100, 500), (1, 4)
AGAIN = ("nothing", "half", "all")  # what is recomputed, in the order of RECOMPUTE without "selective"
LIMITS = {"line": "the slow line"}
HEAD = ("chapter", "model", "way", "a GPU holds", "sends in its node", "across nodes", "waits",
        "tokens per second and GPU", "limited by")


def ledger(chapter: int) -> Ledger | Live:
    """A line for each way to train of `book.cost.ledger.STORY` up to a chapter, and one of the reader's own choice.

    The reader's line opens with the way that the chapter closes with. Raises ValueError for a chapter without one.
    """
    return show(Ledger(chapter))


class Ledger(Explorer):
    """What the ledger starts from; raises ValueError for a chapter that the story does not reach."""

    widget = "ledger"

    def __init__(self, chapter: int):
        self.ways = story(chapter)
        self.chapter, last = chapter, self.ways[-1]
        cut = (Dial("tokens", "tokens of a sequence", (NUM_TOKENS, 2 * NUM_TOKENS, 4 * NUM_TOKENS, LONG // 2, LONG),
                    last.num_tokens),
               Dial("cp", "context parallel", SIZES, last.layout.cp))
        experts = Dial("ep", "expert parallel", SIZES[:4], last.layout.ep)
        # before its chapter nobody knows what a dial is
        cuts, spreads = (any(getattr(way.layout, axis) > 1 for way in self.ways) for axis in ("cp", "ep"))
        halls = (Dial("halls", "halls of so many GPUs", HALLS, last.apart.halls),
                 Dial("every", "steps between exchanges", EVERY, last.apart.every),
                 Dial("parts", "parts of an exchange", PARTS, last.apart.parts)) if last.apart else ()
        self.models = [name for name in MODELS_OF_THE_STORY if spreads or not model_named(name).experts]
        super().__init__("The ledger", (
            Dial("model", "model", tuple(NAMES[name] for name in self.models), NAMES[last.model], "word"),
            Dial("gpus", "GPUs", GPUS, last.layout.num_gpus),
            Dial("tp", "tensor parallel", SIZES[:4], last.layout.tp), Dial("pp", "stages", SIZES, last.layout.pp),
            Dial("zero", "ZeRO stage", tuple(range(4)), last.layout.zero_stage), *(cut if cuts else ()),
            *((experts,) if spreads else ()), *halls,
            Dial("micro", "micro-batch", SIZES, last.layout.micro_batch_size),
            Dial("again", "recomputed", AGAIN, AGAIN[0], "word")))

    def data(self, live: bool) -> dict[str, Any]:
        """The dials; models, the machine and the lines in numbers."""
        are_apart = any(way.apart for way in self.ways)
        models = {NAMES[name]: asdict(model.sizes) | {"num_kv_heads": model.kv_heads}
                  | ({"num_parameters": model.num_parameters} if are_apart else {})
                  for name, model in zip(self.models, map(model_named, self.models))}
        ways = [{"chapter": way.chapter, "name": way.name, "model": NAMES[way.model], "opens": way.opens,
                 "layout": asdict(way.layout), "tokens": way.num_tokens,
                 **({"apart": asdict(way.apart)} if way.apart else {})} for way in self.ways]
        return {**super().data(live), "chapter": self.chapter, "ways": ways, "models": models, "large": LARGE_SHARE,
                "machine": asdict(cluster_of(GPU, 1, SOFTWARE[0])), "step_tokens": SEQUENCES * NUM_TOKENS,
                "each": ADAM_MIXED.parts, "plain": asdict(Layout(1, 1, 1)), "tokens": NUM_TOKENS,
                "again": dict(zip(AGAIN, (None, *RECOMPUTE[2:]))),
                **({"bytes_per_s": Apart().bytes_per_s} if are_apart else {})}

    def text(self) -> str:
        """One line that says what is shown."""
        return f"{self.title} to chapter {self.chapter}: {len(self.ways)} ways to train on H100s, modelled"

    def words(self) -> str:
        """The lines as a table."""
        return heading(self.title, "modelled") + table(map(_row, self.ways), HEAD)


def _row(way: Way) -> tuple[str, ...]:
    line = way.line
    sent = [in_bytes(num_bytes, zeros=True) for num_bytes in (line.inside_bytes, line.crossing_bytes)]
    first = str(way.chapter), NAMES[way.model], way.name
    if line.limit == "memory":  # what does not fit does not run
        return (*first, f"{in_bytes(line.memory_bytes)} of 80 GB", *sent, "–", "–", line.limit)
    waits = 100 * (line.exposed_s + line.idle_s) / line.step_s
    return (*first, in_bytes(line.memory_bytes), *sent, f"{waits:.0f} %", f"{line.tokens_per_s:,.0f}",
            LIMITS.get(line.limit, line.limit))
