/* The twin of book/simulate: what a schedule would do on given links, worked out without starting a process.

   A rank's link has two directions; each carries one message at a time, in the order of the schedule. A message leaves
   when its sender has finished its own earlier steps and both directions are free. There is no barrier: a rank starts
   step k when its own step k-1 is done and its input has come, whatever the others do. */
(() => {
  const { OPS, needs, gives, taker_of } = globalThis.lockstepTwin.schedule;
  const { Trace } = globalThis.lockstepTwin.trace;
  const { Network } = globalThis.lockstepTwin.network;
  const { stepsOf } = globalThis.lockstepTwin.messages;
  const { run_shared } = globalThis.lockstepTwin.shared;
  const { max } = Math;
  const LARGEST_WATCHED_WORLD = 64;

  // # collectives
  /**
   * @typedef {object} Options
   * @property {Object<number, number>} [slowdown]     by rank: the factor on its transfers and additions
   * @property {[number, number, Link][]} [links]      links between just two ranks: sender, receiver, link
   * @property {boolean} [contributions]               whether events carry whose data is in a chunk
   */

  /**
   * The trace that a schedule leaves on a buffer of `num_bytes` when every rank has the link `link`; with a `Network`
   * in its place, ranks share their node's cards.
   * @param {Schedule} schedule
   * @param {number} num_bytes
   * @param {Link | Network} link
   * @param {Options} options
   * @returns {Trace}
   */
  function simulate(schedule, num_bytes, link, options = {}) {
    const watched = options.contributions ?? schedule.world_size <= LARGEST_WATCHED_WORLD;
    const times = moveTimes(schedule, num_bytes, link, options);
    const events = eventsOf(schedule, num_bytes / schedule.num_chunks, times, watched);
    const { name, promise, world_size } = schedule;
    return new Trace(events, world_size, "modelled", "simulated", { name, promise });
  }

  /** Each rank's factor on its times. */
  function factorsOf(world_size, slowdown) {
    const factors = Array(world_size).fill(1);
    for (const [rank, factor] of Object.entries(slowdown)) {
      if (!(rank in factors && factor > 0 && factor < Infinity)) {
        const ranks = `ranks are 0..${world_size - 1} and factors positive`;
        throw new RangeError(`slowdown: rank ${rank} with factor ${factor} can't be: ${ranks}`);
      }
      factors[rank] = factor;
    }
    return factors;
  }

  /** Times of messages and additions from one rank to another; a table only where links differ. */
  class Links {
    constructor(world_size, link, slowdown, links) {
      const plain = ({ latency_s, bandwidth_bytes_per_s, reduce_s_per_byte }) => {
        return { latency_s, s_per_byte: 1 / bandwidth_bytes_per_s, reduce_s_per_byte };
      };
      Object.assign(this, { world_size, slowdown, link: plain(link), own: new Map() });
      for (const [src, dst, own] of links) {
        if (!(src in slowdown && dst in slowdown && src !== dst)) {
          throw new RangeError(`links: (${src}, ${dst}) must name two different ranks of 0..${world_size - 1}`);
        }
        this.own.set(src * world_size + dst, plain(own));
      }
    }

    between(src, dst) {
      return (this.own.size && this.own.get(src * this.world_size + dst)) || this.link;
    }

    transfer_s(src, dst, num_bytes) {
      const { latency_s, s_per_byte } = this.between(src, dst);
      return (latency_s + num_bytes * s_per_byte) * max(this.slowdown[src], this.slowdown[dst]);
    }

    reduce_s(src, dst, num_bytes) {
      return num_bytes * this.between(src, dst).reduce_s_per_byte * this.slowdown[dst];
    }
  }

  /** The messages of each step, with their times. */
  function timed(schedule, num_bytes, link, { slowdown = {}, links = [] }) {
    if (!(num_bytes >= 0 && num_bytes < Infinity)) {
      throw new RangeError(`num_bytes can't be ${num_bytes}: give the buffer's size in bytes`);
    }
    const factors = factorsOf(schedule.world_size, slowdown);
    const [steps, chunk_bytes] = [stepsOf(schedule), num_bytes / schedule.num_chunks];
    if (link instanceof Network) {
      if (links.length) throw new RangeError("links: a Network says itself which link lies between two ranks");
      return run_shared(steps, chunk_bytes, link, factors);
    }
    const own = new Links(schedule.world_size, link, factors, links);
    const clocks = clocksOf(schedule.world_size);
    for (const messages of steps) takeStep(messages, chunk_bytes, clocks, own);
    return steps;
  }

  /**
   * When each move leaves, has arrived, and has been added, in seconds: what `simulate` makes events of.
   * @param {Schedule} schedule
   * @param {number} num_bytes
   * @param {Link | Network} link
   * @param {Options} options
   * @returns {{start_s: Float64Array, sent_s: Float64Array, done_s: Float64Array}}
   */
  function moveTimes(schedule, num_bytes, link, options = {}) {
    const { length } = schedule.moves;
    const [start_s, sent_s, done_s] = [0, 1, 2].map(() => new Float64Array(length));
    for (const messages of timed(schedule, num_bytes, link, options)) {
      for (const { moves, start, arrived, added } of messages) {
        for (const i of moves) {
          start_s[i] = start;
          sent_s[i] = arrived;
          done_s[i] = added;
        }
      }
    }
    return { start_s, sent_s, done_s };
  }

  /**
   * The `duration_s` of what `simulate` returns, without its events: 0 for a schedule without moves.
   * @param {Schedule} schedule
   * @param {number} num_bytes
   * @param {Link | Network} link
   * @param {Options} options
   * @returns {number}
   */
  function durationOf(schedule, num_bytes, link, options = {}) {
    let last = 0;
    for (const messages of timed(schedule, num_bytes, link, options)) {
      for (const { added } of messages) last = max(last, added);
    }
    return last;
  }

  /** When each rank becomes free: its earlier steps are done, and so on. */
  function clocksOf(world_size) {
    const [ready, sending, receiving, adding] = [0, 1, 2, 3].map(() => new Float64Array(world_size));
    return { ready, sending, receiving, adding };
  }

  /** Gives the messages of a step their times, and advances the clocks. */
  function takeStep(messages, chunk_bytes, clocks, links) {
    const { ready, sending, receiving, adding } = clocks;
    const done = ready.slice();
    for (const message of messages) {
      const { src, dst, moves, adds } = message;
      const start = max(ready[src], sending[src], receiving[dst]);
      const arrived = start + links.transfer_s(src, dst, moves.length * chunk_bytes);
      const bytes = adds * chunk_bytes;
      const added = bytes > 0 ? max(arrived, adding[dst]) + links.reduce_s(src, dst, bytes) : arrived;
      sending[src] = receiving[dst] = arrived;
      adding[dst] = max(adding[dst], added);
      done[src] = max(done[src], arrived);
      done[dst] = max(done[dst], added);
      message.start = start;
      message.arrived = arrived;
      message.added = added;
    }
    clocks.ready = done;
  }

  const FIELDS = ["rank", "kind", "op", "peer", "chunk", "step", "num_bytes", "start_s", "end_s", "contributions"];

  /** A send and a recv per move, in the schedule's order; before them, if watched, what every rank holds. */
  function eventsOf(schedule, chunk_bytes, { start_s, sent_s, done_s }, watched) {
    const rows = [];
    if (watched) {
      const held = schedule.start();
      for (const [rank, chunk] of schedule.chunks()) {
        const at = schedule.place(rank, chunk);
        const contents = held.subarray(at, at + schedule.world_size);
        rows.push([rank, "hold", null, null, chunk, 0, chunk_bytes, 0, 0, contents]);
      }
    }
    const contents = watched ? [...schedule.replay()] : [];
    const { src, dst, chunk, step, op, length } = schedule.moves;
    for (let i = 0; i < length; i++) {
      const [, sent, held] = contents[i] ?? [];
      const into = schedule.into(i);
      rows.push([src[i], "send", null, dst[i], chunk[i], step[i], chunk_bytes, start_s[i], sent_s[i], sent]);
      rows.push([dst[i], "recv", OPS[op[i]], src[i], into, step[i], chunk_bytes, start_s[i], done_s[i], held]);
    }
    const fields = watched ? FIELDS : FIELDS.slice(0, -1);
    return Object.fromEntries(fields.map((name, j) => [name, rows.map(row => row[j])]));
  }

  // # pipelines
  /**
   * The trace that a pipeline's schedule leaves when a forward of one stage takes `forward_s`, a backward `backward_s`.
   *
   * A rank runs its actions in its own order, each as soon as the one before is done and what it needs has come. Of a
   * backward `weight_s` goes to the weights (null: half). With `link`, each output, and each gradient on its way back,
   * is a message of `num_bytes` between two ranks; without, they arrive at once.
   * @param {PipelineSchedule} schedule
   * @param {number} forward_s
   * @param {number} backward_s
   * @param {number | null} weight_s
   * @param {Link | null} link
   * @param {{num_bytes?: number, slowdown?: Object<number, number>}} options
   * @returns {Trace}
   */
  function simulate_pipeline(schedule, forward_s, backward_s, weight_s = null, link = null, options = {}) {
    const events = [];
    actionTimes(schedule, forward_s, backward_s, weight_s, link, options, events);
    events.sort((a, b) => a.start_s - b.start_s || a.end_s - b.end_s || a.rank - b.rank);
    const fields = ["rank", "kind", "op", "peer", "stage", "micro_batch", "num_bytes", "start_s", "end_s"];
    const columns = fields.map(name => [name, events.map(event => event[name] ?? null)]);
    const { name, world_size } = schedule;
    return new Trace(Object.fromEntries(columns), world_size, "modelled", "simulated", { name });
  }

  /**
   * When each action of a pipeline's schedule runs, in an order in which one process could run them: what
   * `simulate_pipeline` makes a trace of. `events` gets what happens, if it is given.
   * @param {PipelineSchedule} schedule
   * @param {number} forward_s
   * @param {number} backward_s
   * @param {number | null} weight_s
   * @param {Link | null} link
   * @param {{num_bytes?: number, slowdown?: Object<number, number>}} options
   * @param {object[] | null} events
   * @returns {{action: Action, start_s: number, end_s: number}[]}
   */
  function actionTimes(schedule, forward_s, backward_s, weight_s = null, link = null, options = {}, events = null) {
    const { num_bytes = 0, slowdown = {} } = options;
    const weights = weight_s ?? backward_s / 2;
    checkLengths(schedule, { forward_s, backward_s, weights, num_bytes }, slowdown);
    const lengths = { F: forward_s, B: backward_s, I: backward_s - weights, W: weights };
    const free_s = new Float64Array(schedule.world_size);
    const wire_s = {}; // by sender and receiver
    const made_s = schedule.room(Float64Array); // when the stage that gives it has it
    const there_s = schedule.room(Float64Array); // when the other stage that needs it has it

    /** When the rank that takes a result has it; leaves the events of the message. */
    function arrival_s({ rank, stage, micro_batch }, { what, peer }, ready_s) {
      if (!link || peer === null) return ready_s;
      const wire = rank * schedule.world_size + peer;
      const start_s = max(ready_s, wire_s[wire] ?? 0);
      const end_s = (wire_s[wire] = start_s + link.transfer_s(num_bytes));
      const message = { op: what, stage, micro_batch, num_bytes, start_s, end_s };
      events?.push({ ...message, rank, kind: "send", peer }, { ...message, rank: peer, kind: "recv", peer: rank });
      return end_s;
    }

    return planOf(schedule).map(({ action, awaited, results }) => {
      const { rank, kind } = action;
      let start_s = free_s[rank];
      for (const { place, own } of awaited) start_s = max(start_s, (own ? made_s : there_s)[place]);
      const end_s = start_s + lengths[kind] * (slowdown[rank] ?? 1);
      free_s[rank] = end_s;
      events?.push({ ...action, kind: "compute", op: kind, start_s, end_s });
      for (const result of results) {
        made_s[result.place] = end_s;
        there_s[result.place] = arrival_s(action, result, end_s);
      }
      return { action, start_s, end_s };
    });
  }

  function checkLengths({ world_size }, { forward_s, backward_s, weights, num_bytes }, slowdown) {
    if (!(forward_s >= 0 && weights >= 0 && weights <= backward_s && backward_s < Infinity && num_bytes >= 0)) {
      throw new RangeError(
        `forward_s (${forward_s}), backward_s (${backward_s}) and num_bytes (${num_bytes}) must not be negative, and ` +
          `weight_s (${weights}) is a part of backward_s`,
      );
    }
    for (const [rank, factor] of Object.entries(slowdown)) {
      if (rank >= 0 && rank < world_size && factor > 0 && factor < Infinity) continue;
      const ranks = `ranks are 0 to ${world_size - 1} and factors positive`;
      throw new RangeError(`slowdown: rank ${rank} with factor ${factor} can't be: ${ranks}`);
    }
  }

  const plans = new WeakMap();
  /** A schedule's actions as they can run, the places of what each needs and gives, and to which rank that goes. */
  function planOf(schedule) {
    const { num_stages } = schedule;
    const resultOf = (work, rank) => {
      const taker = taker_of(work, num_stages);
      const peer = taker === null ? null : schedule.rank_of(taker);
      return { place: schedule.key(work), what: work[2], peer: peer === rank ? null : peer };
    };
    const planned = action => ({
      action,
      awaited: needs(action, num_stages).map(work => ({ place: schedule.key(work), own: work[0] === action.stage })),
      results: gives(action).map(work => resultOf(work, action.rank)),
    });
    if (!plans.has(schedule)) plans.set(schedule, Array.from(schedule.runnable(), planned));
    return plans.get(schedule);
  }

  globalThis.lockstepTwin.simulate = {
    ...{ LARGEST_WATCHED_WORLD, simulate, moveTimes, durationOf },
    ...{ simulate_pipeline, actionTimes },
  };
})();
