"""L3, lab 9: a layout planned by hand: what a rank holds, what it sends, how long a step takes, which layout is best.

Every answer is one number or a dict of numbers; the tables hold the values that mistakes give, each with its sentence.
`config` has the sizes of the book's GPT, h its width, V its vocabulary, T its context; t is the size of tp. Numbers
have ITEM_BYTES.
"""
from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import product
from typing import Any

from book.checks.verdict import likeliest, number, refuse, require, short
from book.cost import Cluster, Estimate, Layout, StateBytes, Transformer

ITEM_BYTES = 4
HELD = ("parameters", "gradients", "optimizer", "activations")
SHARDED_FROM = {"parameters": 3, "gradients": 2, "optimizer": 1}
Mistakes = Iterator[tuple[float, str]]
Measure = Callable[[Layout], float]


# What a rank holds

def held_on_rank(got: Any, state: StateBytes, activation_bytes: float | None, config: Any, layout: Layout, stage: int,
                 num_micro_batches: int, numbers_kept: int = 2) -> float:
    """`got` must be the bytes that a rank of this stage was measured to hold; returns their sum.

    `activation_bytes` is None if they were not measured. The optimizer keeps `numbers_kept` numbers for each parameter.
    """
    require(isinstance(got, Mapping) and set(got) == set(HELD),
            f"held_bytes must return a dict with the bytes of {', '.join(HELD)}, not {got!r}")
    where = f"{layout}; stage {stage}: the number of bytes of "
    total = 0.0
    for name in SHARDED_FROM:
        want = getattr(state, name)
        words = "optimizer state" if name == "optimizer" else name
        mistakes = [*_shards(name, want, layout), *_state(name, want, config, layout, stage, numbers_kept)]
        if name == "gradients":
            mistakes.append((want * num_micro_batches, "the gradients of all micro-batches add up in the same memory"))
        total += number(where + words, got[name], want, mistakes)
    if activation_bytes is not None:
        total += number(where + "activations", got["activations"], activation_bytes,
                        _activations(activation_bytes, config, layout, stage, num_micro_batches))
    return total


def _shards(name: str, want: float, layout: Layout) -> Mistakes:
    """Mistakes in what ZeRO divides."""
    first, num = SHARDED_FROM[name], layout.dp
    if layout.zero_stage >= first:
        yield want * num / layout.num_gpus, "ZeRO shares them out over dp only, not over all GPUs"
        yield want * num, f"from ZeRO stage {first} on, a rank keeps only 1/{num} of them: the replicas share them out"
    else:
        yield want / num, f"that is 1/{num} of them, but replicas share them out only from ZeRO stage {first} on"


def _state(name: str, want: float, config: Any, layout: Layout, stage: int, numbers_kept: int) -> Mistakes:
    """Mistakes in how many parameters the rank has, and in how many bytes are kept for each."""
    each = ITEM_BYTES * (numbers_kept if name == "optimizer" else 1)
    share = each / (layout.dp if layout.zero_stage >= SHARDED_FROM[name] else 1)
    for num_parameters, why in _parameters(want / share, config, layout, stage):
        yield num_parameters * share, why
    yield want / each, "that counts numbers, but each has 4 bytes"
    if name != "optimizer":
        yield want / 2, "that is 2 bytes for each number, but here all are float32, with 4"
    else:
        for numbers in {1, 2, 3, 4} - {numbers_kept}:
            yield want * numbers / numbers_kept, (
                f"that is {4 * numbers} bytes for each parameter, but this optimizer keeps {4 * numbers_kept}: count "
                "the tensors in its state. It keeps no 32-bit copy of the weights, which have 32 bits already")


