/* Lockstep's bucket timeline: a backward pass on every rank, its buckets and their all-reduces on one clock.
   timeline.py says what the data mean; nothing is drawn that they don't say. Captions are made here: a run has a stop
   for each of its gradients, and words for all of them would outweigh the rest of its data. */
import {
  range, clamp, sum, make, and, upper, seconds, bytes, rankName, longest, mountScene, pickable, define,
} from "./scene.js";
import { TICKS, fit, lanes, axis, mark } from "./lanes.js";

const { min, max, round } = Math;
const COLOURS = 4;

function decode(raw, { names, sizes }) {
  const ranks = raw.ranks.map(({ gradients, exposed }) => {
    const grads = gradients.map(([which, b, a, z]) => ({ name: names[which], size: sizes[which], b, a, z }));
    return { grads, exposed, over: grads.at(-1)?.z ?? 0 };
  });
  const flights = raw.flights.map(({ bucket, start, end, bytes, ranks }) => {
    return { b: bucket, a: start, z: end, size: bytes, on: ranks };
  });
  const buckets = raw.buckets.map((number, b) => bucketOf(number, b, ranks, flights));
  const stops = [0, TICKS, ...ranks.flatMap(rank => rank.grads.map(g => g.z)), ...flights.flatMap(f => [f.a, f.z])];
  const { hidden_s, communication_s } = raw.overlap;
  return {
    ...{ ...raw, ranks, flights, buckets },
    times: [...new Set(stops)].sort((a, b) => a - b),
    num: buckets.filter(bucket => bucket.known).length,
    size: max(...ranks.map(rank => sum(rank.grads, g => g.size))),
    over: max(...ranks.map(rank => rank.over)),
    hidden: communication_s ? `${round((hidden_s / communication_s) * 100)} %` : "",
    at: t => seconds((t / TICKS) * raw.duration_s),
  };
}

function bucketOf(number, b, ranks, flights) {
  const grads = ranks.map(rank => rank.grads.filter(g => g.b === b));
  const own = flights.filter(f => f.b === b);
  const known = number >= 0;
  const unnamed = own.length ? ["?", "an unknown bucket"] : ["–", "no bucket"];
  const [label, name] = known ? ["" + number, "bucket " + number] : unnamed;
  const full = grads.map(list => list.at(-1)?.z);
  const sizes = grads.map(list => sum(list, g => g.size));
  const c = known ? `var(--b${number % COLOURS})` : "var(--soft)";
  return { b, known, grads, flights: own, sizes, full, label, name, c };
}

/** How many of a bucket's gradients a rank has by then, and what becomes of them. */
function stateOf({ flights, grads }, r, t) {
  const own = flights.filter(f => f.on.includes(r));
  const got = grads[r].filter(g => g.z <= t).length;
  if (got < grads[r].length) return [got, "filling"];
  if (!own.length) return [got, "not sent"];
  if (own.every(f => f.z <= t)) return [got, "averaged"];
  return [got, own.some(f => f.a <= t && t < f.z) ? "flying" : "waits"];
}

// # stage: for each rank a lane of gradients, one of all-reduces, and its buckets
function plan({ n, duration_s }, W, total_s) {
  const small = n > 4;
  const left = W >= 560 ? 84 : 66;
  const [back, drop, net, gap, box, under] = small ? [16, 6, 14, 5, 9, 11] : [30, 9, 18, 9, 14, 28];
  const each = back + drop + net + gap + box + under;
  const y = 6 + n * each;
  const at = range(n, r => {
    const top = 10 + r * each;
    return { back: { y: top, h: back }, net: { y: top + back + drop, h: net }, box: top + each - under - box };
  });
  return { W, H: y + 20, left, small, y, box, perTick: ((W - left - 2) * duration_s) / total_s / TICKS, at };
}

