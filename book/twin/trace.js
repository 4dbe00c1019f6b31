/* The twin of book/trace.py: what happened, when, on which rank. */

const CLOCKS = ["modelled", "measured", "logical"];
const SOURCES = ["simulated", "executed", "recorded", "instrumented"];
const KINDS = ["hold", "send", "recv", "collective", "compute", "memory"];
const FORMAT = "lockstep trace 1";

/** Something that is not a trace. */
class TraceError extends Error {
  name = "TraceError";
}

/**
 * Columns of events, by the names of book.trace.Event: a list or typed array each, as long as the others; a field
 * that no event has is left out, and null where an event has none.
 * @typedef {Object<string, ArrayLike<any>>} Events
 */

/** Events of `world_size` ranks on one clock. */
class Trace {
  /**
   * @param {Events} events
   * @param {number} world_size
   * @param {string} clock
   * @param {string} source
   */
  constructor(events, world_size, clock, source) {
    Object.assign(this, { events, world_size, clock, source });
    this.num_events = Object.values(events)[0]?.length ?? 0;
    this.checkEvents();
  }

  /**
   * Event i, without the fields that it does not have.
   * @param {number} i
   * @returns {Object<string, any>}
   */
  event(i) {
    const all = Object.entries(this.events).map(([name, column]) => [name, column[i]]);
    return Object.fromEntries(all.filter(([, value]) => value !== null));
  }

  /**
   * Bytes that each rank sent in point-to-point messages.
   * @returns {number[]}
   */
  message_bytes() {
    const { rank, kind, num_bytes } = this.events;
    const sent = Array(this.world_size).fill(0);
    for (let i = 0; i < this.num_events; i++) if (kind[i] === "send") sent[rank[i]] += num_bytes?.[i] ?? 0;
    return sent;
  }

  /**
   * The trace that `to_json` wrote in Python; throws TraceError when the text is something else.
   * @param {string} text
   * @returns {Trace}
   */
  static from_json(text) {
    let data;
    try {
      data = JSON.parse(text);
    } catch (error) {
      throw new TraceError(`this is not a trace's JSON (write one with to_json): ${error.message}`);
    }
    if (data?.format !== FORMAT || typeof data.events !== "object" || data.events === null) {
      throw new TraceError("this is not a trace's JSON (write one with to_json)");
    }
    return new Trace(data.events, data.world_size, data.clock, data.source);
  }

  /** Throws TraceError for anything that a trace can't be. */
  checkEvents() {
    const { events, world_size, clock, source, num_events } = this;
    const refuse = words => {
      throw new TraceError(words);
    };
    if (!CLOCKS.includes(clock)) refuse(`clock must be one of ${CLOCKS.join(", ")}, not ${clock}`);
    if (!SOURCES.includes(source)) refuse(`source must be one of ${SOURCES.join(", ")}, not ${source}`);
    if (!(Number.isInteger(world_size) && world_size >= 1)) {
      refuse(`world_size must be a whole number of at least 1, not ${world_size}`);
    }
    const uneven = Object.keys(events).find(name => events[name]?.length !== num_events);
    if (uneven) refuse(`there are ${num_events} events, and ${uneven} is not a list of so many`);
    for (let i = 0; i < num_events; i++) {
      const kind = events.kind?.[i];
      if (!KINDS.includes(kind)) refuse(`kind must be one of ${KINDS.join(", ")}, not '${kind}'`);
      for (const name of ["rank", "peer"]) {
        const rank = events[name]?.[i] ?? (name === "peer" ? 0 : -1);
        if (Number.isInteger(rank) && rank >= 0 && rank < world_size) continue;
        refuse(`event ${i} has ${name} ${rank}: ranks are 0 to ${world_size - 1}`);
      }
    }
  }
}

export { Trace };
