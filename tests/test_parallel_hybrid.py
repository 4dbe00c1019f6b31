"""All axes on eight real ranks with different seeds: equal to one process, in every layout, and torch's too."""
from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from book.cost import LayerShape, bytes_by_axis, flows, hybrid_sent_bytes
from book.launch import RankError, launch, rank_device
from book.mesh import WITH_CONTEXT, Mesh, MeshError
from book.parallel import GPT, GPTConfig, broadcast_state
from book.parallel.axes import FiveAxes, with_experts
from book.parallel.context import gathered_attention, positions, ring_attention, ulysses_attention
from book.parallel.experts import bytes_sent
from book.parallel.hybrid import Hybrid, clip_gradients
from book.parallel.stage import GPTStage
from book.parallel.tensor import split_gpt
from book.parallel.weights import (VERSION_BYTES, TornError, WeightPiece, WeightReceiver, WeightSender, agreed_cuts,
                                   buckets, message_bytes, pieces, spans)
from book.record import paused
from tests.by_value import sent_by_value
from tests.hybrid import (CONFIG, LAYOUTS, LEARNING_RATE, MIXED, NUM_MICRO_BATCHES, NUM_STEPS, adamw, alone, batch,
                          expected_piece, mean_losses, mesh_of, trained)

sent_by_value(__name__)

CUBE = (2, 2, 2)


def apart(layout, num_steps=NUM_STEPS, zero_stage=0, dtype=torch.float64):
    """The largest differences from one process, of a step's loss and of a final weight, and the number of weights."""
    run, (losses, weights) = trained(layout, num_steps, zero_stage, dtype), alone(num_steps, dtype)
    found, names = [], set()
    for rank, part in enumerate(run):
        place = mesh_of(layout).coordinates(rank)["tp"]
        for name, weight in part.weights.items():
            expected = expected_piece(weights, name, part.cut[name], place, layout[2])
            found.append((weight - expected).abs().max().item())
            names.add(name)
    off = [abs(got - expected) for got, expected in zip(mean_losses(run, layout), losses, strict=True)]
    assert len({part.drawn for part in run}) == 8, "each rank has drawn its own weights"
    assert losses[-1] < losses[0]
    return max(off), max(found, default=None), names


@pytest.mark.slow
@pytest.mark.parametrize("layout", MIXED)
def test_every_layout_of_eight_trains_like_one_process(layout):
    loss, weight, names = apart(layout)
    assert loss < 1e-12 and weight < 1e-12
    assert names == {name for name, _ in GPT(CONFIG).named_parameters()}


def test_there_are_ten_layouts_of_eight():
    assert len(set(LAYOUTS)) == len(LAYOUTS) == 10 and all(pp * dp * tp == 8 for pp, dp, tp in LAYOUTS)


@pytest.mark.slow
def test_twenty_steps_in_float32_match_one_process_within_two_gigabytes():
    loss, weight, _ = apart(CUBE, 20, dtype=torch.float32)
    # Sums are computed in a different order, and CPU types round them differently: 1.6e-5 on one of them.
    assert loss < 1e-4 and weight < 1e-4
    assert sum(part.pss_kb for part in trained(CUBE, 20, 0, torch.float32)) < 2e6


@pytest.mark.slow
@pytest.mark.parametrize("zero_stage", [*(pytest.param(stage, marks=pytest.mark.slow) for stage in (1, 2)), 3])
def test_state_sharded_over_dp_changes_nothing(zero_stage):
    loss, weight, _ = apart(CUBE, zero_stage=zero_stage)
    assert loss < 1e-12 and (zero_stage == 3 or weight < 1e-12)


MAX_NORMS = (100.0, 0.01)  # the first one changes nothing


def clipped(layout):
    """In a rank: the norms that it finds, its gradients after clipping to each of `MAX_NORMS`, and their cuts."""
    device = rank_device()
    dist.init_process_group()
    hybrid = Hybrid(GPT(CONFIG).to(device), mesh_of(layout), NUM_MICRO_BATCHES, adamw)
    hybrid.gradients(*(tensor.to(device) for tensor in batch(0)))
    parts, found = dict(hybrid.module.model.named_parameters()), []
    for max_norm in MAX_NORMS:
        norm = clip_gradients(hybrid.module.parameters(), hybrid.groups, max_norm).item()
        found.append((norm, {name: p.grad.clone().cpu() for name, p in parts.items()}))
    return found, {name: getattr(p, "shard_dim", None) for name, p in parts.items()}


