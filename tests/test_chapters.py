"""What a chapter shows, held against the package, against torch and against the formulas."""
from __future__ import annotations

import ast
import contextlib
import inspect
import io
import re
import warnings
from collections import Counter
from collections.abc import Callable
from types import ModuleType
from typing import Any

import nbformat
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.pipelining import (PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B,
                                          ScheduleZBVZeroBubble)
from torch.distributed.pipelining.schedules import get_schedule_class
from torch.distributed.tensor.parallel import (ColwiseParallel, PrepareModuleInput, RowwiseParallel, SequenceParallel,
                                               loss_parallel, parallelize_module)
from torch.nn.parallel import DistributedDataParallel

from book.collectives import parameter_server_all_reduce
from book.cost import Link, root_sent_bytes
from book.launch import launch
from book.parallel import context, data, experts, hybrid, pipeline, sharded, tensor
from book.replay import bubble
from book.schedule import Action, PipelineSchedule
from book.simulate import simulate, simulate_pipeline
from tests.website import ROOT


def cells(name: str, kind: str) -> list[str]:
    """The sources of a notebook's cells of one kind."""
    notebook = nbformat.read(ROOT / "chapters" / f"{name}.ipynb", as_version=4)
    return [cell.source for cell in notebook.cells if cell.cell_type == kind]


def definition(sources: list[str], name: str) -> ast.AST:
    """The class or function of this name, without docstrings, annotations and what checks its arguments."""
    nodes = [node for source in sources for node in ast.walk(ast.parse(source)) if getattr(node, "name", None) == name]
    for node in ast.walk(nodes[-1]):
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)):
            node.body = node.body[ast.get_docstring(node) is not None:]
        if isinstance(node, ast.FunctionDef):
            node.returns = None
            node.decorator_list = [at for at in node.decorator_list if not ast.unparse(at).startswith("checked_by(")]
        if isinstance(node, ast.arg):
            node.annotation = None
    return nodes[-1]


SHOWN = [("02_data_parallel", data, name) for name in ("BucketedDDP", "broadcast_state")]
SHOWN += [("04_sharded_data_parallel", sharded, name) for name in (
    "Unit", "Replicated", "Zero1", "Zero2", "Zero3")]
SHOWN += [("84_sharded_in_pytorch", sharded, "units_of")]
SHOWN += [("05_tensor_parallel", tensor, name) for name in (
    "mine", "by_columns", "by_rows", "IdentityThenAllReduce", "AllReduceThenIdentity", "identity_then_all_reduce",
    "all_reduce_then_identity", "shard", "ColumnParallelLinear", "RowParallelLinear", "first_of_shard",
    "VocabParallelEmbedding", "vocab_parallel_cross_entropy")]
SHOWN += [("85_tensor_in_pytorch", tensor, name) for name in (
    "AllGatherThenReduceScatter", "ReduceScatterThenAllGather")]

SHOWN += [("06_pipeline_parallel", pipeline, name) for name in (
    "Stage", "run_one_f_one_b")]
SHOWN += [("86_pipelines_in_pytorch", pipeline, name) for name in ("SplitStage", "run_pipeline")]
SHOWN += [("08_context_parallel", context, name) for name in (
    "Running", "scores_of", "by_group", "positions", "pass_on", "RingAttention")]
SHOWN += [("09_experts", experts, name) for name in (
    "Routing", "route", "RowExchange", "exchange_rows", "Trip", "dispatch", "work", "combine",
    "average_expert_gradients")]
SHOWN += [("07_hybrid_3d", hybrid, name) for name in (
    "axis_groups", "average_gradients", "micro_batches", "Hybrid", "clip_gradients")]


@pytest.mark.parametrize("chapter, package, name", SHOWN, ids=[name for *_, name in SHOWN])
def test_the_chapter_shows_the_packages_own_code(chapter: str, package: ModuleType, name: str) -> None:
    shown, kept = definition(cells(chapter, "code"), name), getattr(package, name)
    assert ast.unparse(shown) == ast.unparse(definition([inspect.getsource(kept)], name))


def test_every_argument_of_ddp_is_explained_with_its_default() -> None:
    page = "\n".join(cells("82_ddp_in_pytorch", "markdown"))
    terms = re.findall(r"^(`\w+.*)\n: ", page, flags=re.MULTILINE)
    named = dict(re.findall(r"`(\w+)(?:=(\w+))?`", ", ".join(terms)))
    signature = inspect.signature(DistributedDataParallel).parameters
    defaults = {name: "" if p.default is p.empty else str(p.default) for name, p in signature.items()}
    assert named == defaults


