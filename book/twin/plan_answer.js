/* The twin of book/cost/search.py and answer.py: all layouts of a model on a cluster, the fastest that fits, and what
   the measured steps nearest to it say of its time. */
import { all_layouts } from "./plan_layouts.js";
import { Terms, costs, estimate } from "./plan_step.js";

const { abs, log2, round, floor, min } = Math;
const TOKENS_A_STEP = 4_194_304;
const NUM_NEAREST = 24;

/**
 * Sequences that make about so many tokens, and a power of two times the GPUs or a part of them.
 * @param {Sizes} model
 * @param {number} num_gpus
 * @param {number} tokens_a_step
 * @returns {number}
 */
function default_batch({ num_tokens }, num_gpus, tokens_a_step = TOKENS_A_STEP) {
  let batch = num_gpus;
  while (batch * num_tokens < tokens_a_step && batch * 2 * num_tokens <= 2 * tokens_a_step) batch *= 2;
  while (batch * num_tokens >= 2 * tokens_a_step && batch % 2 === 0) batch /= 2;
  return batch;
}

/** Layouts that measured steps test: no ZeRO-2 or 3 in a pipeline. */
const known = ({ zero_stage, pp }) => zero_stage < 2 || pp === 1;

/**
 * The layouts that fit, with bytes and seconds, fastest first: those that `plan` chooses from.
 * @param {Sizes} model
 * @param {Cluster} cluster
 * @param {number} global_batch
 * @param {{parameters: number, gradients: number, optimizer: number}} each
 * @returns {{total: number, least: number, ranked: {layout: Layout, cost: Object<string, number>}[]}}
 *   least: bytes of the smallest layout, if none fits
 */
function search(model, cluster, global_batch, each) {
  const most = {
    most_tp: cluster.gpus_per_node,
    most_cp: model.num_tokens >= 32_768 ? 8 : 1,
    most_ep: model.num_experts > 1 ? 64 : 1,
  };
  const layouts = all_layouts(model, cluster.num_gpus, global_batch, most);
  const usable = cluster.usable_share * cluster.memory_bytes;
  const ranked = [];
  const termsOf = layout => new Terms(model, cluster, layout, global_batch, each);
  for (const layout of layouts.filter(known)) {
    const terms = termsOf(layout);
    const held = terms.held(); // most do not fit, and need no seconds
    if (held.memory_bytes <= usable) ranked.push({ layout, cost: costs(terms, held) });
  }
  ranked.sort((a, b) => a.cost.step_s - b.cost.step_s || a.cost.memory_bytes - b.cost.memory_bytes);
  const smaller = (least, layout) => min(least, termsOf(layout).held().memory_bytes);
  return { total: layouts.length, least: ranked.length ? 0 : layouts.reduce(smaller, Infinity), ranked };
}

/** The value below which so many per cent of the sorted values are. */
function percentile(sorted, q) {
  const at = (q / 100) * (sorted.length - 1);
  const i = floor(at);
  return sorted[i] + (at - i) * ((sorted[i + 1] ?? sorted[i]) - sorted[i]);
}

/**
 * A step as numbers whose differences tell how far apart two steps are; 1 is a factor of 2, or another kind.
 * @param {number[]} step   parameters, GPUs, tp, pp, tokens of a micro-batch, and whether it is ZeRO-2 or 3
 * @returns {number[]}
 */
function featuresOf([parameters, gpus, tp, pp, tokens, sharded]) {
  return [log2(parameters) / 2, log2(gpus) / 2, log2(tp), log2(pp), log2(tokens) / 2, 2 * sharded];
}

/**
 * What the measured steps nearest to a layout took over their estimates.
 * @param {Sizes} model             with num_parameters
 * @param {Layout} layout
 * @param {string} gpu
 * @param {string} software
 * @param {{name: string, gpu: string, software: string, features: number[], ratio: number}[]} rows   measured steps,
 *   each with its data set, and what it took over its estimate
 * @returns {[number[], string[]]}  three quartiles and nine of ten; the sets that the rows are from
 */
function error_bar(model, layout, gpu, software, rows) {
  const { dp, cp, tp, pp, micro_batch_size, zero_stage } = layout;
  const gpus = pp * dp * tp * cp;
  const tokens = micro_batch_size * model.num_tokens;
  const mine = featuresOf([model.num_parameters, gpus, tp, pp, tokens, zero_stage >= 2 ? 1 : 0]);
  const all = rows.map(row => {
    const away = row.features.reduce((all, x, k) => all + abs(mine[k] - x), 0);
    return { row, away: round(away * 1e9) };
  });
  const nearest = alike => {
    const some = all.filter(({ row }) => alike(row));
    const chosen = some.length >= NUM_NEAREST / 2 ? some : [...all];
    return chosen.sort((a, b) => a.away - b.away).slice(0, NUM_NEAREST / 2);
  };
  const near = [...nearest(row => row.gpu === gpu), ...nearest(row => row.software === software)];
  const ratios = near.map(({ row }) => row.ratio).sort((a, b) => a - b);
  return [[25, 50, 75, 90].map(q => percentile(ratios, q)), [...new Set(near.map(({ row }) => row.name))]];
}

/**
 * The fastest layout that fits, with its estimate and seconds between which half of the nearest steps would be.
 * @param {Sizes} model
 * @param {Cluster} cluster
 * @param {number} global_batch
 * @param {{parameters: number, gradients: number, optimizer: number}} each
 * @param {{gpu: string, software: string, rows: object[]}} measured   rows as in `error_bar`
 * @returns {Object<string, any>}   what `search` gives, and if something fits: layout, cost, low_s, high_s, worst_s
 */
function plan(model, cluster, global_batch, each, measured) {
  const found = search(model, cluster, global_batch, each);
  if (!found.ranked.length) return found;
  const { layout } = found.ranked[0];
  const cost = estimate(model, cluster, layout, global_batch, each);
  const [bar, nearest] = error_bar(model, layout, measured.gpu, measured.software, measured.rows);
  const [low_s, , high_s, worst_s] = bar.map(of => of * cost.step_s);
  return { ...found, layout, cost, low_s, high_s, worst_s, nearest };
}

export { default_batch, featuresOf, plan };