@pytest.mark.slow
@pytest.mark.parametrize("layout", [CUBE, pytest.param((1, 2, 4), marks=pytest.mark.slow)], ids=str)
def test_clipping_counts_every_gradient_of_the_model_once(layout):
    gpt = launch(partial(GPT, CONFIG), 1)[0]
    GPT.loss(gpt(batch(0)[0]), batch(0)[1]).backward()
    run = launch(clipped, 8, layout)
    for number, max_norm in enumerate(MAX_NORMS):
        expected = torch.nn.utils.clip_grad_norm_(gpt.parameters(), max_norm).item()
        whole = {name: p.grad for name, p in gpt.named_parameters()}
        assert 0.01 < expected < 100
        for rank, (found, cut) in enumerate(run):
            norm, gradients = found[number]
            assert norm == pytest.approx(expected, rel=1e-12)
            place = mesh_of(layout).coordinates(rank)["tp"]
            for name, gradient in gradients.items():
                torch.testing.assert_close(gradient, expected_piece(whole, name, cut[name], place, layout[2]),
                                           rtol=1e-9, atol=1e-15)


BLOCK = {**{f"attention.{name}": ColwiseParallel() for name in "qkv"}, "attention.out": RowwiseParallel(),
         "mlp.up": ColwiseParallel(), "mlp.down": RowwiseParallel()}


def by_torch(num_steps):
    """In a rank: fully_shard, Schedule1F1B and parallelize_module on one DeviceMesh; the last stage's losses."""
    device = rank_device()
    dist.init_process_group()
    mesh = init_device_mesh(device.type, CUBE, mesh_dim_names=("pp", "dp", "tp"))
    stage, replica = mesh["pp"].get_local_rank(), mesh["dp"].get_local_rank()
    gpt = GPT(CONFIG).to(device)
    broadcast_state(gpt)
    module = GPTStage(gpt, stage, 2)
    for block in gpt.blocks[module.first:module.last]:
        parallelize_module(block, mesh["tp"], BLOCK)
        fully_shard(block, mesh=mesh["dp"])
    fully_shard(module, mesh=mesh["dp"])
    pipeline = Schedule1F1B(PipelineStage(module, stage, 2, device, group=mesh["pp"].get_group()), NUM_MICRO_BATCHES,
                            loss_fn=GPT.loss)
    # One model has parameters on (dp, tp) and others on dp alone, which foreach can't mix.
    optimizer = torch.optim.AdamW(module.parameters(), lr=LEARNING_RATE, foreach=False)
    found = []
    for step in range(num_steps):
        inputs, targets = (tensor.to(device).chunk(2)[replica] for tensor in batch(step))
        losses = []
        pipeline.step(*([] if stage else [inputs]), target=targets if stage else None, losses=losses if stage else None)
        optimizer.step()
        optimizer.zero_grad()
        if stage:
            found.append(torch.stack(losses).mean().item())
    return found


@pytest.mark.slow
def test_torchs_own_combination_on_one_device_mesh_equals_one_process_too():
    run, (losses, _) = launch(by_torch, 8, NUM_STEPS), alone()
    mesh = mesh_of(CUBE)
    ranks = [mesh.rank_at(pp=1, dp=replica, tp=0) for replica in range(2)]
    found = torch.tensor([run[rank] for rank in ranks], dtype=torch.float64).mean(0).tolist()
    assert found == pytest.approx(losses, abs=1e-10)


def refused(layout, config):
    dist.init_process_group()
    hybrid = Hybrid(GPT(config), mesh_of(layout), NUM_MICRO_BATCHES, adamw)
    hybrid.step(*(tensor[:6] for tensor in batch(0)))


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "error", "words"), [
    ((1, 2, 1), ValueError, "6 sequences can't be divided among 2 replicas"), ((2, 2, 1), MeshError, "has 4 ranks")],
    ids=str)
def test_a_layout_that_does_not_divide_the_model_is_refused(layout, error, words):
    with pytest.raises(RankError, match=words) as caught:
        launch(refused, 2, layout, copy.deepcopy(CONFIG))
    assert isinstance(caught.value.__cause__, error)


