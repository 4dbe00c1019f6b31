/* The twin of book/schedule: who sends which chunk to whom at which step; what each rank of a pipeline runs next. */
(() => {
  const { PROMISES } = globalThis.lockstepTwin.promise;
  const OPS = ["reduce", "copy"];
  const KINDS = ["F", "B", "I", "W"];
  const ABSENT = -1;

  /** A schedule that cannot be right: it names a rank or chunk that is not there, or does not keep its promise. */
  class ScheduleError extends Error {
    name = "ScheduleError";
    /** @type {string[]} of a pipeline's order that cannot run: what each rank that is stuck waits for */
    waits = [];
  }

  /**
   * Throws unless every one of the named counts is a whole number of at least 1.
   * @param {Object<string, number>} counts
   */
  function check_counts(counts) {
    for (const [name, value] of Object.entries(counts)) {
      if (Number.isInteger(value) && value >= 1) continue;
      throw new ScheduleError(`${name} must be a whole number of at least 1, not ${value}`);
    }
  }

  function checkName(name) {
    if (/^[\p{L}_][\p{L}\p{N}_]*$/u.test(name)) return;
    throw new ScheduleError(`a schedule's name is letters, digits and underscores, not '${name}'`);
  }

  // # moves
  /**
   * Moves as columns of whole numbers. `op` is a place in OPS; `into` is the receiver's chunk, -1 where it has the
   * number of the one that leaves.
   */
  class Moves {
    step = [];
    src = [];
    dst = [];
    chunk = [];
    op = [];
    into = [];

    /**
     * One more move; returns the moves.
     * @param {number} step
     * @param {number} src
     * @param {number} dst
     * @param {number} chunk
     * @param {string} op
     * @param {number | null} into
     * @returns {Moves}
     */
    add(step, src, dst, chunk, op, into = null) {
      this.step.push(step);
      this.src.push(src);
      this.dst.push(dst);
      this.chunk.push(chunk);
      this.op.push(OPS.indexOf(op));
      this.into.push(into === null || into === chunk ? ABSENT : into);
      return this;
    }

    get length() {
      return this.step.length;
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

  /** A list of moves over `world_size` ranks whose buffers have `num_chunks` chunks, and what it promises. */
  class Schedule {
    /**
     * @param {string} name
     * @param {number} world_size
     * @param {number} num_chunks
     * @param {Moves} moves
     * @param {string} promise   a name in PROMISES
     */
    constructor(name, world_size, num_chunks, moves, promise) {
      checkName(name);
      check_counts({ world_size, num_chunks });
      if (!PROMISES[promise]) {
        throw new ScheduleError(`unknown promise '${promise}': use one of ${Object.keys(PROMISES).join(", ")}`);
      }
      Object.assign(this, { name, world_size, num_chunks, promise });
      this.moves = moves.byStep();
      this.checkRanges();
    }

    get num_steps() {
      const { step, length } = this.moves;
      return length ? step[length - 1] + 1 : 0;
    }

    /** The receiver's chunk that move i lands in. */
    into(i) {
      const { into, chunk } = this.moves;
      return into[i] === ABSENT ? chunk[i] : into[i];
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

    /** Where the contributions of a rank's chunk begin in counts of ranks, chunks and contributions. */
    place(rank, chunk) {
      return (rank * this.num_chunks + chunk) * this.world_size;
    }

    /** Counts (ranks, chunks, contributions) of what `of(r, c, k)` says. */
    counts(of) {
      const { world_size, num_chunks } = this;
      const held = new Int32Array(world_size * num_chunks * world_size);
      let i = 0;
      for (let r = 0; r < world_size; r++) {
        for (let c = 0; c < num_chunks; c++) {
          for (let k = 0; k < world_size; k++) held[i++] = Number(of(r, c, k));
        }
      }
      return held;
    }

    /** Whose contributions each rank holds before the first step. */
    start() {
      return this.counts(PROMISES[this.promise].start(this.world_size));
    }

    /**
     * Moves contributions as the schedule says, changing `held`; yields, for each move in order, its position, the
     * contributions in its message, and those that the receiver's chunk holds afterwards.
     * @param {Int32Array} held
     * @returns {Generator<[number, Int32Array, Int32Array]>}
     */
    *replay(held = this.start()) {
      const { src, dst, chunk, op } = this.moves;
      const of = at => held.slice(at, at + this.world_size);
      for (const [from, to] of this.steps()) {
        const sent = [];
        for (let i = from; i < to; i++) sent.push(of(this.place(src[i], chunk[i])));
        for (let i = from; i < to; i++) {
          const message = sent[i - from];
          const at = this.place(dst[i], this.into(i));
          const replaces = OPS[op[i]] === "copy";
          message.forEach((x, k) => (held[at + k] = replaces ? x : held[at + k] + x));
          yield [i, message, of(at)];
        }
      }
    }

    /** Replays every contribution and returns the schedule if its promise is kept; throws where it is not. */
    check() {
      this.checkConflicts();
      const { name, world_size } = this;
      const promise = PROMISES[this.promise];
      const [goal, where] = [this.counts(promise.goal(world_size)), promise.where(world_size)];
      const held = this.atTheEnd(this.start());
      for (const [rank, chunk] of this.chunks()) {
        const at = this.place(rank, chunk);
        const fault = where(rank, chunk) && contents_fault(...[held, goal].map(x => x.slice(at, at + world_size)));
        if (fault) throw new ScheduleError(`${name}: at the end rank ${rank} chunk ${chunk} ${fault}`);
      }
      this.checkSourceChunks(goal, where, promise.source_chunk(world_size));
      return this;
    }

    /** Every (rank, chunk), in order. */
    *chunks() {
      for (let rank = 0; rank < this.world_size; rank++) {
        for (let chunk = 0; chunk < this.num_chunks; chunk++) yield [rank, chunk];
      }
    }

    atTheEnd(held) {
      for (const _ of this.replay(held));
      return held;
    }

    /** Which of its rank's chunks each contribution was: it carries that number instead of 1. */
    checkSourceChunks(goal, where, sourceChunk) {
      const from = [...this.chunks()];
      const plain = from.every(([r, c]) => sourceChunk(r, c) === c);
      if (plain && this.moves.into.every(into => into === ABSENT)) return;
      const begin = PROMISES[this.promise].start(this.world_size);
      const cameFrom = this.atTheEnd(this.counts((r, c, k) => begin(r, c, k) * c));
      for (const [rank, chunk] of from.filter(([r, c]) => where(r, c))) {
        for (let k = 0; k < this.world_size; k++) {
          const at = this.place(rank, chunk) + k;
          const wanted = sourceChunk(rank, chunk);
          if (cameFrom[at] === goal[at] * wanted) continue;
          throw new ScheduleError(
            `${this.name}: at the end rank ${rank} chunk ${chunk} holds chunk ${cameFrom[at]} of rank ${k}, ` +
              `not its chunk ${wanted}`,
          );
        }
      }
    }

    checkRanges() {
      const { moves, world_size, num_chunks } = this;
      const limits = { step: Infinity, src: world_size, dst: world_size, chunk: num_chunks, into: num_chunks };
      for (const [name, limit] of Object.entries(limits)) {
        const value = i => (name === "into" ? this.into(i) : moves[name][i]);
        for (let i = 0; i < moves.length; i++) {
          if (value(i) >= 0 && value(i) < limit) continue;
          const allowed = limit === Infinity ? "0 or more" : `0 to ${limit - 1}`;
          throw new ScheduleError(`${this.name}: move ${i} has ${name} ${value(i)}, it must be ${allowed}`);
        }
      }
      const { step, src, dst, chunk, op, into } = moves;
      if (op.includes(ABSENT)) throw new ScheduleError(`${this.name}: op must be 'reduce' or 'copy'`);
      const i = src.findIndex((rank, at) => rank === dst[at]);
      if (i < 0) return;
      const move = `step=${step[i]}, src=${src[i]}, dst=${dst[i]}, chunk=${chunk[i]}, op='${OPS[op[i]]}'`;
      const last = into[i] === ABSENT ? "None" : into[i];
      throw new ScheduleError(`${this.name}: Move(${move}, into=${last}) goes from a rank to itself`);
    }

    /** A copy and another move into the same chunk in one step: the result would depend on who comes first. */
    checkConflicts() {
      const { step, dst, op, length } = this.moves;
      const key = i => `${step[i]} ${dst[i]} ${this.into(i)}`;
      const times = new Map();
      for (let i = 0; i < length; i++) times.set(key(i), (times.get(key(i)) ?? 0) + 1);
      const i = op.findIndex((code, at) => OPS[code] === "copy" && times.get(key(at)) > 1);
      if (i < 0) return;
      throw new ScheduleError(
        `${this.name}: in step ${step[i]} rank ${dst[i]} chunk ${this.into(i)} gets a copy and another message: ` +
          "the result depends on which comes first",
      );
    }

    /** The schedule as text: a comment line with its head, a header, one line per move. */
    to_csv() {
      const { step, src, dst, chunk, op, into } = this.moves;
      const other = into.some(x => x !== ABSENT);
      const lines = [`# ${this.name},${this.world_size},${this.num_chunks},${this.promise}`];
      lines.push("step,src,dst,chunk,op" + (other ? ",into" : ""));
      step.forEach((at, i) => {
        const last = other ? "," + (into[i] === ABSENT ? "" : into[i]) : "";
        lines.push(`${at},${src[i]},${dst[i]},${chunk[i]},${OPS[op[i]]}${last}`);
      });
      return lines.join("\n") + "\n";
    }

    /**
     * The schedule that `to_csv` wrote.
     * @param {string} text
     * @returns {Schedule}
     */
    static from_csv(text) {
      const [head, , ...lines] = text.trimEnd().split("\n");
      const [name, world_size, num_chunks, promise] = head.replace(/^# /, "").split(",");
      const moves = new Moves();
      for (const line of lines) {
        const [step, src, dst, chunk, op, into] = line.split(",");
        moves.add(+step, +src, +dst, +chunk, op, into ? +into : null);
      }
      return new Schedule(name, +world_size, +num_chunks, moves, promise);
    }
  }

  /**
   * What is wrong with a chunk's contributions, in words; "" when nothing is.
   * @param {Int32Array} held
   * @param {Int32Array} wanted
   * @returns {string}
   */
  function contents_fault(held, wanted) {
    const all = [...held.keys()];
    const missing = all.filter(k => held[k] < wanted[k]);
    const extra = all.filter(k => held[k] > wanted[k]);
    const times = k => `rank ${k} (${wanted[k] ? `${held[k]} times` : "not wanted"})`;
    return [
      missing.length && `lacks the contribution of rank${missing.length > 1 ? "s" : ""} ${missing.join(", ")}`,
      extra.length && `counts too often: ${extra.map(times).join(", ")}`,
    ]
      .filter(Boolean)
      .join(" and ");
  }

  // # actions
  /**
   * Rank `rank` runs the `kind` ("F", "B", "I" or "W") of micro-batch `micro_batch` on stage `stage`.
   * @typedef {{rank: number, stage: number, micro_batch: number, kind: string}} Action
   *
   * What an action gives and needs: a stage's output, the gradient of its input, or those of its weights.
   * @typedef {[number, number, string]} Work   stage, micro-batch, what
   */
  const GIVES = { F: ["output"], B: ["gradient", "weights"], I: ["gradient"], W: ["weights"] };
  const WORKS = ["output", "gradient", "weights"];

  const nameOf = ({ kind, micro_batch, stage }) => `${kind}${micro_batch} of stage ${stage}`;

  /**
   * What must be there before an action can run.
   * @param {Action} action
   * @param {number} num_stages
   * @returns {Work[]}
   */
  function needs({ stage, micro_batch, kind }, num_stages) {
    if (kind === "F") return stage ? [[stage - 1, micro_batch, "output"]] : [];
    if (kind === "W") return [[stage, micro_batch, "gradient"]];
    const own = [stage, micro_batch, "output"];
    return stage < num_stages - 1 ? [own, [stage + 1, micro_batch, "gradient"]] : [own];
  }

  /**
   * What is there once an action has run.
   * @param {Action} action
   * @returns {Work[]}
   */
  const gives = ({ stage, micro_batch, kind }) => GIVES[kind].map(what => [stage, micro_batch, what]);

  /** Who gives what an action needs, in words. */
  function giver({ kind }, [stage, m, what]) {
    if (what === "output") return `F${m} of stage ${stage}`;
    return kind === "W" ? `I${m} of stage ${stage}` : `the backward of micro-batch ${m} on stage ${stage}`;
  }

  /**
   * The other stage that needs a result: the one after for an output, the one before for a gradient; or null.
   * @param {Work} work
   * @param {number} num_stages
   * @returns {number | null}
   */
  function taker_of([stage, , what], num_stages) {
    const taker = { output: stage + 1, gradient: stage - 1 }[what] ?? -1;
    return taker >= 0 && taker < num_stages ? taker : null;
  }

  /** The order in which every rank of a pipeline runs its actions. */
  class PipelineSchedule {
    /**
     * @param {string} name
     * @param {number} num_stages
     * @param {number} num_micro_batches
     * @param {Action[]} actions               those of one rank in its order
     * @param {number | null} world_size       null: one more than the highest rank
     */
    constructor(name, num_stages, num_micro_batches, actions, world_size = null) {
      checkName(name);
      check_counts({ num_stages, num_micro_batches });
      Object.assign(this, { name, num_stages, num_micro_batches });
      this.actions = [...actions].sort((a, b) => a.rank - b.rank);
      this.world_size = world_size ?? Math.max(0, ...actions.map(action => action.rank)) + 1;
      check_counts({ world_size: this.world_size });
      this.checkRanges();
      this.ranks = this.placesOfStages();
      this.queues = Array.from({ length: this.world_size }, () => []);
      for (const action of this.actions) this.queues[action.rank].push(action);
    }

    /**
     * The actions of one rank, in its order.
     * @param {number} rank
     * @returns {Action[]}
     */
    of_rank(rank) {
      return this.queues[rank] ?? [];
    }

    /**
     * The rank that runs a stage; null where none does.
     * @param {number} stage
     * @returns {number | null}
     */
    rank_of(stage) {
      return this.ranks[stage] ?? null;
    }

    /** A whole number for each work. */
    key([stage, micro_batch, what]) {
      return (stage * this.num_micro_batches + micro_batch) * WORKS.length + WORKS.indexOf(what);
    }

    /** Room for a number for each work. */
    room(kind) {
      return new kind(this.num_stages * this.num_micro_batches * WORKS.length);
    }

    /** Returns the schedule if every stage runs every micro-batch forward and backward, in an order that can run. */
    check() {
      const done = this.room(Uint8Array);
      for (const action of this.runnable()) for (const work of gives(action)) done[this.key(work)] = 1;
      const at = done.indexOf(0);
      if (at < 0) return this;
      const m = Math.floor(at / WORKS.length) % this.num_micro_batches;
      const stage = Math.floor(at / WORKS.length / this.num_micro_batches);
      const kinds = [`F${m}`, `B${m} or I${m}`, `W${m}`][at % WORKS.length];
      throw new ScheduleError(`${this.name}: nobody runs ${kinds} of stage ${stage}`);
    }

    /**
     * All actions in an order in which one process after the other could run them; throws where no rank can go on.
     * @returns {Generator<Action>}
     */
    *runnable() {
      const at = Array(this.world_size).fill(0);
      const done = this.room(Uint8Array);
      for (let moved = true; moved; ) {
        moved = false;
        for (const [rank, queue] of this.queues.entries()) {
          for (let next; (next = queue[at[rank]]) && !this.missing(next, done); at[rank]++) {
            for (const work of gives(next)) done[this.key(work)] = 1;
            yield next;
            moved = true;
          }
        }
      }
      const stuck = this.queues.map((queue, rank) => queue[at[rank]]).filter(Boolean);
      if (stuck.length) this.refuse(stuck, done);
    }

    /** The first thing that an action needs and that is not there. */
    missing(action, done) {
      return needs(action, this.num_stages).find(work => !done[this.key(work)]);
    }

    refuse(stuck, done) {
      const waits = stuck.map(action => {
        const wanted = giver(action, this.missing(action, done));
        const own = this.of_rank(action.rank).some(other => nameOf(other) === wanted);
        const later = own ? ", which it runs later itself" : "";
        return `rank ${action.rank} waits at ${nameOf(action)} for ${wanted}${later}`;
      });
      throw Object.assign(new ScheduleError(`${this.name}: this order cannot run: ${waits.join("; ")}`), { waits });
    }

    /**
     * For each rank, after each of its actions, how many forwards wait for their backward (for W, if it is split).
     * @returns {number[][]}
     */
    in_flight() {
      const change = { F: 1, B: -1, I: 0, W: -1 };
      return this.queues.map(queue => {
        let count = 0;
        return queue.map(({ kind }) => (count += change[kind]));
      });
    }

    /**
     * The most forwards that wait for their backward at once, for each rank.
     * @returns {number[]}
     */
    peak_in_flight() {
      return this.in_flight().map(counts => (counts.length ? Math.max(...counts) : 0));
    }

    /** The schedule as text: a comment line with its head, then a line per rank such as "0F0,0F1,0B0". */
    to_csv() {
      const line = queue => queue.map(a => `${a.stage}${a.kind}${a.micro_batch}`).join(",");
      const head = `# ${this.name},${this.num_stages},${this.num_micro_batches}`;
      return [head, ...this.queues.map(line)].join("\n") + "\n";
    }

    /**
     * The schedule that `to_csv` wrote.
     * @param {string} text
     * @returns {PipelineSchedule}
     */
    static from_csv(text) {
      const [head, ...lines] = text.replace(/\n$/, "").split("\n");
      const [name, num_stages, num_micro_batches] = head.replace(/^# /, "").split(",");
      const actions = lines.flatMap((line, rank) =>
        [...line.matchAll(/(\d+)([FBIW])(\d+)/g)].map(([, stage, kind, m]) => {
          return { rank, stage: +stage, micro_batch: +m, kind };
        }),
      );
      return new PipelineSchedule(name, +num_stages, +num_micro_batches, actions, lines.length);
    }

    checkRanges() {
      const limits = { rank: this.world_size, stage: this.num_stages, micro_batch: this.num_micro_batches };
      for (const [name, limit] of Object.entries(limits)) {
        const i = this.actions.findIndex(action => !(action[name] >= 0 && action[name] < limit));
        if (i < 0) continue;
        const value = this.actions[i][name];
        throw new ScheduleError(`${this.name}: action ${i} has ${name} ${value}, it must be 0 to ${limit - 1}`);
      }
      const unknown = this.actions.find(action => !KINDS.includes(action.kind));
      if (!unknown) return;
      throw new ScheduleError(`${this.name}: kind must be one of ${KINDS.join(", ")}, not '${unknown.kind}'`);
    }

    /** The rank of each stage; refuses a stage on two ranks and work that is done twice. */
    placesOfStages() {
      const ranks = [];
      const done = this.room(Uint8Array);
      for (const action of this.actions) {
        const { rank, stage } = action;
        ranks[stage] ??= rank;
        if (ranks[stage] !== rank) {
          throw new ScheduleError(
            `${this.name}: stage ${stage} is run by ranks ${ranks[stage]} and ${rank}: ` +
              "a stage's weights are on one rank",
          );
        }
        for (const key of gives(action).map(work => this.key(work))) {
          const again = `${this.name}: rank ${rank} runs ${nameOf(action)} when that was done already`;
          if (done[key]) throw new ScheduleError(again);
          done[key] = 1;
        }
      }
      return ranks;
    }
  }

  globalThis.lockstepTwin.schedule = {
    ...{ OPS, ScheduleError, Moves, Schedule, check_counts, contents_fault },
    ...{ KINDS, PipelineSchedule, needs, gives, taker_of },
  };
})();
