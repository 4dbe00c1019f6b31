/* The twin of book/cost/ledger.py: what a GPU holds, sends and waits for in a training step, and what limits. */
import { pipeline_sends } from "./plan_bytes.js";
import { Terms, estimate } from "./plan_step.js";

const { floor } = Math;
const AXES = ["tp", "cp", "ep", "pp", "dp"];

/** For each axis, over how many consecutive GPUs a group of it reaches. */
function spans({ pp, dp, tp, cp, ep }) {
  return { tp, cp: tp * cp, ep, pp: pp * dp * tp * cp };
}

/** The share of an axis's bytes, but for dp's, that leaves a node: of k members on each, one hop in k. */
function crossing(layout, axis, node) {
  const [span, size] = [spans(layout)[axis], layout[axis]];
  if (span <= node || size === 1) return 0;
  const near = Math.max(floor(node / floor(span / size)), 1);
  const v = layout.stages_per_rank;
  if (axis === "pp") return (v * Math.ceil(size / near) - 1) / (v * size - 1); // the last stage sends no further
  return axis === "ep" ? (size - near) / (size - 1) : 1 / near;
}

/** Of a ring of data parallelism, the bytes of a member that leave a node. */
function leaving([num_bytes, span, apart], node) {
  return span > node ? num_bytes / Math.max(floor(node / apart), 1) : 0;
}

/**
 * A line of the ledger, by the names of book.cost.ledger.Entry.
 * @param {Sizes} model
 * @param {Cluster} machine   with GPUs of any number
 * @param {Layout} layout
 * @param {number} sequences   of a step
 * @param {{parameters: number, gradients: number, optimizer: number}} each   bytes of state of one parameter
 * @param {number} large_share   of a step, from which on what is waited for is what limits
 * @returns {Object<string, any>}
 */
function entry(model, machine, layout, sequences, each, large_share) {
  const num_gpus = layout.pp * layout.dp * layout.tp * layout.cp;
  const cluster = { ...machine, num_gpus };
  const found = estimate(model, cluster, layout, sequences, each);
  const node = cluster.gpus_per_node;
  const none = { parameters: 0, gradients: 0, optimizer: 0 };
  const part = name => estimate(model, cluster, layout, sequences, { ...none, [name]: each[name] }).state_bytes;
  const [most, mean] = pipeline_sends(layout.pp, layout.stages_per_rank);
  const bytes = { pp_bytes: (found.pp_bytes * mean) / Math.max(most, 1) };
  const sent = share => AXES.reduce((all, axis) => all + { ...found, ...bytes }[`${axis}_bytes`] * share(axis), 0);
  const rings = new Terms(model, cluster, layout, sequences, each).rings();
  const far = sent(axis => (axis === "dp" ? 0 : crossing(layout, axis, node)))
    + rings.reduce((all, ring) => all + leaving(ring, node), 0);
  const exposed_s = AXES.reduce((all, axis) => all + found[`${axis}_s`], 0);
  return {
    parameter_bytes: part("parameters"),
    gradient_bytes: part("gradients"),
    optimizer_bytes: part("optimizer"),
    activation_bytes: found.activation_bytes,
    moment_bytes: found.gathered_bytes,
    memory_bytes: found.memory_bytes,
    room_bytes: cluster.memory_bytes,
    ...{ inside_bytes: sent(() => 1) - far, crossing_bytes: far },
    ...{ step_s: found.step_s, exposed_s, idle_s: found.bubble_s },
    tokens_per_s: (sequences * model.num_tokens) / found.step_s / num_gpus,
    limit: limitOf(found, exposed_s, cluster, large_share),
  };
}

function limitOf({ memory_bytes, bubble_s, step_s }, exposed_s, cluster, large_share) {
  if (memory_bytes > cluster.memory_bytes) return "memory";
  const [seconds, name] = bubble_s > exposed_s ? [bubble_s, "pipeline"] : [exposed_s, "communication"];
  return seconds >= large_share * step_s ? name : "computing";
}

const OUTER_BYTES = 8; // as book.cost.ledger has it

/**
 * The line of one hall's layout, with what the slow line between halls adds to it; as book.cost.ledger.joined.
 * @param {object} line   what `entry` gives for a hall
 * @param {number} num_parameters
 * @param {number} num_gpus   of a hall
 * @param {{halls: number, every: number, parts: number, bytes_per_s: number}} apart   as book.cost.ledger.Apart
 * @param {{parameters: number, gradients: number, optimizer: number}} each   bytes of state of one parameter
 * @param {number} large_share
 * @returns {object} as `entry` gives
 */
function joined(line, num_parameters, num_gpus, { halls, every, parts, bytes_per_s }, each, large_share) {
  const line_bytes = ((2 * (halls - 1)) / halls) * num_parameters * (every > 1 ? 4 / every : 2);
  const line_s = line_bytes / bytes_per_s;
  const waits_s = parts > 1 && every > 1 ? Math.max(line_s - line.step_s, 0) : line_s;
  const step_s = line.step_s + waits_s;
  const outer = every > 1 ? (line.optimizer_bytes * OUTER_BYTES) / each.optimizer : 0;
  const memory_bytes = line.memory_bytes + outer;
  const causes = [[line.exposed_s, "communication"], [line.idle_s, "pipeline"], [waits_s, "line"]];
  const [seconds, cause] = causes.reduce((most, one) => (one[0] > most[0] ? one : most));
  const large = Math.max(line.exposed_s + waits_s, seconds) >= large_share * step_s;
  return {
    ...line,
    ...{ memory_bytes, step_s, optimizer_bytes: line.optimizer_bytes + outer },
    crossing_bytes: line.crossing_bytes + line_bytes / num_gpus,
    exposed_s: line.exposed_s + waits_s,
    tokens_per_s: (line.tokens_per_s * line.step_s) / step_s,
    limit: memory_bytes > line.room_bytes ? "memory" : large ? cause : "computing",
  };
}

export { entry, joined };
