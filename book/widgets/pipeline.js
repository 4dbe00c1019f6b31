/* Lockstep's pipeline player: what every rank runs and keeps, and what travels. pipeline_run.py says what the data
   mean. Captions are made here: a run may have a thousand stops, and words for all of them would outweigh the rest. */
import {
  byTouch, range, clamp, sum, make, color, and, num, upper, short, longest, mountScene, define,
} from "./scene.js";
import { TICKS, fit, lanes, axis, mark } from "./lanes.js";

const { min, max, abs } = Math;
const NEAR = 0.01;
const RESULT = { F: "output", B: "gradient", I: "gradient" };
const KINDS = { F: "forward", B: "backward", I: "input gradient", W: "weight gradient" };
const near = (a, b) => abs(a - b) < NEAR;
const due = (a, t) => a < t + NEAR;
const named = list => `Rank${list.length > 1 ? "s" : ""} ${and(list)}`;
const apart = times => times.sort((a, b) => a - b).filter((t, i, all) => !i || !near(t, all[i - 1]));

// # data: an action { r, s, kind, m } runs from a to z; its result leaves at out and is there at there
function decode(raw) {
  const per = TICKS / raw.ticks;
  const ranks = raw.actions.map((own, r) => {
    return own.map(([s, kind, m, a, z, out = z, there = out]) => {
      return { r, s, kind, m, a: a * per, z: z * per, out: out * per, there: there * per };
    });
  });
  return planned({ ...raw, ranks });
}

/** What follows from the actions. */
function planned(run) {
  const { ranks, stages } = run;
  const home = [];
  const acts = ranks.flat();
  const most = ranks.map(own => own.map(x => kept(own, x.z).length));
  const peak = most.map(list => max(0, ...list));
  stages.forEach((list, r) => list.forEach(s => (home[s] = r)));
  for (const x of acts) x.to = RESULT[x.kind] ? (home[x.s + (x.kind === "F" ? 1 : -1)] ?? x.r) : x.r;
  return {
    ...{ ...run, acts, peak, most },
    full: most.map((list, r) => ranks[r][list.indexOf(peak[r])]?.z),
    stops: apart([0, TICKS, ...acts.flatMap(x => [x.a, x.z])]),
    several: stages.some(list => list.length > 1),
    at: t => short((t / TICKS) * run.step_s),
  };
}

/** The forwards of a rank that wait for their backward. */
function kept(own, t) {
  const list = [];
  for (const x of own) {
    if (!due(x.z, t)) break;
    if (x.kind === "F") list.push(x);
    else if (x.kind !== "I")
      list.splice(
        list.findIndex(f => f.s === x.s && f.m === x.m),
        1,
      );
  }
  return list;
}

const idle = (own, t) => t - sum(own, x => max(0, min(t, x.z) - x.a) * (x.a < t));

function write(parent, x, y, text, anchor = "start", look = "tiny") {
  return make("text.lk-" + look, parent, { x, y, "text-anchor": anchor }, text);
}

// # stage: for each rank a lane of its actions, and a strip of what it keeps
function plan({ n, step_s }, W, total_s, tight) {
  const small = tight || n > 4;
  const left = W < 560 ? 72 : tight ? 108 : 84; // a tally of a race may be "11/11"
  const [lane, strip, gap] = tight ? [16, 0, 4] : small ? [20, 12, 13] : [30, 14, 22];
  const each = lane + strip + gap;
  const y = 6 + n * each;
  const perTick = ((W - left - 2) * step_s) / total_s / TICKS;
  return { W, H: y + 20, left, small, tight, y, lane, strip, top: r => 10 + r * each, perTick };
}

function rowsOf({ ranks, stages, several }, { top, lane }) {
  return ranks.map((own, r) => {
    const blocks = own.map(({ a, z, kind, m, s }) => {
      const texts = [several ? `${kind}${m} of ${s}` : kind + m, kind + m, "" + m];
      const marks = stages[r].indexOf(s);
      return { a, b: z, c: `var(--k${kind})`, key: m, look: "k" + kind, marks, pad: 3, lines: [texts] };
    });
    return { y: top(r), h: lane, blocks };
  });
}