def bare(signature: inspect.Signature) -> str:
    """A signature without its annotations."""
    plain = [p.replace(annotation=p.empty) for p in signature.parameters.values()]
    return str(signature.replace(parameters=plain, return_annotation=signature.empty))


@pytest.mark.parametrize("call", [
    init_device_mesh, parallelize_module, ColwiseParallel, RowwiseParallel, SequenceParallel, PrepareModuleInput,
    loss_parallel], ids=lambda call: call.__name__)
def test_every_argument_of_torchs_tensor_parallelism_is_named_with_its_default(call: Callable[..., Any]) -> None:
    page = "\n".join(cells("85_tensor_in_pytorch", "markdown"))
    assert f"\n`{call.__name__}{bare(inspect.signature(call))}`\n: " in page


def test_every_argument_of_torchs_mesh_is_explained_with_its_default() -> None:
    page = "\n".join(cells("87_hybrid_pytorch", "markdown"))
    signature = inspect.signature(init_device_mesh)
    assert f"\n`init_device_mesh{bare(signature)}`\n: " in page
    for p in signature.parameters.values():
        assert f"\n`{p.replace(annotation=p.empty)}`\n: " in page, p.name


def test_every_argument_of_torchs_pipelining_is_explained_with_its_default() -> None:
    page = "\n".join(cells("86_pipelines_in_pytorch", "markdown"))
    terms = re.findall(r"^(`\w+.*)\n: ", page, flags=re.MULTILINE)
    named = re.findall(r"`(\w+(?:=\w+)?)`", ", ".join(terms))
    signatures = [inspect.signature(call).parameters.values() for call in (
        PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B, ScheduleZBVZeroBubble)]
    assert set(named) == {str(p.replace(annotation=p.empty)) for parameters in signatures for p in parameters}
    assert len(named) == len(set(named))


