"""L1: the seconds of a step, part by part: products, passes over memory, messages, bubble, update."""
from __future__ import annotations

from typing import Any

import numpy as np

from book.cost.links import pipeline_bubble, ring_sent_bytes
from book.cost.state import StateBytes
from book.cost.terms import Terms
from book.cost.traffic import num_passes
from book.cost.tuning import HOST_LINK_BYTES_PER_S, HOST_MEMORY_BYTES_PER_S, matrices


def seconds(terms: Terms, sent: dict[str, np.ndarray], overlap: bool) -> dict[str, np.ndarray]:
    """Seconds that a rank spends in a step, by part; `sent` is its bytes."""
    slowdown = terms.cluster.overheads.slowdown
    head_s = _product(terms, terms.tokens, terms.model.width, terms.model.vocab_size / terms.tp)
    head_s = head_s * (2 if terms.tuning.adapts else 3)  # a frozen head's weights need no gradients
    busy = {**_computed(terms), **_waited(terms, sent)}
    busy["matmul_s"] = busy["matmul_s"] + terms.m * head_s / terms.pp
    busy_s = sum(busy.values())
    share = pipeline_bubble(terms.pp, terms.m, terms.v)
    dp_s = _replicas(terms)
    hidden = _hidden(terms, busy_s, overlap)
    spent = {**busy, "matmul_s": busy["matmul_s"] + _last(terms, busy_s, head_s),
             "bubble_s": busy_s * share / (1 - share), "dp_s": np.maximum(dp_s - hidden, 0),
             "update_s": _update(terms)}
    return {part: slowdown * of for part, of in spent.items()}


def _update(terms: Terms) -> Any:
    """The optimizer passes over its state twice; offloaded, gradients go to the host first and parameters come back."""
    held = terms.by("zero_stage", range(4), lambda stage: terms.updated(stage, terms.each))
    if not terms.tuning.offload:
        return 2 * held / terms.cluster.memory_bytes_per_s
    each, optimizer = terms.each, terms.tuning.kept.optimizer
    num = terms.by("zero_stage", range(4), lambda stage: terms.updated(stage, StateBytes(0, 0, 1)))
    node = min(terms.cluster.gpus_per_node, terms.cluster.num_gpus)
    return num * ((each.gradients + each.parameters) / HOST_LINK_BYTES_PER_S
                  + 2 * optimizer * node / HOST_MEMORY_BYTES_PER_S)


def _computed(terms: Terms) -> dict[str, np.ndarray]:
    """Matrix products, passes over memory, and what launching a layer's kernels takes beyond running them."""
    cluster, least = terms.cluster, terms.cluster.overheads.launch_s
    forward, backward = _products(terms)
    whole = terms.kept(None)  # a third of the passes are in the forward; recomputation repeats them
    rate = cluster.num_passes / cluster.memory_bytes_per_s
    selective = terms.recomputed("selective")
    idle = [np.maximum(often * least - busy, 0) for often, busy in (
        (1, forward + whole / 3 * rate), (2, backward + whole * 2 / 3 * rate))]
    waits = cluster.overheads.expert_launch_s * (terms.model.routed > 0)
    back = terms.m * terms.trained_layers
    ahead = terms.m * terms.layers + terms.again * back
    passes = ahead * whole / 3 + back * (whole * 2 / 3 + selective * (whole - terms.kept("selective")) / 3)
    return {"matmul_s": ahead * forward + back * (backward + selective * _attention(terms)[0]),
            "elementwise_s": passes * rate + (ahead + back) * _dequantized(terms),
            "launch_s": ahead * (idle[0] + waits) + back * (idle[1] + 2 * waits)}


def _dequantized(terms: Terms) -> Any:
    """Reading a layer's matrices in 4 bits and writing them in 16, before the products of a forward or a backward."""
    if terms.tuning.train != "qlora":
        return 0.0
    num_bytes = terms.model.products_per_token / terms.tp * (terms.tuning.weight_bytes + 2)
    return num_bytes / terms.cluster.memory_bytes_per_s


