/* The twin of book/cost/layouts.py: all the ways in which a training step can be cut over GPUs. */

const MOST_STAGES = 12; // of a rank

/** Whether equal stages are as many as the layers, the embedding and the head fill. */
function divides(layers, stages) {
  const longest = Math.ceil(layers / stages);
  return stages * longest - layers <= longest + 1;
}

/**
 * A layout is a plain object.
 * @typedef {object} Layout
 * @property {number} pp
 * @property {number} dp
 * @property {number} tp
 * @property {number} cp
 * @property {number} ep
 * @property {number} micro_batch_size
 * @property {number} stages_per_rank
 * @property {number} zero_stage
 * @property {number} sequence_parallel     0 or 1
 * @property {string | null} recompute      null, selective, half or full
 * @property {number} replicas              of shards, in ZeRO-2 and 3
 */

/**
 * All divisors of a number, smallest first.
 * @param {number} number
 * @returns {number[]}
 */
function divisors(number) {
  const small = [];
  for (let k = 1; k * k <= number; k++) if (number % k === 0) small.push(k);
  const large = small.map(k => number / k).reverse();
  return small.concat(large[0] === small.at(-1) ? large.slice(1) : large);
}

/** The sizes that ep can have. */
function expertsOver(model, ranks, most) {
  const sizes = divisors(Math.min(most, ranks)).filter(ep => ranks % ep === 0 && model.num_experts % ep === 0);
  return model.num_experts > 1 && sizes.length ? sizes : [1];
}

/** pp, dp, tp, cp, ep, micro_batch_size and stages_per_rank of every layout. */
function* shapes(model, num_gpus, global_batch, { most_tp, most_cp, most_ep }) {
  for (const tp of divisors(num_gpus)) {
    if (tp > most_tp || model.num_heads % tp || model.num_kv_heads % tp) continue;
    for (const cp of divisors(Math.min(most_cp, num_gpus))) {
      if ((num_gpus / tp) % cp || (cp > 1 && model.num_tokens % (2 * cp))) continue;
      for (const pp of divisors(num_gpus / tp / cp)) {
        const dp = num_gpus / tp / cp / pp;
        if (!divides(model.num_layers, pp) || global_batch % dp) continue;
        for (const micro_batch_size of cp === 1 ? divisors(global_batch / dp) : [1]) {
          for (const ep of expertsOver(model, dp * cp * tp, most_ep)) {
            const shape = { pp, dp, tp, cp, ep, micro_batch_size, stages_per_rank: 1 };
            yield shape;
            if (pp === 1 || (global_batch / dp / micro_batch_size) % pp) continue;
            const most_stages = Math.min(Math.floor(model.num_layers / pp) + 1, MOST_STAGES);
            for (let stages_per_rank = 2; stages_per_rank <= most_stages; stages_per_rank++) {
              if (divides(model.num_layers, pp * stages_per_rank)) yield { ...shape, stages_per_rank };
            }
          }
        }
      }
    }
  }
}

/**
 * Every layout of a model on all of these GPUs that divides evenly.
 * @param {Sizes} model          with num_kv_heads
 * @param {number} num_gpus
 * @param {number} global_batch  sequences of a step
 * @param {{most_tp?: number, most_cp?: number, most_ep?: number, node?: number}} most
 * @returns {Layout[]}
 */
function all_layouts(model, num_gpus, global_batch, { most_tp = num_gpus, most_cp = 1, most_ep = 1, node = 0 } = {}) {
  const found = [];
  const between = model.is_flash ? "half" : "selective";
  for (const shape of shapes(model, num_gpus, global_batch, { most_tp, most_cp, most_ep })) {
    const { dp, tp, cp } = shape;
    const pieces = tp > 1 && (model.num_tokens / cp) % tp === 0;
    for (let zero_stage = 0; zero_stage < (dp * cp > 1 ? 4 : 1); zero_stage++) {
      for (let sequence_parallel = 0; sequence_parallel < (pieces ? 2 : 1); sequence_parallel++) {
        for (const recompute of [null, between, "full"]) {
          found.push({ ...shape, zero_stage, sequence_parallel, recompute, replicas: 1 });
        }
      }
    }
  }
  const sharded = found.filter(({ pp, zero_stage }) => pp === 1 && zero_stage >= 2);
  for (let replicas = 2; node && num_gpus % (replicas * node) === 0; replicas *= 2) {
    const can = ({ dp, ep }) => dp % replicas === 0 && (num_gpus / replicas) % ep === 0;
    found.push(...sharded.filter(can).map(layout => ({ ...layout, replicas })));
  }
  return found;
}

export { all_layouts };
