"""L1: measured steps of many layouts, read from `data`, where SOURCES.md says whose they are."""
from __future__ import annotations

import csv
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

from book.cost.layouts import Layout
from book.cost.published import (MEGASCALE, RECOMPUTATION, REPLICATED, SHARDED, TORCHTITAN, TURING,
                                 WEAK_SCALING, Published)
from book.cost.reported import IMPOSSIBLE, reported_row
from book.cost.transformer import Transformer

GIB = 2.0**30
# Layers, width, heads of the models of llm-foundry, and with the MLP's width those of the Ultra-Scale Playbook.
FOUNDRY = {"125m": (12, 768, 12), "350m": (24, 1024, 16), "760m": (24, 1536, 12), "1b": (24, 2048, 16),
           "3b": (32, 2560, 20), "7b": (32, 4096, 32), "13b": (40, 5120, 40), "30b": (48, 7168, 56),
           "70b": (80, 8192, 64)}
PLAYBOOK = {"1B": (16, 2048, 32, 8192), "3B": (28, 3072, 32, 8192), "8B": (32, 4096, 32, 14336),
            "80B": (80, 8192, 64, 28672)}


@dataclass(frozen=True)
class DataSet:
    """Rows that were measured by the same people, and how many more can't be compared, why.

    `refused_rows` are those of these that ran out of memory.
    """

    name: str
    title: str
    rows: tuple[Published, ...]
    refused: tuple[tuple[str, int], ...] = ()
    refused_rows: tuple[Published, ...] = ()

    @property
    def source(self) -> str:
        """Its entry of references.bib."""
        return self.rows[0].source


def _read(name: str) -> Iterator[dict[str, str]]:
    text = files("book.cost").joinpath("data", f"{name}.csv").read_text("utf-8")
    return csv.DictReader(text.splitlines())


def vtrain_row(row: dict[str, str]) -> Published:
    """A row of vtrain_single.csv or vtrain_multi.csv."""
    at = {name: int(of) for name, of in row.items() if name != "step_ms"}
    model = Transformer(at["num_layers"], at["width"], at["num_heads"], at["num_tokens"])
    layout = Layout(at["pp"], at["dp"], at["tp"], at["micro_batch_size"], recompute="full")
    return Published(f"{model.num_parameters / 1e9:.1f}B", model, layout, at["global_batch"],
                     float(row["step_ms"]) / 1e3, "vtrain")


def foundry_row(row: dict[str, str]) -> Published:
    """A row of llm_foundry.csv: FSDP, GPTs with 50,368 tokens in the vocabulary, attention that keeps no scores."""
    sizes, num_tokens, batch = FOUNDRY[row["model"]], int(row["num_tokens"]), int(row["global_batch"])
    model = Transformer(*sizes, num_tokens, 50368, attention="flash", last_norm=True, dropout=False)
    layout = Layout(1, int(row["num_gpus"]), 1, int(row["micro_batch_size"]), zero_stage=int(row["zero_stage"]),
                    recompute=row["recompute"] or None)
    return Published(row["model"], model, layout, batch, batch * num_tokens / float(row["tokens_per_s"]),
                     "llmfoundry", row["gpu"], "llm-foundry")


def nanotron_row(row: dict[str, str]) -> Published:
    """A row of nanotron.csv: 256 sequences of 4,096 tokens, sequence parallelism, attention that keeps no scores."""
    num_layers, width, num_heads, mlp_width = PLAYBOOK[row["model"]]
    model = Transformer(num_layers, width, num_heads, 4096, 131072, mlp_width=mlp_width, gated=True, biases="none",
                        tied=mlp_width < 10_000, attention="flash", norm="rms", learned_positions=False,
                        last_norm=True, dropout=False)
    pp, dp, tp = (int(row[axis]) for axis in ("pp", "dp", "tp"))
    layout = Layout(pp, dp, tp, int(row["micro_batch_size"]), 1, int(row["zero_stage"]), int(tp > 1))
    return Published(row["model"], model, layout, 256, 256 * 4096 / float(row["tokens_per_s"]), "ultrascale", "h100",
                     "nanotron", memory_bytes=float(row["gpu_gib"]) * GIB)


def _foundry(gpu: str) -> DataSet:
    rows = [row for row in _read("llm_foundry") if row["gpu"] == gpu]
    known = [row for row in rows if row["precision"] == "bf16"]
    return DataSet(f"foundry-{gpu}", f"llm-foundry on {gpu}", tuple(foundry_row(row) for row in known),
                   (("fp8, for which nothing is fitted", len(rows) - len(known)),))


@cache
def data_sets() -> dict[str, DataSet]:
    """All of them by name; read once."""
    playbook = list(_read("nanotron"))
    ran = [row for row in playbook if row["tokens_per_s"]]
    found = [
        DataSet("megatron", "Megatron, tp and pp and dp (table 1)", WEAK_SCALING),
        DataSet("recompute", "Megatron, recomputation", RECOMPUTATION),
        DataSet("replicas", "Megatron, tp and pp and dp (table 2)", REPLICATED),
        DataSet("turing", "Megatron-Turing 530B", TURING),
        DataSet("megascale", "Megatron-LM, as MegaScale measured it", MEGASCALE),
        DataSet("torchtitan", "torchtitan, FSDP2 on A100", TORCHTITAN),
        DataSet("zero3", "DeepSpeed ZeRO-3 in 2021", SHARDED),
        DataSet("vtrain-multi", "vTrain, many nodes", tuple(vtrain_row(row) for row in _read("vtrain_multi"))),
        DataSet("vtrain-single", "vTrain, one node", tuple(vtrain_row(row) for row in _read("vtrain_single"))),
        *(_foundry(gpu) for gpu in ("a100", "a100-40", "h100")),
        DataSet("nanotron", "nanotron on H100", tuple(nanotron_row(row) for row in ran),
                (("did not run", len(playbook) - len(ran)),)),
        *_reported()]
    return {one.name: one for one in found}


def _reported() -> Iterator[DataSet]:
    """The sets of reported.csv; rows that did not run are refused."""
    sets: dict[str, list[Published]] = {}
    for row in _read("reported"):
        if (row["set"], row["model"]) not in IMPOSSIBLE:
            sets.setdefault(row["set"], []).append(reported_row(row))
    for name, rows in sets.items():
        ran, failed = (tuple(row for row in rows if bool(row.step_s) == did) for did in (True, False))
        wrong = sum(name == one for one, _ in IMPOSSIBLE)
        refused = (("out of memory", len(failed)), ("messages longer than the step", wrong))
        yield DataSet(name, name, ran, tuple(pair for pair in refused if pair[1]), failed)
