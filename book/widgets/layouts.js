/* Lockstep's chart of layouts: memory against time, a front to walk along, and where one layout's bytes and seconds go.
   layouts.py says what the data mean; all of them are formulas' values. */
import {
  EPS, range, clamp, make, canvas, pill, choice, footer, shell, write, reserve, plain, define,
} from "./scene.js";

const { min, max, abs, ceil, floor, log, hypot } = Math;
const HOW = { "-1": "no", 0: "selective", 1: "half", 2: "full" };
const NEAR = 26; // px from a point
const HELD = { state: ["state", 0], kept: ["activations", 1], moment: ["temporary buffers", 3] };
// In the order of `PARTS` in book/cost/step.py.
const SPENT = {
  products: 0,
  "passes over memory": 2,
  launches: 9,
  tp: 1,
  cp: 5,
  ep: 6,
  pp: 3,
  bubble: 8,
  dp: 7,
  update: 10,
};

/** A layout is an object; they come fastest first. */
function decode({ columns, parts, ...rest }) {
  const names = Object.keys(columns);
  const all = range(columns.pp.length, i => {
    const d = Object.fromEntries(names.map(name => [name, columns[name][i]]));
    return { ...d, i, parts: parts.map(part => part[i]), memory: d.state + d.kept + d.moment };
  });
  return { ...rest, all };
}

const gb = x => `${(x / 100).toFixed(1)}\u00a0GB`;
const share = x => `${(x / 10).toFixed(1)}\u00a0%`;
function time(s) {
  if (s < 1) return `${(1000 * s).toPrecision(3)}\u00a0ms`;
  return `${s >= 999.5 ? Math.round(s) : s.toPrecision(3)}\u00a0s`;
}

function nameOf(d) {
  const within = d.replicas > 1 ? ` in ${d.replicas} replicas` : "";
  const options = [d.v > 1 && `${d.v} stages a rank`, d.zero && `ZeRO-${d.zero}${within}`, d.sp && "sequence parallel"];
  const rare = (d.cp > 1 ? ` × cp ${d.cp}` : "") + (d.ep > 1 ? `, ep ${d.ep}` : "");
  const parts = [`pp ${d.pp} × dp ${d.dp} × tp ${d.tp}${rare}`, `micro-batch ${d.b}`, ...options];
  return [...parts, `${HOW[d.how]} recompute`].filter(Boolean).join(", ");
}

/** The layouts, fastest first, that no other beats in both time and memory. */
function frontOf(some) {
  let least = Infinity;
  return some.filter(d => {
    const better = d.memory < least;
    if (better) least = d.memory;
    return better;
  });
}

// # stage
/** As many of 1, 2, 5 times a power of ten as have room. */
function ticks(low, high, px, gap) {
  const tens = range(14, k => 10 ** (k - 4));
  const between = set => tens.flatMap(ten => set.map(x => x * ten)).filter(x => x >= low && x <= high);
  const apart = (x, before) => (log(x / before) / log(high / low)) * px >= gap;
  const sets = [[1, 2, 5], [1, 3], [1]].map(between);
  return sets.find(set => set.every((x, i) => !i || apart(x, set[i - 1]))) ?? [];
}

/** Where times and sizes are in the plot, both on logarithmic axes as long as some layouts need. */
function plan(run, W, some) {
  const H = W < 560 ? 290 : 340;
  const [left, right, top, bottom] = [54, W - 12, 24, H - 34];
  const times = some.map(d => d.step);
  const sizes = [...some.map(d => d.memory), run.usable];
  const [t0, t1] = [min(...times) / 1.12, max(...times) * 1.12];
  const [m0, m1] = [min(...sizes) / 1.15, max(...sizes) * 1.15];
  const x = t => left + (log(t / t0) / log(t1 / t0)) * (right - left);
  const y = m => bottom - (log(m / m0) / log(m1 / m0)) * (bottom - top);
  return { W, H, left, right, top, bottom, t0, t1, m0, m1, x, y, place: d => [x(d.step), y(d.memory)] };
}

function drawAxes(rest, { H, left, right, top, bottom, t0, t1, m0, m1, x, y }) {
  const text = (attrs, words) => make("text", rest, attrs, words);
  make("path.lk-edge", rest, { d: `M${left} ${top}V${bottom}H${right}`, fill: "none" });
  for (const t of ticks(t0, t1, right - left, 52)) {
    const at = { x: min(x(t), right - 14), y: bottom + 15, "text-anchor": "middle" };
    text(at, t < 1 ? `${+(1000 * t).toPrecision(2)} ms` : `${t} s`);
  }
  for (const m of ticks(m0 / 100, m1 / 100, bottom - top, 26)) {
    text({ x: left - 6, y: y(100 * m) + 4, "text-anchor": "end" }, `${m} GB`);
  }
  text({ x: left - 6, y: 11 }, "memory of a GPU (logarithmic)");
  text({ x: right, y: H - 4, "text-anchor": "end" }, "time of a step (logarithmic)");
}

