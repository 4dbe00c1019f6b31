/* The twin of book/pipelines.py, and of what book.schedule and book.simulate say of pipelines: in which order ranks
   run forwards and backwards of micro-batches, and when. p ranks, S stages, v = S/p stages on each rank, M
   micro-batches. */

const { max } = Math;
const range = (n, first = 0) => Array.from({ length: max(0, n) }, (_, i) => first + i);

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
   * @param {number} num_stages
   * @param {number} num_micro_batches
   * @param {Action[][]} queues   of each rank, in its order
   */
  constructor(num_stages, num_micro_batches, queues) {
    Object.assign(this, { num_stages, num_micro_batches, queues });
    this.ranks = []; // of each stage
    for (const { rank, stage } of queues.flat()) this.ranks[stage] = rank;
    this.plan = [...this.runnable()].map(action => this.planned(action));
  }

  /** A whole number for each work. */
  key([stage, micro_batch, what]) {
    return (stage * this.num_micro_batches + micro_batch) * WORKS.length + WORKS.indexOf(what);
  }

  /** Room for a number for each work. */
  room(kind) {
    return new kind(this.num_stages * this.num_micro_batches * WORKS.length);
  }

  /** All actions in an order in which one process after the other could run them. */
  *runnable() {
    const at = this.queues.map(() => 0);
    const done = this.room(Uint8Array);
    const missing = action => needs(action, this.num_stages).some(work => !done[this.key(work)]);
    for (let moved = true; moved; ) {
      moved = false;
      for (const [rank, queue] of this.queues.entries()) {
        for (let next; (next = queue[at[rank]]) && !missing(next); at[rank]++) {
          for (const work of gives(next)) done[this.key(work)] = 1;
          yield next;
          moved = true;
        }
      }
    }
  }

  /** An action, the places of what it needs and gives, and to which rank that goes; null: to none but its own. */
  planned(action) {
    const resultOf = work => {
      const taker = taker_of(work, this.num_stages);
      const peer = taker === null ? null : this.ranks[taker];
      return { place: this.key(work), peer: peer === action.rank ? null : peer };
    };
    const neededOf = work => ({ place: this.key(work), own: work[0] === action.stage });
    const awaited = needs(action, this.num_stages).map(neededOf);
    return { action, awaited, results: gives(action).map(resultOf) };
  }

  /**
   * The most forwards that wait for their backward at once (for W, if it is split), for each rank.
   * @returns {number[]}
   */
  peak_in_flight() {
    const change = { F: 1, B: -1, I: 0, W: -1 };
    return this.queues.map(queue => {
      let count = 0;
      return max(0, ...queue.map(({ kind }) => (count += change[kind])));
    });
  }
}

/**
 * When each action runs, in an order in which one process could run them, if a forward of one stage takes `forward_s`,
 * a backward `backward_s`, of which half goes to the weights. A rank runs its actions in its own order, each as soon as
 * the one before is done and what it needs has come. With `link`, each output, and each gradient on its way back, is a
 * message without bytes between two ranks; without, they arrive at once.
 * @param {PipelineSchedule} schedule
 * @param {number} forward_s
 * @param {number} backward_s
 * @param {Link | null} link
 * @returns {{action: Action, start_s: number, end_s: number}[]}
 */
function actionTimes(schedule, forward_s, backward_s, link = null) {
  const lengths = { F: forward_s, B: backward_s, I: backward_s - backward_s / 2, W: backward_s / 2 };
  const num_ranks = schedule.queues.length;
  const free_s = new Float64Array(num_ranks);
  const wire_s = {}; // by sender and receiver
  const made_s = schedule.room(Float64Array); // when the stage that gives it has it
  const there_s = schedule.room(Float64Array); // when the other stage that needs it has it

  /** When the rank that takes a result has it. */
  function arrival_s(rank, peer, ready_s) {
    if (!link || peer === null) return ready_s;
    const wire = rank * num_ranks + peer;
    return (wire_s[wire] = max(ready_s, wire_s[wire] ?? 0) + link.transfer_s(0));
  }

  return schedule.plan.map(({ action, awaited, results }) => {
    const { rank, kind } = action;
    let start_s = free_s[rank];
    for (const { place, own } of awaited) start_s = max(start_s, (own ? made_s : there_s)[place]);
    const end_s = (free_s[rank] = start_s + lengths[kind]);
    for (const { place, peer } of results) {
      made_s[place] = end_s;
      there_s[place] = arrival_s(rank, peer, end_s);
    }
    return { action, start_s, end_s };
  });
}

// # schedules
/** A schedule of what `order(rank)` lists: [stage, micro-batch, kind], and so on. */
function scheduled(num_stages, num_micro_batches, world_size, order) {
  const queues = range(world_size).map(rank => {
    return order(rank).map(([stage, micro_batch, kind]) => ({ rank, stage, micro_batch, kind }));
  });
  return new PipelineSchedule(num_stages, num_micro_batches, queues);
}

