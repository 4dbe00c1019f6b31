"""L1: what a plan says where nothing fits: the cause, how many GPUs are enough, and the cheapest changes that help."""
from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import islice

from book.cost.cluster import Cluster
from book.cost.layouts import Layout
from book.cost.machines import MACHINES
from book.cost.question import LONG, MOST_CP, Question
from book.cost.search import Search, search, usable_bytes
from book.cost.step import Estimate, estimates, frozen_bytes
from book.cost.transformer import Transformer
from book.cost.tuning import FULL, Tuning

MOST_GPUS, FEWEST_TOKENS, NUM_CHANGES = 1 << 17, 512, 2


def refusal(question: Question, found: Search) -> str:
    """Why no layout of a search may be chosen, and what works: each number and change here was searched."""
    lines = [*_cause(question, found), *_enough(question)]
    made = list(islice(_changes(question), NUM_CHANGES))
    lines += [f"change   {words}" for words in made] or [
        "change   no other batch, shorter sequence or GPU by name makes it fit"]
    return "\n".join(lines)


def fits(question: Question) -> bool:
    """Whether a plan could answer: quick, for only the smallest layouts are searched."""
    return bool(question.search(smallest=True).fits.any())


def _cause(question: Question, found: Search) -> Iterator[str]:
    """The message of the search itself, and what it comes from: a rule, the search's bounds, memory, or division."""
    cluster, memory = found.cluster, found.estimates.array("memory_bytes")
    if not len(found):
        yield found.nothing_fits()
        yield "cause    a rule: dp divides the sequences of a step, tp the heads, and pp the layers, but for two"
        return
    least = int(memory.argmin())
    if (memory <= found.usable).any():
        cut = "weights in 4 bits cut by tp or pp, or " * (question.tuning.train == "qlora")
        yield (f"none of {len(found)} layouts may be chosen: {int((memory <= found.usable).sum())} would fit, "
               f"all with {cut}ZeRO-2 or 3 in a pipeline")
        yield (f"cause    a rule: {'weights in 4 bits are sharded by ZeRO alone, and ' * bool(cut)}too few measured "
               "steps test ZeRO-2 and 3 in pipelines")
        return
    yield found.nothing_fits()
    yield "cause    memory: " + _parts(found.estimates[least], found.layouts[least], question)
    yield f"         in the smallest layout, {found.layouts[least]}"
    wide = search(question.model, cluster, found.global_batch, question.tuning.each, most_ep=question.gpus,
                  most_cp=question.gpus if question.model.num_tokens >= LONG else 1, smallest=True,
                  tuning=question.tuning)
    if wide.fits.any():
        yield (f"         tp stays inside a node here, and cp is at most {MOST_CP}: beyond these rules "
               f"{wide.layouts[wide.best]} would fit")


def _parts(cost: Estimate, layout: Layout, question: Question) -> str:
    """The parts of what a layout holds, the largest first."""
    billions, tuning = question.model.num_parameters / 1e9, question.tuning
    num_bytes = tuning.each.held(layout.zero_stage).total
    each = f"{num_bytes:.3g} bytes for each of {billions:.3g} billion parameters"
    if tuning.freezes:
        trained = tuning.trained_parameters(question.model) / 1e9
        each = f"{num_bytes:.3g} bytes for each of {trained:.3g} billion trained parameters, of {billions:.3g}"
    state = f"of state (in all {each})"
    held = ((cost.state_bytes, state), (cost.activation_bytes, "of activations"),
            (cost.gathered_bytes, "temporary buffers (what ZeRO gathers, one layer at work, workspaces)"))
    return ", ".join(f"{part_bytes / 1e9:.1f} GB {words}" for part_bytes, words in sorted(held, reverse=True))


def _enough(question: Question) -> Iterator[str]:
    """The fewest GPUs of this kind that are enough, and if there are such, the most that are fewer."""
    node, name, more = question.cluster.gpus_per_node, question.gpu_name, _fewest(question, question.gpus)
    fewer = next((count for count in reversed(_counts(node)) if count < question.gpus and _works(question, count)), 0)
    if more:
        nodes = f" ({more // node} nodes)" if more > node and not more % node else ""
        yield f"enough   {more:,} {name}{nodes}" + (f"; {fewer:,} also work" if fewer else " are the fewest that work")
    elif fewer:
        yield f"enough   {fewer:,} {name}; none that are more"
    else:
        yield f"enough   no number of {name} up to {MOST_GPUS:,}: powers of two inside a node, and whole nodes"


def _counts(node: int) -> list[int]:
    """Numbers of GPUs that people have: powers of two inside a node, one to eight nodes, and these doubled on."""
    inside = [1 << k for k in range(node.bit_length()) if 1 << k < node]
    nodes = {node * few << k for few in range(1, 9) for k in range(18) if node * few << k <= MOST_GPUS}
    return [*inside, *sorted(nodes)]


