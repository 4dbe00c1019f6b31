/* Lockstep's bars of state by formula: what each rank holds in each ZeRO stage, as the reader chooses. */
import { range, clamp, sum, make, canvas, bytes, choice, footer, frame, watchWidth, write, define } from "./scene.js";
import { num_passes, sharded_sent_bytes, state_bytes } from "../twin/plan_bytes.js";

const { min, max, ceil, round, log2 } = Math;
const NAMES = ["parameters", "gradients", "optimizer state"];

/** Ranks with which a stage fits; Infinity where none do. */
function fewest(parameters, stage, each, gpu) {
  const [all, fixed] = [1, Infinity].map(ranks => sum(state_bytes(parameters, stage, ranks, each)));
  const cut = all - fixed;
  return fixed + cut <= gpu ? 1 : cut && fixed < gpu ? ceil(cut / (gpu - fixed)) : Infinity;
}

// # chart: a bar for each stage, which can be chosen, and a line where the GPU's memory ends
const [LEFT, RIGHT, TOP, HIGH, ROW] = [72, 66, 24, 24, 38];

function chart(parent, chosen, W, choose) {
  const { parameters, ranks, each, gpu } = chosen;
  const H = TOP + 4 * ROW;
  const all = range(4, stage => state_bytes(parameters, stage, ranks, each));
  const scale = (W - LEFT - RIGHT) / max(gpu, ...all.map(list => sum(list)));
  const { rest } = canvas(parent, W, H, { role: "group", "aria-label": NAMES.join(", ") });
  const edge = LEFT + gpu * scale;
  // It passes behind the bars, whose words stand where they may.
  make("path.lk-limit", rest, { d: `M${edge.toFixed(1)} ${TOP - 6}V${H - 4}` });
  all.forEach((list, stage) => drawStage(rest, list, stage, chosen, { W, scale, edge }, choose));
  const at = { x: clamp(edge, W - 40), y: 12, "text-anchor": edge > 40 ? "middle" : "start" };
  make("text", rest, at, bytes(gpu).replace(".0", "") + " GPU");
}

function drawStage(parent, list, stage, { stage: chosen, gpu }, { W, scale, edge }, choose) {
  const y = TOP + stage * ROW;
  const on = stage === chosen;
  const all = sum(list);
  const fits = all <= gpu;
  const say = `stage ${stage}: ${bytes(all)} on each rank, ${fits ? "fits" : "more than"} ${bytes(gpu)}`;
  const state = { role: "button", tabindex: 0, "aria-pressed": on, "aria-label": say, "data-stage": stage };
  const g = make("g", parent, { ...state, style: "cursor:pointer" });
  const around = { x: 1, y: y - 5, width: W - 2, height: HIGH + 10, rx: 6, fill: "transparent" };
  make("rect", g, { ...around, class: on ? "lk-chosen" : "" });
  make("text" + (on ? ".lk-rank" : ""), g, { x: 10, y: y + HIGH / 2 + 4.5 }, "stage " + stage);
  let x = LEFT;
  list.forEach((size, i) => {
    const w = size * scale;
    const text = bytes(size);
    const paint = { fill: `var(--m${i})`, stroke: "var(--bg)", "stroke-width": w > 3 ? 1 : 0 };
    make("rect.lk-hold", g, { x, y, width: max(0.6, w), height: HIGH, ...paint });
    const at = { x: x + w / 2, y: y + HIGH / 2 + 4, "text-anchor": "middle" };
    if (w > text.length * 6.4 + 6) make("text.lk-in", g, at, text);
    x += w;
  });
  const room = fits && edge - x < 66 && edge - x > -2 ? edge - x + 2 : 0;
  const at = { x: x + 6 + room, y: y + HIGH / 2 + 4, style: "font-weight:600" };
  make(fits ? "text.lk-out" : "text.lk-limits", g, at, bytes(all));
  g.onclick = () => choose(stage);
  g.onkeydown = e => {
    if (e.key !== "Enter" && e.key !== " ") return;
    e.preventDefault();
    choose(stage);
  };
}

// # controls
function number(parent, label, attrs, act) {
  const e = make("input", make("label.lk-pill", parent, {}, label + " "), { "aria-label": label, ...attrs });
  e.oninput = () => act(+e.value);
  return e;
}

