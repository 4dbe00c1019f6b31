/* The twin of book/simulate: what a schedule would do on given links, worked out without starting a process.

   A rank's link has two directions; each carries one message at a time, in the order of the schedule. A message leaves
   when its sender has finished its own earlier steps and both directions are free. There is no barrier: a rank starts
   step k when its own step k-1 is done and its input has come, whatever the others do. Adding takes no time. */

const { max } = Math;

/**
 * @typedef {object} Options
 * @property {Object<number, number>} [slowdown]     by rank: the factor on its transfers
 * @property {[number, number, Link][]} [links]      links between just two ranks: sender, receiver, link
 */

const known = new WeakMap();
/** The messages of each step, [src, dst, positions of its moves]; kept for the schedule's next simulation. */
function stepsOf(schedule) {
  const grouped = ([from, to]) => messagesOf(schedule, from, to);
  if (!known.has(schedule)) known.set(schedule, Array.from(schedule.steps(), grouped));
  return known.get(schedule);
}

/** Moves of one step between the same two ranks travel together: its messages, in the order of their first moves. */
function messagesOf({ moves: { src, dst }, world_size }, from, to) {
  const messages = new Map();
  for (let i = from; i < to; i++) {
    const pair = src[i] * world_size + dst[i];
    if (!messages.has(pair)) messages.set(pair, { src: src[i], dst: dst[i], moves: [], start: 0, arrived: 0 });
    messages.get(pair).moves.push(i);
  }
  return [...messages.values()];
}

/** Seconds of a message, by its ends and bytes; a table only where links differ. */
function transfers(world_size, link, { slowdown = {}, links = [] }) {
  const factor = Array.from({ length: world_size }, (_, rank) => slowdown[rank] ?? 1);
  const plain = ({ latency_s, bandwidth_bytes_per_s }) => [latency_s, 1 / bandwidth_bytes_per_s];
  const own = new Map(links.map(([src, dst, one]) => [src * world_size + dst, plain(one)]));
  const usual = plain(link);
  return (src, dst, num_bytes) => {
    const [latency_s, s_per_byte] = (own.size && own.get(src * world_size + dst)) || usual;
    return (latency_s + num_bytes * s_per_byte) * max(factor[src], factor[dst]);
  };
}

/** The messages of each step, with their times. */
function timed(schedule, num_bytes, link, options) {
  const { world_size, num_chunks } = schedule;
  const transfer_s = transfers(world_size, link, options);
  const [sending, receiving] = [0, 1].map(() => new Float64Array(world_size));
  let ready = new Float64Array(world_size); // earlier steps are done
  const steps = stepsOf(schedule);
  for (const messages of steps) {
    const done = ready.slice();
    for (const message of messages) {
      const { src, dst, moves } = message;
      message.start = max(ready[src], sending[src], receiving[dst]);
      message.arrived = message.start + transfer_s(src, dst, moves.length * (num_bytes / num_chunks));
      sending[src] = receiving[dst] = message.arrived;
      for (const rank of [src, dst]) done[rank] = max(done[rank], message.arrived);
    }
    ready = done;
  }
  return steps;
}

/**
 * When each move leaves and has arrived, in seconds.
 * @param {Schedule} schedule
 * @param {number} num_bytes
 * @param {Link} link
 * @param {Options} options
 * @returns {{start_s: Float64Array, done_s: Float64Array}}
 */
function moveTimes(schedule, num_bytes, link, options = {}) {
  const [start_s, done_s] = [0, 1].map(() => new Float64Array(schedule.moves.length));
  for (const { moves, start, arrived } of timed(schedule, num_bytes, link, options).flat()) {
    for (const i of moves) [start_s[i], done_s[i]] = [start, arrived];
  }
  return { start_s, done_s };
}

/**
 * How long all moves take: 0 for a schedule without any.
 * @param {Schedule} schedule
 * @param {number} num_bytes
 * @param {Link} link
 * @param {Options} options
 * @returns {number}
 */
function durationOf(schedule, num_bytes, link, options = {}) {
  let last = 0;
  for (const messages of timed(schedule, num_bytes, link, options)) {
    for (const { arrived } of messages) last = max(last, arrived);
  }
  return last;
}

export { moveTimes, durationOf };
