/* Lockstep's explorers: dials that the reader turns, a picture and a sentence that answer. What they show is simulated
   or computed in the page, by the twin. explorer.py says what the data mean.

   What a kind of explorer provides:
     answer(chosen, data)             what the picture and the words are made of; chosen: the value of each dial, by key
     draw(field, W, answer, chosen, data)
     tell(answer, chosen)             the sentences below the picture
     figures(answer, chosen)          pairs for the row of figures
     refine(at, dials)                changes places of dials, at[i] in dials[i].values, that do not go together
     told(answer)                     what the root's data attributes say, besides the chosen values
     beside(field, W, trace, chosen, data)   draws a reader's recording and the ideal; returns sentences about both
     source, numFigures               words at the top; how many pairs there are: 5 */
import { Trace } from "../twin/trace.js";
import {
  and, range, make, swatch, bytes, short, num, footer, frame, watchWidth, pill, write, reserve, rect, sum, define,
  upper,
} from "./scene.js";

const { min, max, ceil, floor, log, log10, abs } = Math;

const trim = text => text.replace(/(\.\d*[1-9])0+ |\.0+ /, "$1 ");
/** A value in words, by its dial's unit; any other unit follows the value. */
const UNITS = {
  "": String,
  KiB: x => `${+(x / 1024).toPrecision(4)} KiB`,
  word: String,
  B: x => trim(bytes(x)),
  s: short,
  "B/s": x => trim(bytes(x)) + "/s",
  x: x => (x === 1 ? "no" : `${x} times`),
};

const inWords = ({ unit, values }, i) => UNITS[unit]?.(values[i]) ?? `${values[i]} ${unit}`;

// # dials
/** A slider for the values of a dial, and the chosen one in words. */
function slider(parent, { label, unit, values }, at, act) {
  const box = make("label.lk-dial", parent);
  make("span", box, {}, label);
  const input = make("input", box, { type: "range", min: 0, max: values.length - 1, step: 1, "aria-label": label });
  const words = make("output", box);
  const set = i => {
    input.value = i;
    words.textContent = inWords({ unit, values }, i);
    input.setAttribute("aria-valuetext", words.textContent);
  };
  input.oninput = () => act(+input.value);
  set(at);
  return set;
}

/** A list of names to choose from. */
function menu(parent, { label, values }, at, act) {
  const box = make("label.lk-dial", parent);
  make("span", box, {}, label);
  const input = make("select", box, { "aria-label": label });
  values.forEach((name, i) => make("option", input, { value: i }, name));
  input.oninput = () => act(+input.value);
  const set = i => (input.value = i);
  set(at);
  return set;
}

/** Buttons for a dial of words, one of which is pressed. */
function buttons(parent, { label, values }, at, act) {
  const long = values.join("").length > 20 ? " lk-long" : "";
  const box = make("div.lk-dial lk-words" + long, parent, { role: "group", "aria-label": label });
  make("span", box, {}, label);
  const all = values.map((word, i) => pill(make("span", box), word, word, () => act(i)));
  const set = at => {
    all.forEach((b, i) => {
      b.classList.toggle("on", i === at);
      b.setAttribute("aria-pressed", i === at);
    });
  };
  set(at);
  return set;
}