def _last(terms: Terms, busy_s: Any, head_s: Any) -> np.ndarray:
    """What others wait for the last stage, which has all of the logits' products, not its part of them.

    Where the layers don't divide evenly, the last stage has one less.
    """
    spare_s = (terms.layers * terms.pp > terms.model.num_layers) * busy_s / (terms.m * terms.layers)
    return terms.m * np.maximum(terms.cluster.overheads.head_share * head_s * (1 - 1 / terms.pp) - spare_s, 0)


def _product(terms: Terms, rows: Any, depth: Any, columns: Any, often: Any = 1.0, speedup: Any = 1.0) -> np.ndarray:
    """A matrix product; the constant added to its depth stands for its start and end, when matrix units idle.

    A depth cut into `often` products of as many experts has as many starts and ends.
    """
    rate = terms.cluster.flops_per_s * terms.cluster.efficiency
    return 2 * rows * columns * (depth / speedup + often * terms.cluster.overheads.product_depth) / rate


def _products(terms: Terms) -> tuple[np.ndarray, np.ndarray]:
    """A layer's products for one micro-batch: (m, k, n) forward needs (m, n, k) and (k, m, n) backward.

    Routed experts share the tokens that are sent to a rank: as many, but in a product for each expert.
    """
    model, m, t = terms.model, terms.tokens, terms.tp
    gates, dense = model.mlp_in / model.mlp_out, model.mlp_out - model.routed * model.expert_width
    grouped, local = m * model.routed / t, model.num_experts / terms.ep
    parts = [(m, 1.0, model.width, model.attention_in / t), (m, 1.0, model.attention_out / t, model.width),
             (m, 1.0, model.width, gates * dense / t), (m, 1.0, dense / t, model.width),
             (grouped, local, model.width, gates * model.expert_width),
             (grouped, local, model.expert_width, model.width)]
    fast = terms.cluster.overheads.linear_speedup
    forward, backward = _attention(terms)
    for rows, often, depth, columns in parts:
        forward = forward + _product(terms, rows, depth, columns, 1.0, fast)
        backward = backward + _product(terms, rows, columns, depth, 1.0, fast)
        if not terms.tuning.adapts:  # frozen weights need no gradients
            backward = backward + _product(terms, depth, rows, columns, often, fast)
    adapters, rank = matrices(model) if terms.tuning.adapts else (), terms.tuning.rank
    for depth, columns, often in ((*sides, often) for wide, often in adapters
                                  for sides in ((model.width, rank), (rank, wide / t))):
        forward = forward + often * _product(terms, m, depth, columns)
        backward = backward + often * (_product(terms, m, columns, depth) + _product(terms, depth, m, columns))
    return forward, backward


def _attention(terms: Terms) -> tuple[np.ndarray, np.ndarray]:
    """The scores and their product with the values. A fused kernel skips what the causal mask hides.

    Its backward recomputes the scores and takes 2.5 times its forward (dao2022).
    """
    model, cluster = terms.model, terms.cluster
    flops = 2 * terms.tokens * model.num_tokens * model.score_width / terms.tp
    share = np.where(np.greater(cluster.overheads.attention_share, 0), cluster.overheads.attention_share,
                     cluster.efficiency)
    stored = flops / (cluster.flops_per_s * cluster.efficiency)
    causal = flops / 2 / (cluster.flops_per_s * share)
    return (np.where(model.is_flash, causal, stored), np.where(model.is_flash, 2.5 * causal, 2 * stored))


