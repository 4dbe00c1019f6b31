/* The twin of book/cost/seconds.py: the seconds of a step, part by part. `terms` is of plan_step.js. */
import { pipeline_bubble, ring_sent_bytes } from "./links.js";
import { num_passes } from "./plan_bytes.js";

const { max, min, floor, log2 } = Math;

/** A product takes as long as its depth and a constant say, for its ends are no work for the matrix units. */
function product({ cluster }, rows, depth, columns, often = 1, speedup = 1) {
  const rate = cluster.flops_per_s * cluster.efficiency;
  return (2 * rows * columns * (depth / speedup + often * cluster.overheads.product_depth)) / rate;
}

/** Scores, and their product with the values: forward and backward. A kernel that keeps none leaves out the mask. */
function attention({ model, cluster, tokens, tp }) {
  const flops = (2 * tokens * model.num_tokens * model.score_width) / tp;
  const stored = flops / (cluster.flops_per_s * cluster.efficiency);
  const causal = flops / 2 / (cluster.flops_per_s * (cluster.overheads.attention_share || cluster.efficiency));
  return model.is_flash ? [causal, 2.5 * causal] : [stored, 2 * stored];
}

/** Of a layer's forward and backward, for one micro-batch: an (m, k) by (k, n) goes back as (m, n, k), (k, m, n). */
function products(terms) {
  const { model, tokens, tp: t, ep, cluster } = terms;
  const fast = cluster.overheads.linear_speedup;
  const dense = model.mlp_out - model.routed * model.expert_width;
  const gates = model.mlp_in / model.mlp_out;
  let [forward, backward] = attention(terms);
  const add = (rows, often, matrices) => {
    for (const [depth, columns] of matrices) {
      forward += product(terms, rows, depth, columns, 1, fast);
      backward += product(terms, rows, columns, depth, 1, fast) + product(terms, depth, rows, columns, often, fast);
    }
  };
  add(tokens, 1, [
    [model.width, model.attention_in / t],
    [model.attention_out / t, model.width],
    [model.width, (gates * dense) / t],
    [dense / t, model.width],
  ]);
  const experts = [
    [model.width, gates * model.expert_width],
    [model.expert_width, model.width],
  ];
  if (model.routed > 0) add((tokens * model.routed) / t, model.num_experts / ep, experts);
  return [forward, backward];
}

/** Products, passes over memory, and what a layer's forward or backward takes beyond both to be launched. */
function computed(terms) {
  const { cluster, model, again, selective } = terms;
  const { launch_s: least, expert_launch_s } = cluster.overheads;
  const waits = model.routed > 0 ? expert_launch_s : 0;
  const [forward, backward] = products(terms);
  const whole = terms.kept(null); // a third of the passes are in the forward, which recomputation repeats
  const rate = cluster.num_passes / cluster.memory_bytes_per_s;
  const scores = selective ? attention(terms)[0] : 0;
  const repeated = (again * whole) / 3 + (selective ? (whole - terms.kept("selective")) / 3 : 0);
  const idle = (often, busy) => max(often * least - busy, 0);
  const ahead = idle(1, forward + (whole / 3) * rate) * (1 + again);
  const behind = idle(2, backward + ((whole * 2) / 3) * rate);
  const often = terms.m * terms.layers;
  return {
    matmul_s: often * (forward + backward + again * forward + scores),
    elementwise_s: often * (whole + repeated) * rate,
    launch_s: often * (ahead + behind + (3 + again) * waits),
  };
}

/** What others wait for the last stage, which has all of the logits' products, but may have one layer less. */
function last({ model, cluster, pp, m, layers }, busy_s, head_s) {
  const spare_s = layers * pp > model.num_layers ? busy_s / (m * layers) : 0;
  return m * max(cluster.overheads.head_share * head_s * (1 - 1 / pp) - spare_s, 0);
}

/**
 * Bytes per second of a group that spans so many neighbouring GPUs; of it `num_shared` are on each node.
 * @param {Terms} terms
 * @param {number} span
 * @param {number} num_shared
 * @returns {number}
 */
function bandwidth({ cluster }, span, num_shared = 1) {
  const inside = cluster.inside_bytes_per_s * cluster.overheads.inside_share;
  const across = cluster.across_bytes_per_s * cluster.overheads.across_share * max(num_shared, 1);
  return span <= cluster.gpus_per_node ? inside : min(across, inside);
}

