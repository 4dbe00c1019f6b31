/* The twin of book/simulate/messages.py: moves of one step between the same two ranks travel together. */
(() => {
  const { OPS } = globalThis.lockstepTwin.schedule;

  /**
   * A message: from whom, to whom, the positions of its moves in the schedule, and how many of them add.
   * @typedef {{src: number, dst: number, moves: number[], adds: number}} Message
   */

  const known = new WeakMap();
  /**
   * The messages of each step: a schedule's own, on whatever links, and kept for the next simulation of it.
   * @param {Schedule} schedule
   * @returns {Message[][]}
   */
  function stepsOf(schedule) {
    const grouped = ([from, to]) => messagesOf(schedule, from, to);
    if (!known.has(schedule)) known.set(schedule, Array.from(schedule.steps(), grouped));
    return known.get(schedule);
  }

  /** The messages of one step, in the order of their first moves. */
  function messagesOf({ moves: { src, dst, op }, world_size }, from, to) {
    const messages = new Map();
    for (let i = from; i < to; i++) {
      const pair = src[i] * world_size + dst[i];
      let message = messages.get(pair);
      if (!message) {
        message = { src: src[i], dst: dst[i], moves: [], adds: 0, start: 0, arrived: 0, added: 0 };
        messages.set(pair, message);
      }
      message.moves.push(i);
      if (OPS[op[i]] === "reduce") message.adds++;
    }
    return [...messages.values()];
  }

  globalThis.lockstepTwin.messages = { stepsOf };
})();