/** Returns what paints a moment, and what marks a micro-batch. */
function stageOf(parent, run, W, total_s, name, tight, picked) {
  const set = plan(run, W, total_s, tight);
  const { left, lane, top } = set;
  const ui = lanes(parent, { ...set, name, rows: rowsOf(run, set) });
  const { rest } = ui;
  axis(ui, set, run.step_s, total_s);
  const chosen = { x: left - 2, y: top(picked) - 2, width: W - left + 2, height: lane + 4, rx: 5 };
  if (picked >= 0) make("rect.lk-pick", rest, chosen);
  const trail = make("path.lk-trail", rest);
  const strips = run.ranks.map((_, r) => drawRank(rest, run, r, set));
  const travel = tight ? () => {} : chips(ui, run, set);
  const below = set.y + 15;
  const now = tight ? write(rest, left - 8, below, "in flight", "end") : write(rest, 0, below, "", "start", "rank");
  const paint = t => {
    ui.set(t);
    if (!tight) now.textContent = run.at(t);
    for (const paintStrip of strips) paintStrip(t);
    travel(t);
  };
  const middle = x => top(x.r) + lane / 2;
  const follow = m => {
    mark(parent, m);
    const own = run.acts.filter(x => x.m === m && x.kind !== "W").sort((x, y) => x.a - y.a);
    const line = (x, i) => `M${ui.x(own[i].z)} ${middle(own[i])}L${ui.x(x.a)} ${middle(x)}`;
    trail.setAttribute("d", own.slice(1).map(line).join(""));
  };
  return { paint, mark: follow };
}

/** A rank's name, and its strip or, where it is tight, a number; returns what paints it. */
function drawRank(rest, run, r, set) {
  const { left, top, lane, small, tight, W } = set;
  const who = run.who[r];
  const list = run.stages[r].join(", ");
  const of = fit([`stage${run.stages[r].length > 1 ? "s" : ""} ${list}`, list], left - 12);
  const y = top(r) + lane / 2;
  make("circle", rest, { cx: 5, cy: y - (small ? 0 : 6), r: 4, fill: color(who) });
  write(rest, 14, y + (small ? 4.5 : -1.5), (tight && W < 560 ? "" : "rank ") + who, "start", "rank");
  if (!small) write(rest, 14, y + 12, of);
  if (tight) {
    const tally = write(rest, left - 8, y + 4, "", "end");
    const soFar = t => max(0, ...run.most[r].filter((_, i) => due(run.ranks[r][i].z, t))); // a reader guesses first
    return t => (tally.textContent = `${kept(run.ranks[r], t).length}/${soFar(t)}`);
  }
  write(rest, 14, top(r) + lane + 6 + set.strip / 2 + (small ? 1 : 4), small ? of : "holds");
  return stripOf(rest, run, r, set);
}

/** A box for each forward that is kept. */
function stripOf(parent, { ranks, peak, several, at, who }, r, { W, left, top, lane, strip, perTick }) {
  const y = top(r) + lane + 6;
  const room = min(W - left - 2, TICKS * perTick);
  const step = min(24, (0.5 * room) / max(...peak, 1));
  const wide = step >= 16;
  const boxes = range(peak[r], i => {
    const g = make("g", parent, { style: `--c:${color(who[r])}` });
    const box = { x: left + i * step, y, width: max(1.5, step - 3), height: strip, rx: wide ? 3 : 1 };
    make("rect.lk-keep", g, box);
    return [g, wide && write(g, left + i * step + (step - 3) / 2, y + strip / 2 + 4, "", "middle")];
  });
  const from = left + peak[r] * step + 4;
  const words = write(parent, from, y + strip / 2 + 4);
  const lost = write(parent, left + room, y + strip / 2 + 4, "", "end");
  let last;
  return t => {
    const held = kept(ranks[r], t);
    const k = held.length;
    const gone = "idle " + at(idle(ranks[r], t));
    lost.textContent = gone;
    const now = held.map(x => x.m) + gone.length;
    if (last === now) return;
    last = now;
    boxes.forEach(([g, text], i) => {
      g.setAttribute("class", i < k ? "in" : "");
      if (text) text.textContent = held[i]?.m ?? "";
    });
    const batches = `activations of ${num(k, "micro-batch").replace("hs", "hes")}`;
    const texts = [several ? num(k, "forward") + " kept" : batches, k + " kept"];
    words.textContent = fit(texts, left + room - from - 6.3 * gone.length - 2) ?? "";
  };
}