def test_other_axes_and_invalid_zero_stages_are_refused_before_anything_is_sent():
    """There is no process group here, so anything that sends raises a different error."""
    for axes in (("pp", "dp"), ("pp", "dp", "cp"), ("pp", "dp", "tp", "cp")):
        with pytest.raises(MeshError, match="needs a mesh of pp, dp, tp"):
            Hybrid(GPT(CONFIG), Mesh(axes, (1,) * len(axes)), NUM_MICRO_BATCHES, make_optimizer=adamw)
    for zero_stage in (-1, 4):
        with pytest.raises(ValueError, match=f"no ZeRO stage {zero_stage}"):
            Hybrid(GPT(CONFIG), mesh_of((1, 1, 1)), NUM_MICRO_BATCHES, adamw, zero_stage)


def clipped_without_gradients(zero_stage):
    device = rank_device()
    dist.init_process_group()
    hybrid = Hybrid(GPT(CONFIG).to(device), mesh_of((1, 2, 1)), NUM_MICRO_BATCHES, adamw, zero_stage)
    if zero_stage:
        hybrid.gradients(*(tensor.to(device) for tensor in batch(0)))
    clip_gradients(hybrid.module.parameters(), hybrid.groups, 1.0)


@pytest.mark.slow
@pytest.mark.parametrize("zero_stage", [0, pytest.param(2, marks=pytest.mark.slow), 3])
def test_clipping_without_gradients_raises_an_error(zero_stage):
    with pytest.raises(RankError, match="no parameter has a gradient") as caught:
        launch(clipped_without_gradients, 2, zero_stage)
    assert isinstance(caught.value.__cause__, ValueError)


# Sequences cut over cp, experts folded over dp and cp
LONG = GPTConfig(vocab_size=16, context=8, num_layers=2, num_heads=4, width=8, dtype=torch.float64)
NUM_LONG, MICRO_BATCHES, NUM_EXPERTS, TOP_K = 8, 2, 8, 2


def long_batch(step):
    """Inputs and targets of a step, (B, T) each: a token's target is the next one, also where the sequence is cut."""
    tokens = torch.randint(LONG.vocab_size, (NUM_LONG, LONG.context + 1), generator=torch.Generator().manual_seed(step))
    return tokens[:, :-1], tokens[:, 1:]


def long_model(seed, ep, device):
    """A model of this seed, with experts if they are shared."""
    gpt = GPT.seeded(LONG, seed)
    return (with_experts(gpt, NUM_EXPERTS, TOP_K, seed) if ep else gpt).to(device)


def part_of(whole, name, mine, mesh, place, ep):
    """What a rank should hold of a weight of the whole model."""
    if name.endswith(("layer.up", "layer.down")):
        return whole.chunk(ep)[(place["dp"] * mesh.size("cp") + place["cp"]) % ep]
    cut = getattr(mine, "shard_dim", None)
    return whole if cut is None else whole.tensor_split(mesh.size("tp"), cut)[place["tp"]]


def on_five_axes(sizes, ep=None, zero_stage=0, attention=ring_attention, num_steps=NUM_STEPS):
    """In a rank: how far its losses and weights are at most from one process; the choices of experts of each step and
    layer, of the whole batch; the bytes of its weights that are averaged over all replicas."""
    device, mesh = rank_device(), Mesh(WITH_CONTEXT, sizes)
    place, rank = mesh.coordinates(dist.get_rank()), dist.get_rank()
    with paused():
        mine = FiveAxes(long_model(rank, ep, device), mesh, MICRO_BATCHES, adamw, zero_stage, ep, attention)
    alone, worst, chosen = long_model(0, ep, device), [], []
    optimizer = adamw(alone.parameters())
    for step in range(num_steps):
        inputs, targets = (tensor.to(device) for tensor in long_batch(step))
        found, wanted = mine.step(inputs, targets), alone.loss(alone(inputs), targets)
        wanted.backward()
        optimizer.step()
        optimizer.zero_grad()
        chosen.append([block.mlp.layer.routing.choices.cpu() for block in alone.blocks] if ep else [])
        with paused():  # the mean over dp and cp, where each tp rank of the last stage has the same
            total = torch.zeros(1, dtype=torch.float64, device=device) if found is None else found.view(1)
            dist.all_reduce(total)
        worst.append(abs(total.item() / (sizes[1] * sizes[2] * sizes[3]) - wanted.item()))
    theirs, averaged = dict(alone.named_parameters()), 0
    for name, weight in mine.module.model.named_parameters():
        expected = part_of(theirs[name], name, weight, mesh, place, ep)
        worst.append((weight - expected).abs().max().item())
        averaged += 0 if name.endswith(("layer.up", "layer.down")) else weight.nbytes
    return max(worst), chosen, averaged


