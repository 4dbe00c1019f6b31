"""L3, lab 10: a layout planned by hand: what a rank holds, what it sends, how long a step takes.

Every answer is one number or a dict of numbers; the tables hold what mistakes lead to, each with its sentence.
`config` has the sizes of the book's GPT, h its width, V its vocabulary, T its context; t is the size of tp. Numbers
have ITEM_BYTES.
"""
from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from book.checks.formula import Formula, Slips
from book.checks.verdict import require
from book.cost import SHARDED_FROM, Cluster, Estimate, Layout, StateBytes

ITEM_BYTES = 4
HELD = ("parameters", "gradients", "optimizer", "activations")


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
        slips = [*_shards(name, want, layout), *_state(name, want, config, layout, stage, numbers_kept)]
        if name == "gradients":
            slips.append((want * num_micro_batches, "the gradients of all micro-batches add up in the same memory"))
        total += Formula(want, slips).require_right(where + words, got[name])
    if activation_bytes is not None:
        formula = Formula(activation_bytes, _activations(activation_bytes, config, layout, stage, num_micro_batches))
        total += formula.require_right(where + "activations", got["activations"])
    return total


def _shards(name: str, want: float, layout: Layout) -> Slips:
    """Mistakes in what ZeRO divides."""
    first, num = SHARDED_FROM[name], layout.dp
    if layout.zero_stage < first:
        return [(want / num, f"that is 1/{num} of them, but replicas share them out only from ZeRO stage {first} on")]
    return [(want * num / layout.num_gpus, "ZeRO shares them out over dp only, not over all GPUs"),
            (want * num, f"from ZeRO stage {first} on, a rank keeps only 1/{num} of them: the replicas share them out")]


def _state(name: str, want: float, config: Any, layout: Layout, stage: int, numbers_kept: int) -> Slips:
    """Mistakes in how many parameters the rank has, and in how many bytes are kept for each."""
    each = ITEM_BYTES * (numbers_kept if name == "optimizer" else 1)
    share = each / (layout.dp if layout.zero_stage >= SHARDED_FROM[name] else 1)
    slips = [(num_parameters * share, why) for num_parameters, why in _parameters(want / share, config, layout, stage)]
    slips += [(want / each, "that counts numbers, but each has 4 bytes")]
    if name != "optimizer":
        return [*slips, (want / 2, "that is 2 bytes for each number, but here all are float32, with 4")]
    return slips + [
        (want * numbers / numbers_kept, f"that is {4 * numbers} bytes for each parameter, but this optimizer keeps "
         f"{4 * numbers_kept}: count the tensors in its state. It keeps no 32-bit copy of the weights, which have 32 "
         "bits already") for numbers in {1, 2, 3, 4} - {numbers_kept}]


def _parameters(num: float, config: Any, layout: Layout, stage: int) -> Slips:
    """Numbers of parameters that are often mistaken for `num`, that of a rank of this stage."""
    h, vocabulary, t = config.width, config.vocab_size * config.width, layout.tp
    is_first, is_last = stage == 0, stage == layout.pp - 1
    blocks = config.num_layers // layout.pp
    block = (12 * h * h + 7 * h) / t + 6 * h
    embedding, head = vocabulary / t + config.context * h, vocabulary / t + 2 * h
    whole, is_only = config.num_parameters, is_first and is_last
    only = "the only stage is first and last: it has the embeddings, and the norm and the head"
    return [
        (whole, "that is the whole model"),
        (whole / layout.num_gpus, f"that is the whole model divided by all {layout.num_gpus} ranks, but replicas hold "
         "the same parameters, and some parameters are whole on each rank of tp, or on only one stage"),
        (whole / layout.pp / t, "that is the whole model divided by pp and tp, but what tp does not cut is whole on "
         "each rank, and the embeddings and the head are on one stage each"),
        (num + (is_first + is_last) * (vocabulary - vocabulary / t),
         "token embedding and head are cut over tp too, by vocabulary"),
        (num + (not is_first) * embedding + (not is_last) * head,
         "embeddings are on the first stage only, the last norm and the head on the last"),
        (num - is_first * embedding - is_last * head, "that counts only the blocks: the first stage also has the "
         "embeddings, the last one the norm and the head"),
        (num - is_last * vocabulary / t, "the head has its own weight: it is not tied to the embedding"),
        (num - is_first * config.context * h, "the first stage has the position embedding too"),
        (num - is_last * 2 * h * (1 - 1 / t), "the norm before the head is whole on each rank of tp"),
        (num + is_last * config.vocab_size / t, "the head has no bias"),
        (num - is_last * 2 * h, "the last stage has the norm before the head too"),
        *((num - blocks * whole_on_each * h * (1 - 1 / t), f"{what} whole on each rank of tp")
          for whole_on_each, what in ((6, "norms, and the biases that are added after the sum over tp, are"),
                                      (4, "norms are"), (2, "biases that are added after the sum over tp are"))),
        *((num - left_out, only) for left_out in (head, embedding) if is_only),
        (num - blocks * (7 / t + 2) * h, "that is without biases: each of a block's six maps has one"),
        (num - blocks * (2 * h * h + h) / t, "the MLP's hidden layer is 4h wide"),
        (num - is_first * config.context * h * (1 - 1 / t), "the position embedding is whole on each rank"),
        (num + (config.num_layers - blocks) * block, f"a stage has num_layers / pp blocks, {blocks}")]