/** Results on their way. */
function chips(ui, { acts }, { top, lane, W, left }) {
  const pool = [];
  const size = { width: W, height: ui.rest.getAttribute("height") };
  const layer = make("svg.lk-move lk-chips", ui.rest.parentNode, { ...size, "aria-hidden": true });
  const still = matchMedia("(prefers-reduced-motion: reduce)");
  const middle = r => top(r) + lane / 2;
  const moves = acts.filter(x => x.to !== x.r);
  const hop = 0.6 * min(...acts.map(x => x.z - x.a).filter(d => d > 0));
  const under = (t, { out, there }) => due(out, t) && t < max(there, out + hop) - NEAR;
  const add = () => {
    const g = make("g.lk-chip", layer);
    make("rect", g, { x: -11, y: -8, width: 22, height: 16, rx: 8 });
    pool.push([g, write(g, 0, 4, "", "middle")]);
  };
  return t => {
    const flying = moves.filter(move => under(t, move));
    while (pool.length < flying.length) add();
    pool.forEach(([g, text], i) => {
      g.setAttribute("class", "lk-chip" + (flying[i] ? "" : " off"));
      if (!flying[i]) return;
      const { r, m, to, out, there } = flying[i];
      const p = clamp((t - out) / max(there - out, hop));
      const done = still.matches ? 0.5 : 0.3 + 0.7 * p * p * (3 - 2 * p);
      const x = clamp(ui.x(t) - left, W - left - 12) + left;
      g.setAttribute("transform", `translate(${x} ${middle(r) + (middle(to) - middle(r)) * done})`);
      text.textContent = m + (to > r ? "↓" : "↑");
    });
  };
}

// # words
/** A stop: [text, words to stress], [, text]. */
function tell(run, t) {
  const { n, acts, at, ends } = run;
  const first = acts.filter(x => near(x.a, t) && x.z - x.a > NEAR);
  const begins = Object.keys(KINDS).map(kind =>
    begun(
      run,
      first.filter(x => x.kind === kind),
    ),
  );
  const says = begins.filter(Boolean).join(" ");
  if (due(TICKS, t)) {
    if (ends) return ["The order ends here and is not complete. ", ends.map(upper).join(". ") + "."];
    return ["Every micro-batch has gone forward and back on every stage. ", `Done after ${at(t)}.`];
  }
  if (t < NEAR) {
    const others = n > 2 ? "Every other rank" : "The other rank";
    return [says, n > 1 ? ` ${others} waits for what comes from there.` : ""];
  }
  const told = standing(run, t);
  const rest = told.slice(1).map(text => " " + text);
  return [says + (says && told.length ? " " : ""), told[0] ?? (says ? "" : `After ${at(t)}.`), rest.join("")];
}

/** Among ranks that end an action: which hold the most, which wait, which are done. */
function standing(run, t) {
  const { ranks, full, ends, who } = run;
  const [peaks, waits, over] = [[], [], []];
  ranks.forEach((own, r) => {
    if (!own.some(x => near(x.z, t))) return;
    const next = own.find(x => x.z > t + NEAR);
    const k = kept(own, t).length;
    const more = own.some(x => x.a > t && x.kind === "F");
    const freed = next && next.kind !== "F" && more;
    const why = freed ? ": it may not start the next forward until a backward has freed one." : ".";
    const what = run.several ? "forwards" : "micro-batches";
    if (k > 1 && near(full[r], t)) peaks.push(`Rank ${who[r]} holds ${k} ${what}, the most it ever will${why}`);
    if (!next) over.push(who[r]);
    else if (next.a > t + NEAR) waits.push([who[r], `Rank ${who[r]} waits: ${missing(run, next, t)}.`]);
  });
  const [wait, ...more] = waits;
  const too = more.length && `${named(more.map(([r]) => r))} wait${more.length > 1 ? "" : "s"} too.`;
  const end = ends ? "at the end of its order" : "done";
  const done = over.length && `${named(over)} ${over.length > 1 ? "are" : "is"} ${end}.`;
  return [peaks[0], wait?.[1], too, done].filter(Boolean);
}