def _parameters(num: float, config: Any, layout: Layout, stage: int) -> Mistakes:
    """Numbers of parameters that are often mistaken for `num`, that of a rank of this stage."""
    h, vocabulary, t = config.width, config.vocab_size * config.width, layout.tp
    is_first, is_last = stage == 0, stage == layout.pp - 1
    blocks = config.num_layers // layout.pp
    block = (12 * h * h + 7 * h) / t + 6 * h
    embedding, head = vocabulary / t + config.context * h, vocabulary / t + 2 * h
    whole = config.num_parameters
    yield whole, "that is the whole model"
    yield whole / layout.num_gpus, (f"that is the whole model divided by all {layout.num_gpus} ranks, but replicas "
                                    "hold the same parameters, and some parameters are whole on each rank of tp, or on "
                                    "only one stage")
    yield whole / layout.pp / t, ("that is the whole model divided by pp and tp, but what tp does not cut is whole on "
                                  "each rank, and the embeddings and the head are on one stage each")
    yield num + (is_first + is_last) * (vocabulary - vocabulary / t), "token embedding and head are cut over tp " \
        "too, by vocabulary"
    yield num + (not is_first) * embedding + (not is_last) * head, "embeddings are on the first stage only, the last " \
        "norm and the head on the last"
    yield num - is_first * embedding - is_last * head, ("that counts only the blocks: the first stage also has the "
                                                        "embeddings, the last one the norm and the head")
    yield num - is_last * vocabulary / t, "the head has its own weight: it is not tied to the embedding"
    yield num - is_first * config.context * h, "the first stage has the position embedding too"
    yield num - is_last * 2 * h * (1 - 1 / t), "the norm before the head is whole on each rank of tp"
    yield num + is_last * config.vocab_size / t, "the head has no bias"
    yield num - is_last * 2 * h, "the last stage has the norm before the head too"
    for whole_on_each, what in ((6, "norms, and the biases that are added after the sum over tp, are"),
                                (4, "norms are"), (2, "biases that are added after the sum over tp are")):
        yield num - blocks * whole_on_each * h * (1 - 1 / t), f"{what} whole on each rank of tp"
    if is_first and is_last:
        for left_out in (head, embedding):
            yield num - left_out, "the only stage is first and last: it has the embeddings, and the norm and the head"
    yield num - blocks * (7 / t + 2) * h, "that is without biases: each of a block's six maps has one"
    yield num - blocks * (2 * h * h + h) / t, "the MLP's hidden layer is 4h wide"
    yield num - is_first * config.context * h * (1 - 1 / t), "the position embedding is whole on each rank"
    yield num + (config.num_layers - blocks) * block, f"a stage has num_layers / pp blocks, {blocks}"