def _activations(want: float, config: Any, layout: Layout, stage: int, num_micro_batches: int) -> Slips:
    """Bytes that are often mistaken for what a stage's blocks keep at their peak."""
    blocks, held = config.num_layers // layout.pp, min(layout.pp - stage, num_micro_batches)
    flight = f"under 1F1B stage {stage} of {layout.pp} holds at most {held} of {num_micro_batches} micro-batches"
    return [
        (want / layout.dp, "a micro-batch belongs to one replica: dp does not divide it further"
         + f". Or is that one of the {blocks} blocks of the stage?" * (blocks == layout.dp)
         + f" Or one of the {held} micro-batches that it keeps at once?" * (held == layout.dp)),
        *_kept_in_a_block(want, ITEM_BYTES * blocks * held * layout.micro_batch_size * config.context, config, layout),
        (want / held, f"that is one micro-batch{', or one block' * (blocks == held)}; {flight}"),
        (want / blocks, f"that is one block, but a stage has {blocks}"),
        (want / held * num_micro_batches, f"that is all {num_micro_batches} micro-batches, as in GPipe; {flight}"),
        (want / held * min(layout.pp, num_micro_batches), f"that is what the first stage holds; {flight}"),
        (want / held * (layout.pp - stage), f"there are only {num_micro_batches} micro-batches; {flight}"),
        (want / held * (held + 1), f"that is one micro-batch too many; {flight}"),
        (want * layout.pp, "that is all blocks: a stage has num_layers / pp of them"),
        (want / layout.micro_batch_size, "that is one sequence; a micro-batch has micro_batch_size of them"),
        (want / ITEM_BYTES, "that counts numbers, but each has 4 bytes")]


def _kept_in_a_block(want: float, counted: float, config: Any, layout: Layout) -> Slips:
    """Mistakes in what a block keeps for each token; `counted` bytes are one number for each token of all blocks."""
    h, heads, t = config.width, config.num_heads, layout.tp
    if layout.recompute == "full":
        again = "with full recomputation a block keeps only its input: the rest is computed again"
        return [(counted * h / t, "a block's input is whole on each rank of tp"),
                (counted * (16 * h + 4 + heads), again), (counted * (4 * h + 4 + (12 * h + heads) / t), again)]
    return [
        (counted * (16 * h + 4 + heads) / t, "tp cuts only what lies between a layer cut by columns and the next one, "
         "cut by rows: inputs and outputs of the norms are whole on each rank"),
        (counted * (16 * h + 4 + heads),
         "what lies between the cut layers is cut over tp too: the heads and the MLP's hidden units"),
        *[(want - counted * num, "each of the two norms also keeps two numbers for each token"
           + ". Or is it attention's number for each head and token that is missing?" * (heads == num * t))
          for num in (4, 2)],
        (want - counted * heads / t, "attention also keeps a number for each head and token"),
        (counted * h, "a block keeps only its input with full recomputation, but not here"),
        (want + counted * heads * (config.context - 1) / t, "attention computes its scores again in the backward: it "
         "keeps one number for each head and token, not one for each pair of tokens")]


