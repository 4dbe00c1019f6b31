/* Lockstep's picture of a job over time: each rank's own time, when it waited for others, and when bytes moved; or each
   stream of its GPU. calls.py says what the data mean, called.py what they are of a recording, streams.py of a profiler
   trace; nothing is drawn that they don't say. */
import { make, rankName, swatch, mountScene, pickable, clamp, define, seconds } from "./scene.js";
import { TICKS, onClock, lanes, axis, mark } from "./lanes.js";

const { max } = Math;
// What a rank or a stream does, and its colour. In calls.py's data the first ones go by number.
const ROLES = {
  input: "--b1",
  forward: "--kF",
  backward: "--kB",
  optimizer: "--kI",
  "garbage collector": "--bad",
  "other code": "--p2",
  exchange: "--kW",
  "own code": "--p2",
  waits: "--hollow", // the stripes below stay to be seen
  computing: "--kF",
  communication: "--kW",
  copy: "--kI",
  "host works": "--p2",
  "host waits": "--hollow",
};
const NUMBERED = 7;
const LOOKS = { exchange: "lk-sent", communication: "lk-sent", waits: "lk-waits", "host waits": "lk-waits" };

/** The role of each number in lanes, and the texts of its blocks. */
function kindsOf({ kinds, called }) {
  if (!called) return kinds ?? Object.keys(ROLES).map(role => [role, role]);
  const each = called.flatMap(lines => ["waits", "exchange"].map(role => [role, ...lines]));
  return [...Array(NUMBERED).fill(["own code", "own code"]), ...each];
}

function decode(raw) {
  const kinds = kindsOf(raw);
  const blocks = [];
  const rows = raw.lanes.map((flat, r) => {
    const row = [];
    let b = 0;
    for (let i = 0; i < flat.length; i += 3) {
      const a = b + flat[i + 1];
      b = a + flat[i + 2];
      const [role, ...lines] = kinds[flat[i]];
      const look = LOOKS[role];
      row.push({ a, b, r, role, look, c: `var(${ROLES[role]})`, key: blocks.length, lines: [lines] });
      blocks.push(row.at(-1));
    }
    return row;
  });
  const names = raw.names.map(name => [name].flat());
  return { ...raw, rows, blocks, names, times: raw.stops.map(stop => stop.t) };
}

function stage({ run, data, field }, W) {
  const n = run.rows.length;
  const h = n > 16 ? 8 : n > 8 ? 14 : 24;
  const each = h + (n > 16 ? 3 : 8);
  const longest = max(...run.names.map(([, name = ""]) => 7.7 * name.length + 22));
  const left = max(longest, W >= 560 ? 84 : 70);
  const y = 10 + n * each;
  const rows = run.rows.map((blocks, r) => {
    const fits = h < 14 ? blocks.map(block => ({ ...block, lines: [] })) : blocks;
    return { y: 8 + r * each, h, blocks: fits };
  });
  const ui = lanes(field, { W, H: y + 20, left, perTick: (W - left - 2) / TICKS, rows, name: data.title });
  axis(ui, { W, y }, run.duration_s, run.duration_s);
  run.names.forEach(([rank, name], r) => {
    if (name ?? (n < 17 || r % 4 === 0)) rankName(ui.rest, rank, 8 + r * each + h / 2 + 4.5, name);
  });
  const row = make("div.lk-key lk-small", field);
  const there = new Set(run.blocks.map(({ role }) => role));
  for (const role in ROLES) if (there.has(role) && role !== "waits") swatch(row, `var(${ROLES[role]})`, role);
  swatch(row, "var(--kidle)", run.idle ?? "waits for others");
  return t => ui.set(t);
}

const kind = {
  ...onClock,
  below(view) {
    view.detail = make("div.lk-detail lk-small", view.root);
    pickable(view, "[data-b]", g => +g.dataset.b, () => {
      view.detail.ariaLive = "off"; // a pointer passes many blocks
      mark(view.field, view.picked);
    });
  },
  decode,
  stage,
  resume: () => TICKS,
  figures: ({ run }) => run.figures,
  /** What the block is that is pointed at. */
  after({ run, picked, detail }) {
    const at = t => seconds((t / TICKS) * run.duration_s);
    const { a, b, r, role, lines } = run.blocks[picked] ?? {};
    const [rank, , name = "rank " + rank] = run.names[r] ?? [];
    detail.textContent = role
      ? `${name}, ${at(a)} to ${at(b)}: ${[...new Set([role, lines[0][0]])].join(", ")}`
      : "Point at a block, or press \u2191 or \u2193.";
  },
  turn(view, by) {
    view.picked = clamp((view.picked ?? -1) + by, view.run.blocks.length - 1);
    mark(view.field, view.picked);
    view.detail.ariaLive = "polite";
    view.draw();
  },
};

define("calls", () => (el, data, opts) => {
  const view = mountScene(el, data, opts, kind);
  // A report is read as a whole, and played by whoever wants to; that of a hang from where all still went on.
  view.control.go(data.runs[0].opens ?? TICKS);
  return view;
});