function rowsOf({ ranks, flights, buckets }, { at, small }, guess) {
  const block = ({ a, z, b }, ...lines) => ({ a, b: z, c: buckets[b].c, key: b, lines });
  const tails = name => name.split(".").map((_, i, all) => all.slice(i).join("."));
  const named = name => (small ? [] : tails(name).slice(0, name.includes(".") ? -1 : 1)); // "1.weight", not "weight"
  const waits = ([a, b]) => ({ a, b, c: "var(--p1)", key: -1, lines: [["exposed"]], kind: "lk-exposed" });
  return ranks.flatMap(({ grads, exposed }, r) => {
    const computed = grads.map(g => block(g, named(g.name), ["→ " + buckets[g.b].label, buckets[g.b].label]));
    const sent = flights
      .filter(f => f.on.includes(r))
      .map(f => {
        const { name, label } = buckets[f.b];
        return { ...block(f, ["all-reduce of " + name, name, label]), kind: guess ? "lk-later" : "" };
      });
    return [
      { ...at[r].back, blocks: [...computed, ...exposed.map(waits)] },
      { ...at[r].net, blocks: sent },
    ];
  });
}

function stage(view, W) {
  const { run, data, field } = view;
  const total_s = max(...data.runs.map(one => one.duration_s));
  const set = plan(run, W, total_s);
  const ui = lanes(field, { ...set, rows: rowsOf(run, set, data.guess), name: data.title });
  const { rest } = ui;
  axis(ui, set, run.duration_s, total_s);
  const boxes = set.at.flatMap(({ back, net, box }, r) => {
    rankName(rest, r, back.y + 12.5);
    const notes = [
      ["network", net.y + 13],
      ["buckets", box + set.box / 2 + 4],
      ["backward", back.y + 26],
    ];
    for (const [text, y] of notes.slice(0, set.small ? 2 : 3)) {
      make("text.lk-tiny", rest, { x: set.left - 8, y, "text-anchor": "end" }, text);
    }
    drawDrops(data.guess ? [ui.move] : [rest, ui.move], ui.x, run, r, set.at[r]);
    return drawBuckets(rest, run, r, set);
  });
  const time = make("text.lk-rank", rest, { x: 0, y: set.y + 15 });
  return t => {
    ui.set(t);
    time.textContent = run.at(t);
    for (const paint of boxes) paint(t);
  };
}

/** From where a rank's bucket is full to where it leaves. */
function drawDrops(layers, x, { flights, buckets }, r, { back, net }) {
  for (const { b, a, on } of flights) {
    const { full, c } = buckets[b];
    if (!on.includes(r) || full[r] > a || full[r] === undefined) continue;
    const d = `M${x(full[r])} ${back.y + back.h}L${x(a)} ${net.y}`;
    for (const layer of layers) make("path.lk-drop", layer, { style: "--c:" + c, d });
  }
}

/** Widths to scale, but no less than a number needs. */
function widths(sizes, room) {
  const least = min(15, room / sizes.length);
  const found = [];
  let all = sum(sizes);
  for (const i of [...sizes.keys()].sort((i, j) => sizes[i] - sizes[j])) {
    room -= found[i] = max(least, (room * sizes[i]) / all || 0);
    all -= sizes[i];
  }
  return found;
}

/** Returns what paints each. */
function drawBuckets(parent, { buckets }, r, { W, left, at, box, small }) {
  const room = widths(
    buckets.map(bucket => bucket.sizes[r]),
    W - left - 2,
  );
  let x = left;
  return buckets.map((bucket, i) => {
    const place = { transform: `translate(${x},${at[r].box})`, tabindex: r + i ? -1 : 0 };
    x += room[i];
    return drawBucket(parent, bucket, r, { place, w: max(1, room[i] - 3), box, small });
  });
}