# What a rank sends

def traffic_slips(want: Mapping[str, float], config: Any, layout: Layout, stage: int, num_micro_batches: int
                  ) -> dict[str, Slips]:
    """For each axis, the bytes that mistakes predict for a rank of this stage, each with its message."""
    return {"pp": _pp_slips(want["pp"], config, layout, num_micro_batches),
            "dp": _dp_slips(want["dp"], layout, num_micro_batches),
            "tp": _tp_slips(want["tp"], config, layout, stage, num_micro_batches)}


def _pp_slips(want: float, config: Any, layout: Layout, m: int) -> Slips:
    tokens = config.context
    return [
        (want / m, "that is for one micro-batch, but the step has several"),
        (want / layout.tp, "each rank of tp sends the whole tensor"),
        (want * 2, "received bytes don't count: a rank sends its output forward and the gradient of its input back. "
         "The blocks within a stage send nothing to one another"),
        (want / 2, "a stage in the middle sends to both sides"),
        *[(want / tokens, "that counts one token for each sequence, but each has as many as the context")
          ] * (tokens != ITEM_BYTES),
        (want / ITEM_BYTES, "that counts numbers, not bytes" + ", or sequences, not their tokens" * (
            tokens == ITEM_BYTES))]


def _dp_slips(want: float, layout: Layout, m: int) -> Slips:
    one = want / (2, 2, m + 1, 3 * m)[layout.zero_stage]  # a reduce-scatter, or an all-gather
    averaged = [
        (want * m, "the gradients of the micro-batches add up on the rank, and are averaged only once per step"),
        (one, "that is half: an all-reduce is a reduce-scatter and an all-gather, and ZeRO-1 does both of these too")]
    slips = {0: averaged, 1: [
        (one * 3, "ZeRO-1 does not all-reduce: it reduce-scatters gradients, and after the update gathers parameters "
         "in place of gradients"),
        (one * (m + 1), "ZeRO-1 shares out only the optimizer's state: gradients stay whole until the last "
         "micro-batch, and are reduce-scattered once per step"), *averaged]}
    return [
        *slips.get(layout.zero_stage, _scattered_slips(one, layout, m)),
        (want * layout.dp / max(layout.dp - 1, 1),
         "in a reduce-scatter or an all-gather of n bytes each of k ranks sends (k-1)/k n, not n"),
        (want * layout.dp / max(layout.dp - 1, 1) / 2,
         "in an all-reduce of n bytes each of k ranks sends 2(k-1)/k n, not n"),
        *((want / already, "parameter_bytes is what the rank holds, already cut over pp and tp")
          for already in (layout.tp, layout.pp, layout.tp * layout.pp, layout.dp)),
        (want / ITEM_BYTES, "parameter_bytes are bytes already")]


def _scattered_slips(one: float, layout: Layout, m: int) -> Slips:
    """Mistakes where gradients are scattered in each backward, as in ZeRO-2 and ZeRO-3."""
    return [
        *((one * few, "that is a step of one micro-batch, but each micro-batch has its own backward, and "
           f"ZeRO-{layout.zero_stage} keeps no whole gradients in between") for few in (2, 3)),
        *((one * num, "for each micro-batch ZeRO-3 gathers twice, for its forward and for its backward, and "
           "reduce-scatters once") for num in (m + 1, 2 * m + 1) if layout.zero_stage == 3),
        (one * 2 * m, "ZeRO-2 gathers the parameters once, after the update, but ZeRO-3 twice for each micro-batch, "
         "for its forward and for its backward")]


