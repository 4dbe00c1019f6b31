/* The twin of book/schedule: who sends which chunk to whom at which step of an all-reduce. */

const OPS = ["reduce", "copy"];

/** Moves as columns of whole numbers; `op` is a place in OPS. */
class Moves {
  step = [];
  src = [];
  dst = [];
  chunk = [];
  op = [];

  /**
   * One more move.
   * @param {number} step
   * @param {number} src
   * @param {number} dst
   * @param {number} chunk
   * @param {string} op
   */
  add(step, src, dst, chunk, op) {
    this.step.push(step);
    this.src.push(src);
    this.dst.push(dst);
    this.chunk.push(chunk);
    this.op.push(OPS.indexOf(op));
  }

  /** The columns by step; moves of one step keep their order. */
  byStep() {
    const order = this.step.map((_, i) => i);
    const sorted = this.step.every((step, i) => !i || step >= this.step[i - 1]);
    if (!sorted) order.sort((a, b) => this.step[a] - this.step[b]);
    const columns = Object.entries(this).map(([name, list]) => [name, Int32Array.from(order, i => list[i])]);
    return { length: order.length, ...Object.fromEntries(columns) };
  }
}

/** A list of moves over `world_size` ranks whose buffers have `num_chunks` chunks, each with its rank's data. */
class Schedule {
  /**
   * @param {number} world_size
   * @param {number} num_chunks
   * @param {Moves} moves
   */
  constructor(world_size, num_chunks, moves) {
    Object.assign(this, { world_size, num_chunks });
    this.moves = moves.byStep();
  }

  get num_steps() {
    const { step, length } = this.moves;
    return length ? step[length - 1] + 1 : 0;
  }

  /**
   * Bytes that each rank sends when the whole buffer has `num_bytes`.
   * @param {number} num_bytes
   * @returns {number[]}
   */
  sent_bytes(num_bytes) {
    const sent = Array(this.world_size).fill(0);
    for (const src of this.moves.src) sent[src]++;
    return sent.map(count => count * (num_bytes / this.num_chunks));
  }

  /** The moves of each step that has any, as [first, one after the last]. */
  *steps() {
    const { step, length } = this.moves;
    for (let from = 0, to; from < length; from = to) {
      for (to = from + 1; to < length && step[to] === step[from]; to++);
      yield [from, to];
    }
  }

  /**
   * Moves contributions as the schedule says: for each move in order, its position, how often each rank's data is in
   * its message, and in the receiver's chunk afterwards.
   * @returns {Generator<[number, number[], number[]]>}
   */
  *replay() {
    const { src, dst, chunk, op } = this.moves;
    const own = rank => Array.from({ length: this.world_size }, (_, k) => Number(k === rank));
    const held = Array.from({ length: this.world_size }, (_, rank) => Array(this.num_chunks).fill(own(rank)));
    for (const [from, to] of this.steps()) {
      const sent = [];
      for (let i = from; i < to; i++) sent.push(held[src[i]][chunk[i]]);
      for (let i = from; i < to; i++) {
        const [message, before] = [sent[i - from], held[dst[i]][chunk[i]]];
        held[dst[i]][chunk[i]] = OPS[op[i]] === "copy" ? message : before.map((x, k) => x + message[k]);
        yield [i, message, held[dst[i]][chunk[i]]];
      }
    }
  }
}

export { OPS, Moves, Schedule };
