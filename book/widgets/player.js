/* Lockstep's chunk player: draws what a trace says, and nothing else. player.py writes the data, and says in its first
   lines what they mean. */
import { EPS, and, bytes, choices, define, footer, make, num, pill, range, seconds, shell } from "./scene.js";
import { busiest, decode, drawStage, endOf, latest, retime, stageOf, tally, traffic } from "./chunks.js";

const { min, max, abs } = Math;

// # words and figures
const inN = x => x.toFixed(2) + " n";

function whose(v) {
  if (!v) return "unknown";
  const named = v.map((x, r) => x > 0 && r + (x === 1 ? "" : ` ×${+x.toFixed(2)}`));
  return and(named.filter(Boolean)) || "nobody";
}

function chunksOf(items) {
  const list = items.map(i => i.chunk).sort((a, b) => a - b);
  const [n, a, z] = [list.length, list[0], list.at(-1)];
  if (list.includes(null)) return "something unwatched";
  if (n === 1) return "chunk " + a;
  return "chunks " + (n > 2 && z - a === n - 1 ? `${a}–${z}` : and(list));
}

function figures(run, t, k) {
  const now = traffic(run, t);
  const [link, most] = busiest(now);
  const over = t >= run.end;
  const all = [
    [`${k} / ${run.S}`, run.S === 1 ? "step" : "steps"],
    [inN(now.out[max(0, run.who)]), run.who < 0 ? "sent per rank, so far" : `sent by rank ${run.who}, so far`],
    [over ? inN(run.total) : "…", "at the end" + (over ? run.formula : "")],
    [tally(run, t).join(" / "), "chunks complete"],
    [inN(most), "busiest link" + (t ? ", " + link : "")],
  ];
  return run.unseen ? [all[0], all[3]] : all; // calls do not tell who sends what
}

function linkTexts({ n, bytes: all }, { out, into }) {
  const size = x => (all ? bytes(x * all) : inN(x));
  return range(n, r => `rank ${r}: ${size(out[r])} out, ${size(into[r])} in`);
}

// # prediction
/** By turns: which chunk goes, and what a chunk will hold. */
function question(run, k) {
  const all = run.messages.filter(m => m.k === k && m.into !== null);
  const i = all[(k * 3) % all.length]?.items[0];
  if (!i) return null;
  return k % 2 === 0 && run.most === 1 && run.c > 1 ? askChunk(run, k, i) : askContents(run, k, i);
}

function askChunk(run, k, { src, dst, chunk, sent }) {
  const got = run.items.find(j => j.end === k && j.dst === src && j.into === chunk);
  const chunks = range(min(5, run.c), d => (chunk + d) % run.c).sort((a, b) => a - b);
  const passed = got && `passes on chunk ${chunk}, which it got from rank ${got.src} a step ago`;
  return {
    text: `Which chunk does rank ${src} send to rank ${dst} next?`,
    options: chunks.map(c => ["chunk " + c, c === chunk]),
    why: `rank ${src} ${passed || `sends chunk ${chunk}, with data of rank ${whose(sent)}`}.`,
  };
}

function askContents(run, k, { dst, sent, into, after, op }) {
  const before = latest(run, dst, into, run.stops[k]).v;
  const added = before?.map((x, r) => x + sent?.[r]);
  const texts = [after, added, sent, before, range(run.n, () => 1)].map(whose);
  const options = [...new Set(texts)].slice(0, 4).sort();
  const replaced = `what arrives (${whose(sent)}) takes the place of what was there.`;
  const both = `what was there (${whose(before)}) and what arrives (${whose(sent)}) make ${whose(after)}.`;
  return {
    text: `Whose data will rank ${dst}'s chunk ${into} hold after this step?`,
    options: options.map(text => [text, text === whose(after)]),
    why: op === "copy" ? replaced : both,
  };
}

function quiz(field, go) {
  const box = make("div.lk-quiz", null, { hidden: "" });
  const ask = make("p", box);
  const options = make("div.lk-options", box);
  const said = make("p", box, { role: "status" });
  let at;
  let [right, asked, keep] = [0, 0, false];
  field.before(box);
  const answer = (why, ok, k) => {
    asked++;
    right += ok;
    keep = true;
    said.className = ok ? "" : "no";
    said.textContent = `Step ${k + 1}: ${ok ? "right" : "no"}, ${why} ${right} of ${asked} right.`;
    go();
  };
  const option = (q, k, [text, ok]) => {
    const b = pill(null, text, "", () => answer(q.why, ok, k));
    b.dataset.right = ok;
    return b;
  };
  /** Empty key: under way, no question. */
  return (run, k, key, on) => {
    box.hidden = !on;
    if (key === at) return;
    at = key;
    const q = key && k < run.S && question(run, k);
    ask.textContent = q ? q.text : k < run.S ? "…" : "That was the last step.";
    options.replaceChildren(...(q ? q.options.map(one => option(q, k, one)) : []));
    if (!q || !keep) return;
    keep = false;
    options.firstChild.focus({ preventScroll: true });
  };
}