/** What actions of one kind begin. */
function begun({ several, who }, list) {
  if (!list.length) return "";
  const kind = KINDS[list[0].kind];
  const batches = list.map(x => x.m);
  if (list.length === 1) {
    const [{ r, m, s }] = list;
    return `Rank ${who[r]} starts the ${kind} of micro-batch ${m}${several ? ` on stage ${s}` : ""}.`;
  }
  const of = new Set(batches).size > 1 ? "micro-batches " + and(batches) : "micro-batch " + batches[0];
  return `${named(list.map(x => who[x.r]))} start ${kind}s of ${of}.`;
}

/** What an action waits for. */
function missing({ acts }, next, t) {
  const forward = next.kind === "F";
  const from = next.s + (forward ? -1 : 1);
  const what = forward ? "output" : "gradient";
  const giver = acts.find(x => x.s === from && x.m === next.m && RESULT[x.kind] === what);
  const where = giver && due(giver.z, t) ? "is on its way from" : "has not come from";
  return `the ${what} of micro-batch ${next.m} ${where} stage ${from}`;
}

/** The path of a micro-batch. */
function follow({ acts, at }, m) {
  const own = acts.filter(x => x.m === m);
  const on = kinds => own.filter(x => kinds.includes(x.kind));
  const first = list => at(min(...list.map(x => x.a)));
  const last = list => at(max(...list.map(x => x.z)));
  const way = list => (list.length ? `${first(list)} to ${last(list)}` : "never");
  const times = on("BW").map(b => [b.z - own.find(f => f.s === b.s).z, b.s]);
  const [longestKept] = times.sort((a, b) => b[0] - a[0]);
  const where = longestKept ? `; kept longest by stage ${longestKept[1]}, for ${at(longestKept[0])}` : "";
  return `: forward ${way(on("F"))}, backward ${way(on("BI"))}${where}`;
}

/** What is in flight, counted in whole ranks' activations. */
function tellRace(names, { runs, total_s }, t) {
  const [left, done] = [[], []];
  const now = short((t / TICKS) * total_s);
  runs.forEach(({ step_s, ranks, stages }, i) => {
    const end = (step_s / total_s) * TICKS;
    const most = () => max(...ranks.map((own, r) => kept(own, (t / end) * TICKS).length / stages[r].length));
    if (near(end, t)) done.push(names[i]);
    else if (t < end) left.push(`${names[i]} has ${most()} in flight`);
  });
  const before = left.length ? `After ${now}, on the fullest rank: ${left.join(", ")}. ` : "";
  const over = done.length ? `${and(done)} ${done.length > 1 ? "are" : "is"} done after ${now}.` : "";
  return [t < NEAR ? "All begin together." : before, over];
}

/** What the blocks' colours and lines mean. */
function legend(row, runs) {
  const deep = max(...runs.flatMap(run => run.stages.map(list => list.length)));
  const there = Object.keys(KINDS).filter(kind => runs.some(run => run.acts.some(x => x.kind === kind)));
  const entries = there.map(kind => [kind, kind, KINDS[kind]]);
  if (deep > 1) entries.push(["F1", "F", deep > 2 ? "each line: a further stage" : "a line: a rank's second stage"]);
  const spans = [...entries, ["idle", "&nbsp;", "idle"]].map(([look, mark, text]) => {
    return `<span><i class="k${look}" style="--c:var(--k${look})">${mark}</i>${text}</span>`;
  });
  row.innerHTML = spans.join("");
}

