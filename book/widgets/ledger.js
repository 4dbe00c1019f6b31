/* Lockstep's ledger: what a GPU holds, sends and waits for in each way of training, line by line, and in the reader's
   own. ledger.py says what the data mean. */
import { make, swatch, bytes, short, num, pill, sum } from "./scene.js";
import { explorer, trim } from "./explorer.js";
import { entry, joined } from "../twin/plan_ledger.js";
import { largest_micro_batch } from "../twin/plan_step.js";

const { max, min, round } = Math;
// What a GPU holds, and the hues.
const HELD = [
  ["parameter_bytes", "parameters", "var(--m0)"],
  ["gradient_bytes", "gradients", "var(--m1)"],
  ["optimizer_bytes", "optimizer", "var(--m2)"],
  ["activation_bytes", "activations", "var(--kW)"],
  ["moment_bytes", "temporary buffers", "var(--m3)"],
];
const NUMBERS = ["sends in its node", "across nodes", "waits", "tokens/s per GPU", "limited by"];
const SHORT = NUMBERS.map(words => words.replace(" per GPU", "")); // beside the numbers of a narrow line
const HEAD = ["way to train", "a GPU holds", ...NUMBERS];
const NEAR = 2; // chapters whose lines a narrow picture shows at once
const LIMITS = { pipeline: "the pipeline's bubble", line: "the slow line" };
const whole = x => round(x).toLocaleString("en");
const amount = x => (x ? trim(bytes(x)) : "–");
const percent = share => (share < 0.005 ? "–" : `${round(100 * share)}\u00a0%`);

// # answer
function answer(chosen, data) {
  const { machine, step_tokens, each, large } = data;
  const of = ({ model, tokens }) => ({ ...data.models[model], num_tokens: tokens });
  const line = ({ apart, ...way }) => {
    const each_hall = step_tokens / way.tokens / (apart?.halls ?? 1);
    const found = entry(of(way), machine, way.layout, each_hall, each, large);
    return apart ? joined(found, of(way).num_parameters, numGpus(way.layout), apart, each, large) : found;
  };
  const lines = data.ways.map(way => ({ ...way, ...line(way) }));
  const { model, gpus, tp, pp, zero, micro, again, cp = 1, ep = 1, tokens = data.tokens } = chosen;
  const { halls = 1, every = 1, parts = 1 } = chosen;
  const dp = gpus / (tp * pp * cp);
  const layout = { ...data.plain, pp, dp, tp, cp, ep, zero_stage: zero, micro_batch_size: micro };
  Object.assign(layout, { sequence_parallel: +(tp > 1), recompute: data.again[again] });
  const long = tokens > data.tokens ? [`${tokens / 1024}k tokens`] : [];
  const apart = halls > 1 ? { halls, every, parts, bytes_per_s: data.bytes_per_s } : null;
  const where = (apart ? `${halls} halls of ` : "") + (gpus === 1 ? "one GPU" : `${gpus} GPUs`);
  const pieces = parts > 1 ? ` in ${parts} parts` : "";
  const when = apart ? [every > 1 ? `weights every ${every} steps${pieces}` : "gradients in each step"] : [];
  const name = [where, ...long, ...said(layout), ...when].join(", ");
  const own = { chapter: "you", name, model, layout, tokens, apart };
  const outer = line(own).optimizer_bytes - line({ ...own, apart: null }).optimizer_bytes;
  const [sequences, room] = [step_tokens / tokens / halls, machine.memory_bytes - outer];
  const largest = recompute =>
    largest_micro_batch(of(own), machine, { ...layout, recompute }, sequences, room, each);
  const fits = Object.entries(data.again).map(([words, how]) => [words, largest(how)]);
  return { lines, own: { ...own, ...line(own), fits } };
}

const numGpus = ({ pp, dp, tp, cp }) => pp * dp * tp * cp;

function said({ pp, dp, cp, tp, ep, zero_stage, recompute }) {
  const sizes = Object.entries({ pp, dp, cp, tp, ep }).filter(([, n]) => n > 1);
  const parts = sizes.map(([axis, n]) => `${axis} ${n}`);
  if (zero_stage) parts.push(`ZeRO-${zero_stage}`);
  if (recompute) parts.push(recompute === "half" ? "half recomputed" : "recomputed");
  return parts;
}

/** GPUs hold whole groups, a step has sequences for each replica, ZeRO needs several, and experts are on a stage. */
function refined({ step_tokens, tokens, models }, at, dials) {
  const of = key => dials.findIndex(dial => dial.key === key);
  const value = (key, without) => (of(key) < 0 ? without : dials[of(key)].values[at[of(key)]]);
  const replicas = () => value("gpus") / value("tp") / value("pp") / value("cp", 1);
  while (replicas() < 1) at[of(["pp", "tp", "cp"].find(key => value(key, 1) > 1))]--;
  if (replicas() === 1 && value("cp", 1) === 1) at[of("zero")] = 0;
  const sequences = step_tokens / value("tokens", tokens) / value("halls", 1);
  while (replicas() * value("micro") > sequences) at[of(at[of("micro")] ? "micro" : "gpus")]--;
  const { num_experts } = models[value("model")];
  while (value("ep", 1) > Math.min(num_experts, value("gpus") / value("pp"))) at[of("ep")]--;
}

