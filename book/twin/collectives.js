/* The twin of book/collectives.py: collectives as schedules, and COLLECTIVES, a record of each. Steps count rounds: in
   one step a rank sends at most one message and receives at most one. The root, where there is one, is rank 0. */
(() => {
  const { ROOT } = globalThis.lockstepTwin.promise;
  const { Moves, Schedule, check_counts } = globalThis.lockstepTwin.schedule;
  const { links } = globalThis.lockstepTwin;
  const { bitLength } = links;

  /** A schedule whose buffer has as many chunks as there are ranks. */
  function scheduled(name, world_size, promise, plan) {
    check_counts({ world_size });
    const moves = new Moves();
    plan(moves);
    return new Schedule(name, world_size, world_size, moves, promise);
  }

  /** Every chunk of a buffer in one message. */
  function addAll(moves, step, src, dst, num_chunks, op) {
    for (let chunk = 0; chunk < num_chunks; chunk++) moves.add(step, src, dst, chunk, op);
  }

  // # with a root
  /** The levels of a binomial tree, the leaves' first: pairs of parent and child. */
  function treeEdges(world_size) {
    return Array.from({ length: bitLength(world_size - 1) }, (_, level) => {
      const distance = 1 << level;
      const pairs = [];
      for (let parent = 0; parent < world_size - distance; parent += 2 * distance) {
        pairs.push([parent, parent + distance]);
      }
      return pairs;
    });
  }

  /** A binomial tree upwards from a step; returns the step after it. */
  function treeUp(moves, world_size, first) {
    const levels = treeEdges(world_size);
    levels.forEach((pairs, i) => {
      for (const [above, below] of pairs) addAll(moves, first + i, below, above, world_size, "reduce");
    });
    return first + levels.length;
  }

  function treeDown(moves, world_size, first) {
    treeEdges(world_size)
      .reverse()
      .forEach((pairs, i) => {
        for (const [above, below] of pairs) addAll(moves, first + i, above, below, world_size, "copy");
      });
  }

  /**
   * A binomial tree: ceil(lg N) steps of the whole buffer.
   * @param {number} world_size
   * @returns {Schedule}
   */
  function broadcast(world_size) {
    return scheduled("broadcast", world_size, "broadcast", moves => treeDown(moves, world_size, 0));
  }

  /**
   * The binomial tree upwards: each step adds one half of the sums to the other.
   * @param {number} world_size
   * @returns {Schedule}
   */
  function reduce(world_size) {
    return scheduled("reduce", world_size, "reduce", moves => treeUp(moves, world_size, 0));
  }

  /**
   * N-1 steps of one chunk: the root sends rank r its chunk r.
   * @param {number} world_size
   * @returns {Schedule}
   */
  function scatter(world_size) {
    return scheduled("scatter", world_size, "scatter", moves => {
      for (let r = 1; r < world_size; r++) moves.add(r - 1, ROOT, r, r, "copy");
    });
  }

  /**
   * N-1 steps of one chunk: rank r sends the root its chunk r.
   * @param {number} world_size
   * @returns {Schedule}
   */
  function gather(world_size) {
    return scheduled("gather", world_size, "gather", moves => {
      for (let r = 1; r < world_size; r++) moves.add(r - 1, r, ROOT, r, "copy");
    });
  }

  /**
   * Rank 0 takes in the whole buffer of every other rank, one after the other, then sends each of them the sum.
   * @param {number} world_size
   * @returns {Schedule}
   */
  function parameter_server_all_reduce(world_size) {
    return scheduled("parameter_server_all_reduce", world_size, "all_reduce", moves => {
      for (let r = 1; r < world_size; r++) addAll(moves, r - 1, r, ROOT, world_size, "reduce");
      for (let r = 1; r < world_size; r++) addAll(moves, world_size - 2 + r, ROOT, r, world_size, "copy");
    });
  }

  /**
   * A binomial tree up to rank 0 and down again: 2 ceil(lg N) steps of the whole buffer.
   * @param {number} world_size
   * @returns {Schedule}
   */
  function tree_all_reduce(world_size) {
    return scheduled("tree_all_reduce", world_size, "all_reduce", moves => {
      treeDown(moves, world_size, treeUp(moves, world_size, 0));
    });
  }

  // # between all
  /**
   * Exchanges of pairs, in place: rank a's chunk b and rank b's chunk a change places; every pair meets once.
   * @param {number} world_size
   * @returns {Schedule}
   */
  function all_to_all(world_size) {
    // In step s, rank r meets rank s-r (mod circle). As circle is odd, that leaves one alone: it meets rank `circle`.
    const circle = world_size - 1 + (world_size % 2);
    const partner = (step, rank) => {
      const alone = Math.floor((step * (circle + 1)) / 2) % circle;
      if (rank === alone) return circle;
      return rank === circle ? alone : (step - rank + circle) % circle;
    };
    return scheduled("all_to_all", world_size, "all_to_all", moves => {
      for (let step = 0; step < circle; step++) {
        for (let rank = 0; rank < world_size; rank++) {
          const other = partner(step, rank);
          if (other < world_size) moves.add(step, rank, other, other, "copy", rank); // on an odd N some meet nobody
        }
      }
    });
  }

  /** One trip round a ring of `size`: act(step, src, dst, slot); returns the step after it. */
  function ring(size, op, first, act) {
    const ahead = op === "copy" ? 1 : 0; // the all-gather starts from what the reduce-scatter left: chunk r+1 on rank r
    for (let step = 0; step < size - 1; step++) {
      for (let src = 0; src < size; src++) act(first + step, src, (src + 1) % size, (src + ahead - step + size) % size);
    }
    return first + size - 1;
  }

  function ringMoves(moves, world_size, op, first) {
    return ring(world_size, op, first, (step, src, dst, slot) => moves.add(step, src, dst, slot, op));
  }

  /**
   * N-1 steps after which rank r alone holds the sum of chunk r+1.
   * @param {number} world_size
   * @returns {Schedule}
   */
  function ring_reduce_scatter(world_size) {
    const plan = moves => ringMoves(moves, world_size, "reduce", 0);
    return scheduled("ring_reduce_scatter", world_size, "reduce_scatter", plan);
  }

  /**
   * N-1 steps that carry chunk r+1 of rank r to every rank.
   * @param {number} world_size
   * @returns {Schedule}
   */
  function ring_all_gather(world_size) {
    return scheduled("ring_all_gather", world_size, "all_gather", moves => ringMoves(moves, world_size, "copy", 0));
  }

  /**
   * A ring reduce-scatter, then a ring all-gather: 2(N-1) steps of one chunk.
   * @param {number} world_size
   * @returns {Schedule}
   */
  function ring_all_reduce(world_size) {
    return scheduled("ring_all_reduce", world_size, "all_reduce", moves => {
      ringMoves(moves, world_size, "copy", ringMoves(moves, world_size, "reduce", 0));
    });
  }

  /**
   * Recursive halving, then recursive doubling, on the largest power of two; the extra ranks are folded in.
   * @param {number} world_size
   * @returns {Schedule}
   */
  function halving_doubling_all_reduce(world_size) {
    check_counts({ world_size });
    const core = 1 << (bitLength(world_size) - 1);
    const levels = bitLength(core) - 1;
    const moves = new Moves();
    const fold = world_size > core ? 1 : 0;
    for (let r = core; r < world_size; r++) addAll(moves, 0, r, r - core, core, "reduce");
    for (let level = levels - 1; level >= 0; level--) {
      halves(core, 1 << level, (src, dst, chunk) => moves.add(fold + levels - 1 - level, src, dst, chunk, "reduce"));
    }
    for (let level = 0; level < levels; level++) {
      // What a rank got complete in the halving is what it gives back in the doubling.
      halves(core, 1 << level, (src, dst, chunk) => moves.add(fold + levels + level, dst, src, chunk, "copy"));
    }
    for (let r = core; r < world_size; r++) addAll(moves, fold + 2 * levels, r - core, r, core, "copy");
    return new Schedule("halving_doubling_all_reduce", world_size, core, moves, "all_reduce");
  }

  /** In a halving round every rank sends its partner at `distance` the chunks that the partner's half will keep. */
  function halves(core, distance, act) {
    for (let src = 0; src < core; src++) {
      const dst = src ^ distance;
      const first = Math.floor(dst / distance) * distance;
      for (let i = 0; i < distance; i++) act(src, dst, first + i);
    }
  }

  /**
   * Reduce-scatter inside each node, all-reduce each shard across nodes, all-gather inside each node: three rings.
   * @param {number} num_nodes
   * @param {number} ranks_per_node
   * @returns {Schedule}
   */
  function hierarchical_all_reduce(num_nodes, ranks_per_node) {
    check_counts({ num_nodes, ranks_per_node });
    const moves = new Moves();
    const inside = (op, first) =>
      ring(ranks_per_node, op, first, (step, src, dst, shard) => {
        for (let node = 0; node < num_nodes; node++) {
          const from = node * ranks_per_node;
          for (let i = 0; i < num_nodes; i++) moves.add(step, from + src, from + dst, shard * num_nodes + i, op);
        }
      });
    const across = (op, first) =>
      ring(num_nodes, op, first, (step, src, dst, slot) => {
        for (let local = 0; local < ranks_per_node; local++) {
          const shard = (local + 1) % ranks_per_node; // the one that the reduce-scatter left on this local rank
          const [from, to] = [src, dst].map(node => node * ranks_per_node + local);
          moves.add(step, from, to, shard * num_nodes + slot, op);
        }
      });
    inside("copy", across("copy", across("reduce", inside("reduce", 0))));
    const world_size = num_nodes * ranks_per_node;
    return new Schedule("hierarchical_all_reduce", world_size, world_size, moves, "all_reduce");
  }

  // # records
  /**
   * A collective: what schedules it, its promise, its closed forms (null where the book has none).
   * @typedef {object} Collective
   * @property {string} name
   * @property {(...sizes: number[]) => Schedule} schedule
   * @property {string} promise
   * @property {?function} time_s                        (...sizes, num_bytes, link) => seconds on equal links
   * @property {?function} sent_bytes                    (...sizes, num_bytes) => what the busiest rank sends
   * @property {(world_size: number) => number[][]} sizes   every list of arguments for a number of ranks
   * @property {(world_size: number) => boolean} exact   whether `time_s` is no mere upper bound, if adding takes time
   * @property {[string, string]} phases                 what the halves of an all-reduce promise
   */
  const anyWorldSize = world_size => [[world_size]];
  const always = () => true;
  const powerOfTwo = n => (n & (n - 1)) === 0;

  function nodes(world_size) {
    const counts = Array.from({ length: world_size }, (_, i) => i + 1);
    return counts.filter(k => world_size % k === 0).map(k => [k, world_size / k]);
  }

  function record(schedule, promise, time_s, more = {}) {
    const rest = { sent_bytes: null, sizes: anyWorldSize, exact: always, phases: ["reduce_scatter", "all_gather"] };
    return { name: schedule.name, schedule, promise, time_s, ...rest, ...more };
  }

  const rooted = { phases: ["reduce", "broadcast"] };
  const { ring_sent_bytes, root_sent_bytes } = links;
  /** @type {Object<string, Collective>} */
  const COLLECTIVES = Object.fromEntries(
    [
      record(ring_all_reduce, "all_reduce", links.ring_all_reduce_s, { sent_bytes: ring_sent_bytes }),
      record(ring_reduce_scatter, "reduce_scatter", links.ring_reduce_scatter_s),
      record(ring_all_gather, "all_gather", links.ring_all_gather_s),
      record(parameter_server_all_reduce, "all_reduce", links.parameter_server_all_reduce_s, {
        sent_bytes: root_sent_bytes,
        ...rooted,
      }),
      record(tree_all_reduce, "all_reduce", links.tree_all_reduce_s, { exact: powerOfTwo, ...rooted }),
      record(halving_doubling_all_reduce, "all_reduce", links.halving_doubling_all_reduce_s),
      record(hierarchical_all_reduce, "all_reduce", links.hierarchical_all_reduce_s, { sizes: nodes }),
      record(broadcast, "broadcast", links.broadcast_s),
      record(scatter, "scatter", links.scatter_s),
      record(gather, "gather", links.gather_s),
      record(reduce, "reduce", links.reduce_s, { exact: powerOfTwo }),
      record(all_to_all, "all_to_all", links.all_to_all_s),
    ].map(collective => [collective.name, collective]),
  );

  globalThis.lockstepTwin.collectives = {
    ...{ COLLECTIVES, ring_all_reduce, ring_reduce_scatter, ring_all_gather, parameter_server_all_reduce },
    ...{ tree_all_reduce, halving_doubling_all_reduce, hierarchical_all_reduce },
    ...{ broadcast, scatter, gather, reduce, all_to_all },
  };
})();
