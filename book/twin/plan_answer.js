/* The twin of book/cost/search.py and answer.py: all layouts of a model on a cluster, the fastest that fits, and what
   measured steps say of its time. */
import { all_layouts } from "./plan_layouts.js";
import { Terms, costs, estimate } from "./plan_step.js";

const { min } = Math;

/**
 * Sequences that make about so many tokens, and a power of two times the GPUs or a part of them.
 * @param {Sizes} model
 * @param {number} num_gpus
 * @param {number} tokens_a_step
 * @returns {number}
 */
function default_batch({ num_tokens }, num_gpus, tokens_a_step) {
  let batch = num_gpus;
  while (batch * num_tokens < tokens_a_step && batch * 2 * num_tokens <= 2 * tokens_a_step) batch *= 2;
  while (batch * num_tokens >= 2 * tokens_a_step && batch % 2 === 0) batch /= 2;
  return batch;
}

/** Whether measured steps test a layout and the software has it: see `known` in book/cost/layouts.py. */
function known({ zero_stage, pp, dp, cp, tp, ep }, software) {
  if (software !== "torchtitan") return zero_stage < 2 || pp === 1;
  if (zero_stage) return (zero_stage > 1) === (pp === 1);
  return cp === 1 && tp % ep === 0 && (pp > 1 || dp === 1);
}

/**
 * The layouts that fit, with bytes and seconds, fastest first: those that `plan` chooses from.
 * @param {Sizes} model
 * @param {Cluster} cluster
 * @param {number} global_batch
 * @param {{parameters: number, gradients: number, optimizer: number}} each
 * @param {number} long
 * @param {string} software
 * @returns {{total: number, least: number, ranked: {layout: Layout, cost: Object<string, number>}[]}}
 *   least: bytes of the smallest layout, if none fits
 */
function search(model, cluster, global_batch, each, long, software) {
  const most = {
    most_tp: cluster.gpus_per_node,
    most_cp: model.num_tokens >= long ? 8 : 1,
    most_ep: model.num_experts > 1 ? 64 : 1,
    node: cluster.gpus_per_node,
  };
  const layouts = all_layouts(model, cluster.num_gpus, global_batch, most);
  const usable = cluster.usable_share * cluster.memory_bytes;
  const ranked = [];
  const termsOf = layout => new Terms(model, cluster, layout, global_batch, each);
  for (const layout of layouts.filter(one => known(one, software))) {
    const terms = termsOf(layout);
    const held = terms.held(); // most do not fit, and need no seconds
    if (held.memory_bytes <= usable) ranked.push({ layout, cost: costs(terms, held) });
  }
  ranked.sort((a, b) => a.cost.step_s - b.cost.step_s || a.cost.memory_bytes - b.cost.memory_bytes);
  const smaller = (least, layout) => min(least, termsOf(layout).held().memory_bytes);
  return { total: layouts.length, least: ranked.length ? 0 : layouts.reduce(smaller, Infinity), ranked };
}

/**
 * The fastest layout that fits, with its estimate and seconds between which half of such measured steps would be.
 * @param {Sizes} model
 * @param {Cluster} cluster
 * @param {number} global_batch
 * @param {{parameters: number, gradients: number, optimizer: number}} each
 * @param {number} long   tokens of a sequence from which on cp is tried
 * @param {[number[], string][]} bars   of book.cost.scoreboard.bar, three quartiles and nine of ten, and whose they
 *   are: without pipelines, with, and with experts
 * @param {string} software
 * @returns {Object<string, any>}   what `search` gives, and if something fits: layout, cost, low_s, high_s, worst_s
 */
function plan(model, cluster, global_batch, each, long, bars, software) {
  const found = search(model, cluster, global_batch, each, long, software);
  if (!found.ranked.length) return found;
  const { layout } = found.ranked[0];
  const cost = estimate(model, cluster, layout, global_batch, each);
  const [bar, basis] = bars[model.num_experts > 1 ? 2 : Number(layout.pp > 1)];
  const [low_s, , high_s, worst_s] = bar.map(of => of * cost.step_s);
  return { ...found, layout, cost, low_s, high_s, worst_s, basis };
}

export { default_batch, plan };