// # picture
function draw(field, W, { lines, own }, chosen, data) {
  const narrow = W < 620;
  const early = narrow && !data.whole ? lines.filter(line => line.chapter <= data.chapter - NEAR) : [];
  const all = narrow ? [...lines.slice(0, early.length), own, ...lines.slice(early.length)] : [...lines, own];
  if (early.length) {
    const words = `Show ${num(early.length, "earlier line")}`;
    const again = () => {
      data.whole = true;
      field.replaceChildren();
      draw(field, W, { lines, own }, chosen, data);
      const shown = field.querySelector("table"); // the button that had the focus is gone
      shown.tabIndex = -1;
      shown.focus();
    };
    pill(field, words, words, again);
  }
  const room = own.room_bytes;
  const most = min(max(...all.slice(early.length).map(line => line.memory_bytes), 1.1 * room), 4 * room);
  const table = make("table", field, { class: `lk-ledger${narrow ? " lk-narrow" : ""}` });
  const head = narrow ? null : make("tr", make("thead", table)); // a narrow line has these words beside its numbers
  for (const words of narrow ? [] : HEAD) make("th", head, { scope: "col" }, words);
  const body = make("tbody", table);
  const look = line => ({ most, room, narrow, now: line.chapter === data.chapter, mine: line === own });
  for (const line of all.slice(early.length)) row(body, line, look(line));
  const key = make("div.lk-key lk-small", field);
  for (const [, words, hue] of HELD) swatch(key, hue, words);
  make("span", key, {}, `the line: ${trim(bytes(room))}`);
}

function row(body, line, { most, room, narrow, now, mine }) {
  const tr = make("tr", body, { class: mine ? "lk-mine" : now ? "lk-here" : "" });
  const name = make("th", tr, { scope: "row" });
  make("b", name, {}, mine ? `Yours: ${line.model}` : `${line.chapter} · ${line.model}`);
  name.append(` ${line.name}`);
  const held = make("td", tr);
  if (narrow) held.dataset.head = HEAD[1];
  bar(held, line, most, room);
  const over = line.memory_bytes > room;
  make("span", held, over ? { class: "lk-wrong" } : {}, trim(bytes(line.memory_bytes)) + (over ? ": too much" : ""));
  const cells = [
    amount(line.inside_bytes), amount(line.crossing_bytes), percent((line.exposed_s + line.idle_s) / line.step_s),
    whole(line.tokens_per_s), LIMITS[line.limit] ?? line.limit,
  ];
  cells.forEach((text, i) => {
    const shown = over && i > 1 && i < 4 ? "–" : text; // what does not fit does not run
    make("td", tr, narrow ? { "data-head": SHORT[i] } : {}, shown);
  });
}

/** What a GPU holds, part by part, and a line at its memory. */
function bar(parent, line, most, room) {
  const [W, H] = [150, 14];
  const shape = { viewBox: `0 0 ${W} ${H}`, preserveAspectRatio: "none" };
  const g = make("svg.lk-holds", parent, { ...shape, "aria-hidden": true });
  let x = 0;
  for (const [key, , hue] of HELD) {
    const w = min((line[key] / most) * W, W - x);
    make("rect", g, { x, y: 1, width: max(0, w), height: H - 2, style: `fill:${hue}` });
    x += w;
  }
  make("path.lk-nowline", g, { d: `M${min(W - 1, (room / most) * W)} 0V${H}` });
}

// # words
function tell({ own }) {
  const state = sum(HELD.slice(0, 3), ([key]) => own[key]);
  const parts = `${trim(bytes(state))} of state, ${trim(bytes(own.activation_bytes))} of activations`;
  const who = `${own.model} on ${own.name}: `;
  const sizes = own.fits.map(([how, size]) => `${size || "none"} with ${how}`).join(", ");
  const largest = ` Largest micro-batch that fits: ${sizes} recomputed.`;
  if (own.limit === "memory") {
    const [all, room] = [own.memory_bytes, own.room_bytes].map(x => trim(bytes(x)));
    return [["", who], [`${all} do not fit`, ` into ${room}: ${parts}.`, true], ["", largest]];
  }
  const waits = own.exposed_s + own.idle_s;
  const why = waits < 0.005 * own.step_s ? "and never waits" : `of which ${short(waits)} wait for others`;
  return [
    ["", who],
    [`${whole(own.tokens_per_s)} tokens/s per GPU`, `. A GPU holds ${trim(bytes(own.memory_bytes))}: ${parts}. `],
    ["", `A step takes ${short(own.step_s)}, ${why}.`],
    ["", largest],
  ];
}

const told = ({ own }) => ({ ...own.layout, memory: own.memory_bytes, step_s: own.step_s, limit: own.limit });

const kindOf = data => {
  const refine = (at, dials) => refined(data, at, dials);
  return { answer, draw, tell, refine, told, source: "modelled in this page" };
};

explorer("ledger", kindOf);