def recorded_on_five_axes(sizes, ep):
    dist.init_process_group()
    return on_five_axes(sizes, ep)


def rows_between(choices, sizes, ep):
    """How many rows each of the dp · cp ranks sends to each of its ep group, and which group that is, by its ranks."""
    dp, cp = sizes[1:3]
    owner = torch.empty(NUM_LONG, LONG.context, dtype=torch.long)
    for replica in range(dp):
        for place in range(cp):
            own = positions(place, cp, LONG.context)
            owner.chunk(dp)[replica][:, own] = replica * cp + place
    expert_at = choices // (NUM_EXPERTS // ep)
    return [[int((expert_at[owner.flatten() == source] == to).sum()) for to in range(ep)] for source in range(dp * cp)]


def expert_bytes(chosen, sizes, ep, rank):
    """What a rank sends to other ranks of its ep group for one layer in one step: rows, and how many come."""
    rows, own = rows_between(chosen, sizes, ep), rank // sizes[3] % (sizes[1] * sizes[2])
    first = own // ep * ep
    take = [rows[first + other][own - first] for other in range(ep)]
    counts = MICRO_BATCHES * NUM_EXPERTS * 8 * (ep - 1) / ep
    return sum(bytes_sent(rows[own], take, own - first, LONG.width * 8)) + counts


