/* Lockstep's picture of a job's calls: each rank's own time, when it waited for others, and when bytes moved.
   calls.py says what the data mean; nothing is drawn that they don't say. */
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

function decode(raw) {
  const ranks = raw.lanes.map(flat => {
    const blocks = [];
    let b = 0;
    for (let i = 0; i < flat.length; i += 3) {
      const a = b + flat[i + 1];
      b = a + flat[i + 2];
      const [name, c] = KINDS[flat[i]];
      blocks.push({ a, b, c: `var(${c})`, key: flat[i], lines: [[name]], look: flat[i] === 6 ? "lk-sent" : "" });
    }
    return blocks;
  });
  return { ...raw, ranks, times: raw.stops.map(stop => stop.t) };
}

function stage({ run, data, field }, W) {
  const n = run.ranks.length;
  const h = n > 16 ? 8 : n > 8 ? 14 : 24;
  const each = h + (n > 16 ? 3 : 8);
  const left = W >= 560 ? 84 : 62;
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
  for (const [k, [name, c]] of KINDS.entries()) if (there.has(k)) key(row, name, `var(${c})`);
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
  view.control.go(TICKS); // a report is read as a whole, and played by whoever wants to
  return view;
});