def _fewest(question: Question, above: int) -> int:
    """The fewest GPUs, more than `above`, on which it fits; 0 if there are none up to MOST_GPUS."""
    node = question.cluster.gpus_per_node
    more = next((count for count in _counts(node) if count > above and _works(question, count)), 0)
    before = [count for count in range(more - node, above, -node) if count > more * 3 // 4]
    return min([more, *(count for count in before if _works(question, count))])


def _works(question: Question, num_gpus: int) -> bool:
    """Whether it fits on so many GPUs: not if the state, shared out over all, would not."""
    least = question.tuning.state_bytes(question.model) / num_gpus
    room = question.cluster.memory_bytes if question.tuning.freezes else question.cluster.usable_bytes
    return bool(least < room) and fits(replace(question, gpus=num_gpus))


def _changes(question: Question) -> Iterator[str]:
    """What else makes it fit, cheapest first: a rule, the batch, the sequence, the GPU."""
    stages = (0, 1, 2, 3)
    if not question.zero_stages and fits(replace(question, zero_stages=stages)):
        yield "--zero 0,1,2,3: sharded gradients and parameters in pipelines too, which few measured steps test"
    for batch in (replace(question, batch=0).global_batch, question.gpus):
        if batch != question.global_batch and fits(replace(question, batch=batch)):
            yield f"--batch {batch}: a step of {batch:,} sequences"
            break
    shorter = replace(question, model=replace(question.model, num_tokens=question.model.num_tokens // 2))
    while shorter.model.num_tokens >= FEWEST_TOKENS:
        if fits(shorter):
            yield f"--sequence {shorter.model.num_tokens}: sequences of {shorter.model.num_tokens:,} tokens"
            break
        shorter = replace(shorter, model=replace(shorter.model, num_tokens=shorter.model.num_tokens // 2))
    yield from _smaller(question)
    yield from _in_4_bits(question)
    yield from _other_gpus(question)


def _other_gpus(question: Question) -> Iterator[str]:
    """GPUs with more memory: as many, the smallest first, and else the fewest of those that have most."""
    larger = [name for name, machine in sorted(MACHINES.items(), key=lambda pair: pair[1].memory_bytes)
              if machine.memory_bytes > question.cluster.memory_bytes
              and (question.precision == "bf16" or machine.fp8_flops_per_s)]
    last = 0.0
    for name in larger:
        num_bytes = MACHINES[name].memory_bytes
        if num_bytes > last and fits(replace(question, gpu=name)):
            last = num_bytes
            yield f"--gpu {name}: {question.gpus:,} {name.upper()}, with {num_bytes / 1e9:.0f} GB each"
    fewest = [(_fewest(replace(question, gpu=name), question.gpus), name) for name in larger[-3:]]
    for count, name in sorted(pair for pair in fewest if pair[0])[:1]:
        num_bytes = MACHINES[name].memory_bytes
        yield f"--gpu {name} --gpus {count}: {count:,} {name.upper()}, with {num_bytes / 1e9:.0f} GB each"


def _in_4_bits(question: Question) -> Iterator[str]:
    """Of adapters beside matrices in 16 bits, where 4 bits help but are not enough: these on the fewest GPUs."""
    if question.tuning.train != "lora":
        return
    other = replace(question, tuning=replace(question.tuning, train="qlora"))
    enough = 0 if fits(other) else _fewest(other, question.gpus)
    if enough and enough < (_fewest(question, question.gpus) or MOST_GPUS):
        yield f"--train qlora --gpus {enough}: the matrices frozen in 4 bits, on {enough:,} {question.gpu_name}"


def _smaller(question: Question) -> Iterator[str]:
    """Smaller state: kept by the host, or an optimizer with less; and adapters alone, frozen in as many bits as fit."""
    tuning, model = question.tuning, question.model
    trained, adapters = {}, {}
    if not tuning.adapts:
        trained["--offload optimizer: its state in the host's memory"] = replace(tuning, offload="optimizer")
        trained["--optimizer adam8bit: two bytes of it for a parameter, and no parameters in 32 bits"] = replace(
            tuning, optimizer="adam8bit")
    if tuning.train != "qlora" and not (tuning.frozen_layers or model.experts or model.latent):
        adapters["--train lora: adapters alone, everything else frozen"] = replace(tuning, train="lora")
        adapters["--train qlora: adapters alone, the matrices frozen in 4 bits"] = replace(tuning, train="qlora")
    for ways in (trained, adapters):
        yield from islice((words for words, other in ways.items()
                           if other != tuning and fits(replace(question, tuning=other))), 1)


def other_layouts(model: Transformer, cluster: Cluster, layout: Layout, batch: int,
                  tuning: Tuning = FULL) -> Iterator[str]:
    """The two fastest layouts that fit where one does not, and differ in what they recompute, shard or batch."""
    known = (1, 2, 3) if layout.pp == 1 else (1,)
    stages = {layout.zero_stage, *known} if layout.dp * layout.cp > 1 else {layout.zero_stage}
    others = [replace(layout, recompute=how, zero_stage=stage, micro_batch_size=size,
                      replicas=layout.replicas if stage > 1 else 1)
              for how in dict.fromkeys((layout.recompute, "half", "full"))
              for size in {layout.micro_batch_size, 1} for stage in stages]
    found = estimates(model, cluster, others, batch, tuning.each, uneven=True, tuning=tuning)
    usable = usable_bytes(cluster, frozen_bytes(model, cluster, others, batch, tuning))
    order = [int(k) for k in found.array("step_s").argsort() if found[int(k)].memory_bytes <= usable[k]]
    for k in order[:NUM_CHANGES]:
        yield f"change   {found[k].memory_bytes / 1e9:.1f} GB, {found[k].step_s:.2f} s: {others[k]}"
    if not order:
        yield "change   recomputing, sharding or cutting micro-batches is not enough: `plan` searches all layouts"