/**
 * All forwards, then all backwards, one stage on each rank.
 * @param {number} num_stages
 * @param {number} num_micro_batches
 * @returns {PipelineSchedule}
 */
function gpipe(num_stages, num_micro_batches) {
  const order = rank => ["F", "B"].flatMap(kind => range(num_micro_batches).map(m => [rank, m, kind]));
  return scheduled(num_stages, num_micro_batches, num_stages, order);
}

/**
 * As many forwards as there are stages behind, then one forward, one backward in turn, and a flush at the end.
 * @param {number} num_stages
 * @param {number} num_micro_batches
 * @returns {PipelineSchedule}
 */
function one_f_one_b(num_stages, num_micro_batches) {
  const order = rank => {
    const pairs = range(num_micro_batches).map(m => [rank, m]);
    return inTurn(pairs, pairs, num_stages - 1 - rank);
  };
  return scheduled(num_stages, num_micro_batches, num_stages, order);
}

/**
 * 1F1B with v stages on each rank, S/v apart from one another.
 * @param {number} num_stages
 * @param {number} num_micro_batches
 * @param {number} stages_per_rank
 * @returns {PipelineSchedule}
 */
function interleaved(num_stages, num_micro_batches, stages_per_rank = 2) {
  const world_size = Math.floor(num_stages / stages_per_rank);
  if (num_micro_batches % world_size) {
    throw new RangeError(
      `interleaved: micro-batches go round in groups of ${world_size}, one for each rank, and ` +
        `${num_micro_batches} are no whole number of groups: use a multiple of ${world_size}`,
    );
  }
  const groups = range(num_micro_batches / world_size).map(g => range(world_size, g * world_size));
  const order = rank => {
    const stages = range(stages_per_rank).map(i => rank + i * world_size);
    const pairs = list => groups.flatMap(group => list.flatMap(stage => group.map(m => [stage, m])));
    const ahead = (stages_per_rank - 1) * world_size + 2 * (world_size - 1 - rank);
    return inTurn(pairs(stages), pairs([...stages].reverse()), ahead);
  };
  return scheduled(num_stages, num_micro_batches, world_size, order);
}

/**
 * ZB-V: two stages on each rank, laid out as a V, and backwards split so that W fills what would be idle.
 * @param {number} num_stages
 * @param {number} num_micro_batches
 * @returns {PipelineSchedule}
 */
function zero_bubble(num_stages, num_micro_batches) {
  const world_size = Math.floor(num_stages / 2);
  const order = rank => {
    // Planned for a pipeline that is full; with fewer micro-batches the places of the others stay empty.
    const planned = vOrder(rank, num_stages, max(num_micro_batches, 2 * world_size - 1));
    return planned.filter(([, m]) => m < num_micro_batches);
  };
  return scheduled(num_stages, num_micro_batches, world_size, order);
}

/** `ahead` forwards first, then a forward and a backward in turn, then the backwards that are left. */
function inTurn(forwards, backwards, ahead) {
  const [F, B] = [forwards, backwards].map((pairs, i) => pairs.map(pair => [...pair, "FB"[i]]));
  const turns = F.slice(ahead).flatMap((forward, i) => [forward, B[i]]);
  return [...F.slice(0, ahead), ...turns, ...B.slice(max(0, F.length - ahead))];
}

/** What a rank of ZB-V does, phase by phase; "down" is its first stage, "up" its second. */
function vOrder(rank, num_stages, num_micro_batches) {
  const order = [];
  const stageOf = number => ({ number, at: { F: 0, I: 0, W: 0 } });
  const [down, up] = [stageOf(rank), stageOf(num_stages - 1 - rank)];
  const next = (stage, kinds) => {
    for (const kind of kinds) order.push([stage.number, stage.at[kind]++, kind]);
  };
  const times = (n, act) => range(n).forEach(act);
  const behind = num_stages / 2 - rank; // ranks from here to the turn of the V
  times(2 * behind - 1, () => next(down, "F"));
  times(rank, () => {
    next(up, "F");
    next(down, "F");
  });
  times(behind, () => next(up, "FIW"));
  while (up.at.F < num_micro_batches) {
    // full: forward, backward and weights of both stages in turn
    if (down.at.F < num_micro_batches) next(down, "F");
    next(down, "IW");
    next(up, "FIW");
  }
  times(rank, () => {
    // nobody may wait for a gradient now: weights can be left for later
    next(down, "I");
    next(up, "I");
  });
  times(behind, () => next(down, "IW"));
  for (const stage of [up, down]) times(num_micro_batches - stage.at.W, () => next(stage, "W"));
  return order;
}

export { actionTimes, gpipe, one_f_one_b, interleaved, zero_bubble };
