/* The twin of book/cost/links.py: links, and the closed forms of what a collective or a pipeline takes on them.
   n bytes, p ranks, latency alpha (s), beta = 1 / bandwidth (s per byte), gamma (s per byte added). The sources are
   in the docstrings of the Python functions. */
(() => {
  /** A link that takes `latency_s + num_bytes / bandwidth_bytes_per_s` for a message. */
  class Link {
    /**
     * @param {number} latency_s
     * @param {number} bandwidth_bytes_per_s
     * @param {number} reduce_s_per_byte      what adding a byte takes
     */
    constructor(latency_s, bandwidth_bytes_per_s, reduce_s_per_byte = 0) {
      if (!(bandwidth_bytes_per_s > 0)) {
        throw new RangeError(`bandwidth_bytes_per_s must be positive, not ${bandwidth_bytes_per_s}`);
      }
      if (!(latency_s >= 0 && reduce_s_per_byte >= 0)) {
        throw new RangeError(
          `latency_s and reduce_s_per_byte can't be negative: ${latency_s}, ${reduce_s_per_byte}`,
        );
      }
      Object.assign(this, { latency_s, bandwidth_bytes_per_s, reduce_s_per_byte });
    }

    /**
     * Seconds that one message takes.
     * @param {number} num_bytes
     * @returns {number}
     */
    transfer_s(num_bytes) {
      return this.latency_s + num_bytes / this.bandwidth_bytes_per_s;
    }

    /**
     * Seconds that adding so many bytes takes.
     * @param {number} num_bytes
     * @returns {number}
     */
    reduce_s(num_bytes) {
      return num_bytes * this.reduce_s_per_byte;
    }
  }

  /** The number of binary digits: ceil(lg p) is that of p-1. */
  const bitLength = n => 32 - Math.clz32(n);

  /**
   * ceil(lg p) (alpha + n beta): a binomial tree.
   * @param {number} world_size
   * @param {number} num_bytes
   * @param {Link} link
   * @returns {number}
   */
  function broadcast_s(world_size, num_bytes, link) {
    return bitLength(world_size - 1) * link.transfer_s(num_bytes);
  }

  /**
   * ceil(lg p) (alpha + n beta + n gamma): a binomial tree; an upper bound off the powers of two, if adding takes time.
   * @param {number} world_size
   * @param {number} num_bytes
   * @param {Link} link
   * @returns {number}
   */
  function reduce_s(world_size, num_bytes, link) {
    return bitLength(world_size - 1) * (link.transfer_s(num_bytes) + link.reduce_s(num_bytes));
  }

  /**
   * (p-1) alpha + (p-1)/p n beta: the root's p-1 chunks leave one after the other.
   * @param {number} world_size
   * @param {number} num_bytes
   * @param {Link} link
   * @returns {number}
   */
  function scatter_s(world_size, num_bytes, link) {
    return (world_size - 1) * link.transfer_s(num_bytes / world_size);
  }

  /**
   * (p-1) alpha + (p-1)/p n beta: as `scatter_s`, into the root.
   * @param {number} world_size
   * @param {number} num_bytes
   * @param {Link} link
   * @returns {number}
   */
  function gather_s(world_size, num_bytes, link) {
    return scatter_s(world_size, num_bytes, link);
  }

  /**
   * (p-1) alpha + (p-1)/p n beta on an even p; an odd p takes p rounds.
   * @param {number} world_size
   * @param {number} num_bytes
   * @param {Link} link
   * @returns {number}
   */
  function all_to_all_s(world_size, num_bytes, link) {
    const rounds = world_size > 1 ? world_size - 1 + (world_size % 2) : 0;
    return rounds * link.transfer_s(num_bytes / world_size);
  }

  /**
   * (p-1) alpha + (p-1)/p n beta + (p-1)/p n gamma.
   * @param {number} world_size
   * @param {number} num_bytes
   * @param {Link} link
   * @returns {number}
   */
  function ring_reduce_scatter_s(world_size, num_bytes, link) {
    const chunk = num_bytes / world_size;
    return (world_size - 1) * (link.transfer_s(chunk) + link.reduce_s(chunk));
  }

  /**
   * (p-1) alpha + (p-1)/p n beta.
   * @param {number} world_size
   * @param {number} num_bytes
   * @param {Link} link
   * @returns {number}
   */
  function ring_all_gather_s(world_size, num_bytes, link) {
    return (world_size - 1) * link.transfer_s(num_bytes / world_size);
  }

  /**
   * 2(p-1) alpha + 2(p-1)/p n beta + (p-1)/p n gamma.
   * @param {number} world_size
   * @param {number} num_bytes
   * @param {Link} link
   * @returns {number}
   */
  function ring_all_reduce_s(world_size, num_bytes, link) {
    return ring_reduce_scatter_s(world_size, num_bytes, link) + ring_all_gather_s(world_size, num_bytes, link);
  }

  /**
   * 2(k+g-2) alpha + 2(p-1)/p n beta + (p-1)/p n gamma for k nodes of g ranks, p = k g, on equal links.
   * @param {number} num_nodes
   * @param {number} ranks_per_node
   * @param {number} num_bytes
   * @param {Link} link
   * @returns {number}
   */
  function hierarchical_all_reduce_s(num_nodes, ranks_per_node, num_bytes, link) {
    const inside_s = ring_all_reduce_s(ranks_per_node, num_bytes, link);
    return inside_s + ring_all_reduce_s(num_nodes, num_bytes / ranks_per_node, link);
  }

  /**
   * 2(p-1)(alpha + n beta): both phases go through the root's one link; only the last addition shows.
   * @param {number} world_size
   * @param {number} num_bytes
   * @param {Link} link
   * @returns {number}
   */
  function parameter_server_all_reduce_s(world_size, num_bytes, link) {
    const lastAddition_s = world_size > 1 ? link.reduce_s(num_bytes) : 0;
    return 2 * (world_size - 1) * link.transfer_s(num_bytes) + lastAddition_s;
  }

  /**
   * ceil(lg p) (2 alpha + 2 n beta + n gamma): a binomial tree up and down, exact as `reduce_s` is.
   * @param {number} world_size
   * @param {number} num_bytes
   * @param {Link} link
   * @returns {number}
   */
  function tree_all_reduce_s(world_size, num_bytes, link) {
    return reduce_s(world_size, num_bytes, link) + broadcast_s(world_size, num_bytes, link);
  }

  /**
   * 2 lg p alpha + 2(p-1)/p n beta + (p-1)/p n gamma for a power of two; off it, the folding comes on top.
   * @param {number} world_size
   * @param {number} num_bytes
   * @param {Link} link
   * @returns {number}
   */
  function halving_doubling_all_reduce_s(world_size, num_bytes, link) {
    const core = 1 << (bitLength(world_size) - 1);
    const moved = ((core - 1) / core) * num_bytes;
    const core_s =
      2 * (bitLength(core) - 1) * link.latency_s + (2 * moved) / link.bandwidth_bytes_per_s + link.reduce_s(moved);
    if (core === world_size) return core_s;
    return core_s + 2 * link.transfer_s(num_bytes) + link.reduce_s(num_bytes);
  }

  /** @type {Object<string, (p: number) => number>} */
  const BUS_FACTORS = {
    all_reduce: p => (2 * (p - 1)) / p,
    reduce_scatter: p => (p - 1) / p,
    all_gather: p => (p - 1) / p,
    broadcast: () => 1,
    reduce: () => 1,
    scatter: p => (p - 1) / p,
    gather: p => (p - 1) / p,
    all_to_all: p => (p - 1) / p,
  };

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
   * Bytes that the root of a gather-and-broadcast sends, and also receives: (p-1) n.
   * @param {number} world_size
   * @param {number} num_bytes
   * @returns {number}
   */
  function root_sent_bytes(world_size, num_bytes) {
    return (world_size - 1) * num_bytes;
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

  /**
   * ceil(lg p) alpha: no all-reduce is faster.
   * @param {number} world_size
   * @param {Link} link
   * @returns {number}
   */
  function latency_bound_s(world_size, link) {
    return bitLength(world_size - 1) * link.latency_s;
  }

  /**
   * 2(p-1)/p n beta: no all-reduce is faster on links of one bandwidth.
   * @param {number} world_size
   * @param {number} num_bytes
   * @param {Link} link
   * @returns {number}
   */
  function bandwidth_bound_s(world_size, num_bytes, link) {
    return ring_sent_bytes(world_size, num_bytes) / link.bandwidth_bytes_per_s;
  }

  /**
   * Buffer bytes per second times the share of them that every link must carry.
   * @param {string} collective
   * @param {number} world_size
   * @param {number} num_bytes
   * @param {number} seconds
   * @returns {number}
   */
  function bus_bandwidth_bytes_per_s(collective, world_size, num_bytes, seconds) {
    if (!BUS_FACTORS[collective]) {
      throw new RangeError(`no bus factor for '${collective}': use one of ${Object.keys(BUS_FACTORS).join(", ")}`);
    }
    return (num_bytes / seconds) * BUS_FACTORS[collective](world_size);
  }

  globalThis.lockstepTwin.links = {
    ...{ BUS_FACTORS, Link, bitLength, broadcast_s, reduce_s, scatter_s, gather_s, all_to_all_s },
    ...{ ring_reduce_scatter_s, ring_all_gather_s, ring_all_reduce_s, hierarchical_all_reduce_s },
    ...{ parameter_server_all_reduce_s, tree_all_reduce_s, halving_doubling_all_reduce_s },
    ...{ ring_sent_bytes, root_sent_bytes, pipeline_bubble, latency_bound_s, bandwidth_bound_s },
    bus_bandwidth_bytes_per_s,
  };
})();
