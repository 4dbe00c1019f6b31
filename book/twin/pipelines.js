/* The twin of book/pipelines.py: in which order the ranks of a pipeline run forwards and backwards of micro-batches.
   p ranks, S stages, v = S/p stages on each rank, M micro-batches. */
(() => {
  const { PipelineSchedule, ScheduleError, check_counts } = globalThis.lockstepTwin.schedule;
  const range = (n, first = 0) => Array.from({ length: Math.max(0, n) }, (_, i) => first + i);

  /** A schedule of what `order(rank)` lists: [stage, micro-batch, kind], and so on. */
  function scheduled(name, num_stages, num_micro_batches, world_size, order) {
    check_counts({ num_stages, num_micro_batches });
    const actions = range(world_size).flatMap(rank =>
      order(rank).map(([stage, micro_batch, kind]) => ({ rank, stage, micro_batch, kind })),
    );
    return new PipelineSchedule(name, num_stages, num_micro_batches, actions, world_size);
  }

  /**
   * All forwards, then all backwards, one stage on each rank.
   * @param {number} num_stages
   * @param {number} num_micro_batches
   * @returns {PipelineSchedule}
   */
  function gpipe(num_stages, num_micro_batches) {
    const order = rank => ["F", "B"].flatMap(kind => range(num_micro_batches).map(m => [rank, m, kind]));
    return scheduled("gpipe", num_stages, num_micro_batches, num_stages, order);
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
    return scheduled("one_f_one_b", num_stages, num_micro_batches, num_stages, order);
  }

  /**
   * 1F1B with v stages on each rank, S/v apart from one another.
   * @param {number} num_stages
   * @param {number} num_micro_batches
   * @param {number} stages_per_rank
   * @returns {PipelineSchedule}
   */
  function interleaved(num_stages, num_micro_batches, stages_per_rank = 2) {
    check_counts({ num_stages, num_micro_batches, stages_per_rank });
    const world_size = Math.floor(num_stages / stages_per_rank);
    if (num_stages % stages_per_rank) {
      throw new ScheduleError(
        `interleaved: ${num_stages} stages can't be shared out ${stages_per_rank} to a rank: make num_stages a ` +
          "multiple of stages_per_rank",
      );
    }
    if (num_micro_batches % world_size) {
      throw new ScheduleError(
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
    return scheduled("interleaved", num_stages, num_micro_batches, world_size, order);
  }

  /**
   * ZB-V: two stages on each rank, laid out as a V, and backwards split so that W fills what would be idle.
   * @param {number} num_stages
   * @param {number} num_micro_batches
   * @returns {PipelineSchedule}
   */
  function zero_bubble(num_stages, num_micro_batches) {
    check_counts({ num_stages, num_micro_batches });
    const world_size = Math.floor(num_stages / 2);
    if (num_stages % 2) {
      throw new ScheduleError(
        `zero_bubble: the V has two stages on each rank, so ${num_stages} stages don't fit: use an even number`,
      );
    }
    const order = rank => {
      // Planned for a pipeline that is full; with fewer micro-batches the places of the others stay empty.
      const planned = vOrder(rank, num_stages, Math.max(num_micro_batches, 2 * world_size - 1));
      return planned.filter(([, m]) => m < num_micro_batches);
    };
    return scheduled("zero_bubble", num_stages, num_micro_batches, world_size, order);
  }

  /** `ahead` forwards first, then a forward and a backward in turn, then the backwards that are left. */
  function inTurn(forwards, backwards, ahead) {
    const [F, B] = [forwards, backwards].map((pairs, i) => pairs.map(pair => [...pair, "FB"[i]]));
    const turns = F.slice(ahead).flatMap((forward, i) => [forward, B[i]]);
    return [...F.slice(0, ahead), ...turns, ...B.slice(Math.max(0, F.length - ahead))];
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

  globalThis.lockstepTwin.pipelines = { gpipe, one_f_one_b, interleaved, zero_bubble };
})();
