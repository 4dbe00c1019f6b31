/* The twin of book/collectives.py: the all-reduces that pages simulate, as schedules. Steps count rounds: in one step a
   rank sends at most one message and receives at most one. The root, where there is one, is rank 0. */
import { Moves, Schedule } from "./schedule.js";

const ROOT = 0;
/** The number of binary digits: ceil(lg p) is that of p-1. */
const bitLength = n => 32 - Math.clz32(n);

/** A schedule whose buffer has as many chunks as there are ranks. */
function scheduled(world_size, plan) {
  const moves = new Moves();
  plan(moves);
  return new Schedule(world_size, world_size, moves);
}

/** Every chunk of a buffer in one message. */
function addAll(moves, step, src, dst, num_chunks, op) {
  for (let chunk = 0; chunk < num_chunks; chunk++) moves.add(step, src, dst, chunk, op);
}

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
 * Rank 0 takes in the whole buffer of every other rank, one after the other, then sends each of them the sum.
 * @param {number} world_size
 * @returns {Schedule}
 */
function parameter_server_all_reduce(world_size) {
  return scheduled(world_size, moves => {
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
  return scheduled(world_size, moves => {
    treeDown(moves, world_size, treeUp(moves, world_size, 0));
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
 * A ring reduce-scatter, then a ring all-gather: 2(N-1) steps of one chunk.
 * @param {number} world_size
 * @returns {Schedule}
 */
function ring_all_reduce(world_size) {
  return scheduled(world_size, moves => {
    ringMoves(moves, world_size, "copy", ringMoves(moves, world_size, "reduce", 0));
  });
}

/**
 * Recursive halving, then recursive doubling, on the largest power of two; the extra ranks are folded in.
 * @param {number} world_size
 * @returns {Schedule}
 */
function halving_doubling_all_reduce(world_size) {
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
  return new Schedule(world_size, core, moves);
}

/** In a halving round every rank sends its partner at `distance` the chunks that the partner's half will keep. */
function halves(core, distance, act) {
  for (let src = 0; src < core; src++) {
    const dst = src ^ distance;
    const first = Math.floor(dst / distance) * distance;
    for (let i = 0; i < distance; i++) act(src, dst, first + i);
  }
}

export { parameter_server_all_reduce, tree_all_reduce, ring_all_reduce, halving_doubling_all_reduce };
