/* Lockstep's chart of layouts: memory against time, a front to walk along, and where one layout's bytes and seconds go.
   layouts_data.py says what the data mean; all of them are formulas' values. */
(() => {
const { EPS, range, clamp, make, canvas, pill, footer, shell, define } = globalThis.lockstepControls;
const { min, max, ceil, floor, log, hypot } = Math;
const HOW = { "-1": "no", 0: "selective", 1: "full" }, NEAR = 26; // px from a point
const HELD = [["state", "state", 0], ["kept", "activations", 1], ["moment", "for a moment", 3]];
const SPENT = [["products", 0], ["passes over memory", 2], ["tp", 1], ["pp", 3], ["bubble", 8], ["dp", 7], ["update", 10]];

// # data: a layout is an object; they come fastest first
function decode({ columns, parts, ...rest }) {
  const names = Object.keys(columns), all = range(columns.pp.length, i => ({ i, ...Object.fromEntries(names.map(name => [name, columns[name][i]])), parts: parts.map(part => part[i]) }));
  for (const d of all) d.memory = d.state + d.kept + d.moment;
  return { ...rest, all };
}

const gb = x => `${(x / 100).toFixed(1)}\u00a0GB`, time = s => (s >= 999.5 ? `${Math.round(s)}\u00a0s` : s >= 1 ? `${s.toPrecision(3)}\u00a0s` : `${(1000 * s).toPrecision(3)}\u00a0ms`), share = x => `${(x / 10).toFixed(1)}\u00a0%`;
const nameOf = d => [`pp ${d.pp} × dp ${d.dp} × tp ${d.tp}`, `micro-batch ${d.b}`, d.v > 1 && `${d.v} stages a rank`, d.zero && `ZeRO-${d.zero}`, d.sp && "sequence parallel", `${HOW[d.how]} recompute`].filter(Boolean).join(", ");

function frontOf(some) { // of layouts, fastest first: those that no other beats in both
  let least = Infinity;
  return some.filter(d => d.memory < least && ((least = d.memory), true));
}

// # stage
function ticks(low, high, px, gap) { // as many of 1, 2, 5 times a power of ten as stand apart
  const tens = range(14, k => 10 ** (k - 4));
  const sets = [[1, 2, 5], [1, 3], [1]].map(set => tens.flatMap(ten => set.map(x => x * ten)).filter(x => x >= low && x <= high));
  return sets.find(set => set.every((x, i) => !i || log(x / set[i - 1]) / log(high / low) * px >= gap)) ?? [];
}

function stageOf(parent, run, W, name) {
  const H = W < 560 ? 290 : 340, left = 54, right = W - 12, top = 24, bottom = H - 34, times = run.all.map(d => d.step), sizes = [...run.all.map(d => d.memory), run.usable];
  const [t0, t1, m0, m1] = [min(...times) / 1.12, max(...times) * 1.12, min(...sizes) / 1.15, max(...sizes) * 1.15];
  const x = t => left + log(t / t0) / log(t1 / t0) * (right - left), y = m => bottom - log(m / m0) / log(m1 / m0) * (bottom - top), place = d => [x(d.step), y(d.memory)];
  const { rest, move } = canvas(parent, W, H, { "aria-label": name });
  rest.classList.add("lk-plot");
  make("path.lk-edge", rest, { d: `M${left} ${top}V${bottom}H${right}`, fill: "none" });
  for (const t of ticks(t0, t1, right - left, 52)) make("text", rest, { x: min(x(t), right - 14), y: bottom + 15, "text-anchor": "middle" }, t < 1 ? `${+(1000 * t).toPrecision(2)} ms` : `${t} s`);
  for (const m of ticks(m0 / 100, m1 / 100, bottom - top, 26)) make("text", rest, { x: left - 6, y: y(100 * m) + 4, "text-anchor": "end" }, `${m} GB`);
  make("text", rest, { x: left - 6, y: 11 }, "memory of a GPU");
  make("text", rest, { x: right, y: H - 4, "text-anchor": "end" }, "time of a step");
  make("path.lk-most", rest, { d: `M${left} ${y(run.usable)}H${right}` });
  const dots = run.all.map(d => make("circle", rest, { cx: x(d.step).toFixed(1), cy: y(d.memory).toFixed(1), r: 2.6, class: "lk-point" })), line = make("path.lk-walk", rest, { d: "" });
  make("text", rest, { x: right, y: y(run.usable) - 5, "text-anchor": "end", style: "paint-order:stroke;stroke:var(--bg);stroke-width:4px" }, `usable: ${gb(run.usable)}`);
  const ring = make("g.lk-spot", move);
  make("circle", ring, { r: 8 });
  return {
    show(left, front) {
      const here = new Set(left);
      run.all.forEach((d, i) => dots[i].setAttribute("class", `lk-point${d.fits ? "" : " toobig"}${here.has(d) ? "" : " gone"}`));
      line.setAttribute("d", front.map((d, i) => "ML"[+(i > 0)] + place(d).map(at => at.toFixed(1)).join(" ")).join(""));
    },
    ring(a, b, f) { // between two layouts
      ring.style.display = a ? "" : "none";
      if (a) { const [from, to] = [place(a), place(b)]; ring.setAttribute("transform", `translate(${range(2, i => (from[i] + (to[i] - from[i]) * f).toFixed(1)).join(",")})`); }
    },
    nearest(px, py, some) {
      const far = d => { const [dx, dy] = place(d); return hypot(dx - px, dy - py); }, best = some.reduce((a, b) => (a && far(a) <= far(b) ? a : b), null);
      return best && far(best) <= NEAR ? best : null;
    } };
}

// # where bytes and seconds go: a band of colours, and its words
function band(parent, title, keys) {
  const box = make("div.lk-costs lk-small", parent), head = make("b", box), line = make("div.lk-band", box, { "aria-hidden": true }), words = make("div.lk-keys", box);
  const paint = ([, hue]) => ({ style: `background:var(--r${hue})` }), bars = keys.map(key => make("i", line, paint(key)));
  const texts = keys.map(key => { const one = make("span", words); make("i", one, paint(key)); return make("em", one, { style: "font-style:normal" }); });
  return (whole, values, texts2, text) => {
    head.textContent = `${title}: ${text}`;
    values.forEach((value, i) => { bars[i].style.width = `${100 * value / whole}%`; texts[i].textContent = `${keys[i][0]} ${texts2[i]}`; });
  };
}

// # widget
function mountLayouts(el, data, opts) {
  const run = decode(data), state = { t: 0, speed: 1, playing: false, stops: () => range(max(1, front.length)), wait: () => false, rate: step => (step ? 2 : 1) };
  let left = [], front = [], stage, picked = null, held = false, shown, said;
  const ui = shell(el, data, state, { build, draw, turn }), { root, field, caption } = ui;
  ui.source.textContent = "modelled";
  const foot = footer(root, 5), memory = band(root, "Memory", HELD.map(([, name, hue]) => [name, hue])), spent = band(root, "A step", SPENT);
  const chosen = {};
  for (const [key, name, word] of [["tp", "tp", String], ["pp", "pp", String], ["zero", "ZeRO", String], ["how", "recompute", x => HOW[x]]]) {
    const select = make("select", make("label.lk-pill", ui.more, {}, name + " "), { "aria-label": name });
    make("option", select, { value: "" }, "any");
    for (const value of [...new Set(run.all.map(d => d[key]))].sort((a, b) => a - b)) make("option", select, { value }, word(value));
    select.onchange = () => { chosen[key] = select.value; filter(); };
  }
  let fitting = run.fitting > 0;
  const fits = pill(ui.more, "only what fits", "Only layouts that fit", () => { fitting = !fitting; filter(); });

  function filter() { // what is left, and its front; from the start
    left = run.all.filter(d => (!fitting || d.fits) && Object.keys(chosen).every(key => chosen[key] === "" || d[key] === +chosen[key]));
    front = frontOf(left);
    fits.classList.toggle("on", fitting);
    fits.ariaPressed = fitting;
    ui.control.halt();
    state.t = 0;
    picked = said = null;
    held = false;
    ui.scrub.build(range(max(1, front.length)), front.map(() => 0).join(""));
    ui.rebuild();
  }
  function build() {
    field.replaceChildren();
    stage = stageOf(field, run, ui.width || 320, `${data.title}: ${run.all.length} of ${run.total} layouts, memory against time`);
    stage.show(left, front);
    caption.style.minHeight = ""; // room for the longest caption, so that nothing below it moves
    const longest = run.all.reduce((a, b) => (nameOf(a).length + 9 * !a.fits >= nameOf(b).length + 9 * !b.fits ? a : b));
    caption.style.minHeight = max(...[longest, null].map(d => { write(d); return caption.clientHeight; })) + "px";
    said = null;
  }
  function tell(d) { // [stress, the rest]
    if (!d) return ["No layout is left.", " Choose another tp, pp, ZeRO stage or recomputation."];
    const first = front[0] ?? d, more = d.step / first.step - 1, less = first.memory - d.memory;
    const beside = d === first ? `the fastest of ${left.length} shown` : `${(100 * more).toFixed(1)}\u00a0% longer than the fastest, ${gb(Math.abs(less))} ${less < 0 ? "more" : "less"}`;
    return [nameOf(d), `: ${time(d.step)}, ${gb(d.memory)}; ${beside}.${d.fits ? "" : " Does not fit."}`];
  }
  function write(d) { const [stress, rest] = tell(d); caption.replaceChildren(make("b", null, {}, stress), rest); }
  function draw() {
    if (!stage) return;
    const { t, playing } = state, last = max(0, front.length - 1), k = clamp(ceil(t - EPS), last), now = clamp(floor(t + EPS), last);
    if (shown !== (shown = t)) { picked = null; held = false; } // who moves along the front looks there
    const d = picked ?? front[now];
    stage.ring(picked ?? front[max(0, k - 1)], picked ?? front[k], k ? clamp(t - k + 1) : 0);
    caption.setAttribute("aria-live", playing ? "off" : "polite");
    if (said !== (said = d ?? "none")) { write(d); numbers(d); }
    ui.scrub.set(t, now, tell(front[now]).join(""), now - 1);
    ui.control.paint();
    Object.assign(root.dataset, { step: now, steps: last, playing, left: left.length, layout: d ? nameOf(d) : "", index: d?.i ?? "" });
    opts.onChange?.({ step: now, playing });
  }
  function numbers(d) {
    const over = d ? d.memory - run.usable : 0, none = [0, 0, 0];
    foot([[d ? time(d.step) : "–", "a step"], [d ? share(d.mfu) : "–", "of the peak (MFU)"], [d ? gb(d.memory) : "–", `of ${gb(run.usable)} usable`], [String(left.length), `points of ${run.all.length} shown`], [run.fitting.toLocaleString("en"), `of ${run.total.toLocaleString("en")} layouts fit`]]);
    memory(max(run.usable, d?.memory ?? 0), d ? HELD.map(([key]) => d[key]) : none, d ? HELD.map(([key]) => gb(d[key])) : none.map(gb), !d ? "–" : over > 0 ? `${gb(over)} too much` : `${gb(-over)} free`);
    spent(1000, d ? d.parts : SPENT.map(() => 0), SPENT.map((_, i) => share(d?.parts[i] ?? 0)), d ? time(d.step) : "–");
  }
  function pick(e, keep) { // the point under a pointer; one that was touched stays
    if (state.playing || (held && !keep)) return;
    const box = field.getBoundingClientRect(), near = stage.nearest(e.clientX - box.left, e.clientY - box.top, left);
    held = keep && !!near;
    if (near !== picked) { picked = near; draw(); }
  }
  function turn(by) { // to the next slower, or the next faster
    if (!left.length) return;
    picked = left[clamp(left.indexOf(picked ?? front[clamp(floor(state.t + EPS), front.length - 1)]) + by, left.length - 1)];
    held = true;
    ui.control.halt();
    draw();
  }
  field.onpointermove = e => e.pointerType === "mouse" && pick(e, false);
  field.onpointerdown = e => pick(e, true);
  field.onpointerleave = () => { if (!held && picked) { picked = null; draw(); } };
  filter();
  return { ...ui, state };
}

define("layouts", () => mountLayouts);
})();
