/* The twin of book/cost/step.py: what a layout costs on a cluster: bytes held, bytes sent, seconds of a step. */
import { ring_sent_bytes } from "./links.js";
import { activation_bytes, state_bytes, tensor_parallel_sent_bytes, num_passes, pipeline_sends } from "./plan_bytes.js";
import { seconds } from "./plan_seconds.js";

const { max, min, ceil, floor } = Math;
const PARTS = [
  ...["matmul_s", "elementwise_s", "launch_s", "tp_s", "cp_s", "ep_s", "pp_s", "bubble_s", "dp_s", "update_s"],
];

/**
 * A model in numbers, by the names of book.cost.sizes.Sizes; a cluster by those of book.cost.Cluster.
 * @typedef {Object<string, number>} Sizes
 * @typedef {Object<string, any>} Cluster
 */

/** A layout's numbers, and what it holds and sends. m: micro-batches of a step; v: stages of a rank. */
class Terms {
  /**
   * @param {Sizes} model
   * @param {Cluster} cluster
   * @param {Layout} layout
   * @param {number} global_batch
   * @param {{parameters: number, gradients: number, optimizer: number}} each   bytes of state of one parameter
   */
  constructor(model, cluster, layout, global_batch, each) {
    Object.assign(this, layout, { model, cluster, each });
    const { pp, dp, tp, cp, ep } = layout;
    this.v = layout.stages_per_rank;
    this.m = global_batch / (dp * layout.micro_batch_size);
    this.again = { full: 1, half: 0.5 }[layout.recompute] ?? 0; // of a forward
    this.selective = layout.recompute === "selective";
    this.shards = (dp * cp) / layout.replicas;
    this.layers = ceil(model.num_layers / pp / this.v) * this.v;
    this.tokens = (layout.micro_batch_size * model.num_tokens) / cp;
    const scores = (model.score_bytes * model.num_heads * model.num_tokens) / model.width;
    this.shape = {
      num_activations: layout.micro_batch_size * (model.num_tokens / cp) * model.width,
      outside_bytes: model.kept_outside_bytes,
      inside_bytes: (2 * model.kept_inside) / model.width,
      score_bytes: model.is_flash ? 0 : scores,
    };
    this.between_bytes = 2 * this.shape.num_activations; // what goes from layer to layer, in 16 bits
    const ends = model.embedding_parameters + (pp === 1 ? model.head_parameters : 0);
    this.parameters = (this.layers * model.layer_parameters + ends) / tp;
    this.expert_parameters = (this.layers * model.expert_parameters) / ep;
    this.expert_shards = (this.shards * tp) / ep;
  }

  /** Bytes that a layer keeps of one micro-batch. */
  kept(recompute) {
    return activation_bytes(this.shape, this.tp, this.sequence_parallel, recompute);
  }

  /** How often the first rank keeps a micro-batch of all its layers: p, or p and a part if interleaved. */
  in_flight() {
    const { pp, m, v } = this;
    return v > 1 ? min(v * m, 2 * (pp - 1) + (v - 1) * pp + 1) / v : min(pp, m);
  }

  /** The same of the last rank, which runs each micro-batch's backward at once. */
  last_in_flight() {
    const { pp, m, v } = this;
    return v > 1 ? min(m, ((v - 1) * pp + 1) / v) : 1;
  }

  /** By what it is for. Experts are on ep ranks of a stage, and have fewer replicas. */
  held() {
    const { model, each, tp, pp, m, zero_stage, layers } = this;
    const { kept_factor: more, logit_bytes, fixed_bytes } = this.cluster.overheads;
    const layer = model.layer_parameters / tp + model.expert_parameters / this.ep;
    const kept = this.kept(this.recompute);
    const shared = this.sequence_parallel ? tp : 1;
    const n = this.shape.num_activations;
    // the embedding's dropout mask; at the other end the last norm and the logits
    const first = this.in_flight() * layers * kept + (min(pp, m) * n) / shared;
    const last = (4 * n) / shared + (logit_bytes * this.tokens * model.vocab_size) / tp / more;
    const both = pp === 1 ? first + last : max(first, this.last_in_flight() * layers * kept + last);
    // ZeRO-3 holds one gathered layer while it gathers the next; from ZeRO-2 on, one layer's full gradients exist
    const gathered = layer * ((zero_stage === 3 ? 2 * each.parameters : 0) + (zero_stage >= 2 ? each.gradients : 0));
    const found = {
      state_bytes: this.state(),
      activation_bytes: more * both,
      gathered_bytes: gathered + more * (this.kept(null) - kept) + fixed_bytes,
    };
    return { ...found, memory_bytes: found.state_bytes + found.activation_bytes + found.gathered_bytes };
  }