def _tp_slips(want: float, config: Any, layout: Layout, stage: int, m: int) -> Slips:
    t, is_first, is_last = layout.tp, stage == 0, stage == layout.pp - 1
    ring, tokens = 2 * (t - 1) / t * ITEM_BYTES, m * layout.micro_batch_size * config.context
    one, loss = ring * tokens * config.width, ring * tokens * 3 * is_last  # an all-reduce of activations; the loss's
    ends = (is_first + is_last) * one + loss
    return [
        *_block_slips(one, ends, config.num_layers // layout.pp, layout),
        (want + loss * (config.vocab_size - 1), "the loss all-reduces one number for each token, not all logits"),
        (want + loss * (config.width - 1), "the loss all-reduces one number for each token, not a row of h numbers"),
        (want + loss, "the loss has three all-reduces in the forward, and none in the backward"),
        (want - loss * 3 / 4, "the loss's all-reduces count in bytes too: one number for each token takes 4"),
        (want - loss, "the loss, cut by vocabulary, has three all-reduces of one number for each token"),
        (want - loss * 2 / 3,
         "the loss has three all-reduces: of the largest logit, the sum and the target's logit"),
        (want + (is_first + is_last) * one, "the embedding's output is summed only in the forward, and the gradient of "
         "the head's input only in the backward"),
        (want - is_first * one, "the embedding is cut by vocabulary: its output is summed over tp"),
        (want - is_last * one, "the head is cut by vocabulary: its input's gradient is summed over tp"),
        *_fewer_slips(one, ends, config.num_layers, layout),
        (want / m, "that is for one micro-batch, but the step has several"),
        (want * t / max(t - 1, 1) / 2, "in an all-reduce of n bytes each of k ranks sends 2(k-1)/k n, not n"),
        (want / 2, "an all-reduce is a reduce-scatter and an all-gather: 2(k-1)/k n, not (k-1)/k n"),
        (want * t, "that is what all ranks of the group send together: each of k sends 2(k-1)/k n, not 2(k-1) n"
         + ". Or do you count what it receives too?" * (t == 2)),
        (want * 2, "received bytes don't count: a rank sends 2(k-1)/k n"),
        (want / ITEM_BYTES, "that counts numbers, not bytes")]


def _block_slips(one: float, ends: float, num: int, layout: Layout) -> Slips:
    """Mistakes in what runs again in a stage of `num` blocks, and in what is not a block."""
    often = _num_all_reduces(layout)
    return [
        (num * 4 * one + ends, "with full recomputation a block's forward runs again, with its all-reduces"),
        (num * 5 * one + ends, "with full recomputation the whole block's forward runs again, attention and MLP: that "
         "is two all-reduces more, not one"),
        (num * 6 * one + ends, "only with full recomputation does a block's forward run twice"),
        (num * often * one, "that is the blocks alone: the embedding, the head and the loss are cut too"),
        *[(num * 8 * one + ends, "only the forward runs again: a block's two all-reduces in the forward are repeated, "
           "those in the backward are not")] * (often == 6)]


def _fewer_slips(one: float, ends: float, num_layers: int, layout: Layout) -> Slips:
    """Mistakes in how many all-reduces a block has, and in how many blocks a stage has."""
    often, num = _num_all_reduces(layout), num_layers // layout.pp
    each = ("attention and MLP each sum their output in the forward, and the gradient of their input in the backward: "
            f"that is {often} all-reduces in a block" + " with those that run again" * (often == 6))
    return [*(slip for fewer in (1, 2, 3) for slip in (
                (num * fewer * one + ends, each),
                (num * fewer * one, f"a block has {often} all-reduces, and the stage's ends have some too"))),
            (num_layers * often * one + ends, f"that is for all blocks, but a stage has num_layers / pp, {num}")]


def _num_all_reduces(layout: Layout) -> int:
    """How many all-reduces over tp a block has, forward and backward."""
    return 6 if layout.recompute == "full" else 4


# How long a step takes

def step_seconds(got: Any, cost: Estimate, layout: Layout, cluster: Cluster, num_micro_batches: int) -> float:
    """`got` must be the seconds of the step that `cost` estimates; returns them."""
    formula = Formula(cost.step_s, _time_slips(cost, layout, cluster, num_micro_batches))
    return formula.require_right(f"{layout} on nodes of {cluster.gpus_per_node}, {num_micro_batches} micro-batches: "
                                 "the number of seconds", got)


def _time_slips(cost: Estimate, layout: Layout, cluster: Cluster, m: int) -> Slips:
    computing, tp_s, pp_s, dp_s = cost.matmul_s, cost.tp_s, cost.pp_s, cost.dp_s
    busy, idle = computing + tp_s + pp_s, (layout.pp - 1) / m
    share = (layout.pp - 1) / (m + layout.pp - 1)
    return [
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
         "flops are already those of one GPU: don't divide them by tp again"),
        *_hidden_slips(cost, busy, idle, m), *_link_slips(cost, layout, cluster, 1 + idle)]