/** Lists and fields for all that can be chosen; set() takes what changes. Returns the list of stages. */
function pickers(bar, data, set) {
  const pick = (label, texts, at, act) => choice(bar, label, label, Object.entries(texts), at, i => act(+i));
  const known = data.models.findIndex(([, size]) => size === data.parameters);
  const last = data.models.length;
  const model = pick("model", [...data.models.map(([name]) => name), "your own"], known < 0 ? last : known, i => {
    own.parentNode.hidden = i < last;
    if (i === last) return;
    own.value = data.models[i][1] / 1e9;
    set({ parameters: data.models[i][1] });
  });
  const size = { type: "number", min: 0.001, max: 1e4, step: "any", value: data.parameters / 1e9 };
  const own = number(bar, "billions of parameters", size, billions => {
    if (billions > 0) set({ parameters: min(1e13, max(1e6, billions * 1e9)) });
  });
  own.parentNode.hidden = known >= 0;
  model.parentNode.after(own.parentNode);
  const count = { type: "number", min: 1, max: data.most, value: data.ranks };
  const ranks = number(bar, "ranks", count, n => {
    if (n < 1) return;
    slide.value = round(log2(min(data.most, round(n))));
    set({ ranks: min(data.most, round(n)) });
  });
  const powers = { type: "range", min: 0, max: log2(data.most), value: round(log2(data.ranks)) };
  const slide = make("input", ranks.parentNode, { "aria-label": "ranks, by powers of two", ...powers });
  slide.oninput = () => {
    ranks.value = 2 ** slide.value;
    set({ ranks: 2 ** slide.value });
  };
  const stage = pick("ZeRO stage", range(4), data.stage, s => set({ stage: s }));
  const precisions = data.precisions.map(([name, each]) => `${Object.values(each).join("+")} B: ${name}`);
  pick("precision", precisions, data.precision, i => set({ each: data.precisions[i][1] }));
  const gpus = data.gpus.map(gpu => bytes(gpu).replace(/\.0+ /, " "));
  pick("GPU", gpus, data.gpu, i => set({ gpu: data.gpus[i] }));
  return stage;
}

// # words
function tell({ parameters, stage, ranks, each, gpu }) {
  const list = state_bytes(parameters, stage, ranks, each);
  const [all, room] = [sum(list), bytes(gpu).replace(/\.0+ /, " ")];
  const fits = all <= gpu;
  const free = `, which leaves ${bytes(gpu - all)} of ${room} for activations and what is gathered: `;
  const parts = NAMES.map((name, i) => `${bytes(list[i])} of ${name}`).join(", ");
  const who = `Stage ${stage} on ${ranks} rank${ranks > 1 ? "s" : ""}: ${bytes(all)} on each`;
  return [[who, (fits ? free : `, more than a GPU of ${room} has: `) + parts + ".", !fits]];
}

function figures({ parameters, stage, ranks, each, gpu }) {
  const all = sum(state_bytes(parameters, stage, ranks, each));
  const least = fewest(parameters, stage, each, gpu);
  const whole = Object.values(each);
  const cut = state_bytes(1, stage, ranks, each);
  const parts = whole.map((b, i) => b + (cut[i] < b ? "/" + ranks : ""));
  const share = ranks > 1 && stage ? `1/${+((sum(whole) * parameters) / all).toPrecision(3)}` : "all";
  const sent = sum(num_passes(stage));
  const never = ["never", "fits: what is not sharded is too much"];
  return [
    [bytes(all), `on each rank: ${parts.join(" + ")} B a parameter`],
    [share, "of what stage 0 holds"],
    least === Infinity ? never : [String(least), `rank${least > 1 ? "s" : ""} or more for stage ${stage} to fit`],
    [
      `${+sharded_sent_bytes(stage, ranks, 1).toPrecision(3)} n`,
      `sent by each rank in a step: ${sent}(N−1)/N·n, n: all parameters`,
    ],
  ];
}

// # widget
function mountBars(el, data, opts) {
  const { parameters, ranks, stage } = data;
  const chosen = { parameters, ranks, stage, each: data.precisions[data.precision][1], gpu: data.gpus[data.gpu] };
  const { root, source, caption, alert } = frame(el, data.title);
  source.textContent = "by formula";
  const bar = make("div.lk-pickers", root);
  const field = make("div.lk-field", root);
  const parts = make("div.lk-parts lk-small", root);
  const foot = footer(root, 4);
  const set = change => {
    Object.assign(chosen, change);
    draw();
  };
  NAMES.forEach((name, i) => {
    const span = make("span", parts);
    make("i", span, { style: `--c:var(--m${i})` });
    span.append(name);
  });
  const stages = pickers(bar, data, set);

  function draw() {
    const focused = field.contains(document.activeElement);
    field.replaceChildren();
    chart(field, chosen, field.clientWidth || 320, i => {
      stages.value = i;
      set({ stage: i });
    });
    if (focused) field.querySelector(`[data-stage="${chosen.stage}"]`).focus();
    write(caption, tell(chosen));
    foot(figures(chosen));
    const all = sum(state_bytes(chosen.parameters, chosen.stage, chosen.ranks, chosen.each));
    const now = { step: 0, steps: 0, playing: false };
    Object.assign(root.dataset, { ...now, stage: chosen.stage, ranks: chosen.ranks, bytes: all });
  }
  const watch = watchWidth(field, draw);
  root.onkeydown = e => e.stopPropagation(); // keys act here and never reach the notebook around it
  draw();
  const state = { playing: false, stops: () => [0] };
  const destroy = () => {
    watch.disconnect();
    root.remove();
  };
  return { root, alert, state, control: { go() {}, end: () => 0, toggle() {} }, destroy };
}

define("memory_bars", () => mountBars);

export { fewest };
