/* Lockstep's planner in the page: the fastest layout of what the reader chooses, memory against time of those that fit,
   where bytes and seconds go. plan_explorer.py says what the data mean. */
import { byTouch, make } from "./scene.js";
import { explorer, chart, dot } from "./explorer.js";
import { band, frontOf, nameOf, time } from "./layouts.js";
import * as plan_answer from "../twin/plan_answer.js";

const { min, max, round } = Math;
const MOST_DOTS = 300;
// The parts of an estimate, their words and hues.
const HELD = {
  state_bytes: ["state", 0],
  activation_bytes: ["activations", 1],
  gathered_bytes: ["temporary buffers", 3],
};
const SPENT = {
  matmul_s: ["products", 0],
  elementwise_s: ["passes over memory", 2],
  launch_s: ["launches", 9],
  tp_s: ["tp", 1],
  cp_s: ["cp", 5],
  ep_s: ["ep", 6],
  pp_s: ["pp", 3],
  bubble_s: ["bubble", 8],
  dp_s: ["dp", 7],
  update_s: ["update", 10],
};
const percent = x => `${(100 * x).toPrecision(x < 0.0995 ? 1 : 2)}\u00a0%`;
const gb = x => `${(x / 1e9).toFixed(1)}\u00a0GB`;
const whole = x => round(x).toLocaleString("en");

// # answer
function answer({ model, gpu, software, gpus, memory_bytes, across_bytes_per_s, millions, price }, data) {
  const { kind, ...machine } = data.machines[gpu];
  const { bars, ...constants } = data.kinds[`${kind} ${software}`];
  const cluster = { ...machine, ...constants, num_gpus: gpus, memory_bytes, across_bytes_per_s };
  const sizes = data.models[model];
  const batch = plan_answer.default_batch(sizes, gpus, millions * 2 ** 20);
  const found = plan_answer.plan(sizes, cluster, batch, data.each[software], data.long, bars, software);
  const points = found.ranked.map(({ layout, cost }) => ({ layout, step: cost.step_s, memory: cost.memory_bytes }));
  const hours = ((data.tokens / (batch * sizes.num_tokens)) * (found.cost?.step_s ?? 0) * gpus) / 3600;
  const usable = cluster.usable_share * memory_bytes;
  return { ...found, batch, usable, points, front: frontOf(points), hours, dollars: hours * price };
}

// # picture
/** Where dots and curves are; the front of the dials' first places stays, to compare with. */
function draw(field, W, found, chosen, data) {
  const { cost, points, front, usable } = found;
  data.first ??= front;
  if (!cost) return make("p.lk-small", field, { style: "min-height:120px" }, "Nothing to draw: no layout fits.");
  const shown = points.slice(0, MOST_DOTS);
  const last = max(...front.map(d => d.step), ...data.first.map(d => d.step)) * 1.05;
  const low = min(cost.step_s, data.first[0]?.step ?? cost.step_s) * 0.9;
  const high = min(last, low * 8);
  const steps = [1, 1.5, 2, 3, 4, 5, 6, 8].flatMap(x => [-2, -1, 0, 1, 2, 3, 4].map(ten => x * 10 ** ten));
  const ticks = steps.filter(x => x >= low && x <= high).sort((a, b) => a - b);
  const every = Math.ceil(ticks.length / (W / 80));
  const many = `${whole(found.ranked.length)} of ${whole(found.total)} layouts fit`;
  const small = W < 480; // there both axes are named in one line, which leaves more of the height to the dots
  const gigabytes = small
    ? "GB by time of a step; " + many.replace("layouts ", "")
    : `GB of a GPU; ${many}: ${byTouch() ? "tap" : "click"} one`;
  const axes = {
    x: { low, high, tens: true, ticks: ticks.filter((_, i) => i % every === 0), text: time, label: small ? "" : "time of a step" },
    y: { low: 0, high: usable, ticks: [0, usable / 2, usable], text: x => round(x / 1e9), label: gigabytes },
  };
  const inside = all => all.filter(d => d.step <= high).map(d => [d.step, d.memory]);
  const curves = [{ points: inside(front), hue: "var(--x0)" }];
  if (data.first !== front) curves.push({ points: inside(data.first), hue: "var(--soft)", dash: "4 4" });
  const name = `memory against time: ${many}`;
  const set = chart(field, { W, H: small ? 132 : 140, axes, curves, now: cost.step_s, name });
  for (const d of shown.filter(d => d.step <= high)) {
    make("circle.lk-point", set.g, { cx: set.X(d.step).toFixed(1), cy: set.Y(d.memory).toFixed(1), r: 1.5 });
  }
  dot(set, [cost.step_s, cost.memory_bytes], "", W);
  tapped(field, set, shown.filter(d => d.step <= high), [cost.step_s, cost.memory_bytes]);
  const parts = (keys, of, text) => keys.map(key => text(of[key]));
  const pair = make("div.lk-pair", field, { style: "margin:4px 0 8px" });
  const fill = (title, rows, all, text, words) => {
    const keys = Object.keys(rows).filter(key => cost[key] >= 0.005 * all);
    band(pair, title, keys.map(key => rows[key]))(all, keys.map(key => cost[key]), parts(keys, cost, text), words);
  };
  fill("Memory", HELD, usable, gb, `${gb(cost.memory_bytes)} of ${gb(usable)}`);
  fill("A step", SPENT, cost.step_s, s => percent(s / cost.step_s), `${time(cost.step_s)}, MFU ${percent(cost.mfu)}`);
}