def _waited(terms: Terms, sent: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Messages of tp, cp, ep and pp; attention on the keys at hand hides part of cp's, interleaving part of pp's."""
    cluster, over = terms.cluster, terms.cluster.overheads
    node, often, back = cluster.gpus_per_node, terms.m * terms.layers, terms.m * terms.trained_layers
    num_all_reduces = 2 * often + (2 + 2 * terms.again) * back  # all-gathers of kept pieces hide behind products
    tp = num_all_reduces * ring_sent_bytes(terms.tp, terms.between_bytes)
    hops = num_all_reduces * 2 * over.hop_s * np.log2(terms.tp) * (terms.tp > node)
    forward, backward = _attention(terms)
    ring_s = sent["cp_bytes"] / bandwidth(terms, terms.tp * terms.cp)  # each hop is from one GPU to one other
    pp_s = sent["pp_bytes"] / bandwidth(terms, terms.pp * terms.shards * terms.replicas * terms.tp)
    sends = 2 * terms.v * terms.m * over.send_node_s * np.maximum(cluster.num_gpus / node - 1, 0)
    waited = 1 - over.tensor_hidden_share
    return {"tp_s": waited * (tp / bandwidth(terms, terms.tp, np.minimum(terms.tp, node)) + hops),
            "cp_s": np.maximum(ring_s - (terms.cp - 1) / terms.cp * (often * forward + back * backward), 0),
            "ep_s": sent["ep_bytes"] * _dispatched(terms),
            "pp_s": (pp_s + sends * (terms.pp > 1)) * np.where(terms.v > 1, 1 - over.stage_hidden_share, 1.0)}


def _dispatched(terms: Terms) -> np.ndarray:
    """Seconds of a byte to experts: what goes to another node crosses on the GPU's own card, the rest does not.

    A token crosses to each node once, and is copied there for all of its experts that the node has: of N nodes
    N (1 - (1-1/N)^k) have some of k experts, where each is as likely to be on any.
    """
    cluster, node = terms.cluster, terms.cluster.gpus_per_node
    nodes, often = np.maximum(terms.ep / node, 1), np.maximum(terms.model.routed, 1)
    once = nodes * (1 - (1 - 1 / nodes) ** often) / often
    across = once * np.maximum(terms.ep - node, 0) / np.maximum(terms.ep - 1, 1)
    return np.maximum(across / (cluster.across_bytes_per_s * cluster.overheads.across_share),
                      (1 - across) / (cluster.inside_bytes_per_s * cluster.overheads.inside_share))


def _replicas(terms: Terms) -> np.ndarray:
    """Data parallelism's messages before any overlap: the bytes, and a wait for each rank on the ring.

    Where ep fills nodes, the shards of an expert are on as many nodes, and each has its own card alone.
    """
    node = terms.cluster.gpus_per_node
    often = terms.by("zero_stage", range(4), lambda stage: np.asarray(sum(num_passes(stage, terms.m))))
    hops = often * (terms.shards - 1) * (terms.shards * terms.tp > node) + 2 * terms.m * (terms.replicas - 1)
    sent = sum(num_bytes / bandwidth(terms, span, np.maximum(node // apart, 1))
               for num_bytes, span, apart in terms.rings())
    return sent + hops * terms.layers * terms.cluster.overheads.ring_hop_s


def _hidden(terms: Terms, busy_s: Any, overlap: bool) -> np.ndarray:
    """Seconds of data parallelism's messages that overlap with computing."""
    over, last = terms.cluster.overheads, 2 / 3 * busy_s / terms.m
    first, sharded = (1.0, 1.0) if overlap else (over.hidden_share, 0.0)
    return np.where(terms.layouts.array("zero_stage") >= 2, sharded * busy_s, first * last)


def bandwidth(terms: Terms, span: Any, num_shared: Any = 1.0) -> np.ndarray:
    """Bytes per second of a group that spans `span` neighbouring GPUs and has `num_shared` members on each node.

    A ring crosses between two nodes once, so it can use the network cards of all its members on a node.
    """
    cluster, over = terms.cluster, terms.cluster.overheads
    inside = cluster.inside_bytes_per_s * over.inside_share
    across = cluster.across_bytes_per_s * over.across_share * np.maximum(num_shared, 1)
    return np.where(span <= cluster.gpus_per_node, inside, np.minimum(across, inside))