// # widget: what is played is one run, or all of a race
function together(runs) {
  const total_s = max(...runs.map(run => run.step_s));
  const times = apart(runs.flatMap(run => run.stops.map(t => (t * run.step_s) / total_s)));
  times[times.length - 1] = TICKS;
  const source = [...new Set(runs.map(run => run.source))].join(" / ");
  return { runs, total_s, times, source, figures: runs[0].figures };
}

const own = (run, t, total_s) => min(TICKS, (t * total_s) / run.step_s);
/** Sentences of a caption [text, stress, text]. */
const sentences = ([text, stress, after = ""]) => [
  ["", text],
  [stress, after],
];
const say = ({ run, data }, t) => {
  return sentences(data.view === "race" ? tellRace(data.axes[0].values, run, t) : tell(run.runs[0], t));
};

const player = {
  clocked: true,
  near: NEAR,
  start(view) {
    view.key = make("div.lk-key lk-small");
    view.field.after(view.key);
    view.told = make("p.lk-told lk-small", view.root);
  },
  below(view) {
    const { field } = view;
    field.onpointerover = e => {
      const m = e.target.closest("[data-b]")?.dataset.b;
      if (m && +m !== view.picked) show(view, +m);
    };
    field.onpointerleave = e => view.picked !== null && e.pointerType !== "touch" && show(view, null);
  },
  decode: raw => together([decode(raw)]),
  stage(view, W) {
    const { run, data, field } = view;
    const race = data.view === "race";
    legend(view.key, run.runs);
    view.stages = run.runs.map((one, i) => {
      const head = race && make("div.lk-head lk-run", field);
      if (race) {
        make("b", head, {}, data.axes[0].values[i]);
      }
      const brief = race && make("span", head);
      const stage = stageOf(field, one, W, run.total_s, data.title, race);
      return { ...stage, sayAtEnd: over => race && (brief.textContent = over ? one.brief : "…") };
    });
    show(view, view.picked);
    return t => {
      view.stages.forEach(({ paint, sayAtEnd }, i) => {
        const now = own(run.runs[i], t, run.total_s);
        paint(now);
        sayAtEnd(now >= TICKS - NEAR); // a reader guesses first
      });
    };
  },
  tell: (view, k) => say(view, view.run.times[k]),
  captions: view =>
    longest(
      view.run.times.map(t => say(view, t)),
      4,
    ),
  words: ({ run, state }) => `${short((state.t / TICKS) * run.total_s)} of ${short(run.total_s)}`,
  parts: ({ times }) => [[0, TICKS], "0", { snap: false, steps: times.length - 1 }],
  rate: step => max(TICKS / 14, (step || 0) / 0.7),
  figures: ({ run }) => range(5, i => run.figures[i] ?? ["", ""]),
  /** The clock continues; a run at its end stays at the end. */
  resume: ({ run }, { run: old, t, over }) => (over ? TICKS : min(TICKS, (t * old.total_s) / run.total_s)),
  turn(view, by) {
    const last = max(...view.run.runs.map(run => run.batches)) - 1;
    show(view, clamp((view.picked ?? (by > 0 ? -1 : 1)) + by, last));
  },
};

const { figures: _, ...common } = player;
const race = { ...common, all: true, decode: runs => together(runs.map(decode)) };

/** Show the micro-batch that is pointed at, or that the keys chose. */
function show(view, m) {
  view.picked = m;
  for (const { mark } of view.stages) mark(m);
  const hint = `${byTouch() ? "Tap a block" : "Point at a block, or press ↑ or ↓,"} to follow a micro-batch.`;
  const way = m === null || view.data.view === "race" ? "" : follow(view.run.runs[0], m);
  view.told.replaceChildren(...(m === null ? [hint] : [make("b", null, {}, "Micro-batch " + m), way]));
  view.field.classList.toggle("lk-follows", m !== null);
  view.root.dataset.batch = m ?? "";
}

define("pipeline", data => (el, _, opts) => mountScene(el, data, opts, data.view === "race" ? race : player));

export { planned, stageOf };
