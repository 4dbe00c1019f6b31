"""Snapshots of CUDA's allocator: who holds the memory when most is held, and why a request was refused."""
from __future__ import annotations

import contextlib
import io
import pickle
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.cuda import _memory_viz
from torch.nn.functional import cross_entropy

from book.__main__ import main
from book.look.dumps import DumpError
from book.look.gpu_memory import GpuMemory, part_of, read_snapshot
from book.parallel.model import GPT, GPTConfig
from tests.allocations import Allocations
from tests.damaged import damaged

PIECES = (300, 700)


def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, tokens: torch.Tensor) -> None:
    logits = model(tokens[:, :-1])
    cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.fixture(scope="module")
def trained() -> tuple[Allocations, int]:
    """Two steps of the book's GPT, and how many parameters it has."""
    with Allocations() as seen:
        model = GPT(GPTConfig(vocab_size=64, num_layers=2, width=32))
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(2):
            step(model, optimizer, torch.randint(64, (16, 33)))
    return seen, sum(each.numel() for each in model.parameters())


def saved(path: Path, found: dict[str, Any]) -> Path:
    path.write_bytes(pickle.dumps(found))
    return path


def frame(filename: str, name: str, line: int = 1) -> dict[str, Any]:
    return {"filename": filename, "line": line, "name": name}


def held(snapshot: GpuMemory, name: str) -> int:
    return sum(part.num_bytes for part in snapshot.parts if part.name == name)


def test_what_is_held_at_the_peak_is_told_by_part_and_line(trained: tuple[Allocations, int], tmp_path: Path,
                                                           capsys: pytest.CaptureFixture[str]) -> None:
    seen, num_parameters = trained
    path = saved(tmp_path / "memory.pickle", seen.snapshot(PIECES))
    [snapshot] = read_snapshot(path)
    assert snapshot.peak == seen.most == sum(part.num_bytes for part in snapshot.parts)
    assert held(snapshot, "parameters") + held(snapshot, "made in __init__") == 4 * num_parameters
    assert 8 * num_parameters < held(snapshot, "optimizer") < 9 * num_parameters  # its counters of steps too
    assert held(snapshot, "forward") > held(snapshot, "parameters"), "16 sequences, and backward has hardly begun"
    assert snapshot.largest_free == max(PIECES)
    assert main(["show", str(path)]) == 0
    told = capsys.readouterr().out
    assert "allocated them: forward " in told and "model.py:" in told and "in forward: " in told
    assert "have no Python frames" not in told


def test_torchs_own_reader_finds_the_same_bytes(trained: tuple[Allocations, int], tmp_path: Path) -> None:
    found = trained[0].snapshot(PIECES)
    [snapshot] = read_snapshot(saved(tmp_path / "memory.pickle", found))
    told = _memory_viz.segsum(found)
    assert f"total_reserved: {_memory_viz.Bytes(snapshot.reserved)}" in told
    assert f"total_allocated: {_memory_viz.Bytes(snapshot.held)}" in told


def test_the_peak_is_that_of_counting_each_event(tmp_path: Path) -> None:
    draw = random.Random(3)
    live: dict[int, int] = {k: draw.randrange(1, 99) for k in range(4)}  # allocated before the history began
    before, most, events = dict(live), sum(live.values()), []
    stacks: dict[int, list[dict[str, Any]]] = {}
    for address in range(100, 300):
        if live and draw.random() < 0.5:
            gone = draw.choice([*live])
            events.append({"action": "free_completed", "addr": gone, "size": live.pop(gone)})
        live[address] = draw.randrange(1, 99)
        stacks[address] = [frame("??", "at::empty"), frame("train.py", f"f{address}")]
        events.append({"action": "alloc", "addr": address, "size": live[address], "frames": stacks[address]})
        most = max(most, sum(live.values()))
    blocks = [{"address": a, "size": n, "requested_size": n, "state": "active_allocated",
               "frames": stacks.get(a, [])} for a, n in live.items()]
    segments = [{"total_size": 9999, "blocks": blocks}]
    [snapshot] = read_snapshot(saved(tmp_path / "x", {"segments": segments, "device_traces": [events]}))
    assert snapshot.peak == most == sum(part.num_bytes for part in snapshot.parts)
    assert 0 < held(snapshot, "other code") and held(snapshot, "no Python frames") <= sum(before.values())
    assert all(part.place.startswith("train.py:1 in f") for part in snapshot.parts if part.name == "other code")


