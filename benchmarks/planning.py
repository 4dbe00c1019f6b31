"""Estimating every layout of a model on a cluster, against the number of GPUs; and answering people's questions."""
from __future__ import annotations

import contextlib
import io
import re
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace

from benchmarks.report import Claim, Findings, Table, duration
from book.cost import MODELS, Search, Transformer, search
from book.cost.__main__ import main as ask
from book.cost.published import A100

QUICK = {"num_rounds": 1}
SEQUENCES_PER_GPU = 3
PROMISED_GPUS, PROMISED_S = 16_384, 0.5
# A model of each kind, and the axes that are searched beside pp, dp and tp.
LONG = replace(MODELS["mixtral-8x7b"], num_tokens=32_768)
SEARCHED = {"GPT-3": (Transformer(96, 12288, 96), {}),
            "Mixtral 8x7B": (LONG, {"most_tp": 8, "most_cp": 8, "most_ep": 64})}
QUESTIONS = (
    "plan llama3-70b --gpus 64", "plan llama3-70b --gpus 16", "plan llama3-8b --gpus 4 --gpu rtx4090",
    "plan llama3-8b --gpus 1 --gpu rtx4090 --train lora --sequence 2048", "plan llama3-405b --gpus 1024",
    "plan llama3-405b --gpus 16384 --software megatron", "plan llama3-8b --gpus 64 --gpu mi300x",
    "plan llama3-70b --gpus 64 --measured 95,pp=4,dp=2,tp=8,zero=1,sp=1", "plan gpt-oss-120b --gpus 64",
    "plan deepseek-v3 --gpus 2048 --gpu h800", "estimate llama3-8b --gpus 128 --layout zero=3,recompute=half")
NOTE = "As in a shell, without the start of Python; what was answered is an MFU, or why nothing fits."


def measure(cluster_sizes: Sequence[int] = (64, 1024, 16_384), num_rounds: int = 5,
            questions: Sequence[str] = QUESTIONS) -> Findings:
    """Search all layouts of two large models on each cluster, and answer questions; medians."""
    rows, found = [], Findings()
    for name in SEARCHED:
        for num_gpus in cluster_sizes:
            samples = [time_once(num_gpus, name) for _ in range(num_rounds)]
            seconds, layouts = statistics.median(seconds for seconds, _ in samples), len(samples[0][1])
            rows.append((name, f"{num_gpus:,}", f"{layouts:,}", duration(seconds),
                         f"{seconds / layouts * 1e6:.2f} µs"))
            if num_gpus == PROMISED_GPUS:
                found.claims.append(Claim(f"all layouts of {name} on {num_gpus:,} GPUs are estimated in under "
                                          f"{PROMISED_S} s", duration(seconds), seconds < PROMISED_S))
    found.tables.append(Table("Estimating all layouts", ("model", "GPUs", "layouts", "time", "a layout"), rows))
    answers = [(f"`lockstep {question}`", *answered(question, num_rounds)) for question in questions]
    slowest_s = max(seconds for *_, seconds in answers)
    found.claims.append(Claim(f"each of {len(questions)} questions is answered in under {PROMISED_S} s",
                              f"at most {duration(slowest_s)}", slowest_s < PROMISED_S))
    found.tables.append(Table("Answering questions", ("question", "answer", "time"),
                              [(question, answer, duration(seconds)) for question, answer, seconds in answers], NOTE))
    return found


def answered(question: str, num_rounds: int) -> tuple[str, float]:
    """What the planner answers, in a few words, and the median of its seconds."""
    samples = []
    for _ in range(num_rounds):
        said, start_s = io.StringIO(), time.perf_counter()
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            ask(question.split())
        samples.append(time.perf_counter() - start_s)
    found = re.search(r"MFU (\d+%)|^enough +(.*)", said.getvalue(), re.MULTILINE)
    return (f"MFU {found[1]}" if found[1] else f"does not fit; enough: {found[2]}"), statistics.median(samples)


def time_once(num_gpus: int, name: str = "GPT-3") -> tuple[float, Search]:
    """Seconds for one search, and what it found."""
    model, axes = SEARCHED[name]
    cluster = replace(A100, num_gpus=num_gpus)
    start_s = time.perf_counter()
    found = search(model, cluster, SEQUENCES_PER_GPU * num_gpus, **axes)
    return time.perf_counter() - start_s, found