function stageOf(parent, run, W, name, some) {
  const set = plan(run, W, some);
  const { left, right, y, place } = set;
  const { rest, move } = canvas(parent, W, set.H, { "aria-label": name });
  rest.classList.add("lk-plot");
  drawAxes(rest, set);
  make("path.lk-most", rest, { d: `M${left} ${y(run.usable)}H${right}` });
  const point = d => ({ cx: place(d)[0].toFixed(1), cy: place(d)[1].toFixed(1), r: 2.6, class: "lk-point" });
  const dots = run.all.map(d => make("circle", rest, point(d)));
  const line = make("path.lk-walk", rest, { d: "" });
  const outlined = { style: "paint-order:stroke;stroke:var(--bg);stroke-width:4px", "text-anchor": "end" };
  make("text", rest, { x: right, y: y(run.usable) - 5, ...outlined }, `usable: ${gb(run.usable)}`);
  const spot = make("g.lk-spot", move);
  make("circle", spot, { r: 8 });
  return {
    show(some, front) {
      const here = new Set(some);
      run.all.forEach((d, i) => {
        dots[i].setAttribute("class", `lk-point${d.fits ? "" : " toobig"}${here.has(d) ? "" : " gone"}`);
      });
      const to = (d, i) =>
        (i ? "L" : "M") +
        place(d)
          .map(at => at.toFixed(1))
          .join(" ");
      line.setAttribute("d", front.map(to).join(""));
    },
    /** A ring between two layouts. */
    ring(a, b, f) {
      spot.style.display = a ? "" : "none";
      if (!a) return;
      const [from, to] = [place(a), place(b)];
      const at = from.map((v, i) => (v + (to[i] - v) * f).toFixed(1));
      spot.setAttribute("transform", `translate(${at})`);
    },
    nearest(px, py, some) {
      const far = d => hypot(place(d)[0] - px, place(d)[1] - py);
      const best = some.reduce((a, b) => (a && far(a) <= far(b) ? a : b), null);
      return best && far(best) <= NEAR ? best : null;
    },
  };
}

/** Where bytes or seconds go: a band of colours, and its words. */
function band(parent, title, keys) {
  const box = make("div.lk-costs lk-small", parent);
  const head = make("b", box);
  const line = make("div.lk-band", box, { "aria-hidden": true });
  const words = make("div.lk-keys", box);
  const paint = ([, hue]) => ({ style: `background:var(--r${hue})` });
  const bars = keys.map(key => make("i", line, paint(key)));
  const texts = keys.map(key => {
    const one = make("span", words);
    make("i", one, paint(key));
    return make("span", one);
  });
  return (whole, values, shown, text) => {
    head.textContent = `${title}: ${text}`;
    values.forEach((value, i) => {
      bars[i].style.width = `${(100 * value) / whole}%`;
      texts[i].textContent = `${keys[i][0]} ${shown[i]}`;
    });
  };
}