@pytest.mark.parametrize("frames, part", [
    ([], "no Python frames"), ([frame("??", "torch::unwind::unwind()")], "no Python frames"),
    ([frame("??", "at::native::empty_cuda"), frame("??", "torch::autograd::Engine::thread_main")], "backward"),
    ([frame("??", "at::native::empty_cuda"), frame("train.py", "main")], "other code"),
    ([frame("train.py", "main")], "other code"),
    ([frame("/x/torch/optim/adam.py", "_init_group"), frame("train.py", "forward")], "optimizer"),
    ([frame("/x/torch/distributed/fsdp/_fully_shard/_fsdp_param.py", "init_all_gather_outputs"),
      frame("model.py", "forward")], "gathered by FSDP"),
    ([frame(f"/x/torch/distributed/fsdp/_fully_shard/{file}", name) for file, name in (
        ("_fsdp_collectives.py", "allocate"), ("_fsdp_collectives.py", "foreach_reduce"),
        ("_fsdp_param_group.py", "post_backward"))], "reduced by FSDP"),
    ([frame("/x/torch/distributed/fsdp/_fully_shard/_fsdp_param.py", "_init_sharded_param"),
      frame("/x/torch/distributed/fsdp/_fully_shard/_fsdp_param.py", "__init__")], "parameters"),
    ([frame("/x/torch/nn/parallel/distributed.py", "_ddp_init_helper"),
      frame("/x/torch/nn/parallel/distributed.py", "__init__")], "DDP's buckets"),
    ([frame("/x/torch/nn/parallel/distributed.py", "_pre_forward"),
      frame("/x/torch/nn/parallel/distributed.py", "forward")], "DDP's buckets"),
    ([frame("/x/megatron/core/optimizer/distrib_optimizer.py", "__init__")], "optimizer"),
    ([frame("scan.py", "backward"), frame("/x/torch/autograd/function.py", "apply")], "backward"),
    ([frame("/x/torch/nn/modules/linear.py", "__init__"), frame("model.py", "__init__")], "parameters"),
    ([frame("/x/torch/nn/modules/module.py", "convert"), frame("/x/torch/nn/modules/module.py", "_apply")],
     "parameters"),
    ([frame("model.py", "__init__"), frame("train.py", "main")], "made in __init__"),
    ([frame("model.py", "__init__"), frame("model.py", "forward")], "forward"),
    ([frame("model.py", "forward"), frame("/x/torch/utils/checkpoint.py", "recompute"),
      frame("/x/torch/autograd/graph.py", "_engine_run_backward"), frame("/x/torch/_tensor.py", "backward")],
     "forward"),
    ([frame("C:\\torch\\autograd\\__init__.py", "backward"), frame("train.py", "main")], "backward")])
def test_a_stack_says_the_part(frames: list[dict[str, Any]], part: str) -> None:
    assert part_of(frames) == part


def told_of(tmp_path: Path, capsys: pytest.CaptureFixture[str], **found: Any) -> str:
    assert main(["show", str(saved(tmp_path / "memory.pickle", found))]) == 0
    return capsys.readouterr().out


def test_a_refused_request_is_told_and_why(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    blocks = [{"address": k, "size": 10**9, "requested_size": 10**9, "frames": [],
               "state": "active_allocated" if k % 2 else "inactive"} for k in range(6)]
    segments = [{"device": 1, "total_size": 6 * 10**9, "blocks": blocks}]
    refused = {"action": "oom", "size": 2 * 10**9, "device_free": 10**8, "frames": []}
    told = told_of(tmp_path, capsys, segments=segments, device_traces=[[], [refused]])
    assert "GPU 1: the allocator has 6 GB, of which tensors hold 3 GB; the largest free piece has 1 GB" in told
    assert ("2 GB were asked for while tensors held 3 GB and 100 MB were left on the GPU; more than that is free, but "
            "in pieces") in told
    since = {"action": "free_completed", "addr": 77, "size": 4 * 10**9, "frames": []}
    told = told_of(tmp_path, capsys, segments=segments, device_traces=[[], [refused, since]])
    assert "while tensors held 7 GB and" in told and "pieces" not in told, "it was freed after the request"
    whole = [{"address": 9, "size": 10**9, "requested_size": 1, "state": "active_allocated", "frames": []}]
    told = told_of(tmp_path, capsys, segments=[{"total_size": 10**9, "blocks": whole}], device_traces=[[refused]])
    assert "2 GB were asked for" in told and "pieces" not in told


def test_without_a_history_is_said_how_to_record_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    block = {"address": 1, "size": 512, "requested_size": 4, "state": "active_allocated", "frames": []}
    told = told_of(tmp_path, capsys, segments=[{"device": 0, "total_size": 512, "blocks": [block]}], device_traces=[[]])
    assert "_record_memory_history() before the model is built" in told and "at most" not in told


def test_a_snapshot_that_is_none_is_refused(tmp_path: Path, trained: tuple[Allocations, int]) -> None:
    for found, words in (({"segments": [], "device_traces": []}, "snapshot of no memory"),
                         ({"segments": [{"blocks": 1}]}, "no memory snapshot as torch writes it"),
                         ({"segments": exec}, "is neither a Flight")):
        with pytest.raises(DumpError, match=words):
            read_snapshot(saved(tmp_path / "memory.pickle", found))


def test_damaged_snapshots_are_refused_in_a_sentence(trained: tuple[Allocations, int], tmp_path: Path) -> None:
    seen = Allocations()
    seen.events, seen.live = trained[0].events[-20:], dict([*trained[0].live.items()][-5:])
    path = tmp_path / "memory.pickle"
    for data in damaged(pickle.dumps(seen.snapshot(PIECES)), seed=5):
        path.write_bytes(data)
        told, errors = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(told), contextlib.redirect_stderr(errors):
            status = main(["show", str(path)])
        assert status == 0 or (status == 2 and len(errors.getvalue().splitlines()) == 1)
