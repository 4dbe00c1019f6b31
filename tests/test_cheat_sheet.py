"""The cheat-sheet: its formulas, evaluated as they stand on the page, and its examples are the planner's numbers."""
from __future__ import annotations

import re
from dataclasses import replace

import pytest

from book.cost import MODELS, Estimate, Layout, Transformer, cluster_of, estimate, pipeline_bubble
from book.cost.ledger import GPU, SEQUENCES
from book.cost.machines import EACH, SOFTWARE
from tests.browser import Browser
from tests.website import ROOT, Site

PAGE = "chapters/99_cheat_sheet"
TEXT = (ROOT / f"{PAGE}.md").read_text("utf-8")
WAYS = [[cell.strip() for cell in line.strip("|").split("|")] for line in TEXT.splitlines() if line.startswith("| [")]
LLAMA, LONG = MODELS["llama3-8b"], replace(MODELS["llama3-8b"], num_tokens=131072)
CASES: dict[str, tuple[Transformer, Layout, int, tuple[str, ...]]] = {
    "DDP": (LLAMA, Layout(1, 64, 1), SEQUENCES, ("dp",)),
    **{f"ZeRO-{k}": (LLAMA, Layout(1, 64, 1, zero_stage=k), SEQUENCES, ("dp",)) for k in (1, 2)},
    "ZeRO-3, FSDP": (LLAMA, Layout(1, 64, 1, zero_stage=3), SEQUENCES, ("dp",)),
    "HSDP": (LLAMA, Layout(1, 64, 1, zero_stage=3, replicas=8), SEQUENCES, ("dp",)),
    "TP": (LLAMA, Layout(1, 8, 8), SEQUENCES, ("tp",)),
    "TP with SP": (LLAMA, Layout(1, 8, 8, sequence_parallel=1), SEQUENCES, ("tp",)),
    "PP": (LLAMA, Layout(8, 8, 1), SEQUENCES, ("pp",)),
    "CP": (LONG, Layout(1, 8, 1, cp=8, zero_stage=3), 32, ("cp",)),
    "EP": (MODELS["mixtral-8x7b"], Layout(1, 64, 1, ep=8, zero_stage=3), SEQUENCES, ("ep",)),
}
TOKEN = re.compile(r"\\text\{(\w+)\}|\\(Psi)|([a-zA-Z]_\{?\w+\}?)|([a-zA-Z]|\d+)|([()+/-])")


def value(latex: str, letters: dict[str, float]) -> float:
    """What a formula on the page comes to: letters and numbers that stand side by side are multiplied."""
    python, before = "", ""
    for found in TOKEN.finditer(latex):
        token = next(filter(None, found.groups()))
        factor = token not in ")+/-"
        python += ("*" if factor and before and before not in "(+/-" else "") + (
            str(letters[token]) if token in letters else token)
        before = token
    return float(eval(python))


def letters_of(model: Transformer, layout: Layout, sequences: int) -> dict[str, float]:
    shards = layout.dp // layout.replicas
    return {"Psi": model.num_parameters, "N": layout.num_gpus, "m": sequences / layout.dp, "L": model.num_layers,
            "s": model.num_tokens, "b": 1, "h": model.width, "h_{kv}": model.sizes.key_value_width, "t": layout.tp,
            "p": layout.pp, "cp": layout.cp, "ep": layout.ep, "d_r": layout.replicas, "d_s": shards}


def told(model: Transformer, layout: Layout, sequences: int) -> Estimate:
    cluster = cluster_of(GPU, layout.num_gpus, SOFTWARE[0])
    return estimate(model, cluster, layout, sequences, EACH[SOFTWARE[0]])


def test_the_table_has_the_ways_in_this_order() -> None:
    assert [re.search(r"\[([^]]+)\]", row[0])[1] for row in WAYS] == list(CASES)


@pytest.mark.parametrize("name", CASES)
def test_formulas_and_example_of_a_way_are_the_planners(name: str) -> None:
    row = WAYS[list(CASES).index(name)]
    model, layout, sequences, axes = CASES[name]
    found, letters = told(model, layout, sequences), letters_of(model, layout, sequences)
    embedding = name == "PP" and 16 * model.num_parameters / 16  # the first stage's, less than half a stage's layers
    state = value(re.search(r"\$(.*?)\$", row[3])[1], letters)
    assert state == pytest.approx(found.state_bytes, rel=0.01, abs=embedding)
    sent = sum(getattr(found, f"{axis}_bytes") for axis in axes)
    each = model.experts.per_token if name == "EP" else 1
    assert value(re.search(r"\$(.*?)\$", row[4])[1], letters) * each == pytest.approx(sent)
    shown = [float(number) for number in re.findall(r"\d+", row[5])]
    assert shown == [round(num / 1e9) for num in (found.state_bytes, found.activation_bytes, sent)]


def test_the_recipes_thresholds_follow_from_the_machine() -> None:
    reached, words = 0.44 * 989e12, " ".join(TEXT.split())
    assert 80e9 / 2 / 16 == 2.5e9 and "2.5 billion parameters on 80 GB" in words
    assert f"up to {80e9 / 2 / (4 + 12 / 64) / 1e9:.1f} billion fit there" in words
    assert f"{round(reached / 50e9, -2):,.0f} tokens at 50 GB/s" in words
    assert f"{round(reached / 400e9, -2):,.0f} where a node's eight cards" in words
    shares = [round(100 * 7 * reached / 450e9 / (3.6 * width)) for width in (8192, 4096)]
    assert f"{shares[0]} % for $h$ of 8,192 and {shares[1]} % for 4,096" in words
    assert all(pipeline_bubble(p, 4 * p) < 1 / 5 for p in range(2, 33)) and "a fifth of the step is idle" in words


def test_the_sheet_prints_on_one_page(site: Site, browser: Browser) -> None:
    page, log = browser.open((site.folder / f"{PAGE}.html").as_uri())
    pdf = page.pdf(prefer_css_page_size=True)
    assert len(re.findall(rb"/Type\s*/Page\b", pdf)) == 1
    log.assert_clean()