  /** Bytes of parameters, gradients and optimizer. */
  state() {
    const { zero_stage, shards, each } = this;
    const experts = state_bytes(this.expert_parameters, zero_stage, this.expert_shards, each);
    return [...state_bytes(this.parameters, zero_stage, shards, each), ...experts].reduce((a, b) => a + b);
  }

  /** By axis, of the rank that sends most. */
  sent() {
    const { model, tp, cp, ep, again, between_bytes } = this;
    const repeated = 2 * again * ring_sent_bytes(tp, between_bytes);
    const hop = cp > 1 ? (2 * this.tokens * model.key_value_width) / tp : 0;
    const tokens = (2 * this.tokens * model.width * model.routed) / tp;
    const often = this.m * this.layers;
    return {
      tp_bytes: often * (tensor_parallel_sent_bytes(tp, between_bytes, this.sequence_parallel) + repeated),
      cp_bytes: often * ((3 + again) * (cp - 1) + 1) * hop, // the gradients of keys and values go home
      ep_bytes: ((often * (4 + 2 * again) * (ep - 1)) / ep) * tokens,
      pp_bytes: (pipeline_sends(this.pp, this.v)[0] * this.m * between_bytes) / tp,
      dp_bytes: this.rings().reduce((all, [bytes]) => all + bytes, 0),
    };
  }

  /** Rings of data parallelism: bytes that a rank sends, GPUs that a ring spans, how far apart neighbours are. */
  rings() {
    const { tp, ep, m, shards, replicas, parameters, expert_shards, expert_parameters } = this;
    const [gradients, gathers] = num_passes(this.zero_stage, m);
    const passes = gradients + (this.cluster.overheads.gather_bytes / 2) * gathers; // two in a ring all-reduce
    const span = shards * tp;
    const parts = [
      [parameters, shards, tp],
      [expert_parameters, expert_shards, ep],
    ];
    return parts.flatMap(([numbers, ranks, apart]) => [
      [passes * ring_sent_bytes(ranks, numbers), span, apart],
      [m * ring_sent_bytes(replicas, (2 * numbers) / ranks), span * replicas, span],
    ]);
  }
}

/**
 * FLOPs of a training step, without recomputation.
 * @param {Sizes} model
 * @param {number} num_sequences
 * @returns {number}
 */
function stepFlops(model, num_sequences) {
  const { num_tokens, width, attention_in, attention_out, mlp_in, mlp_out } = model;
  const tokens = num_sequences * num_tokens;
  const products = width * (attention_in + attention_out + mlp_in + mlp_out) + num_tokens * model.score_width;
  return 3 * (model.num_layers * 2 * tokens * products + 2 * tokens * width * model.vocab_size);
}

/**
 * The columns of an Estimate, all but the MFU; `held` is what terms.held() gives, if that is known.
 * @param {Terms} terms
 * @param {Object<string, number>} held
 * @returns {Object<string, number>}
 */
function costs(terms, held = terms.held()) {
  const sent = terms.sent();
  const spent = seconds(terms, sent, held.state_bytes);
  return { ...held, ...sent, ...spent, step_s: PARTS.reduce((all, part) => all + spent[part], 0) };
}

/**
 * One layout's estimate.
 * @param {Sizes} model
 * @param {Cluster} cluster
 * @param {Layout} layout
 * @param {number} global_batch
 * @param {{parameters: number, gradients: number, optimizer: number}} each
 * @returns {Object<string, number>}
 */
function estimate(model, cluster, layout, global_batch, each) {
  const found = costs(new Terms(model, cluster, layout, global_batch, each));
  const peak = cluster.num_gpus * cluster.flops_per_s;
  return { ...found, mfu: stepFlops(model, global_batch) / (peak * found.step_s) };
}

/**
 * Sequences of the largest micro-batch with which a GPU holds no more than `room_bytes`; 0 if none fits.
 * @param {Sizes} model
 * @param {Cluster} cluster
 * @param {Layout} layout
 * @param {number} global_batch
 * @param {number} room_bytes
 * @param {{parameters: number, gradients: number, optimizer: number}} each
 * @returns {number}
 */
function largest_micro_batch(model, cluster, layout, global_batch, room_bytes, each) {
  const sequences = global_batch % layout.dp ? 0 : global_batch / layout.dp; // Python refuses what dp does not divide
  const at = micro_batch_size => new Terms(model, cluster, { ...layout, micro_batch_size }, global_batch, each);
  const { pp, stages_per_rank } = layout;
  const rounds = size => max(floor(sequences / size / pp), 1);
  const taken = size =>
    stages_per_rank < 2 || size === layout.micro_batch_size || (sequences / size) % rounds(size) === 0;
  let size = sequences;
  while (size && (sequences % size || !taken(size) || at(size).held().memory_bytes > room_bytes)) size--;
  return size;
}

export { Terms, costs, estimate, largest_micro_batch };
