/* The twin of book/cost/seconds.py: the seconds of a step, part by part. `terms` is of plan_step.js. */
import { pipeline_bubble, ring_sent_bytes } from "./links.js";

const { max, min, floor, log2 } = Math;

/** A product takes as long as its depth and a constant say, for its ends are no work for the matrix units. */
function product({ cluster }, rows, depth, columns) {
  const rate = cluster.flops_per_s * cluster.efficiency;
  return (2 * rows * columns * (depth + cluster.overheads.product_depth)) / rate;
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
  const { model, tokens, tp: t } = terms;
  let [forward, backward] = attention(terms);
  const matrices = [
    [model.width, model.attention_in / t],
    [model.attention_out / t, model.width],
    [model.width, model.mlp_in / t],
    [model.mlp_out / t, model.width],
  ];
  for (const [depth, columns] of matrices) {
    forward += product(terms, tokens, depth, columns);
    backward += product(terms, tokens, columns, depth) + product(terms, depth, tokens, columns);
  }
  return [forward, backward];
}

/** Products, passes over memory, and what a layer's forward or backward takes beyond both to be launched. */
function computed(terms) {
  const { cluster, model, full, selective, tp, pp } = terms;
  const least = cluster.overheads.launch_s;
  const [forward, backward] = products(terms);
  const whole = terms.kept(null); // a third of the passes are in the forward, which recomputation repeats
  const rate = cluster.num_passes / cluster.memory_bytes_per_s;
  const again = full ? forward : selective ? attention(terms)[0] : 0;
  const repeated = full ? whole / 3 : selective ? (whole - terms.kept("selective")) / 3 : 0;
  const idle = (often, busy) => max(often * least - busy, 0);
  const ahead = idle(1, forward + (whole / 3) * rate) * (full ? 2 : 1);
  const behind = idle(2, backward + ((whole * 2) / 3) * rate);
  const head = (3 * product(terms, terms.tokens, model.width, model.vocab_size / tp)) / pp;
  const often = terms.m * terms.layers;
  return {
    matmul_s: often * (forward + backward + again) + terms.m * head,
    elementwise_s: often * (whole + repeated) * rate,
    launch_s: often * (ahead + behind),
  };
}

/**
 * Bytes per second of a group that spans so many neighbouring GPUs; of it `num_shared` are on each node.
 * @param {Terms} terms
 * @param {number} span
 * @param {number} num_shared
 * @returns {number}
 */
function bandwidth({ cluster }, span, num_shared = 1) {
  const inside = cluster.inside_bytes_per_s;
  const across = cluster.across_bytes_per_s * cluster.overheads.across_share * max(num_shared, 1);
  return span <= cluster.gpus_per_node ? inside : min(across, inside);
}

/** Messages of tp, cp, ep and pp. Of cp's, attention on the keys at hand hides what it can. */
function waited(terms, sent) {
  const { cluster, tp, cp, ep, pp, v, m } = terms;
  const { overheads: over, gpus_per_node: node, num_gpus } = cluster;
  const often = m * terms.layers;
  const reductions = terms.full ? 6 : 4; // all-gathers of kept pieces hide behind products
  const bytes = reductions * ring_sent_bytes(tp, terms.between_bytes);
  const hops = tp > node ? reductions * 2 * over.hop_s * log2(tp) : 0;
  const [forward, backward] = attention(terms);
  const ring_s = sent.cp_bytes / bandwidth(terms, tp * cp, max(floor(node / tp), 1));
  const sends = pp > 1 ? 2 * v * m * over.send_node_s * max(num_gpus / node - 1, 0) : 0;
  return {
    tp_s: often * (bytes / bandwidth(terms, tp, min(tp, node)) + hops),
    cp_s: max(ring_s - ((often * (cp - 1)) / cp) * (forward + backward), 0),
    ep_s: sent.ep_bytes / bandwidth(terms, tp * ep),
    pp_s: sent.pp_bytes / bandwidth(terms, pp * terms.shards * tp) + sends,
  };
}

/** Messages of data parallelism, if none hide: bytes, and a wait for each rank that the ring passes. */
function replicas(terms, num_bytes) {
  const { gpus_per_node: node, overheads } = terms.cluster;
  const span = terms.shards * terms.tp;
  const often = [2, 2, terms.m + 1, 3 * terms.m][terms.zero_stage];
  const hops = span > node ? often * terms.layers * (terms.shards - 1) * overheads.ring_hop_s : 0;
  return num_bytes / bandwidth(terms, span, max(floor(node / terms.tp), 1)) + hops;
}

const sum = parts => Object.values(parts).reduce((a, b) => a + b, 0);

/**
 * What a rank in the middle spends in a step, by what it is for.
 * @param {Terms} terms
 * @param {Object<string, number>} sent   bytes, by axis
 * @param {number} state_bytes
 * @returns {Object<string, number>}
 */
function seconds(terms, sent, state_bytes) {
  const { cluster, zero_stage } = terms;
  const { slowdown, hidden_share } = cluster.overheads;
  const busy = { ...computed(terms), ...waited(terms, sent) };
  const busy_s = sum(busy);
  const share = pipeline_bubble(terms.pp, terms.m, terms.v);
  const hidden = zero_stage >= 2 ? 0 : (hidden_share * ((2 / 3) * busy_s)) / terms.m;
  const spent = {
    ...busy,
    bubble_s: (busy_s * share) / (1 - share),
    dp_s: max(replicas(terms, sent.dp_bytes) - hidden, 0),
    update_s: (2 * state_bytes) / cluster.memory_bytes_per_s,
  };
  return Object.fromEntries(Object.entries(spent).map(([part, s]) => [part, slowdown * s]));
}

export { seconds };