def _activations(want: float, config: Any, layout: Layout, stage: int, num_micro_batches: int) -> Mistakes:
    """Bytes that are often mistaken for what a stage's blocks keep at their peak."""
    h, heads, t = config.width, config.num_heads, layout.tp
    held = min(layout.pp - stage, num_micro_batches)
    counted = ITEM_BYTES * (config.num_layers // layout.pp) * held * layout.micro_batch_size * config.context
    flight = f"under 1F1B stage {stage} of {layout.pp} holds at most {held} of {num_micro_batches} micro-batches"
    blocks = config.num_layers // layout.pp
    yield want / layout.dp, ("a micro-batch belongs to one replica: dp does not divide it further"
                             + f". Or is that one of the {blocks} blocks of the stage?" * (blocks == layout.dp)
                             + f" Or one of the {held} micro-batches that it keeps at once?" * (held == layout.dp))
    if layout.recompute == "full":
        yield counted * h / t, "a block's input is whole on each rank of tp"
        for mistaken in (16 * h + 4 + heads, 4 * h + 4 + (12 * h + heads) / t):
            yield counted * mistaken, "with full recomputation a block keeps only its input: the rest is computed again"
    else:
        yield counted * (16 * h + 4 + heads) / t, ("tp cuts only what lies between a layer cut by columns and the next "
                                                   "one, cut by rows: inputs and outputs of the norms are whole on "
                                                   "each rank")
        yield counted * (16 * h + 4 + heads), ("what lies between the cut layers is cut over tp too: the heads and the "
                                               "MLP's hidden units")
        yield want - counted * 4, "each norm also keeps two numbers for each token"
        yield want - counted * heads / t, "attention also keeps a number for each head and token"
        yield counted * h, "a block keeps only its input with full recomputation, but not here"
        yield want + counted * heads * (config.context - 1) / t, ("attention computes its scores again in the "
                                                                  "backward: it keeps one number for each head and "
                                                                  "token, not one for each pair of tokens")
    yield want / held, f"that is one micro-batch{', or one block' * (blocks == held)}; {flight}"
    yield want / blocks, f"that is one block, but a stage has {blocks}"
    yield want / held * num_micro_batches, f"that is all {num_micro_batches} micro-batches, as in GPipe; {flight}"
    yield want / held * min(layout.pp, num_micro_batches), f"that is what the first stage holds; {flight}"
    yield want / held * (layout.pp - stage), f"there are only {num_micro_batches} micro-batches; {flight}"
    yield want / held * (held + 1), f"that is one micro-batch too many; {flight}"
    yield want * layout.pp, "that is all blocks: a stage has num_layers / pp of them"
    yield want / layout.micro_batch_size, "that is one sequence; a micro-batch has micro_batch_size of them"
    yield want / ITEM_BYTES, "that counts numbers, but each has 4 bytes"


# What a rank sends

def traffic_slips(want: Mapping[str, float], config: Any, layout: Layout, stage: int, num_micro_batches: int
                  ) -> dict[str, list[tuple[float, str]]]:
    """For each axis, the bytes that mistakes predict for a rank of this stage, each with its message."""
    return {"pp": list(_pp_slips(want["pp"], config, layout, num_micro_batches)),
            "dp": list(_dp_slips(want["dp"], layout, num_micro_batches)),
            "tp": list(_tp_slips(want["tp"], config, layout, stage, num_micro_batches))}


def _pp_slips(want: float, config: Any, layout: Layout, m: int) -> Mistakes:
    yield want / m, "that is for one micro-batch, but the step has several"
    yield want / layout.tp, "each rank of tp sends the whole tensor"
    yield want * 2, ("received bytes don't count: a rank sends its output forward and the gradient of its input back. "
                     "The blocks within a stage send nothing to one another")
    yield want / 2, "a stage in the middle sends to both sides"
    if config.context != ITEM_BYTES:
        yield want / config.context, "that counts one token for each sequence, but each has as many as the context"
    yield want / ITEM_BYTES, "that counts numbers, not bytes" + ", or sequences, not their tokens" * (
        config.context == ITEM_BYTES)


def _dp_slips(want: float, layout: Layout, m: int) -> Mistakes:
    num_passes = (2, 2, m + 1, 3 * m)[layout.zero_stage]
    one = want / num_passes  # a reduce-scatter, or an all-gather
    if layout.zero_stage == 1:
        yield one * 3, ("ZeRO-1 does not all-reduce: it reduce-scatters gradients, and after the update gathers "
                        "parameters in place of gradients")
        yield one * (m + 1), ("ZeRO-1 shares out only the optimizer's state: gradients stay whole until the last "
                             "micro-batch, and are reduce-scattered once per step")
    if layout.zero_stage < 2:
        yield want * m, "the gradients of the micro-batches add up on the rank, and are averaged only once per step"
        yield one, ("that is half: an all-reduce is a reduce-scatter and an all-gather, and ZeRO-1 does both of these "
                    "too")
    else:
        for few in (2, 3):
            yield one * few, ("that is a step of one micro-batch, but each micro-batch has its own backward, and "
                              f"ZeRO-{layout.zero_stage} keeps no whole gradients in between")
        for scattered_or_gathered in (m + 1, 2 * m + 1) if layout.zero_stage == 3 else ():
            yield one * scattered_or_gathered, ("for each micro-batch ZeRO-3 gathers twice, for its forward and for "
                                                "its backward, and reduce-scatters once")
        yield one * 2 * m, ("ZeRO-2 gathers the parameters once, after the update, but ZeRO-3 twice for each "
                            "micro-batch, for its forward and for its backward")
    yield want * layout.dp / max(layout.dp - 1, 1), "in a reduce-scatter or an all-gather of n bytes each of k ranks " \
        "sends (k-1)/k n, not n"
    yield want * layout.dp / max(layout.dp - 1, 1) / 2, "in an all-reduce of n bytes each of k ranks sends " \
        "2(k-1)/k n, not n"
    for already in (layout.tp, layout.pp, layout.tp * layout.pp, layout.dp):
        yield want / already, "parameter_bytes is what the rank holds, already cut over pp and tp"
    yield want / ITEM_BYTES, "parameter_bytes are bytes already"


def _tp_slips(want: float, config: Any, layout: Layout, stage: int, m: int) -> Mistakes:
    t, is_first, is_last = layout.tp, stage == 0, stage == layout.pp - 1
    ring, tokens = 2 * (t - 1) / t * ITEM_BYTES, m * layout.micro_batch_size * config.context
    one, loss = ring * tokens * config.width, ring * tokens * 3 * is_last  # an all-reduce of activations; the loss's
    num, often = config.num_layers // layout.pp, 6 if layout.recompute == "full" else 4
    ends = (is_first + is_last) * one + loss
    yield num * 4 * one + ends, "with full recomputation a block's forward runs again, with its all-reduces"
    yield num * 6 * one + ends, "only with full recomputation does a block's forward run twice"
    yield num * often * one, "that is the blocks alone: the embedding, the head and the loss are cut too"
    if layout.recompute == "full":
        yield num * 8 * one + ends, ("only the forward runs again: a block's two all-reduces in the forward are "
                                     "repeated, those in the backward are not")
    yield want + loss * (config.vocab_size - 1), "the loss all-reduces one number for each token, not all logits"
    yield want + loss * (config.width - 1), "the loss all-reduces one number for each token, not a row of h numbers"
    yield want + loss, "the loss has three all-reduces in the forward, and none in the backward"
    yield want - loss * 3 / 4, "the loss's all-reduces count in bytes too: one number for each token takes 4"
    yield want - loss, "the loss, cut by vocabulary, has three all-reduces of one number for each token"
    yield want - loss * 2 / 3, "the loss has three all-reduces: of the largest logit, the sum and the target's logit"
    yield want + (is_first + is_last) * one, ("the embedding's output is summed only in the forward, and the gradient "
                                              "of the head's input only in the backward")
    yield want - is_first * one, "the embedding is cut by vocabulary: its output is summed over tp"
    yield want - is_last * one, "the head is cut by vocabulary: its input's gradient is summed over tp"
    for fewer in (1, 2, 3):
        yield num * fewer * one + ends, "attention and MLP each sum their output in the forward, and the gradient of " \
            f"their input in the backward: that is {often} all-reduces in a block" + " with those that run again" * (
                often == 6)
        yield num * fewer * one, f"a block has {often} all-reduces, and the stage's ends have some too"
    yield config.num_layers * often * one + ends, f"that is for all blocks, but a stage has num_layers / pp, {num}"
    yield want / m, "that is for one micro-batch, but the step has several"
    yield want * t / max(t - 1, 1) / 2, "in an all-reduce of n bytes each of k ranks sends 2(k-1)/k n, not n"
    yield want / 2, "an all-reduce is a reduce-scatter and an all-gather: 2(k-1)/k n, not (k-1)/k n"
    yield want * t, ("that is what all ranks of the group send together: each of k sends 2(k-1)/k n, not 2(k-1) n"
                     + ". Or do you count what it receives too?" * (t == 2))
    yield want * 2, "received bytes don't count: a rank sends 2(k-1)/k n"
    yield want / ITEM_BYTES, "that counts numbers, not bytes"


# How long a step takes

def step_seconds(got: Any, cost: Estimate, layout: Layout, cluster: Cluster, num_micro_batches: int) -> float:
    """`got` must be the seconds of the step that `cost` estimates; returns them."""
    return number(f"{layout} on nodes of {cluster.gpus_per_node}, {num_micro_batches} micro-batches: the number of "
                  "seconds", got, cost.step_s, _time_slips(cost, layout, cluster, num_micro_batches))


def _time_slips(cost: Estimate, layout: Layout, cluster: Cluster, m: int) -> Mistakes:
    computing, tp_s, pp_s, dp_s = cost.matmul_s, cost.tp_s, cost.pp_s, cost.dp_s
    busy, idle = computing + tp_s + pp_s, (layout.pp - 1) / m
    share = (layout.pp - 1) / (m + layout.pp - 1)
    yield from (
        (busy + dp_s, "a rank is also idle while the pipeline fills and drains"),
        (busy * (1 + share) + dp_s,
         "(p-1)/(m+p-1) is the idle share of the whole time; the idle time is (p-1)/m of the busy time"),
        (busy * (1 + (layout.pp - 1) / (m + layout.pp)) + dp_s,
         "the idle time is (p-1)/m of the busy time, and (p-1)/(m+p-1) of the whole time"),
        (busy * (1 + m / layout.pp) + dp_s, "that is upside down: the more micro-batches, the less idle time"),
        (max(computing, tp_s + pp_s) * (1 + idle) + dp_s, "messages of tp and pp are waited for: add their time to "
         "that of the computing, they do not overlap"),
        (busy * (1 + idle) + m * dp_s, "messages of dp are sent once per step, not for each micro-batch"),
        (cost.step_s + 7 * tp_s * (1 + idle), "both numbers of tp are in bytes: there are no bits to convert"),
        (busy * (1 + layout.pp / m) + dp_s,
         "filling p stages takes p-1 micro-batches: the idle time is (p-1)/m of the busy time"),
        (busy * (1 + (layout.pp - 1) / layout.pp) + dp_s,
         "that is (p-1)/p of the busy time, but the idle time is (p-1)/m of it: more micro-batches make it shorter"),
        *((busy + some * idle + dp_s, "the pipeline also waits while another stage sends: the idle time is "
           "proportional to the messages of tp and pp too") for some in (computing + tp_s, computing + pp_s)),
        (1e3 * cost.step_s, "that is in milliseconds: return seconds"),
        (busy + computing * idle + dp_s, "the pipeline also waits while another stage sends: the idle time is "
         "proportional to the messages of tp and pp too"),
        ((busy + dp_s) * (1 + idle), "messages of dp are sent once, after the pipeline, so they cause no idle time"),
        (busy * (1 + idle), "what dp sends is missing, or you assumed that all the rest hides it"),
        ((computing + pp_s) * (1 + idle) + dp_s, "what tp sends is missing"),
        ((computing + tp_s) * (1 + idle) + dp_s, "what pp sends is missing"),
        ((busy - computing + computing / layout.tp) * (1 + idle) + dp_s,
         "flops are already those of one GPU: don't divide them by tp again"))
    yield from _hidden_slips(cost, busy, idle, m)
    yield from _link_slips(cost, layout, cluster, 1 + idle)


def _hidden_slips(cost: Estimate, busy: float, idle: float, m: int) -> Mistakes:
    """Mistakes in which part of dp's messages computing hides; `cost` has the part that is waited for."""
    sent_s = cost.step_s - busy * (1 + idle)
    backward = 2 / 3 * busy / m
    yield (busy * (1 + idle) + max(sent_s - backward, 0),
           "nothing hides the messages of dp here: they come after the pipeline")
    yield busy * (1 + idle) + sent_s + backward, "the backward of the last micro-batch hides a part of dp's messages"


def _link_slips(cost: Estimate, layout: Layout, cluster: Cluster, filled: float) -> Mistakes:
    """Mistakes in which bandwidth an axis has; one that changes nothing gives the right answer, and passes."""
    node, inside, card = cluster.gpus_per_node, cluster.inside_bytes_per_s, cluster.across_bytes_per_s
    rest, span = cost.step_s - cost.dp_s, layout.tp * layout.dp
    stays = f"a group of dp spans {span} neighbouring GPUs, and a node has {node}: it stays inside a node"
    for bandwidth, why in (
            (card, f"a group of dp has {max(node // layout.tp, 1)} members on each node, and its ring crosses nodes "
                   "over the cards of all of them" if span > node else stays),
            (inside, f"a group of dp spans dp * tp = {span} neighbouring GPUs, but a node has only {node}: it crosses "
             "nodes"),
            (card * node, f"only one GPU in {layout.tp} is a member of a group of dp" if span > node else stays),
            (card * max(node // layout.tp, 1), "no ring is faster than the links inside a node" if span > node else
                                               stays),
            (card * max(node // layout.tp, 1) / layout.tp, "each GPU has a card of its own, so the groups of dp on a "
                                                           "node do not share cards" if span > node else stays)):
        yield rest + cost.dp_bytes / bandwidth, why
    for bandwidth, why in (
            (card, "a group of tp that fits on a node does not use the network" if layout.tp <= node else
                   "a ring crosses from node to node over the cards of all its members on a node"),
            (inside, f"a group of {layout.tp} does not fit on a node of {node}"),
            (card * node, "no ring is faster than the links inside a node" if layout.tp > node else
                          "a group of tp that fits on a node does not use the network")):
        yield cost.step_s + filled * (cost.tp_bytes / bandwidth - cost.tp_s), why
    for sent, sent_s, stretched, num_members in ((cost.dp_bytes, cost.dp_s, 1.0, max(node // layout.tp, 1)),
                                                 (cost.tp_bytes, cost.tp_s, filled, node)):
        hops_s = sent / inside * (num_members - 1) / num_members + sent_s / num_members
        yield (cost.step_s + stretched * (hops_s - sent_s), "all messages of a ring's step go at once, so it is as "
               "slow as its slowest, from node to node, and not as they are on average")
    yield cost.step_s + filled * (cost.pp_bytes / inside - cost.pp_s), "messages of pp always cross nodes here"
    yield (cost.step_s + filled * (cost.pp_bytes / (card * node) - cost.pp_s),
           "along pp each GPU sends over its own card only")


# Which layout is best

def chosen_layout(got: Any, model: Transformer, cluster: Cluster, global_batch: int, memory: Measure, seconds: Measure,
                  slack: float = 0.0) -> tuple[Layout | None, float]:
    """`got` must be the smallest layout that takes at most 1 + `slack` times as long as the fastest that fits.

    It must be None if nothing fits. Returns the first of those that are as good, and its seconds, 0 for None: a check
    must print the same for all right answers, and several layouts may be equally fast.
    """
    where = f"{model.num_layers} layers on {cluster.num_gpus} GPUs"
    room = cluster.usable_share * cluster.memory_bytes
    every = list(_layouts(model, cluster.num_gpus, global_batch))
    fitting = [layout for layout in every if memory(layout) <= room]
    if not fitting:
        require(got is None, f"{where}: no layout fits, but you chose {got}: return None")
        return None, 0.0
    fastest = min(fitting, key=seconds)
    require(got is not None, f"{where}: you found no layout that fits, but there are {len(fitting)}, such as {fastest}"
            + "; all of them have dp 1" * all(layout.dp == 1 for layout in fitting)
            + "; all of them have a pp or tp that is no power of two" * (not any(map(_is_of_powers, fitting)))
            + "; all of them have fewer micro-batches than stages, which costs time but is allowed" * all(
                _is_short_of_work(layout, global_batch) for layout in fitting))
    require(isinstance(got, Layout), f"{where}: chosen_layout must return a Layout, not {got!r}")
    require(got in every, f"{where}: {got} is not allowed: {_why_not(got, model, cluster, global_batch)}")
    require(memory(got) <= room, f"{where}: {got} holds {memory(got) / 1e9:.1f} GB, but only {room / 1e9:.1f} GB are "
            f"usable: {cluster.usable_share:g} of {cluster.memory_bytes / 1e9:g} GB")
    limit_s = (1 + slack) * seconds(fastest) * (1 + 1e-9)
    best = min((layout for layout in fitting if seconds(layout) <= limit_s), key=memory) if slack else fastest
    refuse(seconds(got) > limit_s and memory(best) == room, f"{where}: {got} takes longer than {best}, which fills the "
           "usable memory to the last byte: a layout that fits exactly fits")
    refuse(seconds(got) > limit_s, f"{where}: {got} takes {short(seconds(got))} s, and {best}, which fits too, "
           f"{short(seconds(best))} s{_overlooked(got, best, fitting, memory, seconds, cluster.gpus_per_node)}")
    refuse(slack and memory(got) > memory(best) * (1 + 1e-9), f"{where}: {got} holds {memory(got) / 1e9:.2f} GB, and "
           f"{best}, which is also fast enough, only {memory(best) / 1e9:.2f} GB")
    return best, seconds(best)


def _layouts(model: Transformer, num_gpus: int, global_batch: int) -> Iterator[Layout]:
    """All layouts of the exercise."""
    for tp, pp in product(range(1, num_gpus + 1), repeat=2):
        if num_gpus % (tp * pp) or model.num_heads % tp or model.num_layers % pp:
            continue
        dp = num_gpus // (tp * pp)
        for size, stage, recompute in product((1, 2, 4), (0, 1), (None, "full")):
            if global_batch % (dp * size) == 0:
                yield Layout(pp, dp, tp, size, zero_stage=stage, recompute=recompute)


def _why_not(got: Layout, model: Transformer, cluster: Cluster, global_batch: int) -> str:
    return likeliest(
        (got.num_gpus != cluster.num_gpus, f"it has {got.num_gpus} GPUs"),
        (model.num_heads % got.tp, f"{model.num_heads} heads can't be shared out over tp {got.tp}"),
        (model.num_layers % got.pp, f"{model.num_layers} layers can't be shared out over pp {got.pp}"),
        (global_batch % (got.dp * got.micro_batch_size), f"{global_batch} sequences can't be divided into whole "
         f"micro-batches of {got.micro_batch_size} on {got.dp} replicas"),
        (True, "micro_batch_size is 1, 2 or 4, zero_stage 0 or 1, recompute None or \"full\""))


def _overlooked(got: Layout, best: Layout, fitting: list[Layout], memory: Measure, seconds: Measure, node: int) -> str:
    """A hint at how a layout that is too slow was chosen, or at sizes that were not tried."""
    differ = [name for name in ("pp", "dp", "tp", "micro_batch_size", "zero_stage", "recompute")
              if getattr(got, name) != getattr(best, name)]
    return likeliest(
        (len(differ) == 1, f": did you try every {' '.join(differ)}?"),
        (got == min(fitting, key=memory), ": yours is the one with the least memory"),
        (got == max(fitting, key=seconds), ": yours is the slowest"),
        (got.dp == max(layout.dp for layout in fitting) > best.dp, ": yours is one with the most replicas"),
        (got.tp <= node < best.tp, f": a group of tp need not fit on a node of {node}"),
        (_is_of_powers(got) and not _is_of_powers(best), ": sizes need not be powers of two"),
        (got.recompute is None and best.recompute, ": recomputing may pay even where it is not needed, since it makes "
         "room for larger micro-batches"))


def _is_short_of_work(layout: Layout, global_batch: int) -> bool:
    """Whether a replica has fewer micro-batches than stages."""
    return global_batch // (layout.dp * layout.micro_batch_size) < layout.pp


def _is_of_powers(layout: Layout) -> bool:
    return all(size & (size - 1) == 0 for size in (layout.pp, layout.tp))