// # player
function mountPlay(el, data, opts) {
  const decoded = {};
  const stops = () => run.stops;
  const rate = () => (state.clock === "steps" ? 1.25 : pace);
  const wait = () => state.predict;
  const state = { t: 0, speed: 1, playing: false, focus: 0, predict: data.predict, stops, wait, rate };
  let run, pace, said;
  let lanes = []; // the run, and beside it the right one
  const step = () =>
    max(
      0,
      run.stops.findIndex(s => s >= state.t - 1e-9 * run.end),
    );
  const ui = shell(el, data, state, { build, draw, turn: by => pick((state.focus + by + run.n) % run.n) });
  const { root, control, more } = ui;
  const view = viewPill(ui, state);
  const ask = quiz(ui.field, control.next);
  const fault = faultLine(ui, state, () => {
    if (state.beside && state.clock === "time") timing("steps");
    if (state.beside && ui.width < 520) state.view = "matrix"; // two rings, one below the other, are two screens high
    ui.rebuild();
  });
  const pick = r => {
    state.focus = r;
    draw();
  };
  const clock = pill(more, "", "Clock", () => {
    const k = step();
    timing(state.clock === "steps" ? "time" : "steps");
    control.go(run.stops[k]);
  });
  const which = choices(more, data, choose);
  const predict = pill(more, "predict", "Choose before it moves", () => {
    state.predict = !state.predict;
    control.go(run.stops[step()]);
  });
  const foot = footer(root, 5);
  const details = make("details.lk-bytes lk-small", root);
  make("summary", details, {}, "Bytes per link");
  const list = make("ul", details);
  details.ontoggle = () => draw();

  function choose() {
    run = decoded[which()] ??= decode(data.runs[which()]);
    state.view = data.view === "auto" ? (run.n > 8 ? "matrix" : "ring") : data.view;
    state.focus = min(state.focus, run.n - 1);
    clock.hidden = !run.times;
    details.hidden = !!run.unseen;
    ui.source.textContent = run.source;
    timing(run.times ? data.clock : "steps");
    pace ??= (endOf(run, run.S) / run.S) * 1.25;
    control.halt();
    fault(run);
    state.t = run.fault && !state.predict ? run.stops[run.fault.step] : 0;
    ui.rebuild();
  }
  function timing(to) {
    clock.textContent = state.clock = to;
    if (to === "time") state.beside = false;
    retime(run, to);
    ui.scrub.build(run.stops, run.phases);
    said = null;
  }
  function build() {
    view();
    ui.field.replaceChildren();
    for (const name of ["race", "beside"]) ui.field.classList.toggle(name, !!state.beside);
    const names = ["This run", "As it should be"];
    const holders = state.beside ? names.map(name => laneOf(ui.field, name)) : [ui.field];
    lanes = holders.map((holder, i) => {
      const one = i ? rightOf(run) : run;
      return [one, stageOf(state.view, holder, one, holder.clientWidth || 320, data.title, pick)];
    });
    said = null;
  }
  function draw() {
    if (!lanes.length) return;
    const [[, stage]] = lanes;
    const { t, playing } = state;
    const k = step();
    const rests = abs(t - run.stops[k]) < EPS;
    for (const [one, its] of lanes) drawStage(its, one, min(t, one.end), state.clock, state.focus);
    foot(figures(run, t, k));
    const steps = k ? `${k} of ${run.S}` : num(run.S, "step");
    const phase = k ? run.names[run.phases[k - 1]] : "start";
    const texts = [steps, phase, state.clock === "time" ? seconds(t) : ""];
    for (const [, its] of lanes) its.count.forEach((e, i) => (e.textContent = texts[i]));
    describe(k, rests && k === run.S);
    ui.scrub.set(t, k, `step ${k} of ${run.S}`);
    ask(run, k, rests && !playing && state.predict ? `${which()},${k}` : "", state.predict);
    control.paint();
    predict.classList.toggle("on", state.predict);
    predict.setAttribute("aria-pressed", state.predict);
    const links = () => linkTexts(run, traffic(run, t)).map(text => make("li", null, {}, text));
    if (details.open) list.replaceChildren(...links());
    const shown = { view: stage.matrix ? "matrix" : "ring", ranks: run.n, clock: state.clock };
    Object.assign(root.dataset, { step: k, steps: run.S, playing, ...shown });
    opts.onChange?.({ step: k, playing });
  }
  function describe(k, done) {
    const key = `${which()},${k},${done}`;
    if (said === key) return;
    said = key;
    ui.caption.setAttribute("aria-live", state.playing && !state.predict ? "off" : "polite");
    const m = run.messages.find(m => m.k === k - 1);
    const who = m && `rank ${m.src} sends ${chunksOf(m.items)} to rank ${m.dst}`;
    const words = k ? [`Step ${k}: `, make("b", null, {}, who), run.rests[run.says[k - 1]]] : [run.begin];
    ui.caption.replaceChildren(...words);
    if (done) make(run.ok ? "span.lk-done" : "span.lk-wrong", ui.caption, {}, " " + run.verdict);
  }
  choose();
  return { ...ui, state };
}

