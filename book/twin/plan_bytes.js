/* The twin of what book/cost/activations.py, state.py and traffic.py say of bytes that a GPU holds and sends in a step.
   The sources are in the docstrings of the Python functions. */
import { BUS_FACTORS, ring_sent_bytes } from "./links.js";

/**
 * The sizes of a layer and of what it keeps, as book.cost.LayerShape has them.
 * @typedef {object} LayerShape
 * @property {number} num_activations   numbers in what goes from layer to layer
 * @property {number} outside_bytes
 * @property {number} inside_bytes
 * @property {number} score_bytes
 */

/**
 * Bytes that a transformer layer keeps on each of t ranks for its backward.
 * @param {LayerShape} layer
 * @param {number} group_size
 * @param {boolean | number} sequence_parallel   and with it inputs are kept as pieces, and gathered again
 * @param {string | null} recompute
 * @returns {number}
 */
function activation_bytes(layer, group_size, sequence_parallel, recompute) {
  const { num_activations, outside_bytes, inside_bytes, score_bytes } = layer;
  if (recompute === "half") {
    const part = how => activation_bytes(layer, group_size, sequence_parallel, how);
    return (part(null) + part("full")) / 2;
  }
  if (recompute === "full") return (2 * num_activations) / (sequence_parallel ? group_size : 1);
  const whole = sequence_parallel ? 0 : outside_bytes;
  const inside = outside_bytes + inside_bytes - whole + (recompute ? 0 : score_bytes);
  return num_activations * (whole + inside / group_size);
}

/**
 * Bytes of parameters, gradients and optimizer on each of N ranks: what a stage of ZeRO shards is over N.
 * @param {number} num_parameters
 * @param {number} zero_stage
 * @param {number} num_shards
 * @param {{parameters: number, gradients: number, optimizer: number, copied?: boolean}} each   bytes of one parameter
 * @returns {[number, number, number]}
 */
function state_bytes(num_parameters, zero_stage, num_shards, each) {
  const part = (bytes, first) => (num_parameters * bytes) / (zero_stage >= first ? num_shards : 1);
  const held = each.copied && zero_stage % 3 === 0 ? 0 : each.parameters;
  return [part(held, 3), part(each.gradients, 2), part(each.optimizer, 1)];
}

/**
 * Bytes that each of t ranks sends in a transformer layer's forward and backward.
 * @param {number} group_size
 * @param {number} num_bytes   of what goes from layer to layer
 * @param {boolean | number} regather
 * @returns {number}
 */
function tensor_parallel_sent_bytes(group_size, num_bytes, regather = false) {
  const all_gathers = regather ? 2 * BUS_FACTORS.all_gather(group_size) * num_bytes : 0;
  return 4 * ring_sent_bytes(group_size, num_bytes) + all_gathers;
}

/**
 * How often a step sends (N-1)/N of all gradients, and of all parameters.
 * @param {number} zero_stage
 * @param {number} num_micro_batches
 * @returns {number[]}
 */
function num_passes(zero_stage, num_micro_batches = 1) {
  const m = num_micro_batches;
  const passes = [
    [2, 0],
    [1, 1],
    [m, 1],
    [m, 2 * m],
  ];
  return passes[zero_stage];
}

/**
 * Messages that a rank of a pipeline sends for one micro-batch: the most that one does, and the mean over ranks.
 * @param {number} num_ranks
 * @param {number} stages_per_rank
 * @returns {number[]}
 */
function pipeline_sends(num_ranks, stages_per_rank = 1) {
  const [p, v] = [num_ranks, stages_per_rank];
  return p === 1 ? [0, 0] : [2 * v - (p === 2 ? 1 : 0), (2 * (p * v - 1)) / p];
}

/**
 * Bytes that each rank sends in a training step with sharded state.
 * @param {number} zero_stage
 * @param {number} num_shards
 * @param {number} num_bytes   of all parameters
 * @returns {number}
 */
function sharded_sent_bytes(zero_stage, num_shards, num_bytes) {
  const [gradients, parameters] = num_passes(zero_stage);
  return (gradients + parameters) * BUS_FACTORS.all_gather(num_shards) * num_bytes;
}

export { activation_bytes, state_bytes, tensor_parallel_sent_bytes, num_passes, pipeline_sends, sharded_sent_bytes };