// # a reader's own recording: it is read here, and goes nowhere
const MOST_BYTES = 20e6;
// Other files that jobs leave, by what is in their first bytes.
const TAKES = "Show a file of run.trace.to_json() beside this; it stays in this page. For others: lockstep show";
const HEAD = 4096;
const OTHERS = [
  [/^\x1f\x8b/, "is compressed, as profiler traces are"],
  [/^\x80/, "is a pickle, as dumps of PyTorch are"],
  [/"(entries|pg_config|pg_status)"|lockstep flight/, "is a Flight Recorder dump"],
  [/"(traceEvents|schemaVersion|deviceProperties)"/, "is a profiler trace"],
  [/^\{"format": ?"lockstep (run|recording)/, "is of a whole job"],
];

/** What a file is that `lockstep show` reads, and a page does not; undefined if that is not seen. */
async function otherFile(file) {
  const head = String.fromCharCode(...new Uint8Array(await file.slice(0, HEAD).arrayBuffer()));
  return /^\{"format": ?"lockstep trace/.test(head) ? undefined : OTHERS.find(([mark]) => mark.test(head))?.[1];
}

/**
 * A button and the figure itself take a file: `show` gets its trace, or null and what is wrong with the file. The
 * first such figure of a page takes what is dropped on the page's other players, too. Returns what ends that.
 */
function takesFiles(root, bar, show) {
  const read = async file => {
    try {
      const other = await otherFile(file);
      if (other) throw new Error(`it ${other}. lockstep show ${file.name} --out page.html makes a page of it.`);
      if (file.size > MOST_BYTES) throw new Error(`This file is too large: ${bytes(file.size)} of at most 20 MB.`);
      show(Trace.from_json(await file.text()));
    } catch (error) {
      show(null, `${file.name}: ${error.message}`);
    }
  };
  const input = make("input", root, { type: "file", hidden: "", "aria-label": "recording" });
  input.onchange = () => {
    if (input.files.length) read(input.files[0]);
    input.value = "";
  };
  pill(bar, "Your recording…", TAKES, () => input.click());
  root.dataset.takes = "";
  const drag = e => {
    const on = e.target.closest?.(".lockstep-player");
    if (!on || !e.dataTransfer.types.includes("Files")) return;
    if (root !== (on.matches("[data-takes]") ? on : document.querySelector("[data-takes]"))) return;
    e.preventDefault();
    if (e.type === "dragover") return;
    read(e.dataTransfer.files[0]);
    root.scrollIntoView({ block: "nearest" });
  };
  const each = act => ["dragover", "drop"].forEach(type => act(type, drag));
  each(addEventListener);
  return () => each(removeEventListener);
}

/** The `shown` events of a recording, on a clock that starts with them; throws `wrong` if none is `needed`. */
function lasting(trace, shown, wrong, needed = () => true) {
  const n = trace.world_size;
  if (n < 2 || n > 64) throw new Error(`This recording has ${num(n, "rank")}: 2 to 64 can be shown.`);
  const events = range(trace.num_events, i => trace.event(i)).filter(e => e.end_s !== undefined && shown(e));
  if (!events.some(needed)) throw new Error(wrong);
  const first = min(...events.map(({ start_s }) => start_s));
  return { n, events: events.map(e => ({ ...e, lane: e.rank, start: e.start_s - first, end: e.end_s - first })) };
}

/**
 * A recording and the ideal, [title, blocks] each, on clocks of their own; returns how long each takes. Texts of
 * blocks must be numbers: any other text in a file would become part of the page.
 */
function drawBoth(parent, W, names, kinds, both) {
  return both.map(([title, all]) => {
    const blocks = all.map(block => ({ ...block, text: Number.isInteger(block.text) ? block.text : "" }));
    const end = max(...blocks.map(block => block.end));
    make("p.lk-small", parent, {}, `${title}, ${short(end)}`);
    timeline(parent, W, { blocks, end, kinds, names, name: title, left: 52 });
    return end;
  });
}

// # widget
function mountExplorer(el, data, opts, kind) {
  const { root, source, caption, alert } = frame(el, data.title);
  source.textContent = kind.source ?? "simulated in this page";
  const side = make("div.lk-said", source.parentNode); // where the line has no room, both go to the next one
  side.append(source);
  const turns = make("div.lk-turns", side);
  const bar = make("div.lk-dials", root, { role: "group", "aria-label": "What is simulated" });
  const field = make("div.lk-field", root);
  field.after(caption);
  const foot = kind.figures ? footer(root, kind.numFigures ?? 5) : () => {};
  const first = data.dials.map(dial => dial.at);
  const at = [...first];
  const sets = data.dials.map((dial, i) => {
    const kind = dial.unit === "word" ? buttons : typeof dial.values[0] === "string" ? menu : slider;
    return kind(bar, dial, at[i], place => turn(i, place));
  });
  const reset = pill(turns, "Reset", "Back to the values in the text", () => {
    at.splice(0, at.length, ...first);
    draw();
  });

  let recording = null; // the reader's, where the kind can show one
  const own = make("div", null, { class: "lk-own" });
  field.after(own);
  const refuse = kind.beside && takesFiles(root, turns, (trace, wrong = "") => {
    recording = trace;
    alert.textContent = wrong;
    alert.hidden = !wrong;
    draw();
  });

  const valuesAt = places => Object.fromEntries(data.dials.map((dial, i) => [dial.key, dial.values[places[i]]]));
  function turn(i, place) {
    at[i] = place;
    draw();
  }
  /** Let dials follow others; returns a sentence that names those that did. */
  function follow() {
    const before = [...at];
    kind.refine?.(at, data.dials);
    const moved = data.dials.filter((_, i) => at[i] !== before[i]);
    const names = moved.map(dial => `${dial.label} to ${inWords(dial, at[data.dials.indexOf(dial)])}`);
    return names.length ? [["", `This sets ${and(names)}. `]] : [];
  }
  function draw() {
    const followed = follow();
    at.forEach((place, i) => sets[i](place));
    const chosen = valuesAt(at);
    const answer = kind.answer(chosen, data);
    const told = kind.tell(answer, chosen, data);
    field.replaceChildren();
    kind.draw(field, field.clientWidth || 320, answer, chosen, data);
    own.replaceChildren();
    const more = recording ? besideIt(recording, chosen) : [];
    write(caption, [...followed, ...told, ...more]);
    foot(kind.figures?.(answer, chosen, data) ?? []);
    const isFirst = at.every((place, i) => place === first[i]);
    if (isFirst && document.activeElement === reset) bar.querySelector("input, select, button").focus();
    reset.disabled = isFirst;
    Object.assign(root.dataset, { step: 0, steps: 0, playing: false, ...chosen, ...kind.told?.(answer) });
  }
  /** The reader's recording below the picture; returns the sentences about it. */
  function besideIt(trace, chosen) {
    try {
      return kind.beside(own, own.clientWidth || 320, trace, chosen, data);
    } catch (error) {
      recording = null;
      alert.textContent = error.message;
      alert.hidden = false;
      return [];
    }
  }
  const watch = watchWidth(field, draw);
  root.onkeydown = e => e.stopPropagation(); // keys act here and never reach the notebook around it
  draw();
  reserve(caption, [kind.tell(kind.answer(valuesAt(at), data), valuesAt(at), data)]);
  const destroy = () => {
    refuse?.();
    watch.disconnect();
    root.remove();
  };
  return { root, alert, state: { playing: false, stops: () => [0] }, control: { go() {}, end: () => 0 }, destroy };
}

// # chart
/** Powers of ten from low to high, at most so many. */
function tens(low, high, most) {
  const [from, to] = [ceil(log10(low) - 1e-9), floor(log10(high) + 1e-9)];
  const every = ceil((to - from + 1) / most);
  return range(floor((to - from) / every) + 1, i => 10 ** (from + i * every));
}

/** Where a value is on an axis, from 0 to 1. */
const place = (x, { low, high, tens }) => (tens ? log(x / low) / log(high / low) : (x - low) / (high - low));

/**
 * Curves in a frame. axes: { x, y }, each { low, high, ticks, text(tick), label, tens: whether it is logarithmic };
 * curves: { points, hue, dash }; now: a value of x to mark. Returns the layer, and where points are.
 */
function chart(parent, { W, H, axes: { x, y }, curves, now, name }) {
  const widest = max(...y.ticks.map(tick => String(y.text(tick)).length));
  const [left, right, top, bottom] = [max(46, widest * 6.8 + 10), W - 10, 18, H - (x.label ? 34 : 20)];
  const X = v => left + place(v, x) * (right - left);
  const Y = v => bottom - place(v, y) * (bottom - top - 6);
  const g = make("svg", make("div.lk-stage", parent, { style: `width:${W}px;height:${H}px` }), {
    ...{ width: W, height: H, role: "img", "aria-label": name },
  });
  make("path.lk-edge", g, { d: `M${left} ${top}V${bottom}H${right}`, fill: "none" });
  for (const tick of x.ticks) {
    make("path.lk-stripe", g, { d: `M${X(tick)} ${bottom}v4` });
    const side = X(tick) > right - 24 ? "end" : "middle";
    make("text.lk-tiny", g, { x: X(tick), y: bottom + 15, "text-anchor": side }, x.text(tick));
  }
  for (const tick of y.ticks) {
    make("text.lk-tiny", g, { x: left - 6, y: Y(tick) + 4, "text-anchor": "end" }, y.text(tick));
  }
  make("text.lk-tiny", g, { x: right, y: H - 4, "text-anchor": "end" }, x.label);
  make("text.lk-tiny", g, { x: 2, y: top - 8 }, y.label);
  make("path.lk-nowline", g, { d: `M${X(now)} ${top}V${bottom}` });
  const inside = v => max(top, min(bottom, Y(v)));
  for (const { points, hue, dash = "" } of curves) {
    const d = points.map(([a, b], i) => `${i ? "L" : "M"}${X(a).toFixed(1)} ${inside(b).toFixed(1)}`).join("");
    make("path.lk-curve", g, { d, style: `stroke:${hue}`, "stroke-dasharray": dash });
  }
  return { g, X, Y };
}

/** A dot on a chart, with words beside it. */
function dot({ g, X, Y }, [a, b], words, W, down = -9) {
  make("circle.lk-spotted", g, { cx: X(a), cy: Y(b), r: 4, fill: "var(--ink)" });
  const room = words.length * 6.3 + 10;
  const side = X(a) + room < W ? "start" : "end";
  const at = { x: X(a) + (side === "start" ? 8 : -8), y: Y(b) + down, "text-anchor": side };
  make("text.lk-outlined", g, at, words);
}

/** Between two points on a straight line. */
const between = ([a, s], [c, t], x) => s + ((t - s) * (x - a)) / (c - a || 1);

/**
 * Points of f from a to c, on a logarithmic axis, between which it is a straight line. What a simulation takes is one
 * or a few of them, and there is no need to simulate more.
 */
function pieces(f, a, c, deep = 6) {
  const split = (from, to, left) => {
    const x = Math.sqrt(from[0] * to[0]);
    const at = [x, f(x)];
    const straight = abs(between(from, to, x) - at[1]) <= 1e-9 * abs(at[1]);
    return straight || !left ? [] : [...split(from, at, left - 1), at, ...split(at, to, left - 1)];
  };
  const [from, to] = [a, c].map(x => [x, f(x)]);
  return [from, ...split(from, to, deep), to];
}

/** The value at x of what such points stand for. */
function valueAt(points, x) {
  const i = max(1, points.findIndex(([at]) => at >= x));
  return between(points[i - 1], points[i], x);
}

/** Where f changes its sign between a and c; f is a few straight lines, so that few steps find it. */
function zero(f, a, c) {
  let [fa, fc] = [f(a), f(c)];
  for (let i = 0; i < 40 && c - a > 1e-6 * c; i++) {
    const b = i % 3 === 2 ? (a + c) / 2 : a - (fa * (c - a)) / (fc - fa);
    const fb = f(b);
    if (abs(fb) <= 1e-9 * max(abs(fa), abs(fc))) return b;
    if (fb > 0 === fa > 0) [a, fa] = [b, fb];
    else [c, fc] = [b, fb];
  }
  return c;
}

/** Ticks of a logarithmic axis from low to high, at most so many. */
const logAxis = (low, high, most, text, label) => {
  return { low, high, tens: true, ticks: tens(low, high, most), text, label };
};

const percent = share => `${(100 * share).toFixed(1)} %`;

// # bars and lanes
/** A bar for each row: { label, parts: [value, hue] from the left, text, best, hue and dash of a line before it }. */
function bars(field, W, rows, left = 142) {
  const [row, right] = [22, 62];
  const H = rows.length * row + 12;
  const box = make("div.lk-stage", field, { style: `width:${W}px;height:${H}px` });
  const g = make("svg", box, { width: W, height: H, "aria-hidden": true });
  const length = ({ parts }) => sum(parts, ([value]) => value);
  const scale = (W - left - right) / max(...rows.map(length), 1e-300);
  g.innerHTML = rows.map(({ parts }, i) => stacked(parts, left, i * row + 4, scale)).join("");
  rows.forEach((one, i) => {
    const [y, look] = [i * row + 16, one.best ? "text.done" : "text"];
    if (one.hue) make("path.lk-curve", g, lineOf(one, `M0 ${y - 4}h18`));
    make(look, g, { x: one.hue ? 24 : 0, y }, one.label);
    make(look, g, { x: left + length(one) * scale + 6, y }, one.text);
  });
}

const lineOf = ({ hue, dash = "" }, d) => ({ d, style: `stroke:${hue}`, "stroke-dasharray": dash });

function stacked(parts, x, y, scale) {
  const drawn = parts.map(([value, hue]) => {
    const w = value * scale;
    x += w;
    return value ? rect([x - w, y, w, 14], `rx="3" style="fill:${hue}"`) : "";
  });
  return drawn.join("");
}

const LABELLED = 15; // px of a block that has room for its number

/**
 * Lanes of blocks on a clock; all blocks of a kind are one path, as there may be thousands.
 * names: of the lanes; blocks: { lane, kind, start, end, text, marked }; end: of the clock; kinds: [kind, what it is]
 */
function timeline(field, W, { names, blocks, end, kinds, name, left, more = "" }) {
  const tight = names.length > 8;
  const [lane, gap] = tight ? [13, 3] : [20, 5];
  const H = names.length * (lane + gap) + 8;
  const box = make("div.lk-stage", field, { style: `width:${W}px;height:${H}px` });
  const g = make("svg", box, { width: W, height: H, role: "img", "aria-label": name });
  const scale = (W - left - 2) / (end || 1);
  const at = r => 4 + r * (lane + gap);
  const parts = Object.fromEntries(kinds.map(([kind]) => [kind, []]));
  const words = [];
  for (const block of blocks) {
    const [x, w, y] = [left + block.start * scale, (block.end - block.start) * scale, at(block.lane)];
    const wide = max(0.3, w - (w > 3 ? 1 : 0.2)).toFixed(1);
    parts[block.kind].push(`M${x.toFixed(1)} ${y}h${wide}v${lane}h-${wide}z`);
    if (w < LABELLED || tight) continue;
    const marked = block.marked ? ' style="text-decoration:underline"' : "";
    const where = `x="${(x + w / 2).toFixed(1)}" y="${y + lane / 2 + 4}" text-anchor="middle"`;
    words.push(`<text class="lk-${block.kind === "W" ? "out" : "in"}" ${where}${marked}>${block.text}</text>`);
  }
  const size = `width="${W - left}" height="${lane}"`;
  const lanes = names.map((_, r) => `<rect class="lk-idle" x="${left}" y="${at(r)}" ${size}/>`);
  const paths = kinds.map(([kind]) => `<path d="${parts[kind].join("")}" style="fill:var(--k${kind})"/>`);
  const texts = names.map((text, r) => `<text class="lk-tiny" x="0" y="${at(r) + lane / 2 + 4}">${text}</text>`);
  g.innerHTML = [...lanes, ...paths, ...words, ...texts].join("");
  key(field, [...kinds.filter(([kind]) => parts[kind].length), ["idle", "idle", "\u00a0"]], more);
}

/** What the colours mean: [kind, what it is, the mark in its box]. */
function key(field, kinds, more) {
  const row = make("div.lk-key lk-small", field);
  for (const [kind, words, mark = kind] of kinds) swatch(row, `var(--k${kind})`, words, mark, "i.k" + kind);
  if (more) make("span", row, {}, more);
}

/** Put an explorer onto pages. Its kind, or what makes one of its data, can be asked from outside, as tests do. */
function explorer(name, kind) {
  const kindOf = typeof kind === "function" ? kind : () => kind;
  define(name, data => (el, _, opts) => mountExplorer(el, data, opts, kindOf(data)));
  globalThis["lockstep" + upper(name)].answer = kind.answer ?? kindOf;
}

export { explorer, chart, dot, logAxis, pieces, valueAt, zero, bars, timeline, lasting, drawBoth, trim, percent };
