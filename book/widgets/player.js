/* Lockstep's chunk player: draws what a trace says, and nothing that it does not say.

   One file, no build step, no dependencies, no network. It is loaded in two ways: as a deferred script it mounts every
   [data-lockstep-player] on the page; in a notebook `export default lockstepPlayer` is appended and anywidget calls
   render(). Sections: data, chunk bars, layout, stages, words, prediction, transport, player, race, mounting. */
(() => {
"use strict";

// ---------------------------------------------------------------- data: payload text -> messages and chunk contents
const WORD = "^(.{W})(.{W})(.{W})([+=?!])([^~@^]*)(?:~([^@^]*))?(?:@([^^]*))?(?:\\^(\\d+))?$";
const TICKS = 1e4;

function reader(n) { // equal texts give the same array, so that drawing can compare by identity
  const seen = {};
  const bits = (s) => Array.from({ length: n }, (_, r) => (parseInt(s[r >> 2] || "0", 16) >> (r & 3)) & 1);
  const read = (s) => (s === "?" ? null : s[0] === "(" ? s.slice(1, -1).split(",").map(Number) : bits(s));
  return (s) => (s in seen ? seen[s] : (seen[s] = read(s)));
}

function startOf(data, read) {
  const own = (r) => read("0".repeat(r >> 2) + (1 << (r & 3)).toString(16));
  return Array.from({ length: data.n }, (_, r) =>
    data.start === "own" ? Array(data.c).fill(own(r)) : data.start[r].split(".").map(read));
}

function parseWord(m, held, read, k) {
  const num = (s) => (s === undefined || s[0] === "-" ? -1 : parseInt(s, 36));
  const [src, dst, chunk] = [num(m[1]), num(m[2]), num(m[3])];
  const sent = m[6] !== undefined ? read(m[6]) : chunk < 0 ? null : held[src][chunk];
  const lost = m[4] === "!";
  return { src, dst, chunk, op: m[4], sent, after: m[5] === "" ? sent : read(m[5]), into: lost ? -1 : m[7] ? num(m[7]) : chunk,
    steps: [k, (m[8] ? +m[8] : k) + 1] };
}

function decode(data) {
  const read = reader(data.n), held = startOf(data, read), arriving = {}, items = [];
  const pattern = new RegExp(WORD.replaceAll("W", data.width));
  const run = { ...data, S: data.steps.length, items, updates: held.map((row) => row.map((v) => [{ steps: 0, time: 0, v }])) };
  const put = (r, c, v, steps, time) => { held[r][c] = v; run.updates[r][c].push({ steps, time, v }); };
  const settle = (k) => {
    for (const i of arriving[k] || []) put(i.dst, i.into, i.after, k, i.time[1]);
    for (const [at, r, c, s] of data.holds || []) if (at === k) put(r, c, read(s), k, endOf(items, k));
  };
  data.steps.forEach((line, k) => {
    settle(k);
    line.split(" ").filter(Boolean).forEach((word, i) => {
      const item = parseWord(pattern.exec(word), held, read, k);
      item.time = timesOf(data, k, i);
      items.push(item);
      if (item.into >= 0) (arriving[item.steps[1]] ||= []).push(item);
    });
  });
  settle(run.S);
  for (const row of run.updates) for (const list of row) list.byTime = [...list].sort((a, b) => a.time - b.time);
  return finish(run);
}

const timesOf = (data, k, i) => {
  const t = data.times && data.times[k];
  return t ? (t.length === 2 ? t : t.slice(2 * i, 2 * i + 2)).map((x) => (x / TICKS) * data.duration_s) : [k, k + 1];
};
const endOf = (items, k) => Math.max(0, ...items.filter((i) => i.steps[0] < k).map((i) => i.time[1]));

function finish(run) { // messages, links, stops on both clocks, final contents
  const byKey = new Map(), links = new Map();
  for (const i of run.items) {
    const key = `${i.steps[0]},${i.src},${i.dst}`, pair = `${i.src},${i.dst}`;
    if (!byKey.has(key)) byKey.set(key, { src: i.src, dst: i.dst, items: [], k: i.steps[0], steps: i.steps, time: [...i.time], pair });
    const m = byKey.get(key);
    m.items.push(i);
    m.time = [Math.min(m.time[0], i.time[0]), Math.max(m.time[1], i.time[1])];
    m.share = (m.share || 0) + shareOf(run, i.chunk);
    links.set(pair, (links.get(pair) || 0) + shareOf(run, i.chunk));
  }
  run.messages = [...byKey.values()];
  run.links = links;
  run.both = new Set([...links.keys()].filter((p) => links.has(p.split(",").reverse().join())));
  run.stops = { steps: Array.from({ length: run.S + 1 }, (_, k) => k), time: [0] };
  for (let k = 1; k <= run.S; k++) run.stops.time.push(Math.max(run.stops.time[k - 1], endOf(run.items, k)));
  run.most = Math.max(...run.messages.map((m) => m.items.length));
  run.phases = run.stops.steps.slice(1).map((k) => phaseOf(run, k - 1));
  return run;
}

const shareOf = (run, chunk) => (run.shares && chunk >= 0 ? run.shares[chunk] : 1 / run.c);
const phaseOf = (run, k) => {
  const ops = run.items.filter((i) => i.steps[0] === k).map((i) => i.op), adds = ops.filter((o) => o === "+").length;
  return adds * 2 > ops.length ? 0 : ops.includes("=") ? 1 : 2;
};

function valueAt(run, r, c, t, clock) {
  const list = clock === "time" ? run.updates[r][c].byTime : run.updates[r][c];
  let i = list.length - 1;
  while (i > 0 && list[i][clock] > t + 1e-12) i--;
  return list[i];
}

const once = (v) => v && (v.every((x) => x === 1) || v.every((x) => Math.abs(x * v.length - 1) < 1e-3));
function isDone(run, r, c, v) { // gathering alone: done when it is what the chunk's owner started with, and not empty
  if (run.goal !== "all_gather") return once(v);
  const first = run.updates.map((row) => row[c][0].v).find((x) => x && x.some((y) => y > 0));
  return !!v && !!first && v.every((x, i) => x === first[i]);
}
function tally(run, t, clock) {
  let done = 0;
  for (let c = 0; c < run.c; c++) {
    let here = 0;
    for (let r = 0; r < run.n; r++) here += isDone(run, r, c, valueAt(run, r, c, t, clock).v) ? 1 : 0;
    done += run.goal === "reduce_scatter" ? Math.min(1, here) : here;
  }
  return [done, run.goal === "reduce_scatter" ? run.c : run.c * run.n];
}

function traffic(run, t, clock) { // shares of n that have left, per link and per rank, and the end's
  const links = new Map([...run.links.keys()].map((p) => [p, 0])), ranks = Array(run.n).fill(0), total = Array(run.n).fill(0);
  for (const m of run.messages) {
    total[m.src] += m.share;
    if (m[clock][0] < t - 1e-12) { links.set(m.pair, links.get(m.pair) + m.share); ranks[m.src] += m.share; }
  }
  return { links, ranks, total };
}

// ---------------------------------------------------------------- chunk bars
const NS = "http://www.w3.org/2000/svg";
let uid = 0;
function make(tag, attrs = {}, parent = null, text) {
  const e = tag.startsWith("s:") ? document.createElementNS(NS, tag.slice(2)) : document.createElement(tag);
  for (const k in attrs) if (attrs[k] !== null) e.setAttribute(k, attrs[k]);
  if (text !== undefined) e.textContent = text;
  if (parent) parent.append(e);
  return e;
}
const rect = (x, y, w, h, attrs) => `<rect x="${+x.toFixed(2)}" y="${+y.toFixed(2)}" width="${+w.toFixed(2)}" height="${+h.toFixed(2)}" ${attrs}/>`;
const HATCH = (id) => `<defs><pattern id="${id}" width="4" height="4" patternUnits="userSpaceOnUse" patternTransform="rotate(45)"><rect width="1.6" height="4" class="lk-hatch"/></pattern></defs>`;

function segments(v, w, h, n, hatch) { // one segment per contributing rank; hollow where missing, hatched if counted twice
  if (!v) return h > 9 ? `<text x="${w / 2}" y="${h - 1.5}" class="lk-unk" text-anchor="middle">?</text>` : rect(1, h / 2 - 0.5, w - 2, 1, 'class="lk-unkline"');
  const p = h >= 8 ? 2 : 0, sw = (w - 2 * p) / n, gap = sw >= 5 ? 1 : sw >= 3 ? 0.6 : 0, out = [];
  v.forEach((x, k) => {
    if (!(x > 0)) return;
    const over = x > 1, full = h - 2 * p, tall = over ? h + 3 : Math.max(0.3, x) * full, y = over ? -1.5 : h - p - tall;
    const at = [p + k * sw + gap / 2, y, sw - gap, tall], r = `rx="${h >= 8 ? 1.5 : 0}"`;
    out.push(rect(...at, `${r} class="r${k % 16}"`));
    if (over) out.push(rect(...at, `${r} fill="url(#${hatch})"`));
  });
  return out.join("");
}

function label(v, n, short) {
  if (!v) return "?";
  const most = Math.max(...v), some = v.filter((x) => x > 0);
  if (most > 1) return "×" + +most.toFixed(2);
  if (some.length && some.every((x) => x < 1)) return short ? "~" : "mean";
  return short ? String(some.length) : `${some.length}/${n}`;
}
const asWords = (v) => {
  if (!v) return "unknown";
  const parts = v.map((x, r) => [x, r]).filter(([x]) => x > 0).map(([x, r]) => r + (x === 1 ? "" : ` ×${+x.toFixed(2)}`));
  return parts.length ? and(parts) : "nothing";
};

function bar(parent, x, y, w, h, n, hatch, text) { // text: {x, y, short, anchor} or nothing
  const g = make("s:g", { transform: `translate(${x},${y})`, class: "lk-chunk" }, parent);
  const track = make("s:rect", { width: w, height: h, rx: Math.min(4, h / 3), class: "lk-track" }, g), inner = make("s:g", {}, g);
  const note = text && make("s:text", { x: text.x, y: text.y, class: "lk-num", "text-anchor": text.anchor || "start" }, g);
  let last, mark = "";
  return {
    set(v, done) {
      if (v === last && last !== undefined) return;
      last = v;
      inner.innerHTML = segments(v, w, h, n, hatch);
      if (note) { note.textContent = label(v, n, text.short); note.setAttribute("class", "lk-num" + (!v || Math.max(...v) > 1 ? " bad" : done ? " done" : "")); }
    },
    mark(to) { if (to !== mark) { track.setAttribute("class", "lk-track " + to); mark = to; } },
  };
}

// ---------------------------------------------------------------- layout: where cards stand, and where links may run
function kindOf(run) {
  const pairs = [...run.links.keys()].map((p) => p.split(",").map(Number)), n = run.n;
  const near = pairs.every(([a, b]) => [1, n - 1].includes((b - a + n) % n));
  if (n <= 2 || near) return { kind: "ring" };
  const hub = [...Array(n).keys()].find((r) => pairs.every((p) => p.includes(r)));
  if (hub !== undefined) return { kind: "star", hub };
  const edges = new Set(pairs.map(([a, b]) => Math.min(a, b) + "," + Math.max(a, b)));
  return edges.size === n - 1 ? treeOf(edges, n) || { kind: "mesh" } : { kind: "mesh" };
}

function treeOf(edges, n) { // levels from the rank with most links; nothing if not all ranks hang together
  const next = Array.from({ length: n }, () => []);
  for (const e of edges) { const [a, b] = e.split(",").map(Number); next[a].push(b); next[b].push(a); }
  const root = next.reduce((best, list, r) => (list.length > next[best].length ? r : best), 0);
  const depth = Array(n).fill(-1), slot = Array(n), todo = [];
  let leaves = 0;
  const visit = (r, d) => {
    depth[r] = d; todo.push(r);
    const below = next[r].filter((q) => depth[q] < 0).sort((a, b) => a - b);
    const at = below.map((q) => visit(q, d + 1));
    return (slot[r] = at.length ? (at[0] + at[at.length - 1]) / 2 : leaves++);
  };
  visit(root, 0);
  return todo.length === n ? { kind: "tree", depth, slot, leaves } : null;
}

function racetrack(n, W, cw, need) { // n places clockwise from the top middle: [x, row], rows counted from the top
  let s = n === 3 ? 0 : 1, a, b, inset;
  for (; ; s++) {
    a = Math.floor((n - 2 * s) / 2); b = n - 2 * s - a;
    inset = a <= 1 && b <= 2 ? 0.14 : Math.max(a, b) === 2 ? 0.16 : Math.max(a, b) === 3 ? 0.03 : 0;
    if (s >= (n - 1) / 2 || b <= 1 || ((W - cw) * (1 - 2 * inset)) / (b - 1) >= need) break;
  }
  const span = (k, i) => cw / 2 + (W - cw) * (k === 1 ? 0.5 : inset + ((1 - 2 * inset) * i) / (k - 1));
  const top = a ? 1 : 0, places = [];
  for (let i = 0; i < a; i++) places.push([span(a, i), 0]);
  for (let j = 0; j < s; j++) places.push([W - cw / 2, top + j]);
  for (let i = b - 1; i >= 0; i--) places.push([span(b, i), top + s]);
  for (let j = s - 1; j >= 0; j--) places.push([cw / 2, top + j]);
  const first = Math.floor(Math.max(0, a - 1) / 2);
  return { places: places.slice(first).concat(places.slice(0, first)), rows: top + s + (b ? 1 : 0) };
}

function track(A, B, box, bw, bh, bend) { // the part of the way from A to B on which a bar touches neither card
  const [mx, my] = [(A[0] + B[0]) / 2, (A[1] + B[1]) / 2], dx = B[0] - A[0], dy = B[1] - A[1], len = Math.hypot(dx, dy) || 1;
  const cx = mx + bend[0] + (-dy / len) * bend[2] * 2, cy = my + bend[1] + (dx / len) * bend[2] * 2;
  const at = (u) => [(1 - u) ** 2 * A[0] + 2 * u * (1 - u) * cx + u * u * B[0], (1 - u) ** 2 * A[1] + 2 * u * (1 - u) * cy + u * u * B[1]];
  const hits = ([x, y], [px, py]) => Math.abs(x - px) < (box.cw + bw) / 2 + 4 && Math.abs(y - py) < (box.ch + bh) / 2 + 4;
  let u0 = 0, u1 = 1;
  while (u0 < 1 && hits(at(u0), A)) u0 += 0.01;
  while (u1 > 0 && hits(at(u1), B)) u1 -= 0.01;
  const room = u1 > u0 ? Math.hypot(at(u1)[0] - at(u0)[0], at(u1)[1] - at(u0)[1]) : 0;
  return room > 0 ? { at, u0, u1, room } : { at, u0: 0.4, u1: 0.6, room: 0 };
}

function bends(run, plan, p) { // chords curve in towards the middle; a pair used both ways gets two lanes
  const [a, b] = p.split(",").map(Number), [A, B] = [plan.xy[a], plan.xy[b]], n = run.n;
  const chord = plan.kind === "mesh" && ![1, n - 1].includes((b - a + n) % n) ? 0.35 : 0;
  const lane = run.both.has(p) ? (plan.size.bh + 6) / 2 + (Math.abs(A[1] - B[1]) > Math.abs(A[0] - B[0]) ? (plan.size.bw - plan.size.bh) / 2 : 0) : 0;
  return [(plan.mid[0] - (A[0] + B[0]) / 2) * chord, (plan.mid[1] - (A[1] + B[1]) / 2) * chord, run.serial ? 0 : lane];
}

function sizes(run, W, style) {
  const n = run.n, many = run.most, wide = W >= 560;
  if (style === "full") {
    const barW = wide ? 76 : 50, rowH = run.c > 6 ? 14 : 19, thin = many > 1;
    const ih = thin ? Math.max(4, Math.min(8, 40 / many - 1.5)) : 11;
    return { style, barW, barH: rowH - 6, rowH, head: 27, pad: wide ? 11 : 8, cw: barW + 30 + (wide ? 24 : 17), ch: 29 + run.c * rowH + 4,
      mw: barW * 0.72, ih, bw: barW * 0.72 + 8, bh: many * (ih + 1.5) + 6.5, travel: 34 };
  }
  const mini = style === "mini", seg = mini ? Math.max(1.5, Math.min(5, 34 / n)) : wide ? (n <= 8 ? 6 : 3) : n <= 8 ? 4 : 2;
  const rowH = mini ? Math.max(2.5, Math.min(6, 34 / run.c)) : wide ? (run.c <= 8 ? 7 : 4) : run.c <= 8 ? 6 : 3;
  const ih = many > 1 ? Math.max(1.5, Math.min(4, 26 / many - 1)) : mini ? 4 : 6, mw = Math.max(14, n * seg * 0.7);
  return { style, barW: n * seg, barH: rowH - 1, rowH, head: 15, pad: 4, cw: Math.max(24, n * seg + 8), ch: 17 + run.c * rowH + 3,
    mw, ih, bw: mw + 6, bh: many * (ih + 1) + 4, travel: mini ? 8 : 14 };
}

const inspectorSize = (run) => ({ w: 24 + Math.max(72, run.n * 6) + 34, h: 30 + run.c * 13 + 4 });

function arrange(run, shape, W, style) { // a plan whose cards don't overlap and whose bars have room, or null
  const size = sizes(run, W, style), need = size.cw + size.bw + size.travel + 8, ring = shape.kind !== "tree";
  const ranks = [...Array(run.n).keys()].filter((r) => r !== shape.hub);
  const use = shape.kind === "ring" && ranks.length <= 4 ? Math.min(W, size.cw * 4.4) : W;
  const lane = ring ? racetrack(ranks.length, use, size.cw, need) : null, rows = ring ? lane.rows : Math.max(...shape.depth) + 1;
  const limit = size.ch + size.bh + 130;
  for (let v = size.ch * (ring && lane.places.length <= 6 ? 0.62 : 1) + 8; v <= limit; v += 6) {
    const plan = { kind: shape.kind, style, size, W, rows, H: (rows - 1) * v + size.ch + 4, xy: [] };
    const y = (row) => size.ch / 2 + 2 + row * v;
    if (ring) ranks.forEach((r, i) => (plan.xy[r] = [lane.places[i][0] + (W - use) / 2, y(lane.places[i][1])]));
    else for (const r of ranks) plan.xy[r] = [size.cw / 2 + (W - size.cw) * (shape.leaves === 1 ? 0.5 : shape.slot[r] / (shape.leaves - 1)), y(shape.depth[r])];
    plan.mid = [W / 2, plan.H / 2];
    if (shape.hub !== undefined) plan.xy[shape.hub] = plan.mid;
    if (fits(run, plan)) return plan;
  }
  return null;
}

function fits(run, plan) {
  const { xy, size } = plan, gap = size.style === "mini" ? 2 : 7;
  for (let a = 0; a < xy.length; a++) for (let b = 0; b < a; b++)
    if (Math.abs(xy[a][0] - xy[b][0]) < size.cw + gap && Math.abs(xy[a][1] - xy[b][1]) < size.ch + gap) return false;
  plan.tracks = new Map([...run.links.keys()].map((p) => {
    const [a, b] = p.split(",").map(Number);
    return [p, track(xy[a], xy[b], size, size.bw, size.bh, bends(run, plan, p))];
  }));
  return [...plan.tracks.values()].every((t) => t.room >= size.travel);
}

function planStage(run, W) { // full cards if they fit, else columns of bars with one rank shown large
  const shape = kindOf(run), cap = Math.max(610, W * 0.8);
  const full = run.n <= 8 && arrange(run, shape, W, "full");
  if (full && full.H <= cap) return placeCounter(full, W >= 560);
  const box = inspectorSize(run), side = W >= 600 && shape.kind !== "ring" ? box.w + 20 : 0;
  const plan = arrange(run, shape, W - side, "compact") || (shape.kind !== "mesh" && arrange(run, { kind: "mesh" }, W - side, "compact"));
  if (!plan) return null;
  return placeInspector(run, placeCounter(plan), box, side, W);
}

function placeCounter(plan) {
  plan.top = 0;
  const alone = plan.kind === "ring" && plan.rows > 1;
  if (!alone) { plan.top = 44; plan.H += 44; }
  plan.counter = alone ? [plan.mid[0], plan.mid[1] - 4, "middle"] : [2, 18, "start"];
  return plan;
}

function placeInspector(run, plan, box, side, W) {
  const { size, xy } = plan;
  if (plan.kind === "ring") {
    const rows = [...new Set(xy.map((p) => p[1]))].sort((a, b) => a - b), grow = box.h + 60 - (plan.H - 2 * (size.ch + size.bh / 2 + 16));
    if (W - 2 * (size.cw + size.bw / 2 + 12) >= box.w && rows.length > 2) {
      const add = Math.max(0, grow) / (rows.length - 1);
      for (const p of xy) p[1] += rows.indexOf(p[1]) * add;
      plan.H += Math.max(0, grow); plan.mid[1] = plan.H / 2;
      fits(run, plan);
      plan.inspector = [W / 2 - box.w / 2, plan.mid[1] - box.h / 2 + 24];
      plan.counter = [W / 2, plan.inspector[1] - 36, "middle"];
      return plan;
    }
  }
  plan.inspector = side ? [W - box.w, plan.top] : [W / 2 - box.w / 2, plan.H + 14];
  plan.H = side ? Math.max(plan.H, plan.top + box.h + 4) : plan.H + box.h + 18;
  return plan;
}

// ---------------------------------------------------------------- stages: ring (cards and links) and matrix
function canvas(parent, W, H, name) { // two layers: what rests, and above it what moves
  const box = make("div", { class: "lk-stage", style: `height:${H}px` }, parent), id = `lk-hatch-${++uid}`;
  const rest = make("s:svg", { width: W, height: H, role: "img", "aria-label": name }, box);
  const move = make("s:svg", { width: W, height: H, "aria-hidden": "true", class: "lk-move" }, box);
  rest.innerHTML = HATCH(id);
  return { box, rest, move, hatch: id };
}

function card(parent, r, x, y, run, size, hatch, big) {
  const g = make("s:g", { transform: `translate(${x},${y})`, class: "lk-card", "data-rank": r }, parent);
  make("s:rect", { width: size.cw, height: size.ch, rx: big ? 10 : 5, class: "lk-box" }, g);
  if (big) make("s:circle", { cx: size.pad + 5, cy: 15, r: 5, class: `r${r % 16}` }, g);
  const dot = big ? 15 : 0;
  if (!big) make("s:rect", { x: size.pad, y: 12, width: size.barW, height: 2, class: `r${r % 16}` }, g);
  make("s:text", { x: size.pad + dot, y: big ? 19.5 : 9.5, class: big ? "lk-rank" : "lk-tiny" }, g, big ? `rank ${r}` : r);
  return Array.from({ length: run.c }, (_, c) =>
    bar(g, size.pad, size.head + 2 + c * size.rowH, size.barW, size.barH, run.n, hatch, big && { x: size.barW + 5, y: size.barH - 1 }));
}

function ringStage(parent, run, W, name, mini, pick) {
  const plan = mini ? arrange(run, kindOf(run), W, "mini") || arrange(run, { kind: "mesh" }, W, "mini") : planStage(run, W);
  if (!plan) return null;
  plan.top ||= 0;
  const { size } = plan, ui = canvas(parent, W, Math.ceil(plan.H), name), full = size.style === "full";
  const base = make("s:g", { transform: `translate(0,${plan.top})` }, ui.rest), over = make("s:g", { transform: `translate(0,${plan.top})` }, ui.move);
  const lines = drawLinks(base, run, plan);
  const cells = plan.xy.map(([x, y], r) => card(base, r, x - size.cw / 2, y - size.ch / 2, run, size, ui.hatch, full));
  const counter = plan.counter && drawCounter(ui.rest, plan.counter);
  const inspector = plan.inspector && drawInspector(ui, run, plan.inspector, pick);
  const place = (m, f) => { const t = plan.tracks.get(m.pair); return t.at(t.u0 + (t.u1 - t.u0) * f); };
  const movers = moverLayer(over, run, { place, size, hatch: ui.hatch });
  return { ui, cells, lines, counter, inspector, movers, full, plan };
}

function drawLinks(base, run, plan) {
  const lines = new Map();
  for (const [p, t] of plan.tracks) {
    const [a, b] = p.split(",").map(Number), edge = track(plan.xy[a], plan.xy[b], plan.size, 0, 0, bends(run, plan, p));
    const points = Array.from({ length: 25 }, (_, i) => t.at(edge.u0 + ((edge.u1 - edge.u0) * i) / 24).map((x) => x.toFixed(1)).join(" "));
    lines.set(p, make("s:path", { d: "M" + points.join("L"), class: "lk-link", "data-link": p }, base));
  }
  return lines;
}

function drawCounter(svg, [x, y, anchor]) {
  const step = make("s:text", { x, y, "text-anchor": anchor, class: "lk-count" }, svg);
  return { step, of: null, phase: make("s:text", { x, y: y + 20, "text-anchor": anchor, class: "lk-phase" }, svg) };
}

function drawInspector(ui, run, [x, y], pick) { // one rank large, with its numbers; the others are chosen by pointer or arrows
  const box = inspectorSize(run), size = { cw: box.w, ch: box.h, barW: Math.max(72, run.n * 6), barH: 9, rowH: 13, head: 26, pad: 10 };
  const holder = make("s:g", {}, ui.rest);
  let shown = -1, cells = [];
  const show = (r) => {
    if (r === shown) return cells;
    shown = r;
    holder.replaceChildren();
    cells = card(holder, r, x, y, run, size, ui.hatch, true);
    for (const g of ui.rest.querySelectorAll(".lk-card")) g.classList.toggle("on", +g.dataset.rank === r && g.parentNode !== holder);
    return cells;
  };
  const choose = (e) => { const g = e.target.closest(".lk-card"); if (g && g.parentNode !== holder) pick(+g.dataset.rank); };
  ui.rest.addEventListener("pointerover", choose);
  ui.rest.addEventListener("click", choose);
  return { show };
}

function moverLayer(parent, run, view) { // bars under way; made when they leave, taken away when they arrive
  const shown = new Map();
  const add = (m, key) => {
    const { size } = view, g = make("s:g", { class: "lk-mover" }, parent), w = size.bw, h = m.items.length * (size.ih + 1) + 5;
    make("s:rect", { x: -w / 2, y: -h / 2, width: w, height: h, rx: Math.min(6, h / 3) }, g);
    m.items.forEach((i, j) => bar(g, -size.mw / 2, -h / 2 + 3 + j * (size.ih + 1), size.mw, size.ih, run.n, view.hatch).set(i.sent));
    shown.set(key, g);
    return g;
  };
  return (flying) => { // flying: Map of key -> [message, how far 0..1]
    for (const [key, g] of shown) if (!flying.has(key)) { g.remove(); shown.delete(key); }
    for (const [key, [m, f]] of flying) {
      const [x, y] = view.place(m, f);
      (shown.get(key) || add(m, key)).setAttribute("transform", `translate(${x.toFixed(2)},${y.toFixed(2)})`);
    }
  };
}

function matrixStage(parent, run, W, name, mini) {
  const left = mini ? 16 : 46, top = mini ? 4 : 62, cw = (W - left) / run.c, beside = !mini && cw >= 78, text = !mini && cw >= 17;
  const barH = mini ? Math.max(3, Math.min(9, 110 / run.n - 2)) : run.n <= 8 ? 13 : 8, rowH = barH + (mini ? 2 : beside || !text ? 9 : 17);
  const ui = canvas(parent, W, Math.ceil(top + run.n * rowH + 4), name), barW = Math.max(2, cw - (beside ? 40 : Math.min(8, cw * 0.16)));
  const counter = mini ? null : drawCounter(ui.rest, [2, 18, "start"]);
  if (text) for (let c = 0; c < run.c; c++) make("s:text", { x: left + c * cw + barW / 2, y: top - 8, class: "lk-tiny", "text-anchor": "middle" }, ui.rest, beside ? `chunk ${c}` : c);
  const cells = Array.from({ length: run.n }, (_, r) => {
    const y = top + r * rowH, g = make("s:g", { class: "lk-row", "data-rank": r }, ui.rest);
    make("s:circle", { cx: 6, cy: y + barH / 2, r: mini ? 3 : 4, class: `r${r % 16}` }, g);
    if (!mini && rowH >= 11) make("s:text", { x: 15, y: y + barH / 2 + 4, class: "lk-tiny" }, g, r);
    const note = text && (beside ? { x: barW + 5, y: barH - 2 } : { x: barW / 2, y: barH + 11, short: true, anchor: "middle" });
    return Array.from({ length: run.c }, (_, c) => bar(g, left + c * cw, y, barW, barH, run.n, ui.hatch, note));
  });
  const size = { bw: barW + 4, mw: barW, ih: barH - (mini ? 1 : 2) };
  const place = (m, f) => [left + Math.max(0, m.items[0].chunk) * cw + barW / 2, top + barH / 2 + (m.src + (m.dst - m.src) * f) * rowH];
  const movers = moverLayer(ui.move, run, { place, size, hatch: ui.hatch });
  return { ui, cells, lines: null, counter, movers, full: true, split: true };
}

function drawStage(stage, run, t, clock, focus) {
  const flying = new Map(), out = new Set(), used = new Set(), rest = clock === "steps" && Number.isInteger(t);
  for (const m of run.messages) {
    const [a, b] = m[clock];
    if (!(t > a + 1e-12 && t < b - 1e-12)) { if (rest && m.steps[1] === t) used.add(m.pair); continue; }
    const f = clock === "steps" ? ease((t - a) / (b - a)) : (t - a) / (b - a);
    used.add(m.pair);
    m.items.forEach((i, j) => {
      out.add(i.src + "," + i.chunk);
      if (stage.split) flying.set(`${m.k},${m.pair},${j}`, [(i.alone ||= { ...m, items: [i] }), f]);
    });
    if (!stage.split) flying.set(`${m.k},${m.pair}`, [m, f]);
  }
  stage.movers(flying);
  const large = stage.inspector && stage.inspector.show(focus);
  for (let r = 0; r < run.n; r++) for (let c = 0; c < run.c; c++) {
    const u = valueAt(run, r, c, t, clock), done = isDone(run, r, c, u.v);
    const mark = out.has(r + "," + c) ? "out" : rest && t > 0 && u.steps === t ? "in" : done ? "full" : "";
    for (const cell of large && r === focus ? [stage.cells[r][c], large[c]] : [stage.cells[r][c]]) { cell.set(u.v, done); cell.mark(mark); }
  }
  if (stage.lines) drawTraffic(stage.lines, run, t, clock, used);
}

function drawTraffic(lines, run, t, clock, used) { // a link is as thick as the bytes that it has carried
  const now = traffic(run, t, clock).links, most = Math.max(...run.links.values());
  for (const [p, line] of lines) {
    line.setAttribute("class", used.has(p) ? "lk-link on" : "lk-link");
    line.style.strokeWidth = (1.5 + 3.5 * (now.get(p) / most)).toFixed(2);
  }
}
const ease = (f) => { const u = Math.min(1, f / 0.85); return u < 0.5 ? 4 * u ** 3 : 1 - (2 - 2 * u) ** 3 / 2; };

// ---------------------------------------------------------------- words: a step as a sentence, the end as a verdict
const and = (list) => (list.length < 2 ? list.join("") : list.slice(0, -1).join(", ") + " and " + list[list.length - 1]);
const number = (x) => ["no", "one", "two", "three", "four", "five", "six", "seven", "eight"][x] || String(x);
const capital = (s) => s[0].toUpperCase() + s.slice(1);
function chunksOf(items) {
  const list = items.map((i) => i.chunk).sort((a, b) => a - b), n = list.length;
  if (list[0] < 0) return "something unwatched";
  if (n === 1) return "chunk " + list[0];
  return "chunks " + (n > 2 && list[n - 1] - list[0] === n - 1 ? `${list[0]}–${list[n - 1]}` : and(list));
}

function sentence(run, k) { // [lead, rest]
  const all = run.messages.filter((m) => m.k === k), m = all[0], it = m.items.length > 1 ? "them" : "it", op = m.items[0].op;
  const into = m.items.find((i) => i.into >= 0 && i.into !== i.chunk), own = into ? `its chunk ${into.into}` : "its own";
  const does = { "+": `which adds ${it} to ${own}`, "=": `which puts ${it} in place of ${own}`, "?": "which receives " + it, "!": "and nobody receives " + it }[op];
  return [`rank ${m.src} sends ${chunksOf(m.items)} to rank ${m.dst}`, `, ${does}. ${others(run, all)}${faults(run, k)}`];
}

function others(run, all) {
  const L = all.length, each = all[0].items.length, per = each === 1 ? "one chunk" : number(each) + " chunks";
  if (L === 1) return run.links.size > 1 ? "Every other link is idle." : "";
  const [src, dst] = ["src", "dst"].map((end) => all.every((m) => m[end] === all[0][end]));
  if (dst) return `${capital(number(L))} ranks send to rank ${all[0].dst} through its one link.`;
  if (src) return `Rank ${all[0].src} sends to ${number(L)} ranks through its one link.`;
  const same = all.every((m) => m.items.length === each);
  return `${L === run.links.size ? "All " + number(L) : capital(number(L))} links carry ${same ? per : "chunks"} at once.`;
}

function faults(run, k) {
  const bad = run.items.find((i) => i.steps[0] === k && i.after && i.into >= 0 && i.after.some((x) => x > 1));
  return bad ? ` Rank ${bad.dst}'s chunk ${bad.into} now counts rank ${bad.after.findIndex((x) => x > 1)} more than once.` : "";
}

function verdict(run, clock) {
  const end = run.stops[clock][run.S], [done, all] = tally(run, end, clock);
  if (done === all) return { ok: true, text: run.goal === "reduce_scatter" ? " Done: every chunk is complete on one rank." : " Done: every rank holds every chunk." };
  for (let r = 0; r < run.n; r++) for (let c = 0; c < run.c; c++) {
    const { v } = valueAt(run, r, c, end, clock);
    if (!isDone(run, r, c, v) && run.goal !== "reduce_scatter") return { ok: false, text: ` Wrong at the end: ${done} of ${all} chunks are complete. Rank ${r}'s chunk ${c} holds ${holds(v)}.` };
  }
  return { ok: false, text: ` Wrong at the end: ${done} of ${all} chunks are complete.` };
}
const holds = (v) => (v ? (v.some((x) => x > 0) ? "data of rank " + asWords(v) : "nothing") : "something unknown");

const SI = ["", "k", "M", "G", "T"];
function unit(x, u) { let i = 0; while (x >= 999.5 && i < 4) { x /= 1000; i++; } return `${+x.toPrecision(3)} ${SI[i]}${u}`; }
const seconds = (s) => (s >= 1 ? `${s.toFixed(2)} s` : s >= 1e-3 ? `${(s * 1e3).toFixed(s < 0.1 ? 2 : 1)} ms` : `${(s * 1e6).toFixed(1)} µs`);
const inN = (x) => x.toFixed(2) + " n";
function sourceOf(run) {
  const made = { simulated: "simulated", executed: `executed on ${run.n} ranks`, recorded: `recorded from your run · ${run.n} ranks`, instrumented: `instrumented · ${run.n} ranks` }[run.from];
  return [made, run.backend, run.bytes && `n = ${unit(run.bytes, "B")}`].filter(Boolean).join(" · ");
}

function figures(run, t, clock) { // the numbers row: [value, meaning]
  const now = traffic(run, t, clock), stops = run.stops[clock], k = stops.findIndex((s) => s >= t - 1e-12), top = Math.max(...now.total);
  const even = now.total.every((x) => Math.abs(x - top) < 1e-9), who = now.total.indexOf(top), [done, all] = tally(run, t, clock);
  const rule = run.goal === "all_reduce" ? ["2(N−1)/N", (2 * (run.n - 1)) / run.n] : ["(N−1)/N", (run.n - 1) / run.n];
  const formula = even && Math.abs(top - rule[1]) < 1e-6 ? `: ${rule[0]} · n` : Math.abs(top - run.n + 1) < 1e-6 ? ": (N−1) · n" : "";
  const [busy, most] = [...now.links].reduce((a, b) => (b[1] > a[1] + 1e-12 ? b : a));
  return [[`${k} / ${run.S}`, "rounds"], [inN(even ? Math.max(...now.ranks) : now.ranks[who]), even ? "sent per rank, so far" : `sent by rank ${who}, so far`],
    [inN(top), "at the end" + formula], [`${done} / ${all}`, "chunks complete"],
    [inN(most), most ? `busiest link, ${busy.replace(",", " → ")}` : "busiest link"]];
}

// ---------------------------------------------------------------- prediction: choose before it moves
function question(run, k) { // alternates between "which chunk goes" and "what will it hold"
  const all = run.messages.filter((m) => m.k === k && m.items[0].into >= 0), m = all[(k * 3) % (all.length || 1)];
  if (!m) return null;
  const i = m.items[0], before = valueAt(run, i.dst, i.into, k, "steps").v;
  if (k % 2 === 0 && m.items.length === 1 && run.c > 1) {
    const picks = [...Array(run.c).keys()].map((d) => (i.chunk + d) % run.c).slice(0, 5).sort((a, b) => a - b);
    return { text: `Which chunk does rank ${m.src} send to rank ${m.dst} next?`, options: picks.map((c) => ({ text: "chunk " + c, right: c === i.chunk })), why: whySent(run, i, k) };
  }
  const sum = before && i.sent && before.map((x, r) => x + i.sent[r]), texts = new Set(), options = [];
  for (const v of [i.after, sum, i.sent, before, i.sent && i.sent.map(() => 1)]) {
    const text = v && asWords(v);
    if (text && !texts.has(text) && options.length < 4) { texts.add(text); options.push({ text, v, right: v === i.after }); }
  }
  options.sort((a, b) => (a.text < b.text ? -1 : 1));
  return { text: `Whose data will rank ${i.dst}'s chunk ${i.into} hold after this step?`, options, why: whyHeld(i, before) };
}
function whySent(run, i, k) {
  const got = run.items.find((j) => j.steps[0] === k - 1 && j.dst === i.src && j.into === i.chunk);
  return got ? `rank ${i.src} passes on chunk ${i.chunk}, which it got from rank ${got.src} a step ago.` : `rank ${i.src} sends chunk ${i.chunk}, of which it holds rank ${asWords(i.sent)}.`;
}
const whyHeld = (i, before) => (i.op === "=" ? `what arrives (${asWords(i.sent)}) takes the place of what was there.` : `it held ${asWords(before)}, and ${asWords(i.sent)} arrives: it now holds ${asWords(i.after)}.`);

function quiz(parent, onAnswer) {
  const box = make("div", { class: "lk-quiz", hidden: "" }, parent), score = { right: 0, asked: 0 };
  const ask = make("p", { class: "lk-ask" }, box), options = make("div", { class: "lk-options" }, box), said = make("p", { class: "lk-said", role: "status" }, box);
  let at = null;
  const answer = (q, o) => {
    score.asked++; score.right += o.right ? 1 : 0;
    said.className = "lk-said " + (o.right ? "ok" : "no");
    said.textContent = `${o.right ? "Right" : "Not quite"}: ${q.why} ${score.right} of ${score.asked} right.`;
    at = "answered"; options.replaceChildren(); ask.textContent = "";
    onAnswer();
  };
  const put = (run, k) => {
    const q = k < run.S ? question(run, k) : null;
    ask.textContent = q ? q.text : k >= run.S ? "That was the last step." : "";
    options.replaceChildren(...(q ? q.options : []).map((o) => {
      const b = make("button", { type: "button", class: "lk-pill", "data-right": o.right }, null, o.text);
      b.addEventListener("click", () => answer(q, o));
      return b;
    }));
  };
  return { show(run, k, on, key) {
    box.hidden = !on;
    if (!on) { at = null; said.textContent = ""; return; }
    if (!Number.isInteger(k)) return void (options.replaceChildren(), ask.textContent = "");
    if (at !== key) { at = key; put(run, k); }
  } };
}

// ---------------------------------------------------------------- transport: where we are, and how it moves on
const ICONS = { start: "M4 3h2v10H4zM13 3 7 8l6 5z", back: "M10 3 5 8l5 5z", play: "M5 3l8 5-8 5z", pause: "M4 3h3v10H4zM9 3h3v10H9z", next: "M6 3l5 5-5 5z" };
const SPEEDS = [0.5, 1, 2, 4];
const still = () => matchMedia("(prefers-reduced-motion: reduce)").matches;

function transport(bar, state, draw) { // state: {t, speed, stops(), rate()}; draws after every change
  let frame = 0, last = 0, until = null;
  const icon = (b, name, words) => { b.innerHTML = `<svg viewBox="0 0 16 16" aria-hidden="true"><path d="${ICONS[name]}"/></svg>`; b.setAttribute("aria-label", words); b.title = words; };
  const button = (name, words, act) => { const b = make("button", { type: "button", class: "lk-btn" }, bar); icon(b, name, words); b.addEventListener("click", act); return b; };
  const end = () => state.stops()[state.stops().length - 1], near = () => 1e-9 * end();
  const after = () => state.stops().find((s) => s > state.t + near()), before = () => [...state.stops()].reverse().find((s) => s < state.t - near());
  const go = (t) => { state.t = Math.max(0, Math.min(end(), t)); draw(); };
  const stop = () => { cancelAnimationFrame(frame); until = null; state.playing = false; };
  const tick = (now) => {
    const goal = until ?? end(), dt = last ? Math.min(0.1, (now - last) / 1000) : 0;
    if (still()) { if (!last || now - last > 900 / state.speed) { last = now; state.t = after() ?? end(); } }
    else { last = now; state.t = Math.min(goal, state.t + dt * state.rate() * state.speed); }
    if (state.t >= goal - near()) { state.t = goal; stop(); } else frame = requestAnimationFrame(tick);
    draw();
  };
  const run = (goal) => { cancelAnimationFrame(frame); until = goal; last = 0; state.playing = true; frame = requestAnimationFrame(tick); draw(); };
  const self = {
    go(t) { stop(); go(t); }, stop() { stop(); draw(); },
    back() { stop(); go(before() ?? 0); },
    next() { const goal = after(); if (goal === undefined) return; if (still()) self.go(goal); else { const from = state.playing && until; stop(); if (from) go(from); run(after() ?? end()); } },
    toggle() { if (state.playing) return self.stop(); if (state.t >= end() - near()) state.t = 0; run(state.wait && state.wait() ? after() : null); },
    paint() { icon(play, state.playing ? "pause" : "play", state.playing ? "Pause" : "Play"); },
    end,
  };
  button("start", "Back to the start", () => self.go(0));
  button("back", "One step back", self.back);
  const play = button("play", "Play", self.toggle);
  play.classList.add("main");
  button("next", "One step forward", self.next);
  return self;
}

function keyboard(root, control, turn) { // keys act in the player and never reach the notebook around it
  root.addEventListener("keydown", (e) => {
    e.stopPropagation();
    if (e.target.closest("select, summary") || e.altKey || e.ctrlKey || e.metaKey) return;
    const acts = { ArrowRight: control.next, ArrowLeft: control.back, Home: () => control.go(0), End: () => control.go(control.end()),
      ArrowDown: () => turn(1), ArrowUp: () => turn(-1) };
    const act = e.key === " " && !e.target.closest("button") ? control.toggle : acts[e.key];
    if (act) { e.preventDefault(); act(); }
  });
}

function scrubber(parent, control) { // the steps themselves, as wide as they are long
  const box = make("div", { class: "lk-scrub", role: "slider", tabindex: 0, "aria-label": "Step", "aria-valuemin": 0 }, parent);
  let ticks = [], stops = [];
  const seek = (e, snap) => {
    const { left, width } = box.getBoundingClientRect(), t = (Math.max(0, Math.min(1, (e.clientX - left) / width))) * stops[stops.length - 1];
    control.go(snap ? stops.reduce((a, b) => (Math.abs(b - t) < Math.abs(a - t) ? b : a)) : t);
  };
  box.addEventListener("pointerdown", (e) => { box.setPointerCapture(e.pointerId); seek(e); });
  box.addEventListener("pointermove", (e) => { if (e.buttons) seek(e); });
  box.addEventListener("pointerup", (e) => seek(e, true));
  return {
    build(list, phases) {
      stops = list;
      box.classList.toggle("many", list.length > 24);
      ticks = list.slice(1).map((s, k) => { const d = make("div", { class: `lk-tick p${phases[k]}`, style: `flex-grow:${Math.max((s - list[k]) / s || 0, 1e-3) * s}` }); make("i", {}, d); return d; });
      box.replaceChildren(...ticks);
      box.setAttribute("aria-valuemax", ticks.length);
    },
    set(t, words) {
      const k = stops.findIndex((s) => s >= t - 1e-12);
      ticks.forEach((d, i) => {
        d.classList.toggle("now", i === k - 1);
        d.firstChild.style.width = 100 * Math.max(0, Math.min(1, (t - stops[i]) / (stops[i + 1] - stops[i] || 1))) + "%";
      });
      box.setAttribute("aria-valuenow", k);
      box.setAttribute("aria-valuetext", words);
    },
  };
}

// ---------------------------------------------------------------- the player of one run at a time
function frameOf(el, data) {
  const root = make("section", { class: "lockstep-player", "aria-label": data.title, tabindex: 0 }, el), head = make("div", { class: "lk-head" }, root);
  make("b", {}, head, data.title);
  return { root, source: make("span", {}, head), caption: make("p", { class: "lk-caption", "aria-live": "polite" }, root), alert: make("p", { class: "lk-alert", role: "alert", hidden: "" }, root) };
}
function pill(parent, text, words, act) {
  const b = make("button", { type: "button", class: "lk-pill", title: words }, parent, text);
  b.addEventListener("click", () => act(b));
  return b;
}
const speedPill = (parent, state) => pill(parent, state.speed + "×", "Speed", (b) => { state.speed = SPEEDS[(SPEEDS.indexOf(state.speed) + 1) % 4]; b.textContent = state.speed + "×"; });

function mountPlay(el, data, opts) {
  const ui = frameOf(el, data), { root } = ui, decoded = {}, at = data.axes.map((_, i) => data.runs[0].at[i]);
  const find = () => data.runs.findIndex((r) => r.at.every((x, i) => x === at[i]));
  const state = { t: 0, speed: 1, playing: false, clock: "steps", focus: 0, predict: data.predict, stops: () => run.stops[state.clock], wait: () => state.predict,
    rate: () => (state.clock === "steps" ? 1 / 0.8 : pace) };
  let run, stage, pace, said = "";
  const test = quiz(root, () => control.next()), holder = make("div", { class: "lk-holder" }, root), bar = make("div", { class: "lk-bar" }, root);
  const control = transport(bar, state, draw), scrub = scrubber(bar, control), more = make("div", { class: "lk-more" }, bar);
  const cells = Array.from({ length: 5 }, () => { const d = make("div", {}, foot()); return [make("strong", {}, d), make("span", {}, d)]; });
  const details = make("details", { class: "lk-bytes" }, root), list = (make("summary", {}, details, "Bytes per link"), make("ul", {}, details));
  function foot() { return root.querySelector(".lk-foot") || make("div", { class: "lk-foot" }, root); }

  speedPill(more, state);
  const clockPill = pill(more, "", "Whether all steps take equally long, or modelled time passes", () => { const k = scrubStep(); state.clock = state.clock === "steps" ? "time" : "steps"; control.stop(); rebuild(); control.go(state.stops()[k]); });
  data.axes.forEach((axis, i) => {
    const lab = make("label", { class: "lk-pill lk-select" }, more, axis.label + " "), sel = make("select", { "aria-label": axis.label }, lab);
    axis.values.forEach((v, j) => make("option", { value: j }, sel, v));
    sel.addEventListener("change", () => { at[i] = +sel.value; choose(); });
  });
  const viewPill = pill(more, "", "Ring or matrix", () => { state.view = state.view === "ring" ? "matrix" : "ring"; build(); });
  const predictPill = pill(more, "predict", "Choose before it moves", () => { state.predict = !state.predict; control.go(state.stops()[scrubStep()]); });
  const scrubStep = () => Math.max(0, state.stops().findIndex((s) => s >= state.t - 1e-12));

  function choose() {
    const i = find() < 0 ? 0 : find();
    run = decoded[i] ||= decode(data.runs[i]);
    pace ||= run.stops.time[run.S] / run.S / 0.8;
    state.focus = Math.min(state.focus, run.n - 1);
    state.clock = run.times && data.clock === "time" ? "time" : "steps";
    state.view = data.view === "auto" ? (run.n > 8 ? "matrix" : "ring") : data.view;
    ui.source.textContent = sourceOf(run);
    rebuild(); stage = null;
    control.go(0);
    build();
  }
  function rebuild() {
    clockPill.hidden = !run.times;
    clockPill.textContent = state.clock === "time" ? "time" : "steps";
    scrub.build(state.stops(), run.phases);
  }
  function build() {
    holder.replaceChildren();
    const W = Math.floor(holder.clientWidth) || 320, ring = state.view === "ring" && ringStage(holder, run, W, data.title, false, (r) => { state.focus = r; draw(); });
    stage = ring || matrixStage(holder, run, W, data.title);
    viewPill.textContent = state.view === "ring" ? "matrix" : "ring";
    build.width = W;
    draw();
  }
  function draw() {
    if (!stage) return;
    const { t, clock } = state, k = scrubStep();
    drawStage(stage, run, t, clock, state.focus);
    scrub.set(t, `step ${k} of ${run.S}`);
    describe(k, t, clock);
    figures(run, t, clock).forEach(([value, means], i) => { cells[i][0].textContent = value; cells[i][1].textContent = means; });
    control.paint();
    predictPill.classList.toggle("on", state.predict);
    predictPill.setAttribute("aria-pressed", state.predict);
    test.show(run, t === state.stops()[k] ? k : k - 0.5, state.predict && !(state.playing && t === state.stops()[k]), `${find()},${k}`);
    Object.assign(root.dataset, { step: k, steps: run.S, playing: state.playing, view: stage.split ? "matrix" : "ring", ranks: run.n, clock });
    opts.onChange?.({ step: k, playing: state.playing });
  }
  function describe(k, t, clock) {
    const done = k >= run.S && t >= state.stops()[run.S], key = [find(), k, done, state.predict].join();
    if (stage.counter) {
      stage.counter.step.textContent = k ? `${k} of ${run.S}` : `${run.S} steps`;
      stage.counter.phase.textContent = (k ? run.names[run.phases[k - 1]] || "" : "start") + (clock === "time" ? ` · ${seconds(t)}` : "");
    }
    if (key === said) return;
    said = key;
    ui.caption.setAttribute("aria-live", state.playing && !state.wait() ? "off" : "polite");
    ui.caption.replaceChildren(...captionOf(k, done, clock));
    root.classList.toggle("wrong", done && !verdict(run, clock).ok);
    if (details.open || k === 0) listLinks();
  }
  function captionOf(k, done, clock) {
    if (!k) return [run.goal === "all_gather" ? "Start: each chunk is on one rank only." : "Start: every rank holds only its own data in every chunk."];
    const [lead, rest] = sentence(run, k - 1), end = done && verdict(run, clock);
    return [`Step ${k}: `, make("b", {}, null, lead), rest, ...(end ? [make("span", { class: end.ok ? "lk-done" : "lk-wrong" }, null, end.text)] : [])];
  }
  function listLinks() {
    list.replaceChildren(...[...traffic(run, state.t, state.clock).links].map(([p, x]) =>
      make("li", {}, null, `${p.replace(",", " → ")}: ${inN(x)}${run.bytes ? ` (${unit(x * run.bytes, "B")})` : ""}`)));
  }
  details.addEventListener("toggle", listLinks);
  keyboard(root, control, (d) => { state.focus = (state.focus + d + run.n) % run.n; draw(); });
  choose();
  const watch = new ResizeObserver(() => { if (Math.abs(Math.floor(holder.clientWidth) - build.width) > 1 && holder.clientWidth) build(); });
  watch.observe(holder);
  return { root, control, state, alert: ui.alert, destroy() { control.stop(); watch.disconnect(); root.remove(); } };
}

// ---------------------------------------------------------------- the race: several runs on one clock
function mountRace(el, data, opts) {
  const ui = frameOf(el, data), { root } = ui, runs = data.runs.map(decode), names = data.axes[0].values;
  const total = Math.max(...runs.map((r) => r.stops.time[r.S])), stops = [...new Set(runs.flatMap((r) => r.stops.time))].sort((a, b) => a - b);
  const state = { t: 0, speed: 1, playing: false, view: data.view === "matrix" || runs[0].n > 8 ? "matrix" : "ring", stops: () => stops, rate: () => total / 9 };
  const field = make("div", { class: "lk-field" }, root), bar = make("div", { class: "lk-bar" }, root), control = transport(bar, state, draw);
  const scrub = scrubber(bar, control), more = make("div", { class: "lk-more" }, bar);
  speedPill(more, state);
  const viewPill = pill(more, "", "Ring or matrix", () => { state.view = state.view === "ring" ? "matrix" : "ring"; build(); });
  const lanes = runs.map((run, i) => {
    const box = make("div", { class: "lk-lane" }, field), head = make("b", {}, box, names[i]), holder = make("div", { class: "lk-holder" }, box);
    const line = make("div", { class: "lk-line" }, box), fill = make("i", {}, line), text = make("p", {}, box);
    fill.style.maxWidth = (100 * run.stops.time[run.S]) / total + "%";
    return { run, head, holder, fill, text, place: 1 + runs.filter((r) => r.stops.time[r.S] < run.stops.time[run.S] * (1 - 1e-9)).length };
  });
  scrub.build([0, total], [2]);
  function build() {
    for (const lane of lanes) {
      lane.holder.replaceChildren();
      const W = Math.floor(lane.holder.clientWidth) || 200, name = lane.head.textContent;
      lane.stage = (state.view === "ring" && ringStage(lane.holder, lane.run, W, name, true)) || matrixStage(lane.holder, lane.run, W, name, true);
      build.width = W;
    }
    viewPill.textContent = state.view === "ring" ? "matrix" : "ring";
    draw();
  }
  function draw() {
    for (const lane of lanes) if (lane.stage) drawLane(lane);
    control.paint();
    scrub.set(state.t, seconds(state.t));
    const done = lanes.filter((l) => state.t >= l.run.stops.time[l.run.S] - 1e-12).sort((a, b) => a.place - b.place).map((l) => l.head.textContent);
    const text = !state.t ? "All start together, on equal links. Which is done first?" : done.length ? `After ${seconds(lastEnd(done.length))}: ${and(done)} ${done.length > 1 ? "are" : "is"} done.` : "None is done yet.";
    if (ui.caption.textContent !== text) ui.caption.textContent = text;
    ui.source.textContent = `${sourceOf(runs[0])} · ${seconds(state.t)}`;
    Object.assign(root.dataset, { step: stops.filter((s) => s <= state.t).length - 1, playing: state.playing, view: state.view });
    opts.onChange?.({ step: +root.dataset.step, playing: state.playing });
  }
  const lastEnd = (k) => lanes.map((l) => l.run.stops.time[l.run.S]).sort((a, b) => a - b)[k - 1];
  function drawLane({ run, stage, fill, text, place }) {
    const end = run.stops.time[run.S], t = Math.min(state.t, end), over = state.t >= end - 1e-12, links = [...run.links].reduce((a, b) => (b[1] > a[1] + 1e-12 ? b : a));
    drawStage(stage, run, t, "time", -1);
    fill.style.width = (100 * t) / total + "%";
    const ranks = Array(run.n).fill(0);
    for (const m of run.messages) { ranks[m.src] += m.share; }
    text.textContent = `${over ? `#${place} after ${seconds(end)}` : "under way"} · busiest link ${links[0].replace(",", " → ")}: ${inN(links[1])} · most sent by a rank: ${inN(Math.max(...ranks))}`;
    fill.classList.toggle("over", over);
  }
  keyboard(root, control, () => {});
  build();
  const watch = new ResizeObserver(() => { const W = lanes[0].holder.clientWidth; if (W && Math.abs(Math.floor(W) - build.width) > 1) build(); });
  watch.observe(field);
  return { root, control, state, alert: ui.alert, destroy() { control.stop(); watch.disconnect(); root.remove(); } };
}

// ---------------------------------------------------------------- mounting: on a page, and in a notebook
function mount(el, data, opts = {}) {
  const player = (data.kind === "race" ? mountRace : mountPlay)(el, data, opts);
  const full = () => player.control.go(player.control.end());
  addEventListener("beforeprint", full);
  return { ...player,
    step(k) { const s = player.state.stops(); player.control.go(s[Math.max(0, Math.min(k, s.length - 1))]); },
    playing(on) { if (on !== player.state.playing) player.control.toggle(); },
    error(text) { player.alert.textContent = text; player.alert.hidden = !text; },
    destroy() { removeEventListener("beforeprint", full); player.destroy(); } };
}

function render({ model, el }) { // anywidget: payload, step, playing and error are traits of the Python widget
  let player, quiet = false;
  const push = (s) => { if (quiet) return; for (const k in s) if (model.get(k) !== s[k]) model.set(k, s[k]); model.save_changes(); };
  const draw = () => { player?.destroy(); quiet = true; player = mount(el, JSON.parse(model.get("payload")), { onChange: push }); player.error(model.get("error")); quiet = false; };
  const heard = { "change:payload": draw, "change:error": () => player.error(model.get("error")),
    "change:step": () => { if (model.get("step") !== +player.root.dataset.step) player.step(model.get("step")); },
    "change:playing": () => player.playing(model.get("playing")) };
  draw();
  if (model.get("step")) player.step(model.get("step"));
  for (const k in heard) model.on(k, heard[k]);
  return () => { for (const k in heard) model.off(k, heard[k]); player.destroy(); };
}

function scan(root = document) {
  for (const el of root.querySelectorAll("[data-lockstep-player]:not([data-mounted])")) {
    const data = JSON.parse(el.dataset.lockstepPlayer);
    el.dataset.mounted = "";
    el.replaceChildren();
    mount(el, data);
  }
}
globalThis.lockstepPlayer = { mount, scan, render };
if (document.readyState === "loading") document.addEventListener("DOMContentLoaded", () => scan());
else scan();
})();