function drawBucket(parent, bucket, r, { place, w, box, small }) {
  const { b, name, label, grads, sizes, c } = bucket;
  const all = bytes(sizes[r]);
  const pad = w > 8 ? 2 : 0;
  const perByte = (w - 2 * pad) / (sizes[r] || 1);
  const attrs = { style: "--c:" + c, role: "img", "data-b": b, "data-rank": r };
  const g = make("g", parent, { ...place, ...attrs });
  make("rect.lk-hit", g, { x: -1, y: -4, width: w + 2, height: box + (small ? 8 : 20) });
  const inner = make("g", g);
  const text = small ? null : make("text", g, { x: 2, y: box + 12 });
  make("rect.lk-hull", inner, { width: w, height: box, rx: min(4, w / 3) });
  let from = pad;
  const fills = grads[r].map(({ size }) => {
    const width = size * perByte;
    const inside = { x: from, y: pad, width: max(0.5, width - (width > 3)), height: box - 2 * pad };
    from += width;
    return make("rect", inner, inside);
  });
  let last;
  return t => {
    const [got, state] = stateOf(bucket, r, t);
    if (last === got + state) return;
    last = got + state;
    fills.forEach((fill, i) => fill.setAttribute("class", "lk-fill" + (i < got ? " in" : "")));
    g.setAttribute("class", `lk-bucket ${state}${g.classList.contains("on") ? " on" : ""}`);
    const filling = state === "filling";
    const how = filling ? `${bytes(sum(grads[r].slice(0, got), x => x.size))} of ${all}` : `${all}, ${state}`;
    g.setAttribute("aria-label", `${name} of rank ${r}: ${how}`);
    const texts = [`${label}: ${how}`, `${label}: ${filling ? all : state}`, label];
    if (text) text.textContent = fit(texts, w + 1) ?? "";
  };
}

// # words
function who(list, n) {
  if (list.length < 2 || list.length < n) return `rank${list.length > 1 ? "s" : ""} ${and(list)}`;
  return n === 2 ? "both ranks" : `all ${n} ranks`;
}

/** What happens at a stop. */
function tell(run, t) {
  const { n, buckets, ranks, flights } = run;
  if (t === 0) {
    const each = `On each rank ${ranks[0].grads.length} gradients, ${bytes(run.size)}, go into `;
    const into = `${run.num} bucket${run.num === 1 ? "" : "s"}.`;
    return [["", `Backward begins at the last layer. ${each}${into}`]];
  }
  const ready = readyAt(run, t);
  const parts = ready.map((one, i) => {
    return (i ? `${one.on}: ${one.g.name}` : "") + filled(run, buckets[one.g.b], one.r, t);
  });
  for (const { b, z, on } of flights)
    if (z === t) parts.push(`${upper(buckets[b].name)} is averaged on ${who(on, n)}.`);
  for (const { b, a, on } of flights) {
    const now = on.some(r => buckets[b].full[r] === t);
    if (a === t && !now) parts.push(`The all-reduce of ${buckets[b].name} starts.`);
  }
  const over = range(n).filter(r => ranks[r].over === t);
  if (over.length) parts.push(`Backward is over${over.length < n ? " on " + who(over) : ""}.`);
  const hidden = run.hidden ? `: ${run.hidden} of the communication was hidden` : "";
  if (t === TICKS) parts.push(`Done after ${run.at(t)}${hidden}.`);
  return [[ready.length ? `${ready[0].on}: the gradient of ${ready[0].g.name} is ready` : "", parts.join(" ")]];
}

/** Gradients that are ready at a stop, grouped by ranks on which they have the same effect. */
function readyAt({ n, ranks, buckets }, t) {
  const groups = {};
  ranks.forEach(({ grads }, r) => {
    for (const g of grads.filter(g => g.z === t)) {
      (groups[g.name + (buckets[g.b].full[r] === t)] ??= []).push({ r, g });
    }
  });
  return Object.values(groups).map(group => ({
    ...group[0],
    on: upper(
      who(
        group.map(one => one.r),
        n,
      ),
    ),
  }));
}

/** What a gradient means for its bucket, and what becomes of that. */
function filled(run, bucket, r, t) {
  const { name, flights, full, grads, sizes } = bucket;
  const next = flights.find(f => f.on.includes(r) && f.a >= t);
  const all = bytes(sizes[r]);
  if (!bucket.known && !flights.length) return "; no all-reduce takes it.";
  if (full[r] > t)
    return `; ${name} has ${bytes(
      sum(
        grads[r].filter(g => g.z <= t),
        g => g.size,
      ),
    )} of ${all}.`;
  const late = next?.on.filter(q => full[q] > t);
  const busy = run.flights.find(f => f.on.includes(r) && f.a <= t && t < f.z);
  const goesOn = next?.on.some(q => run.ranks[q].over > t);
  const then = !next
    ? "Nobody sends it."
    : next.a === t
      ? `Its all-reduce starts${goesOn ? " while backward goes on" : ""}.`
      : late.length
        ? `It waits for ${who(late)}, which ${late.length > 1 ? "are" : "is"} late.`
        : busy
          ? `It waits: ${run.buckets[busy.b].name} is on the network.`
          : "It is sent later.";
  return `; ${name} is full: ${all}. ${then}`;
}

