/* Lockstep's step timeline: the phases of training steps on every rank. At rest it shows what a monitor does: how long
   each phase took. What is played shows who waits. steps.py says what the data mean. */
import { range, make, swatch, rankName, mountScene, define } from "./scene.js";
import { TICKS, onClock, lanes, axis } from "./lanes.js";

const { max } = Math;
const COLOURS = 4;
const colour = which => `var(--b${which % COLOURS})`;

function plan({ n, duration_s }, W, total_s) {
  const left = W >= 560 ? 84 : 58;
  const [back, net, gap] = n > 4 ? [16, 5, 9] : [25, 6, 9];
  const at = range(n, r => ({ y: 8 + r * (back + net + gap + 3), back, net }));
  const y = at.at(-1).y + back + net + 10;
  return { W, H: y + 20, left, y, perTick: ((W - left - 2) * duration_s) / total_s / TICKS, at };
}

/** A phase is there from the start, waiting and all-reduces only once they are played. */
function rowsOf({ ranks }, names, { at }) {
  const phase = ([which, a, b], waits) => {
    const name = names[which];
    const played = waits.find(([, end]) => end === b)?.[0];
    return { a, b, played, c: colour(which), key: which, lines: [[name, name[0]]] };
  };
  const wait = ([a, b]) => ({ a, b, c: "var(--p1)", key: -1, lines: [["waits"]], kind: "lk-exposed" });
  const call = ([a, b]) => ({ a, b, c: "var(--p0)", key: -2, lines: [], kind: "lk-call" });
  return ranks.flatMap(({ phases, waits, calls }, r) => {
    const { y, back, net } = at[r];
    return [
      { y, h: back, blocks: [...phases.map(one => phase(one, waits)), ...waits.map(wait)] },
      { y: y + back + 3, h: net, blocks: calls.map(call) },
    ];
  });
}

function stage({ run, data, field }, W) {
  const total_s = max(...data.runs.map(one => one.duration_s));
  const set = plan(run, W, total_s);
  const ui = lanes(field, { ...set, rows: rowsOf(run, data.phases, set), name: data.title });
  axis(ui, set, run.duration_s, total_s);
  set.at.forEach(({ y, back }, r) => rankName(ui.rest, r, y + back / 2 + 5, set.left > 60 ? `rank ${r}` : `${r}`));
  return ui.set;
}

/** What the colours mean. */
function legend({ data, field }) {
  const key = make("div.lk-key lk-small");
  data.phases.forEach((name, which) => swatch(key, colour(which), name, name[0]));
  swatch(key, "var(--p1)", "waits", "w", "i.lk-waits");
  swatch(key, "var(--p0)", "all-reduce: from a rank's call to its end", "\u2013");
  field.after(key);
}

const shown = ({ run, state }) => run.figures.map(([value, what]) => [state.t < TICKS ? "?" : value, what]);

const kind = {
  ...onClock,
  start: legend,
  decode: raw => ({ ...raw, times: [...new Set([...raw.stops.map(stop => stop.t), TICKS])] }),
  stage,
  tell: ({ run }, k) => run.stops[Math.min(k, run.stops.length - 1)].say,
  resume: () => 0,
  numFigures: 4,
  figures: shown,
  told: ({ run }) => ({ ranks: run.n }),
};

define("steps", () => (el, data, opts) => mountScene(el, data, opts, kind));