// # widget
function mountLayouts(el, data, opts) {
  const run = decode(data);
  const rate = step => (step ? 2 : 1);
  const stops = () => range(max(1, front.length));
  const state = { t: 0, speed: 1, playing: false, stops, wait: () => false, rate };
  let [left, front] = [[], []];
  let picked = null;
  let held = false;
  let stage, shown, said;
  const ui = shell(el, data, state, { build, draw, turn });
  const { root, field, caption } = ui;
  ui.source.textContent = "modelled";
  const foot = footer(root, 5);
  const memory = band(root, "Memory", Object.values(HELD));
  const spent = band(root, "A step", Object.entries(SPENT));
  const chosen = {};
  const filters = { tp: ["tp", String], pp: ["pp", String], zero: ["ZeRO", String], how: ["recompute", x => HOW[x]] };
  for (const rare of ["cp", "ep"]) if (data.columns[rare]) filters[rare] = [rare, String];
  for (const [key, [name, word]] of Object.entries(filters)) {
    const values = [...new Set(run.all.map(d => d[key]))].sort((a, b) => a - b);
    choice(ui.more, name, name, [["", "any"], ...values.map(value => [value, word(value)])], "", value => {
      chosen[key] = value;
      filter();
    });
  }
  let fitting = run.fitting > 0;
  const fits = pill(ui.more, "only what fits", "Only layouts that fit", () => {
    fitting = !fitting;
    filter();
  });

  /** What is left, and its front; from the start. */
  function filter() {
    const asked = d => Object.keys(chosen).every(key => chosen[key] === "" || d[key] === +chosen[key]);
    left = run.all.filter(d => (!fitting || d.fits) && asked(d));
    front = frontOf(left);
    fits.classList.toggle("on", fitting);
    fits.ariaPressed = fitting;
    ui.control.halt();
    state.t = 0;
    picked = said = null;
    held = false;
    ui.scrub.build(
      range(max(1, front.length)),
      front.map(() => "0"),
    );
    ui.rebuild();
  }
  function build() {
    field.replaceChildren();
    const name = `${data.title}: ${run.all.length} of ${run.total} layouts, memory against time`;
    stage = stageOf(field, run, ui.width || 320, name, left.length ? left : run.all);
    stage.show(left, front);
    const size = d => nameOf(d).length + 9 * !d.fits;
    const longest = run.all.reduce((a, b) => (size(a) >= size(b) ? a : b));
    reserve(caption, [tell(longest), tell(null)]);
    said = null;
  }
  function tell(d) {
    if (!d) return [["No layout is left.", " Choose another tp, pp, ZeRO stage or recomputation."]];
    const first = front[0] ?? d;
    const less = first.memory - d.memory;
    const longer = `${(100 * (d.step / first.step - 1)).toFixed(1)}\u00a0% longer than the fastest`;
    const other = `${longer}, ${gb(abs(less))} ${less < 0 ? "more" : "less"}`;
    const beside = d === first ? `the fastest of ${left.length} shown` : other;
    const fit = d.fits ? "" : " Does not fit.";
    return [[nameOf(d), `: ${time(d.step)}, ${gb(d.memory)}; ${beside}.${fit}`]];
  }
  function draw() {
    if (!stage) return;
    const { t, playing } = state;
    const last = max(0, front.length - 1);
    const [k, now] = [clamp(ceil(t - EPS), last), clamp(floor(t + EPS), last)];
    // Moving along the front drops any layout that was picked.
    if (shown !== t) [picked, held] = [null, false];
    shown = t;
    const d = picked ?? front[now];
    stage.ring(picked ?? front[max(0, k - 1)], picked ?? front[k], k ? clamp(t - k + 1) : 0);
    caption.setAttribute("aria-live", playing ? "off" : "polite");
    if (said !== (d ?? "none")) {
      said = d ?? "none";
      write(caption, tell(d));
      numbers(d);
    }
    ui.scrub.set(t, now, plain(tell(front[now])), now - 1);
    ui.control.paint();
    const about = { left: left.length, layout: d ? nameOf(d) : "", index: d?.i ?? "" };
    Object.assign(root.dataset, { step: now, steps: last, playing, ...about });
    opts.onChange?.({ step: now, playing });
  }
  function numbers(d) {
    const of = (text, x) => (d ? text(x(d)) : "–");
    const over = d ? d.memory - run.usable : 0;
    foot([
      [of(time, d => d.step), "a step"],
      [of(share, d => d.mfu), "of the peak (MFU)"],
      [of(gb, d => d.memory), `of ${gb(run.usable)} usable`],
      [String(left.length), `points of ${run.all.length} shown`],
      [run.fitting.toLocaleString("en"), `of ${run.total.toLocaleString("en")} layouts fit`],
    ]);
    const parts = Object.keys(HELD).map(key => d?.[key] ?? 0);
    const room = !d ? "–" : over > 0 ? `${gb(over)} too much` : `${gb(-over)} free`;
    memory(max(run.usable, d?.memory ?? 0), parts, parts.map(gb), room);
    const times = Object.keys(SPENT).map((_, i) => d?.parts[i] ?? 0);
    spent(
      1000,
      times,
      times.map(share),
      of(time, d => d.step),
    );
  }
  /** The point under a pointer; one that was touched stays. */
  function pick(e, keep) {
    if (state.playing || (held && !keep)) return;
    const box = field.getBoundingClientRect();
    const near = stage.nearest(e.clientX - box.left, e.clientY - box.top, left);
    held = keep && !!near;
    if (near === picked) return;
    picked = near;
    draw();
  }
  /** To the next slower, or the next faster. */
  function turn(by) {
    if (!left.length) return;
    const from = picked ?? front[clamp(floor(state.t + EPS), front.length - 1)];
    picked = left[clamp(left.indexOf(from) + by, left.length - 1)];
    held = true;
    ui.control.halt();
    draw();
  }
  field.onpointermove = e => e.pointerType === "mouse" && pick(e, false);
  field.onpointerdown = e => pick(e, true);
  field.onpointerleave = () => {
    if (held || !picked) return;
    picked = null;
    draw();
  };
  filter();
  return { ...ui, state };
}

define("layouts", () => mountLayouts);

export { band, frontOf, nameOf, time };