def order_by_torch(name: str, of_rank_0: list[int], num_stages: int, num_micro_batches: int) -> PipelineSchedule:
    """An order of torch's, the two halves of each pair one after the other."""
    import torch.testing._internal.distributed.fake_pg  # registers the backend "fake"

    dist.init_process_group("fake", rank=0, world_size=num_stages // len(of_rank_0))
    try:
        stages = [PipelineStage(nn.Linear(1, 1), number, num_stages, torch.device("cpu")) for number in of_rank_0]
        ranks = get_schedule_class(name)(stages, num_micro_batches, loss_fn=nn.functional.mse_loss).pipeline_order
    finally:
        dist.destroy_process_group()
    kinds = {"FORWARD": "F", "FULL_BACKWARD": "B", "BACKWARD_INPUT": "I", "BACKWARD_WEIGHT": "W"}
    return PipelineSchedule(name, num_stages, num_micro_batches, [
        Action(rank, one.stage_index, one.microbatch_index, kinds[one.computation_type.name])
        for rank, actions in ranks.items() for both in filter(None, actions) for one in both.sub_actions or [both]])


@pytest.mark.slow
@pytest.mark.parametrize(("row", "name", "stages", "share", "held"), [
    ("ZB-H1", "InterleavedZeroBubble", [0], 0.111, "$p$ on every rank"),
    ("ZB-V", "ZBVZeroBubble", [0, 7], 0.059, "$p$ on every rank"),
    ("DualPipeV", "DualPipeV", [0, 7], None, r"$p+\frac12$ on every rank")])
def test_the_table_of_split_backwards_has_what_torchs_orders_have(
        row: str, name: str, stages: list[int], share: float | None, held: str) -> None:
    num_each = len(stages)
    order = order_by_torch(name, stages, 4 * num_each, 8).check()
    (line,) = [line for line in "\n".join(cells("86_pipelines_in_pytorch", "markdown")).splitlines()
               if line.startswith(f"| {row} ")]
    most = 4.5 if "frac" in held else 4
    assert [peak / num_each for peak in order.peak_in_flight()] == [most] * 4 and line.endswith(f"| {held} |")
    if share:
        found = bubble(simulate_pipeline(order, 1 / num_each, 2 / num_each))
        assert round(found.share, 3) == share and f"| {share} |" in line


@pytest.mark.parametrize("name", ["float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2"])
def test_the_table_of_number_formats_has_torchs_numbers(name: str) -> None:
    found = torch.finfo(getattr(torch, name))
    (line,) = re.findall(rf"^\| [^|]*, `{name}` (\|.*)$", (ROOT / "chapters/98_symbols.md").read_text("utf-8"), re.M)
    bits, exponent, fraction, largest, step, *_ = (text.strip() for text in line.strip("|").split("|"))
    assert int(bits) == found.bits == 1 + int(exponent) + int(fraction) and found.eps == 2.0 ** -int(fraction)
    for text, exact in ((largest, found.max), (step, found.eps)):
        ten = text.translate(str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻", "0123456789-")).replace(" · 10", "e").replace(",", "")
        assert float(ten) in (exact, float(f"{exact:.1e}"))


def test_every_argument_of_torchs_sharding_is_explained_with_its_default() -> None:
    page = "\n".join(cells("84_sharded_in_pytorch", "markdown"))
    terms = re.findall(r"^(`[\w*]+.*)\n: ", page, flags=re.MULTILINE)
    named = [name.strip("*") for name in re.findall(r"`([^`]+)`", ", ".join(terms))]
    signatures = [inspect.signature(call).parameters.values() for call in (
        ZeroRedundancyOptimizer, fully_shard, MixedPrecisionPolicy, CPUOffloadPolicy)]
    written = {p.name if p.default is p.empty else f"{p.name}={default(p.default)}" for ps in signatures for p in ps}
    assert set(named) == written and len(named) == len(written)


def default(value: Any) -> str:
    """A default as a call writes it: a policy whose fields are all as they are by default has none."""
    return f"{type(value).__name__}()" if "Policy" in type(value).__name__ and value == type(value)() else str(value)


def test_an_optimizer_of_whole_matrices_refuses_a_flat_shard() -> None:
    with pytest.raises(ValueError, match="2D"):
        torch.optim.Muon([nn.Parameter(torch.zeros(8))])


def data_parallel_by_threads() -> dict[str, Any]:
    """What the page's cells define up to the one that counts the threads' traffic."""
    namespace: dict[str, Any] = {}
    for source in cells("96_old_data_parallel", "code"):
        with contextlib.redirect_stdout(io.StringIO()):
            exec(source, namespace)
        if "def traffic(" in source:
            return namespace
    raise AssertionError("no cell of the page counts the traffic of the threads")


def test_threads_send_what_a_star_sends_on_every_link() -> None:
    chapter = data_parallel_by_threads()
    num_bytes = chapter["num_bytes"]
    for num_replicas in (2, 3, 5, 8):
        counted: Counter[tuple[int, int]] = Counter()
        for what, src, dst, tensor_bytes in chapter["traffic"](num_replicas):
            if "parameters" in what:
                counted[src, dst] += tensor_bytes
        star = simulate(parameter_server_all_reduce(num_replicas), num_bytes, Link(0.0, 1.0))
        planned: Counter[tuple[int, int]] = Counter()
        for event in star.of_kind("send"):
            planned[event.rank, event.peer] += event.num_bytes
        assert counted == pytest.approx(planned)
        assert sum(counted[0, r] for r in range(num_replicas)) == root_sent_bytes(num_replicas, num_bytes)


def outside_of(num_groups: int) -> list[str]:
    """In rank 3, which is in none of the groups: what each call in the first one does."""
    dist.init_process_group("gloo")
    first, *_ = [dist.new_group(ranks) for ranks in ([0, 1], [0, 2])[:num_groups]]
    x, did = torch.ones(1), []
    for call in (lambda: dist.send(x, 1, group=first), lambda: dist.broadcast(x, 1, group=first),
                 lambda: dist.reduce(x, 1, group=first), lambda: dist.scatter(x, None, 1, group=first),
                 lambda: dist.isend(x, 1, group=first), lambda: dist.all_reduce(x, group=first)):
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            try:
                call() if dist.get_rank() == 3 else None
                did.append("warns" if told else "nothing")
            except ValueError:
                did.append("raises")
    return did


@pytest.mark.slow
def test_outside_a_group_only_send_always_raises() -> None:
    """What broadcast, reduce, scatter and isend do there depends on whether there is another such group."""
    assert launch(outside_of, 4, 1, check_calls=False)[3] == ["raises", *["warns"] * 5]
    assert launch(outside_of, 4, 2, check_calls=False)[3] == [*["raises"] * 5, "warns"]


def reshards_as() -> dict[int, str]:
    """In a rank: what `reshard_after_forward` makes of 1, 2 and 4 ranks."""
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (4,))
    found = {}
    for number in (1, 2, 4):
        module = nn.Linear(8, 8)
        fully_shard(module, mesh=mesh, reshard_after_forward=number)
        into = module._get_fsdp_state()._fsdp_param_group.post_forward_mesh_info
        found[number] = "False" if into is None else f"over {into.shard_mesh_size}"
    return found


@pytest.mark.slow
def test_fully_shard_takes_1_as_false_and_all_ranks_as_true() -> None:
    assert launch(reshards_as, 4)[0] == {1: "False", 2: "over 2", 4: "over 4"}
