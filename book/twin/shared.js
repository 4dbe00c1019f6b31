/* The twin of book/simulate/shared.py: messages that share network cards, worked out event by event. Those that pass
   through a card at the same time share it fairly: no message could be faster without making one slower that is not
   faster than itself. So the pace of all that is under way changes whenever a message begins or ends. */
(() => {
  const { min, max } = Math;
  const NEARLY = 1 + 1e-9; // times and paces that differ by less are equal

  /**
   * When each message leaves, has arrived, and has been added, written into these messages of a schedule's steps.
   * @param {Message[][]} steps
   * @param {number} chunk_bytes
   * @param {Network} network
   * @param {number[]} slowdown   each rank's factor on its times
   * @returns {Message[][]}
   */
  function run_shared(steps, chunk_bytes, network, slowdown) {
    const run = new Run(ordered(steps), chunk_bytes, network, slowdown);
    run.toTheEnd();
    return steps;
  }

  /** All messages in the schedule's order, with what waits for what. */
  function ordered(steps) {
    const last = new Map(); // the last message through each rank's port, each way
    const received = new Map(); // what a rank was sent since it last sent something
    const wait = (one, list) => {
      one.awaited++;
      list.push(one);
    };
    for (const step of steps) {
      for (const one of step) Object.assign(one, { awaited: 0, then: [], thenAdded: [] });
      for (const one of step) {
        for (const port of [`out ${one.src}`, `in ${one.dst}`]) {
          if (last.has(port)) wait(one, last.get(port).then);
          last.set(port, one);
        }
        for (const earlier of received.get(one.src) ?? []) wait(one, earlier.thenAdded);
        received.delete(one.src);
      }
      for (const one of step) received.set(one.dst, [...(received.get(one.dst) ?? []), one]);
    }
    return steps.flat();
  }

  /** The clock, and what is under way. */
  class Run {
    constructor(messages, chunk_bytes, network, slowdown) {
      const [routes, capacity] = network.routes(messages);
      Object.assign(this, { messages, capacity, now_s: 0, moving: [], pace: [] });
      this.due = []; // when a latency is over, or an addition, the next one last
      this.free_s = slowdown.map(() => 0); // when a rank will have added all that has arrived
      messages.forEach((one, number) => {
        const { src, dst, moves, adds } = one;
        const link = network.link(src, dst);
        const factor = max(slowdown[src], slowdown[dst]);
        const added_bytes = adds * chunk_bytes;
        Object.assign(one, { number, route: routes[number], most: link.bandwidth_bytes_per_s / factor });
        Object.assign(one, { left_bytes: moves.length * chunk_bytes, latency_s: link.latency_s * factor });
        one.adding_s = added_bytes ? link.reduce_s(added_bytes) * slowdown[dst] : null;
      });
    }

    toTheEnd() {
      this.leave(this.messages.filter(one => !one.awaited));
      while (this.due.length || this.moving.length) this.goOn();
    }

    /** Go on to what ends next; what has waited for nothing else leaves. */
    goOn() {
      const { moving, pace, due } = this;
      const ends = moving.map((one, i) => this.now_s + one.left_bytes / pace[i]);
      const next_s = min(due.at(-1)?.at_s ?? Infinity, ...ends);
      moving.forEach((one, i) => (one.left_bytes -= pace[i] * (next_s - this.now_s)));
      const there = ends.map(end => end <= next_s * NEARLY);
      const [arrived, still, ended] = [moving.filter((_, i) => there[i]), moving.filter((_, i) => !there[i]), []];
      this.now_s = next_s;
      while (due.length && due.at(-1).at_s <= next_s * NEARLY) {
        const { one, isAdded } = due.pop();
        if (isAdded) ended.push(...one.thenAdded);
        else (one.left_bytes > 0 ? still : arrived).push(one);
      }
      arrived.sort((a, b) => a.number - b.number);
      for (const one of arrived) ended.push(...this.arrive(one));
      if (still.length !== moving.length || still.some((one, i) => one !== moving[i])) {
        this.moving = still;
        this.pace = fair(
          still.map(one => one.route),
          this.capacity,
          still.map(one => one.most),
        );
      }
      this.leave(ended.filter(one => !--one.awaited));
    }

    leave(messages) {
      for (const one of messages) {
        one.start = this.now_s;
        this.expect(this.now_s + one.latency_s, one, false);
      }
    }

    /** Put what will be over into its place among what is due. */
    expect(at_s, one, isAdded) {
      const later = other => other.at_s - at_s || other.one.number - one.number || other.isAdded - isAdded;
      const place = this.due.findLastIndex(other => later(other) > 0) + 1;
      this.due.splice(place, 0, { at_s, one, isAdded });
    }

    /** Note that a message has arrived, and begin to add it; returns the messages that have waited for it. */
    arrive(one) {
      one.arrived = one.added = this.now_s;
      if (one.adding_s === null) return [...one.then, ...one.thenAdded];
      this.free_s[one.dst] = one.added = max(this.now_s, this.free_s[one.dst]) + one.adding_s;
      this.expect(one.added, one, true);
      return one.then;
    }
  }

  /**
   * The bytes per second of messages that pass `routes` and can have `most` at best. Progressive filling: all get more
   * until some have all they can, or share a card that is full; those stay there, the others go on.
   * @param {number[][]} routes     numbers into `capacity`
   * @param {number[]} capacity     what each card can carry
   * @param {number[]} most
   * @returns {number[]}
   */
  function fair(routes, capacity, most) {
    const pace = most.map(() => 0);
    const left = [...capacity];
    let waiting = [...most.keys()];
    const countOf = messages => {
      const counts = left.map(() => 0);
      for (const i of messages) for (const card of routes[i]) counts[card]++;
      return counts;
    };
    while (waiting.length) {
      const share = countOf(waiting).map((count, card) => (count ? left[card] / count : Infinity));
      const level = min(...share, ...waiting.map(i => most[i]));
      const full = i => min(...routes[i].map(card => share[card])) <= level * NEARLY || most[i] <= level * NEARLY;
      const stays = waiting.filter(full);
      for (const i of stays) pace[i] = level;
      countOf(stays).forEach((count, card) => (left[card] -= level * count));
      waiting = waiting.filter(i => !stays.includes(i));
    }
    return pace;
  }

  globalThis.lockstepTwin.shared = { NEARLY, run_shared, fair };
})();