/** One rank's all-reduces take no time. */
function figures({ run: { overlap, num, n, size, hidden }, data, state }) {
  const after = text => (data.guess && state.t < TICKS ? "?" : text); // a reader guesses first
  const of = text => after(hidden ? text : "–");
  return [
    [after(seconds(overlap.step_s)), "step: backward and all-reduces"],
    [of(seconds(overlap.communication_s)), "of all-reduces"],
    [of(hidden), "of them hidden behind backward"],
    [of(seconds(overlap.exposed_s)), overlap.even ? "exposed, nothing hides it" : "exposed on the slowest rank"],
    ["" + num, `bucket${num === 1 ? "" : "s"}, ${bytes(size)} on each rank`],
  ];
}

function tellBucket(detail, { name, full, flights, sizes, grads, c, label }, { at }) {
  const r = max(
    0,
    grads.findIndex(list => list.length),
  );
  const known = full.filter(t => t >= 0);
  const times = [...new Set([min(...known), max(...known)].map(at))].join(" to ");
  const as = size => (size === sizes[r] ? "" : " as " + bytes(size));
  const sent = new Set(flights.map(({ a, z, size }) => `, all-reduced from ${at(a)} to ${at(z)}${as(size)}`));
  const line = make("p");
  const list = make("ul");
  make("i", line, { style: "--c:" + c }, label);
  line.append(" ");
  make("b", line, {}, upper(name));
  const done = known.length ? `, ${flights.length ? "full" : "complete"} after ${times}` : "";
  line.append(`: ${bytes(sizes[r])}${done}`, ...sent);
  for (const g of grads[r]) make("li", list, {}, `${g.name} ${bytes(g.size)}`);
  detail.replaceChildren(line, list);
}

// # widget
const kind = {
  clocked: true,
  below(view) {
    view.detail = make("div.lk-detail lk-listing lk-small", view.root);
    const bucket = mark => (mark.dataset.b < 0 ? null : +mark.dataset.b);
    pickable(view, "[data-b]", bucket, () => follow(view));
  },
  decode,
  stage(view, W) {
    view.told = null;
    return stage(view, W);
  },
  tell: ({ run }, k) => tell(run, run.times[k]),
  captions: ({ run }) =>
    longest(
      run.times.map(t => tell(run, t)),
      4,
    ),
  words: ({ run, state }) => `${run.at(state.t)} of ${run.at(TICKS)}`,
  parts({ over, times }) {
    const steps = times.length - 1;
    return over < TICKS
      ? [[0, over, TICKS], "01", { snap: false, steps }]
      : [[0, TICKS], "0", { snap: false, steps }];
  },
  rate: step => max(TICKS / 10, (step || 0) / 0.7),
  /** The clock continues from where it is; a run at its end stays at the end. */
  resume: ({ run }, before) =>
    before.over ? TICKS : min(TICKS, (before.t * before.run.duration_s) / run.duration_s),
  figures,
  /** The bucket that is pointed at, or the one under way. */
  after(view) {
    const { run, picked, state, detail } = view;
    const { grads } = run.ranks[0];
    const next = grads.find(g => g.z > state.t) ?? run.flights.find(f => f.z > state.t) ?? grads.at(-1);
    view.bucket = picked ?? next.b;
    if (view.told !== view.bucket) tellBucket(detail, run.buckets[view.bucket], run);
    view.told = view.bucket;
  },
  told: ({ run, bucket }) => ({ ranks: run.n, bucket }),
  turn({ field, picked, run }, by) {
    const last = run.buckets.length - 1;
    const b = clamp((picked ?? (by > 0 ? -1 : last + 1)) + by, last);
    field.querySelector(`[data-rank="0"][data-b="${b}"]`).focus();
  },
};

function follow({ field, picked }) {
  mark(field, picked);
  if (picked === null) return;
  for (const g of field.querySelectorAll("[tabindex]")) {
    g.setAttribute("tabindex", g.dataset.rank === "0" && +g.dataset.b === picked ? 0 : -1);
  }
}

define("timeline", () => (el, data, opts) => mountScene(el, data, opts, kind));