@pytest.mark.slow
@pytest.mark.parametrize(("sizes", "ep"), [((1, 2, 2, 2), None), ((2, 2, 2, 1), 4)], ids=str)
def test_five_axes_train_like_one_process_and_send_what_the_formulas_say(sizes, ep):
    run, mesh = launch(recorded_on_five_axes, 8, sizes, ep, record=True), Mesh(WITH_CONTEXT, sizes)
    found = bytes_by_axis(flows(run.trace, mesh), 8)
    layer = LayerShape(NUM_LONG // sizes[1] // MICRO_BATCHES, LONG.context // sizes[2], LONG.width, LONG.num_heads)
    for rank, (worst, chosen, averaged) in enumerate(run):
        assert worst < 1e-12
        wanted = hybrid_sent_bytes(mesh, rank, layer, LONG.num_layers, MICRO_BATCHES, averaged, bytes_per_number=8)
        if ep:
            mine = range(LONG.num_layers)[mesh.coordinates(rank)["pp"]::sizes[0]]
            all_to_alls = sum(expert_bytes(chosen[step][k], sizes, ep, rank) for step in range(NUM_STEPS) for k in mine)
            wanted["dp+cp"] += all_to_alls / NUM_STEPS
        for axis, num_bytes in wanted.items():
            assert found.get(axis, [0.0] * 8)[rank] == pytest.approx(NUM_STEPS * num_bytes), (axis, rank)
    assert set(found) == {"dp+cp", *(axis for axis, size in zip(WITH_CONTEXT, sizes) if size > 1 and axis != "dp")}


def more_on_five_axes():
    """In a rank: the worst of further meshes and ways, one after the other."""
    dist.init_process_group()
    return [on_five_axes(sizes, num_steps=1, **options)[0] for sizes, options in (
        ((1, 2, 2, 2), {"ep": 2}), ((2, 1, 2, 2), {"attention": gathered_attention, "zero_stage": 1}),
        ((1, 1, 4, 2), {"ep": 2}), ((2, 2, 2, 1), {"attention": ulysses_attention}))]


@pytest.mark.slow
def test_copies_of_experts_and_other_ways_of_attention_train_like_one_process_too():
    for worst in launch(more_on_five_axes, 8):
        assert max(worst) < 1e-12


def test_what_can_not_be_folded_is_refused_before_anything_is_sent():
    """There is no process group here, so anything that sends raises a different error."""
    plain, mixed = GPT(LONG), with_experts(GPT(LONG), NUM_EXPERTS, TOP_K, 0)
    mesh = Mesh(WITH_CONTEXT, (1, 2, 2, 2))
    for gpt, on, options, error, words in (
            (plain, mesh_of(CUBE), {}, MeshError, "needs a mesh of pp, dp, cp, tp, not of pp, dp, tp"),
            (plain, mesh, {"ep": 2}, ValueError, "give it for a model with_experts"),
            (mixed, mesh, {}, ValueError, "give it for a model with_experts"),
            (mixed, mesh, {"ep": 3}, MeshError, "ep has to divide 4"),
            (mixed, mesh, {"ep": 2, "zero_stage": 1}, ValueError, "ZeRO is for models without experts")):
        with pytest.raises(error, match=words):
            FiveAxes(gpt, on, MICRO_BATCHES, adamw, **options)


# Weights from a trainer to generators
TRAINER, GENERATORS = (0, 1), ((2,), (3,))
VERSIONS = 3


def on_its_way(max_bytes, whole_config):
    """In a rank: the model, which ranks 0 and 1 have cut, and the plan; every rank draws from its own seed."""
    dist.init_process_group()
    with paused():
        gpt = GPT.seeded(whole_config, dist.get_rank()).to(rank_device())
        whole, group = dict(gpt.named_parameters()), dist.new_group(TRAINER)
        if dist.get_rank() in TRAINER:
            split_gpt(gpt, group)
        return gpt, buckets(pieces(whole, agreed_cuts(gpt, TRAINER[0]), TRAINER, GENERATORS), max_bytes)


def versions_sent(gpt, plan):
    """In a rank of the trainer: send versions 0 to 3, and return each."""
    sender, optimizer, found = WeightSender(gpt, plan), adamw(gpt.parameters()), []
    for version in range(VERSIONS + 1):
        if version:
            with paused():
                inputs, targets = (tensor.to(rank_device()) for tensor in batch(version - 1))
                gpt.loss(gpt(inputs), targets).backward()
                optimizer.step()
                optimizer.zero_grad()
        sender.send(version)
        found.append(weights_of(gpt))
    sender.wait()
    return found


def weights_of(gpt):
    return {name: p.detach().cpu().clone() for name, p in gpt.named_parameters()}


def transferred(max_bytes, config):
    """In a rank: each version; of a generator also what it holds after half of the buckets, and what it says of it.

    Generator 2 has two buffers, generator 3 has one.
    """
    gpt, plan = on_its_way(max_bytes, config)
    if dist.get_rank() in TRAINER:
        return plan, versions_sent(gpt, plan)
    receiver, whole, halfway = WeightReceiver(gpt, plan, double=dist.get_rank() == 2), [], []
    for _ in range(VERSIONS + 1):
        half = len(receiver.buckets) // 2
        for bucket in receiver.buckets[:half]:
            receiver.take(bucket)
        try:
            says = receiver.version
        except TornError as error:
            says = str(error)
        halfway.append((says, weights_of(gpt), receiver.of_tensors()))
        for bucket in receiver.buckets[half:]:
            receiver.take(bucket)
        whole.append((receiver.version, weights_of(gpt)))
    return whole, halfway


def a_version_comes_twice():
    """In a rank: what the receiver says and holds after half of a second version 5, which 5 and 6 have gone before."""
    dist.init_process_group()
    line = torch.nn.Linear(2, 2, dtype=torch.float64)
    plan = [(WeightPiece(name, None, len(p), 0, 0, 1, 0, p.nbytes),) for name, p in line.named_parameters()]
    if dist.get_rank() == 0:
        sender = WeightSender(line, plan)
        for number, version in enumerate((5, 6, 5)):
            with torch.no_grad():
                for p in line.parameters():
                    p.fill_(number)
            sender.send(version)
        return sender.wait()
    receiver = WeightReceiver(line, plan)
    receiver.receive()
    receiver.receive()
    receiver.take(receiver.buckets[0])
    halfway = receiver.version, *(p.unique().tolist() for p in line.parameters())
    receiver.take(receiver.buckets[1])
    return halfway, (receiver.version, *(p.unique().tolist() for p in line.parameters()))


@pytest.mark.slow
def test_a_version_that_comes_again_is_not_taken_for_the_one_before_the_last():
    _, (halfway, whole) = launch(a_version_comes_twice, 2)
    assert halfway == (6, [1.0], [1.0]) and whole == (5, [2.0], [2.0])


def test_a_dimension_with_fewer_elements_than_ranks_is_refused():
    with pytest.raises(ValueError, match="a dimension of 2 can't be cut for 3 ranks"):
        spans(2, 3)


def sent_alone(config):
    """Versions 0 to 3 of one process that starts from rank 0's weights."""
    gpt, found = GPT.seeded(config, 0), []
    optimizer = adamw(gpt.parameters())
    for version in range(VERSIONS + 1):
        if version:
            GPT.loss(gpt(batch(version - 1)[0]), batch(version - 1)[1]).backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append(weights_of(gpt))
    return found


ODD = GPTConfig(vocab_size=19, context=4, num_layers=2, num_heads=2, width=10, dtype=torch.float64)


@pytest.fixture(scope="module")
def transfer():
    return launch(transferred, 4, 3000, ODD, record=True)


@pytest.mark.slow
def test_a_generator_has_the_trainers_weights_bit_for_bit_and_those_of_one_process(transfer):
    alone_s = sent_alone(ODD)
    (plan, first), (_, second) = transfer[:2]
    cut = {piece.name: piece.dim for bucket in plan for piece in bucket}
    for whole, _ in transfer[2:]:
        for version, (says, weights) in enumerate(whole):
            assert says == version
            for name, weight in weights.items():
                parts = [first[version][name], second[version][name]]
                assert weight.equal(parts[0] if cut[name] is None else torch.cat(parts, cut[name])), name
                assert (weight - alone_s[version][name]).abs().max() < 1e-12
    moved = alone_s[0]["blocks.0.mlp.up.weight"] - alone_s[3]["blocks.0.mlp.up.weight"]
    assert moved.abs().max() > 1e-3


@pytest.mark.slow
def test_what_travels_is_the_plan_and_8_bytes_a_bucket(transfer):
    plan = transfer[0][0]
    whole_bytes = sum(weight.nbytes for weight in transfer[2][0][0][1].values())
    for dst in (2, 3):
        mine = [bucket for bucket in plan if bucket[0].dst == dst]
        got = [event.num_bytes for event in transfer.trace.events if event.kind == "send" and event.peer == dst]
        assert sum(got) == (VERSIONS + 1) * (whole_bytes + VERSION_BYTES * len(mine))
        assert sorted(got) == sorted(map(message_bytes, mine * (VERSIONS + 1)))
    alike = {src: sum(p.num_bytes for b in plan for p in b if p.dim is None and p.src == src) for src in TRAINER}
    assert alike[0] == alike[1], "what both ranks of the trainer hold is sent by one to each generator"


@pytest.mark.slow
def test_one_buffer_is_torn_halfway_and_says_so_and_two_are_not(transfer):
    for version in range(1, VERSIONS + 1):
        says, weights, _ = transfer[2][1][version]
        assert says == version - 1
        assert all(weight.equal(transfer[2][0][version - 1][1][name]) for name, weight in weights.items())
        says, weights, of_tensors = transfer[3][1][version]
        assert f"of the versions {version - 1}, {version}:" in says
        assert {frozenset(found) for found in of_tensors.values()} >= {frozenset([version - 1]), frozenset([version])}
        for name, found in of_tensors.items():
            for other in (version - 1, version):  # a tensor is another version's exactly where it says so
                same = weights[name].equal(transfer[3][0][other][1][name])
                assert same == (found == {other}), (name, other)
    assert transfer[2][1][0][0] is None and "versions 0, None" in transfer[3][1][0][0]


@pytest.mark.parametrize(("trainer", "generators"), [((0, 1), ((2,), (3,))), ((0, 1, 2), ((3, 4), (5,))),
                                                     ((0,), ((1, 2, 3),)), ((0, 1), ((2, 3), (4, 5), (6, 7, 8)))])
@pytest.mark.parametrize("max_bytes", [1, 500, 10**9])
def test_a_plan_brings_each_rank_its_part_exactly_once(trainer, generators, max_bytes):
    """Without processes: the tensors of the trainer's ranks are cut here, and pieces copied from one to another."""
    whole = {"a": torch.randn(7, 5), "b": torch.randn(5, 11), "c": torch.randn(3)}
    cuts = {"a": 0, "b": 1, "c": None}

    def held(ranks, place):
        return {name: t if cuts[name] is None else t.tensor_split(len(ranks), cuts[name])[place]
                for name, t in whole.items()}

    plan = buckets(pieces(whole, cuts, trainer, generators), max_bytes)
    for generator in generators:
        for place, dst in enumerate(generator):
            wanted = held(generator, place)
            found = {name: torch.zeros_like(tensor) for name, tensor in wanted.items()}
            for piece in (piece for bucket in plan for piece in bucket if piece.dst == dst):
                mine = held(trainer, trainer.index(piece.src))[piece.name]
                piece.place_in(found[piece.name]).add_(piece.sent_of(mine))
                assert piece.num_bytes == piece.sent_of(mine).nbytes
            assert all(found[name].equal(tensor) for name, tensor in wanted.items())
    for bucket in plan:
        assert len({(piece.src, piece.dst) for piece in bucket}) == 1
        assert len(bucket) == 1 or message_bytes(bucket) <= max_bytes + VERSION_BYTES