/** The right run, step by step like the one that went wrong. */
const rightOf = run => retime((run.right ??= decode(run.fault.right)), "steps");

function laneOf(parent, name) {
  const box = make("div.lk-lane", parent);
  make("b", box, {}, name);
  return make("div", box);
}

/** The first wrong step in the title row, and the button that shows the right run beside; returns what sets them. */
function faultLine({ source }, state, rebuild) {
  const line = make("div.lk-fault", source.parentNode);
  const says = make("b.lk-wrong", line);
  const sent = make("span.lk-callline", line);
  const beside = pill(line, "Beside the right run", "Play it in lockstep with the right schedule", () => {
    state.beside = !state.beside;
    rebuild();
    paint();
  });
  const paint = () => {
    beside.classList.toggle("on", !!state.beside);
    beside.setAttribute("aria-pressed", !!state.beside);
  };
  return ({ fault }) => {
    if (!fault?.right) state.beside = false;
    line.hidden = !fault?.says;
    says.textContent = fault?.says ?? "";
    const [number, name, text] = fault?.line ?? [];
    sent.textContent = number ? `Sent by line ${number} of your cell, in ${name}: ` : "";
    if (number) make("code", sent, {}, text);
    beside.hidden = !fault?.right;
    paint();
  };
}

/** The button to the other view; returns what renames it. */
function viewPill(ui, state) {
  const b = pill(ui.more, "", "View", () => {
    state.view = b.textContent;
    ui.rebuild();
  });
  return () => (b.textContent = state.view === "ring" ? "matrix" : "ring");
}

// # race
function mountRace(el, data, opts) {
  const runs = data.runs.map(run => retime(run.items ? run : decode(run), "time"));
  const total = max(...runs.map(run => run.end));
  const stops = [...new Set(runs.flatMap(run => run.stops))].sort((a, b) => a - b);
  const first = data.view === "matrix" || runs[0].n > 6 ? "matrix" : "ring";
  const clock = { stops: () => stops, rate: () => total / 9, wait: () => false };
  const state = { t: 0, speed: 1, playing: false, view: first, ...clock };
  const ui = shell(el, data, state, { build, draw, turn() {} });
  const { root } = ui;
  const view = viewPill(ui, state);
  const lanes = runs.map((run, i) => {
    const box = make("div.lk-lane lk-small", ui.field);
    const name = data.axes[0].values[i];
    make("b", box, {}, name);
    const holder = make("div", box);
    const line = make("div.lk-tick", make("div.lk-line", box));
    return { run, name, holder, line, text: make("p", box) };
  });
  ui.field.classList.add("race");
  ui.scrub.build([0, total], "2");

  function build() {
    view();
    for (const lane of lanes) lane.holder.replaceChildren();
    for (const lane of lanes) {
      lane.stage = stageOf(state.view, lane.holder, lane.run, lane.holder.clientWidth || 200, lane.name);
    }
  }
  function draw() {
    const { t, playing } = state;
    const done = lanes.filter(l => t >= l.run.end - EPS).sort((a, b) => a.run.end - b.run.end);
    const step = stops.filter(s => s <= t).length - 1;
    lanes.forEach(drawLane);
    const ends = done.map(l => `${l.name} after ${seconds(l.run.end)}`);
    const text = done.length ? `Done: ${and(ends)}.` : "All start together. Which is done first?";
    if (ui.caption.textContent !== text) ui.caption.textContent = text;
    ui.source.textContent = `${runs[0].source} · ${seconds(t)}`;
    ui.control.paint();
    ui.scrub.set(t, 0, seconds(t));
    Object.assign(root.dataset, { step, playing, view: state.view });
    opts.onChange?.({ step, playing });
  }
  function drawLane({ run, stage, line, text }) {
    const t = min(state.t, run.end);
    const over = t > run.end - EPS;
    const [link, most] = busiest(traffic(run, Infinity));
    drawStage(stage, run, t, "time", -1);
    line.style.setProperty("--done", t / total);
    line.classList.toggle("won", over);
    // A reader guesses before the end what the busiest link carries.
    text.textContent = over ? `done after ${seconds(run.end)} · busiest link, ${link}: ${inN(most)}` : "under way";
  }
  ui.rebuild();
  return { ...ui, state };
}

define("player", data => (data.kind === "race" ? mountRace : mountPlay));

export { mountRace };