def _hidden_slips(cost: Estimate, busy: float, idle: float, m: int) -> Slips:
    """Mistakes in which part of dp's messages computing hides; `cost` has the part that is waited for."""
    sent_s = cost.step_s - busy * (1 + idle)
    backward = 2 / 3 * busy / m
    return [(busy * (1 + idle) + max(sent_s - backward, 0),
             "nothing hides the messages of dp here: they come after the pipeline"),
            (busy * (1 + idle) + sent_s + backward,
             "the backward of the last micro-batch hides a part of dp's messages")]


def _link_slips(cost: Estimate, layout: Layout, cluster: Cluster, filled: float) -> Slips:
    """Mistakes in which bandwidth an axis has; one that changes nothing gives the right answer, and passes."""
    node, inside, card = cluster.gpus_per_node, cluster.inside_bytes_per_s, cluster.across_bytes_per_s
    members = max(node // layout.tp, 1)

    def dp_at(bandwidth: float) -> float:
        return cost.step_s - cost.dp_s + cost.dp_bytes / bandwidth

    def tp_at(bandwidth: float) -> float:
        return cost.step_s + filled * (cost.tp_bytes / bandwidth - cost.tp_s)

    def on_average(sent: float, sent_s: float, num: int) -> float:
        """By how much a ring's time differs if its slowest message does not decide, of `num` to a node."""
        return sent / inside * (num - 1) / num + sent_s / num - sent_s

    slowest = ("all messages of a ring's step go at once, so it is as slow as its slowest, from node to node, and not "
               "as they are on average")
    return [
        *_dp_link_slips(dp_at, layout, node, inside, card, members),
        (tp_at(card), "a group of tp that fits on a node does not use the network" if layout.tp <= node else
         "a ring crosses from node to node over the cards of all its members on a node"),
        (tp_at(inside), f"a group of {layout.tp} does not fit on a node of {node}"),
        (tp_at(card * node), "no ring is faster than the links inside a node" if layout.tp > node else
         "a group of tp that fits on a node does not use the network"),
        (cost.step_s + on_average(cost.dp_bytes, cost.dp_s, members), slowest),
        (cost.step_s + filled * on_average(cost.tp_bytes, cost.tp_s, node), slowest),
        (cost.step_s + filled * (cost.pp_bytes / inside - cost.pp_s), "messages of pp always cross nodes here"),
        (cost.step_s + filled * (cost.pp_bytes / (card * node) - cost.pp_s),
         "along pp each GPU sends over its own card only")]


def _dp_link_slips(dp_at: Callable[[float], float], layout: Layout, node: int, inside: float, card: float,
                   members: int) -> Slips:
    """Mistakes in the bandwidth of dp, of whose groups so many `members` are on a node."""
    span = layout.tp * layout.dp
    stays = f"a group of dp spans {span} neighbouring GPUs, and a node has {node}: it stays inside a node"
    crosses = [
        (card, f"a group of dp has {members} members on each node, and its ring crosses nodes over the cards of all of "
         "them"),
        (inside, f"a group of dp spans dp * tp = {span} neighbouring GPUs, but a node has only {node}: it crosses "
         "nodes"),
        (card * node, f"only one GPU in {layout.tp} is a member of a group of dp"),
        (card * members, "no ring is faster than the links inside a node"),
        (card * members / layout.tp, "each GPU has a card of its own, so the groups of dp on a node do not share "
         "cards")]
    return [(dp_at(bandwidth), why if span > node or bandwidth == inside else stays) for bandwidth, why in crosses]
