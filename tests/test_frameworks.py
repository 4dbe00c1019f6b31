"""Chapter 14: the names it gives to Accelerate's and Lightning's settings are theirs, and its sums are right."""
from __future__ import annotations

import inspect
import re
from pathlib import Path

import nbformat
import pytest

from book.cost import pipeline_bubble
from tests.website import ROOT

MISSING = "is not installed: python -m pip install -r requirements-frameworks.txt (make test does)"
PAGE = "\n".join(cell.source for cell in nbformat.read(
    ROOT / "chapters" / "14_frameworks.ipynb", as_version=4).cells if cell.cell_type == "markdown")


def column(framework: str) -> dict[str, str]:
    """What the chapter's table says under a framework, by the first cell of the row."""
    rows = [[cell.strip() for cell in line.strip("| ").split(" | ")] for line in PAGE.splitlines() if line[:1] == "|"]
    for number, row in enumerate(rows):
        heads = [cell.split(" {cite}")[0].strip("| ") for cell in row]
        if framework in heads:
            return {body[0]: body[heads.index(framework) + 1] for body in rows[number + 2:number + 16]}
    raise AssertionError(f"no table has a column {framework}")


def pinned() -> dict[str, str]:
    """The frameworks that `make test` installs, with their versions."""
    lines = (ROOT / "requirements-frameworks.txt").read_text("utf-8")
    return dict(re.findall(r"^(\w+)==([\d.]+)$", lines, re.M))


def arguments(*calls: object) -> set[str]:
    """All the arguments that these calls take."""
    return {name for call in calls for name in inspect.signature(call).parameters}


@pytest.mark.slow
@pytest.mark.parametrize("package, called", [("accelerate", "Accelerate"), ("lightning", "Lightning")])
def test_the_chapter_names_the_release_that_is_installed(package: str, called: str) -> None:
    installed = pytest.importorskip(package, reason=f"{package} {MISSING}").__version__
    assert installed == pinned()[package] and f"{called} {installed}" in PAGE


def test_both_tables_have_a_row_for_each_thing() -> None:
    ours, theirs = column("Accelerate"), column("DeepSpeed")
    assert list(ours) == list(theirs) and len(ours) == 14 and "checkpoint" in ours


@pytest.mark.slow
def test_the_names_under_accelerate_are_its_own() -> None:
    accelerate = pytest.importorskip("accelerate", reason=f"accelerate {MISSING}")
    from accelerate.utils import MegatronLMPlugin
    plugins = {kind.__name__: kind for kind in (accelerate.DeepSpeedPlugin, accelerate.FullyShardedDataParallelPlugin,
                                                accelerate.ParallelismConfig, MegatronLMPlugin)}
    loader = {"batch_size", "split_batches"}
    known = arguments(accelerate.Accelerator, *plugins.values()) | loader | plugins.keys()
    said = named("Accelerate")
    assert said - known == {"save_state", "accelerator"} and hasattr(accelerate.Accelerator, "save_state")
    for plugin, argument in re.findall(r"(\w+Plugin)\((\w+)=", " ".join(column("Accelerate").values())):
        assert argument in arguments(plugins[plugin]), f"{plugin} has no {argument}"


@pytest.mark.slow
def test_the_names_under_lightning_are_its_own() -> None:
    lightning = pytest.importorskip("lightning", reason=f"lightning {MISSING}")
    from lightning.pytorch import strategies
    kinds = {name: getattr(strategies, name) for name in ("ModelParallelStrategy", "FSDPStrategy")}
    known = arguments(lightning.Trainer, *kinds.values()) | kinds.keys() | {"batch_size"}
    assert named("Lightning") - known == {"trainer", "save_checkpoint", "path"}
    assert hasattr(lightning.Trainer, "save_checkpoint")
    strings = set(re.findall(r'"(\w+)"', " ".join(column("Lightning").values()))) - {"SHARD_GRAD_OP"}
    assert len(strings) == 4 and strings <= set(strategies.StrategyRegistry.available_strategies())


def named(framework: str) -> set[str]:
    """The names in a column's code, without strings and numbers."""
    quoted = re.findall(r"`([^`]+)`", " ".join(column(framework).values()))
    return {name for code in quoted for name in re.findall(r"[A-Za-z_]\w*", re.sub(r'"[^"]*"', "", code))
            if name not in {"True", "False", "folder"}}


def test_the_sums_in_the_answers() -> None:
    assert 4 * 8 * 16 == 512 == 4 * 32 * 4 and "$4 \\times 8 \\times 16 = 512$" in PAGE
    num_micro_batches = 256 // (2 * (64 // 16))
    assert num_micro_batches == 32 and f"{100 * pipeline_bubble(4, num_micro_batches):.1f} %" in PAGE


def test_make_test_installs_the_frameworks() -> None:
    makefile = Path(ROOT / "Makefile").read_text("utf-8")
    stamp = re.search(r"^test: \$\((\w+)\)$", makefile, re.M)[1]
    assert f"\n$({stamp}): requirements-frameworks.txt " in makefile and set(pinned()) == {"accelerate", "lightning"}
