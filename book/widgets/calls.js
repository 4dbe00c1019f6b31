/* Lockstep's picture of a job's calls: each rank's own time, when it waited for others, and when bytes moved.
   calls.py says what the data mean, called.py what they are of a recording; nothing is drawn that they don't say. */
import { make, rankName, byStops, mountScene, define, seconds } from "./scene.js";
import { TICKS, lanes, axis } from "./lanes.js";

const { max } = Math;
// What a rank does, in the order of the numbers in the data: its name and colour. Where nothing is drawn, it waits.
const KINDS = [
  ["input", "--b1"],
  ["forward", "--kF"],
  ["backward", "--kB"],
  ["optimizer", "--kI"],
  ["garbage collector", "--bad"],
  ["other code", "--p2"],
  ["exchange", "--kW"],
];

const EXCHANGE = 6;
const OWN = "own code";

function decode(raw) {
  const ranks = raw.lanes.map(flat => {
    const blocks = [];
    let b = 0;
    for (let i = 0; i < flat.length; i += 3) {
      const a = b + flat[i + 1];
      b = a + flat[i + 2];
      blocks.push({ a, b, ...drawn(flat[i], raw.called) });
    }
    return blocks;
  });
  return { ...raw, ranks, times: raw.stops.map(stop => stop.t) };
}

/** A block of this kind: beyond KINDS each of the collectives that are `called` has two, to wait in and to exchange. */
function drawn(number, called) {
  const beyond = number - KINDS.length;
  if (beyond < 0) {
    const [name, c] = KINDS[number];
    return { c: `var(${c})`, key: number, lines: [[called ? OWN : name]], look: number === EXCHANGE ? "lk-sent" : "" };
  }
  const lines = [called[beyond >> 1]];
  if (beyond % 2) return { c: `var(${KINDS[EXCHANGE][1]})`, key: EXCHANGE, lines, look: "lk-sent" };
  return { c: "var(--hollow)", key: number, lines, look: "lk-waits" }; // the stripes below stay to be seen
}

function stage({ run, data, field }, W) {
  const n = run.ranks.length;
  const h = n > 16 ? 8 : n > 8 ? 14 : 24;
  const each = h + (n > 16 ? 3 : 8);
  const left = W >= 560 ? 84 : n > 10 ? 70 : 62;
  const y = 10 + n * each;
  const every = n > 16 ? 4 : 1;
  const rows = run.ranks.map((blocks, r) => {
    const fits = h < 14 ? blocks.map(block => ({ ...block, lines: [] })) : blocks;
    return { y: 8 + r * each, h, blocks: fits };
  });
  const ui = lanes(field, { W, H: y + 20, left, perTick: (W - left - 2) / TICKS, rows, name: data.title });
  axis(ui, { W, y }, run.duration_s, run.duration_s);
  run.names.forEach((rank, r) => {
    if (r % every === 0) rankName(ui.rest, rank, 8 + r * each + h / 2 + 4.5);
  });
  const row = make("div.lk-key lk-small", field);
  const there = new Set(run.ranks.flatMap(blocks => blocks.map(block => block.key)));
  for (const [k, [name, c]] of KINDS.entries()) {
    if (there.has(k)) key(row, run.called && k !== EXCHANGE ? OWN : name, `var(${c})`);
  }
  key(row, "waits for others", "var(--kidle)");
  return t => ui.set(t);
}

function key(row, text, c) {
  const span = make("span", row);
  make("i", span, { style: "background:" + c }, "\u00a0");
  span.append(text);
}

const kind = {
  ...byStops,
  clocked: true,
  decode,
  stage,
  words: ({ run, state }) => `${seconds((state.t / TICKS) * run.duration_s)} of ${seconds(run.duration_s)}`,
  parts: ({ times }) => [[0, TICKS], "0", { snap: false, steps: times.length - 1 }],
  rate: step => max(TICKS / 12, (step || 0) / 0.7),
  resume: () => TICKS,
  figures: ({ run }) => run.figures,
};

define("calls", () => (el, data, opts) => {
  const view = mountScene(el, data, opts, kind);
  // A report is read as a whole, and played by whoever wants to; that of a hang from where all still went on.
  view.control.go(data.runs[0].opens ?? TICKS);
  return view;
});
