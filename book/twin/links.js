/* The twin of book/cost/links.py: links, and closed forms of what a collective or a pipeline takes on them. n bytes,
   p ranks, latency alpha (s), beta = 1 / bandwidth (s per byte); adding takes no time. The sources are in the
   docstrings of the Python functions. */

/** A link that takes `latency_s + num_bytes / bandwidth_bytes_per_s` for a message. */
class Link {
  /**
   * @param {number} latency_s
   * @param {number} bandwidth_bytes_per_s
   */
  constructor(latency_s, bandwidth_bytes_per_s) {
    Object.assign(this, { latency_s, bandwidth_bytes_per_s });
  }

  /**
   * Seconds that one message takes.
   * @param {number} num_bytes
   * @returns {number}
   */
  transfer_s(num_bytes) {
    return this.latency_s + num_bytes / this.bandwidth_bytes_per_s;
  }
}

/**
 * (p-1) alpha + (p-1)/p n beta: a ring reduce-scatter, and also a ring all-gather.
 * @param {number} world_size
 * @param {number} num_bytes
 * @param {Link} link
 * @returns {number}
 */
function ring_all_gather_s(world_size, num_bytes, link) {
  return (world_size - 1) * link.transfer_s(num_bytes / world_size);
}

/**
 * 2(p-1) alpha + 2(p-1)/p n beta.
 * @param {number} world_size
 * @param {number} num_bytes
 * @param {Link} link
 * @returns {number}
 */
function ring_all_reduce_s(world_size, num_bytes, link) {
  return 2 * ring_all_gather_s(world_size, num_bytes, link);
}

/** @type {Object<string, (p: number) => number>} */
const BUS_FACTORS = { all_reduce: p => (2 * (p - 1)) / p, all_gather: p => (p - 1) / p };

/**
 * Bytes that every rank of a ring all-reduce sends: 2(p-1)/p n, the least possible.
 * @param {number} world_size
 * @param {number} num_bytes
 * @returns {number}
 */
function ring_sent_bytes(world_size, num_bytes) {
  return BUS_FACTORS.all_reduce(world_size) * num_bytes;
}

/**
 * (p-1) / (v M + p - 1): the idle share of a step of GPipe or 1F1B (v = 1), or of interleaved 1F1B.
 * @param {number} num_ranks
 * @param {number} num_micro_batches
 * @param {number} stages_per_rank
 * @returns {number}
 */
function pipeline_bubble(num_ranks, num_micro_batches, stages_per_rank = 1) {
  return (num_ranks - 1) / (stages_per_rank * num_micro_batches + num_ranks - 1);
}

export { BUS_FACTORS, Link, ring_all_gather_s, ring_all_reduce_s, ring_sent_bytes, pipeline_bubble };