/** Messages of tp, cp, ep and pp. Of cp's, attention on the keys at hand hides what it can. */
function waited(terms, sent) {
  const { cluster, tp, cp, pp, v, m } = terms;
  const { overheads: over, gpus_per_node: node, num_gpus } = cluster;
  const often = m * terms.layers;
  const reductions = 4 + 2 * terms.again; // all-gathers of kept pieces hide behind products
  const bytes = reductions * ring_sent_bytes(tp, terms.between_bytes);
  const hops = tp > node ? reductions * 2 * over.hop_s * log2(tp) : 0;
  const [forward, backward] = attention(terms);
  const ring_s = sent.cp_bytes / bandwidth(terms, tp * cp); // each hop is from one GPU to one other
  const sends = pp > 1 ? 2 * v * m * over.send_node_s * max(num_gpus / node - 1, 0) : 0;
  return {
    tp_s: (1 - over.tensor_hidden_share) * often * (bytes / bandwidth(terms, tp, min(tp, node)) + hops),
    cp_s: max(ring_s - ((often * (cp - 1)) / cp) * (forward + backward), 0),
    ep_s: sent.ep_bytes * dispatched(terms),
    pp_s: (sent.pp_bytes / bandwidth(terms, pp * terms.shards * terms.replicas * tp) + sends)
      * (v > 1 ? 1 - over.stage_hidden_share : 1),
  };
}

/** Seconds of a byte to experts: once for each node it crosses on the GPU's own card, the rest stays inside. */
function dispatched({ cluster, model, ep }) {
  const { gpus_per_node: node, overheads } = cluster;
  const [nodes, often] = [max(ep / node, 1), max(model.routed, 1)];
  const once = (nodes * (1 - (1 - 1 / nodes) ** often)) / often;
  const across = (once * max(ep - node, 0)) / max(ep - 1, 1);
  return max(
    across / (cluster.across_bytes_per_s * overheads.across_share),
    (1 - across) / (cluster.inside_bytes_per_s * overheads.inside_share),
  );
}

/** Messages of data parallelism, if none hide: bytes, and a wait for each rank that the ring passes. */
function replicas(terms) {
  const { gpus_per_node: node, overheads } = terms.cluster;
  const span = terms.shards * terms.tp;
  const often = sum(num_passes(terms.zero_stage, terms.m));
  const hops = (span > node ? often * (terms.shards - 1) : 0) + 2 * terms.m * (terms.replicas - 1);
  const send = ([bytes, reach, apart]) => bytes / bandwidth(terms, reach, max(floor(node / apart), 1));
  return sum(terms.rings().map(send)) + hops * terms.layers * overheads.ring_hop_s;
}

const sum = parts => Object.values(parts).reduce((a, b) => a + b, 0);

/**
 * What a rank spends in a step, by what it is for.
 * @param {Terms} terms
 * @param {Object<string, number>} sent   bytes, by axis
 * @param {number} state_bytes
 * @returns {Object<string, number>}
 */
function seconds(terms, sent, state_bytes) {
  const { cluster, zero_stage } = terms;
  const { slowdown, hidden_share } = cluster.overheads;
  const head_s = 3 * product(terms, terms.tokens, terms.model.width, terms.model.vocab_size / terms.tp);
  const busy = { ...computed(terms), ...waited(terms, sent) };
  busy.matmul_s += (terms.m * head_s) / terms.pp;
  const busy_s = sum(busy);
  const share = pipeline_bubble(terms.pp, terms.m, terms.v);
  const hidden = zero_stage >= 2 ? 0 : (hidden_share * ((2 / 3) * busy_s)) / terms.m;
  const spent = {
    ...busy,
    matmul_s: busy.matmul_s + last(terms, busy_s, head_s),
    bubble_s: (busy_s * share) / (1 - share),
    dp_s: max(replicas(terms) - hidden, 0),
    update_s: (2 * state_bytes) / cluster.memory_bytes_per_s,
  };
  return Object.fromEntries(Object.entries(spent).map(([part, s]) => [part, slowdown * s]));
}

export { seconds };