/** A tap or click on the chart says what the nearest layout is. */
function tapped(field, { g, X, Y }, shown, fastest) {
  const line = make("p.lk-small", field, { style: "margin:0", "aria-live": "polite" });
  const ring = make("circle.lk-nowline", g, { r: 6, fill: "none", cx: X(fastest[0]), cy: Y(fastest[1]), opacity: 0 });
  g.onclick = e => {
    const box = g.getBoundingClientRect();
    const far = d => Math.hypot(X(d.step) - (e.clientX - box.left), Y(d.memory) - (e.clientY - box.top));
    const near = shown.reduce((a, b) => (far(b) < far(a) ? b : a));
    const at = { cx: X(near.step), cy: Y(near.memory), opacity: 1 };
    for (const [name, value] of Object.entries(at)) ring.setAttribute(name, value);
    line.textContent = `${named(near.layout)}: ${time(near.step)}, ${gb(near.memory)}`;
  };
}

// # words
const named = layout => {
  const { micro_batch_size: b, stages_per_rank: v, zero_stage: zero, sequence_parallel: sp } = layout;
  const how = { null: -1, selective: 0, half: 1, full: 2 }[layout.recompute];
  return nameOf({ ...layout, b, v, zero, sp, how });
};

function tell(found, { model, gpu, gpus }) {
  const { cost, layout } = found;
  const question = `${model} on ${whole(gpus)} ${gpu}: `;
  if (!found.total) return [["", question], ["nothing divides these GPUs, layers, heads and sequences.", ""]];
  if (!cost) {
    const words = `none of ${whole(found.total)} layouts fits`;
    return [["", question], [words, `: the smallest needs ${gb(found.least)}, and ${gb(found.usable)} are usable.`]];
  }
  const bar = `${time(found.low_s)} to ${time(found.high_s)}, one in ten over ${time(found.worst_s)}.`;
  return [
    [named(layout), `: ${time(cost.step_s)}. `],
    ["", `By measured steps (${found.basis}) half of such steps take ${bar}`],
  ];
}

function figures({ cost, hours, dollars }, { gpus }, { tokens }) {
  return [
    [cost ? `$${whole(dollars)}` : "–", `for ${tokens / 1e12} trillion tokens`],
    [cost ? `${whole(hours / gpus / 24)} days` : "–", cost ? `${whole(hours)} GPU hours` : ""],
  ];
}

const told = ({ cost, layout }) => ({ ...layout, step_s: cost?.step_s ?? "", memory: cost?.memory_bytes ?? "" });

/** A GPU that is chosen brings its own memory and network along. */
function kindOf(data) {
  let before = null;
  const refine = (at, dials) => {
    const place = key => dials.findIndex(dial => dial.key === key);
    const gpu = dials[place("gpu")].values[at[place("gpu")]];
    if (before && gpu !== before) {
      for (const key of ["memory_bytes", "across_bytes_per_s"]) {
        at[place(key)] = dials[place(key)].values.indexOf(data.machines[gpu][key]);
      }
    }
    before = gpu;
  };
  return { answer, draw, tell, figures, told, refine, source: "computed in this page", numFigures: 2 };
}

explorer("plan_explorer", kindOf);
